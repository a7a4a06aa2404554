"""breakpoint() in a launched worker, on a real launcher that has a terminal, and one that has
none."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import DEADLINE_S, end_turn, take_turn

JOB = """
import quick_boot
import torch
from elastic_trainer import Trainer

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
data = torch.utils.data.TensorDataset(torch.randn(16, 2), torch.randn(16, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
trainer = Trainer(model, optimizer, data, global_batch=8, microbatches=2, until="4 epochs")
for step in trainer:
    for x, y in step:
        step.backward((model(x) - y).square().mean())
    if step.number == 2:
        breakpoint()
print("steps", trainer.result.steps)
"""


IN_HOROVODS_STYLE = """
import quick_boot
import horovod.torch as hvd
import torch
from elastic_trainer import ElasticState

hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = ElasticState(model, optimizer)

@hvd.elastic.run
def train(state):
    breakpoint()

train(state)
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[list[str]]:
    """A run of two workers that all come to a breakpoint."""
    (tmp_path / "job.py").write_text(JOB)
    take_turn()
    yield [sys.executable, "-m", "elastic_trainer", "run", "--workers", "2", "--standby", "0",
           "--runs-dir", str(tmp_path / "runs"), "--", sys.executable, str(tmp_path / "job.py")]
    end_turn()


def test_each_worker_gets_the_terminal_in_turn_when_all_come_to_a_breakpoint(
        command: list[str]) -> None:
    """A person sees one prompt at a time, reads the worker's variables, and the run goes on."""
    person, terminal = os.openpty()
    # `setsid --ctty`: the launcher has the terminal as a shell's command has.
    launcher = subprocess.Popen(["setsid", "--ctty", "--wait", *command], stdin=terminal,
                                stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown, until = "", time.monotonic() + DEADLINE_S

    def read_to(pattern: str) -> None:
        nonlocal shown
        while not (found := re.search(pattern, shown)):
            assert time.monotonic() < until, shown
            if select.select([person], [], [], 1.0)[0]:
                shown += os.read(person, 4096).decode(errors="replace")
        shown = shown[found.end():]

    try:
        for _ in range(2):
            read_to(r"breakpoint\(\) in the worker 127\S+/\d+")
            read_to(r"\(Pdb\) ")
            assert "(Pdb)" not in shown
            os.write(person, b"p 1000 + step.number, trainer.size\n")
            read_to(r"\(1002, 2\)")
            read_to(r"\(Pdb\) ")
            os.write(person, b"c\n")
        read_to("steps 8")
        read_to("weights ")
        assert launcher.wait(DEADLINE_S) == 0
    finally:
        launcher.kill()
        os.close(person)


@pytest.mark.parametrize("job", [JOB, IN_HOROVODS_STYLE], ids=["trainer", "horovods_style"])
def test_a_breakpoint_names_the_remedy_when_there_is_no_terminal(command: list[str],
                                                                 job: str) -> None:
    """pdb would read the end of stdin, and raise BdbQuit."""
    Path(command[-1]).write_text(job)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=DEADLINE_S)
    assert done.returncode != 0 and "BdbQuit" not in done.stderr + done.stdout
    assert "RuntimeError: breakpoint() needs a terminal, and this worker has none." in done.stderr
    assert "python train.py" in done.stderr and "debugpy" in done.stderr


def test_pdb_names_the_remedy_when_it_reads_the_end_of_stdin(command: list[str]) -> None:
    """pdb.set_trace() is not ours. The traceback has the remedy."""
    job = Path(command[-1])
    job.write_text(JOB.replace("breakpoint()", "import pdb; pdb.set_trace()"))
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=DEADLINE_S)
    assert done.returncode != 0 and "BdbQuit" in done.stderr + done.stdout
    assert "breakpoint() there opens the launcher's terminal" in done.stderr + done.stdout


def test_the_variable_of_the_user_chooses_the_debugger(command: list[str]) -> None:
    """PYTHONBREAKPOINT, as in plain Python: 0 turns breakpoints off."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=DEADLINE_S, env=os.environ | {"PYTHONBREAKPOINT": "0"})
    assert done.returncode == 0 and "steps 8" in done.stdout, done.stderr
