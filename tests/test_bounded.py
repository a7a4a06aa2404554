"""A bench leaves no process, however it ends (tests/bench/bench.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import is_running
from waiting import wait_for

BENCH = """
import subprocess, sys, time
from pathlib import Path
from bench import bounded

def main():
    # One in a session of its own, and one whose parent has ended.
    own = subprocess.Popen(["sleep", "600"], start_new_session=True)
    subprocess.run(["sh", "-c", "sleep 600 & echo $! > left"])
    Path("own").write_text(str(own.pid))
    try:
        while not Path("go").exists():
            time.sleep(0.02)
    finally:
        Path("finally").touch()
        own.kill()
    print("measured")

sys.exit(bounded(main, float(sys.argv[1])))
"""


@pytest.mark.parametrize(("by", "code"), [
    ("itself", 0), ("limit", 124), (signal.SIGTERM, 143), (signal.SIGINT, 130),
    (signal.SIGKILL, -9)])
def test_nothing_is_left_of_a_bench(by: str | signal.Signals, code: int, tmp_path: Path) -> None:
    """Its `finally` blocks have run, and what it has started is gone."""
    bench = Path(__file__).parent / "bench"
    started = subprocess.Popen(
        [sys.executable, "-c", BENCH, "3" if by == "limit" else "600"], cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(bench)}, stdout=open(tmp_path / "output", "w"))
    wait_for("start", lambda: (tmp_path / "own").exists() and (tmp_path / "own").read_text(), 60)
    pids = [int((tmp_path / name).read_text()) for name in ("own", "left")]
    assert all(map(is_running, pids)) or by == "limit"
    if by == "itself":
        (tmp_path / "go").touch()
    elif isinstance(by, signal.Signals):
        started.send_signal(by)
    assert started.wait(60) == code
    assert ("measured" in (tmp_path / "output").read_text()) == (by == "itself")
    wait_for("finally", (tmp_path / "finally").exists, 60)
    wait_for("end", lambda: not is_running(pids[0]), 60)
    if by == signal.SIGKILL:  # nobody is left to look for it
        os.kill(pids[1], signal.SIGKILL)
    assert not is_running(pids[1]) or by == signal.SIGKILL
