"""The loop of the user: the same bits as train() and as plain PyTorch, whatever breaks, or an error
at once.

`Broken` puts several trainers into one world of threads, whose generations break where a test says
so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated import Hub, Key, Member, in_threads
from test_loop import (
    DATA,
    INPUT,
    NUMBERS,
    SCHEDULE,
    SIZE,
    TARGET,
    Ears,
    adamw,
    built,
    mse,
    sgd,
    trained,
)
from test_world import Given, Session

from elastic_trainer import Trainer
from elastic_trainer.config import ConfigError, Launch
from elastic_trainer.data.seeds import seed_everything, seed_of
from elastic_trainer.reduce.flat import Tally, read
from elastic_trainer.schedule.intervals import length_of
from elastic_trainer.schedule.schedule import Schedule
from elastic_trainer.state.values.layout import byte_view
from elastic_trainer.training.loop import Loop, hooks_of
from elastic_trainer.views.verify import verify
from elastic_trainer.world.collectives import PeersLost
from elastic_trainer.world.generations import Generations

Model = torch.nn.Module
pytestmark = pytest.mark.usefixtures("no_launcher")


def trainer_of(model: Model, optimizer: Any = None, dataset: Any = DATA, **changes: Any) -> Trainer:
    given: dict[str, Any] = {
        "global_batch": 8, "microbatches": 4, "until": "2 epochs", "seed": 3, "progress": False
    }
    return Trainer(model,
                   sgd(model) if optimizer is None else optimizer, dataset, **(given | changes))


def loop(trainer: Trainer, model: Model, loss: Callable[[Model, Any], torch.Tensor] = mse,
         after: Callable[[Any], Any] = lambda step: None) -> str:
    """Run the loop that every user writes, with code after the inner loop; returns the hash of the
    weights."""
    for step in trainer:
        for batch in step:
            step.backward(loss(model, batch))
        after(step)
    return trainer.result.weights_sha256


# --- the same bits --------------------------------------------------------------------------------

def test_each_step_is_handed_out_once_when_it_is_finished() -> None:
    """With its number, epoch and loss: those of the event."""
    model, ears, seen = built(), Ears(), []
    loop(trainer_of(model, listeners=[ears]), model,
         after=lambda step: seen.append((step.number, step.epoch, step.loss)))
    told = [(e["step"], SCHEDULE.epoch(e["step"]), e["loss"])
            for e in ears.facts("worker.step_committed")]
    assert seen == told and len(seen) == 6


class Average:
    """A moving average of a weight, which the code after the inner loop keeps."""

    def __init__(self) -> None:
        self.values = torch.zeros(8, 5)
        self.updates = 0

    def update(self, model: Any) -> None:
        self.values = 0.9 * self.values + 0.1 * model[0].weight.detach()
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "updates": self.updates}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values, self.updates = values["values"].clone(), values["updates"]


def with_average(model: Model, optimizer: Any = None, **options: Any
                 ) -> tuple[str, list[int], list[float], int]:
    """Run a loop that keeps an average; returns the hash, the steps, the average and its
    updates."""
    average, steps = Average(), list[int]()

    def after(step: Any) -> None:
        average.update(model)
        steps.append(step.number)

    trainer = trainer_of(model, optimizer, state={"average": average}, **options)
    return loop(trainer, model, after=after), steps, average.values.tolist(), average.updates


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_the_bits_are_those_of_a_straight_run_when_it_is_resumed(stop: int, tmp_path: Path) -> None:
    """A checkpoint holds what the user changed after its last step, in `state`."""
    def run(until: int, folder: Path | None = tmp_path) -> Any:
        return with_average(built(torch.nn.BatchNorm1d(8)), until=f"{until} steps",
                            checkpoint_every=1, run_dir=folder)

    run(stop)
    sha256, _, *average = run(6, None)
    assert run(6) == (sha256, list(range(stop, 6)), *average) and average[1] == 6


def test_a_model_is_evaluated_after_the_inner_loop() -> None:
    """model.eval(), a forward pass, model.train() and accumulated losses change no bit of the
    training."""
    def evaluate(step: Any) -> None:
        if step.every("1 epoch"):
            models[1].eval()
            with torch.no_grad():
                mse(models[1], [INPUT, TARGET])
            torch.rand(3)
            models[1].train()

    models = [built(torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2)) for _ in range(2)]
    plain, evaluated = (trainer_of(model, microbatches=2) for model in models)
    assert loop(evaluated, models[1], after=evaluate) == loop(plain, models[0])


def test_a_batch_is_accumulated_when_the_user_cuts_it_again() -> None:
    """The losses of the pieces are added up, and backward is called once."""
    def run(pieces: int) -> Model:
        model = built()
        for step in trainer_of(model, microbatches=2):
            for x, y in step:
                parts = list(zip(x.chunk(pieces), y.chunk(pieces), strict=True))
                step.backward(sum(mse(model, part) * (len(part[0]) / len(x)) for part in parts))
        return model

    for one, two in zip(run(1).parameters(), run(2).parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-6)


class Curriculum:
    """Its samples depend on a number that the script sets."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, number: int) -> Any:
        return INPUT[number] * self.scale, TARGET[number]


class Kept(Curriculum):
    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale}

    def load_state_dict(self, values: dict[str, float]) -> None:
        self.scale = values["scale"]


def with_curriculum(dataset: Any, until: int = 6, **options: Any) -> str:
    return loop(trainer_of(model := built(), dataset=dataset, until=f"{until} steps", **options),
                model, after=lambda step: setattr(dataset, "scale", 1 + 0.1 * step.number))


def test_a_dataset_that_is_registered_may_change_after_a_step(tmp_path: Path) -> None:
    """A resumed run reads as one that went through. One that is not registered is an error, also
    after the last step."""
    straight, first, second = Kept(), Kept(), Kept()
    expected = with_curriculum(straight, state={"dataset": straight})
    with_curriculum(first, 4, state={"dataset": first}, run_dir=tmp_path)
    assert with_curriculum(second, state={"dataset": second}, run_dir=tmp_path) == expected
    for until in (2, 6):
        with pytest.raises(RuntimeError, match="scale of the dataset was changed from 1.0 to 1.1"):
            with_curriculum(Curriculum(), until)


# --- a world that breaks --------------------------------------------------------------------------

class Meeting(Hub):
    """A hub that can break, and where all meet again for the next generation."""

    def __init__(self, size: int):
        super().__init__(size)
        self.door = threading.Barrier(size, action=self.renew)


class Doors(Session):
    """Horovod, as far as generations need it: all meet when it starts, and all notice when one
    closes its sockets."""

    def __init__(self, hub: Meeting):
        super().__init__()
        self.hub = hub

    def start(self) -> None:
        self.hub.door.wait(30)

    def close_sockets(self) -> None:
        self.hub.abort()


class Broken(Member):
    """One member of a world of threads, whose generations break."""

    def _take(self, key: Key) -> list[Any]:
        try:
            return super()._take(key)
        except threading.BrokenBarrierError as error:
            raise PeersLost("a member is gone, as planned") from error


class Fault:
    """A listener that breaks a generation once: at a point of a step."""

    def __init__(self, *places: tuple[str, int]):
        self.places = list(places)

    def __call__(self, event: str, facts: dict[str, Any]) -> None:
        if (event, facts.get("step")) in self.places:
            self.places.remove((event, facts["step"]))
            raise PeersLost("as planned")


def in_a_breaking_world(monkeypatch: pytest.MonkeyPatch, size: int,
                        work: Callable[[int], Any]) -> list[Any]:
    """Run `work` of each rank in a thread, with a Trainer that has its seat in one world; returns
    what they return."""
    hub, ranks = Meeting(size), threading.local()
    torch.set_num_threads(1)

    class Seated(Loop):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.world = Broken(hub, ranks.rank)
            self.generations = Generations(Launch(), Given(ranks.rank, size), self.events,
                                           hooks_of(self), self.world, Doors(hub))

    def run(rank: int) -> Any:
        ranks.rank = rank
        return work(rank)

    def give_up() -> None:
        hub.abort()
        hub.door.abort()

    monkeypatch.setattr("elastic_trainer.training.worker.Loop", Seated)
    return in_threads(size, run, give_up)


POINTS = ("step.computed", "step.prepared", "step.voted", "step.applied")


@pytest.mark.parametrize("points", [
    *[{0: [(point, 2)]} for point in POINTS],
    *[{3: [(point, 2)]} for point in POINTS],
    {
        1: [("step.voted", 1),
            ("step.computed", 3)], 2: [("step.prepared", 4)], 0: [("step.voted", 5)]
    },
],
                         ids=lambda points: ",".join(f"{rank}:{at}" for rank, at in points.items()))
def test_the_bits_are_those_of_one_worker_when_generations_break(
        points: dict[int, list[tuple[str, int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """In micro-batches, between prepare, vote and apply. The code after the inner loop runs once
    for each finished step."""
    def run(rank: int, **more: Any) -> Any:
        return with_average(models[rank], adamw(models[rank]), **more)

    models = [built(torch.nn.LayerNorm(8)) for _ in range(5)]
    reference = built(torch.nn.LayerNorm(8))
    straight = trained(reference, adamw(reference)).weights_sha256
    alone = run(4)
    assert alone[:2] == (straight, list(range(6)))
    assert in_a_breaking_world(monkeypatch, 4, lambda rank: run(
        rank, listeners=[Fault(*points.get(rank, []))])) == [alone] * 4


# --- what is counted and logged -------------------------------------------------------------------

def tokens(model: Model, batch: Any) -> tuple[torch.Tensor, int]:
    """The sum of a loss over those targets that count, and how many do: another number in each
    micro-batch."""
    x, y = batch
    counts = (y > -0.5).float()
    return (torch.square(model(x) - y) * counts).sum(), int(counts.sum())


@pytest.mark.parametrize("reduce", ["exact", "ring"])
@pytest.mark.parametrize("scales", [False, True])
def test_the_gradient_is_that_of_the_mean_over_what_was_counted(reduce: str, scales: bool) -> None:
    """One micro-batch, or four of different counts: the same steps as plain PyTorch makes with one
    big batch."""
    def run(microbatches: int) -> tuple[Model, float]:
        model = built()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6) if scales else None
        result = trained(model, loss=tokens, microbatches=microbatches, reduce=reduce,
                         clip_norm=0.5, scaler=scaler)
        return model, result.loss

    plain = built()
    optimizer = sgd(plain)
    for step in range(SCHEDULE.steps):
        chosen = torch.cat(
            [torch.from_numpy(SCHEDULE.microbatch_samples(step, microbatch))
             for microbatch in range(4)])
        optimizer.zero_grad()
        total, count = tokens(plain, [INPUT[chosen], TARGET[chosen]])
        total.backward()
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad /= count
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
    (one, loss), (four, _) = run(1), run(4)
    for mine, theirs, other in zip(one.parameters(), plain.parameters(), four.parameters(),
                                   strict=True):
        assert torch.equal(byte_view(mine), byte_view(theirs))
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-6)
    assert loss == pytest.approx(float(total.detach()) / count)


def counted(model: Model, trainer: Trainer) -> tuple[str, list[dict[str, float]]]:
    logged = []
    for step in trainer:
        for batch in step:
            total, count = tokens(model, batch)
            step.backward(total, count=count)
            step.log(acc=((model(batch[0]) > 0).sum(), count), odd=(0.1 * total.item(), 1 / 3))
        logged.append(step.metrics)
    return trainer.result.weights_sha256, logged


def test_sums_are_the_same_number_in_every_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, also where a generation breaks after the vote; they are in the step's event
    too."""
    ears = Ears()
    model = built()
    alone = counted(model, trainer_of(model, listeners=[ears]))
    assert [e["metrics"] for e in ears.facts("worker.step_committed")] == alone[1]
    models, places = [built() for _ in range(3)], [[], [("step.voted", 2)], [("step.computed", 4)]]
    assert in_a_breaking_world(monkeypatch, 3, lambda rank: counted(
        models[rank], trainer_of(models[rank], listeners=[Fault(*places[rank])]))) == [alone] * 3


def test_logged_sums_are_exact() -> None:
    """Whole numbers beyond what 32-bit floats hold, negative ones and fractions; NaN stays NaN."""
    tally = Tally()
    values = {"large": (2**40 + 1, 3), "small": (-0.1, 0.3), "none": (float("nan"), 1)}
    for name, pair in values.items():
        tally.add(name, *pair)
    tally.lay_out()
    parts = []
    for _ in range(3):
        tally.clear()
        for name, pair in values.items():
            tally.add(name, *pair)
        parts.append(torch.tensor(tally.elements()))
    found = read(tally.names, torch.stack(parts).sum(0).tolist())
    assert found["large"] == (3 * 2**40 + 3, 9.0)
    assert found["small"] == (pytest.approx(-0.3, abs=1e-15), pytest.approx(0.9, abs=1e-15))
    assert found["none"][0] != found["none"][0]


@pytest.mark.parametrize(("body", "told"), [
    (lambda step, total, count, calls=[]:
     (calls.append(1), step.backward(total, **{"count": count} if len(calls) % 2 else {})),
     "2 of 4 micro-batches of step 0 gave a count"),
    (lambda step, total, count: step.backward(total, count=0),
     "4 of 4 micro-batches of step 0 gave a count.*add up to 0"),
    (lambda step, total, count: step.backward(total, count="many"), "backward got count='many'"),
    (lambda step, total, count:
     (step.log(acc=3), step.backward(total)), r"acc=3. Give a sum and its number of items"),
    (lambda step, total, count:
     (step.log(**{"count": (1, 1)}), step.backward(total)), "cannot log 'count'"),
    (lambda step, total, count: (step.backward(total), step.number == 1 and step.log(late=(1, 1))),
     "late was logged in micro-batch 0 of step 1, but the first batch logged nothing"),
])
def test_a_count_that_cannot_be_used_raises(body: Callable[..., Any], told: str) -> None:
    """With the step, the numbers and the remedy."""
    model = built()
    with pytest.raises((RuntimeError, TypeError, ValueError), match=told):
        for step in trainer_of(model):
            for batch in step:
                body(step, *tokens(model, batch))


# --- several optimizers ---------------------------------------------------------------------------

class Pair(Model):
    """A generator and a discriminator with statistics; `draws`: with noise and dropout. (A world of
    threads has one random generator for all.)"""

    def __init__(self, draws: bool = False) -> None:
        super().__init__()
        self.draws = draws
        torch.manual_seed(0)
        self.g = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.BatchNorm1d(8),
                                     torch.nn.Tanh(), torch.nn.Linear(8, 5))
        self.d = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.2 * draws),
                                     torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def fake(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.g(torch.randn(len(x), 2) if self.draws else x[:, :2]))


def optimizers(model: Pair) -> dict[str, torch.optim.Optimizer]:
    return {"d": torch.optim.Adam(model.d.parameters(), lr=0.01),
            "g": torch.optim.SGD(model.g.parameters(), lr=0.05, momentum=0.9)}


def loss_of_d(model: Pair, x: torch.Tensor) -> torch.Tensor:
    fake = model.fake(x).detach()
    return torch.nn.functional.softplus(
        model.d(fake)).mean() + torch.nn.functional.softplus(-model.d(x)).mean()


def loss_of_g(model: Pair, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.softplus(-model.d(model.fake(x))).mean()


class Seen:
    """What one worker's loop has seen of the steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.between: list[int] = []
        self.losses: list[dict[str, float]] = []


def adversarial(model: Pair, trainer: Trainer) -> tuple[str, Seen]:
    seen = Seen()
    for step in trainer:
        for x, _ in step.phase("d"):
            step.backward(loss_of_d(model, x))
        seen.between.append(step.number)
        for x, _ in step.phase("g"):
            step.backward(loss_of_g(model, x))
        seen.steps.append(step.number)
        seen.losses.append(step.losses)
    return trainer.result.weights_sha256, seen


def pair_of_steps(model: Pair, **changes: Any) -> Trainer:
    return trainer_of(model, optimizers(model), clip_norm=0.5, microbatches=2, **changes)


def test_the_bits_are_plain_pytorchs_when_each_optimizer_has_a_phase() -> None:
    """With one micro-batch: the discriminator's step, then the generator's on what that has
    left."""
    model, plain = Pair(draws=True), Pair(draws=True)
    adversarial(model, trainer_of(model, optimizers(model), clip_norm=0.5, microbatches=1))
    schedule = Schedule(dataset_size=SIZE, global_batch=8, microbatches=1, epochs=2, seed=3,
                        min_microbatch_samples=2)
    made = optimizers(plain)
    for step in range(schedule.steps):
        x = INPUT[torch.from_numpy(schedule.microbatch_samples(step, 0))]
        for phase, (loss, optimizer) in enumerate([(loss_of_d, made["d"]), (loss_of_g, made["g"])]):
            plain.zero_grad()
            seed_everything(seed_of(schedule, step, 0, phase))
            loss(plain, x).backward()
            torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]],
                                           0.5)
            optimizer.step()
    for (name,
         mine), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4,
                              atol=1e-6) if "running" in name else torch.equal(mine, theirs), name


@pytest.mark.parametrize("points", [
    *[{1: [(point, 2)]} for point in POINTS],
    *[{1: [(point, 2), (point, 2)]} for point in POINTS],
    {0: [("step.voted", 2)], 2: [("step.voted", 2), ("step.prepared", 4)]},
],
                         ids=lambda points: ",".join(f"{rank}:{at}" for rank, at in points.items()))
def test_the_bits_are_those_of_one_worker_when_a_phase_breaks(
        points: dict[int, list[tuple[str, int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """All go on at the phase that they agree on: none is done twice, and the code between them runs
    once."""
    models = [Pair() for _ in range(4)]
    alone = adversarial(models[3], pair_of_steps(models[3]))
    for ended in in_a_breaking_world(
            monkeypatch, 3, lambda rank: adversarial(
                models[rank], pair_of_steps(models[rank], listeners=[Fault(*points.get(rank, []))]))
    ):
        assert ended[0] == alone[0] and ended[1].losses == alone[1].losses
        assert ended[1].steps == ended[1].between == list(range(6))


def test_a_worker_that_joins_between_two_phases_skips_those_that_are_done(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """It receives the state with the number of the phase; the loop of a phase that is done has no
    batches."""
    batches: list[list[tuple[str, int]]] = [[], []]
    models = [Pair(), Pair()]

    def run(rank: int) -> str:
        model = models[rank]
        trainer = pair_of_steps(model)
        for step in trainer:
            for phase, loss in (("d", loss_of_d), ("g", loss_of_g)):
                for x, _ in step.phase(phase):
                    batches[rank].append((phase, step.number))
                    loop = trainer._worker.loop
                    assert loop
                    # It is in the middle of step 0, as one that has revived is.
                    if not loop.has_joined and rank == 0:
                        loop.state.has_state, loop.state.phase = True, 1
                    step.backward(loss(model, x))
        return trainer.result.weights_sha256

    hashes = in_a_breaking_world(monkeypatch, 2, run)
    assert hashes[0] == hashes[1]
    for found in batches:
        joined = found[found.index(("g", 0)):]
        assert joined == [("g", 0), *[(phase, step) for step in range(1, 6) for phase in "dg"]]


@pytest.mark.parametrize("stop", [1, 4])
def test_no_phase_is_in_a_checkpoint_alone(run_dir: Path, stop: int,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run begins with the first phase of a step, and has the bits of a straight one."""
    def run(until: int) -> tuple[str, Seen]:
        model = Pair(draws=True)
        return adversarial(model, pair_of_steps(model, until=f"{until} steps", checkpoint_every=1))

    run(stop)
    resumed = run(6)
    monkeypatch.delenv("ELASTIC_TRAINER_RUN_DIR")
    assert resumed[0] == run(6)[0] and resumed[1].between == resumed[1].steps == list(range(
        stop, 6))


def wrong_order(step: Any, model: Pair) -> None:
    for x, _ in step.phase("g"):
        step.backward(loss_of_g(model, x))


def only_one(step: Any, model: Pair) -> None:
    for x, _ in step.phase("d"):
        step.backward(loss_of_d(model, x))


def no_phase(step: Any, model: Pair) -> None:
    for x, _ in step:
        step.backward(loss_of_d(model, x))


def left_early(step: Any, model: Pair) -> None:
    for x, _ in step.phase("d"):
        step.backward(loss_of_d(model, x))
        break
    for _ in step.phase("g"):
        pass


@pytest.mark.parametrize(("body", "told"), [
    (wrong_order, "phase 'g' of step 0 comes before 'd'.*order.*d, g"),
    (only_one, "inner loop of the phase 'g' of step 0 was not run"),
    (no_phase, r"has the optimizers d, g.*step.phase\('d'\)"),
    (left_early, "phase 'g' of step 0 begins, but the one before it was left early"),
    (lambda step, model: step.phase("e"), r"no phase 'e'. Use one of \['d', 'g'\]"),
])
def test_a_phase_that_is_left_out_raises(body: Callable[[Any, Pair], None], told: str) -> None:
    """With the order of the phases."""
    model = Pair()
    with pytest.raises((RuntimeError, ValueError), match=told):
        for step in pair_of_steps(model):
            body(step, model)


def test_several_optimizers_share_no_parameter() -> None:
    """Two phases would move it."""
    model = Pair()
    with pytest.raises(ConfigError,
                       match="parameter 0 of the optimizer 'b' is in the optimizer 'a' too"):
        trainer_of(model, {"a": sgd(model), "b": sgd(model.d)})
    with pytest.raises(ConfigError, match="empty dict"):
        trainer_of(model, {})


# --- misuse ---------------------------------------------------------------------------------------

def twice(step: Any, model: Model) -> None:
    for batch in step:
        step.backward(mse(model, batch))
        step.backward(mse(model, batch))


def never(step: Any, model: Model) -> None:
    for _ in step:
        pass


def own_backward(step: Any, model: Model) -> None:
    for batch in step:
        mse(model, batch).backward()


def early(step: Any, model: Model) -> None:
    for batch in step:
        step.backward(mse(model, batch))
        break


def without_batch(step: Any, model: Model) -> None:
    step.backward(mse(model, [INPUT, TARGET]))


def assigned(step: Any, model: Any) -> None:
    for batch in step:
        step.backward(mse(model, batch))
    model.load_state_dict(model.state_dict(), assign=True)


def loss_too_early(step: Any, model: Model) -> None:
    print(step.loss)


def nested(step: Any, model: Model) -> None:
    for batch in step:
        for _ in step:
            step.backward(mse(model, batch))


def again(step: Any, model: Model) -> None:
    """A second loop over a finished step would have no batch, in silence."""
    for _ in range(2):
        for batch in step:
            step.backward(mse(model, batch))


@pytest.mark.parametrize(("body", "is_applied", "told"), [
    (twice, False, "called twice in the warm-up. Add the losses"),
    (never, False, "not called in the warm-up.*step.backward"),
    (own_backward, False, "not called in the warm-up.*step.backward"),
    (early, False, "step 0 was left early.*Run `for batch in step` to its end"),
    (nested, False, "step 0 is iterated a second time"),
    (again, True, "step 0 is iterated a second time"),
    (assigned, True, r"other parameters than at the start \(0.weight, .*copy_"),
    (without_batch, False, "called in step 0 without a batch. Call it inside"),
    (loss_too_early, False, "loss of step 0 is known when the step is finished"),
    (lambda step, model: None, False, "step 0 was not run"),
])
def test_a_misuse_raises_at_once(body: Callable[[Any, Model], None], is_applied: bool,
                                 told: str) -> None:
    """With the fact and the remedy, and before any further step is applied."""
    model = built()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=told):
        for step in trainer_of(model):
            body(step, model)
    assert is_applied != all(map(torch.equal, before, model.parameters()))


def test_the_optimizer_is_the_trainers() -> None:
    """A step of the user's raises; after the loop the optimizer is as free as it was."""
    model = built()
    optimizer = sgd(model)
    with pytest.raises(RuntimeError,
                       match=r"optimizer.step\(\) was called in the loop.*Remove the call"):
        loop(trainer_of(model, optimizer), model,
             lambda model, batch: (mse(model, batch), optimizer.step())[0])
    optimizer.step()


def test_groups_that_are_added_after_a_step_are_an_error() -> None:
    """Also of parameters that the model does not have."""
    model = built()
    optimizer = sgd(model)
    group = {"params": [torch.nn.Parameter(torch.zeros(1))]}
    with pytest.raises(RuntimeError, match=r"has groups of \[4, 1\] parameters"):
        loop(trainer_of(model, optimizer), model,
             after=lambda step: optimizer.add_param_group(group))


def test_a_step_whose_loop_was_left_before_its_first_batch_is_an_error() -> None:
    """Nothing holds the iterator of `next(iter(trainer))`."""
    step = next(iter(trainer_of(built())))
    with pytest.raises(RuntimeError, match="was left before the first batch.*for step in trainer"):
        next(iter(step))


def test_a_step_is_not_used_when_it_is_over() -> None:
    """A step that was kept raises where it is asked."""
    model, kept = built(), list[Any]()
    with pytest.raises(RuntimeError, match="step 0 is over. Use a step inside of the body"):
        loop(trainer_of(model), model, after=lambda step: (kept.append(step), kept[0].loss))


def test_one_trainer_is_iterated_once_and_alone() -> None:
    """A process is one worker of one run."""
    model = built()
    first, second = trainer_of(model), trainer_of(model)
    with pytest.raises(RuntimeError, match="another trainer's loop is running"):
        for _ in first:
            for _ in second:
                pass
    with pytest.raises(RuntimeError, match="iterated before"):
        list(first)
    loop(second, model)
    with pytest.raises(RuntimeError, match="not finished, so it has no result"):
        print(trainer_of(model).result)


@pytest.mark.parametrize("until", ["", "0 steps", "10", "10 hours", "-1 epochs", 5])
def test_an_unclear_length_of_the_run_is_refused_at_once(until: Any) -> None:
    """With two examples that work."""
    with pytest.raises(ConfigError, match="until is .*10 epochs"):
        trainer_of(built(), until=until)


def test_a_length_has_a_number_and_a_unit() -> None:
    """In epochs or steps, one or many."""
    assert [length_of(text) for text in ("1 epoch", "10 epochs", "5_000 steps")] == [(1, None),
                                                                                     (10, None),
                                                                                     (None, 5000)]


def test_the_step_ends_with_the_users_error_when_it_is_caught_in_the_body() -> None:
    """A batch that is left out by try/except would be lost: the next batch does not come."""
    model, calls = built(), list[int]()
    with pytest.raises(RuntimeError, match="not called in micro-batch 1 of step 0"):
        for step in trainer_of(model):
            for batch in step:
                calls.append(1)
                if len(calls) == 7:  # five micro-batches of the warm-up, one of step 0
                    continue
                step.backward(mse(model, batch))


# --- the run is finished early --------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, )], ids=["all", "one"])
def test_the_run_is_finished_everywhere_when_the_loop_asks_for_it(
        run_dir: Path, monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...],
        inside: bool) -> None:
    """After this step, or after the next if it is asked for after the inner loop; also when a
    generation breaks there."""
    models = [built() for _ in range(3)]  # here: threads share the random generator

    def run(rank: int, **more: Any) -> tuple[str, list[int]]:
        model, steps = models[rank], []
        trainer = trainer_of(model, **more)
        for step in trainer:
            for batch in step:
                step.backward(mse(model, batch))
                if inside and step.number == 2 and rank in ranks:
                    step.stop("good enough")
            steps.append(step.number)
            if not inside and step.number == 1 and rank in ranks:
                step.stop("good enough")
        return trainer.result.weights_sha256, steps

    monkeypatch.delenv("ELASTIC_TRAINER_RUN_DIR")
    reference = trained(built(), until="3 steps").weights_sha256
    for ended in in_a_breaking_world(monkeypatch, 3, lambda rank: run(
            rank, listeners=[Fault(("step.voted", 2))] if rank == 1 else [])):
        assert ended == (reference, [0, 1, 2])


def test_a_run_that_was_finished_early_stays_finished(run_dir: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    """The same command does no more steps; the event log is proved, and says why."""
    def after(step: Any) -> None:
        steps.append(step.number)
        if step.loss < 100:
            step.stop("good enough")

    for expected in ([0, 1], []):
        model, steps = built(), list[int]()
        loop(trainer := trainer_of(model), model, after=after)
        assert trainer.result.steps == 2 and steps == expected
        verdict = verify(run_dir)
        assert verdict.violations == () and verdict.finished
    assert "finished after 2 of 6 steps: good enough" in capsys.readouterr().err


def test_time_is_rank_0s(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers, and one that rolls a step forward, find that an interval ends at the same
    step."""
    ballot = Loop._ballot
    monkeypatch.setattr(Loop, "_ballot", lambda self, *given: replace(
        ballot(self, *given),
        clock_ms=25_000 * (self.state.committed + 1) + 10_000 * self.world.rank))
    models = [built() for _ in range(3)]  # here: threads share the random generator

    def run(rank: int) -> list[int]:
        ended = list[int]()
        loop(trainer_of(models[rank], listeners=[Fault(("step.voted", 2))] * (rank == 1)),
             models[rank], after=lambda step: ended.extend([step.number] * step.every("1 min")))
        return ended

    assert in_a_breaking_world(monkeypatch, 3, run) == [[2, 4]] * 3


@pytest.mark.parametrize("interval", ["", "5", "0 min", "1 week", 3])
def test_an_interval_has_a_number_and_a_unit(interval: Any) -> None:
    """With examples that work."""
    model = built()
    with pytest.raises(ConfigError, match="every is .*10 min"):
        loop(trainer_of(model), model, after=lambda step: step.every(interval))


def test_every_epoch_and_every_so_many_steps_end_at_the_same_step_everywhere() -> None:
    """They follow from the number of the step alone."""
    model, ends = built(), list[tuple[bool, bool]]()
    loop(trainer_of(model), model,
         after=lambda step: ends.append((step.every("1 epoch"), step.every("2 steps"))))
    epochs, pairs = ([step for step, end in enumerate(ended) if end]
                     for ended in zip(*ends, strict=True))
    assert (epochs, pairs) == ([2, 5], [1, 3, 5])
    assert SCHEDULE.steps_per_epoch == 3 and SIZE == 22 and NUMBERS["seed"] == 3
