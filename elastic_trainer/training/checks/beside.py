"""Modules that a step calls and that are no part of the model: a loss with settings, a teacher.

warm-up (which modules are called) → here → proof; what the script changes in them → an error

What always holds:
1. A module beside the model that the code of a batch calls is found in the warm-up, if it is the
   same object for two micro-batches. With torch.compile none is looked for.
2. If the script changes its plain attributes, parameters or buffers between two steps, the next
   step ends with an error that names it: a worker that joins, or a resumed run, would lack the
   change. Parameters and buffers of a module in the option state may change.
3. If a batch changes its parameters or buffers, that is an error, too: workers compute other
   batches.

Cost: a checksum of some elements of MOST_TENSORS tensors, twice a step. On a GPU no element is
read: versions and addresses count alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch

from elastic_trainer.config import ConfigError
from elastic_trainer.state.values.module_attributes import OWN, owners_of
from elastic_trainer.state.values.plain_values import is_plain, keys_that_differ

MOST_TENSORS, MOST_ELEMENTS = 32, 64
PUT = ("Make it a part of the model (a submodule: model.{name} = …), whose attributes and buffers "
       "are followed")
BARE = torch.nn.Module


class Beside:
    """The modules beside one model. `registered` returns the objects of the option state."""

    def __init__(self, model: torch.nn.Module, registered: Callable[[], Iterable[Any]]):
        self._model, self._registered = model, registered
        self._followed = set[int]()
        """The modules in lists and dicts of the model, whose attributes are followed as its own."""
        self.is_sought = False
        """True if such modules were looked for."""
        self._called: list[list[torch.nn.Module]] = []
        """The modules that each micro-batch has called first."""
        self._roots: dict[str, torch.nn.Module] = {}
        self._parts: list[tuple[str, str, torch.nn.Module]] = []
        """The name of a root, the path in it, and the module, if it is no part of the model."""
        self._ended: Look | None = None
        self._began: Look = {}
        self._caches = set[str]()
        self._is_open, self._found = False, ""

    def modules(self) -> dict[str, torch.nn.Module]:
        """Return the modules by name."""
        return {f"{root}{path and '.'}{path} (beside the model)": module
                for root, path, module in self._parts}

    # --- which they are ---------------------------------------------------------------------------

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Notice the modules that the code of a micro-batch calls."""
        own, called = set(map(id, self._model.modules())), list[torch.nn.Module]()
        thread = threading.get_ident()
        self._called.append(called)
        self.is_sought = True

        def notice(module: torch.nn.Module, _: Any) -> None:
            if id(module) not in own and threading.get_ident() == thread:
                called.append(module)  # it stays, so its id is not used again
                own.update(map(id, module.modules()))

        handle = torch.nn.modules.module.register_module_forward_pre_hook(notice)
        try:
            yield
        finally:
            handle.remove()

    def settle(self) -> None:
        """Follow the modules that each micro-batch has called, from their values of now on."""
        if len(self._called) > 1:
            again = set(map(id, self._called[1]))
            self._roots = _named([one for one in self._called[0] if id(one) in again])
            self._followed = {id(owner) for _, owner in owners_of(self._model)}
            own = set(map(id, self._model.modules()))
            self._parts = [(root, path, module) for root, top in self._roots.items()
                           for path, module in top.named_modules() if id(module) not in own]
        self._called = []
        self._ended, self._is_open = self._look(), False

    def require_unchanged(self) -> None:
        """Raise ConfigError if a micro-batch has changed tensors since `settle`."""
        if found := self._moved_tensors(self._ended or {}, self._look()):
            raise ConfigError(self._on_batch(found))

    # --- a step's life ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Look at what the script has changed since the last step's end. A step that broke begins
        again."""
        if self._is_open or not self._parts:
            return
        self._began, self._is_open = self._look(), True
        moved = sorted(keys_that_differ(self._ended or {}, self._began) - self._caches)
        free = self._free() if moved else {}
        for path in moved:
            root = path.partition(":")[0]
            kind = "tensors" if _is_tensor(path) else "attributes"
            if kind not in free.get(root, ()):
                self._found = self._on_script(path, root)
                break

    def check(self) -> None:
        """Raise RuntimeError if the script has changed a module."""
        if self._found:
            raise RuntimeError(self._found)

    def end(self) -> None:
        """Note what a step has left. Raises RuntimeError if a batch has changed tensors."""
        if not self._is_open:
            return
        self._ended, self._is_open = self._look(), False
        if found := self._moved_tensors(self._began, self._ended):
            raise RuntimeError(self._on_batch(found))
        self._caches |= keys_that_differ(self._began, self._ended)

    def _free(self) -> dict[str, set[str]]:
        """Return what the script may change of each root: what the option state keeps."""
        kept: dict[int, set[str]] = {}
        for one in self._registered():
            for module in _modules_in(one):
                knows = (type(module).state_dict is not BARE.state_dict
                         or type(module).get_extra_state is not BARE.get_extra_state)
                kinds = {"tensors", "attributes"} if knows or module is not one else {"tensors"}
                for part in module.modules():
                    kept.setdefault(id(part), set()).update(kinds)
        return {name: kept.get(id(module), set()) for name, module in self._roots.items()}

    # --- looks ------------------------------------------------------------------------------------

    def _look(self) -> Look:
        """Return the values by "root:path": of tensors a checksum, version and address."""
        found: Look = {}
        tensors: dict[str, torch.Tensor] = {}
        own = set(map(id, (*self._model.parameters(), *self._model.buffers())))
        for root, path, module in self._parts:
            start = f"{root}:{path and f'{path}.'}"
            tensors |= {f"{start}{name}": one for kept in (module._parameters, module._buffers)
                        for name, one in kept.items() if one is not None and id(one) not in own}
            if id(module) in self._followed:
                continue
            found[f"{start}training"] = module.training
            for name, value in vars(module).items():
                if name not in OWN and (is_plain(value) or not name.startswith("_")):
                    found[f"{start}{name}"] = repr(value) if is_plain(value) else _seen(value)
        step = -(-len(tensors) // MOST_TENSORS) or 1
        for number, (name, one) in enumerate(tensors.items()):
            found[f"{name}{TENSOR}"] = (*_seen(one), sum_of(one) if number % step == 0 else 0)
        return found

    @staticmethod
    def _moved_tensors(before: Look, after: Look) -> str:
        return min(filter(_is_tensor, keys_that_differ(before, after)), default="")

    def _on_script(self, path: str, root: str) -> str:
        put = PUT.format(name=root.lower())
        state = (f', or register it: state={{"{root.lower()}": …}}' if _is_tensor(path) else "")
        return (f"{_shown(path)} was changed between two steps, and {root} is called in a step but "
                f"is no part of the model. A worker that joins, or a resumed run, would have its "
                f"first value. {put}{state}.")

    def _on_batch(self, path: str) -> str:
        root = path.partition(":")[0]
        return (f"the code of a batch has changed {_shown(path)}, and {root} is no part of the "
                f"model. Workers compute different batches, so they would hold different values. "
                f"{PUT.format(name=root.lower())}, or call its eval() before the training.")


Look = dict[str, Any]
TENSOR = " (tensor)"
"""The end of the path of a parameter or a buffer."""


def _is_tensor(path: str) -> bool:
    return path.endswith(TENSOR)


def _shown(path: str) -> str:
    return path.removesuffix(TENSOR).replace(":", ".")


def _named(modules: list[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Return modules by the names of their classes, and a number from the second one on."""
    found: dict[str, torch.nn.Module] = {}
    for module in modules:
        name = type(module).__name__
        same = sum(type(one).__name__ == name for one in found.values())
        found[f"{name}{same + 1}" if same else name] = module
    return found


def _modules_in(value: Any) -> Iterator[torch.nn.Module]:
    """Yield an object of the option state that is a module, or the modules in its attributes."""
    if isinstance(value, torch.nn.Module):
        yield value
        return
    for one in vars(value).values() if hasattr(value, "__dict__") else ():
        for part in one if isinstance(one, (list, tuple)) else [one]:
            if isinstance(part, torch.nn.Module):
                yield part


def _seen(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, torch.Tensor):
        return (id(value),)
    return id(value), 0 if value.is_inference() else value._version, _address(value)


def _address(value: torch.Tensor) -> int:
    return value.data_ptr() if value.layout == torch.strided and not value.is_meta else 0


def sum_of(value: torch.Tensor) -> int:
    """Return a checksum of some elements. A write through `tensor.data` has no version."""
    if value.device.type != "cpu" or value.layout != torch.strided or value.is_quantized:
        return 0
    flat = value.detach().reshape(-1)
    some = flat[::max(1, flat.numel() // MOST_ELEMENTS)][:MOST_ELEMENTS].contiguous()
    return crc32(some.view(torch.uint8).numpy().data) if some.numel() else 0
