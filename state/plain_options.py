"""The options of Trainer and train() that a configuration can hold, read from their declaration.

training/options.py (as text) → here → driver/configured.py, training/configured.py

What always holds: a new option with a plain type is known here by itself.

It reads the file as text, because importing it would load torch into the launcher, which takes
seconds. A test compares the result with the dataclass.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from elastic_trainer.config import ConfigError
from elastic_trainer.state.configuration import SCRIPTS_OWN, TRAINING, Configuration

PLAIN: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool, "None": None}
IN_WORDS = {int: "a whole number", float: "a number", str: "a text in quotes",
            bool: "true or false"}


@cache
def declared() -> tuple[dict[str, Any], dict[str, Any], frozenset[str]]:
    """Return the types and the defaults of plain options, and the names of those that are not."""
    import elastic_trainer

    path = Path(elastic_trainer.__file__).resolve().parent / "training" / "options.py"
    body = next(node.body for node in ast.parse(path.read_text(encoding="utf-8")).body
                if isinstance(node, ast.ClassDef) and node.name == "Options")
    types: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    others = set()
    for node in body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        name, parts = node.target.id, ast.unparse(node.annotation).split(" | ")
        plain = [part for part in parts if part in PLAIN]
        if set(plain) - {"None"}:  # an object may be allowed besides
            types[name] = _union([PLAIN[part] for part in plain])
        else:
            others.add(name)
            continue
        if isinstance(node.value, ast.Constant):
            defaults[name] = node.value.value
    return types, defaults, frozenset(others)


def _union(types: list[Any]) -> Any:
    found = types[0]
    for one in types[1:]:
        found = found | one
    return found


def require_options(configuration: Configuration) -> None:
    """Check the section `training` as far as no script is needed. Raises ConfigError."""
    types, _, others = declared()
    given = configuration.section(TRAINING)
    for name in given:
        if name in others and name not in SCRIPTS_OWN:
            raise ConfigError(
                f"{configuration.source} has training.{name}, but this option is an object. Build "
                f"it in the script, from values in a section of yours such as [{name}].")
    known = {**types, **dict.fromkeys(SCRIPTS_OWN, float)}
    require_types(given, known, TRAINING, configuration.source)
    if "until" in given:
        number, _, unit = given["until"].partition(" ")
        if not number.isdecimal() or not int(number) or unit.rstrip("s") not in ("epoch", "step"):
            raise ConfigError(f"{configuration.source} has training.until = {given['until']!r}. "
                              f'Use "10 epochs" or "5000 steps".')


def require_types(given: Mapping[str, Any], types: Mapping[str, Any], section: str,
                  source: str) -> None:
    """Raise ConfigError for a key of a section that is not known, or has a value of another
    type."""
    from pydantic import ConfigDict, ValidationError, create_model

    fields: dict[str, Any] = {f"key_{name}": (kind, None) for name, kind in types.items()}
    model = create_model("Section", __config__=ConfigDict(extra="forbid", strict=True), **fields)
    try:
        model(**{f"key_{name}": value for name, value in given.items()})
    except ValidationError as error:
        raise ConfigError(_sentence(error.errors()[0], types, section, source)) from error


def _sentence(fault: Any, types: Mapping[str, Any], section: str, source: str) -> str:
    key = str(fault["loc"][0]).removeprefix("key_")
    if fault["type"] == "extra_forbidden":
        return (f"{source} has {section}.{key}, which is no option. "
                f"{nearest(key, types)}Put values of your own into a section of their own, e.g. "
                f"[model].")
    return (f"{source} has {section}.{key} = {fault['input']!r}. Use {type_name(types[key])}.")


def nearest(key: str, known: Iterable[str]) -> str:
    """Return a sentence with the known key that is most like one; "" if none is."""
    from difflib import get_close_matches

    found = get_close_matches(key, list(known), 1)
    return f"Did you mean {found[0]}? " if found else ""


def type_name(kind: Any) -> str:
    """Return what values of a type are called in TOML, which has no None."""
    if get_origin(kind) is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(kind))
    parts = [part for part in get_args(kind) or (kind,) if part is not type(None)]
    return " or ".join(IN_WORDS[part] for part in parts)
