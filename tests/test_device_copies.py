"""Copies of the state from a device: each byte once, beside the training, and with the right bits.

No GPU is needed: the fake device counts what leaves it, and copies as late as it may.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from fake_device import DeviceTensor, FakeDevice, OnDevice, fake_device
from simulated import Hub, Member, in_threads
from test_loop import Trainer, built, job, mse

from elastic_trainer.config import Launch
from elastic_trainer.events.log import Events
from elastic_trainer.reduce.ring import Sending
from elastic_trainer.state.checkpoints.checkpoint import Plan, Share
from elastic_trainer.state.checkpoints.run_checkpoints import Checkpoints
from elastic_trainer.state.checkpoints.upload import SnapshotMemory
from elastic_trainer.state.device_copies import Copying, new_memory
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.stores.by_url import open_store
from elastic_trainer.state.values.layout import Packed, byte_ranges, byte_view, pack
from elastic_trainer.world.place import Driver
from elastic_trainer.world.transfer import TRANSFER_BYTES, Transfer

State = TypeVar("State", bound=LiveState)
Emitted = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def device() -> FakeDevice:
    return fake_device()


def trained(kind: type[State], sides: tuple[int, int], seed: int = 0) -> State:
    """Return a state with momentum, a weight whose dimensions lie in another order, and buffers."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(*sides, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        torch.nn.BatchNorm2d(sides[1]))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state = kind(model, optimizer)
    state.has_state = True
    return state


def on(device: FakeDevice, sides: tuple[int, int]) -> OnDevice:
    """Return a state of the device."""
    state = trained(OnDevice, sides)
    state.device = device
    return state


def bytes_of(state: LiveState) -> bytes:
    packed = LiveState.packed(state)
    return b"".join(part.numpy().tobytes()
                    for part in byte_ranges(packed, 0, packed.payload_bytes))


@pytest.mark.parametrize("givers", [1, 3])
def test_each_byte_of_the_state_leaves_the_givers_device_once_when_a_worker_joins(
        device: FakeDevice, givers: int) -> None:
    """In pieces of TRANSFER_BYTES at most, also of a tensor of many pieces."""
    hub = Hub(givers + 1)
    states = [on(device, (1024, 1200)) for _ in range(givers)]
    states.append(trained(LiveState, (1024, 1200), seed=1))
    states[-1].has_state = False
    in_threads(givers + 1, lambda rank: Transfer(
        Member(hub, rank), Events(None), list, lambda *_: None).move(
            states[rank], list(range(givers))), hub.abort)
    assert bytes_of(states[-1]) == bytes_of(states[0])
    there = states[0].packed()
    total = sum(tensor.nbytes for tensor in there.tensors if tensor.device.type != "cpu")
    assert total > 5 * TRANSFER_BYTES
    assert sum(device.left) == total
    assert max(device.left) <= TRANSFER_BYTES
    assert max(device.made) <= TRANSFER_BYTES + 2 * 1024 * 3 * 3 * 4, "and the ends of two rows"


@pytest.mark.parametrize("start", [0, 1, 4, 37])
def test_any_bytes_of_a_tensor_in_any_order_of_dimensions_are_read(start: int) -> None:
    """As if the tensor were copied whole."""
    values = torch.arange(120.).view(2, 3, 4, 5)
    for tensor in (values, values.permute(2, 0, 3, 1), values[:, :1].expand(2, 3, 4, 5),
                   values.to(memory_format=torch.channels_last), values[1, 2, 3, ::2]):
        packed = pack({"t": tensor})
        whole = byte_view(tensor)
        for stop in range(start + 1, packed.payload_bytes + 1, 7):
            assert torch.equal(torch.cat(list(byte_ranges(packed, start, stop))),
                               whole[start:stop])


class Snapshot:
    """A worker's checkpoints of a state that is on the device."""

    def __init__(self, device: FakeDevice, folder: Path):
        self.emitted: Emitted = []
        self.state = on(device, (8, 16))
        self.checkpoints = Checkpoints(
            open_store(str(folder)), lambda event, **facts: self.emitted.append((event, facts)),
            Plan(part_bytes=1000))
        self.checkpoints.restore(self.state, Member(Hub(1), 0))
        self.state.committed += 1

    def published(self) -> bytes:
        """Publish the share in flight; return the bytes that a restore finds."""
        checkpoints = self.checkpoints
        checkpoints.wait()
        checkpoints.collect([checkpoints.parts_up()], publish=True)
        checkpoints.wait()
        reader = trained(LiveState, (8, 16), seed=1)
        Checkpoints(checkpoints.store, checkpoints.emit, checkpoints.plan).restore(
            reader, Member(Hub(1), 0))
        return bytes_of(reader)


@pytest.fixture
def snapshot(device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Snapshot:
    monkeypatch.setattr("elastic_trainer.state.checkpoints.upload.OTHERS_COPY_S", 600.0)
    return Snapshot(device, tmp_path)


def test_the_next_step_computes_while_the_device_copies_and_its_apply_comes_after(
        snapshot: Snapshot, device: FakeDevice) -> None:
    """The checkpoint has the bits of its step. The host waits for no copy, and the device holds no
    second copy of the state."""
    state, checkpoints = snapshot.state, snapshot.checkpoints
    before, packed = bytes_of(state), state.packed()
    checkpoints.begin(state, 0, 1)
    early = sum(buffer.nbytes for buffer in state.buffers.values() if buffer.ndim)
    assert sum(device.left) == early, "what a forward pass changes is copied first"
    for buffer in state.buffers.values():  # the next step's forward pass
        buffer.add_(1)
    assert sum(device.left) == early and device.waits == ["kernels"]
    state.begin_applying()
    assert device.waits == ["kernels", "kernels"]
    with torch.no_grad():
        for tensor in [*state.model.parameters(),
                       *(held["momentum_buffer"] for held in state.optimizer.state.values())]:
            tensor.fill_(7.0)
    assert snapshot.published() == before
    assert sum(device.left) == sum(one.nbytes for one in packed.tensors if one.device.type != "cpu")
    assert max(device.made) <= 1000 + 2 * 8 * 3 * 3 * 4


def test_a_checkpoint_that_is_uploaded_before_the_next_apply_is_whole(
        snapshot: Snapshot, device: FakeDevice) -> None:
    """The uploaders wait for the copies, not the training."""
    before = bytes_of(snapshot.state)
    snapshot.checkpoints.begin(snapshot.state, 0, 1)
    assert snapshot.published() == before
    assert device.waits.count("kernels") == 1 and "host" in device.waits


def test_a_worker_reports_once_that_memory_cannot_be_pinned_when_the_system_gives_none(
        snapshot: Snapshot) -> None:
    """The checkpoints are made all the same. (This machine has no GPU, so torch pins nothing.)"""
    for _ in range(2):
        snapshot.state.committed += 1
        before = bytes_of(snapshot.state)
        snapshot.checkpoints.begin(snapshot.state, 0, 1)
        assert snapshot.published() == before
    [facts] = [facts for event, facts in snapshot.emitted if event == "state.memory_not_pinned"]
    assert "Error" in facts["error"] and facts["bytes"] >= len(before)


def test_memory_is_pinned_once_and_piece_by_piece(device: FakeDevice) -> None:
    """With a rest after each, and none for a checkpoint that waits for it."""
    pinned: list[int] = []
    rests: list[float] = []

    def pin(size: int) -> torch.Tensor:
        pinned.append(size)
        return torch.empty(size, dtype=torch.uint8)

    made = new_memory(2500, 1000, True, pin, rests.append)
    assert pinned == [1000, 1000, 500] and len(rests) == 3 and made.bytes == 2500
    assert not new_memory(2500, 1000, False, pin).not_pinned and len(pinned) == 3

    state = on(device, (8, 16))
    memory = SnapshotMemory(1000, pin)
    memory.prepare(state, 0, 1)
    packed = state.packed()
    small = sum(one.nbytes for one in packed.tensors if one.device.type != "cpu"
                and one.is_contiguous() and one.nbytes < 1000)
    for _ in range(3):
        from_checkpoint(memory, state.packed())
        assert packed.payload_bytes <= sum(pinned) - 2500 <= packed.payload_bytes + small
    before = list(pinned)
    memory.prepare(state, 0, 1)
    from_checkpoint(memory, state.packed())
    assert pinned == before


def from_checkpoint(memory: SnapshotMemory, packed: Packed) -> None:
    share = Share(1, 0.0, 0.0)
    memory.copy(packed, share, 0, 1)
    share.copying.wait()
    assert share.parts == share.count


class Recorded(Copying):
    """A copy that a device still makes."""

    def __init__(self, log: list[str]):
        super().__init__()
        self._log = log

    def hold_writes(self) -> None:
        self._log.append("held")


def test_only_the_apply_of_a_step_comes_after_the_copy() -> None:
    """Its forward and backward passes, its reduction and its vote do not."""
    log: list[str] = []
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *_: log.append("step"))
    next(model.parameters()).register_hook(lambda _: log.append("backward"))

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        log.append("forward")
        trainer.state.copying = Recorded(log)
        return mse(model, batch)

    trainer = Trainer(job(model, optimizer=optimizer, loss=loss), Launch(), Driver(),
                      Events(None, attempt=1), "exact", Sending())
    trainer.run()
    steps = "".join(word[0] for word in log)
    assert steps.count("s") == trainer.state.committed > 2
    assert re.fullmatch("(f|b|s)*?((fb)+hs)+", steps), steps


ODD = {
    "number": torch.tensor(3.5), "empty": torch.empty(0, 3), "three": torch.arange(3).byte(),
    "unaligned": torch.arange(5.0), "truth": torch.tensor([0, 1, 2]).byte().view(torch.bool),
    "short": torch.arange(7).to(torch.bfloat16), "complex": torch.arange(3) * (1 + 2j),
    "conjugate": (torch.arange(3) * (1 + 2j)).conj(), "expanded": torch.arange(2.0).expand(40, 2),
    "strided": torch.arange(60.0)[::2], "channels": torch.arange(360.0).view(2, 3, 6, 10).to(
        memory_format=torch.channels_last),
    "large": torch.arange(3000.0).view(30, 100), "doubles": torch.arange(500, dtype=torch.float64),
    **{f"small{number}": torch.full((number % 5,), float(number)) for number in range(50)}}


def copied(memory: SnapshotMemory, packed: Packed) -> bytes:
    share = Share(1, 0.0, 0.0)
    memory.copy(packed, share, 0, 1)
    share.copying.wait()
    return b"".join(piece.numpy().tobytes() for piece in share.pieces.values())


@pytest.mark.parametrize("part_bytes", [64, 1000, 1 << 20])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_snapshot_has_the_bytes_of_each_kind_of_tensor(
        device: FakeDevice, is_there: bool, part_bytes: int) -> None:
    """Wherever a part ends: also when the values, the layout or the memory is another one than at
    the last snapshot."""
    memory = SnapshotMemory(part_bytes, lambda size: torch.empty(size, dtype=torch.uint8))
    tied = {"again": ODD["large"]}
    for odd in (ODD, {name: one.clone() for name, one in reversed(ODD.items())}, ODD | tied):
        for kind in ("parameters", "buffers"):
            packed = pack({kind: odd, "optimizer": {"state": dict(odd)}})
            whole = b"".join(part.numpy().tobytes()
                             for part in byte_ranges(packed, 0, packed.payload_bytes))
            if is_there:
                packed = replace(packed, tensors=[
                    DeviceTensor(one, device) if number % 4 else one
                    for number, one in enumerate(packed.tensors)])
            assert copied(memory, packed) == whole
            assert copied(memory, packed) == whole
            for piece in memory.room.pieces:
                piece.fill_(255)
            assert copied(memory, packed) == whole


@pytest.mark.parametrize("count", [10, 400])
def test_the_host_starts_as_many_copies_for_many_small_tensors_as_for_few(
        device: FakeDevice, count: int) -> None:
    tensors = {f"t{number}": torch.full((number % 7 + 1,), 1.0) for number in range(count)}
    packed = pack({"parameters": tensors, "buffers": {"b": torch.ones(3), "large": torch.ones(
        1 << 15), "other": torch.arange(4)}})
    packed = replace(packed, tensors=[DeviceTensor(one, device) for one in packed.tensors])
    memory = SnapshotMemory(1 << 14, lambda size: torch.empty(size, dtype=torch.uint8))
    for _ in range(2):
        device.calls = 0
        copied(memory, packed)
        # small ones of two types, and of two turns; large ones together
        assert device.calls <= 5


def test_small_tensors_leave_the_device_in_a_bounded_memory(
        device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_trainer.state.device_copies.GATHERED", 1000)
    packed = pack({"parameters": {f"t{number}": torch.full((20,), float(number))
                                  for number in range(100)}})
    packed = replace(packed, tensors=[DeviceTensor(one, device) for one in packed.tensors])
    assert copied(SnapshotMemory(512, lambda size: torch.empty(size, dtype=torch.uint8)),
                  packed) == b"".join(one.inner.numpy().tobytes() for one in packed.tensors)
    assert max(device.made) <= 1000 + 80 and sum(device.left) == packed.payload_bytes
