"""How long, and with how much memory, a worker finds its next samples, at a start and a resize.

    .venv/bin/python tests/bench/schedule.py      (10 to 30 s; the last line is one JSON object)

Ours has a billion samples, the peer 10 million.
- ours: construct the Schedule, then the samples of all micro-batches of a step in the middle of an
  epoch (a resize rebuilds nothing), and of its last step
- peer: horovod.torch.elastic.sampler.ElasticSampler: construct, record half an epoch, one reset(),
  as a resize makes it (0.28.1 makes two), and start to iterate

schedule, Horovod's sampler → here → stdout

Each of the two is a new process with one repetition, cold, as at a real start. Time starts after
the imports. Memory is the growth of the process's peak since then: VmHWM less the VmRSS of before.
Memory that the imports have freed counts, too.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeVar

OURS_SAMPLES, PEER_SAMPLES = 10**9, 10**7
GLOBAL_BATCH, MICROBATCHES = 4096, 16

T = TypeVar("T")


def ours() -> dict[str, float]:
    from elastic_trainer.schedule.schedule import Schedule

    def construct() -> Schedule:
        return Schedule(dataset_size=OURS_SAMPLES, global_batch=GLOBAL_BATCH,
                        microbatches=MICROBATCHES, epochs=2, seed=1)

    def samples(step: int) -> int:
        return sum(schedule.microbatch_samples(step, microbatch).size
                   for microbatch in range(MICROBATCHES))

    before = status_mb("VmRSS")
    schedule, construct_s = timed(construct)
    middle, last = schedule.steps_per_epoch // 2, schedule.steps_per_epoch - 1
    at_middle, middle_s = timed(lambda: samples(middle))
    at_last, last_s = timed(lambda: samples(last))
    _, warm_s = timed(lambda: samples(middle + 1))
    assert at_middle == GLOBAL_BATCH and at_last == OURS_SAMPLES % GLOBAL_BATCH
    return {
        "s": construct_s + middle_s + last_s,
        "mb": status_mb("VmHWM") - before,
        "warm_microbatch_us": warm_s / MICROBATCHES * 1e6,
    }


def peer() -> dict[str, float]:
    import horovod.torch as hvd
    from horovod.torch.elastic.sampler import ElasticSampler

    hvd.init()
    before = status_mb("VmRSS")
    sampler, construct_s = timed(lambda: ElasticSampler(range(PEER_SAMPLES)))
    sampler.record_batch(0, PEER_SAMPLES // 2)
    _, reset_s = timed(sampler.reset)
    _, iterate_s = timed(lambda: next(iter(sampler)))
    assert len(sampler) == PEER_SAMPLES // 2
    return {
        "s": construct_s + reset_s + iterate_s,
        "mb": status_mb("VmHWM") - before,
        "construct_s": construct_s,
        "reset_s": reset_s,
        "iterate_s": iterate_s,
    }


def timed(act: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    result = act()
    return result, time.perf_counter() - start


def status_mb(key: str) -> float:
    """Read one line of /proc/self/status: VmRSS is the memory now, VmHWM its peak. Source:
    proc(5)."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines
                    if line.startswith(key + ":")) * 1024 / 1e6


def in_fresh_process(arm: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, arm], stdout=subprocess.PIPE, text=True,
                          check=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    return {f"{arm}_{key}": float(f"{value:.4g}") for key, value in measured.items()}


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps({"ours": ours, "peer": peer}[sys.argv[1]]()))
    else:
        sizes = {"ours_samples": OURS_SAMPLES, "peer_samples": PEER_SAMPLES,
                 "global_batch": GLOBAL_BATCH}
        print(json.dumps(in_fresh_process("ours") | in_fresh_process("peer") | sizes))
