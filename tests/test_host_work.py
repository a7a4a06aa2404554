"""What the host does in a step beside the user's code: few operations, and one wait for the device.

A GPU is not needed: the same Python code starts the same operations, and reads the same tensors.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop import built, mse
from test_trainer import in_a_breaking_world, trainer_of
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import elastic_trainer

pytestmark = pytest.mark.usefixtures("no_launcher")
OURS = [Path(elastic_trainer.__file__).resolve().parent]
OURS += [OURS[0].parent / name for name in ("state", "discovery")]
MOST_CALLS, MOST_CALLS_OF_A_MICROBATCH = 1200, 130
"""Of our functions, in a step of four micro-batches and in one more micro-batch (measured: 1099 to
1140, and 109 to 121)."""
STEPS, MEASURED = 6, 5
"""All steps, and the one that is counted: others look whether the state can be kept."""


@cache
def is_ours(file: str) -> bool:
    return any(Path(file).resolve().is_relative_to(folder) for folder in OURS)


class Operations(TorchDispatchMode):
    """Counts the operations that our code starts itself, by file and line."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.counts = Counter[str](), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller = sys._getframe(1)
        if self.counts and is_ours(caller.f_code.co_filename):
            self.found[f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"] += 1
        return func(*args, **(kwargs or {}))


def normed(layers: int) -> torch.nn.Module:
    """A model of BatchNorms (three buffers each), as ResNet-50 has 53 of them."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.BatchNorm1d(5) for _ in range(layers)),
                               torch.nn.Linear(5, 3))


def masked(layers: int) -> torch.nn.Module:
    """A model of linear layers with a constant buffer each, as GPT-2 has them."""
    model = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(layers)),
                                torch.nn.Linear(5, 3))
    for layer in model[:-1]:
        layer.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool))
    return model


def steps_of(model: torch.nn.Module, **options: Any) -> Iterator[Any]:
    """Yield each step after its batches."""
    for step in trainer_of(model, until=f"{STEPS} steps", min_microbatch_samples=2, **options):
        for batch in step:
            step.backward(mse(model, batch))
        yield step


def operations(model: torch.nn.Module, **options: Any) -> Counter[str]:
    """Return the operations of our own in one step."""
    counting = Operations()
    with counting:
        for step in steps_of(model, **options):
            counting.counts = step.number == MEASURED - 1
    return counting.found


@pytest.mark.parametrize("options", [
    {"reduce": "exact"}, {"reduce": "ring"}, {"reduce": "exact", "microbatches": 1}])
@pytest.mark.parametrize("model", [normed, masked])
def test_operations_do_not_grow_with_the_number_of_buffers(
        model: Callable[[int], torch.nn.Module], options: dict[str, Any]) -> None:
    """Neither for a micro-batch nor for a step: each is a launch of a kernel on a GPU."""
    few, many = (operations(model(layers), **options) for layers in (4, 53))
    assert {site: count for site, count in many.items() if count > few[site]} == {}
    assert few.total() < 150


def calls(model: torch.nn.Module, **options: Any) -> Counter[str]:
    """Return how often each function of our own is called in one step: the lesser number of two
    steps. What is done each few seconds may fall into one of them."""
    found, counts = (Counter[str](), Counter[str]()), [-1]

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if counts[0] >= 0 and event == "call" and is_ours(code.co_filename):
            found[counts[0]][f"{Path(code.co_filename).name} {code.co_qualname}"
                  if hasattr(code, "co_qualname") else code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        for step in steps_of(model, **options):
            counts[0] = step.number - (MEASURED - 2) if step.number < MEASURED else -1
    finally:
        sys.setprofile(before)
    return found[0] & found[1]


@pytest.mark.parametrize("reduce", ["exact", "ring"])
@pytest.mark.parametrize("model", [normed, masked])
def test_calls_do_not_grow_with_the_number_of_layers(
        model: Callable[[int], torch.nn.Module], reduce: str) -> None:
    """Neither with that of parameters, buffers or modules: a call of Python takes as long as the
    start of a small kernel. A step of four micro-batches, and what a further one adds."""
    few, many = (calls(model(layers), reduce=reduce, microbatches=4) for layers in (4, 53))
    assert {name: count for name, count in many.items() if count > few[name]} == {}
    one = calls(model(4), reduce=reduce, microbatches=1).total()
    assert few.total() < MOST_CALLS
    assert few.total() - one < 3 * MOST_CALLS_OF_A_MICROBATCH


READS = {"tolist", "item", "__float__", "__int__", "__bool__", "__index__", "cpu", "numpy",
         "nonzero", "__contains__", "equal", "allclose"}
"""Functions of torch whose result is on the host: each waits for a device."""


class Reads(TorchFunctionMode):
    """Notes where our code starts a copy to the host, and where it reads a tensor. One that was
    made on the host, as the message of a vote is, may be read."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.notes = list[str](), False
        self._made = dict[int, torch.Tensor]()
        self._copied = dict[int, torch.Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        frame, name = sys._getframe(1), getattr(func, "__name__", "")
        file = Path(frame.f_code.co_filename)
        if not is_ours(str(file)):
            return result
        if name == "tensor" and "device" not in (kwargs or {}):
            self._made[id(result)] = result
        elif name == "to" and file.name == "host_copy.py":
            self._copied[id(result)] = result
            self._note("copy")
        elif name in READS and args and id(args[0]) not in self._made:
            is_copy = id(args[0]) in self._copied
            self._note("read" if is_copy else f"{file.name}:{frame.f_lineno} {name}")
        return result

    def _note(self, what: str) -> None:
        if self.notes:
            self.found.append(what)


def reads(model: torch.nn.Module, **options: Any) -> list[str]:
    """Return the copies and reads of one step, in their order."""
    noting = Reads()
    with noting:
        for step in steps_of(model, **options):
            noting.notes = step.number == MEASURED - 1
            assert step.loss > 0
    return noting.found


@pytest.mark.parametrize("reduce", ["exact", "ring"])
@pytest.mark.parametrize("model", [built, lambda: normed(8), lambda: masked(8)])
def test_the_device_is_read_once_in_a_step(model: Callable[[], torch.nn.Module],
                                           reduce: str) -> None:
    """All that the host decides by comes in one copy: what was trained and used, the loss, the
    tally, and whether buffers changed that may not."""
    assert reads(model(), reduce=reduce) == ["copy", "read"]


def test_all_copies_of_a_step_are_on_their_way_before_one_is_read(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """So several workers wait for their devices once, too: the checksum of the state, which goes
    into the vote, is computed while the gradients are on their way."""
    models = [normed(8) for _ in range(2)]
    for found in in_a_breaking_world(monkeypatch, 2, lambda rank: reads(models[rank])):
        assert [what for what in found if what not in ("copy", "read")] == []
        assert found[: found.count("copy")] == ["copy"] * 2


def compiled_graphs(train: Callable[[torch.nn.Module, TensorDataset], None]) -> list[int]:
    """Return the sizes of the graphs that a way to train a compiled model makes."""
    torch._dynamo.reset()
    graphs = list[int]()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    model = torch.compile(normed(3), backend=backend, fullgraph=True)
    train(model, TensorDataset(torch.randn(32, 5), torch.randn(32, 3)))  # type: ignore[arg-type]
    assert not torch._dynamo.utils.counters["graph_break"]
    return graphs


@pytest.mark.parametrize("reduce", ["exact", "ring"])
def test_a_compiled_model_is_compiled_as_often_as_in_a_plain_loop(reduce: str) -> None:
    """Views in `.grad`, hooks and buffers that are put back break no graph, and recompile none."""
    def plainly(model: torch.nn.Module, data: TensorDataset) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            for start in range(0, 32, 8):
                mse(model, data[start : start + 8]).backward()
            optimizer.step()
            optimizer.zero_grad()

    def ours(model: torch.nn.Module, data: TensorDataset) -> None:
        for step in trainer_of(model, dataset=data, global_batch=32, until="3 steps",
                               reduce=reduce):
            for batch in step:
                step.backward(mse(model, batch))

    assert compiled_graphs(ours) == compiled_graphs(plainly)
