"""One arm of tests/bench/stream.py: reads 3 epochs of samples, or resumes in the middle of the
third, and prints the seconds as JSON.

    python streams.py ARM FOLDER CACHE SAMPLES
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

BATCH, EPOCHS, LOADERS = 64, 3, 2
KEEP_BYTES = 4 << 30
ARCHIVES = "s3://bucket/tar/*.tar"


def main() -> None:
    """Run the arm."""
    arm, folder, cache, samples = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    act: Any = {
        "index": partial(ours, None), "ours": partial(read_ours, cache),
        "ours_uncached": partial(read_ours, None), "resume_ours": partial(resume_ours, cache),
        "webdataset": partial(read_webdataset, folder, None),
        "webdataset_cached": partial(read_webdataset, folder, cache),
        "streaming": partial(read_streaming, folder, cache),
        "resume_streaming": partial(resume_streaming, folder, cache),
        "write_mds": partial(write_mds, cache)}[arm]
    found = act(samples)
    print(json.dumps(found if isinstance(found, dict) else {}))


def tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(numpy.frombuffer(data, "u1").copy())


def timed(epochs: Iterable[Iterable[Any]], samples: int, each_once: bool = True) -> dict[str, Any]:
    """Read epochs; the seconds of each."""
    found = []
    for epoch in epochs:
        started, count, total = time.monotonic(), 0, 0
        for bodies, classes in epoch:
            count += len(classes)
            total += int(bodies[0, 0])
        found.append(time.monotonic() - started)
        assert not each_once or count == samples, (count, samples)
    return {"epochs_s": found}


# --- ours -----------------------------------------------------------------------------------------

def ours(cache: str | None, samples: int) -> Any:
    from elastic_trainer import TarShards

    return TarShards(ARCHIVES, fields=["bin", "cls"], decode={"bin": tensor}, cache=cache,
                     cache_bytes=KEEP_BYTES)


def reader_of(dataset: Any) -> tuple[Any, Any]:
    from elastic_trainer import Loader
    from elastic_trainer.data.loader import MicrobatchRecipe, Reader
    from elastic_trainer.schedule.schedule import Schedule

    schedule = Schedule(dataset_size=len(dataset), global_batch=BATCH, microbatches=1,
                        epochs=EPOCHS, seed=0)
    return schedule, Reader(dataset, torch.utils.data.default_collate, MicrobatchRecipe(schedule),
                            Loader(workers=LOADERS, prefetch=4), torch.device("cpu"))


def batches(schedule: Any, reader: Any, first: int, stop: int) -> Iterable[Any]:
    from elastic_trainer.data.loader import keys_after

    for step in range(first, stop):
        yield reader.take((step, 0, 0), keys_after((step, 0, 0), schedule, (0,), 1))


def read_ours(cache: str | None, samples: int) -> dict[str, Any]:
    dataset = ours(cache, samples)
    schedule, reader = reader_of(dataset)
    steps = schedule.steps // EPOCHS
    if cache is None:  # a tenth is enough
        few = samples // 10 // BATCH
        return timed([batches(schedule, reader, 0, few)], samples, each_once=False)
    result = timed((batches(schedule, reader, epoch * steps, (epoch + 1) * steps)
                    for epoch in range(EPOCHS)), samples)
    reader.close()
    return result


def resume_ours(cache: str, samples: int) -> dict[str, Any]:
    import s3fs as _  # noqa: F401 (imports are no part of it, nor of the peer's)

    from elastic_trainer.data import loader, tar  # noqa: F401

    started = time.monotonic()
    schedule, reader = reader_of(ours(cache, samples))
    next(iter(batches(schedule, reader, schedule.steps * 5 // 6, schedule.steps)))
    seconds = time.monotonic() - started
    reader.close()
    return {"resume_s": seconds}


# --- webdataset -----------------------------------------------------------------------------------

def read_webdataset(folder: Path, cache: str | None, samples: int) -> dict[str, Any]:
    import webdataset

    urls = json.loads((folder / "urls.json").read_text())
    dataset = (webdataset.WebDataset(urls, shardshuffle=len(urls), cache_dir=cache)
               .shuffle(1000).to_tuple("bin", "cls").map_tuple(tensor, int))
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, num_workers=LOADERS,
                                         persistent_workers=True, prefetch_factor=4)
    return timed((loader for _ in range(EPOCHS)), samples)


# --- streaming ------------------------------------------------------------------------------------

def streaming_of(cache: str) -> Any:
    import streaming

    class Samples(streaming.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, number: int) -> Any:
            sample = super().__getitem__(number)
            return tensor(sample["bin"]), sample["cls"]

    dataset = Samples(remote="s3://bucket/mds", local=cache, shuffle=True, batch_size=BATCH)
    return streaming.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=LOADERS,
                                         persistent_workers=True, prefetch_factor=4)


def read_streaming(folder: Path, cache: str, samples: int) -> dict[str, Any]:
    loader = streaming_of(cache)
    result = timed((loader for _ in range(EPOCHS - 1)), samples)
    started = time.monotonic()
    for number, _ in enumerate(loader):
        if number == samples // BATCH // 2:
            (folder / "state.json").write_text(json.dumps(loader.state_dict()))
    result["epochs_s"].append(time.monotonic() - started)
    return result


def resume_streaming(folder: Path, cache: str, samples: int) -> dict[str, Any]:
    import streaming as _  # noqa: F401

    started = time.monotonic()
    loader = streaming_of(cache)
    loader.load_state_dict(json.loads((folder / "state.json").read_text()))
    next(iter(loader))
    return {"resume_s": time.monotonic() - started}


def write_mds(folder: str, size: int) -> None:
    import streaming

    columns = {"bin": "bytes", "cls": "int"}
    urls = json.loads((Path(folder).parent / "urls.json").read_text())
    with streaming.MDSWriter(out=folder, columns=columns, size_limit=1000 * (size + 50)) as writer:
        for number in range(1000 * len(urls)):
            writer.write({"bin": random.Random(number).randbytes(size), "cls": number % 10})


if __name__ == "__main__":
    main()
