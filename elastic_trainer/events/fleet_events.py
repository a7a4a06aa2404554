"""The events of what is around a run: standbys, the discovery of hosts, and a rehearsal.

here → event_table (all events)
"""

from __future__ import annotations

from elastic_trainer.events import sentences
from elastic_trainer.events.event_kind import EventKind, Level
from elastic_trainer.events.fields import (
    EXIT_CODE,
    FLAG,
    NAME,
    NAMES,
    NUMBER,
    PID,
    SECONDS,
    TEXT,
    WHOLE,
    has,
    may_read,
)

DETAIL, INFO, WARNING, _ = Level
_HOST_OF_CLOUD = has(host=NAME, id=NAME, why=TEXT)
_MACHINE = may_read(type=NAME, zone=NAME, lifecycle=NAME)

STANDBYS = (
    EventKind(
        "standby.booted", INFO, "A standby is booted and waits.", has(pid=PID, boot_s=SECONDS),
        "a standby is ready after {boot_s:.1f} s"),
    EventKind("standby.taken", DETAIL, "A standby became a worker.", has(pid=PID)),
    EventKind(
        "standby.failed", WARNING,
        "A standby died, or the script fails while it boots. Workers start without it.",
        has(pid=PID, state=NAME, reason=TEXT), "a standby failed while {state}",
        remedy="`reason` has the last output of the script (on hosts: the stderr of the service)."),
    EventKind(
        "standby.service_ended", WARNING, "The service of the standbys ended. It is started again.",
        has(exit_code=EXIT_CODE, again_s=SECONDS),
        "the standby service ended (exit code {exit_code}); it starts again in {again_s:.0f} s"),
)

DISCOVERY = (
    EventKind(
        "discovery.host_in", INFO, "The poller lists a host.", (*_HOST_OF_CLOUD, *_MACHINE),
        "the poller lists host {host}"),
    EventKind(
        "discovery.host_out", INFO, "The poller no longer lists a host.",
        (*_HOST_OF_CLOUD, *_MACHINE),
        "the poller no longer lists host {host}: {why}"),
    EventKind(
        "discovery.host_gone", INFO, "An unlisted host no longer exists.", _HOST_OF_CLOUD,
        "host {host} is gone: {why}"),
    EventKind(
        "discovery.host_sick", WARNING, "An unlisted host is sick (disk, memory, GPU, clock).",
        _HOST_OF_CLOUD, "host {host} is {why}", remedy="`why` says what to look at."),
    EventKind(
        "discovery.host_held_back", WARNING, "An unlisted host appears and disappears.",
        _HOST_OF_CLOUD, "host {host} is {why}", remedy="`why` says what to look at."),
    EventKind("discovery.hosts_changed", DETAIL, "The hosts file has changed.", has(hosts=NAMES)),
    EventKind(
        "discovery.answer_doubted", WARNING,
        "The cloud's answer lacks most hosts, and the cloud is asked again.",
        has(listed=WHOLE, lacks=WHOLE),
        "the cloud's answer lacks {lacks} of {listed:#host}; the poller asks again"),
    EventKind(
        "discovery.cloud_unavailable", WARNING, "The cloud does not answer. The last list is kept.",
        has(error=TEXT, failures=WHOLE),
        "the cloud does not answer ({failures:#failure}): {error}"),
    EventKind(
        "discovery.poller_doubts_itself", WARNING,
        "Most agents do not answer. The last list is kept.",
        has(unheard=WHOLE, listed=WHOLE, clock_off=WHOLE),
        "{unheard} of {listed:#agent} do not answer the poller",
        remedy="Look at the network and the clock of the poller."),
    EventKind(
        "discovery.poller_hears_again", INFO, "The agents answer again.", has(listed=WHOLE),
        "the agents answer the poller again"),
    EventKind(
        "discovery.stranger_refused", WARNING, "A host's agent refused unauthenticated clients.",
        has(host=NAME, id=NAME, refused=WHOLE),
        "host {host}: the agent refused {refused:#connection}",
        remedy="Close the port to other addresses."),
    EventKind(
        "discovery.launch_refused", WARNING, "AWS starts no more machines.",
        has(code=NAME, says=TEXT, remedy=TEXT, quotas=NAMES, machines=WHOLE, wanted=WHOLE),
        sentences.launch_refused, remedy="`remedy` says what to do."),
    EventKind(
        "discovery.launch_refusal_ended", INFO, "AWS starts machines again.",
        has(code=NAME, machines=WHOLE, wanted=WHOLE),
        "AWS starts machines again: {machines} of {wanted} run"),
    EventKind(
        "discovery.group_resized", INFO, "The auto scaling group was asked for another size.",
        has(group=NAME, size=WHOLE, why=TEXT),
        "the coordinator asks the group {group} for {size:#machine}: {why}"),
)

REHEARSAL = (
    EventKind(
        "rehearsal.started", INFO, "The clock of a rehearsal starts, with the first finished step.",
        has(trace=TEXT, speed=NUMBER, hosts=WHOLE),
        "the clock of the trace {trace} starts with {hosts:#host}, {speed:g} times as fast"),
    EventKind(
        "rehearsal.host_joined", DETAIL, "The trace adds a local host to the list.",
        has(host=NAME)),
    EventKind(
        "rehearsal.host_noticed", INFO,
        "The trace announces that a host is taken, which leaves the list.",
        has(host=NAME, notice_s=SECONDS), "the trace takes host {host} in {notice_s:.0f} s"),
    EventKind(
        "rehearsal.host_lost", INFO,
        "The trace takes a host: its processes are killed. `noticed`: it was announced.",
        has(host=NAME, noticed=FLAG), "the trace takes host {host} now"),
    EventKind(
        "rehearsal.hosts_gone", INFO,
        "The trace has taken all hosts. `again_s`: the time until it adds one.",
        has(again_s=SECONDS), "no host is left; the trace adds one in {again_s:.0f} s"),
)
