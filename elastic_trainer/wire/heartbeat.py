"""A worker's heartbeat and the driver's answer, as dataclasses, and their JSON.

worker (world) → Heartbeat → messages.py → driver (launch) → News → messages.py → worker

What always holds:
1. A field that the sender leaves out has its default at the receiver. The receiver ignores fields
   that it does not know. So workers and drivers of two versions understand each other.
2. The names of the fields on the wire are those of the dataclasses.

What it does not do: check what arrives from a worker. events/schema.py does, before
`Heartbeat.from_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MachineFault:
    """An exception that the machine of a worker has caused."""

    step: int
    microbatch: int
    """-1: not in a micro-batch, but where all workers do the same."""
    kind: str
    text: str
    """The traceback."""

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> MachineFault:
        """Read a JSON object."""
        return MachineFault(step=int(fields["step"]), microbatch=int(fields["microbatch"]),
                            kind=str(fields["kind"]), text=str(fields["text"]))


@dataclass(frozen=True, kw_only=True)
class At:
    """What a worker's loop does (events/mark.py)."""

    phase: str
    what: str
    """The micro-batch and its samples, the batch, or the bucket; "": none."""
    for_s: float
    """How long the phase has lasted."""
    step: int
    waits_s: float
    """How long it has waited in collectives of this step, one after the other; 0: it is in none."""
    usual_s: float
    """How long a step usually takes; 0: not known."""
    own_s: float
    """How long this worker usually computes, forward and backward, for one micro-batch."""
    steps: int
    """The number of steps that its process has done before this one."""
    unsent: tuple[str, ...] = ()
    """The addresses of members that have not taken what it sends, while it waits for them."""

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> At:
        """Read a JSON object; fields that are not known are ignored."""
        known = {name: fields[name] for name in At.__dataclass_fields__ if name in fields}
        return At(**known | {"unsent": tuple(known.get("unsent", ()))})

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return vars(self) | {"unsent": list(self.unsent)}


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
    """The worker's host has a notice, so the worker should leave."""
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
    proof: Mapping[str, Any] | None = None
    """That it has the run's dataset and program (proof.py); None: the driver has it, or it proves
    nothing."""
    error: str = ""
    """The traceback of the user's own exception."""
    left: str = ""
    """Why the user's code stops the run, without an error."""
    unsaved: str = ""
    """Why the last checkpoint of a run that has done all its steps could not be written."""
    machine: MachineFault | None = None
    differs: bool = False
    """It holds other bits than most of its world, and leaves."""
    at: At | None = None
    """What its loop does; None: it is in no step."""
    pid: int = 0
    """0: not reported."""
    time: float | None = None
    """Its clock."""
    hold_s: float = 0.0
    """0: answer at once. Otherwise the driver may wait for news before it answers."""
    seen: str = ""
    """The version of the newest answer that the worker has."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON object, without the name of the worker."""
        fields = {name: value for name, value in vars(self).items()
                 if name not in ("worker", "arithmetic", "proof", "error", "left", "unsaved",
                                 "machine", "time", "at")}
        fields["unreachable"] = None if self.unreachable is None else list(self.unreachable)
        if self.time is not None:
            fields["time"] = self.time
        if self.arithmetic is not None:
            fields["arithmetic"] = dict(self.arithmetic)
        if self.proof is not None:
            fields["proof"] = dict(self.proof)
        if self.error:
            fields["error"] = self.error
        if self.left:
            fields["left"] = self.left
        if self.unsaved:
            fields["unsaved"] = self.unsaved
        if self.machine is not None:
            fields["machine"] = dict(vars(self.machine))
        if self.at is not None:
            fields["at"] = self.at.to_dict()
        return fields

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Heartbeat:
        """Read a JSON object that has no flaw (schema.flaw_of_message)."""
        known = {name: fields[name] for name in Heartbeat.__dataclass_fields__ if name in fields}
        if known.get("unreachable") is not None:
            known["unreachable"] = tuple(known["unreachable"])
        machine = known.get("machine")
        known["machine"] = MachineFault.from_dict(machine) if machine else None
        known["at"] = At.from_dict(known["at"]) if known.get("at") else None
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
    def from_dict(fields: Mapping[str, Any]) -> Seat:
        """Read a JSON object. Raises KeyError, TypeError, ValueError."""
        return Seat(
            generation=int(fields["generation"]),
            rank=int(fields["rank"]), size=int(fields["size"]),
            local_rank=int(fields.get("local_rank", 0)),
            local_size=int(fields.get("local_size", 1)),
            address=str(fields.get("address", "")), port=int(fields.get("port", 0)),
            at_once=bool(fields.get("at_once")))


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

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON object: what differs from the default, and always the version."""
        fields = {name: value for name, value in vars(self).items()
                 if value or name == "version" or (name == "detail" and self.over)}
        if self.place is not None:
            fields |= {"place": dict(vars(self.place)), "notice": self.notice,
                      "unwanted": self.unwanted, "dead": list(self.dead)}
        if self.reach:
            fields["reach"] = {name: list(where) for name, where in self.reach.items()}
        return fields

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> News:
        """Read a JSON object.

        Raises LookupError, TypeError, ValueError or AttributeError if it is not a driver's answer.
        """
        place = fields.get("place")
        return News(
            version=str(fields["version"]), place=Seat.from_dict(place) if place else None,
            notice=str(fields.get("notice") or ""), unwanted=bool(fields.get("unwanted")),
            dead=tuple(int(rank) for rank in fields.get("dead", ())),
            offer=int(fields.get("offer", 0)),
            reach={str(name): (str(address), int(port))
                   for name, (address, port) in fields.get("reach", {}).items()},
            leave=bool(fields.get("leave")), evicted=bool(fields.get("evicted")),
            finished=bool(fields.get("finished")), writes=bool(fields.get("writes")),
            over=str(fields.get("over", "")), detail=str(fields.get("detail", "")))
