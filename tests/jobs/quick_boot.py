"""Halves what a job needs to boot, if the job imports this before torch.

Torch's compiler and exporter are left out, which these jobs do not use (checkpointing of
activations does). The garbage collector does not look at what the imports have made: not meanwhile,
and not at the end of the process.
"""

import gc
import sys
import types

gc.disable()
for unused in ("torch._meta_registrations", "torch.export"):
    sys.modules[unused] = types.ModuleType(unused)
# Imported by the first optimizer, to be left alone by it.
compiler = types.ModuleType("torch._dynamo")
compiler.__dict__.update(disable=lambda function, *_, **__: function, graph_break=lambda: None)
sys.modules["torch._dynamo"] = compiler

import torch._C  # noqa: E402

# From torch 2.13 on a generator needs its metaclass, and only a module that is left out here sets
# it.
if hasattr(torch._C, "_set_generator_metaclass"):
    from torch._opaque_base import OpaqueBaseMeta

    torch._C._set_generator_metaclass(OpaqueBaseMeta)

gc.freeze()
gc.enable()
