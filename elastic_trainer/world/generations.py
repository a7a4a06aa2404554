"""Generations: how this worker enters a world, leaves it, and finds its way into the next one.

place (from the driver) → session (hvd.init()) → reconcile → transfer → train …
→ error or notice → sockets closed → hvd.shutdown() → next place

What always holds:
1. After an error this process's own Gloo sockets are shut before anything else (session.py).
2. `hvd.init()` is entered only with a place that all members have accepted (F1). If it fails all
   the same, the worker asks for the next place, as after any broken generation.
3. The first collective of a generation is the reconcile. Survivors never receive state
   (transfer.py).
4. The state is copied at the beginning of a step: each member that gives a share of it has run the
   user's code after the step before.
5. Generations without progress are bounded.

What it does not do: choose the members (driver/membership.py). driver/driver.py lists F1 to F11.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from horovod.common.exceptions import HorovodInternalError

from elastic_trainer.config import Launch
from elastic_trainer.events.log import Events
from elastic_trainer.state.holders import Site
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.wire.heartbeat import RankAssignment
from elastic_trainer.world import revive
from elastic_trainer.world.arithmetic import Arithmetic
from elastic_trainer.world.collectives import PeersLost, World
from elastic_trainer.world.mixture import Mixture
from elastic_trainer.world.pauses import Pauses
from elastic_trainer.world.place import Driver, DriverHooks, Wants
from elastic_trainer.world.replicas import Part, ReplicaDiffers
from elastic_trainer.world.session import Session, init_can_fail
from elastic_trainer.world.transfer import Transfer
from elastic_trainer.world.vote import Ballot, Outcome
from elastic_trainer.world.worker_status import (
    WorkerStatus,
    are_behind,
    givers,
    has_state,
    is_owed,
    newest,
    was_begun,
)

T = TypeVar("T")
"""What the body of a generation yields."""
MAX_GENERATIONS_WITHOUT_PROGRESS = 20
UPLOAD_FIRST_S = 60.0
"""The longest time that a planned change of the world waits for a checkpoint whose shares are on
their way to the store. A share that is not uploaded is lost with the change. No worker pauses while
the change waits, and a worker under notice has two minutes."""


class WorldChanged(Exception):
    """The generation ends at a step boundary, as all members have just agreed."""


class StateWithdrawn(Exception):
    """No majority of the workers holds the same bits: all workers drop the state and restore an
    older checkpoint."""


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What the life of generations asks of the training in them, besides the arguments of `run`."""

    all_parts: Callable[[], list[Part]] = list
    """Checksums of all that this worker holds."""
    part_from_outliers: Callable[[list[Part], Sequence[int]], None] = _nothing
    """Called by all members when the bits of some of the given ranks differ; it raises on all."""
    expected_step_s: Callable[[int], float] = lambda size: 0.0
    """How long a step will take in a world of this size."""
    is_saving: Callable[[], bool] = lambda: False
    """True while a planned change of the world should wait: a checkpoint is being made, or should
    be."""
    is_moving: Callable[[], bool] = lambda: False
    """True while a checkpoint is on its way to the store: a driver that stops waits for it."""
    published: Callable[[], int] = lambda: -1
    """The newest step that this worker knows to be published."""
    needs: Callable[[], int] = lambda: 0
    """How many workers a world must have for this worker's memory; 0: any number."""
    raise_if_device_failed: Callable[[], None] = _nothing
    """Raises what CUDA raises if this worker cannot use its GPU any more. It waits for nothing."""
    owes: Callable[[], bool] = lambda: False
    """True while the user's code has not ended after the last finished step."""
    attend: Callable[[], None] = _nothing
    """Called by all members when their user's code has ended, if the code of a member had not: that
    code may have collectives."""
    catch_up: Callable[[bool], None] = _nothing
    """Called by all members before any user's code runs; with True, if one may lack parameters of
    the last finished step."""
    place_shards: Callable[[], None] = _nothing
    """Called by all members when each has the state: what is sharded moves to its new holders."""
    write_alone: Callable[[], None] = _nothing
    """Called repeatedly while this worker waits for a place and should write the state, which only
    memory holds."""
    user_reduces: bool = False
    """The user's code calls Horovod's collectives, also in a world of one. The replicas may differ
    in what it does not reduce, so one member gives all of the state."""


class Idle:
    """Counts the broken generations in a row that finished no step."""

    def __init__(self, is_limited: bool):
        self._most = MAX_GENERATIONS_WITHOUT_PROGRESS if is_limited else math.inf
        self._generations, self._step = 0, -1

    def count(self, step: int) -> None:
        """Count a generation that broke after `step`. Raises RuntimeError if there are too many."""
        self._generations = 0 if step > self._step else self._generations + 1
        self._step = step
        if self._generations > self._most:
            raise RuntimeError(
                f"{self._generations} generations in a row finished no step after step {step}. The "
                f"events worker.generation_broken have the errors.")


def crc(name: str) -> int:
    """Return a number of a host or zone; 0 of none."""
    return zlib.crc32(name.encode())


class Generations:
    """One worker's membership in the run, over all generations."""

    def __init__(self, launch: Launch, driver: Driver, events: Events, hooks: Hooks,
                 world: World | None = None, session: Session | None = None):
        self.driver, self.events, self.hooks, self._launch = driver, events, hooks, launch
        self.world = world or World(driver.is_broken, events.trace.mark)
        self.mixture, self.pauses = Mixture(launch, events), Pauses(launch.revived_since)
        self.arithmetic: Arithmetic | None = None
        """How this worker computes; None before its warm-up."""
        self._session = session or Session(launch, driver.interface, events.trace.mark)
        self._transfer = Transfer(self.world, events, hooks.all_parts, self.settle_difference,
                                  hooks.user_reduces)
        self._live_state: Callable[[], Any] = _nothing
        self._generation, self.local_size, self.is_guarded, self._trains = 0, 1, False, False
        self._change_wanted_since: float | None = None
        self._redone_step = -1
        """The newest step that this worker has logged as done again."""
        self._left_at = launch.revived_since or time.monotonic()
        """The time at which this worker trained last."""

    # --- the life of a generation ---------------------------------------------------------------

    def run(self, state: LiveState, body: Callable[[], Iterator[T]], *,
            restore: Callable[[], str], roll_forward: Callable[..., None],
            hand_over: Callable[[], Iterator[T]], live_state: Callable[[], Any],
            entered: Callable[[], Iterator[T]] = lambda: iter(())) -> Generator[T, None, None]:
        """Run `body` in generation after generation until it returns, and yield what it yields.

        All members call `restore` if no member has values. It gives values to all members, or to
        rank 0 alone: then the others receive them. `roll_forward` applies the prepared step.
        `hand_over` yields each step that this worker has applied and not yet yielded as finished;
        after a restart in place also the end of a step whose beginning was not yielded. Raises
        Dismissed, RunOver, and what `body` raises. `live_state` writes what a successor needs.
        """
        self._guard(live_state)
        self._start_driver(state)
        idle = Idle(is_limited=not self.driver.is_mended)
        while True:
            try:
                self._enter(self.driver.next_place(state.has_state, state.committed))
                yield from entered()
                self._log_start(state, *(yield from self._reconcile(
                    state, restore, roll_forward, hand_over)))
                yield from body()
                self._end()
                return
            except GeneratorExit:  # the caller takes no more steps and keeps its state
                self._end()
                raise
            except ReplicaDiffers:
                self.is_guarded = False  # its bits are not to be kept
                self._session.close_sockets()
                self._end()
                raise
            except (HorovodInternalError, PeersLost, WorldChanged, StateWithdrawn) as why:
                self._break(why, state)
            idle.count(state.committed)

    def _start_driver(self, state: LiveState) -> None:
        hooks = DriverHooks(on_broken=self._on_broken, write_alone=self.hooks.write_alone,
                            is_saving=self.hooks.is_moving, published=self.hooks.published,
                            needs=self.hooks.needs, at=self._session.at)
        self.driver.start(hooks, state.has_state, state.committed, self.arithmetic,
                          meets_at_once=init_can_fail())

    def _enter(self, taken: RankAssignment) -> None:
        self._generation, self._change_wanted_since = taken.generation, None
        self.world.seat(taken.rank, taken.size)
        self.events.bound.update(generation=taken.generation, rank=taken.rank, size=taken.size)
        if taken.attempt is not None:
            self.events.bound["attempt"] = taken.attempt
        self.events.reach("world.place_taken")
        self.pauses.place()
        self.local_size = taken.local_size
        if taken.size == 1 and not self.hooks.user_reduces:
            return
        self._session.prepare(taken, self.hooks.expected_step_s(taken.size))
        self.events.reach("world.init_entered")
        self._session.start()  # network: a full mesh of connections
        self.events.reach("world.init_left")

    def _break(self, why: Exception, state: LiveState) -> None:
        """Leave a generation that has ended before the run has."""
        self._note_end()
        if isinstance(why, (HorovodInternalError, PeersLost)):
            self._session.close_sockets()  # before anything else: it informs our neighbours
        if not isinstance(why, WorldChanged):
            self.events.emit("worker.generation_broken", error=str(why)[:500])
            self.hooks.raise_if_device_failed()  # Horovod's shutdown would wait for the GPU
        self._session.end()
        if not isinstance(why, WorldChanged):
            state.restore()
        if isinstance(why, StateWithdrawn):
            state.has_state = False
            self.driver.go_back()

    def _end(self) -> None:
        """Leave the last generation. Afterwards this process writes no state for a successor."""
        self._session.end()
        self.is_guarded = False

    def keep_session(self) -> None:
        """Restart in place no more. Horovod stays up, for the user's code."""
        self.is_guarded = False

    def _note_end(self) -> None:
        """Note when the training paused. A generation that broke before it trained is no pause."""
        self.pauses.leave()
        if self._trains:
            self._trains, self._left_at = False, time.monotonic()

    def _log_start(self, state: LiveState, source: str, pause_s: float) -> None:
        self._trains = True
        self.driver.note("training", state.committed)
        self.events.reach("world.generation_entered", step=state.committed)
        if self.world.rank == 0:
            self.events.emit("worker.generation_started", step=state.committed,
                             source=source or "memory", pause_s=round(pause_s, 4))

    def note_step(self, step: int, step_s: float) -> None:
        """Note that a step has ended; rank 0 logs the cost of the pause before it, if any."""
        if (parts := self.pauses.step(step_s)) and self.world.rank == 0:
            rounded = {name: round(seconds, 4) for name, seconds in vars(parts).items()}
            self.events.emit("worker.pause_ended", step=step,
                             duration_s=round(parts.duration_s, 4), **rounded)

    # --- what breaks a generation from another thread -------------------------------------------

    def _guard(self, live_state: Callable[[], Any]) -> None:
        """Restart in place where Horovod would abort all members because one has died in init."""
        if not self.driver.is_mended:
            return  # plain horovodrun would take the restart for a death
        self.is_guarded, self._live_state = True, live_state
        revive.on_terminate(self.start_anew)

    def start_anew(self, error: str, where: str = "") -> None:
        """Restart this process in place, with its live state. Does not return."""
        if not self.is_guarded:
            os.abort()  # the training has ended and has returned its result
        revive.begin_once()
        self.driver.revive_soon()
        during = "init" if self._session.is_starting else "training"
        self.events.emit("worker.revives", where=where or during, error=error)
        self.events.flush()
        live_state = self._live_state()
        self._session.take_back_environment()  # the successor must not take it for the user's
        self._note_end()
        revive.start_anew(live_state, self._generation, self.driver.count + 1, self._left_at)

    def _on_broken(self) -> None:
        """End the collectives that wait for a lost member. The heartbeats' thread calls it."""
        if self._session.is_starting and not init_can_fail():
            self.start_anew("")  # else Gloo's time-out aborts the main thread in hvd.init()
        self._session.close_sockets()

    # --- the vote -------------------------------------------------------------------------------

    def vote(self, step: int, ballot: Ballot) -> Outcome:
        """Vote on a step, and pass on what this worker's driver wants."""
        wants = self.driver.wants()
        return self.world.vote(step, replace(
            ballot, wants=wants, change_waits=self.change_waits(wants, time.monotonic())))

    def change_waits(self, wants: Wants, now: float) -> bool:
        """True if a change of the world should wait for a checkpoint. Notes when it was wanted."""
        since = self._change_wanted_since or now
        self._change_wanted_since = since if wants.change else None
        next_vote = now + self.hooks.expected_step_s(self.world.size)
        has_time = next_vote - since < UPLOAD_FIRST_S and not wants.is_urgent
        return wants.change and has_time and self.hooks.is_saving()

    def settle_difference(self, step: int, held: list[Part], among: Sequence[int]) -> None:
        """Log that the replicas of some ranks differ in a step if the user allows that; otherwise
        end this generation. All members call it with the same arguments."""
        if self.mixture.is_mixed:
            self.mixture.log_drift(self.world, step)
        else:
            self.hooks.part_from_outliers(held, among)

    # --- reconcile ------------------------------------------------------------------------------

    def _reconcile(self, state: LiveState, restore: Callable[[], str],
                   roll_forward: Callable[..., None],
                   hand_over: Callable[[], Iterator[T]]) -> Generator[T, None, tuple[str, float]]:
        """Agree on the last finished step and give all members its state.

        Yields what `hand_over` yields. Returns where the state came from, and for how many seconds
        the members with the state (this worker, if there are none) have not trained.
        The transfer comes after `hand_over`: the user's code after a step may change the state, so
        each member that gives a share of it must have run that code. The transfer begins when all
        have returned from it. That code may take long: Horovod continues to negotiate, and the
        heartbeats have a thread, so neither Gloo nor the driver takes such a member for dead.
        """
        began, statuses, source = time.monotonic(), self._exchange_statuses(state), "memory"
        self.mixture.compare(self.world, [one.arithmetic for one in statuses], self.arithmetic,
                             givers(statuses), is_logged=self.driver.is_mended)
        paused_s = max((one.paused_ms / 1000 for one in statuses if one.has_state),
                       default=began - self._left_at)
        if not has_state(statuses):
            source = restore()  # disk, or the store: only at the start of an attempt, all together
            statuses = self._exchange_statuses(state)
        survivors = [s.pause for s in statuses if s.has_state] if source == "memory" else []
        self._roll_forward(state, statuses, roll_forward)
        self.hooks.catch_up(are_behind(statuses))
        if state.has_state:
            yield from hand_over()
        if self.world.size > 1 and is_owed(statuses):
            self.hooks.attend()
        if len(found := givers(statuses)) < self.world.size:
            self._transfer.move(state, found, is_late=source == "memory")
        self.hooks.place_shards()
        self.pauses.enter(survivors)
        return source, paused_s + time.monotonic() - began

    def _exchange_statuses(self, state: LiveState) -> list[WorkerStatus]:
        """Exchange where each worker stands, by rank. Network: one allgather."""
        paused_s = time.monotonic() - self._left_at
        mine = torch.tensor([WorkerStatus(
            state.ticks, state.begun, state.has_state, state.last_vote, int(1000 * paused_s),
            self.arithmetic, self.pauses.form(), self.hooks.owes(),
            crc(self._launch.host), state.frozen.status(), crc(self._launch.zone),
            bool(state.shards and state.shards.lacks_parameters)).encode()])
        everyone = self.world.allgather(mine, "reconcile") if self.world.size > 1 else mine
        statuses = [WorkerStatus.decode(numbers) for numbers in everyone.tolist()]
        self.world.sites = tuple(Site(status.host, status.zone) for status in statuses)
        state.frozen.meet([status.frozen for status in statuses])
        return statuses

    def _roll_forward(self, state: LiveState, statuses: Sequence[WorkerStatus],
                      roll_forward: Callable[..., None]) -> None:
        """Bring this worker, if it has the state, to the newest step that a member has finished."""
        ticks, last_vote = newest(statuses)
        step = ticks // state.phases
        # Rank 0 logs it, once, also as a newcomer: a member may not have learned of its end.
        is_logged = state.begun <= ticks and self._redone_step == step
        if self.world.rank == 0 and was_begun(statuses) and not is_logged:
            self._redone_step = step
            self.events.emit("worker.step_redone", step=step)
        if not state.has_state:
            return
        if state.ticks == ticks - 1 and state.prepared == ticks:
            # A member has applied the step, so the vote passed and this worker's gradient is whole.
            roll_forward(*last_vote)
            self.events.emit("worker.rolled_forward", step=(ticks - 1) // state.phases)
        else:
            if state.ticks != ticks:  # also under python -O
                raise AssertionError(f"this worker finished {state.ticks} phases, another {ticks}")
            # Also if all are prepared and no member has committed: the vote may not have passed.
            state.prepared = state.begun = state.ticks
