"""Tables, and what `report` and `hosts` print as tables: the summary of a run, the poller's table.

    elastic-trainer hosts HOSTS_FILE

result.json's content, HOSTS_FILE.json of the poller → here → a terminal, Markdown, page.html

All that commands print as a table looks the same: no frames, the heads are dim, long texts fold.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elastic_trainer.wire.plain import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

PIPE_COLUMNS = 200
"""Columns where stdout is no terminal."""


@dataclass(frozen=True)
class Table:
    """Texts in rows."""

    heads: Sequence[str]
    """Of the columns; none: the first cell of each row is its head."""
    rows: Sequence[Sequence[str]]
    title: str = ""
    kind: str = ""
    """Classes of a page's table."""
    levels: Sequence[str] = ()
    """The class of each row."""
    links: Sequence[str] = ()
    """The address that the first cell of each row leads to."""


def grid(heads: Sequence[str], title: str = "", numbers: Collection[str] = ()) -> RichTable:
    """Return an empty table for a terminal; the columns `numbers` are aligned to the right."""
    from rich.table import Table as RichTable  # a page does without rich: 0.1 s
    from rich.text import Text

    table = RichTable(title=Text(plain(title), style="bold") if title else None, box=None,
                      title_justify="left", padding=(0, 2, 0, 0), pad_edge=False,
                      header_style="dim", show_header=any(heads) or not heads)
    for head in heads:
        table.add_column(Text(plain(head)), overflow="fold",
                         justify="right" if head in numbers else "left")
    return table


def print_table(table: Table, numbers: Collection[str] = (), console: Console | None = None
                ) -> None:
    """Print a table for a person. No text of it is markup, or a control sequence."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    heads = table.heads or ["" for _ in table.rows[0]]
    shown = grid(heads, table.title, numbers)
    if not any(table.heads[:1]):
        shown.columns[0].style = "bold"
    for row in table.rows:
        shown.add_row(*(Text(plain(cell)) for cell in row))
    console.print(shown)


def markdown(table: Table) -> str:
    return "\n".join([_line(table.heads), "|---" * len(table.heads) + "|", *map(_line, table.rows)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    """Return a text that Markdown takes for nothing but text."""
    text = plain(text)
    for mark in "\\|`*_<>[]":
        text = text.replace(mark, f"\\{mark}")
    return text


HOUR_S = 3600.0


def print_summary(result: Mapping[str, Any], console: Console | None = None) -> None:
    print_table(Table([], summary_rows(result), title=f"run {result['run']}"), console=console)


def side_by_side(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return the summaries of several runs as one table; "-" where a run has no such row."""
    columns = [dict(summary_rows(result)) for result in results]
    labels = dict.fromkeys(label for column in columns for label in column)
    return Table(["", *(f"run {result['run']}" for result in results)],
                 [[label, *(column.get(label, "-") for column in columns)] for label in labels])


def summary_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
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


POLLER_GONE_S = 10.0
"""A poller that runs writes its table every second; the age of an older table is shown."""
COLUMNS = ("host", "type", "slots", "cloud", "agent", "workers", "standby", "notice", "since", "in",
           "why")


def print_hosts(fleet: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the table, and what a person should know of the cloud and the poller."""
    print_table(Table(COLUMNS, [host_row(host, fleet["time"]) for host in fleet["hosts"]]),
                console=console)
    for line in remarks(fleet, age_s=time.time() - fleet["time"]):
        print(plain(line))


def host_row(host: Mapping[str, Any], now: float) -> tuple[Any, ...]:
    cloud = " ".join(filter(None, [host["lifecycle"], host["state"], host["group_state"]]))
    refused = f", {host['refused']} refused" if host["refused"] else ""
    workers = ", ".join(
        f"{count} at {doing}" if doing.startswith("step") else f"{count} {doing}"
        for doing, count in sorted(Counter(host["workers"] or ()).items()))
    standby = "" if host["standby"] is None else str(host["standby"])
    since = "" if host["since_s"] is None else f"{host['since_s']:.0f} s"
    return (host["name"], host["type"], host["slots"], cloud, host["agent"] + refused, workers,
            standby, _notice(host, now), since, "in" if host["is_in"] else "out",
            host["agent_why"] if host["is_in"] else host["why"])


def _notice(host: Mapping[str, Any], now: float) -> str:
    if host["deadline"]:
        return f"{host['deadline'] - now:.0f} s left"
    hazards = [f"{code} in {in_s / 60:.0f} min" for code, in_s in host["events"]]
    return ", ".join(hazards + ["rebalance"] * host["rebalance"])


def remarks(fleet: Mapping[str, Any], age_s: float) -> list[str]:
    """Return what a person should know beside the table."""
    lines = lacking(fleet.get("supply"))
    if age_s > POLLER_GONE_S:
        lines.insert(0, f"this table is {age_s:.0f} s old: the poller has not run since. Look at "
                        f"its service on the coordinator.")
    if fleet["cloud_failures"]:
        lines.append(f"the last {fleet['cloud_failures']} requests to the cloud failed; the table "
                     f"shows its last answer")
    if fleet["unheard"]:
        lines.append(f"{fleet['unheard']} agents do not answer, or their clocks differ from the "
                     f"poller's. Most hosts do not fail at once, so they stay listed. Look at the "
                     f"network and the clock of the poller.")
    return lines


def lacking(supply: Mapping[str, Any] | None) -> list[str]:
    """Return how many machines are missing, why they are refused, and the remedy."""
    if not supply or supply["there"] >= supply["wanted"] and (supply["wanted"] or
                                                              not supply["refusal"]):
        return []
    have = f"{supply['there']} of {supply['wanted']} machines run"
    if not (refusal := supply["refusal"]):
        return [f"{have}. The place has refused none, so the others should start."]
    return [f"{have}. More are refused: {refusal['says']} ({refusal['code']})",
            f"  {refusal['remedy']}"]
