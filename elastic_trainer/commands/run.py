"""`elastic-trainer run`: trains to the end, and shows the result.

command line → run_options, store_check → here → supervisor, standbys, watch → summary
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from elastic_trainer.commands import configured
from elastic_trainer.commands.run_options import Run, parse_run
from elastic_trainer.commands.store_check import checked_facts
from elastic_trainer.config import HASH_SEED, unusable
from elastic_trainer.driver import local_gpus
from elastic_trainer.host.modes import make_folder, private, write_text
from elastic_trainer.host.terminal import VARIABLE as TERMINAL
from elastic_trainer.host.terminal import terminal_of
from elastic_trainer.state.configuration import VARIABLE
from elastic_trainer.wire.plain import plain, plain_output
from elastic_trainer.world.standby import DEVICE as STANDBY_DEVICE

HASH_SEED_FILE = "hash_seed"
"""In the folder of a run: its PYTHONHASHSEED."""
LAST_BYTES = 1 << 20
LAST_LINES = 25
"""How much of the output is shown after a demo that failed."""
EXPECTED_EXITS = (0, 130)


def main(argv: list[str]) -> int:
    """Train to the end, in as many attempts as it takes; returns the exit code."""
    wanted = parse_run(argv)
    from elastic_trainer.commands.local_s3 import local_s3

    try:
        make_folder(wanted.run_dir)
    except OSError as error:
        raise unusable(wanted.run_dir, error) from error
    if wanted.reduce:
        os.environ["ELASTIC_TRAINER_REDUCE"] = wanted.reduce
    os.environ["ELASTIC_TRAINER_MIXED_HARDWARE"] = wanted.mixed_hardware
    os.environ["ELASTIC_TRAINER_STORE"] = wanted.store
    os.environ["ELASTIC_TRAINER_REPLACE_STRAGGLERS"] = str(int(wanted.replace_stragglers))
    os.environ["ELASTIC_TRAINER_TIMELINE"] = str(int(wanted.timeline))
    os.environ[local_gpus.VARIABLE] = json.dumps(wanted.gpus)
    os.environ[STANDBY_DEVICE] = wanted.standby_device
    os.environ["ELASTIC_TRAINER_AGENT_KEY_FILE"] = wanted.reach.key_file
    os.environ["ELASTIC_TRAINER_AGENT_PORT"] = str(wanted.reach.agent_port)
    # The demo's terminal shows its progress, which redraws the screen.
    os.environ[TERMINAL] = "" if wanted.is_demo else terminal_of(0)
    os.environ[VARIABLE] = configured.for_workers(wanted.configuration)
    os.environ[configured.ALLOW_VARIABLE] = ",".join(wanted.allow_change)
    horovodrun_options = wanted.horovodrun()
    with local_s3(wanted.run_dir) if wanted.has_own_s3 else nullcontext():
        facts = checked_facts(wanted.store, wanted.run_dir, are_read=(
            not (wanted.run_dir / HASH_SEED_FILE).exists()
            or configured.is_compared(wanted.configuration)))
        os.environ.update(hash_seed(wanted.run_dir, os.environ, facts))
        configured.compare_with_run(wanted.configuration, wanted.allow_change,
                                    wanted.run_dir.name, facts)
        return _train(wanted, horovodrun_options)


def _train(wanted: Run, horovodrun_options: list[str]) -> int:
    from elastic_trainer.driver.standby_pool import local_standbys
    from elastic_trainer.driver.supervisor import LOCK_FILE, supervise
    from elastic_trainer.events.summary import summarize_log

    run_dir, is_demo = wanted.run_dir, wanted.is_demo
    started = {"command": wanted.command, "horovodrun": horovodrun_options,
               "reduce": wanted.reduce or "exact", "store": wanted.store.partition("?")[0]}
    print(f"run {run_dir.name}: events in {run_dir}/events.jsonl. Stop it with Ctrl-C; resume it "
          f"with the same command and --run {run_dir.name}", flush=True)
    log_path = run_dir / "output.log"
    with (open(log_path, "a", opener=private) as log,
          shown(run_dir) if is_demo else nullcontext(),
          local_standbys(run_dir, wanted.command, wanted.standbys)):
        exit_code = supervise(run_dir, horovodrun_options, wanted.command, started,
                              output=log if is_demo else None)
    if not (run_dir / LOCK_FILE).exists():
        return exit_code  # the folder was deleted, which the supervisor has told
    if exit_code not in EXPECTED_EXITS and is_demo:
        last = end_of(log_path).splitlines()[-LAST_LINES:]
        print(f"the last lines of {log_path}:", *map(plain_output, last), sep="\n", file=sys.stderr)
    from elastic_trainer.views.tables import print_summary  # not while the run goes on: memory

    result = summarize_log(run_dir)
    print_summary(result)
    if is_demo:
        print(*map(plain_output, last_printed(log_path)), sep="\n")
    print("weights", plain(result["weights_sha256"]))
    return exit_code


@contextmanager
def shown(run_dir: Path) -> Iterator[None]:
    """Show the progress of a demo until the end of the block."""
    from elastic_trainer.views.watch import Watch

    watch = Watch(run_dir, ctrl_c="stop the run")
    watch.start()
    yield
    watch.stop()
    if watch.failure:
        print(f"elastic-trainer: the view has ended before the run: {watch.failure}",
              file=sys.stderr)


def hash_seed(run_dir: Path, env: Mapping[str, str],
              facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the PYTHONHASHSEED of a run: that of its first start. It stands in the run's folder
    and in its checkpoints: a new folder takes that of the newest one. Disk: one small file."""
    (name, usual), = HASH_SEED.items()
    given, file = env.get(name, ""), run_dir / HASH_SEED_FILE
    given = given if given.isdecimal() else usual
    try:
        kept = file.read_text().strip()
    except FileNotFoundError:
        kept = str(facts.get("hash_seed", ""))
        write_text(file, f"{kept if kept.isdecimal() else given}\n")
    if kept.isdecimal():
        if env.get(name, kept) != kept:
            print(f"elastic-trainer: {name} is {env[name]}, but the run began with {kept}, which "
                  f"holds. For the other value, give the run another name (--run).",
                  file=sys.stderr)
        return {name: kept}
    return {name: given}


def end_of(path: Path) -> str:
    """Return a file's end, at most LAST_BYTES: a run of weeks prints more than memory holds."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
        return file.read().decode(errors="replace")


def last_printed(log_path: Path, most: int = 3) -> list[str]:
    """Return the last lines that workers printed themselves, each once."""
    _, *printed = end_of(log_path).split("<stdout>: ")
    lines = (line.splitlines()[0] for line in printed if line.strip())
    return list(dict.fromkeys(lines))[-most:]
