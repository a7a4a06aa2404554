"""Horovod's background thread, as deploy/install.sh mends it: it wakes when a tensor arrives, or when it is to end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_trainer.world import IDLE_CYCLE_MS, cycle_ms, wakes_on_arrival

OPERATIONS = """
import torch, horovod.torch as hvd
hvd.init()
for number in range(4):
    assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"sum.{number}")) == hvd.size()
hvd.shutdown()
print("all done")
"""


@pytest.mark.usefixtures("turn")
def test_operations_and_the_end_do_not_wait_for_a_cycle() -> None:
    """With cycles of a minute four operations and the shutdown end within one; unmended they take more than five."""
    assert wakes_on_arrival()
    horovodrun = Path(sys.executable).parent / "horovodrun"
    done = subprocess.run([str(horovodrun), "-np", "4", "--gloo", sys.executable, "-c", OPERATIONS], capture_output=True,
                          text=True, timeout=60, env=os.environ | {"HOROVOD_CYCLE_TIME": "60000"})
    assert done.stdout.count("all done") == 4, done.stderr


def test_cycles_are_long_only_where_the_thread_wakes() -> None:
    """A Horovod that somebody else has built delays each operation by half a cycle: there they follow the step."""
    assert cycle_ms(0.3, wakes=True) == IDLE_CYCLE_MS
    assert [cycle_ms(step_s, wakes=False) for step_s in (0.001, 0.1, 10.0)] == [1.0, 2.0, 5.0]
