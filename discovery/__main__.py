"""Who is here. The script that horovodrun calls every second, and the daemons that keep its file true.

    python -S -m elastic_trainer.discovery hosts-file FILE [MAX_AGE_S]    print the file (what horovodrun calls)
    python -m elastic_trainer.discovery ec2 --once --tag Job=mine …       print EC2's list, without poller and agents
    python -m elastic_trainer.discovery poll --hosts-file FILE --tag …    keep FILE true (on the coordinator)
    python -m elastic_trainer.discovery group --group NAME …              ask for the machines that are wished, once
    python -m elastic_trainer.discovery check <wish.json                  say what an apply would lack (deploy/check.sh)
    python -m elastic_trainer.discovery agent --key-file FILE …           watch this host, answer the poller (on each host)

hosts file (replaced whole by its writer) → here → horovodrun

What always holds:
1. stdout is the protocol: `host:slots` lines and nothing else.
2. Unknown is never empty: a file that is not there, not whole or too old ends with exit code 1, and horovodrun keeps
   its list. A file that is there and empty means that there are no hosts.
3. `hosts-file` imports nothing that it does not need: it has 60 ms, under a lock of horovodrun's.
"""

from __future__ import annotations

import os
import re
import sys
import time

FUTURE_S = 5
"""A file from further ahead is of no known age: somebody has set the clock back."""
HOST_NAME = r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9]([A-Za-z0-9_-]{0,62}))*"  # RFC 1123


def main(argv: list[str]) -> int:
    """Run one command; returns the exit code."""
    if argv[:1] == ["hosts-file"]:
        return hosts_file(argv[1:])
    if argv[:1] and argv[0] in ("ec2", "poll", "group", "agent"):
        from elastic_trainer.discovery.commands import run  # here: it imports boto3

        return run(argv)
    if argv == ["check"]:
        from elastic_trainer.discovery.account import run as check  # here: so too

        return check()
    print("usage:", str(__doc__).split("\n\n")[1], sep="\n", file=sys.stderr)
    return 2


def hosts_file(argv: list[str]) -> int:
    """Print the file named in argv; returns the exit code."""
    if len(argv) not in (1, 2) or not re.fullmatch("[0-9]{1,6}", argv[1] if argv[1:] else "0"):
        print("usage: python -m elastic_trainer.discovery hosts-file FILE [MAX_AGE_S]", file=sys.stderr)
        return 2
    try:
        with open(argv[0], encoding="ascii") as file:
            text, age_s = file.read(), time.time() - os.fstat(file.fileno()).st_mtime
    except (OSError, UnicodeDecodeError) as error:
        print(f"the hosts file {argv[0]} cannot be read: {error}", file=sys.stderr)
        return 1
    if argv[1:] and age_s > int(argv[1]):
        print(f"the hosts file {argv[0]} is {age_s:.0f} s old: its poller does not run, or neither the cloud nor the agent "
              "of some host answers", file=sys.stderr)
        return 1
    if argv[1:] and age_s < -FUTURE_S:
        print(f"the hosts file {argv[0]} is {-age_s:.0f} s ahead of this machine's clock, so its age is unknown until its "
              "poller's next answer", file=sys.stderr)
        return 1
    lines = [line for line in text.splitlines() if line.strip()]
    for line in lines:
        host, _, slots = line.strip().partition(":")
        if not re.fullmatch(HOST_NAME, host) or not re.fullmatch("[0-9]{1,4}", slots) or int(slots) < 1:
            print(f"{argv[0]} has a line that is not host:slots: {line!r}", file=sys.stderr)
            return 1
    sys.stdout.write("".join(line.strip() + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
