"""`python -O` takes the asserts away: the product does the same without them."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import PATIENT, Cluster
from test_loop import DATA, built, mse, sgd

import elastic_trainer
from elastic_trainer import Trainer
from elastic_trainer.config import EXIT_UNSAVED, ConfigError
from elastic_trainer.reduce.flat import LARGEST
from elastic_trainer.state.values.names import named_parameters

FOLDER = Path(elastic_trainer.__file__).parent
SOURCES = sorted(FOLDER.rglob("*.py")) + [*(FOLDER / "state").rglob("*.py"),
                                          *(FOLDER / "discovery").rglob("*.py")]
PURE = {"isinstance", "len", "all", "any", "list", "range", "set", "type", "min", "max", "epoch"}
"""The functions and methods that change nothing, whatever they are given here."""


def effects(tree: ast.AST) -> Iterator[str]:
    """Yield what an assert of a module does besides looking, and what looks for asserts."""
    for node in ast.walk(tree):
        match node:
            case ast.Assert(test=test):
                for part in ast.walk(test):
                    if isinstance(part, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)):
                        yield f"line {part.lineno}: {type(part).__name__} in an assert"
                    if isinstance(part, ast.Call) and (name := ast.unparse(
                            part.func).rpartition(".")[2]) not in PURE:
                        yield f"line {part.lineno}: {name}() in an assert"
            case ast.ExceptHandler(type=ast.expr() as caught) if "AssertionError" in ast.unparse(
                    caught):
                yield f"line {node.lineno}: an AssertionError is caught"
            case ast.Name(id="__debug__", lineno=line):
                yield f"line {line}: __debug__"


def test_no_assert_has_an_effect() -> None:
    """It assigns nothing, waits for nothing, and calls only what changes nothing. No code depends
    on whether asserts are there."""
    assert len(SOURCES) > 200
    found = {str(path): list(effects(ast.parse(path.read_text()))) for path in SOURCES}
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize("source", [
    "assert (x := f)", "async def f():\n    assert await g", "assert [1].pop()", "assert d.get(1)",
    "def f():\n    assert (yield)", "try:\n    pass\nexcept AssertionError:\n    pass",
    "if __debug__:\n    x = 1", "assert next(it)", "assert all(f() for x in y)"])
def test_an_assert_with_an_effect_is_found(source: str) -> None:
    """Of each kind."""
    assert list(effects(ast.parse(source)))


# --- asserts that a user could reach --------------------------------------------------------------

def trainer_of(**options: Any) -> Trainer:
    model = built()
    return Trainer(model, sgd(model), DATA, global_batch=8, microbatches=4, until="3 steps",
                   progress=False, **options)


def bad(*_: Any) -> Any:
    raise ValueError("of the user's")


@pytest.mark.usefixtures("no_launcher")
def test_each_call_after_a_caught_exception_is_an_error_with_the_remedy() -> None:
    """The run has ended. An evaluation, a batch and a step that are asked for again say so."""
    trainer, told = trainer_of(), []
    with pytest.raises(RuntimeError, match="ended with RuntimeError.*Let the exception end"):
        for step in trainer:
            for batch in step:
                step.backward(mse(trainer._worker.job.model, batch))
            for fn in (bad, bad, bad, lambda model, batch: {"a": 1}):
                try:
                    trainer.evaluate(DATA, fn)
                except Exception as error:
                    told.append(error)
    assert [type(error) for error in told] == [ValueError, RuntimeError, RuntimeError, RuntimeError]
    assert "cannot be left" in str(told[1])
    assert all("Let the exception end the script" in str(error) for error in told[2:])


@pytest.mark.usefixtures("no_launcher")
def test_the_next_step_after_a_caught_exception_of_the_run_is_an_error() -> None:
    """And not the end of the loop, with exit code 0."""
    trainer = trainer_of(checkpoint_every=1, state={"odd": type("Odd", (), {
        "state_dict": lambda self: {"value": numbers[-1]},
        "load_state_dict": lambda self, state: None})()})
    numbers: list[Any] = [0]
    steps = iter(trainer)
    step = next(steps)
    for batch in step:
        step.backward(mse(trainer._worker.job.model, batch))
    numbers.append(object())
    step = next(steps)
    with pytest.raises(ConfigError, match="odd/value holds a object"):
        next(iter(step))
    with pytest.raises(RuntimeError, match="ended with ConfigError"):
        trainer._next()
    steps.close()


@pytest.mark.usefixtures("no_launcher")
def test_numbers_that_do_not_fit_into_a_sum_are_an_error_with_the_remedy() -> None:
    """Each of them fits."""
    trainer = trainer_of()
    with pytest.raises(RuntimeError, match="too large. Use numbers whose sum"):
        for step in trainer:
            for batch in step:
                step.log(a=(0.9 * LARGEST, 1))
                step.backward(mse(trainer._worker.job.model, batch))


def test_two_tensors_of_one_plain_name_are_an_error_with_the_remedy() -> None:
    """A module of the user's may have the name that torch.compile gives."""
    model = torch.nn.Module()
    model.add_module("_orig_mod", torch.nn.Linear(1, 1))
    model.weight = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match="have one name without _orig_mod.*Name no attribute"):
        named_parameters(model)


# --- without asserts ------------------------------------------------------------------------------

SCRIPT = """
import os, sys, time
from pathlib import Path
import quick_boot
import torch
from elastic_trainer import Trainer

assert not __debug__ or sys.exit("there are asserts")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
trainer = Trainer(model, torch.optim.AdamW(model.parameters(), 0.1), data, global_batch=8,
                  microbatches=4, until=sys.argv[1], checkpoint_every=2, part_bytes=64,
                  run_dir="alone")
store, lost = Path(sys.argv[2]), Path(sys.argv[2] + ".lost")
for step in trainer:
    for batch in step:
        time.sleep(float(sys.argv[3]))
        step.backward(torch.nn.functional.mse_loss(model(batch[0]), batch[1]))
    trainer.evaluate(data, lambda model, batch: {"n": len(batch[0])})
    if step.number == 6 and trainer.is_first and store.exists() and not lost.exists():
        while len([*store.glob("log/*.json")]) < 2:  # the first is of the attempt's begin
            time.sleep(0.05)
        (store / "parts").rename(lost)  # its disk is lost
        (store / "parts").write_text("")
print("weights", trainer.result.weights_sha256)
"""


def run_alone(folder: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith(("ELASTIC_", "HOROVOD_"))}
    return subprocess.run(
        [sys.executable, "-O", *arguments], cwd=folder, check=True, capture_output=True, text=True,
        timeout=300, env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)}).stdout


def test_a_run_is_the_same_without_asserts_when_it_is_resumed(tmp_path: Path) -> None:
    """With checkpoints, an evaluation, a resume and the proof, under `python -O`."""
    for folder in ("resumed", "straight"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "script.py").write_text(SCRIPT)
    run_alone(tmp_path / "resumed", "script.py", "5 steps", "none", "0")
    resumed = run_alone(tmp_path / "resumed", "script.py", "12 steps", "none", "0")
    assert resumed == run_alone(tmp_path / "straight", "script.py", "12 steps", "none", "0")
    proved = run_alone(tmp_path / "resumed", "-m", "elastic_trainer", "verify", "alone")
    assert "proved: 96 samples in 12 of 12 steps" in proved


def test_a_run_without_asserts_survives_a_kill_and_names_what_is_lost_with_its_store(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under our launcher with PYTHONOPTIMIZE=1. The run whose last checkpoint cannot be written
    ends with exit code 74 after one attempt. The same command does the lost steps again."""
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "alone").mkdir()
    twin = run_alone(tmp_path / "alone", str(tmp_path / "script.py"), "40 steps", "none", "0")
    store = tmp_path / "store" / "run"  # behind it is the run's name
    command = [sys.executable, str(tmp_path / "script.py"), "40 steps", str(store), "0.1"]
    with Cluster(tmp_path, options=["--store", str(store.parent)], limits=f"{PATIENT},save_s=3",
                 command=command) as cluster:
        cluster.wait_for_step(7)
        cluster.signal_worker("127.0.0.3", signal.SIGKILL)
        assert cluster.wait() == EXIT_UNSAVED, cluster.story()
        (ended,) = cluster.events("attempt.ended")
        assert (ended["verdict"], ended["exit_code"]) == ("unsaved", EXIT_UNSAVED)
        (left,) = cluster.events("job.left_unsaved")
        assert left["step"] == 40 and 0 < left["newest_checkpoint"] <= 8
        assert not json.loads((cluster.run_dir / "result.json").read_text())["finished"]
        output = (tmp_path / "output.log").read_text()
        assert "checkpoints in a row were not written" in output
        assert "the run has done all its 40 steps" in output
        (store / "parts").unlink()
        lost = Path(f"{store}.lost")
        lost.rename(store / "parts")
        lost.write_text("")
        cluster.start()
        assert cluster.wait() == 0, cluster.story()
        cluster.assert_nothing_lost(twin.split()[1], victims=1)
