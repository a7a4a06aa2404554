"""Standbys with real processes: the shim, the keeper, the service; and in a real cluster of four workers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster
from faults import Plan

from elastic_trainer.attempts import is_worker

Twin = Callable[..., str]
SLOW = ("--steps", "150", "--step-s", "0.05")


def test_a_standby_takes_the_place_of_a_killed_worker(tmp_path: Path, twin_of: Twin) -> None:
    with Cluster(tmp_path, job=SLOW, options=["--standby", "1"]) as cluster:
        cluster.wait_for("a standby", lambda: cluster.events("standby.booted"))
        cluster.signal_worker("127.0.0.3", 9)
        cluster.wait_for("its place", lambda: cluster.events("standby.taken"))
        assert cluster.wait() == 0
        print(cluster.story())
        result = cluster.assert_nothing_lost(twin_of(*SLOW), victims=1)
        print([e for e in cluster.events("driver.worker_ready")], cluster.events("standby.booted"))
    assert 0
