"""The commands that read: verify, watch, report and hosts. They do not change a run.

    elastic-trainer verify|watch|report runs/NAME
    elastic-trainer watch|report|verify s3://BUCKET/NAME
    elastic-trainer watch runs/A runs/B --web
    elastic-trainer report runs/NAME --svg run.svg
    elastic-trainer report runs/A runs/B --prices prices.toml --markdown
    elastic-trainer hosts HOSTS_FILE

command line → here → the modules of this package

Functions import these modules, so that `elastic-trainer` starts fast.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_trainer.config import ConfigError
from elastic_trainer.host.modes import write_text
from elastic_trainer.wire.plain import plain

if TYPE_CHECKING:
    from elastic_trainer.events.run import Run
    from elastic_trainer.views.far import FarRun
    from elastic_trainer.views.prices import Pricing

BUCKET = "s3://"
RUN = "e.g. runs/NAME, or s3://BUCKET/NAME of a fleet"
COMMANDS = ("verify", "watch", "report", "hosts")
_OF_RUNS = {"verify": "prove from the event log that no sample was lost or repeated",
            "watch": "show the progress of a run", "report": "show the summary of a run"}
_FILES = {"--prices": "the prices of the hosts (TOML), or ec2 to ask AWS, for what the run costs",
          "--html": "write the report as one page into this file",
          "--svg": "draw the run into this file",
          "--timeline": "join the timelines of all workers into this file",
          "--trace": "write the whole run as trace events (JSON) into this file, for Perfetto"}


def add_commands(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the commands to a command line."""
    verify, watch, shown = (commands.add_parser(name, help=purpose)
                            for name, purpose in _OF_RUNS.items())
    verify.add_argument("run_dir", help=RUN)
    _add_watch(watch)
    _add_report(shown)
    hosts = commands.add_parser("hosts", help="show the fleet's table")
    hosts.add_argument("hosts_file", type=Path, help="the poller's --hosts-file")


def _add_watch(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dirs", nargs="+", metavar="run_dir",
                         help=f"{RUN}; several with --web")
    command.add_argument("--prices", type=Path, metavar="FILE",
                         help="the prices of the hosts (TOML), or ec2 to ask AWS, for their rows; "
                         "with --web also for what a run costs")
    command.add_argument("--web", action="store_true",
                         help="show runs as pages for a browser, and as metrics for Prometheus")
    command.add_argument("--otel", action="store_true",
                         help="send the run's attempts, generations and checkpoints as "
                         "OpenTelemetry spans (OTEL_EXPORTER_OTLP_ENDPOINT)")
    command.add_argument("--bind", metavar="ADDRESS:PORT",
                         help="where the page is (127.0.0.1:8765); another address than a loopback "
                         "one needs the token that is printed")


def _add_report(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dirs", nargs="+", metavar="run_dir",
                         help=f"{RUN}; several are shown side by side")
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print result.json's content")
    form.add_argument("--markdown", action="store_true", help="print a table in Markdown")
    for option, purpose in _FILES.items():
        command.add_argument(option, type=Path, metavar="FILE", help=purpose)


def run(options: argparse.Namespace) -> int:
    """Run one of the commands; returns the exit code. Raises ConfigError."""
    if options.command == "hosts":
        return show_hosts(options.hosts_file)
    places: list[str] = [options.run_dir] if options.command == "verify" else options.run_dirs
    far = [place for place in places if place.startswith(BUCKET)]
    if far and options.command == "report" and options.timeline:
        raise ConfigError(f"--timeline joins files of the workers, which {far[0]} does not have. "
                          f"Name the run's folder on its coordinator.")
    if not far:
        return _run_on([Path(place) for place in places], options, [])
    from elastic_trainer.views.far import opened

    with ExitStack() as stack:
        runs = {place: stack.enter_context(opened(place)) for place in dict.fromkeys(far)}
        folders = [runs[place].folder if place in runs else Path(place) for place in places]
        return _run_on(folders, options, [*runs.values()])


def _run_on(folders: list[Path], options: argparse.Namespace, far: list[FarRun]) -> int:
    """Run a command on folders. `far`: the runs in buckets that some of them are copies of."""
    try:
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError(f"There is no folder {folder}. Name a run's folder, e.g. "
                                  f"runs/NAME.")
        match options.command:
            case "verify":
                return show_verdict(folders[0])
            case "watch":
                return show_progress(folders, options, far)
            case _:
                return report(folders, options)
    except PermissionError as error:
        raise ConfigError(
            f"This user may not read {error.filename}. Its owner lets a group in by: chgrp -R "
            f"GROUP {folders[0]}; chmod -R g+rwX {folders[0]}; find {folders[0]} -type d -exec "
            f"chmod g+s {{}} +") from error


def show_verdict(run_dir: Path) -> int:
    """Print what is proved; returns 1 if anything is violated."""
    from elastic_trainer.views.verify import verify

    _need_events(run_dir, "proved")
    verdict = verify(run_dir)
    print(*map(plain, verdict.sentences()), sep="\n")
    return 0 if verdict.is_proved else 1


def show_progress(run_dirs: list[Path], options: argparse.Namespace, far: list[FarRun]) -> int:
    """Show a run until it is over, or runs as pages until Ctrl-C; or send a run's spans."""
    if options.web and options.otel:
        raise ConfigError("--web shows the run, and --otel sends its spans. Call the command once "
                          "with each.")
    if options.bind and not options.web:
        raise ConfigError(f"--bind is {options.bind}, but only a page has an address. Add --web.")
    if options.prices and options.otel:
        raise ConfigError(f"--prices is {options.prices}, but spans have no prices. Leave out "
                          f"--otel or --prices.")
    if len(run_dirs) > 1 and not options.web:
        raise ConfigError(f"{len(run_dirs)} runs are named, and this view shows one. Name one "
                          f"folder, or add --web.")
    for folder in run_dirs:
        _need_readable(folder)
    if options.otel or options.web:
        for run in far:
            run.follow(tells=True)
    if options.otel:
        return send_spans(run_dirs[0])
    if options.web:
        from elastic_trainer.views.overview import open_runs
        from elastic_trainer.views.web import DEFAULT_BIND, serve

        serve(open_runs(run_dirs, _prices(options), [run.folder for run in far]),
              options.bind or DEFAULT_BIND)
        return 0
    from elastic_trainer.views.watch import watch

    watch(run_dirs[0], prices=_prices(options), far=far[0] if far else None)
    return 0


def send_spans(run_dir: Path) -> int:
    """Send a run's spans until it is over; returns 1 if a collector has not taken all."""
    from elastic_trainer.views.spans import export, exporter

    sent, lost = export(run_dir, exporter())
    print(f"{sent} spans were sent.")
    if lost:
        print(f"elastic-trainer: {lost} spans were not taken. Look at the collector "
              f"(OTEL_EXPORTER_OTLP_ENDPOINT), and call the command again.", file=sys.stderr)
    return 1 if lost else 0


def report(run_dirs: list[Path], options: argparse.Namespace) -> int:
    """Print the summaries of runs, and write the files that are named. Raises ConfigError."""
    for folder in run_dirs:
        _need_events(folder, "reported")
    if len(run_dirs) > 1 and (options.svg or options.timeline or options.trace):
        raise ConfigError("--svg, --timeline and --trace are of one run. Name one folder.")
    prices = _prices(options)
    if options.html:
        write_page(run_dirs, options, prices)
    if options.json or options.markdown or (len(run_dirs) > 1 and not options.html):
        show_results(run_dirs, options, prices)
    if len(run_dirs) == 1:
        show_report(run_dirs[0], options, prices)
    return 0


def show_results(run_dirs: list[Path], options: argparse.Namespace, prices: Pricing | None) -> None:
    """Print the summaries of runs for a program, in Markdown, or side by side."""
    from elastic_trainer.events.summary import json_of, summarize_log
    from elastic_trainer.views.summary_table import side_by_side
    from elastic_trainer.views.tables import markdown, print_table

    results = [_with_costs(summarize_log(folder), prices) for folder in run_dirs]
    if options.json:
        print(json_of(results[0] if len(results) == 1 else results))
    elif options.markdown:
        print(markdown(side_by_side(results)))
    else:
        print_table(side_by_side(results))


def write_page(run_dirs: list[Path], options: argparse.Namespace, prices: Pricing | None) -> None:
    """Write the page about a run, or about several. Raises ConfigError."""
    from dataclasses import replace

    from elastic_trainer.views.page import page, read

    runs = [replace(run, result=_with_costs(dict(run.result), prices))
            for run in map(read, run_dirs)]
    with _writes("--html", options.html):
        write_text(options.html, page(runs))
    _tell(f"The report is in {options.html}.", options)


def show_report(run_dir: Path, options: argparse.Namespace, prices: Pricing | None) -> None:
    """Print the summary of a run, unless another form is asked for, and write its files."""
    from elastic_trainer.events.summary import read_run
    from elastic_trainer.views.run_trace import told_for_marks, write_trace
    from elastic_trainer.views.summary_table import print_summary

    is_shown = not (options.html or options.json or options.markdown)
    if not (is_shown or options.svg or options.timeline or options.trace):
        return
    run, result = read_run(run_dir, told_for_marks() if options.trace else None)
    if is_shown:
        print_summary(_with_costs(result, prices))
    if options.svg:
        write_svg(options.svg, run, result)
    show_phases(run_dir, options.timeline, is_shown=is_shown)
    if options.trace:
        with _writes("--trace", options.trace):
            told = write_trace(run, run_dir, options.trace)
        _tell(told, options)


def show_phases(run_dir: Path, joined: Path | None, *, is_shown: bool) -> None:
    """Print what a step consists of, if the run has timelines. Raises ConfigError."""
    from elastic_trainer.views import phases

    files = phases.files_of(run_dir)
    if is_shown and (rows := phases.rows_of(phases.events_of(files))):
        phases.print_phases(rows)
    if joined is None:
        return
    if not files:
        raise ConfigError(f"{run_dir} has no timeline. Start the run with --timeline.")
    with _writes("--timeline", joined):
        phases.join(files, joined)


def write_svg(file: Path, run: Run, result: dict[str, Any]) -> None:
    """Write the picture of a run. Raises ConfigError."""
    from elastic_trainer.views.run_picture import file_of

    if run.span is None:
        raise ConfigError(f"Run {result['run']} has {result['steps']} finished steps, and a "
                          f"picture needs 2. Call the command again later.")
    with _writes("--svg", file):
        write_text(file, file_of(run, run.closed().periods.all(), result))


@contextmanager
def _writes(option: str, file: Path) -> Iterator[None]:
    """Write a file that an option names. Raises ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {file} cannot be written: {error.strerror}. Name a file in a "
                          f"folder that exists and that you may write to.") from error


def _tell(text: str, options: argparse.Namespace) -> None:
    """Print a line about a file. It is no part of an output that a program reads."""
    is_read = options.json or options.markdown
    print(plain(text), file=sys.stderr if is_read else sys.stdout)


def _prices(options: argparse.Namespace) -> Pricing | None:
    if not options.prices:
        return None
    if options.prices != Path("ec2"):
        from elastic_trainer.views.prices import load

        return load(options.prices)
    from elastic_trainer.views.ec2_prices import Ec2Prices

    prices = Ec2Prices()
    if options.command == "watch":
        prices.follow()
    return prices


def _with_costs(result: dict[str, Any], prices: Pricing | None) -> dict[str, Any]:
    """Return a result with what the run costs, if there are prices."""
    if prices is None:
        return result
    from elastic_trainer.views.prices import costs

    return result | {"costs": costs(result, prices)}


def show_hosts(hosts_file: Path) -> int:
    """Print the poller's table. Raises ConfigError."""
    from elastic_trainer.views.fleet_table import print_hosts

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


def _need_readable(run_dir: Path) -> None:
    """Raise OSError if a log that is there cannot be read, before a thread or a server meets it."""
    from elastic_trainer.events.segments import first_line

    first_line(run_dir)


def _need_events(run_dir: Path, done: str) -> None:
    from elastic_trainer.events.segments import has_events

    if not has_events(run_dir):
        raise ConfigError(f"{run_dir} has no events.jsonl, so nothing is {done}. Name a run's "
                          f"folder, e.g. runs/NAME.")
