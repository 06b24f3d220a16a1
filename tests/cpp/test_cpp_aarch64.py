"""The emulated runner for 64-bit ARM computes the same outputs from a bundle for ARM as this machine."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from support.arrays import normal, onnxruntime_outputs
from support.cpp import Runner
from support.models import save_model
from support.quantised import quantise
from support.steps import compile_by_steps
from tvmflow.arrays import NamedArrays
from tvmflow.bundle import read_manifest
from tvmflow.compiler.operators import block_plans
from tvmflow.hardware.target import host
from tvmflow.runtime.profile import compiled_functions

Compile = Callable[..., Path]
MakeInputs = Callable[[int], NamedArrays]
InPython = Callable[[Path, NamedArrays], NamedArrays]

# The cross build and the emulation take a fortieth of all tests.
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(host().arch == "aarch64", reason="a target that this machine cannot run is meant"),
]


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


def _save_blocks(path: Path) -> Path:
    """A Winograd convolution, a block around a depthwise convolution and a bottleneck, all of free height and width."""
    generator = np.random.default_rng(0)
    weights: NamedArrays = {}
    nodes = []

    def conv(x: str, channels: int, out: int, kernel: int, groups: int = 1) -> str:
        name = f"c{len(nodes)}"
        shape = (out, channels // groups, kernel, kernel)
        weights[f"{name}w"] = (generator.normal(size=shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
        pads = [kernel // 2] * 4
        nodes.append(helper.make_node("Conv", [x, f"{name}w"], [name], pads=pads, group=groups))
        nodes.append(helper.make_node("Relu", [name], [f"{name}r"]))
        return f"{name}r"

    outputs = [
        conv("x", 48, 48, 3),
        conv(conv(conv("x", 48, 96, 1), 96, 96, 3, groups=96), 96, 24, 1),
        conv(conv(conv("x", 48, 16, 1), 16, 16, 5), 16, 40, 1),
    ]
    return save_model(path, nodes, [("x", ["n", 48, "h", "w"])], outputs, weights)


@pytest.mark.parametrize(
    ("target", "precision"),
    [
        ("aarch64-neoverse-n1", "fp32"),
        ("aarch64-cortex-a72", "fp32"),
        ("aarch64-neoverse-n1", "fp16"),
        ("aarch64-neoverse-v1", "bf16"),
    ],
)
def test_blocks_and_winograd_of_free_sizes_equal_onnx_runtime(
    aarch64_runner: Runner, target: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every block that can be fused is fused.
    monkeypatch.setattr(block_plans._Costs, "apart", lambda costs: 1e12 * (costs._block.first is not None))
    path = _save_blocks(tmp_path / "blocks.onnx")
    build = {"precision": precision}
    document = {"name": "blocks", "model": {"onnx": str(path)}, "targets": [target], "build": build}
    bundle = compile_by_steps(document, tmp_path, tmp_path / "state")
    rules = [function.rule for function in compiled_functions(bundle, read_manifest(bundle)).values()]
    # In float16 there are neither.
    assert (rules.count("block"), any("winograd" in rule for rule in rules)) == (
        (0, False) if precision == "fp16" else (2, True)
    )
    for n, height, width in ((1, 3, 5), (2, 37, 26)):
        arrays = {"x": np.random.default_rng(n).normal(size=(n, 48, height, width)).astype(np.float32)}
        actual = aarch64_runner.outputs(bundle, arrays, tmp_path)
        for name, expected in onnxruntime_outputs(path, arrays).items():
            tolerance = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}[precision] * np.abs(expected).max()
            np.testing.assert_allclose(actual[name], expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
@pytest.mark.parametrize("target", ["aarch64-neoverse-n1", "aarch64-neoverse-v1"])
def test_a_quantised_model_is_computed_by_dot_products(
    aarch64_runner: Runner, target: str, signed: bool, tmp_path: Path
) -> None:
    generator = np.random.default_rng(0)
    shapes = {"w0": (24, 8, 3, 3), "w1": (24, 12, 1, 1), "w2": (24, 1, 3, 3), "w3": (24, 10)}
    weights = {name: generator.normal(size=shape).astype(np.float32) / 5 for name, shape in shapes.items()}
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], pads=[1] * 4, strides=[2, 2]),
        helper.make_node("Conv", ["a", "w1"], ["b"], group=2),
        helper.make_node("Conv", ["b", "w2"], ["c"], pads=[1] * 4, group=24),
        helper.make_node("GlobalAveragePool", ["c"], ["d"]),
        helper.make_node("Flatten", ["d"], ["e"]),
        helper.make_node("MatMul", ["e", "w3"], ["y"]),
    ]
    plain = save_model(tmp_path / "plain.onnx", nodes, [("x", [2, 8, 9, 11])], ["y"], weights)
    path = quantise(plain, tmp_path / "quantised.onnx", signed=signed)
    build = {"precision": "int8"}
    document = {"name": "layers", "model": {"onnx": str(path)}, "targets": [target], "build": build}
    bundle = compile_by_steps(document, tmp_path, tmp_path / "state")
    rules = [function.rule for function in compiled_functions(bundle, read_manifest(bundle)).values()]
    assert (rules.count("dot_conv2d"), rules.count("dot_rows")) == (2, 1)
    arrays = {"x": normal(2, 8, 9, 11, seed=9)}
    expected = onnxruntime_outputs(path, arrays)["y"]
    actual = aarch64_runner.outputs(bundle, arrays, tmp_path)["y"]
    # One step of the last quantisation is 1/127 of the largest output at least.
    assert np.abs(actual - expected).max() <= 1.01 / 127 * np.abs(expected).max()


@pytest.mark.parametrize("target", ["aarch64-neoverse-n1", "aarch64-neoverse-v1"])
def test_rounded_rows_are_multiplied_by_weights_of_4_bits(aarch64_runner: Runner, target: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    weights = {
        "w": generator.integers(0, 256, (40, 4, 16)).astype("uint8"),
        "s": generator.uniform(0.01, 0.1, (40, 4)).astype("float32"),
    }
    attributes = {"N": 40, "K": 128, "bits": 4, "block_size": 32, "accuracy_level": 4, "domain": "com.microsoft"}
    nodes = [helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], **attributes)]
    path = save_model(tmp_path / "model.onnx", nodes, [("x", ["n", 128])], ["y"], weights)
    document = {"name": "product", "model": {"onnx": str(path)}, "targets": [target]}
    bundle = compile_by_steps(document, tmp_path, tmp_path / "state")
    rules = [function.rule for function in compiled_functions(bundle, read_manifest(bundle)).values()]
    assert "rounded_product" in rules
    for rows in (1, 14):
        arrays = {"x": normal(rows, 128, seed=rows)}
        expected = onnxruntime_outputs(path, arrays)["y"]
        actual = aarch64_runner.outputs(bundle, arrays, tmp_path)["y"]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_in_bfloat16_products_are_near_those_of_this_machine(aarch64_runner: Runner, tmp_path: Path) -> None:
    """A dense layer, a product of activations, attention and convolutions in narrow groups."""
    generator = np.random.default_rng(0)
    weights = {
        name: generator.normal(size=shape).astype(np.float32) / 4
        for name, shape in {"w": (32, 32), "g": (32, 4, 3, 3)}.items()
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["d"]),
        helper.make_node("Transpose", ["d"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["d", "t"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"]),
        helper.make_node("MatMul", ["p", "x"], ["attended"]),
        helper.make_node("Conv", ["image", "g"], ["grouped"], pads=[1] * 4, group=8),
    ]
    inputs = [("x", [2, "n", 32]), ("image", [1, 32, 9, 11])]
    path = save_model(tmp_path / "model.onnx", nodes, inputs, ["d", "attended", "grouped"], weights)
    build = {"precision": "bf16"}
    document = {"name": "products", "model": {"onnx": str(path)}, "targets": ["aarch64-neoverse-v2"], "build": build}
    bundle = compile_by_steps(document, tmp_path, tmp_path / "state")
    arrays = {"x": normal(2, 11, 32, seed=1), "image": normal(1, 32, 9, 11, seed=2)}
    actual = aarch64_runner.outputs(bundle, arrays, tmp_path)
    for name, expected in onnxruntime_outputs(path, arrays).items():
        error = np.abs(actual[name] - expected).max() / np.abs(expected).max()
        # Numbers of 8 bits round by 0.004.
        assert 1e-4 < error < 2e-2, name


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
