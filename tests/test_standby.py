"""Standbys with real processes: the shim, the monitor and the service; then in a real cluster of
four workers.

The numbers in brackets are those of elastic_trainer/driver/standby_monitor.py's head comment.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import netlab
import pytest
import s3_servers
from cluster import Cluster, is_running
from waiting import wait_for

from elastic_trainer.driver import standby_shim as shim
from elastic_trainer.driver.standby_monitor import differing, idle_cores
from elastic_trainer.driver.standby_pool import local_standbys
from elastic_trainer.events.log import read_events
from elastic_trainer.host.processes import is_worker
from elastic_trainer.host.remote import workers_of
from elastic_trainer.world.standby import changed_files, merged, write_environment

pytestmark = pytest.mark.usefixtures("turn")  # they start workers
Twin = Callable[..., str]
ROOT = Path(__file__).resolve().parent.parent
SHIM = [sys.executable, "-S", "-I", str(ROOT / "elastic_trainer" / "driver" / "standby_shim.py")]
DEADLINE_S = 60.0
JOB = """
import json, os, signal, sys, time
print("imported", flush=True)
BOOT
from elastic_trainer.world import standby as standby
was = standby.is_standby()
standby.wait_for_place()
facts = {"was": was, "pid": os.getpid(), "name": os.environ.get("ELASTIC_TRAINER_WORKER"),
         "key": os.environ.get("ELASTIC_TRAINER_KEY"),
         "hidden": "ELASTIC_TRAINER_STANDBY" in os.environ}
with open(f"here.new.{os.getpid()}", "w") as file:
    json.dump(facts, file)
os.rename(file.name, f"here-{facts['name'].replace('/', '-')}")
print("out", flush=True)
print("err", file=sys.stderr, flush=True)
THEN
"""
JOB_STEPS = ("--steps", "140", "--step-s", "0.5", "--checkpoint-every", "5")
"""Slow, so that a standby finds idle cores to boot on, until the story is over (`hurry`). The lab's
other tests have the same twin."""
WAITS = ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\nopen('waits', 'w')\n"
         "while True: time.sleep(0.05)")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Bench:
    """One folder with a job, a service that keeps standbys of it, and shims that ask for them."""
    def __init__(self, folder: Path, sockets: Path):
        self.folder, self.sockets = folder, sockets
        self.command = [sys.executable, "job.py"]
        self.env = os.environ | {shim.FOLDER_VARIABLE: str(sockets),
                                 "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        self.started: list[subprocess.Popen[bytes]] = []
        self.monitors: set[int] = set()
        (folder / "events.jsonl").touch()

    def write(self, then: str = "", boot: str = "") -> None:
        """Write the job: `boot` comes before its place, `then` after."""
        (self.folder / "job.py").write_text(JOB.replace("BOOT", boot).replace("THEN", then))

    def behind_a_script(self) -> None:
        """Let the job's command be a script that starts it, as its child."""
        self.command = ["/bin/sh", "job.sh"]
        (self.folder / "job.sh").write_text(
            f"export OF_SCRIPT=set PATH=/of/script:$PATH\n{sys.executable} job.py\nexit $?\n")

    def serve(self, slots: int = 1, **env: str) -> subprocess.Popen[bytes]:
        """Start the service."""
        command = [sys.executable, "-m", "elastic_trainer", "standby", "--slots", str(slots),
                   "--run-dir", str(self.folder), "--", *self.command]
        service = subprocess.Popen(command, env=self.env | env, cwd=self.folder,
                                   stderr=open(self.folder / "service.log", "ab"))
        self.started.append(service)
        return service

    def ready(self, then: str = "", boot: str = "", slots: int = 1) -> subprocess.Popen[bytes]:
        """Write the job, start the service, and wait until its standbys wait."""
        self.write(then, boot)
        service = self.serve(slots)
        self.booted(slots)
        return service

    def events(self, name: str) -> list[dict[str, Any]]:
        told = [
            json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]
        return [e for e in told if e["event"] == name]

    def booted(self, count: int = 1) -> list[Path]:
        """Wait until so many standbys wait; returns their sockets."""
        return list(
            wait_for(f"{count} standbys",
                     lambda: len(found := sorted(self.sockets.glob("*.sock"))) >= count and found))

    def monitor(self) -> int:
        """Return the pid of the monitor of the only standby."""
        [path] = self.booted()
        return int(path.stem.rpartition("-")[2])

    def take(self, name: str = "host/0/1", command: list[str] | None = None,
             **env: str) -> subprocess.Popen[bytes]:
        """Start a shim as the driver does."""
        worker = subprocess.Popen(
            [*SHIM, *(command or self.command)], cwd=self.folder, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True, stdin=subprocess.DEVNULL,
            env=self.env | {"ELASTIC_TRAINER_WORKER": name, "ELASTIC_TRAINER_KEY": "secret"} | env)
        self.started.append(worker)
        return worker

    def here(self, name: str = "host/0/1") -> dict[str, Any]:
        """Wait until a worker has its place; returns what it says of itself."""
        path = self.folder / f"here-{name.replace('/', '-')}"
        wait_for(f"worker {name}", path.exists)
        return dict(json.loads(path.read_text()))

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream:
                    stream.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="standby-") as sockets:
        bench = Bench(tmp_path, Path(sockets))
        yield bench
        bench.close()


# --- laws -----------------------------------------------------------------------------------------


def test_nothing_differs_when_only_the_place_does() -> None:
    booted = {"HOME": "/h", "PYTHONUNBUFFERED": "1", "TERM": "x", "PATH": "/a"}
    now = {
        "HOME": "/h", "HOROVOD_RANK": "1", "ELASTIC_TRAINER_KEY": "k", "SSH_CLIENT": "::1",
        "_HOROVOD_LAUNCH_KEY": "k", "PATH": "/b"}
    assert differing(booted, now, "/bin/sh") == []


def test_the_path_counts_when_the_program_is_another_by_it(tmp_path: Path) -> None:
    """Two ways into a machine seldom have the same words in it."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "python").write_text("#!/bin/sh\n")
    (tmp_path / "a" / "python").chmod(0o755)
    first, more, other = ({"PATH": ":".join(str(tmp_path / name) for name in names)}
                          for names in ("a", "ab", "b"))
    assert differing(first, more, "python") == []
    assert differing(first, other, "python") == ["PATH"]


@pytest.mark.parametrize("now", [{"DATA": "/b"}, {}, {"DATA": "/a", "OMP_NUM_THREADS": "1"}])
def test_any_variable_of_the_users_counts(now: dict[str, str]) -> None:
    """Another value, none, or one more: the script may have read it."""
    assert len(differing({"DATA": "/a"}, now, "/bin/sh")) == 1


def test_the_environment_is_that_of_the_place_with_what_the_script_has_changed() -> None:
    """[3] Set, changed and removed by it, or by a wrapper of it, since it was booted."""
    booted = {"HOME": "/h", "PATH": "/a", "SSH_TTY": "1", "LC_ALL": "C"}
    now = {
        "HOME": "/h", "PATH": "/venv:/a", "SSH_TTY": "1", "OMP_NUM_THREADS": "4",
        "HOROVOD_RANK": "0", "HOROVOD_CYCLE_TIME": "5"}
    place = {"HOME": "/h", "PATH": "/b", "HOROVOD_RANK": "1", "LC_ALL": "C"}
    assert merged(booted, now, place) == {
        "HOME": "/h", "PATH": "/venv:/a", "HOROVOD_RANK": "1", "OMP_NUM_THREADS": "4",
        "HOROVOD_CYCLE_TIME": "5"}


def test_the_idle_cores_are_counted() -> None:
    """100 ticks on all cores together, 60 of them idle or waiting for a disk."""
    found = idle_cores([0] * 8, [30, 0, 10, 50, 10, 0, 0, 0])
    assert found == pytest.approx(0.6 * (os.cpu_count() or 1))


def test_the_command_is_itself_when_there_is_no_folder(tmp_path: Path) -> None:
    env = {shim.FOLDER_VARIABLE: str(tmp_path / "none")}
    assert shim.through_shim(["python", "x.py"], env, is_local=True) == ["python", "x.py"]
    remote = shim.through_shim(["echo", "a b", "$HOME"], env, is_local=False)
    assert subprocess.run(remote, env=env | {"PATH": os.environ["PATH"]},
                          capture_output=True).stdout == b"a b $HOME\n"


def test_the_shim_is_asked_elsewhere_when_there_is_a_folder(bench: Bench) -> None:
    bench.ready()
    remote = shim.through_shim(bench.command, bench.env, is_local=False)
    assert subprocess.run(remote, cwd=bench.folder,
                          env=bench.env | {"ELASTIC_TRAINER_WORKER": "host/0/1"}).returncode == 0
    assert bench.here()["was"]


# --- one standby ----------------------------------------------------------------------------------


def test_the_place_is_handed_over(bench: Bench) -> None:
    """[1, 3] Environment, both outputs with what was said before, name and exit code."""
    bench.write("sys.exit(7)")
    service = bench.serve()
    monitor = bench.monitor()
    worker = bench.take()
    out, err = worker.communicate(timeout=DEADLINE_S)
    facts = bench.here()
    assert (worker.returncode, out, err) == (7, b"imported\nout\n", b"err\n")
    assert facts["was"] and facts["pid"] != worker.pid and not facts["hidden"]
    assert (facts["name"], facts["key"]) == ("host/0/1", "secret")
    wait_for("the monitor's end", lambda: not is_running(monitor))
    assert service.poll() is None


def test_the_worker_is_known_by_its_environment(bench: Bench) -> None:
    """Whoever looks for workers in /proc finds it by its name; the secret is not there, nor on a
    command line."""
    bench.ready(WAITS)
    bench.take(ELASTIC_TRAINER_RUN_DIR="/runs/mine", ELASTIC_TRAINER_ATTEMPT="3")
    pid = bench.here()["pid"]
    mine = Path("/runs/mine")
    assert is_worker(pid, "host/0/1", mine) and not is_worker(pid, "host/0/2", mine)
    assert not is_worker(pid, "host/0/1", Path("/runs/other"))
    assert workers_of("/runs/mine")[pid] == ("3", "host/0/1")
    for file in ("environ", "cmdline"):
        assert b"secret" not in Path(f"/proc/{pid}/{file}").read_bytes()


def test_it_is_used_once_and_replaced(bench: Bench) -> None:
    """[1] The next shim gets another process."""
    bench.write(WAITS)
    bench.serve()
    first = bench.booted()
    bench.take("host/0/1")
    pid = bench.here("host/0/1")["pid"]
    second = wait_for("its successor", lambda: (found := bench.booted()) != first and found)
    bench.take("host/0/2")
    assert bench.here("host/0/2")["pid"] != pid
    assert second != first and is_running(pid)
    wait_for("both", lambda: len(bench.events("standby.booted")) == 2)


def test_two_shims_never_get_the_same_standby(bench: Bench) -> None:
    """The second one runs the command itself."""
    bench.ready(WAITS)
    for name in ("host/0/1", "host/0/2", "host/0/3"):
        bench.take(name)
    facts = [bench.here(name) for name in ("host/0/1", "host/0/2", "host/0/3")]
    assert len({fact["pid"] for fact in facts}) == 3
    assert sum(fact["was"] for fact in facts) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_the_worker(bench: Bench, number: signal.Signals) -> None:
    bench.ready(WAITS.replace("signal.SIGTERM", str(int(number))))
    worker = bench.take()
    wait_for("the worker", (bench.folder / "waits").exists)
    worker.send_signal(number)
    assert worker.wait(DEADLINE_S) == 75


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_the_shim_ends_by_the_signal_that_ended_the_worker(bench: Bench,
                                                           number: signal.Signals) -> None:
    """[2] What it has left behind ends with it."""
    bench.ready("import resource, subprocess\nchild = subprocess.Popen(['sleep', '600'])\n"
                "open('child', 'w').write(str(child.pid))\n"
                "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
                f"os.kill(os.getpid(), {int(number)})")
    assert bench.take().wait(DEADLINE_S) == -number
    child = int((bench.folder / "child").read_text())
    wait_for("the child's end", lambda: not is_running(child))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_worker_dies_with_its_shim(bench: Bench, is_frozen: bool) -> None:
    """[2] A stopped process runs no thread of its own that could notice."""
    bench.ready(WAITS)
    worker = bench.take()
    pid = bench.here()["pid"]
    if is_frozen:
        os.kill(pid, signal.SIGSTOP)
    worker.kill()
    wait_for("the worker's end", lambda: not is_running(pid))


def test_the_worker_and_its_shim_die_with_the_monitor(bench: Bench) -> None:
    """[2] Nobody else does: the other worker's monitor is another process."""
    bench.ready(WAITS, slots=2)
    first, second = bench.take("host/0/1"), bench.take("host/1/2")
    facts = [bench.here(name) for name in ("host/0/1", "host/1/2")]
    assert all(fact["was"] for fact in facts)
    pids = [fact["pid"] for fact in facts]
    os.kill(parent_of(pids[0]), signal.SIGKILL)
    assert first.wait(DEADLINE_S) == -signal.SIGKILL
    wait_for("the worker's end", lambda: not is_running(pids[0]))
    assert is_running(pids[1]) and second.poll() is None


def test_a_worker_behind_a_script_is_one_as_any_other(bench: Bench) -> None:
    """[2, 3] What the script sets stays set; a signal ends both; the worker dies with its killed
    monitor though its parent is the script.
    """
    bench.behind_a_script()
    bench.write(
        "open(facts['name'][0], 'w').write(os.environ['OF_SCRIPT'] + os.environ['PATH'])\n" + WAITS)
    bench.serve()
    monitor = bench.monitor()
    worker = bench.take("a/0/1", PATH=os.environ["PATH"] + ":/of/driver")
    pid = bench.here("a/0/1")["pid"]
    script = parent_of(pid)
    assert parent_of(script) == monitor
    wait_for("its variables", lambda:
             (bench.folder / "a").exists() and (bench.folder / "a").read_text())
    assert (bench.folder / "a").read_text() == f"set/of/script:{os.environ['PATH']}"
    os.kill(pid, signal.SIGSTOP)
    os.kill(monitor, signal.SIGKILL)
    assert worker.wait(DEADLINE_S) == -signal.SIGKILL
    wait_for("the end of both", lambda: not is_running(pid) and not is_running(script))


@pytest.mark.parametrize(("line", "logged", "printed"), [
    ("PYTHON job.py > log 2> errors", b"imported\nout\n", b"before\nafter\n"),
    ("PYTHON job.py | tee log", b"imported\nout\n", b"before\nimported\nout\nafter\n")])
def test_a_scripts_output_goes_where_it_sends_it(bench: Bench, line: str, logged: bytes,
                                                 printed: bytes) -> None:
    """[3] Its redirections hold for a standby as for any worker, and what it prints itself is
    printed, also meanwhile."""
    bench.behind_a_script()
    (bench.folder / "job.sh"
     ).write_text(f"echo before\n{line.replace('PYTHON', sys.executable)}\necho after\nexit 7\n")
    service = bench.ready("while not os.path.exists('go'): time.sleep(0.05)")
    worker, heard = bench.take(), b""
    assert worker.stdout and bench.here()["was"]
    service.kill()  # its next standby would begin the same log again
    service.wait()
    os.set_blocking(worker.stdout.fileno(), False)

    def has_said_so_far() -> bool:
        nonlocal heard
        heard += worker.stdout.read() or b""  # type: ignore[union-attr]
        return heard == printed.removesuffix(b"after\n")

    wait_for("its words", has_said_so_far)
    (bench.folder / "go").touch()
    os.set_blocking(worker.stdout.fileno(), True)
    rest, err = worker.communicate(timeout=DEADLINE_S)
    assert (worker.returncode, heard + rest, (bench.folder / "log").read_bytes()) == (7, printed,
                                                                                      logged)
    assert err == (b"err\n" if "tee" in line else b"")


def test_a_script_that_boots_dies_with_its_monitor(bench: Bench) -> None:
    """[2] It was stopped, perhaps, and nobody would ever let it go on."""
    bench.behind_a_script()
    bench.write(
        boot="open('new', 'w').write(str(os.getpid())); os.rename('new', 'boots'); time.sleep(600)")
    bench.serve()
    wait_for("process", (bench.folder / "boots").exists)
    pid = int((bench.folder / "boots").read_text())
    os.kill(parent_of(parent_of(pid)), signal.SIGKILL)
    wait_for("its end", lambda: not is_running(pid))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_only_those_that_wait_die_with_the_service(bench: Bench, number: signal.Signals) -> None:
    """[2] A worker has nothing to do with it any more."""
    service = bench.ready(WAITS, slots=2)
    worker = bench.take()
    pid = bench.here()["pid"]
    wait_for("the worker", (bench.folder / "waits").exists)
    [left] = [int(path.stem.rpartition("-")[2]) for path in bench.booted()]
    service.send_signal(number)
    service.wait(DEADLINE_S)
    wait_for("the monitor's end", lambda: not is_running(left))
    assert not list(bench.sockets.glob("*.sock"))
    assert is_running(pid)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(DEADLINE_S) == 75


# --- no standby -----------------------------------------------------------------------------------


def test_another_command_gets_none(bench: Bench) -> None:
    """[1] Not even one more word."""
    bench.ready()
    assert bench.take(command=[*bench.command, "more"]).wait(DEADLINE_S) == 0
    assert not bench.here()["was"]


def test_a_variable_that_the_script_may_have_read_is_named(bench: Bench) -> None:
    """[1] The standby stays for whoever it fits."""
    bench.ready()
    worker = bench.take("host/0/1", DATA="/a/folder")
    _, err = worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == 0 and b"DATA" in err and b"/a/folder" not in err
    assert not bench.here("host/0/1")["was"]
    assert bench.take("host/0/2").wait(DEADLINE_S) == 0
    assert bench.here("host/0/2")["was"]


@pytest.mark.parametrize("changed", ["job.py", "part.py", "job.sh"])
def test_a_standby_of_an_older_text_gets_no_place(bench: Bench, changed: str) -> None:
    """[1] Its worker would train with another code than the others. The file is named, to the
    person and in the event log."""
    bench.behind_a_script()
    (bench.folder / "part.py").touch()
    bench.ready(boot="sys.path.insert(0, '.'); import part")
    (bench.folder / "new").write_text((bench.folder / changed).read_text())
    (bench.folder / "new").rename(bench.folder / changed)
    _, err = bench.take("host/0/1").communicate(timeout=DEADLINE_S)
    assert changed in err.decode() and not bench.here("host/0/1")["was"]
    assert changed in wait_for("failure", lambda: bench.events("standby.failed"))[0]["reason"]


def test_a_file_that_was_written_while_it_booted_is_a_changed_one() -> None:
    """But for those that a compiler has written elsewhere: they would be new in each standby."""
    loaded = {
        "/my/old": (1, 5), "/my/new": (2, 20), "/my/other": (3, 5), "/my/gone": (4, 5),
        "/tmp/compiled": (5, 20)}
    now = loaded | {"/my/other": (9, 5), "/my/gone": (0, 0)}
    assert changed_files(loaded, now, 10, roots=("/my", )) == ["/my/new", "/my/other", "/my/gone"]


def test_a_standby_does_not_begin_before_its_shim_confirms_that_it_waits(bench: Bench) -> None:
    """[6] A shim that had no answer in time has become the worker itself by now."""
    bench.write()
    bench.serve()
    [path] = bench.booted()
    place = write_environment(bench.env | {"ELASTIC_TRAINER_WORKER": "host/0/1"})
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asks:
        asks.connect(str(path))
        socket.send_fds(asks, [b"take"], [place, 1, 1, 1])
        os.close(place)
        assert asks.recv(64) == b"taken"
        asks.settimeout(0.5)
        with pytest.raises(TimeoutError):
            asks.recv(64)
        assert not list(bench.folder.glob("here-*"))
        asks.settimeout(DEADLINE_S)
        asks.send(b"mine")
        assert asks.recv(64) == b"ended 0"
    assert bench.here()["was"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_no_place_is_handed_to_another_users_process(bench: Bench) -> None:
    """Whoever could put a socket there: it gets no environment, with the run's key in it."""
    bench.write()
    path = bench.sockets / f"{shim.command_name(bench.command, str(bench.folder))}-1.sock"
    listen = ("import os, socket, sys\ns = socket.socket(socket.AF_UNIX, "
              "socket.SOCK_SEQPACKET)\ns.bind(sys.argv[1])\n"
              "os.seteuid(65534)\ns.listen()\nprint('listens', "
              "flush=True)\nprint(s.accept()[0].recv(64), flush=True)")
    client = subprocess.Popen([sys.executable, "-c", listen, path], stdout=subprocess.PIPE)
    bench.started.append(client)
    assert client.stdout and client.stdout.readline() == b"listens\n"
    worker = bench.take()
    _, err = worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == 0 and b"65534" in err and not bench.here()["was"]
    assert client.stdout.readline() == b"b''\n"


def test_the_command_runs_when_the_standby_is_frozen(bench: Bench) -> None:
    """It does not answer when its place comes: it is killed, and said to have failed."""
    bench.write("while True: time.sleep(0.05)", boot="open('boots', 'w').write(str(os.getpid()))")
    bench.serve()
    monitor = bench.monitor()
    pid = int((bench.folder / "boots").read_text())
    os.kill(pid, signal.SIGSTOP)
    bench.take()
    assert not bench.here()["was"]
    wait_for("the monitor's end", lambda: not is_running(monitor) and not is_running(pid))
    wait_for("its failure", lambda: bench.events("standby.failed"))


def test_the_command_runs_when_the_monitor_is_frozen(bench: Bench) -> None:
    """And when it thaws it gives nothing to a shim that has gone."""
    bench.write(WAITS)
    bench.serve()
    monitor = bench.monitor()
    os.kill(monitor, signal.SIGSTOP)
    worker = bench.take()
    facts = bench.here()
    assert not facts["was"]
    os.kill(monitor, signal.SIGCONT)
    wait_for("the monitor's end", lambda: not is_running(monitor))
    assert is_running(facts["pid"]) and worker.pid == facts["pid"]


def test_the_command_runs_when_the_socket_is_a_dead_monitors(bench: Bench) -> None:
    bench.write()
    name = f"{shim.command_name(bench.command, str(bench.folder))}-1234567.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(bench.sockets / name))
    assert bench.take().wait(DEADLINE_S) == 0
    assert not bench.here()["was"] and not (bench.sockets / name).exists()


def test_nothing_is_taken_from_a_folder_that_others_can_enter(bench: Bench) -> None:
    bench.ready()
    bench.sockets.chmod(0o755)
    worker = bench.take()
    _, err = worker.communicate(timeout=DEADLINE_S)
    assert b"chmod 700" in err and not bench.here()["was"]


def test_the_driver_sees_127_when_there_is_no_such_command(bench: Bench) -> None:
    assert bench.take(command=["no-such-command"]).wait(DEADLINE_S) == 127


def test_a_failed_boot_is_logged_with_its_last_output_and_tried_again(bench: Bench) -> None:
    """Later, and later each time."""
    bench.ready(
        boot="if not os.path.exists('again'): open('again', 'w'); raise SystemExit('no data')")
    [failed] = bench.events("standby.failed")
    assert failed["state"] == "booting" and "no data" in failed["reason"]
    assert b"no data" in (bench.folder / "service.log").read_bytes()


def test_a_boot_that_hangs_is_ended(bench: Bench) -> None:
    bench.write(boot="open('boots', 'w').write(str(os.getpid())); time.sleep(600)")
    bench.serve(ELASTIC_TRAINER_LIMITS="boot_s=1")
    assert "boot_s" in wait_for("failure", lambda: bench.events("standby.failed"))[0]["reason"]
    assert not is_running(int((bench.folder / "boots").read_text()))


def test_nothing_boots_before_the_training_begins(bench: Bench) -> None:
    """An older attempt's steps do not count."""
    diary = bench.folder / "events.jsonl"
    diary.write_text('{"event": "worker.step_committed"}\n')
    command = [
        sys.executable, "-c", "import sys; from pathlib import Path\n"
        "from elastic_trainer.driver import standby_pool as standby\n"
        "def later(seconds):\n"
        "    print('waits', flush=True); sys.stdin.readline()\n"
        "standby.time.sleep = later\n"
        "standby.wait_until_training(standby.Reader.at_end(Path('.')))"]
    waits = subprocess.Popen(command, cwd=bench.folder, env=bench.env, stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE)
    bench.started.append(waits)
    assert waits.stdin and waits.stdout and waits.stdout.readline() == b"waits\n"
    with open(diary, "a") as file:
        file.write('{"event": "worker.step_committed"}\n')
    waits.stdin.close()
    assert waits.wait(DEADLINE_S) == 0


def services() -> list[int]:
    """Return the services that this process has started."""
    pids = [
        int(pid) for children in Path("/proc/self/task").glob("*/children")
        for pid in children.read_text().split()]
    return [
        pid for pid in pids
        if is_running(pid) and b"--once-training" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_the_service_of_a_local_run_is_started_again_when_it_is_killed(tmp_path: Path) -> None:
    """Later each time; it ends with the run, and is not started again then."""
    with local_standbys(tmp_path, ["sleep", "1000"], 1):
        first = wait_for("service", services)
        wait_for("diary", (tmp_path / "events.jsonl").exists)
        os.kill(first[0], signal.SIGKILL)
        second = wait_for("service", lambda: [pid for pid in services() if pid not in first])
        [told] = [e for e in read_events(tmp_path) if e["event"] == "standby.service_ended"]
        assert told["exit_code"] == -signal.SIGKILL
    assert not is_running(second[0]) and not services()


# --- in a real cluster ----------------------------------------------------------------------------


def test_a_standby_replaces_a_killed_worker_and_is_evicted_when_it_freezes(
        tmp_path: Path, twin_of: Twin) -> None:
    """The same bits as undisturbed, no second victim; frozen behind its shim it is gone as any
    other."""
    with Cluster(tmp_path, job=JOB_STEPS, options=["--standby", "1"]) as cluster:
        cluster.wait_for("a standby", lambda: cluster.events("standby.booted"))
        killed = cluster.signal_worker("127.0.0.3", signal.SIGKILL)
        cluster.wait_for_world(4, after=1)  # it may be there before the others begin without it
        [stood_by] = cluster.events("worker.stood_by")
        assert stood_by["worker"].startswith("127.0.0.3/")
        # Started by the driver, and by the service of standbys.
        for pid in cluster.live_pids().values():
            assert b"MALLOC_ARENA_MAX=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        frozen = cluster.signal_worker("127.0.0.3", signal.SIGSTOP)
        cluster.wait_for("eviction", lambda: cluster.events("driver.worker_evicted"))
        wait_for("the frozen worker's end", lambda: not is_running(frozen))
        (tmp_path / "hurry").touch()
        assert cluster.wait() == 0
        cluster.assert_nothing_lost(twin_of(*JOB_STEPS), victims=2)
        gone = [(e["pid"], e["reason"]) for e in cluster.lost()]
    assert gone == [(killed, "crashed"), (frozen, "frozen")]


def test_a_standby_on_a_far_host_is_taken_over_ssh(tmp_path: Path, twin_of: Twin) -> None:
    """[1, 2] As deploy/hosts starts it: a host is cut from its power, another one takes its place
    at once; then its ssh dies, its worker with it, and the next standby goes on there. What it
    prints and how it ends arrives as from others.
    """
    try:
        netlab.prepare()
    except s3_servers.Unavailable as error:
        pytest.skip(str(error))
    with netlab.Lab(tmp_path / "lab", has_agents=False) as lab:
        lab.boot(netlab.COORDINATOR, "h1", "h2", "h3", "h4", "h5")
        fleet = netlab.Fleet(lab, tmp_path, ["h1", "h2", "h3", "h4", "h5"], start_with=4,
                             job=JOB_STEPS)
        fleet.prepare_standbys()
        with fleet:
            generation = fleet.wait_for_world(4)
            fleet.stand_by("h5")
            first = fleet.wait_for("standby", lambda: fleet.standbys("h5"))
            lab.power_cut("h3")
            fleet.set_hosts(["h1", "h2", "h4", "h5"])
            generation = fleet.wait_for_world(4, after=generation)
            fleet.wait_for("successor", lambda: fleet.standbys("h5") not in ("", first))
            started = next(e for e in fleet.events("driver.worker_started") if e["host"] == "h5")
            pid = next(e["pid"] for e in fleet.events("driver.worker_ready")
                       if e["worker"] == started["worker"])
            lab.inside(netlab.COORDINATOR, "kill", "-KILL", str(started["pid"]))
            fleet.wait_for(
                "end of its worker",
                lambda: not lab.inside("h5", "sh", "-c", f"[ ! -e /proc/{pid} ] || echo there"))
            fleet.wait_for_world(4, after=generation)
            assert fleet.finish() == 0
            fleet.assert_nothing_lost(twin_of(*JOB_STEPS), victims=2)
            stood_by = [e["worker"].split("/")[0] for e in fleet.events("worker.stood_by")]
            assert stood_by == ["h5", "h5"]
            assert "[h5]<stdout>: weights " in (fleet.folder / "output.log").read_text()
            assert [
                e["exit_code"] for e in fleet.events("driver.worker_gone") if e["host"] == "h5"
            ][1:] == [0]
