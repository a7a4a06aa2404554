"""Checkpoints: a copy of the live state at the end of a step, written behind the training, published last.

ElasticState → snapshot (one copy into reused memory) → parts → manifest (the checkpoint exists) → restore

What always holds:
1. A checkpoint exists when its manifest does, and the manifest is put after all of its parts are durable.
2. Parts have names that nobody else ever writes (a random word for each writing), so a writer that died half-way
   leaves rubbish, never a wrong checkpoint.
3. Every part has a SHA-256 in the manifest; `restore` reads the newest checkpoint whose parts are all whole, and says
   which ones it passed over.
4. At most one writing is in flight; a failed one is said and never ends the training.
5. The newest KEEP_LAST checkpoints stay.

What it does not do yet: S3, writing by all workers, fencing of an older attempt (DESIGN.md, "Who survives everybody").
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from state.elastic_state import ElasticState
from state.layout import LayoutError, byte_view, decode
from state.store import FolderStore, StoreUnavailable

PART_BYTES = 64 << 20
KEEP_LAST = 3
MANIFESTS = "manifests"


class Checkpoints:
    """The checkpoints of one run in one store."""

    def __init__(self, store: FolderStore, emit: Callable[..., None]):
        self.store, self.emit = store, emit
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._writer: threading.Thread | None = None
        self.newest_step = -1

    def write(self, state: ElasticState, *, wait: bool = False) -> bool:
        """Copy the state (the only pause) and write it behind the training. False: one is still being written."""
        if self._writer and self._writer.is_alive():
            if not wait:
                return False
            self._writer.join()
        packed, step = state.packed(), state.committed
        if self._memory.numel() != packed.payload_bytes:
            self._memory = torch.empty(packed.payload_bytes, dtype=torch.uint8)
        at = 0
        for tensor in packed.tensors:  # the pause: one copy of the state into memory that is reused
            size = tensor.numel() * tensor.element_size()
            if size:
                self._memory[at : at + size].copy_(byte_view(tensor))
            at += size
        self._writer = threading.Thread(target=self._publish, args=(step, packed.header), name="checkpoint", daemon=True)
        self._writer.start()
        if wait:
            self._writer.join()
        return True

    def is_published(self, step: int) -> bool:
        """True if there is a checkpoint of this step."""
        return step in self._steps()

    def finish(self) -> None:
        """Wait until the writing in flight, if any, is over."""
        if self._writer:
            self._writer.join()

    def _publish(self, step: int, header: bytes) -> None:
        started, word = time.monotonic(), secrets.token_hex(8)
        try:
            bytes_ = self._memory.numpy().data
            parts = []
            for number, start in enumerate(range(0, len(bytes_), PART_BYTES)):
                piece = bytes_[start : start + PART_BYTES]
                name = f"parts/{step:012d}-{word}/{number:05d}.bin"
                self.store.put_if_absent(name, [piece])
                parts.append({"name": name, "bytes": len(piece), "sha256": hashlib.sha256(piece).hexdigest()})
            manifest = {"step": step, "header": header.decode(), "parts": parts,
                        "header_sha256": hashlib.sha256(header).hexdigest()}
            # An older attempt may have published this step; then that one stands and ours is rubbish.
            if self.store.put_if_absent(f"{MANIFESTS}/{step:012d}.json", [json.dumps(manifest).encode()]):
                self.emit("state.checkpoint_published", step=step, bytes=len(bytes_),
                          duration_s=round(time.monotonic() - started, 4))
            self.newest_step = max(self.newest_step, step)
            self._prune()
        except (StoreUnavailable, OSError) as error:
            self.emit("state.checkpoint_failed", step=step, error=str(error))

    def _steps(self) -> list[int]:
        return [int(name.rpartition("/")[2].removesuffix(".json")) for name in self.store.list(MANIFESTS)]

    def _prune(self) -> None:
        """Remove all but the newest: the manifest first, so that no manifest ever names a part that is gone."""
        kept = sorted(self._steps())[-KEEP_LAST:]
        for step in self._steps():
            if step not in kept:
                self.store.delete(f"{MANIFESTS}/{step:012d}.json")
        for name in self.store.list("parts"):
            step = int(name.split("/")[1].partition("-")[0])
            if step not in kept and step < kept[-1]:
                self.store.delete(name)

    def restore(self, state: ElasticState) -> int | None:
        """Load the newest whole checkpoint into the state; returns its step, or None when there is none.

        Raises LayoutError when there are checkpoints but none can be used: that is never a reason to start afresh.
        """
        steps = sorted(self._steps(), reverse=True)
        refusals = []
        for step in steps:
            try:
                state.load(self._read(step))
            except (LayoutError, StoreUnavailable, FileNotFoundError) as error:
                self.emit("state.checkpoint_refused", step=step, error=str(error))
                refusals.append(f"step {step}: {error}")
                continue
            self.emit("state.checkpoint_restored", step=step)
            self.newest_step = step
            return step
        if refusals:
            raise LayoutError(f"none of the {len(steps)} checkpoints in {self.store.root} can be restored "
                              f"({'; '.join(refusals)}). Restore the job as it was, or give the run another name (--run).")
        return None

    def _read(self, step: int) -> Any:
        try:
            manifest = json.loads(self.store.get(f"{MANIFESTS}/{step:012d}.json"))
            header = manifest["header"].encode()
            if hashlib.sha256(header).hexdigest() != manifest["header_sha256"]:
                raise LayoutError(f"the manifest of step {step} has a header that was changed")
            payload = bytearray()
            for part in manifest["parts"]:
                piece = self.store.get(part["name"])
                if hashlib.sha256(piece).hexdigest() != part["sha256"]:
                    raise LayoutError(f"{part['name']} has other bytes than were written")
                payload += piece
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, LayoutError):
                raise
            raise LayoutError(f"the manifest of step {step} is not one of ours: {error!r}") from error
        return decode(header, torch.frombuffer(payload, dtype=torch.uint8) if payload else
                      torch.empty(0, dtype=torch.uint8))
