"""Replicas hold the same bits: what their checksums see, who is odd, and how little it costs to
look."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_state import received

from elastic_trainer.state.live_state import LiveState
from elastic_trainer.world.replicas import (
    MOST_SLICES,
    SLICE_BYTES,
    Replica,
    are_same,
    checksum,
    judge,
    received_of,
    summands,
)

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8,
    torch.bool]


def trained(width: int = 96, optimizer: str = "AdamW") -> LiveState:
    """A state after two steps, of about 5 slices of weights at width 500."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, width), torch.nn.BatchNorm1d(width),
                                torch.nn.Linear(width, width))
    state = LiveState(model, getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2))
    for _ in range(2):
        model(torch.randn(8, 7)).square().mean().backward()
        state.optimizer.step()
        state.commit(8, 1)
    state.has_state = True
    return state


def tensors(state: LiveState) -> dict[str, torch.Tensor]:
    named = dict(state.model.named_parameters())
    found = {name: p.detach() for name, p in named.items()} | dict(state.buffers)
    for name, parameter in named.items():
        found |= {f"{name}/{key}": value for key, value in state.optimizer.state[parameter].items()}
    return found


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flip one bit of a tensor, counted over all its bytes."""
    data = tensor.reshape(-1).view(torch.uint8)
    assert data.data_ptr() == tensor.data_ptr()
    data[bit // 8] ^= 1 << bit % 8


def whole(replica: Replica) -> list[int]:
    return [checksum(replica.start(step)()) for step in range(replica.slices)]


@given(st.randoms(use_true_random=False))
def test_one_flipped_bit_is_found_in_one_round_wherever_it_is(chance: random.Random) -> None:
    """Of weights, moments, step counters and buffers: within as many steps as there are slices, and
    by its name."""
    state = trained(500)
    replica = Replica(state)
    assert replica.slices > 2
    before, parts = whole(replica), dict(replica.all_parts())
    name, tensor = chance.choice(list(tensors(state).items()))
    flip(tensor, chance.randrange(8 * tensor.numel() * tensor.element_size()))
    assert whole(replica) != before
    assert [other for other, value in replica.all_parts() if parts[other] != value] == [name]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 5, 1024, 5000])
def test_each_bit_counts_in_tensors_of_every_type(dtype: torch.dtype, length: int) -> None:
    """Also of the last elements, which fill no block."""
    model = torch.nn.Linear(2, 1)
    model.register_buffer("more", torch.zeros(length).to(dtype))
    state = LiveState(model, torch.optim.SGD(model.parameters(), 0.1))
    replica = Replica(state)
    before, chance = checksum(replica.all_parts()), random.Random(length)
    bits = 8 * length * state.buffers["more"].element_size()
    for bit in {0, bits - 1, *(chance.randrange(bits) for _ in range(20))}:
        bit = bit // 8 * 8 if dtype == torch.bool else bit
        flip(state.buffers["more"], bit)
        assert checksum(replica.all_parts()) != before
        flip(state.buffers["more"], bit)
    assert checksum(replica.all_parts()) == before


def test_replicas_are_the_same_when_one_was_received() -> None:
    """Whatever the memory looks like: other strides, other addresses, another order of the
    optimizer's state."""
    giver, taker = trained(300), trained(300)
    for parameter in giver.model.parameters():
        kept = giver.optimizer.state[parameter]
        giver.optimizer.state[parameter] = dict(reversed(kept.items()))
        if parameter.dim() == 2:
            kept = giver.optimizer.state[parameter]
            # Not contiguous, as channels_last is.
            kept["exp_avg"] = kept["exp_avg"].t().contiguous().t()
            assert not kept["exp_avg"].is_contiguous()
            parameter.data = torch.cat([torch.zeros(1),
                                        parameter.data.reshape(-1)])[1:].view(parameter.shape)
            assert parameter.data_ptr() % 8
    taker.load(received(giver.packed()))
    assert whole(Replica(taker)) == whole(Replica(giver))


def test_a_learning_rate_counts_and_a_gradient_does_not() -> None:
    """All numbers of the optimizer's groups are part of each slice."""
    state = trained()
    replica = Replica(state)
    before = whole(replica)
    for parameter in state.model.parameters():
        parameter.grad = torch.rand_like(parameter)
    assert whole(replica) == before
    state.optimizer.param_groups[0]["lr"] *= 1 + 1e-15
    assert all(now != then for now, then in zip(whole(replica), before, strict=True))


def test_the_bound_does_not_grow_with_the_model() -> None:
    """A small model is compared in each step, a large one in 256."""
    def slices(elements: int) -> int:
        class Large(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.empty(elements, device="meta"))

        return Replica(LiveState(model := Large(), torch.optim.SGD(model.parameters(), 0.1))).slices

    assert slices(10) == 1
    assert slices(SLICE_BYTES) == 4
    assert slices(10**9) == MOST_SLICES == 256
    # Each tensor costs time.
    many = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(100)])
    assert Replica(LiveState(many, torch.optim.SGD(many.parameters(), 0.1))).slices == 25


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6), st.integers(1, 4096))
def test_the_sums_show_whether_all_are_the_same(values: list[int], copies: int) -> None:
    """For worlds of thousands, in 64 bits."""
    held = values * copies
    sums = [sum(column) for column in zip(*map(summands, held), strict=True)]
    assert all(total < 2**63 for total in sums)
    assert are_same(sums, len(held)) == (len(set(held)) == 1)


@pytest.mark.parametrize(("held", "majority", "odd"), [("aaba", (0, 1, 3), (2, )),
                                                       ("baaa", (1, 2, 3), (0, )),
                                                       ("aab", (0, 1), (2, )),
                                                       ("abcaa", (0, 3, 4), (1, 2)),
                                                       ("ab", (), (0, 1)),
                                                       ("aabb", (), (0, 1, 2, 3)),
                                                       ("aabc", (), (0, 1, 2, 3))])
def test_the_odd_ones_are_those_whom_more_than_half_contradict(held: str, majority: Any,
                                                               odd: Any) -> None:
    """If no more than half hold the same bits, there is no majority."""
    found = judge([[("w", ord(one)), ("v", 1)] for one in held])
    assert (found.majority, found.outliers, found.tensors) == (majority, odd, ("w", ))


@pytest.mark.parametrize(
    ("held", "received", "before", "majority", "holders"),
    [
        # Nobody has received anything lately, or all have (from a checkpoint).
        ("aab", (-1, -1, -1), 0, (0, 1), ()),
        ("ab", (-1, -1), 0, (), ()),
        ("aabb", (5, 5, 5, 5), 0, (), ()),
        # A witness that has held its state as long as the one that differs, or longer.
        ("aab", (-1, -1, 5), 0, (0, 1), ()),
        ("abb", (-1, -1, 5), 0, (1, 2), ()),
        ("aaba", (-1, 3, 5, 7), 0, (0, 1, 3), ()),
        ("aaab", (-1, -1, -1, 5), 0, (0, 1, 2), ()),
        # Only receivers speak against the one that is right.
        ("abb", (-1, 5, 5), 0, (1, 2), (0, )),
        ("bab", (5, -1, 7), 0, (0, 2), (1, )),
        ("abb", (3, 5, 5), 0, (1, 2), (0, )),
        ("aabbb", (-1, -1, 5, 5, 6), 0, (2, 3, 4), (0, 1)),
        ("abbb", (-1, 5, 5, 5), 0, (1, 2, 3), (0, )),
        # No majority: those that have not received are one, and the receivers differ.
        ("ab", (-1, 5), 0, (), (0, )),
        ("ab", (9, 5), 0, (), (1, )),
        ("aabb", (-1, -1, 5, 5), 0, (), (0, 1)),
        ("aabc", (-1, -1, 5, 5), 0, (), (0, 1)),
        ("abc", (-1, 5, 6), 0, (), (0, )),
        # The eldest differ from each other: a machine's fault, and nobody knows whose.
        ("abc", (-1, -1, 5), 0, (), ()),
        ("abcd", (-1, -1, 5, 5), 0, (), ()),
        # Two receivers with the same wrong bits, at once or one after the other.
        ("aaabb", (-1, -1, -1, 5, 5), 0, (0, 1, 2), (0, 1, 2)),
        ("aaabc", (-1, -1, -1, 5, 5), 0, (0, 1, 2), ()),
        ("aaab", (-1, -1, -1, 9), 1, (0, 1, 2), (0, 1, 2)),
        ("aaba", (-1, -1, -1, 9), 1, (0, 1, 3), ())])
def test_a_receiver_is_no_witness_against_one_that_has_held_its_state_for_longer(
        held: str, received: tuple[int, ...], before: int, majority: Any, holders: Any) -> None:
    """If only receivers speak against a worker, a part of the state was lost on its way."""
    found = judge([[("w", ord(one))] for one in held], received, before)
    assert (found.majority, found.holders) == (majority, holders)


def test_a_receiver_is_a_witness_when_it_was_the_same_for_long() -> None:
    """All votes of these steps have compared it."""
    found = {received: received_of(received, 300) for received in (-1, 0, 44, 45, 300)}
    assert found == {-1: -1, 0: -1, 44: -1, 45: 45, 300: 300}
