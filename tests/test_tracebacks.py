"""What a person sees of an error in a script: once, with the lines of the script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic_trainer.config import EXIT_USER_ERROR, ConfigError
from elastic_trainer.host import own
from elastic_trainer.host.tracebacks import Stream, Tracebacks

OURS = str(Path(own.ROOT, "elastic_trainer", "training", "trainer.py"))
BLOCK = [
    "Traceback (most recent call last):", '  File "/job/train.py", line 8, in <module>',
    "    main()", "    ^^^^^^", '  File "/job/train.py", line 3, in main', "    raise KeyError(7)",
    "KeyError: 7"
]
SCRIPT = """
import sys
import torch
from elastic_trainer import ConfigError, TarShards, Trainer, cosine, train
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = torch.utils.data.TensorDataset(torch.ones(8, 2))
def made(**options):
    return Trainer(model, optimizer, dataset, **options)
"""
MISTAKES = {
    "made(global_batch=0)": "global_batch is 0",
    "made(global_batch=8, until='soon')": "until is",
    "train(model, optimizer, dataset, loss=lambda m, b: m(b[0]).mean(), global_batch=-1)":
        "global_batch is -1",
    "TarShards('/nonexistent/*.tar')": "/nonexistent/*.tar",
    "made(global_batch=8, lr=cosine(warmup_steps=-1, total_steps=3))": "warmup_steps",
    "made(global_batch=8, precision='int8')": "precision",
}


def fed(stream: Stream, lines: list[str]) -> list[str]:
    return [shown for line in lines for shown in stream.take(line)]


def test_a_traceback_of_all_workers_is_printed_once_and_others_refer_to_it() -> None:
    """Other lines pass at once, and a worker's own errors are printed whole each time."""
    known = Tracebacks()
    first, second = Stream(known, "a/0/1", "a"), Stream(known, "b/0/2", "b")
    assert fed(first, ["epoch 1", *BLOCK[:-1]]) == ["epoch 1"]
    assert first.take(BLOCK[-1]) == BLOCK and fed(first, BLOCK) == BLOCK
    assert fed(second, ["epoch 1", *BLOCK, "bye"]) == [
        "epoch 1", "KeyError in the same lines as on a, whose output has them", "bye"]
    assert fed(second, [*BLOCK[:-1], "KeyError: 8"]) == [
        "KeyError: 8 (in the same lines as on a, whose output has them)"]
    assert fed(second, [*BLOCK[:-1], "IndexError: 7"])[-1] == "IndexError: 7"
    assert known.shortened("\n".join(BLOCK)) == (
        "KeyError: 7 (in the same lines as on a, whose output has them)")
    assert known.shortened("The host has gone.") == "The host has gone."


@pytest.mark.parametrize("chain", [
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:"])
def test_a_chain_of_tracebacks_is_printed_once(chain: str) -> None:
    """All of it, in its order."""
    known, whole = Tracebacks(), [*BLOCK, "", chain, "", *BLOCK[:-1], "RuntimeError: no"]
    assert fed(Stream(known, "a/0/1", "a"), whole) == whole
    assert len(fed(Stream(known, "b/0/2", "b"), whole)) == 2


@pytest.mark.parametrize("lines", [
    BLOCK[:4], ['  File "/job/x.py", line 3 in main', "next"], ["", "x"],
    ["Fatal Python error: Aborted", "", "Current thread 0x1 (most recent call first):",
     '  File "/job/x.py", line 3 in main'], ["  indented", "- list"]])
def test_lines_that_are_no_traceback_are_printed(lines: list[str]) -> None:
    """Also those of one that the worker's death has cut off."""
    stream = Stream(Tracebacks(), "a/0/1", "a")
    assert [*fed(stream, lines), *stream.rest()] == lines


def test_frames_of_ours_are_shown_only_where_the_error_arose_in_one() -> None:
    """Between those of the user they say nothing."""
    frame = [f'  File "{OURS}", line 1, in _steps', "    self._next()"]
    between = [*BLOCK[:4], *frame, *BLOCK[4:]]
    assert fed(Stream(Tracebacks(), "a/0/1", "a"), between) == BLOCK
    last = [*BLOCK[:-1], *frame, "AssertionError"]
    assert fed(Stream(Tracebacks(), "a/0/1", "a"), last) == last


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_the_script_is_shown_with_the_scripts_lines_alone(
        tmp_path: Path, mistake: str) -> None:
    """No frame of ours, and no error from which ours was made."""
    (tmp_path / "train.py").write_text(SCRIPT + mistake + "\n")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 1 and MISTAKES[mistake] in done.stderr.splitlines()[-1]
    assert done.stderr.count("Traceback") == 1 and own.ROOT not in done.stderr, done.stderr
    assert mistake[:20] in done.stderr and "train.py\", line" in done.stderr


def test_a_mistake_can_be_caught_and_has_its_cause() -> None:
    """For a program that tries options itself."""
    try:
        try:
            {}["x"]  # noqa: B018
        except KeyError as error:
            raise ConfigError("as planned") from error
    except ConfigError as error:
        caught = error
    assert isinstance(caught.__cause__, KeyError) and isinstance(caught, ValueError)
    assert caught.__traceback__ is not None


def launched(tmp_path: Path, script: str, workers: int) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(script)
    run = own.command("elastic_trainer", "run", "--run", "x", "--standby", "0", "--workers",
                      str(workers), "--", sys.executable, "train.py")
    return subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=200)


def test_a_mistake_is_printed_once_for_a_run_of_four_workers(tmp_path: Path) -> None:
    """The sentence and the script's line; the exit code is that of a user's error."""
    done = launched(tmp_path, f"{SCRIPT}made(global_batch=0)\n", workers=4)
    said = done.stdout + done.stderr
    assert done.returncode == EXIT_USER_ERROR
    assert said.count("global_batch is 0. Use a whole number from 1.") == 1
    assert said.count("line 10, in <module>") == 1 and said.count("Traceback") == 1
    assert own.ROOT + "/elastic_trainer/training" not in said


def test_a_script_without_a_trainer_gets_a_sentence_of_its_own(tmp_path: Path) -> None:
    """It ends with 0, and nothing was trained; so does one that never enters the loop."""
    done = launched(tmp_path, f"{SCRIPT}made(global_batch=8) if 'x' in 'ox' else None\n", workers=2)
    said = done.stdout + done.stderr
    assert done.returncode == EXIT_USER_ERROR
    assert "never began to train: it made no Trainer" in said
    assert "before its worker stood ready" not in said and "for step in trainer" in said
