"""The trace of a fleet: which hosts join, get a notice and are lost, and when.

a CSV file, or a storm → here → what happens on local hosts, and when → stage (acts)

Two forms of a file; lines that begin with # are comments. The documented one has a header, and its
events are `join`, `notice` and `loss`:

    time_s,event,host
    0,join,a
    900,notice,a
    1020,loss,a

A recorded one has no header: milliseconds, `add` or `remove`, node. A removed node got a notice,
unless that is of 0 s.

    0,add,node1
    40800000,remove,node1

What always holds:
1. The first row is at 0 s. A host joins, then gets a notice or none, then is lost; it may join
   again later. Each notice is followed by a loss at a later time: one of 0 s is none.
2. At the end there is a host, so that a run can finish.
3. A host of this machine has the address of one incarnation alone: 127.0.0.1, 127.0.0.2, … A host
   that joins again has a new one, as a new machine of the cloud has.
4. A trace whose list never has more than `hosts` is played as it is. Of a larger fleet the shape is
   kept: the number on the list is scaled, at least 1 and 0 only for 0, and the oldest leave first.

Source: the recorded form is that of https://github.com/uclasystem/bamboo (traces/).
"""

from __future__ import annotations

import csv
import itertools
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from elastic_trainer.config import ConfigError

NOTICE_S = 120.0
"""How long before a spot machine is taken the cloud says so (AWS)."""
HEADER = ["time_s", "event", "host"]
JOIN, NOTICE, LOSS = "join", "notice", "loss"
ADDRESSES_EACH = 254
"""Of 127.0.n.0/24: without 0 and 255, which stand for the network and for all."""
REMEDY = "docs/guide/rehearse.md shows both forms of a trace."


class Row(NamedTuple):
    """One thing that happens to one host."""

    time_s: float
    event: str
    host: str


def read_trace(file: Path, notice_s: float = NOTICE_S, *, may_end_empty: bool = False) -> list[Row]:
    """Read a file of either form. Raises ConfigError."""
    try:
        return parse_trace(file.read_text(encoding="utf-8-sig"), f"--trace {file}", notice_s,
                           may_end_empty=may_end_empty)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {file} cannot be read: {error}. {REMEDY}") from error


def parse_trace(text: str, source: str, notice_s: float = NOTICE_S, *,
                may_end_empty: bool = False) -> list[Row]:
    """Read the text of either form. `notice_s`: the notice of a removed node, and of a `notice`
    without a loss. Raises ConfigError that names the line; `may_end_empty`: not for a trace that
    ends without a host, as that of a run that finished with its last host."""
    lines = [(number, _cells(line)) for number, line in enumerate(text.splitlines(), 1)
             if line.strip() and not line.startswith("#")]
    is_recorded = bool(lines) and lines[0][1] != HEADER
    if len(lines) <= (not is_recorded):
        raise ConfigError(f"{source} has no row. {REMEDY}")
    known = ("add", "remove") if is_recorded else (JOIN, NOTICE, LOSS)
    rows = []
    for number, cells in lines if is_recorded else lines[1:]:
        if (len(cells) != 3 or cells[1] not in known or not cells[2]
                or not re.fullmatch(r"\d{1,15}(\.\d{1,9})?", cells[0])):
            unit = "milliseconds" if is_recorded else "seconds"
            raise ConfigError(f"Line {number} of {source} is {','.join(cells)[:99]!r}. A row has "
                              f"{unit}, one of {', '.join(known)}, and a host. {REMEDY}")
        rows.append(Row(float(cells[0]), cells[1], cells[2]))
    if is_recorded:
        names = {"add": JOIN, "remove": LOSS}
        rows = [Row(row.time_s / 1000, names[row.event], row.host) for row in rows]
    return completed(rows, source, notice_s, announces=is_recorded, may_end_empty=may_end_empty)


def _cells(line: str) -> list[str]:
    """Return the cells of a line; the line itself if it is no CSV."""
    try:
        return [cell.strip() for cell in next(csv.reader([line]))]
    except csv.Error:
        return [line]


def text_of(rows: Iterable[Row]) -> str:
    """Return rows as a file of the documented form."""
    return "\n".join([",".join(HEADER), *(f"{row.time_s:.3f},{row.event},{row.host}"
                                          for row in rows)]) + "\n"


def completed(rows: Iterable[Row], source: str, notice_s: float = NOTICE_S, *,
              announces: bool = False, may_end_empty: bool = False) -> list[Row]:
    """Return rows in the order of time, from 0 s on, with a loss after each notice.

    `announces`: each loss gets a notice, too. Raises ConfigError for rows that contradict each
    other, or that leave no host at the end, unless they `may_end_empty`.
    """
    of_host = defaultdict[str, list[Row]](list)
    for row in sorted(rows, key=lambda row: row.time_s):
        of_host[row.host].append(row)
    found: list[Row] = []
    present = 0
    for host, own in of_host.items():
        lives = _lives(own, source, notice_s)
        present += len(lives) > 0 and lives[-1][-1].event == JOIN
        for life in lives:
            if announces and len(life) == 2:
                notice_at = max(life[0].time_s, life[1].time_s - notice_s)
                life.insert(1, Row(notice_at, NOTICE, host))
            found += [row for row in life if row.event != NOTICE or row.time_s < life[-1].time_s]
    if not present and not may_end_empty:
        raise ConfigError(f"{source} ends without a host, so a run could not finish. Add a row in "
                          f"which a host joins.")
    first_s = min(row.time_s for row in found)
    return sorted((row._replace(time_s=row.time_s - first_s) for row in found),
                  key=lambda row: row.time_s)


def _lives(rows: Sequence[Row], source: str, notice_s: float) -> list[list[Row]]:
    """Return the rows of one host from each joining to the loss. Raises ConfigError."""
    lives: list[list[Row]] = []
    for row in rows:
        open_life = lives[-1] if lives and lives[-1][-1].event != LOSS else []
        if open_life and open_life[-1].event == NOTICE and row.event != LOSS:
            open_life.append(Row(open_life[-1].time_s + notice_s, LOSS, row.host))
            open_life = open_life if open_life[-1].time_s > row.time_s else []
        if (row.event == JOIN) == bool(open_life):
            state = "is there" if open_life else "is not there"
            raise ConfigError(f"{source} has {row.event} of host {row.host} at {row.time_s:g} s, "
                              f"when it {state}. A host joins, is lost, and may join again.")
        if row.event == JOIN:
            lives.append([row])
        else:
            open_life.append(row)
    if lives and lives[-1][-1].event == NOTICE:
        lives[-1].append(Row(lives[-1][-1].time_s + notice_s, LOSS, lives[-1][-1].host))
    return lives


def listed(rows: Iterable[Row]) -> list[tuple[float, int]]:
    """Return (time, hosts that are there without a notice from then on) of each change."""
    hosts: set[str] = set()
    found = []
    for time_s, group in itertools.groupby(rows, key=lambda row: row.time_s):
        for row in group:
            if row.event == JOIN:
                hosts.add(row.host)
            else:
                hosts.discard(row.host)
        found.append((time_s, len(hosts)))
    return found


# --- local hosts ----------------------------------------------------------------------------------

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
