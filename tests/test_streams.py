"""Samples of archives, Parquet files and folders of images, on a disk and in a real S3 server."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import random
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import s3_servers
import test_patterns
import torch
from faulty_proxy import FaultyProxy, proxied
from test_loop import built
from test_trainer import Model, in_a_breaking_world, trainer_of

from elastic_trainer import ConfigError, ImageFolder, Loader, ParquetFiles, TarShards
from elastic_trainer.__main__ import main
from elastic_trainer.data import files as files_module
from elastic_trainer.data.cache import CLAIMS, INNER, LOCK, MARKER
from elastic_trainer.data.files import DataUnavailable, Files, Range
from elastic_trainer.data.index import Index, store

pytestmark = pytest.mark.usefixtures("no_launcher")
ARCHIVES, EACH = 3, 20
FEATURES, CLASSES = 5, 3


def write_tar(path: Path, members: Sequence[tuple[str, bytes]],
              form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def npy(values: Any) -> bytes:
    file = io.BytesIO()
    numpy.lib.format.write_array(file, numpy.asarray(values))
    return file.getvalue()


def values_of(number: int) -> numpy.ndarray:
    return numpy.random.default_rng(number).standard_normal(FEATURES).astype("f4")


def members_of(archive: int) -> list[tuple[str, bytes]]:
    return [(f"{number:04d}.{name}", data)
            for number in range(archive * EACH, (archive + 1) * EACH)
            for name, data in (("npy", npy(values_of(number))),
                               ("cls", str(number % CLASSES).encode()))]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder of archives."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for archive in range(ARCHIVES):
        write_tar(folder / f"{archive:03d}.tar", members_of(archive))
    return folder


def assert_right(samples: Sequence[Any], numbers: Sequence[int]) -> None:
    for sample, number in zip(samples, numbers, strict=True):
        assert sample["__key__"] == f"{number:04d}" and sample["cls"] == number % CLASSES
        assert sample["npy"].tobytes() == values_of(number).tobytes()


# --- archives -------------------------------------------------------------------------------------

@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_samples_are_those_of_webdataset(tmp_path: Path, form: int) -> None:
    """With long names, folders with dots, several dots, capital letters, and files without a
    name."""
    webdataset = pytest.importorskip("webdataset")
    long = "x" * (40 if form == tarfile.USTAR_FORMAT else 180)
    path = write_tar(tmp_path / "a.tar", [
        ("__meta__/a.json", b"{}"), (f"v1.0/{long}.seg.TXT", b"one"), (f"v1.0/{long}.bin", b""),
        ("README", b"no sample"), ("v1.0/b.json", b'{"a": [1]}'), ("v1.0/b.txt", "ü".encode()),
        ("c.cls", b"7")], form)
    theirs = [{name: value for name, value in sample.items()
               if name not in ("__url__", "__local_path__")}
              for sample in webdataset.WebDataset(str(path), shardshuffle=False)]
    ours = TarShards(path, decode="bytes")
    assert [ours[number] for number in range(len(ours))] == theirs
    assert TarShards(path)[1] == {"__key__": "v1.0/b", "json": {"a": [1]}, "txt": "ü"}


def test_images_are_tensors_or_pillows(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = numpy.arange(2 * 3 * 3, dtype="u1").reshape(2, 3, 3)
    file = io.BytesIO()
    image.fromarray(pixels).save(file, "png")
    path = write_tar(tmp_path / "a.tar", [("a.png", file.getvalue()), ("a.cls", b"1")])
    tensor, number = TarShards(path, fields=["png", "cls"])[0]
    assert torch.equal(tensor, torch.from_numpy(pixels).permute(2, 0, 1)) and number == 1
    assert TarShards(path, decode="pil")[0]["png"].size == (3, 2)
    assert TarShards(path, decode={"png": len}, transform=lambda sample: sample["png"])[0] == len(
        file.getvalue())


@pytest.mark.parametrize("cut", [0.02, 0.5, 0.97])
def test_an_archive_that_is_cut_off_is_refused(tmp_path: Path, cut: float) -> None:
    """In a body, in a header, and where only the end of the archive is missing."""
    whole = write_tar(tmp_path / "whole.tar", members_of(0)).read_bytes()
    end = len(members_of(0)) * 1024
    for size in (int(end * cut), int(end * cut) // 512 * 512, end):
        path = tmp_path / f"{size}.tar"
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=f"{size}.tar is cut off"):
            TarShards(path)


@pytest.mark.parametrize(("members", "text"), [
    ([("a.pyd", b"")], "'pyd', which is a pickle"), ([("a.x.pickle", b"")], "which is a pickle"),
    ([("a.txt", b""), ("b.txt", b""), ("a.cls", b"")], "do not follow each other"),
    ([("a.txt", b""), ("a.TXT", b"")], "the field txt of the sample a twice"),
    ([("a", b"")], "have no sample")])
def test_an_archive_that_cannot_be_read_rightly_is_refused(
        tmp_path: Path, members: list[tuple[str, bytes]], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TarShards(write_tar(tmp_path / "a.tar", members))


def test_a_compressed_archive_and_an_array_of_objects_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w:gz"):
        pass
    with pytest.raises(ConfigError, match="is compressed"):
        TarShards(tmp_path / "a.tar")
    objects = io.BytesIO()
    numpy.lib.format.write_array(objects, numpy.array([{}], dtype=object), allow_pickle=True)
    shards = TarShards(write_tar(tmp_path / "b.tar", [("a.npy", objects.getvalue())]))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        shards[0]


def test_a_wrong_option_names_the_right_ones(shards: Path) -> None:
    for options, text in [({"fields": ["png"]}, "have cls, npy"), ({"decode": "jpg"}, "decode is"),
                          ({"decode": {"png": len}}, "have cls, npy"),
                          ({"block_bytes": 1}, "block_bytes is 1"),
                          ({"cache": shards / "c", "cache_bytes": 0}, "cache_bytes is 0")]:
        with pytest.raises(ConfigError, match=text):
            TarShards(shards / "*.tar", **options)  # type: ignore[arg-type]
    for urls, text in [("nothing-*.tar", "names no file"), ("nothing.tar", "is not there"),
                       (shards, "is a folder"),
                       ([shards / "000.tar"] * 2, "named twice")]:
        with pytest.raises(ConfigError, match=text):
            TarShards(urls)  # type: ignore[arg-type]


# --- the index ------------------------------------------------------------------------------------

def index_of(folder: Path) -> Path:
    (path,) = (folder / ".elastic-trainer").iterdir()
    return path


def test_the_index_is_built_once_and_moves_with_the_data(shards: Path, tmp_path: Path) -> None:
    assert len(TarShards(shards / "{000..002}.tar")) == ARCHIVES * EACH
    before = index_of(shards).stat()
    moved = shards.rename(tmp_path / "moved")
    again = TarShards(moved / "{000..002}.tar")
    assert_right(again.__getitems__([59, 0, 21]), [59, 0, 21])
    assert index_of(moved).stat() == before


def test_data_that_changed_behind_its_index_is_an_error(shards: Path) -> None:
    dataset, path = TarShards(shards / "*.tar"), shards / "001.tar"
    content = path.read_bytes()
    at = content.index(npy(values_of(25))) + 90
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1:])
    with pytest.raises(DataUnavailable, match="sample 0025 of .*001.tar has other bytes"):
        dataset[25]
    write_tar(path, members_of(1)[2:])
    path.write_bytes(path.read_bytes() + bytes(512))
    with pytest.raises(ConfigError, match="001.tar has .* its index says .*--rebuild"):
        TarShards(shards / "*.tar")
    assert main(["index", "--rebuild", f"{shards}/*.tar"]) == 0
    assert len(TarShards(shards / "*.tar")) == ARCHIVES * EACH - 1


def test_a_damaged_index_is_an_error(shards: Path) -> None:
    TarShards(shards / "*.tar")
    path = index_of(shards)
    content = path.read_bytes()
    for damaged in (content[:-1], content[:200] + b"?" + content[201:], b""):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="index .* is damaged"):
            TarShards(shards / "*.tar")


def test_the_first_index_stays_when_two_are_stored(tmp_path: Path) -> None:
    place, first = str(tmp_path / "index" / "a"), Index("tar", "", [], {"fields": []})
    store(Files(), place, first)
    store(Files(), place, Index("tar", "", [], {"fields": ["b"]}))
    assert Path(place).read_bytes() == first.packed()


# --- Parquet --------------------------------------------------------------------------------------

@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A folder of Parquet files with small row groups."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "rows").mkdir()
    for file in range(ARCHIVES):
        numbers = range(file * EACH, (file + 1) * EACH)
        parquet.write_table(arrow.table({
            "text": [f"text {number}" for number in numbers],
            "npy": arrow.array([values_of(number) for number in numbers],
                               arrow.list_(arrow.float32())),
            "cls": [number % CLASSES for number in numbers],
            "maybe": [None if number % 2 else {"bytes": b"x" * number} for number in numbers],
        }), tmp_path / "rows" / f"{file}.parquet", row_group_size=7)
    return tmp_path / "rows"


def test_rows_are_those_of_pyarrow(rows: Path) -> None:
    dataset = ParquetFiles(rows / "*.parquet")
    order = random.Random(0).sample(range(len(dataset)), len(dataset))
    for row, number in zip(dataset.__getitems__(order), order, strict=True):
        assert row["npy"].tobytes() == values_of(number).tobytes()
        assert (row["text"], row["cls"]) == (f"text {number}", number % CLASSES)
        assert row["maybe"] == (None if number % 2 else {"bytes": b"x" * number})
    assert list(ParquetFiles(rows / "*.parquet", columns=["cls"])[-1]) == ["cls"]
    assert ParquetFiles(rows / "*.parquet", columns=["text"], decode={"text": len})[10] == {
        "text": 7}


def test_a_process_keeps_row_groups_up_to_its_bound(rows: Path) -> None:
    with pytest.warns(UserWarning, match="Raise memory_bytes"):
        small = ParquetFiles(rows / "*.parquet", memory_bytes=1)
    large = ParquetFiles(rows / "*.parquet")
    for dataset in (small, large):
        for number in [*range(len(dataset)), *range(len(dataset))]:
            dataset[number]
    groups = ARCHIVES * 3
    assert (large.groups.decoded, small.groups.decoded) == (groups, 2 * groups)
    assert len(small.groups._tables) == 1
    copy = pickle.loads(pickle.dumps(large))
    assert copy[3]["cls"] == large[3]["cls"] and copy.groups.decoded == groups + 1


def test_a_parquet_file_that_changed_or_is_no_whole_one_is_an_error(rows: Path) -> None:
    dataset, path = ParquetFiles(rows / "*.parquet"), rows / "1.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:-20] + b"?" + content[-19:])
    with pytest.raises(DataUnavailable, match="1.parquet has other bytes than its index"):
        dataset[EACH]
    path.write_bytes(content[:-1])
    with pytest.raises(ConfigError, match="1.parquet has .* its index says"):
        ParquetFiles(rows / "*.parquet")
    with pytest.raises(ConfigError, match="1.parquet is no whole Parquet file"):
        ParquetFiles(path)
    with pytest.raises(ConfigError, match="have the columns text, npy, cls, maybe"):
        ParquetFiles(rows / "0.parquet", columns=["label"])


# --- images ---------------------------------------------------------------------------------------

@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of images: two classes, one with a folder in it."""
    image = pytest.importorskip("PIL.Image")
    for number, name in enumerate(["dog/b.png", "dog/a/z.PNG", "cat/2.png", "cat/10.png",
                                   "dog/a.png"]):
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (2, 2), (number, 0, 0)).save(path)
    (tmp_path / "pictures" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "pictures" / "list.png").write_text("no class")
    return tmp_path / "pictures"


def test_images_have_the_classes_and_the_order_of_torchvision(pictures: Path) -> None:
    """Classes by name; in a class the folders by name, and in a folder the files by name."""
    dataset = ImageFolder(pictures, transform=lambda image: image.getpixel((0, 0))[0],
                          target_transform=str)
    assert dataset.classes == ["cat", "dog"] and dataset.class_to_idx == {"cat": 0, "dog": 1}
    names = ["cat/10.png", "cat/2.png", "dog/a.png", "dog/b.png", "dog/a/z.PNG"]
    assert [path for path, _ in dataset.samples] == [f"{pictures}/{name}" for name in names]
    assert dataset.targets == [0, 0, 1, 1, 1]
    assert [dataset[number] for number in range(-5, 0)] == [
        (3, "0"), (2, "0"), (4, "1"), (0, "1"), (1, "1")]
    assert ImageFolder(pictures, loader=os.path.basename)[0] == ("10.png", 0)


def test_a_folder_without_images_of_a_class_is_refused(pictures: Path) -> None:
    (pictures / "empty").mkdir()
    with pytest.raises(ConfigError, match="no image of the class empty"):
        ImageFolder(pictures)
    assert ImageFolder(pictures, allow_empty=True).classes == ["cat", "dog", "empty"]
    with pytest.raises(ConfigError, match="no folder of a class"):
        ImageFolder(pictures / "empty")
    (pictures / "dog" / "broken.png").write_bytes(b"no image")
    broken = ImageFolder(pictures, allow_empty=True)
    with pytest.raises(ValueError, match=r"dog/broken.png is no image that Pillow reads"):
        broken[4]


# --- the cache ------------------------------------------------------------------------------------

def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in blocks_in(folder))


def blocks_in(folder: Path) -> list[Path]:
    """Return the blocks of a cache, and those that are being written."""
    return [path for path in (folder / INNER).iterdir()
            if path.name not in (LOCK, CLAIMS, MARKER)]


# --- S3 -------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real S3 server with a bucket."""
    with s3_servers.or_skip(), s3_servers.ceph(tmp_path_factory.mktemp("ceph")) as endpoint:
        yield endpoint


@pytest.fixture
def proxy(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy before it, to which AWS's variables point."""
    with proxied(endpoint, monkeypatch) as proxy:
        monkeypatch.setattr(files_module, "FIRST_WAIT_S", 0.01)
        yield proxy


@pytest.fixture
def bucket(proxy: FaultyProxy, shards: Path, request: pytest.FixtureRequest) -> str:
    """The URL of the folder, in the bucket; each test has one of its own."""
    client = s3_servers.client(proxy.endpoint)
    prefix = "streams/" + re.sub("[^a-z0-9]+", "-", request.node.name)
    for path in shards.glob("*.tar"):
        client.put_object(Bucket="bucket", Key=f"{prefix}/{path.name}", Body=path.read_bytes())
    proxy.seen.clear()
    return f"s3://bucket/{prefix}"


def reads(proxy: FaultyProxy) -> list[str]:
    """Return the requests for objects of data that the server has seen."""
    return [headers.get("Range", "whole") for method, path, headers in proxy.seen
            if method == "GET" and ".tar" in path.split("?")[0]]


def test_samples_in_a_store_are_those_on_a_disk(bucket: str, proxy: FaultyProxy) -> None:
    """Without a cache each is one request for its range; those that touch are one together."""
    dataset = TarShards(f"{bucket}/*.tar")
    assert len(reads(proxy)) <= 3 * ARCHIVES  # the index: each archive once
    proxy.seen.clear()
    again = TarShards(f"{bucket}/*.tar")
    assert again.index.sha256 == dataset.index.sha256 and reads(proxy) == []
    assert_right(again.__getitems__([59, 3, 31]), [59, 3, 31])
    assert len(reads(proxy)) == 3
    assert_right(again.__getitems__(list(range(20, 28))), range(20, 28))
    assert len(reads(proxy)) == 4


def test_a_pattern_names_the_same_files_in_a_bucket_as_on_a_disk(proxy: FaultyProxy) -> None:
    """The same patterns, in the same order, with the same refusals."""
    client = s3_servers.client(proxy.endpoint)
    for name in test_patterns.FILES:
        client.put_object(Bucket="bucket", Key=f"patterns/tree/{name}", Body=b"1")
    test_patterns.require_right("s3://bucket/patterns/tree")


def test_each_block_is_read_once_when_the_cache_holds_the_dataset(
        bucket: str, proxy: FaultyProxy, tmp_path: Path) -> None:
    options: dict[str, Any] = {"cache": tmp_path / "c", "cache_bytes": 10**7, "block_bytes": 8192}
    dataset = TarShards(f"{bucket}/*.tar", **options)
    proxy.seen.clear()
    order = random.Random(1).sample(range(60), 60)
    for _ in range(2):
        assert_right([dataset[number] for number in order], order)
    seen = reads(proxy)
    size = sum(source.size for source in dataset.index.sources)
    assert len(seen) == dataset.blocks.requests <= size // 8192 + ARCHIVES
    # Damage on the disk costs one request.
    for path in blocks_in(tmp_path / "c"):
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    assert_right([dataset[30]], [30])
    assert 1 <= len(reads(proxy)) - len(seen) <= 2


def test_a_cache_smaller_than_the_dataset_keeps_its_part(bucket: str, proxy: FaultyProxy,
                                                         tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """In a random order an LRU cache of half the dataset would evict most blocks unused."""
    monkeypatch.setattr("elastic_trainer.data.blocks.GROUP", 1)
    sources = TarShards(f"{bucket}/*.tar").index.sources
    size = sum(source.size for source in sources)
    dataset = TarShards(f"{bucket}/*.tar", cache=tmp_path / "c", cache_bytes=size // 2,
                        block_bytes=4096)
    counts = []
    for epoch in range(3):
        proxy.seen.clear()
        order = random.Random(epoch).sample(range(60), 60)
        assert_right([dataset[number] for number in order], order)
        assert bytes_in(tmp_path / "c") <= size // 2
        counts.append(len(reads(proxy)))
    assert counts[1] == counts[2] < 50


@pytest.mark.parametrize("kind", ["slow_down", "internal", "reset", "truncate", "bare_404",
                                  "corrupt"])
def test_a_fault_of_the_server_is_retried(bucket: str, proxy: FaultyProxy, kind: str) -> None:
    dataset = TarShards(f"{bucket}/*.tar")
    fault = proxy.fault(kind, method="GET", contains=".tar", times=2 if kind != "corrupt" else 1)
    assert_right(dataset.__getitems__([5, 45]), [5, 45])
    assert fault.fired == fault.times


def test_retries_end_with_an_error_that_names_the_range(
        bucket: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = TarShards(f"{bucket}/*.tar")
    monkeypatch.setattr(files_module, "MOST_WAIT_S", 0.01)
    fault = proxy.fault("slow_down", method="GET", contains="001.tar", times=1000)
    with pytest.raises(DataUnavailable, match=r"001.tar, bytes \d+ to \d+ could not be read in 8"):
        dataset[25]
    assert fault.fired == files_module.ATTEMPTS
    proxy.clear()
    proxy.fault("forbidden", method="GET", contains="001.tar", times=1000)
    with pytest.raises(ConfigError, match="Allow s3:GetObject"):
        dataset[25]


def test_pythons_random_numbers_do_not_depend_on_the_network(bucket: str, proxy: FaultyProxy
                                                             ) -> None:
    dataset = TarShards(f"{bucket}/*.tar")
    random.seed(1)
    before = random.getstate()
    proxy.fault("slow_down", method="GET", contains=".tar", times=2)
    dataset[7]
    assert random.getstate() == before


def test_an_object_that_changed_is_an_error(bucket: str, proxy: FaultyProxy, shards: Path) -> None:
    """Also one of the same size: at the next start by its ETag, and in a run by its sums."""
    dataset = TarShards(f"{bucket}/*.tar")
    write_tar(shards / "001.tar", members_of(2))
    s3_servers.client(proxy.endpoint).put_object(
        Bucket="bucket", Key=f"{bucket.removeprefix('s3://bucket/')}/001.tar",
        Body=(shards / "001.tar").read_bytes())
    with pytest.raises(DataUnavailable, match="sample 0020 of .*001.tar has other bytes"):
        dataset[20]
    with pytest.raises(ConfigError, match="001.tar has the ETag .* and its index says"):
        TarShards(f"{bucket}/*.tar")


def test_the_index_of_the_first_host_stays_when_two_store_one(bucket: str, proxy: FaultyProxy
                                                              ) -> None:
    place, first = f"{bucket}/.elastic-trainer/a.index", Index("tar", "", [], {"fields": []})
    store(Files(), place, first)
    store(Files(), place, Index("tar", "", [], {"fields": ["b"]}))
    assert Files().read([Range(place, 0, len(first.packed()))]) == [first.packed()]


def test_a_read_only_bucket_is_an_error_that_names_the_option_index(bucket: str, proxy: FaultyProxy,
                                                        tmp_path: Path) -> None:
    proxy.fault("forbidden", method="PUT", times=1000)
    with pytest.raises(ConfigError, match="cannot be written.*another folder: index="):
        TarShards(f"{bucket}/*.tar")
    assert len(TarShards(f"{bucket}/*.tar", index=tmp_path)) == 60


@contextmanager
def children(target: Callable[..., None], arguments: Sequence[tuple[Any, ...]],
             method: str = "fork") -> Iterator[list[Any]]:
    """Call a function in several processes at the same time, beside the block."""
    context: Any = multiprocessing.get_context(method)
    found = [context.Process(target=target, args=given) for given in arguments]
    for child in found:
        child.start()
    yield found
    for child in found:
        child.join(60)
    assert [child.exitcode for child in found] == [0] * len(found)


def read_in_child(dataset: Any, numbers: list[int]) -> None:
    assert_right(dataset.__getitems__(numbers), numbers)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_reads_with_connections_of_its_own(bucket: str, proxy: FaultyProxy, method: str
                                                   ) -> None:
    """Parent and children read at the same time, after the parent has read."""
    dataset = TarShards(f"{bucket}/*.tar")
    dataset[0]
    starts = (0, 20) if method == "fork" else (20,)
    with children(read_in_child, [(dataset, [start, start + 9, 59]) for start in starts], method):
        assert_right(dataset.__getitems__([1, 50]), [1, 50])


def test_processes_that_need_the_same_blocks_read_each_once(bucket: str, proxy: FaultyProxy,
                                                            tmp_path: Path) -> None:
    """Each request takes its time, so that all processes miss each block."""
    dataset = TarShards(f"{bucket}/*.tar", cache=tmp_path / "cache", block_bytes=16384)
    proxy.seen.clear()
    proxy.fault("slow", method="GET", contains=".tar", times=1000)
    with children(read_in_child, [(dataset, list(range(start, 60, 5))) for start in range(3)]):
        pass
    blocks = sum(-(-source.size // 16384) for source in dataset.index.sources)
    assert len(reads(proxy)) <= blocks


def test_parquet_and_images_in_a_store_are_those_on_a_disk(
        proxy: FaultyProxy, rows: Path, pictures: Path, tmp_path: Path,
        capsys: pytest.CaptureFixture[str]) -> None:
    client = s3_servers.client(proxy.endpoint)
    for path in [*rows.iterdir(), *pictures.rglob("*")]:
        if path.is_file():
            client.put_object(Bucket="bucket", Key=f"both/{path.relative_to(tmp_path)}",
                              Body=path.read_bytes())
    assert main(["index", "s3://bucket/both/rows/*.parquet"]) == 0
    assert "parquet: 60 samples in 3 files" in capsys.readouterr().out
    ours = ParquetFiles("s3://bucket/both/rows/*.parquet", columns=["text"],
                        cache=tmp_path / "cache")
    assert ours.__getitems__([59, 0]) == ParquetFiles(
        rows / "*.parquet", columns=["text"]).__getitems__([59, 0])
    assert main(["index", "s3://bucket/both/pictures/"]) == 0
    remote = ImageFolder("s3://bucket/both/pictures", transform=numpy.array, cache=tmp_path / "c")
    local = ImageFolder(pictures, transform=numpy.array)
    assert remote.targets == local.targets and remote.classes == local.classes
    numbers = list(range(len(local)))
    for (one, _), (other, _) in zip(remote.__getitems__(numbers), local.__getitems__(numbers),
                                    strict=True):
        assert (one == other).all()
    client.put_object(Bucket="bucket", Key="both/pictures/cat/new.png", Body=b"")
    with pytest.raises(ConfigError, match="cat/new.png was added after the index"):
        ImageFolder("s3://bucket/both/pictures")


# --- training -------------------------------------------------------------------------------------

def error_of(model: Model, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch["npy"]), batch["cls"])


def trained(dataset: Any, stop_at: int = -1, model: Model | None = None, **options: Any) -> str:
    model = model or built()
    trainer = trainer_of(model, dataset=dataset, **options)
    for step in trainer:
        for batch in step:
            step.backward(error_of(model, batch))
        if step.number == stop_at:
            break
    return trainer.result.weights_sha256 if stop_at < 0 else ""


class Listed(torch.utils.data.Dataset):
    """The same samples in memory."""

    def __len__(self) -> int:
        return ARCHIVES * EACH

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"npy": values_of(number), "cls": number % CLASSES}


def test_the_bits_are_those_of_memory_in_every_world_and_after_a_resume(
        bucket: str, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a store, with faults, with and without loader processes, in the middle of an epoch."""
    right = trained(Listed())
    # Fewer than the attempts of one read: no read is to meet them all.
    proxy.fault("slow_down", method="GET", contains=".tar", times=files_module.ATTEMPTS - 1)

    def made() -> TarShards:
        return TarShards(f"{bucket}/*.tar", cache=tmp_path / "cache", block_bytes=4096)

    for size in (2, 4):
        models = [built() for _ in range(size)]  # not in threads: they share torch's generator
        ended = in_a_breaking_world(
            monkeypatch, size, lambda rank: trained(made(), model=models[rank]))  # noqa: B023
        assert ended == [right] * size
    monkeypatch.undo()
    for name, value in s3_servers.environment(proxy.endpoint).items():
        monkeypatch.setenv(name, value)
    assert trained(made(), loader=Loader(workers=2)) == right
    trained(made(), stop_at=10, run_dir=tmp_path / "run", checkpoint_every=1)
    proxy.seen.clear()
    assert trained(TarShards(f"{bucket}/*.tar"), run_dir=tmp_path / "run") == right
    # The samples after the position, the index, what the warm-up draws for the proof, and one
    # sample that is read again now and then: nothing before the position is.
    assert len(reads(proxy)) <= (16 - 11) * 8 + 8 + 8


def test_a_dataset_of_hugging_face_trains_as_it_is(rows: Path) -> None:
    """A map-style one; a stream is refused with what to use."""
    datasets = pytest.importorskip("datasets")
    columns = {"npy": [values_of(number).tolist() for number in range(60)],
               "cls": [number % CLASSES for number in range(60)]}
    whole = datasets.Dataset.from_dict(columns).with_format("torch")
    assert trained(whole) == trained(Listed())
    with pytest.raises(ConfigError, match=r"streaming=True.*ParquetFiles"):
        trained(whole.to_iterable_dataset())
    assert trained(ParquetFiles(rows / "*.parquet", columns=["npy", "cls"])) == trained(Listed())


def test_a_webdataset_is_refused_with_what_to_use(shards: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with pytest.raises(ConfigError, match=r"TarShards\(urls\)"):
        trained(webdataset.WebDataset(f"{shards}/000.tar", shardshuffle=False))
