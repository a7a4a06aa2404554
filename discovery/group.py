"""How many machines the auto scaling group is asked for: as many as are wished, while a coordinator
can use them.

the group's tag Workers (terraform), the poller's table, what this ordered before → here → the
group's size

What always holds:
1. A group has no machines until this asks for them, and systemd starts this when the release for
   workers stands.
2. A coordinator that is lost, stopped or hangs leaves no machines behind: the group holds an order
   to empty itself (a scheduled action of AWS's own), which each call here puts off. After that
   order the wish holds again.
3. A size that a person has set stays, until they wish for another or the order has emptied the
   group.
4. Machines that are paid and of which none works for an hour are sent away, with an event. Unknown
   is not "none works": a table that is missing or old changes nothing. Nor does a table without
   machines: workers that cannot be made are terminated and replaced together, and between two lots
   of them there is none.
5. No machine is asked for unless the order to empty the group stands.

It is called once a minute (elastic-group.timer).
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from elastic_trainer.discovery.files import append_event, replace_whole
from elastic_trainer.discovery.hosts import Group

LOST_S = 1800.0
"""A coordinator that has said nothing for so long is lost. A reboot takes minutes; half an hour of
a fleet is its price."""
USELESS_CALLS = 60
"""Calls, one a minute, in which machines ran and none of them worked."""
USELESS_REMEDY = (
    "Their boot logs are in the bucket under logs/, their states in `elastic-trainer hosts`. Mend "
    "that, then "
    "apply another number of workers, or set the group's desired capacity")
FRESH_S = 60.0
"""The poller writes its table every second."""


@dataclass(frozen=True, kw_only=True)
class Past:
    """What the calls before have left."""

    wish: int | None = None
    """The wish that was obeyed last; None: this coordinator has not asked for machines yet."""
    useless: int = 0
    """Calls in which machines ran and none worked, since the last one in which one worked."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to ask the group for, if anything, and why."""

    size: int | None
    why: str
    past: Past


class ScalingGroup(Protocol):
    """The group, as a cloud has it."""

    name: str

    def read(self) -> Group: ...
    def empty_in(self, seconds: float) -> None: ...
    def resize(self, size: int) -> None: ...


def decide(group: Group, past: Past, work: tuple[int, int] | None) -> Order:
    """Decide by the group, the past, and how many machines run and work (None: nobody knows)."""
    useless = past.useless
    if work is not None:
        running, working = work
        useless = 0 if working else past.useless + bool(running)
    if group.wish != past.wish or not group.is_armed:
        return Order(size=group.wish, why=_why(group, past), past=Past(wish=group.wish))
    if useless >= USELESS_CALLS:
        return Order(
            size=0,
            why=f"machines have run for {useless} minutes and none of them works. {USELESS_REMEDY}",
            past=replace(past, useless=0))
    return Order(size=None, why="", past=replace(past, useless=useless))


def _why(group: Group, past: Past) -> str:
    if past.wish is None:
        return "the release stands"
    if group.wish != past.wish:
        return f"{past.wish} were wished before"
    return "AWS had emptied the group for want of a coordinator"


def keep(group: ScalingGroup, hosts_file: Path, events_file: Path | None = None) -> None:
    """Do what is due once. Raises CloudUnavailable; then nothing was asked for, or it is asked for
    again."""
    memory = hosts_file.with_name("group.json")
    now = group.read()
    order = decide(now, _recall(memory), working(hosts_file.with_name(hosts_file.name + ".json")))
    if not now.is_armed:
        # The wish must be obeyed, also if only the next line succeeds.
        replace_whole(memory, json.dumps(asdict(Past())))
    group.empty_in(LOST_S)
    if order.size is not None:
        group.resize(order.size)
    # First: an event that cannot be written repeats no order.
    replace_whole(memory, json.dumps(asdict(order.past)))
    if order.size is not None:
        append_event(events_file,
                     "discovery.group_resized",
                     group=group.name,
                     size=order.size,
                     why=order.why)


def working(table: Path) -> tuple[int, int] | None:
    """Return how many machines the poller's table has, and how many of them are in; None: there is
    no fresh one."""
    try:
        says = json.loads(table.read_text())
        if not 0 <= time.time() - float(says["time"]) <= FRESH_S:
            return None
        return len(says["hosts"]), sum(bool(host["is_in"]) for host in says["hosts"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _recall(memory: Path) -> Past:
    try:
        says = json.loads(memory.read_text())
        return Past(wish=None if says["wish"] is None else int(says["wish"]),
                    useless=int(says["useless"]))
    except FileNotFoundError:
        return Past()
    except (OSError, ValueError, LookupError, TypeError) as error:
        sys.stderr.write(
            f"discovery: {memory} cannot be trusted, so the wish is obeyed anew: {error}\n")
        return Past()
