"""The set-up of Horovod as deploy/install.sh calls it, with the standard library alone.

    PYTHONPATH=… python elastic_trainer/setup/__main__.py           as `elastic-trainer setup`
    PYTHONPATH=… python elastic_trainer/setup/__main__.py lacks     before torch is installed:
                                                                    print what a build lacks
"""

from __future__ import annotations

import sys

from elastic_trainer.setup import command, needs
from elastic_trainer.setup.target import is_wheel_kept_for_some_torch


def main(argv: list[str]) -> int:
    """Run one command; returns the exit code."""
    if argv != ["lacks"]:
        return command.main(argv)
    if not is_wheel_kept_for_some_torch():
        print(*needs.of_build(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
