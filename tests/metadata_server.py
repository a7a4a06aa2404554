"""A machine's metadata service on loopback: the real paths, headers, tokens, 404s and time-outs of
EC2's (IMDSv2), Google's and Azure's."""

from __future__ import annotations

import json
import secrets
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


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
                status, text, headers = service.respond(self.path, self.headers)
                self.answer(status, text, headers)

            def answer(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
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

    def respond(self, path: str, headers: Any) -> tuple[int, str, dict[str, str]]:
        """Return status, text and headers of the answer to a GET."""
        if headers.get("X-aws-ec2-metadata-token") not in self.tokens:
            return 401, "", {}
        document = self.documents.get(path.removeprefix("/latest/meta-data/"))
        return 404 if document is None else 200, document or "", {}

    def announce(self, at: str = "2030-01-07T01:03:47Z") -> None:
        """Announce that this machine is taken."""
        self.documents["spot/instance-action"] = json.dumps({"action": "terminate", "time": at})

    def recommend(self) -> None:
        """Recommend to leave."""
        self.documents["events/recommendations/rebalance"] = json.dumps(
            {"noticeTime": "2030-01-07T01:03:47Z"})


class GoogleMetadata(MetadataServer):
    """Google's: `documents` are what lies below computeMetadata/v1. A question waits for a change
    as it asks for."""

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        super().__init__(address)
        self.changed = threading.Condition()
        self.waited = 0
        """The questions that have waited for a change."""
        self.documents |= {
            "instance/preempted": "FALSE", "instance/maintenance-event": "NONE",
            "project/project-id": "mine", "instance/zone": "projects/1/zones/europe-west4-a",
            "instance/service-accounts/default/token": json.dumps(
                {"access_token": "google", "expires_in": 3600, "token_type": "Bearer"})}

    def respond(self, path: str, headers: Any) -> tuple[int, str, dict[str, str]]:
        flavor, parts = {"Metadata-Flavor": "Google"}, urlsplit(path)
        if headers.get("Metadata-Flavor") != "Google":
            return 403, "", {}
        name = parts.path.removeprefix("/computeMetadata/v1/")
        asked = {key: values[0] for key, values in parse_qs(parts.query).items()}
        with self.changed:
            if asked.get("wait_for_change") == "true":
                self.waited += 1
                self.changed.wait_for(lambda: etag(self.documents.get(name)) != asked["last_etag"],
                                      float(asked["timeout_sec"]))
            text = self.documents.get(name)
        if text is None:
            return 404, "", flavor
        return 200, text, flavor | {"ETag": etag(text)}

    def announce(self, at: str = "", name: str = "instance/preempted", text: str = "TRUE") -> None:
        """Announce that this machine is taken; there is no time in it."""
        with self.changed:
            self.documents[name] = text
            self.changed.notify_all()


def etag(text: str | None) -> str:
    return format(abs(hash(text)), "016x")


class AzureMetadata(MetadataServer):
    """Azure's: the scheduled events, this machine's facts and a token of its identity."""

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        super().__init__(address)
        self.about = {"name": "workers_1", "subscriptionId": "sub", "resourceGroupName": "mine",
                      "location": "westeurope"}
        self.events: list[dict[str, Any]] = []
        self.has_identity = True

    def respond(self, path: str, headers: Any) -> tuple[int, str, dict[str, str]]:
        parts = urlsplit(path)
        asked = parse_qs(parts.query)
        if headers.get("Metadata") != "true" or "api-version" not in asked:
            return 400, json.dumps({"error": "Bad request. Required metadata header missing"}), {}
        if parts.path == "/metadata/identity/oauth2/token":
            if not self.has_identity:
                return 400, json.dumps({"error": "invalid_request", "error_description":
                                        "Identity not found"}), {}
            found: Any = {"access_token": "azure", "expires_in": "3599", "token_type": "Bearer",
                          "resource": asked["resource"][0]}
        elif parts.path == "/metadata/instance/compute":
            found = self.about
        elif parts.path == "/metadata/scheduledevents":
            found = {"DocumentIncarnation": len(self.events), "Events": self.events}
        else:
            return 404, "", {}
        return 200, json.dumps(found), {}

    def announce(self, at: str = "", kind: str = "Preempt", resource: str = "",
                 in_s: float = 30.0) -> None:
        """Announce an event of a machine: by default that this one is taken in half a minute."""
        self.events.append({
            "EventId": secrets.token_hex(8), "EventStatus": "Scheduled", "EventType": kind,
            "ResourceType": "VirtualMachine", "Resources": [resource or self.about["name"]],
            "NotBefore": at or formatdate(time.time() + in_s, usegmt=True), "Description": "",
            "EventSource": "Platform", "DurationInSeconds": -1})
