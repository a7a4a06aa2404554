"""The agent on a host: what it makes of the metadata service and the machine, and whom it
answers."""

from __future__ import annotations

import errno
import http.client
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from metadata_server import MetadataServer
from netlab import wait_for
from ports import free_port

from elastic_trainer.__main__ import main
from elastic_trainer.discovery import agent as agent_module
from elastic_trainer.discovery import health as health_module
from elastic_trainer.discovery.agent import AgentServer
from elastic_trainer.discovery.client import AgentUnreachable, ask, read_key
from elastic_trainer.discovery.commands import user_of_workers
from elastic_trainer.discovery.ec2 import CloudUnavailable
from elastic_trainer.discovery.health import HURRY_S, Agent, workers
from elastic_trainer.discovery.hosts import Instance, Policy
from elastic_trainer.discovery.notices import Metadata, MetadataUnavailable
from elastic_trainer.discovery.poll import Poller
from elastic_trainer.driver import standby_shim as shim
from elastic_trainer.host.processes import SHORT_NAME
from elastic_trainer.host.standbys import FOLDER_VARIABLE, standby_folder, waiting_in
from elastic_trainer.wire.gate import SPARE
from elastic_trainer.wire.seal import Kind, seal

ROOT = Path(__file__).resolve().parent.parent
KEY = b"k" * 32
PATIENCE_S = 60.0


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataServer]:
    monkeypatch.setattr("elastic_trainer.discovery.notices.TIMEOUT_S", PATIENCE_S)
    with MetadataServer() as service:
        yield service


@pytest.fixture
def agent(metadata: MetadataServer, tmp_path: Path) -> Iterator[tuple[Agent, str]]:
    """An agent that serves, and its address."""
    agent = Agent(Metadata(metadata.endpoint), tmp_path)
    server = AgentServer("127.0.0.1", 0, KEY, agent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield agent, f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_reads_notices_with_a_token_and_renews_it(metadata: MetadataServer) -> None:
    """404 is no notice; 401 is an old token; the deadline is in seconds since 1970."""
    service = Metadata(metadata.endpoint)
    assert service.notice() is None and not service.rebalance()
    metadata.tokens.clear()  # they have expired
    metadata.announce("2020-01-07T01:03:47Z")
    metadata.recommend()
    notice = service.notice()
    assert notice and (notice.action, notice.deadline) == ("terminate", 1578359027.0)
    assert service.rebalance()


def test_a_notice_in_a_form_that_we_do_not_know_is_a_notice(metadata: MetadataServer) -> None:
    """It is a notice; two minutes are assumed."""
    metadata.documents["spot/instance-action"] = "soon"
    notice = Metadata(metadata.endpoint).notice()
    assert notice and notice.action == "unknown" and notice.deadline > time.time() + 60


@pytest.mark.parametrize("fault", ["hung", "500", "absent"])
def test_no_answer_is_unknown_and_no_notice(metadata: MetadataServer, fault: str, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """The host stays ready, and reports why it knows nothing."""
    monkeypatch.setattr("elastic_trainer.discovery.notices.TIMEOUT_S", 0.3)
    endpoint = metadata.endpoint
    match fault:
        case "hung":
            metadata.is_hung.set()
        case "500":
            metadata.broken_status = 500
        case "absent":
            endpoint = "http://127.0.0.1:1"
    with pytest.raises(MetadataUnavailable):
        Metadata(endpoint).notice()
    agent = Agent(Metadata(endpoint), tmp_path)
    agent.read_notices()
    assert agent.health()["state"] == "ready" and "127.0.0.1" in agent.health()["why"]


def test_reports_ready_then_draining_and_never_ready_again(metadata: MetadataServer,
                                                        agent: tuple[Agent, str]) -> None:
    """A notice is never withdrawn; a rebalance recommendation is only reported."""
    here, address = agent
    here.read_notices()
    assert ask(address, KEY, PATIENCE_S).state == "ready"
    metadata.recommend()
    here.read_notices()
    answer = ask(address, KEY, PATIENCE_S)
    assert answer.state == "ready" and answer.rebalance
    metadata.announce()
    here.read_notices()
    metadata.documents.clear()
    here.read_notices()
    answer = ask(address, KEY, PATIENCE_S)
    assert answer.state == "draining" and answer.why == "terminate at 01:03:47 UTC"
    assert answer.deadline == 1893978227.0


Usage = namedtuple("Usage", "total used free")


def test_reports_sick_when_disk_or_memory_is_full_or_a_gpu_is_gone(
        agent: tuple[Agent, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And ready again when it is not."""
    here, address = agent
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: Usage(1000, 999, 1))
        here.examine()
        assert "disk full" in ask(address, KEY, PATIENCE_S).why
    with monkeypatch.context() as patch:
        patch.setattr(health_module, "MEMORY_FREE", 1.0)  # no machine has so much
        here.examine()
        answer = ask(address, KEY, PATIENCE_S)
        assert answer.state == "sick" and re.fullmatch(r"no memory: \d+ MiB left", answer.why)
    monkeypatch.setattr(health_module, "gpu_count", lambda: 2)
    here.examine()
    assert ask(address, KEY, PATIENCE_S).state == "ready"
    monkeypatch.setattr(health_module, "gpu_count", lambda: 1)
    here.examine()
    answer = ask(address, KEY, PATIENCE_S)
    assert (answer.state, answer.why) == ("sick", "GPU lost: 1 of 2 answer")
    monkeypatch.setattr(health_module, "gpu_count", lambda: 2)
    here.examine()
    assert ask(address, KEY, PATIENCE_S).state == "ready"


HANGS = """#!/bin/sh
[ -e {folder}/hangs ] && {{ echo $$ >{folder}/hung; exec sleep 60; }}
echo "GPU 0: one of ours"
"""


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a GPU whose nvidia-smi hangs while a file exists; returns that file."""
    (tmp_path / "nvidia-smi").write_text(HANGS.format(folder=tmp_path))
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    (tmp_path / "dev" / "nvidiactl").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "hangs"


def test_a_gpu_that_does_not_answer_is_lost(nvidia_smi: Path, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it did not at the agent's start: the device is there. And when nothing ends the
    question."""
    monkeypatch.setattr(health_module, "NVIDIA_SMI_S", 0.3)
    nvidia_smi.touch()
    here = Agent(None, tmp_path, tmp_path / "dev")
    here.examine()
    assert (here.health()["state"], here.health()["why"]) == ("sick", "GPU lost: 0 of 1 answer")
    nvidia_smi.unlink()
    monkeypatch.setattr(health_module, "NVIDIA_SMI_S", 30.0)
    here.examine()
    assert here.health()["state"] == "ready"
    monkeypatch.setattr(health_module, "HUNG_S", 0.0)
    nvidia_smi.touch()
    # The shell may have been ended before it could write.
    (tmp_path / "hung").unlink(missing_ok=True)
    examining = threading.Thread(target=here.examine)
    examining.start()
    deadline = time.monotonic() + PATIENCE_S
    while not (tmp_path / "hung").exists() or not (tmp_path / "hung").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert here.health()["why"].startswith("GPU lost, or disk: they have not answered for")
    os.kill(int((tmp_path / "hung").read_text()), signal.SIGKILL)
    examining.join(PATIENCE_S)
    assert not examining.is_alive()


def test_a_notice_is_reported_while_a_gpu_hangs(
        metadata: MetadataServer, nvidia_smi: Path, tmp_path: Path) -> None:
    """The agent's process examines and listens at once."""
    key = tmp_path / "key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    process = subprocess.Popen([
        sys.executable, "-m", "elastic_trainer.discovery", "agent", "--bind", "127.0.0.1", "--port",
        "0", "--key-file",
        str(key), "--metadata", metadata.endpoint, "--folder",
        str(tmp_path)
    ],
                               cwd=ROOT,
                               stdout=subprocess.PIPE,
                               text=True)
    try:
        assert process.stdout
        address = f"127.0.0.1:{int(process.stdout.readline())}"
        deadline = time.monotonic() + PATIENCE_S

        def wait_for_hang() -> int:
            while not (tmp_path / "hung").exists() or not (tmp_path / "hung").read_text():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            return int((tmp_path / "hung").read_text())

        assert ask(address, KEY, PATIENCE_S).state == "ready"
        nvidia_smi.touch()
        pid = wait_for_hang()
        metadata.announce()
        while ask(address, KEY, PATIENCE_S).state != "draining":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert Path(f"/proc/{pid}").exists()  # it hangs still
        os.kill(pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()


def test_a_host_whose_clock_is_off_is_sick(agent: tuple[Agent, str]) -> None:
    """By the poller's clock, with the difference."""
    answer = ask(agent[1], KEY, PATIENCE_S, clock=lambda: time.time() + 300)
    assert answer.state == "sick" and re.search(r"-(29|30)\d s off", answer.why)


def test_refuses_unauthenticated_requests_and_rubbish(agent: tuple[Agent, str]) -> None:
    """A wrong key, no key, bytes that are no HTTP or no GET: refused, each counted, and the agent
    goes on."""
    here, address = agent
    host, port = address.split(":")
    with pytest.raises(AgentUnreachable, match="key"):
        ask(address, b"x" * 32, PATIENCE_S)
    rubbish = (b"\x80\x04\x95pickle\n\n", b"GET /health HTTP/1.1\r\n\r\n",
               b"PUT /health HTTP/1.1\r\n\r\n", b"\r\n", b"no line",
               os.urandom(300).replace(b"\n", b"") + b"\r\n\r\n")
    for bytes_ in rubbish:
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as stranger:
            stranger.sendall(bytes_)
            stranger.shutdown(socket.SHUT_WR)
            while output := stranger.recv(4096):
                assert b"ready" not in output
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
    connection.request(
        "GET",
        "/health",
        headers={"X-Elastic-Nonce": "a", "X-Elastic-Signature": "é".encode("latin1")})
    assert connection.getresponse().status == 403
    # A poller that dies before it has sent anything.
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as nobody:
        nobody.shutdown(socket.SHUT_WR)
        assert nobody.recv(1) == b""
    deadline = time.monotonic() + PATIENCE_S
    while here.refused < len(rubbish) + 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    answer = ask(address, KEY, PATIENCE_S)
    assert (answer.state, answer.refused) == ("ready", len(rubbish) + 2)


def test_refuses_a_question_that_was_asked_before(agent: tuple[Agent, str],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has overheard one learns nothing by it, whatever the clocks say; as many as NONCES
    are remembered."""
    here, address = agent
    here_and_there = address.split(":")

    def status(nonce: str) -> int:
        connection = http.client.HTTPConnection(here_and_there[0],
                                                int(here_and_there[1]),
                                                timeout=PATIENCE_S)
        connection.request("GET",
                           "/health",
                           headers={
                               "X-Elastic-Nonce": nonce,
                               "X-Elastic-Signature": seal(KEY, Kind.QUESTION, nonce.encode(),
                                                           here_and_there[0].encode(),
                                                           b"GET /health")
                           })
        return connection.getresponse().status

    assert [status("once"), status("once"), status("another")] == [200, 403, 200]
    deadline = time.monotonic() + PATIENCE_S
    while here.refused < 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    monkeypatch.setattr(agent_module, "NONCES", 3)
    server = AgentServer("127.0.0.1", 0, KEY, here)
    assert [server.is_new(nonce)
            for nonce in "abcbdab"] == [True, True, True, False, True, True, True]
    server.server_close()
    assert len(server._known) == 3


def test_refuses_a_question_that_was_asked_another_host(agent: tuple[Agent, str]) -> None:
    """One that was overheard has a nonce which no other host's agent has seen."""
    with socket.create_server(("127.0.0.2", 0)) as other, ThreadPoolExecutor() as pool:
        asking = pool.submit(ask, f"127.0.0.2:{other.getsockname()[1]}", KEY, PATIENCE_S)
        connection, _ = other.accept()
        with connection:
            question = b""
            while not question.endswith(b"\r\n\r\n"):
                question += connection.recv(4096)
        assert isinstance(asking.exception(), AgentUnreachable)
    host, _, port = agent[1].rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        connection.sendall(question)
        assert connection.recv(4096).startswith(b"HTTP/1.1 403 ")


def test_a_question_that_is_sent_back_is_no_answer() -> None:
    """Its signature was right for the same bytes as an answer; the poller must not read a body that
    no agent has signed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def mirror() -> None:
            connection, _ = listener.accept()
            with connection:
                heard = b""
                while b"\r\n\r\n" not in heard:
                    heard += connection.recv(4096)
                signature = next(line for line in heard.split(b"\r\n")
                                 if line.startswith(b"X-Elastic-Signature"))
                connection.sendall(b"HTTP/1.1 200 OK\r\n" + signature + b"\r\n\r\nGET /health")

        thread = threading.Thread(target=mirror)
        thread.start()
        with pytest.raises(AgentUnreachable, match="does not have the run's key"):
            ask(f"127.0.0.1:{listener.getsockname()[1]}", KEY, PATIENCE_S)
        thread.join()


FEW = 48
"""So many descriptors a test's agent has."""


def test_a_host_is_ready_when_others_hold_connections_to_its_agent(tmp_path: Path) -> None:
    """More idle ones than the agent has descriptors. The host looked sick until the agent was
    started again."""
    key = tmp_path / "key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    command = [
        sys.executable, "-m", "elastic_trainer.discovery", "agent", "--bind", "127.0.0.1", "--port",
        "0", "--key-file",
        str(key), "--no-metadata", "--folder",
        str(tmp_path)
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE,
                          text=True) as process, ExitStack() as stack:
        try:
            assert process.stdout
            port = int(process.stdout.readline())
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (FEW, FEW))
            for _ in range(2 * FEW):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
            deadline = time.monotonic() + PATIENCE_S

            def state() -> str:
                try:
                    return ask(f"127.0.0.1:{port}", KEY, 20.0).state
                except AgentUnreachable:
                    return "unreachable"

            while state() != "ready":
                assert time.monotonic() < deadline
            stack.close()
            assert state() == "ready" and process.poll() is None
        finally:
            process.kill()


def test_unauthenticated_connections_leave_the_agent_its_descriptors(
        agent: tuple[Agent, str]) -> None:
    """Beyond the limit the oldest is closed and counted. None has a thread."""
    here, address = agent
    threads, (host, port) = threading.active_count(), address.split(":")
    with ExitStack() as stack:
        for _ in range(SPARE + 30):
            stack.enter_context(socket.create_connection((host, int(port)), 20))
        answer = ask(address, KEY, PATIENCE_S)
    assert answer.state == "ready" and here.refused >= 30
    assert threading.active_count() <= threads + 1


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_a_host_is_examined_again_when_descriptors_are_free(agent: tuple[Agent, str],
                                                            monkeypatch: pytest.MonkeyPatch,
                                                            code: int) -> None:
    """Without them the last verdict stands, and `why` reports that it is old. The examining thread
    ended of it."""
    here, address = agent
    here.examine()
    with monkeypatch.context() as patch:
        def fails(*_: Any) -> Any:
            raise OSError(code, os.strerror(code))

        patch.setattr(health_module, "gpu_count", fails)
        here.examine()
        answer = ask(address, KEY, PATIENCE_S)
        assert answer.state == "ready" and answer.why.startswith("not examined: ")
        assert here.health()["why"].startswith("not examined: ")
    here.examine()
    assert not here.health()["why"].startswith("not examined")


def test_no_free_descriptor_is_no_lost_gpu(tmp_path: Path, nvidia_smi: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """The question could not be asked."""
    here = Agent(None, tmp_path, tmp_path / "dev")

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(subprocess, "run", fails)
    here.examine()
    assert here.health()["state"] == "ready"


def test_workers_are_called_at_the_end_when_the_first_look_at_them_fails(
        agent: tuple[Agent, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a free descriptor the agent goes on, and looks again."""
    here, _ = agent
    here.drain("terminate", time.time() + 1.0)
    looks, called = iter([OSError(errno.EMFILE, "as planned"), [{"pid": 4242}]]), list[tuple[int,
                                                                                             int]]()

    def look() -> Any:
        found = next(looks)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(health_module, "workers", look)
    monkeypatch.setattr(os, "kill", lambda *word: called.append(word))
    here.last_call()
    assert called == []
    here.last_call()
    here.last_call()
    assert called == [(4242, signal.SIGTERM)]


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """With the command that mends it."""
    path = tmp_path / "key"
    path.write_text("0" * 64)
    path.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        read_key(path)
    path.chmod(0o600)
    assert read_key(path) == b"0" * 64


class TwoHosts:
    """A cloud with two machines: this one under two names."""

    def instances(self) -> list[Instance]:
        return [
            Instance("i-1", "127.0.0.1", launched=1.0),
            Instance("i-2", "127.0.0.2", launched=2.0)
        ]


@pytest.mark.usefixtures("alone")  # an agent counts all workers of the machine
def test_a_notice_takes_the_host_off_the_list_within_a_poll(
        metadata: MetadataServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real agent process sees it, the poller reads it, the file loses the host; the table shows
    why."""
    key, hosts = tmp_path / "key", tmp_path / "hosts"
    key.write_bytes(KEY)
    key.chmod(0o600)
    command = [sys.executable, "-m", "elastic_trainer.discovery",
               "agent", "--bind", "0.0.0.0", "--port", "0", "--key-file", str(key),
               "--metadata", metadata.endpoint, "--folder", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        port = int(process.stdout.readline())
        poller = Poller(TwoHosts(),
                        hosts,
                        Policy(agents=True, settle_s=0.0),
                        agent_port=port,
                        key=KEY,
                        events_file=tmp_path / "events.jsonl")
        with ThreadPoolExecutor(4) as pool:
            deadline = time.monotonic() + PATIENCE_S
            while not hosts.exists() or len(hosts.read_text().splitlines()) < 2:
                assert time.monotonic() < deadline
                poller.poll(pool)
            metadata.announce()
            while hosts.read_text():
                assert time.monotonic() < deadline
                poller.poll(pool)
                time.sleep(0.02)
        assert main(["hosts", str(hosts)]) == 0
        assert "terminate at" in capsys.readouterr().out
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
    logged = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert sorted((e["event"], e["id"]) for e in logged
                  if e["event"] != "discovery.hosts_changed") == [("discovery.host_in", "i-1"),
                                                                  ("discovery.host_in", "i-2"),
                                                                  ("discovery.host_out", "i-1"),
                                                                  ("discovery.host_out", "i-2")]


def test_no_host_is_logged_as_out_while_the_answer_is_doubted(tmp_path: Path) -> None:
    """The list stands until the cloud has confirmed it; then the reason is logged, whatever it is
    by then."""
    cloud, now = TwoHosts(), 0.0
    everyone, nobody = cloud.instances(), list[Instance]()
    poller = Poller(cloud,
                    tmp_path / "hosts",
                    Policy(settle_s=0.0),
                    events_file=tmp_path / "events.jsonl",
                    clock=lambda: now,
                    patience_s=20.0,
                    agent_timeout_s=PATIENCE_S,
                    agents_patience_s=PATIENCE_S)
    outs = []
    with ThreadPoolExecutor(1) as pool:
        for answer in (everyone, nobody, everyone, nobody, nobody):
            cloud.instances = lambda answer=answer: answer  # type: ignore[method-assign, misc]
            poller.poll(pool)
            now += 10.0
            logged = [
                json.loads(line)["event"]
                for line in (tmp_path / "events.jsonl").read_text().splitlines()
            ]
            outs.append(logged.count("discovery.host_out"))
    assert outs == [0, 0, 0, 0, 2]
    assert (tmp_path / "hosts").read_text() == ""


def test_a_notice_counts_while_an_odd_answer_is_doubted_and_the_cloud_is_silent(
        tmp_path: Path) -> None:
    """Who has vanished from one answer is asked still; the doubt stays until the cloud has answered
    again."""
    cloud, now, agent = TwoHosts(), 0.0, Agent(None, tmp_path)
    server = AgentServer("127.0.0.2", free_port(), KEY, agent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    poller = Poller(cloud,
                    tmp_path / "hosts",
                    Policy(settle_s=0.0),
                    agent_port=server.server_address[1],
                    key=KEY,
                    clock=lambda: now,
                    patience_s=20.0,
                    agent_timeout_s=PATIENCE_S,
                    agents_patience_s=PATIENCE_S)
    everyone, nobody, listed = cloud.instances(), list[Instance](), []
    try:
        with ThreadPoolExecutor(2) as pool:
            for answer in (everyone, nobody, None, None, nobody):
                def instances(answer: list[Instance] | None = answer) -> list[Instance]:
                    if answer is None:
                        raise CloudUnavailable("as planned")
                    return answer

                cloud.instances = instances  # type: ignore[method-assign]
                poller.poll(pool)
                listed.append((tmp_path / "hosts").read_text())
                now += 100.0
                if len(listed) == 3:
                    agent.drain("terminate", None)
    finally:
        server.shutdown()
        server.server_close()
    one, two = "127.0.0.1:1\n", "127.0.0.2:1\n"
    assert listed == [one + two, one + two, one + two, one, ""]


def test_a_host_that_flaps_in_the_clouds_list_is_logged_as_held_back(tmp_path: Path) -> None:
    """Each arrival and departure is logged. From the third arrival on it stays off the list, and
    that is logged with its reason."""
    cloud, now = TwoHosts(), 0.0
    here, there = cloud.instances()
    poller = Poller(cloud,
                    tmp_path / "hosts",
                    Policy(settle_s=0.0),
                    events_file=tmp_path / "events.jsonl",
                    clock=lambda: now,
                    patience_s=20.0,
                    agent_timeout_s=PATIENCE_S,
                    agents_patience_s=PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        for state in ("running", "stopping", "running", "stopping", "running", "running"):
            cloud.instances = lambda state=state: [here, replace(there, state=state)
                                                   ]  # type: ignore[method-assign, misc]
            poller.poll(pool)
            now += 10.0
    logged = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [e["event"].partition(".")[2] for e in logged if e.get("id") == there.id] == [
        "host_in", "host_out", "host_in", "host_out", "host_held_back"]
    assert logged[-1]["why"] == "held back: it came 3 times in 600 s"
    assert (tmp_path / "hosts").read_text() == f"{here.name}:1\n"


@pytest.mark.usefixtures("alone")  # an agent counts all workers of the machine
def test_sigterm_drains_the_host(metadata: MetadataServer, tmp_path: Path) -> None:
    """Whoever stops the machine stops its services first; without workers the agent ends at
    once."""
    key = tmp_path / "key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    process = subprocess.Popen([
        sys.executable, "-m", "elastic_trainer.discovery", "agent", "--bind", "127.0.0.1", "--port",
        "0", "--key-file",
        str(key), "--no-metadata", "--folder",
        str(tmp_path)
    ],
                               cwd=ROOT,
                               stdout=subprocess.PIPE,
                               text=True)
    assert process.stdout
    address = f"127.0.0.1:{int(process.stdout.readline())}"
    assert ask(address, KEY, PATIENCE_S).state == "ready"
    worker = subprocess.Popen(["sleep", "60"],
                              env=os.environ | {"ELASTIC_TRAINER_WORKER": "host/0/1"})
    try:
        # There a moment after exec.
        wait_for("environment", Path(f"/proc/{worker.pid}/environ").read_bytes)
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE_S
        while (answer := ask(address, KEY, PATIENCE_S)).state != "draining":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert answer.facts["workers"] == ["booting"]
    finally:
        worker.kill()
        worker.wait()
        try:
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def test_workers_are_asked_to_hurry_when_little_of_the_notice_is_left(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM, once: a leaver that waits for its checkpoint (up to a minute) must not be surprised
    by the end."""
    logged: list[tuple[int, int]] = []
    monkeypatch.setattr("elastic_trainer.discovery.health.workers",
                        lambda: [{"pid": 12345, "worker": "host/0/1"}])
    monkeypatch.setattr("os.kill", lambda *what: logged.append(what))
    early, late, endless = (Agent(None, tmp_path) for _ in range(3))
    early.drain("a notice", time.time() + HURRY_S + 60.0)
    late.drain("a notice", time.time() + HURRY_S - 1.0)
    endless.drain("a notice without a time", None)
    for agent in (early, late, endless, late):
        agent.last_call()
    assert logged == [(12345, signal.SIGTERM)]


def test_the_standbys_that_wait_are_counted(tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """By their sockets; one whose keeper was killed is none."""
    (tmp_path / f"0123456789abcdef-{os.getpid()}.sock").touch()
    (tmp_path / "0123456789abcdef-4194999.sock").touch()
    assert waiting_in(tmp_path) == 1
    assert waiting_in(tmp_path / "none") == 0
    (tmp_path / "command-odd.sock").touch()
    assert waiting_in(tmp_path) == 1
    assert waiting_in(tmp_path, os.getuid() + 1) == 0  # the folder of another user
    (tmp_path / "link").symlink_to(tmp_path)
    assert waiting_in(tmp_path / "link") == 0
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert Agent(None, tmp_path).health()["standby"] == 1


def test_the_folder_of_standbys_is_the_same_for_shim_and_agent(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """The shim imports nothing of ours and has a copy."""
    for setting in ("", "/somewhere"):
        monkeypatch.setenv(FOLDER_VARIABLE, setting)
        assert shim.FOLDER_VARIABLE == FOLDER_VARIABLE
        assert standby_folder(os.environ) == shim.standby_folder(os.environ)


def test_a_worker_behind_a_shim_or_with_children_counts_once() -> None:
    """All have its name; the outermost is it, and what signals go to."""
    worker = subprocess.Popen(["/bin/sh", "-c", "sleep 60 & echo; wait"],
                              env={"ELASTIC_TRAINER_WORKER": "host/7/7"},
                              stdout=subprocess.PIPE,
                              start_new_session=True)
    try:
        assert worker.stdout and worker.stdout.readline()
        assert [(w["pid"], w["doing"]) for w in workers()
                if w["worker"] == "host/7/7"] == [(worker.pid, "booting")]
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


def test_what_a_worker_does_is_its_own_short_name_not_its_children_s() -> None:
    """It is the short name of its process; a child that it forks (to load data, say) keeps an
    old one."""
    code = """
import os, time
from elastic_trainer.host.processes import show
show("training", 41)
if not os.fork():
    os.write(1, b"loading\\n")
    time.sleep(60)
show("training", 1234567)
os.write(1, b"training\\n")
time.sleep(60)
"""
    worker = subprocess.Popen([sys.executable, "-c", code],
                              env=os.environ | {"ELASTIC_TRAINER_WORKER": "host/7/8"},
                              stdout=subprocess.PIPE,
                              cwd=ROOT,
                              start_new_session=True,
                              text=True)
    try:
        assert worker.stdout and {worker.stdout.readline(),
                                  worker.stdout.readline()} == {"loading\n", "training\n"}
        assert [w["doing"] for w in workers() if w["worker"] == "host/7/8"] == ["step 1234567"]
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


NOBODY = 65534


@contextmanager
def running(**how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose environment is there."""
    process = subprocess.Popen(["/bin/sh", "-c", "echo; exec sleep 60"],
                               stdout=subprocess.PIPE,
                               cwd="/",
                               **how)
    try:
        assert process.stdout and process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(os.geteuid() != 0,
                    reason="only root sees the environment of other users' processes")
@pytest.mark.parametrize("name", ["x" * 120_000, "host/9/1"], ids=["long", "the same"])
def test_no_other_user_silences_an_agent_of_roots(agent: tuple[Agent, str], name: str) -> None:
    """Anybody can start a process with a long name for a worker, or with that of a worker which is
    there."""
    here, address = agent
    environment = {"ELASTIC_TRAINER_WORKER": name}
    with running(env={"ELASTIC_TRAINER_WORKER": "host/9/1"}) as worker, \
            running(env=environment, user=NOBODY) as other:
        assert ask(address, KEY, PATIENCE_S).state == "ready"
        logged = {one["worker"]: one["pid"] for one in here.health()["workers"]}
        assert logged["host/9/1"] == worker.pid and other.pid not in logged.values()
        theirs = Agent(None, here.folder, user=NOBODY)
        assert [one["pid"] for one in theirs.workers()] == [other.pid]
        assert len(theirs.health()["workers"][0]["worker"]) <= 120


def test_an_answer_arrives_for_any_number_of_workers(
        agent: tuple[Agent, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number and their names are bounded: an answer that is too long is none."""
    crowd = [{"pid": 4_000_000, "worker": f"{number}" * 300, "doing": "step 123456789"}
             for number in range(5000)]
    monkeypatch.setattr(health_module, "workers", lambda *_: crowd)
    assert len(ask(agent[1], KEY, PATIENCE_S).facts["workers"]) == 256


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_an_agent_of_roots_counts_the_workers_of_the_keys_owner(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints that at its start: workers of others are not counted."""
    key = tmp_path / "key"
    key.touch()
    assert user_of_workers(key) == 0
    os.chown(key, NOBODY, NOBODY)
    assert user_of_workers(key) == NOBODY
    assert capsys.readouterr().err.count("--user") == 2


@pytest.mark.parametrize("phase", ["standby", "waiting", "training", "reviving", "finished"])
@pytest.mark.parametrize("step", [0, 123456, 12345678])
def test_an_agent_recognizes_every_short_name_of_a_worker(phase: str, step: int) -> None:
    """Neither package imports the other; the kernel keeps 15 characters, and no number is cut."""
    code = (f"from elastic_trainer.host.processes import show; show({phase!r}, {step}); "
            "print(open('/proc/self/comm').read())")
    shown = subprocess.run([sys.executable, "-c", code],
                           stdout=subprocess.PIPE,
                           text=True,
                           check=True,
                           cwd=ROOT).stdout
    output = SHORT_NAME.fullmatch(shown.strip())
    assert output and output[2] in (f" {step}", None) and (output[2] or step > 1e6)


@pytest.mark.parametrize("token",
                         [b"two\nlines", "\u20ac".encode(), b"\xff\xfe", b"<html>\r\n</html>"])
def test_a_token_that_is_none_is_a_metadata_service_that_cannot_be_used(
        metadata: MetadataServer, tmp_path: Path, token: bytes) -> None:
    """And no reason for an agent to end."""
    metadata.odd_token = token
    agent = Agent(Metadata(metadata.endpoint), tmp_path)
    agent.read_notices()
    answer = agent.health()
    assert answer["state"] == "ready" and "127.0.0.1" in answer["why"]
