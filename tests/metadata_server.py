"""A machine's metadata service on loopback: the real paths, tokens, 404s and time-outs of
IMDSv2."""

from __future__ import annotations

import json
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class MetadataServer:
    """One machine's service; `documents` are what lies below latest/meta-data."""

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.documents: dict[str, str] = {}
        self.tokens: set[str] = set()
        self.is_hung = threading.Event()
        self.broken_status = 0
        self.odd_token = b""
        """What a captive portal answers instead of a token."""
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
                if self.path != "/latest/api/token" or not ttl.isdecimal(
                ) or not 1 <= int(ttl) <= 21600:
                    return self.answer(400, "")
                if service.odd_token:
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(service.odd_token)
                    return
                service.tokens.add(token := secrets.token_hex(16))
                self.answer(200, token)

            def do_GET(self) -> None:
                if service.is_hung.is_set():
                    service.released.wait(30)
                    return
                if service.broken_status:
                    return self.answer(service.broken_status, "")
                if self.headers.get("X-aws-ec2-metadata-token") not in service.tokens:
                    return self.answer(401, "")
                document = service.documents.get(self.path.removeprefix("/latest/meta-data/"))
                self.answer(404 if document is None else 200, document or "")

            def answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.released = threading.Event()
        self.server = ThreadingHTTPServer(address, Handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://{address[0]}:{self.server.server_address[1]}"

    def __enter__(self) -> MetadataServer:
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()

    def announce(self, at: str = "2030-01-07T01:03:47Z") -> None:
        """Announce that this machine is taken."""
        self.documents["spot/instance-action"] = json.dumps({"action": "terminate", "time": at})

    def recommend(self) -> None:
        """Recommend to leave."""
        self.documents["events/recommendations/rebalance"] = json.dumps(
            {"noticeTime": "2030-01-07T01:03:47Z"})
