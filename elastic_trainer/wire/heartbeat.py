"""A worker's heartbeat and the driver's answer, as values; they become JSON objects here alone.

worker (world) → Heartbeat → messages.py → driver (launch) → News → messages.py → worker

What always holds:
1. A field that one side does not send has its default at the other side, and a field that one side
   does not know is ignored. So workers and drivers of two versions understand each other.
2. The names of the fields on the wire are those of the dataclasses.

What it does not do: check what arrives from a worker. observe/schema.py does, before
`Heartbeat.from_words`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MachineFault:
    """An exception that the machine of a worker has caused."""

    step: int
    shard: int
    """-1: not in a shard, but where all workers do the same."""
    kind: str
    text: str
    """The traceback."""

    @staticmethod
    def from_words(words: Mapping[str, Any]) -> MachineFault:
        """Read a JSON object."""
        return MachineFault(step=int(words["step"]), shard=int(words["shard"]),
                            kind=str(words["kind"]), text=str(words["text"]))


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a worker reports of itself.

    Each heartbeat reports everything, so a lost one needs no repetition.
    """

    count: int
    """Its number. The driver ignores a heartbeat whose number is not above that of the last one."""
    phase: str
    """booting, standby, training, waiting, finished or reviving (membership.Phase)."""
    generation: int
    """The newest generation in which the worker had a place; 0: it had none."""
    worker: str = ""
    """The worker's name. The client sends it with each message."""
    accepted: int = 0
    """The number of the offer of a place that the worker accepts; 0: of none."""
    holds_state: bool = False
    drains: bool = False
    """The worker's own host has told it to leave."""
    step: int = 0
    """How many steps it has finished."""
    unreachable: tuple[str, ...] | None = ()
    """The peers that it could not reach; None: it has not tried."""
    door: int = 0
    """The port on which peers try whether they reach it; 0: it has none."""
    meets_at_once: bool = False
    """Its Horovod finds all peers with one answer of the rendezvous store
    (08-meet-at-once.patch)."""
    saves: bool = False
    """It has a part of a checkpoint on its way to the store."""
    published: int = -1
    """The step of the newest checkpoint that it knows to be published; -1: it knows of none."""
    arithmetic: Mapping[str, Any] | None = None
    """How it computes (world/arithmetic.py); None: the driver has it, or it is not known yet."""
    error: str = ""
    """The traceback of the user's own exception."""
    machine: MachineFault | None = None
    pid: int = 0
    """0: it does not say."""
    time: float | None = None
    """Its clock."""
    hold_s: float = 0.0
    """0: answer at once. Otherwise the driver may wait for news before it answers."""
    seen: str = ""
    """The version of the newest answer that the worker has."""

    def to_words(self) -> dict[str, Any]:
        """Return it as a JSON object, without the name of the worker."""
        words = {name: value for name, value in vars(self).items()
                 if name not in ("worker", "arithmetic", "error", "machine", "time")}
        words["unreachable"] = None if self.unreachable is None else list(self.unreachable)
        if self.time is not None:
            words["time"] = self.time
        if self.arithmetic is not None:
            words["arithmetic"] = dict(self.arithmetic)
        if self.error:
            words["error"] = self.error
        if self.machine is not None:
            words["machine"] = dict(vars(self.machine))
        return words

    @staticmethod
    def from_words(words: Mapping[str, Any]) -> Heartbeat:
        """Read a JSON object that has no flaw (schema.flaw_of_words)."""
        known = {name: words[name] for name in Heartbeat.__dataclass_fields__ if name in words}
        if known.get("unreachable") is not None:
            known["unreachable"] = tuple(known["unreachable"])
        machine = known.get("machine")
        known["machine"] = MachineFault.from_words(machine) if machine else None
        return Heartbeat(**known)


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A worker's place in a generation."""

    generation: int
    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    address: str = ""
    """Where Gloo's rendezvous store listens for this generation."""
    port: int = 0
    at_once: bool = False
    """All members have `Heartbeat.meets_at_once`."""

    @staticmethod
    def from_words(words: Mapping[str, Any]) -> Seat:
        """Read a JSON object. Raises KeyError, TypeError, ValueError."""
        return Seat(
            generation=int(words["generation"]), rank=int(words["rank"]), size=int(words["size"]),
            local_rank=int(words.get("local_rank", 0)), local_size=int(words.get("local_size", 1)),
            address=str(words.get("address", "")), port=int(words.get("port", 0)),
            at_once=bool(words.get("at_once")))


@dataclass(frozen=True, kw_only=True)
class News:
    """All that concerns a worker now.

    Each answer holds everything, so a lost one needs no repetition.
    """

    version: str = ""
    """Another version has other contents."""
    place: Seat | None = None
    """Its place in the newest generation, while it trains in it."""
    notice: str = ""
    """Why the members should leave at a step boundary for a new generation: leave, join or death;
    "": they should not."""
    unwanted: bool = False
    """The host of this member has left the list."""
    dead: tuple[int, ...] = ()
    """The ranks of this generation that are gone."""
    offer: int = 0
    """The number of an offer of a place in the next generation; 0: there is none."""
    reach: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """The peers that the worker should try to reach: name → (address, port)."""
    leave: bool = False
    """The worker gets no place any more."""
    evicted: bool = False
    """The driver counts the worker as gone."""
    finished: bool = False
    """A member has seen the last vote pass."""
    writes: bool = False
    """This worker, and no other, should write what only memory holds to the store."""
    over: str = ""
    """The verdict on the attempt; "": it goes on."""
    detail: str = ""
    """The reason for the verdict."""

    def to_words(self) -> dict[str, Any]:
        """Return it as a JSON object: what differs from the default, and always the version."""
        words = {name: value for name, value in vars(self).items()
                 if value or name == "version" or (name == "detail" and self.over)}
        if self.place is not None:
            words |= {"place": dict(vars(self.place)), "notice": self.notice,
                      "unwanted": self.unwanted, "dead": list(self.dead)}
        if self.reach:
            words["reach"] = {name: list(where) for name, where in self.reach.items()}
        return words

    @staticmethod
    def from_words(words: Mapping[str, Any]) -> News:
        """Read a JSON object. Raises LookupError, TypeError, ValueError or AttributeError for what
        is no answer of a driver."""
        place = words.get("place")
        return News(
            version=str(words["version"]), place=Seat.from_words(place) if place else None,
            notice=str(words.get("notice") or ""), unwanted=bool(words.get("unwanted")),
            dead=tuple(int(rank) for rank in words.get("dead", ())),
            offer=int(words.get("offer", 0)),
            reach={str(name): (str(address), int(port))
                   for name, (address, port) in words.get("reach", {}).items()},
            leave=bool(words.get("leave")), evicted=bool(words.get("evicted")),
            finished=bool(words.get("finished")), writes=bool(words.get("writes")),
            over=str(words.get("over", "")), detail=str(words.get("detail", "")))
