"""Who has signed a release and what belongs to it: the channel that holds it, its document, its bundles."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tvmflow.bundle import extract, read_signer
from tvmflow.store import channels
from tvmflow.store.releases import ReleaseStore
from tvmflow.store.resolve import TargetEntry, fetch_target
from tvmflow.store.statements import Envelope
from tvmflow.workspace import Record


class Signer(Record):
    """A signed thing in words, as "release digits 3", and the public key in hexadecimal; None for an unsigned one."""

    what: str
    key: str | None


def list_signers(
    store: ReleaseStore, name: str, version: str | None, channel: str | None, cache: Path, trusted: Sequence[Path]
) -> Iterator[Signer]:
    """Yield who signed the channel, where one is named, the release and each of its bundles; check all digests.

    One of the `trusted` keys must have signed each; without such keys the signers are those that the statements name.
    Without a `version`, the release is the one that the channel holds. Bundles are fetched into the folder `cache`.
    Raises StoreError, StatementError and BundleError for what is missing, damaged or not signed.
    """
    if version is None:
        document = channels.read(store, name, str(channel))
        version = channels.read_version(store, name, document.channel, trusted)
        yield Signer(what=document.label, key=_signer(document.statement))
    release = store.get_release(name, version, trusted=trusted)
    yield Signer(what=f"release {name} {version}", key=_signer(store.read_statement(name, version)))
    for entry in TargetEntry.read_all(release):
        bundle = fetch_target(store, entry, cache)
        with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
            extract(bundle, Path(folder), trusted=trusted)
        yield Signer(what=f"bundle for {entry.target}", key=read_signer(bundle))


def _signer(envelope: Envelope | None) -> str | None:
    return None if envelope is None else envelope.signer
