"""The agent on a host: what it makes of the metadata service and the machine, and whom it
answers."""

from __future__ import annotations

import errno
import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from metadata_server import MetadataServer
from waiting import until, wait_for

from elastic_trainer.__main__ import main
from elastic_trainer.discovery.agent import AgentServer
from elastic_trainer.discovery.client import AgentUnreachable, ask, read_key
from elastic_trainer.discovery.commands import user_of_workers
from elastic_trainer.discovery.health import HURRY_S, Agent, gpu_count, illness, workers
from elastic_trainer.discovery.hosts import Policy
from elastic_trainer.discovery.place_protocol import Instance, PlaceUnavailable
from elastic_trainer.discovery.places.ec2_metadata import Metadata
from elastic_trainer.discovery.poll import Poller
from elastic_trainer.driver import standby_shim as shim
from elastic_trainer.host.processes import SHORT_NAME
from elastic_trainer.host.remote import AGENT
from elastic_trainer.host.standbys import FOLDER_VARIABLE, standby_folder, waiting_in
from elastic_trainer.wire.gate import SPARE
from elastic_trainer.wire.seal import Kind, seal

ROOT = Path(__file__).resolve().parent.parent
KEY = b"k" * 32
PATIENCE_S = 60.0
Make = Callable[..., tuple[Agent, str]]


@pytest.fixture
def metadata() -> Iterator[MetadataServer]:
    with MetadataServer() as service:
        yield service


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Make]:
    """A maker of agents that serve, with their addresses."""
    with ExitStack() as stack:
        def make(metadata: Metadata | None = None, **how: Any) -> tuple[Agent, str]:
            agent = Agent(metadata, tmp_path, **how)
            server = AgentServer("127.0.0.1", 0, KEY, agent)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.close)
            stack.callback(server.shutdown)
            return agent, f"127.0.0.1:{server.address[1]}"

        yield make


@pytest.fixture
def agent(serve: Make) -> tuple[Agent, str]:
    """An agent that serves, and its address."""
    return serve()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """The file with the run's key."""
    path = tmp_path / "key"
    path.write_bytes(KEY)
    path.chmod(0o600)
    return path


@contextmanager
def agent_process(key: Path, *more: str, bind: str = "127.0.0.1"
                  ) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run the command; yields the process and its port. It counts only workers that it has started
    (`worker`): another one would wait for those of all runs on this machine, and end them."""
    command = [sys.executable, "-m", "elastic_trainer.discovery", "agent", "--bind", bind, "--port",
               "0", "--key-file", str(key), "--folder", str(key.parent), "--starts-workers", *more]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def patient(endpoint: str) -> Metadata:
    return Metadata(endpoint, PATIENCE_S)


# --- the metadata service -------------------------------------------------------------------------

def test_reads_notices_with_a_token_and_renews_it(metadata: MetadataServer) -> None:
    """404 is no notice; 401 is an old token; the deadline is in seconds since 1970. A notice in an
    unknown form is a notice, with two minutes."""
    service = patient(metadata.endpoint)
    assert service.notice() is None and not service.rebalance()
    metadata.tokens.clear()  # they have expired
    metadata.announce("2020-01-07T01:03:47Z")
    metadata.recommend()
    notice = service.notice()
    assert notice and (notice.action, notice.deadline) == ("terminate", 1578359027.0)
    assert service.rebalance()
    metadata.documents["spot/instance-action"] = "soon"
    notice = service.notice()
    assert notice and notice.action == "unknown" and notice.deadline > time.time() + 60


@pytest.mark.parametrize("fault", ["hung", "500", "absent", b"two\nlines", "\u20ac".encode(),
                                   b"\xff\xfe", b"<html>\r\n</html>"])
def test_no_answer_is_unknown_and_no_notice(metadata: MetadataServer, fault: str | bytes,
                                            tmp_path: Path) -> None:
    """Nor is a token that is none. The host stays ready, and reports why it knows nothing."""
    endpoint, timeout_s = metadata.endpoint, PATIENCE_S
    match fault:
        case "hung":
            metadata.is_hung.set()
            timeout_s = 0.3
        case "500":
            metadata.broken_status = 500
        case "absent":
            endpoint = "http://127.0.0.1:1"
        case bytes():
            metadata.odd_token = fault
    service = Metadata(endpoint, timeout_s)
    with pytest.raises(PlaceUnavailable):
        service.notice()
    agent = Agent(service, tmp_path)
    agent.read_notices()
    assert agent.health()["state"] == "ready" and "127.0.0.1" in agent.health()["why"]


def test_reports_ready_then_draining_and_never_ready_again(metadata: MetadataServer, serve: Make
                                                           ) -> None:
    """A notice is never withdrawn; a rebalance recommendation is only reported."""
    here, address = serve(patient(metadata.endpoint))
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


# --- the machine ----------------------------------------------------------------------------------

def test_reports_sick_when_disk_or_memory_is_full_or_a_gpu_is_gone(serve: Make, tmp_path: Path
                                                                   ) -> None:
    """And ready again when it is not."""
    assert illness(tmp_path, disk_free=1.1).startswith("disk full: ")
    assert re.fullmatch(r"no memory: \d+ MiB left", illness(tmp_path, disk_free=0.0,
                                                            memory_free=1.1))
    assert illness(tmp_path / "none").startswith("disk: ")
    found = {"illness": "disk full: 1 MiB left", "gpus": 2}
    here, address = serve(find_illness=lambda _: found["illness"],
                          count_gpus=lambda: found["gpus"])
    for now, why in ((found, "disk full: 1 MiB left"), ({"illness": ""}, ""),
                     ({"gpus": 1}, "GPU lost: 1 of 2 answer"), ({"gpus": 2}, "")):
        found |= now
        here.examine()
        answer = ask(address, KEY, PATIENCE_S)
        assert (answer.state, answer.why) == ("sick" if why else "ready", why)


HANGS = """#!/bin/sh
[ -e {folder}/hangs ] && {{ echo $$ >{folder}/hung; exec sleep 60; }}
echo "GPU 0: one of ours"
"""


class Gpu:
    """A machine with a GPU whose nvidia-smi hangs while it is to."""

    def __init__(self, folder: Path):
        self.hangs, self.hung, self.devices = folder / "hangs", folder / "hung", folder / "dev"
        (folder / "nvidia-smi").write_text(HANGS.format(folder=folder))
        (folder / "nvidia-smi").chmod(0o755)
        self.devices.mkdir()
        (self.devices / "nvidia0").touch()
        (self.devices / "nvidiactl").touch()

    def hung_pid(self) -> int:
        """Return the process that hangs, when there is one."""
        until(lambda: self.hung.exists() and self.hung.read_text())
        return int(self.hung.read_text())


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Gpu(tmp_path)


def test_a_gpu_that_does_not_answer_is_lost(gpu: Gpu, tmp_path: Path) -> None:
    """Also when it did not at the agent's start: the device is there. And when nothing ends the
    question."""
    gpu.hangs.touch()
    here = Agent(None, tmp_path, devices=gpu.devices, count_gpus=partial(gpu_count, 0.3))
    here.examine()
    assert (here.health()["state"], here.health()["why"]) == ("sick", "GPU lost: 0 of 1 answer")
    gpu.hangs.unlink()
    here = Agent(None, tmp_path, devices=gpu.devices, count_gpus=partial(gpu_count, 30.0),
                 hung_s=1e-9)
    here.examine()
    assert here.health()["state"] == "ready"
    gpu.hangs.touch()
    gpu.hung.unlink(missing_ok=True)  # the shell may have been ended before it could write
    examining = threading.Thread(target=here.examine)
    examining.start()
    pid = gpu.hung_pid()
    assert here.health()["why"].startswith("GPU lost, or disk: they have not answered for")
    os.kill(pid, signal.SIGKILL)
    examining.join(PATIENCE_S)
    assert not examining.is_alive()


def test_a_notice_is_reported_while_a_gpu_hangs(metadata: MetadataServer, gpu: Gpu, key: Path
                                                ) -> None:
    """The agent's process examines and listens at once."""
    with agent_process(key, "--metadata", metadata.endpoint) as (_, port):
        assert ask(f"127.0.0.1:{port}", KEY, PATIENCE_S).state == "ready"
        gpu.hangs.touch()
        pid = gpu.hung_pid()
        metadata.announce()
        until(lambda: ask(f"127.0.0.1:{port}", KEY, PATIENCE_S).state == "draining")
        assert Path(f"/proc/{pid}").exists()  # it hangs still
        os.kill(pid, signal.SIGKILL)


def test_a_host_whose_clock_is_off_is_sick(agent: tuple[Agent, str]) -> None:
    """By the poller's clock, with the difference."""
    answer = ask(agent[1], KEY, PATIENCE_S, clock=lambda: time.time() + 300)
    assert answer.state == "sick" and re.search(r"-(29|30)\d s off", answer.why)


def no_descriptor(code: int = errno.EMFILE) -> Callable[..., Any]:
    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fails


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_a_host_is_examined_again_when_descriptors_are_free(serve: Make, code: int) -> None:
    """Without them the last verdict stands, and `why` reports that it is old. The examining thread
    ended of it."""
    counts: list[Callable[[], Any]] = [lambda: None, no_descriptor(code), lambda: None]
    here, address = serve(count_gpus=lambda: counts.pop(0)())
    here.examine()
    here.examine()
    answer = ask(address, KEY, PATIENCE_S)
    assert answer.state == "ready" and answer.why.startswith("not examined: ")
    here.examine()
    assert not here.health()["why"].startswith("not examined")


def test_no_free_descriptor_is_no_lost_gpu(tmp_path: Path, gpu: Gpu,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """The question could not be asked."""
    here = Agent(None, tmp_path, devices=gpu.devices)
    monkeypatch.setattr(subprocess, "run", no_descriptor())
    here.examine()
    assert here.health()["state"] == "ready"


# --- whom it answers ------------------------------------------------------------------------------

RUBBISH = (b"\x80\x04\x95pickle\n\n", b"GET /health HTTP/1.1\r\n\r\n",
           b"PUT /health HTTP/1.1\r\n\r\n", b"\r\n", b"no line",
           os.urandom(300).replace(b"\n", b"") + b"\r\n\r\n")


def test_refuses_unauthenticated_requests_and_rubbish(agent: tuple[Agent, str]) -> None:
    """A wrong key, no key, bytes that are no HTTP or no GET: refused, each counted, and the agent
    goes on."""
    here, address = agent
    host, port = address.split(":")
    with pytest.raises(AgentUnreachable, match="key"):
        ask(address, b"x" * 32, PATIENCE_S)
    for bytes_ in RUBBISH:
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as stranger:
            stranger.sendall(bytes_)
            stranger.shutdown(socket.SHUT_WR)
            while output := stranger.recv(4096):
                assert b"ready" not in output
    assert status(address, "a", "é".encode("latin1")) == 403
    # A poller that dies before it has sent anything.
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as nobody:
        nobody.shutdown(socket.SHUT_WR)
        assert nobody.recv(1) == b""
    until(lambda: here.refused >= len(RUBBISH) + 2)
    answer = ask(address, KEY, PATIENCE_S)
    assert (answer.state, answer.refused) == ("ready", len(RUBBISH) + 2)


def status(address: str, nonce: str, signature: str | bytes) -> int:
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    connection.request("GET", "/health", headers={"X-Elastic-Nonce": nonce,
                                                  "X-Elastic-Signature": signature})
    return connection.getresponse().status


def test_refuses_a_question_that_was_asked_before(agent: tuple[Agent, str]) -> None:
    """Whoever has overheard one learns nothing by it, whatever the clocks say; a number of nonces
    is remembered."""
    here, address = agent

    def asked(nonce: str) -> int:
        return status(address, nonce, seal(KEY, Kind.QUESTION, nonce.encode(), b"127.0.0.1",
                                           b"GET /health"))

    assert [asked("once"), asked("once"), asked("another")] == [200, 403, 200]
    until(lambda: here.refused >= 1)
    server = AgentServer("127.0.0.1", 0, KEY, here, nonces=3)
    assert [server.is_new(nonce) for nonce in "abcbdab"] == [
        True, True, True, False, True, True, True]
    server.close()
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


def test_a_host_is_ready_when_others_hold_connections_to_its_agent(key: Path) -> None:
    """More idle ones than the agent has descriptors. The host looked sick until the agent was
    started again."""
    with agent_process(key, "--no-metadata") as (process, port), ExitStack() as stack:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (FEW, FEW))
        for _ in range(2 * FEW):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))

        def is_ready() -> bool:
            try:
                return ask(f"127.0.0.1:{port}", KEY, 20.0).state == "ready"
            except AgentUnreachable:
                return False

        until(is_ready)
        stack.close()
        assert is_ready() and process.poll() is None


def test_unauthenticated_connections_leave_the_agent_its_descriptors(agent: tuple[Agent, str]
                                                                     ) -> None:
    """Beyond the limit the oldest is closed and counted. None has a thread."""
    here, address = agent
    threads, (host, port) = threading.active_count(), address.split(":")
    with ExitStack() as stack:
        for _ in range(SPARE + 30):
            stack.enter_context(socket.create_connection((host, int(port)), 20))
        answer = ask(address, KEY, PATIENCE_S)
    assert answer.state == "ready" and here.refused >= 30
    assert threading.active_count() <= threads + 1


def test_a_key_that_others_can_read_is_refused(key: Path) -> None:
    """With the command that mends it."""
    assert read_key(key) == KEY
    key.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        read_key(key)


# --- the end of a host ----------------------------------------------------------------------------

class TwoHosts:
    """A place with two machines: this one under two names."""

    def instances(self) -> list[Instance]:
        return [Instance(f"i-{n}", f"127.0.0.{n}", launched=float(n)) for n in (1, 2)]

    def supply(self) -> None:
        """Return that it is unknown."""


def test_a_notice_takes_the_host_off_the_list_within_a_poll(
        metadata: MetadataServer, key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real agent process sees it, the poller reads it, the file loses the host; the table shows
    why. SIGTERM ends the agent."""
    hosts, events = key.with_name("hosts"), key.with_name("events.jsonl")
    with (agent_process(key, "--metadata", metadata.endpoint, bind="0.0.0.0") as (process, port),
          ThreadPoolExecutor(4) as pool):
        poller = Poller(TwoHosts(), hosts, Policy(agents=True, settle_s=0.0), agent_port=port,
                        key=KEY, events_file=events)

        def listed() -> int:
            poller.poll(pool)
            return len(hosts.read_text().splitlines()) if hosts.exists() else -1

        until(lambda: listed() == 2)
        metadata.announce()
        until(lambda: listed() == 0)
        assert main(["hosts", str(hosts)]) == 0
        assert "terminate at" in capsys.readouterr().out
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    logged = [json.loads(line) for line in events.read_text().splitlines()]
    assert sorted((e["event"], e["id"]) for e in logged
                  if e["event"] != "discovery.hosts_changed") == [
        (f"discovery.host_{to}", f"i-{n}") for to in ("in", "out") for n in (1, 2)]


@contextmanager
def worker(name: str, script: str = "echo; exec sleep 60", agent: str = "", **how: Any
           ) -> Iterator[subprocess.Popen[bytes]]:
    """A process group with a worker's name, whose environment is there, and with that of the agent
    that has started it."""
    env = {"ELASTIC_TRAINER_WORKER": name, AGENT: agent}
    with subprocess.Popen(["/bin/sh", "-c", script], stdout=subprocess.PIPE, cwd="/", env=env,
                          start_new_session=True, **how) as process:
        try:
            assert process.stdout and process.stdout.readline()
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_sigterm_drains_the_host(key: Path) -> None:
    """Whoever stops the machine stops its services first; without workers the agent ends at
    once."""
    with agent_process(key, "--no-metadata") as (process, port):
        assert ask(f"127.0.0.1:{port}", KEY, PATIENCE_S).state == "ready"
        with worker("host/0/1", agent=f"127.0.0.1:{port}") as one:
            wait_for("environment", Path(f"/proc/{one.pid}/environ").read_bytes)
            process.send_signal(signal.SIGTERM)
            until(lambda: ask(f"127.0.0.1:{port}", KEY, PATIENCE_S).state == "draining")
            assert ask(f"127.0.0.1:{port}", KEY, PATIENCE_S).facts["workers"] == ["booting"]
        assert process.wait(PATIENCE_S) == 0


def test_workers_are_asked_to_hurry_when_little_of_the_notice_is_left(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM, once: a leaver that waits for its checkpoint (up to a minute) must not be surprised
    by the end. Without a free descriptor the agent looks again."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda *what: sent.append(what))
    looks: list[Callable[..., Any]] = [no_descriptor(), lambda _: [{"pid": 12345}]]
    early, late, endless = (Agent(None, tmp_path, find_workers=lambda user: looks.pop(0)(user))
                            for _ in range(3))
    early.drain("a notice", time.time() + HURRY_S + 60.0)
    late.drain("a notice", time.time() - 1.0)
    endless.drain("a notice without a time", None)
    for agent, count in ((early, 0), (late, 0), (late, 1), (endless, 1), (late, 1)):
        agent.last_call()
        assert sent == [(12345, signal.SIGTERM)] * count


@pytest.mark.parametrize(("grace_s", "hurried_s"), [(90.0, 60.0), (25.0, 12.5), (1.0, 0.5)])
def test_workers_first_have_the_half_of_a_short_notice_to_leave_by_the_driver_s_word(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace_s: float, hurried_s: float) -> None:
    """A pod has 15 to 30 s: a drain that the driver leads costs no step, and takes a few."""
    sent: list[tuple[int, int]] = []
    now = [1000.0]
    monkeypatch.setattr("os.kill", lambda *what: sent.append(what))
    monkeypatch.setattr("time.time", lambda: now[0])
    agent = Agent(None, tmp_path, find_workers=lambda _: [{"pid": 12345}])
    agent.drain("the pod is being stopped", now[0] + grace_s, for_good=False)
    now[0] += hurried_s - 0.1
    agent.last_call()
    assert not sent
    now[0] += 0.2
    agent.last_call()
    assert sent == [(12345, signal.SIGTERM)]


def test_workers_wait_for_no_host_that_can_come_only_after_their_own_has_ended(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All hosts of a fleet drain at once, and their place starts others only after them: a Job of
    Kubernetes, an array of Slurm. Workers that wait get SIGTERM once; those that train or leave in
    a rendezvous do not. Elsewhere they wait until the time is nearly over."""
    sent: list[int] = []
    now = [1000.0]
    doing = {11: "waiting 7", 12: "step 7", 13: "booting"}
    monkeypatch.setattr("os.kill", lambda pid, number: sent.append(pid))
    monkeypatch.setattr("time.time", lambda: now[0])
    agent, other = (Agent(None, tmp_path, replaced_after_end=so, find_workers=lambda _: [
        {"pid": pid, "doing": what} for pid, what in doing.items()]) for so in (True, False))

    def turns(count: int) -> list[int]:
        for _ in range(count):
            now[0] += 1.0
            agent.last_call()
            other.last_call()
        return sent

    assert turns(20) == []  # neither drains
    agent.drain("the pod is being stopped", now[0] + 90.0, for_good=False)
    other.drain("the pod is being stopped", now[0] + 90.0, for_good=False)
    assert turns(4) == []
    doing[12] = "waiting 8"
    assert turns(3) == [11]
    assert turns(20) == [11, 12]
    assert sorted(turns(60)) == [11, 11, 11, 12, 12, 12, 13, 13]  # both in the last 30 s


def test_a_second_notice_only_shortens_the_time_of_the_first(tmp_path: Path) -> None:
    """Slurm warns a task, and sends SIGTERM when its grace is over. A notice that is final is told
    in place of one that is not."""
    agent = Agent(None, tmp_path)
    for why, deadline, for_good, now_says in (
            ("warned", 5000.0, False, ("warned", 5000.0, False)),
            ("stopped", 6000.0, False, ("warned", 5000.0, False)),
            ("stopped", 4000.0, False, ("warned", 4000.0, False)),
            ("terminate", 8000.0, True, ("terminate", 8000.0, True)),
            ("stopped", 7000.0, False, ("terminate", 7000.0, True)),
            ("unknown", None, False, ("terminate", 7000.0, True))):
        agent.drain(why, deadline, for_good)
        told = agent.health()
        assert (told["why"], told["deadline"], told["for_good"]) == now_says, why


def test_the_agent_s_end_is_as_its_place_wants_it(tmp_path: Path, key: Path) -> None:
    """It says why it is stopped and when its time is over, and ends with the exit code that makes
    the place start it again. A warning by SIGUSR1 leaves it more time than SIGTERM. It has no code
    of a place that is not its own."""
    code = "import sys; from elastic_trainer.discovery.__main__ import main; " \
           "code = main(sys.argv[1:]); print({'boto3', 'pydantic'} & {*sys.modules}); " \
           "sys.exit(code)"
    options = ["agent", "--bind", "127.0.0.1", "--port", "0", "--key-file", key, "--folder",
               tmp_path, "--no-metadata", "--grace", "400", "--warned-grace", "900",
               "--stop-reason", "the place ends it", "--stopped-exit-code", "75",
               "--starts-workers"]
    with subprocess.Popen([sys.executable, "-c", code, *map(str, options)], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            address = f"127.0.0.1:{process.stdout.readline().strip()}"
            with worker("a/0/1", agent=address):
                before = time.time()
                process.send_signal(signal.SIGUSR1)
                first = wait_for("warning", lambda: ask(address, read_key(key), 5.0).deadline)
                assert before + 900 <= first <= time.time() + 900
                process.send_signal(signal.SIGTERM)
                wait_for("drain", lambda: (ask(address, read_key(key), 5.0).deadline or 0) < first)
                answer = ask(address, read_key(key), 5.0)
                assert answer.why == "the place ends it" and not answer.for_good
                assert answer.deadline and before + 400 <= answer.deadline <= time.time() + 400
            assert process.wait(120) == 75 and process.stdout.read() == "set()\n"
        finally:
            process.kill()


# --- its workers ----------------------------------------------------------------------------------

def test_the_standbys_that_wait_are_counted(tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """By their sockets; one whose pool was killed is none."""
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


@pytest.mark.parametrize("setting", ["", "/somewhere"])
def test_the_folder_of_standbys_is_the_same_for_shim_and_agent(
        monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    """The shim imports nothing of ours and has a copy."""
    monkeypatch.setenv(FOLDER_VARIABLE, setting)
    assert shim.FOLDER_VARIABLE == FOLDER_VARIABLE
    assert standby_folder(os.environ) == shim.standby_folder(os.environ)


def test_a_worker_behind_a_shim_or_with_children_counts_once() -> None:
    """All have its name; the outermost is it, and what signals go to."""
    with worker("host/7/7", "sleep 60 & echo; wait") as one:
        assert [(w["pid"], w["doing"]) for w in workers() if w["worker"] == "host/7/7"] == [
            (one.pid, "booting")]


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
    one = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT,
                           env=os.environ | {"ELASTIC_TRAINER_WORKER": "host/7/8"},
                           start_new_session=True, text=True)
    try:
        assert one.stdout and {one.stdout.readline(), one.stdout.readline()} == {"loading\n",
                                                                                 "training\n"}
        assert [w["doing"] for w in workers() if w["worker"] == "host/7/8"] == ["step 1234567"]
    finally:
        os.killpg(one.pid, signal.SIGKILL)
        one.wait()


NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0,
                    reason="only root sees the environment of other users' processes")
@pytest.mark.parametrize("name", ["x" * 120_000, "host/9/1"], ids=["long", "the same"])
def test_no_other_user_silences_an_agent_of_roots(agent: tuple[Agent, str], name: str) -> None:
    """Anybody can start a process with a long name for a worker, or with that of a worker which is
    there."""
    here, address = agent
    with worker("host/9/1") as one, worker(name, user=NOBODY) as other:
        assert ask(address, KEY, PATIENCE_S).state == "ready"
        logged = {w["worker"]: w["pid"] for w in here.health()["workers"]}
        assert logged["host/9/1"] == one.pid and other.pid not in logged.values()
        theirs = Agent(None, here.folder, NOBODY)
        assert [w["pid"] for w in theirs.workers()] == [other.pid]
        assert len(theirs.health()["workers"][0]["worker"]) <= 120


def test_an_answer_arrives_for_any_number_of_workers(serve: Make) -> None:
    """Their number and their names are bounded: an answer that is too long is none."""
    crowd = [{"pid": 4_000_000, "worker": f"{number}" * 300, "doing": "step 123456789"}
             for number in range(5000)]
    _, address = serve(find_workers=lambda _: crowd)
    found: Any = ask(address, KEY, PATIENCE_S).facts["workers"]
    assert len(found) == 256


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_an_agent_of_roots_counts_the_workers_of_the_keys_owner(
        key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints that at its start: workers of others are not counted."""
    assert user_of_workers(key) == 0
    os.chown(key, NOBODY, NOBODY)
    assert user_of_workers(key) == NOBODY
    assert capsys.readouterr().err.count("--user") == 2


@pytest.mark.parametrize("phase", ["standby", "waiting", "training", "reviving", "finished"])
def test_an_agent_recognizes_every_short_name_of_a_worker(phase: str) -> None:
    """Neither package imports the other; the kernel keeps 15 characters, and no number is cut."""
    code = (f"from elastic_trainer.host.processes import show\n"
            f"for step in 0, 123456, 12345678:\n"
            f"    show({phase!r}, step); print(open('/proc/self/comm').read(), end='')")
    shown = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                           check=True, cwd=ROOT).stdout
    for step, line in zip((0, 123456, 12345678), shown.splitlines(), strict=True):
        output = SHORT_NAME.fullmatch(line.strip())
        assert output and output[2] in (f" {step}", None) and (output[2] or step > 1e6)
