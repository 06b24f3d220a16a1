"""Signed statements: in-toto Statements in DSSE envelopes, about what the release store and the registry hold."""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

from pydantic import Field, StringConstraints, ValidationError

from tvmflow.bundle.signature import load_private, load_public, require_library
from tvmflow.errors import StatementError
from tvmflow.workspace import Record

_PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"


class Subject(Record):
    """The subject of a statement: a name, and its digests in hexadecimal by algorithm."""

    name: str
    digest: dict[str, str]

    @classmethod
    def of(cls, name: str, content: bytes) -> Self:
        """Return the subject `name` with the SHA-256 of `content`."""
        return cls(name=name, digest={"sha256": hashlib.sha256(content).hexdigest()})


class Claim(Record):
    """The predicate of a statement; each kind has its own fields and type."""

    predicate_type: ClassVar[str]


Kind = TypeVar("Kind", bound=Claim)


class EnvelopeSignature(Record):
    """A signature of an envelope: the public key, in hexadecimal, and the signature in base64."""

    keyid: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    sig: str


class Envelope(Record):
    """A DSSE envelope: a payload in base64, its type and its one signature."""

    payload: str
    payload_type: Literal["application/vnd.in-toto+json"] = Field(default=_PAYLOAD_TYPE, alias="payloadType")
    signatures: tuple[EnvelopeSignature]

    @property
    def signer(self) -> str:
        """The public key, in hexadecimal, that the envelope names; whether it has signed it is not checked."""
        (signature,) = self.signatures
        return signature.keyid

    def to_bytes(self) -> bytes:
        """Return the envelope as JSON."""
        return f"{self.model_dump_json(indent=2)}\n".encode()

    @classmethod
    def parse(cls, content: bytes, topic: str) -> Self:
        """Parse an envelope from JSON. Raises StatementError for a damaged one; `topic` begins the message."""
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            raise StatementError(f"{topic} has a damaged statement: sign it again.") from error


class _Statement(Record):
    type: Literal["https://in-toto.io/Statement/v1"] = Field(default="https://in-toto.io/Statement/v1", alias="_type")
    subject: tuple[Subject, ...]
    predicate_type: str = Field(alias="predicateType")
    predicate: dict[str, Any]


def sign(claim: Claim, subjects: Iterable[Subject], key: Path) -> Envelope:
    """Sign a claim about `subjects` with the private key in a PEM file. Equal claims give equal envelopes.

    Raises SettingsError for a file without an Ed25519 private key, or without the libraries of the extra `sign`.
    """
    require_library("securesystemslib")
    from securesystemslib.dsse import Envelope as Dsse
    from securesystemslib.signer import CryptoSigner, SSlibKey

    predicate = claim.model_dump(mode="json")
    statement = _Statement(subject=tuple(subjects), predicateType=claim.predicate_type, predicate=predicate)
    payload = statement.model_dump_json().encode()
    private = load_private(key)
    public = private.public_key()
    envelope = Dsse(payload, _PAYLOAD_TYPE, {})
    envelope.sign(CryptoSigner(private, SSlibKey.from_crypto(public, keyid=public.public_bytes_raw().hex())))
    return Envelope.model_validate(envelope.to_dict())


def peek(envelope: Envelope, kind: type[Kind]) -> Kind | None:
    """Return the claim of an envelope without checking its signature; None if it is damaged or not of this kind."""
    try:
        statement = _Statement.model_validate_json(base64.b64decode(envelope.payload))
        return kind.model_validate(statement.predicate) if statement.predicate_type == kind.predicate_type else None
    except ValueError:
        return None


def check(
    envelope: Envelope | None, kind: type[Kind], trusted: Sequence[Path], topic: str, remedy: str
) -> tuple[Kind, dict[str, str]]:
    """Check that one of the `trusted` keys has signed an envelope; return its claim, and its subjects' SHA-256 by name.

    `trusted` are files with public keys. `topic` begins the messages and names the subject of the claim; `remedy` says
    in a message how to sign it. Raises StatementError when there is no envelope (None), none of the keys has signed it,
    or it holds another kind of claim.
    """
    require_library("securesystemslib")
    from securesystemslib.dsse import Envelope as Dsse
    from securesystemslib.exceptions import VerificationError
    from securesystemslib.signer import SSlibKey

    if envelope is None:
        raise StatementError(
            f"{topic} is not signed, and this machine accepts signed ones only: {remedy}, or take a signed one."
        )
    public = [load_public(path) for path in trusted]
    keys = {raw: SSlibKey.from_crypto(key, keyid=raw) for key in public for raw in [key.public_bytes_raw().hex()]}
    if envelope.signer not in keys:
        raise StatementError(
            f"{topic} is signed with the key {envelope.signer[:16]}, which is not trusted "
            "here: take one signed with a trusted key, or add that key to TVMFLOW_TRUSTED_KEYS."
        )
    try:
        dsse = Dsse.from_dict(envelope.model_dump(mode="json"))
        dsse.verify(list(keys.values()), 1)
        statement = _Statement.model_validate_json(dsse.payload)
        if statement.predicate_type != kind.predicate_type:
            raise ValueError("another kind of claim")
        claim = kind.model_validate(statement.predicate)
    except (ValueError, VerificationError) as error:
        raise StatementError(
            f"{topic} has a statement that was changed after it was signed, or is of another kind: do not trust it."
        ) from error
    return claim, {subject.name: subject.digest.get("sha256", "") for subject in statement.subject}
