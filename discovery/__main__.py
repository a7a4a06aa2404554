"""Which hosts there are: the script that horovodrun calls every second, and the daemons behind it.

    python -S -m elastic_trainer.discovery hosts-file FILE [MAX_AGE_S] print FILE (for horovodrun)
    python -m elastic_trainer.discovery ec2 --once --tag Job=mine …    print EC2's list, no agents
    python -m elastic_trainer.discovery poll ec2 --hosts-file FILE …   keep FILE true (coordinator)
    python -m elastic_trainer.discovery group --group NAME …           ask for the wished machines
    python -m elastic_trainer.discovery check <wish.json               print what an apply lacks
    python -m elastic_trainer.discovery agent --key-file FILE …        answer the poller (each host)

hosts file (replaced whole by its writer) → here → horovodrun

What always holds:
1. stdout is the protocol: lines `host:slots`, or `host:slots address[:port]`, and no others. Our
   driver also reads ` zone=ZONE` at their ends: it asks by ELASTIC_TRAINER_ZONES, because the
   driver of plain horovodrun refuses a line with more than host and slots.
2. Unknown is never empty: if the file is absent, incomplete or too old, the exit code is 1, and
   horovodrun keeps its list. An empty file means that there are no hosts.
3. `hosts-file` imports only what it needs, and nothing of ours: it has 60 ms, under a lock of
   horovodrun, and it also runs by its path. So HOST_NAME is a copy of host/names.py's.
"""

from __future__ import annotations

import os
import re
import sys
import time

FUTURE_S = 5
"""A file from further in the future has no known age: a clock was set back."""
HOST_NAME = (r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9_-]{0,62})"
             r"(\.[A-Za-z0-9]([A-Za-z0-9_-]{0,62}))*")  # RFC 1123


def main(argv: list[str]) -> int:
    """Run one command; returns the exit code."""
    if argv[:1] == ["hosts-file"]:
        return hosts_file(argv[1:])
    if argv == ["check"]:
        from elastic_trainer.discovery.places.ec2_account import run as check  # imports boto3

        return check()
    if argv[:1]:
        from elastic_trainer.discovery.commands import COMMANDS, run  # here: it takes 60 ms

        if argv[0] in COMMANDS:
            return run(argv)
    print("usage:", str(__doc__).split("\n\n")[1], sep="\n", file=sys.stderr)
    return 2


def hosts_file(argv: list[str]) -> int:
    """Print the file named in argv; returns the exit code."""
    if len(argv) not in (1, 2) or not re.fullmatch("[0-9]{1,6}", argv[1] if argv[1:] else "0"):
        print("usage: python -m elastic_trainer.discovery hosts-file FILE [MAX_AGE_S]",
              file=sys.stderr)
        return 2
    try:
        with open(argv[0], encoding="ascii") as file:
            text, age_s = file.read(), time.time() - os.fstat(file.fileno()).st_mtime
    except (OSError, UnicodeDecodeError) as error:
        return complain(f"cannot be read: {error}", argv[0])
    if argv[1:] and age_s > int(argv[1]):
        return complain(f"is {age_s:.0f} s old, and {argv[1]} s are allowed: its poller does not "
                        f"run, or neither the cloud nor the agent of a host answers", argv[0])
    if argv[1:] and age_s < -FUTURE_S:
        return complain(f"is {-age_s:.0f} s ahead of this machine's clock, so its age is unknown "
                        f"until its poller writes again", argv[0])
    lines = [line for line in text.splitlines() if line.strip()]
    for line in lines:
        rest, _, zone = line.strip().partition(" zone=")
        place, _, address = rest.partition(" ")
        host, _, slots = place.partition(":")
        is_number = re.fullmatch("[0-9]{1,4}", slots)
        address = re.sub(":[0-9]{1,5}$", "", address)  # its agent's own port
        are_names = all(re.fullmatch(HOST_NAME, name)
                        for name in (host, address or host, zone or host))
        if not are_names or not is_number or int(slots) < 1:
            return complain(f"has a line that is not host:slots: {line!r}", argv[0])
    if "ELASTIC_TRAINER_ZONES" not in os.environ:
        lines = [line.partition(" zone=")[0] for line in lines]
    sys.stdout.write("".join(line.strip() + "\n" for line in lines))
    return 0


def complain(what: str, file: str) -> int:
    """Print why there is no answer; returns the exit code."""
    print(f"the hosts file {file} {what}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
