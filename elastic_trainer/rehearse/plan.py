"""`elastic-trainer plan`: a fleet and a policy, rehearsed without processes.

    elastic-trainer plan --hosts 1000 --days 30 --storm rate=12/h,bulk=0.4,zero=0.001
    elastic-trainer plan --trace FILE --costs runs/NAME
    elastic-trainer plan --pool name=a,hosts=600,price=0.9,loss=0.05/h --pool name=b,hosts=400

command line → here → advice (questions, choices) → table, JSON, one sentence for each question
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from elastic_trainer.config import ConfigError
from elastic_trainer.host.options import Parser
from elastic_trainer.rehearse.advice import Choice, Fleet, Planner, Question
from elastic_trainer.rehearse.costs import Costs, read_costs, with_values
from elastic_trainer.rehearse.model import Policy
from elastic_trainer.rehearse.outcome import work_for
from elastic_trainer.rehearse.pools import HOUR_S, of_rows, parse_pool, parse_storm
from elastic_trainer.rehearse.trace import NOTICE_S, read_trace
from elastic_trainer.state.checkpoints.cadence import Cadence
from elastic_trainer.wire.plain import plain

SEEDS = 20
LIMITS = {"hosts": (1, 1e6), "days": (0, 36_500), "hours": (0, 876_000), "price": (1e-6, 1e9),
          "microbatches": (1, 1e9), "batch": (1, 1e12), "np": (1, 1e6), "min_np": (1, 1e6),
          "seeds": (1, 10_000), "notice": (0, 1e9)}
"""The least and the largest value of each option."""
MOST_BETWEEN = 1e9
"""Steps or seconds between two checkpoints."""
MOST_CPU_S = 1200.0
"""A month of each shipped storm with 100 hosts, 20 times, is below it."""
MEASURED_WORLD = 48
"""The largest world whose pauses were measured (tests/bench/world_size.py)."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    where = parser.add_argument_group("the fleet (one of them)")
    where.add_argument("--storm", metavar="rate=12/h,bulk=0.4,zero=0.1",
                       help="a generated fleet of --hosts hosts, as in replay")
    where.add_argument("--trace", type=Path, metavar="FILE",
                       help="a recorded fleet, as in replay; repeated if the time is longer")
    where.add_argument("--notice", type=float, metavar="SECONDS",
                       help=f"the notice of a removed node of the trace, as in replay "
                            f"({NOTICE_S:g})")
    where.add_argument("--pool", action="append", default=[],
                       metavar="name=a,hosts=500,price=0.9,loss=0.05/h",
                       help="hosts of one type and zone; repeat it for several pools")
    add("--hosts", type=int, help="hosts that are wanted, with --storm")
    add("--days", type=float,
        help="the time to rehearse, in days (default: that of the trace or the storm, or 30 days)")
    add("--hours", type=float, help="the same, in hours")
    add("--price", type=float, help="of a host for an hour, of a storm or a trace (1)")
    add("--costs", type=Path, metavar="runs/NAME", action="append", default=[],
        help="take the costs from the event log of a run or a replay; repeat it for several")
    add("--cost", action="append", default=[], metavar="NAME=NUMBER",
        help="set one cost, e.g. loss_s=0.5; repeat it for several")
    add("--microbatches", type=int, help="parts of the batch (default: the run's, or 4 for each "
                                         "host)")
    add("--batch", type=int, metavar="SAMPLES",
        help="samples of a step (default: the run's); a micro-batch takes as long as it has "
             "samples")
    add("--checkpoint-every", help="as in train(), 0: only the last (default: the run's or auto)")
    add("--no-standby", action="store_true", help="hosts have no standby")
    add("--np", type=int, help="workers to begin with, as in run (default: all hosts)")
    add("--min-np", type=int, default=1, help="wait while fewer are left (%(default)s)")
    add("--seeds", type=int, default=SEEDS, help="repetitions (%(default)s)")
    add("--json", action="store_true", help="print one JSON object")


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code. Raises ConfigError."""
    parser = Parser(
        prog="elastic-trainer plan", allow_abbrev=False,
        description="Rehearse a run on a fleet without processes: which checkpoint interval, "
                    "how many micro-batches, standbys and spare hosts, which pools, and what "
                    "goodput and price to expect.")
    add_options(parser)
    options = parser.parse_args(argv)
    began, began_cpu = time.perf_counter(), time.process_time()
    planner = planner_of(options)
    forecast = planner.forecast()
    questions = planner.questions()
    took_s = time.perf_counter() - began
    if options.json:
        print(json.dumps(as_json(planner, forecast, questions) | {
            "took_s": round(took_s, 2), "cpu_s": round(time.process_time() - began_cpu, 2)}))
    else:
        show(planner, forecast, questions, took_s)
    return 0


def planner_of(options: argparse.Namespace) -> Planner:
    """Return what answers, from the options. Raises ConfigError."""
    given = [name for name in ("storm", "trace", "pool") if getattr(options, name)]
    if len(given) != 1:
        raise ConfigError(f"The fleet is given by {len(given)} options. Give one of --storm, "
                          f"--trace and --pool, e.g. --hosts 100 --storm rate=12/h,bulk=0.4.")
    check(options)
    costs = with_values(read_costs(options.costs) if options.costs else Costs(), options.cost)
    if options.batch is not None:
        costs = of_batch(costs, options.batch)
    fleet, length_s = fleet_of(options)
    seconds = length_s
    if options.days is not None or options.hours is not None:
        seconds = 24 * HOUR_S * (options.days or 0.0) + HOUR_S * (options.hours or 0.0)
    check_fleet(fleet, options, seconds)
    every = options.checkpoint_every or costs.interval or "auto"
    try:
        cadence = Cadence.parse(every)
    except ValueError as error:
        raise ConfigError(f"--checkpoint-every: {error}") from error
    if max(cadence.steps or 0, cadence.seconds or 0) > MOST_BETWEEN:
        raise ConfigError(f"--checkpoint-every is {every}. Use at most {MOST_BETWEEN:g} steps or "
                          f"seconds.")
    microbatches = options.microbatches or costs.microbatches or 4 * fleet.hosts
    policy = Policy(microbatches=microbatches, checkpoint=cadence, standby=not options.no_standby,
                    first=options.np or fleet.hosts, fewest=options.min_np)
    return Planner(fleet, costs, policy, seconds, options.seeds, every)


def of_batch(costs: Costs, batch: int) -> Costs:
    """Return the costs with another number of samples in a step."""
    scale = batch / costs.batch if costs.microbatches else 1.0
    return replace(costs, batch=batch, microbatch_s=costs.microbatch_s * scale)


def fleet_of(options: argparse.Namespace) -> tuple[Fleet, float]:
    """Return the fleet and the seconds that it has by itself. Raises ConfigError."""
    month_s, price = 30 * 24 * HOUR_S, 1.0 if options.price is None else options.price
    if options.trace:
        notice_s = NOTICE_S if options.notice is None else options.notice
        rows = read_trace(options.trace, notice_s, may_end_empty=True)
        return Fleet(trace=of_rows(rows), price=price), rows[-1].time_s
    if options.pool:
        pools = tuple(map(parse_pool, options.pool))
        if len({pool.name for pool in pools}) < len(pools):
            raise ConfigError("Two pools have the same name. Give each --pool a name of its own.")
        return Fleet(pools=pools), month_s
    if options.hosts is None:
        raise ConfigError("--hosts is not given. A storm needs a number of hosts, e.g. "
                          "--hosts 100.")
    pool = parse_storm(options.storm).pool(options.hosts, price)
    return Fleet(pools=(pool,)), pool.until if math.isfinite(pool.until) else month_s


def check(options: argparse.Namespace) -> None:
    """Check what needs no fleet. Raises ConfigError."""
    for name, (least, most) in LIMITS.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}. Use a number from {least:g} "
                              f"to {most:g}.")
    if options.hosts is not None and not options.storm:
        raise ConfigError("--hosts is given, but only a --storm needs it. A trace has its hosts, "
                          "and a pool names them: --pool hosts=100.")
    if options.notice is not None and not options.trace:
        raise ConfigError("--notice is given, but only a --trace needs it. A storm and a pool have "
                          "the share of their losses that is announced: notice=0.8.")
    if options.price is not None and options.pool:
        raise ConfigError("--price is given, but a pool has its own: --pool hosts=100,price=0.9.")


def check_fleet(fleet: Fleet, options: argparse.Namespace, seconds: float) -> None:
    """Check that there is something to rehearse, and that it ends soon. Raises ConfigError."""
    if not 0.0 < seconds <= LIMITS["days"][1] * 24 * HOUR_S:
        raise ConfigError(f"The time to rehearse is {seconds:g} s. Give e.g. --days 30 or "
                          f"--hours 8.")
    if fleet.hosts < 1:
        raise ConfigError("The fleet has no hosts. Give e.g. --hosts 100.")
    if options.min_np > fleet.hosts:
        raise ConfigError(f"--min-np is {options.min_np}, and the fleet has {fleet.hosts} hosts, "
                          f"so it would never train. Use {fleet.hosts} or fewer.")
    if fleet.pools and not any(pool.price for pool in fleet.pools):
        raise ConfigError("All pools have price=0, and choices are compared by their price. Give "
                          "one of them a price.")
    if (cpu_s := fleet.cpu_s(seconds) * options.seeds) > MOST_CPU_S:
        raise ConfigError(f"To rehearse this fleet takes about {cpu_s / 60:.3g} min of CPU, and "
                          f"the limit is {MOST_CPU_S / 60:g} min. Use fewer --seeds, a shorter "
                          f"time or fewer losses.")


# --- what is printed ------------------------------------------------------------------------------

def as_json(planner: Planner, forecast: Choice, questions: Sequence[Question]) -> dict[str, Any]:
    """Return all that was found."""
    costs = {name: value for name, value in asdict(planner.costs).items() if name != "measured"}
    return {"seconds": planner.seconds, "hosts": planner.fleet.hosts,
            "seeds": len(planner.seeds), "microbatches": planner.policy.microbatches,
            "forecast": forecast.row() | counts(forecast),
            "questions": {one.name: [choice.row() for choice in one.choices]
                          for one in questions},
            "advice": {one.name: one.advice() for one in questions},
            "costs": costs, "measured": list(planner.costs.measured)}


def counts(choice: Choice) -> dict[str, float]:
    """Return the means of what happens in a run."""
    outcomes = choice.outcomes
    return {name: round(sum(getattr(one, name) for one in outcomes) / len(outcomes), 2)
            for name in ("changes", "attempts", "pausing_s", "waiting_s", "redone_s")}


def show(planner: Planner, forecast: Choice, questions: Sequence[Question],
         took_s: float) -> None:
    """Print the tables and the sentences for a person."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    title = (f"{planner.fleet.hosts} hosts for {planner.seconds / HOUR_S:.1f} h, "
             f"{len(planner.seeds)} repetitions")
    table = Table(box=box.SIMPLE, pad_edge=False, title=title, title_justify="left")
    for heading in ("", "goodput", "90 %", "samples/h", "price", "90 %"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    table.add_row("forecast, as given", *cells(forecast), end_section=True)
    for question in (one for one in questions if one.choices):
        table.add_row(Text(question.name, style="bold"))
        for choice in question.choices:
            name = f"{'*' if choice is question.best else ' '} {plain(choice.name)}"
            table.add_row(Text(name + " (given)" * choice.is_given), *cells(choice),
                          end_section=choice is question.choices[-1])
    console.print(table)
    for line in sentences(planner, forecast, questions, took_s):
        console.print(Text(plain(line)))


def cells(choice: Choice) -> list[str]:
    """Return the numbers of a row, with their bounds."""
    goodput, price = choice.goodput, choice.million
    return [f"{goodput[1]:.1%}", f"{100 * goodput[0]:.1f}–{100 * goodput[2]:.1f}",
            short(choice.samples_per_hour[1]), short(price[1]),
            f"{short(price[0])}–{short(price[2])}"]


def short(value: float) -> str:
    """Return a number with three digits: a row has to fit into 80 columns."""
    if math.isinf(value):
        return "∞"
    units = ["", "k", "M", "G", "T"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000.0
        units.pop(0)
    return f"{value:.3g}{units[0]}"


def sentences(planner: Planner, forecast: Choice, questions: Sequence[Question],
              took_s: float) -> list[str]:
    """Return what is printed below the table."""
    happens, costs, lines = counts(forecast), planner.costs, list[str]()
    if (idle := planner.fleet.hosts - planner.policy.microbatches) > 0:
        fitting = work_for(planner.fleet.hosts, planner.policy.microbatches, costs.batch)
        lines.append(f"WARNING: {planner.policy.microbatches} micro-batches leave {idle} of "
                     f"{planner.fleet.hosts} hosts without work, at the price of all. A fleet of "
                     f"this size needs e.g. {fitting}.")
    if idlers := sum(one.steps <= 0.0 for one in forecast.outcomes):
        lines.append(f"WARNING: {idlers} of {len(planner.seeds)} repetitions finish no step, so "
                     f"their price has no bound. Use a longer time, a smaller --min-np or shorter "
                     f"costs.")
    lines += ["The price is that of 10^6 samples. 90 % of the repetitions are between the bounds. "
              "* is advised.", f"A run has {happens['changes']:.0f} changes of its world and "
             f"{happens['attempts']:.1f} attempts. It pauses for {happens['pausing_s']:.0f} s, "
             f"waits for hosts for {happens['waiting_s']:.0f} s, and does "
             f"{happens['redone_s']:.0f} s again."]
    lines += [question.advice() for question in questions]
    if costs.batch == 1:
        lines.append("A step counts as one sample: --batch N has its samples.")
    missing = [name for name in ("loss_s", "change_s", "boot_s", "give_up_s", "microbatch_s")
               if name not in costs.measured]
    if missing:
        lines.append(f"Not measured, so by default: {', '.join(missing)}. --costs runs/NAME takes "
                     f"the costs from a run.")
    if planner.fleet.hosts > max(MEASURED_WORLD, costs.world):
        lines.append(f"Pauses of more than {MEASURED_WORLD} workers were never measured: each "
                     f"worker adds {costs.grow_s:g} s (--cost grow_s=…).")
    if costs.microbatches != planner.policy.microbatches or len(questions[1].choices) > 1:
        lines.append("A micro-batch of half the samples is taken to need half the time; "
                     "`elastic-trainer tune` measures it.")
    return [*lines, f"Rehearsed in {took_s:.1f} s."]
