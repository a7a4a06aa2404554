"""Horovod's own style under our launcher: each row of the table in docs/migrate-from-horovod.md,
with real kills.

The script is tests/jobs/horovod_style.py. It is an ordinary one: hvd.init(), DistributedOptimizer,
ElasticSampler, @hvd.elastic.run, state.commit(). It notes each batch behind its commit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cluster import TESTS, Cluster
from faults import Plan

from elastic_trainer.config import EXIT_USER_ERROR
from elastic_trainer.views.verify import verify

SCRIPT = [sys.executable, str(TESTS / "jobs" / "horovod_style.py")]
SAMPLES = 403


def notes(cluster: Cluster, kind: str) -> list[dict[str, Any]]:
    """Return what the scripts of all workers have noted."""
    path = cluster.folder / "notes.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [note for line in lines if (note := json.loads(line))["kind"] == kind]


def commits(cluster: Cluster) -> int:
    """Return how many commits rank 0 has logged."""
    return max((e["step"] + 1 for e in cluster.events("worker.commit_kept")), default=0)


def wait_for_commit(cluster: Cluster, number: int) -> None:
    cluster.wait_for(f"commit {number}", lambda: commits(cluster) >= number)


def assert_equal_weights(cluster: Cluster, workers: int) -> str:
    """Assert that so many workers have finished, all with the same bits in the weights."""
    finished = notes(cluster, "finished")
    assert len(finished) == workers, cluster.story()
    assert len({one["weights"] for one in finished}) == 1, finished
    assert [one["local_rank"] for one in finished] == [0] * workers
    return str(finished[0]["weights"])


def seen(cluster: Cluster, epoch: int) -> Counter[int]:
    """Return how often each sample was in a batch whose commit has passed, in one epoch."""
    return Counter(index for note in notes(cluster, "batch") if note["epoch"] == epoch
                   for index in note["indices"])


def assert_none_lost(cluster: Cluster, epochs: int) -> int:
    """Assert that no sample was lost; returns how often one came again.

    A segment of an epoch ends with the world. Horovod's sampler pads each with samples that it
    repeats.
    """
    again = 0
    for epoch in range(epochs):
        counts = seen(cluster, epoch)
        assert sorted(counts) == list(
            range(SAMPLES)), f"lost in epoch {epoch}: {set(range(SAMPLES)) - set(counts)}"
        again += sum(counts.values()) - SAMPLES
    return again


def test_a_death_and_a_newcomer(tmp_path: Path) -> None:
    """No second victim. The survivors go back to the last commit: one batch. A newcomer gets all of
    the state, with the rate that the callbacks have set. The replicas are equal, but their bits are
    not those of an undisturbed run."""
    plan = Plan().kill(host="127.0.0.3", at="batch", batch=9)
    slow = ("--epochs", "2", "--batch-s", "0.15")
    with Cluster(tmp_path / "faults", hosts=5, start_with=4, command=[*SCRIPT, *slow],
                 plan=plan) as cluster:
        cluster.wait_until_fired()
        after = cluster.wait_for_world(3)
        cluster.set_hosts(["127.0.0.1", "127.0.0.2", "127.0.0.4", "127.0.0.5"])
        cluster.wait_for_world(4, after)
        assert cluster.finish() == 0, cluster.story()
        weights = assert_equal_weights(cluster, 4)
        assert len(cluster.lost()) == 1, cluster.story()
        assert not cluster.malformed()
        assert {note["result"] for note in notes(cluster, "finished")} == {"trained"}
        assert cluster.events("worker.step_redone")[0]["step"] == 8, cluster.story()
        went_on = [note for note in notes(cluster, "entered") if note["size"] == 3]
        assert {(note["batch"], note["processed"]) for note in went_on} == {(8, 8 * 8 * 4)}
        [joined
         ] = [note for note in notes(cluster, "entered") if note["me"].startswith("127.0.0.5/")]
        assert joined["batch"] > 8 and joined["processed"] > 0 and joined["lr"] == 1e-3 * 4
        assert 0 < assert_none_lost(cluster, 2) < 4 * 4  # at most size - 1 for each of 4 segments
        assert cluster.events("run.finished") and cluster.events("state.checkpoint_published")
        assert "Horovod's own style" in verify(cluster.run_dir).sentences()[0]
    with Cluster(tmp_path / "twin", hosts=4, command=[*SCRIPT, "--epochs", "2"]) as cluster:
        assert cluster.finish() == 0, cluster.story()
        assert assert_equal_weights(cluster, 4) != weights


def test_a_drained_host_and_the_death_of_all(tmp_path: Path) -> None:
    """A host that leaves the list costs nothing. After the death of all workers the run goes on by
    itself, from the last checkpoint, with model, optimizer, sampler and the named values."""
    slow = ("--epochs", "2", "--batch-s", "0.15", "--checkpoint-every", "5")
    with Cluster(tmp_path, hosts=4, command=[*SCRIPT, *slow]) as cluster:
        wait_for_commit(cluster, 3)
        cluster.set_hosts(["127.0.0.1", "127.0.0.2", "127.0.0.3"])
        generation = cluster.wait_for_world(3)
        [left] = cluster.wait_for("a leave", lambda: cluster.events("worker.left"))
        assert left["worker"].startswith("127.0.0.4/") and not cluster.lost()
        assert not cluster.events("worker.step_redone")
        entered = [note for note in notes(cluster, "entered") if note["size"] == 3]
        last = max(note["batch"] for note in notes(cluster, "batch") if note["size"] == 4)
        assert generation == 2 and {note["batch"] for note in entered} <= {last, last + 1}
        published = cluster.wait_for("a checkpoint",
                                     lambda: cluster.events("state.checkpoint_published"))
        cluster.signal_workers(["127.0.0.1", "127.0.0.2", "127.0.0.3"], signal.SIGKILL)
        cluster.set_hosts(cluster.all_hosts)  # else the driver waits a minute for the fourth
        [restored] = cluster.wait_for("a restore",
                                      lambda: cluster.events("state.checkpoint_restored"))
        assert cluster.finish() == 0, cluster.story()
        assert_equal_weights(cluster, 4)
        assert restored["step"] >= published[0]["step"]
        resumed = [note for note in notes(cluster, "entered")][-4:]
        assert {note["batch"] for note in resumed} == {restored["step"]}
        assert all(note["processed"] > 0 for note in resumed)
        # The callbacks have run: the checkpoint may be of another world.
        reset = {note["me"] for note in notes(cluster, "reset")}
        assert {note["lr"] for note in resumed} == {1e-3 * 4}
        assert {note["me"] for note in resumed} <= reset
        assert_none_lost(cluster, 2)


def test_a_change_loses_nothing_without_a_commit(tmp_path: Path) -> None:
    """check_host_updates() commits when the world changes. A newcomer is waited for while its
    script builds the model."""
    slow = ("--epochs", "1", "--batch-s", "0.3", "--no-commit", "--hold-on", "127.0.0.4")
    with Cluster(tmp_path, hosts=4, start_with=3, command=[*SCRIPT, *slow]) as cluster:
        cluster.wait_for_world(3)
        cluster.set_hosts(cluster.all_hosts)
        cluster.wait_for("a newcomer", lambda: notes(cluster, "building"))
        kept = commits(cluster)
        # The others wait.
        assert kept == 1 and len(cluster.events("worker.generation_started")) == 1
        (tmp_path / "released").touch()
        cluster.wait_for_world(4)
        assert cluster.finish() == 0, cluster.story()
        assert_equal_weights(cluster, 4)
        entered = [note for note in notes(cluster, "entered") if note["size"] == 4]
        assert len({note["batch"] for note in entered}) == 1 and entered[0]["batch"] > 0
        assert entered[0]["processed"] == entered[0]["batch"] * 8 * 3
        assert not cluster.events("worker.step_redone")


def test_the_users_exception_ends_the_run_at_once(tmp_path: Path) -> None:
    """On all workers, with its traceback and exit code 70, and without a second try."""
    with Cluster(tmp_path, hosts=4, command=[*SCRIPT, "--raise-on", "127.0.0.2"]) as cluster:
        assert cluster.wait() == EXIT_USER_ERROR, cluster.story()
        assert "in the function, as planned" in (tmp_path / "output.log").read_text()
        assert len(cluster.events("attempt.started")) == 1
        assert cluster.events("worker.failed") and not notes(cluster, "finished")


@pytest.mark.usefixtures("turn")
def test_the_same_script_is_horovods_own_under_plain_horovodrun(tmp_path: Path) -> None:
    """Its commits, its sampler and its loop."""
    env = os.environ | {"ELASTIC_TEST_PLAN": "[]", "ELASTIC_TEST_FOLDER": str(tmp_path)}
    horovodrun = [str(Path(sys.executable).parent / "horovodrun"), "-np", "2", "--min-np", "2",
                  "--network-interfaces", "lo", "--host-discovery-script",
                  "echo localhost:1; echo 127.0.0.1:1"]
    done = subprocess.run([*horovodrun, *SCRIPT, "--stock", "--epochs", "1"], env=env, cwd=tmp_path,
                          capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    finished = [note for note in told if note["kind"] == "finished"]
    assert [(note["result"], note["size"]) for note in finished] == [("trained", 2)] * 2


EXAMPLES = [sys.executable, str(TESTS / "jobs" / "horovod_examples.py")]


def test_horovods_imagenet_pattern(tmp_path: Path) -> None:
    """Rare commits, batches in parts, a rate for each batch, metrics by allreduce, two samplers. A
    death costs what was done since the last commit; a standby joins; a worker that gets SIGTERM
    leaves at the next check."""
    plan = Plan().kill(host="127.0.0.3", at="batch", epoch=0, batch=6)
    with Cluster(tmp_path, hosts=5, start_with=4, plan=plan, options=("--standby", "1"),
                 command=[*EXAMPLES, "imagenet", "--batch-s", "0.2"]) as cluster:
        cluster.wait_until_fired()
        after = cluster.wait_for_world(3)
        cluster.set_hosts(["127.0.0.1", "127.0.0.2", "127.0.0.4"])
        cluster.wait_for("a standby", lambda: cluster.events("standby.booted"))
        cluster.set_hosts(["127.0.0.1", "127.0.0.2", "127.0.0.4", "127.0.0.5"])
        cluster.wait_for_world(4, after)
        [stood_by] = cluster.events("worker.stood_by")
        assert stood_by["worker"].startswith("127.0.0.5/")
        cluster.signal_worker("127.0.0.2", signal.SIGTERM)
        cluster.wait_for("a leave", lambda: cluster.events("worker.left"))
        cluster.set_hosts(["127.0.0.1", "127.0.0.4", "127.0.0.5"])
        assert cluster.finish() == 0, cluster.story()
        went_back = [note for note in notes(cluster, "entered") if note["size"] == 3][:3]
        assert {note["batch"] for note in went_back} == {4}  # the commit after that of batch 0
        finished = notes(cluster, "finished")
        assert len(finished) >= 3 and len({note["weights"] for note in finished}) == 1
        assert len({note["best"] for note in finished}) == 1, finished
        by_epoch = {(note["epoch"], note["size"]): note["loss"] for note in notes(cluster, "epoch")}
        assert by_epoch and all(note["loss"] == by_epoch[note["epoch"], note["size"]]
                                for note in notes(cluster, "epoch"))
        assert len(cluster.lost()) == 1 and not cluster.malformed(), cluster.story()


def test_the_methods_of_a_state_are_called_where_horovod_calls_them(tmp_path: Path) -> None:
    """Also those that a subclass overrides. Two models with an optimizer each, a scheduler and a
    list go through a death and a newcomer."""
    plan = Plan().kill(host="127.0.0.2", at="batch", batch=5)
    with Cluster(tmp_path, hosts=5, start_with=4, plan=plan,
                 command=[*EXAMPLES, "pair", "--batch-s", "0.2"]) as cluster:
        cluster.wait_until_fired()
        after = cluster.wait_for_world(3)
        cluster.set_hosts(["127.0.0.1", "127.0.0.3", "127.0.0.4", "127.0.0.5"])
        cluster.wait_for_world(4, after)
        assert cluster.finish() == 0, cluster.story()
        assert_equal_weights(cluster, 4)
        assert {note["noted"] for note in notes(cluster, "finished")} == {30}
        called: dict[str, list[str]] = {note["me"]: [] for note in notes(cluster, "finished")}
        for note in map(json.loads, (tmp_path / "notes.jsonl").read_text().splitlines()):
            kinds = called.get(note["me"], [])
            if (note["kind"], kinds[-1:]) != ("save", ["save"]):  # one for each commit
                kinds.append(note["kind"])
        begin, end = ["sync", "entered", "save"], ["sync", "save", "finished"]
        newcomer = next(me for me in called if me.startswith("127.0.0.5/"))
        assert called.pop(newcomer) == [*begin, *end], cluster.story()
        reset = ["reset", "callback"]
        for kinds in called.values():
            assert kinds == [*begin, "restore", *reset, *begin, "hosts_updated", *reset, *begin,
                             *end], cluster.story()
        entered = [note for note in notes(cluster, "entered") if note["size"] == 3]
        facts = {(note["iter"], note["noted"], note["label"], note["rate"]) for note in entered}
        assert facts == {(4, 4, "given", 0.01 * 3)}
        assert len(cluster.lost()) == 1 and not cluster.malformed(), cluster.story()


def test_hvd_init_above_the_import_ends_the_run_at_once(tmp_path: Path) -> None:
    """The driver has no place for such a worker. Nothing is tried again."""
    with Cluster(tmp_path, hosts=2, command=[*SCRIPT, "--late-import"]) as cluster:
        assert cluster.wait() == EXIT_USER_ERROR, cluster.story()
        assert len(cluster.events("attempt.started")) == 1, cluster.story()


def test_a_collective_that_horovod_refuses_ends_the_run_at_once(tmp_path: Path) -> None:
    """Horovod's own loop takes it for a lost worker, and resets for ever."""
    command = [*EXAMPLES, "mistake", "--mistake", "shapes"]
    with Cluster(tmp_path, hosts=2, command=command) as cluster:
        assert cluster.wait() == EXIT_USER_ERROR, cluster.story()
        assert "Mismatched ALLREDUCE tensor shapes" in (tmp_path / "output.log").read_text()
        assert len(cluster.events("attempt.started")) == 1
        assert len(cluster.events("worker.generation_started")) == 1
