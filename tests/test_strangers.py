"""What the event log says of refused connections."""

from __future__ import annotations

from elastic_trainer.wire.strangers import EVERY_S, MOST_ADDRESSES, OTHERS, Strangers


def test_an_address_has_one_event_at_once_and_then_one_a_minute() -> None:
    """The second one says all that came since the first."""
    strangers, told = Strangers(), []
    for second in range(130):
        strangers.refuse("10.0.0.1", "a" if second % 2 else "b")
        told += [(second, facts) for facts in strangers.due(float(second))]
    assert told == [(0, {"address": "10.0.0.1", "reason": "b", "refused": 1}),
                    (60, {"address": "10.0.0.1", "reason": "a; b", "refused": 60}),
                    (120, {"address": "10.0.0.1", "reason": "a; b", "refused": 60})]


def test_what_came_last_is_told_though_nothing_comes_any_more() -> None:
    """And an address that is quiet for a minute is forgotten."""
    strangers = Strangers()
    for _ in range(3):
        strangers.refuse("10.0.0.1", "a")
        strangers.due(0.0)
    assert strangers.due(EVERY_S) == [{"address": "10.0.0.1", "reason": "a", "refused": 2}]
    assert strangers.due(2 * EVERY_S) == [] and strangers.known == {}


def test_a_flood_from_many_addresses_does_not_fill_the_log() -> None:
    """All but the first ones share a name; nothing is told without a number."""
    strangers, told = Strangers(), []
    for number in range(10_000):
        strangers.refuse(f"10.0.{number // 250}.{number % 250}", f"reason {number}")
        told += strangers.due(0.0)
    told += strangers.due(EVERY_S)
    assert len(told) == MOST_ADDRESSES + 2 and {
        facts["address"]
        for facts in told[MOST_ADDRESSES:]
    } == {OTHERS}
    assert sum(facts["refused"] for facts in told) == 10_000
