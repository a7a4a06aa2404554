"""The laptop's S3 server (`--store s3`): who may ask it, and for what."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import boto3
import psutil
import pytest
from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials

from elastic_trainer.commands import local_s3
from elastic_trainer.config import ConfigError
from elastic_trainer.data.files import Files
from elastic_trainer.state.stores.s3 import S3Store

STORE = f"s3://{local_s3.BUCKET}/run"
BODY = b"weights"
PAGE = {"Origin": "http://page.example", "Access-Control-Request-Method": "PUT"}
FUNCTION = json.dumps({
    "FunctionName": "f", "Runtime": "python3.11", "Role": "arn:aws:iam::000000000000:role/r",
    "Handler": "h.f", "Code": {"ZipFile": ""}
}).encode()
NOBODY = 65534


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The server of a run, to which this process's variables point, with one object; its data's
    folder."""
    before = dict(os.environ)
    folder = tmp_path_factory.mktemp("runs")
    os.environ |= {"AWS_SESSION_TOKEN": "the user's own", "NOT_ITS_BUSINESS": "the user's own"}
    try:
        with local_s3.local_s3(folder / "run"):
            S3Store(STORE).put("object", BODY)
            yield folder / ".s3"
            assert S3Store(STORE).get("object") == BODY  # whatever was tried meanwhile
    except ConfigError as error:
        pytest.skip(str(error))
    finally:
        os.environ.clear()
        os.environ.update(before)


def the_server() -> psutil.Process:
    (found, ) = [
        child for child in psutil.Process().children() if "s3_gate.py" in " ".join(child.cmdline())
    ]
    return found


def asked(method: str,
          path: str,
          headers: dict[str, str] | None = None,
          body: bytes = b"") -> http.client.HTTPResponse:
    """Send a request as it stands here; returns the answer, read."""
    connection = http.client.HTTPConnection(urlsplit(os.environ["AWS_ENDPOINT_URL_S3"]).netloc,
                                            timeout=300)
    connection.request(method, path, body, headers or {})
    answer = connection.getresponse()
    answer.read()
    return answer


def signed(method: str, path: str, key: str, secret: str, service: str = "s3", body: bytes = b"",
           signer: Callable[..., SigV4Auth] = S3SigV4Auth) -> http.client.HTTPResponse:
    """Send a request that is signed as AWS's clients do."""
    request = AWSRequest(method, os.environ["AWS_ENDPOINT_URL_S3"] + path, data=body)
    signer(Credentials(key, secret), service, local_s3.REGION).add_auth(request)
    return asked(method, path, dict(request.headers), body)


OF_STRANGERS = [
    *[("GET", path, b"") for path in ("/", f"/{local_s3.BUCKET}", f"/{local_s3.BUCKET}/run/object",
                                      "/_ministack/health", "/_localstack/health", "/health",
                                      "/_ministack/ready", "//", "/other")],
    ("HEAD", f"/{local_s3.BUCKET}/run/object", b""),
    ("DELETE", f"/{local_s3.BUCKET}/run/object", b""),
    ("PUT", f"/{local_s3.BUCKET}/run/object", b"mine"), ("PUT", "/bucket-of-mine", b""),
    ("POST", "/_ministack/reset", b""), ("POST", "/_ministack/config", b"{}"),
    ("POST", "/2015-03-31/functions", FUNCTION),
    ("POST", "/", b"Action=ListUsers&Version=2010-05-08"),
    ("OPTIONS", f"/{local_s3.BUCKET}/run/object", b""), ("OPTIONS", "/", b"")
]


@pytest.mark.parametrize(("method", "path", "body"), OF_STRANGERS)
@pytest.mark.usefixtures("data")
def test_a_client_without_the_credentials_gets_nothing(method: str, path: str, body: bytes) -> None:
    """Without the run's credentials: unsigned, as a web page, with credentials that ministack
    believes by itself, and with the right name but another secret. No answer has a word for
    browsers, and what was kept is as it was.
    """
    answers = [asked(method, path, {}, body), asked(method, path, PAGE, body)]
    for key in ("test", "000000000000", os.environ["AWS_ACCESS_KEY_ID"]):
        for secret in ("test", "x"):
            answers.append(signed(method, path, key, secret, body=body))
    answers.append(signed(method, path, "test", "test", "lambda", body, SigV4Auth))
    for answer in answers:
        assert answer.status == 403
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]


@pytest.mark.usefixtures("data")
def test_a_client_without_the_credentials_opens_no_websocket() -> None:
    """ministack serves MQTT and others over them."""
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
               "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    assert asked("GET", "/mqtt", upgrade).status == 403


@pytest.mark.parametrize(("service", "path"), [("lambda", "/2015-03-31/functions"),
                                               ("s3", "/2015-03-31/functions"),
                                               ("s3", "/_ministack/reset"),
                                               ("s3", "/another-bucket"),
                                               ("lambda", f"/{local_s3.BUCKET}/run/object")])
@pytest.mark.usefixtures("data")
def test_the_run_itself_gets_only_its_bucket(service: str, path: str) -> None:
    """Whoever has its credentials cannot start code with them."""
    key, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    signer = S3SigV4Auth if service == "s3" else SigV4Auth
    assert signed("POST", path, key, secret, service, FUNCTION, signer).status == 403
    client = boto3.client("lambda",
                          endpoint_url=os.environ["AWS_ENDPOINT_URL_S3"],
                          region_name=local_s3.REGION,
                          config=Config(retries={"total_max_attempts": 1}))
    with pytest.raises(client.exceptions.ClientError):
        client.list_functions()


@pytest.mark.usefixtures("data")
def test_a_signature_holds_for_what_was_signed() -> None:
    """Taken over for another method, name or argument it is refused."""
    key, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    path = f"/{local_s3.BUCKET}/run/object"
    request = AWSRequest("GET", os.environ["AWS_ENDPOINT_URL_S3"] + path)
    S3SigV4Auth(Credentials(key, secret), "s3", local_s3.REGION).add_auth(request)
    headers = dict(request.headers)
    assert asked("GET", path, headers).status == 200
    for method, other in (("DELETE", path), ("GET", path + "?acl"),
                          ("GET", f"/{local_s3.BUCKET}/run/other")):
        assert asked(method, other, headers).status == 403
    assert asked("GET", path, headers | {"X-Amz-Date": "20200101T000000Z"}).status == 403


def test_another_user_gets_nothing(data: Path) -> None:
    """One socket, on loopback; no credential where other users can look; its files are its user's
    alone; and it was not given what else is in the user's environment.
    """
    server, secret = the_server(), os.environ["AWS_SECRET_ACCESS_KEY"]
    listening = {connection.laddr
                 for connection in server.net_connections("all") if connection.status == "LISTEN"}
    assert [where.ip for where in listening] == ["127.0.0.1"]
    assert not [argument for argument in server.cmdline()
                if secret in argument or os.environ["AWS_ACCESS_KEY_ID"] in argument]
    assert not {"NOT_ITS_BUSINESS", "AWS_SESSION_TOKEN"} & server.environ().keys()
    assert "AWS_SESSION_TOKEN" not in os.environ
    assert [path for path in (data, *data.rglob("*")) if path.stat().st_mode & 0o077] == []
    assert not [
        path for path in data.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()
    ]
    if os.geteuid() == 0:
        look = f"cat /proc/{server.pid}/environ || ls {data}"
        done = subprocess.run(["sh", "-c", look],
                              user=NOBODY,
                              group=NOBODY,
                              extra_groups=[],
                              capture_output=True)
        assert done.returncode != 0 and done.stdout == b""


@pytest.mark.usefixtures("data")
def test_it_answers_while_other_clients_hold_connections() -> None:
    """Idle ones, halves of a request, and a body that is announced and does not come."""
    address = urlsplit(os.environ["AWS_ENDPOINT_URL_S3"])
    requests = (b"", b"GET / HTTP/1.1\r\nHost: x\r\n",
             b"PUT /x HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
    held = [socket.create_connection((str(address.hostname), int(address.port or 0)), 10)
            for _ in range(90)]
    for number, connection in enumerate(held):
        connection.sendall(requests[number % len(requests)])
    assert S3Store(STORE).get("object") == BODY
    for connection in held:
        connection.close()


# --- how it is installed -------------------------------------------------------------------------

def test_the_server_and_all_that_it_needs_are_installed_by_hash() -> None:
    """Each line has one version and hashes; what is needed is listed for each Python."""
    lines = local_s3.MINISTACK.read_text().splitlines()
    assert lines[0].startswith("ministack==")
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+==[\w.]+( ; python_version < \"3.11\")?"
                            r"( --hash=sha256:[0-9a-f]{64})+", line), line
    assert {"--require-hashes", "--no-deps", "--only-binary=:all:"} == {*local_s3.BY_HASH}


def test_a_package_with_another_hash_is_not_installed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of an index that somebody has changed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    changed = re.sub("sha256:[0-9a-f]{64}", f"sha256:{'0' * 64}",
                     local_s3.MINISTACK.read_text().splitlines()[0]) + "\n"
    with pytest.raises(ConfigError, match="could not be installed"):
        local_s3.installed(changed, *local_s3.BY_HASH)
    assert not list(tmp_path.glob("*/*/complete"))


@pytest.mark.parametrize(("mode", "owner"), [(0o777, 0), (0o775, 0), (0o700, NOBODY)])
@pytest.mark.parametrize("what", ["environment", "cache", "above"])
def test_an_environment_that_another_user_could_have_written_is_not_used(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, owner: int, what: str) -> None:
    """Neither if only its folder, or the one above, is another's."""
    if os.geteuid() != 0:
        pytest.skip("only root gives folders away")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "above"))
    listed = local_s3.MINISTACK.read_text()
    name = hashlib.sha256((listed + sys.version).encode()).hexdigest()[:8]
    cache = tmp_path / "above" / "elastic-trainer"
    home = cache / f"ministack-{name}"
    (home / "bin").mkdir(parents=True)
    (home / "complete").touch()
    assert local_s3.installed(listed, *local_s3.BY_HASH) == str(home / "bin")
    folder = {"environment": home, "cache": cache, "above": cache.parent}[what]
    os.chown(folder, owner, 4711)  # a group of others
    folder.chmod(mode)
    with pytest.raises(ConfigError, match=re.escape(str(folder))):
        local_s3.installed(listed, *local_s3.BY_HASH)


# --- proxies ---------------------------------------------------------------------------------

PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


@pytest.mark.parametrize("names", [PROXIES, ("http_proxy",), ("ALL_PROXY",)], ids="+".join)
def test_the_server_is_asked_without_a_proxy_when_the_user_has_one(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    """A proxy cannot reach this machine's loopback: the start, the store and a reader of a dataset
    ask the server itself, and the user's variables stay as they are."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0.0)
        for name in names:
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        before = {name: os.environ.get(name) for name in (*PROXIES, "no_proxy", "NO_PROXY")}
        with monkeypatch.context() as ours:
            for name in ("AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
                         "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_EC2_METADATA_DISABLED"):
                ours.setenv(name, "")  # put back at the end
            try:
                with local_s3.local_s3(tmp_path / "run"):
                    S3Store(STORE).put("object", BODY)
                    assert S3Store(STORE).get("object") == BODY
                    (found,) = Files().describe([f"{STORE}/object"])
                    assert found.size == len(BODY)
            except ConfigError as error:
                if "could not be installed" in str(error):
                    pytest.skip(str(error))
                raise
        assert before == {name: os.environ.get(name) for name in before}
        with pytest.raises(BlockingIOError):
            proxy.accept()
