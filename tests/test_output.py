"""A worker that prints when its reader has gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SPEAKS_ON = """
import sys
from elastic_trainer.host.output import outlive_readers
outlive_readers()
print("first", flush=True)
sys.stdin.readline()
for number in range(100):
    print(number, "nobody reads this", flush=True)
    print(number, "nor this", file=sys.stderr)
open(sys.argv[1], "w").write("went on")
"""


def test_a_worker_goes_on_when_no_process_reads_its_output(tmp_path: Path) -> None:
    """Both pipes break between two prints, as when the driver is killed; the third line of work is
    done all the same."""
    worker = subprocess.Popen([sys.executable, "-c", SPEAKS_ON, str(tmp_path / "done")],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True)
    assert worker.stdin and worker.stdout and worker.stderr
    assert worker.stdout.readline() == "first\n"
    worker.stdout.close()
    worker.stderr.close()
    worker.stdin.write("go on\n")
    worker.stdin.close()
    assert worker.wait(60) == 0 and (tmp_path / "done").read_text() == "went on"


def test_a_process_goes_on_when_its_output_s_disk_is_full() -> None:
    """The run does not fail by it: its exit code is that of the training."""
    code = "from elastic_trainer.host.output import outlive_readers\n" \
           "outlive_readers()\nfor i in range(9999): print(i)\nexit(3)"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full,
                              stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (3, "")


MANY_WORKERS = """
import os, sys, threading
from elastic_trainer.driver.process import WorkerProcess
from elastic_trainer.host.output import outlive_readers
outlive_readers()
def forward(host):
    process = WorkerProcess.__new__(WorkerProcess)
    process.host, process.is_remote = host, False
    reader, writer = map(os.fdopen, os.pipe(), ("rb", "wb"))
    writer.write(b"a line\\n" * 500)
    writer.close()
    process._forward("stdout", reader, sys.stdout)
threads = [threading.Thread(target=forward, args=(f"host-{n}",)) for n in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_lines_of_different_workers_stay_lines() -> None:
    """However many of them speak at once."""
    done = subprocess.run([sys.executable, "-c", MANY_WORKERS], capture_output=True,
                          text=True, check=True)
    assert sorted(done.stdout.splitlines()) == [f"[host-{n}]<stdout>: a line" for n in range(4)
                                                for _ in range(500)]
