"""A bundle for 64-bit ARM, run by the runner built for it, both emulated: the numbers are those of this machine."""

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

Arrays = dict[str, npt.NDArray[Any]]
Compile = Callable[..., Path]
MakeInputs = Callable[[int], Arrays]
InPython = Callable[[Path, Arrays], Arrays]
Runner = Any


def _unpacked(bundle: Path, folder: Path) -> Path:
    """The bundle as a folder: the cross-built runner has no zlib."""
    with tarfile.open(bundle) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    return folder / "unpacked"


@pytest.mark.parametrize(("target", "weights"), [("aarch64-cortex-a72", "apart"), ("aarch64-generic", "inside")])
def test_outputs_for_arm_equal_those_of_this_machine(
    aarch64_runner: Runner,
    compiled: Compile,
    bundle: Path,
    inputs: MakeInputs,
    computed_by_python: InPython,
    tmp_path: Path,
    target: str,
    weights: str,
) -> None:
    unpacked = _unpacked(compiled(target, weights), tmp_path)
    for batch in (1, 4):
        expected = computed_by_python(bundle, inputs(batch))
        found = aarch64_runner.outputs(unpacked, inputs(batch), tmp_path)
        np.testing.assert_allclose(found["logits"], expected["logits"], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found["above"], expected["above"])


def test_in_float16_outputs_are_near_those_of_this_machine(
    aarch64_runner: Runner,
    compiled: Compile,
    bundle: Path,
    inputs: MakeInputs,
    computed_by_python: InPython,
    tmp_path: Path,
) -> None:
    unpacked = _unpacked(compiled("aarch64-cortex-a76", precision="fp16"), tmp_path)
    for batch in (1, 4):
        expected = computed_by_python(bundle, inputs(batch))["logits"]
        found = aarch64_runner.outputs(unpacked, inputs(batch), tmp_path)["logits"]
        error = np.abs(found - expected).max() / np.abs(expected).max()
        # Rounded, and not by much: 11 bits have an error of half of a thousandth, each of some dozens of sums.
        assert 1e-5 < error < 5e-3


def test_a_bundle_of_this_machine_is_refused_there(aarch64_runner: Runner, bundle: Path, tmp_path: Path) -> None:
    refusal = aarch64_runner.refusal(_unpacked(bundle, tmp_path))
    assert "bundle 'small' is built for x86_64, this machine is aarch64" in refusal


def test_without_zlib_an_archive_is_refused_with_what_to_do(aarch64_runner: Runner, bundle: Path) -> None:
    assert "built without zlib; unpack" in aarch64_runner.refusal(bundle)
