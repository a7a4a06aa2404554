"""A run that is read from a bucket: `elastic-trainer watch s3://BUCKET/NAME`, or gs://, az://.

the coordinator (deploy/hosts/events.sh, or a user's own timer) → bucket → Mirror → a temporary
folder of this user → Reader, as of the run's own folder

What always holds:
1. It only reads the bucket: of S3, s3:ListBucket and s3:GetObject on the folder of the log.
2. The folder is made for this command, has mode 700, and goes with it. The first copy is whole
   before the command begins. Later the bucket is listed once in POLL_S. A fault of the network then
   ends nothing: `trouble` has it until a list succeeds.
3. The folder's files are those of one list of the bucket. If an object has changed since the list,
   the bucket is listed again. An object is fetched when its size or version has changed. Of the
   newest segment only the bytes after those of the folder are fetched, if they continue it.
4. A Reader of the folder gets each line once, also while this copy changes: the newest segment
   leaves before its sealed copy comes. A newest segment whose first line is that of a sealed one
   is an older copy of it, and is left out.
5. Whoever writes to the bucket can make this copy wrong, and nothing else. Files have names that
   are made here. A segment that is too large is left out: a malformed line stands for it, which
   the readers count. A damaged one is copied, since its text up to the damage can be read.
6. A segment that the bucket lacks is missing here, too.

What it does not do: delete what the bucket no longer has.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from elastic_trainer.config import ConfigError
from elastic_trainer.events import now
from elastic_trainer.events.segments import DAMAGE, EVENTS_FILE, LONGEST_LINE_BYTES, names_of
from elastic_trainer.events.sigterm import ended_by_sigterm
from elastic_trainer.events.summary import RESULT_FILE
from elastic_trainer.host.modes import replace_whole
from elastic_trainer.state.stores.by_url import open_bucket
from elastic_trainer.state.stores.store import Bucket, Entry, StoreRefused, StoreUnavailable
from elastic_trainer.wire.plain import plain

MOST_OBJECTS = 100_000
MOST_BYTES = 256 << 20
"""The largest object, and the longest text of a segment: 16 times what a segment has."""
MOST_BYTES_IN_ALL = 8 << 30
LISTS = 8
"""How often the bucket is listed for one copy, if objects change meanwhile."""
SMALL_FILES = {RESULT_FILE: MOST_BYTES, now.NOW_FILE: now.MOST_BYTES}
"""The largest size of each. A larger one is left out."""
OVERLAP_BYTES = 4096
"""So much of the newest segment is fetched again, to see that the rest continues it."""
LEFT_OUT = b"a segment was left out\n"


class Changed(Exception):
    """An object has changed since it was listed."""


def is_log(names: Iterable[str]) -> bool:
    """True if there is an event log among the objects of a folder."""
    return any(name == EVENTS_FILE or _number(name) for name in names)


def sealed_names(names: Iterable[str]) -> dict[int, str]:
    """Return the sealed segments by number; of one that is there twice the compressed object."""
    return dict(sorted((number, name) for name in sorted(names) if (number := _number(name))))


def gaps(sealed: Mapping[int, str]) -> list[str]:
    """Return the names of the segments that are missing before and between sealed ones."""
    after = [(number + 1, later) for number, later in pairwise([0, *sealed])]
    return [names_of(first, later) for first, later in after if first < later]


class Mirror:
    """The copy of one run's log. One thread refreshes it."""

    def __init__(self, store: Bucket, folder: Path):
        self.store, self.folder = store, folder
        self.left_out: dict[str, str] = {}
        """The segments that are not whole in the copy, with the reason in a sentence."""
        self._have: dict[str, Entry] = {}
        self._first_lines: dict[int, bytes] = {}
        """By number of the sealed segment: the hash of its first line."""

    def refresh(self) -> None:
        """Bring the copy up to date. Network. Raises StoreUnavailable, OSError."""
        for _ in range(LISTS):
            with suppress(Changed, FileNotFoundError):  # it was there when it was listed
                return self._take(self.store.entries(MOST_OBJECTS))
        raise StoreUnavailable(f"{self.store.where} changes faster than it can be read: "
                               f"{LISTS} lists were each outdated. Use a faster network.")

    def _take(self, listed: Mapping[str, Entry]) -> None:
        sealed = sealed_names(listed)
        for name in gaps(sealed):
            self._leave_out(name, "is missing")
        total = sum(listed[name].bytes for name in sealed.values())
        if total > MOST_BYTES_IN_ALL:
            raise StoreRefused(f"{self.store.where} has {total} bytes of segments, and a copy has "
                               f"at most {MOST_BYTES_IN_ALL}. Use the run's folder itself.")
        for number, name in sealed.items():
            if self._have.get(name) != listed[name]:
                self._take_sealed(number, name, listed[name])
        for name in (EVENTS_FILE, *SMALL_FILES):
            if name in listed and self._have.get(name) != listed[name]:
                if name == EVENTS_FILE:
                    self._take_newest(listed[name])
                elif listed[name].bytes <= SMALL_FILES[name]:
                    self._place(name, self._fetch(name, listed[name]))
                self._have[name] = listed[name]

    def _take_sealed(self, number: int, name: str, entry: Entry) -> None:
        data, why, plain = b"", "", f"events-{number:06d}.jsonl"
        is_too_large = entry.bytes > MOST_BYTES
        if not is_too_large:
            data = self._fetch(name, entry)
            why, is_too_large = _fault(data, name.endswith(".gz"))
        if number not in self._first_lines:
            self._drop_newest()  # it was that segment, or one before
        if is_too_large:
            self._leave_out(name, why or f"has {entry.bytes} bytes")
            self._place(plain, LEFT_OUT)
        else:
            if why:
                self._leave_out(name, why)
            self._place(name, data)
            if name != plain:
                (self.folder / plain).unlink(missing_ok=True)
        self._first_lines[number] = _first_line(data, name.endswith(".gz") and not is_too_large)
        self._have[name] = entry

    def _leave_out(self, name: str, why: str) -> None:
        self.left_out[name] = (f"{self.store.where}/{name} {why}, so its events are left out. "
                               f"Copy it there again from the run's folder.")

    def _take_newest(self, entry: Entry) -> None:
        if entry.bytes > MOST_BYTES:
            raise StoreRefused(f"{self.store.where}/{EVENTS_FILE} has {entry.bytes} bytes, and a "
                               f"copy of it at most {MOST_BYTES}. Use the run's folder itself.")
        if self._continue_newest(entry):
            return
        data = self._fetch(EVENTS_FILE, entry)
        if data and _first_line(data) in self._first_lines.values():
            self._drop_newest()
        else:
            self._place(EVENTS_FILE, data)

    def _continue_newest(self, entry: Entry) -> bool:
        """Append what the newest segment has got; False if the object does not continue it."""
        path = self.folder / EVENTS_FILE
        size = path.stat().st_size if path.exists() else 0
        if not 0 < size < entry.bytes:
            return False
        start = max(0, size - OVERLAP_BYTES)
        more = self._fetch(EVENTS_FILE, entry, start)
        with open(path, "r+b") as file:
            file.seek(start)
            if file.read() != more[:size - start]:
                return False
            file.write(more[size - start:])
        return True

    def _fetch(self, name: str, entry: Entry, first: int = 0) -> bytes:
        """Return an object's bytes from the first on. Raises Changed if it is another one now."""
        if entry.bytes == first:
            return b""
        data, version = self.store.get_from(name, first, entry.bytes - first)
        if version != entry.version or len(data) != entry.bytes - first:
            raise Changed(name)
        return data

    def _drop_newest(self) -> None:
        (self.folder / EVENTS_FILE).unlink(missing_ok=True)
        self._have.pop(EVENTS_FILE, None)

    def _place(self, name: str, data: bytes) -> None:
        replace_whole(self.folder / name, data)


def _number(name: str) -> int:
    """Return the number of a sealed segment; 0 for other names."""
    match = re.fullmatch(r"events-([0-9]{6,9})\.jsonl(\.gz)?", name)
    number = int(match[1]) if match else 0
    return number if name.startswith(f"events-{number:06d}.") else 0


def _fault(data: bytes, is_packed: bool) -> tuple[str, bool]:
    """Return what is wrong with a segment, "" if nothing is, and whether its text is too large.
    The text is not kept."""
    size = 0
    try:
        with gzip.open(io.BytesIO(data)) if is_packed else io.BytesIO(data) as file:
            while piece := file.read(1 << 20):
                size += len(piece)
                if size > MOST_BYTES:
                    return f"has more than {MOST_BYTES} bytes of text", True
    except DAMAGE as error:
        return f"cannot be decompressed to its end ({error})", False
    return "" if size else "is empty", False


def _first_line(data: bytes, is_packed: bool = False) -> bytes:
    """Return the hash of a segment's first line."""
    line = b""
    with (gzip.open(io.BytesIO(data)) if is_packed else io.BytesIO(data) as file,
          suppress(*DAMAGE)):
        line = file.readline(LONGEST_LINE_BYTES)
    return hashlib.sha256(line).digest()


LOG_FOLDER = "diary"
"""The folder of the log in the folder of a fleet (deploy/hosts/events.sh)."""
POLL_S = 5.0
CLOSE_S = 2.0
ENDPOINTS = {"s3": "AWS_REGION and AWS_ENDPOINT_URL_S3", "gs": "STORAGE_EMULATOR_HOST",
             "az": "the account's name"}
"""What decides by which server a bucket is read, for remedies."""


class FarRun:
    """A run in a bucket, and its copy in a folder."""

    def __init__(self, address: str, place: Path):
        self.address = address
        store = _store_of(address)
        self.folder = place / _name_of(store)
        self.folder.mkdir()
        self.mirror = Mirror(store, self.folder)
        self.mirror.refresh()
        self.trouble = ""
        """Why the copy is not the newest one; "" if it is."""
        self._tells = False
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="far", daemon=True)

    def follow(self, *, tells: bool) -> None:
        """Keep the copy up to date from a thread. `tells`: write troubles to stderr."""
        self._tells = tells
        self._thread.start()

    def close(self) -> None:
        """End the thread. A request that is under way is not waited for any longer than CLOSE_S."""
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _refresh(self) -> None:
        while not self._is_closed.wait(POLL_S):
            try:
                self.mirror.refresh()
                trouble = " ".join(self.mirror.left_out.values())
            except OSError as error:  # the store's errors are OSErrors
                trouble = str(error)
            if self._tells and trouble != self.trouble and not self._is_closed.is_set():
                tell(trouble or f"{self.address} answers again.")
            self.trouble = trouble


@contextmanager
def opened(address: str) -> Iterator[FarRun]:
    """Copy a run's log from a bucket; the copy is there within the block. Raises ConfigError."""
    with ended_by_sigterm(), TemporaryDirectory(
            prefix="elastic-trainer-", ignore_cleanup_errors=True) as place:
        try:
            run = FarRun(address, Path(place))
        except StoreRefused as error:
            raise ConfigError(str(error)) from error
        except StoreUnavailable as error:
            raise ConfigError(f"{str(error).rstrip('.')}. Check the network, "
                              f"{ENDPOINTS[urlsplit(address).scheme]}, and call the command again."
                              ) from error
        for sentence in run.mirror.left_out.values():
            tell(sentence)
        try:
            yield run
        finally:
            run.close()


def tell(sentence: str) -> None:
    """Write a sentence to stderr."""
    print(f"elastic-trainer: {plain(sentence)}", file=sys.stderr, flush=True)


def _store_of(address: str) -> Bucket:
    """Return the folder of the log: the address itself, or the log's folder in that of a fleet."""
    parts = urlsplit(address)
    folder = parts._replace(path="/" + parts.path.strip("/")).geturl()
    of_fleet = parts._replace(path=f"{parts.path.rstrip('/')}/{LOG_FOLDER}").geturl()
    is_log_folder = parts.path.rstrip("/").endswith(f"/{LOG_FOLDER}")
    for url in (folder,) if is_log_folder else (of_fleet, folder):
        store = open_bucket(url, is_reader=True)
        if is_log(store.entries(MOST_OBJECTS)):
            return store
    raise ConfigError(f"{address} has no event log: neither events.jsonl nor "
                      f"{LOG_FOLDER}/events.jsonl. Name the folder of a fleet, "
                      f"{parts.scheme}://BUCKET/NAME, or the folder that has the events.jsonl.")


def _name_of(store: Bucket) -> str:
    """Return the run's name: that of the fleet's folder. Raises ConfigError."""
    parts = [store.bucket, *filter(None, store.prefix.split("/"))]
    name = parts[-2] if parts[-1] == LOG_FOLDER and len(parts) > 1 else parts[-1]
    if not re.fullmatch(r"\w[\w.-]{0,199}", name):
        raise ConfigError(f"{store.where} is in the folder {name!r}, which is no name of a run. "
                          f"Copy the log to a folder whose name has only letters, digits, "
                          f"'.', '_' and '-'.")
    return name
