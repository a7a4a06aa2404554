"""The warm-up: a worker tries some micro-batches before it stands ready, and nothing of that
remains.

job → here (one micro-batch twice, another one, the first one again, the smallest micro-batch; with
torch.compile each size) → how this worker computes, how long a micro-batch takes, its proof

What always holds:
1. Weights, buffers, gradients and random numbers are afterwards as before. Buffers that the first
   forward pass makes are kept, if a second pass does not change them.
2. It runs the user's code as a step does. So it finds out whether that code writes to `.grad`, to
   parameters, or to buffers that cannot be kept.
3. A micro-batch has the same bits when it is computed again, and after another micro-batch. Else a
   value is carried from one micro-batch to the next, or the loss draws random numbers of its own:
   that is an error. Where the machine itself may give other bits (`may_waver`), only a large
   difference of the loss is one, and the worker reports no result of its arithmetic.
4. With several optimizers it tries the first phase only (optimizers.py).

What it does not do: find a value that changes no result of these micro-batches (a counter that acts
every tenth batch).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy
import psutil
import torch

from elastic_trainer.config import ConfigError
from elastic_trainer.data.seeds import random_numbers_put_back
from elastic_trainer.reduce.gradient_sums import WRITTEN_AFTER, GradientsWritten
from elastic_trainer.schedule.schedule import Schedule, fact_of, remedy_for
from elastic_trainer.state.values.layout import byte_view
from elastic_trainer.state.values.names import named_buffers
from elastic_trainer.state.values.supported import (
    BUFFERS_STAY,
    moved_buffers,
    parameters_stay,
    refused_tensors,
    some,
)
from elastic_trainer.training.checks.proving import Proving
from elastic_trainer.training.determinism import compiled_programs, probe_facts, probe_program
from elastic_trainer.training.differing import require_same, sizes_of_batches
from elastic_trainer.training.failures import require_scalar
from elastic_trainer.training.job.job import Job, has_batch_norm
from elastic_trainer.training.stages import Microbatch
from elastic_trainer.training.work import Work
from elastic_trainer.world.arithmetic import Arithmetic
from elastic_trainer.world.replicas import Part, fingerprint

CLEAR = 1e-3
"""Two losses that differ by this share are not the same up to rounding."""


class Tried(NamedTuple):
    """What went into a micro-batch, and what came out."""

    inputs: int
    """The checksum of weights and samples."""
    result: int
    """The checksum of loss and gradient."""
    loss: float
    weights: int


def another(schedule: Schedule, place: tuple[int, int]) -> tuple[int, int] | None:
    """Return step and micro-batch of another micro-batch than the first one, if possible of its
    size; None: the run has one micro-batch only."""
    size = len(schedule.microbatch_positions(*place))
    found = [(step, microbatch) for step in range(min(2, schedule.steps))
             for microbatch in range(schedule.microbatches)
             if (step, microbatch) != place and schedule.microbatch_positions(step, microbatch)]
    return next((one for one in found if len(schedule.microbatch_positions(*one)) == size),
                found[0] if found else None)


def may_waver(device: torch.device) -> bool:
    """Return whether this machine may give other bits for one program and the same values."""
    if device.type == "cuda":
        return not torch.are_deterministic_algorithms_enabled()
    return device.type != "cpu" or torch.get_num_threads() > 1


def require_same_result(tried: Sequence[Tried], wavers: bool) -> None:
    """Raise ConfigError if one micro-batch had different results. Samples that differ are no
    result: the proof leaves them out, with a remark."""
    one = tried[0]
    for other in tried[1:]:
        if other.inputs != one.inputs or other.result == one.result:
            continue
        most = CLEAR * max(abs(one.loss), abs(other.loss))
        if wavers and not abs(one.loss - other.loss) > most:
            continue
        what = (f"the gradient of one batch (loss {one.loss:.9g}) has other bits"
                if one.loss == other.loss else
                f"the loss of one batch is {one.loss:.9g}, and {other.loss:.9g}")
        raise ConfigError(
            f"{what} when the batch is computed again, with the same samples, weights and random "
            f"numbers. So the loop, the loss or the model carries a value from one batch to the "
            f"next (a hidden state, a counter, a running mean, a generator of its own), and the "
            f"result would depend on the number of workers, because each computes other batches. "
            f"Compute it from the batch and the number of the step, draw from the default "
            f"generators of torch, numpy or random, or change it after the inner loop, in an "
            f"object in state. docs/guide/script.md has the cases.")


WARM_GRADIENTS = 5
"""A standby touches as much memory as this number of gradients takes: the state that it receives,
and the buffers of its first step. Else all workers wait for a newcomer's new pages: 0.1 to 0.4 s
for 122 MB on a hypervisor that gives pages one by one."""
TRIED = "The batch was only tried (the warm-up), before the first step of this worker."
ONE_VALUE = "Expected more than 1 value per channel"
"""The error of torch's BatchNorm (torch/nn/functional.py, _verify_batch_size)."""
Trial = Generator[Microbatch, None, Tried]
"""Yields a micro-batch; returns what it was."""


@dataclass(frozen=True)
class Warm:
    arithmetic: Arithmetic
    microbatch_s: float
    """How long one micro-batch takes."""


class WarmUp:
    """One worker's warm-up, and what it works on."""

    def __init__(self, work: Work):
        self.job, self.state, self.flat = work.job, work.state, work.flat
        self.reducer, self.replica, self.scaling = work.reducer, work.replica, work.scaling
        self._left: list[dict[str, Any]] = []
        """The attributes that the first micro-batch has changed, the first time and again."""
        self.work, self.beside = work, work.beside
        self.proving = Proving(work.job, work.state, work.beside)

    def run(self, is_exact: bool) -> Generator[Microbatch, None, Warm]:
        """Run a micro-batch of the first step, once more, and after another one; and as many
        samples as the smallest micro-batch has."""
        job, place = self.job, (0, self.job.schedule.first_microbatch(0))
        trained = self.flat.gradients.trained_now()
        self.state.begin()
        first = job.schedule.microbatch_samples(*place)
        advice, programs = self._advice_on_one(len(first)), compiled_programs()
        try:
            before = yield from self._try_microbatch(first, place, may_add_buffers=True,
                                                     advice=advice)
        except ValueError as error:
            if advice and ONE_VALUE in str(error):
                raise ConfigError(advice) from error
            raise
        new = self._take_new_buffers()
        is_laid_out_anew = self.flat.tally.lay_out()
        if is_laid_out_anew:
            self.reducer.lay_out(self.flat.trained)
        # Compiled programs run a hook for all modules twice, and may be compiled anew.
        sees = nullcontext if compiled_programs() else self.beside.noticing
        started = time.monotonic()
        with sees():
            again = yield from self._try_microbatch(first, place, constant=new)
        microbatch_s = time.monotonic() - started  # the first time takes longer
        tried = [again] if new or is_laid_out_anew else [before, again]  # else of other sums
        if other := another(job.schedule, place):
            with sees():
                yield from self._try_microbatch(job.schedule.microbatch_samples(*other), other)
            self.beside.settle()
            tried.append((yield from self._try_microbatch(first, place)))
            self.beside.require_unchanged()
        require_same_result(tried, may_waver(job.device))
        if job.schedule.smallest_microbatch < len(first):
            yield from self._try_smallest_microbatch(first[: job.schedule.smallest_microbatch])
        if compiled_programs() > programs:
            yield from self._compile_other_sizes({len(first), job.schedule.smallest_microbatch})
        self.state.restore()
        self.state.forget()
        self.work.settle()
        job.buffers.require_used(self.state.buffers)
        self.flat.gradients.adopt(trained)
        for tensor in self.flat.sums.values():
            tensor.zero_()
        self.flat.add_into(self.flat.sums)
        program, results = probe_program(job.device), {one.result for one in tried}
        arithmetic = Arithmetic(program, again.inputs, results.pop() if len(results) == 1 else 0,
                                probe_facts(job.device), is_exact,
                                self.proving.proof(again.weights, program))
        return Warm(arithmetic, microbatch_s)

    def _try_smallest_microbatch(self, indices: numpy.ndarray) -> Generator[Microbatch, None, None]:
        """Compute as many samples as the smallest micro-batch of the run has. Else a loss that
        fails on them fails hours later.

        The samples are some that have just passed in a larger micro-batch, so their number is what
        fails.
        """
        schedule = self.job.schedule
        smallest = schedule.global_batch // schedule.microbatches
        needed = 2 if has_batch_norm(self.job.model) else smallest
        fact, remedy = fact_of(schedule), remedy_for(schedule, needed)
        try:
            yield from self._try_microbatch(indices, (0, schedule.first_microbatch(0)),
                                       advice=f"{fact}. {remedy}")
        except Exception as error:
            raise ConfigError(
                f"{fact}, and on a micro-batch of that size the loss raises "
                f"{type(error).__name__}: {str(error).rstrip('.')}. {remedy}") from error

    def _compile_other_sizes(self, done: set[int]) -> Generator[Microbatch, None, None]:
        """Compute micro-batches of the other sizes that the run has: to compile for one takes
        seconds, for which the other workers would wait at the end of a newcomer's first epoch."""
        schedule = self.job.schedule
        for size in sorted(schedule.microbatch_sizes - done):
            larger = next(microbatch for microbatch in range(schedule.microbatches)
                          if len(schedule.microbatch_positions(0, microbatch)) >= size)
            yield from self._try_microbatch(schedule.microbatch_samples(0, larger)[:size],
                                            (0, larger))

    def _advice_on_one(self, samples: int) -> str:
        job = self.job
        if samples > 1 or not has_batch_norm(job.model):
            return ""
        return (f"{fact_of(job.schedule)}, and a BatchNorm raises on one value per channel. "
                f"{remedy_for(job.schedule, 2)}")

    def _take_new_buffers(self) -> list[str]:
        """Keep the buffers that the first forward pass has made, too; returns their names."""
        known = set(self.state.buffers)
        self.state.model_buffers.take()
        if new := [name for name in self.state.buffers if name not in known]:
            self.state.model_buffers.begin()
            self.reducer.lay_out(self.flat.trained, self.state.buffers)
        return new

    def _try_microbatch(self, indices: numpy.ndarray, place: tuple[int, int], *,
                        may_add_buffers: bool = False, constant: Sequence[str] = (),
                        advice: str = "") -> Trial:
        """Run the first samples of a micro-batch, of which nothing remains but a fact of the user's
        code: whether that writes to `.grad`. `place`: step and micro-batch.

        Raises ConfigError for buffers that have moved, or are not as `constant` as they should be.
        """
        check = partial(self._check_buffers, may_add_buffers, constant)
        with self.flat.gradients.adding_in_place():
            try:
                return (yield from self._try_backward(indices, place, check, advice))
            except GradientsWritten:
                self.flat.gradients.isolates = True
                return (yield from self._try_backward(indices, place, check, advice))

    def _check_buffers(self, may_add: bool, constant: Sequence[str]) -> None:
        before, after = self.state.model_buffers.before, named_buffers(self.job.model)
        if why := refused_tensors({}, after):
            raise ConfigError(why)
        if moved := {name: how for name, how in moved_buffers(before, after).items()
                     if name in before or not may_add}:
            raise ConfigError(
                f"forward has changed the buffers {some(moved.values())}. {BUFFERS_STAY}")

        def has_changed(name: str) -> bool:
            return not torch.equal(byte_view(before[name]), byte_view(after[name]))

        if changed := [name for name in constant if has_changed(name)]:
            raise ConfigError(
                f"the buffers {some(changed)} are made in the first forward pass and changed by "
                f"the second, so their first values would be those of the warm-up. Register them "
                f"in __init__.")
        if self.job.schedule.microbatches > 1 and (
                free := [name for name, rule in self.job.buffers.of(before).items()
                         if rule is None and has_changed(name)]):
            raise ConfigError(self.job.buffers.refusal(free, self.job.words.after))

    def _try_backward(self, indices: numpy.ndarray, place: tuple[int, int],
                      check_buffers: Callable[[], None], advice: str) -> Trial:
        flat, job = self.flat, self.job
        # On every worker the same: the results are compared. A buffer that is made now is as the
        # first micro-batch makes it.
        key = place[0], 0, place[1], len(indices)
        # Anew: a loss may take it apart.
        batch = job.readers.training.batch(job.schedule.microbatch_seed(*place), key,
                                           indices=indices)
        if place == (0, job.schedule.first_microbatch(0)) and (
                len(indices) == len(job.schedule.microbatch_positions(*place))):
            self.proving.note_batch(batch, indices.tolist())
        held = self.replica.all_parts()
        # Checksums of gradients that leave are not to be compared with those of sums.
        weights, inputs = fingerprint(held), fingerprint([held, batch, *["leave"] * flat.is_front])
        losses, left = list[torch.Tensor](), dict[int, int]()
        if flat.leaving:
            flat.leaving.leave_to(lambda number, gradient: left.update(
                {number: fingerprint(gradient)}))
        flat.begin()
        try:
            flat.add_into(flat.sums)
            for tensor in flat.sums.values():  # no version counts a `.grad.data.zero_()`
                tensor.fill_(1.0)
            flat.gradients.begin()
            flat.gradients.open()
            self.scaling.open()
            microbatch = Microbatch(
                "the warm-up", batch, partial(self._backward, check_buffers, losses), flat.tally,
                f"{TRIED} {advice}".rstrip())
            microbatch.is_trial = not flat.tally.names
            yield microbatch
            microbatch.settle()
            if flat.leaving and not flat.leaving.are_as_left():
                raise ConfigError(WRITTEN_AFTER)
            flat.close_microbatch()
            flat.add_used(flat.sums)
            self._check_parameters(held)
            self._check_attributes()
            loss = float(losses[0].detach()) if losses else math.nan
            result = fingerprint([*losses, *flat.sums.values(), *sorted(left.items())])
            return Tried(inputs, result, loss, weights)
        finally:
            self.state.reopen()
            flat.begin()

    def _backward(self, check_buffers: Callable[[], None], losses: list[torch.Tensor], loss: Any,
                  _: Any) -> None:
        flat = self.flat
        scalar: Any = require_scalar(loss, self.job.words)  # torch has no types for its backward()
        losses.append(scalar)
        flat.gradients.check_untouched()
        self.scaling.check()
        if not flat.gradients.isolates and not all(
                bool((gradient == 1).all()) for gradient in flat.sums.gradients):
            raise GradientsWritten
        check_buffers()
        if (trained := flat.gradients.trained_now()) != flat.trained:
            self.reducer.lay_out(trained)
        for tensor in flat.sums.values():
            tensor.zero_()  # else the sums keep few bits of a small gradient
        with flat.gradients.without_sparse():
            self.scaling.backward(scalar, is_scaled=False)
        flat.gradients.note_left()

    def _check_attributes(self) -> None:
        """Raise ConfigError if a micro-batch has left other attributes than the first one. A size
        may follow from the batch."""
        attributes, moved = self.state.attributes, self.state.attributes.moved()
        if len(self._left) == 2:
            sizes = sizes_of_batches(self._left[0], moved)
            attributes.leave_out(sizes)
            for one in (*self._left, moved):
                for path in sizes:
                    one.pop(path, None)
        else:
            self._left.append(moved)
        require_same(self._left[0], moved, "when they were tried one after the other", ConfigError)

    def _check_parameters(self, held: Sequence[Part]) -> None:
        """Raise ConfigError if the micro-batch has changed parameters. A write to `.data` is not
        seen by a version."""
        self.state.parameters.check()
        parts = set(held) ^ set(self.replica.all_parts())
        if changed := {name for name, _ in parts} & set(self.flat.names):
            raise ConfigError(parameters_stay(filter(changed.__contains__, self.flat.names)))


def warm_nccl(device: torch.device) -> None:
    """Let NCCL load its kernels, by a communicator of this worker alone.

    A newcomer would do so in its first step, while all others wait: 0.5 s (measured on an H100).
    torch and Horovod load the same library (setup/).
    """
    if device.type != "cuda":
        return
    tensor, nccl = torch.zeros(1, device=device), cast(Any, torch.cuda.nccl)  # without types
    if nccl.is_available([tensor]):
        nccl.all_reduce([tensor])
        torch.cuda.synchronize(device)


def rehearse(job: Job, warm_up: WarmUp) -> Generator[Microbatch, None, None]:
    """Warm a standby up: nothing remains of it, random numbers included."""
    with random_numbers_put_back(job.device):
        yield from warm_up.run(is_exact=True)  # leaves no hooks on the model
    if job.device.type == "cpu":
        gradient_bytes = sum(tensor.nbytes for tensor in warm_up.flat.sums.values())
        touched = min(WARM_GRADIENTS * gradient_bytes, free_bytes() // 16)
        torch.ones(touched, dtype=torch.uint8)  # the allocator keeps it
    for parameter in job.model.parameters():
        parameter.grad = None


def free_bytes() -> int:
    """Return how much memory this machine, or this container (cgroup v2), has left."""
    free: int = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no such group, or no limit
        limit, used = ((group / name).read_text() for name in ("memory.max", "memory.current"))
        free = min(free, int(limit) - int(used))
    return max(0, free)
