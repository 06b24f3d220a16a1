"""Garbage of a release store: releases that nobody needs any more, and objects that no release refers to.

Who removes it holds the lease `leases.sweep` meanwhile, so that nobody is about to refer to what goes. A release loses
its document first: killed at any moment, every release that remains is whole.
"""

import datetime
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tvmflow.documents import decode
from tvmflow.release import Release
from tvmflow.store import channels, leases
from tvmflow.store.keys import NAME, numeric_order, release_key
from tvmflow.store.objects import ObjectEntry
from tvmflow.store.releases import ReleaseStore

_DIGEST = re.compile(rb"[0-9a-f]{64}")
_GRACE = datetime.timedelta(days=1)
"""How old an object must be at least, whatever the rule says: an older tvmflow takes no lease on what it uploads."""

Progress = Callable[[float, float, str], None]
"""Called with the objects done, the objects in all, and what is done."""


@dataclass(frozen=True)
class Retention:
    """The releases that stay whatever the channels say: those of the last `days`, and the newest `releases` of a model.

    Results in the shared workspace stay that a run has used in the last `days`.
    """

    days: float
    releases: int


@dataclass(frozen=True)
class StoredPiece:
    """An object that can go: of which kind it is, its key, and its size in bytes."""

    kind: str
    key: str
    size: int


class Garbage:
    """The garbage of a store under a rule; documents that were read once are kept, because they never change.

    A release stays that a channel holds, held last within its policy's `keep`, or is wished for; that the rule keeps;
    or for whose document `is_named` is true. Objects stay that a release which stays refers to. Nothing younger than a
    day goes. Methods raise StoreError when a document is damaged or of a newer format, and when the server fails.
    """

    def __init__(
        self,
        store: ReleaseStore,
        rule: Retention,
        is_named: Callable[[Release], bool],
        on_progress: Progress = lambda done, total, message: None,
    ) -> None:
        self._store, self._rule, self._is_named, self._report = store, rule, is_named, on_progress
        self._contents: dict[tuple[str, datetime.datetime], bytes] = {}

    def find(self, *, with_work: bool = True) -> list[StoredPiece]:
        """Return what can go, in the order in which it is to be removed; `with_work`, also of the shared workspace."""
        # What is sent from here on is not among the blobs that can go.
        blobs = self._list("blobs/sha256/")
        pieces, kept_documents = self._sort_releases()
        pieces += self._find_unmentioned("blobs", blobs, kept_documents)
        if with_work:
            blobs = self._list("work/blobs/sha256/")
            records = self._list("work/steps/")
            old_records = [entry for entry in records if self._is_old(entry)]
            pieces += [_piece("results of steps", entry) for entry in old_records]
            kept_records = [entry for entry in records if not self._is_old(entry)]
            pieces += self._find_unmentioned("artifacts", blobs, kept_records)
        return pieces

    def collect(self, who: str) -> list[StoredPiece]:
        """Remove what `find` returns, and return it; `who` is this process, for others.

        Meanwhile nobody can publish: who wants to waits, and who does is waited for. The shared workspace is left alone
        while a run uses it. Killed at any moment, it leaves a store in which every release is whole; the next call
        removes the rest.
        """
        # Documents are read before others have to wait.
        if not self.find():
            return []
        with leases.sweep(self._store, who) as lease:
            dead_users = leases.find_idle_work(self._store)
            pieces = self.find(with_work=dead_users is not None)
            for done, piece in enumerate(pieces):
                self._report(done, len(pieces), f"removing {piece.kind}")
                lease.require()
                self._store.objects.delete(piece.key, f"removing {piece.key}")
            for key in dead_users or ():
                self._store.objects.delete(key, "removing the lease of a run that died")
        return pieces

    def _sort_releases(self) -> tuple[list[StoredPiece], list[ObjectEntry]]:
        """The objects of releases that can go, each document first, and the documents of the releases that stay."""
        folders: dict[str, dict[str, list[ObjectEntry]]] = defaultdict(lambda: defaultdict(list))
        for entry in self._list("releases/"):
            match entry.key.split("/"):
                case ["releases", name, version, _] if NAME.fullmatch(name) and NAME.fullmatch(version):
                    folders[name][version].append(entry)
        pieces: list[StoredPiece] = []
        entries_to_keep: list[ObjectEntry] = []
        for name, versions in folders.items():
            documents = {
                version: entry
                for version, entries in versions.items()
                for entry in entries
                if entry.key == release_key(name, version)
            }
            newest = sorted(documents, key=numeric_order)[-self._rule.releases :]
            versions_to_keep = {*newest, *_list_kept_versions(self._store, name)}
            for version, entries in versions.items():
                document = documents.get(version)
                if document is not None and (version in versions_to_keep or self._stays(document)):
                    entries_to_keep.append(document)
                elif all(self._is_old(entry) for entry in entries):
                    # Without its document a release does not exist.
                    entries.sort(key=lambda entry: entry is not document)
                    pieces += [_piece("releases", entry) for entry in entries]
        return pieces, entries_to_keep

    def _stays(self, document: ObjectEntry) -> bool:
        """Whether a release that no channel needs stays: it is too young, or somebody names it."""
        if not self._is_old(document):
            return True
        content = self._read(document)
        return content != b"" and self._is_named(decode(Release, content, self._store.objects.uri(document.key)))

    def _find_unmentioned(
        self, kind: str, blobs: list[ObjectEntry], documents: list[ObjectEntry]
    ) -> Iterator[StoredPiece]:
        """Yield the old ones of the blobs whose digest stands in none of the documents, wherever in it."""
        mentioned = {digest for entry in documents for digest in _DIGEST.findall(self._read(entry))}
        for entry in blobs:
            digest = entry.key.rpartition("/")[2].encode()
            if _DIGEST.fullmatch(digest) and digest not in mentioned and self._is_old(entry, _GRACE):
                yield _piece(kind, entry)

    def _list(self, prefix: str) -> list[ObjectEntry]:
        self._report(0, 0, f"listing {prefix}")
        return list(self._store.objects.list_objects(prefix))

    def _read(self, entry: ObjectEntry) -> bytes:
        """The content of a document; nothing for one that is gone by now."""
        place = entry.key, entry.last_modified
        if place not in self._contents:
            self._report(0, 0, f"reading {entry.key}")
            self._contents[place] = self._store.objects.get(entry.key) or b""
        return self._contents[place]

    def _is_old(self, entry: ObjectEntry, age: datetime.timedelta | None = None) -> bool:
        age = max(_GRACE, datetime.timedelta(days=self._rule.days)) if age is None else age
        return datetime.datetime.now(datetime.UTC) - entry.last_modified > age


def _list_kept_versions(store: ReleaseStore, name: str) -> set[str]:
    return {version for channel in channels.list_all(store, name) for version in channel.kept_versions}


def _piece(kind: str, entry: ObjectEntry) -> StoredPiece:
    return StoredPiece(kind, entry.key, entry.size)
