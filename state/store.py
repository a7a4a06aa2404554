"""A folder as a store of objects: put if absent, get, list, delete.

checkpoint → here → local disk or a shared file system

What always holds:
1. `put_if_absent` is atomic and durable: other readers see nothing, or all of it, also after a power cut
   (a synced temporary is linked to the name; `link` fails when the name exists: POSIX link(2)).
2. A name never leaves the folder.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path


class StoreUnavailable(OSError):
    """The store did not do what it was asked; the cause is chained."""


class FolderStore:
    """Objects under one folder; names are relative paths with forward slashes."""

    def __init__(self, root: Path):
        self.root = root

    def _path(self, name: str) -> Path:
        parts = name.split("/")
        if not name or name.startswith("/") or any(part in ("", ".", "..") for part in parts) or "\0" in name:
            raise ValueError(f"{name!r} is no name of an object in a store")
        return self.root.joinpath(*parts)

    def put_if_absent(self, name: str, chunks: Iterable[memoryview | bytes]) -> bool:
        """Write an object under a new name; False if the name is taken (then nothing is changed)."""
        path = self._path(name)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(temporary, "xb") as file:
                    for chunk in chunks:
                        file.write(chunk)
                    file.flush()
                    os.fsync(file.fileno())
                os.link(temporary, path)
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
            return True
        except OSError as error:
            raise StoreUnavailable(f"{self.root} did not take {name}: {error}") from error

    def get(self, name: str) -> bytes:
        """Read an object. Raises FileNotFoundError, StoreUnavailable."""
        try:
            return self._path(name).read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreUnavailable(f"{self.root} did not give {name}: {error}") from error

    def list(self, prefix: str) -> list[str]:
        """Return the sorted names under a folder of the store."""
        folder = self._path(prefix)
        return sorted(str(p.relative_to(self.root)) for p in folder.rglob("*") if p.is_file() and p.name[0] != ".")

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no error."""
        self._path(name).unlink(missing_ok=True)
