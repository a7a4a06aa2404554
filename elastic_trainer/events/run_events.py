"""The events of a run and of its attempts.

here → event_table

`attempt.ended` says that the run is over if its verdict is finished, interrupted, user_error or
unsaved.
After the verdict failed another attempt follows, or run.given_up or run.stopped.
"""

from __future__ import annotations

from elastic_trainer.events import sentences
from elastic_trainer.events.event_kind import EventKind, Level, Phase
from elastic_trainer.events.fields import (
    ATTEMPT,
    EXIT_CODE,
    HOST,
    NAME,
    NUMBER,
    OBJECT,
    SAMPLES,
    STEP,
    TEXT,
    WHOLE_OR_MINUS_ONE,
    has,
    may_read,
    one_of,
    reads,
)

_DETAIL, INFO, WARNING, ERROR = Level
VERDICT = one_of("finished", "failed", "user_error", "interrupted", "unsaved")

RUN = (
    EventKind("run.started", INFO, "A person, or the service, has started the run or resumed it.",
              (*has(options=OBJECT), *may_read(versions=OBJECT)), "run {run} started",
              Phase.STOPPED),
    EventKind(
        "attempt.started", INFO,
        "The supervisor starts the driver. `counted_by` names the process that logs the progress "
        "of the attempt.", (*reads(attempt=ATTEMPT), *may_read(counted_by=NAME)),
        "attempt {attempt} started", Phase.RESTARTING),
    EventKind(
        "attempt.ended", INFO, "The driver has ended.",
        (*reads(attempt=ATTEMPT, verdict=VERDICT), *may_read(exit_code=EXIT_CODE)),
        "attempt {attempt} ended: {verdict:words}", Phase.RESTARTING,
        remedy="failed: another attempt starts by itself, with back-off, or `run.given_up` "
               "follows."),
    EventKind(
        "run.given_up", ERROR,
        "No attempt follows: 5 attempts in a row had neither a new step nor a checkpoint.",
        reads(attempt=ATTEMPT), "the run ends: 5 attempts in a row had no progress",
        remedy="Read the events before. The same command goes on with the run."),
    EventKind(
        "job.left_unsaved", ERROR,
        "The run has done all its steps, and its last checkpoint could not be written. Its exit "
        "code is 74.", has(step=STEP, error=TEXT, newest_checkpoint=WHOLE_OR_MINUS_ONE),
        "the last checkpoint of step {step} could not be written: {error}",
        remedy="Mend the store (its error says how). The same command goes on from the newest "
               "checkpoint, and does the steps after it again."),
    EventKind(
        "run.stopped", INFO,
        "A person, or the service, has stopped the run while it waited for its next attempt.",
        reads(attempt=ATTEMPT), "the run was stopped before its next attempt"),
    EventKind("run.host_not_reached", WARNING,
              "The supervisor could not end the workers of an earlier attempt on this host.",
              has(host=HOST, reason=TEXT),
              "host {host}: the supervisor could not end old workers: {reason}",
              remedy="Look at the host. An old worker finds no driver and ends by itself."),
    EventKind("run.finished", INFO, "All steps are done, and the result is durable.",
              (*reads(attempt=ATTEMPT, steps=STEP, samples=SAMPLES, weights_sha256=NAME),
               *may_read(loss=NUMBER, planned_steps=STEP)),
              sentences.run_finished, Phase.TRAINING),
    EventKind("run.finished_early", INFO,
              "The user's code has asked to finish the run before its planned steps are done.",
              has(steps=STEP, planned_steps=STEP, reason=TEXT),
              "the user's code finished the run after {steps} of {planned_steps} steps: {reason}"),
)
