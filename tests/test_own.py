"""Modules of the user's with the names of others: our processes do not import them, and the user's
script imports as Python does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_trainer.host import own
from elastic_trainer.views.verify import verify

ROOT = Path(__file__).resolve().parent.parent
NAMES = """
    abc argparse array ast base64 bisect calendar cmd code codecs collections concurrent contextlib
    copy csv dataclasses datetime decimal email enum errno fcntl fractions functools getpass glob
    gzip hashlib heapq hmac html http importlib inspect io json keyword locale logging math
    mimetypes multiprocessing numbers operator pathlib pickle platform posixpath pprint profile
    queue random re resource runpy sched secrets select selectors shlex shutil signal socket
    socketserver ssl stat statistics string stringprep struct subprocess sysconfig tempfile textwrap
    threading time token tokenize traceback types typing urllib uuid warnings weakref zipfile zlib
    boto3 botocore cffi cloudpickle config data discovery elastic_trainer fsspec horovod host launch
    model numpy observe orjson packaging psutil pydantic requests rich s3fs setup state structlog
    tenacity test torch training utils wire yaml""".split()
"""Python's own, those that our processes import, and those that we had once."""
BESIDE = """
    bdb code config data discovery elastic horovodrun host html mimetypes model observe orjson
    packaging psutil requests resource rich socketserver state stringprep structlog tenacity test
    training utils wire""".split()
"""Names beside the script that a script with plain torch may have."""
SCRIPT = """
import sys
import torch
import torch.nn.functional as F
NAMES = "@NAMES@".split()
early = NAMES[::2]
seen = {name: __import__(name) for name in early}
from elastic_trainer import Trainer, cosine
seen |= {name: __import__(name) for name in NAMES}
assert all(module.MINE == name for name, module in seen.items()), seen
torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = torch.nn.Linear(4, 1)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), dataset, global_batch=16,
                  microbatches=2, until=sys.argv[1], run_dir="alone", checkpoint_every=2)
for step in trainer:
    for x, y in step:
        step.backward(F.mse_loss(model(x), y))
import packaging, utils
assert packaging.MINE == "packaging" and utils.MINE == "utils"
assert "PYTHONSAFEPATH" not in __import__("os").environ
"""


def folder_of(place: Path, names: list[str], text: str) -> Path:
    place.mkdir(parents=True)
    for name in names:
        (place / f"{name}.py").write_text(text.replace("NAME", name))
    return place


def ran(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), cwd=cwd, env=os.environ | env, text=True,
                          capture_output=True, timeout=300)


@pytest.mark.parametrize("path", ["", ".", "src", f"src{os.pathsep}"])
def test_our_processes_import_nothing_of_the_users_folders(tmp_path: Path, path: str) -> None:
    """Neither from the current folder nor from PYTHONPATH: a module of each common name is there,
    and ends whoever imports it."""
    if path and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 itself imports what it starts with (abc, codecs) from PYTHONPATH")
    place = folder_of(tmp_path / "mine", NAMES, "raise RuntimeError('NAME is imported')\n")
    folder_of(place / "src", NAMES, "raise RuntimeError('NAME of PYTHONPATH is imported')\n")
    env = {"PYTHONPATH": path} if path else {}
    program = Path(sys.executable).with_name("elastic-trainer")
    launcher = own.command("elastic_trainer")
    for command in ([*launcher, "run", "--help"], [*launcher, "replay", "--help"],
                    [*launcher, "plan", "--help"], [*launcher, "verify", "runs/none"],
                    [*launcher, "report", "runs/none"],
                    own.command("elastic_trainer.doctor", "x", "{}"),
                    own.command("elastic_trainer.driver.horovodrun", "--version")):
        done = ran(*command, cwd=place, **env)
        assert "is imported" not in done.stderr and done.returncode in (0, 1, 2), done.stderr
    if not path:  # Python itself imports from there before the first line of a program
        assert ran(program, "run", "--help", cwd=place, **env).returncode == 0


def test_a_run_trains_where_the_current_folder_has_modules_of_common_names(tmp_path: Path) -> None:
    """Launcher, driver, standby and workers of a script in src/; a resume; verify and report. The
    modules beside the script have names that ours import, too, and the script gets its own."""
    place = folder_of(tmp_path / "mine", NAMES, "raise RuntimeError('NAME is imported')\n")
    folder_of(place / "src", BESIDE, "MINE = 'NAME'\n")
    (place / "src" / "train.py").write_text(SCRIPT.replace("@NAMES@", " ".join(BESIDE)))
    run = own.command("elastic_trainer", "run", "--run", "first", "--workers", "2", "--")
    for until in ("4 steps", "8 steps"):
        done = ran(*run, sys.executable, "src/train.py", until, cwd=place)
        assert done.returncode == 0, done.stdout + done.stderr
    assert verify(place / "runs" / "first").is_proved
    for command in ("verify", "report"):
        done = ran(*own.command("elastic_trainer", command, "runs/first"), cwd=place)
        assert done.returncode == 0, done.stdout + done.stderr
    alone = ran(sys.executable, "src/train.py", "4 steps", cwd=place)
    assert alone.returncode == 0, alone.stdout + alone.stderr


def test_the_module_of_a_command_is_that_of_the_program(tmp_path: Path) -> None:
    """Another elastic_trainer in the current folder or in PYTHONPATH is passed over."""
    other = tmp_path / "elastic_trainer"
    other.mkdir()
    (other / "__init__.py").write_text("raise RuntimeError('the other one')")
    done = ran(*own.command("elastic_trainer", "verify", "none"), cwd=tmp_path,
               PYTHONPATH=str(tmp_path))
    assert "There is no folder none" in done.stderr
