"""Both reducers, in worlds of threads: the engine's own code over collectives that need no
network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, finalize

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Member, in_worlds
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elastic_trainer.reduce.exact import ExactReducer
from elastic_trainer.reduce.exchange import route_of
from elastic_trainer.reduce.flat import Flat
from elastic_trainer.reduce.reducer import Reducer
from elastic_trainer.reduce.ring import RingReducer, Sending
from elastic_trainer.reduce.tree import joined, node_sum
from elastic_trainer.schedule.schedule import aligned_subtrees, owned_microbatches


def count(flat: Flat, reducer: Reducer) -> None:
    """Add the counts of the micro-batches that a worker has run, as microbatches.py does."""
    if flat.microbatches_run:
        flat.add_counts(reducer.mine(), 0)


def reduced(kind: str, size: int, microbatches: int, steps: int = 2,
            hosts: Sequence[int] = (), bucket_bytes: int | None = None,
            has_narrow: bool = True) -> list[dict[torch.dtype, torch.Tensor]]:
    """Reduce random per-micro-batch gradients in a world of `size`; the same numbers for every
    world."""

    def act(member: Member) -> dict[torch.dtype, torch.Tensor]:
        parameters = [torch.nn.Parameter(torch.zeros(7, 3)),
                      torch.nn.Parameter(torch.zeros(5, dtype=torch.float64)),
                      *([torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))]
                        if has_narrow else [torch.nn.Parameter(torch.zeros(50, 9))]),
                      torch.nn.Parameter(torch.zeros(1))]
        buffers = {"mean": torch.zeros(3), "count": torch.tensor(0)}
        flat = Flat(dict(zip("abcd", parameters, strict=True)), buffers, torch.device("cpu"))
        reducer: Reducer = (
            ExactReducer(flat, microbatches, bucket_bytes) if kind == "exact" else
            RingReducer(flat, microbatches, Sending(bucket_bytes=bucket_bytes)))
        for step in range(steps):
            mine = reducer.begin(member)
            for microbatch in mine:
                done = reducer.microbatch(microbatch, is_last=microbatch == mine.stop - 1)
                generator = torch.Generator().manual_seed(1000 * step + microbatch)
                numbers = [
                    torch.randn(p.shape, generator=generator) * 10**(microbatch % 5)
                    for p in parameters
                ]
                if microbatch == mine.stop - 1:
                    reducer.overlap(member)
                flat.gradients.open()
                after = {"mean": torch.randn(3, generator=generator), "count": torch.tensor(1)}
                flat.add_statistics(1 / microbatches, torch.randn((), generator=generator), buffers,
                                    after)
                sum((p * n.to(p.dtype)).sum().double()
                    for p, n in zip(parameters, numbers, strict=True)).backward()
                flat.close_microbatch()
                done()
            count(flat, reducer)
            reducer.send(member)
            reducer.finish(member)
            flat.hand_out()
        changed = {name: b.clone() for name, b in buffers.items()}
        flat.apply_statistics(buffers, changed)
        assert int(changed["count"]) == 1
        return {d: t[: flat.layout.lengths[d]].clone() for d, t in flat.sums.items()} | {
            torch.int64: torch.cat([p.grad.double().reshape(-1) for p in parameters])}

    return in_worlds(size, act, hosts)


@pytest.mark.parametrize("microbatches", [1, 2, 6, 8, 13])
def test_exact_has_the_same_bits_when_the_world_has_any_size(microbatches: int) -> None:
    """Sums in the order of a fixed tree do not depend on who does which part, also with more
    workers than micro-batches."""
    alone = reduced("exact", 1, microbatches)[0]
    for size in (2, 3, 4, 5, 7):
        for result in reduced("exact", size, microbatches):
            assert all(torch.equal(result[d], alone[d]) for d in alone), (size, microbatches)


HOSTS = [(0, 0), (0, 0, 1), (0, 1, 0), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 0), (0, 1, 1, 2, 2),
         (0, 0, 0, 1, 1, 1), (2, 2, 0, 0, 1, 1, 1), (0, 0, 0, 0, 1, 1, 1, 1)]


@pytest.mark.parametrize(("microbatches", "bucket_bytes"), [(1, 64), (5, 64), (8, 1024), (13, 64)])
def test_exact_has_the_same_bits_when_workers_share_hosts(microbatches: int, bucket_bytes: int
                                                         ) -> None:
    """Whoever carries a slice between hosts, and wherever the buffers are cut; buckets leave in the
    backward pass."""
    alone = reduced("exact", 1, microbatches, has_narrow=False)[0]
    for hosts in HOSTS:
        for result in reduced("exact", len(hosts), microbatches, hosts=hosts, has_narrow=False,
                              bucket_bytes=bucket_bytes):
            assert all(torch.equal(result[d], alone[d]) for d in alone), hosts


@given(st.integers(1, 40), st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_every_slice_of_every_subtree_is_carried_to_its_worker(microbatches: int,
                                                               hosts: list[int]) -> None:
    """Once; and a host sends as few subtrees as cover its micro-batches."""
    routes = [route_of(rank, tuple(hosts), microbatches) for rank in range(len(hosts))]
    for to, route in enumerate(routes):
        arrived = [node for nodes in route.senders.values() for node in nodes]
        covered = sorted(m for node in arrived + route.held(route.mine) for m in node)
        assert covered == list(range(microbatches))
        for rank in route.senders:
            assert to in routes[rank].carried[rank]
        assert joined(route.held(route.mine), microbatches) == route.held(route.mine)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ring_has_the_same_sum_when_the_world_has_any_size(size: int) -> None:
    """The same gradient up to rounding, the same on every rank to the bit."""
    alone = reduced("exact", 1, 8)[0]
    results = reduced("ring", size, 8)
    for result in results:
        assert all(torch.equal(result[d], results[0][d]) for d in result)
        assert all(torch.allclose(result[d].double(), alone[d].double(), rtol=2e-2) for d in result)


@given(st.integers(1, 40), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_the_tree_is_the_same_when_cut_among_any_number_of_workers(microbatches: int,
                                                                   size: int) -> None:
    """Subtrees of all workers add up, in tree order, to what one worker gets from the leaves."""
    leaves = {range(s, s + 1): torch.randn(3, generator=torch.Generator().manual_seed(s))
              for s in range(microbatches)}
    root, pieces = range(microbatches), {}
    whole = node_sum({node: leaf.clone() for node, leaf in leaves.items()}, root, microbatches)
    for rank in range(size):
        for tree in aligned_subtrees(owned_microbatches(rank, size, microbatches), microbatches):
            inside = {range(s, s + 1): leaves[range(s, s + 1)].clone() for s in tree}
            pieces[tree] = node_sum(inside, tree, microbatches)
    assert joined(pieces, microbatches) == [root]
    assert torch.equal(node_sum(pieces, root, microbatches), whole)


class Live(TorchDispatchMode):
    """The bytes of all tensors that this thread has made and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self._known = WeakKeyDictionary[Any, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor):
                self._note(result.untyped_storage())
        return results

    def _note(self, storage: Any) -> None:
        if storage not in self._known:
            size = self._known[storage] = storage.nbytes()
            self.bytes += size
            self.most = max(self.most, self.bytes)
            finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.bytes -= size


def most_gradients(size: int, microbatches: int) -> float:
    """Return how many gradients the memory of a worker holds at most, in two steps."""
    pieces, numel = 64, 4096

    def act(member: Member) -> float:
        parameters = [torch.nn.Parameter(torch.zeros(numel)) for _ in range(pieces)]
        with Live() as live:
            flat = Flat(dict(zip(map(str, range(pieces)), parameters, strict=True)), {},
                        torch.device("cpu"))
            reducer = ExactReducer(flat, microbatches, bucket_bytes=4 * numel)
            for _ in range(2):
                mine = reducer.begin(member)
                for microbatch in mine:
                    is_last = microbatch == mine.stop - 1
                    done = reducer.microbatch(microbatch, is_last=is_last)
                    if is_last:
                        reducer.overlap(member)
                    flat.gradients.open()
                    flat.add_statistics(1 / microbatches, torch.zeros(()), {}, {})
                    for parameter in parameters:
                        parameter.mean().backward()
                    flat.close_microbatch()
                    done()
                count(flat, reducer)
                reducer.send(member)
                reducer.finish(member)
                flat.hand_out()
        return live.most / (4 * numel * pieces)

    return max(in_worlds(size, act))


@pytest.mark.parametrize(("size", "microbatches", "sums"), [
    (1, 8, 3), (2, 4, 1), (4, 8, 1), (3, 12, 2), (8, 64, 3), (7, 64, 4), (5, 3, 1)])
def test_memory_is_that_of_the_sums_that_the_tree_keeps_open(size: int, microbatches: int,
                                                             sums: int) -> None:
    """And that of some buckets, whatever the number of workers and of their subtrees."""
    assert sums <= most_gradients(size, microbatches) <= sums + 0.4


def test_taken_gradients_need_the_memory_of_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: what a backward pass has made stays beside the sums until its end."""
    monkeypatch.setattr("elastic_trainer.reduce.gradient_sums.TAKEN_ON", ("cpu",))
    assert 4 <= most_gradients(1, 8) <= 4.4
    assert 2 <= most_gradients(4, 8) <= 2.4
