"""Evaluations after a step: all workers share the batches, and all have the same sums.

trainer.evaluate(dataset, fn) → Examination (what to compute) ⇄ stages ⇄ Evaluations (who computes
it) → totals (exact sums) → means

What always holds:
1. Each batch of an evaluation counts once. Its sums are exact fractions, so the order in which they
   are added, and the number of workers, do not change the result.
2. An evaluation goes in rounds. A round is two collectives: what each worker wants and has done;
   the sums. If the generation breaks, the workers that still want the result begin another round in
   the next generation. They compute only the batches that none of them has.
3. A worker that has the result gives it to those that lack it. Newcomers take part in the rounds
   without batches, and receive the state afterwards.
4. Modes, buffers and random numbers are put back after each batch, so between two stages nothing of
   the evaluation shows.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_trainer.config import ConfigError, Launch
from elastic_trainer.data.loader import BatchRecipe, Loader, require_loader
from elastic_trainer.data.seeds import random_numbers_put_back
from elastic_trainer.evaluate.sums import (
    AllKept,
    Found,
    Metrics,
    as_json,
    found_in,
    from_json,
    means_of,
    require_sums,
    to_json,
)
from elastic_trainer.events.log import Events
from elastic_trainer.schedule.intervals import interval_of
from elastic_trainer.state.together import copy_together
from elastic_trainer.state.values.module_attributes import attributes_put_back
from elastic_trainer.state.values.supported import refused_dataset
from elastic_trainer.training.failures import PeerFailed
from elastic_trainer.training.job.job import Job
from elastic_trainer.training.stages import Evaluated, Portion, Stage
from elastic_trainer.world.collectives import PeersLost, TooLate, World

Fn = Callable[[torch.nn.Module, Any], Mapping[str, Any] | None]
NOT_FINISHED = (
    "evaluate() was called where no step is finished: before or inside of an inner loop, or after "
    "a loop that was left. Call it on all workers, after the last `for batch in step` of a step, "
    "or when the loop has ended.")
AVERAGED = "averaged"
"""What a request is for whose result is the average of the weights."""
ON_ALL = "Call it after the inner loop on every worker, not under `if trainer.is_first`."


# --- what to compute ------------------------------------------------------------------------------

class Examination:
    """One evaluation of this worker's model: its batches, and what the user's function finds."""

    def __init__(self, job: Job, dataset: Any, fn: Fn, batch_size: int | None,
                 collate: Callable[[list[Any]], Any] | None, metrics: Any = None,
                 loader: Loader | None = None):
        if why := refused_dataset(dataset):
            raise ValueError(why)
        require_loader(loader)
        size = batch_size or max(1, job.schedule.global_batch // job.schedule.microbatches)
        if batch_size is not None and batch_size < 1 or not len(dataset):
            raise ValueError(f"evaluate() got {len(dataset)} samples and batch_size={batch_size}. "
                             f"Give at least one sample, and a batch_size of 1 or more.")
        self.job, self.dataset, self.fn, self.batch_size = job, dataset, fn, size
        self.reader = job.readers.of(dataset, (loader and loader.collate) or collate or job.collate,
                                     BatchRecipe(job.schedule, len(dataset), size), loader)
        self._metrics = Metrics(metrics or {}, job.device)
        self._buffers = [(module, name, buffer, buffer.clone())
                         for module in job.model.modules()
                         for name, buffer in module._buffers.items() if buffer is not None]

    @property
    def batches(self) -> int:
        """The number of batches: the last one may be short."""
        return -(-len(self.dataset) // self.batch_size)

    def found(self, number: int, following: Sequence[int] = ()) -> Found:
        """Compute one batch, and have the following ones read. Costs: its forward pass."""
        job, seed = self.job, self.job.schedule.microbatch_seed(0, number)
        with self._apart():
            batch = self.reader.batch(seed, (number,), ((one,) for one in following))
            self._metrics.reset()
            with job.precision.evaluation():
                returned = self.fn(job.model, batch)
            found = found_in(number, {} if returned is None and self._metrics.names else returned,
                             self._metrics.states())
        if both := self._metrics.names & found.sums.keys():
            raise RuntimeError(f"the function of evaluate() returned {sorted(both)}, which "
                               f"metrics= has too. Give one of them another name.")
        self._metrics.reset()
        return found

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Evaluate the model for a while, and leave no trace. Raises RuntimeError if parameters
        were changed."""
        model = self.job.model
        modes = [(module, module.training) for module in model.modules()]
        versions = [parameter._version for parameter in model.parameters()]
        try:
            with (random_numbers_put_back(self.job.device), torch.no_grad(),
                  attributes_put_back(model)):
                model.eval()
                yield
        finally:
            for module, mode in modes:
                module.training = mode
            self._put_buffers_back()
        if versions != [parameter._version for parameter in model.parameters()]:
            raise RuntimeError("the function of evaluate() has changed parameters of the model. "
                               "Change them after the inner loop, on every worker.")

    def _put_buffers_back(self) -> None:
        with torch.no_grad():
            for module, name, buffer, _ in self._buffers:
                module._buffers[name] = buffer
            # To compare them first would wait for a GPU once for each.
            copy_together([one for _, _, one, _ in self._buffers],
                          [one for _, _, _, one in self._buffers])

    def alone(self) -> dict[str, Any]:
        """Compute all batches on this worker: the run is finished, and its world has ended."""
        total = Found()
        for number in range(self.batches):
            total = total.plus(self.found(number, range(number + 1, self.batches)))
        return self.means(total)

    def means(self, total: Found) -> dict[str, Any]:
        return (means_of(total.sums) | self._metrics.computed(total.states) | total.all_kept())


def examine(examination: Examination, draw: Callable[[], Stage | None]) -> dict[str, Any]:
    """Compute the batches that the worker's stages hand out, until all workers have the result."""
    while True:
        match draw():
            case Portion() as portion:
                portion.found = examination.found(portion.number, portion.following)
            case Evaluated() as evaluated:
                return evaluated.means
            case stage:
                raise AssertionError(f"{stage} in an evaluation")


# --- who computes it ------------------------------------------------------------------------------

@dataclass
class Request:
    """The evaluation that this worker's code waits for, and what it has done of it."""

    batches: int
    samples: int
    means: Callable[[Found], dict[str, Any]]
    """Returns the result of the sums over all batches."""
    what: str = "evaluate"
    """The method that the user's code has called."""
    began: float = field(default_factory=time.monotonic)
    done: set[int] = field(default_factory=set)
    found: Found = field(default_factory=Found)
    error: str = ""


class Evaluations:
    """The evaluations after the last finished step, on this worker."""

    def __init__(self, world: Callable[[], World], is_broken: Callable[[], bool],
                 events: Events, launch: Launch,
                 gather_average: Callable[[], dict[str, torch.Tensor]]):
        self._world, self._is_broken, self._events = world, is_broken, events
        self._gather_average = gather_average
        self._mark = events.trace.mark
        self._patience_s = launch.limits.stuck_s
        self.request: Request | None = None
        self._step = 0
        self._is_known = False
        """True if this process has run the code after the last step from its start."""
        self._results: list[Found] = []

    def begin(self, step: int) -> None:
        self.request, self._results, self._is_known, self._step = None, [], True, step

    def ask(self, examination: Examination) -> None:
        self.request = Request(examination.batches, len(examination.dataset), examination.means)

    def ask_for_average(self) -> None:
        """Let the next stage have the whole average, of which each worker has a part."""
        self.request = Request(0, 0, lambda found: {}, AVERAGED)

    def serve(self) -> Generator[Stage, None, None]:
        """Compute what the user's code asks for, one evaluation after the other."""
        while self.request is not None:
            yield from self._round()

    def attend(self) -> None:
        """Take part in the evaluations of other workers until no worker wants one. All workers call
        it, each when its own code has ended."""
        assert self.request is None
        while True:
            try:
                next(round_ := self._round())
            except StopIteration as end:
                if not end.value:
                    return
            else:
                round_.close()
                raise AssertionError("a worker without a request has got a batch")

    def _round(self) -> Generator[Stage, None, bool]:
        """Do one round; returns whether a worker wanted an evaluation. Network: two gathers."""
        request, world = self.request, self._world()
        self._mark.enter("gather")
        mine: dict[str, Any] = {"has": len(self._results), "is_known": self._is_known,
                                "wants": None}
        if request:
            mine |= {"wants": len(self._results), "done": sorted(request.done),
                     "of": [request.what, request.batches, request.samples]}
        plans = self._meet(mine, request.what) if request else gathered(world, mine)
        wanting = [rank for rank, plan in enumerate(plans) if plan["wants"] is not None]
        if not wanting:
            return False
        number = min(plans[rank]["wants"] for rank in wanting)
        wanting = [rank for rank in wanting if plans[rank]["wants"] == number]
        require_alike(plans, wanting, number)
        holders = [rank for rank, plan in enumerate(plans) if plan["has"] > number]
        given, averages = dict[str, Any](), dict[str, torch.Tensor]()
        is_average = plans[wanting[0]]["of"][0] == AVERAGED
        if is_average:
            averages = self._gather_average()  # network; also of those that have had it
        if world.rank in holders[:1]:
            given["found"] = self._results[number].to_values()
        elif request and world.rank in wanting and not holders:
            yield from self._compute(request, shared_out(plans, wanting)[world.rank])
            given = {"found": request.found.to_values(), "error": request.error}
        self._mark.enter("gather")
        self._take(gathered(world, given), wanting)
        self._mark.enter("after")
        if world.rank in wanting and is_average:
            self.request = None
            yield Evaluated(averages)
        elif world.rank in wanting and request:
            self.request = None
            means = request.means(self._results[-1])
            if world.rank == wanting[0]:
                self._events.emit(
                    "worker.evaluated", step=self._step, samples=request.samples,
                    metrics={name: as_json(mean) for name, mean in means.items()
                             if not isinstance(mean, AllKept)},
                    duration_s=round(time.monotonic() - request.began, 4))
            self._events.reach("step.evaluated", step=self._step, metrics=means)
            yield Evaluated(means)
        return True

    def _meet(self, mine: dict[str, Any], what: str) -> list[dict[str, Any]]:
        """Gather what the workers want. Raises RuntimeError if they do not come: their code has
        gone on to the next step, and no collective would ever end."""
        world = self._world()
        world.latest = time.monotonic() + self._patience_s
        try:
            return gathered(world, mine)
        except TooLate:
            raise RuntimeError(
                f"rank {world.rank} called {what}() after step {self._step}, and another worker "
                f"has not within {self._patience_s:g} s. {ON_ALL} If its code takes so long, set "
                f"stuck_s in ELASTIC_TRAINER_LIMITS.") from None
        finally:
            world.latest = None

    def _compute(self, request: Request, numbers: list[int]) -> Generator[Stage, None, None]:
        for place, number in enumerate(numbers):
            if self._is_broken():
                raise PeersLost("a member is gone: the evaluation goes on in the next generation")
            self._mark.enter("evaluate", f"batch {number}")
            portion = Portion(number, numbers[place + 1:])
            yield portion
            if portion.error is not None:  # only the collectives report it to the other workers
                request.error = "".join(traceback.format_exception(portion.error))
                return
            if portion.found is None:
                raise RuntimeError(
                    f"the function of evaluate() raised for batch {number}, and the loop went on. "
                    f"An evaluation cannot be left: let its exceptions end the run.")
            request.found = request.found.plus(portion.found)
            request.done.add(number)

    def _take(self, given: list[dict[str, Any]], wanting: list[int]) -> None:
        """Add up what the workers have given, if this worker wants it. Raises PeerFailed."""
        for rank, one in enumerate(given):
            if one.get("error"):
                raise PeerFailed(f"rank {rank} failed in evaluate():\n{one['error']}")
        if self._world().rank in wanting:
            total = Found()
            for one in given:
                if "found" in one:
                    total = total.plus(Found.of_values(one["found"]))
            self._results.append(total)


def gathered(world: World, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the values of all workers, by rank. Network: one gather of texts."""
    return [from_json(text) for text in world.gather_texts(to_json(mine))]


def require_alike(plans: list[dict[str, Any]], wanting: list[int], number: int) -> None:
    """Raise RuntimeError, on all workers, if they do not evaluate the same."""
    calls = {rank: f"{plans[rank]['of'][0]}()" for rank in wanting}
    if len(set(calls.values())) > 1:
        raise RuntimeError(f"the workers wait for each other in different calls: {calls} (by "
                           f"rank). {ON_ALL}")
    what, sizes = calls[wanting[0]], {tuple(plans[rank]["of"][1:]) for rank in wanting}
    if len(sizes) > 1:
        raise RuntimeError(
            f"the workers evaluate different numbers of (batches, samples): {sorted(sizes)}. Give "
            f"evaluate() the same dataset and batch_size on every worker.")
    lacking = [rank for rank, plan in enumerate(plans)
               if plan["wants"] is None and plan["is_known"] and plan["has"] <= number]
    if lacking:
        raise RuntimeError(f"the ranks {wanting} called {what}, and the ranks {lacking} did "
                           f"not. {ON_ALL}")


def shared_out(plans: list[dict[str, Any]], wanting: list[int]) -> dict[int, list[int]]:
    """Return the batches that each worker computes: those that none of them has done, in turn."""
    done = {number for rank in wanting for number in plans[rank]["done"]}
    left = [number for number in range(plans[wanting[0]]["of"][1]) if number not in done]
    return {rank: left[place::len(wanting)] for place, rank in enumerate(wanting)}


@dataclass(frozen=True)
class Evaluation:
    """What train() evaluates, and when: `evaluate=Evaluation(held_out, measure, every="1 epoch")`.

    `every` is an interval as `step.every` has it. `fn`, `batch_size`, `collate`, `metrics` and
    `loader` are those of `trainer.evaluate`. `averaged`: evaluate the averaged weights (`ema`,
    `swa`).
    """

    dataset: Any
    fn: Fn
    every: str = "1 epoch"
    batch_size: int | None = None
    collate: Callable[[list[Any]], Any] | None = None
    metrics: Any = None
    averaged: bool = False
    loader: Loader | None = None

    def __post_init__(self) -> None:
        interval_of(self.every)
        require_sums(self.metrics or {})
        if why := refused_dataset(self.dataset):
            raise ConfigError(why)


def examination_of(plan: Evaluation, job: Job) -> Examination:
    return Examination(job, plan.dataset, plan.fn, plan.batch_size, plan.collate, plan.metrics,
                       plan.loader)


def require_evaluation(evaluate: Evaluation | None, job: Job) -> None:
    """Raise ConfigError if train() cannot do an evaluation, or if none gives what `best` needs."""
    if evaluate is None:
        if job.best:
            raise ConfigError(
                f"best is keep_best({job.best.rule.metric!r}, …), but nothing is evaluated: with "
                f'train() give evaluate=Evaluation(held_out, measure, every="1 epoch").')
        return
    if evaluate.averaged and job.average is None:
        raise ConfigError("evaluate has averaged=True, but no weights are averaged. Give ema=0.999 "
                          "or swa=Swa(from_step=…), or leave averaged out.")
    try:
        examination_of(evaluate, job)
    except ValueError as error:
        raise ConfigError(str(error)) from error
