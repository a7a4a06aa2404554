"""What happens on the local hosts of a rehearsal, and when.

trace → here → stage (acts)

What always holds:
1. A host of this machine has the address of one incarnation alone: 127.0.0.1, 127.0.0.2, … A host
   that joins again has a new one, as a new machine of the cloud has.
2. A trace whose list never has more than `hosts` is played as it is. Of a larger fleet the shape is
   kept: the number on the list is scaled, at least 1 and 0 only for 0, and the oldest leave first.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from elastic_trainer.rehearse.trace import JOIN, LOSS, NOTICE, Row, listed

ADDRESSES_EACH = 254
"""Of 127.0.n.0/24: without 0 and 255, which stand for the network and for all."""


class Moment(NamedTuple):
    """What happens at one time; `at_s` is in seconds of this machine."""

    at_s: float
    joined: tuple[str, ...]
    noticed: tuple[str, ...]
    lost: tuple[str, ...]


def address(number: int) -> str:
    """Return the address of the incarnation with a number, from 1."""
    third, fourth = divmod(number - 1, ADDRESSES_EACH)
    second, third = divmod(third, 256)
    return f"127.{second}.{third}.{fourth + 1}"


def peak(rows: Iterable[Row]) -> int:
    """Return the largest number of hosts on the list."""
    return max(count for _, count in listed(rows))


def timetable(rows: Sequence[Row], hosts: int, speed: float) -> list[Moment]:
    """Return what happens on at most `hosts` local hosts, `speed` times as fast as in the trace."""
    local = sorted(fitted(rows, hosts), key=lambda row: row.time_s)
    found = []
    for time_s, group in itertools.groupby(local, key=lambda row: row.time_s):
        events = list(group)
        joined, noticed, lost = (tuple(row.host for row in events if row.event == kind)
                                 for kind in (JOIN, NOTICE, LOSS))
        found.append(Moment(time_s / speed, joined, noticed, lost))
    return found


def fitted(rows: Sequence[Row], hosts: int) -> Iterator[Row]:
    """Yield the rows with local addresses, for a list of at most `hosts`."""
    numbers = itertools.count(1)
    most = peak(rows)
    if most > hosts:
        yield from _scaled(rows, hosts, most, numbers)
        return
    local: dict[str, str] = {}
    for row in rows:
        if row.event == JOIN:
            local[row.host] = address(next(numbers))
        yield row._replace(host=local[row.host])


def _scaled(rows: Sequence[Row], hosts: int, most: int, numbers: Iterator[int]) -> Iterator[Row]:
    ours, names = deque[str](), set[str]()
    gone = _ends(rows)
    for time_s, group in itertools.groupby(rows, key=lambda row: row.time_s):
        noticed, is_sudden = list[str](), False
        for row in group:
            is_sudden |= row.event == LOSS and row.host in names
            noticed += [row.host] if row.event == NOTICE else []
            (names.add if row.event == JOIN else names.discard)(row.host)
        wanted = max(1, round(len(names) * hosts / most)) if names else 0
        while len(ours) < wanted:
            ours.append(address(next(numbers)))
            yield Row(time_s, JOIN, ours[-1])
        while len(ours) > wanted:
            taken = ours.popleft()
            if is_sudden or not noticed:
                yield Row(time_s, LOSS, taken)
            else:
                yield Row(time_s, NOTICE, taken)
                yield Row(gone[noticed[0], time_s], LOSS, taken)


def _ends(rows: Sequence[Row]) -> dict[tuple[str, float], float]:
    """Return when the host of each notice is gone, by host and time of the notice."""
    found, gone = dict[tuple[str, float], float](), dict[str, float]()
    for row in reversed(rows):
        if row.event == LOSS:
            gone[row.host] = row.time_s
        elif row.event == NOTICE:
            found[row.host, row.time_s] = gone[row.host]
    return found
