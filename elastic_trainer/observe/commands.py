"""The commands that read: verify, watch, report and hosts. They do not change a run.

    elastic-trainer verify|watch|report runs/NAME
    elastic-trainer report runs/NAME --svg run.svg
    elastic-trainer hosts HOSTS_FILE

command line → here → the modules of this package

Functions import these modules, so that `elastic-trainer` starts fast.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_trainer.config import ConfigError
from elastic_trainer.wire.plain import plain

if TYPE_CHECKING:
    from elastic_trainer.observe.history import History
    from elastic_trainer.observe.timeline import Timeline

COMMANDS = ("verify", "watch", "report", "hosts")
_OF_RUNS = {"verify": "prove from the event log that no sample was lost or repeated",
            "watch": "show the progress of a run", "report": "show the summary of a run"}


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to a command line."""
    for name, purpose in _OF_RUNS.items():
        command = commands.add_parser(name, help=purpose)
        command.add_argument("run_dir", type=Path, help="e.g. runs/NAME")
        if name == "report":
            command.add_argument("--svg", type=Path, metavar="FILE",
                                 help="draw the run into this file")
            command.add_argument("--timeline", type=Path, metavar="FILE",
                                 help="join the timelines of all workers into this file")
    hosts = commands.add_parser("hosts", help="show the fleet's table")
    hosts.add_argument("hosts_file", type=Path, help="the poller's --hosts-file")


def run(options: argparse.Namespace) -> int:
    """Run one of the commands; returns the exit code. Raises ConfigError."""
    if options.command == "hosts":
        return show_hosts(options.hosts_file)
    folder: Path = options.run_dir
    try:
        if not folder.is_dir():
            raise ConfigError(f"There is no folder {folder}. Name a run's folder, e.g. runs/NAME.")
        match options.command:
            case "verify":
                return show_verdict(folder)
            case "watch":
                return show_progress(folder)
        return show_report(folder, options.svg, options.timeline)
    except PermissionError as error:
        raise ConfigError(
            f"This user may not read {error.filename}. Its owner lets a group in by: chgrp -R "
            f"GROUP {folder}; chmod -R g+rwX {folder}; find {folder} -type d -exec chmod g+s "
            f"{{}} +") from error


def show_verdict(run_dir: Path) -> int:
    """Print what is proved; returns 1 if anything is violated."""
    from elastic_trainer.observe.verify import verify

    _need_events(run_dir, "proved")
    verdict = verify(run_dir)
    print(*map(plain, verdict.sentences()), sep="\n")
    return 0 if verdict.is_proved else 1


def show_progress(run_dir: Path) -> int:
    """Show a run until it is over."""
    from elastic_trainer.observe.watch import watch

    watch(run_dir)
    return 0


def show_report(run_dir: Path, svg_file: Path | None, joined: Path | None = None) -> int:
    """Print the summary of a run, and draw it into a file if one is named."""
    from elastic_trainer.observe.picture import draw
    from elastic_trainer.observe.report import read_log
    from elastic_trainer.observe.summary_table import print_summary
    from elastic_trainer.observe.timeline import Timeline

    _need_events(run_dir, "reported")
    timeline = Timeline()
    history, result = read_log(run_dir, timeline.through)
    print_summary(result)
    print(*draw(timeline), sep="\n")
    if svg_file:
        write_svg(svg_file, timeline, history, result)
    show_phases(run_dir, joined)
    return 0


def show_phases(run_dir: Path, joined: Path | None) -> None:
    """Print what a step consists of, if the run has timelines. Raises ConfigError."""
    from elastic_trainer.observe import phases

    files = phases.files_of(run_dir)
    if rows := phases.rows_of(phases.events_of(files)):
        phases.print_phases(rows)
    if joined is None:
        return
    if not files:
        raise ConfigError(f"{run_dir} has no timeline. Start the run with --timeline.")
    try:
        phases.join(files, joined)
    except OSError as error:
        raise ConfigError(f"--timeline {joined} cannot be written: {error.strerror}. Name a file "
                          f"in a folder that exists and that you may write to.") from error


def write_svg(file: Path, timeline: Timeline, history: History, result: dict[str, Any]) -> None:
    """Write the picture of a run. Raises ConfigError."""
    from elastic_trainer.observe import svg

    if timeline.span is None:
        raise ConfigError(f"Run {result['run']} has {result['steps']} finished steps, and a "
                          f"picture needs 2. Call the command again later.")
    try:
        file.write_text(svg.draw(timeline, history.books.periods, result), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--svg {file} cannot be written: {error.strerror}. Name a file in a "
                          f"folder that exists and that you may write to.") from error


def show_hosts(hosts_file: Path) -> int:
    """Print the poller's table. Raises ConfigError."""
    from elastic_trainer.observe.fleet_table import print_hosts

    table = hosts_file.with_name(hosts_file.name + ".json")
    try:
        print_hosts(json.loads(table.read_text()))
    except FileNotFoundError as error:
        raise ConfigError(f"There is no table {table}. Start the poller: python -m "
                          f"elastic_trainer.discovery poll --hosts-file {hosts_file} …") from error
    except OSError as error:
        raise ConfigError(f"{table} cannot be read: {error.strerror}. Call it as the user of the "
                          f"poller.") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{table} is not the table of a poller ({type(error).__name__} {error}). "
                          f"Name the file that the poller got as --hosts-file.") from error
    return 0


def _need_events(run_dir: Path, done: str) -> None:
    from elastic_trainer.observe.segments import has_events

    if not has_events(run_dir):
        raise ConfigError(f"{run_dir} has no events.jsonl, so nothing is {done}. Name a run's "
                          f"folder, e.g. runs/NAME.")
