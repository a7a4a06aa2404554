"""The event log: what is in it after its disk was full."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from elastic_trainer.events.log import Events, read_events

ROOT = Path(__file__).resolve().parent.parent
WRITER = """
import resource, signal, sys
from pathlib import Path
from elastic_trainer.events.log import Events
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
events = Events(Path(sys.argv[1]), run="run")
events.emit("before")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for number in range(40):
    events.emit("worker.step_told", step=number)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
events.emit("after", step=41)
events.emit("after", step=42)
"""


def test_a_full_disk_costs_the_lines_that_found_it_full(tmp_path: Path) -> None:
    """Only the line that was cut is lost. Lines after the disk has room are whole. One message
    reports the failure."""
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # stdout may be a protocol
    assert done.stdout == "" and done.stderr.count("events.write_failed") == 1
    logged = read_events(tmp_path)
    steps = [event["step"] for event in logged if event["event"] == "worker.step_told"]
    assert logged[0]["event"] == "before"
    assert 3 < len(steps) < 40 and steps == list(range(len(steps)))
    assert [event["step"] for event in logged if event["event"] == "after"] == [41, 42]
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert len(lines) == len(logged) + 1  # the torn one


def test_a_line_is_whole_in_the_event_log_before_its_listeners_are_called(tmp_path: Path) -> None:
    """Listeners act on what the event log has."""
    events, heard = Events(tmp_path, attempt=3), list[tuple[Any, Any]]()
    events.listeners.append(lambda event, facts: heard.append((read_events(tmp_path)[-1], facts)))
    events.emit("driver.worker_ready", worker="a/0/1", pid=1)
    ((logged, facts),) = heard
    assert logged == facts and facts["attempt"] == 3
