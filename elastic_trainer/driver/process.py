"""One worker's process: a local process group, or a remote one, by ssh or by its host's agent.

driver → here → worker, or ssh or tunnel (reach.py) → `remote.py` → worker → its output → here →
driver's output

- F3  A worker's death waits for no ssh. A worker on another host ends when its driver or its ssh
      does (remote.py).
- The exit counts at once, not when every process that holds the worker's output has ended
  (Horovod waits for that: safe_shell_exec.py:267).
- The environment, with its secrets, does not travel on command lines (gloo_run.py:80-103 puts it
  there).
"""

from __future__ import annotations

import collections
import json
import os
import queue
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from horovod.runner.common.util.env import is_exportable

from elastic_trainer.driver.reach import LOST, Reach
from elastic_trainer.driver.roster import Start
from elastic_trainer.host import remote
from elastic_trainer.host.lines import lines_of
from elastic_trainer.host.stacks import FAULTS, LINES, Answer, place_of
from elastic_trainer.host.terminal import VARIABLE as TERMINAL
from elastic_trainer.host.tracebacks import Stream, Tracebacks
from elastic_trainer.wire.plain import plain_output

FAR_HEARTBEAT_S = 1.0
"""The interval of heartbeats to the far end of an ssh."""
FAR_LOST_S = 60.0
"""The far end takes the driver for dead after this time without a message. A frozen driver and a
partition do not end its stdin."""
FAR_KILL_S = 2.0
"""The time that an ssh has to deliver the message `kill`."""
FAR_OUTPUT_S = 1.0
"""The time after a far worker's exit in which the rest of its output may arrive, if another process
there still holds it."""
LAST_LINE_CHARACTERS = 1000
"""The characters that are kept of each of a worker's last lines. A frame of faulthandler has
fewer."""


class WorkerProcess:
    """One worker's process. `start` names it.

    `address` is where its host is reached; None: it is this machine.
    """

    def __init__(self, start: Start, command: list[str], env: dict[str, str], reach: Reach,
                 output: IO[str], address: str | None, tracebacks: Tracebacks | None = None):
        self.name, self.host, self.is_remote = start.worker, start.host, address is not None
        self.exit_code: int | None = None
        """The exit code that the far end has reported."""
        self.messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        """Lines for the far end."""
        self.last_lines: collections.deque[str] = collections.deque(maxlen=LINES)
        """The end of its stderr. If it died of a signal, faulthandler's stack is there."""
        self.answer, self._state = Answer(), ""
        self._errors = Stream(tracebacks or Tracebacks(), start.worker, start.host)
        self._names = remote.names_of(env)
        command_here, env_here = command, env
        if address is not None:
            command_here = reach.command(self.host, address)
            env_here = os.environ | {"ELASTIC_TRAINER_SSH": self.name}  # for `attempts.is_worker`
        self.process = subprocess.Popen(
            command_here, env=env_here, start_new_session=True,
            stdin=subprocess.PIPE if self.is_remote else subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.worker_pid = self.process.pid
        """The worker reports another pid where it is behind a shim or on another host."""
        if self.is_remote:
            self._send_job(command, env)
        streams = ("stdout", self.process.stdout), ("stderr", self.process.stderr)
        self.forwards = [threading.Thread(target=self._forward, args=(*one, output), daemon=True)
                         for one in streams]
        for thread in self.forwards:
            thread.start()

    def _send_job(self, command: list[str], env: dict[str, str]) -> None:
        there = {name: value for name, value in env.items()
                 if is_exportable(name) and name.isidentifier() and name != TERMINAL}
        job = {"command": command, "cwd": os.getcwd(), "env": there, "lost_s": FAR_LOST_S,
               "grace_s": remote.ORPHANS_S}
        self.messages.put(json.dumps(job).encode() + b"\n")
        threading.Thread(target=self._write_messages, daemon=True).start()

    def _write_messages(self) -> None:
        """Send messages to the far end, and heartbeats between them. Blocks while ssh blocks."""
        assert self.process.stdin is not None
        try:
            while self.process.returncode is None:
                try:
                    message = self.messages.get(timeout=FAR_HEARTBEAT_S)
                except queue.Empty:
                    message = b"heartbeat\n"
                self.process.stdin.write(message)
                self.process.stdin.flush()
        except OSError:
            pass  # ssh has ended, and `wait` returns its exit code

    def _forward(self, kind: str, stream: IO[bytes], output: IO[str]) -> None:
        """Write each line with the worker's host in front. Ends when the last writer closes it.

        Ranks change when the world does; hosts do not.
        """
        for raw in lines_of(stream.fileno(), remote.MARK.encode()):
            text = raw.decode(errors="replace").rstrip()
            line, mark, message = text.partition(remote.MARK)
            lines = [line] if line or not mark else []
            if kind == "stderr":
                self.last_lines.append(line[:LAST_LINE_CHARACTERS])
                lines = [shown for one in lines for rest in self.answer.take(one)
                         for shown in self._errors.take(rest)]
            self._pass_on(kind, lines, output)
            if mark and self.is_remote:
                self._take_message(kind, mark + message)
        if kind == "stderr":
            last = [shown for rest in self.answer.rest() for shown in self._errors.take(rest)]
            self._pass_on(kind, [*last, *self._errors.rest()], output)

    def _pass_on(self, kind: str, lines: list[str], output: IO[str]) -> None:
        for line in lines:
            with suppress(OSError):  # a broken output must not make the worker wait for us
                # One call, or another worker's line could come in between.
                output.write(f"[{self.host}]<{kind}>: {plain_output(line)}\n")
                output.flush()

    def _take_message(self, kind: str, message: str) -> None:
        """Take a message of the far end."""
        if kind == "stderr" and message.startswith(remote.STATE):
            self._state = message.removeprefix(remote.STATE)[:1]
        code = message.removeprefix(remote.EXITED)
        if kind == "stdout" and re.fullmatch("-?[0-9]{1,3}", code):
            self.exit_code = int(code)
            self._later(FAR_OUTPUT_S, self._signal, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the exit, kill what it left behind, return its code (negative: a signal's)."""
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self._signal(signal.SIGKILL)  # not reaped yet, so no other group can have the number
        code = self.process.wait()
        if self.is_remote:
            self.forwards[0].join(FAR_OUTPUT_S)  # only ssh held it, so it ends now
            code = -signal.SIGHUP if code == LOST else code
        return code if self.exit_code is None else self.exit_code

    def ask_stacks(self) -> None:
        """Ask the worker for its stacks (host/stacks.py), and for its state if it is far."""
        self.answer.expect()
        if self.is_remote:
            self._state = ""
            self.messages.put(f"stacks {self.worker_pid}\n".encode())
        elif self.process.returncode is None:
            remote.ask_stacks(self.worker_pid, self.process.pid, self._names)

    def state(self) -> str:
        """Return the state of its process as /proc has it, of a far one when it was asked."""
        if self.is_remote:
            return self._state
        return remote.state_of(self.worker_pid, self.process.pid, self._names)

    def died_in(self, code: int) -> str:
        """Return where the process died, if faulthandler reports the signal that ended it; else "".

        faulthandler has written before the process ends, but its lines may not be read yet. It does
        not report SIGKILL. All workers wait for this result, and a process that a killed worker
        left behind may hold its stderr.
        """
        if -code not in FAULTS:
            return ""
        self.forwards[1].join(FAR_OUTPUT_S)
        return place_of(list(self.last_lines))

    def stop(self, at_once: bool, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL after a grace; or SIGKILL at once.

        An ssh that cannot deliver SIGKILL is killed itself.
        """
        if at_once:
            self._kill()
            return
        if self.is_remote:
            self.messages.put(b"term\n")
        else:
            self._signal(signal.SIGTERM)
        self._later(grace_s, self._kill)

    def _kill(self) -> None:
        if self.is_remote:
            self.messages.put(b"kill\n")
            self._later(FAR_KILL_S, self._signal, signal.SIGKILL)
        else:
            self._signal(signal.SIGKILL)

    def _later(self, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        timer = threading.Timer(seconds, act, arguments)
        timer.daemon = True
        timer.start()

    def _signal(self, number: int) -> None:
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
