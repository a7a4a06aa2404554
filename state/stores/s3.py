"""Objects in S3, or in a server with its interface: the only module of the stores with boto3.

checkpoint, commit_log → here → endpoint

What always holds:
1. One object is one PUT of at most PUT_BYTES. There is no multipart upload, so no part is billed
   and forgotten. AWS, Ceph 16, MinIO and ministack check the condition of a PUT. Ceph ignores it on
   CompleteMultipartUpload, and ignores a quoted ETag in If-Match.
2. Credentials come from AWS's standard chain, and the endpoint from its standard variables
   (AWS_ENDPOINT_URL_S3). Neither is in a URL, a command line or a log.
3. Retries are made here (tenacity), are bounded and counted, and end with an error. Those of
   botocore are off.
4. No checksum of the server is relied on: every part has a SHA-256 in its record.
5. Nothing here draws from Python's `random`: the user's code does, in another thread, and its
   numbers must not depend on the network.

Why boto3 and not s3fs: its PUT copies nothing and takes half the CPU time, and s3fs hides the
refusal of a conditional PUT in an OSError(EINVAL).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

import boto3
import botocore.utils
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ParamValidationError
from botocore.parsers import ResponseParserError
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
)
from urllib3.exceptions import HTTPError

from elastic_trainer.host.names import is_loopback
from elastic_trainer.state.stores.store import (
    Entry,
    StoreRefused,
    StoreUnavailable,
    check_size,
    checked,
    parts_of,
    too_many,
)

ATTEMPTS, ATTEMPTS_S = 8, 90.0
FIRST_WAIT_S, MOST_WAIT_S = 0.1, 10.0
"""The longest wait before the second attempt, and before any. It doubles with each attempt."""
READ_TIMEOUT_S = 30.0
PIECE_BYTES = 1 << 20
"""How much of an object is read at once: urllib3 allocates this amount."""
PASSED_THROUGH = ("ACL", "ServerSideEncryption", "SSEKMSKeyId", "BucketKeyEnabled", "StorageClass",
                  "RequestPayer", "ExpectedBucketOwner")
"""Arguments of PutObject that a URL may set:
s3://bucket/prefix?ServerSideEncryption=aws:kms&SSEKMSKeyId=…"""
CHAIN = "the credentials in AWS's chain (AWS_PROFILE, the instance's role)"
ALLOW = ("Allow s3:GetObject, PutObject, DeleteObject and ListBucket on it "
         "(deploy/terraform/fleet/iam.tf)")
REMEDIES = {
    "NoSuchBucket": "Create the bucket, or correct --store",
    "AccessDenied": ALLOW,
    "403": ALLOW,
    "InvalidAccessKeyId": f"Correct {CHAIN}",
    "SignatureDoesNotMatch": f"Correct {CHAIN}",
    "ExpiredToken": f"Renew {CHAIN}",
    "RequestTimeTooSkewed": "Set this host's clock: it is more than 15 minutes off",
    "NotImplemented": "Use an endpoint that has conditional PUT (If-None-Match)",
    "InvalidArgument": "Correct the settings after the ? of --store",
    "PermanentRedirect": "Set AWS_DEFAULT_REGION to the bucket's region",
}
"""The remedies for errors that no retry mends."""
MENDED_OUTSIDE = ("ExpiredToken", "RequestTimeTooSkewed")
"""Those of them that a clock's daemon or new credentials of a role mend after a while. The run does
not end."""
PASSING = ("SlowDown", "RequestTimeout", "BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch",
           "404")
"""Codes of status 4xx that a retry may mend: throttling, a body that was damaged on its way, and a
404 without a code, which is not from a store but from a load balancer that cannot reach one."""
DENIED = ("AccessDenied", "403")
WORLDS_FAULTS = (BotoCoreError, HTTPError, ResponseParserError, OSError)
T = TypeVar("T")


class S3Store:
    """Objects under `s3://bucket/prefix`.

    `is_reader`: it is only read, so the remedies name the permissions of a reader.
    """

    def __init__(self, url: str, *, is_reader: bool = False):
        self.is_reader = is_reader
        self.bucket, self.prefix, settings = parts_of(url, PASSED_THROUGH)
        self.where = f"s3://{self.bucket}/{self.prefix}".rstrip("/")
        self._owner = {name: value for name, value in settings.items()
                       if name in ("RequestPayer", "ExpectedBucketOwner")}
        self._settings: dict[str, Any] = dict(settings)
        if "BucketKeyEnabled" in settings:
            self._settings["BucketKeyEnabled"] = settings["BucketKeyEnabled"].lower() == "true"
        self._random = random.Random()
        try:
            self._client = _client()
        except (BotoCoreError, ValueError) as error:
            raise StoreRefused(f"{self.where} cannot be reached: {error}. Set AWS_DEFAULT_REGION "
                               f"and AWS_ENDPOINT_URL_S3 to values that AWS's tools take."
                               ) from error

    def put(self, name: str, body: memoryview | bytes) -> None:
        check_size(name, body)
        self._tried(f"take {name}", lambda: self._client.put_object(
            Bucket=self.bucket, Key=self._key(name), Body=body, **self._settings))

    def put_if_absent(self, name: str, body: memoryview | bytes) -> bool:
        check_size(name, body)

        def put() -> bool:
            try:
                self._client.put_object(Bucket=self.bucket, Key=self._key(name), Body=body,
                                        IfNoneMatch="*", **self._settings)
                return True
            except ClientError as error:
                if _code(error) in ("PreconditionFailed", "412"):
                    return False
                raise

        return self._tried(f"take {name}", put)

    def get(self, name: str, most: int | None = None) -> bytes:
        return self.get_from(name, 0, most)[0]

    def get_from(self, name: str, first: int, most: int | None = None) -> tuple[bytes, str]:
        def get() -> tuple[bytes, str]:
            data = bytearray()
            try:
                answer = self._answer(name, **({"Range": f"bytes={first}-"} if first else {}))
            except ClientError as error:
                if _code(error) in ("InvalidRange", "416"):
                    return b"", ""
                raise
            end = sys.maxsize if most is None else most
            with closing(answer["Body"]) as body:
                while piece := body.read(min(PIECE_BYTES, end - len(data))):
                    data += piece  # what ends before Content-Length raises
                    if len(data) == end:
                        break
            return bytes(data), str(answer.get("ETag", ""))

        return self._tried(f"give {name}", get)

    def get_into(self, name: str, out: memoryview) -> bool:
        def get() -> bool:
            at = 0
            with closing(self._answer(name)["Body"]) as body:
                while at < len(out) and (count := body.readinto(out[at : at + PIECE_BYTES])):
                    at += count  # what ends before Content-Length raises
                return at == len(out) and not body.read(1)

        return self._tried(f"give {name}", get)

    def _answer(self, name: str, **part: str) -> dict[str, Any]:
        """Return the answer to GetObject. Raises FileNotFoundError, ClientError."""
        key = self._key(name)
        try:
            return dict(self._client.get_object(Bucket=self.bucket, Key=key, **part,
                                                **self._owner))
        except ClientError as error:
            is_gone = _code(error) in ("NoSuchKey", "404")
            # With the permission to list only under a prefix, the answer for an object that is not
            # there is 403.
            if not is_gone and _code(error) not in DENIED:
                raise
            if not self._has(key):
                raise FileNotFoundError(f"{self.where} has no {name}") from error
            # A load balancer that cannot reach its server answers 404, too, and a part that is gone
            # costs a checkpoint.
            if is_gone:
                raise OSError(
                    "it is listed, but the answer was 404. Check the proxies between this host and "
                    "the store; if the store has lost it, give the run another name (--run)"
                ) from error
            raise

    def _has(self, key: str) -> bool:
        found = self._client.list_objects_v2(Bucket=self.bucket, Prefix=key, MaxKeys=1,
                                             **self._owner)
        return any(entry["Key"] == key for entry in found.get("Contents", []))

    def list(self, prefix: str, limit: int | None = None) -> list[str]:
        key = self._key(prefix) + "/"
        cut = len(key) - len(prefix) - 1
        most = {} if limit is None else {"MaxKeys": min(1000, limit)}
        pages = self._pages(f"list {prefix}", Prefix=key, **most)
        return sorted(entry["Key"][cut:] for entry in islice(chain.from_iterable(pages), limit))

    def _pages(self, what: str, **asked: Any) -> Iterator[Iterable[dict[str, Any]]]:
        """Yield the entries of a listing, page by page: at most 1000 on each."""
        while True:
            page = self._tried(what, partial(self._client.list_objects_v2, Bucket=self.bucket,
                                             **asked, **self._owner))
            yield page.get("Contents", [])
            if not page.get("IsTruncated"):
                return
            asked["ContinuationToken"] = page["NextContinuationToken"]

    def entries(self, most: int) -> dict[str, Entry]:
        found = dict[str, Entry]()
        prefix = f"{self.prefix}/" if self.prefix else ""
        pages = self._pages("list its objects", Prefix=prefix, Delimiter="/")
        for number, page in enumerate(pages):
            if 1000 * number >= most:  # a page may have folders alone
                raise too_many(self.where, most)
            found |= {entry["Key"][len(prefix):]: Entry(int(entry["Size"]), str(entry["ETag"]))
                      for entry in page}
        return found

    def delete(self, names: Iterable[str]) -> None:
        keys = [{"Key": self._key(name)} for name in names]
        for start in range(0, len(keys), 1000):
            answer = self._tried(
                "delete",
                lambda: self._client.delete_objects(
                    Bucket=self.bucket,
                    Delete={"Objects": keys[start:start + 1000], "Quiet": True},  # noqa: B023
                    **self._owner))
            if answer.get("Errors"):
                first = answer["Errors"][0]
                raise StoreUnavailable(self._refusal(f"delete {first.get('Key')}", first))

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{checked(name)}" if self.prefix else checked(name)

    def _refusal(self, what: str, answer: dict[str, Any]) -> str:
        """Return the server's error for a request, with the remedy."""
        code = str(answer.get("Code", ""))
        remedy = REMEDIES.get(code, answer.get("Message", ""))
        if self.is_reader and code in DENIED:
            # The object's name in the policy: a role may read one run of a bucket and no other.
            folder = f"{self.prefix}/" if self.prefix else ""
            remedy = (f"Allow s3:GetObject on arn:aws:s3:::{self.bucket}/{folder}*"
                      if what.startswith("give") else
                      f"Allow s3:ListBucket on arn:aws:s3:::{self.bucket} for the prefix "
                      f"{folder}*, or correct the name")
        elif self.is_reader and code == "NoSuchBucket":
            remedy = "Correct the bucket's name"
        return f"{self.where} did not {what}: {code}. {remedy}".rstrip(". ") + "."

    def _wait_s(self, state: RetryCallState) -> float:
        """Return how long to wait before the next attempt. tenacity's own waits draw from Python's
        `random` (tenacity/wait.py)."""
        most_s = FIRST_WAIT_S * 2.0 ** (state.attempt_number - 1)
        return self._random.uniform(0.0, min(MOST_WAIT_S, most_s))

    def _tried(self, what: str, act: Callable[[], T]) -> T:
        """Make a request, and retry it within the bounds if a retry may mend the fault."""
        try:
            return Retrying(retry=retry_if_exception(_may_pass), wait=self._wait_s, reraise=True,
                            stop=stop_after_attempt(ATTEMPTS) | stop_after_delay(ATTEMPTS_S))(act)
        except FileNotFoundError:
            raise
        except NoCredentialsError as error:
            raise StoreRefused(
                f"{self.where} needs credentials and AWS's chain has none. Set AWS_PROFILE, or "
                f"give the instance a role.") from error
        except ClientError as error:
            code = _code(error)
            kind = StoreUnavailable if code in MENDED_OUTSIDE or _may_pass(error) else StoreRefused
            raise kind(self._refusal(what, error.response.get("Error", {}))) from error
        except ParamValidationError as error:
            raise StoreRefused(
                f"a request to {self.where} is not valid: {error}. Correct --store.") from error
        except WORLDS_FAULTS as error:
            raise StoreUnavailable(f"{self.where} did not {what}: {error}") from error


def _client() -> Any:
    """Return boto3's client, with one try for each request."""
    # botocore draws from Python's `random` each time that it reads the credentials of an instance's
    # role (utils.py, _evaluate_expiration). Here it gets a generator of its own (rule 5).
    botocore.utils.random = random.Random()
    # boto3's default session would keep its first credentials for ever.
    session = boto3.session.Session()
    config = Config(
        retries={"total_max_attempts": 1}, connect_timeout=5, read_timeout=READ_TIMEOUT_S,
        max_pool_connections=16, tcp_keepalive=True,
        # Older servers fail on the newer checksums.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # It refuses a memoryview. All other parameters are ours, or checked above.
        parameter_validation=False)
    client = session.client("s3", config=config)
    if is_loopback(client.meta.endpoint_url):  # HTTP_PROXY holds for other hosts
        client = session.client("s3", config=config.merge(Config(proxies={})))
    return client


def _code(error: ClientError) -> str:
    """Return the error's code; the status, if a load balancer has answered and not the store."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", "")
    return str(error.response.get("Error", {}).get("Code", "") or status)


def _may_pass(error: BaseException) -> bool:
    """True if a retry may mend the fault: 5xx, throttling, 409, resets, timeouts, answers that end
    too early."""
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if _code(error) in REMEDIES:
            return False
        return status >= 500 or status in (200, 408, 409, 429) or _code(error) in PASSING
    # NoCredentialsError is among them: boto3 asks the metadata service for one second, and that
    # service may be busy when all hosts boot at once.
    is_final = isinstance(error, (FileNotFoundError, ParamValidationError))
    return isinstance(error, WORLDS_FAULTS) and not is_final
