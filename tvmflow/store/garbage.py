"""Garbage of a release store: releases that nobody needs any more, and objects that no release refers to.

A process that removes garbage holds the lease `leases.sweep`, so that no other process refers to an object just as it
is removed. It gives the lease back every few seconds, so that others can publish in between. The document of a release
is removed before its other objects: if the process is killed at any moment, every release that remains is whole.
"""

import datetime
import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from tvmflow.bundle.signature import trusted_keys
from tvmflow.documents.encoding import decode
from tvmflow.documents.release import Release
from tvmflow.errors import StoreError
from tvmflow.store import channels, leases
from tvmflow.store.channel_statements import check_statement
from tvmflow.store.keys import NAME, numeric_order, release_key
from tvmflow.store.objects import ObjectEntry
from tvmflow.store.releases import ReleaseStore

_DIGEST = re.compile(rb"[0-9a-f]{64}")
_GRACE = datetime.timedelta(days=1)
"""How old an object must be at least, whatever the rule says: an older tvmflow takes no lease on what it uploads."""
_HOLD_SECONDS = 5.0
"""How long objects are removed before others may publish again."""

_log = logging.getLogger(__name__)

Progress = Callable[[float, float, str], None]
"""Called with the objects done, the objects in all, and what is done."""


@dataclass(frozen=True)
class Retention:
    """The releases that stay whatever the channels say: those of the last `days`, and the newest `releases` of a model.

    In the shared workspace, the results that a run has used in the last `days` stay.
    """

    days: float
    releases: int


@dataclass(frozen=True)
class StoredPiece:
    """An object that can be removed: its kind (such as "releases" or "blobs"), its key, and its size in bytes."""

    kind: str
    key: str
    size: int


class Garbage:
    """The garbage of a store under a rule for retention.

    A release stays if a channel keeps it (`Channel.kept_versions`), if the rule keeps it, or if its registered version
    is among those that `list_named` returns for the registered model. If a channel of a name lacks a statement that
    this machine trusts, every release of that name stays. An object stays if a release that stays refers to it, or if
    it is younger than a day. `on_progress` gets the progress.

    Methods raise StoreError when a document is damaged or of a newer format, and when the server fails.
    """

    def __init__(
        self,
        store: ReleaseStore,
        rule: Retention,
        list_named: Callable[[str], Collection[str]],
        on_progress: Progress = lambda done, total, message: None,
    ) -> None:
        self._store, self._rule, self._list_named, self._report = store, rule, list_named, on_progress
        self._contents: dict[ObjectEntry, bytes | None] = {}
        self._releases: dict[ObjectEntry, Release | None] = {}

    def find(self) -> list[StoredPiece]:
        """Return the objects that can be removed from the store and its shared workspace, in the order of removal."""
        return self._find(*self._list_blobs())

    def collect(self, who: str) -> list[StoredPiece]:
        """Remove the objects that can be removed, and return them; `who` is the name of this process for other people.

        It removes objects for a few seconds at a time, in which nobody can publish: it waits for those who publish, and
        those who want to publish wait for it. Objects that were uploaded after the call began stay; whether the others
        can be removed is checked again each time. The shared workspace is left alone while a run uses it. If the
        process is killed at any moment, every release in the store is whole, and the next call removes the rest.
        """
        blobs, artifacts = self._list_blobs()
        total = len(self._find(blobs, artifacts))
        idle = leases.find_idle_work(self._store) if total else None
        removed: dict[str, StoredPiece] = {}
        is_done = total == 0
        while not is_done:
            with leases.sweep(self._store, who) as lease:
                is_idle = idle is not None and idle.is_idle()
                pieces = self._find(_without(blobs, removed), _without(artifacts, removed) if is_idle else None)
                ends_at = time.monotonic() + _HOLD_SECONDS
                for piece in pieces:
                    self._report(len(removed), total, f"removing {piece.kind}")
                    lease.require()
                    self._store.objects.delete(piece.key, f"removing {piece.key}")
                    removed[piece.key] = piece
                    if time.monotonic() >= ends_at:
                        break
                is_done = not pieces or pieces[-1].key in removed
                for key in idle.keys if idle is not None and is_idle and is_done else ():
                    self._store.objects.delete(key, "removing the lease of a run that died")
            if not is_done:
                leases.let_others_in()
        return list(removed.values())

    def _list_blobs(self) -> tuple[list[ObjectEntry], list[ObjectEntry]]:
        """The blobs of releases and the artifacts of the shared workspace: what is sent later is not among them.

        What lies in `work/` belongs to another store if there are releases: one that has `work` in its prefix.
        """
        is_shared = not self._list("work/releases/")
        return self._list("blobs/sha256/"), self._list("work/blobs/sha256/") if is_shared else []

    def _find(self, blobs: list[ObjectEntry], artifacts: list[ObjectEntry] | None) -> list[StoredPiece]:
        """The removable pieces: of the blobs only these; of the shared workspace these artifacts, and none if None."""
        pieces, kept_documents = self._sort_releases()
        pieces += self._find_unmentioned("blobs", blobs, kept_documents)
        if artifacts is not None:
            records = self._list("work/steps/")
            old_records = [entry for entry in records if self._is_old(entry)]
            pieces += [_piece("results of steps", entry) for entry in old_records]
            kept_records = [entry for entry in records if not self._is_old(entry)]
            pieces += self._find_unmentioned("artifacts", artifacts, kept_records)
        return pieces

    def _sort_releases(self) -> tuple[list[StoredPiece], list[ObjectEntry]]:
        """The objects of releases that can go, each document first, and the documents of the releases that stay."""
        folders: dict[str, dict[str, list[ObjectEntry]]] = defaultdict(lambda: defaultdict(list))
        for entry in self._list("releases/"):
            match entry.key.split("/"):
                # Other objects are of a store that has `releases` in its prefix.
                case ["releases", name, version, "release.json" | "statement.json"] if _are_names(name, version):
                    folders[name][version].append(entry)
        pieces: list[StoredPiece] = []
        entries_to_keep: list[ObjectEntry] = []
        list_named = cache(self._list_named)
        for name, versions in folders.items():
            documents = {
                version: entry
                for version, entries in versions.items()
                for entry in entries
                if entry.key == release_key(name, version)
            }
            newest = sorted(documents, key=numeric_order)[-self._rule.releases :]
            versions_to_keep = {*newest, *_list_kept_versions(self._store, name, documents)}
            for version, entries in versions.items():
                document = documents.get(version)
                # Of a release whose document is damaged, nobody knows what it needs.
                release = None if document is None else self._read_release(document)
                if document is not None and (version in versions_to_keep or self._stays(document, release, list_named)):
                    entries_to_keep.append(document)
                elif all(self._is_old(entry) for entry in entries):
                    # Without its document a release does not exist.
                    entries.sort(key=lambda entry: entry is not document)
                    pieces += [_piece("releases", entry) for entry in entries]
        return pieces, entries_to_keep

    def _read_release(self, document: ObjectEntry) -> Release | None:
        """The release of a document, None for one that is gone by now. Raises StoreError for a damaged document."""
        if document not in self._releases:
            content, uri = self._read(document), self._store.objects.uri(document.key)
            self._releases[document] = None if content is None else decode(Release, content, uri)
        return self._releases[document]

    def _stays(
        self, document: ObjectEntry, release: Release | None, list_named: Callable[[str], Collection[str]]
    ) -> bool:
        """Whether a release that no channel needs stays: it is too young, or somebody names it."""
        if not self._is_old(document):
            return True
        if release is None:
            return False
        model, version = release.registered_version
        return version in list_named(model)

    def _find_unmentioned(
        self, kind: str, blobs: list[ObjectEntry], documents: list[ObjectEntry]
    ) -> Iterator[StoredPiece]:
        """Yield the old ones of the blobs whose digest stands in none of the documents, wherever in it."""
        mentioned = {digest for entry in documents for digest in _DIGEST.findall(self._read(entry) or b"")}
        for entry in blobs:
            digest = entry.key.rpartition("/")[2].encode()
            if _DIGEST.fullmatch(digest) and digest not in mentioned and self._is_old(entry, _GRACE):
                yield _piece(kind, entry)

    def _list(self, prefix: str) -> list[ObjectEntry]:
        self._report(0, 0, f"listing {prefix}")
        return list(self._store.objects.list_objects(prefix))

    def _read(self, entry: ObjectEntry) -> bytes | None:
        """The content of a document, None for one that is gone by now."""
        if entry not in self._contents:
            self._report(0, 0, f"reading {entry.key}")
            self._contents[entry] = self._store.objects.get(entry.key)
        return self._contents[entry]

    def _is_old(self, entry: ObjectEntry, age: datetime.timedelta | None = None) -> bool:
        age = max(_GRACE, datetime.timedelta(days=self._rule.days)) if age is None else age
        return datetime.datetime.now(datetime.UTC) - entry.last_modified > age


def _list_kept_versions(store: ReleaseStore, name: str, versions: Iterable[str]) -> set[str]:
    """The versions that channels keep; all of `versions` where this machine would not follow one of the channels.

    Else somebody without a key could have releases removed by changing what a channel says.
    """
    documents, trusted = channels.list_all(store, name), trusted_keys()
    try:
        for channel in documents if trusted else ():
            check_statement(store, channel, trusted)
    except StoreError as error:
        _log.warning("every release of %s stays, because of a channel: %s", name, error)
        return set(versions)
    return {version for channel in documents for version in channel.kept_versions}


def _are_names(*texts: str) -> bool:
    return all(map(NAME.fullmatch, texts))


def _without(entries: list[ObjectEntry], removed: Mapping[str, StoredPiece]) -> list[ObjectEntry]:
    return [entry for entry in entries if entry.key not in removed]


def _piece(kind: str, entry: ObjectEntry) -> StoredPiece:
    return StoredPiece(kind, entry.key, entry.size)
