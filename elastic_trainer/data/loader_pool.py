"""The worker's side of a loader: it asks loader processes for batches ahead, and takes them.

micro-batches, warm-up, evaluation → here ⇄ loader processes (loader_process.py)

What always holds:
1. `take` returns the batch of the key that is asked for, and no other one, whatever was asked
   before.
2. What is asked ahead and not wanted any more is dropped: its process stops at the next sample, and
   stays.
3. A process that has died, or that reads one sample for longer than `timeout_s`, is replaced, and
   its requests are asked again. A request that has cost MOST_DEATHS processes raises, with the
   number of the sample.
4. An exception in a process is raised here, with its traceback.

What it does not do: change the order of the requests. Each process answers them one by one.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from elastic_trainer.data.loader_process import (
    Board,
    Key,
    LoaderTraceback,
    Work,
    fork_nursery,
    receive,
    unpacked,
)

MOST_DEATHS = 3
POLL_S = 0.1
"""The interval in which a worker that waits for a batch looks at its world and at the clock."""
NEWS_S = 2.0
"""How long the nursery may take to report a start, or the end of a process whose socket is closed,
or to end. Without its report the reason is not known."""
CLOSE_POLL_S = 0.001


class LoaderKilled(RuntimeError):
    """A loader process was killed, again and again. The machine may have no memory left."""


@dataclass
class Slot:
    """The place of one loader process."""

    channel: socket.socket
    pid: int = 0
    code: int | None = None
    """How it has ended: the exit code, or the signal with a minus."""
    asked: dict[int, Key] = field(default_factory=dict)
    """The requests that it has not answered, by number, the oldest first."""
    asked_at: float = 0.0
    """When it got the oldest of them, or a later time."""
    is_silent: bool = False
    """True if it was killed because it was silent."""


class Pool:
    """The loader processes of a worker."""

    def __init__(self, work: Work, prefetch: int, timeout_s: float,
                 report: Callable[[dict[str, Any]], None]):
        self.work, self.depth, self.timeout_s = work, work.processes * prefetch, timeout_s
        self.report = report
        """Called with the facts of each restart."""
        self.board = Board(work.processes)
        self._number = 0
        self._ready: dict[Key, tuple[str, int]] = {}
        """Answers that were not taken yet: kind, descriptor."""
        self._deaths: Counter[Key] = Counter()
        self.nursery, self._nursery_pid = fork_nursery(work, self.board)
        self.nursery.setblocking(False)
        self.slots = [Slot(self._start(slot)) for slot in range(work.processes)]

    def close(self) -> None:
        """End all processes, and forget what they have read."""
        for slot in self.slots:
            slot.channel.close()
        self.nursery.close()
        for _, descriptor in self._ready.values():
            os.close(descriptor)
        self._ready.clear()
        latest = time.monotonic() + NEWS_S
        with suppress(ChildProcessError):  # the user's code has waited for all its children
            while os.waitpid(self._nursery_pid, os.WNOHANG)[0] == 0 and time.monotonic() < latest:
                time.sleep(CLOSE_POLL_S)

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        self._await_news(lambda: all(slot.pid for slot in self.slots))
        return [slot.pid for slot in self.slots if slot.code is None]

    # --- batches ----------------------------------------------------------------------------------

    def take(self, key: Key, ahead: Iterable[Key], check: Callable[[], None]) -> Any:
        """Return the batch of `key`, and have those of `ahead` read after it.

        `check` is called while this waits; what it raises ends the wait. Raises what the dataset
        raises, and LoaderKilled.
        """
        wanted = [key, *islice(ahead, self.depth)]
        self._drop_all_but(wanted, in_order=key in self._ready or self._is_asked(key))
        self._ask(wanted)
        while key not in self._ready:
            self._pump(POLL_S)
            self._replace_silent()
            check()
        kind, descriptor = self._ready.pop(key)
        self._deaths.pop(key, None)
        if kind == "batch":
            return unpacked(descriptor)
        error, text = unpacked(descriptor)
        error.__cause__ = LoaderTraceback(text)
        raise error

    def _is_asked(self, key: Key) -> bool:
        return any(key in slot.asked.values() for slot in self.slots)

    def _drop_all_but(self, wanted: list[Key], in_order: bool) -> None:
        """Drop what is not wanted; and what is not read yet, if it would come before `wanted`."""
        for stale in self._ready.keys() - set(wanted):
            os.close(self._ready.pop(stale)[1])
        for slot in self.slots:
            for number, key in list(slot.asked.items()):
                if not in_order or key not in wanted:
                    self.board.drop(number)
                    del slot.asked[number]

    def _ask(self, wanted: Iterable[Key]) -> None:
        known = {key for slot in self.slots for key in slot.asked.values()} | self._ready.keys()
        free = self.depth + 1 - len(known)  # the first one is not read ahead
        for key in wanted:
            if key not in known and free > 0:
                free -= 1
                self._send(min(self.slots, key=lambda slot: len(slot.asked)), key)

    def _send(self, slot: Slot, key: Key) -> None:
        self._number += 1
        self.board.drop(self._number, is_dropped=False)
        if not slot.asked:
            slot.asked_at = time.monotonic()
        slot.asked[self._number] = key
        try:
            slot.channel.send(json.dumps([self._number, *key]).encode())
        except BlockingIOError:
            self._kill(self.slots.index(slot))  # it reads no requests
        except OSError:
            pass  # it has ended: the closed socket is read next, and all is asked again

    # --- answers and ends -------------------------------------------------------------------------

    def _pump(self, wait_s: float) -> None:
        """Take what the processes and the nursery have sent."""
        with selectors.PollSelector() as selector:
            selector.register(self.nursery, selectors.EVENT_READ)
            for slot in self.slots:
                selector.register(slot.channel, selectors.EVENT_READ, slot)
            for key, _ in selector.select(wait_s):
                if key.data is None:
                    self._hear_nursery()
                else:
                    self._hear(key.data)

    def _hear(self, slot: Slot) -> None:
        message, descriptors = receive(slot.channel)
        if not message:
            self._replace(slot)
            return
        number, kind = json.loads(message)
        slot.asked_at = time.monotonic()
        key = slot.asked.pop(number, None)
        if key is not None and kind != "dropped":
            self._ready[key] = kind, descriptors[0]
        else:
            for one in descriptors:
                os.close(one)

    def _hear_nursery(self) -> None:
        try:
            message, _ = receive(self.nursery)
        except BlockingIOError:  # another call has read it
            return
        if not message:
            raise LoaderKilled("the parent of the loader processes was killed. It cannot be "
                               "started again in a worker that has joined.")
        news = json.loads(message)
        slot = self.slots[news["slot"]]
        if "code" not in news:
            slot.pid, slot.code = news["pid"], None
        elif news["pid"] == slot.pid:
            slot.code = news["code"]

    def _replace_silent(self) -> None:
        """End the processes that have read one sample for too long: `_hear` then replaces them."""
        for number, slot in enumerate(self.slots):
            _, _, since = self.board.now(number)
            if slot.asked and time.monotonic() - max(since, slot.asked_at) > self.timeout_s:
                slot.asked_at = time.monotonic()
                self._kill(number)

    def _kill(self, number: int) -> None:
        self.slots[number].is_silent = True
        self.nursery.send(json.dumps({"do": "kill", "slot": number}).encode())

    def _replace(self, slot: Slot) -> None:
        """Start another process in the place of one that has ended, and ask its requests again."""
        number = self.slots.index(slot)
        self._await_news(lambda: slot.code is not None)
        request, sample, _ = self.board.now(number)
        in_hand, asked = slot.asked.get(request), list(slot.asked.values())
        reason = self._reason(slot)
        self.report({"pid": slot.pid, "reason": reason, "sample": sample})
        slot.channel.close()
        self.board.note(number, -1, -1)
        self.slots[number] = anew = Slot(self._start(number))
        if in_hand is not None:
            self._deaths[in_hand] += 1
            if self._deaths[in_hand] >= MOST_DEATHS:
                raise LoaderKilled(
                    f"{MOST_DEATHS} loader processes have ended while they read sample {sample} of "
                    f"the dataset. The last one {reason}. If the machine has no memory left, use "
                    f"fewer processes or a smaller prefetch: Loader(workers=…, prefetch=…).")
        for key in asked:
            self._send(anew, key)

    def _await_news(self, is_known: Callable[[], bool]) -> None:
        """Wait until the nursery has reported a start or an end, but not for long."""
        latest = time.monotonic() + NEWS_S
        while not is_known() and (left := latest - time.monotonic()) > 0:
            with selectors.PollSelector() as selector:
                selector.register(self.nursery, selectors.EVENT_READ)
                if selector.select(left):
                    self._hear_nursery()

    def _reason(self, slot: Slot) -> str:
        if slot.is_silent:
            return f"read one sample for longer than {self.timeout_s:g} s (timeout_s)"
        if slot.code is not None and slot.code < 0:
            return f"was killed by {signal.Signals(-slot.code).name}"
        return f"ended with exit code {slot.code}"

    def _start(self, number: int) -> socket.socket:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = json.dumps({"do": "start", "slot": number}).encode()
        with its:
            socket.send_fds(self.nursery, [order], [its.fileno()])
        mine.setblocking(False)
        return mine
