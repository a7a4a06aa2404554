"""How the user's loop is left: by an exception, by `break` or `return`, or without a word."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop import Ears, built, mse, trained
from test_trainer import loop, trainer_of

from elastic_trainer.config import EXIT_LEFT, ConfigError
from elastic_trainer.events.log import read_events
from elastic_trainer.training.loop import Loop
from elastic_trainer.training.worker import require_main_thread
from elastic_trainer.views.verify import verify
from elastic_trainer.world.place import Dismissed, Driver

JOBS = Path(__file__).resolve().parent / "jobs"
pytestmark = pytest.mark.usefixtures("no_launcher")


def test_the_line_on_stderr_names_the_checkpoint_when_the_loop_is_left(
        run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By break, and by return: at which checkpoint, and how a run is finished early."""
    def leave(after: int, by_return: bool) -> None:
        model = built()
        for step in trainer_of(model, checkpoint_every=1):
            for batch in step:
                step.backward(mse(model, batch))
            if step.number + 1 == after:
                if by_return:
                    return
                break

    for after, by_return in ((3, False), (4, True)):
        leave(after, by_return)
        shown = capsys.readouterr().err
        assert f"left by break or return after {after} of 6 steps, so the run is not" in shown
        assert f"checkpoint of step {after}. To finish" in shown and "step.stop" in shown
    model = built()
    assert loop(trainer_of(model), model) == trained(built(), run_dir=None,
                                                     microbatches=4).weights_sha256


def test_an_exception_of_the_body_goes_where_it_always_goes() -> None:
    """The model is left as the last finished step has left it, and the next trainer works."""
    model, reference = built(torch.nn.BatchNorm1d(8)), built(torch.nn.BatchNorm1d(8))
    with pytest.raises(ZeroDivisionError):
        for step in trainer_of(model):
            for batch in step:
                step.backward(mse(model, batch))
                1 / (step.number - 1)
    trained(reference, until="1 step")
    assert all(torch.equal(a, b) for a, b in
               zip(model.state_dict().values(), reference.state_dict().values(), strict=True))
    loop(trainer_of(model), model)


SCRIPT = """
import quick_boot
import itertools, os, sys, threading, torch
from elastic_trainer import Trainer
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
data = torch.utils.data.TensorDataset(torch.randn(16, 2), torch.randn(16, 1))
def wrapped(iterable):
    for one in iterable:
        yield one
def steps():
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Trainer(model, optimizer, data, global_batch=8, microbatches=2, until="2 epochs",
                   run_dir=sys.argv[1], checkpoint_every=100, progress=False)
def train(around=lambda trainer: trainer):
    for step in around(steps()):
        for x, y in step:
            step.backward((model(x) - y).square().mean())
        if step.number == 1:
            BODY
END
"""
RAISE = "raise ValueError('as planned')"
SLOW_END = "sys.excepthook.__self__.settle()"  # as the timer does, after CAUGHT_S


def told_by(body: str, end: str, tmp_path: Path) -> tuple[int, str, list[dict[str, Any]]]:
    """Run a script; return its exit code, its stderr, and its events of how the loop was left."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("BODY", body).replace("END", end))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(JOBS), *sys.path])}
    done = subprocess.run([sys.executable, script, tmp_path / "run"], capture_output=True,
                          text=True, timeout=300, cwd=tmp_path, env=env)
    events = [e for e in read_events(tmp_path / "run")
              if e["event"] in ("worker.failed", "worker.loop_left")]
    return done.returncode, done.stderr, events


@pytest.mark.parametrize(("end", "code"), [
    ("train()", 1),
    ("train(enumerate) if False else train(wrapped)", 1),
    ("try:\n    train()\nexcept ValueError:\n    raise", 1),
    ("try:\n    train()\nexcept ValueError as e:\n    raise KeyError from e", 1),
    (f"try:\n    train()\nfinally:\n    {SLOW_END}", 1),
    ("thread = threading.Thread(target=train); thread.start(); thread.join()", 0),
], ids=["plain", "generator", "raised again", "chained", "slow finally", "thread"])
def test_an_exception_is_reported_once_with_its_traceback(end: str, code: int,
                                                          tmp_path: Path) -> None:
    """In the event log, and on stderr, wherever the loop runs and however long it takes."""
    returned, shown, events = told_by(RAISE, end, tmp_path)
    assert returned == code and [e["event"] for e in events] == ["worker.failed"], shown
    assert "ValueError: as planned" in events[0]["error"] and "ValueError: as planned" in shown


@pytest.mark.parametrize(("end", "code"), [
    ("try:\n    train()\nexcept ValueError:\n    pass", 0),
    ("train(lambda trainer: itertools.islice(trainer, 2))", 0),
    ("train(lambda trainer: (one for one, _ in zip(trainer, range(2))))", 0),
    ("try:\n    train()\nexcept ValueError:\n    sys.exit(3)", 3),
], ids=["caught", "islice", "zip", "exit"])
def test_a_loop_that_ends_without_a_word_is_reported(end: str, code: int, tmp_path: Path) -> None:
    """No exception comes out of the script, so the report names all that it may have been."""
    body = RAISE if "ValueError" in end else "pass"
    returned, shown, events = told_by(body, end, tmp_path)
    assert returned == code and [e["event"] for e in events] == ["worker.loop_left"], shown
    assert events[0]["step"] == 2 and "after 2 of 4 steps" in shown and "islice()" in shown


@pytest.mark.parametrize("around", ["lambda trainer: trainer", "wrapped", "enumerated",
                                    "lambda trainer: wrapped(wrapped(trainer))"])
@pytest.mark.parametrize("body", ["break", "return"])
def test_a_loop_that_is_left_by_break_keeps_its_steps(body: str, around: str,
                                                      tmp_path: Path) -> None:
    """Also through an iterator around the trainer, such as tqdm: the last finished step is in a
    checkpoint, and the same command does the others."""
    enumerated = "enumerated = lambda trainer: (one for _, one in enumerate(trainer))\n"
    end = f"{enumerated}train({around})"
    code, shown, events = told_by(body, end, tmp_path)
    assert code == 0 and [e["event"] for e in events] == ["worker.loop_left"], shown
    assert (events[0]["step"], events[0]["newest_checkpoint"]) == (2, 2), shown
    assert "left by break or return after 2 of 4 steps, so the run is not finished" in shown
    assert "goes on from the checkpoint of step 2" in shown
    code, shown, events = told_by("pass", end, tmp_path)
    assert code == 0 and len(events) == 1, shown
    assert verify(tmp_path / "run").finished


@pytest.mark.parametrize("body", [
    "t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()",
    "if os.fork() == 0: sys.exit(1)\n            os.wait()",
    "if os.fork() == 0: 1 / 0\n            os.wait()",
], ids=["thread", "child exits", "child raises"])
def test_what_is_not_the_loops_does_not_end_the_run(body: str, tmp_path: Path) -> None:
    """An exception in another thread, or the end of a forked child, as in plain PyTorch."""
    code, shown, events = told_by(body, "train()", tmp_path)
    assert code == 0 and not events, shown
    assert verify(tmp_path / "run").finished


def test_two_loops_at_once_are_refused(tmp_path: Path) -> None:
    """A process is one worker of one run."""
    end = "for a, b in zip(steps(), steps()):\n    pass"
    code, shown, events = told_by("pass", end, tmp_path)
    assert code == 1 and "another trainer's loop is running" in shown
    assert not events  # no run has begun


def test_what_the_worker_has_reported_is_not_reported_again(
        run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves by SystemExit through the user's inner loop: one that holds other bits, or that is
    dismissed. Nothing else is reported, now or at the end of the process."""
    failed = list[dict[str, Any]]()
    monkeypatch.setattr(Driver, "report", lambda self, **facts: failed.append(facts))
    ears, model = Ears(), built()
    trainer = trainer_of(model, listeners=[ears])

    def train() -> None:
        for step in trainer:
            for batch in step:
                step.backward(mse(model, batch))
                if step.number == 2:
                    monkeypatch.setattr(Loop, "_vote", dismiss)

    def dismiss(*_: Any) -> None:
        raise Dismissed

    with pytest.raises(SystemExit) as left:
        train()
    assert left.value.code == EXIT_LEFT
    trainer._exit.settle()
    assert not failed and not ears.facts("worker.loop_left") + ears.facts("worker.failed")


def test_a_loop_in_a_thread_is_refused_where_a_host_announces_its_end_by_a_signal() -> None:
    """Only the main thread can handle SIGTERM."""
    driver, raised = Driver(), list[BaseException]()

    def require() -> None:
        try:
            require_main_thread(driver)
        except ConfigError as error:
            raised.append(error)

    for drains in (False, True):
        driver.drains_on_sigterm = drains
        require()
        thread = threading.Thread(target=require, name="training")
        thread.start()
        thread.join()
    assert [str(error).count("'training'") for error in raised] == [1]


@pytest.mark.parametrize(("inside", "microbatch"), [(True, 2), (False, -1)])
def test_a_fault_of_the_machine_names_the_microbatch_in_hand(inside: bool, microbatch: int,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """The body raises it in step 1, in the third micro-batch or after the inner loop. The driver
    blames the user's code if the same micro-batch fails on another host."""
    blamed = list[tuple[Any, ...]]()
    monkeypatch.setattr("elastic_trainer.training.loop.fault_of_machine",
                        lambda error, *_: "EIO" * isinstance(error, OSError))
    monkeypatch.setattr("elastic_trainer.training.worker.leave_as_dead", lambda kind, text, step,
                        microbatch, **_: blamed.append((kind, step, microbatch)))
    model, seen = built(), list[int]()
    trainer = trainer_of(model)
    with pytest.raises(OSError) as raised:
        for step in trainer:
            for batch in step:
                seen += [step.number] * (trainer.rank == 0)
                if inside and seen.count(1) == 3:
                    raise OSError(5, "Input/output error")
                step.backward(mse(model, batch))
            if step.number == 0 and not inside:
                raise OSError(5, "Input/output error")
    trainer._worker.report(raised.value)  # as sys.excepthook does
    assert blamed == [("EIO", 1, microbatch)]
