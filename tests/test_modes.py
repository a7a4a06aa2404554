"""Who may read what a run and its store have written."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest

from elastic_trainer.__main__ import main
from elastic_trainer.commands.run_options import list_hosts
from elastic_trainer.discovery.hosts import Policy
from elastic_trainer.discovery.poll import Poller
from elastic_trainer.driver import past
from elastic_trainer.events import summary as report
from elastic_trainer.events.log import Events
from elastic_trainer.events.segments import compress
from elastic_trainer.state.checkpoints.commit_log import CommitLog
from elastic_trainer.state.stores.store import FolderStore


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """The process's umask: wide open, as usual, closed."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def written(run_dir: Path, store: Path) -> dict[str, int]:
    """Write what the processes of a run write; returns the mode of each file and folder, by its
    path."""
    list_hosts(run_dir, {"a": 1})
    cloud = cast(Any, None)  # it is not asked
    poller = Poller(cloud, run_dir / "fleet", Policy(), events_file=run_dir / "events.jsonl")
    poller.emit("discovery.host_in", host="a", id="i-1", why="in")
    events = Events(run_dir, segment_bytes=1)
    for _ in range(3):
        events.emit("run.started", options={})
    compress(run_dir, late_s=-1.0)
    report.write_result(run_dir)
    past.Follower(run_dir).read()
    objects = FolderStore(store)
    CommitLog(objects).begin_lineage()
    objects.put("parts/000000000001-000000000001/a.bin", b"x")
    return {str(path): stat.S_IMODE(path.lstat().st_mode) for top in (run_dir, store)
            for path in (top, *top.rglob("*"))}


@pytest.mark.parametrize("store", ["run/checkpoints", "elsewhere/run"])
def test_what_a_run_writes_is_its_users_alone(tmp_path: Path, umask: int, store: str) -> None:
    """Whatever the umask is: checkpoints are the model, and the event log names hosts and
    commands."""
    tmp_path.chmod(0o755)
    modes = written(tmp_path / "runs" / "run", tmp_path / store)
    assert len(modes) > 12
    assert {path: mode for path, mode in modes.items() if mode & 0o077} == {}


@pytest.mark.parametrize("store", ["run/checkpoints", "elsewhere/run"])
def test_a_group_is_asked_in_by_its_folder(tmp_path: Path, umask: int, store: str) -> None:
    """One that is group-writable with the setgid bit: then its members write there, too, and nobody
    else."""
    tmp_path.chmod(0o755)
    for name in ("runs", "elsewhere", "run"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o2770)
    modes = written(tmp_path / "runs" / "run", tmp_path / store)
    wrong = {path: oct(mode) for path, mode in modes.items()
             if mode != (0o2770 if os.path.isdir(path) else 0o660)}
    assert wrong == {}


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o770, 0o2755])
def test_a_folder_that_others_may_read_is_shared_with_no_group(
        tmp_path: Path, umask: int, mode: int) -> None:
    """`mkdir` makes such ones. What is there keeps its mode, and what is made in it is its user's
    alone."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(mode)
    modes = written(run_dir, run_dir / "checkpoints")
    assert modes.pop(str(run_dir)) == mode
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a while")
@pytest.mark.parametrize("is_log_alone", [False, True])
@pytest.mark.parametrize("command", [["report"], ["verify"], ["watch"],
                                     ["watch", "--web", "--bind", "127.0.0.1:0"]])
def test_a_user_who_may_not_read_a_run_gets_the_commands_that_share_it(
        capsys: pytest.CaptureFixture[str], command: list[str], is_log_alone: bool) -> None:
    """By the commands; a run of an earlier version is shared by them, too. The folder may be
    readable, and its log not."""
    with TemporaryDirectory() as place:  # tmp_path is in a folder that no other user may enter
        os.chmod(place, 0o755)
        run_dir = Path(place) / "run"
        written(run_dir, run_dir / "checkpoints")
        assert main(["report", str(run_dir)]) == 0
        run_dir.chmod(0o755 if is_log_alone else 0o700)
        capsys.readouterr()
        os.seteuid(65534)
        try:
            assert main([command[0], str(run_dir), *command[1:]]) == 2
        finally:
            os.seteuid(0)
    output = capsys.readouterr()
    assert "chmod -R g+rwX" in output.err and not output.out and "Traceback" not in output.err
    assert not is_log_alone or ".jsonl" in output.err
