"""The last resort inside `hvd.init()`: start this same process anew, in place, with its live state.

C++ exception in `hvd.init()`, or a member that died during it → here → exec → train() goes on at
the same step

Why: in a Horovod without 06-init-fails.patch, and wherever Gloo throws in a thread of its own,
`GlooContext::Initialize` runs in Horovod's background thread outside any try (operations.cc:444),
so one participant's death aborts all of them (F1). `std::set_terminate` runs our function instead;
it writes the live state into memory that has no name (memfd), and `exec`s the same command. The pid
stays, so driver and ssh notice nothing.

What always holds:
1. Parameters that may be half changed are never written (`LiveState.is_applying`): then the
   successor comes back as a newcomer and receives the state.
2. Live state is read once, by the process that wrote it (same pid). Only that process holds it:
   whatever ends the process in between, by SIGKILL too, frees the memory.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from elastic_trainer.state.layout import LayoutError, byte_view, decode, pack
from elastic_trainer.state.live_state import LiveState

_TERMINATE = ctypes.CFUNCTYPE(None)
_WHAT = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)
_kept: list[Any] = []  # a C callback must outlive its registration


def on_terminate(act: Callable[[str], None]) -> None:
    """Run `act` with an exception's text when an uncaught C++ exception would abort this process
    (any thread). `act` should not return."""
    def terminate() -> None:
        text = ""
        with suppress(Exception):  # not to know why is no reason to die of it
            text = _uncaught()
        act(text)

    callback = _TERMINATE(terminate)
    _kept.append(callback)
    # Std::set_terminate, Itanium mangling.
    ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE(callback)


def _uncaught() -> str:
    """Return the text of the C++ exception that this thread dies of, if it is one of Gloo's or of
    the standard library's.

    Source: Itanium C++ ABI, 2.9.4 (a type_info's second word is its name) and 2.5.2 (`what` is a
    std::exception's third virtual function, behind two destructors); x86-64's calling convention
    for what `current_exception` returns.
    """
    runtime, thrown = ctypes.CDLL("libstdc++.so.6"), ctypes.c_void_p()
    runtime.__cxa_current_exception_type.restype = ctypes.c_void_p
    kind = runtime.__cxa_current_exception_type()
    if not kind or platform.machine() != "x86_64":
        return ""
    name = ctypes.cast(kind, ctypes.POINTER(ctypes.c_char_p))[1] or b""
    # Anything may be thrown, and only those have a `what`.
    if not name.startswith((b"N4gloo", b"St")):
        return name.decode(errors="replace")
    # A std::exception_ptr is a pointer to it.
    runtime._ZSt17current_exceptionv(ctypes.byref(thrown))
    table = ctypes.cast(thrown, ctypes.POINTER(ctypes.c_void_p))[0]
    what = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))[2] or 0
    return (_WHAT(what)(thrown) or b"").decode(errors="replace")


def write_live_state(state: LiveState, gradients: dict[str, torch.Tensor],
                     facts: dict[str, Any]) -> int | None:
    """Write the live state for this process's successor; returns the descriptor of its memory, or
    None when this process holds no state that is whole.

    `gradients` are the reduced flat buffers if the state is prepared: the vote may have passed for
    somebody else.
    """
    if not state.has_state or state.is_applying:
        return None
    step = state.ticks, state.begun
    packed = pack({
        "pid": os.getpid(), "begun": state.begun, "prepared": state.prepared,
        "state": state.values(), "gradients": gradients, "buffers_before": state.buffers_before(),
        "extra_state": state.extra_state.in_flight(), "facts": json.dumps(facts)
    })
    try:
        descriptor = os.memfd_create("live-state")
    except OSError:
        return None  # no descriptor is left: come back as a newcomer, and receive the state
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(len(packed.header).to_bytes(8, "little"))
            file.write(packed.header)
            for tensor in packed.tensors:
                file.write(byte_view(tensor).numpy().data)
    except OSError:
        os.close(descriptor)  # no room in memory: as above
        return None
    if state.is_applying or (state.ticks, state.begun) != step:
        os.close(descriptor)  # the training went on while this was written: it may be torn
        return None
    return descriptor


def read_live_state(descriptor: int) -> dict[str, Any] | None:
    """Read and free what this process left for itself; None when it is not there or not its own."""
    try:
        with open(descriptor, "rb") as file:
            data = bytearray(os.fstat(descriptor).st_size)
            file.seek(0)
            file.readinto(data)
        length = int.from_bytes(data[:8], "little")
        payload = torch.frombuffer(data, dtype=torch.uint8)[8 + length :]
        values = decode(bytes(data[8 : 8 + length]), payload)
        if values["pid"] != os.getpid():
            return None
        values["facts"] = json.loads(values["facts"])
        return dict(values)
    except (OSError, LayoutError, KeyError, ValueError):
        return None


_once = threading.Lock()


def start_anew(live_state: int | None, generation: int, count: int, since: float) -> None:
    """Replace this process by a fresh one of the same command and pid. Does not return; the first
    caller wins.

    The rest is for `Launch.revived_…`.
    """
    if not _once.acquire(blocking=False):
        threading.Event().wait()
    os.environ["ELASTIC_TRAINER_REVIVED_GENERATION"] = str(generation)
    os.environ["ELASTIC_TRAINER_REVIVED_COUNT"] = str(count)
    os.environ["ELASTIC_TRAINER_REVIVED_SINCE"] = str(since)
    os.environ["ELASTIC_TRAINER_REVIVED_FROM"] = ""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the thread that failed may have blocked them
    if live_state is not None:
        live_state = os.dup2(live_state, 3)  # the lowest, so that all others can be closed
        os.set_inheritable(live_state, True)  # dup2 does not do that where it is 3 already
        os.environ["ELASTIC_TRAINER_REVIVED_FROM"] = str(live_state)
    # Else peers would wait for Gloo's sockets, which are inherited.
    os.closerange(3 if live_state is None else 4, 65536)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
