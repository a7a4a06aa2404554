"""The options of horovodrun that `run` passes on, and those that it refuses with the reason.

command line → run_options, here → horovodrun (driver/horovodrun.py)

Source: horovod 0.28.1, runner/launch.py, parse_args. run_options has -np, -H and their like.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from elastic_trainer.config import ConfigError

WITH_VALUE = {
    "--network-interfaces": "eth0,eth1", "--network-interface": "eth0", "--ssh-port": "PORT",
    "--ssh-identity-file": "FILE", "--start-timeout": "SECONDS", "--elastic-timeout": "SECONDS",
    "--slots-per-host": "N", "--config-file": "FILE", "--fusion-threshold-mb": "MB",
    "--cycle-time-ms": "MS", "--cache-capacity": "N", "--timeline-filename": "FILE",
    "--stall-check-warning-time-seconds": "SECONDS",
    "--stall-check-shutdown-time-seconds": "SECONDS", "--num-nccl-streams": "N",
    "--thread-affinity": "N", "--gloo-timeout-seconds": "SECONDS", "--log-level": "LEVEL"}
SHORT = {"--ssh-port": "-p", "--ssh-identity-file": "-i",
         "--prefix-output-with-timestamp": "-prefix-timestamp"}
SWITCHES = (
    "--verbose", "--disable-cache", "--gloo", "--hierarchical-allreduce",
    "--no-hierarchical-allreduce", "--hierarchical-allgather", "--no-hierarchical-allgather",
    "--torus-allreduce", "--no-torus-allreduce", "--no-autotune", "--timeline-mark-cycles",
    "--no-timeline-mark-cycles", "--stall-check", "--no-stall-check", "--no-mpi-threads-disable",
    "--mpi-threads-disable", "--log-with-timestamp", "--log-without-timestamp",
    "--prefix-output-with-timestamp")
_NO_MPI = "workers talk over Gloo, and Horovod has no elastic mode with MPI or jsrun"
_NO_TUNING = "tuned collectives lose steps when the world changes"
REFUSED = {
    "--mpi": _NO_MPI, "--jsrun": _NO_MPI, "--mpi-args": _NO_MPI, "--tcp": _NO_MPI,
    "--binding-args": _NO_MPI, "--autotune": _NO_TUNING, "--autotune-log-file": _NO_TUNING,
    "--autotune-warmup-samples": _NO_TUNING, "--autotune-steps-per-sample": _NO_TUNING,
    "--autotune-bayes-opt-max-samples": _NO_TUNING,
    "--autotune-gaussian-process-noise": _NO_TUNING,
    "--reset-limit": "the world may change as often as the fleet does",
    "--blacklist-cooldown-range": "a host that fails waits longer each time, and none is banned",
    "--output-filename": "the workers' output goes to the terminal, each line with its host",
    "--check-build": "`elastic-trainer doctor` shows how Horovod was built"}


class _Pass(argparse.Action):
    """Collect options for horovodrun."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace,
                 values: str | Sequence[Any] | None, option_string: str | None = None) -> None:
        name, value = str(option_string), [values] if isinstance(values, str) else []
        if reason := REFUSED.get(self.option_strings[-1]):
            raise ConfigError(f"{name} is an option of horovodrun that an elastic run does not "
                              f"have: {reason}. Leave it out.")
        passed = [f"{name}={value[0]}"] if value and value[0].startswith("-") else [name, *value]
        namespace.horovodrun = [*(namespace.horovodrun or []), *passed]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options. The namespace has them as a list, `horovodrun`."""
    group = parser.add_argument_group("options that horovodrun gets as they are (with a command)")
    for name, form in WITH_VALUE.items():
        group.add_argument(*filter(None, (SHORT.get(name), name)), action=_Pass,
                           dest="horovodrun", metavar=form)
    for name in SWITCHES:
        group.add_argument(*filter(None, (SHORT.get(name), name)), action=_Pass, nargs=0,
                           dest="horovodrun")
    for name in REFUSED:
        group.add_argument(name, action=_Pass, nargs="?", dest="horovodrun", help=argparse.SUPPRESS)
