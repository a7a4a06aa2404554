"""`elastic-trainer doctor`: each check by values, and real faults on this machine and in a lab of
hosts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import s3_servers
from faulty_proxy import FaultyProxy
from netlab import COORDINATOR, Lab

from elastic_trainer.__main__ import main
from elastic_trainer.doctor import checks
from elastic_trainer.doctor.facts import Facts, StoreFacts, probe_store
from elastic_trainer.doctor.ports import Listener, reach

SOUND = Facts(
    host="a", python="3.11.7", executable="/venv/bin/python", torch="2.13.0+cpu",
    horovod="0.28.1", made_for="2.13.0+cpu", gloo=True, processor="EPYC",
    interfaces=("eth0=10.0.0.1",), address="10.0.0.1", folder="/data/runs",
    folder_free_bytes=10 << 30, shared_memory_bytes=8 << 30, open_files=65536, ssh="/usr/bin/ssh",
    store=StoreFacts(url="s3://bucket/prefix"))
GPU = {"torch": "2.13.0+cu130", "made_for": "2.13.0+cu130", "cuda": "13.0",
       "has_nvidia": True, "gpus": ("H100", "H100"), "nccl": True}


def bad(facts: Facts) -> list[tuple[str, str]]:
    """Return what is not sound; each has a remedy."""
    found = [check for check in checks.checks_of(facts) if check.status != checks.OK]
    assert all(check.remedy for check in found)
    return [(check.what, check.status) for check in found]


def test_a_sound_machine_passes_each_check() -> None:
    """With and without GPUs."""
    assert bad(SOUND) == [] and bad(replace(SOUND, **GPU)) == []


@pytest.mark.parametrize(("broken", "what", "status", "text"), [
    ({"python": "3.9.2"}, "Python", "failed", "python3.11"),
    ({"torch": "", "torch_error": "OSError('libcudart')"}, "torch", "failed", "pip install"),
    ({"horovod": ""}, "Horovod", "failed", "elastic-trainer setup"),
    ({"horovod": "0.27.0"}, "Horovod", "failed", "mends 0.28.1"),
    ({"made_for": "2.12.0"}, "Horovod", "failed", "built for torch 2.12.0, but torch 2.13.0+cpu"),
    ({"recipe": "6"}, "Horovod", "warning", "of build 6, but"),
    ({"horovod_error": "undefined symbol"}, "Horovod", "failed", "undefined symbol"),
    ({"gloo": False}, "collectives", "failed", "neither Gloo nor NCCL"),
    (GPU | {"nccl": False}, "collectives", "warning", "copied to the host and back"),
    (GPU | {"kernels": ("8.0",), "capabilities": ("7.5", "9.0")}, "GPU", "failed",
     "for GPUs of 8.0 do not run on the GPUs of 7.5 here"),
    ({"has_nvidia": True}, "GPU", "warning", "built for the CPU alone"),
    (GPU | {"gpus": ()}, "GPU", "failed", "nvidia-smi"),
    ({"interfaces": ()}, "interfaces", "warning", "only loopback"),
    ({"folder_error": "Permission denied: /data"}, "disk", "failed", "chmod u+rwx /data/runs"),
    ({"folder_error": "No space left on device: /data"}, "disk", "failed", "du -xh /data/runs"),
    ({"folder_free_bytes": 10 << 20}, "disk", "failed", "10 MiB free"),
    ({"folder_free_bytes": 500 << 20}, "disk", "warning", "500 MiB free"),
    ({"temporary_error": "Read-only file system: /tmp"}, "temporary files", "failed", "TMPDIR"),
    ({"shared_memory_bytes": 64 << 20}, "shared memory", "warning", "--shm-size"),
    ({"open_files": 256}, "open files", "failed", "ulimit -Hn"),
    ({"store": StoreFacts(url="s3://b/p", write="403")}, "store: write", "failed", "s3://b/p"),
    ({"store": StoreFacts(url="s3://b/p", read="403")}, "store: read", "failed", "--bucket b"),
    ({"store": StoreFacts(url="s3://b/p", list="403")}, "store: list", "failed", "ls s3://b/p"),
    ({"store": StoreFacts(url="s3://b/p", conditional="it does not honour")},
     "store: conditional put", "failed", "another endpoint"),
    ({"store": StoreFacts(url="s3://b/p", delete="403")}, "store: delete", "warning", "--bucket b"),
    ({"store": StoreFacts(url="/mnt/s", write="EROFS")}, "store: write", "failed", "chmod -R u+rw"),
])
def test_each_fault_is_found_alone_and_has_a_command_that_mends_it(
        broken: dict[str, Any], what: str, status: str, text: str) -> None:
    """No other check fails with it."""
    facts = replace(SOUND, **broken)
    assert bad(facts) == [(what, status)]
    (check,) = [check for check in checks.checks_of(facts) if check.status != checks.OK]
    assert text in f"{check.found} {check.remedy}"


def test_hosts_are_compared_with_the_coordinator() -> None:
    """Software must be the same; other processors are a warning; clocks have two limits."""
    others = {"a": SOUND, "b": replace(SOUND, torch="2.12.0", horovod=""),
              "c": replace(SOUND, processor="Xeon"), "d": SOUND}
    found = {check.host: check for check in checks.same(others, "a")}
    assert {host: check.status for host, check in found.items()} == {
        "b": "failed", "c": "warning", "d": "ok"}
    assert found["b"].found == ("torch 2.12.0 there, 2.13.0+cpu here; horovod none there, 0.28.1 "
                                "here")
    assert [checks.clock("b", offset).status for offset in (0.2, -3.0, 400.0, None)] == [
        "ok", "warning", "failed", "warning"]
    assert "timedatectl" in checks.clock("b", -900.0).remedy


def test_a_shared_folder_is_asked_for_only_without_a_store() -> None:
    """Without either, parts of a checkpoint would lie on several disks."""
    apart = replace(SOUND, sees_mark=False)
    found = checks.shared_folder("b", apart, has_store=False)
    assert found and found.status == "failed" and "--store s3://" in found.remedy
    assert checks.shared_folder("b", apart, has_store=True) is None
    shared = checks.shared_folder("b", replace(SOUND, sees_mark=True), has_store=False)
    assert shared and shared.status == "ok"


def test_an_ssh_that_fails_names_its_cause() -> None:
    """No connection, and a Python that is not there, have different remedies."""
    command = ["ssh", "-p", "22", "--", "b", "true"]
    assert checks.way("b", "ssh", 0, "", command).status == "ok"
    no_way = checks.way("b", "ssh", 255, "Permission denied (publickey).", command)
    assert (no_way.status, no_way.found, no_way.remedy) == (
        "failed", "Permission denied (publickey).", "ssh -p 22 -- b true")
    assert "same paths on b" in checks.way("b", "ssh", 127, "no such file", command).remedy


def test_facts_travel_as_json() -> None:
    """What comes out is what went in."""
    for facts in (SOUND, replace(SOUND, store=None, **GPU)):
        assert Facts.from_json(json.loads(json.dumps(asdict(facts)))) == facts


# --- real faults on this machine ------------------------------------------------------------------

def test_a_blocked_port_and_another_program_there_are_errors() -> None:
    """A listener answers with its own word and its clock."""
    listener = Listener()
    met = reach("127.0.0.1", listener.port, listener.word)
    assert met.error == "" and met.offset_s is not None and abs(met.offset_s) < 5
    assert reach("127.0.0.1", listener.port, "other").error == "another program answers there"
    listener.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    refused = checks.port("a", "b", "127.0.0.1", reach("127.0.0.1", port, "word").error)
    assert refused.status == "failed" and "Connection refused" in refused.found


def test_this_machine_is_sound_and_an_absent_host_is_found(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The absent host fails alone: with ssh's own words, and the command to try by hand."""
    host = "doctor-absent.invalid"
    assert main(["doctor", "--json", "--hosts", f"{host}:1,127.0.0.2:1", "--runs-dir",
                 str(tmp_path), "--store", str(tmp_path / "store")]) == 1
    shown = json.loads(capsys.readouterr().out)
    failed = [check for check in shown["checks"] if check["status"] == "failed"]
    assert [(check["host"], check["what"]) for check in failed] == [(host, "ssh")]
    assert not shown["healthy"] and host in failed[0]["found"]
    assert failed[0]["remedy"].startswith("ssh -o BatchMode=yes")
    mine = {check["what"] for check in shown["checks"] if check["host"] == socket.gethostname()}
    assert {"Python", "torch", "Horovod", "collectives", "GPU", "interfaces", "disk",
            "shared memory", "store: conditional put"} <= mine
    assert list((tmp_path / "store").rglob("doctor-*")) == [] and not list(tmp_path.glob(".doc*"))


def test_a_full_disk_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The store on it, too. It needs root, for a small disk."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small],
                             capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    try:
        with open(small / "full", "wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        assert main(["doctor", "--runs-dir", str(small), "--store", str(small / "s")]) == 1
    finally:
        subprocess.run(["umount", small], check=True)
    told = capsys.readouterr().out
    assert "disk: failed. No space left on device" in told and f"du -xh {small}" in told
    assert "store: write: failed" in told


def test_each_permission_of_a_bucket_that_is_missing_is_found(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real server behind a gate that refuses one kind of request. Nothing of the doctor's is
    left in the bucket."""
    try:
        with s3_servers.ministack(tmp_path) as endpoint, FaultyProxy(endpoint) as gate:
            for name, value in s3_servers.environment(gate.endpoint).items():
                monkeypatch.setenv(name, value)
            url = f"s3://{s3_servers.BUCKET}/run"
            assert probe_store(url) == StoreFacts(url=url)
            # The proof of put-if-absent deletes first, and may do without.
            for method, contains, what, times in (
                    ("PUT", "", "write", 1), ("GET", "probe/doctor", "read", 1),
                    ("GET", "list-type", "list", 1), ("POST", "", "delete", 2)):
                fault = gate.fault("forbidden", method=method, contains=contains, times=times)
                found = probe_store(url)
                assert fault.fired == times, what
                wrong = {name for name, text in asdict(found).items() if text and name != "url"}
                assert wrong == {what} and "AccessDenied" in getattr(found, what)
                gate.clear()
            left = s3_servers.client(endpoint).list_objects_v2(Bucket=s3_servers.BUCKET)
            assert [one["Key"] for one in left.get("Contents", []) if "doctor" in one["Key"]] == []
    except s3_servers.Unavailable as error:
        pytest.skip(str(error))


def test_a_fleet_is_examined_over_ssh_and_each_fault_is_named(lab: Lab, tmp_path: Path) -> None:
    """Two hosts do not reach each other, and one has a wrong clock: no other check fails."""
    lab.has_agents = False
    lab.boot(COORDINATOR, "h1")
    lab.clocks["h2"] = 400
    lab.boot("h2")
    lab.cut("h1", "h2")
    done = subprocess.run(
        [*lab.hosts[COORDINATOR].enter(), "env", f"PYTHONPATH={lab.python_path()}", sys.executable,
         "-m", "elastic_trainer", "doctor", "--json", "--hosts", "h1:1,h2:1", "--runs-dir",
         str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr
    shown = json.loads(done.stdout)
    failed = {(check["host"], check["what"]) for check in shown["checks"]
              if check["status"] == "failed"}
    assert failed == {("h1", "port of h2"), ("h2", "port of h1"), ("h2", "clock")}, shown
    passed = {(check["host"], check["what"]) for check in shown["checks"]
              if check["status"] == "ok"}
    assert {("h1", "ssh"), ("h2", "ssh"), ("h1", "clock"), ("h1", "Horovod"),
            ("h1", f"port of {COORDINATOR}"), ("h2", "shared runs")} <= passed
    assert done.returncode == 1
