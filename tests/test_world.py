"""The life of generations in a world of threads: what a run yields, and when the state is copied to
a newcomer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from simulated import Hub, Member

from elastic_trainer.config import Launch
from elastic_trainer.events.log import Events
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.wire.heartbeat import RankAssignment
from elastic_trainer.world.collectives import PeersLost
from elastic_trainer.world.generations import Generations, Hooks, WorldChanged
from elastic_trainer.world.place import Driver


class Given(Driver):
    """A driver that gives a worker the same rank again and again."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self.given = rank, size, 0

    def next_place(self, holds_state: bool, step: int) -> RankAssignment:
        self.given += 1
        return RankAssignment(generation=self.given, rank=self.rank, size=self.size)


class Session:
    """Horovod, as far as generations need it, without a network."""

    def __init__(self) -> None:
        self.ended = 0

    def prepare(self, place: RankAssignment, step_s: float) -> None:
        """Do nothing."""

    start = close_sockets = at = lambda self: None

    def end(self) -> None:
        self.ended += 1


class Seat(Generations):
    """One member of a world of threads."""

    def __init__(self, hub: Hub, rank: int):
        self.given, self.session = Given(rank, hub.size), Session()
        super().__init__(Launch(), self.given, Events(None, attempt=1), Hooks(), Member(hub, rank),
                         self.session)


class Count:
    """An extra that the user's code after a step changes."""

    def __init__(self, value: int):
        self.value = torch.tensor([float(value)])

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.value = values["value"]


def state_at(committed: int,
             *,
             prepared: int | None = None,
             seen: int = 0,
             has_state: bool = True) -> LiveState:
    """Return the state of a worker that has finished some steps, whose user has seen the end of
    some."""
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(committed))
    state = LiveState(model, torch.optim.SGD(model.parameters(), 0.1))
    state.committed, state.has_state, state.extras = committed, has_state, {"seen": Count(seen)}
    state.prepared = state.begun = committed if prepared is None else prepared
    return state


class User:
    """One worker's training loop: it draws from the run, and counts each finished step in its
    extra."""

    def __init__(self, seat: Seat, state: LiveState):
        self.seat, self.state = seat, state
        self.unseen: list[int] = []
        self.drawn: list[str] = []
        self.breaks: list[BaseException] = []

    def roll_forward(self, samples: int, digest: int, *more: int) -> None:
        with torch.no_grad():
            for parameter in self.state.model.parameters():
                parameter += 1.0
        self.state.commit(samples, digest, *more)
        self.unseen.append(self.state.committed)

    def hand_over(self) -> Iterator[str]:
        while self.unseen:
            yield f"finished {self.unseen.pop(0)}"

    def body(self) -> Iterator[str]:
        yield f"enters at {self.state.committed}"
        if self.breaks:
            raise self.breaks.pop(0)

    def run(self) -> Iterator[str]:
        return self.seat.run(self.state,
                             self.body,
                             restore=lambda: "fresh",
                             roll_forward=self.roll_forward,
                             hand_over=self.hand_over,
                             live_state=lambda: None)

    def train(self, on_finished: Callable[[], Any] = lambda: None) -> list[str]:
        for token in self.run():
            self.drawn.append(token)
            if token.startswith("finished"):
                on_finished()
                self.state.extras["seen"].value += 1
        return self.drawn


@pytest.mark.parametrize("behind", [0, 1])
def test_all_givers_have_run_the_same_code_when_a_newcomer_receives_the_state(behind: int) -> None:
    """A step that is rolled forward is yielded as finished, only where it was, before the state is
    copied."""
    hub = Hub(3)
    states = [state_at(5, seen=5), state_at(5, seen=5), state_at(0, has_state=False)]
    states[behind] = state_at(4, prepared=5, seen=4)
    users = [User(Seat(hub, rank), state) for rank, state in enumerate(states)]
    with ThreadPoolExecutor(3) as pool:
        drawn = [future.result(60) for future in [pool.submit(user.train) for user in users]]
    assert drawn == [["finished 5", "enters at 5"] if rank == behind else ["enters at 5"]
                     for rank in range(3)]
    for user in users:
        assert user.state.extras["seen"].value.item() == 5
        assert all(bool((p == 5).all()) for p in user.state.model.parameters())


def test_a_run_yields_what_its_body_yields_when_generations_follow_each_other() -> None:
    """A broken generation, or a change of the world, is followed by the next; the caller sees one
    iterator."""
    user = User(Seat(Hub(1), 0), state_at(3))
    user.breaks = [PeersLost("as planned"), WorldChanged()]
    assert user.train() == ["enters at 3"] * 3
    assert (user.seat.given.given, user.seat.session.ended) == (3, 3)


def test_the_callers_exception_is_not_taken_for_a_broken_generation() -> None:
    """The code of the caller runs outside of the run: its exception goes to the caller, whatever
    its type."""
    user = User(Seat(Hub(1), 0), state_at(3))
    with pytest.raises(PeersLost, match="the caller's own"):
        for _ in user.run():
            raise PeersLost("the caller's own")
    assert user.seat.given.given == 1


def test_the_world_is_left_when_the_caller_takes_no_more_steps() -> None:
    """A run that is closed leaves its generation as one that has ended."""
    user = User(Seat(Hub(1), 0), state_at(3))
    run = user.run()
    next(run)
    run.close()  # type: ignore[attr-defined]
    assert (user.seat.given.given, user.seat.session.ended) == (1, 1)
