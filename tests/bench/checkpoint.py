"""What a checkpoint costs and what it saves: pause, slow-down, time to published, restore, and a
restart from zero hosts.

    .venv/bin/python tests/bench/checkpoint.py [--gb 0.25] [--every 20] [--store s3|folder]

There are 4 workers with a state of --gb (weights and Adam's moments) and a real S3 server: Ceph's
radosgw with objects in memory, at nice 19, because elsewhere it has cores of its own. The peers run
in the same processes, at the same moment, with the same state: a bare copy, `torch.save`,
`torch.distributed.checkpoint.async_save`, and `torch.save`/`torch.load` through s3fs. Then all
workers and the driver are killed, and the phases of the next attempt are timed. After its first
step it has to stop. It then makes one checkpoint while no worker trains, as the peer does.

The first checkpoint of a process is cold (its memory is new), and so are the first `torch.save` and
`async_save`. They are timed before any other: `first_pause_s`, `first_torch_save_s`,
`first_async_save_pause_s`. The other figures are of later ones.

The last line is one JSON object with first_pause_s, first_torch_save_s, pause_s, memcpy_s,
torch_save_s, async_save_pause_s, step_slowdown, publish_s, peer_publish_s, restore_s,
peer_restore_s and restart_phases. publish_s_beside_training is of the checkpoints during training.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import bench
import s3_servers
from cluster import Cluster

PEERS_AT = 7
CHECKPOINTS = 5
DEADLINE_S = 1800.0


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the job, kill it and resume it."""
    with ExitStack() as servers:
        store, peer = [], []
        if options.store == "s3":
            server = servers.enter_context(s3_servers.ceph(folder / "s3", nice=19))
            os.environ.update(s3_servers.environment(server))
            store = ["--store", f"s3://{s3_servers.BUCKET}/bench"]
            peer = ["--peer-url", f"{s3_servers.BUCKET}/peer.pt"]
        job = bench.job("big.py", "--gb", str(options.gb), "--every", str(options.every),
                        "--peers-at", str(PEERS_AT), "--folder", str(folder), *peer)
        result = measured(folder, job, store, options.every)
    return {"gb": options.gb, "store": options.store, **result}


def measured(folder: Path, job: list[str], store: list[str], every: int) -> dict[str, Any]:
    """Return the figures of one run and its resumption."""
    # `ring` needs less memory.
    with Cluster(folder / "cluster", command=job, options=[*store, "--reduce", "ring"]) as cluster:
        def published(count: int) -> Any:
            return lambda: len(cluster.events("state.checkpoint_published")) >= count

        cluster.wait_for("checkpoints", published(CHECKPOINTS), DEADLINE_S)
        steps = cluster.events("worker.step_committed")
        checkpoints = cluster.events("state.checkpoint_published")[:CHECKPOINTS]
        begun = [e["step"] for e in checkpoints]
        assert begun == [every * n for n in range(1, CHECKPOINTS + 1)], (
            f"checkpoints at {begun}: an upload takes longer than --every {every} steps")
        peers = [json.loads(path.read_text()) for path in sorted(folder.glob("peers-*.json"))]
        first_pauses, *pauses = noted(folder, "pause")
        copies = noted(folder, "memcpy")
        cluster.kill_everyone()
        killed_at = time.time()
        cluster.start()
        cluster.wait_for("restore", lambda: cluster.events("state.checkpoint_restored"), DEADLINE_S)
        restored = cluster.events("state.checkpoint_restored")[0]
        cluster.wait_for("step", lambda: after(cluster, restored["time"]), DEADLINE_S)
        first = after(cluster, restored["time"])[0]
        os.kill(cluster.supervisor_pid(), signal.SIGTERM)
        cluster.wait()
        last = cluster.events("state.checkpoint_published")[-1]
        assert last["step"] == after(cluster, restored["time"])[-1]["step"] + 1, last
        written = [e["uploaded_bytes"] for e in (*checkpoints, last)]
        assert set(written) == {last["bytes"]}, (
            f"not all of the state was uploaded: {written} of {last['bytes']} bytes")
        starting = [e["time"] for e in cluster.events("attempt.started")][-1]
        ready = [e["time"] for e in cluster.events("driver.worker_ready") if e["time"] > killed_at]
        formed = next(e["time"] for e in cluster.events("driver.generation_formed")
                      if e["time"] > killed_at)
    # The memory of the first checkpoint is new: its pages cost more than its copy.
    later = checkpoints[1:]
    during = [(e["time"] - e["duration_s"], e["time"]) for e in checkpoints]
    beside, alone, was_beside = [], [], False
    for step in steps:
        is_beside = any(step["time"] - step["step_s"] < end and step["time"] > start
                        for start, end in during)
        if is_beside and step["time"] > checkpoints[0]["time"]:
            beside.append(step["step_s"])
        # After an upload the parts of the old checkpoint are deleted.
        elif step["step"] > PEERS_AT and not is_beside and not was_beside:
            alone.append(step["step_s"])
        was_beside = is_beside
    assert min(len(alone), len(beside)) >= 10, (len(alone), len(beside))
    pause = statistics.median(seconds for workers in pauses for seconds in workers)
    copy = statistics.median(seconds for workers in copies for seconds in workers)
    read = {name: restored[name]
            for name in ("list_s", "read_s", "verify_s", "transfer_s", "load_s")}
    peer_pauses = {name: round(statistics.median(p[name] for p in peers), 4)
                   for name in ("async_save_pause_s", "first_async_save_pause_s")}
    return {
        "pause_s": round(pause, 5), "memcpy_s": round(copy, 5),
        "pause_over_memcpy": round(pause / copy, 3),
        "first_pause_s": round(max(first_pauses), 4),
        "first_torch_save_s": round(peers[0]["first_torch_save_s"], 4),
        "slowest_pauses_s": [round(max(workers), 4) for workers in pauses],
        "slowest_memcpys_s": [round(max(workers), 4) for workers in copies],
        "torch_save_s": round(peers[0]["torch_save_s"], 4),
        **peer_pauses,
        "step_s": round(statistics.median(alone), 4),
        "step_s_beside_upload": round(statistics.median(beside), 4),
        "step_slowdown": round(statistics.mean(beside) / statistics.mean(alone), 3),
        "steps_measured": [len(alone), len(beside)],
        "publish_s": last["duration_s"],
        "publish_s_beside_training": statistics.median(e["duration_s"] for e in later),
        "peer_publish_s": round(peers[0].get("peer_publish_s", 0.0), 3),
        "restore_s": round(sum(read.values()), 3),
        "peer_restore_s": round(peers[0].get("peer_restore_s", 0.0), 3),
        "bytes": checkpoints[0]["bytes"], "parts": checkpoints[0]["parts"],
        "restart_phases": {
            "start_s": round(starting - killed_at, 3), "boot_s": round(max(ready) - starting, 3),
            "places_s": round(formed - max(ready), 3), **read,
            "first_step_s": round(first["time"] - restored["time"], 3),
            "together_s": round(first["time"] - killed_at, 3)},
    }


def noted(folder: Path, what: str) -> list[tuple[float, ...]]:
    """Return what every worker has noted, checkpoint by checkpoint. A checkpoint that has begun on
    some workers only is left out."""
    by_worker = [map(float, path.read_text().split()) for path in sorted(folder.glob(f"{what}-*"))]
    return list(zip(*by_worker, strict=False))


def after(cluster: Cluster, moment: float) -> list[dict[str, Any]]:
    """Return the steps that were done after a moment."""
    return [e for e in cluster.committed() if e["time"] > moment]


if __name__ == "__main__":
    bench.run(measure, gb=0.25, every=20, store=("s3", "folder"))
