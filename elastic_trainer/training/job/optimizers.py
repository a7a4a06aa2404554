"""The optimizers of a run and what sets their rates. Several, by name, have a phase of their own in
every step (as a GAN has).

Trainer(optimizer={"d": …, "g": …}) → here → one set of groups and one state, which are kept,
compared and sent as those of one optimizer; option lr → here → a torch scheduler, or a multiplier

    optimizer = torch.optim.AdamW(decay_groups(model, weight_decay=0.1), lr=3e-4)

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
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from elastic_trainer.config import ConfigError
from elastic_trainer.options import Words


class Several(torch.optim.Optimizer):
    """The optimizers of all phases, as one."""

    def __init__(self, members: Mapping[str, torch.optim.Optimizer]):
        # Not Optimizer.__init__, which makes groups: these are those of the members.
        self.members = dict(members)
        self.state = States(self.members.values())  # type: ignore[assignment]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for member in self.members.values() for group in member.param_groups]

    @property
    def kind(self) -> str:
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
        return _kinds(self.members)

    @property
    def _schedulers(self) -> list[LRScheduler]:
        """The parts, under the name that torch's composed schedulers have for theirs."""
        return list(self.members.values())

    def step(self, epoch: int | None = None) -> None:
        for member in self.members.values():
            member.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: member.state_dict() for name, member in self.members.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
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
    return optimizer.kind if isinstance(optimizer, Several) else type(optimizer).__name__


def members_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    return list(optimizer.members.values()) if isinstance(optimizer, Several) else [optimizer]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def as_one(optimizers: Mapping[str, torch.optim.Optimizer]) -> Several:
    if not optimizers:
        raise ConfigError('optimizer is an empty dict. Give one optimizer, or several by name: '
                          '{"d": …, "g": …}.')
    owners = dict[int, str]()
    for name, optimizer in optimizers.items():
        if not hasattr(optimizer, "param_groups"):
            raise ConfigError(f"optimizer has {name!r}: {type(optimizer).__name__}. Give "
                              'optimizers of torch by names: {"d": …, "g": …}.')
        for number, parameter in enumerate(parameters_of(optimizer)):
            if (other := owners.setdefault(id(parameter), name)) != name:
                raise ConfigError(
                    f"parameter {number} of the optimizer {name!r} is in the optimizer {other!r} "
                    f"too, so two phases would move it. Give each parameter to one of them.")
    return Several(optimizers)


# --- what sets the rates --------------------------------------------------------------------------

Rates = Callable[[int], float] | LRScheduler | Mapping[str, LRScheduler]
"""What sets the learning rates, when the global batch is known."""


def split_schedule(schedule: Rates | None, optimizer: torch.optim.Optimizer, steps: int,
                   words: Words) -> tuple[LRScheduler | None, Callable[[int], float] | None]:
    """Return the torch scheduler and the multiplier of the rates, as far as there are some. Raises
    ConfigError."""
    members = optimizer.members if isinstance(optimizer, Several) else {"": optimizer}
    given = _schedulers_of(schedule, members)
    for one in given.values() if given else [schedule]:
        _require_pure(one)
    for name, scheduler in given.items():
        _require_usable(scheduler, members[name], steps, words, is_one_of_several=len(members) > 1)
    for name, member in members.items():
        if name not in given:
            _require_no_scheduler(member, words)
    if isinstance(schedule, LRScheduler):
        return schedule, None
    if isinstance(schedule, Mapping):
        return Schedulers(given), None
    return None, schedule


def _schedulers_of(schedule: Rates | None,
                   members: Mapping[str, torch.optim.Optimizer]) -> dict[str, LRScheduler]:
    """Return the torch schedulers by the names of their optimizers. Raises ConfigError."""
    names = ", ".join(map(repr, members))
    if isinstance(schedule, Mapping):
        unknown = [name for name in schedule if name not in members]
        if unknown or not schedule or "" in members:
            raise ConfigError(
                f"the lr is a dict with the names {list(schedule)}, but "
                + ("there is one optimizer. Give its torch scheduler, or a function of the step."
                   if "" in members else f"the optimizers are {names}. Give at least one of them "
                   f"a torch scheduler, by the same name."))
        for name, scheduler in schedule.items():
            if not isinstance(scheduler, LRScheduler):
                raise ConfigError(
                    f"the lr of {name!r} is a {type(scheduler).__name__}. A dict holds torch "
                    f"schedulers. Use one function of the step for all optimizers, or an "
                    f"LRScheduler for each.")
        return dict(schedule)
    if not isinstance(schedule, LRScheduler):
        if schedule is not None and not callable(schedule):
            raise ConfigError(
                f"lr is {schedule!r}. Use a function of the step, or a torch LRScheduler.")
        return {}
    if "" not in members:
        raise ConfigError(
            f"the lr is a {type(schedule).__name__}, which sets the rates of one optimizer, "
            f"but there are several: {names}. Give a dict of torch schedulers by these names, or a "
            f"function of the step.")
    return {"": schedule}


def _require_pure(schedule: Any) -> None:
    """Raise ConfigError for a function of the step that returns another value the second time.
    Torch keeps the attributes of a callable object of LambdaLR, and nothing of a function."""
    for inner in getattr(schedule, "_schedulers", ()):
        _require_pure(inner)
    functions = (() if schedule is None else [schedule] if not isinstance(schedule, LRScheduler)
                 else [one for one in getattr(schedule, "lr_lambdas", ())
                       if isinstance(one, (FunctionType, MethodType, partial))])
    for function in functions:
        try:
            first, again = ([float(function(step)) for step in (0, 1)] for _ in range(2))
        except (Exception, SystemExit):
            continue  # it raises again when it is used
        if bad := [step for step in (0, 1) if first[step] != again[step] == again[step]]:
            raise ConfigError(
                f"the function of the learning rate ({getattr(function, '__name__', function)}) "
                f"returned {first[bad[0]]} for step {bad[0]}, and then {again[bad[0]]}. It keeps a "
                f"value of its own, or draws one, which a worker that joins, or a resumed run, "
                f"would not have. Compute the rate from the number of the step, or give LambdaLR "
                f"an object with __call__: its attributes are kept.")


def _require_no_scheduler(optimizer: torch.optim.Optimizer, words: Words) -> None:
    # LRScheduler.__init__ leaves this mark on the optimizer (torch 2.13, optim/lr_scheduler.py).
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ConfigError(
            f"a torch learning-rate scheduler was built on this optimizer, but {words.api} was not "
            f"given it, so both would set the rates. Hand it over as lr=scheduler, or "
            f"build a new optimizer.")


def _require_usable(scheduler: LRScheduler, optimizer: torch.optim.Optimizer, steps: int,
                    words: Words, is_one_of_several: bool) -> None:
    """Raise ConfigError for a torch scheduler that would fail or do harm later."""
    name = type(scheduler).__name__
    if scheduler.optimizer is not optimizer:
        raise ConfigError(f"the lr {name} belongs to another optimizer than "
                          f"{words.api} was given. Build it on this one.")
    if isinstance(scheduler, ReduceLROnPlateau):
        if is_one_of_several:
            raise ConfigError(
                f"the lr {name} follows the loss of a step, but a step with several "
                f"optimizers has a loss for each. Use another torch scheduler, or a function of "
                f"the step.")
        if scheduler.mode != "min":
            raise ConfigError(
                f"the lr {name} has mode {scheduler.mode!r}, but it gets the loss of "
                f"each step, which is to fall. Use mode='min', or set the rate by a function of "
                f"the step.")
    if isinstance(scheduler, OneCycleLR) and scheduler.total_steps < steps:
        raise ConfigError(
            f"the lr {name} has total_steps {scheduler.total_steps}, but the run has "
            f"{steps} steps, so it would raise at the end. Use OneCycleLR(total_steps={steps}).")


# --- groups with and without weight decay ---------------------------------------------------------

Rule = Callable[[str, torch.nn.Parameter], bool]


def is_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    """Return whether a parameter has two dimensions or more: weights of layers and embeddings have,
    biases and the scales of normalizations have not."""
    return parameter.dim() >= 2


def decay_groups(model: torch.nn.Module, *, weight_decay: float,
                 rule: Rule = is_matrix) -> list[dict[str, Any]]:
    """Return groups of parameters for an optimizer: those that `rule(name, parameter)` chooses get
    this weight decay, and the others none.

    The default rule leaves biases and the parameters of normalizations out. The order is that of
    the model, so every worker and every resumed run has the same groups. A group without parameters
    is left out.

    Raises ConfigError.
    """
    if not weight_decay >= 0:
        raise ConfigError(f"weight_decay is {weight_decay}. Use 0 or more.")
    chosen: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        chosen[bool(rule(name, parameter))].append(parameter)
    return [{"params": parameters, "weight_decay": weight_decay if decays else 0.0}
            for decays, parameters in chosen.items() if parameters]
