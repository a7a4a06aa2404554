"""Texts and values without secrets, found by the names that they have and by their own form.

command line, configuration, errors → here → event log, report, store, loggers, stderr

What always holds:
1. A name is split into words (`api-key`, `apiKey`, `API_KEY`). A password, secret or credential,
   and a key or token, is replaced by `***`. So is a value of a form that only secrets have: keys of
   AWS and Google, tokens of Hugging Face, GitHub, GitLab, Slack and OpenAI, JSON Web Tokens,
   private keys in PEM, what stands after `Bearer`, and the user part of a URL.
2. The values of this process's variables with such names are replaced wherever they stand.
3. What only looks like it stays: numbers (`--max-tokens 100`), a name that speaks of a secret
   (`--token-file`, `--key-dim`), the kinds of keys and tokens in HARMLESS (`--sort-key`,
   `--eos-token`), and other words (`--tokenizer`, `--monkey`).

What it does not do: find a secret under a harmless name and without a known form. Give secrets to a
script in variables, not on its command line, which every user of a machine can read.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any

HIDDEN = "***"
SHORTEST = 8
"""The shortest value of a variable that counts as a secret: a shorter one stands in any text."""
VARIABLES_S = 1.0
STRONG = re.compile(
    "passw|passphrase|^pwd$|secret|credential|^cookies?$|^jwt$|^authorization$|^bearer$|^sas$|"
    "^sig$|^signature$|^dsn$|(api|auth|access|private|ssh)(key|token)s?$")
"""Words for what is a secret whatever its value is."""
WEAK = re.compile("^keys?$|^tokens?$|^auth$|[a-z]{2}token$")
OWNERS = frozenset(
    "access account admin anthropic api auth aws azure bot client comet deploy encryption github "
    "gitlab google hf hub huggingface id license master mlflow neptune oauth openai private "
    "refresh secret service session shared signing slack ssh storage telegram user wandb".split())
"""Before `key` or `token`: a secret."""
HARMLESS = frozenset(
    "audio batch best bos cache cls column dict end eos feature field foreign group image index "
    "input join label loss map mask max metric min monitor n next num output pad partition per "
    "primary public query row sample sep separator sort special start stop target text total unk "
    "video".split())
"""Before `key` or `token`: a kind of them that is no secret."""
ABOUT = frozenset(
    "bits bytes count dim dims dir env factor field file folder frequency head heads id ids index "
    "len length level limit map name names num number path prefix projection rate ratio size "
    "suffix type url uri usage value values width".split())
"""At the end of a name: it speaks of a secret and is none."""
_WORD = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_NUMBER = re.compile(
    r"[-+]?(\d[\d_,]*\.?\d*|\.\d+)(e[-+]?\d+)?[kmg]?|true|false|none|null|", re.I)
_SPECIAL = re.compile(r"<[^<>]*>|\[[A-Z_]+\]|\*\*\*.*")
_END = r"""(?![A-Za-z0-9])"""
_FORMS = re.compile("|".join((
    r"(?<![A-Za-z0-9])(?:AKIA|ASIA)[A-Z0-9]{12,}", r"AIza[\w-]{30,}",
    r"(?<![A-Za-z0-9])(?:hf|gh[opusr]|github_pat|r8|npm)_(?=\w*\d)\w{8,}",
    r"(?<![A-Za-z0-9])(?:hf|gh[opusr])_[A-Za-z]{20,}" + _END,
    r"(?<![A-Za-z0-9])(?:sk|rk|pk|glpat|xox[abeprs]|dapi)-(?=[\w-]*\d)[\w-]{8,}",
    r"\beyJ[\w-]{6,}\.[\w-]{6,}\.[\w-]*",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)")))
_USER = re.compile(r"""(?<=://)[^/?#\s'"]*@""")
_BEARER = re.compile(
    r"(?i)\b(bearer\s+|authorization[\"']?\s*[:=]\s*[\"']?(?:basic|digest|token|bearer)\s+)"
    r"(?!\*\*\*|tokens?\b)[^\s'\",]{4,}")
_VALUE = r"""\\"[^"\\]*\\"|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'"""
_PAIRS = re.compile(rf"""
    (?P<before>(?P<quote>\\?["'])(?P<key>[\w.\- ]+)(?P=quote)\s*:\s*)
        (?P<json>{_VALUE}|[\w.+/-]+)                                           # "api_key": "…"
    |(?P<quoted>(?P<mark>["'])(?P<option>--?[\w.\-]+)(?P=mark),\s*)
        (?P<item>{_VALUE})                                                    # ['--api-key', '…']
    |(?P<start>(?<![\w/-])(?P<name>-{{0,2}}[A-Za-z_][\w.\-]*)=)
        (?P<given>{_VALUE}|[^\s&,;'"()\[\]{{}}]+)                              # API_KEY=…
    |(?P<dashes>(?<![\w-])(?P<long>--?[A-Za-z][\w.\-]+)\s+)
        (?P<next>{_VALUE}|[^\s'",-][^\s'",]*)                                 # --api-key …
    |(?P<head>(?<![\w-])(?P<title>[A-Za-z][\w\-]*):[ \t]+)
        (?P<rest>{_VALUE}|[^\s'",]+)                                          # api-key: …
    """, re.X)
_GROUPS = (("before", "key", "json"), ("quoted", "option", "item"), ("start", "name", "given"),
           ("dashes", "long", "next"), ("head", "title", "rest"))
HINTS = tuple((
    "passw passphrase pwd secret credential cookie jwt auth bearer sas sig dsn key token :// akia "
    "asia aiza hf_ ghp_ gho_ ghu_ ghs_ ghr_ github_ r8_ npm_ sk- rk- pk- glpat xox dapi eyj "
    "-----begin").split())
"""A text with none of these has nothing that is looked for below. Most events have none."""


@lru_cache(4096)
def _kind_of(name: str) -> str:
    """Return `strong`, `weak`, or "" for a name that is no secret's."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in ABOUT:
        return ""
    for at, word in enumerate(words):
        before = words[at - 1] if at else ""
        if STRONG.search(word) or WEAK.search(word) and before in OWNERS:
            return "strong"
    for at, word in enumerate(words):
        if WEAK.search(word) and not (at and words[at - 1] in HARMLESS):
            return "weak"
    return ""


def is_secret(name: str, value: Any) -> bool:
    """True if a value of this name is a secret."""
    if isinstance(value, bool) or value is None:
        return False
    if not (kind := _kind_of(name)):
        return False
    text = str(value).strip("\\\"'")
    if kind == "strong":
        return text.lower() not in ("", "true", "false", "none", "null", HIDDEN)
    return isinstance(value, str) and not (_NUMBER.fullmatch(text) or _SPECIAL.fullmatch(text))


def may_have_secrets(text: str) -> bool:
    """True if a text is to be looked at closely. This takes a few microseconds."""
    lower = text.lower()
    return any(hint in lower for hint in HINTS) or any(
        value in text for value in _values_of_variables())


def redacted(text: str) -> str:
    """Return a text in which secrets are replaced by ***."""
    if not may_have_secrets(text):
        return text
    for value in _values_of_variables():
        text = text.replace(value, HIDDEN)
    text = _BEARER.sub(rf"\1{HIDDEN}", _USER.sub(f"{HIDDEN}@", _FORMS.sub(HIDDEN, text)))
    return _PAIRS.sub(_hidden_pair, text)


def redacted_command(words: Iterable[str]) -> list[str]:
    """Return a command line without secrets; `--name value` is two words of it."""
    found, name = list[str](), ""
    for word in words:
        is_option = word.startswith("-") and "=" not in word
        found.append(HIDDEN if name and not is_option and is_secret(name, word)
                     else _redacted_word(word))
        name = word.lstrip("-") if is_option else ""
    return found


def redacted_value(value: Any, name: str = "") -> Any:
    """Return a value that JSON can hold, without secrets: by its name, its keys, and its forms."""
    if isinstance(value, Mapping):
        is_of_secrets = _kind_of(name) == "strong"
        return {key: redacted_value(it, name if is_of_secrets else str(key))
                for key, it in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if value and all(isinstance(it, str) for it in value):
            return ([HIDDEN if is_secret(name, it) else it for it in value]
                    if _kind_of(name) else redacted_command(value))
        return [redacted_value(it, name) for it in value]
    if name and is_secret(name, value):
        return HIDDEN
    return redacted(value) if isinstance(value, str) else value


def redacted_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat configuration without secrets, for a checkpoint.

    A resumed run compares it. What is surely a secret changes no bit, and any two are equal; what
    has a weaker name (`data.key`) leaves a digest.
    """
    found = {}
    for name, value in settings.items():
        shown = redacted_value(value, name)
        if shown == HIDDEN and _kind_of(name) == "weak":
            shown += " " + sha256(f"{name}={value}".encode()).hexdigest()[:12]
        found[name] = shown
    return found


def _redacted_word(word: str) -> str:
    """Return one word of a command line without secrets. Blanks in it separate no words."""
    name, mark, value = word.partition("=")
    if mark and re.fullmatch(r"-{0,2}[A-Za-z_][\w.\-]*", name) and is_secret(name, value):
        return f"{name}={HIDDEN}"
    start = f"{name}=" if mark else ""
    text = value if mark else word
    if text.lstrip()[:1] in ("{", "["):
        try:
            parsed = json.loads(text)
        except ValueError:
            return redacted(word)
        shown = redacted_value(parsed, name.lstrip("-") if mark else "")
        return word if shown == parsed else start + json.dumps(shown)
    return redacted(word)


def _hidden_pair(found: re.Match[str]) -> str:
    form = next(groups for groups in _GROUPS if found[groups[0]] is not None)
    before, name, value = (found[group] for group in form)
    is_prose = form[0] == "head" and _kind_of(name) != "strong"
    is_prose |= name == "key" and value.isalpha()  # of a traceback: key=len
    if is_prose or not is_secret(name, value):
        # What stands in the value is looked at, too: --config={"api_key": "…"}.
        return before + (_PAIRS.sub(_hidden_pair, value) if len(value) > 2 else value)
    mark = re.match(r"\\?[\"']", value)
    return before + (f"{mark[0]}{HIDDEN}{mark[0]}" if mark else HIDDEN)


_variables: tuple[int, float, tuple[str, ...]] = (-1, 0.0, ())


def _values_of_variables() -> tuple[str, ...]:
    """Return the secrets among this process's variables, the longest first.

    They are looked for anew after VARIABLES_S: to read all variables takes 0.1 ms.
    """
    global _variables
    count, read_at, values = _variables
    if count != len(os.environ) or time.monotonic() - read_at > VARIABLES_S:
        found = {value for name, value in os.environ.items()
                 if len(value) >= SHORTEST and is_secret(name, value)}
        values = tuple(sorted(found, key=len, reverse=True))
        _variables = len(os.environ), time.monotonic(), values
    return values
