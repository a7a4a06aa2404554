"""The picture of a run: samples a second over time, with what happened to the fleet beneath.

events → here → `elastic-trainer report`, README

A pure function of the events; its units are characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BLOCKS = " ▁▂▃▄▅▆▇█"
ROWS = 4
LOST = ("crashed", "frozen", "evicted", "cut_off", "machine_failed")


def draw(events: Sequence[Mapping[str, Any]], columns: int = 72) -> list[str]:
    """Return the lines of the picture; none for a run without two steps.

    A column's height is the samples of the steps that were done in its time, over that time. Marks: x a worker lost, - a
    smaller world, + a larger one, ! everybody gone (a new attempt).
    """
    steps = [e for e in events if e["event"] == "worker.step_committed" and not e.get("repeated")]
    if len(steps) < 2:
        return []
    start, end = float(steps[0]["time"]) - float(steps[0]["step_s"]), float(steps[-1]["time"])
    width_s = max(end - start, 1e-6) / columns
    samples = [0.0] * columns
    for step in steps:
        # a step's samples are spread over its time: otherwise slow steps would look like pauses
        low, high = (float(step["time"]) - float(step["step_s"]) - start) / width_s, (float(step["time"]) - start) / width_s
        for column in range(max(0, int(low)), min(columns - 1, int(high)) + 1):
            share = (min(high, column + 1) - max(low, column)) / max(high - low, 1e-9)
            samples[column] += max(0.0, share) * int(step["samples"])
    top = max(samples)
    levels = [round(8 * ROWS * value / top) for value in samples]
    chart = ["".join(BLOCKS[min(8, max(0, level - 8 * row))] for level in levels) for row in reversed(range(ROWS))]
    marks = [" "] * columns
    for time, mark in _marks(events):
        if start <= time <= end:
            column = min(columns - 1, int((time - start) / width_s))
            marks[column] = mark if marks[column] in " +-" else marks[column]
    scale = f"{top / width_s:.0f} samples/s at most, {end - start:.0f} s"
    return [scale, *chart, "".join(marks).rstrip(), "x a worker lost · - smaller world · + larger world · ! everybody gone"]


def _marks(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, str]]:
    found, size = [], 0
    for event in events:
        time = float(event["time"])
        match event["event"]:
            case "driver.worker_gone" if event.get("reason") in LOST:
                found.append((time, "x"))
            case "worker.generation_started":
                if size and event["size"] != size:
                    found.append((time, "+" if event["size"] > size else "-"))
                size = int(event["size"])
            case "attempt.started" if size:
                found.append((time, "!"))
    return found
