"""Loggers: each step once in the files of the real libraries, whatever broke, and no logger that
slows or ends a run."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster import TESTS
from logged import Series, of_csv, of_mlflow, of_tensorboard, of_wandb
from test_evaluation import HELD_OUT, found
from test_loop import Ears, built, mse, trained
from test_trainer import Model, in_a_breaking_world, trainer_of

from elastic_trainer import ConfigError
from elastic_trainer.loggers import (
    Csv,
    Logger,
    MLflow,
    Row,
    Run,
    TensorBoard,
    WandB,
    mlflow_run,
    rows,
    writer,
)
from elastic_trainer.loggers.writer import Writer
from elastic_trainer.wire.redact import redacted

pytestmark = pytest.mark.usefixtures("no_launcher")
DEADLINE_S = 60.0
KINDS: dict[str, tuple[Callable[[Path], Logger], Callable[[Path], Series]]] = {
    "csv": (lambda folder: Csv(folder / "metrics.csv"), lambda folder: of_csv(
        folder / "metrics.csv")),
    "tensorboard": (lambda folder: TensorBoard(folder / "tb"), lambda folder: of_tensorboard(
        folder / "tb")),
    "mlflow": (lambda folder: MLflow(str(folder / "mlruns")), lambda folder: of_mlflow(
        folder / "mlruns")),
    "wandb": (lambda folder: WandB(offline=True, folder=folder / "wb"), lambda folder: of_wandb(
        folder / "wb")),
}
PACKAGES = {"csv": "csv", "tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a kind of logger, if its library is installed."""
    pytest.importorskip(PACKAGES[request.param])
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # to read
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return str(request.param)


def run(model: Model, leave_behind: int = -1, **options: Any) -> str:
    """Train, log, and evaluate behind each second step."""
    trainer = trainer_of(model, lr=lambda step: 1 / (step + 1), until="4 epochs", **options)
    for step in trainer:
        for batch in step:
            step.backward(mse(model, batch))
            step.log(size=(len(batch[0]), 1))
        if step.number % 2:
            trainer.evaluate(HELD_OUT, found, batch_size=16)
        if step.number == leave_behind:
            return ""
    return trainer.result.weights_sha256


def expected(ears: Ears) -> Series:
    """Return what the event log of one undisturbed run says."""
    steps = {e["step"]: e for e in ears.facts("worker.step_committed")}
    series: Series = {
        "train/loss": [(step, e["loss"]) for step, e in steps.items()],
        "train/lr": [(step, e["lr"]) for step, e in steps.items()],
        "train/world_size": [(step, 1.0) for step in steps],
        "train/size": [(step, e["metrics"]["size"]) for step, e in steps.items()]}
    for e in ears.facts("worker.evaluated"):
        for name, value in e["metrics"].items():
            series.setdefault(f"eval/{name}", []).append((e["step"], value))
    return series


def assert_same(series: Series, wanted: Series) -> None:
    """TensorBoard keeps floats of 32 bits."""
    assert {name for name in series if "_per_s" not in name} == wanted.keys()
    for name, values in wanted.items():
        assert [step for step, _ in series[name]] == [step for step, _ in values], name
        assert [value for _, value in series[name]] == pytest.approx(
            [value for _, value in values], rel=1e-6), name


# --- each step once -------------------------------------------------------------------------------

def test_the_library_has_the_numbers_of_the_event_log(kind: str, tmp_path: Path) -> None:
    """Loss, rate, size of the world, what step.log and evaluate have found, and samples a
    second."""
    ears, (make, read) = Ears(), KINDS[kind]
    run(built(), listeners=[ears], loggers=[make(tmp_path)])
    series = read(tmp_path)
    assert_same(series, expected(ears))
    assert all(value > 0 for _, value in series["train/samples_per_s"])
    (closed,) = ears.facts("worker.logger_closed")
    assert (closed["rows"], closed["lost"]) == (12, 0)


def test_a_resumed_run_goes_on_in_the_same_place(kind: str, tmp_path: Path) -> None:
    ears, straight, (make, read) = Ears(), Ears(), KINDS[kind]
    run(built(), 6, run_dir=tmp_path / "run", loggers=[make(tmp_path)])
    run(built(), run_dir=tmp_path / "run", loggers=[make(tmp_path)], listeners=[ears])
    run(built(), listeners=[straight])
    assert_same(read(tmp_path), expected(straight))
    assert [e["step"] for e in ears.facts("worker.logger_opened")] == [7]


def written(logger: Logger, run: Run, steps: range, value: float, *more: Run | Row) -> list[Any]:
    """Have a writer write rows of a value; returns its events."""
    events = list[Any]()
    one = Writer(logger, run, lambda event, **facts: events.append((event, facts)))
    for row in [*(Row(step, {"train/loss": value}, time.time()) for step in steps), *more]:
        one.put(row)
    one.put_end()
    one.end(time.monotonic() + DEADLINE_S)
    return events


RUN = Run(name="run", id="0123456789abcdef", attempt=1, folder=None, first=0)


def test_no_step_is_doubled_or_lacking_when_another_worker_becomes_the_first(
        kind: str, tmp_path: Path) -> None:
    """It has the newest rows, and writes those that its predecessor has not."""
    make, read = KINDS[kind]
    written(make(tmp_path), RUN, range(8), 1.0)
    written(make(tmp_path), replace(RUN, first=2), range(2, 12), 2.0)
    assert read(tmp_path)["train/loss"] == [(step, 1.0 + (step > 7)) for step in range(12)]


def test_no_step_is_doubled_when_an_attempt_does_steps_again(kind: str, tmp_path: Path) -> None:
    """Where a file can be cut it has the new values, elsewhere the old ones. Also when the run goes
    back within an attempt."""
    make, read = KINDS[kind]
    written(make(tmp_path), RUN, range(8), 1.0)
    back = replace(RUN, attempt=2, first=7, goes_back=True)
    again = [Row(step, {"train/loss": 3.0}, time.time()) for step in range(7, 12)]
    written(make(tmp_path), replace(RUN, attempt=2, first=5), range(4, 10), 2.0, back, *again)
    keeps = kind in ("mlflow", "wandb")
    assert read(tmp_path)["train/loss"] == [
        (step, 1.0 if step < (8 if keeps else 5) else 2.0 if step < (10 if keeps else 7) else 3.0)
        for step in range(12)]


def test_a_step_that_mlflow_has_in_part_is_completed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker dies within a request to a store in a folder, which takes it value by value."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # to read
    rows_of_run = [Row(step, {"train/loss": 1.0, "train/lr": 2.0, "a": 3.0}, time.time())
                   for step in range(4)]
    torn = MLflow(str(tmp_path / "mlruns"))
    torn.open(RUN)
    for row in rows_of_run[:2]:
        torn.write(row)
    log_batch = torn._client.log_batch
    torn._client.log_batch = lambda run, metrics: log_batch(run, metrics=metrics[:4])
    torn.flush()
    written(MLflow(str(tmp_path / "mlruns")), RUN, range(0), 0.0, *rows_of_run)
    series = of_mlflow(tmp_path / "mlruns")
    for name, value in rows_of_run[0].values.items():
        assert sorted(series[name]) == [(step, value) for step in range(4)], name


def test_a_logger_goes_on_after_a_death_at_any_change_of_its_files(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow read no run of a folder in which a worker had died while it made one."""
    kinds = ("csv", "tensorboard", "mlflow")
    for package in kinds[1:]:
        pytest.importorskip(package)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    subprocess.run([sys.executable, str(TESTS / "jobs" / "dying_logger.py"), str(tmp_path), *kinds],
                   check=True)
    for kind in kinds:
        deaths = [*(tmp_path / kind).iterdir()]
        assert len(deaths) > 8, kind
        for folder in deaths:
            series = KINDS[kind][1](folder)
            found = {name: sorted(series[name]) for name in ("train/loss", "train/more")}
            assert found == {"train/loss": [(step, float(step)) for step in range(4)],
                             "train/more": [(2, 2.0), (3, 2.0)]}, folder
            modes = {file.stat().st_mode for file in (folder / "mlruns").rglob("*")
                     if file.is_file()}
            assert len(modes) == (kind == "mlflow"), folder  # whoever reads one reads all


def test_a_run_of_the_users_own_in_the_same_experiment_stays_as_it_is(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr(mlflow_run, "WRITTEN_S", 0.0)
    client = MlflowClient(tracking_uri=str(tmp_path / "mlruns"))
    run = client.create_run(client.create_experiment("elastic-trainer")).info.run_id
    client.log_param(run, "notes", "")
    client.log_metric(run, "loss", 1.0)
    before = client.get_run(run).to_dictionary()
    written(MLflow(str(tmp_path / "mlruns")), RUN, range(2), 0.0)
    assert client.get_run(run).to_dictionary() == before


@pytest.mark.parametrize("left", (6, 7))
def test_what_no_worker_could_write_any_more_is_read_from_the_event_log(tmp_path: Path,
                                                                        left: int) -> None:
    """Also by a logger that is added when the run is resumed: with all numbers of a run that had it
    from its beginning. An evaluation may follow the step from which the run goes on."""
    straight = Ears()
    run(built(), left, run_dir=tmp_path / "run", checkpoint_every=1)
    run(built(), run_dir=tmp_path / "run", loggers=[Csv(tmp_path / "a.csv")])
    run(built(), listeners=[straight])
    assert_same(of_csv(tmp_path / "a.csv"), expected(straight))


def test_only_the_first_worker_of_a_world_logs(tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of a run without loggers."""
    alone, models = run(built()), [built() for _ in range(3)]
    ended = in_a_breaking_world(monkeypatch, 3, lambda rank: run(
        models[rank], loggers=[Csv(tmp_path / f"{rank}.csv")]))
    assert ended == [alone] * 3
    assert [file.name for file in tmp_path.iterdir()] == ["0.csv"]
    assert {value for _, value in of_csv(tmp_path / "0.csv")["train/world_size"]} == {3.0}


def test_a_frozen_worker_that_wakes_does_not_write_into_the_file_of_its_successor(
        tmp_path: Path) -> None:
    first, second = Csv(tmp_path / "a.csv"), Csv(tmp_path / "a.csv")
    first.open(RUN)
    first.write(Row(0, {"train/loss": 1.0}, 0.0))
    first.flush()
    assert second.open(RUN) == 1
    second.write(Row(1, {"train/loss": 2.0}, 0.0))
    first.write(Row(1, {"train/loss": 1.0}, 0.0))
    with pytest.raises(OSError, match="was replaced by another worker"):
        first.flush()
    with pytest.raises(OSError, match="was replaced by another worker"):
        first.write(Row(2, {"train/other": 1.0}, 0.0))
    second.close()
    assert of_csv(tmp_path / "a.csv") == {"train/loss": [(0, 1.0), (1, 2.0)]}


def test_a_table_of_another_program_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("name,value\nx,1\n")
    events = written(Csv(tmp_path / "a.csv"), RUN, range(2), 1.0)
    assert "is no table of this logger" in dict(events)["worker.logger_failed"]["error"]
    assert (tmp_path / "a.csv").read_text() == "name,value\nx,1\n"


# --- a logger that fails --------------------------------------------------------------------------

class Own:
    """A logger of the user's, which fails as a test says."""

    def __init__(self, fails: Callable[[str], None] = lambda where: None):
        self.fails, self.steps = fails, list[int]()
        self.has_all = threading.Event()
        """Set when step 4 is written."""

    def check(self) -> None:
        """It needs nothing."""

    def where(self) -> str:
        self.fails("where")
        return "memory"

    def open(self, run: Run) -> int:
        self.fails("open")
        return 0

    def write(self, row: Row) -> None:
        self.fails("write")
        self.steps.append(row.step)
        if row.step == 4:
            self.has_all.set()

    def flush(self) -> None:
        self.fails("flush")

    def close(self) -> None:
        self.fails("close")


def raising(*places: str) -> Callable[[str], None]:
    def fail(where: str) -> None:
        if where in places:
            raise ConnectionError(f"{where}: https://me:hunter2hunter2@host/?token=abcdef refused")

    return fail


def test_a_logger_that_raises_is_an_event_once_and_changes_no_bit(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What it lost is counted, the others go on, and no secret is in the event or on stderr."""
    monkeypatch.setattr(writer, "OPEN_AGAIN_S", 0.01)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789secret")
    ears, whole = Ears(), Own()
    loggers = [Own(raising("write")), whole, Own(raising("close")), Own(raising("open")),
               Own(raising("flush"))]
    assert run(built(), loggers=loggers, listeners=[ears]) == run(built())
    assert whole.steps == list(range(12))
    closed = [(e["rows"], e["lost"]) for e in ears.facts("worker.logger_closed")]
    assert closed == [(0, 12), (12, 0), (12, 0), (0, 12), (0, 12)]
    failed = ears.facts("worker.logger_failed")
    assert len(failed) == 4 and all("ConnectionError" in e["error"] for e in failed)
    shown = capsys.readouterr().err + str(failed)
    assert "hunter2" not in shown and "abcdef" not in shown and "has lost 12 rows" in shown
    assert redacted("key 0123456789secret") == "key ***"


@pytest.mark.parametrize("is_slow", [False, True], ids=["at once", "at the end"])
@pytest.mark.parametrize("flush_s", [0.0, 1e9], ids=["each row flushed", "flushed at the end"])
@pytest.mark.parametrize(("places", "delivered"), [
    ((), 12), (("close",), 12), (("write",), 0), (("open",), 0), (("flush",), 0),
    (("flush", "close"), 0), (("where",), 0),
])
def test_the_rows_that_count_as_lost_do_not_depend_on_when_the_thread_runs(
        monkeypatch: pytest.MonkeyPatch, places: tuple[str, ...], delivered: int, flush_s: float,
        is_slow: bool) -> None:
    """A row is delivered when its write and the flush after it have returned, however many rows
    wait for the thread, and however often it flushes."""
    monkeypatch.setattr(writer, "FLUSH_S", flush_s)
    monkeypatch.setattr(writer, "OPEN_AGAIN_S", 0.01)
    may_run, fails = threading.Event(), raising(*places)

    def fail(where: str) -> None:
        assert may_run.wait(DEADLINE_S)
        fails(where)

    events = dict[str, Any]()
    one = Writer(Own(fail), RUN, lambda event, **facts: events.update({event: facts}))
    if not is_slow:
        may_run.set()
    for step in range(12):
        one.put(Row(step, {"train/loss": 1.0}, 0.0))
    may_run.set()
    one.put_end()
    one.end(time.monotonic() + DEADLINE_S)
    closed = events["worker.logger_closed"]
    assert (closed["rows"], closed["lost"]) == (delivered, 12 - delivered)
    assert ("worker.logger_failed" in events) == bool(places)


def test_a_logger_that_blocks_never_holds_up_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue is bounded. What does not fit is lost and counted, and the end does not wait for
    ever."""
    monkeypatch.setattr(rows, "CLOSE_S", 0.1)
    monkeypatch.setattr(Writer.__init__, "__defaults__", (4, None))
    ears, released = Ears(), threading.Event()

    def block(where: str) -> None:
        released.wait(DEADLINE_S)

    blocked, whole = Own(block), Own()
    assert run(built(), loggers=[blocked], listeners=[ears]) == run(built())
    assert ears.facts("worker.step_committed")[-1]["step"] == 11
    (failed,) = ears.facts("worker.logger_failed")
    assert "4 rows wait for it" in failed["error"]
    (closed,) = ears.facts("worker.logger_closed")
    assert (closed["rows"], closed["lost"]) == (0, 12)
    released.set()
    run(built(), loggers=[whole])


def test_a_logger_that_could_not_be_opened_is_opened_again_and_lacks_nothing(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "OPEN_AGAIN_S", 0.01)
    tries = list[str]()

    def fail(where: str) -> None:
        tries.append(where)
        if tries.count("open") < 3:
            raise TimeoutError("no answer")

    events = list[str]()
    one = Writer(logger := Own(fail), RUN, lambda event, **facts: events.append(event))
    for step in range(5):
        one.put(Row(step, {"train/loss": 1.0}, 0.0))
    assert logger.has_all.wait(DEADLINE_S), tries
    one.put_end()
    one.end(time.monotonic() + DEADLINE_S)
    assert logger.steps == [0, 1, 2, 3, 4] and one.delivered == 5
    assert events == ["worker.logger_failed", "worker.logger_opened", "worker.logger_closed"]


# --- errors ---------------------------------------------------------------------------------------

@pytest.mark.parametrize(("loggers", "message"), [
    ("metrics.csv", "Give a list"),
    ([print], r"loggers\[0\] is .* which is no logger"),
    ([Csv], r"loggers\[0\] is .* which is no logger"),
    ([one := Csv("a.csv"), one], "twice"),
])
def test_what_is_no_logger_is_refused(loggers: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_of(built(), loggers=loggers)


def test_a_logger_whose_library_is_not_installed_is_refused(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for logger in (TensorBoard(), MLflow(), WandB()):
        with pytest.raises(ConfigError, match=r"is not installed. Install it: pip install"):
            trained(built(), loggers=[logger])


def test_no_secret_of_a_logger_is_in_the_files_of_a_run(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """Neither what stands before @ in a URI, nor the key in the environment."""
    pytest.importorskip("mlflow")
    monkeypatch.setattr(rows, "CLOSE_S", 0.1)
    monkeypatch.setattr(writer, "OPEN_AGAIN_S", 0.01)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789secret")
    uri = "http://me:hunter2hunter2@127.0.0.1:1"
    run(built(), run_dir=tmp_path / "run", loggers=[MLflow(uri), Own(raising("write"))])
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert any("worker.logger_failed" in file.read_text(errors="replace") for file in files)
    shown = repr(MLflow(uri)) + capsys.readouterr().err
    for text in [shown, *(file.read_text(errors="replace") for file in files)]:
        assert "hunter2" not in text and "0123456789secret" not in text
