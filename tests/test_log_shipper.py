"""The event log of hosts that do not share the folder of runs is complete on the supervisor's disk
after each death."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster import JOB, Cluster
from faults import Plan

from elastic_trainer.config import Launch, Limits
from elastic_trainer.events.log import Events, read_events
from elastic_trainer.events.log_shipper import (
    WORKERS_EVENTS,
    LineHandler,
    LogShipper,
    new_run_id,
    shares_runs,
)
from elastic_trainer.wire.messages import MessageRefused, MessageServer
from elastic_trainer.wire.seal import worker_key

KEY = b"the key of this run"
DEADLINE_S = 60.0
STEP = {"step": 0, "generation": 1, "size": 1, "samples": 8, "digest": 1, "loss": 0.5}


class DriverEnd:
    """A driver's end whose answers can be lost: the line is written, the worker does not hear
    it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.handler, self.lose = LineHandler(self.lines.append, attempt=1), 0
        self.server = MessageServer("127.0.0.1", KEY, self.answer, lambda *_: None)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.launch = Launch(driver=f"127.0.0.1:{self.server.address[1]}",
                             key=worker_key(KEY, "a/0/1"),
                             worker="a/0/1",
                             limits=Limits(driver_lost_s=60.0))

    def answer(self, message: dict[str, Any], address: str) -> dict[str, Any]:
        self.handler.take(message)
        if self.lose:
            self.lose -= 1
            raise OSError("the answer is lost, as planned")
        return {}


def line(event: str = "worker.step_committed", **facts: Any) -> str:
    return json.dumps(
        {"time": 1.5, "event": event, "worker": "a/0/1", "attempt": 1, **STEP, **facts})


def test_lines_arrive_in_order_and_once_though_answers_are_lost() -> None:
    """A line whose answer was lost is sent again and not written again."""
    end = DriverEnd()
    end.lose = 3
    events = Events(None, shipper=LogShipper(end.launch), run="run", worker="a/0/1", attempt=1)
    for number in range(20):
        events.emit("worker.step_committed", **STEP | {"step": number})
    events.flush()
    end.server.shutdown()
    assert [json.loads(line)["step"] for line in end.lines] == list(range(20))


def test_lines_of_a_worker_that_starts_anew_in_place_are_accepted() -> None:
    """It counts its lines from one again, under the same name; only what was written already is not
    written again."""
    end = DriverEnd()
    for _ in range(2):
        shipper = LogShipper(end.launch)
        for step in range(3):
            shipper.take(line(step=step))
        assert shipper.flush()
    end.server.shutdown()
    assert len(end.lines) == 6


def test_a_flush_reports_that_the_driver_takes_no_line() -> None:
    """The loop must not vote on a step whose forerunner's line may be lost."""
    end = DriverEnd()
    end.server.answer = lambda message, address: {}[""]  # no answer at all
    shipper = LogShipper(replace(end.launch, limits=Limits(driver_lost_s=0.2)))
    shipper.take(line())
    assert not shipper.flush()
    end.server.answer, shipper.patience_s = end.answer, DEADLINE_S
    assert shipper.flush()  # else its thread would ask for as long as this process lives
    end.server.shutdown()
    assert end.lines == [line()]


def test_a_line_is_taken_only_when_those_before_it_have_arrived() -> None:
    """What a vanished host can take with it is one line."""
    end, held = DriverEnd(), threading.Event()
    answer, arrived = end.server.answer, threading.Event()

    def hold(message: dict[str, Any], address: str) -> dict[str, Any]:
        arrived.set()
        assert held.wait(DEADLINE_S)
        return answer(message, address)

    end.server.answer = hold
    shipper, taken = LogShipper(end.launch), threading.Event()
    shipper.take(line(step=1))
    assert arrived.wait(DEADLINE_S)

    def second() -> None:
        shipper.take(line(step=2))
        taken.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert not taken.is_set() and not end.lines
    held.set()
    thread.join(DEADLINE_S)
    shipper.flush()
    end.server.shutdown()
    assert end.lines == [line(step=1), line(step=2)]


@pytest.mark.parametrize("bad", [
    "[1]", "no JSON",
    line() + "\n" + line(),
    line(worker="b/0/1"),
    line(attempt=2),
    line(time=None),
    line("driver.worker_started"),
    line("attempt.ended"),
    line("run.started")
])
def test_a_worker_writes_of_itself_only(bad: str) -> None:
    """The supervisor acts on the log's hosts, pids and attempts: no worker's key is
    enough for that."""
    lines: list[str] = []
    handler = LineHandler(lines.append, attempt=1)
    with pytest.raises(MessageRefused):
        handler.take({"worker": "a/0/1", "shipper": "x", "number": 1, "line": bad})
    handler.take({"worker": "a/0/1", "shipper": "x", "number": 1, "line": line()})
    assert lines == [line()]


def test_a_worker_cannot_silence_its_neighbour() -> None:
    """It may know the name of its neighbour's shipper; a high number under that name hid all of the
    neighbour's lines."""
    lines: list[str] = []
    handler = LineHandler(lines.append, attempt=1)
    neighbours = {"worker": "b/0/2", "shipper": "x", "number": 10**9, "line": line(worker="b/0/2")}
    own = {"worker": "a/0/1", "shipper": "x", "number": 1, "line": line()}
    handler.take(neighbours)
    handler.take(own)
    assert lines == [neighbours["line"], own["line"]]


@pytest.mark.parametrize(("there", "given", "shared"), [("x", "x", True), ("y", "x", False),
                                                       (None, "x", False), (None, "", True)])
def test_a_host_shares_the_folder_if_it_sees_what_the_supervisor_wrote(
        tmp_path: Path, there: str | None, given: str, shared: bool) -> None:
    """Another disk has no run id, or an older one; where no launcher names one there is no
    supervisor."""
    if there is not None:
        new_run_id(tmp_path, there)
    assert shares_runs(Launch(run_dir=tmp_path, run_id=given)) is shared


def test_loses_nothing_when_no_host_shares_the_folder_and_rank_0_is_killed(
        tmp_path: Path, twin_of: Callable[..., str]) -> None:
    """Workers whose folder of runs is another disk: event log and result are whole on the
    supervisor's."""
    elsewhere, few = tmp_path / "elsewhere", ("--steps", "40")
    plan = Plan().kill(host="127.0.0.1", at="step.applied", step=12)
    command = ["env", f"ELASTIC_TRAINER_RUN_DIR={elsewhere}", *JOB, *few]
    with Cluster(tmp_path, command=command, plan=plan,
                 options=["--store", str(tmp_path / "store")]) as cluster:
        assert cluster.wait() == 0
        result = cluster.assert_nothing_lost(twin_of(*few), victims=1)
    assert result["steps"] == 40 and result["steps_redone"] <= 1
    assert not elsewhere.exists()


def test_a_host_that_shares_nothing_needs_a_store(tmp_path: Path) -> None:
    """Checkpoints on a disk that vanishes with its host are refused at the start. The message names
    the option."""
    command = ["env", f"ELASTIC_TRAINER_RUN_DIR={tmp_path / 'elsewhere'}", *JOB, "--steps", "40"]
    with Cluster(tmp_path, command=command, hosts=1, min_workers=1) as cluster:
        assert cluster.wait() != 0
    assert "Use --store" in (tmp_path / "output.log").read_text()
    assert not [e for e in read_events(cluster.run_dir) if e["event"] == "worker.step_committed"]


OF_A_WORKER_ALONE = {"run.started", "attempt.started"}
"""A worker without a launcher writes these into its own folder."""


def test_the_supervisor_takes_each_event_that_a_worker_emits() -> None:
    """A host that does not share the folder of runs would lose the others."""
    root = Path(__file__).resolve().parent.parent
    emitted = {name for room in ("elastic_trainer/training", "elastic_trainer/world", "state")
               for path in (root / room).glob("*.py")
               for name in re.findall(r'(?:emit|Remark)\(\s*"([a-z]+\.[a-z_]+)"', path.read_text())}
    assert "worker.step_committed" in emitted
    assert {name for name in emitted if not name.startswith(WORKERS_EVENTS)} == OF_A_WORKER_ALONE
