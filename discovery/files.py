"""The lines that discovery writes into the run's event log."""

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

