"""The bundles of a release for this machine: which are taken, and why others are not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.releases import make_release, make_target
from tvmflow.documents.release import ReleaseTarget
from tvmflow.errors import BundleError
from tvmflow.hardware.target import host
from tvmflow.store.resolve import TargetEntry, fetch_bundles


def test_an_entry_says_what_its_bundle_asks_of_a_machine() -> None:
    (entry,) = TargetEntry.read_all(make_release("resnet", "1", make_target(cpu_features=("fma", "avx2"))))
    assert (entry.name, entry.target, entry.arch, entry.sha256) == ("resnet", "native", host().arch, "0" * 64)
    assert entry.cpu_features == ("fma", "avx2")
    TargetEntry.read_all(make_release("resnet", "1", make_target()))[0].check_host()


@pytest.mark.parametrize(("targets", "reason"), [([], "none"), ([make_target(cpu_features=("avx4096",))], "avx4096")])
def test_a_release_without_a_bundle_for_this_machine_is_refused_with_the_reason(
    targets: list[ReleaseTarget], reason: str, tmp_path: Path
) -> None:
    store: Any = SimpleNamespace(get_release=lambda name, version, trusted: make_release(name, version, *targets))
    with pytest.raises(BundleError, match=f"resnet 1 .*{reason}"):
        next(fetch_bundles(store, "resnet", "1", tmp_path))
