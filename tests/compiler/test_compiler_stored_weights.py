"""Products and gathers that read weights of 4, 8 and 16 bits as they are stored."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import tirx

from support import scale
from support.arrays import normal
from support.guarded import assert_within_buffers
from support.machines import best_target, runnable_levels, simple_target
from support.models import save_model
from tvmflow.arrays import Array
from tvmflow.compiler import BuildOptions, build, import_onnx, lower
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.diagnosis import diagnose
from tvmflow.compiler.dotproduct import integer_dot
from tvmflow.compiler.machine import machine
from tvmflow.compiler.operators.narrow_products import PANEL, NarrowProduct
from tvmflow.compiler.operators.rounded_products import RoundedProduct
from tvmflow.compiler.operators.widening import BlockWeight, in_blocks
from tvmflow.hardware.target import Precision, Target, resolve

LEVELS = runnable_levels() or ["native"]
# The bits, the shape, the numbers in a block, and whether each block has an offset of its own.
WEIGHTS = [(4, (64, 40), 16, True), (8, (96, 7), 32, False), (4, (512, 100), 128, False), (8, (1088, 33), 64, True)]


def _weight(bits: int, shape: tuple[int, int], block: int, has_offsets: bool) -> tuple[Array, BlockWeight]:
    """A weight in blocks along its first dimension, and its form in few bits."""
    generator = np.random.default_rng(bits)
    blocks = (shape[0] // block, shape[1])
    levels = generator.integers(0, 1 << bits, shape)
    offsets = generator.integers(0, 1 << bits, blocks) if has_offsets else np.full(blocks, 1 << (bits - 1))
    scales = generator.uniform(0.001, 0.1, blocks).astype("float32")
    weight = (levels - np.repeat(offsets, block, 0)).astype("float32") * np.repeat(scales, block, 0)
    form = in_blocks(weight, 0)
    assert form is not None
    assert form.bits == bits
    assert (form.offsets.size > 1) == has_offsets
    return weight, form


def _functions(form: BlockWeight, target: Target, sizes: list[Any]) -> dict[str, tirx.PrimFunc]:
    """The functions of products for several numbers of rows, in parallel whatever their size."""
    parallel = replace(machine(target), cores=4, region=0)
    return {
        f"product{place}": NarrowProduct(form, rows, parallel).function().with_attr("tirx.noalias", True)
        for place, rows in enumerate(sizes)
    }


@pytest.mark.few(4)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("bits", "shape", "block", "has_offsets"), WEIGHTS, ids=str)
def test_a_product_by_stored_numbers_equals_that_by_floats(
    bits: int, shape: tuple[int, int], block: int, has_offsets: bool, level: str
) -> None:
    target = resolve(level)
    weight, form = _weight(bits, shape, block, has_offsets)
    rows: list[Any] = [1, 2, 5, tirx.Var("n", "int64")]
    functions = {
        name: function.with_attr("global_symbol", name) for name, function in _functions(form, target, rows).items()
    }
    library = tvm.compile(tvm.IRModule(functions), target=target.tvm)
    packed = NarrowProduct(form, 1, machine(target)).packed()
    for name, count in [("product0", 1), ("product1", 2), ("product2", 5)] + [
        ("product3", count) for count in (0, 1, 2, 7, PANEL + 1, 2 * PANEL)
    ]:
        x, result = normal(count, shape[0]), np.full((count, shape[1]), np.nan, "float32")
        if count:
            # What is in one row is of no concern to the others.
            x[-1, 0] = np.nan if count > 1 else x[-1, 0]
        tensors = [tvm.runtime.tensor(array) for array in (x, *packed, result)]
        library[name](*tensors)
        result, expected = tensors[-1].numpy(), x @ weight
        alone = result[:-1] if count > 1 else result
        np.testing.assert_allclose(alone, expected[: len(alone)], rtol=1e-5, atol=1e-5 * abs(weight).max() * shape[0])
        assert np.isnan(result[len(alone) :]).all()


@pytest.mark.parametrize("level", scale.choose(normal=LEVELS[-1:], long=LEVELS))
def test_a_product_by_stored_numbers_stays_within_its_buffers(level: str) -> None:
    target = resolve(level)
    for weight in WEIGHTS[:2]:
        _, form = _weight(*weight)
        functions = _functions(form, target, [1, 5, PANEL + 3, tirx.Var("n", "int64")])
        assert_within_buffers(functions, target, {"rows": 1}, {"rows": 7})


def _types_read(path: Path, target: Target, function: str) -> set[str]:
    """The types of the parameters of a model's functions of some name, but for the last one, the result."""
    lowered = lower(import_onnx(path), target, BuildOptions(), Choices())
    return {
        str(parameter.dtype)
        for variable, func in lowered.functions_items()
        if function in variable.name_hint and isinstance(func, tirx.PrimFunc)
        for parameter in func.params[:-1]
    }


def _large(machine_bytes: int) -> int:
    """The side of a square matrix that does not fit so many bytes in float32."""
    return 64 * (int((machine_bytes / 4) ** 0.5) // 64 + 2)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("dtype", "stored"), [(np.float16, "float16"), (ml_dtypes.bfloat16, "uint16"), (np.float32, "float32")], ids=str
)
def test_few_rows_are_multiplied_by_weights_of_16_bits_as_they_are(dtype: Any, stored: str, tmp_path: Path) -> None:
    target = best_target()
    side = _large(machine(target).own_cache)
    weight = (normal(side, side) / 32).astype(dtype).astype("float32")
    if stored == "float16" and not machine(target).converts_halves:
        stored = "float32"
    path = tmp_path / "model.onnx"
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Relu", ["p"], ["y"])]
    for rows in (1, "n", 512):
        save_model(path, nodes, [("x", [rows, side])], ["y"], {"w": weight}, opset=17)
        if rows == 512:
            # The conversions of so many tiles take longer than to read the weights.
            assert _types_read(path, target, "dense") == {"float32"}
            continue
        assert _types_read(path, target, "dense") == {"float32", stored}
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        model = build(import_onnx(path), target).load()
        for count in (1,) if rows == 1 else (1, 13):
            x = normal(count, side)
            np.testing.assert_allclose(model.run(x)[0], session.run(None, {"x": x})[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
def test_rows_of_a_table_of_16_bits_are_gathered_before_they_are_widened(dtype: Any, tmp_path: Path) -> None:
    target = best_target()
    table = normal(_large(machine(target).own_cache) ** 2 // 64, 64).astype(dtype).astype("float32")
    nodes = [helper.make_node("Gather", ["t", "i"], ["y"])]
    path = save_model(tmp_path / "model.onnx", nodes, [("i", ["n", 5], 7)], ["y"], {"t": table}, opset=17)
    built = build(import_onnx(path), target)
    built.export(tmp_path / "model.so")
    assert (tmp_path / "model.so").stat().st_size < 0.6 * table.nbytes
    index = np.random.default_rng(0).integers(-len(table), len(table), (3, 5))
    np.testing.assert_array_equal(built.load().run(index)[0], table[index])


@pytest.mark.few(2)
@pytest.mark.parametrize("has_floats", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_of_few_bits_equals_onnx_runtime(bits: int, has_floats: bool, tmp_path: Path) -> None:
    """The bits are the file's, or are those of its floats."""
    target = best_target()
    side, block = _large(machine(target).own_cache), 32
    generator = np.random.default_rng(bits)
    packed = generator.integers(0, 256, (side, side // block, block * bits // 8)).astype("uint8")
    scales = generator.uniform(0.001, 0.01, (side, side // block)).astype("float32")
    attributes = {"N": side, "K": side, "bits": bits, "block_size": block, "domain": "com.microsoft"}
    product = helper.make_node("MatMulNBits", ["x", "w", "s"], ["p"], **attributes)
    weights = {"w": packed, "s": scales}
    if has_floats:
        product = helper.make_node("MatMul", ["x", "w"], ["p"])
        levels = packed if bits == 8 else np.stack([packed & 15, packed >> 4], axis=-1).reshape(side, -1, block)
        weights = {"w": ((levels - float(1 << bits - 1)) * scales[..., None]).astype("float32").reshape(side, side).T}
    nodes = [product, helper.make_node("Relu", ["p"], ["y"])]
    path = save_model(tmp_path / "model.onnx", nodes, [("x", ["b", "n", side])], ["y"], weights, opset=17)
    imported = import_onnx(path)
    assert sum(value.nbytes for value in imported.params.values()) == sum(value.nbytes for value in weights.values())
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert _types_read(path, target, "narrow_product") == {"float32", "int32"}
    model = build(imported, target).load()
    for shape in ((1, 1), (1, 6), (3, 4)):
        x = normal(*shape, side)
        expected = session.run(None, {"x": x})[0]
        np.testing.assert_allclose(model.run(x)[0], expected, rtol=1e-4, atol=1e-5 * abs(expected).max())


@pytest.mark.parametrize(("target", "precision"), [("cuda-sm80", "fp32"), ("x86-64-v4-bf16", "bf16")])
def test_a_product_of_few_bits_is_one_of_floats_where_none_reads_them(
    target: str, precision: Precision, tmp_path: Path
) -> None:
    imported = import_onnx(_save_rounding(tmp_path / "model.onnx", 0, [1, 128]))
    lowered = lower(imported, resolve(target), BuildOptions(precision=precision), Choices())
    assert not any("_product" in variable.name_hint for variable in lowered.get_global_vars())


def _rounded(x: Array, block: int) -> Array:
    """Rows of which each block is rounded to integers from -127 to 127 times a float."""
    blocks = x.reshape(len(x), x.shape[1] // block, block)
    distance = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    inverse = np.float32(1) / np.where(distance > 0, distance, np.float32(np.inf))
    return (np.rint(blocks * inverse) * distance).reshape(x.shape).astype("float32")


def _rounded_functions(form: BlockWeight, target: Target, sizes: list[Any]) -> dict[str, tirx.PrimFunc]:
    """The functions of products of rounded rows, in parallel whatever their size."""
    unit, parallel = integer_dot(target), replace(machine(target), cores=4, region=0)
    assert unit is not None
    return {
        f"product{place}": RoundedProduct(form, rows, parallel, unit).function().with_attr("tirx.noalias", True)
        for place, rows in enumerate(sizes)
    }


@pytest.mark.few(2)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("bits", "shape", "block", "has_offsets"), [WEIGHTS[0], WEIGHTS[2]], ids=str)
def test_a_product_of_rounded_rows_is_exact(
    bits: int, shape: tuple[int, int], block: int, has_offsets: bool, level: str
) -> None:
    target = resolve(level)
    weight, form = _weight(bits, shape, block, has_offsets)
    rows: list[Any] = [1, 5, tirx.Var("n", "int64")]
    functions = {
        name: function.with_attr("global_symbol", name)
        for name, function in _rounded_functions(form, target, rows).items()
    }
    library = tvm.compile(tvm.IRModule(functions), target=target.tvm)
    calls = [("product0", 1), ("product1", 5), *(("product2", count) for count in (0, 1, 2, 19))]
    for name, count in calls:
        x, result = normal(count, shape[0]), np.full((count, shape[1]), np.nan, "float32")
        if count > 2:
            # Blocks of zeros, and numbers that are not finite; these are of no concern to other rows.
            x[0], x[-2, 0], x[-1, -1] = 0, np.inf, np.nan
        tensors = [
            tvm.runtime.tensor(array) for array in (x, *NarrowProduct(form, 1, machine(target)).packed(), result)
        ]
        library[name](*tensors)
        result, finite = tensors[-1].numpy(), max(count - 2, min(count, 2))
        expected = _rounded(x[:finite], block) @ weight
        np.testing.assert_allclose(result[:finite], expected, rtol=1e-5, atol=1e-5 * abs(weight).max() * shape[0])
        assert not np.isfinite(result[finite:]).any()


@pytest.mark.long
@pytest.mark.parametrize("level", scale.choose(normal=LEVELS[-1:], long=LEVELS))
def test_a_product_of_rounded_rows_stays_within_its_buffers(level: str) -> None:
    target = resolve(level)
    for weight in (WEIGHTS[0], WEIGHTS[2]):
        functions = _rounded_functions(_weight(*weight)[1], target, [1, 19, tirx.Var("n", "int64")])
        assert_within_buffers(functions, target, {"rows": 1}, {"rows": 17})


def _save_rounding(path: Path, level: int, inputs: list[Any]) -> Path:
    """A MatMulNBits that lets the program round its rows, with zero points and a bias, and a Relu."""
    depth, units, block = inputs[-1], 48, 32
    generator = np.random.default_rng(0)
    weights = {
        "w": generator.integers(0, 256, (units, depth // block, block // 2)).astype("uint8"),
        "s": generator.uniform(0.001, 0.01, (units, depth // block)).astype("float32"),
        "z": generator.integers(0, 256, (units, depth // block // 2)).astype("uint8"),
        "b": normal(units),
    }
    attributes = {"N": units, "K": depth, "bits": 4, "block_size": block, "accuracy_level": level}
    operands = ["x", "w", "s", "z", "", "b"]
    nodes = [
        helper.make_node("MatMulNBits", operands, ["p"], domain="com.microsoft", **attributes),
        helper.make_node("Relu", ["p"], ["y"]),
    ]
    return save_model(path, nodes, [("x", inputs)], ["y"], weights, opset=17)


@pytest.mark.few(2)
@pytest.mark.parametrize("inputs", [["b", "n", 128], [1, 128], [7, 128]], ids=str)
def test_rows_are_rounded_as_in_onnx_runtime_where_the_file_allows_it(inputs: list[Any], tmp_path: Path) -> None:
    target = simple_target()
    path = _save_rounding(tmp_path / "model.onnx", 4, inputs)
    assert _types_read(path, target, "rounded_product") == {"float32", "int32", "int16"}
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    model = build(import_onnx(path), target).load()
    for sizes in ((1, 1), (2, 3)) if "n" in inputs else (inputs[:-1],):
        x = normal(*sizes, 128)
        np.testing.assert_allclose(model.run(x)[0], session.run(None, {"x": x})[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("target", "level", "is_rounded"),
    [
        ("x86-64-v2", 4, True),
        ("x86-64-v2", 0, False),
        ("aarch64-neoverse-n1", 4, True),
        ("aarch64-cortex-a72", 4, False),
        ("cuda-sm80", 4, False),
    ],
)
def test_rows_are_rounded_where_the_target_multiplies_integers(
    target: str, level: int, is_rounded: bool, tmp_path: Path
) -> None:
    path = _save_rounding(tmp_path / "model.onnx", level, [1, 128])
    assert bool(_types_read(path, resolve(target), "rounded_product")) == is_rounded


def test_the_doctor_counts_the_operations_of_a_product_of_rounded_rows(tmp_path: Path) -> None:
    path = _save_rounding(tmp_path / "model.onnx", 4, [64, 128])
    model = onnx.load(path)
    model.graph.node.append(helper.make_node("MatMul", ["x", "floats"], ["other"]))
    model.graph.initializer.append(numpy_helper.from_array(normal(128, 48), "floats"))
    model.graph.output.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, [64, 48]))
    onnx.save(model, path)
    shares = {item.operator.rpartition(".")[2]: item.share for item in diagnose(path, simple_target()).operators}
    # Four of its operations are done at once in each lane; both read about as many numbers.
    assert shares["MatMulNBits"] == pytest.approx(0.3 * (shares["MatMul"] or 0), rel=0.3)


@pytest.mark.parametrize("level", [0, 4])
def test_a_product_without_rows_is_empty(level: int, tmp_path: Path) -> None:
    path = _save_rounding(tmp_path / "model.onnx", level, [0, 128])
    (result,) = build(import_onnx(path), simple_target()).load().run(np.empty((0, 128), "float32"))
    assert result.shape == (0, 48)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("target", "instruction"),
    [
        ("x86-64-v2", r"\tpmaddubsw"),
        ("x86-64-v3", r"\tvpmaddubsw.*ymm"),
        ("x86-64-v4", r"\tvpmaddubsw.*zmm"),
        ("x86-64-v4-vnni", r"\tvpdpbusd.*zmm"),
        ("aarch64-neoverse-n1", r"\tsdot"),
        ("aarch64-neoverse-v1", r"\tusdot"),
    ],
)
def test_rounded_rows_are_multiplied_by_instructions(target: str, instruction: str, tmp_path: Path) -> None:
    model = build(import_onnx(_save_rounding(tmp_path / "model.onnx", 4, [1, 128])), resolve(target))
    assert re.search(instruction, str(model.executable.mod.imports[0].inspect_source("asm")))
