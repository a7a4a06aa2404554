"""Horovod's own style: what a commit keeps, what is refused, and what our launcher adds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.elastic import ElasticSampler
from simulated import Hub, Member, in_threads
from torch import nn

from elastic_trainer import ConfigError, ElasticState
from elastic_trainer.events.log import Events
from elastic_trainer.horovod_style.commit import CommitState, Named, pad, reset_optimizer
from elastic_trainer.horovod_style.votes import check_alike
from elastic_trainer.horovod_style.watch import mistake_of
from elastic_trainer.state.checkpoints.checkpoint import Plan
from elastic_trainer.state.checkpoints.run_checkpoints import Checkpoints
from elastic_trainer.state.stores.by_url import open_store
from elastic_trainer.state.values.layout import unpack
from elastic_trainer.world.collectives import PeersLost
from elastic_trainer.world.transfer import Transfer


class Script:
    """What a script has built, as ElasticState holds it."""

    def __init__(self, seed: int = 0):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.batch, self.log = 0, [1.5, "text"]
        self.state = CommitState()
        names = ("batch", "log", "scheduler")
        self.state.build(self.model, self.optimizer, {name: Named(self, name) for name in names})

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(5, 3)).sum().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.batch += 1

    def commit(self) -> None:
        self.state.commit()
        self.state.keep()

    def values(self) -> list[Any]:
        moments = [t for entry in self.optimizer.state.values() for t in entry.values()]
        tensors = [t.detach().clone() for t in (*self.model.state_dict().values(), *moments)]
        return [*(t.tolist() for t in tensors), self.batch, self.log[:],
                self.optimizer.param_groups[0]["lr"], self.scheduler.last_epoch]


def test_going_back_restores_the_last_commit_each_time() -> None:
    """Weights, moments, buffers, scheduler and named values; the copy is not the live one after the
    first time (F8)."""
    script = Script()
    script.step()
    script.commit()
    committed = script.values()
    for _ in range(3):
        script.step()
        script.log.append("later")
        assert script.values() != committed
        script.state.go_back()
        assert script.values() == committed
    assert all(p.grad is None for p in script.model.parameters())


def test_a_newcomer_and_a_checkpoint_get_the_last_commit() -> None:
    """And not the live values, which may be of half a step."""
    script, newcomer = Script(), Script(seed=1)
    script.step()
    script.commit()
    committed = script.values()
    script.step()
    packed = script.state.packed()
    room = newcomer.state.room(packed.header, packed.payload_bytes)
    whole = torch.cat([t.reshape(-1).view(torch.uint8) for t in packed.tensors])
    at = 0
    for tensor in room.tensors:
        tensor.view(-1).view(torch.uint8).copy_(whole[at : at + tensor.nbytes])
        at += tensor.nbytes
    newcomer.state.load(unpack(room))
    assert newcomer.values() == committed
    assert newcomer.state.has_state and newcomer.state.committed == 1


def test_values_that_cannot_be_kept_are_refused_when_the_state_is_built() -> None:
    """An object without state_dict has no bytes of its own."""
    script = Script()
    script.log = object()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="log.*state_dict and load_state_dict"):
        CommitState().build(script.model, script.optimizer, {"log": Named(script, "log")})


@pytest.mark.parametrize("value", [Counter("a"), OrderedDict(a=1), [{"a": Counter()}],
                                   numpy.float32(1)])
def test_a_value_comes_back_with_its_type(value: Any) -> None:
    """A Counter counts from 0, a dict does not."""
    script = Script()
    script.log = value  # type: ignore[attr-defined]
    state = CommitState()
    state.build(script.model, script.optimizer, {"log": Named(script, "log")})
    state.keep()
    script.log = None  # type: ignore[attr-defined]
    state.go_back()
    assert type(script.log) is type(value) and script.log == value  # type: ignore[attr-defined]


def test_horovods_optimizer_forgets_the_step_in_flight() -> None:
    """Handles, flags, delays and counts of groups: else the next backward pass raises or waits for
    ever."""
    optimizer: Any = torch.optim.SGD([weight := nn.Parameter(torch.ones(1))], 0.1)
    optimizer._handles = {weight: (1, None)}
    optimizer._synchronized, optimizer._should_synchronize = True, False
    optimizer._allreduce_delay, optimizer.backward_passes_per_step = {weight: 0}, 2
    optimizer._group_counts = {(weight,): 1}
    reset_optimizer(optimizer)
    assert optimizer._handles == {}
    assert not optimizer._synchronized and optimizer._should_synchronize
    assert optimizer._allreduce_delay == {weight: 2} and optimizer._group_counts == {(weight,): 0}


@pytest.mark.parametrize("fact", ["_handles", "_synchronized", "_allreduce_delay"])
def test_a_commit_between_backward_and_step_is_refused(fact: str) -> None:
    """Its gradient would be lost, also in the middle of the passes of a step, and also of a second
    optimizer."""
    script = Script()
    second: Any = torch.optim.SGD([weight := nn.Parameter(torch.ones(1))], 0.1)
    second._handles, second._synchronized, second._should_synchronize = {}, False, True
    second._allreduce_delay, second.backward_passes_per_step = {weight: 2}, 2
    second._group_counts = {}
    script.second = second  # type: ignore[attr-defined]
    script.state.extras["second"] = Named(script, "second")
    script.state.check_no_gradient("state.commit()")
    pending = {"_handles": {weight: (1, None)}, "_synchronized": True,
               "_allreduce_delay": {weight: 1}}
    setattr(second, fact, pending[fact])
    with pytest.raises(RuntimeError, match="after optimizer.step"):
        script.state.check_no_gradient("state.commit()")
    script.state.go_back()
    script.state.check_no_gradient("state.commit()")


@pytest.mark.parametrize(("wanted", "finishes", "told"), [
    (4, 0, ""), (0, 0, ""), (4, 4, ""),
    (3, 0, "3 of 4 workers have called state.commit"), (4, 1, "has returned on 1 of 4 workers"),
    (1, 1, "has returned on 1 of 4 workers")])
def test_workers_that_call_different_things_all_raise(wanted: int, finishes: int,
                                                      told: str) -> None:
    """Their states would differ from then on, or they would wait for one another for ever."""
    if not told:
        check_alike(wanted, finishes, 4)
        return
    with pytest.raises(RuntimeError, match=told):
        check_alike(wanted, finishes, 4)


@pytest.mark.parametrize(("error", "is_mistake"), [
    (HorovodInternalError("Mismatched data types: One rank had type float32"), True),
    (HorovodInternalError("No Adasum operation enabled"), True),
    (HorovodInternalError("Requested to allreduce, allgather, or broadcast a tensor with"), True),
    (HorovodInternalError("Horovod has been shut down. This was caused by"), False),
    (HorovodInternalError("[/gloo/transport/tcp/pair.cc:598] Connection closed by peer"), False),
    (PeersLost("Mismatched"), False)])
def test_a_mistake_of_the_script_is_not_taken_for_a_lost_worker(error: Exception,
                                                                is_mistake: bool) -> None:
    """Horovod raises one type for both."""
    assert bool(mistake_of(error)) == is_mistake


@pytest.mark.parametrize("left", [0, 1, 3, 8])
def test_the_end_of_an_epoch_can_be_shared(left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among 8 workers, also where fewer samples are left than half of them: Horovod's sampler
    raises there."""
    monkeypatch.setattr("horovod.torch.elastic.sampler.size", lambda: 8)
    shared = []
    for rank in range(8):
        monkeypatch.setattr("horovod.torch.elastic.sampler.rank", lambda rank=rank: rank)
        sampler = ElasticSampler(range(20), shuffle=False)
        sampler.load_state_dict({"epoch": 0, "processed_num": 20 - left})
        pad(sampler)
        shared.append(list(sampler))
    assert {len(mine) for mine in shared} == {min(left, 1)}
    assert {number for mine in shared for number in mine} == set(range(20 - left, 20))


def test_one_member_gives_all_and_the_other_survivors_keep_theirs() -> None:
    """Replicas may differ in BatchNorm's buffers and in named values: a mixture of them would be
    nobody's state."""
    scripts, hub = [Script(seed) for seed in range(3)], Hub(3)
    for script in scripts[:2]:
        script.step()
        script.commit()
    before = [script.values() for script in scripts]

    def move(rank: int) -> None:
        transfer = Transfer(Member(hub, rank), Events(None), list, lambda *_: None,
                            gives_alone=True)
        transfer.move(scripts[rank].state, [0, 1])

    in_threads(3, move, hub.abort)
    assert [script.values() for script in scripts] == [before[0], before[1], before[0]]


def test_a_checkpoint_is_rank_zeros(tmp_path: Path) -> None:
    """All of its parts; the other workers have none, and are done at once."""
    script = Script()
    script.step()
    script.commit()
    plan = Plan(part_bytes=16, from_one=True)
    shares = []
    for rank in range(3):
        checkpoints = Checkpoints(open_store(str(tmp_path)), lambda *_, **__: None, plan)
        checkpoints.begin(script.state, rank, 3)
        share = checkpoints.upload.share
        assert share and not share.error
        checkpoints.wait()
        shares.append(share)
        assert checkpoints.progress() == (True, False)
    assert len(shares[0].pieces) == shares[0].count > 3
    assert [len(share.pieces) for share in shares[1:]] == [0, 0]


# --- without our launcher -------------------------------------------------------------------------


def test_it_is_horovods_own_without_our_launcher() -> None:
    """The same script runs under plain horovodrun, and alone: the callbacks, save and restore are
    TorchState's."""
    script = Script()
    state = ElasticState(model=script.model, optimizer=script.optimizer, batch=0)
    called: list[str] = []
    state.register_reset_callbacks([lambda: called.append("reset")])
    state.on_reset()
    state.batch = 5
    state.save()
    state.batch = 6
    state.restore()
    assert called == ["reset"] and state.batch == 5


def test_a_checkpoint_without_our_launcher_is_refused() -> None:
    """It would not be made."""
    with pytest.raises(ConfigError, match="horovodrun_elastic.sh"):
        ElasticState(model=None, optimizer=None, checkpoint_every=5)


# --- under it, before there is a driver to ask ----------------------------------------------------

BY_NAME = """
import horovod.torch as hvd
from horovod.torch import init as init_by_name, local_rank as local_rank_by_name
from elastic_trainer import ElasticState
"""
BUILD = """
import torch
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""


@pytest.mark.parametrize(("code", "message"), [
    ("ElasticState(model=model, optimizer=optimizer)", "hvd.init() has not been called"),
    ("hvd.join()", "hvd.join() cannot be used"),
    ("hvd.add_process_set([0])", "hvd.add_process_set() cannot be used"),
    ("hvd.cross_rank()", "hvd.cross_rank() cannot be used"),
    ("hvd.init(comm=[0])", "no elastic world can keep"),
    ("hvd.elastic.run(lambda state: 0)(None)", "Give it this process's elastic_trainer.Elastic"),
    ("hvd.allreduce(torch.ones(1))", "outside of the function that hvd.elastic.run decorates"),
    ("hvd.barrier()", "outside of the function that hvd.elastic.run decorates"),
    ("hvd.local_rank()", "Horovod has not been initialized"),
    ("hvd.local_size()", "Horovod has not been initialized"),
    ("init_by_name()", "hvd.init was imported by name"),
    ("local_rank_by_name()", "Horovod has not been initialized"),
])
def test_what_cannot_hold_is_refused(code: str, message: str) -> None:
    """With the remedy; nothing that Horovod would do instead is done."""
    text = f"{BY_NAME}{BUILD}{code}"
    done = subprocess.run([sys.executable, "-c", text],
                          env=os.environ | {"ELASTIC_TRAINER_DRIVER": "127.0.0.1:1"},
                          capture_output=True, text=True)
    assert done.returncode != 0 and message in done.stderr, done.stderr


def test_the_wrong_order_is_refused() -> None:
    """hvd.init() before the import has given this process a world of its own."""
    text = """
import os
import horovod.torch as hvd
hvd.init()
os.environ["ELASTIC_TRAINER_DRIVER"] = "127.0.0.1:1"
from elastic_trainer import ElasticState
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == 70 and "above hvd.init()" in done.stderr, done.stderr
