"""Leaves torch's compiler and exporter out of a job that imports this before torch.

They are half of what a worker needs to boot, and the jobs that import this use neither.
"""

import sys
import types

for unused in ("torch._meta_registrations", "torch.export"):
    sys.modules[unused] = types.ModuleType(unused)
# Imported by the first optimizer, to be left alone by it.
compiler = types.ModuleType("torch._dynamo")
compiler.__dict__.update(disable=lambda function, *_, **__: function, graph_break=lambda: None)
sys.modules["torch._dynamo"] = compiler

# A generator needs it, and only a module that is left out here imports it.
import torch._prims.rng_prims  # noqa: E402,F401
