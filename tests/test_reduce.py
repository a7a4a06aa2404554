"""Both reducers, in worlds of threads: the engine's own code over collectives that need no
network."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Member, in_worlds

from elastic_trainer.reduce.exact import ExactReducer, tree_sum
from elastic_trainer.reduce.flat import Flat
from elastic_trainer.reduce.ring import RingReducer
from elastic_trainer.schedule.schedule import aligned_subtrees, owned_microbatches


def reduced(kind: str, size: int, microbatches: int,
            steps: int = 2) -> list[dict[torch.dtype, torch.Tensor]]:
    """Reduce random per-micro-batch gradients in a world of `size`; the same numbers for every
    world."""

    def act(member: Member) -> dict[torch.dtype, torch.Tensor]:
        parameters = [torch.nn.Parameter(torch.zeros(7, 3)),
                      torch.nn.Parameter(torch.zeros(5, dtype=torch.float64)),
                      torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)),
                      torch.nn.Parameter(torch.zeros(1))]
        buffers = {"mean": torch.zeros(3), "count": torch.tensor(0)}
        flat = Flat(dict(zip("abcd", parameters, strict=True)), buffers, torch.device("cpu"))
        reducer = (ExactReducer if kind == "exact" else RingReducer)(flat, microbatches)
        for step in range(steps):
            mine = reducer.begin(member)
            for microbatch in mine:
                done = reducer.microbatch(microbatch, is_last=microbatch == mine.stop - 1)
                generator = torch.Generator().manual_seed(1000 * step + microbatch)
                numbers = [
                    torch.randn(p.shape, generator=generator) * 10**(microbatch % 5)
                    for p in parameters
                ]
                if isinstance(reducer, RingReducer) and microbatch == mine.stop - 1:
                    reducer.overlap(member)
                flat.gradients.open()
                after = {"mean": torch.randn(3, generator=generator), "count": torch.tensor(1)}
                flat.add_statistics(1 / microbatches, torch.randn((), generator=generator), buffers,
                                    after)
                sum((p * n.to(p.dtype)).sum().double()
                    for p, n in zip(parameters, numbers, strict=True)).backward()
                flat.close_microbatch()
                done()
            reducer.send(member)
            reducer.finish(member)
            flat.hand_out()
        changed = {name: b.clone() for name, b in buffers.items()}
        flat.apply_statistics(buffers, changed)
        assert int(changed["count"]) == 1
        return {d: t[: flat.layout.lengths[d]].clone() for d, t in flat.sums.items()} | {
            torch.int64: torch.cat([p.grad.double().reshape(-1) for p in parameters])}

    return in_worlds(size, act)


@pytest.mark.parametrize("microbatches", [1, 2, 6, 8, 13])
def test_exact_has_the_same_bits_when_the_world_has_any_size(microbatches: int) -> None:
    """Sums in the order of a fixed tree do not depend on who does which part, also with more
    workers than micro-batches."""
    alone = reduced("exact", 1, microbatches)[0]
    for size in (2, 3, 4, 5, 7):
        for result in reduced("exact", size, microbatches):
            assert all(torch.equal(result[d], alone[d]) for d in alone), (size, microbatches)


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
    leaves = {(s, s + 1): torch.randn(3, generator=torch.Generator().manual_seed(s))
              for s in range(microbatches)}
    whole = tree_sum({k: v.clone() for k, v in leaves.items()}, microbatches)
    pieces = {}
    for rank in range(size):
        for tree in aligned_subtrees(owned_microbatches(rank, size, microbatches), microbatches):
            span = 1 << (len(tree) - 1).bit_length()
            inside = {(s - tree.start, s - tree.start + 1): leaves[s, s + 1].clone() for s in tree}
            assert len(tree) <= span
            pieces[tree.start, tree.stop] = tree_sum(inside, len(tree))
    assert torch.equal(tree_sum(pieces, microbatches), whole)
