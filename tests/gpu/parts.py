"""The parts of the proof: each shows one promise on this machine's device, and returns its figures.

lab.py → here → run.py (a JSON line for each)

A part fails by an AssertionError that has the story. `SPEEDS` need a GPU; the others prove the same
on a CPU.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from cluster import Cluster
from faults import Plan
from lab import Lab

Facts = dict[str, Any]
WORKERS = 4
LAST = f"127.0.0.{WORKERS}"
STEPS = ("--steps", "40")
PAUSE_PARTS = ("noticing_s", "deciding_s", "forming_s", "transfer_s", "redoing_s")


def doctor(lab: Lab) -> Facts:
    """This machine has what a run needs."""
    done = subprocess.run([sys.executable, "-m", "elastic_trainer", "doctor", "--json"],
                          cwd=lab.empty(), capture_output=True, text=True, timeout=lab.left_s(90))
    checks = {check["what"]: check for check in json.loads(done.stdout)["checks"]}
    faults = [f"{what}: {check['found']}" for what, check in checks.items()
              if check["status"] == "failed"]
    assert not faults, faults
    if lab.device == "cuda":
        assert "NCCL" in checks["collectives"]["found"], checks["collectives"]
    return {what: checks[what]["found"] for what in ("torch", "Horovod", "collectives", "GPU")}


# --- the same weights -----------------------------------------------------------------------------

def the_same_weights(lab: Lab) -> Facts:
    """1, 2 and 4 workers end with the same bits."""
    found = {1: lab.alone(*STEPS)["weights"]}
    for workers in (WORKERS,) if lab.is_tiny else (2, WORKERS):
        with lab.cluster(workers, lab.job(*STEPS)) as cluster:
            found[workers] = ended(lab, cluster, found[1], victims=0)["weights_sha256"]
    return {"weights": found[1][:16], "workers": sorted(found)}


def ended(lab: Lab, cluster: Cluster, twin: str, victims: int) -> Facts:
    """Let a run end, and assert that it has lost nothing; returns its result."""
    (cluster.folder / "hurry").touch()
    code = cluster.wait(lab.left_s(150))
    assert code == 0, cluster.story()
    return cluster.assert_nothing_lost(twin, victims=victims)


def fp16(lab: Lab) -> Facts:
    """fp16 with a scaler, BatchNorm and an evaluation: the same bits as alone."""
    return as_alone(lab, "--model", "convnet", "--precision", "fp16", "--evaluate", *STEPS)


def batchnorm(lab: Lab) -> Facts:
    """BatchNorm's statistics do not depend on the world."""
    return as_alone(lab, "--model", "convnet", *STEPS)


def evaluation(lab: Lab) -> Facts:
    """An evaluation has the same figure, bit for bit, in a world of 4."""
    return as_alone(lab, "--model", "convnet", "--evaluate", *STEPS)


def as_alone(lab: Lab, *options: str) -> Facts:
    """Assert that 4 workers print what one prints alone."""
    twin = lab.alone(*options)
    with lab.cluster(WORKERS, lab.job(*options)) as cluster:
        ended(lab, cluster, twin["weights"], victims=0)
        output = (cluster.folder / "output.log").read_text(errors="replace")
    assert "accuracy" not in twin or f"accuracy {twin['accuracy']}" in output, output[-2000:]
    return {"weights": twin["weights"][:16], **{name: float(value) for name, value in twin.items()
                                                if name == "accuracy"}}


def resume(lab: Lab) -> Facts:
    """Everyone is killed, and the run goes on from its checkpoint to the same bits."""
    options = ("--steps", "40", "--checkpoint-every", "5")
    twin = lab.alone(*options)
    with lab.cluster(WORKERS, lab.job(*options, "--step-s", "0.1")) as cluster:
        cluster.wait_for("checkpoint", lambda: cluster.events("state.checkpoint_published"),
                         lab.left_s(120))
        cluster.kill_everyone()
        cluster.start()
        (cluster.folder / "hurry").touch()
        assert cluster.wait(lab.left_s(150)) == 0, cluster.story()
        result = json.loads((cluster.run_dir / "result.json").read_text())
        assert result["weights_sha256"] == twin["weights"], cluster.story()
        return {"weights": twin["weights"][:16], "steps_redone": result["steps_redone"]}


# --- faults ---------------------------------------------------------------------------------------

class Faults:
    """One run of 4 workers to which faults happen, one after the other.

    Each fault is a part of the proof. A fault that fails ends the run, and the next one has another
    run. The end of the run is a part, too: its weights are those of the job alone.
    """

    def __init__(self) -> None:
        self.cluster: Cluster | None = None
        self._context: Any = None
        self.victims = 0
        self.is_drained = False

    def run(self, lab: Lab) -> Cluster:
        """Return the run, of which all workers train."""
        if self.cluster is None:
            self._context = lab.cluster(
                WORKERS, lab.job("--steps", lab.long_steps, "--step-s", "0.2"))
            self.cluster, self.victims = self._context.__enter__(), 0
        self.cluster.set_hosts(self.cluster.all_hosts)
        self.is_drained = False
        generation = self.generation()
        if not generation or self.size() != WORKERS:
            self.wait_for_world(lab, WORKERS, generation)
        step = max((e["step"] for e in self.cluster.events("worker.step_committed")), default=0)
        self.cluster.wait_for("two more steps", lambda: any(
            e["step"] >= step + 2 for e in self.run_as_it_is().events("worker.step_committed")),
            lab.left_s(60))
        return self.cluster

    def end(self) -> None:
        """End the run, if there is one."""
        if self._context is not None:
            context, self._context, self.cluster = self._context, None, None
            context.__exit__(None, None, None)

    def part(self, act: Callable[[Faults, Lab], Facts]) -> Callable[[Lab], Facts]:
        """Make a part of a fault."""
        def proved(lab: Lab) -> Facts:
            try:
                return act(self, lab)
            except BaseException:
                self.end()
                raise

        proved.__name__, proved.__doc__ = act.__name__, act.__doc__
        return proved

    def run_as_it_is(self) -> Cluster:
        """Return the run, whatever its size."""
        assert self.cluster
        return self.cluster

    def started(self) -> list[Facts]:
        return self.run_as_it_is().events("worker.generation_started")

    def generation(self) -> int:
        """Return the number of the present generation; 0: there is none."""
        return max((e["generation"] for e in self.started()), default=0)

    def size(self) -> int:
        return int(max(self.started(), key=lambda e: e["generation"])["size"])

    def wait_for_world(self, lab: Lab, size: int, after: int) -> None:
        """Wait until a world of this size has done a step."""
        cluster = self.run_as_it_is()
        cluster.wait_for(f"a step of {size} workers", lambda: [
            e for e in cluster.committed(after + 1) if e["size"] == size], lab.left_s(120))

    def lose(self, lab: Lab, count: int, number: int) -> Facts:
        """Send a signal to the last workers; returns the pause of the survivors."""
        cluster = self.run(lab)
        generation, hosts = self.generation(), cluster.all_hosts[WORKERS - count:]
        cluster.signal_workers(hosts, number)
        self.victims += count
        self.wait_for_world(lab, WORKERS - count, generation)
        return self.pause(lab, generation)

    def drain(self, lab: Lab, cluster: Cluster) -> Facts:
        """Take the last host from the list; returns the pause of the others."""
        generation = self.generation()
        cluster.set_hosts(cluster.all_hosts[:-1])
        self.wait_for_world(lab, WORKERS - 1, generation)
        self.is_drained = True
        return self.pause(lab, generation)

    def pause(self, lab: Lab, after: int) -> Facts:
        """Return the pause of the first change after a generation, in seconds."""
        cluster = self.run_as_it_is()
        ended = cluster.wait_for("the pause's end", lambda: [
            e for e in cluster.events("worker.pause_ended") if e["generation"] > after],
            lab.left_s(60))[0]
        return {"pause_s": round(ended["duration_s"], 3),
                **{part: round(ended[part], 3) for part in PAUSE_PARTS if part in ended}}


def kill_one(faults: Faults, lab: Lab) -> Facts:
    """SIGKILL of one of 4 workers: the others go on."""
    return faults.lose(lab, 1, signal.SIGKILL)


def kill_two(faults: Faults, lab: Lab) -> Facts:
    """SIGKILL of two of 4 workers at once."""
    return faults.lose(lab, 2, signal.SIGKILL)


def freeze_one(faults: Faults, lab: Lab) -> Facts:
    """SIGSTOP of one of 4 workers: the driver evicts it."""
    return faults.lose(lab, 1, signal.SIGSTOP)


def drain_one(faults: Faults, lab: Lab) -> Facts:
    """A host leaves the list: its worker leaves between two steps, and nothing is done again."""
    cluster = faults.run(lab)
    return faults.drain(lab, cluster)


def join(faults: Faults, lab: Lab) -> Facts:
    """A host comes onto the list: a worker boots beside the training, and joins."""
    if not faults.is_drained:
        faults.drain(lab, faults.run(lab))
    generation, cluster = faults.generation(), faults.run_as_it_is()
    cluster.set_hosts(cluster.all_hosts)
    faults.is_drained = False
    faults.wait_for_world(lab, WORKERS, generation)
    return faults.pause(lab, generation)


def nothing_was_lost(faults: Faults, lab: Lab) -> Facts:
    """The run of the faults ends with the weights of the job alone, each sample once."""
    cluster = faults.run(lab)
    twin = lab.alone("--steps", lab.long_steps)["weights"]
    result = ended(lab, cluster, twin, victims=faults.victims)
    faults.end()
    return {"weights": twin[:16], "victims": faults.victims,
            "steps_redone": result["steps_redone"]}


# --- what only a GPU has -------------------------------------------------------------------------

def gradients_stay_on_the_gpu(lab: Lab) -> Facts:
    """The gradients of 2 workers travel over NCCL: a step copies less than 1 MiB to the host."""
    found = {arm: lab.measured_by(2, "--arms", arm, "--steps", "6", "--profile",
                                  str(lab.empty() / "profile"))["to_host_mib"]
             for arm in ("exact", "ring")}
    assert all(mib < 1.0 for mib in found.values()), found
    return {f"{arm}_to_host_mib": mib for arm, mib in found.items()}


def kill_in_allreduce(lab: Lab) -> Facts:
    """SIGKILL of one of 4 while 400 MB of gradients travel over NCCL: nobody hangs in a kernel."""
    return one_fault(lab, Plan().kill(host=LAST, at="step.computed", step=5), "--width", "2048",
                     "--steps", "12")


def freeze_in_init(lab: Lab) -> Facts:
    """SIGSTOP of one of 4 before it comes to NCCL's first communicator, for which 3 wait."""
    return one_fault(lab, Plan().freeze(host=LAST, at="world.generation_entered", generation=1),
                     "--steps", "20")


def cuda_error(lab: Lab) -> Facts:
    """A device-side assert poisons the context of one of 4: it leaves alone."""
    return one_fault(lab, Plan().add("cuda_assert", host=LAST, at="step.computed", step=5),
                     "--steps", "20")


def one_fault(lab: Lab, plan: Plan, *options: str) -> Facts:
    """Run a job to which one fault happens; returns the pause of the survivors."""
    twin = lab.alone(*options)["weights"]
    with lab.cluster(WORKERS, lab.job(*options), plan=plan) as cluster:
        cluster.wait_until_fired()
        ended(lab, cluster, twin, victims=1)
        pauses = [e for e in cluster.events("worker.pause_ended") if e["generation"] > 1]
        gone = cluster.lost()[0]
    return {"exit": gone["reason"], "pause_s": round(pauses[0]["duration_s"], 3),
            **{part: round(pauses[0][part], 3) for part in PAUSE_PARTS if part in pauses[0]}}


def memory(lab: Lab) -> Facts:
    """After many generations a survivor holds as much memory as after two."""
    file = lab.empty() / "memory.jsonl"
    command = lab.job("--steps", "100000", "--step-s", "0.1", "--memory", str(file))
    with lab.cluster(2, command) as cluster:
        stays, goes = cluster.all_hosts
        generation = cluster.wait_for_world(2)
        while generation < lab.generations:
            cluster.wait_for("a step", lambda new=generation: cluster.committed(new),
                             lab.left_s(60))
            cluster.signal_worker(goes, signal.SIGKILL)
            # Another host takes its place: the same one would have a back-off, longer each time.
            goes = f"127.0.0.{int(goes.rpartition('.')[2]) + 1}"
            cluster.set_hosts([stays, goes])
            generation = cluster.wait_for_world(2, after=generation)
        (survivor,) = [pid for name, pid in cluster.live_pids().items()
                       if name.startswith(f"{stays}/")]
        assert not [e for e in cluster.lost() if e["worker"].startswith(f"{stays}/")]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    held = [line["mib"] for line in lines if line["pid"] == survivor]
    assert len(held) >= lab.generations - 1, held
    first, last = held[1], statistics.median(held[-3:])
    assert last <= 1.05 * first + (16 if lab.device == "cuda" else 64), held
    return {"generations": generation, "mib_after_2": round(first), "mib_at_end": round(last)}


# --- speeds ---------------------------------------------------------------------------------------

def speeds_of(model: str, *options: str) -> Callable[[Lab], Facts]:
    def proved(lab: Lab) -> Facts:
        arms = [*(() if options else ("plain", "ring")), "deterministic", "exact"]
        measured = lab.measured("--model", model, "--rounds", "3", "--arms", *arms, *options)
        assert measured, "no arm came to its end in time"
        found = {arm: line["step_ms"] for arm, line in measured.items()}
        return {f"{arm}_ms": value for arm, value in found.items()} | {
            f"{arm}_mib": line["peak_mib"] for arm, line in measured.items()} | {
            f"{arm}_to_{base}": ratio(found, base, arm) for arm, base in PAIRS
            if {arm, base} <= found.keys()}

    proved.__name__ = f"speed_of_{model}" + ("_compiled" if options else "")
    proved.__doc__ = "Plain loops and ours, with the same micro-batches, alone on the device."
    return proved


PAIRS = (("exact", "deterministic"), ("exact", "plain"), ("ring", "plain"))


def ratio(found: Facts, base: str, arm: str) -> float:
    """Return an arm's speed as a part of another one's."""
    return round(float(found[base]) / float(found[arm]), 3)


def two_workers(lab: Lab) -> Facts:
    """DDP, exact and ring with 2 workers, which share the device."""
    found = {"ddp": lab.measured_ddp(2)["step_ms"]} | {
        arm: lab.measured_by(2, "--arms", arm)["step_ms"] for arm in ("exact", "ring")}
    return {f"{name}_ms": value for name, value in found.items()} | {
        "exact_to_ddp": ratio(found, "ddp", "exact"), "ring_to_ddp": ratio(found, "ddp", "ring")}


def four_workers(lab: Lab) -> Facts:
    """Exact and ring with 4 workers, which share the device."""
    found = {arm: lab.measured_by(4, "--arms", arm)["step_ms"] for arm in ("exact", "ring")}
    return {f"{name}_ms": value for name, value in found.items()} | {
        "ring_to_exact": ratio(found, "exact", "ring")}


def checkpoint_pause(lab: Lab) -> Facts:
    """The pause of a step whose checkpoint is taken, for GPT-124M with AdamW. A first one may wait
    for its memory."""
    with lab.cluster(1, lab.speed("--arms", "exact", "--checkpoint-every", "8", "--steps",
                                  "40")) as cluster:
        assert cluster.wait(lab.left_s(150)) == 0, cluster.story()
        pauses = [e["checkpoint_s"] for e in cluster.events("worker.step_committed")
                  if e.get("checkpoint_s") is not None]
        written = [e["bytes"] for e in cluster.events("state.checkpoint_published")]
    assert len(pauses) > 1 and written, f"the pauses of checkpoints are {pauses}"
    return {"pause_ms": round(1000 * statistics.median(pauses[1:]), 2),
            "first_ms": round(1000 * pauses[0], 2), "bytes": max(written),
            "checkpoints": len(pauses)}


FAULTS = Faults()
PROOFS: list[Callable[[Lab], Facts]] = [
    doctor, the_same_weights,
    *(FAULTS.part(fault) for fault in (kill_one, kill_two, freeze_one, drain_one, join,
                                       nothing_was_lost)),
    fp16, batchnorm, evaluation, resume]
ON_GPU: list[Callable[[Lab], Facts]] = [
    gradients_stay_on_the_gpu, kill_in_allreduce, freeze_in_init, cuda_error]
SPEEDS: list[Callable[[Lab], Facts]] = [
    speeds_of("gpt"), speeds_of("resnet"), two_workers, four_workers, checkpoint_pause,
    speeds_of("gpt", "--compile"), speeds_of("resnet", "--compile")]
