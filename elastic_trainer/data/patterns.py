"""Find the files that a pattern names: the same ones on a disk and in a store.

files.py → here → folders of a disk (os.scandir), or of a store (fsspec)

What always holds:
1. A part of a path that exists is taken as it is, whatever characters it has: `run [v2]`, `a*b`.
2. `{000..099}` and `{a,b}` are alternatives. `*` is any text in a name, `?` one character, `[abc]`
   and `[!abc]` one of these or none of them, `**` any number of folders, also none.
3. Names that begin with a dot are matched only by a part that begins with a dot. So the index
   (`.elastic-trainer/`) is no data.
4. A pattern names files, never folders, in the order of their whole names.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterator

from elastic_trainer.config import ConfigError

BRACES = re.compile(r"\{([^{}]*)\}")
MAGIC = re.compile(r"[*?\[{]")
MOST_CHOICES = 1 << 20
Folder = dict[str, bool]
"""The names in a folder: True for those of folders."""


class Tree:
    """Folders of a disk or of a store, each of which is listed at most once."""

    def __init__(self, listed: Callable[[str], Folder], exists: Callable[[str], bool],
                 deep: Callable[[str], list[str]] | None = None):
        self._listed, self._exists, self._deep = listed, exists, deep
        self._known: dict[str, Folder] = {}

    def names(self, folder: str) -> Folder:
        """Return the names in a folder."""
        if folder not in self._known:
            self._known[folder] = self._listed(folder)
        return self._known[folder]

    def has(self, path: str) -> bool:
        """Return whether there is a file or a folder of this name."""
        folder, _, name = path.rpartition("/")
        if folder not in self._known and (self._deep is None or "{" in name):
            return self._exists(path)
        return name in self.names(folder)  # a pattern needs this listing, too

    def list_all(self, folder: str) -> None:
        """List all that is below a folder at once, where a store can do that."""
        if self._deep is None or folder in self._known:
            return
        self._known[folder] = {}
        for path in self._deep(folder):
            *folders, name = path[len(folder) + 1:].split("/")
            at = folder
            for one in folders:
                self._known[at][one] = True
                at = f"{at}/{one}"
                self._known.setdefault(at, {})
            if name:  # a store may have an object for a folder
                self._known[at].setdefault(name, False)


def named(tree: Tree, start: str, rest: str) -> list[str]:
    """Return the files that `start/rest` names, the alternatives of braces in their order. Without
    a pattern the file need not exist."""
    found = []
    for base, left in _alternatives(tree, start, rest.split("/")):
        found += sorted(set(_matched(tree, base, left))) if left else [base]
    return found


def _alternatives(tree: Tree, base: str, parts: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield what braces stand for: the path up to the first pattern, and the parts from there."""
    for place, part in enumerate(parts):
        path = f"{base}/{part}"
        if not MAGIC.search(part) or part != "**" and tree.has(path):
            base = path
            continue
        left = "/".join(parts[place:])
        choices = choices_of(left)
        if choices is None:
            yield base, parts[place:]
        else:
            for choice in choices:
                yield from _alternatives(tree, base, choice.split("/"))
        return
    yield base, []


def choices_of(text: str) -> list[str] | None:
    """Return a text with each choice of its first braces; None: it has none. Raises ConfigError.
    """
    found = BRACES.search(text)
    if not found:
        return None
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", found[1])
    if numbers:
        first, last = numbers.groups()
        width = len(first) if len(first) == len(last) or first.startswith("0") else 0
        if int(last) - int(first) >= MOST_CHOICES:
            raise ConfigError(f"the pattern {text} names the files {first} to {last}, and one pair "
                              f"of braces has at most {MOST_CHOICES}. Correct the numbers.")
        choices = [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
    else:
        choices = found[1].split(",")
    return [text[:found.start()] + choice + text[found.end():] for choice in choices]


def _matched(tree: Tree, base: str, parts: list[str], above: frozenset[str] = frozenset()
             ) -> Iterator[str]:
    """Yield the files below a folder that the parts of a pattern match."""
    part, rest = parts[0], parts[1:]
    if part == "**":
        tree.list_all(base)
        yield from _below(tree, base, rest or ["*"], above)
        return
    if "**" in part:
        raise ConfigError(f"the pattern {base}/{'/'.join(parts)} has ** beside other characters of "
                          f"a name. Use ** as a whole part: **/*.tar.")
    if not MAGIC.search(part) or tree.has(f"{base}/{part}"):
        names = [part] if tree.has(f"{base}/{part}") else []
    else:
        right = re.compile(fnmatch.translate(part))
        names = [name for name in tree.names(base) if right.match(name)
                 and (not name.startswith(".") or part.startswith("."))]
    for name in names:
        if not rest:
            if not tree.names(base).get(name, True):
                yield f"{base}/{name}"
        elif tree.names(base).get(name, False):
            yield from _matched(tree, f"{base}/{name}", rest)


def _below(tree: Tree, base: str, rest: list[str], above: frozenset[str]) -> Iterator[str]:
    """Yield the files that the parts match in a folder, or in a folder below it. A folder that a
    link below it leads back to is not entered again."""
    yield from _matched(tree, base, rest)
    here = above | {_real(base)}
    for name, is_folder in list(tree.names(base).items()):
        path = f"{base}/{name}"
        if is_folder and not name.startswith(".") and _real(path) not in here:
            yield from _below(tree, path, rest, here)


def _real(path: str) -> str:
    """Return the path of a folder without links; a store has none."""
    return path if "://" in path else os.path.realpath(path or "/")


def folder_of_disk(path: str) -> Folder:
    """Return the names in a folder of a disk; none if it is no folder. Raises ConfigError."""
    try:
        with os.scandir(path or "/") as entries:
            return {entry.name: entry.is_dir() for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except PermissionError as error:
        raise ConfigError(f"the folder {path} may not be read: {error.strerror}. Allow it, or name "
                          f"the folders of the data.") from error
