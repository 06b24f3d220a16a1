"""Tuning records in the bucket of the release store, beside the releases.

records/<context>/<run>.jsonl    what a run recorded for one target, TVM version and search space
"""

import contextlib
from dataclasses import replace

from tvmflow.store.client import explained
from tvmflow.store.releases import ReleaseStore

_FOLDER = "records/"
# A run that tunes has better to do than to wait for a server that is gone.
_READ_TIMEOUT, _ATTEMPTS = 10.0, 2


class RecordObjects:
    """Files of tuning records as objects, replaced whole: S3 cannot append.

    A file's name is its context and its run, joined by `-`. Whoever may write to the bucket decides what is found
    there. Every method raises `StoreError` when the server cannot be used.
    """

    def __init__(self, store: ReleaseStore) -> None:
        config = store.config
        config = replace(
            config, read_timeout=min(config.read_timeout, _READ_TIMEOUT), attempts=min(config.attempts, _ATTEMPTS)
        )
        self._store = ReleaseStore(config)

    @property
    def uri(self) -> str:
        """Its address."""
        return self._store._uri(_FOLDER.rstrip("/"))

    def sizes(self, context: str | None = None) -> dict[str, int]:
        """The files, or those of one context, with their sizes in bytes."""
        store, found = self._store, {}
        prefix = store._key(_FOLDER if context is None else f"{_FOLDER}{context}/")
        start = len(store._key(_FOLDER))
        with explained(store.config, "listing the tuning records"):
            pages = store._s3.get_paginator("list_objects_v2").paginate(Bucket=store.config.bucket, Prefix=prefix)
            for page in pages:
                for entry in page.get("Contents", []):
                    found[entry["Key"][start:].replace("/", "-", 1)] = entry["Size"]
        return {name: size for name, size in found.items() if "/" not in name}

    def read(self, name: str) -> bytes | None:
        """What a file holds, None where there is none."""
        return self._store._get(_key(name))

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or replace it."""
        self._store._put(_key(name), content, "sending tuning records")

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""
        store = self._store
        with explained(store.config, "removing tuning records"), contextlib.suppress(store._s3.exceptions.NoSuchKey):
            store._s3.delete_object(Bucket=store.config.bucket, Key=store._key(_key(name)))


def _key(name: str) -> str:
    return _FOLDER + name.replace("-", "/", 1)
