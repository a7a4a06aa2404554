"""What a change of structure must not change: the weights of fixed runs.

    python tests/unchanged.py CHECKOUT > after.json           about 4 minutes on 2 cores
    python tests/unchanged.py CHECKOUT --compare before.json

Each run is one command of the checkout with that checkout's environment, in a temporary folder. The
weights depend on the processor and on torch: compare files of one machine. Stored event logs and a
stored checkpoint have their own tests (tests/test_stored.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LAUNCHED = {
    "gpt-1": ["demo", "--steps", "100", "--workers", "1"],
    "gpt-4": ["demo", "--steps", "100", "--workers", "4"],
    "gpt-ring": ["demo", "--steps", "20", "--workers", "1", "--reduce", "ring"],
    "digits": ["demo", "--example", "digits", "--steps", "60", "--workers", "2"],
    "images": ["demo", "--example", "images", "--steps", "3", "--workers", "2"],
    "gan": ["demo", "--example", "gan", "--steps", "20", "--workers", "2"],
    "finetune": ["demo", "--example", "finetune", "--steps", "20", "--workers", "2"],
}
"""Arguments of `elastic-trainer run` by the name of the run."""

ALONE = {"transformers": "finetuning.py", "lightning": "lightning_fit.py"}
"""Jobs of tests/jobs that print their weights when no launcher runs them."""


def weights(checkout: Path, name: str, folder: Path) -> str:
    """Return the hash of the weights that a run ends with."""
    folder = folder / name  # the jobs that run alone resume what lies in their folder
    folder.mkdir()
    python = [checkout / ".venv" / "bin" / "python"]
    environment = {**os.environ, "PATH": f"{python[0].parent}:{os.environ['PATH']}"}
    if name in LAUNCHED:
        command = [*python, "-m", "elastic_trainer", "run", *LAUNCHED[name], "--run", name]
    else:
        command = [*python, checkout / "tests" / "jobs" / ALONE[name]]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{name}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    if name in LAUNCHED:
        return str(json.loads((folder / "runs" / name / "result.json").read_text())
                   ["weights_sha256"])
    return next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("weights "))


def main() -> int:
    """Run all, print their weights as JSON, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--compare", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {name: weights(options.checkout.resolve(), name, Path(folder))
                 for name in [*LAUNCHED, *ALONE]}
    assert found["gpt-1"] == found["gpt-4"], found
    print(json.dumps(found, indent=1))
    if options.compare is None:
        return 0
    before = json.loads(options.compare.read_text())
    differing = [name for name in before if found.get(name) != before[name]]
    print(f"different: {', '.join(differing) or 'none'}", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
