"""All events: the one table in which they are declared.

run_events, program_events, stall_events, fleet_events → here → schema (checks) → events
(emission), report, verify, watch, the supervisor, docs/events.md, the tests

What always holds:
1. The table has each event that any process emits, with all of its fields. A test compares it with
   each place that emits, and with the event logs of runs.
2. A name is an interface: alerts and scripts of users read it. So a name stays, also where a
   standard term has replaced a part of it (`stranger`: an unauthenticated client).

To add an event: emit it with a literal name, declare it here or in *_events.py, and run
`python -m elastic_trainer.views.events_page docs/events.md`.
"""

from __future__ import annotations

from elastic_trainer.events import sentences
from elastic_trainer.events.event_kind import EventKind, Level, Phase
from elastic_trainer.events.fields import (
    ANY,
    ATTEMPT,
    BYTES,
    EXIT_CODE,
    FLAG,
    HOST,
    LIST,
    NAME,
    NAMES,
    NUMBER,
    OBJECT,
    PID,
    SAMPLES,
    SECONDS,
    SEED,
    SIGNED_SECONDS,
    STEP,
    TEXT,
    TIME,
    WHOLE,
    WHOLE_OR_MINUS_ONE,
    has,
    may_have,
    may_read,
    one_of,
    reads,
)
from elastic_trainer.events.fleet_events import DISCOVERY, REHEARSAL, STANDBYS
from elastic_trainer.events.program_events import PROGRAMS
from elastic_trainer.events.run_events import RUN, VERDICT
from elastic_trainer.events.stall_events import STALLS

DETAIL, INFO, WARNING, ERROR = Level

COMMON = (*reads(event=NAME, time=TIME), *may_read(attempt=ATTEMPT, run=NAME, worker=NAME),
          *may_have(generation=WHOLE, rank=WHOLE, size=WHOLE, level=one_of(*Level), shortened=FLAG))
"""Fields of every event. A worker with a place writes generation, rank and size of the world."""
_STEP = reads(attempt=ATTEMPT, step=STEP)
_WORKER = reads(worker=NAME, host=HOST, pid=PID)

_JOB = (
    EventKind(
        "job.described", DETAIL, "Rank 0 describes the job at the start of each generation.",
        (*reads(attempt=ATTEMPT, dataset_size=SAMPLES, global_batch=SAMPLES, microbatches=WHOLE,
                seed=SEED), *may_read(epochs=WHOLE, max_steps=STEP, steps=STEP, reduce=NAME,
                                      drop_last=FLAG, checkpoint_every=NAME),
         *may_have(dropped_samples=SAMPLES, order=NAME, order_sha256=NAME))),
    EventKind(
        "job.steps_capped", INFO, "Version 0.1 alone: `max_steps` is more than the epochs have.",
        has(max_steps=STEP, epochs=ANY, steps=STEP),
        "the run ends after {steps} steps, not {max_steps}: epochs={epochs} has no more"),
    EventKind(
        "job.samples_dropped", INFO,
        "`drop_last` leaves samples out of each epoch: others each time, unless the order is "
        "sequential.",
        has(samples=SAMPLES, dataset_size=SAMPLES),
        "drop_last leaves {samples} of {dataset_size} samples out of each epoch"),
    EventKind(
        "job.settings_differ", WARNING,
        "A resumed run was given another value than it has. `holds` says which value is used: run "
        "or given.",
        (*has(key=NAME, holds=one_of("run", "given")), *may_have(run_value=ANY, given=ANY)),
        sentences.settings_differ,
        remedy="Give the old value, or give the run a new name."),
    EventKind(
        "job.option_ignored", WARNING, "An option has no effect.",
        (*has(option=NAME, because=TEXT), *may_have(value=ANY)),
        "{option} {value} has no effect: {because}"),
    EventKind(
        "job.overridden", WARNING,
        "Options of the launcher (`--override`; also by `elastic-trainer tune` and `scaling`) hold "
        "instead of the script's.", has(steps=WHOLE, microbatches=WHOLE, global_batch=WHOLE),
        "options over the script's: {microbatches:#micro-batch}, global batch {global_batch}"),
    EventKind(
        "worker.memory_measured", DETAIL,
        "The most memory that torch held on this worker's GPU, when the worker ended.",
        has(device_bytes=WHOLE)),
    EventKind(
        "job.best_not_found", WARNING, "No evaluation gave the metric of the option `best`, so no "
        "checkpoint is kept as the best.", has(metric=NAME),
        "no evaluation gave {metric}, so no checkpoint is the best",
        remedy="Call trainer.evaluate(…) after steps, with a function that returns the metric."),
    EventKind(
        "job.gradients_sparse", WARNING,
        "Gradients of these parameters are sparse. They are summed and sent densely, with `bytes` "
        "in each step.", has(parameters=NAMES, bytes=BYTES),
        "the sparse gradients of {parameters:list} are summed densely: {bytes} bytes a step",
        remedy="Use sparse=False: the steps are the same."),
    EventKind(
        "job.workers_idle", WARNING, "The world has more workers than a batch has micro-batches.",
        has(size=WHOLE, microbatches=WHOLE, idle=WHOLE),
        "the {microbatches:#micro-batch} of a batch leave {idle:#worker} of {size} without work",
        remedy="Use as many micro-batches as workers (for a new run), or fewer workers."),
)

_HOSTS_AND_WORKERS = (
    EventKind(
        "driver.host_added", INFO, "The discovery lists a host.", reads(host=HOST, slots=WHOLE),
        "host {host} joins the list with {slots:#slot}"),
    EventKind(
        "driver.host_removed", INFO, "The discovery no longer lists a host.", has(host=NAME),
        "host {host} leaves the list"),
    EventKind(
        "driver.worker_started", INFO,
        "The driver has started a worker. Over ssh `pid` is that of the ssh process.",
        (*_WORKER, *may_read(over_ssh=FLAG), *has(slot=WHOLE)), "host {host}: worker {pid} boots"),
    EventKind(
        "driver.worker_ready", INFO, "The worker has booted and can take a place.",
        (*reads(worker=NAME), *may_read(host=HOST, pid=PID, boot_s=SECONDS)),
        "host {host}: worker {pid} is ready after {boot_s:.1f} s"),
    EventKind(
        "driver.worker_gone", INFO,
        "A worker's process has ended. The table of reasons follows below.",
        (*reads(worker=NAME), *may_read(host=HOST, pid=PID, exit_code=EXIT_CODE),
         *may_have(reason=one_of(*sentences.ENDINGS), died_in=TEXT, lines_refused=WHOLE)),
        sentences.worker_gone,
        remedy="crashed, boot_failed: nothing, the host is tried again. If it repeats, read the "
               "worker's output. `lines_refused` counts malformed lines that the worker sent for "
               "the event log."),
    EventKind(
        "driver.worker_evicted", WARNING,
        "The driver kills a worker. The reasons are those of `driver.worker_gone`.",
        has(worker=NAME, reason=NAME, silent_s=SECONDS),
        sentences.worker_evicted,
        remedy="frozen: look at the host. cut_off: look at the network between the hosts. The "
               "host is tried again."),
    EventKind(
        "driver.worker_dismissed", DETAIL, "The driver asks a worker to leave.",
        has(worker=NAME, reason=NAME, silent_s=SECONDS)),
    EventKind(
        "driver.worker_start_failed", WARNING, "A worker's process could not be started.",
        has(host=NAME, error=TEXT), "host {host}: the driver cannot start a worker: {error}"),
    EventKind(
        "driver.worker_heard_again", WARNING,
        "A worker's heartbeats were absent for more than a second.",
        has(worker=NAME, silent_s=SECONDS),
        "host {host}: worker {pid} sends heartbeats again after {silent_s:.1f} s without",
        remedy="No worker is lost by it. Look at the host and its network."),
    EventKind(
        "driver.clock_differs", WARNING, "A host's clock is more than a minute off.",
        has(worker=NAME, host=NAME, off_s=SIGNED_SECONDS),
        "host {host}: the clock is {off_s:+.0f} s off the driver's",
        remedy="No worker is lost by it. Set the host's clock."),
    EventKind(
        "driver.host_kept_out", ERROR, "A replica on this host held other bits, so the host waits.",
        has(host=NAME, differences=WHOLE, kept_out_s=SECONDS, why=TEXT),
        "host {host} gets no worker for {kept_out_s:.0f} s: {why}",
        remedy="Test the memory of the host."),
)

_DRIVER = (
    EventKind(
        "driver.discovery_failed", WARNING,
        "The discovery script failed. The last list of hosts is kept.", has(error=TEXT),
        "the discovery script fails: {error}", remedy="Run the script by hand."),
    EventKind(
        "driver.discovery_recovered", INFO, "The discovery script answers again.",
        has(failed_s=SECONDS), "the discovery script answers again after {failed_s:.0f} s"),
    EventKind(
        "driver.generation_formed", DETAIL,
        "The driver has given each member its place in a new world.",
        (*reads(attempt=ATTEMPT, generation=WHOLE), *may_read(workers=NAMES),
         *has(size=WHOLE, reason=one_of("start", "death", "change"), hosts=NAMES))),
    EventKind(
        "driver.step_reached", DETAIL,
        "More than half of the members have finished `steps` steps, and the newest checkpoint is "
        "of step `checkpoint`.", reads(attempt=ATTEMPT, steps=STEP, checkpoint=STEP)),
    EventKind(
        "driver.stranger_refused", WARNING,
        "The driver refused an unauthenticated client, a message in another worker's name, or a "
        "repeated message. An address has at most one such event a minute; `refused` counts since "
        "the one before.", has(address=NAME, reason=TEXT, refused=WHOLE),
        "the driver refused {refused:#connection} from {address}: {reason}",
        remedy="Close the port to that address."),
    EventKind(
        "driver.stopped", INFO, "The driver ends the attempt.", has(verdict=VERDICT, detail=TEXT),
        sentences.driver_stopped),
)

_WORKERS = (
    EventKind("worker.stood_by", DETAIL, "The worker waited as a standby.", has(waited_s=SECONDS)),
    EventKind("worker.timeline_opened", DETAIL, "The worker writes its timeline into this folder.",
              has(folder=TEXT)),
    EventKind("worker.left", DETAIL, "The worker leaves the world, as the driver asked."),
    EventKind(
        "worker.stopped", INFO, "The worker ends because the run is over.",
        has(verdict=VERDICT, detail=TEXT)),
    EventKind(
        "worker.failed", ERROR,
        "The user's code raised, or called sys.exit. The run ends on all ranks.", has(error=TEXT),
        "worker {worker}: the user's code raised {error:last}",
        remedy="The traceback is in `error`."),
    EventKind(
        "worker.loop_left", WARNING,
        "The user's loop was left before its end. After `break` or `return` the run stops on all "
        "ranks, with a checkpoint of the last finished step. After an exception that the script "
        "caught, or sys.exit(), it ends with exit code 70. The same command goes on with it.",
        has(step=STEP, how=TEXT, newest_checkpoint=WHOLE_OR_MINUS_ONE),
        "the user's loop was left {how} after {step} steps"),
    EventKind(
        "worker.machine_failed", ERROR,
        "The user's code met a fault of its machine (EIO, ENOSPC, MemoryError, …). The worker "
        "leaves, and the others do the step again. The same fault in the same micro-batch on a "
        "second host ends the run.",
        has(host=NAME, error=NAME, step=STEP, microbatch=WHOLE_OR_MINUS_ONE, text=TEXT),
        "host {host}: the user's code met {error} in step {step}",
        remedy="Look at the disk and the memory of the host."),
    EventKind(
        "worker.loader_restarted", WARNING,
        "A loader process of this worker has ended, or has read one sample for too long. Another "
        "one takes its place, and reads the sample again. `sample` is -1 if it read none.",
        has(pid=WHOLE, reason=TEXT, sample=WHOLE_OR_MINUS_ONE),
        "the loader process {pid} {reason}: another one takes its place",
        remedy="If it was killed for memory, use fewer processes (`Loader(workers=…)`)."),
    EventKind(
        "worker.loss_not_finite", WARNING,
        "A loss is NaN or infinite. The event names micro-batches and samples.",
        has(step=STEP, loss=NUMBER, microbatches=LIST, samples=LIST, on_nan=one_of("raise", "skip",
                                                                             "continue")),
        "the loss of step {step} is {loss}",
        remedy="Choose `on_nan`: raise (default), skip or continue."),
    EventKind(
        "worker.listener_failed", WARNING, "A listener of the user's raised. The run goes on.",
        has(listener=NAME, heard=NAME, failures=WHOLE, error=TEXT),
        "the listener {listener} raised: {error:last}"),
    EventKind("worker.logger_opened", DETAIL,
              "A logger of the first worker begins, or goes on, with this step.",
              has(logger=NAME, where=TEXT, step=STEP)),
    EventKind("worker.logger_failed", WARNING,
              "A logger raised, or its queue is full because it blocks. The run goes on. Emitted "
              "once for each logger and worker.", has(logger=NAME, error=TEXT),
              "the logger {logger} failed: {error:last}"),
    EventKind("worker.logger_closed", DETAIL,
              "A logger has ended: the rows that this worker has written, and has lost.",
              has(logger=NAME, rows=WHOLE, lost=WHOLE)),
    EventKind(
        "worker.steps_slower", WARNING,
        "Steps take 1.5 times as long as the best of this world. Rank 0 waits `waited_s` of that "
        "for other workers, the network and its own GPU.",
        has(step=STEP, step_s=SECONDS, waited_s=SECONDS, best_s=SECONDS),
        "steps take {step_s:.2f} s instead of {best_s:.2f} s: a host or a network link is slow",
        remedy="Look at the slow host or link."),
    EventKind(
        "worker.steps_as_before", INFO, "Steps are no longer slower.",
        has(step=STEP, step_s=SECONDS), "steps take {step_s:.2f} s again"),
)

_WORLD = (
    EventKind(
        "worker.generation_started", INFO,
        "A new world trains from `step` on. `source` is where its state comes from: memory, "
        "checkpoint or fresh.",
        (*_STEP, *reads(generation=WHOLE, size=WHOLE, source=NAME), *may_read(pause_s=SECONDS)),
        sentences.generation_started, Phase.RESTARTING),
    EventKind(
        "worker.generation_broken", DETAIL, "The worker leaves its generation after an error.",
        has(error=TEXT)),
    EventKind(
        "worker.pause_ended", DETAIL,
        "The first step after a change of the world is done. The parts add up to `duration_s`.",
        (*reads(duration_s=SECONDS), *may_read(step=STEP, noticing_s=SECONDS, deciding_s=SECONDS,
                                               forming_s=SECONDS, transfer_s=SECONDS,
                                               redoing_s=SECONDS)), closes=Phase.PAUSING),
    EventKind(
        "worker.step_committed", DETAIL,
        "A step is done. `repeated`: a new rank 0 writes the line of the last step again. "
        "`checkpoint_s`: the pause of a checkpoint's snapshot before this step, if there was one.",
        (*_STEP, *reads(generation=WHOLE, size=WHOLE, samples=SAMPLES, digest=WHOLE, loss=NUMBER),
         *may_read(step_s=SECONDS, checkpoint_s=SECONDS),
         *may_have(lr=ANY, skipped=FLAG, repeated=FLAG, metrics=OBJECT)),
        closes=Phase.TRAINING),
    EventKind(
        "worker.gradients_compressed", DETAIL,
        "What rank 0 sends of its gradients in this step, in 16 bits and as it would be without. "
        "`relative_error` is the norm of what its cast loses, by the norm of its gradient. "
        "Measured in the first step of a process and in each 100th.",
        (*reads(compress=NAME, sent_bytes=BYTES, uncompressed_bytes=BYTES, relative_error=NUMBER),
         *has(step=STEP))),
    EventKind("worker.commit_kept", DETAIL, "A script in Horovod's own style has committed.",
              (*_STEP, *has(commit_s=SECONDS)), closes=Phase.TRAINING),
    EventKind(
        "worker.evaluated", INFO, "An evaluation after a step is finished. A metric that is not a "
        "number is null.",
        has(step=STEP, samples=WHOLE, metrics=OBJECT, duration_s=SECONDS),
        "evaluated {samples} samples after step {step}"),
    EventKind(
        "worker.logged", DETAIL, "What hooks of a Lightning module have logged after a step: "
        "values of an epoch, sums, and metrics of torchmetrics. One that is not a number is null.",
        has(step=STEP, metrics=OBJECT)),
    EventKind(
        "worker.best_found", INFO,
        "The evaluation after this step is the best so far. Its checkpoint is published before "
        "the next step, and stays.", has(step=STEP, metric=NAME, value=NUMBER),
        "the best {metric} so far: {value:.6g}, after step {step}"),
    EventKind("worker.step_redone", INFO,
              "A step was in flight when the world changed, and is done again.", _STEP,
              "step {step} was in flight and is done again"),
    EventKind("worker.rolled_forward", DETAIL,
              "The worker applied a step that other members had applied.", has(step=STEP)),
    EventKind("worker.state_received", DETAIL, "A newcomer has received the state.",
              has(step=STEP, bytes=BYTES, duration_s=SECONDS)),
    EventKind(
        "worker.revives", WARNING,
        "The worker starts anew in place and keeps its state, because Horovod would abort it.",
        has(where=one_of("init", "training"), error=TEXT),
        "worker {worker} restarts in place and keeps its state"),
    EventKind("worker.revived", INFO, "The worker has its state again.", has(step=STEP),
              "worker {worker} has its state again"),
    EventKind(
        "worker.arithmetic_differs", WARNING,
        "A worker computes other bits than the world. In exact mode it gets no place (`refused`), "
        "unless --mixed-hardware is warn.",
        (*has(differs=OBJECT, refused=FLAG, meaning=TEXT), *may_have(host=NAME, newcomer=NAME,
                                                                     other_host=NAME, other=TEXT,
                                                                     step=STEP,
                                                                     kept_out_s=SECONDS)),
        "a worker computes other bits than the world: {meaning}",
        remedy="Use like processors and the same torch on all hosts."),
    EventKind(
        "worker.horovodrun_unauthenticated", WARNING,
        "Plain horovodrun of a Horovod without our patches: it runs code that any client sends "
        "to it (CVE-2024-10190).", (),
        "this horovodrun runs code that any client sends to it (CVE-2024-10190)",
        remedy="Run `elastic-trainer setup`, which builds the patched Horovod, on each host."),
    EventKind(
        "worker.weights_differ_as_built", INFO,
        "A newcomer's weights differ as built. It receives the world's.",
        has(host=NAME, newcomer=NAME, other_host=NAME, meaning=TEXT), "host {host}: {meaning}",
        remedy="Set torch's seed before the model is built."),
    EventKind(
        "worker.replica_differs", ERROR, "A worker holds other bits than the majority, and leaves.",
        has(step=STEP, since_step=WHOLE_OR_MINUS_ONE, host=NAME, odd_worker=NAME, odd_rank=WHOLE,
            majority=WHOLE, tensors=LIST, tensors_count=WHOLE),
        "host {host}: worker {odd_worker} holds other bits than {majority:#worker} in step {step}",
        remedy="Test the memory of the host."),
    EventKind(
        "worker.state_lost", ERROR,
        "Workers that received the state hold other bits than those that did not, so a part of the "
        "training is not in the state. The run ends.",
        (*_STEP, *reads(holders=LIST, receivers=LIST, received_step=WHOLE_OR_MINUS_ONE),
         *has(since_step=WHOLE_OR_MINUS_ONE, tensors=LIST, checkpoint_step=WHOLE_OR_MINUS_ONE)),
        "a part of the state was lost in the transfer after step {received_step}: {tensors} differ "
        "in step {step}",
        remedy="Keep the value in the optimizer's state, in a buffer, or in an object of state=."),
    EventKind(
        "worker.replicas_drift", WARNING,
        "Replicas hold different bits, because their arithmetic differs.",
        has(step=STEP, meaning=TEXT), "{meaning}"),
)

_CHECKPOINTS = (
    EventKind(
        "state.checkpoint_published", INFO, "A checkpoint is complete in the store.",
        (*_STEP, *has(bytes=BYTES, record=WHOLE, lineage=ANY, parts=WHOLE, pause_s=SECONDS,
                      uploaded_bytes=BYTES, duration_s=SECONDS)),
        "the checkpoint of step {step} is published"),
    EventKind(
        "state.checkpoint_restored", INFO, "The run starts from a checkpoint.",
        (*_STEP, *has(record=WHOLE, bytes=BYTES, list_s=SECONDS, read_s=SECONDS, verify_s=SECONDS,
                      transfer_s=SIGNED_SECONDS, load_s=SECONDS)),
        "the checkpoint of step {step} is restored"),
    EventKind(
        "state.checkpoint_failed", WARNING, "A checkpoint was not written. The training goes on.",
        has(step=STEP, error=TEXT), "the checkpoint of step {step} failed: {error}",
        remedy="`error` says what to do."),
    EventKind(
        "state.checkpoint_refused", WARNING, "A checkpoint is damaged. An older one is restored.",
        (*has(error=TEXT), *may_have(record=WHOLE)),
        "the restore skips a damaged checkpoint: {error}", remedy="`error` says what to do."),
    EventKind(
        "state.checkpoint_overdue", WARNING,
        "The last good checkpoint is older than a minute and than three intervals.",
        has(step=STEP, age_s=SECONDS, newest_step=WHOLE_OR_MINUS_ONE),
        "the last good checkpoint is {age_s:.0f} s old",
        remedy="Look at the store, before the fleet is lost."),
    EventKind(
        "state.checkpoints_withdrawn", WARNING, "Checkpoints of a wrong state are withdrawn.",
        (*has(steps=LIST), *may_have(left_step=ANY)),
        "the checkpoints of steps {steps:list} are withdrawn"),
    EventKind(
        "state.upload_stalled", WARNING,
        "No part of a worker's share is uploaded for 5 s, and 1 s more for each MiB on its way.",
        has(step=STEP, still_s=SECONDS, what=TEXT),
        "checkpoint of step {step}: worker {worker} has waited {still_s:.0f} s for the store to "
        "take {what}", remedy="Look at the network between the worker and the store."),
    EventKind(
        "state.store_unavailable", WARNING, "The store does not answer. It is asked again.",
        has(error=TEXT), "the store does not answer and is asked again: {error}",
        remedy="`error` says what to do."),
    EventKind(
        "state.publisher_replaced", WARNING,
        "Another worker published meanwhile. This checkpoint is made again.",
        has(step=STEP, record=WHOLE),
        "another worker has published; the checkpoint of step {step} is made again"),
    EventKind(
        "state.rubbish_kept", WARNING, "Old parts could not be deleted. They are deleted later.",
        has(step=STEP, error=TEXT),
        "the store still holds parts that no checkpoint needs: {error}"),
    EventKind(
        "state.fenced", ERROR,
        "Another attempt has taken over this run's store, so this one stops.",
        has(step=STEP, error=TEXT), "this attempt stops: {error}",
        remedy="Find the other attempt, and end one of the two."),
)

GROUPS = {
    "The run and its attempts": RUN, "The job": _JOB, "Hosts and workers": _HOSTS_AND_WORKERS,
    "The driver": _DRIVER, "Steps that stand still": STALLS, "A worker": _WORKERS,
    "The dataset and the program": PROGRAMS, "The world": _WORLD, "Checkpoints": _CHECKPOINTS,
    "Standbys": STANDBYS, "The discovery": DISCOVERY, "A rehearsal": REHEARSAL}
"""All kinds of events, by the heading that the documentation gives them."""
KINDS = {kind.name: kind for group in GROUPS.values() for kind in group}
