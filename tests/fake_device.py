"""A device for tests, on the CPU: it counts what leaves it, and copies as late as it may.

state.packed() → on_device → tensors of the device "privateuseone", whose module is a `FakeDevice`

What always holds:
1. Kernels run at once. A copy to the host that is started on a stream for copies reads its source
   only when somebody waits for it: the host, or the stream on which kernels run.
2. A copy that nobody waits for is never made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.values.layout import Packed

NAME = "privateuseone"


class FakeDevice:
    """In the place of torch.cuda: `torch.get_device_module` returns it."""

    def __init__(self) -> None:
        self.left: list[int] = []
        """The bytes of each copy that has left the device."""
        self.made: list[int] = []
        """The bytes of each new tensor on the device."""
        self.waits: list[str] = []
        """Who has waited: "host", or "kernels" (the stream on which kernels run)."""
        self.calls = 0
        """How often the host has started copies to it; many in one call count once."""
        self.error: RuntimeError | None = None
        """What it raises from now on."""
        self._now = threading.local()

    @property
    def started(self) -> Stream | None:
        """The stream for copies on which this thread starts work now."""
        return getattr(self._now, "stream", None)

    def current_stream(self, device: Any = None) -> Kernels:
        return Kernels(self)

    def Stream(self, device: Any = None) -> Stream:  # noqa: N802 (torch's name)
        return Stream(self)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._now.stream = self.started, stream
        yield
        self._now.stream = before

    def synchronize(self, device: Any = None) -> None:
        self.waits.append("host")

    def set_device(self, device: Any) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass  # torch.manual_seed calls it

    def _is_in_bad_fork(self) -> bool:
        return False


def fake_device() -> FakeDevice:
    """Return the fake device of this process, on which nothing was done. (torch keeps the module of
    a device for good.)"""
    if not hasattr(torch, NAME):
        setattr(torch, NAME, FakeDevice())
    device: FakeDevice = getattr(torch, NAME)
    device.error, device.calls = None, 0
    for noted in (device.left, device.made, device.waits):
        noted.clear()  # type: ignore[attr-defined]
    return device


class Kernels:
    """The stream on which kernels run."""

    def __init__(self, device: FakeDevice):
        self._device = device

    def query(self) -> bool:
        if self._device.error:
            raise self._device.error
        return True

    def wait_event(self, event: Event) -> None:
        self._device.waits.append("kernels")
        event.finish()


class Stream:
    """A stream for copies."""

    def __init__(self, device: FakeDevice):
        self.device, self.waiting = device, list[Callable[[], None]]()

    def wait_stream(self, kernels: Kernels) -> None:
        pass  # they have run

    def record_event(self) -> Event:
        waiting, self.waiting = self.waiting, []
        return Event(self.device, waiting)


class Event:
    def __init__(self, device: FakeDevice, waiting: list[Callable[[], None]]):
        self._device, self._waiting, self._lock = device, waiting, threading.Lock()

    def synchronize(self) -> None:
        self._device.waits.append("host")
        self.finish()

    def finish(self) -> None:
        with self._lock:
            while self._waiting:
                self._waiting.pop(0)()


class DeviceTensor(torch.Tensor):
    """A tensor of the fake device. It shares the memory of `inner`, which is on the CPU."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: FakeDevice) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=f"{NAME}:0")
        made.inner, made.on = inner, device
        return made  # type: ignore[no-any-return]

    inner: torch.Tensor
    on: FakeDevice

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = next(arg.on for arg in tree_leaves(args) if isinstance(arg, cls))
        inner = tree_map(lambda arg: arg.inner if isinstance(arg, cls) else arg, args)
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name == "_foreach_copy_":
            device.calls += 1
            for target, source in zip(*args[:2], strict=True):
                if isinstance(source, cls):
                    device_copy(device, target, source.inner, *args[2:])
                else:
                    target.copy_(source)
            return None
        if name == "cat" and device.started:  # a kernel on the stream for copies
            made = torch.empty(sum(one.shape[0] for one in inner[0]), dtype=inner[0][0].dtype)
            device.made.append(made.nbytes)
            device.started.waiting.append(lambda: made.copy_(torch.cat(inner[0])))
            return cls(made, device)
        if name == "_to_copy":
            device.left.append(inner[0].nbytes)
            return func(*inner, **kwargs)
        if name == "copy_" and not isinstance(args[0], cls):
            device.calls += 1
            return device_copy(device, args[0], inner[1], *args[2:])
        if name == "clone":
            device.made.append(inner[0].nbytes)
        return tree_map(lambda out: cls(out, device) if isinstance(out, torch.Tensor) else out,
                        func(*inner, **kwargs))


def device_copy(device: FakeDevice, target: torch.Tensor, source: torch.Tensor,
                is_beside: bool = False) -> torch.Tensor:
    """Copy to the host: at once, or when somebody waits for it."""
    def copy() -> None:
        device.left.append(source.nbytes)
        target.copy_(source)

    if is_beside and device.started:
        device.started.waiting.append(copy)
    else:
        copy()
    return target


class OnDevice(LiveState):
    """A live state whose tensors of one dimension or more are on a fake device."""

    device: FakeDevice

    def packed(self, *, learns: bool = False, absent: Mapping[str, str] | None = None,
               entries: Any = None) -> Packed:
        packed = super().packed(learns=learns, absent=absent, entries=entries)
        return replace(packed, tensors=[DeviceTensor(one, self.device) if one.ndim else one
                                        for one in packed.tensors])
