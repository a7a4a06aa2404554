"""The options of `elastic-trainer run`: read, checked, and turned into horovodrun's.

command line → here → run (supervisor, driver)
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from elastic_trainer.commands import configured
from elastic_trainer.commands import horovodrun_options as horovodrun
from elastic_trainer.config import ADASUM, REDUCERS, ConfigError
from elastic_trainer.driver import local_gpus
from elastic_trainer.driver.reach import AGENT_PORT, Reach, require_key
from elastic_trainer.host import own
from elastic_trainer.host.modes import make_folder, write_text
from elastic_trainer.host.options import Parser, nearest, options_of
from elastic_trainer.state.configuration import Configuration

EXAMPLES = ("gpt", "digits", "images", "gan", "finetune")
NEEDED = {"digits": ("sklearn", "scikit-learn"), "gan": ("sklearn", "scikit-learn"),
          "finetune": ("transformers", "'elastic-trainer[transformers]'")}
"""What an example imports, and what to install for it."""
WORKERS = 4
LOCAL_S3 = "s3://elastic-trainer/checkpoints"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as it was asked for."""

    name: str
    run_dir: Path
    command: list[str]
    is_demo: bool
    hosts: dict[str, int]
    """The hosts of a fixed list with their slots; empty where a script names them."""
    discovery: str
    """The command that names the hosts; "": it prints `hosts`."""
    numbers: dict[str, int]
    """horovodrun's -np, --min-np and --max-np, where they are given or follow from the hosts."""
    horovodrun_options: list[str]
    """Those that are only horovodrun's."""
    standbys: int
    reduce: str | None
    mixed_hardware: str
    store: str
    """Where the run keeps its checkpoints; "": in its own folder."""
    timeline: bool
    replace_stragglers: bool
    has_own_s3: bool
    """The store is a server of the run's own, on this machine."""
    gpus: dict[str, dict[str, str]]
    """Host → the variables that give its local worker a GPU; empty: there are none to give."""
    standby_device: str
    """gpu, or cpu: a standby stays off the GPU until it has its place."""
    configuration: Configuration
    allow_change: list[str]
    """Keys of the configuration that may differ from the run's."""
    reach: Reach
    """How its hosts are reached, but for horovodrun's options for ssh."""

    def horovodrun(self) -> list[str]:
        """Return horovodrun's options. Disk: writes a fixed list of hosts."""
        discovery = self.discovery or list_hosts(self.run_dir, self.hosts)
        numbers = [text for name, number in self.numbers.items() for text in (name, str(number))]
        return [*self.horovodrun_options, "--host-discovery-script", discovery, *numbers]


def parse_run(argv: list[str]) -> Run:
    """Read the command line of `run`. Raises ConfigError; ends the process for unknown options."""
    parser = _parser()
    ours, command = parser.command_of(argv)
    is_demo = not command
    ours = ours[1:] if ours[:1] == ["demo"] else ours
    configuration = configured.read(ours, os.environ)
    options, others = parser.parse_known_args(
        [*configured.options_of(configuration, parser), *ours])
    passed = options.horovodrun or []
    require_known(others, parser, "elastic-trainer run")
    if is_demo and (given := passed + _given(options, *HOROVODRUNS)):
        parser.error(f"unrecognized arguments: {' '.join(given)} (options of horovodrun need a "
                     f"command after --)")
    _refuse_ignored(options, is_demo)
    listed = static_hosts(options.hosts, options.hostfile)
    _check_start(options, listed)
    example = options.example or EXAMPLES[0]
    if is_demo:
        configured.require_own(configuration, example)
    name = options.run or f"{example if is_demo else 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
    has_script = options.host_discovery_script is not None
    is_local = not listed and not has_script
    if is_local:
        listed = {f"127.0.0.{number}": 1 for number in range(1, _workers(options) + 1)}
    reach = reach_of(options)
    if reach.by_agent and is_local:
        raise ConfigError("--reach is agent, and no hosts are given: local workers need no agent. "
                          "Give --host-discovery-script or -H, or leave --reach out.")
    gpus = gpus_of(list(listed), options.share_gpu, os.environ) if is_local else {}
    return Run(
        name=name, run_dir=(options.runs_dir / name).resolve(), is_demo=is_demo,
        command=demo(example, options) if is_demo else command,
        hosts={} if has_script else listed, discovery=options.host_discovery_script or "",
        numbers=_numbers(options, {} if has_script else listed), horovodrun_options=passed,
        standbys=int(is_local) if options.standby is None else options.standby,
        reduce=options.reduce, mixed_hardware=options.mixed_hardware,
        store=store_of_run(options.store, name), timeline=options.timeline,
        replace_stragglers=options.replace_stragglers,
        has_own_s3=options.store == "s3", gpus=gpus,
        standby_device=options.standby_device or ("cpu" if gpus else "gpu"),
        configuration=configuration, allow_change=options.allow_change, reach=reach)


# --- the parser ---------------------------------------------------------------------------------

HOROVODRUNS = {"host_discovery_script": "--host-discovery-script", "hosts": "-H",
               "hostfile": "--hostfile", "num_proc": "-np", "min_np": "--min-np",
               "max_np": "--max-np"}
"""Options of horovodrun that are read here, by their name in the namespace."""


def _given(options: argparse.Namespace, *names: str) -> list[str]:
    return [HOROVODRUNS[name] for name in names if getattr(options, name) is not None]


def _parser() -> Parser:
    parser = Parser(
        prog="elastic-trainer run",
        usage="%(prog)s [demo] [options]\n"
              "       %(prog)s [options] [horovodrun options] -- python my_train.py …",
        epilog="./horovodrun_elastic.sh sets up, and then does the same.")
    configured.add_options(parser, os.environ)
    _add_own(parser, os.environ)
    hosts = parser.add_argument_group("hosts, as horovodrun takes them (with a command)")
    where = hosts.add_mutually_exclusive_group()
    where.add_argument("--host-discovery-script", metavar="COMMAND",
                       help="prints the present host:slots lines")
    where.add_argument("-H", "--hosts", metavar="a:1,b:2", help="a fixed list")
    where.add_argument("-hostfile", "--hostfile", type=Path,
                       help="a fixed list, as a file of lines like `a slots=1`")
    hosts.add_argument("-np", "--num-proc", type=int,
                       help="workers to begin with; after a minute --min-np are enough")
    hosts.add_argument("--min-np", "--min-num-proc", type=int,
                       help="wait when fewer workers are left (--min-workers)")
    hosts.add_argument("--max-np", "--max-num-proc", type=int, help="the most workers that train")
    horovodrun.add_options(parser)
    return parser


def require_known(others: list[str], parser: argparse.ArgumentParser, command: str) -> None:
    """Raise ConfigError for words of the command line that no parser knows."""
    if not others:
        return
    word = next((word for word in others if word.startswith("-")), "")
    if "demo" in others and not word:
        raise ConfigError("`demo` must come first: elastic-trainer run demo, and then its options.")
    if not word:
        raise ConfigError(f"{others[0]!r} is no option of `{command}`. A command comes after --: "
                          f"-- {shlex.join(others)}")
    raise ConfigError(
        f"{word} is no option of `{command}`{nearest(word, options_of(parser)) or '.'} Its --help "
        f"lists all. An option of your script comes after --, after the script's name.")


def require_known_of_run(others: list[str], parser: argparse.ArgumentParser, command: str) -> None:
    """Raise ConfigError for words that neither `run` nor this parser of another command knows."""
    of_run = _parser()
    unknown = of_run.parse_known_args(others)[1]
    both = Parser(add_help=False, parents=[of_run], conflict_handler="resolve")
    for action in parser._actions:
        both._add_action(action)
    require_known(unknown, both, command)


def _reducer(name: str) -> str:
    """Return the name of a reducer. Raises ArgumentTypeError with the reason for Adasum."""
    if name.lower() == "adasum":
        raise argparse.ArgumentTypeError(ADASUM)
    return name


def _add_own(parser: argparse.ArgumentParser, env: Mapping[str, str]) -> None:
    add = parser.add_argument
    add("--run", metavar="NAME",
        help="the run's name; the same name again resumes it (runs/NAME)")
    add("--runs-dir", type=Path, default=Path("runs"), help="where runs are kept (%(default)s)")
    add("--reduce", choices=REDUCERS, type=_reducer, default=env.get("ELASTIC_TRAINER_REDUCE"),
        help="exact: the same bits for every world; ring: float allreduce (default: the script's, "
             "or exact)")
    add("--mixed-hardware", choices=("refuse", "warn"),
        default=env.get("ELASTIC_TRAINER_MIXED_HARDWARE", "refuse"),
        help="exact: a host whose processor or torch computes other bits than the world's gets no "
             "place, or gets one with a warning (%(default)s)")
    add("--replace-stragglers", action="store_true",
        default=env.get("ELASTIC_TRAINER_REPLACE_STRAGGLERS") == "1",
        help="a worker that computes 1.5 times as long as its peers over many steps leaves, and "
             "its host is kept out for 10 minutes, while --min-np others stay")
    add("--timeline", action="store_true",
        default=env.get("ELASTIC_TRAINER_TIMELINE") == "1",
        help="write what each worker does in each step, for Perfetto (runs/NAME/timeline)")
    add_reach(parser, env)
    add("--workers", type=int,
        help=f"local workers, when no hosts are given (-np, or else {WORKERS})")
    add("--min-workers", type=int, help="wait when fewer are left, as --min-np (1)")
    add("--standby", type=int, metavar="N",
        help="booted workers that wait on this machine, once training has begun (1 for local "
             "workers; 0 where hosts are given, since each host keeps its own: with a number those "
             "are not found)")
    add("--standby-device", choices=("gpu", "cpu"),
        default=env.get("ELASTIC_TRAINER_STANDBY_DEVICE"),
        help="cpu: a standby holds no memory of a GPU: it waits for its place at the script's "
             "first use of one (default: gpu; cpu where local workers take one GPU each)")
    add("--share-gpu", action="store_true",
        help="let local workers share GPUs, for tests and rehearsals: NCCL sends over sockets, "
             "slowly")
    add("--example", choices=EXAMPLES, help=f"demo: what to train ({EXAMPLES[0]})")
    add("--steps", type=int, help="demo: the number of steps")
    add("--seed", type=int, help="demo: the seed")
    add("--store", metavar="URL", default=env.get("ELASTIC_TRAINER_STORE", ""),
        help="where checkpoints go, each run's under its name: a folder; s3://, gs:// or az:// "
             "with bucket/prefix; or s3 for a server on this machine (default: the run's folder)")


def add_reach(parser: argparse.ArgumentParser, env: Mapping[str, str]) -> None:
    """Declare how hosts are reached: for `run` and `doctor`."""
    add = parser.add_argument
    key_file = env.get("ELASTIC_TRAINER_AGENT_KEY_FILE", "")
    add("--reach", choices=("ssh", "agent"), default="agent" if key_file else "ssh",
        help="how workers are started on hosts: ssh, or agent, which needs no ssh and an agent "
             "with --starts-workers on each host (%(default)s)")
    add("--agent-key-file", metavar="FILE", default=key_file,
        help="with --reach agent: the file with the agents' key (mode 600)")
    add("--agent-port", type=int, default=int(env.get("ELASTIC_TRAINER_AGENT_PORT", AGENT_PORT)),
        metavar="PORT", help="with --reach agent: where agents listen (%(default)s)")


def reach_of(options: argparse.Namespace) -> Reach:
    """Return how hosts are reached. Raises ConfigError."""
    by_agent = options.reach == "agent"
    if by_agent and not options.agent_key_file:
        raise ConfigError("--reach is agent, which needs the agents' key. Give --agent-key-file "
                          "FILE, the file that `agent --key-file` has.")
    if not by_agent and options.agent_key_file:
        raise ConfigError(f"--agent-key-file is {options.agent_key_file}, which only --reach agent "
                          f"uses. Give --reach agent, or leave it out.")
    if by_agent:
        require_key(options.agent_key_file)
    return Reach(key_file=options.agent_key_file and os.path.abspath(options.agent_key_file),
                 agent_port=options.agent_port)


# --- checks -------------------------------------------------------------------------------------

def _workers(options: argparse.Namespace) -> int:
    """Return the number of local workers."""
    return next(n for n in (options.workers, options.num_proc, WORKERS) if n is not None)


def _refuse_ignored(options: argparse.Namespace, is_demo: bool) -> None:
    """Refuse an option that would have no effect beside the others. Raises ConfigError."""
    for name in ("example", "steps", "seed"):
        if not is_demo and getattr(options, name) is not None:
            raise ConfigError(f"--{name} is {getattr(options, name)!r}, but it is an option of the "
                              f"demo, and a command is given. If it is your script's option, put "
                              f"it after the script's name.")
    given = _given(options, "host_discovery_script", "hosts", "hostfile")
    if given and options.workers is not None:
        raise ConfigError(f"--workers is {options.workers}, but it sets the number of local "
                          f"workers, and {given[0]} names the hosts. Use -np.")
    if given and options.share_gpu:
        raise ConfigError(f"--share-gpu is for local workers, and {given[0]} names the hosts. Give "
                          f"each host as many slots as it has GPUs.")
    if options.min_np is not None and options.min_workers not in (None, options.min_np):
        raise ConfigError(f"--min-workers is {options.min_workers} and --min-np is "
                          f"{options.min_np}, but both set the same number. Give one of them.")


def _require_package(example: str) -> None:
    """Raise ConfigError if an example needs a package that is not installed here."""
    module, package = NEEDED.get(example, ("", ""))
    if module and find_spec(module) is None:
        raise ConfigError(f"--example {example} needs {module}, which is not installed. Install "
                          f"it: pip install {package}.")


def _require_there(command: str) -> None:
    """Raise ConfigError if the program of --host-discovery-script is not there. Else the driver
    would ask it for a minute, in silence. What only a shell can read is not looked at."""
    try:
        name = next(iter(shlex.split(command)), "")
    except ValueError:
        return
    if name and ("/" not in name or re.search(r"[=$`~*?({]", name)):
        return
    why = ("is empty" if not name else f"is {name}, which is not there" if not os.path.exists(name)
           else f"is {name}, which is not executable" if not os.access(name, os.X_OK) else "")
    if why:
        raise ConfigError(f"--host-discovery-script {why}. Name a command that prints lines of "
                          f"host:slots, e.g. ./hosts.sh after chmod +x hosts.sh.")


def _check_start(options: argparse.Namespace, listed: Mapping[str, int]) -> None:
    """Check the numbers of workers and the name. Raises ConfigError."""
    for name, number in {"--workers": options.workers, "-np": options.num_proc}.items():
        if number is not None and number < 1:
            raise ConfigError(
                f"{name} is {number}, so no worker would start. Use {name} 1 or more.")
    if options.host_discovery_script is not None and options.num_proc is None:
        raise ConfigError("-np is not given, and --host-discovery-script does not set the number "
                          "of workers at the start. Give it with -np, e.g. -np 4.")
    begin = options.num_proc or sum(listed.values()) or _workers(options)
    for name, least in {"--min-workers": options.min_workers, "--min-np": options.min_np}.items():
        if least is not None and not 1 <= least <= begin:
            raise ConfigError(f"{name} is {least}, but the run starts with {begin} workers. Use "
                              f"{name} with a number from 1 to {begin}, or start more workers "
                              f"(--workers, -np).")
    if options.max_np is not None and options.num_proc and options.max_np < options.num_proc:
        raise ConfigError(f"--max-np is {options.max_np}, but the run starts with "
                          f"{options.num_proc} workers. Use --max-np {options.num_proc} or more, "
                          f"or a smaller -np.")
    if options.host_discovery_script is not None:
        _require_there(options.host_discovery_script)
    if options.run is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", options.run):
        raise ConfigError(f"--run is {options.run!r}, which cannot name a folder and a place in "
                          f"the store. Use letters, digits, '.', '_' and '-', with a letter or "
                          f"digit first.")


def _numbers(options: argparse.Namespace, listed: Mapping[str, int]) -> dict[str, int]:
    """Return horovodrun's numbers of workers. Raises ConfigError.

    Its own --min-np is -np, with which it would wait whenever one worker is gone.
    """
    begin, most = options.num_proc, options.max_np
    if listed:
        slots = sum(listed.values())
        begin = begin or slots
        if begin > slots:
            raise ConfigError(f"-np is {begin}, but the hosts have {slots} slots, so the training "
                              f"would never start. Use -np {slots} or fewer, or more slots "
                              f"(--workers where they are local).")
        most = most or (begin if begin < slots else None)
    least = options.min_np or options.min_workers or 1
    numbers = {"-np": begin, "--min-np": least, "--max-np": most}
    return {name: number for name, number in numbers.items() if number is not None}


def demo(example: str, options: argparse.Namespace) -> list[str]:
    """Return the command of the demo, with its --steps and --seed. Raises ConfigError."""
    _require_package(example)
    flags = [text for flag in ("steps", "seed") if getattr(options, flag) is not None
             for text in (f"--{flag}", str(getattr(options, flag)))]
    return own.command(f"elastic_trainer.examples.{example}", *flags)


def gpus_of(hosts: list[str], shares: bool, env: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the variables that give each local worker its GPU. Raises ConfigError."""
    if not local_gpus.is_for_gpus():
        return {}
    return local_gpus.variables_of(
        hosts, local_gpus.visible_of(env, local_gpus.gpus_here()), shares, env)


# --- hosts and store ----------------------------------------------------------------------------

def static_hosts(hosts: str | None, hostfile: Path | None) -> dict[str, int]:
    """Read -H a:1,b:2 or a file of `a slots=1` lines. Raises ConfigError."""
    try:
        text = hosts.replace(",", "\n") if hosts else hostfile.read_text() if hostfile else ""
    except OSError as error:
        raise ConfigError(f"--hostfile {hostfile} cannot be read: {error.strerror}. Name a file of "
                          f"lines like `a slots=1`.") from error
    listed = {}
    for item in filter(None, map(str.strip, text.splitlines())):
        found = re.fullmatch(
            r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:(?::|\s+slots\s*=\s*)([1-9][0-9]{0,3}))?", item)
        if not found:
            raise ConfigError(f"{item!r} is not a host with its number of slots. Use -H a:1,b:2, "
                              f"a --hostfile of lines like `a slots=1`, or "
                              f"--host-discovery-script.")
        listed[found[1]] = int(found[2] or 1)
    return listed


def list_hosts(run_dir: Path, hosts: Mapping[str, int]) -> str:
    """Write a hosts file and return the discovery that prints it.

    The list is fixed, but a person may edit that file.
    """
    make_folder(run_dir)
    file = run_dir / "hosts"
    write_text(file, "".join(f"{host}:{slots}\n" for host, slots in hosts.items()))
    return own.listing(str(file))


def store_of_run(store: str, run: str) -> str:
    """Return the URL under which one run keeps its checkpoints; "" is the run's own folder."""
    if store == "s3":
        store = LOCAL_S3
    where, mark, settings = store.partition("?")
    return f"{where.rstrip('/')}/{run}{mark}{settings}" if store else ""
