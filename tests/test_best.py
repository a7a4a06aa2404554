"""The best evaluation: the same in every world and across a resume, its checkpoint stays, and the
run ends when no better one comes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_checkpoint import SMALL, begun
from test_evaluation import breaking_gathers, found, model_of
from test_loop import DATA, Ears, built, mse, trained
from test_trainer import Fault, Model, in_a_breaking_world, loop, tokens, trainer_of

from elastic_trainer import ConfigError, Evaluation, keep_best
from elastic_trainer.__main__ import main
from elastic_trainer.state.checkpoints.checkpoint import is_best
from elastic_trainer.state.checkpoints.commit_log import CommitLog
from elastic_trainer.state.stores.store import FolderStore

pytestmark = pytest.mark.usefixtures("no_launcher")
RULE = keep_best("error", mode="min", patience=3, min_delta=0.01)
Ended = tuple[str, int, float, int]


def run(model: Model, leave_after: int = -1, **options: Any) -> Ended:
    """Train, and evaluate after each second step; returns weights, steps, and the best."""
    torch.manual_seed(0)
    options = {"best": RULE, "until": "20 epochs"} | options
    trainer = trainer_of(model, **options)
    for step in trainer:
        for batch in step:
            step.backward(mse(model, batch))
        if step.number % 2:
            trainer.evaluate(DATA, found, batch_size=7)
        if step.number == leave_after:
            break
    else:
        result = trainer.result
        return result.weights_sha256, result.steps, result.best.value, result.best.step
    return "", 0, 0.0, 0


# --- the same in every world ----------------------------------------------------------------------

def test_the_run_is_finished_after_the_step_that_follows_exhausted_patience() -> None:
    """The best is that of three evaluations before."""
    ears = Ears()
    _, steps, value, step = run(model_of(), listeners=[ears])
    seen = {e["step"]: e["metrics"]["error"] for e in ears.facts("worker.evaluated")}
    last = max(seen)
    assert steps == last + 2 < 60 and step == last - 6 and seen[step] == value
    assert all(seen[later] > value - 0.01 for later in (step + 2, step + 4, step + 6))
    assert [e["step"] for e in ears.facts("worker.best_found")][-1] == step


@pytest.mark.parametrize("size", [2, 4])
def test_the_best_is_the_same_in_every_world_and_when_a_generation_breaks_in_an_evaluation(
        size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, models = run(model_of()), [model_of() for _ in range(size)]
    fired = breaking_gathers(monkeypatch, size - 1, 8)
    assert in_a_breaking_world(monkeypatch, size, lambda rank: run(models[rank])) == [alone] * size
    assert fired == [size - 1]


@pytest.mark.parametrize("end", ["the best", "the last evaluation", "the step after the best"])
def test_a_resumed_run_ends_as_one_without_a_break(end: str, tmp_path: Path) -> None:
    """Also if the checkpoint is that of the evaluation that exhausts patience."""
    straight = run(model_of())
    _, steps, _, best = straight
    at = {"the best": best, "the last evaluation": steps - 2, "the step after the best": best + 1}
    run(model_of(), at[end], run_dir=tmp_path / "run", checkpoint_every=1)
    assert run(model_of(), run_dir=tmp_path / "run") == straight


# --- its checkpoint -------------------------------------------------------------------------------

def kept_of(store: Path) -> dict[int, bool]:
    """Return the steps of the checkpoints that stay, and whether each is the best."""
    log = CommitLog(FolderStore(store))
    return {step: is_best(log.read(sequence)) for sequence, step in log.tail().kept.items()}


def test_the_best_checkpoint_has_the_weights_of_its_step_and_stays(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With keep_last=1, and although no checkpoint was due at its step. It is exported by name."""
    model, weights = model_of(), dict[int, dict[str, torch.Tensor]]()

    def note(point: str, facts: dict[str, Any]) -> None:
        if point == "step.handed_over":
            weights[facts["step"]] = {n: t.clone() for n, t in model.state_dict().items()}

    _, steps, _, best = run(model, run_dir=tmp_path / "run", keep_last=1, checkpoint_every=5,
                            listeners=[note])
    store = tmp_path / "run" / "checkpoints"
    assert kept_of(store) == {best + 1: True, steps: False}
    assert main(["checkpoints", "export", str(store), "--best", str(tmp_path / "model")]) == 0
    for name, tensor in load_file(tmp_path / "model").items():
        assert torch.equal(tensor, weights[best][name])
    assert main(["checkpoints", "ls", str(store)]) == 0
    shown = capsys.readouterr().out
    assert f"wrote step {best + 1}," in shown and "error" in shown


@pytest.mark.parametrize("rank", [0, 2])
def test_the_best_is_published_although_its_generation_breaks_meanwhile(
        rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next generation publishes it before its first step: later no worker has its weights."""
    alone, models = run(model_of()), [model_of() for _ in range(3)]
    faults = [Fault(*[("state.share_begun", alone[3] + 1)] * (one == rank)) for one in range(3)]
    ended = in_a_breaking_world(monkeypatch, 3, lambda one: run(
        models[one], run_dir=tmp_path / "run", keep_last=1, checkpoint_every=1000,
        listeners=[faults[one]]))
    assert ended == [alone] * 3 and not faults[rank].places
    kept = kept_of(tmp_path / "run" / "checkpoints")
    assert [step for step in kept if kept[step]] == [alone[3] + 1]


def test_the_averaged_weights_of_the_best_checkpoint_are_exported(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where they were evaluated. An export of the trained ones says that there are others."""
    model, weights = model_of(), dict[int, dict[str, torch.Tensor]]()
    trainer = trainer_of(model, ema=0.5, best=RULE, run_dir=tmp_path / "run", until="20 epochs")

    def after(step: Any) -> None:
        with trainer.averaged():
            trainer.evaluate(DATA, found)
            weights[step.number] = {n: t.clone() for n, t in model.state_dict().items()}

    loop(trainer, model, after=after)
    store, file = str(tmp_path / "run" / "checkpoints"), str(tmp_path / "model")
    assert main(["checkpoints", "export", store, "--best", f"{file}.trained"]) == 0
    trained_ones = load_file(f"{file}.trained")
    assert "It has averaged ones, too: --averaged" in capsys.readouterr().out
    assert main(["checkpoints", "export", store, "--best", "--averaged", file]) == 0
    best = weights[trainer.best.step]
    assert all(torch.equal(tensor, best[name]) for name, tensor in load_file(file).items())
    assert not torch.equal(trained_ones["0.weight"], best["0.weight"])


def test_retention_keeps_the_best_until_a_better_one_is_published(tmp_path: Path) -> None:
    """One that was found and not published does not take its place."""
    fleet = begun(tmp_path, 2, SMALL)
    first = fleet.states[0].committed + 1
    fact = {"step": first}
    for state in fleet.states:
        state.facts = lambda: {"best": dict(fact)}
    fleet.publish(5)
    assert min(kept_of(tmp_path)) == first
    fleet.train()
    fact["step"] = first + 5  # it fails: no checkpoint is made of it
    fleet.publish(2)
    assert min(kept_of(tmp_path)) == first
    fact["step"] = first + 8
    fleet.publish(4)
    assert kept_of(tmp_path) == {first + 8: True, first + 9: False, first + 10: False,
                                 first + 11: False}


def test_there_is_no_best_checkpoint_to_export_if_none_was_kept(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(built(), run_dir=tmp_path / "run")
    assert main(["checkpoints", "show", "--best", str(tmp_path / "run" / "checkpoints")]) != 0
    assert "No checkpoint is the best one" in capsys.readouterr().err


# --- train() --------------------------------------------------------------------------------------

def test_train_evaluates_as_a_loop_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights, end and best, in worlds of one and two; also of averaged weights."""
    def by_train(model: Model, **more: Any) -> Ended:
        torch.manual_seed(0)
        result = trained(model, until="20 epochs", best=RULE, evaluate=Evaluation(
            DATA, found, every="2 steps", batch_size=7, **more.pop("evaluation", {})), **more)
        assert result.best
        return result.weights_sha256, result.steps, result.best.value or 0.0, result.best.step

    alone, models = run(model_of()), [model_of() for _ in range(2)]
    assert by_train(model_of()) == alone
    averaged = by_train(model_of(), ema=0.9, evaluation={"averaged": True})
    assert averaged[2] != alone[2]
    assert in_a_breaking_world(monkeypatch, 2, lambda rank: by_train(models[rank])) == [alone] * 2


@pytest.mark.parametrize("size", [1, 3])
def test_train_takes_the_sum_of_a_loss_and_its_count(
        size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of step.backward(loss_sum, count=n)."""
    model = built()
    trainer = trainer_of(model)
    for step in trainer:
        for batch in step:
            total, count = tokens(model, batch)
            step.backward(total, count=count)
    models = [built() for _ in range(size)]
    assert in_a_breaking_world(monkeypatch, size, lambda rank: trained(
        models[rank], loss=tokens).weights_sha256) == [trainer.result.weights_sha256] * size


@pytest.mark.parametrize("returned", [(1, 2), (torch.tensor(1.0), "many"), [torch.tensor(1.0), 1]])
def test_a_loss_that_is_no_pair_of_sum_and_count_raises(returned: Any) -> None:
    with pytest.raises(TypeError, match=r"loss\(model, batch\) returned|backward got count="):
        trained(built(), loss=lambda model, batch: returned)


def test_an_exception_in_an_evaluation_of_train_ends_the_run() -> None:
    def broken(model: Model, batch: Any) -> Any:
        raise KeyError("a bad column")

    with pytest.raises(Exception, match="a bad column"):
        trained(built(), evaluate=Evaluation(DATA, broken, every="2 steps"))


# --- errors ---------------------------------------------------------------------------------------

@pytest.mark.parametrize(("make", "message"), [
    (lambda: keep_best("loss", mode="mni"), "mode='mni'. Use mode=\"max\" if a larger loss"),
    (lambda: keep_best("", mode="max"), "Give the name of a metric"),
    (lambda: keep_best("a", mode="max", patience=0), "patience=0. Use the number"),
    (lambda: keep_best("a", mode="max", patience=True), "patience=True"),
    (lambda: keep_best("a", mode="max", min_delta=float("nan")), "min_delta=nan"),
    (lambda: trainer_of(built(), best="accuracy"), "best is 'accuracy'. Give best=keep_best"),
    (lambda: trainer_of(built(), best=RULE, state={"best": torch.nn.Linear(1, 1)}),
     "an object with the name 'best'"),
    (lambda: trained(built(), best=RULE), "with train\\(\\) give evaluate="),
    (lambda: Evaluation(DATA, found, every="epoch"), "every is 'epoch'"),
    (lambda: trained(built(), evaluate=Evaluation(DATA, found, averaged=True)), "Give ema="),
    (lambda: trained(built(), evaluate=Evaluation(DATA, found, batch_size=-1)), "batch_size"),
])
def test_options_that_cannot_work_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def loop_with(after: Callable[[Any], Any], **options: Any) -> Any:
    trainer = trainer_of(model := built(), **({"best": RULE} | options))
    loop(trainer, model, after=lambda step: after(trainer))
    return trainer


def test_an_evaluation_without_the_metric_raises_at_once() -> None:
    with pytest.raises(RuntimeError, match=r"follow 'accuracy', and this evaluation has only"):
        loop_with(lambda trainer: trainer.evaluate(DATA, found),
                  best=keep_best("accuracy", mode="max"))


def test_a_step_with_two_values_raises_unless_one_evaluation_decides() -> None:
    def twice(trainer: Any, **more: Any) -> None:
        trainer.evaluate(DATA, found)
        trainer.evaluate(DATA, found, **more)

    loop_with(lambda trainer: twice(trainer, decides=False))
    with pytest.raises(RuntimeError, match="has two values of 'error'"):
        loop_with(twice)


def test_a_value_that_is_not_finite_is_never_the_best_and_counts_against_patience() -> None:
    def none(model: Model, batch: Any) -> dict[str, Any]:
        return {"error": float("nan")}

    trainer = loop_with(lambda trainer: trainer.evaluate(DATA, none))
    assert trainer.result.steps == 4 and trainer.best.value is None
    best = trainer.best
    assert best.take(0.5, 7) and not best.take(float("-inf"), 8) and best.waited == 1


def test_a_metric_that_never_comes_is_logged_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    ears = Ears()
    loop_with(lambda trainer: None, listeners=[ears])
    assert "no evaluation gave a finite value" in capsys.readouterr().err
    assert ears.facts("job.best_not_found")[0]["metric"] == "error"


def test_a_run_goes_on_with_another_metric_from_nothing(tmp_path: Path) -> None:
    """And the change is logged: a value of another metric says nothing."""
    run(model_of(), 3, run_dir=tmp_path / "run", checkpoint_every=1)
    ears = Ears()
    best = run(model_of(), run_dir=tmp_path / "run", best=keep_best("largest", mode="max"),
               until="3 epochs", listeners=[ears])
    seen = {e["step"]: e["metrics"]["largest"] for e in ears.facts("worker.evaluated")}
    assert best[2:] == (max(seen.values()), max(seen, key=lambda step: seen[step]))
    assert "best" in [e["key"] for e in ears.facts("job.settings_differ")]


def test_trainer_best_raises_where_none_is_kept() -> None:
    with pytest.raises(RuntimeError, match="keeps no best evaluation"):
        _ = trainer_of(built()).best
