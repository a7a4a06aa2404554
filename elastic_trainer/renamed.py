"""The names that version 0.1 used: old event logs and checkpoints are read by them, nothing else.

event log → here → events/schema.py        record of a checkpoint → here → state/checkpoint.py

A name that is given today raises an error with the new name (`remedy`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIELDS = {"shards": "microbatches", "shard": "microbatch", "shard_s": "microbatch_s",
          "min_shard_samples": "min_microbatch_samples"}
"""Fields of events, facts of a job and options: the old name → the present one."""


def present(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts under their present names."""
    return {FIELDS.get(name, name): value for name, value in facts.items()}
