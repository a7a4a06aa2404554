"""Who reaches whom: a door that peers knock at, and knocks at the doors of peers.

driver (addresses of the members) → unreachable → heartbeat → driver (who gets a place)

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
"""How long a peer has to answer a connection. The kernel sends a lost SYN again after 1 s.
Less than `admit_s`."""
KNOCKS = 1024
"""How many connections wait at a door at most. Each heartbeat lets all of them go: a queue that is
full drops a peer's SYN, and if a peer does not get through in REACH_S, one of the two is evicted.
To let 1024 go takes 8 ms."""


def open_door(driver: str) -> socket.socket:
    """Return a listening socket on the interface that leads to the driver (host:port).

    Peers find out there whether they reach this worker. No accept is needed for that, and nothing
    is read.
    """
    address = own_address_towards(driver.rpartition(":")[0])
    door = socket.create_server((address, 0), backlog=KNOCKS)
    door.setblocking(False)
    return door


def answer_door(door: socket.socket) -> None:
    """Close the connections that wait at a door: the kernel has answered them already."""
    for _ in range(KNOCKS):  # unauthenticated clients may connect faster than they are let go
        try:
            door.accept()[0].close()
        except OSError:  # no more connections, or no more descriptors
            return


def own_address_towards(host: str) -> str:
    """Return the address of this machine on the way to a host. Raises OSError if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, 1))  # sends nothing
        return str(way.getsockname()[0])


def interface_towards(host: str) -> str:
    """Return the name of the interface that leads to a host. Raises OSError.

    Each machine has names of its own (eth0, ens5), but Horovod's driver gives one to all.
    """
    own = own_address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            return str(name)
    raise OSError(f"no interface of this machine has the address {own}")


def unreachable(peers: Mapping[str, Sequence[Any]], timeout_s: float) -> list[str]:
    """Return those of the peers (name → address, port) that packets do not reach, or whose answers
    do not come back. A refusal is an answer.
    """
    failed, waiting = [], {}
    poll = select.poll()
    for name, (address, port) in peers.items():
        knock = socket.socket()
        knock.setblocking(False)
        code = knock.connect_ex((address, port))
        if code == errno.EINPROGRESS:
            waiting[knock.fileno()] = (name, knock)
            poll.register(knock, select.POLLOUT)
        else:
            failed += [name] * (code not in (0, errno.ECONNREFUSED))
            knock.close()
    deadline = time.monotonic() + timeout_s
    while waiting and (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(1000 * left):
            name, knock = waiting.pop(descriptor)
            poll.unregister(descriptor)
            code = knock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            failed += [name] * (code not in (0, errno.ECONNREFUSED))
            knock.close()
    for name, knock in waiting.values():
        failed.append(name)
        knock.close()
    return sorted(failed)
