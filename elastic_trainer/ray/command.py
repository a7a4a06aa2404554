"""`elastic-trainer ray`: trains a script on a Ray cluster.

    elastic-trainer ray --run digits --workers 1:8 --resource GPU=1 -- python my_train.py
    ray job submit --working-dir . -- elastic-trainer ray --run digits … -- python my_train.py

command line → here → submission.py
"""

from __future__ import annotations

import argparse
import os
import re

from elastic_trainer.commands.run_options import require_known_of_run
from elastic_trainer.config import ConfigError
from elastic_trainer.discovery.commands import MACHINES
from elastic_trainer.host.options import Parser
from elastic_trainer.ray.job import job_of
from elastic_trainer.ray.submission import submit_job

OURS = ("-H", "-hostfile", "--hostfile", "--hosts", "--host-discovery-script", "-np", "--num-proc",
        "--min-np", "--min-num-proc", "--max-np", "--max-num-proc", "--min-workers", "--standby",
        "--elastic-timeout", "--reach")
"""Options of `run` that name hosts and workers: Ray and --workers do that."""


def main(argv: list[str]) -> int:
    """Submit a run and follow it; returns its exit code. Raises ConfigError."""
    parser = _parser()
    ours, command = parser.command_of(argv)
    options, others = parser.parse_known_args(ours)
    if not command:
        raise ConfigError("No command stands after --. Give it, e.g. elastic-trainer ray --run "
                          "digits --workers 1:8 -- python my_train.py.")
    if given := [word for word in others if word.partition("=")[0] in OURS]:
        raise ConfigError(f"{given[0]} is no option here, because Ray names the hosts. Use "
                          f"--workers FEWEST:MOST.")
    require_known_of_run(others, parser, "elastic-trainer ray")
    job = job_of(command, workers=options.workers, run=options.run, runs_dir=options.runs_dir,
                 store=options.store, resources_per_worker=dict(options.resource or [("CPU", 1.0)]),
                 workers_per_agent=options.workers_per_agent, options=others,
                 notices=options.notices)
    return submit_job(job, options.address, options.wait_for_nodes)


def _parser() -> Parser:
    parser = Parser(prog="elastic-trainer ray",
                    usage="%(prog)s --run NAME [options] [options of run] -- python my_train.py …")
    add = parser.add_argument
    add("--run", metavar="NAME", required=True,
        help="the run's name; the same name again resumes it")
    add("--workers", type=_workers, default=(1, 1), metavar="FEWEST:MOST",
        help="how many workers train, e.g. 1:8 (1:1)")
    add("--resource", type=_resource, action="append", metavar="NAME=AMOUNT",
        help="what Ray reserves for a worker, e.g. GPU=1; more than one: all of them (CPU=1)")
    add("--workers-per-agent", type=int, default=1, metavar="N",
        help="the workers that one agent keeps on one node, e.g. its number of GPUs (%(default)s)")
    add("--address", default="", metavar="HOST:PORT",
        help="Ray's head (RAY_ADDRESS, or the cluster of this machine)")
    add("--runs-dir", default="runs", metavar="FOLDER",
        help="where the coordinator's node keeps runs (%(default)s)")
    add("--store", default=os.environ.get("ELASTIC_TRAINER_STORE", ""), metavar="URL",
        help="where checkpoints go, as of `elastic-trainer run`")
    add("--notices", default="", choices=tuple(MACHINES), metavar="CLOUD",
        help="the cloud whose notices each agent reads from its metadata service")
    add("--wait-for-nodes", action="store_true",
        help="start although the cluster has no room for the fewest workers yet")
    return parser


def _workers(text: str) -> tuple[int, int]:
    found = re.fullmatch("([0-9]{1,6})(?::([0-9]{1,6}))?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not FEWEST:MOST, e.g. 1:8")
    return int(found[1]), int(found[2] or found[1])


def _resource(text: str) -> tuple[str, float]:
    name, mark, amount = text.partition("=")
    try:
        return name, float(amount if mark else "?")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=AMOUNT, e.g. GPU=1") from None
