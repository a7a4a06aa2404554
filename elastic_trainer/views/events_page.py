"""The documentation page of all events, made from event_table.

    python -m elastic_trainer.views.events_page docs/events.md

event_table → here → docs/events.md. A test fails if the page is not what this module makes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from elastic_trainer.events.event_kind import EventKind, Field, Phase
from elastic_trainer.events.event_table import COMMON, GROUPS
from elastic_trainer.events.sentences import ENDINGS

_HEAD = """# Events

This page is generated from `elastic_trainer/events/event_table.py`
(`python -m elastic_trainer.views.events_page docs/events.md`).

A run writes its event log to `runs/NAME/events.jsonl`: one JSON object a line. Older parts of the
log are `events-000001.jsonl.gz` and so on. `elastic-trainer watch`, `report` and `verify` read it.

- *Level*: `detail` is for programs, and `watch` shows the others. `warning`: the run continues
  with less. `error`: a worker, a checkpoint or the run is lost, or a person is needed.
- A field with `?` may be absent or null. A field with `*` is used by a reader: an event in which
  it is missing or wrong is malformed. Readers leave a malformed event out and count it.
- Readers accept and count an event that this page does not name.
"""


def page() -> str:
    """Return the page as Markdown."""
    parts = [_HEAD, "## Fields of every event\n", _fields(COMMON)]
    for heading, kinds in GROUPS.items():
        parts += [f"## {heading}\n", *map(_section, kinds)]
    parts += ["## Reasons of `driver.worker_gone`\n", _endings(),
              "## Where the report books the time\n", _books()]
    return "\n".join(parts)


def _section(kind: EventKind) -> str:
    lines = [f"### `{kind.name}`\n", f"{kind.level.value} · {kind.meaning}\n"]
    if kind.remedy:
        lines.append(f"What to do: {kind.remedy}\n")
    if kind.fields:
        lines.append(_fields(kind.fields))
    return "\n".join(lines)


def _fields(fields: tuple[Field, ...]) -> str:
    rows = [f"| `{field.name}`{'' if field.is_required else '?'}{'*' if field.is_read else ''} "
            f"| {field.kind.noun} | {field.kind.unit} |" for field in fields]
    return "\n".join(["| field | value | unit |", "|---|---|---|", *rows, ""])


def _endings() -> str:
    rows = [f"| `{reason}` | {ending.meaning} | {'yes' if ending.is_lost else 'no'} |"
            for reason, ending in ENDINGS.items()]
    return "\n".join(["| reason | meaning | counts as lost |", "|---|---|---|", *rows, ""])


def _books() -> str:
    closing = {phase: [kind.name for kinds in GROUPS.values() for kind in kinds
                       if kind.closes is phase] for phase in Phase}
    rows = [f"| `{phase.value}_s` | {', '.join(f'`{name}`' for name in names) or '—'} |"
            for phase, names in closing.items()]
    return "\n".join([
        "The books of `result.json` assign each second of the wall time to one account. An event "
        "closes\nan account: it ends the time that is booked there. From a start by "
        "a person to\nthe next generation, `restarting` is `booting`. The last step that a person "
        "stops is `training`.\n", "| account | closed by |", "|---|---|", *rows, ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
