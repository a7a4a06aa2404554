"""A run that is read from a bucket: each line once, no more requests than needed, and nothing that
another writer of the bucket could do but be left out."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3_servers
from faulty_proxy import FaultyProxy, proxied
from rich.console import Console
from stories import write
from test_terminal import log
from test_verify import Story
from waiting import until

from elastic_trainer.__main__ import main
from elastic_trainer.events.now import MOST_BYTES, NOW_FILE, NowReader
from elastic_trainer.events.segments import Reader, compress, seal, segments
from elastic_trainer.state.stores import s3
from elastic_trainer.state.stores.s3 import S3Store
from elastic_trainer.views import far
from elastic_trainer.views.live import Live, Overview
from elastic_trainer.views.watch import Watch, plain_line, view

ROOT = Path(__file__).resolve().parent.parent
WAIT_S = 60.0


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_servers.or_skip(), s3_servers.ministack(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


@pytest.fixture
def proxy(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """The server behind a proxy that counts requests, as AWS's variables name it."""
    with proxied(endpoint, monkeypatch) as proxy:
        yield proxy


@pytest.fixture
def bucket(endpoint: str, proxy: FaultyProxy, request: pytest.FixtureRequest) -> Bucket:
    return Bucket(endpoint, f"far-{abs(hash(request.node.name))}-{time.monotonic_ns()}")


class Bucket:
    """The folder of one fleet in the bucket, past the code under test."""

    def __init__(self, endpoint: str, name: str):
        self.client, self.name = s3_servers.client(endpoint), name
        self.url = f"s3://{s3_servers.BUCKET}/{name}"

    def put(self, name: str, data: bytes) -> None:
        self.client.put_object(Bucket=s3_servers.BUCKET, Key=f"{self.name}/diary/{name}", Body=data)

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=s3_servers.BUCKET, Key=f"{self.name}/diary/{name}")

    def uploads(self, run_dir: Path) -> Iterator[None]:
        """Upload a log once as deploy/hosts/events.sh does, with a pause after each request."""
        with open(run_dir / "events.jsonl", "rb") as newest:
            for path in segments(run_dir).values():
                if not path.exists():
                    return  # it was compressed meanwhile: `aws s3 sync` fails, the script ends
                self.put(path.name, path.read_bytes())
                yield
            if os.path.samestat(os.fstat(newest.fileno()), os.stat(run_dir / "events.jsonl")):
                self.put("events.jsonl", newest.read())
                yield

    def upload(self, run_dir: Path) -> None:
        for _ in self.uploads(run_dir):
            pass


def copy_of(bucket: Bucket, folder: Path) -> far.Mirror:
    folder.mkdir(exist_ok=True)
    return far.Mirror(S3Store(f"{bucket.url}/diary", is_reader=True), folder)


@pytest.mark.parametrize("seed", range(2))
def test_each_line_is_read_once_whenever_the_copy_is_made(tmp_path: Path, bucket: Bucket,
                                                          seed: int) -> None:
    """Between any two requests of an upload, while segments are sealed and compressed."""
    choice, run_dir = random.Random(seed), tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "events.jsonl").write_bytes(b"")
    written, read = list[bytes](), list[bytes]()
    copy, upload = copy_of(bucket, tmp_path / "copy"), bucket.uploads(run_dir)
    reader = Reader(copy.folder)
    for _ in range(150):
        act = choice.choice(("write", "write", "seal", "compress", "upload", "upload", "read"))
        if act == "write":
            written.append(b'{"line": %d}\n' % len(written))
            with open(run_dir / "events.jsonl", "ab") as file:
                file.write(written[-1])
        elif act == "seal":
            seal(run_dir, 40)
        elif act == "compress":
            compress(run_dir, late_s=0.0)
        elif act == "upload" and next(upload, "over") == "over":
            upload = bucket.uploads(run_dir)
        elif act == "read":
            copy.refresh()
            read += reader.lines()
            assert read == written[:len(read)]
    bucket.upload(run_dir)
    copy.refresh()
    read += reader.lines()
    assert read == written and len(segments(run_dir)) > 3


def test_an_object_is_fetched_once_and_of_the_newest_segment_what_is_new(
        tmp_path: Path, bucket: Bucket, proxy: FaultyProxy) -> None:
    """Nothing new costs one list. A log that is replaced by another one is fetched whole."""
    lines = [b'{"line": %d}\n' % number for number in range(1000)]
    bucket.put("events-000001.jsonl.gz", gzip.compress(b"".join(lines)))
    bucket.put("events.jsonl", b"".join(lines[:500]))
    copy = copy_of(bucket, tmp_path / "copy")

    def requests() -> list[tuple[str, str]]:
        proxy.seen.clear()
        copy.refresh()
        return [(path.partition("?")[0].rpartition("/")[2], headers.get("Range", ""))
                for _, path, headers in proxy.seen]

    listed = (s3_servers.BUCKET, "")
    # The newest segment begins as the sealed one does: it is an older copy of it.
    assert requests() == [listed, ("events-000001.jsonl.gz", ""), ("events.jsonl", "")]
    assert list(Reader(copy.folder).lines()) == lines
    assert requests() == [listed]
    bucket.put("events.jsonl", b"new\n" + b"".join(lines))
    assert requests() == [listed, ("events.jsonl", "")]
    bucket.put("events.jsonl", b"new\n" + b"".join(lines) * 2)
    start = 4 + len(b"".join(lines)) - far.OVERLAP_BYTES
    assert requests() == [listed, ("events.jsonl", f"bytes={start}-")]
    assert list(Reader(copy.folder).lines()) == [*lines, b"new\n", *lines, *lines]
    bucket.put("events.jsonl", b"other\n" * 9000)
    assert [name for name, _ in requests()] == [s3_servers.BUCKET, "events.jsonl", "events.jsonl"]
    assert list(Reader(copy.folder).lines())[1000:] == [b"other\n"] * 9000


def test_an_object_that_changes_under_the_copy_is_listed_again(
        tmp_path: Path, bucket: Bucket, proxy: FaultyProxy) -> None:
    """A segment is sealed after the list: the next one is not taken for it."""
    bucket.put("events.jsonl", b"a\n")
    copy = copy_of(bucket, tmp_path / "copy")

    def seal_once(method: str, path: str) -> None:
        if "events.jsonl" in path and len(proxy.seen) == 2:
            bucket.put("events-000001.jsonl", b"a\nb\n")
            bucket.put("events.jsonl", b"c\n")

    proxy.on_request = seal_once
    copy.refresh()
    assert list(Reader(copy.folder).lines()) == [b"a\n", b"b\n", b"c\n"]


@pytest.mark.usefixtures("proxy")
def test_a_hostile_bucket_makes_no_file_but_those_of_a_log(
        tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """Segments that are damaged or too large are left out, said, and counted; other names are
    passed over."""
    monkeypatch.setattr(far, "MOST_BYTES", 1 << 20)
    first, last = log()[:4], log()[4:]
    bomb = gzip.compress(bytes(2 << 20))
    packed = gzip.compress(b"".join(json.dumps(it).encode() + b"\n" for it in first))
    for name, data in (("events-000001.jsonl.gz", packed), ("events-000002.jsonl.gz", packed[:-9]),
                       ("events-000003.jsonl.gz", bomb), ("events-000004.jsonl", bytes(2 << 20)),
                       ("events-000005.jsonl.gz", b"rubbish"), ("events-0000006.jsonl", b"x\n"),
                       ("events-\u0660\u0660\u0660\u0660\u0660\u0666.jsonl", b"x\n"),
                       ("result.json", b"[" * 5000), (".events.lock", b"x"),
                       (NOW_FILE, b"x" * (MOST_BYTES + 1)),
                       ("../../events-000006.jsonl", b"x\n"), ("events-000006.jsonl/x", b"x\n"),
                       ("\x1b[2J", b"x\n"),
                       ("events.jsonl", b"".join(json.dumps(it).encode() + b"\n" for it in last))):
        bucket.put(name, data)
    copy = copy_of(bucket, tmp_path / "copy")
    copy.refresh()
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "events-000001.jsonl.gz", "events-000002.jsonl.gz", "events-000003.jsonl",
        "events-000004.jsonl", "events-000005.jsonl.gz", "events.jsonl", "result.json"]
    bucket.put(NOW_FILE, b"[" * 5000)
    copy.refresh()
    assert NowReader(copy.folder, is_copy=True).read() is None
    assert main(["report", bucket.url, "--json"]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert result["skipped_lines"] == 2 and result["steps"] == 3 and result["run"] == "seen"
    assert list(result["segments_left_out"]) == ["events-000002.jsonl.gz", "events-000005.jsonl.gz"]
    assert shown.err.count("so its events are left out. Copy it there again") == 4
    assert main(["verify", bucket.url]) == 1
    assert "result.json is malformed" in capsys.readouterr().out


@pytest.mark.parametrize("harm", ["missing", "empty", "cut off", "cut off before it is packed"])
def test_a_damaged_segment_in_a_bucket_is_named_and_the_rest_read(
        bucket: Bucket, capsys: pytest.CaptureFixture[str], harm: str) -> None:
    """What precedes the damage counts, and nothing is proved."""
    pieces = [b"".join(json.dumps(it).encode() + b"\n" for it in part)
              for part in (log()[:4], log()[4:8], log()[8:])]
    for number, text in enumerate(pieces[:2], 1):
        bucket.put(f"events-00000{number}.jsonl.gz", gzip.compress(text))
    bucket.put("events.jsonl", pieces[2])
    whole = gzip.compress(pieces[1])
    match harm:
        case "missing":
            bucket.put("events-000003.jsonl.gz", whole)
            bucket.delete("events-000002.jsonl.gz")
        case "empty":
            bucket.put("events-000002.jsonl.gz", b"")
        case "cut off":
            bucket.put("events-000002.jsonl.gz", whole[:-9])
        case _:
            bucket.delete("events-000001.jsonl.gz")
            bucket.put("events-000001.jsonl", b"")
    name = "events-000001.jsonl" if "packed" in harm else "events-000002.jsonl"
    assert main(["verify", bucket.url]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith(f"not proved: {name}") and "\nproved" not in shown.out
    assert f"{name}" in shown.err and "Copy it there again" in shown.err
    assert main(["report", bucket.url, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert next(iter(result["segments_left_out"])).startswith(name) and result["attempts"]


@pytest.mark.usefixtures("proxy")
def test_a_wrong_address_or_a_missing_permission_is_an_error_with_the_remedy(
        bucket: Bucket, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """A bucket or a folder that is not there, a missing permission by its name in IAM, a network
    that does not answer, a log with a hole."""
    monkeypatch.setattr(s3, "ATTEMPTS", 2)

    def said(address: str, *options: str, command: str = "verify") -> str:
        assert main([command, address, *options]) == 2
        return capsys.readouterr().err

    assert "no event log: neither events.jsonl nor diary/events.jsonl" in said(bucket.url)
    proxy.fault("no_bucket")
    assert "NoSuchBucket. Correct the bucket's name" in said("s3://not-there/x")
    assert "has no bucket" in said("s3://")
    bucket.put("events.jsonl", b"x\n")
    assert "--timeline joins files of the workers" in said(bucket.url, "--timeline", "x",
                                                           command="report")
    arn = f"arn:aws:s3:::{s3_servers.BUCKET}"
    proxy.fault("forbidden", contains="list-type")
    assert (f"AccessDenied. Allow s3:ListBucket on {arn} for the prefix {bucket.name}/diary/*"
            in said(bucket.url))
    bucket.put("events-000001.jsonl", b"x\n")
    bucket.put("events-000002.jsonl", b"x\n")
    proxy.fault("forbidden", contains="events-000001")
    assert (f"AccessDenied. Allow s3:GetObject on {arn}/{bucket.name}/diary/*" in said(bucket.url))
    proxy.fault("reset", times=99)
    assert "Check the network, AWS_REGION and AWS_ENDPOINT_URL_S3" in said(bucket.url)


def test_a_followed_run_gets_its_news_and_shows_when_the_bucket_does_not_answer(
        tmp_path: Path, bucket: Bucket, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """The view shows it until a list succeeds; no command to kill is shown."""
    monkeypatch.setattr(far, "POLL_S", 0.02)
    monkeypatch.setattr(s3, "ATTEMPTS", 1)
    write(tmp_path / "run", log()[:-2])
    bucket.upload(tmp_path / "run")
    with far.opened(bucket.url) as run:
        assert run.folder.name == bucket.name and run.folder.stat().st_uid == os.getuid()
        assert run.folder.parent.stat().st_mode & 0o777 == 0o700
        shown = Watch(run.folder, Console(file=io.StringIO(), width=120), far=run)
        shown._read()
        run.follow(tells=True)
        assert "kill -9" not in plain_line(shown.status, is_far=True) and shown.status.kill_command
        write(tmp_path / "run", log())
        bucket.upload(tmp_path / "run")
        until(lambda: shown._read() or shown.status.checkpoint is not None)
        fault = proxy.fault("reset", times=10**6)
        until(lambda: "did not list its objects" in run.trouble)
        shown.console.print(view(shown, 2000.0))
        assert isinstance(shown.console.file, io.StringIO)
        assert "did not list its objects" in shown.console.file.getvalue()
        fault.times = 0
        until(lambda: not run.trouble)
    until(lambda: not run.folder.parent.exists())
    assert f"{bucket.url} answers again." in capsys.readouterr().err


@pytest.mark.usefixtures("proxy")
def test_a_far_run_has_its_workers_as_they_were_and_the_age_of_the_copy_once(
        tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker's own step, heartbeat and phase, with the ages that the driver knew: in a
    terminal, on the page and as metrics. No worker looks silent because the copy is old."""
    write(tmp_path / "run", log())
    bucket.upload(tmp_path / "run")
    moment = time.time() - 20.0
    bucket.put(NOW_FILE, json.dumps({"time": moment, "workers": [
        {"worker": f"spot-host-{it:03d}:0", "host": f"spot-host-{it:03d}", "rank": it, "step": 70,
         "phase": "training", "heard": moment - 1.5, "does": "forward", "what": "micro-batch 2",
         "since": moment - 4.5} for it in range(4)]}).encode())
    facts = ("70", "1 s old", "forward 4 s: micro-batch 2")
    with far.opened(bucket.url) as run:
        shown = Watch(run.folder, Console(file=io.StringIO(), width=120), far=run)
        shown._read()
        shown.console.print(shown.picture())
        assert isinstance(shown.console.file, io.StringIO)
        terminal = shown.console.file.getvalue()
        assert all(terminal.count(f" {fact} ") == 4 for fact in facts), terminal
        copied = re.findall(r"phase: (\d+) s ago \(the bucket's copy\)", terminal)
        assert len(copied) == 1 and 20 <= int(copied[0]) < 50

    def serve(runs: list[Live], bind: str) -> None:
        fleet, metrics = runs[0].newer(0)["sections"]["fleet"], Overview(runs).metrics()
        assert all(fleet.count(f"<td>{fact}</td>") == 4 for fact in facts), fleet
        assert len(re.findall(r"phase: \d+ s ago", fleet)) == 1
        assert re.search(r"oldest_heartbeat_seconds{.*} 1\.5", metrics)
        found = re.search(r"heartbeats_timestamp_seconds{.*} (\S+)", metrics)
        assert found and float(found[1]) == pytest.approx(moment, abs=0.01)
        served.append(bind)

    served: list[str] = []
    monkeypatch.setattr("elastic_trainer.views.web.serve", serve)
    assert main(["watch", bucket.url, "--web"]) == 0 and served


def test_lines_that_come_all_at_once_are_all_printed(tmp_path: Path) -> None:
    """As the news of a bucket do. Of what was there at the start the last ones are shown."""
    events = log(hosts=40)
    write(tmp_path, events[:60])
    output = io.StringIO()
    watch = Watch(tmp_path, Console(file=output, width=200))
    watch.start()
    until(output.getvalue)
    assert output.getvalue().count("boots") < 5
    write(tmp_path, events)
    watch.stop()
    for number in range(20, 40):
        assert f"host spot-host-{number:03d}: worker {100 + number} boots" in output.getvalue()


def test_runs_of_folders_and_buckets_are_reported_side_by_side_and_a_run_is_proved(
        tmp_path: Path, bucket: Bucket, proxy: FaultyProxy,
        capsys: pytest.CaptureFixture[str]) -> None:
    """What is read from a bucket is what the folder has; the log's own folder may be named, too."""
    story = Story()
    story.start(4)
    story.train(10)
    write(tmp_path / "run", [dict(it) for it in story.finish()])
    bucket.upload(tmp_path / "run")
    assert main(["report", str(tmp_path / "run"), bucket.url, f"{bucket.url}/diary/", "--json"]
                ) == 0
    local, far_away, again = json.loads(capsys.readouterr().out)
    assert local == far_away == again and local["steps"] > 9
    assert main(["verify", bucket.url]) == main(["verify", str(tmp_path / "run")])
    page = tmp_path / "page.html"
    assert main(["report", bucket.url, "--html", str(page)]) == 0 and page.stat().st_size > 9000
    # The policy of deploy/README.md allows these requests.
    allowed = re.compile(rf"/{s3_servers.BUCKET}(\?.*\bprefix={bucket.name}%2Fdiary%2F.*|"
                         rf"/{bucket.name}/diary/[\w.-]+)")
    assert [path for method, path, _ in proxy.seen
            if method != "GET" or not allowed.fullmatch(path)] == []


def test_a_watch_that_is_terminated_leaves_no_copy_behind(tmp_path: Path, bucket: Bucket) -> None:
    write(tmp_path / "run", log())
    bucket.upload(tmp_path / "run")
    place = tmp_path / "tmp"
    place.mkdir()
    watch = subprocess.Popen([sys.executable, "-m", "elastic_trainer", "watch", bucket.url],
                             cwd=ROOT, env=os.environ | {"TMPDIR": str(place)}, text=True,
                             stdout=subprocess.PIPE)
    timer = threading.Timer(WAIT_S, watch.kill)
    timer.start()
    assert watch.stdout is not None and "spot-host" in watch.stdout.readline()
    assert [path.name for path in place.rglob("*.jsonl")] == ["events.jsonl"]
    watch.send_signal(signal.SIGTERM)
    assert watch.wait(WAIT_S) == 128 + signal.SIGTERM and not list(place.iterdir())
    timer.cancel()
