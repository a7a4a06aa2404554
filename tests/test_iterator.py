"""What the user's loop sees at its edges: before it has joined, in its last step, in a finished
run, and with several optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_loop import INPUT, SIZE, Ears, built, mse, sgd, trained
from test_trainer import (
    Average,
    Fault,
    Pair,
    adversarial,
    in_a_breaking_world,
    loop,
    loss_of_d,
    loss_of_g,
    optimizers,
    pair_of_steps,
    trainer_of,
)

from elastic_trainer.config import ConfigError
from elastic_trainer.schedule.schedule import Schedule
from elastic_trainer.state.stores.store import StoreUnavailable
from elastic_trainer.state.values.layout import LayoutError
from elastic_trainer.training.commit_step import weights_sha256
from elastic_trainer.training.failures import UserExited
from elastic_trainer.training.loop import Loop
from elastic_trainer.world.collectives import PeersLost

StepLR = torch.optim.lr_scheduler.StepLR
pytestmark = pytest.mark.usefixtures("no_launcher")


# --- before this worker has joined ----------------------------------------------------------------

def test_a_step_has_its_number_when_it_is_handed_in(run_dir: Path) -> None:
    """A resumed worker tries its loop with number 0, and does step 3 with number 3. The code after
    the inner loop runs for no batch that is only tried."""
    model = built()
    trained(model, until="3 steps", run_dir=run_dir, checkpoint_every=1)
    model = built()
    trainer, inside, after = trainer_of(model), list[tuple[int, int, int]](), list[int]()
    for step in trainer:
        for batch in step:
            inside.append((step.number, step.epoch, trainer.rank))
            step.backward(mse(model, batch))
        after.append(step.number)
    tried = [seen for seen in inside if seen[2] == -1]
    assert tried and set(tried) == {(0, 0, -1)}
    assert inside[len(tried):] == [(step, step // 3, 0) for step in (3, 4, 5) for _ in range(4)]
    assert after == [3, 4, 5]


@pytest.mark.parametrize("name", ["number", "epoch"])
def test_the_number_of_a_step_raises_where_it_is_not_known(name: str) -> None:
    """Before the first inner loop of a process a newcomer would compute with another number than
    the world's: in silence, and for that step alone. From the second step on it is known."""
    model, seen = built(), list[int]()
    with pytest.raises(RuntimeError, match="not known yet.*inside of `for batch in step`"):
        for step in trainer_of(model):
            getattr(step, name)
    for step in trainer_of(model):
        assert not seen or step.number == seen[-1] + 1
        for batch in step:
            step.backward(mse(model, batch))
        seen.append(step.number)


def test_a_batch_that_is_only_tried_does_not_stop_the_run(run_dir: Path) -> None:
    """A condition may hold for the weights with which a newcomer was built, and not for the
    run's."""
    trained(built(), until="3 steps", run_dir=run_dir, checkpoint_every=1)
    model = built()
    trainer = trainer_of(model)
    for step in trainer:
        for batch in step:
            if step.number == 0:
                step.stop("as nobody has asked")
            step.backward(mse(model, batch))
    assert trainer.result.steps == 6


def test_a_stop_request_is_kept_when_it_comes_before_this_worker_has_joined() -> None:
    """It stands before the inner loop, and does not run again for this step."""
    model = built()
    trainer = trainer_of(model)
    for step in trainer:
        step.stop("enough")
        for batch in step:
            step.backward(mse(model, batch))
    assert trainer.result.steps == 1


# --- the end --------------------------------------------------------------------------------------

def test_the_run_ends_everywhere_when_a_worker_has_no_microbatch_in_the_step_that_stops_it(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """The condition holds on every worker, and the inner loop of one has no batch."""
    models = [built() for _ in range(3)]

    def run(rank: int) -> tuple[str, list[int], list[int]]:
        model, steps, batches = models[rank], [], []
        trainer = trainer_of(model, microbatches=2)
        for step in trainer:
            for batch in step:
                step.backward(mse(model, batch))
                if trainer.rank >= 0:
                    batches.append(step.number)
                if step.number == 2:
                    step.stop("good enough")
            steps.append(step.number)
        return trainer.result.weights_sha256, steps, batches

    reference = trained(built(), microbatches=2, until="3 steps").weights_sha256
    ended = in_a_breaking_world(monkeypatch, 3, run)
    assert [one[:2] for one in ended] == [(reference, [0, 1, 2])] * 3
    assert sorted(len(one[2]) for one in ended) == [0, 3, 3]


def test_a_stop_request_is_forgotten_when_the_run_goes_back(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers hold different bits, so both go back to a checkpoint. The request came from a
    step that is undone: the code runs again, and finds that it need not stop."""
    models = [built() for _ in range(2)]
    reference = trained(built()).weights_sha256

    def run(rank: int) -> tuple[str, list[int]]:
        def after(step: Any) -> None:
            trainer._worker.loop.checkpointing.checkpoints.wait()  # else a step is shorter
            if step.number == 3 and 3 not in steps:
                step.stop("the weights have become odd")
                with torch.no_grad():
                    models[rank][0].weight.view(torch.int32)[0, 0] ^= rank
            steps.append(step.number)

        trainer, steps = trainer_of(models[rank], checkpoint_every=1, run_dir=tmp_path), list[int]()
        return loop(trainer, models[rank], after=after), steps

    ended = in_a_breaking_world(monkeypatch, 2, run)
    steps = ended[0][1]
    assert steps[:4] == [0, 1, 2, 3] and 3 in steps[4:]
    assert ended == [(reference, steps)] * 2


def test_the_clock_of_the_intervals_counts_all_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches, vote, apply, and the code after the inner loop. A ballot has the time at
    which it was made: 20 s after the start in step 0, and each step takes 40 s."""
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("elastic_trainer.training.after_step.time", clock)

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            clock.now += 10.0
            return super().step(closure)

    model, ended = built(), list[int]()
    trainer = trainer_of(model, Slow(model.parameters(), lr=0.1))
    for step in trainer:
        for batch in step:
            step.backward(mse(model, batch))
            clock.now += 5.0
        clock.now += 10.0
        ended += [step.number] * step.every("1 min")
    assert ended == [1, 3, 4]


@pytest.mark.parametrize("place", ["run_dir", "store"])
def test_a_finished_run_has_no_step_when_it_is_started_again(place: str, tmp_path: Path) -> None:
    """Its folder says that it is finished, or only its store: the worker looks there before its
    loop begins. The result is the same."""
    seen = list[int]()
    for _ in range(2):
        trainer = trainer_of(model := built(), **{place: f"{tmp_path}/{place}"})
        loop(trainer, model, after=lambda step: seen.append(step.number))
        assert seen == [*range(6)] and trainer.result.steps == 6
    assert trainer.result.weights_sha256 == trained(built()).weights_sha256


@pytest.mark.parametrize("does_store_answer", [True, False])
def test_the_code_after_the_last_step_changes_nothing_when_it_runs_once_more(
        does_store_answer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run was finished early, or the store does not answer at the start: then the worker learns
    the end after its warm-up. The step has the number, the loss and the metrics of the last one.
    What the code changes in `state` and in the weights is put back."""
    if not does_store_answer:
        monkeypatch.setattr("elastic_trainer.training.account.open_store", silent)
    ends, results = list[Any](), list[Any]()
    for _ in range(3):
        model, average, seen = built(), Average(), list[Any]()
        trainer = trainer_of(model, store=f"{tmp_path}/store", state={"average": average})
        for step in trainer:
            for batch in step:
                if does_store_answer and step.number == 3:
                    step.stop("good enough")
                step.backward(mse(model, batch))
                step.log(acc=(step.number, 2))
            average.update(model)
            if len(results):
                torch.nn.init.zeros_(model[0].weight)
            seen.append((step.number, step.loss, step.metrics["acc"], step.every("2 steps")))
        ends.append(seen[-1:])
        results.append((trainer.result.weights_sha256, trainer.result.steps, average.updates,
                        weights_sha256(trainer._worker.loop.state)))
    last = 3 if does_store_answer else 5
    assert len(seen) == 1 and ends[0] == ends[1] == ends[2]
    assert (ends[0][0][0], ends[0][0][2:]) == (last, (4 * last / 8, True))
    assert results[0] == results[1] == results[2] and results[0][1:3] == (last + 1, last + 1)


def silent(url: str) -> Any:
    """A store that does not answer."""
    raise StoreUnavailable(url)


# --- a process that restarts in place -------------------------------------------------------------

@pytest.mark.parametrize("point", ["step.applied", "step.computed"])
def test_a_successor_sees_what_the_step_in_flight_has_found(
        point: str, no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends when it has applied step 2, or before. Its successor hands the step out,
    with the metrics and the interval that one process alone would see."""
    ballot = Loop._ballot
    monkeypatch.setattr(Loop, "_ballot", lambda self, *given: replace(
        ballot(self, *given), clock_ms=25_000 * (self.state.committed + 1)))

    def run(seen: list[Any], *listeners: Any) -> Any:
        model = built()
        trainer = made.append(trainer_of(model, listeners=listeners)) or made[-1]
        for step in trainer:
            for batch in step:
                step.log(acc=((model(batch[0]) > 0).sum(), len(batch[0])))
                step.backward(mse(model, batch))
            seen.append((step.number, step.metrics, step.losses, step.every("1 min")))
        return trainer.result.weights_sha256

    def end(event: str, facts: dict[str, Any]) -> None:
        if (event, facts.get("step")) == (point, 2):
            memory = made[-1]._worker.loop.after_step.leave()
            monkeypatch.setenv("ELASTIC_TRAINER_REVIVED_FROM", str(memory))
            raise SystemExit

    made, alone, seen = list[Any](), list[Any](), list[Any]()
    reference = run(alone)
    with pytest.raises(UserExited):
        run(seen, end)
    assert run(seen) == reference
    assert seen == alone and [number for number, *_, ends in seen if ends] == [2, 4]


# --- several optimizers ---------------------------------------------------------------------------

@pytest.mark.parametrize(("misuse", "error", "told"), [
    (lambda step, loss: step.backward(str(loss)), TypeError,
     r"step.backward\(\) got str. Use the mean"),
    (lambda step, loss: None, RuntimeError, r"not called in micro-batch 0 of step 0 \(phase g\)"),
    (lambda step, loss: (step.log(acc=(1, 1)), step.backward(loss)), RuntimeError,
     r"acc was logged in micro-batch 0 of step 0 \(phase g\), but the first batch logged "
     r"nothing.*phase"),
])
def test_an_error_of_the_second_phase_ends_the_run_in_its_first_step(
        misuse: Callable[[Any, Any], Any], error: type[Exception], told: str) -> None:
    """The warm-up tries the first phase only: to try the next one, the code between them would have
    to run for a step that is none."""
    model, between = Pair(), list[int]()
    with pytest.raises(error, match=told):
        for step in pair_of_steps(model):
            for x, _ in step.phase("d"):
                step.backward(loss_of_d(model, x))
            between.append(step.number)
            for x, _ in step.phase("g"):
                misuse(step, loss_of_g(model, x))
    assert between == [0]


def logging(model: Pair, trainer: Any, seen: list[Any]) -> None:
    """Log a name in both phases, and one in each."""
    for step in trainer:
        for x, _ in step.phase("d"):
            step.log(both=(x.sum(), len(x)), d=(1, len(x)), g=(0, 0))
            step.backward(loss_of_d(model, x))
        for x, _ in step.phase("g"):
            step.log(both=(-3 * x.sum(), len(x)), g=(2, len(x)))
            step.backward(loss_of_g(model, x))
        seen.append((step.number, step.metrics, step.losses))


def test_sums_are_those_of_all_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers in every world, and on a worker that joins between two phases."""
    model, alone = Pair(), list[Any]()
    logging(model, pair_of_steps(model), alone)
    two = Schedule(dataset_size=SIZE, global_batch=8, microbatches=2, epochs=2, seed=3,
                   min_microbatch_samples=2)
    for number, metrics, losses in alone:
        mine = INPUT[[i for microbatch in range(2)
                      for i in two.microbatch_samples(number, microbatch)]]
        assert metrics == {"both": pytest.approx(-float(mine.sum()) / len(mine), rel=1e-5),
                           "d": pytest.approx(2 / len(mine)), "g": pytest.approx(4 / len(mine))}
        assert sorted(losses) == ["d", "g"]

    models, seen = [Pair(), Pair()], [list[Any](), list[Any]()]

    def run(rank: int) -> None:
        left = [0] * rank  # rank 1 loses its state once

        def lose(event: str, facts: dict[str, Any]) -> None:
            state = trainer._worker.loop.state if trainer._worker.loop else None
            if left and state and (event, state.ticks) == ("step.prepared", 5):
                left.clear()
                state.has_state = False  # as a newcomer is
                state.findings.load({})
                raise PeersLost("as planned")

        trainer = pair_of_steps(models[rank], listeners=[lose])
        logging(models[rank], trainer, seen[rank])

    in_a_breaking_world(monkeypatch, 2, run)
    assert seen == [alone] * 2


def of_both(made: dict[str, torch.optim.Optimizer]) -> dict[str, Any]:
    return {"d": StepLR(made["d"], 2, 0.5),
            "g": torch.optim.lr_scheduler.ExponentialLR(made["g"], 0.9)}


def test_each_optimizer_has_a_torch_scheduler_of_its_own(run_dir: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is stepped once for each step, and is a part of the state: a resumed run has the bits of
    a straight one."""
    def run(until: int) -> tuple[str, list[float]]:
        model = Pair(draws=True)
        made = optimizers(model)
        trainer = trainer_of(model, made, microbatches=2, lr=of_both(made), until=f"{until} steps",
                             checkpoint_every=1)
        digest, _ = adversarial(model, trainer)
        return digest, [made[name].param_groups[0]["lr"] for name in made]

    run(3)
    resumed = run(6)
    monkeypatch.delenv("ELASTIC_TRAINER_RUN_DIR")
    assert resumed == run(6)
    assert resumed[1] == pytest.approx([0.01 * 0.5**3, 0.05 * 0.9**6])


def test_schedulers_give_the_same_bits_when_a_phase_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are stepped once for a step, whatever is done again."""
    models = [Pair() for _ in range(4)]

    def run(rank: int, *faults: tuple[str, int]) -> str:
        made = optimizers(models[rank])
        return adversarial(models[rank], trainer_of(
            models[rank], made, microbatches=2, lr=of_both(made), listeners=[Fault(*faults)]))[0]

    alone, points = run(3), {1: [("step.voted", 2), ("step.prepared", 4)]}
    assert in_a_breaking_world(monkeypatch, 3,
                               lambda rank: run(rank, *points.get(rank, []))) == [alone] * 3


def test_an_optimizer_without_a_scheduler_keeps_its_rate() -> None:
    """The dict names those that have one."""
    model = Pair()
    made = optimizers(model)
    adversarial(model, trainer_of(model, made, microbatches=2, lr={"d": StepLR(made["d"], 1, 0.5)}))
    assert [made[name].param_groups[0]["lr"] for name in made] == [0.01 * 0.5**6, 0.05]


@pytest.mark.parametrize(("schedule", "told"), [
    (lambda made: StepLR(made["d"], 1), "StepLR, which sets the rates of one optimizer.*'d', 'g'"),
    (lambda made: {"e": StepLR(made["d"], 1)}, r"names \['e'\], but the optimizers are 'd', 'g'"),
    (lambda made: {}, r"names \[\], but the optimizers are 'd', 'g'"),
    (lambda made: {"d": len}, "the lr of 'd' is a builtin_function_or_method"),
    (lambda made: {"d": StepLR(made["g"], 1)}, "StepLR belongs to another optimizer"),
    (lambda made: (StepLR(made["d"], 1), None)[1], "built on this optimizer, but Trainer was not"),
    (lambda made: {"d": torch.optim.lr_scheduler.ReduceLROnPlateau(made["d"])},
     "a step with several optimizers has a loss for each"),
])
def test_schedulers_that_do_not_fit_are_refused(schedule: Callable[[Any], Any], told: str) -> None:
    """At the start, with the names."""
    model = Pair()
    made = optimizers(model)
    with pytest.raises(ConfigError, match=told):
        trainer_of(model, made, lr=schedule(made))
    model = built()
    optimizer = sgd(model)
    with pytest.raises(ConfigError, match="but there is one optimizer"):
        trainer_of(model, optimizer, lr={"d": StepLR(optimizer, 1)})


def test_other_schedulers_are_refused_when_the_run_goes_on(run_dir: Path) -> None:
    """By their classes and names. Other settings of the same ones are logged, and the run's
    hold."""
    def run(until: int, ears: Ears, **schedulers: Callable[[Any], Any]) -> None:
        model = Pair()
        made = optimizers(model)
        adversarial(model, trainer_of(
            model, made, microbatches=2,
            lr={name: of(made[name]) for name, of in schedulers.items()},
            until=f"{until} steps", checkpoint_every=1, listeners=[ears]))

    run(2, Ears(), d=lambda one: StepLR(one, 2))
    with pytest.raises(LayoutError, match="the schedule of the learning rates is d: StepLR there, "
                       "but g: StepLR here"):
        run(4, Ears(), g=lambda one: StepLR(one, 2))
    ears = Ears()
    run(4, ears, d=lambda one: StepLR(one, 3))
    [differs] = ears.facts("job.settings_differ")
    assert (differs["key"], differs["run_value"], differs["holds"]) == ("schedule.d.step_size", 2,
                                                                        "run")
