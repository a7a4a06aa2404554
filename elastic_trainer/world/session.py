"""Horovod in this process: started for one generation, its sockets shut, ended.

place → environment → hvd.init() → … → sockets shut (after an error) → hvd.shutdown()

What always holds:
1. After an error this process's own Gloo sockets are shut, so that all peers notice within
   milliseconds (F2: Horovod keeps them open, and ranks that are not neighbours of the dead one wait
   for the whole timeout). An operation that is partly sent or received ends with its socket only in
   a Gloo with 04-broken-pairs.patch.
2. A variable that the user has set has precedence over the value for a generation.

Why the response cache is off (HOROVOD_CACHE_CAPACITY=0): after an error in one operation Horovod's
background thread continues with the next negotiation (operations.cc:310-318). With the cache that
is an allreduce on the same Gloo slot as the data. A late chunk from a peer then breaks an assertion
in a thread of Gloo ("op.preamble.length <= op.nbytes") and aborts a healthy worker: a second
victim. Without the cache the negotiation uses other slots.

Source: horovod/common/gloo/gloo_context.cc (environment re-read at every init), 0.28.1.
driver/driver.py lists F1 to F11.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import sys
from dataclasses import replace
from ipaddress import IPv6Address

import torch
from horovod.torch import mpi_ops

from elastic_trainer.config import Launch
from elastic_trainer.events.mark import Mark
from elastic_trainer.wire.heartbeat import At, RankAssignment
from elastic_trainer.world.collectives import PeersLost

IDLE_CYCLE_MS = 25.0
"""The time in which a worker that computes notices that a peer's sockets are closed."""
FOR_THIS_WORLD = ("HOROVOD_CYCLE_TIME", "HOROVOD_GLOO_TIMEOUT_SECONDS", "HOROVOD_GLOO_MEET_AT_ONCE")
"""The variables whose values depend on the size of a generation's world."""
PAIR_S = 0.002
"""Gloo's least timeout for each pair of members, if they do not meet at once. A rendezvous takes
about 5 requests of 0.3 ms a pair: 64 members need 6 s to find each other, 128 need 25 s."""
MEMBER_S = 0.3
"""Gloo's least timeout for each member, if they meet at once: a member connects to all others, one
after another."""
RUNNABLE_EACH = 4.0
MAX_LOAD = 4.0
"""On a machine with more than 4 runnable processes a core, Gloo's timeout is longer in proportion,
up to 4 times. The timeout is the last resort: heartbeats find a dead worker, and a timeout during a
slow start would break the world without need."""
UNSENT_S = 1.0
"""A worker that waits longer in a collective reports who has not taken what it sends."""


class Session:
    """This process's Horovod."""

    def __init__(self, launch: Launch, interface: str, mark: Mark):
        self._launch, self._interface, self._mark = launch, interface, mark
        self._asked = dict(os.environ)
        self._is_up = self._was_up = False
        self._sockets: set[tuple[int, int]] = set()
        self._before_start: set[tuple[int, int]] = set()
        self._starts = False

    @property
    def is_starting(self) -> bool:
        """True while the main thread is in `hvd.init()`."""
        return self._starts

    def prepare(self, assigned: RankAssignment, step_s: float) -> None:
        """Set Horovod's environment for a generation whose steps take about `step_s`."""
        os.environ.update(self._environment(assigned, step_s))
        self._before_start = open_sockets()
        self._starts = True

    def start(self) -> None:
        """Start Horovod, as prepared. Raises PeersLost. Network: a full mesh of Gloo connections.

        Without 06-init-fails.patch Horovod aborts the process instead of an exception (revive.py).
        """
        self._is_up = True  # a start that has failed must be ended too
        try:
            mpi_ops.init()
        except ValueError as error:
            raise PeersLost(init_error() or str(error)) from error
        finally:
            self._starts = False
            self._sockets = open_sockets() - self._before_start
        if not mpi_ops.is_initialized():
            raise PeersLost(init_error())
        self._was_up = True

    def end(self) -> None:
        """End Horovod, if it was started. The loop is in no step from now on."""
        self._mark.leave()
        if self._is_up:
            self._is_up = False
            mpi_ops.shutdown()
            # The next world's parts have other sizes, and NCCL takes its own memory from what
            # torch's allocator does not hold. Without CUDA this does nothing.
            torch.cuda.empty_cache()
        self._sockets = set()

    def close_sockets(self) -> None:
        """Shut our Gloo sockets, so that each pending operation here and at our peers ends (F2)."""
        during_start = open_sockets() - self._before_start if self._starts else set()
        for descriptor, inode in self._sockets | during_start:
            try:
                with socket.socket(fileno=os.dup(descriptor)) as ours:
                    # Gloo may have closed it, and another socket may have its number. Or the
                    # heartbeats may have connected again.
                    if os.fstat(ours.fileno()).st_ino == inode and not self._leads_to_driver(ours):
                        ours.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # closed already

    def at(self) -> At | None:
        """Return what the loop does, with the addresses of the members that have not taken all that
        this process has sent, if it waits in a collective. Any thread may call it.
        """
        at = self._mark.at()
        if at is None or at.waits_s < UNSENT_S:
            return at
        ours = {str(inode) for _, inode in self._sockets}
        peers = {peer for inode, peer in unsent_sockets() if inode in ours}
        return replace(at, unsent=tuple(sorted(peers)))

    def take_back_environment(self) -> None:
        """Set the variables of this world as the user had them, for a process that restarts."""
        for name in FOR_THIS_WORLD:
            os.environ.pop(name, None)
            if name in self._asked:
                os.environ[name] = self._asked[name]

    def _environment(self, assigned: RankAssignment, step_s: float) -> dict[str, str]:
        timeout_s = gloo_timeout_s(self._launch.limits.gloo_s, assigned.size, assigned.at_once,
                                   load())
        asked = {
            "HOROVOD_CYCLE_TIME": f"{cycle_ms(step_s, wakes_on_arrival()):.2f}",
            "HOROVOD_CACHE_CAPACITY": "0",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(round(timeout_s))}
        if self._interface:
            asked |= dict.fromkeys(("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME"), self._interface)
        return {name: self._asked.get(name, value) for name, value in asked.items()} | {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": assigned.address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(assigned.port),
            "HOROVOD_RANK": str(assigned.rank), "HOROVOD_SIZE": str(assigned.size),
            # Each worker is a "host" of its own for Gloo. So the contexts "local" and "cross",
            # which nothing here uses, have no peers to connect to: init takes 200 ms instead of
            # 350 ms (measured, 4 ranks).
            "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1",
            "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1",
            "HOROVOD_GLOO_MEET_AT_ONCE": "1" if assigned.at_once else "0",
            # Wrong in an elastic world, also if the user has set them.
            "HOROVOD_AUTOTUNE": "0", "HOROVOD_ENABLE_ASYNC_COMPLETION": "0",
            # The first init latches NCCL's elastic mode; later ones must not ask the driver.
            "HOROVOD_ELASTIC": "0" if self._was_up else "1"}

    def _leads_to_driver(self, ours: socket.socket) -> bool:
        try:
            return "{0[0]}:{0[1]}".format(ours.getpeername()) == self._launch.driver
        except OSError:
            return False  # it listens, or its peer has gone


def wakes_on_arrival() -> bool:
    """True if this Horovod has 03-wake-on-arrival.patch."""
    return hasattr(mpi_ops._basics.MPI_LIB_CTYPES, "horovod_wakes_on_arrival")


def init_can_fail() -> bool:
    """True if this Horovod has 06-init-fails.patch, and so 08-meet-at-once.patch."""
    return hasattr(mpi_ops._basics.MPI_LIB_CTYPES, "horovod_init_error")


def init_error() -> str:
    """Return why the last `hvd.init()` failed."""
    if not init_can_fail():
        return ""
    error = mpi_ops._basics.MPI_LIB_CTYPES.horovod_init_error
    error.restype = ctypes.c_char_p
    return bytes(error()).decode(errors="replace")


def load() -> float:
    """Return the runnable processes for each core of this machine, over the last minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def gloo_timeout_s(gloo_s: float, size: int, at_once: bool, load: float) -> float:
    """Return Horovod's timeout for a collective and for finding the peers."""
    for_size_s = MEMBER_S * size if at_once else PAIR_S * size**2
    return max(gloo_s, for_size_s) * min(MAX_LOAD, max(1.0, load / RUNNABLE_EACH))


def cycle_ms(step_s: float, wakes: bool) -> float:
    """Choose how often Horovod's background threads negotiate, in milliseconds.

    Each cycle is a few small collectives, also without any work: at 3 ms they took 12 % of a core
    for each of 2 workers on 2 cores. If the thread wakes when a tensor arrives, only idle cycles
    have this length. Otherwise (a Horovod that is not mended) a cycle delays each of a step's 3 or
    4 operations by half of its length.
    """
    return IDLE_CYCLE_MS if wakes else min(5.0, max(1.0, 1000.0 * step_s / 50.0))


def unsent_sockets() -> list[tuple[str, str]]:
    """Return (inode, address of the peer) of the TCP sockets of this network namespace with bytes
    that the peer has not acknowledged.

    Source: proc(5), /proc/net/tcp: the fields rem_address, tx_queue and inode.
    """
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            with open(table) as file:
                rows = [line.split() for line in file][1:]
        except OSError:
            continue  # a kernel without IPv6
        found += [(row[9], address_in(row[2].partition(":")[0])) for row in rows
                  if int(row[4].partition(":")[0], 16)]
    return found


def address_in(digits: str) -> str:
    """Return the address that /proc/net/tcp has as 32-bit words of this machine's byte order."""
    words = [bytes.fromhex(digits[at:at + 8])[::-1 if sys.byteorder == "little" else 1]
             for at in range(0, len(digits), 8)]
    if len(words) == 1:
        return socket.inet_ntoa(words[0])
    address = IPv6Address(b"".join(words))
    return str(address.ipv4_mapped or address)


def open_sockets() -> set[tuple[int, int]]:
    """Return (descriptor, inode) of this process's TCP sockets, connected or listening."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6):
                        found.add((int(name), status.st_ino))
        except OSError:
            continue  # closed since the listing (the listing's own descriptor is one of them)
    return found
