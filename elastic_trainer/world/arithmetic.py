"""How a worker computes, and whether two workers compute the same bits.

warm-up (determinism.py) → here → membership (refuses or warns), world (mixed or not), checkpoint

What always holds:
1. Two gradients are compared only if their inputs (weights as built, first samples) are the same
   and each worker computed the same gradient twice. So a model that is built without a seed, or a
   loss that draws random numbers of its own, does not count as another processor. The fixed program
   of determinism.py is always compared.
2. Workers whose descriptions differ (CPU model, library) and whose bits do not are equal.

What it does not do: import torch. The driver compares, and runs without torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_trainer.wire.proof import Proof


@dataclass(frozen=True)
class Arithmetic:
    """How one worker computes."""

    program: int
    """The checksum of what a fixed program of torch returns on this worker."""
    inputs: int
    """The checksum of the weights as built and of the first samples."""
    result: int
    """The checksum of the loss and the gradient for `inputs`; 0 if the worker computed them twice
    with two results."""
    facts: tuple[tuple[str, str], ...] = ()
    """Names of processor, torch and so on, for people."""
    is_exact: bool = True
    """The run promises the same bits for every world."""
    proof: Proof | None = field(default=None, compare=False)
    """That the worker has the run's dataset and program; None: it proves nothing. It is sent by
    itself."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"program": self.program, "inputs": self.inputs, "result": self.result,
                "facts": dict(self.facts), "is_exact": self.is_exact}

    @staticmethod
    def from_dict(values: Mapping[str, Any] | None) -> Arithmetic | None:
        """Read JSON values; None if there are none."""
        if not values:
            return None
        facts = tuple(sorted((str(name), str(fact)) for name, fact in values["facts"].items()))
        return Arithmetic(int(values["program"]), int(values["inputs"]), int(values["result"]),
                          facts, bool(values["is_exact"]))


def computes_otherwise(one: Arithmetic, other: Arithmetic) -> bool:
    """True if two workers computed different bits from the same inputs."""
    is_comparable = one.inputs == other.inputs and bool(one.result) and bool(other.result)
    return one.program != other.program or (is_comparable and one.result != other.result)


def facts_that_differ(one: Arithmetic, other: Arithmetic) -> dict[str, tuple[str, str]]:
    """Return the facts in which two workers differ: name → (fact of `one`, fact of `other`)."""
    mine, theirs = dict(one.facts), dict(other.facts)
    return {name: (mine.get(name, ""), theirs.get(name, ""))
            for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)}


def most_common(workers: Sequence[Arithmetic]) -> int:
    """Return the index of the first worker that computes as most others do."""
    kinds = [next(index for index, other in enumerate(workers)
                  if not computes_otherwise(other, worker))
             for worker in workers]
    return Counter(kinds).most_common(1)[0][0]


def advice(is_refused: bool, differ: Mapping[str, Any]) -> str:
    """Return what a difference means for the run, and what the user can do."""
    remedy = (
        "If torch, BLAS or the thread count differ, install the same on all hosts. If the "
        "processors differ, list hosts of one kind." if differ else
        "Processor, torch, BLAS and thread count have the same names. Look for code whose result "
        "depends on the worker (a host name, the order of a set), or for a damaged processor.")
    if is_refused:
        return (f"{remedy} To train on both kinds without the promise of the same bits, use "
                f"--mixed-hardware warn.")
    return f"{remedy} The weights now depend on which worker computes which micro-batch."
