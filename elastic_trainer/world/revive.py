"""Restart this process in place, with its live state: the last resort inside `hvd.init()`.

C++ exception in `hvd.init()`, or a member that died during it → here → exec → the training
continues at the same step

Why: the death of one participant in `hvd.init()` aborts all of them (F1). In a Horovod without
06-init-fails.patch `GlooContext::Initialize` runs in Horovod's background thread outside any try
(operations.cc:444). With that patch Gloo may still throw in a thread of its own. Instead of the
abort, `std::set_terminate` runs our function: it writes the live state into memory without a name
(memfd), and calls `exec` with the same command. The pid stays, so driver and ssh notice nothing.

What always holds:
1. Parameters that may be partly updated (`LiveState.is_applying`) are never written. Then the
   successor returns as a newcomer and receives the state.
2. The live state is read once, by the process that wrote it (same pid). Only that process holds it,
   so the kernel frees the memory if the process ends, by SIGKILL too.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.values.layout import LayoutError, byte_view, decode, pack

_TERMINATE = ctypes.CFUNCTYPE(None)
_WHAT = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)
_kept: list[Any] = []  # a C callback must outlive its registration


def on_terminate(act: Callable[[str], None]) -> None:
    """Call `act` with the text of an uncaught C++ exception that would abort this process.

    Any thread may call `act`, which should not return.
    """
    def terminate() -> None:
        text = ""
        with suppress(Exception):  # without the text the restart works, too
            text = _uncaught()
        act(text)

    callback = _TERMINATE(terminate)
    _kept.append(callback)
    # std::set_terminate, in the mangling of the Itanium ABI
    ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE(callback)


def _uncaught() -> str:
    """Return the text of this thread's uncaught C++ exception if it is one of Gloo or of the
    standard library; of others the name of the type.

    Source: Itanium C++ ABI, 2.9.4 (the second pointer of a type_info is its name) and 2.5.2 (`what`
    is the third virtual function of a std::exception, after two destructors); the calling
    convention of x86-64 for what `current_exception` returns.
    """
    runtime, thrown = ctypes.CDLL("libstdc++.so.6"), ctypes.c_void_p()
    runtime.__cxa_current_exception_type.restype = ctypes.c_void_p
    kind = runtime.__cxa_current_exception_type()
    if not kind or platform.machine() != "x86_64":
        return ""
    name = ctypes.cast(kind, ctypes.POINTER(ctypes.c_char_p))[1] or b""
    # C++ can throw any type, and only these have a `what`.
    if not name.startswith((b"N4gloo", b"St")):
        return name.decode(errors="replace")
    # A std::exception_ptr is a pointer to the exception.
    runtime._ZSt17current_exceptionv(ctypes.byref(thrown))
    table = ctypes.cast(thrown, ctypes.POINTER(ctypes.c_void_p))[0]
    what = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))[2] or 0
    return (_WHAT(what)(thrown) or b"").decode(errors="replace")


def write_live_state(state: LiveState, prepared: dict[str, Any],
                     facts: dict[str, Any]) -> int | None:
    """Write the live state for this process's successor; return the descriptor of its memory.

    Returns None if this process holds no whole state. `prepared` has the reduced flat buffers if
    the state is prepared: the vote may have passed on another worker.
    """
    if not state.has_state or state.is_applying:
        return None
    moment = _moment(state)
    packed = pack({
        "pid": os.getpid(), "state": state.values(), "in_flight": state.in_flight(),
        "prepared": prepared, "facts": json.dumps(facts)}, state.classes)
    try:
        descriptor = os.memfd_create("live-state")
    except OSError:
        return None  # no descriptor is left: the successor returns as a newcomer
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(len(packed.header).to_bytes(8, "little"))
            file.write(packed.header)
            for tensor in packed.tensors:
                file.write(byte_view(tensor).numpy().data)
    except OSError:
        os.close(descriptor)  # no room in memory: as above
        return None
    if state.is_applying or _moment(state) != moment:
        os.close(descriptor)  # the training continued during the writing: the copy may be torn
        return None
    return descriptor


def _moment(state: LiveState) -> tuple[int, ...]:
    """Return numbers of which one is larger when the values of the state have changed."""
    return state.ticks, state.begun, state.shards.tries if state.shards else 0


def read_live_state(descriptor: int,
                    classes: Mapping[str, type] | None = None) -> dict[str, Any] | None:
    """Read and free what this process left for itself; None if there is none of this process.
    `classes` are those of its state."""
    try:
        with open(descriptor, "rb") as file:
            data = bytearray(os.fstat(descriptor).st_size)
            file.seek(0)
            file.readinto(data)
        length = int.from_bytes(data[:8], "little")
        payload = torch.frombuffer(data, dtype=torch.uint8)[8 + length :]
        values = decode(bytes(data[8 : 8 + length]), payload, classes or {})
        if values["pid"] != os.getpid():
            return None
        values["facts"] = json.loads(values["facts"])
        return dict(values)
    except (OSError, LayoutError, KeyError, ValueError):
        return None


_once = threading.Lock()


def begin_once() -> None:
    """Return to the first caller alone. The restart of one thread closes what others use, and their
    exceptions would restart the process too."""
    if not _once.acquire(blocking=False):
        threading.Event().wait()


def start_anew(live_state: int | None, generation: int, count: int, since: float) -> None:
    """Replace this process by a new one of the same command and pid. Does not return.

    The other arguments become `Launch.revived_…`.
    """
    os.environ["ELASTIC_TRAINER_REVIVED_GENERATION"] = str(generation)
    os.environ["ELASTIC_TRAINER_REVIVED_COUNT"] = str(count)
    os.environ["ELASTIC_TRAINER_REVIVED_SINCE"] = str(since)
    os.environ["ELASTIC_TRAINER_REVIVED_FROM"] = ""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the failed thread may have blocked signals
    kept = 65536 if live_state is None else live_state
    if live_state is not None:
        # It keeps its number: a thread may yet close a number that it had opened before.
        os.set_inheritable(live_state, True)
        os.environ["ELASTIC_TRAINER_REVIVED_FROM"] = str(live_state)
    # Peers would wait for Gloo's sockets, which the new process would inherit.
    os.closerange(3, kept)
    os.closerange(kept + 1, 65536)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
