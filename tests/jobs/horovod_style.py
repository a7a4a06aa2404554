"""A script in Horovod's own style, as pytorch_mnist_elastic.py has it; the faults come from
outside.

    python tests/jobs/horovod_style.py [--epochs N] [--batch-s SECONDS]

It prints, per epoch and rank, how often its samples were seen; the tests read that.
"""

import argparse
import json
import os
import time

import injected

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-s", type=float, default=0.0)
parser.add_argument("--checkpoint-every", default="10")
parser.add_argument("--late-import", action="store_true")
parser.add_argument("--early-collective", action="store_true")
parser.add_argument("--no-commit", action="store_true", help="commit at the end of an epoch alone")
parser.add_argument("--raise-on", help="the host on which the function raises")
parser.add_argument("--hold-on",
                    help="the host whose worker builds until there is a file named released")
parser.add_argument("--stock", action="store_true")
options = parser.parse_args()

if injected.injector:
    import quick_boot  # noqa: F401
import horovod.torch as hvd  # noqa: E402
import torch  # noqa: E402

if options.late_import:
    hvd.init()

from faults import linger  # noqa: E402
from injected import folder, hurry, injector  # noqa: E402

from elastic_trainer import ElasticState  # noqa: E402

hvd.init()
torch.manual_seed(1 + hvd.rank())  # each its own weights: a newcomer has to receive them
generator = torch.Generator().manual_seed(0)
points = torch.randn(403, 20, generator=generator)
classes = points[:, :4].argmax(1)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(),
                            torch.nn.Linear(64, 4))
if options.early_collective:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(torch.utils.data.TensorDataset(points, classes), seed=3)
me = f"{os.environ.get('HOROVOD_HOSTNAME')}/{os.getpid()}"


def note(kind, **facts):
    with open(folder / "notes.jsonl", "a") as file:
        file.write(json.dumps({"kind": kind, "me": me, "rank": hvd.rank(), "size": hvd.size(),
                               **facts}) + "\n")


pending = []


def note_pending(state):
    """Note the last batch if its commit is final, also where commit() has raised."""
    while pending:
        if (batch := pending.pop())["batch"] <= state.batch:
            note("batch", **batch)


if options.hold_on == os.environ.get("HOROVOD_HOSTNAME", ""):
    note("building")
    while not (folder / "released").exists():
        time.sleep(0.02)


def is_near_the_end(epoch, at, seen):
    """True in the second half of the last epoch."""
    return epoch == options.epochs - 1 and 2 * at >= len(seen)


@hvd.elastic.run
def train(state):
    note_pending(state)
    note("entered", epoch=state.epoch, batch=state.batch, lr=optimizer.param_groups[0]["lr"],
         processed=state.sampler.processed_num)
    while state.epoch < options.epochs:
        seen = list(iter(state.sampler))
        for at in range(0, len(seen), 8):
            indices = seen[at : at + 8]
            if injector and options.batch_s and is_near_the_end(state.epoch, at, seen):
                linger(folder, 3.0)
            elif not hurry.exists():
                time.sleep(options.batch_s)
            model.train(len(indices) > 1)  # a change of the world may leave a batch of one
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(points[indices]), classes[indices])
            loss.backward()
            optimizer.step()
            state.batch += 1
            state.sampler.record_batch(at // 8, len(indices))
            if injector:
                injector("batch", {"batch": state.batch})
            if options.raise_on == os.environ.get("HOROVOD_HOSTNAME", "") and state.batch == 5:
                raise ValueError("in the function, as planned")
            if not options.no_commit:
                pending.append({"epoch": state.epoch, "batch": state.batch, "indices": indices})
                state.commit()
                note_pending(state)
            else:
                state.check_host_updates()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()
    return "trained"


def on_reset():
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * hvd.size()
    note("reset")


given = {} if options.stock else {"checkpoint_every": options.checkpoint_every}
state = ElasticState(model=model, optimizer=optimizer, sampler=sampler, batch=0, epoch=0, **given)
state.register_reset_callbacks([on_reset])
result = train(state)
weights = [round(float(p.detach().double().sum()), 12) for p in model.parameters()]
bits = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()
import hashlib  # noqa: E402

note("finished", result=result, weights=hashlib.sha256(bits).hexdigest(),
     batch=state.batch, local_rank=hvd.local_rank())
print("finished", hvd.rank(), hvd.size(), weights[0])
