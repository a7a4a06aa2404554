"""Which hosts may work now, and the reason for each other one: one pure function.

instances (place), health (agent), notices, history, clock → here → hosts file (poll)

What always holds:
1. A host with a notice of the cloud never comes back: its id is excluded until the cloud forgets
   it. A host whose agent was only stopped comes back with its next agent, and one with a notice
   that its place has withdrawn comes back at once.
2. The oldest stable host comes first, because it becomes rank 0. A host that returned within
   flap_window_s stands after the others while it stays.
3. Arrivals are batched: each join costs a pause, so hosts that arrive within seconds of each other
   enter together. They wait only while another host stays on the list: it is never empty for them.
4. A host that comes and goes, by its agent or in the cloud's answers, is held back, for longer each
   time.
5. One odd answer does not empty the list: an answer without more than half of the listed hosts, and
   without a notice of them, must be confirmed by a second one for each missing host.
6. A host that finds fewer GPUs than its type has is sick: it would train on its CPUs, at the price
   of GPUs.
7. A fault of the poller does not empty the list: when most agents, and at least two, are not heard
   or have another clock, the poller's network or clock is at fault. Those hosts keep their places
   until they are heard, or leave for another reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic_trainer.discovery.place_protocol import Instance
from elastic_trainer.host.names import HOST_NAME


@dataclass(frozen=True)
class Health:
    """An agent's answer about its host."""

    state: str
    """"ready", "draining" or "sick"."""
    why: str = ""
    deadline: float | None = None
    """When the host is taken, for one that drains."""
    for_good: bool = True
    """It drains because of the cloud's notice, not because its agent's service was stopped."""
    life: str = ""
    """Another one after each start of the agent."""
    is_clock_off: bool = False
    """It reports ready, but its clock differs from the poller's."""
    rebalance: bool = False
    """The cloud reports a raised risk. About one such report in three comes true, so no host leaves
    because of it."""
    heard_at: float = 0.0
    """On the poller's own clock."""
    gpus: int | None = None
    """How many GPUs it finds; None: unknown, e.g. to an agent of version 0.1."""
    refused: int = 0
    """The unauthenticated clients that it has refused since its start."""
    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The operator's choices. Times in seconds."""

    lifecycle: str = "spot"
    """"spot", "on-demand" or "any"."""
    agents: bool = False
    """A host needs an agent that reports ready."""
    same_type: bool = False
    """Offer only the largest group of one instance type: the slowest one sets the pace."""
    settle_s: float = 3.0
    settle_most_s: float = 15.0
    silence_s: float = 20.0
    """A listed host leaves the list after this time without an answer of its agent with the right
    time."""
    horizon_s: float = 900.0
    """A host leaves this long before a scheduled event. Until then the event is only shown."""
    flaps: int = 3
    """A host is held back from this number of arrivals within flap_window_s on."""
    flap_window_s: float = 600.0
    hold_s: float = 60.0
    hold_most_s: float = 1800.0


@dataclass(frozen=True)
class Past:
    """One host's facts that outlast a decision."""

    first_fit: float | None = None
    """The start of the time in which it has been fit without a break."""
    arrivals: tuple[float, ...] = ()
    holds: int = 0
    held_until: float = 0.0
    doomed: str = ""
    stopped: str = ""
    """The `life` of its agent that was stopped; "" if none was, or another one has started."""
    stopped_by: str = ""
    """Why it was stopped, by its own report."""
    noticed: str = ""
    """The notice that its place repeats now, and may withdraw."""
    address: str = ""
    """Where its workers are reached; "": by its name."""
    zone: str = ""
    """The zone of its place, if a line of the hosts file can have it; "": unknown."""
    sick: str = ""
    """The fault that its agent last reported; "": none. A sick host that falls silent stays sick.
    """
    is_listed: bool = False
    heard_at: float | None = None
    """The time of its agent's last answer with the right time."""
    seen_at: float = 0.0
    """The time of the cloud's last answer with it."""
    first_unfit: float | None = None
    """The start of the time in which it has been unfit without a break."""

    @property
    def leaves(self) -> bool:
        """True for a host that leaves by the report of its own agent, or by a notice."""
        return bool(self.doomed or self.stopped or self.noticed)


@dataclass(frozen=True)
class History:
    """The facts that outlast a decision."""

    past: Mapping[str, Past] = field(default_factory=dict)
    listed: tuple[tuple[str, str, int], ...] = ()
    """The last list: id, name and slots, in its order."""
    doubted: tuple[str, ...] = ()
    """The hosts that one answer lacked, and that are still listed."""
    unheard: int = 0
    """The number of hosts that are listed although their agents are not heard, because most are
    not; 0: the poller hears the agents."""


@dataclass(frozen=True)
class Decision:
    """The list, and one reason for every instance."""

    hosts: tuple[tuple[str, int], ...]
    reasons: Mapping[str, str]
    """Instance id → why it is in or out."""
    history: History


ENDING = ("instance-stop", "instance-retirement", "instance-reboot", "system-reboot",
          "system-maintenance")
MOST_DOUBLINGS = 16
IN = "in"
NOTICE = "notice"
SICK = "sick: "
"""Begins the reason of a host whose agent reports a fault."""
HELD = "held back"
"""Begins the reason of a host that comes and goes."""
ARRIVING = "arriving: others may be about to"
DOUBTED = "but so are most: asked again first"
"""Ends the reason of a host that is still on the list although the cloud's last answer lacks it."""


def decide(instances: Sequence[Instance], health: Mapping[str, Health], history: History,
           now: float, policy: Policy) -> Decision:
    """Decide which hosts are on the list.

    `health` is by instance id; `now` is any clock that only goes forward, in seconds.
    """
    past = {i.id: _remember(i, history.past.get(i.id, Past()), health.get(i.id), now)
            for i in instances}
    reasons = {i.id: _forbidden(i, past[i.id], policy) for i in instances}
    fit = [past[i] for i, why in reasons.items() if not why]
    unheard = _count_silent(fit, history, now, policy)
    # Silent agents get more time, because the others answer again only now.
    if history.unheard and not unheard:
        past = {i: replace(p, heard_at=max(p.heard_at, now - policy.silence_s / 2))
                if p.is_listed and p.heard_at is not None else p for i, p in past.items()}
    for identity, why in reasons.items():
        if not why and not (unheard and past[identity].is_listed):
            why = _silent(health.get(identity), past[identity], now, policy)
        past[identity], reasons[identity] = _settle(past[identity], why, now, policy)
    if policy.same_type:
        _keep_one_type(instances, reasons, past)
    waiting = sorted(i for i, why in reasons.items() if why == IN and not past[i].is_listed)
    could_enter = [max(past[i].first_fit or now, past[i].held_until) for i in waiting]
    if waiting and not _may_enter(could_enter, now, policy) and any(
            why == IN and past[i].is_listed for i, why in reasons.items()):
        for i in waiting:
            reasons[i] = ARRIVING
    listed = {i for i, why in reasons.items() if why == IN}
    unexplained = [i for i, _, _ in history.listed
                   if i not in listed and not (i in past and past[i].leaves)]
    if 2 * len(unexplained) > len(history.listed) and not set(unexplained) <= set(history.doubted):
        return _doubt(unexplained, listed, reasons, past, replace(history, unheard=unheard))
    past = {i: replace(p, is_listed=i in listed) for i, p in past.items()}
    past |= {i: replace(p, is_listed=False, first_fit=None, first_unfit=None)
             for i, p in history.past.items() if i not in past
             and now - p.seen_at <= policy.flap_window_s}
    ordered = sorted((i for i in instances if i.id in listed),
                     key=lambda i: (len(past[i.id].arrivals) > 1, i.launched, i.id))
    return Decision(tuple((i.name, i.slots) for i in ordered), reasons,
                    History(past, tuple((i.id, i.name, i.slots) for i in ordered), unheard=unheard))


def lines(history: History, with_zones: bool = False) -> str:
    """Return the list as the hosts file has it: `host:slots`, and address and zone where it has
    them."""
    listed = [(name, slots, history.past.get(i, Past())) for i, name, slots in history.listed]
    return "".join(" ".join([f"{name}:{slots}", *filter(None, [past.address]),
                             *([f"zone={past.zone}"] if with_zones and past.zone else [])]) + "\n"
                   for name, slots, past in listed)


def _doubt(unexplained: Sequence[str], listed: set[str], reasons: Mapping[str, str],
           past: Mapping[str, Past], history: History) -> Decision:
    """Keep the list, but for hosts that leave by a report or a notice, until the loss is confirmed.
    """
    leaving = {i: p for i, p in past.items() if p.leaves}
    kept = tuple(entry for entry in history.listed if entry[0] not in leaving)
    doubts = {i: f"{reasons.get(i, 'missing')}, {DOUBTED}" for i in unexplained}
    doubts |= {i: ARRIVING for i in listed - {entry[0] for entry in kept}}
    return Decision(
        tuple((name, slots) for _, name, slots in kept), {**reasons, **doubts},
        History({**history.past, **leaving}, kept, unheard=history.unheard,
                doubted=tuple(sorted({*history.doubted, *unexplained}))))


def _remember(instance: Instance, past: Past, answer: Health | None, now: float) -> Past:
    """Return the past of a host that the cloud knows, with its agent's answer."""
    zone = instance.zone if HOST_NAME.fullmatch(instance.zone) else ""
    past = replace(past, seen_at=now, address=instance.listed_at, zone=zone, noticed="")
    if given := instance.notice:
        says = f"{NOTICE}: {given.sentence()}"
        past = (replace(past, doomed=past.doomed or says) if given.for_good
                else replace(past, noticed=says))
    if answer is None:
        return past
    if not answer.is_clock_off:
        past = replace(past, heard_at=answer.heard_at)
    if not (answer.is_clock_off and past.is_listed):
        why = answer.why if answer.state == "sick" else _lost_gpus(instance, answer)
        past = replace(past, sick=why and f"{SICK}{why}")
    if answer.state != "draining":
        return replace(past, stopped="") if answer.life != past.stopped else past
    if not answer.for_good:
        return replace(past, stopped=answer.life, stopped_by=answer.why)
    notice = f"{NOTICE}: {answer.why}" if answer.why else NOTICE
    return replace(past, doomed=past.doomed or notice)


def _lost_gpus(instance: Instance, answer: Health) -> str:
    """Return the reason of a host that finds fewer GPUs than its type has; "" if there is none.

    It would train on its CPUs, or with fewer workers than it has slots.
    """
    if answer.gpus is None or answer.gpus >= instance.gpus:
        return ""
    why = (f"{instance.type} has {instance.gpus} GPUs, and nvidia-smi finds "
           f"{answer.gpus or 'none'}")
    return why if answer.gpus else (
        f"{why}. Set image_id to an image with NVIDIA's driver (deploy/README.md)")


def _forbidden(instance: Instance, past: Past, policy: Policy) -> str:
    """Return the cloud's or the host's own reason against it; "" if there is none."""
    ending = [code for code, in_s in instance.events if code in ENDING and in_s <= policy.horizon_s]
    if instance.notice:
        return past.doomed or past.noticed
    if instance.state != "running":
        return instance.says or f"the cloud reports {instance.state}"
    if policy.lifecycle not in ("any", instance.lifecycle):
        return f"{instance.lifecycle}, and only {policy.lifecycle} is wanted"
    if instance.group_state not in ("", "InService"):
        return f"the group reports {instance.group_state}"
    if past.doomed:
        return past.doomed
    if past.stopped:
        why = f"{past.stopped_by}: " if past.stopped_by else ""
        return f"{why}its agent was stopped, and no other one has started"
    if instance.is_impaired:
        return "the cloud reports impaired"
    if ending:
        return f"scheduled: {ending[0]}"
    if instance.slots < 1:
        return "no slots"
    return past.sick if policy.agents else ""


def _count_silent(fit: Sequence[Past], history: History, now: float, policy: Policy) -> int:
    """Return the number of listed hosts whose agents are silent, if it is too large to be the
    hosts' own fault; else 0."""
    silent_s = [now - past.heard_at for past in fit if past.is_listed and past.heard_at is not None]
    # When the first one's time is up, the others' soon is.
    quiet_s = [s for s in silent_s if s > policy.silence_s / 2]
    is_time_up = max(quiet_s, default=0.0) > policy.silence_s
    are_most = len(quiet_s) >= (1 if history.unheard else 2) and 2 * len(quiet_s) > len(silent_s)
    return len(quiet_s) if policy.agents and is_time_up and are_most else 0


def _silent(answer: Health | None, past: Past, now: float, policy: Policy) -> str:
    """Return the reason of a host whose agent is not heard, or has another time; "" if there is
    none."""
    if not policy.agents:
        return ""
    if past.heard_at is None:
        return "booting: its agent has not answered yet"
    if now - past.heard_at > policy.silence_s:
        silent = f"its agent has been silent for {now - past.heard_at:.0f} s"
        return f"{SICK}{answer.why}" if answer is not None else silent
    return ""


def _settle(past: Past, why: str, now: float, policy: Policy) -> tuple[Past, str]:
    """Note the time at which a host became fit or unfit; hold back one that comes and goes."""
    if why:
        return replace(past,
                       first_fit=None,
                       first_unfit=now if past.first_unfit is None else past.first_unfit), why
    if past.first_fit is None:
        arrivals = (*(t for t in past.arrivals if t > now - policy.flap_window_s), now)
        past = replace(past, first_fit=now, first_unfit=None, arrivals=arrivals)
        if len(arrivals) >= policy.flaps:
            hold = min(policy.hold_most_s, policy.hold_s * 2.0 ** min(past.holds, MOST_DOUBLINGS))
            past = replace(past, holds=past.holds + 1, held_until=now + hold)
    if now < past.held_until:
        return past, f"{HELD}: it came {len(past.arrivals)} times in {policy.flap_window_s:.0f} s"
    return past, IN


def _keep_one_type(instances: Sequence[Instance], reasons: dict[str, str],
                   past: Mapping[str, Past]) -> None:
    """Leave only the largest group of one type.

    On a tie it is the one with more listed hosts, then the first name.
    """
    fit = [i for i in instances if reasons[i.id] == IN]
    sizes, working = Counter(i.type for i in fit), Counter(i.type for i in fit
                                                           if past[i.id].is_listed)
    if sizes:
        chosen = max(sorted(sizes), key=lambda name: (sizes[name], working[name]))
        for i in fit:
            if i.type != chosen:
                reasons[i.id] = f"{i.type}, and most are {chosen}"


def _may_enter(since: list[float], now: float, policy: Policy) -> bool:
    """True when no host has arrived for settle_s, or the first one has waited for settle_most_s."""
    return now - max(since) >= policy.settle_s or now - min(since) >= policy.settle_most_s
