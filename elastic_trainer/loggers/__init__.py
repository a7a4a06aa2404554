"""Loggers: the numbers of a run, in the formats of other tools.

    from elastic_trainer.loggers import Csv, TensorBoard
    Trainer(…, loggers=[TensorBoard(), Csv("metrics.csv")])
"""

from elastic_trainer.loggers.csv_file import Csv
from elastic_trainer.loggers.mlflow_run import MLflow
from elastic_trainer.loggers.row import Logger, Row, Run
from elastic_trainer.loggers.tensorboard_folder import TensorBoard
from elastic_trainer.loggers.wandb_run import WandB

__all__ = ["Csv", "Logger", "MLflow", "Row", "Run", "TensorBoard", "WandB"]
