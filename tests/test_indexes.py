"""The index of a dataset is data from outside: what it says is checked before it is used."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from test_streams import index_of, members_of, write_tar

from elastic_trainer import ConfigError, ParquetFiles, TarShards
from elastic_trainer.__main__ import main
from elastic_trainer.data.files import DataUnavailable, Files, Source
from elastic_trainer.data.images import IMAGES
from elastic_trainer.data.index import MAGIC, Index, store, unpacked

JUNK: list[Any] = [None, True, -1, 0, 1.5, 2**63, 2**80, 1e308, float("nan"), "", "a", "..", "\0",
                   "\ud800", [], [[]], {}, {"a": 1}, ["a"], [1, 2, 3], "../home/secret.tar",
                   "/etc/passwd", "O", "<i8", "|V8", [["file", "<u4", 1]]]
MUTATIONS = 1000


def parts_of(content: bytes) -> tuple[Any, bytes]:
    """Return the header and the arrays of an index."""
    at = len(MAGIC) + 8
    stop = at + int.from_bytes(content[len(MAGIC):at], "little")
    return json.loads(content[at:stop]), content[stop:-32]


def packed(header: Any, arrays: bytes, length: int | None = None) -> bytes:
    """Return an index with any content and a right sum."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = MAGIC + struct.pack("<Q", len(text) if length is None else length) + text + arrays
    return body + hashlib.sha256(body).digest()


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return all places in a value of JSON, as holder and key."""
    found: list[tuple[Any, Any]] = []
    inner = (value.items() if isinstance(value, dict) else
             enumerate(value) if isinstance(value, list) else ())
    for key, one in inner:
        found += [(value, key), *places(one)]
    return found


def changed(chance: random.Random, header: Any, arrays: bytes) -> bytes:
    """Return an index with a change in its header or in its arrays."""
    header, data = copy.deepcopy(header), bytearray(arrays)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        kind = chance.randrange(7)
        if kind < 3 and (known := places(header)):
            holder, key = chance.choice(known)
            if kind == 0:
                del holder[key]
            else:
                others = JUNK if kind == 1 else [values[where] for values, where in known]
                holder[key] = copy.deepcopy(chance.choice(others))
        elif kind < 5 and data:
            at = chance.randrange(len(data))
            data[at] = chance.choice([0, 1, 127, 128, 255, data[at] ^ 1])
        elif kind == 5:
            at = chance.randrange(len(data) + 1)
            data[at:chance.choice([at, at + 8, len(data)])] = chance.randbytes(8)
        elif chance.random() < 0.3:
            text = json.dumps(header).encode()
            cut = chance.randrange(len(text))
            return packed(text[:cut] + chance.choice([b"", b"[", b"\xff", b"9" * 5000]),
                          bytes(data), chance.choice([None, 0, 2**63, cut]))
    return packed(header, bytes(data))


@pytest.fixture(params=["tar", "tar with links", "parquet"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """A function that opens a dataset."""
    folder = tmp_path / "data"
    folder.mkdir()
    if request.param == "parquet":
        arrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
        for number in range(2):
            parquet.write_table(arrow.table({"a": range(9), "b": ["x"] * 9}),
                                folder / f"{number}.parquet", row_group_size=4)
        return lambda: ParquetFiles(folder / "*.parquet")
    for number in range(2):
        write_tar(folder / f"{number}.tar", members_of(number)[:6])
    if "links" in request.param:
        import tarfile

        with tarfile.open(folder / "1.tar", "a") as archive:
            info = tarfile.TarInfo("9.cls")
            info.type, info.linkname = tarfile.LNKTYPE, "0020.cls"
            archive.addfile(info)
    return lambda: TarShards(folder / "*.tar", decode="bytes")


@pytest.mark.filterwarnings("ignore:the rows take")
def test_only_the_declared_errors_come_when_the_content_of_an_index_is_malformed(
        opened: Callable[[], Any], tmp_path: Path) -> None:
    """Any content with a right sum gives samples, or one error with the index and the remedy."""
    opened()
    path, chance, refused = index_of(tmp_path / "data"), random.Random(0), 0
    header, arrays = parts_of(path.read_bytes())
    for _ in range(MUTATIONS):
        path.write_bytes(changed(chance, header, arrays))
        try:
            dataset = opened()
        except ConfigError as error:
            refused += 1
            assert str(path) in str(error) and "--rebuild" in str(error), error
            continue
        try:
            dataset.__getitems__([*range(min(len(dataset), 30)), len(dataset) - 1])
        except DataUnavailable as error:
            assert "--rebuild" in str(error)
    assert refused > MUTATIONS / 2


NAMES = ["../home/secret.tar", "/etc/passwd", "a/../../b.tar", "./0.tar", "", "\0", "2.tar",
         "0.tar/", "..", "x/0.tar"]


@pytest.mark.parametrize("name", NAMES)
def test_an_index_names_no_file_outside_of_its_dataset(tmp_path: Path, name: str) -> None:
    """A file of the same size elsewhere is not opened."""
    (tmp_path / "home").mkdir()
    (tmp_path / "data").mkdir()
    write_tar(tmp_path / "data" / "0.tar", members_of(0))
    write_tar(tmp_path / "data" / "1.tar", members_of(1))
    write_tar(tmp_path / "home" / "secret.tar", members_of(0))
    TarShards(tmp_path / "data" / "?.tar")
    path = index_of(tmp_path / "data")
    header, arrays = parts_of(path.read_bytes())
    header["sources"][0][0] = name
    path.write_bytes(packed(header, arrays))
    with pytest.raises(ConfigError, match=r"index .*--rebuild"):
        TarShards(tmp_path / "data" / "?.tar")
    assert main(["index", "--rebuild", f"{tmp_path}/data/?.tar"]) == 0
    assert len(TarShards(tmp_path / "data" / "?.tar")) == 40


@pytest.mark.parametrize("name", ["../x.png", "/x.png", ""])
def test_a_list_of_images_names_no_file_outside_of_its_root(name: str) -> None:
    """It is checked as the other indexes are."""
    index = Index("images", "s3://b/root/", [Source(f"s3://b/root/{name}", 1)])
    with pytest.raises(ConfigError, match=r"which is not in the folder of the dataset.*--rebuild"):
        unpacked(index.packed(), "place", "s3://b/root/", IMAGES)


@pytest.mark.parametrize("change", [
    lambda index: index.arrays["file"].__setitem__(0, 7),
    lambda index: index.arrays["first"].__setitem__(0, 1),
    lambda index: index.arrays["first"].__setitem__(1, -3),
    lambda index: index.arrays["first"].__setitem__(-1, 10**6),
    lambda index: index.arrays["offset"].__setitem__(0, 2**64 - 1),
    lambda index: index.arrays["size"].__setitem__(0, 2**64 - 1),
    lambda index: index.arrays["field"].__setitem__(0, 9),
    lambda index: index.arrays["key_end"].__setitem__(0, 10**6),
    lambda index: index.arrays["key_end"].__setitem__(0, -1),
    lambda index: index.arrays.__setitem__("file", index.arrays["file"][:-1]),
    lambda index: index.arrays.__setitem__("file", index.arrays["file"].astype("<u8")),
    lambda index: index.arrays.__setitem__("more", index.arrays["file"]),
    lambda index: index.arrays.pop("sum"), lambda index: index.facts.pop("fields"),
    lambda index: index.facts.__setitem__("fields", ["cls", "cls"]),
    lambda index: index.facts.__setitem__("fields", "cls npy"),
    lambda index: index.facts.__setitem__("has_links", "no"),
    lambda index: index.sources.pop(), lambda index: index.sources.reverse(),
    lambda index: index.sources.append(index.sources[0])])
def test_each_part_of_an_index_is_checked(tmp_path: Path, change: Callable[[Index], Any]) -> None:
    """Ranges, shapes, types, facts and files."""
    for number in range(2):
        write_tar(tmp_path / f"{number}.tar", members_of(number)[:4 + 2 * number])
    index = TarShards(tmp_path / "?.tar").index
    for name, array in index.arrays.items():
        index.arrays[name] = numpy.array(array)
    place = str(index_of(tmp_path))
    change(index)
    store(Files(), place, index, replace=True)
    with pytest.raises(ConfigError, match=r"index .*--rebuild"):
        TarShards(tmp_path / "?.tar")


def test_an_index_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """A folder in its place, for example."""
    write_tar(tmp_path / "0.tar", members_of(0))
    TarShards(tmp_path / "0.tar")
    path = index_of(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="index .* cannot be read"):
        TarShards(tmp_path / "0.tar")
