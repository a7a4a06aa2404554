"""The bits of the demo: `./horovodrun_elastic.sh --steps 100 --workers 1` gives the same weights in
every version.

The hashes were made by version 0.1 (commit 77f97a4), once by that command and once by the example
alone: the two are equal, because the number of workers and the launcher are no inputs of the
arithmetic (tests/test_faults.py holds that). So the example alone, without a launcher, is enough
here.

The processor, the build of torch and the standard library's source (which the demo reads) decide
the bits, too. MADE_WITH names them. On another machine the test is skipped, with the difference as
the reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.examples import gpt
from elastic_trainer.training.determinism import probe_facts, probe_program

WEIGHTS = {10: "531626acd00f958cad3f3c54faf5a332a0a2e95eb994473f842b1e9dabd53e89",
           100: "f6f429de5bd0b6bf3c4600ff5b1715b8af07ca7ba03d3e36fda481b1c18d5c02"}
"""By the number of steps, for seed 0."""
MADE_WITH: dict[str, Any] = {
    "cpu": "Intel(R) Xeon(R) Processor", "instructions": "AVX512", "threads": "1",
    "torch": "2.13.0+cpu",
    "blas": "Intel(R) oneAPI Math Kernel Library Version 2024.2-Product, MKL-DNN v3.12.0, mkl",
    "program": 2093764805, "source": 3627583983}
"""probe.facts and probe_program of the machine that made the hashes, and the CRC-32 of the
source."""


def made_with() -> dict[str, Any]:
    """Return what decides the bits of the demo on this machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cpu = torch.device("cpu")
        return {**dict(probe_facts(cpu)), "program": probe_program(cpu),
                "source": zlib.crc32(gpt.standard_library())}
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("steps", WEIGHTS)
def test_the_demo_has_the_weights_of_version_0_1(steps: int, tmp_path: Path) -> None:
    """Bit for bit, for seed 0. The run of 100 steps takes 40 s of one core."""
    here = made_with()
    if differs := {name: (was, here.get(name)) for name, was in MADE_WITH.items()
                   if here.get(name) != was}:
        pytest.skip(f"the hash was made elsewhere: {differs}")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "ELASTIC_"))}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parent.parent), *sys.path])
    env["ELASTIC_TRAINER_RUN_DIR"] = str(tmp_path / "run")
    done = subprocess.run([sys.executable, "-m", "elastic_trainer.examples.gpt", "--steps",
                           str(steps)], env=env, cwd=tmp_path, capture_output=True,
                          text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert json.loads(
        (tmp_path / "run" / "result.json").read_text())["weights_sha256"] == WEIGHTS[steps]
