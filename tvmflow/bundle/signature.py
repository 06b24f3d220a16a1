"""Signatures of bundles: Ed25519 over the manifest, whose digests cover everything else."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmflow.errors import BundleError, SettingsError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

TRUSTED_KEYS_VARIABLE = "TVMFLOW_TRUSTED_KEYS"
# The content of the member `bundle.sig`: the algorithm, the public key and the signature, in hexadecimal.
_FORM = re.compile(rb"ed25519 ([0-9a-f]{64}) ([0-9a-f]{128})\n")
_LARGEST_KEY = 1 << 14


def keygen(path: Path) -> Path:
    """Make a key pair: the private key at `path`, which only its owner may read, the public one beside it.

    Returns the public key's path, `path` with `.pub` added. Raises SettingsError when either file exists.
    """
    _library()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    public_path = path.with_name(path.name + ".pub")
    for place, content, mode in ((path, private, 0o600), (public_path, public, 0o644)):
        try:
            with os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
                stream.write(content)
        except FileExistsError as error:
            raise SettingsError(f"{str(place)!r} exists; a key is never overwritten, choose another name") from error
        except OSError as error:
            raise SettingsError(
                f"key {str(place)!r} cannot be written ({error.strerror}); choose another place"
            ) from error
    return public_path


def sign(manifest: bytes, key: Path) -> bytes:
    """The signature of a manifest's bytes by the private key in a PEM file; the same each time."""
    private = _private(key)
    return f"ed25519 {_raw(private.public_key()).hex()} {private.sign(manifest).hex()}\n".encode()


def public_key(path: Path) -> str:
    """The public key, in hexadecimal, of a PEM file with a public or private key."""
    return _raw(_public(path)).hex()


def signer(signature: bytes, source: str) -> str:
    """The public key, in hexadecimal, that a signature says it is made with. Raises BundleError for a damaged one."""
    form = _FORM.fullmatch(signature)
    if form is None:
        raise BundleError(f"bundle {source!r} has a damaged signature; fetch it again")
    return form[1].decode()


def trusted_keys() -> tuple[Path, ...]:
    """The files of public keys that this machine trusts: TVMFLOW_TRUSTED_KEYS, divided as PATH is. None: trust all."""
    return tuple(Path(item) for item in os.environ.get(TRUSTED_KEYS_VARIABLE, "").split(os.pathsep) if item)


def check(manifest: bytes, signature: bytes | None, trusted: Sequence[Path], source: str) -> None:
    """Raise BundleError unless one of the `trusted` keys has signed the manifest; with no keys, anything passes."""
    if not trusted:
        return
    keys = {_raw(key).hex(): key for key in map(_public, trusted)}
    if signature is None:
        raise BundleError(
            f"bundle {source!r} is not signed, and only signed ones are taken here; "
            f"sign it with `tvmflow sign`, or take a signed one"
        )
    by = signer(signature, source)
    if by not in keys:
        raise BundleError(
            f"bundle {source!r} is signed with the key {by[:16]}, which is not trusted here; "
            f"take one signed with a trusted key, or add that key to {TRUSTED_KEYS_VARIABLE}"
        )
    from cryptography.exceptions import InvalidSignature

    form: Any = _FORM.fullmatch(signature)
    try:
        keys[by].verify(bytes.fromhex(form[2].decode()), manifest)
    except InvalidSignature as error:
        raise BundleError(f"bundle {source!r} was changed after it was signed; do not trust it") from error


def _library() -> None:
    try:
        import cryptography  # noqa: F401 - whether it is there
    except ModuleNotFoundError as error:
        raise SettingsError(
            "signatures need the library 'cryptography'; install it with `pip install tvmflow[sign]`"
        ) from error


def _private(path: Path) -> "Ed25519PrivateKey":
    key = _load(path)
    if not hasattr(key, "sign"):
        raise SettingsError(f"{str(path)!r} holds a public key; sign with the private one")
    return key  # type: ignore[no-any-return]


def _public(path: Path) -> "Ed25519PublicKey":
    key = _load(path)
    return key.public_key() if hasattr(key, "sign") else key  # type: ignore[no-any-return]


def _load(path: Path) -> Any:
    """The key in a PEM file, private or public."""
    _library()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    try:
        with path.open("rb") as stream:
            data = stream.read(_LARGEST_KEY)
    except OSError as error:
        raise SettingsError(
            f"key {str(path)!r} cannot be read ({error.strerror}); `tvmflow keygen` makes a pair"
        ) from error
    try:
        private = b"PRIVATE KEY" in data
        key: Any = (
            serialization.load_pem_private_key(data, None) if private else serialization.load_pem_public_key(data)
        )
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SettingsError(
            f"{str(path)!r} is no Ed25519 key in PEM without a password; `tvmflow keygen` makes a pair"
        ) from error
    if not isinstance(key, ed25519.Ed25519PrivateKey | ed25519.Ed25519PublicKey):
        raise SettingsError(f"{str(path)!r} is a key of another kind; Ed25519 is needed, `tvmflow keygen` makes a pair")
    return key


def _raw(key: "Ed25519PublicKey") -> bytes:
    return key.public_bytes_raw()
