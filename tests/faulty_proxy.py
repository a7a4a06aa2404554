"""A proxy between us and an S3 server that does what networks and servers do: resets, 503, lost
answers, wrong bytes.

    with FaultyProxy(endpoint) as proxy:
        proxy.fault("lose_answer", method="PUT", contains="/log/", times=2)

Requests pass through unchanged (the Host header is signed). `on_request` sees each one before it is
forwarded and may hold it, drop it or kill a worker first.
"""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import s3_servers

if TYPE_CHECKING:
    import pytest

STATUS = {"slow_down": (503, "SlowDown"), "internal": (500, "InternalError"),
          "forbidden": (403, "AccessDenied"), "no_bucket": (404, "NoSuchBucket"),
          "skewed": (403, "RequestTimeTooSkewed"), "request_limit": (503, "RequestLimitExceeded"),
          "throttling": (400, "Throttling")}
WRAPPED = {"request_limit": "<Response><Errors>{}</Errors></Response>",
           "throttling": "<ErrorResponse>{}</ErrorResponse>"}
"""How EC2 and Auto Scaling wrap an error; S3 does not."""
KINDS = ("reset", "timeout", "truncate", "corrupt", "lose_answer", "slow", "rubbish",
         "unconditional", "drop", "empty", "torn_xml", "bare_404", "page_404", *STATUS)


@dataclass
class Fault:
    """What happens to the next `times` requests that match."""

    kind: str
    method: str
    contains: str
    times: int
    fired: int = 0


@contextmanager
def proxied(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy before an S3 server, to which AWS's variables point."""
    with FaultyProxy(endpoint) as proxy:
        for name, value in s3_servers.environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        yield proxy


class FaultyProxy:
    """A proxy on a port of its own; use as a context manager."""

    def __init__(self, endpoint: str, bind: str = "127.0.0.1"):
        self.upstream = urlsplit(endpoint).netloc
        self.faults: list[Fault] = []
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.on_request: Callable[[str, str], str | None] = lambda method, path: None
        """Returns a fault's kind for this request, or None."""
        self.on_answer: Callable[[bytes], bytes] = lambda data: data
        """Returns what the server is to have said."""
        self.released = threading.Event()
        """Ends all time-outs that are being played."""
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def _any(self) -> None:
                proxy.handle(self)

            # The names of http.server.
            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, *_: Any) -> None:
                pass  # clients of ours are killed in the middle of a request

        self.server = Server((bind, 0), Handler)
        self.endpoint = f"http://{bind}:{self.server.server_address[1]}"

    def __enter__(self) -> FaultyProxy:
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()

    def fault(self, kind: str, *, method: str = "", contains: str = "", times: int = 1) -> Fault:
        """Play a fault; returns it, so that a test can assert that it fired."""
        assert kind in KINDS, kind
        with self._lock:
            self.faults.append(Fault(kind, method, contains, times))
            return self.faults[-1]

    def clear(self) -> None:
        """Be a faithful proxy again."""
        with self._lock:
            self.faults.clear()

    def _due(self, method: str, path: str) -> str | None:
        with self._lock:
            for fault in self.faults:
                if fault.fired < fault.times and fault.method in (
                        "", method) and fault.contains in path:
                    fault.fired += 1
                    return fault.kind
        return None

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        """Forward one request, or do to it what is planned."""
        method, path = request.command, request.path
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("expect",
                                                                                 "connection")}
        self.seen.append((method, path, headers))
        kind = self._due(method, path)
        length = int(request.headers.get("Content-Length") or 0)
        if kind == "reset":
            request.rfile.read(length // 2)
            return self._reset(request)
        body = request.rfile.read(length)
        if len(body) < length:
            return None  # its sender is dead
        kind = self.on_request(method, path) or kind
        if kind in ("drop", "reset"):
            return self._reset(request)
        if kind == "timeout":
            self.released.wait(60)
            return self._reset(request)
        if kind == "slow":
            self.released.wait(0.7)
        if kind in ("bare_404", "page_404"):  # as balancers say it whose server is briefly away
            return self._answer(request, 404, [], b"<html><body>Not Found</body></html>"
                                if kind == "page_404" else b"")
        if kind in STATUS:
            status, code = STATUS[kind]
            answer = f"<Error><Code>{code}</Code><Message>as planned</Message></Error>"
            answer = "<?xml version='1.0'?>" + WRAPPED.get(kind, "{}").format(answer)
            return self._answer(request, status, [("Content-Type", "application/xml")],
                                answer.encode())
        if kind == "unconditional":
            headers = {k: v for k, v in headers.items() if k.lower() != "if-none-match"}
            path = path.replace("ifGenerationMatch=0", "")  # Google's
        upstream = http.client.HTTPConnection(self.upstream, timeout=300)
        try:
            upstream.request(method, path, body=body if length else None, headers=headers)
            answered = upstream.getresponse()
            data = answered.read()
        except (OSError, http.client.HTTPException):
            return self._reset(request)
        finally:
            upstream.close()
        if kind == "lose_answer":
            return self._reset(request)
        if kind == "empty":  # EC2's answers: a list of no items
            data = re.sub(rb"(?s)<(\w+Set)>.*</\1>", rb"<\1/>", data)
        data = self.on_answer(data)
        if kind == "torn_xml":
            return self._answer(request, 200, [("Content-Type", "text/xml")], data[:len(data) // 2])
        if kind == "rubbish":
            return self._answer(request, 200, [], b"<html>a captive portal</html>")
        if kind == "corrupt" and data:
            data = bytes([data[0] ^ 1]) + data[1:]
        passed = [(k, v) for k, v in answered.getheaders()
                  if not re.fullmatch("(?i)content-length|transfer-encoding|connection|keep-alive",
                                      k)]
        if method == "HEAD":
            passed.append(("Content-Length", answered.getheader("Content-Length") or "0"))
        self._answer(request, answered.status, passed, data, cut=kind == "truncate",
                     bodiless=method == "HEAD")

    def _answer(self, request: BaseHTTPRequestHandler, status: int,
                headers: list[tuple[str, str]], data: bytes, *, cut: bool = False,
                bodiless: bool = False) -> None:
        request.send_response_only(status)
        for name, value in headers:
            request.send_header(name, value)
        if not bodiless:
            request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data[: len(data) // 2] if cut else data)
        request.close_connection = cut

    def _reset(self, request: BaseHTTPRequestHandler) -> None:
        """Close with a RST, as a host that is gone does."""
        request.close_connection = True
        request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.connection.close()
