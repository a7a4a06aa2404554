"""Print the hosts file: the script that horovodrun calls every second.

    python -S -m discovery hosts-file FILE

hosts file (replaced whole by its writer) → here → horovodrun

What always holds:
1. stdout is the protocol: `host:slots` lines and nothing else.
2. Unknown is never empty: a file that is not there or not whole ends with exit code 1, and horovodrun keeps its list.
   A file that is there and empty means that there are no hosts.

What it does not do yet: ask a cloud (the poller that writes the file comes with discovery/ec2).
"""

from __future__ import annotations

import re
import sys

HOST_NAME = r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9]([A-Za-z0-9_-]{0,62}))*"  # RFC 1123


def main(argv: list[str]) -> int:
    """Print the file named in argv; returns the exit code."""
    if len(argv) != 2 or argv[0] != "hosts-file":
        print("usage: python -m discovery hosts-file FILE", file=sys.stderr)
        return 2
    try:
        with open(argv[1], encoding="ascii") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        print(f"the hosts file {argv[1]} cannot be read: {error}", file=sys.stderr)
        return 1
    lines = [line for line in text.splitlines() if line.strip()]
    for line in lines:
        host, _, slots = line.strip().partition(":")
        if not re.fullmatch(HOST_NAME, host) or not re.fullmatch("[0-9]{1,4}", slots) or int(slots) < 1:
            print(f"{argv[1]} has a line that is not host:slots: {line!r}", file=sys.stderr)
            return 1
    sys.stdout.write("".join(line.strip() + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
