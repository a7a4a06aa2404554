"""Values of a script that its inner loop reads and the code after it changes: they are no part of
the state, so a person is told.

the user's loop (trainer.py, step.py) → here → a remark: one sentence, an event

What always holds:
1. Read are plain values and small tensors: names of the loop's function, of its module and of
   closures, attributes of objects, and what functions of the script read that the inner loop calls.
2. A name that the inner loop itself sets is left out: the warm-up finds what is carried from batch
   to batch. So are the model and objects of the option state.
3. Nothing is changed. What cannot be read is left out.

It is a remark and no error, because a loop may read a value that changes no result (a counter for a
line that it prints).

Cost: 0.1 to 0.2 ms of a step (measured: a loop that names 14 values, and one module).

Source: the `for` that a frame stands in is the FOR_ITER at f_lasti (dis).
"""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain, islice
from typing import Any

import numpy
import torch

from elastic_trainer.state.values.other_attributes import is_installed
from elastic_trainer.training.checks.beside import sum_of
from elastic_trainer.training.job.settings import Remark

MOST_PATHS, MOST_ELEMENTS, DEEPEST = 200, 1024, 2
SCALARS = (bool, int, float, complex, str, type(None))
MOST_TENSORS, MODULE = 4, "a module"
MISSING = object()
Path = tuple[str, ...]
"""A name, and the names of attributes: ("args", "temperature")."""


class CarriedValues:
    """What one loop reads, and the modules that its function names (an average of weights that the
    loop keeps). `registered` returns the objects of the option state."""

    def __init__(self, model: torch.nn.Module, registered: Callable[[], Iterable[Any]]):
        self._model, self._registered = model, registered
        self._own = frozenset[int]()
        """The ids of the model's parameters, which stay the same objects."""
        self._frame: types.FrameType | None = None
        self._paths: tuple[Path, ...] = ()
        self._left: dict[Path, Any] = {}
        self._told = set[Path]()

    def leave(self, frame: types.FrameType | None) -> None:
        """Note the frame of the inner loop, which has asked for a batch and gets none, and the
        values with which it ends."""
        while frame and frame.f_code.co_flags & inspect.CO_GENERATOR:
            frame = frame.f_back  # tqdm
        is_ours = frame is None or _is_ours(str(frame.f_globals.get("__name__")))
        self._frame = None if is_ours else frame
        self._paths = read_by_loop(frame.f_code, frame.f_lasti) if frame and not is_ours else ()
        self._left = self._values()

    def end(self) -> list[Remark]:
        """Return remarks on what has changed since: the code after the inner loop has run."""
        now, was = self._values() if self._left else {}, self._left
        self.drop()
        found = [path for path in was if path in now and path not in self._told
                 and was[path] != now[path] and was[path][0] == was[path][0]]
        self._told.update(found)
        return [_remark(".".join(path), was[path][-1], now[path][-1]) for path in found]

    def drop(self) -> None:
        """Forget the frame, which holds the loop's tensors."""
        self._frame, self._left = None, {}

    def _values(self) -> dict[Path, Any]:
        if self._frame is None or not self._paths:
            return {}
        try:
            code, own, others = self._frame.f_code, self._frame.f_locals, self._frame.f_globals
            names = {name: own.get(name, others.get(name, MISSING)) for name in named_by(code)}
            if code.co_flags & inspect.CO_OPTIMIZED and type(own) is dict:
                own.clear()  # a copy, which would hold tensors (before Python 3.13)
            left_out = frozenset(map(id, self._registered()))
            modules = {(name,): self._seen_module(value) for name, value in names.items()
                       if isinstance(value, torch.nn.Module) and id(value) not in left_out}
            return {path: seen for path, seen in modules.items() if seen} | dict(
                _found(names, self._paths, left_out, DEEPEST, ()))
        except Exception:  # an object may do anything
            return {}

    def _seen_module(self, module: torch.nn.Module) -> tuple[Any, ...]:
        """Return what changes with the first tensors of a module that is not the model's; (): it
        is, or there are none."""
        self._own = self._own or frozenset(map(id, self._model.parameters()))
        tensors = list(islice(chain(module.parameters(), module.buffers()), MOST_TENSORS))
        if not tensors or any(id(one) in self._own for one in tensors):
            return ()
        marks = ((one._version, one.data_ptr()) for one in tensors if not one.is_inference())
        return (id(module), sum_of(tensors[0]), *marks, MODULE)


def _remark(name: str, was: str, now: str) -> Remark:
    if now == MODULE:
        return Remark(
            "job.value_carried",
            f"the code after the inner loop has changed the module {name}, which is no part of the "
            f"state. A worker that joins, and a resumed run, begin with its first values. Keep it "
            f'with the state: state={{"{name}": {name}}}, or use the options ema and swa.',
            {"name": name, "was": MODULE, "now": "another state"})
    return Remark(
        "job.value_carried",
        f"the inner loop reads {name}, which the code after it has changed ({was}, now {now}), and "
        f"which is no part of the state. A worker that joins, and a resumed run, begin with its "
        f"first value. If the loss depends on it, compute it from step.number, or keep it in an "
        f"object in state={{…}} or in an attribute of the model.",
        {"name": name, "was": was, "now": now})


def _found(names: Mapping[str, Any], paths: Collection[Path], left_out: Collection[int], depth: int,
           start: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the values at these paths, and those that functions there read."""
    for path in list(paths)[:MOST_PATHS]:
        value, owner = names.get(path[0], MISSING), None
        for attribute in path[1:]:
            if id(value) in left_out or isinstance(value, torch.nn.Module):
                value = MISSING
            owner = value
            value = _attribute(value, attribute)
        if id(value) in left_out or value is MISSING:
            continue
        if isinstance(value, (*SCALARS, numpy.generic)):
            yield (*start, *path), (value, repr(value)[:40])
        elif isinstance(value, torch.Tensor):
            if value.numel() <= MOST_ELEMENTS and not value.requires_grad:
                yield (*start, *path), (id(value), value._version, "a tensor")
        elif isinstance(value, types.FunctionType) and depth and _is_of_script(value):
            read = read_by_function(value.__code__)
            yield from _found(_names_of(value, owner, read), read, left_out, depth - 1,
                              (*start, *path))


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute without running code of the object."""
    own = getattr(value, "__dict__", {})
    if isinstance(own, dict) and name in own:
        return own[name]
    found = next((vars(kind)[name] for kind in type(value).__mro__ if name in vars(kind)), MISSING)
    return found if isinstance(found, (types.FunctionType, *SCALARS)) else MISSING


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "elastic_trainer"


def _is_of_script(function: types.FunctionType) -> bool:
    module = function.__module__ or ""
    return not (is_installed(module) or _is_ours(module) or module.startswith("torch"))


def _names_of(function: types.FunctionType, owner: Any, paths: Iterable[Path]) -> dict[str, Any]:
    """Return what a function reads by name: of its module, its closure, and its first argument."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    found = {path[0]: function.__globals__.get(path[0], MISSING) for path in paths}
    found |= {name: _content(cell) for name, cell in cells}
    arguments = function.__code__.co_varnames[:function.__code__.co_argcount]
    for name in arguments:
        found.pop(name, None)
    if owner is not None and arguments and not isinstance(owner, types.ModuleType):
        found[arguments[0]] = owner
    return found


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


# --- what code reads ------------------------------------------------------------------------------

@cache
def named_by(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that code has."""
    return (*code.co_varnames, *code.co_cellvars, *code.co_freevars, *code.co_names)


@cache
def read_by_loop(code: types.CodeType, at: int) -> tuple[Path, ...]:
    """Return what the body of a `for` reads and does not set; (): there is no `for` here."""
    every = list(dis.get_instructions(code))
    ends = [one.argval for one in every if one.offset == at and one.opname == "FOR_ITER"]
    return _read([one for one in every if at < one.offset < ends[0]]) if ends else ()


@cache
def read_by_function(code: types.CodeType) -> tuple[Path, ...]:
    return _read(list(dis.get_instructions(code)))


def _read(body: list[dis.Instruction]) -> tuple[Path, ...]:
    """Return the paths that instructions read, without the names that they set."""
    found, stored = dict[Path, None](), set[str]()
    path: Path = ()
    for one in body:
        names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        if one.opname.startswith("STORE_") and not one.opname.startswith(
                ("STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE")):
            stored |= {name for name in names if isinstance(name, str)}
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD") and path:
            path = (*path, str(one.argval))
        elif one.opname.startswith(("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF")):
            found |= {(name,): None for name in names if isinstance(name, str)}
            path = (str(names[-1]),)
        else:
            path = ()
        if path:
            found[path] = None
    return tuple(one for one in found if one[0] not in stored)
