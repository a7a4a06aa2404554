"""`elastic-trainer scaling`: how the steps of a script scale with the workers, beside DDP.

    elastic-trainer scaling --workers 1,2,4 -- python my_train.py
    elastic-trainer scaling --example images --plot scaling.png

command line → here → worlds (a few steps of each case, arms in turns) → cases → table, plot, JSON

What it does not do: measure DDP on a script of the user's, because a DDP loop cannot be derived
from it. The demos have a DDP loop of their own (examples/ddp.py). And import matplotlib before a
picture is asked for: it is an optional extra.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from elastic_trainer.config import REDUCERS, ConfigError
from elastic_trainer.host import own
from elastic_trainer.host.modes import write_text
from elastic_trainer.host.options import Parser
from elastic_trainer.measure import cases, worlds
from elastic_trainer.measure.cases import PEER, Case, Row
from elastic_trainer.wire.redact import redacted_command

TITLES = {"strong": "strong scaling: the same global batch",
          "weak": "weak scaling: the same batch for each worker"}


def require_plot(file: Path) -> None:
    """Raise ConfigError if a picture could not be drawn or written: before anything is measured."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed. Install it: pip "
                          "install 'elastic-trainer[plots]'. Or leave --plot out.")
    if not file.absolute().parent.is_dir() or file.suffix != ".png":
        raise ConfigError(f"--plot is {str(file)!r}. Name a file NAME.png in a folder that exists.")


def draw(rows: Sequence[Row], modes: Sequence[str], file: Path) -> None:
    """Write the picture. Raises ConfigError."""
    import matplotlib
    from matplotlib.figure import Figure

    del matplotlib  # its back end is chosen by Figure: no window
    figure = Figure(figsize=(5.5 * len(modes), 4.2), layout="constrained")
    for place, mode in enumerate(modes):
        axes = figure.add_subplot(1, len(modes), place + 1)
        for arm in dict.fromkeys(row.case.arm for row in rows):
            mine = sorted((row for row in rows if row.case.arm == arm and row.case.scale
                           == (row.case.workers if mode == "weak" else 1)),
                          key=lambda row: row.case.workers)
            sizes = [row.case.workers for row in mine]
            line, = axes.plot(sizes, [row.rate for row in mine], marker="o", label=arm)
            axes.plot(sizes, [mine[0].rate * size for size in sizes], linestyle=":", linewidth=1,
                      color=line.get_color())
        axes.set(title=TITLES[mode], xlabel="workers", ylabel="samples/s", ylim=(0, None),
                 xticks=sorted({row.case.workers for row in rows}))
        axes.grid(alpha=0.3)
        axes.legend(title="dotted: ideal")
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {file} cannot be written: {error.strerror}. Name a file in a "
                          f"folder that you may write to.") from error


DEMOS = {
    "gpt": (32, []),
    "images": (32, ["--width", "64", "--ema", "0", "--evaluate-every", "1000000 steps"]),
}
"""The global batch of each demo, and its options besides."""
MODES = ("strong", "weak")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured."""

    demo: str
    """"": a script of the user's."""
    command: list[str]
    batch: int
    """Of one worker; 0: the script's."""
    cases: list[Case]
    modes: tuple[str, ...]
    steps: int
    rounds: int
    folder: Path


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code. Raises ConfigError."""
    at = argv.index("--") if "--" in argv else len(argv)
    options = parser().parse_args(argv[:at])
    if options.plot:
        require_plot(options.plot)
    plan = plan_of(options, list(argv[at + 1 :]))
    plan.folder.mkdir(parents=True, exist_ok=True)
    print(f"{shlex.join(redacted_command(plan.command))}: {len(plan.cases) * plan.rounds} runs of "
          f"{plan.steps} steps, in {plan.folder}", flush=True)
    rows, costs, seconds = measure(plan)
    show(rows, costs)
    found = {"rows": [asdict(row) | {"samples_per_s": row.rate, "seconds": seconds[row.case]}
                      for row in rows], "costs": costs}
    write_text(plan.folder / "scaling.json", json.dumps(found, indent=1))
    if options.plot:
        draw(rows, plan.modes, options.plot)
    return 0


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="elastic-trainer scaling",
        usage="%(prog)s [options] -- python my_train.py …\n       %(prog)s [options] --example gpt",
        description="Measure the steps of a script with several numbers of local workers.")
    add = made.add_argument
    add("--example", choices=DEMOS, help="measure a demo, also with DDP (gpt)")
    add("--workers", default="1,2", help="numbers of workers (%(default)s); 1 is always measured")
    add("--arms", help="of ring, exact and (for a demo) ddp (all)")
    add("--mode", choices=(*MODES, "both"), default="both",
        help="strong: the same global batch; weak: one that grows with the workers (%(default)s)")
    add("--steps", type=int, default=20, help="steps of each run that count (%(default)s)")
    add("--rounds", type=int, default=2, help="runs of each case (%(default)s)")
    add("--batch", type=int, help="demo: the global batch of one worker")
    add("--plot", type=Path, metavar="FILE.png", help="draw the result (needs matplotlib)")
    add("--runs-dir", type=Path, default=Path("runs"), help="where the runs go (%(default)s)")
    return made


def plan_of(options: argparse.Namespace, command: list[str]) -> Plan:
    """Return what the options ask for. Raises ConfigError."""
    if command and (options.example or options.batch):
        raise ConfigError("--example and --batch are options of the demo, and a command is given. "
                          "Leave one out.")
    demo = "" if command else options.example or "gpt"
    known = (*REDUCERS, PEER) if demo else REDUCERS
    arms = options.arms.split(",") if options.arms else sorted(known)
    if odd := [arm for arm in arms if arm not in known]:
        raise ConfigError(f"--arms has {odd[0]!r}. Use some of {', '.join(known)}" + (
            ": DDP can be measured for the demos only." if odd[0] == PEER else "."))
    try:
        workers = [int(number) for number in options.workers.split(",")]
    except ValueError:
        workers = []
    if not workers or min(workers) < 1 or options.steps < 2 or options.rounds < 1:
        raise ConfigError(f"--workers is {options.workers!r}, --steps {options.steps} and --rounds "
                          f"{options.rounds}. Use numbers of workers like 1,2,4, at least 2 steps "
                          f"and 1 round.")
    modes = MODES if options.mode == "both" else (options.mode,)
    batch, more = DEMOS[demo] if demo else (0, [])
    batch = options.batch or batch
    if demo:
        command = own.command(f"elastic_trainer.examples.{demo}", *more,
                              "--global-batch", str(batch), "--checkpoint-every", "1000000")
    return Plan(demo=demo, command=command, batch=batch, modes=modes, steps=options.steps,
                cases=cases.cases_of(arms, workers, modes), rounds=options.rounds,
                folder=options.runs_dir / f"scaling-{time.strftime('%Y%m%d-%H%M%S')}")


# --- the measurement --------------------------------------------------------------------------

def measure(plan: Plan) -> tuple[list[Row], list[str], dict[Case, list[float]]]:
    """Run all cases in turns; return the rows, a sentence for each that is slow, and the seconds of
    all steps."""
    seconds: dict[Case, list[float]] = defaultdict(list)
    parts: dict[Case, dict[str, float]] = {}
    own: worlds.Ran | None = None
    for number in range(plan.rounds):
        for case in plan.cases:
            ran = run_case(plan, case, own)
            seconds[case] += ran.seconds
            own = own or ran
            if case.arm == PEER:
                parts[case] = cases.parts_of(ran.phases)
            print(f"round {number + 1}: {label(case)}: "
                  f"{1000 * sorted(ran.seconds)[len(ran.seconds) // 2]:.1f} ms a step", flush=True)
    assert own
    rows = cases.rows_of(seconds, own.batch)
    costs = [cost_of(plan, row, parts, own) for row in rows if row.costs and row.case.arm != PEER]
    return rows, costs, seconds


def run_case(plan: Plan, case: Case, own: worlds.Ran | None = None,
             timeline: bool = False) -> worlds.Ran:
    """Run one case once. The demos have one micro-batch for each worker, as DDP does. A script has
    its own number, times the scale of the case; `own` is its first run, of one worker."""
    if case.arm == PEER:
        return worlds.peer(plan.demo, case, plan.steps, plan.batch, plan.folder)
    numbers = {}
    if plan.demo:
        numbers = {"microbatches": case.workers, "global_batch": plan.batch * case.scale}
    elif case.scale > 1 and own:
        numbers = {"microbatches": own.microbatches * case.scale,
                   "global_batch": own.batch * case.scale}
    return worlds.ours(plan.command, case, plan.steps, numbers, plan.folder, timeline)


def cost_of(plan: Plan, row: Row, parts: dict[Case, dict[str, float]], own: worlds.Ran) -> str:
    """Name the part of a step that costs the most. Costs: one more run, or two, with a timeline."""
    ours = cases.parts_of(run_case(plan, row.case, own, timeline=True).phases)
    peer, beside = Case(PEER, row.case.workers, row.case.scale), "DDP"
    if peer not in parts:
        peer, beside = Case(row.case.arm, 1), "one worker's, shared,"
        if peer not in parts:
            parts[peer] = cases.parts_of(run_case(plan, peer, own, timeline=True).phases)
        parts[row.case] = cases.shared(parts[peer], row.case)
        peer = row.case
    name, more_ms, all_ms = cases.costliest(ours, parts[peer])
    ratio = row.efficiency if row.to_peer is None else row.to_peer
    return (f"{label(row.case)}: {ratio:.3f} of {beside} rate. The largest cost is {name}: "
            f"{more_ms:+.1f} ms of {all_ms:+.1f} ms a step ("
            + ", ".join(f"{part} {ours[part]:.1f}/{parts[peer].get(part, 0.0):.1f}"
                        for part in cases.PARTS) + ").")


def label(case: Case) -> str:
    batch = "" if case.workers == 1 else ", weak" if case.scale > 1 else ", strong"
    return f"{case.arm}, {case.workers} worker{'s' * (case.workers > 1)}{batch}"


def show(rows: Sequence[Row], costs: Sequence[str]) -> None:
    from elastic_trainer.views.tables import Table, print_table

    heads = ["arm", "workers", "batch", "ms/step", "samples/s", "speed-up", "efficiency", "of DDP"]
    print_table(Table(heads, [
        [row.case.arm, str(row.case.workers), str(row.batch), f"{1000 * row.step_s:.1f}",
         f"{row.rate:.1f}", f"{row.speedup:.2f}", f"{row.efficiency:.0%}",
         "" if row.to_peer is None else f"{row.to_peer:.3f}"] for row in rows],
        title="medians of all steps"), numbers=heads[1:])
    print(*costs, sep="\n")
