"""A run's configuration: the sections and values of a TOML file, frozen, with errors that name the
key; and what another configuration means for a run that goes on.

run.toml, --set, --override → launcher (driver/configured.py) → environment → here → script,
options (training/job/settings.py), checkpoint's record

What always holds:
1. Values are what TOML and JSON both have: texts, finite numbers, booleans, lists, tables.
2. A key that looks like a secret is refused, because the values are stored in each checkpoint.
3. A missing key is an error that names the file and the key.
4. A key is taken to change the bits, unless its option is declared to be harmless (options.py). A
   key from which follows which samples a step has is never allowed to change: steps that are done
   and steps to come would then not cover each sample once.

It imports no torch: the launcher reads it.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from elastic_trainer.config import ConfigError
from elastic_trainer.options import declared, defaults, require_section
from elastic_trainer.renamed import present_options
from elastic_trainer.wire.redact import redacted_settings

VARIABLE = "ELASTIC_TRAINER_CONFIG"
"""Holds what `Configuration.from_text` reads."""
TRAINING, RUN, DEEPSPEED = "training", "run", "deepspeed"
"""The sections of the trainer's options, of the launcher's, and of DeepSpeed's JSON (--deepspeed).
All others are the user's."""
SCRIPTS_OWN = ("lr",)
"""Keys of the section `training` that are numbers of the script's own: it builds its optimizer with
them. (The option `lr` is an object, which no file has.)"""
MOST_BYTES = 64 << 10
"""Linux allows 128 KiB for one variable of the environment (execve(2), MAX_ARG_STRLEN)."""
SECRET = re.compile(
    r"(?i)passw|secret|credential|(^|[_-])(token|auth)$|(api|access|private|secret)[_-]?key")
KEY = re.compile(r"[A-Za-z0-9_-]+")


class Configuration(Mapping[str, Any]):
    """The sections of a configuration by name, and their values by key: `config["model"]["width"]`.

    It cannot be changed. A key that is missing raises ConfigError, which names the file.
    `config.get(key)` returns None for it.
    """

    def __init__(self, values: Mapping[str, Any], source: str, place: str = "",
                 read: set[str] | None = None, overrides: Mapping[str, Any] | None = None):
        self.source, self._values, self._place = source, dict(values), place
        self.overrides = dict(overrides or {})
        """Options that hold in the place of those that the script gives."""
        self._read = set() if read is None else read
        """The full keys that were read, shared with the tables inside."""

    def __getitem__(self, key: str) -> Any:
        place = f"{self._place}.{key}" if self._place else key
        if key not in self._values:
            there = ", ".join(self._values) or "nothing"
            raise MissingKey(
                f"{self.source} has no {place}; {self._place or 'it'} has {there}. Add it to the "
                f"file, or give --set {place if self._place else f'{key}.KEY'}=VALUE.")
        return self._taken(self._values[key], place)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Configuration({self._values!r}, {self.source!r})"

    @property
    def training(self) -> dict[str, Any]:
        """The options for `Trainer(model, optimizer, dataset, **config.training)` and train().

        `lr` is not among them: the script builds its optimizer with `config["training"]["lr"]`.
        """
        given = {key: value for key, value in self.section(TRAINING).items()
                 if key not in SCRIPTS_OWN}
        self._read |= {f"{TRAINING}.{key}" for key in given}
        return given

    def as_dict(self) -> dict[str, Any]:
        """Return a copy of all values, as dicts and lists."""
        self._note(self._values, self._place)
        return dict(json.loads(json.dumps(self._values)))

    def flat(self) -> dict[str, Any]:
        """Return all values by their full keys: {"model.width": 64}."""
        return flattened(self._values)

    def section(self, name: str) -> dict[str, Any]:
        """Return a copy of a section, {} if it is missing, without a note that it was read."""
        return dict(self._values.get(name, {}))

    def unread(self) -> dict[str, Any]:
        """Return the values that nothing has read yet, by full keys, without the launcher's."""
        return {key: value for key, value in self.flat().items()
                if key not in self._read and not key.startswith(f"{RUN}.")}

    def _taken(self, value: Any, place: str) -> Any:
        """Return a value that cannot be changed, and note that it was read."""
        if isinstance(value, dict):
            return Configuration(value, self.source, place, self._read)
        self._note(value, place)
        return _frozen(value, self.source, place)

    def _note(self, value: Any, place: str) -> None:
        prefix = f"{place}." if place else ""
        self._read |= ({prefix + key for key in flattened(value)} if isinstance(value, dict)
                       else {place})

    def to_text(self) -> str:
        """Return what `from_text` reads. Raises ConfigError if it does not fit into a variable."""
        text = json.dumps({"source": self.source, "values": self._values,
                           **({"overrides": self.overrides} if self.overrides else {})})
        if len(text.encode()) > MOST_BYTES:
            raise ConfigError(
                f"{self.source} has {len(text.encode())} bytes as JSON, and {MOST_BYTES} fit into "
                f"the environment of a worker. Put long lists into a file that the script reads.")
        return text

    @staticmethod
    def from_text(text: str) -> Configuration:
        """Read the launcher's text, or the file that a person has named. Raises ConfigError."""
        if not text.startswith("{"):
            return read_file(Path(text)) if text else Configuration({}, "the configuration")
        found = json.loads(text)
        return Configuration(found["values"], found["source"],
                             overrides=found.get("overrides"))


def overrides_of(text: str) -> dict[str, Any]:
    """Return the options that the launcher gives over the script's; a file has none."""
    return Configuration.from_text(text).overrides if text.startswith("{") else {}


_in_process: dict[str, Configuration] = {}
"""The configurations that this process has read, by the texts that name them."""


def taken(text: str, file: str | Path | None = None) -> Configuration:
    """Return the configuration that a text names, as this process has read it first; that of `file`
    where the text has overrides alone. Raises ConfigError."""
    if text not in _in_process:
        found = Configuration.from_text(text)
        if not found and file is not None:
            found = Configuration(read_file(Path(file)).as_dict(), str(file),
                                  overrides=found.overrides)
        _in_process[text] = found
    return _in_process[text]


def is_taken(text: str) -> bool:
    """True if this process has read the configuration that a text names."""
    return text in _in_process


class MissingKey(ConfigError, KeyError):
    """A key that the configuration does not have. `get` catches it as a KeyError."""

    __str__ = ConfigError.__str__


def _frozen(value: Any, source: str, place: str) -> Any:
    if isinstance(value, dict):
        return Configuration(value, source, place)
    if isinstance(value, list):
        return tuple(_frozen(one, source, f"{place}[{n}]") for n, one in enumerate(value))
    return value


def flattened(values: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Return the leaves of nested tables by their full keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{place}{key}.")
        else:
            found[f"{place}{key}"] = value
    return found


# --- reading --------------------------------------------------------------------------------------

def read_file(path: Path) -> Configuration:
    """Read a TOML file. Raises ConfigError."""
    try:
        values = parse_toml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}. Name a TOML "
                          f"file with sections such as [training].") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path} is not UTF-8. Save it as UTF-8.") from error
    require_sound(values, str(path))
    return Configuration(values, str(path))


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Parse TOML. Raises ConfigError with the place of the mistake."""
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        return dict(toml.loads(text))
    except ValueError as error:  # TOMLDecodeError
        raise ConfigError(f"{source} is not valid TOML: {error}. Texts need quotes: "
                          f'name = "value".') from error


def assigned(configuration: Configuration, assignments: list[str]) -> Configuration:
    """Return a configuration with the values of --set SECTION.KEY=VALUE. Raises ConfigError."""
    values = configuration.as_dict()
    for assignment in assignments:
        key, mark, text = assignment.partition("=")
        names = [name.strip() for name in key.split(".")]
        if not mark or len(names) < 2 or not all(map(KEY.fullmatch, names)):
            raise ConfigError(f"--set is {assignment!r}. Use --set SECTION.KEY=VALUE, e.g. "
                              f"--set training.lr=0.1.")
        value = _parsed_value(key, text)
        table = values
        for name in names[:-1]:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--set is {assignment!r}, but {name} is a value and no section. "
                                  f"Use another key.")
        table[names[-1]] = value
    source = configuration.source + ("" if configuration.source == "--set" else " with --set")
    require_sound(values, source)
    return Configuration(values, source, overrides=configuration.overrides)


def overridden(configuration: Configuration, assignments: list[str]) -> Configuration:
    """Return a configuration with the options of --override OPTION=VALUE. Raises ConfigError."""
    given = dict(configuration.overrides)
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        given[name] = _parsed_value(name, text, "--override")
    require_section(given, "--override ")
    return Configuration(configuration.as_dict(), configuration.source, overrides=given)


def _parsed_value(key: str, text: str, option: str = "--set") -> Any:
    try:
        found = parse_toml(f"value = {text}\n", "")
    except ConfigError:
        found = {}
    if found.keys() != {"value"}:
        raise ConfigError(
            f"{option} {key}={text} has no TOML value. Use a number, true, false, [1, 2], or a "
            f"text in quotes that the shell leaves: {option} '{key}=\"{text}\"'.")
    return found["value"]


def require_options(configuration: Configuration) -> None:
    """Check the section `training` as far as no script is needed. Raises ConfigError."""
    require_section(configuration.section(TRAINING), f"{configuration.source}: {TRAINING}.",
                    SCRIPTS_OWN)


def require_sound(values: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError for a key or a value that no configuration may have."""
    for section, table in values.items():
        if not isinstance(table, Mapping):
            raise ConfigError(f"{source} has {section} = {table!r} outside of a section. Put it "
                              f"below a line such as [model].")
    for key, value in flattened(values).items():
        for name in key.split("."):
            if SECRET.search(name):
                raise ConfigError(
                    f"{source} has {key}, which looks like a secret. The configuration is stored "
                    f"in each checkpoint, so give secrets as variables of the environment.")
        if isinstance(value, Mapping):
            continue
        if wrong := _wrong(value):
            raise ConfigError(f"{source} has {key} = {value}, which is {wrong}. Use a text, a "
                              f"finite number, true, false, or a list of them.")


def _wrong(value: Any) -> str:
    """Return what is wrong with a value; "" if it can be stored as JSON."""
    if isinstance(value, list):
        return next(filter(None, map(_wrong, value)), "")
    if isinstance(value, dict):
        return next(filter(None, map(_wrong, value.values())), "")
    if isinstance(value, float) and not math.isfinite(value):
        return "not finite"
    return "" if isinstance(value, (str, bool, int, float)) else f"a {type(value).__name__}"


# --- a run goes on --------------------------------------------------------------------------------

NOTHING = "(not given)"


@dataclass(frozen=True)
class Change:
    """A key with another value than the run has."""

    key: str
    was: Any
    now: Any

    def verdict(self, allowed: Collection[str]) -> str:
        """Return what becomes of the change: harmless, never, allowed or refused."""
        section, _, name = self.key.rpartition(".")
        if section == RUN and name != "reduce":
            return "harmless"
        if section in (TRAINING, RUN) and name in declared() and name not in SCRIPTS_OWN:
            if (change := declared()[name][1].change) != "bits":
                return change
        return "allowed" if self.key in allowed else "refused"


def changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the keys with different values, by full keys. A default counts as given.

    Secrets are compared as a checkpoint keeps them: without their values.
    """
    was, now = redacted_settings(present_options(was)), redacted_settings(now)
    usual = {f"{TRAINING}.{key}": value for key, value in defaults().items()}
    found = []
    for key in sorted(was.keys() | now.keys()):
        default = usual.get(key, NOTHING)
        before, after = was.get(key, default), now.get(key, default)
        if before != after or isinstance(before, bool) != isinstance(after, bool):
            found.append(Change(key, before, after))
    return found


def require_allowed(found: Collection[Change], allowed: Collection[str], run: str) -> None:
    """Raise ConfigError for changes that may not be, all in one message."""
    fixed = [change for change in found if change.verdict(allowed) == "never"]
    if fixed:
        raise ConfigError(
            f"{_list(fixed)}. A run keeps these values for its life: which samples a step has, and "
            f"in which order they are summed, follows from them. Give the run's value, or train a "
            f"new run (another --run than {run}).")
    refused = [change for change in found if change.verdict(allowed) == "refused"]
    if refused:
        options = " ".join(f"--allow-change {change.key}" for change in refused)
        raise ConfigError(
            f"{_list(refused)}. This would change the bits of the run. Give the run's value, or "
            f"{options}, or train a new run (another --run than {run}).")


def _list(found: Collection[Change]) -> str:
    return "; ".join(f"{change.key} is {change.was!r} in the run, but {change.now!r} is given"
                     for change in found)
