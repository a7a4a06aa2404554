"""What checkpoints cost over several worlds, and that rank 0 logs that steps have become slower."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from elastic_trainer.config import Launch
from elastic_trainer.events.log import Events
from elastic_trainer.state.cadence import Cadence
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
