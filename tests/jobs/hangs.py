"""A job that hangs where it is told to: by files in the folder of the test.

`do-HOST` holds a word: loader (its next read sleeps), lock (its next loss waits for a lock), gil (a
regular expression keeps the GIL). The file is taken once; loader and lock end when `released` is
there. `slow-HOST`: each micro-batch of this host computes longer, while the file is there. `hurry`:
the rest goes as fast as it can.
"""

import argparse
import os
import re
import threading
import time
from typing import Any

import injected  # noqa: F401
import quick_boot  # noqa: F401
import torch
from faults import RELEASED, hold_until_there
from injected import folder as FOLDER

from elastic_trainer import train

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--width", type=int, default=4, help="of the hidden layer: what is sent")
parser.add_argument("--microbatch-s", type=float, default=0.02)
parser.add_argument("--first-s", type=float, default=0.0, help="as a model that compiles")
parser.add_argument("--after-s", type=float, default=0.0, help="h1's code after 500 steps")
parser.add_argument("--work", type=int, default=0, help="products of matrices for a microbatch")
parser.add_argument("--checkpoint-every", type=int, default=50)
options = parser.parse_args()

SLOWER = 5
lock = threading.Lock()
is_first = False
"""The next forward pass is the first one in a world."""
has_entered = False


def host() -> str:
    """This worker's host. A standby has none before its place."""
    return os.environ.get("HOROVOD_HOSTNAME", "")


def told(word: str) -> bool:
    """Take the word of this host, if it is this one."""
    file = FOLDER / f"do-{host()}"
    try:
        if file.read_text() == word:
            file.rename(FOLDER / f"did-{word}")
            return True
    except FileNotFoundError:
        pass
    return False


def release_later() -> None:
    """Release the lock when the test says so."""
    hold_until_there(FOLDER / RELEASED)
    lock.release()


class Points(torch.utils.data.Dataset):
    """Random points, and the class that their largest coordinate gives them."""

    def __init__(self) -> None:
        self.points = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if told("loader"):
            hold_until_there(FOLDER / RELEASED)
        return self.points[number], self.points[number, :4].argmax()


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The loss of a batch."""
    global is_first
    if is_first:
        is_first = False
        time.sleep(options.first_s)
    if told("lock"):
        lock.acquire()
        threading.Thread(target=release_later, daemon=True).start()
        lock.acquire()
        lock.release()
    if told("gil"):
        re.match("(a+)+b", "a" * 64)  # takes years, in C
    for _ in range(options.work):
        square @ square
    if not (FOLDER / "hurry").exists():
        is_slow = (FOLDER / f"slow-{host()}").exists()
        time.sleep(options.microbatch_s * (SLOWER if is_slow else 1))
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def note(point: str, _: dict[str, Any]) -> None:
    """Take a point of the protocol."""
    global is_first, has_entered
    if point == "world.generation_entered" and not has_entered:
        is_first = has_entered = True


def after_step(step: int) -> None:
    """The user's code after a step."""
    if options.after_s and step % 500 == 499 and host() == "h1":
        time.sleep(options.after_s)


torch.manual_seed(1)
square = torch.randn(200, 200)
model = torch.nn.Sequential(torch.nn.Linear(8, options.width), torch.nn.Linear(options.width, 4))
result = train(model, torch.optim.SGD(model.parameters(), lr=0.1), Points(), loss=loss,
               after_step=after_step, listeners=[note], until=f"{options.steps} steps",
               global_batch=32, microbatches=4, seed=3, checkpoint_every=options.checkpoint_every)
print("weights", result.weights_sha256)
