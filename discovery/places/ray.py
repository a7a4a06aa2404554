"""Ray's answer to "who is here": the agents that run on its nodes, and the nodes that it drains.

Ray's GCS (nodes, drains), the agents' actors → here → poll (in the coordinator's actor)

What always holds:
1. A host is one life of an agent, not a node. Its id has the node's id and a name of its own, so
   that an actor that Ray restarts, on the same node too, is another host.
2. A node that Ray drains (`ray drain-node`, its autoscaler) is under notice until Ray's deadline.
3. A node that Ray reports dead has no hosts, whatever its actors have answered last.

It imports nothing of Ray's: the coordinator's actor (elastic_trainer/ray/) gives it the questions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from elastic_trainer.discovery.place_protocol import Instance, Notice, Supply

DRAINED = "Ray drains its node"


@dataclass(frozen=True, kw_only=True)
class AgentLife:
    """One life of an agent, as its actor reports it."""

    node: str
    """The id of its node."""
    name: str = ""
    address: str = ""
    port: int = 0
    began: float = 0.0
    lacks: str = ""
    """Why no worker can run there; "": nothing lacks."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Ray's nodes, as its GCS reports them."""

    alive: Mapping[str, str]
    """Node's id → its address."""
    drains: Mapping[str, float] = field(default_factory=dict)
    """Node's id → when it is taken, in seconds since 1970; 0: the time is unknown."""


def instances_of(nodes: Nodes, lives: Sequence[AgentLife], slots: int, gpus: int) -> list[Instance]:
    """Return the hosts: agents on nodes that live."""
    return [_instance(life, nodes, slots, gpus) for life in lives if life.node in nodes.alive]


def _instance(life: AgentLife, nodes: Nodes, slots: int, gpus: int) -> Instance:
    where = nodes.alive[life.node]
    notice = None
    if life.node in nodes.drains:
        notice = Notice(DRAINED, nodes.drains[life.node] or None)
    return Instance(
        id=f"{life.node[:12]}/{life.name or where}", name=life.name, address=life.address,
        port=life.port, type="ray", lifecycle="on-demand", launched=life.began, slots=slots,
        gpus=gpus,
        state="pending" if life.lacks else "running", notice=notice,
        says=f"{life.lacks} on {where}" if life.lacks else "")


class Ray:
    """The agents of one run: a Place. `nodes` and `lives` ask Ray; they raise PlaceUnavailable."""

    def __init__(self, nodes: Callable[[], Nodes], lives: Callable[[], Sequence[AgentLife]], *,
                 agents: int, slots: int = 1, gpus: int = 0):
        self._nodes, self._lives = nodes, lives
        self.agents, self.slots, self.gpus = agents, slots, gpus
        self._there = 0

    def instances(self) -> list[Instance]:
        """Return the run's hosts. Raises PlaceUnavailable."""
        lives = self._lives()
        hosts = instances_of(self._nodes(), lives, self.slots, self.gpus)
        self._there = len(hosts)
        return hosts

    def supply(self) -> Supply | None:
        """Return how many agents Ray has placed, of how many the run wants."""
        return Supply(there=self._there, wanted=self.agents)
