"""Tar archives: each byte is accounted for, and what is no field of a sample is told."""

from __future__ import annotations

import gzip
import io
import random
import subprocess
import tarfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_streams import members_of, write_tar

from elastic_trainer import ConfigError, TarShards
from elastic_trainer.__main__ import main
from elastic_trainer.data.archive import BLOCK
from elastic_trainer.data.files import DataUnavailable
from elastic_trainer.data.index import AboutData

END = bytes(2 * BLOCK)
FORMS = {"v7": tarfile.USTAR_FORMAT, "ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT,
         "pax": tarfile.PAX_FORMAT}
FIELDS: Any = {"decode": "bytes"}


def header(name: str, size: int | bytes = 0, kind: bytes = tarfile.REGTYPE, link: str = "",
           form: int = tarfile.GNU_FORMAT, pax: dict[str, str] | None = None) -> bytes:
    """Return the header of a member, with any bytes as its size."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.pax_headers = kind, link, pax or {}
    info.size = size if isinstance(size, int) else 0
    data = bytearray(info.tobuf(form))
    if isinstance(size, bytes):
        at = len(data) - BLOCK
        data[at + 124:at + 136] = size.ljust(12, b"\0")
        with_sum(data, at)
    return bytes(data)


def with_sum(data: bytearray, at: int = 0) -> bytes:
    data[at + 148:at + 156] = b" " * 8
    data[at + 148:at + 156] = b"%06o\0 " % sum(data[at:at + BLOCK])
    return bytes(data)


def member(name: str, data: bytes = b"x", **options: Any) -> bytes:
    return header(name, len(data), **options) + data.ljust(-(-len(data) // BLOCK) * BLOCK, b"\0")


def written(path: Path, *parts: bytes) -> Path:
    path.write_bytes(b"".join(parts))
    return path


def keys(dataset: TarShards) -> list[str]:
    return [dataset.key(number) for number in range(len(dataset))]


# --- the end --------------------------------------------------------------------------------------

WHOLE = member("a.txt") + member("b.txt")
ENDS = {
    "an archive after its end": (END + member("c.txt") + END,
                                  "data after its end, from byte 3072"),
    "an archive after much padding": (bytes(10240) + member("c.txt") + END, "data after its end"),
    "an archive after one block of zeros": (bytes(BLOCK) + member("c.txt") + END,
                                             "data after its end"),
    "no end": (b"", "is cut off after b.txt.*ignore_zeros"),
    "one block of zeros": (bytes(BLOCK), "is cut off after b.txt"),
    "one block and a part of one": (bytes(BLOCK + 100), "is cut off after b.txt"),
}


@pytest.mark.parametrize(("end", "text"), ENDS.values(), ids=ENDS)
def test_an_archive_with_another_end_is_refused_or_read_through(tmp_path: Path, end: bytes,
                                                                text: str) -> None:
    """With ignore_zeros all of its samples are there; the other index does not change."""
    path = written(tmp_path / "a.tar", WHOLE, end)
    with pytest.raises(ConfigError, match=text):
        TarShards(path)
    through = TarShards(path, ignore_zeros=True)
    assert keys(through) == (["a", "b", "c"] if b"c.txt" in end else ["a", "b"])
    with pytest.raises(ConfigError, match=text):
        TarShards(path)
    assert main(["index", "--rebuild", "--ignore-zeros", str(path)]) == 0


GARBAGE = {
    "text after the end": END + b"notes of a person" + bytes(BLOCK),
    "one byte in the padding": bytes(5000) + b"1" + bytes(5000),
    "a part of a block": END + b"1",
    "a compressed archive": END + gzip.compress(WHOLE + END).ljust(BLOCK, b"\0"),
    "no header between the files": b"?" * BLOCK + member("c.txt") + END,
    "a header with a wrong sum": header("c.txt", 1)[:-1] + b"?" + b"x".ljust(BLOCK, b"\0") + END,
    "a file that is cut off": member("c.txt", bytes(1000))[:-BLOCK],
    "half a header": member("c.txt")[:100],
    "a long name without its file": header("././@LongLink", 200, b"L") + b"n" * 200 + bytes(312)
    + END,
    "a long name and nothing else": header("././@LongLink", 200, b"L") + b"n" * 200 + bytes(312),
    "a pax header without its file": member("x", b"11 path=ab\n", kind=b"x") + END,
    "a pax header that is no records": member("x", b"path=ab\n", kind=b"x") + WHOLE + END,
    "a pax record that is too long": member("x", b"99 path=ab\n", kind=b"x") + WHOLE + END,
    "a pax size that is no number": member("x", b"11 size=-1\n", kind=b"x") + WHOLE + END,
    "a pax size after the end": member("x", b"20 size=99999999999\n", kind=b"x") + WHOLE + END,
    "a size of 2**87": header("c.txt", b"\x80" + b"\xff" * 11) + END,
    "a size of 2**63": header("c.txt", b"\x80\0\0\0\x80" + bytes(7)) + END,
    "a size below zero": header("c.txt", b"\xff" * 12) + END,
    "a size in letters": header("c.txt", b"many") + END,
    "the largest octal size": header("c.txt", b"7" * 11) + END,
    "a long name of 2**63 bytes": header("././@LongLink", b"\x80\0\0\0\x80" + bytes(7), kind=b"L")
    + END,
    "a long name of a size below zero": header("././@LongLink", b"\xff" * 12, kind=b"L") + END,
}


@pytest.mark.parametrize("end", GARBAGE.values(), ids=GARBAGE)
def test_an_archive_with_bytes_that_are_no_files_is_refused(tmp_path: Path, end: bytes) -> None:
    """Also with ignore_zeros: nothing is skipped in silence."""
    path = written(tmp_path / "a.tar", WHOLE, end)
    for ignore_zeros in (False, True):
        with pytest.raises(ConfigError, match=r"a\.tar"):
            TarShards(path, ignore_zeros=ignore_zeros)


@pytest.mark.parametrize("content", [b"", b"x", b"text" * 1000, bytes(100), random.Random(
    0).randbytes(5000), b"\x04\"M\x18" + bytes(600)])
def test_a_file_that_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    """By its name."""
    for ignore_zeros in (False, True):
        with pytest.raises(ConfigError, match=r"a\.tar"):
            TarShards(written(tmp_path / "a.tar", content), ignore_zeros=ignore_zeros)


def v7(data: bytes) -> bytes:
    """Return a header in the format of Version 7, whose last part has anything."""
    found = bytearray(data[:BLOCK])
    found[257:BLOCK] = bytes(88) + b"12345670123 12345670123 " + bytes(BLOCK - 257 - 88 - 24)
    return with_sum(found) + data[BLOCK:]


LONG = "folder.1/" + "n" * 180
RIGHT: dict[str, tuple[bytes, list[str]]] = {
    "padding to 10240": (WHOLE + bytes(10240 - len(WHOLE)), ["a", "b"]),
    "padding of no whole block": (WHOLE + END + bytes(77), ["a", "b"]),
    "long names of GNU": (member(f"{LONG}.txt", form=tarfile.GNU_FORMAT) + END, [LONG]),
    "long names of pax": (member(f"{LONG}.txt", form=tarfile.PAX_FORMAT) + END, [LONG]),
    "a prefix of ustar": (member(f"{'p' * 90}/{'n' * 90}.txt", form=tarfile.USTAR_FORMAT) + END,
                          [f"{'p' * 90}/{'n' * 90}"]),
    "Version 7": (v7(member("a.txt")) + END, ["a"]),
    "times where ustar has the prefix": (
        with_sum(bytearray(member("a.txt"))[:345] + b"14737712345\x0014737712345\0"
                 + member("a.txt")[369:]) + END, ["a"]),
    "a global header, as git writes it": (
        member("pax_global_header", b"52 comment=0123456789012345678901234567890123456789\n",
               kind=b"g") + WHOLE + END, ["a", "b"]),
    "a global path, and one of a file": (
        member("g", b"14 path=z.txt\n", kind=b"g") + member("x", b"14 path=y.txt\n", kind=b"x")
        + member("a.txt") + member("b.txt") + END, ["y", "z"]),
    "an empty path of pax": (member("x", b"8 path=\n", kind=b"x") + member("a.txt") + END, ["a"]),
    "a size of pax": (member("x", b"9 size=3\n", kind=b"x") + header("a.txt", 0)
                      + b"xyz".ljust(BLOCK, b"\0") + END, ["a"]),
    "a size in base 256": (header("a.txt", b"\x80" + bytes(10) + b"\x01")
                           + b"x".ljust(BLOCK, b"\0") + END, ["a"]),
    "folders, ./ and an empty file": (header("./", kind=b"5") + header("./d/", kind=b"5")
                                      + member("./d/a.txt", b"") + member("./d/b.txt") + END,
                                      ["./d/a", "./d/b"]),
    "names that are no UTF-8": (member("a\udcff.txt") + END, ["a\udcff"]),
    "a contiguous file": (member("a.txt", kind=b"7") + END, ["a"]),
}


@pytest.mark.parametrize(("content", "right"), RIGHT.values(), ids=RIGHT)
def test_archives_of_every_format_are_read_right(tmp_path: Path, content: bytes,
                                                 right: list[str]) -> None:
    """Nothing is told of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = TarShards(written(tmp_path / "a.tar", content), **FIELDS)
    assert keys(dataset) == right
    assert {sample["txt"] for sample in dataset.__getitems__(range(len(dataset)))} <= {
        b"x", b"xyz", b""}


@pytest.mark.parametrize("options", [(), ("--format=gnu",), ("--format=posix",), ("--format=v7",),
                                     ("--format=ustar",), ("--format=oldgnu",), ("-b", "1"),
                                     ("--sort=name", "--owner=0"), ("--format=gnu", "-G")])
def test_archives_of_gnu_tar_are_read_right(tmp_path: Path, options: Sequence[str]) -> None:
    """With a hard link, which has the bytes of its target, and a folder."""
    (tmp_path / "d").mkdir()
    for number in range(3):
        (tmp_path / "d" / f"{number}.txt").write_text(str(number) * 600)
    (tmp_path / "d" / "3.txt").hardlink_to(tmp_path / "d" / "1.txt")
    subprocess.run(["tar", "-cf", tmp_path / "a.tar", *options, "-C", tmp_path / "d",
                    *[f"{number}.txt" for number in range(4)]], check=True)
    dataset = TarShards(tmp_path / "a.tar", **FIELDS)
    assert [sample["txt"] for sample in dataset.__getitems__([3, 1, 0, 2])] == [
        b"1" * 600, b"1" * 600, b"0" * 600, b"2" * 600]


# --- what is no field -----------------------------------------------------------------------------

def test_a_hard_link_has_the_bytes_of_its_target(tmp_path: Path) -> None:
    """Also one to a link, one to a file far before, and one in another sample than its target."""
    path = written(tmp_path / "a.tar", member("labels/one.txt", b"1"), member("0.png", b"zero"),
                   header("0.cls", kind=b"1", link="labels/one.txt"), member("1.png", b"one"),
                   header("1.cls", kind=b"1", link="0.cls"),
                   header("2.png", kind=b"1", link="0.png"),
                   header("2.cls", kind=b"1", link="labels/one.txt"), END)
    dataset = TarShards(path, decode="bytes", fields=None)
    assert dataset.__getitems__([3, 1, 2]) == [
        {"__key__": "2", "png": b"zero", "cls": b"1"},
        {"__key__": "0", "png": b"zero", "cls": b"1"},
        {"__key__": "1", "png": b"one", "cls": b"1"}]
    content = bytearray(path.read_bytes())
    content[BLOCK] = ord("2")
    path.write_bytes(content)
    with pytest.raises(DataUnavailable, match="sample 2 of .*a.tar has other bytes"):
        dataset[3]


TOLD: dict[str, tuple[bytes, str]] = {
    "a hard link to nothing": (header("b.cls", kind=b"1", link="z.cls"), "hard link to a file"),
    "a hard link forwards": (header("b.cls", kind=b"1", link="z.txt"), "hard link to a file"),
    "a symbolic link": (header("b.cls", kind=b"2", link="a.txt"), "symbolic link"),
    "a device": (header("b.cls", kind=b"3"), "device"),
    "a block device": (header("b.cls", kind=b"4"), "device"),
    "a named pipe": (header("b.cls", kind=b"6"), "named pipe"),
    "another type": (member("b.cls", kind=b"Q"), "member of the type 'Q'"),
    "a sparse file of GNU": (member("b.cls", b"y", kind=b"S"), "sparse file"),
    "a sparse file of pax": (member("x", b"22 GNU.sparse.major=1\n29 GNU.sparse.name=the/b.cls\n",
                                    kind=b"x") + member("b.cls", b"0\n"), "sparse file"),
    "no name": (member(""), "file without a name"),
    "no extension": (member("README"), "file without an extension"),
    "a last dot": (member("b."), "file without an extension"),
    "a hidden file": (member("d/._b.cls"), "hidden file"),
    "a reserved name": (member("__meta__/b.json"), "file with a reserved name"),
}


@pytest.mark.parametrize(("part", "kind"), TOLD.values(), ids=TOLD)
def test_what_is_no_field_is_reported_with_its_number_and_place(
        tmp_path: Path, part: bytes, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Once, when the index is built; `elastic-trainer index` says it each time."""
    path = written(tmp_path / "a.tar", member("a.txt"), part, part, member("z.txt"), END)
    at = 2 * BLOCK + (2 * BLOCK if b"GNU.sparse.major" in part else 0)
    text = rf"No sample has 2 of the archives' members \({kind}.*\): the first is .* at byte {at} "
    with pytest.warns(AboutData, match=text + "of a.tar"):
        assert keys(TarShards(path)) == ["a", "z"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TarShards(path)
        assert main(["index", str(path)]) == 0
    assert "No sample has 2 of the archives' members" in capsys.readouterr().out


@pytest.mark.parametrize("major", ["gnu", "--posix"])
def test_sparse_files_of_gnu_tar_are_reported(tmp_path: Path, major: str) -> None:
    """With many holes, so that their headers have more blocks; the file after them is read."""
    with open(tmp_path / "b.bin", "wb") as file:
        for number in range(40):
            file.seek(number << 17)
            file.write(b"x" * 4096)
    (tmp_path / "c.bin").write_bytes(b"c")
    subprocess.run(["tar", "-cSf", tmp_path / "a.tar", *(
        ["--format=gnu"] if major == "gnu" else [major]), "-C", tmp_path, "b.bin", "c.bin"],
        check=True)
    with pytest.warns(AboutData, match="1 of the archives' members .sparse file.*'b.bin'"):
        dataset = TarShards(tmp_path / "a.tar")
    assert [dataset[number] for number in range(len(dataset))] == [{"__key__": "c", "bin": b"c"}]


DOUBTFUL: dict[str, tuple[list[str], str]] = {
    "a version": (["img_0.1.txt", "img_0.2.txt"],
                  "img_0.1.txt.*field '1.txt' of the sample 'img_0'"),
    "names of persons": (["john.doe.jpg", "john.smith.jpg"], "john.doe.jpg.*the sample 'john'"),
    "an address": (["www.a.org.html", "www.b.org.html"], "www.a.org.html.*is 'www.a.org'"),
    "a date": (["2026.11.26.txt"], "2026.11.26.txt.*field '11.26.txt'"),
    "one of many": (["a.txt", "b.txt", "c.v2.txt"], "c.v2.txt.*field 'v2.txt'"),
}


@pytest.mark.parametrize(("names", "text"), DOUBTFUL.values(), ids=DOUBTFUL)
def test_a_name_with_dots_that_may_name_the_sample_is_reported(tmp_path: Path, names: list[str],
                                                           text: str) -> None:
    """With the file, the field and the sample."""
    with pytest.warns(AboutData, match=f"a.tar has the file '{text}"):
        TarShards(write_tar(tmp_path / "a.tar", [(name, b"1") for name in names]), **FIELDS)


def test_fields_with_dots_that_all_samples_have_are_not_reported(tmp_path: Path) -> None:
    """`left.png` and `right.png` are fields."""
    pytest.importorskip("PIL")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TarShards(write_tar(tmp_path / "a.tar", [
            (f"{number}.{name}.png", b"") for number in range(3) for name in ("left", "right")]))


@pytest.mark.parametrize("files", [1, 3])
def test_too_many_fields_are_an_error_that_names_a_file(tmp_path: Path, files: int) -> None:
    """In one archive, and in several together."""
    blank = bytearray(header("a." + "-" * 8))
    rest = sum(blank[:148]) - 8 * ord("-") + 8 * ord(" ") + sum(blank[156:])
    for number in range(files):
        content = bytearray()
        for place in range(70_000 // files):
            name = b"%d-%06d" % (number, place)
            blank[2:10], blank[148:155] = name, b"%06o\0" % (rest + sum(name))
            content += blank
        written(tmp_path / f"{number}.tar", bytes(content), END)
    with pytest.raises(ConfigError, match=r"\.tar has a\.\d-\d+, .*more than 65536 different"):
        TarShards(tmp_path / "*.tar")


def test_an_archive_that_any_byte_of_is_changed_is_read_right_or_refused(tmp_path: Path) -> None:
    """No other error comes, whatever the headers say."""
    whole = bytearray(write_tar(tmp_path / "a.tar", members_of(0)[:6]).read_bytes()[:7168])
    chance = random.Random(0)
    changes: list[Callable[[bytearray], None]] = [
        lambda data: data.__setitem__(chance.randrange(len(data)), chance.randrange(256)),
        lambda data: data.__delitem__(slice(chance.randrange(len(data)), None)),
        lambda data: data.__delitem__(slice(*sorted(chance.sample(range(len(data)), 2)))),
        lambda data: data.__setitem__(slice(512 * chance.randrange(12), None),
                                      chance.randbytes(600)),
        lambda data: data.extend(chance.randbytes(chance.randrange(2000))),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(300):
            data = bytearray(whole)
            for _ in range(1 + number % 3):
                chance.choice(changes)(data)
                for at in range(0, len(data) - BLOCK, BLOCK):  # its sums are right again
                    if data[at + 257:at + 262] == b"ustar" and number % 2:
                        with_sum(data, at)
            path = written(tmp_path / "b.tar", bytes(data))
            try:
                dataset = TarShards(path, decode="bytes", index=tmp_path / f"i{number}")
                dataset.__getitems__(range(len(dataset)))
            except ConfigError as error:
                assert "b.tar" in str(error)


def test_the_samples_of_a_random_archive_are_those_of_tarfile(tmp_path: Path) -> None:
    """In all formats, with names and sizes of all kinds."""
    chance = random.Random(1)
    for number, form in enumerate([*FORMS.values()] * 3):
        most = 90 if form == tarfile.USTAR_FORMAT else 400
        members = [(f"{place:03d}{'ü' * chance.randrange(most // 3)}.{chance.choice('abc')}",
                    chance.randbytes(chance.choice([0, 1, 511, 512, 513, 5000])))
                   for place in range(30)]
        path = write_tar(tmp_path / f"{number}.tar", members, form)
        dataset = TarShards(path, **FIELDS)
        with tarfile.open(path) as archive:
            right = [(one.name, archive.extractfile(one).read())  # type: ignore[union-attr]
                     for one in archive.getmembers()]
        found = [(f"{sample.pop('__key__')}.{name}", data) for sample in dataset.__getitems__(
            range(len(dataset))) for name, data in list(sample.items()) if name != "__key__"]
        assert found == right == members


def test_a_random_file_is_no_archive_that_ends_in_a_traceback(tmp_path: Path) -> None:
    """Not even where its first block is a right header."""
    chance = random.Random(2)
    for _ in range(100):
        path = written(tmp_path / "a.tar", *[member("a.txt")] * chance.randrange(2),
                       *[io.BytesIO(chance.randbytes(3000)).read(chance.randrange(3000))])
        with pytest.raises(ConfigError, match=r"a\.tar"):
            TarShards(path, ignore_zeros=bool(chance.randrange(2)))


def test_names_that_are_no_utf_8_are_read_and_printed(tmp_path: Path,
                                                      capfd: pytest.CaptureFixture[str]) -> None:
    """Of the archive, of its files and of what is left out."""
    path = Path(f"{tmp_path}/\udcff.tar")
    write_tar(path, [("\udcfe.1.txt", b"1"), ("\udcfd", b"2")])
    with pytest.warns(AboutData, match=r"\\udcfd"):
        assert TarShards(path)[0] == {"__key__": "\udcfe", "1.txt": "1"}
    assert main(["index", str(path)]) == 0
    assert "\\udcfe.1.txt" in capfd.readouterr().out


def test_a_field_in_the_place_of_the_key_is_refused(tmp_path: Path) -> None:
    """Its bytes would be the sample's key."""
    with pytest.raises(ConfigError, match=r"a\.tar has the file 'a\.__key__'"):
        TarShards(written(tmp_path / "a.tar", member("a.__key__"), member("a.txt"), END))


def test_options_of_fields_are_checked_when_the_dataset_is_made(tmp_path: Path) -> None:
    """A field that is named twice comes twice; a decoder that is no function is an error."""
    path = written(tmp_path / "a.tar", WHOLE, END)
    assert TarShards(path, fields=["txt", "txt"])[0] == ("x", "x")
    for wrong in (3, "tensor", None):
        with pytest.raises(ConfigError, match="decode has .* for the field 'txt'"):
            TarShards(path, decode={"txt": wrong})  # type: ignore[dict-item]
