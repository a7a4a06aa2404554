"""Connects to Ray, starts a run's coordinator there or finds it, and follows it to its end.

submit → here (`own.py elastic_trainer.ray.follow`, the job on stdin) → coordinator's actor

It is a process apart from `submit`: Ray ends each process that has lost its GCS for a minute, and
`submit` starts another one. Its own exit code tells `submit` nothing but that; the run's exit code
goes through a pipe, the descriptor that is this process's only argument.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import ray
from ray._private import state as ray_state
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RaySystemError
from ray.experimental.internal_kv import _internal_kv_get

from elastic_trainer.config import ConfigError
from elastic_trainer.ray.coordinator import EXIT_BAD_JOB, Coordinator
from elastic_trainer.ray.job import (
    CONNECTED,
    NAMESPACE,
    Job,
    refusal_of,
    remark_on,
    require_room,
    require_same,
)
from elastic_trainer.wire.plain import plain_text

LOOK_S = 1.0
PROBE_S = 5.0
CONNECT_S = 90.0
ANSWER_S = 30.0
REPORT_S = 10.0
"""The time in which a new head has the first report of its autoscaler."""
HEAD = "node:__internal_head__"
"""Ray's resource of the head's node, which is seldom a spot machine. Without it there is no Ray."""
LOST_S = 60.0
"""The time without an answer after which another process connects anew: a head that was restarted
knows nothing of this one."""


def main() -> int:
    """Follow the run to its end, and tell its exit code."""
    told = json.load(sys.stdin)
    job, tells = Job.from_json(told["job"]), int(sys.argv[1])
    code: int | None
    try:
        try:
            connect(told["address"])
        except ConfigError:
            if told["again"]:
                return 0  # the head is still away
            raise
        actor = find_or_start(job, told["waits"])
        os.write(tells, f"{CONNECTED}\n".encode())
        code = follow(job, actor)
    except ConfigError as error:
        say(str(error))
        code = EXIT_BAD_JOB
    if code is not None:
        os.write(tells, f"{code}\n".encode())
    return 0


def connect(address: str) -> None:
    """Connect to the cluster. Raises ConfigError."""
    where = address or os.environ.get("RAY_ADDRESS", "") or "auto"
    is_over = threading.Event()
    # Ray asks an address where nothing answers for minutes.
    threading.Thread(target=_give_up, args=(where, is_over), daemon=True).start()
    try:
        if found := re.fullmatch(r"([A-Za-z0-9._-]+):([0-9]{1,5})", where):
            socket.create_connection((found[1], int(found[2])), PROBE_S).close()
        ray.init(address=where, namespace=NAMESPACE, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError, RaySystemError) as error:
        raise ConfigError(refusal_of(where, plain_text(str(error)), ray.__version__)) from error
    finally:
        is_over.set()


def _give_up(where: str, is_over: threading.Event) -> None:
    """End this process if Ray has not connected in time."""
    if not is_over.wait(CONNECT_S):
        say(refusal_of(where, f"no connection in {CONNECT_S:.0f} s", ray.__version__))
        os._exit(1)


def find_or_start(job: Job, waits: bool) -> Any:
    """Return the actor of the run's coordinator. Raises ConfigError."""
    name = f"{job.name}/coordinator"
    with suppress(ValueError):
        actor = ray.get_actor(name, NAMESPACE)
        require_same(job, _state(actor))
        return actor
    nodes = [node for node in ray.nodes() if node["Alive"]]
    ever = ray_state.state.get_max_resources_from_cluster_config()
    rooms = [(node["NodeManagerAddress"], node["Resources"]) for node in nodes]
    try:
        require_room(job, rooms, ever, waits)
    except ConfigError:
        if not has_autoscaler():
            raise
    has_head = any(HEAD in node["Resources"] for node in nodes)
    return ray.remote(Coordinator).options(
        name=name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0,
        max_restarts=-1, resources={HEAD: 0.001} if has_head else None).remote(job.to_json())


def has_autoscaler() -> bool:
    """Return whether an autoscaler may add nodes.

    Ray has no question for it, and its autoscaler does not tell the most resources. v1 reports the
    kind of each node, and calls it node_ID in a cluster without an autoscaler. v2 needs the cloud's
    id of each machine. Source: in ray/autoscaler _private/monitor.py,
    _private/readonly/node_provider.py, v2/instance_manager.
    """
    if is_autoscaler_v2():
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        return any(node.instance_id for node in status.active_nodes + status.idle_nodes)
    until = time.monotonic() + REPORT_S
    while not (report := _internal_kv_get(DEBUG_AUTOSCALING_STATUS)):
        if time.monotonic() > until:
            return False
        time.sleep(LOOK_S)
    kinds = (json.loads(report).get("autoscaler_report") or {}).get("node_type_mapping") or {}
    return any(not kind.startswith("node_") for kind in kinds.values())


def follow(job: Job, actor: Any) -> int | None:
    """Wait for the end of the run; returns its exit code, None if the cluster is lost.

    SIGTERM and SIGINT stop the run.
    """
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    say(f"The run {job.name} is on Ray. Ctrl-C stops it; the same command resumes it.")
    told, told_at, answered_at = "", time.monotonic(), time.monotonic()
    while time.monotonic() - answered_at < LOST_S:
        if stopping.is_set():
            with suppress(RayError):
                ray.get(actor.stop.remote(), timeout=ANSWER_S)
        state = _state(actor)
        if state:
            answered_at = time.monotonic()
        if state and state["exit_code"] is not None:
            if state["says"]:
                say(state["says"])
            with suppress(RayError):
                ray.kill(actor, no_restart=True)
            return int(state["exit_code"])
        if state and (sentence := remark_on(state, job, told, time.monotonic() - told_at)):
            told, told_at = sentence, time.monotonic()
            say(sentence)
        time.sleep(LOOK_S)
    return None


def _state(actor: Any) -> dict[str, Any] | None:
    """Return how the run stands; None: the actor does not answer now. Raises ConfigError."""
    try:
        state: dict[str, Any] = ray.get(actor.state.remote(), timeout=ANSWER_S)
        return state
    except GetTimeoutError:
        return None
    except RayActorError as error:
        if error.actor_init_failed:
            raise ConfigError(f"Ray cannot start the coordinator: {str(error)[:600]}. Install "
                              f"elastic-trainer with its extra `ray` on the nodes.") from error
        return None  # Ray restarts it
    except RayError:
        return None


def say(sentence: str) -> None:
    """Write a sentence to stderr."""
    print(f"elastic-trainer: {plain_text(sentence)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
