"""What a join and a checkpoint carry when adapters are trained on a frozen base: LoRA of rank 8 on
a GPT-2 of 124 million parameters.

    .venv/bin/python tests/bench/frozen.py

Two arms, one after the other: the frozen base stays where the script builds it
(`carry_frozen="never"`), and it is carried (`carry_frozen="always"`). In each, two workers train,
and a third one joins. A third run is one process alone.

Last line: one JSON object with the bytes of a join and of a checkpoint in both arms, their ratios
(join_ratio, checkpoint_ratio), the seconds of the transfer and of a checkpoint's copy, bits_equal
(the weights of all three runs), and met: both ratios are at most 0.03, and the bits are equal.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import bench
from cluster import Cluster, weights_alone

JOB = [sys.executable, str(bench.HERE.parent / "jobs" / "lora.py"), "40"]


def arm(folder: Path, kind: str) -> tuple[dict[str, float], str]:
    """Let a third worker join two; return the figures and the hash of the weights."""
    with Cluster(folder, hosts=3, start_with=2, command=[*JOB, kind]) as cluster:
        cluster.wait_for_world(2)
        cluster.set_hosts(cluster.all_hosts)
        cluster.wait_for_world(3)
        assert cluster.wait(bench.LIMIT_S) == 0, cluster.story()
        joins = cluster.events("worker.state_received")
        published = cluster.events("state.checkpoint_published")
        [finished] = cluster.events("run.finished")
    return {"join_bytes": joins[-1]["bytes"], "transfer_s": joins[-1]["duration_s"],
            "checkpoint_bytes": published[-1]["bytes"],
            "pause_s": round(statistics.median(e["pause_s"] for e in published), 4),
            }, finished["weights_sha256"]


def measure(folder: Path, _: argparse.Namespace) -> dict[str, Any]:
    """Run all arms."""
    figures, hashes = {}, {weights_alone([*JOB, "never"], folder)}
    for kind in ("always", "never"):
        figures[kind], weights = arm(folder / kind, kind)
        hashes.add(weights)
        print(kind, figures[kind], flush=True)
    ratios = {f"{name}_ratio": round(figures["never"][f"{name}_bytes"]
                                     / figures["always"][f"{name}_bytes"], 4)
              for name in ("join", "checkpoint")}
    return {**ratios, **figures, "bits_equal": len(hashes) == 1,
            "met": max(ratios.values()) <= 0.03 and len(hashes) == 1}


if __name__ == "__main__":
    bench.run(measure)
