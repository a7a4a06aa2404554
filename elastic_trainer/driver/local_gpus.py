"""The GPUs of this machine: which one each local worker takes.

nvidia-smi, CUDA_VISIBLE_DEVICES, --share-gpu → here → run → driver → the worker's environment

What always holds:
1. Nothing here initializes CUDA: the driver's list is read by nvidia-smi, or from /proc.
2. If the user has set CUDA_VISIBLE_DEVICES, workers get GPUs of that list only; with an empty list
   they train on their CPUs.
3. One worker alone sees all GPUs: its model may be spread over them.
4. Hosts that the user names choose by local_rank(), and nothing is set there.

Source: NCCL, "Environment variables": NCCL_HOSTID, NCCL_P2P_DISABLE, NCCL_SHM_DISABLE. NCCL refuses
two ranks of one host on one GPU. With hosts of their own they send over sockets (measured on an
H100 with 2 and 4 workers).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastic_trainer.config import ConfigError
from elastic_trainer.setup.target import installed_torch

VARIABLE = "ELASTIC_TRAINER_LOCAL_GPUS"
"""Host → the variables of its worker, as JSON."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
NVIDIA_SMI_S = 20.0
SHARED = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo",
          "NCCL_IB_DISABLE": "1"}
"""What workers that share a GPU need, besides a NCCL_HOSTID each."""


def is_for_gpus() -> bool:
    """Return whether the installed torch is built for CUDA, without importing it."""
    torch = installed_torch()
    return torch is not None and torch.cuda is not None


def gpus_here(processes: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the numbers of this machine's GPUs, as CUDA_VISIBLE_DEVICES takes them."""
    if not shutil.which("nvidia-smi"):
        return [str(number) for number, _ in enumerate(processes.glob("*"))]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True,
                                timeout=NVIDIA_SMI_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return re.findall(r"^GPU (\d+):", listed, re.MULTILINE)


def visible_of(env: Mapping[str, str], here: Sequence[str]) -> list[str]:
    """Return the GPUs that workers may use: those of CUDA_VISIBLE_DEVICES, or all."""
    if VISIBLE not in env:
        return list(here)
    return [name.strip() for name in env[VISIBLE].split(",") if name.strip()] if here else []


def variables_of(hosts: Sequence[str], gpus: Sequence[str], shares: bool,
                 env: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the variables that give each local worker (one a host) its GPU. Raises ConfigError
    if there are too few. A variable that the user has set is left as it is."""
    if not gpus or len(hosts) < 2:
        return {}
    if len(hosts) <= len(gpus):
        return {host: {VISIBLE: gpu} for host, gpu in zip(hosts, gpus, strict=False)}
    if not shares:
        count = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}"
        least = f"--workers {len(gpus)}"
        raise ConfigError(
            f"{len(hosts)} local workers would share {count} ({', '.join(gpus)}), which NCCL "
            f"refuses. Use {least}, or --share-gpu for a test or a rehearsal, or "
            f"{VISIBLE}= (empty) to train on the CPUs.")
    ours = {name: value for name, value in SHARED.items() if name not in env}
    return {host: {VISIBLE: gpus[number % len(gpus)], "NCCL_HOSTID": host} | ours
            for number, host in enumerate(hosts)}


def place_of(env: Mapping[str, str], host: str) -> dict[str, str]:
    """Return the variables of the worker on a local host."""
    found: dict[str, str] = json.loads(env.get(VARIABLE) or "{}").get(host, {})
    return found
