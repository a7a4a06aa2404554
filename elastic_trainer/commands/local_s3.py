"""An S3 server on this machine, for a laptop: `./horovodrun_elastic.sh demo --store s3`.

ministack (PyPI) on a loopback port, with its data beside the run. It has a virtual environment of
its own, since it pins a botocore that s3fs does not work with. It is for trying the S3 path, not
for keeping anything.

What always holds:
1. It answers only to the credentials made for this run, and only for its bucket (s3_gate.py). They
   are in the environment of the run's processes, which other users cannot read: not on a command
   line, not in a file.
2. It listens on 127.0.0.1 alone, and gets nothing of the user's environment. Its files are the
   user's alone. It is asked without a proxy, which HTTP_PROXY may name (state/stores/s3.py).
3. It and all that it needs are installed as wheels, by the hashes of ministack.txt. An environment
   that another user could have written is not used (host/trust.py).
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_fixed

from elastic_trainer.config import ConfigError
from elastic_trainer.host import trust
from elastic_trainer.host.locks import take
from elastic_trainer.host.modes import make_folder
from elastic_trainer.host.parent import end_with_parent

MINISTACK = Path(__file__).with_name("ministack.txt")
"""Its version, those of all that it needs, and their hashes (deploy/hashes.py writes the file)."""
BY_HASH = ("--no-deps", "--only-binary=:all:", "--require-hashes")
BUCKET = "elastic-trainer"
REGION = "us-east-1"
OTHER_CREDENTIALS = ("AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN", "AWS_PROFILE",
                     "AWS_DEFAULT_PROFILE")
"""Of the user's: a token would be sent along, and a profile may name another region."""
NO_OTHER_SERVICE = {"SFTP_ENABLED": "0", "IOT_MTLS_ENABLED": "0",
                    "DOCKER_HOST": "unix:///nonexistent"}
"""ministack listens for SFTP and MQTT of its own accord, and removes containers at its end."""
GATE = Path(__file__).with_name("s3_gate.py")
LOG_FLAGS = os.O_CREAT | os.O_APPEND | os.O_WRONLY
START_S = 30.0


@contextmanager
def local_s3(run_dir: Path) -> Iterator[None]:
    """Run the server, with its bucket, during the block. AWS's variables then point to it."""
    data = run_dir.parent / ".s3"
    key, secret = f"local-{secrets.token_hex(8)}", secrets.token_urlsafe(32)
    with server(data, BUCKET, key, secret) as (endpoint, process):
        for name in OTHER_CREDENTIALS:
            os.environ.pop(name, None)
        os.environ.update(
            AWS_ENDPOINT_URL_S3=endpoint, AWS_REGION=REGION, AWS_DEFAULT_REGION=REGION,
            AWS_ACCESS_KEY_ID=key, AWS_SECRET_ACCESS_KEY=secret, AWS_EC2_METADATA_DISABLED="true")
        _make_bucket(process, data)
        yield


@contextmanager
def server(data: Path, bucket: str, key: str,
           secret: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a server of one bucket, which is not made yet; yields its endpoint and its process.

    Raises ConfigError.
    """
    python = f"{installed()}/python"
    make_folder(data)
    data.chmod(0o700)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        env = NO_OTHER_SERVICE | {
            "PATH": os.defpath, "HOME": str(data), "TMPDIR": str(data), "SERVICES": "s3",
            "S3_PERSIST": "1", "S3_DATA_DIR": str(data), "GATEWAY_PORT": str(port),
            "LOG_LEVEL": "WARNING", "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
        command = [python, "-I", str(GATE), str(listener.fileno()), bucket]
        with open(os.open(data / "server.log", LOG_FLAGS, 0o600), "ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=data, env=env, umask=0o077,
                pass_fds=[listener.fileno()], start_new_session=True,
                # There are no threads here yet.
                preexec_fn=lambda: end_with_parent(signal.SIGTERM))  # noqa: PLW1509
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def installed(listed: str = "", *hashed: str) -> str:
    """Return the folder of a package's programs, in a virtual environment of its own.

    The first call makes the environment. `listed` are its requirements, by default ministack's
    with hashes; the first one is the package.

    Raises ConfigError.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elastic-trainer"
    if not listed:
        listed, hashed = MINISTACK.read_text(), BY_HASH
    requirement = listed.split()[0]
    name = re.split(r"[\[=]", requirement)[0]
    home = cache / f"{name}-{hashlib.sha256((listed + sys.version).encode()).hexdigest()[:8]}"
    trust.make_folder(cache)
    if why := trust.why_not_trusted(home if home.exists() else cache):
        raise ConfigError(f"{why}, and what is installed there would run as you. Remove it or take "
                          f"the permission away, or set XDG_CACHE_HOME to a folder of yours.")
    with open(f"{home}.lock", "ab") as lock:
        take(lock.fileno())  # two runs that begin together would clear each other's folder
        if not (home / "complete").exists():
            print(f"installing {requirement} (a server for this machine) into {home}", flush=True)
            try:
                home.mkdir(mode=0o700, exist_ok=True)
                venv.create(home, with_pip=True, clear=True)
                (home / "listed.txt").write_text(listed)
                subprocess.run([home / "bin" / "pip", "install", "--quiet", *hashed,
                                "--requirement", home / "listed.txt"],
                               check=True, capture_output=True, text=True)
            except subprocess.CalledProcessError as error:
                complaint = (error.stderr or error.output)[-300:]
                raise ConfigError(f"{requirement} could not be installed: {complaint!r}. Use "
                                  f"--store with a folder or a bucket of yours.") from error
            (home / "complete").touch()
    return str(home / "bin")


def _make_bucket(server: subprocess.Popen[bytes], data: Path) -> None:
    """Make the bucket as soon as the server answers. Raises ConfigError."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    def is_starting(error: BaseException) -> bool:
        is_of_boto = isinstance(error, BotoCoreError | ClientError)
        return is_of_boto and not _is_there(error) and server.poll() is None

    config = Config(retries={"total_max_attempts": 1}, connect_timeout=1, read_timeout=5,
                    proxies={})
    client = boto3.session.Session().client("s3", config=config)
    retrying = Retrying(retry=retry_if_exception(is_starting), wait=wait_fixed(0.05),
                        stop=stop_after_delay(START_S), reraise=True)
    try:
        retrying(client.create_bucket, Bucket=BUCKET)
    except (BotoCoreError, ClientError) as error:
        if not _is_there(error):
            raise ConfigError(f"The S3 server on this machine did not start; its log is "
                              f"{data}/server.log. Use --store with a folder or a bucket of "
                              f"yours.") from error


def _is_there(error: BaseException) -> bool:
    return "BucketAlready" in str(error)
