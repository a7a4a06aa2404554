"""A world of threads: collectives without a network or a process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from elastic_trainer.world.vote import Ballot, Outcome, outcome_of


def in_threads(size: int, act: Callable[[int], Any],
               give_up: Callable[[], None] = lambda: None) -> list[Any]:
    """Run `act` of each rank in a thread, and return what they return. The first exception gives
    up, and is raised here."""
    results, errors = [None] * size, list[BaseException]()

    def run(rank: int) -> None:
        try:
            results[rank] = act(rank)
        except BaseException as error:
            errors.append(error)
            give_up()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def in_worlds(size: int, act: Callable[[Member], Any]) -> list[Any]:
    """Run `act(member)` in one thread for each rank of a world, and return the results."""
    hub = Hub(size)
    return in_threads(size, lambda rank: act(Member(hub, rank)), hub.barrier.abort)


class Hub:
    """What the members of a simulated world share."""

    def __init__(self, size: int):
        self.size, self.barrier = size, threading.Barrier(size)
        self.board: dict[tuple[str, int], Any] = {}


class Member:
    """One member's collectives."""

    def __init__(self, hub: Hub, rank: int):
        self.hub, self.rank, self.size = hub, rank, hub.size

    def _share(self, name: str, value: Any) -> list[Any]:
        self.hub.board[name, self.rank] = value
        self.hub.barrier.wait(30)
        shared = [self.hub.board[name, rank] for rank in range(self.size)]
        self.hub.barrier.wait(30)
        return shared

    def allreduce_start(self, tensor: torch.Tensor, name: str) -> Any:
        return (tensor, name, None)

    def broadcast_start(self, tensor: torch.Tensor, root: int, name: str) -> Any:
        return (tensor, name, root)

    def wait(self, handle: Any) -> torch.Tensor:
        tensor, name, root = handle
        everyone = self._share(name, tensor.clone())
        tensor.copy_(
            sum(everyone[1:], start=everyone[0].clone()) if root is None else everyone[root])
        return tensor

    def alltoall(self, tensor: torch.Tensor, splits: list[int], name: str) -> torch.Tensor:
        return self.exchanged(self.exchange_start(tensor, splits, name))[0]

    def exchange_start(self, tensor: torch.Tensor, splits: list[int], name: str) -> Any:
        return (list(tensor.split(splits)), name)

    def exchanged(self, handle: Any) -> tuple[torch.Tensor, list[int]]:
        tensors, name = handle
        parts = self._share(name, tensors)
        mine = [parts[rank][self.rank] for rank in range(self.size)]
        return torch.cat(mine), [len(part) for part in mine]

    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return torch.cat(self._share(name, tensor.clone()))

    def seat(self, rank: int, size: int) -> None:
        assert (rank, size) == (self.rank, self.size)

    def vote(self, step: int, ballot: Ballot) -> Outcome:
        return outcome_of(self, step, ballot)

    def gather_texts(self, text: str) -> list[str]:
        return [str(shared) for shared in self._share("texts", text)]

    def share_text(self, text: str, root: int) -> str:
        return str(self._share("text", text)[root])
