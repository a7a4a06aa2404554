"""`elastic-trainer watch RUN --web`: the story of a run as a page that follows it.

    elastic-trainer watch runs/NAME --web --bind 127.0.0.1:8765

event log → live → here → a browser; Prometheus, at /metrics

What always holds:
1. It only reads. It answers GET and HEAD, and each path that it does not know with 404.
2. On a loopback address every user of the machine may read. On another address a reader needs the
   token. It is in the address that the command prints, and then in a cookie.
3. A page of another site reads nothing: the name in the header Host must be one of this machine
   (DNS rebinding), the cookie is SameSite=Strict, and nothing answers with CORS.
4. The page loads nothing from elsewhere, which its Content-Security-Policy enforces.
5. A page of a server that was started again loads itself anew: versions are those of one server.
6. At most MOST_READERS connections are served at once, and a silent one ends after SILENT_S.

It is Python's http.server: a page for a few people, that needs no package.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import socket
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree.ElementTree import SubElement

from elastic_trainer.config import ConfigError
from elastic_trainer.observe.live import Live
from elastic_trainer.observe.overview import Overview
from elastic_trainer.observe.page import empty, html_of
from elastic_trainer.wire.plain import plain

DEFAULT_BIND = "127.0.0.1:8765"
TOKEN_VARIABLE = "ELASTIC_TRAINER_WATCH_TOKEN"
MOST_READERS, SILENT_S = 32, 15.0
COOKIE = "elastic_trainer_token"
SCRIPT = """
"use strict";
let version = 0;
const state = document.getElementById("state");
function show(name, html) {
  const section = document.getElementById(name);
  const before = [...section.querySelectorAll("figure, .scroll")].map(
    it => [it.scrollLeft, it.scrollTop]);
  section.innerHTML = html;
  section.querySelectorAll("figure, .scroll").forEach((it, at) => {
    if (before[at]) [it.scrollLeft, it.scrollTop] = before[at];
  });
}
async function follow() {
  let told = "elastic-trainer watch has ended: this is the last state that it told";
  try {
    const answer = await fetch("sections?newer=" + version, {cache: "no-store"});
    version = 0;
    if (answer.ok) {
      const news = await answer.json();
      if (news.server !== document.body.dataset.server) return location.reload();
      for (const [name, html] of Object.entries(news.sections)) show(name, html);
      version = news.version;
      told = "follows the run";
    } else {
      told = await answer.text();
    }
  } catch (error) {
    version = 0;
  }
  state.textContent = told;
  setTimeout(follow, document.hidden ? 5000 : 800);
}
follow();
"""
_DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src "
                               f"'sha256-{_DIGEST}'; connect-src 'self'; base-uri 'none'; "
                               f"form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def shell(shown: Live | Overview, *, server: str, is_one_of_several: bool) -> str:
    """Return a page without its content, which follows."""
    root, body = empty(plain(shown.title))
    body.set("data-server", server)
    if is_one_of_several:
        SubElement(SubElement(body, "p"), "a", {"href": "../../"}).text = "all runs"
    SubElement(body, "h1").text = plain(shown.title)
    SubElement(body, "p", {"id": "state", "class": "dim", "role": "status"}).text = "is read"
    for name in shown.sections:
        SubElement(body, "div", {"id": name})
    SubElement(body, "script").text = SCRIPT
    return html_of(root)


def address_of(bind: str) -> tuple[str, int]:
    """Return host and port of --bind. Raises ConfigError."""
    host, _, port = bind.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_address(host)
        if not 0 <= int(port) < 2**16:
            raise ValueError
    except ValueError as error:
        raise ConfigError(f"--bind is {bind!r}. Give an address of this machine and a port, e.g. "
                          f"{DEFAULT_BIND}, or [::1]:8765.") from error
    return host, int(port)


def is_own_name(host: str) -> bool:
    """True if the header Host, with or without a port, can only mean this machine."""
    name = re.sub(r":\d*$", "", host).lower()
    try:
        return name == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def cookies_in(header: str) -> dict[str, str]:
    """Return the cookies of the header Cookie. Those of other pages on this machine, whatever their
    form, do no harm."""
    return {name: value for name, _, value in
            (part.strip().partition("=") for part in header.split(";"))}


class Server(ThreadingHTTPServer):
    """Serves runs: one at `/`, or several at `/run/NAME/` and their table at `/`."""

    daemon_threads = True
    request_queue_size = MOST_READERS

    def __init__(self, runs: Sequence[Live], bind: str, token: str = ""):
        host, port = address_of(bind)
        self.overview = Overview(runs)
        self.pages: dict[str, Live | Overview] = {
            "/": runs[0] if len(runs) == 1 else self.overview,
            **{f"/run/{live.name}/": live for live in runs}}
        self.is_local = ipaddress.ip_address(host).is_loopback
        self.token = "" if self.is_local else token or secrets.token_urlsafe(24)
        self.cookie = f"{COOKIE}_{hashlib.sha256(self.token.encode()).hexdigest()[:8]}"
        """Browsers do not separate cookies by port: another server's has another name."""
        self.identity = secrets.token_hex(8)
        self.seats = threading.BoundedSemaphore(MOST_READERS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            raise ConfigError(f"--bind {bind} cannot be used: {error.strerror}. Give an address of "
                              f"this machine and a free port.") from error
        self.place = f"[{host}]" if ":" in host else host
        self.url = f"http://{self.place}:{self.server_port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.seats.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.seats.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a reader that has gone."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    timeout = SILENT_S
    server_version, sys_version = "elastic-trainer", ""

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        path, query = unquote(asked.path), parse_qs(asked.query)
        if not (self.server.token or is_own_name(self.headers.get("Host", ""))):
            return self._answer(403, "text/plain", "This is not the name of this server.\n")
        if self.server.token and not self._is_known(query):
            return self._answer(403, "text/plain", "The token is missing: open the address that "
                                                   "elastic-trainer watch has printed.\n")
        if path == "/" and "token" in query:
            return self._answer(303, "text/plain", "", {"Location": "/", "Set-Cookie": (
                f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/")})
        try:
            code, kind, text = self._found(path, query)
        except OSError as error:
            code, kind, text = 503, "text/plain", (
                f"{plain(str(error.filename))} cannot be read: {error.strerror}.\n")
        self._answer(code, kind, text)

    do_HEAD = do_GET

    def _found(self, path: str, query: dict[str, list[str]]) -> tuple[int, str, str]:
        """Return code, type and text of what is asked for. Raises OSError if a log cannot be read.
        """
        if path == "/metrics":
            return 200, "text/plain; version=0.0.4", self.server.overview.metrics()
        place, _, name = path.rpartition("/")
        shown = self.server.pages.get(f"{place}/")
        if shown and not name:
            return 200, "text/html", shell(
                shown, server=self.server.identity,
                is_one_of_several=path != "/" and len(self.server.overview.runs) > 1)
        if shown and name == "sections":
            newer = (query.get("newer") or ["0"])[0]
            than = int(newer) if newer.isdecimal() and len(newer) < 16 else 0
            return 200, "application/json", json.dumps(
                {"server": self.server.identity, **shown.newer(than)})
        return 404, "text/plain", "There is no such page.\n"

    def _is_known(self, query: dict[str, list[str]]) -> bool:
        """True if the reader has the token, in any of three places: the others may be stale."""
        given = ((query.get("token") or [""])[0],
                 cookies_in(self.headers.get("Cookie", "")).get(self.server.cookie, ""),
                 self.headers.get("Authorization", "").removeprefix("Bearer "))
        token = self.server.token.encode()
        return any(hmac.compare_digest(it.encode(errors="replace"), token) for it in given)

    def _answer(self, code: int, kind: str, text: str, more: dict[str, str] | None = None) -> None:
        body = text.encode()
        self.send_response(code)
        for name, value in {**HEADERS, "Content-Type": f"{kind}; charset=utf-8",
                            "Content-Length": str(len(body)), **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a line would have the token."""


def serve(runs: Sequence[Live], bind: str) -> None:
    """Serve the pages of runs until Ctrl-C. Raises ConfigError."""
    server = Server(runs, bind, os.environ.get(TOKEN_VARIABLE, ""))
    more = f"?token={server.token}" if server.token else ""
    print(f"The page of {plain(server.pages['/'].title)}: {server.url}{more}   (Ctrl-C ends it)",
          flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
