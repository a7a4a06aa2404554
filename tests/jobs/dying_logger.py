"""Die at each change that a logger makes to its files, and let another process log after that.

    python tests/jobs/dying_logger.py FOLDER KIND…

In FOLDER/KIND stand the folders N-before and N-after, of deaths before and after the Nth change: a
folder is made, or a file opened to be written. The last ones had no death.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlflow.entities
import mlflow.store.tracking.file_store  # noqa: F401  each process would take a second
import torch.utils.tensorboard  # noqa: F401

from elastic_trainer.loggers import Csv, Logger, MLflow, Row, Run, TensorBoard, mlflow_run

MAKE: dict[str, Callable[[Path], Logger]] = {
    "csv": lambda folder: Csv(folder / "metrics.csv"),
    "tensorboard": lambda folder: TensorBoard(folder / "tb"),
    "mlflow": lambda folder: MLflow(str(folder / "mlruns"))}
STEPS = 4


def log(logger: Logger, attempt: int) -> None:
    """Log the steps that the logger has not. Some of them have a number more."""
    run = Run(folder=None, name="run", id="1", attempt=attempt, first=0, goes_back=False,
              config={"seed": 3, "steps": STEPS})
    for step in range(logger.open(run), STEPS):
        more = {"train/more": 2.0} if step >= STEPS // 2 else {}
        logger.write(Row(step, {"train/loss": float(step), "train/lr": 0.1} | more, time.time()))
        if step % 2:
            logger.flush()
    logger.flush()
    logger.close()


def die(folder: Path, change: int, has_changed: bool) -> None:
    """From now on: end this process at a change of the folder."""
    seen = 0

    def hook(event: str, facts: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in ("open", "os.mkdir") or not str(facts[0]).startswith(str(folder)):
            return
        if event == "open" and not facts[2] & (os.O_WRONLY | os.O_RDWR):
            return
        seen += 1
        if seen == change:
            if has_changed and event == "open":
                os.open(facts[0], facts[2], 0o666)
            elif has_changed:
                with suppress(FileExistsError):
                    os.mkdir(facts[0])
            os._exit(9)

    sys.addaudithook(hook)


def in_fork(work: Callable[..., None], *facts: Any) -> int:
    """Do something in another process; return its exit code."""
    process = os.fork()
    if process == 0:
        try:
            work(*facts)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def first(folder: Path, make: Callable[[Path], Logger], change: int, has_changed: bool) -> None:
    """Log, and die at a change."""
    die(folder, change, has_changed)
    log(make(folder), 1)


def main(folder: Path, make: Callable[[Path], Logger]) -> None:
    """Die everywhere, and log once more after that."""
    change, code = 0, 9
    while code == 9:
        change += 1
        for when in ("before", "after"):
            place = folder / f"{change}-{when}"
            place.mkdir(parents=True)
            code = in_fork(first, place, make, change, when == "after")
            assert code in (0, 9), place
            assert in_fork(lambda its: log(make(its), 2), place) == 0, place


if __name__ == "__main__":
    mlflow_run.WRITTEN_S = 0.001
    for kind in sys.argv[2:]:
        main(Path(sys.argv[1], kind), MAKE[kind])
