"""Checkpoints over HTTP on real S3 servers, with a proxy that plays the network's and the servers'
faults."""

from __future__ import annotations

import datetime
import io
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import botocore.auth
import botocore.utils
import pytest
import s3_servers
import store_laws
import torch
from botocore.exceptions import ClientError
from botocore.response import StreamingBody
from faulty_proxy import STATUS, FaultyProxy, proxied
from safetensors.torch import load, load_file
from store_laws import make_another, steps_in
from test_checkpoint import Fleet, begun
from test_state import assert_one_wins

from elastic_trainer.state.checkpoints.checkpoint import PARTS, Plan
from elastic_trainer.state.checkpoints.commit_log import CommitLog, Fenced, Record
from elastic_trainer.state.stores import s3
from elastic_trainer.state.stores.by_url import open_store
from elastic_trainer.state.stores.s3 import S3Store
from elastic_trainer.state.stores.store import StoreRefused, StoreUnavailable, prove_put_if_absent

SERVERS = {"ceph": s3_servers.ceph, "ministack": s3_servers.ministack}
on_one_server = pytest.mark.parametrize("endpoint", ["ministack"], indirect=True)
"""For what a server has no part in: the proxy plays it, or it is ours alone. Ceph takes longer."""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Starts a real S3 server with a bucket, once; returns its endpoint."""
    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(
            SERVERS[name](tmp_path_factory.mktemp(name))))


@pytest.fixture(params=SERVERS)
def endpoint(request: pytest.FixtureRequest, started: Callable[[str], str]) -> str:
    try:
        return started(request.param)
    except s3_servers.Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def proxy(endpoint: str, monkeypatch: pytest.MonkeyPatch,
          request: pytest.FixtureRequest) -> Iterator[FaultyProxy]:
    """A proxy before it, to which AWS's variables point; time-outs are short where one is waited
    for."""
    if "timeout" in request.node.name:
        monkeypatch.setattr(s3, "READ_TIMEOUT_S", 1.0)
    with proxied(endpoint, monkeypatch) as proxy:
        yield proxy


@pytest.fixture
def url(proxy: FaultyProxy, request: pytest.FixtureRequest) -> str:
    """A place in the bucket for this test alone."""
    return f"s3://{s3_servers.BUCKET}/tests/{abs(hash(request.node.name))}-{time.monotonic_ns()}"


def test_any_world_restores_what_any_world_has_written(url: str) -> None:
    """Three write, two read, one reads."""
    store_laws.any_world_restores_what_any_world_has_written(url)


def test_reads_no_more_of_an_object_than_is_asked_for(proxy: FaultyProxy, url: str) -> None:
    """What stands at a record's name may be of any size. Nothing is asked for twice."""
    store, body = S3Store(url), bytes(range(256)) * 8000
    store.put("log/x", body)
    proxy.seen.clear()
    asked = (1, 1000, s3.PIECE_BYTES, len(body) - 1, len(body), len(body) + 1, None)
    for most in asked:
        assert store.get("log/x", most) == body[:most]
    assert len(proxy.seen) == len(asked)


def test_garbage_is_collected_when_a_console_has_made_folders(url: str) -> None:
    """Their markers are objects whose names end with a slash: no name of ours, and no reason to
    stop."""
    writers, store = Fleet(url), S3Store(url)
    writers.restore()
    for marker in ("parts/", "log/", "parts/000000000001-000000000004/"):
        key = f"{store.prefix}/{marker}"
        boto3.session.Session().client("s3").put_object(Bucket=store.bucket, Key=key, Body=b"")
    for _ in range(4):
        make_another(writers)
    assert not writers.events.facts("state.rubbish_kept")
    assert not writers.events.facts("state.checkpoint_failed")
    assert {int(name[19:31]) for name in store.list(PARTS) if name.endswith(".bin")} == {5, 6, 7}


def test_one_wins_when_many_put_the_same_name(url: str) -> None:
    """Put if absent: one of 16 racing creators, and its bytes are whole."""
    store = S3Store(url)
    assert_one_wins(store)
    prove_put_if_absent(store)


WRITING = [("ministack", kind, "PUT", where)
           for kind in ("reset", "timeout", "lose_answer", "slow_down", "internal")
           for where in ("/parts/", "/log/")]
"""The proxy plays the faults, so most of them need one server: Ceph takes six times as long."""
WRITING += [("ceph", "lose_answer", "PUT", "/log/"), ("ceph", "reset", "PUT", "/parts/")]
READING = [
    *((kind, "/parts/")
      for kind in ("reset", "timeout", "truncate", "corrupt", "slow_down", "internal", "bare_404")),
    *((kind, "/log/") for kind in ("truncate", "bare_404", "page_404")),
    *((kind, "list-type") for kind in ("slow", "internal", "rubbish", "reset", "bare_404"))
]


@pytest.mark.parametrize(("endpoint", "kind", "method", "where"), WRITING, indirect=["endpoint"])
def test_a_checkpoint_stands_when_a_fault_meets_its_upload(proxy: FaultyProxy, url: str, kind: str,
                                                           method: str, where: str) -> None:
    """Faults of the network are retried within bounds, and a lost answer is settled by the
    nonce."""
    store_laws.a_checkpoint_stands_when_a_fault_meets_its_upload(proxy, url, kind, method, where)


@pytest.mark.parametrize(("endpoint", "kind", "where"), [
    *(("ministack", *fault) for fault in READING), ("ceph", "truncate", "/parts/"),
    ("ceph", "bare_404", "/log/"), ("ceph", "internal", "list-type")], indirect=["endpoint"])
def test_a_restore_is_right_when_a_fault_meets_it(proxy: FaultyProxy, url: str, kind: str,
                                                  where: str) -> None:
    """Truncated, wrong or refused answers are requested again. The newest checkpoint is
    restored."""
    store_laws.a_restore_is_right_when_a_fault_meets_it(proxy, url, kind, where, times=2)


@on_one_server
@pytest.mark.parametrize("where", ["/parts/", "/log/"])
def test_a_checkpoint_is_kept_when_what_is_listed_stays_away(
        proxy: FaultyProxy, url: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load balancer answers 404 for good. That is unknown, not gone: the restore fails, and no
    checkpoint is passed over."""
    begun(url, 2).publish(2)
    monkeypatch.setattr(s3, "ATTEMPTS", 2)
    monkeypatch.setattr("elastic_trainer.state.checkpoints.restore.RESTORE_S", -1.0)
    proxy.fault("bare_404", method="GET", contains=where, times=10**6)
    (got,) = Fleet(url, steps=0).restore()
    assert isinstance(got, StoreUnavailable) and not isinstance(got, StoreRefused)
    assert "404" in str(got)
    proxy.clear()
    assert sorted(CommitLog(open_store(url)).tail().kept.values()) == [4, 5]
    assert Fleet(url, steps=0).restore() == [5]


@on_one_server
@pytest.mark.parametrize("kind", ["slow_down", "reset"])
def test_unreferenced_parts_go_when_a_fault_meets_their_deletion(proxy: FaultyProxy, url: str,
                                                                 kind: str) -> None:
    """A deletion is retried as any request is."""
    writers = begun(url, 2, Plan(part_bytes=100, keep_last=1))
    writers.checkpoint()
    fault = proxy.fault(kind, method="POST", contains="delete", times=2)
    make_another(writers)
    assert fault.fired == 2 and not writers.events.facts("state.rubbish_kept")
    assert steps_in(url) == {4}


@on_one_server
def test_each_part_is_read_once_when_many_restore(proxy: FaultyProxy, url: str) -> None:
    """The worker that has read a part hands it on to the others, so the store sends the state
    once."""
    begun(url, 2).checkpoint()
    parts = open_store(url).list(PARTS)
    proxy.seen.clear()
    assert Fleet(url, 3, steps=0).restore() == [3] * 3
    read = sorted(path.partition(f"/{PARTS}/")[2] for method, path, _ in proxy.seen
                  if method == "GET" and f"/{PARTS}/" in path)
    assert len(parts) > 3 and read == [name.removeprefix(f"{PARTS}/") for name in parts]


@on_one_server
@pytest.mark.parametrize("kind", ["forbidden", "no_bucket", "slow_down", "skewed"])
def test_training_goes_on_when_the_store_stays_away(proxy: FaultyProxy, url: str, kind: str,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """Permission is lost, the bucket is gone, or requests are throttled for good. The failure is
    logged with the reason, and the next checkpoint stands when the store is back."""
    writers = begun(url, 2)
    proxy.fault(kind, method="PUT", times=10**6)
    with monkeypatch.context() as patch:
        patch.setattr(s3, "ATTEMPTS", 3)
        writers.checkpoint()
    failed, *_ = writers.events.facts("state.checkpoint_failed")
    assert STATUS[kind][1] in failed["error"]
    proxy.clear()
    writers.publish()
    assert writers.published() == [4]


@pytest.mark.parametrize(("kind", "remedy"),
                         [("forbidden", "Allow s3:GetObject"), ("no_bucket", "Create the bucket"),
                          ("skewed", "clock")])  # the last one passes: no StoreRefused
def test_the_start_is_refused_at_once_when_the_store_cannot_be_used(proxy: FaultyProxy, url: str,
                                                                    kind: str, remedy: str) -> None:
    """The error has the remedy. A fault that no retry mends is not retried."""
    fault = proxy.fault(kind, times=10**6)
    with pytest.raises(StoreUnavailable, match=remedy) as raised:
        prove_put_if_absent(open_store(url))
    assert fault.fired == 1
    assert isinstance(raised.value, StoreRefused) == (kind != "skewed")


def test_an_endpoint_is_refused_when_it_ignores_the_condition(proxy: FaultyProxy, url: str) -> None:
    """As rclone's and s3rver's do; the proxy takes the condition off (a signature that is checked
    forbids that)."""
    proxy.fault("unconditional", method="PUT", times=10**6)
    with pytest.raises(StoreRefused, match=r"rclone|credentials"):
        prove_put_if_absent(open_store(url))


def test_settings_of_the_url_reach_the_server(proxy: FaultyProxy, url: str) -> None:
    """Storage class, ACL and encryption go along with each PUT, the conditional one too; anything
    else is refused. Whether this server can encrypt is its own business."""
    with pytest.raises(StoreRefused, match="ServerSideEncryption"):
        S3Store(url + "?Body=x")
    store = S3Store(url + "?ACL=private&StorageClass=STANDARD&ServerSideEncryption=AES256")
    for put, name in ((store.put, "parts/a"), (store.put_if_absent, "log/1.json")):
        with suppress(StoreRefused):
            put(name, b"x")
        headers = [headers for method, path, headers in proxy.seen if method == "PUT"][-1]
        assert headers["x-amz-acl"] == "private"
        assert headers["x-amz-storage-class"] == "STANDARD"
        assert headers["x-amz-server-side-encryption"] == "AES256"
        assert headers.get("If-None-Match") == ("*" if name.startswith("log") else None)


@on_one_server
def test_the_command_line_reads_checkpoints_over_http(url: str, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    """ls, show, verify, prune and export, as with a folder."""
    output = tmp_path / "model.safetensors"
    import s3fs  # here: each process of the tests imports this file

    s3fs.S3FileSystem.clear_instance_cache()  # its clients of earlier tests know other proxies
    store_laws.the_command_line_reads_checkpoints(
        url, output, capsys, f"{url}-exported/model.safetensors")  # s3fs writes this one
    # Not the bytes: safetensors writes the metadata in an order of chance.
    exported, copied = load_file(output), load(S3Store(f"{url}-exported").get("model.safetensors"))
    assert exported.keys() == copied.keys()
    assert all(torch.equal(copied[name], tensor) for name, tensor in exported.items())


def test_a_host_with_a_wrong_clock_gets_an_error_that_names_the_clock(
        proxy: FaultyProxy, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that checks signatures refuses them; nothing of ours depends on a clock."""
    off = datetime.timedelta(minutes=20)
    now = botocore.auth.get_current_datetime
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *a, **k: now(*a, **k) + off)
    with pytest.raises(StoreUnavailable, match="clock"):
        prove_put_if_absent(S3Store(url))


@on_one_server
def test_checkpoints_do_not_look_at_clocks(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A successor whose clock is a day behind takes over, publishes and is restored from."""
    begun(url, 2).checkpoint()
    clock = time.time
    monkeypatch.setattr("elastic_trainer.state.checkpoints.publish.time.time",
                        lambda: clock() - 86400)
    second = Fleet(url, steps=0)
    assert second.restore() == [3]
    second.publish()
    assert Fleet(url, steps=0).restore() == [4]


@on_one_server
def test_the_lineage_holds_in_a_storm_of_zombies(proxy: FaultyProxy, url: str,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Six incarnations take over at random while answers are lost, and delete old records; a number
    is acknowledged to one of them only, and what stands of the log is one lineage.
    """
    # So zombies find their numbers free again.
    monkeypatch.setattr("elastic_trainer.state.checkpoints.commit_log.RECENT", 1)
    chance, lock = random.Random(7), threading.Lock()
    acknowledged: dict[int, Record] = {}
    fenced, gaps, errors = 0, set[int](), list[BaseException]()
    proxy.on_request = lambda method, path: "lose_answer" if chance.random() < 0.15 else None
    deadline = time.monotonic() + 120.0

    def goes_on() -> bool:
        return (fenced < 5 or len(acknowledged) < 30) and time.monotonic() < deadline

    def incarnation(number: int) -> None:
        try:
            lives(number)
        except BaseException as error:  # else it would end its thread only
            errors.append(error)

    def lives(number: int) -> None:
        nonlocal fenced
        own = random.Random(number)
        while goes_on():
            log = CommitLog(open_store(url))
            try:
                step = log.begin_lineage().sequence * 1000
                while goes_on():
                    step += 1
                    record = log.append(lambda last: Record(last.sequence, "checkpoint", last.
                                                            lineage, step))  # noqa: B023
                    with lock:
                        assert acknowledged.setdefault(record.sequence,
                                                       record).nonce == record.nonce
                    gaps.update(log.compact(record))
                    threading.Event().wait(own.random() * own.choice([0.2, 0.2, 2.0]))
                    if own.random() < 0.1:
                        break
            except Fenced:
                with lock:
                    fenced += 1
            except StoreUnavailable:
                continue

    threads = [threading.Thread(target=incarnation, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    proxy.on_request = lambda method, path: None
    log = CommitLog(open_store(url))
    assert not errors
    assert fenced >= 5 and len(acknowledged) >= 30 and len(gaps) >= 20  # it was a storm
    assert log.newest() >= max(acknowledged)
    records = [acknowledged[sequence] for sequence in sorted(acknowledged)]
    for before, record in zip(records, records[1:], strict=False):
        same = (record.writer, record.lineage) == (before.writer, before.lineage)
        # A takeover lies between.
        assert same or (record.lineage > before.lineage and record.lineage > before.sequence)
    for sequence in {log.newest(), log.newest() - 1} & acknowledged.keys():
        assert log.read(sequence).nonce == acknowledged[sequence].nonce


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """A store at an endpoint where nothing answers."""
    for key, value in s3_servers.environment("http://127.0.0.1:1").items():
        monkeypatch.setenv(key, value)
    return S3Store("s3://bucket/prefix")


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a//b", "a/../../b", "", "."])
def test_refuses_a_name_when_it_leaves_the_prefix(nowhere: S3Store, name: str) -> None:
    """Before any request is made."""
    acts: tuple[Callable[[str], Any], ...] = (
        nowhere.get, lambda n: nowhere.put(n, b""), lambda n: nowhere.delete([n]))
    for act in acts:
        with pytest.raises(ValueError, match="no name"):
            act(name)


class Refusing:
    """S3's client, which refuses the first puts with these codes and statuses."""

    def __init__(self, *refusals: tuple[str, int]):
        self.left, self.puts = list(refusals), 0

    def put_object(self, **_: Any) -> None:
        self.puts += 1
        if self.left:
            code, status = self.left.pop(0)
            raise ClientError({"Error": {"Code": code, "Message": "It is so"},
                               "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")


@pytest.mark.parametrize(("code", "status", "is_refused", "puts"), [
    ("AccessDenied", 403, True, 1), ("NoSuchBucket", 403, True, 1),
    ("InvalidStorageClass", 400, True, 1), ("AccessControlListNotSupported", 400, True, 1),
    ("KMS.NotFoundException", 400, True, 1),
    # A clock is set and credentials are renewed while the run waits.
    ("ExpiredToken", 403, False, 1), ("RequestTimeTooSkewed", 403, False, 1),
    ("BadDigest", 400, False, 2), ("SlowDown", 503, False, 2)])
def test_what_no_retry_can_mend_is_refused_and_what_passes_is_not(
        nowhere: S3Store, monkeypatch: pytest.MonkeyPatch, code: str, status: int,
        is_refused: bool, puts: int) -> None:
    """With a remedy, or with the server's own error: no run starts, and rents machines, with a
    store that will never take a checkpoint."""
    monkeypatch.setattr(s3, "ATTEMPTS", 2)
    nowhere._client = client = Refusing(*[(code, status)] * 2)
    text = s3.REMEDIES[code][:20] if code in s3.REMEDIES else "It is so"
    with pytest.raises(StoreUnavailable, match=f"{code}. {text}") as raised:
        nowhere.put("parts/a", b"x")
    assert isinstance(raised.value, StoreRefused) == is_refused and client.puts == puts


def test_the_user_s_random_numbers_do_not_depend_on_the_network(nowhere: S3Store) -> None:
    """An upload runs in a thread beside the user's code. Its retries, and botocore's reading of a
    role's credentials, draw from generators of their own."""
    before = random.getstate()
    nowhere._client = client = Refusing(*[("SlowDown", 503)] * 2)
    nowhere.put("parts/a", b"x")
    role = botocore.utils.InstanceMetadataFetcher()
    role._evaluate_expiration({"expiry_time": "2026-01-01T00:00:00Z"})
    assert client.puts == 3 and random.getstate() == before


@pytest.mark.usefixtures("nowhere")
def test_refuses_a_bucket_s_name_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once."""
    monkeypatch.setattr(time, "sleep", lambda s: pytest.fail("it was tried again"))
    with pytest.raises(StoreRefused, match="--store"):
        S3Store("s3://not_a+bucket/x").put("parts/a", b"x")


@pytest.mark.parametrize(("sent", "is_whole"), [(b"0123456789", True), (b"012345678", False),
                                                (b"0123456789a", False)])
@pytest.mark.parametrize("says_its_length", [True, False])
def test_an_object_is_read_into_memory_of_its_length_only(
        nowhere: S3Store, monkeypatch: pytest.MonkeyPatch, sent: bytes, is_whole: bool,
        says_its_length: bool) -> None:
    """This holds for a gateway that sends it in chunks without its length, too."""
    store, out = nowhere, bytearray(10)
    monkeypatch.setattr(s3, "PIECE_BYTES", 4)
    monkeypatch.setattr(store, "_answer", lambda name: {
        "Body": StreamingBody(io.BytesIO(sent), len(sent) if says_its_length else None)})
    assert store.get_into("parts/a", memoryview(out)) == is_whole
    assert out == sent or not is_whole


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "gcs://bucket/x", "s3://bucket/x?Nonsense=1"])
def test_refuses_a_url_when_it_names_no_store(url: str) -> None:
    """With the form that works."""
    with pytest.raises(StoreRefused, match="s3://bucket/prefix"):
        open_store(url)
