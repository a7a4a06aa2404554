"""The job of world_size.py: so small that workers do little but talk to each other, and quick to
boot.

    python tests/bench/jobs/tiny.py
"""

import sys
import time
import types

# Half of what a worker needs to boot (tests/jobs/mlp.py)
for unused in ("torch._meta_registrations", "torch.export"):
    sys.modules[unused] = types.ModuleType(unused)
compiler = types.ModuleType("torch._dynamo")
compiler.__dict__.update(disable=lambda function, *_, **__: function, graph_break=lambda: None)
sys.modules["torch._dynamo"] = compiler

import torch  # noqa: E402

# A generator needs it, and only a module that is left out here imports it.
import torch._prims.rng_prims  # noqa: E402

from elastic_trainer import train  # noqa: E402

MICROBATCH_S = 0.02


class Samples(torch.utils.data.Dataset):
    """4096 points; reading some takes MICROBATCH_S, in which the worker is asleep."""

    def __len__(self) -> int:
        return 4096

    def __getitems__(self, numbers: list[int]) -> list[torch.Tensor]:
        time.sleep(MICROBATCH_S)
        return [torch.full((8,), float(number % 7)) for number in numbers]


torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
train(model, torch.optim.SGD(model.parameters(), lr=1e-4), Samples(), global_batch=64,
      microbatches=64, until="1000000 steps", checkpoint_every=10**9,
      loss=lambda model, batch: model(batch).square().mean())
