"""Why a build has failed: the sentence of its log that names the cause.

The log of a failed build ends with pip's traceback of setup.py. What stopped the compiler or CMake
stands hundreds of lines above.

the log's text → here → SetupFailed
"""

from __future__ import annotations

import re

MOST_LINES = 12
"""Of one CMake error."""
CMAKE = re.compile(r"\s*CMake Error\b")
COMPILER = re.compile(
    r"\S+:\d+(:\d+)?: (fatal )?error: "      # g++, clang: file:line:column
    r"|\S+\(\d+\): (catastrophic )?error\b"  # nvcc's front end: file(line)
    r"|\S+: fatal error: "                   # the driver, e.g. when cc1plus was killed
    r"|nvcc (fatal|error)\b"
    r"|\S*ld(\.\w+)?: (cannot find|.*undefined reference)|\S+: undefined reference to")
PIP = re.compile(r"\s*ERROR: (?!Failed building|Failed to build)")
"""Those two say only that it has failed."""


def cause_of(log: str) -> str:
    """Return the first error of CMake or of a compiler, else that of pip, else the last line."""
    lines = log.splitlines()
    for number, line in enumerate(lines):
        if CMAKE.match(line):
            return _block(lines[number:])
        if COMPILER.match(line.lstrip()):
            return line.strip()
    for line in lines:
        if PIP.match(line):
            return line.strip()
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


def _block(lines: list[str]) -> str:
    """Return CMake's error: its first line, and the indented text up to the call stack."""
    margin = len(lines[0]) - len(lines[0].lstrip())
    found = [lines[0].strip()]
    for line in lines[1:MOST_LINES]:
        if line.strip() and not line.startswith(" " * (margin + 1)):
            break
        found.append(line[margin:].rstrip())
    text = "\n".join(found).rstrip()
    return re.sub(r"\n\n+", "\n", text)
