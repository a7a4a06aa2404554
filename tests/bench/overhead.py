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
import socket
import statistics
import subprocess
import sys
from pathlib import Path

from bounded import bounded

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from reduce import WARM_UP_STEPS, step_seconds  # noqa: E402

from elastic_trainer.config import ALLOCATOR  # noqa: E402

GLOBAL_BATCH, WORKERS = 32, 2
TRAIN = ("-m", "elastic_trainer.examples.gpt")
LOOP = (str(HERE / "jobs" / "gpt_loop.py"),)


def peer_seconds(settings: dict[str, str], *job: str) -> list[float]:
    """Run a DDP job (its file in jobs/, and options) with settings in its environment, and return
    the seconds of each step after the warm-up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "jobs" / job[0]), *job[1:]],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | settings | {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
                "WORLD_SIZE": str(WORKERS), "GLOO_SOCKET_IFNAME": "lo"
            }) for rank in range(WORKERS)
    ]
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    return list(json.loads(outputs[0].splitlines()[-1]))[WARM_UP_STEPS:]


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    arms = ("ddp", "ddp_same_allocator", "ring", "exact", "exact_loop", "ring_8_microbatches",
            "exact_8_microbatches")
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(options.rounds):
        for arm, seconds in found.items():
            if arm.startswith("ddp"):
                seconds += peer_seconds(ALLOCATOR if arm == "ddp_same_allocator" else {},
                                        "ddp_gpt.py", str(options.steps), str(GLOBAL_BATCH))
            else:
                microbatches = "8" if arm.endswith("8_microbatches") else "2"
                seconds += step_seconds(WORKERS, arm.partition("_")[0], options.steps,
                                        "--microbatches",
                                        microbatches,
                                        program=LOOP if arm.endswith("loop") else TRAIN)
            print(f"{arm}: {GLOBAL_BATCH / statistics.median(seconds):.1f} samples/s so far",
                  flush=True)
    median = {arm: statistics.median(seconds) for arm, seconds in found.items()}
    result = {f"ratio_{arm}{suffix}": round(median[f"ddp{suffix}"] / median[arm], 3)
              for suffix in ("", "_same_allocator") for arm in arms if not arm.startswith("ddp")}
    rates = {
        f"{arm}_samples_per_s": round(GLOBAL_BATCH / seconds, 1)
        for arm, seconds in median.items()
    }
    result["ratio_loop_to_train"] = round(median["exact"] / median["exact_loop"], 3)
    is_met = (result["ratio_ring"] >= 1.0 and result["ratio_exact"] >= 0.9
              and result["ratio_loop_to_train"] >= 0.99)
    print(json.dumps(result | rates | {"met": is_met}))


if __name__ == "__main__":
    sys.exit(bounded(main))
