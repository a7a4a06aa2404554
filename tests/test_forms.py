"""What a state holds comes back with its type, or is refused by name when the loop begins."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import functools
import math
import pathlib
import random
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from test_loop import built, sgd, trained

from elastic_trainer.config import ConfigError
from elastic_trainer.state.values.forms import CannotKeep
from elastic_trainer.state.values.layout import (
    LayoutError,
    byte_ranges,
    byte_view,
    decode,
    outline,
    pack,
)

pytestmark = pytest.mark.usefixtures("no_launcher")


class Moments(NamedTuple):
    mean: Any
    square: Any


class Color(enum.Enum):
    RED = "red"
    OTHER = ("a", 1)


class Level(enum.IntEnum):
    LOW = 1


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


class Text(str, enum.Enum):  # noqa: UP042  # StrEnum came with Python 3.11
    A = "a"


Point = collections.namedtuple("Point", "x y")


def back(value: Any, classes: dict[str, type] | None = None) -> Any:
    """Return a value as another process gets it, which knows the same classes."""
    known: dict[str, type] = {} if classes is None else classes
    packed = pack({"kept": value}, known, learns=classes is None)
    parts = list(byte_ranges(packed, 0, packed.payload_bytes))
    payload = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    outline(packed.header)
    return decode(packed.header, payload, known)["kept"]


def same(mine: Any, theirs: Any) -> bool:
    """Return whether two values have the same types and the same bits, inside and outside."""
    if type(mine) is not type(theirs):
        return False
    match mine:
        case torch.Tensor():
            return (mine.dtype == theirs.dtype and mine.shape == theirs.shape
                    and mine.requires_grad == theirs.requires_grad
                    and torch.equal(byte_view(mine), byte_view(theirs)))
        case numpy.ndarray() | numpy.generic():
            return (mine.dtype == theirs.dtype and mine.shape == theirs.shape
                    and numpy.asarray(mine).tobytes() == numpy.asarray(theirs).tobytes())
        case dict():
            pairs = zip(mine.items(), theirs.items(), strict=True)
            return (len(mine) == len(theirs) and getattr(mine, "default_factory", 0) is getattr(
                theirs, "default_factory", 0) and all(same(a, b) for a, b in pairs))
        case collections.deque():
            return mine.maxlen == theirs.maxlen and same(list(mine), list(theirs))
        case list() | tuple():
            return len(mine) == len(theirs) and all(map(same, mine, theirs))
        case complex():
            return same(mine.real, theirs.real) and same(mine.imag, theirs.imag)
        case float() if math.isnan(mine):
            return math.isnan(theirs)
        case float():
            return math.copysign(1, mine) == math.copysign(1, theirs) and mine == theirs
        case _:
            return bool(mine == theirs)


def described(value: Any) -> str:
    return type(value).__name__


ARRAY = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
PLAIN: list[Any] = [
    None, True, 0, -1, 2**63, 10**5000, -(2**70), 0.5, -0.0, math.inf, -math.inf, math.nan, "",
    "a\ud800b", 1 + 2j, complex(math.nan, -0.0), b"", b"\x00\xff", bytearray(b"ab"), [], (), {},
    range(3), range(10, 0, -3), slice(1, None, 2), set(), {1, 2}, {"b", "a", (1, "c")},
    frozenset({1}), {frozenset({2}): 1}, collections.deque([1, 2]),
    collections.deque([[1], 2], maxlen=2), collections.OrderedDict([("b", 1), ("a", [2])]),
    collections.defaultdict(list, a=[1]), collections.defaultdict(None, {3: 4}),
    collections.defaultdict(collections.Counter, x=collections.Counter("aab")),
    collections.Counter("hello"), {3: 1, "3": 2, None: 3, (1, 2): 4, 2.5: 5, False: 6},
    {b"key": range(2), 1j: 2}, [[{"a": (1, [collections.Counter()])}]]]
OF_TORCH: list[Any] = [
    torch.Size([2, 3]), torch.Size([]), torch.float8_e4m3fn, torch.device("cpu"),
    torch.device("cuda", 1), torch.channels_last, torch.sparse_coo,
    torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False),
    torch.ones(3, requires_grad=True), torch.tensor(1.5), torch.empty(0, 4),
    torch.ones(1).expand(4),
    torch.arange(6).reshape(2, 3).t(), torch.arange(8)[::2], torch.randn(2, 3, 4, 4).to(
        memory_format=torch.channels_last), torch.tensor([1 + 2j]).conj(),
    torch.tensor([1 + 2j]).conj().imag, collections.OrderedDict(w=torch.ones(2))]
OF_NUMPY: list[Any] = [
    numpy.float32(1.5), numpy.float64(-0.0), numpy.float16(math.nan), numpy.int64(2**62),
    numpy.uint8(3), numpy.bool_(True), numpy.complex64(1j), numpy.datetime64("2026-11-26"),
    numpy.timedelta64(3, "s"), numpy.str_("abc"), numpy.bytes_(b"ab"), ARRAY, ARRAY.T,
    ARRAY[:, ::2],
    ARRAY.astype(">f8"), numpy.array(3.0), numpy.empty((0, 2)), numpy.array(["a", "bc"]),
    numpy.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", ">f8")]), numpy.array([True, False]),
    numpy.random.default_rng(1).bit_generator.state, random.Random(1).getstate()]
OF_CLASSES: list[Any] = [
    Moments(torch.ones(2), [1]), Point(1, Point(2, 3)), Color.RED, Color.OTHER, Level.LOW,
    Mode.READ, Mode.READ | Mode.WRITE, Text.A, {Level.LOW: Color.RED}]


@pytest.mark.parametrize("value", PLAIN + OF_TORCH + OF_NUMPY + OF_CLASSES, ids=described)
def test_a_value_comes_back_with_its_type_and_its_bits(value: Any) -> None:
    """Also inside of containers, which keep their order."""
    assert same(back(value), value)
    assert same(back([{"a": (value, value)}]), [{"a": (value, value)}])


DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_each_type_comes_back_or_is_refused_by_name(dtype: torch.dtype) -> None:
    """Every type that torch has a name for, also those that it cannot copy or add."""
    tensor = torch.empty(4, dtype=dtype)
    if not tensor.is_quantized:
        tensor = torch.arange(64, dtype=torch.uint8).view(dtype)
    try:
        assert same(back(tensor), tensor)
        assert not str(dtype).startswith(("torch.q", "torch.int1", "torch.uint1")) or (
            dtype in (torch.int16, torch.uint16))
    except CannotKeep as error:
        assert str(dtype) in str(error) and "kept" in str(error)


@pytest.mark.parametrize("strided", [
    torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(3, 4).t(),
    torch.randn(2, 3, 4).permute(2, 0, 1)])
def test_the_order_of_a_tensors_elements_in_memory_comes_back(strided: torch.Tensor) -> None:
    """Sums over it would have other bits."""
    assert back(strided).stride() == strided.stride()


def test_a_part_that_is_there_twice_comes_back_as_one_object() -> None:
    """What is changed through one name is changed under the other, also of tensors."""
    shared, tensor = [1], torch.ones(2)
    value = back({"a": shared, "b": [shared, (shared,)], "t": tensor, "u": {"t": tensor},
                  "equal": [1]})
    assert value["a"] is value["b"][0] is value["b"][1][0] and value["equal"] is not value["a"]
    assert value["t"] is value["u"]["t"]
    after = back([{1}, {1}, shared, collections.deque([shared]), shared])
    assert after[2] is after[3][0] is after[4] and after[0] is not after[1]


def test_the_attributes_of_a_modules_state_dict_come_back() -> None:
    """torch reads the versions of modules there."""
    model = built(torch.nn.BatchNorm1d(8))
    assert back(model.state_dict())._metadata == model.state_dict()._metadata  # type: ignore


class OfText(str):
    pass


class OfInt(int):
    pass


class OfFloat(float):
    pass


class OfList(list[Any]):
    pass


class OfDict(dict[str, Any]):
    pass


class OfTuple(tuple[Any, ...]):
    pass


class OfTensor(torch.Tensor):
    pass


class OfParameter(torch.nn.Parameter):
    pass


@dataclass
class Facts:
    steps: int = 1


def cycle() -> list[Any]:
    found: list[Any] = [1]
    found.append({"again": found})
    return found


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)


def per_channel() -> torch.Tensor:
    return torch.quantize_per_channel(torch.randn(2, 3), torch.ones(2), torch.zeros(2), 0,
                                      torch.quint8)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a subclass of str": (lambda: OfText("a"), "OfText: a subclass of str"),
    "torch's version": (lambda: torch.__version__, "TorchVersion: a subclass of str"),
    "a subclass of int": (lambda: OfInt(1), "OfInt: a subclass of int"),
    "a subclass of float": (lambda: OfFloat(1), "OfFloat: a subclass of float"),
    "a subclass of list": (lambda: OfList(), "OfList: a subclass of list"),
    "a subclass of dict": (lambda: OfDict(), "OfDict: a subclass of dict"),
    "a subclass of tuple": (lambda: OfTuple(), "OfTuple: a subclass of tuple"),
    "a ParameterDict": (lambda: torch.nn.ParameterDict(), "ParameterDict"),
    "a key": (lambda: {torch.ones(1): 1}, "a dict with a tensor as key, .*Use its name"),
    "a set of tensors": (lambda: {torch.ones(1)}, "a set of tensors"),
    "a factory": (lambda: collections.defaultdict(lambda: 0), "default_factory is no builtin"),
    "a partial": (lambda: functools.partial(int), "holds a partial"),
    "a dataclass": (lambda: Facts(), "Facts: a dataclass.*asdict"),
    "a function": (lambda: math.sin, "builtin_function_or_method"),
    "a class": (lambda: Facts, "holds a type"),
    "a module": (lambda: torch.nn.Linear(1, 1), "holds a Linear. Keep its state_dict"),
    "a cycle": (cycle, "contains itself"),
    "a datetime": (lambda: datetime.datetime(2026, 1, 1), "holds a datetime"),
    "a path": (lambda: pathlib.PurePosixPath("a"), "holds a PurePosixPath"),
    "a decimal": (lambda: decimal.Decimal(1), "holds a Decimal"),
    "an identifier": (lambda: uuid.UUID(int=1), "holds a UUID"),
    "a generator of torch": (lambda: torch.Generator(), "get_state"),
    "a generator of numpy": (lambda: numpy.random.default_rng(), "holds a Generator"),
    "a generator of Python": (lambda: random.Random(), "getstate"),
    "many bytes": (lambda: bytes(2 << 20), "2097152 bytes.*frombuffer"),
    "a memoryview": (lambda: memoryview(b"a"), "holds a memoryview"),
    "an array of objects": (lambda: numpy.array([{}], dtype=object), "ndarray of object"),
    "a masked array": (lambda: numpy.ma.array([1]), "MaskedArray"),
    "a matrix": (lambda: numpy.matrix([1]), "matrix"),  # type: ignore[no-untyped-call]
    "a long double": (lambda: numpy.longdouble(1), "longdouble of float128|of longdouble"),
    "a sparse tensor": (lambda: torch.eye(2).to_sparse(), "torch.sparse_coo"),
    "a CSR tensor": (lambda: torch.eye(2).to_sparse_csr(), "torch.sparse_csr"),
    "a BSR tensor": (lambda: torch.eye(2).to_sparse_bsr((1, 1)), "torch.sparse_bsr"),
    "an mkldnn tensor": (lambda: torch.ones(2).to_mkldnn(), "torch._mkldnn"),
    "a nested tensor": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
                        "nested tensor"),
    "a jagged tensor": (lambda: torch.nested.nested_tensor(
        [torch.ones(1), torch.ones(2)], layout=torch.jagged), "NestedTensor"),
    "a tensor on meta": (lambda: torch.empty(2, device="meta"), "meta"),
    "a quantized tensor": (quantized, "quantized tensor .torch.qint8.*int_repr"),
    "a tensor quantized by channels": (per_channel, "quantized tensor"),
    "a quantized Parameter": (lambda: torch.nn.Parameter(quantized(), requires_grad=False),
                              "quantized tensor"),
    "a subclass of Tensor": (lambda: torch.ones(2).as_subclass(OfTensor), "OfTensor"),
    "a subclass of Parameter": (lambda: OfParameter(torch.ones(2)), "OfParameter"),
    "a masked tensor": (lambda: torch.masked.masked_tensor(torch.ones(2), torch.ones(2) > 0),
                        "MaskedTensor"),
    "a lazy parameter": (lambda: torch.nn.LazyLinear(1).weight, "UninitializedParameter"),
    "a fake tensor": (lambda: torch._subclasses.FakeTensorMode().from_tensor(torch.ones(1)),
                      "FakeTensor"),
    "a tensor with a graph": (lambda: torch.ones(2, requires_grad=True) * 2, "detach"),
}


class Holder:
    """An object of the user's with a value of any type."""

    def __init__(self, value: Any = None):
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_would_not_come_back_is_refused_when_the_loop_begins(name: str) -> None:
    """By its place and its type, with the remedy, and before a sample is read."""
    def loss(*_: Any) -> torch.Tensor:
        raise AssertionError("a step was begun")

    make, told = REFUSED[name]
    with pytest.raises(ConfigError, match=f"(?s)extras/kept/value.* {told}|{told}"):
        trained(built(), loss=loss, state={"kept": Holder([make()])})


@pytest.mark.parametrize("number", range(4))
def test_a_values_type_comes_back_when_a_run_is_resumed(number: int, tmp_path: Path) -> None:
    """It is that of the object which this process has registered: its class is not imported."""
    values = [PLAIN, OF_TORCH, OF_NUMPY, OF_CLASSES][number]
    trained(built(), state={"kept": Holder(values)}, until="2 steps", run_dir=tmp_path / "run")
    holder = Holder([OF_CLASSES])
    trained(built(), state={"kept": holder}, run_dir=tmp_path / "run")
    assert same(holder.value, values)


def test_no_value_is_built_from_memory_without_bytes(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of numpy's that is built from any bytes is a SystemError of Python's."""
    empty = torch.empty

    def full(*args: Any, **options: Any) -> torch.Tensor:
        made = empty(*args, **options)
        return made.fill_(255) if made.dtype == torch.uint8 and made.device.type == "cpu" else made

    values = [numpy.str_("a"), numpy.array(["a"]), {numpy.str_("k"): numpy.datetime64("2026")}]
    trained(built(), state={"kept": Holder(values)}, until="2 steps", run_dir=tmp_path / "run")
    holder = Holder([])
    monkeypatch.setattr(torch, "empty", full)
    trained(built(), state={"kept": holder}, run_dir=tmp_path / "run")
    assert same(holder.value, values)


def test_a_class_that_this_process_does_not_hold_is_named_when_a_run_is_resumed(
        tmp_path: Path) -> None:
    """The store does not choose what is imported."""
    trained(built(), state={"kept": Holder(Level.LOW)}, until="2 steps", run_dir=tmp_path / "run")
    with pytest.raises(LayoutError, match=r"test_forms\.Level.*when the loop began"):
        trained(built(), state={"kept": Holder()}, run_dir=tmp_path / "run")
    assert "antigravity" not in sys.modules


def test_a_value_of_a_new_class_is_refused_when_it_appears_during_the_training() -> None:
    """No worker that joins would know it."""
    classes: dict[str, type] = {}
    pack({"kept": [Level.LOW]}, classes, learns=True)
    assert back(Level.LOW, classes) is Level.LOW
    with pytest.raises(CannotKeep, match=r"Moments.*when the loop began"):
        pack({"kept": Moments(1, 2)}, classes)


FORGED = [
    '{"$is": "os.system", "of": "ls", "with": null}', '{"$is": "int", "of": null, "with": "zz"}',
    '{"$is": "torch", "of": null, "with": "torch.load"}',
    '{"$is": "torch.device", "of": null, "with": "nothing:x"}',
    '{"$is": "defaultdict", "of": {"$dict": []}, "with": "eval"}',
    '{"$is": "deque", "of": 3, "with": null}', '{"$is": "set", "of": [[1]], "with": null}',
    '{"$is": "bytes", "of": null, "with": "%%%"}',
    '{"$is": "range", "of": null, "with": [1, 2, 0]}',
    '{"$is": "complex", "of": null, "with": ["a", 1]}',
    '{"$is": "numpy", "of": 1, "with": {"$dict": [["dtype", "O"], ["shape", []]]}}',
    '{"$is": "Tensor", "of": 7, "with": {"$dict": []}}', '{"$same": 3, "of": [1]}',
    '{"$same": -1, "of": []}', '{"$is": "named tuple", "of": 5, "with": "os.stat_result"}',
    '{"$is": "enum", "of": null, "with": [1]}', '{"$is": "OrderedDict", "of": 4, "with": 5}',
    '{"$dict": [[{"$is": "set", "of": [], "with": null}, 1]]}']


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_form_is_refused_before_anything_is_loaded(forged: str) -> None:
    """With one error, and nothing is imported or called by a name from the store."""
    header = f'{{"format": 1, "tensors": [], "values": {{"$dict": [["kept", {forged}]]}}}}'
    with pytest.raises(LayoutError):
        outline(header.encode())


class Numbers(torch.optim.SGD):
    """Keeps numpy's numbers and other types of parameters, from its first step on."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p]
                kept["norm"] = numpy.float32(kept.get("norm", numpy.float32(0)) + 1)
                kept.setdefault("seen", collections.deque(maxlen=2)).append(kept["norm"])
                kept.setdefault("counts", collections.Counter())["steps"] += 1
                p.data.add_(0.001 * float(kept["norm"]))
        return super().step(closure)


def test_numpys_numbers_in_an_optimizer_are_kept_when_a_run_is_resumed(tmp_path: Path) -> None:
    """With the types that they had, in its groups too: the weights are those of a run without a
    break."""
    def numbers(model: torch.nn.Module) -> torch.optim.Optimizer:
        return Numbers([{"params": model.parameters(), "scales": numpy.ones(3)}],
                       lr=numpy.float32(0.1))

    straight = trained(model := built(), numbers(model))
    trained(model := built(), numbers(model), until="3 steps", run_dir=tmp_path / "run")
    model = built()
    optimizer = numbers(model)
    resumed = trained(model, optimizer, run_dir=tmp_path / "run")
    assert resumed.weights_sha256 == straight.weights_sha256
    assert type(optimizer.param_groups[0]["lr"]) is type(numpy.float32(0.1) * 1.0)
    assert optimizer.param_groups[0]["scales"].tolist() == [1, 1, 1]
    for kept in optimizer.state.values():
        assert type(kept["norm"]) is numpy.float32
        assert type(kept["counts"]) is collections.Counter
        assert kept["seen"].maxlen == 2 and len(kept["seen"]) == 2


class WithTensor(torch.nn.Module):
    """A model that has a tensor of any type beside its weights."""

    def __init__(self, tensor: torch.Tensor, is_buffer: bool):
        super().__init__()
        self.inner = built()
        if is_buffer:
            self.register_buffer("other", tensor)
        else:
            self.other = torch.nn.Parameter(tensor, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found


def zeros(dtype: torch.dtype) -> torch.Tensor:
    if "q" in str(dtype).removeprefix("torch."):  # quantized: zeros cannot be viewed as these
        return torch.empty(2, dtype=dtype)
    return torch.zeros(64, dtype=torch.uint8).view(dtype)


OF_MODELS = {
    **{str(dtype).removeprefix("torch."): functools.partial(zeros, dtype)
       for dtype in DTYPES if not dtype.is_complex},
    "quantized": quantized, "on meta": lambda: torch.empty(2, device="meta"),
    "masked": lambda: torch.masked.masked_tensor(torch.ones(2), torch.ones(2) > 0),
    "of a subclass": lambda: torch.ones(2).as_subclass(OfTensor),
    "sparse": lambda: torch.eye(2).to_sparse_csc(),
    "channels_last": lambda: torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_buffer", [True, False])
@pytest.mark.parametrize("kind", OF_MODELS)
def test_a_tensor_of_a_model_is_trained_with_or_refused_by_name_when_the_loop_begins(
        kind: str, is_buffer: bool) -> None:
    """Of each type that torch has a name for: there is no fault of the process, and no error of
    torch's in the first step."""
    begun = []

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        begun.append(1)
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    try:
        model = WithTensor(OF_MODELS[kind](), is_buffer)
    except (RuntimeError, TypeError, NotImplementedError):
        return  # torch itself has no such model
    try:
        trained(model, torch.optim.SGD(model.inner.parameters(), 0.1), loss=loss, until="1 step")
    except ConfigError as error:
        assert not begun and "other" in str(error)
    assert begun or kind not in ("float32", "int64", "bool", "bfloat16", "channels_last")


def test_the_sets_of_two_processes_have_the_same_bytes() -> None:
    """Whatever the order in which they were filled."""
    first, second = set(map(str, range(50))), set(map(str, reversed(range(50))))
    assert pack(first).header == pack(second).header


def test_sgd_is_plain() -> None:
    """The header of a state without special values is what earlier versions read."""
    model = built()
    assert b"$is" not in pack(sgd(model).state_dict()).header
