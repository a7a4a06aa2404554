"""The sentences about events: templates, and the few sentences that need a decision.

event_table (the templates) → here → watch, events page

A template is a Python format string over the event's fields. Formats of our own:
    {slots:#slot}     a count with its noun: "1 slot", "2 slots"
    {verdict:words}   a name in words: "user error" for user_error
    {error:last}      the last line of a text: of a traceback that is the exception
"""

from __future__ import annotations

import signal
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_trainer.wire.plain import plain

Facts = Mapping[str, Any]
Sentence = str | Callable[[Facts], str]
"""A template, or a function of the event's fields. An empty text: `watch` shows nothing."""


class _Formats(string.Formatter):
    """Python's formats, and those of the head comment."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec.startswith("#"):
            return count(value, format_spec[1:])
        if format_spec == "words":
            return str(value).replace("_", " ")
        if format_spec == "last":
            return (str(value).strip().splitlines() or [""])[-1]
        return str(super().format_field(value, format_spec))


_FORMATS = _Formats()


def filled(sentence: Sentence, facts: Facts) -> str:
    """Return a sentence with an event's values. Raises one of UNREADABLE if a value is wrong."""
    return _FORMATS.vformat(sentence, (), facts) if isinstance(sentence, str) else sentence(facts)


def count(number: int, noun: str) -> str:
    """Return a number with its noun: "1 slot", "2 slots"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(frozen=True)
class Ending:
    """One of the reasons of driver.worker_gone."""

    meaning: str
    is_lost: bool = False
    """The run lost this worker against the run's will: `report` counts it."""
    has_booted: bool = True
    said: str = ""
    """What `watch` says of the worker; "" for the reason itself in words."""
    is_news: bool = True


ENDINGS = {
    "finished": Ending("the run is finished", is_news=False),
    "left": Ending("the worker left the world when it was asked to"),
    "host_left": Ending("its host is no longer listed"),
    "stopped": Ending("the attempt ended, and the driver stopped the worker"),
    "user_error": Ending("the user's code raised"),
    "arithmetic_differs": Ending("it computes other bits than the world, and was refused"),
    "crashed": Ending("the process died", is_lost=True),
    "machine_failed": Ending("the user's code met a fault of the machine", is_lost=True),
    "differed": Ending("its replica held other bits than the others", is_lost=True),
    "frozen": Ending("it sent no heartbeat in time", is_lost=True,
                     said="sent no heartbeat in time and was evicted"),
    "cut_off": Ending("it and another worker do not reach each other, but both reach the driver",
                      is_lost=True),
    "stuck": Ending("it sends heartbeats but does not go on", is_lost=True),
    "join_failed": Ending("it accepted a place and did not enter the world", is_lost=True),
    "exit_timeout": Ending("it did not exit in time when the run was finished", is_lost=True),
    "boot_failed": Ending("the process ended before it was ready", is_lost=True, has_booted=False),
    "boot_timeout": Ending("it was not ready in time", is_lost=True, has_booted=False,
                           said="was not ready in time and was evicted"),
    "evicted": Ending("evicted (version 0.1)", is_lost=True, is_news=False),
}
"""The reasons of driver.worker_gone."""


def worker_gone(facts: Facts) -> str:
    """Say how a worker ended; "" where another event says it."""
    return (said := _ending(facts)) and f"host {facts['host']}: worker {facts['pid']} {said}"


def _ending(facts: Facts) -> str:
    reason, code = facts["reason"], facts["exit_code"]
    name = signal_name(code)
    if reason == "crashed":
        return f"killed ({name})" if name else f"crashed (exit code {code})"
    if reason == "boot_failed":
        return f"failed to boot ({name or f'exit code {code}'})"
    ending = ENDINGS.get(reason, Ending(""))
    return (ending.said or str(reason).replace("_", " ")) if ending.is_news else ""


def signal_name(exit_code: int | None) -> str:
    """Return the signal of an exit code (Python's -9, a shell's 137); "" if there is none."""
    number = 0 if exit_code is None else -exit_code if exit_code < 0 else exit_code - 128
    return signal.Signals(number).name if number in set(signal.Signals) else ""


def generation_started(facts: Facts) -> str:
    """Say how large the world is, and where its state comes from."""
    workers = f"generation {facts['generation']}: {count(facts['size'], 'worker')}"
    match facts["source"]:
        case "memory":
            return f"{workers}, paused {facts['pause_s']:.2f} s"
        case "fresh":
            return f"{workers}, starts from fresh weights"
    return f"{workers}, starts from the checkpoint of step {facts['step']}"


def launch_refused(facts: Facts) -> str:
    """Say that AWS refuses machines, why, and what to do."""
    return f"{refusal(facts)}. {plain(facts['remedy'])}"


def refusal(facts: Facts) -> str:
    """Say that AWS refuses machines, and why."""
    have = f"{facts['machines']} of {facts['wanted']} are there"
    return plain(f"AWS refuses machines, {have}: {facts['says']} ({facts['code']})")
