"""Heartbeats and answers: what one side sends is what the other side reads, also of another
version."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.events.schema import flaw_of_message
from elastic_trainer.wire.heartbeat import At, Heartbeat, MachineFault, News, RankAssignment

WHOLE = st.integers(0, 2**40)
PORT = st.integers(0, 65535)
NAME = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,8}/[0-9]/[0-9]", fullmatch=True)
TEXT = st.text(st.characters(codec="utf-8"), max_size=200)
FAULTS = st.builds(MachineFault, step=st.integers(-1, 2**40), microbatch=st.integers(-1, 1000),
                   kind=st.just("EIO"), text=TEXT)
ARITHMETIC = st.fixed_dictionaries({
    "program": WHOLE, "inputs": WHOLE, "result": WHOLE, "is_exact": st.booleans(),
    "facts": st.dictionaries(st.sampled_from(["cpu", "torch"]), st.just("2"))})
SECONDS = st.floats(0, 1e9)
AT = st.builds(At, phase=st.sampled_from(["load", "reduce"]), what=TEXT, for_s=SECONDS,
               step=st.integers(-1, 2**40), waits_s=SECONDS, usual_s=SECONDS, own_s=SECONDS,
               steps=WHOLE, unsent=st.lists(st.just("10.0.0.2"), max_size=2).map(tuple))
HEARTBEATS = st.builds(Heartbeat,
                       count=WHOLE,
                       worker=NAME,
                       generation=WHOLE,
                       accepted=WHOLE,
                       step=WHOLE,
                       probe_port=PORT,
                       phase=st.sampled_from(
                           ["booting", "standby", "training", "waiting", "finished", "reviving"]),
                       holds_state=st.booleans(),
                       drains=st.booleans(),
                       meets_at_once=st.booleans(),
                       saves=st.booleans(),
                       unreachable=st.none() | st.lists(NAME, max_size=3).map(tuple),
                       published=st.integers(-1, 2**40),
                       arithmetic=st.none() | ARITHMETIC,
                       error=TEXT,
                       machine=st.none() | FAULTS,
                       at=st.none() | AT,
                       pid=st.integers(1, 2**22),
                       time=st.none() | st.floats(0, 4e9),
                       hold_s=st.floats(0, 10),
                       seen=st.just("") | st.just("0123456789abcdef"))
SEATS = st.builds(RankAssignment, generation=WHOLE, rank=WHOLE, size=WHOLE,
                  local_rank=WHOLE, local_size=WHOLE, address=st.just("10.0.0.1"),
                  port=PORT, at_once=st.booleans())
NEWS = st.builds(News, version=TEXT, place=st.none() | SEATS,
                 notice=st.sampled_from(["", "join", "leave", "death"]),
                 unwanted=st.booleans(), dead=st.lists(WHOLE, max_size=4).map(tuple),
                 offer=WHOLE, reach=st.dictionaries(NAME,
                                                    st.tuples(st.just("10.0.0.1"), PORT),
                                                    max_size=3), leave=st.booleans(),
                 evicted=st.booleans(), finished=st.booleans(), writes=st.booleans(),
                 over=st.sampled_from(["", "failed", "user_error"]), detail=TEXT)


def through_json(message: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(message)))


@given(HEARTBEATS)
def test_the_driver_reads_the_heartbeat_that_a_worker_has_sent(heartbeat: Heartbeat) -> None:
    """Each field arrives as it was, and the check of what arrives finds no flaw."""
    message = through_json({"worker": heartbeat.worker, **heartbeat.to_dict()})
    assert Heartbeat.from_dict(message) == heartbeat
    assert flaw_of_message(message) == ""


@given(NEWS)
def test_a_worker_reads_the_answer_that_the_driver_has_sent(news: News) -> None:
    """Each field arrives as it was."""
    assert News.from_dict(through_json(news.to_dict())) == news


def test_an_error_arrives_also_with_the_name_of_a_file_that_is_no_utf_8() -> None:
    """Python has a lone surrogate for each byte of it."""
    error = Heartbeat(count=1, phase="training", generation=1, error="no such file: \udc80")
    assert Heartbeat.from_dict(through_json(error.to_dict())) == error


def test_the_driver_reads_a_heartbeat_of_version_0_1() -> None:
    """What its workers leave out has a default: no error, no arithmetic, tried no peer in vain."""
    message = {"worker": "a/0/1", "count": 1, "phase": "training", "generation": 2}
    assert Heartbeat.from_dict(message) == Heartbeat(worker="a/0/1", count=1,
                                                     phase="training", generation=2)
    assert Heartbeat.from_dict(message).unreachable == ()
    assert Heartbeat.from_dict(message
                               | {"unreachable": None, "of_a_later_version": 1}).unreachable is None


def test_a_worker_reads_an_answer_of_version_0_1() -> None:
    """The driver sends a place as an object, peers as pairs, and what is not the case not at
    all."""
    place = {"generation": 3, "rank": 1, "size": 2, "local_rank": 0, "local_size": 1,
             "address": "10.0.0.1", "port": 4711, "at_once": True}
    message = {"place": place, "notice": "", "unwanted": False, "dead": [0], "reach": {},
               "version": "x"}
    assert News.from_dict(message) == News(version="x", dead=(0,), place=RankAssignment(
        generation=3, rank=1, size=2, address="10.0.0.1", port=4711, at_once=True))
    assert News.from_dict({"offer": 7, "reach": {"b/0/2": ["10.0.0.2", 9]},
                           "version": "y"}) == News(version="y", offer=7,
                                                    reach={"b/0/2": ("10.0.0.2", 9)})
    assert News.from_dict({"over": "failed", "detail": "x", "writes": True,
                           "version": "z"}).over == "failed"


def test_an_answer_has_only_fields_that_apply() -> None:
    """A worker without news costs the driver some bytes for each heartbeat."""
    assert News(version="x").to_dict() == {"version": "x"}
    news = News(version="x", place=RankAssignment(generation=1, rank=0, size=1))
    assert news.to_dict() == {"version": "x", "place": {"generation": 1, "rank": 0, "size": 1}}
