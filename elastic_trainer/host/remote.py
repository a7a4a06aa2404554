"""The far end of an ssh, or of a tunnel to the host's agent: starts one worker on this host, and
ends it when the driver is gone.

driver → ssh → here (`python -S -I remote.py`, messages on stdin) → the worker, in a process group
supervisor → ssh → here (`python -S -I remote.py end RUN_DIR`): waits until that run has no worker
driver, supervisor → wire/tunnel.py → agent, discovery/far_side.py → here, in the same way

What always holds:
1. The environment comes on stdin: no secret is on a command line, here or there.
2. A worker ends soon after its driver. The message `kill` ends its whole group at once. The end of
   stdin (the ssh was killed) and `lost_s` without a message end it after `grace_s`. In that time a
   healthy worker notices that its driver is gone, writes its last checkpoint and leaves.
3. The exit is reported at once as a marked line of output. sshd itself waits until every process
   that holds the output has closed it, and a tunnel for a second.
4. A run whose coordinator died can be ended here: its workers would train on a second lineage.
5. A worker reports its pid itself, so the pid is checked before a signal: the process is in the
   worker's group, or it has the worker's name, as one behind a shim (standby/) has.

It imports the standard library only, and reads /proc by hand: it runs once for each worker, on a
host that boots, and no package may be on its Python's path.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

MARK = "\x1eelastic-trainer-"
"""Begins a message of ours at the end of a line. The worker may not have ended that line."""
EXITED = MARK + "exit "
"""On stdout, before the worker's exit code (negative: a signal's number)."""
STATE = MARK + "state "
"""On stderr, before the state of the worker's process."""
ORPHANS_S = 20.0
"""The time that workers have to notice that their driver is gone, and to write a checkpoint."""
KILLED_S = 10.0
"""The time that a killed worker has to end: the kernel frees its memory, and a GPU's, first."""
FIRST_S = 60.0
"""The time that the driver has to send the job."""
WORKER, RUN_DIR = "ELASTIC_TRAINER_WORKER", "ELASTIC_TRAINER_RUN_DIR"
ATTEMPT = "ELASTIC_TRAINER_ATTEMPT"
AGENT = "ELASTIC_TRAINER_AGENT"
"""The address and port of the agent that has started a worker."""
MOST_THREADS = 100
"""faulthandler writes the stacks of this number of threads, and the main thread is the last."""
MAIN_FIRST_S = 0.2
"""The time that the main thread has to write its stack before all are asked. Of two questions at
once faulthandler may drop one."""

Names = tuple[str, str, str]
"""A worker's name, its attempt, and its run's folder."""
Process = tuple[int, object]
"""A pid, and what is known of the process."""
Living = Callable[[], list[Process]]
"""Returns those of some processes that live."""


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
    signal.signal(signal.SIGTERM, lambda *_: None)  # for all processes of a host: the worker's
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
        messages, worker.pid, names_of(job["env"]), ended, job["lost_s"], job["grace_s"])).start()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    end(worker.pid, signal.SIGKILL)  # not reaped yet, so no other group can have the number
    ended.set()
    code = worker.wait()
    with suppress(OSError):  # the ssh has ended
        os.write(1, f"{EXITED}{code}\n".encode())
    return code if code >= 0 else 128 - code


def obey(messages: Messages, group: int, names: Names, ended: threading.Event, lost_s: float,
         grace_s: float) -> None:
    """Obey the driver while it sends messages, then end the worker, unless it has `ended`."""
    while message := messages.next(lost_s):
        if message == b"term\n" and not ended.is_set():
            end(group, signal.SIGTERM)
        elif message.startswith(b"stacks ") and not ended.is_set():
            pid = int(message.split()[1])
            with suppress(OSError):
                os.write(2, f"{STATE}{state_of(pid, group, names)}\n".encode())
            ask_stacks(pid, group, names)
        elif message == b"kill\n":
            break
    else:
        ended.wait(grace_s)
    if not ended.is_set():
        end(group, signal.SIGKILL)


def ask_stacks(pid: int, group: int, names: Names) -> None:
    """Let a worker's process write its stacks to its stderr (host/stacks.py), if it is one."""
    if not is_of_worker(pid, group, names):
        return
    with suppress(OSError):
        if len(os.listdir(f"/proc/{pid}/task")) <= MOST_THREADS:
            os.kill(pid, signal.SIGURG)
            return
    ask_main_thread(pid)
    timer = threading.Timer(MAIN_FIRST_S, ask_all_threads, (pid, group, names))
    timer.daemon = True
    timer.start()


def ask_main_thread(pid: int) -> None:
    """Let a process write the stack of its main thread alone."""
    # A signal to the process could be taken by another thread, which would write its own stack.
    with suppress(ImportError, AttributeError):  # no ctypes, or a glibc before 2.30
        import ctypes

        ctypes.CDLL(None).tgkill(pid, pid, signal.SIGWINCH)


def ask_all_threads(pid: int, group: int, names: Names) -> None:
    """Let a worker's process write the stacks of all threads, if it is still one."""
    with suppress(OSError):
        if is_of_worker(pid, group, names):
            os.kill(pid, signal.SIGURG)


def state_of(pid: int, group: int, names: Names) -> str:
    """Return the state of a worker's process as /proc has it: "T" is stopped by a signal; "": it is
    gone, or it is none of this worker's."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(") ")[2][:1]
    except OSError:
        return ""
    return state if is_of_worker(pid, group, names) else ""


def is_of_worker(pid: int, group: int, names: Names) -> bool:
    """True if a process is in a worker's group, or has the worker's names in its environment.

    Behind a shim it is in the group of its monitor, and has written the names there. A program that
    writes over its environment (setproctitle) has none.
    """
    try:
        return os.getpgid(pid) == group or (
            bool(names[0]) and names_of(environment_of(pid)) == names)
    except (OSError, OverflowError):
        return False


def names_of(environment: dict[str, str]) -> Names:
    """Return a worker's name, its attempt and its run's folder; "": there is none."""
    worker, attempt, run_dir = (environment.get(name, "") for name in (WORKER, ATTEMPT, RUN_DIR))
    return worker, attempt, run_dir


def environment_of(pid: int | str) -> dict[str, str]:
    """Return the environment with which a process was started. Raises OSError."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        entries = os.fsdecode(file.read()).split("\0")
    return dict(entry.partition("=")[::2] for entry in entries)


def end(group: int, number: int) -> None:
    """Send a signal to the worker and its children."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def end_run(run_dir: str, grace_s: float = ORPHANS_S) -> int:
    """Wait until a run has no worker on this host; kill those that stay, print their number, and
    wait for their end. Returns 1 if one still lives then."""
    killed, stay = end_living(lambda: list(workers_of(run_dir).items()), grace_s)
    print(len(killed))
    return 1 if stay else 0


def end_living(living: Living, grace_s: float) -> tuple[list[Process], list[Process]]:
    """Wait until no process is `living`; kill those that stay, and wait for their end. Returns
    those that were killed, and those that still live."""
    killed = await_end(living, grace_s)
    for pid, _ in killed:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return killed, await_end(living, KILLED_S) if killed else []


def await_end(living: Living, limit_s: float) -> list[Process]:
    """Wait until no process is `living`, at most so long; return those that are."""
    deadline = time.monotonic() + limit_s
    while (left := living()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def workers_of(run_dir: str) -> dict[int, tuple[str, str]]:
    """Return a run's workers on this host and their children: pid → attempt and name."""
    found = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            worker, attempt, folder = names_of(environment_of(pid))
            if folder == run_dir and worker:
                found[int(pid)] = attempt, worker
    return found


if __name__ == "__main__":
    # A thread that waits for messages must not keep the process.
    os._exit(end_run(sys.argv[2]) if sys.argv[1:2] == ["end"] else main())
