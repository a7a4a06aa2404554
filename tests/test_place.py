"""A worker's place: our driver's client against a real server whose answers follow a script, and
nobody's."""

from __future__ import annotations

import http.server
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from waiting import until

from elastic_trainer.config import ConfigError, Launch, Limits
from elastic_trainer.wire.heartbeat import Heartbeat, RankAssignment
from elastic_trainer.wire.messages import MessageServer
from elastic_trainer.wire.seal import worker_key
from elastic_trainer.world.our_driver import InvalidAnswer, OurDriver
from elastic_trainer.world.place import Dismissed, Driver, DriverHooks, RunOver, Wants
from elastic_trainer.world.plain_driver import PlainDriver
from elastic_trainer.world.reach import (
    close_probes,
    interface_towards,
    open_listener,
    own_address_towards,
    unreachable,
)

RUN_KEY = b"the key of this run"
KEY = worker_key(RUN_KEY, "a/0/1")
LIMITS = Limits(heartbeat_s=0.02, silence_s=120.0, driver_lost_s=60.0)
SOON_LOST = replace(LIMITS, driver_lost_s=0.3)
DEADLINE_S = 60.0
GRAVES: list[socket.socket] = []
Words = dict[str, Any]
Make = Callable[..., OurDriver]
"""Makes a worker's connection to its driver."""
LEFT_OUT = vars(Heartbeat(count=0, phase="", generation=0))
"""What a worker leaves out of a message, because it is the default."""


class Script:
    """A driver that answers what the test says; `news` may be a value or a function of the worker's
    words."""

    def __init__(self) -> None:
        self.heard: list[Words] = []
        self.news: Words | Callable[[Words], Words] = {}
        self.changed = threading.Condition()
        self.is_over = False
        self.server = MessageServer("127.0.0.1", RUN_KEY, self.answer, lambda *_: None)
        self.address = f"127.0.0.1:{self.server.address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, words: Words, address: str) -> Words:
        with self.changed:
            if self.is_over:
                raise ConnectionError("the driver is gone")
            words = LEFT_OUT | words
            self.heard.append(words)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.told(words)["version"] != words["seen"],
                                  words["hold_s"])
            return self.told(words)

    def told(self, words: Words) -> Words:
        news = self.news(words) if callable(self.news) else self.news
        return {**news, "version": repr(news)}

    def say(self, news: Words | Callable[[Words], Words]) -> None:
        with self.changed:
            self.news = news
            self.changed.notify_all()

    def wait_for(self, seen: Callable[[Words], Any]) -> Words:
        """Wait until a matching message has come, and return it."""
        with self.changed:
            assert self.changed.wait_for(lambda: any(seen(w) for w in self.heard),
                                         DEADLINE_S), self.heard[-5:]
            return next(w for w in self.heard if seen(w))

    def stop(self) -> None:
        """Go; our port stays ours. Beats ask it a little longer, and may else ask another test's
        Gloo, which takes us for a peer.
        """
        self.server.shutdown()
        self.server.close()
        GRAVES.append(socket.socket())
        GRAVES[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        GRAVES[-1].bind(self.server.address)


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    yield script
    script.stop()


@pytest.fixture
def worker(script: Script) -> Iterator[Make]:
    """Return a maker of workers; their beats end with the test."""
    made = []

    def make(**changes: Any) -> OurDriver:
        driver = OurDriver(
            Launch(driver=script.address, key=KEY, worker="a/0/1",
                   **({"limits": LIMITS} | changes)))
        made.append(driver)
        return driver

    yield make
    for driver in made:
        driver.report(phase="finished", step=0)
    script.is_over = True
    for driver in made:

        def has_ended(driver: OurDriver = driver) -> bool:
            driver._heard_at = -math.inf  # it has lost its driver long ago
            return not driver._heartbeats.is_alive()

        until(has_ended)


def place(generation: int, rank: int = 0, size: int = 2, **news: Any) -> Words:
    seat = {"generation": generation, "rank": rank, "size": size, "local_rank": 0, "local_size": 1,
            "address": "127.0.0.1", "port": 4711}
    return {"place": seat, "dead": [], "notice": "", **news}


def placed_when_accepted(generation: int) -> Callable[[Words], Words]:
    """Offer a place in round 7, and give it to who accepts that round."""
    return lambda words: place(generation, rank=1, size=3) if words["accepted"
                                                                    ] == 7 else {"offer": 7}


# --- a place --------------------------------------------------------------------------------------


def test_a_worker_has_its_place_when_it_has_accepted_the_offer(
        script: Script, worker: Make) -> None:
    """It reports that it is ready, receives the offer, accepts it, and receives its place."""
    script.say(placed_when_accepted(1))
    driver = worker()
    assert driver.next_place(False, 0) == RankAssignment(generation=1, rank=1, size=3, local_rank=0,
                                                         local_size=1, address="127.0.0.1",
                                                         port=4711)
    assert [(w["phase"], w["accepted"], w["holds_state"]) for w in script.heard] == [
        ("standby", 0, False), ("standby", 7, False)]
    assert {(w["worker"], w["pid"]) for w in script.heard} == {("a/0/1", os.getpid())}


@pytest.fixture
def deaf() -> Iterator[socket.socket]:
    """A listener whose queue is full: the kernel drops further SYNs silently, as a cut line
    does."""
    full = [socket.create_server(("127.0.0.1", 0), backlog=0)]
    while len(full) < 10:
        more = socket.socket()
        more.setblocking(False)
        more.connect_ex(full[0].getsockname())
        full.append(more)
    yield full[0]
    for one in full:
        one.close()


def test_only_silence_is_no_way_through(deaf: socket.socket) -> None:
    """Who answers, or refuses since its process is gone, is reached."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        peers = {
            "a/0/1": ["127.0.0.1", listening.getsockname()[1]], "b/0/2": ["127.0.0.1",
                                                                          free_port()],
            "c/0/3": ["127.0.0.1", deaf.getsockname()[1]]
        }
        assert unreachable(peers, 0.1) == ["c/0/3"]
        assert unreachable({}, 0.1) == []


def test_an_offer_is_accepted_when_its_members_have_been_tried(script: Script, worker: Make,
                                                               deaf: socket.socket) -> None:
    """The message that accepts reports the peers out of reach; before that nothing is
    claimed."""
    reach = {"b/0/2": ["127.0.0.1", deaf.getsockname()[1]]}
    script.say(lambda words: place(1) if words["accepted"] == 7 else {"offer": 7, "reach": reach})
    driver = worker()
    driver.next_place(False, 0)
    assert [(w["accepted"], w["unreachable"]) for w in script.heard] == [(0, None), (7, ["b/0/2"])]


def test_a_worker_can_be_reached_at_its_listener(script: Script, worker: Make) -> None:
    """Any number of times: each connection is closed at once."""
    driver = worker()
    driver.start(DriverHooks(), False, 0)
    listener = script.wait_for(lambda w: w["probe_port"])["probe_port"]
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", listener), DEADLINE_S) as probe:
            probe.settimeout(DEADLINE_S)
            assert probe.recv(1) == b""


def test_a_listener_lets_all_go_who_can_wait_there() -> None:
    """At each heartbeat: a queue that others keep full would make this worker unreachable for its
    peers."""
    with ExitStack() as stack:
        listener = stack.enter_context(open_listener("127.0.0.1:1"))
        probes = [stack.enter_context(socket.create_connection(listener.getsockname(), DEADLINE_S))
                  for _ in range(300)]
        close_probes(listener)
        for probe in probes:
            probe.setblocking(False)
            assert probe.recv(1) == b""


def test_a_worker_waits_for_a_later_generation_when_its_own_has_ended(
        script: Script, worker: Make) -> None:
    """Its old place is no answer, however often it is sent. It reports what it holds."""
    driver = worker()
    script.say(place(1))
    assert driver.next_place(False, 0).generation == 1
    found: list[RankAssignment] = []
    waiting = threading.Thread(target=lambda: found.append(driver.next_place(True, 12)))
    waiting.start()
    word = script.wait_for(lambda w: w["phase"] == "waiting")
    assert (word["generation"], word["holds_state"], word["step"]) == (1, True, 12)
    script.wait_for(lambda w: w["count"] > word["count"] + 2)
    assert not found
    script.say(place(2, rank=1))
    waiting.join(DEADLINE_S)
    assert (found[0].generation, found[0].rank) == (2, 1)


@pytest.mark.parametrize("news", [{"evicted": True}, {"leave": True}, {"finished": True}])
def test_a_newcomer_leaves_when_it_is_not_wanted(script: Script, worker: Make, news: Words) -> None:
    """Evicted, let go, or too late."""
    script.say(news)
    with pytest.raises(Dismissed):
        worker().next_place(False, 0)


def test_a_member_is_over_when_the_others_have_finished(script: Script, worker: Make) -> None:
    """It had a place, so it holds the last step or can say that it does not."""
    script.say(place(1))
    driver = worker()
    driver.next_place(False, 0)
    script.say({"finished": True})
    with pytest.raises(RunOver) as over:
        driver.next_place(True, 5)
    assert over.value.verdict == "finished"


def test_the_verdict_and_its_reason_arrive_when_the_attempt_is_over(
        script: Script, worker: Make) -> None:
    """Before anything else that the driver says."""
    script.say({"over": "user_error", "detail": "rank 2 raised ValueError", "evicted": True})
    with pytest.raises(RunOver) as over:
        worker().next_place(False, 0)
    assert (over.value.verdict, over.value.detail) == ("user_error", "rank 2 raised ValueError")


def test_writes_while_it_waits_when_the_driver_asks_for_it(script: Script, worker: Make) -> None:
    """It goes on waiting, and says so; after the end of the attempt it is asked once more who
    writes."""
    script.say(place(1))
    driver, written = worker(), threading.Event()
    driver.start(DriverHooks(write_alone=written.set), False, 0)
    driver.next_place(False, 0)
    waiting = threading.Thread(target=lambda: pytest.raises(RunOver, driver.next_place, True, 5))
    waiting.start()
    assert not driver.is_writer(0, 5.0) and driver.is_writer(0, 100.0)
    script.say({"writes": True})
    assert written.wait(DEADLINE_S)
    script.say({"over": "failed", "detail": "", "writes": True})
    waiting.join(DEADLINE_S)
    assert driver.is_writer(3, 0.0)


def test_the_attempt_is_over_for_a_worker_without_a_driver() -> None:
    """It asks for `driver_lost_s`, no shorter."""
    address, started = f"127.0.0.1:{free_port()}", time.monotonic()
    with pytest.raises(RunOver, match="driver lost"):
        OurDriver(Launch(driver=address, key=KEY, worker="a/0/1",
                         limits=SOON_LOST)).next_place(False, 0)
    assert time.monotonic() - started >= SOON_LOST.driver_lost_s


def test_a_worker_waits_no_second_time_when_its_heartbeats_have_lost_the_driver() -> None:
    """Its time starts at the driver's last answer, not at the end of the step."""
    driver = OurDriver(
        Launch(driver=f"127.0.0.1:{free_port()}", key=KEY, worker="a/0/1", limits=LIMITS))
    driver._heard_at -= LIMITS.driver_lost_s
    started = time.monotonic()
    with pytest.raises(RunOver, match="driver lost"):
        driver.next_place(True, 3)
    assert time.monotonic() - started < LIMITS.driver_lost_s


def test_the_attempt_is_over_for_a_worker_when_its_driver_is_frozen() -> None:
    """A driver that takes messages and never answers is lost, too."""
    limits = Limits(heartbeat_s=0.02, driver_lost_s=1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        launch = Launch(driver=f"127.0.0.1:{listener.getsockname()[1]}", key=KEY, worker="a/0/1",
                        limits=limits)
        with pytest.raises(RunOver, match="driver lost"):
            OurDriver(launch).next_place(False, 0)


def test_a_worker_goes_on_when_its_driver_was_away_for_a_moment(
        script: Script, worker: Make) -> None:
    """A failed message is sent again."""
    failures = iter([True, True, True])

    def news(words: Words) -> Words:
        if next(failures, False):
            raise RuntimeError("a fault of the driver's own, as planned")
        return place(1)

    script.say(news)
    assert worker().next_place(False, 0).generation == 1


def test_an_answer_of_another_form_is_an_error_at_once(script: Script, worker: Make) -> None:
    """A driver of another version: to ask again for `driver_lost_s` would not help. A worker that
    trains stops after its step."""
    script.say({"offer": "seven"})
    with pytest.raises(InvalidAnswer, match="Install the same version of elastic-trainer"):
        worker().next_place(False, 0)
    driver = worker()
    training(script, driver)
    script.say({"offer": "seven"})
    until(lambda: driver.wants().stop)
    driver.report(error="a traceback")


# --- heartbeats -----------------------------------------------------------------------------------

def training(script: Script, driver: OurDriver, **news: Any) -> list[str]:
    """Bring a worker into generation 1, and return where its `on_broken` is noted."""
    broken: list[str] = []
    script.say(place(1, **news))
    driver.start(DriverHooks(on_broken=lambda: broken.append(threading.current_thread().name)),
                 False, 0)
    driver.next_place(False, 0)
    driver.note("training", 3)
    return broken


def test_the_driver_gets_heartbeats_when_a_worker_does_nothing(
        script: Script, worker: Make) -> None:
    """Beats come by themselves, from the start, and say what was noted last."""
    driver = worker()
    driver.start(DriverHooks(), False, 0)
    first = script.wait_for(lambda w: w["phase"] == "standby")
    script.wait_for(lambda w: w["count"] > first["count"] + 5)
    driver.note("training", 42)
    word = script.wait_for(lambda w: w["step"] == 42)
    assert (word["phase"], word["holds_state"]) == ("training", True)


def test_no_two_messages_have_one_number_when_heartbeats_and_questions_mix(
        script: Script, worker: Make) -> None:
    """So the driver can distinguish an old message from a new one."""
    driver = worker()
    driver.start(DriverHooks(), False, 0)
    script.say(lambda words: place(1) if words["count"] > 60 else {"offer": words["count"]})
    driver.next_place(False, 0)
    counts = [w["count"] for w in script.heard]
    assert len(counts) == len(set(counts)) and min(counts) == 1
    assert driver.count >= max(counts)


@pytest.mark.parametrize("news", [place(1, dead=[1]), {"evicted": True}], ids=["dead", "evicted"])
def test_the_sockets_are_closed_when_a_member_is_dead(script: Script, worker: Make,
                                                      news: Words) -> None:
    """`on_broken` runs in the heartbeats' thread, while the main thread sits in a collective. For
    the others a worker that is evicted is dead already."""
    driver = worker()
    broken = training(script, driver)
    assert not driver.is_broken()
    script.say(news)
    until(lambda: broken and driver.is_broken())
    assert set(broken) == {"heartbeats"}


def test_nothing_is_closed_when_the_dead_are_of_another_generation(
        script: Script, worker: Make) -> None:
    """Late news of an earlier generation breaks no later one."""
    driver = worker()
    broken = training(script, driver)
    script.say(place(2))
    driver.next_place(True, 4)
    heard = len(script.heard)
    script.say(place(1, dead=[1]))
    script.wait_for(lambda w: w["count"] > heard + 5)
    assert not broken and not driver.is_broken()


def test_nothing_is_closed_when_a_worker_is_not_training(script: Script, worker: Make) -> None:
    """Without a place there are no peers."""
    driver, broken = worker(), list[int]()
    script.say(place(1, dead=[1]))
    driver.start(DriverHooks(on_broken=lambda: broken.append(1)), False, 0)
    script.wait_for(lambda w: w["count"] > 5)
    assert not broken


@pytest.mark.parametrize(("news", "wants"), [
    (place(1, notice="join"), Wants(change=True)),
    (place(1, notice="leave", unwanted=True), Wants(change=True, drains=True, host_leaves=True)),
    ({"over": "interrupted", "detail": ""}, Wants(stop=True))], ids=["join", "leave", "over"])
def test_a_worker_wants_what_its_driver_expects(script: Script, worker: Make, news: Words,
                                             wants: Wants) -> None:
    """A change of the world is no stop of the attempt."""
    driver = worker()
    training(script, driver)
    assert driver.wants() == Wants()
    script.say(news)
    until(lambda: driver.wants() == wants)


def test_a_change_is_wanted_when_this_worker_drains(script: Script, worker: Make) -> None:
    """At once, and the driver hears it with the next beat."""
    driver = worker()
    training(script, driver)
    driver.drain()
    assert driver.wants().change
    script.wait_for(lambda w: w["drains"])


def test_a_stop_is_wanted_when_the_driver_is_lost(script: Script, worker: Make) -> None:
    """A worker without a driver does not train on as a zombie."""
    driver = worker(limits=SOON_LOST)
    training(script, driver)

    def nothing(words: Words) -> Words:
        raise RuntimeError("a fault of the driver's own, as planned")

    script.say(nothing)
    until(lambda: driver.wants().stop)
    script.say(place(1))
    until(lambda: not driver.wants().stop)


# --- what a worker says ---------------------------------------------------------------------------


@pytest.mark.parametrize("facts", [{"error": "Traceback …\nValueError: bad sample"},
                                   {"phase": "finished", "step": 12}])
def test_the_driver_has_a_report_before_the_worker_goes_on(script: Script, worker: Make,
                                                           facts: Words) -> None:
    """The whole text of the user's error; that the last vote has passed, with the steps."""
    driver = worker()
    driver.start(DriverHooks(), False, 0)
    driver.report(**facts)
    assert any(facts.items() <= words.items() for words in script.heard)


def test_the_others_go_on_when_a_worker_fails_before_it_stands_ready(
        script: Script, worker: Make) -> None:
    """What fails while it boots may be its host's fault, so it does not end the run."""
    worker().report(error="a traceback")
    assert script.heard == []


def test_the_driver_gets_a_message_when_a_worker_starts_anew_in_place(
        script: Script, worker: Make) -> None:
    """From whatever thread notices."""
    worker().revive_soon()
    script.wait_for(lambda w: w["phase"] == "reviving")


def test_nothing_fails_when_the_driver_is_gone(script: Script, worker: Make) -> None:
    """The last message must not hide the error that it reports."""
    driver = worker(limits=SOON_LOST)
    driver.start(DriverHooks(), False, 0)
    script.stop()
    driver.report(error="a traceback")
    driver.report(phase="finished", step=3)
    driver.revive_soon()


def test_a_worker_goes_on_where_it_was_when_it_has_started_anew(
        script: Script, worker: Make) -> None:
    """It waits, in its generation, counts on from its last message, and takes only a later
    place."""
    driver = worker(revived_generation=3, revived_count=50)
    script.say(place(3))
    driver.start(DriverHooks(), True, 9)
    word = script.wait_for(lambda w: True)
    assert (word["count"], word["phase"], word["generation"], word["step"]) == (51, "waiting", 3, 9)
    assert word["holds_state"]
    script.say(placed_when_accepted(4))
    assert driver.next_place(True, 9).generation == 4


def test_there_is_one_place_without_a_launcher() -> None:
    """A world of one in all cases."""
    alone = Driver()
    alone.note("training", 3)
    alone.report(error="a traceback")
    assert alone.next_place(True, 3) == RankAssignment(generation=1, rank=0, size=1)
    assert alone.wants() == Wants() and not alone.is_broken()


# --- plain horovodrun -----------------------------------------------------------------------------

class Horovodrun:
    """Horovod's driver, as far as a worker asks it: a key-value store over HTTP, and a seat for who
    asks for one."""

    def __init__(self, on_seat: Callable[[], None] = lambda: None):
        self.store: dict[str, bytes] = {}
        told = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if "rank_and_size" in self.path:
                    on_seat()
                    told.store.clear()  # as Horovod's does with each round
                value = b"0,1,0,1,0,1" if "rank_and_size" in self.path else told.store.get(
                    self.path)
                self.send_response(404 if value is None else 200)
                self.end_headers()
                self.wfile.write(value or b"")

            def do_PUT(self) -> None:
                told.store[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01},
                         daemon=True).start()

    def worker(self, monkeypatch: pytest.MonkeyPatch, rank: int, size: int,
               attempt: int) -> PlainDriver:
        seat = {
            "RANK": rank, "SIZE": size, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "CROSS_RANK": rank,
            "CROSS_SIZE": size
        }
        for name, value in {**seat, "HOSTNAME": "a", "GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
                            "GLOO_RENDEZVOUS_PORT": self.server.server_port}.items():
            monkeypatch.setenv(f"HOROVOD_{name}", str(value))
        for name in ("KEY", "TOKEN"):
            monkeypatch.setenv(f"_HOROVOD_LAUNCH_{name}", "6b6579")
        return PlainDriver(replace(Launch.from_environment(), attempt=attempt))


def test_a_host_is_not_forgotten_when_it_is_announced_while_plain_horovodrun_makes_a_round(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody says it again; a notice from before is settled by the new round."""
    during: list[PlainDriver] = []
    horovodrun = Horovodrun(
        on_seat=lambda: [driver.on_hosts_updated(1, None) for driver in during] and None)
    driver = horovodrun.worker(monkeypatch, 0, 1, attempt=1)
    driver.next_place(False, 0)
    driver.on_hosts_updated(0, None)
    driver.next_place(True, 1)
    assert not driver.wants().change
    during.append(driver)
    driver.next_place(True, 2)
    assert driver.wants().change
    horovodrun.server.shutdown()


def test_all_count_as_rank_0_does_when_plain_horovodrun_has_started_them(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer has found other lines in the diary, and was in no generation yet."""
    horovodrun = Horovodrun()
    first = horovodrun.worker(monkeypatch, 0, 1, attempt=3)
    assert [(p.attempt, p.generation)
            for p in (first.next_place(False, 0), first.next_place(True, 1))] == [(3, 1), (3, 2)]
    newcomer = horovodrun.worker(monkeypatch, 1, 2, attempt=4)
    place = newcomer.next_place(False, 0)
    assert (place.attempt, place.generation, place.rank) == (3, 2, 1)
    horovodrun.server.shutdown()


def test_a_worker_leaves_at_a_step_boundary_when_it_is_terminated_under_plain_horovodrun(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """It wants the world to change, and asks for no place in the next one: its exit says the rest
    to horovodrun."""
    asked = list[bool]()
    horovodrun = Horovodrun(on_seat=lambda: asked.append(True))
    driver = horovodrun.worker(monkeypatch, 0, 1, attempt=1)
    driver.next_place(False, 0)
    assert not (driver.wants().change or driver.wants().drains or driver.wants().is_urgent)
    driver.drain()
    assert driver.wants().change and driver.wants().drains and driver.wants().is_urgent
    with pytest.raises(Dismissed):
        driver.next_place(True, 1)
    assert not asked
    horovodrun.server.shutdown()


# --- how a worker was launched --------------------------------------------------------------------

def test_a_worker_takes_its_driver_from_the_environment() -> None:
    """All of it is read in one place."""
    launch = Launch.from_environment({
        "ELASTIC_TRAINER_RUN_DIR": "/runs/x", "ELASTIC_TRAINER_ATTEMPT": "3",
        "ELASTIC_TRAINER_DRIVER": "10.0.0.1:99", "ELASTIC_TRAINER_KEY": KEY.hex(),
        "ELASTIC_TRAINER_WORKER": "a/1/4", "HOROVOD_HOSTNAME": "a", "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "ELASTIC_TRAINER_REDUCE": "ring"
    })
    assert launch == Launch(run_dir=Path("/runs/x"), attempt=3, driver="10.0.0.1:99", key=KEY,
                            worker="a/1/4", host="a", slot=1, horovod=True,
                            rendezvous=("10.0.0.1", 0), reduce="ring", reduce_asked="ring")


def test_a_worker_is_alone_when_the_environment_is_empty() -> None:
    """No driver, no Horovod, nothing written."""
    launch = Launch.from_environment({})
    assert (launch.driver, launch.horovod, launch.run_dir, launch.reduce) == (None, False, None,
                                                                              "exact")


def test_an_unknown_reducer_in_the_environment_is_refused() -> None:
    """The text names the key and the values that work."""
    with pytest.raises(ConfigError, match="ELASTIC_TRAINER_REDUCE.*mean.*exact.*ring"):
        Launch.from_environment({"ELASTIC_TRAINER_REDUCE": "mean"})


@pytest.mark.parametrize("limits",
                         ["heartbeat_s=2", "silence_s=0.5", "driver_lost_s=0.5", "beat_s=0"])
def test_heartbeats_that_are_too_rare_for_the_limits_are_refused(limits: str) -> None:
    """A worker would take its driver for lost, or be taken for frozen, between two heartbeats."""
    remedy = "heartbeat_s is .* In ELASTIC_TRAINER_LIMITS set heartbeat_s to at most"
    with pytest.raises(ConfigError, match=remedy):
        Limits.from_environment({"ELASTIC_TRAINER_LIMITS": limits})


def test_the_key_is_not_shown_when_a_launch_is_printed() -> None:
    """Tracebacks and logs hold reprs."""
    assert repr(Launch(key=KEY)) == repr(Launch())


def test_the_interface_towards_a_host_is_the_one_with_our_address() -> None:
    """The loopback leads to ourselves, whatever other interfaces are called."""
    assert interface_towards("127.0.0.1") == "lo"
    assert own_address_towards("127.0.0.2").startswith("127.")
