"""What a script changes beside the state while it trains: hooks, methods, classes, modules that are
no part of the model. It is the same in a resumed run and in every world, or a named error."""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from test_loop import DATA, INPUT, built, mse, sgd
from test_trainer import Curriculum, Fault, in_a_breaking_world, loop, trainer_of
from torch.optim.lr_scheduler import LambdaLR, SequentialLR

from elastic_trainer.config import ConfigError
from elastic_trainer.events.log import Events
from elastic_trainer.options import OF_TRAINER
from elastic_trainer.reduce.ring import Sending
from elastic_trainer.state.values.filling import seeded
from elastic_trainer.state.values.names import named_parameters
from elastic_trainer.state.values.nodes import Walk
from elastic_trainer.training.checks.proving import Proving
from elastic_trainer.training.job.job import checked
from elastic_trainer.training.job.settings import in_force, require_known
from elastic_trainer.training.work import Work
from elastic_trainer.wire.proof import Proof, differences

Model = torch.nn.Module
pytestmark = pytest.mark.usefixtures("no_launcher")
CPU = torch.device("cpu")


class Scaled(Model):
    """Scales by a value that may stand in its class, in a slot, or in itself."""

    __slots__ = ("slot",)
    of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.slot, self.late = 1.0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        late = 1.0 if self.late is None else self.late
        return x * self.of_class * self.slot * late * getattr(self, "absent", 1.0)


def scaled() -> Any:
    kind = type("Scaled", (Scaled,), {"of_class": 1.0})  # tests share no class attribute
    torch.manual_seed(0)
    return built(kind(), torch.nn.Linear(8, 8))


def run(model: Any, change: Callable[[Any, int], Any], until: int = 6, optimizer: Any = None,
        loss: Callable[[Any, Any], torch.Tensor] = mse, **more: Any) -> str:
    """Train, and change something after each step."""
    return loop(trainer_of(model, optimizer, until=f"{until} steps", **more), model, loss,
                lambda step: change(model, step.number))


# --- hooks, methods, classes ----------------------------------------------------------------------

def doubled(module: Any, inputs: Any, output: Any) -> Any:
    return 2 * output


def halved(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / 2


def noted(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(0.5)  # type: ignore[union-attr]


def twice(self: Any, x: torch.Tensor) -> torch.Tensor:
    return 2 * torch.nn.Linear.forward(self, x)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a hook": (lambda m: m[3].register_forward_hook(doubled),
               r"the hook of 3 \(register_forward_hook\)"),
    "a hook before": (lambda m: m[3].register_forward_pre_hook(lambda module, x: (2 * x[0],)),
                      r"the hook of 3 \(register_forward_pre_hook\)"),
    "a hook of the backward pass": (
        lambda m: m[3].register_full_backward_hook(lambda module, x, y: (x[0] / 2,)),
        r"the hook of 3 \(register_full_backward_hook\)"),
    "a hook of a weight": (lambda m: m[3].weight.register_hook(halved),
                           r"the hook of 3\.weight \(register_hook\)"),
    "a hook after a gradient": (lambda m: m[3].weight.register_post_accumulate_grad_hook(noted),
                                r"3\.weight \(register_post_accumulate_grad_hook\)"),
    "a hook that is removed": (lambda m: m.handle.remove(),
                               r"the hook of 0 \(register_forward_hook\)"),
    "a forward": (lambda m: setattr(m[3], "forward", types.MethodType(twice, m[3])),
                  r"3\.forward"),
    "a hook of the optimizer": (lambda m: m.optimizer[0].register_step_pre_hook(lambda *_: None),
                                r"the hook of the optimizer \(register_step_pre_hook\)"),
    "a step": (lambda m: setattr(m.optimizer[0], "step", lambda closure=None: None),
               r"the optimizer\.step"),
    "a class": (lambda m: setattr(type(m[2]), "of_class", 0.5),
                r"Scaled\.of_class was changed between two steps, from 1\.0 to 0\.5"),
    "a class of the optimizer": (lambda m: setattr(type(m.optimizer[0]), "boost", 0.5),
                                 r"Boosted\.boost was changed between two steps"),
    "a slot": (lambda m: setattr(m[2], "slot", 0.5), r"2\.slot was changed between two steps"),
}


def boosted(model: Any) -> Any:
    kind = type("Boosted", (torch.optim.SGD,), {"boost": 1.0})
    return kind(model.parameters(), lr=0.1)


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_the_program_between_two_steps_is_an_error(what: str) -> None:
    """At the next step, with its name: a worker that joins, and a resumed run, lack it."""
    change, message = CHANGES[what]
    model = scaled()
    model.handle, optimizer = model[0].register_forward_hook(doubled), boosted(model)
    model.optimizer, steps = (optimizer,), list[int]()
    # A tuple: a model holds its optimizer in no module.

    def after(model: Any, step: int) -> None:
        steps.append(step)
        if step == 2:
            change(model)

    with pytest.raises(RuntimeError, match=message):
        run(model, after, optimizer=optimizer)
    assert steps[-1] in (2, 3)


def test_a_step_that_changes_the_class_of_the_optimizer_is_an_error() -> None:
    class Counting(torch.optim.SGD):
        n = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            type(self).n += 1
            super().step()

    model = built()
    with pytest.raises(RuntimeError, match=r"Counting\.n, an attribute of the optimizer's class"):
        run(model, lambda *_: None, optimizer=Counting(model.parameters(), lr=0.1))


def test_what_each_process_does_and_what_is_taken_back_is_no_change() -> None:
    """Hooks from before the training and of the first batch, hooks for one look, a class that
    counts the calls of forward, a cached pure function."""
    class Counted(Model):
        calls = 0

        @functools.lru_cache(maxsize=4)  # noqa: B019
        def factor(self, size: int) -> float:
            return 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).calls += 1
            return x * self.factor(x.shape[1])

    model, seen = built(Counted()), list[int]()
    model[0].register_forward_hook(doubled)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        if not seen:
            model[3].register_forward_hook(doubled)
        seen.append(1)
        handle = model[0].register_forward_hook(doubled)
        try:
            return mse(model, batch)
        finally:
            handle.remove()

    def look(model: Any, step: int) -> None:
        handle = model[0].register_forward_hook(lambda module, x, y: None)
        model(INPUT)
        handle.remove()

    assert run(model, look, loss=loss)


# --- attributes that become another kind of value -------------------------------------------------

LATE: dict[str, Callable[[Any, int], Any]] = {
    "None": lambda m, step: setattr(m[2], "late", torch.full((8,), 1 + 0.1 * step)),
    "None, once": lambda m, step: step == 2 and setattr(m[2], "late", torch.full((8,), 0.5)),
    "not there": lambda m, step: setattr(m[2], "absent", torch.full((8,), 1 + 0.1 * step)),
    "there and gone": lambda m, step: setattr(
        m[2], "late", torch.full((8,), 0.5) if step % 3 else None),
    "an array's number": lambda m, step: setattr(m[2], "late", numpy.full(8, 0.5, "f4")[step]),
}


@pytest.mark.parametrize("stop", [2, 3, 4])
@pytest.mark.parametrize("what", LATE)
def test_an_attribute_that_becomes_a_tensor_is_part_of_the_state(what: str, stop: int,
                                                                 tmp_path: Path) -> None:
    """Also in the checkpoint that is written right after the change."""
    expected = run(scaled(), LATE[what])
    run(scaled(), LATE[what], stop, run_dir=tmp_path)
    assert run(scaled(), LATE[what], run_dir=tmp_path) == expected


def test_a_world_that_breaks_has_the_attributes_that_became_tensors(
        monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(scaled(), LATE["None"])
    faults = {0: [("step.voted", 3)], 2: [("step.computed", 4)]}
    models = [scaled() for _ in range(3)]
    assert in_a_breaking_world(monkeypatch, 3, lambda rank: run(
        models[rank], LATE["None"], listeners=[Fault(*faults.get(rank, []))])) == [expected] * 3


def test_what_batches_set_is_a_cache_also_when_the_script_looks() -> None:
    """Attention weights are None, then a tensor that no checkpoint has; a look sets others."""
    class Saving(Model):
        weights: torch.Tensor | None

        def __init__(self) -> None:
            super().__init__()
            self.weights, self._tool = None, None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weights = torch.softmax(x, 1)
            return x + self.weights

    def look(model: Any, step: int) -> None:
        model(INPUT)
        model[2]._tool = object()

    trainer = trainer_of(model := built(Saving()), until="4 steps")
    loop(trainer, model, after=lambda step: look(model, step.number))
    assert not trainer._worker.loop.state.values().get("other_attributes")  # type: ignore


def test_a_function_in_the_place_of_none_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"the attribute 2\.late of the model was changed after"):
        run(scaled(), lambda m, step: setattr(m[2], "late", torch.tanh))


# --- modules beside the model ---------------------------------------------------------------------

class Weighted(Model):
    """A loss with an attribute and a buffer."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("weights", torch.ones(3))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (self.scale * self.weights * (output - target) ** 2).mean()


def teaching(teacher: Model) -> Callable[[Any, Any], torch.Tensor]:
    return lambda model, batch: (
        mse(model, batch) + (model(batch[0]) - teacher(batch[0])).square().mean())


def teacher_of(model: Model) -> Any:
    return copy.deepcopy(model).requires_grad_(False)


@torch.no_grad()
def lerped(teacher: Any, model: Any) -> None:
    for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
        mine.lerp_(theirs, 0.1)


def by_data(teacher: Any, model: Any) -> None:
    for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
        mine.data = 0.9 * mine.data + 0.1 * theirs.data


def by_data_in_place(teacher: Any, model: Any) -> None:
    for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
        mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)


MOVES: list[Callable[[Any, Any], Any]] = [
    lerped, by_data, by_data_in_place,
    lambda teacher, model: teacher.load_state_dict(model.state_dict())]


@pytest.mark.parametrize("move", MOVES)
def test_a_teacher_that_follows_the_model_belongs_to_the_state(move: Any, tmp_path: Path) -> None:
    """Beside it, it is an error: also where the write has no version (tensor.data). In the option
    state a resumed run has it, alone or in an object."""
    class Holder:
        def __init__(self, teacher: Any):
            self.teacher = teacher

        def state_dict(self) -> Any:
            return self.teacher.state_dict()

        def load_state_dict(self, values: Any) -> None:
            self.teacher.load_state_dict(values)

    def train(until: int, wraps: Any = None, **more: Any) -> str:
        model = built()
        teacher = teacher_of(model)
        if wraps:
            more["state"] = {"teacher": wraps(teacher)}
        return run(model, lambda model, step: move(teacher, model), until, loss=teaching(teacher),
                   **more)

    with pytest.raises(RuntimeError, match=r"Sequential\.0\.bias was changed between two steps"):
        train(4)
    for wraps in (lambda teacher: teacher, Holder):
        folder = tmp_path / str(wraps is Holder)
        expected = train(6, wraps)
        train(3, wraps, run_dir=folder)
        assert train(6, wraps, run_dir=folder) == expected


@pytest.mark.parametrize(("change", "named"), [
    (lambda loss, step: setattr(loss, "scale", 0.5), r"Weighted\.scale"),
    (lambda loss, step: loss.weights.mul_(0.5), r"Weighted\.weights"),
    (lambda loss, step: setattr(loss, "weights", torch.full((3,), 0.5)), r"Weighted\.weights"),
    (lambda loss, step: loss.train(step % 2 == 0), r"Weighted\.training")])
def test_a_loss_that_the_script_changes_after_a_step_is_an_error(change: Any, named: str) -> None:
    """The option state keeps its buffers, and not its attributes."""
    criterion = Weighted()
    with pytest.raises(RuntimeError, match=f"{named} was changed between two steps.*a part of"):
        run(built(), lambda _, step: change(criterion, step),
            loss=lambda model, batch: criterion(model(batch[0]), batch[1]))
    registered = Weighted()
    options: dict[str, Any] = {"state": {"loss": registered}, "loss": lambda model, batch: (
        registered(model(batch[0]), batch[1]))}
    if "weights" in named:
        assert run(built(), lambda _, step: change(registered, step), **options)
    else:
        with pytest.raises(RuntimeError, match=named):
            run(built(), lambda _, step: change(registered, step), **options)


def test_modules_beside_the_model_that_stay_are_no_error() -> None:
    """One that is made anew for each batch, one around the model, a frozen teacher, a loss that
    notes its last value, and one that is called after a step only."""
    class Around(Model):
        def __init__(self, model: Model):
            super().__init__()
            self.model, self.last = model, None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.model(x)
            self.last = found.detach()
            return found  # type: ignore[no-any-return]

    model = built()
    around, teacher, best = Around(model), teacher_of(model), teacher_of(model)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return torch.nn.MSELoss()(around(batch[0]), batch[1]) + 0 * teacher(batch[0]).sum()

    def after(model: Any, step: int) -> None:
        best.load_state_dict(model.state_dict())
        around(INPUT)
        best(INPUT)

    assert run(model, after, loss=loss) == run(built(), lambda *_: None)


def test_a_batch_that_changes_a_module_beside_the_model_is_an_error() -> None:
    """Running statistics of a loss differ from worker to worker."""
    normed = torch.nn.BatchNorm1d(3)
    with pytest.raises(ConfigError, match=r"BatchNorm1d\.num_batches_tracked, and BatchNorm1d is"):
        run(built(), lambda *_: None, microbatches=2, min_microbatch_samples=2, drop_last=True,
            loss=lambda model, batch: mse(lambda x: normed(model(x)), batch))  # type: ignore


def test_a_resumed_run_has_the_loss_of_its_checkpoint(tmp_path: Path) -> None:
    """As built: its class and its attributes are in the proof. An older proof has none of them."""
    def train(until: int, scale: float) -> str:
        criterion = Weighted(scale)
        return run(built(), lambda *_: None, until, run_dir=tmp_path,
                   loss=lambda model, batch: criterion(model(batch[0]), batch[1]))

    train(2, 1.0)
    with pytest.raises(ConfigError, match=r"module `Weighted \(beside the model\)` is "
                                          r"Weighted\(scale=1\.0\) in the run"):
        train(4, 0.5)
    assert train(4, 1.0)
    assert not differences(Proof(length=1, beside={"a": "A()"}), Proof(length=1))


# --- buffers that are one -------------------------------------------------------------------------

class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.ones(8))
        self.register_buffer("b", self.a)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.a + self.b  # type: ignore[operator]


@pytest.mark.parametrize("name", ["a", "b"])
def test_one_of_two_tied_buffers_that_is_replaced_is_an_error(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"2\.b \(it was 2\.a, and now it is not\)"):
        run(built(Tied()), lambda m, step: setattr(m[2], name, torch.full((8,), 0.5)))


def test_tied_buffers_that_are_replaced_together_are_state(tmp_path: Path) -> None:
    def both(model: Any, step: int) -> None:
        model[2].a = model[2].b = torch.full((8,), 1 + 0.1 * step)

    expected = run(built(Tied()), both)
    run(built(Tied()), both, 3, run_dir=tmp_path)
    assert run(built(Tied()), both, run_dir=tmp_path) == expected


# --- functions of the rate, generators ------------------------------------------------------------

def falling() -> Callable[[int], float]:
    kept = [1.0]

    def rate(step: int) -> float:
        kept[0] *= 0.9
        return kept[0]

    return rate


class Falling:
    def __init__(self) -> None:
        self.kept = 1.0

    def __call__(self, step: int) -> float:
        self.kept *= 0.9
        return self.kept


@pytest.mark.parametrize("rate", [
    lambda optimizer: falling(), lambda optimizer: Falling(),
    lambda optimizer: LambdaLR(optimizer, falling()),
    lambda optimizer: LambdaLR(optimizer, Falling().__call__),
    lambda optimizer: SequentialLR(optimizer, [
        LambdaLR(optimizer, lambda step: 1.0), LambdaLR(optimizer, falling())], [3])])
def test_a_function_of_the_rate_that_keeps_a_value_is_refused(rate: Any) -> None:
    """Nothing keeps it; of a callable object, LambdaLR keeps the attributes."""
    optimizer = sgd(model := built())
    with pytest.raises(ConfigError, match=r"returned 0\.\d+ for step 0, and then 0\.\d+"):
        trainer_of(model, optimizer, lr=rate(optimizer))


def test_an_object_that_keeps_a_value_is_part_of_a_scheduler(tmp_path: Path) -> None:
    def train(until: int, **more: Any) -> str:
        optimizer = sgd(model := built())
        return run(model, lambda *_: None, until, optimizer, lr=LambdaLR(optimizer, Falling()),
                   **more)

    expected = train(6)
    train(3, run_dir=tmp_path)
    assert train(6, run_dir=tmp_path) == expected


def test_a_generator_of_numpy_goes_on_with_the_children_that_it_has_spawned() -> None:
    """Its state does not have their number, nor its seed."""
    mine = numpy.random.default_rng()
    mine.spawn(2)
    mine.random()
    kind, *node = Walk({}, {}).describe(mine, "generator")
    expected = mine.spawn(1)[0].random(), mine.random()
    for other in (numpy.random.default_rng(), mine, None):
        found, change = seeded(other, *node, CPU)  # type: ignore[misc]
        change()
        assert kind == "random" and (found.spawn(1)[0].random(), found.random()) == expected


# --- the loop is left -----------------------------------------------------------------------------

@pytest.mark.parametrize("what", ["dataset", "hook"])
def test_a_change_before_a_break_is_reported_and_not_kept(what: str, tmp_path: Path,
                                                      capsys: Any) -> None:
    """A checkpoint of that step would go on without the change."""
    dataset, model = Curriculum(), built()
    for step in trainer_of(model, dataset=dataset, until="6 steps", run_dir=tmp_path,
                           checkpoint_every=None):
        for batch in step:
            step.backward(mse(model, batch))
        if step.number == 2:
            if what == "dataset":
                dataset.scale = 0.5
            else:
                model[0].register_forward_hook(doubled)
            break
    told = capsys.readouterr().err
    assert "without a checkpoint of them" in told and (
        "scale of the dataset was changed" if what == "dataset" else "the hook of 0") in told
    assert run(built(), lambda *_: None, run_dir=tmp_path) == run(built(), lambda *_: None)


# --- what may change ------------------------------------------------------------------------------

def test_allow_change_takes_what_there_is() -> None:
    """Parts of the proof, options of the optimizer, keys of the configuration; else the nearest
    known name is told."""
    run_settings = {"optimizer.lr": 0.1, "optimizer.groups[1].eps": 1e-8, "reduce": "exact",
                    "configuration": {"model.width": 8}}
    for name in ("samples", "modules", "optimizer", "lr", "optimizer.lr", "training.lr", "eps",
                 "model.width", "training.checkpoint_every", "model.depth"):
        require_known([name], run_settings, {"configuration": {"model.depth": 2}})
    for name, near in (("nosuch", ""), ("sample", " Did you mean samples?"), ("length", ""),
                       ("model.widht", " Did you mean model.width?"), ("lrr", "")):
        with pytest.raises(ConfigError, match=f"names '{name}', which is no part.*{near}"):
            require_known([name], run_settings, {})


def test_a_run_begins_with_names_that_may_change_only_if_it_has_them(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_TRAINER_ALLOW_CHANGE", "samples,nosuch")
    with pytest.raises(ConfigError, match="--allow-change names 'nosuch'"):
        run(built(), lambda *_: None)


# --- what the proof costs -------------------------------------------------------------------------

class Reads(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.n = 0

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, number: int) -> Any:
        self.n += 1
        return DATA[number]


def test_the_proof_costs_a_bounded_number_of_calls() -> None:
    """At most 50 ms beside the samples' own loading: 50,000 calls, at 1 µs each, for a model of 150
    modules. The samples are read eight times."""
    layers = [torch.nn.TransformerEncoderLayer(8, 2, 16) for _ in range(12)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 3))
    data, calls = Reads(), 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    options = in_force({"global_batch": 8, "until": "1 epoch"}, OF_TRAINER)
    job = checked(model, sgd(model), data, options, words=OF_TRAINER)
    work = Work(job, "exact", Sending(), Events(None))
    proving = Proving(job, work.state, work.beside)
    reads = data.n
    sys.setprofile(count)
    try:
        assert proving.proof(1, 2).samples
    finally:
        sys.setprofile(None)
    assert data.n - reads == 8 and len(named_parameters(model)) > 140
    assert calls < 50_000, calls


# --- what a dataset reads -------------------------------------------------------------------------

FACTOR = 1.0


class Reading(torch.utils.data.Dataset):
    of_class = 1.0
    __slots__ = ("slot",)

    def __init__(self, file: Path):
        self.file, self.slot, self.array = file, 1.0, numpy.ones((22, 5), "f4")
        file.write_text("1")

    def __len__(self) -> int:
        return 22

    def __getitem__(self, number: int) -> Any:
        x = INPUT[number] * torch.from_numpy(self.array[number]) * float(self.file.read_text())
        return x * FACTOR * self.of_class * self.slot, DATA[number][1]


def halve_global(dataset: Any) -> None:
    global FACTOR
    FACTOR = 0.5


def halve_array(dataset: Any) -> None:
    dataset.array *= 0.5


READS: dict[str, Callable[[Any], Any]] = {
    "a class": lambda dataset: setattr(type(dataset), "of_class", 0.5),
    "a slot": lambda dataset: setattr(dataset, "slot", 0.5),
    "a global name": halve_global, "an array": halve_array,
    "a file": lambda dataset: dataset.file.write_text("0.5"),
    "a method": lambda dataset: setattr(type(dataset), "__getitem__", lambda self, number: (
        0.5 * INPUT[number], DATA[number][1]))}


@pytest.mark.parametrize("what", READS)
def test_what_a_dataset_reads_stays_wherever_it_is(what: str, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample is read again after steps, and at the end of an epoch and of the run."""
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    kind, steps = type("Reading", (Reading,), {"of_class": 1.0}), list[int]()
    dataset = kind(tmp_path / "factor")

    def after(model: Any, step: int) -> None:
        steps.append(step)
        if step == 4:
            READS[what](dataset)

    with pytest.raises(RuntimeError, match="or the batch that collate makes of it, has other bits"):
        run(built(), after, 12, dataset=dataset)
    assert max(steps) == 5  # the end of the second epoch


def test_a_collate_function_that_reads_another_value_is_an_error() -> None:
    kept = [1.0]

    def halved_batch(samples: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(samples)
        return x * kept[0], y

    with pytest.raises(RuntimeError, match="the batch that collate makes of it, has other bits"):
        run(built(), lambda model, step: kept.__setitem__(0, 0.5), collate=halved_batch)


def test_a_dataset_that_is_random_by_intent_is_not_compared(tmp_path: Path) -> None:
    class Noisy(Reading):
        def __getitem__(self, number: int) -> Any:
            x, y = super().__getitem__(number)
            return x + next(noise), y

    noise = iter(numpy.linspace(0, 1, 10_000, dtype="f4"))
    assert run(built(), lambda *_: None, dataset=Noisy(tmp_path / "factor"))
