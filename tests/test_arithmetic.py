"""The arithmetic of a worker is checked before it enters: one that computes other bits than the
world is refused, or logged."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cluster import Cluster

from elastic_trainer.training.determinism import choose_kernels, probe_facts, probe_program
from elastic_trainer.world.arithmetic import (
    Arithmetic,
    advice,
    computes_otherwise,
    facts_that_differ,
)

SLOW = ("--steps", "60", "--step-s", "0.25")
ODD, OTHER_DATA = "127.0.0.4", "127.0.0.5"


@pytest.mark.parametrize("policy", ["refuse", "warn"])
def test_a_host_with_other_arithmetic_is_reported_before_it_enters(
        tmp_path: Path, twin_of: Callable[..., str], policy: str) -> None:
    """Refused: it has no place, the rest goes on to the same bits. With `warn` it enters. A host
    with other data is refused in both cases, by the name of a sample."""
    options = [] if policy == "refuse" else ["--mixed-hardware", "warn"]
    with Cluster(tmp_path, hosts=5, start_with=3,
                 job=(*SLOW, "--odd-host", ODD, "--odd-data", OTHER_DATA),
                 options=options) as cluster:
        cluster.wait_for_step(0)
        cluster.set_hosts(cluster.all_hosts)
        [program] = cluster.wait_for("event", lambda: cluster.events("worker.program_differs"))
        cluster.wait_for("exit", lambda: [e for e in cluster.events("driver.worker_gone")
                                          if e["reason"] == "program_differs"])
        [differs] = cluster.wait_for("event", lambda: cluster.events("worker.arithmetic_differs"))
        if policy == "refuse":
            cluster.wait_for("exit", lambda: [e for e in cluster.events("driver.worker_gone")
                                              if e["reason"] == "arithmetic_differs"])
        else:
            cluster.wait_for_world(4)
        assert cluster.finish() == 0
        sizes = {e["size"] for e in cluster.events("worker.generation_started")}
        output = (tmp_path / "output.log").read_text()
        if policy == "refuse":
            cluster.assert_nothing_lost(twin_of(*SLOW), victims=0)
    assert (program["host"], program["parts"]) == (OTHER_DATA, ["samples", "batch"])
    assert re.match(r"sample \d+, field `0`, position 0 has another value", program["differ"])
    assert f"The worker on {OTHER_DATA} has other data" in output
    assert (differs["host"], differs["other_host"], differs["refused"]) == (ODD, "127.0.0.1",
                                                                            policy == "refuse")
    assert differs["differs"] == {}
    assert sizes == ({3} if policy == "refuse" else {3, 4})
    assert ("--mixed-hardware warn" in output) == (policy == "refuse")


def test_a_fixed_program_has_the_same_bits_each_time() -> None:
    """And changes none of the user's random numbers; the description names what the bits depend
    on."""
    choose_kernels()  # as an import of `train` does
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert probe_program(torch.device("cpu")) == probe_program(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    facts = dict(probe_facts(torch.device("cpu")))
    assert facts.keys() == {"cpu", "instructions", "torch", "blas", "threads"}
    assert all(facts.values())


def test_what_differs_is_named_with_both_values() -> None:
    """If no name differs, the advice names other causes."""
    one = Arithmetic(1, 2, 3, (("cpu", "EPYC"), ("torch", "2.13")))
    other = Arithmetic(1, 2, 4, (("cpu", "Xeon"), ("torch", "2.13")))
    assert computes_otherwise(one, other) and not computes_otherwise(one, one)
    assert facts_that_differ(one, other) == {"cpu": ("EPYC", "Xeon")}
    assert "--mixed-hardware warn" in advice(True, {"cpu": ("EPYC", "Xeon")})
    assert "code" in advice(True, {})
    assert Arithmetic.from_dict(one.to_dict()) == one
