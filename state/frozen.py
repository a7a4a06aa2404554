"""Frozen content: tensors that the training does not change, and that each host builds itself.

model as the script builds it → here (warm-up) → transfer and checkpoint, which carry the rest

A base model under adapters (LoRA) is such content: gigabytes, beside megabytes that are trained.

What always holds:
1. A tensor is frozen content of the run (`run`) from the first transfer in which another process
   has built it with the same bytes. So a script builds it again. One that comes out otherwise in
   each process, as random weights without a seed do, is carried as all others are.
2. It stays so while no worker sees other bytes. Before a transfer and before a checkpoint each
   worker looks at its share, all are told, and what has changed is carried from there on.
3. A worker that has built other bytes receives those of the run, as `carried`. A checkpoint names
   the SHA-256 of what it does not hold. A job that has built something else cannot load it.

What it does not do: look at tensors of less than LEAST bytes, or at parameters that require a
gradient. They are carried.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from elastic_trainer.state.values.forms import plain_tensor, storage_refusal
from elastic_trainer.state.values.layout import LayoutError, byte_view, flat_bytes

LEAST = 1 << 16
"""In bytes. Smaller tensors would cost more, as names and digests, than they take."""
ROW = 8192
"""In words of 8 bytes. The sums of rows and those of columns are compared: of two words that change
places, at least one of these is another."""


@dataclass(frozen=True)
class Proof:
    """Of the bytes of a tensor."""

    sha256: str
    sums: str
    """Of them, for a quick look: computed where the tensor lies."""


class FrozenContent:
    """What a worker has built itself, and what of it is frozen content of the run."""

    def __init__(self, carries_all: bool = False):
        self.carries_all = carries_all
        """Transfers and checkpoints hold all: another attempt may not be able to build it."""
        self.run: dict[str, str] = {}
        """Name → SHA-256. All workers with the state have the same."""
        self.carried: set[str] = set()
        """What the next transfer has to carry all the same: a newcomer lacks it."""
        self.changed: set[str] = set()
        """What is not as it was built, as far as this worker knows."""
        self._built: dict[str, Proof] = {}
        self._is_as_built = True
        """Nothing has come since."""

    def prove(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take what the script has built. It costs 0.5 s for 1 GB."""
        self._built = {name: Proof(hashlib.sha256(byte_view(tensor).numpy().data).hexdigest(),
                                   _sums(tensor))
                       for name, tensor in tensors.items() if _may_stay(tensor)}

    def is_possible(self) -> bool:
        """True if the script has built anything that may be frozen content: on all workers, or on
        none."""
        return bool(self._built)

    def absent(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """Return the names of those tensors that are not carried."""
        if self.carries_all:
            return set()
        return {name for name in self.run.keys() - self.carried
                if name in tensors and not tensors[name].requires_grad}

    # --- all workers together ---------------------------------------------------------------------

    def report(self, tensors: Mapping[str, torch.Tensor], rank: int, size: int) -> str:
        """Look at this worker's share of the tensors; return what all have to know, as JSON."""
        self._look(tensors, {name for name in self._built
                             if zlib.crc32(name.encode()) % size == rank})
        return json.dumps({"built": self._as_built(), "run": self.run,
                           "changed": sorted(self.changed)})

    def built(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Return what a worker without the state has built, as JSON."""
        if not self._is_as_built:  # it had the state once
            self._look(tensors, self._built.keys())
        return json.dumps({"built": self._as_built()})

    def _look(self, tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
        self.changed.update([name for name in names if name not in self.changed
                             and _sums(tensors[name]) != self._built[name].sums])

    def _as_built(self) -> dict[str, str]:
        return {name: proof.sha256 for name, proof in sorted(self._built.items())
                if name not in self.changed}

    def agree(self, holders: Iterable[str], takers: Iterable[str] = ()) -> None:
        """Take what workers with the state (`report`), and those without it (`built`), have said.
        Afterwards all that have the state know the same."""
        self._is_as_built = False
        reports = [json.loads(text) for text in holders]
        newcomers = [json.loads(text)["built"] for text in takers]
        for one in reports:
            self.changed.update(one["changed"])
        run: dict[str, str] = reports[0]["run"]
        if newcomers and not self.carries_all:
            run = run | {name: digest for name, digest in reports[0]["built"].items()
                         if all(theirs.get(name) == digest for theirs in newcomers)}
        self.run = {name: run[name] for name in sorted(run.keys() - self.changed)}
        self.carried = {name for name, digest in self.run.items()
                        if any(theirs.get(name) != digest for theirs in newcomers)}

    # --- values that are received -----------------------------------------------------------------

    def require(self, theirs: Mapping[str, str], given: Collection[str]) -> None:
        """Raise LayoutError unless this worker has built what values name and do not hold."""
        for name in sorted(theirs.keys() - set(given)):
            proof = self._built.get(name)
            if proof is None or proof.sha256 != theirs[name]:
                raise LayoutError(
                    f"the frozen weights {name} have the SHA-256 {theirs[name]} there, and "
                    f"{proof.sha256 if proof else 'other types or sizes'} in this script's model, "
                    f"and they are not in the checkpoint. Load the base model with which the run "
                    f"began, or begin another run (--run)")

    def load(self, theirs: Mapping[str, str], given: Mapping[str, torch.Tensor]) -> None:
        """Take what the run has. `given`: the tensors that came with their bytes."""
        self.run, self.carried, self._is_as_built = dict(theirs), set(), False
        for name in theirs.keys() & given.keys():
            self._built[name] = Proof(theirs[name], _sums(given[name]))


def _may_stay(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may be frozen content."""
    return (not tensor.requires_grad and tensor.numel() * tensor.element_size() >= LEAST
            and not storage_refusal(tensor))


def _sums(tensor: torch.Tensor) -> str:
    """Return a digest of sums of a tensor's bytes. It does not depend on where they lie."""
    data = flat_bytes(plain_tensor(tensor))
    whole = data.numel() // (8 * ROW) * 8 * ROW
    words = data[:whole]
    if words.storage_offset() % 8 or words.data_ptr() % 8:
        words = words.clone()
    table = words.view(torch.int64).view(-1, ROW)
    sums = torch.cat([table.sum(0), table.sum(1)]).cpu()
    rest = data[whole:].cpu()
    return hashlib.sha256(sums.numpy().tobytes() + rest.numpy().tobytes()).hexdigest()

