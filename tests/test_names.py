"""The import names: a user's own state.py or discovery.py never hides ours, however the project is
installed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKS = ("discovery", "state")
SCRIPT = """
import discovery, state                                  # the user's own, beside this script
from elastic_trainer import ConfigError
from elastic_trainer.discovery.hosts import Health
from elastic_trainer.state.values.layout import LayoutError
import elastic_trainer
assert (discovery.OWN, state.OWN) == (True, True), "ours hid the user's"
assert LayoutError.__module__ == "elastic_trainer.state.values.layout"
assert Health.__module__ == "elastic_trainer.discovery.hosts"
print(elastic_trainer.__file__)
"""


@pytest.fixture
def users_folder(tmp_path: Path) -> Path:
    """A folder with a training script and the two names beside it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in LINKS:
        (folder / f"{name}.py").write_text("OWN = True\n")
    (folder / "my_train.py").write_text(SCRIPT)
    return folder


def said_by_the_script(folder: Path, path: Path | None = None) -> Path:
    """Run the user's script; returns where it found elastic_trainer."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run([sys.executable, folder / "my_train.py"], env=env,
                          cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def test_a_script_with_both_names_beside_it_runs_from_a_clone(users_folder: Path) -> None:
    """Without an install: the clone is on the path, and the script's folder comes before it."""
    assert said_by_the_script(users_folder, path=ROOT) == ROOT / "elastic_trainer" / "__init__.py"


def test_a_script_with_both_names_beside_it_runs_with_the_editable_install(users_folder: Path
                                                                           ) -> None:
    """As deploy/install.sh leaves it."""
    assert said_by_the_script(users_folder) == ROOT / "elastic_trainer" / "__init__.py"


def test_a_script_with_both_names_beside_it_runs_with_the_wheel(users_folder: Path, wheel: Path,
                                                                tmp_path: Path) -> None:
    """Unpacked as pip installs it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    found = said_by_the_script(users_folder, path=tmp_path / "site")
    assert found == tmp_path / "site" / "elastic_trainer" / "__init__.py"


def test_the_wheel_installs_one_top_level_package(wheel: Path) -> None:
    """With both linked packages inside it."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name
            } == {"elastic_trainer"}
    assert {"elastic_trainer/state/checkpoints/checkpoint.py",
            "elastic_trainer/discovery/agent.py"} <= set(names)


def test_the_links_are_links_in_git() -> None:
    """Relative ones: a clone has them, and so has what push.sh and the Dockerfile copy."""
    listed = subprocess.run(["git", "ls-files", "--stage",
                             *(f"elastic_trainer/{name}" for name in LINKS)],
                            cwd=ROOT, capture_output=True, text=True,
                            check=True).stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["120000", "120000"]
    assert [os.readlink(ROOT / "elastic_trainer" / name) for name in LINKS
            ] == [f"../{name}" for name in LINKS]


@pytest.mark.parametrize("name", LINKS)
def test_the_bare_name_is_refused(name: str) -> None:
    """From the clone's folder it could be found: each class would then exist twice, unequal to
    itself."""
    done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 1 and f"Import it as elastic_trainer.{name}." in done.stderr


def test_mypy_sees_across_the_links(tmp_path: Path) -> None:
    """A deliberate error across the border of a linked package is found, with the strict options of
    tests/run, whose cache is used."""
    pytest.importorskip("mypy")
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from elastic_trainer.state.values.layout import tensors_digest\n"
                     "from elastic_trainer.discovery.agent import AGENT_NAME_THAT_IS_NOT_THERE\n\n"
                     "number: int = tensors_digest(b'')\n")
    done = subprocess.run([sys.executable, "-m", "mypy", "--config-file",
                           ROOT / "pyproject.toml", wrong], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == 1, done.stdout
    assert ('Incompatible types in assignment (expression has type "str", variable has type "int")'
            in done.stdout)
    assert 'has no attribute "AGENT_NAME_THAT_IS_NOT_THERE"' in done.stdout
