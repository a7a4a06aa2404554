"""The names of Horovod's that a script in its own style calls, led to our membership.

import of elastic_trainer.ElasticState, under our launcher → here → horovod.torch

What always holds:
1. Without our launcher nothing is changed: the script runs with Horovod's own functions.
2. What cannot hold in a world that changes raises, with the remedy.
3. A name that a script imported earlier (`from horovod.torch import local_rank`) leads here too, or
   raises: the change is made where Horovod's functions look, not only in `horovod.torch`.

Source: horovod/torch/__init__.py, elastic/__init__.py and mpi_ops.py, common/basics.py, 0.28.1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import horovod.torch as hvd
import horovod.torch.functions
import horovod.torch.optimizer
import horovod.torch.sync_batch_norm
from horovod.torch import mpi_ops

from elastic_trainer.config import ConfigError
from elastic_trainer.horovod_style.member import Member

REFUSED = {
    "join": "It is not completed when a worker is lost. Give all workers as many batches, as "
            "hvd.elastic.ElasticSampler does.",
    "add_process_set": "A process set does not survive a change of the world. Use the global one.",
    "cross_rank": "Use hvd.rank() or hvd.local_rank().",
    "cross_size": "Use hvd.size() or hvd.local_size().",
}
"""Functions that raise under our launcher."""
OUTSIDE = ("a collective was called outside of the function that hvd.elastic.run decorates. A "
           "worker that joins later does not take part in it, and all workers wait for ever. Call "
           "it in the function, or remove it (hvd.broadcast_parameters and "
           "broadcast_optimizer_state are not needed: each newcomer receives the state), and give "
           "hvd.DistributedOptimizer no `groups`.")
NOT_ROUTED = ("hvd.init was imported by name before elastic_trainer.ElasticState, so this worker "
              "has no place at the driver. Call it as hvd.init().")
NOT_INITIALIZED = -1
"""What Horovod's library returns before hvd.init(). Its Python functions raise ValueError then."""


def route(member: Member) -> None:
    """Lead Horovod's names to a membership. Raises ConfigError if hvd.init() has been called."""
    if mpi_ops.is_initialized():
        raise ConfigError("hvd.init() was called before elastic_trainer.ElasticState was imported, "
                          "so this worker has no place at the driver. Put `from elastic_trainer "
                          "import ElasticState` above hvd.init().")
    hvd.init = member.init
    hvd.elastic.run_fn = lambda function, reset: _decorated(member, function)
    _route_init(member)
    _route_collectives(member)
    # Session makes each worker a host of its own for Gloo, so Horovod's own answers are 0 and 1.
    library = mpi_ops._basics.MPI_LIB_CTYPES
    library.horovod_local_rank = lambda: (
        member.launch.slot if member.is_placed else NOT_INITIALIZED)
    library.horovod_local_size = lambda: (
        member.generations.local_size if member.generations else NOT_INITIALIZED)
    for name, remedy in REFUSED.items():
        setattr(hvd, name, _refusal(name, remedy))
    mpi_ops.mpi_lib.horovod_torch_join = hvd.join
    library.horovod_cross_rank, library.horovod_cross_size = hvd.cross_rank, hvd.cross_size


def _route_init(member: Member) -> None:
    """Let Horovod's own init start for the membership alone."""
    start = mpi_ops._basics.init

    def init(*arguments: Any, **named: Any) -> Any:
        if not member.is_entering:
            raise ConfigError(NOT_ROUTED)
        return start(*arguments, **named)

    mpi_ops._basics.init = init


def _route_collectives(member: Member) -> None:
    """Refuse collectives outside of the function, and wait for them as our own loop does."""
    find, meet = mpi_ops._check_function, mpi_ops.mpi_lib.horovod_torch_barrier

    def check_function(*arguments: Any) -> Any:
        if not member.may_reduce:
            raise ConfigError(OUTSIDE)
        return find(*arguments)

    def barrier(*arguments: Any) -> Any:
        if not member.may_reduce:
            raise ConfigError(OUTSIDE)
        return meet(*arguments)

    # Horovod's own wait holds the GIL, spins, and does not end after the enqueue race.
    def wait(handle: int) -> Any:
        return member.world.wait(handle) if handle in mpi_ops._handle_map else None

    mpi_ops._check_function, mpi_ops.mpi_lib.horovod_torch_barrier = check_function, barrier
    for module in (hvd, mpi_ops, horovod.torch.functions, horovod.torch.optimizer,
                   horovod.torch.sync_batch_norm):
        module.synchronize = wait


def _decorated(member: Member, function: Callable[..., Any]) -> Callable[..., Any]:
    member.functions.append(function.__name__)

    @wraps(function)
    def wrapper(state: Any, *arguments: Any, **named: Any) -> Any:
        if (script := member.script) is None or state is not script:
            raise ConfigError(f"the first argument of {function.__name__} is a "
                              f"{type(state).__name__}. Give it this process's "
                              f"elastic_trainer.ElasticState.")
        if member.is_over or len(member.functions) > 1:
            raise ConfigError(
                f"a run has one function that hvd.elastic.run decorates, and it is called once; "
                f"this script has {', '.join(member.functions)}. Call the parts of the training "
                f"from one function.")
        return member.train(script, lambda: function(state, *arguments, **named))

    return wrapper


def _refusal(name: str, remedy: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"hvd.{name}() cannot be used under the elastic-trainer launcher. "
                          f"{remedy}")

    return refuse
