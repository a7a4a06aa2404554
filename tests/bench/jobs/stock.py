"""The peer's arm: the script that a user writes from Horovod's documentation (docs/elastic.rst),
commit at each step.

    horovodrun -np 4 --host-discovery-script … python tests/bench/jobs/stock.py LOG STEPS [STEP_S
    WIDTH]

Each worker appends `time rank size step pid` lines to LOG; nothing else differs from the
documentation's example.
"""

import os
import sys
import time

import horovod.torch as hvd
import torch
from model import build, loss, samples

log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
steps = int(sys.argv[2])
step_s, width = (float(sys.argv[3]), int(sys.argv[4])) if sys.argv[3:] else (0.0, 2048)


def say(step: int) -> None:
    os.write(log, f"{time.time():.4f} {hvd.rank()} {hvd.size()} {step} {os.getpid()}\n".encode())


hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = build(width)
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-3),
                                     named_parameters=model.named_parameters())
dataset = samples()


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    for state.batch in range(state.batch, steps):  # noqa: B020 (as in the documentation)
        chosen = torch.arange(hvd.rank() * 16, hvd.rank() * 16 + 16)
        time.sleep(step_s)
        optimizer.zero_grad()
        loss(model, [tensor[chosen] for tensor in dataset.tensors]).backward()
        optimizer.step()
        say(state.batch)
        state.commit()


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0))
