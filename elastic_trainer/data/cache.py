"""Blocks of files in a folder of this host, with a bound in bytes.

blocks → here → files of one folder, shared by all processes of the host

What always holds:
1. The folder holds at most `most_bytes`, and for each process at most one block more.
2. A block is written to a temporary name and then renamed. A process that is killed leaves a whole
   block or none. The next eviction removes its temporary file.
3. Every page of PAGE_BYTES has a CRC32, which is verified at each read, unless the caller has sums
   of its own. A damaged block is removed, and counts as absent.
4. The block that was used longest ago is evicted first. One eviction frees a tenth of the bound, so
   that the folder is listed rarely.

What it does not do: fail. A disk that is full is a warning, and the data comes from the store.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy

from elastic_trainer.config import ConfigError

PAGE_BYTES = 16 << 10
MAGIC = b"ETblock1"
HEAD = struct.Struct("<8sQ")
FREED = 0.1
"""The part of the bound that one eviction frees."""
LOCK, CLAIMS = "lock", "claims"
COUNTER = itertools.count()


class Cache:
    """A bounded folder of blocks."""

    def __init__(self, folder: str | os.PathLike[str], most_bytes: int):
        self.folder, self.most_bytes = os.path.abspath(folder), most_bytes
        self._has_warned = False
        if isinstance(most_bytes, bool) or not isinstance(most_bytes, int) or most_bytes < 1:
            raise ConfigError(f"cache_bytes is {most_bytes!r}. Use a whole number of bytes above 0,"
                              f" e.g. 10 * 2**30.")
        try:
            os.makedirs(self.folder, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"cache is {os.fspath(folder)!r}, where no folder can be made: "
                              f"{error}. Name a folder on a local disk.") from error

    def get(self, name: str, size: int, start: int, stop: int, *, verify: bool = True
            ) -> bytes | None:
        """Return bytes of a block of `size` bytes; None: it is not here, or it was damaged.
        `verify=False`: the caller has sums of its own."""
        try:
            descriptor = os.open(f"{self.folder}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            data = (_verified(descriptor, size, start, stop) if verify else
                    os.pread(descriptor, stop - start, _head_bytes(size) + start))
            if data is not None and len(data) == stop - start:
                os.utime(descriptor)
                return data
        except OSError:
            pass  # the disk cannot give it
        finally:
            os.close(descriptor)
        self.drop(name)
        return None

    def drop(self, name: str) -> None:
        """Remove a block."""
        with suppress(OSError):
            os.unlink(f"{self.folder}/{name}")

    def put(self, name: str, data: bytes) -> None:
        """Keep a block, in place of those that were used longest ago."""
        body = _with_sums(data)
        if len(body) > self.most_bytes:
            return
        temporary = f"{self.folder}/{os.getpid()}-{next(COUNTER)}.tmp"
        try:
            if not self._reserve(len(body), name):
                return
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
                              0o600), "wb", buffering=0) as file:
                left = memoryview(body)
                while left:
                    left = left[file.write(left):]
            os.rename(temporary, f"{self.folder}/{name}")
        except OSError as error:
            with suppress(OSError):
                os.unlink(temporary)
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(f"the cache {self.folder} takes no block: {error}. Blocks come from "
                              f"the store. Free the disk, or name another folder (cache).",
                              stacklevel=2)

    @contextmanager
    def claims(self) -> Iterator[Callable[[str, bool], bool]]:
        """Give a function that claims blocks for this process until the end of the context: True if
        no other process has a claim on it. With `wait` it waits for that. The kernel ends the
        claims of a process that is killed."""
        descriptor = os.open(f"{self.folder}/{CLAIMS}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC,
                             0o600)

        def claim(name: str, wait: bool) -> bool:
            at = int(name[:15], 16)
            request = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
            try:
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, request)
            except OSError:  # another has it, or this filesystem has no locks
                return wait
            return True

        try:
            yield claim
        finally:
            os.close(descriptor)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the lock of the folder, whose file has the number of bytes in use."""
        descriptor = os.open(f"{self.folder}/{LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # ends with this process, too
            yield descriptor
        finally:
            os.close(descriptor)

    def _reserve(self, size: int, name: str) -> bool:
        """Count a block as in use; False: another process has written it meanwhile."""
        with self._locked() as descriptor:
            if os.path.exists(f"{self.folder}/{name}"):
                return False
            noted = os.pread(descriptor, 8, 0)
            used = int.from_bytes(noted, "little") if len(noted) == 8 else self.most_bytes
            if used + size > self.most_bytes:
                used = self._evict(self.most_bytes - size)
            os.pwrite(descriptor, (used + size).to_bytes(8, "little"), 0)
            return True

    def _evict(self, room: int) -> int:
        """Remove the blocks that were used longest ago until a tenth of `room` is free; returns how
        many bytes are left."""
        found: list[tuple[int, int, str]] = []
        for entry in os.scandir(self.folder):
            with suppress(OSError):  # removed meanwhile
                if entry.name.endswith(".tmp") and not _is_alive(entry.name):
                    os.unlink(entry.path)
                elif entry.name not in (LOCK, CLAIMS):
                    stat = entry.stat()
                    found.append((stat.st_mtime_ns, stat.st_size, entry.path))
        used = sum(size for _, size, _ in found)
        if used <= room:
            return used
        for _, size, path in sorted(found):
            if used <= room * (1 - FREED):
                break
            if not path.endswith(".tmp"):
                with suppress(FileNotFoundError):
                    os.unlink(path)
                used -= size
        return used


def _is_alive(temporary: str) -> bool:
    """Return whether the process that writes a temporary file is there."""
    try:
        os.kill(int(temporary.partition("-")[0]), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        pass
    return True


def _head_bytes(size: int) -> int:
    """Return where the data of a block begins in its file."""
    return HEAD.size + 4 * -(-size // PAGE_BYTES)


def _with_sums(data: bytes) -> bytes:
    view = memoryview(data)
    sums = numpy.array([zlib.crc32(view[at:at + PAGE_BYTES])
                        for at in range(0, len(view), PAGE_BYTES)], "<u4")
    return b"".join((HEAD.pack(MAGIC, len(data)), sums.tobytes(), data))


def _verified(descriptor: int, size: int, start: int, stop: int) -> bytes | None:
    """Return bytes of a block whose pages have their sums; None: they have not."""
    first, last = start // PAGE_BYTES, -(-stop // PAGE_BYTES)
    head = os.pread(descriptor, _head_bytes(size), 0)
    if len(head) != _head_bytes(size) or HEAD.unpack_from(head) != (MAGIC, size):
        return None
    begin, end = first * PAGE_BYTES, min(last * PAGE_BYTES, size)
    data = os.pread(descriptor, end - begin, len(head) + begin)
    if len(data) != end - begin:
        return None
    sums = numpy.frombuffer(head, "<u4", offset=HEAD.size)[first:last].tolist()
    view = memoryview(data)
    for place, right in enumerate(sums):
        if zlib.crc32(view[place * PAGE_BYTES:(place + 1) * PAGE_BYTES]) != right:
            return None
    return bytes(view[start - begin:stop - begin])
