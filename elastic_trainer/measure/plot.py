"""The picture of a measurement of scaling: samples a second over the number of workers (PNG).

rows → here → file

What it does not do: import matplotlib before a picture is asked for; it is an optional extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from elastic_trainer.config import ConfigError
from elastic_trainer.measure.cases import Row

TITLES = {"strong": "strong scaling: the same global batch",
          "weak": "weak scaling: the same batch for each worker"}


def require_plot(file: Path) -> None:
    """Raise ConfigError if a picture could not be drawn or written: before anything is measured."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed. Install it: pip "
                          "install 'elastic-trainer[plots]'. Or leave --plot out.")
    if not file.absolute().parent.is_dir() or file.suffix != ".png":
        raise ConfigError(f"--plot is {str(file)!r}. Name a file NAME.png in a folder that exists.")


def draw(rows: Sequence[Row], modes: Sequence[str], file: Path) -> None:
    """Write the picture. Raises ConfigError."""
    import matplotlib
    from matplotlib.figure import Figure

    del matplotlib  # its back end is chosen by Figure: no window
    figure = Figure(figsize=(5.5 * len(modes), 4.2), layout="constrained")
    for place, mode in enumerate(modes):
        axes = figure.add_subplot(1, len(modes), place + 1)
        for arm in dict.fromkeys(row.case.arm for row in rows):
            mine = sorted((row for row in rows if row.case.arm == arm and row.case.scale
                           == (row.case.workers if mode == "weak" else 1)),
                          key=lambda row: row.case.workers)
            sizes = [row.case.workers for row in mine]
            line, = axes.plot(sizes, [row.rate for row in mine], marker="o", label=arm)
            axes.plot(sizes, [mine[0].rate * size for size in sizes], linestyle=":", linewidth=1,
                      color=line.get_color())
        axes.set(title=TITLES[mode], xlabel="workers", ylabel="samples/s", ylim=(0, None),
                 xticks=sorted({row.case.workers for row in rows}))
        axes.grid(alpha=0.3)
        axes.legend(title="dotted: ideal")
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {file} cannot be written: {error.strerror}. Name a file in a "
                          f"folder that you may write to.") from error
