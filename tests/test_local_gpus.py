"""Which GPU each local worker takes, with a fake nvidia-smi; and standbys that stay off the GPU."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_trainer.config import EXIT_LEFT, ConfigError
from elastic_trainer.driver.local_gpus import (
    SHARED,
    VARIABLE,
    VISIBLE,
    gpus_here,
    is_for_gpus,
    place_of,
    variables_of,
    visible_of,
)
from elastic_trainer.driver.standby_monitor import differing
from elastic_trainer.world.standby import DEVICE
from elastic_trainer.world.standby import VARIABLE as STANDBY

HOSTS = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
LISTED = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-8d4c0f2a)
  MIG 1g.10gb     Device  0: (UUID: MIG-7)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-9e5d1f3b)
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an nvidia-smi that lists two GPUs, the first on PATH."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTED}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return program


def test_the_gpus_are_counted_without_cuda(smi: Path, tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """By nvidia-smi; where there is none by the driver's folder; none if it fails."""
    assert gpus_here() == ["0", "1"]
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert gpus_here() == []
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpus_here(tmp_path / "none") == []
    for name in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    assert gpus_here(tmp_path / "gpus") == ["0", "1", "2"]


def test_each_local_worker_takes_one_gpu() -> None:
    """The first ones, in the order of the workers. One worker alone sees all of them."""
    assert variables_of(HOSTS, ["0", "1", "2", "3"], False, {}) == {
        "127.0.0.1": {VISIBLE: "0"}, "127.0.0.2": {VISIBLE: "1"}, "127.0.0.3": {VISIBLE: "2"}}
    assert variables_of(HOSTS[:1], ["0", "1"], False, {}) == {}
    assert variables_of(HOSTS, [], False, {}) == {}


def test_the_users_list_of_gpus_is_respected() -> None:
    """Workers take GPUs of that list only, by the user's names; an empty list means the CPUs."""
    assert visible_of({}, ["0", "1"]) == ["0", "1"]
    assert visible_of({VISIBLE: "3, GPU-9e5d1f3b"}, ["0", "1"]) == ["3", "GPU-9e5d1f3b"]
    assert visible_of({VISIBLE: ""}, ["0", "1"]) == []
    assert visible_of({VISIBLE: "0"}, []) == []
    assert variables_of(HOSTS[:2], ["3", "GPU-9e5d1f3b"], False, {})["127.0.0.2"] == {
        VISIBLE: "GPU-9e5d1f3b"}


def test_more_local_workers_than_gpus_are_refused_with_the_remedy() -> None:
    """All three ways are named."""
    with pytest.raises(ConfigError) as refused:
        variables_of(HOSTS, ["0", "1"], False, {})
    assert str(refused.value).startswith("3 local workers would share 2 GPUs (0, 1), which NCCL")
    for remedy in ("--workers 2,", "--share-gpu", f"{VISIBLE}= (empty)"):
        assert remedy in str(refused.value)


def test_workers_that_share_a_gpu_are_hosts_of_their_own_for_nccl() -> None:
    """With a name each, over sockets. What the user has set stays."""
    shared = variables_of(HOSTS, ["0", "1"], True, {"NCCL_SOCKET_IFNAME": "eth0"})
    assert [shared[host][VISIBLE] for host in HOSTS] == ["0", "1", "0"]
    assert [shared[host]["NCCL_HOSTID"] for host in HOSTS] == HOSTS
    assert all("NCCL_SOCKET_IFNAME" not in given for given in shared.values())
    assert SHARED.items() - {("NCCL_SOCKET_IFNAME", "lo")} <= shared[HOSTS[0]].items()
    assert variables_of(HOSTS[:2], ["0", "1"], True, {})["127.0.0.2"] == {VISIBLE: "1"}


def test_a_local_host_finds_its_variables_in_the_drivers_environment() -> None:
    """Other hosts have none."""
    env = {VARIABLE: '{"127.0.0.2": {"CUDA_VISIBLE_DEVICES": "1"}}'}
    assert place_of(env, "127.0.0.2") == {VISIBLE: "1"}
    assert place_of(env, "127.0.0.3") == place_of({}, "127.0.0.2") == {}


def test_the_build_of_torch_decides_whether_gpus_are_given() -> None:
    """It is read, not imported: the command line starts without torch."""
    import torch

    assert is_for_gpus() == (torch.version.cuda is not None)


def test_a_place_may_have_another_gpu_only_if_the_standby_stays_off_it() -> None:
    """CUDA reads the variable at its first use."""
    before = {VISIBLE: "0", DEVICE: "gpu"}
    now = {VISIBLE: "1", "NCCL_HOSTID": "127.0.0.2", DEVICE: "gpu"}
    assert differing(before, now, "python") == [VISIBLE, "NCCL_HOSTID"]
    assert differing(before | {DEVICE: "cpu"}, now | {DEVICE: "cpu"}, "python") == []


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_standby_that_stays_off_the_gpu_waits_at_the_first_use_of_one(device: str) -> None:
    """The monitor hears that it waits. (Without CUDA, a use that does not wait fails at once.)"""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    script = ("import torch\nfrom elastic_trainer.world.standby import stay_off_gpu\n"
              "stay_off_gpu()\ntorch.zeros(1, device='cuda')\n")
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", script], pass_fds=[theirs.fileno()], text=True,
                stderr=subprocess.PIPE,
                env=os.environ | {STANDBY: f"{theirs.fileno()},0,...", DEVICE: device})
        heard = ours.recv(64)
    _, errors = process.communicate(timeout=120)
    assert heard == (b"waiting" if device == "cpu" else b"")
    assert process.returncode == (EXIT_LEFT if device == "cpu" else 1), errors
