"""Rows of Parquet files, by number.

    ParquetFiles("s3://bucket/train-*.parquet", columns=["text", "label"], cache="/mnt/cache")

files → index (once) → here → blocks: the columns of a row group are a few ranges

What always holds:
1. A row group is the smallest part that Parquet can decode. The decoded row groups that were used
   last stay in the memory of this process, up to `memory_bytes`, and at least one.
2. Only the wanted columns are read.
3. The footer of each file has a CRC32 in the index, which is verified when a process opens the
   file.

Source: the Parquet format (a footer, its length in 4 bytes, "PAR1" at the end of the file).
"""

from __future__ import annotations

import importlib
import io
import os
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy

from elastic_trainer.config import ConfigError
from elastic_trainer.data.blocks import BLOCK_BYTES, Blocks, make_cache
from elastic_trainer.data.decoders import image_tensor, pil_image, require_pillow
from elastic_trainer.data.files import Files, Range, Source
from elastic_trainer.data.index import (
    Index,
    build_or_load,
    changed_meanwhile,
    common_folder,
    place_of,
    rebuild,
)

MAGIC = b"PAR1"
TAIL_BYTES = 64 << 10
"""What is read of the end of a file at first: most footers are in it."""
SCANS = 16
MOST_FOOTERS = 64
"""The number of parsed footers that a process keeps."""


class ParquetFiles:
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
        known: list[str] = self.index.facts["columns"]
        self.columns = known if columns is None else list(columns)
        for option, names in (("columns", self.columns), ("decode", list(decode or {}))):
            if odd := sorted(set(names) - set(known if option == "columns" else self.columns)):
                raise ConfigError(f"{option} has {odd[0]!r}, and the files have the columns "
                                  f"{', '.join(known)}. Correct the name, or read the column.")
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

    def __getitem__(self, number: int) -> Any:
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return self.__getitems__([number % len(self)])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples; each of their row groups is decoded at most once."""
        ends = self.index.arrays["row_end"]
        groups = numpy.searchsorted(ends, numpy.asarray(numbers), side="right")
        found: list[Any] = [None] * len(numbers)
        for group in sorted(set(groups.tolist())):
            places = numpy.flatnonzero(groups == group).tolist()
            start = int(ends[group - 1]) if group else 0
            rows = self.groups.rows(group, [numbers[place] - start for place in places])
            for place, row in zip(places, rows, strict=True):
                found[place] = row
        return [self._finished(sample) for sample in found]  # in the order of the numbers

    def _finished(self, sample: dict[str, Any]) -> Any:
        for name, decode in self._decoders.items():
            sample[name] = decode(sample[name])
        return self.transform(sample) if self.transform else sample


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
        chosen = table.take(rows)
        values = {name: _values(chosen.column(name)) for name in self.columns}
        return [{name: values[name][place] for name in self.columns} for place in range(len(rows))]

    def _decoded(self, group: int) -> Any:
        file, number = (int(self.index.arrays[name][group]) for name in ("file", "group"))
        footer = self._footer(file)
        ranges = _column_ranges(footer.row_group(number), self.columns)
        pieces = self.blocks.read([(file, start, stop) for start, stop in ranges])
        source = Pieces(self.index.sources[file], ranges, pieces)
        self.decoded += 1
        opened = parquet().ParquetFile(source, metadata=footer, pre_buffer=False)
        try:
            return opened.read_row_group(number, columns=self.columns, use_threads=False)
        except Exception as error:
            raise changed_meanwhile(source.source.url, f"of row group {number}") from error

    def _footer(self, file: int) -> Any:
        if file not in self._footers:
            source = self.index.sources[file]
            start = int(self.index.arrays["footer"][file])
            (data,) = self.blocks.files.read([Range(source.url, start, source.size)])
            if zlib.crc32(data) != int(self.index.arrays["footer_sum"][file]):
                raise changed_meanwhile(source.url, "all")
            self._footers[file] = _metadata(data)
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


def parquet() -> Any:
    """Return pyarrow.parquet. Raises ConfigError."""
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError("ParquetFiles needs pyarrow, which is not installed. Install it: pip "
                          "install 'elastic-trainer[streams]'.") from error


def _metadata(footer: bytes) -> Any:
    return parquet().read_metadata(io.BytesIO(MAGIC + footer))


def _column_ranges(group: Any, columns: list[str]) -> list[tuple[int, int]]:
    """Return where the wanted columns of a row group are."""
    ranges = []
    for place in range(group.num_columns):
        column = group.column(place)
        if column.path_in_schema.split(".")[0] in columns:
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
        values: list[Any] = [None if one.as_py() is None or None in one.as_py() else
                             numpy.array(one.as_py(), kind.value_type.to_pandas_dtype())
                             for one in column]
        return [one.as_py() if value is None else value
                for one, value in zip(column, values, strict=True)]
    found: list[Any] = column.to_pylist()
    return found


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


# --- the index ------------------------------------------------------------------------------------

def index_parquet(files: Files, urls: Any, where: Any, *, anew: bool = False) -> Index:
    """Return the index of Parquet files; build it if there is none. Raises ConfigError."""
    expanded = files.expand(urls)
    place = place_of("parquet", expanded, where)
    act = rebuild if anew else build_or_load
    return act(files, place, files.describe(expanded), lambda sources: build(files, sources))


def build(files: Files, sources: list[Source]) -> Index:
    """Read the footers of Parquet files, and return their index. Raises ConfigError."""
    with ThreadPoolExecutor(min(SCANS, len(sources))) as pool:
        footers = list(pool.map(lambda source: read_footer(files, source), sources))
    parsed = [_metadata(footer) for footer in footers]
    names = parsed[0].schema.to_arrow_schema().names
    for source, metadata in zip(sources, parsed, strict=True):
        others = metadata.schema.to_arrow_schema().names
        if others != names:
            raise ConfigError(f"{source.url} has the columns {', '.join(others)}, and "
                              f"{sources[0].url} has {', '.join(names)}. Use files with the same "
                              f"columns.")
    groups = [(file, number, metadata.row_group(number)) for file, metadata in enumerate(parsed)
              for number in range(metadata.num_row_groups)]
    groups = [one for one in groups if one[2].num_rows]
    if not groups:
        raise ConfigError(f"{sources[0].url} and the other files have no rows. Correct the list of "
                          f"files.")
    folder = common_folder([source.url for source in sources])
    return Index("parquet", folder, sources, {"columns": list(names)}, {
        "file": numpy.array([file for file, _, _ in groups], "<u4"),
        "group": numpy.array([number for _, number, _ in groups], "<u4"),
        "row_end": numpy.cumsum([group.num_rows for _, _, group in groups]).astype("<i8"),
        "bytes": numpy.array([group.total_byte_size for _, _, group in groups], "<i8"),
        "footer": numpy.array([source.size - len(footer) for source, footer
                               in zip(sources, footers, strict=True)], "<u8"),
        "footer_sum": numpy.array([zlib.crc32(footer) for footer in footers], "<u4"),
    })


def read_footer(files: Files, source: Source) -> bytes:
    """Return the bytes of a file from its footer to its end. Raises ConfigError."""
    start = max(source.size - TAIL_BYTES, 0)
    (tail,) = files.read([Range(source.url, start, source.size)])
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if tail[-4:] != MAGIC or length > source.size:
        raise ConfigError(f"{source.url} is no whole Parquet file: it does not end with its "
                          f"footer. Copy it again, or close the file when it is written.")
    if length > len(tail):
        (tail,) = files.read([Range(source.url, source.size - length, source.size)])
    return tail[-length:]
