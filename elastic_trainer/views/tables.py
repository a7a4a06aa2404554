"""A table, and its three forms: for a terminal, in Markdown, and (page.html) on a page.

summary_table, fleet_table, phases → here → `report`, `hosts`        page, overview → page.html

All that commands print as a table looks the same: no frames, the heads are dim, long texts fold.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_trainer.wire.plain import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

PIPE_COLUMNS = 200
"""Columns where stdout is no terminal."""


@dataclass(frozen=True)
class Table:
    """Texts in rows."""

    heads: Sequence[str]
    """Of the columns; none: the first cell of each row is its head."""
    rows: Sequence[Sequence[str]]
    title: str = ""
    kind: str = ""
    """Classes of a page's table."""
    levels: Sequence[str] = ()
    """The class of each row."""
    links: Sequence[str] = ()
    """The address behind the first cell of each row."""


def grid(heads: Sequence[str], title: str = "", numbers: Collection[str] = ()) -> RichTable:
    """Return an empty table for a terminal; the columns `numbers` are aligned to the right."""
    from rich.table import Table as RichTable  # a page does without rich: 0.1 s
    from rich.text import Text

    table = RichTable(title=Text(plain(title), style="bold") if title else None, box=None,
                      title_justify="left", padding=(0, 2, 0, 0), pad_edge=False,
                      header_style="dim", show_header=any(heads) or not heads)
    for head in heads:
        table.add_column(Text(plain(head)), overflow="fold",
                         justify="right" if head in numbers else "left")
    return table


def print_table(table: Table, numbers: Collection[str] = (), console: Console | None = None
                ) -> None:
    """Print a table for a person. No text of it is markup, or a control sequence."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    heads = table.heads or ["" for _ in table.rows[0]]
    shown = grid(heads, table.title, numbers)
    if not any(table.heads[:1]):
        shown.columns[0].style = "bold"
    for row in table.rows:
        shown.add_row(*(Text(plain(cell)) for cell in row))
    console.print(shown)


def markdown(table: Table) -> str:
    """Return a table in Markdown."""
    return "\n".join([_line(table.heads), "|---" * len(table.heads) + "|",
                      *map(_line, table.rows)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    """Return a text that Markdown takes for nothing but text."""
    text = plain(text)
    for mark in "\\|`*_<>[]":
        text = text.replace(mark, f"\\{mark}")
    return text
