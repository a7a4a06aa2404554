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
    Decision,
    Health,
    History,
    Instance,
    Past,
    Policy,
    decide,
)

QUICK = Policy(settle_s=0.0)


def instance(number: int, **how: object) -> Instance:
    return replace(Instance(id=f"i-{number}", name=f"host-{number}", launched=float(number)),
                   **how)  # type: ignore[arg-type]


def names(decision: Decision) -> list[str]:
    return [name for name, _ in decision.hosts]


INSTANCES = st.builds(
    Instance,
    id=st.integers(0, 9).map(lambda n: f"i-{n}"),
    name=st.just(""),
    type=st.sampled_from(["a", "b"]),
    launched=st.floats(0, 100),
    lifecycle=st.sampled_from(["spot", "on-demand"]),
    state=st.sampled_from(["running", "running", "running", "pending", "shutting-down"]),
    group_state=st.sampled_from(["", "InService", "InService", "Terminating:Wait", "Pending"]),
    is_impaired=st.sampled_from([False, False, False, True]),
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
        doomed = {i for i in doomed if i in history.past} | {i for i, says in health.items()
                                                             if says.state == "draining"
                                                             and i in history.past
                                                             and history.past[i].doomed}
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
                assert by_id[i].state == "running" and not by_id[i].is_impaired and by_id[
                    i].slots > 0
                assert by_id[i].group_state in ("", "InService") and decision.reasons[i] == IN
                assert policy.lifecycle == "any" or by_id[i].lifecycle == "spot"
            if policy.same_type:
                assert len({by_id[i].type for i in listed}) <= 1
        else:
            assert not {i for i, why in decision.reasons.items() if why == IN} - set(listed)
            assert set(listed) <= {i
                                   for i, _, _ in before.listed
                                   } and not set(history.doubted) <= set(before.doubted)


@pytest.mark.parametrize(
    ("how", "why"),
    [({"state": "pending"}, "pending"), ({"lifecycle": "on-demand"}, "only spot"),
     ({"is_impaired": True}, "impaired"), ({"group_state": "Terminating:Wait"}, "Terminating:Wait"),
     ({"slots": 0}, "no slots"), *[({"events": ((code, 60.0), )}, code) for code in ENDING]])
def test_an_instance_is_out_with_its_reason(how: dict[str, object], why: str) -> None:
    """Each of the cloud's states that forbids to work."""
    decision = decide([instance(1), instance(2, **how)], {}, History(), 0.0, QUICK)
    assert names(decision) == ["host-1"]
    assert why in decision.reasons["i-2"]


def test_the_oldest_comes_first() -> None:
    """It becomes rank 0; later hosts are behind it."""
    fleet = [instance(3), instance(1), instance(2)]
    assert names(decide(fleet, {}, History(), 0.0, QUICK)) == ["host-1", "host-2", "host-3"]


def test_a_host_under_notice_never_comes_back() -> None:
    """Its agent may die, be restarted, or say ready again: the incarnation is doomed."""
    fleet, policy = [instance(1), instance(2)], replace(QUICK, agents=True)
    ready = Health("ready", heard_at=0.0)
    first = decide(fleet, {"i-1": ready, "i-2": ready}, History(), 0.0, policy)
    assert names(first) == ["host-1", "host-2"]
    notice = decide(
        fleet, {"i-1": replace(ready, state="draining", why="terminate at 12:00"), "i-2": ready},
        first.history, 1.0, policy)
    assert names(notice) == ["host-2"]
    assert notice.reasons["i-1"] == "notice: terminate at 12:00"
    again = decide(fleet, {"i-1": ready, "i-2": ready}, notice.history, 2.0, policy)
    assert names(again) == ["host-2"]


def test_a_rebalance_recommendation_makes_no_one_leave() -> None:
    """It is right about one time in three."""
    says = {"i-1": Health("ready", rebalance=True)}
    assert names(decide([instance(1)], says, History(), 0.0, replace(QUICK,
                                                                     agents=True))) == ["host-1"]


def test_ten_that_arrive_within_seconds_enter_together() -> None:
    """Each join costs a pause: one for all of them, and none waits for ever."""
    policy, history, changes, listed = Policy(), History(), 0, list[str]()
    for second in range(40):
        fleet = [instance(0), *(instance(n) for n in range(1, 11) if second >= 2 * n)]
        decision = decide(fleet, {}, history, float(second), policy)
        changes += names(decision) != listed
        listed, history = names(decision), decision.history
    assert len(listed) == 11
    assert changes <= 3  # the first host, a batch after settle_most_s, the rest


def lists(policy: Policy,
          seconds: int,
          fleet: Callable[[int], list[Instance]],
          health: Callable[[int], dict[str, Health]] = lambda second: {},
          past: Mapping[str, Past] = {}) -> list[list[str]]:
    """Return the list of each second of a story."""
    made, history = [], History(past)
    for second in range(seconds):
        decision = decide(fleet(second), health(second), history, float(second), policy)
        made.append(names(decision))
        history = decision.history
    return made


def test_ten_that_arrive_one_by_one_cost_one_change() -> None:
    """None of them is later than settle_s behind the one before."""
    every = lists(Policy(), 30, lambda second: [instance(n) for n in range(11) if second >= n])
    assert [len(listed) for listed in every] == [1] * 13 + [11] * 17


def test_newcomers_do_not_wait_for_hosts_that_leave() -> None:
    """A larger group of another type comes, or replacements, and then everybody has notice: the
    list is never empty."""
    fleet = [instance(1, type="a"), instance(2, type="a"),
             *(instance(n, type="b") for n in (3, 4, 5))]
    old, new = ["host-1", "host-2"], ["host-3", "host-4", "host-5"]
    every = lists(Policy(same_type=True), 10, lambda second: fleet[:5 if second >= 3 else 2])
    assert every == [old] * 4 + [new] * 6  # doubted once

    def health(second: int) -> dict[str, Health]:
        return {i.id: Health("draining" if second >= 4 and i.type == "a" else "ready",
                             heard_at=second) for i in fleet}

    assert lists(Policy(agents=True), 10, lambda second: fleet[:5 if second >= 3 else 2],
                 health) == [old] * 4 + [new] * 6


def test_a_host_whose_hold_ends_waits_for_others_like_a_newcomer() -> None:
    """It has been fit for long, and could not enter: it cuts no batch short."""
    held = Past(first_fit=-100.0, arrivals=(-300.0, -200.0, -100.0), holds=1, held_until=11.0)
    came = {1: 0, 3: 0, 4: 10, 5: 12}
    every = lists(Policy(),
                  30,
                  lambda second: [instance(n) for n, at in came.items() if second >= at],
                  past={"i-3": held})
    assert every == [["host-1"]] * 15 + [["host-1", "host-4", "host-5", "host-3"]] * 15


def test_a_host_that_returned_stands_behind_those_that_stayed() -> None:
    """It has become no less likely to go; the order stays as it is while no host comes or goes."""
    fleet = [instance(n) for n in (1, 2, 3)]
    every = lists(QUICK, 2000, lambda second: fleet[1:] if second == 5 else fleet)
    stayed = ["host-2", "host-3"]
    assert every == [["host-1", *stayed]] * 5 + [stayed] + [[*stayed, "host-1"]] * 1994


def test_a_host_that_flaps_is_held_back_longer_each_time() -> None:
    """It is let in again when it has stayed for a while."""
    history, held = History(), []
    fleet = [instance(1), instance(2)]
    for second in range(0, 300, 5):
        state = "pending" if second % 20 == 10 and second < 200 else "running"
        decision = decide([fleet[0], replace(fleet[1], state=state)], {}, history, float(second),
                          QUICK)
        history = decision.history
        if "held back" in decision.reasons["i-2"]:
            held.append(second)
    assert held and held[0] <= 60
    assert history.past["i-2"].holds > 1
    assert names(decide(fleet, {}, history, 4000.0, QUICK)) == ["host-1", "host-2"]


def test_an_empty_answer_must_be_confirmed() -> None:
    """Losing more than half without a notice is believed only when the next poll confirms it."""
    fleet = [instance(n) for n in range(4)]
    full = decide(fleet, {}, History(), 0.0, QUICK)
    odd = decide([], {}, full.history, 5.0, QUICK)
    assert names(odd) == names(full)
    assert names(decide(fleet, {}, odd.history, 10.0, QUICK)) == names(full)
    assert names(decide([], {}, odd.history, 10.0, QUICK)) == []
    one_less = decide(fleet[1:], {}, full.history, 5.0, QUICK)
    assert len(names(one_less)) == 3


def test_all_leave_at_once_when_all_are_under_notice() -> None:
    """A notice explains the loss."""
    fleet, policy = [instance(1), instance(2)], replace(QUICK, agents=True)
    ready = {i.id: Health("ready") for i in fleet}
    first = decide(fleet, ready, History(), 0.0, policy)
    draining = {i: replace(h, state="draining") for i, h in ready.items()}
    assert names(decide(fleet, draining, first.history, 1.0, policy)) == []


def test_a_silent_agent_costs_its_host_the_place_only_after_a_while() -> None:
    """Not yet heard: booting. Heard, then silent: in for silence_s, then out."""
    policy = replace(QUICK, agents=True)
    fleet = [instance(1)]
    assert "booting" in decide(fleet, {}, History(), 0.0, policy).reasons["i-1"]
    first = decide(fleet, {"i-1": Health("ready", heard_at=0.0)}, History(), 0.0, policy)
    soon = decide(fleet, {}, first.history, 10.0, policy)
    assert names(soon) == ["host-1"]
    late = decide(fleet, {}, soon.history, 30.0, policy)
    assert "silent" in decide(fleet, {}, late.history, 31.0, policy).reasons["i-1"]
    assert names(decide(fleet, {}, late.history, 31.0, policy)) == []


def test_only_the_largest_group_of_one_type_works_when_asked() -> None:
    """The slowest type would set the pace for all."""
    fleet = [instance(1, type="a"), instance(2, type="b"), instance(3, type="b")]
    decision = decide(fleet, {}, History(), 0.0, replace(QUICK, same_type=True))
    assert names(decision) == ["host-2", "host-3"]
    assert "most are b" in decision.reasons["i-1"]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_most_agents_unheard_at_once_is_our_own_fault(data: st.DataObject) -> None:
    """Silent or by another clock: the list stands for as long as that lasts; fewer, or one alone,
    go after a while."""
    policy, size = replace(QUICK, agents=True), data.draw(st.integers(1, 8))
    fleet = [instance(n) for n in range(size)]
    quiet = data.draw(st.dictionaries(st.integers(0, size - 1), st.booleans()))
    since = {n: data.draw(st.floats(5, 7)) for n in quiet}
    steps = data.draw(st.lists(st.floats(0.5, 3), min_size=60, max_size=60))
    is_ours = len(quiet) >= 2 and 2 * len(quiet) > size
    history, now = History(), 0.0

    def says(number: int) -> Health | None:
        if number not in quiet or now < since[number] or now > 60:
            return Health("ready", heard_at=now)
        return Health("sick", why="its clock is +300 s off", is_clock_off=True,
                      heard_at=now) if quiet[number] else None

    for step in steps:
        health = {f"i-{n}": h for n in range(size) if (h := says(n))}
        decision = decide(fleet, health, history, now, policy)
        history, listed = decision.history, set(names(decision))
        loud = {f"host-{n}" for n in range(size) if n not in quiet}
        assert listed >= (loud | {f"host-{n}" for n in quiet} if is_ours else loud)
        if 40 < now <= 60:
            assert history.unheard == len(quiet) if is_ours else listed == loud
        now += step
    if now > 64:
        assert history.unheard == 0 and len(listed) == size


def test_a_host_leaves_for_its_own_reason_while_most_agents_are_silent() -> None:
    """The cloud's state and a notice count; the rest stays, also when it is one alone by then."""
    policy, fleet = replace(QUICK, agents=True), [instance(n) for n in range(4)]
    decision = decide(fleet, {i.id: Health("ready", heard_at=0.0)
                              for i in fleet}, History(), 0.0, policy)
    for now in (10.0, 19.0, 21.0, 60.0):
        decision = decide(fleet, {"i-0": Health("ready", heard_at=now)}, decision.history, now,
                          policy)
        assert len(names(decision)) == 4
    assert decision.history.unheard == 3
    fleet[1] = replace(fleet[1], state="shutting-down")
    notice = {"i-0": Health("draining", why="terminate", heard_at=61.0)}
    decision = decide(fleet, notice, decision.history, 61.0, policy)
    assert names(decision) == ["host-2", "host-3"]
    for now in (100.0, 199.0, 200.0):
        decision = decide(fleet[3:], {}, decision.history, now, policy)
        assert names(decision) == ["host-3"]
    heard = decide(fleet[3:], {"i-3": Health("ready", heard_at=201.0)}, decision.history, 201.0,
                   policy)
    assert heard.history.unheard == 0
    assert "silent" in decide(fleet[3:], {}, heard.history, 222.0, policy).reasons["i-3"]


def test_a_host_that_is_still_silent_when_others_answer_again_has_more_time() -> None:
    """One lost question must not cost it its place."""
    policy, fleet = replace(QUICK, agents=True), [instance(n) for n in range(3)]

    def heard(now: float, *numbers: int) -> dict[str, Health]:
        return {f"i-{n}": Health("ready", heard_at=now) for n in numbers}

    decision = decide(fleet, heard(0.0, 0, 1, 2), History(), 0.0, policy)
    decision = decide(fleet, {}, decision.history, 100.0, policy)
    decision = decide(fleet, heard(101.0, 0, 1), decision.history, 101.0, policy)
    assert decision.history.unheard == 0 and len(names(decision)) == 3
    decision = decide(fleet, heard(110.0, 0, 1), decision.history, 110.0, policy)
    assert len(names(decision)) == 3
    assert names(decide(fleet, heard(112.0, 0, 1), decision.history, 112.0,
                        policy)) == ["host-0", "host-1"]


def test_a_newcomer_with_another_clock_stays_out() -> None:
    """At once, and also one that was fit but had not entered yet."""
    policy, fleet = replace(QUICK, agents=True), [instance(1), instance(2)]
    ready, off = Health("ready"), Health("sick", why="its clock is +300 s off", is_clock_off=True)
    decision = decide(fleet, {"i-1": ready, "i-2": off}, History(), 0.0, policy)
    assert names(decision) == ["host-1"
                               ] and decision.reasons["i-2"] == "sick: its clock is +300 s off"
    waits = decide(fleet, {"i-1": ready, "i-2": ready}, decision.history, 0.0,
                   replace(policy, settle_s=9.0))
    assert waits.reasons["i-2"].startswith("arriving")
    assert names(decide(fleet, {"i-1": ready, "i-2": off}, waits.history, 9.5,
                        policy)) == ["host-1"]


def test_a_sick_host_is_sick_still_when_it_falls_silent() -> None:
    """Without memory or disk its agent may miss its seconds; no worker is started on it for
    that."""
    policy, history = replace(QUICK, agents=True), History()
    for now in range(100):
        health = {"i-1": Health("ready", heard_at=now)}
        if now < 10 or now > 50:
            health["i-2"] = Health("ready", heard_at=now)
        elif now < 20:
            health["i-2"] = Health("sick", why="no memory", heard_at=now)
        decision = decide([instance(1), instance(2)], health, history, float(now), policy)
        assert ("host-2" in names(decision)) == ("i-2" in health
                                                 and health["i-2"].state == "ready"), now
        history = decision.history


def test_a_stopped_agent_costs_its_host_the_place_until_the_next_one_starts() -> None:
    """Silence does not bring it back, nor the same agent's answer; the cloud's notice is for good
    all the same."""
    fleet, policy = [instance(1), instance(2)], replace(QUICK, agents=True)
    ready = Health("ready", life="a")
    stops = replace(ready, state="draining", why="the host is being stopped", for_good=False)
    decision = decide(fleet, {"i-1": ready, "i-2": ready}, History(), 0.0, policy)
    for now, says, expected in (
            (1.0, stops, 1), (2.0, None, 1), (3.0, ready, 1), (4.0, replace(ready, life="b"), 2),
            (5.0, replace(stops, life="b", for_good=True), 1), (6.0, replace(ready, life="c"), 1)):
        health = {"i-1": replace(ready, heard_at=now)
                  } | ({"i-2": replace(says, heard_at=now)} if says else {})
        decision = decide(fleet, health, decision.history, now, policy)
        assert len(names(decision)) == expected, now


def test_a_scheduled_event_sends_its_host_away_only_when_it_is_near() -> None:
    """It may be announced weeks before."""
    far, near = (("instance-retirement", 901.0),), (("instance-retirement", 899.0),)
    decision = decide([instance(1), instance(2, events=far)], {}, History(), 0.0, QUICK)
    assert len(names(decision)) == 2
    decision = decide([instance(1), instance(2, events=near)], {}, decision.history, 5.0, QUICK)
    assert names(decision) == ["host-1"
                               ] and decision.reasons["i-2"] == "scheduled: instance-retirement"


def test_a_host_that_flaps_by_being_missing_is_held_back() -> None:
    """What is known of it outlives its absence; it is forgotten when it has been away for long."""
    history, fleet = History(), [instance(1), instance(2), instance(3)]
    for second in range(0, 50, 10):
        decision = decide(fleet if second % 20 == 0 else fleet[:2], {}, history, float(second),
                          QUICK)
        history = decision.history
    assert decision.reasons["i-3"].startswith("held back: it came 3 times")
    assert "i-3" in decide(fleet[:2], {}, history, 600.0, QUICK).history.past
    assert "i-3" not in decide(fleet[:2], {}, history, 700.0, QUICK).history.past


def test_a_host_under_notice_that_is_missing_for_a_while_stays_doomed() -> None:
    """One answer without it is not the end of it."""
    fleet, policy = [instance(1), instance(2), instance(3)], replace(QUICK, agents=True)
    ready = {i.id: Health("ready") for i in fleet}
    decision = decide(fleet, ready, History(), 0.0, policy)
    decision = decide(fleet, ready | {"i-3": Health("draining")}, decision.history, 1.0, policy)
    decision = decide(fleet[:2], ready, decision.history, 2.0, policy)
    assert names(decide(fleet, ready, decision.history, 3.0, policy)) == ["host-1", "host-2"]


def test_a_host_may_flap_for_years() -> None:
    """The hold has an upper end, and so has its reckoning."""
    history = History({"i-1": Past(arrivals=(1.0, 2.0), holds=5000)})
    assert decide([instance(1)], {}, history, 3.0,
                  QUICK).history.past["i-1"].held_until == 3.0 + QUICK.hold_most_s


def test_since_when_a_host_is_out_is_known() -> None:
    """For every one of them."""
    fleet = [instance(1), instance(2, state="pending")]
    decision = decide(fleet, {}, History(), 5.0, QUICK)
    decision = decide(fleet, {}, decision.history, 9.0, QUICK)
    assert (decision.history.past["i-1"].first_fit,
            decision.history.past["i-2"].first_unfit) == (5.0, 5.0)
    assert decide([instance(1), instance(2)], {}, decision.history, 9.0,
                  QUICK).history.past["i-2"].first_unfit is None
