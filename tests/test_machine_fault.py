"""Which exceptions are the machine's fault."""

from __future__ import annotations

import errno
import os
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from elastic_trainer.training.failures import machine_fault


def caught(*errors: BaseException) -> BaseException:
    """Return the last of some exceptions, each raised while the one before was handled."""
    if len(errors) == 1:
        return errors[0]
    try:
        try:
            raise caught(*errors[:-1])
        except BaseException:
            raise errors[-1]  # noqa: B904 (that is the point)
    except BaseException as error:
        return error


@pytest.mark.parametrize(("error", "kind"), [
    (OSError(errno.EIO, os.strerror(errno.EIO)), "EIO"),
    (OSError(errno.ESTALE, "Stale file handle", "/data/7"), "ESTALE"),
    (OSError(errno.ENOSPC, "No space left on device"), "ENOSPC"),
    (MemoryError(), "MemoryError"),
    (RuntimeError("DataLoader worker (pid 77) is killed by signal: Killed. "),
     "a loader process was killed"),
    (RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"),
     "a loader process was killed"),
    (BrokenProcessPool("A process in the process pool was terminated abruptly"),
     "a loader process was killed"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
     "ENOMEM"),
    (RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be …"),
     "a GPU has failed"),
])
def test_what_a_machine_does_is_its_fault(error: BaseException, kind: str) -> None:
    """Alone, as the cause of another error, or what was handled when the other one was raised."""
    assert machine_fault(error) == kind
    assert machine_fault(caught(error, ValueError("sample 7"))) == kind
    assert machine_fault(caught(error, KeyError("a"), ValueError("sample 7"))) == kind


@pytest.mark.parametrize("error", [
    ValueError("a bad sample"),
    FileNotFoundError(errno.ENOENT, "No such file"),
    PermissionError(errno.EACCES, "denied"),
    IndexError(7),
    ConnectionResetError(errno.ECONNRESET, "reset"),
    OSError("no number"),
    KeyboardInterrupt(),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: an illegal memory access"),
    ValueError("it says: uncorrectable ECC error encountered"),
])
def test_what_the_code_or_the_data_does_is_not(error: BaseException) -> None:
    """A missing file, a bad shape, a model that is too large."""
    assert machine_fault(error) == ""


def test_the_chain_ends_when_it_is_a_circle_or_was_cut() -> None:
    """`raise … from None` declares that the handled exception does not matter."""
    one, other = ValueError(1), ValueError(2)
    one.__context__, other.__context__ = other, one
    assert machine_fault(one) == ""
    cut = caught(OSError(errno.EIO, "Input/output error"), ValueError(3))
    cut.__suppress_context__ = True
    assert machine_fault(cut) == ""
