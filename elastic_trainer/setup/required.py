"""Refuse to start without a Horovod that fits.

`elastic-trainer run`, `from elastic_trainer import train` → here → ConfigError

Our wheel cannot require Horovod (see the package's head). Without this check the first error would
be an ImportError that names no remedy, or, with another torch, a symbol that the loader does not
find.
"""

from __future__ import annotations

import importlib.util
import sys

from elastic_trainer.config import ConfigError
from elastic_trainer.setup.target import Installed, Torch, installed_horovod, installed_torch

REMEDY = "Run `elastic-trainer setup`"


def require_horovod() -> None:
    """Raise ConfigError if Horovod is missing here, or was built for another torch."""
    if importlib.util.find_spec("horovod") is None:
        raise ConfigError(f"Horovod is not installed in {sys.prefix}. {REMEDY}, which builds it "
                          f"for the torch that is installed there.")
    require_fit(installed_horovod(), installed_torch())


def require_fit(horovod: Installed | None, torch: Torch | None) -> None:
    """Raise ConfigError if a Horovod was built for another torch."""
    if horovod is None or torch is None or not horovod.made_for:
        return  # a Horovod or a torch of the user's own making
    _, made_for, *_ = horovod.made_for.split("-")
    if made_for != torch.version:
        raise ConfigError(f"torch {torch.version} is installed in {sys.prefix}, but Horovod was "
                          f"built for torch {made_for}. {REMEDY}, which builds it for the "
                          f"installed torch.")
