"""`elastic-trainer watch`: the progress of a run in the terminal, as a page, as spans, or as lines.

    elastic-trainer watch runs/NAME|s3://BUCKET/NAME     also gs:// and az://
    elastic-trainer watch runs/A runs/B --web
    elastic-trainer watch runs/NAME --otel
    elastic-trainer watch runs/NAME --json [--kubernetes-events]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_trainer.commands.run_folders import RUN, prices_of, run_folders
from elastic_trainer.config import ConfigError
from elastic_trainer.host.options import Parser


def main(argv: Sequence[str]) -> int:
    """Show a run until it is over, or runs as pages until Ctrl-C; or send a run's spans. Raises
    ConfigError."""
    options = _parser().parse_args(argv)
    with run_folders(options.run_dirs) as (folders, far):
        _require_one_view(options)
        if options.json:
            return print_lines(folders[0], options.kubernetes_events)
        from elastic_trainer.events.segments import first_line

        for folder in folders:
            first_line(folder)  # a log that cannot be read ends here, and not in a thread
        if options.otel or options.web:
            for run in far:
                run.follow(tells=True)
        if options.otel:
            return send_spans(folders[0])
        prices = prices_of(options.prices, is_live=True)
        if not options.web:
            from elastic_trainer.views.watch import watch

            watch(folders[0], prices=prices, far=far[0] if far else None)
            return 0
        try:
            from elastic_trainer.views.live import open_runs
            from elastic_trainer.views.web import DEFAULT_BIND, serve
        except ImportError as error:
            raise ConfigError(f"--web needs aiohttp and prometheus_client ({error}). Install them: "
                              f"pip install 'elastic-trainer[web]'.") from error
        serve(open_runs(folders, prices, [run.folder for run in far]),
              options.bind or DEFAULT_BIND)
        return 0


def _parser() -> Parser:
    parser = Parser(prog="elastic-trainer watch", description="Show the progress of a run.")
    add = parser.add_argument
    add("run_dirs", nargs="+", metavar="run_dir", help=f"{RUN}; several with --web")
    add("--prices", type=Path, metavar="FILE",
        help="the prices of the hosts (TOML), or ec2 to ask AWS, for their rows; with --web also "
             "for what a run costs")
    add("--web", action="store_true",
        help="show runs as pages for a browser, and as metrics for Prometheus")
    add("--otel", action="store_true",
        help="send the run's attempts, generations and checkpoints as OpenTelemetry spans "
             "(OTEL_EXPORTER_OTLP_ENDPOINT)")
    add("--json", action="store_true",
        help="print each new event of the run as a line of JSON, until SIGTERM or Ctrl-C")
    add("--kubernetes-events", action="store_true",
        help="with --json: warnings and errors become Events of this pod, too")
    add("--bind", metavar="ADDRESS:PORT",
        help="where the page is (127.0.0.1:8765); another address than a loopback one needs the "
             "token that is printed")
    return parser


def _require_one_view(options: argparse.Namespace) -> None:
    if options.web + options.otel + options.json > 1:
        raise ConfigError("--web shows the run, --otel sends its spans, and --json prints its "
                          "events. Call the command once with each.")
    if options.kubernetes_events and not options.json:
        raise ConfigError("--kubernetes-events tells what --json prints. Add --json.")
    if options.bind and not options.web:
        raise ConfigError(f"--bind is {options.bind}, but only a page has an address. Add --web.")
    if options.prices and (options.otel or options.json):
        what, view = ("spans", "--otel") if options.otel else ("events", "--json")
        raise ConfigError(f"--prices is {options.prices}, but {what} have no prices. Leave out "
                          f"{view} or --prices.")
    if len(options.run_dirs) > 1 and not options.web:
        raise ConfigError(f"{len(options.run_dirs)} runs are named, and this view shows one. Name "
                          f"one folder, or add --web.")


def send_spans(run_dir: Path) -> int:
    """Send a run's spans until it is over; returns 1 if a collector has not taken all."""
    from elastic_trainer.views.spans import export, exporter

    sent, lost = export(run_dir, exporter())
    print(f"{sent} spans were sent.")
    if lost:
        print(f"elastic-trainer: {lost} spans were not taken. Look at the collector "
              f"(OTEL_EXPORTER_OTLP_ENDPOINT), and call the command again.", file=sys.stderr)
    return 1 if lost else 0


def print_lines(run_dir: Path, to_kubernetes: bool) -> int:
    """Print a run's new events until a signal; returns 0."""
    from elastic_trainer.views.kubernetes_events import Teller, subject_in
    from elastic_trainer.views.log_lines import print_lines as follow

    teller = Teller(subject_in(os.environ)) if to_kubernetes else None
    follow(run_dir, sys.stdout.buffer, teller)
    return 0
