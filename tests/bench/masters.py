"""What each worker keeps with weights in 16 bits and masters (precision="bf16-master").

    .venv/bin/python tests/bench/masters.py [--steps 6]

Four workers train the demo model with AdamW, in three arms: 32 bits, masters on each worker, and
masters sharded with one buddy. The last line is one JSON object with the bytes a parameter of the
worker that keeps most, of weights and of the optimizer's state with its masters, and whether the
two arms with masters end with the same bits.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import bench
from cluster import Cluster

ARMS = {"fp32": ("none", "fp32"), "masters": ("none", "bf16-master"),
        "sharded": ("optimizer", "bf16-master")}


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    found, hashes = dict[str, Any](), dict[str, str]()
    parameters = 0
    for arm, (shard, precision) in ARMS.items():
        with Cluster(folder / arm, command=bench.job("sharded.py", shard, str(options.steps),
                                                     str(folder / arm), precision)) as cluster:
            assert cluster.wait(bench.LIMIT_S) == 0, cluster.story()
            hashes[arm] = cluster.events("run.finished")[0]["weights_sha256"]
        weights, held = (max(int(file.read_text()) for file in (folder / arm).glob(f"{kind}-*"))
                         for kind in ("weights", "held"))
        parameters = parameters or weights // 4
        found |= {f"{arm}_weights": round(weights / parameters, 2),
                  f"{arm}_optimizer": round(held / parameters, 2)}
    return found | {"bits_equal": hashes["masters"] == hashes["sharded"]}


if __name__ == "__main__":
    bench.run(measure, steps=6)
