"""A machine that a real systemd has booted: this machine's own system in namespaces, over a copy of
its disk in memory.

    with Booted(folder) as machine:
        machine.write("/etc/systemd/system/x.service", "…")
        machine.systemctl("start", "x.service")
        machine.read("/var/log/x")

What always holds:
1. Nothing of this machine changes. Writes go to the upper half of an overlay, in memory. The
   kernel's settings (/proc/sys, /sys) are read-only: a booting systemd writes those of
   /usr/lib/sysctl.d, and not all are the namespace's own.
2. It ends with its block, and the kernel kills it when the test's process dies. Only empty cgroups
   can be left then.
3. It has no network but loopback, and no units but systemd's targets, its journal and those that a
   test writes.

It needs root, systemd, overlayfs and a writable cgroup2. With systemd 252 a boot takes about a
second.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from netlab import UNSHARE, dying_with_us
from s3_servers import Unavailable
from waiting import START_S, wait_for

SYSTEMD = Path("/lib/systemd/systemd")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LOST = "-sys_time,-sys_module,-sys_rawio,-sys_boot,-mknod,-audit_control,-mac_admin,-syslog"
"""Capabilities that could reach out of the namespaces."""
TARGET = """[Unit]
Description=a machine of the tests
Requires=basic.target
Wants=systemd-journald.socket systemd-journald.service
After=basic.target
AllowIsolate=yes
"""
INIT = r'''
set -e
lab=$1; devices=$2; shift 2
mount --make-rprivate /
mount -t tmpfs tmpfs "$lab"
mkdir "$lab/upper" "$lab/work" "$lab/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$lab/upper,workdir=$lab/work" "$lab/root"
mount -t tmpfs tmpfs "$lab/root/run"
mount -t tmpfs tmpfs "$lab/root/tmp"; chmod 1777 "$lab/root/tmp"
for path; do                             # what lies on other disks, or where only root can read it
    above=$path
    while [ "$above" != / ]; do
        above=$(dirname "$above"); mkdir -p "$lab/root$above"; chmod a+rx "$lab/root$above"
    done
    mkdir -p "$lab/root$path"; mount --bind "$path" "$lab/root$path"
    mount -o remount,bind,ro "$lab/root$path"
done
cd "$lab/root"
mount -t proc proc proc
mount --bind proc/sys proc/sys; mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys
mount -t tmpfs tmpfs sys/fs; mkdir sys/fs/cgroup; mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs tmpfs dev; mkdir dev/shm dev/pts
for name in $devices; do touch "dev/$name"; mount --bind "/dev/$name" "dev/$name"; done
rm -rf etc/systemd/system/* lib/systemd/system/*.wants lib/systemd/system-generators/*
rm -rf var/log/journal
: >etc/machine-id
printf '%s' "$TARGET" >etc/systemd/system/tests.target
pivot_root . mnt; cd /; umount -l /mnt
echo prepared
exec env -i container=tests PATH=/usr/sbin:/usr/bin:/sbin:/bin setpriv --bounding-set "$LOST" \
    /lib/systemd/systemd --system --unit=tests.target --log-target=console --show-status=no
'''


def cgroup_root() -> Path:
    """Return where cgroup2 is mounted. Raises Unavailable."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2" and "rw" in options.split(","):
            return Path(where)
    raise Unavailable("a booted systemd needs a writable cgroup2, and none is mounted here.")


def prepare() -> None:
    """Raise Unavailable if a systemd cannot be booted here."""
    if os.geteuid() != 0:
        raise Unavailable("a booted systemd needs root: run the tests as root, as CI does")
    if not SYSTEMD.exists():
        raise Unavailable("a booted systemd needs systemd: apt-get install systemd")
    if "overlay" not in Path("/proc/filesystems").read_text():
        raise Unavailable("a booted systemd needs overlayfs, and this kernel has none.")
    wanted = ("unshare", "nsenter", "setpriv", "mount", "pivot_root", "useradd")
    missing = [program for program in wanted if not shutil.which(program)]
    if missing:
        raise Unavailable(
            f"a booted systemd needs {', '.join(missing)}: apt-get install util-linux mount passwd")
    cgroup_root()


class Booted:
    """One machine; use as a context manager. `shown` are folders that it has read-only, at the same
    paths."""

    def __init__(self, folder: Path, shown: Sequence[Path] = ()):
        self.folder = folder
        self.shown = shown
        self.group = cgroup_root() / f"elastic-tests-{os.getpid()}-{time.monotonic_ns()}"
        self.pid = 0

    def __enter__(self) -> Booted:
        self.folder.mkdir()
        self.group.mkdir()
        self.log = open(self.folder.with_suffix(".log"), "ab")
        inside = f'echo $$ >"{self.group}/cgroup.procs" && exec "$@"'
        self.process = subprocess.Popen(dying_with_us("sh", "-c", inside, "sh", *UNSHARE,
                                                      "--cgroup", "sh", "-c", INIT, "init",
                                                      self.folder, " ".join(DEVICES),
                                                      *self.shown), stdin=subprocess.DEVNULL,
                                        stdout=self.log, stderr=self.log,
                                        start_new_session=True,
                                        env=os.environ | {"TARGET": TARGET, "LOST": LOST})
        try:
            self.wait_for("boot", self._is_running)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # the namespaces' first process is killed with it
        self.process.wait()
        deadline = time.monotonic() + START_S
        while "populated 1" in (self.group /
                                "cgroup.events").read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        for path, _, _ in os.walk(self.group, topdown=False):
            with suppress(OSError):
                os.rmdir(path)
        self.log.close()

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command on it as root, to its end."""
        enter = ("nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "-C", "--")
        done = subprocess.run(dying_with_us(*enter, *command), capture_output=True,
                              text=True, timeout=START_S)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done

    def systemctl(self, *arguments: str) -> str:
        """Call systemctl on it; returns what it printed."""
        return self.run("systemctl", "--no-pager", *arguments).stdout.strip()

    def shows(self, unit: str, *names: str) -> list[str]:
        """Return properties of a unit, in the order of their names."""
        lines = self.systemctl("show", unit, f"--property={','.join(names)}").splitlines()
        output = dict(line.partition("=")[::2] for line in lines)
        return [output[name] for name in names]

    def path(self, path: str) -> Path:
        """Return where a file of it is, seen from here."""
        return Path(f"/proc/{self.pid}/root{path}")

    def read(self, path: str) -> str:
        """Return the text of a file of it; empty where there is none."""
        with suppress(FileNotFoundError):
            return self.path(path).read_text()
        return ""

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file of it."""
        there = self.path(path)
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_text(text)
        there.chmod(mode)

    def wait_for(self, what: str, seen: Callable[[], object]) -> None:
        """Wait until `seen()` is true."""
        wait_for(what, seen, story=self.journal)

    def journal(self) -> str:
        """Return the end of its units' and its systemd's logs."""
        output = self.run("journalctl", "--no-pager", "--lines=80",
                        check=False).stdout if self.pid else ""
        return output + self.folder.with_suffix(".log").read_text()[-4000:]

    def _is_running(self) -> bool:
        assert self.process.poll() is None, self.journal()
        if not self.pid:
            with suppress(FileNotFoundError, IndexError):
                unshare = self.process.pid
                pid = int(Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()[0])
                if Path(f"/proc/{pid}/comm").read_text().strip() == "systemd":
                    self.pid = pid
            if not self.pid:
                return False
        return self.run("systemctl", "is-system-running", check=False).stdout.strip() == "running"
