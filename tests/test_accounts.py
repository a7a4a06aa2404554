"""The accounts of hosts: each second of each host is on one of them, and money follows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stories import RUN, STORY, Event, event, formed, generation, step, worker, write

from elastic_trainer.__main__ import main
from elastic_trainer.config import ConfigError
from elastic_trainer.events.ledger import Account
from elastic_trainer.events.run import Run
from elastic_trainer.events.summary import result_of, summarize
from elastic_trainer.views.prices import Price, Prices, costs, load


def test_each_second_of_a_host_is_on_the_account_of_what_it_did() -> None:
    """A founder, a host that is lost, a newcomer that first waits, and a member without a
    micro-batch."""
    result = summarize(STORY)
    assert {name: host["seconds"] for name, host in result["hosts"].items()} == {
        "a": {"booting": 5.0, "useful step": 6.0, "checkpoint pause": 0.2, "idle": 0.8,
              "noticing": 0.1, "forming": 0.5, "transfer": 0.4, "redone step": 1.0},
        "b": {"booting": 5.0, "useful step": 3.5, "checkpoint pause": 0.2, "idle": 0.3},
        "c": {"booting": 1.1, "standby": 0.9, "useful step": 2.0, "idle": 0.5, "forming": 0.5,
              "noticing": 0.1, "transfer": 0.4, "redone step": 1.0},
        "d": {"booting": 0.5, "idle": 1.5},
    }
    assert result["failures"] == 1 and result["stall_per_failure_s"] == 2.0
    assert result["ettr"] == round(6 / 14, 4)


def test_steps_that_a_checkpoint_does_not_have_are_redone_ones_and_a_gap_is_no_life() -> None:
    """All hosts die; one comes back, waits for the second, and both go on from an older step."""
    story = [*STORY[:13], event(8.0, "state.checkpoint_published", step=1),
             step(8.0, 2), worker(8.5, "gone", "a", exit_code=-9, reason="crashed"),
             worker(8.5, "gone", "b", exit_code=-9, reason="crashed"),
             event(8.5, "driver.host_removed", host="a"),
             event(8.5, "driver.host_removed", host="b"),
             event(9.0, "attempt.ended", verdict="failed"),
             event(10.0, "attempt.started", attempt=2),
             event(20.0, "driver.host_added", host="a", slots=1, attempt=2),
             worker(20.0, "started", "a", 2), worker(21.0, "ready", "a", 2),
             event(24.0, "driver.host_added", host="e", slots=1, attempt=2),
             worker(24.0, "started", "e", 3), worker(25.0, "ready", "e", 3),
             formed(25.0, 1, "start", "a/0/2", "e/0/3", attempt=2),
             generation(26.0, 1, 1, "checkpoint", 1.0, attempt=2),
             step(27.0, 1, attempt=2)]
    hosts = summarize(story)["hosts"]
    assert hosts["a"]["seconds"] == {"booting": 5.0, "useful step": 2.0, "redone step": 2.0,
                                     "waiting for capacity": 3.0, "restarting": 3.5}
    assert hosts["b"]["seconds"] == {"booting": 5.0, "useful step": 1.0, "redone step": 2.0,
                                     "restarting": 0.5}
    assert hosts["e"]["seconds"] == {"restarting": 2.0, "useful step": 1.0}
    (redone,) = [period for period in Run().read_all(story).closed().hosts.lane("b")
                 if period[0] is Account.REDONE]
    assert redone[1:] == (6.0, 8.0)


def stopped(times: int) -> list[Event]:
    """Return the events of a run with one loss, which a person stops and resumes."""
    events = STORY[:-1]
    for attempt in range(2, times + 2):
        at = 13.5 + 10_000 * (attempt - 1)
        behind = 13.5 if attempt == 2 else at - 9_992.0  # half a second after the last step
        events = [
            *events,
            event(behind + 0.5, "attempt.ended", exit_code=130, verdict="interrupted",
                  attempt=attempt - 1),
            event(at, "run.started", options={"horovodrun": ["-np", "2", "--min-np", "2"]}),
            event(at, "attempt.started", attempt=attempt),
            *(event(at, "driver.host_added", host=host, slots=1) for host in "acd"),
            *(worker(at, "started", host, attempt) for host in "acd"),
            *(worker(at + 5.0, "ready", host, attempt) for host in "acd"),
            formed(at + 5.5, 1, "start", *(f"{host}/0/{attempt}" for host in "acd")),
            generation(at + 6.5, 1, 4 + attempt, "checkpoint", 1.0, attempt=attempt),
            step(at + 7.5, 4 + attempt, attempt=attempt)]
    return events


def test_a_stop_by_a_person_is_no_loss() -> None:
    """One failure, however often the run was stopped and resumed: neither the boot of a resume nor
    the end of a stop is a part of its standstill or of the cost of losses."""
    prices = Prices(default=Price(spot=3600.0, on_demand=3600.0))
    results = [summarize(stopped(times)) for times in (0, 1, 3)]
    assert [it["failures"] for it in results] == [1, 1, 1]
    assert [it["stall_per_failure_s"] for it in results] == [2.0, 2.0, 2.0]
    losses = [costs(it, prices)["losses"] for it in results]
    assert losses == pytest.approx([losses[0]] * 3, abs=0.01) and losses[0] > 0
    assert [it["books"]["booting_s"] for it in results] == [5.0, 11.5, 24.5]
    assert [it["books"]["restarting_s"] for it in results] == [0.0, 0.0, 0.0]
    assert results[2]["books"]["stopped_s"] > 29_900


def test_failures_do_not_become_fewer_when_a_run_is_resumed() -> None:
    """A start is no attempt yet: the numbers of its first two events were 120, 119 and 120."""
    failed = [*RUN[:21], event(30.0, "run.started", options={})]
    assert [summarize([*failed, *more])["failures"] for more in (
        [], [event(31.0, "attempt.started", attempt=3)])] == [1, 1]
    assert summarize(RUN[:21])["failures"] == 1
    assert summarize(RUN[7:13])["failures"] == 0  # without the launcher


@given(st.lists(st.sampled_from([*RUN, *STORY])),
       st.lists(st.floats(0, 100), min_size=90, max_size=90))
def test_the_accounts_close_whatever_the_events(events: list[Event], times: list[float]) -> None:
    """The accounts add up to the lives, and so do the lanes, and the books of the run to its wall
    time; no second is negative. Also if the events make no sense, and the clock goes back."""
    run = Run().read_all(item | {"time": time} for item, time in zip(events, times, strict=False))
    result, accounts = result_of(run), run.closed().hosts
    assert sum(result["books"].values()) == pytest.approx(result["wall_s"], abs=0.01)
    assert 0.0 <= result["goodput"] <= 1.0 and min(result["books"].values()) >= 0.0
    lived_s = sum(end - start for life in accounts.lives.values() for _, start, end in life.periods)
    assert sum(accounts.totals().values()) == pytest.approx(lived_s, abs=1e-6)
    assert sum(end - start for host in accounts.lives
               for _, start, end in accounts.lane(host)) == pytest.approx(lived_s, abs=1e-6)
    assert all(seconds > -1e-6 for seconds in accounts.totals().values())


def test_the_money_of_the_accounts_adds_up_to_the_cost() -> None:
    """A host's own price goes before that of its type, and that before the default."""
    kind = event(0.0, "discovery.host_in", host="c", id="i-1", why="", type="p3.2xlarge")
    result = summarize([STORY[0], kind, *STORY[1:]])
    prices = Prices(hosts={"b": Price(spot=360, on_demand=720)},
                    types={"p3.2xlarge": Price(spot=36, on_demand=72)},
                    default=Price(spot=3.6, on_demand=3600))
    found = costs(result, prices)
    a, b, c, d = (sum(result["hosts"][name]["seconds"].values()) for name in "abcd")
    assert found["cost"] == pytest.approx(((a + d) * 3.6 + b * 360 + c * 36) / 3600)
    assert sum(found["by_account"].values()) == pytest.approx(found["cost"])
    assert found["per_million_samples"] == pytest.approx(found["cost"] / 48e-6)
    assert found["losses"] == pytest.approx(2.0 * 3.6 / 3600 + 2.0 * 36 / 3600)
    assert found["saved"] == pytest.approx(found["on_demand"] - found["cost"])
    with pytest.raises(ConfigError, match=r"neither host a nor type unknown.*\[default\]"):
        costs(result, Prices())


@pytest.mark.parametrize(("text", "why"), [
    ("[default]\nspot = 1", "default.on_demand is wrong"),
    ("[default]\nspot = -1\non_demand = 2", "default.spot is wrong"),
    ("[host]\nspot = 1", "host is wrong"), ("[default", "is not valid TOML")])
def test_prices_that_are_wrong_are_named(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "prices").write_text(text)
    with pytest.raises(ConfigError, match=why):
        load(tmp_path / "prices")


def test_a_report_is_for_programs_and_for_pages_and_of_two_runs(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON is result.json's content and the costs; Markdown takes no text for a mark of its own."""
    prices = tmp_path / "prices.toml"
    prices.write_text("[default]\nspot = 1\non_demand = 3\n")
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, events in zip(folders, (STORY, RUN), strict=True):
        write(folder, [item | {"run": f"{folder.name}|"} for item in events])
    words = [*map(str, folders), "--prices", str(prices)]
    assert main(["report", *words, "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)
    assert one["costs"]["cost"] == pytest.approx(sum(one["host_seconds"].values()) / 3600)
    assert (one["steps"], two["steps"]) == (6, 4)
    assert main(["report", *words, "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "|  | run one\\| | run two\\| |" and lines[1] == "|---|---|---|"
    assert "| training | finished: 6 steps | finished: 4 steps |" in lines
    assert main(["report", *words]) == 0
    assert "finished: 6 steps" in capsys.readouterr().out
