"""The far end of an ssh: starts one worker on this host, and ends it when the driver is gone.

driver → ssh → here (`python -S remote.py`, messages on stdin) → the worker, in a process group
supervisor → ssh → here (`python -S remote.py end RUN_DIR`): waits until that run has no worker here

What always holds:
1. The environment comes on stdin: no secret is on a command line, here or there.
2. A worker ends soon after its driver. The message `kill` ends its whole group at once. The end of
   stdin (the ssh was killed) and `lost_s` without a message end it after `grace_s`. In that time a
   healthy worker notices that its driver is gone, writes its last checkpoint and leaves.
3. The exit is reported at once as a marked line of output. sshd itself waits until every process
   that holds the output has closed it.
4. A run whose coordinator died can be ended here: its workers would train on a second lineage.

It imports the standard library only, and reads /proc by hand: it runs once for each worker, on a
host that boots, and no package may be on its Python's path.
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
STATE = "\x1eelastic-trainer-state "
"""Begins the line on stderr with the state of the worker's process."""
SSH_OPTIONS = (
    "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "ServerAliveInterval=2",
    "-o", "ServerAliveCountMax=3", "-o", "PasswordAuthentication=no",
    "-o", "ControlMaster=no", "-o", "ControlPath=none")  # the end of one ends no other
ORPHANS_S = 20.0
"""The time that workers have to notice that their driver is gone, and to write a checkpoint."""
FIRST_S = 60.0
"""The time that the driver has to send the job."""


def ssh(host: str, port: int | str | None, identity: str | None, *arguments: str) -> list[str]:
    """Return the command that runs this file on a host (the same paths there as here)."""
    program = ["exec", sys.executable, "-S", os.path.abspath(__file__), *arguments]
    options = [*(["-p", str(port)] if port else []), *(["-i", identity] if identity else [])]
    return ["ssh", *SSH_OPTIONS, *options, "--", host, shlex.join(program)]


class Messages:
    """What the driver sends, line by line. Bytes of several lines may come together."""

    def __init__(self, descriptor: int):
        self.descriptor, self.rest = descriptor, b""

    def next(self, limit_s: float) -> bytes:
        """Return the next line; b"" if none comes in time, or at the end."""
        while b"\n" not in self.rest:
            ready, _, _ = select.select([self.descriptor], [], [], limit_s)
            more = os.read(self.descriptor, 1 << 16) if ready else b""
            if not more:
                return b""
            self.rest += more
        line, _, self.rest = self.rest.partition(b"\n")
        return line + b"\n"


def main() -> int:
    """Run one worker; returns its exit code as a shell does."""
    messages = Messages(sys.stdin.fileno())
    first = messages.next(FIRST_S)
    if not first:
        print("elastic-trainer: The driver has closed the connection, or was silent for "
              f"{FIRST_S:.0f} s, before it sent the job.", file=sys.stderr)
        return 1
    job = json.loads(first)
    try:
        worker = subprocess.Popen(job["command"], env=job["env"], cwd=job["cwd"],
                                  stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"elastic-trainer: {job['command'][0]} cannot be started in {job['cwd']} on this "
              f"host: {error}", file=sys.stderr)
        return 127
    ended = threading.Event()
    threading.Thread(target=obey, daemon=True, args=(
        messages, worker.pid, ended, job["lost_s"], job["grace_s"])).start()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    end(worker.pid, signal.SIGKILL)  # not reaped yet, so no other group can have the number
    ended.set()
    code = worker.wait()
    with suppress(OSError):  # the ssh has ended
        os.write(1, f"{EXITED}{code}\n".encode())
    return code if code >= 0 else 128 - code


def obey(messages: Messages, group: int, ended: threading.Event, lost_s: float,
         grace_s: float) -> None:
    """Obey the driver while it sends messages, then end the worker, unless it has `ended`."""
    while message := messages.next(lost_s):
        if message == b"term\n" and not ended.is_set():
            end(group, signal.SIGTERM)
        elif message.startswith(b"stacks ") and not ended.is_set():
            ask_stacks(group, int(message.split()[1]))
        elif message == b"kill\n":
            break
    else:
        ended.wait(grace_s)
    if not ended.is_set():
        end(group, signal.SIGKILL)


def ask_stacks(group: int, pid: int) -> None:
    """Let a worker write its stacks to its stderr (host/stacks.py), and write its state there."""
    with suppress(OSError):
        if os.getpgid(pid) == group:  # a number that another process may have by now
            os.write(2, f"{STATE}{state_of(pid)}\n".encode())
            os.kill(pid, signal.SIGURG)


def state_of(pid: int) -> str:
    """Return the state of a process as /proc has it: "T" is stopped by a signal; "": it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2][:1]
    except OSError:
        return ""


def end(group: int, number: int) -> None:
    """Send a signal to the worker and its children."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def end_run(run_dir: str) -> int:
    """Wait until a run has no worker on this host; kill those that stay, and print their number."""
    deadline = time.monotonic() + ORPHANS_S
    while (left := workers_of(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    print(len(left))
    return 0


def workers_of(run_dir: str) -> dict[int, tuple[str, str]]:
    """Return a run's workers on this host and their children: pid → attempt and name."""
    found = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            entries = os.fsdecode(file.read()).split("\0")
            env = dict(entry.partition("=")[::2] for entry in entries)
            if env.get("ELASTIC_TRAINER_RUN_DIR") == run_dir and "ELASTIC_TRAINER_WORKER" in env:
                attempt = env.get("ELASTIC_TRAINER_ATTEMPT", "")
                found[int(pid)] = attempt, env["ELASTIC_TRAINER_WORKER"]
    return found


if __name__ == "__main__":
    # A thread that waits for messages must not keep the process.
    os._exit(end_run(sys.argv[2]) if sys.argv[1:2] == ["end"] else main())
