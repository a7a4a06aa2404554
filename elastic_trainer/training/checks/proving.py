"""Build the proof that this worker has the run's dataset and program, in its warm-up.

job, dataset, first micro-batch → here → proof (wire/proof.py) → driver, checkpoint, event log

What always holds:
1. Which samples are drawn follows from the run's seed and the length of the dataset. They are few,
   whatever the dataset is: a sample may take a second.
2. Modules are described as the script has built them, before the first forward pass: a pass may
   change an attribute.
3. A field that differs between two draws of a sample in this process is random by intent. It is
   left out of the proof, in all samples, and a remark says so.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
import random
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch

from elastic_trainer.config import Launch
from elastic_trainer.data.index import Index
from elastic_trainer.data.leaves import leaves, steady
from elastic_trainer.data.loader import MOST_WRAPPED
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.values.module_attributes import OWN, is_namespace
from elastic_trainer.state.values.names import named_buffers, named_parameters, plain
from elastic_trainer.state.values.plain_values import is_plain
from elastic_trainer.state.values.supported import some
from elastic_trainer.training.checks.beside import Beside
from elastic_trainer.training.job.job import Job
from elastic_trainer.training.job.settings import CONFIGURATION, PROOF, Remark
from elastic_trainer.wire.proof import Leaf, Proof, Values
from elastic_trainer.world.replicas import fingerprint

SAMPLES = 4
"""How many samples are drawn, each twice."""
MOST_NUMBERS = 16
"""The samples of the first micro-batch are named if they are at most as many."""
MOST_ENTRIES = 400
"""Of a table. The entries after these are taken together: a proof is sent and stored."""
MOST_CHARACTERS = 100
"""Of a fact in a table. A longer one is a digest."""
OTHERS = "(the others)"


class Proving:
    def __init__(self, job: Job, state: LiveState, beside: Beside):
        self.job, self.state, self.beside = job, state, beside
        describe(job)
        self._batch: Values = {}
        self._sum = 0
        self._numbers: tuple[int, ...] = ()

    def note_batch(self, batch: Any, numbers: list[int]) -> None:
        """Take the batch of the first micro-batch, each time that it is read."""
        found = fingerprint(batch)
        if not self._sum:
            self._batch, self._sum = leaves(batch), found
            self._numbers = tuple(numbers) if len(numbers) <= MOST_NUMBERS else ()
        elif found != self._sum:
            self._batch = steady(self._batch, leaves(batch))

    def proof(self, weights: int, machine: int) -> Proof:
        """Draw the samples, and return the proof. Raises what the dataset raises."""
        job, dataset = self.job, self.job.dataset
        numbers = chosen(job.schedule.seed, len(dataset))
        reader = job.readers.training
        drawn = {str(number): reader.drawn(number, numbers[place + 1:])
                 for place, number in enumerate(numbers)}
        unsteady = {path for values in (*drawn.values(), self._batch)
                    for path, leaf in values.items() if leaf is None}
        known = self.state.settings.items()
        options = {key: value for key, value in (*self.state.identity.items(), *known)
                   if key not in (CONFIGURATION, PROOF) and not key.startswith("optimizer")}
        return Proof(
            length=len(dataset), index=index_of(dataset), numbers=self._numbers,
            samples={number: _without(values, unsteady) for number, values in drawn.items()},
            batch=_without(self._batch, unsteady), weights=weights, machine=machine,
            options=_table(options), tensors=job.built["tensors"], modules=job.built["modules"],
            optimizer=_table(_optimizer_of(job, self.state.settings)),
            beside=_table({name: described(module) for name, module in self.beside.modules().items()
                           }) if self.beside.is_sought else None,
            hash_seed=Launch.from_environment().hash_seed)


def chosen(seed: int, length: int) -> list[int]:
    """Return the samples that each worker of a run draws."""
    return random.Random(f"{seed}/{length}").sample(range(length), min(SAMPLES, length))


def _without(values: Values, unsteady: set[str]) -> dict[str, Leaf | None]:
    return {path: None if path in unsteady else leaf for path, leaf in values.items()}


def remarks_on_random(proof: Proof) -> list[Remark]:
    """Remark on fields that are left out of the proof."""
    if not (found := proof.random):
        return []
    names = [name or "(the sample itself)" for name in found]
    return [Remark(
        "job.samples_random",
        f"a sample of the dataset has other bits when it is drawn again with the same random state "
        f"({some(names)}), so no worker can prove that it has these fields, and the result is not "
        f"the same twice. Draw from the default generators of torch, numpy or random: the trainer "
        f"seeds them for each sample.", {"fields": names})]


# --- the index of files ---------------------------------------------------------------------------

def index_of(dataset: Any) -> str:
    """Return the SHA-256 of the indexes in a dataset, and in the datasets that it wraps; "": it has
    none."""
    sums = [index.sha256 for index in _indexes(dataset, MOST_WRAPPED)]
    return sums[0] if len(sums) == 1 else hashlib.sha256(
        "".join(sums).encode()).hexdigest() if sums else ""


def _indexes(dataset: Any, deepest: int) -> Iterator[Index]:
    if isinstance(index := getattr(dataset, "index", None), Index):
        yield index
    elif deepest:
        inner = getattr(dataset, "datasets", None)
        parts = (inner.values() if isinstance(inner, Mapping) else
                 inner if isinstance(inner, (list, tuple)) else
                 [getattr(dataset, "dataset", None)])
        for part in parts:
            if part is not None:
                yield from _indexes(part, deepest - 1)


# --- the program ----------------------------------------------------------------------------------

def describe(job: Job) -> None:
    if job.built:
        return
    model = job.model
    tensors = {**named_parameters(model), **named_buffers(model)}
    job.built["tensors"] = _table({
        name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for name, tensor in tensors.items()})
    job.built["modules"] = _table({
        plain(name) or "(the model)": described(module) for name, module in model.named_modules()
        if type(module).__name__ != "OptimizedModule"})


def described(module: Any, deepest: int = 3) -> str:
    """Return the class and the plain attributes of a module, or of an object of its settings:
    "Dropout(p=0.1, inplace=False)"."""
    found = ", ".join(f"{name}={text}" for name, value in sorted(vars(module).items())
                      if name not in OWN and (text := _text_of(value, deepest)))
    return f"{type(module).__qualname__}({found})"


def _text_of(value: Any, deepest: int) -> str:
    """Return the text of an attribute that counts in a proof; "": it does not, as a path, which may
    differ from host to host, or the arguments of a command, which may ask for more steps."""
    if is_namespace(value):
        is_left_out = isinstance(value, Namespace) or deepest == 0
        return "" if is_left_out else described(value, deepest - 1)
    if isinstance(value, (complex, torch.dtype)):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    return "" if not is_plain(value) or _has_path(value) else repr(_without_numpy(value))


def _has_path(value: Any) -> bool:
    if isinstance(value, (tuple, list, dict)):
        return any(map(_has_path, (*value, *value.values()) if isinstance(value, dict) else value))
    return isinstance(value, str) and os.path.isabs(value)


def _without_numpy(value: Any) -> Any:
    """Return a plain value without numbers of numpy, whose text follows from its version."""
    if isinstance(value, dict):
        return {key: _without_numpy(one) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map(_without_numpy, value))
    return value.item() if isinstance(value, numpy.generic) else value


def _optimizer_of(job: Job, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return class, options and groups of the optimizer. Parameters stand in their groups by
    name."""
    found = {key: value for key, value in settings.items() if key.startswith("optimizer")}
    names = {id(parameter): name for name, parameter in named_parameters(job.model).items()}
    for number, group in enumerate(job.optimizer.param_groups):
        members = [names.get(id(parameter), "") for parameter in group["params"]]
        found[f"optimizer.groups[{number}].params"] = (
            f"{len(members)} parameters, {_digest(json.dumps(members))}")
    return found


def _table(entries: Mapping[str, Any]) -> dict[str, str]:
    """Return entries as short texts, and the last ones of many together."""
    texts = {str(name): _short(value) for name, value in entries.items()}
    if len(texts) <= MOST_ENTRIES:
        return texts
    pairs = list(texts.items())
    return dict(pairs[:MOST_ENTRIES]) | {
        OTHERS: f"{len(pairs) - MOST_ENTRIES} more, {_digest(json.dumps(pairs[MOST_ENTRIES:]))}"}


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}… ({len(text)} characters, {_digest(text)})"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
