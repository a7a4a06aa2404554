"""torch.compile under `exact`: each shape has one program, whatever shapes a worker has seen.

torch's compiler ← here ← worker.py (which reducer), warm_up.py (whether the model is compiled)

What always holds:
1. With `exact` a program is compiled for each shape. By default torch compiles the second shape
   that a function gets for all shapes, and then takes that program for the first shape, too. The
   two have other bits (measured with a convolution and BatchNorm, torch 2.13), and the shapes that
   a worker has seen depend on the world.
2. With `exact` more shapes than torch's limit are an error. By default torch stops to compile, and
   the rest has the bits of the interpreter.
3. With `exact` the compiler chooses no kernel by trial.
4. Under `ring` torch's settings stay as they are.

What it does not do: import the compiler. The first optimizer does so, for 4 s.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from elastic_trainer.data.batches import add_note

DYNAMO, INDUCTOR = "torch._dynamo.config", "torch._inductor.config"
Settings = Mapping[tuple[str, str], bool]
"""Values of torch's settings, by module and name."""
EXACT: Settings = {
    (DYNAMO, "automatic_dynamic_shapes"): False,
    (DYNAMO, "fail_on_recompile_limit_hit"): True,
    (INDUCTOR, "deterministic"): True,
}
MANY_SHAPES = (
    "elastic-trainer: with reduce=\"exact\" each shape is compiled for itself, so that the bits do "
    "not depend on the shapes that a worker has seen before. For inputs of many shapes use "
    "torch.compile(…, dynamic=True), pad the batches to few shapes, or use reduce=\"ring\". "
    "Numbers that change in each step (step.number) count as shapes: give them as tensors.")


def current() -> Settings:
    """Return the values of these settings, where the compiler is imported."""
    return {(module, name): getattr(sys.modules[module], name)
            for module, name in EXACT if hasattr(sys.modules.get(module), name)}


def apply(settings: Settings) -> None:
    """Set them, in this process, where the compiler is imported."""
    for module, name in current():
        if (module, name) in settings:
            setattr(sys.modules[module], name, settings[module, name])


def programs() -> int:
    """Return how many functions the compiler has compiled in this process."""
    found: Any = sys.modules.get("torch._dynamo.utils")
    return int(found.counters["frames"]["ok"]) if found else 0


def advise(error: BaseException) -> None:
    """Add the remedy to torch's error for too many shapes."""
    if type(error).__name__ == "FailOnRecompileLimitHit":
        add_note(error, MANY_SHAPES)
