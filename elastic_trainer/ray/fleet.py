"""The agents' actors of one run: asked for, begun, followed, and given back.

coordinator → here → Ray (actors), and back: the lives of the agents (discovery/places/ray.py)

What always holds:
1. The run asks Ray for as many actors as the most workers need, once. Ray places them, restarts
   them, and shows its autoscaler those without a node. None is asked for beside them, and at the
   end all are given back, also those that wait.
2. No question to an actor waits: one that has no node yet answers when it has one.
3. The actor on a draining node is moved when its workers have left: Ray starts it elsewhere, or
   takes it for demand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from elastic_trainer.discovery.hosts import Health
from elastic_trainer.discovery.place_protocol import Instance
from elastic_trainer.discovery.places.ray import AgentLife
from elastic_trainer.ray.agent import Agent
from elastic_trainer.ray.job import NAMESPACE, Job

ASK_S = 2.0
"""The interval in which an actor is asked for its facts."""
AGAIN_S = 30.0
"""The interval in which an actor is made again whose first call fails, e.g. for want of a package.
"""
MOVE_S = 3.0
"""An agent without workers is moved this long after its host came under notice: by then the poller
has taken it off the list, and no worker is started there."""


@dataclass
class Member:
    """One actor, and the question that it has not answered."""

    name: str
    actor: Any = None
    asked: Any = None
    """The reference of the answer to come."""
    asks_at: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""
    """Why its node cannot run it; "": it can, or it has no node."""


class Fleet:
    """The actors of a run. `key` is the run's; `key_id` names it without telling it."""

    def __init__(self, job: Job, key: str, key_id: str,
                 clock: Callable[[], float] = time.monotonic):
        self.job, self.key, self.key_id, self.clock = job, key, key_id, clock
        self.members = [Member(f"{job.name}/agent-{number}") for number in range(job.agents)]
        self.draining_since: dict[str, float] = {}

    def lives(self) -> list[AgentLife]:
        """Return the agents that run with this run's key."""
        return [AgentLife(**{name: value for name, value in member.facts.items()
                             if name != "key_id"})
                for member in self.members if member.facts]

    def turn(self) -> None:
        """Take the answers that have come, and ask what is due."""
        for member in self.members:
            if member.asked is None and self.clock() >= member.asks_at:
                self._ask(member)
            elif member.asked is not None and ray.wait([member.asked], timeout=0)[0]:
                self._take(member)

    def move(self, instances: Mapping[str, Instance], health: Mapping[str, Health]) -> None:
        """Give Ray the actors back whose hosts are under notice and have no workers any more."""
        under_notice = {one.name for one in instances.values() if one.notice and one.name}
        now = self.clock()
        self.draining_since = {name: self.draining_since.get(name, now) for name in under_notice}
        idle = {instances[it].name for it, answer in health.items()
                if it in instances and not answer.facts.get("workers")}
        for member in self.members:
            name = str(member.facts.get("name", ""))
            since = self.draining_since.get(name)
            if name in idle and since is not None and now - since >= MOVE_S:
                with suppress(RayError):
                    ray.kill(member.actor, no_restart=False)
                member.facts, member.asked, member.asks_at = {}, None, now + ASK_S

    def end(self) -> None:
        """Give all actors back."""
        for member in self.members:
            with suppress(RayError, ValueError):
                ray.kill(member.actor or ray.get_actor(member.name, NAMESPACE), no_restart=True)

    def _ask(self, member: Member) -> None:
        if member.actor is None:
            needed = self.job.of_agent()
            options = {"num_cpus": needed.pop("CPU", 0), "num_gpus": needed.pop("GPU", 0)}
            if memory := needed.pop("memory", 0):
                options["memory"] = int(memory)
            member.actor = ray.remote(Agent).options(
                name=member.name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True,
                max_restarts=-1, resources=needed or None, **options).remote(self.job.to_json())
        member.asked = member.actor.facts.remote()

    def _take(self, member: Member) -> None:
        """Take an answer; begin an agent where there is none with this key."""
        asked, member.asked, member.asks_at = member.asked, None, self.clock() + ASK_S
        try:
            member.facts, member.fault = ray.get(asked), ""
        except RayError as error:
            member.facts = {}
            if isinstance(error, RayActorError) and error.actor_init_failed:
                member.fault = str(error)
                with suppress(RayError):
                    ray.kill(member.actor, no_restart=True)
                member.actor, member.asks_at = None, self.clock() + AGAIN_S
            return
        if member.facts.get("key_id") != self.key_id:
            member.facts = {}
            member.asked = member.actor.begin.remote(self.key, self.key_id)
