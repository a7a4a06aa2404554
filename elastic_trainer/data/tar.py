"""Samples of tar archives in WebDataset's layout, by number.

    TarShards("s3://bucket/train-{000..099}.tar", cache="/mnt/cache", cache_bytes=50 * 2**30)

archives → index (once) → here → blocks: the bytes of a sample are one range

What always holds:
1. Files in a row whose names are the same up to the first dot of the last part are one sample. What
   is behind that dot is the name of a field, in lower case.
2. Every field has a CRC32 in the index, which is verified at each reading.
3. An archive that is cut off is refused when its index is built.

Source: WebDataset's naming (webdataset/tariterators.py, base_plus_ext and group_by_keys).
"""

from __future__ import annotations

import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy

from elastic_trainer.config import ConfigError
from elastic_trainer.data.blocks import BLOCK_BYTES, Blocks, make_cache
from elastic_trainer.data.decoders import Decode, decoders
from elastic_trainer.data.files import Files, Source
from elastic_trainer.data.index import (
    Index,
    Scanned,
    build_or_load,
    changed_meanwhile,
    common_folder,
    place_of,
    rebuild,
)

NAME = re.compile(r"^((?:.*/)?[^./][^./]*)\.([^/]+)$")
META = re.compile(r"__[^/]*__($|/)")
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
SCANS = 8
"""The number of archives that are read at the same time to build an index."""
BLOCK = 512
"""The unit of a tar archive, in bytes."""


@dataclass
class Members:
    """The fields of an archive's samples, in the order of the archive."""

    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """The number of fields of each sample."""
    keys: list[str] = field(default_factory=list)


class TarShards:
    """The samples of tar archives in WebDataset's layout, as a dataset with `len` and `[i]`.

    A sample is a dict: `__key__`, and a value for each field (`png`, `cls`); with `fields` a tuple
    of their values. `decode` is "tensor" (images as uint8 tensors in RGB), "pil" (images of
    Pillow), "bytes", or a dict from a field to a function of its bytes. `transform` is called with
    each sample. `cache` is a folder of this host that holds at most `cache_bytes` of data from
    stores, for all processes. `index` is the folder of the index (default: beside the data).

    Raises ConfigError.
    """

    def __init__(self, urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *,
                 fields: Sequence[str] | None = None,
                 decode: str | Mapping[str, Decode] = "tensor",
                 transform: Callable[[Any], Any] | None = None,
                 cache: str | os.PathLike[str] | None = None, cache_bytes: int = 10 << 30,
                 block_bytes: int = BLOCK_BYTES, index: str | os.PathLike[str] | None = None,
                 storage_options: dict[str, Any] | None = None):
        self.files = Files(storage_options)
        self.index = index_tars(self.files, urls, index)
        self.transform = transform
        self.blocks = Blocks(self.files, self.index.sources, make_cache(cache, cache_bytes),
                             block_bytes, verify=False)  # the fields have sums
        known: list[str] = self.index.facts["fields"]
        if fields is not None and (odd := sorted(set(fields) - set(known))):
            raise ConfigError(f"fields has {odd[0]!r}, and the samples have {', '.join(known)}. "
                              f"Correct the name.")
        self.fields = list(fields) if fields is not None else None
        wanted = known if fields is None else list(fields)
        self._decoders = decoders(wanted, decode)

    def __len__(self) -> int:
        return len(self.index.arrays["file"])

    def __getitem__(self, number: int) -> Any:
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return self.__getitems__([number % len(self)])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples; their ranges are read in parallel."""
        spans = [self._span(number) for number in numbers]
        wanted = [(file, members[0].start, members[-1].stop) for file, members in spans]
        samples = []
        for place, data in enumerate(self.blocks.read(wanted)):
            number, (file, members) = numbers[place], spans[place]
            if not _is_right(members, data):
                (data,) = self.blocks.read([wanted[place]], fresh=True)
                if not _is_right(members, data):
                    raise changed_meanwhile(self.index.sources[file].url, self.key(number))
            samples.append(self._sample(number, members, data))
        return samples

    def key(self, number: int) -> str:
        """Return the key of a sample: the path of its files up to the first dot."""
        ends = self.index.arrays["key_end"]
        start = int(ends[number - 1]) if number else 0
        key = self.index.arrays["keys"][start:int(ends[number])].tobytes()
        return key.decode("utf-8", "surrogateescape")

    def _span(self, number: int) -> tuple[int, list[Member]]:
        """Return the file of a sample and the fields that are wanted of it."""
        arrays, known = self.index.arrays, self.index.facts["fields"]
        first, last = (int(end) for end in arrays["first"][number:number + 2])
        members = [
            Member(known[name], offset, offset + size, right) for name, offset, size, right in zip(
                arrays["field"][first:last].tolist(), arrays["offset"][first:last].tolist(),
                arrays["size"][first:last].tolist(), arrays["sum"][first:last].tolist(),
                strict=True) if known[name] in self._decoders
        ]
        file = int(arrays["file"][number])
        if self.fields is not None and len(members) < len(self.fields):
            missing = set(self.fields) - {member.name for member in members}
            raise KeyError(f"sample {self.key(number)} of {self.index.sources[file].url} has no "
                           f"field {sorted(missing)[0]!r}")
        return file, members or [Member("", 0, 0, 0)]

    def _sample(self, number: int, members: list[Member], data: bytes) -> Any:
        start = members[0].start
        values = {member.name: self._decoders[member.name](
            data[member.start - start:member.stop - start]) for member in members if member.name}
        sample: Any = ({"__key__": self.key(number), **values} if self.fields is None else
                       tuple(values[name] for name in self.fields))
        return self.transform(sample) if self.transform else sample


@dataclass(frozen=True)
class Member:
    """One field of a sample: which bytes of its archive, and their CRC32."""

    name: str
    start: int
    stop: int
    sum: int


def _is_right(members: list[Member], data: bytes) -> bool:
    start, view = members[0].start, memoryview(data)
    return all(zlib.crc32(view[member.start - start:member.stop - start]) == member.sum
               for member in members)


# --- the index ------------------------------------------------------------------------------------

def index_tars(files: Files, urls: Any, where: Any, *, anew: bool = False) -> Index:
    """Return the index of archives; build it if there is none. Raises ConfigError."""
    expanded = files.expand(urls)
    place = place_of("tar", expanded, where)
    act = rebuild if anew else build_or_load
    return act(files, place, files.describe(expanded), lambda sources: build(files, sources))


def build(files: Files, sources: list[Source]) -> Index:
    """Read archives once, and return their index. Raises ConfigError, DataUnavailable."""
    with ThreadPoolExecutor(min(SCANS, len(sources))) as pool:
        scanned = list(pool.map(lambda source: scan(files, source), sources))
    names = sorted({name for members in scanned for name in members.names})
    number_of = {name: number for number, name in enumerate(names)}
    counts = numpy.array([count for members in scanned for count in members.counts], numpy.int64)
    keys = [key.encode("utf-8", "surrogateescape") for members in scanned for key in members.keys]
    if not keys:
        raise ConfigError(f"{sources[0].url} and the other archives have no sample: no "
                          f"file in them has a name with an extension. Name files as WebDataset "
                          f"does: 000001.png, 000001.cls.")
    folder = common_folder([source.url for source in sources])
    return Index("tar", folder, sources, {"fields": names}, {
        "file": numpy.repeat(numpy.arange(len(scanned), dtype="<u4"),
                             [len(members.keys) for members in scanned]),
        "first": numpy.concatenate([[0], numpy.cumsum(counts)]).astype("<i8"),
        "offset": numpy.array([at for members in scanned for at in members.offsets], "<u8"),
        "size": numpy.array([size for members in scanned for size in members.sizes], "<u8"),
        "sum": numpy.array([one for members in scanned for one in members.sums], "<u4"),
        "field": numpy.array([number_of[name] for members in scanned for name in members.names],
                             "<u2"),
        "key_end": numpy.cumsum([len(key) for key in keys]).astype("<i8"),
        "keys": numpy.frombuffer(b"".join(keys), "u1"),
    })


def scan(files: Files, source: Source) -> Members:
    """Read an archive from start to end, and return its samples. Raises ConfigError."""
    stream, found = Scanned(files, source), Members()
    if stream.read(6).startswith(COMPRESSED):
        raise ConfigError(f"{source.url} is compressed, so no sample can be read without those "
                          f"before it. Decompress it, and store compressed files in a plain tar.")
    stream.seek(0)
    seen = set[str]()
    try:
        with tarfile.open(fileobj=stream, mode="r:") as archive:  # type: ignore[call-overload]
            while member := archive.next():
                archive.members.clear()  # it would keep all
                if member.offset_data + member.size > source.size:
                    raise _cut_off(source, member.name)
                if member.issparse():
                    raise ConfigError(f"{source.url} has the sparse file {member.name}, which is "
                                      f"not in one piece. Write it without --sparse.")
                parts = NAME.match(member.name)
                if member.isreg() and parts and not META.match(member.name):
                    _add(found, source, seen, parts[1], parts[2].lower(), stream, member)
            end = archive.offset
    except tarfile.TarError as error:
        if "unexpected end" in str(error):
            raise _cut_off(source, found.keys[-1] if found.keys else "its start") from error
        raise ConfigError(f"{source.url} is no tar archive: {error}. Correct the list of files."
                          ) from error
    stream.seek(end)
    if stream.read(BLOCK) != bytes(BLOCK):
        raise _cut_off(source, found.keys[-1] if found.keys else "its start")
    return found


def _add(found: Members, source: Source, seen: set[str], key: str, name: str, stream: Scanned,
         member: tarfile.TarInfo) -> None:
    """Add a file of an archive to its sample."""
    if not found.keys or found.keys[-1] != key:
        if key in seen:
            raise ConfigError(f"{source.url} has files of the sample {key} that do not follow each "
                              f"other. Write the archive in the order of names: tar --sort=name.")
        seen.add(key)
        found.keys.append(key)
        found.counts.append(0)
    if name in found.names[len(found.names) - found.counts[-1]:]:
        raise ConfigError(f"{source.url} has the field {name} of the sample {key} twice. Write the "
                          f"archive again, with each file once.")
    stream.seek(member.offset_data)
    found.sums.append(zlib.crc32(stream.read(member.size)))
    found.offsets.append(member.offset_data)
    found.sizes.append(member.size)
    found.names.append(name)
    found.counts[-1] += 1


def _cut_off(source: Source, after: str) -> ConfigError:
    return ConfigError(f"{source.url} is cut off behind {after}: it has {source.size} bytes and no "
                       f"end of archive. Copy it again, or close the archive when it is written.")
