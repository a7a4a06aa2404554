"""Processes that end with their parent.

loader processes, standbys and their service, the local S3 server → here → the kernel

The request holds also after exec. It is for this process alone, and not for its children.

Source: prctl(2), PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import ctypes
import os

PR_SET_PDEATHSIG = 1


def end_with_parent(number: int, parent: int | None = None) -> bool:
    """Let the kernel send this process a signal when the thread ends that has started it, also by
    SIGKILL. Returns False if the parent, whose pid is `parent`, has ended before."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    return parent is None or os.getppid() == parent
