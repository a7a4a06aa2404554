"""Signatures, nonces, and how refused clients are counted, without a network."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.wire.refused_clients import EVERY_S, MOST_ADDRESSES, OTHERS, RefusedClients
from elastic_trainer.wire.seal import WINDOW, Kind, Seen, Session, is_sealed, seal, worker_key

KEY = b"the key of this run"
SESSION = "0123456789abcdef"


def test_the_signature_changes_when_anything_signed_does() -> None:
    """Key, kind, and all parts are under it, and a byte cannot move from one part to the next."""
    parts = [(a, b) for a in (b"b", b"nb", b"")
             for b in (b"b", b"nb", b"", b"\n")] + [(b"n", b"b", b""), (b"nb", )]
    signatures = [seal(key, kind, *message)
                  for key in (b"k", b"l") for kind in Kind for message in parts]
    assert len({*signatures}) == len(signatures) == 2 * len(Kind) * 14


@given(st.lists(st.binary(max_size=5), max_size=4), st.lists(st.binary(max_size=5), max_size=4))
def test_other_parts_have_another_signature(one: list[bytes], other: list[bytes]) -> None:
    """However the same bytes are divided."""
    assert is_sealed(seal(KEY, Kind.REQUEST, *one), KEY, Kind.REQUEST, *other) == (one == other)


def test_a_signature_that_is_no_text_is_wrong() -> None:
    """An unauthenticated client may have sent it."""
    assert not any(
        is_sealed(given, KEY, Kind.REQUEST)
        for given in ("", "é", "\udcff", seal(KEY, Kind.REQUEST)[:-1]))


def test_a_workers_key_is_neither_the_runs_nor_its_neighbours() -> None:
    """Nor does one lead to another: who has a worker's key cannot make a neighbour's from it by the
    same rule."""
    names = ["a/0/1", "a/0/11", "a/1/1", "", "a/0/1\x01"]
    keys = [worker_key(KEY, name) for name in names]
    again = [worker_key(key, name) for key, name in itertools.product(keys, names)]
    assert len({KEY, *keys, *again}) == 1 + 5 + 25 and {len(key) for key in keys} == {32}


def test_the_nonces_of_a_session_are_new_each() -> None:
    """And two sessions of one worker have none in common."""
    seen, one, two = Seen(), Session(), Session()
    nonces = [session.nonce() for _ in range(3) for session in (one, two)]
    assert [seen.is_new("a", nonce) for nonce in nonces] == 6 * [True]
    assert [seen.is_new("a", nonce) for nonce in nonces] == 6 * [False]
    assert [seen.is_new("b", nonce) for nonce in nonces] == 6 * [True]


@given(st.lists(st.integers(0, 3 * WINDOW), max_size=60))
def test_a_nonce_is_accepted_once_in_whatever_order(counts: list[int]) -> None:
    """Late by less than the window it is accepted; later it is refused, also where it is the first
    time."""
    seen, accepted, highest = Seen(), set[int](), 0
    for count in counts:
        highest = max(highest, count)
        expected = count not in accepted and highest - count < WINDOW
        assert seen.is_new("a", f"{SESSION}-{count}") == expected
        accepted |= {count} if expected else set()


def test_what_is_no_nonce_is_refused() -> None:
    """Also one that would be another spelling of a known one."""
    seen = Seen()
    assert seen.is_new("a", f"{SESSION}-1")
    for nonce in ("", "n", SESSION, f"{SESSION}-", f"{SESSION}-+1", f"{SESSION}-1\n",
                  f"{SESSION}-01", f"{SESSION}-١", f"{SESSION.upper()}-2", f"{SESSION}-{10**15}"):
        assert not seen.is_new("a", nonce), nonce
    assert len(seen.sessions) == 1


def test_the_sessions_that_are_remembered_are_bounded() -> None:
    """The one that was not used for the longest time is forgotten."""
    seen = Seen(most_sessions=3)
    sessions = [Session() for _ in range(4)]
    for session in (*sessions[:3], sessions[0], sessions[3]):
        assert seen.is_new("a", session.nonce())
    assert [name for _, name in seen.sessions] == [sessions[n].name for n in (2, 0, 3)]


# --- refused clients in the event log -------------------------------------------------------------

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
