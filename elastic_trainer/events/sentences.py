"""The sentences about events: templates, and the few sentences that need a decision.

event_table (the templates) → here → watch, events page

A template is a Python format string over the event's fields. Formats of our own:
    {slots:#slot}     a count with its noun: "1 slot", "2 slots"
    {verdict:words}   a name in words: "user error" for user_error
    {error:last}      the last line of a text: of a traceback that is the exception
    {steps:list}      a list without its brackets: "50, 100"
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
        if format_spec == "list":
            return ", ".join(map(str, value))
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
    """What has happened: a sentence whose subject is the worker, or its host, or the run."""
    predicate: str = ""
    """What the worker did, for `watch`; "": `watch` does not show this end."""
    is_lost: bool = False
    """The run lost this worker against the run's will: `report` counts it."""
    has_booted: bool = True


def _lost(meaning: str, predicate: str, *, has_booted: bool = True) -> Ending:
    return Ending(meaning, predicate, is_lost=True, has_booted=has_booted)


ENDINGS = {
    "finished": Ending("the run is finished"),
    "left": Ending("the worker left the world, or ended while it booted, when it was asked to",
                   "left, as it was asked to"),
    "host_left": Ending("its host is no longer listed", "left with its host"),
    "stopped": Ending("the attempt ended, and the driver stopped the worker",
                      "was stopped with its attempt"),
    "user_error": Ending("the user's code raised", "ended: the user's code raised"),
    "arithmetic_differs": Ending("it computes other bits than the world, and was refused",
                                 "was refused: it computes other bits than the world"),
    "program_differs": Ending("it has other data, or another program, than the run, and was "
                              "refused", "was refused: it has other data or another program"),
    "crashed": _lost("the process died", "crashed"),
    "machine_failed": _lost("the user's code met a fault of the machine",
                            "left: its machine has a fault"),
    "differed": _lost("its replica held other bits than the others",
                      "left: its replica held other bits than the others"),
    "frozen": _lost("it sent no heartbeat in time", "sent no heartbeat in time and was evicted"),
    "cut_off": _lost("it and another worker do not reach each other, but both reach the driver",
                     "was evicted: it and another worker do not reach each other"),
    "stuck": _lost("it sends heartbeats but does not go on",
                   "sent heartbeats, but did not go on, and was evicted"),
    "hung": _lost("it was in the user's code for longer than hang_s, and all others waited for it",
                  "was in the user's code for longer than hang_s, and was evicted"),
    "join_failed": _lost("it accepted a place and did not enter the world",
                         "accepted a place, did not enter the world and was evicted"),
    "exit_timeout": _lost("it did not exit in time when the run was finished",
                          "did not exit in time and was killed"),
    "boot_failed": _lost("the process ended before it was ready", "failed to boot",
                         has_booted=False),
    "boot_timeout": _lost("it was not ready in time", "was not ready in time and was evicted",
                          has_booted=False),
    "evicted": _lost("evicted (version 0.1)", ""),
}
"""The reasons of driver.worker_gone."""


def worker_gone(facts: Facts) -> str:
    """Describe how a worker ended; "" if another event does."""
    ended = _ending(str(facts["reason"]), facts["exit_code"])
    return ended and f"host {facts['host']}: worker {facts['pid']} {ended}"


def _ending(reason: str, exit_code: int | None) -> str:
    name = signal_name(exit_code)
    if reason == "crashed":
        return f"was killed ({name})" if name else f"crashed (exit code {exit_code})"
    if reason == "boot_failed":
        return f"failed to boot ({name or f'exit code {exit_code}'})"
    return ENDINGS[reason].predicate if reason in ENDINGS else f"ended: {reason.replace('_', ' ')}"


def worker_evicted(facts: Facts) -> str:
    """Describe whom the driver evicts, and why."""
    reason = str(facts["reason"])
    why = ENDINGS[reason].meaning if reason in ENDINGS else reason.replace("_", " ")
    return f"host {facts['host']}: the driver evicts worker {facts['pid']}: {why}"


def step_stalled(facts: Facts) -> str:
    """Describe who makes a step stand still, where, and since when."""
    begin = f"step {facts['step']} stands still for {facts['stood_s']:.1f} s: "
    rank = f"rank {facts['rank']} on host {facts['host']}" if "host" in facts else ""
    what = f" ({facts['what']})" if facts.get("what") else ""
    if facts["cause"] == "network":
        if not rank:
            return begin + "all workers wait in a collective, so look at the network"
        return (f"{begin}all workers wait in {facts['phase']}{what}, and {rank} has slow "
                f"connections")
    waiting = count(len(facts["waiting"]), "worker") + " wait for "
    state = {"stopped": ", and is stopped by a signal", "silent": ", and sends no heartbeats"}.get(
        facts["state"], "")
    who = f"{waiting}{rank}, which" if facts["waiting"] else f"no worker waits for others; {rank}"
    return f"{begin}{who} is in {facts['phase']}{what} since {facts['since_s']:.1f} s{state}"


def loss(facts: Facts) -> str:
    """Return how a worker was lost: "killed", "crashed", "frozen", "boot failed"."""
    is_killed = facts["reason"] == "crashed" and signal_name(facts.get("exit_code")) == "SIGKILL"
    return "killed" if is_killed else str(facts["reason"]).replace("_", " ")


def signal_name(exit_code: int | None) -> str:
    """Return the signal of an exit code (Python's -9, a shell's 137); "" if there is none."""
    number = 0 if exit_code is None else -exit_code if exit_code < 0 else exit_code - 128
    return signal.Signals(number).name if number in set(signal.Signals) else ""


def run_finished(facts: Facts) -> str:
    """Say what the run has done. Horovod's own style counts commits, and neither samples nor loss.
    """
    if "loss" not in facts:
        return f"the run finished: {count(facts['steps'], 'commit')}"
    return (f"the run finished: {facts['steps']} steps, {facts['samples']} samples, "
            f"loss {facts['loss']:.4f}")


def generation_started(facts: Facts) -> str:
    """Describe how large the world is, and where its state comes from."""
    trains = f"generation {facts['generation']} trains with {count(facts['size'], 'worker')}"
    match facts["source"]:
        case "memory":
            return f"{trains} after a pause of {facts['pause_s']:.2f} s"
        case "fresh":
            return f"{trains} from fresh weights"
    return f"{trains} from the checkpoint of step {facts['step']}"


def driver_stopped(facts: Facts) -> str:
    """Describe how the driver ends the attempt, by the last line of a traceback."""
    template = "the driver ends the attempt ({verdict:words})"
    return filled(template + ": {detail:last}" if facts["detail"] else template, facts)


def settings_differ(facts: Facts) -> str:
    """Describe which of two values of a setting the run uses."""
    key, old, new = facts["key"], facts.get("run_value"), facts.get("given")
    if facts["holds"] == "run":
        return f"the run keeps {key} = {old} and ignores the given value {new}"
    return f"the run uses the given {key} = {new} instead of its old value {old}"


def launch_refused(facts: Facts) -> str:
    """Describe why the place refuses machines, and what to do."""
    return f"{refusal(facts)}. {plain(facts['remedy'])}"


def refusal(facts: Facts) -> str:
    running = f"{facts['machines']} of {facts['wanted']} run"
    return plain(f"machines are refused ({running}): {facts['says']} ({facts['code']})")
