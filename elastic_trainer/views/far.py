"""A run that is read from a bucket: `elastic-trainer watch s3://BUCKET/NAME`.

command line → here → Mirror → a temporary folder of this user → the command, as of a folder

What always holds:
1. It only reads the bucket: s3:ListBucket and s3:GetObject on the folder of the log.
2. The folder is made for this command, has mode 700, and goes with it.
3. The first copy is whole before the command begins. Later the bucket is listed once in POLL_S. A
   fault of the network then ends nothing: `trouble` has it until a list succeeds.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from elastic_trainer.config import ConfigError
from elastic_trainer.events.sigterm import ended_by_sigterm
from elastic_trainer.state.s3 import S3Store
from elastic_trainer.state.store import StoreRefused, StoreUnavailable
from elastic_trainer.views.mirror import MOST_OBJECTS, Mirror, is_log
from elastic_trainer.wire.plain import plain

LOG_FOLDER = "diary"
"""The folder of the log in the folder of a fleet (deploy/hosts/events.sh)."""
POLL_S = 5.0
CLOSE_S = 2.0


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
            raise ConfigError(f"{str(error).rstrip('.')}. Check the network, AWS_REGION and "
                              f"AWS_ENDPOINT_URL_S3, and call the command again.") from error
        for sentence in run.mirror.left_out.values():
            tell(sentence)
        try:
            yield run
        finally:
            run.close()


def tell(sentence: str) -> None:
    """Write a sentence to stderr."""
    print(f"elastic-trainer: {plain(sentence)}", file=sys.stderr, flush=True)


def _store_of(address: str) -> S3Store:
    """Return the folder of the log: the address itself, or the log's folder in that of a fleet."""
    parts = urlsplit(address)
    folder = parts._replace(path="/" + parts.path.strip("/")).geturl()
    of_fleet = parts._replace(path=f"{parts.path.rstrip('/')}/{LOG_FOLDER}").geturl()
    is_log_folder = parts.path.rstrip("/").endswith(f"/{LOG_FOLDER}")
    for url in (folder,) if is_log_folder else (of_fleet, folder):
        store = S3Store(url, is_reader=True)
        if is_log(store.entries(MOST_OBJECTS)):
            return store
    raise ConfigError(f"{address} has no event log: neither events.jsonl nor "
                      f"{LOG_FOLDER}/events.jsonl. Name the folder of a fleet, s3://BUCKET/NAME, "
                      f"or the folder that has the events.jsonl.")


def _name_of(store: S3Store) -> str:
    """Return the run's name: that of the fleet's folder. Raises ConfigError."""
    parts = [store.bucket, *filter(None, store.prefix.split("/"))]
    name = parts[-2] if parts[-1] == LOG_FOLDER and len(parts) > 1 else parts[-1]
    if not re.fullmatch(r"\w[\w.-]{0,199}", name):
        raise ConfigError(f"{store.where} is in the folder {name!r}, which is no name of a run. "
                          f"Copy the log to a folder whose name has only letters, digits, "
                          f"'.', '_' and '-'.")
    return name
