"""Which machine may run a bundle."""

import dataclasses

import pytest

from tvmflow.bundle import Manifest, installed_versions
from tvmflow.errors import BundleError
from tvmflow.target import host, needed_features, request_amx, resolve


@pytest.fixture
def other_arch() -> str:
    return "aarch64" if host().arch == "x86_64" else "x86_64"


def test_a_bundle_for_this_machine_is_accepted(manifest: Manifest) -> None:
    features = tuple(sorted(host().features))[:5]
    dataclasses.replace(manifest, cpu_features=features).check_host()


def test_a_bundle_for_another_architecture_is_refused(manifest: Manifest, other_arch: str) -> None:
    with pytest.raises(BundleError, match=f"built for {other_arch}, this machine is {host().arch}; take the bundle of"):
        dataclasses.replace(manifest, arch=other_arch).check_host()


def test_a_gpu_bundle_for_another_host_is_refused(manifest: Manifest, other_arch: str) -> None:
    target = {"kind": "cuda", "host": {"kind": "llvm", "mtriple": f"{other_arch}-linux-gnu"}}
    with pytest.raises(BundleError, match=f"built for {other_arch}"):
        dataclasses.replace(manifest, arch="cuda", tvm_target=target).check_host()


@pytest.mark.parametrize("target", [{}, {"host": "llvm"}, {"host": {"kind": "llvm"}}])
def test_a_gpu_bundle_that_names_no_host_is_accepted(manifest: Manifest, target: dict[str, object]) -> None:
    dataclasses.replace(manifest, arch="cuda", tvm_target=target).check_host()


def test_missing_cpu_features_are_named(manifest: Manifest) -> None:
    with pytest.raises(BundleError, match="needs the CPU features avx4096, sve9, which this machine lacks; take a"):
        dataclasses.replace(manifest, cpu_features=("sve9", "avx4096")).check_host()


def test_another_minor_version_of_tvm_is_refused_with_the_one_to_install(manifest: Manifest) -> None:
    versions = dataclasses.replace(manifest.versions, tvm="0.19.3")
    with pytest.raises(BundleError, match=r"built with apache-tvm 0\.19\.3, .*; install apache-tvm 0\.19\.3"):
        dataclasses.replace(manifest, versions=versions).check_host()


def test_another_patch_version_of_tvm_is_accepted(manifest: Manifest) -> None:
    minor = ".".join(installed_versions().tvm.split(".")[:2])
    versions = dataclasses.replace(manifest.versions, tvm=f"{minor}.99")
    dataclasses.replace(manifest, versions=versions).check_host()


def test_a_bundle_that_uses_amx_needs_the_systems_permission(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tvmflow.bundle.manifest.missing_features", lambda _: ())
    bundle = dataclasses.replace(manifest, cpu_features=("amx_bf16", "amx_tile"))
    if request_amx():
        bundle.check_host()
    else:
        with pytest.raises(BundleError, match="uses AMX, which the system does not let this process do; take a bundle"):
            bundle.check_host()


def test_a_bundle_in_float32_needs_no_amx() -> None:
    target = resolve("x86-64-v4-amx")
    assert {"amx_bf16", "amx_int8", "amx_tile"} <= set(target.features)
    assert set(target.features) - set(needed_features(target, "fp32")) == {"amx_bf16", "amx_int8", "amx_tile"}
    assert set(target.features) - set(needed_features(target, "int8")) == {"amx_bf16"}
