"""What a person is told of checkpoints that cannot be written: while a run trains, and at its end.

checkpointing.py → here → stderr; the error that ends a run without its last checkpoint
"""

from __future__ import annotations

import sys

from elastic_trainer.config import ConfigError, Launch
from elastic_trainer.events.log import Events
from elastic_trainer.state.publish import Known
from elastic_trainer.world.place import Unsaved


class Told:
    """What a person was told of failed checkpoints."""

    def __init__(self) -> None:
        self._errors = 0
        """The number of failed checkpoints when this was last looked at."""

    def look(self, known: Known) -> None:
        """Tell a person that checkpoints fail again and again: after 2, 4, 8, … of them."""
        errors, before, self._errors = known.errors, self._errors, known.errors
        if errors > 1 and errors != before and errors & (errors - 1) == 0:
            _print(f"{errors} checkpoints in a row were not written ({known.why}). {newest(known)} "
                   f"The training goes on, and checkpoints are tried again. Mend the store.")


def newest(known: Known) -> str:
    """Return a sentence on the newest checkpoint."""
    return (f"The newest checkpoint is that of step {known.newest_step}." if known.newest_step > 0
            else "There is no checkpoint.")


def tell_last(step: int, known: Known) -> None:
    """Tell a person that an attempt ends without a checkpoint of its last step."""
    _print(f"the checkpoint of step {step} was not written ({known.why}). {newest(known)} The same "
           f"command does the steps after it again.")


def unsaved(steps: int, known: Known, tried_s: float, rank: int, events: Events) -> Unsaved:
    """Return what ends a run that has done all its steps without its last checkpoint. Rank 0 logs
    it."""
    if rank == 0:
        events.emit("job.left_unsaved", step=steps, error=known.why,
                    newest_checkpoint=known.newest_step)
    return Unsaved(
        f"the run has done all its {steps} steps, but its last checkpoint could not be written in "
        f"{tried_s:g} s: {known.why or 'rank 0 has the error'}. {newest(known)} The steps after it "
        f"are lost with this process. Mend the store, and give the same command: it does them "
        f"again.")


def no_checkpoint(launch: Launch) -> ConfigError:
    """Return what to raise if the folder of a run that has checkpoints has none on this host."""
    return ConfigError(
        f"the run has a checkpoint of step {launch.resume_step}, but {launch.run_dir} on this host "
        f"has none. Give the same --store as before, or put the folder of runs (--runs-dir) on a "
        f"disk that all hosts share.")


def _print(sentence: str) -> None:
    print(f"elastic-trainer: {sentence}", file=sys.stderr, flush=True)
