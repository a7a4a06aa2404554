"""The set-up and the first command, as a new user meets them: deploy/install.sh and
./horovodrun_elastic.sh."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from elastic_trainer.events.log import read_events

ROOT = Path(__file__).resolve().parent.parent
INSTALL = ROOT / "deploy" / "install.sh"


def asked_of_install(then: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the beginning of install.sh, in which nothing is done yet, and `then` with its
    functions."""
    head = INSTALL.read_text().partition("\nif is_installed; then exit 0; fi\n")[0]
    assert "fingerprint()" in head and "pip" not in head.partition("set -euo pipefail")[2]
    script = head.replace('root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)', f"root='{ROOT}'")
    return subprocess.run(["bash", "-c", f"{script}\n{then}"], env=os.environ | env,
                          capture_output=True, text=True)


def install(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(INSTALL)], env=env, capture_output=True, text=True)


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment as install.sh leaves it, as far as it looks; a Python to begin with is
    nowhere."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to("/bin/false")
    (venv / "pyvenv.cfg").write_text("version = 3.11.7\n")
    env = {"ELASTIC_TRAINER_VENV": str(venv), "PYTHON": "/nowhere/python3",
           "XDG_CACHE_HOME": str(tmp_path / "cache")}
    stamp = asked_of_install("fingerprint", env)
    (venv / ".installed-examples,web,dev"
     ).write_text(f"{stamp.stdout}{os.environ.get('TORCH_SPEC', 'torch==2.13.0')}\n")
    return os.environ | env


def changed_at(folder: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


def test_a_second_set_up_does_nothing(installed: dict[str, str], tmp_path: Path) -> None:
    """It says nothing, touches nothing, and needs nothing: not even a Python that works."""
    before = changed_at(tmp_path)
    done = install(installed)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert changed_at(tmp_path) == before


def test_a_set_up_is_done_again_when_what_decides_it_has_changed(installed: dict[str, str],
                                                                 tmp_path: Path) -> None:
    """Here it cannot be, and says in one sentence what is missing; what is there stays."""
    (tmp_path / "venv" / "pyvenv.cfg").write_text("version = 3.12.0\n")
    before = changed_at(tmp_path)
    done = install(installed)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "install: Python 3.10 or newer is missing (tried /nowhere/python3).")
    assert changed_at(tmp_path) == before


def test_one_sentence_is_shown_when_there_is_no_compiler(tmp_path: Path) -> None:
    """Before anything is done, with the remedy."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "dirname", "env", "sha256sum", "cat", "flock", "tar", "df", "awk", "id",
                 "grep", "make"):
        if found := shutil.which(tool):
            (tools / tool).symlink_to(found)
    env = {
        "PATH": str(tools), "HOME": str(tmp_path), "PYTHON": sys.executable,
        "ELASTIC_TRAINER_VENV": str(tmp_path / "venv")}
    done = install(env)
    assert done.returncode == 1
    output = [line for line in done.stderr.splitlines() if "compiler" in line]
    assert output == [
        "install: A C++ compiler (c++) is missing, and Horovod is built from source. Install one, "
        "e.g. apt-get "
        "install g++."]
    assert {path.name for path in tmp_path.iterdir()} == {"bin"}


@pytest.mark.usefixtures("turn")
def test_the_first_commands_last_line_is_the_undisturbed_hash_though_a_worker_is_killed(
        tmp_path: Path) -> None:
    """./horovodrun_elastic.sh demo, from set-up to summary, as a new user tries it: by the command
    that it shows, and against a world of one. Result and proof say the same.
    """
    env = {"ELASTIC_TRAINER_VENV": sys.prefix}
    if asked_of_install("is_installed", env).returncode:
        pytest.skip(
            f"{sys.prefix} is not what deploy/install.sh makes of this folder (tests/run sees to "
            f"it)"
        )
    command = [str(ROOT / "horovodrun_elastic.sh"), "demo", "--steps", "20", "--standby",
               "0", "--runs-dir", str(tmp_path)]
    shown, killed = list[str](), 0
    with subprocess.Popen([*command, "--run", "small"], env=os.environ | env, cwd=tmp_path,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as demo:
        assert demo.stdout
        deadline = threading.Timer(300, demo.terminate)
        deadline.start()
        for line in demo.stdout:
            shown.append(line.rstrip())
            if not killed and (tried := re.search("try it: (kill -9 ([0-9]+))$", shown[-1])):
                killed = int(tried[2])
                subprocess.run(["sh", "-c", tried[1]], check=True)
        deadline.cancel()
    assert demo.returncode == 0 and killed, shown
    alone = subprocess.run([*command, "--run", "alone", "--workers", "1"], env=os.environ | env,
                           cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    assert shown[-1] == alone.stdout.splitlines()[-1]
    result = json.loads((tmp_path / "small" / "result.json").read_text())
    assert shown[-1] == f"weights {result['weights_sha256']}"
    assert (result["finished"], result["steps"], result["attempts"]) == (True, 20, 1)
    gone = [(e["pid"], e["exit_code"])
            for e in read_events(tmp_path / "small") if e["event"] == "driver.worker_gone"]
    assert [one for one in gone if one[1] != 0] == [(killed, -9)]
    proof = subprocess.run([sys.executable, "-m", "elastic_trainer", "verify", "small"],
                           cwd=tmp_path, capture_output=True, text=True)
    assert proof.returncode == 0 and "in 20 of 20 steps" in proof.stdout, proof.stdout
