"""The types of values that a state may hold, and the plain form of each.

live value → here → layout.py (a JSON header, and bytes) → here → a value of the same type

What always holds:
1. A value is kept only if it comes back with its exact type. All others raise CannotKeep, with the
   remedy. A subclass is another type than its base class.
2. No class is imported by a name from a store. The class of a named tuple or of an enumeration is
   one that an object of this process held when the loop began.
3. A form has plain values and tensors alone (no pickle), and `KINDS` has all of them.
"""

from __future__ import annotations

import base64
import copy
import enum
import math
import operator
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, Literal

import numpy
import torch
from numpy.lib import format as npy

SCALARS = (type(None), bool, int, float, str)
"""What JSON has."""
MOST_BITS = 4096
"""A whole number with more bits is written in base 16. Python refuses to read 4,300 decimal digits
(sys.get_int_max_str_digits)."""
MOST_BYTES = 1 << 20
"""Bytes are a part of the header, so there may not be many."""
FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, Counter,
                 OrderedDict, deque)}
"""What a defaultdict may make."""
OF_TORCH = {str(value): value for value in vars(torch).values()
            if isinstance(value, (torch.dtype, torch.layout, torch.memory_format))}
"""By their names: torch.float32, torch.strided, torch.channels_last."""


class CannotKeep(TypeError):
    """A value that would not come back as it is. The text names its place and the remedy."""


@dataclass(frozen=True)
class Form:
    """The plain form of a value."""

    kind: str
    """A key of KINDS."""
    main: Any = None
    """The content. Its tensors have the names that those of the value have."""
    more: Any = None
    """What else the value needs, as plain values."""


def form_of(value: Any) -> Form | None:
    """Return the form of a value that is not plain; None: its type is not kept."""
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return Form("torch", more=str(value))
    if isinstance(value, enum.Enum):
        is_named = value.name in type(value).__members__
        return Form("enum", None if is_named else value.value,
                    [name_of(type(value)), value.name if is_named else None])
    if is_named_tuple(value):
        return Form("named tuple", tuple(value), name_of(type(value)))
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return _form_of_numpy(value)
    take = _FORMS.get(type(value))
    return take(value) if take else None


def _whole(value: int) -> Form:
    return Form("int", more=hex(value))


def _form_of_bytes(value: bytes | bytearray) -> Form | None:
    text = base64.b64encode(value).decode()
    return Form(type(value).__name__, more=text) if len(value) <= MOST_BYTES else None


def factory_of(value: defaultdict[Any, Any]) -> str | None:
    """Return the name of what a defaultdict makes; "": nothing; None: it is not in FACTORIES."""
    if (factory := value.default_factory) is None:
        return ""
    name = str(getattr(factory, "__name__", ""))
    return name if FACTORIES.get(name) is factory else None


def _defaultdict(value: defaultdict[Any, Any]) -> Form | None:
    name = factory_of(value)
    return None if name is None else Form("defaultdict", dict(value), name or None)


def _form_of_numpy(value: Any) -> Form | None:
    array, kind = numpy.asarray(value), value.dtype
    is_scalar = isinstance(value, numpy.generic)
    if not is_scalar and type(value) is not numpy.ndarray:
        return None  # a matrix, a masked array, a file in memory
    if kind.hasobject or kind.char in "gG" or kind.itemsize == 0:
        return None  # objects; a long double has bytes without a meaning
    described = npy.dtype_to_descr(kind)
    if npy.descr_to_dtype(described) != kind or kind.metadata:
        return None
    flags = array.flags
    order: Literal["C", "F"] = "F" if flags.f_contiguous and not flags.c_contiguous else "C"
    flat = numpy.array(array.ravel(order), copy=True).view(numpy.uint8)
    return Form("numpy", torch.from_numpy(flat), {
        "dtype": described, "shape": list(array.shape), "order": order, "scalar": is_scalar})


_FORMS: dict[type, Callable[[Any], Form | None]] = {
    int: _whole,
    complex: lambda value: Form("complex", more=[value.real, value.imag]),
    bytes: _form_of_bytes,
    bytearray: _form_of_bytes,
    range: lambda value: Form("range", more=[value.start, value.stop, value.step]),
    slice: lambda value: Form("slice", [value.start, value.stop, value.step]),
    set: lambda value: Form("set", list(value)),
    frozenset: lambda value: Form("frozenset", list(value)),
    deque: lambda value: Form("deque", list(value), value.maxlen),
    # nn.Module.state_dict() has an attribute, _metadata
    OrderedDict: lambda value: Form("OrderedDict", dict(value), dict(vars(value)) or None),
    Counter: lambda value: None if vars(value) else Form("Counter", dict(value)),
    defaultdict: _defaultdict,
    torch.Size: lambda value: Form("torch.Size", list(value)),
    torch.device: lambda value: Form("torch.device", more=str(value)),
}


# --- tensors ------------------------------------------------------------------------------------

def tensor_form(value: torch.Tensor) -> Form | None:
    """Return the form of a tensor that is more than its bytes; None: its bytes are all. The caller
    has asked `tensor_refusal`."""
    if type(value) is torch.Tensor and not value.requires_grad and value.is_contiguous():
        return None  # nearly all: an optimizer has two or three for each parameter
    more: dict[str, Any] = {}
    if value.requires_grad:
        more["grad"] = True
    if not value.is_contiguous() and _is_dense(value):
        more["strides"] = list(value.stride())
    is_parameter = type(value) is torch.nn.Parameter
    if not more and not is_parameter:
        return None
    return Form("Parameter" if is_parameter else "Tensor", plain_tensor(value), more)


def plain_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose bytes are its values, without its class and its gradient."""
    plain = value.detach()
    if type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    return plain.resolve_conj().resolve_neg() if plain.is_conj() or plain.is_neg() else plain


def _is_dense(value: torch.Tensor) -> bool:
    """Return whether the elements have no gaps and no overlaps: only their order is another."""
    expected = 1
    for stride, side in sorted(zip(value.stride(), value.shape, strict=True)):
        if side != 1 and stride != expected:
            return False
        expected *= side
    return True


def tensor_refusal(value: torch.Tensor) -> str:
    """Return what a tensor is that cannot be kept, and the remedy; "" if it can be kept."""
    kind = type(value)
    if kind not in (torch.Tensor, torch.nn.Parameter):
        return (f"a {kind.__name__}: a subclass of torch.Tensor. Keep the plain tensors that it is "
                f"made of")
    if found := storage_refusal(value):
        return found
    if value.requires_grad and not value.is_leaf:
        return "a tensor with a graph, which would be lost. Keep tensor.detach()"
    return ""


def storage_refusal(value: torch.Tensor) -> str:
    """Return what a tensor is whose bytes cannot be read and written, and the remedy; "" if they
    can."""
    if value.is_quantized:
        return (f"a quantized tensor ({value.dtype}). Keep tensor.int_repr(), with its scale and "
                f"zero point")
    if value.is_nested:
        return "a nested tensor. Keep its parts (tensor.unbind()), or a padded tensor"
    if value.layout != torch.strided:
        return (f"a Tensor of the layout {value.layout}. Keep its indices and values, or "
                f"tensor.to_dense()")
    if value.is_meta:
        return "a tensor on the device meta, which has no values. Keep one that has values"
    if not _has_bytes(value.dtype):
        return (f"a tensor of {value.dtype}, which torch {torch.__version__} cannot copy. Keep its "
                f"bytes in a tensor of torch.uint8")
    return ""


@cache
def _has_bytes(dtype: torch.dtype) -> bool:
    """Return whether torch copies values of this type. It has names for more types."""
    try:
        made = torch.zeros(16, dtype=torch.uint8).view(dtype)
        return made.clone().view(torch.uint8).numel() == 16
    except (NotImplementedError, RuntimeError):
        return False


# --- back ---------------------------------------------------------------------------------------

def build(form: Form, classes: Mapping[str, type] | None) -> Any:
    """Return the value of a form. `classes` None: nobody goes on with it, so it may be a plain one.

    Raises UnknownClass; for a form that `form_of` cannot have made, other exceptions.
    """
    return KINDS[form.kind](form.main, form.more, classes)


class UnknownClass(LookupError):
    """No object of this process had held a value of this class when the loop began."""


def _class(name: str, classes: Mapping[str, type]) -> Any:
    if name not in classes:
        raise UnknownClass(
            f"it holds a {str(name)[:80]}, and no object in the state of this process had one when "
            f"the loop began")
    return classes[name]


def _enum(main: Any, more: Any, classes: Mapping[str, type] | None) -> Any:
    name, member = more
    if classes is None:
        return main if member is None else str(member)
    kind = _class(str(name), classes)
    return kind(main) if member is None else kind[member]


def _tensor(main: torch.Tensor, more: Any, classes: Any) -> torch.Tensor:
    if not isinstance(main, torch.Tensor):
        raise TypeError("it is no tensor")
    if strides := more.get("strides"):
        if not _is_dense(made := torch.empty_strided(main.shape, strides, dtype=main.dtype,
                                                     device=main.device)):
            raise ValueError("strides with gaps")
        main = made.copy_(main)
    return main.requires_grad_() if more.get("grad") else main


def _numpy(main: torch.Tensor, more: Any, classes: Any) -> Any:
    shape, kind = [int(side) for side in more["shape"]], npy.descr_to_dtype(more["dtype"])
    if kind.hasobject or min(shape, default=0) < 0:
        raise ValueError("an array of objects, or an impossible shape")
    if main.dtype != torch.uint8 or main.numel() != math.prod(shape) * kind.itemsize:
        raise ValueError("an array of another size than its bytes have")
    if main.device.type == "meta":  # it has no bytes yet: of the right type, and without memory
        empty = numpy.broadcast_to(numpy.zeros((), kind), shape)
        return empty[()] if more["scalar"] else empty
    data = bytearray(main.numpy().tobytes())
    made = numpy.frombuffer(data, dtype=kind) if data else numpy.empty(0, dtype=kind)
    made = made.reshape(shape, order=more["order"])
    return made[()] if more["scalar"] else made


def _ordered(main: Any, more: Any, classes: Any) -> OrderedDict[Any, Any]:
    made = OrderedDict(main)
    vars(made).update(more or {})
    return made


KINDS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "int": lambda main, more, _: int(more, 16),
    "complex": lambda main, more, _: complex(*map(float, more)),
    "bytes": lambda main, more, _: base64.b64decode(more, validate=True),
    "bytearray": lambda main, more, _: bytearray(base64.b64decode(more, validate=True)),
    "range": lambda main, more, _: range(*more),
    "slice": lambda main, more, _: slice(*main),
    "set": lambda main, more, _: set(main),
    "frozenset": lambda main, more, _: frozenset(main),
    "deque": lambda main, more, _: deque(list(main), more),
    "OrderedDict": _ordered,
    "Counter": lambda main, more, _: Counter(dict(main)),
    "defaultdict": lambda main, more, _: defaultdict(more and FACTORIES[more], dict(main)),
    "torch": lambda main, more, _: OF_TORCH[more],
    "torch.Size": lambda main, more, _: torch.Size(main),
    "torch.device": lambda main, more, _: torch.device(more),
    "Tensor": _tensor,
    "Parameter": lambda main, more, _: torch.nn.Parameter(
        _tensor(main, {**more, "grad": False}, None), requires_grad=bool(more.get("grad"))),
    "numpy": _numpy,
    "named tuple": lambda main, more, classes: (
        tuple(main) if classes is None else _class(str(more), classes)._make(main)),
    "enum": _enum,
}
"""What each kind is built of: its content, what else it needs, and the classes of this process."""
SETS = ("set", "frozenset")


# --- classes and refusals -----------------------------------------------------------------------

def is_named_tuple(value: Any) -> bool:
    """Return whether a value is a named tuple that holds its fields alone."""
    kind = type(value)
    return (isinstance(value, tuple) and kind is not tuple and tuple in kind.__bases__
            and isinstance(getattr(kind, "_fields", None), tuple) and hasattr(kind, "_make")
            and not hasattr(value, "__dict__"))


def name_of(kind: type) -> str:
    """Return the name by which a class of the user's is found again among those that are held."""
    return f"{kind.__module__}.{kind.__qualname__}"


def refusal(value: Any) -> str:
    """Return what a value is whose type is not kept, and the remedy."""
    kind = type(value)
    base = next((one.__name__ for one in kind.__mro__[1:] if one in (*SCALARS, *_FORMS, list, dict,
                                                                     tuple, numpy.ndarray)), "")
    if isinstance(value, defaultdict):
        return (f"a {kind.__name__} whose default_factory is no builtin type. Use one of "
                f"{', '.join(FACTORIES)}")
    if isinstance(value, (bytes, bytearray)):
        return (f"a {kind.__name__} of {len(value)} bytes. Keep more than {MOST_BYTES} bytes in a "
                f"tensor: torch.frombuffer(…, dtype=torch.uint8)")
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return (f"a {kind.__name__} of {value.dtype}. Use an array without objects, of the class "
                f"numpy.ndarray")
    if is_dataclass(value):
        return f"a {kind.__name__}: a dataclass. Keep dataclasses.asdict(…), or its fields"
    if isinstance(value, torch.Generator):
        return "a torch.Generator. Keep generator.get_state()"
    if isinstance(value, random.Random):
        return f"a {kind.__name__}. Keep its getstate()"
    if base:
        return f"a {kind.__name__}: a subclass of {base}. Keep the {base} itself"
    if hasattr(value, "state_dict"):
        return f"a {kind.__name__}. Keep its state_dict()"
    return f"a {kind.__name__}. Keep the numbers, texts and tensors that it is made of"


def mapped(value: Any, change: Callable[[Any, Any], Any], key: Any = None) -> Any:
    """Return a value with its parts changed, in containers of the same types.

    `change` gets what is no container, and the key of the innermost dict that it is in.
    """
    if isinstance(value, dict):
        whole = copy.copy(value)
        for name, one in value.items():
            whole[name] = mapped(one, change, name)
        return whole
    if isinstance(value, (list, deque)):
        parts = copy.copy(value)
        for number, one in enumerate(value):
            parts[number] = mapped(one, change, key)
        return parts
    if isinstance(value, tuple):
        made = [mapped(one, change, key) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return change(value, key)


def as_built(mine: Any, theirs: Any) -> Any:
    """Return a received value with its tensors on the devices that they have here.

    Nothing of `mine` is changed. Version 0.1 kept a Counter (MultiStepLR's milestones) as a dict,
    and a named tuple as a tuple: these get the types that they have here. A part that needs no
    change stays the same object.
    """
    if isinstance(mine, torch.Tensor):
        return theirs.to(mine.device) if isinstance(theirs, torch.Tensor) else theirs
    if isinstance(mine, dict) and isinstance(theirs, dict):
        found = {key: as_built(mine.get(key), value) for key, value in theirs.items()}
        source = mine if type(theirs) is dict else theirs
        if type(source) is type(theirs) and all(found[key] is theirs[key] for key in theirs):
            return theirs
        whole = copy.copy(source)
        whole.clear()
        whole.update(found)
        return whole
    if not isinstance(mine, (list, tuple)) or not isinstance(theirs, (list, tuple)):
        return theirs
    if len(mine) != len(theirs):
        return theirs
    parts = [as_built(*pair) for pair in zip(mine, theirs, strict=True)]
    kind = type(mine) if isinstance(mine, type(theirs)) else type(theirs)
    if kind is type(theirs) and all(map(operator.is_, parts, theirs)):
        return theirs
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
