"""Make untrusted text harmless for a terminal: control characters become visible escapes.

workers' output and errors, agents' reasons, host names, event logs, stores → here → print, rich

A terminal executes the control sequences in its output: they can hide or rewrite other lines, set
the clipboard, or send input as if the user had typed it (xterm, "Control Sequences"). Unicode's
direction marks reorder the visible text. Text for `rich` is wrapped in `rich.text.Text` as well,
because `rich` parses a plain string as markup.
"""

from __future__ import annotations

import re
from typing import Any

_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_IN_TEXT = re.compile(f"[{_CONTROLS}]")
_IN_LINE = re.compile(f"[{_CONTROLS}\n]")
_IN_OUTPUT = re.compile(f"(\x1b\\[[0-9;:]{{0,32}}m)|[{_CONTROLS}\n]")
_RESET = "\x1b[0m"


def plain(text: Any) -> str:
    """Return a text as one line without control characters."""
    line = str(text)
    return line if line.isprintable() else _IN_LINE.sub(_escaped, line)


def plain_text(text: Any) -> str:
    """Return a text of several lines, e.g. a traceback, without control characters."""
    return _IN_TEXT.sub(_escaped, str(text))


def plain_output(line: str) -> str:
    """Return a line of a worker's output without control characters. Its colours stay, and are
    reset at its end."""
    if line.isprintable():
        return line
    shown = _IN_OUTPUT.sub(lambda found: found[1] or _escaped(found), line)
    return shown + _RESET if "\x1b" in shown else shown


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
