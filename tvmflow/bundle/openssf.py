"""Signatures in OpenSSF's model-signing format, for programs that verify files and know nothing of bundles.

The library `model-signing`, OpenSSF's own, writes them: a Sigstore bundle whose in-toto Statement names the file by its
digest. They need keys on NIST's curves; tvmflow itself verifies its own signatures, with Ed25519.
"""

from pathlib import Path

from tvmflow.bundle.archive import read_manifest
from tvmflow.bundle.signature import require_library, write_pair
from tvmflow.errors import SettingsError


def keygen(path: Path) -> Path:
    """Write a new key pair on the curve P-256: the private key at `path`, readable by its owner only.

    Returns the public key's path, which is `path` with `.pub` added. Raises SettingsError when a file exists or cannot
    be written, and when the library `cryptography` is not installed.
    """
    require_library()
    from cryptography.hazmat.primitives.asymmetric import ec

    return write_pair(ec.generate_private_key(ec.SECP256R1()), path)


def sign(bundle: Path, key: Path, signature: Path) -> None:
    """Sign a bundle with the private key in a PEM file, on the curve P-256, P-384 or P-521, and write the signature.

    `signature` is the file to write. If `bundle` is a symbolic link, the file that it points to is signed. The
    signature is valid for the content under any name. Raises BundleError for a file that is no bundle, and
    SettingsError for a key of another kind, a file that cannot be read or written, and if the library `model-signing`
    is not installed.
    """
    require_library("model_signing", extra="openssf")
    from model_signing import signing

    read_manifest(bundle)
    try:
        config = signing.Config().use_elliptic_key_signer(private_key=key)
    except OSError as error:
        raise SettingsError(f"key {str(key)!r} cannot be read ({error.strerror})") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise SettingsError(
            f"{str(key)!r} holds no private key on a curve of NIST, in PEM without a password; "
            "`tvmflow keygen --openssf` makes a pair"
        ) from error
    try:
        # The library signs no symbolic links.
        config.sign(bundle.resolve(), signature)
    except OSError as error:
        raise SettingsError(f"signature {str(signature)!r} cannot be written ({error.strerror})") from error
