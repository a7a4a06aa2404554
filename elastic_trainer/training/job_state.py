"""Build what a loop works on from a job: the live state, the flat gradients and the reducer.

job (what the user gave, checked) → here → loop

What always holds: a value that no checkpoint could keep is a ConfigError before the first step.
"""

from __future__ import annotations

import secrets
from typing import Any

import torch

from elastic_trainer.config import ConfigError
from elastic_trainer.events.log import Events
from elastic_trainer.reduce.exact import ExactReducer
from elastic_trainer.reduce.flat import Flat
from elastic_trainer.reduce.reducer import Reducer
from elastic_trainer.reduce.ring import RingReducer
from elastic_trainer.reduce.sending import Sending
from elastic_trainer.reduce.traced import TracedReducer
from elastic_trainer.state.forms import CannotKeep
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.training.job import Job, cut_of
from elastic_trainer.training.settings import CONFIGURATION, settings_of
from elastic_trainer.training.several_optimizers import members_of


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
    state.settings = settings_of(job.optimizer, job.scheduler, job.scaler,
                                 clip_norm=job.clip_norm, clip_value=job.clip_value,
                                 **sending.settings, on_nan=job.on_nan, **job.buffers.settings,
                                 precision=job.precision.name,
                                 loader=job.readers.training.seeds_samples,
                                 **(job.average.settings if job.average else {}),
                                 **(job.best.settings if job.best else {}),
                                 **({CONFIGURATION: dict(job.configuration)}
                                    if job.configuration else {}))
    if job.scaler:
        # A scaler makes its scale at its first use. A worker without a micro-batch needs it too.
        job.scaler.scale(torch.zeros((), device=job.device))
    require_kept(state, begins=True)
    return state


def require_kept(state: LiveState, *, begins: bool = False) -> None:
    """Raise ConfigError for values that cannot be kept. Copies nothing.

    `begins`: before the first step, where the state learns the classes that it may hold.
    """
    try:
        state.packed(learns=begins)
    except CannotKeep as error:
        when = "" if begins else f"after step {state.committed - 1} the state cannot be kept: "
        raise ConfigError(
            f"{when}{error}. Change the values in the state_dict of state and of "
            f"lr, in get_extra_state of the modules, or in the optimizer's groups and "
            f"state.") from error
    if lacking := state.extra_state.lacking:
        raise ConfigError(f"the modules of {lacking} have get_extra_state, but no set_extra_state. "
                          f"Give them both.")


class Keeping:
    """Looks again and again whether the state can be kept: after the first step of this process,
    because an optimizer makes its values there, and after the steps 2, 4, 8, …

    A value may get another type at any time. A checkpoint, and a planned change of the world, look
    too. The cost is that of a header.
    """

    def __init__(self, state: LiveState):
        self._state, self._steps = state, 0

    def step(self) -> None:
        """Note that a step, or a phase of one, is finished. Raises ConfigError."""
        if self._state.phase == 0:
            self._steps += 1
            if self._steps & (self._steps - 1) == 0:
                self.require()

    def require(self) -> None:
        """Raise ConfigError for values that cannot be kept."""
        require_kept(self._state)


def reducer_of(reduce: str, flat: Flat, job: Job, sending: Sending, state: LiveState,
               events: Events) -> Reducer:
    """Return the reducer of this name, which logs what it sends in 16 bits."""
    if reduce == "exact":
        return TracedReducer(ExactReducer(flat, job.schedule.microbatches), events.trace)

    def note(**facts: Any) -> None:
        events.emit("worker.gradients_compressed", step=state.committed, **facts)

    return TracedReducer(RingReducer(flat, job.schedule.microbatches, sending, note), events.trace)
