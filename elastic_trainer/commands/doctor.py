"""`elastic-trainer doctor`: what this machine, and each host of a list, lacks for a run.

    elastic-trainer doctor [--store URL] [--runs-dir FOLDER] [--json]
    elastic-trainer doctor --hosts a:1,b:1 [-p 2222] [-i KEY]

command line → here → doctor/ on this machine, and over ssh (or by its agent) on each host → table,
exit code 0 or 1

What always holds:
1. A host is asked over the same ssh or agent, with the same Python, folder and environment, as a
   worker is started (host/remote.py). Nothing secret is on a command line.
2. A host that does not answer is a finding. It does not keep the others from being examined.
3. Horovod need not be installed: that it is missing is a finding too.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import secrets
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from elastic_trainer.commands.run_options import (
    add_reach,
    reach_of,
    static_hosts,
    store_of_run,
)
from elastic_trainer.config import ConfigError
from elastic_trainer.doctor import checks
from elastic_trainer.doctor.checks import FAILED, OK, Check
from elastic_trainer.doctor.facts import Facts, Wanted, nearest, probe
from elastic_trainer.doctor.ports import LISTEN_S, Listener, Reached, reach
from elastic_trainer.driver.hosts import addresses_in, parse_hosts
from elastic_trainer.host import own
from elastic_trainer.host.options import Parser
from elastic_trainer.wire.plain import plain
from elastic_trainer.world.reach import own_address_towards

ANSWER_S = 180.0
"""The time that the doctor of a host has. It imports torch there."""
AT_ONCE = 32
PROBE_RUN = "doctor"
"""The place of the objects that are written under --store."""


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code. Raises ConfigError."""
    options = _parser().parse_args(argv)
    hosts, addresses = _hosts(options)
    reach = replace(reach_of(options), ssh_port=options.ssh_port,
                    ssh_identity_file=options.ssh_identity_file)
    far = [host for host in hosts if reach.by_agent or not is_here(addresses.get(host, host))]
    here = socket.gethostname()
    wanted = Wanted(host=here, folder=str(options.runs_dir.absolute()),
                    store=store_of_run(options.store, PROBE_RUN),
                    towards=next(filter(None, (address_of(addresses.get(host, host))
                                               for host in far)), ""))
    if not far:
        return show(checks.checks_of(probe(wanted)), as_json=options.json)
    with marked(wanted) as wanted, ThreadPoolExecutor(AT_ONCE) as pool:
        asked = [Asked(host, reach.command(host, addresses.get(host, host)), wanted,
                       addresses.get(host, host), by_agent=reach.by_agent) for host in far]
        try:
            answers = pool.map(Asked.ask, asked)
            facts = {here: probe(replace(wanted, mark=""))}
            for one, answer in zip(asked, answers, strict=True):
                if answer is not None:
                    facts[one.host] = answer
            found = [check for one in facts.values() for check in checks.checks_of(one)]
            found += [check for one in asked for check in one.checks(bool(wanted.store))]
            found += checks.same(facts, here)
            found += ports(here, [one for one in asked if one.facts], pool)
        finally:
            for one in asked:
                one.end()
    return show(found, as_json=options.json)


def show(checks: Sequence[Check], *, as_json: bool) -> int:
    """Print the checks; returns the exit code: 1 if one has failed."""
    failed = [check for check in checks if check.status == FAILED]
    if as_json:
        print(json.dumps({"healthy": not failed, "checks": [asdict(check) for check in checks]},
                         indent=2))
        return 1 if failed else 0
    from elastic_trainer.views.tables import Table, print_table

    print_table(Table(("host", "check", "", "found"), [
        (check.host, check.what, check.status, check.found) for check in checks]))
    bad = [check for check in checks if check.status != OK]
    for check in bad:  # not by rich, which would wrap a command
        print(f"{plain(check.host)}, {check.what}: {check.status}. {plain(check.found)}")
        if check.remedy:
            print(f"    {plain(check.remedy)}")
    if not bad:
        print(f"all {len(checks)} checks are ok")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="elastic-trainer doctor", allow_abbrev=False,
        description="Find what this machine, and the hosts of a fleet, lack for a run. The exit "
                    "code is 1 if a check has failed.")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="a:1,b:2", help="hosts to examine")
    where.add_argument("-hostfile", "--hostfile", type=Path,
                       help="the hosts, as a file of lines like `a slots=1`")
    where.add_argument("--host-discovery-script", metavar="COMMAND",
                       help="prints the hosts as host:slots lines")
    parser.add_argument("-p", "--ssh-port", help="as horovodrun has it")
    parser.add_argument("-i", "--ssh-identity-file", help="as horovodrun has it")
    add_reach(parser, os.environ)
    parser.add_argument("--store", metavar="URL",
                        default=os.environ.get("ELASTIC_TRAINER_STORE", ""),
                        help="prove the permissions on a store: a folder, or s3://, gs:// or az:// "
                             "with bucket/prefix")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"),
                        help="where runs are kept (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    return parser


def _hosts(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the hosts of the command line, and the addresses of those that have one beside the
    name. Raises ConfigError."""
    if options.store == "s3":
        raise ConfigError("--store is s3, which is a server that a run starts on this machine. "
                          "Give a folder or a bucket, or leave --store out.")
    script = options.host_discovery_script
    if not script:
        return list(static_hosts(options.hosts, options.hostfile)), {}
    done = subprocess.run(script, shell=True, capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigError(f"--host-discovery-script {script} ended with exit code "
                          f"{done.returncode}: {done.stderr.strip()[-500:]}. Run it by hand.")
    try:
        return list(parse_hosts(done.stdout, None)), addresses_in(done.stdout)
    except ValueError as error:
        raise ConfigError(f"--host-discovery-script {script} prints a line that is no host: "
                          f"{error}. Run it by hand.") from error


def address_of(host: str) -> str:
    """Return a host's address; "" if its name has none. Network: a name server."""
    with suppress(OSError):
        return socket.gethostbyname(host.partition(":")[0])
    return ""


def is_here(host: str) -> bool:
    """True if a host is this machine."""
    import psutil

    address = address_of(host)
    own = {one.address for addresses in psutil.net_if_addrs().values() for one in addresses}
    return bool(address) and (ipaddress.ip_address(address).is_loopback or address in own)


@contextmanager
def marked(wanted: Wanted) -> Iterator[Wanted]:
    """Put a file beside the runs during the block: a host that shares the disk sees it."""
    mark = nearest(wanted.folder) / f".doctor-{secrets.token_hex(8)}"
    try:
        with suppress(OSError):  # a check of its own
            mark.touch()
        yield replace(wanted, mark=str(mark) if mark.exists() else "")
    finally:
        with suppress(OSError):
            mark.unlink()


# --- one host -------------------------------------------------------------------------------------

@dataclass
class Asked:
    """The doctor on one host, over ssh or by its agent."""

    host: str
    command: list[str]
    wanted: Wanted
    address: str
    """Where it is reached."""
    by_agent: bool
    facts: Facts | None = None
    listener: tuple[str, int, str] = ("", 0, "")
    """Where it listens: address, port, word."""
    exit_code: int = 0
    last: str = ""
    """The last line on stderr."""
    process: subprocess.Popen[bytes] | None = None

    def ask(self) -> Facts | None:
        """Start the doctor there, and return its facts; None: it did not answer."""
        towards = ""
        with suppress(OSError):
            towards = own_address_towards(address_of(self.address))
        wanted = replace(self.wanted, host=self.host, towards=towards)
        answer = self._answer("facts", asdict(wanted), keep=True)
        if answer is None:
            return None
        try:
            self.facts = Facts.from_json(answer["facts"])
            self.listener = (self.facts.address or self.host, answer["port"], answer["word"])
        except (LookupError, TypeError) as error:
            self.exit_code, self.last = 1, f"it is of another version: {error}"
        return self.facts

    def reach(self, listeners: dict[str, tuple[str, int, str]]) -> dict[str, Reached]:
        """Let this host connect to the listeners of others."""
        answer = self._answer("reach", listeners) or {}
        return {name: Reached(**found) for name, found in answer.items()}

    def _answer(self, question: str, asked: Any, keep: bool = False) -> dict[str, Any] | None:
        """Ask the doctor there; returns its line of JSON. `keep`: it goes on listening."""
        job = {"command": own.command("elastic_trainer.doctor", question, json.dumps(asked)),
               "cwd": os.getcwd(), "lost_s": LISTEN_S, "grace_s": 0.0,
               "env": {name: value for name, value in os.environ.items() if name.isidentifier()}}
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stderr=said,
                                       stdout=subprocess.PIPE, start_new_session=True)
            timer = threading.Timer(ANSWER_S, process.kill)
            timer.start()
            try:
                if (answer := self._read(process, job)) is None:
                    self.exit_code = process.wait() or 1
                    said.seek(0)
                    text = said.read().decode(errors="replace").strip()
                    self.last = (text.splitlines() or ["it did not answer"])[-1]
            finally:
                timer.cancel()
                if keep and answer is not None:
                    self.process = process
                else:
                    end(process)
        return answer

    def _read(self, process: subprocess.Popen[bytes], job: dict[str, Any]) -> dict[str, Any] | None:
        assert process.stdin and process.stdout
        with suppress(OSError):  # ssh has ended
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        for line in process.stdout:
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    return found
        return None

    def checks(self, has_store: bool) -> list[Check]:
        """Return what is to be said of the ssh, and of the runs' folder there."""
        name, _, port = self.address.partition(":")
        agent = ["python", "-m", "elastic_trainer.discovery", "agent", "--starts-workers",
                 "--key-file", "KEY", "--bind", name, *(["--port", port] if port else [])]
        by_hand = agent if self.by_agent else [*self.command[:-1], "true"]
        found = [checks.way(self.host, "agent" if self.by_agent else "ssh", self.exit_code,
                            self.last, by_hand)]
        if self.facts and (shared := checks.shared_folder(self.host, self.facts, has_store)):
            found.append(shared)
        return found

    def end(self) -> None:
        """End the doctor there."""
        if self.process:
            end(self.process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Close an ssh, so that the far end kills what it has started; kill the ssh if it stays."""
    for stream in (process.stdin, process.stdout):
        with suppress(OSError):
            if stream:
                stream.close()
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# --- between hosts --------------------------------------------------------------------------------

def ports(here: str, asked: list[Asked], pool: ThreadPoolExecutor) -> list[Check]:
    """Let each host connect to each other one, and compare the clocks with this machine's."""
    if not asked:
        return []
    own = Listener()
    try:
        listeners = {one.host: one.listener for one in asked}
        reached = {here: {name: reach(*listener) for name, listener in listeners.items()}}

        def reach_all(one: Asked) -> dict[str, Reached]:
            mine = {name: where for name, where in listeners.items() if name != one.host}
            with suppress(OSError):
                mine[here] = own_address_towards(one.listener[0]), own.port, own.word
            return one.reach(mine)

        for one, found in zip(asked, pool.map(reach_all, asked), strict=True):
            reached[one.host] = found
    finally:
        own.close()
    met = [checks.port(host, name, listeners[name][0] if name in listeners else name, result.error)
           for host, others in reached.items() for name, result in others.items()]
    return met + [checks.clock(name, result.offset_s) for name, result in reached[here].items()]
