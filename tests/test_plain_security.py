"""Plain horovodrun with our patches of Horovod: it runs and unpickles nothing that others send, and
shows no secret on a command line.

CVE-2024-10190 and CVE-2026-31234 (SECURITY.md), tried on a real horovodrun.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from horovod.runner.common.util import secret
from horovod.runner.http.http_client import (
    put_data_into_kvstore,
    read_data_from_kvstore,
    send_request,
)
from horovod.runner.http.http_server import KVStoreServer, RendezvousServer
from netlab import Pickled
from waiting import wait_for

SECRET = "plain-horovodrun-must-not-show-this"
WORKER = """
import json, os, time
from pathlib import Path
import torch, horovod.torch as hvd
from horovod.common.elastic import notification_manager
hvd.init()
notification_manager.init()
assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="sum")) == hvd.size()
port = notification_manager._service.get_port()
facts = {**os.environ, "pid": os.getpid(), "service": port}
Path(f"new-{hvd.rank()}").write_text(json.dumps(facts))
Path(f"new-{hvd.rank()}").rename(f"worker-{hvd.rank()}")
while not Path("stop").exists():
    time.sleep(0.05)
hvd.shutdown()
"""
SSH = """#!/bin/sh
# ssh to this machine: the other side has none of this side's variables.
echo "$@" >>"$(dirname "$0")/ssh.log"
for last; do :; done
exec env -i PATH="$PATH" HOME="$HOME" sh -c "$last"
"""


@dataclass
class Run:
    """A horovodrun with two local workers and one behind an ssh."""

    folder: Path
    process: subprocess.Popen[bytes]
    workers: list[dict[str, str]]

    @property
    def port(self) -> int:
        return int(self.workers[0]["HOROVOD_GLOO_RENDEZVOUS_PORT"])

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> int:
        """Return the status of an answer; 0: the connection was closed without one."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with suppress(http.client.HTTPException, ConnectionError):
            client.request(method, path, body, headers)
            return client.getresponse().status
        return 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One run for all tests here."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "hosts.sh").write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\necho far:1\n")
    (folder / "ssh").write_text(SSH)
    for name in ("hosts.sh", "ssh"):
        (folder / name).chmod(0o755)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "MY_API_KEY": SECRET,
                        "QUOTED": "it's \"a\" $HOME\nline"}
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / "horovodrun"), "-np", "3", "--network-interfaces",
             "lo", "--host-discovery-script", str(folder / "hosts.sh"), sys.executable, "-c",
             WORKER], env=env, cwd=folder, stdout=output, stderr=output)
    try:
        wait_for("workers", lambda: len(list(folder.glob("worker-*"))) == 3
                 or process.poll() is not None, 120)
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("worker-*"))]
        assert len(found) == 3, (folder / "output").read_text()
        yield Run(folder, process, found)
        (folder / "stop").touch()
        assert process.wait(60) == 0, (folder / "output").read_text()
    finally:
        process.terminate()
        process.wait(60)


def pickled(path: Path) -> bytes:
    """Return what executes a command where it is unpickled."""
    return pickle.dumps(Pickled(f"touch {path}"))


@pytest.mark.parametrize(("method", "path"), [
    ("PUT", "/worker_addresses/localhost:0"), ("PUT", "/worker_addresses/far:0"),
    ("PUT", "/global/rank_0"), ("PUT", "/runfunc/func"), ("GET", "/rank_and_size/localhost:0"),
    ("GET", "/global/rank_0"), ("DELETE", "/global/0"), ("HEAD", "/hosts.sh"), ("GET", "/"),
    ("POST", "/worker_addresses/localhost:0")])
@pytest.mark.parametrize("token", ["", "wrong", "0" * 64])
def test_a_client_without_the_key_is_not_answered(run: Run, method: str, path: str, token: str,
                                            tmp_path: Path) -> None:
    """Neither a pickle, which was executed, nor a question, which could take a worker's place."""
    body = base64.b64encode(pickled(tmp_path / "executed"))
    headers = {secret.TOKEN_HEADER: token} if token else {}
    assert run.ask(method, path, body, **headers) in (403, 0)  # 0: the body was not read
    assert not (tmp_path / "executed").exists() and run.process.poll() is None


def test_a_pickle_is_not_loaded_from_one_who_knows_the_token(run: Run, tmp_path: Path) -> None:
    """The token goes over the network in clear, so it must not be enough to run code."""
    token = run.workers[0]["_HOROVOD_LAUNCH_TOKEN"]
    body = base64.b64encode(pickled(tmp_path / "executed"))
    run.ask("PUT", "/worker_addresses/other:0", body, **{secret.TOKEN_HEADER: token})
    assert run.ask("GET", "/global/no", **{secret.TOKEN_HEADER: token}) == 404
    assert not (tmp_path / "executed").exists() and run.process.poll() is None


@pytest.mark.parametrize("key", ["", "token", "secret"])
def test_the_notification_service_loads_no_pickle_of_others(run: Run, key: str,
                                                            tmp_path: Path) -> None:
    """Its key is on no wire: neither the token nor a guess is it."""
    token = bytes.fromhex(run.workers[0]["_HOROVOD_LAUNCH_TOKEN"])
    message = pickled(tmp_path / "executed")
    digest = secret.compute_digest(token if key == "token" else key.encode(), message)
    for worker in run.workers:
        with socket.create_connection(("127.0.0.1", int(worker["service"])), 20) as client:
            client.sendall(digest + struct.pack("i", len(message)) + message)
            with suppress(ConnectionError):
                assert client.recv(1) == b""
    assert not (tmp_path / "executed").exists()


def test_all_listen_on_loopback_when_all_hosts_are_local(run: Run) -> None:
    """The rendezvous server, and the notification services of the workers."""
    driver = psutil.Process(run.process.pid)
    places = {place.laddr[0] for place in driver.net_connections() if place.status == "LISTEN"}
    assert places == {"127.0.0.1"}
    for worker in run.workers:
        process = psutil.Process(int(worker["pid"]))
        places = {place.laddr[0] for place in process.net_connections()
                  if place.status == "LISTEN" and place.laddr[1] == int(worker["service"])}
        assert places == {"127.0.0.1"}


def test_no_command_line_shows_the_environment_or_the_key(run: Run) -> None:
    """Neither here nor at the other end of an ssh, and yet each worker has both."""
    commands = [" ".join(process.cmdline()) for process in psutil.Process(
        run.process.pid).children(recursive=True)] + [(run.folder / "ssh.log").read_text()]
    shown = "\n".join(commands)
    assert "HOROVOD_RANK=" in shown and "far" in shown
    for worker in run.workers:
        assert worker["MY_API_KEY"] == SECRET and worker["QUOTED"] == "it's \"a\" $HOME\nline"
        for name in ("_HOROVOD_LAUNCH_KEY", "_HOROVOD_LAUNCH_TOKEN", "MY_API_KEY"):
            assert worker[name] not in shown
    assert {worker["HOROVOD_HOSTNAME"] for worker in run.workers} == {
        "localhost", "127.0.0.1", "far"}


# --- hvd.run(func) -------------------------------------------------------------------------------

@pytest.fixture
def store() -> Iterator[tuple[int, bytes]]:
    """The store of hvd.run(func), and its key."""
    key, server = secret.make_secret_key(), KVStoreServer(verbose=0)
    yield server.start_server("127.0.0.1", key), key
    server.shutdown_server()


def test_a_function_is_loaded_only_with_the_key_of_the_launch(
        store: tuple[int, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from one who knows only the token, not under another name, and not a changed one."""
    port, key = store
    monkeypatch.setattr(secret, "launch_key", lambda: key)
    put_data_into_kvstore("127.0.0.1", port, "runfunc", "func", {"a": 1})
    assert read_data_from_kvstore("127.0.0.1", port, "runfunc", "func") == {"a": 1}
    evil = base64.b64encode(pickled(tmp_path / "executed"))
    good = send_request("GET", "127.0.0.1", port, "runfunc", "func")
    assert secret.opened(key, "runfunc/func", good)
    for value in (evil, bytes(32) + evil, secret.sealed(b"other", "runfunc/func", evil),
                  secret.sealed(key, "runfunc/other", evil), good[:32] + evil,
                  secret.sealed(bytes.fromhex(secret.token(key)), "runfunc/func", evil), b""):
        send_request("PUT", "127.0.0.1", port, "runfunc", "func", value)
        with pytest.raises(Exception, match="Security error"):
            read_data_from_kvstore("127.0.0.1", port, "runfunc", "func")
    assert not (tmp_path / "executed").exists()


def test_a_server_does_not_start_without_a_key() -> None:
    """Spark and Ray start one so."""
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="key of their launch"):
        RendezvousServer().start()
    assert threading.active_count() == before


@pytest.mark.usefixtures("turn")
def test_a_function_runs_on_all_workers(tmp_path: Path) -> None:
    """hvd.run, with and without elastic training: the function goes out, and the results come back.
    """
    code = ("import horovod\n"
            "def main():\n"
            "    import horovod.torch as hvd\n"
            "    hvd.init()\n"
            "    return hvd.rank() * 10 + hvd.size()\n"
            "print('static', horovod.run(main, num_proc=2, use_gloo=True))\n"
            "print('elastic', sorted(horovod.run(main, num_proc=2, min_num_proc=2, max_num_proc=2,"
            " hosts='localhost:1,127.0.0.1:1', network_interfaces=['lo'])))\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                          text=True, timeout=240)
    assert "static [2, 12]" in done.stdout and "elastic [2, 12]" in done.stdout, done.stderr
