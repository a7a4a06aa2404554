"""Rows of Parquet files, by number.

    ParquetFiles("s3://bucket/train-*.parquet", columns=["text", "label"], cache="/mnt/cache")

files → index (once) → here → blocks: the columns of a row group are a few ranges

What always holds:
1. A row group is the smallest part that Parquet can decode. The decoded row groups that were used
   last stay in the memory of this process, up to `memory_bytes`, and at least one.
2. Only the wanted columns are read.
3. The footer of each file has a CRC32 in the index, which is verified when a process opens the
   file.
4. All files have the same columns of the same types. A column whose type Python cannot hold is
   refused by name when the dataset is made, if it is wanted.
"""

from __future__ import annotations

import importlib
import io
import os
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy

from elastic_trainer.config import ConfigError
from elastic_trainer.data.blocks import BLOCK_BYTES, Blocks, Numbered, make_cache
from elastic_trainer.data.decoders import image_tensor, pil_image, raise_located, require_pillow
from elastic_trainer.data.files import DataUnavailable, Files, Range, Source
from elastic_trainer.data.index import Index, changed_meanwhile
from elastic_trainer.data.parquet_index import (
    index_parquet,
    metadata_of,
    parquet,
    refused_column,
)

MOST_FOOTERS = 64
"""The number of parsed footers that a process keeps."""


class ParquetFiles(Numbered):
    """The rows of Parquet files, as a dataset with `len` and `[i]`.

    A sample is a dict from a column to a value; a list of numbers is a numpy array. `decode` has
    for a column a function of its value, or "tensor" or "pil" for encoded images. `transform` is
    called with each sample. A row group is decoded as a whole: `memory_bytes` bounds those that a
    process keeps decoded. `cache`, `cache_bytes` and `index` are those of TarShards.

    Raises ConfigError.
    """

    def __init__(self, urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *,
                 columns: Sequence[str] | None = None,
                 decode: Mapping[str, str | Callable[[Any], Any]] | None = None,
                 transform: Callable[[Any], Any] | None = None,
                 cache: str | os.PathLike[str] | None = None, cache_bytes: int = 10 << 30,
                 memory_bytes: int = 256 << 20, block_bytes: int = BLOCK_BYTES,
                 index: str | os.PathLike[str] | None = None,
                 storage_options: dict[str, Any] | None = None):
        parquet()
        files = Files(storage_options)
        self.index = index_parquet(files, urls, index)
        described = {one[0]: one for one in self.index.facts["columns"]}
        known = list(described)
        self.columns = known if columns is None else list(columns)
        for option, names in (("columns", self.columns), ("decode", list(decode or {}))):
            if odd := sorted(set(names) - set(known if option == "columns" else self.columns)):
                raise ConfigError(f"{option} has {odd[0]!r}, and the files have the columns "
                                  f"{', '.join(known)}. Correct the name, or read the column.")
        if why := next(filter(None, (refused_column(*described[name]) for name in self.columns)),
                       ""):
            raise ConfigError(why)
        self.transform = transform
        self._decoders = {name: _decoder(name, how) for name, how in (decode or {}).items()}
        blocks = Blocks(files, self.index.sources, make_cache(cache, cache_bytes), block_bytes)
        self.groups = RowGroups(self.index, blocks, self.columns, memory_bytes)
        decoded, count = int(self.index.arrays["bytes"].sum()), len(self.index.arrays["bytes"])
        if decoded > memory_bytes:
            warnings.warn(
                f"the rows take {decoded / 2**20:.1f} MiB when they are decoded, and memory_bytes "
                f"is {memory_bytes / 2**20:.1f} MiB. In a random order most samples decode a row "
                f"group of {decoded / count / 2**20:.1f} MiB. Raise memory_bytes, write smaller "
                f"row groups, or read in the order of the files.", stacklevel=2)

    def __len__(self) -> int:
        return int(self.index.arrays["row_end"][-1])

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples; each of their row groups is decoded at most once."""
        ends = self.index.arrays["row_end"]
        groups = numpy.searchsorted(ends, numpy.asarray(numbers), side="right")
        found: list[Any] = [None] * len(numbers)
        for group in sorted(set(groups.tolist())):
            places = numpy.flatnonzero(groups == group).tolist()
            start = self.groups.start(group)
            rows = self.groups.rows(group, [numbers[place] - start for place in places])
            for place, row in zip(places, rows, strict=True):
                found[place] = row
        return [self._finished(*one)  # in the order of the numbers
                for one in zip(numbers, groups.tolist(), found, strict=True)]

    def _finished(self, number: int, group: int, sample: dict[str, Any]) -> Any:
        column = ""
        try:
            for column, decode in self._decoders.items():
                sample[column] = decode(sample[column])
            column = ""
            return self.transform(sample) if self.transform else sample
        except Exception as error:
            row = number - self.groups.start(group)
            raise_located(error, self.groups.where(group, row, column),
                          is_ours=self._decoders.get(column) in (_tensor_of, _pil_of))


class RowGroups:
    """The decoded row groups of a process."""

    def __init__(self, index: Index, blocks: Blocks, columns: list[str], memory_bytes: int):
        self.index, self.blocks, self.columns = index, blocks, columns
        self.memory_bytes = memory_bytes
        self._footers: OrderedDict[int, Any] = OrderedDict()
        self._tables: OrderedDict[int, Any] = OrderedDict()
        self.decoded = 0
        """How many row groups this process has decoded."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_footers": OrderedDict(), "_tables": OrderedDict()}

    def rows(self, group: int, rows: list[int]) -> list[dict[str, Any]]:
        """Return rows of a row group."""
        table = self._tables.get(group)
        if table is None:
            table = self._decoded(group)
            self._tables[group] = table
        with suppress(KeyError):  # another thread may have removed it
            self._tables.move_to_end(group)
            while len(self._tables) > 1 and sum(
                    one.nbytes for one in list(self._tables.values())) > self.memory_bytes:
                self._tables.popitem(last=False)
        indices = importlib.import_module("pyarrow").array(rows)
        values = {name: self._taken(table, group, name, rows, indices) for name in self.columns}
        return [{name: values[name][place] for name in self.columns} for place in range(len(rows))]

    def start(self, group: int) -> int:
        """Return the number of the first sample of a row group."""
        return int(self.index.arrays["row_end"][group - 1]) if group else 0

    def where(self, group: int, row: int, column: str = "") -> str:
        """Return where a row of a row group lies."""
        file, number = (int(self.index.arrays[name][group]) for name in ("file", "group"))
        of_column = f", column {column!r}" if column else ""
        return (f"sample {self.start(group) + row} (row {row} of row group {number}){of_column}, "
                f"in {self.index.sources[file].url}")

    def _taken(self, table: Any, group: int, name: str, rows: list[int], indices: Any) -> list[Any]:
        """Return the values of a column in some rows."""
        column = table.column(name)
        try:
            try:
                return _values(column.take(indices))
            except NotImplementedError:  # pyarrow takes no values of this type, e.g. string_view
                return [column[row].as_py() for row in rows]
        except Exception as error:
            row = next((row for row in rows if _fails(column, row)), rows[0])
            raise_located(error, self.where(group, row, name), is_ours=True)

    def _decoded(self, group: int) -> Any:
        file, number = (int(self.index.arrays[name][group]) for name in ("file", "group"))
        footer, source = self._footer(file), self.index.sources[file]
        count = int(self.index.arrays["row_end"][group]) - self.start(group)
        if number >= footer.num_row_groups or footer.row_group(number).num_rows != count:
            raise changed_meanwhile(source.url, f"of row group {number}")
        ranges = _column_ranges(footer.row_group(number), self.columns)
        pieces = self.blocks.read([(file, start, stop) for start, stop in ranges])
        self.decoded += 1
        opened = parquet().ParquetFile(Pieces(source, ranges, pieces), metadata=footer,
                                       pre_buffer=False)
        try:
            return opened.read_row_group(number, columns=self.columns, use_threads=False)
        except NotImplementedError as error:
            raise ConfigError(f"row group {number} of {source.url} has what pyarrow cannot read: "
                              f"{error}. Leave the column out with columns=, or write it in "
                              f"another way.") from error
        except MemoryError:
            raise
        except Exception as error:
            raise DataUnavailable(
                f"row group {number} of {source.url} (samples {self.start(group)} to "
                f"{self.start(group) + count - 1}) cannot be decoded: {error}. The file is "
                f"damaged, or was changed after its index was built. Put the whole file back."
            ) from error

    def _footer(self, file: int) -> Any:
        if file not in self._footers:
            source = self.index.sources[file]
            start = int(self.index.arrays["footer"][file])
            (data,) = self.blocks.files.read([Range(source.url, start, source.size)])
            if zlib.crc32(data) != int(self.index.arrays["footer_sum"][file]):
                raise changed_meanwhile(source.url, "all")
            footer = metadata_of(data)
            named = set(footer.schema.to_arrow_schema().names)
            if named != {one[0] for one in self.index.facts["columns"]}:
                raise changed_meanwhile(source.url, "all")
            self._footers[file] = footer
            while len(self._footers) > MOST_FOOTERS:
                self._footers.popitem(last=False)
        return self._footers[file]


class Pieces(io.RawIOBase):
    """A file of which some ranges are in memory: what pyarrow reads a row group from."""

    def __init__(self, source: Source, ranges: list[tuple[int, int]], pieces: list[bytes]):
        self.source, self._ranges, self._pieces, self._at = source, ranges, pieces, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, at: int, whence: int = 0) -> int:
        """Go to a byte of the file."""
        self._at = at + (0, self._at, self.source.size)[whence]
        return self._at

    def tell(self) -> int:
        """Return the number of the next byte."""
        return self._at

    def read(self, count: int = -1) -> bytes:
        """Return bytes of a range. Raises OSError for those of no range."""
        for (start, stop), piece in zip(self._ranges, self._pieces, strict=True):
            if start <= self._at < stop:
                begin = self._at - start
                data = piece[begin:] if count < 0 else piece[begin:begin + count]
                self._at += len(data)
                return data
        raise OSError(f"{self.source.url}: byte {self._at} is in no column that is read")


def _column_ranges(group: Any, columns: list[str]) -> list[tuple[int, int]]:
    """Return where the wanted columns of a row group are.

    A dot in a path may be one of a name, or stand between names. pyarrow reads a column for each
    path that is a wanted name, or that begins with one and a dot (parquet/core.py,
    _build_nested_paths). What it reads too much is not in the samples.
    """
    wanted, ranges = set(columns), []
    for place in range(group.num_columns):
        column = group.column(place)
        parts = column.path_in_schema.split(".")
        if any(".".join(parts[:count]) in wanted for count in range(1, len(parts) + 1)):
            start = column.data_page_offset
            if column.dictionary_page_offset is not None:
                start = min(start, column.dictionary_page_offset)
            ranges.append((start, start + column.total_compressed_size))
    return ranges


def _values(column: Any) -> list[Any]:
    """Return the values of a column: lists of numbers as arrays."""
    pyarrow: Any = importlib.import_module("pyarrow")
    kind = column.type
    is_list = (pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
               or pyarrow.types.is_fixed_size_list(kind))
    if is_list and (pyarrow.types.is_integer(kind.value_type)
                    or pyarrow.types.is_floating(kind.value_type)):
        return [_numbers(one.values) for one in column]
    found: list[Any] = column.to_pylist()
    return found


def _numbers(values: Any) -> Any:
    """Return an array of its own for a list of numbers; a list where there are absent ones."""
    if values is None:
        return None
    if values.null_count:
        return values.to_pylist()
    return numpy.array(values.to_numpy(zero_copy_only=False))


def _fails(column: Any, row: int) -> bool:
    try:
        column[row].as_py()
    except Exception:
        return True
    return False


def _decoder(name: str, how: str | Callable[[Any], Any]) -> Callable[[Any], Any]:
    if callable(how):
        return how
    if how not in ("tensor", "pil"):
        raise ConfigError(f"decode has {how!r} for the column {name!r}. Use \"tensor\", \"pil\" or "
                          f"a function.")
    require_pillow()
    return _tensor_of if how == "tensor" else _pil_of


def _encoded(value: Any) -> bytes:
    """Return the bytes of an encoded image; Hugging Face writes {"bytes": …, "path": …}."""
    data: bytes = value["bytes"] if isinstance(value, dict) else value
    return data


def _tensor_of(value: Any) -> Any:
    return image_tensor(_encoded(value))


def _pil_of(value: Any) -> Any:
    return pil_image(_encoded(value))
