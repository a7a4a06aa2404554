"""What the same bits for every world cost: `exact` against `ring` on the demo model, 2 and 4
workers; the memory of its gradients, and what it sends between hosts.

    .venv/bin/python tests/bench/reduce.py [--steps 40] [--rounds 2]

The arms take turns; a ratio is the median step time of all of `exact`'s steps over that of all of
`ring`'s.

peak_gradients_8 and peak_gradients_7 say how many times the gradient a worker's memory holds at
most, with 8 and 7 workers and 64 micro-batches: the difference of two runs with gradients of 16 and
of 64 MiB, so what is constant does not count. The fixed tree needs 3 sums for the 8 micro-batches
of a worker (of 8), and 4 for the 10 of one of 7 workers.

network_bytes_ratio: the bytes that a host of 4 workers sends in a step, counted at the network
interfaces of two hosts in namespaces, over those of the gradient. Without root it is null.

Last line: one JSON object with ratio_2, ratio_4, peak_gradients_8, peak_gradients_7,
network_bytes_ratio.
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
import netlab
from cluster import Cluster
from s3_servers import Unavailable

WARM_UP_STEPS = 5
SIZES_MIB = (16, 64)


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


def wide(*options: object) -> list[str]:
    """Return the command of a job with a large gradient."""
    return bench.job("wide.py", *map(str, options))


def peak_gradients(folder: Path, workers: int) -> float:
    """Return how many gradients the memory of a worker holds at most."""
    peaks = []
    for mib in SIZES_MIB:
        with bench.empty(folder) as empty, Cluster(
                empty, hosts=workers,
                command=wide("--steps", 3, "--mib", mib, "--microbatches", 64, "--folder", empty),
                ) as cluster:
            assert cluster.wait(600) == 0, cluster.story()
            peaks.append(max(int(file.read_text()) for file in empty.glob("peak-*")))
    return (peaks[1] - peaks[0]) / ((SIZES_MIB[1] - SIZES_MIB[0]) << 20)


def network_ratio(folder: Path) -> float | None:
    """Return the bytes that a host sends in a step, over those of the gradient."""
    try:
        netlab.prepare()
    except Unavailable as error:
        print(error, flush=True)
        return None
    with bench.empty(folder) as empty, netlab.Lab(empty / "lab") as lab:
        return netlab.sent_gradients(lab, empty, slots=4, mib=8, steps=20)


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
    result |= {f"peak_gradients_{workers}": round(peak_gradients(folder, workers), 2)
               for workers in (8, 7)}
    result["network_bytes_ratio"] = network_ratio(folder)
    return result | {
        "met": (result["ratio_2"] <= 1.1 and result["ratio_4"] <= 1.1
                and result["peak_gradients_8"] <= 3.5 and result["peak_gradients_7"] <= 4.5
                and (result["network_bytes_ratio"] or 0) <= 2)}


if __name__ == "__main__":
    bench.run(measure, steps=40, rounds=2)
