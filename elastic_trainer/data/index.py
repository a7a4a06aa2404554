"""The index of a dataset: where each sample is. It is built once and stored.

scan of the files → here → beside the data, or where `index` says → every worker

What always holds:
1. An index names its files with size and tag (ETag). Files that differ from their index are an
   error, never another numbering of the samples.
2. It is written once (put-if-absent). A process that loses the race reads the winner's.
3. It ends with the SHA-256 of all that precedes it. It has numbers and texts, and no pickle. A sum
   proves no author: types, shapes and ranges of what it says are checked too, and it names files
   inside of the folder of the dataset alone.
4. The names of the files are relative to their folder. Data that is copied with its index keeps
   it.

Format: MAGIC, length of the header (8 bytes, little-endian), header (JSON), arrays, SHA-256.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy

from elastic_trainer.config import ConfigError
from elastic_trainer.data.alone import alone_on_host
from elastic_trainer.data.files import DataUnavailable, Files, Range, Source, is_remote

MAGIC = b"elastic-trainer index 2\n"
FOLDER = ".elastic-trainer"
"""The folder beside the data that has its indexes."""
LARGE_BYTES = 1 << 30
"""Building the index of more bytes than this without being asked is a warning."""
Build = Callable[[list[Source]], "Index"]


@dataclass(frozen=True)
class Index:
    """The files of a dataset, what is known of all of them, and arrays over samples."""

    kind: str
    folder: str
    """The folder of the files, with its last slash. The stored index does not have it."""
    sources: list[Source]
    facts: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, numpy.ndarray] = field(default_factory=dict)

    @cached_property
    def sha256(self) -> str:
        """The identity of an index: the same in every process that reads the same samples."""
        return hashlib.sha256(self.body()).hexdigest()

    def body(self) -> bytes:
        """Return the index without its sum."""
        header = json.dumps({
            "kind": self.kind, "facts": self.facts,
            "sources": [[source.url[len(self.folder):], source.size, source.tag]
                        for source in self.sources],
            "arrays": [[name, array.dtype.str, len(array)] for name, array in self.arrays.items()]
        }, separators=(",", ":")).encode()
        header += b" " * (-(len(MAGIC) + 8 + len(header)) % 8)
        parts = [MAGIC, len(header).to_bytes(8, "little"), header]
        for array in self.arrays.values():
            parts += [array.tobytes(), bytes(-array.nbytes % 8)]
        return b"".join(parts)

    def packed(self) -> bytes:
        """Return the bytes that are stored."""
        body = self.body()
        return body + hashlib.sha256(body).digest()


@dataclass(frozen=True)
class Kind:
    """What the index of one kind of dataset has."""

    name: str
    arrays: Mapping[str, str]
    """The type of each array."""
    flaw: Callable[[Index], str]
    """Return what is wrong with an index of this kind, whose arrays have these types; "":
    nothing."""


class AboutData(UserWarning):
    """What was found in the data when its index was built."""


class Flawed(Exception):
    """The content of an index is not that of an index."""


def unpacked(data: bytes, where: str, folder: str, kind: Kind) -> Index:
    """Return a stored index of files in a folder. Raises ConfigError for one that is damaged."""
    body, digest = data[:-32], data[-32:]
    try:
        if not body.startswith(MAGIC) or hashlib.sha256(body).digest() != digest:
            raise Flawed("its sum or its version is another one")
        found = _checked(body, folder, kind)
        vars(found)["sha256"] = digest.hex()  # of many bytes
        return found
    except Flawed as error:
        raise ConfigError(f"the index {where} is damaged or is of another version ({error}). Build "
                          f"it again: elastic-trainer index --rebuild URL…") from error


def _checked(body: bytes, folder: str, kind: Kind) -> Index:
    """Return the index that these bytes are. Raises Flawed."""
    at = len(MAGIC) + 8
    length = int.from_bytes(body[len(MAGIC):at], "little")
    try:
        header = json.loads(body[at:at + length])
    except (ValueError, RecursionError) as error:
        raise Flawed(f"its header is no JSON: {error}") from error
    if not (isinstance(header, dict) and header.keys() == {"kind", "facts", "sources", "arrays"}
            and header["kind"] == kind.name and isinstance(header["facts"], dict)):
        raise Flawed(f"its header is not that of a {kind.name} index")
    sources = [_source(one, folder) for one in _listed(header["sources"], 3)]
    if not sources or len({source.url for source in sources}) != len(sources):
        raise Flawed("it names no file, or one twice")
    at, arrays = at + length, dict[str, numpy.ndarray]()
    for name, dtype, count in _listed(header["arrays"], 3):
        if (not isinstance(name, str) or name in arrays or name not in kind.arrays
                or dtype != kind.arrays[name]):
            raise Flawed(f"it has an array {name!r} of the type {dtype!r}")
        size = numpy.dtype(dtype).itemsize
        if type(count) is not int or not 0 <= count <= (len(body) - at) // size:
            raise Flawed(f"its array {name} has {count!r} entries")
        arrays[name] = numpy.frombuffer(body, dtype, count, at)
        at += count * size + -(count * size) % 8
    if arrays.keys() != kind.arrays.keys() or at != len(body):
        raise Flawed("its arrays are not those of its kind")
    index = Index(kind.name, folder, sources, header["facts"], arrays)
    if flaw := kind.flaw(index):
        raise Flawed(flaw)
    return index


def _listed(value: Any, length: int) -> list[list[Any]]:
    """Return a list of lists of a length. Raises Flawed."""
    if not isinstance(value, list) or not all(
            isinstance(one, list) and len(one) == length for one in value):
        raise Flawed("its header has other lists")
    return value


def _source(entry: list[Any], folder: str) -> Source:
    """Return a file of an index: it lies in the folder of the dataset. Raises Flawed."""
    name, size, tag = entry
    if not isinstance(name, str) or not isinstance(tag, str) or type(size) is not int:
        raise Flawed("it describes a file by other types")
    if not 0 <= size < 1 << 63:
        raise Flawed(f"it says that {name!r} has {size} bytes")
    if not name or "\0" in name or name.startswith("/") or {".", ".."} & set(name.split("/")):
        raise Flawed(f"it names the file {name!r}, which is not in the folder of the dataset")
    return Source(folder + name, size, tag)


def is_list_of_texts(value: Any) -> bool:
    """Return whether a value of a header is a list of texts."""
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def tell(index: Index) -> Index:
    """Warn of what an index says about its data, once, when it is built."""
    for sentence in index.facts.get("told", []):
        warnings.warn(sentence, AboutData, stacklevel=2)
    return index


def common_folder(urls: Sequence[str]) -> str:
    """Return the folder that all files are in, with its last slash."""
    common = os.path.commonprefix(list(urls))
    return common[:common.rindex("/") + 1]


def place_of(kind: str, urls: Sequence[str], where: str | os.PathLike[str] | None,
             how: str = "") -> str:
    """Return the URL of the index of files: in a folder, or beside the files. `how` they are read,
    if they can be read in more than one way."""
    folder = common_folder(urls)
    names = "\n".join([MAGIC.decode(), kind, how, *(url[len(folder):] for url in urls)])
    name = f"{kind}-{hashlib.sha256(os.fsencode(names)).hexdigest()[:16]}.index"
    return f"{os.fspath(where or folder + FOLDER).rstrip('/')}/{name}"


def load(files: Files, place: str, folder: str, kind: Kind) -> Index | None:
    """Return a stored index of the files in a folder; None: there is none. Raises ConfigError."""
    data = _stored(files, place)
    return None if data is None else unpacked(data, place, folder, kind)


def require_unchanged(index: Index, place: str, sources: Sequence[Source]) -> Index:
    """Return an index if its files are those that are there now. Raises ConfigError."""
    names, wanted = ([source.url for source in some] for some in (index.sources, sources))
    if names != wanted:
        odd = next((name for name in names if name not in set(wanted)), "others in another order")
        raise ConfigError(f"the index {place} is not that of these {len(wanted)} files: it has "
                          f"{len(names)}, e.g. {odd}. Build it again: elastic-trainer index "
                          f"--rebuild URL…")
    for known, now in zip(index.sources, sources, strict=True):
        changed = (f"has {now.size} bytes and its index says {known.size}"
                   if now.size != known.size else
                   f"has the ETag {now.tag} and its index says {known.tag}"
                   if now.tag and known.tag and now.tag != known.tag else "")
        if changed:
            raise ConfigError(
                f"{now.url} {changed}: it was changed after the index {place} was built, so the "
                f"numbers of the samples may differ. Put the old file back, or build the index "
                f"again (elastic-trainer index --rebuild URL…) and start a new run.")
    return index


def index_of(files: Files, urls: Any, where: Any, kind: Kind, build: Build, *, anew: bool = False,
             how: str = "") -> Index:
    """Return the index of files. If there is none, one process of each host builds and stores it;
    `anew`: it is built in place of another one. Raises ConfigError."""
    expanded = files.expand(urls)
    place, sources = place_of(kind.name, expanded, where, how), files.describe(expanded)
    if anew:
        index = build(list(sources))
        store(files, place, index, replace=True)
        return index
    folder = common_folder(expanded)
    found = load(files, place, folder, kind)
    if not found:
        with alone_on_host(f"index-{place}", f"builds the index {place}"):
            found = load(files, place, folder, kind) or _built(files, place, sources, kind, build)
    return require_unchanged(found, place, sources)


def _built(files: Files, place: str, sources: Sequence[Source], kind: Kind, build: Build) -> Index:
    size = sum(source.size for source in sources)
    if size > LARGE_BYTES:
        warnings.warn(f"{len(sources)} files with {size / 2**30:.1f} GiB have no index, and "
                      f"this worker reads them to build it. Do it once before the run: "
                      f"elastic-trainer index URL…", stacklevel=4)
    index = build(list(sources))
    store(files, place, index)
    # Another host may have stored it first. All have to use the same.
    return load(files, place, index.folder, kind) or index


def store(files: Files, place: str, index: Index, *, replace: bool = False) -> None:
    """Store an index, if there is none in its place. Raises ConfigError."""
    data = index.packed()
    try:
        if is_remote(place):
            _put(files, place, data, replace)
        else:
            _write(Path(place), data, replace)
    except FileExistsError:
        pass
    except (OSError, ValueError) as error:
        if not replace and _is_taken(error):
            return
        raise ConfigError(f"the index {place} cannot be written: {error}. Allow it, or name "
                          f"another folder: index=\"s3://bucket/folder\" or --index.") from error


def _put(files: Files, place: str, data: bytes, replace: bool) -> None:
    filesystem = files.filesystem(is_remote(place))
    if replace:
        filesystem.pipe_file(place, data)
        return
    try:
        # One PUT: a server may ignore the condition of a multipart upload.
        filesystem.pipe_file(place, data, chunksize=2 << 30, mode="create")
    except TypeError:  # this store of fsspec has no such thing
        filesystem.pipe_file(place, data)


def _write(path: Path, data: bytes, replace: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
        (os.replace if replace else os.link)(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def _is_taken(error: BaseException) -> bool:
    """Return whether a conditional PUT was refused. s3fs says it as EINVAL or EEXIST, or not."""
    text = f"{error} {error.__cause__}"
    return "PreconditionFailed" in text or "ConditionalRequestConflict" in text or (
        isinstance(error, OSError) and error.errno == errno.EEXIST) or "412" in text


def _stored(files: Files, place: str) -> bytes | None:
    if not is_remote(place):
        try:
            return Path(place).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"the index {place} cannot be read: {error.strerror}. Allow it, or "
                              f"name another folder: index=\"s3://bucket/folder\" or --index."
                              ) from error
    folder = place.rpartition("/")[0]
    size = {source.url: source.size for source in files.listing(folder)}.get(place)
    if size is None:
        return None
    step = 8 << 20
    return b"".join(files.read([Range(place, start, min(start + step, size))
                                for start in range(0, size, step)]))


class Scanned:
    """Bytes of a file in order, read ahead in pieces: what the scan of an archive reads."""

    def __init__(self, files: Files, source: Source, piece_bytes: int = 8 << 20):
        self.files, self.source, self.piece_bytes = files, source, piece_bytes
        self._at, self._start, self._piece = 0, 0, b""

    def read(self, count: int) -> bytes:
        """Return the next bytes; fewer at the end of the file."""
        stop, found = min(self._at + count, self.source.size), []
        while self._at < stop:
            if not self._start <= self._at < self._start + len(self._piece):
                self._start = self._at
                end = min(self._at + self.piece_bytes, self.source.size)
                (self._piece,) = self.files.read([Range(self.source.url, self._at, end)])
            begin = self._at - self._start
            found.append(self._piece[begin:begin + stop - self._at])
            self._at += len(found[-1])
        return b"".join(found)

    def seek(self, at: int) -> int:
        """Go to a byte of the file."""
        self._at = at
        return at


def changed_meanwhile(url: str, sample: str) -> DataUnavailable:
    """Return the error for bytes that differ from their index, at the second reading too."""
    return DataUnavailable(
        f"sample {sample} of {url} has other bytes than its index says: the file was changed or "
        f"damaged after the index was built. Put the old file back, or build the index again "
        f"(elastic-trainer index --rebuild URL…) and start a new run.")
