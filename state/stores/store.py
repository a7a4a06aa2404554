"""Where objects are kept: what checkpoints need of a store, and a store in a local folder.

checkpoint, commit_log → here → a folder (this file), S3 (s3.py), Google's or Azure's (buckets.py);
by_url.py opens one by its URL

What always holds:
1. `put_if_absent` is atomic and durable: readers see nothing or all of the object, also after a
   power cut. A synced temporary is linked to the name, and `link` fails if the name exists (POSIX,
   link(2)).
2. A name never leads out of the folder, or of the prefix.
3. An object counts as gone only if its store does not list it either: a part that is gone costs a
   checkpoint.
4. A fault of the network or the store is a StoreUnavailable, after a bounded number of retries. A
   fault that no retry mends is a StoreRefused.
"""

from __future__ import annotations

import errno
import heapq
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import parse_qsl, urlsplit

from elastic_trainer.host.modes import make_folder, private

TEMPORARIES = ".tmp"
PUT_BYTES = 64 << 20
"""The largest object: one PUT, never a multipart upload (s3.py)."""
RACERS = 16
"""The writers at once by which a store proves put-if-absent."""
NEVER_MENDED = {errno.EACCES: "Let the workers' user write there",
                errno.EPERM: "Let the workers' user write there, on a file system with hard links",
                errno.EROFS: "Mount it for writing",
                errno.EOPNOTSUPP: "Use a file system with hard links",
                errno.ENOSYS: "Use a file system with hard links",
                errno.EMLINK: "Use a file system with hard links",
                errno.ENOTDIR: "Name a folder, not a file",
                errno.ENAMETOOLONG: "Use a shorter name"}
"""The remedies for faults that no retry mends."""


class StoreUnavailable(OSError):
    """A request has failed. Whether a put took effect is unknown."""


class StoreRefused(StoreUnavailable):
    """The store has refused a request, and will refuse it again: no such bucket, not allowed, no
    put-if-absent."""


class Store(Protocol):
    """Objects by name. Names are relative paths with forward slashes. All methods raise
    StoreUnavailable."""

    where: str
    """The URL, for messages."""

    def put(self, name: str, body: memoryview | bytes) -> None:
        """Write an object; only ever the same bytes under the same name."""

    def put_if_absent(self, name: str, body: memoryview | bytes) -> bool:
        """Write an object under a new name; False if the name is taken, perhaps by an earlier try
        of this call."""

    def get(self, name: str, most: int | None = None) -> bytes:
        """Read an object, at most `most` bytes. Raises FileNotFoundError if it is not listed
        either."""

    def get_into(self, name: str, out: memoryview) -> bool:
        """Read an object into memory of its length; False if it has another length. Raises
        FileNotFoundError."""

    def list(self, prefix: str, limit: int | None = None) -> list[str]:
        """Return the names under a folder of the store, sorted; the first `limit` of them."""

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; one that is not there is no error."""


class Entry(NamedTuple):
    """What a list says of an object in a cloud."""

    bytes: int
    version: str
    """It differs for each content of a name: an ETag, or Google's generation."""


class Bucket(Store, Protocol):
    """A store in a cloud."""

    bucket: str
    prefix: str

    def entries(self, most: int) -> dict[str, Entry]:
        """Return the objects directly under the prefix, by name: not those in folders below it.

        Raises StoreRefused if there are more than `most`.
        """

    def get_from(self, name: str, first: int, most: int | None = None) -> tuple[bytes, str]:
        """Read an object from a byte on; return at most `most` bytes, and the object's version.

        No bytes and no version if the object ends before. Raises as `get` does.
        """


def parts_of(url: str, settings: Sequence[str]) -> tuple[str, str, dict[str, str]]:
    """Return bucket, prefix, and the settings after the question mark, which may have these names.
    Raises StoreRefused."""
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    bad = given.keys() - set(settings)
    if not parts.netloc or bad or parts.fragment:
        wrong = (f"has settings that are not passed through ({', '.join(sorted(bad))})" if bad
                 else "has a fragment (#)" if parts.fragment else "has no bucket")
        raise StoreRefused(f"{url} {wrong}. Use {parts.scheme}://bucket/prefix, or with "
                           f"?NAME=VALUE at its end and NAME of {', '.join(settings)}.")
    return parts.netloc, parts.path.strip("/"), given


def check_size(name: str, body: memoryview | bytes) -> None:
    """Raise ValueError if an object is too large for one PUT."""
    if len(body) > PUT_BYTES:
        raise ValueError(f"{name} has {len(body)} bytes; one PUT takes {PUT_BYTES}")


def too_many(where: str, most: int) -> StoreRefused:
    """Return the error for a folder with more than `most` objects."""
    return StoreRefused(f"{where} has more than {most} objects in this one folder. Name the folder "
                        f"of a run.")


def checked(name: str) -> str:
    """Return the name. Raises ValueError if it could lead out of the store."""
    if not is_name(name):
        raise ValueError(f"{name!r} is no name of an object in a store")
    return name


def is_name(name: str) -> bool:
    """True for a name that an object may have. A listing can have others: "parts/", "a/../b"."""
    return not any(part in ("", ".", "..") for part in name.split("/")) and "\0" not in name


def prove_put_if_absent(store: Store) -> None:
    """Prove that the store keeps the first of objects that are put under one name: one after the
    other, and RACERS at once. Raises StoreRefused if it does not."""
    name = f"probe/{secrets.token_hex(16)}"
    # The result is not used: it is False if the answer was lost and the put was tried again.
    store.put_if_absent(name, b"first")
    seen = [store.get(name), store.put_if_absent(name, b"second"), store.get(name)]
    names, why = [name], ""
    if seen != [b"first", False, b"first"]:
        why = "A second object took the place of the first."
    elif "://" in store.where:  # `link` of a file system is one call
        names.append(f"{name}-race")
        why = _race(store, names[1])
    # Checkpoints work without the permission to delete. Each then emits state.rubbish_kept.
    with suppress(StoreUnavailable):
        store.delete(names)
    if why:
        raise StoreRefused(
            f"{store.where} does not honour put-if-absent (If-None-Match: *, ifGenerationMatch=0), "
            f"so two runs could write over each other. {why} Known not to: rclone serve s3, "
            f"s3rver, OpenStack Swift, gcp-storage-emulator. Use another endpoint.")


def _race(store: Store, name: str) -> str:
    """Let RACERS put different objects under one name at once; return what is wrong, or ""."""
    bodies = [f"racer {number}".encode() for number in range(RACERS)]
    with ThreadPoolExecutor(RACERS, "race") as pool:
        won = list(pool.map(lambda body: store.put_if_absent(name, body), bodies))
    winners, kept = [body for body, one in zip(bodies, won, strict=True) if one], store.get(name)
    # No winner: the answer to the first was lost, and its second try found its own object.
    if len(winners) > 1:
        return f"{len(winners)} of {RACERS} writers at once were told that theirs was the first."
    return "" if kept in (winners or bodies) else "The object is not the one of its first writer."


class FolderStore:
    """Objects under one folder."""

    def __init__(self, root: Path):
        self.root, self.where = root, str(root)
        self._was_there = root.is_dir()

    def _failed(self, what: str, error: OSError) -> StoreUnavailable:
        """Return the store's error for one of the file system."""
        fact = f"{self.root} did not {what}: {error}"
        if remedy := NEVER_MENDED.get(error.errno or 0):
            return StoreRefused(f"{fact}. {remedy}, or set --store to another place.")
        return StoreUnavailable(fact)

    def put(self, name: str, body: memoryview | bytes) -> None:
        self._write(name, body, os.replace)

    def put_if_absent(self, name: str, body: memoryview | bytes) -> bool:
        try:
            self._write(name, body, os.link)
            return True
        except FileExistsError:
            return False

    def _write(self, name: str, body: memoryview | bytes,
               publish: Callable[[Path, Path], None]) -> None:
        path = self.root / checked(name)
        temporary = self.root / TEMPORARIES / secrets.token_hex(12)
        try:
            make_folder(self.root)
            make_folder(temporary.parent)
            try:
                with open(temporary, "xb", opener=private) as file:
                    file.write(body)
                    file.flush()
                    os.fsync(file.fileno())
                new = [p for p in (path.parent, *path.parent.parents) if not p.exists()]
                for folder in reversed(new):
                    make_folder(folder)
                publish(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
            for changed in {path.parent, *(p.parent for p in new)}:
                descriptor = os.open(changed, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            self._was_there = True
        except FileExistsError:
            raise
        except OSError as error:
            raise self._failed(f"take {name}", error) from error

    def get(self, name: str, most: int | None = None) -> bytes:
        with self._reading(name) as path, open(path, "rb") as file:
            # Python allocates as much as is asked for, so a large `most` would cost memory.
            return file.read(-1 if most is None else min(most, os.fstat(file.fileno()).st_size))

    def get_into(self, name: str, out: memoryview) -> bool:
        with self._reading(name) as path, open(path, "rb", buffering=0) as file:
            at = 0
            while at < len(out) and (count := file.readinto(out[at:])):
                at += count
            return at == os.fstat(file.fileno()).st_size == len(out)

    @contextmanager
    def _reading(self, name: str) -> Iterator[Path]:
        """Yield the path of an object, and map errors of the file system."""
        path = self.root / checked(name)
        try:
            yield path
        except FileNotFoundError as error:
            if not self.root.is_dir():
                raise StoreUnavailable(
                    f"{self.root} is gone, or is not mounted on this host") from error
            if self._is_listed(path):  # NFS caches for a while that a name was not there
                raise StoreUnavailable(f"{self.root} lists {name}, but cannot open it") from error
            raise
        except IsADirectoryError as error:
            raise FileNotFoundError(f"{name} is a folder in {self.root}, and no object") from error
        except OSError as error:
            raise self._failed(f"give {name}", error) from error

    def _is_listed(self, path: Path) -> bool:
        try:
            return path.name in os.listdir(path.parent)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._failed(f"list {path.parent.name}", error) from error

    def list(self, prefix: str, limit: int | None = None) -> list[str]:
        def failed(error: OSError) -> None:
            # os.walk would take an unreadable folder for an empty one.
            if not isinstance(error, FileNotFoundError):
                raise self._failed(f"list {prefix}", error) from error

        if not self.root.is_dir() and self._was_there:
            raise StoreUnavailable(f"{self.root} is gone")
        walk = os.walk(self.root / checked(prefix), onerror=failed)
        inside = ((Path(folder).relative_to(self.root), names) for folder, _, names in walk)
        # A Path for each name took 5 times as long.
        found = (f"{folder}/{name}" for folder, names in inside for name in names)
        return sorted(found) if limit is None else heapq.nsmallest(limit, found)

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects, and temporaries of writers that died a day ago."""
        try:
            for name in names:
                path = self.root / checked(name)
                path.unlink(missing_ok=True)
                with suppress(OSError):  # not empty
                    path.parent.rmdir()
            for path in (self.root / TEMPORARIES).glob("*"):
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < time.time() - 86400:
                        path.unlink()
        except OSError as error:
            raise self._failed("delete", error) from error
