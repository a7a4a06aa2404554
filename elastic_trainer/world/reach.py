"""Which peers a worker reaches: a listening socket for them, and tries to connect.

driver (addresses of the members) → unreachable → heartbeat → driver (which workers get a place)

Two workers that both reach the driver, but not each other, would break each generation that they
share. So a worker tries to connect to all members before it accepts a place.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

REACH_S = 2.0
"""The time in which a peer must answer a connection, less than `admit_s`. The kernel repeats a lost
SYN after 1 s."""
MOST_PROBES = 1024
"""The most connections that wait at a listener. Each heartbeat closes all of them: a full queue
drops a peer's SYN, and a peer that does not connect in REACH_S costs one of the two its place. To
close 1024 connections takes 8 ms."""


def open_listener(driver: str) -> socket.socket:
    """Return a listening socket on the interface that leads to the driver (host:port).

    The kernel answers a peer that connects, so the peer learns that it reaches this worker. Nothing
    is read.
    """
    address = own_address_towards(driver.rpartition(":")[0])
    listener = socket.create_server((address, 0), backlog=MOST_PROBES)
    listener.setblocking(False)
    return listener


def close_probes(listener: socket.socket) -> None:
    """Close the connections that wait at a listener."""
    for _ in range(MOST_PROBES):  # unauthenticated clients may connect faster than this closes
        try:
            listener.accept()[0].close()
        except OSError:  # no more connections, or no more descriptors
            return


def own_address_towards(host: str) -> str:
    """Return the address of this machine on the way to a host. Raises OSError if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, 1))  # sends nothing
        return str(way.getsockname()[0])


def interface_towards(host: str) -> str:
    """Return the name of the interface that leads to a host. Raises OSError.

    The names differ between machines (eth0, ens5), but Horovod's driver gives one name to all.
    """
    own = own_address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            return str(name)
    raise OSError(f"no interface of this machine has the address {own}")


def unreachable(peers: Mapping[str, Sequence[Any]], timeout_s: float) -> list[str]:
    """Return the peers (name → address, port) that do not answer a connection in time.

    A refusal is an answer. Network: a connection to each peer.
    """
    failed, waiting = [], {}
    poll = select.poll()
    for name, (address, port) in peers.items():
        probe = socket.socket()
        probe.setblocking(False)
        code = probe.connect_ex((address, port))
        if code == errno.EINPROGRESS:
            waiting[probe.fileno()] = (name, probe)
            poll.register(probe, select.POLLOUT)
        else:
            failed += [name] * (code not in (0, errno.ECONNREFUSED))
            probe.close()
    deadline = time.monotonic() + timeout_s
    while waiting and (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(1000 * left):
            name, probe = waiting.pop(descriptor)
            poll.unregister(descriptor)
            code = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            failed += [name] * (code not in (0, errno.ECONNREFUSED))
            probe.close()
    for name, probe in waiting.values():
        failed.append(name)
        probe.close()
    return sorted(failed)
