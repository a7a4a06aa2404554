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
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

from bounded import bounded

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent))
from overhead import WORKERS, peer_seconds  # noqa: E402
from recovery import after_kills  # noqa: E402
from reduce import step_seconds  # noqa: E402

from elastic_trainer.config import ALLOCATOR  # noqa: E402

JOB = str(HERE / "jobs" / "slow_data.py")
MOST_RATIO, MOST_REFILL_S = 1.1, 0.3


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kills", type=int, default=3)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"ours_0": [], "ours_4": [], "ddp_0": [], "ddp_4": []}
    for _ in range(options.rounds):
        for arm, found in seconds.items():
            given = ("--workers", arm[-1])
            if arm.startswith("ddp"):
                found += peer_seconds(ALLOCATOR, "slow_data.py", "--ddp", "--steps",
                                      str(options.steps), *given)
            else:
                found += step_seconds(WORKERS, "ring", options.steps, *given, program=(JOB,))
            print(f"{arm}: {statistics.median(found):.4f} s a step so far", flush=True)
    recoveries = {}
    for workers in ("0", "4"):
        command = [sys.executable, JOB, "--steps", "1000000", "--workers", workers,
                   "--global-batch", "32", "--microbatches", "8"]
        with tempfile.TemporaryDirectory() as folder:
            recoveries[workers] = after_kills(Path(folder), options.kills, random.Random(0),
                                              command)["seconds"]
    median = {arm: statistics.median(found) for arm, found in seconds.items()}
    refill_s = statistics.median(recoveries["4"]) - statistics.median(recoveries["0"])
    result = {"ratio_0": median["ours_0"] / median["ddp_4"],
              "ratio_4": median["ours_4"] / median["ddp_4"],
              "peer_ratio": median["ddp_0"] / median["ddp_4"], "refill_s": refill_s}
    print(json.dumps(
        {name: round(value, 3) for name, value in result.items()}
        | {f"{arm}_s": round(value, 4) for arm, value in median.items()}
        | {f"recovery_{workers}_s": [round(one, 3) for one in found]
           for workers, found in recoveries.items()}
        | {"met": result["ratio_4"] <= MOST_RATIO and refill_s <= MOST_REFILL_S}))


if __name__ == "__main__":
    sys.exit(bounded(main))
