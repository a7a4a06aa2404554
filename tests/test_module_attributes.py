"""Plain attributes of modules (`p` of a dropout, a temperature): what a script changes in them is
the same in a resumed run, on a newcomer and in every world, or an error that names it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from test_evaluation import HELD_OUT
from test_loop import INPUT, SCHEDULE, TARGET, built, mse, sgd
from test_trainer import Fault, in_a_breaking_world, trainer_of

from elastic_trainer.config import ConfigError
from elastic_trainer.data.seeds import seed_everything
from elastic_trainer.state.kinds import check_kinds
from elastic_trainer.state.layout import LayoutError, byte_ranges, byte_view, decode
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.module_attributes import ModuleAttributes, plain_attributes
from elastic_trainer.training.modes_differ import on_attributes

Model = torch.nn.Module
pytestmark = pytest.mark.usefixtures("no_launcher")


@dataclass
class Config:
    """What a module reads in forward."""

    gain: float = 1.0


class Scaled(Model):
    """Scales by all that scripts keep in attributes: none is a parameter or a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.kind, self.shift = 1.0, "plain", None
        self.gains, self.table, self.pair = [1.0, 1.0], {"gain": 1.0}, (1, (1.0, "a"))
        self.config, self.args = Config(), SimpleNamespace(gain=1.0)
        self.drops = [torch.nn.Dropout(0.0)]  # no submodule
        self.inner = torch.nn.ModuleList([torch.nn.Dropout(0.0)])
        self.count = 0
        self.shape: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gain = (self.temperature * self.gains[1] * self.table["gain"] * self.pair[1][0]
                * self.config.gain * self.args.gain * (2.0 if self.kind == "double" else 1.0))
        x = x * gain + (0.0 if self.shift is None else self.shift)
        return torch.as_tensor(self.inner[0](self.drops[0](x)))


def scaled() -> Any:
    return built(Scaled())


def later(step: int) -> float:
    return 1.0 + 0.1 * step


def to_namespace(module: Any, step: int) -> None:
    module.args = SimpleNamespace(gain=later(step))


CHANGES: dict[str, Callable[[Any, int], Any]] = {
    "a temperature": lambda m, step: setattr(m, "temperature", later(step)),
    "numbers of numpy": lambda m, step: (
        setattr(m, "temperature", numpy.float64(later(step))),
        setattr(m, "shift", numpy.float32(later(step))),
        m.gains.__setitem__(1, numpy.linspace(1, 2, 10)[step])),
    "p of a dropout": lambda m, step: setattr(m.inner[0], "p", 0.1 * (step + 1)),
    "a module in a list": lambda m, step: setattr(m.drops[0], "p", 0.1 * (step + 1)),
    "a text, once": lambda m, step: setattr(m, "kind", "double" if step > 1 else "plain"),
    "None": lambda m, step: setattr(m, "shift", later(step) if step % 2 else None),
    "a list in place": lambda m, step: m.gains.__setitem__(1, later(step)),
    "a dict in place": lambda m, step: m.table.update(gain=later(step)),
    "another dict": lambda m, step: setattr(m, "table", {"gain": later(step), 3: [step]}),
    "a nested tuple": lambda m, step: setattr(m, "pair", (1, (later(step), "b"))),
    "a dataclass": lambda m, step: setattr(m.config, "gain", later(step)),
    "a namespace that is replaced": to_namespace,
    "a number that is not finite": lambda m, step: (setattr(m, "limit", math.inf),
                                                    setattr(m, "temperature", later(step))),
}


def run(model: Any, change: Callable[[Any, int], Any], until: int = 6, **more: Any) -> str:
    """Train, and change an attribute behind each step."""
    trainer = trainer_of(model, until=f"{until} steps", **more)
    for step in trainer:
        for batch in step:
            step.backward(mse(model, batch))
        change(model[2], step.number)
    return str(trainer.result.weights_sha256)


@pytest.mark.parametrize("name", CHANGES)
def test_a_resumed_run_has_the_attributes_that_were_changed_behind_a_step(
        name: str, tmp_path: Path) -> None:
    """The bits are those of a run without a break, and with one micro-batch those of a plain
    loop."""
    change = CHANGES[name]
    torch.set_num_threads(1)
    straight = run(scaled(), change, microbatches=1)
    run(scaled(), change, 3, microbatches=1, run_dir=tmp_path)
    assert run(scaled(), change, microbatches=1, run_dir=tmp_path) == straight
    ours, plain = scaled(), scaled()
    run(ours, change, microbatches=1)
    optimizer = sgd(plain)
    for step in range(SCHEDULE.steps):
        chosen = torch.cat(
            [torch.from_numpy(SCHEDULE.microbatch_samples(step, microbatch))
             for microbatch in range(4)])
        seed_everything(SCHEDULE.microbatch_seed(step, 0))
        optimizer.zero_grad()
        mse(plain, [INPUT[chosen], TARGET[chosen]]).backward()
        optimizer.step()
        change(plain[2], step)
    assert all(torch.equal(byte_view(one), byte_view(other))
               for one, other in zip(ours.parameters(), plain.parameters(), strict=True))
    assert plain_attributes(ours) == plain_attributes(plain)
    assert straight != run(scaled(), lambda *_: None, microbatches=1)


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_attributes_that_are_changed_behind_a_step_are_the_same_in_every_world(
        size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also through a generation that breaks, in the micro-batches and behind the vote."""
    alone, points = run(scaled(), CHANGES["a temperature"]), {
        0: [("step.voted", 1)], 1: [("step.computed", 3)]}
    models = [scaled() for _ in range(size)]
    assert in_a_breaking_world(monkeypatch, size, lambda rank: run(
        models[rank], CHANGES["a temperature"],
        listeners=[Fault(*points.get(rank, []))])) == [alone] * size


def by_step(model: Any, step: Any) -> None:
    """Set an attribute by the number of the step."""
    model[2].temperature = later(step.number)


def by_numpy(model: Any, step: Any) -> None:
    """Set an attribute by the number of the step, as a number of numpy, or as a whole number that
    equals the float that was there."""
    model[2].temperature = numpy.float32(later(step.number)) if step.number else 1


def to_a_cache(model: Any, step: Any) -> None:
    """Set, in forward, what is the same for each batch."""
    model[2].shape, model[2].width = (None, 8), 8


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("act", [by_step, by_numpy, to_a_cache])
def test_what_the_inner_loop_sets_alike_for_each_batch_is_that_of_every_worker(
        act: Callable[..., None], size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a worker that has no micro-batch: what the step's first micro-batch has left."""
    def work(model: Any, *listeners: Any) -> tuple[str, list[Any]]:
        trainer, seen = trainer_of(model, listeners=listeners), list[Any]()
        for step in trainer:
            for batch in step:
                act(model, step)
                step.backward(mse(model, batch))
            seen.append([model[2].temperature, model[2].shape, vars(model[2]).get("width")])
        return trainer.result.weights_sha256, seen

    alone, models = work(scaled()), [scaled() for _ in range(size)]
    assert alone[1][-1] == ([1.0, (None, 8), 8] if act is to_a_cache else [
        later(5) if act is by_step else numpy.float32(later(5)), None, None])
    assert in_a_breaking_world(monkeypatch, size, lambda rank: work(
        models[rank], *[Fault(("step.voted", 1))] * (rank == 1))) == [alone] * size


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
        assert "behind the inner loop" in told and "buffer" in told and "step.log" in told
    assert max(steps, default=-1) == (1 if error is RuntimeError else -1)


class Lengths(Model):
    """Keeps sizes of its batches, and the tensors beside them, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.longest, self.length = 0, None
        self.by_length: dict[int, int] = {}
        self.places: Any = None
        self.gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shape, self.length, self.width = tuple(x.shape), len(x), x.shape[1]
        if len(x) > self.longest:
            self.longest, self.places = len(x), torch.arange(len(x)).cos()
        self.by_length.setdefault(len(x), len(x) // 2)
        assert len(self.places) == self.longest
        return x * self.places[:len(x), None] * self.gain + self.by_length[len(x)]


@pytest.mark.parametrize("size", [2, 3])
def test_sizes_that_follow_from_the_batch_may_be_kept_in_attributes(
        size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of the last batch, of the longest one, a table by length: the bits are those of
    one worker, when generations break, when the run is resumed, and beside an attribute that is
    changed behind the loop."""
    def gains(module: Any, step: int) -> None:
        module.gain = later(step)

    alone = run(built(Lengths()), gains)
    models, points = [built(Lengths()) for _ in range(size)], {
        0: [("step.voted", 1)], 1: [("step.computed", 3)]}
    assert in_a_breaking_world(monkeypatch, size, lambda rank: run(
        models[rank], gains, listeners=[Fault(*points.get(rank, []))])) == [alone] * size
    monkeypatch.undo()
    run(built(Lengths()), gains, 3, run_dir=tmp_path)
    resumed: Any = built(Lengths())
    assert run(resumed, gains, run_dir=tmp_path) == alone
    assert resumed[2].gain == later(5) and resumed[2].width == 8


@pytest.mark.parametrize("where", ["before", "behind"])
def test_attributes_that_differ_between_workers_end_the_run(
        where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a step is applied, on all workers, with the name, the values and the ranks."""
    models = [scaled() for _ in range(3)]

    def work(rank: int) -> str:
        model, seen = models[rank], list[int]()
        with pytest.raises(RuntimeError) as raised:
            for step in trainer_of(model):
                if where == "before" and rank == 0 and len(seen) == 2:
                    model[2].temperature = 0.5
                for batch in step:
                    step.backward(mse(model, batch))
                if where == "behind" and rank == 0 and step.number == 1:
                    model[2].temperature = 0.5
                seen.append(step.number)
        return str(raised.value)

    (told,) = set(in_a_breaking_world(monkeypatch, 3, work))
    assert ("the attributes 2.temperature of the model's modules differ between the workers in "
            "step 2: 2.temperature is 0.5 on rank 0, as it was built on rank 1, as it was built "
            "on rank 2") in told
    assert "if trainer.is_first" in told
    assert "b is 2 on rank 0, 3 on rank 1" in on_attributes(1, [{"b": 2, "a": 1}, {"b": 3, "a": 1}])


def test_a_newcomer_has_the_attributes_when_it_has_received_the_state() -> None:
    """Those that were changed. Others are as it was built: also one that its script has changed
    before it received the state."""
    states = [LiveState(model, sgd(model)) for model in (scaled(), scaled())]
    giver, taker = states
    for name, change in CHANGES.items():
        if "replaced" not in name:
            change(giver.model[2], 3)  # type: ignore[index]
    giver.model[2].new = "x"  # type: ignore[index]
    taker.model[2].count = 7  # type: ignore[index]
    packed = giver.packed()
    values = decode(packed.header, torch.cat([
        *byte_ranges(packed, 0, packed.payload_bytes)]))
    check_kinds(values)
    taker.load(values)
    assert plain_attributes(taker.model) == plain_attributes(giver.model)
    assert taker.attributes.changed() == giver.attributes.changed()
    for state in states:
        state.begin()
    assert taker.attributes.checksum() == giver.attributes.checksum() != 0
    with pytest.raises(LayoutError, match=r"\['gone.p'\] were changed there"):
        taker.fits(values | {"attributes": {"gone.p": 1}})


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
        return run(scaled(), lambda module, step: module.inner.__setitem__(0, other()))

    assert work(lambda: torch.nn.Dropout(0.3)) == run(scaled(), lambda module, step: setattr(
        module.inner[0], "p", 0.3))
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
        for step in trainer:
            for batch in step:
                step.backward(mse(model, batch))
            trainer.evaluate(HELD_OUT, counting)
        return trainer.result.weights_sha256, model[2].count, hasattr(model[2], "evaluated")

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
