"""Real runs whose checkpoints go to a real S3 server, and workers that die at every point of a
checkpoint's life.

A proxy sees each request before it is forwarded: there it kills who sent it (a worker is known by
the host it runs on).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import s3_servers
from cluster import Cluster
from faulty_proxy import FaultyProxy, proxied

from elastic_trainer.host.processes import is_worker

Twin = Callable[..., str]
JOB = ("--steps", "60", "--part-bytes", "65536", "--step-s", "0.02")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Ceph's gateway if it can be had, else ministack."""
    for server in (s3_servers.ceph, s3_servers.ministack):
        try:
            with server(tmp_path_factory.mktemp("s3")) as endpoint:
                yield endpoint
                return
        except s3_servers.Unavailable as error:
            why = str(error)
    pytest.skip(why)


@pytest.fixture
def proxy(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy, to which AWS's variables point."""
    with proxied(endpoint, monkeypatch) as proxy:
        yield proxy


def store(tmp_path: Path) -> list[str]:
    return ["--store", f"s3://{s3_servers.BUCKET}/{tmp_path.name}-{os.getpid()}"]


@dataclass(frozen=True)
class Death:
    """Kills one worker, or all, at the n-th matching request after the death before; `then` is the
    fate of the request."""

    contains: str
    nth: int
    victim: str
    then: str | None


class Killer:
    """Kills at requests, one death after the other."""

    def __init__(self, cluster: Cluster, proxy: FaultyProxy, *deaths: Death):
        self.cluster, self.left = cluster, list(deaths)
        self.seen, self.lock = 0, threading.Lock()
        self.fired = {death: threading.Event() for death in deaths}
        proxy.on_request = self

    def __call__(self, method: str, path: str) -> str | None:
        with self.lock:
            if not self.left or method != "PUT" or self.left[0].contains not in path:
                return None
            self.seen += 1
            if self.seen != self.left[0].nth:
                return None
            death, self.seen = self.left.pop(0), 0
            if death.victim == "everyone":
                threading.Thread(target=self._everyone, args=(death,)).start()
            else:
                self._one(death)
        return death.then

    def _one(self, death: Death) -> None:
        formed = self.cluster.events("driver.generation_formed")[-1]["workers"]
        name = formed[0 if death.victim == "rank 0" else -1]
        pid = self.cluster.live_pids()[name]
        assert is_worker(pid, name, self.cluster.run_dir)
        os.kill(pid, signal.SIGKILL)
        self.fired[death].set()

    def _everyone(self, death: Death) -> None:
        self.cluster.kill_everyone()
        self.fired[death].set()


# The first record of a run is the attempt's takeover, so the third one is the second checkpoint's.
BEFORE_THE_RECORD = Death("/log/", 3, "rank 0", "drop")
WITH_THE_RECORD = Death("/log/", 2, "rank 0", "lose_answer")
BETWEEN_PARTS = Death("/parts/", 20, "last rank", None)
AS_ITS_PART_LANDS = Death("/parts/", 20, "rank 0", "lose_answer")


def test_training_goes_on_when_one_dies_in_a_checkpoint(proxy: FaultyProxy, tmp_path: Path,
                                                        twin_of: Twin) -> None:
    """No step is lost, and a later checkpoint is published by the worker that is rank 0 then: when
    a writer dies between its parts, or as a part lands, and when rank 0 dies before its record or
    with it."""
    job = ("--steps", "240", *JOB[2:-1], "0.5", "--checkpoint-every", "5")
    with Cluster(tmp_path, hosts=7, job=job, options=store(tmp_path)) as cluster:
        killer = Killer(cluster, proxy, BEFORE_THE_RECORD, BETWEEN_PARTS, WITH_THE_RECORD,
                        AS_ITS_PART_LANDS)
        assert killer.fired[AS_ITS_PART_LANDS].wait(300), cluster.story()
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*job), victims=4)
        assert cluster.events("state.checkpoint_published")[-1]["step"] == 240, cluster.story()
    assert result["attempts"] == 1
    assert result["steps_redone"] <= 4


def test_the_next_attempt_finds_the_newest_when_everyone_dies_in_a_checkpoint(
        proxy: FaultyProxy, tmp_path: Path, twin_of: Twin) -> None:
    """All workers and the driver are killed while the second record is put, which is not stored;
    then while a record is put, which is."""
    job = (*JOB, "--checkpoint-every", "10")
    deaths = [Death("/log/", 3, "everyone", "drop"), Death("/log/", 3, "everyone", "lose_answer")]
    with Cluster(tmp_path, job=job, options=store(tmp_path)) as cluster:
        killer = Killer(cluster, proxy, *deaths)
        for death in deaths:
            assert killer.fired[death].wait(120), cluster.story()
            cluster.start()
        assert cluster.wait() == 0
        result = cluster.assert_nothing_lost(twin_of(*job), victims=0)
        first, second = cluster.events("state.checkpoint_restored")
    assert first["step"] >= 10 and second["step"] >= first["step"] + 20
    assert result["attempts"] == 3


def test_training_goes_on_while_the_store_is_away(proxy: FaultyProxy, tmp_path: Path,
                                                  twin_of: Twin) -> None:
    """The failures are logged and the steps go on. When the store is back a checkpoint is
    published."""
    job = ("--steps", "120", "--part-bytes", "65536", "--step-s", "0.25", "--checkpoint-every", "5")
    with Cluster(tmp_path, job=job, options=store(tmp_path)) as cluster:
        cluster.wait_for("checkpoint", lambda: cluster.events("state.checkpoint_published"))
        fault = proxy.fault("forbidden", times=10**6)
        cluster.wait_for("failure", lambda: cluster.events("state.checkpoint_failed"))
        steps = len(cluster.events("worker.step_committed"))
        cluster.wait_for_step(steps + 5)
        proxy.clear()
        assert cluster.finish() == 0
        assert fault.fired
        cluster.assert_nothing_lost(twin_of(*job), victims=0)
        assert cluster.events("state.checkpoint_published")[-1]["step"] == 120, cluster.story()


def test_the_run_is_not_started_when_its_store_cannot_be_used(proxy: FaultyProxy,
                                                              tmp_path: Path) -> None:
    """The error comes at once, before any worker starts."""
    proxy.fault("no_bucket", times=10**6)
    with Cluster(tmp_path, job=JOB, options=store(tmp_path)) as cluster:
        assert cluster.wait() == 2
        assert "Create the bucket" in (tmp_path / "output.log").read_text()
        assert not cluster.events("driver.worker_started")


def test_an_attempt_stops_when_another_one_takes_its_store_over(proxy: FaultyProxy,
                                                                tmp_path: Path) -> None:
    """There is a second coordinator with an event log of its own. The fleet of the first one is
    fenced: it stops, and logs why."""
    job = ("--steps", "2000", *JOB[2:-1], "0.05", "--checkpoint-every", "5")
    with Cluster(tmp_path / "first", job=job, options=store(tmp_path)) as first:
        first.wait_for("checkpoint", lambda: first.events("state.checkpoint_published"))
        newest = first.events("state.checkpoint_published")[-1]["step"]
        with Cluster(tmp_path / "second", hosts=1, min_workers=1, job=job,
                     options=store(tmp_path)) as second:
            second.wait_for("restore", lambda: second.events("state.checkpoint_restored"))
            assert first.wait() == 70
            assert first.events("state.fenced"), first.story()
            assert second.events("state.checkpoint_restored")[0]["step"] >= newest
            second.wait_for("checkpoint", lambda: second.events("state.checkpoint_published"))
    assert first.events("attempt.ended")[-1]["verdict"] == "user_error"


def test_a_laptop_gets_an_s3_server_of_its_own(tmp_path: Path, twin_of: Twin) -> None:
    """`--store s3` starts it with the run, on loopback. The run resumes from it after all workers
    were killed."""
    job = (*JOB[:-1], "0.1", "--checkpoint-every", "10")
    with Cluster(tmp_path, job=job, options=["--store", "s3"]) as cluster:
        cluster.wait_for("checkpoint", lambda: cluster.events("state.checkpoint_published"))
        cluster.kill_everyone()
        cluster.start()
        assert cluster.finish() == 0
        cluster.assert_nothing_lost(twin_of(*job), victims=0)
        assert cluster.events("state.checkpoint_restored"), cluster.story()
    assert (tmp_path / "runs" / ".s3").is_dir()
