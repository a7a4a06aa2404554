"""The workers that an ended attempt has left: waits for their end, and kills those that stay.

event log (past.py), /proc → here → supervisor, which then starts the next attempt

An orphan would train on beside the next attempt, as a second lineage.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from elastic_trainer.driver import remote
from elastic_trainer.driver.past import Past
from elastic_trainer.events.log import Events
from elastic_trainer.host.processes import is_worker

ELSEWHERE_S = 2 * remote.ORPHANS_S
"""The time in which all hosts must end their workers of an older attempt: their own grace, and the
same again for ssh. Where no ssh gets through, the far end ends its worker itself (remote.py, 2)."""


class Ssh(NamedTuple):
    """What horovodrun was given for ssh."""

    port: str | None
    identity_file: str | None

    @classmethod
    def from_options(cls, horovodrun_options: Sequence[str]) -> Ssh:
        """Read horovodrun's options."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("-p", "--ssh-port")
        parser.add_argument("-i", "--ssh-identity-file")
        options, _ = parser.parse_known_args(horovodrun_options)
        return cls(options.ssh_port, options.ssh_identity_file)


def end_orphans(past: Past, run_dir: Path, ssh: Ssh, events: Events) -> None:
    """Wait until the workers of earlier attempts have ended; kill those that stay."""
    newest, living = past.attempt, list(past.living.values())
    logged = {(str(attempt), worker) for attempt, worker in past.started}
    # The newest driver may have died before it had logged the workers that it had just started.
    unlogged = [(pid, name) for pid, (attempt, name) in remote.workers_of(str(run_dir)).items()
                if attempt == str(newest) and (attempt, name) not in logged]
    _end_here([(event["pid"], event["worker"]) for event in living] + unlogged, run_dir)
    # Workers of older attempts were ended before the newest one started.
    _end_elsewhere({event["host"] for event in living
                    if event.get("over_ssh") and event["attempt"] == newest}, run_dir, ssh, events)


def _end_here(workers: list[tuple[int, str]], run_dir: Path) -> None:
    """End workers (pid, name) on this machine. They notice by themselves that the driver is gone,
    unless a frozen driver still holds their connections."""
    deadline = time.monotonic() + remote.ORPHANS_S
    while workers := [one for one in workers if is_worker(*one, run_dir)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for pid, name in workers:
        if is_worker(pid, name, run_dir):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _end_elsewhere(hosts: set[str], run_dir: Path, ssh: Ssh, events: Events) -> None:
    """End workers on other hosts, all at the same time. A host that no ssh reaches is logged: the
    workers of the next attempt do not reach it either."""
    ends = {host: subprocess.Popen(remote.ssh(host, *ssh, "end", str(run_dir)),
                                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                   start_new_session=True) for host in sorted(hosts)}
    deadline = time.monotonic() + ELSEWHERE_S
    for host, end in ends.items():
        if why := _why_not_ended(end, max(0.0, deadline - time.monotonic())):
            events.emit("run.host_not_reached", host=host, reason=why)


def _why_not_ended(end: subprocess.Popen[bytes], left_s: float) -> str:
    """Wait for an ssh that ends a run's workers; return why it may not have done so, or ""."""
    try:
        code = end.wait(left_s)
    except subprocess.TimeoutExpired:
        os.killpg(end.pid, signal.SIGKILL)  # not reaped yet, so no other group has the number
        end.wait()
        return f"its ssh has not returned in {ELSEWHERE_S:.0f} s"
    return f"its ssh ended with exit code {code}" if code else ""
