"""Images are decoded by the range of their values, and an error of a sample names where it lies."""

from __future__ import annotations

import io
import os
import re
import struct
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from test_streams import npy, write_tar
from torch.utils.data import Subset

from elastic_trainer import ImageFolder, Loader, Mixture, ParquetFiles, TarShards
from elastic_trainer.data.batches import fetch
from elastic_trainer.data.decoders import image_tensor
from elastic_trainer.data.loader import MicrobatchRecipe, Reader
from elastic_trainer.schedule.schedule import Schedule

image = pytest.importorskip("PIL.Image")
GRAY = numpy.array([[0, 256, 40_000, 65_535]], "u2")
EIGHT = [0, 1, 156, 255]


def encoded(picture: Any, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, form, **options)
    return file.getvalue()


def of(values: Any) -> Any:
    return image.fromarray(numpy.asarray(values))


def made(mode: str, value: Any) -> Any:
    return image.new(mode, (1, 1), value)


GIF = encoded(made("P", 0), "GIF", save_all=True, append_images=[made("P", 1)])
TURNED = image.Exif()
TURNED[0x0112] = 3
RIGHT: dict[str, tuple[bytes, list[list[int]]]] = {
    "16 bits of PNG": (encoded(of(GRAY), "PNG"), [EIGHT] * 3),
    "16 bits of TIFF": (encoded(of(GRAY), "TIFF"), [EIGHT] * 3),
    "16 bits of PGM": (b"P5 4 1 65535\n" + GRAY.astype(">u2").tobytes(), [EIGHT] * 3),
    "10 bits of PGM": (b"P5 3 1 1023\n" + numpy.array([0, 512, 1023], ">u2").tobytes(),
                       [[0, 128, 255]] * 3),
    "one bit": (encoded(made("1", 1), "PNG"), [[255]] * 3),
    "gray": (encoded(made("L", 77), "PNG"), [[77]] * 3),
    "gray with alpha": (encoded(made("LA", (77, 5)), "PNG"), [[77]] * 3),
    "colours with alpha": (encoded(made("RGBA", (1, 2, 3, 0)), "PNG"), [[1], [2], [3]]),
    "a palette with a transparent colour": (
        encoded(made("RGB", (10, 20, 30)).convert("P", palette=image.Palette.ADAPTIVE), "PNG",
                transparency=0), [[10], [20], [30]]),
    "CMYK": (encoded(made("CMYK", (0, 0, 0, 0)), "JPEG"), [[255]] * 3),
    "YCbCr": (encoded(made("YCbCr", (255, 128, 128)), "JPEG"), [[255]] * 3),
    "an animation: its first picture": (GIF, [[0]] * 3),
    "EXIF's orientation, which is not applied": (
        encoded(of(numpy.array([[0, 255]], "u1")), "PNG", exif=TURNED), [[0, 255]] * 3),
    "a PNG that is called jpg": (encoded(made("RGB", (1, 2, 3)), "PNG"), [[1], [2], [3]]),
    "WebP": (encoded(made("RGB", (255, 255, 255)), "WEBP"), [[255]] * 3),
}


@pytest.mark.parametrize(("data", "right"), RIGHT.values(), ids=RIGHT)
def test_an_image_is_converted_by_the_range_of_its_values(data: bytes, right: list[list[int]]
                                                          ) -> None:
    """Alpha is left out; what is more than 8 bits becomes its highest 8."""
    assert image_tensor(data)[:, 0].tolist() == right


def bomb() -> bytes:
    """A PNG of a few bytes that says that it has 10^10 pixels."""
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(
            ">I", zlib.crc32(kind + data))

    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 100_000, 100_000, 8, 0, 0,
                                                            0, 0))
            + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b""))


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
REFUSED: dict[str, tuple[bytes, str]] = {
    "PostScript": (POSTSCRIPT, "none of JPEG, PNG"),
    "a DOS header before PostScript": (b"\xc5\xd0\xd3\xc6" + (30).to_bytes(4, "little")
                                       + bytes(22) + POSTSCRIPT, "none of JPEG, PNG"),
    "PDF": (b"%PDF-1.4\n", "none of JPEG, PNG"),
    "an icon": (encoded(image.new("RGB", (16, 16)), "ICO"), "none of JPEG, PNG"),
    "nothing": (b"", "none of JPEG, PNG"),
    "32 bits of TIFF": (encoded(of(GRAY.astype("i4")), "TIFF"), "mode I, whose range"),
    "fractions": (encoded(of(GRAY.astype("f4")), "TIFF"), "mode F, whose range"),
    "fractions of PFM": (b"Pf\n1 1\n-1.0\n" + numpy.array([0.5], "f4").tobytes(),
                         "mode F, whose range"),
    "a part of a PNG": (encoded(of(numpy.random.default_rng(0).integers(
        0, 255, (64, 64, 3), "u1")), "PNG")[:-4000], "truncated"),
    "a part of a JPEG": (encoded(of(numpy.random.default_rng(0).integers(
        0, 255, (64, 64, 3), "u1")), "JPEG")[:-900], "truncated"),
    "10^10 pixels": (bomb(), "decompression bomb"),
}


@pytest.mark.parametrize(("data", "text"), REFUSED.values(), ids=REFUSED)
def test_an_image_that_may_not_be_read_is_refused_with_its_place(
        tmp_path: Path, data: bytes, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an archive, a Parquet file and a folder. No program is started for it."""
    monkeypatch.setattr("subprocess.Popen.__init__", None)
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "root" / "a" / "b.png").write_bytes(data)
    write_tar(tmp_path / "a.tar", [("key/7.png", data)])
    cases: list[tuple[Any, str]] = [
        (TarShards(tmp_path / "a.tar"), r"sample 0 \(key 'key/7'\), field 'png', in .*a\.tar"),
        (TarShards(tmp_path / "a.tar", decode="pil"), "field 'png'"),
        (ImageFolder(tmp_path / "root"), r"root/a/b\.png is no image")]
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(
        arrow.table({"image": [{"bytes": data, "path": None}]}), tmp_path / "a.parquet")
    cases.append((ParquetFiles(tmp_path / "a.parquet", decode={"image": "tensor"}),
                  r"sample 0 \(row 0 of row group 0\), column 'image', in .*a\.parquet"))
    for dataset, place in cases:
        with pytest.raises(ValueError, match=place) as caught:
            dataset[0]
        assert re.search(text, str(caught.value)) and caught.value.__cause__


# --- where a sample lies --------------------------------------------------------------------------

class Odd(Exception):
    """An error of the user's own."""


def fail_at_seven(value: Any) -> Any:
    if value in (7, b"7") or isinstance(value, dict) and value.get("cls") == 7:
        raise Odd("seven")
    return value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An archive, a Parquet file and a folder of images, each with something odd in sample 7."""
    arrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    write_tar(tmp_path / "a.tar", [
        (f"{number:02d}.{name}", data) for number in range(10)
        for name, data in (("npy", npy([number]) if number != 7 else b"broken"),
                           ("cls", b"%d" % number))])
    parquet.write_table(arrow.table({"cls": range(10)}), tmp_path / "a.parquet", row_group_size=4)
    (tmp_path / "root" / "a").mkdir(parents=True)
    for number in range(10):
        made("L", number).save(tmp_path / "root" / "a" / f"{number}.png")
    return tmp_path


def odd_pixel(picture: Any) -> int:
    return int(fail_at_seven(numpy.asarray(picture)[0, 0, 0].item()))


READERS: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "a field": (lambda folder: TarShards(folder / "a.tar"), ValueError,
                r"sample 7 \(key '07'\), field 'npy', in .*/a\.tar"),
    "the user's decoder": (lambda folder: TarShards(folder / "a.tar", fields=["cls"],
                                                    decode={"cls": fail_at_seven}), Odd,
                           r"sample 7 \(key '07'\), field 'cls', in .*/a\.tar"),
    "the user's transform": (lambda folder: TarShards(
        folder / "a.tar", decode={"npy": len}, transform=fail_at_seven), Odd,
        r"sample 7 \(key '07'\), in .*/a\.tar"),
    "a decoder of a column": (lambda folder: ParquetFiles(
        folder / "a.parquet", decode={"cls": fail_at_seven}), Odd,
        r"sample 7 \(row 3 of row group 1\), column 'cls', in .*/a\.parquet"),
    "a transform of rows": (lambda folder: ParquetFiles(
        folder / "a.parquet", transform=fail_at_seven), Odd,
        r"sample 7 \(row 3 of row group 1\), in .*/a\.parquet"),
    "a transform of images": (lambda folder: ImageFolder(folder / "root", transform=odd_pixel), Odd,
                              r"sample 7, .*/root/a/7\.png"),
    "a loader of images": (lambda folder: ImageFolder(
        folder / "root", loader=lambda path: fail_at_seven(int(Path(path).stem))), Odd,
        r"sample 7, .*/root/a/7\.png"),
    "a part of a dataset": (lambda folder: Subset(TarShards(folder / "a.tar"), range(10)),
                            ValueError, r"sample 7 \(key '07'\), field 'npy', in .*/a\.tar"),
    "a mixture": (lambda folder: Mixture({"first": range(10), "second": TarShards(
        folder / "a.tar")}), ValueError,
        r"field 'npy'[\s\S]* of the dataset 'second' of a Mixture"),
}


@pytest.mark.parametrize("workers", [None, 1])
@pytest.mark.parametrize(("dataset", "kind", "place"), READERS.values(), ids=READERS)
def test_an_error_of_a_sample_names_where_it_lies(
        folder: Path, dataset: Callable[[Path], Any], kind: type[Exception], place: str,
        workers: int | None) -> None:
    """Among the samples of a micro-batch, here and from a loader process, with its own type and the
    traceback of its origin."""
    samples = dataset(folder)
    schedule = Schedule(dataset_size=len(samples), global_batch=len(samples), microbatches=1,
                        epochs=1,
                        seed=0)
    reader = Reader(samples, list, MicrobatchRecipe(schedule),
                    Loader(workers=workers) if workers else None, torch.device("cpu"))
    try:
        with pytest.raises(kind) as caught:
            reader.take((0, 0, 0))
    finally:
        reader.close()
    text = "".join(traceback.format_exception(caught.value))
    assert re.search(place, text), text
    assert re.search("seven|magic|NumPy|npy", text) and os.path.basename(__file__) in text


def test_a_lack_of_memory_keeps_its_type(folder: Path) -> None:
    """It may be the machine's fault, and not that of the sample."""
    def full(data: bytes) -> Any:
        raise MemoryError

    with pytest.raises(MemoryError):
        fetch(TarShards(folder / "a.tar", decode={"npy": full}), numpy.arange(3), list)
