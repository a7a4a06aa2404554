"""Samples of tar archives in WebDataset's layout, by number.

    TarShards("s3://bucket/train-{000..099}.tar", cache="/mnt/cache", cache_bytes=50 * 2**30)

archives → index (once) → here → blocks: the bytes of a sample are one range

What always holds:
1. Files in a row whose names are the same up to the first dot of the last part are one sample. What
   is after that dot is the name of a field, in lower case.
2. Every field has a CRC32 in the index, which is verified at each reading.
3. Each byte of an archive is accounted for when its index is built (archive.py). What is no field
   of a sample is told with its number and place, and so is a name that may not mean what it says.
4. A hard link has the bytes of its target, which may lie anywhere before it.

Source: WebDataset's naming (webdataset/tariterators.py, base_plus_ext and group_by_keys).
"""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy

from elastic_trainer.config import ConfigError
from elastic_trainer.data import archive
from elastic_trainer.data.blocks import BLOCK_BYTES, Blocks, Numbered, make_cache
from elastic_trainer.data.decoders import Decode, decoders, raise_located
from elastic_trainer.data.files import Files, Source
from elastic_trainer.data.index import (
    Index,
    Kind,
    Scanned,
    changed_meanwhile,
    common_folder,
    index_of,
    is_list_of_texts,
    tell,
)

NAME = re.compile(r"^((?:.*/)?[^./][^./]*)\.([^/]+)$")
META = re.compile(r"__[^/]*__($|/)")
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
SCANS = 8
"""The number of archives that are read at the same time to build an index."""
MOST_FIELDS = 1 << 16
"""The number of different fields that an index can hold."""


class TarShards(Numbered):
    """The samples of tar archives in WebDataset's layout, as a dataset with `len` and `[i]`.

    A sample is a dict: `__key__`, and a value for each field (`png`, `cls`); with `fields` a tuple
    of their values. `decode` is "tensor" (images as uint8 tensors in RGB), "pil" (images of
    Pillow), "bytes", or a dict from a field to a function of its bytes. `transform` is called with
    each sample. `cache` is a folder of this host that holds at most `cache_bytes` of data from
    stores, for all processes. `index` is the folder of the index (default: beside the data).
    `ignore_zeros` reads an archive on after its end, as it is where archives were joined, or where
    the end is missing.

    Raises ConfigError.
    """

    def __init__(self, urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *,
                 fields: Sequence[str] | None = None,
                 decode: str | Mapping[str, Decode] = "tensor",
                 transform: Callable[[Any], Any] | None = None,
                 cache: str | os.PathLike[str] | None = None, cache_bytes: int = 10 << 30,
                 block_bytes: int = BLOCK_BYTES, index: str | os.PathLike[str] | None = None,
                 storage_options: dict[str, Any] | None = None, ignore_zeros: bool = False):
        self.files = Files(storage_options)
        self.index = index_tars(self.files, urls, index, ignore_zeros=ignore_zeros)
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
        self._own = frozenset(decode) if isinstance(decode, Mapping) else frozenset[str]()
        self._has_links: bool = self.index.facts["has_links"]

    def __len__(self) -> int:
        return len(self.index.arrays["file"])

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples; their ranges are read in parallel."""
        spans = [self._span(number) for number in numbers]
        samples = []
        for number, span, bodies in zip(numbers, spans, self._read(spans), strict=True):
            if not _is_right(span[1], bodies):
                (bodies,) = self._read([span], fresh=True)
                if not _is_right(span[1], bodies):
                    raise changed_meanwhile(self.index.sources[span[0]].url, self.key(number))
            samples.append(self._sample(number, span, bodies))
        return samples

    def key(self, number: int) -> str:
        """Return the key of a sample: the path of its files up to the first dot."""
        ends = self.index.arrays["key_end"]
        start = int(ends[number - 1]) if number else 0
        key = self.index.arrays["keys"][start:int(ends[number])].tobytes()
        return key.decode("utf-8", "surrogateescape")

    def _span(self, number: int) -> Span:
        """Return the file of a sample and the fields that are wanted of it."""
        arrays, known = self.index.arrays, self.index.facts["fields"]
        first, last = arrays["first"][number:number + 2].tolist()
        members = [
            Member(known[name], offset, offset + size, right) for name, offset, size, right in zip(
                arrays["field"][first:last].tolist(), arrays["offset"][first:last].tolist(),
                arrays["size"][first:last].tolist(), arrays["sum"][first:last].tolist(),
                strict=True) if known[name] in self._decoders
        ]
        file = int(arrays["file"][number])
        if self.fields is not None and len(members) < len(set(self.fields)):
            missing = set(self.fields) - {member.name for member in members}
            raise KeyError(f"sample {self.key(number)} of {self.index.sources[file].url} has no "
                           f"field {sorted(missing)[0]!r}")
        return file, members or [Member("", 0, 0, 0)]

    def _read(self, spans: Sequence[Span], *, fresh: bool = False) -> list[list[bytes]]:
        """Return the bytes of the fields of samples."""
        if self._has_links:  # fields may lie far from each other
            pieces = iter(self.blocks.read([(file, one.start, one.stop) for file, members in spans
                                            for one in members], fresh=fresh))
            return [[next(pieces) for _ in members] for _, members in spans]
        found = self.blocks.read([(file, members[0].start, members[-1].stop)
                                  for file, members in spans], fresh=fresh)
        return [[data[one.start - members[0].start:one.stop - members[0].start] for one in members]
                for (_, members), data in zip(spans, found, strict=True)]

    def _sample(self, number: int, span: Span, bodies: list[bytes]) -> Any:
        values: dict[str, Any] = {}
        name = ""
        try:
            for (name, _, _, _), body in zip(span[1], bodies, strict=True):
                if name:
                    values[name] = self._decoders[name](body)
            name = ""
            sample: Any = ({"__key__": self.key(number), **values} if self.fields is None else
                           tuple(values[name] for name in self.fields))
            return self.transform(sample) if self.transform else sample
        except Exception as error:
            where = f"sample {number} (key {self.key(number)!r})"
            where += f", field {name!r}" if name else ""
            raise_located(error, f"{where}, in {self.index.sources[span[0]].url}",
                          is_ours=bool(name) and name not in self._own)


class Member(NamedTuple):
    """One field of a sample: which bytes of its archive, and their CRC32."""

    name: str
    start: int
    stop: int
    sum: int


Span = tuple[int, list[Member]]
"""The number of a file, and fields of a sample in it."""


def _is_right(members: list[Member], bodies: list[bytes]) -> bool:
    return all(zlib.crc32(body) == member.sum
               for member, body in zip(members, bodies, strict=True))


# --- the index ------------------------------------------------------------------------------------

def index_tars(files: Files, urls: Any, where: Any, *, anew: bool = False,
               ignore_zeros: bool = False) -> Index:
    """Return the index of archives; build it if there is none. Raises ConfigError."""
    return index_of(files, urls, where, TAR, lambda sources: build(files, sources, ignore_zeros),
                    anew=anew, how="ignore_zeros" if ignore_zeros else "")


def build(files: Files, sources: list[Source], ignore_zeros: bool = False) -> Index:
    """Read archives once, and return their index. Raises ConfigError, DataUnavailable."""
    with ThreadPoolExecutor(min(SCANS, len(sources))) as pool:
        scanned = list(pool.map(lambda source: scan(files, source, ignore_zeros), sources))
    names = sorted({name for found in scanned for name in found.names})
    for found in scanned:
        if len(names) > MOST_FIELDS:
            raise _too_many(found.source, found.keys[-1], found.names[-1])
    number_of = {name: number for number, name in enumerate(names)}
    counts = numpy.array([count for found in scanned for count in found.counts], numpy.int64)
    keys = [key.encode("utf-8", "surrogateescape") for found in scanned for key in found.keys]
    folder = common_folder([source.url for source in sources])
    told = told_of(scanned, folder)
    if not keys:
        raise ConfigError(f"{sources[0].url} and the other archives have no sample: no "
                          f"file in them has a name with an extension. Name files as WebDataset "
                          f"does: 000001.png, 000001.cls. {' '.join(told)}".rstrip())
    facts = {"fields": names, "has_links": any(found.has_links for found in scanned), "told": told}
    return tell(Index("tar", folder, sources, facts, {
        "file": numpy.repeat(numpy.arange(len(scanned), dtype="<u4"),
                             [len(found.keys) for found in scanned]),
        "first": numpy.concatenate([[0], numpy.cumsum(counts)]).astype("<i8"),
        "offset": numpy.array([at for found in scanned for at in found.offsets], "<u8"),
        "size": numpy.array([size for found in scanned for size in found.sizes], "<u8"),
        "sum": numpy.array([one for found in scanned for one in found.sums], "<u4"),
        "field": numpy.array([number_of[name] for found in scanned for name in found.names],
                             "<u2"),
        "key_end": numpy.cumsum([len(key) for key in keys]).astype("<i8"),
        "keys": numpy.frombuffer(b"".join(keys), "u1"),
    }))


@dataclass
class Samples:
    """The fields of an archive's samples, in the order of the archive, and what is none."""

    source: Source
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """The number of fields of each sample."""
    keys: list[str] = field(default_factory=list)
    has_links: bool = False
    left_out: dict[str, tuple[int, archive.Member]] = field(default_factory=dict)
    """For each kind of what is no field: how many there are, and the first of them."""
    seen: set[str] = field(default_factory=set)
    """The keys."""
    files: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Offset, size and CRC32 of each file: what a hard link may lead to."""

    def leave_out(self, kind: str, member: archive.Member) -> None:
        """Count a member that is no field of a sample."""
        count, first = self.left_out.get(kind, (0, member))
        self.left_out[kind] = count + 1, first

    def add(self, key: str, name: str, place: tuple[int, int, int]) -> None:
        """Add a file to its sample. Raises ConfigError."""
        if not self.keys or self.keys[-1] != key:
            if key in self.seen:
                raise ConfigError(f"{self.source.url} has files of the sample {key} that do not "
                                  f"follow each other. Write the archive in the order of names: "
                                  f"tar --sort=name.")
            self.seen.add(key)
            self.keys.append(key)
            self.counts.append(0)
        if self.counts[-1] >= MOST_FIELDS:
            raise _too_many(self.source, key, name)
        self.names.append(name)
        self.counts[-1] += 1
        for values, value in zip((self.offsets, self.sizes, self.sums), place, strict=True):
            values.append(value)


def scan(files: Files, source: Source, ignore_zeros: bool = False) -> Samples:
    """Read an archive from start to end, and return its samples. Raises ConfigError."""
    stream, found = Scanned(files, source), Samples(source)
    if stream.read(6).startswith(COMPRESSED):
        raise ConfigError(f"{source.url} is compressed, so no sample can be read without those "
                          f"before it. Decompress it, and store compressed files in a plain tar.")
    fields = set[str]()
    """Those of the last sample."""
    for member in archive.members(source.url, stream, source.size, ignore_zeros=ignore_zeros):
        is_link = member.kind == "hard link"
        place = found.files.get(member.target) if is_link else None
        if member.kind == "file":
            stream.seek(member.start)
            place = member.start, member.size, _sum(stream, member.size)
        if place is None:
            if member.kind != "folder":
                kind = "hard link to a file that is not before it" if is_link else member.kind
                found.leave_out(kind, member)
            continue
        found.files[member.name] = place
        parts = NAME.match(member.name)
        if not parts or META.match(member.name):
            found.leave_out(_why_no_field(member.name), member)
            continue
        key, name = parts[1], parts[2].lower()
        if name == "__key__":
            raise ConfigError(f"{source.url} has the file {member.name!r}, whose field would be "
                              f"in the place of the sample's key. Rename it.")
        if not found.keys or found.keys[-1] != key:
            fields.clear()
        if name in fields:
            raise ConfigError(f"{source.url} has the field {name} of the sample {key} twice. Write "
                              f"the archive again, with each file once.")
        fields.add(name)
        found.add(key, name, place)
        found.has_links |= is_link
    found.files.clear()
    return found


def _sum(stream: Scanned, size: int) -> int:
    """Return the CRC32 of the next bytes."""
    total = 0
    while size:
        piece = stream.read(min(size, archive.PIECE))
        total, size = zlib.crc32(piece, total), size - len(piece)
    return total


def _why_no_field(name: str) -> str:
    if META.match(name):
        return "file with a reserved name (__…__)"
    last = name.rpartition("/")[2]
    return ("file without a name" if not last else
            "hidden file" if last.startswith(".") else "file without an extension")


def _too_many(source: Source, key: str, name: str) -> ConfigError:
    return ConfigError(f"{source.url} has {key}.{name}, and with it the archives have more than "
                       f"{MOST_FIELDS} different fields. What is after the first dot of a name is "
                       f"a field: write 000001.txt, and no dot in what names the sample.")


def told_of(scanned: Sequence[Samples], folder: str) -> list[str]:
    """Return sentences about what is no field of a sample, and about names that may not mean what
    they say. Files are named relative to their folder."""
    kinds = dict.fromkeys(kind for found in scanned for kind in found.left_out)
    told = []
    for kind in kinds:
        have = [(found.source, *found.left_out[kind]) for found in scanned
                if kind in found.left_out]
        count, (source, _, first) = sum(one[1] for one in have), have[0]
        told.append(f"No sample has {count} of the archives' members ({kind}): the first is "
                    f"{first.name!r} at byte {first.header} of {source.url[len(folder):]}.")
    samples = sum(len(found.keys) for found in scanned)
    number = Counter(name for found in scanned for name in found.names)
    for found in scanned:
        keys = (key for key, count in zip(found.keys, found.counts, strict=True)
                for _ in range(count))
        for key, name in zip(keys, found.names, strict=True):
            if "." in name and (samples == 1 or number[name] < samples):
                told.append(f"{found.source.url[len(folder):]} has the file '{key}.{name}', which "
                            f"is the field {name!r} of the sample {key!r}. If that sample is "
                            f"'{key}.{name.rpartition('.')[0]}', write its name without dots.")
                return _printable(told)
    return _printable(told)


def _printable(sentences: list[str]) -> list[str]:
    """Return sentences with names that are no UTF-8 in a form that every terminal prints."""
    return [one.encode("utf-8", "backslashreplace").decode() for one in sentences]


def _flaw(index: Index) -> str:
    """Return what is wrong with the content of an index; "": nothing."""
    facts, arrays = index.facts, index.arrays
    if not (facts.keys() == {"fields", "has_links", "told"} and is_list_of_texts(facts["told"])
            and is_list_of_texts(facts["fields"]) and isinstance(facts["has_links"], bool)
            and len(set(facts["fields"])) == len(facts["fields"])):
        return "its facts are not those of archives"
    samples, fields = len(arrays["file"]), len(arrays["field"])
    first, ends = arrays["first"], arrays["key_end"]
    if not samples or len(first) != samples + 1 or len(ends) != samples or any(
            len(arrays[name]) != fields for name in ("offset", "size", "sum")):
        return "its arrays do not fit each other"
    if first[0] != 0 or first[-1] != fields or (numpy.diff(first) <= 0).any():
        return "its samples do not follow each other"
    if ends[0] < 0 or (numpy.diff(ends) < 0).any() or ends[-1] != len(arrays["keys"]):
        return "its keys do not follow each other"
    if arrays["file"].max() >= len(index.sources) or arrays["field"].max() >= len(facts["fields"]):
        return "it names files or fields that it does not have"
    of_file = numpy.array([source.size for source in index.sources], "<u8")
    most = numpy.repeat(of_file[arrays["file"]], numpy.diff(first))
    start, size = arrays["offset"], arrays["size"]
    if (start > most).any() or (size > most - start).any():
        return "it has fields after the end of their file"
    inner = numpy.ones(fields, bool)
    inner[first[:-1]] = False
    if not facts["has_links"] and (start[1:] < start[:-1] + size[:-1])[inner[1:]].any():
        return "its fields are not in the order of the archive"
    return ""


TAR = Kind("tar", {"file": "<u4", "first": "<i8", "offset": "<u8", "size": "<u8", "sum": "<u4",
                   "field": "<u2", "key_end": "<i8", "keys": "|u1"}, _flaw)
