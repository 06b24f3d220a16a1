"""Verdicts on promotions in MLflow: how they are logged, read again and signed."""

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tvmflow.documents.encoding import decode, encode
from tvmflow.documents.release import Release
from tvmflow.documents.verdict import Verdict
from tvmflow.errors import StatementError
from tvmflow.registry import Registry
from tvmflow.services import Services
from tvmflow.store.statements import Claim, Envelope, Subject, check, sign

VERDICT = "verdict.json"


VERDICT_STATEMENT = "verdict.statement.json"


class VerdictClaim(Claim):
    """The outcome of a promotion; the statement's subjects are verdict.json and the release's document."""

    predicate_type = "urn:tvmflow:verdict:1"
    name: str
    version: str
    channel: str
    verdict: str


def hash_release(release: Release) -> str:
    """Return the SHA-256, in hexadecimal, of a release's document, which names all its blobs by their digests."""
    return hashlib.sha256(encode(release)).hexdigest()


def log_verdict(
    services: Services, release: Release, verdict: Verdict, *, report: str, files: Mapping[str, Path]
) -> str:
    """Log the verdict on a promotion as a run in MLflow, inside the run of the release; return the run's id.

    The run gets `verdict` as verdict.json, `report` (Markdown) as report.md, and `files` by their paths in the run.
    With a signing key, it also gets a signed statement on the verdict. If the verdict is `waiting`, the run in MLflow
    stays open. A later call whose verdict has the same `flow_run`, an id of Prefect's, goes on with that run. Raises
    RegistryError when MLflow fails or one of the `files` is missing. With a signing key, raises StoreError when the
    release's document cannot be read, and SettingsError when the key cannot be used.
    """
    tags = {
        **_promotion_tags(verdict.name, verdict.channel, verdict.version),
        "tvmflow.verdict": verdict.verdict,
        "tvmflow.who": verdict.who,
    }
    registry = services.registry
    title = f"promote {verdict.name} {verdict.version} to {verdict.channel}"
    run = registry.open_promotion_run(release.mlflow_run_id, title, tags, verdict.flow_run)
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as scratch:
        contents = {VERDICT: encode(verdict), "report.md": report.encode()}
        key = services.store.config.signing_key
        if key is not None:
            claim = VerdictClaim(
                name=verdict.name, version=verdict.version, channel=verdict.channel, verdict=verdict.verdict
            )
            document = services.store.list_subjects(release.name, release.version, ())[0]
            subjects = (Subject.of(VERDICT, contents[VERDICT]), document)
            contents[VERDICT_STATEMENT] = sign(claim, subjects, key).to_bytes()
        for file, content in contents.items():
            Path(scratch, file).write_bytes(content)
        registry.log_artifacts(run, {**{file: Path(scratch, file) for file in contents}, **files})
    if verdict.verdict != "waiting":
        registry.finish_run(run, "FINISHED")
    return run


class LoggedVerdict(NamedTuple):
    """A verdict in MLflow: the id of its run, and the key in hexadecimal that signed it, None where that is unknown."""

    run: str
    verdict: Verdict
    signer: str | None


def read_verdict(
    registry: Registry, name: str, channel: str, version: str | None = None, trusted: Sequence[Path] | None = None
) -> LoggedVerdict | None:
    """Return the last verdict on a promotion to a channel, of `version` or any; None if there is none.

    With `trusted`, files of public keys, one of them must have signed the statement on the verdict; with an empty list
    the key that the statement names is returned unchecked, with None the statement is not read. Raises RegistryError,
    StoreError for a damaged verdict, and StatementError for one that is not signed or was changed.
    """
    runs = registry.find_runs(_promotion_tags(name, channel, version))
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as scratch:
        path = registry.fetch_artifact(runs[0], VERDICT, Path(scratch)) if runs else None
        if path is None:
            return None
        content, signer = path.read_bytes(), None
        verdict = decode(Verdict, content, f"{VERDICT} of MLflow run {runs[0]}")
        if trusted is not None:
            statement = registry.fetch_artifact(runs[0], VERDICT_STATEMENT, Path(scratch))
            signed = None if statement is None else statement.read_bytes()
            signer = check_verdict(content, signed, name, version or verdict.version, channel, trusted)
    return LoggedVerdict(runs[0], verdict, signer)


def _promotion_tags(name: str, channel: str, version: str | None) -> dict[str, str]:
    tags = {"tvmflow.kind": "promotion", "tvmflow.name": name, "tvmflow.channel": channel}
    return tags if version is None else {**tags, "tvmflow.version": version}


def check_verdict(
    content: bytes, statement: bytes | None, name: str, version: str, channel: str, trusted: Sequence[Path]
) -> str | None:
    """Check that a trusted key has signed the statement on a verdict; return the key in hexadecimal.

    `content` and `statement` are the files that `log_verdict` writes. Without `trusted` keys nothing is checked, and
    the key is the one that the statement names, None without a statement. Raises StatementError for a verdict that is
    not signed, was changed, or is about another promotion.
    """
    topic = f"The verdict on {name} {version} for {channel}"
    envelope = None if statement is None else Envelope.parse(statement, topic)
    if trusted:
        remedy = "promote it again where a key signs"
        claim, digests = check(envelope, VerdictClaim, trusted, topic, remedy)
        is_same = digests.get(VERDICT) == Subject.of(VERDICT, content).digest["sha256"]
        if not is_same or (claim.name, claim.version, claim.channel) != (name, version, channel):
            raise StatementError(f"{topic} was changed after it was signed, or is another one: do not trust it.")
    return None if envelope is None else envelope.signer
