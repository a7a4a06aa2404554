"""The names that version 0.1 used: old event logs and checkpoints are read by them, nothing else.

event log → here → events/schema.py        record → here → state/checkpoints/checkpoint.py

An old name that is given today is an error that tells the new one (`remedy`; options.py), and so
is one of torch's DataLoader.
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


OF_DATA_LOADER = {
    "batch_size": "global_batch: the samples of a step over all workers",
    "num_workers": "loader=Loader(workers=4)", "prefetch_factor": "loader=Loader(prefetch=2)",
    "pin_memory": "loader=Loader(pin=True)", "timeout": "loader=Loader(timeout_s=300)",
    "collate_fn": "collate", "shuffle": 'order: "shuffled" or "sequential"',
    "sampler": 'order: "shuffled", "sequential", Weighted(weights) or LikeLength(lengths)',
    "batch_sampler": "order and global_batch", "generator": "seed",
    "worker_init_fn": "seed: each sample has random numbers of its own, and a dataset opens its "
                      "files when it reads the first sample"}
"""Options of torch's DataLoader, and what has their place."""


def remedy(option: str, value: Any) -> str:
    """Return a sentence with what has the place of an option; "" if nothing has."""
    if option in OF_DATA_LOADER:
        return f" It is one of torch's DataLoader. Use {OF_DATA_LOADER[option]}."
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
