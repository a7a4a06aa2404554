"""The check of a store before a run starts: in a process of its own for a store of a cloud, with a
real S3 server.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import s3_servers
from cluster import JOB

from elastic_trainer.commands.store_check import apart, checked_facts
from elastic_trainer.config import ConfigError
from elastic_trainer.state.stores import s3

NOWHERE = "http://127.0.0.1:1"
OF_CLOUDS = {"boto3", "botocore", "fsspec", "gcsfs", "adlfs", "aiohttp", "urllib3", "torch",
             "numpy"}
"""What the supervisor has no use for."""
RUN = ("import json, sys\n"
       "from elastic_trainer.__main__ import main\n"
       "code = main(sys.argv[2:])\n"
       "with open(sys.argv[1], 'w') as file:\n"
       "    json.dump(sorted({name.partition('.')[0] for name in sys.modules}), file)\n"
       "sys.exit(code)")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server, with its bucket."""
    with s3_servers.or_skip(), s3_servers.ministack(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


def environment(endpoint: str, **given: str) -> dict[str, str]:
    """Return the variables of a command whose store is there."""
    return os.environ | s3_servers.environment(endpoint) | given


def command(folder: Path, store: str) -> list[str]:
    """Return the command of a run of a second."""
    return ["run", "--run", "run", "--runs-dir", str(folder), "--store", store, "-np", "1",
            "--host-discovery-script", "echo 127.0.0.1:1", "--", *JOB, "--steps", "10"]


@pytest.mark.usefixtures("turn")
def test_no_library_of_a_cloud_stays_in_the_supervisor(endpoint: str, tmp_path: Path) -> None:
    """Not while the run goes on, and the check in the other process is a whole one: a run in a new
    folder has the hash seed that the checkpoint in the bucket names."""
    store = f"s3://{s3_servers.BUCKET}/check"
    modules = tmp_path / "modules"
    for folder, seed in ((tmp_path / "first", "5"), (tmp_path / "second", "")):
        done = subprocess.run([sys.executable, "-c", RUN, modules, *command(folder, store)],
                              env=environment(endpoint, PYTHONHASHSEED=seed), cwd=tmp_path,
                              capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        loaded = set(modules.read_text().split('"')[1::2])
        assert "elastic_trainer" in loaded and not loaded & OF_CLOUDS
        assert (folder / "run" / "hash_seed").read_text() == "5\n"


@pytest.mark.parametrize(("store", "told"), [
    ("s3:///x", "has no bucket"),
    ("s3://not-ours/x", "AccessDenied. Allow s3:GetObject"),
    ("s3://bucket/x?Body=x", "ServerSideEncryption"),
    ("gs:///x", "has no bucket"),
    ("ftp://x/y", "names no store"),
])
def test_a_store_that_refuses_ends_the_command(endpoint: str, tmp_path: Path, store: str,
                                               told: str) -> None:
    """With the sentence of the refusal alone, and the exit code of a wrong command line."""
    done = subprocess.run([sys.executable, "-m", "elastic_trainer",
                           *command(tmp_path, store)], env=environment(endpoint),
                          cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith("elastic-trainer: ") and told in done.stderr
    assert "Traceback" not in done.stderr


def test_credentials_that_are_missing_are_a_refusal(tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """As before the check had a process of its own."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", NOWHERE)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setattr(s3, "ATTEMPTS", 2)
    with pytest.raises(ConfigError, match="needs credentials"):
        checked_facts("s3://bucket/x", tmp_path, are_read=True)


def test_a_store_that_is_not_reached_lets_the_run_start(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The sentence is printed once, and the store is not asked for the run's facts then."""
    for name, value in s3_servers.environment(NOWHERE).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3, "ATTEMPTS", 2)
    assert checked_facts("s3://bucket/x", tmp_path, are_read=True) == {}
    assert capfd.readouterr().err.count("The run starts, and its workers try") == 1


def test_a_check_that_is_ended_ends_the_command_with_its_code() -> None:
    """128 and the signal's number, as a shell has it; 1 after a traceback."""
    def fails() -> None:
        raise RuntimeError("a fault of ours")

    ends: list[tuple[Callable[[], object], int]] = [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 137), (lambda: os._exit(74), 74), (fails, 1)]
    for end, code in ends:
        with pytest.raises(SystemExit) as ended:
            apart(end)
        assert ended.value.code == code


def test_ctrl_c_ends_a_check_that_waits(tmp_path: Path) -> None:
    """The signal goes to both processes. The command ends with 130 and its sentence, at once, and
    leaves no process that asks the store."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code = ("import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
                "from elastic_trainer.__main__ import run_process; run_process()")
        with subprocess.Popen(
                [sys.executable, "-c", code, *command(tmp_path, "s3://bucket/x")],
                env=environment(f"http://127.0.0.1:{silent.getsockname()[1]}"), cwd=tmp_path,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                start_new_session=True) as process:
            silent.settimeout(300)
            asked, _ = silent.accept()
            with asked:
                assert asked.recv(3) == b"PUT"
                os.killpg(process.pid, signal.SIGINT)
                _, told = process.communicate(timeout=300)
                assert process.returncode == 130
                assert told.strip() == (
                    "elastic-trainer: run was stopped by Ctrl-C before it had ended.")
                asked.settimeout(300)
                while asked.recv(1 << 16):
                    pass  # the rest of the request, then its end
