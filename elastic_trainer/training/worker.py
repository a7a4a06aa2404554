"""One worker's life: it rehearses as a standby, takes its place, trains, and ends with the right
exit code.

train() and Trainer → here → loop; exceptions → here → driver, event log, exit code

What always holds: exit code 0 means that the run is finished. A worker that is not wanted any more
leaves with 75. failures.py says what an exception does.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elastic_trainer.config import ConfigError, Launch
from elastic_trainer.evaluate.evaluation import Examination, examine
from elastic_trainer.events import summary as report
from elastic_trainer.events.log import Events
from elastic_trainer.host.output import outlive_readers
from elastic_trainer.loggers.rows import Rows
from elastic_trainer.options import Options
from elastic_trainer.reduce.ring import Sending
from elastic_trainer.training import debugger
from elastic_trainer.training.account import is_finished, is_in_store
from elastic_trainer.training.after_step import StopRequest
from elastic_trainer.training.checks.carried import CarriedValues
from elastic_trainer.training.determinism import (
    advise_on_shapes,
    choose_settings,
    compiler_settings,
    expect_exact,
)
from elastic_trainer.training.failures import (
    UserExited,
    end_as_user_error,
    leave_as_dead,
    leave_differing,
    leave_if_sent,
    leave_unsaved,
    text_of,
)
from elastic_trainer.training.job import averages
from elastic_trainer.training.job.job import Job, Result, plan_of, sent, settled
from elastic_trainer.training.job.settings import in_use
from elastic_trainer.training.listeners import open_timeline, opened, shown
from elastic_trainer.training.loop import Loop, restart_for_memory
from elastic_trainer.training.stages import Begun, Evaluated, Microbatch, Portion, Stage
from elastic_trainer.training.warm_up import rehearse, warm_nccl
from elastic_trainer.world import standby as standby
from elastic_trainer.world.drivers import driver_of
from elastic_trainer.world.place import MAX_ERROR_CHARACTERS, Driver
from elastic_trainer.world.replicas import ReplicaDiffers

LOST_AVERAGE = (
    "a part of the averaged weights was lost with all workers that had it, while averaged() waited "
    "for it. Start the run again: the same command resumes it from the newest checkpoint.")


class Worker:
    """One worker: its place in the run, and its loop."""

    def __init__(self, job: Job, options: Options):
        self.job, self.options = in_use(job, options), options
        self.launch = Launch()
        self.events = Events(None)
        self.driver = Driver()
        self.loop: Loop | None = None
        """None until this worker has a place."""
        self.stop_request = StopRequest(job.best)
        self.rows = Rows(options["loggers"])
        self.carried = CarriedValues(job.model, job.state.values)
        self.advice = ""
        """A remedy for a person, if the user's code has failed on the batch in hand."""
        self._compiler = compiler_settings()  # torch's settings, as the user has them
        debugger.offer()

    @property
    def rank(self) -> int:
        """This worker's number in its world; -1 until it has joined one."""
        return self.loop.world.rank if self.loop and self.has_joined else -1

    @property
    def has_joined(self) -> bool:
        """True from this worker's first step on."""
        return self.loop is not None and self.loop.has_joined

    @property
    def size(self) -> int:
        """The size of this worker's world; 0 until it has joined one."""
        return self.loop.world.size if self.loop and self.has_joined else 0

    @property
    def has_run(self) -> bool:
        """Return whether anything of the run outlives this process."""
        return bool(self.launch.run_dir or self.launch.store or self.launch.driver)

    @property
    def must_vote(self) -> bool:
        """True under plain horovodrun: only the vote informs the other workers of an exception."""
        return self.launch.horovod and not self.launch.driver

    @property
    def is_applying(self) -> bool:
        """True while the loop itself calls the optimizer."""
        return self.loop is not None and self.loop.state.is_applying

    def stages(self) -> Generator[Stage, None, Result]:
        """Live: yield what the user's code has to do, and return the result of the finished run.

        Raises ConfigError for what cannot work, and what the user's code raises. Leaves by
        SystemExit if this worker is not wanted any more.
        """
        has_begun = not self._is_finished()
        if has_begun:
            # Before this process has threads and connections; a standby has them ready.
            self.job.readers.training.start()
            yield Begun(0, is_trial=True)  # the number is known when this worker has joined
        if self.job.device.type == "cpu":
            torch.set_num_threads(self.options["cpu_threads"])
        if standby.is_standby():
            yield from self._rehearse()
        stood_by = standby.wait_for_place()
        reduce = self._take_place()
        if self.launch.horovod:
            warm_nccl(self.job.device)
        if stood_by:
            self.events.emit("worker.stood_by", **stood_by)
        self.driver = driver_of(self.launch, self.events)
        require_main_thread(self.driver)
        try:
            is_shown = self.options["progress"] and not (self.launch.driver or self.launch.horovod)
            with shown(self.events) if is_shown else nullcontext():
                self.loop = Loop(self.job, self.launch, self.driver, self.events, reduce,
                                 sent(self.options), plan_of(self.options), self.stop_request)
                return (yield from self.loop.stages(has_begun=has_begun))
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self.job.readers.close()
            report_memory(self.job.device, self.events)
            self.events.trace.close()
            self.rows.close()
            self.events.flush()
            if self.launch.run_dir and not self.launch.driver and not self.events.bound.get("rank"):
                # The result of what there is, if the run has not finished.
                report.write_result(self.launch.run_dir)

    def _is_finished(self) -> bool:
        """Return whether the run is known to be finished, before this worker has its place. Under
        our launcher a finished run has no worker."""
        steps, launch = self.job.schedule.steps, Launch.from_environment()
        store = None if launch.driver else launch.store or self.options["store"]
        return is_finished(run_dir_of(self.options), steps) or is_in_store(store, steps)

    def _rehearse(self) -> Generator[Stage, None, None]:
        expect_exact(self.job.device.type, self.options["reduce"])
        warm_nccl(self.job.device)
        yield from rehearse(
            self.job, Loop(self.job, Launch(), Driver(), Events(None), "exact", Sending()).warm_up)

    def _take_place(self) -> str:
        """Read the launcher's options, and open the event log; returns the reducer."""
        launch = Launch.from_environment()
        if launch.horovod:
            # Horovod's own variable changes with every generation. A process alone leaves its
            # environment as it is: a horovodrun that it starts would give all workers this slot.
            os.environ["ELASTIC_TRAINER_SLOT"] = str(launch.slot)
            outlive_readers()
            # Under plain horovodrun. Our driver enables it before the first import.
            if not faulthandler.is_enabled():
                faulthandler.enable()
        launch, reduce, remarks = settled(launch, self.options, self.job.device, self.job.words)
        choose_settings(self.job.device.type, reduce, self._compiler)
        self.job = replace(self.job, remarks=(*self.job.remarks, *remarks))
        self.launch, self.events = opened(launch, [
            *(self.options["listeners"] or ()), *self.rows.listeners()])
        self.job.readers.report_to(partial(self.events.emit, "worker.loader_restarted"))
        self.rows.begin(self.launch.run_dir, self.events.emit)
        if self.options["timeline"] or launch.timeline:
            open_timeline(self.launch, self.events, self.job.words)
        return reduce

    def fail(self, error: BaseException) -> None:
        """End this worker: by SystemExit, as a dead one, or by an error that the caller raises."""
        if isinstance(error, ReplicaDiffers):
            leave_differing(error, self.driver, self.events)
        leave_if_sent(error, self.events)
        if leave_unsaved(error, self.driver, self.launch, self.events):
            return
        self.report(error)
        if self.launch.driver:
            end_as_user_error()
        if not isinstance(error, Exception):
            raise UserExited(f"the user's code ended with {error!r}. Raise an exception instead."
                             ) from error

    def report(self, error: BaseException) -> None:
        """Report the user's exception: it ends the run everywhere. A fault of the machine ends this
        process alone."""
        advise_on_shapes(error)
        if self.launch.horovod:
            debugger.advise(error)
        text = text_of(error)
        if self.loop and (kind := self.loop.fault_of_machine(error)):
            leave_as_dead(kind, text, self.loop.state.committed, self.loop.microbatches.number,
                          launch=self.launch, driver=self.driver, events=self.events)
        if self.loop:
            restart_for_memory(self.loop, error, text)
        text += self.advice
        self.events.emit("worker.failed", error=text[-MAX_ERROR_CHARACTERS:])
        # The driver learns of a worker that never stood ready by its exit code.
        self.driver.report(error=text)
        self.events.flush()

    def end_with(self, error: BaseException, stages: Iterator[Stage]) -> None:
        if not self.must_vote:
            self.report(error)
            return
        # Horovod's driver takes no reports. The vote informs the other workers, so this one goes on
        # to it.
        with suppress(BaseException):  # it was reported, and the interpreter shows it
            for stage in stages:
                if isinstance(stage, (Microbatch, Portion)):
                    stage.fail(error)

    def evaluate(self, examination: Examination,
                 draw: Callable[[], Stage | None]) -> dict[str, Any]:
        """Evaluate the model: with all workers after a step, and alone when the run is over."""
        if not (self.loop and self.loop.after_step.is_running):
            return examination.alone()
        self.loop.after_step.evaluations.ask(examination)
        average = self.job.average
        if average is None:
            return examine(examination, draw)

        def with_trained_values() -> Stage | None:
            with average.hidden():  # a worker that joins receives them
                return draw()

        return examine(examination, with_trained_values)

    def take_for_best(self, means: Mapping[str, Any]) -> None:
        """Let an evaluation after a step decide which step is the best. Raises RuntimeError."""
        if (best := self.job.best) and self.loop and self.loop.after_step.is_running:
            step = self.loop.state.committed - 1
            if best.take(best.found_in(means), step) and self.loop.world.rank == 0:
                self.events.emit("worker.best_found", step=step, metric=best.rule.metric,
                                 value=best.value)

    def averaged(self, draw: Callable[[], Stage | None]) -> AbstractContextManager[None]:
        """Let the model have the averaged weights for a while. With `shard` all workers call it
        after a step. Raises RuntimeError."""
        return averages.shown(self.job.average, partial(whole_average, self, draw))

    def left_averaged(self) -> RuntimeError | None:
        is_shown = self.job.average is not None and self.job.average.is_shown
        return RuntimeError(averages.SHOWN) if is_shown else None

    def forbid_step(self, *_: Any) -> None:
        if not self.is_applying:
            raise RuntimeError(
                "optimizer.step() was called in the loop. The trainer calls it once for each step, "
                "when the gradients of all workers have arrived. Remove the call, and zero_grad() "
                "too: it is not needed.")

    def finish(self, reason: str) -> None:
        self.stop_request.ask(str(reason))

    def leave(self, how: str, *, saves: bool = False) -> None:
        """Report that the user's loop was left before its end: the run ends everywhere, and can be
        resumed. `saves`: first with a checkpoint of the last finished step."""
        step = self.loop.state.committed if self.loop else 0
        if saves and (error := why_lost(self.loop)):
            print(f"elastic-trainer: the training loop was left {how} after {step} steps, without "
                  f"a checkpoint of them: {error}", file=sys.stderr, flush=True)
            self.report(error)
            return
        text = (f"the training loop was left {how} after {step} of {self.job.schedule.steps} "
                f"steps, so the run is not finished.")
        if saves:
            self.driver.report(left=text)
            if self.loop and self.loop.state.phase == 0:
                state = self.loop.state
                with state.modes.to_copy(is_last=not state.is_in_flight):
                    self.loop.checkpointing.write_last(self.loop.world.rank)
        kept = self.loop.checkpointing.newest_step() if self.loop else -1
        resumed = (f"The same command goes on from the checkpoint of step {kept}." if kept > 0
                   else "It has no checkpoint, so the same command begins it anew.")
        text = f"{text} {resumed} To finish a run early, call step.stop(reason)."
        print(f"elastic-trainer: {text}", file=sys.stderr, flush=True)
        self.events.emit("worker.loop_left", step=step, how=how, newest_checkpoint=kept)
        if not saves:
            self.driver.report(error=text)
        self.events.flush()

    def drop_step(self) -> None:
        """Put back what the step in flight has changed: the user's loop was left in it."""
        state = self.loop.state if self.loop else None
        if state and state.is_in_flight and not state.is_applying:
            state.restore()


def report_memory(device: torch.device, events: Events) -> None:
    if device.type == "cuda":
        events.emit("worker.memory_measured", device_bytes=torch.cuda.max_memory_reserved(device))


def why_lost(loop: Loop | None) -> Exception | None:
    """Return why a resumed run would lack what the script has changed after the last step; None: it
    would not."""
    if loop and loop.state.phase == 0:
        try:
            loop.work.require_kept()
        except (ConfigError, RuntimeError) as error:
            return error
    return None


def remark_on_carried(worker: Worker) -> None:
    """Remark on values that the code after the inner loop has changed outside of the state."""
    for remark in worker.carried.end():
        if worker.loop:
            worker.loop.account.remark(remark, worker.rank)


def require_main_thread(driver: Driver) -> None:
    """Raise ConfigError if this thread cannot take the signal with which a host announces its end.
    """
    thread = threading.current_thread()
    if driver.drains_on_sigterm and thread is not threading.main_thread():
        raise ConfigError(
            f"the training runs in the thread {thread.name!r}, where SIGTERM cannot be handled. "
            f"Under a launcher, train in the main thread, and run the rest in other threads.")


def run_dir_of(options: Options) -> Path | None:
    given = Launch.from_environment().run_dir or options["run_dir"]
    return Path(given) if given else None


def local_rank() -> int:
    """Return this worker's number on its host (which GPU is mine); works before training. A standby
    waits in here."""
    standby.wait_for_place()
    return Launch.from_environment().slot


def whole_average(worker: Worker,
                  draw: Callable[[], Stage | None]) -> dict[str, torch.Tensor] | None:
    """Return the average of all parameters, if each worker has a part and the run goes on."""
    loop, average = worker.loop, worker.job.average
    if not (loop and loop.after_step.is_running and average and average.is_sharded):
        return None
    loop.after_step.evaluations.ask_for_average()
    match draw():
        case Evaluated() as evaluated:
            return evaluated.means
        case _:  # under plain horovodrun the processes have gone back
            raise RuntimeError(LOST_AVERAGE)
