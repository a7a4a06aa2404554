"""The command line.

    elastic-trainer run demo [--example gpt|digits] [--steps N] [--workers N] …
    elastic-trainer run [horovodrun options] -- python my_train.py …
    elastic-trainer verify|watch|report runs/NAME
    elastic-trainer checkpoints ls|show|verify|prune|export URL
    elastic-trainer hosts HOSTS_FILE
    elastic-trainer standby [--slots N] -- python my_train.py …

`./horovodrun_elastic.sh …` sets up and then calls `elastic-trainer run …`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from elastic_trainer.config import REDUCERS, ConfigError
from elastic_trainer.edge.plain import plain, plain_output, plain_text
from elastic_trainer.state.modes import make_folder, private, write_text

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ("gpt", "digits")
LAST_BYTES = 1 << 20
LOCAL_S3 = "s3://elastic-trainer/checkpoints"


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="elastic-trainer", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run", help="train: the demo, or your own script after --", add_help=False)
    for name, what in (("verify", "prove from the events that nothing was lost or repeated"),
                       ("watch", "show the progress of a run"), ("report", "show the summary of a run")):
        commands.add_parser(name, help=what).add_argument("run_dir", type=Path, help="e.g. runs/NAME")
    commands.add_parser("hosts", help="show the fleet's table").add_argument("hosts_file", type=Path,
                                                                             help="the poller's --hosts-file")
    commands.add_parser("standby", help="keep booted workers waiting on this host: its command after --", add_help=False)
    for_checkpoints = commands.add_parser("checkpoints", help="list, show, verify, prune or export checkpoints")
    try:
        if argv[:1] == ["run"]:
            return run(argv[1:])
        if argv[:1] == ["standby"]:
            from elastic_trainer import standby

            standby.main(argv[1:])
        if argv[:1] == ["checkpoints"]:
            from elastic_trainer import checkpoints  # here: it imports torch

            checkpoints.add_commands(for_checkpoints)
            return checkpoints.run(parser.parse_args(argv))
        chosen = parser.parse_args(argv)
        if chosen.command == "hosts":
            return _hosts(chosen.hosts_file)
        return _look(chosen.run_dir, {"verify": _verify, "watch": _watch, "report": _report}[chosen.command])
    except ConfigError as error:
        print(f"elastic-trainer: {plain_text(error)}", file=sys.stderr)
        return 2


def _look(run_dir: Path, act: Callable[[Path], int]) -> int:
    """Run a command that reads a run's folder. Raises ConfigError."""
    try:
        if not run_dir.is_dir():
            raise ConfigError(f"there is no folder {run_dir}. Name a run's folder, e.g. runs/NAME.")
        return act(run_dir)
    except PermissionError as error:
        raise ConfigError(f"{error.filename} may not be read by this user. Its owner lets a group in: chgrp -R GROUP "
                          f"{run_dir}; chmod -R g+rwX {run_dir}; find {run_dir} -type d -exec chmod g+s {{}} +") from error


def run(argv: list[str]) -> int:
    """Train to the end, in as many attempts as it takes; returns the exit code."""
    from elastic_trainer.local_s3 import local_s3

    ours, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(
        prog="./horovodrun_elastic.sh", allow_abbrev=False,
        usage="%(prog)s [demo] [options]\n       %(prog)s [options] [horovodrun options] -- python my_train.py …",
        epilog="All other options go to horovodrun, e.g. --network-interfaces eth0 -p 2222.")
    parser.add_argument("--run", metavar="NAME", help="the run's name; the same name again resumes it (runs/NAME)")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where runs are kept (%(default)s)")
    parser.add_argument("--reduce", choices=REDUCERS, default=os.environ.get("ELASTIC_TRAINER_REDUCE"),
                        help="exact: the same bits for every world; ring: float allreduce (default: train()'s, or exact)")
    parser.add_argument("--mixed-hardware", choices=("refuse", "warn"),
                        default=os.environ.get("ELASTIC_TRAINER_MIXED_HARDWARE", "refuse"),
                        help="exact: a host whose processor or torch computes other bits than the world's gets no place, "
                             "or is let in and told (%(default)s)")
    parser.add_argument("--workers", type=int, help="local workers, when no hosts are given (-np, or else 4)")
    parser.add_argument("--min-workers", type=int, help="wait when fewer are left, as --min-np (1)")
    parser.add_argument("--standby", type=int, metavar="N", help="so many booted workers wait on this machine, once "
                        "training has begun (1 for local workers; 0 where hosts are given: there each host keeps its own, "
                        "which are not found if you give a number)")
    parser.add_argument("--example", choices=EXAMPLES, help=f"demo: what to train ({EXAMPLES[0]})")
    parser.add_argument("--steps", type=int, help="demo: how many steps")
    parser.add_argument("--seed", type=int, help="demo: the seed")
    parser.add_argument("--store", metavar="URL", default=os.environ.get("ELASTIC_TRAINER_STORE", ""),
                        help="where checkpoints go, each run's under its name: a folder, s3://bucket/prefix, or s3 for a "
                             "server of its own on this machine (default: the run's folder)")
    hosts = parser.add_argument_group("hosts, as horovodrun takes them (with a command)")
    where = hosts.add_mutually_exclusive_group()
    where.add_argument("--host-discovery-script", metavar="COMMAND", help="prints host:slots lines, at any time others")
    where.add_argument("-H", "--hosts", metavar="a:1,b:2", help="a list that stays")
    where.add_argument("-hostfile", "--hostfile", type=Path, help="the same as a file of lines like `a slots=1`")
    hosts.add_argument("-np", "--num-proc", type=int, help="begin with so many workers, or after a minute with --min-np")
    hosts.add_argument("--min-np", "--min-num-proc", type=int, help="wait when fewer are left (--min-workers)")
    hosts.add_argument("--max-np", "--max-num-proc", type=int, help="train with no more")
    options, horovodrun_options = parser.parse_known_args(ours[1:] if ours[:1] == ["demo"] else ours)
    is_demo = not command
    numbers = {"-np": options.num_proc, "--min-np": options.min_np, "--max-np": options.max_np}
    given = {"--host-discovery-script": options.host_discovery_script, "-H": options.hosts, "--hostfile": options.hostfile,
             **numbers}
    unknown = horovodrun_options + [name for name, value in given.items() if value is not None]
    if is_demo and unknown:
        parser.error(f"unknown: {' '.join(unknown)} (horovodrun's options need a command after --)")
    refuse_ignored(options, is_demo)
    options.example = options.example or EXAMPLES[0]
    workers = next(n for n in (options.workers, options.num_proc, 4) if n is not None)
    listed = static_hosts(options.hosts, options.hostfile)
    begin = options.num_proc or sum(listed.values()) or workers
    options.min_workers = 1 if options.min_workers is None else options.min_workers
    if not 1 <= options.min_workers <= begin:
        raise ConfigError(f"--min-workers is {options.min_workers}, but the run begins with {begin} workers. Use "
                          f"1 ≤ min ≤ {begin}, or more workers (--workers, -np).")
    if options.run and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", options.run):
        raise ConfigError(f"--run is {options.run!r}. Use letters, digits, '.', '_' and '-': it names a folder and a place "
                          f"in the store.")
    name = options.run or f"{options.example if is_demo else 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = (options.runs_dir / name).resolve()
    if is_demo:
        command = [sys.executable, "-m", f"elastic_trainer.examples.{options.example}"]
        for flag in ("steps", "seed"):
            if getattr(options, flag) is not None:
                command += [f"--{flag}", str(getattr(options, flag))]
    script = options.host_discovery_script
    if script is None:
        options.standby = int(not listed) if options.standby is None else options.standby
        listed = listed or {f"127.0.0.{number}": 1 for number in range(1, workers + 1)}
        slots = sum(listed.values())
        wanted = options.num_proc or slots
        if wanted > slots:
            raise ConfigError(f"-np is {wanted}, but the hosts have {slots} slots, so the training would never begin. Use "
                              f"-np {slots} or fewer, or more hosts (--workers where they are local).")
        script = list_hosts(run_dir, listed)
        numbers |= {"-np": wanted, "--max-np": options.max_np or (wanted if wanted < slots else None)}
    numbers["--min-np"] = options.min_np or options.min_workers  # Horovod's default is -np: to wait whenever one is gone
    horovodrun_options += ["--host-discovery-script", script]
    horovodrun_options += [word for name, n in numbers.items() if n is not None for word in (name, str(n))]
    if options.reduce:
        os.environ["ELASTIC_TRAINER_REDUCE"] = options.reduce
    os.environ["ELASTIC_TRAINER_MIXED_HARDWARE"] = options.mixed_hardware
    os.environ["ELASTIC_TRAINER_STORE"] = store_of_run(options.store, name)

    with local_s3(run_dir) if options.store == "s3" else nullcontext():
        _prove(os.environ["ELASTIC_TRAINER_STORE"])
        return _train(run_dir, horovodrun_options, command, options, is_demo)


def refuse_ignored(options: argparse.Namespace, is_demo: bool) -> None:
    """Raise ConfigError for an option that would have no effect beside the others."""
    for name in ("example", "steps", "seed"):
        if not is_demo and getattr(options, name) is not None:
            raise ConfigError(f"--{name} is {getattr(options, name)!r}, but it is the demo's, and a command is given. "
                              f"Put it behind --, with your script's own options.")
    hosts = {"--host-discovery-script": options.host_discovery_script, "-H": options.hosts, "--hostfile": options.hostfile}
    given = [name for name, value in hosts.items() if value is not None]
    if given and options.workers is not None:
        raise ConfigError(f"--workers is {options.workers}, but it is for local workers, and {given[0]} names the hosts. "
                          f"Use -np.")
    if options.min_np is not None and options.min_workers not in (None, options.min_np):
        raise ConfigError(f"--min-workers is {options.min_workers} and --min-np is {options.min_np}, but they mean the "
                          f"same. Give one of them.")


def _train(run_dir: Path, horovodrun_options: list[str], command: list[str], options: argparse.Namespace,
           is_demo: bool) -> int:
    from elastic_trainer.attempts import supervise
    from elastic_trainer.report import print_summary, summarize_log
    from elastic_trainer.standby import local_standbys
    from elastic_trainer.watch import Watch

    name = run_dir.name
    started = {"command": command, "horovodrun": horovodrun_options, "reduce": options.reduce or "exact",
               "store": os.environ["ELASTIC_TRAINER_STORE"].partition("?")[0]}
    print(f"run {name}: events in {run_dir}/events.jsonl. Stop it with Ctrl-C; resume it with the same command and "
          f"--run {name}", flush=True)
    watch = Watch(run_dir)
    log_path = run_dir / "output.log"
    make_folder(run_dir)
    with open(log_path, "a", opener=private) as log:
        if is_demo:
            watch.start()
        with local_standbys(run_dir, command, options.standby or 0):
            exit_code = supervise(run_dir, horovodrun_options, command, started, output=log if is_demo else None)
        if is_demo:
            watch.stop()
    if exit_code not in (0, 130) and is_demo:
        print(f"the last lines of {log_path}:", *map(plain_output, end_of(log_path).splitlines()[-25:]), sep="\n",
              file=sys.stderr)
    result = summarize_log(run_dir)
    print_summary(result)
    if is_demo:
        print(*map(plain_output, last_words(log_path)), sep="\n")
    print("weights", plain(result["weights_sha256"]))
    return exit_code


def store_of_run(store: str, run: str) -> str:
    """Return the URL under which one run keeps its checkpoints; "" is the run's own folder."""
    if store == "s3":
        store = LOCAL_S3
    where, mark, settings = store.partition("?")
    return f"{where.rstrip('/')}/{run}{mark}{settings}" if store else ""


def _prove(store: str) -> None:
    """Find out now, before anything is started, whether the store can be used. Raises ConfigError when it says no.

    One that does not answer may do so when the workers have booted: they ask again and again (checkpoint.py, RESTORE_S).
    """
    if "://" not in store:
        return  # the first worker proves a folder, in a millisecond
    from elastic_trainer.state.store import StoreRefused, StoreUnavailable, open_store, prove_put_if_absent

    try:
        prove_put_if_absent(open_store(store))
    except StoreRefused as error:
        raise ConfigError(str(error)) from error
    except StoreUnavailable as error:
        print(f"elastic-trainer: {plain_text(error)}",
              "The run starts, and its workers ask the store again and again. If it will never answer press Ctrl-C, "
              "and correct --store or AWS's variables.", sep="\n", file=sys.stderr, flush=True)


def end_of(path: Path) -> str:
    """Return a file's last lines, at most LAST_BYTES: a run of weeks prints more than fits into memory."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
        return file.read().decode(errors="replace")


def last_words(log_path: Path, most: int = 3) -> list[str]:
    """Return the last lines that workers printed themselves, each once."""
    _, *said = end_of(log_path).split("<stdout>: ")
    return list(dict.fromkeys(line.splitlines()[0] for line in said if line.strip()))[-most:]


def static_hosts(hosts: str | None, hostfile: Path | None) -> dict[str, int]:
    """Read -H a:1,b:2 or a file of `a slots=1` lines. Raises ConfigError."""
    try:
        items = hosts.split(",") if hosts else hostfile.read_text().splitlines() if hostfile else []
    except OSError as error:
        raise ConfigError(f"--hostfile {hostfile} cannot be read: {error.strerror}. Name a file of lines like "
                          f"`a slots=1`.") from error
    listed = {}
    for item in filter(None, map(str.strip, items)):
        found = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:(?::|\s+slots\s*=\s*)([1-9][0-9]{0,3}))?", item)
        if not found:
            raise ConfigError(f"{item!r} is no host with slots. Use -H a:1,b:2, a --hostfile of lines like `a slots=1`, "
                              f"or --host-discovery-script.")
        listed[found[1]] = int(found[2] or 1)
    return listed


def list_hosts(run_dir: Path, hosts: dict[str, int]) -> str:
    """Write a hosts file and return the discovery that prints it: a list that stays, but for whoever edits that file."""
    make_folder(run_dir)
    file = run_dir / "hosts"
    write_text(file, "".join(f"{host}:{slots}\n" for host, slots in hosts.items()))
    script = [sys.executable, "-S", str(Path(__file__).with_name("discovery") / "__main__.py"), "hosts-file", str(file)]
    return shlex.join(script)


def _verify(run_dir: Path) -> int:
    from elastic_trainer.verify import verify

    try:
        verdict = verify(run_dir)
    except FileNotFoundError as error:
        raise ConfigError(f"{run_dir} has no events.jsonl, so nothing is proved. Name a run's folder, e.g. "
                          f"runs/NAME.") from error
    print(*map(plain, verdict.sentences()), sep="\n")
    return 0 if verdict.is_proved else 1


def _hosts(hosts_file: Path) -> int:
    from elastic_trainer.report import print_hosts

    table = hosts_file.with_name(hosts_file.name + ".json")
    if not table.is_file():
        raise ConfigError(f"there is no table {table}. Start the poller: python -m elastic_trainer.discovery poll "
                              f"--hosts-file "
                          f"{hosts_file} …")
    print_hosts(json.loads(table.read_text()))
    return 0


def _watch(run_dir: Path) -> int:
    from elastic_trainer.watch import watch

    watch(run_dir)
    return 0


def _report(run_dir: Path) -> int:
    from elastic_trainer.picture import Film
    from elastic_trainer.report import print_summary, summarize_log

    film = Film()
    print_summary(summarize_log(run_dir, film.shoot))
    print(*film.draw(), sep="\n")
    return 0


if __name__ == "__main__":
    from elastic_trainer.output import outlive_readers

    outlive_readers()
    sys.exit(main())
