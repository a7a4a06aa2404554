"""The laws of pauses: their parts, and what the books make of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stories import event, generation, step

from elastic_trainer.events.summary import summarize
from elastic_trainer.world.pauses import Pauses, Survivor, parts_of

SECONDS = st.floats(0.0, 1000.0)
MILLISECONDS = st.integers(0, 10**6)


@given(MILLISECONDS, MILLISECONDS, MILLISECONDS, SECONDS, SECONDS, SECONDS)
def test_a_pause_is_the_time_between_two_steps_less_a_normal_one(since_step: int, left: int,
                                                                 normal: int, forming_s: float,
                                                                 transfer_s: float,
                                                                 step_s: float) -> None:
    """It is the sum of its parts, none of them is negative, and a step that takes its normal time
    costs nothing."""
    forming_s = min(forming_s, min(left, since_step) / 1000)
    left = min(left, since_step)
    parts = parts_of([Survivor(since_step, left, normal)],
                     forming_s=forming_s, transfer_s=transfer_s, step_s=step_s)
    between_s = since_step / 1000 + transfer_s + step_s
    planned_for = min(normal / 1000, (since_step - left) / 1000 + step_s)
    assert parts.duration_s == pytest.approx(between_s - planned_for, abs=1e-6)
    assert min(vars(parts).values()) >= 0.0


def test_all_that_was_waited_for_a_frozen_worker_is_noticing() -> None:
    """Five seconds of silence after a step of 0.2 s; then 0.3 s for the places, 0.4 to form, 0.1
    for the state."""
    parts = parts_of([Survivor(5900, 700, 200), Survivor(5898, 699, 200)],
                     forming_s=0.4, transfer_s=0.1, step_s=0.25)
    assert vars(parts) == pytest.approx({
        "noticing_s": 5.0, "deciding_s": 0.3, "forming_s": 0.4, "transfer_s": 0.1,
        "redoing_s": 0.25})


def test_a_planned_change_costs_no_noticing_and_its_next_step_is_no_pause() -> None:
    """All leave at a step's end."""
    parts = parts_of([Survivor(700, 699, 200)], forming_s=0.4, transfer_s=0.1, step_s=0.2)
    assert parts.noticing_s == 0.0 and parts.redoing_s == pytest.approx(0.001)
    assert parts.duration_s == pytest.approx(0.8, abs=0.01)


def test_what_was_done_of_a_step_that_broke_is_redoing() -> None:
    """A death after 0.15 of its 0.2 s that is heard of at once: so much was done for nothing."""
    parts = parts_of([Survivor(750, 600, 200)], forming_s=0.4, transfer_s=0.1, step_s=0.2)
    assert parts.noticing_s == 0.0 and parts.redoing_s == pytest.approx(0.15)


def test_one_pause_goes_on_when_the_generation_after_it_breaks_before_a_step() -> None:
    """It is logged once, with all of its time, and not logged if no member has held the
    state."""
    now = [0.0]
    pauses = Pauses(clock=lambda: now[0])
    pauses.place()
    pauses.form()
    pauses.enter([])
    for _ in range(3):
        now[0] += 1.0
        assert pauses.step(1.0) is None
    now[0] += 6.0
    for _ in range(2):
        pauses.leave()
        now[0] += 2.0
        pauses.place()
        now[0] += 3.0
        survivor = pauses.form()
        now[0] += 0.5
        pauses.enter([survivor])
    now[0] += 1.0
    parts = pauses.step(1.0)
    assert parts and vars(parts) == pytest.approx(
        {"noticing_s": 5.0, "deciding_s": 7.5, "forming_s": 3.0, "transfer_s": 0.5,
         "redoing_s": 1.0}, abs=0.01)
    assert pauses.step(1.0) is None


def test_the_books_have_the_whole_pause_when_all_have_waited_for_a_frozen_worker() -> None:
    """From 0.2 s after the last step, not from the time at which it was left."""
    parts = {"noticing_s": 5.0, "deciding_s": 0.2, "forming_s": 0.3, "transfer_s": 0.1,
             "redoing_s": 0.2}
    whole = [event(0.0, "run.started"), event(0.0, "attempt.started"),
             generation(1.0, 1, 0, "memory", 0.0), step(1.2, 0, step_s=0.2),
             event(6.4, "worker.generation_broken"), generation(7.0, 2, 1, "memory", 0.6),
             step(7.0, 0, repeated=True),
             event(7.2, "worker.pause_ended", step=1, duration_s=5.8, **parts),
             step(7.2, 1, step_s=0.2),
             event(7.2, "run.finished", steps=2, samples=16, loss=1.0, weights_sha256="5a")]
    result = summarize(whole)
    assert result["pauses"] == [5.8] and result["books"]["pausing_s"] == 5.8
    assert result["books"]["training_s"] == pytest.approx(0.4)
    assert sum(result["books"].values()) == pytest.approx(result["wall_s"])
    older = summarize([line for line in whole if line["event"] != "worker.pause_ended"])
    assert older["pauses"] == [0.6] and sum(older["books"].values()) == pytest.approx(
        older["wall_s"])
