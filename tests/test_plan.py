"""The laws of `plan`: what a fleet without processes does, and what is advised."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stories import RUN, event, generation, step

from elastic_trainer.commands.command import main
from elastic_trainer.config import ConfigError, Launch, Limits
from elastic_trainer.events.log import Events
from elastic_trainer.events.summary import summarize
from elastic_trainer.rehearse.advice import (
    Choice,
    Fleet,
    Planner,
    Question,
    bounds,
    microbatches_for,
)
from elastic_trainer.rehearse.costs import (
    Costs,
    costs_of,
    fitted,
    interval_of,
    read_costs,
    with_values,
)
from elastic_trainer.rehearse.entering import Draws, Entering
from elastic_trainer.rehearse.model import Outcome, Policy, last_published_s, simulate, world_of
from elastic_trainer.rehearse.outcome import larger, played_of
from elastic_trainer.rehearse.plan import of_batch, short
from elastic_trainer.rehearse.pools import (
    Lives,
    Pool,
    lives_of,
    of_rows,
    parse_pool,
    parse_storm,
    repeated,
    rows_of,
)
from elastic_trainer.rehearse.trace import parse_trace, read_trace
from elastic_trainer.renamed import present
from elastic_trainer.state.checkpoints.cadence import Cadence
from elastic_trainer.training.timing import Timing

DATA = Path(__file__).parent / "data"
Plan = Callable[..., dict[str, Any]]
COSTS = Costs(loss_s=(2.0,), change_s=(1.0,), boot_s=(10.0,), first_boot_s=(10.0,),
              restart_boot_s=(10.0,), standby_s=(0.5,), give_up_s=(7.0,), enter_s=(3.0,),
              listed_s=(0.0,), checkpoint_s=0.0, publish_s=(5.0,), microbatches=8, microbatch_s=0.5,
              grow_s=0.0)
POLICY = Policy(microbatches=8, checkpoint=Cadence(seconds=100.0), first=4)
BOOTED = 13.0
"""Boot and entering."""


class Change(NamedTuple):
    """A moment at which hosts come or go. The oldest ones go."""

    time_s: float
    joined: int = 0
    noticed: int = 0
    lost: int = 0
    crashed: int = 0


def lives(*changes: Change) -> Lives:
    """Return the lives of hosts with these changes."""
    here, found = list[tuple[float, bool]](), list[tuple[float, float, bool, bool]]()
    for at, joined, noticed, lost, crashed in changes:
        for number in range(min(len(here), noticed + lost + crashed)):
            since, again = here.pop(0)
            found.append((since, at, number < noticed, again))
        here += [(at, False)] * joined + [(at, True)] * crashed
    return Lives.of([*found, *((since, math.inf, False, again) for since, again in here)])


START = Change(0.0, joined=4)


def after(*changes: Change, seconds: float = 1013.0, costs: Costs = COSTS,
          policy: Policy = POLICY) -> Outcome:
    """Return what four hosts do with these changes."""
    return simulate(lives(START, *changes), costs, policy, seconds)


# --- the model ------------------------------------------------------------------------------------

def test_an_undisturbed_run_loses_only_its_checkpoints() -> None:
    """Four workers own two micro-batches each, so a step takes a second."""
    alone = after()
    assert (alone.goodput, alone.steps, alone.attempts) == (pytest.approx(1.0),
                                                            pytest.approx(1000.0), 1)
    paid = after(costs=replace(COSTS, checkpoint_s=1.0))
    assert paid.goodput == pytest.approx(100.0 / 101.0)


def test_each_change_costs_its_pause_once() -> None:
    """A loss, a notice and a newcomer cost their own pauses; two at one moment cost one."""
    lost = after(Change(200.0, lost=1))
    assert lost.pausing_s == 2.0 and lost.steps == pytest.approx(187.0 + 811.0 / 1.5)
    assert after(Change(200.0, noticed=1)).pausing_s == 1.0
    assert after(Change(200.0, joined=1)).pausing_s == 1.0
    assert after(Change(200.0, lost=2)).pausing_s == 2.0
    assert after(Change(200.0, lost=1), Change(201.0, lost=1)).pausing_s == 3.0
    larger = replace(COSTS, grow_s=0.5, world=2)
    assert after(Change(200.0, lost=1), costs=larger).pausing_s == 2.5


def test_newcomers_that_boot_at_a_time_enter_together() -> None:
    """One that stands ready waits for another one that boots, at most settle_s."""
    assert after(Change(200.0, joined=1), Change(205.0, joined=1)).changes == 1
    assert after(Change(200.0, joined=1), Change(250.0, joined=1)).changes == 2
    alone = replace(POLICY, limits=Limits(settle_s=1.0))
    assert after(Change(200.0, joined=1), Change(205.0, joined=1), policy=alone).changes == 2


def entered(*hosts: tuple[float, float, float], boots: Sequence[float]) -> list[float]:
    """Return when the workers of hosts with (start, gone, lost) enter. A restart begins 7 s after
    the end of an attempt, and boots take 10 s in it."""
    starts, gone, lost = (list(column) for column in zip(*hosts, strict=True))
    draws = Draws(boots=boots, attempts=[(10.0, 7.0, 0.0)])
    return Entering(starts, gone, lost, draws, settle_s=10.0).run(1000.0)


def test_a_newcomer_waits_ten_seconds_for_others_that_boot() -> None:
    """Also for one that is not ready by then, or that is lost while it boots."""
    stays, never = (0.0, math.inf, math.inf), math.inf
    assert entered(stays, (50.0, never, never), (55.0, never, never),
                   boots=[10.0, 10.0, 30.0]) == [10.0, 70.0, 85.0]
    assert entered(stays, (50.0, never, never), (55.0, 62.0, 62.0),
                   boots=[10.0, 10.0, 30.0]) == [10.0, 62.0, never]


def test_hosts_under_notice_keep_the_state_until_they_are_lost() -> None:
    """A newcomer that is ready before then continues their attempt. One that is not starts again in
    the next one, and so does one that stands ready when the last member is lost."""
    last, never = (0.0, 100.0, 112.0), math.inf
    assert entered(last, (95.0, never, never), boots=[10.0, 15.0]) == [10.0, 110.0]
    assert entered(last, (95.0, never, never), boots=[10.0, 20.0]) == [10.0, 129.0]
    sudden, slow = (0.0, 100.0, 100.0), (89.0, never, never)
    assert entered(sudden, (88.0, never, never), slow, boots=[10.0, 10.0, 30.0]) == [
        10.0, 117.0, 117.0]


def test_the_loss_of_everybody_goes_back_to_the_last_checkpoint() -> None:
    """That was published: not to one on its way. Then the next attempt starts from it."""
    back, steps = Change(300.0, joined=4), replace(POLICY, checkpoint=Cadence(steps=100))
    gone = after(Change(288.0, lost=4), back, policy=steps)
    assert gone.redone_s == pytest.approx(75.0) and gone.attempts == 2
    assert gone.waiting_s == pytest.approx(300.0 + BOOTED - 288.0)
    on_its_way = after(Change(216.0, lost=4), back, policy=steps)
    assert on_its_way.redone_s == pytest.approx(103.0)
    drained = after(Change(200.0, noticed=1), Change(216.0, lost=3), back, policy=steps)
    assert drained.redone_s == pytest.approx(15.0)
    redone = [simulate(lives(START, Change(288.0, lost=4), back), COSTS, POLICY, 1013.0,
                       seed).redone_s for seed in range(40)]
    assert redone == pytest.approx([75.0] * 40, abs=2.0)


def test_a_loss_drops_the_checkpoint_on_its_way_and_the_next_one_begins_soon() -> None:
    """Two seconds after the beginning of the dropped one. A leave under notice begins one at once,
    or as soon as none is on its way."""
    def last(leaves: list[float], losses: list[float], whole_s: float = 98.0) -> float:
        return last_published_s(whole_s, leaves, losses, lambda begun_s: begun_s + 10.0,
                                lambda: 5.0, first_s=3.0, usual_s=10.0)

    assert last([], []) == 93.0 and last([], [], whole_s=97.9) == 83.0
    assert last([], [44.0]) == 85.0 and last([], [47.0]) == 87.0 and last([], [48.0]) == 93.0
    assert last([40.0], []) == 90.0 and last([44.0], []) == 88.0
    assert last([], [], whole_s=2.0) == last([], [], whole_s=7.0) == 0.0
    assert 985.0 < last([], [], whole_s=1000.0) <= 995.0
    assert last([990.0], [], whole_s=1000.0) == 990.0


def test_nothing_is_done_again_if_all_leave_under_notice() -> None:
    """They write a checkpoint first."""
    left = after(Change(288.0, noticed=4), Change(300.0, joined=4))
    assert left.redone_s == 0.0 and left.attempts == 2


def test_hosts_that_come_before_the_driver_gives_up_boot_in_the_next_attempt() -> None:
    """A worker of an attempt that has no state left is no worker of the next one."""
    early = after(Change(288.0, lost=4), Change(289.0, joined=4))
    assert early.waiting_s == pytest.approx(7.0 + BOOTED)


def test_an_attempt_waits_for_np_workers_for_a_minute() -> None:
    """Then fewer are enough, but at least --min-np."""
    few = after(Change(288.0, lost=4), Change(300.0, joined=3))
    assert few.waiting_s == pytest.approx(300.0 + 10.0 + 60.0 + 3.0 - 288.0)
    never = after(Change(288.0, lost=4), Change(300.0, joined=3),
                  policy=replace(POLICY, fewest=4))
    assert never.attempts == 1


def test_a_standby_takes_the_place_of_a_worker_that_crashed() -> None:
    """Without one the host is back after a boot."""
    crashed = Change(200.0, crashed=1)
    with_it = after(crashed)
    without = after(crashed, policy=replace(POLICY, standby=False))
    assert with_it.steps > without.steps and with_it.changes == without.changes == 2


CHANGES = st.lists(st.tuples(st.floats(1.0, 900.0), st.integers(0, 3), st.integers(0, 2),
                             st.integers(0, 2), st.integers(0, 1)), max_size=12)


@settings(max_examples=60, deadline=None)
@given(CHANGES)
def test_books_close_and_goodput_is_a_part_whatever_the_changes(
        rows: list[tuple[float, int, int, int, int]]) -> None:
    """Kept, redone, pausing and waiting add up to the time since the first generation."""
    found = after(*sorted(Change(*row) for row in rows))
    assert 0.0 <= found.goodput <= 1.0
    assert min(found.steps, found.redone_s, found.pausing_s, found.waiting_s) >= 0.0
    wall_s = 1013.0 - found.began_s
    others_s = found.redone_s + found.pausing_s + found.waiting_s
    assert found.goodput * wall_s + others_s == pytest.approx(wall_s, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(CHANGES, st.floats(0.0, 900.0))
def test_the_workers_that_stand_ready_are_those_that_have_booted_and_are_not_lost(
        rows: list[tuple[float, int, int, int, int]], moment: float) -> None:
    """As counted host by host, as long as not everybody is lost."""
    hosts = lives(Change(0.0, joined=40), *sorted(Change(*row) for row in rows))
    alone = replace(POLICY, limits=Limits(settle_s=0.0), standby=False)
    world = world_of(hosts, replace(COSTS, publish_s=(0.0,)), alone, 1000.0, 0)
    at = np.searchsorted(world.times, moment, side="right") - 1
    assert (world.sizes[at] if at >= 0 else 0) == sum(
        joined + 10.0 <= moment < gone for joined, gone, *_ in zip(*hosts[:4], strict=True))


# --- costs ----------------------------------------------------------------------------------------

def test_costs_are_those_of_the_log() -> None:
    """Pauses by the reason of their generation, boots, restarts, checkpoints and steps."""
    formed = event(9.7, "driver.generation_formed", generation=2, reason="death")
    ended = event(9.95, "worker.pause_ended", generation=2, size=2, duration_s=0.4)
    published = {"pause_s": 0.05, "duration_s": 0.3}
    told = [one | published if one["event"] == "state.checkpoint_published" else one
            for one in RUN]
    costs = costs_of(sorted([*told, formed, ended], key=lambda one: one["time"]))
    assert costs.loss_s == (1.0,) and costs.change_s == Costs().change_s
    assert costs.boot_s == costs.first_boot_s == costs.restart_boot_s == (4.0,)
    assert costs.give_up_s == (2.0,)
    assert (costs.checkpoint_s, costs.publish_s) == (0.05, (0.3,))
    assert (costs.microbatches, costs.batch, costs.fixed_s, costs.microbatch_s) == (2, 8, 0.0, 1.0)
    assert "loss_s" in costs.measured and "change_s" not in costs.measured


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 2.0), *[st.booleans()] * 3), max_size=60))
def test_the_costs_that_auto_weighs_are_those_of_the_training(
        rows: list[tuple[float, bool, bool, bool]]) -> None:
    """What is read of a log is what rank 0 took a checkpoint to cost when the next one began."""
    timing, is_up, known = Timing(Cadence(), Launch(), Events(None)), False, list[float]()
    told: list[dict[str, Any]] = [event(0.0, "attempt.started")]
    for number, (step_s, enters, begins, ends) in enumerate(rows, 1):
        if enters:
            timing.enter()
            told.append(generation(number - 0.5, number, number, "memory", 0.0))
            is_up = False
        told.append(step(float(number), number) | {"step_s": step_s})
        if begins and not is_up:
            known += [timing.cost_s()] if timing.pause_s else []
            timing.begun(number, 0.25)
            told[-1] |= {"checkpoint_s": 0.25}
            is_up = True
        timing.step(step_s, is_up)
        if ends and is_up:
            told.append(event(number + 0.5, "state.checkpoint_published", step=number))
            is_up = False
    known += [timing.cost_s()] if timing.pause_s else []
    assert costs_of(told).auto_s == pytest.approx(tuple(known))


@pytest.mark.parametrize("step_s", [1.0, 1.75])
def test_a_slow_first_step_behind_a_pause_is_no_part_of_it(step_s: float) -> None:
    """Goodput counts it as a step. What is lost is the time since the last one: a second here, with
    the half of a step that was in flight."""
    ended = event(9.95, "worker.pause_ended", generation=2, size=2, duration_s=step_s)
    last = step(10.0 + step_s, 3, generation=2, step_s=step_s)
    told = [*(one for one in RUN if one["time"] < 9.9), generation(9.9, 2, 3, "memory", step_s),
            ended, last]
    assert costs_of(told).change_s == pytest.approx((1.0,))


def test_costs_of_several_runs_are_drawn_from_all_of_them(tmp_path: Path) -> None:
    """The start of another run, or of this one by a person, is no restart: what lies between is no
    cost. Runs of different scripts are refused."""
    once, names = costs_of(RUN), ("first_boot_s", "restart_boot_s", "give_up_s", "publish_s")
    later = [one | {"time": one["time"] + 5000.0} for one in RUN]
    for name in names:
        assert getattr(costs_of([*RUN, *later]), name) == 2 * getattr(once, name)
    for name, microbatches in ("a", 2), ("b", 4):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_text("".join(
            json.dumps(one | {"microbatches": microbatches} if "microbatches" in one else one)
            + "\n"
            for one in RUN))
    assert read_costs([tmp_path / "a"] * 2).publish_s == 2 * once.publish_s
    with pytest.raises(ConfigError, match="Name runs of one script"):
        read_costs([tmp_path / "a", tmp_path / "b"])


def test_the_time_of_a_step_is_fitted_over_the_worlds() -> None:
    """Worlds of 1, 2 and 4 own 8, 4 and 2 of 8 micro-batches."""
    exact = {size: [0.3 + 0.1 * 8 / size] * 5 for size in (1, 2, 4)}
    assert fitted(exact, 8) == (pytest.approx(0.3), pytest.approx(0.1))
    assert fitted({4: [0.5, 0.5]}, 8) == (0.0, pytest.approx(0.25))
    assert fitted({1: [0.1], 4: [1.0]}, 8)[1] == 0.0
    assert Costs(microbatches=8, fixed_s=0.3, microbatch_s=0.1).step_s(
        np.array([4, 3]), 16) == pytest.approx([0.3 + 4 * 0.05, 0.3 + 6 * 0.05])


def test_the_interval_of_checkpoints_is_that_of_the_run() -> None:
    """In steps, though a notice brings checkpoints between; in seconds, if the steps differ."""
    assert interval_of([(50, 1.0), (100, 2.0), (133, 2.5), (150, 3.0), (200, 4.0)]) == "50"
    assert interval_of([(48, 10.0), (101, 20.0), (149, 30.0), (203, 40.0)]) == "10s"
    assert interval_of([(50, 1.0), (100, 2.0)]) == ""
    told = event(0.0, "job.described", microbatches=8, global_batch=8, checkpoint_every="auto")
    assert costs_of([told]).interval == "auto"
    for text in ("auto", "50", "30s", "1.5s", "0.5%"):
        assert str(Cadence.parse(text)) == text


def test_the_time_between_steps_is_no_useful_time() -> None:
    """It lowers goodput, as in the report."""
    slow = [event(0.0, "job.described", **{
        "dataset_size": 80, "global_batch": 8, "microbatches": 8, "seed": 0}),
        generation(0.0, 1, 0, "fresh", 0.0) | {"size": 4},
        *(step(2.0 * number, number) | {"size": 4} for number in range(10))]
    costs = costs_of(slow)
    assert costs.between_s == 1.0
    assert simulate(lives(START), replace(costs, checkpoint_s=0.0), POLICY, 1000.0).goodput == (
        pytest.approx(0.5))


def recorded(name: str) -> list[dict[str, Any]]:
    """Return the events of a real replay on local hosts: tests/bench/plan.py --keep."""
    with gzip.open(DATA / "replays" / f"{name}.jsonl.gz") as lines:
        return [present(json.loads(line)) for line in lines]


def forecasts(name: str, costs: Costs) -> list[Outcome]:
    """Return what the model says of the trace of a recorded replay, twenty times."""
    events = recorded(name)
    costs = replace(costs, first_boot_s=costs_of(events).first_boot_s)  # then the clock starts
    fleet = of_rows(read_trace(DATA / "replays" / f"{name}.csv", may_end_empty=True))
    policy = Policy(microbatches=costs.microbatches, checkpoint=Cadence.parse(costs.interval),
                    first=1,
                    standby=False)
    wall_s = summarize(events)["wall_s"]
    return [simulate(fleet, costs, policy, wall_s, seed) for seed in range(20)]


@pytest.mark.parametrize(("name", "zeros"), [
    ("zeros", 3), ("none", 0), ("costs-5s", 10), ("blind1", 2), ("blind2", 1), ("blind3", 5),
    ("blind4", 4), ("blind5", 1)])
def test_the_model_has_the_goodput_of_a_real_replay(name: str, zeros: int) -> None:
    """Within two points, by the costs of that replay, and each account within 2 % of the time. The
    real launcher met kills, notices, newcomers and losses of everybody."""
    events = recorded(name)
    result, costs = summarize(events), costs_of(events)
    found = forecasts(name, costs)
    assert np.mean([one.goodput for one in found]) == pytest.approx(result["goodput"], abs=0.02)
    assert result["attempts"] == 1 + zeros
    paused_s = sum(sum(getattr(costs, one)) for one in ("loss_s", "change_s")
                   if one in costs.measured)
    for account, seconds in (("waiting_s", result["books"]["restarting_s"]),
                             ("pausing_s", paused_s)):
        of_plan = np.mean([getattr(one, account) for one in found])
        assert of_plan == pytest.approx(seconds, abs=0.02 * result["wall_s"])


@pytest.mark.parametrize(("name", "others"), [
    ("zeros", ["costs"]), ("none", ["costs"]), ("blind2", ["costs-5s", "blind1"]),
    ("blind3", ["costs-5s", "blind1", "blind2"]),
    ("blind4", ["costs-5s", "blind1", "blind2", "blind3"]),
    ("blind5", ["costs-5s", "blind1", "blind2", "blind3", "blind4"])])
def test_a_real_replay_has_the_goodput_that_was_forecast(name: str, others: list[str]) -> None:
    """Within three points, by the costs of the replays before it. The storms blind2 to blind5 were
    drawn after the model was finished. blind1 is not here: it was 3.9 points off, because the
    machine was busy in the replay before it, where workers booted in 11 s instead of 6 s."""
    costs = costs_of(chain.from_iterable(map(recorded, others)))
    goodput = summarize(recorded(name))["goodput"]
    found = [one.goodput for one in forecasts(name, costs)]
    assert np.mean(found) == pytest.approx(goodput, abs=0.03)


# --- fleets ---------------------------------------------------------------------------------------

def test_a_pool_loses_by_its_rate_and_never_more_than_it_has() -> None:
    """The same seed gives the same changes; bulk and zero take several hosts at once."""
    pool = Pool(hosts=50, loss=0.2, bulk=0.4, zero=0.02, notice=0.5, replace=60.0)
    first, same, other = (lives_of(pool, 200 * 3600.0, seed) for seed in (1, 1, 2))
    assert all((one == two).all() for one, two in zip(first[:4], same[:4], strict=True))
    assert first.joined.size != other.joined.size and first.most == 50
    assert (first.gone > first.joined).all()
    losses = np.unique(first.gone[np.isfinite(first.gone)], return_counts=True)[1]
    assert losses.sum() / 200.0 / 50.0 == pytest.approx(0.2, rel=0.15)
    assert losses.max() > 40 and 0.3 < (losses > 1).mean() < 0.55
    assert first.hours(200 * 3600.0) == pytest.approx(200 * 50, rel=0.05)


def test_a_trace_is_repeated_from_any_place() -> None:
    """The number of hosts is always that of the trace."""
    trace = lives(Change(0.0, joined=3), Change(100.0, lost=2), Change(200.0, joined=4))
    for seed in range(20):
        found = repeated(trace, 1000.0, seed)
        sizes = [int(((found.joined <= at) & (found.gone > at)).sum()) for at in range(0, 1000)]
        assert set(sizes) == {3, 1} and 450 < sizes.count(3) < 550
        assert (found.gone > found.joined).all() and found.most == 3


def test_a_host_leaves_the_world_once() -> None:
    """At its notice, or where it has none at its loss. Changes at one moment are one."""
    rows = parse_trace("time_s,event,host\n0,join,a\n0,join,b\n0,join,c\n5,notice,a\n"
                       "9,loss,b\n125,loss,a\n", "a test")
    assert sorted(zip(*(column.tolist() for column in of_rows(rows)[:4]), strict=True)) == [
        (0.0, 5.0, True, False), (0.0, 9.0, False, False), (0.0, math.inf, False, False)]


def test_a_trace_that_ends_without_a_host_is_planned() -> None:
    """A run that finished while its last host was taken leaves such a one, and replay does not
    play it."""
    empty = "time_s,event,host\n0,join,a\n50,loss,a\n"
    rows = parse_trace(empty, "a test", may_end_empty=True)
    assert of_rows(rows).gone.tolist() == [50.0]
    with pytest.raises(ConfigError, match="ends without a host"):
        parse_trace(empty, "a test")


def test_a_storm_has_the_distribution_of_the_one_that_replay_plays() -> None:
    """Without names of hosts it is drawn faster."""
    storm, seconds = parse_storm("rate=20/h,bulk=0.3,zero=0.05,notice=0.5,hours=400"), 400 * 3600.0
    found = []
    for fleet in of_rows(rows_of(storm, 12)), lives_of(storm.pool(12), seconds, 1):
        is_gone = np.isfinite(fleet.gone)
        counts = np.unique(fleet.gone[is_gone], return_counts=True)[1]
        found.append([counts.size, counts.sum(), (counts > 2).sum(), (counts > 4).sum(),
                      fleet.noticed.sum(), fleet.hours(seconds)])
    assert found[0] == pytest.approx(found[1], rel=0.15)


# --- advice ---------------------------------------------------------------------------------------

@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Plan:
    """Return what `plan` prints as JSON, which each program reads, for the words of a text."""
    def plan(text: str, *options: str) -> dict[str, Any]:
        assert main(["plan", *text.split(), *options, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        return found

    return plan


CHOICE = Choice(name="", goodput=(0.5,) * 3, samples_per_hour=(9.0,) * 3, million=(1.0,) * 3)


def advice(fleet: Fleet, policy: Policy = POLICY, hours: float = 50.0, seeds: int = 4) -> Any:
    """Return the questions by name."""
    planner = Planner(fleet, COSTS, policy, hours * 3600.0, seeds, "100s")
    return {one.name: one for one in planner.questions()}


def test_each_question_takes_the_choice_that_is_cheapest() -> None:
    """One micro-batch a host leaves half the fleet idle as soon as one host is lost. A spare host,
    or other micro-batches, mend that. The cheap pool is the better one."""
    dear = Pool(name="dear", hosts=8, price=2.0, loss=0.5)
    cheap = Pool(name="cheap", hosts=8, price=1.0, loss=0.5, crash=0.2, zero=0.05)
    found = advice(Fleet(pools=(dear, cheap)), replace(POLICY, microbatches=16, standby=False))
    assert found["microbatches"].best.name != "16"
    assert found["spare hosts"].best.name == "17 hosts"
    assert found["pools"].best.name == "cheap alone"
    assert found["standbys"].best.name == "one a host"
    assert "cheap alone instead of the given mix" in found["pools"].advice()
    for question in found.values():
        for choice in question.choices:
            low, mean, high = choice.goodput
            assert 0.0 <= low <= mean <= high <= 1.0


def test_the_interval_of_checkpoints_follows_the_losses_of_everybody() -> None:
    """A fleet that is never lost gives no reason to choose, and one that is lost often does."""
    safe = advice(Fleet(pools=(Pool(hosts=8, loss=0.05),)))["checkpoint_every"]
    assert safe.best is safe.given and "0 of 4 repetitions" in safe.advice()
    wild = advice(Fleet(pools=(Pool(hosts=8, loss=1.0, zero=0.5),)))["checkpoint_every"]
    assert wild.best.name in ("auto", "10s", "30s") and wild.gain(wild.best) > 0.001


def test_a_month_of_a_thousand_hosts_is_rehearsed(planned: Plan) -> None:
    """All questions, as one JSON object."""
    found = planned("--hosts 1000 --storm rate=6/h,bulk=0.4,zero=0.002,seed=7 --seeds 2")
    assert found["seconds"] == 30 * 86_400 and found["hosts"] == 1000
    assert found["forecast"]["changes"] > 3000 and 0.9 < found["forecast"]["goodput"][1] < 1.0
    assert set(found["advice"]) == set(found["questions"]) == {
        "checkpoint_every", "microbatches", "standbys", "spare hosts", "pools"}


def test_the_table_has_each_choice_and_a_sentence_for_each_question(
        capsys: pytest.CaptureFixture[str]) -> None:
    """The pools as they are given on the command line."""
    assert main(["plan", "--pool", "name=a,hosts=6,price=0.9,loss=0.1/h,crash=0.1/h,zero=0.1",
                 "--pool", "name=b,hosts=4,price=2,loss=0.01/h,replace=3min", "--hours", "40",
                 "--seeds", "3", "--checkpoint-every", "20s", "--batch", "64"]) == 0
    output = capsys.readouterr().out
    assert "…" not in output.partition("The price")[0]  # of 80 columns
    for text in ("20s (given)", "a alone", "evenly mixed", "one a host", "microbatches: ",
                 "pools: ", "standbys: ", "spare hosts: ", "checkpoint_every: "):
        assert text in output, text


def test_a_trace_is_planned_by_the_costs_of_a_run(tmp_path: Path, planned: Plan) -> None:
    """Costs, micro-batches and samples are those of the run's event log, the time that of the
    trace."""
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in RUN))
    found = planned("--np 4 --price 2 --seeds 2", "--trace", str(DATA / "replays" / "zeros.csv"),
                    "--costs", str(tmp_path))
    assert {"microbatch_s", "boot_s", "batch"} <= set(found["measured"])
    assert found["microbatches"] == 2
    assert found["hosts"] == 4 and 160 < found["seconds"] < 300
    assert found["forecast"]["attempts"] == 4.0
    assert not found["questions"]["spare hosts"] and not found["questions"]["standbys"]
    hours = found["forecast"]["million"][1] * found["forecast"]["samples_per_hour"][1] / 1e6 / 2
    assert 3.0 < hours < 6.0  # those under notice included


def test_removed_nodes_of_a_trace_have_the_notice_that_is_given(
        tmp_path: Path, planned: Plan) -> None:
    """As in replay: with none their losses come by surprise, and cost more steps."""
    trace = tmp_path / "trace.csv"
    trace.write_text("".join(f"{1000 * at},{what},{node}\n" for at, what, node in (
        (0, "add", "a"), (0, "add", "b"), (900, "remove", "a"), (900, "remove", "b"),
        (1800, "add", "a"), (3600, "add", "b"))))
    told, untold = (planned(f"--notice {seconds} --checkpoint-every 600s --seeds 2", "--trace",
                            str(trace))["forecast"]["goodput"][1] for seconds in (120, 0))
    assert told > untold + 0.03


@pytest.mark.parametrize(("options", "text"), [
    ("", "given by 0 options"),
    ("--storm calm", "--hosts is not given"),
    ("--storm rate=x --hosts 4", "rate=x"),
    ("--storm rate=9/h,bulk=0.9,zero=0.4 --hosts 4", "bulk + zero 1.3"),
    ("--pool hosts=4,loss=often", "loss=often"),
    ("--pool hosts=0", "no whole number of hosts"),
    ("--pool hosts=4,notice=2", "notice 2"),
    ("--pool hosts=4 --pool hosts=5", "same name"),
    ("--pool hosts=4 --cost loss=1", "'loss=1'"),
    ("--pool hosts=4 --costs /nowhere", "no events.jsonl"),
    ("--pool hosts=4 --checkpoint-every often", "'often'"),
    ("--pool hosts=4 --days 0", "is 0 s"),
    ("--pool hosts=4 --batch 0", "--batch is 0"),
    ("--trace /nowhere", "cannot be read"),
    ("--pool hosts=4 --days nan", "--days is nan"),
    ("--pool hosts=4 --days inf", "--days is inf"),
    ("--pool hosts=4 --hours 1e300", "--hours is 1e+300"),
    ("--pool hosts=4 --days 3 --hours -2", "--hours is -2"),
    ("--storm calm --hosts 10 --min-np 50", "so it would never train"),
    ("--pool hosts=4 --min-np 0", "--min-np is 0"),
    ("--pool hosts=4 --np -5", "--np is -5"),
    ("--pool hosts=4 --microbatches 0", "--microbatches is 0"),
    ("--pool hosts=4 --seeds 0", "--seeds is 0"),
    ("--storm calm --hosts 4 --price -1", "--price is -1"),
    ("--storm calm --hosts 4 --price nan", "--price is nan"),
    (f"--storm calm --hosts {'9' * 400}", "--hosts is 999"),
    ("--storm rate=9/h,hours=0 --hosts 4", "is 0 s"),
    ("--pool hosts=4,price=0", "price=0"),
    ("--pool hosts=4 --price 2", "--price is given"),
    ("--pool hosts=4 --hosts 2", "--hosts is given"),
    ("--pool hosts=4 --notice 2", "--notice is given"),
    ("--trace ZEROS --notice -1", "--notice is -1"),
    ("--pool hosts=1e999", "hosts inf"),
    ("--pool hosts=4,loss=1e300/h", "loss 1e+300"),
    ("--pool hosts=4,bulk=0.4/h", "bulk=0.4/h"),
    ("--pool hosts=4,price=2min", "price=2min"),
    ("--pool hosts=4,loss=1e6/h", "Use fewer --seeds"),
    ("--pool hosts=1,rate=60/h,zero=1 --days 300", "min of CPU"),
    ("--trace ZEROS --days 9999", "min of CPU"),
    ("--pool hosts=4 --cost microbatch_s=0", "A step takes 0 s"),
    ("--pool hosts=4 --cost loss_s=-1", "from 0 to"),
    ("--pool hosts=4 --cost loss_s=nan", "from 0 to"),
    ("--pool hosts=4 --cost batch=0", "whole number from 1"),
    ("--pool hosts=4 --cost microbatches=1.5", "whole number from 1"),
    (f"--pool hosts=4 --checkpoint-every {'9' * 400}", "--checkpoint-every is 999"),
])
def test_a_wrong_option_is_refused_with_its_remedy(options: str, text: str,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence of fact, and one with what to give."""
    words = options.replace("ZEROS", str(DATA / "replays" / "zeros.csv")).split()
    assert main(["plan", *words]) == 2
    assert text in capsys.readouterr().err


def test_a_time_too_short_for_a_step_has_no_price(planned: Plan,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    """It is said first, and nothing is advised. JSON has null."""
    options = "--pool hosts=4 --hours 0.001 --seeds 2"
    assert main(["plan", *options.split()]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "WARNING: 2 of 2 repetitions finish no step" in output and "∞" in output
    assert "microbatches: no choice finishes a step" in output and "keep" not in output
    assert planned(options)["forecast"]["million"] == [None, None, None]


def test_a_choice_that_trains_is_advised_where_the_given_one_does_not() -> None:
    """The price of no samples is infinite, and never one to choose."""
    never, cheap, dear = (replace(CHOICE, name=name, million=(price,) * 3, is_given=price > 9)
                          for name, price in (("10s", math.inf), ("30s", 1.0), ("60s", 2.0)))
    question = Question(name="checkpoint_every", choices=(never, cheap, dear))
    assert question.best is cheap
    assert "take 30s instead of 10s, which does not finish a step" in question.advice()
    given = replace(question, choices=(replace(never, is_given=False),
                                       replace(dear, is_given=True)))
    assert given.best.name == "60s" and "keep 60s" in given.advice()
    assert bounds([1.0, math.inf]) == (1.0, math.inf, math.inf)


@pytest.mark.parametrize("fleet", ["--storm rate=12/h,replace=0,zero=0.1 --hosts 4",
                                   "--pool hosts=4,loss=1/h,replace=0,zero=0.1"])
def test_hosts_may_return_at_once(fleet: str, planned: Plan) -> None:
    """For a storm and for a pool, as in replay."""
    found = planned(f"{fleet} --hours 9 --seeds 2")["forecast"]
    assert found["changes"] > 0 and 0.5 < found["goodput"][1] < 1.0


def test_nothing_is_lost_after_the_hours_of_a_storm(planned: Plan) -> None:
    """A plan is as long as the storm, unless it has another time."""
    changes = dict[str, float]()
    for name, options in (("1", ",hours=1"), ("10", ",hours=1 --hours 10"), ("all", " --hours 10")):
        found = planned(f"--hosts 8 --seeds 3 --storm rate=30/h,replace=60{options}")
        changes[name] = found["forecast"]["changes"]
        assert found["seconds"] == 3600 * (1 if name == "1" else 10)
    assert 0.0 < changes["1"] <= changes["10"] < changes["1"] + 9 and changes["all"] > 400
    found = lives_of(Pool(hosts=8, rate=30.0, crash=1.0, until=3600.0), 36_000.0, 1)
    is_lost = np.isfinite(found.gone)
    crashed = np.isin(found.gone, found.joined[found.again])
    assert found.gone[is_lost & ~crashed].max() < 3600.0 < found.gone[is_lost & crashed].max()


def test_the_larger_fleet_that_a_rehearsal_suggests_has_work_for_each_host(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The printed command has the micro-batches and the batch of a hundred hosts."""
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in RUN))
    fleet = larger(played_of(RUN))
    assert fleet.startswith("--hosts 100 --microbatches 400 --batch 1600 ")
    assert main(["plan", "--costs", str(tmp_path), *fleet.split(), "--hours", "9", "--seeds",
                 "1"]) == 0
    output = capsys.readouterr().out
    assert "400 (given)" in output and "without work" not in output
    assert [short(value) for value in (0.0, 0.123456, 999.4, 999.6, 1.27e6, 5e17)] == [
        "0", "0.123", "999", "1k", "1.27M", "5e+05T"]


def test_values_of_the_command_line_have_units() -> None:
    """An hour for rates, seconds for times."""
    assert parse_pool("hosts=3,loss=2.4/d,replace=2min") == Pool(hosts=3, loss=0.1, replace=120.0)
    assert with_values(Costs(), ["loss_s=3", "batch=7"]).loss_s == (3.0,)
    assert microbatches_for(100, 300) == [95, 100, 190, 200,
                                          300] and microbatches_for(100, 32) == [32]


def test_a_fleet_that_is_larger_than_the_batch_is_advised_against(
        capsys: pytest.CaptureFixture[str]) -> None:
    """Hosts without a micro-batch have no work: fewer hosts, or more micro-batches, or a larger
    batch."""
    fleet = Fleet(pools=(Pool(hosts=40, loss=0.01),))
    assert advice(fleet, replace(POLICY, microbatches=8))["spare hosts"].best.name == "8 hosts"
    assert main(["plan", *"--pool hosts=40 --microbatches 8 --batch 16 --hours 9 --seeds 1".split()
                 ]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "8 micro-batches leave 32 of 40 hosts without work" in output
    assert "needs e.g. --microbatches 160 --batch 320" in output
    assert of_batch(COSTS, 3).microbatch_s == 3 * COSTS.microbatch_s
    assert of_batch(COSTS, 3).batch == 3
