"""A run as OpenTelemetry spans: its attempts, generations and checkpoints, sent as they end.

    elastic-trainer watch runs/NAME --otel

event log → Spans (a fold) → here → an OTLP/HTTP exporter → a collector

What always holds:
1. A span's ids follow from the event log alone. So a second export of the same log, or one that was
   killed and started again, sends the same spans and no others.
2. A generation is a child of its attempt, a checkpoint one of its generation, an attempt a root.
   The spans of a run are one trace.
3. An attempt whose driver and supervisor were killed ends at its last event. The span is sent when
   the run is started again.
4. A collector that does not answer changes nothing in the run. The spans wait, at most
   MOST_WAITING of them; what is dropped then is said at the end.

Endpoint, headers and time-outs are those of OpenTelemetry's own variables
(OTEL_EXPORTER_OTLP_ENDPOINT, …). The packages are those of the extra `otel`.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_trainer.config import ConfigError
from elastic_trainer.events.lifetime import BEGINS, Lifetime, ends_run
from elastic_trainer.events.schema import UNREADABLE
from elastic_trainer.events.segments import Reader
from elastic_trainer.events.versions import versions

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

MOST_WAITING = 10_000
BATCH = 500
POLL_S = 1.0
LAST_TRIES_S = 30.0
"""How long the last spans wait for a collector, when the run is over."""

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Span:
    """A part of a run that has ended. Times in seconds since 1970."""

    name: str
    key: str
    """What identifies it in its run."""
    parent: str
    """The key of its parent; "": none."""
    start: float
    end: float
    facts: Mapping[str, Any]
    error: str = ""


@dataclass
class Open:
    """An attempt or a generation that goes on."""

    name: str
    key: str
    parent: str
    start: float
    facts: dict[str, Any] = field(default_factory=dict)

    def ended(self, end: float, error: str = "") -> Span:
        return Span(self.name, self.key, self.parent, self.start, max(self.start, end),
                    dict(self.facts), error)


class Spans:
    """The fold: `take` yields the spans that an event ends."""

    def __init__(self) -> None:
        self.run, self.trace = "", ""
        """The run's name, and what identifies its log."""
        self.is_over = False
        self._life = Lifetime()
        self._attempt: Open | None = None
        self._generation: Open | None = None

    def take(self, event: Event) -> Iterator[Span]:
        """Take one more event."""
        self.run = self.run or str(event.get("run") or "")
        self.trace = self.trace or f"{self.run} {event['time']}"
        try:
            self._life.take(event)
            self.is_over = ends_run(event) or self.is_over and event["event"] not in BEGINS
            yield from self._taken(event, float(event["time"]))
        except UNREADABLE:
            return

    def _taken(self, event: Event, now: float) -> Iterator[Span]:
        match event["event"]:
            case "run.started":
                yield from self._end(self._life.before, "it ended without an event")
            case "attempt.started":
                yield from self._end(self._life.before, "it ended without an event")
                self._attempt = Open("attempt", f"attempt {now}", "", now,
                                     {"attempt": int(event["attempt"])})
            case "attempt.ended":
                verdict = str(event["verdict"])
                if self._attempt:
                    self._attempt.facts["verdict"] = verdict
                failed = verdict not in ("finished", "interrupted")
                yield from self._end(now, verdict if failed else "")
            case "worker.generation_started":
                key = f"{self._parent()} generation {event['generation']}"
                if self._generation is None or self._generation.key != key:
                    yield from self._end_generation(now)
                    self._generation = Open(
                        "generation", key, self._parent(), now,
                        {"generation": int(event["generation"]), "workers": int(event["size"]),
                         "first_step": int(event["step"]), "source": str(event["source"])})
            case "worker.step_committed" | "worker.commit_kept" if self._generation:
                self._generation.facts["last_step"] = int(event["step"])
            case "state.checkpoint_published":
                parent = self._generation.key if self._generation else self._parent()
                facts = {name: event[name] for name in ("step", "bytes", "uploaded_bytes",
                                                        "pause_s") if name in event}
                yield Span("checkpoint", f"{parent} checkpoint {event['step']} {now}", parent,
                           now - float(event.get("duration_s") or 0.0), now, facts)

    def _parent(self) -> str:
        return self._attempt.key if self._attempt else ""

    def _end(self, now: float, error: str) -> Iterator[Span]:
        yield from self._end_generation(now)
        if self._attempt:
            yield self._attempt.ended(now, error)
            self._attempt = None

    def _end_generation(self, now: float) -> Iterator[Span]:
        if self._generation:
            yield self._generation.ended(now)
            self._generation = None


@cache
def resource_of(run: str) -> Resource:
    """Return what all spans of a run belong to."""
    from opentelemetry.sdk.resources import Resource

    return Resource.create({"service.name": "elastic-trainer",
                            "service.version": versions().get("elastic-trainer", ""),
                            "elastic_trainer.run": run})


def readable(span: Span, spans: Spans) -> ReadableSpan:
    """Return a span of OpenTelemetry's SDK."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode

    def context(key: str) -> SpanContext:
        return SpanContext(_number(spans.trace, 16), _number(f"{spans.trace} {key}", 8),
                           is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    facts = {f"elastic_trainer.{name}": value for name, value in span.facts.items()}
    return ReadableSpan(
        span.name, context(span.key), context(span.parent) if span.parent else None,
        resource=resource_of(spans.run), attributes=facts,
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.OK),
        start_time=int(span.start * 1e9), end_time=int(span.end * 1e9))


def _number(text: str, size: int) -> int:
    """Return an id of `size` bytes; 0 is none."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size], "big") or 1


def exporter() -> SpanExporter:
    """Return an exporter as the OTEL_ variables configure it. Raises ConfigError."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(f"--otel needs OpenTelemetry ({error}). Install it: pip install "
                          f"'elastic-trainer[otel]'.") from error
    return OTLPSpanExporter()


def export(run_dir: Path, target: SpanExporter) -> tuple[int, int]:
    """Send the spans of a run as they end, until it is over or Ctrl-C.

    Returns the number of spans that the collector has taken, and of those it has not.
    """
    from opentelemetry.sdk.trace.export import SpanExportResult

    log, spans = Reader(run_dir), Spans()
    waiting: deque[Span] = deque()
    sent = dropped = 0
    give_up_at = None
    try:
        while True:
            for event in log.events():
                waiting.extend(spans.take(event))
            while len(waiting) > MOST_WAITING:
                waiting.popleft()
                dropped += 1
            batch = [readable(span, spans) for span in islice(waiting, BATCH)]
            if batch and target.export(batch) is SpanExportResult.SUCCESS:
                sent += len(batch)
                for _ in batch:
                    waiting.popleft()
                continue
            if spans.is_over:
                give_up_at = give_up_at or time.monotonic() + LAST_TRIES_S
                if not waiting or time.monotonic() > give_up_at:
                    return sent, dropped + len(waiting)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return sent, dropped + len(waiting)
    finally:
        target.shutdown()
