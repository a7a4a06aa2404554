"""A cloud's HTTP API with a machine's own token, for Google Cloud and Azure.

gcp, azure → here → the cloud's API, its metadata service

Why no client library: a poll is three GETs with pages. azure-mgmt-compute with azure-identity takes
60 MB on disk and 100 MB of memory, google-cloud-compute about as much.

What always holds:
1. An answer is a whole JSON object of status 200, or PlaceUnavailable is raised.
2. The token goes to the API's own host alone, by HTTPS: a page's link to another host is refused.
   Plain HTTP is for loopback and for a metadata service, whose address leads nowhere else.
3. After 429 or 503 the API is not asked again before the time of its Retry-After.
4. A proxy of the environment is not used: the coordinator is a machine of the cloud.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from elastic_trainer.discovery.place_protocol import Place, PlaceUnavailable, Refusal
from elastic_trainer.host.names import is_loopback

TIMEOUT_S = 5.0
MOST_BYTES = 64 << 20
MOST_PAGES = 1000
MOST_HELD_S = 300.0
"""The longest Retry-After that is kept."""
EARLY_S = 120.0
"""A token is renewed this long before its end."""


class ApiRefused(PlaceUnavailable):
    """The API refuses, and will until a person changes something; the text has the remedy."""


class Answer(NamedTuple):
    """What a server answered."""

    status: int
    headers: Mapping[str, str]
    """By lower-case name."""
    body: bytes


class Token(NamedTuple):
    """A token of a machine's own account."""

    text: str
    lives_s: float


def asked(method: str, url: str, headers: Mapping[str, str], body: bytes | None = None, *,
          timeout_s: float = TIMEOUT_S) -> Answer:
    """Make one request. Raises PlaceUnavailable if no whole answer comes."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=timeout_s)
    try:
        connection.request(method, f"{parts.path}?{parts.query}" if parts.query else parts.path,
                           body, dict(headers))
        response = connection.getresponse()
        data = response.read(MOST_BYTES)
        if response.length or len(data) == MOST_BYTES:
            raise ValueError("the answer ends too early, or not at all")
        return Answer(response.status, {name.lower(): value for name, value in
                                        response.getheaders()}, data)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise PlaceUnavailable(f"{parts.netloc} did not answer: {error!r}") from error
    finally:
        connection.close()


def seconds_of(text: str) -> float:
    """Return the time of "2026-11-27T08:00:00.1234567+00:00", in seconds since 1970."""
    # Python 3.10 reads fractions of 3 or 6 digits only.
    fraction = re.sub(r"\.(\d+)", lambda found: f".{found[1][:6]:0<6}", text)
    return datetime.fromisoformat(fraction.replace("Z", "+00:00")).timestamp()


@contextmanager
def known_form(server: str) -> Iterator[None]:
    """Within the block, a server's answer with other fields than the documented ones raises
    PlaceUnavailable."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise PlaceUnavailable(f"{server} answered in an unknown form: {error!r}") from error


def token_in(found: Mapping[str, Any]) -> Token:
    """Return the token in a metadata service's answer. Raises PlaceUnavailable."""
    with known_form("the metadata service"):
        return Token(str(found["access_token"]), float(found["expires_in"]))


def require_answer(place: Place) -> None:
    """Ask a place once. Raises ValueError, with the remedy, if the API refuses this machine."""
    try:
        place.instances()
    except ApiRefused as error:
        raise ValueError(str(error)) from error
    except PlaceUnavailable:
        pass  # the poller asks again


def explain(code: str, sentence: str, rules: Iterable[tuple[str, str, str]], otherwise: str,
            quotas: Sequence[str]) -> Refusal:
    """Return a refusal by a cloud's code and sentence for it.

    A rule is a code, what the cloud's code or sentence has, and the remedy. The first that fits
    counts. `quotas` are those that the sentence names.
    """
    ours, remedy = next(((ours, remedy) for ours, pattern, remedy in rules
                         if re.search(pattern, f"{code} {sentence}", re.I)), ("", otherwise))
    text = " ".join(sentence.split())
    return Refusal(code=code or ours or "unknown", says=text[:400], quotas=tuple(quotas),
                   remedy=f"{remedy}.")


class Api:
    """One cloud's API."""

    def __init__(self, base: str, token: Callable[[], Token], remedies: Mapping[int, str],
                 clock: Callable[[], float] = time.monotonic):
        parts = urlsplit(base)
        if parts.scheme != "https" and not is_loopback(base):
            raise ValueError(f"{base} is no address of an API: a token goes over https:// alone. "
                             f"Correct --api.")
        self.base, self.host, self.remedies = base.rstrip("/"), parts.netloc, remedies
        self.clock, self._new_token, self.calls = clock, token, 0
        self._token, self._renew_at, self._held_until = "", 0.0, 0.0

    def ask(self, path: str, method: str = "GET", **query: str) -> dict[str, Any]:
        """Return the JSON object at a path, or at the whole URL of a page. Raises PlaceUnavailable,
        ApiRefused."""
        url = path if path.startswith(("https:", "http:")) else f"{self.base}{path}"
        if urlsplit(url).netloc != self.host:
            raise PlaceUnavailable(f"{self.host} names a page at {urlsplit(url).netloc}, which "
                                   f"does not get this machine's token")
        if query:
            url += ("&" if "?" in url else "?") + urlencode(query)
        if (held_s := self._held_until - self.clock()) > 0:
            raise PlaceUnavailable(f"{self.host} has asked to wait for {held_s:.0f} s more")
        answer = self._answered(method, url)
        if answer.status == 401:  # the token was withdrawn before its end
            self._renew_at = 0.0
            answer = self._answered(method, url)
        return self._object(answer)

    def pages(self, path: str, items: str, link: str, method: str = "GET",
              **query: str) -> Iterator[dict[str, Any]]:
        """Yield the items of all pages. `link` names the next page: its token or its URL."""
        for _ in range(MOST_PAGES):
            page = self.ask(path, method, **query)
            found = page.get(items, [])
            if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
                raise PlaceUnavailable(f"{self.host} answered with {items} that are no list")
            yield from found
            following = page.get(link)
            if not following:
                return
            if str(following).startswith("http"):
                path, query = str(following), {}
            else:
                query = {**query, "pageToken": str(following)}
        raise PlaceUnavailable(f"{self.host} answers with more than {MOST_PAGES} pages")

    def _answered(self, method: str, url: str) -> Answer:
        if self.clock() >= self._renew_at:
            token = self._new_token()
            self._token = token.text
            self._renew_at = self.clock() + max(token.lives_s - EARLY_S, token.lives_s / 2)
        self.calls += 1
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
        return asked(method, url, headers | ({"Content-Length": "0"} if method == "POST" else {}))

    def _object(self, answer: Answer) -> dict[str, Any]:
        """Return the JSON object of an answer."""
        try:
            found = json.loads(answer.body or b"{}")
        except ValueError:
            found = None
        if answer.status == 200 and isinstance(found, dict):
            return found
        if answer.status in (429, 503):
            given = answer.headers.get("retry-after", "")
            wait_s = min(float(given), MOST_HELD_S) if given.isdecimal() else 0.0
            self._held_until = self.clock() + wait_s
        error = found.get("error") if isinstance(found, dict) else None
        says = str(error.get("message", "")) if isinstance(error, dict) else ""
        fact = f"{self.host} answered {answer.status}" + (f": {says.rstrip('.')}" if says else "")
        if answer.status in self.remedies and found is not None:
            raise ApiRefused(f"{fact}. {self.remedies[answer.status]}")
        raise PlaceUnavailable(f"{fact}." if answer.status != 200 else
                               f"{self.host} answered, but not with a JSON object.")
