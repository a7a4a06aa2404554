"""Frozen content: what the training does not change neither joins nor checkpoints carry."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import TESTS, Cluster, weights_alone
from faults import Plan
from simulated import in_worlds
from test_state import received

from elastic_trainer.config import EXIT_USER_ERROR
from elastic_trainer.events.log import Events
from elastic_trainer.state.checkpoints.checkpoint import Plan as CheckpointPlan
from elastic_trainer.state.checkpoints.run_checkpoints import Checkpoints
from elastic_trainer.state.frozen import BLOCK, LEAST, OtherBase, sums_of
from elastic_trainer.state.live_state import LiveState, own_tensors
from elastic_trainer.state.stores.store import FolderStore
from elastic_trainer.state.values.layout import LayoutError
from elastic_trainer.world.revive import read_live_state, write_live_state
from elastic_trainer.world.transfer import Transfer

Twin = Callable[..., str]
SIDE = 128
FROZEN_BYTES = 4 * SIDE * SIDE
REST = 4000
"""In bytes: more than what is trained."""
JOB = ("--steps", "40", "--step-s", "0.05", "--checkpoint-every", "10", "--frozen", "7")
OF_JOB = 4 * 256 * 256
"""The bytes of its frozen layer."""
OF_BASE = 4 * 1000 * 64
"""The bytes of the embedding in the base of tests/jobs/lora.py."""


def worker(seed: int = 0, *, is_proved: bool = True, carries: str = "never") -> LiveState:
    """A process that has built a model whose first layer is a frozen base, drawn with a seed."""
    model = torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE, bias=False), torch.nn.Linear(SIDE, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(SIDE, SIDE,
                                          generator=torch.Generator().manual_seed(seed)))
        model[1].weight.fill_(float(seed))
    model[0].weight.requires_grad_(False)
    model[0].register_buffer("table", torch.arange(LEAST, dtype=torch.uint8))
    state = LiveState(model, torch.optim.SGD(model.parameters(), 0.1))
    state.frozen.carries = carries
    if is_proved and carries != "always":
        state.frozen.prove(own_tensors(state))
    return state


def meet(states: Sequence[LiveState]) -> None:
    """Begin a generation: all learn whether reports are gathered (generations.py)."""
    statuses = [state.frozen.status() for state in states]
    for state in states:
        state.frozen.meet(statuses)


def move(givers: Sequence[LiveState], takers: Sequence[LiveState]) -> int:
    """Let workers give others the state, by a transfer; return the bytes of its tensors."""
    states = [*givers, *takers]
    for state in givers:
        state.has_state = True
    meet(states)
    told = list[int]()

    class Told(Events):
        def emit(self, event: str, **facts: Any) -> None:
            told.append(facts["bytes"])

    in_worlds(len(states), lambda member: Transfer(
        member, Told(None), list, lambda *_: None).move(
            states[member.rank], list(range(len(givers)))))
    assert len({bytes(str(tensors_of(one)), "ascii") for one in states}) == 1
    return max(told)


def tensors_of(state: LiveState) -> dict[str, list[float]]:
    return {name: one.flatten().tolist()
            for name, one in own_tensors(state, persistent=False).items()}


def change(*states: LiveState) -> None:
    """Change two values of the base as a script may: no version counts a write to `.data`."""
    for state in states:
        weight = state.model[0].weight.data
        weight[0, :2] = weight[0, :2].flip(0)


class Store:
    """One store, and the workers of one attempt on it."""

    def __init__(self, root: Path):
        self.root = root

    def attempt(self, states: Sequence[LiveState]) -> list[tuple[Any, Any]]:
        """Restore on all workers; returns the step, or the error, and the Checkpoints of each."""
        meet(states)

        def act(member: Any) -> tuple[Any, Any]:
            checkpoints = Checkpoints(FolderStore(self.root), lambda *_, **__: None,
                                      CheckpointPlan(part_bytes=1 << 14))
            try:
                return checkpoints.restore(states[member.rank], member), checkpoints
            except LayoutError as error:
                return error, checkpoints

        return in_worlds(len(states), act)

    def publish(self, workers: Sequence[Any], states: Sequence[LiveState]) -> int:
        """Commit a step, and publish it; return the bytes of its tensors."""
        meet(states)

        def act(member: Any) -> int:
            state, checkpoints = states[member.rank], workers[member.rank]
            state.commit(8, 1)
            absent = checkpoints.leave_out(state, member)
            checkpoints.compare_tensors(state, member, absent)
            checkpoints.begin(state, member.rank, member.size, absent=absent)
            checkpoints.wait()
            checkpoints.tick()
            assert checkpoints.progress() == (True, False)
            size = checkpoints.upload.share.total_bytes
            texts = member.gather_texts(checkpoints.parts_up())
            checkpoints.collect(texts, publish=member.rank == 0)
            checkpoints.wait()
            return int(size)

        [size] = set(in_worlds(len(states), act))
        return int(size)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def begun(store: Store, size: int = 2) -> tuple[list[LiveState], list[Any]]:
    """A run of workers that have built the same base, and their Checkpoints."""
    states = [worker() for _ in range(size)]
    workers = [checkpoints for _, checkpoints in store.attempt(states)]
    move(states[:1], states[1:])
    for state in states:
        state.lineage = states[0].lineage
    return states, workers


# --- what is left out -----------------------------------------------------------------------------

def test_what_no_script_has_changed_is_known_as_unchanged_in_each_new_process() -> None:
    """Threads make the proofs. Each had drawn multipliers of its own at the first use."""
    script = ("import torch; from elastic_trainer.state.frozen import FrozenContent; "
              "base = {f'{n}': torch.full((1 << 18,), float(n)) for n in range(8)}; "
              "content = FrozenContent(); content.carries = 'never'; content.prove(base); "
              "print(len(content.now(base)))")
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                              check=True).stdout.strip() == "8"


def test_neither_newcomers_nor_checkpoints_have_what_all_have_built_alike(store: Store) -> None:
    """1 worker, then 4: parameters that need no gradient, and buffers. All have the same bytes."""
    states, workers = begun(store, 4)
    newcomers = [worker() for _ in range(3)]
    states[0].model[1].weight.data.fill_(5.0)
    for state in states[1:]:
        state.load(received(states[0].packed()))
    assert move(states, newcomers) < REST
    assert store.publish(workers, states) < REST
    assert states[0].packed().payload_bytes > FROZEN_BYTES + LEAST
    again = [worker()]
    assert [step for step, _ in store.attempt(again)] == [1]
    assert tensors_of(again[0]) == tensors_of(states[0])


def test_a_newcomer_that_has_built_something_else_receives_the_runs() -> None:
    """Once the run has frozen content, that it is carried once does not end it. The receiver looks
    at its own bytes from then on."""
    first, second, odd = worker(), worker(), worker(seed=1)
    assert move([first], [second]) < REST
    assert FROZEN_BYTES < move([first, second], [odd]) < FROZEN_BYTES + REST
    assert move([odd, first, second], [worker()]) < REST
    change(odd, first, second)
    assert FROZEN_BYTES < move([odd, first, second], [worker()]) < FROZEN_BYTES + REST


def test_what_comes_out_otherwise_in_each_process_is_in_the_checkpoint(store: Store) -> None:
    """So a resumed run that draws it anew has it; the table stays out."""
    first, second, third = (worker(seed) for seed in range(3))
    workers = [checkpoints for _, checkpoints in store.attempt([first, second])]
    assert FROZEN_BYTES < move([first], [second]) < FROZEN_BYTES + REST
    assert FROZEN_BYTES < store.publish(workers, [first, second]) < FROZEN_BYTES + REST
    assert store.attempt([third])[0][0] == 1
    assert tensors_of(third) == tensors_of(first)


def test_a_worker_alone_leaves_out_what_two_have_built_and_nothing_else(store: Store) -> None:
    """A world of one that another worker has never joined carries all. One that is the last of its
    world goes on without the base, also if it writes alone."""
    lonely = worker()
    workers = [checkpoints for _, checkpoints in store.attempt([lonely])]
    lonely.has_state = True
    assert store.publish(workers, [lonely]) > FROZEN_BYTES + LEAST
    move([lonely], [worker()])
    assert store.publish(workers, [lonely]) < REST
    change(lonely)
    lonely.commit(8, 1)
    workers[0].write_alone(lonely)
    assert workers[0].known.newest_step == 3
    fresh = worker()
    assert store.attempt([fresh])[0][0] == 3
    assert tensors_of(fresh) == tensors_of(lonely)


# --- what changes ---------------------------------------------------------------------------------

@pytest.mark.parametrize("seer", [0, 1, 2])
def test_what_was_changed_is_carried_from_then_on(store: Store, seer: int) -> None:
    """Each worker looks at its part, before each transfer and each checkpoint."""
    states, workers = begun(store, 3)
    states, workers = states[seer:] + states[:seer], workers[seer:] + workers[:seer]
    store.publish(workers, states)
    change(*states)
    assert FROZEN_BYTES < store.publish(workers, states) < FROZEN_BYTES + REST
    assert FROZEN_BYTES < move(states, [worker()]) < FROZEN_BYTES + REST
    fresh = worker()
    assert store.attempt([fresh])[0][0] == 2
    assert tensors_of(fresh) == tensors_of(states[0])


def test_exchanges_of_words_rows_and_signs_are_found() -> None:
    """Also those that leave the sums of rows and of columns as they are."""
    base = torch.randn(4 * BLOCK // SIDE, SIDE)
    base[:SIDE] = torch.eye(SIDE)
    changes: list[Callable[[torch.Tensor], Any]] = [
        lambda one: one[:SIDE].copy_(torch.eye(SIDE)[torch.randperm(SIDE)]),
        lambda one: one[:2].copy_(one[:2].flip(0)),
        lambda one: one.view(4, -1).copy_(one.view(4, -1).flip(0).clone()),
        lambda one: one[5].neg_(),
        lambda one: one[-1, -1:].view(torch.int32).bitwise_xor_(1)]
    before = sums_of(base)
    assert sums_of(base.clone()) == before
    assert sums_of(base.view(torch.int32)) != before and sums_of(base.view(-1)) != before
    for act in changes:
        changed = base.clone()
        act(changed)
        assert sums_of(changed) != before
    assert sums_of(torch.arange(9, dtype=torch.uint8)[1:]) == sums_of(
        torch.arange(1, 9, dtype=torch.uint8))  # wherever it lies


def test_a_parameter_that_is_trained_later_is_carried(store: Store) -> None:
    """Gradual unfreezing: at the next checkpoint, whatever its bytes are."""
    states, workers = begun(store)
    store.publish(workers, states)
    for state in states:
        state.model[0].weight.requires_grad_(True)
    assert FROZEN_BYTES < store.publish(workers, states) < FROZEN_BYTES + REST


def test_a_process_that_has_changed_the_base_does_not_go_back_with_it(store: Store) -> None:
    """The checkpoint lacks it, and so does the process: only a new one has it. That one gives it
    to the others."""
    states, workers = begun(store)
    store.publish(workers, states)
    as_published = tensors_of(states[0])
    change(*states)
    before = tensors_of(states[0])
    [first, second] = [found for found, _ in store.attempt(states)]
    assert isinstance(first, OtherBase) and isinstance(second, OtherBase)
    assert tensors_of(states[0]) == before  # nothing is loaded
    fresh = worker()
    [first, second] = [found for found, _ in store.attempt([states[0], fresh])]
    assert (first, second) == (1, 1) and tensors_of(fresh) == as_published
    assert tensors_of(states[0]) == before
    assert FROZEN_BYTES < move([fresh], states[:1]) and tensors_of(states[0]) == as_published


def test_a_change_is_found_after_a_restart_in_place_too(store: Store) -> None:
    """The process leaves all of its state, and nobody has looked before."""
    states, workers = begun(store)
    change(*states)
    successors = [worker() for _ in states]
    for state, successor in zip(states, successors, strict=True):
        state.has_state = True
        memory = write_live_state(state, {}, {})
        assert memory is not None
        values = read_live_state(memory)
        assert values is not None
        successor.take_up(values["state"], values["in_flight"])
        assert tensors_of(successor) == tensors_of(state)
    assert FROZEN_BYTES < store.publish(workers, successors) < FROZEN_BYTES + REST
    assert FROZEN_BYTES < move(successors, [worker()]) < FROZEN_BYTES + REST


def test_a_worker_reports_no_digest_of_what_it_had_before_it_received_the_state() -> None:
    """The base of the first was random, so it is no frozen content of the run. The second and the
    newcomer have built the same one, and the second has it no more."""
    first, second = worker(seed=1), worker()
    move([first], [second])
    assert FROZEN_BYTES < move([second], [worker()]) < FROZEN_BYTES + REST
    assert "0.weight" not in second.frozen.now(own_tensors(second))


# --- workers that differ --------------------------------------------------------------------------

@pytest.mark.parametrize("rank", [0, 1])
def test_no_worker_waits_when_workers_differ_in_what_may_be_frozen(store: Store, rank: int) -> None:
    """One has no frozen content, or carries all, or knows of another past than the others."""
    for odd in (worker(carries="always"), worker(carries="checkpoints"),
                worker(is_proved=False)):
        states = [worker(), worker(), odd]
        move(states[:1], states[1:])
        states = [states[2], *states[:2]] if rank == 0 else states
        workers = [checkpoints for _, checkpoints in store.attempt(states)]
        store.publish(workers, states)
        move(states, [worker()])
        fresh = worker()
        assert isinstance(store.attempt([fresh])[0][0], int)
        assert tensors_of(fresh) == tensors_of(states[0])
    states, workers = begun(store, 3)
    states[rank].frozen.run = {}  # it was not there when the others agreed
    store.publish(workers, states)
    move(states, [worker()])
    assert len({json.dumps(state.frozen.run) for state in states}) == 1
    assert store.publish(workers, states) < REST


def test_what_one_worker_knows_of_the_run_all_know_after_a_transfer() -> None:
    """The worker that had built the same has left, and the one that built it was not there when
    the others agreed."""
    first, second, odd = worker(), worker(), worker(seed=1)
    move([first], [second])
    move([first, second], [odd])
    first.frozen.run = {}
    move([first, odd], [worker(seed=2)])
    assert set(first.frozen.run) == set(odd.frozen.run) == {"0.weight", "0.table"}


def test_a_host_with_another_base_receives_it_in_a_restore(store: Store) -> None:
    """Those that have it load the checkpoint, and give it."""
    states, workers = begun(store)
    store.publish(workers, states)
    later = [worker(seed=3), worker(), worker()]
    assert [step for step, _ in store.attempt(later)] == [1, 1, 1]
    assert [state.has_state for state in later] == [False, True, True]
    assert FROZEN_BYTES < move(later[1:], later[:1])
    assert tensors_of(later[0]) == tensors_of(states[0])


def test_another_base_is_refused_with_both_digests_and_no_older_checkpoint_is_taken(
        store: Store) -> None:
    """Here the checkpoint before it holds all. It stays, and so does the newest one."""
    first, second = worker(), worker()
    workers = [checkpoints for _, checkpoints in store.attempt([first])]
    first.has_state = True
    store.publish(workers, [first])
    move([first], [second])
    store.publish(workers, [first])
    other = worker(seed=1)
    before = tensors_of(other)
    digests = [one.frozen.now(own_tensors(one))["0.weight"] for one in (first, other)]
    [(found, _)] = store.attempt([other])
    assert isinstance(found, OtherBase)
    assert f"0.weight are {digests[0]} there, and {digests[1]} in this" in str(found)
    assert tensors_of(other) == before
    fresh = worker()
    assert store.attempt([fresh])[0][0] == 2 and tensors_of(fresh) == tensors_of(first)
    packed = first.packed(absent=first.frozen.kept(own_tensors(first)))
    with pytest.raises(LayoutError, match="0.weight are"):
        other.load(received(packed))
    assert tensors_of(other) == before
    smaller = LiveState(torch.nn.Linear(2, 1), torch.optim.SGD([torch.zeros(1)], 0.1))
    with pytest.raises(LayoutError):
        smaller.load(received(packed))


# --- what is not frozen content -------------------------------------------------------------------

def test_a_newcomer_trains_what_the_run_trains(store: Store) -> None:
    """Also of tensors that do not travel: whether they require a gradient is the run's."""
    states, workers = begun(store)
    store.publish(workers, states)
    later = worker(is_proved=False)
    later.model[0].weight.requires_grad_(True)  # the script has another idea now
    assert store.attempt([later])[0][0] == 1
    assert not later.model[0].weight.requires_grad
    assert tensors_of(later) == tensors_of(states[0])


def test_buffers_that_are_not_persistent_travel() -> None:
    """Tables that each machine computes may have other bits on another one."""
    states = [worker() for _ in range(2)]
    for state in states:
        state.model[1].register_buffer("angles", torch.zeros(LEAST), persistent=False)
        state.model_buffers.take()
        state.frozen.prove(own_tensors(state))
    assert 4 * LEAST < move(states[:1], states[1:]) < 4 * LEAST + REST


def test_modules_that_are_replaced_and_parameters_without_values_are_no_errors() -> None:
    state = worker()
    state.model[0] = torch.nn.Linear(SIDE, SIDE, bias=False)
    assert "0.weight" not in state.frozen.now(own_tensors(state))
    state.model[0] = torch.nn.Identity()
    assert "0.weight" not in state.frozen.now(own_tensors(state))
    state.frozen.prove({"lazy": torch.nn.UninitializedParameter(requires_grad=False),
                        "buffer": torch.nn.UninitializedBuffer(),
                        "meta": torch.empty(LEAST, device="meta")})
    assert not state.frozen.status() & 1


def test_tied_weights_and_views_of_trained_ones_are_whole() -> None:
    """A tie is left out once. A buffer that shares memory with a trained weight changes with it."""
    states = [worker() for _ in range(3)]
    for state in states:
        state.model.append(torch.nn.Linear(SIDE, SIDE, bias=False))
        state.model[2].weight = state.model[0].weight
        state.model[1].register_buffer("seen", torch.ones(LEAST))
        state.model[1].weight = torch.nn.Parameter(state.model[1].seen[:SIDE].view(1, SIDE))
    states = [LiveState(state.model, torch.optim.SGD(state.model.parameters(), 0.1))
              for state in states]
    for state in states:
        state.frozen.prove(own_tensors(state))
    assert move(states[:1], states[1:2]) < REST
    for state in states[:2]:
        state.model[1].weight.data.mul_(3)
    assert 4 * LEAST < move(states[:2], states[2:]) < 4 * LEAST + REST
    assert states[2].model[2].weight is states[2].model[0].weight


def test_checkpoints_hold_all_and_transfers_do_not_unless_it_was_asked_for(store: Store) -> None:
    """So an attempt needs nothing but the store."""
    states = [worker(carries="checkpoints") for _ in range(2)]
    workers = [checkpoints for _, checkpoints in store.attempt(states)]
    assert move(states[:1], states[1:]) < REST
    assert store.publish(workers, states) > FROZEN_BYTES + LEAST
    states[0].commit(8, 1)
    workers[0].write_alone(states[0])
    other = worker(seed=1)
    assert store.attempt([other])[0][0] == 2
    assert tensors_of(other) == tensors_of(states[0])


def test_all_is_carried_where_that_was_asked_for(tmp_path: Path, store: Store) -> None:
    """`carry_frozen="always"`, also for a run that began without it. These checkpoints are as
    older versions have written them, and a run without it goes on from them."""
    states, old = [worker(carries="always") for _ in range(2)], Store(tmp_path / "old")
    workers = [checkpoints for _, checkpoints in old.attempt(states)]
    assert move(states[:1], states[1:]) > FROZEN_BYTES + LEAST
    assert not states[0].frozen.is_shared and "frozen" not in states[0].values()
    change(*states)
    assert old.publish(workers, states) > FROZEN_BYTES + LEAST
    fresh = [worker() for _ in range(2)]
    workers = [checkpoints for _, checkpoints in old.attempt(fresh)]
    assert tensors_of(fresh[0]) == tensors_of(fresh[1]) == tensors_of(states[0])
    assert FROZEN_BYTES < old.publish(workers, fresh)
    begun_states, workers = begun(store)
    store.publish(workers, begun_states)
    later = [worker(carries="always")]
    workers = [checkpoints for _, checkpoints in store.attempt(later)]
    assert store.publish(workers, later) > FROZEN_BYTES + LEAST
    assert tensors_of(later[0]) == tensors_of(begun_states[0])


def test_a_run_without_frozen_content_writes_what_it_has_written_before() -> None:
    model = torch.nn.Linear(SIDE, SIDE)
    state = LiveState(model, torch.optim.SGD(model.parameters(), 0.1))
    state.frozen.prove(own_tensors(state))
    assert not state.frozen.status() and "frozen" not in state.values()


# --- real processes -------------------------------------------------------------------------------

def test_a_killed_worker_comes_back_and_the_run_resumes_without_the_base(
        tmp_path: Path, twin_of: Twin) -> None:
    """Neither the start, nor a newcomer, nor a checkpoint carries the base. With another base the
    run does not resume; with its own it does, with the twin's bits."""
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
        assert "the frozen weights 4.weight are float32 (256, 256) with the SHA-256" in (
            tmp_path / "output.log").read_text()
    with Cluster(tmp_path, job=JOB, plan=plan) as cluster:
        refused = len(cluster.lost()) - 1
        assert cluster.finish() == 0
        cluster.assert_nothing_lost(twin_of(*JOB), victims=1 + refused)


@pytest.mark.parametrize("carry", ["never", "checkpoints"])
def test_adapters_of_peft_lose_nothing_when_a_worker_is_killed(tmp_path: Path, carry: str) -> None:
    """4 workers, of which one is killed: its successor, and all checkpoints, hold the adapters
    alone. The weights are those of one process, bit for bit."""
    pytest.importorskip("peft")
    job = [sys.executable, str(TESTS / "jobs" / "lora.py"), "30", carry, "small"]
    plan = Plan().kill(host="127.0.0.3", at="step.prepared", step=12)
    with Cluster(tmp_path, command=job, plan=plan) as cluster:
        cluster.wait_for("newcomer", lambda: len(cluster.events("worker.state_received")) == 4)
        assert cluster.finish() == 0
        cluster.assert_nothing_lost(weights_alone(job, tmp_path), victims=1)
        received = [e["bytes"] for e in cluster.events("worker.state_received")]
        published = [e["bytes"] for e in cluster.events("state.checkpoint_published")]
    assert max(received) < OF_BASE / 2
    assert max(published) < OF_BASE / 2 if carry == "never" else min(published) > OF_BASE


@pytest.mark.parametrize("how", [
    (), ("--phases",), *(pytest.param(how, marks=pytest.mark.long)
                         for how in (("--ema", "--evaluate"), ("--compile",)))])
def test_a_base_that_the_loop_changes_loses_nothing(
        tmp_path: Path, twin_of: Twin, how: tuple[str, ...]) -> None:
    """A newcomer after the change receives it; the checkpoint after it holds it."""
    job = (*JOB, "--iterator", *how, "--frozen-changes-at", "8")
    plan = Plan().kill(host="127.0.0.2", at="step.prepared", step=12)
    with Cluster(tmp_path, job=job, plan=plan) as cluster:
        cluster.wait_for("newcomer", lambda: len(cluster.events("worker.state_received")) == 4)
        assert cluster.finish() == 0
        cluster.assert_nothing_lost(twin_of(*job), victims=1)
        received = [e["bytes"] for e in cluster.events("worker.state_received")]
        published = [e["bytes"] for e in cluster.events("state.checkpoint_published")]
    assert min(received[3:]) > OF_JOB and min(published[-2:]) > OF_JOB
    assert "--ema" in how or max(received[:3]) < OF_JOB / 2


def test_a_run_that_goes_back_builds_anew_what_it_has_changed_since(
        tmp_path: Path, twin_of: Twin) -> None:
    """The checkpoint of step 10 lacks the base, the loop changes it after step 12, and a bit flips
    in step 15: two workers have no majority. New processes go on, with the twin's bits."""
    job = (*JOB, "--iterator", "--frozen-changes-at", "12")
    plan = Plan().add("flip_weight", host="127.0.0.2", at="step.prepared", step=15)
    with Cluster(tmp_path, hosts=2, job=job, plan=plan) as cluster:
        cluster.wait_until_fired()
        assert cluster.finish() == 0
        cluster.assert_nothing_lost(twin_of(*job), victims=0)
        restored = cluster.events("state.checkpoint_restored")
    assert {e["step"] for e in restored} == {10}


def test_a_giver_that_is_killed_in_a_transfer_leaves_no_half_of_the_base(
        tmp_path: Path, twin_of: Twin) -> None:
    """A newcomer joins after the change, and one that gives it the base dies meanwhile."""
    job = (*JOB, "--iterator", "--frozen-changes-at", "8")
    plan = (Plan().kill(host="127.0.0.2", at="step.prepared", step=12)
            .kill(host="127.0.0.3", at="world.transfer_started", after=1, is_giver=True))
    with Cluster(tmp_path, job=job, plan=plan) as cluster:
        cluster.wait_until_fired(2)
        assert cluster.finish() == 0
        cluster.assert_nothing_lost(twin_of(*job), victims=2)
