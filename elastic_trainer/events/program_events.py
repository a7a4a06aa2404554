"""The events about the dataset and the program that all workers of a run must have
(wire/proof.py).

here → event_table
"""

from __future__ import annotations

from elastic_trainer.events.event_kind import EventKind, Level
from elastic_trainer.events.fields import (
    ATTEMPT,
    LIST,
    NAME,
    NAMES,
    SAMPLES,
    SECONDS,
    STEP,
    TEXT,
    has,
    may_have,
    reads,
)

DETAIL, _, WARNING, ERROR = Level

PROGRAMS = (
    EventKind(
        "job.program_proved", DETAIL,
        "A run goes on from a checkpoint, and its workers have the dataset and the program of that "
        "checkpoint. `allowed` has the differences that --allow-change allows.",
        (*reads(attempt=ATTEMPT, step=STEP), *has(proof=NAME, run_proof=NAME, allowed=LIST))),
    EventKind(
        "job.program_changed", WARNING,
        "A resumed run has other data, or another program, and --allow-change allows it.",
        has(part=NAME, differ=TEXT), "{differ}, and --allow-change {part} allows it"),
    EventKind(
        "job.samples_random", WARNING,
        "Fields of a sample are other ones when it is drawn again with the same random state. They "
        "are left out of the proof.", has(fields=LIST),
        "fields of a sample are random, whatever the seed: {fields}",
        remedy="Draw from the default generators of torch, numpy or random."),
    EventKind(
        "worker.program_differs", ERROR,
        "A worker has other data, or another program, than the run. A newcomer gets no place; if "
        "the first workers differ, the run ends (`kept_out_s` is 0).",
        has(host=NAME, newcomer=NAME, other_host=NAME, parts=NAMES, differ=TEXT, meaning=TEXT,
            kept_out_s=SECONDS),
        "host {host}: a worker has other data or another program than the run: {differ}",
        remedy="Give all workers the same data and code. `--allow-change PART` allows a part."),
    EventKind(
        "worker.program_proved", DETAIL,
        "A worker has drawn samples of its dataset and described its program. It gets a place if "
        "they are those of the run.",
        (*reads(proof=NAME), *has(dataset_size=SAMPLES, samples=LIST, random=LIST),
         *may_have(index=NAME))),
)
