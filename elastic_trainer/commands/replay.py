"""`elastic-trainer replay`: rehearse a spot fleet on local hosts (rehearse/replay.py).

command line → here, with what `run` knows of demos and options → rehearse/replay.py
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_trainer.commands import run_options
from elastic_trainer.rehearse import replay


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code. Raises ConfigError."""
    return replay.run(argv, run_options.EXAMPLES, run_options.demo,
                      run_options.require_known_of_run)
