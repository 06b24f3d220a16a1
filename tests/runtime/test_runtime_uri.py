"""Bundles by address: a file, an object on S3, or a release, whose bundle for this machine is fetched and cached."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.channels import move_channel
from support.rclone import rclone_s3
from support.releases import describe_bundle, make_release
from tvmflow import fetch, runtime
from tvmflow.bundle import keygen, sha256_file, sign
from tvmflow.errors import BundleError, StatementError, StoreError
from tvmflow.hardware.target import host
from tvmflow.settings import Settings
from tvmflow.store import ReleaseStore, StoreConfig, channels, parse_uri

Repack = Callable[..., Path]
Publish = Callable[..., None]
OTHER_ARCH = "aarch64" if host().arch == "x86_64" else "x86_64"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreConfig]:
    with rclone_s3(tmp_path_factory.mktemp("s3"), bucket="models") as config:
        yield config


@pytest.fixture
def store(
    server: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> ReleaseStore:
    """A release store that the environment names, with a prefix and a cache of this test alone."""
    config = replace(server, prefix=re.sub(r"[^A-Za-z0-9]+", "-", request.node.name).strip("-"))
    monkeypatch.chdir(tmp_path)
    settings = {
        "TVMFLOW_HOME": str(tmp_path / "home"),
        "TVMFLOW_S3_ENDPOINT": server.endpoint,
        "TVMFLOW_S3_BUCKET": server.bucket,
        "TVMFLOW_S3_PREFIX": config.prefix,
        "TVMFLOW_S3_ACCESS_KEY": server.access_key,
        "TVMFLOW_S3_SECRET_KEY": server.secret_key,
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value or "")
    return ReleaseStore(config)


@pytest.fixture
def publish(store: ReleaseStore) -> Publish:
    """Publish bundles, by target, as a version of the release "small"."""

    def write(version: str, bundles: dict[str, Path]) -> None:
        targets = (describe_bundle(path, target) for target, path in bundles.items())
        release = make_release("small", version, *targets)
        store.publish(release, [(path, sha256_file(path)) for path in bundles.values()])

    return write


def clear_settings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder whose `home` is the state folder, without any other setting."""
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("TVMFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TVMFLOW_HOME", str(folder / "home"))


def runs(place: str) -> str:
    """Load a bundle, run its golden sample and return its target."""
    with runtime.load(place) as model:
        inputs, expected = model.sample
        outputs = model(**inputs)
        assert outputs.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(outputs[name], array, rtol=1e-4, atol=1e-5)
        return model.manifest.target


def test_a_file_address_is_a_path(bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "a name.tar.gz"
    path.write_bytes(bundle.read_bytes())
    assert runs(path.as_uri()) == "native"
    with pytest.raises(BundleError, match="three slashes"):
        runtime.load("file://elsewhere/bundle.tar.gz")


def test_an_address_of_another_kind_is_refused() -> None:
    with pytest.raises(BundleError, match=r"'ftp://host/b'.*file://"):
        runtime.load("ftp://host/b")


def test_a_blob_on_s3_is_kept_and_any_other_object_is_not(
    store: ReleaseStore, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    digest = sha256_file(bundle)
    assert runs(store.put_blob(bundle, digest)) == "native"
    assert [path.name for path in (tmp_path / "home" / "bundles").iterdir()] == [f"{digest}.tar.gz"]
    store.objects.put("by-hand/model.tar.gz", bundle.read_bytes(), "planting a bundle")
    assert runs(store.objects.uri("by-hand/model.tar.gz")) == "native"
    assert len(list((tmp_path / "home" / "bundles").iterdir())) == 1
    assert not list(scratch.iterdir())


def test_a_missing_object_is_one_sentence(store: ReleaseStore) -> None:
    with pytest.raises(StoreError, match=r"^.*s3://models/nothing\.tar\.gz"):
        runtime.load("s3://models/nothing.tar.gz")


def test_of_a_release_the_bundle_that_asks_most_of_this_machine_is_taken(
    publish: Publish, bundle: Path, repack: Repack, tmp_path: Path
) -> None:
    feature = sorted(host().features)[0]
    better = repack(target="better", cpu_features=(feature,))
    bundles = {
        "plain": repack(target="plain", cpu_features=()),
        "better": better,
        "tomorrow": repack(target="tomorrow", cpu_features=(feature, "a-feature-of-tomorrow")),
        "elsewhere": repack(target="elsewhere", arch=OTHER_ARCH, cpu_features=()),
    }
    publish("1", bundles)
    assert runs("release://small/1") == "better"
    # The other bundles were not fetched.
    assert [path.name for path in (tmp_path / "home" / "bundles").iterdir()] == [f"{sha256_file(better)}.tar.gz"]


def test_a_channel_is_followed_where_it_moves(publish: Publish, store: ReleaseStore, repack: Repack) -> None:
    for version in ("1", "2"):
        publish(version, {"native": repack(target=f"of-{version}")})
    move_channel(store, "small", "production", "1")
    assert runs("release://small@production") == "of-1"
    move_channel(store, "small", "production", "2")
    assert runs("release://small@production") == "of-2"
    assert runs("release://small/1") == "of-1"


def test_a_kept_bundle_that_was_damaged_is_fetched_again(
    publish: Publish, store: ReleaseStore, bundle: Path, tmp_path: Path
) -> None:
    publish("1", {"native": bundle})
    address = "release://small/1"
    runs(address)
    (cached_bundle,) = (tmp_path / "home" / "bundles").iterdir()
    cached_bundle.write_bytes(bundle.read_bytes()[:-100])
    assert runs(address) == "native"
    assert cached_bundle.read_bytes() == bundle.read_bytes()


def test_a_missing_release_or_channel_is_one_sentence(publish: Publish, bundle: Path, repack: Repack) -> None:
    publish("1", {"other": repack(target="other", arch=OTHER_ARCH)})
    for address, message in {
        "release://small/2": "There is no release .* 2 in .*; published versions: 1",
        "release://small@nowhere": "There is no channel 'nowhere'",
        "release://name": "expected release://NAME@CHANNEL or release://NAME/VERSION",
    }.items():
        with pytest.raises(StoreError, match=message):
            runtime.load(address)
    with pytest.raises(BundleError, match=f"no bundle of release small 1 runs on this machine: .* for {OTHER_ARCH}"):
        runtime.load("release://small/1")


def test_a_bundle_of_another_model_is_refused(publish: Publish, repack: Repack) -> None:
    publish("1", {"native": repack(name="foreign")})
    with pytest.raises(BundleError, match="the release of 'small' holds a bundle of 'foreign'"):
        runtime.load("release://small/1")


def test_a_release_that_was_copied_to_another_version_is_refused(
    publish: Publish, store: ReleaseStore, repack: Repack
) -> None:
    publish("1", {"native": repack()})
    copied = store.objects.get("releases/small/1/release.json")
    assert copied is not None
    store.objects.put("releases/small/2/release.json", copied, "planting a release")
    with pytest.raises(StoreError, match="is the document of small 1: publish small 2 again"):
        runtime.load("release://small/2")


def test_where_keys_are_trusted_a_release_runs_with_their_signatures_only(
    publish: Publish, store: ReleaseStore, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = keygen(tmp_path / "key")
    signed = tmp_path / "signed.tar.gz"
    sign(bundle, tmp_path / "key", signed)
    publish("1", {"native": signed})
    move_channel(store, "small", "production", "1")
    monkeypatch.setenv("TVMFLOW_TRUSTED_KEYS", str(public))
    with pytest.raises(StatementError, match="The channel small@production is not signed"):
        runtime.load("release://small@production")
    with pytest.raises(StatementError, match="The release small 1 is not signed"):
        runtime.load("release://small/1")
    store.sign_release("small", "1", tmp_path / "key")
    channels.sign_channel(ReleaseStore(replace(store.config, signing_key=tmp_path / "key")), "small", "production")
    assert runs("release://small/1") == runs("release://small@production") == "native"
    # The number that was seen is kept where TVMFLOW_HOME is.
    assert [path.read_text() for path in (tmp_path / "home" / "seen").rglob("production")] == ["3\n"]


def test_without_a_store_the_settings_are_named_and_nothing_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clear_settings(tmp_path, monkeypatch)
    monkeypatch.delenv("TVMFLOW_HOME")
    for address in ("release://digits@production", "s3://tvmflow/blobs/model.tar.gz"):
        with pytest.raises(StoreError, match="set TVMFLOW_S3_ENDPOINT, or TVMFLOW_S3_BUCKET"):
            runtime.load(address)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bucket", ["tvmflow", "named-in-a-release-file"])
def test_without_a_server_an_object_of_the_state_folder_is_read_there(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: str
) -> None:
    clear_settings(tmp_path, monkeypatch)
    folder = tmp_path / "home" / "s3" / bucket
    store = ReleaseStore(StoreConfig(bucket, folder=folder))
    store.objects.prepare()
    store.objects.put("by-hand/model.tar.gz", bundle.read_bytes(), "planting a bundle")
    for uri in (store.objects.uri("by-hand/model.tar.gz"), store.put_blob(bundle, sha256_file(bundle))):
        assert [path.read_bytes() for path in fetch.bundles(uri)] == [bundle.read_bytes()]
    with pytest.raises(StoreError, match=f"There is no object s3://{bucket}/nothing in the folder {folder}: correct"):
        list(fetch.bundles(f"s3://{bucket}/nothing"))


def test_the_folder_of_a_server_has_its_other_buckets_too(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clear_settings(tmp_path, monkeypatch)
    monkeypatch.setenv("TVMFLOW_S3_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("TVMFLOW_S3_PREFIX", "team")
    monkeypatch.setenv("TVMFLOW_S3_FOLDER", str(tmp_path / "data"))
    (tmp_path / "data" / "others").mkdir(parents=True)
    (tmp_path / "data" / "others" / "model.tar.gz").write_bytes(bundle.read_bytes())
    assert [path.read_bytes() for path in fetch.bundles("s3://others/model.tar.gz")] == [bundle.read_bytes()]


def test_without_a_server_a_bucket_that_is_not_here_is_amazons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clear_settings(tmp_path, monkeypatch)
    with fetch._store_of(Settings.load(), parse_uri("s3://elsewhere/key")) as store:
        assert store.config.server == "Amazon S3 in us-east-1"
        assert store.config.uri == "s3://elsewhere"
    assert not (tmp_path / "home").exists()


def test_without_a_home_bundles_are_kept_with_the_users_caches(
    store: ReleaseStore, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TVMFLOW_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest = sha256_file(bundle)
    runs(store.put_blob(bundle, digest))
    assert (tmp_path / "cache" / "tvmflow" / "bundles" / f"{digest}.tar.gz").is_file()


@pytest.mark.parametrize("missing", ["botocore", "pydantic_settings"])
def test_without_the_extra_it_is_named(store: ReleaseStore, missing: str) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None
from tvmflow import errors, runtime
try:
    runtime.load("release://digits/1")
except errors.StoreError as error:
    print(error)
"""
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TVM_USE_RUNTIME_LIB": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "tvmflow[" in process.stdout, process.stdout + process.stderr
