"""Objects in Google Cloud Storage (gs://) and Azure Blob Storage (az://), by gcsfs and adlfs.

checkpoint, commit_log → here → fsspec's file systems → the cloud

What always holds:
1. One object is one request of at most PUT_BYTES. Put-if-absent is the file systems'
   mode="create": ifGenerationMatch=0 in a multipart/related upload on Google, If-None-Match: * on
   Azure. A resumable upload is never used: fake-gcs-server 1.54 ignores the condition there.
2. Credentials come from the cloud's standard chain: Google's application default credentials,
   Azure's DefaultAzureCredential, or AZURE_STORAGE_CONNECTION_STRING. None is in a URL, a command
   line or a log.
3. The file systems retry: gcsfs makes 6 attempts in 31 s, azure-core makes 4 in about 60 s. What
   they do not retry, or not for long enough, is tried ATTEMPTS times here. The end is an error.
4. No checksum of the server is relied on: every part has a SHA-256 in its record.
5. Nothing here draws from Python's `random` (`_own_random`), as in s3.py.

Why fsspec here and boto3 there: the refusal of a conditional PUT arrives as a FileExistsError, and
the two packages also read datasets. The price is one copy of each object, and no limit of a list.
"""

from __future__ import annotations

import importlib
import logging
import os
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

from fsspec.asyn import sync
from tenacity import (
    Retrying,
    retry_if_exception,
    retry_if_not_exception_type,
    stop_after_attempt,
    wait_fixed,
)

from elastic_trainer.state.stores.store import (
    PUT_BYTES,
    Entry,
    StoreRefused,
    StoreUnavailable,
    check_size,
    checked,
    parts_of,
    too_many,
)

ATTEMPTS, OPENINGS, BETWEEN_S = 2, 3, 0.5
CONNECT_S, READ_S = 10, 30
AT_ONCE = 16
"""How many objects are deleted at a time."""
MOST_LETTERS = 300
"""Of a server's own sentence: Azure's credentials explain themselves on a page."""
DRAWING = ("aiohttp.connector", "gcsfs.retry", "google.auth._exponential_backoff",
           "azure.core.pipeline.policies._authentication",
           "azure.core.pipeline.policies._authentication_async")
"""The modules below the file systems that draw from Python's `random`."""
UNAUTHENTICATED = ("DefaultCredentialsError", "RefreshError", "ClientAuthenticationError",
                   "CredentialUnavailableError")
MENDED_OUTSIDE = ("Invalid Credentials", "expired")
"""Words of a 401 that new credentials of a role mend after a while. The run does not end."""
PASSING = (0, 200, 408, 409, 429)
"""Statuses that a retry may mend, besides 5xx. 0, 200: there was no answer, or it made no sense."""
PAGE = 1000
"""How many objects a request lists at most."""
T = TypeVar("T")
Page = tuple[dict[str, Entry], str]
"""Objects by their full names, and the token of the next page; "": this is the last one."""


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """One kind of store."""

    scheme: str
    package: str
    extra: str
    """The extra of this project that installs the package."""
    settings: tuple[str, ...]
    """What a URL may set after the question mark."""
    faults: tuple[str, ...]
    """The exceptions of a request, besides OSError and ValueError: module.class."""
    remedies: dict[int, str]
    """The remedies for statuses that no retry mends. {0} is the bucket or container."""
    reader_remedies: dict[int, str]
    """Those of them that differ if the store is only read."""
    open: Callable[[dict[str, str]], Any]
    """Returns the file system."""
    page: Callable[[Any, str, str, str], Page]
    """Lists what is directly under a prefix: file system, bucket, prefix, token."""
    read: Callable[[Any, str, str, int, int | None], tuple[bytes, str]]
    """Returns bytes and version of an object: file system, bucket, key, first byte, most bytes."""


def _google(settings: dict[str, str]) -> Any:
    from aiohttp import ClientTimeout
    from gcsfs.core import GCSFileSystem  # not the one for zonal buckets, which needs gRPC

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it prints a traceback for each error
    # Google's own clients send no credentials to an emulator either.
    is_emulated = bool(os.environ.get("STORAGE_EMULATOR_HOST"))
    return GCSFileSystem(
        token="anon" if is_emulated else "google_default", use_listings_cache=False,
        skip_instance_cache=True, session_kwargs={"trust_env": not is_emulated},
        requests_timeout=ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=READ_S),
        **settings)


def _google_page(files: Any, bucket: str, prefix: str, token: str) -> Page:
    answer = files.call("GET", "b/{}/o", bucket, delimiter="/", prefix=prefix, maxResults=PAGE,
                        pageToken=token or None, json_out=True)
    found = {it["name"]: Entry(int(it["size"]), str(it["generation"]))
             for it in answer.get("items", [])}
    return found, answer.get("nextPageToken", "")


def _google_read(files: Any, bucket: str, key: str, first: int,
                 most: int | None) -> tuple[bytes, str]:
    last = "" if most is None else first + most - 1
    part = {"headers": {"Range": f"bytes={first}-{last}"}} if first or most is not None else {}
    headers, body = files.call("GET", files.url(f"{bucket}/{key}"), **part)
    return bytes(body), str(headers.get("X-Goog-Generation", ""))


def _azure(settings: dict[str, str]) -> Any:
    from adlfs import AzureBlobFileSystem

    return AzureBlobFileSystem(anon=False, use_listings_cache=False, skip_instance_cache=True,
                               connection_timeout=CONNECT_S, read_timeout=READ_S, **settings)


def _azure_page(files: Any, container: str, prefix: str, token: str) -> Page:
    async def page() -> Page:
        async with files.service_client.get_container_client(container) as client:
            pages = client.walk_blobs(name_starts_with=prefix, delimiter="/", results_per_page=PAGE
                                      ).by_page(token or None)
            async for listed in pages:
                found = {it.name: Entry(it.size, it.etag.strip('"')) async for it in listed
                         if it.get("etag")}  # not a folder
                return found, pages.continuation_token or ""
        return {}, ""

    return sync(files.loop, page)  # type: ignore[no-any-return]


def _azure_read(files: Any, container: str, key: str, first: int,
                most: int | None) -> tuple[bytes, str]:
    async def read() -> tuple[bytes, str]:
        async with files.service_client.get_blob_client(container, key) as client:
            answer = await client.download_blob(offset=first, length=most)
            return await answer.readall(), answer.properties.etag.strip('"')

    return sync(files.loop, read)  # type: ignore[no-any-return]


GOOGLE = Cloud(
    scheme="gs", package="gcsfs", extra="gcs", settings=("project",),
    open=_google, page=_google_page, read=_google_read,
    faults=("gcsfs.retry.HttpError", "gcsfs.retry.ChecksumError",
            "gcsfs.retry.NonRetryableError", "aiohttp.ClientError",
            "google.auth.exceptions.GoogleAuthError"),
    remedies={
        401: "Give the machine a service account, or run `gcloud auth application-default login`",
        403: "Grant roles/storage.objectUser on the bucket {0} to the service account, and give "
             "its machine the scope cloud-platform",
        404: "Create the bucket {0} (gcloud storage buckets create gs://{0}), or correct --store"},
    reader_remedies={403: "Grant roles/storage.objectViewer on the bucket {0} to this account",
                     404: "Correct the bucket's name"})
AZURE = Cloud(
    scheme="az", package="adlfs", extra="azure", settings=("account_name",),
    open=_azure, page=_azure_page, read=_azure_read,
    faults=("azure.core.exceptions.AzureError",),
    remedies={
        401: "Give the machine a managed identity, or run `az login`",
        403: "Grant the role Storage Blob Data Contributor on the container {0} to the identity",
        404: "Create the container {0} (az storage container create --auth-mode login --name {0}), "
             "or correct --store"},
    reader_remedies={403: "Grant the role Storage Blob Data Reader on the container {0} to this "
                          "identity",
                     404: "Correct the container's name"})
CLOUDS = {cloud.scheme: cloud for cloud in (GOOGLE, AZURE)}


class BucketStore:
    """Objects under `gs://bucket/prefix` or `az://container/prefix`.

    `is_reader`: it is only read, so the remedies name the permissions of a reader.
    """

    def __init__(self, url: str, *, is_reader: bool = False):
        self.cloud, self.is_reader = CLOUDS[url.partition(":")[0]], is_reader
        self.bucket, self.prefix, settings = parts_of(url, self.cloud.settings)
        self._root = f"{self.bucket}/{self.prefix}".rstrip("/")
        self.where = f"{self.cloud.scheme}://{self._root}"
        self._files, self._faults = self._opened(settings)

    def _opened(self, settings: dict[str, str]) -> tuple[Any, tuple[type[BaseException], ...]]:
        """Return the file system, and the exceptions of its requests."""
        try:
            faults = [getattr(importlib.import_module(module), name) for module, _, name in
                      (fault.rpartition(".") for fault in self.cloud.faults)]
            # The metadata service may be busy when all hosts boot at once.
            files = Retrying(retry=retry_if_not_exception_type((ImportError, ValueError)),
                             wait=wait_fixed(BETWEEN_S), stop=stop_after_attempt(OPENINGS),
                             reraise=True)(self.cloud.open, settings)
        except ImportError as error:
            raise StoreRefused(
                f"{self.where} needs {self.cloud.package} ({error}). Install it on every host: pip "
                f"install 'elastic-trainer[{self.cloud.extra}]'.") from error
        except Exception as error:  # each of the libraries has its own for missing credentials
            url = "the address" if self.is_reader else "--store"
            named = (f"Set AZURE_STORAGE_ACCOUNT_NAME, or add ?account_name=NAME to {url}. "
                     if self.cloud is AZURE else "")
            raise StoreRefused(f"{self.where} cannot be opened: {_text(error)}. {named}"
                               f"{self.cloud.remedies[401]}.") from error
        _own_random()
        return files, (*faults, OSError, ValueError, RuntimeError)

    def put(self, name: str, body: memoryview | bytes) -> None:
        self._put(name, body, "overwrite")

    def put_if_absent(self, name: str, body: memoryview | bytes) -> bool:
        return self._put(name, body, "create")

    def _put(self, name: str, body: memoryview | bytes, mode: str) -> bool:
        check_size(name, body)
        path = self._path(name)
        # azure-storage-blob takes a memoryview for an iterable of numbers.
        data = bytes(body) if self.cloud is AZURE else body
        one_put = {"chunksize": PUT_BYTES + 1} if self.cloud is GOOGLE else {}

        def put() -> bool:
            try:
                self._files.pipe_file(path, data, mode=mode, **one_put)
                return True
            except FileExistsError:
                return False

        return self._tried(f"take {name}", put)

    def get(self, name: str, most: int | None = None) -> bytes:
        return self.get_from(name, 0, most)[0]

    def get_from(self, name: str, first: int, most: int | None = None) -> tuple[bytes, str]:
        _, _, key = self._path(name).partition("/")

        def get() -> tuple[bytes, str] | None:
            try:
                return self.cloud.read(self._files, self.bucket, key, first, most)
            except self._faults as error:
                if _status(error) == 416:  # the object is empty, or ends before
                    return b"", ""
                if _status(error) != 404:
                    raise
                # A proxy that cannot reach its server answers 404, too, and a part that is gone
                # costs a checkpoint.
                if name in self._listed(name.rpartition("/")[0]):
                    raise TimeoutError("it is listed, but the answer was 404") from error
                return None

        found = self._tried(f"give {name}", get)
        if found is None:
            raise FileNotFoundError(f"{self.where} has no {name}")
        return found

    def entries(self, most: int) -> dict[str, Entry]:
        found, token = dict[str, Entry](), ""
        prefix = f"{self.prefix}/" if self.prefix else ""
        for number in count():
            if PAGE * number >= most:  # a page may have folders alone
                raise too_many(self.where, most)
            page, token = self._tried("list its objects", partial(
                self.cloud.page, self._files, self.bucket, prefix, token))
            found |= {name[len(prefix):]: entry for name, entry in page.items()}
            if not token:
                break
        return found

    def get_into(self, name: str, out: memoryview) -> bool:
        data = self.get(name, len(out) + 1)
        if len(data) != len(out):
            return False
        out[:] = data
        return True

    def list(self, prefix: str, limit: int | None = None) -> list[str]:
        names = self._tried(f"list {prefix}", lambda: self._listed(checked(prefix)))
        return [*names][:limit]

    def _listed(self, folder: str) -> Sequence[str]:
        """Return the names under a folder. Raises what the file system raises."""
        path = f"{self._root}/{folder}".rstrip("/") + "/"
        if self.cloud is AZURE:
            # adlfs's own `find` takes a 404, of a container or of a proxy, for an empty list.
            prefix = path[len(self.bucket) + 1:]
            found = sync(self._files.loop, _azure_names, self._files, self.bucket, prefix)
        else:
            found = self._files.find(path)
        cut = len(self._root) + 1
        return sorted(name[cut:] for name in found if name.startswith(path))

    def delete(self, names: Iterable[str]) -> None:
        paths = [self._path(name) for name in names]

        def delete(path: str) -> None:
            with suppress(FileNotFoundError):
                self._files.rm_file(path)

        with ThreadPoolExecutor(AT_ONCE, "delete") as pool:
            list(pool.map(lambda path: self._tried("delete", lambda: delete(path)), paths))

    def _path(self, name: str) -> str:
        return f"{self._root}/{checked(name)}"

    def _tried(self, what: str, act: Callable[[], T]) -> T:
        """Make a request, and retry it within the bounds if a retry may mend the fault."""
        def may_pass(error: BaseException) -> bool:
            return isinstance(error, self._faults) and _may_pass(error)

        try:
            return Retrying(retry=retry_if_exception(may_pass), wait=wait_fixed(BETWEEN_S),
                            stop=stop_after_attempt(ATTEMPTS), reraise=True)(act)
        except self._faults as error:
            status = _status(error)
            is_mended = status == 401 and any(word in str(error) for word in MENDED_OUTSIDE)
            kind = StoreUnavailable if is_mended or _may_pass(error) else StoreRefused
            readers = self.cloud.reader_remedies if self.is_reader else {}
            remedy = (self.cloud.remedies | readers).get(status, "").format(self.bucket)
            fact = f"{self.where} did not {what}: {_text(error)}"
            raise kind(f"{fact}. {remedy}".rstrip(". ") + ".") from error


async def _azure_names(files: Any, container: str, prefix: str) -> list[str]:
    """Return `container/name` of all objects whose names begin so."""
    async with files.service_client.get_container_client(container) as client:
        return [f"{container}/{name}" async for name in
                client.list_blob_names(name_starts_with=prefix)]


def _own_random() -> None:
    """Give the libraries a generator of their own: the user's code draws from Python's, in another
    thread, and its numbers must not depend on the network."""
    for name in DRAWING:
        with suppress(ImportError):
            importlib.import_module(name).random = random.Random()  # type: ignore[attr-defined]


def _status(error: BaseException) -> int:
    """Return the HTTP status of an error; 0 if there was no answer, or it made no sense."""
    if isinstance(error, FileNotFoundError):
        return 404
    text = str(error)
    if isinstance(error, PermissionError) or text.startswith("Forbidden"):
        return 403
    if type(error).__name__ in UNAUTHENTICATED and not getattr(error, "status_code", None):
        return 401
    if text.startswith("Bad Request"):
        return 400
    if getattr(error, "error_code", "") is None:  # Azure names each of its own refusals
        return 0
    for given in (getattr(error, "status_code", None), getattr(error, "code", None)):
        if str(given).isdecimal():
            return int(str(given))
    return 0


def _may_pass(error: BaseException) -> bool:
    status = _status(error)
    return status in PASSING or status >= 500


def _text(error: BaseException) -> str:
    """Return an error in one line."""
    words = " ".join(str(error).split()) or repr(error)
    return words.rstrip(".") if len(words) <= MOST_LETTERS else words[:MOST_LETTERS - 1] + "…"
