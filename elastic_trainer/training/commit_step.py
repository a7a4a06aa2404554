"""The commit of a step: its loss is judged, and everything that outlives it changes together.

reduced gradients and statistics (flat buffers) → here → weights, optimizer, buffers, scaler, rates:
a finished step

What always holds:
1. `apply` changes everything that outlives the step. Before it nothing has changed.
2. Code that draws random numbers here draws the same ones on every worker.
"""

from __future__ import annotations

import hashlib
import json
import math

import torch

from elastic_trainer.data.seeds import seed_everything, seed_of
from elastic_trainer.reduce.buffers import MOST_CHANGE, results
from elastic_trainer.reduce.flat import COUNT, means
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.shards import Behind
from elastic_trainer.state.together import copy_together
from elastic_trainer.state.values.layout import byte_view
from elastic_trainer.state.values.names import named_parameters
from elastic_trainer.training.failures import Losses, LossNotFinite, not_finite, verdict
from elastic_trainer.training.job.optimizers import members_of, parameters_of
from elastic_trainer.training.microbatches import Microbatches
from elastic_trainer.training.sharded import ShardedUpdate
from elastic_trainer.training.sharded_gradients import ShardedGradients, after_update
from elastic_trainer.training.work import Work
from elastic_trainer.world.collectives import World


class StepEnd:
    """The end of a step whose gradient every worker holds."""

    def __init__(self, work: Work):
        self.work, self.job, self.state, self.flat = work, work.job, work.state, work.flat
        self.events = work.events
        self.sharded: ShardedUpdate | ShardedGradients | None = None
        if work.state.shards:
            self.sharded = (ShardedGradients(work, self._note_norm) if self.flat.is_front
                            else ShardedUpdate(work, self._ready))
        self.grad_norm: torch.Tensor | None = None
        """The norm of the last gradient before it was clipped; None without `clip_norm`."""

    @property
    def metrics(self) -> dict[str, float]:
        """What the last finished step has logged, over all micro-batches and phases."""
        return means(self.state.findings.sums)

    def is_skipped(self, loss: float) -> bool:
        """Return whether a step of this loss is finished without being applied."""
        return self.job.on_nan == "skip" and not math.isfinite(loss)

    def judge_loss(self, step: int, losses: Losses, world: World) -> None:
        """Report a loss that is not finite, and raise LossNotFinite on all workers if the job asks
        for it."""
        if self.flat.has_lost_digits():
            self.state.restore()
            raise RuntimeError(
                f"a buffer of whole numbers has changed by more than {MOST_CHANGE:.0f} in step "
                f"{step}, so its mean over the microbatches is not exact. Keep it in a float "
                f"buffer, or change it {self.job.words.after}.")
        if found := self.flat.changed_buffers():
            self.state.restore()
            raise RuntimeError(self.job.buffers.refusal(found, self.job.words.after))
        self._require_count(step)
        loss, on_nan = self.flat.mean_loss(), self.job.on_nan
        if math.isfinite(loss):
            return
        mine = not_finite(losses)
        is_first = step == 0 or math.isfinite(self.state.loss)  # of several in a row
        if mine and (on_nan != "continue" or is_first):
            self.events.emit("worker.loss_not_finite", step=step, loss=loss, on_nan=on_nan,
                             microbatches=sorted(mine),
                             samples=[mine[microbatch] for microbatch in sorted(mine)])
        if on_nan == "raise":
            texts = world.gather_texts(json.dumps(list(mine.items())))  # network, before all stop
            self.state.restore()
            raise LossNotFinite(
                verdict(step, loss, dict(item for text in texts for item in json.loads(text))))

    def _require_count(self, step: int) -> None:
        """Raise RuntimeError, on all workers, if some micro-batches were counted and others not, or
        nothing was counted."""
        count = self.flat.tallied().get(COUNT)
        run = self.flat.run()
        if count is None or count[1] == 0 or math.isnan(count[0]):
            return  # the losses are means
        if count[1] == run and count[0] > 0:
            return
        self.state.restore()
        raise RuntimeError(
            f"{count[1]:.0f} of {run:.0f} micro-batches of step {step} gave a count, and the "
            f"counts add up to {count[0]:g}. Call backward(loss_sum, count=n) for each batch, with "
            "n > 0 in one of them, or backward(loss) for each.")

    @torch.no_grad()
    def apply(self, samples: int, digest: int, clock_ms: int = 0, finishes: int = 0) -> None:
        """Change everything that outlives the step. The prepared gradient is in the flat
        buffers."""
        job, state = self.job, self.state
        # Stochastic rounding and after_step draw the same random numbers on every worker.
        phase = state.phase
        seed_everything(seed_of(job.schedule, state.committed, job.schedule.microbatches, phase))
        state.begin_applying()
        if self.is_skipped(loss := self.flat.mean_loss()):
            state.restore()
            state.loss = loss
            state.rates.set(job.multiplier(state.committed))
        else:
            self._update()
        state.findings.add(job.phases[phase], state.loss, self.flat.tallied(), is_first=phase == 0)
        behind = Behind(state.committed, averages=not self.is_skipped(loss))
        if phase + 1 == state.phases:
            state.rates.advance(state.loss)
        else:
            state.rates.note()
        if isinstance(self.sharded, ShardedGradients):
            self.sharded.postpone(behind)
        elif phase + 1 == state.phases:
            after_update(self.work, behind)
        state.parameters.check()
        state.optimizer_values.check(state.committed)
        self.work.end()
        state.commit(samples, digest, clock_ms, finishes)
        state.is_applying = False

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return the next values of the buffers whose rule needs the value of each micro-batch.
        Runs the functions of gather()."""
        buffers, rules = self.state.model_buffers, self.job.buffers
        if not buffers.left:
            return {}
        buffers.reset()  # what such a function sees
        return results(buffers.left, rules, buffers.before)

    def _update(self) -> None:
        job, state = self.job, self.state
        optimizer = members_of(job.optimizer)[state.phase]
        sharded = self.sharded if self.work.update else None
        if not sharded:
            self.flat.divide()
            self.flat.hand_out()
        found = self._buffers()
        state.loss = self.flat.apply_statistics(state.model_buffers.before, state.buffers)
        copy_together([*map(state.buffers.__getitem__, found)], list(found.values()))
        state.modes.apply()
        state.attributes.apply()
        if not sharded:
            self._ready(optimizer)
        state.rates.set(job.multiplier(state.committed))
        if sharded:
            sharded.apply(optimizer, lambda: self._step(optimizer))
        else:
            self._step(optimizer)
        if not self.flat.is_front:
            job.masters.hand_back(self.flat.gradients.everyone)
        if job.scaler:
            job.scaler.update()
        state.extra_state.apply()

    def _ready(self, optimizer: torch.optim.Optimizer) -> None:
        """Make what is in `.grad` the gradient that the optimizer is to see."""
        job = self.job
        if job.scaler:
            with job.masters.in_groups(self.state, optimizer):
                job.scaler.unscale_(optimizer)
        if job.clip_norm is None and job.clip_value is None:
            return  # to walk through a large model takes milliseconds
        moved = [*map(job.masters.of, job.model.parameters() if self.state.phases == 1
                      else parameters_of(optimizer))]
        if job.clip_norm is not None:
            self._note_norm(torch.nn.utils.clip_grad_norm_(moved, job.clip_norm))
        if job.clip_value is not None:
            torch.nn.utils.clip_grad_value_(moved, job.clip_value)

    def _note_norm(self, norm: torch.Tensor) -> None:
        self.grad_norm = norm

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        with self.job.masters.moving(self.state, optimizer):
            if self.job.scaler:
                self.job.scaler.step(optimizer)
            else:
                optimizer.step()

    @torch.no_grad()
    def prepare(self, world: World, microbatches: Microbatches) -> None:
        """Before the vote: let all workers have what the holders of an optimizer that is sharded
        compute. All workers call it. Network, if it is sharded."""
        if (sharded := self.sharded) is None:
            return
        optimizer = members_of(self.job.optimizer)[self.state.phase]
        scaler = self.job.scaler if self.job.scaler and self.job.scaler.is_enabled() else None
        sharded.forget(optimizer, scaler)
        is_whole = microbatches.is_reduced and self.flat.run()
        is_alone = world.size == 1 and not self.flat.is_front
        if is_alone or not is_whole or self.is_skipped(self.flat.mean_loss()):
            return
        sharded.prepare(world, optimizer, self.job.multiplier(self.state.committed), scaler)
        microbatches.error = microbatches.error or sharded.error

    def complete(self, world: World) -> None:
        """After `apply`: let all workers have the new parameters, if the gradients are sharded. All
        workers call it. Network."""
        if isinstance(self.sharded, ShardedGradients):
            self.sharded.complete(world)

    def catch_up(self, world: World, lacks: bool) -> None:
        """When a generation begins: end the last step, if the gradients are sharded. All members
        call it; `lacks`: one of them lacks parameters. Network, if so."""
        if isinstance(self.sharded, ShardedGradients):
            self.sharded.catch_up(world, lacks)


def weights_sha256(state: LiveState) -> str:
    """Return the SHA-256 over the names and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in [*named_parameters(state.model).items(), *state.buffers.items()]:
        digest.update(name.encode() + b"\0")
        digest.update(byte_view(tensor).numpy().data)
    return digest.hexdigest()
