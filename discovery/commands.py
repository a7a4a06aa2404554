"""The slow commands of `python -m elastic_trainer.discovery`: poll PLACE, PLACE --once, group and
agent.

A process has only the code of its own place. An agent's has neither boto3 nor pydantic: they take
40 MB on each host.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pwd
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_trainer.discovery.client import read_key
from elastic_trainer.discovery.hosts import Policy
from elastic_trainer.discovery.place_protocol import PlaceUnavailable
from elastic_trainer.discovery.places.own import own_place
from elastic_trainer.wire.plain import plain_text

if TYPE_CHECKING:
    from elastic_trainer.discovery.place_protocol import Place

AGENT_PORT = 7411
GRACE_S = 90.0
"""The time for which a host that is being stopped drains. Its process is killed soon after it: by
systemd (deploy/hosts), a kubelet, Slurm."""
PLACES = {"ec2": "ec2", "kubernetes": "kubernetes", "slurm": "slurm", "gcp": "gcp",
          "azure": "azure"}
"""Name on the command line → the module in places/ with `add_options` and `place_of`."""
MACHINES = {"ec2": "ec2_metadata", "gcp": "gcp_metadata", "azure": "azure_metadata"}
"""The same → the module in places/ with `ENDPOINT` and `Metadata`, for an agent."""
COMMANDS = ("poll", "group", "agent", *PLACES)


def run(argv: list[str]) -> int:
    """Run one command; returns the exit code."""
    name = argv[1] if argv[:1] == ["poll"] and len(argv) > 1 else argv[0]
    try:
        if argv[:1] == ["poll"] and name.startswith("-") and name not in ("-h", "--help"):
            raise ValueError(f"poll needs the name of a place before {name}. For EC2: python -m "
                             f"elastic_trainer.discovery poll ec2 {name} …")
        options = _parser(name).parse_args(argv)
        if options.command == "agent":
            return _run_agent(options)
        if options.command == "group":
            from elastic_trainer.discovery.places.ec2 import AutoScalingGroup
            from elastic_trainer.discovery.places.ec2_group import keep

            keep(AutoScalingGroup(options.group), options.hosts_file, options.events)
        else:
            _ask(_module(PLACES[name]).place_of(options), options)
        return 0
    except (PlaceUnavailable, ValueError, OSError) as error:
        print(f"discovery: {plain_text(error)}", file=sys.stderr)
        return 1


def _module(name: str) -> Any:
    return importlib.import_module(f"elastic_trainer.discovery.places.{name}")


def _run_agent(options: argparse.Namespace) -> int:
    from elastic_trainer.discovery.agent import StartOptions, serve
    from elastic_trainer.discovery.health import Agent

    machine = _module(MACHINES[options.place or own_place()])
    metadata = None if options.no_metadata else machine.Metadata(
        options.metadata or machine.ENDPOINT)
    key = read_key(options.key_file)
    user = options.user if options.user is not None else user_of_workers(options.key_file)
    starts = StartOptions(options.workers_end_with_agent, options.end_with_run)
    if options.starts_workers:
        _require_tunnel(user)
    elif any(starts):
        raise ValueError("--workers-end-with-agent and --end-with-run are for an agent that starts "
                         "workers. Give --starts-workers, too.")
    grace_s: dict[int, float] = {signal.SIGTERM: options.grace}
    if options.warned_grace is not None:
        grace_s[signal.SIGUSR1] = options.warned_grace
    agent = Agent(metadata, options.folder, user, replaced_after_end=options.replaced_after_end)
    is_over = serve(options.bind, options.port, key, agent, lambda port: print(port, flush=True),
                    grace_s=grace_s, stopped=options.stop_reason,
                    starts=starts if options.starts_workers else None)
    return 0 if is_over else int(options.stopped_exit_code)


def _require_tunnel(user: int) -> None:
    """Check what an agent needs that starts workers. Raises ValueError, OSError."""
    from elastic_trainer.wire.tunnel import context

    context(is_host=True)
    if user != os.geteuid():
        raise ValueError(f"--starts-workers starts them as the agent's own user, {os.geteuid()}, "
                         f"but the workers' user is {user}. Run the agent as that user.")


def _ask(place: Place, options: argparse.Namespace) -> None:
    """Print a place's list once, or poll until a signal."""
    from elastic_trainer.discovery.poll import Poller, once

    has_agents = options.command == "poll" and options.key_file is not None
    policy = Policy(lifecycle=options.lifecycle, same_type=options.same_type, agents=has_agents,
                    horizon_s=60 * options.horizon)
    if options.command != "poll":
        sys.stdout.write(once(place, policy))
        return
    key = read_key(options.key_file) if has_agents else b""
    Poller(place, options.hosts_file, policy, interval_s=options.interval, key=key,
           events_file=options.events,
           agent_port=options.agent_port if has_agents else None).run()


def user_of_workers(key_file: Path) -> int:
    """Return the user whose processes are workers, where --user is not given.

    It is this process's own user; for root's agent it is the owner of the key file. That is printed
    at the start, because an agent of root's counts no worker of another user.
    """
    if uid := os.geteuid():
        return uid
    owner = os.stat(key_file).st_uid
    print(f"discovery: The agent counts the workers of user {owner}, who owns {key_file}. Set "
          f"--user if they run as another user.", file=sys.stderr)
    return owner


def _user(text: str) -> int:
    try:
        return int(text) if text.isdecimal() else pwd.getpwnam(text).pw_uid
    except KeyError:
        raise argparse.ArgumentTypeError(f"this machine has no user {text!r}") from None


def _seconds(text: str) -> float:
    try:
        if 0.0 < float(text) < 1e6:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")


def _parser(name: str) -> argparse.ArgumentParser:
    """Return the parser. Of the places only `name` has its options."""
    parser = argparse.ArgumentParser(prog="python -m elastic_trainer.discovery")
    commands = parser.add_subparsers(dest="command", required=True)
    poll = commands.add_parser("poll", help="keep the hosts file true")
    polled = poll.add_subparsers(dest="place", metavar="PLACE", required=True)
    for place in PLACES:
        once, poller = (group.add_parser(place, help=f"{what} {place}") for group, what in (
            (commands, "print host:slots lines straight from"), (polled, "follow")))
        once.add_argument("--once", action="store_true", required=True,
                          help="ask once (a daemon is `poll`)")
        _add_poller(poller)
        for command in (once, poller):
            _add_policy(command)
            if place == name:
                _module(PLACES[place]).add_options(command)
    group = commands.add_parser("group",
                                help="ask an auto scaling group, once, for the wished machines")
    group.add_argument("--group", required=True)
    group.add_argument("--hosts-file", type=Path, required=True,
                       help="the poller's, whose table is beside it")
    _add_events(group)
    _add_agent(commands.add_parser("agent", help="watch this host and answer the poller"))
    return parser


def _add_events(command: argparse.ArgumentParser) -> None:
    command.add_argument("--events", type=Path,
                         help="append to this event log, e.g. runs/NAME/events.jsonl")


def _add_poller(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--hosts-file", type=Path, required=True)
    add("--interval", type=_seconds, default=5.0,
        help="seconds between questions to the place (%(default)s)")
    add("--key-file", type=Path,
        help="the run's key (mode 600), to ask the agents; without it there are none")
    add("--agent-port", type=int, default=AGENT_PORT)
    _add_events(command)


def _add_policy(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--lifecycle", choices=("spot", "on-demand", "any"), default="spot")
    add("--horizon", type=float, default=15.0, metavar="MINUTES",
        help="leave this long before a scheduled stop, reboot or retirement (%(default)s)")
    add("--same-type", action="store_true", help="only the largest group of one machine type")


def _add_agent(agent: argparse.ArgumentParser) -> None:
    add = agent.add_argument
    add("--bind", required=True, help="this host's private address")
    add("--port", type=int, default=AGENT_PORT, help="0: any; it is printed (%(default)s)")
    add("--key-file", type=Path, required=True, help="the run's key (mode 600)")
    add("--user", type=_user, help="the user whose processes are workers, for an agent that runs "
                                   "as root (the key file's owner)")
    add("--folder", type=Path, default=Path("/"),
        help="a folder on the disk that must not be full (%(default)s)")
    add("--place", choices=MACHINES, help="whose metadata service this machine has (what its "
                                            "firmware says; ec2 where that says nothing)")
    add("--metadata", help="the address of the metadata service, if it is another one")
    add("--no-metadata", action="store_true", help="this machine has none")
    add("--grace", type=_seconds, default=GRACE_S, metavar="SECONDS",
        help="how long the host may drain after SIGTERM, until it is killed (%(default)s)")
    add("--warned-grace", type=_seconds, metavar="SECONDS",
        help="SIGUSR1 is a notice, too, and the host may drain for this long after it")
    add("--replaced-after-end", action="store_true",
        help="the place starts another host only when this one has ended, so that its workers do "
             "not wait for one")
    add("--stop-reason", default="the host is being stopped", metavar="TEXT",
        help="what SIGTERM means here, as users read it (%(default)s)")
    add("--starts-workers", action="store_true",
        help="start the workers of a run with --reach agent, which then needs no ssh")
    add("--workers-end-with-agent", action="store_true",
        help="kill those workers at once when this process ends, however it ends")
    add("--end-with-run", action="store_true",
        help="end with exit code 0 soon after one of those workers has: the run is finished")
    add("--stopped-exit-code", type=int, default=0, metavar="N",
        help="the exit code after SIGTERM. Kubernetes starts no other pod for one with exit code "
             "0 (%(default)s)")
