"""Ray as a place, without Ray: what it tells of hosts, what a job must be, and what outlives an
actor."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import until, wait_for

from elastic_trainer.commands.command import main
from elastic_trainer.config import ConfigError
from elastic_trainer.discovery.place_protocol import PlaceUnavailable
from elastic_trainer.discovery.places.ray import AgentLife, Nodes, Ray, instances_of
from elastic_trainer.ray.job import (
    WAITS_S,
    Job,
    job_of,
    refusal_of,
    remark_on,
    require_room,
    require_same,
)
from elastic_trainer.ray.kept import Kept

TWO = Nodes(alive={"a" * 56: "10.0.0.1", "b" * 56: "10.0.0.2"})


def life(letter: str, name: str = "", **facts: Any) -> AgentLife:
    return AgentLife(node=letter * 56, name=name or f"ray-{letter}-1", address="10.0.0.1",
                     port=41234, **facts)


def job(**given: Any) -> Job:
    asked: dict[str, Any] = {
        "workers": (1, 8), "resources_per_worker": {"GPU": 1}, "workers_per_agent": 1, "run": "r",
        "runs_dir": "runs", "store": "", "options": (), "notices": ""}
    return job_of(["python", "train.py"], **asked | given)


def test_a_host_is_one_life_of_an_agent_on_a_living_node() -> None:
    """A second agent on a node, and the one that Ray has restarted there, are hosts of their own. A
    dead node has none, whatever its actor has answered last."""
    lives = [life("a"), life("a", "ray-a-2"), life("b"), life("c")]
    hosts = instances_of(TWO, lives, slots=2, gpus=2)
    assert [host.name for host in hosts] == ["ray-a-1", "ray-a-2", "ray-b-1"]
    assert len({host.id for host in hosts}) == 3
    assert {(host.listed_at, host.slots, host.gpus) for host in hosts} == {("10.0.0.1:41234", 2, 2)}


@pytest.mark.parametrize("deadline", [1795800000.0, 0.0])
def test_a_node_that_ray_drains_is_under_notice_until_its_deadline(deadline: float) -> None:
    """Ray tells 0 where it has none."""
    nodes = Nodes(alive=TWO.alive, drains={"a" * 56: deadline})
    drained, other = instances_of(nodes, [life("a"), life("b")], slots=1, gpus=0)
    assert drained.notice and drained.notice.action == "Ray drains its node"
    assert drained.notice.deadline == (deadline or None)
    assert drained.notice.for_good and other.notice is None


def test_a_node_without_the_script_is_no_host_and_the_user_reads_why() -> None:
    """It stays visible, with the place that lacks it."""
    (host,) = instances_of(TWO, [life("b", lacks="the script /x/train.py is not there")], 1, 0)
    assert host.state != "running"
    assert host.says == "the script /x/train.py is not there on 10.0.0.2"


def test_an_unknown_answer_of_ray_is_no_empty_list() -> None:
    """While the head is away the poller keeps its list."""
    def away() -> Nodes:
        raise PlaceUnavailable("Ray's GCS did not answer")

    place = Ray(away, lambda: [life("a")], agents=3)
    with pytest.raises(PlaceUnavailable):
        place.instances()
    there = Ray(lambda: TWO, lambda: [life("a")], agents=3)
    there.instances()
    supply = there.supply()
    assert supply and (supply.there, supply.wanted) == (1, 3)


@pytest.mark.parametrize("given, says", [
    ({"workers": (0, 4)}, "workers is"), ({"workers": (5, 4)}, "workers is"),
    ({"workers": 4}, "--workers 1:8"), ({"workers_per_agent": 3}, "divides 8"),
    ({"resources_per_worker": {}}, "resources_per_worker"),
    ({"resources_per_worker": {"GPU": -1}}, "a number above 0"), ({"run": "a/b"}, "run is 'a/b'"),
    ({"runs_dir": "/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1/runs"},
     "Ray deletes after the job")])
def test_a_job_that_ray_could_never_run_is_one_sentence_at_the_start(given: dict[str, Any],
                                                                     says: str) -> None:
    """With the remedy."""
    with pytest.raises(ConfigError, match=says):
        job(**given)


def test_more_workers_than_the_cluster_can_ever_have_are_refused() -> None:
    """Where no autoscaler promises more, and the user does not say that nodes will come."""
    asked, nodes = job(workers=(3, 8)), [("10.0.0.1", {"GPU": 1.0}), ("10.0.0.2", {"GPU": 1.0})]
    with pytest.raises(ConfigError, match="room for 2 .10.0.0.1: 1, 10.0.0.2: 1"):
        require_room(asked, nodes, None, waits=False)
    require_room(asked, nodes, None, waits=True)
    require_room(asked, nodes, {"GPU": 8.0}, waits=False)
    require_room(job(workers=(2, 8)), nodes, None, waits=False)
    with pytest.raises(ConfigError, match="no node has the resource 'TPU'"):
        require_room(job(resources_per_worker={"TPU": 1}), nodes, None, waits=False)


@pytest.mark.parametrize(("workers", "per_agent", "agents", "says"), [
    ((1, 8), 1, 0, "No node has room for a worker (an agent needs {'GPU': 1.0}). The run waits"),
    ((3, 8), 1, 2, "The nodes have room for 2 of the fewest 3 workers (an agent needs"),
    ((4, 8), 2, 1, "The nodes have room for 2 of the fewest 4 workers (an agent needs {'GPU': 2.0"),
    ((4, 8), 2, 2, ""), ((1, 8), 1, 3, "")])
def test_a_run_that_waits_for_nodes_shows_it_once_a_minute(
        workers: tuple[int, int], per_agent: int, agents: int, says: str) -> None:
    """Until the fewest workers have room, also after it has lost nodes."""
    asked = job(workers=workers, workers_per_agent=per_agent)
    state = {"faults": [], "agents": agents}
    assert remark_on(state, asked, "", WAITS_S) == ""
    due = remark_on(state, asked, "", WAITS_S + 1)
    assert due.startswith(says) and bool(due) == bool(says)
    assert not due or "ray status" in due
    assert remark_on(state, asked, due, WAITS_S + 1) == due


def test_an_agent_that_cannot_run_is_named_once_and_no_lack_of_room() -> None:
    """Another fault is told at once."""
    state = {"faults": ["pip: no such package"], "agents": 0}
    told = remark_on(state, job(), "", 0.0)
    assert told == "Ray cannot run an agent: pip: no such package"
    assert remark_on(state, job(), told, WAITS_S + 1) == ""
    other = state | {"faults": ["no space left"]}
    assert remark_on(other, job(), told, 0.0) == "Ray cannot run an agent: no space left"


def test_another_cluster_s_version_and_an_absent_one_name_the_remedy() -> None:
    """Ray's own words are in the sentence."""
    other = refusal_of("10.0.0.1:6379", "Version mismatch: The cluster was started with:\n Ray: "
                                        "2.9.0\n Python: 3.11. This process", "2.60.0")
    assert "Ray: 2.9.0" in other and "Ray 2.60.0" in other and "ray job submit" in other
    absent = refusal_of("auto", "Could not find any running Ray instance", "2.60.0")
    assert "ray start --head" in absent


def test_a_run_s_name_is_one_job_s() -> None:
    """A second submission follows the run that there is, or is refused."""
    there = {"job": job().to_json()}
    require_same(job(), there)
    with pytest.raises(ConfigError, match="another most: 8"):
        require_same(job(workers=(1, 4)), there)


def test_the_job_that_ray_keeps_has_the_script_but_no_key() -> None:
    """Ray's GCS shows the arguments of an actor's creation. A module and a program have no file."""
    asked = job(options=("--reduce", "ring"), store="s3://b/x")
    assert Job.from_json(asked.to_json()) == asked
    assert "key" not in str(asked.to_json())
    assert asked.script() == os.path.join(os.getcwd(), "train.py")
    for command in (["python", "-m", "mine.train"], ["./train.sh"], ["python", "-c", "1"]):
        assert not Job(name="r", command=tuple(command), folder="/", most=1, runs_dir="/").script()


@pytest.mark.parametrize("argv, says", [
    (["--run", "r", "--workers", "1:2"], "No command stands after --"),
    (["--run", "r", "-np", "2", "--", "python", "x.py"], "Ray names the hosts"),
    (["--run", "r", "--stepss", "2", "--", "python", "x.py"], "no option of"),
    (["--run", "r", "--workers", "4:2", "--", "python", "x.py"], "fewest")])
def test_a_command_line_that_cannot_be_meant_is_refused(
        argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before Ray is asked."""
    assert main(["ray", *argv]) == 2
    assert says in capsys.readouterr().err


def test_no_cluster_is_one_sentence_with_the_remedy(
        capfd: pytest.CaptureFixture[str]) -> None:
    """The first connection is not tried for ever."""
    pytest.importorskip("ray", reason="needs the package ray: deploy/install.sh --dev")
    assert main(["ray", "--run", "r", "--address", "127.0.0.1:1", "--", "python", "x.py"]) == 2
    assert "No Ray cluster answers at 127.0.0.1:1" in capfd.readouterr().err


def test_a_command_ends_as_after_sigterm_when_its_actor_is_killed(tmp_path: Path) -> None:
    """Ray kills an actor's children. The command is none of them, and has the time that it
    needs."""
    script = tmp_path / "slow.py"
    script.write_text("import signal, sys, time\n"
                      "def end(*_):\n    open('ended', 'w').write('as asked')\n    sys.exit(7)\n"
                      "signal.signal(signal.SIGTERM, end)\nprint(41234, flush=True)\n"
                      "while True: time.sleep(60)\n")
    told: list[str] = []
    kept = Kept("agent", [sys.executable, str(script)], os.environ, str(tmp_path), told.append)
    until(lambda: told)
    assert told == ["41234"] and kept.exit_code is None and not kept.wait(0)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert str(script) not in "".join(
        Path(f"/proc/{pid}/cmdline").read_text() for pid in children)
    kept.stop()  # as the end of this process closes the pipe
    assert wait_for("its end", lambda: kept.wait(0.1)) and kept.exit_code == 7
    assert (tmp_path / "ended").read_text() == "as asked"


def test_a_command_that_is_not_there_is_an_end_too(tmp_path: Path) -> None:
    """Nobody waits for it."""
    kept = Kept("supervisor", ["/no/such/program"], os.environ, str(tmp_path))
    began = time.monotonic()
    assert kept.wait(120) and kept.exit_code == 127, time.monotonic() - began
