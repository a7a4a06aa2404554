"""Which hosts may work now, and why not the others: one pure function.

instances (ec2), health (agent), notices, history, clock → here → hosts file (poll)

What always holds:
1. A host that was once under notice never comes back: its incarnation is doomed until the cloud forgets its id.
2. The oldest stable host comes first, since it becomes rank 0.
3. Arrivals are batched: each join costs a pause, so hosts that arrive within seconds of each other enter together.
4. A host that comes and goes is held back, longer each time.
5. One odd answer empties nothing: a poll that loses more than half of the list without a notice must be said twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


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
    """The auto scaling group's word for it ("InService", "Terminating:Wait", …); "" outside any group."""
    is_impaired: bool = False
    events: tuple[str, ...] = ()
    """Codes of scheduled events that are not completed ("instance-stop", …)."""
    slots: int = 1


@dataclass(frozen=True)
class Health:
    """What the agent on a host says."""

    state: str
    """"ready", "draining" or "sick"."""
    why: str = ""
    deadline: float | None = None
    """When the host is taken, for one that drains."""
    rebalance: bool = False
    """The cloud sees a raised risk. Right about one time in three, so it makes nobody leave."""
    heard_at: float = 0.0
    """On the poller's own clock."""
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
    """A listed host whose agent has said nothing for so long leaves the list."""
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
    is_listed: bool = False
    heard_at: float | None = None


@dataclass(frozen=True)
class History:
    """What must be remembered between two decisions."""

    past: Mapping[str, Past] = field(default_factory=dict)
    listed: tuple[tuple[str, str, int], ...] = ()
    """The last list: id, name and slots, in its order."""
    doubts: int = 0
    """How often in a row an answer was not believed."""


@dataclass(frozen=True)
class Decision:
    """The list, and one reason for every instance."""

    hosts: tuple[tuple[str, int], ...]
    reasons: Mapping[str, str]
    """Instance id → why it is in or out."""
    history: History


ENDING = ("instance-stop", "instance-retirement", "instance-reboot", "system-reboot", "system-maintenance")
IN = "in"
HELD = "held back"
"""Begins the reason of a host that comes and goes."""
DOUBTED = "but so are most: asked again first"
"""Ends the reason of a host that is still on the list although the cloud's last answer was without it."""


def decide(instances: Sequence[Instance], health: Mapping[str, Health], history: History, now: float,
           policy: Policy) -> Decision:
    """Decide who is on the list. `health` is by instance id; `now` is any clock that only goes forward, in seconds."""
    past, reasons = {}, {}
    for instance in instances:
        before = history.past.get(instance.id, Past())
        after, why = _judge(instance, health.get(instance.id), before, now, policy)
        past[instance.id], reasons[instance.id] = after, why
    if policy.same_type:
        _keep_one_type(instances, reasons, past)
    waiting = sorted(i for i, why in reasons.items() if why == IN and not past[i].is_listed)
    if waiting and not _may_enter([past[i].first_fit or now for i in waiting], now, policy) and any(
            p.is_listed for p in past.values()):
        for i in waiting:
            reasons[i] = "arriving: others may be about to"
    listed = {i for i, why in reasons.items() if why == IN}
    unexplained = [i for i, _, _ in history.listed if i not in listed and not (i in past and past[i].doomed)]
    if 2 * len(unexplained) > len(history.listed) and not history.doubts:
        doomed = {i: p for i, p in past.items() if p.doomed}
        kept = tuple(entry for entry in history.listed if entry[0] not in doomed)
        doubted = {i: f"{reasons.get(i, 'missing')}, {DOUBTED}" for i in unexplained}
        return Decision(tuple((name, slots) for _, name, slots in kept), reasons | doubted,
                        History({**history.past, **doomed}, kept, doubts=1))
    past = {i: replace(p, is_listed=i in listed) for i, p in past.items()}
    ordered = sorted((i for i in instances if i.id in listed), key=lambda i: (i.launched, i.id))
    return Decision(tuple((i.name, i.slots) for i in ordered), reasons,
                    History(past, tuple((i.id, i.name, i.slots) for i in ordered)))


def _judge(instance: Instance, says: Health | None, past: Past, now: float, policy: Policy) -> tuple[Past, str]:
    """Judge one instance by itself: fit or not, and what to remember."""
    if says is not None:
        past = replace(past, heard_at=says.heard_at)
        if says.state == "draining" and not past.doomed:
            past = replace(past, doomed=f"notice: {says.why}" if says.why else "notice")
    why = _unfit(instance, says, past, now, policy)
    if why:
        return replace(past, first_fit=None), why
    if past.first_fit is None:
        arrivals = (*(t for t in past.arrivals if t > now - policy.flap_window_s), now)
        past = replace(past, first_fit=now, arrivals=arrivals)
        if len(arrivals) >= policy.flaps:
            hold = min(policy.hold_most_s, policy.hold_s * 2.0 ** past.holds)
            past = replace(past, holds=past.holds + 1, held_until=now + hold)
    if now < past.held_until:
        return past, f"{HELD}: it came {len(past.arrivals)} times in {policy.flap_window_s:.0f} s"
    return past, IN


def _unfit(instance: Instance, says: Health | None, past: Past, now: float, policy: Policy) -> str:
    """Return why an instance may not work now; "" if it may."""
    ending = [event for event in instance.events if event in ENDING]
    if instance.state != "running":
        return f"the cloud says {instance.state}"
    if policy.lifecycle not in ("any", instance.lifecycle):
        return f"{instance.lifecycle}, and only {policy.lifecycle} is wanted"
    if instance.group_state not in ("", "InService"):
        return f"the group says {instance.group_state}"
    if past.doomed:
        return past.doomed
    if instance.is_impaired:
        return "the cloud says impaired"
    if ending:
        return f"scheduled: {ending[0]}"
    if instance.slots < 1:
        return "no slots"
    if not policy.agents:
        return ""
    if says is not None and says.state == "sick":
        return f"sick: {says.why}"
    if past.heard_at is None:
        return "booting: its agent has not answered yet"
    if now - past.heard_at > policy.silence_s:
        return f"its agent has been silent for {now - past.heard_at:.0f} s"
    return ""


def _keep_one_type(instances: Sequence[Instance], reasons: dict[str, str], past: Mapping[str, Past]) -> None:
    """Leave only the largest group of one type; on a tie the one that works already, then the first name."""
    fit = [i for i in instances if reasons[i.id] == IN]
    sizes, working = Counter(i.type for i in fit), Counter(i.type for i in fit if past[i.id].is_listed)
    if sizes:
        chosen = max(sorted(sizes), key=lambda name: (sizes[name], working[name]))
        for i in fit:
            if i.type != chosen:
                reasons[i.id] = f"{i.type}, and most are {chosen}"


def _may_enter(arrived: list[float], now: float, policy: Policy) -> bool:
    """True when nobody has arrived for a while, or the first one has waited long enough."""
    return now - max(arrived) >= policy.settle_s or now - min(arrived) >= policy.settle_most_s
