"""The command line: what it refuses, with which remedy, and what it makes of local hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_trainer.__main__ import _prove, local_hosts, main
from elastic_trainer.config import ConfigError
from elastic_trainer.driver import is_local, parse_hosts
from state.store import StoreRefused, StoreUnavailable

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("command", ["verify", "watch", "report"])
def test_the_user_is_told_when_a_runs_folder_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                          command: str) -> None:
    """Exit code 2, the folder's name, and what to name instead."""
    assert main([command, str(tmp_path / "nowhere")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert str(tmp_path / "nowhere") in said.err and "runs/NAME" in said.err


def test_the_user_is_told_when_a_runs_folder_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run is a folder."""
    (tmp_path / "file").touch()
    assert main(["verify", str(tmp_path / "file")]) == 2
    assert "runs/NAME" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "said"), [
    (["demo", "--no-such-option"], "unknown: --no-such-option"),
    (["--no-such-option"], "unknown: --no-such-option"),
    (["demo", "-np", "2"], "need a command after --"),
    (["demo", "--example", "imagenet"], "imagenet"),
    (["demo", "--reduce", "mean"], "mean"),
    (["demo", "--steps", "many"], "many"),
    (["demo", "--wor", "2"], "--wor"),
])
def test_the_user_is_told_when_an_option_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                    arguments: list[str], said: str) -> None:
    """The usage and the word that is wrong; nothing is begun."""
    with pytest.raises(SystemExit) as exit_:
        main(["run", *arguments, "--runs-dir", str(tmp_path / "runs")])
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("least", "most"), [("3", "2"), ("0", "2"), ("-1", "2"), ("1", "0")])
def test_the_user_is_told_when_more_workers_are_needed_than_there_are(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], least: str, most: str) -> None:
    """Both numbers and the rule; nothing is begun."""
    arguments = ["--min-workers", least, "--workers", most, "--runs-dir", str(tmp_path / "runs")]
    assert main(["run", "demo", *arguments]) == 2
    said = capsys.readouterr().err
    assert f"--min-workers is {least}" in said and f"--workers {most}" in said and "min ≤ workers" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [[], ["train"], ["verify"], ["verify", "a", "b"]])
def test_the_usage_is_shown_when_the_command_is_none(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """Exit code 2."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_the_help_names_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0."""
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    said = capsys.readouterr().out
    assert all(command in said for command in ("run", "verify", "watch", "report"))


def test_the_exit_code_is_the_processs_when_it_is_called_as_a_module(tmp_path: Path) -> None:
    """Scripts around it see it."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-m", "elastic_trainer", "verify", str(tmp_path / "nowhere")], env=env,
                          capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


def test_each_local_worker_has_a_host_of_its_own_when_no_hosts_are_given(tmp_path: Path) -> None:
    """The option names a script that prints them, also from a folder with spaces and quotes in its name."""
    option, script = local_hosts(tmp_path / "a run's \"folder\"", 5)
    assert option == "--host-discovery-script"
    done = subprocess.run(script, shell=True, capture_output=True, text=True, cwd="/")
    hosts = parse_hosts(done.stdout, None)
    assert done.returncode == 0
    assert len(hosts) == 5 and set(hosts.values()) == {1}
    assert all(is_local(host) for host in hosts)


def test_the_run_starts_when_its_store_does_not_answer(monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """It is said, and the workers ask again; only what no time mends is the user's mistake (exit 2 ends a unit)."""
    def answer(error: Exception) -> None:
        def prove(store: object) -> None:
            raise error

        monkeypatch.setattr("state.store.open_store", lambda url: None)
        monkeypatch.setattr("state.store.prove_put_if_absent", prove)

    answer(StoreUnavailable("s3://bucket/run did not take it: SlowDown"))
    _prove("s3://bucket/run")
    said = capsys.readouterr().err
    assert "SlowDown" in said and "Ctrl-C" in said
    answer(StoreRefused("s3://bucket/run did not take it: NoSuchBucket"))
    with pytest.raises(ConfigError, match="NoSuchBucket"):
        _prove("s3://bucket/run")
