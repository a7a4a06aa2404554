"""When and how the training loop makes checkpoints: the decisions, and the life of a checkpoint by
its table."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from simulated import Hub, Member
from test_checkpoint import Faulty, Fleet, files
from waiting import wait_for

from elastic_trainer.config import Launch
from elastic_trainer.events.log import Events
from elastic_trainer.state.checkpoints.cadence import Cadence
from elastic_trainer.state.checkpoints.checkpoint import PARTS, Part, Plan, Share
from elastic_trainer.training.checkpointing import (
    LAST_TRIES,
    LIFE,
    Action,
    Checkpointing,
    News,
    Phase,
    is_last_wanted,
    is_leave_unsaved,
    news_of,
    phase_of,
)
from elastic_trainer.world.place import Driver, Wants
from elastic_trainer.world.vote import CheckpointBallot, Outcome

BY_VOTE = (News.WANTED, News.ALL_UPLOADED, News.ONE_FAILED)


def decided(**facts: Any) -> Outcome:
    """Return what a vote says that decides nothing else."""
    nothing = {"voters": 1, "samples": 0, "digest": 0, "change": False, "stop": False,
               "has_failure": False, "uploaded": 0, "upload_failed": False, "checkpoint": False,
               "published": -1, "all_drain": False, "change_waits": False, "differs": False}
    return Outcome(**nothing | facts)


def share_of(parts: int, done: int, error: str = "") -> Share:
    return Share(1, 0.0, 0.0, parts=parts, error=error, done=[Part(0, "", 0, "")] * done)


@pytest.mark.parametrize(("share", "is_publishing", "phase"),
                         [(None, False, Phase.IDLE), (None, True, Phase.PUBLISHING),
                          (share_of(2, 1), False, Phase.UPLOADING),
                          (share_of(2, 1), True, Phase.UPLOADING),
                          (share_of(2, 2), False, Phase.UPLOADED),
                          (share_of(0, 0), False, Phase.UPLOADED),
                          (share_of(2, 1, "no space"), False, Phase.FAILED),
                          (share_of(0, 0, "no memory"), True, Phase.FAILED)])
def test_the_phase_follows_from_the_share_and_the_publisher(share: Share | None,
                                                            is_publishing: bool,
                                                            phase: Phase) -> None:
    """A worker without parts of its own has uploaded at once; a share that failed before it was cut
    has failed."""
    assert phase_of(share, is_publishing) is phase


def test_a_vote_means_one_thing_for_the_checkpoint() -> None:
    """One failed share is enough; all must be there."""
    assert news_of(decided(), 2) is None
    assert news_of(decided(uploaded=1), 2) is None
    assert news_of(decided(uploaded=2), 2) is News.ALL_UPLOADED
    assert news_of(decided(uploaded=1, upload_failed=True), 2) is News.ONE_FAILED
    assert news_of(decided(checkpoint=True), 2) is News.WANTED


def test_the_last_checkpoint_is_tried_a_few_times_and_not_twice() -> None:
    """Not where it is published, is on its way, or belongs to another attempt."""
    facts: dict[str, Any] = {"committed": 7, "newest_step": 5, "tries": 0, "is_fenced": False}
    assert is_last_wanted(0, False, **facts)
    assert not is_last_wanted(1, False, **facts)
    assert not is_last_wanted(0, True, **facts)
    for change in ({"newest_step": 7}, {"tries": LAST_TRIES}, {"is_fenced": True}):
        assert not is_last_wanted(0, False, **(facts | change))


def test_a_leave_is_saved_by_a_checkpoint_of_the_step_at_which_it_was_noticed() -> None:
    """Or of a later one; rank 0 does not try again."""
    facts: dict[str, Any] = {"heard_step": 7, "newest_step": 6, "is_tried": False}
    assert is_leave_unsaved(True, **facts)
    assert not is_leave_unsaved(False, **facts)
    for change in ({"newest_step": 7}, {"is_tried": True}):
        assert not is_leave_unsaved(True, **(facts | change))


def test_every_life_of_a_checkpoint_comes_to_an_end() -> None:
    """By the table: from each phase there is a way to idle; a change of the world ends each; all
    phases are reached."""
    after = {phase: {
                 following
                 for (at, _), (_, ends) in LIFE.items() if at is phase for following in ends
             }
             for phase in Phase}
    reached = {Phase.IDLE}
    for _ in Phase:
        reached |= {following for phase in reached for following in after[phase]}
    assert reached == set(Phase)
    for phase in Phase:
        ways = {phase}
        for _ in Phase:
            ways |= {following for at in ways for following in after[at]}
        assert Phase.IDLE in ways
        assert LIFE[phase, News.WORLD_CHANGED][0] is Action.DROP
    assert {news for _, news in LIFE} == set(News)


class Leaving(Driver):
    """A driver that says what the test says."""

    leaves = changes = False

    def wants(self) -> Wants:
        return Wants(change=self.changes or self.leaves, host_leaves=self.leaves)


class Loops:
    """The loops of a world's workers, without steps: what each votes, and what it does by the
    vote."""

    def __init__(self, root: Path, size: int = 2, plan: Plan | None = None):
        self.fleet = Fleet(root, size, plan or Plan(every=Cadence(steps=1), part_bytes=100))
        self.fleet.restore()
        self.drivers = [Leaving() for _ in range(size)]
        self.loops = [
            Checkpointing(worker, state, driver, Launch(), Events(None)) for worker, state, driver
            in zip(self.fleet.workers, self.fleet.states, self.drivers, strict=True)
        ]
        self.members = self._members()
        self.pool = ThreadPoolExecutor(size)
        for loop in self.loops:
            loop.enter()

    def _members(self) -> list[Member]:
        hub = Hub(self.fleet.size)
        return [Member(hub, rank) for rank in range(self.fleet.size)]

    @property
    def stores(self) -> list[Faulty]:
        return self.fleet.stores

    def vote(self, ballots: list[CheckpointBallot]) -> Outcome:
        return decided(uploaded=sum(b.is_uploaded for b in ballots),
                       upload_failed=any(b.has_failed for b in ballots),
                       checkpoint=ballots[0].is_wanted,
                       published=ballots[0].newest_step,
                       change_waits=any(driver.wants().change for driver in self.drivers))

    def step(self) -> Outcome:
        """Finish a step; each worker's phase may change by the table alone."""
        for rank, loop in enumerate(self.loops):
            loop.tick(rank)
        control = self.vote([loop.ballot(rank) for rank, loop in enumerate(self.loops)])
        self.fleet.train()
        before = [loop.phase for loop in self.loops]
        for done in [self.pool.submit(loop.obey, control, member)
                     for loop, member in zip(self.loops, self.members, strict=True)]:
            done.result(60)
        if news := news_of(control, self.fleet.size):
            for phase, loop in zip(before, self.loops, strict=True):
                assert (phase, news) in LIFE
                assert loop.phase in {*LIFE[phase, news][1], *settled(LIFE[phase, news][1])}
        return control

    def until(self, what: str, is_so: Any) -> None:
        """Train until something is so."""
        def stepped() -> bool:
            self.step()
            return bool(is_so())

        wait_for(what, stepped, 60)

    def phases(self) -> list[Phase]:
        return [loop.phase for loop in self.loops]


def settled(phases: tuple[Phase, ...]) -> set[Phase]:
    """Return the phases that threads may have reached since."""
    found = set(phases)
    for _ in Phase:
        found |= {following
                  for (at, news), (_, ends) in LIFE.items()
                  if at in found and news not in BY_VOTE and news is not News.WORLD_CHANGED
                  for following in ends}
    return found


@pytest.fixture
def loops(tmp_path: Path) -> Iterator[Loops]:
    made = Loops(tmp_path)
    yield made
    for store in made.stores:
        store.let_go()
    for worker in made.fleet.workers:
        worker.wait()
    made.pool.shutdown()


def test_a_checkpoint_goes_through_its_phases_on_all_workers(loops: Loops) -> None:
    """Begun together, collected together when the last share is there; rank 0 alone publishes."""
    for store in loops.stores:
        store.hold("put")
    assert loops.step().checkpoint and loops.phases() == [Phase.UPLOADING] * 2
    loops.stores[1].let_go()
    loops.until("share", lambda: loops.loops[1].phase is Phase.UPLOADED)
    assert loops.phases() == [Phase.UPLOADING, Phase.UPLOADED]
    assert not loops.step().checkpoint  # one at a time, though one is due at each step
    loops.stores[0].let_go()
    loops.until("record", lambda: loops.fleet.published())
    assert loops.fleet.published()[0] == 4


def test_a_checkpoint_is_let_go_by_all_when_one_share_fails(loops: Loops) -> None:
    """By the next vote; and the one after it is made."""
    loops.stores[1].fail("put")
    loops.step()
    loops.until("failure", lambda: loops.fleet.failed())
    assert loops.phases() == [Phase.IDLE] * 2
    assert [worker.known.failures for worker in loops.fleet.workers] == [1, 1]
    loops.stores[1].fail()
    for loop in loops.loops:
        loop.timing.begun_at -= 60.0
    loops.until("record", lambda: loops.fleet.published())


def test_the_world_waits_for_one_checkpoint_when_a_host_leaves(tmp_path: Path) -> None:
    """None was due. All put the change off until it is published, rank 0 until it was tried."""
    loops = Loops(tmp_path, plan=Plan(every=Cadence(steps=1000), part_bytes=100))
    loops.step()
    assert not any(loop.is_saving() for loop in loops.loops)
    for driver in loops.drivers:
        driver.changes = True
    assert not loops.step().checkpoint and not any(loop.is_saving() for loop in loops.loops)
    for driver in loops.drivers:
        driver.leaves = True
    assert all(loop.is_saving() for loop in loops.loops)
    assert loops.step().checkpoint
    loops.until("all saved", lambda: not any(loop.is_saving() for loop in loops.loops))
    assert len(loops.fleet.published()) == 1
    assert not loops.step().checkpoint


def test_a_new_generation_lets_go_what_another_world_has_begun(loops: Loops) -> None:
    """And tells nobody of it as of a failure."""
    for store in loops.stores:
        store.hold("put")
    loops.step()
    assert loops.phases() == [Phase.UPLOADING] * 2
    for loop in loops.loops:
        loop.enter()
    assert loops.phases() == [Phase.IDLE] * 2
    assert not loops.fleet.failed()


def test_questions_change_nothing(loops: Loops) -> None:
    """However often they are asked, also while a host leaves."""
    loops.step()
    for driver in loops.drivers:
        driver.leaves = True
    for loop in loops.loops:
        def asked(loop: Checkpointing = loop) -> list[Any]:
            return [loop.phase, loop.fenced,
                    loop.is_moving(),
                    loop.newest_step(),
                    loop.is_saving(),
                    loop.ballot(0),
                    repr(loop)]

        wait_for("share", lambda loop=loop: loop.phase is Phase.UPLOADED, 60)
        before = {name: value for name, value in vars(loop).items()}, dict(vars(loop.timing))
        assert asked() == asked()
        assert (dict(vars(loop)), dict(vars(loop.timing))) == before


def test_a_person_sees_where_it_is(loops: Loops) -> None:
    """In a debugger or a log: phase, step, parts, and what was published last."""
    for store in loops.stores:
        store.hold("put")
    loops.step()
    share = loops.fleet.workers[0].upload.share
    assert share
    assert repr(loops.loops[0]) == (
        f"<Checkpointing uploading step 4, 0/{share.parts} parts; newest published step "
        f"-1, 0 failures since>")
    without = Checkpointing(None, loops.fleet.states[0], Driver(), Launch(), Events(None))
    assert repr(without) == "<Checkpointing: no store>"


def test_a_run_without_a_store_asks_nothing_and_does_nothing(tmp_path: Path) -> None:
    """All places of the loop may be called."""
    fleet = Fleet(tmp_path)
    loop, peers = Checkpointing(None, fleet.states[0], Leaving(), Launch(),
                                Events(None)), Member(Hub(1), 0)
    loop.enter()
    loop.tick(0)
    assert loop.ballot(0) == CheckpointBallot()
    loop.obey(decided(checkpoint=True), peers)
    loop.note_step(0.1)
    loop.publish_now(peers, lambda ballot: pytest.fail("it votes"))
    loop.write_last(0)
    loop.write_while_waiting()
    with pytest.raises(RuntimeError, match="changed what its script has built"):
        loop.restore(peers)  # it has trained
    fleet.states[0].committed = 0
    assert loop.restore(peers) is None and loop.withdraw(peers, 0) == -1
    assert not (loop.is_saving() or loop.is_moving() or loop.fenced) and loop.newest_step() == -1
    assert not files(tmp_path, PARTS)
