"""Standard output that goes on when its reader has ended.

print → here → pipe of the driver or of sshd, the supervisor's terminal or file

When the driver or an ssh dies, the next print of the user's code would raise BrokenPipeError in a
step. That would look like the user's own error, which ends the run on all workers without a last
checkpoint. The output of driver and supervisor may be a closed pipe or a full disk: they must not
end, or stop reading workers, because of it.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class LastingOutput(io.FileIO):
    """A descriptor that discards output for which there is no reader or no room on the disk."""

    def write(self, data: Any) -> int:
        """Write. After a broken pipe the descriptor leads to /dev/null."""
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
    """Make `sys.stdout` and `sys.stderr` of this process survive broken pipes."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        getattr(sys, name).flush()
        raw = LastingOutput(descriptor, "wb", closefd=False)
        setattr(sys, name, io.TextIOWrapper(raw, errors="backslashreplace", write_through=True))
