"""The options --config, --deepspeed, --set, --override and --allow-change of `run`: read, checked,
and compared with the run before anything starts.

command line → here → run_options (the section `run`), the workers' environment (run.py)

What always holds:
1. An option on the command line overrides the section `run` of the file.
2. A change that a resumed run may not have is refused here already, where its checkpoint can be
   read. The workers compare again (training/job/settings.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_trainer.config import ConfigError
from elastic_trainer.options import Option, require_values
from elastic_trainer.state.configuration import (
    DEEPSPEED,
    RUN,
    VARIABLE,
    Change,
    Configuration,
    assigned,
    changes,
    overridden,
    read_file,
    require_allowed,
    require_options,
    require_sound,
)
from elastic_trainer.wire.plain import plain

ALLOW_VARIABLE = "ELASTIC_TRAINER_ALLOW_CHANGE"
OF_THE_COMMAND_LINE = ("help", "config", "set", "deepspeed", "override", "allow_change",
                       "horovodrun")


def add_options(parser: argparse.ArgumentParser, env: Mapping[str, str]) -> None:
    """Declare the options."""
    named = env.get(VARIABLE, "")
    parser.add_argument("--config", metavar="FILE",
                        default=None if named.startswith("{") else named or None,
                        help="a TOML file: [training] has options of Trainer, [run] those of this "
                             "command, other sections are the script's (configuration())")
    parser.add_argument("--set", metavar="SECTION.KEY=VALUE", action="append", default=[],
                        help="set a value of the configuration, as TOML: --set training.lr=0.1")
    parser.add_argument("--deepspeed", metavar="FILE",
                        help="DeepSpeed's JSON, for a script that calls from_deepspeed(): the "
                             "section [deepspeed] of the configuration")
    parser.add_argument("--override", metavar="OPTION=VALUE", action="append", default=[],
                        help="an option of Trainer that holds instead of the script's, as TOML: "
                             "--override checkpoint_every=50")
    parser.add_argument("--allow-change", metavar="SECTION.KEY|PART", action="append", default=[],
                        help="let a resumed run have another value, or other data or another "
                             "program (samples, batch, modules, optimizer, …), which changes its "
                             "bits")


def read(argv: list[str], env: Mapping[str, str]) -> Configuration:
    """Return the configuration that the command line names, checked. Raises ConfigError."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_options(parser, env)
    options, _ = parser.parse_known_args(argv)
    found = read_file(Path(options.config)) if options.config else Configuration({}, "--set")
    if options.deepspeed:
        found = _with_deepspeed(found, options.deepspeed)
    if options.set:
        found = assigned(found, options.set)
    require_options(found)
    if DEEPSPEED in found:
        _require_deepspeed(found)
    return overridden(found, options.override) if options.override else found


def _with_deepspeed(found: Configuration, path: str) -> Configuration:
    """Return a configuration with the content of DeepSpeed's JSON. Raises ConfigError."""
    from elastic_trainer.deepspeed.file import read as read_json

    if DEEPSPEED in found:
        raise ConfigError(f"--deepspeed is {path}, and {found.source} has a section "
                          f"[{DEEPSPEED}]. Leave one of them out.")
    values = {**found.as_dict(), DEEPSPEED: read_json(path)}
    source = f"{found.source} with {path}" if found else path
    require_sound(values, source)
    return Configuration(values, source)


def _require_deepspeed(found: Configuration) -> None:
    """Raise ConfigError for what is not supported. "auto" is left to the script: that of
    transformers fills it in."""
    from elastic_trainer.deepspeed.file import checked

    checked(found.section(DEEPSPEED), found.source, takes_auto=True)


def options_of(configuration: Configuration, parser: argparse.ArgumentParser) -> list[str]:
    """Return the section `run` as options of the command line. Raises ConfigError."""
    given = configuration.section(RUN)
    actions = {action.dest: action for action in parser._actions
               if action.dest not in OF_THE_COMMAND_LINE}
    require_values(given, {name: _declared(action) for name, action in actions.items()}, "",
                   f"{configuration.source}: {RUN}.")
    found = []
    for name, value in given.items():
        option = actions[name].option_strings[-1]
        if value is True:
            found.append(option)
        elif value is not False:
            found.append(f"{option}={value}")
    return found


def _declared(action: argparse.Action) -> tuple[Any, Option]:
    kind = bool if action.nargs == 0 else int if action.type is int else str
    return kind, Option(choices=tuple(action.choices or ()))


def require_own(configuration: Configuration, example: str) -> None:
    """Raise ConfigError if the demo is given values for a script."""
    if others := [section for section in configuration if section != RUN]:
        raise ConfigError(
            f"{configuration.source} has [{others[0]}], but the demo {example} does not read it. "
            f"Leave it out, or give your own command after --.")


def for_workers(configuration: Configuration) -> str:
    """Return what workers receive; "" if there is nothing for the script. Raises ConfigError."""
    has_any = set(configuration) - {RUN} or configuration.overrides
    return configuration.to_text() if has_any else ""


def is_compared(configuration: Configuration) -> bool:
    """True if there are values that a resumed run must have, too. Where the script names its file
    itself, only the workers compare."""
    return bool(set(configuration) - {RUN})


def compare_with_run(configuration: Configuration, allowed: list[str], run: str,
                     facts: Mapping[str, Any]) -> None:
    """Show what differs from the run's newest checkpoint, which has these facts. Raises ConfigError
    for a change that is not allowed. Where the store does not answer, only the workers compare."""
    was = facts.get("configuration")
    if not is_compared(configuration) or not isinstance(was, dict):
        return
    found = changes(was, configuration.flat())
    if found:
        _show(found, allowed)
    require_allowed(found, allowed, run)


def _show(found: list[Change], allowed: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("key", "in the run", "given", "", title="the configuration differs")
    means = {"harmless": "holds from here on", "allowed": "allowed", "refused": "changes the bits",
             "never": "cannot change"}
    for change in found:
        cells = (change.key, repr(change.was), repr(change.now), means[change.verdict(allowed)])
        table.add_row(*(Text(plain(cell)) for cell in cells))
    Console(stderr=True).print(table)
