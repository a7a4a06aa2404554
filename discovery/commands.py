"""The slow commands of `python -m elastic_trainer.discovery`: ec2, poll, group, agent.

An agent's process has neither boto3 nor pydantic: they take 40 MB on each host.
"""

from __future__ import annotations

import argparse
import os
import pwd
import sys
from pathlib import Path

from elastic_trainer.discovery.client import read_key
from elastic_trainer.discovery.hosts import Policy
from elastic_trainer.discovery.place_protocol import PlaceUnavailable
from elastic_trainer.discovery.places.ec2_metadata import ENDPOINT, Metadata
from elastic_trainer.wire.plain import plain_text

AGENT_PORT = 7411
HOST_NAMES = ("private-dns", "private-ip")


def run(argv: list[str]) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        if options.command == "agent":
            _run_agent(options)
        elif options.command == "group":
            from elastic_trainer.discovery.places.ec2 import AutoScalingGroup
            from elastic_trainer.discovery.places.ec2_group import keep

            keep(AutoScalingGroup(options.group), options.hosts_file, options.events)
        else:
            _ask_ec2(options)
        return 0
    except (PlaceUnavailable, ValueError, OSError) as error:
        print(f"discovery: {plain_text(error)}", file=sys.stderr)
        return 1


def _run_agent(options: argparse.Namespace) -> None:
    from elastic_trainer.discovery.agent import serve
    from elastic_trainer.discovery.health import Agent

    metadata = None if options.no_metadata else Metadata(options.metadata)
    key = read_key(options.key_file)
    user = options.user if options.user is not None else user_of_workers(options.key_file)
    serve(options.bind, options.port, key, Agent(metadata, options.folder, user),
          lambda port: print(port, flush=True))


def _ask_ec2(options: argparse.Namespace) -> None:
    """Print EC2's list once, or poll until a signal."""
    from elastic_trainer.discovery.places.ec2 import Ec2
    from elastic_trainer.discovery.poll import Poller, once

    tags = dict(tag.split("=", 1) for tag in options.tag)
    place = Ec2(tags, options.group, cpu_slots=options.cpu_slots, host_name=options.host_name)
    has_agents = options.command == "poll" and options.key_file is not None
    policy = Policy(lifecycle=options.lifecycle, same_type=options.same_type, agents=has_agents,
                    horizon_s=60 * options.horizon)
    if options.command == "ec2":
        lines = (f"{name}:{slots}\n" for name, slots in once(place, policy))
        sys.stdout.write("".join(lines))
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


def _tag(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m elastic_trainer.discovery")
    commands = parser.add_subparsers(dest="command", required=True)
    ec2 = commands.add_parser("ec2", help="print host:slots lines straight from EC2")
    ec2.add_argument("--once", action="store_true", required=True,
                     help="ask once (a daemon is `poll`)")
    poll = commands.add_parser("poll", help="keep the hosts file true")
    poll.add_argument("--hosts-file", type=Path, required=True)
    poll.add_argument("--interval", type=float, default=5.0,
                      help="seconds between questions to EC2 (%(default)s)")
    poll.add_argument("--key-file", type=Path,
                      help="the run's key (mode 600), to ask the agents; without it there are none")
    poll.add_argument("--agent-port", type=int, default=AGENT_PORT)
    for command in (ec2, poll):
        _add_choice_of_machines(command)
    group = commands.add_parser("group",
                                help="ask an auto scaling group, once, for the wished machines")
    group.add_argument("--group", required=True)
    group.add_argument("--hosts-file", type=Path, required=True,
                       help="the poller's, whose table is beside it")
    for command in (poll, group):
        command.add_argument("--events", type=Path,
                             help="append to this event log, e.g. runs/NAME/events.jsonl")
    _add_agent(commands.add_parser("agent", help="watch this host and answer the poller"))
    return parser


def _add_choice_of_machines(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--tag", type=_tag, action="append", required=True, metavar="NAME=VALUE",
        help="only instances with this tag (more than one: with all of them)")
    add("--group", help="only instances InService in this auto scaling group")
    add("--lifecycle", choices=("spot", "on-demand", "any"), default="spot")
    add("--cpu-slots", type=int, default=1, help="slots of a type without GPUs (%(default)s)")
    add("--host-name", choices=HOST_NAMES, default=HOST_NAMES[0],
        help="private-dns must be unique to the incarnation: resource names, not ip names")
    add("--horizon", type=float, default=15.0, metavar="MINUTES",
        help="leave this long before a scheduled stop, reboot or retirement (%(default)s)")
    add("--same-type", action="store_true", help="only the largest group of one instance type")


def _add_agent(agent: argparse.ArgumentParser) -> None:
    add = agent.add_argument
    add("--bind", required=True, help="this host's private address")
    add("--port", type=int, default=AGENT_PORT, help="0: any; it is printed (%(default)s)")
    add("--key-file", type=Path, required=True, help="the run's key (mode 600)")
    add("--user", type=_user, help="the user whose processes are workers, for an agent that runs "
                                   "as root (the key file's owner)")
    add("--folder", type=Path, default=Path("/"),
        help="a folder on the disk that must not be full (%(default)s)")
    add("--metadata", default=ENDPOINT, help="the metadata service (%(default)s)")
    add("--no-metadata", action="store_true", help="this machine has none")
