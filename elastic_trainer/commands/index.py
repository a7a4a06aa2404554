"""`elastic-trainer index`: build the index of a dataset once, before a run.

    elastic-trainer index "s3://bucket/train-{000..099}.tar"
    elastic-trainer index --index s3://other/indexes "data/*.parquet"
    elastic-trainer index s3://bucket/images/        a folder for each class (ImageFolder)
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from elastic_trainer.config import ConfigError
from elastic_trainer.host.options import Parser

KINDS = ("tar", "parquet", "images")


def _parser() -> Parser:
    parser = Parser(prog="elastic-trainer index",
                    description="Build the index of a dataset (tar, Parquet, images), once before "
                                "a run.")
    parser.add_argument("urls", nargs="+", metavar="URL",
                        help="files or patterns, as TarShards and ParquetFiles take them; with a "
                             "last slash: the root of an ImageFolder")
    parser.add_argument("--index", metavar="FOLDER",
                        help="where the index goes; default: beside the data")
    parser.add_argument("--kind", choices=KINDS, help="default: by the names of the files")
    parser.add_argument("--ignore-zeros", action="store_true",
                        help="read archives on after their end (TarShards(ignore_zeros=True))")
    parser.add_argument("--rebuild", action="store_true",
                        help="replace an index whose data has changed")
    return parser


def main(argv: Sequence[str]) -> int:
    """Build or check an index, and print what it has. Raises ConfigError."""
    options = _parser().parse_args(argv)
    from elastic_trainer.data.files import Files
    from elastic_trainer.data.images import index_images
    from elastic_trainer.data.index import AboutData
    from elastic_trainer.data.parquet_index import index_parquet
    from elastic_trainer.data.tar import index_tars

    warnings.simplefilter("ignore", AboutData)  # printed below, also of an older index
    kind, files = options.kind or kind_of(options.urls), Files()
    if kind == "images":
        if len(options.urls) > 1:
            raise ConfigError(f"{options.urls[1]} is a second root. Give one root of images.")
        index = index_images(files, options.urls[0].rstrip("/"), options.index,
                             anew=options.rebuild)
        samples = len(index.sources)
    elif kind == "tar":
        index = index_tars(files, options.urls, options.index, anew=options.rebuild,
                           ignore_zeros=options.ignore_zeros)
        samples = len(index.arrays["file"])
    else:
        index = index_parquet(files, options.urls, options.index, anew=options.rebuild)
        samples = int(index.arrays["row_end"][-1])
    for sentence in index.facts.get("told", []):
        print(sentence)
    size = sum(source.size for source in index.sources)
    print(f"{kind}: {samples} samples in {len(index.sources)} files with {size} bytes; "
          f"index sha256 {index.sha256}")
    return 0


def kind_of(urls: list[str]) -> str:
    """Return the kind of a dataset by the names of its files. Raises ConfigError."""
    for ending, kind in ((".tar", "tar"), (".parquet", "parquet"), ("/", "images")):
        if all(url.endswith(ending) for url in urls):
            return kind
    raise ConfigError(f"{urls[0]} ends with none of .tar, .parquet and a slash. Name the kind: "
                      f"--kind tar|parquet|images.")
