"""Scripts as Horovod's documentation has them, with ElasticState in the place of TorchState.

    python tests/jobs/horovod_examples.py imagenet|pair|mistake

imagenet: two samplers, batches in parts, a warm-up of the rate, metrics by allreduce, rare commits.
pair: two models with an optimizer each, and a state whose methods are overridden.
mistake: what must raise at once; --mistake has which one.
"""

import argparse
import hashlib
import json
import os
import time

import injected  # noqa: F401
import quick_boot  # noqa: F401

# isort: split
import horovod.torch as hvd
import torch
import torch.nn.functional as F
from faults import linger
from injected import folder as FOLDER
from injected import hurry, injector

from elastic_trainer import ElasticState

parser = argparse.ArgumentParser()
parser.add_argument("like", choices=("imagenet", "pair", "mistake"))
parser.add_argument("--mistake", default="")
parser.add_argument("--batch-s", type=float, default=0.0)
options = parser.parse_args()


def note(kind, **facts):
    """Write a line for the test."""
    me = f"{os.environ.get('HOROVOD_HOSTNAME')}/{os.getpid()}"
    line = {"kind": kind, "me": me, "rank": hvd.rank(), "size": hvd.size(), **facts}
    with open(FOLDER / "notes.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def wait_a_little():
    """Let a batch take its time, until the story of the test is over."""
    if not hurry.exists():
        time.sleep(options.batch_s)


def finish(*models, **facts):
    """Note the end, with a digest of the weights."""
    digest = hashlib.sha256()
    for model in models:
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
    note("finished", weights=digest.hexdigest(), local_rank=hvd.local_rank(), **facts)


def numbers(count, seed):
    """Return points and their classes."""
    points = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(points, points[:, :3].argmax(1))


class Metric:
    """An average over all workers."""

    def __init__(self, name):
        self.name, self.sum, self.count = name, torch.tensor(0.0), torch.tensor(0.0)

    def update(self, value):
        self.sum += hvd.allreduce(value.detach(), name=self.name)
        self.count += 1

    @property
    def average(self):
        return float(self.sum / self.count)


def imagenet():
    """A training with rare commits, parts of batches, a warm-up, and a validation."""
    epochs, warm_up, in_parts, between_commits = 8, 3, 2, 4
    training, held_out = numbers(240, 0), numbers(60, 1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(),
                                torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9,
                                weight_decay=1e-4)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none,
        backward_passes_per_step=in_parts, op=hvd.Average)
    train_sampler = hvd.elastic.ElasticSampler(training)
    val_sampler = hvd.elastic.ElasticSampler(held_out, shuffle=False)
    train_loader = torch.utils.data.DataLoader(training, batch_size=8, sampler=train_sampler)
    val_loader = torch.utils.data.DataLoader(held_out, batch_size=8, sampler=val_sampler)

    def adjust_rate(epoch, batch):
        done = epoch + (batch + 1) / len(train_loader)
        scale = min(1.0, done / warm_up) * (hvd.size() - 1) + 1
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * scale

    def train_epoch(state):
        model.train()
        loss_of_all, offset = Metric("train_loss"), state.batch
        for number, (data, target) in enumerate(train_loader):
            state.batch = offset + number
            if number % between_commits == 0:
                state.commit()
            else:
                state.check_host_updates()
            if state.epoch < epochs - 3:
                wait_a_little()
            else:
                linger(FOLDER, 2.0)
            adjust_rate(state.epoch, state.batch)
            optimizer.zero_grad()
            for low in range(0, in_parts):
                part, classes = data[low::in_parts], target[low::in_parts]
                loss = F.cross_entropy(model(part), classes) if len(part) > 1 else (
                    0 * sum(p.sum() for p in model.parameters()))
                (loss / in_parts).backward()
            optimizer.step()
            loss_of_all.update(loss)
            train_sampler.record_batch(number, len(data))
            injector("batch", {"epoch": state.epoch, "batch": state.batch})
        return loss_of_all.average

    def validate(state):
        model.eval()
        accuracy = Metric("val_accuracy")
        with torch.no_grad():
            for number, (data, target) in enumerate(val_loader):
                accuracy.update((model(data).argmax(1) == target).float().mean())
                val_sampler.record_batch(number, len(data))
        return accuracy.average

    @hvd.elastic.run
    def full_train(state):
        best = hvd.broadcast_object(state.best, root_rank=0)
        note("entered", epoch=state.epoch, batch=state.batch, best=best,
             processed=state.train_sampler.processed_num)
        while state.epoch < epochs:
            loss = train_epoch(state)
            accuracy = validate(state)
            state.best = max(state.best, accuracy)
            note("epoch", epoch=state.epoch, loss=loss, accuracy=accuracy)
            state.epoch, state.batch = state.epoch + 1, 0
            state.train_sampler.set_epoch(state.epoch)
            state.val_sampler.set_epoch(state.epoch)
            state.commit()

    state = ElasticState(model=model, optimizer=optimizer, train_sampler=train_sampler,
                         val_sampler=val_sampler, epoch=0, batch=0, best=0.0)
    full_train(state)
    finish(model, best=state.best)


class Noting(ElasticState):
    """A state whose methods are overridden, as TorchState's may be."""

    def save(self):
        note("save")
        super().save()

    def restore(self):
        note("restore")
        super().restore()

    def sync(self):
        super().sync()
        note("sync", sizes=hvd.allgather(torch.tensor([hvd.size()])).tolist())

    def reset(self):
        note("reset")

    def on_hosts_updated(self, timestamp, update_res):
        note("hosts_updated")
        super().on_hosts_updated(timestamp, update_res)


def pair():
    """Two models that learn in turns, and a list that grows, as in Horovod's benchmark."""
    torch.manual_seed(hvd.rank())
    models = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
    first, second = (hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), named_parameters=[
            (f"{number}.{name}", parameter) for name, parameter in model.named_parameters()])
        for number, model in enumerate(models))
    state = Noting(model=models[0], optimizer=first, critic=models[1], critic_optimizer=second,
                   scheduler=torch.optim.lr_scheduler.StepLR(first, 10), warm=False, img_secs=[],
                   iter=0)

    def on_state_reset():
        note("callback")
        for group in second.param_groups:
            group["lr"] = 0.01 * hvd.size()

    state.register_reset_callbacks([on_state_reset])

    @hvd.elastic.run
    def run_benchmark(state, count, *, label):
        note("entered", iter=state.iter, noted=len(state.img_secs), label=label,
             rate=second.param_groups[0]["lr"])
        if not state.warm:
            state.warm = True
            state.commit()
        while state.iter < count:
            if state.iter < count - 10:
                wait_a_little()
            else:
                linger(FOLDER)
            generator = torch.Generator().manual_seed(1000 * state.iter + hvd.rank())
            for model, optimizer in ((models[0], first), (models[1], second)):
                optimizer.zero_grad()
                for other in models:
                    other.requires_grad_(other is model)
                loss = models[1](models[0](torch.randn(6, 4, generator=generator))).pow(2).mean()
                loss.backward()
                optimizer.step()
            state.scheduler.step()
            state.img_secs.append(round(float(hvd.allreduce(loss.detach())), 6))
            state.iter += 1
            injector("batch", {"batch": state.iter})
            state.commit()
        state.sync()
        return state.img_secs

    noted = run_benchmark(state, 30, label="given")
    finish(*models, noted=len(noted), rate=first.param_groups[0]["lr"])


def mistake(which):
    """Make one mistake, in a script that is right otherwise."""
    model = torch.nn.Linear(4, 4)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01),
                                         named_parameters=model.named_parameters())
    state = ElasticState(model=model, optimizer=optimizer, batch=0)
    if which == "outside":
        hvd.allreduce(torch.ones(1))
    if which == "barrier":
        hvd.barrier()

    @hvd.elastic.run
    def train(state):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            if which == "between":
                state.commit()
            optimizer.step()
            if which == "shapes":
                hvd.allreduce(torch.ones(1 + hvd.rank()), name="metric")
            if which == "alike" and hvd.rank() == 1:
                state.check_host_updates()
            elif which == "returns" and hvd.rank() == 1:
                return
            else:
                state.commit()

    train(state)


hvd.init()
if options.like == "mistake":
    mistake(options.mistake)
else:
    {"imagenet": imagenet, "pair": pair}[options.like]()
