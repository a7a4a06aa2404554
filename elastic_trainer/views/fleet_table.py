"""Print the poller's table: which hosts are listed, which are not, and the reasons.

    elastic-trainer hosts HOSTS_FILE

Where it stands: poller → HOSTS_FILE.json → here → a person
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elastic_trainer.views.tables import Table, print_table
from elastic_trainer.wire.plain import plain

if TYPE_CHECKING:
    from rich.console import Console

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
    """Return the cells of one host, at the time of the table."""
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
    """Return how many machines are missing, why AWS refuses them, and the remedy."""
    if not supply or supply["there"] >= supply["wanted"]:
        return []
    have = f"{supply['there']} of {supply['wanted']} machines run"
    if not (refusal := supply["refusal"]):
        return [f"{have}. AWS has refused none, so the others should start."]
    return [f"{have}. AWS refuses more: {refusal['says']} ({refusal['code']})",
            f"  {refusal['remedy']}"]
