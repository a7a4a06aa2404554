"""The fixed tree over the micro-batches of a step: which sums are siblings, and the sum of a node.

sums of subtrees, by their ranges of micro-batches → here → the sum of a larger subtree

What always holds: a node is range(k * 2**j, min((k + 1) * 2**j, micro-batches)), and its sum is the
left half's plus the right half's (schedule.aligned_subtrees). So whoever adds has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

Sum = torch.Tensor


def parent(left: range, right: range, microbatches: int) -> range | None:
    """Return the node whose halves these two are; None if they are no siblings."""
    span = _span(left)
    is_parent = (left.stop == right.start and left.start % (2 * span) == 0
                 and right.stop == min(left.start + 2 * span, microbatches))
    return range(left.start, right.stop) if is_parent else None


def joined(nodes: Iterable[range], microbatches: int) -> list[range]:
    """Return the fewest nodes that cover the same micro-batches, left to right."""
    stack: list[range] = []
    for node in sorted(nodes, key=lambda node: node.start):
        stack.append(node)
        while len(stack) > 1 and (whole := parent(stack[-2], stack[-1], microbatches)):
            stack[-2:] = [whole]
    return stack


def joined_sums(pieces: Mapping[range, Sum], microbatches: int) -> dict[range, Sum]:
    """Return the sums of the fewest nodes that cover these subtrees. Changes them."""
    return {node: node_sum(pieces, node, microbatches) for node in joined(pieces, microbatches)}


def node_sum(pieces: Mapping[range, Sum], node: range, microbatches: int) -> Sum:
    """Add the sums of subtrees up to the sum of a node that they cover. Changes them."""
    return _node_sum(pieces, microbatches, node.start, _span(node))


def _node_sum(pieces: Mapping[range, Sum], microbatches: int, low: int, span: int) -> Sum:
    """Return the sum of the node that starts at `low` and is `span` wide.

    This is no inner function: one that calls itself is a reference cycle, which kept each step's
    pieces (a gradient) until the next garbage collection.
    """
    found = pieces.get(range(low, min(low + span, microbatches)))
    if found is not None:
        return found
    assert span > 1, f"no sum of micro-batch {low}"
    half = span // 2
    left = _node_sum(pieces, microbatches, low, half)
    if low + half >= microbatches:
        return left
    return left.add_(_node_sum(pieces, microbatches, low + half, half))


def _span(node: range) -> int:
    """Return the width of the smallest whole node that starts at a node's start and covers it."""
    span = 1
    while span < len(node):
        span *= 2
    return span
