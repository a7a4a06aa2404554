"""The names of Horovod's that a script in its own style calls, led to our membership.

import of elastic_trainer.ElasticState, under our launcher → here → horovod.torch

What always holds:
1. Without our launcher nothing is changed: the script runs with Horovod's own functions.
2. What cannot hold in a world that changes raises, with the remedy.

Source: horovod/torch/__init__.py, elastic/__init__.py and mpi_ops.py, 0.28.1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NoReturn

import horovod.torch as hvd
import horovod.torch.optimizer
from horovod.torch import mpi_ops

from elastic_trainer.config import ConfigError
from elastic_trainer.training.horovod_member import Member

REFUSED = {
    "join": "It is not completed when a worker is lost. Give all workers as many batches, as "
            "hvd.elastic.ElasticSampler does.",
    "add_process_set": "A process set does not survive a change of the world. Use the global one.",
    "cross_rank": "Use hvd.rank() or hvd.local_rank().",
    "cross_size": "Use hvd.size() or hvd.local_size().",
}
"""Functions that raise under our launcher."""
EARLY = ("a collective was called before the function that hvd.elastic.run decorates. A worker "
         "that joins later calls it alone, and all workers wait for ever. Remove it "
         "(hvd.broadcast_parameters and broadcast_optimizer_state are not needed: each newcomer "
         "receives the state), give hvd.DistributedOptimizer no `groups`, or call it in the "
         "function.")


def route(member: Member) -> None:
    """Lead Horovod's names to a membership. Raises ConfigError if hvd.init() has been called."""
    if mpi_ops.is_initialized():
        raise ConfigError("hvd.init() was called before elastic_trainer.ElasticState was imported, "
                          "so this worker has no place at the driver. Put `from elastic_trainer "
                          "import ElasticState` above hvd.init().")
    find = mpi_ops._check_function

    def init(comm: Any = None, process_sets: Any = None) -> None:
        is_first = not member.is_placed
        member.init(comm, process_sets)
        if is_first:
            mpi_ops._check_function = _refuse_early

    def allow() -> None:
        mpi_ops._check_function = find

    member.on_joining = allow
    hvd.init = init
    hvd.elastic.run = partial(_decorated, member)
    # Session makes each worker a host of its own for Gloo, so Horovod's own answers are 0 and 1.
    hvd.local_rank = lambda: member.launch.slot
    hvd.local_size = lambda: member.generations.local_size if member.generations else 1
    for name, remedy in REFUSED.items():
        setattr(hvd, name, _refusal(name, remedy))
    # Horovod's own wait holds the GIL, spins, and does not end after the enqueue race.
    def wait(handle: int) -> Any:
        return member.world.wait(handle)

    mpi_ops.synchronize = horovod.torch.optimizer.synchronize = wait


def _decorated(member: Member, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that trains, in the place of what hvd.elastic.run returns."""

    @wraps(function)
    def wrapper(state: Any, *arguments: Any, **named: Any) -> Any:
        if not member.state.is_built:
            raise ConfigError(f"the first argument of {function.__name__} is a "
                              f"{type(state).__name__}. Give it an elastic_trainer.ElasticState, "
                              f"of which a process has one.")
        return member.train(state, lambda: function(state, *arguments, **named))

    return wrapper


def _refuse_early(*_: Any) -> NoReturn:
    raise RuntimeError(EARLY)


def _refusal(name: str, remedy: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"hvd.{name}() cannot be used under the elastic-trainer launcher. "
                           f"{remedy}")

    return refuse
