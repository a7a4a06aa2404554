"""The user's error if workers begin a step with different modes (train or eval), or different plain
attributes, of modules.

vote (the checksums differ) → here → an error on all workers that names the modules, or the
attributes
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.supported import some
from elastic_trainer.world.collectives import World


def refuse(state: LiveState, world: World) -> NoReturn:
    """Raise RuntimeError on all workers: they have begun the step in flight with different modes or
    attributes.

    All workers call it. Network: one exchange of names and values.
    """
    mine = json.dumps([state.modes.evaluating_before(), state.attributes.changed_before()],
                      default=repr)
    modes, attributes = zip(*map(json.loads, world.gather_texts(mine)), strict=True)
    state.restore()
    if all(one == attributes[0] for one in attributes):
        raise RuntimeError(sentence(state.committed, modes))
    raise RuntimeError(on_attributes(state.committed, attributes))


def sentence(step: int, evaluating: Sequence[Sequence[str]]) -> str:
    """Return what differs, and the remedy. `evaluating` has the modules in eval mode, by rank."""
    names = sorted({name for theirs in evaluating for name in theirs})
    differ = [name for name in names if not all(name in theirs for theirs in evaluating)]
    first = [rank for rank, theirs in enumerate(evaluating) if differ and differ[0] in theirs]
    shown = [name or "the model" for name in differ]
    return (
        f"the mode (train or eval) of {some(shown)} differs between the workers in step {step}: "
        f"{shown[0] if shown else 'a module'} is in eval mode on rank "
        f"{', '.join(map(str, first[:8]))} alone. So the weights would depend on which worker runs "
        "which micro-batch. Call model.train() and model.eval() on every worker alike, and not "
        "under `if trainer.is_first`; or put the mode back before the code behind the inner loop "
        "ends.")


def on_attributes(step: int, changed: Sequence[Mapping[str, Any]]) -> str:
    """Return what differs, and the remedy. `changed` has the values of changed attributes, by rank;
    another one is as it was built."""
    differ = [path for path in sorted({path for theirs in changed for path in theirs})
              if not all(path in theirs and theirs[path] == changed[0].get(path)
                         for theirs in changed)]
    held = [f"{json.dumps(theirs[differ[0]])[:40]} on rank {rank}" if differ[0] in theirs else
            f"as it was built on rank {rank}" for rank, theirs in enumerate(changed[:8])]
    return (
        f"the attributes {some(differ)} of the model's modules differ between the workers in step "
        f"{step}: {differ[0]} is {', '.join(held)}. So the weights would depend on which worker "
        f"runs which micro-batch. Change attributes on every worker alike, and not under "
        f"`if trainer.is_first`, or put them back before the code behind the inner loop ends.")
