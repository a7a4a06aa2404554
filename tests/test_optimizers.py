"""What optimizers keep beside `state` and `param_groups`: part of the state, or an error."""

from __future__ import annotations

import array
import ctypes
import functools
import gc
import itertools
import logging
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from optimizers import KEPT, Counting, Shrinking, parameters_of
from test_loop import DATA, built, in_a_world, job, mse, trained
from test_state import bytes_of, received
from torch.utils.weak import WeakIdKeyDictionary

from elastic_trainer import ConfigError, Trainer
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.values.forms import CannotKeep
from elastic_trainer.state.values.layout import LayoutError
from elastic_trainer.world.replicas import Replica, ReplicasDisagree

pytestmark = pytest.mark.usefixtures("no_launcher")

Optimizer = torch.optim.Optimizer
Model = torch.nn.Module


def state_of(make: Callable[[Model], Optimizer], steps: int) -> LiveState:
    """A live state after some steps."""
    model = built()
    state = LiveState(model, make(model))
    state.has_state = True
    for step in range(steps):
        one_step(state, step)
    return state


def one_step(state: LiveState, step: int) -> None:
    torch.manual_seed(step)
    state.model(torch.randn(8, 5)).square().mean().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.commit(8, 1)
    state.optimizer_values.check(step)


def moved(giver: LiveState, taker: LiveState) -> None:
    """Let a newcomer receive the state, as bytes."""
    packed = giver.packed()
    assert taker.room(packed.header, packed.payload_bytes).payload_bytes == packed.payload_bytes
    taker.load(received(packed))


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_newcomer_goes_on_as_its_giver(kind: str, steps: int) -> None:
    """It has the same bytes when it has received the state, the same checksums, and the same
    weights many steps later."""
    giver, taker = state_of(KEPT[kind], steps), state_of(KEPT[kind], 0)
    moved(giver, taker)
    assert bytes_of(taker) == bytes_of(giver)
    for step in range(steps, steps + 8):
        for state in (giver, taker):
            one_step(state, step)
        assert Replica(taker).all_parts() == Replica(giver).all_parts()
    assert bytes_of(taker) == bytes_of(giver)


@pytest.mark.parametrize("kind", KEPT)
def test_a_process_that_goes_back_holds_what_it_held(kind: str) -> None:
    """Values of an older step undo all that the optimizer has kept since."""
    first, later = state_of(KEPT[kind], 2), state_of(KEPT[kind], 7)
    moved(first, later)
    for step in range(2, 8):
        for state in (first, later):
            one_step(state, step)
    assert bytes_of(later) == bytes_of(first)


class Refused(Shrinking):
    """Makes a value in its third step that cannot be kept."""

    made: Callable[[Any], Any]

    def build(self) -> None:
        self.calls = 0

    def factor(self) -> float:
        self.calls += 1
        if self.calls == 3:
            self.late = self.made()
        return 1.0


class Late:
    def __init__(self) -> None:
        self.value = 1


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an iterator": (lambda self: iter([1]), "late .now a list_iterator"),
    "an object made late": (lambda self: Late(), r"late .now a .*test_optimizers\.Late"),
    "an optimizer made late": (lambda self: torch.optim.SGD(parameters_of(self), lr=0.1),
                               "late .now a torch.optim.sgd.SGD"),
    "a gradient": (lambda self: next(parameters_of(self)).grad, "late .now a gradient"),
    "a sparse tensor": (lambda self: torch.ones(2).to_sparse(), "late .now a tensor of the kind"),
    "in a container": (lambda self: {"a": [{"b": iter([1])}]}, r"late.a..0..b. .now a list_it"),
    "a file": (lambda self: object(), "late .now a object"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_value_that_cannot_be_kept_is_an_error_after_the_step_that_made_it(what: str) -> None:
    """It names the attribute: no checkpoint fails later, and no newcomer goes on without it."""
    made, named = REFUSED[what]
    kind = type("Refused", (Refused,), {"made": made})
    model = built()
    with pytest.raises(RuntimeError, match=f"cannot be kept: {named}"):
        trained(model, kind(model.parameters()), until="9 steps")


class LateInDict(Shrinking):
    """Puts a value that cannot be kept into a dict that was there, in its third step."""

    made: Callable[[], Any]

    def build(self) -> None:
        self.calls, self.parts = 0, dict[str, Any]()

    def factor(self) -> float:
        self.calls += 1
        if self.calls == 3:
            self.parts["late"] = self.made()
        return 1.0


@pytest.mark.parametrize("made", [Late, object, lambda: iter([1])], ids=["class", "bare", "iter"])
def test_no_checkpoint_has_a_state_that_lacks_a_value_of_the_optimizer(
        made: Callable[[], Any], tmp_path: Path) -> None:
    """The last one of a run neither: the step after it, which would find the value, never comes."""
    kind = type("LateInDict", (LateInDict,), {"made": staticmethod(made)})
    model = built()
    with pytest.raises(ConfigError, match=r"after step 2 .* parts.*late"):
        trained(model, kind(model.parameters()), until="3 steps", run_dir=tmp_path)
    (record,) = (tmp_path / "checkpoints" / "log").iterdir()
    assert "takeover" in record.read_text()  # the run took the log over, and published nothing


def rates() -> Iterator[float]:
    number = 0
    while True:
        number += 1
        yield 1 - 0.01 * number


class Nested:
    """An object in objects, deeper than values are kept."""

    def __init__(self, depth: int = 8):
        self.inner: Any = Nested(depth - 1) if depth else None
        self.value = 1.0

    def change(self) -> None:
        self.value *= 0.99
        if self.inner:
            self.inner.change()


class OwnRandom(random.Random):
    pass


KEY = torch.ones(1)


HIDDEN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a count": (lambda: itertools.count(1), next),
    "a generator": (rates, next),
    "an iterator of a list": (lambda: iter([1, 2, 3]), next),
    "a cycle": (lambda: itertools.cycle([1, 2, 3]), next),
    "an iterator in a container": (lambda: {"a": [itertools.count(1)]},
                                   lambda made: next(made["a"][0])),
    "an array of bytes": (lambda: array.array("d", [1.0]),
                          lambda made: made.__setitem__(0, made[0] + 1)),
    "an array of objects": (lambda: numpy.array([1, None], dtype=object),
                            lambda made: made.__setitem__(0, made[0] + 1)),
    "objects in objects": (Nested, lambda made: made.change()),
    "a weak dict": (lambda: WeakIdKeyDictionary({KEY: torch.ones(2)}),
                    lambda made: made[KEY].data.mul_(2)),
    "the local values of a thread": (threading.local, lambda made: setattr(made, "n", 1)),
    "a list in a partial": (lambda: functools.partial(print, []),
                            lambda made: made.args[0].append(1)),
    "a source of bits": (lambda: numpy.random.PCG64(3), lambda made: made.random_raw()),
    "a seed of seeds": (lambda: numpy.random.SeedSequence(3), lambda made: made.spawn(1)),
    "a subclass of random.Random": (lambda: OwnRandom(3), lambda made: made.random()),
    "a number of C": (lambda: ctypes.c_int(0), lambda made: setattr(made, "value", 1)),
    "a mask": (lambda: numpy.ma.masked_array([1.0, 2.0], mask=[False, False]),
               lambda made: made.__setitem__(0, numpy.ma.masked)),
}


@pytest.mark.parametrize("what", HIDDEN)
def test_a_value_that_cannot_be_kept_is_an_error_when_a_step_moves_it(what: str) -> None:
    """Also if __init__ has made it. One that no step moves is none."""
    make, move = HIDDEN[what]

    class Moving(Shrinking):
        def build(self) -> None:
            self.hidden, self.calls = make(), 0

        def factor(self) -> float:
            self.calls += 1
            if self.calls == 3:
                move(self.hidden)
            return 1.0

    model = built()
    assert trained(model, Moving(model.parameters()), until="2 steps").steps == 2
    model = built()
    with pytest.raises(RuntimeError, match="cannot be kept: hidden"):
        trained(model, Moving(model.parameters()), until="9 steps")


@pytest.mark.parametrize("what, named", [
    ("views in state", r"optimizer.state\[0.weight\]\['flat'\] shares its memory with"),
    ("a parameter's memory", r"\['it'\] shares its memory with parameter 0.weight"),
    ("views in state of an attribute", "flat .now a tensor whose memory a smaller one"),
])
def test_a_memory_that_would_come_back_twice_is_refused(what: str, named: str) -> None:
    """Views are kept as views in attributes alone (optimizers.Flat)."""

    class Views(Shrinking):
        def factor(self) -> float:
            first = next(parameters_of(self))
            if what == "a parameter's memory":
                self.state[first]["it"] = first.detach()
                return 1.0
            flat = torch.zeros(2 * first.numel())
            self.state[first]["view"] = flat[:first.numel()]
            if what == "views in state":
                self.state[first]["flat"] = flat
            else:
                self.flat = flat
            return 1.0

    with pytest.raises((CannotKeep, RuntimeError), match=named):
        state_of(lambda model: Views(model.parameters()), 1).packed()


@pytest.mark.parametrize("what, named", [
    ("id", r"an entry of id\(0.weight\).*optimizer.state\[parameter\]"),
    ("another tensor", r"an entry of a Tensor of the shape \(3,\), which is no parameter")])
def test_a_key_that_no_other_process_has_is_refused(what: str, named: str) -> None:
    """An entry under it would be lost."""
    class Keys(torch.optim.SGD):  # without momentum it has no state of its own
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            key: Any = id(next(parameters_of(self))) if what == "id" else torch.zeros(3)
            self.state[key] = {"sum": torch.ones(1)}

    with pytest.raises(CannotKeep, match=named):
        state_of(lambda model: Keys(model.parameters(), lr=0.1), 1).packed()


HARMLESS: dict[str, Callable[[Any], Any]] = {"code": lambda self: lambda: 1,
                                             "a partial": lambda self: functools.partial(max, 1),
                                             "a lock": lambda self: threading.Lock(),
                                             "code by shape": lambda self: {(2, 3): lambda: 1},
                                             "a logger": lambda self: logging.getLogger("x"),
                                             "a type": lambda self: torch.float32,
                                             "a device": lambda self: torch.device("cpu")}


@pytest.mark.parametrize("what", HARMLESS)
def test_code_and_tools_are_no_error_when_an_optimizer_makes_them_late(what: str) -> None:
    """They hold no value of the training, and a newcomer makes them for itself."""
    kind = type("Harmless", (Refused,), {"made": HARMLESS[what]})
    giver = state_of(lambda model: kind(model.parameters()), 5)
    moved(giver, taker := state_of(lambda model: kind(model.parameters()), 0))
    one_step(giver, 5)
    one_step(taker, 5)
    assert Replica(taker).all_parts() == Replica(giver).all_parts()


def test_a_constant_of_one_worker_stays_its_own() -> None:
    """What an optimizer was built with, and has not changed, is no part of the state."""
    states = []
    for rank in (0, 1):
        model = built()
        optimizer = Counting(model.parameters())
        optimizer.rank, optimizer.path = rank, f"/tmp/{rank}"  # type: ignore[attr-defined]
        states.append(LiveState(model, optimizer))
        one_step(states[-1], 0)
    assert Replica(states[0]).all_parts() == Replica(states[1]).all_parts()
    moved(*states)
    assert (states[1].optimizer.rank, states[1].optimizer.path) == (  # type: ignore[attr-defined]
        1, "/tmp/1")


@pytest.mark.parametrize("kind", KEPT)
def test_replicas_differ_when_a_value_in_an_attribute_does(kind: str) -> None:
    """A checksum of all that an optimizer keeps is in the vote."""
    one, other = state_of(KEPT[kind], 5), state_of(KEPT[kind], 5)
    assert Replica(one).all_parts() == Replica(other).all_parts()
    tensors = [value for _, value in other.optimizer_values.leaves()
               if isinstance(value, torch.Tensor) and value.is_floating_point()]
    if tensors:
        tensors[-1].view(-1)[-1:].add_(1)
        assert Replica(one).all_parts() != Replica(other).all_parts()


def test_values_of_another_optimizer_do_not_fit() -> None:
    """Nothing is changed if an attribute of the values has no place here."""
    giver = state_of(KEPT["Objects"], 3)
    taker = state_of(lambda model: Shrinking(model.parameters()), 0)
    before = bytes_of(taker)
    with pytest.raises(LayoutError, match="this worker has nothing there"):
        moved(giver, taker)
    assert bytes_of(taker) == before


def test_an_optimizer_of_torch_costs_and_keeps_nothing_more() -> None:
    """It has no attributes of its own, also beside a scheduler and a scaler."""
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = LiveState(model, optimizer, scheduler=scheduler)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(3):
        scaler.scale(model(torch.randn(8, 5)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        state.optimizer_values.check(0)
    assert list(state.optimizer_values.leaves()) == []
    assert "attributes" not in state.values()["optimizer"]


class OfOneWorker(Shrinking):
    """Keeps a value that differs between workers, and does not use it."""

    def build(self) -> None:
        self.worker, self.log = [0], list[str]()

    def factor(self) -> float:
        if self.worker[0] == 0:
            self.log.append("a line of rank 0")
        return 0.99


@pytest.mark.parametrize("size", [2, 3])
def test_a_number_of_one_worker_is_an_error_that_names_it(size: int) -> None:
    """No machine is at fault, so no worker leaves: each would come back with another value."""
    def make(rank: int) -> Any:
        model = built()
        optimizer = OfOneWorker(model.parameters())
        optimizer.worker[0] = rank
        return job(model, optimizer=optimizer)

    ended = in_a_world(size, make)
    assert [type(error) for error in ended] == [ReplicasDisagree] * size
    assert "optimizer.log/0 had another value on some workers in step 1" in str(ended[0])


def test_several_optimizers_keep_what_each_has(tmp_path: Path) -> None:
    """By their names."""
    hashes = []
    for folder, steps in ((None, 8), (tmp_path, 3), (tmp_path, 8)):
        model = built()
        optimizers = {"first": Counting(model[0].parameters()), "second": KEPT["Drawing"](model[2])}
        trainer = Trainer(model, optimizers, DATA, global_batch=16, microbatches=4,
                          until=f"{steps} steps", run_dir=folder, progress=False)
        for step in trainer:
            for name in optimizers:
                for batch in step.phase(name):
                    step.backward(mse(model, batch))
        assert trainer.result
        hashes.append(trainer.result.weights_sha256)
    assert hashes[0] == hashes[2]


def test_nothing_holds_what_the_optimizer_has_dropped() -> None:
    """A cycle of objects held what the optimizer had of all parameters when the state was built,
    until Python searched for cycles: with a sharded optimizer 4 bytes of each parameter."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    gc.disable()
    try:
        _alive = LiveState(model, optimizer)
        kept = [weakref.ref(value) for entry in optimizer.state.values()
                for value in entry.values()]
        optimizer.state.clear()
        assert len(kept) == 6 and not any(one() is not None for one in kept)
    finally:
        gc.enable()
