"""What the driver has to do next: the values that `Membership.decide` returns.

membership (decides) → here → driver (acts: processes, rendezvous store, event log)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Start:
    """Start a worker's process."""

    host: str
    slot: int
    worker: str


@dataclass(frozen=True)
class Stop:
    """End a worker's process."""

    worker: str
    reason: str
    at_once: bool
    """True: the worker does not answer, so SIGKILL; False: SIGTERM first."""


@dataclass(frozen=True)
class Form:
    """Open the rendezvous store of a new generation."""

    generation: int
    members: tuple[str, ...]
    """The workers' names by rank."""
    reason: str


@dataclass(frozen=True)
class End:
    """End the attempt."""

    verdict: str
    """finished · failed · user_error · interrupted · unsaved"""
    detail: str


@dataclass(frozen=True)
class Differ:
    """Report a newcomer that computes other bits than the world, or that was built with other
    weights."""

    worker: str
    host: str
    other_host: str
    differ: dict[str, tuple[str, str]]
    """Name of a fact → (the newcomer's value, the world's)."""
    is_arithmetic: bool
    """False: the weights as built differ. That is allowed."""
    is_refused: bool
    kept_out_s: float


@dataclass(frozen=True)
class OtherProgram:
    """Report a worker that has other data, or another program, than the run."""

    worker: str
    host: str
    other_host: str
    """The host whose worker gave the proof of the run."""
    differ: str
    """What differs, as a sentence."""
    remedy: str
    parts: tuple[str, ...]
    kept_out_s: float
    """0: the run ends."""


Action = Start | Stop | Form | End | Differ | OtherProgram
