"""A sharded optimizer under random faults, one at a time, and under restarts in place: no part is
lost with one host.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cluster import TESTS, Cluster, weights_alone
from faults import Plan

from elastic_trainer.config import Launch
from elastic_trainer.evaluate.evaluation import Evaluations
from elastic_trainer.events.log import Events
from elastic_trainer.options import OF_TRAINER
from elastic_trainer.reduce.ring import Sending
from elastic_trainer.state.holders import Site
from elastic_trainer.state.values.layout import byte_view, pack
from elastic_trainer.training.after_step import AfterStep
from elastic_trainer.training.commit_step import StepEnd
from elastic_trainer.training.job.job import checked
from elastic_trainer.training.job.settings import in_force
from elastic_trainer.training.work import Work
from elastic_trainer.views.verify import verify
from elastic_trainer.world.collectives import PeersLost, World
from elastic_trainer.world.replicas import checksum


@pytest.mark.parametrize(("shard", "faults", "seed"), [
    ("gradients", 6, 8), *(pytest.param(
        shard, 50, seed, marks=[pytest.mark.long, pytest.mark.timeout(3000)])
        for shard in ("optimizer", "gradients") for seed in (1, 2, 3))])
def test_random_faults_one_at_a_time_cost_no_finished_step(tmp_path: Path, shard: str, faults: int,
                                                           seed: int) -> None:
    """Kills and freezes at any moment and at each point of a step, of a transfer and of a move;
    leaves and joins. Four to six workers on as many hosts, AdamW, one buddy."""
    command = [sys.executable, str(TESTS / "bench" / "soak.py"), "--shard", shard,
               "--faults", str(faults), "--seed", str(seed), "--steps-per-fault", "20",
               "--step-s", "0.1", "--spare-steps", "60", "--keep", str(tmp_path)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    print(output)
    found = json.loads(output.splitlines()[-1])
    assert found["faults"] == faults == sum(found["kinds"].values())
    strikes = sum(number for kind, number in found["kinds"].items()
                  if kind.startswith(("kill", "freeze")))
    assert found["struck"] == found["lost"] == strikes and found["not_evicted"] == []
    assert (found["second_victims"], found["rollbacks"], found["steps_lost"]) == (0, 0, 0)
    assert found["finished"] and found["verified"] and found["bits_equal"]


@pytest.mark.parametrize(("shard", "job"), [
    ("gradients", ("mlp.py", "--steps", "30", "--layers", "8")),
    ("optimizer", ("precise.py", "--steps", "30", "--precision", "fp16")),
    ("gradients", ("precise.py", "--steps", "30", "--precision", "bf16-master"))],
    ids=("clipped", "scaled", "masters"))
def test_a_restart_in_place_before_apply_keeps_parts_and_new_parameters(
        tmp_path: Path, shard: str, job: Sequence[str]) -> None:
    """An exception of Gloo's restarts a worker that has seen the vote pass, and a host is lost in
    the same step. The parts that these two held are in the memory of the restarted one alone."""
    command = [sys.executable, str(TESTS / "jobs" / job[0]), *job[1:]]
    twin = weights_alone(command, tmp_path)
    plan = Plan().add("abort", host="127.0.0.2", at="step.voted", step=14)
    plan.kill(host="127.0.0.1", at="step.applied", step=14)
    with Cluster(tmp_path, command=[*command, "--shard", shard], plan=plan) as cluster:
        assert cluster.finish() == 0
        assert len(cluster.fired()) == 2 and len(cluster.lost()) == 1, cluster.story()
        assert not cluster.events("worker.shards_lost"), cluster.story()
        assert cluster.events("worker.revived") and cluster.events("worker.rolled_forward")
        assert verify(cluster.run_dir).is_proved, cluster.story()
    result = json.loads((cluster.run_dir / "result.json").read_text())
    assert (result["attempts"], result["weights_sha256"]) == (1, twin)


class Changing:
    """True until a test has seen that somebody has asked, and lets it end."""

    def __init__(self) -> None:
        self.was_asked, self.is_over = threading.Event(), False

    def __bool__(self) -> bool:
        self.was_asked.set()
        return not self.is_over


def test_a_restart_waits_for_the_end_of_a_change_of_the_state() -> None:
    """A thread of Gloo's restarts the process while its main thread applies a step. Unsharded, the
    others have what this worker loses."""
    work, _ = in_flight(None)
    evaluations = Evaluations(World, lambda: False, Events(None), Launch(), dict)
    after_step = AfterStep(work, lambda: 9, evaluations)
    changing = Changing()
    work.state.is_applying = changing
    assert after_step.leave() is None  # of the main thread, which would wait for itself
    changing.was_asked.clear()
    left = ThreadPool(1).apply_async(after_step.leave)
    assert changing.was_asked.wait(120)
    changing.is_over = True
    assert work.take_up(left.get(120)) is not None


class Echo:
    """A world whose other members send nothing."""

    rank, size = 0, 2

    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return tensor

    def allreduce_start(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return tensor

    def wait(self, handle: torch.Tensor) -> torch.Tensor:
        return handle


def in_flight(scale: float | None, **more: Any) -> tuple[Work, StepEnd]:
    """Return the work of a worker in its first step, with reduced gradients: of parameters in 32
    bits and, without a scaler, in 16."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))
    if scale is None:
        model[1].to(torch.bfloat16)
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=8.0)
    given = {"global_batch": 8, "until": "1 epoch", "clip_norm": 0.5, "shard": "optimizer",
             "scaler": scaler, **more}
    job = checked(model, torch.optim.AdamW(model.parameters()), list(range(32)),
                  in_force(given, OF_TRAINER), words=OF_TRAINER)
    work = Work(job, "exact", Sending(), Events(None))
    assert work.state.shards
    work.state.has_state = True
    work.state.shards.hold_as_built(0)
    work.state.shards.place(0, [Site(0)], [work.state.shards.held])
    work.state.begin()
    sums = work.flat.sums
    work.flat.reduced = {
        number: torch.randn(p.shape) * (scale or 1.0) for number, p
        in enumerate(work.flat.gradients.everyone)} if work.flat.is_front else {}
    for gradient in sums.gradients:
        gradient.copy_(torch.randn(gradient.shape) * (scale or 1.0))
    sums.counts.fill_(1)
    sums.used.fill_(1)
    return work, StepEnd(work)


def test_a_copy_in_which_an_update_was_tried_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have some weights as they were tried. When the copy ends they are put back, and no
    step is finished."""
    work, end = in_flight(None)
    sharded, given = end.sharded, list[torch.Tensor]()
    assert sharded

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        if not given:
            with torch.no_grad():
                sharded.prepare(Echo(), work.job.optimizer, None, None)
        given.append(tensor)
        return byte_view(tensor)

    monkeypatch.setattr("elastic_trainer.world.revive.byte_view", seen)
    assert work.leave(0) is None and given
    assert work.leave(0) is not None


class Silent(Echo):
    """A world that breaks in its first allgather."""

    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        raise PeersLost("as planned")


def test_a_worker_that_lacks_parameters_leaves_its_state_but_not_in_the_middle_of_a_step() -> None:
    """Neither while the new parameters come, nor while code of the user's follows the update. When
    the generation breaks before they have come, they come in the next one."""
    left = list[int | None]()
    (work, end), (successor, its_end) = (in_flight(None, shard="gradients") for _ in range(2))
    object.__setattr__(work.job, "after_step", lambda step: left.append(work.leave(0)))
    for one, its in ((work, end), (successor, its_end)):
        with torch.no_grad():
            its.prepare(Echo(), SimpleNamespace(is_reduced=True, error=None))
        one.state.prepare()
        its.apply(8, 1)
        shards = one.state.shards
        assert shards and shards.lacks_parameters
        shards.held.discard(max(shards.held))
        with pytest.raises(PeersLost):
            its.complete(Silent())
        assert shards.lacks_parameters and not one.state.is_applying
    assert successor.take_up(work.leave(1)) == 1
    assert successor.state.shards and successor.state.shards.lacks_parameters
    assert end.sharded and left == []
    end.sharded._end()
    assert left == [None] and work.leave(1) is not None


@pytest.mark.parametrize("shard", ("optimizer", "gradients"))
@pytest.mark.parametrize(("scale", "precision"), [
    (None, "fp32"), (8.0, "fp32"), (math.inf, "fp32"), (None, "bf16-master"), (8.0, "bf16-master"),
    (math.inf, "bf16-master")])
def test_what_a_restart_leaves_of_a_prepared_step_is_applied_to_the_same_bits(
        scale: float | None, precision: str, shard: str) -> None:
    """The gradient is divided, unscaled and clipped once, and the scaler knows what it has found.
    It may restart twice."""
    (work, end), (between, _), (successor, its_end) = (
        in_flight(scale, precision=precision, shard=shard) for _ in range(3))
    assert end.sharded
    with torch.no_grad():
        end.sharded.prepare(Echo(), work.job.optimizer, None, work.job.scaler)
    work.state.prepare()
    for one in (between, successor):
        one.flat.reduced = {}
        for tensor in one.flat.sums.values():
            tensor.zero_()
    assert between.take_up(work.leave(0)) == 0
    assert successor.take_up(between.leave(0)) == 0 and successor.state.is_prepared
    for its in (end, its_end):
        with torch.no_grad():
            its._update()
    assert end.sharded.shards.held == its_end.sharded.shards.held != set()
    assert checksum(work.replica.all_parts()) == checksum(successor.replica.all_parts())
    assert pack(work.state.values()).header == pack(successor.state.values()).header
    for mine, its in zip(pack(work.state.values()).tensors,
                         pack(successor.state.values()).tensors, strict=True):
        assert torch.equal(mine, its)
