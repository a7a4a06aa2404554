"""The laws of `report` and `watch`: what is summed up and shown follows from the events."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from folds import status_of
from rich.console import Console
from stories import JOB, RUN, Event, event, generation, gone, step, write

from elastic_trainer.__main__ import main
from elastic_trainer.events.summary import summarize, write_result
from elastic_trainer.training.account import is_finished
from elastic_trainer.views.page import page, read
from elastic_trainer.views.status import RECENT_EVENTS
from elastic_trainer.views.tables import print_summary
from elastic_trainer.views.watch import Watch


def test_result_counts_the_kept_history() -> None:
    """Steps and samples are those of the finish; what was done again is counted apart."""
    result = summarize(RUN)
    assert {"steps": 4, "samples": 32, "loss": 0.0, "weights_sha256": "5a", "finished": True
            }.items() <= result.items()
    assert (result["attempts"], result["generations"]) == (2, 3)
    assert (result["steps_redone"], result["steps_rolled_back"]) == (1 + 2, 2)
    assert result["pauses"] == [0.4] and result["workers_lost"] == {"crashed": 2}


def test_the_report_accounts_for_every_second() -> None:
    """Booting until the first generation, pauses as measured, restarting from the last step to the
    next world."""
    result = summarize(RUN)
    assert result["wall_s"] == 19.0
    assert result["books"] == {
        "booting_s": 6.0, "training_s": 3.5 + 1.1 + 3.0, "pausing_s": 0.4,
        "restarting_s": 1.0 + 4.0, "stopped_s": 0.0}
    # steps 0 to 3, once each, of the 13 s since the first world
    assert result["goodput"] == round(4.0 / 13.0, 4)


def test_hosts_account_for_their_workers() -> None:
    """Each host's seconds are those of its workers, booting and then working, and by account."""
    result = summarize(RUN)
    assert result["hosts"] == {
        "local-1": {"workers": 1, "booting_s": 3.0, "working_s": 8.0, "seconds": {
            "booting": 5.0, "useful step": 2.5, "redone step": 2.0, "idle": 0.1,
            "forming": 0.4, "restarting": 1.0}},
        "local-2": {"workers": 1, "booting_s": 4.0, "working_s": 4.6, "seconds": {
            "booting": 5.0, "useful step": 1.5, "redone step": 2.0, "forming": 0.1}},
    }
    assert sum(result["host_seconds"].values()) == pytest.approx(11.0 + 8.6)


def test_time_between_invocations_is_not_counted() -> None:
    """A run that a person stopped over night is not slower for it."""
    night = 50_000.0
    stopped = [*RUN[:13], event(9.5, "attempt.ended", exit_code=0, verdict="interrupted")]
    later = [item | {"time": item["time"] + night} for item in RUN[20:]]
    result = summarize([*stopped, event(night + 12.0, "run.started", options={}), *later])
    assert result["books"]["stopped_s"] == night + 12.0 - 9.5
    assert sum(result["books"].values()) == pytest.approx(result["wall_s"])
    assert result["goodput"] > 0.2


def test_an_unfinished_run_is_summed_up_to_its_last_event() -> None:
    """A result can be asked for at any time."""
    result = summarize(RUN[:18])
    assert {"finished": False, "steps": 4, "samples": 32, "loss": 0.0, "weights_sha256": None,
            "wall_s": 11.0}.items() <= result.items()
    assert {"steps": 0, "wall_s": 0, "goodput": 0.0, "loss": None}.items() <= summarize([]).items()


def test_a_run_has_not_finished_when_it_was_resumed_with_more_steps() -> None:
    """Its old end is one no more; the same steps again are no more of it."""
    later = [event(30.0, "run.started", options={}), event(30.0, "attempt.started", attempt=3)]
    same = event(33.0, "job.described", **JOB, steps=4, reduce="exact", attempt=3)
    begun = [generation(33.0, 1, 4, "checkpoint", 2.0, attempt=3), same | {"steps": 10}]
    assert summarize([*RUN, *later,
                      generation(33.0, 1, 4, "checkpoint", 2.0, attempt=3), same])["finished"]
    result = summarize([*RUN, *later, *begun, step(34.0, 4, attempt=3)])
    assert (result["finished"], result["steps"], result["samples"],
            result["weights_sha256"]) == (False, 5, 40, None)
    assert result["books"]["stopped_s"] == 5.0 and sum(
        result["books"].values()) == result["wall_s"] == 34.0


@pytest.mark.parametrize("reason", ["cut_off", "stuck", "exit_timeout", "join_failed"])
def test_a_worker_is_lost_whatever_it_was_given_up_for(reason: str) -> None:
    """Each of the driver's reasons counts."""
    assert summarize([gone(1.0, "a", 1, reason=reason)])["workers_lost"] == {reason: 1}


@pytest.mark.parametrize(("shift_s", "at"), [(-3600.0, slice(11, None)), (1e9, slice(10, 11))],
                         ids=["set back", "one event in the future"])
def test_a_clock_that_was_set_back_is_reported(tmp_path: Path, shift_s: float, at: slice) -> None:
    """By how much, and at which event: wall time and goodput are wrong then. Clocks of several
    hosts that differ by seconds are no reason."""
    events = [item | {"time": item["time"] + 1e6} for item in RUN]
    events[at] = [item | {"time": item["time"] + shift_s} for item in events[at]]
    found = summarize(events)["clock_set_back"]
    assert found["event"] == "state.checkpoint_published"
    assert found["by_s"] == pytest.approx(abs(shift_s), abs=10) and found["time"] == (
        events[11]["time"])
    console = Console(file=io.StringIO(), width=200)
    print_summary(summarize(events), console)
    line = re.search(r"clock +(.*?)\n", console.file.getvalue())  # type: ignore[attr-defined]
    assert line and line[1].startswith("was set back by ")
    assert line[1].endswith("at state.checkpoint_published: wall time and goodput are wrong")
    assert "clock was set back" in page([read(write(tmp_path, events))])
    near = [item | {"time": item["time"] - number % 2 * 30.0} for number, item in enumerate(RUN)]
    assert "clock_set_back" not in summarize(near)


def test_result_is_written_whole(tmp_path: Path) -> None:
    """result.json is what summarize() returns, and no temporary file is left."""
    result = write_result(write(tmp_path, RUN))
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert result == summarize(RUN) | {"skipped_lines": 0, "unknown_events": 0}
    assert {path.name for path in tmp_path.iterdir()} == {"events.jsonl", "result.json"}


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_no_number_is_null_in_json(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: float) -> None:
    """In result.json and for `report --json`: NaN is no JSON. The run is still a finished one."""
    write(tmp_path, [*RUN[:-2], RUN[-2] | {"loss": loss}, RUN[-1]])
    write_result(tmp_path)
    assert main(["report", str(tmp_path), "--json"]) == 0
    for text in ((tmp_path / "result.json").read_text(), capsys.readouterr().out):
        result = json.loads(text, parse_constant=pytest.fail)
        assert result["loss"] is None and result["steps"] == 4
    assert is_finished(tmp_path, 4) and not is_finished(tmp_path, 5)


# --- watch ----------------------------------------------------------------------------------------


def sentences(events: list[Event]) -> list[str]:
    """Return a status's sentences about the last events, without the clock."""
    return [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in status_of(events).recent]


def test_picture_shows_where_training_is() -> None:
    """Step, loss, speed, ETA and fleet are those of the last events."""
    status = status_of(RUN[:13])
    assert (status.phase, status.steps, status.steps_due, status.loss) == ("training", 3, 10, 1.0)
    assert (status.attempt, status.generation, status.size) == (1, 1, 2)
    assert status.samples_per_s == 8.0 and status.eta_s == 7.0


def test_picture_follows_a_restart_back_to_its_checkpoint() -> None:
    """Steps that a restart dropped are not shown as done."""
    assert status_of(RUN[:21]).phase == "restarting"
    assert status_of(RUN[:21]).workers == {}
    status = status_of(RUN[:22])
    assert (status.phase, status.steps, status.attempt) == ("training", 2, 2)


def test_picture_pauses_while_a_generation_forms() -> None:
    """Between two generations no worker trains."""
    formed = event(9.7, "driver.generation_formed", generation=2, size=1, hosts=["local-1"],
                   reason="lost")
    assert status_of([*RUN[:14], formed]).phase == "pausing"


def test_picture_is_over_when_the_run_is() -> None:
    """A finish, the user's own error and a stop end it; a failed attempt does not."""
    assert status_of(RUN).phase == "finished"
    for verdict in ("finished", "user_error", "interrupted", "failed"):
        ended = event(0.0, "attempt.ended", exit_code=1, verdict=verdict)
        assert status_of([ended]).is_over is (verdict != "failed")


def test_kill_command_names_a_live_worker_that_stands_ready() -> None:
    """One that boots is named only where there is no other, one that is gone never, one elsewhere
    with its own pid."""
    assert status_of(RUN[:2]).kill_command is None
    assert status_of(RUN[:4]).kill_command == "kill -9 42"
    assert status_of(RUN[:5]).kill_command == "kill -9 41"
    assert status_of(RUN[:6]).kill_command == "kill -9 42"
    assert status_of(RUN[:14]).kill_command == "kill -9 41"
    remote = event(0.0, "driver.worker_started", host="10.0.0.7", slot=0, worker="10.0.0.7/0/1",
                   pid=43, over_ssh=True)
    assert status_of([remote]).kill_command is None
    ready = event(1.0, "driver.worker_ready", worker="10.0.0.7/0/1", boot_s=1.0, pid=7)
    assert status_of([remote, ready]).kill_command == "ssh 10.0.0.7 kill -9 7"


def test_watch_shows_a_sentence_of_each_event() -> None:
    """The newest sentence is the last, and no more are shown than fit."""
    assert sentences(RUN[13:17])[-1] == "generation 2 trains with 2 workers after a pause of 0.40 s"
    assert sentences(RUN[:14])[-1] == "host local-2: worker 42 was killed (SIGKILL)"
    assert sentences(RUN[18:19]) == ["host local-1: worker 41 was killed (SIGKILL)"]
    assert sentences(RUN[:6])[-1] == "host local-2: worker 42 is ready after 4.0 s"
    assert sentences(RUN[:22])[-1] == (
        "generation 1 trains with 2 workers from the checkpoint of step 2")
    assert sentences(RUN)[-2] == "the run finished: 4 steps, 32 samples, loss 0.0000"
    assert len(sentences(RUN)) == RECENT_EVENTS
    # a run that waits for its store shows the reason
    for kind in ("state.store_unavailable", "state.checkpoint_refused"):
        (sentence,) = sentences([event(0.0, kind, error="s3://b did not take it: SlowDown")])
        assert sentence.endswith(": s3://b did not take it: SlowDown")


@pytest.mark.parametrize(("kind", "facts", "sentence"), [
    ("driver.clock_differs", {"host": "a", "off_s": -240.2},
     "host a: the clock is -240 s off the driver's"),
    ("worker.steps_slower", {"step_s": 2.295, "best_s": 0.776},
     "steps take 2.29 s instead of 0.78 s: a host or a network link is slow"),
    ("worker.steps_as_before", {"step_s": 0.78}, "steps take 0.78 s again"),
    ("state.upload_stalled",
     {"step": 10, "what": "4 of its 4 parts", "still_s": 5.5, "worker": "h3/0/3"},
     "checkpoint of step 10: worker h3/0/3 has waited 6 s for the store to take 4 of its 4 parts"),
    ("state.checkpoints_withdrawn", {"steps": [50, 100]},
     "the checkpoints of steps 50, 100 are withdrawn"),
    ("job.settings_differ", {"key": "lr", "run_value": 0.1, "given": 0.2, "holds": "run"},
     "the run keeps lr = 0.1 and ignores the given value 0.2"),
    ("job.settings_differ", {"key": "lr", "run_value": 0.1, "given": 0.2, "holds": "given"},
     "the run uses the given lr = 0.2 instead of its old value 0.1"),
    ("driver.stopped", {"verdict": "finished", "detail": ""},
     "the driver ends the attempt (finished)"),
    ("driver.stopped", {"verdict": "user_error", "detail": "Traceback …\nValueError: {bad}"},
     "the driver ends the attempt (user error): ValueError: {bad}"),
    ("driver.worker_evicted", {"host": "a", "pid": 7, "reason": "frozen"},
     "host a: the driver evicts worker 7: it sent no heartbeat in time"),
    ("driver.worker_evicted", {"host": "a", "pid": 7, "reason": "of_a_newer_version"},
     "host a: the driver evicts worker 7: of a newer version"),
])
def test_a_sentence_has_the_values_of_its_event(kind: str, facts: dict[str, Any],
                                                sentence: str) -> None:
    """`watch` shows what a person may want to look at, with numbers and units."""
    assert sentences([event(0.0, kind, **facts)]) == [sentence]


@pytest.mark.parametrize(
    ("reason", "exit_code", "sentence"),
    [
        ("crashed", 1, "crashed (exit code 1)"),
        ("crashed", -11, "was killed (SIGSEGV)"),
        ("frozen", None, "sent no heartbeat in time and was evicted"),
        ("boot_failed", 2, "failed to boot (exit code 2)"),
        ("boot_timeout", None, "was not ready in time and was evicted"),
        ("left", 75, "left, as it was asked to"),
        ("of_a_newer_version", 1, "ended: of a newer version"),
    ],
)
def test_each_end_of_a_worker_has_its_sentence(reason: str, exit_code: int | None,
                                               sentence: str) -> None:
    """`watch` shows how a worker ended; a reason that it does not know is shown as it is."""
    assert sentences([gone(0.0, "a", 7, exit_code, reason)]) == [f"host a: worker 7 {sentence}"]


def test_an_event_that_makes_no_sense_changes_nothing() -> None:
    """A watcher never dies of what it reads."""
    status = status_of(RUN[:13])
    for odd in (
        {},
        {"event": "worker.step_committed"},
        {"event": "driver.worker_ready", "worker": "?"},
        {"event": 3},
    ):
        assert status_of([*RUN[:13], odd]) == status


@pytest.mark.parametrize("is_terminal", [True, False])
def test_watch_shows_the_end_when_it_is_stopped(tmp_path: Path, is_terminal: bool) -> None:
    """Whatever was written before stop() is shown, as a panel or as a plain line."""
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=120)
    watch = Watch(write(tmp_path, RUN), console)
    watch.start()
    watch.wait()
    watch.stop()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert watch.status.is_over and "finished" in shown and "4/10" in shown
    if not is_terminal:
        assert len(shown.splitlines()) == RECENT_EVENTS + 1


def test_events_and_the_kill_command_are_printed_where_there_is_no_terminal(tmp_path: Path) -> None:
    """In a log too: each event as a line when it happens, and with the first line of the training
    how to kill a worker."""
    console = Console(file=io.StringIO(), width=60)
    watch = Watch(write(tmp_path, []), console)
    watch.start()
    for count, waited_for in ((8, "kill -9 42"), (14, "worker 42 was killed (SIGKILL)"),
                              (17, "generation 2 trains with 2 workers")):
        write(tmp_path, RUN[:count])
        deadline = time.monotonic() + 60
        while waited_for not in (shown := console.file.getvalue()):  # type: ignore[attr-defined]
            assert time.monotonic() < deadline, shown
            time.sleep(0.01)
    watch.stop()
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert sum("try it: kill -9 42" in line and "training" in line for line in lines) == 1
    assert len(lines) == len(set(lines))


def test_a_finished_run_has_not_failed_when_its_result_cannot_be_written(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A message reports it, and result.json can be made again from the event log."""
    folder = write(tmp_path, RUN)
    (folder / "result.json").mkdir()
    assert write_result(folder)["finished"]
    assert "result.json cannot be written" in capsys.readouterr().err
    assert not list(folder.glob(".result*"))
