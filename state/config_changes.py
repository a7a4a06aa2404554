"""What differs between the configuration of a run and the one it is resumed with, and what that
means.

checkpoint's record, configuration → here → a table, a refusal, or a remark

What always holds:
1. A key is taken to change the bits, unless it is listed as one that does not.
2. A key from which follows which samples a step has is never allowed to change: steps that are done
   and steps to come would then not cover each sample once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_trainer.config import ConfigError
from elastic_trainer.state.plain_options import declared
from elastic_trainer.wire.redact import redacted_settings

HARMLESS = frozenset({
    "training.checkpoint_every", "training.keep_last", "training.keep_every",
    "training.part_bytes", "training.run_dir", "training.store", "training.timeline",
    "training.progress", "training.until", "training.epochs", "training.max_steps",
    "training.bucket_bytes"})
"""Keys that change no bit of a step. The length may be extended."""
NEVER = frozenset({
    "training.global_batch", "training.microbatches", "training.seed", "training.order",
    "training.drop_last", "training.min_microbatch_samples", "training.reduce", "run.reduce"})
"""Keys that a run keeps for its life: the checkpoint's identity, which live_state.py compares."""
NOTHING = "(not given)"


@dataclass(frozen=True)
class Change:
    """A key with another value than the run has."""

    key: str
    was: Any
    now: Any

    @property
    def is_harmless(self) -> bool:
        """True if no bit of a step depends on the key."""
        is_launchers = self.key.startswith("run.") and self.key not in NEVER
        return is_launchers or self.key in HARMLESS

    def verdict(self, allowed: Collection[str]) -> str:
        """Return what becomes of the change: harmless, never, allowed or refused."""
        if self.is_harmless:
            return "harmless"
        if self.key in NEVER:
            return "never"
        return "allowed" if self.key in allowed else "refused"


def changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the keys with different values, by full keys. A default counts as given.

    Secrets are compared as a checkpoint keeps them: without their values.
    """
    was, now = redacted_settings(was), redacted_settings(now)
    usual = {f"training.{key}": value for key, value in declared()[1].items() if value is not None}
    found = []
    for key in sorted(was.keys() | now.keys()):
        default = usual.get(key, NOTHING)
        before, after = was.get(key, default), now.get(key, default)
        if before != after or isinstance(before, bool) != isinstance(after, bool):
            found.append(Change(key, before, after))
    return found


def require_allowed(found: Collection[Change], allowed: Collection[str], run: str) -> None:
    """Raise ConfigError for changes that may not be, all in one message."""
    fixed = [change for change in found if change.verdict(allowed) == "never"]
    if fixed:
        raise ConfigError(
            f"{_list(fixed)}. A run keeps these values for its life: which samples a step has, and "
            f"in which order they are summed, follows from them. Give the run's value, or train a "
            f"new run (another --run than {run}).")
    refused = [change for change in found if change.verdict(allowed) == "refused"]
    if refused:
        options = " ".join(f"--allow-change {change.key}" for change in refused)
        raise ConfigError(
            f"{_list(refused)}. This would change the bits of the run. Give the run's value, or "
            f"{options}, or train a new run (another --run than {run}).")


def _list(found: Collection[Change]) -> str:
    return "; ".join(f"{change.key} is {change.was!r} in the run, but {change.now!r} is given"
                     for change in found)
