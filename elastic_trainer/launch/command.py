"""The command line.

    elastic-trainer run demo [--example gpt|digits] [--steps N] [--workers N] …
    elastic-trainer run [horovodrun options] -- python my_train.py …
    elastic-trainer verify|watch|report runs/NAME
    elastic-trainer checkpoints ls|show|verify|prune|export URL
    elastic-trainer hosts HOSTS_FILE
    elastic-trainer standby [--slots N] -- python my_train.py …

`./horovodrun_elastic.sh …` sets up and then calls `elastic-trainer run …`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from elastic_trainer.config import ConfigError
from elastic_trainer.host.output import outlive_readers
from elastic_trainer.wire.plain import plain, plain_text

EXIT_BAD_COMMAND = 2
EVENTS_COMMANDS = {"verify": "prove from the events that nothing was lost or repeated",
                   "watch": "show the progress of a run", "report": "show the summary of a run"}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _command(argv)
    except ConfigError as error:
        print(f"elastic-trainer: {plain_text(error)}", file=sys.stderr)
        return EXIT_BAD_COMMAND


def run_process() -> None:
    """Run the command of this process, and end with its exit code."""
    outlive_readers()
    sys.exit(main())


def _command(argv: list[str]) -> int:
    """Import what a command needs, and no more: `checkpoints` imports torch."""
    parser, for_checkpoints = _parsers()
    if argv[:1] == ["run"]:
        from elastic_trainer.launch.run import run

        return run(argv[1:])
    if argv[:1] == ["standby"]:
        from elastic_trainer.standby import service

        service.main(argv[1:])
    if argv[:1] == ["checkpoints"]:
        from elastic_trainer.launch import checkpoints

        checkpoints.add_commands(for_checkpoints)
        return checkpoints.run(parser.parse_args(argv))
    chosen = parser.parse_args(argv)
    if chosen.command == "hosts":
        return _hosts(chosen.hosts_file)
    act = {"verify": _verify, "watch": _watch, "report": _report}[chosen.command]
    return _look(chosen.run_dir, act)


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser of all commands, and that of `checkpoints`."""
    parser = argparse.ArgumentParser(
        prog="elastic-trainer", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run", add_help=False, help="train: the demo, or your own script after --")
    for name, what in EVENTS_COMMANDS.items():
        one = commands.add_parser(name, help=what)
        one.add_argument("run_dir", type=Path, help="e.g. runs/NAME")
    hosts = commands.add_parser("hosts", help="show the fleet's table")
    hosts.add_argument("hosts_file", type=Path, help="the poller's --hosts-file")
    commands.add_parser("standby", add_help=False,
                        help="keep booted workers waiting on this host: its command after --")
    return parser, commands.add_parser(
        "checkpoints", help="list, show, verify, prune or export checkpoints")


def _look(run_dir: Path, act: Callable[[Path], int]) -> int:
    """Run a command that reads a run's folder. Raises ConfigError."""
    try:
        if not run_dir.is_dir():
            raise ConfigError(f"There is no folder {run_dir}. Name a run's folder, e.g. runs/NAME.")
        return act(run_dir)
    except PermissionError as error:
        raise ConfigError(
            f"This user may not read {error.filename}. Its owner can let a group in: chgrp -R "
            f"GROUP {run_dir}; chmod -R g+rwX {run_dir}; find {run_dir} -type d -exec chmod g+s "
            f"{{}} +") from error


def _verify(run_dir: Path) -> int:
    from elastic_trainer.observe.verify import verify

    try:
        verdict = verify(run_dir)
    except FileNotFoundError as error:
        raise ConfigError(f"{run_dir} has no events.jsonl, so nothing is proved. Name a run's "
                          f"folder, e.g. runs/NAME.") from error
    print(*map(plain, verdict.sentences()), sep="\n")
    return 0 if verdict.is_proved else 1


def _hosts(hosts_file: Path) -> int:
    from elastic_trainer.observe.report import print_hosts

    table = hosts_file.with_name(hosts_file.name + ".json")
    if not table.is_file():
        raise ConfigError(f"There is no table {table}. Start the poller: python -m "
                          f"elastic_trainer.discovery poll --hosts-file {hosts_file} …")
    print_hosts(json.loads(table.read_text()))
    return 0


def _watch(run_dir: Path) -> int:
    from elastic_trainer.observe.watch import watch

    watch(run_dir)
    return 0


def _report(run_dir: Path) -> int:
    from elastic_trainer.observe.picture import Film
    from elastic_trainer.observe.report import print_summary, summarize_log

    film = Film()
    print_summary(summarize_log(run_dir, film.shoot))
    print(*film.draw(), sep="\n")
    return 0
