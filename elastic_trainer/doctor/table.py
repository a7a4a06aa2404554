"""The checks of the doctor as a table, or as JSON.

checks → here → stdout
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from elastic_trainer.doctor.checks import FAILED, OK, Check
from elastic_trainer.wire.plain import plain

COLOURS = {"ok": "green", "warning": "yellow", "failed": "red"}


def show(checks: Sequence[Check], *, as_json: bool) -> int:
    """Print the checks; returns the exit code: 1 if one has failed."""
    failed = [check for check in checks if check.status == FAILED]
    if as_json:
        print(json.dumps({"healthy": not failed, "checks": [asdict(check) for check in checks]},
                         indent=2))
        return 1 if failed else 0
    _print(checks)
    return 1 if failed else 0


def _print(checks: Sequence[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table("host", "check", "", "found")
    for check in checks:
        table.add_row(Text(plain(check.host)), Text(check.what),
                      Text(check.status, style=COLOURS[check.status]), Text(plain(check.found)))
    console.print(table)
    for check in checks:
        if check.status != OK:
            # Not by rich, which would wrap a command.
            print(f"{plain(check.host)}, {check.what}: {check.status}. {plain(check.found)}")
            if check.remedy:
                print(f"    {plain(check.remedy)}")
    bad = [check for check in checks if check.status != OK]
    if not bad:
        print(f"all {len(checks)} checks are ok")
