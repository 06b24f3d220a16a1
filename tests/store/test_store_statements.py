"""Signed statements on releases: what a machine that trusts keys refuses of what somebody has put into the store."""

import json
from base64 import b64decode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from support.releases import make_release, make_target
from tvmflow.bundle import keygen, public_key
from tvmflow.bundle.signature import trusted_keys
from tvmflow.errors import SettingsError, StatementError, StoreError
from tvmflow.store import ReleaseStore, StoreConfig
from tvmflow.store.keys import release_key, statement_key

WriteFile = Callable[[bytes], tuple[Path, str]]
Trust = Callable[..., None]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    keygen(tmp_path / "key")
    return tmp_path / "key"


@pytest.fixture
def other_key(tmp_path: Path) -> Path:
    keygen(tmp_path / "other")
    return tmp_path / "other"


@pytest.fixture
def trust(monkeypatch: pytest.MonkeyPatch) -> Trust:
    """Trust the public key of each pair."""

    def set_variable(*keys: Path) -> None:
        monkeypatch.setenv("TVMFLOW_TRUSTED_KEYS", ":".join(f"{key}.pub" for key in keys))

    return set_variable


@pytest.fixture
def signing(config: StoreConfig, key: Path) -> ReleaseStore:
    """A store that signs what is released."""
    return ReleaseStore(replace(config, signing_key=key))


@pytest.fixture
def release(write_file: WriteFile) -> Callable[[ReleaseStore, str], None]:
    """Publish a version of "resnet" with one blob."""
    blob = write_file(b"a bundle")

    def publish(store: ReleaseStore, version: str) -> None:
        store.publish(make_release("resnet", version, make_target(sha256=blob[1], size=8)), [blob])

    return publish


Release = Callable[[ReleaseStore, str], None]


def test_a_signed_release_is_read_where_its_key_is_trusted(
    signing: ReleaseStore, release: Release, trust: Trust, key: Path, other_key: Path
) -> None:
    release(signing, "1")
    trust(other_key, key)
    assert signing.get_release("resnet", "1", trusted=trusted_keys()) == signing.get_release("resnet", "1")
    envelope = signing.read_statement("resnet", "1")
    assert envelope is not None
    assert envelope.signers == (public_key(key),)


def test_a_statement_is_an_in_toto_statement_on_the_release_and_its_blobs(
    signing: ReleaseStore, release: Release, write_file: WriteFile
) -> None:
    release(signing, "1")
    envelope = json.loads(signing.objects.get(statement_key("resnet", "1")) or b"")
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    statement = json.loads(b64decode(envelope["payload"]))
    assert (statement["_type"], statement["predicateType"]) == (
        "https://in-toto.io/Statement/v1",
        "urn:tvmflow:release:1",
    )
    assert statement["predicate"] == {"name": "resnet", "version": "1"}
    document = write_file(signing.objects.get(release_key("resnet", "1")) or b"")[1]
    blob = write_file(b"a bundle")[1]
    assert statement["subject"] == [
        {"name": "releases/resnet/1/release.json", "digest": {"sha256": document}},
        {"name": f"blobs/sha256/{blob}", "digest": {"sha256": blob}},
    ]


def test_an_unsigned_release_is_refused_until_it_is_signed(
    store: ReleaseStore, release: Release, trust: Trust, key: Path
) -> None:
    release(store, "1")
    trust(key)
    with pytest.raises(
        StatementError, match=r"^The release resnet 1 is not signed, .* `tvmflow sign release://resnet/1`"
    ):
        store.get_release("resnet", "1", trusted=trusted_keys())
    with pytest.raises(StatementError):
        store.verify_release("resnet", "1")
    assert store.get_release("resnet", "1").version == "1"
    store.sign_release("resnet", "1", key)
    assert store.verify_release("resnet", "1").version == "1"


def test_a_release_of_a_key_that_is_not_trusted_is_refused(
    signing: ReleaseStore, release: Release, trust: Trust, key: Path, other_key: Path
) -> None:
    release(signing, "1")
    trust(other_key)
    with pytest.raises(StatementError, match=f"is signed with the key {public_key(key)[:16]}, which is not trusted"):
        signing.get_release("resnet", "1", trusted=trusted_keys())


def test_an_altered_release_is_refused(signing: ReleaseStore, release: Release, trust: Trust, key: Path) -> None:
    release(signing, "1")
    trust(key)
    place = release_key("resnet", "1")
    document = json.loads(signing.objects.get(place) or b"")
    signing.objects.put(place, json.dumps({**document, "tvmflow": "9"}).encode(), "planting a release")
    with pytest.raises(StatementError, match=r"^The release resnet 1 was changed after it was signed"):
        signing.get_release("resnet", "1", trusted=trusted_keys())


def test_the_statement_on_an_older_version_is_not_one_on_a_newer(
    signing: ReleaseStore, release: Release, trust: Trust, key: Path
) -> None:
    for version in ("1", "2"):
        release(signing, version)
    trust(key)
    for read in (release_key, statement_key):
        signing.objects.put(read("resnet", "2"), signing.objects.get(read("resnet", "1")) or b"", "planting a release")
    with pytest.raises(StatementError, match=r"^The release resnet 2 has the statement on resnet 1: do not trust it"):
        signing.get_release("resnet", "2", trusted=trusted_keys())


@pytest.mark.parametrize("change", ["payload", "sig", "keyid"])
def test_an_altered_statement_is_refused(
    signing: ReleaseStore, release: Release, trust: Trust, key: Path, other_key: Path, change: str
) -> None:
    release(signing, "1")
    trust(key, other_key)
    place = statement_key("resnet", "1")
    envelope = json.loads(signing.objects.get(place) or b"")
    if change == "payload":
        envelope["payload"] = envelope["payload"][:-8] + "AAAA" + envelope["payload"][-4:]
    elif change == "sig":
        envelope["signatures"][0]["sig"] = "A" * 86 + "=="
    else:
        envelope["signatures"][0]["keyid"] = public_key(other_key)
    signing.objects.put(place, json.dumps(envelope).encode(), "planting a statement")
    with pytest.raises(StatementError, match=r"^The release resnet 1 has a statement that was changed after it was"):
        signing.get_release("resnet", "1", trusted=trusted_keys())


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"payload": "", "payloadType": "text/plain", "signatures": []}']
)
def test_a_damaged_statement_is_refused(
    signing: ReleaseStore, release: Release, trust: Trust, key: Path, content: bytes
) -> None:
    release(signing, "1")
    trust(key)
    signing.objects.put(statement_key("resnet", "1"), content, "planting a statement")
    with pytest.raises(StatementError, match=r"^The release resnet 1 has a damaged statement: sign it again"):
        signing.get_release("resnet", "1", trusted=trusted_keys())


def test_publishing_again_signs_a_release_whose_publisher_died_before_it_signed(
    store: ReleaseStore, signing: ReleaseStore, release: Release
) -> None:
    release(store, "1")
    assert store.read_statement("resnet", "1") is None
    release(signing, "1")
    assert store.read_statement("resnet", "1") is not None


def test_a_release_that_is_not_whole_is_not_signed(
    store: ReleaseStore, release: Release, key: Path, write_file: WriteFile
) -> None:
    release(store, "1")
    store.objects.delete(f"blobs/sha256/{write_file(b'a bundle')[1]}", "removing a blob")
    with pytest.raises(StoreError, match="The release resnet 1 is not whole"):
        store.sign_release("resnet", "1", key)
    assert store.read_statement("resnet", "1") is None


def test_a_statement_needs_a_private_key(store: ReleaseStore, release: Release, key: Path) -> None:
    release(store, "1")
    with pytest.raises(SettingsError, match="holds a public key; sign with the private one"):
        store.sign_release("resnet", "1", key.with_name("key.pub"))
