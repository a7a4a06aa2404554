"""The picture of a run: what it shows of made-up events."""

from __future__ import annotations

from typing import Any

from elastic_trainer.views import picture
from elastic_trainer.views.timeline import Timeline


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
    scale, *chart = draw([step(float(at)) for at in range(1, 11)], columns=5)
    assert chart == ["█████"] * 4 and scale == "8 samples/s at most, 10 s"


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
    _, *chart, marks, legend = draw(events, columns=8)
    assert chart[-1] == "██  ██ █" and marks == "  x-  +"
    assert legend == "x a worker lost · - smaller world · + larger world"


def test_a_new_attempt_is_marked() -> None:
    """The first attempt is the beginning, not a restart."""
    events = [{"event": "attempt.started", "time": 0.0}, generation(0.5, 2), step(1.0),
              {"event": "attempt.started", "time": 2.5}, step(4.0)]
    assert draw(events, columns=4)[-2] == "  !"


def gone(time: float, *workers: str) -> list[dict[str, Any]]:
    return [{"event": "driver.worker_gone", "time": time, "worker": worker, "reason": "crashed"}
            for worker in workers]


def formed(time: float, *workers: str) -> list[dict[str, Any]]:
    return [{"event": "driver.generation_formed", "time": time, "workers": list(workers)},
            generation(time, len(workers))]


def test_a_standstill_is_drawn_while_it_lasts() -> None:
    """The axis reaches to the last event, whether or not a step has followed."""
    events = [*formed(0.0, "a", "b"), *(step(float(at)) for at in range(1, 5)),
              *gone(4.5, "a", "b"), {"event": "driver.discovery_failed", "time": 8.0}]
    scale, *chart, marks, _ = draw(events, columns=8)
    assert chart[-1] == "████    " and scale.endswith("8 s") and marks == "    x"


def test_a_night_in_which_the_run_was_stopped_has_no_room() -> None:
    """Neither it, nor what other processes log in it, nor the late event of the next supervisor."""
    events = [generation(0.0, 2), *(step(float(at)) for at in range(1, 5)),
              {"event": "attempt.ended", "time": 4.0, "verdict": "interrupted"},
              {"event": "discovery.cloud_unavailable", "time": 900.0},
              {"event": "run.host_not_reached", "time": 49_990.0},
              {"event": "run.started", "time": 50_000.0}]
    assert draw(events, columns=4)[0] == "8 samples/s at most, 4 s"
    scale, *chart = draw([*events, *(step(50_000.0 + at) for at in range(1, 5))], columns=4)
    assert scale == "8 samples/s at most, 8 s" and chart == ["████"] * 4


def test_a_worker_that_takes_the_place_of_a_lost_one_is_marked() -> None:
    """The world's size is as before. The joined worker is not hidden by the loss."""
    events = [*formed(0.0, "a", "b"), step(1.0), step(2.0), *gone(2.1, "b"),
              *formed(2.2, "a", "c"), step(3.0), step(4.0)]
    *_, marks, legend = draw(events, columns=4)
    assert marks == "  x=" and legend.endswith("= a worker takes a free place")


def test_the_commits_of_horovods_own_style_are_steps_a_second() -> None:
    """Its script logs no samples."""
    scale, *chart = draw([{"event": "worker.commit_kept", "time": at / 2, "step": at,
                           "commit_s": 0.5} for at in range(1, 11)], columns=5)
    assert scale == "2 steps/s at most, 5 s" and chart == ["█████"] * 4


def test_an_output_without_block_characters_gets_a_picture_in_ascii() -> None:
    """Escapes of characters would be no picture."""
    assert picture.blocks_for("utf-8") == picture.BLOCKS
    timeline = Timeline()
    for event in [*formed(0.0, "a", "b"), step(1.0), step(2.0), *gone(2.5, "b"),
                  *formed(3.0, "a"), step(4.0)]:
        timeline.take(event)
    for encoding in ("ascii", "latin-1", "no such one"):
        lines = picture.draw(timeline, 8, picture.blocks_for(encoding))
        assert lines[4] == "####  ##" and "".join(lines).isascii()
