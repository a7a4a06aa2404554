"""The events about steps that do not end, and about workers that are slow (driver/stalls.py).

here → event_table
"""

from __future__ import annotations

from elastic_trainer.events import sentences
from elastic_trainer.events.event_kind import EventKind, Level
from elastic_trainer.events.fields import (
    FLAG,
    HOST,
    NAME,
    NAMES,
    OBJECT,
    SECONDS,
    STEP,
    TEXT,
    has,
    may_have,
    one_of,
    reads,
)

_, INFO, WARNING, _ = Level

STALLS = (
    EventKind(
        "driver.step_stalled", WARNING,
        "A step takes much longer than usual. The event names the worker that the others wait for, "
        "its phase, and how long it has been in it. With `cause` network all wait in a collective.",
        (*reads(step=STEP, stood_s=SECONDS),
         *has(limit_s=SECONDS, cause=one_of("worker", "network"),
              waited_for=NAMES, waiting=NAMES, phases=OBJECT, stacks=OBJECT),
         *may_have(worker=NAME, host=HOST, phase=NAME, what=TEXT, since_s=SECONDS, links=NAMES,
                   state=one_of("answers", "silent", "stopped"))),
        sentences.step_stalled,
        remedy="Read `stacks` of the worker that is named. To replace such a worker by itself, set "
               "`hang_s` in ELASTIC_TRAINER_LIMITS."),
    EventKind(
        "driver.step_resumed", INFO, "A step that stood still has ended.",
        reads(step=STEP, stood_s=SECONDS),
        "step {step} has ended; it stood still for {stood_s:.1f} s"),
    EventKind(
        "driver.straggler_found", WARNING,
        "A worker has computed slower than its peers over many steps: `own_s` and the median of "
        "its peers are for one micro-batch. With --replace-stragglers it leaves (`is_replaced`).",
        (*reads(host=HOST, own_s=SECONDS, peers_s=SECONDS),
         *has(worker=NAME, step=STEP, is_replaced=FLAG)),
        "host {host} is slow: it computes {own_s:.3f} s for a micro-batch, its peers {peers_s:.3f} "
        "s",
        remedy="Look at the host: other processes, clock, temperature. --replace-stragglers keeps "
               "it out."),
)
