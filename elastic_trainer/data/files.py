"""Read byte ranges of files, on disk or in a store that fsspec reads (S3 through s3fs).

index, blocks → here → os.pread, or fsspec

What always holds:
1. A range is read whole, or there is an error that names URL and range. Retries are made here
   (tenacity), and are bounded. Those of s3fs and botocore are off.
2. Nothing is shared over a fork: connections and fsspec's event loop are opened at the first read
   of each process. A pickled object holds no connection.
3. Credentials come from AWS's standard chain, and the endpoint from its standard variables
   (AWS_ENDPOINT_URL_S3).
4. Nothing here draws from Python's `random`: the user's transforms do, and their numbers must not
   depend on the network.

Source: fsspec.asyn.reset_lock, for forked processes; s3fs.S3FileSystem.retries.
"""

from __future__ import annotations

import itertools
import os
import random
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
)

from elastic_trainer.config import ConfigError
from elastic_trainer.data.patterns import Tree, choices_of, folder_of_disk, named
from elastic_trainer.host.names import is_loopback

Answer = TypeVar("Answer")

ATTEMPTS, ATTEMPTS_S = 8, 90.0
FIRST_WAIT_S, MOST_WAIT_S = 0.1, 10.0
"""The longest wait before the second attempt, and before any. It doubles with each attempt."""
CONNECTIONS = 16
"""The number of ranges that a process reads at the same time."""
TIMEOUTS = {"connect_timeout": 5, "read_timeout": 30}
REMOTE = re.compile(r"^([a-z][a-z0-9+.-]+)://")
INHERITED: list[dict[str, Any]] = []
"""The filesystems of the process that this one was forked from. They stay as they are: s3fs closes
one that is no longer used, over an event loop that does not run here."""
MODELS: list[Any] = []
"""botocore's loader of the description of S3, with what it has parsed: 0.1 to 0.3 s of CPU for each
process. Forked processes inherit it."""
OURS = (TypeError, AttributeError, NameError, AssertionError)
"""Errors of code, which no retry mends."""
BORN = [os.getpid()]
"""The process whose fsspec this is: another one has to give up the event loop that it inherited."""


class DataUnavailable(RuntimeError):
    """A range of a file could not be read within the bounds of the retries."""


@dataclass(frozen=True)
class Range:
    """Bytes `start` to `stop` (exclusive) of a file."""

    url: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.url}, bytes {self.start} to {self.stop}"


@dataclass(frozen=True)
class Source:
    """A file of a dataset, as its index knows it."""

    url: str
    size: int
    tag: str = ""
    """The store's ETag; "": a file on a disk."""


class _Passing(Exception):
    """Some ranges were not read, and a retry may read them."""


class Files:
    """The files of a dataset: their sizes and their bytes."""

    def __init__(self, storage_options: dict[str, Any] | None = None):
        self.storage_options = dict(storage_options or {})
        self._opened: tuple[int, dict[str, Any]] = (0, {})
        self._random = random.Random()

    def __getstate__(self) -> dict[str, Any]:
        return {"storage_options": self.storage_options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def read(self, ranges: Sequence[Range]) -> list[bytes]:
        """Read ranges in parallel. Raises DataUnavailable, ConfigError."""
        found: list[bytes | None] = [None] * len(ranges)
        for place, one in enumerate(ranges):
            if one.start == one.stop:
                found[place] = b""
            elif not is_remote(one.url):
                found[place] = _read_local(one)

        def failed() -> tuple[str, str]:
            missing = next(one for one, data in zip(ranges, found, strict=True) if data is None)
            return (f"{missing} could not be read",
                    " and that the file is there, then resume the run")

        self._retried(lambda: self._read_missing(ranges, found), failed)
        return [data for data in found if data is not None]

    def _retried(self, act: Callable[[], Answer], failed: Callable[[], tuple[str, str]]) -> Answer:
        """Ask a store, again where a retry may help. Raises DataUnavailable; `failed` returns its
        fact and the end of its remedy."""
        try:
            return Retrying(retry=retry_if_exception_type(_Passing), reraise=True,
                            stop=stop_after_attempt(ATTEMPTS) | stop_after_delay(ATTEMPTS_S),
                            wait=self._wait_s)(act)
        except _Passing as error:
            fact, remedy = failed()
            raise DataUnavailable(
                f"{fact} in {ATTEMPTS} attempts: {error.__cause__!r}. Check that this host reaches "
                f"the store (AWS_ENDPOINT_URL_S3){remedy}.") from error.__cause__

    def _read_missing(self, ranges: Sequence[Range], found: list[bytes | None]) -> None:
        """Read what is missing once. Raises _Passing if something still is."""
        missing = [place for place, data in enumerate(found) if data is None]
        failure: BaseException | None = None
        for protocol, group in itertools.groupby(missing, lambda at: is_remote(ranges[at].url)):
            places = list(group)
            wanted = [ranges[place] for place in places]
            answers = self.filesystem(protocol).cat_ranges(
                [one.url for one in wanted], [one.start for one in wanted],
                [one.stop for one in wanted], on_error="return")
            for place, one, answer in zip(places, wanted, answers, strict=True):
                if isinstance(answer, BaseException):
                    failure = _passing(one, answer)
                elif len(answer) != one.stop - one.start:
                    failure = OSError(f"{len(answer)} bytes came")
                else:
                    found[place] = answer
        if failure:
            raise _Passing from failure

    def _wait_s(self, state: RetryCallState) -> float:
        """Return how long to wait before the next attempt. tenacity's own waits draw from Python's
        `random` (tenacity/wait.py)."""
        most_s = FIRST_WAIT_S * 2.0 ** (state.attempt_number - 1)
        return self._random.uniform(0.0, min(MOST_WAIT_S, most_s))

    def filesystem(self, protocol: str) -> Any:
        """Return this process's filesystem of a protocol. Raises ConfigError."""
        pid, opened = self._opened
        if pid != os.getpid():
            _leave_the_parents_loop()
            INHERITED.append(opened)
            opened = {}
            self._opened = (os.getpid(), opened)
        if protocol not in opened:
            opened[protocol] = _open(protocol, self.storage_options)
        return opened[protocol]

    def describe(self, urls: Sequence[str]) -> list[Source]:
        """Return size and tag of files, from one listing for each folder. Raises ConfigError."""
        found = {url: Source(url, os.stat(url).st_size) for url in urls
                 if not is_remote(url) and os.path.isfile(url)}
        for folder in sorted({url.rpartition("/")[0] for url in urls if is_remote(url)}):
            entries = self.listing(folder)
            found |= {source.url: source for source in entries}
        for url in urls:
            if url not in found:
                if os.path.isdir(url):
                    raise ConfigError(f"{url} is a folder. Name the files in it, e.g. "
                                      f"{url.rstrip('/')}/*.tar.")
                raise ConfigError(f"{url} is not there. Correct the list of files of the dataset.")
        return [found[url] for url in urls]

    def listing(self, folder: str, *, is_deep: bool = False) -> list[Source]:
        """Return the files in a folder of a store, or below it. Raises DataUnavailable,
        ConfigError."""
        protocol = is_remote(folder)
        return [Source(f"{protocol}://{entry['name']}", int(entry["size"]),
                       str(entry.get("ETag") or "").strip('"'))
                for entry in self._entries(folder, is_deep) if entry["type"] == "file"]

    def _entries(self, folder: str, is_deep: bool = False) -> list[dict[str, Any]]:
        """Return what fsspec says of the files and folders in a folder of a store."""
        def entries(filesystem: Any) -> list[dict[str, Any]]:
            return list(filesystem.find(folder, detail=True).values() if is_deep else
                        filesystem.ls(folder, detail=True))

        return self._asked(folder, entries, [])

    def _asked(self, url: str, question: Callable[[Any], Answer], absent: Answer) -> Answer:
        """Ask a store, again where a retry may help; `absent`: there is no such thing. Raises
        DataUnavailable, ConfigError."""
        def asked() -> Answer:
            filesystem = self.filesystem(is_remote(url))
            try:
                filesystem.invalidate_cache()
                return question(filesystem)
            except FileNotFoundError:
                return absent
            except ConfigError:
                raise
            except Exception as error:
                raise _Passing from _passing(Range(url, 0, 0), error)

        return self._retried(asked, lambda: (f"{url} could not be listed", ", then start again"))

    def expand(self, urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
        """Return the files that patterns name (patterns.py). Raises ConfigError."""
        given = _texts(urls)
        found = [file for text in given for file in self._expanded(text)]
        if not found:
            raise ConfigError(f"{given!r} names no file. Correct the URL or the pattern.")
        seen: dict[str, str] = {}
        for url in found:
            real = url if is_remote(url) else os.path.realpath(url)
            if real in seen:
                link = "" if seen[real] == url else f" ({seen[real]} is the same file)"
                raise ConfigError(f"{url} is named twice{link}, so its samples would be read "
                                  f"twice. Name each file once.")
            seen[real] = url
        return found

    def _expanded(self, text: str) -> list[str]:
        """Return the files that one text names. Raises ConfigError."""
        if text.startswith("{") and not os.path.lexists(text):  # of paths, or of buckets
            return [file for one in choices_of(text) or [] for file in self._expanded(one)]
        protocol = is_remote(text)
        if protocol:
            tree = Tree(lambda folder: _names(self._entries(folder)),
                        lambda url: self._asked(url, lambda store: bool(store.exists(url)), False),
                        lambda folder: [one.url for one in self.listing(folder, is_deep=True)])
            found = named(tree, f"{protocol}:/", text[len(protocol) + 3:])
        else:
            path = text.removeprefix("file://")
            is_folder = path.endswith("/") and path != "/"
            path = os.path.abspath(path) + "/" * is_folder
            found = named(Tree(folder_of_disk, os.path.lexists), "", path[1:])
        if not found:
            raise ConfigError(f"{text} names no file. Correct the URL or the pattern.")
        return found


def _texts(urls: Any) -> list[str]:
    """Return the paths, URLs and patterns that a user has named. Raises ConfigError."""
    if isinstance(urls, (str, os.PathLike)):
        urls = [urls]
    is_many = isinstance(urls, Iterable) and not isinstance(urls, (bytes, bytearray))
    texts = [os.fspath(one) if isinstance(one, os.PathLike) else one
             for one in (urls if is_many else [urls])]
    if odd := [one for one in texts if not isinstance(one, str) or not one or "\0" in one]:
        raise ConfigError(f"the files of the dataset are {odd[0]!r}. Give a path, a URL or a "
                          f"pattern as a text, or a list of them.")
    return texts


def is_remote(url: str) -> str:
    """Return the protocol of a URL; "": it is a path on a disk."""
    found = REMOTE.match(url)
    return found[1] if found and found[1] != "file" else ""


def _names(entries: list[dict[str, Any]]) -> dict[str, bool]:
    """Return the names of what is in a folder of a store: True for folders."""
    found: dict[str, bool] = {}
    for entry in entries:
        name = entry["name"].rstrip("/").rpartition("/")[2]
        found[name] = found.get(name, True) and entry["type"] == "directory"
    return found


def _read_local(one: Range) -> bytes:
    descriptor = os.open(one.url, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = b""
        while len(data) < one.stop - one.start:
            piece = os.pread(descriptor, one.stop - one.start - len(data), one.start + len(data))
            if not piece:
                raise DataUnavailable(f"{one} could not be read: the file ends at byte "
                                      f"{one.start + len(data)}. Put the whole file back.")
            data = data + piece if data else piece
        return data
    finally:
        os.close(descriptor)


def _passing(one: Range, error: BaseException) -> BaseException:
    """Return an error that a retry may mend. Raises what it does not mend."""
    names = {type(cause).__name__ for cause in (error, error.__cause__, error.__context__)}
    if isinstance(error, PermissionError):
        raise ConfigError(f"{one} may not be read: {error}. Allow s3:GetObject and s3:ListBucket "
                          f"on the bucket for this host's role.") from error
    if names & {"NoCredentialsError", "PartialCredentialsError"}:
        raise ConfigError(f"{one} needs credentials and AWS's chain has none. Set AWS_PROFILE, or "
                          f"give the instance a role.") from error
    if not isinstance(error, Exception) or isinstance(error, OURS):
        raise error
    return error


def _open(protocol: str, storage_options: dict[str, Any]) -> Any:
    import fsspec

    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if protocol in ("s3", "s3a"):
        import botocore.utils

        # As in state/stores/s3.py: botocore draws from Python's `random` when it reads a role's
        # credentials.
        botocore.utils.random = random.Random()
        config = {**TIMEOUTS, "retries": {"max_attempts": 0}, "tcp_keepalive": True,
                  "max_pool_connections": CONNECTIONS,
                  "response_checksum_validation": "when_required",
                  "request_checksum_calculation": "when_required"}
        if is_loopback(_endpoint(storage_options)):
            config["proxies"] = {}  # HTTP_PROXY holds for other hosts
        options["config_kwargs"] = config
        if not {"session", "profile"} & storage_options.keys():
            options["session"] = _session()
    try:
        opened = fsspec.filesystem(protocol, **{**options, **storage_options})
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{protocol}:// cannot be read: {error}. Install the package that fsspec "
                          f"names, or use s3:// or a folder.") from error
    if protocol in ("s3", "s3a"):
        opened.retries = 1
    opened.batch_size = CONNECTIONS
    return opened


def _endpoint(storage_options: dict[str, Any]) -> str:
    """Return the URL of the S3 server; "" for AWS."""
    given = (storage_options, storage_options.get("client_kwargs") or {})
    found = [options.get("endpoint_url") for options in given]
    found += [os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")]
    return next(filter(None, found), "")


def _session() -> Any:
    """Return a session of botocore that has parsed the description of S3 already."""
    import aiobotocore.session

    session = aiobotocore.session.AioSession()
    if not MODELS:
        MODELS.append(session.get_component("data_loader"))
    session.register_component("data_loader", MODELS[0])
    return session


def _leave_the_parents_loop() -> None:
    """Let fsspec start an event loop of this process, if this is a fork of another one."""
    if BORN[0] != os.getpid():
        with suppress(ImportError):
            import fsspec.asyn

            fsspec.asyn.reset_lock()
        BORN[0] = os.getpid()
