"""A recorded fleet on the demo, and what `elastic-trainer plan` forecasts for the same hours.

    .venv/bin/python tests/bench/replay.py TRACE [--speed 60] [--hosts 4] [--steps 600]

TRACE is a recorded fleet, e.g. the p3 trace of uclasystem/bamboo. The demo trains on local hosts
that come and go as in it (`elastic-trainer replay`), until its steps are done. Then `plan` gets the
changes that were played, and the costs that the run has measured, and forecasts its goodput
without a process.

Last line: one JSON object with goodput (of the run, as `report` has it), forecast (of the plan),
forecast_error (the distance, in points of 100), stall_per_failure_s, played, trace_speed_goodput
(what replay forecasts for the trace's own speed), right, met.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench

POINTS = 3.0
"""How far the forecast may be from the run."""
TRAINER = [sys.executable, "-m", "elastic_trainer"]


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Replay the trace, and let `plan` forecast the same."""
    replayed = subprocess.run(
        [*TRAINER, "replay", "--trace", str(options.trace.resolve()), "--speed", str(options.speed),
         "--hosts", str(options.hosts), "--example", options.example, "--steps",
         str(options.steps), "--runs-dir", str(folder), "--run", "p3"], check=False)
    run = folder / "p3"
    found = json.loads((run / "rehearsal.json").read_text())
    result = json.loads((run / "result.json").read_text())
    planned = subprocess.run(
        [*TRAINER, "plan", "--trace", str(run / "trace.csv"), "--costs", str(run), "--hours",
         str(result["wall_s"] / 3600), "--np", "1", "--no-standby", "--json"],
        check=True, capture_output=True, text=True)
    forecast = json.loads(planned.stdout.splitlines()[-1])["forecast"]["goodput"]
    forecast = forecast[1] if isinstance(forecast, list) else forecast
    error = 100 * abs(forecast - found["goodput"])
    return {"goodput": found["goodput"], "forecast": round(forecast, 4),
            "forecast_error": round(error, 2),
            "stall_per_failure_s": found["stall_per_failure_s"], "played": found["played"],
            "trace_speed_goodput": found["forecast_goodput"],
            "steps_redone": result["steps_redone"], "right": replayed.returncode == 0,
            "met": error < POINTS and replayed.returncode == 0}


if __name__ == "__main__":
    bench.run(measure, trace=..., speed=60.0, hosts=4, steps=600, example="gpt")
