"""The store that a URL names: a folder (store.py) or S3 (s3.py).

--store, train(store=…) → here → checkpoints
"""

from __future__ import annotations

import re
from pathlib import Path

from elastic_trainer.host.own import OursFirst
from elastic_trainer.state.store import FolderStore, Store, StoreRefused


def open_store(url: str) -> Store:
    """Open `s3://bucket/prefix` or a folder. Raises StoreRefused for a URL that is neither."""
    if url.startswith("s3://"):
        # Here, because boto3 takes a third of a second, and a folder does not need it.
        with OursFirst():
            from elastic_trainer.state.s3 import S3Store

        return S3Store(url)
    if re.match(r"\w+:/", url):  # also s3:/bucket
        raise StoreRefused(
            f"{url} is neither a folder nor s3://bucket/prefix. Set --store to one of the two.")
    return FolderStore(Path(url))
