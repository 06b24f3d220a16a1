"""The gate on signatures and names: what a machine that trusts keys refuses of a release on its way to a channel."""

from dataclasses import replace
from pathlib import Path

import pytest

from support.channels import move_channel
from support.mutants import ORIGINAL_FILE
from support.releases import describe_bundle, make_release
from tasks.gate import GateJob
from tasks.integrity import integrity_work
from tasks.step import StepRunner
from tvmflow.bundle import sha256_file, sign
from tvmflow.settings import Settings
from tvmflow.spec import Policy
from tvmflow.store import ReleaseStore, StoreConfig, channels
from tvmflow.store.keys import channel_key, release_key
from tvmflow.workspace import Workspace


@pytest.fixture
def store(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> ReleaseStore:
    """A store in which this machine signs, and trusts what it has signed."""
    monkeypatch.setenv("TVMFLOW_TRUSTED_KEYS", f"{key}.pub")
    return ReleaseStore(
        StoreConfig("releases", folder=tmp_path / "releases", signing_key=key, memory=tmp_path / "seen")
    )


@pytest.fixture
def signed(tmp_path: Path, key: Path) -> Path:
    """A signed bundle of the model "tiny"."""
    sign(ORIGINAL_FILE, key, tmp_path / "signed.tar.gz")
    return tmp_path / "signed.tar.gz"


def publish(store: ReleaseStore, version: str, bundle: Path, name: str = "tiny") -> None:
    store.publish(make_release(name, version, describe_bundle(bundle)), [(bundle, sha256_file(bundle))])


def reasons(
    store: ReleaseStore, workspace: Workspace, tmp_path: Path, version: str, name: str = "tiny", **policy: str
) -> tuple[str, ...]:
    """The reasons for which a release may not be promoted to production, under a policy that is not the channel's."""
    job = GateJob.of(store, channels.find(store, name, "production"), version, who="ann")
    job = job.model_copy(update={"policy": replace(job.policy, policy=Policy.model_validate(policy))})
    runner = StepRunner(workspace, name, tmp_path, timeout=60)
    return integrity_work(job, runner, store, tmp_path / "cache", Settings()).reasons


def test_a_signed_release_passes_and_so_does_the_next(
    store: ReleaseStore, signed: Path, workspace: Workspace, tmp_path: Path
) -> None:
    for version in ("1", "2"):
        publish(store, version, signed)
        assert reasons(store, workspace, tmp_path, version) == ()
        move_channel(store, "tiny", "production", version)


def test_a_bundle_of_another_model_does_not_pass_whoever_is_trusted(
    store: ReleaseStore, signed: Path, workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, "1", signed, name="other")
    for _ in range(2):
        assert reasons(store, workspace, tmp_path, "1", "other") == (
            "the release of 'other' holds a bundle of 'tiny'; publish the release again",
        )
        monkeypatch.delenv("TVMFLOW_TRUSTED_KEYS", raising=False)


def test_an_unsigned_release_or_bundle_does_not_pass(
    store: ReleaseStore, signed: Path, workspace: Workspace, tmp_path: Path
) -> None:
    publish(ReleaseStore(replace(store.config, signing_key=None)), "1", signed)
    (reason,) = reasons(store, workspace, tmp_path, "1")
    assert reason.startswith("The release tiny 1 is not signed")
    publish(store, "2", ORIGINAL_FILE)
    (reason,) = reasons(store, workspace, tmp_path, "2")
    assert reason.startswith(f"target 'x86-64-v2': bundle '{tmp_path / 'cache'}")
    assert "is not signed" in reason


def test_the_release_that_the_channel_holds_must_be_signed_too(
    store: ReleaseStore, signed: Path, workspace: Workspace, tmp_path: Path
) -> None:
    """Its figures are the bar for the next."""
    publish(store, "1", signed)
    move_channel(store, "tiny", "production", "1")
    publish(store, "2", signed)
    place = release_key("tiny", "1")
    store.objects.put(place, (store.objects.get(place) or b"") + b"\n", "planting a release")
    assert reasons(store, workspace, tmp_path, "2") == (
        "The channel tiny@production holds 1, which was changed since: do not trust it",
        "The release tiny 1 was changed after it was signed: do not trust it",
    )


def test_a_channel_whose_policy_was_changed_without_a_key_takes_nothing(
    store: ReleaseStore, signed: Path, workspace: Workspace, tmp_path: Path
) -> None:
    channels.set_policy(store, "tiny", "production", Policy(approval="required"), who="ann", why="test")
    publish(store, "1", signed)
    place = channel_key("tiny", "production")
    document = (store.objects.get(place) or b"").replace(b'"required"', b'"none"')
    store.objects.put(place, document, "planting a policy")
    assert channels.find(store, "tiny", "production").policy == Policy()
    (reason,) = reasons(store, workspace, tmp_path, "1")
    assert reason == "The channel tiny@production was changed after it was signed: do not trust it"


def test_a_history_that_was_made_up_does_not_open_the_next_channel(
    store: ReleaseStore, signed: Path, workspace: Workspace, tmp_path: Path
) -> None:
    publish(store, "1", signed)
    unsigned = ReleaseStore(replace(store.config, signing_key=None))
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.delenv("TVMFLOW_TRUSTED_KEYS")
        move_channel(unsigned, "tiny", "staging", "1")
        assert channels.find(unsigned, "tiny", "staging").has_held("1")
    (reason,) = reasons(store, workspace, tmp_path, "1", after="staging")
    assert reason.startswith("The channel tiny@staging is not signed")


def test_a_machine_without_the_key_does_not_promote_what_must_be_signed(
    store: ReleaseStore, signed: Path, workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, "1", signed)
    move_channel(store, "tiny", "production", "1")
    publish(store, "2", signed)
    without = ReleaseStore(replace(store.config, signing_key=None))
    for _ in range(2):
        (reason,) = reasons(without, workspace, tmp_path, "2")
        assert reason == "what production holds is signed, and this machine has no key for it: set TVMFLOW_SIGNING_KEY"
        # The channel is signed: a machine that trusts nobody must not take that away either.
        monkeypatch.delenv("TVMFLOW_TRUSTED_KEYS", raising=False)
