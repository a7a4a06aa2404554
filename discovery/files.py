"""The files that discovery writes: whole, or one line at a time.

poller, group → here → hosts file, table, memory, the run's event log
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from elastic_trainer.host import modes
from elastic_trainer.wire.redact import redacted_value


def append_event(file: Path | None, event: str, **facts: Any) -> None:
    """Write one line, without secrets, into the run's event log, if there is one. Raises OSError.
    """
    if file is None:
        return
    known = {name: redacted_value(it) for name, it in facts.items()}
    line = json.dumps({"time": round(time.time(), 4), "event": event, **known}) + "\n"
    with open(file, "ab", buffering=0, opener=modes.private) as log:
        log.write(line.encode())


def replace_whole(path: Path, text: str, at: float | None = None) -> None:
    """Replace a file so that every reader sees the old text or the new one. Raises OSError.

    `at` is the file's time, by default now.
    """
    modes.replace_whole(path, text, opener=None, at=at)
