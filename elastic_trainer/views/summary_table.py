"""The summary of a run in words: of one run, or of several side by side.

result.json's content → here → tables (`report`, the end of `run`), page
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastic_trainer.views.tables import Table, print_table

if TYPE_CHECKING:
    from rich.console import Console

HOUR_S = 3600.0


def print_summary(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Print result.json's content for a person."""
    print_table(Table([], summary_rows(result), title=f"run {result['run']}"), console=console)


def side_by_side(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return the summaries of several runs as one table; "-" where a run has no such row."""
    columns = [dict(summary_rows(result)) for result in results]
    labels = dict.fromkeys(label for column in columns for label in column)
    return Table(["", *(f"run {result['run']}" for result in results)],
                 [[label, *(column.get(label, "-") for column in columns)] for label in labels])


def summary_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a result as pairs of a label and a text."""
    books, pauses, wall_s = result["books"], result["pauses"], result["wall_s"]
    spent = [(key.removesuffix("_s"), seconds) for key, seconds in books.items() if seconds]
    shares = [f"{phase} {seconds:.1f} s ({seconds / wall_s:.1%})" for phase, seconds in spent]
    lost = ", ".join(f"{count} {reason}" for reason, count in result["workers_lost"].items())
    state = "finished" if result["finished"] else "not finished"
    rows = [
        ("training", f"{state}: {result['steps']} steps"),
        ("samples", f"{result['samples']}" if result["samples"] or not result["steps"]
         else "not counted: the script is in Horovod's own style"),
        ("loss", "none" if result["loss"] is None else f"{result['loss']:.4f}"),
        ("goodput", f"{result['goodput']:.1%} of the time since the first step"),
        ("training time", f"{result['ettr']:.1%} of the time since the start (ETTR)"),
        ("wall time", f"{wall_s:.1f} s: {', '.join(shares)}"),
        ("hosts", _shares(result["host_seconds"]) or "none"),
        ("fleet", f"generations: {result['generations']}, attempts: {result['attempts']}"),
        ("workers lost", lost or "none"),
        ("pauses", f"{len(pauses)}, the longest {max(pauses):.2f} s" if pauses else "none"),
        ("failures", "none" if not result["failures"] else
         f"{result['failures']}, {result['stall_per_failure_s']:.2f} s of standstill each"),
        ("steps done again", f"{result['steps_redone']}"),
    ]
    if stalls := result.get("stalls"):
        rows.append(("standstills", f"{stalls['count']}, the longest {stalls['longest_s']:.1f} s; "
                     f"ELASTIC_TRAINER_LIMITS=hang_s={stalls['suggested_hang_s']:g} replaces a "
                     f"worker that hangs in your code"))
    if clock := result.get("clock_set_back"):
        rows.append(("clock", f"was set back by {clock['by_s']:,.0f} s at {clock['event']}: wall "
                              f"time and goodput are wrong"))
    if slow := result.get("slow_hosts"):
        rows.append(("slow hosts", ", ".join(f"{host}: {times:.1f} times its peers"
                                             for host, times in slow.items())))
    if costs := result.get("costs"):
        rows += _cost_rows(costs)
    if sent := result.get("compression"):
        rows.append(("compression", f"{sent['compress']}: each worker sends "
                     f"{sent['sent_bytes'] / 1e6:.3g} MB of gradients a step instead of "
                     f"{sent['uncompressed_bytes'] / 1e6:.3g} MB; relative error "
                     f"{sent['relative_error']:.2g}"))
    if result.get("skipped_lines"):
        rows.append(("skipped", f"{result['skipped_lines']} lines of the event log, torn or "
                                f"malformed"))
    rows += [("left out", f"{name} {reason}")
             for name, reason in result.get("segments_left_out", {}).items()]
    if result.get("unknown_events"):
        rows.append(("unknown", f"{result['unknown_events']} events that this version of "
                                f"elastic-trainer does not know"))
    if result["weights_sha256"] is not None:
        rows.append(("weights", f"SHA-256 {result['weights_sha256']}"))
    return rows


def _shares(seconds: Mapping[str, float]) -> str:
    """Return accounts as hours of hosts and shares: "2.0 h: useful step 90.0 %, …"."""
    whole = sum(seconds.values())
    shares = [f"{name} {spent / whole:.1%}" for name, spent in
              sorted(seconds.items(), key=lambda item: -item[1])] if whole else []
    return f"{whole / HOUR_S:.4g} h: {', '.join(shares)}" if shares else ""


def _cost_rows(costs: Mapping[str, Any]) -> list[tuple[str, str]]:
    def money(amount: float) -> str:
        return f"{amount:.4g} {costs['currency']}"

    samples = costs["per_million_samples"]
    return [
        ("cost", money(costs["cost"])),
        ("a million samples", "-" if samples is None else money(samples)),
        ("saved", f"{money(costs['saved'])} of {money(costs['on_demand'])} on demand"),
        ("cost of losses", money(costs["losses"])),
    ]
