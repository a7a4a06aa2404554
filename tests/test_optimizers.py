"""What optimizers keep beside `state` and `param_groups`: part of the state, or an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from optimizers import KEPT
from test_loop import built, trained

from elastic_trainer.state.layout import byte_ranges, decode
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.world.replicas import Replica

pytestmark = pytest.mark.usefixtures("no_launcher")

Optimizer = torch.optim.Optimizer
Model = torch.nn.Module


def state_of(make: Callable[[Model], Optimizer], steps: int) -> LiveState:
    """A live state after some steps."""
    model = built()
    state = LiveState(model, make(model))
    state.has_state = True
    for step in range(steps):
        one_step(state, step)
    return state


def one_step(state: LiveState, step: int) -> None:
    torch.manual_seed(step)
    state.model(torch.randn(8, 5)).square().mean().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.commit(8, 1)
    state.optimizer_values.check(step)


def moved(giver: LiveState, taker: LiveState) -> None:
    """Let a newcomer receive the state, as bytes."""
    packed = giver.packed()
    payload = torch.cat(list(byte_ranges(packed, 0, packed.payload_bytes)))
    room = taker.room(packed.header, packed.payload_bytes)
    assert room.payload_bytes == len(payload)
    taker.load(decode(packed.header, payload))


def bytes_of(state: LiveState) -> bytes:
    packed = state.packed()
    return packed.header + b"".join(
        bytes(p.numpy().tobytes()) for p in byte_ranges(packed, 0, packed.payload_bytes))


@pytest.mark.parametrize("kind", KEPT)
def test_a_resumed_run_has_the_bits_of_one_that_went_through(kind: str, tmp_path: Path) -> None:
    """What an optimizer keeps in attributes of its own is in the checkpoint, whatever its form."""
    hashes = []
    for folder, steps in ((None, 9), (tmp_path, 4), (tmp_path, 7), (tmp_path, 9)):
        model = built()
        hashes.append(trained(model, KEPT[kind](model), run_dir=folder,
                              max_steps=steps).weights_sha256)
    assert hashes[0] == hashes[3]


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_newcomer_goes_on_as_its_giver(kind: str, steps: int) -> None:
    """It has the same bytes when it has received the state, the same checksums, and the same
    weights many steps later."""
    giver, taker = state_of(KEPT[kind], steps), state_of(KEPT[kind], 0)
    moved(giver, taker)
    assert bytes_of(taker) == bytes_of(giver)
    for step in range(steps, steps + 8):
        for state in (giver, taker):
            one_step(state, step)
        assert Replica(taker).all_parts() == Replica(giver).all_parts()
    assert bytes_of(taker) == bytes_of(giver)


@pytest.mark.parametrize("kind", KEPT)
def test_a_process_that_goes_back_holds_what_it_held(kind: str) -> None:
    """Values of an older step undo all that the optimizer has kept since."""
    first, later = state_of(KEPT[kind], 2), state_of(KEPT[kind], 7)
    moved(first, later)
    for step in range(2, 8):
        for state in (first, later):
            one_step(state, step)
    assert bytes_of(later) == bytes_of(first)
