"""The file of what each worker does now: when it is written, and what a reader takes of it."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_terminal import log, status_of

from elastic_trainer.driver.progress import ALIVE_S, MOST_WHAT, NowFile, is_due, kept, now_of
from elastic_trainer.driver.roster import Phase, Roster
from elastic_trainer.events.now import FRESH_COPY_S, FRESH_S, NOW_FILE, Now, NowReader, now_in
from elastic_trainer.views.status import cells, columns, host_rows
from elastic_trainer.wire.heartbeat import At

DAY_S = 1_800_000_000.0
"""The time of day when the monotonic clock is 0."""


def roster(heard_at: float = 100.0, step: int = 7, does: At | None = None) -> Roster:
    """Return a member that has reported, and a worker that boots."""
    found = Roster()
    member = found.add("a", 0, 90.0)
    member.phase, member.count, member.heard_at, member.step = Phase.TRAINING, 5, heard_at, step
    member.at = does
    found.add("b", 0, 99.0)
    found.members = (member.name,)
    return found


def written(at: float, **facts: Any) -> dict[str, Any]:
    return now_of(roster(**facts), at, DAY_S + at)


def at(for_s: float, what: str = "micro-batch 2, 32 samples from 64") -> At:
    return At(phase="forward", what=what, for_s=for_s, step=7, waits_s=0.0,
              usual_s=1.0, own_s=0.5, steps=7)


def test_a_reader_gets_what_the_driver_knows() -> None:
    """Host, rank, phase, step and the age of the heartbeat, by the driver's clock; a worker that
    boots has no rank and no heartbeat."""
    now = now_in(json.dumps(written(101.5)).encode())
    assert now and now.time == DAY_S + 101.5
    member, booting = now.workers.values()
    assert (member.host, member.rank, member.phase, member.step) == ("a", 0, "training", 7)
    assert member.silent_s == pytest.approx(1.5, abs=0.11)
    assert (booting.host, booting.rank, booting.phase) == ("b", -1, "booting")
    assert booting.silent_s is None and (member.does, booting.does) == ("", "")


def test_a_row_has_what_a_loop_does_and_how_long_if_that_takes_long() -> None:
    """A phase in a word; one that has lasted for 3 s with its time and its micro-batch. The time
    since the last heartbeat counts: a frozen worker is in its last phase. Of several workers on a
    host the row has the one that has been in its phase for the longest time."""
    def shown(*worker_at: At | None, phase: str = "training", silent_s: float = 0.0) -> str:
        status, content = status_of(log(1)), written(100.0 + silent_s)
        content["workers"] = []
        for number, does in enumerate(worker_at):
            worker = written(100.0 + silent_s, does=does)["workers"][0]
            content["workers"].append(worker | {"worker": f"spot-host-000:{number}",
                                                "phase": phase})
        status = replace(status, workers={
            it["worker"]: status.workers["spot-host-000:0"] for it in content["workers"]})
        now = now_in(json.dumps(content).encode())
        (row,) = host_rows(status, now)
        texts = next(cells([row], columns(status, now, None), None, 0.0))
        return dict(zip(columns(status, now, None), texts, strict=True))["phase"]

    assert shown(at(2.0)) == "forward"
    assert shown(at(2.0), silent_s=2.0) == "forward 4 s: micro-batch 2, 32 samples from 64"
    assert shown(at(70.0, what="")) == "forward 1 min"
    assert shown(at(5.0, what="x" * 50_000)) == f"forward 5 s: {'x' * MOST_WHAT}"
    assert shown(at(1.0, what="a"), at(9.0, what="b")) == "forward 9 s: b"
    assert shown(None) == shown(at(9.0), phase="waiting") == "-"


def test_the_file_is_written_only_if_a_view_would_show_something_else() -> None:
    """A heartbeat alone is no reason. A step, a second of silence and 5 s without a write are."""
    before = written(101.0)
    assert is_due(None, before)
    assert not is_due(before, written(101.9)) and not is_due(before, written(102.0, heard_at=101.0))
    assert is_due(before, written(102.0, heard_at=101.0, step=8))
    assert is_due(before, written(102.1))
    assert is_due(before, written(101.0 + ALIVE_S, heard_at=100.0 + ALIVE_S))
    busy = written(101.0, heard_at=101.0, does=at(6.2))
    assert is_due(written(101.0, heard_at=101.0), busy)
    assert not is_due(busy, written(101.6, heard_at=101.0, does=at(6.2)))
    assert is_due(busy, written(101.9, heard_at=101.0, does=at(6.2)))
    assert is_due(busy, written(101.6, heard_at=101.0, does=at(6.2, what="micro-batch 3")))


@pytest.mark.parametrize("text", [
    b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"time": 1}', b'{"workers": []}',
    b'{"time": NaN, "workers": []}', b'{"time": 1e999, "workers": []}',
    b'{"time": 1, "workers": {}}', b'{"time": 1, "workers": [[]]}',
    *(json.dumps({"time": 1.0, "workers": [{"worker": "a", "host": "a", "rank": 0, "step": 1,
                                            "phase": "training", **wrong}]}).encode()
      for wrong in ({"step": -1}, {"step": 1e3}, {"step": 10**400}, {"rank": "0"},
                    {"host": "a" * 301}, {"phase": None}, {"heard": "now"}, {"heard": -1.0},
                    {"does": 1}, {"what": "x" * 301}, {"since": "now"}, {"since": -1.0},
                    {"drains": 1}))])
def test_a_malformed_file_is_no_file(text: bytes) -> None:
    assert now_in(text) is None


def test_a_newer_drivers_file_is_read() -> None:
    """Fields and phases that this version does not know change nothing else."""
    status, content = status_of(log(1)), written(101.0)
    content["workers"][0] |= {"worker": "spot-host-000:0", "phase": "dreaming", "at": {"what": 1}}
    now = now_in(json.dumps(content | {"more": []}).encode())
    assert now and host_rows(status, now)[0].state == "training"


class Clocks:
    def __init__(self) -> None:
        self.monotonic, self.day = 50.0, DAY_S

    def reader(self, folder: Path) -> NowReader:
        return NowReader(folder, lambda: self.monotonic, lambda: self.day)

    def run(self, seconds: float) -> None:
        self.monotonic, self.day = self.monotonic + seconds, self.day + seconds


def test_a_dead_drivers_file_is_no_file_whatever_the_clocks(tmp_path: Path) -> None:
    """It is read until it was not written for FRESH_S. If the clocks of driver and reader differ, a
    first change proves that the driver lives."""
    def write(at: float) -> None:
        (tmp_path / NOW_FILE).write_text(json.dumps({"time": at, "workers": []}))

    clocks = Clocks()
    reader = clocks.reader(tmp_path)
    assert reader.read() is None
    write(DAY_S - 1.0)
    assert reader.read()
    clocks.run(FRESH_S - 2.0)
    assert reader.read()
    clocks.run(2.0)
    assert reader.read() is None
    for off_s in (-3600.0, 3600.0):
        reader = clocks.reader(tmp_path)
        write(clocks.day + off_s)
        assert reader.read() is None
        clocks.run(1.0)
        write(clocks.day + off_s)
        assert reader.read()
        clocks.run(FRESH_S)
        assert reader.read() is None
    (tmp_path / NOW_FILE).unlink()
    assert reader.read() is None


def test_a_copy_has_an_age_of_its_own_and_lasts_longer(tmp_path: Path) -> None:
    """It comes from a bucket each 20 s. The ages in it are those that the driver knew. Its own age
    is that by this machine's clock, or, if the clocks differ, the time since it came."""
    def write(at: float) -> None:
        content = written(100.0) | {"time": at}
        content["workers"][0]["heard"] = at - 2.0
        (tmp_path / NOW_FILE).write_text(json.dumps(content))

    def age_of(now: Now | None) -> float | None:
        assert now and {it.silent_s for it in now.workers.values()} == {None, 2.0}
        return now.copied_s

    clocks = Clocks()
    reader = NowReader(tmp_path, lambda: clocks.monotonic, lambda: clocks.day, is_copy=True)
    write(clocks.day - 8.0)
    assert age_of(reader.read()) == 8.0
    clocks.run(FRESH_S)
    assert age_of(reader.read()) == 8.0 + FRESH_S
    clocks.run(FRESH_COPY_S - FRESH_S - 8.0)
    assert reader.read() is None
    for off_s in (-3600.0, 3600.0):
        write(clocks.day + off_s)
        assert age_of(reader.read()) == 0.0
        clocks.run(20.0)
        assert age_of(reader.read()) == 20.0
        clocks.run(FRESH_COPY_S)
        assert reader.read() is None
    write(clocks.day)
    assert age_of(reader.read()) == 0.0
    assert age_of(clocks.reader(tmp_path).read()) is None


def test_what_is_no_small_regular_file_is_not_read(tmp_path: Path) -> None:
    """A pipe that nobody writes, a folder, and a file of a terabyte."""
    file, reader = tmp_path / NOW_FILE, NowReader(tmp_path)
    os.mkfifo(file)
    assert reader.read() is None
    file.unlink()
    file.mkdir()
    assert reader.read() is None
    file.rmdir()
    with open(file, "wb") as huge:
        huge.truncate(1 << 40)
    assert reader.read() is None


def test_a_file_that_cannot_be_written_is_reported_once(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The driver goes on, and writes the file as soon as it can."""
    obstacle = tmp_path / NOW_FILE
    (obstacle / "full").mkdir(parents=True)
    file = NowFile(tmp_path, roster(), threading.RLock())
    file.write()
    file.write()
    told = capsys.readouterr().err
    assert told.count("cannot be written") == 1 and str(obstacle) in told
    (obstacle / "full").rmdir()
    obstacle.rmdir()
    file.write()
    assert now_in(obstacle.read_bytes())
    file.remove()
    assert not obstacle.exists()


def test_a_file_system_that_hangs_holds_neither_the_lock_nor_the_end(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that writes waits in the kernel: for a reader of a pipe, as for a server."""
    monkeypatch.setattr("elastic_trainer.driver.progress.EVERY_S", 0.01)
    monkeypatch.setattr("elastic_trainer.driver.progress.LAST_S", 0.01)
    pipe = tmp_path / f".{NOW_FILE}.{os.getpid()}"
    lock, has_begun = threading.RLock(), threading.Event()
    os.mkfifo(pipe)

    class Noted(Roster):
        def alive(self) -> list[Any]:
            has_begun.set()
            return super().alive()

    with kept(tmp_path, Noted(), lock):
        assert has_begun.wait(300) and lock.acquire(timeout=300)
        lock.release()
        writer = next(it for it in threading.enumerate() if it.name == "now")
    assert writer.is_alive()
    os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))  # the server answers
    writer.join(60)
    assert not writer.is_alive()


def test_a_row_shows_what_the_driver_knows_and_the_log_does_not() -> None:
    """Each worker's own step, its silence, its wait for a new world, and its notice."""
    status = status_of(log(3))
    content = {"time": 100.0, "workers": [
        {"worker": f"spot-host-00{it}:0", "host": f"spot-host-00{it}", "rank": it, "heard": 97.0,
         "phase": "training", "step": 3 + it} for it in range(3)]}
    content["workers"][1]["phase"] = "waiting"  # type: ignore[index]
    content["workers"][2]["drains"] = True  # type: ignore[index]
    now = now_in(json.dumps(content).encode())
    rows = host_rows(status, now)
    assert [(row.state, row.ranks, row.steps, row.silent_s) for row in rows] == [
        ("draining", (2,), (5,), 3.0), ("waiting", (1,), (4,), 3.0), ("training", (0,), (3,), 3.0)]
    assert [row.steps for row in host_rows(status)] == [(3,), (3,), (3,)]
    assert {row.silent_s for row in host_rows(status)} == {None}
