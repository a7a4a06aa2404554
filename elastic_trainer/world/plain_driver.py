"""The worker's side of plain `horovodrun --host-discovery-script`: Horovod's own driver.

Horovod's driver → here → generations

This driver is not mended, and keeps its limits (docs/guide/fleets.md#plain-horovodrun). The worker
avoids two of them: it waits for admission before `hvd.init()` (F1), and leaves with exit code 75
(F11). driver/driver.py lists F1 to F11. With the patches of setup/patches horovodrun answers only a
request with the token of its launch. A worker has the token in its environment. Horovod's
notification service checks an HMAC before it unpickles (network.py:92-99).
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from typing import Any

from elastic_trainer.config import ConfigError, Launch
from elastic_trainer.wire.heartbeat import RankAssignment
from elastic_trainer.world.place import Dismissed, Driver, RunOver, Wants

ADMISSION_S = 60.0
"""The time for which rank 0 waits for all members of a generation other than the first."""
ADMISSION_POLL_S = 0.02
TOKEN_HEADER = "X-Horovod-Token"
"""Of setup/patches/11-answer-only-with-the-key.patch."""


class PlainDriver(Driver):
    """A worker's connection to Horovod's own driver. It takes no heartbeats and no reports: the
    votes, and the exit codes of workers, say what others report."""

    drains_on_sigterm = True

    def __init__(self, launch: Launch):
        from horovod.common.elastic import notification_manager

        self.launch, self.generation, self.attempt = launch, 0, launch.attempt
        self._changed = self._drains = False
        self._headers = {TOKEN_HEADER: launch.token} if launch.token else {}
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            notification_manager.init()
        except RuntimeError as error:
            raise ConfigError(f"{error} Run `elastic-trainer setup` on each host.") from error
        notification_manager.register_listener(self)

    def on_hosts_updated(self, timestamp: int, result: Any) -> None:
        """Take a notice of Horovod's driver. It calls rank 0 only; the vote informs the others."""
        self._changed = True

    def next_place(self, holds_state: bool, step: int) -> RankAssignment:
        """Ask for a place and wait until all members have checked in (F1).

        Raises Dismissed, RunOver.
        """
        is_first = self.generation == 0
        while True:
            if self._drains:
                raise Dismissed
            seat = list(self.launch.seat) if is_first else self._ask_for_seat()
            is_first = False
            if seat[0] < 0:
                raise Dismissed
            if self._check_in(seat[0], seat[1]):
                address, port = self.launch.rendezvous
                return RankAssignment(generation=self.generation, rank=seat[0], size=seat[1],
                                      local_rank=seat[2], local_size=seat[3], address=address,
                                      port=port, attempt=self.attempt)

    def _ask_for_seat(self) -> list[int]:
        """Report READY, and wait for a seat as long as Horovod's barrier does.

        READY may be reported only once a round (registration.py:105-115), so the GET is not
        repeated.
        """
        self._changed = False  # before the request: the answer may lack a later notice
        try:
            answer = self._http("GET", f"rank_and_size/{self.launch.host}:{self.launch.slot}")
        except OSError as error:
            raise RunOver("failed", f"horovodrun is gone: {error}") from error
        return [int(number) for number in (answer or b"-1").decode().split(",")]

    def _check_in(self, rank: int, size: int) -> bool:
        """Check in; return whether all members have. Rank 0 waits for all and publishes the result.

        The result has the numbers of attempt and generation, which a newcomer does not know.
        """
        limit_s = self.launch.limits.boot_s if self.generation == 0 else ADMISSION_S
        deadline = time.monotonic() + limit_s
        self._http("PUT", f"admission/{rank}", str(size).encode())
        while time.monotonic() < deadline:
            if rank == 0:
                if self._are_all_here(size):
                    self.generation += 1
                    go = f"{self.attempt} {self.generation}"
                    self._http("PUT", "admission/go", go.encode())
                    return True
            elif found := self._http("GET", "admission/go"):
                if found != b"abort":
                    self.attempt, self.generation = map(int, found.split())
                return found != b"abort"
            time.sleep(ADMISSION_POLL_S)
        if rank == 0:
            self._http("PUT", "admission/go", b"abort")
        return False

    def _are_all_here(self, size: int) -> bool:
        expected = str(size).encode()
        return all(self._http("GET", f"admission/{rank}") == expected for rank in range(size))

    def _http(self, method: str, path: str, body: bytes | None = None) -> bytes | None:
        url = "http://{}:{}/{}".format(*self.launch.rendezvous, path)
        request = urllib.request.Request(url, data=body, method=method, headers=self._headers)
        try:
            with self._opener.open(request) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def drain(self) -> None:
        """Ask to leave at the next step boundary. Takes no lock: a signal handler may call it."""
        self._drains = True

    def wants(self) -> Wants:
        """Return what Horovod's driver has reported. A worker notices the death of this driver only
        at the next change."""
        return Wants(change=self._changed or self._drains, drains=self._drains,
                     is_urgent=self._drains)

    def go_back(self) -> None:
        """Count one more attempt: the run continues from a checkpoint in the same processes."""
        self.attempt += 1
