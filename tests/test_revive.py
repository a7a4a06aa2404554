"""The live state that a process leaves for itself, and the process that comes back with it."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.values.layout import Packed, byte_ranges, pack
from elastic_trainer.world import revive
from elastic_trainer.world.revive import read_live_state, write_live_state

ROOT = Path(__file__).resolve().parent.parent


def trained(steps: int = 2) -> LiveState:
    """A live state after a few steps, in the middle of the next."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8),
                                torch.nn.Linear(8, 2))
    state = LiveState(model,
                         torch.optim.AdamW(model.parameters()),
                         scaler=torch.amp.GradScaler("cpu"))
    state.has_state = True
    for _ in range(steps):
        state.begin()
        model(torch.randn(8, 4)).square().mean().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.commit(8, 12345)
    state.begin()
    return state


def bytes_of(packed: Packed) -> bytes:
    return packed.header + b"".join(
        bytes(p.numpy().tobytes()) for p in byte_ranges(packed, 0, packed.payload_bytes))


class LeftBehind:
    """The live states of this process that are there now: descriptors of memory without a name."""

    def __iter__(self) -> Iterator[int]:
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if "memfd:live-state" in os.readlink(f"/proc/self/fd/{entry}"):
                    yield int(entry)


@pytest.fixture
def left_behind() -> Iterator[LeftBehind]:
    """Remove what a test leaves behind, after it."""
    left = LeftBehind()
    yield left
    for descriptor in left:
        os.close(descriptor)


def written(state: LiveState, prepared: dict[str, torch.Tensor] | None = None) -> int:
    memory = write_live_state(state, prepared or {}, {"generation": 3})
    assert memory is not None
    return memory


def test_the_same_bytes_come_back_when_the_same_process_reads_them(left_behind: LeftBehind) -> None:
    """Parameters, moments, scaler, counters, the reduced gradient and the buffers before the
    step."""
    state, gradient = trained(), torch.randn(17)
    state.prepare()
    values = read_live_state(written(state, {"float32": gradient}))
    assert values is not None
    assert bytes_of(pack(values["state"])) == bytes_of(state.packed())
    assert torch.equal(values["prepared"]["float32"], gradient)
    assert bytes_of(pack(values["in_flight"])) == bytes_of(pack(state.in_flight()))
    assert (values["in_flight"]["prepared"], values["facts"]) == (3, {"generation": 3})


def test_a_worker_goes_on_to_the_same_bits_when_it_has_read_its_state(
        left_behind: LeftBehind) -> None:
    """What was read is the whole state, not a part of it."""
    state, successor = trained(), trained(0)
    values = read_live_state(written(state))
    assert values is not None
    successor.load(values["state"])
    for one in (state, successor):
        torch.manual_seed(7)
        one.model(torch.randn(8, 4)).square().mean().backward()
        one.optimizer.step()
        one.commit(8, 1)
    assert bytes_of(successor.packed()) == bytes_of(state.packed())


def test_the_live_state_has_no_name_so_nothing_is_left_when_the_process_is_killed(
        left_behind: LeftBehind) -> None:
    """The weights lie in memory that only this process holds: there is no file for others, nor
    after its end."""
    memory = written(trained())
    assert os.fstat(memory).st_nlink == 0
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{memory}")


def test_nothing_is_left_when_it_was_read(left_behind: LeftBehind) -> None:
    """Live state is read once; the second time it is not there."""
    memory = written(trained())
    assert read_live_state(memory) is not None
    assert list(left_behind) == []
    assert read_live_state(memory) is None


def test_nothing_is_written_when_parameters_may_be_half_changed(left_behind: LeftBehind) -> None:
    """Then the successor comes back as a newcomer."""
    state = trained()
    state.is_applying = True
    assert write_live_state(state, {}, {}) is None
    assert list(left_behind) == []


def test_nothing_is_written_when_there_is_no_state(left_behind: LeftBehind) -> None:
    """A newcomer that breaks comes back as one."""
    state = trained()
    state.has_state = False
    assert write_live_state(state, {}, {}) is None
    assert list(left_behind) == []


@pytest.mark.parametrize("spoil", ["short", "empty", "header", "rubbish"])
def test_the_state_is_refused_when_it_is_not_whole(left_behind: LeftBehind, spoil: str) -> None:
    """A worker that is killed while it writes leaves nothing that a successor takes."""
    memory = written(trained())
    data = os.pread(memory, os.fstat(memory).st_size, 0)
    spoilt = {"short": data[:-1], "empty": b"", "header": data[:100],
              "rubbish": os.urandom(64)}[spoil]
    os.ftruncate(memory, 0)
    os.pwrite(memory, spoilt, 0)
    assert read_live_state(memory) is None


def test_nothing_is_written_when_the_memory_is_full(left_behind: LeftBehind) -> None:
    """A state that cannot be written whole is as good as none: nothing is raised, and no part of it
    is left.

    (The limit on a file's size stands for memory that is full.)
    """
    state = trained()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        memory: object = write_live_state(state, {}, {})
    except OSError as error:
        memory = error
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (memory, list(left_behind)) == (None, [])


PROCESS = """
import ctypes, hashlib, os, socket, subprocess, sys
from contextlib import suppress
from pathlib import Path
from elastic_trainer.world import revive
from test_revive import bytes_of, pack, trained

sha = lambda values: hashlib.sha256(bytes_of(pack(values))).hexdigest()
if "ELASTIC_TRAINER_REVIVED_FROM" not in os.environ:
    state = trained()
    listener = socket.create_server(("127.0.0.1", 0))
    os.set_inheritable(listener.fileno(), True)
    memory = revive.write_live_state(state, {}, {})
    code = f"from elastic_trainer.world import revive; print(revive.read_live_state({memory}))"
    subprocess.run([sys.executable, "-c", code], pass_fds=[memory])
    print(os.getpid(), sha(state.values()), flush=True)
    closed = os.closerange
    def close_once_more(low, high):  # as a thread of the library does, by the number it knows
        closed(low, high)
        with suppress(OSError):
            os.close(listener.fileno())
    os.closerange = close_once_more
    revive.on_terminate(
        lambda error: revive.start_anew(revive.write_live_state(state, {}, {}), 3, 51, 1.5))
    ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()  # what an uncaught C++ exception calls
values = revive.read_live_state(int(os.environ["ELASTIC_TRAINER_REVIVED_FROM"]))
entries = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
links = [os.readlink(entry) for entry in entries if entry.exists()]
print(os.getpid(), sha(values["state"]), os.environ["ELASTIC_TRAINER_REVIVED_GENERATION"],
      os.environ["ELASTIC_TRAINER_REVIVED_COUNT"],
      len([link for link in links if link.startswith(("socket:", "/memfd:"))]))
"""


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the output of a process that offers its live state to another, breaks and restarts:
    what the other one reads; its pid and the state's hash; the same again, and its variables."""
    script = tmp_path_factory.mktemp("process") / "process.py"
    script.write_text(PROCESS)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True,
                          timeout=300, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_state_is_refused_when_another_process_has_left_it(lives: list[str]) -> None:
    """A number that the system uses again does not give one worker another's weights."""
    assert lives[0] == "None"


def test_the_same_process_goes_on_when_an_exception_of_the_library_would_abort_it(
        lives: list[str]) -> None:
    """Same pid, same command, same bytes; its sockets are closed, and its number counts on. A
    thread that still closes a socket closes nothing of the state."""
    assert lives[2] == f"{lives[1]} 3 51 0"


def test_one_thread_restarts_the_process() -> None:
    """Its restart closes what the others use: their exceptions are no restarts of their own."""
    code = """
import queue, threading
from elastic_trainer.world import revive
seen = queue.Queue()
class Noted(threading.Event):
    def wait(self):
        seen.put("waits")
        return super().wait()
revive.begin_once()
other = threading.Thread(target=lambda: (revive.begin_once(), seen.put("restarts")), daemon=True)
threading.Event = Noted
other.start()
print(seen.get(timeout=120))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "waits\n"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only there the text is read")
@pytest.mark.parametrize(("thrown", "text"),
                         [("_ZSt21__throw_runtime_errorPKc", "Connect timeout, as planned"),
                          ("_ZSt17__throw_bad_allocv", "std::bad_alloc")])
def test_the_c_plus_plus_exception_that_would_have_ended_the_process_is_named(
        thrown: str, text: str) -> None:
    """The function that is called instead of the abort gets the text of the exception."""
    code = (f"import ctypes, os\nfrom elastic_trainer.world import revive\n"
            f"revive.on_terminate(lambda error: (print(error, flush=True), os._exit(7)))\n"
            f"ctypes.CDLL('libstdc++.so.6').{thrown}(b'Connect timeout, as planned')")
    ended = subprocess.run([sys.executable, "-c", code],
                           cwd=ROOT,
                           stdout=subprocess.PIPE,
                           text=True)
    assert (ended.returncode, ended.stdout) == (7, f"{text}\n")


def test_a_process_without_a_known_reason_is_started_anew_too() -> None:
    """The text is for people; without it the abort must not happen either."""
    code = (
        "import ctypes, os\nfrom elastic_trainer.world import revive\nrevive._uncaught = lambda: "
        "1 / 0\n"
        "revive.on_terminate(lambda error: os._exit(7 if error == '' else 8))\n"
        "ctypes.CDLL('libstdc++.so.6')._ZSt17__throw_bad_allocv()")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 7


def test_nothing_is_kept_when_the_next_step_has_begun_meanwhile(monkeypatch: pytest.MonkeyPatch,
                                                                left_behind: LeftBehind) -> None:
    """Its forward pass changes BatchNorm's buffers while they are written."""
    state = trained()
    state.forget()
    write = revive.byte_view

    def write_while_it_goes_on(tensor: torch.Tensor) -> torch.Tensor:
        state.begin()
        return write(tensor)

    monkeypatch.setattr(revive, "byte_view", write_while_it_goes_on)
    assert write_live_state(state, {}, {}) is None and not list(left_behind)
