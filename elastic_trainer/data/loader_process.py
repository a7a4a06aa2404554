"""The processes of a loader: a nursery, and the loader processes that it starts.

worker → (fork) nursery → (fork) loader processes ⇄ worker: requests, and batches in shared memory

What always holds:
1. The nursery is forked once, before the worker has threads and connections of its own. It reads
   nothing and has one thread, so it can fork at any time: a new loader process is as clean as the
   first.
2. All end with the worker, also when it is killed: the kernel ends each process with its parent
   (PR_SET_PDEATHSIG), and each ends when the worker's end of its socket is closed.
3. No process keeps a socket that it has inherited: a peer of the worker learns of its death at
   once.
4. A request is a few numbers, from which the loader process computes samples and seeds. So the
   answer does not depend on the process that gives it.
5. A tensor arrives with its bits, dtype, shape and strides. Its bytes are copied once, in the
   loader process. The memory has no name (memfd_create(2)): it is freed when both processes have
   dropped it, however they end, and the size of /dev/shm is no limit.
6. Nothing comes from a network or a store: both processes are forked from one parent.

What it does not do: keep two tensors of a batch in one storage (each has its own), or a conjugate
view as a view (it is resolved).

torch's DataLoader serializes with the same class (ForkingPickler). It has a socket, a thread and an
open file for each storage (torch/multiprocessing/reductions.py); this is one file for a batch.

Source: prctl(2), pidfd_open(2); unix(7) for SOCK_SEQPACKET and SCM_RIGHTS.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import selectors
import signal
import socket
import stat
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import numpy
import torch
import torch.utils.data._utils.worker as torch_worker

from elastic_trainer.data.batches import fetch
from elastic_trainer.data.leaves import drawn_twice
from elastic_trainer.data.seeds import seed_cpu
from elastic_trainer.host.parent import end_with_parent
from elastic_trainer.schedule.schedule import sample_seed
from elastic_trainer.wire.proof import Values

MESSAGE_BYTES = 4096
RING = 4096
"""The numbers of this many requests in a row have a place of their own on the board."""
OOM_SCORE = "500"
"""Added to the badness of a loader process (proc(5), oom_score_adj): the kernel kills it rather
than the worker, and it is started again."""
Key = tuple[int, ...]
"""What a request asks for, e.g. (step, phase, micro-batch)."""
DRAWN = -1
"""The first number of a request for the digests of one sample (leaves.py), not for a batch."""
Recipe = Callable[[Key], tuple[numpy.ndarray, int]]
"""Returns the samples of a request, and its seed."""


@dataclass(frozen=True)
class Work:
    """What the loader processes do: the same in all of them."""

    dataset: Any
    collate: Callable[[list[Any]], Any]
    recipe: Recipe
    processes: int


class Board:
    """Memory that the worker and its loader processes share: which requests are dropped, and what
    each process does now."""

    def __init__(self, processes: int):
        memory = mmap.mmap(-1, RING + 3 * 8 * processes)
        self._dropped = numpy.frombuffer(memory, numpy.uint8, RING)
        self._now = numpy.frombuffer(memory, numpy.int64, offset=RING).reshape(processes, 3)

    def drop(self, number: int, is_dropped: bool = True) -> None:
        """Mark a request as dropped, or as wanted: its process stops at the next sample."""
        self._dropped[number % RING] = is_dropped

    def is_dropped(self, number: int) -> bool:
        """Return whether the worker wants a request no more."""
        return bool(self._dropped[number % RING])

    def note(self, slot: int, request: int, sample: int) -> None:
        """Note which sample a process reads; request -1: it waits."""
        self._now[slot] = request, sample, time.monotonic_ns()

    def now(self, slot: int) -> tuple[int, int, float]:
        """Return the request and the sample of a process, and since when (s, monotonic)."""
        request, sample, since_ns = self._now[slot].tolist()
        return request, sample, since_ns / 1e9


class Dropped(Exception):
    """The worker wants the request no more."""


class LoaderTraceback(Exception):
    """The traceback of an exception in a loader process: its cause in the worker."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next message and its descriptors; b"": the other end is closed. Raises
    BlockingIOError where nothing has come."""
    try:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 1)
    except ConnectionResetError:  # closed while something lay in it unread
        return b"", []
    return message, descriptors


# --- the nursery ----------------------------------------------------------------------------------

def fork_nursery(work: Work, board: Board) -> tuple[socket.socket, int]:
    """Start the nursery; returns the socket to it, and its pid."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    worker, is_main = os.getpid(), threading.current_thread() is threading.main_thread()
    if pid := os.fork():
        its.close()
        return mine, pid
    _run_child(lambda: Nursery(work, board, its).run(), worker if is_main else None, [its])


def _run_child(run: Callable[[], None], parent: int | None, keep: Iterable[socket.socket]
               ) -> NoReturn:
    """Run a forked process to its end. The interpreter's own end is for its parent alone."""
    code = 1
    try:
        drop_sockets({one.fileno() for one in keep})
        for number in (signal.SIGINT, signal.SIGTERM):  # sent to the group: the worker decides
            signal.signal(number, signal.SIG_IGN)
        if parent is not None and not end_with_parent(signal.SIGKILL, parent):
            os._exit(1)
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def drop_sockets(keep: set[int]) -> None:
    """Drop all inherited sockets but some. Their numbers stay taken: an object of the parent that
    still has such a number closes no file of ours."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        with suppress(OSError):  # the descriptor of the listing itself
            if number > 2 and number not in keep and stat.S_ISSOCK(os.fstat(number).st_mode):
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


class Nursery:
    """Starts a loader process for each socket that the worker sends, and reports its end."""

    def __init__(self, work: Work, board: Board, worker: socket.socket):
        self.work, self.board, self.worker = work, board, worker
        self.pids: dict[int, tuple[int, int]] = {}
        """The process of each slot: pid and descriptor."""
        self.selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Serve until the worker has ended."""
        torch.set_num_threads(1)  # a forked process has none of the threads of its parent's pool
        self.selector.register(self.worker, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is not self.worker:
                    self._report_end(key.data)
                elif not self._obey():
                    return

    def _obey(self) -> bool:
        message, channels = receive(self.worker)
        if not message:
            return False
        order = json.loads(message)
        slot = order["slot"]
        if order["do"] == "start":
            self._start(slot, socket.socket(fileno=channels[0]))
        elif slot in self.pids:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pids[slot][1], signal.SIGKILL)
        return True

    def _start(self, slot: int, channel: socket.socket) -> None:
        nursery = os.getpid()
        pid = os.fork()
        if pid == 0:
            _run_child(lambda: serve(self.work, self.board, slot, channel), nursery, [channel])
        channel.close()
        descriptor = os.pidfd_open(pid)
        self.pids[slot] = pid, descriptor
        self.selector.register(descriptor, selectors.EVENT_READ, slot)
        self._tell({"slot": slot, "pid": pid})

    def _report_end(self, slot: int) -> None:
        pid, descriptor = self.pids.pop(slot)
        self.selector.unregister(descriptor)
        os.close(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._tell({"slot": slot, "pid": pid, "code": code})

    def _tell(self, news: dict[str, int]) -> None:
        with suppress(ConnectionError):  # the worker has ended: the next read says so
            self.worker.send(json.dumps(news).encode())


# --- a loader process -----------------------------------------------------------------------------

def serve(work: Work, board: Board, slot: int, worker: socket.socket) -> None:
    """Answer the requests of the worker, one after the other, until it closes the socket."""
    torch_worker._worker_info = torch_worker.WorkerInfo(  # for get_worker_info() of the dataset
        id=slot, num_workers=work.processes, seed=0, dataset=work.dataset)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(OOM_SCORE)
    while True:
        board.note(slot, -1, -1)
        message, _ = receive(worker)
        if not message:
            return
        number, *key = json.loads(message)
        kind, descriptor = answer(work, board, slot, number, tuple(key))
        descriptors = [] if descriptor is None else [descriptor]
        with suppress(ConnectionError):  # the worker has ended: the next message says so
            socket.send_fds(worker, [json.dumps([number, kind]).encode()], descriptors)
        for one in descriptors:
            os.close(one)


def answer(work: Work, board: Board, slot: int, number: int, key: Key) -> tuple[str, int | None]:
    """Return what became of a request: its kind (batch, error, dropped), and a descriptor."""

    def before(place: int, sample: int) -> None:
        if board.is_dropped(number):
            raise Dropped
        board.note(slot, number, sample)
        seed_cpu(sample_seed(seed, place))

    def drawn(sample: int) -> Values:
        return drawn_twice(work.dataset, sample, lambda: before(0, sample))

    try:
        indices, seed = work.recipe(key)
        before(0, -1 if not len(indices) else int(indices[0]))
        if key[0] == DRAWN:
            return "batch", packed(drawn(int(indices[0])))
        return "batch", packed(fetch(work.dataset, indices, work.collate, before))
    except Dropped:
        return "dropped", None
    except BaseException as error:  # sys.exit() too
        return "error", packed_error(error)


def packed_error(error: BaseException) -> int:
    """Pack an exception with its traceback. One that cannot be packed is a RuntimeError of the same
    text."""
    text = "".join(traceback.format_exception(error))
    try:
        unpacked(packed(error))
        return packed((error, text))
    except Exception:
        return packed((RuntimeError(f"{type(error).__qualname__}: {error}"), text))


# --- batches in shared memory ---------------------------------------------------------------------

ALIGNMENT = 64
"""Bytes, as torch's allocator aligns (c10/core/alignment.h): kernels take the same path."""
_PLACE, _COUNT = struct.Struct("<QQ"), struct.Struct("<Q")


class _Packer(ForkingPickler):
    """Serializes a batch, but not the bytes of its tensors and arrays: those are `buffers`."""

    def __init__(self, file: io.BytesIO):
        self.buffers: list[Any] = []
        super().__init__(file, 5, True, self.buffers.append)

    def reducer_override(self, obj: Any) -> Any:
        """Describe a tensor by the bytes that it spans. Sparse and quantized ones go torch's
        way."""
        if not (type(obj) is torch.Tensor and obj.layout == torch.strided and obj.is_leaf
                and obj.device.type == "cpu" and not obj.is_quantized):
            return NotImplemented
        tensor = obj.detach().resolve_conj().resolve_neg()
        shape, stride = tuple(tensor.shape), tensor.stride()
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        flat = torch.as_strided(tensor, (span if tensor.numel() else 0,), (1,))
        return _tensor, (flat.view(torch.uint8).numpy(), tensor.dtype, shape, stride,
                         obj.requires_grad)


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...],
            requires_grad: bool) -> torch.Tensor:
    flat = torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
    return torch.as_strided(flat, shape, stride).requires_grad_(requires_grad)


def packed(batch: Any) -> int:
    """Write a batch into memory of its own; returns the descriptor, which the caller closes.

    The layout is: what ForkingPickler writes, the buffers, their places, and the number of places.
    """
    text = io.BytesIO()
    packer = _Packer(text)
    packer.dump(batch)
    buffers = [text.getbuffer(), *(buffer.raw() for buffer in packer.buffers)]
    places = places_of([buffer.nbytes for buffer in buffers])
    table = places[-1][0] + places[-1][1]
    size = table + len(places) * _PLACE.size + _COUNT.size
    descriptor = os.memfd_create("elastic-trainer-batch")
    try:
        os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE) as memory:
            for buffer, (start, length) in zip(buffers, places, strict=True):
                memory[start:start + length] = buffer
            for number, place in enumerate(places):
                _PLACE.pack_into(memory, table + number * _PLACE.size, *place)
            _COUNT.pack_into(memory, size - _COUNT.size, len(places))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def places_of(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return start and length of buffers of these lengths, in bytes, each start aligned."""
    places, start = [], 0
    for length in lengths:
        places.append((start, length))
        start += -(-length // ALIGNMENT) * ALIGNMENT
    return places


def unpacked(descriptor: int) -> Any:
    """Return the batch that `packed` has written, and close the descriptor. The tensors are in the
    mapped memory: nothing is copied."""
    try:
        memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)
    (count,) = _COUNT.unpack_from(memory, len(memory) - _COUNT.size)
    table = len(memory) - _COUNT.size - count * _PLACE.size
    places = [_PLACE.unpack_from(memory, table + n * _PLACE.size) for n in range(count)]
    view = memoryview(memory)
    text, *buffers = (view[start:start + length] for start, length in places)
    return ForkingPickler.loads(text, buffers=buffers)
