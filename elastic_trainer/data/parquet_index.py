"""The index of Parquet files: their columns, and where their row groups are.

footers of the files → here → parquet.py: rows

What always holds:
1. All files have the same columns of the same types, or there is no index. The order may differ.
2. A column whose values Python cannot hold without loss is marked. It can be left out.

Source: the Parquet format (a footer, its length in 4 bytes, "PAR1" at the end of the file).
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy

from elastic_trainer.config import ConfigError
from elastic_trainer.data.files import Files, Range, Source
from elastic_trainer.data.index import (
    Index,
    Kind,
    common_folder,
    index_of,
    is_list_of_texts,
    tell,
)

MAGIC, ENCRYPTED = b"PAR1", b"PARE"
CODECS = {"lz4_raw": "lz4", "lz4_hadoop": "lz4"}
"""The names of pyarrow.Codec for those of Parquet, where they differ."""
TAIL_BYTES = 64 << 10
"""What is read of the end of a file at first: most footers are in it."""
SCANS = 16
TIME, PANDAS, EMPTY = "time", "pandas", "empty"
"""Why values cannot be read: Python's time has no nanoseconds; those of timestamps need pandas;
pyarrow writes lists of the fixed size 0, and does not read them."""


def parquet() -> Any:
    """Return pyarrow.parquet. Raises ConfigError."""
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError("ParquetFiles needs pyarrow, which is not installed. Install it: pip "
                          "install 'elastic-trainer[streams]'.") from error


def metadata_of(footer: bytes) -> Any:
    return parquet().read_metadata(io.BytesIO(MAGIC + footer))


def index_parquet(files: Files, urls: Any, where: Any, *, anew: bool = False) -> Index:
    """Return the index of Parquet files; build it if there is none. Raises ConfigError."""
    return index_of(files, urls, where, PARQUET, lambda sources: build(files, sources), anew=anew)


def build(files: Files, sources: list[Source]) -> Index:
    """Read the footers of Parquet files, and return their index. Raises ConfigError."""
    with ThreadPoolExecutor(min(SCANS, len(sources))) as pool:
        footers = list(pool.map(lambda source: read_footer(files, source), sources))
    parsed = [_parsed(source, footer) for source, footer in zip(sources, footers, strict=True)]
    types = _types(sources[0], parsed[0])
    for source, metadata in zip(sources, parsed, strict=True):
        _require_same(sources[0], types, source, _types(source, metadata))
    groups = [(file, number, metadata.row_group(number)) for file, metadata in enumerate(parsed)
              for number in range(metadata.num_row_groups)]
    groups = [one for one in groups if one[2].num_rows]
    if not groups or not types:
        raise ConfigError(f"{sources[0].url} and the other files have no rows. Correct the list of "
                          f"files.")
    described = [[name, str(kind), _hindrance(kind)] for name, kind in types.items()]
    told = [refused_column(*one) for one in described if one[2] in (TIME, EMPTY)]
    folder = common_folder([source.url for source in sources])
    facts = {"columns": described, "told": told}
    return tell(Index("parquet", folder, sources, facts, {
        "file": numpy.array([file for file, _, _ in groups], "<u4"),
        "group": numpy.array([number for _, number, _ in groups], "<u4"),
        "row_end": numpy.cumsum([group.num_rows for _, _, group in groups]).astype("<i8"),
        "bytes": numpy.array([group.total_byte_size for _, _, group in groups], "<i8"),
        "footer": numpy.array([source.size - len(footer) for source, footer
                               in zip(sources, footers, strict=True)], "<u8"),
        "footer_sum": numpy.array([zlib.crc32(footer) for footer in footers], "<u4"),
    }))


def _parsed(source: Source, footer: bytes) -> Any:
    """Return what a footer says. Raises ConfigError for what pyarrow cannot read."""
    pyarrow: Any = importlib.import_module("pyarrow")
    try:
        metadata = metadata_of(footer)
        metadata.schema.to_arrow_schema()
    except (pyarrow.lib.ArrowException, OSError) as error:
        raise ConfigError(f"{source.url} has a footer that pyarrow cannot read: {error}. Copy the "
                          f"file again, or write it with pyarrow.") from error
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for place in range(group.num_columns):
            column = group.column(place)
            if column.file_path:
                raise ConfigError(f"{source.url} has no data of its own, but that of "
                                  f"{column.file_path}. Name the files with the data.")
            name = column.compression.lower()
            if not _can_decompress(name):
                raise ConfigError(f"{source.url} has the column {column.path_in_schema!r} "
                                  f"compressed by {name}, which this pyarrow cannot read. Write it "
                                  f"with zstd.")
    return metadata


def _can_decompress(name: str) -> bool:
    """Return whether this pyarrow reads a compression of Parquet."""
    codec: Any = importlib.import_module("pyarrow").Codec
    try:
        return name == "uncompressed" or bool(codec.is_available(CODECS.get(name, name)))
    except ValueError:  # it does not even know the name
        return False


def _types(source: Source, metadata: Any) -> dict[str, Any]:
    """Return the type of each column of a file. Raises ConfigError."""
    schema = metadata.schema.to_arrow_schema()
    if twice := [name for name in schema.names if schema.names.count(name) > 1]:
        raise ConfigError(f"{source.url} has the column {twice[0]!r} twice. Write each column "
                          f"under a name of its own.")
    return dict(zip(schema.names, schema.types, strict=True))


def _require_same(first: Source, types: dict[str, Any], other: Source, others: dict[str, Any]
                  ) -> None:
    """Raise ConfigError for files of which the samples would differ. The order may."""
    if types.keys() != others.keys():
        raise ConfigError(f"{other.url} has the columns {', '.join(others) or 'none'}, and "
                          f"{first.url} has {', '.join(types) or 'none'}. Use files with the same "
                          f"columns.")
    for name, kind in types.items():
        if _of_values(others[name]) != _of_values(kind):
            raise ConfigError(f"{other.url} has the column {name!r} with the type {others[name]}, "
                              f"and {first.url} with {kind}. Write both with one type.")


def _of_values(kind: Any) -> Any:
    """Return what the values of a type follow from. Whether they may be null, and how the items of
    a list are called, differs between writers (Spark, pyarrow)."""
    types: Any = importlib.import_module("pyarrow").types
    if types.is_map(kind):
        return kind.id, _of_values(kind.key_type), _of_values(kind.item_type)
    if not kind.num_fields or hasattr(kind, "storage_type"):
        return kind
    inner = [kind.field(place) for place in range(kind.num_fields)]
    names = [one.name for one in inner] if types.is_struct(kind) else []
    return kind.id, getattr(kind, "list_size", 0), names, [_of_values(one.type) for one in inner]


def _hindrance(kind: Any) -> str:
    """Return why the values of a type cannot be read: TIME, PANDAS, EMPTY, or ""."""
    types: Any = importlib.import_module("pyarrow").types
    if types.is_fixed_size_list(kind) and not kind.list_size:
        return EMPTY
    if types.is_time64(kind) and kind.unit == "ns":
        return TIME
    if (types.is_timestamp(kind) or types.is_duration(kind)) and kind.unit == "ns":
        return PANDAS
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _hindrance(kind.value_type)
    if hasattr(kind, "storage_type"):  # an extension type
        return _hindrance(kind.storage_type)
    inner = (_hindrance(kind.field(place).type) for place in range(kind.num_fields))
    return next(filter(None, inner), "")


def refused_column(name: str, kind: str, hindrance: str) -> str:
    """Return why this process cannot read a column, with the remedy; "": it can."""
    if hindrance == TIME:
        return (f"the column {name!r} has the type {kind}, and Python's time has no nanoseconds. "
                f"Write it as time64[us], or leave it out with columns=.")
    if hindrance == EMPTY:
        return (f"the column {name!r} has the type {kind}, which pyarrow cannot read. Write it as "
                f"a list, or leave it out with columns=.")
    if hindrance == PANDAS and importlib.util.find_spec("pandas") is None:
        return (f"the column {name!r} has the type {kind}, which is read as values of pandas, and "
                f"pandas is not installed. Install it on all workers, write the column in "
                f"microseconds, or leave it out with columns=.")
    return ""


def read_footer(files: Files, source: Source) -> bytes:
    """Return the bytes of a file from its footer to its end. Raises ConfigError."""
    start = max(source.size - TAIL_BYTES, 0)
    (tail,) = files.read([Range(source.url, start, source.size)])
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if tail[-4:] == ENCRYPTED:
        raise ConfigError(f"{source.url} is encrypted, and no key is known here. Write it without "
                          f"encryption, and let the store encrypt it.")
    if tail[-4:] != MAGIC or length > source.size:
        raise ConfigError(f"{source.url} is no whole Parquet file: it does not end with its "
                          f"footer. Copy it again, or close the file when it is written.")
    if length > len(tail):
        (tail,) = files.read([Range(source.url, source.size - length, source.size)])
    return tail[-length:]


def _flaw(index: Index) -> str:
    """Return what is wrong with the content of an index; "": nothing."""
    facts, arrays = index.facts, index.arrays
    columns = facts.get("columns")
    if not (facts.keys() == {"columns", "told"} and is_list_of_texts(facts["told"])
            and isinstance(columns, list) and columns
            and all(is_list_of_texts(one) and len(one) == 3 for one in columns)
            and len({name for name, _, _ in columns}) == len(columns)):
        return "its facts are not those of Parquet files"
    groups, files = len(arrays["file"]), len(index.sources)
    if not groups or any(len(arrays[name]) != groups for name in ("group", "row_end", "bytes")) or (
            any(len(arrays[name]) != files for name in ("footer", "footer_sum"))):
        return "its arrays do not fit each other"
    if arrays["row_end"][0] <= 0 or (numpy.diff(arrays["row_end"]) <= 0).any():
        return "its row groups do not follow each other"
    if arrays["file"].max() >= files or (arrays["bytes"] < 0).any():
        return "it names files that it does not have"
    sizes = numpy.array([source.size for source in index.sources], "<u8")
    if (arrays["footer"] >= sizes).any():
        return "it has footers after the end of their file"
    return ""


PARQUET = Kind("parquet", {"file": "<u4", "group": "<u4", "row_end": "<i8", "bytes": "<i8",
                           "footer": "<u8", "footer_sum": "<u4"}, _flaw)
