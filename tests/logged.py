"""What the real libraries read of what our loggers have written: (step, value) of each number, in
the order in which it stands there."""

from __future__ import annotations

import csv
import json
import math
import time
from pathlib import Path

from elastic_trainer.loggers.wandb_run import records_of

DEADLINE_S = 60.0
Series = dict[str, list[tuple[int, float]]]


def of_csv(path: Path) -> Series:
    """Read a CSV file."""
    series: Series = {}
    with open(path, newline="") as file:
        for line in csv.DictReader(file):
            for name, value in line.items():
                if name not in ("step", "time", "attempt") and value:
                    series.setdefault(name, []).append((int(line["step"]), float(value)))
    return series


def of_tensorboard(folder: Path) -> Series:
    """Read as TensorBoard does, which drops what a later file replaces."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {name: [(one.step, one.value) for one in found.Scalars(name)]
            for name in found.Tags()["scalars"]}


def of_mlflow(folder: Path) -> Series:
    """Read all that MLflow's store has of its only run of ours."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=str(folder))
    experiment = client.get_experiment_by_name("elastic-trainer")
    assert experiment
    (run,) = client.search_runs([experiment.experiment_id])
    return {name: [(one.step, one.value)
                   for one in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics}


def of_wandb(folder: Path) -> Series:
    """Read the files that `wandb sync` sends, in the order of their runs.

    `finish()` returns before W&B's own process has written the rest of a file. On a busy machine
    the file may still be empty then. `teardown()` waits for the end of that process, as W&B's exit
    handler does.
    """
    import wandb

    wandb.teardown()
    series: Series = {}
    ids = set()
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    deadline = time.monotonic() + DEADLINE_S
    before: list[str] = []
    # Rows may follow the record of the end: the file is whole when it has both and grows no more.
    while not {"exit", "history"} <= set(kinds := _kinds_of(files[-1])) or kinds != before:
        assert time.monotonic() < deadline, (files[-1], kinds)
        before = kinds
        time.sleep(0.5)
    for file in files:
        for record in records_of(file):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") != "history":
                continue
            items = {item.key or ".".join(item.nested_key): item.value_json
                     for item in record.history.item}
            step = int(items.pop("_step", record.history.step.num))
            for name, value in items.items():
                if not name.startswith("_"):
                    series.setdefault(name, []).append((step, _number(value)))
    assert len(ids) == 1, ids
    return series


def _kinds_of(file: Path) -> list[str]:
    return [record.WhichOneof("record_type") for record in records_of(file)]


def _number(text: str) -> float:
    value = json.loads(text)
    return float(value) if value not in ("NaN", "Infinity") else math.nan
