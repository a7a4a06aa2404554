"""Frozen content: tensors that the training does not change, and that each host builds itself.

model as the script builds it → here → transfer and checkpoint, which carry the rest

A base model under adapters (LoRA) is such content: gigabytes, beside megabytes that are trained.

What always holds:
1. A digest is that of the bytes that a tensor has at this moment. A worker keeps one together with
   sums of the same bytes (`Proof`). It gives a digest only if the sums of the bytes now are equal.
2. A transfer leaves a tensor out only if all takers report the digest that the givers report. So
   what a worker loads is complete, whatever has changed where.
3. A checkpoint leaves a tensor out only if `carries` is "never", and if the process that looks at
   it reports a digest that two processes have built alike (`run`): a script builds it again. Random
   weights without a seed are carried.
4. What a checkpoint leaves out is compared again, by each worker that loads it. A worker with other
   bytes does not load: it receives the state of one that has them. If no worker has them, the
   restore ends with both digests. A process that has changed what it had built is such a worker,
   and under our launcher no process goes back: the next attempt has new ones, which build it again.
5. Nothing here asks another worker. Whether the workers gather their reports follows from the
   statuses of all members (`meet`), so it is the same on all members of a generation.

What it does not do: look at tensors of less than LEAST bytes, at parameters that require a
gradient, or at buffers that are not persistent (tables that each machine computes). They are
carried.

Why sums find each change: each 4-byte word has an odd 64-bit multiplier, drawn at random in each
process (multilinear hashing: Lemire and Kaser, "Strongly universal string hashing is fast", 2014).
A change of one word is always found. Another change of a block is missed with a probability of at
most 2^-32. 500 MB take 0.33 s of a core; SHA-256 takes 1.1 s.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import zlib
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import torch

from elastic_trainer.config import CARRIES
from elastic_trainer.state.device_copies import await_devices, devices_of
from elastic_trainer.state.values.forms import plain_tensor, storage_refusal
from elastic_trainer.state.values.layout import LayoutError, byte_view, flat_bytes

LEAST = 1 << 16
"""In bytes. Smaller tensors would cost more, as names and digests, than they take."""
BLOCK = 1 << 16
"""In words of 4 bytes. A product of one block fits a cache."""
HASHERS = 4
"""Threads that compute SHA-256 at a worker's start."""
Tensors = Mapping[str, torch.Tensor]


class OtherBase(LayoutError):
    """No worker of this world has the frozen content that a checkpoint leaves out."""


class Proof(NamedTuple):
    """Of the bytes of a tensor, when both were computed."""

    digest: str
    """The type, the shape and the SHA-256."""
    sums: str


class FrozenContent:
    """What of this worker's tensors is frozen content."""

    def __init__(self) -> None:
        self.carries: str = CARRIES[0]
        """A transfer that leaves content out loses nothing, because the givers have it. A
        checkpoint without it needs that a later process builds the same bytes."""
        self.run: dict[str, str] = {}
        """Name → digest of what two processes have built alike."""
        self.is_shared = False
        """In this generation the members gather their reports before a transfer."""
        self.leaves_out = False
        """In this generation checkpoints leave out, and the members gather their reports before
        one."""
        self._built: dict[str, str] = {}
        """The digests of what the script has built."""
        self._proofs: dict[str, Proof] = {}

    def prove(self, tensors: Tensors) -> None:
        """Take what the script has built. It costs 2.2 s of a core for 1 GB."""
        may_stay = {name: one for name, one in tensors.items() if _may_stay(one)}
        await_devices(devices_of(may_stay.values()))  # a thread reads on a stream of its own
        for device in {one.device for one in may_stay.values()}:
            _multipliers(device)  # `cache` would let each thread draw its own
        with ThreadPoolExecutor(min(HASHERS, os.cpu_count() or 1)) as hashers:
            proofs = hashers.map(proof_of, may_stay.values())
        self._proofs = dict(zip(may_stay, proofs, strict=True))
        self._built = {name: proof.digest for name, proof in self._proofs.items()}

    def status(self) -> int:
        """Return what all members have to know when a generation begins: 1 if this worker may have
        frozen content, and 2 more if its checkpoints leave that out."""
        may_have = bool(self._proofs or self.run) and self.carries != "always"
        return may_have + 2 * (self.carries == "never")

    def meet(self, statuses: Sequence[int]) -> None:
        """Take the status of all members of a generation."""
        self.is_shared = any(status & 1 for status in statuses)
        self.leaves_out = self.is_shared and all(status & 2 for status in statuses)

    def now(self, tensors: Tensors, part: int = 0, parts: int = 1) -> dict[str, str]:
        """Return the digests of the bytes of now, of one part of the tensors. What has changed
        since its proof is left out."""
        if self.carries == "always":
            return {}
        return {name: proof.digest for name, proof in self._proofs.items()
                if zlib.crc32(name.encode()) % parts == part and name in tensors
                and _may_stay(tensors[name]) and sums_of(tensors[name]) == proof.sums}

    # --- a transfer -------------------------------------------------------------------------------

    def report(self, tensors: Tensors, part: int = 0, parts: int = 1) -> str:
        """Return what all members have to know before a transfer, as JSON. Each giver looks at its
        part, a taker at all."""
        return json.dumps({"now": self.now(tensors, part, parts), "built": self._built,
                           "run": self.run, "carries": self.carries})

    def agree(self, texts: Sequence[str], takers: Collection[int]) -> dict[str, str]:
        """Take the reports of all members by rank; return what the transfer leaves out. All that
        have the state know the same afterwards."""
        reports = [json.loads(text) for text in texts]
        givers = [one for rank, one in enumerate(reports) if rank not in takers]
        held: dict[str, str] = {}
        for one in givers:
            held |= one["now"]
        self.run = {name: digest for name, digest in sorted(held.items())
                    if any(one["run"].get(name) == digest for one in givers)
                    or sum(one["built"].get(name) == digest for one in reports) > 1}
        if any(one["carries"] == "always" for one in reports):
            return {}
        return {name: digest for name, digest in self.run.items()
                if all(reports[taker]["now"].get(name) == digest for taker in takers)}

    # --- a checkpoint -----------------------------------------------------------------------------

    def kept(self, tensors: Tensors, part: int = 0, parts: int = 1) -> dict[str, str]:
        """Return what a checkpoint may leave out, of one part of the tensors."""
        if self.carries != "never":
            return {}
        return {name: digest for name, digest in self.now(tensors, part, parts).items()
                if self.run.get(name) == digest}

    def kept_by_all(self, texts: Sequence[str]) -> dict[str, str]:
        """Take `kept` of all members, as JSON; return what the checkpoint leaves out."""
        return dict(sorted((name, digest) for text in texts
                           for name, digest in json.loads(text).items()))

    def expected(self) -> dict[str, str]:
        """Return what the next checkpoint leaves out if nothing changes."""
        return self.run if self.leaves_out else {}

    # --- values that are received -----------------------------------------------------------------

    def lacking(self, absent: Mapping[str, str], tensors: Tensors) -> dict[str, str]:
        """Return what this worker lacks of what values leave out, with what it has now in its
        place. Costs: SHA-256 of what has no valid proof."""
        return {name: has for name, digest in absent.items()
                if (has := self._digest(name, tensors)) != digest}

    def _digest(self, name: str, tensors: Tensors) -> str:
        tensor = tensors.get(name)
        if tensor is None or storage_refusal(tensor):
            return "no such tensor"
        known = self._proofs.get(name)
        if known and known.sums == sums_of(tensor):
            return known.digest
        return proof_of(tensor).digest

    def load(self, theirs: Mapping[str, str], came: Collection[str], tensors: Tensors) -> None:
        """Take what the run has, after the values are loaded. `came`: the names of the tensors that
        came with their bytes. They have new proofs, of their own bytes."""
        self.run = dict(theirs)
        for name in self.run.keys() & came:
            known = self._proofs.get(name)
            if known is None or known.sums != sums_of(tensors[name]):
                self._proofs[name] = proof_of(tensors[name])


def differs(lacking: Mapping[str, str], absent: Mapping[str, str]) -> str:
    """Return the fact that a worker has other frozen content than values leave out."""
    name = min(lacking)
    others = f", and {len(lacking) - 1} more tensors differ" if len(lacking) > 1 else ""
    return (f"the frozen weights {name} are {absent[name]} there, and {lacking[name]} in this "
            f"script's model{others}, and the checkpoint leaves them out")


REMEDY = ("Load the base model with which the run began, or begin another run (--run). With "
          "carry_frozen=\"checkpoints\" later checkpoints hold the base, too")


def _may_stay(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may be frozen content."""
    if torch.nn.parameter.is_lazy(tensor) or tensor.requires_grad:
        return False
    return tensor.numel() * tensor.element_size() >= LEAST and not storage_refusal(tensor)


def proof_of(tensor: torch.Tensor) -> Proof:
    """Return the proof of the bytes that a tensor has now."""
    sha256 = hashlib.sha256(byte_view(tensor).numpy().data).hexdigest()
    return Proof(f"{_kind(tensor)} with the SHA-256 {sha256}", sums_of(tensor))


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.")


def sums_of(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's type, shape and bytes for this process, computed where they
    lie."""
    data = flat_bytes(plain_tensor(tensor))
    whole = data.numel() // (4 * BLOCK) * 4 * BLOCK
    words = data[:whole]
    if words.storage_offset() % 4 or words.data_ptr() % 4:
        words = words.clone()
    multipliers = _multipliers(data.device)
    product, sums = torch.empty_like(multipliers), []
    for block in words.view(torch.int32).view(-1, BLOCK):
        torch.mul(block, multipliers, out=product)
        sums.append(product.sum())
    summed = torch.stack(sums).cpu().numpy().tobytes() if sums else b""
    rest = data[whole:].cpu().numpy().tobytes()
    return hashlib.sha256(_kind(tensor).encode() + summed + rest).hexdigest()


@cache
def _multipliers(device: torch.device) -> torch.Tensor:
    """Return odd random numbers, other ones in each process and for each device."""
    numbers = torch.frombuffer(bytearray(secrets.token_bytes(8 * BLOCK)), dtype=torch.int64)
    return (numbers | 1).to(device)
