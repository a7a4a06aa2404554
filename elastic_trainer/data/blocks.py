"""Ranges of the files of a dataset, from the cache of this host or from the store.

TarShards, ParquetFiles, ImageFolder → here → cache, files

What always holds:
1. A file on a disk is read where it is. The cache is for stores.
2. A part of the dataset that the cache has room for is read in blocks, which are kept. The other
   part is read range by range, and is not kept. Which part a block belongs to follows from its
   number. In a random order each block is used once in an epoch. An LRU cache that is smaller than
   the dataset would evict most blocks before their next use.
3. Ranges that touch, or nearly, are one request. Requests are made in parallel.
4. Processes of a host that need the same block at the same time read it once.
"""

from __future__ import annotations

import errno
import hashlib
import os
import warnings
from collections.abc import Sequence
from typing import Any

from elastic_trainer.config import ConfigError
from elastic_trainer.data.cache import Cache
from elastic_trainer.data.files import Files, Range, Source, is_remote

BLOCK_BYTES = 1 << 20
"""The default size of a block. A request to Ceph costs 2 ms of CPU and 1 ms for 1 MiB: smaller
blocks cost more requests, larger ones read more for the first samples."""
GROUP = 64
"""Blocks in a row that are kept together, or not at all."""
GAP_BYTES, MERGED_BYTES = 32 << 10, 8 << 20
"""Ranges with a smaller gap are one request, up to this size."""
MOST_NAMES = 1 << 17
"""The number of names of blocks that a process keeps."""
WAVE = 64
"""The number of blocks that are in memory at once."""
Wanted = tuple[int, int, int]
"""The number of a file, start and stop."""


class Numbered:
    """A dataset that reads several samples at once: `[i]` is one of them, from the end if i < 0."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        raise NotImplementedError

    def __getitem__(self, number: int) -> Any:
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return self.__getitems__([number % len(self)])[0]


class Blocks:
    """Reads ranges of the files of a dataset."""

    def __init__(self, files: Files, sources: Sequence[Source], cache: Cache | None,
                 block_bytes: int = BLOCK_BYTES, *, verify: bool = True):
        if isinstance(block_bytes, bool) or not isinstance(block_bytes, int) or block_bytes < 4096:
            raise ConfigError(f"block_bytes is {block_bytes!r}. Use a whole number of 4096 or "
                              f"more; {BLOCK_BYTES} is the default.")
        self.files, self.sources, self.cache = files, list(sources), cache
        self.block_bytes, self.verify = block_bytes, verify
        self._names: dict[tuple[int, int], str] = {}
        self.requests = 0
        """How many ranges this process has read from the files."""
        total = sum(source.size for source in sources if is_remote(source.url))
        # A block has 24 bytes for each 16 KiB page, and its last page may be short.
        room = (cache.most_bytes * 0.89 if cache else 0)
        self._kept = 1.0 if room >= total else room / total

    def read(self, wanted: Sequence[Wanted], *, fresh: bool = False) -> list[bytes]:
        """Read ranges. `fresh`: from the files, and into the cache."""
        found: list[bytes | None] = [None] * len(wanted)
        kept = [place for place, one in enumerate(wanted) if self._is_kept(one)]
        self._read_kept(wanted, kept, found, fresh)
        left = [place for place, data in enumerate(found) if data is None]
        for place, data in zip(left, self._read_merged([wanted[at] for at in left]), strict=True):
            found[place] = data
        return [data for data in found if data is not None]

    def _is_kept(self, one: Wanted) -> bool:
        file, start, stop = one
        if not self.cache or stop == start or not is_remote(self.sources[file].url):
            return False
        groups = range(start // self.block_bytes // GROUP,
                       (stop - 1) // self.block_bytes // GROUP + 1)
        return self._kept >= 1.0 or all(
            _fraction(f"{self.sources[file].url} {group}") < self._kept for group in groups)

    def _read_kept(self, wanted: Sequence[Wanted], places: Sequence[int],
                   found: list[Any], fresh: bool) -> None:
        """Read ranges through the cache, block by block."""
        assert self.cache or not places
        pieces: dict[int, dict[int, bytes]] = {place: {} for place in places}
        missing: dict[tuple[int, int], list[int]] = {}
        for place in places:
            file, start, stop = wanted[place]
            for block in range(start // self.block_bytes, (stop - 1) // self.block_bytes + 1):
                begin, end = self._part(wanted[place], block)
                if fresh and self.cache:
                    self.cache.drop(self._name(file, block))
                data = None if fresh or not self.cache else self.cache.get(
                    self._name(file, block), self._size(file, block), begin, end,
                    verify=self.verify)
                if data is None:
                    missing.setdefault((file, block), []).append(place)
                else:
                    pieces[place][block] = data
        keys = list(missing)
        for at in range(0, len(keys), WAVE):
            self._fetch(wanted, keys[at:at + WAVE], missing, pieces)
        for place in places:
            found[place] = b"".join(pieces[place][block] for block in sorted(pieces[place]))

    def _fetch(self, wanted: Sequence[Wanted], keys: Sequence[tuple[int, int]],
               missing: dict[tuple[int, int], list[int]],
               pieces: dict[int, dict[int, bytes]]) -> None:
        """Read blocks; those that another process of the host reads now come from the cache."""
        assert self.cache
        found: dict[tuple[int, int], bytes] = {}
        with self.cache.claims() as claim:
            mine = [key for key in keys if claim(self._name(*key), False)]
            found |= zip(mine, self._read_blocks(mine), strict=True)
        for key in keys:
            if key in found:
                continue
            with self.cache.claims() as claim:
                claim(self._name(*key), True)
                size = self._size(*key)
                data = self.cache.get(self._name(*key), size, 0, size)
                found[key] = self._read_blocks([key])[0] if data is None else data
        for (file, block), data in found.items():
            for place in missing[file, block]:
                begin, end = self._part(wanted[place], block)
                pieces[place][block] = data[begin:end]

    def _read_blocks(self, keys: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read blocks from the files into the cache."""
        assert self.cache
        ranges = [Range(self.sources[file].url, block * self.block_bytes,
                        block * self.block_bytes + self._size(file, block)) for file, block in keys]
        self.requests += len(ranges)
        read = self.files.read(ranges)
        for key, data in zip(keys, read, strict=True):
            self.cache.put(self._name(*key), data)
        return read

    def _part(self, one: Wanted, block: int) -> tuple[int, int]:
        """Return which bytes of a block a range has."""
        _, start, stop = one
        first = block * self.block_bytes
        return max(start - first, 0), min(stop - first, self.block_bytes)

    def _size(self, file: int, block: int) -> int:
        return min(self.block_bytes, self.sources[file].size - block * self.block_bytes)

    def _name(self, file: int, block: int) -> str:
        name = self._names.get((file, block))
        if name is None:
            source = self.sources[file]
            text = f"{source.url} {source.size} {source.tag} {self.block_bytes} {block}"
            name = hashlib.sha256(text.encode()).hexdigest()[:40]
            if len(self._names) < MOST_NAMES:
                self._names[file, block] = name
        return name

    def _read_merged(self, wanted: Sequence[Wanted]) -> list[bytes]:
        """Read ranges of the files; those that nearly touch by one request."""
        merged: list[list[int]] = []
        where: dict[int, tuple[int, int]] = {}
        for place in sorted(range(len(wanted)), key=lambda at: wanted[at]):
            file, start, stop = wanted[place]
            last = merged[-1] if merged else None
            if (last and last[0] == file and start - last[2] <= GAP_BYTES
                    and stop - last[1] <= MERGED_BYTES):
                last[2] = max(last[2], stop)
            else:
                merged.append([file, start, stop])
            where[place] = len(merged) - 1, start - merged[-1][1]
        self.requests += len(merged)
        data = self.files.read([Range(self.sources[file].url, start, stop)
                                for file, start, stop in merged])
        return [data[at][begin:begin + wanted[place][2] - wanted[place][1]]
                for place, (at, begin) in sorted(where.items())]


def make_cache(folder: str | os.PathLike[str] | None, most_bytes: int) -> Cache | None:
    """Return the cache of a dataset's options; None, with a warning, if the disk is full. Raises
    ConfigError."""
    if folder is None:
        return None
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise ConfigError(f"cache is {folder!r}. Name a folder on a local disk, or use None.")
    try:
        return Cache(folder, most_bytes)
    except ConfigError as error:
        if getattr(error.__cause__, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
            raise
        warnings.warn(f"the cache {folder} takes no block: {error.__cause__}. Blocks come from the "
                      f"store. Free the disk, or name another folder (cache).", stacklevel=3)
        return None


def _fraction(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") / 2**32
