"""Elastic, fault-tolerant PyTorch training on spot clusters, on Horovod Elastic."""

TYPE_CHECKING = False  # type checkers take the name for true; to import typing would cost the discovery script 10 ms


if TYPE_CHECKING:
    from elastic_trainer.config import ConfigError as ConfigError
    from elastic_trainer.loop import Result as Result
    from elastic_trainer.loop import local_rank as local_rank
    from elastic_trainer.loop import train as train
    from elastic_trainer.losses import LossNotFinite as LossNotFinite
    from elastic_trainer.schedule import constant as constant
    from elastic_trainer.schedule import cosine as cosine

_WHERE = {"ConfigError": "config", "Result": "loop", "local_rank": "loop", "train": "loop", "constant": "schedule",
          "cosine": "schedule", "LossNotFinite": "losses"}
__all__ = list(_WHERE)


def __getattr__(name: str) -> object:
    """Import a name when it is asked for: the driver and the command line start without torch."""
    if name not in _WHERE:
        raise AttributeError(f"module 'elastic_trainer' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"elastic_trainer.{_WHERE[name]}"), name)
