"""How the driver, the supervisor and the doctor run host/remote.py on a host: by ssh, or by the
host's agent.

--reach, --agent-key-file, horovodrun's -p and -i → here → a command line → process.py, past.py,
commands/doctor.py

The command's stdin, stdout, stderr and exit code are those of remote.py. Its exit code is LOST if
the connection has ended, or was never made.
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elastic_trainer.config import Attempt, ConfigError
from elastic_trainer.host import own, remote

LOST = 255
"""ssh's and the tunnel's exit code."""
AGENT_PORT = 7411
CONNECT_S = 5.0
SSH_OPTIONS = (
    "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "ServerAliveInterval=2",
    "-o", "ServerAliveCountMax=3", "-o", "PasswordAuthentication=no",
    "-o", "ControlMaster=no", "-o", "ControlPath=none")  # the end of one ends no other


@dataclass(frozen=True)
class Reach:
    """How hosts are reached. With a `key_file` it is by their agents."""

    ssh_port: str | int | None = None
    ssh_identity_file: str | None = None
    key_file: str = ""
    agent_port: int = AGENT_PORT

    @classmethod
    def from_options(cls, horovodrun_options: Sequence[str], attempt: Attempt) -> Reach:
        """Read horovodrun's options, and the launcher's."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("-p", "--ssh-port")
        parser.add_argument("-i", "--ssh-identity-file")
        return cls.of(parser.parse_known_args(horovodrun_options)[0], attempt)

    @classmethod
    def of(cls, settings: Any, attempt: Attempt) -> Reach:
        """Take horovodrun's settings for ssh, and the launcher's for agents."""
        return cls(settings.ssh_port, settings.ssh_identity_file, attempt.agent_key_file,
                   attempt.agent_port)

    @property
    def by_agent(self) -> bool:
        """True if agents start the workers, also on this machine."""
        return bool(self.key_file)

    def command(self, host: str, address: str, *arguments: str) -> list[str]:
        """Return the command that runs remote.py on a host (the same paths there as here).

        `address` is where the host is reached, perhaps with its agent's port.
        """
        name, _, port = address.partition(":")
        if self.by_agent:
            return [sys.executable, "-S", "-I", own.HERE, "elastic_trainer.wire.tunnel",
                    f"{name}:{port or self.agent_port}", self.key_file, *arguments]
        # A host's key is known by its name, also where it is reached at an address.
        program = ["exec", sys.executable, "-S", "-I", os.path.abspath(remote.__file__), *arguments]
        options = [*(["-p", str(self.ssh_port)] if self.ssh_port else []),
                   *(["-i", self.ssh_identity_file] if self.ssh_identity_file else []),
                   *(["-o", f"HostKeyAlias={host}"] if name != host else [])]
        return ["ssh", *SSH_OPTIONS, *options, "--", name, shlex.join(program)]

    def is_agent_missing(self, address: str) -> bool:
        """True if nothing listens at an agent's port, on a machine that answers. Network."""
        if not self.by_agent:
            return False
        name, _, port = address.partition(":")
        try:
            socket.create_connection((name, int(port or self.agent_port)), CONNECT_S).close()
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return False


def require_key(key_file: str) -> None:
    """Check the agents' key and this machine's TLS at the start. Raises ConfigError."""
    from elastic_trainer.wire.tunnel import NotReached, context

    try:
        if os.stat(key_file).st_mode & 0o077:
            raise ConfigError(f"--agent-key-file: other users can read {key_file}. Run: chmod 600 "
                              f"{key_file}")
        with open(key_file, "rb") as file:
            length = len(file.read().strip())
        if length < 32:
            raise ConfigError(f"--agent-key-file: {key_file} has {length} bytes, and a key has 32 "
                              f"or more. Give the file that the agents have.")
        context(is_host=False)
    except NotReached as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"--agent-key-file {key_file} cannot be read: {error.strerror}. Give the "
                          f"file with the agents' key (agent --key-file).") from error
