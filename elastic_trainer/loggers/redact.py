"""Texts without secrets: what stands before @ in a URL, and the values of secret variables.

a logger's error, a logger's place → here → event log, stderr
"""

from __future__ import annotations

import os
import re

_CREDENTIALS = re.compile(r"(?<=://)[^/@\s'\"]+@")
_QUERY = re.compile(r"(?i)((?:token|key|secret|password|signature|sig)=)[^&\s'\"]+")
_SECRET_NAME = re.compile(r"(?i)key|token|secret|passw|credential")
SHORTEST = 8
"""The shortest value of a variable that counts as a secret: a shorter one stands in any text."""


def redacted(text: str) -> str:
    """Return a text in which secrets are replaced by ***."""
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= SHORTEST:
            text = text.replace(value, "***")
    return _QUERY.sub(r"\1***", _CREDENTIALS.sub("***@", text))
