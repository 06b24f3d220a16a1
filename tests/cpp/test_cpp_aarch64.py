"""The emulated runner for 64-bit ARM computes the same outputs from a bundle for ARM as this machine."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from support.cpp import Runner
from tvmflow.target import host

Arrays = dict[str, npt.NDArray[Any]]
Compile = Callable[..., Path]
MakeInputs = Callable[[int], Arrays]
InPython = Callable[[Path, Arrays], Arrays]

# The cross build and the emulation take a fortieth of all tests.
pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("target", "weights"),
    [("aarch64-cortex-a72", "apart"), pytest.param("aarch64-generic", "inside", marks=pytest.mark.long)],
)
def test_outputs_for_arm_equal_those_of_this_machine(
    aarch64_runner: Runner,
    compile_small: Compile,
    bundle: Path,
    make_inputs: MakeInputs,
    run_in_python: InPython,
    tmp_path: Path,
    target: str,
    weights: str,
) -> None:
    arm_bundle = compile_small(target, weights)
    for batch in (1, 4):
        expected = run_in_python(bundle, make_inputs(batch))
        actual = aarch64_runner.outputs(arm_bundle, make_inputs(batch), tmp_path)
        np.testing.assert_allclose(actual["logits"], expected["logits"], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(actual["above"], expected["above"])


def test_weights_that_the_library_packs_are_those_of_this_machine(
    aarch64_runner: Runner, compile_convolution: Callable[[str], Path], run_in_python: InPython, tmp_path: Path
) -> None:
    arrays = {"image": np.random.default_rng(3).normal(size=(2, 32, 12, 12)).astype(np.float32)}
    expected = run_in_python(compile_convolution("native"), arrays)["y"]
    actual = aarch64_runner.outputs(compile_convolution("aarch64-cortex-a72"), arrays, tmp_path)["y"]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_in_float16_outputs_are_near_those_of_this_machine(
    aarch64_runner: Runner,
    compile_small: Compile,
    bundle: Path,
    make_inputs: MakeInputs,
    run_in_python: InPython,
    tmp_path: Path,
) -> None:
    arm_bundle = compile_small("aarch64-cortex-a76", precision="fp16")
    for batch in (1, 4):
        expected = run_in_python(bundle, make_inputs(batch))["logits"]
        actual = aarch64_runner.outputs(arm_bundle, make_inputs(batch), tmp_path)["logits"]
        error = np.abs(actual - expected).max() / np.abs(expected).max()
        # Numbers of 11 bits round by 0.0005, and an output sums some dozens of them.
        assert 1e-5 < error < 5e-3


def test_a_bundle_of_this_machine_is_refused_there(aarch64_runner: Runner, bundle: Path) -> None:
    refusal = aarch64_runner.refusal(bundle)
    assert host().arch in refusal
    assert "aarch64" in refusal


def test_a_damaged_bundle_is_refused(aarch64_runner: Runner, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "damaged.tar.gz").write_bytes(bundle.read_bytes()[:-1])
    assert "damaged.tar.gz" in aarch64_runner.refusal(tmp_path / "damaged.tar.gz")


def test_the_runner_needs_no_library_but_those_of_the_compiler_and_tvm(aarch64_runner: Runner) -> None:
    command = [str(shutil.which("aarch64-linux-gnu-readelf")), "--dynamic", aarch64_runner.command[-1]]
    dynamic = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    libraries = {name.split(".so")[0] for name in re.findall(r"Shared library: \[(.*?)\]", dynamic)}
    assert libraries >= {"libtvm_runtime", "libtvm_runtime_extra", "libtvm_ffi"}
    system = {"libstdc++", "libgcc_s", "libm", "libc", "libdl", "libpthread", "ld-linux-aarch64"}
    assert {name for name in libraries if not name.startswith("libtvm")} <= system
