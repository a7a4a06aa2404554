"""Words between worker and driver, over real sockets on the loopback."""

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
from netlab import wait_for
from ports import free_port

from elastic_trainer.edge.gate import SPARE, NoRequest, request_in
from elastic_trainer.edge.seal import Kind, Session, seal, worker_key
from elastic_trainer.wire import (
    MAX_BODY_BYTES,
    NONCE,
    SIGNATURE,
    WORKER,
    DriverClient,
    DriverUnreachable,
    WordRefused,
    WordServer,
)

KEY = b"the key of this run"
NAME = "a/0/1"
OWN = worker_key(KEY, NAME)
TIMEOUT_S = 10.0


class Ear:
    """A driver's end that repeats what it hears, and keeps what it heard and whom it refused."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.said_by: list[str] = []
        self.refused: list[tuple[str, str]] = []
        self.released = threading.Event()
        self.server = WordServer("127.0.0.1", KEY, self.answer, lambda *said: self.refused.append(said))
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, words: dict[str, Any], address: str) -> dict[str, Any]:
        self.said_by.append(words.pop("worker"))
        self.heard.append(words)
        if words.get("refuse"):
            raise WordRefused(words["refuse"])
        if words.get("hold"):
            assert self.released.wait(TIMEOUT_S)
        return {"heard": words, "from": address}

    def client(self, key: bytes = OWN, name: str = NAME) -> DriverClient:
        return DriverClient(self.address, name, key, TIMEOUT_S)

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()


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
    lines = {b"Content-Length": str(len(body)).encode()} | {k.encode().replace(b"_", b"-"): v
                                                            for k, v in headers.items()}
    return b"POST /word HTTP/1.1\r\n" + b"".join(b"%s: %s\r\n" % line for line in lines.items()) + b"\r\n" + body


def nonce() -> str:
    """Return a nonce of a session of its own."""
    return f"{secrets.token_hex(8)}-1"


def signed(body: bytes, key: bytes = OWN, name: str = NAME, said: bytes | None = None, **headers: bytes) -> bytes:
    """Write a request under a key; `said` is what is signed, where that is not the body."""
    number = nonce().encode()
    signature = seal(key, Kind.WORD, name.encode(), number, body if said is None else said).encode()
    return post(body, **({WORKER: name.encode(), NONCE: number, SIGNATURE: signature} | headers))


class Play:
    """What a stranger who took the driver's port answers: these bytes, to whoever asks."""

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


def test_the_words_arrive_and_the_answer_returns_when_both_have_the_key(ear: Ear) -> None:
    """Many words over one connection, each with its own answer; the driver sees the asker's address."""
    client = ear.client()
    for number in range(20):
        assert client.ask({"n": number, "text": "ä\n"}) == {"heard": {"n": number, "text": "ä\n"}, "from": "127.0.0.1"}
    client.close()
    assert [words["n"] for words in ear.heard] == list(range(20))
    assert ear.refused == []


def test_others_are_answered_when_one_answer_is_held_back(ear: Ear) -> None:
    """An answer that waits for news keeps nobody else waiting."""
    answers: list[dict[str, Any]] = []
    waiting = threading.Thread(target=lambda: answers.append(ear.client().ask({"hold": True})))
    waiting.start()
    for _ in range(5):
        assert ear.client().ask({"n": 1})["heard"] == {"n": 1}
    assert not answers
    ear.released.set()
    waiting.join(TIMEOUT_S)
    assert answers[0]["heard"] == {"hold": True}


def test_nobody_hears_a_word_when_the_key_is_wrong(ear: Ear) -> None:
    """The stranger gets an error, the driver says who it was, and the words are never parsed."""
    with pytest.raises(DriverUnreachable, match="403"):
        ear.client(b"another key").ask({"evict": "everybody"})
    assert ear.heard == []
    assert ear.refused == [("127.0.0.1", "signature does not match")]


REFUSED = {
    "unsigned": post(b"{}"),
    "rubbish": post(bytes(range(256))),
    "signed by another": signed(b"{}", key=b"another key"),
    "signature of other words": signed(b'{"a": 1}', said=b"{}"),
    "signature of another nonce": signed(b"{}", **{NONCE: nonce().encode()}),
    "signature of another name": signed(b"{}", **{WORKER: b"a/0/2"}),
    "no name": signed(b"{}", **{WORKER: b""}),
    "another kind of signature": post(b"{}", **{WORKER: NAME.encode(), NONCE: b"0123456789abcdef-1", SIGNATURE: seal(
        OWN, Kind.ANSWER, NAME.encode(), b"0123456789abcdef-1", b"{}").encode()}),
    "a nonce that is none": post(b"{}", **{WORKER: NAME.encode(), NONCE: b"n", SIGNATURE: seal(
        OWN, Kind.WORD, NAME.encode(), b"n", b"{}").encode()}),
    "no words": signed(b"[]"),
    "words in no name": signed(b"{}"),
    "signature that is no ASCII": post(b"{}", **{SIGNATURE: b"\xe9"}),
    "too long": post(b"", Content_Length=str(MAX_BODY_BYTES + 1).encode()),
    "negative length": post(b"", Content_Length=b"-1"),
    "length that is no number": post(b"", Content_Length=b"many"),
    "length in superscript": post(b"", Content_Length=b"\xb2"),
    "no length": b"POST /word HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_the_driver_refuses_and_goes_on_when_a_stranger_speaks(ear: Ear, kind: str) -> None:
    """Whatever is not signed is refused with 403 before it is read, and said, and the next worker is heard."""
    answer = send(ear.address, REFUSED[kind])
    assert ear.client().ask({"n": 1})["heard"] == {"n": 1}
    assert ear.heard == [{"n": 1}]
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert [address for address, _ in ear.refused] == ["127.0.0.1"]


@pytest.mark.parametrize("data", [b"", b"\0\1\2\r\n\r\n", b"\x16\x03\x01\x02\0\1\0", b"GET /word HTTP/1.1\r\n\r\n"])
def test_the_driver_goes_on_when_a_stranger_does_not_speak_as_workers_do(ear: Ear, data: bytes) -> None:
    """Port scanners, browsers and TLS are no words."""
    assert b" 200 " not in send(ear.address, data)
    assert ear.client().ask({"n": 1})["heard"] == {"n": 1}
    assert ear.heard == [{"n": 1}]


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return open, (str(self.file), "w")


@pytest.mark.parametrize("has_key", [False, True])
def test_nothing_is_executed_when_a_pickle_arrives(ear: Ear, tmp_path: Path, has_key: bool) -> None:
    """Not even from somebody who has the key (F10)."""
    body = pickle.dumps(Trap(tmp_path / "executed"))
    answer = send(ear.address, signed(body) if has_key else post(body))
    assert b" 200 " not in answer
    assert ear.client().ask({"n": 1})["heard"] == {"n": 1}
    assert list(tmp_path.iterdir()) == []
    assert ear.heard == [{"n": 1}]


def test_an_answer_is_taken_only_by_its_asker_when_it_was_recorded(ear: Ear) -> None:
    """A reply is signed with the asker's nonce: played back to another question it is a stranger's."""
    recorded = send(ear.address, signed(b'{"worker": "a/0/1", "n": 1}'))
    assert recorded.startswith(b"HTTP/1.1 200 ")
    with Play(recorded) as stranger, pytest.raises(DriverUnreachable, match="does not have this run's key"):
        DriverClient(stranger.address, NAME, OWN, TIMEOUT_S).ask({"n": 1})


FALSE_ANSWERS = {
    "unsigned": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    "signature that is no ASCII": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n%s: \xe9\r\n\r\n{}" % SIGNATURE.encode(),
    "cut off": b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{}",
    "no HTTP": b"220 mail.example.org ESMTP\r\n",
    "nothing": b"",
    "other status": b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("kind", FALSE_ANSWERS)
def test_the_driver_counts_as_unreachable_when_something_else_answers(kind: str) -> None:
    """Whatever listens there without the key is as good as nobody; the worker gets one kind of error."""
    with Play(FALSE_ANSWERS[kind]) as stranger, pytest.raises(DriverUnreachable):
        DriverClient(stranger.address, NAME, OWN, TIMEOUT_S).ask({})


def test_the_driver_counts_as_unreachable_when_nobody_listens() -> None:
    """The error names the address."""
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(DriverUnreachable, match=address):
        DriverClient(address, NAME, OWN, TIMEOUT_S).ask({})


def test_the_client_gives_up_when_the_driver_is_frozen() -> None:
    """A connection that nobody serves ends after the client's own time-out."""
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(DriverUnreachable):
        DriverClient(f"127.0.0.1:{listener.getsockname()[1]}", NAME, OWN, timeout_s=0.05).ask({})


def test_asking_again_connects_again_when_the_connection_broke(ear: Ear) -> None:
    """The same client goes on when what answers is the driver again."""
    honest = b'{"heard": "you"}'

    def answer(words: dict[str, Any], address: str) -> dict[str, Any]:
        if words["n"] == 1:
            raise RuntimeError("a fault of the driver's own, as planned")
        return dict(json.loads(honest))

    ear.server.answer = answer
    client = ear.client()
    with pytest.raises(DriverUnreachable):
        client.ask({"n": 1})
    assert client.ask({"n": 2}) == {"heard": "you"}


def test_nobody_is_turned_away_when_a_fleet_connects_before_the_driver_listens() -> None:
    """The listen queue holds them all, so that nobody waits a second for a dropped SYN (F5)."""
    server = WordServer("127.0.0.1", KEY, lambda words, address: words, lambda *_: None,
                        expected=lambda: 200)
    connections = [http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=TIMEOUT_S) for _ in range(200)]
    for connection in connections:
        connection.connect()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    body = b'{"worker": "a/0/1"}'
    for connection in connections:
        number = nonce()
        connection.request("POST", "/word", body, {WORKER: NAME, NONCE: number, SIGNATURE: seal(
            OWN, Kind.WORD, NAME.encode(), number.encode(), body)})
    assert [connection.getresponse().status for connection in connections] == [200] * 200
    for connection in connections:
        connection.close()
    server.shutdown()
    server.server_close()


def test_a_word_arrives_when_the_kept_connection_was_closed_since(ear: Ear, monkeypatch: pytest.MonkeyPatch) -> None:
    """A main thread that was silent for a whole generation is heard: its last word must not be lost."""
    ended = threading.Event()

    def end_of(connection: socket.socket, received: bytearray) -> None:
        ended.set()

    monkeypatch.setattr("elastic_trainer.wire.next_word", end_of)
    client = ear.client()
    assert client.ask({"n": 1})["heard"] == {"n": 1}
    assert ended.wait(TIMEOUT_S)
    assert client.ask({"n": 2})["heard"] == {"n": 2}


def test_a_word_is_refused_when_the_driver_says_so(ear: Ear) -> None:
    """It is signed, and played back from elsewhere: no answer, and a line in the diary."""
    with pytest.raises(DriverUnreachable, match="403"):
        ear.client().ask({"refuse": "played back"})
    assert ear.refused == [("127.0.0.1", "played back")]


def test_nobody_is_a_stranger_who_dies_in_the_middle_of_a_word(ear: Ear) -> None:
    """Its words are short, not wrong; its own death is told elsewhere."""
    whole = signed(b'{"worker": "a/0/1"}')
    assert send(ear.address, whole[:-3]) == b""
    assert not ear.refused and not ear.heard


# --- who says what to whom -------------------------------------------------------------------------------------------


def test_a_question_that_is_sent_back_is_no_answer() -> None:
    """What takes the driver's place needs the key, also to say what the worker has just said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def mirror() -> None:
            connection, _ = listener.accept()
            with connection:
                heard = bytearray()
                while not (found := request_in(heard, MAX_BODY_BYTES)):
                    heard += connection.recv(65536)
                body, signature = found[0].body, found[0].headers[SIGNATURE.lower()].encode()
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s: %s\r\n\r\n%s" % (
                    len(body), SIGNATURE.encode(), signature, body))

        thread = threading.Thread(target=mirror)
        thread.start()
        with pytest.raises(DriverUnreachable, match="does not have this run's key"):
            DriverClient(f"127.0.0.1:{listener.getsockname()[1]}", NAME, OWN, TIMEOUT_S).ask({"over": "finished"})
        thread.join()


def test_a_worker_cannot_speak_for_its_neighbour(ear: Ear) -> None:
    """Its key is for its own name, and its own name is for its own words."""
    neighbour = "a/1/2"
    with pytest.raises(DriverUnreachable, match="403"):
        ear.client(OWN, neighbour).ask({"n": 1})
    with pytest.raises(DriverUnreachable, match="403"):
        ear.client().ask({"worker": neighbour, "n": 1})
    assert ear.client(worker_key(KEY, neighbour), neighbour).ask({"n": 2})["heard"] == {"n": 2}
    assert ear.heard == [{"n": 2}] and ear.said_by == [neighbour]
    assert [why for _, why in ear.refused] == ["signature does not match", "a word of a/0/1's in another name"]


def test_a_connection_is_one_workers(ear: Ear) -> None:
    """Who has shown one worker's key on it does not become another one by a second word."""
    other = worker_key(KEY, "a/1/2")
    said = send(ear.address, signed(b'{"worker": "a/0/1"}') + signed(b'{"worker": "a/1/2"}', other, "a/1/2"))
    assert said.startswith(b"HTTP/1.1 200 ") and b" 403 " in said and ear.said_by == [NAME]


def test_the_answer_to_one_worker_is_none_to_its_neighbour(ear: Ear) -> None:
    """Two workers may say the same with the same nonce; each answer is for one of them."""
    client = ear.client()
    client.session.name, neighbour = "0" * 16, DriverClient("127.0.0.1:1", "a/1/2", worker_key(KEY, "a/1/2"), TIMEOUT_S)
    neighbour.session.name = "0" * 16
    with socket.create_connection(("127.0.0.1", ear.server.server_port), TIMEOUT_S) as connection:
        number, body = client.session.nonce(), b'{"worker": "a/0/1"}'
        connection.sendall(post(body, **{WORKER: NAME.encode(), NONCE: number.encode(), SIGNATURE: seal(
            OWN, Kind.WORD, NAME.encode(), number.encode(), body).encode()}))
        recorded = connection.recv(65536)
    assert recorded.startswith(b"HTTP/1.1 200 ")
    with Play(recorded) as stranger, pytest.raises(DriverUnreachable, match="does not have this run's key"):
        neighbour.address = stranger.address
        neighbour._connection.port = int(stranger.address.rpartition(":")[2])
        neighbour.ask({})


@pytest.mark.parametrize("body", [b"", b'{"worker": "a/0/1", "n": 1}'])
def test_a_word_that_is_played_back_is_refused_and_gets_no_thread(ear: Ear, body: bytes) -> None:
    """Somebody who has seen it needs no key for that: it was answered, and its connection was kept for 30 s."""
    word, threads = signed(body), threading.active_count()
    assert send(ear.address, word).startswith(b"HTTP/1.1 200 ")
    wait_for("end of its thread", lambda: threading.active_count() <= threads, TIMEOUT_S)
    for _ in range(20):
        assert send(ear.address, word).startswith(b"HTTP/1.1 403 ")
    assert ear.refused == 20 * [("127.0.0.1", "a word that was said before")]
    assert len(ear.heard) == bool(body) and ear.server.served.size == 0 and threading.active_count() <= threads


def test_no_word_is_refused_when_two_of_one_worker_overtake_each_other(ear: Ear) -> None:
    """A worker that has lost patience asks again over a new connection; the driver may hear that one first."""
    session = Session()
    numbers = [session.nonce() for _ in range(6)]

    def say(number: str) -> bytes:
        body = b'{"worker": "a/0/1", "n": "%s"}' % number.encode()
        return send(ear.address, post(body, **{WORKER: NAME.encode(), NONCE: number.encode(), SIGNATURE: seal(
            OWN, Kind.WORD, NAME.encode(), number.encode(), body).encode()}))

    order = [numbers[n] for n in (3, 1, 5, 0, 2, 4)]
    assert all(say(number).startswith(b"HTTP/1.1 200 ") for number in order)
    assert all(say(number).startswith(b"HTTP/1.1 403 ") for number in order)
    assert [words["n"] for words in ear.heard] == order


# --- bounds ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def held(ear: Ear) -> Iterator[Callable[..., socket.socket]]:
    """A maker of connections to the driver, from an address of the loopback; they are closed with the test."""
    with ExitStack() as stack:
        def hold(data: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
            connection = stack.enter_context(socket.create_connection(
                ("127.0.0.1", ear.server.server_port), TIMEOUT_S, (source, 0)))
            connection.sendall(data)
            return connection

        yield hold


@pytest.mark.parametrize("data", [b"", b"POST /word HTTP/1.1\r\nContent-Length: 1048576\r\n\r\n" + 100_000 * b"x"])
def test_a_connection_without_the_key_has_no_thread(ear: Ear, held: Callable[..., socket.socket], data: bytes) -> None:
    """It had one each, and a buffer of 1 MiB: 60 connections held 77 MiB."""
    threads = threading.active_count()
    for number in range(40):
        with suppress(ConnectionError):
            held(data, f"127.0.0.{number + 2}")
    assert ear.client().ask({"n": 1})["heard"] == {"n": 1}
    assert threading.active_count() <= threads + 1
    assert all(len(caller.received) < 8192 for caller in ear.server.gate.callers.values())


@pytest.mark.parametrize("sources", [1, 100])
def test_a_worker_is_heard_when_strangers_hold_all_connections(ear: Ear, held: Callable[..., socket.socket],
                                                               sources: int) -> None:
    """One connection too many closes the oldest of the address that has the most; the refused are told."""
    ear.server.expected, ear.server.gate.request_s = lambda: 6, 60.0
    for number in range(SPARE + 20):
        held(b"POST", f"127.0.1.{number % sources + 1}")
        if number % 10 == 0:
            assert ear.client().ask({"n": number})["heard"] == {"n": number}
    wait_for("refusals", lambda: len(ear.refused) >= 14, TIMEOUT_S)
    assert len(ear.server.gate.callers) <= SPARE + 6
    assert {why for _, why in ear.refused} == {"too many connections"}


def test_what_strangers_have_sent_is_bounded_in_all(ear: Ear, held: Callable[..., socket.socket]) -> None:
    """8 KiB of each connection that a run of 512 workers allows were 32 MiB; a worker is heard meanwhile."""
    ear.server.gate.most_bytes, ear.server.gate.request_s = 20_000, 60.0
    for number in range(40):
        held(b"POST /word HTTP/1.1\r\nX: " + 1000 * b"x", f"127.0.2.{number + 1}")
        assert ear.server.gate.held_bytes <= 20_000 + 4096
    assert ear.client().ask({"n": 1})["heard"] == {"n": 1}
    wait_for("refusals", lambda: len(ear.refused) >= 20, TIMEOUT_S)
    assert {why for _, why in ear.refused} == {"too many bytes"}
    assert ear.server.gate.held_bytes == sum(len(caller.received) for caller in ear.server.gate.callers.values())


def test_connections_without_the_key_are_bounded_however_many_workers_there_are(
        ear: Ear, held: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs memory, and a fleet may be of any size. Those with the key are bounded by the fleet alone."""
    monkeypatch.setattr("elastic_trainer.edge.gate.MOST_CONNECTIONS", 10)
    ear.server.expected, ear.server.gate.request_s = lambda: 100_000, 60.0
    clients = [ear.client() for _ in range(20)]
    for number in range(20):
        held(b"POST", f"127.0.3.{number + 1}")
        assert clients[number].ask({"n": number})["heard"] == {"n": number}
        assert len(ear.server.gate.callers) <= 11
    assert ear.server.served.size == 20 and {why for _, why in ear.refused} == {"too many connections"}
    for client in clients:
        client.close()


def test_a_run_of_512_workers_on_one_address_has_room(ear: Ear, held: Callable[..., socket.socket]) -> None:
    """The bound follows the number of workers that the run expects: none of them is closed for another one."""
    ear.server.expected = lambda: 200
    clients = [ear.client() for _ in range(200)]
    for turn in range(2):
        for client in clients:
            assert client.ask({"n": turn})["heard"] == {"n": turn}
    assert ear.refused == [] and ear.server.served.size == 200
    for client in clients:
        client.close()


def test_the_number_of_connections_with_the_key_is_bounded(ear: Ear) -> None:
    """Words that are played back show the key, too. The longest silent one is closed, and its worker asks again."""
    ear.server.expected = lambda: 1
    clients = [ear.client() for _ in range(SPARE + 5)]
    for client in clients:
        client.ask({"n": 1})
    wait_for("ends", lambda: ear.server.served.size == SPARE + 1, TIMEOUT_S)
    assert clients[-1].ask({"n": 2})["heard"] == clients[0].ask({"n": 2})["heard"] == {"n": 2}
    for client in clients:
        client.close()


def test_a_request_has_one_deadline(ear: Ear, held: Callable[..., socket.socket]) -> None:
    """A byte now and then does not extend it: it counted anew from each of them."""
    ear.server.gate.request_s = 0.5
    connection = held(b"POST ")
    connection.settimeout(0.05)
    began = time.monotonic()
    with pytest.raises(ConnectionError):
        while time.monotonic() - began < TIMEOUT_S:
            connection.sendall(b"x")
            with suppress(TimeoutError):
                if not connection.recv(1):
                    raise ConnectionResetError
    wait_for("word of it", lambda: ear.refused == [("127.0.0.1", "a request that did not end in time")], TIMEOUT_S)


def test_a_long_word_arrives_on_a_new_connection(ear: Ear) -> None:
    """Its sender shows the key by an empty word before it."""
    words = {"error": 50_000 * "x"}
    assert ear.client().ask(words)["heard"] == words
    assert ear.heard == [words] and ear.refused == []


def test_the_driver_goes_on_when_no_descriptor_is_free(ear: Ear, held: Callable[..., socket.socket],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes room, and takes the next connection when there is one; it does not ask again and again meanwhile."""
    held(b"POST")
    wait_for("connection", lambda: ear.server.gate.callers, TIMEOUT_S)
    asked, accept = [], socket.socket.accept

    def full(self: socket.socket) -> Any:
        if self is not ear.server.gate.listener:  # a server of another test's, in this process
            return accept(self)
        asked.append(self)
        if len(asked) < 4:
            raise OSError(errno.EMFILE, "no descriptor is free, as planned")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", full)
    assert ear.client().ask({"n": 1})["heard"] == {"n": 1}
    assert ear.refused == [("127.0.0.1", "no free descriptor")] and len(asked) < 10


def test_no_word_is_heard_when_there_is_no_thread(ear: Ear, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood takes the threads, too; the connection is closed, and its worker asks again."""
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("can't start new thread")))
        with pytest.raises(DriverUnreachable):
            ear.client().ask({"a": 1})
    assert ear.client().ask({"a": 1})["heard"] == {"a": 1}


@given(st.binary(max_size=300) | st.sampled_from([post(b"{}"), b"GET / HTTP/1.1\r\n\r\n"]), st.integers(0, 300))
def test_any_bytes_are_a_request_or_none(data: bytes, most: int) -> None:
    """Reading a request ends in a request, a wish for more, or one kind of error."""
    try:
        found = request_in(data, most)
    except NoRequest as error:
        assert error.code in (400, 403)
    else:
        assert found is None or (found[1] <= len(data) and len(found[0].body) <= most)


def test_rubbish_is_refused_and_told(ear: Ear) -> None:
    """Bytes that are no request never become a word."""
    send(ear.address, b"\x80\x04\x95rubbish\r\n\r\n")
    assert ear.refused == [("127.0.0.1", "bytes that are no word")]
    assert ear.client().ask({"a": 1})["heard"] == {"a": 1}
