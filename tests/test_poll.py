"""The poller: what it keeps over its own end, and what must neither end it nor make it late."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

from elastic_trainer.__main__ import main
from elastic_trainer.discovery import __main__ as script
from elastic_trainer.discovery.agent import AgentServer
from elastic_trainer.discovery.client import AgentUnreachable, ask
from elastic_trainer.discovery.health import Agent
from elastic_trainer.discovery.hosts import Policy
from elastic_trainer.discovery.memory import recall
from elastic_trainer.discovery.place_protocol import Instance, PlaceUnavailable, Supply
from elastic_trainer.discovery.poll import Poller

KEY = b"k" * 32
NOW = 1_800_000_000.0
"""Seconds since 1970, at the begin of each story."""


class Cloud:
    """One whose answer is given: instances, or an error, or whatever a function does."""

    def __init__(self, answer: list[Instance]):
        self.answer: list[Instance] | Exception | Callable[[], list[Instance]] = answer
        self.found: Supply | Exception | None = None

    def instances(self) -> list[Instance]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer() if callable(self.answer) else self.answer

    def supply(self) -> Supply | None:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


SILENT = PlaceUnavailable("as planned")


class TimedAgent(Agent):
    """One whose clock is the story's."""

    def __init__(self, story: Story):
        super().__init__(None, story.folder)
        self.story = story

    def health(self) -> dict[str, Any]:
        return super().health() | {"time": NOW + self.story.now}


def numbers(lines: str) -> list[int]:
    """Return which hosts of a story a list names."""
    return [int(line.removeprefix("127.0.0.").partition(":")[0]) for line in lines.splitlines()]


class Story:
    """A fleet on 127.0.0.1 … 127.0.0.N, each with a real agent, and a poller with a clock that the
    test moves."""

    def __init__(self, folder: Path, size: int, **how: Any):
        self.folder, self.hosts, self.diary = folder, folder / "hosts", folder / "events.jsonl"
        self.fleet = [Instance(f"i-{n}", f"127.0.0.{n}", launched=float(n))
                      for n in range(1, size + 1)]
        self.cloud, self.now, self.boot, self.jump_s = Cloud(list(self.fleet)), 100.0, 0.0, 0.0
        self.port, self.servers = free_port(), dict[int, AgentServer]()
        for number in range(1, size + 1):
            self.start_agent(number)
        self.how: dict[str, Any] = {
            "policy": Policy(agents=True, settle_s=0.0), "agent_port": self.port, "key": KEY,
            "events_file": self.diary, "patience_s": 20.0, "agent_timeout_s": 60.0,
            "agents_patience_s": 60.0
        } | how
        self.pool = ThreadPoolExecutor(4)
        self.restart()

    def start_agent(self, number: int) -> None:
        self.servers[number] = server = AgentServer(f"127.0.0.{number}", self.port, KEY,
                                                    TimedAgent(self))
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def stop_agent(self, number: int) -> None:
        self.servers[number].shutdown()
        self.servers.pop(number).close()

    def agent(self, number: int) -> Agent:
        return self.servers[number].agent

    def restart(self, boot: float = 0.0) -> None:
        """Let another poller take over, which knows the files only; `boot` moves the origin of its
        clock."""
        self.boot += boot
        self.poller = Poller(self.cloud, self.hosts, clock=lambda: self.now + self.boot,
                             wall=lambda: NOW + self.now + self.jump_s, **self.how)

    def poll(self, after_s: float = 1.0) -> list[int]:
        """Do one turn; returns who is on the list."""
        self.now += after_s
        self.poller.poll(self.pool)
        return self.listed()

    def listed(self) -> list[int]:
        return numbers(self.hosts.read_text())

    def age_s(self) -> float:
        return NOW + self.now + self.jump_s - self.hosts.stat().st_mtime

    def logged(self, *names: str) -> list[dict[str, Any]]:
        events = [json.loads(line)
                  for line in self.diary.read_text().splitlines()] if self.diary.exists() else []
        return [e for e in events if e["event"].partition(".")[2] in names]

    def end(self) -> None:
        for number in list(self.servers):
            self.stop_agent(number)
        self.pool.shutdown()


Make = Callable[..., Story]


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Make]:
    """A maker of stories."""
    with ExitStack() as stack:
        def make(size: int, **how: Any) -> Story:
            (folder := tmp_path / str(len(list(tmp_path.iterdir())))).mkdir()
            made = Story(folder, size, **how)
            stack.callback(made.end)
            return made

        yield make


# --- its own end ----------------------------------------------------------------------------------

def test_a_poller_that_is_restarted_while_the_cloud_is_silent_has_the_memory_of_the_last_one(
        story: Make) -> None:
    """The list, the excluded hosts, the agents to ask. A lost request costs no host its place, and
    a notice is heard."""
    s = story(4)
    assert s.poll() == [1, 2, 3, 4]
    s.agent(3).drain("terminate", None)
    assert s.poll() == [1, 2, 4]
    s.poll(4.0)  # the cloud answers once more
    s.cloud.answer = SILENT
    s.stop_agent(2)
    s.stop_agent(3)
    s.start_agent(3)  # it reports ready: it has forgotten
    s.now += 30.0  # in which no poller runs
    s.restart(boot=-1000.0)
    # This poller has not heard the second one's agent.
    assert s.poll() == [1, 2, 4] and s.age_s() == 31
    s.start_agent(2)
    s.agent(1).drain("terminate", None)
    assert s.poll() == [2, 4] and s.age_s() == 0
    assert [(e["id"], e["why"]) for e in s.logged("host_out")] == [("i-3", "notice: terminate"),
                                                                 ("i-1", "notice: terminate")]


def test_an_empty_answer_after_a_restart_must_be_confirmed(story: Make) -> None:
    """And who goes is named, by name."""
    s = story(2)
    s.poll()
    s.restart()
    s.cloud.answer = []
    assert s.poll() == [1, 2] and s.poll() == [1, 2]
    assert s.poll(5.0) == []
    assert [(e["host"], e["why"]) for e in s.logged("host_out")] == [
        (i.name, "the cloud does not know it any more") for i in s.fleet]


def test_a_story_is_the_same_when_the_poller_is_restarted_at_every_turn(story: Make) -> None:
    """Flaps, holds, dooms, doubts, silence: list by list and event by event."""
    ends = []
    for is_restarted in (False, True):
        s, lists = story(4, interval_s=0.0), []
        for turn in range(60):
            s.cloud.answer = [i for i in s.fleet if i.id != "i-2" or turn // 5 % 2 == 0
                              or turn > 30]
            match turn:
                case 12:
                    s.agent(3).drain("terminate", None)
                case 20:
                    s.stop_agent(4)
                case 33:
                    s.cloud.answer = []
                case 43 | 44:
                    s.cloud.answer = SILENT
                case 50:
                    s.agent(1).drain("the host is being stopped", None, for_good=False)
            lists.append(s.poll())
            if is_restarted:
                s.restart(boot=1000.0 * (turn % 3 - 1))
        ends.append(
            (lists, [{k: v
                      for k, v in e.items() if k not in ("time", "failures")}
                     for e in s.logged("host_in", "host_out", "host_held_back", "hosts_changed")]))
    assert ends[0] == ends[1]
    assert [ends[0][0][turn] for turn in (0, 6, 11, 13, 16, 21, 33, 44, 50)] == [
        [1, 2, 3, 4], [1, 3, 4], [1, 3, 4, 2], [1, 4, 2], [1, 4], [1, 4], [1, 4], [1], []]
    assert any(e["event"] == "discovery.host_held_back" for e in ends[0][1])


WRONG = {"torn": lambda text: text[: len(text) // 2], "zeros": lambda text: "\0" * len(text),
         "empty": lambda text: "", "no object": lambda text: "[]",
         "a text for a number": lambda text: text.replace('"holds": 0', '"holds": "0"'),
         "no number": lambda text: text.replace('"launched": 1.0', '"launched": NaN'),
         "another form": lambda text: text.replace('"holds": 0', '"holds": 0, "more": 0'),
         "a form without": lambda text: text.replace('"doubted": [], ', ""),
         "a short list": lambda text: text.replace('"127.0.0.1", 1]', '"127.0.0.1"]')}


@pytest.mark.parametrize("kind", WRONG)
def test_a_memory_that_is_not_whole_is_distrusted(story: Make, kind: str,
                                                  capfd: pytest.CaptureFixture[str]) -> None:
    """The next poller prints that and starts without a past: while the cloud is silent the list is
    not touched."""
    s = story(2)
    s.poll()
    memory = s.folder / "hosts.memory"
    assert WRONG[kind](memory.read_text()) != memory.read_text()
    assert recall(memory.read_text(), 0.0).instances == tuple(s.fleet)
    memory.write_text(WRONG[kind](memory.read_text()))
    s.cloud.answer = SILENT
    s.restart()
    assert str(memory) in capfd.readouterr().err
    assert s.poll() == [1, 2]
    s.cloud.answer = s.fleet[:1]
    assert s.poll(100.0) == [1]


# --- what must not end it -------------------------------------------------------------------------

def test_a_thousand_failures_are_no_more_than_one(story: Make) -> None:
    """The pause between questions has an upper end, and so has its reckoning."""
    s = story(1)
    s.poll()
    s.cloud.answer = SILENT
    s.poller.question.failures = 5000
    assert s.poll(100.0) == [1] and s.poller.question.failures == 5001


def test_a_cloud_that_fails_is_asked_with_back_off(story: Make) -> None:
    """The pause doubles with each failure up to its end, and is the usual one after an answer."""
    s, asked = story(1, agent_port=None, policy=Policy(settle_s=0.0), interval_s=5.0), list[float]()

    def pauses(turns: int, answer: list[Instance] | None) -> list[float]:
        def instances() -> list[Instance]:
            asked.append(s.now)
            if answer is None:
                raise SILENT
            return answer

        s.cloud.answer = instances
        asked[:-1] = []
        for _ in range(turns):
            s.poll()
        return [after - before for before, after in zip(asked, asked[1:], strict=False)]

    assert pauses(12, s.fleet) == [5.0, 5.0]
    assert pauses(264, None) == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0]
    assert pauses(69, s.fleet) == [60.0, 5.0, 5.0, 5.0]


def test_a_cloud_that_failed_is_asked_at_once_when_an_agent_stops_or_comes_back(
        story: Make) -> None:
    """The place may answer again, and give that host another name. The stop costs one question."""
    s, asked = story(2, interval_s=5.0), list[float]()
    s.poll()

    def instances() -> list[Instance]:
        asked.append(s.now)
        raise SILENT

    s.cloud.answer = instances
    for _ in range(80):  # the back-off is 40 s then
        s.poll()
    del asked[:]
    stopped_at = s.now + 1
    s.agent(2).drain("Slurm ends its task", None, for_good=False)
    for _ in range(5):
        s.poll()
    assert asked == [stopped_at + 1]
    s.stop_agent(2)
    s.start_agent(2)
    for _ in range(5):
        s.poll()
    assert asked == [stopped_at + 1, stopped_at + 6]


def test_a_notice_reaches_the_file_when_the_event_log_cannot_be_written(
        story: Make, capfd: pytest.CaptureFixture[str]) -> None:
    """A full disk."""
    s = story(2, events_file=Path("/dev/full"))
    assert s.poll() == [1, 2]
    s.agent(1).drain("terminate", None)
    assert s.poll() == [2]
    assert "/dev/full" in capfd.readouterr().err


def test_a_list_that_cannot_be_written_is_tried_again(story: Make,
                                                      capfd: pytest.CaptureFixture[str]) -> None:
    """It prints that once, and goes on; also when the file was deleted."""
    s = story(2)
    s.poll()
    aside = s.folder.rename(s.folder.with_name("aside"))
    s.agent(1).drain("terminate", None)
    for _ in range(3):
        s.now += 1.0
        s.poller.poll(s.pool)
    aside.rename(s.folder)
    assert s.listed() == [1, 2]
    assert s.poll() == [2]
    assert capfd.readouterr().err.count("hosts cannot be written") == 1
    s.hosts.unlink()
    s.now += 1.0
    s.poller.poll(s.pool)
    assert s.poll() == [2]


def test_a_notice_reaches_the_file_while_the_cloud_hangs(story: Make) -> None:
    """The question waits in a thread of its own; its answer counts when it comes, and one that
    never comes is given up."""
    s, released, asked = story(3), threading.Event(), threading.Semaphore(0)
    s.poll()
    s.poller.question.patience_s = 0.1

    def hang() -> list[Instance]:
        asked.release()
        released.wait(60)
        return s.fleet[:2]

    s.cloud.answer = hang
    s.poll(10.0)
    s.agent(1).drain("terminate", None)
    assert s.poll() == [2, 3]
    assert asked.acquire(timeout=300) and not s.logged("cloud_unavailable")
    assert s.poll(100.0) == [2, 3] and len(s.logged("cloud_unavailable")) == 1
    assert not asked.acquire(blocking=False)
    s.poll(20.0)
    assert asked.acquire(timeout=300)
    released.set()
    assert s.poller.question.pending
    s.poller.question.pending.result(60)
    assert s.poll() == [2]


def test_a_notice_counts_while_an_odd_answer_is_doubted_and_the_cloud_is_silent(
        story: Make) -> None:
    """Who has vanished from one answer is asked still; the doubt stays until the cloud has answered
    again. No host is logged as out before that."""
    s, outs = story(2, policy=Policy(settle_s=0.0)), []
    for number, (answer, listed) in enumerate((
            (s.fleet, [1, 2]), ([], [1, 2]), (SILENT, [1, 2]), (SILENT, [1]), ([], []))):
        s.cloud.answer = answer  # type: ignore[assignment]
        assert s.poll(100.0) == listed, number
        outs.append([e["id"] for e in s.logged("host_out")])
        if number == 2:
            s.agent(2).drain("terminate", None)
    assert outs == [[], [], [], ["i-2"], ["i-2", "i-1"]]


def test_a_host_that_flaps_in_the_clouds_list_is_logged_as_held_back(story: Make) -> None:
    """Each arrival and departure is logged. From the third arrival on it stays off the list, and
    that is logged with its reason."""
    s = story(2, agent_port=None, policy=Policy(settle_s=0.0))
    for state in ("running", "stopping", "running", "stopping", "running", "running"):
        s.cloud.answer = [s.fleet[0], replace(s.fleet[1], state=state)]
        s.poll(10.0)
    logged = [e for e in s.logged("host_in", "host_out", "host_held_back") if e["id"] == "i-2"]
    assert [e["event"].partition(".")[2] for e in logged] == [
        "host_in", "host_out", "host_in", "host_out", "host_held_back"]
    assert logged[-1]["why"] == "held back: it came 3 times in 600 s" and s.listed() == [1]


# --- its own faults -------------------------------------------------------------------------------

def test_the_list_stands_when_the_pollers_network_fails(story: Make,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    """No agent can be heard, and the cloud calls all of them running: the poller doubts itself, and
    says so."""
    s = story(3)
    s.poll()
    for number in (1, 2, 3):
        s.stop_agent(number)
    assert [s.poll(5.0) for _ in range(20)] == [[1, 2, 3]] * 20
    (doubt,) = s.logged("poller_doubts_itself")
    assert (doubt["unheard"], doubt["listed"], doubt["clock_off"]) == (3, 3, 0)
    assert json.loads((s.folder / "hosts.json").read_text())["unheard"] == 3
    assert main(["hosts", str(s.hosts)]) == 0
    assert "3 agents do not answer" in capsys.readouterr().out
    for number in (1, 2, 3):
        s.start_agent(number)
    assert s.poll() == [1, 2, 3] and len(s.logged("poller_hears_again")) == 1
    s.stop_agent(2)
    assert [s.poll(5.0) for _ in range(6)][-1] == [1, 3]


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_the_list_stands_when_the_pollers_clock_jumps(story: Make, jump_s: float) -> None:
    """All agents seem to have another clock. Its age is that of the agents' last answers with the
    right time."""
    s = story(3)
    s.poll()
    s.jump_s = jump_s
    assert s.poll() == [1, 2, 3] and s.age_s() == 1
    assert [s.poll(5.0) for _ in range(20)] == [[1, 2, 3]] * 20 and s.age_s() == 0
    (doubt,) = s.logged("poller_doubts_itself")
    assert doubt["clock_off"] == 3


@pytest.mark.parametrize(("ahead_s", "code"), [(0, 0), (4, 0), (60, 1), (-100, 0), (-130, 1)])
def test_the_script_does_not_trust_a_file_from_the_future(
        tmp_path: Path, ahead_s: float, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    """A clock that was set back must not make an old list young."""
    hosts, now = tmp_path / "hosts", time.time()
    hosts.write_text("a:1\n")
    os.utime(hosts, (now + ahead_s, now + ahead_s))
    assert script.main(["hosts-file", str(hosts), "120"]) == code
    assert capfd.readouterr().out == ("" if code else "a:1\n")


def test_without_agents_the_lists_age_is_that_of_the_clouds_last_believed_answer(
        story: Make) -> None:
    """A doubted answer does not make it younger, and no answer does not."""
    s = story(4, agent_port=None, policy=Policy(settle_s=0.0))
    s.poll()
    s.poll(6.0)
    assert s.age_s() == 0
    s.cloud.answer = []
    s.poll(6.0)
    assert s.age_s() == 6
    s.cloud.answer = SILENT
    assert s.poll(6.0) == [1, 2, 3, 4] and s.age_s() == 12
    s.cloud.answer = s.fleet
    s.poll(60.0)
    assert s.age_s() == 0


def printed(s: Story, capfd: pytest.CaptureFixture[str]) -> list[int] | None:
    """Return whom the script prints now, by the story's clock; None: it finds the list too old."""
    seen, at = s.folder / "seen", time.time() - s.age_s()
    seen.write_bytes(s.hosts.read_bytes())
    os.utime(seen, (at, at))
    capfd.readouterr()
    code = script.main(["hosts-file", str(seen), "120"])
    lines = capfd.readouterr().out
    assert code == 0 or not lines
    return None if code else numbers(lines)


def test_a_notice_reaches_horovodrun_however_long_the_cloud_is_silent(
        story: Make, capfd: pytest.CaptureFixture[str]) -> None:
    """All agents are heard, so the list is as young as their answers. When the last host leaves by
    its own report the list is empty for as long as that is young; then nothing is known."""
    s = story(3)
    s.poll()
    s.cloud.answer = SILENT
    for _ in range(30):
        s.poll(10.0)
    assert printed(s, capfd) == [1, 2, 3]
    s.agent(1).drain("terminate", None)
    s.poll()
    assert printed(s, capfd) == [2, 3]
    s.stop_agent(1)
    s.agent(2).drain("terminate", None)
    s.agent(3).drain("terminate", None)
    s.poll()
    assert printed(s, capfd) == []
    s.stop_agent(2)
    s.stop_agent(3)
    s.poll(100.0)
    assert printed(s, capfd) == []
    s.poll(30.0)
    assert printed(s, capfd) is None


def test_a_listed_host_that_is_silent_makes_the_list_too_old(
        story: Make, capfd: pytest.CaptureFixture[str]) -> None:
    """It is as old as the least that is known of anybody on it."""
    s = story(3)
    s.poll()
    s.cloud.answer = SILENT
    for number in (1, 2):  # most of them: their hosts keep their places
        s.stop_agent(number)
    for _ in range(11):
        assert s.poll(10.0) == [1, 2, 3]
    assert s.age_s() == 110 and printed(s, capfd) == [1, 2, 3]
    s.poll(20.0)
    assert printed(s, capfd) is None
    s.start_agent(1)
    s.poll()
    assert printed(s, capfd) is None
    s.start_agent(2)
    s.poll()
    assert printed(s, capfd) == [1, 2, 3]


def test_a_list_is_not_new_and_empty_when_a_host_has_fallen_silent(
        story: Make, capfd: pytest.CaptureFixture[str]) -> None:
    """One has a notice and reports it; the other, silent and unknown to a silent cloud, may work
    all the same."""
    s = story(2)
    s.poll()
    s.cloud.answer = SILENT
    for _ in range(15):
        s.poll(10.0)
    s.stop_agent(2)
    assert s.poll(15.0) == [1, 2] and printed(s, capfd) == [1, 2]
    s.agent(1).drain("terminate", None)
    assert s.poll(15.0) == [] and printed(s, capfd) is None


# --- what it hears --------------------------------------------------------------------------------

def test_a_host_whose_agent_was_restarted_comes_back(story: Make) -> None:
    """It leaves while it is being stopped, and returns when the next agent reports ready, behind
    who has stayed."""
    s = story(2)
    s.poll()
    s.agent(1).drain("the host is being stopped", None, for_good=False)
    assert s.poll() == [2]
    s.stop_agent(1)
    assert s.poll() == [2]
    s.start_agent(1)
    assert s.poll() == [2, 1]


def test_refused_clients_of_an_agent_are_logged(story: Make) -> None:
    """Once a minute and host at most, with how many; also after a restart of the agent or the
    poller."""
    s = story(2)

    def stranger() -> None:
        with pytest.raises(AgentUnreachable):
            ask(f"127.0.0.2:{s.port}", b"x" * 32, 60.0)

    s.poll()
    stranger()
    s.poll()
    stranger()
    stranger()
    s.poll()
    assert [(e["host"], e["refused"]) for e in s.logged("stranger_refused")] == [("127.0.0.2", 1)]
    s.restart()
    s.poll()
    assert [e["refused"] for e in s.logged("stranger_refused")] == [1, 2]
    assert {
        h["name"]: h["refused"]
        for h in json.loads((s.folder / "hosts.json").read_text())["hosts"]
    } == {"127.0.0.1": 0, "127.0.0.2": 3}
    s.stop_agent(2)
    s.start_agent(2)
    s.poll(60.0)
    stranger()
    s.poll(60.0)
    assert [e["refused"] for e in s.logged("stranger_refused")] == [1, 2, 1]


def test_the_table_shows_since_when_for_every_host(story: Make,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    """In or out; what is scheduled for later is shown, and who was refused."""
    s = story(2)
    s.cloud.answer = [replace(s.fleet[0], events=(("instance-stop", 7200.0),)),
                      replace(s.fleet[1], state="pending")]
    s.poll()
    s.poll(9.0)
    rows = json.loads((s.folder / "hosts.json").read_text())["hosts"]
    assert [(r["is_in"], r["since_s"]) for r in rows] == [(True, 9.0), (False, 9.0)]
    s.agent(1).refuse()
    s.poll()
    assert main(["hosts", str(s.hosts)]) == 0
    (first,) = [line for line in capsys.readouterr().out.splitlines() if "127.0.0.1" in line]
    assert "instance-stop in 120 min" in first and "ready, 1 refused" in first and "10 s" in first


def test_one_agent_that_trickles_delays_no_other_s_notice(story: Make) -> None:
    """A wedged or bought worker sends a byte now and then: its own answer never comes, and
    everybody else's does."""
    stopping, deadline = threading.Event(), time.monotonic() + 60.0

    def drip(line: socket.socket) -> None:
        with line, suppress(OSError):
            line.sendall(b"HTTP/1.0 200 OK\r\n")
            while not stopping.wait(0.05):
                line.sendall(b"X")

    def trickle(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=drip, args=(listener.accept()[0],), daemon=True).start()

    s = story(2, agent_timeout_s=120.0, agents_patience_s=0.3)
    s.stop_agent(1)
    with socket.create_server(("127.0.0.1", s.port)) as listener:
        threading.Thread(target=trickle, args=(listener,), daemon=True).start()
        try:
            while s.poll() != [2]:
                assert time.monotonic() < deadline
            s.agent(2).drain("terminate", None)
            while s.poll():
                assert time.monotonic() < deadline
            assert s.logged("host_out")[-1]["why"].endswith("terminate")
        finally:
            stopping.set()


def test_an_answer_has_an_end() -> None:
    """A byte now and then is no answer, however many come."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def drip() -> None:
            line, _ = listener.accept()
            with line, suppress(OSError):
                while True:
                    line.sendall(b"H")
                    time.sleep(0.02)

        threading.Thread(target=drip, daemon=True).start()
        with pytest.raises(AgentUnreachable):
            ask(f"127.0.0.1:{listener.getsockname()[1]}", KEY, 0.5)


# --- what it tells --------------------------------------------------------------------------------

def test_an_answer_that_is_not_believed_is_logged(story: Make) -> None:
    """Once, with how many it lacks; and no host is logged as gone for it, neither a host on the
    list nor another."""
    s = story(4)
    s.agent(4)._sick = "disk full: 1 MiB left under /"
    assert s.poll() == [1, 2, 3]
    s.cloud.answer = s.fleet[:1]
    for _ in range(4):
        s.poll()
    s.poll()
    (doubt,) = s.logged("answer_doubted")
    assert (doubt["lacks"], doubt["listed"]) == (2, 3) and not s.logged("host_out", "host_gone")
    s.cloud.answer = s.fleet
    s.poll(5.0)
    s.poll(5.0)
    assert len(s.logged("answer_doubted")) == 1 and len(
        s.logged("host_sick")) == 1 and not s.logged("host_out", "host_gone")


def test_a_host_of_a_doubted_answer_is_not_logged(story: Make) -> None:
    """It is known with the next one: no host is logged as in, or gone again, of which nothing is
    sure."""
    s = story(4)
    s.cloud.answer = s.fleet[:3]
    s.poll()
    logged = len(s.logged("host_in", "host_out", "host_gone"))
    first = s.logged("host_in")[0]
    assert {first[name] for name in ("type", "zone", "lifecycle")} == {"", "spot"}
    s.cloud.answer = s.fleet[3:]
    assert s.poll(5.0) == [1, 2, 3] and s.logged("answer_doubted")
    assert s.poll() == [1, 2, 3] and len(s.logged("host_in", "host_out", "host_gone")) == logged
    s.poll(5.0)
    assert s.poll(5.0) == [4]


@pytest.mark.parametrize("is_answered", [False, True])
def test_only_the_loss_of_those_who_were_doubted_is_believed(story: Make,
                                                             is_answered: bool) -> None:
    """Three of four turn sick, before or at an answer of the cloud, which counts once; then its
    answer is empty: that is the first time that the fourth is lost, so the list stands."""
    s = story(4)
    s.poll()
    for number in (2, 3, 4):
        s.agent(number)._sick = "disk full: 1 MiB left under /"
    assert s.poll(5.0 if is_answered else 1.0) == [1, 2, 3, 4]
    s.cloud.answer = []
    assert s.poll(5.0) == [1, 2, 3, 4]
    assert s.poll(5.0) == []


def test_a_doubt_that_has_gone_settles_no_later_one(story: Make) -> None:
    """Most are sick for a moment between two answers, and then an answer is without them, for the
    first time."""
    s = story(4)
    s.poll()
    for why in ("disk full: 1 MiB left under /", ""):
        for number in (2, 3, 4):
            s.agent(number)._sick = why
        assert s.poll() == [1, 2, 3, 4]
    s.cloud.answer = s.fleet[:1]
    assert s.poll(5.0) == [1, 2, 3, 4]
    assert s.poll(5.0) == [1]


def test_a_host_that_is_sick_from_the_beginning_is_logged(story: Make) -> None:
    """Once for each reason, whatever its figures are by then, also after a restart of the
    poller."""
    s = story(2)
    for left in (30, 29, 28):
        s.agent(2)._sick = f"disk full: {left} MiB left under /"
        assert s.poll() == [1]
    s.restart()
    s.poll()
    s.agent(2)._sick = "no memory: 7 MiB left"
    s.poll()
    s.poll()
    assert [(e["host"], e["id"], e["why"]) for e in s.logged("host_sick")
            ] == [("127.0.0.2", "i-2", "sick: disk full: 30 MiB left under /"),
                  ("127.0.0.2", "i-2", "sick: no memory: 7 MiB left")]
    assert not s.logged("host_out")


def test_the_end_of_a_host_that_had_left_is_logged(story: Make) -> None:
    """Once; that of a host on the list is its leaving."""
    s = story(3)
    s.poll()
    s.agent(1).drain("terminate", None)
    s.poll()
    s.cloud.answer = s.fleet[2:]
    assert s.poll(5.0) == [3]
    s.poll(5.0)
    assert [(e["event"], e["id"], e["why"]) for e in s.logged("host_out", "host_gone")] == [
        ("discovery.host_out", "i-1", "notice: terminate"),
        ("discovery.host_gone", "i-1", "the cloud does not know it any more"),
        ("discovery.host_out", "i-2", "the cloud does not know it any more")]
