"""How refused connections are counted for the event log."""

from __future__ import annotations

from elastic_trainer.wire.refused_clients import EVERY_S, MOST_ADDRESSES, OTHERS, RefusedClients


def test_an_address_has_one_event_at_once_and_then_one_a_minute() -> None:
    """The second one counts all connections since the first."""
    clients, events = RefusedClients(lambda **_: None), []
    for second in range(130):
        clients.count("10.0.0.1", "a" if second % 2 else "b")
        events += [(second, facts) for facts in clients.due(float(second))]
    assert events == [(0, {"address": "10.0.0.1", "reason": "b", "refused": 1}),
                    (60, {"address": "10.0.0.1", "reason": "a; b", "refused": 60}),
                    (120, {"address": "10.0.0.1", "reason": "a; b", "refused": 60})]


def test_the_last_refusals_are_reported_though_no_more_follow() -> None:
    """An address without refusals for a minute is forgotten."""
    clients = RefusedClients(lambda **_: None)
    for _ in range(3):
        clients.count("10.0.0.1", "a")
        clients.due(0.0)
    assert clients.due(EVERY_S) == [{"address": "10.0.0.1", "reason": "a", "refused": 2}]
    assert clients.due(2 * EVERY_S) == [] and clients.known == {}


def test_a_flood_from_many_addresses_does_not_fill_the_log() -> None:
    """All but the first addresses share a name, and each refusal is counted."""
    clients, events = RefusedClients(lambda **_: None), []
    for number in range(10_000):
        clients.count(f"10.0.{number // 250}.{number % 250}", f"reason {number}")
        events += clients.due(0.0)
    events += clients.due(EVERY_S)
    assert len(events) == MOST_ADDRESSES + 2 and {
        facts["address"]
        for facts in events[MOST_ADDRESSES:]
    } == {OTHERS}
    assert sum(facts["refused"] for facts in events) == 10_000
