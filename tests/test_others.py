"""The files for other tools (deploy/others): each is what its tool accepts, by its own check.

AWS's check is botocore's model of the API. SkyPilot, dstack and ParallelCluster take 15 to 70 s and
160 to 460 MB each to install, into the cache folder: their checks are for --long.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml
from botocore.validate import validate_parameters
from ports import free_port
from test_docs import help_of
from waiting import wait_for

from elastic_trainer.commands.local_s3 import installed
from elastic_trainer.config import ConfigError
from elastic_trainer.discovery.client import ask

ROOT = Path(__file__).resolve().parent.parent
OTHERS = ROOT / "deploy" / "others"
SKYPILOT = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
print(task.num_nodes, *(one.use_spot for one in task.resources))
"""
DSTACK = """
import sys, yaml
from dstack._internal.core.models.configurations import parse_apply_configuration
task = parse_apply_configuration(yaml.safe_load(open(sys.argv[1])))
print(task.nodes or 1, task.spot_policy.value == "spot")
"""
PARALLELCLUSTER = """
import sys, yaml
from pcluster.schemas.cluster_schema import ClusterSchema
cluster = ClusterSchema(cluster_name="x").load(yaml.safe_load(open(sys.argv[1])))
print(cluster.scheduling.scheduler, *(one.capacity_type.value for one in cluster.scheduling.queues))
"""
TOOLS = {"skypilot": ("skypilot==0.14.1", SKYPILOT), "dstack": ("dstack==0.22.5", DSTACK),
         "parallelcluster": ("aws-parallelcluster==3.16.1", PARALLELCLUSTER)}
EXPECTED = {"skypilot-worker.yaml": "1 True", "skypilot-coordinator.yaml": "1 False",
            "dstack-worker.dstack.yml": "1 True", "dstack-coordinator.dstack.yml": "1 False",
            "parallelcluster.yaml": "slurm SPOT"}


def checked(file: Path) -> subprocess.CompletedProcess[str]:
    """Run a tool's own check on a file, in the tool's environment."""
    name = next(name for name in TOOLS if file.name.startswith(name))
    listed, script = TOOLS[name]
    try:
        python = f"{installed(listed)}/python"
    except ConfigError as error:
        pytest.skip(str(error))
    env = {"PATH": os.defpath, "HOME": str(file.parent), "AWS_DEFAULT_REGION": "eu-central-1",
           "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    return subprocess.run([python, "-W", "ignore", "-c", script, file], cwd=ROOT, env=env,
                          capture_output=True, text=True)


@pytest.mark.long
@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_is_what_its_tool_accepts(name: str, tmp_path: Path) -> None:
    """One node each, workers on spot machines. The same check refuses a misspelled key."""
    file = tmp_path / name
    file.write_text((OTHERS / name).read_text())
    done = checked(file)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, [EXPECTED[name]]), done.stderr
    odd = {"skypilot": ("use_spot:", "use_spott:"), "dstack": ("spot_policy:", "spot_polic:"),
           "parallelcluster": ("CapacityType:", "CapacityTyp:")}[name.partition("-")[0]
                                                                 .partition(".")[0]]
    text = file.read_text().replace(*odd)
    file.write_text(text if text != file.read_text() else text.replace("cpus:", "cpuss:"))
    assert checked(file).returncode != 0


@pytest.mark.parametrize(("name", "operation"), [
    ("batch-worker.json", "RegisterJobDefinition"),
    ("batch-coordinator.json", "RegisterJobDefinition"), ("batch-workers-job.json", "SubmitJob")])
def test_a_request_is_what_aws_batch_accepts(name: str, operation: str) -> None:
    """By botocore's model of the API: names, types, required fields, and no misspelled one."""
    shape = botocore.session.get_session().get_service_model("batch").operation_model(
        operation).input_shape
    given = json.loads((OTHERS / name).read_text())
    validate_parameters(given, shape)
    assert unknown(given, shape) == []
    assert unknown(given | {"jobNam": 1}, shape) == ["jobNam"]


def unknown(given: Any, shape: Any) -> list[str]:
    """Return the fields that the model does not have: validate_parameters ignores them."""
    if shape.type_name == "list":
        return [name for one in given for name in unknown(one, shape.member)]
    if shape.type_name != "structure":
        return []
    return [name for name, value in given.items() if name not in shape.members
            or unknown(value, shape.members[name])]


def test_every_file_is_checked_and_no_secret_is_in_one() -> None:
    """A key has no value in a file, and each worker is one job of one node."""
    files = {path.name for path in OTHERS.iterdir()}
    assert files == {*EXPECTED, "batch-worker.json", "batch-coordinator.json",
                     "batch-workers-job.json", "coordinator.sh", "worker.sh", "vm_worker.sh"}
    for path in OTHERS.glob("*.y*ml"):
        found = yaml.safe_load(path.read_text())
        secrets = found.get("secrets", {"AGENT_KEY": None} if "AGENT_KEY" in found.get("env", [])
                            else {})
        assert all(value is None for value in secrets.values())
        assert found.get("nodes", found.get("num_nodes", 1)) == 1
    for path in OTHERS.glob("batch-*.json"):
        assert not any(entry["name"] == "AGENT_KEY" for entry in json.loads(path.read_text()).get(
            "containerProperties", {}).get("environment", []))




def test_the_worker_s_script_serves_the_coordinator_until_it_is_stopped(tmp_path: Path) -> None:
    """Its agent answers with the key of the environment, which no command line has; the exit code
    after SIGTERM makes the tool start it again."""
    key = secrets.token_hex(32)
    env = {**os.environ, "AGENT_KEY": key, "HOME": str(tmp_path),
           "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    address = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    if not address:
        pytest.skip("this machine has no address but loopback's")
    port = free_port()
    with subprocess.Popen(
            [OTHERS / "worker.sh", "--port", str(port), "--no-metadata"], env=env, cwd=ROOT,
            stdout=subprocess.PIPE, text=True) as agent:
        try:
            health = wait_for("answer", lambda: ask(f"{address[0]}:{port}", key.encode(), 5.0))
            assert health.state == "ready"
            lines = Path(f"/proc/{agent.pid}/cmdline").read_text()
            assert "--starts-workers" in lines and key not in lines
            agent.send_signal(signal.SIGTERM)
            assert agent.wait(120) == 75
        finally:
            agent.kill()


def test_the_scripts_name_options_that_exist() -> None:
    """Of the poller, the agent, and the launcher."""
    for name, *commands in (("coordinator.sh", ("discovery", "poll", "ec2"), ("run",)),
                            ("worker.sh", ("discovery", "agent")),
                            ("vm_worker.sh", ("discovery", "agent"))):
        text = re.sub(r"\\\n\s*", " ", (OTHERS / name).read_text())
        for command in commands:
            words = f"-m elastic_trainer.{' '.join(command)} " if len(command) > 1 else (
                "elastic-trainer run ")
            (line,) = (line.partition(words)[2].partition(" -- ")[0]
                       for line in text.splitlines() if words in line and line[0] != "#")
            plain = re.sub(r"\$\([^)]*\)", "x", line.partition("python -S")[0])
            options = re.findall(r"(?<= )--?[a-z][\w-]*", f" {plain}")
            known = help_of(*(command if len(command) > 1 else ("elastic-trainer", "run")))
            assert options and set(options) <= known, name
