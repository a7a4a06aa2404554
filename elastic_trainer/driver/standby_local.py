"""The standbys of a local run: starts the service, and restarts it when it was killed.

supervisor → here → service (a process of its own)
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from elastic_trainer.events.log import Events
from elastic_trainer.host import own
from elastic_trainer.host.standbys import FOLDER_VARIABLE

MAX_BACK_OFF_S = 60.0
ENDED, BAD_COMMAND = 0, 2
"""The exit codes after which the service is not started again."""


@contextmanager
def local_standbys(run_dir: Path, command: Sequence[str], count: int) -> Iterator[None]:
    """Keep standbys on this machine, for this run only, once it trains."""
    if not count:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="elastic-trainer-") as folder:  # 0700, and short
        os.environ[FOLDER_VARIABLE] = folder
        service = LocalService(
            own.command("elastic_trainer", "standby", "--slots", str(count),
                        "--run-dir", str(run_dir), "--once-training", "--parent", str(os.getpid()),
                        "--", *command), Events(run_dir, run=run_dir.name))
        service.start()
        try:
            yield
        finally:
            del os.environ[FOLDER_VARIABLE]
            service.end()


class LocalService(threading.Thread):
    """Runs the service, and starts it again, with a back-off, when it was killed.

    The kernel ends a service with the thread that has started it (prctl(2), PR_SET_PDEATHSIG), so
    this thread waits for it.
    """

    def __init__(self, command: Sequence[str], events: Events):
        super().__init__(name="standbys", daemon=True)
        self.command, self.events, self.env = list(command), events, dict(os.environ)
        self.ends = threading.Event()
        self.changes = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Start the service until it ends on request, or by a mistake that it has printed."""
        failures = 0
        while True:
            started = time.monotonic()
            with self.changes:
                if self.ends.is_set():
                    return
                self.process = subprocess.Popen(self.command, env=self.env, start_new_session=True,
                                                stdin=subprocess.DEVNULL)
            code = self.process.wait()
            if self.ends.is_set() or code in (ENDED, BAD_COMMAND):
                return
            has_lasted = time.monotonic() - started > MAX_BACK_OFF_S
            failures = 1 if has_lasted else failures + 1
            again_s = min(MAX_BACK_OFF_S, 2.0 ** min(failures, 9))
            self.events.emit("standby.service_ended", exit_code=code, again_s=again_s)
            self.ends.wait(again_s)

    def end(self) -> None:
        """End the service, and wait for its end."""
        with self.changes:
            self.ends.set()
            if self.process:
                self.process.terminate()
        self.join()
