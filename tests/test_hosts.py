"""The decision who may work: laws for all fleets, and one case for each reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_trainer.discovery.hosts import (
    ENDING,
    IN,
    Health,
    History,
    Instance,
    Past,
    Policy,
    decide,
    lines,
)
from elastic_trainer.discovery.place_protocol import Notice
from elastic_trainer.driver.hosts import addresses_in, parse_hosts

QUICK = Policy(settle_s=0.0)
ASKED = replace(QUICK, agents=True)
READY = Health("ready", heard_at=0.0)
OFF = {"state": "sick", "why": "its clock is +300 s off", "is_clock_off": True}


def instance(number: int, **how: object) -> Instance:
    return replace(Instance(id=f"i-{number}", name=f"host-{number}", launched=float(number)),
                   **how)  # type: ignore[arg-type]


INSTANCES = st.builds(
    Instance, id=st.integers(0, 9).map(lambda n: f"i-{n}"), name=st.just(""),
    type=st.sampled_from(["a", "b"]), launched=st.floats(0, 100),
    lifecycle=st.sampled_from(["spot", "on-demand"]),
    state=st.sampled_from(["running", "running", "running", "pending", "shutting-down"]),
    group_state=st.sampled_from(["", "InService", "InService", "Terminating:Wait", "Pending"]),
    is_impaired=st.sampled_from([False, False, False, True]),
    notice=st.sampled_from([None, None, None, Notice("deleted", 60.0), Notice("tainted"),
                            Notice("tainted", for_good=False)]),
    address=st.sampled_from(["", "10.0.0.1"]),
    events=st.sampled_from([(), (), (("instance-stop", 9999.0), ), (("instance-stop", 60.0), )]),
    slots=st.integers(0, 8))
HEALTH = st.builds(Health, state=st.sampled_from(["ready", "ready", "draining", "sick"]),
                   why=st.just("why"), rebalance=st.booleans(), heard_at=st.just(0.0))


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[list[Instance], dict[str, Health], float]]:
    """Polls one after the other: the cloud's and the agents' answers, and their times."""
    polls, now = [], 0.0
    for _ in range(draw(st.integers(1, 12))):
        now += draw(st.floats(0.5, 400))
        fleet = draw(st.lists(INSTANCES, unique_by=lambda i: i.id, max_size=8))
        health = {i.id: replace(draw(HEALTH), heard_at=now) for i in fleet if draw(st.booleans())}
        polls.append(([replace(i, name=f"host-{i.id}") for i in fleet], health, now))
    return polls


@settings(max_examples=400, deadline=None)
@given(stories(), st.builds(Policy, lifecycle=st.sampled_from(["spot", "any"]),
                            agents=st.booleans(), same_type=st.booleans()))
def test_the_laws_hold_in_every_story(story: list[tuple[list[Instance], dict[str, Health], float]],
                                      policy: Policy) -> None:
    """No excluded and no unfit host on a believed list, a reason for each host, order by age, and
    no mutation of the past."""
    history, doomed = History(), set[str]()
    for fleet, health, now in story:
        before = history
        decision = decide(fleet, health, history, now, policy)
        assert decide(fleet, health, before, now, policy) == decision
        history = decision.history
        doomed = {i for i in doomed if i in history.past} | {
            i for i, says in health.items()
            if says.state == "draining" and i in history.past and history.past[i].doomed}
        listed = [i for i, _, _ in history.listed]
        assert not doomed & set(listed)
        assert {i.id for i in fleet} <= decision.reasons.keys()
        assert len(set(listed)) == len(listed) == len(decision.hosts)
        if not decision.hosts:
            assert not any(why.startswith("arriving") for why in decision.reasons.values())
        if not history.doubted:
            by_id = {i.id: i for i in fleet}
            order = [(len(history.past[i].arrivals) > 1, by_id[i].launched) for i in listed]
            assert order == sorted(order)
            for i in listed:
                assert by_id[i].state == "running" and by_id[i].slots > 0
                assert not by_id[i].notice
                assert not by_id[i].is_impaired
                assert by_id[i].group_state in ("", "InService") and decision.reasons[i] == IN
                assert policy.lifecycle == "any" or by_id[i].lifecycle == "spot"
            if policy.same_type:
                assert len({by_id[i].type for i in listed}) <= 1
        else:
            assert not {i for i, why in decision.reasons.items() if why == IN} - set(listed)
            assert set(listed) <= {i for i, _, _ in before.listed}
            assert not set(history.doubted) <= set(before.doubted)


class Polls:
    """The decisions of one story, each with the history of those before."""

    def __init__(self, policy: Policy = QUICK, history: History | None = None):
        self.policy, self.history = policy, history or History()

    def __call__(self, now: float, fleet: list[Instance],
                 health: Mapping[str, Health] = {}) -> list[str]:  # noqa: B006 (read only)
        """Decide; returns the list."""
        decision = decide(fleet, health, self.history, now, self.policy)
        self.history, self.reasons = decision.history, decision.reasons
        return [name for name, _ in decision.hosts]


def host(*numbers: int) -> list[str]:
    """Return the names of these instances."""
    return [f"host-{number}" for number in numbers]


def heard(now: float, *numbers: int, **how: object) -> dict[str, Health]:
    """Return the answers of these instances' agents: ready, or as given."""
    answer = replace(READY, heard_at=now, **how)  # type: ignore[arg-type]
    return {f"i-{number}": answer for number in numbers}


@pytest.mark.parametrize(
    ("how", "why"),
    [({"state": "pending"}, "pending"), ({"lifecycle": "on-demand"}, "only spot"),
     ({"is_impaired": True}, "impaired"), ({"group_state": "Terminating:Wait"}, "Terminating:Wait"),
     ({"slots": 0}, "no slots"), *[({"events": ((code, 60.0), )}, code) for code in ENDING]])
def test_an_instance_is_out_with_its_reason(how: dict[str, object], why: str) -> None:
    """Each of the cloud's states that forbids to work."""
    polls = Polls()
    assert polls(0.0, [instance(1), instance(2, **how)]) == host(1)
    assert why in polls.reasons["i-2"]


def test_the_oldest_comes_first() -> None:
    """It becomes rank 0; later hosts are behind it."""
    assert Polls()(0.0, [instance(3), instance(1), instance(2)]) == host(1, 2, 3)


def test_a_host_under_notice_never_comes_back() -> None:
    """Its agent may die, be restarted, or say ready again: the incarnation is doomed. It is also
    when one answer is without the host."""
    fleet, polls = [instance(1), instance(2), instance(3)], Polls(ASKED)
    ready = heard(0.0, 1, 2, 3)
    assert polls(0.0, fleet, ready) == host(1, 2, 3)
    notice = ready | heard(0.0, 1, state="draining", why="terminate at 12:00")
    assert polls(1.0, fleet, notice) == host(2, 3)
    assert polls.reasons["i-1"] == "notice: terminate at 12:00"
    for now, there in ((2.0, fleet), (3.0, fleet[1:]), (4.0, fleet)):
        assert polls(now, there, ready) == host(2, 3)


def test_a_rebalance_recommendation_makes_no_one_leave() -> None:
    """It is right about one time in three."""
    assert Polls(ASKED)(0.0, [instance(1)], heard(0.0, 1, rebalance=True)) == host(1)


def test_ten_that_arrive_within_seconds_enter_together() -> None:
    """Each join costs a pause: one for all of them, and none waits for ever."""
    every = lists(Policy(), 40, lambda second: [
        instance(0), *(instance(n) for n in range(1, 11) if second >= 2 * n)])
    changes = sum(before != after for before, after in zip([[], *every], every, strict=False))
    assert len(every[-1]) == 11
    assert changes <= 3  # the first host, a batch after settle_most_s, the rest


def lists(policy: Policy, seconds: int, fleet: Callable[[int], list[Instance]],
          health: Callable[[int], dict[str, Health]] = lambda second: {},
          past: Mapping[str, Past] = {}) -> list[list[str]]:
    """Return the list of each second of a story."""
    polls = Polls(policy, History(past))
    return [polls(float(second), fleet(second), health(second)) for second in range(seconds)]


def test_ten_that_arrive_one_by_one_cost_one_change() -> None:
    """None of them is later than settle_s behind the one before."""
    every = lists(Policy(), 30, lambda second: [instance(n) for n in range(11) if second >= n])
    assert [len(listed) for listed in every] == [1] * 13 + [11] * 17


def test_newcomers_do_not_wait_for_hosts_that_leave() -> None:
    """A larger group of another type comes, or replacements, and then everybody has notice: the
    list is never empty."""
    fleet = [instance(1, type="a"), instance(2, type="a"),
             *(instance(n, type="b") for n in (3, 4, 5))]
    expected = [host(1, 2)] * 4 + [host(3, 4, 5)] * 6

    def there(second: int) -> list[Instance]:
        return fleet[:5 if second >= 3 else 2]

    def health(second: int) -> dict[str, Health]:
        return heard(second, 3, 4, 5) | heard(second, 1, 2,
                                              state="draining" if second >= 4 else "ready")

    assert lists(Policy(same_type=True), 10, there) == expected  # doubted once
    assert lists(Policy(agents=True), 10, there, health) == expected


def test_a_host_whose_hold_ends_waits_for_others_like_a_newcomer() -> None:
    """It has been fit for long, and could not enter: it cuts no batch short."""
    held = Past(first_fit=-100.0, arrivals=(-300.0, -200.0, -100.0), holds=1, held_until=11.0)
    came = {1: 0, 3: 0, 4: 10, 5: 12}
    every = lists(Policy(), 30,
                  lambda second: [instance(n) for n, at in came.items() if second >= at],
                  past={"i-3": held})
    assert every == [host(1)] * 15 + [host(1, 4, 5, 3)] * 15


def test_a_host_that_returned_stands_behind_those_that_stayed() -> None:
    """It has become no less likely to go; the order stays as it is while no host comes or goes."""
    fleet = [instance(n) for n in (1, 2, 3)]
    every = lists(QUICK, 2000, lambda second: fleet[1:] if second == 5 else fleet)
    assert every == [host(1, 2, 3)] * 5 + [host(2, 3)] + [host(2, 3, 1)] * 1994


def test_a_host_that_flaps_is_held_back_longer_each_time() -> None:
    """It is let in again when it has stayed for a while."""
    polls, held = Polls(), []
    for second in range(0, 300, 5):
        state = "pending" if second % 20 == 10 and second < 200 else "running"
        polls(float(second), [instance(1), instance(2, state=state)])
        if "held back" in polls.reasons["i-2"]:
            held.append(second)
    assert held and held[0] <= 60
    assert polls.history.past["i-2"].holds > 1
    assert polls(4000.0, [instance(1), instance(2)]) == host(1, 2)


def test_an_empty_answer_must_be_confirmed() -> None:
    """Losing more than half without a notice is believed only when the next poll confirms it."""
    fleet = [instance(n) for n in range(4)]
    for there, listed in ((fleet, host(0, 1, 2, 3)), ([], []), (fleet[1:], host(1, 2, 3))):
        polls = Polls()
        assert polls(0.0, fleet) == host(0, 1, 2, 3)
        if there != fleet[1:]:  # one fewer is believed at once
            assert polls(5.0, []) == host(0, 1, 2, 3)
        assert polls(10.0, there) == listed


def test_all_leave_at_once_when_all_are_under_notice() -> None:
    """A notice explains the loss."""
    fleet, polls = [instance(1), instance(2)], Polls(ASKED)
    assert polls(0.0, fleet, heard(0.0, 1, 2)) == host(1, 2)
    assert polls(1.0, fleet, heard(1.0, 1, 2, state="draining")) == []


def test_a_silent_agent_costs_its_host_the_place_only_after_a_while() -> None:
    """Not yet heard: booting. Heard, then silent: in for silence_s, then out."""
    fleet, polls = [instance(1)], Polls(ASKED)
    assert polls(0.0, fleet) == [] and "booting" in polls.reasons["i-1"]
    assert polls(0.0, fleet, heard(0.0, 1)) == host(1)
    assert polls(10.0, fleet) == host(1)
    polls(30.0, fleet)
    assert polls(31.0, fleet) == [] and "silent" in polls.reasons["i-1"]


def test_only_the_largest_group_of_one_type_works_when_asked() -> None:
    """The slowest type would set the pace for all."""
    polls = Polls(replace(QUICK, same_type=True))
    fleet = [instance(1, type="a"), instance(2, type="b"), instance(3, type="b")]
    assert polls(0.0, fleet) == host(2, 3)
    assert "most are b" in polls.reasons["i-1"]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_most_agents_unheard_at_once_is_our_own_fault(data: st.DataObject) -> None:
    """Silent or by another clock: the list stands for as long as that lasts; fewer, or one alone,
    go after a while."""
    polls, size = Polls(ASKED), data.draw(st.integers(1, 8))
    fleet = [instance(n) for n in range(size)]
    quiet = data.draw(st.dictionaries(st.integers(0, size - 1), st.booleans()))
    since = {n: data.draw(st.floats(5, 7)) for n in quiet}
    steps = data.draw(st.lists(st.floats(0.5, 3), min_size=60, max_size=60))
    is_ours = len(quiet) >= 2 and 2 * len(quiet) > size
    loud, now = set(host(*(n for n in range(size) if n not in quiet))), 0.0

    def says(number: int) -> dict[str, Health]:
        if number not in quiet or now < since[number] or now > 60:
            return heard(now, number)
        return heard(now, number, **OFF) if quiet[number] else {}

    for step in steps:
        health = {key: h for n in range(size) for key, h in says(n).items()}
        listed = set(polls(now, fleet, health))
        assert listed >= (loud | set(host(*quiet)) if is_ours else loud)
        if 40 < now <= 60:
            assert polls.history.unheard == len(quiet) if is_ours else listed == loud
        now += step
    if now > 64:
        assert polls.history.unheard == 0 and len(listed) == size


def test_a_host_leaves_for_its_own_reason_while_most_agents_are_silent() -> None:
    """The cloud's state and a notice count; the rest stays, also when it is one alone by then."""
    fleet, polls = [instance(n) for n in range(4)], Polls(ASKED)
    polls(0.0, fleet, heard(0.0, 0, 1, 2, 3))
    for now in (10.0, 19.0, 21.0, 60.0):
        assert len(polls(now, fleet, heard(now, 0))) == 4
    assert polls.history.unheard == 3
    fleet[1] = replace(fleet[1], state="shutting-down")
    notice = heard(61.0, 0, state="draining", why="terminate")
    assert polls(61.0, fleet, notice) == host(2, 3)
    for now in (100.0, 199.0, 200.0):
        assert polls(now, fleet[3:]) == host(3)
    polls(201.0, fleet[3:], heard(201.0, 3))
    assert polls.history.unheard == 0
    polls(222.0, fleet[3:])
    assert "silent" in polls.reasons["i-3"]


def test_a_host_that_is_still_silent_when_others_answer_again_has_more_time() -> None:
    """One lost question must not cost it its place."""
    fleet, polls = [instance(n) for n in range(3)], Polls(ASKED)
    polls(0.0, fleet, heard(0.0, 0, 1, 2))
    polls(100.0, fleet)
    assert len(polls(101.0, fleet, heard(101.0, 0, 1))) == 3
    assert polls.history.unheard == 0
    assert len(polls(110.0, fleet, heard(110.0, 0, 1))) == 3
    assert polls(112.0, fleet, heard(112.0, 0, 1)) == host(0, 1)


def test_a_newcomer_with_another_clock_stays_out() -> None:
    """At once, and also one that was fit but had not entered yet."""
    fleet, polls, off = [instance(1), instance(2)], Polls(ASKED), heard(0.0, 1) | heard(0.0, 2,
                                                                                       **OFF)
    assert polls(0.0, fleet, off) == host(1)
    assert polls.reasons["i-2"] == "sick: its clock is +300 s off"
    polls.policy = replace(ASKED, settle_s=9.0)
    polls(0.0, fleet, heard(0.0, 1, 2))
    assert polls.reasons["i-2"].startswith("arriving")
    polls.policy = ASKED
    assert polls(9.5, fleet, off) == host(1)


def test_a_sick_host_is_sick_still_when_it_falls_silent() -> None:
    """Without memory or disk its agent may miss its seconds; no worker is started on it for
    that."""
    polls = Polls(ASKED)
    for now in range(100):
        health = heard(now, 1)
        if now < 10 or now > 50:
            health |= heard(now, 2)
        elif now < 20:
            health |= heard(now, 2, state="sick", why="no memory")
        listed = polls(float(now), [instance(1), instance(2)], health)
        assert ("host-2" in listed) == (now < 10 or now > 50), now


def test_a_stopped_agent_costs_its_host_the_place_until_the_next_one_starts() -> None:
    """Silence does not bring it back, nor the same agent's answer; the cloud's notice is for good
    all the same."""
    fleet, polls = [instance(1), instance(2)], Polls(ASKED)
    stops = {"state": "draining", "why": "the host is being stopped"}
    for now, says, expected in (
            (0.0, {"life": "a"}, 2), (1.0, stops | {"life": "a", "for_good": False}, 1),
            (2.0, None, 1), (3.0, {"life": "a"}, 1), (4.0, {"life": "b"}, 2),
            (5.0, stops | {"life": "b", "for_good": True}, 1), (6.0, {"life": "c"}, 1)):
        health = heard(now, 1, life="a") | (heard(now, 2, **says) if says else {})
        assert len(polls(now, fleet, health)) == expected, now


def test_a_place_s_own_notice_is_what_the_user_reads() -> None:
    """With its time; for good, also where the agent was stopped by the same event; one that may be
    withdrawn ends with it. A whole fleet under notice is believed at once."""
    deleted = Notice("pod deleted", 61.0)
    tainted = Notice("node tainted karpenter.sh/disrupted", for_good=False)
    polls = Polls(ASKED)
    fleet = [instance(1), instance(2), instance(3)]
    health = heard(0.0, 1, 2, 3)
    assert polls(0.0, fleet, health) == host(1, 2, 3)
    noticed = [replace(fleet[0], notice=deleted), replace(fleet[1], notice=tainted)]
    assert polls(1.0, [*noticed, fleet[2]], health) == host(3)
    assert polls.reasons["i-1"] == "notice: pod deleted, taken at 00:01:01 UTC"
    assert polls.reasons["i-2"] == "notice: node tainted karpenter.sh/disrupted"
    assert polls(2.0, fleet, health) == host(3, 2)
    stopped = heard(3.0, 2, state="draining", for_good=False, life="a", why="SIGTERM")
    assert polls(3.0, fleet, health | stopped) == host(3)
    assert polls.reasons["i-2"] == "SIGTERM: its agent was stopped, and no other one has started"
    assert polls(4.0, [replace(i, notice=deleted) for i in fleet], health) == []
    assert not polls.history.doubted


def test_a_state_of_the_place_has_its_own_sentence() -> None:
    """So that the user reads why a pod is not ready."""
    polls = Polls()
    assert polls(0.0, [instance(1, state="pending", says="the image cannot be pulled")]) == []
    assert polls.reasons == {"i-1": "the image cannot be pulled"}


def test_a_host_s_address_follows_its_name_onto_the_list() -> None:
    """Also of a host that the place's last answer lacks, while that is doubted; the script and the
    driver read it."""
    fleet, polls = [instance(1, address="10.0.0.1"), instance(2), instance(3, port=41234)], Polls()
    polls(0.0, fleet)
    wanted = "host-1:1 10.0.0.1\nhost-2:1\nhost-3:1 host-3:41234\n"
    assert lines(polls.history) == wanted
    polls(1.0, fleet[2:])
    assert polls.history.doubted and lines(polls.history) == wanted
    assert list(parse_hosts(wanted, None)) == host(1, 2, 3)
    assert addresses_in(wanted) == {"host-1": "10.0.0.1", "host-3": "host-3:41234"}


def test_a_host_s_zone_follows_its_name_onto_the_list() -> None:
    """A zone with a name that no line can have is unknown, and the host stays."""
    fleet, polls = [replace(instance(number), zone=zone) for number, zone in enumerate(
        ("eu-1a", "", "a b"), 1)], Polls()
    polls(0.0, [replace(fleet[0], address="10.0.0.1"), *fleet[1:]])
    assert lines(polls.history, with_zones=True) == (
        "host-1:1 10.0.0.1 zone=eu-1a\nhost-2:1\nhost-3:1\n")
    assert lines(polls.history) == "host-1:1 10.0.0.1\nhost-2:1\nhost-3:1\n"


def test_a_name_that_returns_with_another_incarnation_is_another_host() -> None:
    """A notice, a stop or a fault of the one before does not hold for it, and its address is its
    own. (A place that gives a name again makes it unique: the hosts file has two names then.)"""
    polls = Polls(ASKED)
    old = replace(instance(1), id="uid-1", name="w-0-aaaaa", address="10.0.0.1")
    answer = {"uid-1": replace(READY, life="a")}
    assert polls(0.0, [old, instance(2)], answer | heard(0.0, 2)) == ["w-0-aaaaa", "host-2"]
    gone = replace(old, notice=Notice("pod deleted"))
    assert polls(1.0, [gone, instance(2)], heard(1.0, 2)) == host(2)
    new = replace(old, id="uid-2", name="w-0-bbbbb", address="10.0.0.9", launched=9.0)
    both = {"uid-1": replace(READY, life="a", heard_at=2.0),
            "uid-2": replace(READY, life="b", heard_at=2.0)} | heard(2.0, 2)
    assert polls(2.0, [gone, instance(2), new], both) == ["host-2", "w-0-bbbbb"]
    assert lines(polls.history) == "host-2:1\nw-0-bbbbb:1 10.0.0.9\n"


def test_a_scheduled_event_sends_its_host_away_only_when_it_is_near() -> None:
    """It may be announced weeks before."""
    polls = Polls()
    for now, left_s, listed in ((0.0, 901.0, host(1, 2)), (5.0, 899.0, host(1))):
        events = (("instance-retirement", left_s),)
        assert polls(now, [instance(1), instance(2, events=events)]) == listed
    assert polls.reasons["i-2"] == "scheduled: instance-retirement"


def test_a_host_that_flaps_by_being_missing_is_held_back() -> None:
    """What is known of it outlives its absence; it is forgotten when it has been away for long."""
    polls, fleet = Polls(), [instance(1), instance(2), instance(3)]
    for second in range(0, 50, 10):
        polls(float(second), fleet if second % 20 == 0 else fleet[:2])
    assert polls.reasons["i-3"].startswith("held back: it came 3 times")
    for now, is_known in ((600.0, True), (700.0, False)):
        polls(now, fleet[:2])
        assert ("i-3" in polls.history.past) == is_known


def test_a_host_may_flap_for_years() -> None:
    """The hold has an upper end, and so has its reckoning."""
    polls = Polls(history=History({"i-1": Past(arrivals=(1.0, 2.0), holds=5000)}))
    polls(3.0, [instance(1)])
    assert polls.history.past["i-1"].held_until == 3.0 + QUICK.hold_most_s


def test_since_when_a_host_is_out_is_known() -> None:
    """For every one of them."""
    polls, fleet = Polls(), [instance(1), instance(2, state="pending")]
    polls(5.0, fleet)
    polls(9.0, fleet)
    past = polls.history.past
    assert (past["i-1"].first_fit, past["i-2"].first_unfit) == (5.0, 5.0)
    polls(9.0, [instance(1), instance(2)])
    assert polls.history.past["i-2"].first_unfit is None
