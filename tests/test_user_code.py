"""Legal and illegal user code: the same as a plain PyTorch loop, or an error at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_gradients import everywhere, job_of
from test_loop import built, mse, trained

from elastic_trainer.config import ConfigError
from elastic_trainer.reduce.gradient_sums import ParametersWritten

Model = torch.nn.Module


pytestmark = pytest.mark.usefixtures("no_launcher")


def steps_itself(model: Model, batch: Any) -> torch.Tensor:
    mse(model, batch).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    return mse(model, batch)


def moves_data(model: Model, batch: Any) -> torch.Tensor:
    """A write that no version counts."""
    next(model.parameters()).data.mul_(0.9)
    return mse(model, batch)


@pytest.mark.parametrize("loss", [steps_itself, moves_data])
def test_a_loss_that_changes_weights_is_an_error(loss: Any) -> None:
    """Replicas would differ, and healthy machines would be blamed for it."""
    with pytest.raises((ParametersWritten, ConfigError),
                       match=r"has changed the parameters 0\.weight"):
        trained(built(), loss=loss)


def test_a_later_step_that_changes_weights_is_an_error() -> None:
    """The warm-up has not seen it."""
    model, steps = built(), list[int]()

    def loss(model: Model, batch: Any) -> torch.Tensor:
        if len(steps) == 2:
            with torch.no_grad():
                next(model.parameters()).mul_(0.9)
        return mse(model, batch)

    with pytest.raises(ParametersWritten, match=r"0\.weight"):
        trained(model, loss=loss, after_step=steps.append)
    assert steps == [0, 1]


def test_an_optimizer_that_steps_in_the_backward_pass_is_an_error() -> None:
    """As hooks that save the gradients' memory do."""
    model = built()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: own.step())
    with pytest.raises((ParametersWritten, ConfigError), match="has changed the parameters"):
        trained(model)


def test_a_parameter_that_is_replaced_is_an_error() -> None:
    """A new object is in no buffer, and no checkpoint could name it."""
    model = built()

    def after_step(step: int) -> None:
        if step == 1:
            model[0].weight = torch.nn.Parameter(torch.ones(8, 5))

    with pytest.raises(RuntimeError, match=r"other parameters than at the start \(0\.weight\)"):
        trained(model, after_step=after_step)


@pytest.mark.parametrize(("wrong", "kind"), [
    (lambda loss: None, "NoneType"), (float, "float"), (lambda loss: (loss,), "tuple"),
    (lambda loss: loss.expand(2), r"a tensor of shape \(2,\)")])
def test_a_loss_that_is_no_scalar_is_an_error(wrong: Any, kind: str) -> None:
    """By the type that it has returned."""
    with pytest.raises(TypeError, match=f"returned {kind}. Use the mean"):
        trained(built(), loss=lambda model, batch: wrong(mse(model, batch)))


class Counter(Model):
    """Counts in whole numbers."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.more, self.inner = more, built()
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += self.more
        return torch.as_tensor(self.inner(x))


def test_a_whole_number_that_changes_by_more_than_the_sums_hold_is_an_error() -> None:
    """It was rounded in silence. Up to there it is exact."""
    rules = {"count": "mean"}
    model = everywhere(lambda: job_of(Counter(2**22 - 1), rules=rules))
    assert int(model.get_buffer("count")) == 6 * (2**22 - 1)
    with pytest.raises(
            RuntimeError,
            match="a buffer of whole numbers has changed by more than 4194304 in step 0"):
        trained(Counter(2**25 + 1), buffers=rules)
