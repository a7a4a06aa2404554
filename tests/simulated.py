"""A world of threads: collectives without a network or a process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from threading import BrokenBarrierError, Condition
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


def in_worlds(size: int, act: Callable[[Member], Any], hosts: Sequence[int] = ()) -> list[Any]:
    """Run `act(member)` in one thread for each rank of a world, and return the results. `hosts`:
    the number of each rank's host; else each rank has a host of its own."""
    hub = Hub(size, hosts)
    return in_threads(size, lambda rank: act(Member(hub, rank)), hub.abort)


class Hub:
    """What the members of a simulated world share: what each has given to a collective, by its name
    and how often the name was used."""

    def __init__(self, size: int, hosts: Sequence[int] = ()):
        self.size, self.hosts, self._changed = size, tuple(hosts or range(size)), Condition()
        self.renew()

    def renew(self) -> None:
        """Begin another generation: no collective is on its way."""
        self._given: dict[tuple[str, int], dict[int, Any]] = {}
        self._uses, self._taken = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
        self.is_broken = False

    def abort(self) -> None:
        """End all collectives that are not done, with an error."""
        with self._changed:
            self.is_broken = True
            self._changed.notify_all()

    def give(self, name: str, rank: int, value: Any) -> tuple[str, int]:
        """Give a member's part to a collective, and return its key."""
        with self._changed:
            self._uses[name, rank] += 1
            key = name, self._uses[name, rank]
            self._given.setdefault(key, {})[rank] = value
            self._changed.notify_all()
        return key

    def is_done(self, key: tuple[str, int]) -> bool:
        return self.is_broken or len(self._given.get(key, ())) == self.size

    def take(self, key: tuple[str, int]) -> list[Any]:
        """Wait until all members have given their part; return the parts by rank."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_done(key), 30)
            given = self._given.get(key, {})
            if len(given) < self.size:
                raise BrokenBarrierError(key)
            self._taken[key] += 1
            if self._taken[key] == self.size:
                del self._given[key], self._taken[key]
            return [given[rank] for rank in range(self.size)]


Key = tuple[str, int]


class Member:
    """One member's collectives. They are done in any order, as Horovod's are."""

    def __init__(self, hub: Hub, rank: int):
        self.hub, self.rank, self.size, self.hosts = hub, rank, hub.size, hub.hosts

    def _give(self, name: str, value: Any) -> Key:
        return self.hub.give(name, self.rank, value)

    def _take(self, key: Key) -> list[Any]:
        return self.hub.take(key)

    def _share(self, name: str, value: Any) -> list[Any]:
        return self._take(self._give(name, value))

    def is_done(self, handle: Any) -> bool:
        return self.hub.is_done(handle[0])

    def allreduce_start(self, tensor: torch.Tensor, name: str) -> Any:
        def put(everyone: list[torch.Tensor]) -> torch.Tensor:
            return tensor.copy_(sum(everyone[1:], start=everyone[0].clone()))

        return self._give(name, tensor.clone()), put

    def broadcast_start(self, tensor: torch.Tensor, root: int, name: str) -> Any:
        return self._give(name, tensor.clone()), lambda everyone: tensor.copy_(everyone[root])

    def wait(self, handle: Any) -> Any:
        key, put = handle
        return put(self._take(key))

    def alltoall(self, tensor: torch.Tensor, splits: list[int], name: str) -> torch.Tensor:
        return self.exchanged(self.exchange_start(tensor, splits, name))[0]

    def exchange_start(self, tensor: torch.Tensor, splits: list[int], name: str) -> Any:
        def put(everyone: list[list[torch.Tensor]]) -> tuple[torch.Tensor, list[int]]:
            mine = [parts[self.rank] for parts in everyone]
            return torch.cat(mine), [len(part) for part in mine]

        return self._give(name, list(torch.split(tensor.clone(), splits))), put

    def exchanged(self, handle: Any) -> tuple[torch.Tensor, list[int]]:
        received: tuple[torch.Tensor, list[int]] = self.wait(handle)
        return received

    def allgather_start(self, tensor: torch.Tensor, name: str) -> Any:
        return self._give(name, tensor.clone()), torch.cat

    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        gathered: torch.Tensor = self.wait(self.allgather_start(tensor, name))
        return gathered

    def seat(self, rank: int, size: int) -> None:
        assert (rank, size) == (self.rank, self.size)

    def vote(self, step: int, ballot: Ballot) -> Outcome:
        return outcome_of(self, step, ballot)

    def gather_texts(self, text: str) -> list[str]:
        return [str(shared) for shared in self._share("texts", text)]

    def share_text(self, text: str, root: int) -> str:
        return str(self._share("text", text)[root])
