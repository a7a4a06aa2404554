"""Checkpoints of simulated workers (threads) in a folder: what is published, what is restored, what
is deleted."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from folds import past_of
from hypothesis import given
from hypothesis import strategies as st
from simulated import Hub, Member
from test_state import bytes_of, trained
from waiting import wait_for

from elastic_trainer.events.schema import misfit
from elastic_trainer.state.checkpoints.checkpoint import PARTS, Part, Plan, Share, parts_of
from elastic_trainer.state.checkpoints.commit_log import CommitLog
from elastic_trainer.state.checkpoints.run_checkpoints import Checkpoints
from elastic_trainer.state.checkpoints.upload import LONGEST_REST_S, SnapshotMemory, rest_s
from elastic_trainer.state.holders import Site
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.shards import Shards
from elastic_trainer.state.stores.by_url import open_store
from elastic_trainer.state.stores.store import (
    FolderStore,
    StoreRefused,
    StoreUnavailable,
    prove_put_if_absent,
)
from elastic_trainer.state.values.forms import CannotKeep
from elastic_trainer.state.values.layout import LayoutError, pack

SMALL = Plan(part_bytes=100)


class Events(list[tuple[str, dict[str, Any]]]):
    """Events as they are emitted."""

    def emit(self, event: str, **facts: Any) -> None:
        assert not misfit({"time": 1.0, "event": event, "attempt": 1, "worker": "a/0/1", **facts})
        self.append((event, facts))

    def names(self) -> list[str]:
        return [name for name, _ in self]

    def facts(self, event: str) -> list[dict[str, Any]]:
        return [facts for name, facts in self if name == event]


class Faulty(FolderStore):
    """A folder whose operations fail, or wait for a turn, as the test says."""

    def __init__(self, root: Path):
        super().__init__(root)
        self.failing: dict[str, int] = {}
        """How often an operation works before it fails, by its name."""
        self.turns: dict[str, threading.Semaphore] = {}
        """Each of these operations waits for a turn."""
        self.is_waiting = threading.Event()

    def fail(self, *operations: str, after: int = 0) -> None:
        """Let these operations fail, and no others."""
        self.failing = dict.fromkeys(operations, after)

    def hold(self, operation: str, turns: int = 0) -> threading.Semaphore:
        """Let an operation wait for a turn, which `release` of the result gives."""
        self.is_waiting.clear()
        return self.turns.setdefault(operation, threading.Semaphore(turns))

    def let_go(self) -> None:
        """Let all go that wait."""
        for turns in self.turns.values():
            turns.release(1000)
        self.turns = {}

    def meet(self, operation: str) -> None:
        if turn := self.turns.get(operation):
            self.is_waiting.set()
            assert turn.acquire(timeout=300)
        if (left := self.failing.get(operation)) is not None:
            self.failing[operation] = left - 1
            if left <= 0:
                kind = StoreRefused if operation == "refuse" else StoreUnavailable
                raise kind(f"{operation} is not allowed, as planned")

    def put(self, name: str, body: Any) -> None:
        self.meet("put")
        super().put(name, body)

    def put_if_absent(self, name: str, body: Any) -> bool:
        self.meet("refuse")
        if not name.startswith("log/"):
            return super().put_if_absent(name, body)
        self.meet("record")
        is_put = super().put_if_absent(name, body)
        self.meet("answer")
        return is_put

    def get_into(self, name: str, out: memoryview) -> bool:
        self.meet("get")
        return super().get_into(name, out)

    def delete(self, names: Any) -> None:
        self.meet("delete")
        super().delete(names)


class Fleet:
    """Workers that hold the same state and one store."""

    def __init__(self, root: Path | str, size: int = 1, plan: Plan = SMALL, **how: Any):
        self.size, self.events = size, Events()
        self.stores: list[Any] = [Faulty(root) if isinstance(root, Path) else open_store(root)
                                  for _ in range(size)]
        self.workers = [Checkpoints(s, self.events.emit, plan) for s in self.stores]
        self.states = [trained(**how) for _ in range(size)]

    def first(self) -> tuple[Checkpoints, LiveState]:
        """Return the worker of rank 0, and its state."""
        return self.workers[0], self.states[0]

    def pairs(self) -> list[tuple[Checkpoints, LiveState]]:
        """Return all workers, by rank, with their states."""
        return list(zip(self.workers, self.states, strict=True))

    def published(self) -> list[int]:
        """Return the steps of the checkpoints that were published."""
        return [facts["step"] for facts in self.events.facts("state.checkpoint_published")]

    def failed(self) -> list[dict[str, Any]]:
        """Return the events of the checkpoints that failed."""
        return self.events.facts("state.checkpoint_failed")

    def fail(self, *operations: str, after: int = 0) -> None:
        """Let these operations of the store fail, and no others."""
        for store in self.stores:
            store.fail(*operations, after=after)

    def restore(self, **how: Any) -> list[Any]:
        """Restore on all workers together; returns what each got, or raised."""
        hub, results = Hub(self.size), [None] * self.size

        def one(rank: int) -> None:
            worker, state = self.pairs()[rank]
            try:
                results[rank] = worker.restore(state, Member(hub, rank), **how)
            except (LayoutError, threading.BrokenBarrierError) as error:
                results[rank] = error  # all raise the first one together; a peer has gone
            except StoreUnavailable as error:
                results[rank] = error
                hub.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results

    def train(self, steps: int = 1, frozen: int = 0) -> None:
        """Change all parameters but the first ones, and commit."""
        for state in self.states:
            for _ in range(steps):
                with torch.no_grad():
                    for parameter in list(state.model.parameters())[frozen:]:
                        parameter.add_(1)
                state.commit(8, 1)

    def publish(self, count: int = 1) -> None:
        """Train a step and publish it, `count` times."""
        for _ in range(count):
            self.train()
            self.checkpoint()

    def begin(self, *, without: int | None = None) -> None:
        """Begin a checkpoint on all workers but one."""
        for worker in self.workers:
            worker.known.receive(self.workers[0].known.newest_step)  # as each vote tells it
        for rank, (worker, state) in enumerate(self.pairs()):
            if rank != without:
                worker.begin(state, rank, self.size)

    def checkpoint(self, *, without: int | None = None) -> None:
        """Publish a checkpoint; worker `without` dies before its share is up."""
        self.begin(without=without)
        for rank, worker in enumerate(self.workers):
            if rank != without:
                worker.wait()
        if without is not None or any(ticked(worker)[1] for worker in self.workers):
            for worker in self.workers:
                worker.drop()
            return
        assert all(ticked(worker)[0] for worker in self.workers)
        self.collect()

    def collect(self) -> None:
        """Collect the shares of all workers; rank 0 publishes them."""
        texts = [worker.parts_up() for worker in self.workers]
        for rank, worker in enumerate(self.workers):
            worker.collect(texts, publish=rank == 0)
            worker.wait()


def begun(*arguments: Any, **how: Any) -> Fleet:
    """Return a fleet that has restored what is in its store."""
    fleet = Fleet(*arguments, **how)
    fleet.restore()
    return fleet


def hang_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let a share that does not move be given up after this time."""
    for module in ("upload", "publish", "run_checkpoints"):
        monkeypatch.setattr(f"elastic_trainer.state.checkpoints.{module}.UPLOAD_S", seconds)


def ticked(worker: Checkpoints) -> tuple[bool, bool]:
    """Do what a worker does before each vote; returns what it votes: (its share is up, it has
    failed)."""
    worker.tick()
    return worker.progress()


def files(root: Path, folder: str) -> list[str]:
    return sorted(p.name for p in (root / folder).rglob("*") if p.is_file())


@pytest.mark.parametrize("before", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [1, 2, 5])
def test_any_world_restores_what_any_world_has_written(tmp_path: Path, before: int,
                                                       after: int) -> None:
    """Parts do not depend on the number of writers, and every reader gets every byte."""
    writers = Fleet(tmp_path, before)
    assert writers.restore() == [None] * before
    writers.publish()
    readers = Fleet(tmp_path, after, steps=0)
    assert readers.restore() == [4] * after
    assert readers.states[0].lineage == 3  # takeover, checkpoint, takeover
    for state in [*writers.states, *readers.states]:
        state.lineage = 0
    assert {bytes_of(state) for state in readers.states} == {bytes_of(writers.states[0])}
    names = files(tmp_path, PARTS)
    assert len(names) > 4 and len(set(names)) == len(names)


def test_each_worker_uploads_its_own_share(tmp_path: Path) -> None:
    """The shares are disjoint and hold all parts. No worker copies or writes a part of another."""
    fleet = begun(tmp_path, 4)
    fleet.begin()
    for worker in fleet.workers:
        worker.wait()
    shares = [{entry["index"] for entry in json.loads(worker.parts_up())["parts"]}
              for worker in fleet.workers]
    count = share.count if (share := fleet.workers[0].upload.share) else 0
    assert sorted(index for share in shares for index in share) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("by", ["vote", "time", "end"])
def test_an_upload_begins_when_the_others_have_copied(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """It begins at the next vote; a while after the copy if there is no vote; at once if a worker
    waits for it."""
    monkeypatch.setattr("elastic_trainer.state.checkpoints.upload.OTHERS_COPY_S",
                        0.2 if by == "time" else 600.0)
    fleet = begun(tmp_path)
    fleet.begin()
    [worker] = fleet.workers
    share, uploaders = worker.upload.share, worker.upload.threads
    assert share
    match by:
        case "vote":
            uploaders[0].join(0.3)
            assert not share.done and not files(tmp_path, PARTS)
            ticked(worker)
        case "end":
            worker.wait()
    for thread in uploaders:
        thread.join(60)
    assert len(share.done) == len(share.pieces) == len(files(tmp_path, PARTS))


ENDS: dict[str, Callable[[Checkpoints, LiveState], object]] = {
    "hurry": lambda worker, state: worker.upload.hurry(),
    "wait": lambda worker, state: worker.wait(),
    "drop": lambda worker, state: worker.drop("as planned"),
    "go_on_alone": lambda worker, state: worker.go_on_alone(state)}


@pytest.mark.parametrize("by", ENDS)
def test_an_upload_rests_until_a_worker_waits_for_it(tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch,
                                                     by: str) -> None:
    """A rest ends at once when a worker waits for the share, or when the share is dropped. No
    uploader rests after its last part."""
    monkeypatch.setattr("elastic_trainer.state.checkpoints.upload.UPLOADS", 1)
    hang_after(monkeypatch, 60.0)
    fleet, rested = begun(tmp_path), list[float]()
    worker, state = fleet.first()
    worker.upload.rest_s = lambda part_s, ahead_s, load: rested.append(part_s) or 600.0
    fleet.begin()
    share, [uploader] = worker.upload.share, worker.upload.threads
    assert share and len(share.pieces) > 2
    ticked(worker)
    wait_for("rest", lambda: rested, 60)
    uploader.join(0.3)
    assert len(share.done) == len(rested) == 1
    ENDS[by](worker, state)
    uploader.join(60)
    assert not uploader.is_alive()
    assert len(share.done) == (1 if by == "drop" else len(share.pieces))
    assert len(rested) == len(share.done) - (by != "drop")


def test_no_uploader_rests_when_the_share_is_up(tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several uploaders may rest while another one sends the last part. Its rest does not
    delay the next checkpoint."""
    monkeypatch.setattr("elastic_trainer.state.checkpoints.upload.UPLOADS", 2)
    fleet, rests = begun(tmp_path), list[float]()
    [worker] = fleet.workers
    worker.upload.rest_s = lambda *_: rests.append(0.0 if rests else 600.0) or rests[-1]
    fleet.begin()
    wait_for("share", lambda: ticked(worker)[0], 60)
    uploaders = worker.upload.threads
    assert len(uploaders) == 2 and rests[0] == 600.0
    fleet.collect()
    for thread in uploaders:
        thread.join(60)
    assert not any(thread.is_alive() for thread in uploaders)


def test_an_upload_plans_to_be_up_before_the_next_one_is_due(tmp_path: Path) -> None:
    """The first upload, and one after a failure, do not rest."""
    fleet, planned = begun(tmp_path, 2), list[list[float | None]]()
    for fails in ("", "", "share", "", "", "record", ""):
        for worker in fleet.workers:
            worker.begun_at = worker.begun_at and time.monotonic() - 100.0
        fleet.begin()
        for worker in fleet.workers:
            worker.wait()
        shares = [worker.upload.share for worker in fleet.workers]
        planned.append([share and share.planned_s for share in shares])
        if fails == "share":
            for worker in fleet.workers:
                worker.drop()
        else:
            fleet.fail(fails)
            fleet.collect()
            fleet.fail()
        fleet.train()
    assert [[bool(seconds and 75.0 <= seconds < 150.0) for seconds in both] for both in planned
            ] == [[at not in (0, 3, 6)] * 2 for at in range(7)]
    assert all(seconds == 0.0 for at in (0, 3, 6) for seconds in planned[at])


@given(part_s=st.floats(0, 1e4),
       ahead_s=st.floats(-1e4, 1e4),
       load=st.floats(0, 64),
       cores=st.integers(1, 64))
def test_a_rest_is_as_long_as_the_part(part_s: float, ahead_s: float, load: float,
                                       cores: int) -> None:
    """It rests only if cores are short, and for a bounded time, so that a share is never taken for
    one that hangs."""
    rest = rest_s(part_s, ahead_s, load, cores)
    assert 0 <= rest <= min(part_s, LONGEST_REST_S) and rest <= max(0.0, ahead_s)
    assert (rest > 0) == (load > cores and part_s > 0 and ahead_s > 0)
    assert rest_s(1.0, 1e9, 2.5, 2) == 1.0


def test_keeps_the_bytes_when_training_goes_on_during_the_upload(tmp_path: Path) -> None:
    """The snapshot is a copy: changes after the pause are not in the checkpoint."""
    fleet = begun(tmp_path)
    worker, state = fleet.first()
    before = bytes_of(state)
    fleet.begin()
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.zero_()
    worker.wait()
    fleet.collect()
    reader = begun(tmp_path, steps=0)
    reader.states[0].lineage = state.lineage
    assert bytes_of(reader.states[0]) == before


@pytest.mark.parametrize("keep_every", [0, 4])
def test_keeps_the_last_and_every_nth(tmp_path: Path, keep_every: int) -> None:
    """Retention deletes the parts that no kept record names, and no record."""
    fleet = begun(tmp_path, 2, Plan(part_bytes=300, keep_last=2, keep_every=keep_every), steps=0)
    for _ in range(9):
        fleet.train()
        for worker in fleet.workers:
            worker.known.parts = {}
        fleet.checkpoint()
    kept = [4, 8, 9] if keep_every else [8, 9]
    assert {int(p.name.split("-")[1]) for p in (tmp_path / PARTS).iterdir()} == set(kept)
    tail = CommitLog(FolderStore(tmp_path)).tail()
    assert sorted(tail.kept.values()) == kept
    assert len(files(tmp_path, "log")) == 10
    # No more is remembered than is kept.
    assert sorted(fleet.workers[0].publisher.kept) == sorted(tail.kept)


def test_unchanged_parts_are_not_uploaded_again(tmp_path: Path) -> None:
    """A frozen part is named again; the publisher knows that an old step's part is still
    needed."""
    fleet = begun(tmp_path, 2, Plan(part_bytes=64, keep_last=1), steps=0, optimizer="SGD", width=64)
    for _ in range(4):
        fleet.train(frozen=2)
        fleet.checkpoint()
    first, *later = [facts["uploaded_bytes"]
                     for facts in fleet.events.facts("state.checkpoint_published")]
    assert len(later) == 3 and all(0 < n < first / 2 for n in later)
    reader = Fleet(tmp_path, 3, steps=0, optimizer="SGD", width=64)
    assert reader.restore() == [4, 4, 4]


def test_what_was_collected_and_never_published_is_not_named_again(tmp_path: Path) -> None:
    """Rank 0 dies before its record is put. The next checkpoint of the others is whole, and no part
    of it is deleted."""
    plan = Plan(part_bytes=64, keep_last=1)
    fleet = begun(tmp_path, 3, plan, steps=0, optimizer="SGD", width=64)
    fleet.train()
    fleet.begin()
    for worker in fleet.workers:
        worker.wait()
    texts = [worker.parts_up() for worker in fleet.workers]
    for worker in fleet.workers[1:]:
        worker.collect(texts, publish=False)
    for kept in (fleet.stores, fleet.workers, fleet.states):
        del kept[0]
    fleet.size = 2
    fleet.train(frozen=2)
    fleet.checkpoint()
    assert fleet.published() == [2]
    assert not fleet.failed()
    # A share that is dropped changes nothing of that.
    for worker, state in fleet.pairs():
        worker.begin(state, 0, 1)
        worker.drop("the world has changed")
        worker.wait()
    fleet.train(frozen=2)
    fleet.checkpoint()
    first, second = fleet.events.facts("state.checkpoint_published")
    assert 0 < second["uploaded_bytes"] < first["uploaded_bytes"] / 2
    assert Fleet(tmp_path, 1, plan, steps=0, optimizer="SGD", width=64).restore() == [3]


def test_a_part_is_not_named_again_when_it_is_not_kept_any_more(tmp_path: Path) -> None:
    """A new publisher that missed a checkpoint must not name what that one's retention has
    deleted."""
    plan = Plan(part_bytes=64, keep_last=1)
    fleet = begun(tmp_path, 1, plan, steps=0, optimizer="SGD", width=64)
    worker, state = fleet.first()
    fleet.publish()
    stale = dict(worker.known.parts)
    content = [p.detach().clone() for p in state.model.parameters()]
    fleet.train()
    fleet.checkpoint()  # all parts are others now, and the first ones are deleted
    with torch.no_grad():
        for parameter, old in zip(state.model.parameters(), content, strict=True):
            parameter.copy_(old)
    state.commit(8, 1)
    worker.known.parts = stale
    fleet.checkpoint()
    assert "not kept any more" in fleet.failed()[0]["error"]
    fleet.publish()
    assert Fleet(tmp_path, 1, plan, steps=0, optimizer="SGD", width=64).restore() == [4]


def test_what_a_dead_worker_left_is_collected_later(tmp_path: Path) -> None:
    """Parts without a record are no checkpoint. The next checkpoint deletes them."""
    fleet = begun(tmp_path, 3, Plan(part_bytes=300, keep_last=1))
    fleet.checkpoint(without=2)
    assert files(tmp_path, PARTS) and CommitLog(FolderStore(tmp_path)).tail().step == -1
    fleet.publish()
    assert {p.name.split("-")[1] for p in (tmp_path / PARTS).iterdir()} == {f"{4:012d}"}


def part_of_step(root: Path, step: int) -> Path:
    return next(p for p in sorted((root / PARTS).rglob("*.bin"))
                if int(p.parent.name.split("-")[1]) == step)


def kept_steps(root: Path) -> list[int]:
    """Return the steps of the checkpoints that can be restored."""
    return sorted(CommitLog(FolderStore(root)).tail().kept.values())


def flip(path: Path) -> None:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flip": flip, "truncate": lambda path: path.write_bytes(path.read_bytes()[:-4]),
    "remove": Path.unlink, "folder": make_folder,
    "record": lambda path: path.write_bytes(path.read_bytes().replace(b"parts", b"party", 1))}


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("damage", DAMAGE)
def test_falls_back_to_the_one_before_when_the_newest_is_damaged(tmp_path: Path, damage: str,
                                                                 readers: int) -> None:
    """All workers pass over the same checkpoint and log it. The run can publish earlier steps
    again."""
    begun(tmp_path, 2).publish(2)
    DAMAGE[damage](min((tmp_path / "log").iterdir()) if damage == "record"
                   else part_of_step(tmp_path, 5))
    reader = Fleet(tmp_path, readers, steps=0)
    assert reader.restore() == [4] * readers
    assert len(reader.events.facts("state.checkpoint_refused")) == 1
    reader.publish()  # step 5 again: not the damaged one
    assert Fleet(tmp_path, steps=0).restore() == [5]
    assert kept_steps(tmp_path) == [4, 5]


@pytest.mark.parametrize("readers", [1, 2])
def test_no_worker_has_values_when_the_damaged_ones_could_not_be_dropped(
        tmp_path: Path, readers: int) -> None:
    """The store fails in between. The workers restore once more, and publish in their own
    lineage."""
    begun(tmp_path).publish(2)
    part_of_step(tmp_path, 5).unlink()
    reader = Fleet(tmp_path, readers, steps=0)
    reader.fail("record", after=1)  # the takeover's is the first one
    assert isinstance(reader.restore()[0], StoreUnavailable)
    assert {(state.committed, state.lineage) for state in reader.states} == {(0, 0)}
    reader.fail()
    assert reader.restore() == [4] * readers
    reader.publish()
    assert reader.workers[0].known.fenced is None
    assert Fleet(tmp_path, steps=0).restore() == [5]


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("all_records", [False, True])
def test_never_starts_afresh_when_the_only_checkpoints_record_is_damaged(
        tmp_path: Path, readers: int, all_records: bool) -> None:
    """The takeover before it names no checkpoint. Each attempt raises the same error, with a
    remedy."""
    begun(tmp_path).checkpoint()
    records = sorted((tmp_path / "log").iterdir())
    whole = [path.read_bytes() for path in records]
    for path in records if all_records else records[:1]:
        path.write_bytes(path.read_bytes()[:-9])
    for _ in range(2):
        reader = Fleet(tmp_path, readers, steps=0)
        assert all(
            isinstance(got, LayoutError) and "another name" in str(got) for got in reader.restore())
        assert "is damaged" in reader.events.facts("state.checkpoint_refused")[0]["error"]
    for path, content in zip(records, whole, strict=True):
        path.write_bytes(content)
    assert Fleet(tmp_path, readers, steps=0).restore() == [3] * readers


@pytest.mark.parametrize("where", ["put", "record", "answer"])
def test_training_goes_on_when_a_checkpoint_fails(tmp_path: Path, where: str) -> None:
    """The failure is logged and raises nothing. The next checkpoint is published."""
    fleet = begun(tmp_path, 2)
    fleet.fail(where)
    fleet.checkpoint()
    assert fleet.failed()
    assert fleet.workers[0].known.failures > 0 and not fleet.workers[0].known.reusable()
    fleet.fail()
    fleet.publish()
    assert fleet.published() == [4] and fleet.workers[0].known.failures == 0
    # If the answer was lost, the first one did stand, and is known to.
    assert kept_steps(tmp_path) == ([3, 4] if where == "answer" else [4])
    assert Fleet(tmp_path, 2, steps=0).restore() == [4, 4]


def test_an_older_one_is_never_taken_because_the_store_was_slow(tmp_path: Path) -> None:
    """A store that does not answer is no damage: the restore fails, and is tried again."""
    begun(tmp_path).publish(2)
    reader = Fleet(tmp_path, steps=0)
    reader.fail("get")
    assert isinstance(reader.restore()[0], StoreUnavailable)
    reader.fail()
    assert reader.restore() == [5]


def test_a_refusal_may_pass_when_the_store_was_usable_in_this_run(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later attempt retries, and logs it. The first attempt stops at once: there it is a mistake
    of the user."""
    begun(tmp_path).checkpoint()
    reader = Fleet(tmp_path, steps=0)
    reader.fail("refuse")
    assert isinstance(reader.restore()[0], StoreRefused)
    assert not reader.events
    monkeypatch.setattr(time, "sleep", lambda s: reader.fail())
    assert reader.restore(insist=True) == [3]
    assert "not allowed" in reader.events.facts("state.store_unavailable")[0]["error"]


def test_all_read_again_when_what_was_handed_on_arrives_damaged(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit that is flipped between two workers is no damage of the checkpoint. No worker
    continues with it."""
    begun(tmp_path, plan=Plan(part_bytes=5000), width=2000).checkpoint()
    kept = Member.wait

    def flipped(self: Member, handle: Any) -> torch.Tensor:
        tensor = kept(self, handle)
        if self.rank == 1 and handle[0][0] == "restore.2" and flips:
            tensor[flips.pop()] ^= 1
        return tensor

    monkeypatch.setattr(Member, "wait", flipped)
    for place in (0, 4999):  # in a row, after the last whole one
        flips, reader = [place], Fleet(tmp_path, 3, steps=0, width=2000)
        got = reader.restore()
        assert any(
            isinstance(one, StoreUnavailable) and "arrived damaged" in str(one)
            for one in got) and not flips
        assert {state.committed for state in reader.states} == {0}
        assert not reader.events.facts("state.checkpoint_refused")
        assert reader.restore() == [3, 3, 3]


def test_a_checkpoint_stands_when_its_unreferenced_parts_cannot_be_deleted(tmp_path: Path) -> None:
    """No permission to delete (a retention lock, a policy without s3:DeleteObject) is not a failed
    checkpoint: the next one is not due at once. The store is proved all the same."""
    fleet = begun(tmp_path, 1, Plan(part_bytes=100, keep_last=1))
    fleet.checkpoint()
    fleet.fail("delete")
    prove_put_if_absent(fleet.stores[0])
    fleet.publish()
    assert fleet.published() == [3, 4]
    assert fleet.events.facts("state.rubbish_kept") and not fleet.failed()
    assert fleet.workers[0].known.failures == 0 and fleet.workers[0].known.reusable()


def test_an_upload_is_given_up_when_nothing_moves_and_not_because_it_is_long(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time begins anew with each part that was uploaded, for a state of any size."""
    hang_after(monkeypatch, 30.0)
    fleet = begun(tmp_path)
    turns, [worker] = fleet.stores[0].hold("put"), fleet.workers
    fleet.begin()
    share = worker.upload.share
    assert share and len(share.pieces) > 3
    for count in range(1, len(share.pieces) + 1):
        share.started -= 31.0
        share.moved -= 31.0
        turns.release()
        wait_for("part", lambda n=count: len(share.done) >= n, 60)
        assert ticked(worker)[1] is False
    wait_for("share", lambda: ticked(worker) == (True, False), 60)
    share.moved -= 31.0
    assert ticked(worker) == (True, False)  # it waits for the others' shares, which move
    worker.drop("as planned")
    worker.wait()
    fleet.begin()
    assert worker.upload.share
    hang_after(monkeypatch, 0.5)
    worker.wait()  # not for ever
    worker.upload.share.moved -= 1.0
    assert ticked(worker) == (False, True)
    assert "none of its parts was uploaded" in worker.upload.share.error
    fleet.stores[0].let_go()


def test_a_share_that_does_not_move_is_logged_once(tmp_path: Path) -> None:
    """This is long before it is given up. The event names the host that does not reach the store
    while it can still be mended."""
    fleet = begun(tmp_path)
    [worker], [store] = fleet.workers, fleet.stores

    def stalls() -> list[dict[str, Any]]:
        return fleet.events.facts("state.upload_stalled")

    for number in range(2):
        store.hold("put")
        fleet.begin()
        share = worker.upload.share
        assert share
        for _ in range(2):
            assert ticked(worker) == (False, False)
            assert len(stalls()) == number  # 64 MiB may take 64 s
            worker.upload.part_bytes = 64 << 20
            share.moved -= 6.0
        worker.upload.part_bytes = SMALL.part_bytes
        if number:  # no worker asks for progress when all wait for the last checkpoint
            threading.Thread(target=worker.wait).start()
            wait_for("stall", lambda: len(stalls()) == 2, 60)
        for _ in range(2):
            assert ticked(worker) == (False, False)
        assert stalls()[-1]["still_s"] >= 6.0
        assert stalls()[-1]["what"] == f"{share.parts} of its {share.parts} parts"
        store.let_go()
        wait_for("share", lambda: ticked(worker) == (True, False), 60)
        share.moved -= 6.0
        assert ticked(worker) == (True, False)  # it waits for the others' shares
        worker.drop("as planned")
        worker.wait()
    assert len(stalls()) == 2


def test_memory_that_is_still_sent_is_never_written_again(tmp_path: Path) -> None:
    """The upload of a dropped checkpoint may hang, and continue from the same memory. The next
    checkpoint fails with that reason, and begins no upload."""
    fleet = begun(tmp_path)
    [worker], [store] = fleet.workers, fleet.stores
    store.hold("put")
    fleet.begin()
    assert store.is_waiting.wait(60)
    worker.drop("as planned")
    before = torch.cat(worker.memory.room.pieces)
    fleet.train()
    fleet.begin()
    assert worker.upload.share and "still holds the memory" in worker.upload.share.error
    assert torch.equal(torch.cat(worker.memory.room.pieces), before)
    store.let_go()
    worker.wait()
    late = list(tmp_path.rglob("parts/*/*.bin"))
    assert late and all(hashlib.sha256(path.read_bytes()).hexdigest() == path.stem[7:]
                        for path in late)
    worker.drop()
    fleet.begin()
    worker.wait()
    assert ticked(worker) == (True, False)


def test_a_publisher_that_hangs_is_given_up(tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is logged, the next checkpoint is published, and a record that arrives late is
    ignored."""
    fleet = begun(tmp_path)
    [worker], [store] = fleet.workers, fleet.stores
    turns = store.hold("record")
    fleet.begin()
    worker.wait()
    worker.collect([worker.parts_up()], publish=True)
    hung = worker.publisher.thread
    assert hung and store.is_waiting.wait(60)
    store.turns = {}  # the next record does not wait
    ticked(worker)
    assert worker.publisher.is_busy() and not fleet.failed()
    monkeypatch.setattr("elastic_trainer.state.checkpoints.publish.STALLED_S", 0.0)
    for _ in range(2):
        ticked(worker)
    (stalled,) = fleet.events.facts("state.upload_stalled")
    assert (stalled["step"], stalled["what"]) == (3, "its record")
    with monkeypatch.context() as patch:
        patch.setattr("elastic_trainer.state.checkpoints.publish.UPLOAD_S", 0.0)
        ticked(worker)
    assert not worker.publisher.is_busy() and not worker.known.reusable()
    (failed,) = fleet.failed()
    assert failed["step"] == 3 and "not in the commit log after" in failed["error"]
    fleet.publish()
    turns.release()
    hung.join(60)
    assert fleet.published() == [4]
    assert worker.known.fenced is None and worker.known.newest_step == 4
    fleet.publish()
    assert Fleet(tmp_path, steps=0).restore() == [5]


def test_a_host_without_the_folder_damages_no_checkpoint(tmp_path: Path) -> None:
    """Its disk is not mounted, or not at the folder. That is unknown, not damage: the restore fails
    and is tried again."""
    begun(tmp_path / "shared").checkpoint()
    for is_there in (False, True):
        reader = Fleet(tmp_path / "shared", 2, steps=0)
        (tmp_path / "own").mkdir(exist_ok=True) if is_there else None
        reader.workers[1] = Checkpoints(FolderStore(tmp_path / "own"), reader.events.emit, SMALL)
        assert isinstance(reader.restore()[1], StoreUnavailable)
        assert not reader.events.facts("state.checkpoint_refused")
    assert Fleet(tmp_path / "shared", 2, steps=0).restore() == [3, 3]


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Let a file be listed and not opened, as a network disk may that has cached its absence."""
    away = path.rename(path.with_name("away"))
    path.symlink_to("/nowhere")
    yield
    path.unlink()
    away.rename(path)


@pytest.mark.parametrize("what", ["part", "record"])
def test_what_is_listed_and_cannot_be_opened_is_unknown_and_not_gone(
        tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker passes over the newest checkpoint for that."""
    begun(tmp_path).publish(2)
    monkeypatch.setattr("elastic_trainer.state.checkpoints.restore.RESTORE_S", -1.0)
    reader = Fleet(tmp_path, steps=0)
    with unreadable(part_of_step(tmp_path, 5) if what == "part"
                    else min((tmp_path / "log").iterdir())):
        (got,) = reader.restore()
    assert isinstance(got, StoreUnavailable) and "cannot open" in str(got)
    assert not reader.events.facts("state.checkpoint_refused")
    assert kept_steps(tmp_path) == [4, 5]
    assert Fleet(tmp_path, steps=0).restore() == [5]


def test_an_old_record_that_cannot_be_read_holds_up_no_later_one(tmp_path: Path) -> None:
    """It is unknown, and not gone: it stays kept, and nothing that it may name is deleted."""
    begun(tmp_path).publish(2)
    fleet = Fleet(tmp_path, steps=0)
    assert fleet.restore() == [5]
    parts = files(tmp_path, "parts")
    with unreadable(sorted((tmp_path / "log").iterdir())[-2]):
        fleet.publish()
    assert fleet.published() == [6] and set(parts) < set(files(tmp_path, "parts"))
    assert kept_steps(tmp_path) == [4, 5, 6]


class Extra:
    """What a user registers. It keeps the values that the test gives."""

    def __init__(self, **kept: Any):
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        self.kept = kept


A, B = torch.zeros(3), torch.ones(3)


@pytest.mark.parametrize(("odd", "is_published"), [
    (Extra(a=torch.zeros(4), b=B, rate=0.5), False), (Extra(b=B, a=A, rate=0.5), False),
    (Extra(a=A, c=B, rate=0.5), False), (Extra(a=A.double(), b=B, rate=0.5), False),
    (Extra(a=A, b=B, rate=0.25), True), (Extra(rate=None, a=A, b=B, seen=[1, 2]), True)])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_checkpoint_fails_when_a_worker_has_packed_other_tensors(
        tmp_path: Path, odd: Extra, is_published: bool, rank: int) -> None:
    """Its parts and rank 0's header would not fit together. Numbers may differ. Said by all, with
    who; training goes on."""
    fleet = begun(tmp_path, 3)
    for number, state in enumerate(fleet.states):
        state.extras = {"odd": odd if number == rank else Extra(a=A, b=B, rate=0.5)}
    fleet.checkpoint()
    failed = fleet.failed()
    assert fleet.published() == [3] * is_published
    if is_published:
        assert not failed
        return
    assert len(failed) == 3 and len({e["error"] for e in failed}) == 1
    assert (f"the tensors of rank {'1, 2' if rank == 0 else '2'} differ from rank 0's"
            in failed[0]["error"])
    assert all(worker.known.failures == 1 and worker.upload.share is None
               for worker in fleet.workers)

    def may_begin() -> set[bool]:
        hub = Hub(3)
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(worker.compare_tensors, state, Member(hub, number))
                     for number, (worker, state) in enumerate(fleet.pairs())]
        assert {one.result() for one in asked} == {None}
        return {not worker.are_mixed for worker in fleet.workers}

    parts = files(tmp_path, "parts")
    assert may_begin() == {False} and files(tmp_path, "parts") == parts
    assert len(fleet.failed()) == 6
    fleet.states[rank].extras = {"odd": Extra(a=A, b=B, rate=0.5)}
    assert may_begin() == {True}
    fleet.publish()
    reader = Fleet(tmp_path, 2, steps=0)
    for state in reader.states:
        state.extras = {"odd": Extra()}
    assert reader.restore() == [4, 4]


def test_nothing_is_published_when_a_worker_writes_elsewhere(tmp_path: Path) -> None:
    """A newcomer whose shared disk is not mounted puts its share on a disk of its own: rank 0 sees
    that it is not there."""
    fleet = begun(tmp_path / "shared", 2)
    fleet.checkpoint()
    fleet.workers[1].upload.store = FolderStore(tmp_path / "own")
    fleet.publish()
    (failed,) = fleet.failed()
    assert "same store" in failed["error"]
    assert Fleet(tmp_path / "shared", steps=0).restore() == [3]


def test_a_folder_that_vanishes_is_unknown_and_not_empty(tmp_path: Path) -> None:
    """An unmounted disk must not look like a store without records: that would fence the
    attempt."""
    fleet = begun(tmp_path / "disk")
    fleet.checkpoint()
    (tmp_path / "disk").rename(tmp_path / "elsewhere")
    fleet.workers[0].publisher.log.last = None
    assert fleet.workers[0].find_published(1) == -1
    with pytest.raises(StoreUnavailable):
        fleet.workers[0].publisher.log.take_over(1)


def test_all_refuse_when_the_job_of_one_worker_is_another(tmp_path: Path) -> None:
    """No worker waits for ever for a worker whose model has another shape, and none continues
    without it."""
    fleet = begun(tmp_path)
    for _ in range(2):
        fleet.checkpoint()
        fleet.train()
    readers = Fleet(tmp_path, 3, steps=0)
    readers.states[2] = trained(0, width=9)
    assert all(isinstance(result, LayoutError) for result in readers.restore())


def test_a_damaged_checkpoint_takes_no_place_of_a_whole_one(tmp_path: Path) -> None:
    """After a fallback the refused one is not kept any more, also for a publisher who did not
    restore."""
    plan = Plan(part_bytes=100, keep_last=2)
    begun(tmp_path, 1, plan).publish(2)
    part_of_step(tmp_path, 5).write_bytes(b"")
    reader = Fleet(tmp_path, 2, plan, steps=0)
    assert reader.restore() == [4, 4]
    reader.train(3)
    reader.workers[1].write_alone(reader.states[1])
    assert kept_steps(tmp_path) == [4, 7]


@pytest.mark.parametrize("where", ["packed", "thread"])
def test_training_goes_on_when_a_snapshot_cannot_be_taken(tmp_path: Path, where: str,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no memory, or no thread. The vote reports the failure on all workers."""
    fleet = begun(tmp_path, 2)
    with monkeypatch.context() as patch:
        def fail(*_: Any, **__: Any) -> None:
            raise MemoryError("as planned")

        if where == "packed":
            patch.setattr(fleet.states[1], "packed", fail)
        else:
            patch.setattr("elastic_trainer.state.checkpoints.upload.threading.Thread", fail)
        fleet.checkpoint()
    assert any("as planned" in e["error"] for e in fleet.failed())
    fleet.checkpoint()
    assert fleet.published() == [3]


def test_training_goes_on_when_no_thread_can_be_had_for_the_record(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts are in the store. It is logged as any failure, and the next checkpoint is
    published."""
    fleet = begun(tmp_path)
    worker, state = fleet.first()
    worker.begin(state, 0, 1)
    worker.wait()
    with monkeypatch.context() as patch:
        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("can't start new thread, as planned")

        patch.setattr("elastic_trainer.state.checkpoints.publish.threading.Thread", fail)
        worker.collect([worker.parts_up()], publish=True)
    (failed,) = fleet.failed()
    assert "as planned" in failed["error"] and worker.known.failures == 1
    assert not worker.publisher.is_busy()
    fleet.publish()
    assert fleet.published() == [4]
    assert Fleet(tmp_path, steps=0).restore() == [4]


def test_a_checkpoint_that_met_another_publisher_is_made_again(tmp_path: Path) -> None:
    """A worker that had lost the driver published what it held. The others try again at their next
    step."""
    fleet = begun(tmp_path, 3)
    fleet.checkpoint()
    cut_off, its_state = fleet.workers.pop(), fleet.states.pop()
    fleet.size = 2
    its_state.commit(8, 1)
    cut_off.write_alone(its_state)
    fleet.train(steps=2)
    fleet.checkpoint()
    assert fleet.events.names().count("state.publisher_replaced") == 1
    assert fleet.workers[0].known.failures == 1
    fleet.checkpoint()
    assert fleet.published() == [3, 4, 5]
    assert fleet.workers[0].known.failures == 0 and fleet.workers[0].known.fenced is None
    assert Fleet(tmp_path, steps=0).restore() == [5]


def test_memory_for_a_checkpoint_made_alone_is_given_back(tmp_path: Path) -> None:
    """A share of the next one, together with the others, takes no more than a share."""
    fleet = begun(tmp_path, 4)
    fleet.checkpoint()
    alone, share_bytes = fleet.workers[0], fleet.workers[0].memory.room.bytes
    fleet.train()
    alone.write_alone(fleet.states[0])
    assert alone.memory.room.bytes > 2 * share_bytes
    fleet.publish()
    assert alone.memory.room.bytes <= 2 * share_bytes
    assert Fleet(tmp_path, steps=0).restore() == [5]


def test_a_value_that_cannot_be_kept_ends_the_training_when_the_checkpoint_begins(
        tmp_path: Path) -> None:
    """It raises not when memory is made. A worker that is alone with the state goes on: its
    checkpoint fails with the reason."""
    fleet = begun(tmp_path)
    worker, state = fleet.first()
    state.optimizer.state[next(state.model.parameters())]["odd"] = object()
    worker.memory.prepare(state, 0, 1)
    with pytest.raises(CannotKeep, match=r"state/0\.weight/odd holds a object"):
        worker.begin(state, 0, 1)
    worker.begin(state, 0, 1, is_alone=True)
    assert ticked(worker) == (False, True)
    assert worker.upload.share and "holds a object" in worker.upload.share.error


def test_memory_for_a_share_is_made_before_it_is_needed(tmp_path: Path) -> None:
    """The first pause, and the first in a smaller world, are as short as the others."""
    fleet = begun(tmp_path, 4)
    for size in (4, 3):
        del fleet.workers[size:], fleet.states[size:]
        fleet.size = size
        rooms = []
        for rank, (worker, state) in enumerate(fleet.pairs()):
            worker.memory.prepare(state, rank, size)
            assert worker.memory.coming
            rooms.append(worker.memory.coming.result(60).pieces[0].data_ptr())
        fleet.publish()
        assert [worker.memory.room.pieces[0].data_ptr() for worker in fleet.workers] == rooms
        assert all(worker.memory.coming is None for worker in fleet.workers)
    assert Fleet(tmp_path, steps=0).restore() == [5]


@pytest.mark.parametrize("part_bytes", (3000, 1 << 14, 1 << 20))
def test_memory_for_a_share_of_a_sharded_optimizer_is_made_before_it_is_needed(
        part_bytes: int) -> None:
    """It was made for the same part of what this worker has, which is less than what it owns and
    its part of the weights."""
    model = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(6)))
    states = [LiveState(model, torch.optim.Adam(model.parameters())) for _ in range(3)]
    for rank, state in enumerate(states):
        model(torch.ones(1, 20)).sum().backward()
        state.optimizer.step()
        state.shards = shards = Shards(model, state.optimizer, 1)
        shards.place(rank, [Site(host) for host in range(3)], [set(range(len(shards.blocks)))] * 3)
        shards.keep(shards.mine)
    texts = [pack(state.shards.entries(state.shards.owned)._asdict()).header.decode()
             for state in states if state.shards]
    for rank, state in enumerate(states):
        assert state.shards
        memory, share = SnapshotMemory(part_bytes), Share(1, started=0.0, moved=0.0, lineage=1)
        memory.prepare(state, rank, 3)
        assert memory.coming
        room = memory.coming.result(60)
        everyone = state.shards.everyone(SimpleNamespace(size=3, gather_texts=lambda text: texts))
        memory.copy(state.packed(entries=everyone), share, rank, 3, state.shards.owner_at)
        assert memory.room is room and sum(map(len, share.pieces.values())) <= room.bytes


def test_a_worker_that_waits_makes_a_checkpoint_step_by_step(tmp_path: Path) -> None:
    """It drops the share that the world had in flight, never waits, retries after a failure, and
    ends with a checkpoint."""
    fleet = begun(tmp_path, 2)
    alone, state = fleet.workers[0], fleet.states[0]
    fleet.train()
    fleet.begin()
    for _ in range(6):
        alone.go_on_alone(state)
        if alone.upload.share and len(fleet.failed()) == 0:
            alone.upload.share.error = "the store is away"
        alone.wait()
    assert fleet.published() == [state.committed]
    assert len(fleet.failed()) == 1 and alone.upload.share is None


def test_a_record_that_vanishes_while_read_is_the_worlds_fault(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network disk may list what it cannot open."""
    fleet = begun(tmp_path)
    fleet.checkpoint()
    with monkeypatch.context() as patch:
        patch.setattr(FolderStore, "get",
                      lambda self, name, most=None: (_ for _ in ()).throw(FileNotFoundError(name)))
        assert fleet.workers[0].find_published(fleet.states[0].lineage) == -1
        with pytest.raises(StoreUnavailable):
            CommitLog(fleet.stores[0]).take_over(fleet.states[0].lineage)
    assert fleet.workers[0].find_published(fleet.states[0].lineage) == 3
    assert fleet.workers[0].find_published(fleet.states[0].lineage + 1) == -1


class Careless(FolderStore):
    """A store that ignores the condition, as rclone and s3rver do."""

    def put_if_absent(self, name: str, body: Any) -> bool:
        super().put(name, body)
        return True


def test_a_store_is_refused_when_it_ignores_the_condition(tmp_path: Path) -> None:
    """The error comes at the start, and names endpoints that are known for it."""
    with pytest.raises(StoreRefused, match="rclone"):
        prove_put_if_absent(Careless(tmp_path))
    prove_put_if_absent(FolderStore(tmp_path))
    assert not files(tmp_path, "probe")


@pytest.mark.parametrize("change", [
    {"name": "../../etc/passwd"}, {"name": "log/0999999999999.json"}, {"name": "/x"}, {"bytes": -1},
    {"index": 7}])
def test_a_record_is_refused_when_its_parts_do_not_fit(tmp_path: Path,
                                                       change: dict[str, Any]) -> None:
    """A name from a record never leads out of the parts' folder."""
    begun(tmp_path).checkpoint()
    record = CommitLog(FolderStore(tmp_path)).tail()
    assert parts_of(record)
    record.body["parts"][1] |= change
    with pytest.raises(ValueError, match="parts"):
        parts_of(record)


def test_an_attempt_that_trained_and_left_without_a_result_is_a_loss() -> None:
    """This holds for an attempt without an end in the log, too; not for one that was stopped,
    finished, or never trained."""
    reached = {"time": 1.0, "event": "driver.step_reached", "checkpoint": 0}
    events = [reached | {"attempt": attempt, "steps": attempt} for attempt in (1, 1, 2, 3, 4)
              ] + [{"time": 1.0, "event": "attempt.ended", "attempt": attempt, "verdict": verdict}
                   for attempt, verdict in ((1, "failed"), (2, "interrupted"), (3, "finished"),
                                            (5, "failed"))]
    assert past_of(events).lost_attempts == 2  # 1 and 4
    assert past_of([]).lost_attempts == 0


def test_what_was_withdrawn_is_restored_by_no_attempt(tmp_path: Path) -> None:
    """The newest of the others is restored, also when the checkpoint after it is on its way."""
    fleet = begun(tmp_path, 2, steps=0)
    fleet.publish(3)
    fleet.train()
    fleet.begin()
    assert fleet.workers[0].withdraw(fleet.states[0].lineage, 2) == 2
    assert fleet.workers[0].withdraw(fleet.states[0].lineage, 2) == 2
    assert Fleet(tmp_path, 2, steps=0).restore() == [2, 2]


@pytest.mark.parametrize("before", [0, 2])
def test_a_checkpoint_that_stands_unknown_to_its_publisher_is_withdrawn_too(
        tmp_path: Path, before: int) -> None:
    """Its put was given up, and had arrived: the next attempt would restore it."""
    fleet = begun(tmp_path, steps=0)
    fleet.publish(before)
    fleet.fail("answer")
    fleet.publish()
    fleet.fail()
    assert fleet.workers[0].withdraw(fleet.states[0].lineage, before) == (before or -1)
    assert Fleet(tmp_path, steps=0).restore() == [before or 1]


def test_a_record_of_another_publisher_does_not_keep_a_checkpoint_from_being_withdrawn(
        tmp_path: Path) -> None:
    """A worker of the same attempt that wrote alone has followed ours; that is no error of the
    user's."""
    fleet = begun(tmp_path, 2, steps=0)
    fleet.publish(2)
    fleet.train()
    fleet.workers[1].write_alone(fleet.states[1])
    assert fleet.workers[0].withdraw(fleet.states[0].lineage, 2) == 2
    assert Fleet(tmp_path, 2, steps=0).restore() == [2, 2]


def test_nothing_is_withdrawn_when_nothing_would_be_left(tmp_path: Path) -> None:
    """A run must never start afresh for it, unless it had no checkpoint at all."""
    fleet = begun(tmp_path, steps=0)
    assert fleet.workers[0].withdraw(fleet.states[0].lineage, 5) == 0
    fleet.publish()
    assert fleet.workers[0].withdraw(fleet.states[0].lineage, 0) == -1
    assert Fleet(tmp_path, steps=0).restore() == [1]


def test_part_bounds_are_checked() -> None:
    """At most 64 MiB a part: one PUT."""
    with pytest.raises(ValueError, match="part_bytes"):
        Plan(part_bytes=65 << 20)
    assert Part(0, "parts/x/y", 1, "").bytes == 1
