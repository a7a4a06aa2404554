"""The driver's decisions, without processes: a simulated fleet on a clock of our own."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from elastic_trainer.config import Limits
from elastic_trainer.driver.membership import FAILED_RESTARTS, Membership
from elastic_trainer.driver.roster import Action, End, Form, Phase, Report, Stop, Worker
from elastic_trainer.wire.heartbeat import GPU_LOST, Heartbeat, MachineFault, News
from elastic_trainer.wire.proof import Leaf, Proof
from elastic_trainer.world.arithmetic import Arithmetic


@dataclass
class Fleet:
    """Workers that follow the driver, unless a test makes them do otherwise."""

    membership: Membership
    now: float = 100.0
    acted: list[Action] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    boots: bool = True
    state: set[str] = field(default_factory=set)
    cut: set[frozenset[str]] = field(default_factory=set)
    """Pairs of hosts that do not reach each other."""
    steps: dict[str, int] = field(default_factory=dict)
    """How many steps a worker says that it has finished."""
    computes: dict[str, Arithmetic] = field(default_factory=dict)
    """How the workers of a host compute, where they say it."""
    proves: dict[str, Proof] = field(default_factory=dict)
    """What the workers of a host prove."""
    entered: dict[str, int] = field(default_factory=dict)
    """The generation that a worker was in last: there it has got the newest state."""

    def report(self, name: str, phase: str, **words: Any) -> None:
        worker = self.membership.workers[name]
        self.counts[name] = self.counts.get(name, 0) + 1
        computes, proves = self.computes.get(worker.host), self.proves.get(worker.host)
        facts = {"generation": worker.generation, "unreachable": None if phase == "standby" else (),
                 "arithmetic": computes.to_dict() if computes else None,
                 "proof": proves.to_dict() if proves else None,
                 "holds_state": name in self.state, "step": self.steps.get(name, 0)}
        output = Heartbeat(count=self.counts[name], phase=phase, **facts | words)
        self.membership.reported(name, self.now, output)

    def fails(self, host: str, fault: MachineFault) -> None:
        """Report that the machine of a host's worker has failed."""
        worker = self.membership.workers[self.worker_on(host)]
        self.membership.blame.machine_failed(worker, fault)

    def turn(self, seconds: float = 0.1) -> list[Action]:
        self.now += seconds
        actions: list[Action] = []
        while more := self.membership.decide(self.now):
            actions += more
        self.acted += actions
        return actions

    def live(self) -> None:
        """One round of heartbeats: each worker that is not silent takes its next step."""
        self.turn()
        for name, worker in list(self.membership.workers.items()):
            if worker.phase is Phase.GONE or name in self.silent:
                continue
            news = self.membership.news_for(name, self.now)
            if news.over:
                continue
            if news.leave:
                self.membership.dismiss(name)
            if worker.phase is Phase.BOOTING and self.boots:
                self.report(name, "waiting" if worker.generation else "standby")
            elif news.leave:
                self.membership.exited(name, 75, self.now)
            elif worker.phase is Phase.TRAINING:
                self.state.add(name)
                if self.entered.get(name) != worker.generation:
                    self.entered[name] = worker.generation
                    self.steps[name] = max(
                        self.steps.get(member, 0) for member in self.membership.roster.members)
                self.report(name, "waiting" if news.notice or news.dead else "training")
            elif worker.phase in (Phase.STANDBY, Phase.WAITING):
                tried = self.membership.peers_of(name)
                cut_off = tuple(n for n in tried
                                if frozenset((n.split("/")[0], worker.host)) in self.cut)
                self.report(name, worker.phase.value, accepted=news.offer,
                            unreachable=cut_off if tried else None)
        self.turn(0)

    def run(self, rounds: int = 12, seconds: float = 0.0) -> None:
        for _ in range(max(rounds, int(seconds / 0.1))):
            self.live()

    def world(self) -> list[str]:
        return [self.membership.workers[m].host for m in self.membership.roster.members
                if self.membership.workers[m].phase is not Phase.GONE]

    def worker_on(self, host: str) -> str:
        return next(n for n, w in self.membership.workers.items()
                    if w.host == host and w.phase is not Phase.GONE)


def reported(f: Fleet, event: str) -> list[dict[str, Any]]:
    """Return the fields of an event that the driver was told to log."""
    return [action.fields for action in f.acted
            if isinstance(action, Report) and action.event == event]


def fleet(hosts: str = "abcd", *, first: int | None = None, least: int = 1,
          most: int | None = None) -> Fleet:
    membership = Membership(first_workers=first or len(hosts), min_workers=least, max_workers=most)
    membership.hosts_listed({h: 1 for h in hosts})
    return Fleet(membership)


def test_forms_nothing_when_one_member_does_not_accept() -> None:
    """Nobody enters init while somebody is known to be missing (F1)."""
    f = fleet()
    f.turn()
    for name in list(f.membership.workers):
        f.report(name, "standby")
    f.turn()
    assert f.membership.rounds.offer
    for name in list(f.membership.workers)[:3]:
        f.report(name, "standby", accepted=f.membership.rounds.offer.round)
    f.turn()
    assert not any(isinstance(a, Form) for a in f.acted)
    f.run()
    assert f.world() == ["a", "b", "c", "d"] and f.membership.roster.generation == 1


@pytest.mark.parametrize("phase", ["booting", "standby"])
@pytest.mark.parametrize("says", [True, False])
def test_the_run_goes_on_when_a_newcomer_that_was_let_go_exits_with_an_error(
        phase: str, says: bool) -> None:
    """Its host shuts down, its data vanishes and its code raises: that is no error of the
    user's."""
    f = fleet()
    f.run()
    f.boots = False
    f.membership.hosts_listed({h: 1 for h in "abcde"})
    f.turn()
    newcomer = f.worker_on("e")
    if phase == "standby":
        f.report(newcomer, "standby")
    f.membership.hosts_listed({h: 1 for h in "abcd"})
    f.turn()
    if phase == "standby":
        assert f.membership.news_for(newcomer, f.now).leave
    if says:
        f.report(newcomer, phase, error="FileNotFoundError: /data")
    assert f.membership.exited(newcomer, 70, f.now) != "user_error"
    f.run()
    assert f.membership.verdict is None and f.world() == ["a", "b", "c", "d"]


def test_the_attempt_is_interrupted_when_the_users_loop_was_left() -> None:
    """By break, on one worker: all others receive that, and one of them may write the state."""
    f = fleet()
    f.run()
    left, other = sorted(f.membership.workers)[:2]
    f.report(left, "training", left="the loop was left by break")
    f.turn()
    assert f.membership.verdict == End("interrupted", "the loop was left by break")
    assert f.membership.news_for(other, f.now).over == "interrupted"


def machine(step: int = 12, microbatch: int = 5) -> MachineFault:
    return MachineFault(step=step, microbatch=microbatch, kind="EIO", text="OSError in "
                                                                           f"{microbatch}")


def test_a_machine_that_fails_costs_its_worker_and_its_host_waits() -> None:
    """The others go on without it; a new worker is started there after a back-off."""
    f = fleet()
    f.run()
    victim = f.worker_on("c")
    f.fails("c", machine())
    f.turn()
    assert [a for a in f.acted
            if isinstance(a, Stop)] == [Stop(victim, "machine_failed", at_once=True)]
    assert f.membership.exited(victim, 71, f.now) == "machine_failed"
    f.run(8)
    assert f.world() == ["a", "b", "d"]
    f.run(seconds=5.0)
    assert f.world() == ["a", "b", "d", "c"] and f.membership.verdict is None


def test_a_run_goes_on_when_a_machine_fails_before_the_others_report_training() -> None:
    """Their last heartbeat is from before their first step: it does not mean that the state is
    gone."""
    f = fleet()
    while not f.world():
        f.live()
    victim, *others = f.membership.roster.members
    assert not f.membership.state_exists
    f.state.add(victim)
    f.report(victim, "training")
    for other in others:
        f.report(other, "training")  # it has taken its place
    f.membership.blame.machine_failed(f.membership.workers[victim], machine())
    f.turn()
    f.membership.exited(victim, 71, f.now)
    f.turn()
    assert f.membership.verdict is None
    f.run(seconds=5.0)
    assert len(f.world()) == 4 and f.membership.verdict is None


def test_a_run_ends_when_no_worker_that_might_hold_the_state_holds_it() -> None:
    """They wait for their next place after the only one that held it is gone."""
    f = fleet()
    while not f.world():
        f.live()
    victim, *others = f.membership.roster.members
    f.state.add(victim)
    f.report(victim, "training")
    f.membership.exited(victim, -9, f.now)
    f.turn()
    assert f.membership.verdict is None
    for other in others:
        f.report(other, "waiting")
    f.turn()
    assert f.membership.verdict
    assert "No living worker holds the state" in f.membership.verdict.detail


@pytest.mark.parametrize(("second", "hosts", "ends"), [
    (machine(), "abcd", True), (machine(13), "abcd", False), (machine(microbatch=6), "abcd", False),
    (machine(microbatch=-1), "abcd", False)])
def test_the_same_microbatch_of_the_same_step_on_another_host_is_the_users_error(
        second: MachineFault, hosts: str, ends: bool) -> None:
    """Both tracebacks are shown. Another micro-batch, or another step, is another machine's
    fault."""
    f = fleet(hosts)
    f.run()
    for host, fault in (("b", machine()), ("c", second)):
        f.fails(host, fault)
        f.turn()
    verdict = f.membership.verdict
    assert (verdict is not None) == ends
    if verdict:
        assert verdict.verdict == "user_error" and verdict.detail.count("OSError in 5") == 2
        assert "on b" in verdict.detail and "on c" in verdict.detail


@pytest.mark.parametrize(("kind", "ends"), [(GPU_LOST, True), ("a GPU has failed", False)])
def test_a_lost_gpu_on_two_hosts_in_one_step_is_the_users_error(kind: str, ends: bool) -> None:
    """CUDA raises it late, so not in the same micro-batch."""
    f = fleet("abcd")
    f.run()
    for host, microbatch in (("b", 5), ("c", -1)):
        f.fails(host, MachineFault(step=12, microbatch=microbatch, kind=kind, text="illegal"))
        f.turn()
    assert (f.membership.verdict is not None) == ends
    if f.membership.verdict:
        assert f.membership.verdict.detail.startswith(f"Step 12 fails with {GPU_LOST} on b")


@pytest.mark.parametrize(("hosts", "ends"), [({"a": 3}, True), ({"a": 3, "b": 1}, False)])
def test_the_second_time_on_one_host_is_the_users_error_when_there_is_no_other(
        hosts: dict[str, int], ends: bool) -> None:
    """Its slots share what has failed; with other hosts in the run one of those is asked first."""
    f = fleet("a")
    f.membership.rounds.first_workers = sum(hosts.values())
    f.membership.hosts_listed(hosts)
    f.run()
    for name in [n for n, w in f.membership.workers.items() if w.host == "a"][:2]:
        for _ in range(2):  # a heartbeat says it again
            f.membership.blame.machine_failed(f.membership.workers[name], machine())
        f.turn()
    assert (f.membership.verdict is not None) == ends


IN_INIT = "init (basics.py:150)"


def dies_everywhere(f: Fleet, place: str = IN_INIT, code: int = -11, but: str = "") -> None:
    """Let each host's worker die, when it is there."""
    f.run()
    for name, worker in list(f.membership.workers.items()):
        if worker.phase is not Phase.GONE and worker.host != but:
            f.membership.exited(name, code, f.now, place)
    f.state.clear()
    f.turn(70.0)


def test_one_clear_error_ends_the_run_when_all_workers_die_twice_of_one_signal_in_one_place(
) -> None:
    """Before the first step: it is no machine's fault, and no other attempt would end otherwise."""
    f = fleet()
    f.boots = False
    dies_everywhere(f)
    assert f.membership.verdict is None
    dies_everywhere(f)
    assert f.membership.verdict and f.membership.verdict.verdict == "user_error"
    assert "SIGSEGV" in f.membership.verdict.detail and IN_INIT in f.membership.verdict.detail


@pytest.mark.parametrize("other", ["place", "signal", "unknown", "survivor", "trained"])
def test_the_run_goes_on_when_workers_die_otherwise_or_elsewhere_or_not_all(other: str) -> None:
    """Two places, two signals, an unknown place, one worker that lives, or a run that has
    trained: no verdict."""
    f = fleet()
    f.boots, f.membership.blame.has_trained = False, other == "trained"
    dies_everywhere(f, "" if other == "unknown" else IN_INIT,
                    but="b" if other == "survivor" else "")
    place = {"place": "forward (model.py:3)", "unknown": ""}.get(other, IN_INIT)
    dies_everywhere(f, place, -6 if other == "signal" else -11,
                    but="b" if other == "survivor" else "")
    assert f.membership.verdict is None


@pytest.mark.parametrize(("cuts", "gone"), [
    (["ab"], "b"), (["bd"], "d"), (["ad"], "d"), (["ab", "ac"], "a")])
def test_one_goes_when_some_do_not_reach_each_other(cuts: list[str], gone: str) -> None:
    """All reach the driver, and none is silent; without this they would break every generation. It
    is the younger of two, or the one whom most do not reach, also if it is rank 0."""
    f = fleet()
    f.run()
    f.cut |= set(map(frozenset, cuts))
    for name in f.membership.roster.members:  # Gloo's time-out has broken the generation
        f.report(name, "waiting")
    f.run()
    assert f.world() == [h for h in "abcd" if h != gone]
    assert [(a.worker[0], a.reason) for a in f.acted if isinstance(a, Stop)] == [(gone, "cut_off")]
    f.run(seconds=60.0)
    # A new worker there tries first, and no other worker waits for it.
    assert f.membership.roster.generation == 2
    f.cut.clear()
    f.run(seconds=30.0)
    assert sorted(f.world()) == list("abcd")


def test_all_know_that_they_are_unwanted_when_the_list_is_empty() -> None:
    """So that their last step can be put into the store before they are taken."""
    f = fleet()
    f.run()
    logged = [f.membership.news_for(name, f.now).unwanted for name in f.membership.roster.members]
    f.membership.hosts_listed({})
    assert not any(logged)
    assert all(f.membership.news_for(name, f.now).unwanted for name in f.membership.roster.members)


def test_goes_on_without_the_dead_when_a_member_exits() -> None:
    """Survivors keep their order; the host gets a new worker after its back-off."""
    f = fleet()
    f.run()
    f.membership.exited(f.worker_on("b"), -9, f.now)
    f.run(4)
    assert f.world() == ["a", "c", "d"]
    f.run(seconds=5)
    assert f.world() == ["a", "c", "d", "b"]


@pytest.mark.parametrize("reports", [True, False])
def test_a_host_whose_replica_differs_again_stays_out(reports: bool) -> None:
    """The first time it gets a new worker as after any death; later it is the host: ten minutes,
    and longer each time. A worker that reports it counts as gone from its message on, once,
    whatever its process does then; one that does not has an exit code."""
    f, out = fleet(), list[float]()
    f.run()
    for step in range(1, 13):
        # It has worked for a while.
        f.now = max(f.now, f.membership.roster.hosts["b"].not_before) + 60
        f.run(20)
        f.steps = dict.fromkeys(f.membership.roster.members, step)
        assert f.world() == (["a", "c", "d", "b"] if out else ["a", "b", "c", "d"])
        victim, f.acted = f.worker_on("b"), []
        for _ in range(2 * reports):  # a heartbeat that follows repeats it
            f.report(victim, "training", differs=True)
        f.silent.add(victim)
        if not reports:
            assert f.membership.exited(victim, 76, f.now) == "differed"
        out.append(f.membership.roster.hosts["b"].not_before - f.now)
        f.run(4)
        assert f.world() == ["a", "c", "d"]
        assert [a for a in f.acted if isinstance(a, Stop)] == (
            [Stop(victim, "differed", at_once=True)] if reports else [])
        if reports:
            assert f.membership.exited(victim, -9, f.now) == "differed"
        assert f.membership.roster.hosts["b"].differences == step
    assert [round(seconds) for seconds in out[:4]] == [1, 600, 1200, 2400]
    assert out[-1] == 86400.0


PLAIN = Arithmetic(1, 2, 3, (("cpu", "EPYC"), ("threads", "1")))
OTHER = {"program": replace(PLAIN, program=7, facts=(("cpu", "Xeon"), ("threads", "1"))),
         "gradient": replace(PLAIN, result=7)}


@pytest.mark.parametrize("how", list(OTHER))
def test_a_newcomer_that_computes_other_bits_gets_no_place(how: str) -> None:
    """It is logged with what differs, no worker leaves its step for it, and its host is tried
    again, later each time."""
    f = fleet("abc")
    f.computes = dict.fromkeys("abc", PLAIN) | {"d": OTHER[how]}
    f.run()
    f.membership.hosts_listed({h: 1 for h in "abcd"})
    f.run(seconds=300)
    assert (f.membership.roster.generation, f.world()) == (1, ["a", "b", "c"])
    logged = reported(f, "worker.arithmetic_differs")
    assert [(it["host"], it["other_host"], it["refused"], it["kept_out_s"]) for it in logged] == [
        ("d", "a", True, 60), ("d", "a", True, 120), ("d", "a", True, 240)]
    assert logged[0]["differs"] == ({"cpu": ("Xeon", "EPYC")} if how == "program" else {})


@pytest.mark.parametrize("policy", ["warn", "ring"])
def test_a_newcomer_that_computes_other_bits_enters_where_the_bits_are_not_promised(
        policy: str) -> None:
    """With --mixed-hardware warn, and with the reducer ring; it is logged once."""
    f = fleet("abc")
    f.membership.differences.refuses_mixed = policy != "warn"
    f.computes = {h: replace(PLAIN, is_exact=policy == "warn") for h in "abc"}
    f.computes["d"] = replace(OTHER["program"], is_exact=policy == "warn")
    f.run()
    f.membership.hosts_listed({h: 1 for h in "abcd"})
    f.run()
    assert f.world() == ["a", "b", "c", "d"]
    assert [it["refused"] for it in reported(f, "worker.arithmetic_differs")] == [False]


@pytest.mark.parametrize(("odd", "world"), [("a", "bcd"), ("cd", "ab"), ("bcd", "bcd")])
def test_the_first_world_is_of_those_who_compute_as_most_do(odd: str, world: str) -> None:
    """Of as many, those of the first host. It begins without the others, and does not wait for
    them."""
    f = fleet("abcd")
    f.computes = {h: OTHER["gradient"] if h in odd else PLAIN for h in "abcd"}
    f.run(20)
    assert f.world() == list(world)


@pytest.mark.parametrize("other", [replace(PLAIN, inputs=9, result=9), replace(PLAIN, result=0),
                                   replace(PLAIN, facts=(("cpu", "Xeon"),))])
def test_all_newcomers_enter_when_there_is_no_sign_that_the_bits_differ(other: Arithmetic) -> None:
    """Weights built without a seed, a loss that draws by itself, a processor of another name: all
    are allowed."""
    f = fleet("abcd")
    f.computes = dict.fromkeys("abc", PLAIN) | {"d": other}
    f.run(20)
    assert f.world() == ["a", "b", "c", "d"]
    assert len(reported(f, "worker.weights_differ_as_built")) == (other.inputs == 9)
    assert not reported(f, "worker.arithmetic_differs")


def test_the_back_off_has_a_limit_when_a_host_fails_for_days() -> None:
    """A host whose worker never starts is tried again every minute, however often it has failed."""
    f = fleet()
    f.run()
    for _ in range(2000):
        f.membership.roster.hosts["b"].fail(f.now)
    assert f.membership.roster.hosts["b"].not_before == f.now + 60.0


def test_evicts_when_a_member_is_silent() -> None:
    """Silence ends a slot, whether or not its process ever ends (F3)."""
    f = fleet()
    f.run()
    frozen = f.worker_on("c")
    f.silent.add(frozen)
    for _ in range(60):
        f.live()
    assert Stop(frozen, "frozen", at_once=True) in f.acted
    assert f.world()[:3] == ["a", "b", "d"]


def test_members_do_not_wait_when_a_newcomer_boots_for_ever() -> None:
    """A newcomer is in no generation before it stands ready; in the end it is killed."""
    f = fleet("abc")
    f.run()
    f.boots = False
    f.membership.hosts_listed({h: 1 for h in "abcx"})
    f.run(30)
    assert f.membership.roster.generation == 1
    f.run(seconds=Limits().boot_s)
    assert any(isinstance(a, Stop) and a.reason == "boot_timeout" for a in f.acted)
    assert f.membership.roster.generation == 1


def test_forms_one_generation_when_several_join() -> None:
    """Newcomers wait for one another, so that ten hosts cost one pause."""
    f = fleet("abcd")
    f.run()
    f.membership.hosts_listed({h: 1 for h in "abcdefghij"})
    f.run()
    assert f.world() == list("abcdefghij")
    assert f.membership.roster.generation == 2


def test_leaves_the_rest_ready_when_there_are_more_than_max_workers() -> None:
    """Spare workers stand by and step in at once when a member dies."""
    f = fleet("abcde", first=3, most=3)
    f.run()
    assert f.world() == ["a", "b", "c"]
    assert f.membership.roster.generation == 1
    f.membership.exited(f.worker_on("a"), -9, f.now)
    f.run(4)
    assert f.world() == ["b", "c", "d"]


def test_waits_with_the_state_when_the_list_is_empty() -> None:
    """No worker is dismissed while none may work."""
    f = fleet()
    f.run()
    members = f.membership.roster.members
    f.membership.hosts_listed({})
    f.run()
    assert all(f.membership.workers[m].phase is Phase.WAITING for m in members)
    f.membership.hosts_listed({h: 1 for h in "abcd"})
    f.run()
    assert f.membership.roster.members == members


def test_one_writes_the_state_down_when_all_who_wait_with_it_may_go() -> None:
    """The first that has it, and another one when that is gone; none while one of them is
    wanted."""
    f = fleet(least=3)
    f.run()
    a, b, c, d = f.membership.roster.members

    def writers() -> list[str]:
        return [name for name in (a, b, c, d) if f.membership.news_for(name, f.now).writes]

    for name in (c, d):
        f.membership.exited(name, -9, f.now)
    f.membership.hosts_listed({"b": 1})
    f.run(2)
    assert {f.membership.workers[name].phase for name in (a, b)} == {Phase.WAITING}
    assert not writers()
    f.membership.hosts_listed({})
    assert writers() == [a]
    f.membership.exited(a, -9, f.now)
    assert writers() == [b]
    f.membership.verdict = End("failed", "")
    assert writers() == [b]


def test_hands_the_state_over_when_the_whole_list_is_swapped() -> None:
    """One old member stays for one generation, hands its state over, and leaves."""
    f = fleet("ab")
    f.run()
    f.membership.hosts_listed({h: 1 for h in "xy"})
    f.run(20)
    assert f.world() == ["x", "y"]
    formed = [a for a in f.acted if isinstance(a, Form)]
    assert len(formed) == 3
    assert f.membership.verdict is None


def one_ahead(least: int = 1) -> tuple[Fleet, tuple[str, ...]]:
    """Return a fleet of four whose rank 0 has died, and the others: of them one has seen the last
    vote pass, rank 2."""
    f = fleet(least=least)
    f.run()
    dead, *others = f.membership.roster.members
    f.steps = {
        name: 13 if rank == 2 else 12
        for rank, name in enumerate(f.membership.roster.members)
    }
    f.membership.exited(dead, -9, f.now)
    return f, tuple(others)


def test_the_newest_state_is_the_one_that_is_written_down() -> None:
    """What one has finished is not done again."""
    f, (b, c, d) = one_ahead(least=3)
    f.membership.hosts_listed({})
    f.run()
    assert [name for name in (b, c, d) if f.membership.news_for(name, f.now).writes] == [c]


@pytest.mark.parametrize("left", ["wxyz", "bwxyz"])
def test_the_newest_state_comes_along_when_its_host_has_left_the_list(left: str) -> None:
    """Whether the rest of the old ones leave too or stay."""
    f, (_, c, d) = one_ahead()
    f.membership.hosts_listed({h: 1 for h in left})
    f.run()
    second = [action for action in f.acted if isinstance(action, Form)][1]
    assert c in second.members and d not in second.members
    assert f.world() == list(left)


def test_who_has_the_newest_state_stays_longest_when_it_drains_and_the_rest_are_too_few() -> None:
    """The rest waits for others, and would do its last step again."""
    f, (_, c, d) = one_ahead(least=3)
    f.membership.hosts_listed({"b": 1})
    for name in (c, d):
        f.report(name, "training", drains=True)
    f.run()
    assert not f.membership.workers[c].dismissed and f.membership.workers[c].phase is Phase.WAITING
    assert f.membership.workers[d].phase is Phase.GONE


def test_one_goes_when_there_are_more_than_max_workers() -> None:
    """Who came along with the newest state may be wanted again when the others have it."""
    f = fleet()
    f.run()
    f.membership.rounds.max_workers = 3
    f.run()
    assert f.world() == ["a", "b", "c"]


def test_an_offer_that_a_death_ended_does_not_count_as_refused() -> None:
    """Who is slow to accept may have tried to reach one that was dying."""
    f = fleet("abcdefghij", least=1)
    f.run()
    slow = f.worker_on("j")
    for host in "abcdefg":
        f.membership.exited(f.worker_on(host), -9, f.now)
        f.turn(0)
        for name, worker in f.membership.workers.items():
            if worker.phase is Phase.TRAINING:
                f.report(name, "waiting")
        f.turn()  # no worker has accepted this offer when the next one dies
        assert f.membership.rounds.offer
    assert f.membership.workers[slow].refused_offers == 0


def test_who_was_let_go_has_left_when_its_host_ends_before_its_process() -> None:
    """Nothing was lost with it; a worker that dies with its place is lost, on a host that leaves
    too."""
    f = fleet()
    f.run()
    leaver, victim = f.worker_on("d"), f.worker_on("c")
    f.membership.hosts_listed({"a": 1, "b": 1})
    assert f.membership.exited(victim, -1, f.now) == "crashed"
    f.silent.add(leaver)
    f.membership.workers[leaver].dismissed = True
    assert f.membership.exited(leaver, -1, f.now) == "left"


def test_begins_again_when_all_die_before_anybody_had_values() -> None:
    """While the first generation restores, say: a worker that is ready later has no peer to reach,
    and is not kept waiting."""
    f = fleet("ab", first=1)
    f.membership.hosts_listed({"a": 1})
    f.turn()
    first = f.worker_on("a")
    f.report(first, "standby")
    f.turn()
    f.report(first, "standby", accepted=f.membership.news_for(first, f.now).offer)
    f.turn()
    assert f.world() == ["a"] and not f.state
    f.membership.exited(first, -9, f.now)
    f.membership.hosts_listed({"b": 1})
    f.run()
    assert f.world() == ["b"]


def test_changes_nothing_when_an_old_heartbeat_is_repeated() -> None:
    """A heartbeat with an old number is ignored, and is no sign of life."""
    f = fleet()
    f.run()
    name = f.worker_on("a")
    heard = f.membership.workers[name].heard_at
    f.now += 3
    f.membership.reported(name, f.now, Heartbeat(count=1, phase="waiting", generation=1))
    assert f.membership.workers[name].phase is Phase.TRAINING
    assert f.membership.workers[name].heard_at == heard


def test_comes_back_into_the_round_when_a_member_revives_itself() -> None:
    """While a member starts anew in place, the round waits for it: it may hold the only state."""
    f = fleet("abc")
    f.run()
    f.report(f.worker_on("b"), "reviving")
    f.membership.exited(f.worker_on("c"), -9, f.now)
    f.boots = False
    f.run(5)
    assert f.membership.roster.generation == 1
    f.boots = True
    f.run(5)
    assert f.membership.roster.generation == 2
    assert f.world() == ["a", "b"]


def test_evicts_no_worker_when_the_driver_itself_stood_still() -> None:
    """A gap between decisions is the driver's silence, not the workers'."""
    f = fleet()
    f.run()
    f.now += 60
    f.report(f.worker_on("a"), "training")
    f.run()
    assert not any(isinstance(a, Stop) for a in f.acted)
    assert f.membership.roster.generation == 1


def test_hands_over_and_leaves_when_some_are_asked_to_drain_and_the_rest_are_too_few() -> None:
    """Drainers go while the others wait for new workers in their slots."""
    f = fleet("abcd", least=3)
    f.run()
    for host in "ab":
        f.report(f.worker_on(host), "training", drains=True)
    f.run(seconds=30)
    assert sorted(f.world()) == ["a", "b", "c", "d"]
    assert f.membership.verdict is None


def test_ends_the_attempt_when_all_are_asked_to_drain() -> None:
    """Nobody is left to hold the state: they write it down, and the next attempt restores it."""
    f = fleet("ab")
    f.run()
    for host in "ab":
        f.report(f.worker_on(host), "training", drains=True)
    f.run()
    assert any(isinstance(a, End) and a.verdict == "failed" for a in f.acted)


def test_starts_with_fewer_when_not_all_come_in_time() -> None:
    """A new fleet of three goes on although four were asked for, if three are enough."""
    f = fleet("abc", first=4, least=2)
    f.run(seconds=Limits().start_s + 20)
    assert f.world() == ["a", "b", "c"]


def test_ends_when_no_generation_finishes_a_step() -> None:
    """Two that never find each other must not try for ever."""
    f = fleet("ab")
    f.run()
    for _ in range(40):
        for host in "ab":
            f.report(f.worker_on(host), "reviving") if f.membership.verdict is None else None
        f.run(4)
    assert isinstance(f.membership.verdict,
                      End) and "finished no step" in f.membership.verdict.detail


@pytest.mark.parametrize("code", [1, 2, 70, 127])
@pytest.mark.parametrize("hosts", ["a", "ab"])
def test_goes_on_trying_when_no_worker_boots_in_a_run_that_has_trained(hosts: str,
                                                                       code: int) -> None:
    """A new host whose mount is not there yet is the world's fault: with back-off, until the
    attempt is over."""
    f = fleet(hosts)
    f.membership.blame.has_trained = True
    f.boots = False
    ended, started = 0, f.now
    while f.membership.verdict is None:
        f.live()
        for name, worker in f.membership.workers.items():
            if worker.phase is Phase.BOOTING:
                assert f.membership.exited(name, code, f.now) == "boot_failed"
                ended += 1
    assert f.membership.verdict.verdict == "failed"
    assert ended == FAILED_RESTARTS * len(hosts) and f.now - started > 30


def test_waits_for_a_member_that_revives_itself_however_often_its_host_has_failed() -> None:
    """It holds the state, and is no newcomer that does not boot."""
    f = fleet("ab")
    f.run()
    for host in "ab":
        f.membership.roster.hosts[host].failures = FAILED_RESTARTS
        f.report(f.worker_on(host), "reviving")
    f.boots = False
    f.run()
    assert f.membership.verdict is None
    f.boots = True
    f.run()
    assert f.world() == ["a", "b"] and f.membership.roster.generation == 2


def test_goes_on_trying_when_the_command_fails_where_it_has_worked_once() -> None:
    """All slots are tried again after a worker stood ready, also before the first generation."""
    f = fleet("ab")
    f.turn()
    a, b = f.worker_on("a"), f.worker_on("b")
    f.report(a, "standby")
    f.membership.exited(b, 70, f.now)
    f.membership.exited(a, -9, f.now)
    f.turn(5.0)
    for host in "ab":
        f.membership.exited(f.worker_on(host), 70, f.now)
    f.run(seconds=60)
    assert f.world()


@pytest.mark.parametrize("code", [1, 70])
def test_ends_as_user_error_after_one_try_when_no_host_can_run_the_command(code: int) -> None:
    """Each slot once, and not before: a host without the data must not end what the others can
    do."""
    f = fleet("abcd")
    f.turn()
    for host in "abc":
        f.membership.exited(f.worker_on(host), code, f.now)
        assert not any(isinstance(a, End) for a in f.turn())
    f.membership.exited(f.worker_on("d"), code, f.now)
    assert any(isinstance(a, End) and a.verdict == "user_error" for a in f.turn())


@pytest.mark.parametrize("code", [1, 70])
def test_the_run_goes_on_when_a_newcomers_code_raises(code: int) -> None:
    """What raises before a worker stands ready may be its host's fault, also when it says that it
    was the user's code."""
    f = fleet("abc")
    f.run()
    f.boots = False
    f.membership.hosts_listed({h: 1 for h in "abcx"})
    f.run()
    assert f.membership.exited(f.worker_on("x"), code, f.now) == "boot_failed"
    f.run()
    assert f.world() == ["a", "b", "c"] and f.membership.verdict is None


def test_a_worker_that_sigterm_ends_in_its_boot_has_left() -> None:
    """A notice, and no failure of the run. Its host is tried again after a growing back-off."""
    f = fleet("abc")
    f.run()
    f.boots = False
    f.membership.hosts_listed({h: 1 for h in "abcx"})
    waits: list[float] = []
    for _ in range(3):
        f.run(seconds=10)
        assert f.membership.exited(f.worker_on("x"), -signal.SIGTERM, f.now) == "left"
        waits.append(f.membership.roster.hosts["x"].not_before - f.now)
    assert 0 < waits[0] < waits[1] < waits[2] and f.world() == ["a", "b", "c"]


@pytest.mark.parametrize("code", [0, 1, 2, 127])
def test_ends_as_user_error_when_every_host_fails_again_and_again_before_train(code: int) -> None:
    """A command that cannot work is not tried for ever."""
    f = fleet("ab")
    f.boots = False
    for _ in range(1000):
        f.live()
        booting = [n for n, w in f.membership.workers.items() if w.phase is Phase.BOOTING]
        if booting:
            f.membership.exited(booting[0], code, f.now)
    assert f.membership.verdict and f.membership.verdict.verdict == "user_error"


@pytest.mark.parametrize("seed", range(150))
def test_always_finds_a_world_again_when_anything_happens(seed: int) -> None:
    """Random deaths, freezes, joins, leaves and lost heartbeats: as long as one holder of the state
    lives, a world with it forms again, and two generations never overlap."""
    chance = random.Random(seed)
    f = fleet("abcd", least=1)
    f.run()
    hosts = set("abcd")
    for _ in range(30):
        alive = [
            n for n in f.membership.roster.members
            if f.membership.workers[n].phase is not Phase.GONE
        ]
        match chance.randrange(5):
            case 0 if len(alive) > 1:
                f.membership.exited(chance.choice(alive), chance.choice([-9, -6, 1]), f.now)
            case 1 if len(alive) > 1:
                f.silent.add(chance.choice(alive))
            case 2:
                hosts.add(chance.choice("abcdefgh"))
            case 3 if len(hosts) > 1:
                hosts.discard(chance.choice(sorted(hosts)))
            case 4:
                f.now += chance.random() * 4
                for name in f.counts:
                    worker = f.membership.workers.get(name)
                    if name not in f.silent and worker and worker.phase is Phase.TRAINING:
                        f.report(name, "training")
        f.membership.hosts_listed({h: 1 for h in sorted(hosts)})
        f.run(chance.randrange(4))
        if f.membership.verdict:
            assert not any(w.holds_state and not w.dismissed for w in f.membership.workers.values()
                           if w.phase is not Phase.GONE)
            return
    f.run(seconds=100)
    if f.membership.verdict is None:
        assert set(f.world()) == hosts
        formed = [a.generation for a in f.acted if isinstance(a, Form)]
        assert formed == sorted(set(formed))


def breaks_at_its_begin(f: Fleet) -> None:
    """The newest generation of a fleet breaks before any worker has received anything, and none
    dies."""
    generation = f.membership.roster.generation
    for name in f.membership.roster.members:
        f.report(name, "waiting")
    f.turn()
    for _ in range(40):
        if f.membership.roster.generation > generation:
            return
        f.turn()
        for name, worker in list(f.membership.workers.items()):
            if worker.phase in (Phase.STANDBY, Phase.WAITING):
                news = f.membership.news_for(name, f.now)
                f.report(name, worker.phase.value, accepted=news.offer, unreachable=())


def test_a_newcomer_goes_when_its_join_fails_twice() -> None:
    """The others have a pause each time; the first time it may have been bad luck."""
    f = fleet("abc", least=1)
    f.membership.hosts_listed({h: 1 for h in "ab"})
    f.membership.rounds.first_workers = 2
    f.run(20)
    old = set(f.membership.roster.members)
    f.membership.hosts_listed({h: 1 for h in "abc"})
    f.boots = True
    for _ in range(60):
        f.turn()
        for name, worker in list(f.membership.workers.items()):
            news = f.membership.news_for(name, f.now)
            if worker.phase is Phase.BOOTING:
                f.report(name, "standby")
            elif worker.phase in (Phase.STANDBY, Phase.WAITING):
                f.report(name, worker.phase.value, accepted=news.offer, unreachable=())
            elif worker.phase is Phase.TRAINING and name in old and news.notice:
                f.report(name, "waiting")
        if len(f.membership.roster.members) == 3:
            break
    [newcomer] = set(f.membership.roster.members) - old
    assert f.membership.roster.is_broken() is False
    breaks_at_its_begin(f)
    assert set(f.membership.roster.members) == old | {newcomer}
    breaks_at_its_begin(f)
    assert [(a.worker, a.reason) for a in f.acted
            if isinstance(a, Stop)] == [(newcomer, "join_failed")]
    assert set(f.membership.roster.members) == old


# --- what the driver's cost rests on --------------------------------------------------------------

def test_a_heartbeat_without_news_changes_no_answer() -> None:
    """So no decision is due, and no worker is woken: the step, and when it came, are no
    news."""
    f = fleet("abcd")
    f.run()
    before = f.membership.basis(f.membership.notice(f.now))
    for name in f.membership.roster.members:
        f.steps[name] = 7
        f.report(name, "training")
    assert f.membership.basis(f.membership.notice(f.now)) == before
    f.report(f.membership.roster.members[0], "waiting")
    assert f.membership.basis(f.membership.notice(f.now)) != before


def test_no_worker_is_kept_when_it_has_been_gone_for_a_generation() -> None:
    """A run of weeks loses thousands of them; what they have shown about their hosts and the
    command is kept."""
    f = fleet("ab", least=1)
    f.run(20)
    for number in range(30):
        f.steps = dict.fromkeys(f.membership.roster.members, number)
        name = f.worker_on("b")
        f.membership.exited(name, -9, f.now)
        f.now += 60.0  # its host's back-off
        f.run(120)
        assert name not in f.membership.workers
        assert f.membership.news_for(name, f.now) == News(evicted=True)
    assert len(f.membership.workers) == 2 and f.world() == ["a", "b"]


def test_no_host_is_kept_when_it_left_the_list_long_ago() -> None:
    """On spot each machine has a name that never comes back."""
    f = fleet("a", least=1)
    for number in range(100):
        f.steps = dict.fromkeys(f.membership.roster.members, number)
        f.membership.hosts_listed({"a": 1, f"h{number}": 1})
        f.run(10)
        f.now += 400.0
    assert len(f.membership.roster.hosts) < 20
    assert len({host.order
                for host in f.membership.roster.hosts.values()}) == len(f.membership.roster.hosts)


@pytest.mark.parametrize(("size", "hold_s"), [(1, 0.25), (16, 0.25), (31, 0.3125), (64, 1.0),
                                              (512, 1.0)])
def test_a_large_world_has_fewer_heartbeats_and_as_much_patience(size: int, hold_s: float) -> None:
    """The driver takes some 50 a second of up to 64 workers and one a second of each of more. A
    worker may lose as many seconds in a large world as in a small one."""
    membership = Membership(first_workers=size + 1, min_workers=1, max_workers=None)
    membership.hosts_listed({"a": size})
    membership.roster.workers = {
        str(n): Worker(str(n), "a", n, 0.0, 0.0, phase=Phase.STANDBY)
        for n in range(size)
    }
    assert membership.hold_s() == hold_s
    limit_s = membership.limits.silence_s - membership.limits.heartbeat_s + hold_s
    assert not any(
        isinstance(action, Stop) and action.at_once for action in membership.decide(limit_s - 0.01))
    assert len([action for action in membership.decide(limit_s + 0.01)
                if isinstance(action, Stop)]) == size


# --- the dataset and the program of a worker ------------------------------------------------------

def proof(token: str = "5a", **more: Any) -> Proof:
    """Return the proof of a worker whose sample 7 has this token."""
    leaf = Leaf("list of int", (2,), token, f"AA{token}")
    return Proof(length=40, samples={"7": {"input_ids": leaf}}, **more)


def test_the_run_ends_with_the_users_error_when_its_first_workers_have_other_data() -> None:
    """Nothing shows which of them is right, so no other attempt follows; the sample is named."""
    f = fleet("abc")
    f.proves = {"a": proof(), "b": proof(), "c": proof("7f")}
    f.run(50)
    [end] = [action for action in f.acted if isinstance(action, End)]
    assert end.verdict == "user_error" and not [a for a in f.acted if isinstance(a, Form)]
    assert "sample 7, field `input_ids`, position 1 has another value" in end.detail
    assert "The worker on c" in end.detail and "--allow-change samples" in end.detail


def test_a_newcomer_with_other_data_gets_no_place_and_the_others_go_on() -> None:
    """Its host is tried again later and later, and the run has its first workers' proof also when
    they are gone."""
    f = fleet("ab")
    f.proves = {"a": proof(), "b": proof(), "c": proof("7f"), "d": proof()}
    f.run(20)
    f.membership.hosts_listed({"a": 1, "b": 1, "c": 1, "d": 1})
    f.run(seconds=500)
    told = reported(f, "worker.program_differs")
    assert [(one["host"], one["parts"]) for one in told] == [("c", ["samples"])] * len(told)
    assert [one["kept_out_s"] for one in told[:3]] == [60, 120, 240]
    assert sorted(f.world()) == ["a", "b", "d"]


@pytest.mark.parametrize(("theirs", "allowed"), [
    (proof("7f"), ("samples",)), (proof(weights=9), ()), (proof(hash_seed="5"), ()),
    (proof(optimizer={"optimizer.lr": "0.2"}), ("training.lr",)), (None, ())],
    ids=["allowed", "weights", "hash seed", "an option that may change", "no proof"])
def test_a_newcomer_gets_a_place_when_what_differs_may_differ(
        theirs: Proof | None, allowed: tuple[str, ...]) -> None:
    """--allow-change names a part, or an option of the optimizer; weights are received."""
    f = fleet("ab")
    f.membership.differences.allowed = allowed
    f.proves = {"a": proof(optimizer={"optimizer.lr": "0.1"} if "training.lr" in allowed else {})}
    f.proves |= {"b": f.proves["a"]} | ({"c": theirs} if theirs else {})
    f.run(20)
    f.membership.hosts_listed({"a": 1, "b": 1, "c": 1})
    f.run(200)
    assert len(f.membership.roster.members) == 3
