"""The live state that a process leaves for its successor, which starts in its place.

process that `hvd.init()` aborts → here → memory file (world/revive.py) → here → its successor, with
the same pid

What it does not do: replace a checkpoint. The memory file is gone with the machine.
"""

from __future__ import annotations

import torch

from elastic_trainer.reduce.flat import Flat
from elastic_trainer.reduce.reducer import Reducer
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.training.after_step import Behind
from elastic_trainer.world import revive


class Successor:
    """The live state of one worker, as its successor gets it."""

    def __init__(self, state: LiveState, flat: Flat, reducer: Reducer, behind: Behind):
        self.state, self.flat, self.reducer, self.behind = state, flat, reducer, behind

    def leave(self) -> int | None:
        """Write the live state, and return the descriptor of its memory; None if it is half
        changed."""
        if self.behind.is_running:
            return None
        gradients = ({str(kind).removeprefix("torch."): sums
                      for kind, sums in self.flat.sums.items()}
                     if self.state.is_prepared else {})
        facts = {"trained": self.flat.trained, "handed_over": self.behind.ticks,
                 "clocks_ms": self.state.clocks_ms}
        return revive.write_live_state(self.state, gradients, facts)

    def take_up(self, memory: int | None) -> bool:
        """Go on with the live state that this process left; returns whether there was one."""
        classes = self.state.classes
        values = revive.read_live_state(memory, classes) if memory is not None else None
        if values is None:
            return False
        state, facts = self.state, values["facts"]
        state.load(values["state"])
        state.received = state.ticks  # as a newcomer: what is not in the state was lost
        state.begun, state.prepared = values["begun"], values["prepared"]
        state.take_up(values["buffers_before"],
                      values.get("evaluating_before", state.modes.evaluating()))
        if values["gradients"]:
            self.reducer.lay_out(facts["trained"])
        state.extra_state.take_up(values["extra_state"])
        state.attributes.take_up(values["attributes"])
        state.model_buffers.left = values["buffers_left"]
        self.behind.ticks = facts.get("handed_over", state.ticks)
        before_ms, now_ms = facts.get("clocks_ms", state.clocks_ms)
        state.clocks_ms = (before_ms, now_ms)
        for name, tensor in values["gradients"].items():
            self.flat.sums[getattr(torch, name)].copy_(tensor)
        return True
