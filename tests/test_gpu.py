"""The proof for one GPU (tests/gpu), on CPUs: every part but the speeds, with small worlds, so that
it works when there is a GPU. The speeds' job runs with small models."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).resolve().parent / "gpu"
sys.path.insert(0, str(GPU))
from lab import Lab, OutOfTime  # noqa: E402
from parts import FAULTS, PROOFS, batchnorm, evaluation, memory  # noqa: E402
from run import prove, summary  # noqa: E402

RUN = [sys.executable, str(GPU / "run.py"), "--device", "cpu"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A proof on CPUs."""
    lab = Lab(tmp_path_factory.mktemp("gpu"), "cpu", 900.0, 5, is_tiny=True)
    try:
        yield lab
    finally:
        FAULTS.end()


# The part fp16 has BatchNorm and an evaluation, too.
PARTS = [*(part for part in PROOFS if part not in (batchnorm, evaluation)), memory]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_a_part_of_the_proof_passes_without_a_gpu(part: Any, lab: Lab) -> None:
    """In the order of the script; the faults happen to one run."""
    line = prove(part, lab)
    assert line["ok"] is True, line["error"]


def test_a_part_that_fails_does_not_stop_the_rest(lab: Lab) -> None:
    """Its line has the error, and the summary its name. The summary names what had no time, too."""
    def fails(_: Lab) -> dict[str, Any]:
        raise AssertionError("as planned")

    def late(_: Lab) -> dict[str, Any]:
        raise OutOfTime

    lines = [prove(part, lab) for part in (fails, late, lambda _: {"figure": 7})]
    assert lines[0]["error"] == "AssertionError: as planned" and lines[2]["figure"] == 7
    total = summary(lines, 0.0)
    assert (total["ok"], total["failed"], total["skipped"], total["passed"]) == (
        False, ["fails"], ["late"], 1)


def test_the_script_prints_one_json_line_for_each_part(tmp_path: Path) -> None:
    """Machine, parts, summary; the exit code tells whether all have passed."""
    out = tmp_path / "lines"
    done = subprocess.run([*RUN, "--only", "doctor", "--out", str(out)], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [json.loads(line)["part"] for line in done.stdout.splitlines()] == [
        "machine", "doctor", "summary"]
    assert out.read_text() == done.stdout


@pytest.mark.parametrize(("model", "arm"), [("gpt", "deterministic"), ("resnet", "exact")])
def test_a_measured_job_prints_the_time_of_a_step(model: str, arm: str) -> None:
    """With small models."""
    command = [sys.executable, GPU / "speed.py", "--device", "cpu", "--tiny", "--model", model,
               "--arms", arm, "--steps", "2", "--warm-up", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["model"], line["arm"]) == (model, arm) and line["step_ms"] > 0
