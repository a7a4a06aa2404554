"""The event log: what is in it after its disk was full."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from elastic_trainer.observe.events import Events, read_events

ROOT = Path(__file__).resolve().parent.parent
WRITER = """
import resource, signal, sys
from pathlib import Path
from elastic_trainer.observe.events import Events
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
    """The one that was cut is spoilt alone; what comes when there is room again stands whole; it is
    said once."""
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Stdout may be a protocol.
    assert done.stdout == "" and done.stderr.count("events.write_failed") == 1
    told = read_events(tmp_path)
    steps = [event["step"] for event in told if event["event"] == "worker.step_told"]
    assert told[0]["event"] == "before" and 3 < len(steps) < 40 and steps == list(range(len(steps)))
    assert [event["step"] for event in told if event["event"] == "after"] == [41, 42]
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert len(lines) == len(told) + 1  # the torn one


def test_a_line_is_whole_in_the_event_log_before_its_listeners_hear_it(tmp_path: Path) -> None:
    """They act on what stands there."""
    events, heard = Events(tmp_path, attempt=3), list[object]()
    events.listeners.append(lambda event, facts: heard.append((read_events(tmp_path)[-1], facts)))
    events.emit("driver.worker_ready", worker="a/0/1", pid=1)
    assert heard and heard[0][0] == heard[0][
        1] and heard[0][1]["attempt"] == 3  # type: ignore[index]
