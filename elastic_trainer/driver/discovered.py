"""The list of hosts: asks the discovery script, and reads its answer.

discovery script → here → driver

It has a timeout, keeps the order of the hosts, and raises on a bad answer: unknown is never empty.
(Horovod replaces a good list by what it can read of a bad one: discovery.py:238-252.)
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from typing import Any

from horovod.runner.elastic.discovery import HostDiscovery, HostDiscoveryScript

from elastic_trainer.events.log import Events
from elastic_trainer.host.names import HOST_NAME

DISCOVERY_EVERY_S = 1.0
DISCOVERY_TIMEOUT_S = 10.0
FIRST_DISCOVERY_S = 60.0
"""A discovery without any answer for this long is a mistake in the command."""
DISCOVERY_FAILS = (ValueError, OSError, subprocess.SubprocessError)
"""The exceptions of a discovery that does not answer, or whose answer is no list of hosts."""


class DiscoveryUnavailable(RuntimeError):
    """The discovery has not answered once. The next attempt asks again."""


class WaitedTooLong(RuntimeError):
    """The discovery has named no host for as long as an attempt may wait (--elastic-timeout)."""


class Discovery:
    """Asks for the hosts. `settings` are horovodrun's; `had_hosts`: it has named some before.

    A discovery that has named hosts in an earlier attempt works: if it fails now, it is down.
    """

    def __init__(self, settings: Any, events: Events, had_hosts: bool):
        self.source: HostDiscovery = settings.discovery
        self.wait_s: float | None = settings.elastic_timeout
        self.events, self.had_hosts = events, had_hosts
        self.failing_since: float | None = None

    def first_hosts(self) -> dict[str, int]:
        """Wait for the first list that names a host. Raises DiscoveryUnavailable, WaitedTooLong."""
        started, has_answered = time.monotonic(), False
        while True:
            waited_s = time.monotonic() - started
            try:
                if hosts := self.hosts_now():
                    return hosts
                has_answered = True
            except DISCOVERY_FAILS as error:
                works = has_answered or self.had_hosts
                if not works and waited_s > FIRST_DISCOVERY_S:
                    raise DiscoveryUnavailable(
                        f"The discovery has not answered once in {FIRST_DISCOVERY_S:.0f} s "
                        f"({error}). Run the command of --host-discovery-script by hand, and "
                        f"correct it.") from error
            works = has_answered or self.had_hosts
            if works and self.wait_s is not None and waited_s > self.wait_s:
                raise WaitedTooLong(
                    f"The discovery has named no host in {self.wait_s:.0f} s (--elastic-timeout). "
                    f"`elastic-trainer hosts` shows why. The next attempt asks again.")
            time.sleep(DISCOVERY_EVERY_S)

    def hosts_now(self) -> dict[str, int]:
        """Ask once; log the start and the end of an outage. Raises DISCOVERY_FAILS."""
        try:
            hosts = self._ask()
        except DISCOVERY_FAILS as error:
            if self.failing_since is None:
                self.failing_since = time.monotonic()
                self.events.emit("driver.discovery_failed", error=str(error))
            raise
        if self.failing_since is not None:
            failed_s = round(time.monotonic() - self.failing_since, 1)
            self.events.emit("driver.discovery_recovered", failed_s=failed_s)
            self.failing_since = None
        return hosts

    def _ask(self) -> dict[str, int]:
        if not isinstance(self.source, HostDiscoveryScript):
            return dict(self.source.find_available_hosts_and_slots())
        with subprocess.Popen(
                self.source._discovery_script, shell=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                start_new_session=True) as script:
            try:
                hosts, complaint = script.communicate(timeout=DISCOVERY_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(script.pid, signal.SIGKILL)  # with the processes that it has started
                raise
        if script.returncode != 0:
            raise ValueError(f"exit code {script.returncode}: {complaint.strip()[-200:]}")
        return parse_hosts(hosts, self.source._default_slots)


def parse_hosts(text: str, default_slots: int | None) -> dict[str, int]:
    """Read `host:slots` lines in their order. Raises ValueError on any line that is not one.

    A host's name goes into an ssh command, so it must look like one (RFC 1123), above all at its
    start.
    """
    hosts: dict[str, int] = {}
    for line in text.splitlines():
        line = line.strip()
        if not line:
            continue
        host, colon, slots = line.rpartition(":")
        if not colon:
            host, slots = line, str(default_slots or 1)
        is_number = re.fullmatch("[0-9]{1,4}", slots)
        if not HOST_NAME.fullmatch(host) or not is_number or int(slots) < 1:
            raise ValueError(f"{line!r} is not host:slots")
        hosts[host] = int(slots)
    return hosts
