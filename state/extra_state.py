"""What modules keep beside parameters and buffers (FP8 scales): get_extra_state, set_extra_state.

module → here → checkpoint, newcomer, all workers

What always holds:
1. There is no arithmetic for extra state, so it has no mean over micro-batches, unlike buffers.
   Each micro-batch begins with the values of the step's begin. The step ends with the values that
   its first micro-batch has left, in every world. With one worker and one micro-batch this is what
   plain PyTorch does.
2. All workers hold these values before the vote. So a worker that rolls the step forward has them.
3. A model without such modules costs nothing.

Source: torch 2.13, nn/modules/module.py, `_save_to_state_dict`: a module has extra state if its
class overrides get_extra_state.
"""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from typing import Any

import torch

from elastic_trainer.state.forms import mapped
from elastic_trainer.state.layout import Packed, byte_view, decode, pack
from elastic_trainer.state.names import plain
from elastic_trainer.state.rates import as_built

SUFFIX = "_extra_state"


class ExtraState:
    """The extra state of one model's modules, named as in `state_dict()` before torch.compile."""

    def __init__(self, model: torch.nn.Module):
        bare = torch.nn.Module
        self.modules = {
            plain(f"{name}.{SUFFIX}".removeprefix(".")): module
            for name, module in model.named_modules()
            if type(module).get_extra_state is not bare.get_extra_state
        }
        self.lacking = [name for name, module in self.modules.items()
                        if type(module).set_extra_state is bare.set_extra_state]
        """The modules without set_extra_state: their values could not be put back."""
        self._before: dict[str, Any] | None = None
        self._after: dict[str, Any] | None = None

    def values(self) -> dict[str, Any]:
        """Return the values, by name (nothing is copied)."""
        return {name: module.get_extra_state() for name, module in self.modules.items()}

    def load(self, values: dict[str, Any]) -> None:
        """Give the modules values, which stay the caller's."""
        for name, module in self.modules.items():
            module.set_extra_state(as_built(module.get_extra_state(), _copied(values[name])))

    # --- a step's life ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Keep the values of the step's begin."""
        if self.modules:
            self._before, self._after = _copied(self.values()), None

    def reset(self) -> None:
        """Put the values of the step's begin back."""
        if self._before is not None:
            self.load(self._before)

    def keep(self) -> None:
        """Keep what the step's first micro-batch has left. Raises TypeError if it cannot be
        sent."""
        if self.modules:
            self._after = _copied(self.values())
            pack(self._after)

    def share(self, from_first: Callable[[str], str]) -> None:
        """Give all workers what the first micro-batch has left. `from_first` sends the text of the
        worker that ran it.

        Network: one allgather of these values. The text is empty if the micro-batch has failed.
        """
        if self.modules:
            text = from_first(_text(pack(self._after)) if self._after is not None else "")
            self._after = _values(text) if text else None

    def apply(self) -> None:
        """End a step with the values that its first micro-batch has left."""
        if self._after is not None:
            self.load(self._after)
        self.forget()

    def forget(self) -> None:
        """Forget the step in flight."""
        self._before = self._after = None

    def in_flight(self) -> list[Any]:
        """Return what a successor of this process needs of the step in flight."""
        return [self._before, self._after]

    def take_up(self, in_flight: list[Any]) -> None:
        """Go on with a step in flight."""
        self._before, self._after = in_flight
        self.reset()


def _copied(value: Any) -> Any:
    return mapped(value, lambda part, _: part.detach().clone() if isinstance(part, torch.Tensor)
                  else copy.copy(part))


def _text(packed: Packed) -> str:
    payload = b"".join(byte_view(tensor).numpy().tobytes() for tensor in packed.tensors)
    return json.dumps([packed.header.decode(), base64.b64encode(payload).decode()])


def _values(text: str) -> dict[str, Any]:
    header, payload = json.loads(text)
    data = bytearray(base64.b64decode(payload))
    return dict(decode(header.encode(), torch.frombuffer(data, dtype=torch.uint8) if data
                       else torch.empty(0, dtype=torch.uint8)))
