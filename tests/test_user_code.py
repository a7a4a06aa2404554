"""Legal and illegal user code: the same as a plain PyTorch loop, or an error at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gradients import assert_close, everywhere, job_of, plain
from test_loop import built, mse, sgd, trained

from elastic_trainer.config import ConfigError
from elastic_trainer.reduce.gradients import ParametersWritten

Model = torch.nn.Module


pytestmark = pytest.mark.usefixtures("no_launcher")


class Conv(Model):
    """A convolution whose weights lie in memory as torch.channels_last has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.last = torch.nn.Conv2d(2, 4, 2), torch.nn.Linear(4, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = torch.nn.functional.pad(x, (0, 3)).view(-1, 2, 2,
                                                        2).to(memory_format=torch.channels_last)
        return torch.as_tensor(self.last(self.conv(image).flatten(1)))


def fused(model: Model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)


class Lowest(Model):
    """Keeps the lowest value seen, as the observers of quantization do: `none` where it has seen
    nothing."""

    def __init__(self, none: float) -> None:
        super().__init__()
        self.register_buffer("lowest", torch.tensor(none))
        self.inner = built()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.lowest = torch.minimum(self.lowest, x.detach().relu().min() + 0.1)
        return torch.as_tensor(self.inner(x) + self.lowest)


@pytest.mark.parametrize(
    ("make", "optimizer"), [
        (Conv, fused),
        (lambda: Lowest(float("inf")), sgd),
        (lambda: Lowest(torch.finfo().max), sgd),
    ],
    ids=["channels_last, fused", "a minimum from inf", "a minimum from the largest number"])
def test_the_weights_are_plain_pytorchs(make: Callable[[], Model],
                                        optimizer: Callable[[Model], torch.optim.Optimizer],
                                        tmp_path: Path) -> None:
    """And the same bits in all worlds, and in a run that goes on from a checkpoint."""
    rules = {name: "mean" for name, _ in make().named_buffers()}
    once = everywhere(lambda: job_of(make(), optimizer, rules=rules))
    reference = make()
    alone = make()
    trained(alone, optimizer(alone), microbatches=1)
    assert_close(alone, plain_with_buffers(reference, optimizer(reference)))
    for steps in (3, 6):
        model = make()
        trained(model, optimizer(model), run_dir=tmp_path, until=f"{steps} steps", buffers=rules)
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), once.state_dict().values(), strict=True))


def plain_with_buffers(model: Model, optimizer: torch.optim.Optimizer) -> Model:
    return plain(model, optimizer, mse, microbatches=1)


def test_a_mask_keeps_its_bits_when_a_buffer_holds_marks() -> None:
    """What no forward pass changes stays, also infinite values and the largest numbers of each
    type."""
    kept = {
        f"{number}": torch.tensor([value, 0.5], dtype=dtype)
        for number, (value, dtype) in enumerate(
            (value, dtype)
            for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
            for value in (float("inf"), -float("inf"), torch.finfo(dtype).max,
                          torch.finfo(dtype).min))
    }

    def make() -> Model:
        model = built()
        for name, value in kept.items():
            model.register_buffer(f"kept{name}", value.clone())
        return model

    model = everywhere(lambda: job_of(make()))
    assert all(torch.equal(model.get_buffer(f"kept{name}"), value) for name, value in kept.items())


def test_a_module_stays_in_eval_mode_when_the_run_goes_on(tmp_path: Path) -> None:
    """To freeze BatchNorm by eval() in after_step is a part of the state, so a newcomer has it
    too."""
    def make() -> dict[str, Any]:
        model = built(torch.nn.BatchNorm1d(8))
        return {"model": model, "after_step": lambda step: model[2].eval() if step == 1 else None}

    whole = trained(**make())
    trained(**make(), run_dir=tmp_path, until="3 steps")
    resumed = trained(**make(), run_dir=tmp_path)
    assert resumed.weights_sha256 == whole.weights_sha256
    assert not resumed.model[2].training  # type: ignore[index]


class Louder(Model):
    """Does something else in train mode, as Dropout does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x if self.training else x


def ends_with_eval(model: Any, batch: Any) -> torch.Tensor:
    loss = mse(model, batch)
    model.eval()
    return loss


def test_the_mode_that_a_loss_leaves_holds_from_the_next_step_on() -> None:
    """A loss that ends with eval() trains its first batch in train mode: whoever has tried it
    before, on all micro-batches."""
    alone, reference = built(Louder()), built(Louder())
    trained(alone, loss=ends_with_eval, microbatches=1)
    assert_close(alone, plain(reference, sgd(reference), ends_with_eval, microbatches=1))
    assert not alone.training and not alone[2].training
    everywhere(lambda: job_of(built(Louder()), loss=ends_with_eval))


class Counting(torch.optim.SGD):
    """Keeps a number that belongs to no parameter in its state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["steps"] = self.state.get("steps", 0) + 1
        super().step()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(1 - 0.01 * self.state["steps"])


def test_an_optimizers_shared_state_is_kept_when_the_run_goes_on(tmp_path: Path) -> None:
    """As torch's own state_dict keeps it."""
    hashes = []
    for folder, steps in ((None, 6), (tmp_path, 3), (tmp_path, 6)):
        model = built()
        hashes.append(
            trained(model, Counting(model.parameters(), lr=0.1), run_dir=folder,
                    until=f"{steps} steps").weights_sha256)
    assert hashes[0] == hashes[2]


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


def test_a_loss_of_one_element_is_a_scalar() -> None:
    """As plain PyTorch's backward() has it."""
    one, other = (trained(built(), loss=loss).weights_sha256
                  for loss in (mse, lambda model, batch: mse(model, batch).reshape(1)))
    assert one == other


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
