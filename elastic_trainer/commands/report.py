"""`elastic-trainer report`: the summary of a run, or of several side by side.

    elastic-trainer report runs/NAME|s3://BUCKET/NAME     also gs:// and az://
    elastic-trainer report runs/NAME --svg run.svg
    elastic-trainer report runs/A runs/B --prices prices.toml --markdown
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_trainer.commands.run_folders import (
    RUN,
    prices_of,
    require_events,
    run_folders,
)
from elastic_trainer.config import ConfigError
from elastic_trainer.host.modes import write_text
from elastic_trainer.host.options import Parser
from elastic_trainer.state.stores.by_url import BUCKETS
from elastic_trainer.wire.plain import plain

if TYPE_CHECKING:
    from elastic_trainer.events.run import Run
    from elastic_trainer.views.prices import Pricing

FILES = {"--prices": "the prices of the hosts (TOML), or ec2 to ask AWS, for what the run costs",
         "--html": "write the report as one page into this file",
         "--svg": "draw the run into this file",
         "--timeline": "join the timelines of all workers into this file",
         "--trace": "write the whole run as trace events (JSON) into this file, for Perfetto"}


def main(argv: Sequence[str]) -> int:
    """Print the summaries of runs, and write the files that are named. Raises ConfigError."""
    options = _parser().parse_args(argv)
    far = [place for place in options.run_dirs if place.startswith(BUCKETS)]
    if far and options.timeline:
        raise ConfigError(f"--timeline joins files of the workers, which {far[0]} does not have. "
                          f"Name the run's folder on its coordinator.")
    with run_folders(options.run_dirs) as (folders, _):
        report(folders, options)
    return 0


def _parser() -> Parser:
    parser = Parser(prog="elastic-trainer report", description="Show the summary of a run.")
    parser.add_argument("run_dirs", nargs="+", metavar="run_dir",
                        help=f"{RUN}; several are shown side by side")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print result.json's content")
    form.add_argument("--markdown", action="store_true", help="print a table in Markdown")
    for option, purpose in FILES.items():
        parser.add_argument(option, type=Path, metavar="FILE", help=purpose)
    return parser


def report(run_dirs: list[Path], options: argparse.Namespace) -> None:
    """Print the summaries of runs, and write the files that are named. Raises ConfigError."""
    for folder in run_dirs:
        require_events(folder, "reported")
    if len(run_dirs) > 1 and (options.svg or options.timeline or options.trace):
        raise ConfigError("--svg, --timeline and --trace are of one run. Name one folder.")
    prices = prices_of(options.prices)
    if options.html:
        write_page(run_dirs, options, prices)
    if options.json or options.markdown or (len(run_dirs) > 1 and not options.html):
        show_results(run_dirs, options, prices)
    if len(run_dirs) == 1:
        show_report(run_dirs[0], options, prices)


def show_results(run_dirs: list[Path], options: argparse.Namespace, prices: Pricing | None) -> None:
    """Print the summaries of runs for a program, in Markdown, or side by side."""
    from elastic_trainer.events.summary import json_of, summarize_log
    from elastic_trainer.views.tables import markdown, print_table, side_by_side

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
    from elastic_trainer.views.tables import print_summary

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
    from elastic_trainer.views import run_trace

    files = run_trace.files_of(run_dir)
    if is_shown and (rows := run_trace.rows_of(run_trace.events_of(files))):
        run_trace.print_phases(rows)
    if joined is None:
        return
    if not files:
        raise ConfigError(f"{run_dir} has no timeline. Start the run with --timeline.")
    with _writes("--timeline", joined):
        run_trace.join(files, joined)


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


def _with_costs(result: dict[str, Any], prices: Pricing | None) -> dict[str, Any]:
    """Return a result with what the run costs, if there are prices."""
    if prices is None:
        return result
    from elastic_trainer.views.prices import costs

    return result | {"costs": costs(result, prices)}
