"""A parser of command lines that names the nearest option where it knows none.

all commands → here → argparse
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from elastic_trainer.renamed import OPTIONS

MEANT = {"--name": "--run", "--nproc-per-node": "--workers", "--nproc_per_node": "--workers",
         "--num-workers": "--workers", "--nnodes": "--hosts", "--output-dir": "--runs-dir"}
"""Names that other launchers have."""


class Parser(argparse.ArgumentParser):
    """An argparse parser. It takes no abbreviations."""

    def __init__(self, *arguments: object, **options: object):
        super().__init__(*arguments, **{"allow_abbrev": False, **options})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Add the nearest option to the message of an unknown one."""
        if found := re.match(r"unrecognized arguments: (\S+)", message):
            message += nearest(found[1], options_of(self))
        super().error(message)

    def command_of(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the options before --, and the command after it. An empty one is an error, such as
        that of a shell's variable without a value: it is no demo."""
        at = list(argv).index("--") if "--" in argv else len(argv)
        if at < len(argv) and not "".join(argv[at + 1:]).strip():
            self.error("no command stands after --. Give it, e.g. -- python my_train.py, or leave "
                       "-- out for the demo.")
        return list(argv[:at]), list(argv[at + 1:])


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options of a parser and of its commands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from options_of(command)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ". Did you mean --steps?" for --stepss; "" if no known option is near."""
    name, options = word.partition("=")[0], list(known)
    if name in options:
        return ""
    was, _ = OPTIONS.get(name.lstrip("-").replace("-", "_"), ("", ""))
    meant = MEANT.get(name) or f"--{was}"
    close = [meant] if meant in options else difflib.get_close_matches(
        name.lower().replace("_", "-"), options, n=1, cutoff=0.75)
    return f". Did you mean {close[0]}?" if close else ""
