"""The live state of one worker: model, optimizer, scaler, and the number of the last finished step.

step in flight → here (prepared → committed) → next step; newcomer ← here; checkpoint ← here

What always holds:
1. Nothing that outlives a step changes before `apply`; in `apply` everything changes together.
2. `prepared == committed + 1` only while this worker holds the reduced gradient of step `committed`
   and knows that everybody else does (the vote has been asked for, not necessarily answered).
3. A survivor never receives state. Only a worker without (`has_state` false) does, all of it or
   nothing.
4. No copy per step, and no pickle: `TorchState.save` of Horovod deep-copies, `sync` steps a fresh
   optimizer and leaves a newcomer with other weights than it sent, `restore` aliases (F6, F7, F8;
   horovod/torch/elastic/state.py, 0.28.1).

What it does not do: stand in the place of `TorchState` in a script. training/horovod_state.py does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from elastic_trainer.state.extra_state import ExtraState
from elastic_trainer.state.layout import MACHINE_BYTES, LayoutError, Packed, outline, pack, unpack
from elastic_trainer.state.names import named_buffers, named_parameters, plain, with_plain_names
from elastic_trainer.state.rates import Rates, taken_in_place, tensor_kind


class LiveState:
    """Model, optimizer and scaler of this worker, and where it stands."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *,
                 scaler: torch.amp.GradScaler | None = None, scheduler: LRScheduler | None = None,
                 identity: dict[str, Any] | None = None):
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.identity = identity or {}
        """What decides which samples and which bits a step has. Values of another job are
        refused."""
        self.rates = Rates(optimizer, scheduler)
        self._parameters = list(model.parameters())
        self._group_sizes = [len(group["params"]) for group in optimizer.param_groups]
        self.committed = 0
        """Steps that are finished: the number of the step to do next."""
        self.phase, self.phases = 0, 1
        """The phase of that step to do next, and how many a step has (several.py)."""
        self.prepared = 0
        self.begun = 0
        """Ticks begun: one more than `ticks` while a phase is in flight, and after it broke."""
        self.has_state = False
        """True once this worker holds the run's values (its own from the start, restored, or
        received)."""
        self.is_applying = False
        """True while parameters may be half changed: then this worker's values are worth
        nothing."""
        self.lineage = 0
        """The number under which this attempt publishes checkpoints (commit_log.py); 0: it has
        none."""
        self.extras: dict[str, Any] = {}
        """What the user has registered, by name: objects with state_dict and load_state_dict."""
        self.settings: dict[str, Any] = {}
        """What the job was asked for, as JSON values, for whoever goes on with the run."""
        self.loss = float("nan")
        self.samples = 0
        self.last_vote: tuple[int, ...] = (0, 0, 0, 0)
        """Of the last finished step, as the vote has summed it over all workers: samples, their
        digest, the run's clock in milliseconds (rank 0's), how many workers asked to finish the
        run."""
        self.clocks_ms = (0, 0)
        """The run's clock at the end of the last two steps."""
        self.extra_state = ExtraState(model)
        self._buffers_before: dict[str, torch.Tensor] = {}
        self._modules = list(model.modules())
        self._outlined = self._outline()
        self._modes_before: list[bool] = []
        self.take_buffers()

    def take_buffers(self) -> None:
        """Keep the buffers that the model has now. One that cannot be written to in place gets
        memory of its own."""
        model = self.model
        own_memory: dict[int, torch.Tensor] = {}
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if buffer.numel() > _span(buffer) or buffer.is_conj() or buffer.is_neg():
                owner, _, leaf = name.rpartition(".")
                own_buffer = own_memory.setdefault(
                    id(buffer),
                    buffer.detach().resolve_conj().resolve_neg().contiguous())
                setattr(model.get_submodule(owner), leaf, own_buffer)
        self.buffers = named_buffers(model)
        own = {
            id(tensor): name
            for name, tensor in [*named_parameters(model).items(), *self.buffers.items()]
        }
        exported = {
            plain(name): it
            for name, it in torch.nn.Module.state_dict(model, keep_vars=True).items()
        }
        self.aliases = {
            name: own[id(tensor)]
            for name, tensor in exported.items() if own.get(id(tensor), name) != name
        }
        """The other names that tied parameters and buffers have in `model.state_dict()`."""
        self.left_out = [name for name in own.values() if name not in exported]
        """What is not in it: buffers that are not persistent."""

    @property
    def ticks(self) -> int:
        """Phases that are finished: what a worker's progress is counted in. With one phase:
        steps."""
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
        """True if the user's code has asked to finish the run after the last step, on any
        worker."""
        return self.phase == 0 and self.last_vote[3] > 0

    # --- a step's life ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Keep what a forward pass changes (BatchNorm's buffers, modes), so that `restore` can put
        it back."""
        self.begun = self.ticks + 1
        self._modes_before = [module.training for module in self._modules]
        if self.buffers:
            self._buffers_before = {name: b.detach().clone() for name, b in self.buffers.items()}
        self.extra_state.begin()

    def forget(self) -> None:
        """Forget the step in flight: its begin is not to be gone back to."""
        self.begun, self._buffers_before, self._modes_before = self.ticks, {}, []
        self.extra_state.forget()

    def buffers_before(self) -> dict[str, torch.Tensor]:
        """Return the buffers' values at the step's begin."""
        return self._buffers_before

    def take_up(self, before: dict[str, torch.Tensor]) -> None:
        """Go on with a step in flight whose begin had these buffers."""
        self._buffers_before = before
        self.reset_buffers()

    def adopt_buffers(self) -> None:
        """Bring a buffer that the forward pass has replaced (`self.mean = …`) back into the one
        that is kept."""
        with torch.no_grad():
            for name, replacement in self._put_back_replaced():
                self.buffers[name].copy_(replacement)

    def reset_buffers(self) -> None:
        """Put the buffers back to the step's begin (each shard starts from the same values), and
        the modes.

        A loss that ends with `model.eval()` has its effect from the next step on: not from the next
        shard on, which is the same step in one world and another worker's in the next.
        """
        self._put_back_replaced()
        # None: no step.
        for module, training in zip(self._modules, self._modes_before, strict=False):
            if module.training != training:  # to set it takes longer than to look
                module.training = training
        for name, before in self._buffers_before.items():
            if self.buffers[name].shape != before.shape:
                # A forward pass has, which is an error: the message is to come.
                self.buffers[name].resize_(before.shape)
            self.buffers[name].copy_(before)
        self.extra_state.reset()

    def _put_back_replaced(self) -> list[tuple[str, torch.Tensor]]:
        """Let the model have the kept buffers again; returns what a forward pass has put in their
        place, by name."""
        replaced = [(name, now)
                    for name, now in (self.model.named_buffers() if self.buffers else ())
                    if now is not self.buffers.get(plain(name), now)]
        for name, _ in replaced:
            owner, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(owner), leaf, self.buffers[plain(name)])
        return [(plain(name), now) for name, now in replaced]

    def prepare(self) -> None:
        """Note that the reduced gradient of the step in flight is in hand; the vote comes next."""
        self.prepared = self.ticks + 1

    def commit(self,
               samples: int = 0,
               digest: int = 0,
               clock_ms: int = 0,
               finishes: int = 0) -> None:
        """Make the phase in flight final; the last one ends the step."""
        self.phase = (self.phase + 1) % self.phases
        _, _, clock_was, finishes_was = self.last_vote
        # A phase before this one may have asked.
        carried = finishes_was if self.phase != 1 % self.phases else 0
        self.last_vote = (samples, digest, max(clock_ms, clock_was), finishes + carried)
        if self.phase == 0:
            self.committed += 1
            self.samples += samples
            self.clocks_ms = (self.clocks_ms[1], self.last_vote[2])
        self.prepared = self.ticks
        self._buffers_before, self._modes_before = {}, []

    def restore(self) -> None:
        """Drop what a broken step has changed outside the gradient."""
        self.reset_buffers()

    def check_parameters(self) -> None:
        """Raise RuntimeError if the model has other parameters than at the start: nobody could have
        joined or resumed."""
        if self._outline() != self._outlined and [*map(id, self.model.parameters())
                                                  ] != [*map(id, self._parameters)]:
            own = {id(p) for p in self._parameters}
            new = [name for name, p in named_parameters(self.model).items() if id(p) not in own]
            raise RuntimeError(
                f"the model has other parameters than at the start "
                f"({', '.join(new[:8]) or 'some are gone or renamed'}), so no worker "
                f"could join or resume. Build all before train(), and change values in place "
                f"(copy_)."
            )

    def _outline(self) -> list[int]:
        """Return what changes wherever the model's modules or parameters do, in a tenth of the time
        that a walk takes."""
        return [
            id(part) for module in self._modules for parts in (module._parameters, module._modules)
            for part in parts.values()
        ]

    def check_groups(self) -> None:
        """Raise RuntimeError if the optimizer has other groups than at the start: newcomers, and a
        resume, build those."""
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        if sizes != self._group_sizes:
            raise RuntimeError(
                f"the optimizer has groups of {sizes} parameters in step {self.committed}, but it "
                f"had "
                f"groups of {self._group_sizes} at the start. Give it all parameters before "
                f"train(): "
                f"one whose requires_grad is False is not moved until a step sets it True.")

    # --- as bytes ---------------------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        """Return all that is needed to go on, as a tree of live tensors and numbers (nothing is
        copied)."""
        names = {id(p): name for name, p in named_parameters(self.model).items()}
        groups = self.optimizer.param_groups
        return {
            "identity": self.identity,
            "step": self.committed,
            **({"phase": self.phase, "clock_ms": self.clocks_ms[1]} if self.phases > 1 else {}),
            "samples": self.samples,
            "loss": self.loss,
            "last_vote": self.last_vote,
            "lineage": self.lineage,
            **self.rates.values(),
            "parameters": named_parameters(self.model),
            "evaluating": sorted(
                {plain(name)
                 for name, m in self.model.named_modules() if not m.training}),
            "trained": [
                name for name, p in named_parameters(self.model).items() if p.requires_grad
            ],
            "buffers": self.buffers,
            "aliases": self.aliases,
            "left_out": self.left_out,
            "optimizer": {
                "state": {
                    names[id(p)]: self.optimizer.state[p]
                    for g in groups
                    for p in g["params"] if p in self.optimizer.state
                },
                "groups": [{k: v
                            for k, v in g.items() if k != "params"} for g in groups],
                "members": [[names[id(p)] for p in g["params"]] for g in groups],
                "shared": {
                    key: value
                    for key, value in self.optimizer.state.items()
                    if not isinstance(key, torch.Tensor)
                },
            },
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "extras": {name: extra.state_dict()
                       for name, extra in self.extras.items()},
            "extra_state": self.extra_state.values(),
            "settings": self.settings,
        }

    def packed(self) -> Packed:
        """Return the values as header and tensors, without a copy."""
        return pack(self.values())

    def fits(self, values: dict[str, Any]) -> None:
        """Raise LayoutError when values are not of this model and optimizer."""
        if values["identity"] != self.identity:
            raise LayoutError(
                f"it is of a job with {values['identity']}, but this job has {self.identity}")
        parameters = named_parameters(self.model)
        for kind, mine in (("parameters", parameters), ("buffers", self.buffers)):
            theirs = values[kind]
            if theirs.keys() != mine.keys():
                odd = sorted(theirs.keys() ^ mine.keys())[:5]
                raise LayoutError(
                    f"the {kind} are not this model's: {odd} are in only one of the two")
            for name, tensor in theirs.items():
                if tensor.shape != mine[name].shape or tensor.dtype != mine[name].dtype:
                    raise LayoutError(f"{name} is {tuple(tensor.shape)} {tensor.dtype} there, but "
                                      f"{tuple(mine[name].shape)} {mine[name].dtype} in this model")
        groups = self.optimizer.param_groups
        by_id = {id(p): name for name, p in parameters.items()}
        members = [[by_id[id(p)] for p in g["params"]] for g in groups]
        if values["optimizer"]["members"] != members:
            raise LayoutError("the optimizer's parameter groups are not this optimizer's")
        for number, (group,
                     theirs) in enumerate(zip(groups, values["optimizer"]["groups"], strict=True)):
            for key in group.keys() & theirs.keys() - {"params"}:
                if tensor_kind(group[key]) != tensor_kind(theirs[key]):
                    raise LayoutError(
                        f"{key} of the optimizer's group {number} is {theirs[key]!r} there, but "
                        f"{group[key]!r} in this job: a tensor and a number, or tensors of other "
                        f"types"
                    )
        if not 0 <= values.get("phase", 0) < self.phases:
            raise LayoutError(
                f"it stands in phase {values['phase']} of a step, but a step of this job has "
                f"{self.phases}"
            )
        names = [
            settings["optimizer"] for settings in (values.get("settings", {}), self.settings)
            if settings
        ]
        if len(set(names)) > 1:
            raise LayoutError(f"the optimizer is {names[0]} there, but {names[1]} in this job")
        if misfit := self.rates.misfit(values):
            raise LayoutError(misfit)
        if (values["scaler"] is None) != (self.scaler is None):
            raise LayoutError("a gradient scaler is in only one of the two")
        if self.scaler is not None and values["scaler"].keys() != self.scaler.state_dict().keys():
            raise LayoutError(f"the gradient scaler has {sorted(values['scaler'], key=str)} there")
        if (extra := sorted(values.get("extra_state", {}))) != sorted(self.extra_state.modules):
            raise LayoutError(
                f"the modules' extra state is {extra} there and "
                f"{sorted(self.extra_state.modules)} in this "
                f"model")
        if values["extras"].keys() != self.extras.keys():
            raise LayoutError(
                f"the extras are {sorted(values['extras'])} there and {sorted(self.extras)} in "
                f"this job"
            )

    def room(self, header: bytes, payload_bytes: int) -> Packed:
        """Return memory for the values that a header describes, to be filled, unpacked and loaded
        once they are whole.

        Weights go where the gradients live: that memory is there, and idle while this worker has no
        state. (New memory was half of the time of a restore where the hypervisor gives it page by
        page.) Raises LayoutError when the values are not of this model and optimizer, or when there
        are not as many bytes.
        """
        outlined = outline(header)
        if outlined.payload_bytes != payload_bytes:
            raise LayoutError(
                f"there are {payload_bytes} bytes, but the header describes "
                f"{outlined.payload_bytes}"
            )
        if payload_bytes > MACHINE_BYTES:
            raise LayoutError(f"the header describes {payload_bytes} bytes, and this machine has "
                              f"{MACHINE_BYTES}")
        values = unpack(outlined)
        check_kinds(values)
        values, mine = with_plain_names(values), named_parameters(self.model)
        self.fits(values)
        idle = {id(tensor): mine[name].grad for name, tensor in values["parameters"].items()}

        def memory(tensor: torch.Tensor) -> torch.Tensor:
            gradient = idle.get(id(tensor))
            is_usable = gradient is not None and gradient.is_cpu and gradient.is_contiguous()
            return gradient if is_usable else torch.empty(
                tensor.shape, dtype=tensor.dtype)  # type: ignore[return-value]

        return Packed(header, [memory(tensor) for tensor in outlined.tensors])

    def load(self, values: dict[str, Any]) -> None:
        """Take over all values, or none. Raises LayoutError when they are not of this model and
        optimizer."""
        check_kinds(values)
        values = with_plain_names(values)
        self.fits(values)
        parameters, groups = named_parameters(self.model), self.optimizer.param_groups
        trained = set(
            values.get("trained", (name for name, p in parameters.items() if p.requires_grad)))
        with torch.no_grad():  # from here on nothing can fail but the memory
            for name, tensor in values["parameters"].items():
                parameters[name].copy_(tensor)
                is_trained = name in trained
                if parameters[name].requires_grad != is_trained:
                    parameters[name].requires_grad_(is_trained)
            for name, tensor in values["buffers"].items():
                self.buffers[name].copy_(tensor)
        if "evaluating" in values:
            for name, module in self.model.named_modules():
                module.training = plain(name) not in values["evaluating"]
        self.optimizer.state.clear()
        self.optimizer.state.update(values["optimizer"].get("shared", {}))
        entries = values["optimizer"]["state"]
        for group, theirs, members in zip(groups,
                                          *(values["optimizer"][k] for k in ("groups", "members")),
                                          strict=True):
            group.update(
                {key: taken_in_place(group.get(key), value)
                 for key, value in theirs.items()})
            moves_step = bool(group.get("fused") or group.get("capturable"))
            for name in members:
                if name in entries:
                    self.optimizer.state[parameters[name]] = _moved(entries[name], parameters[name],
                                                                    moves_step)
        if self.scaler is not None:
            self.scaler.load_state_dict(values["scaler"])
        for name, extra in self.extras.items():
            extra.load_state_dict(values["extras"][name])
        self.rates.load(values)
        self.settings = dict(values.get("settings", {}))
        self.extra_state.load(values.get("extra_state", {}))
        self.lineage = int(values["lineage"])
        self.committed, self.phase = int(values["step"]), int(values.get("phase", 0))
        self.prepared = self.ticks
        self.samples, self.loss = int(values.get("samples", 0)), float(values["loss"])
        self.last_vote = (*values["last_vote"], 0, 0)[:4]  # version 0.1 has two
        clock_ms = int(values.get("clock_ms", self.last_vote[2]))
        self.clocks_ms = (clock_ms, clock_ms)
        self.forget()
        self.has_state = True


OPTIONAL: dict[str, Any] = {
    "samples": 0, "evaluating": [], "trained": [], "aliases": {}, "left_out": [], "rate_used": 0.0,
    "scheduler": None, "extra_state": {}, "settings": {}, "phase": 0,
    "clock_ms": 0}
"""What version 0.1 has not written."""


def check_kinds(values: Any) -> None:
    """Raise LayoutError unless values are of the kinds that `load` relies on.

    What has the right digest may still have been written by somebody else. A value at which `load`
    raises would end each start of the run, and half of the state would have been changed.
    """
    if not isinstance(values, dict):
        raise LayoutError("the header holds no state")
    found: dict[str, Any] = OPTIONAL | values
    kinds: dict[str, Any] = {
        "identity": object, "optimizer": dict, "base_rates": (list, tuple),
        "rate_used": (int, float), "scheduler": (dict, type(None)), "scaler": (dict, type(None)),
        "loss": (int, float), "last_vote": (list, tuple), "step": int, "samples": int,
        "lineage": int, "phase": int, "clock_ms": int
    }
    odd = [name for name, kind in kinds.items()
           if name not in found or not isinstance(found[name], kind)]
    texts = ("evaluating", "trained", "left_out")
    odd += [name for name in texts if not _is_list(found[name], str)]
    named = {"parameters": torch.Tensor, "buffers": torch.Tensor, "extras": object,
             "extra_state": object, "settings": object, "aliases": str}
    odd += [name for name, kind in named.items() if not _is_dict(found.get(name), kind)]
    if not odd:
        odd = [name for name, is_sound in _contents(found).items() if not is_sound]
    if odd:
        raise LayoutError(f"the header holds no state of ours: {', '.join(odd)} are not what this "
                          f"version writes")


def _contents(found: dict[str, Any]) -> dict[str, bool]:
    """Return, by name, whether the values in containers are sound; the containers are."""
    optimizer, scheduler = found["optimizer"], found["scheduler"]
    groups, members = optimizer.get("groups"), optimizer.get("members")
    return {
        "optimizer": (_is_dict(optimizer.get("state"), object)
                      and isinstance(optimizer.get("shared", {}), dict)
                      and _is_list(groups, dict) and _is_list(members, (list, tuple))
                      and len(groups) == len(members)
                      and all(_is_list(names, str) for names in members)),
        "base_rates": _is_list(found["base_rates"], (int, float, torch.Tensor)) and (
            isinstance(groups, (list, tuple)) and len(found["base_rates"]) == len(groups)),
        "scheduler": not scheduler or (isinstance(scheduler.get("class"), str)
                                       and isinstance(scheduler.get("state"), dict)),
        "last_vote": _is_list(found["last_vote"], int) and len(found["last_vote"]) in (2, 4),
        "settings": not found["settings"] or isinstance(found["settings"].get("optimizer"), str),
        "aliases": (set(found["aliases"].values())
                    <= found["parameters"].keys() | found["buffers"].keys()),
    } | {name: found[name] >= 0 for name in ("step", "samples", "lineage", "phase")}


def _is_dict(value: Any, kind: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(k, str) and isinstance(v, kind) for k, v in value.items())


def _is_list(value: Any, kind: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(one, kind) for one in value)


def _span(tensor: torch.Tensor) -> int:
    """Return how many elements lie between a tensor's first and last: fewer than it has if it is
    expanded."""
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _moved(value: Any, parameter: torch.Tensor, moves_step: bool, key: Any = None) -> Any:
    """Return what an optimizer keeps of a parameter with its tensors on the parameter's device, in
    its memory format.

    Its count of steps stays on the CPU unless it is fused or capturable: as torch has it (2.13,
    optim/optimizer.py, _process_value_according_to_param_policy).
    """
    if isinstance(value, torch.Tensor):
        if value.shape == parameter.shape and value.stride() != parameter.stride():
            return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        return value.to(parameter.device) if key != "step" or moves_step else value
    if isinstance(value, dict):
        return {k: _moved(v, parameter, moves_step, k) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(v, parameter, moves_step) for v in value)
    return value
