"""A job with a large state and little arithmetic, for bench/checkpoint.py: what a checkpoint's
pause is, beside its peers'.

At the end of each of the steps before a checkpoint (COPIES of them) every worker times, at the same
time as the others, a bare copy of as many bytes of the state as its share has, into memory that is
there already. At the step that --peers-at names it times `torch.distributed.checkpoint.async_save`
of the state to a folder, and (rank 0 alone, the others wait, as they would) `torch.save` to a file
and through s3fs, `torch.load` and broadcasts to the others. The first `torch.save` and the first
`async_save` of the process are cold, and noted as such.
"""

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from elastic_trainer import train
from elastic_trainer.state.checkpoints.checkpoint import PART_BYTES

parser = argparse.ArgumentParser()
parser.add_argument("--gb", type=float, required=True)
parser.add_argument("--steps", type=int, default=100000)
parser.add_argument("--every", type=int, required=True)
parser.add_argument("--peers-at", type=int, default=0)
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--peer-url", default="")
parser.add_argument("--work", type=int, default=8, help="how much arithmetic a step has")
options = parser.parse_args()

BLOCKS = 16
COPIES = 3
# 12 bytes a parameter: itself and Adam's two moments.
WIDTH = int((options.gb * 1e9 / 12 / BLOCKS) ** 0.5)


class Model(torch.nn.Module):
    """Square matrices, of which each sample uses all, and which no gradient vanishes in: every byte
    of state changes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ParameterList(
            torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(BLOCKS))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        rows = points.repeat(options.work, 1)
        for block in self.blocks:
            rows = torch.tanh(rows @ block)
        return rows


def state_dict() -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def timed(act: Any) -> float:
    started = time.monotonic()
    act()
    return time.monotonic() - started


def bare_copy(rank: int, size: int) -> Any:
    """Return what copies as much of the state as this worker's share, tensor by tensor, into memory
    that is there already.

    A share is whole parts, so shares may differ.
    """
    tensors = [tensor for parameter in model.parameters()
               for tensor in (parameter.detach(),
                              *(v for v in optimizer.state[parameter].values() if v.numel() > 1))]
    total = sum(tensor.nbytes for tensor in tensors)
    wanted = sum(
        min(PART_BYTES, total - start)
        for start in range(rank * PART_BYTES, total, size * PART_BYTES))
    sources = []
    for tensor in tensors:
        if wanted > 0:
            sources.append(tensor.reshape(-1)[: max(1, wanted // 4)])
            wanted -= sources[-1].nbytes
    targets = [torch.zeros_like(source) for source in sources]

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    copy()  # now it is there
    return copy


def others_ways(rank: int, size: int) -> float:
    """Time what others would do, each alone on the machine; returns the pause of async_save, notes
    the rest in `facts`."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    store = f"file://{options.folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    seconds, path = 0.0, options.folder / "torch.save"
    if rank == 0:
        facts["first_torch_save_s"] = timed(lambda: torch.save(state_dict(), path))
        path.unlink()
    for number in range(2):  # the second one reuses what the first has made
        dist.barrier()
        started = time.monotonic()
        future = dcp.async_save(state_dict(), checkpoint_id=str(options.folder / f"dcp-{number}"))
        seconds = time.monotonic() - started
        facts.setdefault("first_async_save_pause_s", seconds)
        future.result()
    dist.barrier()
    if options.peer_url:
        facts["peer_publish_s"], facts["peer_restore_s"] = to_s3(rank)
    if rank == 0:
        facts["torch_save_s"] = timed(lambda: torch.save(state_dict(), path))
        path.unlink()
    dist.barrier()  # else the others would compute beside it, on the same cores
    dist.destroy_process_group()
    if rank == 0:
        for number in range(2):
            shutil.rmtree(options.folder / f"dcp-{number}")
    return seconds


def to_s3(rank: int) -> tuple[float, float]:
    """Rank 0 writes and reads through s3fs; what it has read goes to the others by broadcasts,
    tensor by tensor."""
    import s3fs
    import torch.distributed as dist

    files = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL_S3"])

    def write() -> None:
        with files.open(options.peer_url, "wb") as file:
            torch.save(state_dict(), file)

    def read() -> None:
        tree = state_dict()
        if rank == 0:
            with files.open(options.peer_url, "rb") as file:
                tree = torch.load(file, weights_only=True)
        moments = [t for entry in tree["optimizer"]["state"].values() for t in entry.values()]
        for tensor in (*tree["model"].values(), *moments):
            dist.broadcast(tensor, 0)

    written = timed(write) if rank == 0 else 0.0
    dist.barrier()
    seconds = written, timed(read)
    if rank == 0:
        files.rm(options.peer_url)
    return seconds


def after_step(step: int) -> None:
    rank, size = place["rank"], place["size"]
    if step == 0:
        copier.append(bare_copy(rank, size))
    elif -(step + 1) % options.every in range(
            1, COPIES + 1):  # at a step's end, as the snapshot is; no upload is in flight
        note("memcpy", timed(copier[0]))
    if step + 1 != options.peers_at:
        return
    facts.update(async_save_pause_s=others_ways(rank, size))
    (options.folder / f"peers-{rank}.json").write_text(json.dumps(facts))


def listen(event: str, about: dict[str, Any]) -> None:
    if event == "world.generation_entered":
        place.update(rank=about["rank"], size=about["size"])
    if event == "state.share_begun":
        note("pause", about["pause_s"])


def note(what: str, seconds: float) -> None:
    with open(options.folder / f"{what}-{place['rank']}", "a") as file:
        print(seconds, file=file)


torch.manual_seed(0)
place = {"rank": 0, "size": 1}
facts: dict[str, Any] = {}
copier: list[Any] = []
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
points = torch.randn(64, WIDTH)
train(model, optimizer, torch.utils.data.TensorDataset(points),
      loss=lambda m, batch: m(batch[0]).square().mean(), global_batch=16, microbatches=4,
      until=f"{options.steps} steps", checkpoint_every=options.every, keep_last=1,
      after_step=after_step, listeners=[listen])
