"""The names that version 0.1 used: old event logs and checkpoints are read by them, nothing else.

event log → here → events/schema.py        record of a checkpoint → here → state/checkpoint.py

An old name that is given today is an error that tells the new one (`remedy`; options.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIELDS = {"shards": "microbatches", "shard": "microbatch", "shard_s": "microbatch_s",
          "min_shard_samples": "min_microbatch_samples",
          "odd_worker": "outlier", "odd_rank": "outlier_rank"}
"""Fields of events, facts of a job and options: the old name → the present one."""
PHASES = {"behind": "after"}
"""Phases of a step, in a timeline."""


def present(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts under their present names."""
    return {FIELDS.get(name, name): value for name, value in facts.items()}


OPTIONS = {"epochs": ("until", "{} epochs"), "max_steps": ("until", "{} steps"),
           "schedule": ("lr", ""), "extras": ("state", ""),
           **{name: (FIELDS[name], "") for name in ("shards", "min_shard_samples")}}
"""Options of train() and Trainer: the old name → the present one, and the form of its value where
that is another one."""


def remedy(option: str, value: Any) -> str:
    """Return a sentence with the present name of an option; "" if the name is not an old one."""
    name, form = OPTIONS.get(option, ("", ""))
    example = f", e.g. {name}=\"{form.format(value)}\"" if form else ""
    return f" It is now called {name}: use {name}{example}." if name else ""


def present_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a checkpoint's record, with the present names of options."""
    found = {}
    for key, value in values.items():
        section, _, option = key.rpartition(".")
        name, form = OPTIONS.get(option, ("", "")) if section == "training" else ("", "")
        found[f"training.{name}" if name else key] = form.format(value) if form else value
    return found
