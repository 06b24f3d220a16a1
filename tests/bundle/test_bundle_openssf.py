"""Signatures in OpenSSF's format: OpenSSF's own program verifies them."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tvmflow.bundle import keygen as own_keygen
from tvmflow.bundle.openssf import keygen, sign
from tvmflow.errors import BundleError, SettingsError

Verify = Callable[[Path, Path, Path], int]


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch) -> Verify:
    """Run OpenSSF's `model_signing verify key` in this process, and return its exit code."""

    def run(bundle: Path, signature: Path, key: Path) -> int:
        arguments = ["verify", "key", str(bundle), "--signature", str(signature), "--public_key", str(key)]
        monkeypatch.setattr(sys, "argv", ["model_signing", *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("model_signing", run_name="__main__", alter_sys=True)
        return int(ended.value.code or 0)

    return run


def test_openssf_verifies_what_was_signed_and_nothing_else(bundle: Path, tmp_path: Path, verify: Verify) -> None:
    public, other, signature = keygen(tmp_path / "key"), keygen(tmp_path / "other"), tmp_path / "model.sig"
    before = bundle.read_bytes()
    sign(bundle, tmp_path / "key", signature)
    assert bundle.read_bytes() == before
    assert verify(bundle, signature, public) == 0
    assert verify(bundle, signature, other) != 0
    bundle.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    assert verify(bundle, signature, public) != 0


def test_a_link_is_signed_as_the_bundle_to_which_it_leads(bundle: Path, tmp_path: Path, verify: Verify) -> None:
    public, signature = keygen(tmp_path / "key"), tmp_path / "model.sig"
    link = tmp_path / "link.tar.gz"
    link.symlink_to(bundle)
    sign(link, tmp_path / "key", signature)
    copy = tmp_path / "copy.tar.gz"
    copy.write_bytes(bundle.read_bytes())
    assert verify(copy, signature, public) == 0


@pytest.mark.parametrize("kind", ["absent", "Ed25519", "public", "text"])
def test_another_key_is_refused(bundle: Path, tmp_path: Path, kind: str) -> None:
    key = tmp_path / "key"
    if kind == "Ed25519":
        own_keygen(key)
    elif kind == "public":
        keygen(tmp_path / "pair").rename(key)
    elif kind == "text":
        key.write_text("no key")
    with pytest.raises(SettingsError, match=str(key)):
        sign(bundle, key, tmp_path / "model.sig")
    assert not (tmp_path / "model.sig").exists()


def test_a_file_that_is_no_bundle_is_refused(tmp_path: Path) -> None:
    keygen(tmp_path / "key")
    (tmp_path / "model.tar.gz").write_text("no bundle")
    with pytest.raises(BundleError, match=r"model\.tar\.gz"):
        sign(tmp_path / "model.tar.gz", tmp_path / "key", tmp_path / "model.sig")


def test_a_signature_that_cannot_be_written_is_one_sentence(bundle: Path, tmp_path: Path) -> None:
    keygen(tmp_path / "key")
    with pytest.raises(SettingsError, match="absent"):
        sign(bundle, tmp_path / "key", tmp_path / "absent" / "model.sig")
