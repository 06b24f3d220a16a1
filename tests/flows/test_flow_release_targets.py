"""Several targets in one release, and those that this machine cannot run."""

from pathlib import Path
from typing import Any

import pytest

from support.skips import needs
from tvmflow.hardware.target import host

_LEVELS = ["x86-64-v2", "x86-64-v3"]


@pytest.mark.skipif("avx2" not in host().features, reason="this CPU cannot run a bundle for x86-64-v3")
def test_two_targets_are_one_release(machine: Any, tmp_path: Path, make: Any) -> None:
    make.onnx(tmp_path)
    result = machine.release(make.file(tmp_path, targets=_LEVELS))
    assert result.code == 0, result.stderr
    assert [target["target"] for target in result.document["targets"]] == _LEVELS
    (release,) = machine.releases("tiny")
    digests = [target["bundle"]["sha256"] for target in release["targets"]]
    assert digests == [target["bundle_sha256"] for target in result.document["targets"]]
    assert len(set(digests)) == 2
    assert all(target["verdict"]["passed"] and target["measurements"] for target in release["targets"])
    assert len(machine.versions("tiny")) == 1


@pytest.mark.long
def test_a_target_of_the_command_line_replaces_those_of_the_file(machine: Any, tmp_path: Path, make: Any) -> None:
    make.onnx(tmp_path)
    result = machine.release(make.file(tmp_path, name="replaced", targets=_LEVELS), "--target", "native", "--runs", "3")
    assert result.code == 0, result.stderr
    (target,) = result.document["targets"]
    assert (target["target"], target["runs"]) == ("native", 3)


@pytest.mark.skipif(host().arch != "x86_64", reason="a target that this machine cannot run is meant")
def test_a_target_that_cannot_be_verified_here_is_refused_before_any_work(
    machine: Any, tmp_path: Path, make: Any
) -> None:
    make.onnx(tmp_path)
    refusal = machine.release(make.file(tmp_path, name="foreign", targets=["aarch64-cortex-a72"]))
    assert refusal.code == 1
    names = ("'aarch64-cortex-a72'", "gates.unverified_targets")
    assert [name for name in names if name not in refusal.sentence] == []


@pytest.mark.long
@pytest.mark.skipif(host().arch != "x86_64", reason="a target that this machine cannot run is meant")
@needs("aarch64-linux-gnu-g++")
def test_an_unverified_target_is_released_where_that_is_allowed(machine: Any, tmp_path: Path, make: Any) -> None:
    make.onnx(tmp_path)
    targets = ["aarch64-cortex-a72"]
    allowed = machine.release(
        make.file(tmp_path, name="foreign", targets=targets, gates={"unverified_targets": "allow"})
    )
    assert allowed.code == 0, allowed.stderr
    (target,) = allowed.document["targets"]
    assert target["max_abs_error"] is None
    assert target["latency_ms"] is None
