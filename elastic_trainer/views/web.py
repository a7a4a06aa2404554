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
6. A connection has REQUEST_S for its whole request, and ANSWER_S to read the answer. Single bytes
   extend neither. At most MOST_READERS connections send a request at once, and as many read an
   answer. One more takes the place of the oldest one of the address with the most (wire/gate.py),
   so slow connections of others keep no reader out. Who lacks the token takes no such place.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from urllib.parse import parse_qs, unquote, urlsplit

from elastic_trainer.config import ConfigError
from elastic_trainer.views.live import Live
from elastic_trainer.views.overview import Overview
from elastic_trainer.views.page import followed
from elastic_trainer.wire.gate import Gate, OpenConnections, Request, head
from elastic_trainer.wire.plain import plain

DEFAULT_BIND = "127.0.0.1:8765"
TOKEN_VARIABLE = "ELASTIC_TRAINER_WATCH_TOKEN"
MOST_READERS, REQUEST_S, ANSWER_S = 32, 10.0, 15.0
MOST_HEAD_BYTES = 1 << 16
"""A browser sends the cookies of all pages on this machine."""
COOKIE = "elastic_trainer_token"
EMPTY_LINE = b"\r\n\r\n"
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
    return followed(shown.title, shown.sections, server=server, script=SCRIPT,
                    is_one_of_several=is_one_of_several)


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


class Server:
    """Serves runs: one at `/`, or several at `/run/NAME/` and their table at `/`."""

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
        self._answered, self._lock = OpenConnections(), threading.Lock()
        try:
            self.gate = Gate(host, port, self._begin, lambda *_: None, request_s=REQUEST_S,
                             most=lambda: MOST_READERS, most_head=MOST_HEAD_BYTES)
        except OSError as error:
            raise ConfigError(f"--bind {bind} cannot be used: {error.strerror}. Give an address of "
                              f"this machine and a free port.") from error
        self.server_port = self.gate.address[1]
        self.place = f"[{host}]" if ":" in host else host
        self.url = f"http://{self.place}:{self.server_port}/"

    def serve_forever(self) -> None:
        """Answer until `shutdown`."""
        self.gate.serve_forever()

    def shutdown(self) -> None:
        """Answer no more."""
        self.gate.shutdown()

    def server_close(self) -> None:
        """Close the sockets. Call `shutdown` first."""
        self.gate.close()

    def _begin(self, connection: socket.socket, address: str, request: Request, _: bytes) -> None:
        """Refuse a request at once, or answer it in a thread: a page may take seconds."""
        if refusal := self._refusal(request):
            with suppress(OSError):  # it fits into the socket's buffer, or the reader is none
                connection.setblocking(False)
                connection.send(refusal)
            return connection.close()
        with self._lock:
            if self._answered.size >= MOST_READERS:
                oldest = self._answered.oldest_of_most()
                self._answered.remove(*oldest)
                with suppress(OSError):
                    oldest[1].shutdown(socket.SHUT_RDWR)  # its thread ends
            self._answered.add(address, connection)
        threading.Thread(target=self._answer, args=(connection, address, request),
                         daemon=True).start()

    def _refusal(self, request: Request) -> bytes:
        """Return the answer to a reader who may not read; empty: the reader may."""
        if request.method not in ("GET", "HEAD"):
            return answer(501, "text/plain", "This server only shows.\n")
        if not (self.token or is_own_name(request.headers.get("host", ""))):
            return answer(403, "text/plain", "This is not the name of this server.\n")
        if self.token and not self._is_known(request):
            return answer(403, "text/plain", "The token is missing: open the address that "
                                             "elastic-trainer watch has printed.\n")
        return b""

    def _is_known(self, request: Request) -> bool:
        """True if the reader has the token, in any of three places: the others may be stale."""
        given = ((parse_qs(urlsplit(request.path).query).get("token") or [""])[0],
                 cookies_in(request.headers.get("cookie", "")).get(self.cookie, ""),
                 request.headers.get("authorization", "").removeprefix("Bearer "))
        token = self.token.encode()
        return any(hmac.compare_digest(it.encode(errors="replace"), token) for it in given)

    def _answer(self, connection: socket.socket, address: str, request: Request) -> None:
        try:
            connection.settimeout(ANSWER_S)  # for all bytes together (socket.sendall)
            sent = self.page(request)
            connection.sendall(sent if request.method == "GET" else sent.partition(EMPTY_LINE)[0]
                               + EMPTY_LINE)
        except OSError:
            pass  # the reader has gone
        finally:
            with self._lock:
                self._answered.remove(address, connection)
            connection.close()

    def page(self, request: Request) -> bytes:
        """Return what is asked for, or why there is none."""
        asked = urlsplit(request.path)
        path, query = unquote(asked.path), parse_qs(asked.query)
        if self.token and path == "/" and "token" in query:
            return answer(303, "text/plain", "", {"Location": "/", "Set-Cookie": (
                f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/")})
        try:
            return answer(*self._found(path, query))
        except OSError as error:
            return answer(503, "text/plain", f"{plain(str(error.filename))} cannot be read: "
                                             f"{error.strerror}.\n")

    def _found(self, path: str, query: dict[str, list[str]]) -> tuple[int, str, str]:
        """Return code, type and text of what is asked for. Raises OSError if a log cannot be read.
        """
        if path == "/metrics":
            return 200, "text/plain; version=0.0.4", self.overview.metrics()
        place, _, name = path.rpartition("/")
        shown = self.pages.get(f"{place}/")
        if shown and not name:
            return 200, "text/html", shell(
                shown, server=self.identity,
                is_one_of_several=path != "/" and len(self.overview.runs) > 1)
        if shown and name == "sections":
            newer = (query.get("newer") or ["0"])[0]
            than = int(newer) if newer.isdecimal() and len(newer) < 16 else 0
            return 200, "application/json", json.dumps(
                {"server": self.identity, **shown.newer(than)})
        return 404, "text/plain", "There is no such page.\n"


def answer(code: int, kind: str, text: str, more: Mapping[str, str] | None = None) -> bytes:
    """Return a whole answer."""
    body = text.encode()
    headers = {**HEADERS, "Content-Type": f"{kind}; charset=utf-8", "Connection": "close",
               **(more or {})}
    lines = (f"{name}: {value}" for name, value in headers.items())
    return head(code, HTTPStatus(code).phrase, len(body), *lines) + body


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
