"""Weights kept apart: one blob in the store for every bundle that has them, fetched beside each."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.rclone import rclone_s3
from support.releases import describe_bundle, make_release
from tvmflow import runtime
from tvmflow.bundle import extract, pack, read_manifest, sha256_file
from tvmflow.documents.release import Blob
from tvmflow.errors import BundleError, StoreError
from tvmflow.store import ReleaseStore

APART = Path(__file__).parents[1] / "bundle" / "files" / "format-1-apart.tar.gz"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReleaseStore]:
    """A store with a release of two targets whose bundles are without their weights."""
    files = tmp_path / "files"
    files.mkdir()
    manifest = extract(APART, files)
    weights = files / "mod.params"
    blobs = [(weights, sha256_file(weights))]
    targets = []
    for target, features in (("plain", manifest.cpu_features), ("more", (*manifest.cpu_features, "fpu"))):
        path = tmp_path / f"{target}.tar.gz"
        variant = dataclasses.replace(manifest, target=target, cpu_features=features)
        pack(path, variant, {item.name: item for item in files.iterdir()}, leave_weights_out=True)
        blobs.append((path, sha256_file(path)))
        blob = Blob(sha256=sha256_file(weights), size=weights.stat().st_size)
        targets.append(describe_bundle(path).model_copy(update={"weights": blob}))
    with rclone_s3(tmp_path / "s3", bucket="models") as config:
        settings = {
            "TVMFLOW_HOME": str(tmp_path / "home"),
            "TVMFLOW_S3_ENDPOINT": config.endpoint,
            "TVMFLOW_S3_BUCKET": config.bucket,
            "TVMFLOW_S3_ACCESS_KEY": config.access_key,
            "TVMFLOW_S3_SECRET_KEY": config.secret_key,
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value or "")
        store = ReleaseStore(config)
        store.publish(make_release("tiny", "1", *targets), blobs)
        yield store


def cached(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "home" / "bundles").iterdir())


@pytest.fixture
def runnable() -> None:
    try:
        read_manifest(APART).check_host()
    except BundleError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("runnable")
def test_a_release_of_two_targets_has_its_weights_once_and_runs(store: ReleaseStore, tmp_path: Path) -> None:
    weights = read_manifest(APART).files["mod.params"].sha256
    digests = [path.name for path in (tmp_path / "s3").rglob("*") if path.is_file() and len(path.name) == 64]
    assert (len(digests), weights in digests) == (3, True)
    with runtime.load("release://tiny/1") as model:
        inputs, expected = model.sample
        np.testing.assert_allclose(model(**inputs)["y"], expected["y"], rtol=1e-5, atol=1e-6)
    assert weights in cached(tmp_path)
    assert len(cached(tmp_path)) == 2


@pytest.mark.usefixtures("runnable")
def test_damaged_weights_in_the_cache_are_fetched_again(store: ReleaseStore, tmp_path: Path) -> None:
    weights = tmp_path / "home" / "bundles" / read_manifest(APART).files["mod.params"].sha256
    runtime.load("release://tiny/1").close()
    good = weights.read_bytes()
    weights.write_bytes(good[:-1])
    runtime.load("release://tiny/1").close()
    assert weights.read_bytes() == good


@pytest.mark.usefixtures("runnable")
def test_weights_that_the_store_lost_are_named(store: ReleaseStore, tmp_path: Path) -> None:
    digest = read_manifest(APART).files["mod.params"].sha256
    store.objects.delete(f"blobs/sha256/{digest}", "losing a blob")
    with pytest.raises(StoreError, match=f"{digest} is missing: publish the release again"):
        runtime.load("release://tiny/1")
