"""What a place tells: which machines live there, which are to be taken, and why there are no more.

places/NAME.py → here → poll (the coordinator's side), health (the host's side)

A host's way to a worker, in the order of the files:
1. place: its machines with their slots (places/NAME.py), as the cloud reports them.
2. agent: the host reports whether it is ready, draining or sick (health.py, agent.py, client.py).
3. poller: it asks both (questions.py), decides (hosts.py), and replaces the hosts file (poll.py).
4. discovery script: prints the hosts file for the driver (__main__.py, `hosts-file`).
5. driver: starts a worker on each slot, over ssh or by the host's agent (elastic_trainer/driver/).

What always holds:
1. An answer is complete, or PlaceUnavailable is raised: unknown is never empty.
2. A name belongs to one machine, from its start to its end. A place that gives a name again makes
   it unique, and tells the machine's address beside it.
3. A machine that the place takes has a notice, in the place's own words.
4. The start and the end of a refusal are one event each, not one per poll. A refusal that returns
   is logged again after AGAIN_S at the earliest. It ends when machines come or none is missing.

To add a place: write places/NAME.py with a class for `Place` and two functions,
`add_options(parser)` and `place_of(options)`, and add its name to PLACES in commands.py. Add a
class for `Machine`, and its module to MACHINES, if a host can learn by itself that it will be
taken. `place_of` raises ValueError, with the remedy, for what the user has to correct. It raises
nothing while the place does not answer: the poller asks again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

AGAIN_S = 600.0


class PlaceUnavailable(OSError):
    """The place gave no complete answer; the earlier one stays valid."""


@dataclass(frozen=True)
class Notice:
    """The place takes this machine at `deadline` (seconds since 1970)."""

    action: str
    """In the place's own words: "terminate", "pod deleted", "preempted"."""
    deadline: float | None = None
    for_good: bool = True
    """False: the place may withdraw it. The host is out while the place repeats it."""

    def sentence(self) -> str:
        """Return what the user reads of it."""
        if self.deadline is None:
            return self.action
        return f"{self.action}, taken at {utc(self.deadline)}"


@dataclass(frozen=True)
class Instance:
    """A machine as its place describes it."""

    id: str
    name: str
    """The host's name or address, unique to this incarnation."""
    address: str = ""
    """Where its agent and its workers are reached; "": by the name."""
    port: int = 0
    """Its agent's port, where a machine has several agents; 0: that of --agent-port."""
    type: str = ""
    zone: str = ""
    launched: float = 0.0
    """Seconds since 1970, by the place's clock: only for the order."""
    lifecycle: str = "spot"
    """"spot" or "on-demand"."""
    state: str = "running"
    says: str = ""
    """Why the state is not "running", as the user reads it; "": the state alone."""
    notice: Notice | None = None
    """The place takes this machine."""
    group_state: str = ""
    """Its LifecycleState in the auto scaling group ("InService", "Terminating:Wait", …); "" outside
    any group."""
    is_impaired: bool = False
    events: tuple[tuple[str, float], ...] = ()
    """Scheduled events that are not completed: code ("instance-stop", …), and in how many seconds
    it may begin."""
    slots: int = 1
    gpus: int = 0
    """NVIDIA's GPUs of its type. The host's agent must find as many."""

    @property
    def reached_at(self) -> str:
        """Return the name or address at which its agent is reached."""
        return self.address or self.name

    @property
    def listed_at(self) -> str:
        """Return the address, with the agent's port, as the hosts file has it; "": it has none."""
        return f"{self.reached_at}:{self.port}" if self.port else self.address


def utc(seconds: float) -> str:
    """Return a time of day, of seconds since 1970."""
    return time.strftime("%H:%M:%S UTC", time.gmtime(seconds))


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a place starts no machines."""

    code: str
    """The place's code, e.g. "VcpuLimitExceeded"; one of ours if its sentence has none."""
    says: str
    remedy: str
    quotas: tuple[str, ...] = ()
    """The codes of the quotas that are too small."""


@dataclass(frozen=True, kw_only=True)
class Supply:
    """The number of a fleet's machines, and why it has no more."""

    there: int
    wanted: int
    refusal: Refusal | None = None


class Place(Protocol):
    """A place, as the coordinator asks it. Each question raises PlaceUnavailable."""

    def instances(self) -> list[Instance]:
        """Return the machines that live, with their slots."""

    def supply(self) -> Supply | None:
        """Return whether machines are lacking, and why; None: the place does not know."""


class Machine(Protocol):
    """A place, as a host asks it about itself. Each question raises PlaceUnavailable."""

    def notice(self) -> Notice | None:
        """Return the notice, if there is one."""

    def rebalance(self) -> bool:
        """Return whether the place recommends to leave."""


@dataclass(frozen=True, kw_only=True)
class Reported:
    """The present supply, and what the event log has of it."""

    supply: Supply | None = None
    """The last known one."""
    code: str = ""
    """The refusal that was logged last and has not ended."""
    logged_at: Mapping[str, float] = field(default_factory=dict)
    """Code → when it was logged last, by the poller's clock."""


def report(supply: Supply, reported: Reported,
           now: float) -> tuple[Reported, list[tuple[str, dict[str, Any]]]]:
    """Return the new state, and the events that are due; `now` is by the poller's clock."""
    logged_at = {code: at for code, at in reported.logged_at.items() if now - at < AGAIN_S}
    found = supply.refusal
    have = {"machines": supply.there, "wanted": supply.wanted}
    if found is None and reported.code and reported.supply and supply.there < supply.wanted:
        if supply.there <= reported.supply.there:  # no attempt since the failure
            return replace(reported, supply=replace(supply, refusal=reported.supply.refusal)), []
    if found is None:
        ended = ([("discovery.launch_refusal_ended", {"code": reported.code, **have})]
                 if reported.code else [])
        return Reported(supply=supply, logged_at=logged_at), ended
    if found.code == reported.code or found.code in logged_at:
        return replace(reported, supply=supply, logged_at=logged_at), []
    facts = {"code": found.code, "says": found.says, "remedy": found.remedy,
             "quotas": list(found.quotas), **have}
    return (Reported(supply=supply, code=found.code, logged_at=logged_at | {found.code: now}),
            [("discovery.launch_refused", facts)])
