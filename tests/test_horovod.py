"""Horovod with our patches (elastic_trainer/setup): its background thread wakes when a tensor
arrives, or when it is to end, and an exchange ends when its connections do.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import wait_for

from elastic_trainer.driver.rendezvous import Rendezvous
from elastic_trainer.world.collectives import poll_s
from elastic_trainer.world.session import IDLE_CYCLE_MS, cycle_ms, gloo_timeout_s, wakes_on_arrival

HOROVODRUN = [
    str(Path(sys.executable).parent / "horovodrun"), "-np", "4", "--gloo", "--gloo-timeout-seconds",
    "600", sys.executable, "-c"
]
OPERATIONS = """
import torch, horovod.torch as hvd
hvd.init()
for number in range(4):
    assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"sum.{number}")) == hvd.size()
hvd.shutdown()
print("all done")
"""
EXCHANGE = """
import os, signal, socket, struct, time
from contextlib import suppress
from pathlib import Path
import torch, horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from elastic_trainer.world.session import open_sockets
BYTES_RECEIVED = struct.Struct("128xQ")  # linux/tcp.h, tcp_info
hvd.init()
rank = hvd.rank()
sockets = [socket.socket(fileno=os.dup(descriptor)) for descriptor, _ in open_sockets()]

def received():
    facts = [it.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136) for it in sockets]
    return [BYTES_RECEIVED.unpack(it)[0] for it in facts]

def is_frozen():
    pid = Path("frozen").read_text() if Path("frozen").exists() else ""
    return pid and Path(f"/proc/{pid}/stat").read_text().split()[2] == "T"

# Rank 3 exchanges 32 MB with each of the others, more than the kernel's buffers hold. The others
# exchange nothing with each other.
has_part = [(rank == 3) != (peer == 3) for peer in range(4)]
splits = torch.tensor(has_part, dtype=torch.int32) * (8 << 20)
values = torch.ones(int(splits.sum()))
with suppress(HorovodInternalError):
    while True:
        before = received()
        handle = hvd.alltoall_async(values, splits=splits, name="exchange")
        while not hvd.poll(handle):
            news = [now - then for now, then in zip(received(), before)]
            if rank == 3 and sum(it > 1 << 20 for it in news) == 3:
                Path("frozen.new").write_text(str(os.getpid()))
                Path("frozen.new").rename("frozen")
                os.kill(os.getpid(), signal.SIGSTOP)
            if is_frozen():
                for ours in sockets:
                    with suppress(OSError):
                        ours.shutdown(socket.SHUT_RDWR)
            time.sleep(0.001)
        hvd.synchronize(handle)
hvd.shutdown()
Path(f"ended-{rank}").touch()
"""


@pytest.mark.usefixtures("turn")
def test_operations_and_the_end_do_not_wait_for_a_cycle() -> None:
    """With cycles of a minute four operations and the shutdown end within one; unmended they take
    more than five."""
    assert wakes_on_arrival()
    done = subprocess.run([*HOROVODRUN, OPERATIONS], capture_output=True, text=True, timeout=240,
                          env=os.environ | {"HOROVOD_CYCLE_TIME": "60000"})
    assert done.stdout.count("all done") == 4, done.stderr


@pytest.mark.usefixtures("turn")
def test_an_exchange_that_was_half_done_ends_with_its_connections(tmp_path: Path) -> None:
    """One freezes in the middle of it, and the others shut their sockets: unmended they wait for
    Gloo's time-out."""
    with open(tmp_path / "output.log", "wb") as output:
        run = subprocess.Popen([*HOROVODRUN, EXCHANGE], cwd=tmp_path, stdout=output, stderr=output)
    try:
        wait_for("end of the exchange", lambda: len(list(tmp_path.glob("ended-*"))) == 3, 150)
    finally:
        if (tmp_path / "frozen").exists():
            os.kill(int((tmp_path / "frozen").read_text()), 9)
        run.terminate()
        run.wait(60)


def test_cycles_are_long_only_where_the_thread_wakes() -> None:
    """A Horovod without our patches delays each operation by half a cycle: there they
    follow the step."""
    assert cycle_ms(0.3, wakes=True) == IDLE_CYCLE_MS
    assert [cycle_ms(step_s, wakes=False) for step_s in (0.001, 0.1, 10.0)] == [1.0, 2.0, 5.0]


NAMELESS = """
import horovod.torch as hvd
try:
    hvd.init()
    print("size", hvd.size())
except ValueError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize(("interface", "shown"), [("lo", "size 1"),
                                                 ("", "refused: Horovod initialization failed")])
def test_a_machine_whose_own_name_does_not_resolve_has_a_world(interface: str, shown: str) -> None:
    """With the interface given, which session.py always does. Without it hvd.init() fails with the
    reason, and the process lives. (It died of SIGSEGV in a list that getaddrinfo had not
    filled.)"""
    inside = 'hostname nobody.invalid && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "--map-root-user", "--uts", "sh", "-c", inside, sys.executable, NAMELESS],
        env=os.environ | ({"HOROVOD_GLOO_IFACE": interface} if interface else {}),
        capture_output=True,
        text=True,
        timeout=300)
    if done.returncode == 1 and "unshare" in done.stderr:
        pytest.skip(f"this machine gives no host name of one's own: {done.stderr}")
    assert done.returncode == 0 and shown in done.stdout, done.stderr
    assert interface or "Unable to find address for nobody.invalid" in done.stderr


MEET = """
import time, torch, horovod.torch as hvd
from elastic_trainer.world.session import init_error
try:
    hvd.init()
except ValueError:
    print("not met:", init_error())
    hvd.shutdown()
else:
    assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="sum")) == hvd.size()
    hvd.shutdown()
    print("met")
"""


BREAK = """
import os, torch, horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

def hand_over(name):
    return hvd.allreduce_async(torch.ones(1), name=name)

hvd.init()
hvd.allreduce(torch.ones(1), name="met")
if hvd.rank() == 1:
    os._exit(1)
for number in range(200):
    hand_over(f"left.{number}")
mpi_ops._handle_map.clear()  # Horovod alone has these tensors now, and Python knows them
try:
    for number in range(10 ** 9):
        hand_over(f"next.{number}")
except HorovodInternalError as error:
    last = f"next.{number}"
    print("broken:", error)
hvd.shutdown()
os.environ |= {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}
hvd.init()
assert float(hvd.allreduce(torch.ones(1), name=last)) == 1.0
hvd.shutdown()
print("alone")
"""


def meeting(store: Rendezvous, rank: int, size: int, job: str = MEET) -> subprocess.Popen[str]:
    """Start a member of a world that meets at this store, as session.py does."""
    env = {
        "HOROVOD_GLOO_MEET_AT_ONCE": "1", "HOROVOD_GLOO_IFACE": "lo", "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_TIMEOUT_SECONDS": "60",
        "HOROVOD_HOSTNAME": "localhost", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(store.port), "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size), "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1"
    }
    return subprocess.Popen([sys.executable, "-c", job],
                            env=os.environ | env,
                            stdout=subprocess.PIPE,
                            text=True)


@pytest.fixture
def store() -> Iterator[Rendezvous]:
    """A generation's store."""
    store = Rendezvous("127.0.0.1", 4 * ["127.0.0.1"], lambda *_: None, at_once=True)
    yield store
    store.close()


def test_each_member_puts_one_value_however_many_they_are(store: Rendezvous) -> None:
    """A rendezvous is two requests of each member. (It was some 5 for each pair of members.)"""
    members = [meeting(store, rank, 4) for rank in range(4)]
    assert [member.communicate(timeout=300)[0].strip() for member in members] == ["met"] * 4
    assert sorted(store.values) == [f"/global/at-once-4-{rank}" for rank in range(4)]


def test_the_others_live_when_one_never_comes(store: Rendezvous) -> None:
    """`hvd.init()` fails in each, as soon as the store reports it. (It aborted the process, F1.)"""
    members = [meeting(store, rank, 4) for rank in range(3)]
    wait_for("members", lambda: len(store.waiting) == 3, 60.0)
    store.abandon()
    outputs = [member.communicate(timeout=300)[0] for member in members]
    assert all("not met:" in text and "A member of the world is gone" in text
               for text in outputs), outputs
    assert [member.returncode for member in members] == [0, 0, 0]


def test_a_tensor_may_be_handed_over_while_its_world_breaks() -> None:
    """The other member dies, and the queue ends with tensors that only Horovod has. (The process
    stood still: each of two threads had a lock that the other one waited for.)"""
    store = Rendezvous("127.0.0.1", 2 * ["127.0.0.1"], lambda *_: None, at_once=True)
    members = [meeting(store, rank, 2, BREAK) for rank in range(2)]
    try:
        output = members[0].communicate(timeout=120)[0]
        assert "broken: Horovod has been shut down" in output and "alone" in output, output
    finally:
        members[0].kill()
        members[1].wait(60)
        store.close()


def connect_from(address: str, members: list[subprocess.Popen[str]]) -> list[socket.socket]:
    """Connect to every port on which one of the members listens, from an address of this
    machine."""
    ports = [
        connection.laddr.port for member in members
        for connection in psutil.Process(member.pid).net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    return [socket.create_connection(("127.0.0.1", port), 10.0, (address, 0)) for port in ports]


def test_who_connects_while_a_world_forms_takes_no_members_place(store: Rendezvous) -> None:
    """An intruder is first on each port on which a member waits for another one. (The member took
    him for its peer, and the world did not form.)"""
    members = [meeting(store, rank, 4) for rank in range(3)]
    wait_for("members", lambda: len(store.waiting) == 3, 60.0)
    intruders = connect_from("127.0.0.66", members)
    intruders[0].sendall(bytes(48))
    intruders[1].close()
    members.append(meeting(store, 3, 4))
    assert [member.communicate(timeout=300)[0].strip() for member in members] == ["met"] * 4
    assert len(intruders) == 3 * 3
    for intruder in intruders:
        intruder.close()


@pytest.mark.parametrize(("size", "at_once", "load", "seconds"), [(4, True, 0.5, 10.0),
                                                                  (4, True, 4.0, 10.0),
                                                                  (48, True, 1.0, 14.4),
                                                                  (48, True, 8.0, 28.8),
                                                                  (48, True, 100.0, 57.6),
                                                                  (4, False, 1.0, 10.0),
                                                                  (128, False, 1.0, 32.768)])
def test_the_time_out_grows_with_the_world_and_the_machines_load(size: int, at_once: bool,
                                                                 load: float,
                                                                 seconds: float) -> None:
    """A start that is slow is no death: heartbeats notice those."""
    assert gloo_timeout_s(10.0, size, at_once, load) == pytest.approx(seconds)


def test_a_worker_looks_less_often_the_longer_it_waits() -> None:
    """A short wait ends within half a millisecond of its collective, a long one within 2 % of what
    it lasted."""
    assert [poll_s(waited_s)
            for waited_s in (0.0, 0.02, 0.1, 1.0, 100.0)] == [0.0005, 0.0005, 0.002, 0.02, 0.02]
