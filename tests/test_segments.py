"""The event log in segments: no line is lost or read twice while processes seal, compress, write
and read at once."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from folds import past_of

from elastic_trainer.__main__ import main
from elastic_trainer.driver.past import PAST_FILE, Follower
from elastic_trainer.events.log import Events, newest_attempt, read_events
from elastic_trainer.events.segments import Reader, compress, seal, segments
from elastic_trainer.events.summary import summarize
from elastic_trainer.views.live import Live
from elastic_trainer.views.verify import verify
from tests.test_verify import Story

pytestmark = pytest.mark.usefixtures("made_up_events")
ROOT = Path(__file__).resolve().parent.parent
WRITERS, LINES = 4, 3000
WRITER = """
import sys
from pathlib import Path
from elastic_trainer.events.log import Events
events = Events(Path(sys.argv[1]), segment_bytes=20_000, writer=int(sys.argv[2]))
for number in range(int(sys.argv[3])):
    events.emit("said", number=number)
"""


def test_a_reader_gets_each_whole_line_once(tmp_path: Path) -> None:
    """A line that is still being written comes when it is whole; a torn one is passed over."""
    path = tmp_path / "events.jsonl"
    log = Reader(tmp_path)
    assert list(log.events()) == []
    a, b, c = ({"time": 1.0, "event": name} for name in "abc")
    path.write_text(json.dumps(a) + '\n{"event"')
    assert list(log.events()) == [a]
    with path.open("a") as file:
        file.write(': "b", "time": 1.0}\n{"ev\n[]\n' + json.dumps(c) + "\n")
    assert list(log.events()) == [b, c] and log.malformed == 2
    assert list(log.events()) == []


def test_no_line_is_lost_when_several_processes_write_and_segments_are_sealed_under_them(
        tmp_path: Path) -> None:
    """A reader beside them gets each line once, also late ones of a sealed segment; each writer's
    lines are in order."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER,
             str(tmp_path), str(number),
             str(LINES)], cwd=ROOT) for number in range(WRITERS)
    ]
    log, heard = Reader(tmp_path), list[dict[str, int]]()
    while any(writer.poll() is None for writer in writers):
        heard += log.events()
    heard += log.events()
    assert compress(tmp_path) == []  # late lines may come yet
    compress(tmp_path, late_s=0.0)
    assert [writer.returncode for writer in writers] == [0] * WRITERS
    assert len(segments(tmp_path)) >= 20 and segments(tmp_path)[1].suffix == ".gz"
    logged = read_events(tmp_path)
    for number in range(WRITERS):
        assert [e["number"] for e in logged if e["writer"] == number] == [*range(LINES)]
        assert sorted(e["number"] for e in heard if e["writer"] == number) == [*range(LINES)]


def test_what_is_written_after_another_line_was_seen_stands_behind_it(tmp_path: Path) -> None:
    """Two that answer each other keep their order, although either may seal the segment that the
    other has open."""
    pair = [Events(tmp_path, segment_bytes=300) for _ in range(2)]
    for number in range(200):
        pair[number % 2].emit("said", number=number)
    assert [e["number"] for e in read_events(tmp_path)] == [*range(200)]
    assert len(segments(tmp_path)) > 20


def test_one_of_many_threads_seals(tmp_path: Path) -> None:
    """They share one writer, and no thread writes to a file that another one has closed."""
    events = Events(tmp_path, segment_bytes=2000)
    threads = [
        threading.Thread(target=lambda: [events.emit("said") for _ in range(300)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_events(tmp_path)) == 8 * 300


def test_late_lines_of_a_sealed_segment_are_read(tmp_path: Path) -> None:
    """A writer whose file system answers late goes on in a segment that readers have left."""
    events = Events(tmp_path)
    events.emit("before")
    log = Reader(tmp_path)
    with open(tmp_path / "events.jsonl", "ab") as late:
        seal(tmp_path, 1)
        events.emit("after")
        assert [e["event"] for e in log.events()] == ["before", "after"]
        late.write(b'{"time": 1, "event": "late"}\n')
        late.flush()
        assert [e["event"] for e in log.events()] == ["late"]
        assert list(log.events()) == []
    assert [e["event"] for e in read_events(tmp_path)] == ["before", "late", "after"]


class OldAnswers:
    """A host with an NFS client. It answers from its cache of the newest segment until it opens the
    folder (nfs(5), close-to-open)."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch):
        self.newest, self.known = run_dir / "events.jsonl", (run_dir / "events.jsonl").stat()
        self.are_old, stat, listdir = True, Path.stat, os.listdir

        def old_stat(path: Path, **how: Any) -> os.stat_result:
            return self.known if self.are_old and path == self.newest else stat(path, **how)

        def old_listdir(path: Any) -> list[str]:
            self.are_old = False
            return listdir(path)

        monkeypatch.setattr(Path, "stat", old_stat)
        monkeypatch.setattr(os, "listdir", old_listdir)


def test_a_segment_that_another_host_has_just_sealed_is_not_sealed_again(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one, of a few lines, would get a number, or with an old listing even the place of the
    sealed one."""
    events = Events(tmp_path)
    events.emit("before")
    OldAnswers(tmp_path, monkeypatch)
    (tmp_path / "events.jsonl").rename(tmp_path / "events-000001.jsonl")  # by another host
    (tmp_path / "events.jsonl").write_text('{"time": 1, "event": "after"}\n')
    seal(tmp_path, 40)
    assert {n: p.name for n, p in segments(tmp_path).items()} == {1: "events-000001.jsonl"}
    assert [e["event"] for e in read_events(tmp_path)] == ["before", "after"]


@pytest.mark.parametrize("look", [1, 2])
def test_a_reader_from_the_end_on_misses_nothing_when_the_end_is_sealed_meanwhile(
        tmp_path: Path, look: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its offset is of the segment that it reads next."""
    events, stat, looks = Events(tmp_path), Path.stat, list[int]()
    events.emit("before")

    def seal_behind(path: Path, **how: Any) -> os.stat_result:
        found = stat(path, **how)
        looks.append(1)
        if len(looks) == look:
            seal(tmp_path, 1)
        return found

    monkeypatch.setattr(Path, "stat", seal_behind)
    log = Reader.at_end(tmp_path)
    monkeypatch.undo()
    events.emit("after")
    assert [e["event"] for e in log.events()] == ["after"]


def test_late_lines_are_read_also_when_their_segment_is_compressed_by_now(tmp_path: Path) -> None:
    """A reader that looks seldom, as the supervisor does, or one that goes on at a saved
    position."""
    events = Events(tmp_path)
    events.emit("before")
    log = Reader(tmp_path)
    with open(tmp_path / "events.jsonl", "ab") as late:
        seal(tmp_path, 1)
        assert [e["event"] for e in log.events()] == ["before"]
        late.write(b'{"time": 1, "event": "late"}\n')
    assert compress(tmp_path, late_s=0.0)
    log = Reader(tmp_path, log.position)
    assert [e["event"] for e in log.events()] == ["late"]
    events.emit("after")
    assert [e["event"] for e in log.events()] == ["after"]
    assert log.position.before == {}


@pytest.mark.parametrize("segment_bytes", [200, 1500])
def test_readers_report_the_same_for_segments_as_for_one_file(
        tmp_path: Path, segment_bytes: int) -> None:
    """Verify, report and the supervisor read a run with kills, a start from a checkpoint and an
    end."""
    story = Story()
    story.start(4)
    story.train(4)
    story.publish()
    story.train(2)
    story.lose_one(3)
    story.lose_all()
    story.start(2)
    logged = story.finish()
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder, most in ((whole, 10**9), (cut, segment_bytes)):
        events = Events(folder, segment_bytes=most)
        for event in logged:
            events.write(json.dumps(event))
        compress(folder, late_s=0.0)
    assert len(segments(cut)) > 2 and not segments(whole)
    assert verify(cut) == verify(whole) and verify(cut).is_proved
    assert summarize(read_events(cut)) == summarize(read_events(whole)) == summarize(logged)
    assert Follower(cut).read() == Follower(whole).read() == past_of(logged)
    assert newest_attempt(cut) == story.attempt


def test_a_follower_reads_only_what_is_new_and_has_the_state_of_the_whole_log(
        tmp_path: Path) -> None:
    """This holds for a follower in another process, too, by what was saved. It does not need the
    lines before."""
    events = Events(tmp_path, segment_bytes=300)
    for steps in range(1, 51):
        events.emit("driver.step_reached", attempt=1, steps=steps, checkpoint=0)
    assert Follower(tmp_path).read().newest_step == 50
    compress(tmp_path, late_s=0.0)
    for path in list(segments(tmp_path).values())[1:]:
        path.write_bytes(b"")  # a reader of it fails, or lacks its lines
    events.emit("attempt.started", attempt=2)
    events.emit("driver.step_reached", attempt=2, steps=51, checkpoint=0)
    past = Follower(tmp_path).read()
    assert (past.newest_step, past.attempt, past.lost_attempts) == (51, 2, 2)


@pytest.mark.parametrize("harm", ["torn", "of another format", "of another log", "beyond the log"])
def test_a_follower_reads_all_when_what_was_saved_cannot_be_used(tmp_path: Path, harm: str) -> None:
    """What was saved only saves time."""
    events = Events(tmp_path)
    events.emit("attempt.started", attempt=7)
    Follower(tmp_path).read()
    saved = tmp_path / PAST_FILE
    facts = json.loads(saved.read_text())
    if harm == "torn":
        saved.write_text(saved.read_text()[:40])
    elif harm == "of another format":
        saved.write_text(json.dumps(facts | {"format": 0}))
    elif harm == "of another log":
        (tmp_path / "events.jsonl").write_text(
            '{"time": 1, "event": "attempt.started", "attempt": 3}\n' * 10)
    else:
        os.truncate(tmp_path / "events.jsonl", 0)
    expected = {"of another log": 3, "beyond the log": 0}.get(harm, 7)
    assert Follower(tmp_path).read().attempt == expected


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


def replace(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "is empty": lambda path: path.write_bytes(b""),
    "is cut off": lambda path: os.truncate(path, path.stat().st_size * 2 // 3),
    "has lost its last byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "is cut off within its head": lambda path: os.truncate(path, 5),
    "is other bytes": lambda path: path.write_bytes(os.urandom(300)),
    "is text": lambda path: path.write_bytes(b"<html>503 Service Unavailable</html>\n"),
    "has a wrong byte": lambda path: flip(path, path.stat().st_size // 2),
    "has a wrong checksum": lambda path: flip(path, path.stat().st_size - 6),
    "has rubbish at its end": lambda path: path.write_bytes(path.read_bytes() + b"rubbish"),
    "is missing": Path.unlink,
    "is a folder": lambda path: replace(path, Path.mkdir),
    "is a pipe": lambda path: replace(path, os.mkfifo),
    "is a link to nothing": lambda path: replace(path, lambda it: it.symlink_to("/nonexistent/x")),
    "is a link to itself": lambda path: replace(path, lambda it: it.symlink_to(it)),
}


def run_in_segments(folder: Path, *, packed: bool = True) -> list[dict[str, Any]]:
    """Write a finished run whose log has at least five sealed segments; return its events."""
    story = Story()
    story.start(4)
    story.train(4)
    story.publish()
    logged = story.finish()
    events = Events(folder, segment_bytes=400)
    for event in logged:
        events.write(json.dumps(event))
    if packed:
        compress(folder, late_s=0.0)
    assert len(segments(folder)) > 4
    return logged


@pytest.mark.parametrize(("damage", "number"), [
    *((damage, 3) for damage in DAMAGES),
    *((damage, number) for damage in ("is empty", "is cut off", "is missing")
      for number in (1, "last"))])
def test_the_rest_is_read_and_nothing_proved_when_a_segment_is_damaged(
        tmp_path: Path, damage: str, number: int | str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each reader names the segment and reads what precedes the damage and all other segments; no
    reader proves anything of such a log, or ends."""
    folder = tmp_path / "run"
    logged = run_in_segments(folder)
    at = max(segments(folder)) if number == "last" else int(number)
    path = segments(folder)[at]
    before = [len(gzip.open(it).readlines()) for it in segments(folder).values()]
    DAMAGES[damage](path)
    if (number, damage) == ("last", "is missing"):
        assert not verify(folder).is_proved  # the numbers do not show it, and the lines do
        return
    log = Reader(folder)
    read = [event["time"] for event in log.events(to_the_end=True)]
    assert [name.removesuffix(".gz") for name in log.left_out] == [f"events-{at:06d}.jsonl"]
    times = [event["time"] for event in logged]
    start = sum(before[:at - 1])
    assert read[:start] == times[:start]
    rest = len(times) - start - before[at - 1]
    assert read[-rest:] == times[-rest:] and set(read) <= set(times)
    assert log.is_lost() is False and list(log.events()) == []
    compress(folder, late_s=0.0)
    assert main(["verify", str(folder)]) == 1
    said = capsys.readouterr().out
    assert f"not proved: events-{at:06d}.jsonl" in said.splitlines()[0] and "proved:" not in (
        said.replace("not proved:", "")) and "violated" not in said
    assert main(["report", str(folder)]) == 0
    assert f"events-{at:06d}.jsonl" in capsys.readouterr().out
    assert main(["report", str(folder), "--json", "--html", str(tmp_path / "page.html")]) == 0
    assert list(json.loads(capsys.readouterr().out)["segments_left_out"])[0].startswith(
        f"events-{at:06d}.jsonl")
    assert f"events-{at:06d}.jsonl" in (tmp_path / "page.html").read_text()
    assert main(["watch", str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"left out events-{at:06d}.jsonl" in said and "and its events are left out." in said
    follower = Follower(folder)
    assert follower.read().attempt == 1 and follower.left_out
    assert newest_attempt(folder) == 1
    assert Live(folder).known()[1]["segments_left_out"]


def test_lines_before_the_damage_count_when_a_segment_is_cut_off(tmp_path: Path) -> None:
    """Of a log with one large segment that lacks its last bytes, only the last lines are lost."""
    events = Events(tmp_path, segment_bytes=10**9)
    for number in range(3000):
        events.emit("said", number=number, noise=os.urandom(8).hex())
    seal(tmp_path, 1)
    compress(tmp_path, late_s=0.0)
    path = segments(tmp_path)[1]
    os.truncate(path, path.stat().st_size - 2000)
    events.emit("said", number=3000)
    read = [event["number"] for event in read_events(tmp_path)]
    assert read[-1] == 3000 and 2700 < len(read) < 3000 and read[:-1] == [*range(len(read) - 1)]


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name.startswith("is ") and name not
                                    in ("is cut off", "is text", "is other bytes",
                                        "is cut off within its head")])
def test_a_segment_that_is_not_compressed_yet_may_be_damaged(tmp_path: Path, damage: str) -> None:
    """Readers and the compression pass it over, and name it."""
    run_in_segments(tmp_path, packed=False)
    DAMAGES[damage](segments(tmp_path)[2])
    assert list(Reader(tmp_path).events(to_the_end=True))
    compress(tmp_path, late_s=0.0)
    assert sum(path.suffix == ".gz" for path in segments(tmp_path).values()) > 3
    log = Reader(tmp_path)
    assert list(log.events(to_the_end=True))
    assert next(iter(log.left_out)).startswith("events-000002.jsonl")
    assert not verify(tmp_path).is_proved


def test_a_million_missing_segments_are_named_at_once(tmp_path: Path) -> None:
    """A number that is far from the others costs no reader time."""
    run_in_segments(tmp_path)
    last = max(segments(tmp_path))
    (tmp_path / "events-99999999.jsonl").write_text('{"time": 1, "event": "far"}\n')
    log = Reader(tmp_path)
    assert any(event["event"] == "far" for event in log.events())
    assert log.left_out == {f"events-{last + 1:06d}.jsonl to events-99999998.jsonl": "is missing"}


def test_lines_that_are_no_text_are_counted_when_a_segment_is_whole(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 cost their line alone."""
    run_in_segments(tmp_path, packed=False)
    lines = segments(tmp_path)[2].read_bytes().splitlines(keepends=True)
    segments(tmp_path)[2].write_bytes(lines[0] + b"\xff\xfe{\x80\n" + b"".join(lines[1:]))
    compress(tmp_path, late_s=0.0)
    log = Reader(tmp_path)
    assert list(log.events()) and log.malformed == 1 and not log.left_out
