"""The laws of schedule: what happens at a step follows from job and step. Numbers as in its head
comment."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from elastic_trainer.config import ConfigError
from elastic_trainer.schedule.permutation import permute
from elastic_trainer.schedule.schedule import (
    MAX_GLOBAL_BATCH,
    Schedule,
    aligned_subtrees,
    owned_microbatches,
    samples_digest,
)

BILLION = Schedule(dataset_size=10**9, global_batch=4096, microbatches=16, epochs=3, seed=7)


@some.composite
def small_schedules(draw):
    global_batch = draw(some.integers(1, 50))
    return Schedule(dataset_size=draw(some.integers(1, 200)), global_batch=global_batch,
                    microbatches=draw(some.integers(1, global_batch)),
                    epochs=draw(some.integers(1, 3)), seed=draw(some.integers(0, 2**64 - 1)))


def permutation(size, key=0):
    return permute(np.arange(size), size, key)


def chi_square_sigmas(counts):
    """How many standard deviations the counts are away from what equal chances give."""
    freedom = counts.size - 1
    return (((counts - counts.mean())**2).sum() / counts.mean() - freedom) / math.sqrt(2 * freedom)


# ---- the permutation


def test_every_place_is_taken_once_when_size_is_anything_from_1_to_3000():
    """The permutation is a bijection on range(size)."""
    for size in range(1, 3001):
        assert (np.bincount(permutation(size, key=size), minlength=size) == 1).all(), size


@pytest.mark.parametrize("size", [4095, 4096, 4097, 2**16, 2**18 + 1, 1_281_167])
def test_every_place_is_taken_once_when_size_is_at_an_edge(size):
    """It stays one where the number of rounds changes, at squares and beside them."""
    assert (np.bincount(permutation(size, key=3), minlength=size) == 1).all()


@pytest.mark.parametrize("size", [10**9, 10**9 + 7, 2**32, 2**40 - 1, 2**40, 2**48])
def test_no_place_is_taken_twice_when_size_is_a_billion_and_more(size):
    """Positions from the start, the middle and the end go to different places, all of them in
    range(size)."""
    middle = size // 2
    positions = np.concatenate(
        [np.arange(start, start + 30_000) for start in (0, middle, size - 30_000)])
    places = permute(positions, size, key=11)
    assert 0 <= places.min() and places.max() < size
    assert np.unique(places).size == positions.size


@given(some.integers(1, 2**48), some.integers(0, 2**64 - 1), some.data())
def test_a_position_has_one_place_when_asked_alone_or_in_company(size, key, data):
    """A place depends on the position, the size and the key, not on what else is asked for (law
    1)."""
    positions = np.array(data.draw(some.lists(some.integers(0, size - 1), max_size=8)),
                         dtype=np.int64)
    together = permute(positions, size, key)
    assert together.dtype == np.int64
    alone = [permute(positions[i : i + 1], size, key) for i in range(positions.size)]
    assert [place for one in alone for place in one.tolist()] == together.tolist()


def test_bits_stay_the_same_when_numpy_or_the_machine_changes():
    """A run goes on over an upgrade only if places, seeds and digests are these literal values (law
    5)."""
    assert permutation(10, key=1).tolist() == [1, 3, 7, 9, 4, 2, 0, 8, 5, 6]
    assert permute(np.array([0, 1, 10**9 - 1]), 10**9,
                   2**64 - 1).tolist() == [877482834, 768345563, 33787519]
    assert BILLION.microbatch_samples(123_456, 5)[:3].tolist() == [504441045, 314395197, 729487399]
    assert BILLION.microbatch_seed(123_456, 5) == 7334135087408159076
    assert BILLION.batch_digest(123_456) == 2277664892342191


def test_inputs_are_untouched_when_permuted_or_digested():
    """The functions are pure: they work on copies."""
    positions = np.arange(100)
    permute(positions, 100, 5)
    samples_digest(positions)
    assert (positions == np.arange(100)).all()


@pytest.mark.parametrize("position", [-1, 10])
def test_it_refuses_when_a_position_is_outside_the_dataset(position):
    """A position outside range(size) is our mistake; without the check it could walk for ever."""
    with pytest.raises(AssertionError, match="outside"):
        permute(np.array([position]), 10, 0)


@pytest.mark.parametrize("size", [3, 5, 8, 13])
def test_pairs_of_places_are_equally_likely_when_the_size_is_small(size):
    """Over many keys neighbours land on each ordered pair of places equally often, within 5
    sigma."""
    places = np.array([permutation(size, key) for key in range(2500)])
    off_diagonal = ~np.eye(size, dtype=bool)
    for left, right in ((0, 1), (size // 2, size // 2 + 1), (size - 2, size - 1)):
        counts = np.bincount(places[:, left] * size + places[:, right], minlength=size * size)
        assert abs(chi_square_sigmas(counts.reshape(size, size)[off_diagonal])) < 5, (left, right)


@pytest.mark.parametrize("size", [4096, 10**6, 10**9, 2**40])
def test_no_structure_shows_when_neighbours_are_compared(size):
    """Places, distances between neighbours, rows and columns and low bits look like a fair
    shuffle's."""
    places = permute(np.arange(min(size, 200_000)), size, key=17)
    columns = -(-size // (math.isqrt(size - 1) + 1))
    seen = {"low bits of neighbours": np.bincount(places[:-1] % 8 * 8 + places[1:] % 8)}
    if size > places.size:
        seen["places"] = np.histogram(places, bins=np.linspace(0, size, 101))[0]
    for apart in {1, 2, min(columns, 1000)}:
        distances = (places[apart:] - places[:-apart]) % size
        seen[f"distance over {apart}"] = np.histogram(distances, bins=np.linspace(0, size, 101))[0]
    assert {what: s for what, counts in seen.items() if (s := chi_square_sigmas(counts)) > 5} == {}


def test_orders_are_unrelated_when_epoch_or_seed_changes():
    """Another epoch, or another seed, is another order: about one position in common, as by
    chance."""
    job = dict(dataset_size=2000, global_batch=2000, microbatches=1, epochs=3)
    schedules = [Schedule(**job, seed=seed) for seed in (0, 1, 2**63)]
    orders = [schedule.microbatch_samples(epoch, 0) for schedule in schedules for epoch in range(3)]
    for i, one in enumerate(orders):
        assert all((one == other).sum() < 10 for other in orders[:i])


# ---- steps, batches, microbatches


@given(small_schedules())
def test_every_sample_counts_once_when_an_epoch_is_walked_by_microbatches(schedule):
    """The micro-batches of an epoch's steps are the dataset, each sample once, the short last batch
    too (law 3)."""
    for epoch in range(schedule.epochs):
        steps = range(epoch * schedule.steps_per_epoch, (epoch + 1) * schedule.steps_per_epoch)
        assert {schedule.epoch(step) for step in steps} == {epoch}
        parts = [
            schedule.microbatch_samples(step, microbatch) for step in steps
            for microbatch in range(schedule.microbatches)
        ]
        assert sorted(np.concatenate(parts).tolist()) == list(range(schedule.dataset_size))


@given(small_schedules(), some.integers(0, 1000))
def test_microbatches_are_the_batch_when_a_step_is_split(schedule, step):
    """The micro-batches of a step are neighbours, differ by at most one sample, and together are
    the batch."""
    parts = [schedule.microbatch_positions(step, microbatch)
             for microbatch in range(schedule.microbatches)]
    start = step % schedule.steps_per_epoch * schedule.global_batch
    batch = range(start, start + schedule.batch_size(step))
    assert [position for part in parts for position in part] == list(batch)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert sum(schedule.microbatch_weight(step, microbatch)
               for microbatch in range(schedule.microbatches)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("dataset_size", "microbatches", "fewest", "sizes"),
    [
        (14, 4, 1, [1, 2, 1, 2]),  # as it always was
        (14, 4, 2, [0, 2, 2, 2]),
        (13, 4, 2, [0, 1, 2, 2]),
        (12, 3, 2, [0, 2, 2]),
        (11, 4, 2, [0, 1, 0, 2]),  # one of 3 samples would be larger than a full batch's
        (9, 4, 2, [0, 0, 0, 1]),
        (10, 3, 1, [0, 1, 1]),
    ],
)
def test_the_last_batch_has_fewer_microbatches_when_they_would_be_too_small(
        dataset_size, microbatches, fewest, sizes):
    """They are merged by a rule of the numbers alone, spread over all micro-batches, none larger
    than in a full batch."""
    schedule = Schedule(dataset_size=dataset_size, global_batch=8, microbatches=microbatches,
                        epochs=1, seed=0, min_microbatch_samples=fewest)
    assert [len(schedule.microbatch_samples(1, microbatch))
            for microbatch in range(microbatches)] == sizes


@given(small_schedules(), some.integers(1, 5))
def test_no_microbatch_is_larger_or_smaller_than_allowed_when_the_last_batch_is_merged(schedule,
                                                                                       fewest):
    """Full batches stay as they are; every sample counts once; the memory of a micro-batch is that
    of a full batch's."""
    fewest = min(fewest, schedule.global_batch // schedule.microbatches)
    merged = replace(schedule, min_microbatch_samples=fewest)
    largest = -(-schedule.global_batch // schedule.microbatches)
    for step in range(schedule.steps_per_epoch):
        parts = [merged.microbatch_positions(step, microbatch)
                 for microbatch in range(merged.microbatches)]
        plain = [schedule.microbatch_positions(step, microbatch)
                 for microbatch in range(schedule.microbatches)]
        assert [p for part in parts for p in part] == [p for part in plain for p in part]
        assert max(map(len, parts)) <= largest
        if schedule.batch_size(step) == schedule.global_batch or min(
                len(p) or fewest for p in plain) >= fewest:
            assert parts == plain
        if (left := schedule.batch_size(step)) // fewest * largest >= left:
            assert min(len(part) or fewest for part in parts) >= fewest
    sizes = {
        len(merged.microbatch_positions(step, v))
        for step in range(merged.steps)
        for v in range(merged.microbatches)
    }
    assert merged.smallest_microbatch == min(sizes - {0})


def test_other_samples_are_left_out_in_each_epoch_when_the_last_batch_is_dropped():
    """22 samples in batches of 8 are 2 steps an epoch; digests of what counts and what is left out
    are the dataset's."""
    schedule = Schedule(dataset_size=22, global_batch=8, microbatches=4, epochs=2, seed=3,
                        drop_last=True)
    assert (schedule.steps, schedule.steps_per_epoch, schedule.dropped_samples) == (4, 2, 6)
    assert [schedule.batch_size(step) for step in range(4)] == [8] * 4
    epochs = (0, 1), (2, 3)
    kept = [{
        i
        for step in steps
        for v in range(4)
        for i in schedule.microbatch_samples(step, v).tolist()
    } for steps in epochs]
    assert [len(samples) for samples in kept] == [16, 16] and kept[0] != kept[1]
    for epoch in (0, 1):
        counted = sum(schedule.batch_digest(2 * epoch + i) for i in (0, 1))
        assert counted + schedule.dropped_digest(epoch) == samples_digest(np.arange(22))
    even = replace(schedule, dataset_size=16)
    assert (even.steps, even.dropped_samples, even.dropped_digest(0)) == (4, 0, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop_last": True, "dataset_size": 7
          }, "drop_last is True and dataset_size 7 is less than global_batch 8"),
        ({"min_microbatch_samples": 3
          }, "min_microbatch_samples is 3, but global_batch 8 in 4 micro-batches gives some of "
             "them 2"),
        ({"min_microbatch_samples": 0}, "min_microbatch_samples is 0"),
    ],
)
def test_the_key_is_named_when_the_last_batch_cannot_be_cut_so(changes, message):
    """No step would be left, or a full batch's micro-batches would be too small themselves."""
    with pytest.raises(ConfigError, match=message):
        Schedule(**({"dataset_size": 22, "global_batch": 8, "microbatches": 4, "epochs": 1,
                     "seed": 0}
                    | changes))


@pytest.mark.parametrize(("max_steps", "steps"), [(None, 6), (4, 4), (6, 6), (100, 6)])
def test_the_run_ends_at_the_earlier_limit_when_max_steps_is_given(max_steps, steps):
    """`steps` is the smaller of the epochs' steps and max_steps."""
    schedule = Schedule(dataset_size=10, global_batch=4, microbatches=1, epochs=2, seed=0,
                        max_steps=max_steps)
    assert schedule.steps == steps


@pytest.mark.parametrize(("max_steps", "steps"), [(None, 3), (2, 2), (7, 7), (100, 100)])
def test_max_steps_is_the_length_when_no_epochs_are_given(max_steps, steps):
    """As many epochs as the steps need; one, when neither is given. Each epoch has an order of its
    own."""
    schedule = Schedule(dataset_size=10, global_batch=4, microbatches=1, seed=0,
                        max_steps=max_steps)
    assert schedule.steps == steps
    first, second = (schedule.microbatch_samples(step, 0).tolist() for step in (0, 3))
    assert first != second


def test_seeds_are_distinct_when_step_microbatch_or_seed_differs():
    """No two micro-batches of any steps, under neighbouring seeds, share a random seed; all fit 63
    bits."""
    job = dict(dataset_size=64, global_batch=32, microbatches=32, epochs=1)
    schedules = [Schedule(**job, seed=seed) for seed in range(3)]
    seeds = {
        s.microbatch_seed(step, microbatch)
        for s in schedules
        for step in range(200)
        for microbatch in range(32)
    }
    assert len(seeds) == 3 * 200 * 32
    assert 0 <= min(seeds) and max(seeds) < 2**63


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dataset_size", 0),
        ("dataset_size", 1e6),
        ("dataset_size", 2**48 + 1),
        ("global_batch", -4),
        ("global_batch", MAX_GLOBAL_BATCH + 1),
        ("microbatches", 0),
        ("microbatches", 9),
        ("epochs", 0),
        ("epochs", True),
        ("seed", -1),
        ("seed", 2**64),
        ("max_steps", 0),
    ],
)
def test_the_key_is_named_when_a_number_is_wrong(key, value):
    """A bad number ends at start-up, with the key and the value in the message."""
    job = {"dataset_size": 100, "global_batch": 8, "microbatches": 4, "epochs": 1, "seed": 0,
           key: value}
    with pytest.raises(ConfigError, match=rf"^{key} is {value}"):
        Schedule(**job)


# ---- the digest


@given(small_schedules(), some.integers(0, 1000), some.integers(1, 60))
def test_digests_of_owners_total_the_batch_when_the_world_has_any_size(schedule, step, size):
    """The digests of the ranks add up to the batch's digest, for every world size (law 2)."""
    owned = [owned_microbatches(rank, size, schedule.microbatches) for rank in range(size)]
    parts = [schedule.microbatch_samples(step, microbatch) for microbatches in owned
             for microbatch in microbatches]
    assert sum(samples_digest(part) for part in parts) == schedule.batch_digest(step)


def test_the_digest_differs_when_a_sample_is_lost_doubled_or_swapped():
    """One sample that is missing, counted twice, or replaced by another one changes the digest."""
    batch = BILLION.microbatch_samples(1000, 3)
    whole = samples_digest(batch)
    for i in range(batch.size):
        swapped = batch.copy()
        swapped[i] = batch[i - 1] + 1
        assert whole not in {samples_digest(np.delete(batch, i)),
                             samples_digest(np.append(batch, batch[i])), samples_digest(swapped)}


def test_the_digest_is_the_same_when_the_order_changes():
    """A digest depends on the samples that counted, not on their order. Of no samples it is 0."""
    batch = BILLION.microbatch_samples(1000, 3)
    assert samples_digest(batch[::-1]) == samples_digest(batch)
    assert samples_digest(batch[:0]) == 0


def test_the_digest_fits_int64_when_the_batch_is_the_largest_allowed():
    """The vote totals digests in an int64, so 2**22 samples of at most 40 bits must fit."""
    digests = [samples_digest(np.array([sample])) for sample in range(2000)]
    assert 2**39 < max(digests) < 2**40
    assert MAX_GLOBAL_BATCH * (2**40 - 1) < 2**63


# ---- who owns what


@pytest.mark.parametrize("microbatches", [1, 2, 5, 8, 12, 16, 63, 64])
def test_every_microbatch_has_one_owner_when_the_world_has_any_size(microbatches):
    """For each world size, also beyond the micro-batches, the ranks own each micro-batch once, in
    order, none too many."""
    for size in range(1, 2 * microbatches + 3):
        owned = [owned_microbatches(rank, size, microbatches) for rank in range(size)]
        assert [microbatch for part in owned for microbatch in part] == list(range(microbatches))
        assert max(map(len, owned)) == -(-microbatches // size)


@given(some.integers(1, 200), some.data())
def test_subtrees_are_the_owned_microbatches_when_cut_at_the_trees_nodes(microbatches, data):
    """The subtrees, in order, are what is owned; each is a node of the tree, and none is cut in
    two."""
    start = data.draw(some.integers(0, microbatches))
    owned = range(start, data.draw(some.integers(start, microbatches)))
    parts = aligned_subtrees(owned, microbatches)
    nodes = {range(k, min(k + 2**j, microbatches)) for j in range(9)
             for k in range(0, microbatches, 2**j)}
    assert [microbatch for part in parts for microbatch in part] == list(owned)
    assert set(parts) <= nodes
    inside = [node for node in nodes if node.start in owned and node[-1] in owned]
    assert all(any(set(node) <= set(part) for part in parts) for node in inside)
