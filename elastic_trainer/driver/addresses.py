"""Which hosts are this machine, and the driver's address for the others.

discovered hosts, --network-interfaces → here → driver (local process or ssh; where workers connect)
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil
from horovod.runner.util import network
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from elastic_trainer.config import ConfigError
from elastic_trainer.world.reach import own_address_towards

LOOKUP_S = 30.0
"""The time in which the driver looks for a route to any host. After it the attempt ends."""
LOOKUP_AGAIN_S = 10.0
"""The interval between two lookups of a name without an address. An alias of ssh never has one."""


class HostsUnreachable(RuntimeError):
    """No host of the list has an address and a route. The next attempt looks again."""


def is_local(host: str) -> bool:
    """True if a host name is this machine's: its address is ours, or any loopback address."""
    address = network.resolve_host_address(host)
    return bool(address) and is_own(address)


def is_own(address: str) -> bool:
    """True if an address is one of this machine's, or any loopback address."""
    is_loopback = ipaddress.ip_address(address).is_loopback
    return is_loopback or address in network.get_local_host_addresses()


class Locations:
    """Which hosts are this machine, looked up before the driver's lock is taken.

    A name server may take seconds to answer. A name without an address is looked up again: one
    failed lookup must not make this machine a far host for the rest of the attempt.
    """

    def __init__(self) -> None:
        self.is_here: dict[str, bool] = {}
        self._failed_at: dict[str, float] = {}
        """Host without an address → the time of its newest lookup."""

    def look_up(self, hosts: Iterable[str]) -> None:
        """Look up the hosts that are not known yet. Network: a name server."""
        now = time.monotonic()
        for host in hosts:
            is_due = self._failed_at.get(host, now) + LOOKUP_AGAIN_S < now
            if host not in self.is_here or is_due:
                address = network.resolve_host_address(host)
                self.is_here[host] = bool(address) and is_own(address)
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
