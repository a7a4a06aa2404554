"""Whether this machine's image can train on GPUs: its driver, torch's CUDA, and Horovod's NCCL.

    python -m elastic_trainer.doctor image 8       the GPUs of each worker machine

modinfo, facts.py → here → a line for each fault, exit code 1 (deploy/hosts/coordinator.sh)

A fleet's coordinator has the workers' image, and no GPU. So it asks for the driver's files, and the
fault is found before a machine with GPUs is rented. CUDA's toolkit is checked by the set-up, which
builds Horovod on the coordinator (setup/).

Source of the versions: NVIDIA, "CUDA Compatibility", minimum driver of each major version.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from elastic_trainer.doctor.facts import Facts, Wanted, probe

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA's major version → the major version of the oldest driver that runs it."""
LIBRARIES = ("/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")
MODINFO_S = 30.0
THEN = "in the run's .tfvars file, then apply -replace=aws_instance.coordinator"


def faults(facts: Facts, driver: str, gpus: int) -> Iterator[str]:
    """Yield why workers with GPUs could not train, each with the remedy. `driver`: "" for none."""
    have = f"The worker machines have {gpus} GPUs"
    if not facts.cuda:
        yield (f"{have}, and torch {facts.torch or '(none)'} is built for CPUs. Set torch_spec to "
               f"a torch for CUDA, e.g. torch==2.13.0, {THEN}.")
    elif not facts.nccl:
        why = facts.horovod_error or "its build had no NCCL"
        yield (f"{have}, and Horovod has no NCCL ({why}). Remove the folder wheels/ of the run in "
               f"the bucket, then apply -replace=aws_instance.coordinator; the log of the set-up "
               f"is above.")
    if not driver:
        yield (f"{have}, and this image has no NVIDIA driver (modinfo nvidia). Set image_id to a "
               f"Deep Learning Base image of Amazon Linux 2023 {THEN}.")
    elif facts.cuda and (oldest := OLDEST_DRIVER.get(_major(facts.cuda), 0)) > _major(driver):
        yield (f"This image has NVIDIA's driver {driver}, and torch {facts.torch} is built for "
               f"CUDA {facts.cuda}, which needs {oldest} or newer. Set image_id to a newer image, "
               f"or torch_spec to a torch for an older CUDA, {THEN}.")


def driver_version(libraries: Iterable[str] = LIBRARIES) -> str:
    """Return the version of NVIDIA's driver that is installed here; "" for none.

    The kernel module need not be loaded, which it is not on a machine without a GPU.
    """
    if modinfo := shutil.which("modinfo", path="/usr/sbin:/sbin:/usr/bin:/bin"):
        asked = subprocess.run([modinfo, "--field", "version", "nvidia"], capture_output=True,
                               text=True, timeout=MODINFO_S)
        if asked.returncode == 0 and asked.stdout.strip():
            return asked.stdout.split()[0]
    found = (re.fullmatch(r"libcuda\.so\.(\d{3,}\.[\d.]+)", path.name)
             for folder in libraries for path in sorted(Path(folder).glob("libcuda.so.*")))
    return next((match[1] for match in found if match), "")


def _major(version: str) -> int:
    return int(version.split(".")[0])


def check(gpus: int) -> int:
    """Print the faults of this machine's image; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        found = list(faults(probe(Wanted(folder=folder)), driver_version(), gpus))
    for fault in found:
        print(f"image: {fault}", flush=True)
    return 1 if found else 0
