"""Plain attributes of modules (`p` of a dropout, a temperature) and their modes (train or eval):
what a script changes in them is the same in a resumed run, on a newcomer and in every world, or an
error that names it."""

from __future__ import annotations

import enum
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from test_evaluation import HELD_OUT
from test_loop import INPUT, SIZE, built, mse, sgd
from test_same_bits import CHANGES
from test_same_bits import attributes as scaled
from test_trainer import Fault, in_a_breaking_world, loop, trainer_of

from elastic_trainer.config import ConfigError
from elastic_trainer.schedule.schedule import Schedule
from elastic_trainer.state.forward import Modes
from elastic_trainer.state.kinds import check_kinds
from elastic_trainer.state.live_state import LiveState, require_fit
from elastic_trainer.state.values.layout import LayoutError, byte_ranges, decode, unpack
from elastic_trainer.state.values.module_attributes import ModuleAttributes, plain_attributes
from elastic_trainer.state.values.other_attributes import OF_MODELS
from elastic_trainer.training.differing import on_attributes, sentence

Model = torch.nn.Module
pytestmark = pytest.mark.usefixtures("no_launcher")


def run(model: Any, change: Callable[[Any, int], Any], until: int = 6, **more: Any) -> str:
    """Train, and change an attribute after each step."""
    return loop(trainer_of(model, until=f"{until} steps", **more), model,
                after=lambda step: change(model, step.number))


def counts(model: Any, step: Any, batch: Any) -> None:
    model[2].count += 1


def lasts(model: Any, step: Any, batch: Any) -> None:
    model[2].last = float(batch[0].sum())


def collects(model: Any, step: Any, batch: Any) -> None:
    model[2].gains.append(float(batch[0].sum()))


def counts_late(model: Any, step: Any, batch: Any) -> None:
    model[2].count += step.number >= 2


def sums_late(model: Any, step: Any, batch: Any) -> None:
    model[2].table["sum"] = float(batch[0].sum()) if step.number >= 2 else 0.0


@pytest.mark.parametrize(("act", "name", "error"), [
    (counts, "2.count", ConfigError), (lasts, "2.last", ConfigError),
    (collects, "2.gains", ConfigError), (counts_late, "2.count", RuntimeError),
    (sums_late, "2.table", RuntimeError)])
@pytest.mark.parametrize("size", [1, 2])
def test_an_attribute_that_depends_on_the_batches_of_a_worker_is_an_error(
        act: Callable[..., None], name: str, error: type[Exception], size: int,
        monkeypatch: pytest.MonkeyPatch) -> None:
    """In the warm-up, or in the step in which it is seen first; with its name and the remedy."""
    models, steps = [scaled() for _ in range(size)], list[int]()

    def work(rank: int) -> str:
        model = models[rank]
        with pytest.raises(error) as raised:
            for step in trainer_of(model):
                for batch in step:
                    act(model, step, batch)
                    step.backward(mse(model, batch))
                steps.append(step.number)
        return str(raised.value)

    for told in in_a_breaking_world(monkeypatch, size, work):
        assert f"has changed the attributes {name} of the model" in told
        assert "after the inner loop" in told and "buffer" in told and "step.log" in told
    assert max(steps, default=-1) == (1 if error is RuntimeError else -1)


DIFFERING: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "modes": (lambda: normed(), lambda model: model[2].eval(),
              "the mode (train or eval) of 2 differs between the workers in step 2: 2 is in eval "
              "mode on rank 0 alone"),
    "attributes": (scaled, lambda model: setattr(model[2], "temperature", 0.5),
                   "the attributes 2.temperature of the model's modules differ between the workers "
                   "in step 2: 2.temperature is 0.5 on rank 0, as it was built on rank 1, as it "
                   "was built on rank 2")}


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("what", DIFFERING)
def test_modules_that_differ_between_workers_end_the_run(
        what: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a step is applied, on all workers, with the name, the values and the ranks. Else the
    weights would depend on the world, in silence."""
    make, change, message = DIFFERING[what]
    models, steps = [make() for _ in range(3)], list[int]()

    def work(rank: int) -> str:
        model, trainer, seen = models[rank], trainer_of(models[rank]), list[int]()
        with pytest.raises(RuntimeError) as raised:
            for step in trainer:
                if where == "before" and rank == 0 and len(seen) == 2:
                    change(model)
                for batch in step:
                    step.backward(mse(model, batch))
                if where == "after" and trainer.is_first and step.number == 1:
                    change(model)
                seen.append(step.number)
        steps.extend(seen)
        return str(raised.value)

    (told,) = set(in_a_breaking_world(monkeypatch, 3, work))
    assert message in told and "if trainer.is_first" in told and max(steps) == 1


def test_the_values_of_attributes_that_differ_are_named() -> None:
    assert "b is 2 on rank 0, 3 on rank 1" in on_attributes(1, [{"b": 2, "a": 1}, {"b": 3, "a": 1}])


def test_a_newcomer_has_the_attributes_when_it_has_received_the_state() -> None:
    """Those that were changed. Others are as it was built: also one that its script has changed
    before it received the state."""
    states = [LiveState(model, sgd(model)) for model in (scaled(), scaled())]
    giver, taker = states
    for name, change in CHANGES.items():
        if "replaced" not in name:
            change(giver.model, 3)
    giver.model[2].new = "x"  # type: ignore[index]
    taker.model[2].count = 7  # type: ignore[index]
    packed = giver.packed()
    values = decode(packed.header, torch.cat([*byte_ranges(packed, 0, packed.payload_bytes)]))
    check_kinds(values)
    taker.load(values)
    assert plain_attributes(taker.model) == plain_attributes(giver.model)
    assert taker.attributes.changed() == giver.attributes.changed()
    for state in states:
        state.begin()
    assert taker.attributes.checksum() == giver.attributes.checksum() != 0
    with pytest.raises(LayoutError, match=r"\['gone.p'\] were changed there"):
        require_fit(taker, values | {"attributes": {"gone.p": 1}})


def test_a_successor_goes_on_with_the_attributes_of_the_step_in_flight() -> None:
    """Those of its begin for a step that is done again, with what its micro-batches have left for
    one that is prepared."""
    before, after = (ModuleAttributes(scaled()) for _ in range(2))
    module = before._model[2]  # type: ignore[index]
    module.temperature = 2.0
    before.begin()
    module.kind = module.word = "double"
    before.after = before.moved()
    assert before.after == {"2.kind": "double", "2.word": "double"}
    after.take_up(before.in_flight())
    assert after.changed() == {"2.temperature": 2.0} and after.checksum() == before.checksum()
    after.apply()
    before.reset()
    assert before.changed() == {"2.temperature": 2.0} and not hasattr(module, "word")
    before.apply()
    assert after.changed() == before.changed() == {
        "2.temperature": 2.0, "2.kind": "double", "2.word": "double"}


def test_a_module_that_is_replaced_by_another_kind_is_an_error() -> None:
    """A newcomer would build the first one. Another module of the same kind has other
    attributes."""
    def work(other: Callable[[], Model]) -> str:
        return run(scaled(), lambda model, step: model[2].inner.__setitem__(0, other()))

    assert work(lambda: torch.nn.Dropout(0.3)) == run(scaled(), lambda model, step: setattr(
        model[2].inner[0], "p", 0.3))
    with pytest.raises(RuntimeError, match=r"2\.inner\.0 was a Dropout when.* now it is Identity"):
        work(torch.nn.Identity)


def test_an_evaluation_leaves_no_trace_in_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers share its batches."""
    models, alone = [scaled() for _ in range(3)], run(scaled(), lambda *_: None)

    def counting(model: Any, batch: Any) -> dict[str, Any]:
        model[2].count += 1
        model[2].evaluated = True
        return {"loss": (float(mse(model, batch)), 1)}

    def work(rank: int) -> tuple[str, int, bool]:
        model, trainer = models[rank], trainer_of(models[rank])
        sha256 = loop(trainer, model, after=lambda step: trainer.evaluate(HELD_OUT, counting))
        return sha256, model[2].count, hasattr(model[2], "evaluated")

    assert set(in_a_breaking_world(monkeypatch, 3, work)) == {(alone, 0, False)}


def test_a_tensor_that_forward_keeps_is_no_plain_attribute() -> None:
    """Maps of attention, and features that a hook has kept, come and go."""
    class Keeping(Model):
        seen: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen, self.several = x.detach(), [x.detach()]
            return x

    assert run(built(Keeping()), lambda *_: None) == run(built(torch.nn.Identity()),
                                                        lambda *_: None)


def test_attributes_of_torchs_own_modules_are_followed() -> None:
    """Those of attention and of a compiled module, under the names without torch.compile."""
    model = torch.nn.ModuleDict({"a": torch.nn.MultiheadAttention(8, 2, dropout=0.1)})
    attributes = ModuleAttributes(model)
    compiled: Any = torch.compile(built(torch.nn.Dropout(0.1)))
    assert attributes.built["a.dropout"] == 0.1 and ModuleAttributes(compiled).built["2.p"] == 0.1
    assert not [path for path in plain_attributes(compiled) if "_orig_mod" in path]
    model["a"].dropout = 0.2
    attributes.begin()
    assert attributes.changed_before() == {"a.dropout": 0.2}
    cyclic: Any = []
    cyclic.append(cyclic)
    model["a"].cyclic, model["a"].long = cyclic, list(range(5000))
    attributes.begin()
    assert attributes.changed() == {"a.dropout": 0.2}


# --- attributes that are no plain values ----------------------------------------------------------

class Kind(enum.Enum):
    ONE, TWO = 1, 2


class Level(enum.IntEnum):
    ONE, TWO = 1, 2


class Pair(NamedTuple):
    gain: float


class Word(str):
    """A text of another type."""


class Settings:
    def __init__(self) -> None:
        self.gain = 1.0

    def state_dict(self) -> dict[str, float]:
        return dict(vars(self))

    def load_state_dict(self, values: dict[str, float]) -> None:
        vars(self).update(values)


class Scaling:
    """A callable object, and a number behind a property."""

    def __init__(self) -> None:
        self._gain = self.factor = 1.0

    @property
    def gain(self) -> float:
        return self._gain

    @gain.setter
    def gain(self, value: float) -> None:
        self._gain = value

    def __call__(self) -> float:
        return self._gain * self.factor


@dataclass(slots=True)
class Slotted:
    gain: float = 1.0


class Holding(Model):
    """Scales by what it holds, and keeps caches of all kinds."""

    def __init__(self, value: Any, gain: Callable[[Any], Any]):
        super().__init__()
        self.value, self._gain = value, gain
        self.hidden, self.mask = [torch.zeros(1)], torch.ones(1)
        self.seen: set[tuple[int, ...]] = {(0,)}
        self.examined = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden.append(x.detach())
        self.mask = x.detach().sum(1)
        self.seen.add(tuple(x.shape))
        if not self.training:
            self.examined = x.detach()
        return torch.as_tensor(x * self._gain(self.value))


def put(value: Any) -> Callable[[Any], Any]:
    return lambda module: setattr(module, "value", value)


def within(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda module: act(module.value)


OTHERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a tensor": (lambda: torch.tensor(1.0), lambda v: v, put(torch.tensor(0.5))),
    "a tensor in place": (lambda: torch.tensor(1.0), lambda v: v, within(lambda v: v.mul_(0.5))),
    "tensors in a list": (lambda: [torch.tensor(1.0)], lambda v: v[0],
                          within(lambda v: v[0].mul_(0.5))),
    "an array": (lambda: numpy.ones(2), lambda v: float(v.mean()),
                 within(lambda v: v.__imul__(0.5))),
    "a set": (lambda: {1}, len, within(lambda v: v.add(2))),
    "a deque": (lambda: deque([1.0]), len, within(lambda v: v.append(2.0))),
    "an OrderedDict": (lambda: OrderedDict(a=1.0), lambda v: v["a"],
                       within(lambda v: v.update(a=0.5))),
    "a defaultdict": (lambda: defaultdict(float, a=1.0), lambda v: v["a"],
                      within(lambda v: v.update(a=0.5))),
    "a long list": (lambda: [1.0] * 1500, lambda v: v[7], within(lambda v: v.__setitem__(7, 0.5))),
    "an enumeration": (lambda: Kind.ONE, lambda v: v.value, put(Kind.TWO)),
    "an IntEnum": (lambda: Level.ONE, lambda v: v, put(Level.TWO)),
    "a named tuple": (lambda: Pair(1.0), lambda v: v.gain, put(Pair(0.5))),
    "a complex number": (lambda: 1j, lambda v: v.imag, put(0.5j)),
    "bytes": (lambda: b"a", len, put(b"ab")),
    "a dtype": (lambda: torch.float64, lambda v: torch.finfo(v).bits / 64, put(torch.float32)),
}
REFUSED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a Settings": (Settings, lambda v: v.gain, within(lambda v: setattr(v, "gain", 0.5))),
    "a Slotted": (Slotted, lambda v: v.gain, within(lambda v: setattr(v, "gain", 0.5))),
    "a Decimal": (lambda: Decimal(1), float, put(Decimal("0.5"))),
    "a Word": (lambda: Word("a"), len, put(Word("ab"))),
    "a builtin_function_or_method": (lambda: torch.tanh, lambda v: float(v(torch.ones(()))),
                                     put(torch.sigmoid)),
    "a Scaling": (Scaling, lambda v: v(), within(lambda v: setattr(v, "gain", 0.5))),
    "a S": (Scaling, lambda v: v(), within(lambda v: setattr(v, "factor", 0.5))),  # a Scaling
    "a partial": (lambda: functools.partial(pow, 2.0), lambda v: v(1),
                  put(functools.partial(pow, 3.0))),
    "a list": (lambda: [torch.tanh], lambda v: float(v[0](torch.ones(()))),
               within(lambda v: v.__setitem__(0, torch.sigmoid))),
    "a dict": (lambda: {"act": torch.tanh}, lambda v: float(v["act"](torch.ones(()))),
               within(lambda v: v.update(act=torch.sigmoid))),
    "a method": (lambda: Scaling().__call__, lambda v: v(), put(Scaling().__call__)),
    "a type": (lambda: float, lambda v: float(v(1)), put(int)),
}


def held(entry: tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]],
         until: int = 6, **more: Any) -> str:
    """Train, and change what the module holds after step 1."""
    make, gain, change = entry
    model = built(Holding(make(), gain))
    return run(model, lambda model, step: step == 1 and change(model[2]), until, **more)


@pytest.mark.parametrize("kind", OTHERS)
def test_another_value_that_changes_after_a_step_is_a_part_of_the_state(kind: str,
                                                                        tmp_path: Path) -> None:
    """Of a resumed run, and of a newcomer, with its type. Caches of forward are none."""
    held(OTHERS[kind], 3, run_dir=tmp_path)
    assert held(OTHERS[kind], run_dir=tmp_path) == held(OTHERS[kind]) != held(
        (*OTHERS[kind][:2], lambda module: None))
    make, gain, change = OTHERS[kind]
    giver, taker = (LiveState(model, sgd(model)) for model in (
        built(Holding(make(), gain)), built(Holding(make(), gain))))
    for state in (giver, taker):
        state.begin()
        state.forget()
    change(giver.model[2])  # type: ignore[index]
    giver.begin()
    packed = giver.packed()
    taker.load(unpack(replace(packed, classes=taker.classes)))
    taker.begin()
    assert type(taker.model[2].value) is type(giver.model[2].value)  # type: ignore[index]
    assert taker.attributes.checksum() == giver.attributes.checksum() != 0
    taker.forget()
    taker.load({name: value for name, value in taker.values().items()
                if name != "other_attributes"})
    assert gain(taker.model[2].value) == gain(make())  # type: ignore[index]


@pytest.mark.parametrize("kind", REFUSED)
def test_another_value_that_cannot_be_kept_is_an_error_when_it_changes_after_a_step(
        kind: str) -> None:
    """With its name and the remedy. Before the loop the script may change it."""
    with pytest.raises(RuntimeError, match=rf"the attribute 2.value of .* It is {kind}") as raised:
        held(REFUSED[kind])
    assert "register_buffer" in str(raised.value) and "state={...}" in str(raised.value)


def test_an_object_that_is_registered_as_state_may_change() -> None:
    model = built(Holding(Settings(), lambda value: value.gain))
    run(model, lambda model, step: setattr(model[2].value, "gain", 0.5), 4,
        state={"settings": model[2].value})


def test_what_an_evaluation_leaves_in_a_module_is_a_cache() -> None:
    """Workers share its batches."""
    holding = Holding(1.0, float)
    model = built(holding)
    trainer = trainer_of(model)
    loop(trainer, model, after=lambda step: trainer.evaluate(
        HELD_OUT, lambda model, batch: {"loss": (float(mse(model, batch)), 1)}))
    assert not OF_MODELS[id(model)].values()
    assert holding.examined.dim() == 2


# --- modes ----------------------------------------------------------------------------------------

SCHEDULE = Schedule(dataset_size=SIZE, global_batch=8, microbatches=4, epochs=2, seed=3,
                    min_microbatch_samples=2)


def normed() -> Any:
    """A model whose bits depend on a mode, without random numbers."""
    return built(torch.nn.BatchNorm1d(8))


def test_modules_whose_modes_differ_are_named_with_the_workers() -> None:
    """The first ones of many, and the model itself by what it is."""
    told = sentence(7, [["", "a"], ["a"], ["", "a", "b"]])
    assert told.startswith("the mode (train or eval) of the model, b differs between the workers "
                           "in step 7: the model is in eval mode on rank 0, 2 alone.")
    assert "if trainer.is_first" in told and "model.train()" in told


@pytest.mark.parametrize("reduce", ["exact", "ring"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_modes_that_the_inner_loop_sets_are_those_of_every_worker(
        size: int, reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one that has no micro-batch, and of one that rolls a step forward. The micro-batches
    leave other modes, and those of the first one hold. The same in every world."""
    def run(model: Any, *listeners: Any) -> tuple[str, list[list[bool]]]:
        trainer = trainer_of(model, listeners=listeners, reduce=reduce)
        seen = list[list[bool]]()
        for step in trainer:
            for batch in step:
                step.backward(mse(model, batch))
                microbatches = [SCHEDULE.microbatch_samples(step.number, microbatch)
                                for microbatch in range(4)]
                first, _, third, *_ = (INPUT[microbatch[0]] for microbatch in microbatches
                                       if len(microbatch))
                if step.number % 2 and torch.equal(batch[0][0], first):
                    model[2].train(not model[2].training)
                if torch.equal(batch[0][0], third):
                    model[1].eval()
            seen.append([module.training for module in model])
        return trainer.result.weights_sha256, seen

    models = [normed() for _ in range(size)]
    alone = run(normed())
    assert [modes[2] for modes in alone[1]] == [True, False, False, True, True, False]
    assert all(modes[1] for modes in alone[1])
    for ended in in_a_breaking_world(
            monkeypatch, size,
            lambda rank: run(models[rank], *[Fault(("step.voted", 1))] * (rank == 1))):
        assert ended[1] == alone[1] and (reduce == "ring" or ended[0] == alone[0])


@pytest.mark.parametrize(("until", "leaves_at", "fails_at"),
                         [(6, -1, -1), (12, 5, -1), (12, -1, 6)],
                         ids=["finished", "left", "failed"])
def test_modes_that_are_set_before_the_inner_loop_hold_when_a_run_goes_on(
        until: int, leaves_at: int, fails_at: int, tmp_path: Path) -> None:
    """model.train() stands before the inner loop, and model.eval() after it. A resumed worker has
    run the first one before it had the checkpoint. The run was finished and gets more steps, or was
    left by return, or an exception has ended it."""
    def run(until: int, folder: Path | None = None, leaves_at: int = -1,
            fails_at: int = -1) -> tuple[str, list[int]]:
        model, steps = normed(), list[int]()
        trainer = trainer_of(model, until=f"{until} steps", checkpoint_every=3, run_dir=folder)
        for step in trainer:
            model.train()
            for batch in step:
                step.backward(mse(model, batch))
                if step.number == fails_at:
                    raise ZeroDivisionError
            steps.append(step.number)
            if step.every("1 epoch"):
                model.eval()
            if folder and trainer._worker.loop:
                checkpoints = trainer._worker.loop.checkpointing.checkpoints
                assert checkpoints
                checkpoints.wait()
            if step.number == leaves_at:
                return "", steps
        assert not model.training  # as the last evaluation has left it
        return trainer.result.weights_sha256, steps

    straight, _ = run(12)
    with suppress(ZeroDivisionError):
        run(until, tmp_path, leaves_at, fails_at)
    weights, steps = run(12, tmp_path)
    assert weights == straight and steps[0] == (3 if fails_at >= 0 else 6)  # an evaluation precedes


def test_a_compiled_module_has_the_mode_of_the_one_that_it_wraps() -> None:
    """So a world may have both kinds of workers: they have the same number of modules."""
    plain = normed()
    compiled: Any = torch.compile(normed())
    both = [Modes(plain), Modes(compiled)]
    for model in (plain, compiled):
        model.eval()
    assert both[0].evaluating() == both[1].evaluating() == ["", "0", "1", "2", "3"]
    for modes in both:
        modes.load(["2"])
    assert compiled.training and not compiled._orig_mod[2].training
    assert both[1].evaluating() == ["2"]
    for modes in both:
        modes.begin()
    assert both[0].checksum() == both[1].checksum() != 0
