"""Checkpoints in gs:// and az://: on fake-gcs-server and Azurite, with a proxy that plays the
faults of networks and servers.

Azurite takes minutes to install. Its tests run where it is installed already, and with --long.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import store_laws
from bucket_servers import (
    azure_environment,
    azurite,
    careless_gcs,
    fake_gcs,
    google_environment,
)
from cluster import Cluster
from faulty_proxy import FaultyProxy
from s3_servers import BUCKET, Unavailable
from stories import write
from test_checkpoint import begun
from test_state import assert_one_wins
from test_store_faults import JOB, Twin
from test_verify import Story
from waiting import until

from elastic_trainer.__main__ import main
from elastic_trainer.events.segments import Reader
from elastic_trainer.state.checkpoints.commit_log import CommitLog, Fenced
from elastic_trainer.state.stores.by_url import open_store
from elastic_trainer.state.stores.store import StoreRefused, StoreUnavailable, prove_put_if_absent
from elastic_trainer.views import far

WRITES = {"gs": ("POST", "/upload/"), "az": ("PUT", "/parts/")}
"""By what a proxy knows the write of a part: Google's has the object's name in its body."""
READS = {"gs": "parts%2F", "az": "/parts/"}
LISTS = {"gs": "/o?", "az": "comp=list"}


@pytest.fixture(scope="module", params=["gs", "az"])
def server(request: pytest.FixtureRequest,
           tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A scheme, and the endpoint of its server, which has a bucket."""
    folder = tmp_path_factory.mktemp(request.param)
    try:
        with (fake_gcs(folder) if request.param == "gs" else
              azurite(folder, request.config.getoption("--long"))) as endpoint:
            yield request.param, endpoint
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def proxy(server: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy before the server, to which the cloud's variables point."""
    scheme, endpoint = server
    with FaultyProxy(endpoint) as proxy:
        variables = google_environment if scheme == "gs" else azure_environment
        for name, value in variables(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture
def url(server: tuple[str, str], proxy: FaultyProxy) -> str:
    """A place in the bucket for this test alone."""
    return f"{server[0]}://{BUCKET}/tests/{time.monotonic_ns()}"


def scheme(url: str) -> str:
    return url[:2]


def test_any_world_restores_what_any_world_has_written(url: str) -> None:
    """Three write, two read, one reads. The store is proved first, and keeps what is wanted only.
    """
    store = store_laws.any_world_restores_what_any_world_has_written(url)
    assert store.list("nothing") == []


def test_an_object_is_read_as_far_as_is_asked(url: str) -> None:
    """A record's name may hold an object of any size, also an empty one."""
    store, body = open_store(url), bytes(range(256)) * 100
    store.put("log/x", memoryview(body))
    store.put("log/empty", b"")
    for most in (1, 1000, len(body), len(body) + 1, None):
        assert store.get("log/x", most) == body[:most]
    assert store.get("log/empty", 10) == store.get("log/empty") == b""
    for size in (len(body) - 1, len(body), len(body) + 1):
        out = bytearray(size)
        assert store.get_into("log/x", memoryview(out)) == (size == len(body))
    with pytest.raises(FileNotFoundError):
        store.get("log/missing")
    store.delete(["log/x", "log/missing"])
    assert store.list("log") == ["log/empty"]


def test_one_wins_when_many_put_the_same_name(url: str) -> None:
    """Put if absent: one of 16 racing creators, and its bytes are whole."""
    store = open_store(url)
    assert_one_wins(store)
    prove_put_if_absent(store)
    assert store.list("probe") == []


def test_a_server_is_refused_when_it_ignores_the_condition(tmp_path: Path, monkeypatch:
                                                           pytest.MonkeyPatch) -> None:
    """gcp-storage-emulator takes each of sixteen racing objects for the first."""
    try:
        with careless_gcs(tmp_path) as endpoint:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
            with pytest.raises(StoreRefused, match="gcp-storage-emulator. Use another endpoint"):
                prove_put_if_absent(open_store(f"gs://{BUCKET}/x"))
    except Unavailable as error:
        pytest.skip(str(error))


def test_a_proxy_is_refused_when_it_takes_the_condition_off(proxy: FaultyProxy, url: str) -> None:
    """The start of the run has the error. Azure's signature covers the condition, so its server
    refuses by itself."""
    proxy.fault("unconditional", times=10**6)
    with pytest.raises(StoreRefused, match="put-if-absent|Storage Blob Data Contributor"):
        prove_put_if_absent(open_store(url))


@pytest.mark.parametrize("kind", ["reset", "lose_answer", "slow_down", "internal"])
def test_a_checkpoint_stands_when_a_fault_meets_its_upload(proxy: FaultyProxy, url: str, kind: str,
                                                           request: pytest.FixtureRequest) -> None:
    """Faults of the network are retried within bounds, and a lost answer is settled by the nonce.
    """
    needs_long(request, url)
    store_laws.a_checkpoint_stands_when_a_fault_meets_its_upload(proxy, url, kind,
                                                                 *WRITES[scheme(url)])


@pytest.mark.parametrize(("kind", "where"), [("reset", READS), ("truncate", READS),
                                             ("corrupt", READS), ("bare_404", READS),
                                             ("internal", LISTS), ("rubbish", LISTS)])
def test_a_restore_is_right_when_a_fault_meets_it(proxy: FaultyProxy, url: str, kind: str,
                                                  where: dict[str, str],
                                                  request: pytest.FixtureRequest) -> None:
    """Truncated, wrong or refused answers are asked for again. The newest checkpoint is restored.
    """
    needs_long(request, url)
    store_laws.a_restore_is_right_when_a_fault_meets_it(proxy, url, kind, where[scheme(url)],
                                                        times=1)


def needs_long(request: pytest.FixtureRequest, url: str) -> None:
    """azure-core waits 15 s before its second attempt, so Azure's faults are for --long."""
    if scheme(url) == "az" and not request.config.getoption("--long"):
        pytest.skip("azure-core waits 15 s before it tries again. Run it with: tests/run --long")


@pytest.mark.parametrize(("kind", "remedy"), [("forbidden", "Grant "), ("no_bucket", "Create ")])
def test_training_goes_on_when_the_store_stays_away(proxy: FaultyProxy, url: str, kind: str,
                                                    remedy: str) -> None:
    """Permission is lost, or the bucket is gone. The failure is logged with the remedy, and the
    next checkpoint stands when the store is back."""
    writers = begun(url, 2)
    method, contains = WRITES[scheme(url)]
    proxy.fault(kind, method=method, contains=contains, times=10**6)
    writers.checkpoint()
    failed, *_ = writers.events.facts("state.checkpoint_failed")
    assert remedy in failed["error"]
    proxy.clear()
    writers.publish()
    assert writers.published() == [4]


def test_the_start_is_refused_when_the_bucket_is_not_there(url: str) -> None:
    """No list of a bucket that is not there is empty, and the error names the command."""
    store = open_store(url.replace(BUCKET, "missing"))
    for act in (lambda: prove_put_if_absent(store), lambda: store.list("log"),
                lambda: store.get("log/x")):
        with pytest.raises(StoreRefused, match="Create the .* missing .*create"):
            act()


def test_the_start_is_refused_at_once_when_nothing_is_allowed(proxy: FaultyProxy, url: str) -> None:
    """A fault that no retry mends is not retried, and the error names the role."""
    fault = proxy.fault("forbidden", times=10**6)
    with pytest.raises(StoreRefused, match=r"roles/storage.objectUser|Blob Data Contributor"):
        prove_put_if_absent(open_store(url))
    assert fault.fired == 1


def test_a_wrong_key_is_refused(server: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is in no message."""
    if server[0] == "gs":
        pytest.skip("fake-gcs-server checks no credentials")
    key = "d3Jvbmc" + "g" * 80 + "="
    for name, value in azure_environment(server[1], key).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreRefused, match="Blob Data Contributor") as raised:
        prove_put_if_absent(open_store(f"az://{BUCKET}/x"))
    assert key not in str(raised.value)


def test_an_object_is_kept_when_what_is_listed_stays_away(proxy: FaultyProxy, url: str) -> None:
    """A balancer that answers 404 for good: that is unknown, not gone."""
    store = open_store(url)
    store.put("parts/x", b"x")
    proxy.fault("bare_404", method="GET", contains=READS[scheme(url)], times=10**6)
    with pytest.raises(StoreUnavailable, match=r"did not give .*(404|Not Found)") as raised:
        store.get("parts/x")
    assert not isinstance(raised.value, StoreRefused)


def test_the_first_coordinator_is_fenced_when_two_race(url: str) -> None:
    """Two fleets write to one store: one record of each number wins, and the earlier lineage stops
    for good."""
    logs = [CommitLog(open_store(url)) for _ in range(2)]
    begun_at, fenced, gate = list[int](), list[CommitLog](), threading.Barrier(2)

    def take_over(log: CommitLog) -> None:
        gate.wait()
        begun_at.append(log.begin_lineage().sequence)

    threads = [threading.Thread(target=take_over, args=(log,)) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(begun_at)) == 2
    for log in logs:
        try:
            log.append(lambda last: last)
        except Fenced:
            fenced.append(log)
    assert len(fenced) == 1


def test_the_command_line_reads_checkpoints(url: str, tmp_path: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    """ls, show, verify, prune and export, as with a folder."""
    store_laws.the_command_line_reads_checkpoints(url, tmp_path / "model.safetensors", capsys)


def test_the_doctor_proves_each_permission(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Write, read, list, conditional put and delete; nothing is left."""
    main(["doctor", "--store", url, "--json"])
    checks = {check["what"]: check["status"]
              for check in json.loads(capsys.readouterr().out)["checks"]}
    assert {name: status for name, status in checks.items() if name.startswith("store")} == {
        f"store: {what}": "ok" for what in ("write", "read", "list", "conditional put", "delete")}


def test_a_run_in_a_bucket_is_what_its_folder_has(url: str, tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    """report and verify of a log with a sealed segment. The log's folder may be named, too."""
    story, bucket = Story(), open_store(url)
    story.start(4)
    story.train(10)
    events = [dict(it) for it in story.finish()]
    write(tmp_path / "run", events)
    lines = (tmp_path / "run" / "events.jsonl").read_bytes().splitlines(keepends=True)
    bucket.put("diary/events-000001.jsonl.gz", gzip.compress(b"".join(lines[:20])))
    bucket.put("diary/events.jsonl", b"".join(lines[20:]))
    bucket.put("diary/below/events-000002.jsonl", b"of another run")
    assert main(["report", str(tmp_path / "run"), url, f"{url}/diary/", "--json"]) == 0
    local, far_away, again = json.loads(capsys.readouterr().out)
    assert local == far_away == again and local["steps"] > 9
    assert main(["verify", url]) == main(["verify", str(tmp_path / "run")]) == 0


def test_of_a_followed_run_in_a_bucket_what_is_new_is_fetched(
        proxy: FaultyProxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest segment grows, becomes another one, and is empty. One list is enough if nothing is
    new, and each object is asked for once."""
    monkeypatch.setattr(far, "POLL_S", 0.02)
    lines = [b'{"line": %d}\n' % number for number in range(1000)]
    bucket = open_store(url)
    bucket.put("events.jsonl", b"".join(lines[:500]))
    with far.opened(url) as run:
        reader, read = Reader(run.folder), list[bytes]()
        run.follow(tells=False)

        def has_read(those: list[bytes]) -> bool:
            read.extend(reader.lines())
            return read == those

        until(lambda: has_read(lines[:500]))
        asked = len(proxy.seen)
        bucket.put("events.jsonl", b"".join(lines))
        until(lambda: has_read(lines))
        parts = [headers.get("Range") or headers.get("x-ms-range")
                 for method, path, headers in proxy.seen[asked:] if "events.jsonl" in path]
        start = len(b"".join(lines[:500])) - far.OVERLAP_BYTES
        assert [it for it in parts if it and it.startswith(f"bytes={start}-")] == [
            it for it in parts if it]
        bucket.put("events-000001.jsonl", b"".join(lines))
        bucket.put("events.jsonl", b"")
        bucket.put("events.jsonl", b"new\n")
        until(lambda: has_read([*lines, b"new\n"]))
        fault = proxy.fault("forbidden", times=10**6)
        until(lambda: "did not list its objects" in run.trouble)
        fault.times = 0
        until(lambda: not run.trouble)


def test_a_run_that_cannot_be_read_is_an_error_with_the_remedy(
        proxy: FaultyProxy, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No such run, no bucket, no permission, an address without a bucket."""
    def said(address: str) -> str:
        assert main(["verify", address]) == 2
        return capsys.readouterr().err

    assert (f"{url} has no event log: neither events.jsonl nor diary/events.jsonl. Name the folder "
            f"of a fleet, {scheme(url)}://BUCKET/NAME" in said(url))
    kind = "bucket" if scheme(url) == "gs" else "container"
    assert f"Correct the {kind}'s name." in said(url.replace(BUCKET, "missing"))
    assert "has no bucket. Use" in said(f"{scheme(url)}://")
    fault = proxy.fault("forbidden", times=10**6)
    assert re.search(r"Grant roles/storage.objectViewer on the bucket bucket|"
                     r"Grant the role Storage Blob Data Reader on the container bucket", said(url))
    assert fault.fired == 1


def test_the_user_s_random_numbers_do_not_depend_on_the_network(proxy: FaultyProxy, url: str,
                                                                request: pytest.FixtureRequest
                                                                ) -> None:
    """An upload runs in a thread beside the user's code. The libraries draw from generators of
    their own for their retries and their connections."""
    needs_long(request, url)
    store = open_store(url)
    method, contains = WRITES[scheme(url)]
    before, fault = random.getstate(), proxy.fault("slow_down", method=method, contains=contains)
    store.put("parts/a", b"x")
    assert fault.fired == 1 and random.getstate() == before


def test_a_run_resumes_from_the_store_when_everyone_dies(proxy: FaultyProxy, url: str,
                                                         tmp_path: Path, twin_of: Twin) -> None:
    """Four workers write to the bucket. All of them and the driver are killed after a checkpoint,
    and the next attempt, in a folder without a past, ends with the twin's weights."""
    job = (*JOB, "--checkpoint-every", "10")
    with Cluster(tmp_path, job=job, options=["--store", url]) as cluster:
        cluster.wait_for("checkpoint", lambda: cluster.events("state.checkpoint_published"))
        cluster.kill_everyone()
        cluster.start()
        assert cluster.wait() == 0, cluster.story()
        result = cluster.assert_nothing_lost(twin_of(*job), victims=0)
        (restored,) = cluster.events("state.checkpoint_restored")
    assert restored["step"] >= 10 and result["attempts"] == 2


# ---- without a server ----


def test_a_missing_package_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is optional."""
    for package, name in (("gcsfs", "gs"), ("adlfs", "az")):
        for module in [m for m in sys.modules if m.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(StoreRefused, match=r"pip install 'elastic-trainer\["):
            open_store(f"{name}://bucket/x")


def test_missing_credentials_are_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch,
                                                          tmp_path: Path) -> None:
    """No file, no metadata service, no account's name."""
    for name in [name for name in os.environ if name.startswith(("AZURE_", "GOOGLE_", "STORAGE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    with pytest.raises(StoreRefused, match="gcloud auth application-default login"):
        open_store("gs://bucket/x")
    with pytest.raises(StoreRefused, match="AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://bucket/x")


@pytest.mark.parametrize("url", ["gs://", "gs:///x", "gs://bucket/x?Nonsense=1", "az://bucket/x#y"])
def test_refuses_a_url_when_it_names_no_bucket(url: str) -> None:
    """With the form that works."""
    with pytest.raises(StoreRefused, match="://bucket/prefix"):
        open_store(url)
