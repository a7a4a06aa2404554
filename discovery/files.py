"""The files that discovery writes: whole, or one line at a time.

poller, group → here → hosts file, table, memory, the run's event log
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from elastic_trainer.host.modes import private
from elastic_trainer.wire.redact import redacted_value


def append_event(file: Path | None, event: str, **facts: Any) -> None:
    """Write one line, without secrets, into the run's event log, if there is one. Raises OSError.
    """
    if file is None:
        return
    known = {name: redacted_value(it) for name, it in facts.items()}
    line = json.dumps({"time": round(time.time(), 4), "event": event, **known}) + "\n"
    with open(file, "ab", buffering=0, opener=private) as log:
        log.write(line.encode())


def replace_whole(path: Path, text: str, at: float | None = None) -> None:
    """Replace a file so that every reader sees the old text or the new one. Raises OSError.

    `at` is the file's time, by default now.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(text)
        if at is not None:
            os.utime(new, (at, at))
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
