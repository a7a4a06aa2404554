"""Summarize a run: its steps, the cost of the fleet's changes, and the books of its wall time.

    elastic-trainer report runs/NAME

Where it stands: event log → run → here → result.json; views/tables prints it.

What always holds:
1. The books close: booting + training + pausing + restarting + stopped = wall_s, to the rounding.
2. goodput is between 0 and 1, and a step that was done twice counts once.
3. result.json is replaced whole: a reader sees the old one or the new one. If it has
   "finished": true, the run was not resumed with more steps afterwards. A loss that is no number
   is null there.

What it does not do: judge. It summarizes events that contradict each other, too; `verify` judges.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from elastic_trainer.events.accounts import Accounts, Event, Host
from elastic_trainer.events.event_kind import Phase
from elastic_trainer.events.ledger import Account
from elastic_trainer.events.run import Run
from elastic_trainer.events.schema import UNREADABLE
from elastic_trainer.events.segments import Reader
from elastic_trainer.events.told import Told
from elastic_trainer.host.cycles import no_search_for_cycles
from elastic_trainer.host.modes import replace_whole

RESULT_FILE = "result.json"
COMPRESSION = ("compress", "sent_bytes", "uncompressed_bytes", "relative_error")
"""The fields of worker.gradients_compressed that result.json has."""


def summarize(events: Iterable[Event]) -> dict[str, Any]:
    """Return the content of result.json: a pure function of a run's events, which are read once."""
    return result_of(Run().read_all(events))


def result_of(run: Run) -> dict[str, Any]:
    """Return the content of result.json.

    steps, samples, loss: of the kept history, without steps that a start from a checkpoint dropped.
    weights_sha256: None until the run has finished.
    steps_redone: steps in flight that were done again, and committed steps that were dropped.
    wall_s: from the first event to run.finished, or to the last event of an unfinished run.
    pauses: the duration_s of each worker.pause_ended: from the end of the last finished step, less
        one normal step, to the end of the next. In a log of version 0.1: the pause_s of each
        generation but the first of an attempt.
    books: wall_s, divided among accounts (docs/events.md names the events that close each account).
        booting_s: until the first generation starts, also after a stop by a person;
        training_s: steps, kept or not, the time between them, and the end of what a person stops;
        pausing_s: the pauses;
        restarting_s: from an attempt's last sign of training to the first generation of the next;
        stopped_s: from the last event of an invocation to the next start by a person.
    goodput: the sum of step_s of the kept steps / (wall_s - booting_s - stopped_s). Pauses,
        restarts, steps done twice and time between steps lower it. 0 if no training began.
    compression: what a worker sends of its gradients in each step in 16 bits and without, in bytes,
        and the relative error of the cast, as last measured. Only with `compress`.
    stalls: how often the driver found that a step stood still, the longest time in seconds, and the
        `hang_s` that fits this run. Only if there was one, as the next two.
    slow_hosts: how many times longer than its peers a worker on the host computed.
    clock_set_back: by how many seconds an event is earlier than one before it, the event's name,
        and its time. The events count as of the latest time before.
    ettr: effective training time ratio: the sum of step_s of the kept steps / (wall_s - stopped_s).
        Unlike goodput it counts the boots (Kokolis et al., arXiv 2410.21680).
    failures: pauses that the loss of a worker caused, and attempts after the first one of an
        invocation.
    stall_per_failure_s: the seconds of those pauses, of restarts, and of the steps that they
        dropped, for each failure; None without failures (arXiv 2602.00277).
    host_seconds: the seconds of all hosts by account (ledger.py, docs/guide/report.md).
    hosts: the workers of each, and their seconds booting and working (from ready until gone), and
        by account. Of a cloud's machine also type, zone, lifecycle, and start and end of its lives.
    """
    accounts = run.closed(is_drawn=True)
    return figures_of(run, accounts) | {"hosts": hosts_of(accounts)}


def figures_of(run: Run, accounts: Accounts) -> dict[str, Any]:
    """Return the content of result.json without its hosts: it costs the same for any log.

    `accounts`: those of the run, closed.
    """
    newest, samples = run.steps.newest, accounts.samples
    loss = newest.loss if newest and samples else None
    books = {f"{phase.value}_s": seconds for phase, seconds in accounts.periods.seconds().items()}
    wall_s = sum(books.values())
    finished = accounts.finished or {}
    return {
        "run": run.name,
        "finished": accounts.finished is not None,
        "steps": finished.get("steps", accounts.kept_steps),
        "samples": finished.get("samples", samples),
        "loss": finished.get("loss", loss),
        "weights_sha256": finished.get("weights_sha256"),
        "attempts": len(accounts.attempts),
        "generations": accounts.generations,
        "steps_redone": len(accounts.redone) + accounts.rolled_back,
        "steps_rolled_back": accounts.rolled_back,
        "wall_s": round(wall_s, 3),
        "goodput": round(accounts.share(Phase.BOOTING, Phase.STOPPED) or 0.0, 4),
        "ettr": round(accounts.share(Phase.STOPPED) or 0.0, 4),
        **_failures(accounts, books["restarting_s"]),
        "books": {key: round(seconds, 3) for key, seconds in books.items()},
        "host_seconds": _named(accounts.hosts.totals()),
        "pauses": [round(pause.duration_s, 3) for pause in accounts.pauses],
        "workers_lost": dict(accounts.lost),
        **_remarks(run),
    }


def _remarks(run: Run) -> dict[str, Any]:
    """Return what only some runs have."""
    found: dict[str, Any] = {}
    if (stalls := run.stalls).count:
        found["stalls"] = {"count": stalls.count, "longest_s": round(stalls.longest_s, 1),
                           "suggested_hang_s": stalls.suggested_hang_s}
    if stalls.slow:
        found["slow_hosts"] = {host: round(min(times, 1e6), 2)
                               for host, times in stalls.slow.items()}
    if run.set_back:
        by_s, event = run.set_back
        found["clock_set_back"] = {"by_s": round(by_s, 1), "event": str(event["event"]),
                                   "time": float(event["time"])}
    if run.compressed:
        found["compression"] = {name: run.compressed.get(name) for name in COMPRESSION}
    return found


def _failures(accounts: Accounts, restarting_s: float) -> dict[str, Any]:
    """Return how often the run stood still because of a loss, and for how long each time."""
    restarts = len(accounts.attempts) - len({invocation for invocation, _ in accounts.attempts})
    failures = accounts.failures + restarts
    lost_s = accounts.stalled_s + accounts.dropped_s + restarting_s
    return {"failures": failures,
            "stall_per_failure_s": round(lost_s / failures, 3) if failures else None}


def host_names(accounts: Accounts) -> set[str]:
    return {*accounts.crews.hosts, *accounts.hosts.lives}


def hosts_of(accounts: Accounts) -> dict[str, Any]:
    return {name: _host(accounts, name) for name in sorted(host_names(accounts))}


def _host(accounts: Accounts, name: str) -> dict[str, Any]:
    crew, hosts = accounts.crews.hosts.get(name, Host()), accounts.hosts
    seconds = hosts.seconds(name) if name in hosts.lives else {}
    machine: dict[str, Any] = dict(accounts.crews.machines.get(name, {}))
    if machine and name in hosts.lives:
        machine["lives"] = [[round(at, 3) for at in life] for life in hosts.lives_of(name)]
    return {**crew.summary(accounts.now), **machine, "seconds": _named(seconds)}


def _named(seconds: Mapping[Account, float]) -> dict[str, float]:
    """Return the accounts that are not empty, by name."""
    return {account.value: round(spent, 3) for account, spent in seconds.items() if spent > 5e-4}


def read_run(run_dir: str | Path, told: Told | None = None) -> tuple[Run, dict[str, Any]]:
    """Read a run's event log once; return the run and the content of result.json.

    skipped_lines: torn and malformed lines, which are left out.
    unknown_events: events that event_table does not have, e.g. of a newer version.
    segments_left_out: the segments of the log that are missing or cannot be read to their end, with
    the reason; only if there is one.
    """
    log = Reader(Path(run_dir))
    with no_search_for_cycles():  # it took a tenth of the time for 10^6 steps
        run = Run(told=Told() if told is None else told).read_all(log.events(to_the_end=True))
    run.name = run.name or Path(run_dir).resolve().name
    counts = {"skipped_lines": log.malformed, "unknown_events": log.unknown}
    holes = {"segments_left_out": log.left_out} if log.left_out else {}
    return run, result_of(run) | counts | holes


def summarize_log(run_dir: str | Path) -> dict[str, Any]:
    """Return the content of result.json of a run's event log."""
    return read_run(run_dir)[1]


def json_of(content: Any) -> str:
    """Return a text in JSON. A number that JSON does not have (NaN, infinity) is null."""
    try:
        return json.dumps(content, indent=2, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(content), indent=2)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _finite(part) for name, part in content.items()}
    if isinstance(content, list):
        return [_finite(part) for part in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_result(run_dir: str | Path) -> dict[str, Any]:
    """Write the run's result.json whole, and return its content.

    If the file cannot be written, the run has not failed: the event log has its content. A message
    on stderr informs the user.
    """
    folder = Path(run_dir)
    result = summarize_log(folder)
    try:
        replace_whole(folder / RESULT_FILE, json_of(result) + "\n")
    except OSError as error:
        print(f"elastic-trainer: {folder / RESULT_FILE} cannot be written: {error}. Free some disk "
              f"space and start the same run again; it writes the file.", file=sys.stderr)
    return result


def take_back_result(run_dir: str | Path, steps: int) -> None:
    """Write result.json again if it is of a finished run that has another number of steps now."""
    try:
        result = json.loads(Path(run_dir, RESULT_FILE).read_text())
        is_of_another_length = result.get("finished") and result.get("steps") != steps
    except (FileNotFoundError, RecursionError, *UNREADABLE):
        return
    if is_of_another_length:
        write_result(run_dir)
