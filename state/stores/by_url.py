"""The store that a URL names: a folder (store.py), S3 (s3.py), or Google's or Azure's (buckets.py).

--store, train(store=…) → here → checkpoints
watch, report, verify of a run in a bucket (views/far.py) → here
"""

from __future__ import annotations

import re
from pathlib import Path

from elastic_trainer.host.own import OursFirst
from elastic_trainer.state.stores.store import Bucket, FolderStore, Store, StoreRefused

BUCKETS = ("s3://", "gs://", "az://")
"""How the addresses of clouds' stores begin."""


def open_store(url: str) -> Store:
    """Open an address of BUCKETS with bucket/prefix, or a folder. Raises StoreRefused."""
    if url.startswith(BUCKETS):
        return open_bucket(url)
    if re.match(r"\w+:/", url):  # also s3:/bucket
        raise StoreRefused(f"{url} names no store. Set --store to a folder, s3://bucket/prefix, "
                           f"gs://bucket/prefix or az://container/prefix.")
    return FolderStore(Path(url))


def open_bucket(url: str, *, is_reader: bool = False) -> Bucket:
    """Open an address of BUCKETS. `is_reader`: it is only read. Raises StoreRefused."""
    # The imports are here, because boto3 takes a third of a second, and a folder does not need it.
    with OursFirst():
        if url.startswith("s3:"):
            from elastic_trainer.state.stores.s3 import S3Store
        else:
            from elastic_trainer.state.stores.buckets import BucketStore

            return BucketStore(url, is_reader=is_reader)  # imports the packages of the cloud
    return S3Store(url, is_reader=is_reader)
