"""The host's end of a tunnel: runs host/remote.py for the driver, in a process of its own.

agent.py (a connection whose request was signed) → here → host/remote.py → a worker

    python own.py elastic_trainer.discovery.far_side DESCRIPTOR [LIFE]     (settings on stdin)

What always holds:
1. Nothing is started before both ends have proved that they have the agents' key (wire/tunnel.py).
2. A worker's life does not hang on the agent's: this process has the connection. When it ends, or
   the connection does, remote.py ends the worker (remote.py, 2). With LIFE, a pipe whose other end
   the agent holds, the worker is also killed when the agent ends.
3. The worker's environment: the variables of this host stay, the driver adds those that the host
   lacks, and the driver has the last word on those of the run (OF_THE_RUN). ELASTIC_TRAINER_AGENT
   names the agent that has started it.
4. SIGTERM ends neither this process nor remote.py: Slurm and systemd may send it to all processes
   of a task, and it is the worker's to leave after its step. A handler, because a worker would
   inherit SIG_IGN.
5. The output of a worker whose driver is gone is read and dropped: a full pipe would stop it in its
   last steps.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from elastic_trainer.host import remote
from elastic_trainer.wire.plain import plain_text
from elastic_trainer.wire.tunnel import (
    ARGUMENTS,
    ERRORS,
    EXIT,
    HANDSHAKE_S,
    INPUT,
    OUTPUT,
    Channel,
    NotReached,
    write_all,
)

ENDED, NOT_STARTED, FINISHED = 0, 254, 100
"""Exit codes for the agent: the command has ended; the other end has not proved that it has the
key; a worker has ended with exit code 0. The command's own code, which may be 100, goes to the
driver alone."""
OF_THE_RUN = ("ELASTIC_", "HOROVOD_", "PYTHON", "MALLOC_")
MOST_JOB = 8 << 20
"""The bytes of a job: the command and the environment."""
REST_S = 1.0
"""The time after the exit in which the rest of the output may come: another process may hold it."""


def environment(theirs: Mapping[str, str], own: Mapping[str, str], agent: str) -> dict[str, str]:
    """Return a worker's environment, of the driver's variables and of this host's own."""
    of_run = {name: value for name, value in theirs.items() if name.startswith(OF_THE_RUN)}
    return {**theirs, **own, **of_run, remote.AGENT: agent}


def arguments_of(channel: Channel) -> list[str]:
    """Wait for remote.py's arguments. Raises NotReached, ValueError."""
    deadline = time.monotonic() + HANDSHAKE_S
    while channel.is_open and (left := deadline - time.monotonic()) > 0:
        _, is_heard = channel.wait({}, limit_s=left)
        for kind, data in channel.frames() if is_heard else ():
            if kind == ARGUMENTS:
                return [str(one) for one in json.loads(data)]
    raise NotReached("The driver has not sent what to do.")


class Command:
    """remote.py on this host, whose streams are the channel's."""

    def __init__(self, channel: Channel, arguments: list[str], agent: str, life: int | None):
        self.channel, self.agent, self.life = channel, agent, life
        self.job: bytearray | None = None if arguments else bytearray()
        """The first line that the driver sends, until it is whole."""
        self.is_worker = False
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-I", remote.__file__, *arguments], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.streams = {self.process.stdout.fileno(): OUTPUT, self.process.stderr.fileno(): ERRORS}

    def run(self) -> int:
        """Carry its streams until its exit; returns the exit code."""
        exit_of = os.pidfd_open(self.process.pid)
        ends_at: float | None = None
        while ends_at is None or (self.streams and time.monotonic() < ends_at):
            more = [exit_of] if ends_at is None else []
            if self.life is not None and ends_at is None:
                more.append(self.life)
            ready, is_heard = self.channel.wait(self.streams, *more, limit_s=REST_S)
            self.channel.pass_on(self.streams, ready)
            for kind, data in self.channel.frames() if is_heard else ():
                if kind == INPUT:
                    self._take(data)
            if not self.channel.is_open:
                self.channel.outgoing.clear()
                self._close_input()
            if self.life in ready:
                self._write(b"kill\n")
                self.life = None
            if exit_of in ready:
                ends_at = time.monotonic() + REST_S
        return self.process.wait()

    def _take(self, data: bytes) -> None:
        """Pass on what the driver sends: messages, after the job, which gets its environment."""
        if self.job is None:
            return self._write(data) if data else self._close_input()
        self.job += data
        line, end, rest = bytes(self.job).partition(b"\n")
        if end:
            job, self.job = json.loads(line), None
            self.is_worker = remote.WORKER in job["env"]
            job["env"] = environment(job["env"], os.environ, self.agent)
            self._write(json.dumps(job).encode() + end + rest)
        elif not data or len(self.job) > MOST_JOB:
            self._close_input()

    def _write(self, data: bytes) -> None:
        assert self.process.stdin
        with suppress(OSError):  # remote.py has ended
            if not self.process.stdin.closed:
                write_all(self.process.stdin.fileno(), data)

    def _close_input(self) -> None:
        with suppress(OSError):
            assert self.process.stdin
            self.process.stdin.close()


def main(argv: list[str]) -> int:
    """Serve one connection; returns the exit code for the agent."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    settings = json.loads(sys.stdin.readline())
    connection = socket.socket(fileno=int(argv[0]))
    try:
        channel = Channel(connection, bytes.fromhex(settings["key"]), settings["nonce"],
                          is_host=True)
        arguments = arguments_of(channel)
    except (OSError, ValueError) as error:
        print(f"discovery: nothing was started for a client of the agent: "
              f"{plain_text(str(error))}", file=sys.stderr)
        return NOT_STARTED
    life = int(argv[1]) if argv[1:] else None
    command = Command(channel, arguments, settings["agent"], life)
    code = command.run()
    code = code if code >= 0 else 128 - code
    channel.send(EXIT, bytes([code]))
    channel.end()
    return FINISHED if command.is_worker and code == 0 else ENDED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
