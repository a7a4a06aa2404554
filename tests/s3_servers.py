"""Real S3 servers on loopback for the tests: Ceph's radosgw from Debian's packages, and ministack
from PyPI.

Both are started here, on free ports, in a folder of the test's, and ended by pid. Where one can't
be had, the tests that need it are skipped with one sentence.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from packages import install
from ports import free_port

PACKAGES = ("ceph-mon", "ceph-osd", "radosgw")
KEY, SECRET, BUCKET = "testing", "testing123", "bucket"
START_S = 90.0


class Unavailable(Exception):
    """The server is not available on this machine; the text has the reason."""


@contextmanager
def or_skip() -> Iterator[None]:
    """Skip the test if a server that the block starts is not available."""
    import pytest

    try:
        yield
    except Unavailable as error:
        pytest.skip(str(error))


@contextmanager
def process(command: Sequence[str | Path], log: Path,
            **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server for as long as the block."""
    with open(log, "ab") as output:
        server = subprocess.Popen(command,
                                  stdout=output,
                                  stderr=output,
                                  start_new_session=True,
                                  cwd=log.parent,
                                  env=os.environ | env)
    try:
        yield server
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def environment(endpoint: str) -> dict[str, str]:
    """Return AWS's standard variables for an endpoint."""
    return {
        "AWS_ENDPOINT_URL_S3": endpoint, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"
    }


def client(endpoint: str) -> boto3.client:
    """Return a client of the test's own, past the code under test."""
    return boto3.client("s3",
                        endpoint_url=endpoint,
                        aws_access_key_id=KEY,
                        aws_secret_access_key=SECRET,
                        region_name="us-east-1",
                        config=Config(retries={"total_max_attempts": 1},
                                      read_timeout=20,
                                      request_checksum_calculation="when_required"))


def _wait_for_bucket(endpoint: str, servers: list[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            client(endpoint).create_bucket(Bucket=BUCKET)
            return
        except (BotoCoreError, ClientError) as error:
            if time.monotonic() > deadline or any(server.poll() is not None for server in servers):
                logs = "\n".join(p.read_text(errors="replace")[-600:] for p in folder.glob("*.log"))
                raise AssertionError(
                    f"no S3 server after {START_S:.0f} s: {error}\n{logs}") from error
            time.sleep(0.1)


@contextmanager
def ceph(folder: Path, *, nice: int = 0) -> Iterator[str]:
    """Run a monitor, an object store daemon (in memory) and a gateway; yields the endpoint. Raises
    Unavailable."""
    why = "" if all(map(shutil.which, PACKAGES)) else install(*PACKAGES)
    if not all(map(shutil.which, PACKAGES)):
        raise Unavailable("Ceph's gateway could not be installed: apt-get install "
                          f"{' '.join(PACKAGES)} ({why})")
    folder.mkdir(parents=True, exist_ok=True)
    mon_port, port = free_port(), free_port()
    cluster, osd = str(uuid.uuid4()), str(uuid.uuid4())
    (folder / "ceph.conf").write_text(f"""[global]
fsid = {cluster}
mon host = v2:127.0.0.1:{mon_port}
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
auth supported = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 8589934592
mon allow pool size one = true
mon data = {folder}/mon
osd data = {folder}/osd
keyring = {folder}/keyring
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
mon cluster log file = {folder}/cluster.log
pid file =
[client.rgw.a]
ms mon client mode = crc
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw data = {folder}/rgw
rgw enable usage log = false
rgw cache enabled = true
# Else what was deleted stays in memory for two hours, and the machine runs out of it.
rgw gc obj min wait = 5
rgw gc processor period = 5
rgw gc processor max time = 5
""")
    conf = ["--conf", str(folder / "ceph.conf")]

    def do(*command: str) -> None:
        done = subprocess.run([*command, *conf], capture_output=True, text=True, timeout=START_S)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"

    (folder / "mon").mkdir()
    (folder / "osd").mkdir()
    do("monmaptool", "--create", "--clobber", "--addv", "a", f"[v2:127.0.0.1:{mon_port}]", "--fsid",
       cluster, str(folder / "monmap"))
    do("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(folder / "monmap"))
    with ExitStack() as servers:
        running = [servers.enter_context(
                       process(["ceph-mon", "-f", "-i", "a", *conf], folder / "mon.out.log"))]
        do("ceph", "osd", "new", osd)
        do("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", osd)
        for name, command in (("osd", ["ceph-osd", "-f", "-i",
                                       "0"]), ("rgw", ["radosgw", "-f", "-n", "client.rgw.a"])):
            running.append(servers.enter_context(process(["nice", "-n", str(nice), *command, *conf],
                                                         folder / f"{name}.out.log")))
            if nice:
                _be_nice(running[-1].pid, nice)
        do("radosgw-admin", "user", "create", "--uid=test", "--display-name=test",
           f"--access-key={KEY}", f"--secret-key={SECRET}")
        endpoint = f"http://127.0.0.1:{port}"
        _wait_for_bucket(endpoint, running, folder)
        yield endpoint


def _be_nice(pid: int, nice: int) -> None:
    """Let niceness count against other sessions too, where the kernel groups by sessions (sched(7),
    "autogroup")."""
    for _ in range(50):
        try:
            Path(f"/proc/{pid}/autogroup").write_text(str(nice))
            return
        except BlockingIOError:  # who is not root may ask every 100 ms
            time.sleep(0.1)
        except FileNotFoundError:
            return
    raise Unavailable(f"the kernel did not take the niceness of process {pid} in 5 s")


@contextmanager
def ministack(folder: Path) -> Iterator[str]:
    """Run ministack as `--store s3` does, with the tests' credentials; yields the endpoint. Raises
    Unavailable."""
    from elastic_trainer.commands.local_s3 import installed, server
    from elastic_trainer.config import ConfigError

    try:
        installed()
    except ConfigError as error:
        raise Unavailable(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True)
    with server(folder / "data", BUCKET, KEY, SECRET) as (endpoint, running):
        _wait_for_bucket(endpoint, [running], folder / "data")
        yield endpoint
