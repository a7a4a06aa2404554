"""The live state of one worker: model, optimizer, scaler, and the number of the last finished step.

step in flight → here (begun → prepared → committed) → next step; newcomer ← here; checkpoint ← here

names.py (parameters), forward.py (buffers, modes, extra state), module_attributes.py,
optimizer_values.py and frozen.py keep the parts.

What always holds:
1. Nothing that outlives a step changes before `apply`; in `apply` everything changes together.
2. `prepared == committed + 1` only while this worker holds the reduced gradient of step `committed`
   and knows that all workers do: the vote has started, and may not have ended.
3. A survivor never receives state. Only a worker without state (`has_state` is False) does: all of
   it, or nothing.
4. No copy per step, and no pickle: `TorchState.save` of Horovod deep-copies, `sync` steps a fresh
   optimizer and leaves a newcomer with other weights than it sent, `restore` aliases (F6, F7, F8;
   horovod/torch/elastic/state.py, 0.28.1).

What it does not do: stand in the place of `TorchState` in a script. horovod_style/state.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from elastic_trainer.renamed import present
from elastic_trainer.state.device_copies import Copying
from elastic_trainer.state.findings import Findings
from elastic_trainer.state.forward import ExtraState, InFlight, ModelBuffers, Modes
from elastic_trainer.state.frozen import REMEDY, FrozenContent, differs
from elastic_trainer.state.kinds import check_kinds
from elastic_trainer.state.rates import Rates
from elastic_trainer.state.shards import Entries, Shards, with_entries
from elastic_trainer.state.values.layout import (
    MACHINE_BYTES,
    Bare,
    LayoutError,
    Packed,
    named_tensors,
    outline,
    pack,
    unpack,
)
from elastic_trainer.state.values.module_attributes import ModuleAttributes
from elastic_trainer.state.values.names import ModelParameters, with_plain_names
from elastic_trainer.state.values.optimizer_values import OptimizerValues

MASTERS = "bf16-master"
"""The precision whose weights have masters in the optimizer's state (training/job/masters.py)."""


class LiveState:
    """Model, optimizer and scaler of this worker, and its place in the run."""

    shards: Shards | None = None
    """What this worker holds of the optimizer's state; None: all of it."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *,
                 scaler: torch.amp.GradScaler | None = None, scheduler: LRScheduler | None = None,
                 identity: dict[str, Any] | None = None,
                 optimizers: Mapping[str, torch.optim.Optimizer] | None = None):
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.frozen = FrozenContent()
        self.identity = identity or {}
        """What decides samples and bits of a step. Values of another job are refused."""
        self.parameters = ModelParameters(model)
        self.model_buffers, self.modes = ModelBuffers(model), Modes(model)
        self.optimizer_values = OptimizerValues(model, optimizer, optimizers)
        self.rates = Rates(optimizer, scheduler)
        self.extra_state, self.attributes = ExtraState(model), ModuleAttributes(model)
        self._passing: list[InFlight] = [self.model_buffers, self.modes, self.extra_state]
        """What a forward pass changes."""
        self._parts = [*self._passing, self.attributes]
        """What a step in flight may have changed."""
        self.extras: dict[str, Any] = {}
        """What the user has registered: objects with state_dict and load_state_dict, by name."""
        self.attributes.others.registered = lambda: self.extras.values()
        self.classes = dict(self.attributes.others.classes)  # by name (forms.py)
        self.settings: dict[str, Any] = {}
        """What the job was asked for, as JSON values, for the worker that resumes the run."""
        self.committed = 0
        """Steps that are finished: the number of the step to do next."""
        self.phase, self.phases = 0, 1
        """The phase of that step to do next, and how many a step has (optimizers.py)."""
        self.prepared = self.begun = 0
        """Ticks begun: one more than `ticks` while a phase is in flight, and after it broke."""
        self.has_state = False
        """True once this worker holds the run's values."""
        self.received = -1
        """The ticks at which it received them from workers that train, or its former process."""
        self.is_applying = False
        """True while parameters may be half changed: then its values are worth nothing."""
        self.copying = Copying()
        """The copy of parameters and optimizer that a device may still make."""
        self.lineage = 0
        """The number under which this attempt publishes checkpoints (commit_log.py); 0: none."""
        self.loss = float("nan")
        self.samples = 0
        self.last_vote: tuple[int, ...] = (0, 0, 0, 0)
        """Of the last finished step, as the vote has summed it: samples, their digest, rank 0's
        clock of the run in milliseconds, how many workers asked to finish the run."""
        self.clocks_ms = (0, 0)
        """The run's clock at the end of the last two steps."""
        self.findings = Findings()
        self.run_id = ""
        """What loggers know the run by, in all its attempts; "": it had no loggers."""
        self.facts: Callable[[], dict[str, Any]] = dict
        """Returns what a checkpoint's record says of this state (checkpoint.is_best)."""

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The model's buffers by name, shared ones once."""
        return self.model_buffers.named

    @property
    def ticks(self) -> int:
        """Phases that are finished, which count a worker's progress; steps if there is one."""
        return self.committed * self.phases + self.phase

    @property
    def is_prepared(self) -> bool:
        """True while this worker holds the reduced gradient of the phase in flight."""
        return self.prepared > self.ticks

    @property
    def is_in_flight(self) -> bool:
        """True while a phase is in flight, and after it broke."""
        return self.begun > self.ticks

    @property
    def is_finished_early(self) -> bool:
        """True if the user's code on any worker has asked to finish the run after the last step."""
        return self.phase == 0 and self.last_vote[3] > 0

    # --- a step's life ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Keep what a forward pass changes (BatchNorm's buffers, modes), so that `restore` can put
        it back."""
        self.begun = self.ticks + 1
        for part in self._parts:
            part.begin()

    def restore(self) -> None:
        """Put back what micro-batches have changed, when a step broke."""
        self.reopen()
        self.attributes.reset()

    def reopen(self) -> None:
        """Put back what a forward pass has changed, but for ModuleAttributes."""
        for part in self._passing:
            part.reset()

    def forget(self) -> None:
        """Forget the step in flight, and the values of its begin."""
        self.begun = self.ticks
        self._forget_parts()

    def _forget_parts(self) -> None:
        for part in self._parts:
            part.forget()

    def in_flight(self) -> dict[str, Any]:
        """Return what a successor of this process needs beside `values`."""
        return {"begun": self.begun, "prepared": self.prepared, "clocks_ms": self.clocks_ms,
                "parts": [part.in_flight() for part in self._parts]}

    def take_up(self, values: dict[str, Any], in_flight: dict[str, Any]) -> None:
        """Go on where the former process of this worker was."""
        self.load(values)
        self.received = self.ticks  # as a newcomer: what is not in the state was lost
        self.begun, self.prepared = in_flight["begun"], in_flight["prepared"]
        before_ms, now_ms = in_flight["clocks_ms"]
        self.clocks_ms = (before_ms, now_ms)
        for part, value in zip(self._parts, in_flight["parts"], strict=True):
            part.take_up(value)

    def begin_applying(self) -> None:
        """Let parameters and optimizer change from here on. A copy of them is made before."""
        self.copying.hold_writes()
        self.copying, self.is_applying = Copying(), True

    def prepare(self) -> None:
        """Note that the reduced gradient of the step in flight is in hand; the vote comes next."""
        self.prepared = self.ticks + 1

    def commit(self, samples: int = 0, digest: int = 0, clock_ms: int = 0,
               finishes: int = 0) -> None:
        """Make the phase in flight final; the last one ends the step."""
        self.phase = (self.phase + 1) % self.phases
        _, _, clock_was, finishes_was = self.last_vote
        # A phase before this one may have asked to finish the run.
        carried = finishes_was if self.phase != 1 % self.phases else 0
        self.last_vote = (samples, digest, max(clock_ms, clock_was), finishes + carried)
        if self.phase == 0:
            self.committed += 1
            self.samples += samples
            self.clocks_ms = (self.clocks_ms[1], self.last_vote[2])
        self.prepared = self.ticks
        self.modes.end()
        self._forget_parts()

    # --- as bytes ---------------------------------------------------------------------------------

    def values(self, absent: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return all that is needed to go on: live tensors and numbers (nothing is copied).
        `absent`: frozen content to be left out, with its digests."""
        parameters, buffers = self.parameters.checked(), self.model_buffers.settled()
        absent = absent or {}
        frozen = {**self.frozen.run, **absent}
        self.attributes.note()
        return {
            "identity": self.identity,
            "step": self.committed,
            **({"phase": self.phase, "clock_ms": self.clocks_ms[1]} if self.phases > 1 else {}),
            "samples": self.samples,
            "loss": self.loss,
            "last_vote": self.last_vote,
            "findings": self.findings.values(),
            "lineage": self.lineage,
            **self.rates.values(),
            "parameters": Bare({n: p for n, p in parameters.items() if n not in absent}),
            "evaluating": self.modes.evaluating(),
            "attributes": self.attributes.changed(),
            **({"other_attributes": others} if (others := self.attributes.others.values()) else {}),
            "trained": [name for name, p in parameters.items() if p.requires_grad],
            "buffers": Bare({n: b for n, b in buffers.named.items() if n not in absent}),
            **({"frozen": frozen} if frozen else {}),
            "aliases": buffers.aliases,
            "left_out": buffers.left_out,
            "optimizer": self.optimizer_values.values({id(p): n for n, p in parameters.items()}),
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "extras": {name: extra.state_dict() for name, extra in self.extras.items()},
            "extra_state": self.extra_state.values(),
            "settings": self.settings,
            **({"run_id": self.run_id} if self.run_id else {}),
        }

    def packed(self, *, learns: bool = False, absent: Mapping[str, str] | None = None,
               entries: Entries | None = None) -> Packed:
        """Return header and tensors, without a copy. `learns`: the classes. `entries` replace what
        this worker holds of what is sharded. Raises CannotKeep."""
        values = with_entries(self.shards, self.values(absent), entries)
        return pack(values, self.classes, learns=learns, lacks=entries is not None)

    def room(self, header: bytes, payload_bytes: int) -> Packed:
        """Return memory for the values that a header describes, to be filled, unpacked and loaded
        once they are whole.

        Weights go where the gradients live: that memory is there, and idle. (New memory was half of
        the time of a restore where the hypervisor gives it page by page.) Raises LayoutError when
        the values are not of this model and optimizer, or when there are not as many bytes.
        """
        outlined = outline(header)
        require_bytes(outlined, payload_bytes)
        values = unpack(replace(outlined, classes=self.classes))
        check_kinds(values)
        values, mine = with_plain_names(values), self.parameters.named()
        require_fit(self, values)
        idle = {id(tensor): mine[name].grad for name, tensor in values["parameters"].items()}
        return Packed(header, [_memory(tensor, idle.get(id(tensor))) if is_needed else tensor
                               for tensor, is_needed in needed_by(self.shards, header, outlined)],
                      self.classes)

    def load(self, values: dict[str, Any]) -> None:
        """Take over all values, or none. Raises LayoutError when they are not of this model and
        optimizer."""
        check_kinds(values)
        values = with_plain_names(values)
        require_fit(self, values)
        if lacking := lacking_of(self, values):
            raise LayoutError(f"{differs(lacking, values['frozen'])}. {REMEDY}")
        # from here on nothing can fail but the memory
        self.copying.hold_writes()
        self.parameters.load(values["parameters"], values.get("trained"))
        self.model_buffers.load(values["buffers"])
        self.frozen.load(values.get("frozen", {}), {*values["parameters"], *values["buffers"]},
                         own_tensors(self, persistent=False))
        if "evaluating" in values:
            self.modes.load(values["evaluating"])
            self.attributes.load(values.get("attributes", {}), values.get("other_attributes", {}))
        self.optimizer_values.load(kept_by(self.shards, values["optimizer"]))
        if self.scaler is not None:
            self.scaler.load_state_dict(values["scaler"])
        for name, extra in self.extras.items():
            extra.load_state_dict(values["extras"][name])
        self.rates.load(values)
        self.settings = dict(values.get("settings", {}))
        self.extra_state.load(values.get("extra_state", {}))
        self.lineage = int(values["lineage"])
        self.run_id = str(values.get("run_id", self.run_id))
        self.committed, self.phase = int(values["step"]), int(values.get("phase", 0))
        self.prepared = self.ticks
        self.samples, self.loss = int(values.get("samples", 0)), float(values["loss"])
        self.last_vote = (*values["last_vote"], 0, 0)[:4]  # version 0.1 has two
        clock_ms = int(values.get("clock_ms", self.last_vote[2]))
        self.clocks_ms = (clock_ms, clock_ms)
        self.findings.load(values.get("findings", {}))
        self.forget()
        self.has_state = True


def own_tensors(state: LiveState, *, persistent: bool = True) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name; only those of a state_dict if `persistent`."""
    buffers = state.model_buffers.settled()
    left_out = set(buffers.left_out) if persistent else ()
    return {name: one for name, one in {**state.parameters.named(), **buffers.named}.items()
            if name not in left_out}


def lacking_of(state: LiveState, values: dict[str, Any]) -> dict[str, str]:
    """Return what a worker lacks of the frozen content that values leave out, with what it has in
    its place."""
    return state.frozen.lacking(absent_from(values), own_tensors(state, persistent=False))


def absent_from(values: dict[str, Any]) -> dict[str, str]:
    """Return the frozen content that values leave out, with its digests."""
    return {name: digest for name, digest in values.get("frozen", {}).items()
            if name not in values["parameters"] and name not in values["buffers"]}


def begin_as_built(state: LiveState, rank: int) -> None:
    """Begin without a checkpoint: rank 0 has the state that it was built with. Raises RuntimeError
    if it is not as built any more."""
    if rank == 0 and (state.ticks or (state.shards and state.shards.is_placed)):
        raise RuntimeError(
            f"the state of step {state.committed} was lost, there is no checkpoint to go back to, "
            f"and this process has changed what its script has built. Start the run again: the "
            f"same command begins it anew.")
    state.has_state = rank == 0
    if state.shards:
        state.shards.hold_as_built(rank)


def is_whole(state: LiveState) -> bool:
    """True if this worker alone holds the run's state, all of it, and none is half changed."""
    is_sound = state.has_state and not state.is_applying
    return is_sound and (state.shards is None or state.shards.is_whole)


def require_bytes(outlined: Packed, payload_bytes: int) -> None:
    """Raise LayoutError unless a header describes this number of bytes, and the machine has it."""
    if outlined.payload_bytes != payload_bytes:
        raise LayoutError(f"there are {payload_bytes} bytes, but the header describes "
                          f"{outlined.payload_bytes}")
    if payload_bytes > MACHINE_BYTES:
        raise LayoutError(f"the header describes {payload_bytes} bytes, and this machine has "
                          f"{MACHINE_BYTES}")


def kept_by(shards: Shards | None, optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return the values of an optimizer without the entries that a worker does not hold."""
    return optimizer if shards is None else {
        **optimizer, "state": shards.kept_of(optimizer["state"])}


def needed_by(shards: Shards | None, header: bytes,
              outlined: Packed) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield each tensor, and whether a worker keeps it: of an optimizer that is sharded, not
    all."""
    if shards is None:
        yield from ((tensor, True) for tensor in outlined.tensors)
    else:
        yield from ((tensor, shards.is_needed(one["name"]))
                    for tensor, one in zip(outlined.tensors, named_tensors(header), strict=True))


def require_fit(state: LiveState, values: dict[str, Any]) -> None:
    """Raise LayoutError when values are not of this job, model and optimizer."""
    if present(values["identity"]) != state.identity:
        raise LayoutError(f"it is of a job with {values['identity']}, but this job has "
                          f"{state.identity}")
    _require_same_masters(values.get("settings", {}), state.settings)
    absent = absent_from(values)
    for kind, mine in (("parameters", state.parameters.named()), ("buffers", state.buffers)):
        _require_same_tensors(kind, values[kind], {
            name: one for name, one in mine.items() if name not in absent})
    state.optimizer_values.require_fit(values["optimizer"])
    if not 0 <= values.get("phase", 0) < state.phases:
        raise LayoutError(f"it stands in phase {values['phase']} of a step, but a step of this "
                          f"job has {state.phases}")
    names = [settings["optimizer"] for settings in (values.get("settings", {}), state.settings)
             if settings]
    if len(set(names)) > 1:
        raise LayoutError(f"the optimizer is {names[0]} there, but {names[1]} in this job")
    if misfit := state.rates.misfit(values):
        raise LayoutError(misfit)
    _require_same_scaler(values["scaler"], state.scaler)
    if (extra := sorted(values.get("extra_state", {}))) != sorted(state.extra_state.modules):
        raise LayoutError(f"the modules' extra state is {extra} there and "
                          f"{sorted(state.extra_state.modules)} in this model")
    if misfit := state.attributes.misfit(values):
        raise LayoutError(misfit)
    if values["extras"].keys() != state.extras.keys():
        raise LayoutError(f"the objects in state are {sorted(values['extras'])} there and "
                          f"{sorted(state.extras)} in this job")


def _require_same_masters(theirs: dict[str, Any], mine: dict[str, Any]) -> None:
    """Raise LayoutError if weights have masters on one side only."""
    was, now = theirs.get("precision", "fp32"), mine.get("precision", "fp32")
    if mine and was != now and MASTERS in (was, now):
        raise LayoutError(
            f"it was written with precision {was!r}, and this job has {now!r}, but only "
            f"{MASTERS!r} keeps masters of the weights. Use precision={was!r}, or give the run "
            f"another name (--run, run_dir)")


def _require_same_tensors(kind: str, theirs: dict[str, torch.Tensor],
                          mine: dict[str, Any]) -> None:
    """Raise LayoutError if names, shapes or types differ."""
    if theirs.keys() != mine.keys():
        wrong = sorted(theirs.keys() ^ mine.keys())[:5]
        raise LayoutError(f"the {kind} are not this model's: {wrong} are in only one of the two")
    for name, tensor in theirs.items():
        if tensor.shape != mine[name].shape or tensor.dtype != mine[name].dtype:
            raise LayoutError(f"{name} is {tuple(tensor.shape)} {tensor.dtype} there, but "
                              f"{tuple(mine[name].shape)} {mine[name].dtype} in this model")


def _require_same_scaler(theirs: dict[str, Any] | None, mine: torch.amp.GradScaler | None) -> None:
    """Raise LayoutError if the values of a gradient scaler are not those of this one."""
    if (theirs is None) != (mine is None):
        raise LayoutError("a gradient scaler is in only one of the two")
    if theirs is not None and mine is not None and theirs.keys() != mine.state_dict().keys():
        raise LayoutError(f"the gradient scaler has {sorted(theirs, key=str)} there")


def _memory(tensor: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """Return memory on the CPU for a tensor: the gradient's if that is possible, else new."""
    if gradient is not None and gradient.is_cpu and gradient.is_contiguous():
        return gradient
    return torch.empty(tensor.shape, dtype=tensor.dtype)
