"""The workspace that machines share: artifacts and step records of releases, beside the releases themselves.

work/blobs/sha256/<digest>      artifacts, by content
work/steps/<step>/<key>.json    what a step made, written after its artifacts
work/records/<run>.jsonl        tuning records, a file for each run that tuned
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tvmflow.errors import StoreError
from tvmflow.store.client import explained
from tvmflow.store.releases import ReleaseStore, _blob_key

_RECORDS = "records/"


class WorkStore:
    """The part of a release store that `tvmflow.workspace.Workspace` shares; what it holds may be deleted at any time.

    Whoever may write to the bucket decides what is found there: give that right to the machines that release, and no
    others. Every method raises `StoreError` when the server cannot be used.
    """

    def __init__(self, store: ReleaseStore) -> None:
        prefix = f"{store.config.prefix}/work" if store.config.prefix else "work"
        self._store = ReleaseStore(replace(store.config, prefix=prefix))

    @property
    def uri(self) -> str:
        """Its address."""
        return self._store.config.uri

    def has_record(self, step: str, key: str) -> bool:
        """Whether there is a record of the step."""
        return self.read_record(step, key) is not None

    def read_record(self, step: str, key: str) -> bytes | None:
        """The record of a step, None if there is none."""
        return self._store._get(_record_key(step, key))

    def write_record(self, step: str, key: str, record: bytes) -> None:
        """Write the record of a step and read it back."""
        place = _record_key(step, key)
        self._store._put(place, record, f"sharing what step {step} made")
        if self._store._get(place, just_written=True) is None:
            raise StoreError(
                f"{self._store._uri(place)} is missing right after it was written: check the server's disk and log, "
                "then run again."
            )

    def fetch(self, sha256: str, place: Path) -> bool:
        """Write an artifact into the new file `place`; False when it is missing or damaged, and no file then."""
        try:
            with place.open("xb") as file:
                whole = self._store._stream(_blob_key(sha256), file.write) == sha256
        except BaseException:
            with contextlib.suppress(OSError):
                place.unlink(missing_ok=True)
            raise
        if not whole:
            place.unlink()
        return whole

    def send(self, path: Path, sha256: str, on_progress: Callable[[int], None]) -> None:
        """Send an artifact unless it is there whole; a damaged one is replaced."""
        self._store.put_blob(path, sha256, on_progress)

    def tuning_records(self) -> dict[str, int]:
        """The files of tuning records and their sizes in bytes."""
        store, prefix = self._store, self._store._key(_RECORDS)
        with explained(store.config, "listing the tuning records"):
            pages = store._s3.get_paginator("list_objects_v2").paginate(Bucket=store.config.bucket, Prefix=prefix)
            return {
                entry["Key"].removeprefix(prefix): entry["Size"] for page in pages for entry in page.get("Contents", [])
            }

    def read_tuning_records(self, name: str) -> bytes | None:
        """One of them, None if it is gone."""
        return self._store._get(_RECORDS + name)

    def write_tuning_records(self, name: str, content: bytes) -> None:
        """Write one; a file of records only grows."""
        self._store._put(_RECORDS + name, content, "sharing tuning records")


def _record_key(step: str, key: str) -> str:
    return f"steps/{step}/{key}.json"
