"""Which hosts may work now, and why not the others: one pure function.

instances (ec2), health (agent), notices, history, clock → here → hosts file (poll)

What always holds:
1. A host that was once under the cloud's notice never comes back: its incarnation is doomed until
   the cloud forgets its id. One whose agent was only stopped comes back with the next agent.
2. The oldest stable host comes first, since it becomes rank 0. Who came again within flap_window_s
   stands behind those who did not, for as long as it stays.
3. Arrivals are batched: each join costs a pause, so hosts that arrive within seconds of each other
   enter together. They wait only where somebody stays: the list is never empty for their sake.
4. A host that comes and goes is held back, longer each time; also one that comes and goes in the
   cloud's answers.
5. One odd answer empties nothing: a poll that loses more than half of the list without a notice
   must be said twice, of each host that it loses.
6. One fault of ours empties nothing: when most agents, and at least two, cannot be heard or have
   another clock than we, it is our network or our clock. Their hosts keep their places until they
   are heard, or leave for another reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True)
class Group:
    """The group as AWS has it."""

    wish: int
    """The tag Workers."""
    size: int
    """Its desired capacity."""
    is_armed: bool
    """The order to empty it stands, and its time has not come."""


@dataclass(frozen=True)
class Instance:
    """A machine as the cloud describes it."""

    id: str
    name: str
    """The host's name or address, unique to this incarnation."""
    type: str = ""
    zone: str = ""
    launched: float = 0.0
    """Seconds since 1970, by the cloud's clock: only for the order."""
    lifecycle: str = "spot"
    """"spot" or "on-demand"."""
    state: str = "running"
    group_state: str = ""
    """The auto scaling group's word for it ("InService", "Terminating:Wait", …); "" outside any
    group."""
    is_impaired: bool = False
    events: tuple[tuple[str, float], ...] = ()
    """Scheduled events that are not completed: code ("instance-stop", …), and in how many seconds
    it may begin."""
    slots: int = 1


@dataclass(frozen=True)
class Health:
    """What the agent on a host says."""

    state: str
    """"ready", "draining" or "sick"."""
    why: str = ""
    deadline: float | None = None
    """When the host is taken, for one that drains."""
    for_good: bool = True
    """It is the cloud's notice that makes it drain, not a stop of the agent's service."""
    life: str = ""
    """Another one after each start of the agent."""
    is_clock_off: bool = False
    """It says ready, but by another clock than the poller's."""
    rebalance: bool = False
    """The cloud sees a raised risk. Right about one time in three, so it makes nobody leave."""
    heard_at: float = 0.0
    """On the poller's own clock."""
    refused: int = 0
    """How many strangers it has refused in this life."""
    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What the operator has chosen. Times in seconds."""

    lifecycle: str = "spot"
    """"spot", "on-demand" or "any"."""
    agents: bool = False
    """A host needs an agent that says ready."""
    same_type: bool = False
    """Offer only the largest group of one instance type: the slowest one sets the pace."""
    settle_s: float = 3.0
    settle_most_s: float = 15.0
    silence_s: float = 20.0
    """A listed host whose agent has said nothing for so long, or nothing by the right time, leaves
    the list."""
    horizon_s: float = 900.0
    """So long before a scheduled event its host leaves; until then the event is only shown."""
    flaps: int = 3
    """So many comings within flap_window_s are too many."""
    flap_window_s: float = 600.0
    hold_s: float = 60.0
    hold_most_s: float = 1800.0


@dataclass(frozen=True)
class Past:
    """What must be remembered of one host."""

    first_fit: float | None = None
    """Since when it has been fit without a break."""
    arrivals: tuple[float, ...] = ()
    holds: int = 0
    held_until: float = 0.0
    doomed: str = ""
    stopped: str = ""
    """The life of its agent that was told to stop; "" if none was, or another one has begun."""
    sick: str = ""
    """What its agent last found wrong with it; "" if nothing. A sick host may well fall silent, and
    is sick still."""
    is_listed: bool = False
    heard_at: float | None = None
    """When its agent last said something by the right time."""
    seen_at: float = 0.0
    """When the cloud last knew it."""
    first_unfit: float | None = None
    """Since when it has been unfit without a break."""

    @property
    def leaves(self) -> bool:
        """True for a host that has said itself that it goes."""
        return bool(self.doomed or self.stopped)


@dataclass(frozen=True)
class History:
    """What must be remembered between two decisions."""

    past: Mapping[str, Past] = field(default_factory=dict)
    listed: tuple[tuple[str, str, int], ...] = ()
    """The last list: id, name and slots, in its order."""
    doubted: tuple[str, ...] = ()
    """Whose loss has been said once and was not believed."""
    unheard: int = 0
    """How many hosts are listed although their agents are not heard, since they are too many; 0: we
    hear well."""


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
SICK = "sick: "
"""Begins the reason of a host that its agent finds unwell."""
HELD = "held back"
"""Begins the reason of a host that comes and goes."""
ARRIVING = "arriving: others may be about to"
DOUBTED = "but so are most: asked again first"
"""Ends the reason of a host that is still on the list although the cloud's last answer was without
it."""


def decide(instances: Sequence[Instance], health: Mapping[str, Health], history: History,
           now: float, policy: Policy) -> Decision:
    """Decide who is on the list. `health` is by instance id; `now` is any clock that only goes
    forward, in seconds."""
    past = {i.id: _listen(history.past.get(i.id, Past()), health.get(i.id), now) for i in instances}
    reasons = {i.id: _forbidden(i, past[i.id], policy) for i in instances}
    unheard = _unheard([past[i] for i, why in reasons.items() if not why], history, now, policy)
    # Who is silent still gets some more time: we have only just begun to hear.
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
    unexplained = [
        i for i, _, _ in history.listed if i not in listed and not (i in past and past[i].leaves)
    ]
    if 2 * len(unexplained) > len(history.listed) and not set(unexplained) <= set(history.doubted):
        leaving = {i: p for i, p in past.items() if p.leaves}
        kept = tuple(entry for entry in history.listed if entry[0] not in leaving)
        stand = {i: f"{reasons.get(i, 'missing')}, {DOUBTED}" for i in unexplained}
        stand |= {i: ARRIVING for i in listed - {entry[0] for entry in kept}}
        return Decision(
            tuple((name, slots) for _, name, slots in kept), reasons | stand,
            History({**history.past, **leaving},
                    kept,
                    doubted=tuple(sorted({*history.doubted, *unexplained})),
                    unheard=unheard))
    past = {i: replace(p, is_listed=i in listed) for i, p in past.items()}
    past |= {
        i: replace(p, is_listed=False, first_fit=None, first_unfit=None)
        for i, p in history.past.items()
        if i not in past and now - p.seen_at <= policy.flap_window_s
    }
    ordered = sorted((i for i in instances if i.id in listed),
                     key=lambda i: (len(past[i.id].arrivals) > 1, i.launched, i.id))
    return Decision(tuple((i.name, i.slots) for i in ordered), reasons,
                    History(past, tuple((i.id, i.name, i.slots) for i in ordered), unheard=unheard))


def _listen(past: Past, says: Health | None, now: float) -> Past:
    """Remember what an agent says, of a host that the cloud knows."""
    past = replace(past, seen_at=now)
    if says is None:
        return past
    if not says.is_clock_off:
        past = replace(past, heard_at=says.heard_at)
    if not (says.is_clock_off and past.is_listed):
        past = replace(past, sick=f"{SICK}{says.why}" if says.state == "sick" else "")
    if says.state != "draining":
        return replace(past, stopped="") if says.life != past.stopped else past
    if not says.for_good:
        return replace(past, stopped=says.life)
    return replace(past, doomed=past.doomed or (f"notice: {says.why}" if says.why else "notice"))


def _forbidden(instance: Instance, past: Past, policy: Policy) -> str:
    """Return what the cloud or the host's own word has against it; "" if nothing."""
    ending = [code for code, in_s in instance.events if code in ENDING and in_s <= policy.horizon_s]
    if instance.state != "running":
        return f"the cloud says {instance.state}"
    if policy.lifecycle not in ("any", instance.lifecycle):
        return f"{instance.lifecycle}, and only {policy.lifecycle} is wanted"
    if instance.group_state not in ("", "InService"):
        return f"the group says {instance.group_state}"
    if past.doomed:
        return past.doomed
    if past.stopped:
        return "its agent was told to stop, and no other one has started"
    if instance.is_impaired:
        return "the cloud says impaired"
    if ending:
        return f"scheduled: {ending[0]}"
    if instance.slots < 1:
        return "no slots"
    return past.sick if policy.agents else ""


def _unheard(fit: Sequence[Past], history: History, now: float, policy: Policy) -> int:
    """Return how many listed hosts' agents are not heard, if they are too many to be the hosts' own
    fault; else 0."""
    silent_s = [now - past.heard_at for past in fit if past.is_listed and past.heard_at is not None]
    # The first one's time is up: the others' soon is.
    quiet_s = [s for s in silent_s if s > policy.silence_s / 2]
    is_time_up = max(quiet_s, default=0.0) > policy.silence_s
    are_most = len(quiet_s) >= (1 if history.unheard else 2) and 2 * len(quiet_s) > len(silent_s)
    return len(quiet_s) if policy.agents and is_time_up and are_most else 0


def _silent(says: Health | None, past: Past, now: float, policy: Policy) -> str:
    """Return how long a host's agent has not been heard, or not by the right time; "" if it has
    been."""
    if not policy.agents:
        return ""
    if past.heard_at is None:
        return "booting: its agent has not answered yet"
    if now - past.heard_at > policy.silence_s:
        return f"{SICK}{says.why}" if says is not None else f"its agent has been silent for {now - past.heard_at:.0f} s"
    return ""


def _settle(past: Past, why: str, now: float, policy: Policy) -> tuple[Past, str]:
    """Remember since when a host is fit or unfit; one that comes and goes is held back."""
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
    """Leave only the largest group of one type; on a tie the one that works already, then the first
    name."""
    fit = [i for i in instances if reasons[i.id] == IN]
    sizes, working = Counter(i.type for i in fit), Counter(i.type for i in fit
                                                           if past[i.id].is_listed)
    if sizes:
        chosen = max(sorted(sizes), key=lambda name: (sizes[name], working[name]))
        for i in fit:
            if i.type != chosen:
                reasons[i.id] = f"{i.type}, and most are {chosen}"


def _may_enter(since: list[float], now: float, policy: Policy) -> bool:
    """True when nobody has arrived for a while, or the first one has waited long enough."""
    return now - max(since) >= policy.settle_s or now - min(since) >= policy.settle_most_s
