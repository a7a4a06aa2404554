"""The rendezvous store of one generation: what members receive, what others do not, and who waits
for whom."""

from __future__ import annotations

import http.client
import pickle
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from netlab import Pickled
from waiting import wait_for

from elastic_trainer.driver.rendezvous import MAX_NON_MEMBERS, MESHES, NAMES_EACH, Rendezvous

DEADLINE_S = 60.0


class Store:
    """A generation of members with these addresses, by rank."""

    def __init__(self, members: Sequence[str] = ("127.0.0.1",), **how: Any) -> None:
        self.refused: list[tuple[str, str]] = []
        self.store = Rendezvous("127.0.0.1", members, lambda *refusal: self.refused.append(refusal),
                                **how)

    def ask(self, method: str, path: str, body: bytes | None = None, *, source: str = "127.0.0.1",
            headers: Mapping[str, str] = {}) -> tuple[int, bytes]:  # noqa: B006 (read only)
        connection = http.client.HTTPConnection("127.0.0.1", self.store.port, timeout=DEADLINE_S,
                                                source_address=(source, 0))
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        result = answer.status, answer.read()
        connection.close()
        return result

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.store.port), DEADLINE_S, (source, 0))

    def close(self) -> None:
        self.store.close()


@pytest.fixture
def rendezvous(request: pytest.FixtureRequest) -> Iterator[Store]:
    rendezvous = Store(**getattr(request, "param", {}))
    yield rendezvous
    rendezvous.close()


def test_members_find_what_members_have_put(rendezvous: Store) -> None:
    """Put and get; what is not there is 404. A member that leaves deletes nothing: others may still
    read."""
    assert rendezvous.ask("GET", "/global/0")[0] == 404
    assert rendezvous.ask("PUT", "/global/0", b"\0an address\xff")[0] == 200
    assert rendezvous.ask("GET", "/global/0") == (200, b"\0an address\xff")
    assert rendezvous.ask("DELETE", "/global/0")[0] == 200
    assert rendezvous.ask("GET", "/global/0") == (200, b"\0an address\xff")
    assert rendezvous.refused == []


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_non_member_reads_and_changes_nothing(rendezvous: Store, method: str) -> None:
    """An address that is no member's is refused and reported."""
    rendezvous.ask("PUT", "/global/0", b"an address")
    body = b"another" if method == "PUT" else None
    assert rendezvous.ask(method, "/global/0", body, source="127.0.0.2") == (403, b"")
    assert rendezvous.ask("GET", "/global/0") == (200, b"an address")
    assert rendezvous.refused == [("127.0.0.2", "not a member of this generation")]


@pytest.mark.parametrize("length", ["4353", "-1", "many", str(2**64), "9" * 5000])
def test_a_value_is_refused_when_it_is_too_big_or_of_no_known_size(rendezvous: Store,
                                                                   length: str) -> None:
    """Before a byte of it is read."""
    assert rendezvous.ask("PUT", "/global/0", headers={"Content-Length": length})[0] == 413
    assert rendezvous.ask("GET", "/global/0")[0] == 404
    assert rendezvous.ask("PUT", "/global/0", b"x" * 4352)[0] == 200


def test_a_value_without_a_length_is_refused(rendezvous: Store) -> None:
    """It would be kept as an empty one, and a peer would take that for an address."""
    with rendezvous.connect() as connection:
        connection.sendall(b"PUT /global/0 HTTP/1.1\r\n\r\n")
        assert b" 413 " in connection.recv(100)
    assert rendezvous.ask("GET", "/global/0")[0] == 404


def test_nothing_is_executed_when_a_pickle_is_put(rendezvous: Store, tmp_path: Path) -> None:
    """Under the names that Horovod's own server unpickles, bytes stay bytes (F10)."""
    trap = pickle.dumps(Pickled(f"touch {tmp_path}/executed"))
    for path in ("/worker_addresses/localhost:0", "/runfunc/func", "/runfunc_result/0"):
        assert rendezvous.ask("PUT", path, trap)[0] == 200
        assert rendezvous.ask("GET", path) == (200, trap)
    rendezvous.ask("GET", "/rank_and_size/localhost:0")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["/", "/global", "/a/b/c/d", "/../../etc/passwd", "//"])
def test_the_store_goes_on_when_a_path_is_none_of_its(rendezvous: Store, path: str) -> None:
    """It serves no files, and one bad request is one connection."""
    with rendezvous.connect() as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b" 200 " not in answer
    assert rendezvous.ask("PUT", "/global/0", b"x")[0] == 200


@pytest.mark.parametrize("rendezvous", [{"hold_s": 60.0}], indirect=True)
def test_who_asks_for_a_value_that_is_not_there_yet_is_answered_when_it_is(
        rendezvous: Store) -> None:
    """One request instead of one every 10 ms: the server is what an init waits for."""
    answers: list[tuple[int, bytes]] = []
    asking = [
        threading.Thread(target=lambda: answers.append(rendezvous.ask("GET", "/global/1")))
        for _ in range(3)
    ]
    for thread in asking:
        thread.start()
    wait_for("requests", lambda: len(rendezvous.store.waiting.get("/global/1", ())) == len(asking),
             DEADLINE_S)
    assert rendezvous.ask("PUT", "/global/1", b"an address")[0] == 200
    for thread in asking:
        thread.join(DEADLINE_S)
    assert answers == [(200, b"an address")] * 3


@pytest.mark.parametrize("rendezvous", [{"request_s": 0.2}], indirect=True)
def test_a_request_that_never_ends_delays_no_other(rendezvous: Store) -> None:
    """Others are served meanwhile; it is dropped after a while."""
    with rendezvous.connect() as connection:
        connection.sendall(b"PUT /global/0 HTTP/1.1\r\nContent-Length: 5\r\n\r\nha")
        wait_for("request", lambda: rendezvous.store.open, DEADLINE_S)
        rendezvous.store.request_s = 60.0  # for those that come later
        assert rendezvous.ask("PUT", "/global/1", b"x")[0] == 200
        assert connection.recv(100) == b""
    assert rendezvous.ask("GET", "/global/0")[0] == 404


@pytest.mark.parametrize("hangs_up", [True, False])
@pytest.mark.parametrize("rendezvous", [{"request_s": 2.0}], indirect=True)
def test_a_non_member_is_reported_though_its_bytes_are_no_request(rendezvous: Store,
                                                              hangs_up: bool) -> None:
    """Also a request without an end and a connection cut short."""
    with rendezvous.connect("127.0.0.2") as connection:
        connection.sendall(b"rubbish")
        if hangs_up:
            connection.shutdown(socket.SHUT_WR)
        assert b" 403 " in connection.recv(100)
    assert rendezvous.refused == [("127.0.0.2", "not a member of this generation")]


@pytest.mark.parametrize("rendezvous", [{"members": 1000 * ["127.0.0.1"]}], indirect=True)
def test_a_world_of_a_thousand_finds_each_other(rendezvous: Store) -> None:
    """A member's value grows with the world: 136 bytes for each other member."""
    value = b"x" * 136 * 1000
    assert rendezvous.ask("PUT", "/global/0", value)[0] == 200
    assert rendezvous.ask("GET", "/global/0") == (200, value)


# --- bounds ---------------------------------------------------------------------------------------


def test_the_first_value_of_a_name_stays(rendezvous: Store) -> None:
    """Another member's value cannot be replaced. A client whose answer was lost says the same
    again."""
    assert rendezvous.ask("PUT", "/global/0", b"an address")[0] == 200
    assert rendezvous.ask("PUT", "/global/0", b"an address")[0] == 200
    assert rendezvous.ask("PUT", "/global/0", b"another")[0] == 403
    rendezvous.ask("DELETE", "/global/0")
    assert rendezvous.ask("PUT", "/global/0", b"another")[0] == 403
    assert rendezvous.ask("GET", "/global/0") == (200, b"an address")
    assert rendezvous.refused == 2 * [("127.0.0.1", "another value for a name that has one")]


@pytest.mark.parametrize("rendezvous", [{"members": ["127.0.0.1", "127.0.0.2"], "at_once": True}],
                         indirect=True)
@pytest.mark.parametrize(
    "key", ["/global/at-once-2-0", "/global/at-once-2-2", "/global/at-once-3-1", "/global/1"])
def test_a_member_puts_its_own_name_only_where_all_meet_at_once(rendezvous: Store,
                                                                key: str) -> None:
    """Neither another host's, nor that of a rank or world that there is not, before or after its
    owner."""
    assert rendezvous.ask("PUT", key, b"false", source="127.0.0.2")[0] == 403
    assert rendezvous.ask("PUT", "/global/at-once-2-0", address(0, 1))[0] == 200
    assert rendezvous.ask("PUT", "/global/at-once-2-1", address(1, 0), source="127.0.0.2")[0] == 200
    assert rendezvous.ask("GET", "/global/at-once-2-1", source="127.0.0.2") == (200, address(0, 1))
    assert rendezvous.refused == [("127.0.0.2", "a name that is another member's, or none")]


@pytest.mark.parametrize("value", [b"x", 4352 * b"x"])
def test_names_and_bytes_of_a_store_are_bounded(rendezvous: Store, value: bytes) -> None:
    """By the size of its generation. A member could fill the driver's memory."""
    answers = [
        rendezvous.ask("PUT", f"/global/{number}", value)[0] for number in range(NAMES_EACH + 4)
    ]
    kept = answers.index(403)
    assert answers == kept * [200] + (len(answers) - kept) * [403]
    assert kept == (NAMES_EACH if value == b"x" else MESHES - 1)
    assert rendezvous.ask("GET", "/global/0") == (200, value)


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"])
@pytest.mark.parametrize("rendezvous", [{"request_s": 60.0}], indirect=True)
def test_idle_connections_keep_no_member_out(rendezvous: Store, source: str) -> None:
    """One too many of an address closes the oldest of it that has sent no whole request."""
    with ExitStack() as stack:
        for _ in range(MAX_NON_MEMBERS + 20):
            stack.enter_context(rendezvous.connect(source))
        assert rendezvous.ask("PUT", "/global/0", b"an address")[0] == 200
        wait_for("refusals", lambda: len(rendezvous.refused) >= 20, DEADLINE_S)
        assert set(rendezvous.refused) == {(source, "too many connections")}
        assert sum(map(len, rendezvous.store.open.values())) <= MAX_NON_MEMBERS + 8


@pytest.mark.parametrize("rendezvous", [{"request_s": 0.3}], indirect=True)
def test_an_answer_that_is_not_read_is_dropped(rendezvous: Store) -> None:
    """Its bytes would stay in the driver's memory for ever. (The kernel takes 4 MiB of them,
    tcp_wmem.)"""
    rendezvous.store.put("/global/0", 9_000_000 * b"x")
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", rendezvous.store.port))
        reader.sendall(b"GET /global/0 HTTP/1.0\r\n\r\n")
        wait_for("request", lambda: any(rendezvous.store.open.values()), DEADLINE_S)
        wait_for("end", lambda: not any(rendezvous.store.open.values()), DEADLINE_S)


@pytest.mark.parametrize("rendezvous", [{"hold_s": 0.01}], indirect=True)
def test_names_that_were_asked_for_in_vain_leave_nothing(rendezvous: Store) -> None:
    """Each left an entry."""
    for number in range(5):
        assert rendezvous.ask("GET", f"/global/{number}")[0] == 404
    wait_for("end", lambda: not any(rendezvous.store.open.values()), DEADLINE_S)
    assert rendezvous.store.waiting == {}


def test_who_waits_is_let_go_when_the_store_closes() -> None:
    """A generation without members leaves no thread and no connection."""
    rendezvous = Store(hold_s=60.0)
    with rendezvous.connect() as connection:
        connection.sendall(b"GET /global/0 HTTP/1.0\r\n\r\n")
        wait_for("request", lambda: rendezvous.store.waiting, DEADLINE_S)
        rendezvous.close()
        assert connection.recv(100) == b""


# --- all at once: the requests of a Horovod with 08-meet-at-once.patch ----------------------------

def address(of: int, towards: int) -> bytes:
    """Return what one member has put for another."""
    return f"<{of} for {towards}>".encode()


@pytest.mark.parametrize("rendezvous", [{"hold_s": 60.0, "members": 7 * ["127.0.0.1"]}],
                         indirect=True)
@pytest.mark.parametrize("size", [2, 3, 7])
def test_each_member_gets_what_all_others_have_put_for_it_when_the_last_is_there(
        rendezvous: Store, size: int) -> None:
    """Two requests each, however many they are. The others wait for the last one."""
    answers: dict[int, tuple[int, bytes]] = {}

    def meet(rank: int) -> None:
        mine = b"".join(address(rank, towards) for towards in range(size) if towards != rank)
        assert rendezvous.ask("PUT", f"/global/at-once-{size}-{rank}", mine)[0] == 200
        answers[rank] = rendezvous.ask("GET", f"/global/at-once-{size}-{rank}")

    members = [threading.Thread(target=meet, args=(rank,)) for rank in range(size)]
    for member in members[:-1]:
        member.start()
    wait_for("requests", lambda: len(rendezvous.store.waiting) == size - 1, DEADLINE_S)
    members[-1].start()
    for member in members:
        member.join(DEADLINE_S)
    assert answers == {rank: (200, b"".join(address(of, rank) for of in range(size) if of != rank))
                       for rank in range(size)}


@pytest.mark.parametrize("rendezvous", [{"hold_s": 0.1}], indirect=True)
def test_a_member_asks_again_when_the_last_one_is_late(rendezvous: Store) -> None:
    """No answer is held back for ever; another world's members are not waited for, and not given
    away."""
    assert rendezvous.ask("PUT", "/global/at-once-2-0", address(0, 1))[0] == 200
    assert rendezvous.ask("PUT", "/other/at-once-2-1", address(1, 0))[0] == 200
    assert rendezvous.ask("PUT", "/global/at-once-3-1", 2 * address(1, 0))[0] == 200
    assert rendezvous.ask("GET", "/global/at-once-2-0")[0] == 404
    assert rendezvous.ask("PUT", "/global/at-once-2-1", address(1, 0))[0] == 200
    assert rendezvous.ask("GET", "/global/at-once-2-0") == (200, address(1, 0))


@pytest.mark.parametrize("rendezvous", [{"hold_s": 60.0}], indirect=True)
def test_waiting_members_are_answered_when_one_will_not_come(rendezvous: Store) -> None:
    """By one byte, which no address is; those who ask later too."""
    assert rendezvous.ask("PUT", "/global/at-once-3-0", 2 * address(0, 1))[0] == 200
    answers: list[tuple[int, bytes]] = []
    asking = threading.Thread(
        target=lambda: answers.append(rendezvous.ask("GET", "/global/at-once-3-0")))
    asking.start()
    wait_for("request", lambda: rendezvous.store.waiting, DEADLINE_S)
    rendezvous.store.abandon()
    asking.join(DEADLINE_S)
    assert answers == [(200, b"x")]
    assert rendezvous.ask("GET", "/global/at-once-3-1") == (200, b"x")
