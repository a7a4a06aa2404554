"""A run as OpenTelemetry spans: sent to a real receiver of OTLP over HTTP."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stories import STORY, event, write

from elastic_trainer.__main__ import main
from elastic_trainer.views import spans as spans_module
from elastic_trainer.views.spans import Spans

RUN = [*STORY[:-1], event(13.8, "state.checkpoint_published", step=6, bytes=8, duration_s=0.5,
                          pause_s=0.1, uploaded_bytes=8), STORY[-1],
       event(14.2, "attempt.ended", verdict="failed"), event(15.0, "attempt.started", attempt=2),
       event(16.0, "attempt.ended", verdict="finished", attempt=2)]


class Collector(http.server.ThreadingHTTPServer):
    """A receiver of OTLP over HTTP, which refuses its first `refusals` requests."""

    def __init__(self, refusals: int = 0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.refusals, self.taken = refusals, list[Any]()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        body = self.rfile.read(int(self.headers["Content-Length"]))
        refused, self.server.refusals = self.server.refusals > 0, self.server.refusals - 1
        if not refused and self.path == "/v1/traces":
            self.server.taken += [span for resource in
                                  ExportTraceServiceRequest.FromString(body).resource_spans
                                  for scope in resource.scope_spans for span in scope.spans]
        self.send_response(400 if refused else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setattr(spans_module, "POLL_S", 0.01)
    server = Collector()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()


def test_a_collector_gets_each_attempt_generation_and_checkpoint_once_ended(
        tmp_path: Path, collector: Collector, capsys: pytest.CaptureFixture[str]) -> None:
    """With their parents and their times, also when it refuses at first; and the same ids again."""
    write(tmp_path, RUN)
    collector.refusals = 1
    assert main(["watch", str(tmp_path), "--otel"]) == 0
    assert "6 spans" in capsys.readouterr().out
    found = {(span.name, span.start_time_unix_nano / 1e9): span for span in collector.taken}
    assert {key: span.end_time_unix_nano / 1e9 for key, span in found.items()} == {
        ("generation", 5.0): 9.7, ("generation", 9.7): 12.5, ("checkpoint", 13.3): 13.8,
        ("generation", 12.5): 14.2, ("attempt", 0.0): 14.2, ("attempt", 15.0): 16.0}
    attempt, generation = found["attempt", 0.0], found["generation", 12.5]
    assert not attempt.parent_span_id and generation.parent_span_id == attempt.span_id
    assert found["checkpoint", 13.3].parent_span_id == generation.span_id
    assert len({span.trace_id for span in found.values()}) == 1
    assert len({span.span_id for span in found.values()}) == 6
    assert attempt.status.message == "failed" and not found["attempt", 15.0].status.message
    facts = {it.key: it.value.int_value for it in generation.attributes}
    assert facts["elastic_trainer.workers"] == 2 and facts["elastic_trainer.last_step"] == 5
    first, collector.taken = collector.taken, []
    assert main(["watch", str(tmp_path), "--otel"]) == 0
    assert [span.SerializeToString() for span in collector.taken] == [
        span.SerializeToString() for span in first]


def test_a_collector_that_stays_away_is_named(
        tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with 1, and says how many spans it has not sent."""
    monkeypatch.setattr(spans_module, "LAST_TRIES_S", 0.05)
    write(tmp_path, RUN)
    collector.refusals = 10**6
    assert main(["watch", str(tmp_path), "--otel"]) == 1
    assert "6 spans were not taken" in capsys.readouterr().err


def test_an_attempt_that_was_cut_short_ends_with_an_error() -> None:
    """At its last event, and not when the run is started again two days later: its supervisor was
    killed. What the next supervisor logs before it starts the run is no event of it."""
    later = 2 * 86_400.0
    for name in ("run.started", "attempt.started"):
        spans = Spans()
        found = [span for item in [*STORY[:14], event(later - 5, "run.host_not_reached", host="a"),
                                   event(later, name, attempt=2, options={})]
                 for span in spans.take(item)]
        last = STORY[13]["time"]
        assert [(span.name, span.end, bool(span.error)) for span in found] == [
            ("generation", last, False), ("attempt", last, True)]


@pytest.mark.parametrize("name", ["run.given_up", "run.stopped"])
def test_the_export_ends_with_the_run_when_its_last_attempt_failed(
        name: str, tmp_path: Path, collector: Collector) -> None:
    """A failed attempt alone is no end: another may follow."""
    failed = [*RUN[:-1], event(16.0, "attempt.ended", verdict="failed", attempt=2)]
    spans = Spans()
    for item in failed:
        list(spans.take(item))
    assert not spans.is_over
    write(tmp_path, [*failed, event(17.0, name, attempt=2)])
    assert main(["watch", str(tmp_path), "--otel"]) == 0
