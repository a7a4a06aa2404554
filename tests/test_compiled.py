"""Models that torch.compile has wrapped: what they are called in the state is what they are called
without it."""

from __future__ import annotations

import copy
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_state import received
from torch.utils.data import TensorDataset

from elastic_trainer import Trainer, train
from elastic_trainer.__main__ import main
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.values.layout import pack
from elastic_trainer.training.determinism import (
    COMPILER_EXACT,
    advise_on_shapes,
    choose_settings,
    compiled_programs,
    compiler_settings,
    expect_exact,
    set_compiler,
)
from elastic_trainer.training.job.job import Result

DATA = TensorDataset(torch.randn(24, 5, generator=torch.Generator().manual_seed(1)),
                     torch.randn(24, 3, generator=torch.Generator().manual_seed(2)))


class Scale(torch.nn.Module):
    """Keeps a number that is neither parameter nor buffer."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x

    def get_extra_state(self) -> Any:
        return torch.tensor(self.factor)

    def set_extra_state(self, state: Any) -> None:
        self.factor = float(state)


class Net(torch.nn.Module):
    """With statistics that a forward pass replaces, and a tied weight."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8),
                                        torch.nn.Tanh())
        self.heads = torch.nn.ModuleList([torch.nn.Linear(8, 3), torch.nn.Linear(8, 3)])
        self.heads[1].weight = self.heads[0].weight
        self.register_buffer("mean", torch.zeros(8))
        self.body.add_module("scale", Scale())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.heads[0](x) + self.heads[1](x - self.mean)


def whole(model: Net) -> torch.nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def inside(model: Net) -> torch.nn.Module:
    model.body = torch.compile(model.body, backend="eager")  # type: ignore[assignment]
    model.heads[0] = torch.compile(model.heads[0], backend="eager")  # type: ignore[assignment]
    return model


WAYS: dict[str, Callable[[Net], torch.nn.Module]] = {"whole": whole, "inside": inside}


def trained(model: torch.nn.Module, **changes: Any) -> Result:
    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return train(model, optimizer, DATA, loss=loss, global_batch=8, microbatches=2, seed=3,
                 buffers={"mean": "mean"}, **({"until": "2 epochs"} | changes))


@pytest.mark.parametrize("way", WAYS)
def test_the_digest_of_the_weights_is_the_same_when_the_model_is_compiled(way: str) -> None:
    """It is over names and bytes; the backend "eager" computes the same bits."""
    assert trained(WAYS[way](Net())).weights_sha256 == trained(Net()).weights_sha256


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_run_goes_on_when_the_model_is_compiled_or_no_more(tmp_path: Path, way: str,
                                                             compiled_first: bool) -> None:
    """A checkpoint of the one is restored by the other, to the same bits."""
    models = [WAYS[way](Net()), Net()]
    first, second = models if compiled_first else reversed(models)
    trained(first, run_dir=tmp_path / "run", until="3 steps")
    heard: list[str] = []

    def listen(event: str, facts: dict[str, Any]) -> None:
        heard.extend([facts["source"]] if event == "worker.generation_started" else [])

    resumed = trained(second, run_dir=tmp_path / "run", listeners=[listen])
    assert heard == ["checkpoint"] and resumed.steps == 6
    assert resumed.weights_sha256 == trained(Net()).weights_sha256


def test_an_export_of_a_compiled_model_is_loaded_by_one_that_is_not(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Strictly: with both names of a tied weight. `show` names the tensors so too."""
    model = whole(Net())
    trained(model, run_dir=tmp_path / "run", until="2 steps")
    output = tmp_path / "model.safetensors"
    assert main(["checkpoints", "export", str(tmp_path / "run" / "checkpoints"), str(output)]) == 0
    fresh = Net()
    fresh.load_state_dict(load_file(output))
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
    capsys.readouterr()
    assert main(["checkpoints", "show", str(tmp_path / "run" / "checkpoints")]) == 0
    assert "_orig_mod" not in json.dumps(json.loads(capsys.readouterr().out))


def with_prefix(values: dict[str, Any]) -> dict[str, Any]:
    """Name everything as version 0.1 did for a compiled model."""
    old = copy.copy(values)
    for kind in ("parameters", "buffers"):
        old[kind] = {f"_orig_mod.{name}": tensor for name, tensor in values[kind].items()}
    old["aliases"] = {f"_orig_mod.{name}": f"_orig_mod.{own}"
                      for name, own in values["aliases"].items()}
    old["trained"] = [f"_orig_mod.{name}" for name in values["trained"]]
    optimizer = values["optimizer"]
    old["optimizer"] = {
        **optimizer, "state": {f"_orig_mod.{n}": kept
                               for n, kept in optimizer["state"].items()},
        "members": [[f"_orig_mod.{name}" for name in names] for names in optimizer["members"]]
    }
    return old


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_state_with_the_old_names_is_taken_over(is_compiled: bool) -> None:
    """A checkpoint that version 0.1 has written of a compiled model."""
    def state(model: torch.nn.Module) -> LiveState:
        return LiveState(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    giver, taker = state(Net()), state(whole(Net()) if is_compiled else Net())
    giver.model(torch.randn(4, 5)).square().mean().backward()
    giver.optimizer.step()
    packed = pack(with_prefix(giver.values()))
    assert taker.room(packed.header, packed.payload_bytes).payload_bytes == packed.payload_bytes
    taker.load(received(packed))
    assert taker.packed().header == giver.packed().header
    assert all(torch.equal(a, b) for a,
               b in zip(taker.packed().tensors, giver.packed().tensors, strict=True))


# --- the real backend -----------------------------------------------------------------------------

class Conv(torch.nn.Module):
    """A net whose compiled programs for one shape, and for all shapes, have other bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16)
        self.drop, self.head = torch.nn.Dropout(0.1), torch.nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.norm(self.conv(x)).relu().mean((2, 3))
        found: torch.Tensor = self.head(self.drop(pooled)).softmax(1)
        return found


NOISE = torch.randn(66, 3, 9, 9, generator=torch.Generator().manual_seed(4))
NUMBERS = TensorDataset(NOISE, NOISE[:, :, 0, 0])


def compiled_run(*before: int) -> str:
    """Train with inductor, in micro-batches of 16 and 17 samples, after calls with other
    batches."""
    torch._dynamo.reset()
    for size in before:
        torch.compile(Conv())(NOISE[:size]).sum().backward()  # type: ignore[operator]
    model = Conv()
    fast: Any = torch.compile(model)
    trainer = Trainer(fast, torch.optim.SGD(model.parameters(), lr=0.1), NUMBERS, global_batch=33,
                      microbatches=2, until="2 epochs", seed=3, precision="bf16", progress=False)
    programs = compiled_programs()
    for step in trainer:
        for x, y in step:
            step.backward(torch.nn.functional.mse_loss(fast(x), y))
            if step.is_tried:
                programs = compiled_programs()
    assert compiled_programs() == programs  # the warm-up has compiled both sizes
    return trainer.result.weights_sha256


@pytest.mark.usefixtures("no_launcher")
def test_inductors_bits_do_not_depend_on_the_shapes_that_a_worker_has_seen() -> None:
    """With dropout and autocast. The warm-up compiles for each size of a micro-batch, so that
    nobody waits for a newcomer."""
    assert compiled_run() == compiled_run(7)


@pytest.mark.usefixtures("no_launcher")
def test_each_shape_is_compiled_for_itself_and_too_many_are_an_error_with_the_remedy() -> None:
    """By default torch compiles the second shape for all shapes, and leaves the ninth program to
    the interpreter: both have other bits, and what a worker has seen depends on the world."""
    seen = list[tuple[Any, ...]]()

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(tuple(one.shape if isinstance(one, torch.Tensor) else one for one in inputs))
        return graph.forward

    torch._dynamo.reset()
    model = Conv()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), NUMBERS, global_batch=1,
                      microbatches=1, until="20 steps", progress=False)
    fast: Any = torch.compile(model, backend=backend)
    with pytest.raises(Exception, match="fail_on_recompile_limit_hit") as raised:
        for step in trainer:
            for x, y in step:
                step.backward(torch.nn.functional.mse_loss(fast(x[:, :, : 1 + step.number % 9]), y))
    assert step.number == 8 and len(seen) == 8
    assert all(type(size) is int for shapes in seen for shape in shapes for size in shape)
    advise_on_shapes(raised.value)
    assert "dynamic=True" in "".join(traceback.format_exception(raised.value))


def test_ring_keeps_the_users_settings_of_the_compiler() -> None:
    """Also after a warm-up for `exact`, which a standby makes."""
    user = compiler_settings()
    expect_exact("cpu", None)
    assert compiler_settings() == COMPILER_EXACT
    choose_settings("cpu", "ring", user)
    assert compiler_settings() == user
    choose_settings("cpu", "exact", user)
    assert compiler_settings() == COMPILER_EXACT
    set_compiler(user)
