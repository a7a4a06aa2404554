"""What the same bits for every world cost: `exact` against `ring` on the demo model, 2 and 4
workers.

    .venv/bin/python tests/bench/reduce.py [--steps 40] [--rounds 2]

The arms take turns; a ratio is the median step time of all of `exact`'s steps over that of all of
`ring`'s.

Last line: one JSON object with ratio_2, ratio_4.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import bench
from cluster import Cluster

WARM_UP_STEPS = 5


def step_seconds(folder: Path, workers: int, kind: str, steps: int, *options: str,
                 program: Sequence[str] = ("-m", "elastic_trainer.examples.gpt")) -> list[float]:
    """Train the demo model and return the seconds of each step after the warm-up.

    From the end of one step to the end of the next, so what lies between two steps counts, too.
    """
    job = [sys.executable, *program, "--steps", str(steps), "--checkpoint-every", "100000",
           *options]
    with bench.empty(folder) as empty, Cluster(empty, hosts=workers, command=job,
                                               options=["--reduce", kind]) as cluster:
        assert cluster.wait(600) == 0, cluster.story()
        return [end - before for before, end in pairwise(
            e["time"] for e in cluster.committed() if e["step"] >= WARM_UP_STEPS - 1)]


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the ratios of 2 and of 4 workers."""
    result: dict[str, Any] = {}
    for workers in (2, 4):
        seconds: dict[str, list[float]] = {"exact": [], "ring": []}
        for _ in range(options.rounds):
            for kind, found in seconds.items():
                found += step_seconds(folder, workers, kind, options.steps)
                print(f"{workers} workers, {kind}: {statistics.median(found):.4f} s a step so far",
                      flush=True)
        medians = {kind: statistics.median(found) for kind, found in seconds.items()}
        result[f"ratio_{workers}"] = round(medians["exact"] / medians["ring"], 3)
        result |= {f"{kind}_{workers}_s": round(median, 4) for kind, median in medians.items()}
    return result | {"met": result["ratio_2"] <= 1.1 and result["ratio_4"] <= 1.1}


if __name__ == "__main__":
    bench.run(measure, steps=40, rounds=2)
