"""The summaries of one run or of several side by side: as a table, in Markdown, as JSON.

result.json's content of each run → here → `elastic-trainer report A B --markdown|--json`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_trainer.events.summary import json_of
from elastic_trainer.views.summary_table import summary_rows
from elastic_trainer.wire.plain import plain

Result = Mapping[str, Any]


def rows(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    """Return a label and the text of each run; "-" where a run has none."""
    columns = [dict(summary_rows(result)) for result in results]
    labels = dict.fromkeys(label for column in columns for label in column)
    return [(label, [plain(column.get(label, "-")) for column in columns]) for label in labels]


def markdown(results: Sequence[Result]) -> str:
    """Return the rows as a table in Markdown."""
    head = _line(["", *(f"run {plain(result['run'])}" for result in results)])
    body = [_line([label, *texts]) for label, texts in rows(results)]
    return "\n".join([head, "|---" * (len(results) + 1) + "|", *body])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    """Return a text that Markdown takes for nothing but text."""
    for mark in "\\|`*_<>[]":
        text = text.replace(mark, f"\\{mark}")
    return text


def as_json(results: Sequence[Result]) -> str:
    """Return result.json's content of one run, or a list of those of several."""
    return json_of(results[0] if len(results) == 1 else list(results))


def print_side_by_side(results: Sequence[Result]) -> None:
    """Print the rows as a table for a person."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    table.add_column("")
    for result in results:
        table.add_column(Text(f"run {plain(result['run'])}"), overflow="fold")
    for label, texts in rows(results):
        table.add_row(label, *map(Text, texts))
    Console().print(table)
