"""Runs a command that outlives its starter for as long as it needs to stop.

an actor of Ray → `python -S -I keeper.py agent|supervisor COMMAND…` → the command

Ray sends SIGKILL to the children of an actor's process when the process ends, e.g. on `ray stop`.
A worker that is killed loses its step in flight; one that is asked to leave loses nothing.

What always holds:
1. The command is no child of the actor's process. At the end of stdin, which comes with the actor's
   end, it receives SIGTERM once.
2. The last line on stdout is `exit CODE`. The command of `agent` writes there too, that of
   `supervisor` writes to stderr, which is Ray's log of the actor.

It imports the standard library only.

Source: ray/core_worker/core_worker.cc, KillChildProcs (kill_child_processes_on_worker_exit).
"""

import os
import subprocess
import sys
import threading
from contextlib import suppress

EXITED = "exit "


def main(kind: str, *command: str) -> None:
    """Run the command to its end, in a session of its own."""
    if os.fork():
        os._exit(0)
    os.setsid()
    code = 127
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL,
                                   stdout=None if kind == "agent" else sys.stderr)
        threading.Thread(target=end_with_input, args=(process,), daemon=True).start()
        code = process.wait()
    except OSError as error:
        print(f"elastic-trainer: {command[0]} cannot be started: {error}", file=sys.stderr)
    with suppress(OSError):  # the starter has ended
        os.write(1, f"{EXITED}{code}\n".encode())
    os._exit(0)


def end_with_input(process: "subprocess.Popen[bytes]") -> None:
    """Send SIGTERM at the end of stdin."""
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    process.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:])
