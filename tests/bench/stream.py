"""How fast samples come from S3, against webdataset and MosaicML's streaming, and how long a resume
takes.

    .venv/bin/python tests/bench/stream.py [--samples 20000] [--bytes 10000] [--rounds 2]

The same samples (random bytes and a class) lie in one S3 server, Ceph's radosgw with objects in
memory: as tar archives, and as MDS shards of the same size for streaming. Each arm is a
process that reads 3 epochs in batches of 64 with 2 loader processes, from an empty cache that holds
the dataset, and shuffles. The arms take turns. The peers run in a virtual environment that this
bench makes: mosaicml-streaming as installed from the package index, and of the packages that it
requires those that it imports. Its torchvision is a stand-in of three names, since the real one
cannot be imported beside this torch; StreamingDataset does not use it. webdataset reads presigned
addresses (curl) with its shuffle buffer of 1000 samples, with and without its cache; the faster one
counts.

resume_s is the time in a new process with an empty cache from the making of the dataset to the
first batch in the middle of epoch 3. The peer's is that of streaming (load_state_dict); webdataset
has no state.

A process that fails is tried again, and counted (failed). streaming 0.13.0 fails in some runs with
an IndexError of its reader (mds/reader.py, get_sample_data).

The last line is one JSON object with samples_per_s, peer_samples_per_s, resume_s (medians of the
rounds; over all 3 epochs), and the rates of the first epoch, of each peer, and of ours without a
cache.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import time
import venv
from pathlib import Path
from typing import Any

import bench
import s3_servers

PER_ARCHIVE, EPOCHS = 1000, 3
ATTEMPTS = 3
FAILED: list[str] = []
"""The arms that have failed, once for each failure. They are tried again."""
JOB = bench.HERE / "jobs" / "streams.py"
PEERS = ("mosaicml-streaming==0.13.0", "brotli", "python-snappy", "cramjam", "zstd", "catalogue",
         "numpy<2.2")
STAND_IN = {
    "__init__.py": "", "datasets.py": "class VisionDataset: ...\n", "transforms/__init__.py": "",
    "transforms/functional.py": "def to_tensor(image): raise NotImplementedError\n"}


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Write the samples, and read them with each arm."""
    peer = peers_python(folder / "peers")
    with s3_servers.ceph(folder / "s3") as endpoint:
        os.environ.update(s3_servers.environment(endpoint), S3_ENDPOINT_URL=endpoint)
        write(folder, endpoint, options.samples, options.bytes, peer)
        rates = measured(folder, peer, options.samples, options.rounds)
    return {"samples": options.samples, "bytes": options.bytes, **rates}


def measured(folder: Path, peer: str, samples: int, rounds: int) -> dict[str, Any]:
    """Run the arms in turn; returns medians."""
    found: dict[str, list[Any]] = {}
    arms = {"ours": sys.executable, "webdataset": peer, "webdataset_cached": peer,
            "streaming": peer}
    for number in range(rounds):
        for arm, python in arms.items():
            seconds = ran(python, arm, folder, folder / "cache", samples)["epochs_s"]
            found.setdefault(arm, []).append(EPOCHS * samples / sum(seconds))
            found.setdefault(f"{arm}_first", []).append(samples / seconds[0])
            print(f"round {number}, {arm}: {[round(samples / one) for one in seconds]} samples/s "
                  f"by epoch", flush=True)
        for arm in ("ours", "streaming"):
            resumed = ran(arms[arm], f"resume_{arm}", folder, folder / "cache", samples)["resume_s"]
            found.setdefault(f"resume_{arm}", []).append(resumed)
            print(f"round {number}, {arm}: resumed in {resumed:.2f} s", flush=True)
        seconds = ran(sys.executable, "ours_uncached", folder, folder / "cache",
                      samples)["epochs_s"]
        found.setdefault("ours_uncached", []).append(samples // 10 / seconds[0])
    middle = {arm: statistics.median(values) for arm, values in found.items()}
    peers = [arm for arm in arms if arm != "ours"]
    result = {
        "samples_per_s": middle["ours"],
        "peer_samples_per_s": max(middle[arm] for arm in peers),
        "first_samples_per_s": middle["ours_first"],
        "peer_first_samples_per_s": max(middle[f"{arm}_first"] for arm in peers),
        **{f"{arm}_samples_per_s": middle[arm] for arm in peers},
        "uncached_samples_per_s": middle["ours_uncached"],
    }
    return {**{name: round(value) for name, value in result.items()},
            "failed": FAILED, "resume_s": round(middle["resume_ours"], 2),
            "peer_resume_s": round(middle["resume_streaming"], 2)}


def ran(python: str, arm: str, folder: Path, cache: Path, samples: int) -> dict[str, Any]:
    """Run one arm in a process of its own; returns what it prints."""
    for _ in range(ATTEMPTS):
        with bench.empty(cache) as empty:
            done = subprocess.run([python, str(JOB), arm, str(folder), str(empty), str(samples)],
                                  capture_output=True, text=True, timeout=300)
        if not done.returncode:
            result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
            return result
        FAILED.append(arm)
        print(f"{arm} failed: {done.stderr.strip().splitlines()[-1]}", flush=True)
    raise SystemExit(f"{arm} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def peers_python(home: Path) -> str:
    """Return the Python of an environment with the peers; torch and the others are ours."""
    venv.create(home, with_pip=True)
    python = str(home / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *PEERS], check=True)
    (packages,) = home.glob("lib/python3.*/site-packages")
    ours = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "ours.pth").write_text(f"{ours}\n")
    for name, text in STAND_IN.items():
        path = packages / "torchvision" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return python


def write(folder: Path, endpoint: str, samples: int, size: int, peer: str) -> None:
    """Write the samples into the server, as archives and as MDS shards, and build our
    index."""
    client, urls = s3_servers.client(endpoint), []
    for archive in range(samples // PER_ARCHIVE):
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as tar:
            for number in range(archive * PER_ARCHIVE, (archive + 1) * PER_ARCHIVE):
                for name, body in (("bin", body_of(number, size)), ("cls", b"%d" % (number % 10))):
                    info = tarfile.TarInfo(f"{number:07d}.{name}")
                    info.size = len(body)
                    tar.addfile(info, io.BytesIO(body))
        key = f"tar/{archive:05d}.tar"
        client.put_object(Bucket=s3_servers.BUCKET, Key=key, Body=data.getvalue())
        urls.append(client.generate_presigned_url(
            "get_object", {"Bucket": s3_servers.BUCKET, "Key": key}, 7 * 24 * 3600))
    (folder / "urls.json").write_text(json.dumps(urls))
    started = time.monotonic()
    ran(sys.executable, "index", folder, folder / "cache", samples)
    print(f"the index is built in {time.monotonic() - started:.1f} s", flush=True)
    subprocess.run([peer, str(JOB), "write_mds", str(folder), str(folder / "mds"), str(size)],
                   check=True, capture_output=True)
    for path in (folder / "mds").iterdir():
        client.put_object(Bucket=s3_servers.BUCKET, Key=f"mds/{path.name}", Body=path.read_bytes())


def body_of(number: int, size: int) -> bytes:
    """Return the bytes of a sample."""
    return random.Random(number).randbytes(size)


if __name__ == "__main__":
    bench.run(measure, samples=20_000, bytes=10_000, rounds=2)
