"""What loggers cost, as processor time: of the training's thread a step, and of a logger's a row.

    python tests/bench/loggers.py
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from elastic_trainer.loggers import Csv, Logger, MLflow, Row, Run, TensorBoard, WandB
from elastic_trainer.loggers.rows import Rows

STEPS, ROWS = 4000, 1000
FACTS: dict[str, Any] = {
    "run": "bench", "attempt": 1, "size": 4, "samples": 256, "loss": 0.5, "metrics": {"acc": 0.5},
    "lr": 0.1, "step_s": 0.01, "run_id": "0123456789abcdef"}
VALUES = {"train/loss": 0.5, "train/lr": 0.1, "train/world_size": 4.0, "train/acc": 0.5,
          "train/samples_per_s": 25600.0}


class Nothing:
    """A logger that does nothing."""

    def check(self) -> None:
        """It needs nothing."""

    def where(self) -> str:
        return ""

    def open(self, run: Run) -> int:
        return 0

    def write(self, row: Row) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def of_the_training(rank: int) -> float:
    """Return the microseconds of a step with four loggers, on a worker of this rank."""
    rows = Rows([Nothing() for _ in range(4)])
    began = time.thread_time()
    for step in range(STEPS):
        rows("step.noted", FACTS | {"rank": rank, "step": step})
        rows("step.handed_over", {"rank": rank, "step": step})
    taken = time.thread_time() - began
    rows.close()
    return 1e6 * taken / STEPS


def of_a_logger(logger: Logger, folder: Path) -> tuple[float, float]:
    """Return the seconds in which a logger begins, and the microseconds of a row."""
    began = time.process_time()
    logger.open(Run(name="bench", id="0123456789abcdef", attempt=1, folder=folder, first=0))
    opened = time.process_time()
    for step in range(ROWS):
        logger.write(Row(step, VALUES, time.time()))
        if step % 100 == 99:
            logger.flush()
    written = time.process_time()
    logger.close()
    return opened - began, 1e6 * (written - opened) / ROWS


if __name__ == "__main__":
    os.environ["WANDB_SILENT"] = "true"
    for rank in (0, 1):
        print(f"rank {rank}: {of_the_training(rank):.0f} µs a step")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for logger in (Csv(folder / "a.csv"), TensorBoard(folder / "tb"),
                       MLflow(str(folder / "ml")), WandB(offline=True, folder=folder)):
            begin_s, row_us = of_a_logger(logger, folder)
            print(f"{type(logger).__name__}: begins in {begin_s:.1f} s, {row_us:.0f} µs a row")
