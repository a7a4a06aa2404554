"""What workers' environments say to glibc: blocks as large as a gradient are not mapped anew for
each step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_trainer.config import ALLOCATOR

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
BLOCKS = """
import ctypes, resource, threading
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def step():
    block = libc.malloc(40 << 20)
    libc.memset(block, 1, 40 << 20)
    libc.free(block)

def steps():  # as Horovod does, in a thread of its own
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    print(faults * resource.getpagesize() >> 20)

thread = threading.Thread(target=steps)
thread.start()
thread.join()
"""


@pytest.mark.parametrize(("environment", "least", "most"), [(ALLOCATOR, 0, 10), ({}, 300, 500)])
def test_the_memory_of_a_step_serves_the_next(environment: dict[str, str], least: int,
                                              most: int) -> None:
    """In MB of new pages for ten blocks of 40; what it answers is shown beside it."""
    if not environment and HUGE_PAGES.exists() and "[always]" in HUGE_PAGES.read_text():
        pytest.skip("huge pages for everybody: their faults are few, too")
    env = {k: v
           for k, v in os.environ.items() if k not in (*ALLOCATOR, "GLIBC_TUNABLES")} | environment
    new = subprocess.run([sys.executable, "-c", BLOCKS],
                         env=env,
                         capture_output=True,
                         text=True,
                         check=True,
                         timeout=300)
    assert least <= int(new.stdout) <= most
