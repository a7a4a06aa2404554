"""Training alone, in this process: what a step is made of, what it leaves, and where it goes on.

The yardstick is `by_hand`: the same steps in plain PyTorch, each with one big batch. `Seat` puts
several trainers into one world of threads, so that sharing a step needs no network.
"""

from __future__ import annotations

import collections
import copy
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.utils.checkpoint
from simulated import Hub, Member, in_threads
from torch.utils.data import Dataset, TensorDataset, default_collate

from elastic_trainer.config import EXIT_USER_ERROR, ConfigError, Launch
from elastic_trainer.data.loader import MicrobatchRecipe, Reader, Readers
from elastic_trainer.data.seeds import seed_everything
from elastic_trainer.events.log import Events, read_events
from elastic_trainer.events.summary import summarize
from elastic_trainer.reduce.ring import Sending
from elastic_trainer.schedule.learning_rate import cosine
from elastic_trainer.schedule.schedule import Schedule
from elastic_trainer.state.checkpoints.cadence import Cadence
from elastic_trainer.state.checkpoints.checkpoint import Plan
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.stores.store import StoreRefused
from elastic_trainer.state.values.layout import LayoutError
from elastic_trainer.training.failures import LossNotFinite, PeerFailed, UserExited
from elastic_trainer.training.job.job import (
    Job,
    Result,
    describe,
    fewest_samples,
    require_one_device,
)
from elastic_trainer.training.loop import Loop, hooks_of
from elastic_trainer.training.trainer import Loss, drive, train
from elastic_trainer.training.warm_up import rehearse
from elastic_trainer.training.worker import local_rank
from elastic_trainer.views.verify import verify
from elastic_trainer.world import standby as standby
from elastic_trainer.world.arithmetic import Arithmetic, computes_otherwise
from elastic_trainer.world.collectives import PeersLost, World
from elastic_trainer.world.generations import UPLOAD_FIRST_S, Generations, Hooks
from elastic_trainer.world.place import Driver, RunOver, Wants
from elastic_trainer.world.replicas import ReplicaDiffers, ReplicasDisagree
from elastic_trainer.world.transfer import Transfer
from elastic_trainer.world.worker_status import WorkerStatus

Model = torch.nn.Module
Optimizer = torch.optim.Optimizer
SIZE = 22
INPUT = torch.randn(SIZE, 5, generator=torch.Generator().manual_seed(1))
TARGET = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(2))
DATA = TensorDataset(INPUT, TARGET)
NUMBERS: dict[str, Any] = {"global_batch": 8, "microbatches": 4, "epochs": 2, "seed": 3}
# 3 steps an epoch; the last has 6 samples, in micro-batches of 1, 2, 1, 2.
SCHEDULE = Schedule(dataset_size=SIZE, **NUMBERS)


pytestmark = pytest.mark.usefixtures("no_launcher")


def mse(model: Model, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def built(*middle: Model, seed: int = 0) -> torch.nn.Sequential:
    """A small model, always with the same weights."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), *middle,
                               torch.nn.Linear(8, 3))


def sgd(model: Model) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: Model) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def trained(model: Model, optimizer: Optimizer | None = None, dataset: Any = DATA,
            **changes: Any) -> Result:
    numbers = {name: value for name, value in NUMBERS.items() if name != "epochs"}
    return train(model, optimizer or sgd(model), dataset, **(
        {"loss": mse, "progress": False, "until": "2 epochs"} | numbers | changes))


def by_hand(model: Model, optimizer: Optimizer, *, clip_norm: float | None = None,
            rate: Callable[[int], float] | None = None, steps: int = SCHEDULE.steps) -> Model:
    """Train in plain PyTorch, one big batch a step."""
    base = optimizer.param_groups[0]["lr"]
    for step in range(steps):
        batch = [SCHEDULE.microbatch_samples(step, microbatch)
                 for microbatch in range(SCHEDULE.microbatches)]
        chosen = torch.from_numpy(numpy.concatenate(batch))
        optimizer.zero_grad()
        mse(model, [INPUT[chosen], TARGET[chosen]]).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.param_groups[0]["lr"] = base * (rate(step) if rate else 1.0)
        optimizer.step()
    return model


def assert_close(model: Model, other: Model, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    for (name,
         mine), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.allclose(mine, theirs, rtol=rtol,
                              atol=atol), f"{name} is off by {(mine - theirs).abs().max()}"


class Ears:
    """Hears a worker's events."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event: str, facts: dict[str, Any]) -> None:
        self.heard.append((event, facts))

    def facts(self, event: str) -> list[dict[str, Any]]:
        return [facts for name, facts in self.heard if name == event]


# --- the same as one big batch --------------------------------------------------------------------


@pytest.mark.parametrize("reduce", ["exact", "ring"])
@pytest.mark.parametrize("microbatches", [1, 3, 4, 8])
def test_a_step_is_that_of_one_big_batch_when_it_is_cut_into_microbatches(reduce: str,
                                                                    microbatches: int) -> None:
    """Also the short last one of an epoch, where micro-batches are unequal or empty: every sample
    weighs the same."""
    model, reference = built(), built()
    result = trained(model, microbatches=microbatches, reduce=reduce)
    assert_close(model, by_hand(reference, sgd(reference)))
    assert (result.steps, result.samples) == (6, 2 * SIZE)
    assert result.model is model


def test_the_hash_is_anothers_when_one_bit_of_the_weights_is() -> None:
    """It tells any two models apart: after a step of almost nothing it has changed."""
    still, moved = built(), built()
    hashes = {
        trained(model, torch.optim.SGD(model.parameters(), lr=rate), until="1 step").weights_sha256
        for model, rate in ((still, 0.0), (moved, 1e-6))
    }
    assert len(hashes) == 2


def test_nothing_is_written_when_there_is_no_run_folder(tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """`python my_train.py` alone leaves no files."""
    monkeypatch.chdir(tmp_path)
    trained(built(), checkpoint_every=1)
    assert list(tmp_path.iterdir()) == []


# --- kinds of models ------------------------------------------------------------------------------

def test_running_statistics_are_the_mean_over_microbatches_when_a_model_has_batch_norm() -> None:
    """Each micro-batch starts from the step's first values; the step's last are their mean, and it
    counts as one batch."""
    norm, reference = (torch.nn.BatchNorm1d(5, affine=False) for _ in range(2))
    trained(torch.nn.Sequential(norm, built()), until="2 steps")
    for step in range(2):
        means, variances = torch.zeros(5), torch.zeros(5)
        for microbatch in range(SCHEDULE.microbatches):
            one = copy.deepcopy(reference)
            one(INPUT[torch.from_numpy(SCHEDULE.microbatch_samples(step, microbatch))])
            assert one.running_mean is not None and one.running_var is not None
            means += one.running_mean * SCHEDULE.microbatch_weight(step, microbatch)
            variances += one.running_var * SCHEDULE.microbatch_weight(step, microbatch)
        assert reference.running_mean is not None and reference.running_var is not None
        reference.running_mean.copy_(means)
        reference.running_var.copy_(variances)
        assert reference.num_batches_tracked is not None
        reference.num_batches_tracked.add_(1)
    assert_close(norm, reference)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_an_epoch_ends_as_it_began_when_batch_norm_meets_a_short_last_batch(size: int) -> None:
    """Its 6 samples are 3 micro-batches of 2, not 1, 2, 1, 2: BatchNorm raises on one. The same
    bits for every world."""
    alone = trained(built(torch.nn.BatchNorm1d(8)))
    schedule = Schedule(dataset_size=SIZE, **NUMBERS, min_microbatch_samples=2)
    assert alone.steps == schedule.steps
    for result in in_a_world(size,
                             lambda rank: job(built(torch.nn.BatchNorm1d(8)), schedule=schedule)):
        assert result.weights_sha256 == alone.weights_sha256


def test_a_smallest_microbatch_that_cannot_be_computed_is_refused_at_the_start() -> None:
    """And not at the end of the first epoch: how small it is, what was raised, and what to
    change."""
    lines, steps = torch.utils.data.Subset(DATA, range(17)), list[int]()
    with pytest.raises(ConfigError,
                       match="last step of each epoch has 1 sample, its smallest micro-batch 1.*"
                       "Expected more than 1 value per channel.*drop_last=True or global_batch=9"
                       ) as raised:
        trained(built(torch.nn.BatchNorm1d(8)), dataset=lines, after_step=steps.append)
    assert not steps and isinstance(raised.value.__cause__, ValueError)
    result = trained(built(torch.nn.BatchNorm1d(8)), dataset=lines, drop_last=True)
    assert (result.steps, result.samples) == (4, 32)
    # It does not come to that step.
    assert trained(built(torch.nn.BatchNorm1d(8)), dataset=lines, until="2 steps").steps == 2


def test_a_microbatch_of_one_sample_stays_when_no_module_needs_more(run_dir: Path) -> None:
    """The rule is the job's: without BatchNorm, or where full micro-batches have one sample, it is
    what it was."""
    plain, other = (describe(job(built(), schedule=schedule))["schedule"]["min_microbatch_samples"]
                    for schedule in (SCHEDULE,
                                     Schedule(dataset_size=SIZE, **NUMBERS,
                                              min_microbatch_samples=2)))
    assert (plain, other) == (1, 2)
    norm = torch.nn.BatchNorm2d(3)
    assert [fewest_samples(model, 8, microbatches) for model,
            microbatches in ((built(), 4), (norm, 4), (norm, 8))] == [1, 2, 1]
    assert trained(built(), until="2 steps").steps == 2
    with pytest.raises(LayoutError, match="min_microbatch_samples"):
        trained(built(), min_microbatch_samples=2)  # its steps are others


def test_the_samples_left_out_are_logged_when_the_last_batch_is_dropped(
        run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, in the event log, and by verify, which proves that each other sample counted
    once."""
    assert trained(built(), drop_last=True).steps == 4
    assert capsys.readouterr().err.count("drop_last leaves 6 of 22 samples out of each epoch") == 1
    assert [e["samples"] for e in read_events(run_dir)
            if e["event"] == "job.samples_dropped"] == [6]
    (described,) = [e for e in read_events(run_dir) if e["event"] == "job.described"]
    assert (described["drop_last"], described["dropped_samples"], described["steps"]) == (True, 6,
                                                                                          4)
    verdict = verify(run_dir)
    assert (verdict.violations, verdict.whole_epochs, verdict.samples) == ((), 2, 32)
    assert any("leaves out 6 samples" in note for note in verdict.notes)
    with pytest.raises(LayoutError, match="drop_last"):
        trained(built(), until="3 epochs")


def test_what_is_drawn_after_a_step_follows_from_the_step() -> None:
    """An optimizer that rounds by chance, or `after_step`, draws the same on every worker, whatever
    its micro-batches drew."""
    told: list[list[tuple[float, ...]]] = []
    for more in (0, 1):
        drawn = list[tuple[float, ...]]()

        def loss(model: Model, batch: Any, more: int = more) -> torch.Tensor:
            torch.rand(more)
            return mse(model, batch)

        trained(built(), loss=loss, after_step=lambda step, drawn=drawn: drawn.append(draws()))
        told.append(drawn)
    assert told[0] == told[1] and len(set(told[0])) == 6


# --- data -----------------------------------------------------------------------------------------

class OneByOne(Dataset[Any]):
    """Gives samples one at a time; `make` shapes them."""

    def __init__(self, make: Callable[..., Any] = lambda x, y: (x, y)):
        self.make = make

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        assert type(index) is int
        return self.make(INPUT[index], TARGET[index])


class ManyAtOnce(OneByOne):
    """Gives many at once, and would rather not be asked for one."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("asked for one sample although it can give many")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.make(INPUT[i], TARGET[i]) for i in indices]


Sample = collections.namedtuple("Sample", ["x", "y"])


@pytest.mark.parametrize("dataset", [
    OneByOne(),
    ManyAtOnce(),
    OneByOne(lambda x, y: [x, y]),
    OneByOne(lambda x, y: {0: x, 1: y, "name": "z"}),
    OneByOne(Sample),
],
                         ids=["one by one", "many at once", "lists", "dicts", "named tuples"])
def test_the_weights_are_the_same_when_the_same_samples_come_in_another_form(
        dataset: Dataset[Any]) -> None:
    """A dataset is `len` and `[i]`, or `__getitems__`; batches are what torch's own collate
    makes."""
    assert trained(built(), dataset=dataset).weights_sha256 == trained(built()).weights_sha256


def test_a_loss_may_take_its_batch_apart() -> None:
    """Each call gets a batch of its own, in the warm-up too."""
    def loss(model: Model, batch: Any) -> torch.Tensor:
        return mse(model, [batch.pop("x"), batch.pop("y")])

    dataset = OneByOne(lambda x, y: {"x": x, "y": y})
    assert trained(built(), dataset=dataset,
                   loss=loss).weights_sha256 == trained(built()).weights_sha256


def negated(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return [-x, y]


class Negated(TensorDataset):
    """A TensorDataset that changes its samples, as an augmentation does."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        x, y = super().__getitem__(index)
        return -x, y


@pytest.mark.parametrize(("dataset", "collate"), [
    (OneByOne(), negated), (DATA, negated), (Negated(INPUT, TARGET), None)],
    ids=["own", "TensorDataset", "extended"])
def test_the_users_code_makes_samples_and_batches(dataset: Dataset[Any], collate: Any) -> None:
    """The collate that is given, whatever the dataset is; the `[i]` of a dataset's own."""
    reference = trained(built(), dataset=TensorDataset(-INPUT, TARGET))
    assert trained(built(), dataset=dataset,
                   collate=collate).weights_sha256 == reference.weights_sha256


# --- random numbers -------------------------------------------------------------------------------

def draws() -> tuple[float, ...]:
    return (*torch.rand(2).tolist(), random.random(), float(numpy.random.rand()))


def test_a_microbatches_draws_follow_from_its_number_when_anything_was_drawn_before() -> None:
    """Who runs it, when, and after what makes no difference: the seed is that of step and
    micro-batch (torch, random, numpy)."""
    drawn: list[tuple[tuple[int, ...], tuple[float, ...]]] = []

    def loss(model: Model, batch: Any) -> torch.Tensor:
        drawn.append((tuple(batch[2].tolist()), draws()))
        torch.rand(len(drawn)), random.random()  # another number of draws each time
        return mse(model, batch)

    trained(built(), dataset=TensorDataset(INPUT, TARGET, torch.arange(SIZE)), loss=loss,
            until="1 epoch")
    expected = []
    for step in range(3):
        for microbatch in range(SCHEDULE.microbatches):
            seed_everything(SCHEDULE.microbatch_seed(step, microbatch))
            expected.append((tuple(SCHEDULE.microbatch_samples(step, microbatch).tolist()),
                             draws()))
    assert drawn[-len(expected):] == expected
    assert len({numbers for _, numbers in expected}) == len(expected)


# --- a world of threads ---------------------------------------------------------------------------

class OneGeneration(Generations):
    """The life of one generation that never breaks."""

    def run(self, state: Any, body: Callable[[], Iterator[Any]], **_: Any) -> Iterator[Any]:
        state.has_state = True
        self.events.bound.update(generation=1, rank=self.world.rank, size=self.world.size)
        yield from body()


@dataclass(frozen=True, kw_only=True)
class JobOfTrain(Job):
    """A job whose loss is a function, as train() has it."""

    loss: Loss


class Trainer(Loop):
    """A loop that is driven as train() drives it."""

    def run(self) -> Result:
        result: Result = self.do(self.stages())
        return result

    def do(self, stages: Any) -> Any:
        """Run the loss of each micro-batch; returns what the stages return."""
        assert isinstance(self.job, JobOfTrain)
        return drive(stages, self.job.model, self.job.loss, self.job.precision)


def rehearse_alone(whole: JobOfTrain) -> None:
    """Warm up as a standby does."""
    stages = rehearse(
        whole, Loop(whole, Launch(), Driver(), Events(None, attempt=1), "exact", Sending()).warm_up)
    for microbatch in stages:
        microbatch.backward(whole.loss(whole.model, microbatch.batch))


def job(model: Model, **changes: Any) -> JobOfTrain:
    whole: dict[str, Any] = {
        "model": model, "optimizer": sgd(model), "dataset": DATA, "loss": mse, "schedule": SCHEDULE,
        "rate": lambda step: 1.0, "clip_norm": None, "scaler": None, "collate": default_collate,
        "state": {}, "after_step": lambda step: None, "device": torch.device("cpu")
    }
    whole |= changes
    reader = Reader(whole["dataset"], whole["collate"], MicrobatchRecipe(whole["schedule"]), None,
                    whole["device"])
    return JobOfTrain(readers=Readers(reader), **whole)


class Odd(Exception):
    """An error of the user's own."""


def in_a_world(size: int, make: Callable[[int], Job], reduce: str = "exact") -> list[Any]:
    """Train in a world of threads; returns each rank's Result, or what the user's code made it
    raise."""
    hub, trainers = Hub(size), []
    torch.set_num_threads(1)
    for rank in range(size):
        trainer = Trainer(make(rank), Launch(), Driver(), Events(None, attempt=1), reduce,
                          Sending())
        trainer.world = Member(hub, rank)
        trainer.generations = OneGeneration(
            Launch(), Driver(), trainer.events, hooks_of(trainer), trainer.world)
        trainers.append(trainer)

    def work(rank: int) -> Any:
        try:
            return trainers[rank].run()
        except (LossNotFinite, Odd, PeerFailed, PeersLost, ReplicaDiffers, ReplicasDisagree,
                SystemExit) as error:
            return error

    return in_threads(size, work, hub.abort)


@pytest.mark.parametrize("error", [Odd, SystemExit])
def test_all_stop_at_the_same_step_when_one_workers_data_is_bad(error: type[BaseException]) -> None:
    """There the user's own exception leaves, elsewhere its text; nobody applies the step."""
    schedule = Schedule(dataset_size=SIZE, **NUMBERS)
    bad = int(schedule.microbatch_samples(1, 2)[0])  # rank 1 of 2 runs it
    models = [built(), built()]

    def broken(x: torch.Tensor, y: torch.Tensor) -> Any:
        if torch.equal(x, INPUT[bad]):
            raise error(f"sample {bad} is bad")
        return x, y

    first, second = in_a_world(2, lambda rank: job(models[rank], dataset=OneByOne(broken)))
    assert isinstance(second, error)
    assert isinstance(first, PeerFailed) and f"{error.__name__}: sample {bad} is bad" in str(first)
    assert error is SystemExit or f"dataset[{bad}] raised this" in str(first)
    reference = built()
    trained(reference, until="1 step")
    for model in models:
        assert all(torch.equal(p, q) for p,
                   q in zip(model.parameters(), reference.parameters(), strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_no_worker_applies_a_step_when_one_workers_weights_differ(size: int) -> None:
    """Found by the vote of the next step. Of three the outlier leaves; of two nobody knows who is
    right."""
    models = [built() for _ in range(size)]

    def after_step(step: int) -> None:
        if step == 1:
            with torch.no_grad():
                models[1][0].weight.view(torch.int32)[0, 0] ^= 1

    changes: list[dict[str, Any]] = [{}, {"after_step": after_step}, {}]
    ended = in_a_world(size, lambda rank: job(models[rank], **changes[rank]))
    assert [type(error) for error in ended] == (
        [ReplicasDisagree] * 2 if size == 2 else [PeersLost, ReplicaDiffers, PeersLost])
    assert "0.weight" in str(ended[1]) or size == 2
    reference = built()
    trained(reference, until="2 steps")
    assert all(torch.equal(p, q) for p,
               q in zip(models[0].parameters(), reference.parameters(), strict=True))


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "named"), [
    ({"reduce": "mean"}, "reduce is 'mean'"),
    ({"global_batch": 0}, "global_batch is 0"),
    ({"global_batch": 8.5}, "global_batch is 8.5"),
    ({"microbatches": 9}, "microbatches is 9"),
    ({"microbatches": 0}, "microbatches is 0"),
    ({"until": "0 epochs"}, "until is '0 epochs'"),
    ({"seed": -1}, "seed is -1"),
    ({"until": "7"}, "until is '7'"),
    ({"checkpoint_every": -1}, "checkpoint_every is -1"),
    ({"cpu_threads": 0}, "cpu_threads is 0"),
    ({"clip_norm": -1.0}, "clip_norm is -1"),
    ({"clip_value": 0.0}, "clip_value is 0"),
    ({"dataset": TensorDataset(torch.empty(0, 5), torch.empty(0, 3))}, "dataset_size is 0"),
])
def test_an_impossible_number_is_refused_before_anything_runs(
        changes: dict[str, Any], named: str) -> None:
    """A ConfigError names the key and its value."""
    def loss(model: Model, batch: Any) -> torch.Tensor:
        raise AssertionError("it has run")

    with pytest.raises(ConfigError, match=named):
        trained(built(), **({"loss": loss} | changes))


class History:
    """A state that no checkpoint can keep."""

    def state_dict(self) -> dict[str, Any]:
        return {"history": [Path("losses.csv")]}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        raise AssertionError


@pytest.mark.parametrize(("is_trained", "changes", "named"), [
    (True, {"optimizer": sgd(built())},
     r"4 parameters that are not the model's.*model\.parameters"),
    (False, {}, "0 that can be trained"),
    (True, {"state": {"metrics": History()}}, "extras/metrics/history holds a .*Path"),
    (True, {"state": {1: Ears()}}, "state is {1: .* Use a dict by names"),  # no restore reads it
    (True, {"state": [History()]}, "Use a dict by names"),
    (True, {"buffers": {1: "sum"}}, "buffers is {1: 'sum'}. Use a dict by names"),
    (True, {"optimizer": [1]}, "the optimizer is a list, which has no param_groups"),
    (True, {"optimizer": {"d": 1}}, "optimizer has 'd': int"),
    (True, {"loader": 2}, r"loader is 2. Use Loader\(workers=4\)"),
    (True, {"swa": True}, r"swa is True. Use Swa\("), (True, {"collate": "x"}, "collate is x. Use"),
    (True, {"listeners": print}, "listeners is .* Use a list of functions"),
    (True, {"clip_norm": torch.tensor(1.0)}, r"clip_norm is tensor\(1.\). Use a positive number"),
    (True, {"clip_norm": numpy.float32(1.0)}, "Use a positive number"),
    (True, {"batch_size": 8}, "no option of .*DataLoader. Use global_batch"),
    (True, {"num_workers": 2}, r"Use loader=Loader\(workers=4\)"),
    (True, {"sampler": None}, 'Use order: "shuffled", "sequential", Weighted'),
    (True, {"worker_init_fn": None}, "Use seed"),
])
def test_objects_that_cannot_work_are_refused_at_the_start(
        is_trained: bool, changes: dict[str, Any], named: str) -> None:
    """An optimizer of weights that nobody trains, nothing to train, and a value that no checkpoint
    could keep: where it is, and what it is."""
    model = built()
    optimizer = sgd(model)
    model.requires_grad_(is_trained)
    with pytest.raises(ConfigError, match=named):
        trained(model, **({"optimizer": optimizer} | changes))


def test_a_model_on_several_devices_is_refused() -> None:
    """Its parts are named. What is not trained may be on the CPU. ("meta" stands for a device.)"""
    layers = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3, device="meta"))
    with pytest.raises(ConfigError, match=r"0.weight on cpu, 1.weight on meta\), but each"):
        require_one_device(layers)
    layers[0].requires_grad_(False)
    require_one_device(layers)


def test_an_exception_leaves_with_its_own_type_when_the_users_loss_raises() -> None:
    """Nothing of the step remains: weights, statistics and counters are those of the last finished
    one."""
    ears, calls = Ears(), []

    def loss(model: Model, batch: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4 + 4 + 2:  # the warm-up, step 0, and in step 1 the second microbatch
            raise Odd("as planned")
        return mse(model, batch)

    model, reference = built(torch.nn.BatchNorm1d(8)), built(torch.nn.BatchNorm1d(8))
    with pytest.raises(Odd, match="as planned"):
        trained(model, loss=loss, listeners=[ears])
    assert len(calls) == 10
    trained(reference, until="1 step")
    assert all(torch.equal(a, b) for a, b in
               zip(model.state_dict().values(), reference.state_dict().values(), strict=True))
    (failed,) = ears.facts("worker.failed")
    assert "Odd: as planned" in failed["error"]
    assert not ears.facts("run.finished")


@pytest.mark.parametrize("where", ["loss", "lr", "after_step"])
def test_an_exit_is_the_users_error_when_the_users_code_exits(where: str) -> None:
    """sys.exit() in the user's code is no dead host, whose worker would be started again for
    ever."""
    ears = Ears()

    def exits(*arguments: Any) -> Any:
        sys.exit("bad data")

    with pytest.raises(UserExited, match="SystemExit.'bad data'") as raised:
        trained(built(), listeners=[ears], **{where: exits})
    assert isinstance(raised.value.__cause__, SystemExit)
    assert "SystemExit: bad data" in ears.facts("worker.failed")[0]["error"]


def test_the_run_goes_on_when_a_listener_raises(run_dir: Path, monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    """It is told with its traceback, the 1st and the 10th time, and stays called; the others hear
    everything."""
    heard, ears = list[str](), Ears()

    def metrics(event: str, facts: dict[str, Any]) -> None:
        heard.append(event)
        raise ConnectionError("no server, as planned")

    result = trained(built(), listeners=[metrics, ears])
    assert len(heard) > 11 and sorted(heard) == sorted(event for event, _ in ears.heard)
    told = ears.facts("worker.listener_failed")
    assert [e["failures"] for e in told] == [1, 10] and "metrics" in told[0]["listener"]
    assert "ConnectionError: no server, as planned" in told[0]["error"]
    assert [e for e in read_events(run_dir)
            if e["event"] == "worker.listener_failed"][0]["heard"] == heard[0]
    assert capsys.readouterr().err.count("ConnectionError: no server, as planned") == 2
    monkeypatch.delenv("ELASTIC_TRAINER_RUN_DIR")
    assert result.weights_sha256 == trained(built()).weights_sha256


def test_the_exit_code_is_that_of_a_user_error_when_a_worker_has_not_stood_ready(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver knows nothing of it yet; the exception itself leaves as it is, and its traceback
    is shown."""
    def loss(model: Model, batch: Any) -> torch.Tensor:
        raise Odd("as planned")

    shown: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *exception: shown.append(exception))
    monkeypatch.setenv("ELASTIC_TRAINER_DRIVER", "127.0.0.1:9")
    with pytest.raises(Odd) as raised:
        trained(built(), loss=loss)
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(raised.type, raised.value, raised.tb)
    assert ended.value.code == EXIT_USER_ERROR and shown == [(raised.type, raised.value, raised.tb)]


@pytest.mark.parametrize("step", [0, 1, 5])
def test_an_exception_leaves_with_its_own_type_when_a_sample_cannot_be_read(step: int) -> None:
    """Also when it is the first one of all."""
    bad = INPUT[int(SCHEDULE.microbatch_samples(step, 0)[0])]

    def broken(x: torch.Tensor, y: torch.Tensor) -> Any:
        if torch.equal(x, bad):
            raise Odd("a bad sample")
        return x, y

    with pytest.raises(Odd, match="a bad sample"):
        trained(built(), dataset=OneByOne(broken))


def test_a_number_of_steps_is_done_whatever_an_epoch_has(
        capsys: pytest.CaptureFixture[str]) -> None:
    """More than one pass over the dataset, too. Without a length it is one pass."""
    assert trained(built(), until="8 steps").steps == 8
    model = built()
    assert train(model, sgd(model), DATA, loss=mse, global_batch=8, microbatches=4,
                 progress=False).steps == 3
    assert capsys.readouterr().err == ""


# --- going on -------------------------------------------------------------------------------------

class ToldToStop(Driver):
    """A driver that stops the attempt after so many steps."""

    def __init__(self, after: int):
        self.after, self.step = after, 0

    def note(self, phase: str, step: int) -> None:
        self.step = step

    def wants(self) -> Wants:
        return Wants(stop=self.step + 1 >= self.after)


def test_the_last_step_is_in_the_store_when_the_attempt_is_stopped(
        run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker leaves at the end of a step, after its checkpoint, and the next attempt goes on
    there."""
    model = built()
    launch = Launch(run_dir=run_dir)
    events = Events(run_dir, run="run", attempt=1)
    with pytest.raises(RunOver) as over:
        Trainer(job(model), launch, ToldToStop(4), events, "exact", Sending()).run()
    assert over.value.verdict == "interrupted"
    assert [e["step"] for e in read_events(run_dir)
            if e["event"] == "state.checkpoint_published"] == [4]
    resumed = trained(built(seed=99))
    monkeypatch.delenv("ELASTIC_TRAINER_RUN_DIR")
    assert resumed.weights_sha256 == trained(built()).weights_sha256


def test_a_run_is_never_begun_anew_when_its_checkpoints_are_another_models(run_dir: Path) -> None:
    """The user is told, with a remedy."""
    trained(built(), until="1 step")
    with pytest.raises(LayoutError, match="another name"):
        trained(built(torch.nn.LayerNorm(8)))


def test_a_refusal_is_the_users_mistake_in_the_first_attempt_only(
        run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later the store has been usable: the next generation asks again, and the event log
    has it. A person who starts it by hand sees the error.
    """
    def refuse(*_: Any, insist: bool) -> None:
        raise StoreRefused(f"not allowed, as planned, insist {insist}")

    monkeypatch.setattr("elastic_trainer.training.checkpointing.RESTORE_PAUSE_S", 0.0)
    for attempt, driver, ends in ((1, "there:1", ConfigError), (2, "there:1", PeersLost),
                                  (3, None, ConfigError)):
        launch, events = Launch(run_dir=run_dir, attempt=attempt,
                                driver=driver), Events(run_dir, attempt=attempt)
        trainer = Trainer(job(built()), launch, Driver(), events, "exact", Sending())
        monkeypatch.setattr(trainer.checkpointing.checkpoints, "restore", refuse)
        with pytest.raises(ends, match=f"insist {attempt == 2}"):
            trainer._restore()
    assert [e["attempt"] for e in read_events(run_dir)
            if e["event"] == "state.store_unavailable"] == [2]


def test_the_age_of_the_last_checkpoint_is_minded_while_one_is_on_its_way(
        run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that never arrives must not silence the alarm; and the wait for a place raises none."""
    ears = Ears()
    events = Events(None, attempt=1)
    events.listeners.append(ears)
    trainer = Trainer(job(built()), Launch(run_dir=run_dir), Driver(), events, "exact", Sending())
    checkpointing, clock = trainer.checkpointing, time.monotonic()
    assert (checkpoints := checkpointing.checkpoints)
    monkeypatch.setattr(checkpoints.publisher, "is_busy", lambda: True)
    monkeypatch.setattr("elastic_trainer.training.timing.time.monotonic", lambda: clock)
    clock += 1e6  # booted long ago
    checkpointing.tick(rank=0)
    checkpoints.known.receive(-1)
    assert ears.facts("state.checkpoint_overdue") == []
    clock += 1e6
    for finished in (1, 2):
        trainer.state.committed = finished
        checkpointing.tick(rank=0)
        assert not checkpointing.ballot(rank=0).is_wanted
    (overdue,) = ears.facts("state.checkpoint_overdue")
    assert overdue["step"] == 2


@pytest.mark.parametrize("changes", [
    {"global_batch": 4},
    {"seed": 4},
    {"dataset": TensorDataset(INPUT[:20], TARGET[:20])},
    {"reduce": "ring"},
],
                         ids=["global_batch", "seed", "dataset", "reduce"])
def test_other_numbers_are_refused_when_a_run_is_resumed(
        run_dir: Path, changes: dict[str, Any]) -> None:
    """The step alone says which samples are done, so under another schedule some would be lost and
    some repeated."""
    trained(built(), until="2 steps")
    with pytest.raises((ConfigError, LayoutError)):
        trained(built(), **changes)


def test_fewer_steps_than_the_run_has_are_refused_when_it_is_resumed(run_dir: Path) -> None:
    """It would be finished at once, with steps that it was not to have."""
    trained(built(), until="4 steps")
    with pytest.raises(ConfigError, match="checkpoint of step 4.*as many steps"):
        trained(built(), until="3 steps")
    assert trained(built(), until="4 steps").steps == 4


def test_the_event_log_has_each_step_once_when_a_run_is_resumed(run_dir: Path) -> None:
    """In order, with the samples that the schedule says; a line that is written again says so."""
    trained(built(), until="2 steps")
    trained(built())
    told = [
        e for e in read_events(run_dir)
        if e["event"] == "worker.step_committed" and not e.get("repeated")
    ]
    assert [(e["step"], e["samples"], e["digest"]) for e in told] == [
        (step, SCHEDULE.batch_size(step), SCHEDULE.batch_digest(step)) for step in range(6)]


def test_the_run_is_proved_when_it_goes_on_without_a_launcher(run_dir: Path) -> None:
    """Each life is an attempt in the event log. The time between them is nobody's."""
    with pytest.raises(Odd):
        trained(built(), checkpoint_every=1, after_step=raises_after(3))
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["finished"], result["steps"], result["weights_sha256"]) == (False, 3, None)
    trained(built())
    told = read_events(run_dir)
    assert [e["attempt"] for e in told if e["event"] == "attempt.started"] == [1, 2]
    assert {e["attempt"] for e in told if e["event"] == "worker.generation_started"} == {1, 2}
    verdict = verify(run_dir)
    assert verdict.violations == () and verdict.finished and verdict.attempts == 2
    night = [e | {"time": e["time"] + 50_000 * (e["attempt"] == 2)} for e in told]
    assert summarize(night)["books"]["stopped_s"] >= 50_000
    assert summarize(night)["books"]["training_s"] < 1_000


def test_a_result_is_no_more_of_a_finished_run_when_it_is_resumed_with_more_steps(
        run_dir: Path) -> None:
    """What has stopped half-way never shows the weights of before; and it is proved, as is its
    end."""
    trained(built(), until="2 steps")
    assert json.loads((run_dir / "result.json").read_text())["steps"] == 2
    found: list[bool] = []

    def loss(model: Model, batch: Any) -> torch.Tensor:
        found.append(json.loads((run_dir / "result.json").read_text())["finished"])
        return mse(model, batch)

    with pytest.raises(Odd):
        trained(built(), checkpoint_every=1, loss=loss, after_step=raises_after(4))
    assert (found[0], found[-1]) == (True, False)
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["finished"], result["steps"], result["weights_sha256"]) == (False, 4, None)
    assert verify(run_dir).violations == ()
    trained(built())
    assert json.loads(
        (run_dir / "result.json").read_text())["finished"] and verify(run_dir).violations == ()


def raises_after(step: int) -> Callable[[int], None]:
    def after_step(finished: int) -> None:
        if finished == step:
            for thread in threading.enumerate():
                if thread.name in ("checkpoint", "publisher"):
                    thread.join()
            raise Odd("as planned")

    return after_step


def test_a_worker_has_its_number_on_its_host_when_it_was_launched(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Which GPU is mine; 0 when nobody launched it."""
    assert local_rank() == 0
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "3")
    assert local_rank() == 3


class Wanting(Driver):
    """A driver that wants another world."""

    def __init__(self) -> None:
        self.changes, self.is_urgent = True, False

    def wants(self) -> Wants:
        return Wants(change=self.changes, is_urgent=self.is_urgent)


def test_a_change_waits_for_the_shares_that_go_up() -> None:
    """For so long and no longer, and not when this worker itself was told to go: then it has
    seconds."""
    driver = Wanting()
    saving = [False]
    generations = Generations(Launch(), driver, Events(None, attempt=1),
                              Hooks(is_saving=lambda: saving[0]))

    def waits(now: float) -> bool:
        return generations.change_waits(driver.wants(), now)

    assert not waits(100.0)
    saving[0] = True
    assert waits(101.0)
    assert not waits(100.0 + UPLOAD_FIRST_S)
    driver.changes = False
    assert not waits(120.0)
    driver.changes = True
    assert waits(130.0)
    driver.is_urgent = True
    assert not waits(131.0)


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([(13, 13, False), (13, 14, True),
          (13, 13, True)], [13]),  # rank 0 is a newcomer, or has revived itself
        ([(13, 14, True), (13, 14, True), (0, 0, False)], [13]),
        ([(12, 13, True), (13, 14, True),
          (12, 13, True)], [13]),  # only one has seen the vote pass, and went on
        ([(12, 13, True), (13, 13, True), (12, 13, True)], []),
        ([(13, 13, True), (13, 13, True), (0, 0, False)], [])
    ])
def test_a_step_that_is_done_again_is_logged_whichever_worker_had_begun_it(
        ranks: list[tuple[int, int, bool]], told: list[int],
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, by rank 0, also when the reconcile itself breaks and is entered again."""
    heard = []
    events = Events(None, attempt=1)
    events.listeners.append(lambda event, about: heard.append((event, about["step"])))
    world, trained = World(), built()
    world.seat(0, len(ranks))
    generations = Generations(Launch(), Driver(), events, Hooks(), world)
    state = LiveState(trained, torch.optim.SGD(trained.parameters(), 0.1))
    monkeypatch.setattr(generations, "_exchange_statuses",
                        lambda state: [WorkerStatus(*rank, (8, 1), 0) for rank in ranks])
    monkeypatch.setattr(Transfer, "move", lambda *_, **__: None)
    for _ in range(2):
        state.committed, state.begun, state.has_state = ranks[0]
        state.prepared = state.begun
        list(
            generations._reconcile(state, lambda: "", lambda *vote: state.commit(*vote),
                                   lambda: iter(())))
        ranks[0] = state.committed, state.begun, state.has_state
    assert [step for event, step in heard if event == "worker.step_redone"] == told


class Ordered:
    """An extra whose tensors come in an order of its own, and with a number of its own."""

    def __init__(self, names: str, number: float):
        self.values: dict[str, Any] = {name: torch.full((2, ), float(ord(name)))
                                       for name in names} | {"number": number}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = values


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_newcomer_gets_one_state_or_none_when_those_who_have_it_differ(order: str) -> None:
    """Each gives a share of the bytes: of the same tensors, in the same order, or all are told.
    Numbers are one's."""
    hub = Hub(3)

    def member(rank: int) -> dict[str, Any]:
        model = built()
        state = LiveState(model, torch.optim.SGD(model.parameters(), 0.1))
        state.has_state, state.extras = rank < 2, {
            "mine": Ordered("ab" if rank == 0 else order, 10.0**rank)
        }
        Transfer(Member(hub, rank), Events(None, attempt=1), list,
                 lambda *_: None).move(state, [0, 1])
        return state.extras["mine"].values

    with ThreadPoolExecutor(3) as pool:
        got = [pool.submit(member, rank) for rank in range(3)]
    if order == "ba":
        assert all("the tensors of rank 1 differ from rank 0's" in str(one.exception())
                   for one in got)
    else:
        assert repr(got[2].result()) == repr(Ordered("ab", 1.0).values)


def test_an_upload_rests_no_more_when_a_worker_waits_for_another_world(
        run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vote tells everybody, also those who have not heard of the change."""
    rested = threading.Event()
    monkeypatch.setattr("elastic_trainer.state.checkpoints.upload.rest_s",
                        lambda *_: rested.set() or 600.0)
    driver, uploaders = Wanting(), list[threading.Thread]()
    driver.changes = False

    def after_step(step: int) -> None:
        if step == 2:  # the first checkpoint is on its way
            assert (checkpoints := trainer.checkpointing.checkpoints)
            assert (share := checkpoints.upload.share) and not share.is_urgent.is_set()
            uploaders.extend(checkpoints.upload.threads)
            assert rested.wait(60)
            driver.changes = True
        elif step == 4:
            for thread in uploaders:
                thread.join(60)
            assert uploaders and not any(thread.is_alive() for thread in uploaders)
            driver.changes = False

    plan = Plan(every=Cadence(steps=1), part_bytes=100)
    launch, events = Launch(run_dir=run_dir), Events(None, attempt=1)
    trainer = Trainer(job(built(), after_step=after_step), launch, driver, events, "exact",
                      Sending(), plan)
    assert trainer.run().steps == SCHEDULE.steps
    assert uploaders


@pytest.mark.parametrize("what", ["nothing", "weights", "loss", "program"])
def test_the_warm_up_describes_the_arithmetic_of_a_worker(
        what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on each worker of a kind. A loss that is not the same twice, up to the rounding of a
    machine that wavers, says nothing, and weights are no processor."""
    own = torch.Generator()
    monkeypatch.setattr("elastic_trainer.training.warm_up.may_waver", lambda device: True)

    def loss(model: Model, batch: Any) -> torch.Tensor:
        noise = 1e-5 * torch.rand((), generator=own) if what == "loss" else 0.0
        return mse(model, batch) * (1.0 + noise)

    def said(**how: Any) -> Arithmetic:
        whole = job(built(torch.nn.Dropout(), **how), loss=loss)
        trainer = Trainer(whole, Launch(), Driver(), Events(None, attempt=1), "exact", Sending())
        trainer.run()
        assert trainer.generations.arithmetic
        return trainer.generations.arithmetic

    first = said()
    if what == "program":
        monkeypatch.setattr("elastic_trainer.training.warm_up.probe_program", lambda device: 5)
    second = said(seed=1 if what == "weights" else 0)
    assert (first.inputs == second.inputs) == (what != "weights")
    assert (first.result == 0) == (second.result == 0) == (what == "loss")
    assert computes_otherwise(first, second) == (what == "program")


def test_a_standby_computes_as_a_worker_that_was_none() -> None:
    """Its rehearsal leaves nothing in weights, buffers, rates or random numbers: else it would be
    refused."""
    def said(rehearses: bool) -> Arithmetic:
        whole = job(built(torch.nn.BatchNorm1d(8), torch.nn.Dropout()),
                    rate=cosine(warmup_steps=2, total_steps=6),
                    schedule=Schedule(dataset_size=SIZE, **NUMBERS, max_steps=2))
        if rehearses:
            rehearse_alone(whole)
        trainer = Trainer(whole, Launch(), Driver(), Events(None, attempt=1), "exact", Sending())
        trainer.run()
        assert trainer.generations.arithmetic
        return trainer.generations.arithmetic

    torch.set_num_threads(1)
    assert said(True) == said(False)
    assert said(True).result


def test_other_arithmetic_is_logged_when_a_run_goes_on(
        run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint's record says how its writers computed."""
    ears = Ears()
    trained(built(), until="3 steps", run_dir=run_dir, listeners=[ears])
    trained(built(), until="4 steps", run_dir=run_dir, listeners=[ears])
    assert not ears.facts("worker.arithmetic_differs")
    monkeypatch.setattr("elastic_trainer.training.warm_up.probe_program", lambda device: 5)
    monkeypatch.setattr("elastic_trainer.training.warm_up.probe_facts", lambda device:
                        (("cpu", "another"), ))
    trained(built(), until="5 steps", run_dir=run_dir, listeners=[ears])
    [told] = ears.facts("worker.arithmetic_differs")
    assert told["differs"]["cpu"][0] == "another" and not told["refused"]


def test_a_run_in_one_process_leaves_its_environment_alone(run_dir: Path) -> None:
    """A notebook that trains, and then starts horovodrun, hands its variables on to all workers."""
    before = dict(os.environ)
    trained(built(), until="1 step", run_dir=run_dir)
    ours = {name for name in os.environ if name.startswith(("ELASTIC_TRAINER_", "HOROVOD_"))}
    assert ours <= before.keys()


def test_a_standby_gets_its_place_when_the_script_asks_for_its_number(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that chooses its GPU by it boots up to there."""
    monkeypatch.setattr(standby, "wait_for_place",
                        lambda: monkeypatch.setenv("ELASTIC_TRAINER_SLOT", "3"))
    assert local_rank() == 3
