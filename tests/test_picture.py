"""The picture of a run: what it shows of made-up events."""

from __future__ import annotations

from typing import Any

from elastic_trainer.observe import picture
from elastic_trainer.observe.timeline import Timeline


def draw(events: list[dict[str, Any]], columns: int = 72) -> list[str]:
    timeline = Timeline()
    for event in events:
        timeline.take(event)
    return picture.draw(timeline, columns)


def step(time: float, step_s: float = 1.0, samples: int = 8, **more: Any) -> dict[str, Any]:
    return {
        "event": "worker.step_committed", "time": time, "step_s": step_s, "samples": samples, **more
    }


def generation(time: float, size: int) -> dict[str, Any]:
    return {"event": "worker.generation_started", "time": time, "size": size}


def test_nothing_is_drawn_of_a_run_without_steps() -> None:
    """One step has no rate worth a picture."""
    assert draw([]) == [] and draw([step(1.0)]) == []


def test_an_even_run_is_an_even_field() -> None:
    """Ten equal steps fill all columns to the top."""
    scale, *chart, marks, _ = draw([step(float(at)) for at in range(1, 11)], columns=5)
    assert chart == ["█████"] * 4 and marks == "" and scale.startswith("8 samples/s")


def test_a_pause_is_a_gap_and_deaths_and_worlds_are_marked() -> None:
    """A loss, the smaller world after it, and a larger one stand under the time they came."""
    events = [
        generation(0.0, 4),
        step(1.0),
        step(2.0), {"event": "driver.worker_gone", "time": 2.5, "reason": "crashed"},
        {"event": "driver.worker_gone", "time": 2.6, "reason": "host_left"},
        generation(3.5, 3),
        step(5.0),
        step(6.0),
        generation(6.5, 4),
        step(8.0),
        step(8.0, repeated=True)
    ]
    _, *chart, marks, _ = draw(events, columns=8)
    assert chart[-1] == "██  ██ █" and marks == "  x-  +"


def test_a_new_attempt_is_marked() -> None:
    """The first attempt is the beginning, not a restart."""
    events = [{"event": "attempt.started", "time": 0.0}, generation(0.5, 2), step(1.0),
              {"event": "attempt.started", "time": 2.5}, step(4.0)]
    assert draw(events, columns=4)[-2] == "  !"
