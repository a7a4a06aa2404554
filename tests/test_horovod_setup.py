"""The set-up of Horovod: exact patches, a wheel for each torch, and a user's own environment."""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from elastic_trainer.config import ConfigError
from elastic_trainer.host import trust
from elastic_trainer.setup import command, needs, recipe, required, target
from elastic_trainer.setup.build import (
    Commands,
    SetupFailed,
    _with_tools,
    fetch,
    is_cmake_usable,
    is_whole,
)
from elastic_trainer.setup.sources import PatchRefused, apply_patches
from elastic_trainer.setup.target import Installed, Torch, torch_of

SETUP = Path(recipe.__file__).parent
OF_RECIPE_11 = "4d78ff3e7c2de22ad1e5508081cfabedb7c96321522417a3a68deb7c627067b2"
"""Of the patched files, whose names are sorted: SHA-256 of their SHA-256s."""
DIGESTS = {11: "73ab3f1411edc1e332f0a12007a5b50e2b031eecf93995637bd1ca5c4fb50bd2"}
"""SHA-256 of what each recipe builds: the hashes of sources and compiler, settings, changes."""

OURS_FIRST = os.environ | {"PYTHONPATH": str(SETUP.parent.parent)}
TEXT = "".join(f"line {number}\n" for number in range(1, 21))
PATCH = """Why it is there.

--- a/some/file.cc
+++ b/some/file.cc
@@ -3,3 +3,4 @@ void f() {
 line 3
-line 4
+line four
+and a half
 line 5
@@ -19,2 +20,1 @@
 line 19
-line 20
"""

# --- patches -------------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with one file to patch."""
    (tmp_path / "sources/some").mkdir(parents=True)
    (tmp_path / "sources/some/file.cc").write_text(TEXT)
    return tmp_path / "sources"


@pytest.fixture
def patch(tmp_path: Path) -> Callable[[str], Path]:
    """Write a patch."""
    def write(text: str, name: str = "01-test.patch") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


Patch = Callable[..., Path]


def test_a_patch_changes_the_lines_that_it_names(sources: Path, patch: Patch) -> None:
    """All hunks of all files; a later patch sees what an earlier one has made."""
    second = PATCH.partition("@@ -19")[0]
    for old, new in (("line 4", "line four"), ("+line four\n+and a", "+a"),
                     ("-line four", "-line four\n-and a half"), ("-3,3 +3,4", "-3,4 +3,3")):
        second = second.replace(old, new)
    apply_patches(sources, [patch(PATCH), patch(second, "02-test.patch")])
    wanted = TEXT.replace("line 4\n", "a half\n").replace("line 20\n", "")
    assert (sources / "some/file.cc").read_text() == wanted


@pytest.mark.parametrize(("old", "new", "said"), [
    ("line 5\n", "line five\n", "line 5 is 'line five', where the patch has 'line 5'"),
    ("line 1\n", "line 0\nline 1\n", "line 3 is 'line 2', where the patch has 'line 3'"),
    ("line 4\n", "line 4 \n", "line 4 is 'line 4 ', where the patch has 'line 4'"),
    ("line 20\n", "", "line 20 is '', where the patch has 'line 20'")],
                         ids=["other context", "other place", "other spaces", "shorter"])
def test_a_patch_is_refused_when_it_does_not_fit_exactly(sources: Path, patch: Patch, old: str,
                                                         new: str, said: str) -> None:
    """The error names patch, file, line and both texts. Neither fuzz nor another place is tried."""
    changed = TEXT.replace(old, new, 1)
    (sources / "some/file.cc").write_text(changed)
    with pytest.raises(PatchRefused) as refused:
        apply_patches(sources, [patch(PATCH)])
    assert str(refused.value).startswith(f"01-test.patch does not apply to some/file.cc: {said}")
    assert (sources / "some/file.cc").read_text() == changed


def test_nothing_is_written_when_the_last_patch_is_refused(sources: Path, patch: Patch) -> None:
    """Neither what earlier patches have made."""
    with pytest.raises(PatchRefused,
                       match="02-test.patch does not apply: there is no some/other.cc"):
        apply_patches(sources,
                      [patch(PATCH), patch(PATCH.replace("file.cc", "other.cc"), "02-test.patch")])
    assert (sources / "some/file.cc").read_text() == TEXT


@pytest.mark.parametrize("damage", [("-line 4\n", ""), (" line 3\n", "line 3\n"),
                                    ("-3,3 +3,4", "-3,3 +3,5"),
                                    ("+and a half\n", "+and a half\n\n"), ("-line 20\n", "")])
def test_a_damaged_patch_is_refused(sources: Path, patch: Patch, damage: tuple[str, str]) -> None:
    """A line is missing, or is no line of a hunk."""
    with pytest.raises(PatchRefused, match="01-test.patch is damaged"):
        apply_patches(sources, [patch(PATCH.replace(*damage))])
    assert (sources / "some/file.cc").read_text() == TEXT


def test_each_patch_begins_with_its_reason() -> None:
    """A title, and sentences; the order is in the names."""
    names = [path.name for path in recipe.patches()]
    assert [name[:3] for name in names] == [f"{number:02}-" for number in range(1, len(names) + 1)]
    heads = [path.read_text().partition("\n--- a/")[0].strip() for path in recipe.patches()]
    assert [head for head in heads if not head.endswith(".") or len(head.split()) < 20] == []


def test_the_recipe_has_another_number_when_what_is_built_changes() -> None:
    """Else an environment would get a wheel of before the change. Prose may change."""
    changes = "".join(line for path in recipe.patches()
                      for line in path.read_text().partition("\n--- a/")[2].splitlines(
                          keepends=True))
    built = f"{recipe.SOURCES} {recipe.TOOLKIT} {sorted(recipe.SETTINGS.items())} {changes}"
    assert DIGESTS[recipe.RECIPE] == hashlib.sha256(built.encode()).hexdigest()


def test_the_patches_make_the_sources_that_the_kept_wheels_were_built_from(tmp_path: Path) -> None:
    """Of the pinned archive, downloaded as the build does, byte for byte."""
    commands = Commands(tmp_path / "log")
    try:
        env = _with_tools(tmp_path, commands, [recipe.SETUPTOOLS])
        unpacked = fetch(tmp_path, commands, env)
    except SetupFailed as error:
        if "DO NOT MATCH THE HASHES" in str(error):
            raise
        pytest.skip(f"The package index cannot be reached: {str(error).splitlines()[-2]}")
    before = {path: path.read_bytes() for path in unpacked.rglob("*") if path.is_file()}
    apply_patches(unpacked, recipe.patches())
    changed = sorted(path for path in before if path.read_bytes() != before[path])
    digests = b"".join(hashlib.sha256(path.read_bytes()).digest() for path in changed)
    assert hashlib.sha256(digests).hexdigest() == OF_RECIPE_11
    assert {path for path in unpacked.rglob("*") if path.is_file()} == before.keys()


# --- what it is built for ------------------------------------------------------------------------


def test_the_version_of_torch_is_read_without_importing_it() -> None:
    """Both that torch's file names."""
    cpu = "from typing import Optional\n__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n"
    assert torch_of(cpu) == Torch("2.13.0+cpu", None)
    assert torch_of(cpu.replace("+cpu", "").replace("= None",
                                                    "= '13.0'")) == Torch("2.13.0", "13.0")
    code = ("import sys; from elastic_trainer.setup.target import here; "
            "assert here() is not None and 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], env=OURS_FIRST, check=True)


@pytest.mark.parametrize(("version", "is_usable"), [("3.17.4", False), ("3.18.0", True),
                                                    ("3.31.10", True), ("4.1.2", False),
                                                    ("3.9.1", False)])
def test_the_machines_cmake_is_taken_when_horovod_can_use_it(version: str, is_usable: bool) -> None:
    """3.18 or newer, but not 4."""
    assert is_cmake_usable(f"cmake version {version}\n\nCMake suite\n") is is_usable


def test_a_wheel_without_the_library_is_not_kept(tmp_path: Path) -> None:
    """Horovod's build ends with success all the same."""
    for name, is_good in (("horovod/torch/mpi_lib_v2.cpython-311-x86_64-linux-gnu.so", True),
                          ("horovod-0.28.1/horovod/torch/mpi_lib_v2.so", False)):
        with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
            archive.writestr(name, "")
        assert is_whole(tmp_path / "a.whl") is is_good


def test_the_set_up_runs_before_anything_is_installed() -> None:
    """It imports the standard library, itself and host/, which imports nothing else; `required`,
    which runs later, imports config."""
    found = set()
    for path in SETUP.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            found |= {(path.stem, name)
                      for name in names if name.split(".")[0] not in sys.stdlib_module_names
                      and not name.startswith(("elastic_trainer.setup", "elastic_trainer.host"))}
    assert found == {("required", "elastic_trainer.config")}


# --- what is missing -----------------------------------------------------------------------------


def test_all_that_is_missing_is_reported_at_once(tmp_path: Path) -> None:
    """Each with its remedy, before anything is done; here on a machine without tools."""
    (tmp_path / "home").mkdir()
    env = {
        "PATH": str(tmp_path / "no tools"), "HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(SETUP.parent.parent)}
    code = ("import sys; from elastic_trainer.setup import target, command; "
            "command.installed_horovod = lambda: None; sys.exit(command.main())")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    said = done.stderr.splitlines()
    assert done.returncode == 1 and said[0].startswith("setup: A C++ compiler (c++) is missing"), (
        done.stderr)
    assert said[1].startswith(
        "setup: make is missing, and Horovod is built from source. Install it")
    assert list((tmp_path / "home").iterdir()) == []


def test_a_folder_that_cannot_be_used_is_named_with_a_remedy(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full, or another user's; also where it is not there yet."""
    assert list(needs.of_folder(tmp_path / "not/there/yet", "for this", "Do that")) == []
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    first, second = needs.of_folder(tmp_path / "not", "for this", "Do that", 1 << 40)
    assert first == f"{tmp_path} (for this) cannot be written by this user. Do that."
    assert second.startswith(f"{tmp_path} (for this) has ") and second.endswith(
        "Free some. Do that.")


# --- the check at the start ----------------------------------------------------------------------


def test_a_run_is_refused_without_a_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text names the command that installs it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Horovod is not installed in .*`elastic-trainer setup`"):
        required.require_horovod()


@pytest.mark.parametrize(("made_for", "is_good"),
                         [("torch-2.13.0+cpu-cpython-311-linux-x86_64-glibc2.36-gloo-6", True),
                          ("", True),
                          ("torch-2.12.0+cpu-cpython-311-linux-x86_64-glibc2.36-gloo-6", False)])
def test_a_run_is_refused_when_horovod_was_built_for_another_torch(made_for: str,
                                                                   is_good: bool) -> None:
    """Both versions are in the text. A Horovod that a user has built is taken as it is."""
    said = r"torch 2\.13\.0\+cpu .* torch 2\.12\.0\+cpu\. Run `elastic-trainer"
    with nullcontext() if is_good else pytest.raises(ConfigError, match=said):
        required.require_fit(Installed("0.28.1", made_for), Torch("2.13.0+cpu", None))


# --- two calls -----------------------------------------------------------------------------------


def test_a_second_call_waits_for_the_first(tmp_path: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    """And says so."""
    order = list[str]()

    def second() -> None:
        with command.locked(tmp_path / "lock"):
            order.append("second")

    with command.locked(tmp_path / "lock"):
        waits = threading.Thread(target=second)
        waits.start()
        while "waiting for another set-up" not in capsys.readouterr().out:
            waits.join(0.01)
        order.append("first")
    waits.join()
    assert order == ["first", "second"]


# --- an environment of the user's own ------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A cache with a copy of the wheel that the set-up of tests/run has kept."""
    here = target.here()
    assert here is not None
    wheel = target.kept_wheel(target.wheels() / here.name)
    if wheel is None:
        pytest.skip(
            f"no wheel of Horovod is kept in {target.wheels() / here.name} (tests/run sees to it)")
    folder = tmp_path / "cache/elastic-trainer/wheels" / here.name
    folder.mkdir(parents=True)
    shutil.copy(wheel, folder)
    return tmp_path / "cache"


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment with torch and pip, without Horovod and us: links to our packages."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages, ) = folder.glob("lib/python*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("horovod", "elastic_trainer", "__editable__", "__pycache__")):
            (packages / path.name).symlink_to(path)
    return folder


def changed_at(folder: Path) -> dict[Path, int]:
    return {
        path: path.lstat().st_mtime_ns
        for path in [folder, *folder.rglob("*")] if "__pycache__" not in path.parts}


@pytest.mark.usefixtures("turn")
def test_the_wheel_trains_in_an_environment_of_the_users_own(tmp_path: Path, venv: Path, kept: Path,
                                                             wheel: Path) -> None:
    """`pip install` of our wheel, `elastic-trainer setup`, and the demo. Before the set-up each
    start names the command, and --check prints what it would do. A second set-up does nothing.
    """
    env = {
        name: value for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "ELASTIC_", "HOROVOD_"))}
    env |= {
        "PATH": f"{venv / 'bin'}:{env['PATH']}", "VIRTUAL_ENV": str(venv),
        "XDG_CACHE_HOME": str(kept)}

    def call(*words: str | Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True,
                              timeout=timeout_s)

    installed = call("python", "-m", "pip", "install", "--no-index", wheel)
    assert installed.returncode == 0, installed.stderr
    for words in (("elastic-trainer", "run", "demo"), ("python", "-c",
                                                       "from elastic_trainer import train")):
        done = call(*words)
        assert (done.returncode != 0 and
                f"Horovod is not installed in {venv}. Run `elastic-trainer setup`" in done.stderr)
    before = changed_at(tmp_path)
    checked = call("elastic-trainer", "setup", "--check")
    assert (checked.returncode == 1
            and f"is not installed in {venv}. `elastic-trainer setup` installs the wheel"
            in checked.stdout), checked.stderr
    assert changed_at(tmp_path) == before

    done = call("elastic-trainer", "setup")
    assert done.returncode == 0 and "took the kept wheel of Horovod 0.28.1" in done.stdout, (
        done.stderr)
    before = changed_at(tmp_path)
    for words in (("setup", "--check"), ("setup", )):
        again = call("elastic-trainer", *words)
        assert again.returncode == 0 and "Nothing to do." in again.stdout, again.stderr
    assert changed_at(tmp_path) == before
    assert call("python", "-m", "pip", "check").returncode == 0

    trained = call("elastic-trainer", "run", "demo", "--run", "first", "--steps", "8", "--workers",
                   "2", "--standby", "0", timeout_s=300)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    proof = call("elastic-trainer", "verify", "runs/first")
    assert proof.returncode == 0 and "in 8 of 8 steps" in proof.stdout, proof.stdout


def test_a_wheel_that_cannot_be_loaded_does_not_stay_installed(tmp_path: Path, venv: Path,
                                                               kept: Path) -> None:
    """So that the next call does not take it for done."""
    (file, ) = kept.rglob("*.whl")
    damaged = file.with_name("copy")
    with zipfile.ZipFile(file) as whole, zipfile.ZipFile(damaged, "w") as other:
        for name in whole.namelist():
            is_library = name.startswith("horovod/torch/mpi_lib_v2.")
            other.writestr(name, b"not a library" if is_library else whole.read(name))
    damaged.replace(file)
    code = ("import sys; from pathlib import Path; from elastic_trainer.setup.build import *\n"
            "try: install(Path(sys.argv[1]), Commands(Path(sys.argv[2])))\n"
            "except SetupFailed as error: print(error)\n"
            "from elastic_trainer.setup.target import installed_horovod\n"
            "assert installed_horovod() is None")
    env = os.environ | {"PYTHONPATH": str(SETUP.parent.parent)}
    done = subprocess.run([venv / "bin/python", "-c", code, file, tmp_path / "log"], env=env,
                          capture_output=True, text=True)
    assert done.returncode == 0 and "cannot be loaded, so it was removed again" in done.stdout, (
        done.stderr)


# --- a kept wheel of somebody else ---------------------------------------------------------------


@pytest.mark.parametrize("what", ["wheel", "folder", "wheels", "cache"])
@pytest.mark.parametrize(("mode", "owner"), [(0o777, 0), (0o770, 0), (0o755, 65534)])
def test_a_kept_wheel_that_another_user_could_have_written_is_not_installed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, mode: int, owner: int) -> None:
    """Neither if a folder of it is another's: whoever can rename a folder can replace the wheel."""
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    here = target.here()
    assert here is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "cache/elastic-trainer/wheels" / here.name
    trust.make_folder(folder)
    wheel = folder / f"horovod-{recipe.VERSION}-any.whl"
    wheel.touch(mode=0o644)
    assert list(needs.of_trust(folder)) == [] == command.lacks(here)
    changed = {
        "wheel": wheel, "folder": folder, "wheels": folder.parent,
        "cache": tmp_path / "cache"}[what]
    os.chown(changed, owner, 4711)  # a group of others
    changed.chmod(mode)
    (said, ) = command.lacks(here)
    assert said.startswith(f"{changed} ") and "would run as you. Remove it" in said
    with pytest.raises(SetupFailed, match="would run as you"):
        monkeypatch.setattr(command, "is_done", lambda target: False)
        monkeypatch.setattr(command, "install", lambda *_: pytest.fail("it was installed"))
        command.set_up(here)


def test_a_link_is_judged_where_it_leads_and_a_shared_folder_of_all_may_be_above(tmp_path: Path
                                                                                 ) -> None:
    """/tmp is open to all, but its entries are not renamed by others (its sticky bit)."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    trust.make_folder(shared / "mine" / "cache")
    assert trust.why_not_trusted(shared / "mine" / "cache") == ""
    shared.chmod(0o777)
    assert "can be written by other users" in trust.why_not_trusted(shared / "mine" / "cache")
    (tmp_path / "link").symlink_to(shared / "mine")
    assert "can be written by other users" in trust.why_not_trusted(tmp_path / "link")
    assert trust.why_not_trusted(tmp_path) == ""
