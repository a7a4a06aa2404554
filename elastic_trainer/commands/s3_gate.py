"""Run ministack behind a gate that accepts only requests signed by the run, for its bucket.

    MINISTACK'S_PYTHON -I s3_gate.py DESCRIPTOR BUCKET      credentials in AWS's standard variables

local_s3 → here → ministack

What always holds:
1. A request without a valid signature (SigV4, in its headers, at most 15 minutes old) is refused
   before ministack sees it, and before its body is read. So is a signed request for anything but
   the bucket.
2. No answer has a CORS header: a web page can neither read here, nor ask whether it may write.
3. The parent process passes the listening socket, so no other process can take the port first.

Why: ministack emulates dozens of services, some of which run code. Without AUTH=true it accepts
every credential. With AUTH=true it still answers unsigned requests for /_ministack/ (which deletes
everything) and preflights (ministack 1.5.33, app.py:898 and 1054).

What it does not do: compare a body with the signed hash. Only root can change a body on the
loopback interface.

It runs in ministack's virtual environment, and imports nothing of ours.
"""

from __future__ import annotations

import asyncio
import datetime
import hmac
import os
import re
import resource
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

ALGORITHM = "AWS4-HMAC-SHA256"
SKEW = datetime.timedelta(minutes=15)
"""As S3 has it."""
AUTHORIZATION = re.compile(
    rf"{ALGORITHM} Credential=([^/,]+)/(\d{{8}})/([a-z0-9-]+)/s3/aws4_request, ?"
    r"SignedHeaders=([a-z0-9;-]+), ?Signature=([0-9a-f]{64})")
MUST_BE_SIGNED = {"host", "x-amz-date", "x-amz-content-sha256"}
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Gate:
    """An ASGI application before another one."""

    def __init__(self, app: App, bucket: str, key: str, secret: str):
        self.app, self.bucket, self.key, self.secret = app, bucket, key, secret

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Hand a request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif refusal := self.refusal(scope, datetime.datetime.now(datetime.timezone.utc)):
            await _refuse(refusal, send)
        else:
            await self.app(scope, receive, _without_cors(send))

    def refusal(self, scope: Message, now: datetime.datetime) -> str:
        """Return S3's name for what is wrong with a request; "" if nothing is."""
        path = scope["raw_path"].decode("latin-1")
        if path.split("/")[:2] != ["", self.bucket]:
            return "AccessDenied"
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            name, value = name.decode("latin-1").lower(), value.decode("latin-1")
            headers[name] = f"{headers[name]},{value}" if name in headers else value
        found = AUTHORIZATION.fullmatch(headers.get("authorization", ""))
        if not found:
            return "AccessDenied"
        key, day, region, signed, signature = found.groups()
        names, at = signed.split(";"), headers.get("x-amz-date", "")
        if not MUST_BE_SIGNED <= set(names) or not at.startswith(day):
            return "AccessDenied"
        if not hmac.compare_digest(key.encode(), self.key.encode()):
            return "InvalidAccessKeyId"
        url = f"http://{headers.get('host', '')}{path}?{scope['query_string'].decode('latin-1')}"
        of_them = {name: headers.get(name, "") for name in names}
        expected = _signature(scope["method"], url, of_them, region, key, self.secret)
        if not hmac.compare_digest(expected, signature):
            return "SignatureDoesNotMatch"
        return "" if _is_recent(at, now) else "RequestTimeTooSkewed"


def _signature(method: str, url: str, headers: Mapping[str, str], region: str, key: str,
               secret: str) -> str:
    """Return the signature that a request with these headers, all of them signed, must have."""
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    request = AWSRequest(method, url, headers=dict(headers))
    request.context["timestamp"] = headers["x-amz-date"]
    signer = S3SigV4Auth(Credentials(key, secret), "s3", region)
    to_sign = signer.string_to_sign(request, signer.canonical_request(request))
    return str(signer.signature(to_sign, request))


def _is_recent(at: str, now: datetime.datetime) -> bool:
    try:
        then = datetime.datetime.strptime(at, "%Y%m%dT%H%M%S%z")  # Z is +00:00
    except ValueError:
        return False
    return abs(now - then) <= SKEW


async def _refuse(code: str, send: Send) -> None:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()
    headers = [(b"content-type", b"application/xml"), (b"content-length", b"%d" % len(body)),
               (b"connection", b"close")]  # what is left of the request's body is not waited for
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _without_cors(send: Send) -> Send:
    async def send_on(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(name, value) for name, value in message["headers"]
                       if not bytes(name).lower().startswith(b"access-control-")]
            message = message | {"headers": headers}
        await send(message)

    return send_on


def _allow_connections() -> None:
    """Raise this process's limit of descriptors: workers keep connections open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    """Serve until SIGTERM."""
    from hypercorn.asyncio import serve
    from hypercorn.config import Config
    from ministack.app import app

    descriptor, bucket = sys.argv[1:]
    config = Config()
    config.bind = [f"fd://{descriptor}"]
    config.backlog = 1024
    config.loglevel = "WARNING"
    config.keep_alive_timeout = 75  # longer than botocore keeps a connection that it does not use
    _allow_connections()
    gate = Gate(app, bucket, os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
    asyncio.run(serve(gate, config))


if __name__ == "__main__":
    main()
