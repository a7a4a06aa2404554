"""The judgement on a rehearsal: is the run right, what did the losses cost, what would they cost?

event log, verdict, result.json, the twin's weights → here → replay (prints it)

A rehearsal is right if the run finished, each sample counted once in one lineage, the bits are the
twin's (if there is one), and the trace changed the fleet at least once.

The forecast is for the same trace at its own speed. A pause takes as long there, and the time
between two losses is `speed` times as long. So the share of the time that losses took is divided
by `speed`. The share without any host stays, and so does what else the goodput lacks.

What it does not do: forecast samples in an hour, since local hosts share one machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic_trainer.events.sentences import ENDINGS, count
from elastic_trainer.rehearse.trace import JOIN, LOSS, NOTICE, Row
from elastic_trainer.views.judge import Verdict

MOST_SENTENCES = 5
LARGER_HOSTS = 100


@dataclass
class Played:
    """What the trace did to a run, by its event log."""

    speed: float = 0.0
    """0: the clock of the trace did not start."""
    joined: int = 0
    noticed: int = 0
    lost: int = 0
    """Hosts, those under notice included."""
    sudden: int = 0
    """Of these: without a notice."""
    zeros: int = 0
    """How often no host was left."""
    host_s: float = 0.0
    """The seconds of all hosts, from the start of the clock until the run finished."""
    played_s: float = 0.0
    empty_s: float = 0.0
    """The time without any host."""
    others: Counter[str] = field(default_factory=Counter)
    """Workers that were lost on hosts which the trace did not take, by reason."""
    reduce: str = "exact"
    microbatches: int = 0
    """Of a step; 0: the script is in Horovod's own style."""
    batch: int = 0
    _hosts: int = 0
    _since: float = 0.0
    _taken: set[str] = field(default_factory=set)

    @property
    def changes(self) -> int:
        """How many hosts came or were taken."""
        return self.joined + self.lost

    @property
    def mean_hosts(self) -> float:
        return self.host_s / self.played_s if self.played_s else 0.0

    def take(self, event: Mapping[str, Any]) -> None:
        """Take one more event."""
        match event["event"]:
            case "rehearsal.started":
                self.speed, self._hosts = float(event["speed"]), int(event["hosts"])
                self._since = float(event["time"])
            case "rehearsal.host_joined":
                self._change(float(event["time"]), 1)
                self.joined += 1
            case "rehearsal.host_noticed":
                self.noticed += 1
                self._taken.add(str(event["host"]))
            case "rehearsal.host_lost":
                self._change(float(event["time"]), -1)
                self.lost += 1
                self.sudden += not event.get("noticed")
                self._taken.add(str(event["host"]))
            case "rehearsal.hosts_gone":
                self.zeros += 1
            case "driver.worker_gone" if self.speed:
                ending = ENDINGS.get(str(event.get("reason")))
                if ending and ending.is_lost and event.get("host") not in self._taken:
                    self.others[str(event["reason"])] += 1
            case "job.described":
                self.reduce = str(event.get("reduce", self.reduce))
                self.microbatches = int(event.get("microbatches") or 0)
                self.batch = int(event.get("global_batch") or 0)
            case "run.finished" if self.speed:
                self._change(float(event["time"]), 0)

    def _change(self, now: float, hosts: int) -> None:
        self.host_s += self._hosts * max(0.0, now - self._since)
        self.played_s += max(0.0, now - self._since)
        self.empty_s += 0.0 if self._hosts else max(0.0, now - self._since)
        self._hosts, self._since = self._hosts + hosts, now


def played_of(events: Iterable[Mapping[str, Any]]) -> Played:
    """Return what the trace did, of all events of a run."""
    played = Played()
    for event in events:
        played.take(event)
    return played


_EVENTS = {"rehearsal.host_joined": JOIN, "rehearsal.host_noticed": NOTICE,
           "rehearsal.host_lost": LOSS}


def rows_played(events: Iterable[Mapping[str, Any]], hosts: Iterable[str]) -> list[Row]:
    """Return the trace as it was played, in seconds since the start of the run. `hosts` were there
    from the start."""
    rows, began = [Row(0.0, JOIN, host) for host in hosts], None
    for event in events:
        if event["event"] == "run.started" and began is None:
            began = float(event["time"])
        elif kind := _EVENTS.get(event["event"]):
            rows.append(Row(float(event["time"]) - (began or 0.0), kind, str(event["host"])))
    return rows


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The judgement, and the figures."""

    faults: tuple[str, ...]
    """Why the rehearsal is not right; empty: it is."""
    samples: str
    lineage: str
    bits: str
    goodput: float
    forecast_goodput: float
    """At the trace's own speed."""
    failures: int
    stall_per_failure_s: float | None
    mean_hosts: float
    played: str

    @property
    def is_right(self) -> bool:
        return not self.faults

    def as_json(self) -> dict[str, Any]:
        """Return it for programs."""
        return {"right": self.is_right, **asdict(self)}


def outcome_of(played: Played, verdict: Verdict, result: Mapping[str, Any],
               twin: str | None = None) -> Outcome:
    """Judge a rehearsal. `twin` is the digest of the twin's weights; "": it did not finish; None:
    there is no twin."""
    faults = list(verdict.violations[:MOST_SENTENCES])
    if not result["finished"]:
        faults.insert(0, f"The run did not finish: it has {result['steps']} steps.")
    elif not played.changes and not played.noticed:
        faults.append("The run ended before the trace changed anything. Train more steps, or use "
                      "a higher --speed.")
    bits, fault = _bits(result.get("weights_sha256"), twin, played.reduce)
    return Outcome(
        faults=tuple(faults + ([fault] if fault else [])),
        samples=f"{verdict.samples} in {verdict.steps} steps, "
                f"{'each once' if verdict.is_proved else 'NOT each once'}",
        lineage=f"{'one' if verdict.is_proved else 'NOT proved'}, through "
                f"{count(verdict.attempts, 'attempt')} and "
                f"{count(verdict.generations, 'generation')}",
        bits=bits, goodput=result["goodput"],
        forecast_goodput=round(forecast(result, played.speed or 1.0, played.empty_s), 4),
        failures=result["failures"], stall_per_failure_s=result["stall_per_failure_s"],
        mean_hosts=round(played.mean_hosts, 3), played=_story(played))


def forecast(result: Mapping[str, Any], speed: float, empty_s: float = 0.0) -> float:
    """Return the goodput of the same trace at its own speed; `empty_s`: the time without hosts."""
    goodput, trained_s = float(result["goodput"]), _trained_s(result)
    lost_s = max(0.0, _lost_s(result) - empty_s)
    if not trained_s:
        return 0.0
    return min(1.0, goodput + min(lost_s / trained_s, 1.0 - goodput) * (1.0 - 1.0 / speed))


def larger(played: Played) -> str:
    """Return the options by which `plan` rehearses a larger fleet. With the micro-batches of the
    rehearsal most of its hosts would have no work."""
    return (f"--hosts {LARGER_HOSTS} {work_for(LARGER_HOSTS, played.microbatches, played.batch)} "
            f"--storm rate=12/h,bulk=0.4")


def work_for(hosts: int, microbatches: int, batch: int) -> str:
    """Return the options that give each host 4 micro-batches, of as many samples as those of a
    batch of `batch` samples in `microbatches` micro-batches."""
    return f"--microbatches {4 * hosts} --batch {4 * hosts * batch // microbatches}"


def cost_of_useful_hour(mean_hosts: float, goodput: float, price: float) -> float:
    """Return what an hour of useful training costs, at the price of a host for an hour."""
    return mean_hosts * price / goodput if goodput else 0.0


def _trained_s(result: Mapping[str, Any]) -> float:
    books = result["books"]
    return float(result["wall_s"] - books["booting_s"] - books["stopped_s"])


def _lost_s(result: Mapping[str, Any]) -> float:
    """Return the seconds of pauses and restarts, and of steps that a checkpoint took back."""
    useful_s = result["goodput"] * _trained_s(result)
    dropped_s = result["steps_rolled_back"] * useful_s / max(1, result["steps"])
    return float(result["books"]["pausing_s"] + result["books"]["restarting_s"] + dropped_s)


def _bits(ours: str | None, twin: str | None, reduce: str) -> tuple[str, str]:
    """Return the sentence about the bits, and the fault if there is one."""
    if twin is None:
        return "not compared: --twin trains the undisturbed twin, too", ""
    if not twin:
        return "not compared", "The undisturbed twin did not finish, so nothing is compared."
    if ours is None:
        return "not compared", "The run has no weights that are compared with the twin's."
    if ours == twin:
        return f"equal to the undisturbed twin's ({ours[:16]}…)", ""
    if reduce == "ring":
        return "differ from the twin's, as --reduce ring allows", ""
    return "DIFFER from the undisturbed twin's", (
        f"The weights differ from the undisturbed twin's: {ours[:16]}… and {twin[:16]}…. Does the "
        f"script draw random numbers of its own, or read the rank or the time? "
        f"docs/guide/script.md says what a script may do.")


def _story(played: Played) -> str:
    text = (f"{count(played.joined, 'host')} joined, {played.lost} lost "
            f"({played.sudden} without a notice), {count(played.zeros, 'time')} without any host")
    if played.others:
        lost = ", ".join(f"{number} {reason.replace('_', ' ')}"
                         for reason, number in sorted(played.others.items()))
        text += f"; besides, workers that the trace did not take: {lost}"
    return text
