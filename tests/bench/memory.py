"""How much memory a worker needs for a model of 7 billion parameters: a hundredth of it is trained.

    .venv/bin/python tests/bench/memory.py [--steps 4] [--workers 8]

Eight workers train with weights in 16 bits, AdamW with masters and one buddy, one micro-batch each,
in two arms. The last line is one JSON object with the peak of the worker that needs most, in bytes
a parameter (what the imports take is left out), and the GB that 7 billion parameters need then
(bar 45): when the model is built, and when it trains.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import bench
from cluster import Cluster

PARAMETERS = 7e9


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    found, hashes = dict[str, Any](), set[str]()
    for arm in ("optimizer", "gradients"):
        with Cluster(folder / arm, hosts=options.workers, command=bench.job(
                "large.py", arm, str(options.steps), str(folder / arm))) as cluster:
            assert cluster.wait(bench.LIMIT_S) == 0, cluster.story()
            hashes.add(cluster.events("run.finished")[0]["weights_sha256"])
        most = {name: max(int(file.read_text()) for file in (folder / arm).glob(f"{name}-*"))
                for name in ("parameters", "built", "trained")}
        for name in ("built", "trained"):
            each = most[name] / most["parameters"]
            found |= {f"{arm}_{name}_bytes": round(each, 2),
                      f"{arm}_{name}_gb": round(each * PARAMETERS / 1e9, 1)}
    return found | {"bits_equal": len(hashes) == 1, "met": found["gradients_trained_gb"] <= 45
                    and found["gradients_built_gb"] <= 45 and len(hashes) == 1}


if __name__ == "__main__":
    bench.run(measure, steps=4, workers=8)
