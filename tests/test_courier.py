"""The diary of hosts that do not share the folder of runs: complete on the supervisor's disk, whoever dies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import JOB, Cluster
from faults import Plan

from elastic_trainer.config import Launch
from elastic_trainer.courier import Courier, Desk, new_run_id, shares_runs
from elastic_trainer.events import Events, read_events
from elastic_trainer.wire import WordServer

KEY = b"the key of this run"
DEADLINE_S = 10.0


class Office:
    """A driver's end whose answers can be lost: the line is written, the worker does not hear it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.desk, self.lose = Desk(self.lines.append), 0
        self.server = WordServer("127.0.0.1", KEY, self.answer, lambda *_: None)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.launch = Launch(driver=f"127.0.0.1:{self.server.server_port}", key=KEY, worker="a/0/1")

    def answer(self, words: dict[str, Any], address: str) -> dict[str, Any]:
        answer = self.desk.take(words)
        if self.lose:
            self.lose -= 1
            raise OSError("the answer is lost, as planned")
        return answer


def test_lines_arrive_in_order_and_once_though_answers_are_lost() -> None:
    """A line whose answer was lost is sent again and not written again."""
    office = Office()
    office.lose = 3
    events = Events(None, courier=Courier(office.launch), run="run")
    for number in range(20):
        events.emit("worker.step_committed", step=number)
    events.flush()
    office.server.shutdown()
    assert [f'"step": {number}}}' in line for number, line in enumerate(office.lines)] == [True] * 20


def test_a_line_is_taken_only_when_those_before_it_have_arrived() -> None:
    """What a vanished host can take with it is one line."""
    office, held = Office(), threading.Event()
    answer, arrived = office.server.answer, threading.Event()

    def hold(words: dict[str, Any], address: str) -> dict[str, Any]:
        arrived.set()
        assert held.wait(DEADLINE_S)
        return answer(words, address)

    office.server.answer = hold
    courier, taken = Courier(office.launch), threading.Event()
    courier.take("first")
    assert arrived.wait(DEADLINE_S)

    def second() -> None:
        courier.take("second")
        taken.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert not taken.is_set() and not office.lines
    held.set()
    thread.join(DEADLINE_S)
    courier.flush()
    office.server.shutdown()
    assert office.lines == ["first", "second"]


def test_a_line_of_two_lines_is_not_written() -> None:
    """Nobody writes another event into the diary by a line break."""
    lines: list[str] = []
    desk = Desk(lines.append)
    desk.take({"worker": "a/0/1", "number": 1, "line": "{}\n{}"})
    desk.take({"worker": "a/0/1", "number": 2, "line": "{}"})
    assert lines == ["{}"]


@pytest.mark.parametrize(("there", "told", "shared"),
                         [("x", "x", True), ("y", "x", False), (None, "x", False), (None, "", True)])
def test_a_host_shares_the_folder_if_it_sees_what_the_supervisor_wrote(tmp_path: Path, there: str | None, told: str,
                                                                       shared: bool) -> None:
    """Another disk has no run id, or that of another life; where nobody says one there is no supervisor."""
    if there is not None:
        new_run_id(tmp_path, there)
    assert shares_runs(Launch(run_dir=tmp_path, run_id=told)) is shared


def test_loses_nothing_when_no_host_shares_the_folder_and_rank_0_is_killed(tmp_path: Path,
                                                                           twin_of: Callable[..., str]) -> None:
    """Workers whose folder of runs is another disk: diary and result are whole on the supervisor's."""
    elsewhere, few = tmp_path / "elsewhere", ("--steps", "40")
    plan = Plan().kill(host="127.0.0.1", at="step.applied", step=12)
    command = ["env", f"ELASTIC_TRAINER_RUN_DIR={elsewhere}", *JOB, *few]
    with Cluster(tmp_path, command=command, plan=plan, options=["--store", str(tmp_path / "store")]) as cluster:
        assert cluster.wait() == 0
        result = cluster.assert_nothing_lost(twin_of(*few), victims=1)
    assert result["steps"] == 40 and result["steps_redone"] <= 1
    assert not elsewhere.exists()


def test_a_host_that_shares_nothing_needs_a_store(tmp_path: Path) -> None:
    """Checkpoints on a disk that vanishes with its host are none: said at once, with the option."""
    command = ["env", f"ELASTIC_TRAINER_RUN_DIR={tmp_path / 'elsewhere'}", *JOB, "--steps", "4"]
    with Cluster(tmp_path, command=command, hosts=1, min_workers=1) as cluster:
        assert cluster.wait() != 0
    assert "Use --store" in (cluster.run_dir / "output.log").read_text()
    assert not [e for e in read_events(cluster.run_dir) if e["event"] == "worker.step_committed"]
