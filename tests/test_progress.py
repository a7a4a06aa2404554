"""What `python my_train.py` alone shows on stderr."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from elastic_trainer.training.listeners import Shown

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """
import sys, torch
from elastic_trainer import train
model = torch.nn.Linear(2, 1)
def loss(model, batch):
    return model(batch[0]).square().mean()
def after_step(step):
    print("mine", step)
    if step == 5 and "raise" in sys.argv:
        raise ValueError("as planned")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = torch.utils.data.TensorDataset(torch.ones(80, 2))
train(model, optimizer, dataset, loss=loss, global_batch=8, microbatches=2, after_step=after_step,
      progress="silent" not in sys.argv)
"""


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    env = {k: v
           for k, v in os.environ.items()
           if not k.startswith(("ELASTIC_", "HOROVOD_"))} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", SCRIPT, *arguments],
                          text=True,
                          **({"capture_output": True, "env": env}
                             | options))


def test_lines_show_the_progress_where_stderr_is_no_terminal() -> None:
    """The first step, and the end; stdout is the user's alone."""
    done = run()
    first, last = done.stderr.splitlines()
    assert first.startswith("elastic-trainer: step 1/10, loss ") and "samples/s" in first
    assert last.startswith("elastic-trainer: finished: 10 steps, 80 samples, loss ")
    assert done.stdout.splitlines() == [f"mine {step}" for step in range(10)]


def test_nothing_is_shown_when_the_user_does_not_want_it() -> None:
    """progress=False."""
    assert run("silent").stderr == ""


def test_a_bar_is_shown_on_a_terminal_and_gone_before_a_traceback() -> None:
    """With the user's own lines above it."""
    master, slave = pty.openpty()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ELASTIC_", "HOROVOD_"))}
    done = run("raise", capture_output=False, stdout=slave, stderr=slave,
               env=env | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120"})
    os.close(slave)
    received = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:
            break
        received += piece
    os.close(master)
    text = received.decode()
    assert done.returncode == 1
    assert "mine 4" in text and "5/10" in text and "samples/s" in text
    # The cursor is back.
    assert text.rstrip().endswith("ValueError: as planned") and "\x1b[?25h" in text


def test_a_line_comes_each_interval() -> None:
    """Not each step: a log must not grow with the number of steps."""
    now = 100.0
    written = io.StringIO()
    shown = Shown(Console(file=written), clock=lambda: now)
    shown("worker.generation_started", {"step": 40})
    shown("job.described", {"steps": 1000})
    for step in range(40, 140):
        now += 0.5
        shown("worker.step_committed", {"step": step, "samples": 8, "loss": 0.25})
    lines = written.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[
        1] == "elastic-trainer: step 61/1000, loss 0.2500, 16.0 samples/s, about 470 s left"
