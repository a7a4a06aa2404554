"""Training. Read this first: `steps` is the loop, and it reads as the promise does.

model, optimizer, dataset, loss, numbers → here → weights

    from elastic_trainer import train
    train(model, optimizer, dataset, loss=loss, global_batch=256, shards=16, epochs=3, seed=0)

under `./horovodrun_elastic.sh -- python my_train.py`, under plain `horovodrun --host-discovery-script …`, or as
`python my_train.py` alone.

What always holds:
1. Where training is follows from the number of finished steps alone (schedule.py).
2. Nothing that outlives a step changes before everybody holds the step's gradient; then everything changes together.
3. The user's own exception ends the run on all ranks, at once, with its traceback, and is never retried.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import math
import os
import platform
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import horovod
import numpy
import psutil
import torch
from horovod.common.exceptions import HorovodInternalError
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import default_collate

from elastic_trainer import determinism, probe, report, revive, standby
from elastic_trainer.arithmetic import Arithmetic, advice, computes_otherwise, facts_that_differ
from elastic_trainer.batches import fetch, to_device
from elastic_trainer.config import (
    EXIT_DIFFERS,
    EXIT_LEFT,
    EXIT_MACHINE,
    EXIT_USER_ERROR,
    REDUCERS,
    ConfigError,
    Launch,
)
from elastic_trainer.courier import Courier, shares_runs
from elastic_trainer.edge.plain import plain_text
from elastic_trainer.events import Events, newest_attempt
from elastic_trainer.listeners import Guarded
from elastic_trainer.losses import LossNotFinite, not_finite, require_policy, require_scalar, verdict
from elastic_trainer.machine_fault import machine_fault
from elastic_trainer.output import outlive_readers
from elastic_trainer.place import (
    MAX_ERROR_CHARACTERS,
    Alone,
    Dismissed,
    Driver,
    OurDriver,
    PlainDriver,
    RunOver,
)
from elastic_trainer.reduce import (
    MOST_CHANGE,
    ExactReducer,
    Flat,
    GradientsWritten,
    Reducer,
    RingReducer,
    SetsDiffer,
)
from elastic_trainer.replicas import Part, Replica, ReplicaDiffers, ReplicasDisagree, fingerprint
from elastic_trainer.schedule import Schedule, owner_of, samples_digest
from elastic_trainer.settings import (
    Remark,
    remarks_on_effect,
    remarks_on_last_batch,
    remarks_on_launcher,
    remarks_on_length,
    remarks_on_workers,
    schedule_differs,
    settings_of,
    settle,
    split_schedule,
)
from elastic_trainer.state.cadence import Cadence
from elastic_trainer.state.checkpoint import PART_BYTES, Checkpoints, Plan
from elastic_trainer.state.elastic_state import ElasticState
from elastic_trainer.state.layout import byte_view
from elastic_trainer.state.names import named_buffers, named_parameters
from elastic_trainer.state.store import StoreRefused, StoreUnavailable, open_store
from elastic_trainer.supported import BUFFERS_STAY, moved_buffers, parameters_stay, refusal, some
from elastic_trainer.timing import Pace, Timing
from elastic_trainer.world import Control, PeersLost, StateWithdrawn, World, WorldChanged

RESTORE_PAUSE_S = 30.0
"""Between two tries to restore: as many as there may be generations without progress, so ten minutes of them (world.py)."""
WARM_GRADIENTS = 5
"""A standby has touched as much memory as so many gradients take: the state it will receive, the buffers of its first step.
Else everybody waits for a newcomer's new pages (0.1 to 0.4 s for 122 MB where the hypervisor gives them one by one)."""
MOST_PAUSE_S = 1.0
"""Between two looks at the store, of a worker that waits until another one has written the last checkpoint."""
LAST_TRIES = 3
"""How often the checkpoint at the end of a run, or of an attempt, is tried."""

determinism.choose_kernels()  # now, not in `train`: the user builds the model before it


class PeerFailed(RuntimeError):
    """The user's code raised on another rank; the text is that rank's traceback."""


class UserExited(RuntimeError):
    """The user's code called sys.exit() (the cause), which would end one worker as if its host had died."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a finished run hands back, the same on every worker."""

    steps: int
    samples: int
    loss: float
    weights_sha256: str
    model: torch.nn.Module
    rank: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that the user handed over, checked."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    dataset: Any
    loss: Callable[[torch.nn.Module, Any], torch.Tensor]
    schedule: Schedule
    rate: Callable[[int], float]
    clip_norm: float | None
    scaler: torch.amp.GradScaler | None
    collate: Callable[[list[Any]], Any]
    extras: dict[str, Any]
    after_step: Callable[[int], None]
    device: torch.device
    scheduler: LRScheduler | None = None
    """Sets the rates instead of `rate`."""
    on_nan: str = "raise"
    """What a loss that is not finite does to its step: one of losses.ON_NAN."""
    remarks: tuple[Remark, ...] = ()
    """What a person is told at the start of each attempt."""


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, dataset: Any, *,
          loss: Callable[[torch.nn.Module, Any], torch.Tensor], global_batch: int, shards: int = 8,
          epochs: int | None = None,
          seed: int = 0, max_steps: int | None = None, schedule: Callable[[int], float] | LRScheduler | None = None,
          clip_norm: float | None = None, scaler: torch.amp.GradScaler | None = None,
          drop_last: bool = False, min_shard_samples: int | None = None,
          collate: Callable[[list[Any]], Any] = default_collate,
          extras: Mapping[str, Any] | None = None, after_step: Callable[[int], None] | None = None,
          checkpoint_every: int | str = "auto", keep_last: int = 3, keep_every: int = 0, part_bytes: int = PART_BYTES,
          reduce: str | None = None, compress: bool = False, cpu_threads: int = 1,
          on_nan: str = "raise", run_dir: str | os.PathLike[str] | None = None, store: str | None = None,
          listeners: list[Callable[[str, dict[str, Any]], None]] | None = None, progress: bool = True) -> Result:
    """Train to the end, whatever the fleet does, and return the same result on every worker.

    Every worker calls this with a model that was built with the same seed. `loss(model, batch)` returns the mean over
    the batch's samples, a scalar. `dataset` has `len` and `[i]` (or `__getitems__`). A batch is what `collate` returns: its
    tensors are moved to the model's device in containers, dataclasses, and objects with a method `to(device)`.
    A global batch is always `shards` parts; workers share the parts, so batch, learning rate and result do not depend
    on their number.
    The run has `max_steps` steps, or `epochs` passes over the dataset (one, if neither is given); of both, the earlier
    end holds.
    `schedule` is a function: `schedule(step)` multiplies the optimizer's learning rates. Or it is a torch scheduler of this
    optimizer: `train` steps it once per finished step (not per epoch), and it is part of the state. ReduceLROnPlateau
    hears the loss of each step, so its patience counts steps. Nothing else may set a rate.
    `clip_norm` clips the global norm. `extras` are objects with state_dict and load_state_dict that belong to the state
    (a moving average of the weights, metrics); they change only in
    `after_step(step)`, which runs on every worker alike, as the last part of the step, under torch.no_grad(): a backward
    pass of its own needs `with torch.enable_grad():`. Modules, parameters and the optimizer's groups stay the same objects.
    An epoch whose samples do not divide by `global_batch` ends with a short batch; `drop_last` leaves those samples out.
    Each shard of a short batch has at least `min_shard_samples` samples, so fewer shards have any; None: 2 for a model
    with BatchNorm, which cannot compute a variance of one sample, else 1.
    A loss that is not finite ends the run with LossNotFinite, which names step, shards and samples, before the step is
    applied (`on_nan="raise"`). With "skip" the step is finished and its samples count, but weights, optimizer, scaler and
    buffers stay as they were; the schedule goes on, and `after_step` is called. With "continue" the step is applied.
    `checkpoint_every` is a number of steps (50), of seconds ("30s"), or "auto": as often as it pays, for at most 1 % of
    the time ("0.5%": auto, for at most that). The last `keep_last` checkpoints stay, and the first at or after each
    multiple of `keep_every` steps. Objects in the store have `part_bytes` bytes, whatever the world's size (≤ 64 MiB).
    `store` is a folder or s3://bucket/prefix of this run's own; None takes the launcher's (--store, and behind it the
    run's name). `reduce` is "exact" (the same bits
    for every world) or "ring" (float allreduce; `compress` sends 16 bits); None takes the launcher's. `cpu_threads` is
    torch's thread count: part of the arithmetic, so the same everywhere. `run_dir` is where events, result and
    checkpoints go when no launcher says so. `listeners` hear every event of this worker. What a listener raises does not
    end the run: its traceback is told, and it is called again at the next event.
    `progress` shows on stderr how far it is, where no launcher does that.

    Raises ConfigError for what cannot work, and what the user's code raises (UserExited for its sys.exit()). Leaves by
    SystemExit 75 when this worker is not wanted any more.
    """
    if reduce is not None and reduce not in REDUCERS:
        raise ConfigError(f"reduce is {reduce!r}, which is no reducer. Use one of {REDUCERS}.")
    trained = [p for p in model.parameters() if p.requires_grad]
    strangers = {id(p) for g in optimizer.param_groups for p in g["params"]} - {id(p) for p in model.parameters()}
    if not trained or strangers:
        raise ConfigError(f"the optimizer holds {len(strangers)} parameters that are not the model's, and the model has "
                          f"{len(trained)} that can be trained. Build the optimizer from model.parameters().")
    if why := refusal(model, optimizer):
        raise ConfigError(why)
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError(f"clip_norm is {clip_norm}. Use a positive number, or None for no clipping.")
    require_policy(on_nan)
    if cpu_threads < 1:
        raise ConfigError(f"cpu_threads is {cpu_threads}. Use 1 or more.")
    try:
        plan = Plan(every=Cadence.parse(checkpoint_every), keep_last=keep_last, keep_every=keep_every,
                    part_bytes=part_bytes)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    lacking = [name for name, extra in (extras or {}).items()
               if not (hasattr(extra, "state_dict") and hasattr(extra, "load_state_dict"))]
    if lacking:
        raise ConfigError(f"the extras {lacking} have no state_dict and load_state_dict. Give them both.")
    numbers = Schedule(dataset_size=len(dataset), global_batch=global_batch, shards=shards, epochs=epochs, seed=seed,
                       max_steps=max_steps, drop_last=drop_last,
                       min_shard_samples=(fewest_samples(model, global_batch, shards)
                                          if min_shard_samples is None else min_shard_samples))
    scheduler, rate = split_schedule(schedule, optimizer, numbers.steps)
    job = Job(model=model, optimizer=optimizer, dataset=dataset, loss=loss, rate=rate, scheduler=scheduler,
              schedule=numbers, remarks=(*remarks_on_length(numbers), *remarks_on_last_batch(numbers)),
              clip_norm=clip_norm, scaler=scaler, on_nan=on_nan, collate=collate, extras=dict(extras or {}),
              after_step=after_step or (lambda step: None), device=trained[0].device)
    if job.device.type == "cpu":
        torch.set_num_threads(cpu_threads)
    if standby.is_standby():
        if job.device.type == "cuda":  # it does not know its reducer yet, and cuBLAS reads this at its first product
            os.environ.setdefault(determinism.WORKSPACE, determinism.WORKSPACES[0])
        rehearse(job)
    stood_by = standby.wait_for_place()
    launch = Launch.from_environment()
    os.environ["ELASTIC_TRAINER_SLOT"] = str(launch.slot)  # Horovod's own variable changes with every generation
    if launch.horovod:
        outlive_readers()
        if not faulthandler.is_enabled():  # plain horovodrun: our driver has it on from the first import
            faulthandler.enable()
    remarks = remarks_on_launcher(
        run_dir=os.fspath(run_dir) if run_dir else None, store=store, reduce=reduce, launcher_store=launch.store,
        launcher_run_dir=str(launch.run_dir) if launch.run_dir else None, launcher_reduce=launch.reduce_asked)
    if run_dir is not None and launch.run_dir is None:
        launch = replace(launch, run_dir=Path(run_dir), run=Path(run_dir).name)
    if store is not None:
        launch = replace(launch, store=store)
    if launch.run_dir and not launch.driver:  # no launcher counts: each life is an attempt of its own
        launch = replace(launch, attempt=newest_attempt(launch.run_dir) + 1)
    reduce = reduce or launch.reduce
    if settings := determinism.required(job.device.type, reduce, determinism.current()):
        determinism.apply(settings)
    unusual = {"checkpoint_every": checkpoint_every, "keep_last": keep_last, "keep_every": keep_every,
               "part_bytes": part_bytes}
    usual = {"checkpoint_every": "auto", "keep_last": 3, "keep_every": 0, "part_bytes": PART_BYTES}
    remarks += remarks_on_effect(bool(launch.run_dir or launch.store), job.device.type, cpu_threads,
                                 {key: value for key, value in unusual.items() if value != usual[key]})
    job = replace(job, remarks=(*job.remarks, *remarks))
    courier = None
    if launch.driver and not shares_runs(launch):
        if not launch.store:
            raise ConfigError(f"the host {launch.host} does not share the folder of runs ({launch.run_dir}), and no store "
                              f"is given. Use --store s3://bucket/prefix, or put --runs-dir on a disk that all share.")
        courier, launch = Courier(launch), replace(launch, run_dir=None)
    events = Events(launch.run_dir, courier=courier, run=launch.run, attempt=launch.attempt,
                    worker=launch.worker or launch.host)
    events.listeners += [Guarded(listener, events) for listener in listeners or ()]
    if stood_by:
        events.emit("worker.stood_by", **stood_by)
    driver: Driver = OurDriver(launch) if launch.driver else PlainDriver(launch) if launch.horovod else Alone()
    trainer: Trainer | None = None
    try:
        with shown(events) if progress and isinstance(driver, Alone) else nullcontext():
            trainer = Trainer(job, launch, driver, events, reduce, compress, plan)
            return trainer.run()
    except Dismissed:
        events.emit("worker.left")
        sys.exit(EXIT_LEFT)
    except ReplicaDiffers as difference:
        print(f"elastic-trainer: {difference}", file=sys.stderr)
        sys.exit(EXIT_DIFFERS)
    except RunOver as over:
        events.emit("worker.stopped", verdict=over.verdict, detail=over.detail)
        print(f"elastic-trainer: {plain_text(over)}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR if over.verdict == "user_error" else EXIT_LEFT)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if trainer and (kind := trainer.fault_of_machine(error)):
            trainer.leave_as_dead(kind, traceback.format_exc())
        events.emit("worker.failed", error=traceback.format_exc()[-MAX_ERROR_CHARACTERS:])
        driver.fail(traceback.format_exc())  # before it stood ready nobody knows this worker: then its exit code says it
        if launch.driver:
            end_as_user_error()
        if isinstance(error, Exception):
            raise
        raise UserExited(f"the user's code ended with {error!r}. Raise an exception instead.") from error
    finally:
        events.flush()
        if launch.run_dir and not launch.driver and not events.bound.get("rank"):
            report.write_result(launch.run_dir)  # of what there is, when it has not finished


@contextmanager
def shown(events: Events) -> Iterator[None]:
    """Show the progress of a worker that nobody has launched."""
    # Here: a launched worker shows nothing, and would load rich for nothing.
    from elastic_trainer.progress import Progress

    progress = Progress()
    events.listeners.append(Guarded(progress, events))
    try:
        yield
    finally:
        progress.close()


def end_as_user_error() -> None:
    """Let the exception that nobody catches end this process with the exit code of a user's own, after its traceback."""
    show = sys.excepthook

    def show_and_exit(*exception: Any) -> None:
        show(*exception)
        raise SystemExit(EXIT_USER_ERROR)

    sys.excepthook = show_and_exit


def local_rank() -> int:
    """Return this worker's number on its host (which GPU is mine); works before `train`. A standby waits in here."""
    standby.wait_for_place()
    return Launch.from_environment().slot


def rehearse(job: Job) -> None:
    """Pay for all that is slow the first time, in a standby: nothing remains of it, random numbers included."""
    torch_was, random_was, numpy_was = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    trainer = Trainer(job, Launch(), Alone(), Events(None), "exact", compress=False)
    trainer._warm_up()  # leaves no hooks on the model
    if job.device.type == "cpu":
        gradient_bytes = sum(tensor.nbytes for tensor in trainer.flat.sums.values())
        torch.ones(min(WARM_GRADIENTS * gradient_bytes, free_bytes() // 16), dtype=torch.uint8)  # the allocator keeps it
    for parameter in job.model.parameters():
        parameter.grad = None
    torch.set_rng_state(torch_was)
    random.setstate(random_was)
    numpy.random.set_state(numpy_was)


def free_bytes() -> int:
    """Return how much memory this machine, or this container (cgroup v2), has left."""
    free: int = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no such group, or no limit
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, free)


class Trainer:
    """One worker's training: the loop and what it works on."""

    def __init__(self, job: Job, launch: Launch, driver: Driver, events: Events, reduce: str, compress: bool,
                 plan: Plan | None = None):
        self.job, self.launch, self.driver, self.events, self.reduce = job, launch, driver, events, reduce
        self.state = ElasticState(job.model, job.optimizer, scaler=job.scaler, scheduler=job.scheduler, identity={
            "dataset_size": job.schedule.dataset_size, "global_batch": job.schedule.global_batch,
            "shards": job.schedule.shards, "seed": job.schedule.seed, "reduce": reduce} | cut_of(job.schedule))
        self.state.extras = job.extras
        if compress and reduce == "exact":
            raise ConfigError("compress is True, but reduce is 'exact', which sends what it sums as it is. Use "
                              "reduce=\"ring\" (--reduce ring), or leave compress out.")
        self.settings = settings_of(job.optimizer, job.scheduler, job.scaler, clip_norm=job.clip_norm, compress=compress,
                                    on_nan=job.on_nan)
        self.state.settings = self.settings
        if job.scaler:
            job.scaler.scale(torch.zeros((), device=job.device))  # makes its scale now, also where no shard is mine
        try:
            self.state.packed()  # nothing is copied: what cannot be kept is said now, and not by each checkpoint
        except TypeError as error:
            raise ConfigError(f"{error}. Change what the state_dict of extras and of the schedule, get_extra_state of the "
                              f"modules, or the optimizer's groups, hold.") from error
        if lacking := self.state.extra_state.lacking:
            raise ConfigError(f"the modules of {lacking} have get_extra_state, but no set_extra_state. Give them both.")
        self.replica = Replica(self.state)
        self.flat = Flat(named_parameters(job.model), self.state.buffers, job.device)
        shards = job.schedule.shards
        self.reducer: Reducer = (ExactReducer(self.flat, shards) if reduce == "exact"
                                 else RingReducer(self.flat, shards, compress=compress))
        self.world = World(launch, driver, events)
        self.checkpoints, self.timing = None, Timing()
        if launch.store or launch.run_dir:
            url = launch.store or str(launch.run_dir / "checkpoints")  # type: ignore[operator]
            try:
                plan = replace(plan or Plan(), compared_after=self.replica.slices if launch.horovod else 0)
                self.checkpoints = Checkpoints(open_store(url), events.emit, plan, describe(job))
            except StoreRefused as error:
                raise ConfigError(str(error)) from error
        self.world.is_saving = self._is_saving
        self.world.all_parts, self.world.part_from_odd = self.replica.all_parts, self._part_from_odd
        self._leave_seen: int | None = None
        """How many steps were finished when this worker heard that a member of this generation leaves."""
        self._leave_saved = self._has_room = False
        self._restored_step = -1
        """The step with which this attempt began, as far as this worker was there: then all held the same bits."""
        self.error: BaseException | None = None
        self._losses: dict[int, tuple[torch.Tensor, numpy.ndarray]] = {}
        """Of this step's shards that this worker has run: the loss, and its samples."""
        self._shard = -1
        """The shard in hand; -1 where all workers do the same."""

    def run(self) -> Result:
        """Warm up, stand ready, and train in generation after generation."""
        job, state = self.job, self.state
        self._warm_up()
        self._take_own_legacy()
        if not isinstance(self.driver, Alone):
            signal.signal(signal.SIGTERM, lambda *_: self.driver.drain())
        if isinstance(self.driver, OurDriver):
            driver = self.driver
            driver.write_alone = self._write_while_waiting
            if self.checkpoints:
                driver.is_saving, driver.published = self.checkpoints.is_moving, self.checkpoints.newest
            driver.start(state.has_state, state.committed, self.world.arithmetic)
        try:
            self.world.run(state, self.steps, restore=self._restore, roll_forward=self._apply,
                           live_state=self._write_live_state)
        except RunOver as over:
            if over.verdict in ("failed", "interrupted"):
                self._write_last_words()
                if isinstance(self.driver, OurDriver):
                    self.driver.tell_last(state.committed)
            if over.verdict != "finished" or state.committed < job.schedule.steps:
                raise  # finished: a peer has seen the last vote pass, and this worker had applied the last step
        self.driver.finish(state.committed)
        return Result(steps=state.committed, samples=state.samples, loss=state.loss, model=job.model,
                      weights_sha256=weights_sha256(state), rank=self.world.rank)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def steps(self) -> None:
        """Do all steps that are left; entered again in every generation."""
        job, state, world = self.job, self.state, self.world
        self._say_where_we_are()
        self._leave_seen, self._leave_saved, self._has_room = None, False, False
        if self.checkpoints:
            self.checkpoints.enter_world()
        pace = Pace(self.events)
        for step in range(state.committed, job.schedule.steps):
            started = time.monotonic()
            samples, digest = self._forward_backward(step)
            computed = time.monotonic()
            self.events.reach("step.computed", step=step)
            self.reducer.send(world)                                            # network: the gradients, once
            held = self.replica.parts(step)                                     # while they are on their way
            self._reduce()
            state.extra_state.share(partial(self._from_first_shard, step))
            state.prepare()
            self.events.reach("step.prepared", step=step)
            if not self.events.flush():
                raise PeersLost("the driver has not taken the line of the step before")
            control = world.vote(step, samples, digest, self.error is not None,  # network: one word. All have them
                                 *self._checkpoint_words(state.committed + 1), held=held)
            self.events.reach("step.voted", step=step)
            voted = time.monotonic()
            self._raise_if_failed(control.failed_rank)
            if control.differs and not world.drifts(step):
                self._part_from_odd(held, range(world.size))                    # leaves the loop
            self._judge_loss(step)
            self._apply(control.samples, control.digest)
            self.events.reach("step.applied", step=step)
            step_s = time.monotonic() - started
            world.note_step(step, step_s)
            self._say_committed(step, step_s)
            self.timing.step(step_s, self._is_uploading())
            if world.rank == 0:
                pace.step(step, step_s, voted - computed)
            self._mind_checkpoints(control)                                     # the store is behind us, but for one copy
            if control.stop or control.all_drain:
                self._checkpoint_now(instead=2 * control.uploaded < world.size)  # nothing may be lost
            if control.stop:
                raise RunOver("interrupted", f"stopped after step {state.committed}")
            if control.change:
                raise WorldChanged                                              # somebody joins or leaves
        self._finish()

    def _part_from_odd(self, held: list[Part], among: Sequence[int]) -> None:
        """End this generation: somebody's replica differs. Who is odd leaves; the others do the step again."""
        step = self.state.committed
        same_step = max(step - self.replica.slices, self._restored_step, 0)
        self.world.find_odd(step, held, same_step, among)
        self._go_back(step, same_step)

    def _go_back(self, step: int, same_step: int) -> None:
        """Let nobody restore what was published after a step, all together, and drop the state."""
        checkpoints, is_first = self.checkpoints, self.world.rank == 0
        left = -1
        if checkpoints is not None:
            text = str(checkpoints.withdraw(self.state.lineage, same_step)) if is_first else ""  # the store
            left = int(self.world.share_text(text, 0))
        if left < 0 or (left == 0 and not self.launch.driver):
            raise ReplicasDisagree(
                f"the {self.world.size} workers hold different bits in step {step}, no majority of them holds the same, "
                f"and no checkpoint of step {same_step} or before is left: each later one may hold the wrong bits. The "
                f"hosts stand in the event worker.replica_differs: test their memory. Then start the run anew under "
                f"another name (--run), with 3 or more workers: they find out whose bits are wrong.")
        raise StateWithdrawn(f"no majority holds the same bits in step {step}: back to step {left}")

    def _forward_backward(self, step: int) -> tuple[int, int]:
        """Run my shards of a step into the flat buffers; returns the number and digest of my samples."""
        self.state.begin()
        self.flat.find_marks(self.state.buffers_before())
        try:
            return self._run_shards(step)
        except GradientsWritten:  # nothing has left this worker: its shards are run again, each with its own gradients
            self.flat.isolates = True
            return self._run_shards(step)

    def _run_shards(self, step: int) -> tuple[int, int]:
        job, samples, digest = self.job, 0, 0
        mine = self.reducer.begin(self.world)
        self.error = self.checkpoints.fenced if self.checkpoints else None
        self._losses = {}
        for shard in mine:
            if self.driver.is_broken():
                raise PeersLost("a member is gone: this step cannot pass the vote")
            done = self.reducer.shard(shard, is_last=shard == mine.stop - 1)
            indices = job.schedule.shard_samples(step, shard)
            if len(indices) and self.error is None:
                with self._user_code(shard):
                    self._one_shard(step, shard, indices, overlaps=shard == mine.stop - 1)
                samples, digest = samples + len(indices), digest + samples_digest(indices)
            done()
        if self.error is None:
            with self._user_code():
                self.state.check_groups()
                self.state.rates.check(step)
        return samples, digest

    def _from_first_shard(self, step: int, text: str) -> str:
        """Give everybody the text of the worker that has run the step's first shard."""
        owner = owner_of(self.job.schedule.first_shard(step), self.world.size, self.job.schedule.shards)
        return self.world.share_text(text, owner)

    def _one_shard(self, step: int, shard: int, indices: numpy.ndarray, overlaps: bool) -> None:
        job, flat, weight = self.job, self.flat, self.job.schedule.shard_weight(step, shard)
        self.state.reset_buffers()
        seed_everything(job.schedule.shard_seed(step, shard))
        batch = to_device(fetch(job.dataset, indices, job.collate), job.device)
        flat.open_shard()
        loss = require_scalar(job.loss(job.model, batch))
        flat.check_parameters()
        self._losses[shard] = (loss.detach(), indices)
        flat.check_untouched()
        self._follow_requires_grad()
        flat.weigh_rest(weight)
        before, after = self.state.buffers_before(), named_buffers(job.model)
        if moved := moved_buffers(before, after):
            raise RuntimeError(f"forward has changed the buffers {some(moved.values())} in step {step}. {BUFFERS_STAY}")
        flat.add_statistics(weight, loss, before, after)
        if overlaps and isinstance(self.reducer, RingReducer):
            self.reducer.overlap(self.world)
        weighted = loss * weight
        (job.scaler.scale(weighted) if job.scaler else weighted).backward()
        try:
            flat.close_shard()
        except GradientsWritten as error:
            if not self.reducer.has_sent():
                raise
            raise RuntimeError(f"a hook has changed .grad during the backward pass of step {step}, after a part of it was "
                               f"sent. Let it do so from the first batch on, or use reduce=\"exact\".") from error
        self.state.adopt_buffers()
        if self.state.extra_state.modules and shard == job.schedule.first_shard(step):
            self.state.extra_state.keep()

    def _follow_requires_grad(self) -> None:
        """Train those parameters that require a gradient now: `after_step` or `loss` may have changed which."""
        flat, trained = self.flat, self.flat.trained_now()
        if trained == flat.trained:
            return
        if flat.shards_run:
            names = [name for name, now, was in zip(flat.names, trained, flat.trained, strict=True) if now != was]
            raise RuntimeError(f"requires_grad of {some(names)} differs between two shards of step {self.state.committed}, "
                               f"so the gradient would depend on the number of workers. Change it in after_step, or in "
                               f"loss by what the step's number says.")
        self.reducer.lay_out(trained)

    def _reduce(self) -> None:
        """Wait for the sum of all gradients. That workers train different parameters is the user's error, on all."""
        flat = self.flat
        try:
            self.reducer.finish(self.world)
        except SetsDiffer:
            mine = [name for name, is_trained in zip(flat.names, flat.trained, strict=True) if is_trained]
            told = [json.loads(text) for text in self.world.gather_texts(json.dumps(mine if flat.shards_run else None))]
            sets = [set(names) for names in told if names is not None]
            self.error = self.error or RuntimeError(
                f"requires_grad of {some(sorted(set.union(*sets) - set.intersection(*sets)))} differs between workers in "
                f"step {self.state.committed}. Change it in after_step, or in loss by what the step's number says.")

    @contextmanager
    def _user_code(self, shard: int = -1) -> Iterator[None]:
        """Keep what the user's code raises for the vote: all ranks must stop at the same point. What its machine has
        caused is raised at once: the others do the step again without this worker."""
        self._shard = shard
        try:
            yield
            self._shard = -1
        except (HorovodInternalError, PeersLost, GradientsWritten, KeyboardInterrupt):  # not the user's errors
            raise
        except BaseException as error:  # sys.exit() too
            if self.fault_of_machine(error):
                raise
            self.error = error

    def fault_of_machine(self, error: BaseException) -> str:
        """Return what of this machine has failed, if an exception says so and there are others who go on; else ""."""
        if not isinstance(self.driver, OurDriver) or self.world.size == 1 or isinstance(error, (PeerFailed, ConfigError)):
            return ""
        return machine_fault(error)

    def leave_as_dead(self, kind: str, text: str) -> NoReturn:
        """Say that this machine has failed, and end this process as a death would: nothing of the step was applied.

        Nothing else is tried on this machine: a disk that fails may hold an orderly end up for minutes.
        """
        assert isinstance(self.driver, OurDriver)
        step, shard = self.state.committed, self._shard
        with suppress(OSError):
            print(f"elastic-trainer: {kind} on {self.launch.host} in step {step}: this worker leaves, and "
                  f"the others do the step again.\n{text}", file=sys.stderr, flush=True)
        self.events.emit("worker.machine_failed", host=self.launch.host, error=kind, step=step, shard=shard,
                         text=text[-MAX_ERROR_CHARACTERS:])
        self.events.flush()
        self.driver.fail_machine(step, shard, kind, text)
        os._exit(EXIT_MACHINE)

    def _raise_if_failed(self, failed_rank: int) -> None:
        if failed_rank < 0:
            return
        text = "".join(traceback.format_exception(self.error)) if self.error else ""
        text = self.world.share_text(text, failed_rank)
        self.state.restore()
        if self.error:
            raise self.error
        raise PeerFailed(f"rank {failed_rank} failed in step {self.state.committed}:\n{text}")

    def _is_skipped(self, loss: float) -> bool:
        return self.job.on_nan == "skip" and not math.isfinite(loss)

    def _judge_loss(self, step: int) -> None:
        """Tell when the step's loss is not finite, and raise LossNotFinite on all workers if the job says so."""
        if self.flat.has_lost_digits():
            self.state.restore()
            raise RuntimeError(f"a buffer of whole numbers has changed by more than {MOST_CHANGE:.0f} in step {step}, of "
                               f"which the mean over the shards is not exact. Keep it in a float buffer, or change it "
                               f"in after_step.")
        loss, on_nan = self.flat.mean_loss(), self.job.on_nan
        if math.isfinite(loss):
            return
        mine = not_finite(self._losses)
        if mine and (on_nan != "continue" or step == 0 or math.isfinite(self.state.loss)):  # the first of many
            self.events.emit("worker.loss_not_finite", step=step, loss=loss, shards=sorted(mine),
                             samples=[mine[shard] for shard in sorted(mine)], on_nan=on_nan)
        if on_nan == "raise":
            told = self.world.gather_texts(json.dumps(list(mine.items())))      # network, before everybody stops
            self.state.restore()
            raise LossNotFinite(verdict(step, loss, dict(item for text in told for item in json.loads(text))))

    @torch.no_grad()
    def _apply(self, samples: int, digest: int) -> None:
        """Change everything that outlives the step, together. The prepared gradient is in the flat buffers."""
        job, state = self.job, self.state
        # What draws random numbers here (stochastic rounding, after_step) draws the same on every worker.
        seed_everything(job.schedule.shard_seed(state.committed, job.schedule.shards))
        state.is_applying = True
        if self._is_skipped(loss := self.flat.mean_loss()):
            state.reset_buffers()
            state.extra_state.forget()
            state.loss = loss
            state.rates.set(job.rate(state.committed))
        else:
            self._update()
        state.rates.advance(state.loss)
        job.after_step(state.committed)
        state.check_groups()
        state.check_parameters()
        state.commit(samples, digest)
        state.is_applying = False

    def _update(self) -> None:
        """Change buffers, weights, optimizer and scaler by what the shards have left."""
        job, state = self.job, self.state
        self.flat.hand_out()
        state.loss = self.flat.apply_statistics(state.buffers_before(), state.buffers)
        if job.scaler:
            job.scaler.unscale_(job.optimizer)
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(job.model.parameters(), job.clip_norm)
        state.rates.set(job.rate(state.committed))
        if job.scaler:
            job.scaler.step(job.optimizer)
            job.scaler.update()
        else:
            job.optimizer.step()
        state.extra_state.apply()

    # --- around the loop -----------------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Pay for everything that is slow the first time, before this worker stands ready; nothing remains of it."""
        job = self.job
        trained = self.flat.trained_now()
        self.state.begin()
        shards = (job.schedule.shard_samples(0, shard) for shard in range(job.schedule.shards))
        first = next(indices for indices in shards if len(indices))
        _, result = self._try_shard(first, may_add_buffers=True)
        new = self._take_new_buffers()
        started = time.monotonic()
        inputs, again = self._try_shard(first, constant=new)
        shard_s = time.monotonic() - started  # the first time takes longer
        results = {again} if new else {result, again}  # of sums with other statistics
        if job.schedule.smallest_shard < len(first):
            self._rehearse_smallest_shard(first[:job.schedule.smallest_shard])
        self.state.forget()
        self.world.arithmetic = Arithmetic(probe.program(job.device), inputs, results.pop() if len(results) == 1 else 0,
                                           probe.facts(job.device), self.reduce == "exact")
        if self.checkpoints:
            self.checkpoints.facts["arithmetic"] = self.world.arithmetic.to_words()
        self.world.expected_step_s = lambda size: shard_s * -(-job.schedule.shards // size)
        self.flat.adopt(trained)
        for tensor in self.flat.sums.values():
            tensor.zero_()
        self.flat.bind(self.flat.sums)

    def _rehearse_smallest_shard(self, indices: numpy.ndarray) -> None:
        """Compute as many samples as the smallest shard of the run has: else a loss that fails on them fails hours later.

        The samples are some that have just passed in a larger shard, so it is their number that fails.
        """
        schedule = self.job.schedule
        try:
            self._try_shard(indices)
        except Exception as error:
            left = schedule.dataset_size % schedule.global_batch
            raise ConfigError(f"the last step of each epoch has {left} samples, its smallest shard {len(indices)}, and on "
                              f"a shard of that size the loss raises {type(error).__name__}: {str(error).rstrip('.')}. "
                              f"Use drop_last=True, or another global_batch or shards.") from error

    def _take_new_buffers(self) -> list[str]:
        """Keep the buffers that the first forward pass has made, too; returns their names."""
        known = set(self.state.buffers)
        self.state.take_buffers()
        if new := [name for name in self.state.buffers if name not in known]:
            self.state.begin()
            self.reducer.lay_out(self.flat.trained, self.state.buffers)
        return new

    def _try_shard(self, indices: numpy.ndarray, *, may_add_buffers: bool = False,
                   constant: Sequence[str] = ()) -> tuple[int, int]:
        """Run a shard of which nothing remains but what it says of the user's code: whether that writes to `.grad`.

        Returns checksums of what went in (weights, samples) and of what came out (loss, gradient). Raises ConfigError for
        buffers that have moved, or are not as `constant` as they should be.
        """
        try:
            return self._try_backward(indices, may_add_buffers, constant)
        except GradientsWritten:
            self.flat.isolates = True
            return self._try_backward(indices, may_add_buffers, constant)

    def _check_warm_buffers(self, may_add: bool, constant: Sequence[str]) -> None:
        before, after = self.state.buffers_before(), named_buffers(self.job.model)
        moved = {name: how for name, how in moved_buffers(before, after).items() if name in before or not may_add}
        if moved:
            raise ConfigError(f"forward has changed the buffers {some(moved.values())}. {BUFFERS_STAY}")
        if changed := [name for name in constant if not torch.equal(byte_view(before[name]), byte_view(after[name]))]:
            raise ConfigError(f"the buffers {some(changed)} are made in the first forward pass and changed by the second, "
                              f"so their first values would be those of the warm-up. Register them in __init__.")

    def _try_backward(self, indices: numpy.ndarray, may_add_buffers: bool, constant: Sequence[str]) -> tuple[int, int]:
        flat, job = self.flat, self.job
        # On every worker the same: the results are compared. A buffer that is made now is as the first shard makes it.
        seed_everything(job.schedule.shard_seed(0, 0))
        batch = to_device(fetch(job.dataset, indices, job.collate), job.device)  # anew: a loss may take it apart
        held = self.replica.all_parts()
        inputs = fingerprint([held, batch])
        flat.shards_run = 0
        try:
            flat.bind(flat.sums)
            for tensor in flat.sums.values():
                tensor.fill_(1.0)  # so that also a `.grad.data.zero_()` is seen, which no version counts
            flat.open_shard()
            loss = require_scalar(job.loss(job.model, batch))
            flat.check_untouched()
            if not flat.isolates and not all(bool((gradient == 1).all()) for gradient in flat.sums.gradients):
                raise GradientsWritten
            self._check_warm_buffers(may_add_buffers, constant)
            self._follow_requires_grad()
            for tensor in flat.sums.values():
                tensor.zero_()  # else the sums keep few bits of a small gradient
            loss.backward()
            flat.close_shard()
            self.state.check_parameters()
            if changed := {name for name, _ in set(held) ^ set(self.replica.all_parts())} & set(flat.names):
                raise ConfigError(parameters_stay(sorted(changed)))
            return inputs, fingerprint([loss, *flat.sums.values()])
        finally:
            self.state.reset_buffers()
            flat.shards_run = 0

    def _take_own_legacy(self) -> None:
        """Go on with the live state that this process left for itself when `hvd.init()` failed under it."""
        memory = self.launch.revived_from
        values = revive.read_live_state(memory) if memory is not None else None
        if values is None:
            return
        self.state.load(values["state"])
        self.state.begun, self.state.prepared = values["begun"], values["prepared"]
        self.state.take_up(values["buffers_before"])
        if values["gradients"]:
            self.reducer.lay_out(values["facts"]["trained"])
        self.state.extra_state.take_up(values["extra_state"])
        for name, tensor in values["gradients"].items():
            self.flat.sums[getattr(torch, name)].copy_(tensor)
        self.events.emit("worker.revived", step=self.state.committed)

    def _write_live_state(self) -> Any:
        is_prepared = self.state.prepared > self.state.committed
        gradients = {str(d).removeprefix("torch."): t for d, t in self.flat.sums.items()} if is_prepared else {}
        return revive.write_live_state(self.state, gradients, {"trained": self.flat.trained})

    def _write_last_words(self) -> None:
        """Write what only memory holds, when the attempt ends while this worker waits: one that can does it for all."""
        state = self.state
        if not self.checkpoints or not state.has_state or state.is_applying:
            return
        started, pause_s = time.monotonic(), 0.05
        tries = 0
        while tries < LAST_TRIES and not self.checkpoints.is_published(state.committed, state.lineage):
            if self.driver.is_writer(self.world.rank, time.monotonic() - started):
                tries += 1
                self.checkpoints.write_alone(state)
            time.sleep(pause_s)  # all workers ask the store: hundreds at 20 times a second are its whole load
            pause_s = min(MOST_PAUSE_S, 1.3 * pause_s)

    def _write_while_waiting(self) -> None:
        """Go on with a checkpoint that this worker makes alone, because all who hold the state may go any moment."""
        if self.checkpoints and self.state.has_state and not self.state.is_applying:
            self.checkpoints.go_on_alone(self.state)

    def _restore(self) -> str:
        """Give the workers values although nobody has any: the newest checkpoint's, or those rank 0 was built with."""
        checkpoints, is_first = self.checkpoints, self.launch.attempt == 1 or not self.launch.driver  # a person looks on
        if self.world.rank == 0 and not self.launch.driver:  # this life begins, and no launcher says so
            self.events.emit("run.started", options={})
            self.events.emit("attempt.started")
        for remark in self.job.remarks:
            self._say(remark)
        try:
            step = checkpoints.restore(self.state, self.world, insist=not is_first) if checkpoints else None
        except StoreRefused as error:
            if checkpoints and checkpoints.log.last is None and self.world.rank == 0 and is_first:
                raise ConfigError(str(error)) from error  # the store was never usable: later that is the world's fault
            raise self._ask_again(error) from error
        except StoreUnavailable as error:
            raise self._ask_again(error) from error
        if step is None and self.launch.resume_step:
            raise ConfigError(f"the run has a checkpoint of step {self.launch.resume_step}, but {self.launch.run_dir} on "
                              f"this host has none. Give the same --store as before, or put the folder of runs "
                              f"(--runs-dir) on a disk that all hosts share.")
        if step is not None and step > self.job.schedule.steps:
            raise ConfigError(f"the run has a checkpoint of step {step}, but it is to have {self.job.schedule.steps}. "
                              f"Give as many steps as before (max_steps, epochs) or more, or another name (--run).")
        self.state.has_state = step is not None or self.world.rank == 0
        self._restored_step = step or 0
        if step:
            self._settle(step)
        if step is not None and checkpoints and self.world.rank == 0:
            self._compare_with_writer(step, checkpoints.restored)
        return "fresh" if step is None else "checkpoint"

    def _say(self, remark: Remark) -> None:
        """Tell a person and the diary what holds; by rank 0 alone."""
        if self.world.rank == 0:
            self.events.emit(remark.event, **remark.facts)
            print(f"elastic-trainer: {remark.sentence}", file=sys.stderr, flush=True)

    def _settle(self, step: int) -> None:
        """Tell where the run's settings differ from what is given now, and which hold."""
        state, job = self.state, self.job
        remarks, state.settings = settle(state.settings, self.settings)
        if job.scheduler is None:
            remarks += schedule_differs(step - 1, state.rates.used, state.rates.of(job.rate(step - 1)))
        for remark in remarks:
            self._say(remark)

    def _compare_with_writer(self, step: int, facts: Mapping[str, Any]) -> None:
        """Tell when a run goes on with other arithmetic than its checkpoint was computed with: allowed, and no more the
        same bits."""
        mine, writers = self.world.arithmetic, None
        # Others may have written these words. They are no reason to stop.
        with suppress(LookupError, TypeError, ValueError, AttributeError):
            writers = Arithmetic.from_words(facts.get("arithmetic"))
        if mine and writers and computes_otherwise(mine, writers):
            differ = facts_that_differ(mine, writers)
            self.events.emit("worker.arithmetic_differs", level="warning", step=step, other="the checkpoint's writers",
                             differs=differ, refused=False, meaning=advice(False, differ))

    def _ask_again(self, error: StoreUnavailable) -> PeersLost:
        """Return what ends this generation after a while: the next one asks the store again."""
        self.events.emit("state.store_unavailable", error=str(error))
        time.sleep(RESTORE_PAUSE_S)
        return PeersLost(f"the store: {error}")

    def _say_where_we_are(self) -> None:
        state, schedule = self.state, self.job.schedule
        if self.world.rank != 0:
            return
        self.events.emit("job.described", dataset_size=schedule.dataset_size, global_batch=schedule.global_batch,
                         shards=schedule.shards, epochs=schedule.epochs, seed=schedule.seed,
                         max_steps=schedule.max_steps, steps=schedule.steps, reduce=self.reduce,
                         drop_last=schedule.drop_last, dropped_samples=schedule.dropped_samples)
        for remark in remarks_on_workers(self.world.size, schedule.shards):
            self._say(remark)
        if self.launch.run_dir:
            report.take_back_result(self.launch.run_dir, schedule.steps)
        if state.committed:  # the rank 0 before us may have died before it could write this
            self._say_committed(state.committed - 1, 0.0, repeated=True)

    def _say_committed(self, step: int, step_s: float, **more: Any) -> None:
        self.driver.note("training", self.state.committed)
        if self.world.rank == 0:
            samples, digest = self.state.last_vote
            self.events.emit("worker.step_committed", step=step, samples=samples, digest=digest,
                             loss=self.state.loss, lr=self.state.rates.used, step_s=round(step_s, 5),
                             **({"skipped": True} if self._is_skipped(self.state.loss) else {}), **more)

    def _is_uploading(self) -> bool:
        return self.checkpoints is not None and (self.checkpoints.share is not None or self.checkpoints.is_publishing())

    def _is_saving(self) -> bool:
        """True while something is on its way to the store, or is to go there, that a leaving host has still time for."""
        return self.checkpoints is not None and (self._is_uploading() or self._is_leave_unsaved())

    def _is_leave_unsaved(self) -> bool:
        """True if a host of ours leaves under notice and no checkpoint has been made since.

        Losses come in groups: while it is there its share of the bytes goes up faster than without it. Rank 0 tries it
        once, and then has no reason to wait any more; the others wait until they hear that it is published.
        """
        assert self.checkpoints is not None
        if not self.driver.somebody_leaves():
            return False
        if self._leave_seen is None:
            self._leave_seen = self.state.committed
        return self.checkpoints.newest_step < self._leave_seen and not self._leave_saved

    def _checkpoint_words(self, step: int) -> tuple[tuple[bool, bool], bool, int]:
        """Return what the vote says of checkpoints: (my share is up, it has failed), rank 0's wish after `step`, and the
        newest step that it knows to be published.
        """
        checkpoints = self.checkpoints
        if checkpoints is None:
            return (False, False), False, -1
        is_due = self.world.rank == 0 and self.timing.is_due(checkpoints, step, self.launch, self.events)
        if self._is_uploading():
            is_due = False
        elif self.driver.wants_change():
            is_due = self.world.rank == 0 and self._is_leave_unsaved()
        return checkpoints.progress(), is_due, checkpoints.newest_step

    def _mind_checkpoints(self, control: Control) -> None:
        """Go one step further with the checkpoint in flight: everybody here does the same, by the vote's word."""
        checkpoints, state, world = self.checkpoints, self.state, self.world
        if checkpoints is None:
            return
        checkpoints.know(control.published)
        if not self._has_room:
            self._has_room = True
            checkpoints.make_room(state, world.size)
        if control.upload_failed:
            checkpoints.drop()
        elif control.uploaded == world.size:
            checkpoints.collect(world.gather_texts(checkpoints.parts_up()), state.lineage, publish=world.rank == 0)
        if control.checkpoint:
            if checkpoints.may_begin(state, world):
                checkpoints.begin(state, world.rank, world.size)
            self.timing.begun(state.committed, checkpoints)
            self._leave_saved = world.rank == 0 and self._leave_seen is not None
            self.events.reach("state.share_begun", step=state.committed, pause_s=self.timing.pause_s)
        if control.change_waits:  # for what is on its way to the store
            checkpoints.hurry()

    def _checkpoint_now(self, *, instead: bool = False) -> None:
        """Publish a checkpoint of the last step and wait for it, all together; after so many failures go on without.

        `instead`: drop what is in flight of an older one, because the seconds that are left may not do for both.
        """
        checkpoints, state, world = self.checkpoints, self.state, self.world
        if checkpoints is None:
            return
        if instead and checkpoints.share and checkpoints.share.step < state.committed:
            checkpoints.drop("a newer one is made at once")
        tries = 0
        while True:
            checkpoints.wait()                                                  # the store
            is_due = world.rank == 0 and checkpoints.share is None and (
                checkpoints.newest_step < state.committed and tries < LAST_TRIES and not checkpoints.fenced)
            self.error = checkpoints.fenced
            control = world.vote(state.committed, 0, 0, self.error is not None, checkpoints.progress(),
                                 is_due, checkpoints.newest_step)
            self._raise_if_failed(control.failed_rank)
            had_share = checkpoints.share is not None
            self._mind_checkpoints(control)
            tries += bool(control.checkpoint)
            if not had_share and not control.checkpoint:
                return

    def _finish(self) -> None:
        """Make the result durable, then agree that the run is over: exit code 0 comes after this vote (F11)."""
        state, world = self.state, self.world
        held = self.replica.all_parts() if world.size > 1 else []  # also what no vote has seen since the last steps
        if world.vote(state.committed, 0, 0, False, held=held).differs and not world.drifts(state.committed):
            self._part_from_odd(held, range(world.size))
        self._checkpoint_now()
        if self.world.rank == 0:
            self.events.emit("run.finished", steps=state.committed, samples=state.samples, loss=state.loss,
                             weights_sha256=weights_sha256(state))
            self.events.flush()
            if self.launch.run_dir:
                report.write_result(self.launch.run_dir)
        self.world.vote(state.committed, 0, 0, has_failed=False)


def describe(job: Job) -> dict[str, Any]:
    """Return what a checkpoint's record says of the job, for people."""
    schedule = job.schedule
    return {"schedule": {name: getattr(schedule, name) for name in (
                "dataset_size", "global_batch", "shards", "epochs", "seed", "max_steps", "drop_last", "min_shard_samples",
                "steps")},
            "config": {"optimizer": type(job.optimizer).__name__, "clip_norm": job.clip_norm,
                       "model": type(job.model).__name__},
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "horovod": horovod.__version__,
                         "numpy": numpy.__version__}}


def fewest_samples(model: torch.nn.Module, global_batch: int, shards: int) -> int:
    """Return how many samples a shard of this model needs, as far as its modules say, and a full batch's shards have.

    In training mode a BatchNorm raises on one value per channel (torch/nn/functional.py, _verify_batch_size).
    """
    kinds = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
    is_needed = any(isinstance(module, kinds) for module in model.modules())
    return 2 if is_needed and global_batch >= 2 * shards > 0 else 1


def cut_of(schedule: Schedule) -> dict[str, Any]:
    """Return what the state's identity says of short last batches: nothing where they are as they were in version 0.1."""
    dropped = {"drop_last": True} if schedule.dropped_samples else {}
    return dropped | ({"min_shard_samples": schedule.min_shard_samples} if schedule.merges else {})


def weights_sha256(state: ElasticState) -> str:
    """Return the SHA-256 over the names and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in [*named_parameters(state.model).items(), *state.buffers.items()]:
        digest.update(name.encode() + b"\0")
        digest.update(byte_view(tensor).numpy().data)
    return digest.hexdigest()


def seed_everything(seed: int) -> None:
    """Seed every generator that user code draws from (torch on all devices, random, numpy)."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
