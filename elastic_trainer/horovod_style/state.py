"""`ElasticState` in the place of `hvd.elastic.TorchState`: Horovod's own style.

    import horovod.torch as hvd
    from elastic_trainer import ElasticState      # above hvd.init()

    hvd.init()
    …
    state = ElasticState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)
    train(state)                                  # decorated with @hvd.elastic.run

Under `./horovodrun_elastic.sh` our driver, standbys and checkpoint store serve the script. Under
plain horovodrun, and alone, it is Horovod's TorchState. docs/migrate-from-horovod.md has the table
of what holds in this style. The other style (Trainer) holds more.

What always holds:
1. The names of Horovod's are changed by the import of this module, and only under our launcher.
2. The methods of State are called where Horovod calls them, also those that a subclass overrides:
   save at each commit, restore where a worker goes back, on_reset (reset, and the callbacks) after
   a change, sync before the function, on_hosts_updated before the interrupt.
"""

from __future__ import annotations

from typing import Any

import torch
from horovod.common.elastic import State
from horovod.torch.elastic import TorchState
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import rank

from elastic_trainer.config import ConfigError, Launch
from elastic_trainer.horovod_style.commit import Named
from elastic_trainer.horovod_style.member import Member
from elastic_trainer.horovod_style.names import route
from elastic_trainer.state.checkpoints.cadence import Cadence
from elastic_trainer.state.checkpoints.checkpoint import Plan
from elastic_trainer.training import debugger
from elastic_trainer.training.failures import end_as_user_error
from elastic_trainer.world.standby import is_standby


class ElasticState(TorchState):  # type: ignore[misc]  # Horovod has no types
    """Model, optimizer and named values of a script in Horovod's own style.

    A named value is a sampler or another object with state_dict and load_state_dict, or numbers,
    text, tensors and containers of them. All are in each commit, in each checkpoint, and in what a
    newcomer receives. `checkpoint_every` counts commits, or is a time, as in train();
    `keep_last` is the number of checkpoints that stay.
    """

    def __init__(self, model: torch.nn.Module | None = None,
                 optimizer: torch.optim.Optimizer | None = None, *,
                 checkpoint_every: int | str | None = "auto", keep_last: int = 3, **named: Any):
        object.__setattr__(self, "_handlers", {})  # of TorchState; __setattr__ looks there
        if _member is None:
            if (checkpoint_every, keep_last) != ("auto", 3):
                raise ConfigError(
                    f"checkpoint_every is {checkpoint_every!r} and keep_last {keep_last}, but only "
                    f"the elastic-trainer launcher makes checkpoints. Start the script with "
                    f"./horovodrun_elastic.sh, or leave them out.")
            super().__init__(model=model, optimizer=optimizer, **named)
            return
        plan = Plan(every=Cadence.parse(checkpoint_every), keep_last=keep_last, from_one=True)
        model, optimizer = _checked(_member, type(self), model, optimizer, named)
        # Not TorchState's: its handlers copy everything twice, and transfer it wrongly (F6 to F8).
        State.__init__(self, bcast_object=broadcast_object, get_rank=rank)
        for name, value in dict(model=model, optimizer=optimizer, **named).items():
            setattr(self, name, value)
        kept = {name: Named(self, name) for name in named}
        _member.build(self, model, optimizer, kept, plan)

    def __setattr__(self, name: str, value: Any) -> None:
        is_other = name in ("model", "optimizer") and getattr(self, name, value) is not value
        if _member is not None and is_other:
            raise RuntimeError(f"state.{name} was set to another {name}, which no worker that "
                               f"joins would have. Change its values in place.")
        super().__setattr__(name, value)

    def commit(self) -> None:
        """Make the values final on all workers. Raises HostsUpdatedInterrupt if the world changes.
        """
        if _member is None:
            super().commit()
        else:
            _member.commit()

    def check_host_updates(self) -> None:
        """Commit, and raise HostsUpdatedInterrupt, if the world changes; else do nothing."""
        if _member is None:
            super().check_host_updates()
        else:
            _member.commit(is_wanted=False)

    def sync(self) -> None:
        """Give all workers the values of rank 0. hvd.elastic.run does this by itself."""
        if _member is None:
            super().sync()
        else:
            _member.sync()

    def save(self) -> None:
        """Copy the values. commit() calls it. Under our launcher a script that calls it gets an
        error: one worker cannot commit alone."""
        if _member is None:
            super().save()
        else:
            _member.save()

    def restore(self) -> None:
        """Go back to the last commit, on this worker."""
        if _member is None:
            super().restore()
        else:
            _member.state.go_back()


def _checked(member: Member, kind: type, model: torch.nn.Module | None,
             optimizer: torch.optim.Optimizer | None,
             named: dict[str, Any]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    if not member.is_placed:
        raise ConfigError("hvd.init() has not been called. Call it before ElasticState(…), as "
                          "hvd.init() and below the import of elastic_trainer.ElasticState.")
    if member.state.is_built:
        raise ConfigError("this process has an ElasticState already, and a worker has one. "
                          "Give it the second model or optimizer as a named value: model_2=…")
    if model is None or optimizer is None:
        raise ConfigError(f"ElasticState got the model {model!r} and the optimizer "
                          f"{optimizer!r}. Give it both: model=…, optimizer=….")
    if taken := sorted(name for name in named if hasattr(kind, name)):
        raise ConfigError(f"{', '.join(taken)} cannot be the name of a value of ElasticState, "
                          f"which has a method of that name. Use another name.")
    return model, optimizer


def _routed() -> Member | None:
    if not (is_standby() or Launch.from_environment().driver):
        return None
    member = Member()
    try:
        route(member)
    except ConfigError:
        end_as_user_error()  # its exit code ends the run; the driver does not know this worker yet
        raise
    debugger.offer()
    return member


_member = _routed()
