"""The events of a run, its attempts and its driver, and of what is around it: steps that stand
still, standbys, the discovery of hosts, a rehearsal.

here → event_table (all events)

`attempt.ended` says that the run is over if its verdict is finished, interrupted, user_error or
unsaved. After the verdict failed another attempt follows, or run.given_up or run.stopped.
"""

from __future__ import annotations

from elastic_trainer.events import sentences
from elastic_trainer.events.event_kind import (
    ATTEMPT,
    EXIT_CODE,
    FLAG,
    HOST,
    NAME,
    NAMES,
    NUMBER,
    OBJECT,
    PID,
    SAMPLES,
    SECONDS,
    SIGNED_SECONDS,
    STEP,
    TEXT,
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

DETAIL, INFO, WARNING, ERROR = Level
_WORKER = reads(worker=NAME, host=HOST, pid=PID)
VERDICT = one_of("finished", "failed", "user_error", "interrupted", "unsaved")

RUN = (
    EventKind("run.started", INFO, "A person, or the service, has started the run or resumed it.",
              (*has(options=OBJECT), *may_read(versions=OBJECT)), "run {run} started",
              Phase.STOPPED),
    EventKind("attempt.started", INFO,
        "The supervisor starts the driver. `counted_by` names the process that logs the progress "
        "of the attempt.", (*reads(attempt=ATTEMPT), *may_read(counted_by=NAME)),
        "attempt {attempt} started", Phase.RESTARTING),
    EventKind("attempt.ended", INFO, "The driver has ended.",
        (*reads(attempt=ATTEMPT, verdict=VERDICT), *may_read(exit_code=EXIT_CODE)),
        "attempt {attempt} ended: {verdict:words}", Phase.RESTARTING,
        remedy="failed: another attempt starts by itself, with back-off, or `run.given_up` "
               "follows."),
    EventKind("run.given_up", ERROR,
        "No attempt follows: 5 attempts in a row had neither a new step nor a checkpoint.",
        reads(attempt=ATTEMPT), "the run ends: 5 attempts in a row had no progress",
        remedy="Read the events before. The same command goes on with the run."),
    EventKind("job.left_unsaved", ERROR,
        "The run has done all its steps, and its last checkpoint could not be written. Its exit "
        "code is 74.", has(step=STEP, error=TEXT, newest_checkpoint=WHOLE_OR_MINUS_ONE),
        "the last checkpoint of step {step} could not be written: {error}",
        remedy="Mend the store (its error says how). The same command goes on from the newest "
               "checkpoint, and does the steps after it again."),
    EventKind("run.stopped", INFO,
        "A person, or the service, has stopped the run while it waited for its next attempt.",
        reads(attempt=ATTEMPT), "the run was stopped before its next attempt"),
    EventKind("run.host_not_reached", WARNING,
              "The supervisor could not end the workers of an earlier attempt on this host.",
              has(host=HOST, reason=TEXT),
              "host {host}: the supervisor could not end old workers: {reason}",
              remedy="Look at the host. An old worker finds no driver and ends by itself."),
    EventKind("run.finished", INFO, "All steps are done, and the result is durable.",
              (*reads(attempt=ATTEMPT, steps=STEP, samples=SAMPLES, weights_sha256=NAME),
               *may_read(loss=NUMBER, planned_steps=STEP)),
              sentences.run_finished, Phase.TRAINING),
    EventKind("run.finished_early", INFO,
              "The user's code has asked to finish the run before its planned steps are done.",
              has(steps=STEP, planned_steps=STEP, reason=TEXT),
              "the user's code finished the run after {steps} of {planned_steps} steps: {reason}"),
)

HOSTS_AND_WORKERS = (
    EventKind("driver.host_added", INFO,
        "The discovery lists a host.", reads(host=HOST, slots=WHOLE),
        "host {host} joins the list with {slots:#slot}"),
    EventKind("driver.host_removed", INFO, "The discovery no longer lists a host.",
        reads(host=NAME),
        "host {host} leaves the list"),
    EventKind("driver.worker_started", INFO,
        "The driver has started a worker. If it is over ssh or by an agent, `pid` is that of our "
        "process on the driver's machine.",
        (*_WORKER, *may_read(over_ssh=FLAG, by_agent=FLAG, address=NAME), *has(slot=WHOLE)),
        "host {host}: worker {pid} boots"),
    EventKind("driver.worker_ready", INFO, "The worker has booted and can take a place.",
        (*reads(worker=NAME), *may_read(host=HOST, pid=PID, boot_s=SECONDS)),
        "host {host}: worker {pid} is ready after {boot_s:.1f} s"),
    EventKind("driver.worker_gone", INFO,
        "A worker's process has ended. The table of reasons follows below.",
        (*reads(worker=NAME), *may_read(host=HOST, pid=PID, exit_code=EXIT_CODE),
         *may_have(reason=one_of(*sentences.ENDINGS), died_in=TEXT, lines_refused=WHOLE)),
        sentences.worker_gone,
        remedy="crashed, boot_failed: nothing, the host is tried again. If it repeats, read the "
               "worker's output. `lines_refused` counts malformed lines that the worker sent for "
               "the event log."),
    EventKind("driver.worker_evicted", WARNING,
        "The driver kills a worker. The reasons are those of `driver.worker_gone`.",
        has(worker=NAME, reason=NAME, silent_s=SECONDS),
        sentences.worker_evicted,
        remedy="frozen: look at the host. cut_off: look at the network between the hosts. The "
               "host is tried again."),
    EventKind("driver.worker_dismissed", DETAIL, "The driver asks a worker to leave.",
        has(worker=NAME, reason=NAME, silent_s=SECONDS)),
    EventKind("driver.worker_start_failed", WARNING, "A worker's process could not be started.",
        has(host=NAME, error=TEXT), "host {host}: the driver cannot start a worker: {error}"),
    EventKind("driver.worker_heard_again", WARNING,
        "A worker's heartbeats were absent for more than a second.",
        has(worker=NAME, silent_s=SECONDS),
        "host {host}: worker {pid} sends heartbeats again after {silent_s:.1f} s without",
        remedy="No worker is lost by it. Look at the host and its network."),
    EventKind("driver.clock_differs", WARNING, "A host's clock is more than a minute off.",
        has(worker=NAME, host=NAME, off_s=SIGNED_SECONDS),
        "host {host}: the clock is {off_s:+.0f} s off the driver's",
        remedy="No worker is lost by it. Set the host's clock."),
    EventKind("driver.host_kept_out", ERROR,
        "A replica on this host held other bits, so the host waits.",
        has(host=NAME, differences=WHOLE, kept_out_s=SECONDS, why=TEXT),
        "host {host} gets no worker for {kept_out_s:.0f} s: {why}",
        remedy="Test the memory of the host."),
)

DRIVER = (
    EventKind("driver.discovery_failed", WARNING,
        "The discovery script failed. The last list of hosts is kept.", has(error=TEXT),
        "the discovery script fails: {error}", remedy="Run the script by hand."),
    EventKind("driver.discovery_recovered", INFO, "The discovery script answers again.",
        has(failed_s=SECONDS), "the discovery script answers again after {failed_s:.0f} s"),
    EventKind("driver.generation_formed", DETAIL,
        "The driver has given each member its place in a new world.",
        (*reads(attempt=ATTEMPT, generation=WHOLE), *may_read(workers=NAMES),
         *has(size=WHOLE, reason=one_of("start", "death", "change"), hosts=NAMES))),
    EventKind("driver.step_reached", DETAIL,
        "More than half of the members have finished `steps` steps, and the newest checkpoint is "
        "of step `checkpoint`.", reads(attempt=ATTEMPT, steps=STEP, checkpoint=STEP)),
    EventKind("driver.stranger_refused", WARNING,
        "The driver refused an unauthenticated client, a message in another worker's name, or a "
        "repeated message. An address has at most one such event a minute; `refused` counts since "
        "the one before.", has(address=NAME, reason=TEXT, refused=WHOLE),
        "the driver refused {refused:#connection} from {address}: {reason}",
        remedy="Close the port to that address."),
    EventKind("driver.stopped", INFO,
        "The driver ends the attempt.", has(verdict=VERDICT, detail=TEXT),
        sentences.driver_stopped),
)

STALLS = (
    EventKind("driver.step_stalled", WARNING,
        "A step takes much longer than usual. The event names the worker that the others wait for, "
        "its phase, and how long it has been in it. With `cause` network all wait in a collective.",
        (*reads(step=STEP, stood_s=SECONDS),
         *has(limit_s=SECONDS, cause=one_of("worker", "network"),
              waited_for=NAMES, waiting=NAMES, phases=OBJECT, stacks=OBJECT),
         *may_have(worker=NAME, host=HOST, phase=NAME, what=TEXT, since_s=SECONDS, links=NAMES,
                   state=one_of("answers", "silent", "stopped"))),
        sentences.step_stalled,
        remedy="Read `stacks` of the worker that is named. To replace such a worker by itself, set "
               "`hang_s` in ELASTIC_TRAINER_LIMITS."),
    EventKind("driver.step_resumed", INFO, "A step that stood still has ended.",
        reads(step=STEP, stood_s=SECONDS),
        "step {step} has ended; it stood still for {stood_s:.1f} s"),
    EventKind("driver.straggler_found", WARNING,
        "A worker has computed slower than its peers over many steps: `own_s` and the median of "
        "its peers are for one micro-batch. With --replace-stragglers it leaves (`is_replaced`).",
        (*reads(host=HOST, own_s=SECONDS, peers_s=SECONDS),
         *has(worker=NAME, step=STEP, is_replaced=FLAG)),
        "host {host} is slow: it computes {own_s:.3f} s for a micro-batch, its peers {peers_s:.3f} "
        "s",
        remedy="Look at the host: other processes, clock, temperature. --replace-stragglers keeps "
               "it out."),
)

_HOST_OF_CLOUD = has(host=NAME, id=NAME, why=TEXT)
_LISTED = (*reads(host=NAME), *has(id=NAME, why=TEXT),
           *may_read(type=NAME, zone=NAME, lifecycle=NAME))

STANDBYS = (
    EventKind("standby.booted", INFO,
        "A standby is booted and waits.", has(pid=PID, boot_s=SECONDS),
        "a standby is ready after {boot_s:.1f} s"),
    EventKind("standby.taken", DETAIL, "A standby became a worker.", has(pid=PID)),
    EventKind("standby.failed", WARNING,
        "A standby died, or the script fails while it boots. Workers start without it.",
        has(pid=PID, state=NAME, reason=TEXT), "a standby failed while {state}",
        remedy="`reason` has the last output of the script (on hosts: the stderr of the service)."),
    EventKind("standby.service_ended", WARNING,
        "The service of the standbys ended. It is started again.",
        has(exit_code=EXIT_CODE, again_s=SECONDS),
        "the standby service ended (exit code {exit_code}); it starts again in {again_s:.0f} s"),
)

DISCOVERY = (
    EventKind("discovery.host_in", INFO, "The poller lists a host.", _LISTED,
        "the poller lists host {host}"),
    EventKind("discovery.host_out", INFO, "The poller no longer lists a host.",
        _LISTED,
        "the poller no longer lists host {host}: {why}"),
    EventKind("discovery.host_gone", INFO, "An unlisted host no longer exists.", _HOST_OF_CLOUD,
        "host {host} is gone: {why}"),
    EventKind("discovery.host_sick", WARNING,
        "An unlisted host is sick (disk, memory, GPU, clock).",
        _HOST_OF_CLOUD, "host {host} is {why}", remedy="`why` says what to look at."),
    EventKind("discovery.host_held_back", WARNING, "An unlisted host appears and disappears.",
        _HOST_OF_CLOUD, "host {host} is {why}", remedy="`why` says what to look at."),
    EventKind("discovery.hosts_changed", DETAIL, "The hosts file has changed.", has(hosts=NAMES)),
    EventKind("discovery.answer_doubted", WARNING,
        "The cloud's answer lacks most hosts, and the cloud is asked again.",
        has(listed=WHOLE, lacks=WHOLE),
        "the cloud's answer lacks {lacks} of {listed:#host}; the poller asks again"),
    EventKind("discovery.cloud_unavailable", WARNING,
        "The cloud does not answer. The last list is kept.",
        has(error=TEXT, failures=WHOLE),
        "the cloud does not answer ({failures:#failure}): {error}"),
    EventKind("discovery.poller_doubts_itself", WARNING,
        "Most agents do not answer. The last list is kept.",
        has(unheard=WHOLE, listed=WHOLE, clock_off=WHOLE),
        "{unheard} of {listed:#agent} do not answer the poller",
        remedy="Look at the network and the clock of the poller."),
    EventKind("discovery.poller_hears_again", INFO, "The agents answer again.", has(listed=WHOLE),
        "the agents answer the poller again"),
    EventKind("discovery.stranger_refused", WARNING,
        "A host's agent refused unauthenticated clients.",
        has(host=NAME, id=NAME, refused=WHOLE),
        "host {host}: the agent refused {refused:#connection}",
        remedy="Close the port to other addresses."),
    EventKind("discovery.launch_refused", WARNING, "The place starts no more machines.",
        has(code=NAME, says=TEXT, remedy=TEXT, quotas=NAMES, machines=WHOLE, wanted=WHOLE),
        sentences.launch_refused, remedy="`remedy` says what to do."),
    EventKind("discovery.launch_refusal_ended", INFO, "The place starts machines again.",
        has(code=NAME, machines=WHOLE, wanted=WHOLE),
        "machines start again: {machines} of {wanted} run"),
    EventKind("discovery.group_resized", INFO, "The auto scaling group was asked for another size.",
        has(group=NAME, size=WHOLE, why=TEXT),
        "the coordinator asks the group {group} for {size:#machine}: {why}"),
)

REHEARSAL = (
    EventKind("rehearsal.started", INFO,
        "The clock of a rehearsal starts, with the first finished step.",
        has(trace=TEXT, speed=NUMBER, hosts=WHOLE),
        "the clock of the trace {trace} starts with {hosts:#host}, {speed:g} times as fast"),
    EventKind("rehearsal.host_joined", DETAIL, "The trace adds a local host to the list.",
        has(host=NAME)),
    EventKind("rehearsal.host_noticed", INFO,
        "The trace announces that a host is taken, which leaves the list.",
        has(host=NAME, notice_s=SECONDS), "the trace takes host {host} in {notice_s:.0f} s"),
    EventKind("rehearsal.host_lost", INFO,
        "The trace takes a host: its processes are killed. `noticed`: it was announced.",
        has(host=NAME, noticed=FLAG), "the trace takes host {host} now"),
    EventKind("rehearsal.hosts_gone", INFO,
        "The trace has taken all hosts. `again_s`: the time until it adds one.",
        has(again_s=SECONDS), "no host is left; the trace adds one in {again_s:.0f} s"),
)
