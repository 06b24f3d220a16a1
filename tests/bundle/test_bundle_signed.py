"""Signatures: who may sign, what they cover, and what is refused where only signed bundles are taken."""

import gzip
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from support.archives import unpack
from support.skips import needs
from tvmflow.bundle import Manifest, extract, keygen, pack, public_key, read_manifest, read_signer, sign
from tvmflow.errors import BundleError, SettingsError

WriteFiles = Callable[[Path], dict[str, Path]]


@pytest.fixture(autouse=True)
def nobody_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TVMFLOW_TRUSTED_KEYS", raising=False)


@pytest.fixture
def public(key: Path) -> Path:
    return key.with_name("key.pub")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return keygen(tmp_path / "other")


@pytest.fixture
def signed(bundle: Path, key: Path, tmp_path: Path) -> Path:
    sign(bundle, key, tmp_path / "signed.tar.gz")
    return tmp_path / "signed.tar.gz"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def replaced(zipped: Callable[[bytes], bytes]) -> Callable[[Path, bytes, bytes], None]:
    """Replace bytes of a bundle's archive by as many others."""

    def replace(bundle: Path, old: bytes, new: bytes) -> None:
        data = gzip.decompress(bundle.read_bytes())
        assert data.count(old) == 1
        assert len(old) == len(new)
        bundle.write_bytes(zipped(data.replace(old, new)))

    return replace


def test_a_signed_bundle_opens_where_its_key_is_trusted(
    signed: Path, bundle: Path, public: Path, content: dict[str, bytes], folder: Path
) -> None:
    assert extract(signed, folder, trusted=[public]) == read_manifest(bundle)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == content


def test_one_of_several_trusted_keys_is_enough(
    signed: Path, public: Path, other: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVMFLOW_TRUSTED_KEYS", f"{other}{os.pathsep}{public}")
    extract(signed, folder)


def test_a_signed_bundle_opens_where_nobody_is_asked_for(signed: Path, folder: Path) -> None:
    extract(signed, folder)


def test_an_unsigned_bundle_is_refused_where_keys_are_trusted(
    bundle: Path, public: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVMFLOW_TRUSTED_KEYS", str(public))
    with pytest.raises(BundleError, match="is not signed"):
        extract(bundle, folder)
    assert not list(folder.iterdir())


def test_another_key_is_refused(signed: Path, key: Path, other: Path, folder: Path) -> None:
    with pytest.raises(BundleError, match=f"signed with the key {public_key(key)[:16]}, which is not trusted here"):
        extract(signed, folder, trusted=[other])


def test_a_changed_manifest_is_refused(
    signed: Path, public: Path, folder: Path, replaced: Callable[[Path, bytes, bytes], None]
) -> None:
    replaced(signed, b'"threads": 2', b'"threads": 8')
    with pytest.raises(BundleError, match="was changed after it was signed; do not trust it"):
        extract(signed, folder, trusted=[public])
    assert not list(folder.iterdir())


def test_a_signature_under_the_name_of_a_trusted_key_is_refused(
    signed: Path, key: Path, other: Path, folder: Path, replaced: Callable[[Path, bytes, bytes], None]
) -> None:
    replaced(signed, public_key(key).encode(), public_key(other).encode())
    with pytest.raises(BundleError, match="was changed after it was signed"):
        extract(signed, folder, trusted=[other])


@pytest.mark.parametrize(("old", "new"), [(b"ed25519 ", b"ed25518 "), (b"\ned", b"\nED")])
def test_a_malformed_signature_is_refused_whoever_is_trusted(
    signed: Path, public: Path, folder: Path, old: bytes, new: bytes, zipped: Callable[[bytes], bytes]
) -> None:
    data = gzip.decompress(signed.read_bytes())
    start = data.index(b"ed25519 ")
    forgery = data[:start] + new.strip() + data[start + len(old.strip()) :]
    signed.write_bytes(zipped(forgery))
    for trusted in ([], [public]):
        with pytest.raises(BundleError, match="has a damaged signature; fetch it again"):
            extract(signed, folder, trusted=trusted)


def test_signing_is_deterministic_and_leaves_the_content_alone(
    signed: Path, bundle: Path, key: Path, manifest: Manifest, write_files: WriteFiles, tmp_path: Path
) -> None:
    pack(tmp_path / "packed.tar.gz", manifest, write_files(tmp_path / "files"), key=key)
    assert (tmp_path / "packed.tar.gz").read_bytes() == signed.read_bytes()
    assert read_manifest(signed) == read_manifest(bundle)
    with tarfile.open(signed) as archive:
        assert archive.getnames()[:2] == ["bundle.json", "bundle.sig"]


def test_signing_again_replaces_the_signature(signed: Path, tmp_path: Path, other: Path) -> None:
    sign(signed, tmp_path / "other", signed)
    assert read_signer(signed) == public_key(other)


def test_who_signed_is_reported(signed: Path, bundle: Path, key: Path) -> None:
    assert read_signer(signed) == public_key(key)
    assert read_signer(bundle) is None


def test_the_private_key_is_its_owners_alone_and_never_overwritten(key: Path, public: Path) -> None:
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    before = key.read_bytes()
    with pytest.raises(SettingsError, match="a key is never overwritten"):
        keygen(key)
    assert key.read_bytes() == before
    assert public_key(key) == public_key(public)


def test_what_is_no_key_is_one_sentence(bundle: Path, public: Path, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "text").write_text("-----BEGIN PRIVATE KEY-----\n")
    with pytest.raises(SettingsError, match=r"'.*text' is no Ed25519 key in PEM without a password; `tvmflow keygen`"):
        sign(bundle, tmp_path / "text", tmp_path / "s.tar.gz")
    with pytest.raises(SettingsError, match="cannot be read"):
        extract(bundle, folder, trusted=[tmp_path / "absent"])
    with pytest.raises(SettingsError, match="holds a public key; sign with the private one"):
        sign(bundle, public, tmp_path / "s.tar.gz")
    assert not (tmp_path / "s.tar.gz").exists()


def test_a_key_with_a_password_or_of_an_unknown_kind_is_one_sentence(key: Path, tmp_path: Path) -> None:
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    locked = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    # A public key of the algorithm 1.2.3.4, which no library knows.
    strange = b"-----BEGIN PUBLIC KEY-----\nMAswBQYDKgMEAwIAAA==\n-----END PUBLIC KEY-----\n"
    for content in (locked, strange):
        (tmp_path / "given").write_bytes(content)
        with pytest.raises(SettingsError, match=r"given'.*password"):
            public_key(tmp_path / "given")


def test_a_missing_library_is_reported_before_a_key_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(SettingsError, match=r"pip install tvmflow\[sign\]"):
        keygen(tmp_path / "new")
    assert not list(tmp_path.iterdir())


@needs("openssl")
def test_openssl_finds_the_signature_right(signed: Path, public: Path, tmp_path: Path) -> None:
    unpack(signed, tmp_path / "files")
    text = (tmp_path / "files" / "bundle.sig").read_text().split()[2]
    (tmp_path / "signature").write_bytes(bytes.fromhex(text))
    arguments = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(public), "-rawin"]
    arguments += ["-in", str(tmp_path / "files" / "bundle.json"), "-sigfile", str(tmp_path / "signature")]
    process = subprocess.run(arguments, capture_output=True, text=True)
    assert (process.returncode, process.stdout.strip()) == (0, "Signature Verified Successfully")


def test_without_the_library_it_is_said_what_to_install(signed: Path, public: Path, folder: Path) -> None:
    code = "import sys, pathlib; sys.modules['cryptography'] = None\nfrom tvmflow.bundle import extract\n"
    code += (
        "try: extract(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))\nexcept Exception as error: print(error)"
    )
    environment = {**os.environ, "TVMFLOW_TRUSTED_KEYS": str(public)}
    arguments = [sys.executable, "-c", code, str(signed), str(folder)]
    process = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    assert process.stdout == "signatures need the library 'cryptography'; install it with `pip install tvmflow[sign]`\n"
    assert not list(folder.iterdir())
