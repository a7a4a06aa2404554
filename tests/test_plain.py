"""The same script without our driver: plain horovodrun, and nobody at all.

Plain horovodrun keeps its own limits (README); what the worker can do from inside must hold: the same bits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cluster import JOB, TESTS
from faults import Plan

HOSTS = ("localhost", "127.0.0.1", "127.1", "127.0.1")
"""Four names of this machine that Horovod takes for four hosts, without ssh."""
FEW = ("--steps", "40")


def test_has_the_same_bits_when_a_worker_is_killed_under_plain_horovodrun(tmp_path: Path,
                                                                           twin_of: Callable[..., str]) -> None:
    """Stock `horovodrun --host-discovery-script`, a SIGKILL of one of four: survivors go on to the same weights."""
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{h}:1\n" for h in HOSTS))
    plan = Plan().kill(host="127.1", at="step.prepared", step=12)
    env = os.environ | {"ELASTIC_TEST_PLAN": plan.to_json(), "ELASTIC_TEST_FOLDER": str(tmp_path),
                        "ELASTIC_TRAINER_RUN_DIR": str(tmp_path / "run")}
    command = [str(Path(sys.executable).parent / "horovodrun"), "-np", "4", "--min-np", "2", "--network-interfaces", "lo",
               "--host-discovery-script", f"{TESTS / 'print_hosts.sh'} {hosts}", *JOB, *FEW]
    with open(tmp_path / "output", "w") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, cwd=tmp_path)
    deadline = time.monotonic() + 150
    try:
        process.wait(deadline - time.monotonic())
    finally:
        process.kill()
    said = (tmp_path / "output").read_text()
    assert (tmp_path / "fired-0").exists(), said
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["weights_sha256"] == twin_of(*FEW), said
    assert said.count("weights " + result["weights_sha256"]) == 3, said
