"""What the steps of one worker work on, built from a job: live state, gradients, reducer.

job (what the user gave, checked) → here → loop, micro-batches, warm-up, apply; process that
`hvd.init()` aborts → here → memory file (world/revive.py) → here → its successor, with the same pid

What always holds: a value that no checkpoint could keep is a ConfigError before the first step.

What it does not do: replace a checkpoint. The memory file is gone with the machine.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from elastic_trainer.config import ConfigError
from elastic_trainer.events.log import Events
from elastic_trainer.reduce.exact import ExactReducer
from elastic_trainer.reduce.flat import Flat
from elastic_trainer.reduce.reducer import Reducer
from elastic_trainer.reduce.ring import RingReducer, Sending
from elastic_trainer.reduce.scattered import ScatteredReducer
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.shards import Behind, Shards
from elastic_trainer.state.values.forms import CannotKeep
from elastic_trainer.state.values.names import named_parameters, plain
from elastic_trainer.training.checks.beside import Beside
from elastic_trainer.training.checks.probe import Probe
from elastic_trainer.training.checks.program import Program
from elastic_trainer.training.failures import Fit
from elastic_trainer.training.job.job import Job, cut_of
from elastic_trainer.training.job.optimizers import members_of
from elastic_trainer.training.job.precision import Scaling
from elastic_trainer.training.job.settings import CONFIGURATION, settings_of
from elastic_trainer.world import revive
from elastic_trainer.world.replicas import Replica


def state_of(job: Job, reduce: str, sending: Sending) -> LiveState:
    """Return the live state of a job. Raises ConfigError for what no checkpoint could keep."""
    sending.require(reduce, has_scaler=job.scaler is not None and job.scaler.is_enabled())
    numbers = job.schedule
    identity = {"dataset_size": numbers.dataset_size, "global_batch": numbers.global_batch,
                "microbatches": numbers.microbatches, "seed": numbers.seed, "reduce": reduce}
    state = LiveState(job.model, job.optimizer, scaler=job.scaler, scheduler=job.scheduler,
                      identity=identity | cut_of(numbers),
                      optimizers=dict(zip(job.phases, members_of(job.optimizer), strict=True)))
    state.extras, state.phases = job.state, len(job.phases)
    if job.logs:
        state.run_id = secrets.token_hex(8)  # that of rank 0 holds: the others receive its state
    if job.best:
        state.facts = job.best.facts
    state.settings = settings_of(
        job.optimizer, job.scheduler, job.scaler, clip_norm=job.clip_norm,
        clip_value=job.clip_value, **sending.settings, on_nan=job.on_nan, **job.buffers.settings,
        precision=job.precision.name, loader=job.readers.training.seeds_samples,
        **(job.average.settings if job.average else {}), **(job.best.settings if job.best else {}),
        **({CONFIGURATION: dict(job.configuration)} if job.configuration else {}))
    if job.shard:
        state.shards = Shards(job.model, job.optimizer, job.buddies, members_of(job.optimizer))
        if job.average:
            state.shards.keep_averages(job.average.name, job.average.weights)
            job.average.holds = state.shards.holds
    if job.scaler:
        # A scaler makes its scale at its first use. A worker without a micro-batch needs it too.
        job.scaler.scale(torch.zeros((), device=job.device))
    return state


@dataclass
class Update:
    """The update of the step in flight, if the optimizer is sharded. What is in `.grad` is what the
    optimizer is to see: divided, unscaled and clipped."""

    new: list[torch.Tensor] = field(default_factory=list)
    """The new values of the trained parameters, in their order; [] if the scaler skips the step."""


class Work:
    def __init__(self, job: Job, reduce: str, sending: Sending, events: Events):
        self.job, self.reduce, self.events = job, reduce, events
        self.state = state_of(job, reduce, sending)
        self.built_settings = self.state.settings
        """Those that the job was built with. A checkpoint brings others."""
        self.replica = Replica(self.state)
        named = named_parameters(job.model)
        self.flat = Flat(named, self.state.buffers, job.device, job.buffers,
                         leaves=job.shard == "gradients")
        self.flat.gradients.receivers = [*map(job.masters.of, self.flat.gradients.everyone)]
        self.reducer = self._reducer(reduce, sending)
        self.update: Update | None = None
        self.scaling = Scaling(job.scaler, self.flat.gradients)
        self.fit = Fit()
        self._steps = 0
        job.readers.training.watch.registered = lambda: self.state.extras.values()
        self.beside = Beside(job.model, lambda: self.state.extras.values())
        self.probe = Probe(job, lambda: self.state.extras.values())
        self.program = self._program()
        self.require_kept(begins=True)

    def _reducer(self, reduce: str, sending: Sending) -> Reducer:
        flat, microbatches = self.flat, self.job.schedule.microbatches
        if flat.is_front and self.state.shards:
            if sending.dtype:
                raise ConfigError('shard is "gradients", and compress sends gradients in 16 bits. '
                                  'Leave compress out, or use shard="optimizer".')
            return ScatteredReducer(flat, microbatches, self.state.shards, sending.bucket_bytes)
        if reduce == "exact":
            return ExactReducer(flat, microbatches, sending.bucket_bytes)
        return RingReducer(flat, microbatches, sending, lambda **facts: self.events.emit(
            "worker.gradients_compressed", step=self.state.committed, **facts))

    def settle(self) -> None:
        """Take the program as the warm-up has left it: from here on it stays."""
        self.beside.settle()
        self.program = self._program()
        self.program.settle()
        self.probe.settle()

    def _program(self) -> Program:
        modules = {plain(name) or "(the model)": module
                   for name, module in self.job.model.named_modules()} | self.beside.modules()
        members = dict(zip(self.job.phases, members_of(self.job.optimizer), strict=True))
        return Program(modules, named_parameters(self.job.model),
                       {f"the optimizer {name}".strip(): one for name, one in members.items()})

    def begin(self) -> None:
        """Begin a step: keep what a forward pass changes, and see what the script has changed."""
        self.state.begin()
        self.program.begin()
        self.beside.begin()

    def check(self) -> None:
        """Raise RuntimeError if the script, or a batch, has changed what a worker that joins would
        not have."""
        self.state.optimizer_values.check_groups(self.state.committed)
        self.state.rates.check(self.state.committed)
        self.state.model_buffers.check(self.state.committed)
        self.state.attributes.check()
        self.program.check()
        self.beside.check()

    def end(self) -> None:
        """End a step. Raises RuntimeError if it has changed a class of the optimizer's."""
        self.program.end()
        self.beside.end()

    # --- whether the state can be kept ------------------------------------------------------------

    def note_step(self) -> None:
        """Note that a step, or a phase of one, is finished. Raises ConfigError.

        It looks whether the state can be kept after the first step of this process, because an
        optimizer makes its values there, and after the steps 2, 4, 8, … A value may get another
        type at any time. A checkpoint, and a planned change of the world, look too. The cost is
        that of a header.
        """
        if self.state.phase == 0:
            self._steps += 1
            if self._steps & (self._steps - 1) == 0:
                self.require_kept()
            elif self.state.committed % self.job.schedule.steps_per_epoch == 0:
                self.probe.check()

    def require_kept(self, *, begins: bool = False) -> None:
        """Raise ConfigError for values that cannot be kept, and RuntimeError if the script has
        changed what a resumed run would not have. Copies nothing.

        `begins`: before the first step, where the state learns the classes that it may hold.
        """
        state = self.state
        self.job.readers.training.watch.check()
        if not begins:
            self.probe.check()
        try:
            state.packed(learns=begins)
            if not begins:
                self.program.begin()
                self.beside.begin()
                self.check()
        except CannotKeep as error:
            when = "" if begins else f"after step {state.committed - 1} the state cannot be kept: "
            raise ConfigError(
                f"{when}{error}. Change the values in the state_dict of state and of lr, in "
                f"get_extra_state of the modules, or in the optimizer's groups and state."
                ) from error
        if lacking := state.extra_state.lacking:
            raise ConfigError(f"the modules of {lacking} have get_extra_state, but no "
                              f"set_extra_state. Give them both.")

    @property
    def shards(self) -> Shards:
        """What this worker holds of what is sharded, in a job with `shard`."""
        assert self.state.shards
        return self.state.shards

    # --- left to a successor ----------------------------------------------------------------------

    def leave(self, handed_over: int) -> int | None:
        """Write the live state, and return the descriptor of its memory; None if it is half
        changed. `handed_over`: the phases after which the user's code has run."""
        shards = self.state.shards
        held = sorted(shards.held) if shards else []
        facts = {"trained": self.flat.trained, "handed_over": handed_over,
                 "fit": self.fit.to_dict(), "held": held,
                 "behind": shards.behind if shards else None}
        prepared = self._prepared() if self.state.is_prepared else {}
        memory = revive.write_live_state(self.state, prepared, facts)
        if memory is not None and shards and held != sorted(shards.held):
            os.close(memory)  # parts have moved meanwhile: the copy may have half of one
            return None
        return memory

    def _prepared(self) -> dict[str, Any]:
        """Return what a successor needs to apply the step in flight, beside the state."""
        gradients, update = self.flat.gradients, self.update
        prepared: dict[str, Any] = {"sums": {
            str(kind).removeprefix("torch."): sums for kind, sums in self.flat.sums.items()}}
        if update and self.flat.is_front:
            prepared |= {"held": {str(number): receiver.grad for number, receiver
                                  in enumerate(gradients.receivers)
                                  if receiver.grad is not None and number in self.flat.reduced},
                         "infinite": self.infinite()}
        elif update:
            # `.grad` of the others is a view of the sums.
            prepared |= {"new": update.new, "narrow": [
                parameter.grad for parameter, is_narrow in zip(
                    gradients.parameters, gradients.narrow, strict=True) if is_narrow],
                "infinite": self.infinite()}
        return prepared

    def infinite(self) -> dict[str, float]:
        """Return what the scaler has found when it unscaled the gradient, by device."""
        scaler = self.job.scaler
        states = scaler._per_optimizer_states if scaler and scaler.is_enabled() else {}
        return {str(device): float(found) for state in states.values()
                for device, found in state["found_inf_per_device"].items()}

    def take_up(self, memory: int | None) -> int | None:
        """Go on with the live state that this process left; return its `handed_over`. None: there
        is none."""
        values = (revive.read_live_state(memory, self.state.classes) if memory is not None
                  else None)
        if values is None:
            return None
        if shards := self.state.shards:
            shards.held = set(values["facts"]["held"])
            if behind := values["facts"]["behind"]:
                shards.behind = Behind(*behind)
        self.state.take_up(values["state"], values["in_flight"])
        self.fit = Fit(**values["facts"]["fit"])
        if prepared := values["prepared"]:
            self.reducer.lay_out(values["facts"]["trained"])
            for name, tensor in prepared["sums"].items():
                self.flat.sums[getattr(torch, name)].copy_(tensor)
            if "new" in prepared or "held" in prepared:
                self._take_up_update(prepared)
        return int(values["facts"]["handed_over"])

    def _take_up_update(self, prepared: dict[str, Any]) -> None:
        """Hold the update of the step in flight as this process has left it (`_prepared`)."""
        gradients, kept = self.flat.gradients, iter(prepared.get("narrow", ()))
        self.update = Update([tensor.to(self.job.device) for tensor in prepared.get("new", ())])
        if not self.flat.is_front:
            self.flat.hand_out()
        for number, tensor in prepared.get("held", {}).items():
            its = self.flat.reduced[int(number)] = tensor.to(self.job.device)
            gradients.receivers[int(number)].grad = its
        for parameter, is_narrow in zip(gradients.parameters, gradients.narrow, strict=True):
            if is_narrow and (gradient := next(kept)) is not None:
                parameter.grad = gradient.to(parameter.device)
        if self.job.scaler and prepared["infinite"]:
            optimizer = members_of(self.job.optimizer)[self.state.phase]
            self.job.scaler._per_optimizer_states[id(optimizer)] = {
                "stage": OptState.UNSCALED,
                "found_inf_per_device": {
                    torch.device(device): torch.full((), found, device=device)
                    for device, found in prepared["infinite"].items()}}
