"""What tests share: the undisturbed twin, computed once, and a lab of hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from netlab import Lab

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS))
# The tests start thousands of processes, which import 100 modules of ours. With this variable,
# which images of containers often set, each compiles them again: 0.3 s of a worker's 1.3 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# For the processes that tests start, and for theirs: sitecustomize.py, which Python imports by
# itself, and quick_boot.py.
sys.path.append(str(TESTS / "jobs"))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(TESTS / "jobs"), *filter(None, [os.environ.get("PYTHONPATH")])])

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


FIRST = ("test_netlab", "test_slurm_cluster", "test_faults", "test_same_bits", "test_s3",
         "test_docs", "test_fleet", "test_ec2", "test_standby", "test_horovod_style_faults",
         "test_kubernetes_runs", "test_transformers", "test_no_ssh", "test_leaving",
         "test_ray_cluster", "test_replica_faults", "test_stores", "test_transformers_faults",
         "test_store_faults", "test_sharded_faults", "test_web")
"""Files that take minutes, and those of the end of the alphabet that take more than one. A run in
the lab of hosts takes three of the machine's four seats (cluster.py), so no more than one of the
files beside it has runs of its own."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests marked long: they "
                     "take minutes, or install hundreds of megabytes into the cache folder")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: runs with --long alone")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked long where it was not asked for."""
    if item.get_closest_marker("long") and not item.config.getoption("--long"):
        pytest.skip("It takes minutes, or installs much. Run it with: tests/run --long")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files: one of them at the end would run alone. A name with an address
    differs from process to process, and several could not share the tests."""
    if bad := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"the name {bad[0]} has an address: give ids=")
    rank = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(FIRST)))


@pytest.fixture(autouse=True)
def no_variables_left() -> Iterator[None]:
    """Take back the variables of a launcher that a test has called in its own process: the
    launcher sets them for its workers, and the jobs of later tests would have them."""
    before = launchers_variables()
    yield
    for name in launchers_variables().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def launchers_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items()
            if name.startswith(("HOROVOD_", "ELASTIC_"))}


@pytest.fixture(autouse=True)
def no_compiled_programs() -> None:
    """Forget that an earlier test in this process has compiled a program: modules beside the model
    are not followed where one was (training/warm_up.py)."""
    if "torch._dynamo.utils" in sys.modules:
        sys.modules["torch._dynamo.utils"].counters.clear()


@pytest.fixture(autouse=True)
def only_declared_events(request: pytest.FixtureRequest,
                         monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test in whose process an event is emitted that differs from its declaration
    (events/event_table.py)."""
    from elastic_trainer.events.log import Events
    from elastic_trainer.events.schema import misfit

    misfits, emit = list[str](), Events.emit

    def checked(events: Events, event: str, **facts: Any) -> None:
        if wrong := misfit({"time": 1.0, "event": event, **events.bound, **facts}):
            misfits.append(wrong)
        emit(events, event, **facts)

    monkeypatch.setattr(Events, "emit", checked)
    for name in ("poll", "group"):
        if module := sys.modules.get(f"elastic_trainer.discovery.{name}"):
            monkeypatch.setattr(module, "append_event", checking(module.append_event, misfits))
    yield
    assert not misfits or "made_up_events" in request.fixturenames


def checking(append_event: Callable[..., None], misfits: list[str]) -> Callable[..., None]:
    """Return a poller's append_event that notes what differs from the declaration of its event."""
    from elastic_trainer.events.schema import misfit

    def checked(file: Path | None, event: str, **facts: Any) -> None:
        if wrong := misfit({"time": 1.0, "event": event, **facts}):
            misfits.append(wrong)
        append_event(file, event, **facts)

    return checked


@pytest.fixture
def instead_of_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a shell script of this text first on the path, under the name `ssh`."""
    def put(text: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "ssh").write_text(f"#!/bin/sh\n{text}\n")
        (folder / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    return put


@pytest.fixture
def made_up_events() -> None:
    """Let a test emit events that are not declared."""


@pytest.fixture(scope="session")
def twin_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return the weights' hash of the job done alone, undisturbed: one process, no Horovod."""
    from cluster import JOB, weights_alone

    @cache
    def twin(*job: str) -> str:
        # These are no part of the arithmetic.
        for option in ("--step-s", "--checkpoint-every", "--part-bytes"):
            if option in job:
                at = job.index(option)
                return twin(*job[:at], *job[at + 2 :])
        return weights_alone([*JOB, *job], tmp_path_factory.mktemp("twin"))

    return twin


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our wheel, built from a copy of what git tracks (the build writes beside its sources)."""
    root = Path(__file__).resolve().parent.parent
    folder = tmp_path_factory.mktemp("wheel")
    parts = ["elastic_trainer", "discovery", "state", "setup.cfg", "pyproject.toml", "LICENSE"]
    names = subprocess.run(["git", "ls-files", "-z", "--", *parts], cwd=root, capture_output=True,
                           check=True).stdout
    subprocess.run("tar -cf - --null -T - | tar -xf - -C " + str(folder), shell=True, cwd=root,
                   input=names, check=True)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps",
                    "--no-build-isolation", "--wheel-dir", folder / "out", folder],
                   check=True, capture_output=True)
    (built,) = (folder / "out").glob("*.whl")
    return built


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no variable of a launcher's: the test trains alone, in its own process."""
    for name in list(os.environ):
        if name.startswith(("ELASTIC_TRAINER_", "HOROVOD_")):
            monkeypatch.delenv(name)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_launcher: None) -> Path:
    """Return the folder of a run, which a launcher would name: the test trains alone, in its own
    process."""
    monkeypatch.setenv("ELASTIC_TRAINER_RUN_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def turn() -> Iterator[None]:
    """Wait until there is a seat for workers on this machine (a `Cluster` does so by itself)."""
    from cluster import end_turn, take_turn

    take_turn()
    yield
    end_turn()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A lab without hosts."""
    import netlab
    from s3_servers import Unavailable

    try:
        netlab.prepare()
    except Unavailable as error:
        pytest.skip(str(error))
    with netlab.Lab(tmp_path / "lab") as lab:
        yield lab
