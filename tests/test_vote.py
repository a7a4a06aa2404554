"""The vote: what follows from all workers' ballots, through the sums that cross the network."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import Hub, Member

from elastic_trainer.world.place import Wants
from elastic_trainer.world.vote import Ballot, CheckpointBallot, Outcome

WANTS = st.builds(Wants, change=st.booleans(), stop=st.booleans(), drains=st.booleans())
CHECKPOINTS = st.builds(CheckpointBallot,
                        is_uploaded=st.booleans(),
                        has_failed=st.booleans(),
                        is_wanted=st.booleans(),
                        newest_step=st.integers(-1, 2**40))
BALLOTS = st.builds(
    Ballot, samples=st.integers(0, 2**30), digest=st.integers(0, 2**40), has_failed=st.booleans(),
    clock_ms=st.integers(0, 2**40), finishes=st.booleans(), checkpoint=CHECKPOINTS,
    checksum=st.sampled_from([0, 1, 2**16, 2**32 - 1]), wants=WANTS,
    change_waits=st.booleans(),
    modes=st.sampled_from([0, 1, 2**16, 2**32 - 1]))


def counted(ballots: list[Ballot]) -> Outcome:
    """Return the outcome of a vote, by its definition, without a network."""
    wants = [ballot.wants for ballot in ballots]
    checkpoints = [ballot.checkpoint for ballot in ballots]
    return Outcome(voters=len(ballots),
                   samples=sum(b.samples for b in ballots),
                   digest=sum(b.digest for b in ballots),
                   change=any(b.wants.stop or (b.wants.change and not b.change_waits)
                              for b in ballots),
                   stop=all(one.stop for one in wants),
                   has_failure=any(b.has_failed for b in ballots),
                   uploaded=sum(c.is_uploaded for c in checkpoints),
                   upload_failed=any(c.has_failed for c in checkpoints),
                   checkpoint=any(c.is_wanted for c in checkpoints),
                   published=checkpoints[0].newest_step,
                   all_drain=all(one.drains for one in wants),
                   change_waits=any(one.change for one in wants),
                   differs=len({b.checksum
                                for b in ballots}) > 1,
                   modes_differ=len({b.modes for b in ballots}) > 1,
                   clock_ms=ballots[0].clock_ms,
                   finishes=sum(b.finishes for b in ballots))


@given(st.lists(BALLOTS, min_size=1, max_size=9))
def test_the_sums_of_all_ballots_have_what_the_ballots_have(ballots: list[Ballot]) -> None:
    """Each field of the outcome follows from its own fields of the ballots, for each size of the
    world."""
    encoded = [ballot.encode(rank) for rank, ballot in enumerate(ballots)]
    sums = [sum(column) for column in zip(*encoded, strict=True)]
    assert Outcome.decode(sums, len(ballots)) == counted(ballots)
    assert len(sums) == 23 and all(total < 2**63 for total in sums)


@pytest.mark.parametrize("size", [1, 3])
def test_all_workers_have_the_same_outcome_and_know_the_first_that_failed(size: int) -> None:
    """The lowest rank whose user code has raised; -1 where none has."""
    for failed in ((), (size - 1,), tuple(range(size))[-2:]):
        hub = Hub(size)
        with ThreadPoolExecutor(size) as pool:
            ballots = [
                Ballot(samples=8, has_failed=rank in failed, checksum=7) for rank in range(size)
            ]
            votes = [pool.submit(Member(hub, rank).vote, 3, ballots[rank]) for rank in range(size)]
            outcomes = {vote.result(60) for vote in votes}
        [outcome] = outcomes
        assert (outcome.failed_rank, outcome.samples, outcome.differs) == (min(failed, default=-1),
                                                                           8 * size, False)
