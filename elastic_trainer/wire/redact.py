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
from functools import lru_cache, partial
from hashlib import sha256
from typing import Any

HIDDEN = "***"
SHORTEST = 8
"""The shortest value of a variable that counts as a secret: a shorter one stands in any text."""
VARIABLES_S = 1.0
STRONG = re.compile(
    "passw(?!ordless)|passphrase|mnemonic|^t?otp$|^pwd$|secrets?$|secretkey|credential|^cookies?$|^jwt$|^authorization$|"
    "^bearer$|^dsn$|(api|auth|access|private|ssh|secret|account|wandb|openai)(key|token)s?$")
"""Words for what is a secret whatever its value is."""
WEAK = re.compile("^keys?$|^tokens?$|^auth$|[a-z]{2}token$")
SHORT = re.compile("^pass$|^pw$|^sas$|^sig$|^signature$")
"""Words that are a secret's name alone, or after one of OWNERS."""
OWNERS = frozenset(
    "access account admin amz anthropic api auth aws azure bot client comet db deploy encryption "
    "ftp github gitlab google hf http hub huggingface id job ldap license mail master mlflow mongo "
    "mysql neptune oauth openai pg postgres private proxy redis refresh root secret service "
    "session shared signing slack smtp ssh storage sudo telegram user wandb".split())
"""Before `key` or `token`: a secret."""
HARMLESS = frozenset(
    "action answer attention audio batch bbox best blank bos cache caption category checkpoint "
    "chosen ckpt class cls col column "
    "context dataset decoder delimiter depth dict done drop ema encoder end eos eval extra feature "
    "features field filter foreign frame global graph group gt head ignore image img index "
    "initializer input instance item join json keep kv label labels latent layer lmdb loss lr map "
    "mask max memory meta metric min missing model module monitor msg n name new newline next node "
    "num obs optim optimizer order output pad param partition patch path per pixel pool position "
    "pred prefix primary prompt public query question rejected response reward rng rope row sample "
    "sampling score sentence sep separator shard slot sort sos source speaker special speech split "
    "start state step stop strip target task tensor test text think time title tool total train "
    "trigger unexpected unit unk unused val valid validation video vision vocab weights word yaml"
    .split())
"""Before `key` or `token`: a kind of them that is no secret."""
ABOUT = frozenset(
    "bits bytes count dim dims dir env factor field file folder frequency head heads id ids index "
    "len length level limit map name names num number only path prefix projection rate ratio "
    "scheme size strategy style suffix type url uri usage value values width".split())
"""At the end of a name: it speaks of a secret and is none."""
_WORD = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_NUMBER = re.compile(
    r"[-+]?(\d[\d_,]*\.?\d*|\.\d+)(e[-+]?\d+)?[kmg]?|true|false|none|null|", re.I)
_SPECIAL = re.compile(r"<[^<>]*>|\[[A-Z_]+\]|\*\*\*.*")
_END = r"""(?![A-Za-z0-9])"""
_FORMS = re.compile("|".join((
    r"(?<![A-Za-z0-9])(?:AKIA|ASIA|A3T[A-Z0-9])[A-Z0-9]{12,}", r"AIza[\w-]{30,}",
    r"\bhf_(?=\w*\d)[A-Za-z0-9]{12,}" + _END, r"\bhf_[A-Za-z]{20,}" + _END,
    r"\b(?:gh[opusr]|github_pat|r8|npm|gsk|shpat|lin_api|dckr_pat|dop_v1|wandb_v1)_"
    r"(?=\w*\d)[\w-]{16,}", r"\bgh[opusr]_[A-Za-z]{20,}" + _END,
    r"\b(?:sk|rk|pk)_(?:live|test)_\w{8,}",
    r"(?<![A-Za-z0-9])(?:sk|rk|pk|xai|pplx)-(?=[\w-]{0,40}(?=[A-Za-z]{0,9}\d)\w{10})[\w-]{16,}",
    r"(?<![A-Za-z0-9])(?:gl(?:pat|rt|dt|ft|cbt|ptt|agent|soat)|xox[abeprs]|pypi|GOCSPX)-(?=[\w-]*\d)[\w-]{12,}",
    r"\bdapi[0-9a-f]{32}(?:-\d)?", r"\bya29\.[\w-]{16,}", r"\bSG\.[\w-]{16,}\.[\w-]{16,}",
    r"\bnvapi-[\w-]{20,}", r"\b\d{8,10}:AA[\w-]{32,}", r"\bAGE-SECRET-KEY-1\w+",
    r"\beyJ[\w-]{6,}\.[\w-]{6,}\.[\w-]*",
    r"(?<=hooks\.slack\.com/services/)[\w/]+", r"(?<=/api/webhooks/)\d+/[\w-]+",
    r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----[\s\S]*?"
    r"(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)")))
_USER = re.compile(r"""(?<=://)(?:[^/?#\s'"]*|[^/?#\s'"@:\[]*:(?!\d+[/?#])[^\s'"@]*)@""")
"""The second form: a secret that has a slash, as those of AWS may."""
_BEARER = re.compile(
    r"(?i)\b(bearer\s+|authorization[\"']?\s*[:=]\s*[\"']?(?:basic|digest|token|bearer)\s+)"
    r"(?!\*\*\*|tokens?\b)[^\s'\",]{4,}")
_SAID = re.compile(
    r"""(?i)\b(pass(?:word|wd)\s+(?:is\s+)?)(?=[^\s'",]*\d)(?=[^\s'",]*[a-z])[^\s'",]{8,}""")
"""As a .netrc and a sentence have it."""
LOGINS = frozenset(("u", "user", "userpwd", "proxy-user", "login"))
"""Options whose value may be a name and a password, as those of curl."""
_LOGIN = re.compile(r"[^\s:/]+:(?!\d+$)[^\s:/]{4,}")
_VALUE = r"""(?:[bru]{1,2})?(?:\\"[^"\\]*\\"|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')"""
_TWO = "(?:(?:api|access|secret|private)[ ])?"
_ENDS = "(?:word|cret|_pwd|-pwd|_key|-key|ikey|oken)"
"""The ends of names that are looked at without a blank after their colon."""
MOST_DEEP = 20
_OPTION = re.compile(
    r"""(?<![\w/-])(--?[A-Za-z][\w.\-]{0,80})(=|\s+)([^\s'"\-](?:[^\s'"]|['"](?![\s,;:)\]}]|\Z))*)""")
"""An option and its value, which is all up to the next blank."""
_PAIRS = re.compile(rf"""
    (?P<before>(?P<quote>\\?["'])(?P<key>[\w.\- ]+)(?P=quote)\s*[:=]\s*)
        (?P<json>{_VALUE}|\[[^\[\]]*\]|\{{[^{{}}]*\}}|[\w.+/-]+)                 # "api_key": "…"
    |(?P<index>\[(?P<which>["'])(?P<item>[\w.\-]+)(?P=which)\]\s*=\s*)
        (?P<set>{_VALUE}|\S+)                                                 # x["api_key"] = "…"
    |(?P<quoted>(?P<mark>["'])(?P<option>--?[\w.\-]+)(?P=mark),\s*)
        (?P<value>{_VALUE})                                                   # ['--api-key', '…']
    |(?P<pair>\((?P<around>["'])(?P<first>[\w.\-]+)(?P=around),\s*)
        (?P<second>{_VALUE})(?=\s*\))                                         # ('api_key', '…')
    |(?P<start>(?<![\w/-])(?P<name>{_TWO}-{{0,2}}[a-z_][\w.\-]{{0,80}})[ \t]*
        (?:={{1,3}}>?|:=)[ \t]*)
        (?P<given>{_VALUE}|["']?[^\s&,;'"()\[\]{{}}]+|\[[^\[\]]*\]|\{{[^{{}}]*\}})  # API_KEY=…
    |(?P<dashes>(?<![\w-])(?P<long>--?[A-Za-z][\w.\-]{{1,80}})\s+)
        (?P<next>{_VALUE}|[^\s'",-][^\s'",]*)                                 # --api-key …
    |(?P<head>(?<![\w-])(?P<title>{_TWO}-{{0,2}}[a-z][\w\-]{{0,80}}):(?:[ \t]+|(?<={_ENDS}:)))
        (?P<rest>{_VALUE}|[^\s'",]+)                                          # api-key: …
    """, re.X | re.I)
_GROUPS = (("before", "key", "json"), ("index", "item", "set"), ("quoted", "option", "value"),
           ("pair", "first", "second"), ("start", "name", "given"), ("dashes", "long", "next"),
           ("head", "title", "rest"))
_FOR_STRONG = ("index", "pair", "head")
"""The forms that prose and code have, too."""
HINTS = tuple((
    "pass pwd pw secret credential cookie jwt auth bearer sas sig dsn key token :// akia asia a3t "
    "aiza hf_ ghp_ gho_ ghu_ ghs_ ghr_ github_ r8_ npm_ gsk_ shpat_ lin_api_ dckr_ dop_v1_ "
    "wandb_v1 nvapi otp mnemonic userpwd sk_ rk_ pk_ sk- rk- pk- xai- pplx- glpat glrt gldt glft "
    "glcbt glptt glagent glsoat xox pypi- gocspx dapi ya29 sg. :aa hooks eyj -----begin").split()
    + ["-u ", "-user ", "-user=", "-login ", "-login="])
"""A text with none of these has nothing that is looked for below. Most events have none."""


@lru_cache(4096)
def _kind_of(name: str) -> str:
    """Return `strong`, `weak`, or "" for a name that is no secret's."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in ABOUT:
        return ""
    for at, word in enumerate(words):
        before = words[at - 1] if at else ""
        if STRONG.search(word) or before in OWNERS and (WEAK.search(word) or SHORT.search(word)):
            return "strong"
        if (before, word) == ("pass", "word"):
            return "strong"
    if len(words) == 1 and SHORT.search(words[0]):
        return "weak"
    for at, word in enumerate(words):
        after = words[at + 1] if at + 1 < len(words) else "key"
        if WEAK.search(word) and not (at and words[at - 1] in HARMLESS) and (
                after in OWNERS or after.isdigit() or WEAK.search(after)):
            return "weak"  # another word after it speaks of it (--key-padding-mask)
    return ""


def is_secret(name: str, value: Any) -> bool:
    """True if a value of this name is a secret."""
    if isinstance(value, bool) or value is None:
        return False
    if name.lstrip("-") in LOGINS:
        return bool(_LOGIN.fullmatch(str(value)))
    if not (kind := _kind_of(name)):
        return False
    text = str(value).strip("\\\"'")
    if name == "PWD" and text.startswith("/"):  # the current folder, in every shell
        return False
    if kind == "strong":
        return text.lower() not in ("", "true", "false", "none", "null", HIDDEN)
    return isinstance(value, str | bytes) and not (
        _NUMBER.fullmatch(text) or _SPECIAL.fullmatch(text))


def may_have_secrets(text: str) -> bool:
    """True if a text is to be looked at closely. This takes a few microseconds."""
    lower = text.lower()
    return any(map(lower.__contains__, HINTS)) or any(
        value in text for value in _values_of_variables())


def redacted(text: str) -> str:
    """Return a text in which secrets are replaced by ***."""
    if not may_have_secrets(text):
        return text
    for value in _values_of_variables():
        text = text.replace(value, HIDDEN)
    text = _BEARER.sub(rf"\1{HIDDEN}", _FORMS.sub(HIDDEN, _USER.sub(f"{HIDDEN}@", text)))
    text = _SAID.sub(rf"\1{HIDDEN}", text)
    return _PAIRS.sub(_hidden_pair, _OPTION.sub(_hidden_option, text))


def redacted_command(words: Iterable[str]) -> list[str]:
    """Return a command line without secrets; `--name value` is two words of it."""
    found, name = list[str](), ""
    for word in words:
        is_option = word.startswith("-") and "=" not in word
        found.append(HIDDEN if name and not is_option and is_secret(name, word)
                     else _redacted_word(word))
        if is_option or not (name.endswith("s") and _kind_of(name) == "strong"):
            name = word.lstrip("-") if is_option else ""  # --api-keys has several values
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


def _hidden_option(found: re.Match[str]) -> str:
    name, between, value = found.groups()
    left = value[len(value.rstrip(",;)]}")):]
    return f"{name}{between}{HIDDEN}{left}" if is_secret(name, value) else found[0]


def _hidden_pair(found: re.Match[str], depth: int = 0) -> str:
    form = next(groups for groups in _GROUPS if found[groups[0]] is not None)
    before, name, value = (found[group] for group in form)
    is_prose = form[0] in _FOR_STRONG or form[0] == "start" and not before.endswith(f"{name}=")
    is_prose |= value[:1] in ("[", "{")
    is_prose &= _kind_of(name) != "strong"
    is_prose |= name == "key" and value.isalpha()  # of a traceback: key=len
    if is_prose or not is_secret(name, value):
        # What stands in the value is looked at, too: --config={"api_key": "…"}.
        if depth == MOST_DEEP:
            return before + HIDDEN
        inner = partial(_hidden_pair, depth=depth + 1)
        return before + (_PAIRS.sub(inner, value) if len(value) > 2 else value)
    mark = re.match(r"(?:[bru]{0,2})(\\?[\"'])", value, re.I)
    is_closed = mark and value.endswith(mark[1]) and len(value) > len(mark[0])
    return before + (f"{mark[0]}{HIDDEN}{mark[1]}" if mark and is_closed else HIDDEN)


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
