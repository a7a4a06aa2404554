"""Reports to people that workers on two hosts do not have the same program, or do not compute, or
do not hold, the same bits.

membership (Differ, exits) → here → event log, stderr
"""

from __future__ import annotations

import sys
import time

from elastic_trainer.driver.actions import Differ, OtherProgram, Stop
from elastic_trainer.driver.roster import Roster
from elastic_trainer.events.log import Events
from elastic_trainer.wire.plain import plain
from elastic_trainer.world.arithmetic import advice

AS_BUILT = ("The weights as built differ. A newcomer receives the world's weights, so it trains on "
            "the same ones. Set torch's seed before the model is built, and the workers' gradients "
            "can be compared.")


class Differences:
    """Logs differences. That weights differ as built is logged once an attempt."""

    def __init__(self, events: Events):
        self._events, self._has_logged_built = events, False

    def report(self, found: Differ | OtherProgram) -> None:
        """Log that a newcomer computes other bits than the world, or was built with others."""
        if isinstance(found, OtherProgram):
            self._report_program(found)
            return
        both = {"host": found.host, "newcomer": found.worker, "other_host": found.other_host}
        if not found.is_arithmetic:
            if not self._has_logged_built:
                self._has_logged_built = True
                self._events.emit("worker.weights_differ_as_built", **both, meaning=AS_BUILT)
            return
        meaning = advice(found.is_refused, found.differ)
        self._events.emit("worker.arithmetic_differs", **both,
                          differs=found.differ, refused=found.is_refused,
                          kept_out_s=round(found.kept_out_s, 1), meaning=meaning)
        if found.is_refused:
            facts = "; ".join(f"{name} {theirs!r} there, {ours!r} here"
                              for name, (theirs, ours) in found.differ.items())
            print(f"elastic-trainer: The worker on {found.host} computes other bits than the one "
                  f"on {found.other_host} ({facts or 'no name differs'}), and gets no place. "
                  f"{meaning}", file=sys.stderr)

    def _report_program(self, found: OtherProgram) -> None:
        """Log that a worker has other data, or another program, than the run."""
        self._events.emit("worker.program_differs", host=found.host, newcomer=found.worker,
                          other_host=found.other_host, parts=list(found.parts),
                          differ=found.differ, meaning=found.remedy,
                          kept_out_s=round(found.kept_out_s, 1))
        if found.kept_out_s:
            print(plain(
                f"elastic-trainer: The worker on {found.host} has other data, or another program, "
                f"than the run, and gets no place: {found.differ}. {found.remedy} The other "
                f"workers go on, and the host is tried again after {found.kept_out_s:.0f} s."),
                file=sys.stderr)

    def report_stop(self, stop: Stop, roster: Roster) -> None:
        """Log that a host is kept out if its worker is ended because it has reported other bits."""
        if stop.reason == "differed":
            self.report_host(roster.workers[stop.worker].host, roster)

    def report_host(self, name: str, roster: Roster) -> None:
        """Log that a host is kept out, because a replica on it held other bits."""
        host = roster.hosts[name]
        kept_out_s = round(host.not_before - time.monotonic(), 1)
        self._events.emit("driver.host_kept_out", host=name,
                          differences=host.differences, kept_out_s=kept_out_s,
                          why="a replica on it held other bits than the other workers' "
                              "(worker.replica_differs)")
