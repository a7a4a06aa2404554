"""Rank 0 logs that steps have become slower."""

from __future__ import annotations

from elastic_trainer.observe.events import Events
from elastic_trainer.training.timing import Pace


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
                     *[(2.0, 1.1)] * 5) == [
        ("worker.steps_slower", 9), ("worker.steps_slower", 59)]


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
