"""The user's error if workers begin a step with different modes (train or eval) of modules.

vote (the checksums of the modes differ) → here → an error on all workers that names the modules
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NoReturn

from elastic_trainer.state.live_state import LiveState
from elastic_trainer.training.supported import some
from elastic_trainer.world.collectives import World


def refuse(state: LiveState, world: World) -> NoReturn:
    """Raise RuntimeError on all workers: they have begun the step in flight with different modes.

    All workers call it. Network: one exchange of names.
    """
    mine = json.dumps(state.modes.evaluating_before())
    everyone = [json.loads(text) for text in world.gather_texts(mine)]
    state.restore()
    raise RuntimeError(sentence(state.committed, everyone))


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
        f"which shard. Call model.train() and model.eval() on every worker alike, and not under "
        f"`if trainer.is_first`; or put the mode back before the code behind the inner loop ends.")
