"""Workers that agents start: the way from the driver to a command on a host, and who cannot use it.

tests/test_no_ssh.py has runs whose hosts have no ssh.
"""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import is_running
from waiting import until, wait_for

from elastic_trainer.__main__ import main
from elastic_trainer.discovery.client import ask, read_key
from elastic_trainer.discovery.far_side import FINISHED, environment
from elastic_trainer.discovery.starts import IDLE_S
from elastic_trainer.driver.past import Past, end_orphans
from elastic_trainer.driver.process import WorkerProcess
from elastic_trainer.driver.reach import LOST, Reach
from elastic_trainer.driver.roster import Start
from elastic_trainer.events.log import Events
from elastic_trainer.host import remote
from elastic_trainer.wire.seal import NONCE, SIGNATURE, Kind, seal
from elastic_trainer.wire.tunnel import SWITCHING, context, reach, request_parts

ROOT = Path(__file__).resolve().parent.parent
SECRET = "the-secret-of-a-user-0123456789"
SLEEPS = [sys.executable, "-c", "import sys, time; print('sleeps', flush=True); time.sleep(1000)"]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A file with an agents' key."""
    file = tmp_path / "key"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    return file


class AgentProcess:
    """A real agent on this machine, that starts workers. `more` are its other options."""

    def __init__(self, key: Path, *more: str, port: int = 0, starts: bool = True):
        self.key = key
        command = [sys.executable, "-m", "elastic_trainer.discovery", "agent", "--bind",
                   "127.0.0.1", "--port", str(port), "--key-file", str(key), "--folder",
                   str(key.parent), "--no-metadata", *(["--starts-workers"] if starts else []),
                   *more]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True,
                                        env=os.environ | {"OF_THE_HOST": "here", "HOME": "/there"})
        assert self.process.stdout
        self.port = int(self.process.stdout.readline())
        self.address = f"127.0.0.1:{self.port}"

    def command(self, *arguments: str) -> list[str]:
        """Return the command line that runs remote.py there."""
        return Reach(key_file=str(self.key)).command("a", self.address, *arguments)

    def workers(self) -> list[str]:
        """Return what its workers do, as it answers its poller."""
        doing: list[str] = ask(self.address, read_key(self.key), 5.0).facts["workers"]  # type: ignore[assignment]
        return doing

    def refused(self) -> int:
        """Return how many clients it has refused."""
        return ask(self.address, read_key(self.key), 5.0).refused


@contextmanager
def agent(key: Path, *more: str, **how: Any) -> Iterator[AgentProcess]:
    """An agent that ends with the test."""
    one = AgentProcess(key, *more, **how)
    with one.process:
        try:
            yield one
        finally:
            one.process.kill()


def worker(at: AgentProcess, command: list[str], output: io.StringIO, **env: str) -> WorkerProcess:
    """Start a worker as the driver does."""
    names = {remote.WORKER: "a/0/1", remote.RUN_DIR: "/runs/x", remote.ATTEMPT: "1"}
    return WorkerProcess(Start("a", 0, "a/0/1"), command,
                         {"PATH": os.environ["PATH"], **names, **env},
                         Reach(key_file=str(at.key)), output, at.address)


def pid_in(output: io.StringIO) -> int:
    """Wait until a worker has printed its pid; return it."""
    return int(until(lambda: re.search(r"<stdout>: pid (\d+)", output.getvalue()))[1])


PRINTS_PID = "import os; print('pid', os.getpid(), flush=True); "
WAITS = [sys.executable, "-c", PRINTS_PID + "import time; time.sleep(1000)"]


def test_the_driver_sees_output_and_exit_of_a_worker_that_an_agent_starts(key: Path) -> None:
    """stdout, stderr, the exit code, and a signal's; the agent counts it while it lives; a long
    output and a long job come whole."""
    with agent(key) as there:
        output = io.StringIO()
        code = ("import os, sys; print('out', len(os.environ['LONG']), flush=True); "
                "sys.stderr.write('x' * 300_000 + '\\nend\\n'); sys.exit(3)")
        one = worker(there, [sys.executable, "-c", code], output, LONG="l" * 100_000)
        assert one.wait() == 3
        until(lambda: "<stderr>: end" in output.getvalue())
        assert "[a]<stdout>: out 100000\n" in output.getvalue()
        assert len(output.getvalue()) > 300_000
        two = worker(there, WAITS, output)
        pid = pid_in(output)
        assert there.workers() == ["booting"]
        os.kill(pid, signal.SIGKILL)
        assert two.wait() == -signal.SIGKILL
        wait_for("its end", lambda: there.workers() == [])


def test_a_worker_ends_by_sigterm_or_is_killed_with_its_children(key: Path) -> None:
    """SIGTERM, which it may take its time for; then SIGKILL for the whole group."""
    with agent(key) as there:
        output = io.StringIO()
        code = ("import signal, subprocess, time; signal.signal(15, lambda *_: "
                "print('asked', flush=True)); subprocess.Popen(['sleep', '1000']); " + PRINTS_PID +
                "time.sleep(1000); time.sleep(1000)")
        one = worker(there, [sys.executable, "-c", code], output)
        pid = pid_in(output)
        child = until(lambda: Path(f"/proc/{pid}/task/{pid}/children").read_text().split())[0]
        one.stop(False, 1000.0)
        until(lambda: "asked" in output.getvalue())
        assert is_running(pid)
        one.stop(True, 0)
        assert one.wait() == -signal.SIGKILL
        wait_for("the child's end", lambda: not is_running(int(child)))


def test_sigterm_to_all_processes_of_a_host_is_the_workers_to_obey(key: Path) -> None:
    """Slurm sends it to all that a task has started. The processes between driver and worker stay,
    so the driver sees the exit that the worker chooses."""
    with agent(key) as there:
        output = io.StringIO()
        code = ("import signal, sys, time; "
                "signal.signal(15, lambda *_: (print('asked', flush=True), time.sleep(0.5), "
                "sys.exit(75))); " + PRINTS_PID + "time.sleep(1000)")
        one = worker(there, [sys.executable, "-c", code], output)
        pid = pid_in(output)
        between = [pid]
        while there.process.pid != (parent := psutil.Process(between[-1]).ppid()):
            between.append(parent)
        assert len(between) == 3  # the worker, remote.py, far_side.py
        for process in reversed(between):
            os.kill(process, signal.SIGTERM)
        assert one.wait() == 75


def test_a_worker_ends_when_its_driver_is_gone_and_lives_on_when_its_agent_is(key: Path) -> None:
    """The agent is not in the way: after SIGKILL of it the exit still comes at once. The next agent
    on that port counts the worker. The end of the connection ends the worker."""
    with agent(key) as first:
        output = io.StringIO()
        job = {"command": WAITS, "cwd": "/", "lost_s": 60.0, "grace_s": 0.0,
               "env": {remote.WORKER: "a/0/1", remote.RUN_DIR: "/runs/x"}}
        driver = subprocess.Popen(first.command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert driver.stdin and driver.stdout
        driver.stdin.write(json.dumps(job).encode() + b"\n")
        driver.stdin.flush()
        others = int(driver.stdout.readline().split()[1])
        one = worker(first, WAITS, output)
        pid = pid_in(output)
        first.process.kill()
        first.process.wait()
        assert is_running(pid) and is_running(others)
        with agent(key, port=first.port) as second:
            assert second.workers() == ["booting"] or len(second.workers()) == 1
            driver.kill()
            driver.wait()
            wait_for("the end of the worker", lambda: not is_running(others))
            os.kill(pid, signal.SIGKILL)
            assert one.wait() == -signal.SIGKILL


def test_workers_end_with_their_agent_where_that_is_asked(key: Path) -> None:
    """For a place that takes the agent's process and leaves its children."""
    with agent(key, "--workers-end-with-agent") as there:
        output = io.StringIO()
        one = worker(there, WAITS, output)
        pid = pid_in(output)
        there.process.kill()
        assert one.wait() == -signal.SIGKILL
        wait_for("the worker's end", lambda: not is_running(pid))


def test_an_agent_ends_with_its_run_or_after_its_workers(key: Path) -> None:
    """Exit code 0 when a worker has ended with 0, and with no other code, and the place's after
    SIGTERM. Until then it waits for its workers, and for no other worker on the machine."""
    other = os.environ | {remote.WORKER: "b/0/1"}
    with agent(key, "--end-with-run", "--stopped-exit-code", "75") as there, \
            subprocess.Popen(["sleep", "1000"], env=other) as of_another_run:
        try:
            assert there.workers() == []
            output = io.StringIO()
            for code in (75, FINISHED):
                leaves = [sys.executable, "-c", f"raise SystemExit({code})"]
                assert worker(there, leaves, output).wait() == code
            ended_at = time.monotonic()
            with agent(key, "--stopped-exit-code", "75") as stopped:
                left = worker(stopped, [sys.executable, "-c", PRINTS_PID +
                                        "import time; time.sleep(1000)"], output)
                pid_in(output)
                stopped.process.send_signal(signal.SIGTERM)
                wait_for("drain", lambda: ask(stopped.address, read_key(key), 5.0).state
                         == "draining")
                left.stop(False, 1000.0)
                assert left.wait() == -signal.SIGTERM
                assert stopped.process.wait(120) == 75
            until(lambda: time.monotonic() - ended_at > 2 * IDLE_S)
            assert there.process.poll() is None
            assert worker(there, [sys.executable, "-c", ""], output).wait() == 0
            assert there.process.wait(120) == 0
        finally:
            of_another_run.kill()


def test_the_supervisor_ends_the_workers_of_a_run_by_the_agent(key: Path) -> None:
    """`end RUN_DIR` waits for them, and kills those that stay; another run's are not touched."""
    with agent(key) as there:
        output, other = io.StringIO(), io.StringIO()
        mine = worker(there, WAITS, output, **{remote.RUN_DIR: f"/runs/{key}"})
        theirs = worker(there, WAITS, other)
        pid, stays = pid_in(output), pid_in(other)
        code = ("import sys; from elastic_trainer.host import remote; "
                f"sys.exit(remote.end_run('/runs/{key}', grace_s=0.0))")
        assert subprocess.run(there.command("end", "/runs/nothing")).returncode == 0
        assert is_running(pid)
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
        assert mine.wait() == -signal.SIGKILL and is_running(stays)
        theirs.stop(True, 0)
        theirs.wait()


def test_the_next_attempt_waits_for_an_agent_that_is_being_restarted(
        key: Path, tmp_path: Path) -> None:
    """Its machine lives, and so may a worker of the last attempt. A machine that is gone is not
    waited for, and is logged."""
    tries, told = list[str](), list[str]()

    class Counted(Reach):
        def command(self, host: str, address: str, *arguments: str) -> list[str]:
            tries.append(address)
            return super().command(host, address, *arguments)

    def end(address: str) -> None:
        events = Events(None)
        events.listeners.append(lambda name, _: told.append(name))
        past = Past(attempt=1, started=[[1, "a/0/1"]], living={"1 a/0/1": {
            "attempt": 1, "worker": "a/0/1", "pid": 0, "host": "a", "over_ssh": True,
            "address": address}})
        end_orphans(past, tmp_path / "run", Counted(key_file=str(key)), events)

    output = io.StringIO()
    with agent(key) as first:
        one = worker(first, WAITS, output, **{remote.RUN_DIR: str(tmp_path / "run")})
        pid = pid_in(output)
        first.process.kill()
        first.process.wait()
        ending = threading.Thread(target=end, args=[first.address])
        ending.start()
        wait_for("a second try", lambda: len(tries) > 1)
        with agent(key, port=first.port):
            ending.join(120)
            assert not ending.is_alive() and not is_running(pid) and told == []
            assert one.wait() == -signal.SIGKILL
    tries.clear()
    end("no-such-host.invalid:7411")
    assert told == ["run.host_not_reached"] and len(tries) == 1


def test_the_environment_is_the_host_s_the_driver_adds_and_the_run_decides() -> None:
    """A pod's PATH, GPUs and home stay; a secret that only the coordinator has travels."""
    theirs = {"PATH": "/driver", "TOKEN": "secret", "ELASTIC_TRAINER_SLOT": "1",
              "HOROVOD_HOSTNAME": "a", "PYTHONHASHSEED": "0", "PYTHONPATH": "/run's"}
    own = {"PATH": "/host", "NVIDIA_VISIBLE_DEVICES": "0", "ELASTIC_TRAINER_SLOT": "9",
           "PYTHONPATH": "/host's"}
    assert environment(theirs, own, "10.0.0.1:7411") == {
        "PATH": "/host", "NVIDIA_VISIBLE_DEVICES": "0", "TOKEN": "secret",
        "ELASTIC_TRAINER_SLOT": "1", "HOROVOD_HOSTNAME": "a", "PYTHONHASHSEED": "0",
        "PYTHONPATH": "/run's", "ELASTIC_TRAINER_AGENT": "10.0.0.1:7411"}


# --- who cannot use it ----------------------------------------------------------------------------

class Wire:
    """The network between a driver and an agent: hears all, and may change a byte of a direction.
    """

    def __init__(self, port: int, spoils: int | None = None):
        self.heard = {"driver": b"", "host": b""}
        self.spoils, self.target = spoils, port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                for side, source, sink in (("driver", near, far), ("host", far, near)):
                    threading.Thread(target=self._carry, args=(side, source, sink),
                                     daemon=True).start()

    def _carry(self, side: str, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                at = len(self.heard[side])
                self.heard[side] += data
                if side == "driver" and self.spoils is not None and (
                        at <= self.spoils < at + len(data)):
                    cut = self.spoils - at
                    data = data[:cut] + bytes([data[cut] ^ 1]) + data[cut + 1:]
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def job_that_touches(file: Path) -> bytes:
    """Return a job whose command leaves a file."""
    return json.dumps({"command": ["touch", str(file)], "cwd": "/", "lost_s": 60.0, "grace_s": 60.0,
                       "env": {"PATH": os.environ["PATH"], "TOKEN": SECRET}}).encode() + b"\n"


def run(at: AgentProcess, address: str, given: bytes,
        key: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run a job over an address, as the driver does."""
    command = Reach(key_file=str(key or at.key)).command("a", address)
    return subprocess.run(command, input=given, capture_output=True, timeout=120)


def test_the_environment_is_neither_read_nor_changed_on_the_network(key: Path,
                                                                    tmp_path: Path) -> None:
    """Neither the secrets nor the key nor the command is in any packet. A changed byte, wherever it
    is, starts nothing: not in the request, the handshake, the proof or the job."""
    with agent(key) as there:
        wire = Wire(there.port)
        assert run(there, wire.address, job_that_touches(tmp_path / "done")).returncode == 0
        assert (tmp_path / "done").exists()
        said = wire.heard["driver"]
        for word in (SECRET.encode(), key.read_bytes(), b"touch", b"PATH"):
            assert word not in said + wire.heard["host"]
        head = said.index(b"\r\n\r\n") + 4
        places = [said.index(b"Nonce: ") + 8, said.index(b"Signature: ") + 12, head + 20,
                  head + 60, *range(head + 100, len(said), max(1, (len(said) - head) // 6))]
        for place in places:
            spoiled = Wire(there.port, spoils=place)
            file = tmp_path / f"spoiled-{place}"
            done = run(there, spoiled.address, job_that_touches(file))
            assert done.returncode == LOST and not file.exists(), (place, done)
        assert there.workers() == []


def test_a_request_starts_nothing_when_it_is_unsigned_repeated_or_of_another_agent(
        key: Path, tmp_path: Path) -> None:
    """An unauthenticated client is refused and counted, and starts no process; the recording of a
    whole start does not start it again; another key's driver learns the remedy."""
    def children() -> list[str]:
        at = there.process.pid
        return [pid for task in Path(f"/proc/{at}/task").iterdir()
                for pid in (task / "children").read_text().split()]

    def says(*packets: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", there.port), 5.0) as connection:
            connection.settimeout(20.0)
            answer = b""
            with suppress(OSError):
                for packet in packets:
                    connection.sendall(packet)
                while more := connection.recv(4096):
                    answer += more
        return answer

    def start(kind: Kind = Kind.START, host: str = "127.0.0.1", rest: bytes = b"") -> bytes:
        nonce = secrets.token_hex(8)
        signature = seal(key.read_bytes(), kind, *request_parts(nonce, host))
        return (f"POST /run HTTP/1.1\r\nContent-Length: 0\r\n{NONCE}: {nonce}\r\n"
                f"{SIGNATURE}: {signature}\r\n\r\n").encode() + rest

    with agent(key) as there:
        wire = Wire(there.port)
        assert run(there, wire.address, job_that_touches(tmp_path / "once")).returncode == 0
        (tmp_path / "once").unlink()
        wait_for("the end of its process", lambda: not children())
        before = there.refused()
        unsigned = b"POST /run HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
        wrong = [unsigned, wire.heard["driver"], start(Kind.QUESTION), start(host="127.0.0.2"),
                 start(rest=b"\x16\x03\x01"), start().replace(b"/run", b"/ruN")]
        for request in wrong:
            assert not says(request).startswith(SWITCHING) and not children()
        assert there.refused() == before + len(wrong)
        other = tmp_path / "other"
        other.touch(mode=0o600)
        other.write_text(secrets.token_hex(32))
        done = run(there, there.address, job_that_touches(tmp_path / "once"), other)
        assert done.returncode == LOST and b"It has another key" in done.stderr
        assert not (tmp_path / "once").exists()


def test_who_repeats_a_request_to_the_next_agent_gets_no_further(key: Path, tmp_path: Path) -> None:
    """It does not know the old nonces. The request gets a TLS handshake, and nothing is started:
    the proof of the key is for one channel only. A server without the key gets no environment."""
    with agent(key) as first:
        wire = Wire(first.port)
        assert run(first, wire.address, job_that_touches(tmp_path / "once")).returncode == 0
    (tmp_path / "once").unlink()
    recorded = wire.heard["driver"]
    request = recorded[:recorded.index(b"\r\n\r\n") + 4]
    with agent(key, port=first.port) as second:
        with socket.create_connection(("127.0.0.1", second.port), 5.0) as connection:
            connection.settimeout(60.0)
            connection.sendall(request)
            assert connection.recv(len(SWITCHING)) == SWITCHING
            with suppress(OSError):
                tls = context(is_host=False).wrap_socket(connection)
                tls.sendall(b"0" * 64)
                assert tls.recv(64) == b""
        assert second.workers() == [] and not (tmp_path / "once").exists()

    def impostor(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.recv(4096)
        connection.sendall(SWITCHING)
        with suppress(OSError):
            tls = context(is_host=True).wrap_socket(connection, server_side=True)
            tls.recv(64)
            tls.sendall(b"0" * 64)
            given.append(tls.recv(4096))

    given: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=impostor, args=[listener], daemon=True)
        thread.start()
        command = Reach(key_file=str(key)).command("a", f"127.0.0.1:{listener.getsockname()[1]}")
        done = subprocess.run(command, input=job_that_touches(tmp_path / "once"),
                              capture_output=True, timeout=120)
        thread.join(60)
    assert done.returncode == LOST and b"does not have the agents' key" in done.stderr
    assert given in ([], [b""])


def test_an_agent_starts_nothing_without_its_option(key: Path, tmp_path: Path) -> None:
    """A driver with the right key learns the remedy."""
    with agent(key, starts=False) as there:
        done = run(there, there.address, job_that_touches(tmp_path / "done"))
        assert done.returncode == LOST and b"--starts-workers" in done.stderr
        assert not (tmp_path / "done").exists()


def test_the_doctor_examines_hosts_by_their_agents(
        key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """As their workers are started, also on this machine. An agent that is not there, one with
    another key, and one without --starts-workers are each a sentence with its remedy."""
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_text(secrets.token_hex(32))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = f"127.0.0.1:{taken.getsockname()[1]}"
    monkeypatch.chdir(tmp_path)
    with agent(key) as well, agent(other) as foreign, agent(key, starts=False) as idle:
        places = {"well": well.address, "absent": free, "foreign": foreign.address,
                  "idle": idle.address}
        (tmp_path / "hosts").write_text("".join(f"{name}-x7k2q:1 {place}\n"
                                                for name, place in places.items()))
        code = main(["doctor", "--json", "--reach", "agent", "--agent-key-file", str(key),
                     "--runs-dir", str(tmp_path), "--host-discovery-script", "cat hosts"])
        assert idle.refused() == 0 and foreign.workers() == []
    told = [check for check in json.loads(capsys.readouterr().out)["checks"]
            if check["host"].endswith("-x7k2q")]
    ways = {check["host"][:-6]: check for check in told if check["what"] == "agent"}
    assert code == 1 and ways.keys() == places.keys()
    assert (ways["well"]["status"], ways["well"]["found"]) == ("ok", "starts workers")
    assert {check["what"] for check in told if check["host"] == "well-x7k2q"} > {"same software"}
    for name, says in (("absent", "It is not reached: Connection refused. Start the agent"),
                       ("foreign", "It has another key, or it is reached through NAT. Give it"),
                       ("idle", "It starts no workers. Start it with --starts-workers.")):
        assert ways[name]["status"] == "failed" and says in ways[name]["found"], ways[name]
        assert ways[name]["remedy"].startswith(
            "python -m elastic_trainer.discovery agent --starts-workers --key-file KEY")


def test_a_silent_client_costs_a_process_for_a_bounded_time(key: Path) -> None:
    """It has the key, and says nothing after its request."""
    with agent(key) as there:
        channel = reach(there.address, key.read_bytes())
        wait_for("the end of the host's side", lambda: not list(channel.frames())
                 and not channel.is_open)


@pytest.mark.parametrize(("options", "remedy"), [
    (["--reach", "agent", "-H", "a:1"], "Give --agent-key-file"),
    (["--agent-key-file", "KEY", "-H", "a:1", "--reach", "ssh"], "Give --reach agent"),
    (["--reach", "agent", "--agent-key-file", "KEY"], "no hosts are given"),
    (["--reach", "agent", "--agent-key-file", "/none", "-H", "a:1"], "cannot be read"),
    (["--reach", "agent", "--agent-key-file", "OPEN", "-H", "a:1"], "chmod 600"),
    (["--reach", "agent", "--agent-key-file", "SHORT", "-H", "a:1"], "has 32 or more")])
def test_a_wrong_choice_is_refused_at_start(options: list[str], remedy: str, key: Path,
                                            tmp_path: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    """With the key or the option that corrects it."""
    for name, mode, text in (("OPEN", 0o644, "a" * 64), ("SHORT", 0o600, "a")):
        (tmp_path / name).touch(mode=mode)
        (tmp_path / name).write_text(text)
    files = {"KEY": key, "OPEN": tmp_path / "OPEN", "SHORT": tmp_path / "SHORT"}
    words = [str(files.get(word, word)) for word in options]
    assert main(["run", "--runs-dir", str(tmp_path / "runs"), *words, "--", "true"]) == 2
    assert remedy in capsys.readouterr().err


def test_tls_here_is_the_one_that_the_head_of_tunnel_names() -> None:
    """Version, cipher, and a channel binding that both ends share."""
    one, other = socket.socketpair()
    found: list[Any] = []

    def host() -> None:
        tls = context(is_host=True).wrap_socket(other, server_side=True)
        found.append((tls.version(), tls.get_channel_binding("tls-unique")))

    thread = threading.Thread(target=host)
    thread.start()
    tls = context(is_host=False).wrap_socket(one)
    thread.join(60)
    assert tls.cipher() == ("ADH-AES256-GCM-SHA384", "TLSv1.2", 256)
    assert found == [("TLSv1.2", tls.get_channel_binding("tls-unique"))] and found[0][1]
    assert ssl.OP_NO_RENEGOTIATION & context(is_host=True).options
