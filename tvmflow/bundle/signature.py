"""Signatures of bundles: Ed25519 over the manifest, whose digests cover all other files."""

import importlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmflow.errors import BundleError, SettingsError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

TRUSTED_KEYS_VARIABLE = "TVMFLOW_TRUSTED_KEYS"
# The content of the member `bundle.sig`: the algorithm, the public key and the signature, in hexadecimal.
_FORM = re.compile(rb"ed25519 ([0-9a-f]{64}) ([0-9a-f]{128})\n")
_LARGEST_KEY = 1 << 14


def keygen(path: Path) -> Path:
    """Write a new key pair: the private key at `path`, readable by its owner only, the public key beside it.

    Returns the public key's path, which is `path` with `.pub` added. Raises SettingsError when a file exists or cannot
    be written, and when the library `cryptography` is not installed.
    """
    require_library()
    from cryptography.hazmat.primitives.asymmetric import ed25519

    return write_pair(ed25519.Ed25519PrivateKey.generate(), path)


def write_pair(key: "Ed25519PrivateKey | EllipticCurvePrivateKey", path: Path) -> Path:
    """Write a private key at `path`, readable by its owner only, and its public key beside it, both in PEM.

    Returns the public key's path, which is `path` with `.pub` added. Raises SettingsError when a file exists or cannot
    be written.
    """
    from cryptography.hazmat.primitives import serialization

    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    public_path = path.with_name(path.name + ".pub")
    files: list[Path] = []
    for place, content, mode in ((path, private, 0o600), (public_path, public, 0o644)):
        try:
            descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            files.append(place)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
        except OSError as error:
            # Half a pair would be in the way of the next attempt.
            for file in files:
                file.unlink(missing_ok=True)
            if isinstance(error, FileExistsError):
                raise SettingsError(
                    f"{str(place)!r} exists; a key is never overwritten, choose another name"
                ) from error
            raise SettingsError(
                f"key {str(place)!r} cannot be written ({error.strerror}); choose another place"
            ) from error
    return public_path


def sign(manifest: bytes, key: Path) -> bytes:
    """Sign a manifest's bytes with the private key in a PEM file; return the content of `bundle.sig`.

    Equal bytes and keys give equal signatures. Raises SettingsError for a file that cannot be read, or has
    no Ed25519 private key without a password.
    """
    private = load_private(key)
    return f"ed25519 {_raw(private.public_key()).hex()} {private.sign(manifest).hex()}\n".encode()


def public_key(path: Path) -> str:
    """Return the public key, in hexadecimal, of a PEM file with a public or a private key.

    Raises SettingsError for a file without an Ed25519 key.
    """
    return _raw(load_public(path)).hex()


def signer(signature: bytes, source: str) -> str:
    """Return the public key, in hexadecimal, that a signature names, without checking the signature.

    Raises BundleError for a damaged signature; `source` names the bundle in the message.
    """
    form = _FORM.fullmatch(signature)
    if form is None:
        raise BundleError(f"bundle {source!r} has a damaged signature; fetch it again")
    return form[1].decode()


def trusted_keys() -> tuple[Path, ...]:
    """Return the paths of public keys in TVMFLOW_TRUSTED_KEYS, a list like PATH; empty: no signature is needed.

    Raises SettingsError for a value that is not empty and names no key.
    """
    value = os.environ.get(TRUSTED_KEYS_VARIABLE, "")
    keys = tuple(Path(item) for item in value.split(os.pathsep) if item)
    if value and not keys:
        raise SettingsError(
            f"{TRUSTED_KEYS_VARIABLE} is {value!r}, which names no key; name the files of public keys, or unset it to "
            "accept what nobody has signed"
        )
    return keys


def check(manifest: bytes, signature: bytes | None, trusted: Sequence[Path], source: str) -> None:
    """Raise BundleError unless one of the `trusted` keys has signed the manifest; without trusted keys, do nothing.

    `signature` is the content of `bundle.sig`, None for a bundle that is not signed. `trusted` are files with public
    keys. `source` names the bundle in the message.
    """
    if not trusted:
        return
    keys = {_raw(key).hex(): key for key in map(load_public, trusted)}
    if signature is None:
        raise BundleError(
            f"bundle {source!r} is not signed, and this machine accepts signed bundles only; "
            f"sign it with `tvmflow sign`, or take a signed one"
        )
    public = signer(signature, source)
    if public not in keys:
        raise BundleError(
            f"bundle {source!r} is signed with the key {public[:16]}, which is not trusted here; "
            f"take one signed with a trusted key, or add that key to {TRUSTED_KEYS_VARIABLE}"
        )
    from cryptography.exceptions import InvalidSignature

    form: Any = _FORM.fullmatch(signature)
    try:
        keys[public].verify(bytes.fromhex(form[2].decode()), manifest)
    except InvalidSignature as error:
        raise BundleError(f"bundle {source!r} was changed after it was signed; do not trust it") from error


def require_library(name: str = "cryptography", extra: str = "sign") -> None:
    """Raise SettingsError unless the module `name` can be imported; the message names the `extra` that installs it."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"signatures need the library {name!r}; install it with `pip install tvmflow[{extra}]`"
        ) from error


def load_private(path: Path) -> "Ed25519PrivateKey":
    """Return the private key in a PEM file.

    Raises SettingsError for a file that cannot be read, or has no Ed25519 private key without a password.
    """
    key = _load(path)
    if not hasattr(key, "sign"):
        raise SettingsError(f"{str(path)!r} holds a public key; sign with the private one")
    return key  # type: ignore[no-any-return]


def load_public(path: Path) -> "Ed25519PublicKey":
    """Return the public key of a PEM file with a public or a private key. Raises SettingsError for another file."""
    key = _load(path)
    return key.public_key() if hasattr(key, "sign") else key  # type: ignore[no-any-return]


def _load(path: Path) -> Any:
    """The Ed25519 key in a PEM file, private or public. Raises SettingsError."""
    require_library()
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
