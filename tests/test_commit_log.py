"""The protocol of checkpoints under crashes, zombies, lost and late answers: thousands of seeded
interleavings.

There are a simulated store and some attempts that run as threads. Exactly one thread moves at a
time. The seed decides which thread moves, which one crashes and which answers are lost. After every
effect on the store these laws are checked:

1. The parts that the newest record names, and those that it keeps, are there with the right bytes.
2. The lineage never forks: each checkpoint was trained from the one before it in the log, or from a
   kept one that was restored. The steps of a lineage grow.
3. No acknowledged checkpoint is lost. Its record was the newest when it was put, so no other writer
   got the same answer for its number. The record is stored, with the same bytes, while the newest
   record keeps it. Records that the newest does not keep are deleted as soon as that is allowed
   (RECENT = 0), and a deletion may arrive late.
4. No writer is fenced if there is no other writer.
5. A checkpoint that has not failed is published, or a later one of its lineage is.
6. A restore gets the newest checkpoint that was stored when it took over. So it gets every
   checkpoint that was acknowledged then, or one that was made from it. At the end one attempt
   restores alone, without faults, and publishes each of its steps.

Then the protocol is broken in nine ways, and the same test has to find each of them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.state.checkpoints import commit_log as commit_log_module
from elastic_trainer.state.checkpoints import publish as publish_module
from elastic_trainer.state.checkpoints import restore as restore_module
from elastic_trainer.state.checkpoints import upload as upload_module
from elastic_trainer.state.checkpoints.cadence import Cadence
from elastic_trainer.state.checkpoints.checkpoint import Kept, Part, Plan, Share, parts_of
from elastic_trainer.state.checkpoints.commit_log import CommitLog, Damaged, Fenced, Record
from elastic_trainer.state.checkpoints.publish import Publisher
from elastic_trainer.state.checkpoints.run_checkpoints import Checkpoints
from elastic_trainer.state.stores.store import FolderStore, StoreUnavailable
from elastic_trainer.state.values.layout import LayoutError, Packed, outline, pack

SEEDS = 800
ACTORS = 4
MOVES = 120
STEPS = 6
DELETED = object()


class Crashed(BaseException):
    """This simulated process is dead."""


class LawBroken(AssertionError):
    """One of the laws above does not hold."""


def closed() -> threading.Lock:
    """Return a gate that one `release` opens for one `acquire` (a Semaphore is Python code, and ten
    times slower)."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class World:
    """The scheduler: one thread moves at a time, and the seed decides which."""

    def __init__(self, seed: int):
        self.chance = random.Random(seed)
        self.objects: dict[str, bytes] = {}
        self.history: dict[int, bytes] = {}
        """Each record that was the newest when it was put, those that were deleted since
        included."""
        self.late: list[tuple[str, bytes | None, bool]] = []
        """Puts (None: deletions) whose client has given up and that may land at any time."""
        self.acknowledged: dict[int, bytes] = {}
        self.parent: dict[str, str] = {}
        """Content after a step → content before it."""
        self.gates: dict[str, threading.Lock] = {}
        self.back = closed()
        self.crashing: set[str] = set()
        self.actors_ever = 0
        self.faults = 0
        self.is_calm = False
        """True when there are no faults any more."""
        self.error: BaseException | None = None
        self.checked = (0, 0)
        self.effects = 0

    # --- seen from an actor -----------------------------------------------------------------------

    def pause(self, name: str) -> None:
        """Let others move; returns when it is this actor's turn."""
        self.back.release()
        self.gates[name].acquire()
        if name in self.crashing:
            raise Crashed

    # --- the scheduler ----------------------------------------------------------------------------

    def run(self, actor: Callable[[World, str], None]) -> None:
        """Let actors start, move, crash; and at last one alone finish."""
        threads: dict[str, threading.Thread] = {}

        def start(actor: Callable[[World, str], None] = actor, name: str = "") -> None:
            self.actors_ever += not name
            name = name or f"actor {self.actors_ever}"
            self.gates[name] = closed()

            def body() -> None:
                self.gates[name].acquire()
                try:
                    actor(self, name)
                except Crashed:
                    pass
                except BaseException as error:
                    self.error = self.error or error
                finally:
                    del self.gates[name]
                    self.back.release()

            threads[name] = threading.Thread(target=body, daemon=True)
            threads[name].start()

        def move(name: str) -> None:
            self.gates[name].release()
            self.back.acquire()
            self.check()

        self.start = start
        start()
        for _ in range(MOVES):
            dice = self.chance.random()
            if (dice < 0.02 and len(self.gates) < ACTORS) or not self.gates:
                start()
            if dice > 0.985:
                self.crashing.add(self.chance.choice(sorted(self.gates)))
            if self.late and dice < 0.5 and self.chance.random() < 0.2:
                self.land(self.late.pop(self.chance.randrange(len(self.late))))
                self.check()
            move(self.chance.choice(sorted(self.gates)))
            if self.error:
                break
        self.crashing |= set(self.gates)
        while self.gates:
            move(sorted(self.gates)[0])
        self.is_calm, before = True, len(self.acknowledged)
        if not self.error:
            start()
        while self.gates:
            move(sorted(self.gates)[0])
        if self.error:
            raise self.error
        if len(self.acknowledged) != before + STEPS:
            raise LawBroken(
                f"{len(self.acknowledged) - before} of {STEPS} checkpoints stand, of one alone "
                f"without faults"
            )

    def land(self, put: tuple[str, bytes | None, bool]) -> None:
        """Let a late put or deletion take effect."""
        name, body, if_absent = put
        if body is None:
            self.effects += self.objects.pop(name, None) is not None
        elif not (if_absent and name in self.objects):
            self.effects += 1
            self.take(name, body)

    def take(self, name: str, body: bytes) -> None:
        """Let a put take effect. A record that is put in a gap, below the newest, is none of the
        history's."""
        if name.startswith("log/"):
            number = parsed(body).sequence
            if name in self.objects or number > max(self.history, default=0):
                self.history[number] = body
        self.objects[name] = body

    # --- the laws ---------------------------------------------------------------------------------

    def records(self) -> list[Record]:
        return [parsed(self.history[number]) for number in sorted(self.history)]

    def check(self) -> None:
        now = (len(self.acknowledged), self.effects)
        if now == self.checked:
            return
        self.checked = now
        try:
            self._check()
        except LawBroken as error:
            self.error = self.error or error

    def _check(self) -> None:
        for sequence, body in self.acknowledged.items():
            if self.history.get(sequence) != body:
                raise LawBroken(f"the acknowledged record {sequence} is lost")
        records = {r.sequence: r for r in self.records()}
        if not records:
            return
        tail = records[max(records)]
        for sequence in {*tail.kept, tail.sequence}:
            if self.objects.get(commit_log_module._name(sequence)) != self.history[sequence]:
                raise LawBroken(f"record {sequence} is gone, and the newest one keeps it")
        for sequence in tail.kept:
            for part in named(self.objects[commit_log_module._name(sequence)]):
                body = self.objects.get(part.name)
                if body is None or hashlib.sha256(body).hexdigest() != part.sha256:
                    raise LawBroken(f"{part.name} of the kept checkpoint {sequence} is not whole")
        content = ""
        step: dict[int, int] = {}
        for sequence in sorted(records):
            record = records[sequence]
            if record.kind == "checkpoint":
                mine = before = content_of(record)
                while before != content and before:
                    before = self.parent[before]
                if before != content:
                    raise LawBroken(
                        f"record {sequence} was not trained from the checkpoint before it")
                if record.step <= step.get(record.lineage, -1):
                    raise LawBroken(f"lineage {record.lineage} goes back to step {record.step}")
                content, step[record.lineage] = mine, record.step


@functools.lru_cache(10000)
def parsed(body: bytes) -> Record:
    return Record.from_bytes(body)


def content_of(record: Record) -> str:
    """Return which history a checkpoint has in it."""
    return str(json.loads(record.body["header"])["values"]["$dict"][0][1])


@functools.lru_cache(10000)
def named(body: bytes) -> list[Part]:
    return parts_of(parsed(body))


class SimulatedStore:
    """The store as one actor sees it: other actors move before and after each effect, and answers
    are lost."""

    where = "the simulated store"

    def __init__(self, world: World, name: str):
        self.world, self.name, self._objects = world, name, world.objects

    def _effect(self, act: Callable[[], Any], put: tuple[str, bytes, bool] | None = None) -> Any:
        world = self.world
        world.pause(self.name)
        dice = 0.5 if world.is_calm else world.chance.random()
        if put and dice < 0.03:
            world.faults += 1
            world.late.append(put)  # on its way when the client gives up
            raise StoreUnavailable("timed out, as planned")
        if dice < 0.06:
            world.faults += 1
            raise StoreUnavailable("reset, as planned")
        result = act()
        world.effects += put is not None or result is DELETED
        if put and dice > 0.95:
            world.faults += 1
            world.pause(self.name)
            raise StoreUnavailable("the answer was lost, as planned")
        return result

    def put(self, name: str, body: Any) -> None:
        self._effect(lambda: self.world.take(name, bytes(body)), (name, bytes(body), False))

    def put_if_absent(self, name: str, body: Any) -> bool:
        def put() -> bool:
            if name in self.world.objects:
                return False
            self.world.take(name, bytes(body))
            return True

        # Tried again below us, after the first answer was lost.
        if self.world.chance.random() < 0.05:
            self._effect(put)
        return bool(self._effect(put, (name, bytes(body), True)))

    def get(self, name: str, most: int | None = None) -> bytes:
        def get() -> bytes:
            if name not in self.world.objects:
                raise FileNotFoundError(name)
            return self.world.objects[name]

        return bytes(self._effect(get))

    def get_into(self, name: str, out: memoryview) -> bool:
        body = self.get(name)
        if len(body) == len(out):
            out[:] = body
        return len(body) == len(out)

    def list(self, prefix: str, limit: int | None = None) -> list[str]:
        return list(
            self._effect(lambda: sorted(n for n in self.world.objects
                                        if n.startswith(prefix + "/"))[:limit]))

    def delete(self, names: Any) -> None:
        for name in names:
            if name.startswith(
                    "log/") and not self.world.is_calm and self.world.chance.random() < 0.1:
                self.world.late.append((name, None, False))
                continue
            self._effect(lambda name=name: self._objects.pop(name, None) and DELETED)


class State:
    """What an attempt trains. Its content names the history that made it."""

    def __init__(self) -> None:
        self.content, self.committed, self.lineage = "", 0, 0
        self.classes: dict[str, type] = {}

    def packed(self, entries: None = None) -> Packed:
        return pack({"content": self.content, "step": self.committed, "tensors": self._tensors()})

    def _tensors(self) -> list[torch.Tensor]:
        # A part that seldom changes.
        return [torch.tensor([self.committed // 3, 7], dtype=torch.int32),
                torch.frombuffer(bytearray(hashlib.sha256(self.content.encode()).digest()[:8]),
                                 dtype=torch.uint8)]

    def room(self, header: bytes, payload_bytes: int) -> Packed:
        return Packed(header,
                      [torch.zeros(t.shape, dtype=t.dtype) for t in outline(header).tensors])

    def load(self, values: dict[str, Any]) -> None:
        self.content, self.committed = values["content"], values["step"]
        if not all(map(torch.equal, values["tensors"], self._tensors())):
            raise LawBroken(f"step {self.committed} was restored with other bytes")


class Single:
    """A world of one."""

    rank, size = 0, 1

    def share_text(self, text: str, root: int) -> str:
        return text

    def gather_texts(self, text: str) -> list[str]:
        return [text]


class AtOnce:
    """An executor without threads: in the simulation one moves at a time."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def submit(self, act: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(act(*arguments))
        except BaseException as error:
            done.set_exception(error)
        return done


def attempt(world: World, name: str) -> None:
    """One attempt: takes the log over, restores, trains, publishes; now and then a peer becomes its
    publisher."""
    plan = Plan(every=Cadence(steps=1), keep_last=1 + world.chance.randrange(2), part_bytes=8)

    def worker() -> Checkpoints:
        return Checkpoints(SimulatedStore(world, name), lambda event, **facts: None,
                           plan)  # type: ignore[arg-type]

    me, state = worker(), State()
    while True:
        try:
            me.restore(state, Single())  # type: ignore[arg-type]
            break
        except StoreUnavailable:
            continue
        except LayoutError as error:
            if world.records()[-1].writer != me.publisher.log.writer:
                return  # a successor has let go what this one found: it would be fenced
            raise LawBroken(f"restoring {name}: {error}") from error
    found = [record for record in world.records()
             if record.kind == "checkpoint" and record.sequence < state.lineage]
    if state.content != (content_of(found[-1]) if found else ""):
        raise LawBroken(
            f"{name} has restored {state.content!r}, and the newest was record {found[-1].sequence}"
        )
    first_actor_alone = world.actors_ever == 1
    for _ in range(STEPS):
        world.pause(name)
        if world.chance.random() < 0.15:
            me = another(worker, me, world)
        before_step = state.content
        state.committed += 1
        state.content = f"{name}/{state.committed}/{state.lineage}"
        world.parent[state.content] = before_step
        share = begin(me, state)
        upload(me, share)
        if share.error:
            me.drop()
            continue
        draft = collected(me, share)
        # It is cut off with its record on its way; the others go on.
        if world.chance.random() < 0.2 and not world.is_calm:
            old, me = me, another(worker, me, world)
            late = f"{name}, published before step {state.committed + 1}"
            old.store.name = late  # type: ignore[attr-defined]
            world.start(functools.partial(publish, old, draft), late)
            continue
        publish(me, draft, world, name)
        if me.known.fenced:
            if first_actor_alone and world.actors_ever == 1:
                raise LawBroken("fenced although there was no other writer")
            return


def another(worker: Callable[[], Checkpoints], before: Checkpoints, world: World) -> Checkpoints:
    """Return another rank 0 of the same attempt; it may have collected with the one before."""
    me = worker()
    if world.chance.random() < 0.5:
        me.known.parts, me.known.parts_step = before.known.parts, before.known.parts_step
        me.known.newest_step = before.known.newest_step
    return me


def collected(me: Checkpoints, share: Share) -> Share:
    """Collect the checkpoint that is up, as a world of one."""
    parts = sorted((Part(**entry) for entry in json.loads(me.parts_up())["parts"]),
                   key=lambda p: p.index)
    me.known.take(parts, share.step)
    me.upload.share = None
    share.all_parts = parts
    return share


def publish(me: Checkpoints, draft: Share, world: World, name: str) -> None:
    """Publish in this thread, with the same code, and check what it reports."""
    failures = me.known.failures
    me.publisher.publish(draft)
    if me.known.failures > failures or me.known.fenced:
        return
    newest = max((r.step for r in world.records() if r.lineage == draft.lineage), default=-1)
    if newest < draft.step:
        raise LawBroken(
            f"step {draft.step} did not fail and is not published: {newest} is the newest")
    last = me.publisher.log.last
    if last and last.kind == "checkpoint" and last.step == draft.step:
        world.acknowledged[last.sequence] = last.to_bytes()


def begin(me: Checkpoints, state: State) -> Any:
    """Take the snapshot without a thread."""
    packed = state.packed()
    data = torch.cat([t.reshape(-1).view(torch.uint8) for t in packed.tensors])
    share = Share(state.committed, 0.0, 0.0, state.lineage, packed.header, packed.payload_bytes,
                  count=2, parts=2, pieces={0: data[:8], 1: data[8:16]}, starts={0: 0, 1: 8})
    me.upload.share = share
    return share


def upload(me: Checkpoints, share: Any) -> None:
    """Upload in this thread, with the same code."""
    import queue

    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in share.pieces:
        waiting.put(index)
    me.upload.send(share, waiting, me.known.reusable())


def outcome(seeds: range) -> tuple[int, int, int]:
    """Return (checkpoints that were acknowledged, takeovers, faults) over all seeds. Raises
    LawBroken."""
    acknowledged = takeovers = faults = 0
    for seed in seeds:
        world = World(seed)
        try:
            world.run(attempt)
        except LawBroken as error:
            raise LawBroken(f"seed {seed}: {error}") from error
        acknowledged += len(world.acknowledged)
        takeovers += sum(r.kind == "takeover" for r in world.records())
        faults += world.faults
    return acknowledged, takeovers, faults


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No niceness for threads of the test, none that reads, no pauses, and no proof that the
    simulated store is one."""
    # The scheduler says when an upload begins.
    monkeypatch.setattr(upload_module, "OTHERS_COPY_S", 0.0)
    for module in (upload_module, publish_module):
        monkeypatch.setattr(module, "yield_processor", lambda: None)
    monkeypatch.setattr(restore_module, "ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr(restore_module, "prove_put_if_absent", lambda store: None)
    monkeypatch.setattr(restore_module.time, "sleep", lambda s: None)
    # A gap opens as early as the protocol allows.
    monkeypatch.setattr(commit_log_module, "RECENT", 0)


def test_the_laws_hold_in_every_interleaving() -> None:
    """And the interleavings are worth something: attempts take over, faults strike, checkpoints are
    acknowledged."""
    acknowledged, takeovers, faults = outcome(range(SEEDS))
    assert acknowledged > SEEDS and takeovers > 2 * SEEDS and faults > SEEDS


def unconditional(patch: pytest.MonkeyPatch) -> None:
    """Put records whether or not one stands there."""
    def put_if_absent(self: SimulatedStore, name: str, body: Any) -> bool:
        self.put(name, body)
        return True

    patch.setattr(SimulatedStore, "put_if_absent", put_if_absent)


def without_reading_back(patch: pytest.MonkeyPatch) -> None:
    """Take each refusal for the record of another writer, without reading it."""
    def _put(self: CommitLog, mine: Record) -> bool:
        won = self.store.put_if_absent(commit_log_module._name(mine.sequence), mine.to_bytes())
        if won:
            self.last = mine
        return won

    def _settled(self: CommitLog, sequence: int) -> Record:
        return Record(sequence=sequence, kind="unknown", lineage=-1, step=-1, writer="another")

    patch.setattr(CommitLog, "_put", _put)
    patch.setattr(CommitLog, "_settled", _settled)


def refreshed_by_zombies(patch: pytest.MonkeyPatch) -> None:
    """Read oneself up to date before each record, as if one were not fenced."""
    kept = CommitLog.append

    def append(self: CommitLog, make: Any) -> Record:
        assert self.last
        try:
            self.last = replace(self.tail(), lineage=self.last.lineage)
        except (StoreUnavailable, Damaged, FileNotFoundError):
            pass
        return kept(self, make)

    patch.setattr(CommitLog, "append", append)


def record_before_parts(patch: pytest.MonkeyPatch) -> None:
    """Count a part as up although its put has failed."""
    kept = SimulatedStore.put

    def put(self: SimulatedStore, name: str, body: Any) -> None:
        try:
            kept(self, name, body)
        except StoreUnavailable:
            pass

    patch.setattr(SimulatedStore, "put", put)
    patch.setattr(Publisher, "see_parts", lambda *_: None)  # which would notice


def eager_collection(patch: pytest.MonkeyPatch) -> None:
    """Delete all that is not kept, however young."""
    kept = publish_module.delete_unreferenced

    def delete_unreferenced(store: Any, newest: Record, names_of: Any) -> list[str]:
        return kept(store, replace(newest, lineage=10**9), names_of)

    patch.setattr(publish_module, "delete_unreferenced", delete_unreferenced)


def remembered_names(patch: pytest.MonkeyPatch) -> None:
    """Remember the names of a record that was sent, before it is known to stand (the first version
    did)."""
    kept = Publisher.next_record

    def next_record(self: Publisher, last: Record, draft: Share) -> Record | None:
        record = kept(self, last, draft)
        self.kept[last.sequence + 1] = Kept(frozenset(part.name for part in draft.all_parts))
        return record

    patch.setattr(Publisher, "next_record", next_record)


def forgetful_takeovers(patch: pytest.MonkeyPatch) -> None:
    """Begin a lineage with what the record before the newest keeps."""
    kept = CommitLog.newest_whole

    def newest_whole(self: CommitLog, newest: int | None = None) -> Record:
        found = kept(self, newest)
        return replace(found,
                       kept={n: step
                             for n, step in found.kept.items() if n != found.sequence})

    patch.setattr(CommitLog, "newest_whole", newest_whole)


def blind_in_gaps(patch: pytest.MonkeyPatch) -> None:
    """Take a put that succeeded for one at the end of the log, without a look for later records."""
    def _put(self: CommitLog, mine: Record) -> bool:
        is_mine = self.store.put_if_absent(commit_log_module._name(
            mine.sequence), mine.to_bytes()) or (self._settled(mine.sequence).nonce == mine.nonce)
        if is_mine:
            self.last = mine
        return is_mine

    patch.setattr(CommitLog, "_put", _put)


def eager_compaction(patch: pytest.MonkeyPatch) -> None:
    """Delete old records that are kept."""
    kept = CommitLog.compact

    def compact(self: CommitLog, newest: Record) -> list[int]:
        return kept(self, replace(newest, kept={}))

    patch.setattr(CommitLog, "compact", compact)


@pytest.mark.parametrize("broken", [
    unconditional, without_reading_back, refreshed_by_zombies, record_before_parts,
    eager_collection, remembered_names, forgetful_takeovers, blind_in_gaps, eager_compaction
])
def test_the_test_sees_it_when_the_protocol_is_broken(broken: Any,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the protocol's rules is needed, and its lack is seen."""
    broken(monkeypatch)
    with pytest.raises((LawBroken, Fenced)):
        outcome(range(SEEDS))


class Folder(FolderStore):
    """A folder that counts what is read of it."""

    gets = 0

    def get(self, name: str, most: int | None = None) -> bytes:
        self.gets += 1
        return super().get(name, most)


def published(log: CommitLog, step: int) -> Record:
    """Publish a checkpoint that keeps the two before it, and compact as its publisher does."""
    def following(last: Record) -> Record:
        kept = dict(sorted(last.kept.items())[-2:]) | {last.sequence + 1: step}
        return replace(last, kind="checkpoint", step=step, kept=kept, body={"header": "x" * 1000})

    record = log.append(following)
    log.compact(record)
    return record


def test_the_log_stays_short_when_a_run_goes_on_for_weeks(tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records are those that the newest keeps and a bounded number before it, and all that it
    keeps are whole."""
    monkeypatch.setattr(commit_log_module, "RECENT", 10)
    store = Folder(tmp_path)
    log = CommitLog(store)
    log.begin_lineage()
    longest = 0
    for step in range(200):
        record = published(log, step)
        longest = max(longest, len(store.list("log")))
    assert longest <= 2 * 10 + 3
    assert [log.read(sequence).step for sequence in record.kept] == [197, 198, 199]
    assert CommitLog(store).begin_lineage().kept == record.kept


def test_a_zombie_is_fenced_when_the_number_that_it_tries_is_free_again(tmp_path: Path) -> None:
    """Its record stands in a gap, and it does not follow it: neither at once nor when it tries
    again."""
    zombie = CommitLog(FolderStore(tmp_path))
    zombie.begin_lineage()
    published(zombie, 1)
    log = CommitLog(FolderStore(tmp_path))
    log.begin_lineage()
    newest = [published(log, step) for step in range(1, 9)][-1]
    assert not (tmp_path / commit_log_module._name(3)).exists()
    woken = replace(zombie.last or commit_log_module.NOTHING)
    for _ in range(2):
        zombie.last = woken
        with pytest.raises(Fenced) as fenced:
            published(zombie, 2)
        assert fenced.value.found == newest and zombie.last is None
    published(log, 9)
    assert CommitLog(FolderStore(tmp_path)).tail().step == 9
    # The next compaction takes what it has left.
    assert not (tmp_path / commit_log_module._name(3)).exists()


def test_the_newest_record_is_read_once_when_many_look_for_it(tmp_path: Path) -> None:
    """A waiting worker asks again and again whether its step is published: it costs a listing of a
    few names."""
    store = Folder(tmp_path)
    log = CommitLog(store)
    log.begin_lineage()
    published(log, 1)
    gets = store.gets
    reader = CommitLog(store)
    assert [reader.tail().step for _ in range(5)] == [1] * 5 and store.gets == gets + 1
    published(log, 2)
    assert reader.tail().step == 2 and store.gets == gets + 2
