"""The same script without our driver: under plain horovodrun, and without a launcher.

Plain horovodrun keeps its own limits (docs/guide/fleets.md#plain-horovodrun). The worker keeps the
promise that it can keep alone: the same bits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cluster import JOB, TESTS
from faults import Plan

from elastic_trainer.events.log import read_events
from elastic_trainer.host.standbys import FOLDER_VARIABLE
from elastic_trainer.views.verify import verify

HOSTS = ("localhost", "127.0.0.1", "127.1", "127.0.1")
"""Four names of this machine that Horovod takes for four hosts, without ssh."""
FIFTH = "0x7f.1"
STEPS = ("--steps", "140", "--step-s", "0.5", "--checkpoint-every", "10")


@pytest.mark.usefixtures("turn")
def test_leaves_at_a_step_boundary_when_terminated_under_plain_horovodrun(
        tmp_path: Path, twin_of: Callable[..., str]) -> None:
    """SIGTERM is a wish to leave there, too: no step breaks, the others go on, and the bits are the
    same."""
    job = ("--steps", "80", "--step-s", "0.04")
    plan = Plan().add("terminate", host="127.1", at="step.prepared", step=12)
    env = os.environ | {"ELASTIC_TEST_PLAN": plan.to_json(), "ELASTIC_TEST_FOLDER": str(tmp_path),
                        "ELASTIC_TRAINER_RUN_DIR": str(tmp_path / "run")}
    done = subprocess.run([
        str(Path(sys.executable).parent / "horovodrun"), "-np", "3", "--min-np", "1",
        "--network-interfaces", "lo", "--host-discovery-script",
        "echo localhost:1; echo 127.0.0.1:1; echo 127.1:1", *JOB, *job
    ],
                          env=env,
                          cwd=tmp_path,
                          stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT,
                          text=True,
                          timeout=200)
    assert (tmp_path / "fired-0").exists(), done.stdout
    logged = read_events(tmp_path / "run")
    assert [e["worker"] for e in logged if e["event"] == "worker.left"] == ["127.1"], done.stdout
    assert not [e for e in logged if e["event"] == "worker.generation_broken"], done.stdout
    assert [
        e["size"] for e in logged if e["event"] == "worker.generation_started" and e["rank"] == 0
    ] == [3, 2]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["weights_sha256"] == twin_of(*job), done.stdout


@pytest.mark.usefixtures("turn")
def test_has_the_same_bits_when_a_worker_is_killed_under_plain_horovodrun(
        tmp_path: Path, twin_of: Callable[..., str]) -> None:
    """Stock `horovodrun --host-discovery-script`, a SIGKILL of one of four, another host with a
    standby: the same bits.

    Every worker's command stands behind the shim; the first four find no standby, and are what they
    are without it.
    """
    hosts, run = tmp_path / "hosts", tmp_path / "run"
    plan = Plan().kill(host="127.1", at="step.prepared", step=12)
    job = [*JOB, *STEPS]
    with tempfile.TemporaryDirectory(prefix="standby-") as sockets, ExitStack() as stack:
        env = os.environ | {
            "ELASTIC_TEST_PLAN": plan.to_json(), "ELASTIC_TEST_FOLDER": str(tmp_path),
            "ELASTIC_TRAINER_RUN_DIR": str(run), FOLDER_VARIABLE: sockets
        }

        def start(*command: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(command,
                                       env=env,
                                       stdout=log,
                                       stderr=subprocess.STDOUT,
                                       cwd=tmp_path)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        def wait_for(event: str, **facts: object) -> dict[str, Any]:
            while not (found := [
                    e
                    for e in read_events(run) if e["event"] == event and facts.items() <= e.items()
            ]):
                assert time.monotonic() < deadline and horovodrun.poll() is None, (event, output())
                time.sleep(0.1)
            return found[-1]

        def output() -> str:
            return (tmp_path / "output").read_text()

        def write_hosts(names: Sequence[str]) -> None:
            (tmp_path / "new").write_text("".join(f"{name}:1\n" for name in names))
            (tmp_path / "new").rename(hosts)

        deadline = time.monotonic() + 400
        log = stack.enter_context(open(tmp_path / "output", "w"))
        write_hosts(HOSTS)
        horovodrun = start(str(Path(sys.executable).parent / "horovodrun"), "-np", "4", "--min-np",
                           "2", "--network-interfaces", "lo", "--host-discovery-script",
                           f"{TESTS / 'print_hosts.sh'} {hosts}", sys.executable, "-m",
                           "elastic_trainer.driver.standby_shim", *job)
        wait_for("worker.step_committed")
        start(sys.executable, "-m", "elastic_trainer", "standby", "--run-dir", str(run), "--", *job)
        wait_for("worker.generation_started", size=3)
        wait_for("standby.booted")
        write_hosts([*HOSTS, FIFTH])
        wait_for("worker.stood_by", worker=FIFTH)
        wait_for("worker.generation_started", size=4, generation=3)
        (tmp_path / "hurry").touch()
        horovodrun.wait(deadline - time.monotonic())
    assert (tmp_path / "fired-0").exists(), output()
    result = json.loads((run / "result.json").read_text())
    assert result["weights_sha256"] == twin_of(*STEPS), output()
    assert output().count("weights " + result["weights_sha256"]) == 4, output()


@pytest.mark.usefixtures("turn")
@pytest.mark.parametrize("size", [4, 2])
def test_has_the_same_bits_when_a_bit_is_flipped_under_plain_horovodrun(
        tmp_path: Path, twin_of: Callable[..., str], size: int) -> None:
    """Of four the odd worker leaves, as if its host had died; of two both go back to a checkpoint,
    in their processes."""
    run, plan = tmp_path / "run", Plan().add("flip_weight",
                                             host="127.0.0.1",
                                             at="step.prepared",
                                             step=25)
    env = os.environ | {"ELASTIC_TEST_PLAN": plan.to_json(), "ELASTIC_TEST_FOLDER": str(tmp_path),
                        "ELASTIC_TRAINER_RUN_DIR": str(run)}
    (tmp_path / "hosts").write_text("".join(f"{name}:1\n" for name in HOSTS[:size]))
    job = [*JOB, "--steps", "40", "--checkpoint-every", "10"]
    done = subprocess.run([
        str(Path(sys.executable).parent / "horovodrun"), "-np",
        str(size), "--min-np", "2", "--network-interfaces", "lo", "--host-discovery-script",
        f"{TESTS / 'print_hosts.sh'} {tmp_path / 'hosts'}", *job
    ],
                          env=env,
                          cwd=tmp_path,
                          stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT,
                          text=True,
                          timeout=400)
    events = read_events(run)
    # Sorted: which host has rank 0 is random (new hosts come out of a set,
    # horovod/runner/elastic/discovery.py:242).
    differs = sorted(e["host"] for e in events if e["event"] == "worker.replica_differs")
    assert differs == (["127.0.0.1"] if size == 4 else sorted(HOSTS[:2])), done.stdout
    result = json.loads((run / "result.json").read_text())
    assert result["weights_sha256"] == twin_of("--steps", "40"), done.stdout
    verdict = verify(run)
    assert verdict.is_proved, verdict.sentences()
    assert verdict.attempts == (1 if size == 4 else 2)


@pytest.mark.usefixtures("turn")
def test_other_arithmetic_is_logged_under_plain_horovodrun(tmp_path: Path) -> None:
    """No worker can be refused there: rank 0 logs the hosts that compute other bits, once a
    generation."""
    run = tmp_path / "run"
    (tmp_path / "hosts").write_text("".join(f"{name}:1\n" for name in HOSTS[:2]))
    env = os.environ | {"ELASTIC_TEST_PLAN": "[]", "ELASTIC_TEST_FOLDER": str(tmp_path),
                        "ELASTIC_TRAINER_RUN_DIR": str(run)}
    done = subprocess.run([
        str(Path(sys.executable).parent / "horovodrun"), "-np", "2", "--network-interfaces", "lo",
        "--host-discovery-script", f"{TESTS / 'print_hosts.sh'} {tmp_path / 'hosts'}", *JOB,
        "--steps", "8", "--odd-host", "127.0.0.1"
    ],
                          env=env,
                          cwd=tmp_path,
                          stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT,
                          text=True,
                          timeout=400)
    logged = [e for e in read_events(run) if e["event"] == "worker.arithmetic_differs"]
    assert len(logged) == 1 and {logged[0]["host"], logged[0]["other_host"]} == set(
        HOSTS[:2]), done.stdout
    assert json.loads((run / "result.json").read_text())["finished"]
