"""One process of a user at a time: where its lock lies, who waits, and what is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.config import ConfigError
from elastic_trainer.data import alone
from elastic_trainer.data.alone import alone_on_host, private_folder

DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runtime folder of the user."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def locks(runtime: Path) -> list[str]:
    return sorted(os.listdir(runtime / "elastic-trainer" / "locks"))


def test_a_lock_lies_in_a_private_folder_and_is_removed(runtime: Path) -> None:
    """Also after an error, and with the process that holds it in it."""
    with pytest.raises(KeyError), alone_on_host("a", "does it"):
        (name,) = locks(runtime)
        path = runtime / "elastic-trainer" / "locks" / name
        assert path.read_text() == str(os.getpid()) and path.stat().st_mode & 0o077 == 0
        assert path.parent.stat().st_mode & 0o777 == 0o700
        raise KeyError
    assert locks(runtime) == []


@pytest.mark.parametrize(("change", "is_refused"), [
    (lambda folder: folder.chmod(0o750), True), (lambda folder: folder.chmod(0o777), True),
    (lambda folder: (folder.rename(folder.parent / "x"), folder.symlink_to("x")), True),
    (lambda folder: (folder.rmdir(), folder.write_bytes(b"")), True),
    (lambda folder: os.chown(folder, 12345, 12345), True),
    (lambda folder: folder.parent.parent.chmod(0o777), False),
    (lambda folder: os.chown(folder.parent.parent, 12345, 12345), False)])
def test_a_folder_that_others_can_enter_is_not_used(
        runtime: Path, tmp_path: Path, change: Callable[[Path], Any], is_refused: bool,
        monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of locks is refused; a runtime folder of others is passed over."""
    if os.getuid() and "chown" in change.__code__.co_names:
        pytest.skip("only root gives a folder away")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    change(private_folder())
    if is_refused:
        with pytest.raises(ConfigError, match="is not a folder of this user alone"):
            private_folder()
    else:
        assert private_folder() == tmp_path / "cache" / "elastic-trainer" / "locks"


def test_each_place_is_used_where_the_one_before_it_is_not_there(tmp_path: Path) -> None:
    """The runtime folder, the cache, the home, and a folder of the user in /tmp."""
    (tmp_path / "file").write_bytes(b"")
    home = {"HOME": str(tmp_path / "home")}
    assert private_folder({"XDG_RUNTIME_DIR": str(tmp_path / "file"), **home}) == (
        tmp_path / "home" / ".cache" / "elastic-trainer" / "locks")
    assert private_folder({"XDG_CACHE_HOME": str(tmp_path / "c"), **home}) == (
        tmp_path / "c" / "elastic-trainer" / "locks")
    found = private_folder({})
    assert found.name.endswith(f"locks-{os.getuid()}") and found.stat().st_mode & 0o077 == 0


def test_a_link_in_the_place_of_a_lock_is_not_followed(runtime: Path, tmp_path: Path) -> None:
    """Nothing is written where it leads."""
    with alone_on_host("a", "does it"):
        (name,) = locks(runtime)
    (tmp_path / "mine").write_text("mine")
    (private_folder() / name).symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic links|Symlink"), alone_on_host("a", "does it"):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


def hold(entered: Any, leave: Any) -> None:
    with alone_on_host("a", "does it"):
        entered.set()
        leave.wait(DEADLINE_S)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_process_that_waits_reports_it_once_and_goes_on(
        runtime: Path, is_killed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the process, what it does, and the lock; also when that process is killed."""
    monkeypatch.setattr(alone, "TOLD_AFTER_S", 0.05)
    context = multiprocessing.get_context("fork")
    entered, leave = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(entered, leave))
    holder.start()
    assert entered.wait(DEADLINE_S)
    said: list[str] = []

    def told(sentence: str) -> None:
        said.append(sentence)
        if is_killed:
            os.kill(holder.pid or 0, signal.SIGKILL)
        else:
            leave.set()

    with alone_on_host("a", "does it", told):
        assert len(locks(runtime)) == 1
    holder.join(DEADLINE_S)
    assert len(said) == 1 and f"process {holder.pid} of" in said[0] and "which does it" in said[0]
    assert locks(runtime) == []


def test_no_two_hold_a_lock_whose_file_is_removed_again_and_again(runtime: Path) -> None:
    """A process that waited for a file that is gone takes the lock of the new one."""
    inside, most, lock = [0], [0], threading.Lock()

    def work() -> None:
        for _ in range(40):
            with alone_on_host("a", "does it"):
                with lock:
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                with lock:
                    inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert most == [1] and locks(runtime) == []
