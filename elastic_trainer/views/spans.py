"""A run as OpenTelemetry spans: its attempts, generations and checkpoints, sent as they end.

    elastic-trainer watch runs/NAME --otel

event log → run (the fold) → here → an OTLP/HTTP exporter → a collector

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
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_trainer.config import ConfigError
from elastic_trainer.events.run import BEGINS, Attempt, Generation, Run, ends_run
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


class Spans:
    """The spans of a run: `take` yields those that an event ends."""

    def __init__(self) -> None:
        self.run = Run()
        self.trace = ""
        """What identifies the log."""
        self.is_over = False
        self._attempts = self._generations = self._checkpoints = 0
        """How many were yielded."""

    def take(self, event: Event) -> Iterator[Span]:
        run = self.run
        run.read(event)
        self.trace = self.trace or f"{run.name} {event['time']}"
        self.is_over = ends_run(event) or self.is_over and event["event"] not in BEGINS
        for it in islice(run.checkpoints, self._checkpoints, None):
            parent = key_of(run.generation or run.open_attempt)
            self._checkpoints += 1
            facts = {name: getattr(it, name) for name in ("step", "bytes", "uploaded_bytes",
                                                          "pause_s")}
            yield Span("checkpoint", f"{parent} checkpoint {it.step} {it.time}", parent,
                       it.time - it.duration_s, it.time, facts)
        for number, one in enumerate(islice(run.generations, self._generations, None),
                                     self._generations + 1):
            if one.end is None:
                break
            self._generations = number
            yield self._generation(one, number)
        for life in islice(run.attempts, self._attempts, None):
            if life.end is None:
                break
            self._attempts += 1
            verdict = life.verdict or "it ended without an event"
            facts = {"attempt": life.number, **({"verdict": verdict} if life.verdict else {})}
            yield Span("attempt", key_of(life), "", life.start, life.end, facts,
                       "" if verdict in ("finished", "interrupted") else verdict)

    def _generation(self, one: Generation, following: int) -> Span:
        steps, later = self.run.steps, self.run.generations[following:]
        last = later[0].first if later else len(steps)
        facts = {"generation": one.number, "workers": one.size, "first_step": one.step,
                 "source": one.source}
        if last > one.first:
            facts["last_step"] = steps.numbers[last - 1]
        assert one.end is not None
        return Span("generation", key_of(one), key_of(one.attempt), one.start, one.end, facts)


def key_of(life: Attempt | Generation | None) -> str:
    """Return what identifies an attempt or a generation in its run; "" for none."""
    if isinstance(life, Generation):
        return f"{key_of(life.attempt)} generation {life.number}"
    return f"attempt {life.start}" if life else ""


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
        resource=resource_of(spans.run.name), attributes=facts,
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
