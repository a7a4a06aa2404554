"""The command line: one file a command, imported when it is called.

    elastic-trainer setup [--check]
    elastic-trainer doctor [--hosts a:1,b:1] [--store URL] [--json]
    elastic-trainer run demo [--example gpt|digits|images|gan] [--steps N] [--workers N] …
    elastic-trainer run [horovodrun options] -- python my_train.py …
    elastic-trainer run --config run.toml [--set training.lr=0.1] -- python my_train.py …
    elastic-trainer replay --storm rough|--trace FILE [options] -- python my_train.py …
    elastic-trainer ray --run NAME --workers 1:8 [options] -- python my_train.py …
    elastic-trainer verify|watch|report runs/NAME|s3://BUCKET/NAME
    elastic-trainer report runs/NAME --svg run.svg
    elastic-trainer checkpoints ls|show|verify|prune|export URL
    elastic-trainer index URL…
    elastic-trainer hosts HOSTS_FILE
    elastic-trainer standby [--slots N] -- python my_train.py …
    elastic-trainer tune|scaling [options] -- python my_train.py …
    elastic-trainer plan --hosts 1000 --storm rate=12/h,bulk=0.4

`./horovodrun_elastic.sh …` sets up and then calls `elastic-trainer run …`.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from elastic_trainer.config import EXIT_INTERRUPTED, ConfigError
from elastic_trainer.host.options import Parser
from elastic_trainer.host.output import outlive_readers
from elastic_trainer.wire.plain import plain_text
from elastic_trainer.wire.redact import redacted

EXIT_BAD_COMMAND = 2
COMMANDS = {
    "setup": ("setup.command", "build or install the Horovod that this environment needs"),
    "doctor": ("commands.doctor", "find what this machine, or the hosts of a fleet, lack for a "
                                  "run"),
    "run": ("commands.run", "train: the demo, or your own script after --"),
    "replay": ("commands.replay", "rehearse a spot fleet on local hosts: your script after --"),
    "ray": ("ray.command", "train on a Ray cluster: your script after --"),
    "verify": ("commands.verify", "prove from the event log that no sample was lost or repeated"),
    "watch": ("commands.watch", "show the progress of a run"),
    "report": ("commands.report", "show the summary of a run"),
    "hosts": ("commands.hosts", "show the fleet's table"),
    "index": ("commands.index", "build the index of a dataset (tar, Parquet, images), once before "
                                "a run"),
    "standby": ("driver.standby_pool", "keep booted workers waiting on this host: its command "
                                          "after --"),
    "tune": ("measure.tune", "find the number of micro-batches that is fastest in the memory "
                             "there is"),
    "scaling": ("measure.scaling", "measure how the steps of a script scale with the workers"),
    "plan": ("rehearse.plan", "rehearse a fleet without processes: goodput, price, advice"),
    "checkpoints": ("commands.checkpoints", "list, show, verify, prune or export checkpoints"),
}
"""The module of each command, whose `main(argv)` returns the exit code, and its purpose."""
NEED_HOROVOD = ("run", "standby", "checkpoints", "tune", "scaling", "replay")


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _command(argv)
    except ConfigError as error:
        print(f"elastic-trainer: {plain_text(redacted(str(error)))}", file=sys.stderr)
        return EXIT_BAD_COMMAND
    except KeyboardInterrupt:  # of a command that has no end of its own for Ctrl-C
        print(f"\nelastic-trainer: {' '.join(argv[:1])} was stopped by Ctrl-C before it had ended.",
              file=sys.stderr)
        return EXIT_INTERRUPTED


def run_process() -> None:
    """Run the command of this process, and end with its exit code."""
    outlive_readers()
    sys.exit(main())


def _command(argv: list[str]) -> int:
    if not argv or argv[0] not in COMMANDS:
        _parser().parse_args(argv)  # prints the help, or an error
    name, *options = argv
    if name in NEED_HOROVOD:
        from elastic_trainer.setup.required import require_horovod

        require_horovod()
    module = importlib.import_module(f"elastic_trainer.{COMMANDS[name][0]}")
    return int(module.main(options))


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the commands' names."""
    parser = Parser(prog="elastic-trainer", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, purpose) in COMMANDS.items():
        commands.add_parser(name, add_help=False, help=purpose)
    return parser
