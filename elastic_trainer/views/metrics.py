"""A run in Prometheus's text format, as `watch --web` serves it at /metrics.

live (status, result, rows of hosts) → here → overview, web → Prometheus

What always holds:
1. It is a pure function of the run's result and status. A scrape reads what is new in the log.
2. METRICS declares each metric once: its type, its unit in its name, its help. The rules and the
   dashboard in deploy/observe use no others (tests/test_metrics_page.py).
3. A counter never falls while the log is the same (live.py, rule 5). Steps that a start from a
   checkpoint dropped are a counter of their own, and `steps` is a gauge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector

from elastic_trainer.events.event_kind import Phase
from elastic_trainer.events.sentences import ENDINGS
from elastic_trainer.views.prices import Pricing
from elastic_trainer.views.status import STATES, HostRow, Status

PREFIX = "elastic_trainer_"
METRICS = {
    "steps": ("gauge", "Finished steps of the kept history."),
    "steps_due": ("gauge", "Steps that the run is to have."),
    "samples": ("gauge", "Samples of the kept history."),
    "samples_per_second": ("gauge", "Samples a second over the last steps, pauses included."),
    "loss": ("gauge", "The loss of the newest step."),
    "workers": ("gauge", "Workers of the newest world."),
    "hosts": ("gauge", "Hosts that have worked for the run so far."),
    "is_training": ("gauge", "1 while the run trains; 0 while it boots, pauses or restarts."),
    "is_finished": ("gauge", "1 when the run has finished."),
    "is_over": ("gauge", "1 when the run has ended: finished, failed or interrupted."),
    "goodput_ratio": ("gauge", "Time of the kept steps, by the time since the first world."),
    "ettr_ratio": ("gauge", "Time of the kept steps, by the time since the start."),
    "started_timestamp_seconds": ("gauge", "When the run was started, or resumed the last time."),
    "last_event_timestamp_seconds": ("gauge", "When the newest event was written."),
    "last_step_timestamp_seconds": ("gauge", "When the newest step was finished."),
    "last_checkpoint_timestamp_seconds": ("gauge", "When the newest checkpoint was published."),
    "heartbeats_timestamp_seconds": ("gauge", "When the driver measured oldest_heartbeat_seconds: "
                                     "some 20 s ago if the run is read from a bucket."),
    "attempts_total": ("counter", "Attempts that were started."),
    "generations_total": ("counter", "Worlds that have trained."),
    "steps_redone_total": ("counter", "Steps that were done again, or dropped."),
    "workers_lost_total": ("counter", "Workers that were lost, by reason."),
    "checkpoints_total": ("counter", "Checkpoints that were published."),
    "failures_total": ("counter", "Pauses after a loss, and attempts after the first one."),
    "standstills_total": ("counter", "Steps that stood still (driver.step_stalled)."),
    "slow_hosts": ("gauge", "Hosts that were found slower than their peers."),
    "warnings_total": ("counter", "Events with the level warning or error, by level."),
    "run_seconds_total": ("counter", "Wall time of the run, by what it did."),
    "host_seconds": ("gauge", "Time of all hosts together, by account. Useful steps become redone "
                     "ones when a start from a checkpoint drops them."),
    "fleet_hosts": ("gauge", "Hosts that are there, by state (docs/guide/watch.md)."),
    "oldest_heartbeat_seconds": ("gauge", "Age of the newest heartbeat of the worker that has been "
                                 "silent longest."),
    "host_price_per_hour": ("gauge", "Spot price of each host that is there. With --prices."),
    "cost_total": ("counter", "What the hosts have cost, at their spot prices. With --prices."),
    "skipped_lines_total": ("counter", "Lines of the event log that no reader takes."),
}
"""Type and help of each metric, by its name without the prefix."""
Sample = tuple[str, Mapping[str, str], float]


class Scrape(Collector):
    """The metrics of runs, by their label `run`."""

    def __init__(self, runs: Mapping[str, Iterable[Sample]]):
        self._runs = runs

    def collect(self) -> Iterable[Metric]:
        found = {name: Metric(PREFIX + name.removesuffix("_total"), meaning, kind)
                 for name, (kind, meaning) in METRICS.items()}
        for run, of_run in self._runs.items():
            for name, labels, value in of_run:
                found[name].add_sample(PREFIX + name, {"run": run, **labels}, value)
        return [metric for metric in found.values() if metric.samples]


def text_of(runs: Mapping[str, Iterable[Sample]]) -> str:
    """Return the metrics of runs in Prometheus's text format 0.0.4."""
    return generate_latest(Scrape(runs)).decode()


def samples(status: Status, result: Mapping[str, Any], moments: Mapping[str, float],
            counts: Mapping[str, int], booked: Mapping[Phase, float], rows: Sequence[HostRow],
            prices: Pricing | None) -> Iterator[Sample]:
    """Yield each sample: the metric's name, its labels but `run`, its value. One that is unknown is
    left out.

    moments: seconds since 1970 of the newest event, step and checkpoint, by the metric's name.
    counts: checkpoints_total, the hosts so far, and the events of level warning and error.
    booked: the seconds of the run so far by phase; no later event changes what they were.
    """
    gauges = {
        "steps": result["steps"], "steps_due": status.steps_due, "samples": result["samples"],
        "samples_per_second": status.samples_per_s, "loss": result["loss"],
        "workers": status.size, "hosts": counts["hosts"],
        "is_training": status.phase == "training", "is_finished": result["finished"],
        "is_over": status.is_over, "started_timestamp_seconds": status.started,
        "goodput_ratio": result["goodput"], "ettr_ratio": result["ettr"], **moments,
        "attempts_total": result["attempts"], "generations_total": result["generations"],
        "steps_redone_total": result["steps_redone"],
    }
    for name, value in gauges.items():
        if value is not None:
            yield name, {}, float(value)
    for reason, ending in ENDINGS.items():  # all of them: a rate needs the 0 before the first one
        if ending.is_lost:
            yield ("workers_lost_total", {"reason": reason},
                   float(result["workers_lost"].get(reason, 0)))
    yield "checkpoints_total", {}, float(counts["checkpoints_total"])
    yield "failures_total", {}, float(result["failures"])
    yield "standstills_total", {}, float(result.get("stalls", {}).get("count", 0))
    yield "slow_hosts", {}, float(len(result.get("slow_hosts", {})))
    for level in ("warning", "error"):
        yield "warnings_total", {"level": level}, float(counts.get(level, 0))
    for phase, seconds in booked.items():
        yield "run_seconds_total", {"phase": phase.value}, round(seconds, 3)
    for account, seconds in result["host_seconds"].items():
        yield "host_seconds", {"account": account}, seconds
    there = [row for row in rows if row.state != "gone"]
    yield from _of_hosts(there)
    if prices:
        yield from _of_prices(there, prices, result)
    yield "skipped_lines_total", {}, float(status.skipped)


def _of_hosts(rows: Sequence[HostRow]) -> Iterator[Sample]:
    there = Counter(row.state for row in rows)
    for state in STATES[:-1]:
        yield "fleet_hosts", {"state": state}, float(there[state])
    silences = [row.silent_s for row in rows if row.silent_s is not None]
    if silences:
        yield "oldest_heartbeat_seconds", {}, max(silences)


def _of_prices(rows: Sequence[HostRow], prices: Pricing, result: Mapping[str, Any]
               ) -> Iterator[Sample]:
    currency = {"currency": prices.currency}
    for row in rows:
        if price := prices.find(row.host, row.type, row.zone, row.lifecycle):
            yield ("host_price_per_hour", {"host": row.host, "type": row.type, **currency},
                   price.spot)
    if "costs" in result:
        yield "cost_total", currency, result["costs"]["cost"]
