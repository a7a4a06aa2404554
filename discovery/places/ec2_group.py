"""The size of the auto scaling group: the wished number of machines, while a coordinator uses them.

the group's tags (terraform), prices, the poller's table, earlier orders → here → the group's size

What always holds:
1. A group has no machines until this module asks for them. systemd starts it when the release for
   workers is in the bucket.
2. A coordinator that is lost, stopped or hung leaves no machines behind: AWS has a scheduled action
   that empties the group, and each call here postpones it. After it the wish holds again.
3. A size that a person has set stays until the wish changes or the scheduled action has emptied the
   group.
4. If none of the paid machines works for an hour, the group is emptied, with an event. Unknown is
   not "none works": a missing or old table changes nothing. Nor does a table without machines:
   workers that fail to boot are terminated and replaced together, with a gap between them.
5. No machine is asked for without that scheduled action.
6. No more machines are asked for than max_price_per_hour allows at the present spot prices. When
   they have risen, the group shrinks; when they have fallen, it grows to the wish again. Where the
   prices are unknown nothing is ordered. A machine that a person adds counts as any other.

It is called once a minute (elastic-group.timer).
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from elastic_trainer.discovery.files import append_event
from elastic_trainer.host.modes import replace_whole

LOST_S = 1800.0
"""The time without a call after which AWS empties the group. A reboot of the coordinator takes
minutes; the price of a lost one is half an hour of the fleet."""
USELESS_CALLS = 60
"""Calls, one a minute, in which machines ran and none of them worked."""
USELESS_REMEDY = (
    "Their boot logs are in the bucket under logs/, their states in `elastic-trainer hosts`. "
    "Correct the cause, then apply another number of workers, or set the group's desired capacity")
PRICE = "max_price_per_hour allows no more at the present spot prices"
FRESH_S = 60.0
"""The poller writes its table every second."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The group as AWS has it."""

    wish: int
    """The tag Workers."""
    size: int
    """Its desired capacity."""
    is_armed: bool
    """The order to empty it exists, and its time has not come."""
    affordable: int | None = None
    """How many machines max_price_per_hour allows at the present prices; None: no such limit."""


@dataclass(frozen=True, kw_only=True)
class Past:
    """The facts that earlier calls have left."""

    wish: int | None = None
    """The last wish that was ordered; None: this coordinator has not asked for machines yet."""
    useless: int = 0
    """Calls in which machines ran and none worked, since the last one in which one worked."""
    braked_to: int | None = None
    """The last ordered size, if it was less than the wish because of the price."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The size to ask the group for (None: no change), and the reason."""

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
    """Decide by the group, the past, and the numbers of machines that run and work (None: unknown).
    """
    useless = past.useless
    if work is not None:
        running, working = work
        useless = 0 if working else past.useless + bool(running)
    allowed = group.wish if group.affordable is None else min(group.wish, group.affordable)
    if group.wish != past.wish or not group.is_armed:
        why = _why(group, past) + (f"; {PRICE}" if allowed < group.wish else "")
        return Order(size=allowed, why=why,
                     past=Past(wish=group.wish, braked_to=_brake(allowed, group)))
    if group.affordable is not None and group.size > group.affordable:
        return Order(size=group.affordable, why=PRICE,
                     past=replace(past, useless=useless, braked_to=group.affordable))
    if past.braked_to == group.size < allowed:
        return Order(size=allowed, why="the spot prices allow more machines again",
                     past=replace(past, useless=useless, braked_to=_brake(allowed, group)))
    if useless >= USELESS_CALLS:
        return Order(
            size=0,
            why=f"machines have run for {useless} minutes and none of them works. {USELESS_REMEDY}",
            past=replace(past, useless=0))
    return Order(size=None, why="", past=replace(past, useless=useless))


def _brake(allowed: int, group: Group) -> int | None:
    return allowed if allowed < group.wish else None


def _why(group: Group, past: Past) -> str:
    if past.wish is None:
        return "the release is ready"
    if group.wish != past.wish:
        return f"the wish was {past.wish} before"
    return "AWS had emptied the group because it had no coordinator"


def keep(group: ScalingGroup, hosts_file: Path, events_file: Path | None = None) -> None:
    """Decide and act once. Raises PlaceUnavailable; the next call repeats a failed order."""
    memory = hosts_file.with_name("group.json")
    now = group.read()
    order = decide(now, _recall(memory), working(hosts_file.with_name(hosts_file.name + ".json")))
    if not now.is_armed:
        # The next call must order the wish, also if only the next line succeeds.
        replace_whole(memory, json.dumps(asdict(Past())), opener=None)
    group.empty_in(LOST_S)
    if order.size is not None:
        group.resize(order.size)
    # Before the event: a failed write of the event must not repeat the order.
    replace_whole(memory, json.dumps(asdict(order.past)), opener=None)
    if order.size is not None:
        append_event(events_file, "discovery.group_resized", group=group.name, size=order.size,
                     why=order.why)


def working(table: Path) -> tuple[int, int] | None:
    """Return the numbers of machines in the poller's table and of those on the list; None: there is
    no fresh table."""
    try:
        shown = json.loads(table.read_text())
        if not 0 <= time.time() - float(shown["time"]) <= FRESH_S:
            return None
        return len(shown["hosts"]), sum(bool(host["is_in"]) for host in shown["hosts"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _recall(memory: Path) -> Past:
    try:
        saved = json.loads(memory.read_text())
        return Past(wish=None if saved["wish"] is None else int(saved["wish"]),
                    useless=int(saved["useless"]),
                    braked_to=None if saved.get("braked_to") is None else int(saved["braked_to"]))
    except FileNotFoundError:
        return Past()
    except (OSError, ValueError, LookupError, TypeError) as error:
        sys.stderr.write(
            f"discovery: {memory} cannot be used, so the wish is ordered again: {error}\n")
        return Past()
