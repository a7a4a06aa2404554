"""The hosts of an attempt: the discovery's list, which of them are this machine, and the driver's
own address for the others.

discovery script, --network-interfaces → here → driver (local process or ssh; where workers connect)

What always holds:
1. Unknown is never empty: the question to the discovery script has a timeout, and a bad answer
   raises. (Horovod replaces a good list by what it can read of a bad one: discovery.py:238-252.)
2. The order of the hosts is that of the list.
"""

from __future__ import annotations

import ipaddress
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import psutil
from horovod.runner.elastic.discovery import HostDiscovery, HostDiscoveryScript
from horovod.runner.util import network
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from elastic_trainer.config import ConfigError
from elastic_trainer.events.log import Events
from elastic_trainer.host.names import HOST_NAME
from elastic_trainer.world.reach import own_address_towards

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

    def __init__(self, settings: Any, events: Events, had_hosts: bool, *,
                 first_s: float = FIRST_DISCOVERY_S, every_s: float = DISCOVERY_EVERY_S):
        self.first_s, self.every_s = first_s, every_s
        self.source: HostDiscovery = settings.discovery
        self.wait_s: float | None = settings.elastic_timeout
        self.events, self.had_hosts = events, had_hosts
        self.failing_since: float | None = None
        self.addresses: dict[str, str] = {}
        """Where hosts are reached that have an address beside the name. A name is one machine's
        for good, so a host that has left the list stays here."""
        self.zones: dict[str, str] = {}
        """The zones of hosts, as far as they are known; they stay here, too."""

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
                if not works and waited_s > self.first_s:
                    raise DiscoveryUnavailable(
                        f"The discovery has not answered once in {self.first_s:.0f} s "
                        f"({error}). Run the command of --host-discovery-script by hand, and "
                        f"correct it.") from error
            works = has_answered or self.had_hosts
            if works and self.wait_s is not None and waited_s > self.wait_s:
                raise WaitedTooLong(
                    f"The discovery has named no host in {self.wait_s:.0f} s (--elastic-timeout). "
                    f"`elastic-trainer hosts` shows why. The next attempt asks again.")
            time.sleep(self.every_s)

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
                env=os.environ | {"ELASTIC_TRAINER_ZONES": "1"},
                start_new_session=True) as script:
            try:
                hosts, complaint = script.communicate(timeout=DISCOVERY_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(script.pid, signal.SIGKILL)  # with the processes that it has started
                raise
        if script.returncode != 0:
            raise ValueError(f"exit code {script.returncode}: {complaint.strip()[-200:]}")
        listed = parse_hosts(hosts, self.source._default_slots)
        self.addresses |= addresses_in(hosts)
        self.zones |= zones_in(hosts)
        return listed


def parse_hosts(text: str, default_slots: int | None) -> dict[str, int]:
    """Read lines `host:slots`, or `host:slots address[:port]`, in their order: host → slots. At the
    end of a line ` zone=ZONE` may stand.

    Raises ValueError on any line that is not one. A host's name or address goes into an ssh
    command, so it must look like one (RFC 1123), above all at its start.
    """
    hosts: dict[str, int] = {}
    for line, host, slots, address, zone in _fields(text):
        where = re.sub(":[0-9]{1,5}$", "", address)
        is_reached = not address or (slots is not None and HOST_NAME.fullmatch(where))
        slots = str(default_slots or 1) if slots is None else slots
        is_number = re.fullmatch("[0-9]{1,4}", slots)
        are_names = all(map(HOST_NAME.fullmatch, (host, zone or host)))
        if not (are_names and is_reached and is_number) or int(slots) < 1:
            raise ValueError(f"{line!r} is not host:slots")
        hosts[host] = int(slots)
    return hosts


def addresses_in(text: str) -> dict[str, str]:
    """Return the addresses of lines that `parse_hosts` has accepted: host → address, with the port
    of the host's agent where the line has one."""
    return {host: address for _, host, _, address, _ in _fields(text) if address}


def zones_in(text: str) -> dict[str, str]:
    """Return the zones of lines that `parse_hosts` has accepted: host → zone."""
    return {host: zone for _, host, _, _, zone in _fields(text) if zone}


def _fields(text: str) -> Iterator[tuple[str, str, str | None, str, str]]:
    """Yield each line with its host, slots (None: it names none), address and zone."""
    for line in filter(None, map(str.strip, text.splitlines())):
        rest, _, zone = line.partition(" zone=")
        place, _, address = rest.partition(" ")
        host, colon, slots = place.rpartition(":")
        yield (line, host, slots, address, zone) if colon else (line, place, None, address, zone)


LOOKUP_S = 30.0
"""The time in which the driver looks for a route to any host. After it the attempt ends."""
LOOKUP_AGAIN_S = 10.0
"""The interval between two lookups of a name without an address. An alias of ssh never has one."""


class HostsUnreachable(RuntimeError):
    """No host of the list has an address and a route. The next attempt looks again."""


def is_own(address: str) -> bool:
    """True if an address is one of this machine's, or any loopback address."""
    is_loopback = ipaddress.ip_address(address).is_loopback
    return is_loopback or address in network.get_local_host_addresses()


class Locations:
    """Which hosts are this machine, looked up before the driver's lock is taken.

    A name server may take seconds to answer. A name without an address is looked up again: one
    failed lookup must not make this machine a far host for the rest of the attempt.
    """

    def __init__(self, resolve: Callable[[str], str | None] = network.resolve_host_address,
                 again_s: float = LOOKUP_AGAIN_S) -> None:
        self._resolve, self._again_s = resolve, again_s
        self.is_here: dict[str, bool] = {}
        self.addresses: Mapping[str, str] = {}
        """Those of hosts that are not reached by their names."""
        self.zones: Mapping[str, str] = {}
        """Those of hosts whose place reports them."""
        self._failed_at: dict[str, float] = {}
        """Host without an address → the time of its newest lookup."""

    def reached_at(self, host: str) -> str:
        """Return the name or address at which a host is reached."""
        return self.addresses.get(host, host).partition(":")[0]

    def look_up(self, hosts: Iterable[str]) -> None:
        """Look up the hosts that are not known yet. Network: a name server."""
        now = time.monotonic()
        for host in hosts:
            is_due = self._failed_at.get(host, now) + self._again_s < now
            if host not in self.is_here or is_due:
                address = self._resolve(self.reached_at(host))
                self.is_here[host] = address is not None and is_own(address)
                self._failed_at.pop(host, None)
                if not address:
                    self._failed_at[host] = now


def own_address(settings: Any, hosts: Iterable[str]) -> str:
    """Return the address at which hosts reach this machine: of --network-interfaces, or by route.

    Raises ConfigError, HostsUnreachable.
    """
    nics = list(settings.nics or [])
    if len(nics) > 1:
        raise ConfigError(f"--network-interfaces is {','.join(sorted(nics))}. Give the one "
                          f"interface of this machine that leads to the hosts, e.g. "
                          f"--network-interfaces eth0.")
    retrying = Retrying(
        retry=retry_if_exception_type(HostsUnreachable), stop=stop_after_delay(LOOKUP_S),
        wait=wait_exponential(multiplier=0.5, max=5.0), reraise=True)
    return retrying(address_of, nics[0]) if nics else retrying(way_to, hosts)


def way_to(hosts: Iterable[str],
           resolve: Callable[[str], str | None] = network.resolve_host_address) -> str:
    """Return this machine's address on the route to the first far host that has an address.

    It is 127.0.0.1 if all hosts are this machine. Raises HostsUnreachable if there are other hosts
    and none has a route.
    """
    failed: dict[str, str] = {}
    for host in hosts:
        address = resolve(host)
        if address and is_own(address):
            continue
        try:
            if address:
                return own_address_towards(address)
            failed[host] = "its name has no address"
        except OSError as error:
            failed[host] = f"no route to {address}: {error.strerror}"
    if not failed:
        return "127.0.0.1"
    first = ", ".join(f"{host} ({why})" for host, why in list(failed.items())[:3])
    raise HostsUnreachable(
        f"None of {len(failed)} hosts is reachable from this machine: {first}. The next attempt "
        f"looks again. If the names are right, give this machine's interface, e.g. "
        f"--network-interfaces eth0.")


def address_of(interface: str) -> str:
    """Return this machine's address on an interface.

    Raises ConfigError if there is no such interface, and HostsUnreachable if it has no address now.
    """
    if interface not in psutil.net_if_addrs():
        raise ConfigError(f"--network-interfaces is {interface}, which this machine does not have. "
                          f"Use one of {', '.join(sorted(psutil.net_if_addrs()))}.")
    try:
        return str(network.get_driver_ip([interface]))
    except RuntimeError as error:
        raise HostsUnreachable(f"The interface {interface} (--network-interfaces) has no IPv4 "
                               f"address now. The next attempt looks again.") from error
