"""A worker that is forked is what a worker is that boots: for its script, and for who waits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import DEADLINE_S, is_running
from forks import BOOT_S, OF_A_DRIVER, allow, forked
from waiting import until

from elastic_trainer.driver.standby_shim import through_shim

SCRIPT = '''
if False:
    import quick_boot
import atexit, json, os, random, signal, sys, threading, time
open("seen.json", "w").write(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "name": __name__, "file": __file__,
    "path": sys.path, "cwd": os.getcwd(), "environment": dict(os.environ),
    "session": os.getsid(0) == os.getpid(), "open": os.listdir("/proc/self/fd"),
    "seeds": [random.random(), hash("a")], "pid": os.getpid(), "torch": "torch" in sys.modules,
    "addresses": [id(bytearray(size)) for size in (16, 64, 256)],
}))
os.rename("seen.json", "seen")
print("printed", file=sys.stderr)
def ends(how):
    if how == "raises":
        raise ValueError("of the script")
    if how == "waits":
        signal.pause()
    sys.exit({"returns": None, "exits": 7, "says": "a text"}[how])
atexit.register(print, "at the end")
threading.Thread(target=lambda: (time.sleep(0.1), print("of a thread"))).start()
ends(sys.argv[1])
'''


def started(folder: Path, how: str, forks: bool, at_once: int = 1,
            **more: str) -> subprocess.Popen[str]:
    """Start the script, in a fork or as it is."""
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(folder / "script.py"), how]
    env = OF_A_DRIVER | os.environ | {"PYTHONUNBUFFERED": "1"}
    env |= (forked(command, folder) if forks else {}) | more
    allow(folder, at_once)
    return subprocess.Popen(through_shim(command, env, is_local=True), env=env, cwd=folder,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def seen(folder: Path) -> dict[str, Any]:
    """Return what the script has seen, once it is there."""
    found: dict[str, Any] = until(lambda: json.loads((folder / "seen").read_text()))
    (folder / "seen").unlink()
    return found


@pytest.mark.parametrize("how", ["returns", "exits", "says", "raises"])
def test_a_script_sees_and_ends_as_one_that_boots(tmp_path: Path, how: str) -> None:
    """Its arguments, paths, variables and streams; its exit code, and each line of a traceback."""
    of = dict[bool, Any]()
    for forks in False, True:
        process = started(tmp_path, how, forks)
        output = process.communicate(timeout=DEADLINE_S)
        found = seen(tmp_path)
        assert found.pop("torch") == forks
        found["environment"].pop("ELASTIC_TRAINER_STANDBY_DIR", None)
        for own in "pid", "seeds", "addresses", "session":
            found.pop(own)
        found["open"] = len(found["open"])
        of[forks] = process.returncode, output, found
    assert of[True] == of[False]


def test_two_forks_differ_where_two_processes_do(tmp_path: Path) -> None:
    """In random numbers and in addresses; the hashes of texts are the run's."""
    found = list[dict[str, Any]]()
    for _ in range(2):
        assert started(tmp_path, "returns", forks=True).wait(DEADLINE_S) == 0
        found.append(seen(tmp_path))
    one, other = found
    assert one["seeds"][0] != other["seeds"][0] and one["seeds"][1] == other["seeds"][1]
    assert one["addresses"] != other["addresses"] and one["session"] and other["session"]


def test_a_fork_ends_with_its_shim_and_takes_its_signals(tmp_path: Path) -> None:
    """A signal to the one ends the other, and the shim reports which."""
    process = started(tmp_path, "waits", forks=True)
    pid = seen(tmp_path)["pid"]
    assert pid != process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == -signal.SIGTERM and not is_running(pid)
    process = started(tmp_path, "waits", forks=True)
    pid = seen(tmp_path)["pid"]
    process.kill()
    until(lambda: not is_running(pid))


def test_a_script_boots_when_a_variable_differs_that_is_read_at_a_start(tmp_path: Path) -> None:
    """The shim then runs the command as it is."""
    process = started(tmp_path, "returns", True, OMP_NUM_THREADS="3")
    assert process.wait(DEADLINE_S) == 0
    found = seen(tmp_path)
    assert found["pid"] == process.pid and not found["torch"]


def test_a_newcomer_begins_as_late_as_one_that_boots(tmp_path: Path) -> None:
    begun = time.monotonic()
    process = started(tmp_path, "returns", True, at_once=0)
    assert process.wait(DEADLINE_S) == 0
    assert seen(tmp_path)["torch"] and time.monotonic() - begun >= BOOT_S
