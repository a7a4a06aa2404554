"""The numbers of a run for MLflow: one MLflow run, which all attempts of the run go on with.

writer.py → here → mlflow.MlflowClient → tracking server, or folder

What always holds:
1. The MLflow run is found by a tag with the id of the run, so each attempt and each first worker
   goes on with it.
2. MLflow keeps each value that it ever got. So a step that it has is not logged again, also if the
   run has gone back and does it again.
3. A store in a folder takes a request value by value, so a worker that dies may leave a part of a
   step there. The next one adds what is lacking.
4. Such a store reads no run beside a torn one. What a worker has torn when it died is mended before
   the store is read (`mend`).

mlflow-skinny suffices. It has the store in a folder, and the client of a tracking server.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic_trainer.host.modes import replace_whole
from elastic_trainer.loggers.row import Row, Run, require_package
from elastic_trainer.wire.redact import redacted

TAG = "elastic_trainer.run_id"
MOST = 500
"""The most numbers of one request. A tracking server takes 1000."""
STEP_METRIC = "train/loss"
"""The number that each row has. It is sent last, and tells which steps MLflow has whole."""
WRITTEN_S = 2.0
"""A file that is empty for longer is not just being written."""
_ODD = re.compile(r"[^\w\-. /:]")
"""What MLflow does not allow in a name."""


class MLflow:
    """Log to MLflow: `uri` is a tracking server or a folder; by default what MLFLOW_TRACKING_URI
    says."""

    def __init__(self, uri: str | None = None, *, experiment: str = "elastic-trainer"):
        self._uri, self._experiment = uri, experiment
        self._client: Any = None
        self._run_id = ""
        self._rows: list[Row] = []
        self._lacking = 0
        """The first step that MLflow does not have whole."""

    def __repr__(self) -> str:
        return f"MLflow({redacted(str(self._uri))!r}, experiment={self._experiment!r})"

    def check(self) -> None:
        """Raise ConfigError without the package mlflow."""
        require_package("MLflow", "mlflow")

    def where(self) -> str:
        return f"{self._client.tracking_uri} run {self._run_id}"

    def open(self, run: Run) -> int:
        """Find the MLflow run, or make it, and return the step after the last one that it has."""
        # MLflow 3.17 refuses a store in a folder without it (file_store.py). The user has asked
        # for one by its path.
        if self._uri and ("://" not in self._uri or self._uri.startswith("file:")):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient  # here: it takes 1 s

        self._client = client = MlflowClient(tracking_uri=self._uri)
        known = client.get_experiment_by_name(self._experiment) or client.get_experiment(
            client.create_experiment(self._experiment))
        experiment = known.experiment_id
        if folder := _folder(client.tracking_uri):
            mend(folder / experiment, known.artifact_location)
        found = client.search_runs([experiment], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        its = found[0] if found else client.create_run(
            experiment, run_name=run.name or None, tags={TAG: run.id})
        self._run_id = its.info.run_id
        if its.info.status != "RUNNING":
            client.update_run(self._run_id, status="RUNNING")
        for name in run.config.keys() - its.data.params.keys():
            client.log_param(self._run_id, name, run.config[name])
        had = client.get_metric_history(self._run_id, STEP_METRIC)
        self._lacking = max((metric.step for metric in had), default=-1) + 1
        return self._lacking

    def write(self, row: Row) -> None:
        """Keep a row for the next request. Network, for the first one that was lacking."""
        if row.step == self._lacking:
            row = replace(row, values={name: value for name, value in row.values.items()
                                       if not self._has(name, row.step)})
        self._rows.append(row)
        if sum(len(row.values) for row in self._rows) >= MOST:
            self.flush()

    def flush(self) -> None:
        """Send the rows. Network."""
        from mlflow.entities import Metric

        rows, self._rows = self._rows, []
        metrics = [Metric(_ODD.sub("_", name), value, round(1000 * row.time), row.step)
                   for row in rows
                   for name, value in sorted(row.values.items(), key=lambda one: one[0]
                                             == STEP_METRIC)]
        for start in range(0, len(metrics), MOST):
            self._client.log_batch(self._run_id, metrics=metrics[start:start + MOST])

    def _has(self, name: str, step: int) -> bool:
        history = self._client.get_metric_history(self._run_id, _ODD.sub("_", name))
        return any(metric.step == step for metric in history)

    def close(self) -> None:
        """Send the rest, and mark the MLflow run as finished: it is opened again if need be."""
        if self._run_id:
            self.flush()
            self._client.set_terminated(self._run_id)


def _folder(uri: str) -> Path | None:
    """Return the folder of a store; None if it is none."""
    from mlflow.utils import file_utils
    from mlflow.utils import uri as uris

    files: Any = file_utils  # they have no types
    kinds: Any = uris
    return Path(files.local_file_uri_to_path(uri)) if kinds.is_local_uri(uri) else None


def mend(experiment: Path, artifacts: str) -> None:
    """Take away, or write again, what killed workers have torn in an experiment of a folder.

    `artifacts`: where the experiment has those of its runs.

    Source: mlflow 3.17, store/tracking/file_store.py. Each file, also a newer meta.yaml, is created
    first and then written at once. A new run has its meta.yaml before its tags.
    """
    mended = _mended(experiment, artifacts)
    while any(time.time() - file.stat().st_mtime < WRITTEN_S for file in mended):
        time.sleep(WRITTEN_S / 10)
        mended = _mended(experiment, artifacts)
    for file, text in mended.items():
        if text:
            replace_whole(file, text + "\n", opener=None)  # with the mode of MLflow's own files
        else:
            file.unlink(missing_ok=True)


def _mended(experiment: Path, artifacts: str) -> dict[Path, str]:
    """Return each torn file, and the text that it must have; "" if it must go."""
    mended = {}
    for meta in experiment.glob("*/meta.yaml"):
        run, tags = meta.parent, meta.with_name("tags")
        if not any(tag.stat().st_size for tag in tags.glob("*")):
            mended[meta] = ""  # MLflow gives each run a tag with its name: this one was being made
        elif not meta.stat().st_size:
            name = tags / "mlflow.runName"
            mended[meta] = json.dumps({  # it is YAML, too
                "artifact_uri": f"{artifacts}/{run.name}/artifacts", "end_time": None,
                "experiment_id": experiment.name, "lifecycle_stage": "active", "run_id": run.name,
                "run_name": name.read_text() if name.is_file() else run.name,
                "start_time": round(1000 * tags.stat().st_mtime), "status": 1,
                "user_id": "unknown"})
        if (tags / TAG).is_file():  # a user's own run may have a parameter without text
            mended |= {file: "" for file in _files(run / "params") if not file.stat().st_size}
        mended |= {file: file.read_text().rpartition("\n")[0] for file in _files(run / "metrics")
                   if _is_torn(file)}
    return mended


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]


def _is_torn(metric: Path) -> bool:
    """True if a file does not end with a whole line."""
    with open(metric, "rb") as content:
        content.seek(max(0, metric.stat().st_size - 1))
        return content.read() != b"\n"
