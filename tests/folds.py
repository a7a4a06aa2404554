"""Folds of events that only tests need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from elastic_trainer.launch.past import Past
from elastic_trainer.observe.schema import flaw


def past_of(events: Iterable[dict[str, Any]]) -> Past:
    """Return what Follower.read would return of a log that has these events."""
    past = Past()
    for event in events:
        if flaw(event):
            past.malformed += 1
        else:
            past.read(event)
    return past
