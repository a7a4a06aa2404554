"""An S3 server on this machine, for a laptop: `./horovodrun_elastic.sh demo --store s3`.

ministack (PyPI) in a virtual environment of its own, on a loopback port, with its data beside the run. Its own, since it
pins a botocore that s3fs does not work with. It is for trying the S3 path, not for keeping anything.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elastic_trainer.config import ConfigError

MINISTACK = "ministack==1.5.33"
BUCKET = "elastic-trainer"
START_S = 30.0
PR_SET_PDEATHSIG = 1  # prctl(2)


@contextmanager
def local_s3(run_dir: Path) -> Iterator[None]:
    """Run the server, with its bucket, for as long as the block; AWS's variables of this process point to it."""
    data = run_dir.parent / ".s3"
    data.mkdir(parents=True, exist_ok=True)
    program = f"{installed()}/ministack"
    port = _free_port()
    with open(data / "server.log", "ab") as log:
        server = subprocess.Popen([program], stdout=log, stderr=log, cwd=data, start_new_session=True,
                                  preexec_fn=_die_with_parent, env=os.environ | {  # noqa: PLW1509 (no threads here yet)
            "BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "S3_PERSIST": "1", "S3_DATA_DIR": str(data)})
    try:
        os.environ.update(AWS_ENDPOINT_URL_S3=f"http://127.0.0.1:{port}", AWS_REGION="us-east-1", AWS_ACCESS_KEY_ID="test",
                          AWS_SECRET_ACCESS_KEY=secrets.token_hex(8), AWS_EC2_METADATA_DISABLED="true")
        _make_bucket(server, data)
        yield
    finally:
        server.terminate()
        server.wait(20)


def _die_with_parent() -> None:
    """Let the kernel end the server when this process is killed: nobody else would."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    """Return a port of loopback that nobody has, below those that the kernel gives to who asks for any (from 32768 on)."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", 20000 + secrets.randbelow(12000)))
            return int(probe.getsockname()[1])


def installed(requirement: str = MINISTACK) -> str:
    """Return the folder of a package's programs, in a virtual environment of its own, made by the first call.

    Raises ConfigError.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elastic-trainer"
    name = re.split(r"[\[=]", requirement)[0]
    home = cache / f"{name}-{hashlib.sha256((requirement + sys.version).encode()).hexdigest()[:8]}"
    cache.mkdir(parents=True, exist_ok=True)
    with open(f"{home}.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs that begin together would clear each other's
        if not (home / "complete").exists():
            print(f"installing {requirement} (a server for this machine) into {home}", flush=True)
            try:
                venv.create(home, with_pip=True, clear=True)
                subprocess.run([home / "bin" / "pip", "install", "--quiet", requirement], check=True, capture_output=True,
                               text=True)
            except subprocess.CalledProcessError as error:
                raise ConfigError(f"{requirement} could not be installed: {(error.stderr or error.output)[-300:]!r}. Use "
                                  f"--store with a folder or a bucket of yours.") from error
            (home / "complete").touch()
    return str(home / "bin")


def _make_bucket(server: subprocess.Popen[bytes], data: Path) -> None:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    config = Config(retries={"total_max_attempts": 1}, connect_timeout=1, read_timeout=5)
    client = boto3.session.Session().client("s3", config=config)
    deadline = time.monotonic() + START_S
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            return
        except (BotoCoreError, ClientError) as error:
            if isinstance(error, ClientError) and "BucketAlready" in str(error):
                return
            if server.poll() is not None or time.monotonic() > deadline:
                raise ConfigError(f"the S3 server on this machine did not start; its log is {data}/server.log. Use --store "
                                  f"with a folder or a bucket of yours.") from error
            time.sleep(0.05)
