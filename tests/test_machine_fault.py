"""Which exceptions are the machine's fault."""

from __future__ import annotations

import errno
import os
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch
from fake_device import NAME, fake_device

from elastic_trainer.training.failures import (
    Fit,
    is_out_of_memory,
    machine_fault,
    raise_if_failed,
)
from elastic_trainer.wire.heartbeat import GPU_LOST


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
    (torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nSearch for …"),
     GPU_LOST),
    (RuntimeError("CUDA error: device-side assert triggered"), GPU_LOST),
    (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm"), GPU_LOST),
    (RuntimeError("Triton Error [CUDA]: misaligned address"), GPU_LOST),
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
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    RuntimeError("CUDA error: invalid argument"),
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


@pytest.mark.parametrize(("error", "is_one"), [
    (torch.OutOfMemoryError("CUDA out of memory."), True),
    (torch.AcceleratorError("CUDA error: out of memory"), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
     True),
    (caught(torch.OutOfMemoryError("CUDA out of memory."), ValueError("wrapped")), True),
    (MemoryError(), False), (RuntimeError("out of memory"), False)])
def test_a_gpu_without_memory_is_known_by_what_torch_raises(error: BaseException,
                                                            is_one: bool) -> None:
    """Also in the chain of another error. It is no fault of the machine."""
    assert is_out_of_memory(error) == is_one
    if is_one:
        assert machine_fault(error) == ""


def test_a_worker_without_memory_tries_once_and_then_needs_a_larger_world() -> None:
    """It names what has fitted."""
    fit = Fit(done=2)
    assert "tries once" in fit.lack(4, 2) and fit.needs == 0
    assert "tries once" in fit.lack(3, 3) and fit.needs == 0, "fewer micro-batches: a new try"
    told = fit.lack(3, 3)
    assert "until it has 4" in told and "2 micro-batches has fitted" in told
    assert Fit(**fit.to_dict()) == fit and fit.needs == 4
    fit.lack(8, 1)
    assert fit.needs == 4


def test_a_lost_gpu_is_seen_without_a_wait() -> None:
    """After a broken generation a kernel may wait for a peer that is gone."""
    device = fake_device()
    raise_if_failed(torch.device(NAME, 0))
    device.error = torch.AcceleratorError("CUDA error: unspecified launch failure")
    with pytest.raises(torch.AcceleratorError) as raised:
        raise_if_failed(torch.device(NAME, 0))
    assert machine_fault(raised.value) == GPU_LOST and not device.waits
    raise_if_failed(torch.device("cpu"))
