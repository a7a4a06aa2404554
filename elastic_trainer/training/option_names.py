"""The names of options and places as the caller has them: train() and Trainer differ in some.

train(), Trainer → here → the messages of errors
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Words:
    """What messages call the caller's options, and the places of the caller's code."""

    name: str
    api: str
    inside: str
    """Where code runs for each batch."""
    behind: str
    """Where code runs for each finished step."""
    loss: str
    """The beginning of a sentence on what the caller gave as the loss."""


OF_TRAIN = Words(
    name="train", api="train()",
    inside="in loss", behind="in after_step", loss="loss(model, batch) returned")
OF_TRAINER = Words(
    name="Trainer", api="Trainer",
    inside="in the inner loop", behind="after the inner loop", loss="step.backward() got")
