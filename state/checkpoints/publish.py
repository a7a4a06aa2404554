"""The record: rank 0 puts it into the commit log when all parts are durable, and then tidies up.

all workers' parts (run_checkpoints.py, collect) → here, in a thread → commit log, store

What always holds:
1. Before it puts a record, the publisher has listed the checkpoint's parts itself: another
   worker's folder may lie on another disk.
2. A publisher takes the log over within its lineage (attempts that go on from each other) before
   its first record. If it finds a record of another attempt at its number, it is fenced, and the
   run ends on this worker. If it finds one of another publisher of the same attempt, this
   checkpoint has failed, and the next checkpoint takes the log over.
3. Within a lineage steps grow, and lineages grow. So after publishing (lineage L, step s) a worker
   may delete each part whose name has (L, s) or an earlier pair, and that no kept record lists: no
   later record can need it. That also holds for a process that was paused meanwhile
   (tests/test_commit_log.py).
4. A part of an older checkpoint is named again only if a kept record names it.
5. A record that cannot be read now stays kept, and nothing is deleted then. A record that is
   damaged is kept no longer.
6. A failure to publish is emitted and never ends the training. A publisher that hangs is given up,
   and the next one takes the log over from it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from elastic_trainer.host.priority import yield_processor
from elastic_trainer.state.checkpoints.cadence import retained
from elastic_trainer.state.checkpoints.checkpoint import (
    PARTS,
    STALLED_S,
    UPLOAD_S,
    Emit,
    Kept,
    Part,
    Plan,
    Share,
    age_of,
    folder_of,
    is_best,
    kept_of,
)
from elastic_trainer.state.checkpoints.commit_log import CommitLog, Fenced, Record
from elastic_trainer.state.stores.store import Store, StoreUnavailable


@dataclass
class Known:
    """What this worker knows of its run's checkpoints. The publisher's thread writes it too."""

    newest_step: int = -1
    """The newest step that is published; -1: none."""
    published_at: float | None = None
    """When this worker heard of it, or heard first that there is none: its boot and its wait for a
    place do not count (time.monotonic)."""
    failures: int = 0
    """Checkpoints that failed, or were dropped, since the last one that was not."""
    errors: int = 0
    """How many of them failed."""
    why: str = ""
    """Why the last of them failed."""
    fenced: Fenced | None = None
    """Another attempt has taken over: this one must stop."""
    parts: dict[int, Part] = field(default_factory=dict)
    """The parts of the last checkpoint that all workers have collected or restored."""
    parts_step: int = -1
    """The step of that checkpoint."""

    def receive(self, published: int) -> None:
        """Take over the newest step that rank 0, or the store, reports as published."""
        if published > self.newest_step or self.published_at is None:
            self.newest_step = max(published, self.newest_step)
            self.published_at = time.monotonic()

    def take(self, parts: list[Part], step: int) -> None:
        """Note the parts of a checkpoint that all workers have collected or restored."""
        self.parts, self.parts_step = {part.index: part for part in parts}, step

    def reusable(self) -> dict[int, Part]:
        """Return the parts that the next checkpoint may name again.

        None, unless the last checkpoint collected is the newest one that rank 0 has published. Its
        parts stay until a later one is published.
        """
        return self.parts if self.parts_step == self.newest_step else {}

    def fail(self, why: str, *, is_unknown: bool = True) -> None:
        """Note that a checkpoint failed; "": it was dropped. `is_unknown`: in its publication, so
        it is not known what is in the store of it."""
        self.failures += 1
        if why:
            self.errors, self.why = self.errors + 1, why
        if is_unknown:
            self.parts = {}

    def succeed(self) -> None:
        """Note that a checkpoint has not failed."""
        self.failures, self.errors, self.why = 0, 0, ""


class Publisher:
    """Publishes one checkpoint at a time, in a thread."""

    def __init__(self, store: Store, emit: Emit, plan: Plan, facts: dict[str, Any], known: Known):
        self.store, self.emit, self.plan, self.known = store, emit, plan, known
        self.facts = facts
        """They go into each record, for people: the job's numbers, versions."""
        self.log = CommitLog(store)
        self.kept: dict[int, Kept] = {}
        """What is known of the kept records, as far as they were read."""
        self.thread: threading.Thread | None = None
        self._step, self._since = -1, 0.0
        """The step of the thread's checkpoint, and when its record was on its way."""
        self._stall_emitted = -1
        """The newest step whose stall was emitted."""

    # --- questions; any thread may ask ----------------------------------------------------------

    def is_busy(self) -> bool:
        """Return whether a record is on its way, or unreferenced parts are deleted after it."""
        return self.thread is not None and self.thread.is_alive()

    def is_moving(self) -> bool:
        """Return whether a record is on its way, and is not stalled."""
        return self.is_busy() and time.monotonic() - self._since <= STALLED_S

    # --- the loop's thread ----------------------------------------------------------------------

    def begin(self, share: Share) -> None:
        """Publish a checkpoint beside the training."""
        self._step, self._since = share.step, time.monotonic()
        try:
            self.thread = threading.Thread(target=self.publish, args=(share,), name="publisher",
                                           daemon=True)
            self.thread.start()
        except Exception as error:  # no thread: the training goes on
            self.thread = None
            self._fail(share.step, f"{type(error).__name__}: {error}")

    def tick(self) -> None:
        """Give up a thread that hangs. To be called before each vote."""
        self.emit_stall()
        if self.is_busy() and time.monotonic() - self._since > UPLOAD_S:
            self.thread = None
            self.log = CommitLog(self.store)  # the next one takes over from it
            if self.known.newest_step < self._step:  # else only the deletion hangs
                self._fail(self._step,
                           f"its record was not in the commit log after {UPLOAD_S:.0f} s")

    def emit_stall(self) -> None:
        """Emit, once, that the record does not get to the store."""
        still_s, is_late = time.monotonic() - self._since, self.known.newest_step < self._step
        if self.is_busy() and is_late and still_s > STALLED_S and self._stall_emitted < self._step:
            self._stall_emitted = self._step
            self.emit("state.upload_stalled", step=self._step, still_s=round(still_s, 1),
                      what="its record")

    # --- beside the training --------------------------------------------------------------------

    def publish(self, share: Share) -> None:
        """Publish a checkpoint, and delete what no kept one needs. Never raises."""
        yield_processor()
        log = self.log  # while this thread hangs another publisher may begin, with its own log
        try:
            record = self._append(log, share)
            self._tidy_up(log, record, share.step)
        except Fenced as fenced:
            self._take_fence(fenced, share)
        except Exception as error:  # the training goes on; an old newest one raises an alarm
            self._fail(share.step, f"{type(error).__name__}: {error}")

    def _fail(self, step: int, why: str) -> None:
        self.known.fail(why)
        self.emit("state.checkpoint_failed", step=step, error=why)

    def _append(self, log: CommitLog, share: Share) -> Record:
        """Put the record; returns the newest one. Raises Fenced, StoreUnavailable."""
        if log.last is None or log.last.lineage != share.lineage:
            log.take_over(share.lineage)  # network: three requests, by each new publisher
        if log.last and log.last.step < share.step:  # else its parts may be those of another worker
            self.see_parts(share)
        record = log.append(lambda last: self.next_record(last, share))
        known = self.known
        known.newest_step = max(known.newest_step, record.step)
        known.published_at = time.monotonic()
        known.succeed()
        self.kept = {sequence: kept for sequence, kept in self.kept.items()
                     if sequence in record.kept}
        if record.kind == "checkpoint" and record.step == share.step:  # else it was there before
            own = (share.lineage, share.step)
            new = [part.bytes for part in share.all_parts if age_of(part.name) == own]
            self.emit("state.checkpoint_published", step=share.step, bytes=share.total_bytes,
                      record=record.sequence, lineage=share.lineage, parts=len(share.all_parts),
                      pause_s=round(share.pause_s, 5), uploaded_bytes=sum(new),
                      duration_s=round(time.monotonic() - share.started, 4))
        return record

    def _tidy_up(self, log: CommitLog, record: Record, step: int) -> None:
        try:
            delete_unreferenced(self.store, record, self._kept_of)
            log.compact(record)
        except (StoreUnavailable, FileNotFoundError) as error:  # the checkpoint stands
            self.emit("state.rubbish_kept", step=step, error=str(error))

    def _take_fence(self, fenced: Fenced, share: Share) -> None:
        if fenced.found.lineage != share.lineage:
            self.emit("state.fenced", step=share.step, error=str(fenced))
            self.known.fenced = fenced
            return
        self.known.newest_step = max(self.known.newest_step, fenced.found.step)
        if fenced.found.step < share.step:  # by a worker that had lost its way to the driver and us
            self.known.fail("")
        self.emit("state.publisher_replaced", step=share.step, record=fenced.found.sequence)

    def see_parts(self, share: Share) -> None:
        """Raise StoreUnavailable unless the parts of the other workers are in this store."""
        folder = folder_of(share.lineage, share.step)
        new = {part.name for part in share.all_parts if part.name.startswith(folder + "/")}
        lacking = new - set(self.store.list(folder)) if new else new
        if lacking:
            raise StoreUnavailable(
                f"{self.store.where} lacks {len(lacking)} parts that other workers have written. "
                f"Give all hosts the same store: S3, or a folder on a disk that they share")

    def next_record(self, last: Record, share: Share) -> Record | None:
        """Return the record that follows `last`; None if this step or a later one is published."""
        if last.step >= share.step:
            return None
        # The restore has passed over a kept checkpoint of a later step: nothing follows from it.
        known = {sequence: found for sequence, step in last.kept.items()
                 if step < share.step and (found := self._known_of(sequence)) is not None}
        before = {sequence: last.kept[sequence] for sequence in known}
        own = (last.lineage, share.step)
        reused = {part.name for part in share.all_parts if age_of(part.name) != own}
        if not reused <= frozenset().union(*(found.names for found in known.values())):
            raise StoreUnavailable("a part of an older checkpoint that this one names is not kept "
                                   "any more")
        steps = retained([*before.values(), share.step], self.plan.keep_last, self.plan.keep_every,
                         self.plan.compared_after)
        mine = replace(last, kind="checkpoint", step=share.step, body=self._body(share))
        steps |= {before[sequence] for sequence, found in known.items() if not found.is_read}
        if not is_best(mine):  # the best one stays until a better one is published
            steps.add(max((before[sequence] for sequence, found in known.items() if found.is_best),
                          default=share.step))
        kept = {sequence: step for sequence, step in before.items() if step in steps}
        return replace(mine, kept=kept | {last.sequence + 1: share.step})

    def _body(self, share: Share) -> dict[str, Any]:
        part_bytes = self.plan.part_bytes
        entries = [asdict(part) for part in share.all_parts]
        return {"header": share.header.decode(),
                "header_sha256": hashlib.sha256(share.header).hexdigest(),
                "bytes": share.total_bytes, "part_bytes": part_bytes, "parts": entries,
                "time": time.time(), **self.facts, **share.facts}

    def _known_of(self, sequence: int) -> Kept | None:
        """Return what `_kept_of` does; no names for a record that cannot be read now.

        Such a record stays kept, and no later record waits for it.
        """
        try:
            return self._kept_of(sequence)
        except StoreUnavailable:
            return Kept(is_read=False)

    def _kept_of(self, sequence: int) -> Kept | None:
        """Return what is known of a checkpoint; None when its record is damaged.

        Only what was read back is remembered: where a put of ours failed, a late one may stand.
        """
        if sequence not in self.kept:
            kept = kept_of(self.log, sequence)
            if kept is None:
                return None
            self.kept[sequence] = kept
        return self.kept[sequence]


def delete_unreferenced(store: Store, newest: Record,
                        find: Callable[[int], Kept | None]) -> list[str]:
    """Delete the parts that no kept checkpoint names and no later one can; returns their names.

    `newest` is the last record that the caller has published, or the tail of the log.
    """
    kept = frozenset[str]()
    for sequence in newest.kept:
        if (found := find(sequence)) is None:
            return []  # a kept record is damaged: the next checkpoint keeps it no longer
        kept |= found.names
    limit = (newest.lineage, newest.step)
    unreferenced = [name for name in store.list(PARTS)
                    if name not in kept and age_of(name) <= limit]
    if unreferenced:
        store.delete(unreferenced)
    return unreferenced
