"""Elastic, fault-tolerant PyTorch training on spot clusters, on Horovod Elastic."""

TYPE_CHECKING = False  # as in typing, whose import would cost the discovery script 10 ms

if TYPE_CHECKING:
    from elastic_trainer.config import ConfigError as ConfigError
    from elastic_trainer.data.images import ImageFolder as ImageFolder
    from elastic_trainer.data.loader import Loader as Loader
    from elastic_trainer.data.mixture import Mixture as Mixture
    from elastic_trainer.data.parquet import ParquetFiles as ParquetFiles
    from elastic_trainer.data.tar import TarShards as TarShards
    from elastic_trainer.deepspeed.given import from_deepspeed as from_deepspeed
    from elastic_trainer.evaluate.best import KeepBest as KeepBest
    from elastic_trainer.evaluate.best import keep_best as keep_best
    from elastic_trainer.evaluate.evaluation import Evaluation as Evaluation
    from elastic_trainer.horovod_style.state import ElasticState as ElasticState
    from elastic_trainer.reduce.buffers import gather as gather
    from elastic_trainer.schedule.learning_rate import constant as constant
    from elastic_trainer.schedule.learning_rate import cosine as cosine
    from elastic_trainer.schedule.learning_rate import inverse_root as inverse_root
    from elastic_trainer.schedule.learning_rate import linear_decay as linear_decay
    from elastic_trainer.schedule.learning_rate import linear_scaling as linear_scaling
    from elastic_trainer.schedule.learning_rate import step_decay as step_decay
    from elastic_trainer.schedule.order import LikeLength as LikeLength
    from elastic_trainer.schedule.order import Weighted as Weighted
    from elastic_trainer.state.configuration import Configuration as Configuration
    from elastic_trainer.training.failures import LossNotFinite as LossNotFinite
    from elastic_trainer.training.job.averages import Swa as Swa
    from elastic_trainer.training.job.job import Result as Result
    from elastic_trainer.training.job.optimizers import decay_groups as decay_groups
    from elastic_trainer.training.job.settings import configuration as configuration
    from elastic_trainer.training.step import Step as Step
    from elastic_trainer.training.trainer import Trainer as Trainer
    from elastic_trainer.training.trainer import train as train
    from elastic_trainer.training.worker import local_rank as local_rank

_WHERE = {
    "ConfigError": "config", "Configuration": "state.configuration",
    "configuration": "training.job.settings", "ElasticState": "horovod_style.state",
    "ImageFolder": "data.images", "LikeLength": "schedule.order", "Loader": "data.loader",
    "LossNotFinite": "training.failures", "Mixture": "data.mixture", "ParquetFiles": "data.parquet",
    "Result": "training.job.job", "TarShards": "data.tar", "Weighted": "schedule.order",
    "constant": "schedule.learning_rate", "cosine": "schedule.learning_rate",
    "decay_groups": "training.job.optimizers", "from_deepspeed": "deepspeed.given",
    "gather": "reduce.buffers",
    "inverse_root": "schedule.learning_rate", "linear_decay": "schedule.learning_rate",
    "linear_scaling": "schedule.learning_rate", "local_rank": "training.worker",
    "step_decay": "schedule.learning_rate", "Step": "training.step", "Swa": "training.job.averages",
    "KeepBest": "evaluate.best", "keep_best": "evaluate.best",
    "Evaluation": "evaluate.evaluation", "train": "training.trainer",
    "Trainer": "training.trainer"
}
__all__ = list(_WHERE)

NEEDS_HOROVOD = ("training", "evaluate", "reduce", "horovod_style")
"""Rooms whose modules import Horovod: without one that fits, the error says so at once."""


def __getattr__(name: str) -> object:
    """Import a name when it is asked for: the driver and the command line start without torch."""
    if name not in _WHERE:
        raise AttributeError(f"module 'elastic_trainer' has no attribute {name!r}")
    from importlib import import_module

    from elastic_trainer.host.own import OursFirst

    with OursFirst():
        if needs_horovod := _WHERE[name].split(".")[0] in NEEDS_HOROVOD:
            from elastic_trainer.setup.required import require_horovod

            require_horovod()
        found: object = getattr(import_module(f"elastic_trainer.{_WHERE[name]}"), name)
        if needs_horovod:  # now: the user builds the model before the training begins
            import_module("elastic_trainer.training.determinism").choose_kernels()
            import_module("elastic_trainer.world.standby").stay_off_gpu()
        return found
