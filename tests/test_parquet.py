"""Parquet: each type that pyarrow writes is read right or refused by name."""

from __future__ import annotations

import datetime
import decimal
import importlib.util
import uuid
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest

from elastic_trainer import ConfigError, ParquetFiles
from elastic_trainer.data.files import DataUnavailable
from elastic_trainer.data.index import AboutData

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
DECIMALS = [decimal.Decimal("1.23"), None, decimal.Decimal("-4.56")]
NUMBERS = [1, None, 2001]


def of_storage(kind: Any, storage: Any) -> Any:
    return arrow.ExtensionArray.from_storage(kind, storage)


COLUMNS: dict[str, Any] = {
    "null": arrow.nulls(3), "bool": arrow.array([True, None, False]),
    **{str(kind): arrow.array([1, None, 3], kind) for kind in (
        arrow.int8(), arrow.int16(), arrow.int32(), arrow.int64(), arrow.uint8(), arrow.uint16(),
        arrow.uint32(), arrow.float32(), arrow.float64())},
    "uint64": arrow.array([2**64 - 1, None, 3], arrow.uint64()),
    "float16": arrow.array(numpy.array([1.5, 2, 3], "f2")),
    **{str(kind): arrow.array(["a", None, "ü" * 20], kind) for kind in (
        arrow.string(), arrow.large_string(), arrow.string_view())},
    **{str(kind): arrow.array([b"a", None, b"b" * 30], kind) for kind in (
        arrow.binary(), arrow.large_binary(), arrow.binary_view())},
    "fixed binary": arrow.array([b"ab", None, b"cd"], arrow.binary(2)),
    **{str(kind): arrow.array(DECIMALS, kind) for kind in (
        arrow.decimal32(5, 2), arrow.decimal64(15, 2), arrow.decimal128(30, 2),
        arrow.decimal256(60, 2))},
    "date32": arrow.array([datetime.date(2020, 1, 2), None, datetime.date(1, 1, 1)]),
    "date64": arrow.array([datetime.date(2020, 1, 2), None, None], arrow.date64()),
    **{str(kind): arrow.array(NUMBERS, kind) for kind in (
        arrow.time32("s"), arrow.time32("ms"), arrow.time64("us"),
        *[make(unit, *more) for unit in ("s", "ms", "us", "ns")
          for make, more in ((arrow.timestamp, ()), (arrow.timestamp, ("Europe/Zurich",)),
                             (arrow.duration, ()))])},
    "dictionary": arrow.array(["a", None, "a"]).dictionary_encode(),
    "dictionary of numbers": arrow.array([5, None, 5]).dictionary_encode(),
    "list of absent": arrow.array([[1, None], None, []], arrow.list_(arrow.int32())),
    "list of texts": arrow.array([["a"], None, []]),
    "list of views": arrow.array([["a"], None, []], arrow.list_(arrow.string_view())),
    "list of lists": arrow.array([[[1]], None, [[]]]),
    "list of times": arrow.array([[1], None, [2]], arrow.list_(arrow.timestamp("ns"))),
    "list_view": arrow.array([[1, 2], None, []], arrow.list_view(arrow.int32())),
    "large_list_view": arrow.array([[1, 2], None, []], arrow.large_list_view(arrow.int32())),
    "struct": arrow.array([{"a": 1, "b": "x"}, None, {"a": None, "b": "y"}]),
    "struct of views": arrow.array([{"a": "x"}, None, {"a": "y"}],
                                   arrow.struct([("a", arrow.string_view())])),
    "list of structs": arrow.array([[{"a": 1}], None, []]),
    "map": arrow.array([[("a", 1)], None, []], arrow.map_(arrow.string(), arrow.int32())),
    "map of views": arrow.array([[("a", "b")], None, []],
                                arrow.map_(arrow.string(), arrow.string_view())),
    "uuid": of_storage(arrow.uuid(), arrow.array([uuid.UUID(int=1).bytes, None, bytes(16)],
                                                 arrow.binary(16))),
    "json": of_storage(arrow.json_(), arrow.array(["{}", None, "[1]"])),
    "bool8": of_storage(arrow.bool8(), arrow.array([1, None, 0], arrow.int8())),
    "opaque": of_storage(arrow.opaque(arrow.string(), "x", "y"), arrow.array(["a", None, "b"])),
    "tensor": arrow.FixedShapeTensorArray.from_numpy_ndarray(
        numpy.arange(12, dtype="f4").reshape(3, 2, 2)),
}
"""A column of each type that pyarrow writes."""
NOT_WRITTEN = {
    "run-end encoded": arrow.RunEndEncodedArray.from_arrays(arrow.array([3], arrow.int32()),
                                                            arrow.array([5])),
    "empty struct": arrow.array([{}, None], arrow.struct([])),
    "interval": arrow.array([(1, 2, 3)], arrow.month_day_nano_interval()),
    "union": arrow.UnionArray.from_dense(
        arrow.array([0, 1], arrow.int8()), arrow.array([0, 0], arrow.int32()),
        [arrow.array([1]), arrow.array(["a"])])}


def written(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    parquet.write_table(arrow.table(columns), path, **options)
    return path


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with lists for arrays."""
    return {name: value.tolist() if isinstance(value, numpy.ndarray) else value
            for name, value in row.items()}


def test_each_type_is_read_as_pyarrow_has_it(tmp_path: Path) -> None:
    """In any order of the rows; nanoseconds are values of pandas."""
    path = written(tmp_path / "a.parquet", COLUMNS)
    right = parquet.read_table(path).to_pylist()
    rows = ParquetFiles(path).__getitems__([2, 0, 1])
    assert [plain(row) for row in rows] == [right[2], right[0], right[1]]
    for name, column in NOT_WRITTEN.items():  # if pyarrow learns it, it belongs above
        with pytest.raises(arrow.ArrowNotImplementedError):
            written(tmp_path / "b.parquet", {name: column})


@pytest.mark.parametrize("kind", [
    make(number) for number in (arrow.int8(), arrow.uint64(), arrow.float16(), arrow.float64())
    for make in (arrow.list_, arrow.large_list, lambda kind: arrow.list_(kind, 2))])
def test_a_list_of_numbers_is_an_array_of_its_own(tmp_path: Path, kind: Any) -> None:
    """Of the right type, and it can be written to."""
    path = written(tmp_path / "a.parquet", {"c": arrow.array([[1, 2], None, [3, 4]], kind)})
    first, absent, last = (row["c"] for row in ParquetFiles(path).__getitems__([0, 1, 2]))
    assert absent is None and first.tolist() == [1, 2] and last.tolist() == [3, 4]
    assert first.dtype == kind.value_type.to_pandas_dtype()
    first[0] = 7
    assert ParquetFiles(path)[0]["c"][0] == 1


@pytest.mark.parametrize("kind", [
    arrow.time64("ns"), arrow.list_(arrow.time64("ns")),
    arrow.struct([("a", arrow.time64("ns"))]), arrow.map_(arrow.string(), arrow.time64("ns"))])
def test_a_column_whose_values_python_cannot_hold_is_refused_by_name(tmp_path: Path, kind: Any
                                                                     ) -> None:
    """When the index is built, and when it is wanted; without it the others are read."""
    path = written(tmp_path / "a.parquet", {"t": arrow.nulls(3, kind), "x": [1, 2, 3]})
    with pytest.warns(AboutData, match=r"column 't' has the type .*time64\[ns\].*columns="):
        assert ParquetFiles(path, columns=["x"])[2] == {"x": 3}
    with pytest.raises(ConfigError, match=r"column 't' has the type .*time64\[ns\].*columns="):
        ParquetFiles(path)


@pytest.mark.parametrize("kind", [
    arrow.timestamp("ns"), arrow.timestamp("ns", "UTC"), arrow.duration("ns"),
    arrow.list_(arrow.timestamp("ns")), arrow.dictionary(arrow.int8(), arrow.timestamp("ns"))])
def test_nanoseconds_are_refused_where_pandas_is_not_installed(
        tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pandas they are read, and by the same index."""
    path = written(tmp_path / "a.parquet", {"t": arrow.nulls(3, kind), "x": [1, 2, 3]})
    assert len(ParquetFiles(path)) == 3
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name, *more: None if name == "pandas" else find(name, *more))
    with pytest.raises(ConfigError, match=r"column 't' .*pandas is not installed.*columns="):
        ParquetFiles(path)
    assert ParquetFiles(path, columns=["x"])[0] == {"x": 1}


NESTED = arrow.array([{"age": 5}, {"age": 6}])


@pytest.mark.parametrize("columns", [
    {"user.age": [1, 2]}, {"user.age": [1, 2], "user": NESTED},
    {"user": NESTED, "user.age": [1, 2]},
    {"user": [7, 8], "user.age": [1, 2], "user.age.last": [3, 4]}, {".": [1, 2], "": [3, 4]},
    {"a..b": [1, 2], "a.": ["x", "y"], "a": [[1], [2, 3]]}, {"a b/c`\"ü\n": [1, 2], "x": [3, 4]}])
def test_a_column_may_have_any_name(tmp_path: Path, columns: dict[str, Any]) -> None:
    """One with dots is no path to a nested one; each is read alone, and all together."""
    path = written(tmp_path / "a.parquet", columns)
    right = parquet.read_table(path).to_pylist()

    assert [plain(ParquetFiles(path)[number]) for number in (0, 1)] == right
    for name in columns:
        assert [plain(row) for row in ParquetFiles(path, columns=[name]).__getitems__([1, 0])] == [
            {name: row[name]} for row in reversed(right)]


def test_a_nested_column_is_no_column(tmp_path: Path) -> None:
    """The error names those that there are."""
    path = written(tmp_path / "a.parquet", {"user": NESTED})
    with pytest.raises(ConfigError, match=r"columns has 'user.age', and .* the columns user\."):
        ParquetFiles(path, columns=["user.age"])


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "another type": ({"a": [1.0], "b": ["x"]}, "column 'a' with the type double, and .*0.*int64"),
    "another width": ({"a": arrow.array([1], arrow.int32()), "b": ["x"]},
                      "'a' with the type int32"),
    "large texts": ({"a": [1], "b": arrow.array(["x"], arrow.large_string())},
                    "'b' with the type large_string, and .* with string"),
    "a dictionary": ({"a": [1], "b": arrow.array(["x"]).dictionary_encode()},
                     "'b' with the type dictionary"),
    "another time zone": ({"a": [1], "b": arrow.array([1], arrow.timestamp("us", "UTC"))},
                          r"'b' with the type timestamp\[us, tz=UTC\]"),
    "all absent": ({"a": arrow.nulls(1), "b": ["x"]}, "'a' with the type null"),
    "one column less": ({"a": [1]}, "has the columns a, and .* has a, b"),
    "one column more": ({"a": [1], "b": ["x"], "c": [1]}, "has the columns a, b, c, and"),
    "another name": ({"a": [1], "B": ["x"]}, "has the columns a, B, and"),
    "no columns": ({}, "has the columns"),
}


@pytest.mark.parametrize(("columns", "text"), OTHERS.values(), ids=OTHERS)
def test_files_with_another_schema_are_refused_by_name(tmp_path: Path, columns: dict[str, Any],
                                                       text: str) -> None:
    """File, column and both types are named, also for a file without rows."""
    written(tmp_path / "0.parquet", {"a": [1], "b": ["x"]})
    path = written(tmp_path / "1.parquet", columns)
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"1.parquet .*{text}"):
            ParquetFiles(tmp_path / "*.parquet")
        parquet.write_table(parquet.read_table(path).slice(0, 0), path)


def test_files_with_the_columns_in_another_order_or_without_rows_are_read(tmp_path: Path) -> None:
    """Each value is that of its column; lists may name their inner field in two ways."""
    written(tmp_path / "0.parquet", {"a": [1, 2], "b": [[1], [2]]})
    parquet.write_table(arrow.table({"b": [[3]], "a": [3]}), tmp_path / "1.parquet",
                        use_compliant_nested_type=False)
    parquet.write_table(arrow.table({"a": [4], "b": [[4]]}).slice(0, 0), tmp_path / "2.parquet")
    dataset = ParquetFiles(tmp_path / "*.parquet")
    assert [(row["a"], row["b"].tolist()) for row in dataset.__getitems__([2, 0, 1])] == [
        (3, [3]), (1, [1]), (2, [2])]


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    """No rows at all, a column twice, an encrypted one, and what only looks like Parquet."""
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table([[1], [2]], names=["a", "a"]), path)
    with pytest.raises(ConfigError, match="a.parquet has the column 'a' twice"):
        ParquetFiles(path)
    written(path, {"a": arrow.array([], arrow.int32())})
    with pytest.raises(ConfigError, match="have no rows"):
        ParquetFiles(path)
    for content, text in ((b"PAR1" + bytes(4) + b"PARE", "is encrypted"),
                          (b"PAR1" + bytes(4) + b"PAR1", "has a footer that pyarrow cannot read"),
                          (b"PAR1xxxx\x04\0\0\0PAR1", "has a footer that pyarrow cannot read"),
                          (b"PAR1\xff\xff\xff\x7fPAR1", "no whole Parquet file"),
                          (b"", "no whole Parquet file"), (b"PAR1", "no whole Parquet file")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"a.parquet {text}|a.parquet is {text}"):
            ParquetFiles(path)


def test_a_row_group_that_is_damaged_is_named_with_its_samples(tmp_path: Path) -> None:
    """With the error of pyarrow as its cause."""
    path = written(tmp_path / "a.parquet", {"a": range(100)}, row_group_size=40)
    dataset = ParquetFiles(path)
    content = bytearray(path.read_bytes())
    at = parquet.read_metadata(path).row_group(1).column(0).dictionary_page_offset
    content[at:at + 30] = bytes(30)
    path.write_bytes(content)
    assert dataset[3] == {"a": 3}
    with pytest.raises(DataUnavailable,
                       match=r"row group 1 of .*a.parquet \(samples 40 to 79\)") as caught:
        dataset[50]
    assert caught.value.__cause__ is not None


def test_a_value_that_python_cannot_hold_is_named_with_its_row(tmp_path: Path) -> None:
    """A year after 9999, in the second row group."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = written(tmp_path / "a.parquet", {
            "t": arrow.array([0, 1, 2, 2**50, 4], arrow.timestamp("ms"))}, row_group_size=2)
        dataset = ParquetFiles(path)
    with pytest.raises(ValueError, match=r"sample 3 \(row 1 of row group 1\), column 't', in .*"
                                         r"a.parquet") as caught:
        dataset.__getitems__([2, 3])
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(("kind", "values"), [
    (lambda null, item: arrow.list_(arrow.field(item, arrow.int64(), null)), [[1], [2, 3]]),
    (lambda null, item: arrow.large_list(arrow.field(item, arrow.int64(), null)), [[1], [2, 3]]),
    (lambda null, item: arrow.struct([arrow.field("a", arrow.int64(), null)]),
     [{"a": 1}, {"a": 2}]),
    (lambda null, item: arrow.map_(arrow.string(), arrow.field(item, arrow.int64(), null)),
     [[("a", 1)], []]),
    (lambda null, item: arrow.list_(arrow.field(item, arrow.struct(
        [arrow.field("a", arrow.list_(arrow.field(item, arrow.int8(), null)))]))),
     [[{"a": [1]}], []])])
def test_files_of_several_writers_are_one_dataset_when_only_their_nulls_differ(
        tmp_path: Path, kind: Any, values: list[Any]) -> None:
    """Spark and pyarrow call the items of a list differently, and allow nulls differently."""
    paths = [tmp_path / name for name in ("a.parquet", "b.parquet")]
    for path, null, item in zip(paths, (True, False), ("item", "element"), strict=True):
        parquet.write_table(arrow.table({"x": arrow.array(values, kind(null, item))}), path,
                            use_compliant_nested_type=False)
    rows = ParquetFiles(paths)
    assert [str(rows[number]) for number in (0, 1)] == [str(rows[number]) for number in (2, 3)]
    other = tmp_path / "c.parquet"
    parquet.write_table(arrow.table({"x": arrow.array([[["b"]], []])}), other)
    with pytest.raises(ConfigError, match=r"c\.parquet has the column 'x' with the type"):
        ParquetFiles([*paths, other])


def test_lists_of_the_fixed_size_0_are_refused_by_name(tmp_path: Path) -> None:
    """pyarrow writes them, and does not read them."""
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"x": arrow.array([[], []], arrow.list_(arrow.int64(), 0)),
                                     "y": [1, 2]}), path)
    with pytest.warns(AboutData), pytest.raises(ConfigError, match="column 'x' has the type"):
        ParquetFiles(path)
    assert ParquetFiles(path, columns=["y"])[1] == {"y": 2}
