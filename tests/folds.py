"""Folds of events that only tests need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from elastic_trainer.driver.past import Past
from elastic_trainer.events.run import Run, ends_run
from elastic_trainer.events.schema import flaw
from elastic_trainer.views.status import Status
from elastic_trainer.views.status import status_of as status_of_run


def past_of(events: Iterable[dict[str, Any]]) -> Past:
    """Return what Follower.read would return of a log that has these events."""
    past = Past()
    for event in events:
        if flaw(event):
            past.malformed += 1
        else:
            past.read(event)
    return past


def status_of(events: Iterable[dict[str, Any]], name: str = "") -> Status:
    """Return what `watch` shows after these events."""
    return status_of_run(Run(name=name).read_all(events))


def host_seconds(events: Iterable[dict[str, Any]]) -> float:
    """Return the seconds of all hosts of a finished log together: of each while it is listed, or
    has a worker. Between two attempts a host is there if the next one lists it. A poller's events
    between a run's end and its next start say nothing of that time."""
    listed, doubtful = dict[str, float](), dict[str, tuple[float, float]]()
    workers, total, now, last = dict[str, str](), 0.0, 0.0, 0.0
    since = dict[str, float]()
    is_over = False

    def settle() -> None:
        nonlocal total
        there = {*listed, *workers.values(), *doubtful}
        for host in [host for host in since if host not in there]:
            total += now - since.pop(host)
        for host in there:
            since.setdefault(host, now)

    for event in events:
        last, now = last if is_over else now, max(now, event["time"])
        is_over = ends_run(event) or is_over and event["event"] != "run.started"
        last = now if ends_run(event) else last
        match event["event"]:
            case "run.started" | "attempt.started":
                at = last if event["event"] == "run.started" else now
                doubtful |= {host: (begun, at) for host, begun in since.items()
                             if host not in doubtful}
                listed, workers = {}, {}
                continue
            case "driver.host_added":
                listed[event["host"]] = now
                doubtful.pop(event["host"], None)
            case "driver.host_removed":
                listed.pop(event["host"], None)
            case "driver.worker_started":
                doubtful.pop(event["host"], None)
                workers[event["worker"]] = event["host"]
            case "driver.worker_gone":
                workers.pop(event["worker"], None)
            case "driver.generation_formed":
                for host, (begun, at) in doubtful.items():
                    since.pop(host, None)
                    total += at - begun
                doubtful = {}
            case "run.finished":
                break
        settle()
    for host, (begun, at) in doubtful.items():
        since.pop(host, None)
        total += at - begun
    return total + sum(now - begun for begun in since.values())
