"""The numbers of a run for MLflow: one MLflow run, which all attempts of the run go on with.

writer.py → here → mlflow.MlflowClient → tracking server, or folder

What always holds:
1. The MLflow run is found by a tag with the id of the run, so each attempt and each first worker
   goes on with it.
2. MLflow keeps each value that it ever got. So a step that it has is not logged again, also if the
   run has gone back and does it again.
3. A store in a folder takes a request value by value, so a worker that dies may leave a part of a
   step there. The next one adds what is lacking.

mlflow-skinny suffices. It has the store in a folder, and the client of a tracking server.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

from elastic_trainer.loggers.row import Row, Run, require_package
from elastic_trainer.wire.redact import redacted

TAG = "elastic_trainer.run_id"
MOST = 500
"""The most numbers of one request. A tracking server takes 1000."""
STEP_METRIC = "train/loss"
"""The number that each row has. It is sent last, and tells which steps MLflow has whole."""
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
        known = client.get_experiment_by_name(self._experiment)
        experiment = known.experiment_id if known else client.create_experiment(self._experiment)
        found = client.search_runs([experiment], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
        else:
            made = client.create_run(experiment, run_name=run.name or None, tags={TAG: run.id})
            self._run_id = made.info.run_id
            for name, value in run.config.items():
                client.log_param(self._run_id, name, value)
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
