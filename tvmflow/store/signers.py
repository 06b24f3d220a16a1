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
    """The signer of `what`, such as "release digits 3": the public key in hexadecimal, or None if it is not signed."""

    what: str
    key: str | None


def list_signers(
    store: ReleaseStore, name: str, version: str | None, channel: str | None, cache: Path, trusted: Sequence[Path]
) -> Iterator[Signer]:
    """Yield who signed the channel, the release and each of its bundles, and check the bundles' digests.

    The release is `version`; with None it is the one that `channel` holds, and only then is the channel's signer
    yielded. One of the keys in the files `trusted` must have signed each; without such keys the signers are those that
    the statements name, unchecked. Bundles are fetched into the folder `cache`. Raises StoreError, StatementError or
    BundleError when one of them is missing, damaged or not signed.
    """
    if version is None:
        document, version = channels.read_held(store, name, str(channel), trusted)
        yield Signer(what=document.label, key=_signer(document.statement))
    release, statement = store.get_signed_release(name, version, trusted)
    yield Signer(what=f"release {name} {version}", key=_signer(statement))
    for entry in TargetEntry.read_all(release):
        bundle = fetch_target(store, entry, cache)
        with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
            extract(bundle, Path(folder), trusted=trusted)
        yield Signer(what=f"bundle for {entry.target}", key=read_signer(bundle))


def _signer(envelope: Envelope | None) -> str | None:
    return None if envelope is None else envelope.signer
