"""The place of a crash is read from faulthandler's dump."""

from __future__ import annotations

import subprocess
import sys

import pytest

from elastic_trainer.host.stacks import name_of, place_of

IN_PYTHON = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
def inner(): ctypes.string_at(0)
def outer(): inner()
outer()"""
IN_C = """
import ctypes, time
libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
def waits():
    libc.pthread_create(ctypes.byref(thread), None, libc.abort, None)
    time.sleep(600)
waits()"""


def dump_of(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", code],
                          capture_output=True,
                          text=True)
    return done.stderr.splitlines()


def test_the_place_is_the_newest_frame_of_the_thread_that_died() -> None:
    """And who called it, up to three."""
    place = place_of(["a line", "", *dump_of(IN_PYTHON)])
    assert place.startswith(
        "string_at (") and "called by inner (<string>:4), called by outer (<string>:5)" in place
    assert place.count("called by") == 2


def test_the_place_is_found_behind_an_unfinished_progress_bar() -> None:
    """The report begins where the bar has ended, within its line."""
    first, *more = dump_of(IN_PYTHON)
    assert place_of([f"epoch 1:  40%|####      | 4/10{first}", *more]) == place_of([first, *more])


def test_the_place_is_the_main_threads_when_a_thread_without_python_died() -> None:
    """As when Gloo's thread dies, and the main thread waits in `hvd.init()`."""
    assert place_of(dump_of(IN_C)).startswith("waits (<string>:")


@pytest.mark.parametrize("lines",
                         [[], ["Traceback (most recent call last):", '  File "a.py", line 1, in f'],
                          ["Fatal Python error: Aborted", ""]])
def test_the_place_of_a_crash_is_unknown_without_a_report(lines: list[str]) -> None:
    """An exception is none, and a process may die without a frame."""
    assert place_of(lines) == ""


def test_a_signal_has_its_name() -> None:
    """Also one that has none."""
    assert [name_of(11), name_of(6), name_of(63)] == ["SIGSEGV", "SIGABRT", "signal 63"]
