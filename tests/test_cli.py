"""The command line: what it refuses, with which remedy, and what it makes of local hosts."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from elastic_trainer.__main__ import main
from elastic_trainer.commands.run_options import list_hosts, parse_run, static_hosts
from elastic_trainer.commands.store_check import prove
from elastic_trainer.config import ConfigError
from elastic_trainer.driver import horovodrun
from elastic_trainer.driver.hosts import Locations, parse_hosts
from elastic_trainer.state.stores.store import StoreRefused, StoreUnavailable

ROOT = Path(__file__).resolve().parent.parent


def test_the_help_of_a_command_imports_no_library_that_takes_long() -> None:
    """Each has one. They are printed one after the other, in one process."""
    code = ("import sys; from contextlib import suppress; "
            "from elastic_trainer.commands.command import COMMANDS, main\n"
            "for name in COMMANDS:\n"
            "    with suppress(SystemExit):\n"
            "        main([name, '--help'])\n"
            "sys.exit(str({'torch', 'boto3', 'aiohttp', 'rich', 'fsspec', 'pydantic'} "
            "& {*sys.modules}))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "set()" and done.stdout.count("usage: elastic-trainer ") == 15


def test_ctrl_c_ends_a_command_with_a_sentence(tmp_path: Path) -> None:
    """Exit code 130, and no traceback. The command is stopped while it reads the prices."""
    (tmp_path / "events.jsonl").touch()
    prices = tmp_path / "prices.toml"
    os.mkfifo(prices)
    code = ("import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "from elastic_trainer.__main__ import run_process; run_process()")
    command = [sys.executable, "-c", code, "report", str(tmp_path), "--prices", str(prices)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        with open(prices, "w"):  # waits until the command has opened the file
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=300)
    assert process.returncode == 130
    assert told.strip() == "elastic-trainer: report was stopped by Ctrl-C before it had ended."


@pytest.mark.parametrize(("text", "output"),
                         [(None, "There is no table"), ("{", "is not the table of a poller"),
                          ("[]", "is not the table of a poller"),
                          ('{"hosts": [{}], "time": 1}', "is not the table of a poller")])
def test_an_error_is_shown_when_there_is_no_table_of_hosts(tmp_path: Path,
                                                          capsys: pytest.CaptureFixture[str],
                                                          text: str | None, output: str) -> None:
    """With the file, and what to do: no traceback."""
    if text is not None:
        (tmp_path / "hosts.json").write_text(text)
    assert main(["hosts", str(tmp_path / "hosts")]) == 2
    read = capsys.readouterr()
    assert str(
        tmp_path / "hosts.json") in read.err and output in read.err and "--hosts-file" in read.err


RUN = {  # refused before anything is started
    "demo --no-such-option": "--no-such-option is no option",
    "--no-such-option": "--no-such-option is no option",
    "demo -np 2": "need a command after --",
    "--workers 2 python x.py": "A command comes after --: -- python x.py",
    "--stepss 5": "--stepss is no option of `elastic-trainer run`. Did you mean --steps?",
    "--stepss=5": "Did you mean --steps?", "--name x -- true": "Did you mean --run?",
    "--min_workers 1 -- true": "Did you mean --min-workers?",
    "--nproc-per-node 2 -- true": "Did you mean --workers?",
    "--elastic-timeot 3 -- true": "Did you mean --elastic-timeout?",
    "--store x --verbos -- true": "Did you mean --verbose?",
    "--foo -- true": "after the script's name", "-x -- true": "-x is no option",
    "--elastic-timeout -- true": "--elastic-timeout: expected one argument",
    "--mpi -- true": "Horovod has no elastic mode with MPI",
    "--autotune -- true": "tuned collectives lose steps",
    "--reset-limit=3 -- true": "--reset-limit is an option of horovodrun that an elastic",
    "--verbose": "need a command after --", "demo --example imagenet": "imagenet",
    "demo --reduce mean": "mean", "demo --steps many": "many", "demo --wor 2": "--wor",
    "--workers 2 --": "no command stands after --", "--": "no command stands after --",
    "-- ''": "no command stands after --",
    **{f"demo --min-workers {least} --workers {most}":
       f"--min-workers is {least}, but the run starts with {most} workers"
       for least, most in ((3, 2), (0, 2), (-1, 2), (3, 1))},
    **{f"demo --workers {number}":
       f"--workers is {number}, so no worker would start. Use --workers 1 or more."
       for number in (0, -2)},
    "-np 8 --workers 4 -- true": "-np is 8, but the hosts have 4 slots",
    "-H a:1,b:1 -np 3 -- true": "-np is 3, but the hosts have 2 slots",
    "-H a:1 --host-discovery-script ./hosts.sh -- true": "not allowed with",
    "--host-discovery-script ./hosts.sh -- true": "-np is not given",
    "--min-np 5 -- true": "--min-np is 5, but the run starts with 4 workers",
    "-np 4 --max-np 2 -- true": "--max-np is 2, but the run starts with 4 workers",
    "-H a:0 -- true": "'a:0' is not a host with its number of slots",
    "-H -oProxyCommand=x:1 -- true": "expected one argument",
    "--hostfile /nowhere/hosts -- true": "/nowhere/hosts cannot be read",
    "--runs-dir here/file --run x -- true": "cannot be a run's folder",
    f"--run {'x' * 300} -- true": "cannot be a run's folder",
}
OTHERS = {
    **{f"{command} nowhere": "nowhere. Name a run's folder, e.g. runs/NAME"
       for command in ("verify", "watch", "report")},
    "verify here/file": "e.g. runs/NAME",
    "verify here": "here has no events.jsonl, so nothing is proved. Name a run's folder",
    "report here": "here has no events.jsonl, so nothing is reported. Name a run's folder",
    "": "usage", "train": "usage", "verify": "usage", "verify a b": "usage",
    "replay --storm rough --": "no command stands after --",
    "replay --name x": "Did you mean --run?", "replay": "--storm --trace is required",
    "setup --chek": "unrecognized arguments: --chek",
    "replay --storm rough --name x": "Did you mean --run?",
    "replay --storm rough --elastic-timeot=3 -- true": "Did you mean --elastic-timeout?",
    "replay --storm rough python x.py": "A command comes after --: -- python x.py",
    "plan --hostss 3": "Did you mean --hosts?", "report runs/x --jsn": "Did you mean --json?",
    "watch runs/x --wbe": "unrecognized arguments: --wbe",
    "verify runs/x --price x": "unrecognized arguments: --price",
    "tune --stepz 3 -- true": "--stepz", "doctor --hots a": "--hots",
    "scaling --worker 2 -- true": "--worker", "standby --slotz 2 -- true": "--slotz",
}


@pytest.mark.parametrize(("words", "output"), [*OTHERS.items(), *(
    (f"run {words}", output) for words, output in RUN.items())])
def test_a_command_line_that_is_wrong_is_refused_with_the_remedy(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
        words: str, output: str) -> None:
    """Exit code 2, what is wrong and what to give instead; no abbreviation is taken. Nothing is
    started, and no folder made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").touch()
    assert code_of(shlex.split(words)) == 2
    read = capsys.readouterr()
    assert output in read.err and read.out == ""
    left = {path.name for path in tmp_path.rglob("*")} - {"runs"}  # its folder may be made
    assert left == {"here", "file"}


def test_options_of_horovodrun_are_passed_on_as_they_are() -> None:
    """In their order, with their values, in each form that argparse knows."""
    given = ["--network-interfaces", "eth0,eth1", "-p", "2222", "--elastic-timeout=60", "--verbose",
             "-prefix-timestamp", "-i", "key", "--no-stall-check"]
    run = parse_run(["--workers", "2", *given, "--", "python", "x.py", "--stepss", "3"])
    assert run.horovodrun_options == [
        "--network-interfaces", "eth0,eth1", "-p", "2222", "--elastic-timeout", "60", "--verbose",
        "-prefix-timestamp", "-i", "key", "--no-stall-check"]
    assert run.command == ["python", "x.py", "--stepss", "3"]


def code_of(arguments: list[str]) -> int:
    """Run a command line; return its exit code."""
    try:
        return main(arguments)
    except SystemExit as end:
        return int(str(end.code))


@pytest.mark.parametrize(("example", "install"), [
    ("digits", "pip install scikit-learn"),
    ("finetune", "pip install 'elastic-trainer[transformers]'")])
def test_the_package_is_named_when_an_example_needs_one_that_is_missing(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
        example: str, install: str) -> None:
    """Before a worker starts."""
    monkeypatch.setattr("elastic_trainer.commands.run_options.find_spec", lambda name: None)
    assert main(["run", "demo", "--example", example, "--runs-dir", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert f"--example {example} needs" in error and install in error
    assert list(tmp_path.iterdir()) == []


def test_the_help_names_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0."""
    assert code_of(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(command in output for command in ("run", "verify", "watch", "report"))


def test_the_exit_code_is_the_processs_when_it_is_called_as_a_module(tmp_path: Path) -> None:
    """Scripts around it see it."""
    done = subprocess.run([sys.executable, "-m", "elastic_trainer", "verify", tmp_path / "nowhere"],
                          env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
                          capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


def test_each_host_is_listed_as_it_was_given(tmp_path: Path) -> None:
    """It is a command that prints them, also from a folder with spaces and quotes in its name."""
    script = list_hosts(tmp_path / "a run's \"folder\"", {"127.0.0.1": 1, "127.0.0.2": 3})
    done = subprocess.run(script, shell=True, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0
    assert parse_hosts(done.stdout, None) == {"127.0.0.1": 1, "127.0.0.2": 3}


def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *options:
            str) -> tuple[argparse.Namespace, dict[str, int]]:
    """Return what the driver would be told (and how many standbys wait), and the hosts that it
    would find."""
    logged, standbys = list[argparse.Namespace](), list[int]()

    def supervise(run_dir: Path, horovodrun_options: list[str], *_: object, **__: object) -> int:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        for name in ("-np", "--min-np", "--max-np"):
            parser.add_argument(name, type=int)
        parser.add_argument("--host-discovery-script")
        logged.append(parser.parse_known_args(horovodrun_options)[0])
        return 130

    monkeypatch.setattr("elastic_trainer.driver.supervisor.supervise", supervise)

    def local_standbys(run_dir: Path, command: list[str],
                       count: int) -> AbstractContextManager[None]:
        standbys.append(count)
        return nullcontext()

    monkeypatch.setattr("elastic_trainer.driver.standby_pool.local_standbys", local_standbys)
    for name in ("ELASTIC_TRAINER_REDUCE", "ELASTIC_TRAINER_STORE"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # put back afterwards
    monkeypatch.setenv("ELASTIC_TRAINER_REDUCE", "exact")
    assert main(["run", "--run", "x", "--runs-dir", str(tmp_path), *options, "--", "true"]) == 130
    (logged[0].standbys,) = standbys
    printed = subprocess.run(logged[0].host_discovery_script, shell=True, capture_output=True,
                             text=True)
    return logged[0], parse_hosts(printed.stdout, None)


@pytest.mark.parametrize(("options", "np", "min_np", "max_np", "hosts"), [
    ([], 4, 1, None, 4),
    (["--workers", "2"], 2, 1, None, 2),
    (["-np", "8"], 8, 1, None, 8),
    (["--num-proc=2"], 2, 1, None, 2),
    (["-np", "2", "--min-np", "2", "--max-np", "2"], 2, 2, 2, 2),
    (["-np", "2", "--workers", "4"], 2, 1, 2, 4),
])
def test_there_are_as_many_local_workers_as_were_asked_for(monkeypatch: pytest.MonkeyPatch,
                                                           tmp_path: Path, options: list[str],
                                                           np: int, min_np: int, max_np: int | None,
                                                           hosts: int) -> None:
    """Each has a host of its own on this machine, whichever option names their number."""
    logged, listed = started(monkeypatch, tmp_path, *options)
    assert (logged.np, logged.min_np, logged.max_np) == (np, min_np, max_np)
    locations = Locations()
    locations.look_up(listed)
    assert len(listed) == hosts and set(listed.values()) == {1} and all(locations.is_here.values())


@pytest.mark.parametrize(
    "given",
    [["-H", "a:1,b:2"], ["--hosts=a:1,b:2"], ["--hostfile", "FILE"], ["-hostfile", "FILE"]])
def test_a_list_of_hosts_is_one_for_our_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                               given: list[str]) -> None:
    """Horovod's static launcher is never asked: it knows no deaths, and shows the environment on
    command lines."""
    (tmp_path / "file").write_text("a slots=1\n\nb slots=2\n")
    options = [str(tmp_path / "file") if word == "FILE" else word for word in given]
    logged, listed = started(monkeypatch, tmp_path, *options, "-np", "2")
    assert listed == {"a": 1, "b": 2} and (logged.np, logged.max_np) == (2, 2)


@pytest.mark.parametrize(("options", "standbys"), [
    ([], 1),
    (["--standby", "0"], 0),
    (["--standby", "2"], 2),
    (["-H", "a:2", "-np", "2"], 0),
    (["--host-discovery-script", "echo a:4", "-np", "4"], 0),
])
def test_one_standby_waits_where_the_workers_are_local(monkeypatch: pytest.MonkeyPatch,
                                                       tmp_path: Path, options: list[str],
                                                       standbys: int) -> None:
    """Unless another number was asked for; on other hosts a service keeps them."""
    assert started(monkeypatch, tmp_path, *options)[0].standbys == standbys


@pytest.mark.parametrize(("options", "min_np"), [
    (["--host-discovery-script", "echo a:4", "-np", "4"], 1),
    (["--host-discovery-script", "echo a:4", "-np", "4", "--min-np", "2"], 2),
    (["--host-discovery-script", "echo a:4", "-np", "4", "--min-workers", "3"], 3),
    (["-H", "a:8,b:8", "--min-workers", "9"], 9),
])
def test_a_run_goes_on_with_one_unless_more_were_asked_for(monkeypatch: pytest.MonkeyPatch,
                                                           tmp_path: Path, options: list[str],
                                                           min_np: int) -> None:
    """Horovod's own default is -np: the first lost host would stop the training."""
    assert started(monkeypatch, tmp_path, *options)[0].min_np == min_np


def test_a_host_has_one_slot_when_its_item_names_none() -> None:
    """As horovodrun does it."""
    assert static_hosts("a,b:2", None) == {"a": 1, "b": 2}


@pytest.mark.parametrize(("arguments", "output"), [
    (["-np", "2", "-H", "127.0.0.1:1,127.0.0.2:1"], "--host-discovery-script"),
    (["-np", "2"], "--host-discovery-script"),
    *((["-np", "1", "--host-discovery-script", "echo localhost:1", *more], more[0])
      for more in (["--reset-limit", "3"], ["--output-filename", "out"],
                   ["--blacklist-cooldown-range", "60", "300"])),
    (["-np", "1", "--host-discovery-script", "echo localhost:1", "--autotune"], "HOROVOD_AUTOTUNE"),
])
def test_the_driver_refuses_what_it_does_not_keep(capsys: pytest.CaptureFixture[str],
                                                  monkeypatch: pytest.MonkeyPatch,
                                                  arguments: list[str], output: str) -> None:
    """Silence would be taken for a yes."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    assert horovodrun.main([*arguments, "true"]) == 2
    assert output in capsys.readouterr().err


def test_the_run_starts_when_its_store_does_not_answer(monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """It is said, and the workers ask again; only what no time mends is the user's mistake (exit 2
    ends a unit)."""
    def answer(error: Exception) -> None:
        def prove(store: object) -> None:
            raise error

        monkeypatch.setattr("elastic_trainer.state.stores.by_url.open_store", lambda url: None)
        monkeypatch.setattr("elastic_trainer.state.stores.store.prove_put_if_absent", prove)

    answer(StoreUnavailable("s3://bucket/run did not take it: SlowDown"))
    assert not prove("s3://bucket/run")
    output = capsys.readouterr().err
    assert "SlowDown" in output and "Ctrl-C" in output
    answer(StoreRefused("s3://bucket/run did not take it: NoSuchBucket"))
    with pytest.raises(ConfigError, match="NoSuchBucket"):
        prove("s3://bucket/run")
