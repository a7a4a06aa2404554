"""Events of made-up runs, and of a recorded one: what report, watch, page and picture are shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from elastic_trainer.renamed import present

Event = dict[str, Any]
RECORDED = Path(__file__).resolve().parent / "data" / "events-0.1.jsonl"
"""A run of four workers: one is killed twice, and new workers join."""


def events_of(path: Path) -> list[dict[str, Any]]:
    return [present(json.loads(line)) for line in path.read_text().splitlines()]


def write(folder: Path, events: list[Event]) -> Path:
    """Write the event log of a run into its folder."""
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(item) + "\n" for item in events))
    return folder


def event(time: float, name: str, *, attempt: int = 1, **facts: Any) -> Event:
    return {"time": time, "event": name, "run": "x", "attempt": attempt, **facts}


def step(time: float, number: int, *, attempt: int = 1, generation: int = 1, **facts: Any) -> Event:
    place = {"attempt": attempt, "generation": generation, "size": 2}
    line = {"samples": 8, "digest": 1, "loss": 3.0 - number, "lr": 0.1, "step_s": 1.0} | facts
    return event(time, "worker.step_committed", step=number, **place, **line)


def generation(time: float, number: int, at: int, source: str, pause_s: float, **facts: Any
               ) -> Event:
    return event(time, "worker.generation_started", generation=number, step=at, source=source,
                 pause_s=pause_s, **{"size": 2, "rank": 0} | facts)


def gone(time: float, host: str, pid: int, exit_code: int | None = -9, reason: str = "crashed"
         ) -> Event:
    return event(time, "driver.worker_gone", worker=f"{host}/0/1", host=host, pid=pid,
                 exit_code=exit_code, reason=reason)


JOB = {"dataset_size": 80, "global_batch": 8, "microbatches": 2, "epochs": 1, "seed": 0,
       "max_steps": None}
RUN = [
    event(0.0, "run.started", options={}),
    event(1.0, "attempt.started"),
    event(1.0, "driver.worker_started", host="local-1", slot=0, worker="local-1/0/1", pid=41),
    event(1.0, "driver.worker_started", host="local-2", slot=0, worker="local-2/0/1", pid=42),
    event(4.0, "driver.worker_ready", worker="local-1/0/1", boot_s=3.0),
    event(5.0, "driver.worker_ready", worker="local-2/0/1", boot_s=4.0),
    event(5.0, "driver.generation_formed", generation=1, size=2, hosts=["local-1", "local-2"],
          reason="start"),
    generation(6.0, 1, 0, "fresh", 5.0),
    event(6.0, "job.described", **JOB, reduce="exact"),
    step(7.0, 0),
    step(8.0, 1),
    event(8.5, "state.checkpoint_published", step=2, bytes=8, duration_s=0.1),
    step(9.0, 2),
    # step 3 is in flight for half a second, then worker 42 dies, and the pause is 0.4 s
    gone(9.6, "local-2", 42),
    event(9.8, "worker.step_redone", generation=2, step=3),
    generation(9.9, 2, 3, "memory", 0.4),
    step(9.9, 2, generation=2, step_s=0.0, repeated=True),
    step(11.0, 3, generation=2),
    gone(12.0, "local-1", 41, 137),
    event(12.0, "attempt.ended", exit_code=1, verdict="failed"),
    event(13.0, "attempt.started", attempt=2),
    generation(16.0, 1, 2, "checkpoint", 2.0, attempt=2),
    step(17.0, 2, attempt=2),
    step(18.0, 3, attempt=2),
    event(19.0, "run.finished", attempt=2, steps=4, samples=32, loss=0.0, weights_sha256="5a"),
    event(25.0, "attempt.ended", attempt=2, exit_code=0, verdict="finished"),
]


def formed(time: float, number: int, reason: str, *workers: str, attempt: int = 1) -> Event:
    return event(time, "driver.generation_formed", generation=number, size=len(workers),
                 reason=reason, workers=list(workers), hosts=[], attempt=attempt)


def worker(time: float, what: str, host: str, number: int = 1, **facts: Any) -> Event:
    return event(time, f"driver.worker_{what}", host=host, worker=f"{host}/0/{number}", pid=7,
                 **facts)


PAUSE = {"noticing_s": 0.1, "deciding_s": 0.2, "forming_s": 0.3, "transfer_s": 0.4,
         "redoing_s": 1.0, "duration_s": 2.0}
STORY = [
    event(0.0, "run.started", options={"horovodrun": ["-np", "2", "--min-np", "2"]}),
    event(0.0, "attempt.started"),
    event(0.0, "driver.host_added", host="a", slots=1),
    event(0.0, "driver.host_added", host="b", slots=1),
    worker(0.0, "started", "a"), worker(0.0, "started", "b"),
    worker(3.0, "ready", "a"), worker(4.0, "ready", "b"),
    formed(4.0, 1, "start", "a/0/1", "b/0/1"),
    generation(5.0, 1, 0, "fresh", 5.0), event(5.0, "job.described", **JOB, reduce="exact"),
    step(6.0, 0), step(7.0, 1),
    # A checkpoint's snapshot, and the user's own code; meanwhile host c joins the list.
    event(7.5, "driver.host_added", host="c", slots=1), worker(7.5, "started", "c"),
    step(8.5, 2, checkpoint_s=0.2),
    worker(8.6, "ready", "c"),
    # Step 3 takes its usual second, and host b dies in it.
    worker(9.0, "gone", "b", exit_code=-9, reason="crashed"),
    event(9.0, "driver.host_removed", host="b"),
    formed(9.5, 2, "death", "a/0/1", "c/0/1"),
    event(9.6, "worker.step_redone", generation=2, step=3),
    generation(9.7, 2, 3, "memory", 1.0),
    event(11.5, "worker.pause_ended", step=3, **PAUSE), step(11.5, 3, generation=2),
    event(12.0, "driver.host_added", host="d", slots=1), worker(12.0, "started", "d"),
    worker(12.5, "ready", "d"),
    step(12.5, 4, generation=2),
    # A third member is one more than the batch has micro-batches.
    formed(12.5, 3, "change", "a/0/1", "c/0/1", "d/0/1"),
    generation(12.5, 3, 5, "memory", 0.0),
    step(13.5, 5, generation=3),
    event(14.0, "run.finished", steps=6, samples=48, loss=0.0, weights_sha256="5a"),
]
