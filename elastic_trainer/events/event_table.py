"""All events: the one table in which they are declared.

fleet_events → here → schema (checks) → events
(emission), report, verify, watch, the supervisor, docs/events.md, the tests

What always holds:
1. The table has each event that any process emits, with all of its fields. A test compares it with
   each place that emits, and with the event logs of runs.
2. A name is an interface: alerts and scripts of users read it. So a name stays, also where a
   standard term has replaced a part of it (`stranger`: an unauthenticated client).

To add an event: emit it with a literal name, declare it here or in fleet_events.py, and run
`python -m elastic_trainer.views.events_page docs/events.md`.
"""

from __future__ import annotations

from elastic_trainer.events import sentences
from elastic_trainer.events.event_kind import (
    ANY,
    ATTEMPT,
    BYTES,
    FLAG,
    LIST,
    NAME,
    NAMES,
    NUMBER,
    OBJECT,
    SAMPLES,
    SECONDS,
    SEED,
    SIGNED_SECONDS,
    STEP,
    TEXT,
    TIME,
    WHOLE,
    WHOLE_OR_MINUS_ONE,
    EventKind,
    Level,
    Phase,
    has,
    may_have,
    may_read,
    one_of,
    reads,
)
from elastic_trainer.events.fleet_events import (
    DISCOVERY,
    DRIVER,
    HOSTS_AND_WORKERS,
    REHEARSAL,
    RUN,
    STALLS,
    STANDBYS,
    VERDICT,
)

DETAIL, INFO, WARNING, ERROR = Level

COMMON = (*reads(event=NAME, time=TIME), *may_read(attempt=ATTEMPT, run=NAME, worker=NAME),
          *may_have(generation=WHOLE, rank=WHOLE, size=WHOLE, level=one_of(*Level), shortened=FLAG))
"""Fields of every event. A worker with a place writes generation, rank and size of the world."""
_STEP = reads(attempt=ATTEMPT, step=STEP)

_JOB = (
    EventKind("job.described", DETAIL, "Rank 0 describes the job at the start of each generation.",
        (*reads(attempt=ATTEMPT, dataset_size=SAMPLES, global_batch=SAMPLES, microbatches=WHOLE,
                seed=SEED), *may_read(epochs=WHOLE, max_steps=STEP, steps=STEP, reduce=NAME,
                                      drop_last=FLAG, checkpoint_every=NAME),
         *may_have(dropped_samples=SAMPLES, order=NAME, order_sha256=NAME))),
    EventKind("job.steps_capped", INFO,
        "Version 0.1 alone: `max_steps` is more than the epochs have.",
        has(max_steps=STEP, epochs=ANY, steps=STEP),
        "the run ends after {steps} steps, not {max_steps}: epochs={epochs} has no more"),
    EventKind("job.samples_dropped", INFO,
        "`drop_last` leaves samples out of each epoch: others each time, unless the order is "
        "sequential.",
        has(samples=SAMPLES, dataset_size=SAMPLES),
        "drop_last leaves {samples} of {dataset_size} samples out of each epoch"),
    EventKind("job.settings_differ", WARNING,
        "A resumed run was given another value than it has. `holds` says which value is used: run "
        "or given.",
        (*has(key=NAME, holds=one_of("run", "given")), *may_have(run_value=ANY, given=ANY)),
        sentences.settings_differ,
        remedy="Give the old value, or give the run a new name."),
    EventKind("job.option_ignored", WARNING, "An option has no effect.",
        (*has(option=NAME, because=TEXT), *may_have(value=ANY)),
        "{option} {value} has no effect: {because}"),
    EventKind("job.overridden", WARNING,
        "Options of the launcher (`--override`; also by `elastic-trainer tune` and `scaling`) hold "
        "instead of the script's.", has(steps=WHOLE, microbatches=WHOLE, global_batch=WHOLE),
        "options over the script's: {microbatches:#micro-batch}, global batch {global_batch}"),
    EventKind("worker.memory_measured", DETAIL,
        "The most memory that torch held on this worker's GPU, when the worker ended.",
        has(device_bytes=WHOLE)),
    EventKind("job.best_not_found", WARNING,
        "No evaluation gave the metric of the option `best`, so no "
        "checkpoint is kept as the best.", has(metric=NAME),
        "no evaluation gave {metric}, so no checkpoint is the best",
        remedy="Call trainer.evaluate(…) after steps, with a function that returns the metric."),
    EventKind("job.gradients_sparse", WARNING,
        "Gradients of these parameters are sparse. They are summed and sent densely, with `bytes` "
        "in each step.", has(parameters=NAMES, bytes=BYTES),
        "the sparse gradients of {parameters:list} are summed densely: {bytes} bytes a step",
        remedy="Use sparse=False: the steps are the same."),
    EventKind("job.workers_idle", WARNING,
        "The world has more workers than a batch has micro-batches.",
        has(size=WHOLE, microbatches=WHOLE, idle=WHOLE),
        "the {microbatches:#micro-batch} of a batch leave {idle:#worker} of {size} without work",
        remedy="Use as many micro-batches as workers (for a new run), or fewer workers."),
)

_WORKERS = (
    EventKind("worker.stood_by", DETAIL, "The worker waited as a standby.", has(waited_s=SECONDS)),
    EventKind("worker.timeline_opened", DETAIL, "The worker writes its timeline into this folder.",
              has(folder=TEXT)),
    EventKind("worker.left", DETAIL, "The worker leaves the world, as the driver asked."),
    EventKind("worker.stopped", INFO, "The worker ends because the run is over.",
        has(verdict=VERDICT, detail=TEXT)),
    EventKind("worker.failed", ERROR,
        "The user's code raised, or called sys.exit. The run ends on all ranks.", has(error=TEXT),
        "worker {worker}: the user's code raised {error:last}",
        remedy="The traceback is in `error`."),
    EventKind("worker.loop_left", WARNING,
        "The user's loop was left before its end. After `break` or `return` the run stops on all "
        "ranks, with a checkpoint of the last finished step. After an exception that the script "
        "caught, or sys.exit(), it ends with exit code 70. The same command goes on with it.",
        has(step=STEP, how=TEXT, newest_checkpoint=WHOLE_OR_MINUS_ONE),
        "the user's loop was left {how} after {step} steps"),
    EventKind("worker.machine_failed", ERROR,
        "The user's code met a fault of its machine (EIO, ENOSPC, MemoryError, …). The worker "
        "leaves, and the others do the step again. The same fault in the same micro-batch on a "
        "second host ends the run.",
        has(host=NAME, error=NAME, step=STEP, microbatch=WHOLE_OR_MINUS_ONE, text=TEXT),
        "host {host}: the user's code met {error} in step {step}",
        remedy="Look at the disk and the memory of the host."),
    EventKind("worker.out_of_memory", WARNING,
        "A GPU has no memory for the micro-batches that a worker takes over from lost workers. The "
        "worker restarts, with its state, and tries once. Then the run waits for more workers.",
        has(step=STEP, size=WHOLE, microbatches=WHOLE, fitted=WHOLE, needs=WHOLE, meaning=TEXT,
            error=TEXT),
        "worker {worker} has no memory for {microbatches:#micro-batch} of step {step}, which it "
        "has in a world of {size:#worker}: {meaning}",
        remedy="`meaning` says what would fit."),
    EventKind("worker.loader_restarted", WARNING,
        "A loader process of this worker has ended, or has read one sample for too long. Another "
        "one takes its place, and reads the sample again. `sample` is -1 if it read none.",
        has(pid=WHOLE, reason=TEXT, sample=WHOLE_OR_MINUS_ONE),
        "the loader process {pid} {reason}: another one takes its place",
        remedy="If it was killed for memory, use fewer processes (`Loader(workers=…)`)."),
    EventKind("worker.loss_not_finite", WARNING,
        "A loss is NaN or infinite. The event names micro-batches and samples.",
        has(step=STEP, loss=NUMBER, microbatches=LIST, samples=LIST, on_nan=one_of("raise", "skip",
                                                                             "continue")),
        "the loss of step {step} is {loss}",
        remedy="Choose `on_nan`: raise (default), skip or continue."),
    EventKind("worker.listener_failed", WARNING,
        "A listener of the user's raised. The run goes on.",
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
    EventKind("worker.steps_slower", WARNING,
        "Steps take 1.5 times as long as the best of this world. Rank 0 waits `waited_s` of that "
        "for other workers, the network and its own GPU.",
        has(step=STEP, step_s=SECONDS, waited_s=SECONDS, best_s=SECONDS),
        "steps take {step_s:.2f} s instead of {best_s:.2f} s: a host or a network link is slow",
        remedy="Look at the slow host or link."),
    EventKind("worker.steps_as_before", INFO, "Steps are no longer slower.",
        has(step=STEP, step_s=SECONDS), "steps take {step_s:.2f} s again"),
)

_WORLD = (
    EventKind("worker.generation_started", INFO,
        "A new world trains from `step` on. `source` is where its state comes from: memory, "
        "checkpoint or fresh.",
        (*_STEP, *reads(generation=WHOLE, size=WHOLE, source=NAME), *may_read(pause_s=SECONDS)),
        sentences.generation_started, Phase.RESTARTING),
    EventKind("worker.generation_broken", DETAIL,
        "The worker leaves its generation after an error.",
        has(error=TEXT)),
    EventKind("worker.pause_ended", DETAIL,
        "The first step after a change of the world is done. The parts add up to `duration_s`.",
        (*reads(duration_s=SECONDS), *may_read(step=STEP, noticing_s=SECONDS, deciding_s=SECONDS,
                                               forming_s=SECONDS, transfer_s=SECONDS,
                                               redoing_s=SECONDS)), closes=Phase.PAUSING),
    EventKind("worker.step_committed", DETAIL,
        "A step is done. `repeated`: a new rank 0 writes the line of the last step again. "
        "`checkpoint_s`: the pause of a checkpoint's snapshot before this step, if there was one.",
        (*_STEP, *reads(generation=WHOLE, size=WHOLE, samples=SAMPLES, digest=WHOLE, loss=NUMBER),
         *may_read(step_s=SECONDS, checkpoint_s=SECONDS),
         *may_have(lr=ANY, skipped=FLAG, repeated=FLAG, metrics=OBJECT)),
        closes=Phase.TRAINING),
    EventKind("worker.gradients_compressed", DETAIL,
        "What rank 0 sends of its gradients in this step, in 16 bits and as it would be without. "
        "`relative_error` is the norm of what its cast loses, by the norm of its gradient. "
        "Measured in the first step of a process and in each 100th.",
        (*reads(compress=NAME, sent_bytes=BYTES, uncompressed_bytes=BYTES, relative_error=NUMBER),
         *has(step=STEP))),
    EventKind("worker.commit_kept", DETAIL, "A script in Horovod's own style has committed.",
              (*_STEP, *reads(commit_s=SECONDS)), closes=Phase.TRAINING),
    EventKind("worker.evaluated", INFO,
        "An evaluation after a step is finished. A metric that is not a "
        "number is null.",
        has(step=STEP, samples=WHOLE, metrics=OBJECT, duration_s=SECONDS),
        "evaluated {samples} samples after step {step}"),
    EventKind("worker.logged", DETAIL, "What hooks of a Lightning module have logged after a step: "
        "values of an epoch, sums, and metrics of torchmetrics. One that is not a number is null.",
        has(step=STEP, metrics=OBJECT)),
    EventKind("worker.best_found", INFO,
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
    EventKind("worker.shards_moved", DETAIL,
        "Parts of the optimizer's state have moved to new holders, and this worker has received "
        "those that it is to hold.",
        has(step=STEP, bytes=BYTES, moves=WHOLE, received=WHOLE, duration_s=SECONDS)),
    EventKind("worker.shards_lost", WARNING,
        "All holders of parts of the optimizer's state are gone. The run goes back to the newest "
        "checkpoint.", has(step=STEP, blocks=WHOLE, of=WHOLE),
        "all holders of {blocks} of {of} parts of the optimizer's state are gone after step {step}",
        remedy="With buddies=2 a part survives the loss of two hosts at once."),
    EventKind("worker.shards_exposed", WARNING,
        "One host, or one of several zones, holds all copies of parts of the optimizer's state. "
        "Its loss takes the run back to the newest checkpoint. Logged at each change.",
        (*has(step=STEP, blocks=WHOLE, of=WHOLE), *reads(meaning=TEXT),
         *may_have(hosts=NAMES, zones=NAMES)), "{meaning}",
        remedy="Add hosts, in other zones where there are several; or set buddies to 1 or more."),
    EventKind("worker.memory_foreseen", INFO,
        "What a worker holds and has free after its first step, and the size of the smallest world "
        "whose workers have memory for the optimizer's state (0: none). It is a warning if "
        "--min-np is less.",
        (*has(parameters_bytes=BYTES, gradients_bytes=BYTES, optimizer_bytes=BYTES,
              held_bytes=BYTES, free_bytes=BYTES, min_workers_for_memory=WHOLE, min_workers=WHOLE,
              optimizer_bytes_with_min_workers=BYTES), *reads(meaning=TEXT)), "{meaning}"),
    EventKind("worker.shards_differ", ERROR,
        "Two holders of a part of the optimizer's state hold different bits. The run goes back to "
        "a checkpoint from before the difference.", has(step=STEP),
        "two workers hold different bits of a part of the optimizer's state in step {step}",
        remedy="Test the memory of the hosts. With three workers or more and without shard, the "
               "worker that is wrong is found."),
    EventKind("worker.revives", WARNING,
        "The worker starts anew in place and keeps its state, because Horovod would abort it, or "
        "because its GPU has no memory left.",
        has(where=one_of("init", "training", "memory"), error=TEXT),
        "worker {worker} restarts in place and keeps its state"),
    EventKind("worker.revived", INFO, "The worker has its state again.", has(step=STEP),
              "worker {worker} has its state again"),
    EventKind("worker.arithmetic_differs", WARNING,
        "A worker computes other bits than the world. In exact mode it gets no place (`refused`), "
        "unless --mixed-hardware is warn.",
        (*has(differs=OBJECT, refused=FLAG, meaning=TEXT), *may_have(host=NAME, newcomer=NAME,
                                                                     other_host=NAME, other=TEXT,
                                                                     step=STEP,
                                                                     kept_out_s=SECONDS)),
        "a worker computes other bits than the world: {meaning}",
        remedy="Use like processors and the same torch on all hosts."),
    EventKind("worker.horovodrun_unauthenticated", WARNING,
        "Plain horovodrun of a Horovod without our patches: it runs code that any client sends "
        "to it (CVE-2024-10190).", (),
        "this horovodrun runs code that any client sends to it (CVE-2024-10190)",
        remedy="Run `elastic-trainer setup`, which builds the patched Horovod, on each host."),
    EventKind("worker.weights_differ_as_built", INFO,
        "A newcomer's weights differ as built. It receives the world's.",
        has(host=NAME, newcomer=NAME, other_host=NAME, meaning=TEXT), "host {host}: {meaning}",
        remedy="Set torch's seed before the model is built."),
    EventKind("worker.replica_differs", ERROR,
        "A worker holds other bits than the majority, and leaves.",
        has(step=STEP, since_step=WHOLE_OR_MINUS_ONE, host=NAME, outlier=NAME, outlier_rank=WHOLE,
            majority=WHOLE, tensors=LIST, tensors_count=WHOLE),
        "host {host}: worker {outlier} holds other bits than {majority:#worker} in step {step}",
        remedy="Test the memory of the host."),
    EventKind("worker.state_lost", ERROR,
        "Workers that received the state hold other bits than those that did not, so a part of the "
        "training is not in the state. The run ends.",
        (*_STEP, *reads(holders=LIST, receivers=LIST, received_step=WHOLE_OR_MINUS_ONE),
         *has(since_step=WHOLE_OR_MINUS_ONE, tensors=LIST, checkpoint_step=WHOLE_OR_MINUS_ONE)),
        "a part of the state was lost in the transfer after step {received_step}: {tensors} differ "
        "in step {step}",
        remedy="Keep the value in the optimizer's state, in a buffer, or in an object of state=."),
    EventKind("worker.replicas_drift", WARNING,
        "Replicas hold different bits, because their arithmetic differs.",
        has(step=STEP, meaning=TEXT), "{meaning}"),
)

_CHECKPOINTS = (
    EventKind("state.checkpoint_published", INFO, "A checkpoint is complete in the store.",
        (*_STEP, *has(bytes=BYTES, record=WHOLE, lineage=ANY, parts=WHOLE, pause_s=SECONDS,
                      uploaded_bytes=BYTES, duration_s=SECONDS)),
        "the checkpoint of step {step} is published"),
    EventKind("state.checkpoint_restored", INFO, "The run starts from a checkpoint.",
        (*_STEP, *has(record=WHOLE, bytes=BYTES, list_s=SECONDS, read_s=SECONDS, verify_s=SECONDS,
                      transfer_s=SIGNED_SECONDS, load_s=SECONDS)),
        "the checkpoint of step {step} is restored"),
    EventKind("state.checkpoint_failed", WARNING,
        "A checkpoint was not written. The training goes on.",
        has(step=STEP, error=TEXT), "the checkpoint of step {step} failed: {error}",
        remedy="`error` says what to do."),
    EventKind("state.checkpoint_refused", WARNING,
        "A checkpoint is damaged. An older one is restored.",
        (*has(error=TEXT), *may_have(record=WHOLE)),
        "the restore skips a damaged checkpoint: {error}", remedy="`error` says what to do."),
    EventKind("state.checkpoint_overdue", WARNING,
        "The last good checkpoint is older than a minute and than three intervals.",
        has(step=STEP, age_s=SECONDS, newest_step=WHOLE_OR_MINUS_ONE),
        "the last good checkpoint is {age_s:.0f} s old",
        remedy="Look at the store, before the fleet is lost."),
    EventKind("state.checkpoints_withdrawn", WARNING, "Checkpoints of a wrong state are withdrawn.",
        (*has(steps=LIST), *may_have(left_step=ANY)),
        "the checkpoints of steps {steps:list} are withdrawn"),
    EventKind("state.memory_not_pinned", WARNING,
        "The system gives no pinned memory for the copy of a checkpoint from the GPU. The training "
        "waits for each copy.",
        has(bytes=BYTES, error=TEXT),
        "no pinned memory for a checkpoint's share of {bytes:#byte}, so the training waits for "
        "each copy: {error}",
        remedy="Give the host, or the container, more memory."),
    EventKind("state.upload_stalled", WARNING,
        "No part of a worker's share is uploaded for 5 s, and 1 s more for each MiB on its way.",
        has(step=STEP, still_s=SECONDS, what=TEXT),
        "checkpoint of step {step}: worker {worker} has waited {still_s:.0f} s for the store to "
        "take {what}", remedy="Look at the network between the worker and the store."),
    EventKind("state.store_unavailable", WARNING, "The store does not answer. It is asked again.",
        has(error=TEXT), "the store does not answer and is asked again: {error}",
        remedy="`error` says what to do."),
    EventKind("state.publisher_replaced", WARNING,
        "Another worker published meanwhile. This checkpoint is made again.",
        has(step=STEP, record=WHOLE),
        "another worker has published; the checkpoint of step {step} is made again"),
    EventKind("state.rubbish_kept", WARNING,
        "Old parts could not be deleted. They are deleted later.",
        has(step=STEP, error=TEXT),
        "the store still holds parts that no checkpoint needs: {error}"),
    EventKind("state.fenced", ERROR,
        "Another attempt has taken over this run's store, so this one stops.",
        has(step=STEP, error=TEXT), "this attempt stops: {error}",
        remedy="Find the other attempt, and end one of the two."),
)

_PROGRAMS = (
    EventKind("job.program_proved", DETAIL,
        "A run goes on from a checkpoint, and its workers have the dataset and the program of that "
        "checkpoint. `allowed` has the differences that --allow-change allows.",
        (*reads(attempt=ATTEMPT, step=STEP), *has(proof=NAME, run_proof=NAME, allowed=LIST))),
    EventKind("job.program_changed", WARNING,
        "A resumed run has other data, or another program, and --allow-change allows it.",
        has(part=NAME, differ=TEXT), "{differ}, and --allow-change {part} allows it"),
    EventKind("job.samples_random", WARNING,
        "Fields of a sample are other ones when it is drawn again with the same random state. They "
        "are left out of the proof.", has(fields=LIST),
        "fields of a sample are random, whatever the seed: {fields}",
        remedy="Draw from the default generators of torch, numpy or random."),
    EventKind("job.value_carried", WARNING,
        "The inner loop reads a value that the code after it has changed, and that is no part of "
        "the state. A worker that joins, and a resumed run, begin with its first value.",
        has(name=TEXT, was=TEXT, now=TEXT), "{name} was {was} and is now {now}, outside of state",
        remedy="Compute it from step.number, or keep it in an object in `state`."),
    EventKind("worker.program_differs", ERROR,
        "A worker has other data, or another program, than the run. A newcomer gets no place; if "
        "the first workers differ, the run ends (`kept_out_s` is 0).",
        has(host=NAME, newcomer=NAME, other_host=NAME, parts=NAMES, differ=TEXT, meaning=TEXT,
            kept_out_s=SECONDS),
        "host {host}: a worker has other data or another program than the run: {differ}",
        remedy="Give all workers the same data and code. `--allow-change PART` allows a part."),
    EventKind("worker.program_proved", DETAIL,
        "A worker has drawn samples of its dataset and described its program. It gets a place if "
        "they are those of the run.",
        (*reads(proof=NAME), *has(dataset_size=SAMPLES, samples=LIST, random=LIST),
         *may_have(index=NAME))),
)

GROUPS = {
    "The run and its attempts": RUN, "The job": _JOB, "Hosts and workers": HOSTS_AND_WORKERS,
    "The driver": DRIVER, "Steps that stand still": STALLS, "A worker": _WORKERS,
    "The dataset and the program": _PROGRAMS, "The world": _WORLD, "Checkpoints": _CHECKPOINTS,
    "Standbys": STANDBYS, "The discovery": DISCOVERY, "A rehearsal": REHEARSAL}
"""All kinds of events, by the heading that the documentation gives them."""
KINDS = {kind.name: kind for group in GROUPS.values() for kind in group}
