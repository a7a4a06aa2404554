"""Why a step stands still: the right worker, host and phase, and who is replaced."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, weights_alone
from hanging import JOB, hang

from elastic_trainer.config import Limits
from elastic_trainer.driver import ends
from elastic_trainer.driver.membership import Membership
from elastic_trainer.driver.roster import Phase, Stop, Worker
from elastic_trainer.driver.rounds import Offer
from elastic_trainer.driver.stalls import (
    ALL_LATE_S,
    LEAST_S,
    Member,
    Stalls,
    Stragglers,
    lasting,
    limit_s,
    slow_host,
    slowest,
    stood_s,
    waited_for,
)
from elastic_trainer.events.mark import PHASES, Mark
from elastic_trainer.events.summary import summarize
from elastic_trainer.host import stacks
from elastic_trainer.wire.heartbeat import At, Heartbeat
from elastic_trainer.world.session import address_in, unsent_sockets

LIMITS = "silence_s=6,gloo_s=16,driver_lost_s=6,hang_s=12,straggler_s=4"
WAITS = At(phase="reduce", what="bucket", for_s=9.0, step=20, waits_s=8.9,
           usual_s=0.1, own_s=0.02, steps=20)
HANGS = replace(WAITS, phase="forward", what="micro-batch 2", waits_s=0.0)


def host(rank: int) -> str:
    """The host that has this rank while all workers are present."""
    return f"127.0.0.{rank + 1}"


def test_each_hang_is_named_and_what_hangs_for_good_is_replaced(tmp_path: Path) -> None:
    """A loader that sleeps, a lock, a loop that holds the GIL, SIGSTOP, a loader that never
    answers, and a slow host, one after the other in one run."""
    command = [*JOB, "--steps", "600"]
    with Cluster(tmp_path, command=command, limits=LIMITS,
                 options=["--replace-stragglers"]) as cluster:
        def verdict(count: int) -> dict[str, Any]:
            found: dict[str, Any] = cluster.wait_for(
                f"verdict {count}", lambda: cluster.events("driver.step_stalled")[count - 1:])[0]
            return found

        def release() -> None:
            (tmp_path / "released").touch()
            was = len(cluster.events("driver.step_resumed"))
            cluster.wait_for("a next step", lambda: cluster.events("driver.step_resumed")[was:])
            (tmp_path / "released").unlink()

        cluster.wait_for_step(5)
        hang(tmp_path, "loader", host(2))
        loader = verdict(1)
        release()
        hang(tmp_path, "lock", host(1))
        lock = verdict(2)
        release()
        hang(tmp_path, "gil", host(3))
        gil = verdict(3)
        newest = cluster.wait_for_world(4, after=2)
        cluster.wait_for("steps", lambda: [e for e in cluster.events("worker.step_committed")
                                           if e["generation"] == newest][9:])
        cluster.signal_worker(host(2), signal.SIGSTOP)
        stop = verdict(4)
        cluster.wait_for_world(4, after=4)
        hang(tmp_path, "loader", host(1))
        hung = verdict(5)
        cluster.wait_for_world(4, after=6)
        (tmp_path / f"slow-{host(0)}").touch()
        cluster.wait_for("the straggler's end", lambda: [
            e for e in cluster.events("driver.worker_gone") if e["reason"] == "left"])
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(weights_alone(command, tmp_path), victims=3)
        slow = cluster.events("driver.straggler_found")
        gone = [(e["host"], e["reason"]) for e in cluster.lost()]
    for one, rank, phase, line in ((loader, 2, "load", "in __getitem__"),
                                   (lock, 1, "forward", "in loss"),
                                   (hung, 1, "load", "in __getitem__")):
        assert (one["host"], one["rank"], one["phase"], one["state"]) == (
            host(rank), rank, phase, "answers"), one
        assert "micro-batch" in one["what"] and line in one["stacks"][one["worker"]]
        assert len(one["waiting"]) == 3
    # Its newest phase may not have been sent: the thread that sends it needs the GIL, too.
    assert (gil["host"], gil["state"]) == (host(3), "silent") and gil["phase"] in PHASES, gil
    assert "in loss" in gil["stacks"][gil["worker"]]
    assert (stop["host"], stop["rank"], stop["state"]) == (host(2), 2, "stopped"), stop
    assert stop["phase"] in PHASES
    assert gone == [(host(3), "frozen"), (host(2), "frozen"), (host(1), "hung")]
    assert [(e["host"], e["is_replaced"]) for e in slow] == [(host(0), True)]
    assert result["stalls"]["count"] == 5 and result["stalls"]["longest_s"] >= 12
    assert result["stalls"]["suggested_hang_s"] >= 60 and set(result["slow_hosts"]) == {host(0)}


# --- the verdict ----------------------------------------------------------------------------------

def member(phase: str, **facts: Any) -> Member:
    return Member(**{"name": f"h{facts.get('rank', 0)}/0/1", "host": f"h{facts.get('rank', 0)}",
                     "rank": 0, "phase": phase, "step": 9, "usual_s": 0.1,
                     "waits_s": 4.5 if phase in ("reduce", "vote", "gather") else 0.0,
                     "steps": 20, **facts})


def test_the_one_furthest_behind_is_waited_for() -> None:
    """A silent one comes first, then the older step, then the earlier phase, then the longer."""
    first, second = member("reduce", rank=1, is_silent=True), member("apply", rank=2, step=8)
    third, fourth = member("load", rank=3, for_s=3.0), member("load", rank=4, for_s=2.0)
    fifth = member("backward", rank=5, for_s=9.0)
    late = [fifth, fourth, second, third, first]
    assert waited_for([member("vote"), *late]) == [first, second, third, fourth, fifth]
    assert waited_for([member("reduce"), member("vote"), member("gather")]) == []


@pytest.mark.parametrize("members", [
    [member("reduce", waits_s=0.0)],
    [member("vote"), member("vote", waits_s=0.0, rank=1), member("vote")],
    [member("reduce"), member("upload", rank=2), member("upload", waits_s=3.0)],
])
def test_who_works_by_itself_around_a_collective_is_waited_for(members: list[Member]) -> None:
    """The phase says where the loop is. Only a collective that has not ended is a wait: the log's
    line may hang before a vote, and a world of one waits for no worker."""
    late = waited_for(members)
    assert len(late) == 1 and not late[0].waits


@pytest.mark.parametrize(("members", "limit"), [
    ([member("forward"), member("reduce")], LEAST_S),
    ([member("forward", usual_s=2.0), member("reduce", usual_s=2.0)], 10.0),
    ([member("forward", steps=1), member("reduce")], 300.0),
    ([member("forward", steps=1, is_silent=True), member("reduce")], 300.0),
    ([member("forward", is_silent=True), member("reduce")], LEAST_S),
    ([member("evaluate", is_silent=True), member("evaluate")], None),
    ([member("forward", is_silent=True), member("forward")], ALL_LATE_S),
    ([member("forward", usual_s=3.0), *[member("reduce", usual_s=0.0)] * 3], 15.0),
    ([member("forward", usual_s=0.0), member("reduce", usual_s=0.0)], ALL_LATE_S),
    ([member("forming"), member("reduce")], 300.0),
    ([member("after"), member("reduce")], 300.0),
    ([member("upload"), member("vote")], 300.0),
    ([member("after"), member("after")], None),
    ([member("evaluate"), member("upload")], None),
    ([member("evaluate"), member("gather")], 300.0),
    ([member("forward")], ALL_LATE_S),
    ([member("forward"), member("load")], ALL_LATE_S),
    ([member("reduce"), member("reduce")], LEAST_S),
    ([member("reduce", steps=0), member("reduce", steps=0)], 300.0),
])
def test_a_step_may_take_as_long_as_such_steps_do(members: list[Member],
                                                  limit: float | None) -> None:
    """A first step, a checkpoint, an evaluation and the user's code after a step have stuck_s, and
    no limit while no worker waits. A silent worker has the same, and a newcomer, which has done no
    step, does not shorten the usual time. The first step of a world has no usual time."""
    assert limit_s(members, waited_for(members), stuck_s=300.0) == limit


@pytest.mark.parametrize(("members", "seconds"), [
    ([member("forward", for_s=70.0), member("reduce", waits_s=1.5)], 1.5),
    ([member("forward", for_s=70.0), member("backward", for_s=65.0)], 65.0),
    ([member("forward"), member("reduce", waits_s=2.0), member("reduce", waits_s=9.0)], 9.0),
    ([member("reduce", waits_s=2.0), member("reduce", waits_s=9.0)], 2.0),
])
def test_a_step_stands_still_since_a_worker_waits(members: list[Member], seconds: float) -> None:
    """The time in which all compute does not count. If all wait, the last one's wait counts."""
    assert stood_s(members) == seconds


def test_a_link_that_had_unsent_bytes_for_a_moment_is_not_named() -> None:
    """The others had some at most looks."""
    assert lasting({("a", "c"): 30, ("b", "c"): 15, ("a", "b"): 14}) == {("a", "c"), ("b", "c")}
    assert lasting({}) == set()


def test_the_host_at_an_end_of_most_slow_links_is_named() -> None:
    """Of equals it is a sender."""
    assert slow_host([("a", "c"), ("b", "c"), ("c", "a"), ("a", "b")]) in ("a", "c")
    assert slow_host([("a", "c"), ("b", "c"), ("c", "d")]) == "c"
    assert slow_host([("b", "a")]) == "b"
    assert slow_host([]) == ""


class Scene:
    """A generation of three workers, whose driver is asked at made-up times."""

    def __init__(self, limits: str = "", replaces: bool = False, least: int = 2):
        self.events: list[dict[str, Any]] = []
        self.membership = Membership(
            3, least, None, limits=Limits.from_environment({"ELASTIC_TRAINER_LIMITS": limits}))
        roster = self.membership.roster
        self.membership.hosts_listed({"h0": 1, "h1": 1, "h2": 1})
        roster.generation, roster.members = 1, ("h0/0/1", "h1/0/1", "h2/0/1")
        for rank, name in enumerate(roster.members):
            roster.workers[name] = Worker(name=name, host=f"h{rank}", slot=0, started_at=0.0,
                                         heard_at=0.0)
            roster.workers[name].phase, roster.workers[name].rank = Phase.TRAINING, rank
            roster.workers[name].generation = 1
        self.stalls = Stalls(self.membership, {}, lambda: {n: n[:2] for n in roster.members},
                             self.emit)
        self.stragglers = Stragglers(self.membership, replaces, self.emit)

    def emit(self, event: str, **facts: Any) -> None:
        self.events.append({"event": event, **facts})

    def hear(self, now: float, *at: At | None) -> None:
        """Take a heartbeat of each worker."""
        for worker, one in zip(self.membership.roster.workers.values(), at, strict=True):
            worker.at, worker.heard_at = one, now

    def names(self) -> list[str]:
        return [event["event"] for event in self.events]


def test_a_step_has_one_verdict_and_its_end_is_logged() -> None:
    """Each look hears the same; then the step has ended. A worker that claims to be far ahead does
    not end it."""
    scene = Scene()
    for tick in range(40):
        now = 100.0 + tick / 4
        late = replace(HANGS, for_s=tick / 4)
        scene.hear(now, replace(WAITS, step=10**15 + tick), late, WAITS)
        scene.stalls.look(now)
    assert scene.names() == ["driver.step_stalled"]
    assert scene.events[0]["worker"] == "h1/0/1" and 4.0 < scene.events[0]["stood_s"] < 10.0
    assert scene.events[0]["step"] == 20
    scene.hear(111.0, *[replace(WAITS, step=21, waits_s=0.1)] * 3)
    scene.stalls.look(111.0)
    assert scene.names() == ["driver.step_stalled", "driver.step_resumed"]


def test_no_worker_is_named_while_a_generation_ends() -> None:
    """A member is gone, or waits for its next place."""
    scene = Scene()
    scene.membership.roster.workers["h2/0/1"].phase = Phase.WAITING
    for tick in range(40):
        scene.hear(100.0 + tick, WAITS, HANGS, WAITS)
        scene.stalls.look(100.0 + tick)
    assert not scene.events


def test_of_a_frozen_worker_the_verdict_comes_before_its_end() -> None:
    """Also if its step is not late by its usual time."""
    scene = Scene()
    scene.hear(100.0, WAITS, replace(HANGS, usual_s=60.0), WAITS)
    scene.membership.roster.workers["h1/0/1"].heard_at = 100.0
    scene.stalls.give_up(Stop("h1/0/1", "frozen", at_once=True), 105.0)
    scene.stalls.give_up(Stop("h1/0/1", "frozen", at_once=True), 105.1)
    scene.stalls.give_up(Stop("h0/0/1", "cut_off", at_once=True), 105.1)
    assert [event["worker"] for event in scene.events] == ["h1/0/1"]


@pytest.mark.parametrize(("ats", "hung"), [
    ([WAITS, HANGS, WAITS], {"h1/0/1"}),
    ([HANGS, HANGS, WAITS], {"h0/0/1", "h1/0/1"}),
    ([HANGS, HANGS, HANGS], set()),
    ([replace(HANGS, for_s=301.0)] * 3, {"h0/0/1", "h1/0/1", "h2/0/1"}),
    ([replace(HANGS, for_s=301.0)] * 2 + [replace(HANGS, for_s=299.0)], set()),
    ([WAITS, HANGS, replace(WAITS, waits_s=0.1)], set()),
    ([WAITS, HANGS, replace(WAITS, phase="vote", waits_s=0.0)], set()),
    ([WAITS, replace(HANGS, for_s=1.0), WAITS], set()),
    ([WAITS, HANGS, replace(HANGS, for_s=1.0)], set()),
    ([WAITS, HANGS, None], set()),
    ([WAITS, replace(HANGS, steps=0), WAITS], set()),
    ([WAITS, replace(HANGS, phase="upload"), WAITS], set()),
    ([WAITS, WAITS, WAITS], set()),
])
def test_who_hangs_is_replaced_if_all_others_wait_for_it(ats: list[At | None],
                                                         hung: set[str]) -> None:
    """All others have waited for as long as it hangs. If none waits, the limit is stuck_s. Not the
    first step, not a checkpoint, and no worker by default."""
    for limits, expected in (("", set()), ("hang_s=5", hung)):
        scene = Scene(limits)
        scene.hear(100.0, *ats)
        stops = ends.evict(scene.membership.roster, scene.membership.limits, 100.0,
                                is_finished=False)
        assert {stop.worker for stop in stops if isinstance(stop, Stop)} == expected
        assert all(stop.reason == "hung" for stop in stops if isinstance(stop, Stop))


class Process:
    """A process that answers at once."""

    def __init__(self, *lines: str) -> None:
        self.answer, self.asked, self.lines = stacks.Answer(), 0, lines

    def ask_stacks(self) -> None:
        self.asked += 1
        self.answer.expect()
        for line in ("Thread 0x01 (most recent call first):", *self.lines):
            self.answer.take(line)

    def state(self) -> str:
        return "S"


def test_who_is_replaced_before_its_step_has_a_verdict_is_asked_for_its_stacks() -> None:
    """The code after a step may take stuck_s. hang_s ends it earlier, and is the limit in the
    event. Who computes no longer than usual is not asked."""
    scene = Scene("hang_s=50")
    process = Process()
    scene.stalls.processes = {"h1/0/1": process}
    roster, stops = scene.membership.roster, []
    for tick in range(240):
        now, age_s = 100.0 + tick / 4, tick / 4
        at = replace(WAITS, for_s=age_s, waits_s=age_s + 0.001)
        scene.hear(now, at, replace(at, phase="after", waits_s=0.0), at)
        stops += ends.evict(roster, scene.membership.limits, now, is_finished=False)
        for stop in stops:
            assert isinstance(stop, Stop)
            scene.stalls.give_up(stop, now)
        if stops:
            break
        scene.stalls.look(now)
        assert not process.asked or age_s > 48
    assert [stop.reason for stop in stops if isinstance(stop, Stop)] == ["hung"]
    assert scene.names() == ["driver.step_stalled"] and scene.events[0]["limit_s"] == 50
    assert "Thread" in scene.events[0]["stacks"]["h1/0/1"]


@pytest.mark.parametrize(("line", "cause", "phase", "what"), [
    ('  File "/x/train.py", line 9 in loss', "worker", "forward", ""),
    ('  File "/x/elastic_trainer/world/collectives.py", line 65 in wait', "network", "reduce",
     "bucket"),
])
def test_what_a_silent_worker_does_is_read_from_its_stack(line: str, cause: str, phase: str,
                                                          what: str) -> None:
    """Its last heartbeat came from a collective, and so says nothing of what it does now. It may
    still be there: a line that is full delays heartbeats, too."""
    scene = Scene()
    scene.stalls.processes = {"h1/0/1": Process(line)}
    silent = scene.membership.roster.workers["h1/0/1"]
    for tick in range(20):
        waits = replace(WAITS, for_s=tick / 4, waits_s=tick / 4 + 0.1)
        scene.hear(100.0 + tick / 4, waits, None, waits)
        silent.at, silent.heard_at = replace(WAITS, waits_s=0.1), 100.0
        scene.stalls.look(100.0 + tick / 4)
    verdict = scene.events[0]
    assert (verdict["worker"], verdict["cause"], verdict["phase"], verdict["what"]) == (
        "h1/0/1", cause, phase, what)
    assert len(scene.events) == 1


def test_what_a_worker_did_in_the_generation_before_is_forgotten() -> None:
    """Nor does a heartbeat from before count, nor one of a worker that waits for its next place,
    nor one that cannot be true: hang_s would end a healthy worker as its generation is formed."""
    scene = Scene("hang_s=5")
    roster = scene.membership.roster
    scene.hear(100.0, WAITS, HANGS, WAITS)
    roster.workers["h2/0/1"].phase = Phase.GONE
    for name in ("h0/0/1", "h1/0/1"):
        roster.workers[name].phase = Phase.WAITING
        roster.workers[name].holds_state = True
    rounds = scene.membership.rounds
    rounds.offer = Offer(1, ("h0/0/1", "h1/0/1"), 100.0, "death")
    rounds._form(rounds.offer, 100.0)
    assert all(roster.workers[name].at is None for name in roster.members)

    def heard(state: str = "training", generation: int = 2, **facts: Any) -> At | None:
        worker = roster.workers["h1/0/1"]
        heartbeat = Heartbeat(count=worker.count + 1, phase=state, generation=generation, step=20,
                              holds_state=True, at=replace(HANGS, **facts))
        assert scene.membership.reported("h1/0/1", 100.0, heartbeat)
        return worker.at

    assert heard() == HANGS
    assert heard(generation=1) is heard(step=22) is None
    assert heard(phase="sleep") is None
    assert heard("waiting") is None


def slow_steps(scene: Scene, own_s: Callable[[int, int], float], first: int = 0) -> None:
    """Let 400 steps pass, ten a second, in which a worker computes `own_s(rank, step)` for a
    micro-batch."""
    for step in range(first, first + 400):
        scene.hear(step / 10, *[replace(WAITS, step=step, steps=step, own_s=own_s(rank, step))
                                for rank in range(3)])
        scene.stragglers.look(step / 10)


def test_a_persistent_straggler_is_named_once() -> None:
    """And it leaves, while enough others stay, if that is asked for."""
    for replaces in (False, True):
        scene = Scene("straggler_s=9", replaces)
        slow_steps(scene, lambda rank, step: 0.04 if rank == 1 else 0.02)
        assert [(e["host"], e["is_replaced"]) for e in scene.events] == [("h1", replaces)]
        assert scene.membership.roster.workers["h1/0/1"].drains is replaces
    scene = Scene("straggler_s=9", replaces=True, least=3)
    slow_steps(scene, lambda rank, step: 0.04 if rank == 1 else 0.02)
    assert [event["is_replaced"] for event in scene.events] == [False]


def test_a_machine_that_stood_still_makes_no_worker_hang() -> None:
    """The driver and its workers were frozen for 20 s, and their clocks went on. A worker that
    hangs after that is replaced."""
    scene = Scene("hang_s=5")
    membership = scene.membership
    scene.hear(100.0, WAITS, WAITS, WAITS)
    membership.decide(100.0)
    at = replace(WAITS, for_s=21.0, waits_s=21.0)
    membership.decide(120.0)
    scene.hear(120.5, at, replace(at, phase="load", waits_s=0.0), at)
    scene.stalls.look(120.5)
    stops = [action for action in membership.decide(120.5) if isinstance(action, Stop)]
    assert all(worker.heard_at <= 120.5 for worker in membership.roster.workers.values())
    for now in (121.0, 121.9, 122.8, 123.7, 124.6):
        assert not stops
        at = replace(WAITS, for_s=now - 99.5, waits_s=now - 99.5)
        scene.hear(now, at, replace(at, phase="load", waits_s=0.0), at)
        stops = [action for action in membership.decide(now) if isinstance(action, Stop)]
    assert [(stop.worker, stop.reason) for stop in stops] == [("h1/0/1", "hung")]


@pytest.mark.parametrize(("own_s", "found"), [
    ({"a": 0.046, "b": 0.046, "c": 0.010}, []),  # c has fewer micro-batches: its loader is ahead
    ({"a": 0.046, "b": 0.020, "c": 0.010}, ["a"]),
    ({"a": 0.046, "a2": 0.045, "b": 0.020, "c": 0.020}, ["a", "a2"]),
    ({"a": 0.046, "a2": 0.021, "b": 0.020, "c": 0.020}, ["a"]),
    ({"a": 0.046, "a2": 0.020, "a3": 0.020}, ["a"]),
    ({"a": 0.046, "a2": 0.045, "b": 0.020}, []),
])
def test_a_slow_host_is_compared_with_other_hosts(own_s: dict[str, float],
                                                  found: list[str]) -> None:
    """All of its slow workers are named. Workers of one host are compared with each other if there
    are no two on other hosts."""
    assert slowest(own_s, {name: name[0] for name in own_s})[0] == found


def slow_rank(slow: int, rank: int, step: int) -> float:
    return 0.04 if rank == slow else 0.02


def test_no_host_is_replaced_for_the_work_of_its_rank() -> None:
    """The worker that has inherited the rank becomes slow, and was not before. One that is slow for
    another reason leaves, but no two within 10 minutes."""
    for inherits in (True, False):
        scene = Scene("straggler_s=9", replaces=True, least=1)
        roster = scene.membership.roster
        slow_steps(scene, lambda rank, step: 0.04 if rank == 0 else 0.02)
        scene.membership.hosts_listed({"h1": 1, "h2": 1, "h3": 1})
        newcomer = roster.add("h3", 0, 40.0)
        seated = ["h1/0/1", "h2/0/1", newcomer.name]
        newcomer.phase = Phase.TRAINING
        roster.workers = {name: roster.workers[name] for name in seated}
        roster.members, roster.generation = tuple(seated), 2
        for rank, name in enumerate(seated):
            roster.workers[name].rank = rank
        own_s = partial(slow_rank, 0 if inherits else 2)
        slow_steps(scene, own_s, first=400)
        assert [e["is_replaced"] for e in scene.events] == [True, False]
        slow_steps(scene, own_s, first=7000)
        assert [e["is_replaced"] for e in scene.events] == [True, False] + [True] * (not inherits)


@pytest.mark.parametrize("own_s", [
    lambda rank, step: 0.028 if rank == 1 else 0.02,  # not 1.5 times
    lambda rank, step: 0.004 if rank == 1 else 0.001,  # a few milliseconds
    lambda rank, step: 0.04 if rank == step // 40 % 3 else 0.02,  # each in turn
    lambda rank, step: 0.04 if rank == 1 and step % 90 < 40 else 0.02,  # now and then
    lambda rank, step: 0.0 if rank == 2 else 0.04 if rank == 1 else 0.02,  # with one peer
])
def test_who_is_slow_a_little_or_now_and_then_is_no_straggler(
        own_s: Callable[[int, int], float]) -> None:
    """A worker without microbatches is no peer."""
    scene = Scene("straggler_s=9")
    slow_steps(scene, own_s)
    assert not scene.events


def test_the_suggested_limit_leaves_what_ended_by_itself_in_peace() -> None:
    """A save of 400 s stood still, had a verdict, and ended: a worker in it is none to replace. A
    hang that ended with its worker does not count."""
    step = {"event": "worker.step_committed", "samples": 8, "loss": 0.5}
    hang = {"event": "driver.step_stalled", "stood_s": 300.0}
    began = {"event": "worker.generation_started", "generation": 2, "size": 1, "source": "memory"}
    found = summarize(
        event | {"time": now, "run": "x", "attempt": 1, "step": at} for at, (event, now) in
        enumerate(((step, 0.0), (hang, 310.0), ({"event": "driver.step_resumed",
                                                 "stood_s": 390.0}, 399.0), (step, 400.0),
                   (hang, 800.0), (began, 9000.0), (step, 9001.0))))
    assert found["stalls"] == {"count": 2, "longest_s": 390.0, "suggested_hang_s": 1200}


# --- what a worker reports ------------------------------------------------------------------------

class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    @contextmanager
    def set(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("elastic_trainer.events.mark.time.monotonic", lambda: self.now)
            yield


def enter(mark: Mark, phase: str = "load") -> At:
    """Enter a phase; return what a heartbeat has."""
    mark.enter(phase)
    at = mark.at()
    assert at
    return at


def test_a_mark_has_what_the_loop_does() -> None:
    """Without a place it says nothing; a bucket is named while its collective is waited for."""
    mark = Mark()
    assert mark.at() is None
    mark.reach("world.place_taken")
    mark.wait()
    at = mark.at()
    assert at and (at.phase, at.step) == ("forming", -1) and at.waits_s > 0
    mark.waited()
    mark.begin(7)
    at = mark.at()
    assert at and (at.phase, at.what, at.step) == ("load", "", 7)
    mark.enter("load", "micro-batch 2", [40, 41])
    at = mark.at()
    assert at and (at.phase, at.what, at.step) == ("load", "micro-batch 2, 2 samples from 40", 7)
    mark.reach("step.computed")
    mark.bucket = "ring.0"
    at = mark.at()
    assert at and (at.phase, at.what, at.waits_s) == ("reduce", "ring.0", 0)
    mark.wait()
    at = mark.at()
    assert at and at.waits_s > 0
    for point in ("step.prepared", "step.voted", "step.applied", "step.handed_over"):
        mark.reach(point)
    at = mark.at()
    assert at and (at.phase, at.steps) == ("upload", 0)
    mark.leave()
    assert mark.at() is None


def test_a_step_of_several_phases_is_one_step() -> None:
    """The usual time is that of all its phases. The own time is that of a micro-batch in any of
    them, without its loader. A step that is done again, or in another world, is not counted."""
    clock = Clock()
    with clock.set():
        mark = Mark()
        for step in (7, 8, 8):
            for phase, computes_s in enumerate((1.0, 3.0)):
                mark.begin(step, phase)
                mark.enter("load", "micro-batch 0")
                clock.now += 5.0
                mark.enter("forward", "micro-batch 0")
                clock.now += computes_s
                mark.reach("step.computed")
                mark.wait()
                clock.now += 10.0
                mark.waited()
                mark.reach("step.applied")
            clock.now += 100.0  # the user's code after the step
            if step == 7:
                mark.begin(8)
                at = enter(mark)
                assert (at.steps, at.usual_s, at.own_s) == (1, 34.0, 2.0)
        mark.begin(9)
        assert enter(mark).steps == 2
        mark.leave()
        mark.begin(9)
        at = enter(mark)
        assert (at.steps, at.usual_s, at.own_s) == (2, 0.0, 0.0)


def test_a_wait_ends_with_local_work_and_with_the_step() -> None:
    """Collectives in a row are one wait."""
    clock = Clock()
    with clock.set():
        mark = Mark()
        mark.begin(1)
        mark.enter("reduce")
        for wait_s, works_s, seen in ((2.0, 0.1, 2.0), (3.0, 0.4, 5.1), (1.0, 0.6, 6.5)):
            mark.wait()
            clock.now += wait_s
            assert enter(mark, "reduce").waits_s == pytest.approx(seen)
            mark.waited()
            clock.now += works_s
        assert enter(mark, "reduce").waits_s == 0.0
        mark.wait()
        clock.now += 1.0
        assert enter(mark, "reduce").waits_s == pytest.approx(1.0)
        mark.waited()
        mark.begin(2)
        assert enter(mark).waits_s == 0.0


def test_stacks_are_taken_and_the_lines_of_the_user_pass() -> None:
    """A real process's answer, with a line of the user's within; and no line later on."""
    code = """if True:
        import os, signal, sys, threading, time
        from elastic_trainer.host import stacks
        stacks.answer()
        def waits(): time.sleep(60)
        threading.Thread(target=waits, daemon=True).start()
        os.kill(os.getpid(), signal.SIGURG)
        print("of the user", file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    answer = stacks.Answer()
    answer.expect()
    rest = [line for written in done.stderr.splitlines() for line in answer.take(written)]
    assert rest == ["of the user"]
    assert answer.text().splitlines()[0].startswith("Current thread")
    assert "in waits" in answer.text() and "in <module>" in answer.lines[-1]
    late = stacks.Answer()
    assert all(late.take(line) == [line] for line in done.stderr.splitlines())


def test_a_phase_is_read_from_the_main_threads_stack() -> None:
    """Whatever other threads do."""
    answer = stacks.Answer()
    answer.expect()
    for line in ('Thread 0x01 (most recent call first):',
                 '  File "/x/elastic_trainer/training/loop.py", line 1 in _vote', "",
                 'Current thread 0x02 (most recent call first):',
                 '  File "/x/train.py", line 9 in __getitem__',
                 '  File "/x/elastic_trainer/training/microbatches.py", line 140 in _open'):
        assert not answer.take(line)
    assert answer.phase() == "load"
    assert stacks.Answer().phase() == "" and stacks.Answer().text() == ""


def test_a_handler_of_the_users_own_stays() -> None:
    """The signal is the user's then."""
    before = signal.signal(stacks.ASK, lambda *_: None)
    try:
        mine = signal.getsignal(stacks.ASK)
        stacks.answer()
        assert signal.getsignal(stacks.ASK) is mine
    finally:
        signal.signal(stacks.ASK, before)


def test_a_socket_whose_peer_takes_nothing_is_unsent() -> None:
    """By the kernel's own table, over IPv4 and IPv6."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as listener:
            try:
                listener.bind((address, 0))
            except OSError:
                continue  # no IPv6 here
            listener.listen()
            with socket.create_connection(listener.getsockname()[:2]) as sender:
                sender.setblocking(False)
                inode = str(os.fstat(sender.fileno()).st_ino)
                assert (inode, address) not in unsent_sockets()
                with pytest.raises(BlockingIOError):
                    while True:
                        sender.send(bytes(1 << 20))
                assert (inode, address) in unsent_sockets()
    assert address_in("0100007F") == "127.0.0.1"
    assert address_in("0000000000000000FFFF00000200000A") == "10.0.0.2"
