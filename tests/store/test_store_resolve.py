"""The bundles of a release for this machine: which are taken, and a document that is damaged."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tvmflow.errors import BundleError, StoreError
from tvmflow.store.resolve import TargetEntry, fetch_bundles
from tvmflow.target import host

TARGET: dict[str, Any] = {
    "target": "native",
    "arch": host().arch,
    "tvm_target": {"kind": "llvm"},
    "cpu_features": [],
    "bundle": {"sha256": "0" * 64},
}
RELEASE: dict[str, Any] = {"name": "resnet", "version": "1", "targets": [TARGET]}


def _store(release: dict[str, Any]) -> Any:
    """A store that has one release."""
    return SimpleNamespace(get_release=lambda name, version, trusted: release)


def test_an_entry_says_what_its_bundle_asks_of_a_machine() -> None:
    (entry,) = TargetEntry.read_all({**RELEASE, "targets": [{**TARGET, "cpu_features": ["fma", "avx2"]}]})
    assert (entry.name, entry.target, entry.arch, entry.sha256) == ("resnet", "native", host().arch, "0" * 64)
    assert entry.cpu_features == ("fma", "avx2")
    TargetEntry.read_all(RELEASE)[0].check_host()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((("name",), value) for value in (3, None)),
        *((("targets",), value) for value in (3, None, [3], ["x"])),
        *((("targets", 0, key), 3) for key in ("target", "arch", "tvm_target", "cpu_features", "bundle")),
        (("targets", 0, "tvm_target"), "llvm"),
        (("targets", 0, "cpu_features"), ["avx2", 3]),
        (("targets", 0, "bundle", "sha256"), 3),
        (("targets", 0, "bundle", "sha256"), None),
    ],
)
def test_a_value_of_another_type_is_damage(place: tuple[Any, ...], value: Any) -> None:
    release: Any = copy.deepcopy(RELEASE)
    part = release
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    with pytest.raises(StoreError, match="damaged"):
        TargetEntry.read_all(release)


@pytest.mark.parametrize("key", TARGET)
def test_an_entry_without_one_of_its_keys_is_damage(key: str) -> None:
    target = {name: value for name, value in TARGET.items() if name != key}
    with pytest.raises(StoreError, match=repr(key)):
        TargetEntry.read_all({**RELEASE, "targets": [target]})
    with pytest.raises(StoreError, match="'targets'"):
        TargetEntry.read_all({"name": "resnet", "version": "1"})


@pytest.mark.parametrize(
    ("targets", "reason"),
    [([], "none"), ([{**TARGET, "cpu_features": ["avx4096"]}], "avx4096")],
)
def test_a_release_without_a_bundle_for_this_machine_is_refused_with_the_reason(
    targets: list[Any], reason: str, tmp_path: Path
) -> None:
    bundles = fetch_bundles(_store({**RELEASE, "targets": targets}), "resnet", "1", tmp_path)
    with pytest.raises(BundleError, match=f"resnet 1 .*{reason}"):
        next(bundles)
