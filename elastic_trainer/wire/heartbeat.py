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
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import TypeAdapter


GPU_LOST = "an error that ends the use of the GPU"
"""The kind of a fault of which the code may be the cause. CUDA raises it at a later call, so not
always in the micro-batch that has it."""


@dataclass(frozen=True, kw_only=True)
class MachineFault:
    """An exception that the machine of a worker has caused."""

    step: int
    microbatch: int
    """-1: not in a micro-batch, but where all workers do the same."""
    kind: str
    text: str
    """The traceback."""


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
    probe_port: int = 0
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
    needs: int = 0
    """The number of workers that a world must have, because this worker had no memory for its part
    of a smaller one; 0: any number."""
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
        return _dumped(self, "worker")

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Heartbeat:
        """Read a JSON object that has no flaw (schema.flaw_of_message)."""
        found: Heartbeat = _read(Heartbeat, fields)
        return found


@dataclass(frozen=True, kw_only=True)
class RankAssignment:
    """A worker's rank in a generation, and the way to the other members."""

    generation: int
    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    address: str = ""
    """Where the store listens in which Gloo's ends of this generation find one another; "": this
    worker is alone."""
    port: int = 0
    at_once: bool = False
    """All members have `Heartbeat.meets_at_once`: one answer of the store has the addresses of all
    (08-meet-at-once.patch)."""
    attempt: int | None = None
    """The number of the attempt, if rank 0 counts attempts and no launcher does."""


@dataclass(frozen=True, kw_only=True)
class News:
    """All that concerns a worker now.

    Each answer holds everything, so a lost one needs no repetition.
    """

    version: str = ""
    """Another version has other contents."""
    place: RankAssignment | None = None
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
        """Return it as a JSON object: the version, and what differs from the default."""
        return {"version": self.version} | _dumped(self)

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> News:
        """Read a JSON object. Raises ValueError if it is not a driver's answer."""
        if "version" not in fields:
            raise ValueError("an answer without a version")
        found: News = _read(News, fields)
        return found


@cache
def form_of(kind: Any) -> TypeAdapter[Any]:
    """Return what reads and writes objects of a class as JSON values."""
    from pydantic import TypeAdapter  # later: all commands import this module

    return TypeAdapter(kind)


def load_forms() -> None:
    """Import pydantic now. The first message would wait 0.3 s for it, and the driver's lock with
    it."""
    for kind in (Heartbeat, News):
        form_of(kind)


def _dumped(message: Any, *left_out: str) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    kind: Any = type(message)
    return dict(form_of(kind).dump_python(message, mode="json", exclude_defaults=True,
                                           exclude=set(left_out)))


def _read(kind: Any, fields: Mapping[str, Any]) -> Any:
    return form_of(kind).validate_python(fields)
