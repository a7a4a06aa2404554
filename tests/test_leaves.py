"""Two processes compare samples by digests: what differs in a sample is found and named."""

from __future__ import annotations

import datetime
import random
from collections import deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

from elastic_trainer.config import ConfigError
from elastic_trainer.data.leaves import drawn_twice, leaves
from elastic_trainer.wire.proof import Leaf, Proof, differences
from elastic_trainer.world.replicas import fingerprint

Pair = namedtuple("Pair", "left right")


@dataclass
class Item:
    x: Any
    y: int = 0


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any):
        self.x = x


class Own:
    def __init__(self, x: Any):
        self.x = x


def image(value: int) -> Any:
    pillow = pytest.importorskip("PIL.Image")
    return pillow.fromarray(numpy.full((2, 2), value, numpy.uint8))


def paletted(value: int) -> Any:
    made = pytest.importorskip("PIL.Image").new("P", (2, 2))
    made.putpalette([0, 0, 0, 0, 0, value] + [0] * 762)
    return made


RANGE = torch.arange(6.0)
CHANGED: dict[str, tuple[Callable[[int], Any], str]] = {
    "tensor": (lambda one: RANGE.index_fill(0, torch.tensor([4]), one), ", position 4 has"),
    "tensor of 2": (lambda one: RANGE.index_fill(0, torch.tensor([4]), one).view(2, 3),
                    r", position (1, 1) has"),
    "bfloat16": (lambda one: torch.full((3,), one, dtype=torch.bfloat16), ", position 0 has"),
    "float8": (lambda one: torch.full((3,), one).to(torch.float8_e4m3fn), ", position 0 has"),
    "complex": (lambda one: torch.tensor([0j, one * 1j]), ", position 1 has"),
    "bool": (lambda one: torch.tensor([True, one > 1]), ", position 1 has"),
    "sparse": (lambda one: torch.tensor([0.0, one]).to_sparse(), ", field `values`, position 0"),
    "nested": (lambda one: torch.nested.nested_tensor([RANGE, torch.full((2,), float(one))]),
               ", field `values`, position 6 has"),
    "jagged": (lambda one: torch.nested.nested_tensor(
        [RANGE, torch.full((2,), float(one))], layout=torch.jagged),
               ", field `values`, position 6"),
    "sizes of a nested one": (lambda one: torch.nested.nested_tensor(
        [torch.ones(one), torch.ones(4 - one)]), ", field `sizes`, position (0, 0) has"),
    "compressed": (lambda one: torch.tensor([[0.0, one]]).to_sparse_csr(),
                   ", field `dense`, position (0, 1)"),
    "masked array": (lambda one: numpy.ma.masked_array([1.0, 2.0], [False, one > 1]),
                     ", field `mask`, position 1 has"),
    "palette": (lambda one: paletted(one), ", field `palette`, position 5 has"),
    "array without bytes": (lambda one: numpy.zeros(one, "V0"),
                            " is |V0 (1,) in the run, and |V0 (2,) here"),
    "view": (lambda one: torch.full((4, 4), one)[::2, 1], ", position 0 has"),
    "scalar": (lambda one: torch.tensor(one), " has another value"),
    "array": (lambda one: numpy.array([1, 2, one]), ", position 2 has"),
    "array of texts": (lambda one: numpy.array(["a", f"b{one}"]), ", position 1 has"),
    "array of objects": (lambda one: numpy.array([None, {"a": one}]), ", field `1.a` has"),
    "image": (image, ", position (0, 0) has"),
    "text": (lambda one: f"ab{one}", ", position 2 has"),
    "bytes": (lambda one: bytes([0, 0, one]), ", position 2 has"),
    "number": (lambda one: one, " has another value"),
    "tokens": (lambda one: {"input_ids": [5, 6, 7, 8, one]}, ", field `input_ids`, position 4"),
    "texts": (lambda one: ["a", f"{one}"], ", position 1 has"),
    "dict": (lambda one: {"a": {"b": torch.tensor([one])}}, ", field `a.b`, position 0"),
    "tuple": (lambda one: (RANGE, one), ", field `1` has"),
    "named tuple": (lambda one: Pair(0, one), ", field `right` has"),
    "deque": (lambda one: deque([None, one]), ", field `1` has"),
    "set": (lambda one: {"a", f"{one}"}, " has another value"),
    "dataclass": (lambda one: Item(RANGE, one), ", field `y` has"),
    "object": (lambda one: Own([one]), ", field `x`, position 0 has"),
    "slots": (lambda one: Slotted(one), ", field `x` has"),
    "date": (lambda one: datetime.date(2026, 1, one), " has another value"),
    "length": (lambda one: [0] * one, " is list of int (1,) in the run, and list of int (2,) here"),
    "type": (lambda one: torch.zeros(2, dtype=[torch.int32, torch.int64][one - 1]),
             " is int32 (2,) in the run, and int64 (2,) here"),
    "field": (lambda one: {"a": 0, **({"b": 0} if one > 1 else {})}, ", field `b` is only here"),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_what_differs_in_a_sample_is_named_whatever_the_sample_is(kind: str) -> None:
    """Equal samples are equal in every process, also as JSON; others differ in a field and a
    position."""
    make, named = CHANGED[kind]
    runs = Proof(length=9, samples={"731": leaves(make(1))})
    assert not differences(Proof(length=9, samples={"731": leaves(make(1))}), runs)
    mine = Proof.from_dict(Proof(length=9, samples={"731": leaves(make(2))}).to_dict())
    assert mine
    assert [one.text for one in differences(mine, runs)][0].startswith(f"sample 731{named}")


@pytest.mark.parametrize("kind", ["nested", "jagged", "sizes of a nested one", "compressed",
                                  "sparse", "masked array"])
def test_a_batch_has_a_checksum_of_what_its_tensors_are_made_of(kind: str) -> None:
    make, _ = CHANGED[kind]
    assert fingerprint([make(1)]) == fingerprint([make(1)]) != fingerprint([make(2)])


def test_a_value_that_cannot_be_read_is_the_users_error() -> None:
    meta = {"x": [torch.ones(2), torch.ones(2, device="meta")]}
    assert fingerprint(meta)
    with pytest.raises(ConfigError, match=r"the field `x.1` of .* on the device meta"):
        leaves(meta)


def test_a_position_of_many_elements_is_a_range_and_a_huge_sample_costs_little() -> None:
    """A mark stands for a block then; and no sample has more names or marks than are sent."""
    one, other = torch.zeros(3, 224, 224), torch.zeros(3, 224, 224)
    other[1, 2, 3] = 1
    runs, mine = (Proof(length=9, samples={"5": leaves(value)}) for value in (one, other))
    [found] = differences(mine, runs)
    assert found.text == "sample 5, positions (1, 1, 168) to (1, 2, 90) has another value"
    wide = {f"f{number}": number for number in range(100_000)}
    assert len(leaves(wide)) == 65
    assert sum(len(leaf.marks) for leaf in leaves([torch.zeros(5000)] * 40).values()) <= 4096


def test_a_value_is_random_by_intent_when_it_differs_between_two_draws() -> None:
    """Drawn with one seed, in one process: only the default generators repeat."""
    class Noisy(torch.utils.data.Dataset[Any]):
        own = numpy.random.default_rng()

        def __getitem__(self, number: int) -> dict[str, Any]:
            return {"own": self.own.random(), "seeded": random.random(), "number": number}

    found = drawn_twice(Noisy(), 3, lambda: random.seed(1))
    assert [path for path, leaf in found.items() if leaf is None] == ["own"]


def test_floats_are_not_compared_between_machines_that_compute_other_bits() -> None:
    """The same transform may give both; whole numbers and shapes are compared."""
    def proof(value: float, label: int, machine: int) -> Proof:
        return Proof(length=9, machine=machine,
                     samples={"1": leaves({"x": torch.tensor([value]), "label": label})})

    assert differences(proof(1.5, 0, 1), proof(1.0, 0, 1))
    assert not differences(proof(1.5, 0, 2), proof(1.0, 0, 1))
    assert differences(proof(1.0, 1, 2), proof(1.0, 0, 1))


def test_a_proof_that_is_none_is_no_proof() -> None:
    """What a worker sends is checked: a malformed one is not compared, and ends no driver."""
    whole = Proof(length=9, samples={"1": {"x": Leaf("int", (2, 0), "a", "AAAA")}}).to_dict()
    assert Proof.from_dict(whole)
    for name, value in (("samples", 3), ("samples", {"1": {"x": ["int"]}}), ("length", None),
                        ("batch", []), ("numbers", 5), ("modules", "x"), ("machine", "x"),
                        ("samples", {"1": {"x": ["int", [float("inf")], "", ""]}})):
        assert Proof.from_dict(whole | {name: value}) is None
    assert Proof.from_dict(None) is None and Proof.from_dict([]) is None
