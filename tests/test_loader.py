"""Loader processes: the same batches, whatever dies, hangs or changes."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
from cluster import is_running
from torch.utils.data import default_collate, get_worker_info
from waiting import wait_for

from elastic_trainer import ConfigError, Loader
from elastic_trainer.data.loader import MicrobatchRecipe, Reader, Readers, keys_after
from elastic_trainer.data.loader_pool import LoaderKilled
from elastic_trainer.data.loader_process import packed, unpacked
from elastic_trainer.schedule.schedule import Schedule

SCHEDULE = Schedule(dataset_size=50, global_batch=16, microbatches=4, epochs=2, seed=1)
CPU = torch.device("cpu")


class Drawn:
    """Samples that every generator has a part in; what a test does to one of them."""

    def __init__(self, act: Callable[[int], None] = lambda i: None):
        self.act, self.scale = act, 1.0

    def __len__(self) -> int:
        return SCHEDULE.dataset_size

    def __getitem__(self, i: int) -> Any:
        self.act(i)
        return {"x": torch.rand(3) + i, "y": numpy.random.rand(2), "z": random.random()}


@pytest.fixture
def open_reader() -> Iterator[Callable[..., Reader]]:
    """Return a maker of readers, whose processes end with the test."""
    readers: list[Reader] = []

    def make(dataset: Any, loader: Loader | None,
             collate: Callable[[list[Any]], Any] = default_collate) -> Reader:
        reader = Reader(dataset, collate, MicrobatchRecipe(SCHEDULE), loader, CPU)
        readers.append(reader)
        return reader

    yield make
    for reader in readers:
        reader.close()


def keys(mine: range = range(4)) -> list[tuple[int, ...]]:
    return list(keys_after((0, 0, -1), SCHEDULE, mine, 1))


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(one[name], other[name]) for name in "xyz")


@pytest.mark.parametrize("workers", [1, 3])
def test_batches_are_the_same_for_every_number_of_processes(
        open_reader: Callable[..., Reader], workers: int) -> None:
    """Also random augmentation: it is seeded for each sample."""
    here, apart = (open_reader(Drawn(), Loader(workers=number)) for number in (0, workers))
    for key in keys():
        assert equal(here.take(key), apart.take(key, keys_after(key, SCHEDULE, range(4), 1)))
    assert len(apart.pids) == workers and not here.pids


def test_a_sample_draws_the_same_beside_other_samples() -> None:
    """The draws of a sample depend on its place, and not on what the samples before it draw."""
    def greedy(i: int) -> None:
        if i == first:
            torch.rand(5)

    first, second = SCHEDULE.microbatch_samples(0, 0)[:2].tolist()
    takes = [Reader(Drawn(act), default_collate, MicrobatchRecipe(SCHEDULE), Loader(workers=0), CPU)
             .take((0, 0, 0)) for act in (lambda i: None, greedy)]
    assert torch.equal(takes[0]["x"][1], takes[1]["x"][1])
    assert not torch.equal(takes[0]["x"][0], takes[1]["x"][0])


def test_stale_requests_are_dropped_and_processes_stay_when_the_world_changes(
        open_reader: Callable[..., Reader]) -> None:
    """The next batch is the one that is asked for, though others were asked before."""
    reader, here = (open_reader(Drawn(), Loader(workers=number)) for number in (2, 0))
    reader.take((0, 0, 0), keys_after((0, 0, 0), SCHEDULE, range(2), 1))
    pids = reader.pids
    for mine, key in ((range(4), (0, 0, 3)), (range(1), (2, 0, 0)), (range(4), (1, 0, 1))):
        assert equal(reader.take(key, keys_after(key, SCHEDULE, mine, 1)), here.take(key))
    assert reader.pids == pids


def test_a_new_microbatch_comes_first_when_all_that_was_read_ahead_is_still_wanted(
        open_reader: Callable[..., Reader]) -> None:
    """A worker that takes over a micro-batch does not wait for a free place."""
    reader = open_reader(Drawn(), Loader(workers=1, prefetch=3))
    reader.take((0, 0, 1), keys_after((0, 0, 1), SCHEDULE, range(1, 4), 1))
    pool: Any = reader._pool
    while len(pool._ready) < 3:
        pool._pump(60.0)
    assert equal(reader.take((0, 0, 0), keys_after((0, 0, 0), SCHEDULE, range(4), 1)),
                 open_reader(Drawn(), Loader(workers=0)).take((0, 0, 0)))


def test_a_reader_that_is_closed_leaves_no_process(open_reader: Callable[..., Reader]) -> None:
    """Not even one that has ended and that nobody has waited for."""
    reader = open_reader(Drawn(), Loader(workers=2))
    reader.take((0, 0, 0))
    parent = psutil.Process(reader.pids[0]).ppid()
    pids = [parent, *reader.pids]
    reader.close()
    assert not Path(f"/proc/{parent}").exists()
    wait_for("it", lambda: not any(map(is_running, pids)))


def test_a_dropped_request_stops_at_the_next_sample(open_reader: Callable[..., Reader],
                                                    tmp_path: Path) -> None:
    """A worker does not wait for micro-batches that are no longer its own."""
    stale = set(SCHEDULE.microbatch_samples(2, 0).tolist())

    def wait(i: int) -> None:
        if i in stale:
            (tmp_path / f"read-{i}").touch()
            while not (tmp_path / "go").exists():
                time.sleep(0.01)

    reader = open_reader(Drawn(wait), Loader(workers=1, prefetch=1))
    reader.take((0, 0, 0), [(2, 0, 0)])
    reader._pool._ask([(2, 0, 0)])  # type: ignore[union-attr]
    wait_for("it", lambda: bool(list(tmp_path.glob("read-*"))))
    reader._pool._drop_all_but([], in_order=False)  # type: ignore[union-attr]
    (tmp_path / "go").touch()
    reader.take((0, 0, 1))
    assert len(list(tmp_path.glob("read-*"))) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_frozen_is_replaced(open_reader: Callable[..., Reader],
                                                        number: int) -> None:
    """The batches are those that it would have read, and the restart is reported."""
    reported: list[dict[str, Any]] = []
    # A healthy process of a busy machine may read a sample for a second, too.
    reader = open_reader(Drawn(), Loader(workers=2, timeout_s=4.0))
    reader.report = lambda **facts: reported.append(facts)
    here = open_reader(Drawn(), Loader(workers=0))
    for count, key in enumerate(keys()):
        batch = reader.take(key, keys_after(key, SCHEDULE, range(4), 1))
        assert equal(batch, here.take(key))
        if count == 3:
            gone = reader.pids[0]
            os.kill(gone, number)
    assert [facts["pid"] for facts in reported] == [gone]
    assert ("SIGKILL" if number == signal.SIGKILL else "4 s") in reported[0]["reason"]
    assert len(reader.pids) == 2 and gone not in reader.pids


def test_a_sample_that_kills_each_process_is_named(open_reader: Callable[..., Reader]) -> None:
    """A crash of the dataset's own code is not retried for ever."""
    bad = int(SCHEDULE.microbatch_samples(0, 1)[2])
    reader = open_reader(Drawn(lambda i: os._exit(7) if i == bad else None), Loader(workers=2))
    reader.take((0, 0, 0))
    with pytest.raises(LoaderKilled, match=f"sample {bad} of the dataset.*exit code 7"):
        reader.take((0, 0, 1))


def test_an_exception_names_its_sample_and_has_its_traceback(
        open_reader: Callable[..., Reader]) -> None:
    """It is the same exception as without loader processes."""
    bad = int(SCHEDULE.microbatch_samples(0, 1)[2])

    def explode_here(i: int) -> None:
        if i == bad:
            raise OSError(5, "the disk has failed")

    reader = open_reader(Drawn(explode_here), Loader(workers=1))
    with pytest.raises(OSError, match="the disk has failed") as raised:
        reader.take((0, 0, 1))
    assert raised.value.errno == 5
    assert f"sample {bad}" in "".join(traceback.format_exception(raised.value))
    assert "explode_here" in str(raised.value.__cause__)
    assert len(reader.pids) == 1  # an exception ends no process


def test_an_exception_that_cannot_be_sent_keeps_its_kind_and_its_text(
        open_reader: Callable[..., Reader]) -> None:
    """It arrives as a RuntimeError."""
    class Local(Exception):
        def __init__(self, lock: Any):
            super().__init__("needs a lock")
            self.lock = lock

    def explode(i: int) -> None:
        raise Local(__import__("threading").Lock())

    with pytest.raises(RuntimeError, match="Local: needs a lock"):
        open_reader(Drawn(explode), Loader(workers=1)).take((0, 0, 0))


class Transform:
    def __init__(self, p: float = 0.5):
        self.p = p


class Busy(Drawn):
    """Changes itself when a sample is read: a counter, a cache, a file that is opened late."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.file, self.cache = 0, None, dict[int, Any]()
        self.transforms, self.labels = [Transform()], torch.zeros(50)
        self.transform, self.table = Transform(), {"a": 1}

    def __getitem__(self, i: int) -> Any:
        self.reads, self.file = self.reads + 1, self.file or object()  # type: ignore[assignment]
        return self.cache.setdefault(i, super().__getitem__(i))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "attribute dataset.scale .* from 1.0 to 0.5": lambda d: setattr(d, "scale", 0.5),
    "attribute dataset.transform .* from a Transform to a Transform": lambda d: setattr(
        d, "transform", Transform()),
    "transform.p .* from 0.5 to 0.1": lambda d: setattr(d.transform, "p", 0.1),
    "transforms.0.p .*": lambda d: setattr(d.transforms[0], "p", 0.1),
    "table.a .* from 1 to 2": lambda d: d.table.update(a=2),
    "labels .* a tensor, was changed in place": lambda d: d.labels.add_(1)}


@pytest.mark.parametrize("loader", [None, Loader(workers=0), Loader(workers=1)])
@pytest.mark.parametrize("change", CHANGES)
def test_a_dataset_that_the_script_changes_between_two_reads_is_an_error(
        change: str, loader: Loader | None, open_reader: Callable[..., Reader]) -> None:
    """Loader processes hold that of the start, and so does a worker that joins: `dataset.epoch = 1`
    would have no effect there."""
    dataset = Busy()
    reader = open_reader(torch.utils.data.Subset(dataset, range(50)), loader)
    reader.take((0, 0, 0))
    CHANGES[change](dataset)
    with pytest.raises(RuntimeError, match=f"{change}.*between two reads.*state") as raised:
        reader.take((0, 0, 1))
    assert ("leave the option loader out" in str(raised.value)) == bool(loader and loader.workers)


@pytest.mark.parametrize("loader", [None, Loader(workers=1)])
def test_a_dataset_may_change_itself_while_it_is_read(
        loader: Loader | None, open_reader: Callable[..., Reader]) -> None:
    """Also in an evaluation that reads the same dataset."""
    dataset = Busy()
    reader = open_reader(dataset, loader)
    others = Readers(reader)
    for key in keys()[:3]:
        reader.take(key)
        others.of(dataset, default_collate, reader.recipe, None).take(key)
        reader.drawn(key[2])
    assert dataset.reads > 3


def test_all_processes_end_with_the_worker_when_it_is_killed(tmp_path: Path) -> None:
    """Also those that read a sample at that moment."""
    def hang(i: int) -> None:
        (tmp_path / str(os.getpid())).touch()
        signal.pause()

    pid = os.fork()
    if pid == 0:
        try:
            reader = Reader(Drawn(hang), default_collate, MicrobatchRecipe(SCHEDULE),
                            Loader(workers=3), CPU)
            reader.take((0, 0, 0), keys_after((0, 0, 0), SCHEDULE, range(4), 1))
        finally:
            os._exit(1)
    try:
        wait_for("it", lambda: len(list(tmp_path.iterdir())) == 3)
        loaders = [int(path.name) for path in tmp_path.iterdir()]
        nursery = psutil.Process(loaders[0]).ppid()
        assert is_running(nursery)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    wait_for("it", lambda: not any(map(is_running, (nursery, *loaders))))


def test_a_dead_nursery_is_a_fault_of_the_machine(open_reader: Callable[..., Reader]) -> None:
    """A worker that has joined cannot fork a new one that is clean."""
    reader = open_reader(Drawn(), Loader(workers=1))
    reader.take((0, 0, 0))
    parent = psutil.Process(reader.pids[0]).ppid()
    child = reader.pids[0]
    os.kill(parent, signal.SIGKILL)
    wait_for("it", lambda: not is_running(child))
    with pytest.raises(LoaderKilled):
        reader.take((0, 0, 1))


def test_a_process_knows_that_it_is_a_loader(open_reader: Callable[..., Reader]) -> None:
    """Datasets ask get_worker_info() for it, as under DataLoader."""
    class Informed:
        def __getitem__(self, i: int) -> int:
            info: Any = get_worker_info()
            return int(info.id + 10 * info.num_workers)

    batch = open_reader(Informed(), Loader(workers=1)).take((0, 0, 0))
    assert batch.tolist() == [10] * 4


class Tagged(torch.Tensor):
    """A tensor of a class of its own."""


@pytest.mark.parametrize("tensor", [
    torch.arange(24.0).reshape(2, 3, 4),
    torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.arange(10)[2:9:3],
    torch.ones(1).expand(5),
    torch.tensor(3.5),
    torch.empty(0, 4),
    torch.randn(3).to(torch.bfloat16),
    torch.tensor([True, False]),
    torch.randn(3, dtype=torch.complex64).conj(),
    torch.eye(3).to_sparse(),
    torch.nn.Parameter(torch.randn(3)),
    torch.randn(3).as_subclass(Tagged),
    torch.randn(3, requires_grad=True),
], ids=["dense", "transposed", "channels_last", "strided", "expanded", "scalar", "empty",
        "bfloat16", "bool", "conjugate", "sparse", "parameter", "subclass", "requires_grad"])
def test_a_tensor_arrives_as_it_was(tensor: torch.Tensor) -> None:
    """Bits, dtype, shape, strides and class."""
    found = unpacked(packed({"a": [tensor]}))["a"][0]
    assert type(found) is type(tensor) and found.dtype == tensor.dtype
    assert found.shape == tensor.shape and found.requires_grad == tensor.requires_grad
    if tensor.layout == torch.strided:
        assert found.stride() == tensor.stride()
    dense = [one.to_dense() if one.is_sparse else one for one in (found, tensor)]
    assert torch.equal(*(one.detach() for one in dense))


def test_memory_is_freed_and_arrays_may_be_written() -> None:
    """A batch that was dropped keeps no file open."""
    before = len(os.listdir("/proc/self/fd"))
    batch = unpacked(packed([numpy.arange(5), torch.zeros(1000)]))
    batch[0][2] = 7
    batch[1].add_(1)
    assert batch[0].tolist() == [0, 1, 7, 3, 4] and float(batch[1].sum()) == 1000
    assert batch[1].data_ptr() % 64 == 0
    del batch
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("name", "value"), [("workers", -1), ("workers", 1.5), ("prefetch", 0),
                                             ("timeout_s", 0.0), ("workers", True)])
def test_numbers_that_cannot_work_are_refused(name: str, value: Any) -> None:
    """The message names the option and the value."""
    with pytest.raises(ConfigError, match=f"{name}={value!r}"):
        Loader(**{name: value})
