"""The driver's edges: lists of hosts, the rendezvous store, workers' processes here and over ssh,
Horovod's version."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster import is_running
from horovod.runner.elastic.discovery import HostDiscoveryScript
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from elastic_trainer.config import EXIT_NO_HOSTS, Launch
from elastic_trainer.driver.driver import (
    STOP_MOST_S,
    STOP_S,
    MendedDriver,
    stop_deadline,
    worker_environment,
)
from elastic_trainer.driver.horovodrun import check_version
from elastic_trainer.driver.hosts import (
    Discovery,
    DiscoveryUnavailable,
    HostsUnreachable,
    Locations,
    addresses_in,
    parse_hosts,
    way_to,
    zones_in,
)
from elastic_trainer.driver.process import WorkerProcess
from elastic_trainer.driver.reach import Reach
from elastic_trainer.driver.roster import End, Phase, Start, Worker
from elastic_trainer.events.log import Events
from elastic_trainer.host import own, remote
from elastic_trainer.host.lines import MAX_LINE_BYTES
from elastic_trainer.wire.messages import DriverClient, DriverUnreachable, MessageServer
from elastic_trainer.wire.seal import worker_key
from elastic_trainer.world.reach import own_address_towards

DEADLINE_S = 60.0
SECRET = "5ec4e75ec4e7"
PLAIN = {"PATH": os.defpath}


# --- lists of hosts -------------------------------------------------------------------------------

NAMES = st.builds("h{}.{}".format, st.text("az09-", max_size=8), st.integers(0, 300))


@given(st.dictionaries(NAMES, st.integers(1, 64)), st.sampled_from(["\n", "\r\n", "\n\n", " \n\t"]))
def test_the_hosts_keep_their_order_when_they_are_read(hosts: dict[str, int], between: str) -> None:
    """The first in the list is the first in the world; blank lines mean nothing."""
    read = parse_hosts(between.join(f"{host}:{slots}" for host, slots in hosts.items()), None)
    assert list(read.items()) == list(hosts.items())


@given(st.lists(NAMES, unique=True), st.sampled_from([None, 1, 8]))
def test_a_host_has_the_default_slots_when_its_line_names_none(names: list[str],
                                                               default: int | None) -> None:
    """That is horovodrun's --slots-per-host, or 1."""
    assert parse_hosts("\n".join(names), default) == {name: default or 1 for name in names}


@pytest.mark.parametrize("line", [
    ":1", "a:", "a:0", "a:-1", "a:+1", "a:1.5", "a:1_0", "a:\u00b2", "a b:1", "a: 1", "a :1",
    "a:1 # the first", "a:1:", "Traceback (most recent call last):", "a:" + "9" * 5000,
    "a:1 -oProxyCommand=id", "a:1 b:x", "a:1 b:1:1", "a b", "-oProxyCommand=id:1", "a..b:1",
    "a" * 64 + ":1", "a\0:1", "a:1 zone=-x", "a:1 zone=x zone=y", "a:1 zone=x b",
    "<html>"])
def test_the_whole_list_is_refused_when_one_line_is_no_host(line: str) -> None:
    """A torn or wrong list is unknown, not shorter. What ssh would take for an option is no name.
    """
    with pytest.raises(ValueError):
        parse_hosts(f"first:1\n{line}\nlast:1", None)


@given(st.dictionaries(NAMES, st.sampled_from(["", "10.0.0.7", "a.example", "10.0.0.7:41234"])))
def test_a_host_s_address_is_read_beside_its_name(hosts: dict[str, str]) -> None:
    """A host without one is reached by its name."""
    text = "".join(f"{host}:2 {address}".rstrip() + "\n" for host, address in hosts.items())
    assert parse_hosts(text, None) == dict.fromkeys(hosts, 2)
    assert addresses_in(text) == {host: address for host, address in hosts.items() if address}


def test_a_host_s_zone_is_read_beside_its_name_and_reaches_its_worker(tmp_path: Path) -> None:
    """The script prints it for our driver alone: that of plain horovodrun would refuse the line."""
    text = "a:2 10.0.0.7:41234 zone=eu-1a\nb:1 zone=eu-1b\nc:1\n"
    assert parse_hosts(text, None) == {"a": 2, "b": 1, "c": 1}
    assert addresses_in(text) == {"a": "10.0.0.7:41234"}
    assert zones_in(text) == {"a": "eu-1a", "b": "eu-1b"}
    (tmp_path / "hosts").write_text(text)
    script = own.listing(str(tmp_path / "hosts"))
    plain = subprocess.run(script, shell=True, capture_output=True, text=True, check=True).stdout
    assert plain == "a:2 10.0.0.7:41234\nb:1\nc:1\n"
    settings = SimpleNamespace(discovery=HostDiscoveryScript(script, 1), elastic_timeout=None)
    discovery = Discovery(settings, Events(None), False)
    assert discovery.hosts_now() == {"a": 2, "b": 1, "c": 1}
    assert discovery.zones == {"a": "eu-1a", "b": "eu-1b"}
    env = worker_environment(Start("b", 0, "b/0/1"), "10.0.0.1", 1, b"key", {},
                             discovery.zones["b"], 2)
    launch = Launch.from_environment(env)
    assert (launch.zone, launch.min_workers) == ("eu-1b", 2)


def test_a_host_is_reached_at_its_address_under_its_own_name() -> None:
    """ssh dials the address, and knows the host's key by its name."""
    locations = Locations(resolve={"10.0.0.7": "10.0.0.7", "there": "127.0.0.1"}.get)
    locations.addresses = {"pod-1": "10.0.0.7", "ray-1": "10.0.0.7:41234"}  # its agent's own port
    locations.look_up(["pod-1", "ray-1", "there"])
    assert locations.is_here == {"pod-1": False, "ray-1": False, "there": True}
    assert locations.reached_at("ray-1") == "10.0.0.7"
    by_name, by_address = (Reach().command("pod-1", address)
                           for address in ("pod-1", "10.0.0.7"))
    assert by_name[-2] == "pod-1" and not any("HostKeyAlias" in word for word in by_name)
    assert by_address[-2] == "10.0.0.7" and "HostKeyAlias=pod-1" in by_address


@given(st.text(max_size=60))
def test_a_list_is_read_or_refused_when_it_is_anything(text: str) -> None:
    """No other error, and whatever was read has names without spaces and slots."""
    try:
        hosts = parse_hosts(text, None)
    except ValueError:
        return
    assert all(host and not any(c.isspace() for c in host) and slots >= 1
               for host, slots in hosts.items())


def is_here(host: str) -> bool:
    locations = Locations()
    locations.look_up([host])
    return locations.is_here[host]


@pytest.mark.parametrize(("host", "is_ours"), [
    ("localhost", True), ("127.0.0.1", True), ("127.0.0.77", True), ("127.1", True),
    ("192.0.2.1", False)])
def test_a_loopback_name_is_this_machine(host: str, is_ours: bool) -> None:
    """Any loopback address is a host of its own here, without ssh. Others are reached by ssh."""
    assert is_here(host) == is_ours


# --- workers' processes ---------------------------------------------------------------------------

class Workers:
    """Starts workers as the driver does, and leaves none behind."""

    def __init__(self) -> None:
        self.started: list[WorkerProcess] = []
        self.output = io.StringIO()

    def start(
            self,
            command: list[str],
            env: dict[str, str] = PLAIN,
            host: str = "localhost",  # noqa: B006 (read only)
            **settings: Any) -> WorkerProcess:
        worker = WorkerProcess(Start(host, 0, f"{host}/0/1"), command, env, Reach(**settings),
                               self.output, None if is_here(host) else host)
        self.started.append(worker)
        return worker

    def close(self) -> None:
        for worker in self.started:
            if worker.process.returncode is None:
                worker.stop(True, 0)
                worker.wait()


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def written(path: Path) -> str:
    """Wait for a file that ends in a newline, and return its text."""
    return str(until(lambda: path.exists() and path.read_text().endswith("\n") and path.read_text())
               ).rstrip("\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
def test_the_end_of_a_worker_that_was_killed_does_not_wait_for_its_stderr(
        workers: Workers, number: int) -> None:
    """Something that it has left behind may hold it for long, and no line of it could say where the
    worker died. (No SIGHUP: a child of nohup ignores it.)"""
    worker = workers.start(["sleep", "1000"])
    os.kill(worker.process.pid, number)
    code, waits = worker.wait(), list[float | None]()
    worker.forwards[1].join = waits.append  # type: ignore[method-assign, assignment]
    assert (worker.died_in(code), code, waits) == ("", -number, [])


def test_a_secret_is_in_no_command_line_when_a_worker_starts_here(workers: Workers) -> None:
    """It travels in the environment, which only the same user can read."""
    worker = workers.start(["sleep", "1000"], PLAIN | {"ELASTIC_TRAINER_KEY": SECRET})
    assert SECRET.encode() not in command_line(worker.process.pid)
    # A moment after exec.
    until(lambda: SECRET.encode() in Path(f"/proc/{worker.process.pid}/environ").read_bytes())


def test_its_environment_is_the_given_one_when_a_worker_starts_here(
        workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the driver's own environment goes along."""
    monkeypatch.setenv("OF_THE_DRIVER", "1")
    env = PLAIN | {"ODD": "a 'b' \"c\" $(id)\nä"}
    workers.start(["sh", "-c", f"env -0 > {tmp_path}/env; echo > {tmp_path}/done"], env).wait()
    seen = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().split("\0") if line)
    assert env.items() <= seen.items()
    assert "OF_THE_DRIVER" not in seen


@pytest.mark.parametrize(("text", "code"), [("exit 3", 3), ("exit 0", 0), ("kill -9 $$", -9),
                                            ("kill -6 $$", -6)])
def test_a_worker_ends_with_its_exit_code_or_its_signal(workers: Workers, text: str,
                                                        code: int) -> None:
    """Negative: the number of the signal."""
    assert workers.start(["sh", "-c", text]).wait() == code


def test_the_exit_is_seen_at_once_when_a_child_holds_the_output(workers: Workers,
                                                                tmp_path: Path) -> None:
    """Its helpers neither delay its end nor outlive it."""
    worker = workers.start(["sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/child; exit 3"])
    assert worker.wait() == 3
    child = int(written(tmp_path / "child"))
    until(lambda: not is_running(child))


def test_a_worker_goes_on_when_the_drivers_output_has_no_reader(workers: Workers) -> None:
    """A full disk, or a pipe whose reader has gone: it is read on all the same, or its next print
    would never return."""
    with open("/dev/full", "w") as full:
        workers.output = full  # type: ignore[assignment]
        worker = workers.start([
            "sh", "-c", "for i in 1 2 3 4 5 6 7 8; do head -c 50000 /dev/zero | tr '\\0' x; echo; "
            "done"
        ])
        assert worker.wait() == 0
        for thread in worker.forwards:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        with suppress(OSError):
            full.close()


def test_its_children_are_killed_when_a_worker_is_stopped_at_once(workers: Workers,
                                                                  tmp_path: Path) -> None:
    """The whole process group ends, and no other process."""
    bystander = workers.start(["sleep", "1000"])
    worker = workers.start(["sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/child; wait"])
    child = int(written(tmp_path / "child"))
    worker.stop(True, 1000)
    assert worker.wait() == -9
    until(lambda: not is_running(child))
    assert is_running(bystander.process.pid)


def test_a_worker_is_killed_when_it_does_not_obey_in_its_grace(
        workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM first, SIGKILL after `grace_s`."""
    text = (f"trap 'echo heard > {tmp_path}/heard' TERM; echo > {tmp_path}/ready; "
            f"while :; do sleep 0.01; done")
    worker = workers.start(["sh", "-c", text])
    written(tmp_path / "ready")
    later = list[tuple[Any, ...]]()
    monkeypatch.setattr(worker, "_later", lambda *what: later.append(what))
    worker.stop(False, 3.0)
    assert written(tmp_path / "heard") == "heard"
    [(grace_s, act, *arguments)] = later
    assert grace_s == 3.0
    act(*arguments)
    assert worker.wait() == -9


def test_a_worker_may_end_by_itself_when_it_is_asked_to_stop(workers: Workers,
                                                            tmp_path: Path) -> None:
    """Within its grace it is not killed; a second stop after its end does nothing."""
    worker = workers.start(
        ["sh", "-c", f"trap 'exit 75' TERM; echo > {tmp_path}/ready; while :; do sleep 0.01; done"])
    written(tmp_path / "ready")
    worker.stop(False, 1000)
    assert worker.wait() == 75
    worker.stop(True, 0)


def test_each_line_has_its_host_when_workers_print(workers: Workers) -> None:
    """Also what is no UTF-8, and a last line without an end."""
    workers.start(["sh", "-c", r"echo one; printf '\377two' >&2"], host="127.0.0.3").wait()
    until(lambda: len(workers.output.getvalue().splitlines()) == 2)
    lines = sorted(workers.output.getvalue().splitlines())
    assert lines == ["[127.0.0.3]<stderr>: \ufffdtwo", "[127.0.0.3]<stdout>: one"]


def test_output_without_a_line_end_is_forwarded(
        workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A progress bar, and a prompt, are seen while the worker goes on."""
    monkeypatch.setattr("elastic_trainer.host.lines.UPDATE_S", 0.01)
    workers.start(["sh", "-c", r"printf '\r 1%%\r 2%%'; printf 'ready? ' >&2; sleep 1000"])
    until(lambda: "<stdout>:  2%" in
          (seen := workers.output.getvalue()) and "<stderr>: ready?" in seen)


def test_output_without_line_ends_is_passed_on_in_bounded_pieces(workers: Workers) -> None:
    """The driver's memory is not the worker's to fill: neither by a line, nor by the last lines of
    its stderr."""
    worker = workers.start(["sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x >&2"])
    assert worker.wait() == 0
    worker.forwards[1].join(DEADLINE_S)
    lines = [
        line.removeprefix("[localhost]<stderr>: ")
        for line in workers.output.getvalue().splitlines()
    ]
    assert "".join(lines) == "x" * 3_000_000 and len(lines) < 100
    assert max(map(len, lines)) <= MAX_LINE_BYTES and max(map(len, worker.last_lines)) <= 1000


def test_a_workers_output_cannot_command_the_terminal(workers: Workers) -> None:
    """Colours stay, and end with their line; titles, clipboards and cursors are shown and not
    obeyed."""
    workers.start(["printf", r"\033[31mred\033]0;title\007\033[2Aup\ttab\n"]).wait()
    seen = until(lambda: workers.output.getvalue())
    assert seen == "[localhost]<stdout>: \x1b[31mred\\x1b]0;title\\x07\\x1b[2Aup\ttab\x1b[0m\n"


def test_the_error_is_the_systems_when_the_command_is_not_there(workers: Workers) -> None:
    """An OSError, which the driver tells as a start that failed."""
    with pytest.raises(OSError):
        workers.start(["/nowhere/python"])


# --- over ssh -------------------------------------------------------------------------------------

FAR = "192.0.2.1"  # TEST-NET-1: no host has it


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        instead_of_ssh: Callable[[str], None]) -> Path:
    """Put an `ssh` first on the path that writes its arguments down and runs its last one here, in
    an environment as empty as a login's; returns the file with the arguments."""
    arguments = tmp_path / "ssh-arguments"
    instead_of_ssh(f"printf '%s\\n' \"$@\" > {arguments}\nfor last; do :; done\n"
                   f"exec env -i PATH={os.defpath} HOME=/ sh -c \"$last\"")
    monkeypatch.chdir(tmp_path)
    return arguments


ODD_VALUES = {
    "ELASTIC_TRAINER_KEY": SECRET,
    "EMPTY": "",
    "QUOTES": "a 'b' \"c\" `id` $(touch executed) ${HOME} \\",
    "TAB": "\t",
    "LINES": "first\nexport INJECTED=1\n\nlast\n",
    "WIDE": "äöü→" * 50,
    "LONG": "x" * 20000,
    "PATH": os.defpath,
}


def test_the_environment_arrives_on_stdin_when_a_worker_starts_elsewhere(
        workers: Workers, ssh: Path, tmp_path: Path) -> None:
    """Every value as it is, byte for byte, and none of them on a command line, ours or theirs."""
    there = (f"env -0 > {tmp_path}/env; tr '\\0' ' ' < /proc/$$/cmdline > {tmp_path}/cmdline; "
             f"echo > {tmp_path}/ready; sleep 1000")
    worker = workers.start(["sh", "-c", there], ODD_VALUES, FAR)
    assert worker.is_remote
    written(tmp_path / "ready")
    seen = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().split("\0") if line)
    assert {name: seen.get(name) for name in ODD_VALUES} == ODD_VALUES
    assert "INJECTED" not in seen and not (tmp_path / "executed").exists()
    for said in (ssh.read_text(), (tmp_path / "cmdline").read_text(),
                 command_line(worker.process.pid).decode()):
        assert SECRET not in said


def test_its_arguments_and_folder_are_the_same_when_a_worker_starts_elsewhere(
        workers: Workers, ssh: Path, tmp_path: Path) -> None:
    """No shell on the way takes them apart, and no variable of ours that is no environment is
    exported."""
    arguments = ["a b", "$(touch executed)", "'", "", "ä\n", "*"]
    command = [
        "sh", "-c",
        f'printf "%s\\0" "$@" > {tmp_path}/seen; pwd > {tmp_path}/folder; env > {tmp_path}/env',
        "x", *arguments
    ]
    assert workers.start(command, PLAIN | {"BASH_FUNC_f%%": "() { :; }", "not-a-name": "1"},
                         FAR).wait() == 0
    assert (tmp_path / "seen").read_text().split("\0")[:-1] == arguments
    assert (tmp_path / "folder").read_text() == f"{tmp_path}\n"
    assert not (tmp_path / "executed").exists()
    assert "BASH_FUNC" not in (tmp_path / "env").read_text() and "not-a-name" not in (
        tmp_path / "env").read_text()


def test_ssh_asks_for_no_password_and_notices_a_dead_host(workers: Workers, ssh: Path) -> None:
    """No password prompt, a bounded connect, keep-alives (F3), and the port and key that horovodrun
    was given."""
    workers.start(["true"], PLAIN, FAR, ssh_port=2222, ssh_identity_file="/keys/id").wait()
    arguments = ssh.read_text().splitlines()
    options = {
        arguments[i + 1].split("=")[0]
        for i, argument in enumerate(arguments) if argument == "-o"
    }
    assert {"BatchMode", "ConnectTimeout", "ServerAliveInterval", "ServerAliveCountMax"} <= options
    assert arguments[arguments.index("-p") + 1] == "2222"
    assert arguments[arguments.index("-i") + 1] == "/keys/id"
    assert arguments.count(FAR) == 1


def test_the_far_exit_is_the_workers_when_it_ends_elsewhere(
        workers: Workers, ssh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code or its signal, and no line of the protocol is printed."""
    # Nobody holds the output here.
    monkeypatch.setattr("elastic_trainer.driver.process.FAR_OUTPUT_S", DEADLINE_S)
    for text, code in (("printf said; exit 75", 75), ("kill -9 $$", -9), ("exit 255", 255)):
        assert workers.start(["sh", "-c", text], PLAIN, FAR).wait() == code
    assert workers.output.getvalue() == f"[{FAR}]<stdout>: said\n"


def test_the_exit_over_ssh_is_noticed_soon_when_another_process_holds_the_output(
        workers: Workers, ssh: Path, tmp_path: Path) -> None:
    """sshd waits for the end of the output; the driver does not."""
    child = f"setsid sh -c 'echo $$ > {tmp_path}/child; exec sleep 1000'"
    started = f"until [ -s {tmp_path}/child ]; do sleep 0.01; done"
    worker = workers.start(["sh", "-c", f"{child} & {started}; exit 3"], PLAIN, FAR)
    assert worker.wait() == 3
    os.kill(int(written(tmp_path / "child")), signal.SIGKILL)


def test_the_error_names_the_command_when_it_is_not_on_the_far_host(workers: Workers,
                                                                    ssh: Path) -> None:
    """As a shell would: 127."""
    assert workers.start(["/nowhere/python"], PLAIN, FAR).wait() == 127
    until(lambda: "/nowhere/python cannot be started" in workers.output.getvalue())


def test_the_far_worker_is_terminated_when_it_is_asked_to_stop(workers: Workers, ssh: Path,
                                                              tmp_path: Path) -> None:
    """A signal to the ssh would not reach it."""
    worker = workers.start(
        ["sh", "-c", f"trap 'exit 75' TERM; echo > {tmp_path}/ready; while :; do sleep 0.01; done"],
        PLAIN, FAR)
    written(tmp_path / "ready")
    worker.stop(False, 1000)
    assert worker.wait() == 75


def test_the_far_worker_is_killed_when_it_is_stopped_at_once(
        workers: Workers, ssh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is frozen, and its children."""
    monkeypatch.setattr("elastic_trainer.driver.process.FAR_KILL_S", DEADLINE_S)
    worker = workers.start(["sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/child; kill -STOP $$"],
                           PLAIN, FAR)
    child = int(written(tmp_path / "child"))
    worker.stop(True, 0)
    assert worker.wait() == -9
    until(lambda: not is_running(child))


FAR_END = [sys.executable, "-S", remote.__file__]


def far_end(command: list[str], **limits: float) -> subprocess.Popen[bytes]:
    """Start the far end alone, and say to it what to start."""
    process = subprocess.Popen(FAR_END, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               start_new_session=True)
    assert process.stdin
    job = {"command": command, "env": PLAIN, "cwd": "/", "lost_s": 1000.0, "grace_s": 0.0} | limits
    process.stdin.write(json.dumps(job).encode() + b"\n")
    process.stdin.flush()
    return process


@pytest.mark.parametrize("loses", ["stdin", "messages"])
def test_the_far_worker_is_killed_when_the_driver_is_gone(loses: str) -> None:
    """Its death ends stdin; a partition or a frozen driver ends only the messages."""
    process = far_end(["sleep", "1000"], lost_s=1000.0 if loses == "stdin" else 0.1)
    assert process.stdin
    if loses == "stdin":
        process.stdin.close()
    assert process.wait(DEADLINE_S) == 128 + 9


def test_the_far_worker_may_end_by_itself_when_the_driver_is_gone(tmp_path: Path) -> None:
    """In its grace it writes what only its memory holds."""
    process = far_end(["sh", "-c", f"until [ -e {tmp_path}/gone ]; do sleep 0.01; done; exit 75"],
                      grace_s=1000.0)
    assert process.stdin
    process.stdin.close()
    (tmp_path / "gone").touch()
    assert process.wait(DEADLINE_S) == 75


# --- a discovery that fails -----------------------------------------------------------------------

class Failing:
    """A discovery that fails a number of times before it answers."""

    def __init__(self, times: int):
        self.left = times

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        self.left -= 1
        if self.left >= 0:
            raise ValueError(f"exit code 1: {self.left}")
        return {"a": 1}


@pytest.mark.parametrize("had_hosts", [True, False])
def test_a_discovery_that_fails_is_waited_for_when_the_run_has_had_hosts(had_hosts: bool) -> None:
    """It works, and is away. One that has never answered is a mistake in the command. An outage is
    logged twice: its start and its end."""
    events, heard = Events(None), list[tuple[str, Any]]()
    events.listeners.append(lambda event, facts: heard.append((event, facts.get("error"))))
    discovery = Discovery(SimpleNamespace(elastic_timeout=None, discovery=Failing(20)), events,
                          had_hosts, first_s=-1.0, every_s=0.001)
    if not had_hosts:
        with pytest.raises(DiscoveryUnavailable, match="--host-discovery-script by hand"):
            discovery.first_hosts()
        return
    assert discovery.first_hosts() == {"a": 1}
    assert heard == [("driver.discovery_failed", "exit code 1: 19"),
                     ("driver.discovery_recovered", None)]


# --- the driver's own address ---------------------------------------------------------------------


def test_hosts_get_an_address_on_their_route_when_the_first_list_was_empty(
        ssh: Path, tmp_path: Path) -> None:
    """A fleet that boots with its coordinator is not there yet: the driver waits for a host before
    it says where it is."""
    try:
        own = own_address_towards(FAR)
    except OSError:
        pytest.skip("no way leads out of this machine.")
    hosts, asked = tmp_path / "hosts", tmp_path / "asked"
    hosts.touch()
    there = [
        "sh", "-c",
        f"echo $ELASTIC_TRAINER_DRIVER > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/told; sleep "
        f"1000"
    ]
    path = os.pathsep.join([str(Path(__file__).resolve().parent.parent), *sys.path])
    driver = subprocess.Popen([
        sys.executable, "-m", "elastic_trainer.driver.horovodrun", "-np", "1",
        "--host-discovery-script", f"sh -c 'cat {hosts}; echo >> {asked}'", *there
    ],
                              env=os.environ | {"PYTHONPATH": path})
    try:
        written(asked)
        hosts.write_text(f"{FAR}:1\n")
        assert written(tmp_path / "told").startswith(f"{own}:")
    finally:
        driver.terminate()
        driver.wait(DEADLINE_S)


def test_the_way_leads_to_the_next_host_when_the_name_of_the_first_is_not_found() -> None:
    """One failed lookup is no reason to give anything up."""
    try:
        own = own_address_towards(FAR)
    except OSError:
        pytest.skip("no way leads out of this machine.")
    known = {"there": FAR, "here": "127.0.0.1"}
    assert way_to(["gone", "here", "there"], known.get) == own
    assert way_to(["here"], known.get) == "127.0.0.1"
    with pytest.raises(HostsUnreachable,
                       match=r"gone .its name has no address.*--network-interfaces"):
        way_to(["here", "gone"], known.get)


def start_on(host: str, *options: str, seconds: float = 0.0) -> subprocess.CompletedProcess[str]:
    """Run a driver, whose patience with names is so many seconds, for a host."""
    path = os.pathsep.join([str(Path(__file__).resolve().parent.parent), *sys.path])
    code = (
        f"import sys\nfrom elastic_trainer.driver import horovodrun, hosts\n"
        f"hosts.LOOKUP_S = {seconds}\n"
        f"sys.exit(horovodrun.main(['-np', '1', '--host-discovery-script', 'echo {host}:1', "
        f"*{list(options)}, "
        f"'true']))")
    return subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path},
                          capture_output=True, text=True, timeout=DEADLINE_S)


def test_the_next_attempt_looks_again_when_no_name_is_found() -> None:
    """A name server that is away is the world's fault; exit code 2 is the user's error."""
    done = start_on("host.invalid")
    assert done.returncode == EXIT_NO_HOSTS, done.stderr
    assert "host.invalid" in done.stderr and "The next attempt looks again" in done.stderr


@pytest.mark.parametrize("interfaces", ["nosuch0", "lo,nosuch0"])
def test_a_wrong_interface_is_the_users_mistake(interfaces: str) -> None:
    """Exit code 2, and the key is named: no other attempt mends it."""
    done = start_on("host.invalid", "--network-interfaces", interfaces)
    assert done.returncode == 2, done.stderr
    assert f"--network-interfaces is {interfaces}" in done.stderr


def test_this_machine_is_found_here_when_its_name_was_not_found_before() -> None:
    """A failed lookup is not remembered for ever: else this machine is far, behind an ssh that may
    not be there."""
    known: dict[str, str] = {}
    locations = Locations(known.get, again_s=-1.0)
    locations.look_up(["mine"])
    assert locations.is_here == {"mine": False}
    known["mine"] = "127.0.0.5"
    locations.look_up(["mine"])
    assert locations.is_here == {"mine": True}


def driver_of(events: Events, env: dict[str, str] | None = None,
              command: Sequence[str] = ()) -> MendedDriver:
    """Return the driver of one worker on the host a, or of the workers that a test starts."""
    settings = SimpleNamespace(num_proc=1, min_num_proc=1, max_num_proc=None, elastic_timeout=None,
                               ssh_port=None, ssh_identity_file=None)
    driver = MendedDriver(settings, env or {}, list(command), events)
    driver.membership.hosts_listed({"a": 1})
    return driver


def worker_of(driver: MendedDriver, phase: Phase) -> Worker:
    worker = driver.membership.workers["a/0/1"] = Worker("a/0/1", "a", 0, 0.0, 0.0, phase=phase)
    return worker


# --- the end of an attempt ------------------------------------------------------------------------


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_the_time_to_stop_is_extended_while_a_checkpoint_goes_up(began: float,
                                                                 moved_at: float) -> None:
    """From its last movement on there are 30 s again, and never less than from the beginning; all
    has an end."""
    until = stop_deadline(began, moved_at)
    assert began + STOP_S <= until <= began + STOP_MOST_S
    assert until >= moved_at + STOP_S or until == began + STOP_MOST_S


class Saving:
    """A worker's process that ends by itself, or when it is stopped."""

    def __init__(self, driver: MendedDriver):
        self.driver, self.stopped = driver, list[bool]()

    def stop(self, at_once: bool, grace_s: float) -> None:
        self.stopped.append(at_once)
        del self.driver.processes["a/0/1"]


@pytest.fixture
def saving(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MendedDriver, Saving]]:
    """A driver that was asked to stop, with one worker."""
    monkeypatch.setattr("elastic_trainer.driver.driver.STOP_S", 1.5)
    monkeypatch.setattr("elastic_trainer.driver.driver.STOP_AGAIN_S", -1.0)
    monkeypatch.setattr("elastic_trainer.driver.driver.LAST_OUTPUT_S", 0.0)
    driver = driver_of(Events(None))
    worker_of(driver, Phase.TRAINING)
    process = Saving(driver)
    driver.processes["a/0/1"] = process  # type: ignore[assignment]
    driver.membership.verdict = driver.ended = End("interrupted", "")
    yield driver, process
    driver.processes.clear()


class Clock:
    """The time, which a test moves. It notes that it was asked."""

    def __init__(self) -> None:
        self.now, self.asked = 1000.0, 0

    def monotonic(self) -> float:
        self.asked += 1
        return self.now


@pytest.mark.parametrize("saves", [True, False])
def test_a_worker_is_not_stopped_while_its_checkpoint_goes_up(
        saving: tuple[MendedDriver, Saving], monkeypatch: pytest.MonkeyPatch, saves: bool) -> None:
    """Each of its heartbeats reports it. A worker that only lives has 30 s."""
    monkeypatch.setattr("elastic_trainer.driver.driver.STOP_S", 30.0)
    monkeypatch.setattr("elastic_trainer.driver.driver.time", clock := Clock())
    monkeypatch.setattr("elastic_trainer.driver.message_handler.time",
                        SimpleNamespace(monotonic=lambda: clock.now, time=time.time))
    driver, process = saving
    stopping = threading.Thread(target=driver.stop_all)
    stopping.start()
    until(lambda: clock.asked)
    for count in range(70):
        with driver.changed:
            clock.now += 1.0
            driver.messages.take(
                {
                    "worker": "a/0/1", "count": count, "phase": "training", "generation": 0,
                    "saves": saves
                }, "127.0.0.1")
            driver.changed.notify_all()
            asked = clock.asked
        until(lambda: process.stopped or clock.asked > asked)  # noqa: B023 (called at once)
        if process.stopped:
            break
    assert process.stopped == ([] if saves else [True])
    assert clock.now == 1000.0 + (70.0 if saves else 30.0)
    with driver.changed:
        driver.processes.clear()
        driver.changed.notify_all()
    stopping.join(DEADLINE_S)
    assert not stopping.is_alive()


def test_workers_are_stopped_at_once_when_the_driver_is_asked_to_stop_again(
        saving: tuple[MendedDriver, Saving], monkeypatch: pytest.MonkeyPatch) -> None:
    """A person who presses Ctrl-C twice does not want to wait for the checkpoint."""
    driver, process = saving
    monkeypatch.setattr("elastic_trainer.driver.driver.STOP_S", 10 * DEADLINE_S)
    driver.interrupted_at = time.monotonic()
    stopping = threading.Thread(target=driver.stop_all)
    stopping.start()
    driver.interrupt()
    stopping.join(DEADLINE_S)
    assert process.stopped == [True]


# --- Horovod's version ----------------------------------------------------------------------------

@pytest.fixture
def another_horovod(tmp_path: Path) -> Path:
    """Return a folder that, first on the path, makes another Horovod the installed one."""
    info = tmp_path / "horovod-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 9.9.9\n")
    return tmp_path


def test_the_driver_runs_on_the_version_that_it_mends() -> None:
    """The one that is installed here."""
    check_version()


def test_no_worker_is_started_when_another_horovod_is_installed(another_horovod: Path) -> None:
    """The command ends with exit code 2. Both versions and the remedy are in its text."""
    path = os.pathsep.join(
        [str(another_horovod), str(Path(__file__).resolve().parent.parent), *sys.path])
    done = subprocess.run([
        sys.executable, "-m", "elastic_trainer.driver.horovodrun", "-np", "1",
        "--host-discovery-script", "echo localhost:1", "touch",
        str(another_horovod / "started")
    ],
                          env=os.environ | {"PYTHONPATH": path},
                          capture_output=True,
                          text=True)
    assert done.returncode == 2
    assert re.search(r"9\.9\.9.*0\.28\.1.*`elastic-trainer setup`", done.stderr)
    assert not (another_horovod / "started").exists()


# --- messages -------------------------------------------------------------------------------------


Spoken = Callable[..., list[tuple[str, dict[str, Any]]]]


@pytest.fixture
def spoken() -> Spoken:
    """A driver with one worker. Returns the events for a heartbeat that comes this long after the
    one before."""
    events, heard = Events(None), list[tuple[str, dict[str, Any]]]()
    events.listeners.append(lambda event, facts: heard.append((event, facts)))
    driver = driver_of(events)
    worker = worker_of(driver, Phase.STANDBY)

    def spoken(silent_s: float, still_s: float = 0.1,
               off_s: float = 0.0) -> list[tuple[str, dict[str, Any]]]:
        heard.clear()
        now = time.monotonic()
        worker.heard_at, driver.membership.decided_at = now - silent_s, now - still_s
        word = {
            "worker": worker.name, "count": worker.count + 1, "phase": "standby", "generation": 0,
            "time": time.time() + off_s
        }
        driver.messages.take(word, "127.0.0.1")
        return list(heard)

    return spoken


def test_a_silent_worker_is_logged_when_its_heartbeats_return(spoken: Spoken) -> None:
    """Below the time that evicts it; not for a beat or two, and not when it was the driver that
    stood still."""
    assert spoken(0.5) == []
    [(event, facts)] = spoken(3.0)
    assert (event, facts["worker"]) == ("driver.worker_heard_again",
                                        "a/0/1") and 2.5 < facts["silent_s"] < 3.0
    assert spoken(3.0, still_s=2.9) == []


def test_a_wrong_clock_is_logged_once(spoken: Spoken) -> None:
    """Its lines in the event log have its own time. One heartbeat with another time may have waited
    for a driver that was frozen."""
    for off_s in (50.0, -240.0, 0.0, -240.0):
        assert spoken(0.2, off_s=off_s) == []
    [(event, facts)] = spoken(0.2, off_s=-240.0)
    assert (event, facts["host"], round(facts["off_s"])) == ("driver.clock_differs", "a", -240)
    assert spoken(0.2, off_s=-240.0) == []


# --- keys -----------------------------------------------------------------------------------------


@pytest.fixture
def starting(ssh: Path,
             tmp_path: Path) -> Iterator[Callable[[str], tuple[MendedDriver, dict[str, str]]]]:
    """Start a worker on each host; return the driver, and the environment of each worker, by its
    name."""
    text = ("tr '\\0' '\\n' < /proc/$$/environ > $0/${ELASTIC_TRAINER_WORKER##*/}; "
            "echo >> $0/ready; exec sleep 1000")
    driver = driver_of(Events(None), {"ELASTIC_TRAINER_KEY": "11" * 32, "PATH": os.defpath},
                       ["sh", "-c", text, str(tmp_path)])
    driver.address = "127.0.0.1"
    driver.membership.verdict = End("interrupted", "as planned: nothing is decided")
    driver.server = MessageServer(driver.address, driver.key, driver.messages.take,
                               driver.messages.refusals.refuse)
    threading.Thread(target=driver.server.serve_forever, daemon=True).start()

    def start(*hosts: str) -> tuple[MendedDriver, dict[str, str]]:
        driver.locations.is_here = {host: host != FAR for host in hosts}
        for number, host in enumerate(hosts):
            name = f"{host}/0/{number}"
            driver.membership.hosts_listed(dict.fromkeys(hosts, 1))
            driver.membership.workers[name] = Worker(name, host, 0, 0.0, 0.0)
            driver._start(Start(host, 0, name))
        until(lambda: (tmp_path / "ready").is_file() and
              (tmp_path / "ready").stat().st_size == len(hosts))
        return driver, {
            f"{host}/0/{number}": (tmp_path / str(number)).read_text()
            for number, host in enumerate(hosts)
        }

    yield start
    with driver.changed:
        for process in driver.processes.values():
            process.stop(True, 0)
    until(lambda: not driver.processes)
    driver.server.shutdown()
    driver.server.close()


def test_a_worker_has_its_own_key_and_not_the_runs(starting: Callable[..., Any]) -> None:
    """Here and over ssh. What its driver was started with says nothing: that is in /proc for each
    worker on its host."""
    driver, environments = starting("127.0.0.1", "127.0.0.2", FAR)
    for name, environment in environments.items():
        has = {who for who in environments if worker_key(driver.key, who).hex() in environment}
        assert has == {name
                       } and driver.key.hex() not in environment and "11" * 32 not in environment
    assert driver.key != bytes.fromhex("11" * 32)


def test_the_driver_refuses_a_worker_that_uses_its_neighbours_name(
        starting: Callable[..., Any]) -> None:
    """No heartbeat, no event, no last message: neither its life, nor its death, nor its error is
    another worker's to report."""
    driver, environments = starting("127.0.0.1", "127.0.0.2")
    one, other = environments
    own = bytes.fromhex(environments[one].partition("ELASTIC_TRAINER_KEY=")[2].partition("\n")[0])
    neighbour = driver.membership.workers[other]
    neighbour.phase = Phase.STANDBY
    before = repr(vars(neighbour))
    address = f"127.0.0.1:{driver.server.address[1]}"
    word = {"count": 1, "phase": "standby", "generation": 0, "error": "it was me"}
    line = {"shipper": "x", "number": 1, "line": "{}"}
    for said in (word, line, word | {"phase": "reviving"}, word | {"machine": {}}):
        for who, words in ((other, said), (one, said | {"worker": other})):
            with pytest.raises(DriverUnreachable, match="403"):
                DriverClient(address, who, own, DEADLINE_S).ask(words)
    assert repr(vars(neighbour)) == before and not driver.membership.blame.user_error
    neighbours = worker_key(driver.key, other)
    DriverClient(address, other, neighbours,
                 DEADLINE_S).ask({"count": 1, "phase": "standby", "generation": 0})
    assert neighbour.count == 1
