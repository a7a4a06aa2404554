"""The proof that a worker has the run's dataset and program, and what two proofs differ in.

worker (training/checks/proving.py) → JSON → here → driver (a newcomer, the first workers), plain
horovodrun (reconcile), a resumed run (the proof in its checkpoint)

What always holds:
1. A proof has digests and names, and no value of a sample. Of a field it has a mark of 12 bits for
   each element, or for each block of elements if there are more than 1,024.
2. A field that one of two workers has found to be random is not compared.
3. Fields of floating point are not compared between machines that compute other bits: the same
   transform may give both results. arithmetic.py compares those machines.
4. The weights are no part of it: a newcomer receives the world's.

What it does not do: prove the samples that were not drawn. A dataset of files proves all of them by
its index.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from elastic_trainer.wire.heartbeat import form_of

PARTS = {
    "length": "the number of samples",
    "index": "the index of its files",
    "samples": "samples, after the dataset's transforms",
    "batch": "the batch that collate makes of the first micro-batch",
    "tensors": "names, order, shapes and types of parameters and buffers",
    "modules": "classes of modules, and their plain attributes",
    "optimizer": "class, options and parameter groups of the optimizer",
    "options": "options of the trainer",
}
"""The parts of a proof. --allow-change takes their names, without the first one."""
NOUNS = {"tensors": "tensor", "modules": "module", "options": "option"}
AMONG_WORKERS = ("options",)
"""The parts that a resumed run compares by itself (settings.py)."""
MOST_NAMED = 3
"""A message names this number of differences, and counts the others."""
MARK = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
"""A mark is two of these characters."""
FLOATS = ("float", "bfloat", "complex", "list of float", "list of complex")
ALONE = " (without our launcher: ELASTIC_TRAINER_ALLOW_CHANGE=PART,PART)"
SORTED = ("The usual causes are random_split or a shuffle above the seed, the order of a set or of "
          "os.listdir (sort it), and another version of the data, of the tokenizer or of the code.")


class Leaf(NamedTuple):
    """A value in a sample: a tensor, an array, a text, a number."""

    kind: str
    shape: tuple[int, ...]
    digest: str
    marks: str = ""
    """Two characters for each block of elements; "": the value has one element."""

    def position(self, block: int) -> str:
        """Name the elements of a block: "position 4", "positions (0, 4) to (0, 7)"."""
        if 0 in self.shape:
            return "it"
        size = -(-math.prod(self.shape) // max(1, len(self.marks) // 2))
        first, last = block * size, min((block + 1) * size, math.prod(self.shape)) - 1
        if first == last:
            return f"position {_place(first, self.shape)}"
        return f"positions {_place(first, self.shape)} to {_place(last, self.shape)}"


Values = Mapping[str, Leaf | None]
"""The values of a sample by their paths; None: it is random by intent."""


class Difference(NamedTuple):
    """What two proofs differ in."""

    part: str
    text: str
    name: str = ""
    """The name of an option of the optimizer; "": it has none."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What a worker has, as its script has built it."""

    length: int
    index: str = ""
    """The SHA-256 of the indexes of files; "": the dataset has none."""
    samples: Mapping[str, Values] = field(default_factory=dict)
    batch: Values = field(default_factory=dict)
    numbers: tuple[int, ...] = ()
    """The samples of that batch, if they are few."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    optimizer: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, str] | None = None
    """The modules that a step calls and that are no part of the model; None: not looked at."""
    weights: int = 0
    """A checksum of the weights as built; 0: not known."""
    machine: int = 0
    """The checksum of what a fixed program of torch returns here (determinism.py)."""
    hash_seed: str = ""
    """PYTHONHASHSEED; "": it was not set, so sets of texts have another order in each process."""

    @property
    def random(self) -> list[str]:
        """The fields that are random by intent, by their paths."""
        found = {path for values in (*self.samples.values(), self.batch)
                 for path, leaf in values.items() if leaf is None}
        return sorted(found)

    @property
    def digest(self) -> str:
        """Two workers with one digest have the same dataset and program, as far as it is
        proved."""
        values = {name: value for name, value in self.to_dict().items()
                  if name not in ("weights", "machine", "hash_seed")}
        return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(),
                               digest_size=8).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        values: dict[str, Any] = json.loads(json.dumps(vars(self)))
        return values

    @staticmethod
    def from_dict(values: Any) -> Proof | None:
        """Read JSON values; None if they are no proof that this version can compare."""
        try:
            found: Proof = form_of(Proof).validate_python(values)
            return found
        except ValueError:
            return None


def _place(at: int, shape: tuple[int, ...]) -> str:
    places = []
    for size in reversed(shape):
        at, place = divmod(at, size)
        places.append(place)
    return str(places[0]) if len(places) == 1 else str(tuple(reversed(places)))


# --- what differs ---------------------------------------------------------------------------------

def differences(mine: Proof, runs: Proof, *, is_resumed: bool = False) -> list[Difference]:
    """Return what a worker has otherwise than the run. `is_resumed`: the run's proof is that of a
    checkpoint."""
    found = []
    if mine.length != runs.length:
        found.append(Difference("length", f"the dataset has {mine.length} samples, and "
                                          f"{runs.length} in the run"))
    if mine.index != runs.index:
        found.append(Difference("index", "the index of the dataset's files is another one than in "
                                         "the run"))
    if not found:  # else all of them may differ
        found += _of_samples(mine, runs)
    for part in ("tensors", "modules", "optimizer", *(() if is_resumed else AMONG_WORKERS)):
        found += _of_tables(part, getattr(mine, part), getattr(runs, part))
    if mine.beside is not None and runs.beside is not None:
        found += _of_tables("modules", mine.beside, runs.beside)
    return found


def _of_samples(mine: Proof, runs: Proof) -> Iterator[Difference]:
    is_other_machine = mine.machine != runs.machine
    for number, values in mine.samples.items():
        for text in _of_values(values, runs.samples.get(number, {}), is_other_machine):
            yield Difference("samples", f"sample {number}{text}")
    # A loader seeds each sample of a batch. settings.py compares the option.
    if mine.options.get("loader") != runs.options.get("loader"):
        return
    of = f" (samples {', '.join(map(str, mine.numbers))})" if mine.numbers else ""
    for text in _of_values(mine.batch, runs.batch, is_other_machine):
        yield Difference("batch", f"the batch of the first micro-batch{of}{text}")


def _of_values(mine: Values, runs: Values, is_other_machine: bool) -> Iterator[str]:
    """Yield what differs in the values of a sample."""
    for path in [*runs, *(path for path in mine if path not in runs)]:
        name = f", field `{path}`" if path else ""
        if path not in mine or path not in runs:
            yield f"{name} is only {'here' if path in mine else 'in the run'}"
            continue
        ours, theirs = mine[path], runs[path]
        if ours is None or theirs is None or ours.digest == theirs.digest:
            continue
        if (ours.kind, ours.shape) != (theirs.kind, theirs.shape):
            yield f"{name} is {_form(theirs)} in the run, and {_form(ours)} here"
        elif not (is_other_machine and ours.kind.startswith(FLOATS)):
            yield f"{name}{_where(ours, theirs)}"


def _form(leaf: Leaf) -> str:
    return f"{leaf.kind} {leaf.shape}" if leaf.shape else leaf.kind


def _where(ours: Leaf, theirs: Leaf) -> str:
    pairs = zip(*(map("".join, zip(*[iter(leaf.marks)] * 2, strict=False))
                  for leaf in (ours, theirs)), strict=False)
    for block, (one, other) in enumerate(pairs):
        if one != other:
            return f", {ours.position(block)} has another value"
    return " has another value"


def _of_tables(part: str, mine: Mapping[str, str], runs: Mapping[str, str]
               ) -> Iterator[Difference]:
    """Yield what differs in a table: its entries, or their order."""
    noun = NOUNS.get(part, "")
    for name in [*runs, *(name for name in mine if name not in runs)]:
        one, other = mine.get(name), runs.get(name)
        named = f"{noun} `{name}`" if noun else name
        if one is None or other is None:
            yield Difference(part, f"{named} ({one or other}) is only "
                                   f"{'here' if other is None else 'in the run'}", name)
        elif one != other:
            yield Difference(part, f"{named} is {other} in the run, and {one} here", name)
    if list(mine) != list(runs) and mine.keys() == runs.keys():
        number, one, other = next((n, *pair) for n, pair in enumerate(zip(mine, runs, strict=True))
                                  if pair[0] != pair[1])
        yield Difference(part, f"number {number} of the {part} is `{other}` in the run, and "
                               f"`{one}` here")


def refused(found: Collection[Difference], allowed: Collection[str]) -> list[Difference]:
    """Return the differences that the user does not allow: by their part, or by the last name of
    an option of the optimizer."""
    names = {key.rpartition(".")[2] for key in allowed}
    return [one for one in found if one.part == "length" or not (
        one.part in allowed
        or (one.part == "optimizer" and one.name.rpartition(".")[2] in names))]


def sentence(found: Collection[Difference]) -> str:
    """Return differences as one sentence, the first of each part first."""
    firsts = {one.part: one for one in reversed(list(found))}
    ordered = [*(one for one in found if one is firsts[one.part]),
               *(one for one in found if one is not firsts[one.part])]
    more = len(ordered) - MOST_NAMED
    return "; ".join(one.text for one in ordered[:MOST_NAMED]) + (f"; and {more} more"
                                                                 if more > 0 else "")


def remedy(found: Collection[Difference], mine: Proof, runs: Proof) -> str:
    """Return what a person can do about differences."""
    data = any(one.part in ("length", "index", "samples", "batch") for one in found)
    hashes = ""
    if data and (mine.hash_seed != runs.hash_seed or not mine.hash_seed):
        here, there = (one.hash_seed or "not set" for one in (mine, runs))
        hashes = (f" PYTHONHASHSEED is {here} here and {there} in the run: set one value for all, "
                  f"or sort what comes out of a set.")
    parts = [part for part in dict.fromkeys(one.part for one in found) if part != "length"]
    allow = " ".join(f"--allow-change {part}" for part in parts)
    return (f"{SORTED if data else 'Build the same model and optimizer on all workers.'}{hashes}"
            f"{f' To go on all the same: {allow}{ALONE}.' if allow else ''}")
