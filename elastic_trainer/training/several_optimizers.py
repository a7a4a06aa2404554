"""Several optimizers by name: each has a phase of its own in every step (as a GAN has).

Trainer(optimizer={"d": …, "g": …}) → here → one set of groups and one state, which are kept,
compared and sent as those of one optimizer

A step has one phase for each optimizer, in the order of their names in the dict. A phase is a step
in small: micro-batches → reduce → vote → apply, of this optimizer alone. What always holds:
1. Progress is counted in phases (`LiveState.ticks`), as it is counted in steps with one
   optimizer. So if a generation breaks between two phases, all workers agree on the next phase and
   go on there. No phase is done twice, and no copy of the weights is needed to undo one.
2. A worker that joins in the middle of a step receives the state as it is between two phases, with
   the number of the phase. It skips the phases that are done: their loops have no batches for it.
3. A checkpoint is made at the end of a step only, and the world changes as planned at the end of a
   step only.
4. The warm-up tries the first phase only. To try the next one, the user's code between the phases
   would run for a step that does not exist. So an error of a later phase ends the run in step 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from elastic_trainer.config import ConfigError


class Several(torch.optim.Optimizer):
    """The optimizers of all phases, as one."""

    def __init__(self, members: Mapping[str, torch.optim.Optimizer]):
        # Not Optimizer.__init__, which makes groups: these are those of the members.
        self.members = dict(members)
        self.state = States(self.members.values())  # type: ignore[assignment]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers, in order."""
        return [group for member in self.members.values() for group in member.param_groups]

    @property
    def kind(self) -> str:
        """The classes of the optimizers."""
        return _kinds(self.members)

    def step(self, closure: Any = None) -> Any:
        """Never called: each phase steps its own optimizer."""
        raise AssertionError("each phase steps its own optimizer")


class Schedulers(LRScheduler):
    """The torch schedulers of several optimizers, as one: each is stepped once for each step."""

    def __init__(self, members: Mapping[str, LRScheduler]):
        # Not LRScheduler.__init__, which sets rates: the members have set them.
        self.members = dict(members)

    @property
    def kind(self) -> str:
        """The classes of the schedulers."""
        return _kinds(self.members)

    @property
    def _schedulers(self) -> list[LRScheduler]:
        """The parts, under the name that torch's composed schedulers have for theirs."""
        return list(self.members.values())

    def step(self, epoch: int | None = None) -> None:
        """Let each scheduler set the rates of the next step."""
        for member in self.members.values():
            member.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each scheduler, by name."""
        return {name: member.state_dict() for name, member in self.members.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of each scheduler."""
        for name, member in self.members.items():
            member.load_state_dict(state_dict[name])


def _kinds(members: Mapping[str, object]) -> str:
    return ", ".join(f"{name}: {type(member).__name__}" for name, member in members.items())


class States(MutableMapping[Any, Any]):
    """What several optimizers keep of their parameters, as one mapping."""

    def __init__(self, optimizers: Any):
        self._optimizers = list(optimizers)
        self._owner = {id(p): o for o in self._optimizers for p in parameters_of(o)}

    def _of(self, key: Any) -> Any:
        owner = self._owner.get(id(key))
        if owner is None:
            raise KeyError(key)
        return owner.state

    def __getitem__(self, key: Any) -> Any:
        state = self._of(key)
        if key not in state:  # theirs is a defaultdict
            raise KeyError(key)
        return state[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._of(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._of(key)[key]

    def __contains__(self, key: object) -> bool:
        owner = self._owner.get(id(key))
        return owner is not None and key in owner.state

    def __iter__(self) -> Iterator[Any]:
        return (key for optimizer in self._optimizers for key in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    def clear(self) -> None:
        """Forget everything, in all optimizers."""
        for optimizer in self._optimizers:
            optimizer.state.clear()


def hooked(optimizer: torch.optim.Optimizer, hook: Callable[..., Any]) -> ExitStack:
    """Call a hook before each step of each optimizer, until what it returns is closed.

    A wrapper that has not called Optimizer.__init__ has no hooks: the optimizers in it have.
    """
    handles, waiting = ExitStack(), members_of(optimizer)
    while waiting:
        member = waiting.pop()
        if hasattr(member, "_optimizer_step_pre_hooks"):
            handles.callback(member.register_step_pre_hook(hook).remove)
        else:
            waiting += [one for one in vars(member).values()
                        if isinstance(one, torch.optim.Optimizer) and one is not member]
    return handles


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of an optimizer, or the classes of several."""
    return optimizer.kind if isinstance(optimizer, Several) else type(optimizer).__name__


def members_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the phases, in order."""
    return list(optimizer.members.values()) if isinstance(optimizer, Several) else [optimizer]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that an optimizer moves."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def as_one(optimizers: Mapping[str, torch.optim.Optimizer]) -> Several:
    """Return several optimizers as one. Raises ConfigError."""
    if not optimizers:
        raise ConfigError('optimizer is an empty dict. Give one optimizer, or several by name: '
                          '{"d": …, "g": …}.')
    owners = dict[int, str]()
    for name, optimizer in optimizers.items():
        for number, parameter in enumerate(parameters_of(optimizer)):
            if (other := owners.setdefault(id(parameter), name)) != name:
                raise ConfigError(
                    f"parameter {number} of the optimizer {name!r} is in the optimizer {other!r} "
                    f"too, so two phases would move it. Give each parameter to one of them.")
    return Several(optimizers)
