"""A command apart from this process, which ends it by closing a pipe.

coordinator, agent (actors) → here → keeper.py → `elastic-trainer run`, `discovery agent`
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from elastic_trainer.ray import keeper


class Kept:
    """A command that a keeper runs. `kind` is "agent" or "supervisor" (keeper.py)."""

    def __init__(self, kind: str, command: Sequence[str], env: Mapping[str, str], cwd: str,
                 take: Callable[[str], None] = lambda line: None):
        self.exit_code: int | None = None
        """Of the command; -1 if its keeper was killed."""
        self._take = take
        self.starter = subprocess.Popen(
            [sys.executable, "-S", "-I", os.path.abspath(keeper.__file__), kind, *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(env), cwd=cwd)
        self.starter.wait()  # it forks and ends at once
        self._ended = threading.Event()
        threading.Thread(target=self._listen, name=kind, daemon=True).start()

    def stop(self) -> None:
        """Let the command end as after SIGTERM. Its keeper sees the end of its stdin."""
        assert self.starter.stdin
        with suppress(OSError):
            self.starter.stdin.close()

    def wait(self, limit_s: float) -> bool:
        """Wait for the command's end; return whether it has ended."""
        return self._ended.wait(limit_s)

    def _listen(self) -> None:
        assert self.starter.stdout
        code = -1
        for raw in self.starter.stdout:
            line = raw.decode(errors="replace").rstrip()
            if line.startswith(keeper.EXITED):
                code = int(line.removeprefix(keeper.EXITED))
            else:
                self._take(line)
        self.exit_code = code
        self._ended.set()
