"""The checkpoints of one run in one store, as one worker sees them.

After a step, on all workers alike, as the vote decides (training/checkpointing.py):

    begin → (snapshot, then upload beside the training) → tick, progress → collect → (publish)

What always holds:
1. One checkpoint is in flight at most, in the memory of one share.
2. A checkpoint that fails is emitted and tried again, and never ends the training. `known.fenced`
   does: another attempt has taken over.
3. The header is rank 0's. So a checkpoint is dropped where another worker has packed other tensors,
   and none is begun before the workers pack the same ones again.
4. `tick` gives up what hangs. `progress`, `is_moving` and `find_published` only answer.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from elastic_trainer.host.cycles import no_search_for_cycles
from elastic_trainer.state.checkpoints.checkpoint import UPLOAD_S, Emit, Part, Peers, Plan, Share
from elastic_trainer.state.checkpoints.commit_log import Damaged
from elastic_trainer.state.checkpoints.publish import Known, Publisher
from elastic_trainer.state.checkpoints.restore import Restore, asked_again, withdraw
from elastic_trainer.state.checkpoints.upload import SnapshotMemory, Upload, owners_of
from elastic_trainer.state.live_state import LiveState, own_tensors
from elastic_trainer.state.shards import Entries
from elastic_trainer.state.stores.store import Store, StoreUnavailable
from elastic_trainer.state.values.layout import differing, tensors_digest

PLANNED = 0.75
"""An upload that rests is planned for this share of the time between two checkpoints."""


class Checkpoints:
    """Holds the four rooms of a checkpoint's life together: memory, upload, publisher, restore."""

    def __init__(self, store: Store, emit: Emit, plan: Plan | None = None,
                 facts: dict[str, Any] | None = None):
        self.store, self.emit, self.plan = store, emit, plan or Plan()
        self.known = Known()
        self.memory = SnapshotMemory(self.plan.part_bytes)
        self.upload = Upload(store, emit, self.plan.part_bytes)
        self.publisher = Publisher(store, emit, self.plan, facts if facts is not None else {},
                                   self.known)
        self.restored: dict[str, Any] = {}
        """The body of the record that was restored."""
        self.are_mixed = False
        """The last checkpoint was dropped because a worker's tensors differ from rank 0's."""
        self.begun_at: float | None = None
        """When the last checkpoint was begun, if it was not dropped (time.monotonic)."""
        self._is_pinning_emitted = False

    # --- questions; any thread may ask ----------------------------------------------------------

    def progress(self) -> tuple[bool, bool]:
        """Return (my share is up, my share has failed), for the vote."""
        if (share := self.upload.share) is None:
            return False, False
        return share.is_up() and not share.error, bool(share.error)

    def is_moving(self) -> bool:
        """Return whether my parts, or a record, are on their way and are not stalled."""
        return self.upload.is_moving() or self.publisher.is_moving()

    def find_published(self, lineage: int) -> int:
        """Return the step of the newest record; -1 if it is of another lineage or unreadable."""
        try:
            tail = self.publisher.log.tail()  # the store
        except (Damaged, FileNotFoundError, StoreUnavailable):
            return -1
        return tail.step if tail.lineage == lineage else -1

    # --- after a step, on all workers alike -----------------------------------------------------

    def enter_world(self) -> None:
        """Drop what another world has left: a share of it may be gone, and newcomers have none."""
        self.drop("the world has changed")
        self.are_mixed = False

    def leave_out(self, state: LiveState, peers: Peers) -> dict[str, str]:
        """Return the frozen content that the next checkpoint leaves out. All workers call this
        together: each looks at its part.

        Costs: 0.66 s of a core for 1 GB, divided by the workers. Network: names and digests.
        """
        frozen = state.frozen
        if not frozen.leaves_out:
            return {}
        mine = frozen.kept(own_tensors(state), peers.rank, peers.size)
        return frozen.kept_by_all(peers.gather_texts(json.dumps(mine)))

    def agree(self, state: LiveState, peers: Peers) -> dict[str, Any]:
        """Return what all workers have to know before the next checkpoint: the frozen content that
        it leaves out, and the entries of an optimizer that is sharded. All call this together."""
        return {"absent": self.leave_out(state, peers),
                "entries": state.shards.everyone(peers) if state.shards else None}

    def compare_tensors(self, state: LiveState, peers: Peers,
                        absent: Mapping[str, str] | None = None,
                        entries: Entries | None = None) -> None:
        """Find out whether the workers that packed other tensors for the last checkpoint still do.

        All workers call this together. No bytes are sent that no record will name.
        """
        if not self.are_mixed:
            return
        packed = state.packed(absent=absent, entries=entries)
        digests = peers.gather_texts(tensors_digest(packed.header))
        wrong = differing(dict(enumerate(digests)))
        self.are_mixed = bool(wrong)
        if wrong:
            self.known.fail(wrong, is_unknown=False)
            self.emit("state.checkpoint_failed", step=state.committed, error=wrong)

    def begin(self, state: LiveState, rank: int, size: int, *, is_alone: bool = False,
              absent: Mapping[str, str] | None = None,
              entries: Entries | None = None) -> None:
        """Copy my share of the state (the only pause), and upload it beside the training.
        `absent`: the frozen content that all workers leave out.

        `entries` are those of an optimizer that is sharded, as all workers know them.

        Raises what the user's state_dict raises, and CannotKeep, unless this worker `is_alone`:
        then nobody could do anything about it.
        """
        if self.plan.from_one:
            # All parts are of rank 0. No part has the number with which the others begin.
            rank, size = (0, 1) if rank == 0 else (sys.maxsize, sys.maxsize)
        now = time.monotonic()
        share = Share(state.committed, started=now, moved=now, lineage=state.lineage)
        before, self.begun_at, self.upload.share = self.begun_at, now, share
        if before and self.known.parts_step == self.known.newest_step:
            share.planned_s = PLANNED * (now - before)  # the next one is due as much later
        try:
            if is_alone:
                absent = state.frozen.kept(own_tensors(state))
            with no_search_for_cycles():
                packed = state.packed(absent=absent, entries=entries)
        except Exception as error:
            share.error = f"{type(error).__name__}: {error}"
            if not is_alone and not isinstance(error, MemoryError):
                raise
            return
        try:
            if self.upload.is_busy():
                raise StoreUnavailable("the upload before it still holds the memory")
            with no_search_for_cycles():
                self.memory.copy(packed, share, rank, size,
                                 *owners_of(state, size if entries else 1))
            state.copying = share.copying
            self._emit_not_pinned()
            share.facts, share.moved = state.facts(), time.monotonic()
            share.pause_s = share.moved - share.started
            self.upload.begin(share, self.known.reusable())
        except Exception as error:  # no memory, no thread
            share.error = f"{type(error).__name__}: {error}"

    def _emit_not_pinned(self) -> None:
        """Emit, once, that the training waits for each copy, and why."""
        if (why := self.memory.room.not_pinned) and not self._is_pinning_emitted:
            self._is_pinning_emitted = True
            self.emit("state.memory_not_pinned", bytes=self.memory.room.bytes, error=why)

    def tick(self) -> None:
        """Let my share go, emit stalls, and give up what hangs. To be called before each vote."""
        self.upload.tick()
        self.publisher.tick()

    def parts_up(self) -> str:
        """Return my parts, and a digest of the tensors they are cut from, as JSON for `collect`."""
        share = self.upload.share
        assert share
        return json.dumps({"tensors": tensors_digest(share.header),
                           "parts": [asdict(part) for part in share.done]})

    def collect(self, texts: Iterable[str], *, publish: bool) -> None:
        """Take the parts of all workers, by rank; with `publish` (rank 0) publish them."""
        assert self.upload.share
        given = [json.loads(text) for text in texts]
        self.upload.share.error = differing(dict(enumerate(its["tensors"] for its in given)))
        self.are_mixed = bool(self.upload.share.error)
        if self.are_mixed:
            self.drop()
            return
        share = self.upload.release()
        parts = sorted((Part(**entry) for its in given for entry in its["parts"]),
                       key=lambda part: part.index)
        if [part.index for part in parts] != list(range(share.count)):  # also under python -O
            raise AssertionError("a part is missing")
        self.known.take(parts, share.step)
        if not publish:
            self.known.succeed()
            return
        share.all_parts = parts
        self.publisher.begin(share)

    def drop(self, why: str = "") -> None:
        """Forget the checkpoint in flight. Emitted as a failure, unless there is a reason `why`."""
        if share := self.upload.drop():
            error = share.error or ("" if why else "another worker's share failed")
            self.known.fail(error, is_unknown=False)
            if error:
                self.emit("state.checkpoint_failed", step=share.step, error=error)
        self.begun_at = None

    def wait(self) -> None:
        """Wait until my share and my record have succeeded, failed, or hang."""
        began, share = time.monotonic(), self.upload.share
        if share:
            share.may_go.set()
            share.is_urgent.set()
        for thread in [*self.upload.threads, self.publisher.thread]:
            while thread and thread.is_alive():
                left_s = max(began, share.moved if share else began) + UPLOAD_S - time.monotonic()
                if left_s <= 0:
                    break
                thread.join(min(1.0, left_s))
                self.upload.emit_stall()
                self.publisher.emit_stall()

    # --- without peers --------------------------------------------------------------------------

    def write_alone(self, state: LiveState) -> None:
        """Make a checkpoint alone, and wait for it. Used when this worker is the last that can."""
        self.drop("written alone instead")
        self.wait()
        self.begin(state, 0, 1, is_alone=True)
        self.wait()
        self.tick()
        if self.progress()[0]:
            self.collect([self.parts_up()], publish=True)
            self.wait()
        else:
            self.drop()

    def go_on_alone(self, state: LiveState) -> None:
        """Make a checkpoint alone, step by step. Called again and again; it never waits."""
        if (share := self.upload.share) and share.parts < share.count:
            self.drop("written alone instead")
        self.tick()
        is_up, has_failed = self.progress()
        is_idle = not (self.upload.share or self.publisher.is_busy() or self.upload.is_busy())
        if has_failed:
            self.drop()
        elif is_up:
            self.collect([self.parts_up()], publish=True)
        elif is_idle and self.known.newest_step < state.committed:
            self.begin(state, 0, 1, is_alone=True)
        self.upload.hurry()

    # --- a run goes on --------------------------------------------------------------------------

    def restore(self, state: LiveState, peers: Peers, *, insist: bool = False) -> int | None:
        """Take the log over and load the newest whole checkpoint, all workers together.

        Returns its step; None: there is none. `insist`: the store was usable in this run before.
        Raises LayoutError when there are checkpoints and none can be used; StoreUnavailable.
        """
        found = Restore(self.store, self.publisher.log, self.emit, peers).run(state, insist=insist)
        if (record := found.record) is None:
            state.lineage = found.lineage
            return None
        self.known.newest_step, self.restored = record.step, record.body
        self.known.take(list(found.parts), record.step)
        return record.step

    def withdraw(self, lineage: int, newest: int) -> int:
        """Let no attempt restore a checkpoint of a later step than `newest`: it may be wrong.

        Called on one worker; the others wait. Returns the newest step that is left; 0: there was
        no checkpoint; -1: none would be left, and none was withdrawn. Raises Fenced,
        StoreUnavailable.
        """
        self.drop("what it holds may be wrong")
        self.wait()
        log = self.publisher.log
        left, steps = asked_again(lambda: withdraw(log, lineage, newest), self.emit)
        if left > 0 or steps:
            self.known.parts, self.known.newest_step = {}, left
            self.emit("state.checkpoints_withdrawn", steps=steps, left_step=left)
        return left
