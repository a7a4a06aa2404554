"""What elasticity costs without faults: our loop against plain DistributedDataParallel.

    .venv/bin/python tests/bench/overhead.py [--steps 30] [--rounds 2]

2 workers train the demo model with a global batch of 32, with one thread each, over Gloo. The
variants take turns. A ratio is our samples/s over those of DDP (medians over all steps). Our driver
gives its workers settings of glibc's allocator (elastic_trainer/config.py, ALLOCATOR), which speed
DDP up, too: the ratios `_same_allocator` are against DDP with these settings. With --microbatches
2 each worker does its half of the batch in one piece, as DDP does. The ratios with 8 micro-batches,
as the demo has them for up to 8 workers, are given, too. The demo calls train(). `exact_loop` is
`exact` with a loop over a Trainer (jobs/gpt_loop.py); ratio_loop_to_train is its samples/s over
those of `exact`.

The last line is one JSON object with ratio_ring, ratio_exact, ratio_loop_to_train,
ratio_ring_same_allocator, ratio_exact_same_allocator.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench
from ports import free_port
from reduce import WARM_UP_STEPS, step_seconds

from elastic_trainer.config import ALLOCATOR

GLOBAL_BATCH, WORKERS = 32, 2
TRAIN = ("-m", "elastic_trainer.examples.gpt")
ARMS = ("ddp", "ddp_same_allocator", "ring", "exact", "exact_loop", "ring_8_microbatches",
        "exact_8_microbatches")


def peer_seconds(settings: dict[str, str], job: list[str]) -> list[float]:
    """Run a DDP job with settings in its environment, and return the seconds of each step after the
    warm-up."""
    env = os.environ | settings | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(WORKERS),
        "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [subprocess.Popen(job, stdout=subprocess.PIPE, text=True,
                              env=env | {"RANK": str(rank)}) for rank in range(WORKERS)]
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    return list(json.loads(outputs[0].splitlines()[-1])["seconds"])[WARM_UP_STEPS:]


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the ratios and the rates."""
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(options.rounds):
        for arm, seconds in found.items():
            if arm.startswith("ddp"):
                seconds += peer_seconds(
                    ALLOCATOR if arm == "ddp_same_allocator" else {},
                    [sys.executable, "-m", "elastic_trainer.examples.ddp", "gpt", "--steps",
                     str(options.steps), "--global-batch", str(GLOBAL_BATCH)])
            else:
                loop = (str(bench.HERE / "jobs" / "gpt_loop.py"),)
                seconds += step_seconds(folder, WORKERS, arm.partition("_")[0], options.steps,
                                        "--microbatches", "8" if "_8_" in arm else "2",
                                        program=loop if arm.endswith("loop") else TRAIN)
            print(f"{arm}: {GLOBAL_BATCH / statistics.median(seconds):.1f} samples/s so far",
                  flush=True)
    median = {arm: statistics.median(seconds) for arm, seconds in found.items()}
    result = {f"ratio_{arm}{suffix}": round(median[f"ddp{suffix}"] / median[arm], 3)
              for suffix in ("", "_same_allocator") for arm in ARMS if not arm.startswith("ddp")}
    result |= {"ratio_loop_to_train": round(median["exact"] / median["exact_loop"], 3)}
    return {**result, **{f"{arm}_samples_per_s": round(GLOBAL_BATCH / seconds, 1)
                         for arm, seconds in median.items()},
            "met": (result["ratio_ring"] >= 1.0 and result["ratio_exact"] >= 0.9
                    and result["ratio_loop_to_train"] >= 0.99)}


if __name__ == "__main__":
    bench.run(measure, steps=30, rounds=2)
