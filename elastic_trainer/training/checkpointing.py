"""When and how the training loop makes checkpoints. The loop calls `Checkpointing` at named places.

loop (steps, votes) → here → state.checkpoints (copy, upload, publish, restore) → store

    a generation begins:  enter
    before each vote:     tick → ballot
    after each step:      note_step → obey(what the vote has decided)
    the run is left:      publish_now; write_last, if the attempt ended while this worker waited
    there are no values:  restore; withdraw, if published values may be wrong

What always holds:
1. All workers of a world begin, collect and drop a checkpoint after the same step. Rank 0's ballot
   asks for a checkpoint. The result of the vote, which is the same on all workers, decides.
2. LIFE is the whole life of a checkpoint on one worker. The phase is read off the share and the
   publisher, whose threads change it, and is stored nowhere else.
3. Decisions are pure functions of values (`phase_of`, `news_of`, `is_wanted`, `is_last_wanted`,
   `is_leave_unsaved`). `tick` and `obey` act. All other questions change nothing.
4. A checkpoint that fails never ends the training. A newer attempt does: the loop raises `fenced`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from elastic_trainer.config import ConfigError, Launch
from elastic_trainer.evaluate.best import Best
from elastic_trainer.events.log import Events
from elastic_trainer.state.checkpoints.cadence import Cadence
from elastic_trainer.state.checkpoints.checkpoint import Peers, Plan, Share
from elastic_trainer.state.checkpoints.commit_log import Fenced
from elastic_trainer.state.checkpoints.run_checkpoints import Checkpoints
from elastic_trainer.state.live_state import LiveState, begin_as_built, is_whole
from elastic_trainer.state.stores.by_url import open_store
from elastic_trainer.state.stores.store import StoreRefused, StoreUnavailable
from elastic_trainer.training.timing import Timing, Told, no_checkpoint, tell_last, unsaved
from elastic_trainer.world.collectives import PeersLost
from elastic_trainer.world.place import Driver
from elastic_trainer.world.vote import CheckpointBallot, Outcome

RESTORE_PAUSE_S = 30.0
"""Between two tries to restore. There are at most MAX_GENERATIONS_WITHOUT_PROGRESS tries (20)."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, LONGER = 0.05, 1.0, 1.3
"""Between two looks at the store, for a worker that waits until another one has published the last
checkpoint. All workers look: hundreds of them, 20 times a second, would be all that the store can
answer."""
LONGEST_LAST_PAUSE_S = 10.0
"""Between two tries to write the last checkpoint of a run."""
LAST_TRIES = 3
"""How often the checkpoint at the end of a run, or of an attempt, is tried."""


class Phase(Enum):
    """Where the newest checkpoint is in its life, on this worker."""

    IDLE = "idle"
    """No checkpoint is in flight here."""
    UPLOADING = "uploading"
    """This worker's share is copied, and its parts are on their way to the store."""
    UPLOADED = "uploaded"
    """This worker's share is in the store. Those of other workers may not be."""
    FAILED = "failed"
    """This worker's share has failed. The next vote informs all workers."""
    PUBLISHING = "publishing"
    """Rank 0: all shares are in the store, and the record is on its way to the commit log."""


class News(Enum):
    WANTED = "rank 0 wants a checkpoint"
    ALL_UPLOADED = "the shares of all workers are in the store"
    ONE_FAILED = "the share of a worker has failed"
    WORLD_CHANGED = "the world has changed"
    LAST_PART_UPLOADED = "the last part of this worker's share is in the store"
    PART_FAILED = "a part of this worker's share has failed, or none has moved for UPLOAD_S"
    RECORD_SETTLED = "the record stands, or has failed, or has not moved for UPLOAD_S"


class Action(Enum):
    BEGIN = "copy my share and upload it"
    COLLECT = "take the list of all parts; rank 0 publishes the record"
    DROP = "let the checkpoint go"
    NONE = "a thread has done it"


LIFE: Mapping[tuple[Phase, News], tuple[Action, tuple[Phase, ...]]] = {
    # Decided by the vote, so at the same step on all workers. The usual next phase is the first.
    (Phase.IDLE, News.WANTED):
        (Action.BEGIN, (Phase.UPLOADING, Phase.UPLOADED, Phase.FAILED, Phase.IDLE)),
    (Phase.UPLOADED, News.ALL_UPLOADED): (Action.COLLECT, (Phase.PUBLISHING, Phase.IDLE)),
    (Phase.UPLOADING, News.ONE_FAILED): (Action.DROP, (Phase.IDLE, Phase.PUBLISHING)),
    (Phase.UPLOADED, News.ONE_FAILED): (Action.DROP, (Phase.IDLE, Phase.PUBLISHING)),
    (Phase.FAILED, News.ONE_FAILED): (Action.DROP, (Phase.IDLE, Phase.PUBLISHING)),
    # A former rank 0 may still publish an older checkpoint when the new rank 0 wants the next one.
    (Phase.PUBLISHING, News.WANTED):
        (Action.BEGIN, (Phase.UPLOADING, Phase.UPLOADED, Phase.FAILED, Phase.PUBLISHING)),
    # A share in flight may be gone with its worker, and newcomers do not know of it.
    **{(phase, News.WORLD_CHANGED): (Action.DROP, (Phase.IDLE, Phase.PUBLISHING))
       for phase in Phase},
    # Done by threads. The next `tick` or question sees it.
    (Phase.UPLOADING, News.LAST_PART_UPLOADED): (Action.NONE, (Phase.UPLOADED,)),
    (Phase.UPLOADING, News.PART_FAILED): (Action.NONE, (Phase.FAILED,)),
    (Phase.PUBLISHING, News.RECORD_SETTLED): (Action.NONE, (Phase.IDLE,)),
}
"""(phase, what happens) → what this worker does, and the phases that can follow."""


def phase_of(share: Share | None, is_publishing: bool) -> Phase:
    """Return the phase that a share and a publisher are in. A share counts more: it is newer."""
    if share is None:
        return Phase.PUBLISHING if is_publishing else Phase.IDLE
    if share.error:
        return Phase.FAILED
    return Phase.UPLOADED if share.is_up() else Phase.UPLOADING


def news_of(control: Outcome, size: int) -> News | None:
    """Return what a vote of `size` workers means for the checkpoint in flight.

    Rank 0 wants no checkpoint while one is in flight, so a vote means one thing at most.
    """
    if control.upload_failed:
        return News.ONE_FAILED
    if control.uploaded == size:
        return News.ALL_UPLOADED
    return News.WANTED if control.checkpoint else None


def is_wanted(rank: int, phase: Phase, *, is_due: bool, wants_change: bool,
              is_unsaved: bool) -> bool:
    """Return whether this worker's ballot asks for a checkpoint after the step.

    Before a planned change of the world only a leave that is unsaved is a reason: a share that is
    not up is lost with the change.
    """
    if rank != 0 or phase is not Phase.IDLE:
        return False
    return is_unsaved if wants_change else is_due


def is_last_wanted(rank: int, has_share: bool, *, committed: int, newest_step: int, tries: int,
                   is_fenced: bool) -> bool:
    """Return whether this worker's ballot asks for the last checkpoint of a run or an attempt."""
    is_missing = newest_step < committed and not is_fenced
    return rank == 0 and not has_share and is_missing and tries < LAST_TRIES


def is_leave_unsaved(leaves: bool, *, heard_step: int, newest_step: int, is_tried: bool) -> bool:
    """Return whether a host leaves under notice and no checkpoint has been made since.

    Losses come in groups. While the host is there, its share of the bytes is uploaded too, and the
    checkpoint is published sooner than without it. Rank 0 tries it once (`is_tried`). The other
    workers wait until a vote reports that it is published.
    """
    return leaves and newest_step < heard_step and not is_tried


def _ballot(checkpoints: Checkpoints, is_wanted: bool) -> CheckpointBallot:
    is_uploaded, has_failed = checkpoints.progress()
    return CheckpointBallot(is_uploaded=is_uploaded, has_failed=has_failed, is_wanted=is_wanted,
                            newest_step=checkpoints.known.newest_step)


def _seen(checkpoints: Checkpoints | None, phase: Phase) -> str:
    if checkpoints is None:
        return "<Checkpointing: no store>"
    share, known = checkpoints.upload.share, checkpoints.known
    parts = f" step {share.step}, {len(share.done)}/{share.parts} parts" if share else ""
    fenced = ", fenced" if known.fenced else ""
    return (f"<Checkpointing {phase.value}{parts}; newest published step {known.newest_step}, "
            f"{known.failures} failures since{fenced}>")


def open_checkpoints(launch: Launch, plan: Plan, events: Events,
                     facts: dict[str, Any]) -> Checkpoints | None:
    """Open the store of this run; None if the run has neither a store nor a folder.

    `facts` go into each record, for people. Raises ConfigError.
    """
    if not (launch.store or launch.run_dir):
        return None
    url = launch.store or f"{launch.run_dir}/checkpoints"
    try:
        return Checkpoints(open_store(url), events.emit, plan, facts)
    except StoreRefused as error:
        raise ConfigError(str(error)) from error


class Checkpointing:
    """When and how one worker's training loop makes checkpoints. `checkpoints` None: never."""

    def __init__(self, checkpoints: Checkpoints | None, state: LiveState, driver: Driver,
                 launch: Launch, events: Events):
        self.checkpoints, self.state, self.driver = checkpoints, state, driver
        self.launch, self.events = launch, events
        self.timing = Timing(checkpoints.plan.every if checkpoints else Cadence(), launch, events)
        self._leave_heard: int | None = None
        """The number of finished steps when this worker learned that a host leaves this world."""
        self._is_leave_tried = False
        """True if this worker is rank 0 and has begun a checkpoint since."""
        self._has_room = False
        self._told = Told()

    def __repr__(self) -> str:
        return _seen(self.checkpoints, self.phase)

    # --- questions ------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        if self.checkpoints is None:
            return Phase.IDLE
        return phase_of(self.checkpoints.upload.share, self.checkpoints.publisher.is_busy())

    @property
    def fenced(self) -> Fenced | None:
        """The reason why this attempt must stop: another one writes to the log."""
        return self.checkpoints.known.fenced if self.checkpoints else None

    def is_moving(self) -> bool:
        """Return whether bytes of mine get to the store. Any thread may ask."""
        return self.checkpoints is not None and self.checkpoints.is_moving()

    def newest_step(self) -> int:
        """Return the newest step that this worker knows to be published; -1: none. Any thread."""
        return self.checkpoints.known.newest_step if self.checkpoints else -1

    def is_saving(self) -> bool:
        """Return whether a planned change of the world should wait for a checkpoint."""
        return self.phase is not Phase.IDLE or self._is_leave_unsaved()

    def _is_leave_unsaved(self) -> bool:
        heard = self.state.committed if self._leave_heard is None else self._leave_heard
        leaves = self.driver.wants().host_leaves and not self.timing.every.is_last_only
        return self.checkpoints is not None and is_leave_unsaved(
            leaves, heard_step=heard, is_tried=self._is_leave_tried,
            newest_step=self.checkpoints.known.newest_step)

    def ballot(self, rank: int) -> CheckpointBallot:
        if (checkpoints := self.checkpoints) is None:
            return CheckpointBallot()
        known, next_step = checkpoints.known, self.state.committed + 1
        is_due = rank == 0 and self.timing.is_due(next_step, known.failures)
        wanted = is_wanted(rank, self.phase, is_due=is_due, is_unsaved=self._is_leave_unsaved(),
                           wants_change=self.driver.wants().change)
        return _ballot(checkpoints, wanted)

    # --- the places at which the loop calls -----------------------------------------------------

    def enter(self) -> None:
        self._leave_heard, self._is_leave_tried, self._has_room = None, False, False
        self.timing.enter()
        if self.checkpoints:
            self.checkpoints.enter_world()

    def tick(self, rank: int) -> None:
        """Give up what hangs, and emit what is late. To be called before each vote of a step."""
        if (checkpoints := self.checkpoints) is None:
            return
        checkpoints.tick()
        if rank == 0:
            self._told.look(checkpoints.known)
            self.timing.tick(self.state.committed + 1, checkpoints.known.newest_step,
                             checkpoints.known.published_at)
        # Not while one is in flight, which does not hold what was trained since it was begun.
        is_idle = self._leave_heard is None and self.phase is Phase.IDLE
        if is_idle and self.driver.wants().host_leaves:
            self._leave_heard = self.state.committed

    def note_step(self, step_s: float) -> None:
        """Note how long a step took, without the work of this object at its end."""
        self.timing.step(step_s, self.phase is not Phase.IDLE)

    def obey(self, control: Outcome, world: Peers) -> None:
        """Do what the vote has decided, after the step is applied. All workers do the same.

        Costs: one copy of my share, if a checkpoint begins. All else is beside the training.
        """
        if (checkpoints := self.checkpoints) is None:
            return
        checkpoints.known.receive(control.published)
        if not self._has_room:
            self._has_room = True
            checkpoints.memory.prepare(self.state, world.rank, world.size)
        if news := news_of(control, world.size):
            self._act(checkpoints, news, world)
        if control.change_waits:  # for what is on its way to the store
            checkpoints.upload.hurry()

    def _act(self, checkpoints: Checkpoints, news: News, world: Peers) -> None:
        phase = self.phase
        assert (phase, news) in LIFE, f"{news.value}, and this worker is {phase.value}"
        action, _ = LIFE[phase, news]
        match action:
            case Action.BEGIN:
                self._begin(checkpoints, world)
            case Action.COLLECT:
                texts = world.gather_texts(checkpoints.parts_up())
                checkpoints.collect(texts, publish=world.rank == 0)
            case Action.DROP:
                checkpoints.drop()

    def _begin(self, checkpoints: Checkpoints, world: Peers) -> None:
        agreed = checkpoints.agree(self.state, world)
        checkpoints.compare_tensors(self.state, world, **agreed)
        if not checkpoints.are_mixed:
            with self.events.trace.span("checkpoint"):
                checkpoints.begin(self.state, world.rank, world.size, **agreed)
        share = checkpoints.upload.share
        self.timing.begun(self.state.committed, share.pause_s if share else 0.0)
        self._is_leave_tried = world.rank == 0 and self._leave_heard is not None
        self.events.reach("state.share_begun", step=self.state.committed,
                          pause_s=self.timing.pause_s)

    def publish_now(self, world: Peers, vote: Callable[[CheckpointBallot], Outcome], *,
                    instead: bool = False, patience_s: float = 0.0) -> None:
        """Publish a checkpoint of the last step and wait for it, all workers together.

        After LAST_TRIES failures, and `patience_s`, the loop goes on without it. `instead`: drop an
        older one that is in flight, because the seconds that are left may not suffice for both.
        """
        if (checkpoints := self.checkpoints) is None:
            return
        committed, tries, until = self.state.committed, 0, time.monotonic() + patience_s
        if instead and checkpoints.upload.share and checkpoints.upload.share.step < committed:
            checkpoints.drop("a newer one is made at once")
        while True:
            checkpoints.wait()  # the store
            checkpoints.tick()
            known, had_share = checkpoints.known, checkpoints.upload.share is not None
            is_patient = time.monotonic() < until and not self.driver.wants().stop
            wanted = is_last_wanted(world.rank, had_share, committed=committed,
                                    tries=0 if is_patient else tries, newest_step=known.newest_step,
                                    is_fenced=known.fenced is not None)
            if wanted and tries and is_patient:  # the other workers wait in the vote
                self._told.look(known)
                time.sleep(min(LONGEST_LAST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tries, 10)))
            control = vote(_ballot(checkpoints, wanted))
            self.obey(control, world)
            tries += bool(control.checkpoint)
            if not had_share and not control.checkpoint:
                return

    def publish_last(self, world: Peers, vote: Callable[[CheckpointBallot], Outcome]) -> None:
        """Publish the checkpoint of a run that has done all its steps. Only memory holds the state,
        so it is tried for `save_s`. Raises Unsaved on all workers if that fails."""
        self.publish_now(world, vote, patience_s=(tried_s := self.launch.limits.save_s))
        if self.checkpoints and self.newest_step() < (steps := self.state.committed):
            raise unsaved(steps, self.checkpoints.known, tried_s, world.rank, self.events)

    def publish_best(self, best: Best | None, world: Peers,
                     vote: Callable[[CheckpointBallot], Outcome]) -> None:
        """Publish the last step if its evaluation is the best: later no worker has its weights. All
        workers do so. Costs: the upload, if it is not published yet."""
        if best and self.state.phase == 0 and best.is_of(self.state.committed):
            self.publish_now(world, vote)

    # --- without a world of peers that train ----------------------------------------------------

    def write_last(self, rank: int) -> None:
        """Publish what only memory holds, after the attempt has ended while this worker waited.

        One worker that can does it for all. The others look until it is published.
        """
        checkpoints, state = self.checkpoints, self.state
        if checkpoints is None or not is_whole(state):
            return
        started, pause_s, tries = time.monotonic(), FIRST_PAUSE_S, 0
        while tries < LAST_TRIES:
            published = checkpoints.find_published(state.lineage)  # the store
            checkpoints.known.receive(published)
            if published >= state.committed:
                return
            if self.driver.is_writer(rank, time.monotonic() - started):
                tries += 1
                checkpoints.write_alone(state)
            time.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, LONGER * pause_s)
        tell_last(state.committed, checkpoints.known)

    def write_alone(self) -> int:
        """Publish the state of this worker, which no other one has; return the newest step that is
        published then. Between two phases of a step there is no checkpoint."""
        if self.checkpoints is None or self.state.phase or not is_whole(self.state):
            return self.newest_step()
        for _ in range(LAST_TRIES):
            self.checkpoints.write_alone(self.state)
            if self.newest_step() >= self.state.committed:
                break
        return self.newest_step()

    def write_while_waiting(self) -> None:
        """Go on with a checkpoint that this worker makes alone, while it waits for a place.

        All that hold the state may be gone any moment. Called again and again; never waits."""
        if self.checkpoints and is_whole(self.state):
            self.checkpoints.go_on_alone(self.state)

    # --- a run goes on --------------------------------------------------------------------------

    def restore(self, world: Peers) -> int | None:
        """Load the newest whole checkpoint, all workers together; returns its step.

        None: there is no checkpoint, and rank 0 has the state that it was built with. Raises
        ConfigError, LayoutError, and PeersLost: then the next generation asks again.
        """
        launch, checkpoints, step = self.launch, self.checkpoints, None
        if self.state.shards:
            self.state.shards.begin(world.rank, world.sites)
        is_first = launch.attempt == 1 or not launch.driver  # a person looks on
        try:
            if checkpoints:
                step = checkpoints.restore(self.state, world, insist=not is_first)
        except StoreUnavailable as error:
            was_usable = checkpoints is not None and checkpoints.publisher.log.last is not None
            if isinstance(error, StoreRefused) and is_first and world.rank == 0 and not was_usable:
                raise ConfigError(str(error)) from error  # later it is no mistake of the user's
            self.events.emit("state.store_unavailable", error=str(error))
            time.sleep(RESTORE_PAUSE_S)
            raise PeersLost(f"the store: {error}") from error
        if step is None and launch.resume_step:
            raise no_checkpoint(launch)
        if step is None:
            begin_as_built(self.state, world.rank)
        return step

    def withdraw(self, world: Peers, newest: int) -> int:
        """Withdraw what was published after step `newest`, all workers together.

        Returns the newest step that is left, 0 if there was no checkpoint at all, and -1 if none
        is left.
        """
        if self.checkpoints is None:
            return -1
        text = ""
        if world.rank == 0:
            text = str(self.checkpoints.withdraw(self.state.lineage, newest))  # the store
        return int(world.share_text(text, 0))
