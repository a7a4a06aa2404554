"""What a script may not change while it trains: hooks, methods, slots and class attributes.

modules, parameters, optimizers → here (a look at each step's begin and end) → an error

What always holds:
1. Hooks of modules and parameters, and a `forward` that a module has for itself, are those with
   which the first step began. A worker that joins, or a resumed run, would not have another one.
   A hook that is removed before the step ends is none.
2. Plain values in slots and in attributes of the user's classes change between two steps in no
   process. What a batch changes there is a cache: the warm-up finds one on which a loss depends
   (training/warm_up.py).
3. An optimizer's class, and its `step`, have after a step what they had before.

Classes of torch and of installed packages are not looked at.

What it does not do: see into code (closures, global names), and into caches of functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from elastic_trainer.state.values.other_attributes import is_installed
from elastic_trainer.state.values.plain_values import is_plain, is_scalar, keys_that_differ

HOOKS = {"_forward_hooks": "register_forward_hook",
         "_forward_pre_hooks": "register_forward_pre_hook",
         "_backward_hooks": "register_full_backward_hook",
         "_backward_pre_hooks": "register_full_backward_pre_hook"}
OF_OPTIMIZERS = {"_optimizer_step_pre_hooks": "register_step_pre_hook",
                 "_optimizer_step_post_hooks": "register_step_post_hook"}
OF_PARAMETERS = {"_backward_hooks": "register_hook",
                 "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook"}
Look = dict[tuple[Any, str], Any]
"""Values by the name of an object, or by a class, and by the name of an attribute."""
REMEDY = (
    "A worker that joins, or a resumed run, would not have the change. Do it before the training "
    "begins, and let it act by an attribute of the module that your code changes after the step.")
MOVING_REMEDY = (
    "A worker that joins, or a resumed run, would have the first value. Keep it in an attribute "
    "that __init__ sets on the object itself (self.name = …), or in an object in state={…}.")


class Program:
    """The program of some modules and optimizers, by their names."""

    def __init__(self, modules: Mapping[str, torch.nn.Module],
                 parameters: Mapping[str, torch.nn.Parameter],
                 optimizers: Mapping[str, torch.optim.Optimizer]):
        self._parameters = parameters
        self._hooks = {
            f"{name} ({how})": table for kinds, objects in
            ((HOOKS, modules), (OF_OPTIMIZERS, optimizers))
            for name, one in objects.items() for table_name, how in kinds.items()
            if isinstance(table := vars(one).get(table_name), dict)}
        self._methods = {f"{name}.{method}": (vars(one), method) for method, objects in
                         (("forward", modules), ("step", optimizers))
                         for name, one in objects.items()}
        self._slotted = {name: one for name, one in modules.items() if _slots(type(one))}
        self._classes = _classes(modules.values())
        self._of_optimizers = _classes(optimizers.values())
        self._fixed: list[Any] | None = None
        """Hooks and methods, as the first step has begun with them."""
        self._ended, self._began = Look(), Look()
        self._is_open = False
        """True while a step is in flight."""
        self._caches = set[tuple[Any, str]]()
        """What batches change."""
        self._names: dict[str, list[Any]] = {}
        self._found = ""

    # --- a step's life ----------------------------------------------------------------------------

    def settle(self) -> None:
        """Take the program as it is now: what came before was done by each process."""
        self._fixed, self._names = self._look(), self._named()
        self._ended, self._found = self._moving(), ""

    def begin(self) -> None:
        """Look at what the script has changed since the last step's end. A step that broke begins
        again."""
        if self._is_open or self._fixed is None:
            return
        self._began, self._is_open = self._moving(), True
        if place := next(iter(keys_that_differ(self._ended, self._began) - self._caches), None):
            self._found = (f"{_name(place)} was changed between two steps, from "
                           f"{_text(self._ended, place)} to {_text(self._began, place)}. "
                           f"{MOVING_REMEDY}")

    def check(self) -> None:
        """Raise RuntimeError if the script has changed the program, or a batch has changed hooks
        or methods."""
        if self._fixed is None:
            return
        if not self._found and self._look() != self._fixed:
            names, now = self._names, self._named()
            found = next(name for name in [*now, *names] if now.get(name) != names.get(name))
            self._found = (f"{found} was added, removed or replaced while the run trains. {REMEDY}")
        if self._found:
            raise RuntimeError(self._found)

    def end(self) -> None:
        """Note what a step has left. Raises RuntimeError if the optimizer has changed its class."""
        if not self._is_open:
            return
        self._ended, self._is_open = self._moving(), False
        for place in keys_that_differ(self._began, self._ended):
            self._caches.add(place)
            if place[0] in self._of_optimizers:
                raise RuntimeError(
                    f"{_name(place)}, an attribute of the optimizer's class, was changed by a "
                    f"step, from {_text(self._began, place)} to {_text(self._ended, place)}. "
                    f"{MOVING_REMEDY}")

    # --- looks ------------------------------------------------------------------------------------

    def _look(self) -> list[Any]:
        found: list[Any] = [*chain.from_iterable(self._hooks.values())]
        found += [id(own[name]) for own, name in self._methods.values() if name in own]
        every = self._parameters.values()
        for table in filter(None, chain(*(map(attrgetter(name), every) for name in OF_PARAMETERS))):
            found += _of_user(table)
        return found

    def _named(self) -> dict[str, list[Any]]:
        """Return the same by names."""
        found = {f"the hook of {name}": [*table] for name, table in self._hooks.items()}
        found |= {path: [id(own[name])] for path, (own, name) in self._methods.items()
                  if name in own}
        for name, one in self._parameters.items():
            for table, how in OF_PARAMETERS.items():
                found[f"the hook of {name} ({how})"] = _of_user(getattr(one, table) or {})
        return found

    def _moving(self) -> Look:
        """Return the values of slots and of classes."""
        found: Look = {(name, slot): value for name, one in self._slotted.items()
                       for slot, value in _slots_of(one)}
        for kind in (*self._classes, *self._of_optimizers):
            found |= {(kind, attribute): _frozen(value)
                      for attribute, value in list(vars(kind).items())
                      if not attribute.startswith("__") and is_plain(value)}
        return found


def _classes(objects: Iterable[Any]) -> list[type]:
    """Return the user's classes of objects."""
    kinds = dict.fromkeys(chain.from_iterable(type(one).__mro__ for one in objects))
    return [kind for kind in kinds
            if kind is not object and kind.__module__.partition(".")[0] != "torch"
            and not is_installed(kind.__module__)]


def _of_user(hooks: Mapping[int, Any]) -> list[int]:
    """Return the numbers of hooks that are not our own: the reducer has some for a backward
    pass."""
    return [number for number, hook in hooks.items()
            if not str(getattr(hook, "__module__", "")).startswith("elastic_trainer.")]


def _slots(kind: type) -> list[str]:
    return [name for one in kind.__mro__ for slots in [one.__dict__.get("__slots__", ())]
            for name in ((slots,) if isinstance(slots, str) else slots)
            if name not in ("__dict__", "__weakref__")]


def _slots_of(one: Any) -> Iterator[tuple[str, Any]]:
    for name in _slots(type(one)):
        value = getattr(one, name, None)
        yield name, _frozen(value) if is_plain(value) else id(value)


def _frozen(value: Any) -> Any:
    """Return a plain value that a later change does not reach."""
    return value if is_scalar(value) and value == value else repr(value)


def _name(place: tuple[Any, str]) -> str:
    owner, attribute = place
    return f"{getattr(owner, '__qualname__', owner)}.{attribute}"


def _text(values: Look, place: tuple[Any, str]) -> str:
    return repr(values[place])[:80] if place in values else "nothing"
