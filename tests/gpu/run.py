"""Prove on one GPU what the tests prove on CPUs, and measure it; no network is needed.

    python tests/gpu/run.py [--minutes 12] [--only PART …] [--out FILE]

Each part prints one JSON line: part, ok, its seconds and its figures, or the error. A part that
fails does not stop the rest. The last line sums up. The exit code is 0 if no part has failed.
A part for which no time is left is skipped, and the last line names it.

On a machine without a GPU, or with `--device cpu`, the parts that need one are left out
(tests/test_gpu.py does that). `--device cpu --tiny --only speed_of_gpt` runs them with small
models.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
from lab import Lab, OutOfTime  # noqa: E402
from parts import FAULTS, ON_GPU, PROOFS, SPEEDS, memory  # noqa: E402

ERROR_LETTERS = 4000
ALL = [*PROOFS, *ON_GPU, *SPEEDS, memory]
"""In this order: what matters most comes first, and what takes longest last."""


def prove(part: Any, lab: Lab) -> dict[str, Any]:
    """Run one part; returns its line."""
    begun = time.monotonic()
    line: dict[str, Any] = {"part": part.__name__}
    try:
        line |= {"ok": True, **part(lab)}
    except OutOfTime:
        line |= {"ok": None, "skipped": "no time is left"}
    except Exception as error:
        says = f"{type(error).__name__}: {error}"[:ERROR_LETTERS]
        line |= ({"ok": None, "skipped": f"the time was over: {says}"} if lab.is_over() else
                 {"ok": False, "error": says})
    return line | {"seconds": round(time.monotonic() - begun, 1)}


def summary(lines: list[dict[str, Any]], begun: float) -> dict[str, Any]:
    """Return the last line."""
    by = {state: [line["part"] for line in lines if line["ok"] is state]
          for state in (True, False, None)}
    return {"part": "summary", "ok": not by[False], "passed": len(by[True]), "failed": by[False],
            "skipped": by[None], "seconds": round(time.monotonic() - begun, 1)}


def machine(device: str) -> dict[str, Any]:
    """Return what the figures are of."""
    import torch

    gpu = torch.cuda.get_device_properties(0) if device == "cuda" else None
    return {"part": "machine", "device": gpu.name if gpu else "cpu", "torch": torch.__version__,
            "cuda": torch.version.cuda, "python": sys.version.split()[0],
            "date": time.strftime("%Y-%m-%d")}


def main() -> int:
    import torch

    names = [part.__name__ for part in ALL]
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART",
                        help=f"only these parts: {', '.join(names)}")
    parser.add_argument("--device", choices=("cuda", "cpu"),
                        default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--generations", type=int, default=20, help="for the part memory")
    parser.add_argument("--tiny", action="store_true", help="small models, fewer worlds")
    parser.add_argument("--out", type=Path, help="append the lines to this file, too")
    options = parser.parse_args()
    chosen = [part for part in ALL if part.__name__ in options.only] if options.only else [
        part for part in ALL if options.device == "cuda" or part not in (*ON_GPU, *SPEEDS)]

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        if options.out:
            with open(options.out, "a") as file:
                file.write(json.dumps(line) + "\n")

    begun, lines = time.monotonic(), []
    say(machine(options.device))
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder), options.device, 60 * options.minutes, options.generations,
                  options.tiny)
        try:
            for part in chosen:
                lines.append(prove(part, lab))
                say(lines[-1])
        finally:
            FAULTS.end()
    total = summary(lines, begun)
    say(total)
    return 0 if total["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
