"""The live view: at each moment it says what the report of the events so far says."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stories import (
    JOB,
    RECORDED,
    RUN,
    STORY,
    event,
    events_of,
    formed,
    generation,
    step,
    worker,
    write,
)
from test_web import impatient

from elastic_trainer.events.run import Run
from elastic_trainer.events.summary import figures_of, result_of, summarize, summarize_log
from elastic_trainer.views.drawing import duration
from elastic_trainer.views.live import Live
from elastic_trainer.views.metrics import METRICS
from elastic_trainer.views.prices import Price, Prices, costs

Event = dict[str, Any]
__all__ = ["impatient"]
PRICES = Prices(default=Price(spot=36.0, on_demand=100.0))
FAILED = [*STORY[:13], worker(8.0, "gone", "a", exit_code=-9, reason="crashed"),
          worker(8.0, "gone", "b", exit_code=-9, reason="crashed"),
          event(8.5, "driver.host_removed", host="a"),
          event(9.0, "attempt.ended", exit_code=1, verdict="failed")]
WAITING = [*FAILED, event(10.0, "attempt.started", attempt=2),
           event(11.0, "driver.host_added", host="e", slots=1, attempt=2),
           event(3611.0, "discovery.cloud_unavailable", attempt=2, error="x", failures=3)]
"""One machine is there, and the run needs two: for an hour no step is done."""
RESUMED = [*WAITING,
           event(3700.0, "attempt.ended", exit_code=130, verdict="interrupted", attempt=2),
           event(4000.0, "run.started", options={}, attempt=3),
           event(4001.0, "attempt.started", attempt=3),
           worker(4001.0, "started", "e", 2), worker(4005.0, "ready", "e", 2),
           formed(4005.0, 1, "start", "e/0/2", attempt=3),
           generation(4006.0, 1, 1, "checkpoint", 5.0, attempt=3),
           event(4006.0, "job.described", **JOB, reduce="exact", attempt=3),
           step(4007.0, 1, attempt=3)]
SOLO = [generation(0.0, 1, 0, "fresh", 0.0) | {"worker": "w"},
        event(0.0, "job.described", **JOB, reduce="exact", worker="w"),
        *(step(float(at), at, worker="w") for at in range(1, 5))]


def follows(events: list[Event]) -> None:
    """Read events one by one, and compare each prefix with its report."""
    run = Run()
    for count, item in enumerate(events, 1):
        run.read(item)
        reported = Run().read_all(events[:count])
        assert result_of(run) == (result := result_of(reported))
        closed, whole = run.closed(), reported.closed()
        assert closed.periods.all() == whole.periods.all()
        lanes = {host: whole.hosts.lane(host) for host in whole.hosts.lives}
        assert {host: closed.hosts.lane(host) for host in closed.hosts.lives} == lanes
        del result["hosts"]
        assert figures_of(run, run.closed(is_drawn=False)) == result


@pytest.mark.parametrize("events", [RUN, STORY, RESUMED, SOLO, events_of(RECORDED)[:400]],
                         ids=["run", "story", "resumed", "solo", "recorded"])
def test_at_each_event_the_figures_are_those_of_the_report_so_far(events: list[Event]) -> None:
    """Books, accounts, hosts and lanes too; closing a copy leaves the history as it was."""
    follows(events)


@given(st.lists(st.sampled_from([*RUN, *STORY]), max_size=30),
       st.lists(st.floats(0, 100), min_size=30, max_size=30))
def test_it_is_so_whatever_the_events(events: list[Event], times: list[float]) -> None:
    """Also of events that make no sense, and of a clock that goes back."""
    follows([item | {"time": at} for item, at in zip(events, times, strict=False)])


def values_of(live: Live) -> dict[tuple[str, str], float]:
    return {(name, " ".join(labels.values())): value for name, labels, value in live.samples()}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("events", [STORY, RESUMED, SOLO], ids=["story", "resumed", "solo"])
def test_page_and_metrics_have_the_figures_of_the_report_and_no_counter_falls(
        tmp_path: Path, events: list[Event]) -> None:
    """At each event: the ratios, the accounts and the cost, also while no world trains."""
    live, before = Live(tmp_path, PRICES), dict[tuple[str, str], float]()
    for count in range(1, len(events) + 1):
        write(tmp_path, events[:count])
        found, result = values_of(live), summarize(events[:count])
        assert found["goodput_ratio", ""] == result["goodput"]
        assert found["ettr_ratio", ""] == result["ettr"]
        assert {key[1]: value for key, value in found.items() if key[0] == "host_seconds"} == (
            result["host_seconds"])
        assert found["cost_total", "USD"] >= costs(result, PRICES)["cost"] - 1e-9
        assert live.known()[1]["costs"] == costs(result, PRICES)
        for key, value in found.items():
            assert METRICS[key[0]][0] != "counter" or value >= before.get(key, 0.0), key
        before = found


@pytest.mark.usefixtures("impatient")
def test_goodput_and_cost_go_on_while_no_world_trains(tmp_path: Path) -> None:
    """An attempt has failed, and the next one waits an hour for machines."""
    live = Live(write(tmp_path, WAITING), PRICES)
    found, result = values_of(live), summarize_log(tmp_path)
    assert result["wall_s"] == 3611.0
    assert found["goodput_ratio", ""] == result["goodput"] < 0.01
    assert found["run_seconds_total", "restarting"] == result["books"]["restarting_s"] > 3600
    assert found["host_seconds", "restarting"] > 3600
    assert found["cost_total", "USD"] == costs(result, PRICES)["cost"] > 36.0
    assert duration(3611.0) in live.newer(0)["sections"]["figures"]


@pytest.mark.usefixtures("impatient")
def test_a_run_without_events_has_their_age_on_its_page(tmp_path: Path) -> None:
    """Its figures end at the last event, as those of the report. A finished run needs no word."""
    write(tmp_path, [item | {"time": item["time"] + time.time() - 200} for item in STORY[:-1]])
    fleet = Live(tmp_path).newer(0)["sections"]["fleet"]
    assert "The last event was 3 min ago. All figures end there." in fleet
    assert "The last event" not in Live(write(tmp_path, STORY)).newer(0)["sections"]["fleet"]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("events", [STORY[:16], SOLO], ids=["newcomer", "solo"])
def test_a_host_has_a_lane_from_its_first_second(tmp_path: Path, events: list[Event]) -> None:
    """A newcomer that boots, and the one worker of a script without the launcher."""
    section = Live(write(tmp_path, events)).newer(0)["sections"]["hosts"]
    assert {*re.findall(r"<title>(\w+): \w+</title>", section)} == (
        {"a", "b", "c"} if events[0]["event"] == "run.started" else {"w"})


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("is_shorter", [True, False])
def test_a_log_that_is_replaced_is_read_anew(tmp_path: Path, is_shorter: bool) -> None:
    """The folder was removed, and the same name was run again: the new log may be longer."""
    folder = tmp_path / "run"
    live = Live(write(folder, STORY), PRICES)
    version = live.newer(0)["version"]
    assert values_of(live)["steps", ""] == 6 and live.status.phase == "finished"
    shutil.rmtree(folder)
    later = [item | {"time": item["time"] + 1e6} for item in STORY]
    write(folder, STORY[:13] if is_shorter else [*later[:-1], event(
        2e6, "worker.failed", error="x" * 500, worker="a/0/1")])
    assert "not finished yet" in live.newer(version)["sections"]["figures"]
    assert values_of(live)["steps", ""] == (2 if is_shorter else 6)
    assert live.status.phase == "training"
    assert values_of(live)["failures_total", ""] == (0 if is_shorter else 1)


@pytest.mark.usefixtures("impatient")
def test_a_copy_without_its_newest_segment_for_a_moment_is_the_same_log(tmp_path: Path) -> None:
    """A mirror drops it before it places the sealed one."""
    live = Live(write(tmp_path, STORY), is_copy=True)
    live.samples()
    (tmp_path / "events.jsonl").rename(tmp_path / "away")
    assert values_of(live)["steps", ""] == 6
    (tmp_path / "away").rename(tmp_path / "events.jsonl")
    assert values_of(live)["steps", ""] == 6


def test_a_read_costs_the_same_when_many_hosts_have_gone() -> None:
    """1,000 hosts and then 10,000 have come and gone; a read of one more step adds up those that
    are there, of which there are two."""
    counted = []
    for number in (1_000, 10_000):
        run = Run().read_all(STORY[:13])
        for at in range(number):
            moment = 8.0 + at / 1e3
            run.read(event(moment, "driver.host_added", host=f"h{at}", slots=1))
            run.read(step(moment + 4e-4, 2 + 2 * at, step_s=1e-4))
            run.read(event(moment + 5e-4, "driver.host_removed", host=f"h{at}"))
            run.read(step(moment + 9e-4, 3 + 2 * at, step_s=1e-4))
        lives, closed = run.accounts.hosts.lives, run.closed(is_drawn=False).hosts.lives
        assert len(lives) == len(closed) == number + 2
        counted.append(sum(life is not lives[host] for host, life in closed.items()))
    assert counted[0] == counted[1] <= 2 * 6


def test_an_empty_log_has_the_name_of_its_folder(tmp_path: Path) -> None:
    """In the report as in the live view; the name in the log comes first."""
    folder = tmp_path / "mine"
    write(folder, [])
    assert summarize_log(folder)["run"] == Live(folder).known()[1]["run"] == "mine"
    assert Live(write(folder, RUN)).known()[1]["run"] == summarize_log(folder)["run"] == "x"
    assert json.dumps(summarize_log(folder))
