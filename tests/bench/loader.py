"""What slow data costs: samples of 20 ms, with and without loader processes, against DDP.

    .venv/bin/python tests/bench/loader.py [--steps 60] [--rounds 2] [--kills 3]

2 workers train an MLP of 10 million parameters with a global batch of 16, with one thread each. The
peer is DistributedDataParallel with `DataLoader(num_workers=4)`, with our settings of glibc's
allocator. The arms take turns. ratio_4 is our step time with `Loader(workers=4)` over the peer's,
ratio_0 the same without loader processes, and peer_ratio the peer's without over the peer's with
them (medians).

Then 4 workers train with 8 micro-batches, once with and once without loader processes. Workers are
killed one after the other. refill_s is by how much the median time from a kill to the next finished
step is longer with them.

The last line is one JSON object with ratio_0, ratio_4, peer_ratio, refill_s, met.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from typing import Any

import bench
from overhead import WORKERS, peer_seconds
from recovery import after_kills
from reduce import step_seconds

from elastic_trainer.config import ALLOCATOR

MOST_RATIO, MOST_REFILL_S = 1.1, 0.3


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the ratios, and what the loader processes cost after a loss."""
    job, steps = bench.job("slow_data.py"), str(options.steps)
    seconds: dict[str, list[float]] = {"ours_0": [], "ours_4": [], "ddp_0": [], "ddp_4": []}
    for _ in range(options.rounds):
        for arm, found in seconds.items():
            given = ("--workers", arm[-1])
            if arm.startswith("ddp"):
                found += peer_seconds(ALLOCATOR, [*job, "--ddp", "--steps", steps, *given])
            else:
                found += step_seconds(folder, WORKERS, "ring", options.steps, *given,
                                      program=job[1:])
            print(f"{arm}: {statistics.median(found):.4f} s a step so far", flush=True)
    recoveries = {workers: after_kills(
        folder / workers, options.kills, random.Random(0),
        [*job, "--steps", "1000000", "--workers", workers, "--global-batch", "32",
         "--microbatches", "8"]).seconds for workers in ("0", "4")}
    median = {arm: statistics.median(found) for arm, found in seconds.items()}
    refill_s = statistics.median(recoveries["4"]) - statistics.median(recoveries["0"])
    result = {"ratio_0": median["ours_0"] / median["ddp_4"],
              "ratio_4": median["ours_4"] / median["ddp_4"],
              "peer_ratio": median["ddp_0"] / median["ddp_4"], "refill_s": refill_s}
    return ({name: round(value, 3) for name, value in result.items()}
            | {f"{arm}_s": round(value, 4) for arm, value in median.items()}
            | {f"recovery_{workers}_s": bench.rounded(found)
               for workers, found in recoveries.items()}
            | {"met": result["ratio_4"] <= MOST_RATIO and refill_s <= MOST_REFILL_S})


if __name__ == "__main__":
    bench.run(measure, steps=60, rounds=2, kills=3)
