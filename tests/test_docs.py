"""The documentation is true: its code runs, its commands and names exist, its links lead to
something.

Languages of code blocks:
- `python`  runs in the page's folder, in the page's namespace. A block whose first line is `#
  name.py` is saved as
            that file instead, for the commands that follow.
- `bash`    runs in the page's folder; the exit code is 0.
- `sh`      needs a cluster, root, minutes or AWS: programs, options and files are checked, nothing
  is run.
- `toml`    is saved as the file that its first line names, for the blocks that follow.
- `json`    is saved as the file that the line before it names at its end, as in "The file
            `x.json`:", or shown.
- `text`, `mermaid`  are shown.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest import SkipTest
from unittest.mock import patch

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from sybil import Document, Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

import elastic_trainer
from elastic_trainer import config
from elastic_trainer.discovery.commands import COMMANDS
from elastic_trainer.driver import supervisor as attempts

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "deploy" / "README.md",
         *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = [ROOT / "CHANGELOG.md", *(page for page in PAGES
                                    if page.name not in {"events.md", "reference.md"})]
EXTERNAL = {
    "https://github.com/pytorch/examples/tree/main/distributed/ddp-tutorial-series",
    "https://github.com/horovod/horovod/blob/master/examples/pytorch/pytorch_mnist.py",
    "https://github.com/karpathy/nanoGPT",
    "https://docs.pytorch.org/docs/stable/notes/randomness.html",
    "https://github.com/uclasystem/bamboo",
    "https://ui.perfetto.dev",
    "https://arxiv.org/abs/2410.21680",
    "https://arxiv.org/abs/2509.16293",
    "https://arxiv.org/abs/2602.00277",
}
"""Every address outside the repository that a page links to; no test asks for them."""
SHOWN = {"json", "text", "mermaid"}
YOURS = {"my_train.py", "hosts.sh", "NAME.tfvars", "gpt-1.tfvars"}
"""Files of the reader's own."""
OTHERS = {"aws", "az", "azcopy", "chgrp", "chmod", "docker", "dstack", "export", "find", "gcloud",
          "kind", "kubectl", "ln", "mkdir", "openssl", "pcluster", "pip", "printf", "ray", "read",
          "scancel", "scontrol", "sky", "source", "squeue", "terraform", "umask", "zcat"}
"""Programs that are not ours: their options are not checked."""
NOT_OURS = re.compile(
    r"\b(diary|strangers?|nobody|whoever|somebody|told|said|so (many|long) of|so many steps)\b",
    re.IGNORECASE)
"""Words for which there is a standard term, in the glossary or in plain English."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def tokens_of(page: Path) -> list[Token]:
    """Return a page's tokens, those within paragraphs and cells included."""
    found = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    return [one for token in found for one in (token, *(token.children or ()))]


# --- code blocks ----------------------------------------------------------------------------------


def run_python(example: Example) -> None:
    """Run a block, or save it as the file that its first line names."""
    if saved := re.match(r"# ([\w-]+\.py)\n", example.parsed):
        compile(example.parsed, saved[1], "exec")
        Path(saved[1]).write_text(example.parsed)
    else:
        PythonEvaluator()(example)


def run_bash(example: Example) -> None:
    """Run a block's commands: `elastic-trainer` in this process, which has torch loaded, and
    `python` in its own."""
    from elastic_trainer.__main__ import main

    for program, *words in commands_in(example.parsed):
        if program == "elastic-trainer":
            assert main(words) == 0, words
        else:
            assert program == "python", f"{program}: a `bash` block has commands of ours alone"
            path = os.pathsep.join([str(ROOT), *sys.path])
            done = subprocess.run([sys.executable, *words],
                                  env=os.environ | {"PYTHONPATH": path}, timeout=300,
                                  capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr


def check_sh(example: Example) -> None:
    """Check a block's commands, without running them."""
    for command in commands_in(example.parsed):
        check_command(command)


def save_json(example: Example) -> None:
    """Check that a block is JSON, and save it if the line before it names a file."""
    json.loads(example.parsed)
    before = example.document.text[:example.start].rstrip()
    if named := re.search(r"`([\w-]+\.json)`:$", before):
        Path(named[1]).write_text(example.parsed)


def save_toml(example: Example) -> None:
    """Save a configuration as the file that its first line names."""
    saved = re.match(r"# ([\w-]+\.toml)\n", example.parsed)
    assert saved, "the first line of a `toml` block names its file"
    Path(saved[1]).write_text(example.parsed)


PARSERS = [
    CodeBlockParser("toml", save_toml),
    CodeBlockParser("python", run_python),
    CodeBlockParser("bash", run_bash),
    CodeBlockParser("sh", check_sh),
    CodeBlockParser("json", save_json),
    SkipParser()
]


@cache
def document_of(page: Path) -> Document:
    """Return a page's blocks; `find_spec` is for the conditions of its skip directives."""
    document = Sybil(PARSERS).parse(page)
    document.namespace["find_spec"] = importlib.util.find_spec
    return document


def blocks() -> Iterator[object]:
    """Yield each page's blocks in their order, each with the directives that stand before it."""
    for page in PAGES:
        waiting: list[Example] = []
        for example in document_of(page).examples():
            waiting.append(example)
            if "source" in example.region.lexemes or not isinstance(example.parsed, tuple):
                yield pytest.param(waiting, id=f"{name_of(page)}:{example.line}")
                waiting = []


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a folder for each page, which its blocks share."""
    return {name_of(page): tmp_path_factory.mktemp(page.stem.replace("-", "_")) for page in PAGES}


FRAMEWORKS = re.findall(r"^    ([\w-]+); python_version", (ROOT / "setup.cfg").read_text(), re.M)
"""Packages of others that the constraints do not name for every Python."""


def lacking(example: Example) -> str:
    """Return a framework that a page uses up to a block, and that this Python has not; "": none."""
    read = "".join(str(one.parsed) for one in document_of(Path(example.path)).examples()
                   if one.line <= example.line)
    installed = {one.name for one in importlib.metadata.distributions()}
    return next((name for name in FRAMEWORKS if name not in installed
                 and re.search(rf"\b{name}\b", read, re.IGNORECASE)), "")


@pytest.mark.parametrize("examples", list(blocks()))
def test_a_code_block_works(examples: list[Example], folders: dict[str, Path],
                            monkeypatch: pytest.MonkeyPatch, no_launcher: None) -> None:
    """As it stands on its page, after the blocks before it."""
    if name := lacking(examples[-1]):
        pytest.skip(f"{name} is not installed: it has no constraint for this Python")
    monkeypatch.chdir(folders[name_of(Path(examples[0].path))])
    try:
        for example in examples:
            example.evaluate()
    except SkipTest as skipped:
        pytest.skip(str(skipped))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_code_block_names_its_language(page: Path) -> None:
    """Its language decides whether it is run, checked or shown; an indented block has none."""
    found = [token for token in tokens_of(page) if token.type in ("fence", "code_block")]
    assert [token.map for token in found
            if token.info not in {"python", "bash", "sh", "toml", *SHOWN}] == []
    checked = [e for e in document_of(page).examples() if not isinstance(e.parsed, tuple)]
    assert len(checked) == sum(token.info not in {"text", "mermaid"} for token in found)


# --- commands -------------------------------------------------------------------------------------


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell text, without redirections."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();|&")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("();|&"):
                if words:
                    yield words
                words = []
            else:
                words.append(word)


@cache
def help_of(*command: str) -> frozenset[str]:
    """Return the options that a command's --help names."""
    from elastic_trainer.__main__ import main
    from elastic_trainer.discovery.__main__ import main as discovery

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        if command[0] == "horovodrun":
            from horovod.runner import launch

            with patch.object(sys, "argv", ["horovodrun", "--help"]):
                launch.parse_args()
        else:
            (discovery if command[0] == "discovery" else main)([*command[1:], "--help"])
    assert "usage:" in shown.getvalue(), f"{command} has no --help"
    return frozenset(re.findall(r"(?<![\w-])--?[a-z][\w-]*", shown.getvalue(), re.IGNORECASE))


def check_options(words: list[str], known: frozenset[str]) -> None:
    """Check the options of a command; the word after one may be its value, also where it begins
    with a dash."""
    unknown = [word for word in words if re.match("--?[a-zA-Z]", word)
               and word.partition("=")[0] not in known]
    assert unknown == [], f"{unknown} in {words}"


def check_file(word: str) -> None:
    """Check that a file of the tree is there."""
    assert word in YOURS or (ROOT / word).exists(), f"there is no {word}"


def check_selection(expression: str) -> None:
    """Check that each name of a `-k` expression selects a test."""
    for part in re.findall(r"\w+", expression):
        assert part in ("and", "or", "not") or any(
            part in name for name in names_of_tests()), f"-k {part} selects nothing"


@cache
def names_of_tests() -> frozenset[str]:
    """Return `file.py::test` for each test of the tree."""
    return frozenset(f"{path.name}::{node.name}" for path in (ROOT / "tests").glob("test_*.py")
                     for node in ast.walk(ast.parse(path.read_text()))
                     if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


def check_script(words: list[str]) -> None:
    """Check a script of the tree, and that its source names the options."""
    check_file(words[0])
    text = (ROOT / words[0]).read_text() if words[0] not in YOURS else ""
    if text:
        check_options(words[1:], frozenset(re.findall(r"--?[a-z][\w-]*", text)))


def check_trainer(words: list[str]) -> None:
    """Check a command of `elastic-trainer`: our options, and after `--` the command."""
    ours, after = (words[:words.index("--")],
                    words[words.index("--") + 1:]) if "--" in words else (words, [])
    subcommand = ours[:2] if ours[:1] == ["checkpoints"] else ours[:1]
    names = subcommand[-1].split("|") if subcommand else []
    for name in names or [""]:
        check_options(ours[len(subcommand):],
                      help_of("elastic-trainer", *subcommand[:-1], *([name] if name else [])))
    if after:
        check_command(after)


def check_python(words: list[str]) -> None:
    """Check `python FILE …` and `python -m MODULE …`."""
    while words[:1] in (["-S"], ["-I"], ["-B"]):
        words = words[1:]
    if words[:1] != ["-m"]:
        return check_script(words)
    module, rest = words[1], words[2:]
    assert importlib.util.find_spec(module), f"there is no module {module}"
    if module == "elastic_trainer.discovery":
        assert rest[0] in ("hosts-file", "check", *COMMANDS), rest
        words = 2 if rest[0] == "poll" else 1
        if rest[0] not in ("hosts-file", "check"):
            check_options(rest[words:], help_of("discovery", *rest[:words]))
    elif module == "elastic_trainer":
        check_trainer(rest)
    elif module.endswith(".shim"):
        check_command(rest)
    return None


def check_command(words: list[str]) -> None:
    """Check that a command's program, options and files exist."""
    while found := re.match(r"([A-Z_]+)=", words[0]):
        name = found[1]
        assert not name.startswith("ELASTIC_") or any(name in text
                                                      for text in sources().values()), f"no {name}"
        words = words[1:]
        if not words:
            return
    program, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "heavy":  # never in a page
        raise AssertionError(program)
    if program == "elastic-trainer":
        check_trainer(rest)
    elif program == "./horovodrun_elastic.sh":
        check_trainer(["run", *rest])
    elif program == "horovodrun":
        at = next((i for i, word in enumerate(rest) if re.match("python", word)), len(rest))
        check_options(rest[:at], help_of("horovodrun"))
        check_command(rest[at:])
    elif program == "python":
        check_python(rest)
    elif program == "pytest" or program == "tests/run":
        for option, value in zip(rest, rest[1:], strict=False):
            if option == "-k":
                check_selection(value)
        for word in rest:
            if word.startswith("tests/"):
                check_file(word.partition("::")[0])
    elif "/" in program:
        check_script([program, *rest])
    else:
        assert program in OTHERS, f"{program} is unknown: if it is not ours, add it to OTHERS"


# --- names in the text ----------------------------------------------------------------------------


@cache
def sources() -> dict[str, str]:
    """Return the text of all modules of the package, by name."""
    folder = Path(elastic_trainer.__file__).parent  # rglob would not follow the links
    return {path.as_posix(): path.read_text() for pattern in ("*.py", "*/*.py")
            for path in folder.glob(pattern)}


def inline_code(page: Path) -> list[str]:
    return [token.content for token in tokens_of(page) if token.type == "code_inline"]


def test_every_exemption_is_needed() -> None:
    """A program, a file of the reader's or a name that no page has any more leaves its list."""
    shell = [token.content for page in PAGES for token in tokens_of(page) if token.info == "sh"]
    code = [text for page in PAGES for text in inline_code(page)]
    words = set(re.findall(r"[\w-]+", " ".join([*shell, *filter(COMMAND.match, code)])))
    assert OTHERS <= words
    assert {name for name in YOURS if not any(name in text for text in [*shell, *code])} == set()
    assert set(code) >= NO_EVENTS


COMMAND = re.compile(
    r"\./horovodrun_elastic\.sh .|(\.venv/bin/)?(elastic-trainer|python) "
    r"|tests/(run|bench/\w+\.py) ."
    r"|deploy/\w+\.\w+ .")
"""A command of ours with arguments, in a sentence or a cell."""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_the_text_exist(page: Path) -> None:
    """Those in tables and sentences, too."""
    for code in inline_code(page):
        if COMMAND.match(code):
            for command in commands_in(code):
                check_command([word for word in command if word != "…"])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_in_the_text_exist(page: Path) -> None:
    """Every path of the tree that a sentence names."""
    for code in inline_code(page):
        if re.fullmatch(r"(deploy|discovery|docs|elastic_trainer|state|tests)/[\w./-]*", code):
            is_known = code.rpartition("/")[2] in YOURS
            assert is_known or (ROOT / code).exists(), f"{name_of(page)} names {code}"


EVENT = re.compile(
    r"(attempt|discovery|driver|events|job|run|standby|state|worker)\.[a-z]+(_[a-z]+)*")
NO_EVENTS = {"state.py"}
"""File names that look like names of events."""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_events_in_the_text_are_logged_by_the_code(page: Path) -> None:
    """Each name stands in a module as a literal."""
    named = {code for code in inline_code(page) if EVENT.fullmatch(code)} - NO_EVENTS
    assert {name for name in named if not any(f'"{name}"' in text
                                              for text in sources().values())} == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_arguments_in_the_text_exist(page: Path) -> None:
    """Each keyword of a call of train() that a sentence names."""
    known = set(inspect.signature(elastic_trainer.train).parameters)
    named = {
        keyword
        for code in inline_code(page)
        for call in re.findall(r"train\(([^()]*)\)", code)
        for keyword in re.findall(r"(\w+)=", call)
    }
    assert named <= known


# --- links ----------------------------------------------------------------------------------------


def slugs(page: Path) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    tokens = tokens_of(page)
    titles = [tokens[i + 1].content for i, token in enumerate(tokens)
              if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links_of(page: Path) -> list[str]:
    return [str(token.attrs.get("href") or token.attrs["src"]) for token in tokens_of(page)
            if token.type in ("link_open", "image")]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_within_the_repository_leads_to_something(page: Path) -> None:
    """A file, and in it the heading."""
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        if re.match("[a-z]+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        if anchor:
            assert anchor in slugs(
                target), f"{name_of(page)} links to {link}; there are {sorted(slugs(target))}"


def test_links_that_lead_elsewhere_are_listed() -> None:
    """Above, so that a reviewer sees a new one; and nothing is listed that no page names."""
    assert {link for page in PAGES for link in links_of(page)
            if re.match("[a-z]+:", link)} == EXTERNAL


def test_every_page_is_linked_from_the_list_of_pages() -> None:
    """docs/README.md; and the README links to that."""
    listed = {(ROOT / "docs" / link).resolve() for link in links_of(ROOT / "docs" / "README.md")}
    assert {page for page in PAGES if "docs" in page.parts and page.name != "README.md"} <= listed
    assert "docs/README.md" in links_of(ROOT / "README.md")


# --- form -----------------------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    """At most 150 lines of at most 100 columns, tables included."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 100] == []


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_lines_have_at_most_100_columns(page: Path) -> None:
    """But for rows of tables and long addresses, which cannot be broken."""
    whole = re.compile(r"\||\S*\]\(\S+\)\S*$|\[[^]]*\]\(\S+\)\S*$")
    assert [line for line in page.read_text().splitlines() if len(line) > 100
            and not whole.match(line)] == []


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_pages_use_the_standard_terms(page: Path) -> None:
    """Event log, unauthenticated client, worker: not our own words for them."""
    assert [token.content for token in tokens_of(page) if token.type == "text"
            and NOT_OURS.search(token.content)] == []


def test_each_promise_has_a_command() -> None:
    """In the README, in the last cell of its row."""
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| *\d+ *\|.*\|(.*)\|$", text.partition("## Promises")[2], re.M)
    assert len(rows) == 7 and all("`" in row for row in rows)


def test_every_exit_code_has_a_row_in_troubleshooting() -> None:
    """With its meaning and what to do."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## Exit codes")[2]
    rows = {int(code) for code in re.findall(r"^\| (\d+) \|.*\|.*\|.*\|$", text, re.M)}
    named = [config, attempts]
    assert {value for module in named for name, value in vars(module).items()
            if name.startswith("EXIT_")} <= rows


def test_the_reference_is_generated_from_the_docstrings() -> None:
    """`python docs/reference.py` writes it anew."""
    made = subprocess.run([sys.executable, ROOT / "docs" / "reference.py",
                           "--print"], capture_output=True, text=True, check=True,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])})
    assert (ROOT / "docs" /
            "reference.md").read_text() == made.stdout, "run python docs/reference.py"


# --- ported loops ---------------------------------------------------------------------------------

def test_each_row_of_horovods_own_style_is_shown() -> None:
    """By a test that exists."""
    rows = re.findall(r"\| `(test_\w+)` \|$",
                      (ROOT / "docs" / "migrate-from-horovod.md").read_text(), re.MULTILINE)
    assert len(rows) > 10
    assert [row for row in rows
            if not any(name.endswith(f"::{row}") for name in names_of_tests())] == []
