"""Apply unified diffs to sources, exactly or not at all.

patches/*.patch → here → the sources that build.py builds

What always holds:
1. A hunk applies only at the line that it names, and only if each line of its context is equal. GNU
   patch and git search for another place, and would so build a Horovod that was never tested.
2. No file is written unless every patch applies.
3. The bytes of a file that no hunk names are not changed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

OTHER_SOURCES = "These are not the sources that it was written for."
HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


class PatchRefused(Exception):
    """A patch does not fit its sources, or is damaged."""


@dataclass(frozen=True)
class Hunk:
    """One change of one file."""

    path: str
    start: int
    """The first line that it replaces, counted from 1, in the file before this patch."""
    old: tuple[str, ...]
    new: tuple[str, ...]


def apply_patches(sources: Path, patches: Iterable[Path]) -> None:
    """Apply the patches to the folder in this order. Raises PatchRefused, and writes nothing."""
    files: dict[str, list[str]] = {}
    for patch in patches:
        shifts = Counter[str]()
        for hunk in read_hunks(patch.name, _text(patch)):
            if hunk.path not in files:
                files[hunk.path] = _lines_of(patch.name, sources, hunk.path)
            _replace(patch.name, files[hunk.path], hunk, shifts[hunk.path])
            shifts[hunk.path] += len(hunk.new) - len(hunk.old)
    for path, lines in files.items():
        (sources / path).write_bytes("\n".join(lines).encode(errors="surrogateescape"))


def read_hunks(name: str, text: str) -> Iterator[Hunk]:
    """Yield the hunks of a unified diff; the text before its first file is prose.

    Raises PatchRefused.
    """
    path = ""
    lines = iter(text.removesuffix("\n").split("\n"))
    for line in lines:
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/")
        elif found := HUNK.match(line):
            old, new = _body(name, lines, int(found[2] or 1), int(found[3] or 1))
            yield Hunk(path, int(found[1]), old, new)
        elif path and not line.startswith("--- "):
            raise PatchRefused(f"{name} is damaged: {line!r} is no line of a hunk.")


def _body(name: str, lines: Iterator[str], olds: int,
          news: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    old, new = list[str](), list[str]()
    while len(old) < olds or len(new) < news:
        line = next(lines, "")
        if line[:1] not in (" ", "-", "+") or line == "":
            raise PatchRefused(f"{name} is damaged: {line!r} is no line of a hunk.")
        if line[0] != "+":
            old.append(line[1:])
        if line[0] != "-":
            new.append(line[1:])
    if (len(old), len(new)) != (olds, news):
        raise PatchRefused(f"{name} is damaged: a hunk has other numbers of lines than it names.")
    return tuple(old), tuple(new)


def _replace(name: str, lines: list[str], hunk: Hunk, shift: int) -> None:
    """Replace the lines of a hunk; the hunks before it have shifted it by `shift` lines."""
    first = hunk.start - 1 + shift
    for number, wanted in enumerate(hunk.old):
        found = lines[first + number] if first + number < len(lines) else None
        if found != wanted:
            raise PatchRefused(
                f"{name} does not apply to {hunk.path}: line {hunk.start + number} is {found!r}, "
                f"where the patch has {wanted!r}. {OTHER_SOURCES}")
    lines[first : first + len(hunk.old)] = hunk.new


def _lines_of(name: str, sources: Path, path: str) -> list[str]:
    try:
        return _text(sources / path).split("\n")
    except FileNotFoundError as error:
        raise PatchRefused(f"{name} does not apply: there is no {path}. "
                           f"{OTHER_SOURCES}") from error


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="surrogateescape")
