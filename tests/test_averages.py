"""Averaged weights: the bits of torch's AveragedModel in every world, and no trace in the
training."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import Cluster
from faults import Plan
from test_evaluation import HELD_OUT, breaking_gathers, found, model_of
from test_faults import FEW, host
from test_loop import mse
from test_trainer import Model, in_a_breaking_world, loop, trainer_of
from torch.optim import swa_utils

from elastic_trainer import ConfigError, Swa, Trainer
from elastic_trainer.events.log import Events
from elastic_trainer.reduce.ring import Sending
from elastic_trainer.training.job.averages import Average
from elastic_trainer.training.work import Work
from elastic_trainer.world.collectives import World
from elastic_trainer.world.shard_moves import held_by_rank

pytestmark = pytest.mark.usefixtures("no_launcher")
KINDS: list[dict[str, Any]] = [{"ema": 0.9}, {"swa": Swa(from_step=2, every=2)}]
SHARDS = (None, "optimizer", "gradients")


def bits(model: Model) -> list[bytes]:
    return [tensor.detach().numpy().tobytes() for tensor in [*model.parameters(), *model.buffers()]]


def run(model: Model, **options: Any) -> tuple[str, list[bytes], list[Any]]:
    """Train, and evaluate the averaged weights after each step that has some."""
    torch.manual_seed(0)
    trainer, seen = trainer_of(model, **options), []

    def after(step: Any) -> None:
        if step.number > 2:
            before = bits(model)
            with trainer.averaged():
                seen.append(trainer.evaluate(HELD_OUT, found, batch_size=7))
            assert bits(model) == before

    sha256 = loop(trainer, model, after=after)
    with trainer.averaged():
        return sha256, bits(model), seen


@pytest.mark.parametrize("options", KINDS)
def test_the_average_has_the_bits_of_torchs_averaged_model(options: dict[str, Any]) -> None:
    ours, other = model_of(), model_of()
    torch.manual_seed(0)
    peer: Any = swa_utils.AveragedModel(
        other, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9) if "ema" in options
        else swa_utils.get_swa_multi_avg_fn())
    other_sha256 = loop(trainer_of(other), other, after=lambda step: (
        "ema" in options or (step.number >= 2 and step.number % 2 == 0))
        and peer.update_parameters(other))
    sha256, averaged, _ = run(ours, **options)
    assert sha256 == other_sha256
    if "ema" in options:
        assert averaged == bits(peer.module)
    else:  # its buffers are those of its last update
        count = len(list(other.parameters()))
        assert averaged[:count] == bits(peer.module)[:count]


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize(("size", "shard"), [
    (2, None), (3, None), (4, None), (2, "optimizer"), (4, "optimizer"), (3, "gradients")])
def test_the_average_has_the_same_bits_in_every_world(
        size: int, shard: str | None, options: dict[str, Any],
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if each worker has a part of it."""
    alone, models = run(model_of(), **options), [model_of() for _ in range(size)]
    ended = in_a_breaking_world(monkeypatch, size,
                                lambda rank: run(models[rank], **options, shard=shard))
    assert ended == [alone] * size


@pytest.mark.parametrize(("shard", "call"), [
    (None, 2), *itertools.product(SHARDS[1:], range(1, 7))])
def test_the_average_has_the_same_bits_when_the_generation_breaks_while_it_is_shown(
        shard: str | None, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages of the evaluation see the trained values, so a newcomer receives those. If it is
    sharded, the workers that lack its parts get them in the next generation."""
    alone, models = run(model_of(), ema=0.9), [model_of() for _ in range(3)]
    fired = breaking_gathers(monkeypatch, 1, call)
    ended = in_a_breaking_world(monkeypatch, 3,
                                lambda rank: run(models[rank], ema=0.9, shard=shard))
    assert ended == [alone] * 3 and fired == [1]


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize(("before", "after"), [
    (None, None), ("optimizer", None), (None, "gradients"), ("gradients", "optimizer")])
@pytest.mark.parametrize("last", [1, 3])
def test_the_average_goes_on_when_a_run_is_resumed(
        options: dict[str, Any], before: str | None, after: str | None, last: int,
        tmp_path: Path) -> None:
    """After step 3, and after step 1, when the mean has not begun."""
    straight, model = run(model_of(), **options), model_of()
    torch.manual_seed(0)
    trainer = trainer_of(model, run_dir=tmp_path / "run", checkpoint_every=1, shard=before,
                         **options)
    for step in trainer:
        for batch in step:
            step.backward(mse(model, batch))
        if step.number == last:
            break
    resumed = run(model_of(), run_dir=tmp_path / "run", shard=after, **options)
    assert resumed[:2] == straight[:2] and straight[2][-len(resumed[2]):] == resumed[2]


@pytest.mark.parametrize("shard", SHARDS[1:])
def test_each_worker_has_a_part_of_the_average(shard: str,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own and its buddies', with those of the optimizer; all of it when the run is finished."""
    kept = dict[int, set[str]]()

    def trained(rank: int) -> None:
        model = model_of()
        trainer = trainer_of(model, shard=shard, ema=0.9)
        for step in trainer:
            for batch in step:
                step.backward(mse(model, batch))
            state = trainer._worker.loop.state
            average = trainer._worker.job.average
            kept[rank] = set(average.weights)
            assert kept[rank] == {name for name in average.parameters if state.shards.holds(name)}
        assert average.whole.keys() == average.parameters.keys()

    in_a_breaking_world(monkeypatch, 4, trained)
    count = len(list(model_of().parameters()))
    assert sum(map(len, kept.values())) == 2 * count and max(map(len, kept.values())) < count


def test_a_checkpoint_has_the_parts_of_other_workers_in_another_memory_format(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three workers with one buddy: no worker has all momenta and averages of the convolutions."""
    def built() -> torch.nn.Sequential:
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 3), torch.nn.Flatten(),
            torch.nn.Linear(16, 2)).to(memory_format=torch.channels_last)

    torch.manual_seed(1)
    images = torch.utils.data.TensorDataset(torch.randn(16, 3, 6, 6), torch.randn(16, 2))

    def trained(model: torch.nn.Sequential, **options: Any) -> list[bytes]:
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5), images,
                          global_batch=8, microbatches=4, until="2 epochs", ema=0.9, **options)
        for step in trainer:
            for x, y in step:
                step.backward(torch.nn.functional.mse_loss(model(x), y))
        with trainer.averaged():
            return [p.detach().contiguous().numpy().tobytes() for p in model.parameters()]

    alone, models = trained(built()), [built() for _ in range(3)]
    ended = in_a_breaking_world(monkeypatch, 3, lambda rank: trained(
        models[rank], shard="optimizer", run_dir=tmp_path / "run", checkpoint_every=1))
    assert ended == [alone] * 3


def test_a_worker_without_the_runs_values_sends_no_average() -> None:
    """A restore that broke leaves a worker with blocks that it was to hold."""
    model = model_of()
    trainer = trainer_of(model, shard="optimizer", ema=0.9)
    work = Work(trainer._worker.job, "exact", Sending(), Events(None))
    work.shards.hold_as_built(0)
    assert held_by_rank(World(), work.state) == [set()]
    work.state.has_state = True
    assert held_by_rank(World(), work.state) == [work.shards.held]


def test_nothing_of_a_gathered_average_is_kept_after_its_block() -> None:
    """The loop holds the dict in which it came until the next step."""
    average = Average(model_of(), 0.9, None, is_sharded=True)
    average.update(0)
    gathered = {name: torch.zeros_like(p) for name, p in average.parameters.items()}
    tensors = [weakref.ref(one) for one in gathered.values()]
    with average.shown(lambda: gathered):
        assert all(p.detach().abs().sum() == 0 for p in average.parameters.values())
    assert not any(one() is not None for one in tensors)
    average.weights.popitem()
    with pytest.raises(RuntimeError, match="a part of the averaged weights"), average.shown():
        pass


def test_one_worker_alone_in_averaged_is_an_error_where_it_has_a_part(
        monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(rank: int) -> None:
        model = model_of()
        trainer = trainer_of(model, shard="optimizer", ema=0.9)
        for step in trainer:
            for batch in step:
                step.backward(mse(model, batch))
            if rank == 1:
                with trainer.averaged():
                    pass
            elif step.number == 0:
                trainer.evaluate(HELD_OUT, found)

    with pytest.raises(RuntimeError, match=r"different calls: .*1: 'averaged\(\)'"):
        in_a_breaking_world(monkeypatch, 3, trained)


def test_batch_norm_can_be_refreshed_while_the_average_is_shown() -> None:
    """The model keeps its own statistics, and a second block has the refreshed ones no more."""
    model = model_of()
    loop(trainer := trainer_of(model, swa=Swa(from_step=1)), model)
    before = bits(model)
    points = torch.utils.data.DataLoader(HELD_OUT, batch_size=16)
    with trainer.averaged():
        stale = bits(model)
        swa_utils.update_bn(points, model)
        assert bits(model) != stale
        trainer.evaluate(HELD_OUT, found)
    assert bits(model) == before
    with trainer.result.averaged():
        assert bits(model) == stale


def test_no_bit_is_another_when_workers_die_while_the_average_is_shown(
        tmp_path: Path, twin_of: Callable[..., str]) -> None:
    """The weights depend on what each evaluation of the average has found. A newcomer receives the
    average, and evaluates it with the others."""
    job = (*FEW, "--iterator", "--evaluate", "--ema")
    plan = Plan().add("hold", host=host(1), at="step.prepared", step=5).kill(
        host=host(2), at="evaluate", step=9).kill(host=host(3), at="step.prepared", step=25)
    with Cluster(tmp_path, hosts=5, start_with=4, job=job, plan=plan) as cluster:
        cluster.wait_until_fired(1)
        cluster.set_hosts(cluster.all_hosts)
        cluster.wait_until_ready(host(4))
        cluster.release()
        cluster.wait_for_world(5)
        assert cluster.finish() == 0
        cluster.assert_nothing_lost(twin_of(*job), victims=2)
        assert [e["step"] for e in cluster.events("worker.evaluated")] == [9, 19, 29, 39]


# --- errors ---------------------------------------------------------------------------------------

@pytest.mark.parametrize(("options", "message"), [
    ({"ema": 1.0}, "ema is 1.0. Use a number from 0"),
    ({"ema": 0.9, "swa": Swa(from_step=0)}, "a run has one average"),
    ({"ema": 0.9, "state": {"ema": torch.nn.Linear(1, 1)}}, "an object with the name 'ema'"),
])
def test_options_that_contradict_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_of(model_of(), **options)
    with pytest.raises(ConfigError, match="Use a from_step of 0 or more"):
        Swa(from_step=3, every=0)


def test_the_average_cannot_stay_in_the_model_when_a_step_ends() -> None:
    trainer, kept = trainer_of(model := model_of(), ema=0.9), list[Any]()
    with pytest.raises(RuntimeError, match="still in the model"):
        loop(trainer, model, after=lambda step: (
            kept.append(trainer.averaged()), kept[-1].__enter__()))


def test_averaged_raises_where_there_is_no_average() -> None:
    for options, message in (({}, "neither ema nor swa"),
                             ({"swa": Swa(from_step=50)}, "no step is in the average")):
        loop(trainer := trainer_of(model := model_of(), **options), model)
        with pytest.raises(RuntimeError, match=message), trainer.averaged():
            pass
