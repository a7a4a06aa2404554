"""What modules keep by get_extra_state: in a step, in worlds of any size, in checkpoints, for a
newcomer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import test_loop
import torch
from test_loop import INPUT, Odd, built, in_a_world, job, mse, trained
from test_same_bits import Scaled
from test_trainer import in_a_breaking_world, trainer_of

from elastic_trainer.__main__ import main
from elastic_trainer.config import ConfigError
from elastic_trainer.reduce.gradient_sums import ParametersWritten
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.values.layout import LayoutError, byte_ranges, decode

pytestmark = pytest.mark.usefixtures("no_launcher")


def scaled(seed: int = 0) -> torch.nn.Sequential:
    return built(Scaled(), seed=seed)


def kept(model: torch.nn.Module) -> tuple[list[float], int]:
    module = model[2]  # type: ignore[index]
    return module.history.tolist(), module.passes


@pytest.mark.parametrize("size", [2, 3])
def test_nothing_of_a_step_remains_in_extra_state_when_it_fails(size: int) -> None:
    """Also where the first micro-batch itself raises; the others are not left waiting for its
    values."""
    bad = int(test_loop.SCHEDULE.microbatch_samples(1, 0)[0])
    models = [scaled() for _ in range(size)]

    def broken(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss = mse(model, batch)
        if any(torch.equal(x, INPUT[bad]) for x in batch[0]):
            raise Odd("as planned")
        return loss

    in_a_world(size, lambda rank: job(models[rank], loss=broken))
    reference = scaled()
    trained(reference, until="1 step")
    assert all(kept(model) == kept(reference) for model in models)


class Narrow(torch.nn.Module):
    """What it gives has fewer bits than what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [torch.ones(1)]

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"held": self.held[0].bfloat16()}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self.held = [state["held"].float()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.held[0]


def test_each_micro_batch_begins_with_the_same_extra_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where to set what was got changes it: the first one of a worker is no exception, or the
    bits would depend on the number of workers."""
    def weights(size: int) -> list[list[float]]:
        models = [built(Narrow()) for _ in range(size)]

        def work(rank: int) -> list[float]:
            model = models[rank]
            for step in trainer_of(model):
                for batch in step:
                    step.backward(mse(model, batch))
                model[2].held = [torch.tensor([1.2345678])]
            return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()

        if size == 1:
            return [work(0)]
        with monkeypatch.context() as patch:
            return in_a_breaking_world(patch, size, work)

    assert weights(1) * 2 == weights(2) and weights(4) == weights(1) * 4


class WritesWeights(Scaled):
    """Extra state that is put back with a write to a parameter."""

    def set_extra_state(self, state: Any) -> None:
        super().set_extra_state(state)
        with torch.no_grad():
            self.weight.add_(0.0)


def test_extra_state_that_writes_to_a_parameter_when_it_is_put_back_is_no_misuse() -> None:
    """The writes of a batch are: the parameters are looked at before it is put back, and noted
    again after it."""
    model, steps = built(WritesWeights()), list[int]()
    model[2].weight = torch.nn.Parameter(torch.ones(()))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        if len(steps) == 2:
            with torch.no_grad():
                model[0].weight.mul_(0.9)
        return mse(model, batch) + model[2].weight

    with pytest.raises(ParametersWritten, match=r"0\.weight"):
        trained(model, loss=loss, after_step=steps.append)
    assert steps == [0, 1]


def test_a_newcomer_has_the_extra_state_when_it_has_received_the_state() -> None:
    """A copy of its own: nothing is shared with what came over the network."""
    states = [LiveState(model, torch.optim.SGD(model.parameters(), 0.1))
              for model in (scaled(), scaled())]
    giver, taker = states
    giver.model(INPUT)
    packed = giver.packed()
    payload = torch.cat(list(byte_ranges(packed, 0, packed.payload_bytes)))
    taker.load(decode(packed.header, payload))
    payload.zero_()
    assert kept(taker.model) == kept(giver.model) and kept(giver.model)[1] == 1


def test_a_successor_rolls_the_step_forward_with_the_first_microbatches_values() -> None:
    """What this process leaves for itself has them, as it has the gradient."""
    states = [LiveState(model, torch.optim.SGD(model.parameters(), 0.1))
              for model in (scaled(), scaled())]
    before, after = states
    before.begin()
    before.model(INPUT)
    before.extra_state.keep()
    left = before.extra_state.in_flight()
    before.model(INPUT)
    after.extra_state.take_up(left)
    assert kept(after.model) == ([0.0] * 4, 0)
    after.extra_state.apply()
    assert kept(after.model)[1] == 1


class Holding(torch.nn.Module):
    """Has an extra state of any kind."""

    def __init__(self, value: Any):
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class OneWay(Holding):
    """Cannot take its state back."""

    set_extra_state = torch.nn.Module.set_extra_state


@pytest.mark.parametrize(("make", "named"), [
    (lambda: Holding({"tally": Odd()}), r"extra_state/2\._extra_state/tally holds a Odd"),
    (lambda: OneWay(1), r"2\._extra_state.*no set_extra_state"),
])
def test_extra_state_that_cannot_be_kept_is_refused_at_the_start(
        make: Callable[[], torch.nn.Module], named: str) -> None:
    """With the module's name."""
    with pytest.raises(ConfigError, match=named):
        trained(built(make()))


def test_a_checkpoint_that_lacks_the_extra_state_is_refused(run_dir: Path) -> None:
    """A run of a model without it, or of a version that did not keep it, is not gone on with in
    silence."""
    trained(built(torch.nn.Identity()), until="2 steps")
    with pytest.raises(LayoutError,
                       match=r"extra state is \[\] there and \['2\._extra_state'\] in this model"):
        trained(scaled())


def test_extra_state_is_exported_under_the_names_of_state_dict(
        run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors as tensors, numbers and text as JSON in the metadata; what safetensors cannot hold is
    named."""
    amax = torch.tensor([1.0, 2.0])
    trained(built(Holding(amax), Holding({"passes": 3}), Holding([amax])), until="1 step")
    target = run_dir / "model.safetensors"
    assert main(["checkpoints", "export", str(run_dir / "checkpoints"), str(target)]) == 0
    said = capsys.readouterr().out
    with safetensors.safe_open(target, "pt") as file:
        assert torch.equal(file.get_tensor("2._extra_state"), amax)
        assert json.loads(file.metadata()["3._extra_state"]) == {"passes": 3}
        assert "4._extra_state" not in file.keys() | file.metadata().keys()
    assert "left out" in said and said.rstrip().endswith("4._extra_state")
