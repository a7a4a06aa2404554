"""The runs that a command reads: folders of this machine, or copies of logs in buckets.

verify, watch, report → here → folders
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_trainer.config import ConfigError
from elastic_trainer.state.stores.by_url import BUCKETS

if TYPE_CHECKING:
    from elastic_trainer.views.far import FarRun
    from elastic_trainer.views.prices import Pricing

RUN = "e.g. runs/NAME, or s3://, gs:// or az:// with BUCKET/NAME"


@contextmanager
def run_folders(places: Sequence[str]) -> Iterator[tuple[list[Path], list[FarRun]]]:
    """Yield the folders of runs, and the runs in buckets that some of them are copies of.

    Within the block a file that this user may not read is a ConfigError, too.
    """
    with ExitStack() as stack:
        runs = dict[str, "FarRun"]()
        for place in places:
            if place.startswith(BUCKETS) and place not in runs:
                from elastic_trainer.views.far import opened

                runs[place] = stack.enter_context(opened(place))
        folders = [runs[place].folder if place in runs else Path(place) for place in places]
        try:
            for folder in folders:
                if not folder.is_dir():
                    raise ConfigError(f"There is no folder {folder}. Name a run's folder, e.g. "
                                      f"runs/NAME.")
            yield folders, [*runs.values()]
        except PermissionError as error:
            raise ConfigError(
                f"This user may not read {error.filename}. Its owner lets a group in by: chgrp -R "
                f"GROUP {folders[0]}; chmod -R g+rwX {folders[0]}; find {folders[0]} -type d -exec "
                f"chmod g+s {{}} +") from error


def require_events(run_dir: Path, done: str) -> None:
    """Raise ConfigError if a folder has no event log."""
    from elastic_trainer.events.segments import has_events

    if not has_events(run_dir):
        raise ConfigError(f"{run_dir} has no events.jsonl, so nothing is {done}. Name a run's "
                          f"folder, e.g. runs/NAME.")


def prices_of(given: Path | None, *, is_live: bool = False) -> Pricing | None:
    """Return the prices that --prices names. `is_live`: they are followed, and not waited for.
    Raises ConfigError."""
    if not given:
        return None
    if given != Path("ec2"):
        from elastic_trainer.views.prices import load

        return load(given)
    from elastic_trainer.views.ec2_prices import Ec2Prices

    prices = Ec2Prices()
    if is_live:
        prices.follow()
    return prices
