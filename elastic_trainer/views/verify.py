"""Prove from a run's event log that every sample counted exactly once, in one lineage.

    elastic-trainer verify runs/NAME

Where it stands: rank 0's lines in the event log → judge → here → the proof, or the lines that
contradict it.

What always holds:
1. Exactly once: on every step line, the samples and the digest, which the vote summed up over all
   workers, are those of the schedule. The digests of a whole epoch add up to that of the whole
   dataset, in any order.
2. No step back: steps count up by one. Only the last line may come again, marked "repeated" and
   with the same values. Training starts again only at a checkpoint of this lineage, or at step 0
   while there is none.
3. One lineage: attempts and their generations only count up, no worker writes for a world that a
   newer one replaced, and each attempt describes the same job.
4. A finished run has all its steps, and its run.finished has the same sums as their lines. Its
   result.json has them, too, so it shows that the end of an event log was cut off.
5. A wrong line costs one sentence or a few: the judgement continues from the claims of that line.
6. Nothing is proved if a segment of the log is missing or cannot be read to its end. The verdict
   names the segment first.

The kept history has the steps from which the weights were made: a start from a checkpoint drops
the later steps from it.

What it does not do: read weights or checkpoints. It takes the order of the lines as the order of
the events. It finds two lineages only if their lines contradict one history.

Two facts are notes and no violations. The last line of an attempt without success may be torn: its
writer was killed. And a restored checkpoint that is newer than all published ones may have no line
of its own: its publisher died before it wrote the line. In `exact` mode the steps that are done
again from it must then have their former losses.

Memory: one line of the log, and 45 bytes a step in arrays (a run of 10^6 steps with 10^4 faults:
under 150 MB in all).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from elastic_trainer.events.schema import UNREADABLE, parse_named
from elastic_trainer.events.segments import Reader, has_events
from elastic_trainer.events.summary import RESULT_FILE
from elastic_trainer.views.judge import Judge, Verdict
from elastic_trainer.views.lineage import Event

Line = tuple[int, Event | None]
"""A line's number in the log, from 1, and its event; None when it is torn."""


def verify(run_dir: str | Path) -> Verdict:
    """Judge the event log of a run, and its result.json by it.

    Raises FileNotFoundError if there is no event log.
    """
    if not has_events(Path(run_dir)):
        raise FileNotFoundError(f"{run_dir} has no event log")
    restored = restored_steps(read_lines(run_dir, b'"state.checkpoint_restored"'))
    log = Reader(Path(run_dir))
    verdict = judge(_lines(log), restored)
    verdict = replace(verdict, left_out=tuple(
        f"{name} {reason}, and its events are left out." for name, reason in log.left_out.items()))
    if not verdict.steps and any(read_lines(run_dir, b'"worker.commit_kept"')):
        return replace(verdict, violations=(
            "the script is in Horovod's own style, whose commits do not say which samples they "
            "hold, so nothing is proved.",))
    wrong = [] if verdict.steps else ["no step has a line in events.jsonl, so nothing is proved."]
    wrong += result_violations(verdict, Path(run_dir, RESULT_FILE))
    return replace(verdict, violations=(*verdict.violations, *wrong))


def result_violations(verdict: Verdict, file: Path) -> list[str]:
    """Return the contradictions between result.json and the event log. Disk: one small file."""
    try:
        result = json.loads(file.read_text())
        if not result["finished"]:
            return []
        claim = (result["steps"], result["samples"], result["weights_sha256"])
    except FileNotFoundError:
        return []
    except (RecursionError, *UNREADABLE) as error:
        return [f"{RESULT_FILE} is malformed: {type(error).__name__} {error}."]
    # A result of a run that was resumed with more steps is an older one.
    finishes = verdict.finishes[-1:] if verdict.finished else verdict.finishes
    if claim in finishes:
        return []
    return [f"{RESULT_FILE} has a run that finished with {claim[0]} steps, {claim[1]} samples and "
            f"weights {claim[2]}, but events.jsonl has no such finish."]


def read_lines(run_dir: str | Path, having: bytes = b"") -> Iterator[Line]:
    """Yield the log's lines, torn lines included; only the lines that contain `having`.

    A writer that is killed in a line leaves no line end, so the next event is on the same line: it
    counts as two.
    """
    return _lines(Reader(Path(run_dir)), having)


def _lines(log: Reader, having: bytes = b"") -> Iterator[Line]:
    for number, raw in enumerate(log.lines(to_the_end=True), start=1):
        if having not in raw:
            continue
        if (event := _parse_event(raw)) is not None:
            yield number, event
        else:
            yield from _torn(number, raw)


def judge(lines: Iterable[Line], restored: set[tuple[int, int]] | None = None) -> Verdict:
    """Judge a run's lines: the pure core of verify().

    `restored` is (attempt, step) of all restored checkpoints. Without it `lines` must be a list,
    which is searched for them.
    """
    judge = Judge(restored_steps(lines) if restored is None else restored)
    for number, event in lines:
        judge.read(number, event)
    return judge.verdict()


def restored_steps(lines: Iterable[Line]) -> set[tuple[int, int]]:
    events = (event for _, event in lines
              if event and event["event"] == "state.checkpoint_restored")
    pairs = ((event.get("attempt"), event.get("step")) for event in events)
    return {(attempt, step) for attempt, step in pairs
            if isinstance(attempt, int) and isinstance(step, int)}


def _torn(number: int, raw: bytes) -> Iterable[Line]:
    """Yield a torn line, and the event that is glued to it; nothing for an empty line."""
    if not raw.strip():
        return
    yield number, None
    glued = raw.rfind(b'{"time"')
    event = _parse_event(raw[glued:]) if glued > 0 else None
    if event is not None:
        yield number, event


def _parse_event(raw: bytes) -> Event | None:
    event = parse_named(raw)
    return event if event is not None and isinstance(event.get("event"), str) else None
