"""The checks of the doctor as a table, or as JSON.

checks → here → stdout
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from elastic_trainer.doctor.checks import FAILED, OK, Check
from elastic_trainer.wire.plain import plain


def show(checks: Sequence[Check], *, as_json: bool) -> int:
    """Print the checks; returns the exit code: 1 if one has failed."""
    failed = [check for check in checks if check.status == FAILED]
    if as_json:
        print(json.dumps({"healthy": not failed, "checks": [asdict(check) for check in checks]},
                         indent=2))
        return 1 if failed else 0
    from elastic_trainer.views.tables import Table, print_table

    print_table(Table(("host", "check", "", "found"), [
        (check.host, check.what, check.status, check.found) for check in checks]))
    bad = [check for check in checks if check.status != OK]
    for check in bad:  # not by rich, which would wrap a command
        print(f"{plain(check.host)}, {check.what}: {check.status}. {plain(check.found)}")
        if check.remedy:
            print(f"    {plain(check.remedy)}")
    if not bad:
        print(f"all {len(checks)} checks are ok")
    return 1 if failed else 0
