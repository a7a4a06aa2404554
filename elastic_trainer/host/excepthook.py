"""Show an error that the user can mend with the lines of the user's code alone.

ConfigError → here → Python's excepthook, or the user's

Our own frames, and the error of ours that it was made from, say nothing about the script.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

OURS = str(Path(__file__).resolve().parent.parent) + "/"
"""The folder of our package."""
EXAMPLES = f"{OURS}examples/"
"""They are written as a user writes."""
_shortened: set[type[BaseException]] = set()


def is_ours(file: str) -> bool:
    """True for a file of this package, and for code that it has generated."""
    return file.startswith(OURS) and not file.startswith(EXAMPLES) or file.startswith("<")


def frames_of_user(error: BaseException) -> TracebackType | None:
    """Return an error's traceback without our frames."""
    kept, found = list[TracebackType](), error.__traceback__
    while found:
        if not is_ours(found.tb_frame.f_code.co_filename):
            kept.append(found)
        found = found.tb_next
    following = None
    for one in reversed(kept):
        following = TracebackType(following, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return following


def shorten(kind: type[BaseException]) -> None:
    """Let this process show uncaught errors of a kind so. It can be called again and again."""
    if kind in _shortened:
        return
    _shortened.add(kind)
    show = sys.excepthook

    def show_users(of: type[BaseException], error: BaseException,
                   found: TracebackType | None) -> None:
        if isinstance(error, kind):
            found = frames_of_user(error)
            error.__cause__, error.__suppress_context__ = None, True
            error.__traceback__ = found
        show(of, error, found)

    sys.excepthook = show_users
