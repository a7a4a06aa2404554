"""The orders of an epoch: which sample stands where, and that every worker and run has the same."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import Cluster
from faults import Plan
from test_faults import host
from test_loop import DATA, SIZE, Ears, adamw, built, trained
from test_trainer import in_a_breaking_world, loop, trainer_of

from elastic_trainer import ConfigError, LikeLength, Loader, Mixture, Weighted
from elastic_trainer.schedule.order import (
    LEAST_BLOCK,
    SEQUENTIAL,
    SHUFFLED,
    Mixed,
    block_shares,
    known_by,
)
from elastic_trainer.schedule.schedule import Schedule
from elastic_trainer.state.values.layout import LayoutError
from elastic_trainer.views.verify import verify

pytestmark = pytest.mark.usefixtures("no_launcher")
LENGTHS = [7 * i % 100 for i in range(103)]


def schedule_of(order: Any, size: int = 103, **more: Any) -> Schedule:
    given: dict[str, Any] = {"global_batch": 10, "microbatches": 4, "epochs": 3, "seed": 5}
    return Schedule(dataset_size=order.epoch_size(size), order=order, **(given | more))


def batch_of(schedule: Schedule, step: int) -> list[int]:
    return [int(sample) for microbatch in range(schedule.microbatches)
            for sample in schedule.microbatch_samples(step, microbatch)]


def epoch_of(schedule: Schedule, epoch: int) -> list[int]:
    each = schedule.steps_per_epoch
    return [sample for step in range(epoch * each, (epoch + 1) * each)
            for sample in batch_of(schedule, step)]


def mixed(*sizes: int, weights: list[float], samples: int) -> Mixed:
    return Mixed(sizes, block_shares(weights), samples)


ORDERS = {"shuffled": SHUFFLED, "sequential": SEQUENTIAL,
          "weighted": Weighted(range(103)), "like_length": LikeLength(LENGTHS, window=3),
          "mixed": mixed(3, 100, weights=[1.0, 3.0], samples=103)}
PINNED = {"shuffled": "d44c26ab13be01ab", "sequential": "8df7ca87af00dc30",
          "weighted": "525517f4f4f8bbfd", "like_length": "bb78d2b959a0d5da",
          "mixed": "bd5076553b7fdd4e"}


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_is_the_same_on_every_machine(name: str) -> None:
    """A change breaks every run that has a checkpoint: the values were written down once."""
    schedule = schedule_of(ORDERS[name])
    samples = np.array([epoch_of(schedule, epoch) for epoch in range(3)], dtype="<i8")
    assert hashlib.sha256(samples.tobytes()).hexdigest()[:16] == PINNED[name]


@pytest.mark.parametrize("name", ORDERS)
def test_digests_of_microbatches_add_up_to_those_of_batches_and_epochs(name: str) -> None:
    """So a vote proves that each position counts once, and verify needs no table."""
    schedule = schedule_of(ORDERS[name])
    facts = {"order": name, "order_sha256": "ab"}
    told = Schedule(dataset_size=schedule.dataset_size, order=known_by(facts), global_batch=10,
                    microbatches=4, epochs=3, seed=5)
    for step in (0, 10, 11, 32):
        digest = sum(schedule.digest(step, dict(zip(some, schedule.samples_of(step, some),
                                                    strict=True)))
                     for some in (range(0, 0), range(0, 1), range(1, 4)))
        assert digest == schedule.batch_digest(step) == told.batch_digest(step)
    assert told.batch_digests(range(3)) == [schedule.batch_digest(step) for step in range(3)]


@pytest.mark.parametrize("name", ["shuffled", "sequential", "like_length"])
def test_each_sample_comes_once_in_an_epoch(name: str) -> None:
    """And in another place in the next one, but for the sequential order."""
    schedule = schedule_of(ORDERS[name])
    first, second = epoch_of(schedule, 0), epoch_of(schedule, 1)
    assert sorted(first) == sorted(second) == list(range(103))
    assert (first == second == list(range(103))) == (name == "sequential")


@pytest.mark.parametrize("name", ORDERS)
def test_a_position_has_its_sample_whatever_is_asked_before(name: str) -> None:
    """A resume in the middle of an epoch begins at a position."""
    whole = [batch_of(schedule_of(ORDERS[name]), step) for step in range(33)]
    for step in (32, 5, 17, 0):
        assert batch_of(schedule_of(ORDERS[name]), step) == whole[step]


def test_draws_have_the_weights_of_the_samples() -> None:
    """Also a sample without weight, which is never drawn; a chi-square test over 100,000 draws."""
    weights = [0.0, 1.0, 2.5, 0.5, 6.0]
    schedule = schedule_of(Weighted(weights, samples=100_000), size=5, global_batch=1000)
    counts = Counter(epoch_of(schedule, 0))
    expected = [weight * 10_000 for weight in weights]
    assert counts[0] == 0
    assert sum((counts[i] - expected[i])**2 / expected[i] for i in range(1, 5)) < 16.3  # p = 0.001
    assert Counter(epoch_of(schedule, 1)) != counts


def test_a_small_weight_beside_large_ones_is_drawn_now_and_then() -> None:
    """A weight above 0 is never rounded to 0."""
    order = Weighted([1e-30, 1.0])
    assert order._ends.tolist()[0] == 1


def test_the_samples_of_a_batch_have_like_lengths() -> None:
    """In windows of 50 batches each batch spans a few of 100 lengths; batches come in a drawn
    order; the short last batch spans many."""
    lengths = np.random.default_rng(0).integers(0, 100, 1005)
    schedule = schedule_of(LikeLength(lengths), size=1005)
    spans = [int(np.ptp(lengths[batch_of(schedule, step)])) for step in range(100)]
    assert max(spans) <= 10
    means = [float(lengths[batch_of(schedule, step)].mean()) for step in range(50)]
    assert means != sorted(means)
    assert len(batch_of(schedule, 100)) == 5


def test_drop_last_leaves_out_samples_of_all_lengths() -> None:
    """Else the longest samples would never be trained."""
    schedule = schedule_of(LikeLength(LENGTHS), drop_last=True, epochs=60)
    left = [LENGTHS[i] for epoch in range(60)
            for i in set(range(103)) - set(epoch_of(schedule, epoch))]
    assert len(left) == 180 and 30 < sum(left) / 180 < 70


def test_a_mixture_has_the_shares_of_its_weights_and_repeats_a_part_after_all_of_it() -> None:
    """In each block exactly; the third round of a small part is another permutation."""
    schedule = schedule_of(mixed(7, 5000, weights=[1, 3], samples=2 * LEAST_BLOCK), size=0,
                           global_batch=100)
    samples = epoch_of(schedule, 0) + epoch_of(schedule, 1)
    small = [sample for sample in samples if sample < 7]
    for block in range(4):
        part = samples[block * LEAST_BLOCK:(block + 1) * LEAST_BLOCK]
        assert sum(sample < 7 for sample in part) == LEAST_BLOCK // 4
    assert len(small) == LEAST_BLOCK and len(set(samples)) == 7 + 3 * LEAST_BLOCK
    # Within a block the positions of a part are drawn, so its rounds are whole over blocks.
    assert set(Counter(small).values()) <= {LEAST_BLOCK // 7, LEAST_BLOCK // 7 + 1}


def test_no_sample_of_a_mixture_is_lost_by_drop_last() -> None:
    """The next epoch goes on where the last one ended."""
    schedule = schedule_of(mixed(400, 600, weights=[2, 3], samples=1000 + 7), size=0,
                           drop_last=True)
    samples = epoch_of(schedule, 0)
    assert len(samples) == 1000 and sorted(samples) == list(range(1000))


@pytest.mark.parametrize("make", [
    lambda: Weighted([1, 2, float("nan")]), lambda: Weighted([1, -2]), lambda: Weighted([0, 0]),
    lambda: Weighted([]), lambda: Weighted([[1, 2]]), lambda: Weighted([1], samples=0),
    lambda: LikeLength([1.5, 2]), lambda: LikeLength([]), lambda: LikeLength([1], window=0),
    lambda: Mixture({}), lambda: Mixture({"a": [1]}, weights={"b": 1}),
    lambda: Mixture({"a": [1], "b": []}), lambda: Mixture({"a": [1]}, weights={"a": -1}),
    lambda: Mixture({"a": [1], "b": [1]}, weights={"a": 1, "b": 1e-9}),
    lambda: trainer_of(built(), order="random"), lambda: trainer_of(built(), order=[1, 0]),
    lambda: trainer_of(built(), order=Weighted([1.0])),
    lambda: trainer_of(built(), order=LikeLength([1, 2])),
    lambda: trainer_of(built(), dataset=Mixture({"a": DATA}), order="sequential"),
], ids=["nan", "negative", "all_zero", "empty", "matrix", "no_draw", "fractions", "no_length",
        "no_window", "no_dataset", "other_names", "empty_dataset", "negative_share", "tiny_share",
        "unknown", "list", "weights_of_others", "lengths_of_others", "two_orders"])
def test_orders_that_cannot_work_are_refused(make: Callable[[], Any]) -> None:
    """Before any work is done."""
    with pytest.raises(ConfigError):
        make()


def options_of(name: str) -> dict[str, Any]:
    weights = [1.0 + i % 3 for i in range(SIZE)]
    given: dict[str, dict[str, Any]] = {
        "sequential": {"order": "sequential"}, "weighted": {"order": Weighted(weights)},
        "like_length": {"order": LikeLength([i % 5 for i in range(SIZE)], window=2)},
        "mixed": {"dataset": Mixture({"a": DATA, "b": [DATA[0], DATA[1]]},
                                     weights={"a": 2, "b": 1})}}
    return given[name]


@pytest.mark.parametrize("name", ["sequential", "weighted", "like_length", "mixed"])
def test_the_bits_are_those_of_one_worker_in_every_world(
        name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a generation that breaks. train() and loader processes have the same bits."""
    def work(rank: int = 0) -> str:
        return loop(trainer_of(models[rank], **options_of(name)), models[rank])

    models = [built()]
    alone = work()
    assert trained(built(), **options_of(name)).weights_sha256 == alone
    assert loop(trainer_of(model := built(), loader=Loader(workers=1), **options_of(name)),
                model) == alone
    for size in (2, 4):
        models = [built() for _ in range(size)]
        assert in_a_breaking_world(monkeypatch, size, work) == [alone] * size


@pytest.mark.parametrize("name", ["sequential", "weighted", "like_length", "mixed"])
def test_a_run_goes_on_in_the_middle_of_an_epoch_and_is_proved(name: str, tmp_path: Path) -> None:
    """verify knows the positions; where they do not give the samples, it names the table."""
    alone = trained(built(), **options_of(name)).weights_sha256
    run_dir, ears = tmp_path / "run", Ears()
    trained(built(), run_dir=run_dir, until="2 steps", **options_of(name))
    end = trained(built(), run_dir=run_dir, listeners=[ears], **options_of(name))
    assert end.weights_sha256 == alone and ears.facts("state.checkpoint_restored")
    verdict = verify(run_dir)
    assert verdict.is_proved, verdict.sentences()
    notes = " ".join(verdict.sentences())
    assert ("SHA-256" in notes) == (name != "sequential")


def test_another_order_is_refused_when_a_run_is_resumed(run_dir: Path) -> None:
    """Also another table of the same kind: the samples that are left would be others."""
    trained(model := built(), adamw(model), until="2 steps", order=Weighted(range(1, SIZE + 1)))
    for other in ("shuffled", "sequential", Weighted(range(SIZE))):
        with pytest.raises(LayoutError, match="order"):
            trained(again := built(), adamw(again), order=other)


def test_a_mixture_reads_with_one_call_of_each_dataset_that_reads_many() -> None:
    """The samples come in the order in which they were asked for."""
    class Many:
        def __init__(self) -> None:
            self.calls: list[list[int]] = []

        def __len__(self) -> int:
            return 4

        def __getitems__(self, numbers: list[int]) -> list[str]:
            self.calls.append(numbers)
            return [f"many {number}" for number in numbers]

    many = Many()
    mixture: Any = Mixture({"a": ["x", "y"], "b": many})
    assert mixture.__getitems__([5, 0, 2, 1]) == ["many 3", "x", "many 0", "y"]
    assert many.calls == [[3, 0]] and len(mixture) == 6 and mixture[1] == "y"
    with pytest.raises(IndexError):
        mixture[6]
    assert not hasattr(Mixture({"a": ["x"]}), "__getitems__")


def test_no_bit_is_another_when_workers_of_a_weighted_mixture_die_and_join(
        tmp_path: Path, twin_of: Callable[..., str]) -> None:
    """verify proves each position of the mixture."""
    job = ("--steps", "40", "--mixture", "--step-s", "0.05")
    plan = Plan().kill(host=host(2), at="step.voted", step=12)
    with Cluster(tmp_path, hosts=5, start_with=4, job=job, plan=plan) as cluster:
        cluster.wait_for_step(3)
        cluster.set_hosts(cluster.all_hosts)
        cluster.wait_until_fired()
        assert cluster.finish() == 0
        cluster.assert_nothing_lost(twin_of(*job), victims=1)
        assert cluster.events("job.described")[0]["order"] == "mixed"


def test_torch_datasets_in_a_mixture_are_concatenated() -> None:
    """Numbers of samples are those of torch's ConcatDataset."""
    other: Any = torch.utils.data.ConcatDataset([DATA, DATA])
    mixture = Mixture({"a": DATA, "b": DATA})
    assert all(torch.equal(mixture[i][0], other[i][0]) for i in (0, SIZE - 1, SIZE, 2 * SIZE - 1))
