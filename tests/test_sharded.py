"""The optimizer's state sharded over the workers: the bits of a run that is not sharded, whatever
the fleet does; no part is lost with one host; a checkpoint of either resumes as the other.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import TESTS, Cluster, weights_alone
from faults import Plan
from torch.optim.optimizer import register_optimizer_step_post_hook

from elastic_trainer.config import ConfigError
from elastic_trainer.state.holders import (
    Exposed,
    Site,
    blocks_of,
    exposed,
    holders_of,
    lost_blocks,
    moves_between,
)
from elastic_trainer.state.shards import Shards
from elastic_trainer.training.job.job import require_shardable
from elastic_trainer.training.job.shardable import shard_refusal
from elastic_trainer.training.shard_remarks import (
    Measured,
    exposed_sentence,
    is_too_small,
    memory_sentence,
)
from elastic_trainer.views.verify import verify

Twin = Callable[..., str]
FEW = ("--steps", "40")
LONG = ("--steps", "90", "--step-s", "0.35")
SHARD = ("--shard", "optimizer")
GRADIENTS = ("--shard", "gradients")
of_both = pytest.mark.parametrize("shard", [SHARD, GRADIENTS], ids=("optimizer", "gradients"))


def host(rank: int) -> str:
    return f"127.0.0.{rank + 1}"


def moved(cluster: Cluster) -> list[dict[str, Any]]:
    return cluster.events("worker.shards_moved")


@of_both
def test_has_the_bits_of_an_unsharded_run_when_workers_are_killed(
        tmp_path: Path, twin_of: Twin, shard: Any) -> None:
    """SIGKILL when the new parameters are on their way, before the vote, between vote and apply,
    and after apply: of rank 0 and of others, one host at a time. No step is rolled back."""
    plan = Plan()
    for number, (rank, point, step) in enumerate([
            (0, "shards.computed", 8), (1, "step.prepared", 16), (2, "step.voted", 24),
            (3, "step.applied", 32)]):
        plan.kill(host=host(rank), at=point, step=step, after=number)
    with Cluster(tmp_path, hosts=7, job=(*FEW, *shard), plan=plan) as cluster:
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*FEW), victims=4)
        assert not cluster.events("worker.shards_lost")
    assert result["attempts"] == 1 and result["steps_redone"] <= 4


@of_both
def test_rolls_forward_leaves_and_joins(tmp_path: Path, twin_of: Twin, shard: Any) -> None:
    """A worker that lost the vote applies its own part and what others have sent; one that leaves
    gives its part away first; newcomers get theirs, and one dies while it receives it."""
    plan = Plan().add("lose_vote", host=host(0), at="step.voted", step=8)
    plan.add("terminate", host=host(2), at="step.prepared", step=16)
    plan.kill(host=host(4), at="shards.moving")
    with Cluster(tmp_path, hosts=6, start_with=4, job=(*LONG, *shard), plan=plan) as cluster:
        cluster.wait_for_step(4)
        cluster.set_hosts(cluster.all_hosts)
        cluster.wait_until_fired(3)
        cluster.wait_for("newcomer with its part", lambda: any(
            one["received"] and one["worker"].startswith(host(5)) for one in moved(cluster)))
        assert cluster.finish() == 0
        cluster.assert_nothing_lost(twin_of(*LONG), victims=1)
        assert cluster.events("worker.rolled_forward")
        assert not cluster.events("worker.shards_lost")
        assert any(e["received"] for e in moved(cluster) if e["step"])


def test_goes_back_to_a_checkpoint_when_both_holders_of_a_part_are_lost(tmp_path: Path,
                                                                       twin_of: Twin) -> None:
    """Two of four hosts at once: with one buddy a part is lost. With two none is."""
    job = (*FEW, *SHARD, "--checkpoint-every", "8")
    plan = Plan().kill(host=host(1), at="step.computed", step=30)
    plan.kill(host=host(2), at="step.computed", step=30)
    with Cluster(tmp_path / "one", job=job, plan=plan) as cluster:
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*FEW), victims=2)
        [lost] = cluster.events("worker.shards_lost")
        assert lost["step"] == 30
    assert result["attempts"] == 2
    with Cluster(tmp_path / "two", job=(*job, "--buddies", "2"), plan=plan) as cluster:
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*FEW), victims=2)
        assert not cluster.events("worker.shards_lost")
    assert result["attempts"] == 1


def test_goes_back_when_a_part_of_an_average_is_lost_that_the_users_code_waits_for(
        tmp_path: Path, twin_of: Twin) -> None:
    """That code can't be undone: the attempt ends, and the next one begins at the checkpoint."""
    its = (*FEW, "--iterator", "--ema", "--evaluate")
    job = (*its, *SHARD, "--buddies", "0", "--checkpoint-every", "8")
    plan = Plan().kill(host=host(2), at="step.applied", step=29)
    with Cluster(tmp_path, job=job, plan=plan) as cluster:
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*its), victims=1)
        [lost] = cluster.events("worker.shards_lost")
        assert lost["step"] == 30
    assert result["attempts"] == 2


def test_no_step_is_lost_with_a_whole_zone(tmp_path: Path, twin_of: Twin) -> None:
    """Both hosts of one of two zones die in the same step. Before, no zone holds a part alone."""
    plan = Plan().kill(host=host(1), at="step.computed", step=14)
    plan.kill(host=host(2), at="step.computed", step=14)
    cluster = Cluster(tmp_path, job=(*FEW, *SHARD), plan=plan)
    cluster.hosts_file.write_text("".join(
        f"{host(rank)}:1 zone={zone}\n" for rank, zone in enumerate("abba")))
    with cluster:
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*FEW), victims=2)
        assert not cluster.events("worker.shards_lost")
        assert not cluster.events("worker.shards_exposed")
        foreseen = cluster.events("worker.memory_foreseen")
    assert result["attempts"] == 1
    assert foreseen and all(one["min_workers_for_memory"] == 1 for one in foreseen)
    assert foreseen[0]["held_bytes"] < 0.7 * foreseen[0]["optimizer_bytes"]


def test_a_zone_that_holds_parts_alone_is_logged_once_until_that_changes(tmp_path: Path) -> None:
    """Three of four hosts are in one zone; the fourth leaves, and one zone is no more risk than its
    hosts. That changes again if the fourth comes back before the last step."""
    plan = Plan().kill(host=host(3), at="step.prepared", step=14)
    cluster = Cluster(tmp_path, job=(*FEW, *SHARD), plan=plan)
    cluster.hosts_file.write_text("".join(
        f"{host(rank)}:1 zone={zone}\n" for rank, zone in enumerate("aaab")))
    with cluster:
        assert cluster.finish() == 0
        logged, *again = cluster.events("worker.shards_exposed")
        comebacks = cluster.events("driver.generation_formed")[2:]
    assert len(again) <= len(comebacks) <= 1
    for one in logged, *again:
        assert one["zones"] == ["a"] and 0 < one["blocks"] < one["of"]
        assert "Add hosts in other zones" in one["meaning"]


def test_a_checkpoint_of_each_resumes_as_the_others(tmp_path: Path, twin_of: Twin) -> None:
    """And with another number of workers: the layout is the same, also that of an average, which
    the evaluation after each tenth step follows."""
    its = (*FEW, "--iterator", "--ema", "--evaluate")
    for end, (shard, hosts) in zip((10, 20, 30, 40), (
            (SHARD, 4), ((), 2), (GRADIENTS, 4), (SHARD, 2)), strict=True):
        job = (*its, *shard, "--checkpoint-every", "7", "--until", str(end))
        with Cluster(tmp_path, hosts=hosts, job=job) as cluster:
            assert cluster.finish() == 0
    assert verify(cluster.run_dir).is_proved
    result = json.loads((cluster.run_dir / "result.json").read_text())
    assert result["weights_sha256"] == twin_of(*its)


@pytest.mark.parametrize("job", [
    ("mlp.py", "--steps", "40", "--iterator", "--phases"),
    ("mlp.py", "--steps", "40", "--iterator", "--ema", "--evaluate"),
    ("precise.py", "--precision", "fp16"), ("precise.py", "--precision", "bf16"),
    ("precise.py", "--precision", "bf16-master")],
    ids=("phases", "average", "fp16", "bf16", "masters"))
def test_has_the_bits_with_several_optimizers_an_average_and_a_scaler(tmp_path: Path,
                                                                      job: Sequence[str]) -> None:
    """And the moments of fp16 follow the scale of one process. One worker is killed."""
    command = [sys.executable, str(TESTS / "jobs" / job[0]), *job[1:]]
    twin = weights_alone(command, tmp_path)
    plan = Plan().kill(host=host(1), at="step.prepared", step=14)
    with Cluster(tmp_path, command=[*command, *SHARD], plan=plan) as cluster:
        assert cluster.finish() == 0
        cluster.assert_nothing_lost(twin, victims=1)


def test_a_worker_that_is_left_alone_goes_on_with_its_scaler(tmp_path: Path) -> None:
    """Of two workers one dies when the other has unscaled the gradient of the step."""
    command = [sys.executable, str(TESTS / "jobs" / "precise.py"), "--precision", "fp16"]
    twin = weights_alone(command, tmp_path)
    plan = Plan().kill(host=host(1), at="step.prepared", step=14)
    with Cluster(tmp_path, hosts=2, min_workers=1, command=[*command, *SHARD],
                 plan=plan) as cluster:
        assert cluster.finish() == 0
        cluster.assert_nothing_lost(twin, victims=1)


def test_a_part_of_the_state_is_not_taken_for_all_of_it() -> None:
    """A script that saves optimizer.state_dict() would save what this worker holds."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    shards = Shards(model, optimizer, 1, [optimizer])
    assert optimizer.state_dict()["state"] == {}
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    shards.keep(range(8))
    assert len(optimizer.state_dict()["state"]) == 8
    shards.keep([0, 5])
    assert len(optimizer.state) == 2
    with pytest.raises(RuntimeError, match="has 2 of 8 parts of the Adam's state on this worker"):
        optimizer.state_dict()


def test_a_parameter_that_a_group_has_twice_is_in_one_part() -> None:
    """As with tied weights and a list of the parameters of each module."""
    one, two = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    two.weight = one.weight
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.Adam([*one.parameters(), *two.parameters()])
    shards = Shards(torch.nn.Sequential(one, two), optimizer, 1)
    assert [name for block in range(3) for name, _ in shards.of(block)] == [
        "0.weight", "0.bias", "1.bias"] and len(shards.blocks) == 3


def test_parameters_that_lie_in_one_memory_are_refused() -> None:
    """Neighbours in one memory are not."""
    one, two, flat = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.ones(18)
    model = torch.nn.Sequential(one, two)
    optimizer = torch.optim.Adam(model.parameters())
    one.weight.data, two.weight.data = flat[:9].view(3, 3), flat[9:].view(3, 3)
    require_shardable(model, optimizer, "optimizer")
    two.weight.data = one.weight.data
    require_shardable(model, optimizer, None)
    with pytest.raises(ConfigError, match=r"0\.weight and 1\.weight lie in one memory"):
        require_shardable(model, optimizer, "optimizer")


@pytest.mark.parametrize("place", (0, 1), ids=("owner", "buddy"))
def test_goes_back_when_two_holders_of_a_part_differ(tmp_path: Path, twin_of: Twin,
                                                     place: int) -> None:
    """One bit of a moment flips at one holder. The other one has computed other parameters than
    the owner has sent, and no majority tells which are right."""
    sizes = [20 * 256, 256, 256, 256, 256 * 256, 256, 256 * 4, 4]  # of the job's parameters
    holders = holders_of(sizes, [*map(Site, range(4))], [set(range(8)), set(), set(), set()], 2)
    plan = Plan().add("flip_moment", host=host(holders[0][place]), at="step.voted", step=25)
    with Cluster(tmp_path, job=(*FEW, *SHARD, "--checkpoint-every", "10"), plan=plan) as cluster:
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(twin_of(*FEW), victims=0)
        assert cluster.events("worker.shards_differ")
    assert result["attempts"] == 2


# --- who holds what ------------------------------------------------------------------------------

GPT = [50257 * 768, 1024 * 768] + 12 * [
    768, 768, 3 * 768 * 768, 3 * 768, 768 * 768, 768, 768, 768, 4 * 768 * 768, 4 * 768,
    4 * 768 * 768, 768] + [768, 768]


@pytest.mark.parametrize("buddies", (0, 1, 2))
@pytest.mark.parametrize("shapes", (GPT, [10] * 5, [7], [1000] * 300),
                         ids=("gpt", "few", "one", "equal"))
def test_holders_are_apart_and_hold_as_much_whatever_the_fleet_did(shapes: list[int],
                                                                   buddies: int) -> None:
    choose, blocks = random.Random(1), blocks_of(shapes)
    assert [number for block in blocks for number in block] == list(range(len(shapes)))
    sizes = [sum(shapes[number] for number in block) for block in blocks]
    hosts, held = [0, 1, 2, 3], [set(range(len(blocks))), set(), set(), set()]
    for change in range(60):
        holders = holders_of(sizes, [*map(Site, hosts)], held, buddies + 1)
        copies = min(buddies + 1, len(hosts))
        for ranks in holders:
            assert len(set(ranks)) == copies
            assert len({hosts[rank] for rank in ranks}) == min(copies, len(set(hosts)))
        moves = moves_between(sizes, held, holders)
        assert all(move.block in held[move.source] for move in moves)
        assert all(move.block not in held[move.target] for move in moves)
        assert len({move[::2] for move in moves}) == len(moves)
        held = [{block for block, ranks in enumerate(holders) if rank in ranks}
                for rank in range(len(hosts))]
        is_even = len(set(hosts)) == len(hosts)
        most = max(sum(sizes[block] for block in its) for its in held)
        assert not is_even or most <= 1.06 * sum(sizes) * copies / len(hosts) + max(sizes)
        if len(hosts) == 1 or choose.random() < 0.5:
            hosts, held = [*hosts, choose.choice([change + 10] * 3 + hosts[:1])], [*held, set()]
            continue
        rank = choose.randrange(len(hosts))
        del hosts[rank], held[rank]
        if lost_blocks(len(blocks), held):
            held = [set(range(len(blocks))) for _ in hosts]


def test_a_loss_moves_what_was_lost_and_a_join_what_the_newcomer_holds() -> None:
    sizes, hosts = [sum(GPT[number] for number in block) for block in blocks_of(GPT)], range(4)
    held: list[set[int]] = [set(range(len(sizes))), set(), set(), set()]

    def settled(hosts: list[int], held: list[set[int]]) -> tuple[list[set[int]], int]:
        holders = holders_of(sizes, [*map(Site, hosts)], held, 2)
        moves = moves_between(sizes, held, holders)
        return ([{block for block, ranks in enumerate(holders) if rank in ranks}
                 for rank in range(len(hosts))], sum(sizes[move.block] for move in moves))

    held, _ = settled(list(hosts), held)
    assert settled(list(hosts), held) == (held, 0)
    _, lost = settled([0, 1, 2], held[:3])
    assert lost <= 1.3 * sum(sizes) * 2 / 4
    _, joined = settled([0, 1, 2, 3, 4], [*held, set()])
    assert joined <= 1.3 * sum(sizes) * 2 / 5


def in_one_zone(sizes: Sequence[int], sites: Sequence[Site], held: Sequence[set[int]]) -> float:
    """Return the share of what is held whose holders are all in one zone."""
    zones = [{site.zone for site, its in zip(sites, held, strict=True) if block in its}
             for block in range(len(sizes))]
    return sum(size for size, its in zip(sizes, zones, strict=True) if len(its) == 1) / sum(sizes)


def placed(sizes: Sequence[int], sites: Sequence[Site], held: Sequence[set[int]],
           copies: int) -> list[set[int]]:
    """Return what each rank is to hold."""
    holders = holders_of(sizes, sites, held, copies)
    return [{block for block, ranks in enumerate(holders) if rank in ranks}
            for rank in range(len(sites))]


@pytest.mark.parametrize(("zones", "copies", "most"), [
    ((1, 1, 2, 2), 2, 0.0), ((1, 1, 2, 3), 2, 0.0), ((1, 2, 3, 4), 2, 0.0),
    ((1, 1, 2, 3), 3, 0.0), ((1, 1, 1, 2), 3, 0.25),
    ((1, 1, 1, 2), 2, 0.5), ((1, 1, 1, 1, 1, 2, 2, 3), 2, 0.25), ((0, 0, 0, 2), 2, 0.5),
    ((1, 1, 1, 1), 2, 1.0), ((0, 0, 0, 0), 2, 1.0)])
def test_a_block_has_holders_in_several_zones_as_far_as_no_rank_holds_more_than_its_part(
        zones: Sequence[int], copies: int, most: float) -> None:
    """Also one that rank 0 or all ranks have held. Hosts of unknown zone (0) are those of one."""
    sizes, sites = [10] * 120, [Site(*both) for both in enumerate(zones)]
    every, none = set(range(120)), set[int]()
    for held in [every, *[none] * (len(zones) - 1)], [every] * len(zones):
        found = placed(sizes, sites, held, copies)
        assert in_one_zone(sizes, sites, found) <= most + 0.02
        assert max(map(len, found)) <= 120 * copies / len(zones) + 1
        again = moves_between(sizes, found, holders_of(sizes, sites, found, copies))
        assert len(again) <= 0.02 * 120


@pytest.mark.parametrize("copies", (2, 3))
def test_blocks_stay_in_several_zones_whatever_the_fleet_did(copies: int) -> None:
    choose, sizes = random.Random(3), [sum(GPT[n] for n in block) for block in blocks_of(GPT)]
    sites = [Site(number, number % 3) for number in range(4)]
    held: list[set[int]] = [set(range(len(sizes))), set(), set(), set()]
    for change in range(30):
        held = placed(sizes, sites, held, copies)
        part = sum(sizes) * min(copies, len(sites)) / len(sites)
        assert all(sum(sizes[block] for block in its) <= part + max(sizes) for its in held)
        most = max(sum(site.zone == one.zone for one in sites) for site in sites) / len(sites)
        needed = max(0.0, copies * most - copies + 1)
        if len({site.zone for site in sites}) > 1:
            assert in_one_zone(sizes, sites, held) <= needed + max(sizes) / sum(sizes)
        if len(sites) < 3 or choose.random() < 0.5:
            sites, held = [*sites, Site(change + 10, choose.randrange(3))], [*held, set()]
            continue
        rank = choose.randrange(len(sites))
        del sites[rank], held[rank]
        if lost_blocks(len(sizes), held):
            held = [set(range(len(sizes))) for _ in sites]


def test_a_host_in_another_zone_receives_its_part_and_no_other_block_moves() -> None:
    sizes, sites = [10] * 120, [Site(number, 1) for number in range(3)]
    held = placed(sizes, sites, [set(range(120)), set(), set()], 2)
    sites.append(Site(3, 2))
    holders = holders_of(sizes, sites, [*held, set()], 2)
    moves = moves_between(sizes, [*held, set()], holders)
    assert {move.target for move in moves} == {3} and len(moves) <= 120 * 2 / 4 + 1


@pytest.mark.parametrize(("sites", "holders", "found", "remedy"), [
    ([(7, 1)], [(0,), (0,)], Exposed(2, False, (7,)), "All workers are on one host (1). Add"),
    ([(7, 1), (7, 1)], [(0, 1)], Exposed(1, False, (7,)), "All workers are on one host (2). Add"),
    ([(7, 1), (8, 2)], [(0,), (1,)], Exposed(2, False, (7, 8)), "Set buddies=1."),
    ([(7, 1), (8, 1), (9, 2)], [(0, 1), (0, 2)], Exposed(1, True, (1,)), "Add hosts in other zon"),
    ([(7, 1), (8, 2)], [(0, 1)], None, ""), ([(7, 0), (8, 0)], [(0, 1)], None, "")])
def test_what_one_host_or_zone_holds_alone_is_found_with_its_remedy(
        sites: Any, holders: Any, found: Exposed | None, remedy: str) -> None:
    places = [Site(*site) for site in sites]
    assert exposed(holders, places) == found
    if found:
        sentence = exposed_sentence(found, ["x"], places, len(holders), len(holders[0]) - 1)
        assert "takes the run back to the newest checkpoint" in sentence
        assert f"{found.blocks} of {len(holders)} parts" in sentence and remedy in sentence


@pytest.mark.parametrize(("free", "largest", "min_workers", "needs", "words"), [
    (100, 5, 1, 1, "(--min-np)"), (20, 5, 1, 4, "Set --min-np 4"), (20, 5, 4, 4, "(--min-np)"),
    (0, 5, 0, 6, "Set --min-np 6"), (0, 40, 8, 0, "No number of workers")])
def test_the_smallest_world_with_enough_memory_is_found(
        free: int, largest: int, min_workers: int, needs: int, words: str) -> None:
    """A worker of the world of that size has memory for its part and the largest block."""
    one = Measured(parameters=100, gradients=100, optimizer=100, largest=largest, held=40,
                   free=free, copies=2)
    assert one.sharded_with(1) == one.sharded_with(2) == 100
    assert one.sharded_with(8) == 25 + largest
    assert one.min_workers == needs and words in memory_sentence(one, 5, min_workers)
    assert is_too_small(one, min_workers) == (words != "(--min-np)")
    if needs > 1:
        assert one.sharded_with(needs) <= one.held + one.free < one.sharded_with(needs - 1)
    if needs == 4:  # with sharded gradients more is shared
        assert replace(one, sums=50).min_workers == 6


# --- which optimizers ----------------------------------------------------------------------------

class Counting(torch.optim.SGD):
    """Counts its steps in an attribute."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.steps += 1


class Clipping(torch.optim.SGD):
    """Clips the gradient in place, in its step."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.clamp_(-1, 1)
        super().step(closure)


class AttrNorm(torch.optim.SGD):
    """Looks at all parameters if an attribute says so."""

    def __init__(self, parameters: Any, pre_norm: bool = False):
        super().__init__(parameters, lr=0.1)
        self.pre_norm = pre_norm

    def step(self, closure: Any = None) -> None:
        every = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = sum(p.grad.norm() for p in every) if self.pre_norm else 1
        for p in every:
            p.data.sub_(p.grad / norm)


class Hidden(torch.optim.SGD):
    """Counts its steps under a private name."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, lr=0.1)
        self._n = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self._n += 1


class Normed(torch.optim.SGD):
    """Its step depends on the norm over all parameters."""

    def step(self, closure: Any = None) -> None:
        norm = sum(p.grad.norm() for g in self.param_groups for p in g["params"]
                   if p.grad is not None)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(p.grad / norm)


class Decaying(torch.optim.SGD):
    """Decays each parameter, also one that has no gradient."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.99)
        super().step(closure)


class OnParameters(torch.optim.SGD):
    """Keeps its momentum in an attribute of the parameter."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mean = vars(p).get("mean", 0) + p.grad
                    p.data.sub_(p.mean)


class Late(Normed):
    """Looks at all parameters from its sixth step on."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["n"] = self.state[p].get("n", 0) + 1
        if max(entry["n"] for entry in self.state.values()) > 5:
            super().step(closure)


def replaced(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose step a script has replaced, as a scheduler does and otherwise."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    assert shard_refusal(optimizer) == ""
    step = optimizer.step
    optimizer.step = lambda closure=None: step(closure)  # type: ignore[assignment,method-assign]
    return optimizer


@pytest.mark.parametrize("kind", ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta",
                                  "Adamax", "NAdam", "RAdam", "ASGD", "Rprop", "Adafactor"))
@pytest.mark.parametrize("options", ({}, {"foreach": True}, {"fused": True}), ids=str)
def test_optimizers_of_torch_can_be_sharded(kind: str, options: dict[str, Any]) -> None:
    try:
        optimizer = getattr(torch.optim, kind)([torch.nn.Parameter(torch.ones(3))], **options)
    except TypeError:
        pytest.skip("torch has no such form of it")
    assert shard_refusal(optimizer) == ""


def test_an_optimizer_of_matrices_alone_can_be_sharded() -> None:
    """Muon treats each matrix by itself."""
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        pytest.skip("this torch has no Muon")
    assert shard_refusal(muon([torch.nn.Parameter(torch.ones(3, 4))])) == ""


def test_an_optimizer_is_tried_with_its_own_groups_and_types() -> None:
    """An option of one group alone, and parameters in 16 bits."""
    class GroupNorm(Normed):
        def step(self, closure: Any = None) -> None:
            if any(group.get("norm") for group in self.param_groups):
                super().step(closure)
            else:
                torch.optim.SGD.step(self, closure)

    one, two = (torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
    assert shard_refusal(GroupNorm([one, two], lr=0.1)) == ""
    groups = [{"params": [one]}, {"params": [two], "norm": True}]
    assert "other bits" in shard_refusal(GroupNorm(groups, lr=0.1))


@pytest.mark.parametrize(("make", "says"), [
    (lambda ps: Counting(ps, lr=0.1), "changes steps in a step"),
    (lambda ps: Normed(ps, lr=0.1), "other bits beside other parameters"),
    (lambda ps: AttrNorm(ps, pre_norm=True), "other bits beside other parameters"),
    (lambda ps: Hidden(ps), "changes _n in a step"),
    (lambda ps: Clipping(ps, lr=0.1), "changes .grad in its step"),
    (lambda ps: Decaying(ps, lr=0.1), "moves a parameter that has no gradient"),
    (lambda ps: OnParameters(ps, lr=0.1), "keeps mean in an attribute of a parameter"),
    (lambda ps: Late(ps, lr=0.1), "other bits beside other parameters"),
    (replaced, "was replaced by a function")])
def test_an_optimizer_that_looks_at_all_parameters_is_refused(
        make: Callable[[Any], torch.optim.Optimizer], says: str) -> None:
    assert says in shard_refusal(make([torch.nn.Parameter(torch.ones(3))]))


def test_an_optimizer_is_refused_where_all_optimizers_have_a_hook() -> None:
    """It would run several times in a step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])
    hook = register_optimizer_step_post_hook(lambda *_: None)
    try:
        assert "has hooks of its steps" in shard_refusal(optimizer)
    finally:
        hook.remove()
    assert shard_refusal(optimizer) == ""
