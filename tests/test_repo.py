"""What holds for the repository as a whole: layers, names, and what must not stand in any file."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from size import (
    ROOT,
    circles,
    floors,
    imported_by,
    imports_among,
    lint_imports,
    modules_in,
    name_of,
    too_large,
)

import elastic_trainer

# The clone, or where the wheel was installed.
CODE = Path(elastic_trainer.__file__).resolve().parent.parent
NOT_OURS = {".git", ".venv", "__pycache__", "build", "dist", "runs"}
LINKED = ("discovery", "state")
"""Folders at the top level of the clone, imported through links in elastic_trainer/."""
MODULES = modules_in(CODE)
NAMES = [name_of(path, CODE) for path in MODULES]


def test_no_module_imports_itself_over_others() -> None:
    """Not in a function either: a circle hides which of its modules comes first."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]
    assert circles(imports_among(MODULES, CODE)) == []
    assert floors({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == 3


needs_linter = pytest.mark.skipif(sys.version_info < (3, 11),
                                  reason="import-linter has no wheel for Python 3.10")


@needs_linter
def test_imports_point_down() -> None:
    """No circle of packages, and none that knows which packages use it; a new package needs its
    place in the contract."""
    done = lint_imports(CODE)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_linter
@pytest.mark.parametrize(("module", "imports"),
                         [("wire/plain.py", "elastic_trainer.driver.driver"),
                          ("state/stores/store.py", "elastic_trainer.discovery.hosts"),
                          ("discovery/hosts.py", "elastic_trainer.state.stores.store"),
                          ("world/pauses.py", "elastic_trainer.driver.standby_shim"),
                          ("training/loop.py", "elastic_trainer.views.page")])
def test_an_import_that_points_up_is_found(tmp_path: Path, module: str, imports: str) -> None:
    """In a function, too, and through the links."""
    shutil.copytree(CODE / "elastic_trainer", tmp_path / "elastic_trainer",
                    ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "elastic_trainer" / module, "a") as file:
        file.write(f"\n\ndef up() -> None:\n    import {imports}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1 and imports in done.stdout, done.stdout + done.stderr


def test_no_module_class_or_function_is_too_large() -> None:
    """What does not fit on a few screens has two jobs."""
    assert too_large(MODULES, CODE) == []


def test_nothing_imports_a_linked_package_by_its_bare_name() -> None:
    """`state` and `discovery` may be the user's own; ours have one name each, here and in tests and
    benches."""
    files = [*MODULES, *(path for path in our_files() if path.suffix == ".py"
                         and path.is_relative_to(ROOT / "tests"))]
    assert [
        f"{path} imports {name}" for path in files
        for name in imported_by(path, ROOT if ROOT in path.parents else CODE)
        if name.split(".")[0] in LINKED
    ] == []


def test_the_walk_sees_imports_when_they_hide(tmp_path: Path) -> None:
    """In functions, under another name, relative, or by a call: the laws here rest on it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text(
        "def f():\n    import pickle as p, os.path\n    from . import c\n    from ..state.x "
        "import y\n"
        "    import importlib\n    importlib.import_module('discovery')\n")
    found = set(imported_by(tmp_path / "a" / "b.py", tmp_path))
    assert found == {"pickle", "os.path", "a", "state.x", "importlib", "discovery"}


def test_nothing_is_pickled_in_the_packages() -> None:
    """Neither by name nor through torch or Horovod, whose savers and object collectives pickle
    (F10)."""
    modules = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
    calls = {"torch.load", "torch.save", "hvd.broadcast_object",
             "hvd.allgather_object", "numpy.load", "np.load"}
    found = [f"{path} imports {name}" for path in MODULES for name in imported_by(path, CODE)
             if modules & set(name.split("."))]
    found += [f"{path} calls {ast.unparse(node.func)}" for path in MODULES
              for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
              if isinstance(node, ast.Call) and ast.unparse(node.func) in calls]
    assert found == []


IMPORT_ALL = """
import os, signal, sys, threading
before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
def ours():
    return {k: v for k, v in os.environ.items() if k.startswith(("ELASTIC_", "HOROVOD_"))}

environment = ours()
for name in sys.argv[1:]:
    __import__(name)
entries = [entry.path for entry in os.scandir("/proc/self/fd")]
links = [os.readlink(path) for path in entries if os.path.exists(path)]
children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
print([t.name for t in threading.enumerate() if t is not threading.main_thread()],
      [link for link in links if link.startswith("socket:")], children,
      before == {n: signal.getsignal(n) for n in before},
      environment == ours())
"""


def test_nothing_starts_when_all_modules_are_imported(tmp_path: Path) -> None:
    """No thread, socket, process, signal handler, variable or file is made, and no output."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(CODE),
                                                       *sys.path]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL, *NAMES], env=env,
                          cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "[] [] [] True True\n"), done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("modules", [
    "commands.run driver.standby_pool driver.supervisor",
    "driver.horovodrun",
    "commands.watch views.log_lines",
    "discovery.commands discovery.poll discovery.places.kubernetes",
])
def test_a_process_of_the_coordinator_loads_no_large_library(modules: str) -> None:
    """Supervisor, driver, log and poller live as long as the run, and what they have loaded stays
    in memory."""
    names = ", ".join(f"elastic_trainer.{name}" for name in modules.split())
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(CODE), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {names}; print(*{LARGE} & {{*sys.modules}})"],
        env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("\n", "")


def test_the_name_is_ours_alone_when_the_project_is_installed() -> None:
    """One top-level name, and no other distribution claims it."""
    owners = set(importlib.metadata.packages_distributions().get("elastic_trainer", []))
    if not owners:
        pytest.skip("elastic-trainer runs from a clone here and is not installed.")
    assert owners == {"elastic-trainer"}


def our_files() -> list[Path]:
    """Return the files that git tracks or would track; without git, all that are not made by a
    tool."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others",
                             "--exclude-standard"], cwd=ROOT, capture_output=True)
    if listed.returncode == 0:
        return [path for name in listed.stdout.decode().split("\0") if name
                and (path := ROOT / name).is_file()]
    return [path for path in ROOT.rglob("*") if path.is_file()
            and not any(part in NOT_OURS or part.endswith(("_cache", ".egg-info"))
                        for part in path.parts)]


LARGE = {"torch", "numpy", "pydantic", "rich", "structlog", "boto3", "fsspec", "aiohttp"}
"""Libraries of 5 MB of memory or more."""
WIDEST = 100
CANNOT_BREAK = re.compile(r"sha256:[0-9a-f]{64}|^[0-9a-f]{64}  |https?://")
"""A digest, a line of deploy/hashes.txt, an address: a line with one may be longer."""
NOT_WRAPPED = {".md": "tests/test_docs.py has the rule, with tables", ".py": "ruff has the rule",
               ".patch": "lines of Horovod's and Gloo's files", ".svg": "drawn by a program",
               ".jsonl": "an event log of version 0.1", ".gz": "compressed event logs",
               "licences.txt": "written by a program", "stored": "what programs have written"}
"""Kinds of files without this rule, and why."""


def test_lines_have_at_most_100_columns() -> None:
    """Settings, shell scripts, terraform, units and the Dockerfile too."""
    files = [path for path in our_files() if not
             {path.suffix, path.name, *path.parts} & NOT_WRAPPED.keys()]
    assert {"setup.cfg", "Dockerfile", "image", "iam.tf"} <= {path.name for path in files}
    assert [f"{path.relative_to(ROOT)}:{number}" for path in files
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
            if len(line) > WIDEST and not CANNOT_BREAK.search(line)] == []


def test_names_of_tests_are_plain_english() -> None:
    """A law names its subject: a worker, the user, an unauthenticated client."""
    odd = re.compile(r"def test_(?:\w*_)?"
                     r"(?:told|tells?|said|says?|nobody|somebody|whoever|strangers?)(?:_\w*)?\(")
    assert [found[0] for path in (ROOT / "tests").glob("test_*.py")
            for found in odd.finditer(path.read_text(encoding="utf-8"))] == []


def test_no_file_names_a_place_that_only_one_machine_has() -> None:
    """Neither a developer's folders nor the host of a package index, which pip's own configuration
    names."""
    places = ["/wo" "rk/", "/tmp" "/w/", "py" "pi.org", "files.python" "hosted"]
    found = [f"{path.relative_to(ROOT)} names {place}" for path in our_files()
             for place in places if place.encode() in path.read_bytes()]
    assert found == []


def test_the_installed_packages_are_all_there_are_when_the_wheel_is_built() -> None:
    """Named one by one, so that tests and deploy cannot ship; every folder with code is among
    them."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    named = set(settings["options"]["packages"].split())
    assert named == {name_of(path, CODE) for path in MODULES if path.name == "__init__.py"}


AS_SCRIPT = ("import runpy, sys; sys.path[0] = sys.argv[1]; "
             "runpy.run_path(sys.argv[2], run_name='not run')")


def test_each_bench_finds_what_it_imports() -> None:
    """As a script, whose folder comes first: `discovery` there is a bench, and ours is found all
    the same."""
    benches = sorted((ROOT / "tests" / "bench").glob("*.py"))
    assert "discovery" in [path.stem for path in benches]
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda path: subprocess.run([sys.executable, "-c", AS_SCRIPT,
                                                     path.parent, path], cwd=ROOT,
                                                    capture_output=True, text=True), benches)
        assert [one.stderr for one in done if one.returncode] == []
