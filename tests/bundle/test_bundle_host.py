"""Which machine may run a bundle."""

import dataclasses
from types import SimpleNamespace

import pytest

from tvmflow.bundle import Manifest, installed_versions
from tvmflow.errors import BundleError
from tvmflow.hardware.target import Host, host, needed_features, request_amx, resolve


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


@pytest.mark.parametrize("is_permitted", [True, False])
def test_a_bundle_that_uses_amx_needs_the_systems_permission(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch, is_permitted: bool
) -> None:
    requests = []
    monkeypatch.setattr("tvmflow.bundle.manifest.missing_features", lambda _: ())
    monkeypatch.setattr("tvmflow.bundle.manifest.request_amx", lambda: requests.append(1) or is_permitted)
    dataclasses.replace(manifest, cpu_features=("avx512f",)).check_host()
    assert not requests, "a bundle without AMX requests nothing"
    bundle = dataclasses.replace(manifest, cpu_features=("amx_bf16", "amx_tile"))
    if is_permitted:
        bundle.check_host()
    else:
        with pytest.raises(BundleError, match="AMX"):
            bundle.check_host()
    assert requests


def test_the_system_permits_amx_only_where_the_processor_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    library = SimpleNamespace(syscall=lambda *numbers: calls.append(numbers) or answers.pop())
    monkeypatch.setattr("tvmflow.hardware.target.ctypes.CDLL", lambda _: library)
    answers = [-1, 0]
    for arch, features, expected in (
        ("x86_64", {"avx512f"}, False),
        ("aarch64", {"amx_tile"}, False),
        ("x86_64", {"amx_tile"}, True),
        ("x86_64", {"amx_tile"}, False),
    ):
        machine = Host(arch, frozenset(features), 1)
        monkeypatch.setattr("tvmflow.hardware.target.host", lambda machine=machine: machine)
        # Past its cache: the answer of a process does not change.
        assert request_amx.__wrapped__() is expected
    # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    assert calls == [(158, 0x1023, 18)] * 2


def test_a_bundle_in_float32_needs_no_amx() -> None:
    target = resolve("x86-64-v4-amx")
    assert {"amx_bf16", "amx_int8", "amx_tile"} <= set(target.features)
    assert set(target.features) - set(needed_features(target, "fp32")) == {"amx_bf16", "amx_int8", "amx_tile"}
    assert set(target.features) - set(needed_features(target, "int8")) == {"amx_bf16"}
