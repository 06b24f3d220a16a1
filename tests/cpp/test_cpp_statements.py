"""The C++ runner takes the bundle of a release whose statement a trusted key has signed, and no other.

Statements are signed by Python, on releases in a store in a folder.
"""

import base64
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from support import scale
from support.archives import unpack
from support.channels import move_channel
from support.cpp import Runner
from support.mutants import MUTATORS, NASTY, ORIGINAL_FILE, flipped, mutant, places
from support.releases import describe_bundle, make_release
from tvmflow.bundle import keygen, read_manifest, sha256_file, sign
from tvmflow.bundle.signature import load_private
from tvmflow.errors import StatementError
from tvmflow.store import ReleaseStore, StoreConfig, channels
from tvmflow.store.channel_document import ChannelClaim
from tvmflow.store.keys import channel_key, statement_key
from tvmflow.store.statements import Envelope, check

NAME = read_manifest(ORIGINAL_FILE).name
ADDRESS = f"release://{NAME}@production"


@dataclass(frozen=True)
class Device:
    """A device with the C++ runner, its own memory, and files that it was given."""

    runner: Runner
    folder: Path
    environment: Mapping[str, str]

    def run(self, bundle: Path, statement: Path, address: str = ADDRESS) -> None:
        """Run a bundle of a release."""
        process = self.runner(bundle, "--release", address, "--statement", statement, env=self.environment)
        assert process.returncode == 0, process.stderr

    def refusal(self, bundle: Path, statement: Path, address: str = ADDRESS) -> str:
        """The one sentence with which the runner refuses."""
        return self.runner.refusal(bundle, "--release", address, "--statement", statement, env=self.environment)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    keygen(tmp_path / "key")
    return tmp_path / "key"


@pytest.fixture
def bundles(tmp_path: Path, key: Path) -> tuple[Path, Path]:
    """Two signed bundles of one model: the one of the files, and an archive with the same files, packed otherwise."""
    first, second = tmp_path / "first.tar.gz", tmp_path / "second.tar.gz"
    keygen(tmp_path / "other")
    sign(ORIGINAL_FILE, key, first)
    sign(ORIGINAL_FILE, tmp_path / "other", second)
    return first, second


@pytest.fixture
def store(tmp_path: Path, key: Path, bundles: tuple[Path, Path]) -> ReleaseStore:
    """A store with a signed release of each bundle, 1 and 2; the channel production holds release 1."""
    store = ReleaseStore(StoreConfig("releases", folder=tmp_path / "store" / "releases", signing_key=key))
    for version, bundle in enumerate(bundles, 1):
        publish(store, bundle, version=str(version))
    move_channel(store, NAME, "production", "1")
    return store


@pytest.fixture
def device(runner: Runner, tmp_path: Path, key: Path) -> Device:
    """A device that trusts both keys."""
    keys = f"{key}.pub:{tmp_path / 'other.pub'}"
    return Device(runner, tmp_path, {"TVMFLOW_TRUSTED_KEYS": keys, "TVMFLOW_HOME": str(tmp_path / "memory")})


def publish(store: ReleaseStore, bundle: Path, name: str = NAME, version: str = "1") -> None:
    """Publish a release with one bundle."""
    store.publish(make_release(name, version, describe_bundle(bundle)), [(bundle, sha256_file(bundle))])


def fetch(store: ReleaseStore, key: str, path: Path) -> Path:
    """Copy an object of the store to a file."""
    path.write_bytes(store.objects.get(key) or b"")
    return path


@pytest.fixture
def statement(store: ReleaseStore, tmp_path: Path) -> Path:
    """The document of the channel, as a device gets it."""
    return fetch(store, channel_key(NAME, "production"), tmp_path / "production.json")


def move_on(store: ReleaseStore, statement: Path) -> bytes:
    """Move the channel to release 2, and fetch its document; return the one of before."""
    old = statement.read_bytes()
    move_channel(store, NAME, "production", "2")
    fetch(store, channel_key(NAME, "production"), statement)
    return old


def test_a_bundle_of_the_release_that_a_channel_holds_runs(
    device: Device, bundles: tuple[Path, Path], statement: Path
) -> None:
    device.run(bundles[0], statement)
    device.run(bundles[0], statement)
    message = device.refusal(bundles[1], statement)
    assert message.startswith(f"bundle '{bundles[1]}' is none of {ADDRESS} by the statement '{statement}'")


def test_a_bundle_of_a_version_runs(device: Device, bundles: tuple[Path, Path], store: ReleaseStore) -> None:
    for version, bundle, other in (("1", *bundles), ("2", *reversed(bundles))):
        path = fetch(store, statement_key(NAME, version), device.folder / f"{version}.json")
        address = f"release://{NAME}/{version}"
        device.run(bundle, path, address)
        assert "is none of" in device.refusal(other, path, address)
    assert f"it is about {NAME} 2; do not trust it" in device.refusal(bundles[1], path, f"release://{NAME}/1")
    # A statement on a release says nothing about a channel, nor the other way round.
    assert "lacks 'statement'" in device.refusal(bundles[1], path)


def test_the_statement_on_another_channel_or_model_is_refused(
    device: Device, bundles: tuple[Path, Path], store: ReleaseStore, statement: Path
) -> None:
    move_channel(store, NAME, "staging", "1")
    staging = fetch(store, channel_key(NAME, "staging"), device.folder / "staging.json")
    assert f"it is about {NAME}@staging; do not trust it" in device.refusal(bundles[0], staging)
    publish(store, bundles[0], name="other")
    move_channel(store, "other", "production", "1")
    other = fetch(store, channel_key("other", "production"), device.folder / "other.json")
    assert "it is about other@production; do not trust it" in device.refusal(bundles[0], other)
    # Somebody with the key has published the bundle of another model.
    message = device.refusal(bundles[0], other, "release://other@production")
    assert f"is one of '{NAME}', and release://other@production was asked for" in message


def test_an_unsigned_or_altered_statement_or_one_of_another_key_is_refused(
    device: Device, bundles: tuple[Path, Path], statement: Path, store: ReleaseStore
) -> None:
    document = json.loads(statement.read_text())
    statement.write_text(json.dumps({**document, "statement": None}))
    assert f"it is not signed; sign it with `tvmflow sign {ADDRESS}`" in device.refusal(bundles[0], statement)
    envelope = document["statement"]
    payload = json.loads(base64.b64decode(envelope["payload"]))
    payload["predicate"]["number"] += 1
    altered = base64.b64encode(json.dumps(payload).encode()).decode()
    statement.write_text(json.dumps({"statement": {**envelope, "payload": altered}}))
    assert "it was changed after it was signed; do not trust it" in device.refusal(bundles[0], statement)
    keygen(device.folder / "third")
    signing = ReleaseStore(replace(store.config, signing_key=device.folder / "third"))
    channels.sign_channel(signing, NAME, "production")
    fetch(store, channel_key(NAME, "production"), statement)
    assert "which is not trusted here" in device.refusal(bundles[0], statement)


def test_an_expired_statement_is_refused(
    device: Device, bundles: tuple[Path, Path], statement: Path, store: ReleaseStore
) -> None:
    channels.sign_channel(ReleaseStore(replace(store.config, statement_days=-1.0)), NAME, "production")
    fetch(store, channel_key(NAME, "production"), statement)
    message = device.refusal(bundles[0], statement)
    assert message.endswith("; fetch a newer one")
    assert "is refused: it expired at 20" in message


def test_an_older_statement_than_the_newest_seen_is_refused(
    device: Device, bundles: tuple[Path, Path], statement: Path, store: ReleaseStore
) -> None:
    old = move_on(store, statement)
    device.run(bundles[1], statement)
    number = json.loads(statement.read_bytes())["number"]
    statement.write_bytes(old)
    message = device.refusal(bundles[0], statement)
    assert f"this machine has seen {number}: somebody has put an older one in its place" in message
    new_host = replace(device, environment={**device.environment, "TVMFLOW_HOME": str(device.folder / "new")})
    new_host.run(bundles[0], statement)


def test_what_was_refused_is_not_remembered(
    device: Device, bundles: tuple[Path, Path], statement: Path, store: ReleaseStore
) -> None:
    old = move_on(store, statement)
    assert "is none of" in device.refusal(bundles[0], statement)
    statement.write_bytes(old)
    device.run(bundles[0], statement)


@pytest.mark.parametrize("content", ["", "x\n", "-1\n", "7", "99999999999999999999\n", "1\n2\n"])
def test_a_damaged_memory_is_refused_with_its_file(
    device: Device, bundles: tuple[Path, Path], statement: Path, content: str
) -> None:
    path = device.folder / "memory" / "seen" / "statements" / NAME / "production"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    message = device.refusal(bundles[0], statement)
    assert f"'{path}' does not hold its number; remove it if you know why it is damaged" in message
    assert path.read_text() == content


def test_the_memory_is_in_the_home_folder_where_no_other_is_set(
    device: Device, bundles: tuple[Path, Path], statement: Path
) -> None:
    number = f"{json.loads(statement.read_bytes())['number']}\n"
    for name, place in (("XDG_STATE_HOME", Path()), ("HOME", Path(".local/state"))):
        environment = {**device.environment, "TVMFLOW_HOME": "", "XDG_STATE_HOME": "", name: str(device.folder / name)}
        replace(device, environment=environment).run(bundles[0], statement)
        path = device.folder / name / place / "tvmflow" / "seen" / "statements" / NAME / "production"
        assert path.read_text() == number
    (device.folder / "file").write_text("")
    for home, words in ((str(device.folder / "file"), "cannot be written"), ("", "there is no folder for the highest")):
        nowhere = {**device.environment, "TVMFLOW_HOME": home, "XDG_STATE_HOME": "", "HOME": ""}
        assert words in replace(device, environment=nowhere).refusal(bundles[0], statement)


def test_what_is_asked_for_in_a_wrong_way_is_refused(
    device: Device, bundles: tuple[Path, Path], statement: Path
) -> None:
    for options in (("--release", ADDRESS), ("--statement", statement)):
        assert "--release and --statement need each other" in device.runner.refusal(bundles[0], *options, code=2)
    for address in (
        "",
        NAME,
        f"release://{NAME}",
        f"release://../{NAME}",
        f"release://{NAME}@",
        f"release://{NAME}@.a",
    ):
        assert f"'{address}' names no release" in device.refusal(bundles[0], statement, address)
    assert "there is no such file" in device.refusal(bundles[0], device.folder / "nowhere.json")
    unpack(bundles[0], device.folder / "unpacked")
    assert "is a folder, and statements name archives" in device.refusal(device.folder / "unpacked", statement)
    trusting_nobody = replace(device, environment={**device.environment, "TVMFLOW_TRUSTED_KEYS": ""})
    assert "name the file of one in TVMFLOW_TRUSTED_KEYS" in trusting_nobody.refusal(bundles[0], statement)


def verdicts(program: Runner, device: Device, lines: list[tuple[Path, Path]]) -> list[str]:
    """The answer of the C++ library for each pair of a bundle and a statement; it must not crash on any."""
    text = "".join(f"{bundle}\t{ADDRESS}\t{statement}\n" for bundle, statement in lines)
    process = program("verify", text=text, env=device.environment)
    assert process.returncode == 0, process.stderr[-4000:]
    answers = process.stdout.splitlines()
    assert len(answers) == len(lines)
    return answers


def test_of_all_mutated_bundles_none_is_taken_by_a_statement(
    program: Runner, device: Device, bundles: tuple[Path, Path], statement: Path
) -> None:
    lines = []
    for number, mutator in enumerate(MUTATORS):
        for seed in range(scale.count(normal=1, long=10)):
            path = device.folder / f"{number}-{seed}.tar.gz"
            path.write_bytes(mutant(mutator, seed))
            lines.append((path, statement))
    answers = verdicts(program, device, [*lines, (bundles[0], statement)])
    assert answers.pop() == "intact"
    assert all(f"is none of {ADDRESS}" in answer for answer in answers)


def is_taken_by_python(content: bytes, trusted: Path) -> bool:
    """Whether Python takes the statement in the document of a channel."""
    try:
        envelope = Envelope.parse(json.dumps(json.loads(content)["statement"]).encode(), "it")
        check(envelope, ChannelClaim, (trusted,), "it", "sign it")
    except (StatementError, ValueError, LookupError, TypeError, RecursionError):
        return False
    return True


def replaced(document: Any, chance: random.Random) -> Any:
    """The document with one value replaced by a nasty one, or removed."""
    document = json.loads(json.dumps(document))
    *keys, last = chance.choice(list(places(document)))
    part = document
    for item in keys:
        part = part[item]
    if chance.randrange(3) == 0:
        del part[last]
    else:
        part[last] = chance.choice(NASTY)
    return document


def test_a_mutated_document_is_taken_only_where_python_takes_it(
    program: Runner, device: Device, bundles: tuple[Path, Path], statement: Path, key: Path
) -> None:
    content = statement.read_bytes()
    document = {"statement": json.loads(content)["statement"]}
    chance = random.Random("statements")  # noqa: S311
    count = scale.count(normal=60, long=800)
    contents = [content, *(flipped(content, chance) for _ in range(count))]
    contents += [json.dumps(replaced(document, chance)).encode(errors="surrogatepass") for _ in range(count)]
    contents += [b"", b"null", b"[" * 100_000, b'{"statement":' * 100_000, content[: len(content) // 2]]
    lines = []
    for number, changed in enumerate(contents):
        path = device.folder / f"{number}.json"
        path.write_bytes(changed)
        lines.append((bundles[0], path))
    answers = verdicts(program, device, lines)
    assert answers[0] == "intact"
    for number, (answer, changed) in enumerate(zip(answers, contents, strict=True)):
        assert answer != "intact" or is_taken_by_python(changed, Path(f"{key}.pub")), number
    assert sum(answer != "intact" for answer in answers) > count


def test_a_statement_that_the_key_has_signed_is_read_with_any_content(
    program: Runner, device: Device, bundles: tuple[Path, Path], statement: Path, key: Path
) -> None:
    """It is taken only with the name, the channel, the number, the time and the digest that it had."""
    envelope = json.loads(statement.read_bytes())["statement"]
    payload = json.loads(base64.b64decode(envelope["payload"]))
    chance = random.Random("payloads")  # noqa: S311
    lines, payloads = [], []
    for number in range(scale.count(normal=80, long=800)):
        changed = replaced(payload, chance) if number else payload
        text = json.dumps(changed).encode(errors="surrogatepass")
        path = device.folder / f"payload-{number}.json"
        path.write_text(json.dumps({"statement": signed(envelope, text, key)}))
        lines.append((bundles[0], path))
        payloads.append(changed)
    answers = verdicts(program, device, lines)
    assert answers[0] == "intact"
    for answer, changed in zip(answers, payloads, strict=True):
        if answer == "intact":
            assert changed["predicateType"] == payload["predicateType"]
            for field in ("name", "channel", "number", "expires"):
                assert changed["predicate"][field] == payload["predicate"][field]
            assert {"sha256": sha256_file(bundles[0])} in [item["digest"] for item in changed["subject"]]
    assert any(answer != "intact" for answer in answers)


def signed(envelope: dict[str, Any], payload: bytes, key: Path) -> dict[str, Any]:
    """An envelope with this payload, signed by DSSE's rule."""
    kind = envelope["payloadType"].encode()
    covered = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
    signature = base64.b64encode(load_private(key).sign(covered)).decode()
    signatures = [{**envelope["signatures"][0], "sig": signature}]
    return {**envelope, "payload": base64.b64encode(payload).decode(), "signatures": signatures}
