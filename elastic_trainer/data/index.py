"""The index of a dataset: where each sample is. It is built once and stored.

scan of the files → here → beside the data, or where `index` says → every worker

What always holds:
1. An index names its files with size and tag (ETag). Files that differ from their index are an
   error, never another numbering of the samples.
2. It is written once (put-if-absent). A process that loses the race reads the winner's.
3. It ends with the SHA-256 of all that precedes it. It has numbers and texts, and no pickle.
4. The names of the files are relative to their folder. Data that is copied with its index keeps
   it.

Format: MAGIC, length of the header (8 bytes, little-endian), header (JSON), arrays, SHA-256.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from elastic_trainer.config import ConfigError
from elastic_trainer.data.files import DataUnavailable, Files, Range, Source, is_remote

MAGIC = b"elastic-trainer index 1\n"
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

    @property
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


def unpacked(data: bytes, where: str, folder: str) -> Index:
    """Return a stored index of files in a folder. Raises ConfigError for one that is damaged."""
    body, digest = data[:-32], data[-32:]
    if not body.startswith(MAGIC) or hashlib.sha256(body).digest() != digest:
        raise ConfigError(f"the index {where} is damaged or is of another version. Build it again: "
                          f"elastic-trainer index --rebuild URL…")
    at = len(MAGIC) + 8
    header = json.loads(body[at:at + int.from_bytes(body[len(MAGIC):at], "little")])
    at += int.from_bytes(body[len(MAGIC):at], "little")
    arrays = {}
    for name, kind, count in header["arrays"]:
        arrays[name] = numpy.frombuffer(body, kind, count, at)
        at += arrays[name].nbytes + -arrays[name].nbytes % 8
    return Index(header["kind"], folder,
                 [Source(folder + name, size, tag) for name, size, tag in header["sources"]],
                 header["facts"], arrays)


def common_folder(urls: Sequence[str]) -> str:
    """Return the folder that all files are in, with its last slash."""
    common = os.path.commonprefix(list(urls))
    return common[:common.rindex("/") + 1]


def place_of(kind: str, urls: Sequence[str], where: str | os.PathLike[str] | None) -> str:
    """Return the URL of the index of files: in a folder, or beside the files."""
    folder = common_folder(urls)
    names = "\n".join([kind, *(url[len(folder):] for url in urls)])
    name = f"{kind}-{hashlib.sha256(names.encode()).hexdigest()[:16]}.index"
    return f"{os.fspath(where or folder + FOLDER).rstrip('/')}/{name}"


def load(files: Files, place: str, folder: str) -> Index | None:
    """Return a stored index of the files in a folder; None: there is none. Raises ConfigError."""
    data = _stored(files, place)
    return None if data is None else unpacked(data, place, folder)


def require_unchanged(index: Index, place: str, sources: Sequence[Source]) -> Index:
    """Return an index if its files are those that are there now. Raises ConfigError."""
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


def build_or_load(files: Files, place: str, sources: Sequence[Source], build: Build) -> Index:
    """Return the stored index, or build and store it: one process of each host does it."""
    folder = common_folder([source.url for source in sources])
    found = load(files, place, folder)
    if not found:
        with _one_process(place):
            found = load(files, place, folder) or _built(files, place, sources, build)
    return require_unchanged(found, place, sources)


def _built(files: Files, place: str, sources: Sequence[Source], build: Build) -> Index:
    size = sum(source.size for source in sources)
    if size > LARGE_BYTES:
        warnings.warn(f"{len(sources)} files with {size / 2**30:.1f} GiB have no index, and "
                      f"this worker reads them to build it. Do it once before the run: "
                      f"elastic-trainer index URL…", stacklevel=4)
    index = build(list(sources))
    store(files, place, index)
    # Another host may have stored it first. All have to use the same.
    return load(files, place, index.folder) or index


def rebuild(files: Files, place: str, sources: Sequence[Source], build: Build) -> Index:
    """Build an index and store it in place of another one."""
    index = build(list(sources))
    store(files, place, index, replace=True)
    return index


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
    folder = place.rpartition("/")[0]
    size = {source.url: source.size for source in files.listing(folder)}.get(place)
    if size is None:
        return None
    step = 8 << 20
    return b"".join(files.read([Range(place, start, min(start + step, size))
                                for start in range(0, size, step)]))


@contextmanager
def _one_process(place: str) -> Iterator[None]:
    """Let one process of this host build an index, and the others wait."""
    name = hashlib.sha256(place.encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"elastic-trainer-index-{os.getuid()}-{name}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Scanned:
    """Bytes of a file in order, read ahead in pieces: what the scan of an archive reads."""

    def __init__(self, files: Files, source: Source, piece_bytes: int = 8 << 20):
        self.files, self.source, self.piece_bytes = files, source, piece_bytes
        self._at, self._start, self._piece = 0, 0, b""

    def read(self, count: int = -1) -> bytes:
        """Return the next bytes; fewer at the end of the file."""
        stop = self.source.size if count < 0 else min(self._at + count, self.source.size)
        found = []
        while self._at < stop:
            if not self._start <= self._at < self._start + len(self._piece):
                self._start = self._at
                end = min(self._at + self.piece_bytes, self.source.size)
                (self._piece,) = self.files.read([Range(self.source.url, self._at, end)])
            begin = self._at - self._start
            found.append(self._piece[begin:begin + stop - self._at])
            self._at += len(found[-1])
        return b"".join(found)

    def seek(self, at: int, whence: int = 0) -> int:
        """Go to a byte of the file."""
        self._at = at + (0, self._at, self.source.size)[whence]
        return self._at

    def tell(self) -> int:
        """Return the number of the next byte."""
        return self._at


def changed_meanwhile(url: str, sample: str) -> DataUnavailable:
    """Return the error for bytes that differ from their index, at the second reading too."""
    return DataUnavailable(
        f"sample {sample} of {url} has other bytes than its index says: the file was changed or "
        f"damaged after the index was built. Put the old file back, or build the index again "
        f"(elastic-trainer index --rebuild URL…) and start a new run.")
