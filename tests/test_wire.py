"""Messages between worker and driver, over real sockets on the loopback."""

from __future__ import annotations

import errno
import http.client
import json
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from netlab import Pickled
from ports import free_port
from waiting import wait_for

from elastic_trainer.wire.gate import SPARE, BadRequest, request_in
from elastic_trainer.wire.messages import (
    MAX_BODY_BYTES,
    NONCE,
    SIGNATURE,
    WORKER,
    DriverClient,
    DriverUnreachable,
    MessageRefused,
    MessageServer,
)
from elastic_trainer.wire.seal import Kind, Session, seal, worker_key

KEY = b"the key of this run"
NAME = "a/0/1"
OWN = worker_key(KEY, NAME)
TIMEOUT_S = 60.0


class Ear:
    """A driver's server that echoes each message. It keeps the messages and the refusals."""
    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.senders: list[str] = []
        self.refused: list[tuple[str, str]] = []
        self.released = threading.Event()
        self.server = MessageServer("127.0.0.1", KEY, self.answer,
                                    lambda *refusal: self.refused.append(refusal))
        self.address = f"127.0.0.1:{self.server.address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, message: dict[str, Any], address: str) -> dict[str, Any]:
        self.senders.append(message.pop("worker"))
        self.heard.append(message)
        if message.get("refuse"):
            raise MessageRefused(message["refuse"])
        if message.get("hold"):
            assert self.released.wait(TIMEOUT_S)
        return {"heard": message, "from": address}

    def client(self, key: bytes = OWN, name: str = NAME) -> DriverClient:
        return DriverClient(self.address, name, key, TIMEOUT_S)

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.close()


@pytest.fixture
def ear() -> Iterator[Ear]:
    ear = Ear()
    yield ear
    ear.close()


def send(address: str, data: bytes) -> bytes:
    """Send bytes and return the answer, up to the end of the connection."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def post(body: bytes, **headers: bytes) -> bytes:
    """Write a request by hand."""
    lines = {b"Content-Length": str(len(body)).encode()} | {
        k.encode().replace(b"_", b"-"): v for k, v in headers.items()}
    return b"POST /message HTTP/1.1\r\n" + b"".join(b"%s: %s\r\n" % line
                                                    for line in lines.items()) + b"\r\n" + body


def headers(number: str, body: bytes) -> dict[str, bytes]:
    """Sign a body as NAME, with this nonce."""
    signature = seal(OWN, Kind.REQUEST, NAME.encode(), number.encode(), body)
    return {WORKER: NAME.encode(), NONCE: number.encode(), SIGNATURE: signature.encode()}


def nonce() -> str:
    """Return a nonce of a session of its own."""
    return f"{secrets.token_hex(8)}-1"


def signed(body: bytes, key: bytes = OWN, name: str = NAME, under: bytes | None = None,
           **headers: bytes) -> bytes:
    """Write a request under a key. `under`: the bytes to sign instead of the body."""
    number = nonce().encode()
    signature = seal(key, Kind.REQUEST, name.encode(), number, body if under is None else under)
    return post(body,
                **({WORKER: name.encode(), NONCE: number, SIGNATURE: signature.encode()} | headers))


class Play:
    """A server on the driver's port without the key. It answers these bytes to any request."""
    def __init__(self, *answers: bytes):
        self.answers = answers
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._play, daemon=True).start()

    def _play(self) -> None:
        for answer in self.answers:
            connection, _ = self.listener.accept()
            with connection:
                request = b""
                while b"\r\n\r\n" not in request or not request.endswith(b"}"):
                    request += connection.recv(65536)
                connection.sendall(answer)

    def __enter__(self) -> Play:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()


def test_messages_arrive_and_answers_return_when_both_have_the_key(ear: Ear) -> None:
    """Many messages over one connection, each with its own answer. The driver sees the client's
    address."""
    client = ear.client()
    for number in range(20):
        assert client.ask({"n": number, "text": "ä\n"
                           }) == {"heard": {"n": number, "text": "ä\n"}, "from": "127.0.0.1"}
    client.close()
    assert [message["n"] for message in ear.heard] == list(range(20))
    assert ear.refused == []


def test_others_are_answered_when_one_answer_is_held_back(ear: Ear) -> None:
    """An answer that waits for news delays no other answer."""
    answers: list[dict[str, Any]] = []
    waiting = threading.Thread(target=lambda: answers.append(ear.client().ask({"hold": True})))
    waiting.start()
    for _ in range(5):
        assert ear.client().ask({"n": 1})["heard"] == {"n": 1}
    assert not answers
    ear.released.set()
    waiting.join(TIMEOUT_S)
    assert answers[0]["heard"] == {"hold": True}


def test_a_message_is_not_read_when_the_key_is_wrong(ear: Ear) -> None:
    """The client gets an error, the driver reports its address, and the body is not parsed."""
    with pytest.raises(DriverUnreachable, match="403"):
        ear.client(b"another key").ask({"evict": "all"})
    assert ear.heard == []
    assert ear.refused == [("127.0.0.1", "signature does not match")]


REFUSED = {
    "unsigned": post(b"{}"), "rubbish": post(bytes(range(256))),
    "signed by another": signed(b"{}", key=b"another key"),
    "signature of another body": signed(b'{"a": 1}', under=b"{}"),
    "signature of another nonce": signed(b"{}", **{NONCE: nonce().encode()}),
    "signature of another name": signed(b"{}", **{WORKER: b"a/0/2"}),
    "no name": signed(b"{}", **{WORKER: b""}), "another kind of signature": post(
        b"{}", **{
            WORKER: NAME.encode(), NONCE: b"0123456789abcdef-1",
            SIGNATURE: seal(OWN, Kind.ANSWER, NAME.encode(), b"0123456789abcdef-1", b"{}").encode()
        }), "a nonce that is none": post(
            b"{}", **{
                WORKER: NAME.encode(), NONCE: b"n",
                SIGNATURE: seal(OWN, Kind.REQUEST, NAME.encode(), b"n", b"{}").encode()
            }), "no object": signed(b"[]"), "message without a name": signed(b"{}"),
    "signature that is no ASCII": post(b"{}", **{SIGNATURE: b"\xe9"}),
    "too long": post(b"", Content_Length=str(MAX_BODY_BYTES + 1).encode()),
    "negative length": post(b"", Content_Length=b"-1"),
    "length that is no number": post(b"", Content_Length=b"many"),
    "length in superscript": post(b"", Content_Length=b"\xb2"),
    "no length": b"POST /message HTTP/1.1\r\n\r\n"}


@pytest.mark.parametrize("kind", REFUSED)
def test_the_driver_refuses_an_unauthenticated_message_and_goes_on(ear: Ear, kind: str) -> None:
    """An unsigned message gets 403 before it is parsed, the refusal is reported, and the next
    worker's message is answered."""
    answer = send(ear.address, REFUSED[kind])
    assert ear.client().ask({"n": 1})["heard"] == {"n": 1}
    assert ear.heard == [{"n": 1}]
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert [address for address, _ in ear.refused] == ["127.0.0.1"]


@pytest.mark.parametrize("data", [
    b"", b"\0\1\2\r\n\r\n", b"\x16\x03\x01\x02\0\1\0", b"GET /message HTTP/1.1\r\n\r\n"])
def test_the_driver_goes_on_when_a_client_uses_another_protocol(ear: Ear, data: bytes) -> None:
    """Port scanners, browsers and TLS clients get no answer of the protocol."""
    assert b" 200 " not in send(ear.address, data)
    assert ear.client().ask({"n": 1})["heard"] == {"n": 1}
    assert ear.heard == [{"n": 1}]


@pytest.mark.parametrize("has_key", [False, True])
def test_nothing_is_executed_when_a_pickle_arrives(ear: Ear, tmp_path: Path, has_key: bool) -> None:
    """Not even from a client with the key (F10)."""
    body = pickle.dumps(Pickled(f"touch {tmp_path}/executed"))
    answer = send(ear.address, signed(body) if has_key else post(body))
    assert b" 200 " not in answer
    assert ear.client().ask({"n": 1})["heard"] == {"n": 1}
    assert list(tmp_path.iterdir()) == []
    assert ear.heard == [{"n": 1}]


def test_a_recorded_answer_is_refused(ear: Ear) -> None:
    """An answer is signed with its request's nonce, so it is not valid for another request."""
    recorded = send(ear.address, signed(b'{"worker": "a/0/1", "n": 1}'))
    assert recorded.startswith(b"HTTP/1.1 200 ")
    with Play(recorded) as server, pytest.raises(DriverUnreachable,
                                                 match="does not have this run's key"):
        DriverClient(server.address, NAME, OWN, TIMEOUT_S).ask({"n": 1})


FALSE_ANSWERS = {
    "unsigned": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    "signature that is no ASCII": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n%s: \xe9\r\n\r\n{}" %
    SIGNATURE.encode(), "cut off": b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{}",
    "no HTTP": b"220 mail.example.org ESMTP\r\n", "nothing": b"",
    "other status": b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n"}


@pytest.mark.parametrize("kind", FALSE_ANSWERS)
def test_the_driver_counts_as_unreachable_when_something_else_answers(kind: str) -> None:
    """A server without the key counts as none: the worker gets one kind of error."""
    with Play(FALSE_ANSWERS[kind]) as server, pytest.raises(DriverUnreachable):
        DriverClient(server.address, NAME, OWN, TIMEOUT_S).ask({})


def test_the_driver_counts_as_unreachable_when_no_server_listens() -> None:
    """The error names the address."""
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(DriverUnreachable, match=address):
        DriverClient(address, NAME, OWN, TIMEOUT_S).ask({})


def test_the_client_gives_up_when_the_driver_is_frozen() -> None:
    """A connection without an answer ends after the client's own timeout."""
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(DriverUnreachable):
        DriverClient(f"127.0.0.1:{listener.getsockname()[1]}", NAME, OWN, timeout_s=0.05).ask({})


def test_asking_again_connects_again_when_the_connection_broke(ear: Ear) -> None:
    """The client recovers when the driver answers again."""
    honest = b'{"heard": "you"}'

    def answer(message: dict[str, Any], address: str) -> dict[str, Any]:
        if message["n"] == 1:
            raise RuntimeError("a fault of the driver's own, as planned")
        return dict(json.loads(honest))

    ear.server.answer = answer
    client = ear.client()
    with pytest.raises(DriverUnreachable):
        client.ask({"n": 1})
    assert client.ask({"n": 2}) == {"heard": "you"}


def test_all_are_served_when_a_fleet_connects_before_the_driver_accepts() -> None:
    """The listen queue holds them all, so no worker waits a second for a dropped SYN (F5)."""
    server = MessageServer("127.0.0.1", KEY, lambda message, address: message, lambda *_: None,
                           expected=lambda: 200)
    connections = [
        http.client.HTTPConnection("127.0.0.1", server.address[1], timeout=TIMEOUT_S)
        for _ in range(200)]
    for connection in connections:
        connection.connect()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    body = b'{"worker": "a/0/1"}'
    for connection in connections:
        number = nonce()
        connection.request(
            "POST", "/message", body, {
                WORKER: NAME, NONCE: number, SIGNATURE: seal(OWN, Kind.REQUEST, NAME.encode(),
                                                             number.encode(), body)})
    assert [connection.getresponse().status for connection in connections] == [200] * 200
    for connection in connections:
        connection.close()
    server.shutdown()
    server.close()


def test_a_message_arrives_when_the_kept_connection_was_closed_since(
        ear: Ear, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last message of a main thread that was silent for a whole generation is not lost."""
    ended = threading.Event()

    def end_of(connection: socket.socket, received: bytearray) -> None:
        ended.set()

    monkeypatch.setattr("elastic_trainer.wire.messages.next_request", end_of)
    client = ear.client()
    assert client.ask({"n": 1})["heard"] == {"n": 1}
    assert ended.wait(TIMEOUT_S)
    assert client.ask({"n": 2})["heard"] == {"n": 2}


def test_a_signed_message_is_refused_when_the_driver_refuses_it(ear: Ear) -> None:
    """A signed copy from another address gets no answer, and the refusal is reported."""
    with pytest.raises(DriverUnreachable, match="403"):
        ear.client().ask({"refuse": "played back"})
    assert ear.refused == [("127.0.0.1", "played back")]


def test_a_client_that_dies_within_its_message_is_not_counted_as_refused(ear: Ear) -> None:
    """Its message is incomplete, not wrong. Its death is reported elsewhere."""
    whole = signed(b'{"worker": "a/0/1"}')
    assert send(ear.address, whole[:-3]) == b""
    assert not ear.refused and not ear.heard


# --- kinds, names and nonces ----------------------------------------------------------------------


def test_a_question_that_is_sent_back_is_no_answer() -> None:
    """A server in the driver's place needs the key, also to send a message back."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def mirror() -> None:
            connection, _ = listener.accept()
            with connection:
                heard = bytearray()
                while not (found := request_in(heard, MAX_BODY_BYTES)):
                    heard += connection.recv(65536)
                body, signature = found[0].body, found[0].headers[SIGNATURE.lower()].encode()
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s: %s\r\n\r\n%s" %
                                   (len(body), SIGNATURE.encode(), signature, body))

        thread = threading.Thread(target=mirror)
        thread.start()
        with pytest.raises(DriverUnreachable, match="does not have this run's key"):
            DriverClient(f"127.0.0.1:{listener.getsockname()[1]}", NAME, OWN,
                         TIMEOUT_S).ask({"over": "finished"})
        thread.join()


def test_a_worker_cannot_send_in_its_neighbours_name(ear: Ear) -> None:
    """Its key is valid for its own name only, and the name in the body is checked, too."""
    neighbour = "a/1/2"
    with pytest.raises(DriverUnreachable, match="403"):
        ear.client(OWN, neighbour).ask({"n": 1})
    with pytest.raises(DriverUnreachable, match="403"):
        ear.client().ask({"worker": neighbour, "n": 1})
    assert ear.client(worker_key(KEY, neighbour), neighbour).ask({"n": 2})["heard"] == {"n": 2}
    assert ear.heard == [{"n": 2}] and ear.senders == [neighbour]
    assert [why for _, why in ear.refused
            ] == ["signature does not match", "a message of a/0/1 without its name"]


def test_a_connection_is_one_workers(ear: Ear) -> None:
    """A second message on it with another worker's key is refused."""
    other = worker_key(KEY, "a/1/2")
    answers = send(ear.address,
                   signed(b'{"worker": "a/0/1"}') + signed(b'{"worker": "a/1/2"}', other, "a/1/2"))
    assert answers.startswith(b"HTTP/1.1 200 ") and b" 403 " in answers and ear.senders == [NAME]


def test_the_answer_to_one_worker_is_none_to_its_neighbour(ear: Ear) -> None:
    """Two workers may send the same with the same nonce. Each answer is for one of them."""
    client = ear.client()
    client.session.name, neighbour = "0" * 16, DriverClient("127.0.0.1:1", "a/1/2",
                                                            worker_key(KEY, "a/1/2"), TIMEOUT_S)
    neighbour.session.name = "0" * 16
    with socket.create_connection(("127.0.0.1", ear.server.address[1]), TIMEOUT_S) as connection:
        number, body = client.session.nonce(), b'{"worker": "a/0/1"}'
        connection.sendall(post(body, **headers(number, body)))
        recorded = connection.recv(65536)
    assert recorded.startswith(b"HTTP/1.1 200 ")
    with Play(recorded) as server, pytest.raises(DriverUnreachable,
                                                 match="does not have this run's key"):
        neighbour.address = server.address
        neighbour._connection.port = int(server.address.rpartition(":")[2])
        neighbour.ask({})


@pytest.mark.parametrize("body", [b"", b'{"worker": "a/0/1", "n": 1}'])
def test_a_repeated_message_is_refused_and_gets_no_thread(ear: Ear, body: bytes) -> None:
    """A client that has recorded a message needs no key to repeat it. Such a message was answered,
    and its connection was kept for 30 s."""
    message, threads = signed(body), threading.active_count()
    assert send(ear.address, message).startswith(b"HTTP/1.1 200 ")
    wait_for("end of its thread", lambda: threading.active_count() <= threads, TIMEOUT_S)
    for _ in range(20):
        assert send(ear.address, message).startswith(b"HTTP/1.1 403 ")
    assert ear.refused == 20 * [("127.0.0.1", "a repeated message")]
    assert len(ear.heard) == bool(
        body) and ear.server.served.size == 0 and threading.active_count() <= threads


def test_no_message_is_refused_when_messages_of_one_worker_overtake_each_other(ear: Ear) -> None:
    """After a timeout a worker sends again over a new connection. The driver may read that message
    first."""
    session = Session()
    numbers = [session.nonce() for _ in range(6)]

    def sent(number: str) -> bytes:
        body = b'{"worker": "a/0/1", "n": "%s"}' % number.encode()
        return send(ear.address, post(body, **headers(number, body)))

    order = [numbers[n] for n in (3, 1, 5, 0, 2, 4)]
    assert all(sent(number).startswith(b"HTTP/1.1 200 ") for number in order)
    assert all(sent(number).startswith(b"HTTP/1.1 403 ") for number in order)
    assert [message["n"] for message in ear.heard] == order


# --- bounds ---------------------------------------------------------------------------------------

Hold = Callable[..., socket.socket]


@pytest.fixture
def held(ear: Ear) -> Iterator[Hold]:
    """A maker of connections to the driver, from an address of the loopback; they are closed with
    the test."""
    with ExitStack() as stack:

        def hold(data: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
            connection = stack.enter_context(
                socket.create_connection(("127.0.0.1", ear.server.address[1]), TIMEOUT_S,
                                         (source, 0)))
            connection.sendall(data)
            return connection

        yield hold


@pytest.mark.parametrize("data", [
    b"", b"POST /message HTTP/1.1\r\nContent-Length: 1048576\r\n\r\n" + 100_000 * b"x"])
def test_a_connection_without_the_key_has_no_thread(ear: Ear, held: Hold, data: bytes) -> None:
    """Each had one, and a buffer of 1 MiB: 60 connections held 77 MiB."""
    threads = threading.active_count()
    for number in range(40):
        with suppress(ConnectionError):
            held(data, f"127.0.0.{number + 2}")
    assert ear.client().ask({"n": 1})["heard"] == {"n": 1}
    assert threading.active_count() <= threads + 1
    assert all(len(client.received) < 8192 for client in ear.server.pending.values())


@pytest.mark.parametrize("sources", [1, 100])
def test_a_worker_is_served_when_others_hold_all_connections(ear: Ear, held: Hold,
                                                             sources: int) -> None:
    """Beyond the limit the oldest connection of the address with the most is closed, and reported.
    """
    ear.server.expected, ear.server.request_s = lambda: 6, 60.0
    for number in range(SPARE + 20):
        held(b"POST", f"127.0.1.{number % sources + 1}")
        if number % 10 == 0:
            assert ear.client().ask({"n": number})["heard"] == {"n": number}
    wait_for("refusals", lambda: len(ear.refused) >= 14, TIMEOUT_S)
    assert len(ear.server.pending) <= SPARE + 6
    assert {why for _, why in ear.refused} == {"too many connections"}


def test_the_bytes_of_incomplete_requests_are_bounded(ear: Ear, held: Hold) -> None:
    """8 KiB for each connection that a run of 512 workers allows were 32 MiB. Workers are served
    meanwhile."""
    ear.server.most_bytes, ear.server.request_s = 20_000, 60.0
    for number in range(40):
        held(b"POST /message HTTP/1.1\r\nX: " + 1000 * b"x", f"127.0.2.{number + 1}")
        assert ear.server.held_bytes <= 20_000 + 4096
    assert ear.client().ask({"n": 1})["heard"] == {"n": 1}
    wait_for("refusals", lambda: len(ear.refused) >= 20, TIMEOUT_S)
    assert {why for _, why in ear.refused} == {"too many bytes"}
    assert ear.server.held_bytes == sum(
        len(client.received) for client in ear.server.pending.values())


def test_connections_without_the_key_are_bounded_however_many_workers_there_are(
        ear: Ear, held: Hold) -> None:
    """Each costs memory, and a fleet may be of any size. Authenticated ones are bounded by the
    fleet alone."""
    ear.server.most_connections = 10
    ear.server.expected, ear.server.request_s = lambda: 100_000, 60.0
    clients = [ear.client() for _ in range(20)]
    for number in range(20):
        held(b"POST", f"127.0.3.{number + 1}")
        assert clients[number].ask({"n": number})["heard"] == {"n": number}
        assert len(ear.server.pending) <= 11
    assert ear.server.served.size == 20 and {why
                                             for _, why in ear.refused} == {"too many connections"}
    for client in clients:
        client.close()


def test_a_run_of_512_workers_on_one_address_has_room(ear: Ear, held: Hold) -> None:
    """The limit follows the number of workers that the run expects: none of them closes another.
    """
    ear.server.expected = lambda: 200
    clients = [ear.client() for _ in range(200)]
    for turn in range(2):
        for client in clients:
            assert client.ask({"n": turn})["heard"] == {"n": turn}
    assert ear.refused == [] and ear.server.served.size == 200
    for client in clients:
        client.close()


def test_the_number_of_connections_with_the_key_is_bounded(ear: Ear) -> None:
    """The connection that was silent the longest is closed, and its worker connects again."""
    ear.server.expected = lambda: 1
    clients = [ear.client() for _ in range(SPARE + 5)]
    for client in clients:
        client.ask({"n": 1})
    wait_for("ends", lambda: ear.server.served.size == SPARE + 1, TIMEOUT_S)
    assert clients[-1].ask({"n": 2})["heard"] == clients[0].ask({"n": 2})["heard"] == {"n": 2}
    for client in clients:
        client.close()


def test_a_request_has_one_deadline(ear: Ear, held: Hold) -> None:
    """Single bytes do not extend it, as they once did."""
    ear.server.request_s = 0.5
    connection = held(b"POST ")
    connection.settimeout(0.05)
    began = time.monotonic()
    with pytest.raises(ConnectionError):
        while time.monotonic() - began < TIMEOUT_S:
            connection.sendall(b"x")
            with suppress(TimeoutError):
                if not connection.recv(1):
                    raise ConnectionResetError
    wait_for("refusal", lambda: ear.refused == [("127.0.0.1", "an incomplete request")], TIMEOUT_S)


def test_a_long_message_arrives_on_a_new_connection(ear: Ear) -> None:
    """The client sends an empty signed message first."""
    message = {"error": 50_000 * "x"}
    assert ear.client().ask(message)["heard"] == message
    assert ear.heard == [message] and ear.refused == []


def test_the_driver_goes_on_when_no_descriptor_is_free(ear: Ear, held: Hold,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """It closes a connection and accepts the next one later, without a busy loop."""
    held(b"POST")
    wait_for("connection", lambda: ear.server.pending, TIMEOUT_S)
    asked, accept = [], socket.socket.accept

    def full(self: socket.socket) -> Any:
        if self is not ear.server.listener:  # a server of another test's, in this process
            return accept(self)
        asked.append(self)
        if len(asked) < 4:
            raise OSError(errno.EMFILE, "no descriptor is free, as planned")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", full)
    assert ear.client().ask({"n": 1})["heard"] == {"n": 1}
    assert ear.refused == [("127.0.0.1", "no free descriptor")] and len(asked) < 10


def test_a_connection_is_closed_when_no_thread_is_free(ear: Ear,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker connects again."""
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self:
                      (_ for _ in ()).throw(RuntimeError("can't start new thread")))
        with pytest.raises(DriverUnreachable):
            ear.client().ask({"a": 1})
    assert ear.client().ask({"a": 1})["heard"] == {"a": 1}


@given(st.binary(max_size=300) | st.sampled_from([post(b"{}"), b"GET / HTTP/1.1\r\n\r\n"]),
       st.integers(0, 300))
def test_any_bytes_are_a_request_or_none(data: bytes, most: int) -> None:
    """Reading a request ends in a request, in None, or in one kind of error."""
    try:
        found = request_in(data, most)
    except BadRequest as error:
        assert error.code in (400, 403)
    else:
        assert found is None or (found[1] <= len(data) and len(found[0].body) <= most)


def test_rubbish_is_refused_and_reported(ear: Ear) -> None:
    """Bytes that are no request never become a message."""
    send(ear.address, b"\x80\x04\x95rubbish\r\n\r\n")
    assert ear.refused == [("127.0.0.1", "not a request")]
    assert ear.client().ask({"a": 1})["heard"] == {"a": 1}
