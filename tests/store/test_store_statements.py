"""Signed statements on releases and channels: what a machine that trusts keys refuses to take from the store."""

import json
import subprocess
from base64 import b64decode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from support.channels import move_channel
from support.releases import make_release, make_target
from support.skips import needs
from tvmflow.bundle import keygen, public_key
from tvmflow.bundle.signature import trusted_keys
from tvmflow.errors import SettingsError, StatementError, StoreError
from tvmflow.spec import Policy
from tvmflow.store import ReleaseStore, StoreConfig, channels
from tvmflow.store.channel_document import Channel
from tvmflow.store.channel_statements import check_statement
from tvmflow.store.highest import Highest
from tvmflow.store.keys import channel_key, release_key, statement_key
from tvmflow.store.signers import Signer, list_signers

WriteFile = Callable[[bytes], tuple[Path, str]]
Trust = Callable[..., None]


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
    assert envelope.signer == public_key(key)


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


@pytest.fixture
def host(local: StoreConfig, key: Path, tmp_path: Path) -> ReleaseStore:
    """The store in a folder, as a host sees it that signs and remembers the numbers of channels."""
    return ReleaseStore(replace(local, signing_key=key, memory=tmp_path / "seen"))


@pytest.fixture
def production(host: ReleaseStore, release: Release, trust: Trust, key: Path) -> Channel:
    """The channel resnet@production, which holds 2 after 1."""
    trust(key)
    for version in ("1", "2"):
        release(host, version)
        channel = move_channel(host, "resnet", "production", version)
    return channel


def read_version(store: ReleaseStore) -> str:
    return channels.read_version(store, "resnet", "production")


def plant(store: ReleaseStore, **changes: object) -> None:
    """Change the document of the channel as somebody does who can write the store and has no key."""
    place = channel_key("resnet", "production")
    document = json.loads(store.objects.get(place) or b"")
    store.objects.put(place, json.dumps({**document, **changes}).encode(), "planting a channel")


def test_a_signed_channel_is_followed(host: ReleaseStore, production: Channel, key: Path) -> None:
    assert production.statement is not None
    assert production.statement.signer == public_key(key)
    assert read_version(host) == "2"


def test_the_signers_are_those_of_the_documents_that_were_checked(
    host: ReleaseStore, production: Channel, key: Path, other_key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody signs both documents with another key as soon as they have been read."""
    places = {channel_key("resnet", "production"), statement_key("resnet", "2")}
    read = host.objects.read
    before = {place: read(place) for place in places}
    with monkeypatch.context() as patch:
        patch.delenv("TVMFLOW_TRUSTED_KEYS")
        host.sign_release("resnet", "2", other_key)
        other = ReleaseStore(replace(host.config, signing_key=other_key, memory=None))
        channels.sign_channel(other, "resnet", "production")
    monkeypatch.setattr(host.objects, "read", lambda place: before.pop(place) if place in before else read(place))
    signers = list_signers(host, "resnet", None, "production", tmp_path, [key.with_name("key.pub")])
    assert [next(signers), next(signers)] == [
        Signer(what="channel resnet@production", key=public_key(key)),
        Signer(what="release resnet 2", key=public_key(key)),
    ]


def test_a_wish_and_its_end_need_no_key(
    host: ReleaseStore, production: Channel, local: StoreConfig, release: Release
) -> None:
    release(host, "3")
    document = channels.wish(ReleaseStore(local), "resnet", "production", "3", who="bert", why="newer")
    assert document.wish is not None
    channels.end_wish(
        ReleaseStore(local), "resnet", "production", document.wish.id, "withdrawn", who="bert", why="no longer"
    )
    assert read_version(host) == "2"


def test_an_unsigned_channel_is_refused_until_it_is_signed(
    store: ReleaseStore, signing: ReleaseStore, release: Release, trust: Trust, key: Path
) -> None:
    release(signing, "1")
    move_channel(store, "resnet", "production", "1")
    trust(key)
    with pytest.raises(StatementError, match=r"^The channel resnet@production is not signed, .*release://resnet@prod"):
        read_version(signing)
    with pytest.raises(StatementError, match=r"^The channel resnet@production is not signed"):
        channels.set_policy(signing, "resnet", "production", Policy(by_hand="refuse"), who="ann", why="test")
    channels.sign_channel(signing, "resnet", "production")
    assert read_version(signing) == "1"


def test_a_channel_that_demands_a_signature_is_not_moved_without_a_key(
    host: ReleaseStore, production: Channel, local: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        with pytest.raises(StatementError, match="no key to sign its change: set TVMFLOW_SIGNING_KEY"):
            channels.roll_back(ReleaseStore(local), production, "1", who="bert", why="test")
        # The channel is signed, also for a machine that trusts nobody.
        monkeypatch.delenv("TVMFLOW_TRUSTED_KEYS", raising=False)
    assert channels.find(host, "resnet", "production") == production


@pytest.mark.parametrize("change", ["version", "policy", "held"])
def test_an_altered_channel_is_refused_and_not_signed(host: ReleaseStore, production: Channel, change: str) -> None:
    history = json.loads(production.model_dump_json())["history"]
    changes: dict[str, object] = {"policy": Policy(by_hand="refuse").model_dump(mode="json")}
    if change == "version":
        changes = {"version": "1", "history": history[:1]}
    elif change == "held":
        changes = {"history": [{**history[0], "to": "3"}, *history]}
    plant(host, **changes)
    with pytest.raises(StatementError, match=r"^The channel resnet@production was changed after it was signed"):
        read_version(host)
    with pytest.raises(StatementError, match=r"^The channel resnet@production was changed after it was signed"):
        channels.set_policy(host, "resnet", "production", Policy(approval="required"), who="ann", why="test")


def test_a_channel_with_the_statement_of_another_is_refused(host: ReleaseStore, production: Channel) -> None:
    staging = move_channel(host, "resnet", "staging", "1")
    assert staging.statement is not None
    plant(host, statement=staging.statement.model_dump(mode="json"))
    with pytest.raises(StatementError, match=r"^The channel resnet@production has the statement on resnet@staging"):
        read_version(host)


def test_the_statement_on_a_release_is_not_one_on_a_channel(host: ReleaseStore, production: Channel) -> None:
    envelope = host.read_statement("resnet", "2")
    assert envelope is not None
    plant(host, statement=envelope.model_dump(mode="json"))
    with pytest.raises(StatementError, match=r"^The channel resnet@production has a statement that .* another kind"):
        read_version(host)


def test_an_older_channel_is_refused_by_a_host_that_has_seen_the_newer(
    host: ReleaseStore, production: Channel, local: StoreConfig, tmp_path: Path
) -> None:
    place = channel_key("resnet", "production")
    older = host.objects.get(place) or b""
    channels.roll_back(host, production, "1", who="ann", why="test")
    assert read_version(host) == "1"
    host.objects.put(place, older, "planting a channel")
    with pytest.raises(
        StatementError, match=r"^The channel resnet@production has number 4, and this host has seen num"
    ):
        read_version(ReleaseStore(replace(local, memory=tmp_path / "seen")))
    with pytest.raises(StatementError, match=r"^The channel resnet@production has number 4"):
        channels.roll_back(host, production, "1", who="ann", why="test")
    # Another host has not seen the newer one: the statement's expiry bounds for how long it may be misled.
    assert read_version(ReleaseStore(local)) == "2"


def test_a_channel_that_was_emptied_is_refused_by_a_host_that_has_seen_it(
    host: ReleaseStore, production: Channel
) -> None:
    assert read_version(host) == "2"
    host.objects.delete(channel_key("resnet", "production"), "removing a channel")
    with pytest.raises(StatementError, match=r"^The channel resnet@production is empty, and this host has seen it in"):
        move_channel(host, "resnet", "production", "1")


def test_an_expired_channel_is_refused_until_it_is_signed_again(host: ReleaseStore, production: Channel) -> None:
    past = ReleaseStore(replace(host.config, statement_days=-1.0))
    channels.sign_channel(past, "resnet", "production")
    with pytest.raises(StatementError, match=r"^The channel resnet@production has a statement that expired at 20"):
        read_version(host)
    with pytest.raises(StatementError, match="expired"):
        channels.renew_statement(host, "resnet", "production")
    channels.sign_channel(host, "resnet", "production")
    assert read_version(host) == "2"


def test_a_statement_is_renewed_when_half_of_its_time_is_over(host: ReleaseStore, production: Channel) -> None:
    assert not channels.renew_statement(host, "resnet", "production")
    channels.sign_channel(ReleaseStore(replace(host.config, statement_days=14.0)), "resnet", "production")
    assert channels.renew_statement(host, "resnet", "production")
    renewed = channels.find(host, "resnet", "production")
    assert renewed.number == production.number + 2
    assert renewed.signed_content == production.signed_content
    assert not channels.renew_statement(host, "resnet", "production")


def test_a_machine_that_trusts_nobody_renews_its_own_statement_on_an_unsigned_release(
    local: StoreConfig, key: Path, other_key: Path, release: Release
) -> None:
    release(ReleaseStore(local), "1")
    move_channel(ReleaseStore(local), "resnet", "production", "1")
    own = ReleaseStore(replace(local, signing_key=key))
    channels.sign_channel(ReleaseStore(replace(own.config, statement_days=14.0)), "resnet", "production")
    assert channels.renew_statement(own, "resnet", "production")
    with pytest.raises(StatementError, match=f"signed with the key {public_key(key)[:16]}, which is not trusted here"):
        channels.renew_statement(ReleaseStore(replace(local, signing_key=other_key)), "resnet", "production")


@pytest.fixture
def signed(host: ReleaseStore, release: Release) -> Channel:
    """A channel of a machine that signs and trusts nobody, which was not signed before."""
    unsigned = ReleaseStore(replace(host.config, signing_key=None))
    for version in ("1", "2"):
        release(unsigned, version)
    assert move_channel(unsigned, "resnet", "production", "1").statement is None
    return move_channel(host, "resnet", "production", "2")


def test_a_machine_that_trusts_nobody_signs_a_channel_that_was_never_signed(
    host: ReleaseStore, signed: Channel, key: Path
) -> None:
    assert check_statement(host, signed, [Path(f"{key}.pub")]) is not None
    assert move_channel(host, "resnet", "production", "1").number > signed.number


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": Policy(by_hand="refuse").model_dump(mode="json")}, "was changed after it was signed"),
        ({"policy": Policy(by_hand="refuse").model_dump(mode="json"), "statement": None}, "is not signed"),
    ],
)
def test_a_machine_that_trusts_nobody_does_not_sign_what_others_have_made_of_its_channel(
    host: ReleaseStore, signed: Channel, changes: dict[str, object], message: str
) -> None:
    plant(host, **changes)
    before = channels.find(host, "resnet", "production")
    with pytest.raises(StatementError, match=rf"^The channel resnet@production {message}"):
        move_channel(host, "resnet", "production", "1")
    assert channels.find(host, "resnet", "production").statement == before.statement


def test_a_machine_that_trusts_nobody_does_not_sign_the_channel_of_another_key(
    host: ReleaseStore, signed: Channel, other_key: Path
) -> None:
    other = ReleaseStore(replace(host.config, signing_key=other_key, memory=None))
    with pytest.raises(StatementError, match="which is not trusted here"):
        channels.set_policy(other, "resnet", "production", Policy(keep=1), who="ann", why="test")
    # Who looks and signs it says so.
    channels.sign_channel(other, "resnet", "production")
    assert channels.set_policy(other, "resnet", "production", Policy(keep=1), who="ann", why="test").policy is not None


def test_nothing_is_renewed_without_a_key_or_a_statement(
    host: ReleaseStore, production: Channel, local: StoreConfig, release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not channels.renew_statement(ReleaseStore(local), "resnet", "production")
    monkeypatch.delenv("TVMFLOW_TRUSTED_KEYS")
    move_channel(ReleaseStore(local), "resnet", "staging", "1")
    assert not channels.renew_statement(host, "resnet", "staging")


def test_a_channel_whose_release_was_signed_again_with_other_content_is_refused(
    host: ReleaseStore, production: Channel, key: Path
) -> None:
    place = release_key("resnet", "2")
    document = json.loads(host.objects.get(place) or b"")
    host.objects.put(place, json.dumps(document).encode(), "planting a release")
    host.sign_release("resnet", "2", key)
    with pytest.raises(StatementError, match=r"^The channel resnet@production holds 2, which was changed since"):
        read_version(host)


def test_a_policy_alone_is_signed_too(host: ReleaseStore, trust: Trust, key: Path) -> None:
    trust(key)
    channels.set_policy(host, "resnet", "production", Policy(approval="required"), who="ann", why="test")
    document = channels.find(host, "resnet", "production")
    assert check_statement(host, document, trusted_keys()) is not None
    plant(host, policy=Policy().model_dump(mode="json"))
    with pytest.raises(StatementError, match="was changed after it was signed"):
        check_statement(host, channels.find(host, "resnet", "production"), trusted_keys())


def test_the_number_that_a_host_has_seen_only_grows(tmp_path: Path) -> None:
    highest = Highest(tmp_path / "new" / "production")
    assert highest.number == 0
    for number in (3, 7, 5):
        highest.raise_to(number)
    assert highest.number == 7
    assert [path.name for path in highest.path.parent.iterdir() if path.suffix != ".lock"] == ["production"]  # type: ignore[union-attr]


def test_a_damaged_number_is_not_taken_for_none(host: ReleaseStore, production: Channel, tmp_path: Path) -> None:
    assert read_version(host) == "2"
    (file_of_number,) = (path for path in (tmp_path / "seen").rglob("production"))
    file_of_number.write_text("")
    with pytest.raises(StatementError, match="does not hold the number of a channel"):
        read_version(host)


def test_a_number_that_cannot_be_kept_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be"):
        Highest(tmp_path / "file" / "production").raise_to(1)
    (tmp_path / "production").mkdir()
    with pytest.raises(StatementError, match="does not hold the number of a channel"):
        Highest(tmp_path / "production").raise_to(1)


def test_a_host_without_a_memory_has_seen_nothing() -> None:
    nothing = Highest(None)
    nothing.raise_to(7)
    assert nothing.number == 0


def test_two_stores_of_one_name_have_numbers_of_their_own(local: StoreConfig, tmp_path: Path) -> None:
    memory = replace(local, memory=tmp_path / "seen")
    Highest.of(memory, "resnet", "production").raise_to(9)
    assert Highest.of(memory, "resnet", "production").number == 9
    for other in ({"prefix": "other"}, {"folder": tmp_path / "other"}, {"endpoint": "https://elsewhere"}):
        assert Highest.of(replace(memory, **other), "resnet", "production").number == 0
    assert Highest.of(memory, "resnet", "staging").number == 0


@needs("openssl")
def test_openssl_finds_the_signature_of_a_statement_right(
    signing: ReleaseStore, release: Release, key: Path, tmp_path: Path
) -> None:
    release(signing, "1")
    envelope = json.loads(signing.objects.get(statement_key("resnet", "1")) or b"")
    payload, kind = b64decode(envelope["payload"]), envelope["payloadType"]
    (tmp_path / "signature").write_bytes(b64decode(envelope["signatures"][0]["sig"]))
    # The bytes that DSSE signs: https://github.com/secure-systems-lab/dsse/blob/master/protocol.md
    (tmp_path / "signed").write_bytes(f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload)
    arguments = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", f"{key}.pub", "-rawin"]
    arguments += ["-in", str(tmp_path / "signed"), "-sigfile", str(tmp_path / "signature")]
    process = subprocess.run(arguments, capture_output=True, text=True)
    assert (process.returncode, process.stdout.strip()) == (0, "Signature Verified Successfully")
