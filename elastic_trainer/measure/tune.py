"""`elastic-trainer tune`: the largest and the fastest size of a micro-batch that fits into memory.

    elastic-trainer tune --workers 4 -- python my_train.py

command line → here ⇄ trial (one process, a few steps, one number of micro-batches) → table,
recommendation

What always holds:
1. The global batch stays that of the script. A number of microbatches is only its division.
2. A size that would not fit, by the memory of two smaller ones, is not tried, unless the largest
   one is asked for (--memory). Each trial is a process of its own: one without memory ends alone.
3. A recommended number is one that has run, and a multiple of the number of workers.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from elastic_trainer.config import ConfigError
from elastic_trainer.host.options import Parser
from elastic_trainer.measure.trial import FIRST_STEPS, Trial, gibibytes, limit_bytes, measure
from elastic_trainer.wire.plain import plain
from elastic_trainer.wire.redact import redacted_command

ALIKE = 1.03
"""Step times that differ by less are alike: then more micro-batches are better, with less
memory."""
BATCH_NORM = ("With BatchNorm the number of microbatches is part of the result, because it "
              "computes its statistics over one micro-batch. Give a run with another number "
              "another name.")


def next_microbatches(trials: Sequence[Trial], candidates: Sequence[int], limit: int) -> int | None:
    """Return the number of micro-batches to try next; None: the picture is whole.

    First fewer and fewer micro-batches, which are larger, until one would not fit. Then more and
    more, while each is faster than the one before.
    """
    tried = {trial.microbatches: trial for trial in trials}
    whole = sorted(microbatches for microbatches, trial in tried.items() if trial.is_whole)
    if not whole:
        return None
    fewer = [number for number in candidates if number < whole[0]]
    if fewer and fewer[-1] not in tried and predicted(trials, fewer[-1]) <= limit:
        return fewer[-1]
    more = [number for number in candidates if number > whole[-1]]
    is_faster = len(whole) < 2 or tried[whole[-1]].step_s < tried[whole[-2]].step_s
    return more[0] if more and more[0] not in tried and is_faster else None


def next_larger(trials: Sequence[Trial], workers: int) -> int | None:
    """Return the number of micro-batches to try next, to find the largest micro-batch that fits;
    None: it is found. Halves the sizes between the largest that has run and the smallest larger one
    that has not."""
    whole = [trial.microbatches for trial in trials if trial.is_whole]
    if not whole:
        return None
    batch, fits = trials[0].global_batch, min(whole)
    fails = max((trial.microbatches for trial in trials
                 if not trial.is_whole and trial.microbatches < fits), default=0)
    sizes: dict[int, int] = {}
    for number in range(workers * (fails // workers + 1), fits, workers):
        sizes[-(-batch // number)] = number  # of alike sizes, the one with the most micro-batches
    left = sorted(size for size in sizes
                  if -(-batch // fits) < size and (not fails or size < -(-batch // fails)))
    return sizes[left[len(left) // 2]] if left else None


def predicted(trials: Sequence[Trial], microbatches: int) -> int:
    """Return the memory that a number of micro-batches would need: a line through the two largest
    sizes that have run, from their samples; 0: only one has."""
    whole = sorted((trial for trial in trials if trial.is_whole), key=lambda trial: -trial.samples)
    if len(whole) < 2:
        return 0
    large, small = whole[:2]
    slope = (large.host_bytes - small.host_bytes) / max(1, large.samples - small.samples)
    samples = large.samples * large.microbatches / microbatches
    return int(large.host_bytes + max(0.0, slope) * (samples - large.samples))


def candidates_of(global_batch: int, workers: int, own: int) -> list[int]:
    """Return the numbers of micro-batches that are worth a trial: those that workers share
    evenly."""
    found = {own} if own % workers == 0 else set()
    number = workers
    while number <= global_batch:
        found.add(number)
        number *= 2
    return sorted(found)


def best_of(trials: Sequence[Trial], workers: int) -> Trial | None:
    """Return the trial whose number of microbatches is recommended: the fastest one that workers
    share evenly, and of those alike the one with the most micro-batches."""
    whole = [trial for trial in trials if trial.is_whole and trial.microbatches % workers == 0]
    if not whole:
        return None
    fastest_s = min(trial.step_s for trial in whole)
    return max((trial for trial in whole if trial.step_s <= ALIKE * fastest_s),
               key=lambda trial: trial.microbatches)


# --- the command ------------------------------------------------------------------------------

def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=int, default=4,
        help="the number of workers that will share the micro-batches (%(default)s)")
    add("--steps", type=int, default=8, help="steps of each trial (%(default)s)")
    add("--memory", metavar="GIB", type=float, nargs="?", const=0.0,
        help="find the largest micro-batch that fits, too; with a number: the most memory of one "
             "worker, with its loader processes (90 %% of what is left)")
    add("--runs-dir", type=Path, default=Path("runs"), help="where the trials go (%(default)s)")


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code. Raises ConfigError."""
    at = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(
        prog="elastic-trainer tune", usage="%(prog)s [options] -- python my_train.py …",
        description="Find the number of micro-batches with which a script trains fastest, in the "
                    "memory that there is. The script runs a few steps in one process, with the "
                    "same global batch and several numbers of micro-batches.")
    add_options(parser)
    options = parser.parse_args(argv[:at])
    command = list(argv[at + 1 :])
    if not command:
        parser.error("the command is missing. Give it after --, e.g. -- python my_train.py")
    if options.workers < 1 or options.steps < FIRST_STEPS + 2:
        raise ConfigError(f"--workers is {options.workers} and --steps is {options.steps}. Use 1 "
                          f"or more workers, and {FIRST_STEPS + 2} or more steps.")
    limit = int(options.memory * 2**30) if options.memory else limit_bytes()
    folder = options.runs_dir / f"tune-{time.strftime('%Y%m%d-%H%M%S')}"
    shown = shlex.join(redacted_command(command))
    print(f"{shown}: {options.steps} steps for each number of micro-batches, with at most "
          f"{gibibytes(limit)} of memory, in {folder}", flush=True)
    trials, candidates = find(command, options.workers, options.steps, folder, limit,
                              is_largest_wanted=options.memory is not None)
    show(trials, candidates, options.workers, limit)
    return 0 if best_of(trials, options.workers) else 1


def find(command: Sequence[str], workers: int, steps: int, folder: Path, limit: int,
         is_largest_wanted: bool = False) -> tuple[list[Trial], list[int]]:
    """Try numbers of micro-batches; return the trials and the candidates. Raises ConfigError."""
    until = f"{steps} steps"
    own = measure(command, {"until": until}, folder / "own", limit)
    if not own.microbatches:
        raise ConfigError(
            f"The script has ended before it trained: {own.ending}. Its output is in "
            f"{folder / 'own'}. tune needs a script that calls train() or Trainer.\n"
            f"{own.last_lines}")
    if own.ending not in ("whole", "memory"):
        raise ConfigError(f"The script fails with its own options: {own.ending}. Its output is in "
                          f"{folder / 'own'}.\n{own.last_lines}")
    batch = own.global_batch
    candidates = candidates_of(batch, workers, own.microbatches)
    if not candidates:
        raise ConfigError(f"global_batch is {batch}, which {workers} workers cannot share. Use "
                          f"--workers {batch} or fewer.")
    trials = [own]
    upwards = [number for number in candidates if number > own.microbatches]

    def next_number() -> int | None:
        if not any(trial.is_whole for trial in trials):
            return next(iter(upwards[len(trials) - 1 :]), None)
        return (next_microbatches(trials, candidates, limit)
                or (next_larger(trials, workers) if is_largest_wanted else None))

    while number := next_number():
        print(told(trials[-1]), flush=True)
        found = measure(command, {"until": until, "microbatches": number}, folder / f"{number}",
                        limit)
        # One without memory may have ended before it said what it has.
        trials.append(replace(found, microbatches=number, global_batch=batch))
    print(told(trials[-1]), flush=True)
    return trials, candidates


def told(trial: Trial) -> str:
    how = {"whole": f"{trial.step_s:.3f} s a step, {gibibytes(trial.host_bytes)}",
           "memory": "not enough memory"}.get(trial.ending, trial.ending)
    return f"microbatches={trial.microbatches}: {plain(how)}"


def show(trials: Sequence[Trial], candidates: Sequence[int], workers: int, limit: int) -> None:
    from elastic_trainer.views.tables import Table, print_table

    heads = ("micro-batches", "samples", "s a step", "samples/s", "memory", "on the GPU", "")
    rows = list[Sequence[str]]()
    for trial in sorted(trials, key=lambda trial: -trial.microbatches):
        batch = trial.samples * trial.microbatches
        rows.append((
            str(trial.microbatches), str(trial.samples),
            *((f"{trial.step_s:.3f}", f"{batch / trial.step_s:.1f}", gibibytes(trial.host_bytes),
               gibibytes(trial.device_bytes) if trial.device_bytes else "-", "")
              if trial.is_whole else
              ("-", "-", gibibytes(trial.host_bytes), "-",
               "not enough memory" if trial.ending == "memory" else trial.ending))))
    tried = {trial.microbatches for trial in trials}
    for number in reversed(candidates):
        needed = predicted(trials, number)
        if number not in tried and number < min(tried) and needed > limit:
            rows.append((str(number), "", "-", "-", "about " + gibibytes(needed), "-", "not tried"))
    print_table(Table(heads, rows, "one worker, one global batch"), numbers=heads[:-1])
    best = best_of(trials, workers)
    if best is None:
        print("No number of micro-batches has run. Give the worker more memory, or a smaller "
              "global_batch.")
        return
    largest = max((trial for trial in trials if trial.is_whole), key=lambda trial: trial.samples)
    print(f"Recommended for {workers} workers: microbatches={best.microbatches} ({best.samples} "
          f"samples each). The largest micro-batch that has run has {largest.samples} samples.")
    print(BATCH_NORM)
