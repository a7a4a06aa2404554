"""`elastic-trainer replay`: a script of the user's, on local hosts that come and go as in a trace.

    elastic-trainer replay --storm rough --twin
    elastic-trainer replay --trace FILE --speed 30 --hosts 4 -- python my_train.py
    elastic-trainer replay --storm rate=12/h,bulk=0.4,zero=0.1,seed=7 -- python my_train.py

command line → here → trace or storm → timetable → stage (the real launcher) → outcome

What always holds:
1. The run is one of `elastic-trainer run`, with the options that are not replay's own. It has a
   folder like any other run, so that report, verify and watch read it.
2. Ctrl-C, SIGTERM and the end of this process end the run and all its workers.

What it does not do: rehearse a network or a boot of machines. Local hosts share the processor, the
memory and, where there is one, the first GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from elastic_trainer.config import EXIT_INTERRUPTED, ConfigError, unusable
from elastic_trainer.events.segments import EVENTS_FILE
from elastic_trainer.events.sentences import count
from elastic_trainer.host import own
from elastic_trainer.host.modes import make_folder, private, write_text
from elastic_trainer.host.options import Parser
from elastic_trainer.measure.trial import gibibytes, limit_bytes
from elastic_trainer.rehearse import pools, trace
from elastic_trainer.rehearse.outcome import (
    Outcome,
    cost_of_useful_hour,
    larger,
    outcome_of,
    played_of,
    rows_played,
)
from elastic_trainer.rehearse.stage import Stage, play, started
from elastic_trainer.rehearse.trace import Moment, peak, timetable
from elastic_trainer.wire.plain import plain, plain_output

HOSTS, SPEED = 4, 10.0
HOST_BYTES = 6 * 2**27
"""The memory of a worker of the demo with torch (0.5 GiB), and half of that as a reserve."""
LEAST_HOSTS, HOSTS_EACH_CORE = 4, 2
OUTPUT, OUTCOME, PLAYED, LAST_LINES = "output.log", "rehearsal.json", "trace.csv", 15
OURS = ("-H", "-hostfile", "--hostfile", "--host-discovery-script", "-np", "--num-proc", "--min-np",
        "--min-num-proc", "--workers", "--min-workers", "--standby")
"""Options of `run` that name hosts and workers: the trace does that."""


class Price(NamedTuple):
    """Of a host for an hour."""

    currency: str
    spot: float
    on_demand: float

Require = Callable[[list[str], argparse.ArgumentParser, str], None]


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A rehearsal as it was asked for."""

    run_dir: Path
    command: list[str]
    options: list[str]
    """For `elastic-trainer run`."""
    source: str
    speed: float
    moments: list[Moment]
    has_twin: bool
    price: Price | None

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts at the start."""
        return self.moments[0].joined

    def launcher(self, name: str, hosts: Sequence[str]) -> list[str]:
        """Return the command of a run with this name, with the options that name its hosts."""
        return own.command("elastic_trainer", "run", "--run", name, "--runs-dir",
                           str(self.run_dir.parent), *hosts, *self.options, "--", *self.command)


def run(argv: Sequence[str], examples: Sequence[str],
        demo: Callable[[str, argparse.Namespace], list[str]], require_known: Require) -> int:
    """Run the command; returns the exit code. `demo` returns the command of an example, and
    `require_known` refuses what `run` does not take. Raises ConfigError."""
    wanted = parse(argv, examples, demo, require_known)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # nohup
                signal.signal(number, _interrupt)
        return rehearse(wanted)
    except KeyboardInterrupt:
        print(f"elastic-trainer: The rehearsal was stopped, and its run has ended. Look at it: "
              f"elastic-trainer report {typed(wanted.run_dir)}", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- what is asked for ----------------------------------------------------------------------------

def parser_of(examples: Sequence[str]) -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="elastic-trainer replay",
        usage="%(prog)s --storm rough|--trace FILE [options] -- python my_train.py …\n"
              "       %(prog)s --storm rough [--example gpt] [options]",
        description="Rehearse a spot fleet with your own script: local hosts join, get notices and "
                    "are lost as in a trace, and the result is judged.",
        epilog="The options of `elastic-trainer run` are taken, too, e.g. --store or --config.")
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--storm", metavar="NAME|rate=12/h,…",
                       help=f"a shipped storm ({', '.join(pools.SHIPPED)}), or one of your own: "
                            f"rate=12/h,bulk=0.4,zero=0.1,notice=0.8,replace=180,hours=24,seed=7")
    which.add_argument("--trace", type=Path, metavar="FILE",
                       help="a recorded fleet: CSV of time_s,event,host, or of "
                            "milliseconds,add|remove,node")
    add("--speed", type=float, default=SPEED, metavar="K",
        help="play the trace K times as fast, notices too (%(default)g)")
    add("--hosts", type=int, metavar="N",
        help=f"the most local hosts; a larger fleet is scaled down ({HOSTS})")
    add("--notice", type=float, default=trace.NOTICE_S, metavar="SECONDS",
        help="the notice of a removed node, in seconds of the trace (%(default)g); 0: none")
    add("--twin", action="store_true",
        help="train the undisturbed twin afterwards, and compare the bits of the weights")
    add("--prices", type=Path, metavar="FILE",
        help="a TOML file with the prices of a host, as `report` reads it")
    add("--run", metavar="NAME", help="the run's name (runs/NAME)")
    add("--runs-dir", type=Path, default=Path("runs"), help="where runs are kept (%(default)s)")
    add("--example", choices=examples, help=f"rehearse a demo ({examples[0]})")
    add("--steps", type=int, help="demo: the number of steps")
    add("--seed", type=int, help="demo: the seed")
    return parser


def parse(argv: Sequence[str], examples: Sequence[str],
          demo: Callable[[str, argparse.Namespace], list[str]],
          require_known: Require) -> Rehearsal:
    """Read the command line. Raises ConfigError."""
    parser = parser_of(examples)
    ours, command = parser.command_of(argv)
    options, others = parser.parse_known_args(ours)
    if options.storm is None and options.trace is None:
        require_known(others, parser, "elastic-trainer replay")
        parser.error("one of the arguments --storm --trace is required")
    check(options, others, command)
    require_known(others, parser, "elastic-trainer replay")
    rows = rows_of(options)
    moments = timetable(rows, hosts_of(options.hosts, peak(rows)), options.speed)
    name = options.run or f"replay-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = (options.runs_dir / name).resolve()
    require_new(run_dir)
    return Rehearsal(
        run_dir=run_dir, command=command or demo(options.example or examples[0], options),
        options=others, source=f"{options.trace or options.storm}", speed=options.speed,
        moments=moments, has_twin=options.twin, price=price_of(options.prices))


def require_new(run_dir: Path) -> None:
    """Check that there is neither the run nor its twin. Raises ConfigError."""
    for folder in (run_dir, twin_of(run_dir)):
        log = folder / EVENTS_FILE
        try:
            is_there = log.exists() and log.stat().st_size  # 0: the launcher has refused to start
        except OSError as error:
            raise unusable(Path(shown(folder)), error) from error
        if is_there:
            raise ConfigError(f"There is a run {shown(folder)}, and a rehearsal begins with new "
                              f"ones. Use another name (--run).")


def check(options: argparse.Namespace, others: Sequence[str], command: Sequence[str]) -> None:
    """Check what does not need the trace. Raises ConfigError."""
    if taken := [word for word in others if word.partition("=")[0] in OURS]:
        raise ConfigError(f"{taken[0]} is given, but the trace names the hosts of a rehearsal. Use "
                          f"--hosts for the largest number of local hosts.")
    if not command and (words := [word for word in others if not word.startswith("-")][:1]):
        if not any(word.startswith("-") for word in others):
            raise ConfigError(f"{words[0]!r} is no option. A command comes after --: -- "
                              f"{shlex.join(others)}")
    for name in ("example", "steps", "seed"):
        if command and getattr(options, name) is not None:
            raise ConfigError(f"--{name} is an option of the demo, and a command is given. If it "
                              f"is your script's option, put it after the script's name.")
    for name, least in (("speed", 0.001), ("notice", 0.0)):
        if not least <= getattr(options, name) <= 1e6:
            raise ConfigError(f"--{name} is {getattr(options, name):g}. Use a number from "
                              f"{least:g} to 1000000.")
    if options.run is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", options.run):
        raise ConfigError(f"--run is {options.run!r}, which cannot name a folder. Use letters, "
                          f"digits, '.', '_' and '-', with a letter or digit first.")


def rows_of(options: argparse.Namespace) -> list[trace.Row]:
    """Return the rows of the trace or the storm. Raises ConfigError."""
    if options.trace:
        return trace.read_trace(options.trace, options.notice)
    return pools.rows_of(pools.parse_storm(options.storm), hosts_of(options.hosts, HOSTS))


def hosts_of(wanted: int | None, most: int) -> int:
    """Return the number of local hosts. Raises ConfigError if this machine has no room for them."""
    room = room_of(len(os.sched_getaffinity(0)), limit_bytes())
    given = min(most, HOSTS) if wanted is None else wanted
    if given < 1 or given > room:
        raise ConfigError(
            f"--hosts is {given}, and this machine has {len(os.sched_getaffinity(0))} cores and "
            f"{gibibytes(limit_bytes())} of free memory, which is room for {room} local hosts. "
            + (f"Use --hosts {min(HOSTS, room)}." if room else "Free some memory."))
    return given


def twin_of(run_dir: Path) -> Path:
    """Return the folder of the undisturbed twin."""
    return run_dir.with_name(run_dir.name + "-twin")


def price_of(file: Path | None) -> Price | None:
    """Return the price of a local host for an hour. Raises ConfigError."""
    if file is None:
        return None
    from elastic_trainer.views import prices

    found = prices.load(file)
    host = found.of("127.0.0.1", "")
    return Price(found.currency, host.spot, host.on_demand)


def room_of(cores: int, memory_bytes: int) -> int:
    """Return how many local hosts a machine has room for."""
    return min(max(LEAST_HOSTS, HOSTS_EACH_CORE * cores), memory_bytes // HOST_BYTES)


# --- the rehearsal --------------------------------------------------------------------------------

def rehearse(wanted: Rehearsal) -> int:
    """Play the trace, judge the run, and print the judgement; returns the exit code."""
    from elastic_trainer.events.segments import Reader
    from elastic_trainer.events.summary import summarize_log
    from elastic_trainer.views.verify import verify

    run_dir = wanted.run_dir
    try:
        stage = Stage(run_dir, wanted.hosts)
    except OSError as error:
        raise unusable(Path(shown(run_dir)), error) from error
    print(f"rehearsal {run_dir.name}: {wanted.source} on {len(wanted.hosts)} local hosts, "
          f"{wanted.speed:g} times as fast; the run is in {shown(run_dir)}. Stop it with Ctrl-C",
          flush=True)
    code = follow(wanted, run_dir, ["--host-discovery-script", own.listing(str(stage.file)),
                                    "-np", "1", "--min-np", "1"], stage)
    twin = train_twin(wanted) if wanted.has_twin and code == 0 else None
    if code:
        print_end(run_dir / OUTPUT)
    result = summarize_log(run_dir)
    if code and not result["steps"]:
        print(f"rehearsal FAILED: its run ended with exit code {code}, before its first step. The "
              f"reason is above", flush=True)
        return code
    events = list(Reader(run_dir).events(to_the_end=True))
    played = played_of(events)
    outcome = outcome_of(played, verify(run_dir), result, twin)
    write_text(run_dir / PLAYED, trace.text_of(rows_played(events, wanted.hosts)))
    write_text(run_dir / OUTCOME, json.dumps(
        {"source": wanted.source, "speed": wanted.speed, **outcome.as_json()}, indent=2) + "\n")
    print_outcome(wanted, outcome, larger(played) if played.microbatches else "")
    return 0 if outcome.is_right else code or 1


def follow(wanted: Rehearsal, run_dir: Path, hosts: Sequence[str], stage: Stage | None) -> int:
    """Run the launcher, show its progress and play the trace, if there is a stage; returns its
    exit code."""
    from elastic_trainer.views.watch import Watch

    watch = Watch(run_dir)
    with open(run_dir / OUTPUT, "ab", opener=private) as output:
        with started(wanted.launcher(run_dir.name, hosts), output) as process:
            watch.start()
            try:
                if stage is None:
                    return process.wait()
                first, *others = wanted.moments
                return play(process, stage, [first._replace(joined=()), *others],
                            lambda: watch.status, trace=wanted.source, speed=wanted.speed)
            finally:
                watch.stop()


def train_twin(wanted: Rehearsal) -> str:
    """Train the undisturbed twin; return the digest of its weights, "" if it did not finish."""
    from elastic_trainer.events.summary import summarize_log

    run_dir = twin_of(wanted.run_dir)
    make_folder(run_dir)
    print(f"the undisturbed twin: {len(wanted.hosts)} workers, in {shown(run_dir)}", flush=True)
    code = follow(wanted, run_dir, ["--workers", str(len(wanted.hosts)), "--standby", "0"], None)
    if code:
        print_end(run_dir / OUTPUT)
        return ""
    return summarize_log(run_dir)["weights_sha256"] or ""


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


# --- what is printed ------------------------------------------------------------------------------

def print_outcome(wanted: Rehearsal, outcome: Outcome, fleet: str) -> None:
    """Print the judgement as a table, the verdict in one line, and the next commands. `fleet`: a
    larger one for `plan`; "": plan cannot read the costs of this run."""
    from rich.console import Console
    from rich.text import Text

    from elastic_trainer.views.tables import Table, print_table

    console = Console()
    print_table(Table([], rows(outcome, wanted.price),
                      title=f"rehearsal {wanted.run_dir.name}: {wanted.source}"), console=console)
    for fault in outcome.faults:
        console.print(Text(plain(f"wrong: {fault}"), style="red"), soft_wrap=True)
    verdict = ("passed: each sample counted once" if outcome.is_right else
               f"FAILED: {count(len(outcome.faults), 'reason')} above")
    console.print(Text(f"rehearsal {verdict}", style="bold green" if outcome.is_right else
                       "bold red"), soft_wrap=True)
    folder, page = typed(wanted.run_dir), typed(wanted.run_dir / "report.html")
    console.print(Text(f"next: elastic-trainer report {folder} --html {page}"), soft_wrap=True)
    if fleet:
        console.print(Text(f"a larger fleet: elastic-trainer plan --costs {folder} {fleet}"),
                      soft_wrap=True)


def rows(outcome: Outcome, price: Price | None) -> list[tuple[str, str]]:
    """Return the outcome as pairs of a label and a text."""
    stall = ("none" if outcome.stall_per_failure_s is None else
             f"{outcome.stall_per_failure_s:.2f} s, {count(outcome.failures, 'failure')}")
    found = [("trace", outcome.played), ("samples", outcome.samples),
             ("lineage", outcome.lineage), ("bits", outcome.bits),
             ("goodput", f"{outcome.goodput:.1%} here; {outcome.forecast_goodput:.1%} is the "
                         f"forecast at the trace's own speed"),
             ("stall per failure", stall)]
    if price:
        cost = cost_of_useful_hour(outcome.mean_hosts, outcome.forecast_goodput, price.spot)
        other = outcome.mean_hosts * price.on_demand
        saved = f", so spot saves {1.0 - cost / other:.0%}" if other > cost else ""
        found.append(("forecast of cost",
                      f"{cost:.2f} {price.currency} for an hour of useful training on "
                      f"{outcome.mean_hosts:.1f} hosts; on demand {other:.2f}{saved}"))
    return found


def print_end(log: Path) -> None:
    """Print the last lines of a launcher's output, before its summary, on stderr."""
    lines = end_of(log.read_text(errors="replace"), log.parent.name)
    print(f"the last lines of {shown(log)}:", *map(plain_output, lines), sep="\n", file=sys.stderr)


def end_of(output: str, name: str) -> list[str]:
    """Return the last lines of the output of a run, before its summary: a traceback is there."""
    summaries = list(re.finditer(rf"^run {re.escape(name)}\s*$", output, re.MULTILINE))
    return output[: summaries[-1].start() if summaries else None].splitlines()[-LAST_LINES:]


def shown(path: Path) -> str:
    """Return a path as a person names it here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def typed(path: Path) -> str:
    """Return a path as a person types it here in a command."""
    name = shown(path)
    return shlex.quote(f"./{name}" if name.startswith("-") else name)
