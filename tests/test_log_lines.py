"""`watch --json`: the events of a run as lines on stdout."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_for

from elastic_trainer.__main__ import main
from elastic_trainer.events.log import EVENTS_FILE

OLD, NEW, LAST = ({"time": time, "event": "attempt.started", "run": "r", "attempt": number}
                  for number, time in enumerate((1.0, 2.0, 3.0)))


def write(run_dir: Path, event: dict[str, object]) -> None:
    with open(run_dir / EVENTS_FILE, "a") as log:
        log.write(json.dumps(event) + "\n")


def test_each_new_event_is_a_line_until_a_signal_and_the_last_ones_are_not_lost(
        tmp_path: Path) -> None:
    """What was there before was printed by the container before. What is written before the signal
    is printed, and the exit code is 0."""
    write(tmp_path, OLD)
    with open(tmp_path / "printed", "wb") as printed:
        watching = subprocess.Popen([sys.executable, "-m", "elastic_trainer", "watch", tmp_path,
                                     "--json"], stdout=printed)
    try:
        number = 0

        def first_line() -> bool:
            nonlocal number
            number += 1
            write(tmp_path, {**NEW, "attempt": number})
            return bool((tmp_path / "printed").read_text())

        wait_for("first line", first_line)
        write(tmp_path, LAST)
        watching.send_signal(signal.SIGTERM)
        assert watching.wait(120) == 0
    finally:
        watching.kill()
    events = [json.loads(line) for line in (tmp_path / "printed").read_text().splitlines()]
    assert OLD not in events and events[-1] == LAST
    attempts = [event["attempt"] for event in events[:-1]]
    assert attempts == list(range(attempts[0], number + 1))


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
