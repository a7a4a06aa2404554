"""Hosts on one machine: namespaces with an sshd each, on a bridge; what happens to them is what
happens to real ones. Each has an agent too, called as its unit in deploy/hosts calls it, and a
metadata service; the coordinator has neither.

    with Lab(folder) as lab:
        lab.boot("h1"); lab.boot("h2")
        lab.unplug("h2")            packets are dropped both ways, nobody is told
        lab.power_cut("h2")         so that not even a FIN gets out
        lab.cut("h1", "h2")         only these two do not hear each other
        lab.health("h1")            what its agent answers
        lab.metadata["h1"].announce()

What always holds:
1. Nothing has a name outside: every namespace lives as long as its first process, and every first
   process is killed by the kernel when the test's process dies, however it dies. So there are no
   stale labs, and labs don't see each other.
2. Nobody's ssh, /etc/hosts or shell start-up files are touched: the lab's are mounted over them, in
   the lab only.
3. No two hosts' interfaces have the same name: driver and workers find each their own (reach.py).
   Stock Horovod, which gives one name to all, has to ask for a lab where they have (`interface`).

It needs root, `ip`, and sshd, which it installs where apt-get can.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from string import Template
from typing import Any

import s3_servers
from cluster import Cluster
from faulty_proxy import FaultyProxy
from metadata_server import MetadataServer
from packages import install
from s3_servers import Unavailable
from terraform import HOSTS
from waiting import wait_for

from elastic_trainer.discovery.client import AgentUnreachable, ask, read_key
from elastic_trainer.discovery.commands import AGENT_PORT
from elastic_trainer.discovery.hosts import Health
from elastic_trainer.driver import standby_shim as shim

COORDINATOR = "coordinator"
NETWORK = "172.31"
METADATA = "169.254.169.254"
NOWHERE = "02:00:00:00:00:01"
CLONE_NEWNET = 0x40000000
UNSHARE = ("unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child=KILL")
SITE = '''"""Gives a host of the lab a wrong clock: the seconds in its own file /run/clock-off."""
import os, time
if os.path.exists("/run/clock-off"):
    _real, _off = time.time, float(open("/run/clock-off").read())
    time.time = lambda: _real() + _off
'''
INIT = r'''
hostname "$1"; lab=$2
mount --make-rprivate / && mount -t proc proc /proc && mount -t tmpfs tmpfs /run
mkdir -p /run/sshd /run/disk
mount --bind "$lab/hosts" /etc/hosts && mount --bind "$lab/ssh/config" /etc/ssh/ssh_config
mount --bind "$lab/ssh/shadow" /etc/shadow
mount -t tmpfs -o size=4m tmpfs /run/disk
[ -z "$3" ] || mount -t tmpfs -o size=4m tmpfs "$3"
for file in ~/.bashrc ~/.bash_profile ~/.profile; do
    [ -f $file ] && mount --bind "$lab/empty" $file
done
ulimit -n 20000
echo booted; read -r plugged
[ "$4" = ssh ] || { sleep infinity & wait; }   # which reaps orphans, as an init does
exec "$(command -v sshd || echo /usr/sbin/sshd)" -D -e -f "$lab/ssh/sshd_config" -o PidFile=none
'''


def prepare() -> None:
    """Install what is missing. Raises Unavailable."""
    if os.geteuid() != 0:
        raise Unavailable(
            "the lab of hosts needs root (network namespaces): run the tests as root, as CI does")
    missing = [program for program in ("ip", "unshare", "nsenter", "setpriv", "mount")
               if not shutil.which(program)]
    if missing:
        raise Unavailable(
            f"the lab of hosts needs {', '.join(missing)}: apt-get install iproute2 util-linux "
            f"mount"
        )
    if not sshd():
        install("openssh-server")  # and the machine itself gets no ssh
    if not sshd():
        raise Unavailable(
            "the lab of hosts needs sshd, and it could not be installed: apt-get install "
            "openssh-server"
        )
    probe = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True)
    if probe.returncode:
        raise Unavailable(
            f"the lab of hosts needs namespaces, and this machine gives none: "
            f"{probe.stderr.strip()}"
        )


def sshd() -> str | None:
    """Return the path of sshd."""
    return shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def command_of(unit: str, settings: Mapping[str, str], folder: Path) -> list[str | Path]:
    """Return what a unit of deploy/hosts runs, with a folder and a python of ours in place of the
    machines' own."""
    text = (HOSTS / f"{unit}.service").read_text().replace("\\\n", " ")
    (line,) = re.findall("^ExecStart=(.*)$", text, re.M)
    for there, here in (("/opt/elastic-trainer/.venv/bin/python", sys.executable),
                        ("/etc/elastic-trainer", folder), ("/var/lib/elastic-trainer", folder)):
        line = line.replace(there, str(here))
    return [Template(word).substitute(settings) for word in line.split()]


def dying_with_us(*command: str | Path) -> list[str]:
    """Return the command, changed so that the kernel kills it when this process dies."""
    return ["setpriv", "--pdeathsig", "KILL", *map(str, command)]


class Lab:
    """A bridge and its hosts; use as a context manager. The coordinator is a host as the others
    are."""

    def __init__(self, folder: Path, interface: str = "", has_agents: bool = True):
        self.folder, self.interface, self.has_agents = folder, interface, has_agents
        self.has_sshd = True
        """False: hosts that boot from now on have none, as pods. Their agents start workers."""
        self.metadata: dict[str, MetadataServer] = {}
        """Each host's own service, which its agent asks."""
        self.cloud: tuple[str, type[MetadataServer]] = ("ec2", MetadataServer)
        """The place of the agents of hosts that boot from now on, and its metadata service."""
        self.clocks: dict[str, float] = {}
        """By how many seconds the clock of a host is wrong that boots from now on."""
        self.addresses: dict[str, str] = {}
        """Of the hosts that somebody else has named and given an address."""
        self.hidden = ""
        """A folder that hosts which boot from now on have of their own, empty and small; not the
        coordinator."""
        self.hosts: dict[str, Host] = {}
        self.ports = 0
        folder.mkdir(parents=True, exist_ok=True)
        self.output = open(folder / "lab.log", "ab")

    def __enter__(self) -> Lab:
        ssh = self.folder / "ssh"
        ssh.mkdir()
        for name in ("hostkey", "id"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", ssh / name],
                           check=True)
        (ssh / "known_hosts").write_text(f"* {(ssh / 'hostkey.pub').read_text()}")
        # A locked root cannot log in.
        (ssh / "shadow").write_text("root:*:19000:0:99999:7:::\nsshd:!:19000::::::\n")
        (ssh / "shadow").chmod(0o600)
        (ssh / "sshd_config").write_text(
            f"HostKey {ssh}/hostkey\nAuthorizedKeysFile {ssh}/id.pub\nPermitRootLogin "
            f"prohibit-password\n"
            f"PasswordAuthentication no\nStrictModes no\nUsePAM no\nUseDNS no\nPrintMotd "
            f"no\nPrintLastLog no\n"
        )
        (ssh / "config").write_text(
            f"User root\nIdentityFile {ssh}/id\nIdentitiesOnly yes\nStrictHostKeyChecking yes\n"
            f"UserKnownHostsFile {ssh}/known_hosts\nGSSAPIAuthentication no\n")
        (self.folder / "empty").touch()
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n")
        (self.folder / "agent.key").touch(mode=0o600)
        (self.folder / "agent.key").write_text(secrets.token_hex(32))
        site = self.folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(SITE)
        self.switch = subprocess.Popen(dying_with_us("unshare", "--net", "sleep", "infinity"),
                                       start_new_session=True)
        wait_for(
            "switch", lambda: os.readlink(f"/proc/{self.switch.pid}/ns/net") != os.readlink(
                "/proc/self/ns/net"))
        self._ip("link", "add", "bridge", "up", "type", "bridge")
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts.values():
            host.end()
        self.switch.kill()
        self.switch.wait()
        self.output.close()

    def address(self, name: str) -> str:
        """Return a host's address: the one that it was given; else h7 has ….0.7, and the
        coordinator ….0.254."""
        return self.addresses.get(
            name) or f"{NETWORK}.0.{254 if name == COORDINATOR else int(name[1:])}"

    def boot(self, *names: str) -> None:
        """Start hosts, all at once, and wait until ssh on them answers; their agents may take a
        little longer."""
        for name in names:
            assert name not in self.hosts or not self.hosts[name].is_up(), f"{name} is up"
            self.hosts[name] = Host(self, name)
        lines = ["127.0.0.1 localhost", *(f"{self.address(name)} {name}" for name in self.hosts)]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")  # the same inode: it is mounted
        for name in names:
            self.hosts[name].plug_in()
            if name in self.clocks:
                self.inside(name, "sh", "-c", f"echo {self.clocks[name]} > /run/clock-off")
            if self.has_agents and name != COORDINATOR:
                self.hosts[name].start_agent()
        for name in names:
            if self.has_sshd:
                self.hosts[name].wait_for_ssh()
            elif name != COORDINATOR and self.has_agents:
                wait_for(f"the agent of {name}", lambda name=name: self._is_ready(name))

    def power_cut(self, *names: str) -> None:
        """End hosts between two instructions: not even a FIN gets out."""
        self.unplug(*names)
        for name in names:
            self.hosts[name].end()

    def unplug(self, *names: str) -> None:
        """Take hosts off the bridge at once: their packets and those for them are dropped, and
        nobody is told."""
        self._ip("-batch", "-", given="".join(f"link set {self.hosts[name].port} nomaster\n"
                                              for name in names))

    def plug_in(self, name: str) -> None:
        """Undo `unplug`."""
        self._ip("link", "set", self.hosts[name].port, "master", "bridge")

    def cut(self, one: str, other: str) -> None:
        """Drop, silently, what two hosts send to each other, and nothing else: both know a wrong
        hardware address."""
        for here, there in ((one, other), (other, one)):
            self.inside(here, "ip", "neigh", "replace", self.address(there), "lladdr", NOWHERE,
                        "dev", self.hosts[here].interface, "nud", "permanent")

    def mend(self, one: str, other: str) -> None:
        """Undo `cut`."""
        for here, there in ((one, other), (other, one)):
            self.inside(here, "ip", "neigh", "del", self.address(there), "dev",
                        self.hosts[here].interface)

    def slow(self, name: str, kbit: int) -> None:
        """Give a host a slow line, for what it sends and for what is sent to it; or end that with
        0."""
        host = self.hosts[name]
        pace = ("tbf", "rate", f"{kbit}kbit", "burst", "16kb", "latency", "400ms") if kbit else ()
        for there, device in ((host.enter(), host.interface), (self._enter_switch(), host.port)):
            subprocess.run([*there, "tc", "qdisc", "replace" if kbit else "del", "dev",
                            device, "root", *pace], check=True, capture_output=True)

    def sent_bytes(self, name: str) -> int:
        """Return how many bytes the interface of a host has sent."""
        lines = self.inside(name, "cat", "/proc/net/dev").splitlines()
        (line,) = [line for line in lines if f"{self.hosts[name].interface}:" in line]
        return int(line.partition(":")[2].split()[8])

    def fill(self, name: str, folder: str | Path) -> None:
        """Fill a disk of a host's own: with a file named full, which may be removed."""
        self.inside(name, "sh", "-c", f"cat /dev/zero > {folder}/full; true")

    def inside(self, name: str, *command: str) -> str:
        """Run a command on a host to its end; returns what it printed."""
        done = subprocess.run([*self.hosts[name].enter(), *command], capture_output=True,
                              text=True, timeout=300)
        assert done.returncode == 0, f"{name}: {command}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, name: str, command: Sequence[str | Path],
              **popen: Any) -> subprocess.Popen[bytes]:
        """Start a command on a host; it ends with the host, or with us."""
        said = {"stdout": self.output, "stderr": self.output, "start_new_session": True} | popen
        return subprocess.Popen([*self.hosts[name].enter(), *map(str, command)], **said)

    def python_path(self) -> str:
        """Return where Python looks first on a host: for what makes a clock wrong."""
        return os.pathsep.join(filter(None, [str(self.folder / "site"),
                                             os.environ.get("PYTHONPATH")]))

    def health(self, name: str) -> Health:
        """Return what a host's agent answers its poller. Raises AgentUnreachable."""
        with self.network_of(COORDINATOR):
            return ask(f"{self.address(name)}:{AGENT_PORT}", read_key(self.folder / "agent.key"),
                       5.0)

    def _is_ready(self, name: str) -> bool:
        with suppress(AgentUnreachable):
            return self.health(name).state == "ready"
        return False

    @contextmanager
    def network_of(self, name: str) -> Iterator[None]:
        """Let this thread open its sockets on a host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as ours, open(
                f"/proc/{self.hosts[name].pid}/ns/net") as theirs:
            assert libc.setns(theirs.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                assert libc.setns(ours.fileno(), CLONE_NEWNET) == 0

    def _enter_switch(self) -> list[str]:
        return ["nsenter", "-t", str(self.switch.pid), "-n"]

    def _ip(self, *arguments: str, given: str = "") -> None:
        subprocess.run([*self._enter_switch(), "ip", *arguments], input=given.encode(),
                       check=True, capture_output=True)


class Host:
    """One host: its first process, and the port of the bridge that it is plugged into."""

    def __init__(self, lab: Lab, name: str):
        self.lab, self.name = lab, name
        lab.ports += 1
        self.port = f"port{lab.ports}"
        self.interface = lab.interface or f"lab{lab.ports}"
        self.process = subprocess.Popen(dying_with_us(*UNSHARE, "sh", "-c", INIT, "init", name,
                                                      lab.folder, "" if name == COORDINATOR
                                                      else lab.hidden,
                                                      "ssh" if lab.has_sshd else ""),
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=lab.output, start_new_session=True)
        self.pid = 0
        self.agent: subprocess.Popen[bytes] | None = None
        self.metadata: MetadataServer | None = None

    def is_up(self) -> bool:
        """True while its first process runs."""
        return self.process.poll() is None

    def plug_in(self) -> None:
        """Give it its interface, and let its sshd start."""
        assert self.process.stdout and self.process.stdin
        assert self.process.stdout.readline(
        ) == b"booted\n", f"{self.name} does not boot; see {self.lab.folder}/lab.log"
        unshare = self.process.pid
        self.pid = int(Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()[0])
        self.lab._ip("link", "add", self.port, "type", "veth", "peer", "name", self.interface,
                     "netns", str(self.pid))
        self.lab._ip("link", "set", self.port, "master", "bridge", "up")
        address = self.lab.address(self.name)
        batch = (
            f"link set lo up\naddr add {METADATA}/32 dev lo\naddr add {address}/16 dev "
            f"{self.interface}\n"
            f"link set {self.interface} up\n")
        subprocess.run([*self.enter(), "ip", "-batch", "-"], input=batch, text=True,
                       check=True, capture_output=True)
        self.process.stdin.write(b"plugged\n")
        self.process.stdin.flush()

    def start_agent(self) -> None:
        """Start its metadata service, if none runs, and its agent, which watches a small disk of
        the host's own."""
        lab, name = self.lab, self.name
        if self.metadata is None:
            with lab.network_of(name):
                self.metadata = lab.metadata[name] = lab.cloud[1]((METADATA, 80))
            self.metadata.__enter__()
        command = command_of("elastic-agent", {"ADDRESS": lab.address(name)}, lab.folder)
        starts = [] if lab.has_sshd else ["--starts-workers"]
        self.agent = lab.start(name, [*command, "--folder", "/run/disk", "--place", lab.cloud[0],
                                      *starts],
                               env=os.environ | {"PYTHONPATH": lab.python_path()})

    def wait_for_ssh(self) -> None:
        """Wait until its sshd accepts."""
        def answers() -> bool:
            with self.lab.network_of(self.name), socket.socket() as probe:
                return probe.connect_ex((self.lab.address(self.name), 22)) == 0

        wait_for(f"ssh on {self.name}", answers)

    def enter(self) -> list[str]:
        """Return the beginning of a command line that runs on this host."""
        assert self.pid and self.is_up(), f"{self.name} is down"
        return dying_with_us("nsenter", "-t", str(self.pid), "-n", "-p", "-m", "-u", "-i",
                             f"--wd={os.getcwd()}", "--")

    def end(self) -> None:
        """Kill it, and wait until it is gone: its interface goes with it."""
        if self.pid and self.is_up():
            os.kill(self.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        if self.agent:
            self.agent.wait()
        if self.metadata:
            self.metadata.__exit__()
            self.metadata = None


# --- unauthenticated clients ----------------------------------------------------------------------

RUBBISH = b"\x16\x03\x01" + bytes(range(256)) + b"\r\n\r\n"


class Pickled:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def overheard(lab: Lab, name: str, beginning: bytes) -> bytes:
    """Return what somebody says to a host, as it arrives there: the next whole request that begins
    so."""
    with lab.network_of(name):
        tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
    streams: dict[bytes, bytes] = {}
    with tap:
        tap.bind((lab.hosts[name].interface, 0x0800))
        tap.settimeout(20.0)
        while True:
            frame = tap.recv(65536)
            header = 4 * (frame[14] & 15)
            tcp = frame[14 + header : 14 + int.from_bytes(frame[16:18], "big")]
            if frame[23] != socket.IPPROTO_TCP or frame[14 + 16:14 + 20] != socket.inet_aton(
                    lab.address(name)):
                continue
            source, payload = frame[26:30] + tcp[:2], tcp[4 * (tcp[12] >> 4) :]
            streams[source] = payload if payload.startswith(beginning) else streams.get(
                source, b"") + payload
            head, end, body = streams[source].partition(b"\r\n\r\n")
            length = re.search(rb"Content-Length: (\d+)", head)
            if head.startswith(beginning) and end and len(body) == (int(length[1])
                                                                    if length else 0):
                return streams[source]


def knock(lab: Lab, stranger: str, name: str, port: int, words: Sequence[bytes]) -> int:
    """Say words to a port of a host: what it answers must be no consent. Returns how often it
    listened."""
    knocked = 0
    with lab.network_of(stranger):
        for word in words:
            with suppress(OSError), socket.create_connection((lab.address(name), port),
                                                             5.0) as connection:
                knocked += 1
                connection.sendall(word)
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(1.0)
                answer = connection.recv(65536)
                assert b" 200 " not in answer, (name, port, word, answer)
    return knocked


@contextmanager
def store_on(lab: Lab, name: str, folder: Path) -> Iterator[dict[str, str]]:
    """Let hosts reach an S3 server at a host's address; returns the variables that lead there.
    Raises Unavailable."""
    with s3_servers.ministack(folder) as endpoint:
        with lab.network_of(name):
            proxy = FaultyProxy(endpoint, lab.address(name))
        with proxy:
            yield s3_servers.environment(proxy.endpoint)


class Fleet(Cluster):
    """A run whose coordinator and workers are hosts of a lab. With `own_disks` hosts that boot
    later see no runs of it."""

    def __init__(self, lab: Lab, folder: Path, names: Sequence[str] = (),
                 own_disks: bool = False, limits: str = "", **options: Any):
        self.lab = lab
        # Ssh has limits of its own, just above ours.
        super().__init__(folder, names=names, limits=limits, forks=False, **options)
        (folder / "runs").mkdir(exist_ok=True)
        lab.hidden = str(folder / "runs") if own_disks else ""
        self.env |= {"PYTHONPATH": lab.python_path()}

    def start(self) -> None:
        """Start the run on the coordinator, or resume it."""
        self.process = self.lab.start(COORDINATOR, self.command, env=self.env, cwd=self.folder,
                                      stdout=open(self.folder / "output.log", "ab"),
                                      stderr=subprocess.STDOUT)

    def prepare_standbys(self) -> None:
        """Let the run's workers take standbys of their hosts (`stand_by`). Before the start."""
        alike = ("HOME", "PATH", "PYTHONPATH", "ELASTIC_TEST_PLAN", "ELASTIC_TEST_FOLDER")
        # Each host's own.
        self.env = {name: self.env[name]
                    for name in alike} | {shim.FOLDER_VARIABLE: "/run/standbys"}
        # By PATH, in which horovodrun_elastic.sh puts its own folder in front.
        self.command[self.command.index("--") + 1] = "python"
        path = f"{Path(sys.executable).parent}:{self.env['PATH']}"
        self.env_there = self.env | {"PATH": path}
        self.env["PATH"] = f"{Path(sys.executable).parent}:{path}"

    def stand_by(self, host: str) -> subprocess.Popen[bytes]:
        """Keep a standby on a host, as deploy/hosts does; returns the service."""
        at = self.command.index("--")
        return self.lab.start(
            host, [sys.executable, "-m", "elastic_trainer", "standby", "--slots", "1",
                   *self.command[at:]], env=self.env_there, cwd=self.folder)

    def standbys(self, host: str) -> str:
        """Return the sockets of the standbys that wait on a host."""
        return self.lab.inside(host, "find", "/run", "-name", "*.sock", "-path", "*/standbys/*")

    def supervisor_pid(self) -> int:
        """Return the supervisor's pid, as seen from outside the lab."""
        assert self.process
        return int(
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            [0])

    def signal_worker(self, host: str, number: int) -> int:
        """Send a signal to the worker on a host; returns its pid there."""
        pid = [e["pid"] for e in self.events("driver.worker_ready")
               if e["worker"].split("/")[0] == host][-1]
        self.lab.inside(host, "kill", f"-{number}", str(pid))
        return int(pid)

    def lost(self) -> list[dict[str, Any]]:
        """Return the workers that were lost; an ssh that did not reach its host is none."""
        return [e for e in super().lost() if e["reason"] != "boot_failed"]

    def evicted(self) -> list[tuple[str, str]]:
        """Return whose workers were given up, by host, and why."""
        return [(e["worker"].split("/")[0], e["reason"])
                for e in self.events("driver.worker_evicted")]

    def newest_step(self) -> int:
        """Return the number of the newest finished step."""
        return int(self.events("worker.step_committed")[-1]["step"])


def sent_gradients(lab: Lab, folder: Path, slots: int, mib: int, steps: int) -> float:
    """Train with a large gradient on two hosts of this many slots; return how many gradients the
    host that sends most has sent in a step, by the counters of its interface."""
    names = ["h1", "h2"]
    lab.boot(COORDINATOR, *names)
    job = [sys.executable, str(Path(__file__).parent / "bench" / "jobs" / "wide.py"), "--mib",
           str(mib), "--microbatches", str(2 * slots), "--steps", str(steps)]
    fleet = Fleet(lab, folder, names * slots, command=job)
    fleet.hosts_file.write_text("".join(f"{name}:{slots}\n" for name in names))
    with fleet:
        assert fleet.wait(600) == 0, fleet.story()
        assert {e["size"] for e in fleet.events("worker.generation_started")} == {2 * slots}
    return max(map(lab.sent_bytes, names)) / steps / (mib << 20)
