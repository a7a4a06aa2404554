#!/usr/bin/env python3
"""Builds the Grafana dashboard: deploy/observe/dashboard.json, which Grafana imports.

    python deploy/observe/dashboard.py > deploy/observe/dashboard.json

Grafana's own library builds it (grafana-foundation-sdk, of the extra `dev`), so it has the form of
its schema.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import StackingConfig
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import GraphDrawStyle, StackingMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
RUN = '{run=~"$run"}'
FIGURES = (
    ("Goodput", "elastic_trainer_goodput_ratio", "percentunit"),
    ("Training time (ETTR)", "elastic_trainer_ettr_ratio", "percentunit"),
    ("Steps", "elastic_trainer_steps", "none"),
    ("Workers", "elastic_trainer_workers", "none"),
    ("Age of the checkpoint", "time() - elastic_trainer_last_checkpoint_timestamp_seconds", "s"),
    ("Oldest heartbeat", "elastic_trainer_oldest_heartbeat_seconds", "s"),
    ("Cost so far", "elastic_trainer_cost_total", "none"),
    ("Time since the last step", "time() - elastic_trainer_last_step_timestamp_seconds", "s"),
)
CURVES = (
    ("Samples a second", "elastic_trainer_samples_per_second", "{{run}}", "none"),
    ("Loss", "elastic_trainer_loss", "{{run}}", "none"),
    ("Workers of the world", "elastic_trainer_workers", "{{run}}", "none"),
    ("Workers lost in 5 minutes", "increase(elastic_trainer_workers_lost_total{}[5m])",
     "{{reason}}", "none"),
    ("Hosts by what they do", "deriv(elastic_trainer_host_seconds{}[5m])", "{{account}}", "none"),
    ("Hosts by state", "elastic_trainer_fleet_hosts", "{{state}}", "none"),
    ("Cost an hour", "rate(elastic_trainer_cost_total{}[5m]) * 3600", "{{run}} ({{currency}})",
     "none"),
    ("Steps done again in 5 minutes", "increase(elastic_trainer_steps_redone_total{}[5m])",
     "{{run}}", "none"),
)
STACKED = ("Hosts by what they do", "Hosts by state")


def expression(text: str) -> str:
    """Return a query for the chosen runs: its metric gets the selector."""
    if "{}" in text:
        return text.replace("{}", RUN)
    metric = text.split()[-1]
    return text.replace(metric, metric + RUN)


def query(text: str, legend: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(expression(text)).legend_format(legend)


def built() -> str:
    """Return the dashboard as JSON."""
    board = (dashboard.Dashboard("elastic-trainer").uid("elastic-trainer").refresh("10s")
             .time("now-1h", "now").tags(["training", "spot"])
             .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
             .with_variable(dashboard.QueryVariable("run").datasource(SOURCE).multi(True)
                            .include_all(True).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
                            .query("label_values(elastic_trainer_steps, run)")))
    for title, text, unit in FIGURES:
        board.with_panel(stat.Panel().title(title).unit(unit).height(4).span(3).datasource(SOURCE)
                         .with_target(query(text, "{{run}}")))
    for title, text, legend, unit in CURVES:
        panel = (timeseries.Panel().title(title).unit(unit).height(8).span(12).datasource(SOURCE)
                 .draw_style(GraphDrawStyle.LINE).with_target(query(text, legend)))
        if title in STACKED:
            panel.fill_opacity(60).stacking(StackingConfig().mode(StackingMode.NORMAL))
        board.with_panel(panel)
    return str(JSONEncoder(sort_keys=True, indent=2).encode(board.build()))


if __name__ == "__main__":
    print(built())
