"""Find out whether an exception is the machine's fault. Then only its worker leaves.

exception that user code has raised → here → loop: vote it as the user's error, or leave as a dead
worker does

What it does not do: find out whether the same micro-batch of the same step fails on another host
too. Then it is the user's error (membership.py). These are no faults of the machine here: out of
memory on a GPU (mostly the model is too large), errors of a network connection (the other end may
have failed), an illegal access or a failed assertion on a GPU (mostly the code's).

Source: cudaError_t in the CUDA runtime API's reference, whose texts PyTorch's errors carry;
torch/utils/data/_utils and torch/csrc/DataLoader.cpp for loaders; c10/core/impl/alloc_cpu.cpp for
memory.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool

from elastic_trainer.data.loader_pool import LoaderKilled

ERRNOS = frozenset({
    errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EROFS, errno.ENXIO,
    errno.ENODEV, errno.EREMOTEIO, errno.EUCLEAN, errno.EBADMSG
})
"""Errors of a local or network disk that fails, is full or was remounted read-only, and of memory
that is used up."""
TEXTS = {
    "a loader process was killed":
        r"DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)",
    "ENOMEM": r"can't allocate memory",
    "a GPU has failed":
        r"uncorrectable (ECC|NVLink) error|hardware stack error|over nvlink or a hardware error"
        r"|busy or unavailable|no CUDA-capable device is detected|system not yet initialized"
        r"|GPU is lost|fallen off the bus",
}
"""Patterns in the texts of torch's errors that are no OSError."""


def machine_fault(error: BaseException) -> str:
    """Return which part of the machine has failed, if an exception, or one that it came from, shows
    that; else ""."""
    return next(filter(None, map(_kind, _chain(error))), "")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that it came from, the newest first."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _kind(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "MemoryError"
    if isinstance(error, (BrokenProcessPool, LoaderKilled)):
        return "a loader process was killed"
    if isinstance(error, OSError) and error.errno in ERRNOS:
        return errno.errorcode[error.errno]
    # No other error that quotes one.
    if type(error) is RuntimeError or type(error).__module__.split(".")[0] == "torch":
        return next((kind for kind, text in TEXTS.items() if re.search(text, str(error))), "")
    return ""
