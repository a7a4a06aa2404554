"""The command line.

    elastic-trainer setup [--check]
    elastic-trainer doctor [--hosts a:1,b:1] [--store URL] [--json]
    elastic-trainer run demo [--example gpt|digits|images|gan] [--steps N] [--workers N] …
    elastic-trainer run [horovodrun options] -- python my_train.py …
    elastic-trainer run --config run.toml [--set training.lr=0.1] -- python my_train.py …
    elastic-trainer replay --storm rough|--trace FILE [options] -- python my_train.py …
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
import sys

from elastic_trainer.commands import index
from elastic_trainer.commands import read_run as look
from elastic_trainer.config import EXIT_INTERRUPTED, ConfigError
from elastic_trainer.host.options import Parser
from elastic_trainer.host.output import outlive_readers
from elastic_trainer.setup.required import require_horovod
from elastic_trainer.wire.plain import plain_text
from elastic_trainer.wire.redact import redacted

EXIT_BAD_COMMAND = 2


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
    """Import what a command needs, and no more: `checkpoints` imports torch."""
    parser, for_checkpoints = _parsers()
    if argv[:1] == ["setup"]:
        from elastic_trainer.setup import command as setup

        return setup.main(argv[1:])
    if argv[:1] == ["doctor"]:
        from elastic_trainer.commands import examination

        return examination.main(argv[1:])
    if argv[:1] in (["run"], ["standby"], ["checkpoints"], ["tune"], ["scaling"],
                    ["replay"]):
        require_horovod()
    if argv[:1] == ["run"]:
        from elastic_trainer.commands.run import run

        return run(argv[1:])
    if argv[:1] == ["replay"]:
        from elastic_trainer.commands import run_options
        from elastic_trainer.rehearse import replay

        return replay.run(argv[1:], run_options.EXAMPLES, run_options.demo,
                          run_options.require_known_of_run)
    if argv[:1] == ["tune"]:
        from elastic_trainer.measure import tune

        return tune.run(argv[1:])
    if argv[:1] == ["scaling"]:
        from elastic_trainer.measure import scaling

        return scaling.run(argv[1:])
    if argv[:1] == ["plan"]:
        from elastic_trainer.rehearse import plan

        return plan.run(argv[1:])
    if argv[:1] == ["standby"]:
        from elastic_trainer.driver import standby_service as service

        service.main(argv[1:])
    if argv[:1] == ["checkpoints"]:
        from elastic_trainer.commands import checkpoints

        checkpoints.add_commands(for_checkpoints)
        return checkpoints.run(parser.parse_args(argv))
    if argv[:1] == ["index"]:
        return index.run(parser.parse_args(argv))
    return look.run(parser.parse_args(argv))


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser of all commands, and that of `checkpoints`."""
    parser = Parser(
        prog="elastic-trainer", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("setup", add_help=False,
                        help="build or install the Horovod that this environment needs")
    commands.add_parser("doctor", add_help=False,
                        help="find what this machine, or the hosts of a fleet, lack for a run")
    commands.add_parser("run", add_help=False, help="train: the demo, or your own script after --")
    commands.add_parser("replay", add_help=False,
                        help="rehearse a spot fleet on local hosts: your script after --")
    look.add_commands(commands)
    index.add_command(commands.add_parser(
        "index", help="build the index of a dataset (tar, Parquet, images), once before a run"))
    commands.add_parser("standby", add_help=False,
                        help="keep booted workers waiting on this host: its command after --")
    commands.add_parser("tune", add_help=False,
                        help="find the number of micro-batches that is fastest in the memory there "
                             "is")
    commands.add_parser("scaling", add_help=False,
                        help="measure how the steps of a script scale with the workers")
    commands.add_parser("plan", add_help=False,
                        help="rehearse a fleet without processes: goodput, price, advice")
    return parser, commands.add_parser(
        "checkpoints", help="list, show, verify, prune or export checkpoints")
