"""Evaluations: the same numbers in every world and across broken generations, and no trace in the
training."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import PATIENT, Cluster
from faults import Plan
from test_faults import FEW, host
from test_loop import built
from test_trainer import Fault, Model, in_a_breaking_world, loop, trainer_of

from elastic_trainer.config import EXIT_USER_ERROR
from elastic_trainer.evaluate.evaluation import require_alike, shared_out
from elastic_trainer.evaluate.sums import Kept, added, means_of, sums_of
from elastic_trainer.world.collectives import PeersLost

pytestmark = pytest.mark.usefixtures("no_launcher")
POINTS = torch.randn(53, 5, generator=torch.Generator().manual_seed(5))
HELD_OUT = torch.utils.data.TensorDataset(POINTS, POINTS[:, :3].abs())


def found(model: Model, batch: Any) -> dict[str, Any]:
    error = (model(batch[0]) - batch[1]).pow(2)
    return {"error": (error.sum(), error.numel()), "largest": error.max(), "samples": len(batch[0])}


def model_of(*more: Model) -> Model:
    return built(torch.nn.BatchNorm1d(8), *more)


def run(model: Model, fn: Any = found, **more: Any) -> tuple[str, list[dict[str, float]]]:
    """Train, and evaluate twice after each step."""
    torch.manual_seed(0)
    trainer, seen = trainer_of(model, **more), []
    sha256 = loop(trainer, model, after=lambda step: seen.extend(
        trainer.evaluate(HELD_OUT, fn, batch_size=size) for size in (7, 4)))
    return sha256, [*seen, trainer.evaluate(HELD_OUT, fn, batch_size=7)]


# --- the same numbers -----------------------------------------------------------------------------

def test_each_sample_counts_once_and_the_training_has_no_trace_of_it() -> None:
    """Modes, statistics, random numbers: the weights are those of a run without evaluations."""
    model, plain = (model_of(torch.nn.Dropout(0.2)) for _ in range(2))
    sha256, seen = run(model)
    assert sha256 == loop(trainer_of(plain), plain)
    assert {one["samples"] for one in seen} == {53.0}
    model.eval()
    whole = (model(POINTS) - HELD_OUT.tensors[1]).pow(2).mean().item()
    assert seen[-1] == seen[-3] and seen[-1]["error"] == pytest.approx(whole)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_numbers_are_those_of_one_worker_in_every_world(
        size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums are exact, so their order does not matter."""
    alone = run(model_of())
    models = [model_of() for _ in range(size)]
    assert in_a_breaking_world(monkeypatch, size, lambda rank: run(models[rank])) == [alone] * size


@pytest.mark.parametrize("call", [1, 2, 3, 4])
@pytest.mark.parametrize("rank", [0, 2])
def test_the_numbers_are_those_of_one_worker_when_the_generation_breaks_in_an_evaluation(
        call: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before or after each of its collectives: some workers have the result, and others not."""
    alone, models = run(model_of()), [model_of() for _ in range(4)]
    fired = breaking_gathers(monkeypatch, rank, call + 4)
    assert in_a_breaking_world(monkeypatch, 4, lambda rank: run(models[rank])) == [alone] * 4
    assert fired == [rank]


@pytest.mark.parametrize("point", ["step.voted", "step.applied"])
def test_the_numbers_are_those_of_one_worker_when_the_generation_breaks_before_an_evaluation(
        point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of one worker has not run after the step, and that of the others waits for it."""
    alone, models = run(model_of()), [model_of() for _ in range(4)]
    ended = in_a_breaking_world(
        monkeypatch, 4,
        lambda rank: run(models[rank], listeners=[Fault((point, 2))] if rank == 1 else []))
    assert ended == [alone] * 4


def breaking_gathers(monkeypatch: pytest.MonkeyPatch, rank: int, call: int) -> list[int]:
    """Break the generation after one gather of an evaluation, on one rank."""
    from test_trainer import Broken

    calls, fired, gather = dict[int, int](), list[int](), Broken.gather_texts

    def gathered(self: Broken, text: str) -> list[str]:
        texts = gather(self, text)
        calls[self.rank] = calls.get(self.rank, 0) + 1
        if self.rank == rank and calls[self.rank] == call:
            fired.append(rank)
            raise PeersLost("as planned")
        return texts

    monkeypatch.setattr(Broken, "gather_texts", gathered)
    return fired


@pytest.mark.parametrize("call", [1, 2])
def test_what_is_kept_of_the_batches_comes_to_all_workers_in_order(
        call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its types and bits, also when the generation breaks in the evaluation."""
    def keeping(model: Model, batch: Any) -> dict[str, Any]:
        return {"rows": Kept({"x": batch[0], "none": (None, [len(batch[0])]),
                              "half": batch[1].bfloat16(), "empty": torch.empty(0, 2)}),
                **found(model, batch)}

    alone, models = run(model_of(), keeping), [model_of() for _ in range(3)]
    fired = breaking_gathers(monkeypatch, 1, call)
    ended = in_a_breaking_world(monkeypatch, 3, lambda rank: run(models[rank], keeping))
    assert fired
    for sha256, results in ended:
        assert sha256 == alone[0]
        for mine, others in zip(results, alone[1], strict=True):
            rows, theirs = mine.pop("rows"), list(others["rows"])
            assert mine == {name: value for name, value in others.items() if name != "rows"}
            assert torch.equal(torch.cat([row["x"] for row in rows]), POINTS)
            assert [row["none"] for row in rows] == [row["none"] for row in theirs]
            assert all(row["half"].dtype == torch.bfloat16 and row["empty"].shape == (0, 2)
                       for row in rows)


# --- errors ---------------------------------------------------------------------------------------

def test_an_evaluation_raises_where_no_step_is_finished() -> None:
    model = model_of()
    trainer = trainer_of(model)
    with pytest.raises(RuntimeError, match="where no step is finished"):
        trainer.evaluate(HELD_OUT, found)
    with pytest.raises(RuntimeError, match="where no step is finished"):
        for step in trainer:
            for _ in step:
                trainer.evaluate(HELD_OUT, found)


@pytest.mark.parametrize(("fn", "message"), [
    (lambda model, batch: 1.0, "returned a float. Return a dict"),
    (lambda model, batch: {"loss": batch[0]}, "Return a sum and its number of items"),
    (lambda model, batch: model[0].weight.zero_() and {}, "changed parameters|Boolean value"),
])
def test_a_function_that_cannot_work_raises(fn: Any, message: str) -> None:
    with pytest.raises((TypeError, RuntimeError), match=message):
        run(model_of(), fn)


def test_workers_that_evaluate_other_data_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int) -> None:
        trainer = trainer_of(models[rank])
        loop(trainer, models[rank], after=lambda step: trainer.evaluate(
            torch.utils.data.TensorDataset(POINTS[:20 + rank]), found))

    models = [model_of() for _ in range(2)]
    with pytest.raises(RuntimeError, match="evaluate different numbers"):
        in_a_breaking_world(monkeypatch, 2, work)


def test_an_evaluation_on_some_workers_only_raises_when_their_generation_has_ended() -> None:
    """A worker that restarted in place does not know what its code had evaluated. A worker with the
    result has called it, too."""
    asks = {"wants": 0, "has": 0, "is_known": True, "done": [1],
            "of": ["evaluate", 4, 50]}
    ended = {"wants": None, "has": 0, "is_known": True}
    with pytest.raises(RuntimeError, match=r"ranks \[0\] called evaluate.*ranks \[1\] did not"):
        require_alike([asks, ended], [0], 0)
    require_alike([asks, ended | {"is_known": False}, ended | {"has": 1}], [0], 0)
    assert shared_out([asks, ended, asks | {"done": [2]}], [0, 2]) == {0: [0], 2: [3]}


def test_sums_are_exact_and_a_number_that_is_none_shows() -> None:
    one = sums_of({"a": (1e16, 1), "b": 1.0})
    many = added(added(one, sums_of({"a": (1.0, 1), "b": 2.0})), sums_of({"a": (-1e16, 0), "b": 0}))
    assert means_of(many) == {"a": 0.5, "b": 3.0}
    assert str(means_of(added(many, sums_of({"a": (float("inf"), 1), "b": 1})))["a"]) == "nan"
    with pytest.raises(RuntimeError, match="the same names for each batch"):
        added(many, sums_of({"c": 1}))


# --- on a cluster ---------------------------------------------------------------------------------

def test_no_bit_is_another_when_workers_die_in_an_evaluation(
        tmp_path: Path, twin_of: Callable[..., str]) -> None:
    """The weights depend on what each evaluation has found. The survivors go on with it."""
    job = (*FEW, "--iterator", "--evaluate")
    plan = Plan().kill(host=host(2), at="evaluate", step=9).kill(host=host(3), at="evaluate",
                                                                step=19)
    with Cluster(tmp_path, hosts=4, job=job, plan=plan) as cluster:
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*job), victims=2)
        evaluated = cluster.events("worker.evaluated")
        assert [e["step"] for e in evaluated] == [9, 19, 29, 39], cluster.story()
        assert {e["samples"] for e in evaluated} == {1003}
    assert result["attempts"] == 1


def test_no_bit_is_another_when_a_newcomer_enters_in_the_middle_of_an_evaluation(
        tmp_path: Path, twin_of: Callable[..., str]) -> None:
    """It stands ready when a worker dies, so the generation in which the survivors go on with the
    evaluation is its first one. It receives the state after the evaluation."""
    job = (*FEW, "--iterator", "--evaluate")
    plan = Plan().add("hold", host=host(1), at="evaluate", step=19)
    with Cluster(tmp_path, hosts=5, start_with=4, job=job, plan=plan) as cluster:
        cluster.wait_until_fired()
        cluster.set_hosts(cluster.all_hosts)
        cluster.wait_until_ready(host(4))
        cluster.signal_worker(host(2), signal.SIGKILL)
        cluster.wait_for("the death", cluster.lost)
        cluster.release()
        assert cluster.finish() == 0
        cluster.assert_nothing_lost(twin_of(*job), victims=1)
        evaluated = cluster.events("worker.evaluated")
        (received,) = [e for e in cluster.events("worker.state_received") if e["step"] == 20]
        assert [e["step"] for e in evaluated] == [9, 19, 29, 39], cluster.story()
        assert evaluated[1]["generation"] == received["generation"], cluster.story()


def test_the_run_ends_with_an_error_when_one_worker_alone_evaluates(tmp_path: Path) -> None:
    """The others have gone on to the next step, so the collectives of neither would ever end."""
    job = (*FEW, "--iterator", "--evaluate", "--evaluate-on", host(1))
    with Cluster(tmp_path, hosts=2, job=job, limits=f"{PATIENT},stuck_s=3") as cluster:
        assert cluster.finish() == EXIT_USER_ERROR
        errors = [e["error"] for e in cluster.events("worker.failed")]
        assert any("called evaluate() after step 9, and another worker has not" in error
                   for error in errors), cluster.story()
