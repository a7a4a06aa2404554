"""`python -m elastic_trainer`, and the command `elastic-trainer`: see launch/command.py."""

from elastic_trainer.launch.command import main as main
from elastic_trainer.launch.command import run_process

if __name__ == "__main__":
    run_process()
