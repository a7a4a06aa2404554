"""Find what of a model, an optimizer and a dataset cannot be used here, and name it at the start.

model, optimizer, dataset → here → ConfigError (loop.py); buffers before and after a forward pass →
here → an error with names

What always holds:
1. Everything here is a pure function of values.
2. What is not refused works as in plain PyTorch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, IterableDataset, default_collate

from elastic_trainer.state.values.forms import storage_refusal

BUFFERS_STAY = (
    "A buffer keeps its name, shape and type during training. Register it in __init__ with its "
    "largest size, or keep it in a plain attribute if it is no part of the state.")
MOST_NAMES = 8
"""The largest number of parameters or buffers that a message names."""


def some(names: Iterable[str]) -> str:
    """Return names for a message: the first ones of many."""
    found = list(names)
    return ", ".join(found[:MOST_NAMES]) + (f" and {len(found) - MOST_NAMES} more"
                                            if len(found) > MOST_NAMES else "")


def parameters_stay(names: Iterable[str]) -> str:
    """Return an error for parameters that the loss, the forward or the backward pass has
    changed."""
    return (
        f"the loss (or forward, or a hook) has changed the parameters {some(names)} itself. "
        "Workers compute different micro-batches, so their weights would differ. The trainer "
        "steps the optimizer. Change weights after the inner loop (with train(): in after_step), "
        "and leave max_norm of embeddings out.")


def span(tensor: torch.Tensor) -> int:
    """Return how many elements lie between a tensor's first and last: fewer than it has if it is
    expanded."""
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def refusal(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Return why this model or optimizer cannot be trained here and what to do; None if it can."""
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    if lazy := [name for name, tensor in (parameters | buffers).items() if is_lazy(tensor)]:
        return (
            f"{some(lazy)} of the model are not initialized (lazy modules), so they have no "
            f"shape. Run one batch through the model before you build the optimizer.")
    if found := [name for name, p in parameters.items() if p.layout != torch.strided]:
        return f"the parameters {some(found)} are sparse. Use dense parameters."
    if found := [name for name, p in parameters.items() if p.numel() > span(p)]:
        return (f"the parameters {some(found)} are expanded: elements of them share one memory, so "
                f"no value can be written to them. Use parameter.contiguous().")
    if why := refused_tensors(parameters, buffers):
        return why
    if found := [name for name, p in parameters.items() if p.is_complex()]:
        return (f"the parameters {some(found)} are complex. Keep their real view as the parameter "
                f"(torch.view_as_real), and use torch.view_as_complex in forward.")
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        return (f"the optimizer is {kind}, but gradients are summed densely. Use Adam, and "
                f"embeddings with sparse=False.")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return (
            f"the optimizer is {kind}, whose step evaluates the loss several times (closure), but "
            f"a step here is one gradient of all workers. Use an optimizer whose step "
            f"needs no closure.")
    return None


def refused_tensors(parameters: Mapping[str, torch.Tensor],
                    buffers: Mapping[str, torch.Tensor]) -> str | None:
    """Return which parameters and buffers could not be kept or summed, and what to do; None if all
    can."""
    if found := [name for name, b in buffers.items() if b.layout != torch.strided]:
        return (
            f"the buffers {some(found)} are sparse. Keep their indices and values as dense "
            f"buffers, or as plain attributes if they never change.")
    for what, tensors in (("parameter", parameters), ("buffer", buffers)):
        for name, tensor in tensors.items():
            kind = type(tensor)
            if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                return (f"the {what} {name} is a {kind.__name__}, whose values lie in other "
                        f"tensors. Use the plain tensors that it is made of.")
            if why := storage_refusal(tensor):
                return f"the {what} {name} is {why}."
    for name, buffer in buffers.items():
        if not _has_arithmetic(buffer.dtype):
            return (
                f"the buffer {name} is of {buffer.dtype}, which torch {torch.__version__} cannot "
                f"add, so there is no mean over micro-batches. Keep it as a parameter with "
                f"requires_grad=False, or its bytes in a buffer of torch.uint8 (view them in "
                f"forward).")
    return None


@cache
def _has_arithmetic(dtype: torch.dtype) -> bool:
    """Return whether torch has what the statistics of a step need for values of this type."""
    if dtype == torch.bool or dtype.is_complex:
        return True
    try:
        values = torch.zeros(2, dtype=dtype)
        torch.where(values == values, 0, values - values).float()
        torch.add(values, values)
        if values.is_floating_point():
            torch._foreach_norm([values], float("inf"))
    except (NotImplementedError, RuntimeError):
        return False
    return True


STREAMS = {
    "datasets": "Load it without streaming=True, or use ParquetFiles(urls) or TarShards(urls) with "
                "the files that it streams.",
    "webdataset": "Use TarShards(urls) with the same archives.",
    "streaming": "Use TarShards(urls) or ParquetFiles(urls) with the same samples.",
}
"""What to use instead of the streams of other packages."""


def refused_dataset(dataset: Any) -> str | None:
    """Return why samples cannot be read from this by their numbers, and what to do; None if they
    can."""
    if isinstance(dataset, DataLoader):
        if why := refused_dataset(dataset.dataset):
            return f"the dataset is a DataLoader. {why[0].upper()}{why[1:]}"
        collate = ("" if dataset.collate_fn is default_collate
                   else ", collate=loader.collate_fn")
        return (
            f"the dataset is a DataLoader, but the trainer makes the batches and their order: they "
            f"must not depend on the number of workers. Give loader.dataset as the dataset, "
            f"global_batch={dataset.batch_size or '…'} (of all workers together){collate}.")
    kind = type(dataset).__name__
    if stream := STREAMS.get(type(dataset).__module__.split(".")[0]):
        if not hasattr(dataset, "__getitem__") or isinstance(dataset, IterableDataset):
            return (f"the dataset {kind} is a stream, whose samples have no numbers, so a step "
                    f"could not be done again. {stream}")
    if isinstance(dataset, IterableDataset):
        return (
            f"the dataset {kind} is an IterableDataset, whose samples have no numbers, so a step "
            f"could not be done again. Give a map-style dataset, with len(dataset) and dataset[i]; "
            f"list(dataset) is one, if it fits into memory.")
    has_items = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    if not (has_items and hasattr(dataset, "__len__")):
        return (f"the dataset {kind} has no {'len(dataset)' if has_items else 'dataset[i]'}. Give "
                f"an object that has both len(dataset) and dataset[i].")
    return None


def moved_buffers(before: Mapping[str, torch.Tensor],
                  after: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the buffers that are new, gone, or have another shape or type than before a forward
    pass, by name."""
    found = {name: f"{name} (new)" for name in after if name not in before}
    for name, was in before.items():
        now = after.get(name)
        if now is None:
            found[name] = f"{name} (gone)"
        elif now.shape != was.shape:
            found[name] = f"{name} (shape {tuple(was.shape)}, now {tuple(now.shape)})"
        elif now.dtype != was.dtype:
            found[name] = f"{name} ({was.dtype}, now {now.dtype})"
    return found
