"""How much memory a worker needs for a model of 7 billion parameters: a hundredth of it is trained.

    .venv/bin/python tests/bench/memory.py [--steps 4] [--workers 8]

Eight workers train with weights in 16 bits, AdamW with masters, sharded gradients and one buddy,
one micro-batch each: a model of 33 layers (1/100 of 7 billion parameters) and one of 11. From the
peaks of the worker that needs most follow the bytes a parameter, and what does not grow with the
model (imports, buffers of Horovod, buckets). The last line is one JSON object with both, and with
the GB that 7 billion parameters need (bar 45): when the model is built, and when it trains, without
the memory for the copy of a checkpoint, which a GPU has on its host (`room`). `process_gb` is with
it: what a worker on a CPU needs.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import bench
from cluster import Cluster

PARAMETERS, LAYERS = 7e9, (11, 33)
TO_THE_SYSTEM = {"MALLOC_MMAP_MAX_": "1000000", "MALLOC_MMAP_THRESHOLD_": "131072",
                 "MALLOC_TRIM_THRESHOLD_": "131072"}
"""glibc gives freed memory back at once, so that a peak has what is in use."""


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    peaks, found = dict[str, list[int]](), dict[str, Any]()
    os.environ.update(TO_THE_SYSTEM)
    for layers in LAYERS:
        its = folder / str(layers)
        with Cluster(its, hosts=options.workers, command=bench.job(
                "large.py", str(layers), str(options.steps), str(its))) as cluster:
            assert cluster.wait(bench.LIMIT_S) == 0, cluster.story()
        read = {name: {file.suffix: int(file.read_text()) for file in its.glob(f"{name}.*")}
                for name in ("parameters", "built", "process", "room")}
        read["trained"] = {pid: peak - read["room"][pid] for pid, peak in read["process"].items()}
        for name, numbers in read.items():
            peaks.setdefault(name, []).append(max(numbers.values()))
    less, more = peaks.pop("parameters")
    for name in peaks:
        low, high = peaks[name]
        each = (high - low) / (more - less)
        fixed = high - each * more
        found |= {f"{name}_bytes": round(each, 2), f"{name}_fixed_gb": round(fixed / 1e9, 2),
                  f"{name}_gb": round((each * PARAMETERS + fixed) / 1e9, 1)}
    return found | {"met": max(found["built_gb"], found["trained_gb"]) <= 45}


if __name__ == "__main__":
    bench.run(measure, steps=4, workers=8)
