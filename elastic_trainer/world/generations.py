"""Generations: how this worker enters a world, votes in it, leaves it, and finds its way into the next one.

place (from the driver) → hvd.init() → reconcile → newcomers receive → train … → error or notice → sockets closed →
hvd.shutdown() → next place

What always holds:
1. After an error this process's own Gloo sockets are shut first, so that everybody notices within milliseconds
   (F2: Horovod keeps them open, and ranks that are no neighbours of the dead one wait for the whole time-out). What is
   half sent or half received ends with its socket only in a Gloo that deploy/install.sh has mended.
2. `hvd.init()` is entered only with a place that all members have accepted (F1). If it fails all the same, the worker
   asks for the next place, as after any broken generation.
3. The first collective of a generation is the reconcile. Survivors never receive state; newcomers, and only they,
   receive all of it into scratch memory, check it, and then take it over.
4. A vote that passes anywhere means that everybody's gradients were reduced (so everybody can apply the step itself).
5. Generations without progress are bounded.

Why the response cache is off (HOROVOD_CACHE_CAPACITY=0): after an error in one operation Horovod's background thread
goes on to the next negotiation (operations.cc:310-318). With the cache on that is an allreduce on the same Gloo slot
as the data, and a late chunk from a peer then breaks an assertion in a thread of Gloo's and aborts a healthy worker
("op.preamble.length <= op.nbytes": a second victim). Without the cache the negotiation uses
other slots.

What it does not do: decide who is in the world (membership.py).

Source: horovod/common/gloo/gloo_context.cc (environment re-read at every init), 0.28.1. What F1 to F11 are: driver.py.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import stat
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from elastic_trainer.config import Launch
from elastic_trainer.observe.events import Events
from elastic_trainer.state.elastic_state import ElasticState
from elastic_trainer.state.layout import (
    LayoutError,
    Packed,
    byte_ranges,
    differing,
    fill_range,
    tensors_digest,
    unpack,
)
from elastic_trainer.world import revive
from elastic_trainer.world.arithmetic import Arithmetic, advice, computes_otherwise, facts_that_differ
from elastic_trainer.world.pauses import Pauses, Survivor
from elastic_trainer.world.place import Driver, OurDriver, Place
from elastic_trainer.world.replicas import Difference, Part, ReplicaDiffers, are_same, checksum, judge, words

T = TypeVar("T")
"""What the body of a generation yields."""
MAX_GENERATIONS_WITHOUT_PROGRESS = 20
TRANSFER_BYTES = 16 << 20
"""How many bytes of state go to each newcomer in one collective: so few that the memory of one serves the next."""
POLL_S = 0.0005
PATIENT_POLL_S = 0.02
WAITED_SHARE = 0.02
"""While a collective lasts, a worker looks after 2 % more of the time that it has waited, between these two times. Each
look takes 14 µs: every 0.5 ms that is 2 % of a core for each waiting worker, a whole core for 48 (measured)."""
IDLE_CYCLE_MS = 25.0
"""Also how late a worker that computes notices by itself that a peer's sockets are closed."""
FOR_THIS_WORLD = ("HOROVOD_CYCLE_TIME", "HOROVOD_GLOO_TIMEOUT_SECONDS", "HOROVOD_GLOO_MEET_AT_ONCE")
"""What is set for Horovod by the size of a generation's world."""
PAIR_S = 0.002
"""A rendezvous that is not at once takes about 0.3 ms for each of some 5 requests for each pair of members: 64 need 6 s to
find each other, 128 need 25 s, and Gloo's time-out must be longer."""
MEMBER_S = 0.3
"""So much longer is Gloo's time-out for each member where they meet at once: each connects to all, one behind the other."""
RUNNABLE_EACH = 4.0
MAX_LOAD = 4.0
"""On a machine with more than 4 runnable processes a core Gloo's time-out is longer in proportion, up to 4 times: it is a
back-stop, the driver's heartbeats notice a death, and a time-out during a slow start would break the world for nothing."""
NAMED_TENSORS = 5
"""An event names so many of the tensors that differ."""
UPLOAD_FIRST_S = 60.0
"""A planned change of the world waits so long for a checkpoint whose shares are on their way to the store: a leaver has
its two minutes for it, nobody pauses meanwhile, and a share that is not up is lost with the change."""


class WorldChanged(Exception):
    """The generation ends at a step boundary, as all members have just agreed."""


class StateWithdrawn(Exception):
    """No majority of the workers holds the same bits: all drop the state, and an older checkpoint is restored."""


class PeersLost(Exception):
    """A collective failed or can never end: somebody of this generation is gone."""


@dataclass(frozen=True)
class Control:
    """What the vote has told everybody."""

    samples: int
    digest: int
    change: bool
    """Somebody joins or leaves: leave the loop after this step."""
    stop: bool
    """All want the attempt to stop after this step, with a checkpoint (one alone may only have lost its own way to the
    driver: then the world changes, and the driver decides)."""
    failed_rank: int
    """The lowest rank whose user code raised; -1: nobody's. Then nobody applies the step."""
    uploaded: int
    """How many workers have their share of the checkpoint in flight in the store."""
    upload_failed: bool
    checkpoint: bool
    """Rank 0 wants a checkpoint after this step."""
    published: int
    """The newest step that rank 0 knows to be published; -1: it knows of none."""
    all_drain: bool
    """Everybody has been told to leave: this step is the last that anybody holds."""
    change_waits: bool
    """Somebody wants the world to change, if not after this step then soon."""
    differs: bool
    """The workers do not all hold the same bits in the slice of the state that was compared: nobody applies the step."""


class Standing(NamedTuple):
    """Where a worker stands when a generation begins."""

    committed: int
    begun: int
    has_state: bool
    last_vote: tuple[int, int]
    """Samples and digest, totals of the last vote that it saw pass."""
    paused_ms: int
    """How long ago it last trained."""
    arithmetic: Arithmetic | None = None
    """How it computes, without the names."""
    pause: Survivor = Survivor(0, 0, 0)


class World:
    """One worker's membership in the run, over all generations."""

    def __init__(self, launch: Launch, driver: Driver, events: Events):
        self.launch, self.driver, self.events = launch, driver, events
        self.rank, self.size, self.local_rank, self.generation = 0, 1, 0, 0
        self.place: Place | None = None
        self._is_up = False
        self._sockets: set[tuple[int, int]] = set()
        self._horovod_was_up = False
        self._is_guarded = False
        self._init_since: float | None = None
        self.arithmetic: Arithmetic | None = None
        """How this worker computes, from its warm-up on."""
        self.all_parts: Callable[[], list[Part]] = list
        """Checksums of all that this worker holds."""
        self.part_from_odd: Callable[[list[Part], Sequence[int]], None] = lambda held, among: None
        """What to do when the bits of some ranks differ: it raises on all."""
        self.is_mixed = False
        """Some members of this generation compute other bits than others, with leave of the user's."""
        self._is_drift_told = False
        self._before_init: set[tuple[int, int]] = set()
        if isinstance(driver, OurDriver):
            driver.meets_at_once = init_can_fail()
        self.expected_step_s: Callable[[int], float] = lambda size: 0.0
        """How long a step will take in a world of this size."""
        self._asked = dict(os.environ)  # what the user has set wins over what is set here for each generation
        self._live_state: Callable[[], Any] = lambda: None
        self.is_saving: Callable[[], bool] = lambda: False
        """True while this member has a reason to put a planned change of the world off: a checkpoint is being made."""
        self._change_wanted_since: float | None = None
        self._told_redone = -1
        self._left_at = launch.revived_since or time.monotonic()
        """When this worker last trained."""
        self.pauses = Pauses(launch.revived_since)
        self._trains = False

    # --- the life of a generation ---------------------------------------------------------------------------------

    def run(self, state: ElasticState, body: Callable[[], Iterator[T]], *, restore: Callable[[], str],
            roll_forward: Callable[[int, int], None], hand_over: Callable[[], Iterator[T]],
            live_state: Callable[[], Any]) -> Iterator[T]:
        """Run `body` in generation after generation until it returns, and yield what it yields.

        All members call `restore` if no member has values. It gives values to all members or to rank 0 alone; in the
        second case the others receive them. `roll_forward` applies the prepared step. `hand_over` yields each step that
        this worker has applied and not yet yielded as finished. A worker that restarted in place may yield the end of
        a step whose begin it has not yielded. `live_state` writes what a successor of this process needs.
        Raises Dismissed, RunOver, and what `body` raises.
        """
        self._live_state = live_state
        self._guard_init()
        state.bind(receive=lambda: self._transfer(state), hosts_updated=self.driver.wants_change)
        idle, last_step = 0, -1
        while True:
            try:
                self._enter(self.driver.next_place(state.has_state, state.committed))
                self._say_started(state, *(yield from self._reconcile(state, restore, roll_forward, hand_over)))
                yield from body()
                self._leave()
                self._is_guarded = False
                return
            except GeneratorExit:  # the caller takes no more steps: it keeps what it has
                self._is_guarded = False
                self._leave()
                raise
            except (HorovodInternalError, PeersLost) as error:
                self._note_end()
                self._close_sockets()  # first of all: our neighbours notice by it
                self.events.emit("worker.generation_broken", error=str(error)[:500])
                self._leave()
                state.restore()
            except WorldChanged:
                self._note_end()
                self._leave()
            except StateWithdrawn as why:
                self._note_end()
                self.events.emit("worker.generation_broken", error=str(why))
                self._leave()
                state.restore()
                state.has_state = False
                self.driver.go_back()
            except ReplicaDiffers:
                self._is_guarded = False  # its bits are not to be kept
                self._close_sockets()
                self._leave()
                raise
            idle = 0 if state.committed > last_step else idle + 1
            last_step = state.committed
            if idle > MAX_GENERATIONS_WITHOUT_PROGRESS and not isinstance(self.driver, OurDriver):  # that one counts too
                raise RuntimeError(f"{idle} generations in a row finished no step after step {state.committed}; see "
                                   f"the events worker.generation_broken for the errors")

    def _enter(self, place: Place) -> None:
        self.place = place
        self.rank, self.size, self.generation = place.rank, place.size, place.generation
        self.local_rank = place.local_rank
        self._change_wanted_since = None
        self.events.bound.update(generation=self.generation, rank=self.rank, size=self.size)
        if place.attempt is not None:
            self.events.bound["attempt"] = place.attempt
        self.events.reach("world.place_taken")
        self.pauses.place()
        if self.size == 1:
            return
        assert place.rendezvous is not None
        own_cycle_ms = cycle_ms(self.expected_step_s(self.size), wakes_on_arrival())
        os.environ.update(
            HOROVOD_GLOO_RENDEZVOUS_ADDR=place.rendezvous[0], HOROVOD_GLOO_RENDEZVOUS_PORT=str(place.rendezvous[1]),
            HOROVOD_RANK=str(self.rank), HOROVOD_SIZE=str(self.size),
            # Each worker is a "host" of its own for Gloo: the contexts "local" and "cross", which nothing here uses,
            # then have no peers to connect to, which halves the time of init (measured: 350 → 200 ms, 4 ranks).
            HOROVOD_LOCAL_RANK="0", HOROVOD_LOCAL_SIZE="1", HOROVOD_CROSS_RANK="0", HOROVOD_CROSS_SIZE="1",
            HOROVOD_CYCLE_TIME=self._asked.get("HOROVOD_CYCLE_TIME", f"{own_cycle_ms:.2f}"),
            HOROVOD_CACHE_CAPACITY=self._asked.get("HOROVOD_CACHE_CAPACITY", "0"),
            HOROVOD_GLOO_TIMEOUT_SECONDS=self._asked.get(
                "HOROVOD_GLOO_TIMEOUT_SECONDS",
                str(round(gloo_timeout_s(self.launch.limits.gloo_s, self.size, place.at_once, load())))),
            HOROVOD_GLOO_MEET_AT_ONCE="1" if place.at_once else "0",
            HOROVOD_AUTOTUNE="0", HOROVOD_ENABLE_ASYNC_COMPLETION="0",  # wrong under elastic, whoever has asked for them
            # The first init latches NCCL's elastic mode; later ones must not ask the driver themselves.
            HOROVOD_ELASTIC="0" if self._horovod_was_up else "1")
        if isinstance(self.driver, OurDriver):
            for name in ("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME"):
                os.environ[name] = self._asked.get(name, self.driver.interface)
        self._before_init = _open_sockets()
        self._init_since = time.monotonic()
        self.events.reach("world.init_entered")
        try:
            self._init()
        finally:
            self._init_since = None
            self._sockets = _open_sockets() - self._before_init
        self.events.reach("world.init_left")

    def _init(self) -> None:
        """Start Horovod. Raises PeersLost if it fails (one that is not mended aborts instead, see revive.py)."""
        self._is_up = True  # a failed start has to be shut down too before the next one
        try:
            hvd.init()  # network: full mesh of Gloo connections
        except ValueError as error:
            raise PeersLost(init_error() or str(error)) from error
        if not hvd.is_initialized():
            raise PeersLost(init_error())
        self._horovod_was_up = True

    def _note_end(self) -> None:
        """Note when the training paused: not when a generation broke that had not begun to train."""
        self.pauses.leave()
        if self._trains:
            self._trains, self._left_at = False, time.monotonic()

    def _leave(self) -> None:
        if self._is_up:
            self._is_up = False
            hvd.shutdown()
        self._sockets = set()

    def _guard_init(self) -> None:
        """Survive the abort that Horovod has in store for everybody in `hvd.init()` when one member dies there."""
        if not isinstance(self.driver, OurDriver):
            return  # plain horovodrun would take the restart for a death anyway
        driver = self.driver

        def start_anew(error: str) -> None:
            if not self._is_guarded:
                os.abort()  # not training any more: what was to be kept has been handed back
            driver.revive_soon()
            self.events.emit("worker.revives", where="init" if self._init_since else "training", error=error)
            self.events.flush()
            for name in FOR_THIS_WORLD:  # else the next life takes them for the user's
                os.environ.pop(name, None)
            os.environ.update({name: self._asked[name] for name in FOR_THIS_WORLD if name in self._asked})
            self._note_end()
            revive.start_anew(self._live_state(), self.generation, driver.count + 1, self._left_at)

        def on_broken() -> None:
            if self._init_since is not None and not init_can_fail():
                start_anew("")  # the main thread sits in hvd.init() and would be aborted after Gloo's time-out
            self._close_sockets()

        self._is_guarded = True
        driver.on_broken = on_broken
        revive.on_terminate(start_anew)

    def _close_sockets(self) -> None:
        """Shut our Gloo sockets, so that every pending operation here and at our peers ends now (F2)."""
        during_init = _open_sockets() - self._before_init if self._init_since is not None else set()
        for descriptor, inode in self._sockets | during_init:
            try:
                with socket.socket(fileno=os.dup(descriptor)) as ours:
                    # Else Gloo has closed it and somebody has its number; or the heartbeats have connected anew.
                    if os.fstat(ours.fileno()).st_ino == inode and not self._leads_to_driver(ours):
                        ours.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # closed already

    def _leads_to_driver(self, ours: socket.socket) -> bool:
        try:
            return "{0[0]}:{0[1]}".format(ours.getpeername()) == self.launch.driver
        except OSError:
            return False  # it listens, or its peer has gone

    # --- collectives ------------------------------------------------------------------------------------------------

    def wait(self, handle: int) -> torch.Tensor:
        """Wait for a collective, asleep most of the time. Raises HorovodInternalError, PeersLost.

        Horovod's own wait spins a core, takes the GIL at each turn, and hangs for ever after the enqueue race
        (mpi_ops_v2.cc:1121-1128).
        """
        broken_since, began = None, time.monotonic()
        while not hvd.poll(handle):
            time.sleep(poll_s(time.monotonic() - began))
            if self.driver.is_broken():
                broken_since = broken_since or time.monotonic()
                if time.monotonic() - broken_since > 1.0:
                    raise PeersLost("a collective did not end after its sockets were shut")
        return hvd.synchronize(handle)

    def allreduce_start(self, tensor: torch.Tensor, name: str) -> int:
        """Start to sum a tensor over all workers in place."""
        return hvd.allreduce_async_(tensor, op=hvd.Sum, name=name)

    def broadcast_start(self, tensor: torch.Tensor, root: int, name: str) -> int:
        """Start to give everybody one worker's tensor, in place."""
        return hvd.broadcast_async_(tensor, root, name=name)

    def alltoall(self, tensor: torch.Tensor, splits: list[int], name: str) -> torch.Tensor:
        """Send each worker its part of a flat tensor; returns the parts received, by rank."""
        return self.exchanged(self.exchange_start(tensor, splits, name))[0]

    def exchange_start(self, tensor: torch.Tensor, splits: list[int], name: str) -> int:
        """Start to send each worker its part of a flat tensor."""
        return hvd.alltoall_async(tensor, splits=torch.tensor(splits, dtype=torch.int32), name=name)

    def exchanged(self, handle: int) -> tuple[torch.Tensor, list[int]]:
        """Wait for an exchange; returns the parts received, by rank, and their lengths."""
        received, counts = self.wait(handle)
        return received, counts.tolist()

    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return everybody's tensors one behind the other (along the first dimension), by rank."""
        return self.wait(hvd.allgather_async(tensor, name=name))

    def vote(self, step: int, samples: int, digest: int, has_failed: bool,
             upload: tuple[bool, bool] = (False, False), checkpoint: bool = False, published: int = -1,
             held: Sequence[Part] = ()) -> Control:
        """Agree that everybody holds the reduced gradient of `step`, and exchange one control word.

        `upload` is (my share is up, it has failed); `checkpoint` and `published` are rank 0's words (see Control). `held`
        are the checksums of what is compared (replicas.py). It completes anywhere only if every member's gradients were
        reduced. Network: one allreduce of 16 integers.
        """
        wants_change, wants_stop = self._wants_change(time.monotonic()), self.driver.wants_stop()
        known = published + 1 if self.rank == 0 else 0
        word = torch.tensor([1, samples, digest, wants_change, wants_stop, has_failed, *upload, checkpoint, known,
                             self.driver.drains(), self.driver.wants_change(), *words(checksum(held))],
                            dtype=torch.int64)
        if self.size > 1:
            self.wait(self.allreduce_start(word, "vote"))
            assert int(word[0]) == self.size, f"{int(word[0])} of {self.size} voted in step {step}"
        failed_rank = -1
        if int(word[5]):  # rare: a second look finds who
            everyone = torch.tensor([self.rank if has_failed else self.size], dtype=torch.int64)
            ranks = self.allgather(everyone, "failed") if self.size > 1 else everyone
            failed_rank = int(ranks.min())
        return Control(samples=int(word[1]), digest=int(word[2]), change=bool(word[3]) or bool(word[4]),
                       stop=int(word[4]) == self.size, failed_rank=failed_rank, uploaded=int(word[6]),
                       upload_failed=bool(word[7]), checkpoint=bool(word[8]), published=int(word[9]) - 1,
                       all_drain=int(word[10]) == self.size, change_waits=bool(word[11]),
                       differs=not are_same(word[12:16].tolist(), self.size))

    def find_odd(self, step: int, held: Sequence[Part], since_step: int, among: Sequence[int]) -> Difference:
        """Find out whose bits of the ranks `among` differ, all together, when it is known that some do.

        Network: two allgathers. Raises ReplicaDiffers on a worker that differs from more than half of them, PeersLost on
        the others. Returns the difference where there is no such majority.
        """
        me = {"host": self.launch.host, "worker": self.launch.worker or self.launch.host, "held": list(held)}
        told = [json.loads(text) for text in self.gather_texts(json.dumps(me))]
        found = judge([told[rank]["held"] for rank in among])
        odd = [among[place] for place in found.odd]
        if self.rank == among[(found.majority or (0,))[0]]:
            for rank in odd:
                self.events.emit("worker.replica_differs", level="error", step=step, since_step=since_step,
                                 host=told[rank]["host"], odd_worker=told[rank]["worker"], odd_rank=rank,
                                 majority=len(found.majority), tensors=found.tensors[:NAMED_TENSORS],
                                 tensors_count=len(found.tensors))
        if not found.majority:
            return found
        if self.rank in odd:
            raise ReplicaDiffers(f"this worker holds other bits than {len(found.majority)} of {len(among)} workers in step "
                                 f"{step}: {', '.join(found.tensors[:NAMED_TENSORS])}")
        raise PeersLost(f"rank {', '.join(map(str, odd))} holds other bits, and leaves")

    def _wants_change(self, now: float) -> bool:
        """Say whether to change the world after this step. One member that will not wait any longer is enough."""
        if not self.driver.wants_change():
            self._change_wanted_since = None
            return False
        self._change_wanted_since = self._change_wanted_since or now
        next_vote = now + self.expected_step_s(self.size)
        has_time = next_vote - self._change_wanted_since < UPLOAD_FIRST_S and not self.driver.must_hurry()
        return not (has_time and self.is_saving())

    def share_text(self, text: str, root: int) -> str:
        """Give everybody the text of one rank."""
        if self.size == 1:
            return text
        mine = text.encode() if self.rank == root else b""
        return bytes(self.allgather(_as_tensor(mine), "text").numpy().tobytes()).decode()

    def gather_texts(self, text: str) -> list[str]:
        """Give everybody everybody's text, by rank."""
        if self.size == 1:
            return [text]
        mine = _as_tensor(text.encode())
        sizes = self.allgather(torch.tensor([mine.numel()]), "text.sizes").tolist()
        everyone = bytes(self.allgather(mine, "text").numpy().tobytes())
        ends = [sum(sizes[: rank + 1]) for rank in range(self.size)]
        return [everyone[end - size : end].decode() for end, size in zip(ends, sizes, strict=True)]

    # --- reconcile and transfer ---------------------------------------------------------------------------------------

    def _reconcile(self, state: ElasticState, restore: Callable[[], str], roll_forward: Callable[[int, int], None],
                   hand_over: Callable[[], Iterator[T]]) -> Generator[T, None, tuple[str, float]]:
        """Agree on the last finished step and give all members its state.

        Yields what `hand_over` yields. Returns where the state came from, and for how many seconds the members that
        have the state (this worker, if no member has it) have not trained.

        The transfer comes after `hand_over`: the code of the user behind a step may change what belongs to the state,
        so each member that gives a share of the state must have run it. No member waits for another before the
        transfer, and the transfer begins when all have come back from the user's code. That may take long. Horovod's
        background threads go on negotiating and the heartbeats go on in a thread of their own, so neither Gloo's
        time-out nor the driver takes such a member for a dead one.
        """
        began = time.monotonic()
        standings, source = self._standings(state), "memory"
        self._compare_arithmetic([standing.arithmetic for standing in standings])
        paused_s = max((standing.paused_ms / 1000 for standing in standings if standing.has_state),
                       default=began - self._left_at)
        if not any(standing.has_state for standing in standings):
            source = restore()  # disk, or the store: only at the start of an attempt, all together
            standings = self._standings(state)
        survivors = [s.pause for s in standings if s.has_state] if source == "memory" else []
        self._roll_forward(state, standings, roll_forward)
        if state.has_state:
            yield from hand_over()
        self._givers = [rank for rank, standing in enumerate(standings) if standing.has_state]
        if len(self._givers) < self.size:
            self._transfer(state)
        self.pauses.enter(survivors)
        return source, paused_s + time.monotonic() - began

    def _roll_forward(self, state: ElasticState, standings: Sequence[Standing],
                      roll_forward: Callable[[int, int], None]) -> None:
        """Bring this worker, if it has the state, to the newest step that a member has finished."""
        newest, last_vote = max((s.committed, s.last_vote) for s in standings if s.has_state)
        was_begun = any(s.has_state and s.begun > newest for s in standings)
        # By rank 0, also where it is a newcomer; not twice, where a member has not heard of the last reconcile's end.
        if self.rank == 0 and was_begun and (state.begun > newest or self._told_redone != newest):
            self._told_redone = newest
            self.events.emit("worker.step_redone", step=newest)
        if state.has_state and state.committed == newest - 1 and state.prepared == newest:
            # A member has applied the step, so the vote had passed, so the gradient in our hands is whole.
            roll_forward(*last_vote)
            self.events.emit("worker.rolled_forward", step=newest - 1)
        elif state.has_state:
            assert state.committed == newest, f"this worker finished {state.committed} steps, another {newest}"
            # Also when all are prepared and no member has committed: the gradients are not to be trusted
            state.prepared = state.begun = state.committed

    def _standings(self, state: ElasticState) -> list[Standing]:
        """Exchange where each worker stands, by rank."""
        paused_ms = int(1000 * (time.monotonic() - self._left_at))
        own = self.arithmetic or Arithmetic(0, 0, 0)
        mine = torch.tensor([[state.committed, state.begun, state.has_state, *state.last_vote, paused_ms,
                              own.program, own.inputs, own.result, *self.pauses.form()]], dtype=torch.int64)
        everyone = self.allgather(mine, "reconcile") if self.size > 1 else mine
        return [Standing(committed, begun, bool(has), (samples, digest), paused, Arithmetic(*more[:3]), Survivor(*more[3:]))
                for committed, begun, has, samples, digest, paused, *more in everyone.tolist()]

    def _compare_arithmetic(self, members: Sequence[Arithmetic | None]) -> None:
        """Find out whether all members compute the same bits, and tell it where no driver of ours has (it did before)."""
        first = members[0]
        odd = [rank for rank, other in enumerate(members) if first and other and computes_otherwise(first, other)]
        self.is_mixed, self._is_drift_told = bool(odd), False
        if not odd or isinstance(self.driver, OurDriver):
            return
        assert self.arithmetic
        me = {"host": self.launch.host, **self.arithmetic.to_words()}
        told = [json.loads(text) for text in self.gather_texts(json.dumps(me))]
        theirs = [Arithmetic.from_words(words) for words in told]
        for rank in odd if self.rank == 0 else ():
            one, other = theirs[rank], theirs[0]
            differ = facts_that_differ(one, other) if one and other else {}
            self.events.emit("worker.arithmetic_differs", level="warning", host=told[rank]["host"],
                             other_host=told[0]["host"], differs=differ, refused=False, meaning=advice(False, differ))

    def drifts(self, step: int) -> bool:
        """True where replicas may differ, told once a generation: the user has let workers in that compute other bits."""
        if self.is_mixed and not self._is_drift_told:
            self._is_drift_told = True
            if self.rank == 0:
                self.events.emit("worker.replicas_drift", level="warning", step=step,
                                 meaning="the workers hold different bits, as their arithmetic differs "
                                         "(worker.arithmetic_differs). A fault of a machine is not found in this world.")
        return self.is_mixed

    def _transfer(self, state: ElasticState) -> None:
        """Move the state from all who have it, each its share, to all who do not, and to nobody else.

        Network: the state's bytes once for each newcomer. A death in the middle leaves survivors untouched and
        newcomers as empty as before.
        """
        started, givers = time.monotonic(), self._givers
        takers = [rank for rank in range(self.size) if rank not in givers]
        is_giver = self.rank in givers
        packed = state.packed() if is_giver else None
        sizes = [len(packed.header), packed.payload_bytes, zlib.crc32(packed.header)] if packed else [0, 0, 0]
        held = self.all_parts() if packed and len(givers) > 1 else []  # else a wrong bit of one would soon be two's
        told = self.allgather(torch.tensor([[*sizes, checksum(held)]]), "state.sizes").tolist()
        header_bytes, payload_bytes, *_ = told[givers[0]]
        if any(told[giver][:3] != told[givers[0]][:3] for giver in givers):
            self._compare(packed, givers)
        if any(told[giver][3] != told[givers[0]][3] for giver in givers) and not self.drifts(state.committed):
            self.part_from_odd(held, givers)  # ends this generation
        self.events.reach("world.transfer_started", step=state.committed, is_giver=is_giver)
        read_header = read_payload = None
        if packed:
            whole = torch.frombuffer(bytearray(packed.header), dtype=torch.uint8)

            def read_first_header(low: int, high: int) -> Iterable[torch.Tensor]:
                return [whole[low:high]]

            read_header = read_first_header if self.rank == givers[0] else None  # numbers may differ: all of one giver's

            def read_payload(low: int, high: int) -> Iterable[torch.Tensor]:
                return byte_ranges(packed, low, high)

        header = torch.empty(0 if is_giver else header_bytes, dtype=torch.uint8)
        for low, piece in self._deal(read_header, header_bytes, givers[:1], takers, "header"):
            header[low : low + piece.numel()] = piece
        room = Packed(b"", []) if is_giver else self._room_for(state, header, payload_bytes)
        for low, piece in self._deal(read_payload, payload_bytes, givers, takers, "payload"):
            fill_range(room, low, piece)
        if not is_giver:
            state.load(unpack(room))
            self.events.emit("worker.state_received", step=state.committed, bytes=payload_bytes,
                             duration_s=round(time.monotonic() - started, 4))
        self.events.reach("world.transfer_ended", step=state.committed, is_giver=is_giver)

    def _compare(self, packed: Packed | None, givers: list[int]) -> None:
        """Raise RuntimeError on all workers if those who have the state, each giving a share, have other tensors."""
        digests = self.gather_texts(tensors_digest(packed.header) if packed else "")
        if wrong := differing({giver: digests[giver] for giver in givers}):
            raise RuntimeError(f"nobody can join: {wrong}.")

    @staticmethod
    def _room_for(state: ElasticState, header: torch.Tensor, payload_bytes: int) -> Packed:
        try:
            return state.room(header.numpy().tobytes(), payload_bytes)
        except LayoutError as error:
            raise RuntimeError(f"the state of this run does not fit what this worker has built: {error}. All workers must "
                               f"build the same model and optimizer.") from error

    def _deal(self, read: Callable[[int, int], Iterable[torch.Tensor]] | None, total: int, givers: list[int],
              takers: list[int], name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Give every taker `total` bytes: each giver sends its share of each piece, with a CRC-32 behind it.

        Yields to a taker (the byte where it belongs, piece), and nothing to a giver; to be exhausted by both.
        """
        for start in range(0, total, TRANSFER_BYTES):
            stop = min(start + TRANSFER_BYTES, total)
            cuts = [start + (stop - start) * i // len(givers) for i in range(len(givers) + 1)]
            shares = {giver: (cuts[i], cuts[i + 1]) for i, giver in enumerate(givers)}
            outgoing, splits = torch.empty(0, dtype=torch.uint8), [0] * self.size
            if read is not None:
                low, high = shares[self.rank]
                outgoing = torch.empty(len(takers), high - low + 4, dtype=torch.uint8)
                at = 0
                for part in read(low, high):  # one copy, into memory that is new: all others wait for it
                    outgoing[0, at : at + part.numel()] = part
                    at += part.numel()
                outgoing[0, at:] = torch.frombuffer(_crc(outgoing[0, :at]), dtype=torch.uint8)
                outgoing[1:] = outgoing[0]
                outgoing = outgoing.view(-1)
                splits = [at + 4 if rank in takers else 0 for rank in range(self.size)]
            incoming = self.alltoall(outgoing, splits, f"state.{name}")
            at = 0
            for giver in givers if self.rank in takers else []:
                low, high = shares[giver]
                piece, at = incoming[at : at + high - low], at + high - low + 4
                if _crc(piece) != incoming[at - 4 : at].numpy().tobytes():
                    raise PeersLost(f"the state's bytes from rank {giver} arrived damaged")
                yield low, piece

    def note_step(self, step: int, step_s: float) -> None:
        """Note that a step has ended; rank 0 tells what the pause before it, if there was one, has cost."""
        parts = self.pauses.step(step_s)
        if parts and self.rank == 0:
            told = {name: round(seconds, 4) for name, seconds in vars(parts).items()}
            self.events.emit("worker.pause_ended", step=step, duration_s=round(parts.duration_s, 4), **told)

    def _say_started(self, state: ElasticState, source: str, pause_s: float) -> None:
        self._trains = True
        self.driver.note("training", state.committed)
        self.events.reach("world.generation_entered", step=state.committed)
        if self.rank == 0:
            self.events.emit("worker.generation_started", step=state.committed, source=source or "memory",
                             pause_s=round(pause_s, 4))


def _crc(piece: torch.Tensor) -> bytearray:
    return bytearray(zlib.crc32(piece.numpy().data).to_bytes(4, "little"))


def wakes_on_arrival() -> bool:
    """True if this Horovod is one whose background thread deploy/install.sh has mended (mend_cycle)."""
    return hasattr(mpi_ops._basics.MPI_LIB_CTYPES, "horovod_wakes_on_arrival")


def init_can_fail() -> bool:
    """True if this Horovod is one whose `hvd.init()` deploy/install.sh has mended (mend_init, mend_meeting)."""
    return hasattr(mpi_ops._basics.MPI_LIB_CTYPES, "horovod_init_error")


def init_error() -> str:
    """Return why the last `hvd.init()` failed."""
    if not init_can_fail():
        return ""
    said = mpi_ops._basics.MPI_LIB_CTYPES.horovod_init_error
    said.restype = ctypes.c_char_p
    return bytes(said()).decode(errors="replace")


def poll_s(waited_s: float) -> float:
    """Return how soon to look again whether a collective has ended."""
    return min(PATIENT_POLL_S, max(POLL_S, WAITED_SHARE * waited_s))


def load() -> float:
    """Return how many processes a core of this machine have wanted to run in the last minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def gloo_timeout_s(gloo_s: float, size: int, at_once: bool, load: float) -> float:
    """Return Horovod's time-out for a collective and for finding the peers."""
    for_size_s = MEMBER_S * size if at_once else PAIR_S * size**2
    return max(gloo_s, for_size_s) * min(MAX_LOAD, max(1.0, load / RUNNABLE_EACH))


def cycle_ms(step_s: float, wakes: bool) -> float:
    """Choose how often Horovod's background threads negotiate, in milliseconds.

    Each cycle is a few small collectives also when there is nothing to do: at 3 ms they took 12 % of a core for each of 2
    workers on 2 cores. Where the thread wakes when a tensor arrives, only idle cycles are as long as this. Where it does
    not (a Horovod that somebody else has built), a long cycle delays each of a step's 3 or 4 operations by half of it.
    """
    return IDLE_CYCLE_MS if wakes else min(5.0, max(1.0, 1000.0 * step_s / 50.0))


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _open_sockets() -> set[tuple[int, int]]:
    """Return (descriptor, inode) of this process's TCP sockets, connected or listening."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6):
                        found.add((int(name), status.st_ino))
        except OSError:
            continue  # closed since the listing (the listing's own descriptor is one of them)
    return found
