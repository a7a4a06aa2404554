"""The cost of discovery at 1,000 and 10,000 instances, and the time until a notice is in the hosts
file.

    .venv/bin/python tests/bench/discovery.py

An EC2 API on loopback describes the instances in pages of 1,000, like that of AWS (moto takes
minutes to make 10,000 instances). A poll is the answer of EC2, the decision and the hosts file.
horovodrun calls the script every second.

Last line: one JSON object with script_ms, poll_s_1000, calls_1000, poll_s_10000, calls_10000,
notice_to_file_s, met.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import bench
from preemption import ROOT, Machines
from waiting import wait_for

from elastic_trainer.discovery.hosts import Policy
from elastic_trainer.discovery.places.ec2 import Ec2
from elastic_trainer.discovery.poll import Poller

PAGE = 1000
SCRIPT_MS, NOTICE_S = 60.0, 3.0
"""The promised limits."""


def instance(number: int) -> str:
    """Return an instance as DescribeInstances describes it, in its own reservation."""
    name = f"i-{number:017x}"
    return (f"<item><instancesSet><item><instanceId>{name}</instanceId>"
            f"<privateDnsName>{name}.internal</privateDnsName>"
            f"<instanceType>c5.large</instanceType>"
            f"<launchTime>2026-01-01T00:00:00.000Z</launchTime>"
            f"<instanceLifecycle>spot</instanceLifecycle>"
            f"<instanceState><code>16</code><name>running</name></instanceState>"
            f"<placement><availabilityZone>us-east-1a</availabilityZone></placement>"
            f"</item></instancesSet></item>")


class Api(BaseHTTPRequestHandler):
    """DescribeInstances, DescribeInstanceStatus and DescribeInstanceTypes, in pages."""

    count = 0

    def do_POST(self) -> None:
        asked = dict(
            urllib.parse.parse_qsl(self.rfile.read(int(self.headers["Content-Length"])).decode()))
        action, start = asked["Action"], int(asked.get("NextToken", 0))
        stop = min(start + PAGE, self.count)
        token = f"<nextToken>{stop}</nextToken>" if stop < self.count else ""
        match action:
            case "DescribeInstances":
                items = "".join(map(instance, range(start, stop)))
                text = f"<reservationSet>{items}</reservationSet>{token}"
            case "DescribeInstanceStatus":
                fine = "<status>ok</status>"
                items = "".join(
                    f"<item><instanceId>i-{n:017x}</instanceId>"
                    f"<instanceStatus>{fine}</instanceStatus>"
                    f"<systemStatus>{fine}</systemStatus></item>" for n in range(start, stop))
                text = f"<instanceStatusSet>{items}</instanceStatusSet>{token}"
            case _:
                text = ("<instanceTypeSet><item><instanceType>c5.large</instanceType></item>"
                        "</instanceTypeSet>")
        body = (f'<{action}Response xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">{text}'
                f"</{action}Response>").encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def polled(folder: Path, count: int) -> tuple[float, int]:
    """Return seconds and API calls of a poll, after the first."""
    Api.count = count
    cloud = Ec2({"Job": "bench"})
    poller = Poller(cloud, folder / f"hosts-{count}", Policy(settle_s=0.0), interval_s=0.0,
                    patience_s=60.0)
    with ThreadPoolExecutor(1) as pool:
        poller.poll(pool)
        calls, started = cloud.calls, time.monotonic()
        poller.poll(pool)
    assert len((folder / f"hosts-{count}").read_text().splitlines()) == count
    return time.monotonic() - started, cloud.calls - calls


def script_ms(folder: Path) -> float:
    """Return the median time of the script, in milliseconds."""
    (folder / "hosts").write_text("host:1\n" * 100)
    seconds = []
    for _ in range(20):
        started = time.monotonic()
        subprocess.run([sys.executable, "-S", ROOT / "discovery" / "__main__.py", "hosts-file",
                        folder / "hosts", "120"], check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.monotonic() - started)
    return statistics.median(seconds) * 1000


def notice_to_file(folder: Path) -> float:
    """Return the seconds from a notice in the metadata service to a hosts file without the host (a
    real agent)."""
    with bench.empty(folder) as empty, ExitStack() as stack:
        hosts = empty / "noticed"  # a poller remembers there who was under notice
        machines = Machines(["127.0.0.1"], empty, stack)
        stack.enter_context(machines.polled(hosts))
        wait_for("a host", lambda: hosts.read_text())
        machines.services["127.0.0.1"].announce()
        started = time.monotonic()
        wait_for("its end", lambda: not hosts.read_text())
        return time.monotonic() - started


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ.update(AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.server_address[1]}",
                      AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x", AWS_REGION="us-east-1",
                      AWS_DEFAULT_REGION="us-east-1")
    small, large = polled(folder, 1000), polled(folder, 10000)
    notice_s, script = max(notice_to_file(folder) for _ in range(3)), script_ms(folder)
    return {"script_ms": round(script, 1), "poll_s_1000": round(small[0], 3),
            "calls_1000": small[1], "poll_s_10000": round(large[0], 3), "calls_10000": large[1],
            "notice_to_file_s": round(notice_s, 2),
            "met": script < SCRIPT_MS and notice_s < NOTICE_S}


if __name__ == "__main__":
    bench.run(measure)
