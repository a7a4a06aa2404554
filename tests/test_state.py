"""What survives: bytes of values, the live state, objects in a folder, checkpoints."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.stores.store import FolderStore, Store, StoreRefused, StoreUnavailable
from elastic_trainer.state.values.layout import (
    LayoutError,
    Packed,
    byte_ranges,
    decode,
    fill_range,
    pack,
    unpack,
)


def trained(steps: int = 3, width: int = 8, optimizer: str = "AdamW") -> LiveState:
    """A live state after a few steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width),
                                torch.nn.Linear(width, 2))
    state = LiveState(model, getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2))
    state.has_state = True
    for _ in range(steps):
        model(torch.randn(8, 4)).square().mean().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.commit(8, 1)
    return state


def bytes_of(state: LiveState) -> bytes:
    packed = state.packed()
    return packed.header + payload(packed).numpy().tobytes()


def payload(packed: Packed) -> torch.Tensor:
    return torch.cat(list(byte_ranges(packed, 0, packed.payload_bytes)))


def received(packed: Packed) -> Any:
    """Return a state's values as another process gets them, as bytes."""
    return decode(packed.header, payload(packed))


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad", "RMSprop"])
def test_a_newcomer_has_the_same_bytes_when_it_has_received_the_state(optimizer: str) -> None:
    """Weights, moments, counters and groups, also into an optimizer that never stepped (F6, F7)."""
    giver, taker = trained(3, optimizer=optimizer), trained(0, optimizer=optimizer)
    taker.load(received(giver.packed()))
    assert bytes_of(taker) == bytes_of(giver)
    # And goes on to the same bytes: nothing is aliased, nothing is missing.
    for state in (giver, taker):
        torch.manual_seed(5)
        state.model(torch.randn(8, 4)).square().mean().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
    weights = [list(s.model.parameters()) for s in (giver, taker)]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_nothing_is_changed_when_the_state_is_another_models() -> None:
    """All values are taken over, or none."""
    taker = trained(0, width=9)
    before, packed = bytes_of(taker), trained().packed()
    with pytest.raises(LayoutError, match="in this model"):
        taker.load(received(packed))
    assert bytes_of(taker) == before
    assert taker.has_state


def test_the_weights_stay_until_all_bytes_have_come() -> None:
    """They are received into the gradients' memory: half a state changes nothing, the whole one
    everything."""
    giver, taker = trained(3), trained(0)
    for parameter in taker.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, packed = bytes_of(taker), giver.packed()
    room, data = taker.room(packed.header, packed.payload_bytes), payload(packed)
    grads = {parameter.grad.data_ptr() for parameter in taker.model.parameters()
             if parameter.grad is not None}
    assert grads <= {tensor.data_ptr() for tensor in room.tensors}
    half = len(data) // 2
    fill_range(room, half, data[half:])
    assert bytes_of(taker) == before
    for start in range(0, half, 7):
        fill_range(room, start, data[start : min(start + 7, half)])
    taker.load(unpack(room))
    assert bytes_of(taker) == bytes_of(giver)


def test_refuses_another_models_values_before_there_is_a_byte() -> None:
    """No worker reads gigabytes that do not fit, or makes room for bytes that only the header
    claims."""
    packed = trained(3).packed()
    with pytest.raises(LayoutError, match="in this model"):
        trained(0, width=9).room(packed.header, packed.payload_bytes)
    with pytest.raises(LayoutError, match="the header describes"):
        trained(0).room(packed.header, packed.payload_bytes - 1)


@pytest.mark.parametrize(("was", "now", "times"), [
    (b"", b"", 0), (b"", b"", 2), (b"}}", b"", 1), (b"[10]", b"[-1]", 1), (b"int64", b"save", 1)])
def test_refuses_bytes_that_do_not_match_the_header(was: bytes, now: bytes, times: int) -> None:
    """Every length is checked before anything is built."""
    packed = pack({"a": torch.arange(10), "b": [1, (2.5, None)]})
    with pytest.raises(LayoutError):
        decode(packed.header.replace(was, now), payload(packed).repeat(times))


@pytest.mark.parametrize("flag", ["fused", "capturable", None])
def test_the_optimizers_count_is_where_torch_wants_it(flag: str | None) -> None:
    """With the parameter for a fused or capturable optimizer, else on the CPU; all else is with the
    parameter."""
    giver, model = trained(3), trained(0).model.to("meta")  # it stands for another device
    taker = LiveState(model, torch.optim.AdamW(model.parameters()))
    if flag:
        giver.optimizer.param_groups[0][flag] = True
    taker.load(received(giver.packed()))
    assert len(taker.optimizer.state) == 6
    for kept in taker.optimizer.state.values():
        assert {key: value.device.type for key, value in kept.items()} == {
            "step": "meta" if flag else "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


def assert_one_wins(store: Store) -> None:
    """Let 16 put the same name at once: one of them wins, and its bytes are whole."""
    won = []

    def put(number: int) -> None:
        if store.put_if_absent("log/1.json", bytes([number]) * 1000):
            won.append(number)

    threads = [threading.Thread(target=put, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.get("log/1.json") == bytes(won) * 1000
    assert store.list("log") == ["log/1.json"]


def test_one_wins_when_many_put_the_same_name(tmp_path: Path) -> None:
    """Put if absent: one of many racing creators."""
    assert_one_wins(FolderStore(tmp_path))


@pytest.mark.parametrize(("number", "remedy"), [(errno.EACCES, "user"), (errno.EROFS, "Mount"),
                                                (errno.EPERM, "hard links"),
                                                (errno.EOPNOTSUPP, "hard links"),
                                                (errno.ENOSPC, None), (errno.EIO, None),
                                                (errno.ESTALE, None)])
def test_a_folder_is_refused_when_no_time_mends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                   number: int, remedy: str | None) -> None:
    """With a remedy; a full disk or a server that is away may come back."""
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("elastic_trainer.state.stores.store.os.link", fail)
    with pytest.raises(StoreUnavailable, match=remedy) as raised:
        FolderStore(tmp_path).put_if_absent("log/1.json", b"x")
    assert isinstance(raised.value, StoreRefused) == bool(remedy)


def test_a_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """Before anybody waits for it."""
    (tmp_path / "file").touch()
    with pytest.raises(StoreRefused, match="Name a folder"):
        FolderStore(tmp_path / "file").put_if_absent("log/1.json", b"x")


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a//b", "a/../../b", "", "."])
def test_refuses_a_name_when_it_leaves_the_store(tmp_path: Path, name: str) -> None:
    """A name from a manifest never escapes the store's folder."""
    with pytest.raises(ValueError, match="no name"):
        FolderStore(tmp_path).get(name)


def test_the_state_has_an_attribute_that_was_changed_after_the_vote() -> None:
    """Also when no module had a changed one at the step's begin."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), drop := torch.nn.Dropout(0.5))
    state = LiveState(model, torch.optim.SGD(model.parameters(), 0.1))
    state.begin()
    assert state.attributes.checksum() == 0
    state.forget()
    assert state.values()["attributes"] == {}
    drop.p = 0.25
    assert state.values()["attributes"] == {"1.p": 0.25}
    drop.p = 0.5
    assert state.values()["attributes"] == {}


def test_a_header_is_the_text_that_json_writes() -> None:
    """Records, and workers of other versions, are compared with it."""
    header = trained().packed().header
    assert json.dumps(json.loads(header)).encode() == header
