"""The picture of a run: samples a second over time, with what happened to the fleet beneath.

events → here → `elastic-trainer report`, README

A pure function of the events; its units are characters.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

BLOCKS = " ▁▂▃▄▅▆▇█"
ROWS = 4
CHUNK_STEPS = 2**16
LOST = ("crashed", "frozen", "evicted", "cut_off", "machine_failed")


class Film:
    """What the picture needs of a run's events: 24 bytes of each step, and a mark of each change of the fleet."""

    def __init__(self) -> None:
        self._times, self._seconds, self._samples = array("d"), array("d"), array("d")
        self._marks: list[tuple[float, str]] = []
        self._size = 0

    def shoot(self, events: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Take the events, and hand them on."""
        for event in events:
            self.take(event)
            yield event

    def take(self, event: Mapping[str, Any]) -> None:
        time = float(event["time"])
        match event["event"]:
            case "worker.step_committed" if not event.get("repeated"):
                self._times.append(time)
                self._seconds.append(float(event.get("step_s") or 0.0))
                self._samples.append(int(event["samples"]))
            case "driver.worker_gone" if event.get("reason") in LOST:
                self._marks.append((time, "x"))
            case "worker.generation_started":
                if self._size and event["size"] != self._size:
                    self._marks.append((time, "+" if event["size"] > self._size else "-"))
                self._size = int(event["size"])
            case "attempt.started" if self._size:
                self._marks.append((time, "!"))

    def draw(self, columns: int = 72) -> list[str]:
        """Return the lines of the picture; none for a run without two steps.

        A column's height is the samples of the steps that were done in its time, over that time. Marks: x a worker lost,
        - a smaller world, + a larger one, ! everybody gone (a new attempt).
        """
        if len(self._times) < 2:
            return []
        start, end = self._times[0] - self._seconds[0], self._times[-1]
        width_s = max(end - start, 1e-6) / columns
        done = [self._samples_until(start + column * width_s) for column in range(columns + 1)]
        samples = np.maximum(np.diff(done), 0.0)
        top = float(samples.max()) or 1.0
        levels = [round(8 * ROWS * float(value) / top) for value in samples]
        chart = ["".join(BLOCKS[min(8, max(0, level - 8 * row))] for level in levels) for row in reversed(range(ROWS))]
        marks = [" "] * columns
        for time, mark in self._marks:
            if start <= time <= end:
                column = min(columns - 1, int((time - start) / width_s))
                marks[column] = mark if marks[column] in " +-" else marks[column]
        scale = f"{top / width_s:.0f} samples/s at most, {end - start:.0f} s"
        legend = "x a worker lost · - smaller world · + larger world · ! everybody gone"
        return [scale, *chart, "".join(marks).rstrip(), legend]

    def _samples_until(self, time: float) -> float:
        """Return the samples that were done by then: a step's are spread over its time, or slow steps would look like
        pauses.
        """
        total = 0.0
        for low in range(0, len(self._times), CHUNK_STEPS):
            times, seconds, samples = (np.frombuffer(numbers, dtype=np.float64)[low : low + CHUNK_STEPS]
                                       for numbers in (self._times, self._seconds, self._samples))
            part = np.clip(1.0 - (times - time) / np.maximum(seconds, 1e-9), 0.0, 1.0)
            total += float(part @ samples)
        return total


def draw(events: Iterable[Mapping[str, Any]], columns: int = 72) -> list[str]:
    """Return the lines of the picture of a run's events."""
    film = Film()
    for event in events:
        film.take(event)
    return film.draw(columns)
