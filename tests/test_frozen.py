"""Frozen content: what the training does not change neither joins nor checkpoints carry."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from cluster import Cluster
from faults import Plan
from test_state import received

from elastic_trainer.config import EXIT_USER_ERROR
from elastic_trainer.state.frozen import LEAST, FrozenContent
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.values.layout import LayoutError

Twin = Callable[..., str]
SIDE = 128
FROZEN_BYTES = 4 * SIDE * SIDE
JOB = ("--steps", "40", "--step-s", "0.05", "--checkpoint-every", "10", "--frozen", "7")
OF_JOB = 4 * 256 * 256
"""The bytes of its frozen layer."""


def worker(seed: int = 0, *, carries_all: bool = False) -> LiveState:
    """A worker whose first layer is a frozen base, drawn with a seed."""
    model = torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE, bias=False), torch.nn.Linear(SIDE, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(SIDE, SIDE,
                                          generator=torch.Generator().manual_seed(seed)))
        model[1].weight.fill_(float(seed))
    model[0].weight.requires_grad_(False)
    model[0].register_buffer("table", torch.arange(LEAST, dtype=torch.uint8))
    state = LiveState(model, torch.optim.SGD(model.parameters(), 0.1))
    state.frozen.carries_all = carries_all
    state.frozen.prove(state.named_tensors())
    return state


def given(holders: Sequence[LiveState], takers: Sequence[LiveState]) -> int:
    """Give the takers the state, as a transfer does; returns the bytes of its tensors."""
    reports = [one.frozen.report(one.named_tensors(), rank, len(holders))
               for rank, one in enumerate(holders)]
    built = [one.frozen.built(one.named_tensors()) for one in takers]
    for one in holders:
        one.frozen.agree(reports, built)
    [packed, *others] = [one.packed() for one in holders]
    assert all(one.header == packed.header for one in others)
    for one in takers:
        one.load(received(packed))
    return packed.payload_bytes


def bytes_of(state: LiveState) -> dict[str, list[float]]:
    return {name: one.flatten().tolist() for name, one in state.named_tensors().items()}


def test_what_newcomers_have_built_alike_is_not_sent() -> None:
    """Parameters that need no gradient, and buffers; then checkpoints hold neither. All workers
    have the same bytes."""
    first, *others = [worker() for _ in range(4)]
    with torch.no_grad():
        first.model[1].weight.fill_(5.0)
    sent = given([first], others)
    assert sent < 2000
    assert all(bytes_of(one) == bytes_of(first) for one in others)
    assert first.packed().payload_bytes == sent
    assert first.packed(whole=True).payload_bytes == sent + FROZEN_BYTES + LEAST
    assert {one.packed().header for one in others} == {first.packed().header}


def test_a_newcomer_that_has_built_something_else_receives_the_run_s() -> None:
    """Once the run has frozen content, that it is carried once does not end it."""
    first, second = worker(), worker()
    assert given([first], [second]) < 2000
    odd = worker(seed=1)
    assert FROZEN_BYTES < given([first, second], [odd]) < FROZEN_BYTES + 2000
    assert bytes_of(odd) == bytes_of(first)
    assert given([odd, first, second], [worker()]) < 2000


def test_what_comes_out_otherwise_in_each_process_is_no_frozen_content() -> None:
    """It is in the checkpoint, so a resumed run that draws it anew has it; the table stays out."""
    first, second = worker(seed=1), worker(seed=2)
    assert FROZEN_BYTES < given([first], [second]) < FROZEN_BYTES + 2000
    checkpoint, third = first.packed(), worker(seed=3)
    assert FROZEN_BYTES < checkpoint.payload_bytes < FROZEN_BYTES + 2000
    third.load(received(checkpoint))
    assert bytes_of(third) == bytes_of(first)


@pytest.mark.parametrize("seer", [0, 1, 2])
def test_what_was_changed_is_carried_from_then_on(seer: int) -> None:
    """Each worker looks at its share; a write to `.data`, and two values that change places, have
    no version. One worker that sees it is enough."""
    states = [worker() for _ in range(3)]
    given(states[:1], states[1:])
    weight = states[seer].model[0].weight.data
    weight[0, :2] = weight[0, :2].flip(0)
    for rank, one in enumerate(states):
        if rank != seer:
            one.model[0].weight.data.copy_(weight)
    reports = [one.frozen.report(one.named_tensors(), rank, 3) for rank, one in enumerate(states)]
    for one in states:
        one.frozen.agree(reports)
    assert {one.packed().header for one in states} == {states[0].packed().header}
    assert FROZEN_BYTES < states[0].packed().payload_bytes < FROZEN_BYTES + 2000
    newcomer = worker()
    assert FROZEN_BYTES < given(states, [newcomer]) < FROZEN_BYTES + 2000
    assert bytes_of(newcomer) == bytes_of(states[0])


def test_a_parameter_that_is_trained_later_is_carried() -> None:
    first, second = worker(), worker()
    given([first], [second])
    first.model[0].weight.requires_grad_(True)
    assert FROZEN_BYTES < first.packed().payload_bytes < FROZEN_BYTES + 2000


def test_a_checkpoint_of_another_base_is_refused_with_both_digests() -> None:
    first, second = worker(), worker()
    given([first], [second])
    checkpoint, other = first.packed(), worker(seed=1)
    before = bytes_of(other)
    digests = [json.loads(one.frozen.built(one.named_tensors()))["built"]["0.weight"]
               for one in (worker(), other)]
    with pytest.raises(LayoutError, match=f"0.weight have the SHA-256 {digests[0]} there, and "
                                          f"{digests[1]} in this"):
        other.load(received(checkpoint))
    assert bytes_of(other) == before
    smaller = LiveState(torch.nn.Linear(2, 1), torch.optim.SGD([torch.zeros(1)], 0.1))
    with pytest.raises(LayoutError):
        smaller.load(received(checkpoint))


def test_all_is_carried_where_that_was_asked_for() -> None:
    """`carry_frozen=True`, also for a run that began without it."""
    states = [worker(carries_all=True) for _ in range(2)]
    assert given(states[:1], states[1:]) > FROZEN_BYTES + LEAST
    assert states[0].frozen.run == {}
    first, second = worker(), worker()
    given([first], [second])
    later = worker(carries_all=True)
    later.load(received(first.packed()))
    assert later.packed().payload_bytes > FROZEN_BYTES + LEAST


def test_a_run_without_frozen_content_writes_what_it_has_written_before() -> None:
    model = torch.nn.Linear(SIDE, SIDE)
    state = LiveState(model, torch.optim.SGD(model.parameters(), 0.1))
    state.frozen.prove(state.named_tensors())
    assert not state.frozen.is_possible()
    assert "frozen" not in state.values()
    assert FrozenContent().absent(state.named_tensors()) == set()


def test_a_killed_worker_comes_back_and_the_run_resumes_without_the_base(
        tmp_path: Path, twin_of: Twin) -> None:
    """Real processes: neither the start, nor a newcomer, nor a checkpoint carries the base. With
    another base the run does not resume; with its own it does, with the twin's bits."""
    plan = Plan().kill(host="127.0.0.2", at="step.prepared", step=12)
    with Cluster(tmp_path, job=JOB, plan=plan) as cluster:
        cluster.wait_for("newcomer", lambda: len(cluster.events("worker.state_received")) == 4)
        cluster.wait_for("checkpoint", lambda: any(
            e["step"] >= 20 for e in cluster.events("state.checkpoint_published")))
        cluster.kill_everyone()
        received = [e["bytes"] for e in cluster.events("worker.state_received")]
        published = [e["bytes"] for e in cluster.events("state.checkpoint_published")]
    assert len(received) == 4 and len(published) >= 2
    assert max(*received, *published) < OF_JOB / 2
    with Cluster(tmp_path, job=(*JOB[:-1], "8")) as cluster:
        assert cluster.finish() == EXIT_USER_ERROR
        assert "the frozen weights 4.weight have the SHA-256" in (
            tmp_path / "output.log").read_text()
    with Cluster(tmp_path, job=JOB, plan=plan) as cluster:
        refused = len(cluster.lost()) - 1
        assert cluster.finish() == 0
        cluster.assert_nothing_lost(twin_of(*JOB), victims=1 + refused)


def test_a_base_that_the_loop_changes_loses_nothing(tmp_path: Path, twin_of: Twin) -> None:
    """Real processes: a newcomer after the change receives it; the checkpoint after it holds it."""
    job = (*JOB, "--iterator", "--frozen-changes-at", "8")
    plan = Plan().kill(host="127.0.0.2", at="step.prepared", step=12)
    with Cluster(tmp_path, job=job, plan=plan) as cluster:
        cluster.wait_for("newcomer", lambda: len(cluster.events("worker.state_received")) == 4)
        assert cluster.finish() == 0
        cluster.assert_nothing_lost(twin_of(*job), victims=1)
        received = [e["bytes"] for e in cluster.events("worker.state_received")]
        published = [e["bytes"] for e in cluster.events("state.checkpoint_published")]
    assert max(received[:3]) < OF_JOB / 2 < received[3]
    assert min(published[-2:]) > OF_JOB
