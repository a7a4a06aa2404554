"""The learning rate is a function of the step."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from test_loop import NUMBERS, Ears, assert_close, built, in_a_world, job, sgd, trained

from elastic_trainer.config import ConfigError
from elastic_trainer.schedule.learning_rate import (
    cosine,
    inverse_root,
    linear_decay,
    linear_scaling,
    step_decay,
)
from elastic_trainer.training.groups import decay_groups

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.mark.parametrize("curve", [cosine, linear_decay])
@settings(max_examples=50)
@given(warmup=some.integers(0, 50), more=some.integers(1, 200), floor=some.floats(0, 1))
def test_the_rate_rises_then_falls_to_the_floor_when_warmed_up(curve, warmup, more, floor):
    """Up to 1 by equal parts of the warm-up, down to `floor` at total_steps, and there it stays."""
    rate = curve(warmup_steps=warmup, total_steps=warmup + more, floor=floor)
    rising = [rate(step) for step in range(warmup)]
    falling = [rate(step) for step in range(warmup, warmup + more + 3)]
    assert rising == [(step + 1) / warmup for step in range(warmup)]
    assert falling[0] == pytest.approx(1)
    assert falling[more:] == pytest.approx([floor] * 3)
    assert all(a >= b - 1e-12 for a, b in pairwise(falling))


def test_the_rate_is_the_middle_when_half_the_fall_is_over():
    """Half-way both curves are in the middle of 1 and the floor; a quarter in, cosine is still
    higher."""
    of_cosine = cosine(warmup_steps=10, total_steps=110, floor=0.2)
    of_linear = linear_decay(warmup_steps=10, total_steps=110, floor=0.2)
    assert of_cosine(60) == pytest.approx(0.6) and of_linear(60) == pytest.approx(0.6)
    assert of_linear(35) == pytest.approx(0.8)
    assert of_cosine(35) == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)


@pytest.mark.parametrize(
    ("key", "numbers"),
    [
        ("warmup_steps", {"warmup_steps": 10, "total_steps": 10}),
        ("warmup_steps", {"warmup_steps": -1, "total_steps": 10}),
        ("total_steps", {"warmup_steps": 0, "total_steps": 0}),
        ("floor", {"warmup_steps": 0, "total_steps": 10, "floor": 1.5}),
        ("floor", {"warmup_steps": 0, "total_steps": 10, "floor": math.nan}),
    ],
)
def test_the_key_is_named_when_a_curve_is_impossible(key, numbers):
    """A curve that cannot be drawn ends at start-up, with the key in the message."""
    with pytest.raises(ConfigError, match=f"^{key} is "):
        cosine(**numbers)


def test_the_rate_falls_by_a_factor_at_each_interval() -> None:
    """As torch's StepLR; the warm-up lies over it."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    theirs = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    ours = step_decay(every_steps=4, factor=0.5)
    for step in range(13):
        assert ours(step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert [step_decay(every_steps=4, warmup_steps=2)(step) for step in (0, 1, 4)] == [0.5, 1, 0.1]


def test_the_inverse_root_has_its_top_at_the_end_of_the_warm_up() -> None:
    """1 there, and half of it after four times as many steps."""
    rate = inverse_root(warmup_steps=10)
    assert rate(0) == pytest.approx(0.1) and rate(9) == 1 and rate(39) == pytest.approx(0.5)


def test_linear_scaling_rises_from_the_base_rate_to_that_of_the_batch() -> None:
    """Goyal et al., 2017, sections 2.1 and 2.2; another curve multiplies it."""
    rate = linear_scaling(base_batch=256, warmup_steps=4).of_batch(1024)
    assert [rate(step) for step in range(5)] == [1.75, 2.5, 3.25, 4, 4]
    fallen = linear_scaling(base_batch=256, then=step_decay(every_steps=10)).of_batch(1024)
    assert fallen(9) == 4 and fallen(10) == pytest.approx(0.4)


@pytest.mark.parametrize(("make", "key"), [
    (lambda: step_decay(every_steps=0), "every_steps"),
    (lambda: step_decay(every_steps=5, factor=1.5), "factor"),
    (lambda: step_decay(every_steps=5, factor=math.nan), "factor"),
    (lambda: inverse_root(warmup_steps=0), "warmup_steps"),
    (lambda: linear_scaling(base_batch=0), "base_batch"),
    (lambda: linear_scaling(base_batch=8, then=0.1), "then"),  # type: ignore[arg-type]
])
def test_the_key_is_named_when_a_rate_is_impossible(make: Any, key: str) -> None:
    """At start-up."""
    with pytest.raises(ConfigError, match=f"^{key} is "):
        make()


def test_a_run_uses_the_rate_of_its_global_batch() -> None:
    """The event of a step has the rate that was used."""
    ears, optimizer = Ears(), sgd(model := built())
    base = optimizer.param_groups[0]["lr"]
    trained(model, optimizer, lr=linear_scaling(base_batch=2), listeners=[ears], until="1 step")
    used = [facts["lr"] for name, facts in ears.heard if name == "worker.step_committed"]
    assert used == [pytest.approx(base * NUMBERS["global_batch"] / 2)]


def test_elements_of_the_gradient_are_clipped_by_value() -> None:
    """As clip_grad_value_ of plain PyTorch, with the same bits in every world."""
    alone = trained(built(), clip_value=1e-3, until="1 step")
    plain = built()
    moved = [(new - old).abs().max().item() for new, old
             in zip(alone.model.parameters(), plain.parameters(), strict=True)]
    rate = sgd(plain).param_groups[0]["lr"]
    assert max(moved) == pytest.approx(rate * 1e-3, rel=1e-3)
    whole = trained(built(), clip_value=1e-3)
    for size in (2, 3, 4):
        for result in in_a_world(size, lambda rank: job(built(), clip_value=1e-3)):
            assert result.weights_sha256 == whole.weights_sha256
    assert_close(trained(built(), clip_value=1e9).model, trained(built()).model)


@pytest.mark.parametrize(("options", "key"), [
    ({"clip_value": 0.0}, "clip_value is 0"),
    ({"clip_value": 1.0, "clip_norm": 1.0}, "clip_norm is 1.0 and clip_value is 1.0"),
])
def test_a_clipping_that_cannot_work_is_refused(options: dict[str, Any], key: str) -> None:
    """With the key."""
    with pytest.raises(ConfigError, match=key):
        trained(built(), **options)


def test_biases_and_normalizations_do_not_decay() -> None:
    """Weights of layers and embeddings do; a rule of one's own chooses by name."""
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.LayerNorm(3),
                                torch.nn.Linear(3, 2))
    decaying, others = decay_groups(model, weight_decay=0.1)
    assert decaying["params"] == [model[0].weight, model[2].weight]
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert others["params"] == [model[1].weight, model[1].bias, model[2].bias]
    assert len(decay_groups(model, weight_decay=0.1, rule=lambda name, _: True)) == 1
    with pytest.raises(ConfigError, match="^weight_decay is -1"):
        decay_groups(model, weight_decay=-1)
