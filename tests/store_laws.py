"""What holds of checkpoints in every store over HTTP: S3 (test_s3.py), gs:// and az://
(test_stores.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from faulty_proxy import FaultyProxy
from safetensors.torch import load_file
from test_checkpoint import Fleet, begun

from elastic_trainer.__main__ import main
from elastic_trainer.state.checkpoints.checkpoint import PARTS
from elastic_trainer.state.stores.by_url import open_store
from elastic_trainer.state.stores.store import Store


def make_another(writers: Fleet) -> None:
    """Train a step and publish it, with parts of its own only."""
    writers.train()
    for worker in writers.workers:
        worker.known.parts = {}
    writers.checkpoint()


def steps_in(url: str) -> set[int]:
    """Return the steps of which there are parts."""
    return {int(name.split("/")[1].split("-")[1]) for name in open_store(url).list(PARTS)}


def any_world_restores_what_any_world_has_written(url: str) -> Store:
    """Three write, two read, one reads. The store is proved first, and keeps what is wanted only.
    Returns it."""
    writers = Fleet(url, 3)
    assert writers.restore() == [None] * 3
    for _ in range(4):
        make_another(writers)
    assert Fleet(url, 2, steps=0).restore() == [7, 7]
    assert Fleet(url, steps=0).restore() == [7]
    store = open_store(url)
    assert steps_in(url) == {5, 6, 7} and not writers.events.facts("state.rubbish_kept")
    assert store.list("log", limit=1) == store.list("log")[:1]
    return store


def a_checkpoint_stands_when_a_fault_meets_its_upload(proxy: FaultyProxy, url: str, kind: str,
                                                      method: str, contains: str) -> None:
    """Faults of the network are retried within bounds, and a lost answer is settled by the nonce.
    """
    writers = begun(url, 2)
    fault = proxy.fault(kind, method=method, contains=contains, times=2)
    writers.checkpoint()
    assert fault.fired == 2
    assert writers.published() == [3]
    assert writers.workers[0].known.fenced is None
    assert Fleet(url, steps=0).restore() == [3]


def a_restore_is_right_when_a_fault_meets_it(proxy: FaultyProxy, url: str, kind: str,
                                             contains: str, times: int) -> None:
    """Truncated, wrong or refused answers are requested again. The newest checkpoint is
    restored."""
    begun(url, 2).publish(2)
    fault = proxy.fault(kind, method="GET", contains=contains, times=times)
    reader = Fleet(url, 2, steps=0)
    assert reader.restore() == [5, 5]
    assert fault.fired >= 1 and not reader.events.facts("state.checkpoint_refused")


def the_command_line_reads_checkpoints(url: str, output: Path, capsys: pytest.CaptureFixture[str],
                                       *exports: str) -> None:
    """ls, show, verify, prune and export, as with a folder; into `output` and `exports`."""
    writers = begun(url, 2)
    for _ in range(2):
        make_another(writers)
    unreferenced = f"{PARTS}/000000000001-000000000002/000000-x.bin"
    open_store(url).put(unreferenced, b"x")
    printed = []
    for action, *arguments in (["ls"], ["show", "--step", "4"], ["verify"], ["prune"],
                               *(["export", it] for it in (str(output), *exports))):
        assert main(["checkpoints", action, url, *arguments]) == 0
        printed.append(capsys.readouterr().out)
    assert [line.split()[0] for line in printed[0].splitlines()[1:]] == ["4", "5"]
    assert json.loads(printed[1])["step"] == 4
    assert printed[2].count("whole: step") == 2
    assert "deleted 1 parts" in printed[3] and unreferenced not in open_store(url).list(PARTS)
    assert load_file(output).keys() == writers.states[0].model.state_dict().keys()
