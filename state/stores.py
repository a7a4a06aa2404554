"""The store that a URL names: a folder (store.py), S3 (s3.py), or Google's or Azure's (buckets.py).

--store, train(store=…) → here → checkpoints
"""

from __future__ import annotations

import re
from pathlib import Path

from elastic_trainer.host.own import OursFirst
from elastic_trainer.state.store import FolderStore, Store, StoreRefused


def open_store(url: str) -> Store:
    """Open `s3://`, `gs://` or `az://` with bucket/prefix, or a folder. Raises StoreRefused."""
    if url.startswith("s3://"):
        # Here, because boto3 takes a third of a second, and a folder does not need it.
        with OursFirst():
            from elastic_trainer.state.s3 import S3Store

        return S3Store(url)
    if url.startswith(("gs://", "az://")):
        with OursFirst():
            from elastic_trainer.state.buckets import BucketStore

            return BucketStore(url)  # imports the packages of the cloud
    if re.match(r"\w+:/", url):  # also s3:/bucket
        raise StoreRefused(f"{url} names no store. Set --store to a folder, s3://bucket/prefix, "
                           f"gs://bucket/prefix or az://container/prefix.")
    return FolderStore(Path(url))
