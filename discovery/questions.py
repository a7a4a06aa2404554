"""The poller's questions: to the cloud every few seconds, to the agents every second.

No answer delays another one: a turn waits for each for a bounded time. A later turn takes a late
answer.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from elastic_trainer.discovery.client import AgentUnreachable, ask
from elastic_trainer.discovery.hosts import MOST_DOUBLINGS, Health
from elastic_trainer.discovery.place_protocol import Instance, PlaceUnavailable

MOST_BACK_OFF_S = 60.0
GIVE_UP_S = 60.0
"""The limit of a question to the cloud. boto3 gives up long before, unless an answer arrives byte
by byte."""
Answer = TypeVar("Answer")


class CloudQuestion(Generic[Answer]):
    """One question to the cloud at a time, with a back-off after failures."""

    def __init__(self, question: Callable[[], Answer], interval_s: float, patience_s: float,
                 clock: Callable[[], float]):
        self.question, self.interval_s, self.clock = question, interval_s, clock
        self.patience_s = patience_s
        """The time for which a turn waits for the answer."""
        self.failures = 0
        """The number of questions in a row that have failed."""
        self.pending: Future[Answer] | None = None
        self._asked_at = -math.inf

    def hasten(self) -> None:
        """End a back-off: the place has news of a host.

        Until it answers, a task that Slurm starts again has the name of its past, and when it does,
        the task leaves once more.
        """
        if self.failures and self.pending is None:
            self._asked_at = -math.inf

    def answer(self) -> Answer | None:
        """Ask, if it is due; return the answer if there is one now. Raises PlaceUnavailable."""
        now = self.clock()
        if self.pending is None:
            back_off_s = self.interval_s * 2.0 ** min(self.failures, MOST_DOUBLINGS)
            if now - self._asked_at < min(MOST_BACK_OFF_S, back_off_s):
                return None
            self._asked_at, self.pending = now, _start(self.question)
            wait([self.pending], self.patience_s)
        pending = self.pending
        if not pending.done() and now - self._asked_at < GIVE_UP_S:
            return None
        self.pending = None
        try:
            if not pending.done():
                raise PlaceUnavailable(f"The cloud has not ended its answer in {GIVE_UP_S:.0f} s.")
            answer = pending.result()
        except PlaceUnavailable:
            self.failures += 1
            raise
        self.failures = 0
        return answer


@dataclass
class Agents:
    """The agents of the fleet: at most one question at a time to each."""

    port: int
    key: bytes
    timeout_s: float
    patience_s: float
    """How long a turn waits for all answers. An agent that answers later, or never, or whose name
    does not resolve, delays no other's notice."""
    clock: Callable[[], float]
    wall: Callable[[], float]
    _asking: dict[str, Future[Health | None]] = field(default_factory=dict)
    """The questions, by instance, whose answers no turn has taken."""

    def ask(self, instances: Iterable[Instance], pool: ThreadPoolExecutor) -> dict[str, Health]:
        """Ask all that run; return the answers that have come, by instance."""
        running = {i.id: (i.reached_at, i.port or self.port) for i in instances
                   if i.state == "running" and i.name}
        self._asking |= {identity: pool.submit(self._ask_one, *where)
                         for identity, where in running.items() if identity not in self._asking}
        done, _ = wait(self._asking.values(), self.patience_s)
        answered = [identity for identity, question in self._asking.items() if question in done]
        answers = {identity: self._asking.pop(identity).result() for identity in answered}
        return {identity: health for identity, health in answers.items()
                if health and identity in running}

    def _ask_one(self, address: str, port: int) -> Health | None:
        try:
            health = ask(f"{address}:{port}", self.key, self.timeout_s, self.wall)
            return replace(health, heard_at=self.clock())
        except AgentUnreachable:
            return None


def _start(question: Callable[[], Answer]) -> Future[Answer]:
    """Ask in a daemon thread: a question that hangs must not keep the poller from its end."""
    future: Future[Answer] = Future()

    def ask_and_answer() -> None:
        try:
            future.set_result(question())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=ask_and_answer, name="cloud", daemon=True).start()
    return future
