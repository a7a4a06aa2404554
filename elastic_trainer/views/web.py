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
   extend neither. At most MOST_READERS connections send a request at once, and as many wait for an
   answer or read it. One more takes the place of the oldest one of the address with the most, so
   slow connections of others keep no reader out. Who lacks the token takes no such place.

aiohttp parses the requests and writes the answers. It has no deadline for a request and no limit of
connections, so those are here (class Places).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import socket
from collections import Counter
from collections.abc import Mapping, Sequence

from aiohttp import web

from elastic_trainer.config import ConfigError
from elastic_trainer.views.live import Live, Overview
from elastic_trainer.views.page import followed
from elastic_trainer.wire.plain import plain

DEFAULT_BIND = "127.0.0.1:8765"
TOKEN_VARIABLE = "ELASTIC_TRAINER_WATCH_TOKEN"
MOST_READERS, REQUEST_S, ANSWER_S = 32, 10.0, 15.0
ACCEPTED_AT_ONCE, BACKLOG = 4, 128
"""A turn of asyncio's loop accepts so few connections that their requests, which have arrived, are
read before MOST_READERS further ones are accepted."""
MOST_FIELD_BYTES = 1 << 16
"""A browser sends the cookies of all pages on this machine."""
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
    "Server": "elastic-trainer",
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


class Places:
    """The places of connections that send a request, or of those that get an answer."""

    def __init__(self) -> None:
        self._held: dict[asyncio.Transport, str] = {}
        """The address of each, the oldest first."""
        self._ends: dict[asyncio.Transport, asyncio.TimerHandle] = {}

    def take(self, transport: asyncio.Transport) -> None:
        """Give a connection a place, that of another one if need be."""
        if len(self._held) >= MOST_READERS:
            ((most, _),) = Counter(self._held.values()).most_common(1)
            oldest = next(it for it, address in self._held.items() if address == most)
            self.leave(oldest)
            oldest.abort()
        self._held[transport] = (transport.get_extra_info("peername") or [""])[0]

    def limit(self, transport: asyncio.Transport, seconds: float) -> None:
        """Close a connection that still has its place after some time."""
        if transport in self._held:
            self._ends[transport] = asyncio.get_running_loop().call_later(seconds, transport.abort)

    def leave(self, transport: asyncio.Transport) -> None:
        self._held.pop(transport, None)
        if end := self._ends.pop(transport, None):
            end.cancel()


class Connections(web.Server):
    """aiohttp's server, with places for its connections."""

    def __init__(self, server: Server):
        self.asking, self.answered = Places(), Places()
        self._page = server
        super().__init__(self._answer, access_log=None, max_field_size=MOST_FIELD_BYTES,
                         lingering_time=0.0)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.asking.take(transport)
        self.asking.limit(transport, self._page.request_s)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None
                        ) -> None:
        if transport := handler.transport:
            self.asking.leave(transport)
            self.answered.leave(transport)
        super().connection_lost(handler, exc)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        """Refuse a request at once, or answer it in a thread: a page may take seconds."""
        transport = request.transport
        if transport is None:
            raise ConnectionResetError
        self.asking.leave(transport)
        if refusal := self._page.refusal(request):
            return refusal
        self.answered.take(transport)
        found = await asyncio.to_thread(self._page.page, request)
        self.answered.limit(transport, ANSWER_S)
        return found


class Server:
    """Serves runs: one at `/`, or several at `/run/NAME/` and their table at `/`."""

    def __init__(self, runs: Sequence[Live], bind: str, token: str = "", *,
                 request_s: float = REQUEST_S):
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
        self.request_s = request_s
        self.stops = asyncio.Event()
        """Set in the thread of `serve`: answer no more."""
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(f"--bind {bind} cannot be used: {error.strerror}. Give an address of "
                              f"this machine and a free port.") from error
        self.server_port: int = self._listener.getsockname()[1]
        self.place = f"[{host}]" if ":" in host else host
        self.url = f"http://{self.place}:{self.server_port}/"

    async def serve(self) -> None:
        """Answer until `stops`."""
        connections = Connections(self)
        server = await asyncio.get_running_loop().create_server(
            connections, sock=self._listener, backlog=ACCEPTED_AT_ONCE)
        self._listener.listen(BACKLOG)  # asyncio has taken ACCEPTED_AT_ONCE for both
        try:
            await self.stops.wait()
        finally:
            server.close()
            await connections.shutdown(0.0)

    def refusal(self, request: web.BaseRequest) -> web.Response | None:
        """Return the answer to a reader who may not read; None: the reader may."""
        if request.method not in ("GET", "HEAD"):
            return answer(501, "text/plain", "This server only shows.\n")
        if not (self.token or is_own_name(request.headers.get("host", ""))):
            return answer(403, "text/plain", "This is not the name of this server.\n")
        if self.token and not self._is_known(request):
            return answer(403, "text/plain", "The token is missing: open the address that "
                                             "elastic-trainer watch has printed.\n")
        return None

    def _is_known(self, request: web.BaseRequest) -> bool:
        """True if the reader has the token, in any of three places: the others may be stale."""
        given = (request.query.get("token", ""), request.cookies.get(self.cookie, ""),
                 request.headers.get("authorization", "").removeprefix("Bearer "))
        token = self.token.encode()
        return any(hmac.compare_digest(it.encode(errors="replace"), token) for it in given)

    def page(self, request: web.BaseRequest) -> web.Response:
        """Return what is asked for, or why there is none."""
        if self.token and request.path == "/" and "token" in request.query:
            return answer(303, "text/plain", "", {"Location": "/", "Set-Cookie": (
                f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/")})
        try:
            return answer(*self._found(request.path, request.query))
        except OSError as error:
            return answer(503, "text/plain", f"{plain(str(error.filename))} cannot be read: "
                                             f"{error.strerror}.\n")

    def _found(self, path: str, query: Mapping[str, str]) -> tuple[int, str, str]:
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
            newer = query.get("newer", "0")
            than = int(newer) if newer.isdecimal() and len(newer) < 16 else 0
            return 200, "application/json", json.dumps(
                {"server": self.identity, **shown.newer(than)})
        return 404, "text/plain", "There is no such page.\n"


def answer(code: int, kind: str, text: str, more: Mapping[str, str] | None = None) -> web.Response:
    """Return an answer, after which the connection ends."""
    found = web.Response(status=code, body=text.encode(), headers={
        **HEADERS, "Content-Type": f"{kind}; charset=utf-8", **(more or {})})
    found.force_close()
    return found


def serve(runs: Sequence[Live], bind: str) -> None:
    """Serve the pages of runs until Ctrl-C. Raises ConfigError."""
    server = Server(runs, bind, os.environ.get(TOKEN_VARIABLE, "").strip())
    more = f"?token={server.token}" if server.token else ""
    print(f"The page of {plain(server.pages['/'].title)}: {server.url}{more}   (Ctrl-C ends it)",
          flush=True)
    try:
        asyncio.run(server.serve())
    except KeyboardInterrupt:
        print()
