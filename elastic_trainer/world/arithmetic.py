"""Whether two workers compute the same bits: what each found out about itself before it stood
ready.

warm-up (probe.py) → here → membership (refuses or warns), world (mixed or not), checkpoint (what
wrote it)

What always holds:
1. Two gradients are compared only where their inputs (weights as built, first samples) are the same
   and each worker computed the same gradient twice. So a model that is built without a seed, or a
   loss that draws numbers of its own, is no sign of another processor. The fixed program of
   probe.py is always compared.
2. A difference between the descriptions alone (another CPU model with the same bits) is none.

What it does not do: import torch. The driver compares, and does not need it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Arithmetic:
    """How one worker computes."""

    program: int
    """A checksum of what a fixed program of torch returns there."""
    inputs: int
    """A checksum of the weights as built and of the first samples."""
    result: int
    """A checksum of the loss and the gradient for them; 0 if that worker computed two different
    ones."""
    facts: tuple[tuple[str, str], ...] = ()
    """Names of processor, torch and so on, for people."""
    is_exact: bool = True
    """The run promises the same bits for every world."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "program": self.program, "inputs": self.inputs, "result": self.result,
            "facts": dict(self.facts), "is_exact": self.is_exact
        }

    @staticmethod
    def from_dict(words: Mapping[str, Any] | None) -> Arithmetic | None:
        """Read JSON values; None where there are none."""
        if not words:
            return None
        facts = tuple(sorted((str(name), str(fact)) for name, fact in words["facts"].items()))
        return Arithmetic(int(words["program"]), int(words["inputs"]), int(words["result"]), facts,
                          bool(words["is_exact"]))


def computes_otherwise(one: Arithmetic, other: Arithmetic) -> bool:
    """True if the same inputs have given two workers other bits."""
    is_comparable = one.inputs == other.inputs and bool(one.result) and bool(other.result)
    return one.program != other.program or (is_comparable and one.result != other.result)


def facts_that_differ(one: Arithmetic, other: Arithmetic) -> dict[str, tuple[str, str]]:
    """Return in which facts two workers differ: name → (the one's, the other's)."""
    mine, theirs = dict(one.facts), dict(other.facts)
    return {
        name: (mine.get(name, ""), theirs.get(name, ""))
        for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)
    }


def most_common(all_of_them: Sequence[Arithmetic]) -> int:
    """Return the number of the first worker that computes as most others do."""
    kinds = [
        next(n for n, one in enumerate(all_of_them) if not computes_otherwise(one, mine))
        for mine in all_of_them
    ]
    return Counter(kinds).most_common(1)[0][0]


def advice(is_refused: bool, differ: Mapping[str, Any]) -> str:
    """Say to a person what a difference means, and how to go on."""
    why = (
        "Where torch, BLAS or the thread count differ, install the same; other processors need a "
        "list of hosts of one "
        "kind." if differ else
        "Processor, torch, BLAS and thread count have the same names, so look for code that "
        "computes something else on each worker (a host's name, an order of a set), or for a "
        "damaged processor."
    )
    if is_refused:
        return f"{why} To train on both kinds, without the promise of the same bits: --mixed-hardware warn."
    return f"{why} The weights now depend on which worker computes which shard."
