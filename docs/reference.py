#!/usr/bin/env python3
"""Write docs/reference.md from the docstrings of the public names.

    python docs/reference.py            write it
    python docs/reference.py --print    print it (tests/test_docs.py compares)
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import elastic_trainer
from elastic_trainer import config
from elastic_trainer.options import NEEDED, Common, Needed, Own, declared, in_words, plain_types

PAGE = Path(__file__).with_suffix(".md")
HEAD = """# Reference

This page is generated from the docstrings: `python docs/reference.py` writes it. All names are
imported from `elastic_trainer`. The command line has `--help`:

```sh
./horovodrun_elastic.sh --help
elastic-trainer --help
python -m elastic_trainer.discovery poll ec2 --help
```
"""
BUILT_BY_US = {"Step"}
"""Classes that the user's code gets, and does not build."""
INTERNAL = {"Step": {"advice", "end", "give_up", "is_tried"}}
"""Methods that are called by other modules of the package, and not by the user's code."""


def page() -> str:
    """Return the whole page."""
    parts = [
        HEAD, *(section(name) for name in sorted(elastic_trainer.__all__, key=str.lower)),
        options(),
        limits(),
        exit_codes()
    ]
    return "\n".join(parts)


def section(name: str) -> str:
    """Return the section of one public name: its signature, its docstring, and its methods or
    fields."""
    thing = getattr(elastic_trainer, name)
    lines = [f"## {name}", "", "```text", *signature(name, thing), "```", "", *paragraphs(thing)]
    if is_dataclass(thing):
        lines += [
            f"- `{field.name}`: `{field.type}`{sentence_of(thing, field.name)}"
            for field in fields(thing)
        ]
        lines.append("")
    if inspect.isclass(thing):
        for method, function in public_methods(thing):
            if method in INTERNAL.get(name, ()):
                continue
            lines += [
                f"### {name}.{method}", "", "```text", *signature(f"{name}.{method}", function),
                "```", "", *paragraphs(function)
            ]
    return "\n".join(lines)


def public_methods(thing: type) -> Iterator[tuple[str, object]]:
    """Yield a class's own methods and properties that have a docstring and no underscore."""
    for name, member in vars(thing).items():
        function = member.fget if isinstance(member, property) else getattr(
            member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function) and inspect.getdoc(function):
            yield name, function


def signature(name: str, thing: Any) -> list[str]:
    """Return the lines of a signature as the source has it, one parameter a line where one line is
    too short."""
    if name in BUILT_BY_US:
        return [f"class {name}"]
    if inspect.isclass(thing) and (issubclass(thing, BaseException) or is_dataclass(thing)):
        return [
            f"class {name}" +
            (f"({thing.__base__.__name__})" if issubclass(thing, BaseException) else "")
        ]
    head = "class" if inspect.isclass(thing) else "def"
    node = ast.parse(
        textwrap.dedent(
            inspect.getsource(thing.__init__ if inspect.isclass(thing) else thing))).body[0]
    assert isinstance(node, ast.FunctionDef), name
    given = parameters(node.args)
    returned = f" -> {ast.unparse(node.returns)}" if node.returns and head == "def" else ""
    whole = f"{head} {name}({', '.join(given)}){returned}"
    return [whole] if len(whole) <= 100 else [
        f"{head} {name}(", *(f"    {one}," for one in given), f"){returned}"
    ]


def parameters(given: ast.arguments) -> list[str]:
    """Return the parameters of a signature, without self."""
    ordinary = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(ordinary) - len(given.defaults)) + [*given.defaults]
    found = [one for one in map(parameter, ordinary, defaults) if one != "self"]
    if given.vararg or given.kwonlyargs:
        found.append(f"*{given.vararg.arg}" if given.vararg else "*")
    found += map(parameter, given.kwonlyargs, given.kw_defaults)
    return found + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def parameter(one: ast.arg, default: ast.expr | None) -> str:
    """Return a parameter as the source has it."""
    text = ast.unparse(one)
    return text if default is None else f"{text} = {ast.unparse(default)}".replace("'", '"')


def paragraphs(thing: object) -> list[str]:
    """Return a docstring's paragraphs."""
    text = inspect.getdoc(thing) or ""
    found = []
    for block in text.split("\n\n"):
        if block.startswith("- "):
            items = re.split(r"^- ", block, flags=re.MULTILINE)[1:]
            found += [line for item in items for line in textwrap.wrap(
                " ".join(item.split()), 98, initial_indent="- ", subsequent_indent="  ")] + [""]
            continue
        found += [
            *(block.splitlines() if block.startswith("    ") else textwrap.wrap(
                " ".join(block.split()), 98)), ""
        ]
    return found


def sentence_of(thing: type, field: str) -> str:
    """Return the sentence that stands under a field, with a dash before it."""
    said = sentences(thing).get(field, "")
    return f": {said}" if said else ""


def sentences(thing: type) -> dict[str, str]:
    """Return the strings that stand under the fields of a class, by the field's name."""
    body = ast.parse(textwrap.dedent(
        inspect.getsource(thing))).body[0].body  # type: ignore[attr-defined]
    return {
        one.target.id: " ".join(after.value.value.split())
        for one, after in zip(body, body[1:], strict=False)
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


def options() -> str:
    """Return the options of train() and Trainer."""
    meaning = {name: text for one in (Needed, Own, Common)
               for name, text in sentences(one).items()}
    lines = ["## Options", "",
             "The options of `train` and `Trainer`. All but objects may also stand in the section",
             "`[training]` of a file, and after `--set training.` and `--override`.", ""]
    for name, (kind, option) in declared().items():
        facts = in_words(kind, option, False) if plain_types(kind) else "an object"
        if option.default not in (NEEDED, None, ()):
            facts += f", by default {json.dumps(option.default)}"
        facts += ", fixed for a run" * (option.change == "never")
        lines += textwrap.wrap(f"- `{name}`: {facts}. {meaning[name]}", 98, subsequent_indent="  ")
    return "\n".join([*lines, ""])


def limits() -> str:
    """Return the table of the time limits."""
    said = sentences(config.Limits)
    rows = [
        f"| `{field.name}` | {field.default:g} | {said[field.name]} |"
        for field in fields(config.Limits)
    ]
    return "\n".join([
        "## Limits", "", "`ELASTIC_TRAINER_LIMITS` sets time limits, in seconds, e.g.",
        "`ELASTIC_TRAINER_LIMITS=boot_s=600,silence_s=20`.", "", "| Name | Default | Meaning |",
        "|---|---|---|", *rows, ""
    ])


def exit_codes() -> str:
    """Return the table of the exit codes, as config.py names them."""
    named = sorted(
        (value, name) for name, value in vars(config).items() if name.startswith("EXIT_"))
    return "\n".join([
        "## Exit codes", "", "[Troubleshooting](troubleshooting.md#exit-codes) says what to do.",
        "", "| Code | Name |", "|---|---|", *(f"| {value} | `{name}` |" for value, name in named),
        ""
    ])


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(page())
    else:
        PAGE.write_text(page())
