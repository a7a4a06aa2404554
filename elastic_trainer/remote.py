"""The far end of an ssh: starts one worker on this host, and sees to its end whatever becomes of the driver.

driver → ssh → here (`python -S remote.py`, words on stdin) → the worker, in a process group of its own

What always holds:
1. The environment comes on stdin: no secret is on a command line, here or there.
2. No worker outlives its driver for long. The word `kill`, or what kills the ssh and is noticed here as the end of stdin
   or as `lost_s` without a word, ends its whole group; the latter two after `grace_s`, in which a worker that is well
   notices by itself that its driver is gone, writes its last checkpoint and leaves.
3. Its exit counts at once, whoever still holds its output: it is a marked line, since sshd waits for the output's end.

It imports nothing of ours and little else: it runs once for each worker, on a host that boots.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

EXITED = "\x1eelastic-trainer-exit "
"""Begins the line on stdout that ends with the worker's exit code (negative: a signal's number)."""


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
    threading.Thread(target=obey, args=(words, worker.pid, job["lost_s"], job["grace_s"]), daemon=True).start()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    end(worker.pid, signal.SIGKILL)  # not yet reaped, so the group's number cannot be another's
    code = worker.wait()
    with suppress(OSError):  # nobody listens any more
        os.write(1, f"{EXITED}{code}\n".encode())
    return code if code >= 0 else 128 - code


def obey(words: Words, group: int, lost_s: float, grace_s: float) -> None:
    """Do what the driver says until it says no more; then end the worker."""
    while word := words.next(lost_s):
        if word == b"term\n":
            end(group, signal.SIGTERM)
        elif word == b"kill\n":
            break
    else:
        time.sleep(grace_s)
    end(group, signal.SIGKILL)


def end(group: int, number: int) -> None:
    """Send a signal to the worker and its children."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    os._exit(main())  # a thread that waits for words must not keep us
