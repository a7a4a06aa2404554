"""`watch --json`: the events of a run as lines on stdout."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from time import time

import pytest
from waiting import wait_for

from elastic_trainer.__main__ import main
from elastic_trainer.events.log import EVENTS_FILE

OLD, NEW, LAST = ({"event": "attempt.started", "run": "r", "attempt": number}
                  for number in range(3))


def write(run_dir: Path, event: dict[str, object], time: float) -> None:
    event["time"] = time
    with open(run_dir / EVENTS_FILE, "a") as log:
        log.write(json.dumps(event) + "\n")


def test_each_new_event_is_a_line_until_a_signal_and_the_last_ones_are_not_lost(
        tmp_path: Path) -> None:
    """What was there before was printed by the container before. What is written while the process
    starts, and before the signal, is printed, and the exit code is 0."""
    write(tmp_path, OLD, time() - 60.0)
    with open(tmp_path / "printed", "wb") as printed:
        watching = subprocess.Popen([sys.executable, "-m", "elastic_trainer", "watch", tmp_path,
                                     "--json"], stdout=printed)
    try:
        write(tmp_path, NEW, time())
        wait_for("first line", lambda: (tmp_path / "printed").read_text())
        write(tmp_path, LAST, time())
        watching.send_signal(signal.SIGTERM)
        assert watching.wait(120) == 0
    finally:
        watching.kill()
    events = [json.loads(line) for line in (tmp_path / "printed").read_text().splitlines()]
    assert events == [NEW, LAST]


@pytest.mark.parametrize(("options", "remedy"), [
    (["--json", "--web"], "Call the command once with each"),
    (["--kubernetes-events"], "Add --json"),
    (["--json", "--prices", "x"], "Leave out --json or --prices"),
    (["--json", "--kubernetes-events"], "deploy/kubernetes/base/coordinator.yaml does")])
def test_options_that_do_not_go_together_are_refused(
        options: list[str], remedy: str, tmp_path: Path,
        capsys: pytest.CaptureFixture[str]) -> None:
    """With the remedy. Events of Kubernetes are for a process in a pod."""
    assert main(["watch", str(tmp_path), *options]) != 0
    assert remedy in " ".join(capsys.readouterr().err.split())
