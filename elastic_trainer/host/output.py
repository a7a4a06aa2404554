"""A process's standard output outlives whoever reads it.

print → here → pipe of the driver or of sshd, the supervisor's terminal or file

When the driver or an ssh dies, the next print of the user's would raise BrokenPipeError in the
middle of a step: a fault of the world's would look like the user's own, which ends the run
everywhere, and no last checkpoint would be written. Driver and supervisor, whose output may be a
closed pipe or a full disk, must not end, or stop reading workers, for it.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class Mouth(io.FileIO):
    """A descriptor that swallows what nobody reads any more, or no disk takes."""

    def write(self, data: Any) -> int:
        """Write; into a broken pipe: point the descriptor to nowhere for good."""
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
        except OSError:
            pass  # a full disk may have room again
        return len(data)


def outlive_readers() -> None:
    """Make `sys.stdout` and `sys.stderr` of this process go on when their pipes break."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        getattr(sys, name).flush()
        raw = Mouth(descriptor, "wb", closefd=False)
        setattr(sys, name, io.TextIOWrapper(raw, errors="backslashreplace", write_through=True))
