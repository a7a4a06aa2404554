"""The far end of an ssh: starts one worker on this host, and sees to its end whatever becomes of the driver.

driver → ssh → here (`python -S remote.py`, words on stdin) → the worker, in a process group of its own
supervisor → ssh → here (`python -S remote.py end RUN_DIR`): waits until that run has no worker here any more

What always holds:
1. The environment comes on stdin: no secret is on a command line, here or there.
2. No worker outlives its driver for long. The word `kill`, or what kills the ssh and is noticed here as the end of stdin
   or as `lost_s` without a word, ends its whole group; the latter two after `grace_s`, in which a worker that is well
   notices by itself that its driver is gone, writes its last checkpoint and leaves.
3. Its exit counts at once, whoever still holds its output: it is a marked line, since sshd waits for the output's end.
4. A run whose coordinator died can be ended here: what it trains on would be a second lineage.

It imports nothing of ours and little else: it runs once for each worker, on a host that boots.
"""

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

EXITED = "\x1eelastic-trainer-exit "
"""Begins the line on stdout that ends with the worker's exit code (negative: a signal's number)."""


SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "ServerAliveInterval=2",
               "-o", "ServerAliveCountMax=3", "-o", "PasswordAuthentication=no",
               "-o", "ControlMaster=no", "-o", "ControlPath=none")  # the end of one must not be the end of others
ORPHANS_S = 20.0
"""How long workers have to notice that their driver is dead, and to write a checkpoint, before they are killed."""


def ssh(host: str, port: int | str | None, identity: str | None, *arguments: str) -> list[str]:
    """Return the command that runs this file on a host (the same paths there as here)."""
    there = shlex.join(["exec", sys.executable, "-S", os.path.abspath(__file__), *arguments])
    key = ["-i", identity] if identity else []
    return ["ssh", *SSH_OPTIONS, *(["-p", str(port)] if port else []), *key, "--", host, there]


class Words:
    """What the driver says, line by line, with a time limit for each (bytes of several lines come together)."""

    def __init__(self, descriptor: int):
        self.descriptor, self.rest = descriptor, b""

    def next(self, limit_s: float) -> bytes:
        """Return the next line; b"" when there is none in time, or none any more."""
        while b"\n" not in self.rest:
            ready, _, _ = select.select([self.descriptor], [], [], limit_s)
            more = os.read(self.descriptor, 1 << 16) if ready else b""
            if not more:
                return b""
            self.rest += more
        line, _, self.rest = self.rest.partition(b"\n")
        return line + b"\n"


def main() -> int:
    """Run one worker; returns what the shell is to see as its exit code."""
    words = Words(sys.stdin.fileno())
    first = words.next(60.0)
    if not first:
        print("elastic-trainer: the driver has hung up before it said what to start", file=sys.stderr)
        return 1
    job = json.loads(first)
    try:
        worker = subprocess.Popen(job["command"], env=job["env"], cwd=job["cwd"], stdin=subprocess.DEVNULL,
                                  start_new_session=True)
    except OSError as error:
        print(f"elastic-trainer: {job['command'][0]} cannot be started in {job['cwd']} on this host: {error}",
              file=sys.stderr)
        return 127
    ended = threading.Event()
    threading.Thread(target=obey, args=(words, worker.pid, ended, job["lost_s"], job["grace_s"]), daemon=True).start()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    end(worker.pid, signal.SIGKILL)  # not yet reaped, so the group's number cannot be another's
    ended.set()
    code = worker.wait()
    with suppress(OSError):  # nobody listens any more
        os.write(1, f"{EXITED}{code}\n".encode())
    return code if code >= 0 else 128 - code


def obey(words: Words, group: int, ended: threading.Event, lost_s: float, grace_s: float) -> None:
    """Do what the driver says until it says no more; then end the worker, unless it has `ended` by itself."""
    while word := words.next(lost_s):
        if word == b"term\n" and not ended.is_set():
            end(group, signal.SIGTERM)
        elif word == b"kill\n":
            break
    else:
        ended.wait(grace_s)
    if not ended.is_set():
        end(group, signal.SIGKILL)


def end(group: int, number: int) -> None:
    """Send a signal to the worker and its children."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def end_run(run_dir: str) -> int:
    """Wait until no worker of a run is left on this host; kill those that stay. Prints how many it had to kill."""
    deadline = time.monotonic() + ORPHANS_S
    while (left := workers_of(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    print(len(left))
    return 0


def workers_of(run_dir: str) -> dict[int, tuple[str, str]]:
    """Return a run's workers on this host, by their environment: pid → attempt and name. Their children count, too."""
    found = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            variables = dict(v.partition("=")[::2] for v in os.fsdecode(file.read()).split("\0"))
            if variables.get("ELASTIC_TRAINER_RUN_DIR") == run_dir and "ELASTIC_TRAINER_WORKER" in variables:
                found[int(pid)] = variables.get("ELASTIC_TRAINER_ATTEMPT", ""), variables["ELASTIC_TRAINER_WORKER"]
    return found


if __name__ == "__main__":
    # A thread that waits for words must not keep us.
    os._exit(end_run(sys.argv[2]) if sys.argv[1:2] == ["end"] else main())
