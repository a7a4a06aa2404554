"""When checkpoints are due, which stay, and what they cost; and that rank 0 logs that steps have
become slower."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.config import Launch
from elastic_trainer.events.log import Events
from elastic_trainer.state.checkpoints.cadence import (
    Cadence,
    best_interval_s,
    loss_every_s,
    retained,
)
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.training.checkpointing import Checkpointing
from elastic_trainer.training.timing import OVERDUE_INTERVALS, Pace, Timing
from elastic_trainer.world.place import Driver


def train(timing: Timing, step_s: float, *, beside_s: float) -> None:
    """Take ten steps, and four beside the upload of a checkpoint, which has a pause of 0.25 s."""
    for _ in range(10):
        timing.step(step_s, False)
    timing.begun(0, 0.25)
    for _ in range(4):
        timing.step(beside_s, True)
    timing.step(step_s, False)


def test_what_an_upload_adds_is_measured_within_a_world() -> None:
    """A world of half the workers has steps of twice the time, and that is no cost of a checkpoint.
    Nor is an upload that the change of the world has dropped."""
    model = torch.nn.Linear(1, 1)
    state = LiveState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    checkpointing = Checkpointing(None, state, Driver(), Launch(), Events(None))
    timing = checkpointing.timing
    train(timing, 1.0, beside_s=1.125)
    train(timing, 1.0, beside_s=1.125)
    assert timing.cost_s() == pytest.approx(0.25 + 4 * 0.125)
    timing.begun(0, 0.25)
    checkpointing.enter()
    for _ in range(20):
        timing.step(2.0, False)
    assert timing.cost_s() == pytest.approx(0.25 + 4 * 0.125)
    train(timing, 2.0, beside_s=2.125)
    assert timing.cost_s() == pytest.approx(0.25 + 4 * 0.125)


def test_one_upload_beside_which_steps_were_slow_for_another_reason_changes_no_interval() -> None:
    """A worker that boots on the same cores doubles the time of two or three steps."""
    timing = Timing(Cadence(), Launch(), Events(None))
    for beside_s in (2.0, 1.0, 1.0, 2.0, 0.5, 1.0):
        train(timing, 1.0, beside_s=beside_s)
        assert timing.cost_s() == pytest.approx(0.25)
    train(timing, 1.0, beside_s=1.5)
    train(timing, 1.0, beside_s=1.5)
    train(timing, 1.0, beside_s=1.5)
    assert timing.cost_s() == pytest.approx(0.25 + 4 * 0.5)


def test_a_checkpoint_is_not_overdue_because_a_world_is_new(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """An interval in steps is as long as before, until the new world has finished a step."""
    now = [1000.0]
    monkeypatch.setattr("elastic_trainer.training.timing.time",
                        SimpleNamespace(monotonic=lambda: now[0]))
    events, heard = Events(None), list[str]()
    events.listeners.append(lambda event, facts: heard.append(event))
    timing = Timing(Cadence(steps=100), Launch(), events)
    timing.step(1.0, False)
    timing.enter()
    timing.tick(150, 50, now[0] - 150.0)
    assert heard == [] and timing.interval_s() == 100.0
    timing.tick(400, 50, now[0] - 100.0 * OVERDUE_INTERVALS - 1.0)
    assert heard == ["state.checkpoint_overdue"]


@given(cost_s=st.floats(1e-4, 100), every_s=st.floats(10, 1e6))
def test_the_interval_loses_less_than_its_neighbours(cost_s: float, every_s: float) -> None:
    """Daly's interval is close to the best one of his own model of the loss."""
    def lost(interval: float) -> float:
        return cost_s / interval + (interval + cost_s) / (2 * every_s)

    best = best_interval_s(cost_s, every_s)
    assert best > 0
    if cost_s < every_s / 50:
        assert lost(best) <= 1.1 * min(lost(best * factor) for factor in (0.25, 0.5, 2.0, 4.0))


@given(st.floats(1e-4, 50), st.integers(0, 100), st.floats(0, 1e6))
def test_auto_costs_no_more_than_its_share(cost_s: float, losses: int, observed_s: float) -> None:
    """However many losses there are, checkpoints take at most 1 % of the time; more losses never
    mean fewer of them."""
    every = Cadence()
    interval = every.interval_s(cost_s=cost_s, losses=losses, observed_s=observed_s, step_s=1.0)
    assert cost_s / interval <= 0.01 + 1e-9
    assert every.interval_s(cost_s=cost_s, losses=losses + 1, observed_s=observed_s,
                            step_s=1.0) <= interval * (1 + 1e-9)
    assert loss_every_s(losses + 1, observed_s) < loss_every_s(losses, observed_s)


def test_a_checkpoint_costs_no_less_than_its_pause() -> None:
    """Also where steps beside an upload happened to be the faster ones, or are the only ones there
    were."""
    for alone in ((), (0.1,)):
        timing = Timing(Cadence(), Launch(), Events(None))
        for seconds in alone:
            timing.step(seconds, False)
        for _ in range(2):
            timing.begun(0, 0.3)
            timing.step(0.05, True)
        assert timing.cost_s() == 0.3


@pytest.mark.parametrize(("every", "pause_s", "lost", "failures", "due_s"), [
    (Cadence(seconds=30.0), 9.0, 0, 0, 30), (Cadence(steps=40), 9.0, 0, 0, 40),
    (Cadence(), 0.5, 10**4, 0, 50), (Cadence(), 1.0, 10**4, 0, 100),
    (Cadence(share=0.1), 1.0, 10**4, 0, 10),
    (Cadence(), 0.5, 0, 0, 61),  # the root of 2 x 0.5 x 3600 and a bit
    (Cadence(seconds=30.0), 0.5, 0, 1, 2), (Cadence(steps=40), 0.5, 0, 3, 8),
    (Cadence(), 0.5, 0, 100, 60), (Cadence(steps=0), 0.5, 10**4, 0, 1000),
    (Cadence(steps=0), 0.5, 10**4, 3, 1000)])
def test_a_checkpoint_is_due_when_it_pays(monkeypatch: pytest.MonkeyPatch, every: Cadence,
                                          pause_s: float, lost: int, failures: int,
                                          due_s: int) -> None:
    """It is due by the interval of the user, or by its cost and the rate of losses; sooner after a
    failure."""
    now = [1000.0]
    monkeypatch.setattr("elastic_trainer.training.timing.time",
                        SimpleNamespace(monotonic=lambda: now[0]))
    timing = Timing(every, Launch(lost_attempts=lost), Events(None))
    timing.begun(0, pause_s)
    step = 0
    while step < 1000:
        step, now[0] = step + 1, now[0] + 1.0
        timing.step(1.0, False)
        timing.tick(step, 0, None)
        # A question changes nothing.
        assert timing.is_due(step, failures) == timing.is_due(step, failures)
        if timing.is_due(step, failures):
            break
    assert step == due_s


@pytest.mark.parametrize(("text", "cadence"), [
    (50, Cadence(steps=50)), ("50", Cadence(steps=50)), ("auto", Cadence()),
    ("30s", Cadence(seconds=30.0)), ("0.5s", Cadence(seconds=0.5)), ("0.5%", Cadence(share=0.005)),
    ("10%", Cadence(share=0.1)), (0, Cadence(steps=0)), ("0", Cadence(steps=0)),
    (None, Cadence(steps=0))])
def test_a_cadence_is_steps_seconds_or_auto(text: Any, cadence: Cadence) -> None:
    """What the user writes: a share of the time is auto for at most that."""
    assert Cadence.parse(text) == cadence == Cadence.parse(str(cadence))


@pytest.mark.parametrize("text", [
    -1, "0s", "often", "", "s", 1.5, "0%", "101%", "%", False, True, 0.0, "-0", "00", "none",
    "None", "never"])
def test_a_cadence_is_refused_when_it_is_none_of_them(text: Any) -> None:
    """The error names what works."""
    with pytest.raises(ValueError, match="auto"):
        Cadence.parse(text)


@given(st.lists(st.integers(1, 500), unique=True, min_size=1), st.integers(1, 5),
       st.integers(0, 100))
def test_retention_is_the_same_one_by_one_or_at_once(steps: list[int], keep_last: int,
                                                     keep_every: int) -> None:
    """A checkpoint that was kept as an n-th stays, and one that was let go is never missed."""
    kept: set[int] = set()
    for step in sorted(steps):
        kept = retained([*kept, step], keep_last, keep_every)
        assert step in kept
    assert kept == retained(steps, keep_last, keep_every)


@given(st.lists(st.integers(1, 60), min_size=1), st.integers(1, 3), st.integers(1, 100))
def test_one_checkpoint_that_was_compared_stays(pauses: list[int], keep_last: int,
                                                after: int) -> None:
    """From the first one that is old enough on, there is one to go back to. It is at most as old as
    two rounds and two checkpoints."""
    kept, step, published = set[int](), 0, list[int]()
    for pause in pauses:
        step += pause
        published.append(step)
        kept = retained([*kept, step], keep_last, 0, after)
        if published[0] <= step - after:
            assert max(old for old in kept
                       if old <= step - after) > step - 2 * after - 2 * max(pauses)
    assert len(kept) <= keep_last + 2


def events_of(*steps: tuple[float, float]) -> list[tuple[str, int]]:
    """Return the events of steps, each with its seconds and the seconds of them that it waited."""
    events, heard = Events(None), list[tuple[str, int]]()
    events.listeners.append(lambda event, facts: heard.append((event, facts["step"])))
    pace = Pace(events)
    for number, (step_s, waited_s) in enumerate(steps):
        pace.step(number, step_s, waited_s)
    return heard


def test_steps_that_become_slower_are_logged_once_and_so_is_their_end() -> None:
    """Also where they are longer than a whole pace, and where each of many is short."""
    assert events_of(*[(1.0, 0.1)] * 10, *[(2.0, 1.1)] * 15, *[(1.0, 0.1)] * 5) == [
        ("worker.steps_slower", 14), ("worker.steps_as_before", 29)]
    assert events_of(*[(1 / 64, 0.0)] * 384,
                *[(1 / 32, 0.0)] * 200) == [("worker.steps_slower", 384 + 95)]


def test_steps_that_become_slower_still_are_logged_again() -> None:
    """However long it has been slow already."""
    assert events_of(*[(1.0, 0.1)] * 5, *[(2.0, 1.1)] * 50, *[(9.0, 8.1)] * 10,
                     *[(2.0, 1.1)] * 5) == [("worker.steps_slower", 9), ("worker.steps_slower", 59)]


def test_a_few_slow_steps_are_not_logged() -> None:
    """Nor what is a little slower, nor faster."""
    assert events_of(*[(1.0, 0.1), (9.0, 8.1), (1.0, 0.1), (1.0, 0.1), (9.0, 8.1)] * 4) == []
    assert events_of(*[(1.0, 0.1)] * 10, *[(1.4, 0.5)] * 10, *[(0.5, 0.1)] * 10) == []


def test_steps_that_are_slow_from_the_first_are_their_own_measure() -> None:
    """A generation has its own pace: fewer workers take longer; a first step that is slow hides
    nothing."""
    assert events_of((60.0, 0.0), *[(2.0, 0.1)] * 20) == []
    assert events_of((60.0, 0.0), *[(2.0, 0.1)] * 9, *[(4.0, 0.1)] * 5) == [
        ("worker.steps_slower", 14)]
