"""Blocks of files in a folder of this host, with a bound in bytes.

blocks → here → files of one folder, shared by all processes of the host

What always holds:
1. The blocks take at most `most_bytes`, and for each process at most one block more.
2. Blocks lie in a folder of their own (INNER) below the one that the user names. It is made with
   its marker in one step. Nothing outside of it is touched, and in it nothing but blocks.
3. Both folders belong to this user, and nobody else can write in them, or the cache is refused. The
   inner folder is opened once, and links are never followed.
4. A block has a BLAKE2b of its name and data, keyed by a secret of the folder. It is verified
   when a process first uses the block, and again if the file was written since. Every page of
   PAGE_BYTES has a CRC32 too, which is verified at each read, unless the caller has sums of its
   own. A damaged block is removed, and counts as absent.
5. A block is written to a temporary name and then renamed. A process that is killed leaves a whole
   block or none. The next eviction removes its temporary file.
6. The block that was used longest ago is evicted first. One eviction frees a tenth of the bound, so
   that the folder is listed rarely.

Measured on 2 cores: BLAKE2b takes 1.1 ms for a block of 1 MiB, once in each process; CRC32 0.25 ms.

What it does not do: fail. A disk that is full is a warning, and the data comes from the store.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import re
import secrets
import shutil
import stat
import struct
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy

from elastic_trainer.config import ConfigError
from elastic_trainer.host import locks

PAGE_BYTES = 16 << 10
MAGIC = b"ETblock2"
DIGEST_BYTES, KEY_BYTES = 32, 32
HEAD = struct.Struct(f"<8sQ{DIGEST_BYTES}s")
FREED = 0.1
"""The part of the bound that one eviction frees."""
INNER = "elastic-trainer-blocks"
MARKER, LOCK, CLAIMS = "elastic-trainer-cache", "lock", "claims"
"""The marker has the key."""
BLOCK, TEMPORARY = re.compile(r"[0-9a-f]{40}"), re.compile(r"([0-9]+)-[0-9]+\.tmp")
"""The names of the files that are evicted."""
MOST_VERIFIED = 1 << 17
"""The number of blocks that a process remembers as verified."""
COUNTER = itertools.count()
NO_LINKS = os.O_NOFOLLOW | os.O_CLOEXEC


class Cache:
    """A bounded folder of blocks."""

    def __init__(self, folder: str | os.PathLike[str], most_bytes: int):
        self.folder, self.most_bytes = os.path.abspath(folder), most_bytes
        self._has_warned = False
        self._verified: dict[str, tuple[int, int, int]] = {}
        if isinstance(most_bytes, bool) or not isinstance(most_bytes, int) or most_bytes < 1:
            raise ConfigError(f"cache_bytes is {most_bytes!r}. Use a whole number of bytes above 0,"
                              f" e.g. 10 * 2**30.")
        self._open()

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "most_bytes": self.most_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __del__(self) -> None:
        if hasattr(self, "_inner"):
            with suppress(OSError):
                os.close(self._inner)

    def _open(self) -> None:
        """Make the folder, or accept the one that is there. Raises ConfigError."""
        try:
            os.makedirs(self.folder, exist_ok=True, mode=0o700)
            _require_own(self.folder, os.stat(self.folder))
            inner = os.path.join(self.folder, INNER)
            if not os.path.lexists(inner):
                _make(self.folder, inner)
            self._inner = os.open(inner, os.O_RDONLY | os.O_DIRECTORY | NO_LINKS)
            _require_own(inner, os.fstat(self._inner))
            self._key = _key_of(self._inner)
        except OSError as error:
            raise ConfigError(f"cache is {self.folder!r}, where no folder of a cache can be used: "
                              f"{error}. Name a folder on a local disk.") from error
        if self._key is None:
            raise ConfigError(f"{inner} has no marker ({MARKER}), so no cache has made it. Remove "
                              f"it, or name another folder (cache).")

    def get(self, name: str, size: int, start: int, stop: int, *, verify: bool = True
            ) -> bytes | None:
        """Return bytes of a block of `size` bytes; None: it is not here, or it was damaged.
        `verify=False`: the caller has sums of its own."""
        try:
            descriptor = os.open(name, os.O_RDONLY | NO_LINKS, dir_fd=self._inner)
        except FileNotFoundError:
            return None
        except OSError:  # a link, for example
            self.drop(name)
            return None
        try:
            found = os.fstat(descriptor)
            written_ns = found.st_mtime_ns
            is_known = self._verified.get(name) == (found.st_ino, found.st_size, written_ns)
            if is_known or self._is_right(descriptor, name, size, found):
                data = (_verified(descriptor, size, start, stop) if verify else
                        os.pread(descriptor, stop - start, _head_bytes(size) + start))
                if data is not None and len(data) == stop - start:
                    # What was used last; and what was not written since it was verified.
                    os.utime(descriptor, ns=(time.time_ns(), written_ns))
                    return data
        except OSError:
            pass  # the disk cannot give it
        finally:
            os.close(descriptor)
        self.drop(name)
        return None

    def _is_right(self, descriptor: int, name: str, size: int, found: os.stat_result) -> bool:
        """Return whether a block is one that this cache has written, as it has written it."""
        length = _head_bytes(size) + size
        if not stat.S_ISREG(found.st_mode) or found.st_size != length:
            return False
        data = os.pread(descriptor, length, 0)
        if len(data) != length:
            return False
        magic, noted, digest = HEAD.unpack_from(data)
        if (magic, noted) != (MAGIC, size) or not secrets.compare_digest(
                digest, self._digest(name, memoryview(data)[HEAD.size:])):
            return False
        self._note_verified(name, found)
        return True

    def _digest(self, name: str, *parts: memoryview | bytes) -> bytes:
        """Return the digest of a block: of its name, its sums and its data."""
        digest = hashlib.blake2b(name.encode(), digest_size=DIGEST_BYTES, key=self._key or b"")
        for part in parts:
            digest.update(part)
        return digest.digest()

    def _note_verified(self, name: str, found: os.stat_result) -> None:
        """Note what changes when a block is written or replaced."""
        if len(self._verified) >= MOST_VERIFIED:
            self._verified.clear()
        self._verified[name] = found.st_ino, found.st_size, found.st_mtime_ns

    def drop(self, name: str) -> None:
        """Remove a block."""
        with suppress(OSError):
            os.unlink(name, dir_fd=self._inner)

    def put(self, name: str, data: bytes) -> None:
        """Keep a block, in place of those that were used longest ago."""
        if not BLOCK.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a block: use 40 hexadecimal digits")
        sums = _sums(data)
        head = HEAD.pack(MAGIC, len(data), self._digest(name, sums, data))
        size = len(head) + len(sums) + len(data)
        if size > self.most_bytes:
            return
        temporary = f"{os.getpid()}-{next(COUNTER)}.tmp"
        try:
            if not self._reserve(size, name):
                return
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINKS, 0o600,
                              dir_fd=self._inner), "wb", buffering=0) as file:
                for part in (head, sums, data):
                    left = memoryview(part)
                    while left:
                        left = left[file.write(left):]
                os.rename(temporary, name, src_dir_fd=self._inner, dst_dir_fd=self._inner)
                self._note_verified(name, os.fstat(file.fileno()))
        except OSError as error:
            self.drop(temporary)
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
        descriptor = self._opened(CLAIMS)

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

    def _opened(self, name: str) -> int:
        """Open a file of the cache that is no block, which is made if it is not there."""
        return os.open(name, os.O_RDWR | os.O_CREAT | NO_LINKS, 0o600, dir_fd=self._inner)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the lock of the folder, whose file has the number of bytes in use."""
        descriptor = self._opened(LOCK)
        try:
            locks.take(descriptor)
            yield descriptor
        finally:
            os.close(descriptor)

    def _reserve(self, size: int, name: str) -> bool:
        """Count a block as in use; False: another process has written it meanwhile."""
        with self._locked() as descriptor:
            with suppress(FileNotFoundError):
                os.stat(name, dir_fd=self._inner, follow_symlinks=False)
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
        # Of its own: forked processes share the position in that of `_inner`.
        listed = os.open(".", os.O_RDONLY | os.O_DIRECTORY | NO_LINKS, dir_fd=self._inner)
        try:
            names = os.listdir(listed)
        finally:
            os.close(listed)
        for name in names:
            with suppress(OSError):  # removed meanwhile
                if (writer := TEMPORARY.fullmatch(name)) and not _is_alive(writer[1]):
                    os.unlink(name, dir_fd=self._inner)
                elif writer or BLOCK.fullmatch(name):
                    of_file = os.stat(name, dir_fd=self._inner, follow_symlinks=False)
                    if stat.S_ISREG(of_file.st_mode):
                        found.append((of_file.st_atime_ns, of_file.st_size, name))
        used = sum(size for _, size, _ in found)
        if used <= room:
            return used
        for _, size, name in sorted(found):
            if used <= room * (1 - FREED):
                break
            if BLOCK.fullmatch(name):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._inner)
                used -= size
        return used


def _require_own(path: str, found: os.stat_result) -> None:
    """Raise ConfigError for a folder of another user, or one that others can write in."""
    if found.st_uid != os.getuid():
        raise ConfigError(f"cache is {path!r}, which belongs to the user {found.st_uid} and not to "
                          f"{os.getuid()}. Name a folder of your own, or one that is not there "
                          f"yet.")
    if found.st_mode & 0o022:
        raise ConfigError(f"cache is {path!r}, in which other users can write (mode "
                          f"{stat.S_IMODE(found.st_mode):o}). Run: chmod go-w {path}, or name a "
                          f"folder that is not there yet.")


def _make(folder: str, inner: str) -> None:
    """Make the folder of the blocks, with its marker in it from the start."""
    prepared = tempfile.mkdtemp(prefix=f".{INNER}-", dir=folder)  # 0700
    try:
        with open(os.open(f"{prepared}/{MARKER}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINKS,
                          0o600), "wb") as file:
            file.write(MAGIC + secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        os.rename(prepared, inner)
    except OSError:
        shutil.rmtree(prepared, ignore_errors=True)
        if not os.path.lexists(inner):  # else another process was faster
            raise


def _key_of(inner: int) -> bytes | None:
    """Return the key of a folder of blocks; None: it has no marker."""
    try:
        descriptor = os.open(MARKER, os.O_RDONLY | NO_LINKS, dir_fd=inner)
    except OSError:
        return None
    try:
        data = os.read(descriptor, len(MAGIC) + KEY_BYTES + 1)
    finally:
        os.close(descriptor)
    is_right = data.startswith(MAGIC) and len(data) == len(MAGIC) + KEY_BYTES
    return data[len(MAGIC):] if is_right else None


def _is_alive(pid: str) -> bool:
    """Return whether a process is there: the writer of a temporary file."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _head_bytes(size: int) -> int:
    """Return where the data of a block begins in its file."""
    return HEAD.size + 4 * -(-size // PAGE_BYTES)


def _sums(data: bytes) -> bytes:
    """Return the sums of the pages of a block."""
    view = memoryview(data)
    return numpy.array([zlib.crc32(view[at:at + PAGE_BYTES])
                        for at in range(0, len(view), PAGE_BYTES)], "<u4").tobytes()


def _verified(descriptor: int, size: int, start: int, stop: int) -> bytes | None:
    """Return bytes of a block whose pages have their sums; None: they have not."""
    first, last = start // PAGE_BYTES, -(-stop // PAGE_BYTES)
    head = os.pread(descriptor, _head_bytes(size), 0)
    if len(head) != _head_bytes(size) or HEAD.unpack_from(head)[:2] != (MAGIC, size):
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
