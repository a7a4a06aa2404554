"""How a worker ends: by the user's exception, by a peer's, or by a fault of its machine; and a loss
that is not finite.

exception → here → the vote, the driver, the exit code; reduced loss → here → train(on_nan=…)

What always holds:
1. The user's own exception ends the run on all ranks, with its traceback, and is never retried.
   After a fault of the machine only this worker leaves: the others do its part of the step again.
   A worker whose replica differs leaves at once, too.
2. No faults of the machine are: out of memory on a GPU (mostly the model is too large), and errors
   of a network connection (the other end may have failed). An error after which a process cannot
   use its GPU any more is one, also an illegal access or a failed assertion, which may be the
   code's. driver/ends.py finds out whether the same part of the same step fails on another host
   too. Then it is the user's error.
3. What is done about a loss that is not finite rests on the reduced loss, which all workers hold,
   and is decided before anything is applied: all do the same. A scaler handles gradients that
   overflow. The worker that ran a micro-batch knows its loss, and logs its samples.
4. A worker that has done a step, and has no memory for the micro-batches that it takes over from
   lost ones, ends nothing. It restarts in place, which frees its memory, and tries once. Then the
   run waits for more workers.

Source: cudaError_t in the CUDA runtime API's reference, whose texts PyTorch's errors carry;
torch/utils/data/_utils and torch/csrc/DataLoader.cpp for loaders; c10/core/impl/alloc_cpu.cpp for
memory.
"""

from __future__ import annotations

import errno
import math
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import numpy
import torch

from elastic_trainer.config import (
    EXIT_DIFFERS,
    EXIT_LEFT,
    EXIT_MACHINE,
    EXIT_UNSAVED,
    EXIT_USER_ERROR,
    ConfigError,
    Launch,
)
from elastic_trainer.data.loader_pool import LoaderKilled
from elastic_trainer.events.log import Events
from elastic_trainer.host.tracebacks import frames_of_user
from elastic_trainer.options import Words
from elastic_trainer.wire.heartbeat import GPU_LOST, MachineFault
from elastic_trainer.wire.plain import plain_text
from elastic_trainer.world.place import MAX_ERROR_CHARACTERS, Dismissed, Driver, RunOver, Unsaved

FRAMES = (" ", "Traceback (most recent call last)", "The above exception was the direct cause of",
          "During handling of the above exception")
"""How the lines of a traceback begin that are not its exception's."""


class PeerFailed(RuntimeError):
    """The user's code raised on another rank; the text is that rank's traceback."""


class UserExited(RuntimeError):
    """The user's code called sys.exit() (the cause), which would end one worker as if its host had
    died."""


def fault_of_machine(error: BaseException, driver: Driver, size: int) -> str:
    """Return which part of this machine has failed, if an exception shows that and other workers
    can go on; else ""."""
    is_others = isinstance(error, (PeerFailed, ConfigError))
    if is_others or size == 1 or not driver.is_mended:
        return ""
    return machine_fault(error)


def leave_as_dead(kind: str, text: str, step: int, microbatch: int, *, launch: Launch,
                  driver: Driver, events: Events) -> NoReturn:
    """Report that this machine has failed, and end this process as a death would: nothing of the
    step was applied.

    Nothing else is tried on this machine: a disk that fails may delay an orderly end by minutes.
    """
    with suppress(OSError):
        print(f"elastic-trainer: {kind} on {launch.host} in step {step}: this worker leaves, and "
              f"the others do the step again.\n{text}", file=sys.stderr, flush=True)
    events.emit("worker.machine_failed", host=launch.host, error=kind, step=step,
                microbatch=microbatch, text=text[-MAX_ERROR_CHARACTERS:])
    events.flush()
    driver.report(machine=MachineFault(step=step, microbatch=microbatch, kind=kind, text=text))
    os._exit(EXIT_MACHINE)


def leave_differing(error: Exception, driver: Driver, events: Events) -> NoReturn:
    """End this process, which holds other bits than most of its world, at once.

    The driver learns it by a message: the others stand still until this worker is gone, and an
    interpreter may end slowly. No code of the user's runs any more: it would save wrong weights.
    """
    with suppress(OSError):
        print(f"elastic-trainer: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    events.flush()
    driver.report(differs=True)  # it kills this process
    os._exit(EXIT_DIFFERS)


def leave_if_sent(error: BaseException, events: Events) -> None:
    """Leave by SystemExit if an error says that this worker is not wanted, or that the attempt is
    over. Any other error is the user's: return."""
    if isinstance(error, Dismissed):
        events.emit("worker.left")
        sys.exit(EXIT_LEFT)
    if isinstance(error, RunOver):
        events.emit("worker.stopped", verdict=error.verdict, detail=error.detail)
        print(f"elastic-trainer: {error.verdict}: {plain_text(without_frames(error.detail))}",
              file=sys.stderr)
        sys.exit(EXIT_USER_ERROR if error.verdict == "user_error" else EXIT_LEFT)


def leave_unsaved(error: BaseException, driver: Driver, launch: Launch, events: Events) -> bool:
    """Return whether an error says that the last checkpoint could not be written, and report that.
    Under our launcher leave by SystemExit."""
    if not isinstance(error, Unsaved):
        return False
    driver.report(unsaved=str(error))
    events.flush()
    if launch.driver:
        sys.exit(EXIT_UNSAVED)
    return True


def text_of(error: BaseException) -> str:
    """Return an error with its traceback: of a mistake of the user, with the user's frames."""
    if not isinstance(error, ConfigError):
        return "".join(traceback.format_exception(error))
    shown = traceback.TracebackException(type(error), error, frames_of_user(error))
    shown.__cause__ = shown.__context__ = None
    return "".join(shown.format())


def without_frames(text: str) -> str:
    """Return another worker's error without its traceback, which that worker has printed."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(FRAMES)]
    return "\n".join(lines) or text


def end_as_user_error() -> None:
    """Let an uncaught exception end this process with the exit code of a user's error, after its
    traceback."""
    show = sys.excepthook

    def show_and_exit(*exception: Any) -> None:
        show(*exception)
        raise SystemExit(EXIT_USER_ERROR)

    sys.excepthook = show_and_exit


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
    GPU_LOST:
        r"(CUDA|HIP) error: (an illegal memory access|an illegal instruction|misaligned address"
        r"|device-side assert|unspecified launch failure|the launch timed out|invalid program"
        r" counter|operation not supported on global/shared|unknown error"
        r"|CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR))"
        r"|cuDNN error: CUDNN_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)"
        r"|Triton Error \[CUDA\]: (an illegal|device-side|misaligned|unspecified)",
}
"""Patterns in the texts of torch's errors that are no OSError. After those of GPU_LOST each call of
CUDA in this process fails (cudaError_t: "the process must be terminated and relaunched")."""
NO_MEMORY = re.compile(r"(CUDA|HIP) error: (out of memory|CUBLAS_STATUS_ALLOC_FAILED)"
                       r"|CUDNN_STATUS_ALLOC_FAILED")
"""What torch raises, besides OutOfMemoryError, where a GPU has no memory left."""


def machine_fault(error: BaseException) -> str:
    """Return which part of the machine has failed, if an exception, or one that it came from, shows
    that; else ""."""
    return next(filter(None, map(_kind, _chain(error))), "")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
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


def raise_if_failed(device: torch.device) -> None:
    """Raise what the device raises if it cannot be used any more. Waits for no kernel: one may wait
    for a peer that is gone."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).query()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a GPU had no memory left when an exception, or one that it came from, was
    raised."""
    return any(isinstance(one, torch.OutOfMemoryError)
               or (isinstance(one, RuntimeError) and NO_MEMORY.search(str(one)) is not None)
               for one in _chain(error))


@dataclass
class Fit:
    """How many micro-batches of a step fit into this worker's memory, as its steps have shown."""

    done: int = 0
    """The most micro-batches of a step that it has finished."""
    failed: int = 0
    """The fewest for which it had no memory; 0: none."""
    needs: int = 0
    """The smallest world that may fit; 0: any."""

    def lack(self, mine: int, size: int) -> str:
        """Take that there was no memory for `mine` micro-batches, more than this worker has done,
        in a world of `size` workers; return what follows, as a sentence."""
        if self.failed and mine >= self.failed:
            self.needs = max(self.needs, size + 1)
            return (f"A second try had no memory either, so the run waits for workers until it has "
                    f"{self.needs}. A step of {self.done} micro-batches has fitted. Add hosts, or "
                    f"use smaller micro-batches (microbatches=…) in a new run.")
        self.failed = min(mine, self.failed or mine)
        return (f"It had memory for {self.done}. It restarts, which frees its memory, and tries "
                f"once more.")

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


MAX_NAMED_SAMPLES = 64
"""The largest number of samples of a micro-batch that the event names."""
MAX_IN_ERROR = 8
"""The largest number of micro-batches, and of samples of each, that the error names."""


class LossNotFinite(ArithmeticError):
    """The loss of a step is not finite, and train(on_nan="raise") ended the run before it was
    applied."""


def require_scalar(loss: Any, words: Words) -> torch.Tensor:
    """Return a loss of one value without dimensions. Raises TypeError for what is none."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.reshape(()) if loss.dim() else loss
    kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(
        loss, torch.Tensor) else f"{type(loss).__name__}"
    raise TypeError(
        f"{words.loss} {kind}. Use the mean over the batch's samples: a tensor of one value.")


Losses = Mapping[int, tuple[torch.Tensor, numpy.ndarray]]
"""By micro-batch: the loss, and the samples."""


def not_finite(losses: Losses) -> dict[int, list[int]]:
    """Return the samples of the micro-batches whose loss is not finite, by micro-batch. On a GPU
    this waits for the device."""
    return {microbatch: samples[:MAX_NAMED_SAMPLES].tolist()
            for microbatch, (loss, samples) in losses.items() if not math.isfinite(float(loss))}


def verdict(step: int, loss: float, microbatches: Mapping[int, list[int]]) -> str:
    """Return the error for a loss that is not finite: its micro-batches and samples, and the
    remedy."""
    named = [f"micro-batch {microbatch} (samples {', '.join(map(str, samples[:MAX_IN_ERROR]))}"
             f"{', …' * (len(samples) > MAX_IN_ERROR)})"
             for microbatch, samples in sorted(microbatches.items())[:MAX_IN_ERROR]]
    more = (f" and {len(microbatches) - MAX_IN_ERROR} more micro-batches"
            if len(microbatches) > MAX_IN_ERROR else "")
    where = f"in {', '.join(named)}{more}" if named else "only in the mean over the micro-batches"
    return (
        f"the loss of step {step} is {loss}: it is not finite {where}. The step was not applied. "
        f"Look at these samples and at the learning rate, or use on_nan=\"skip\" to leave such "
        f"steps out.")
