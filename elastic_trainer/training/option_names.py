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
    rate: str
    """The option that sets the learning rates."""
    objects: str
    """The option with the objects that belong to the state."""
    length: str
    """The option with the length of the run."""
    inside: str
    """Where code runs for each batch."""
    behind: str
    """Where code runs for each finished step."""
    loss: str
    """The beginning of a sentence on what the caller gave as the loss."""


OF_TRAIN = Words(
    name="train", api="train()", rate="schedule", objects="extras", length="max_steps or epochs",
    inside="in loss", behind="in after_step", loss="loss(model, batch) returned")
OF_TRAINER = Words(
    name="Trainer", api="Trainer", rate="lr", objects="state", length="until",
    inside="in the inner loop", behind="behind the inner loop", loss="step.backward() got")
