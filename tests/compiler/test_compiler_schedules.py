"""Schedules of single functions."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from onnx import TensorProto, helper
from tvm.s_tir import Schedule

from support.arrays import normal
from support.machines import AVX512
from tvmflow.arrays import Array
from tvmflow.compiler import BuildOptions, cost, import_onnx, lower, tiles, workloads
from tvmflow.compiler.annotations import KERNEL
from tvmflow.compiler.inspection import Inspection
from tvmflow.compiler.machine import Machine, machine
from tvmflow.compiler.operators import depthwise
from tvmflow.compiler.schedules import ScheduleWarning, kernels_of, lines, schedule, variants
from tvmflow.hardware.target import Target, resolve


def relu(rows: Any, columns: int) -> tvm.tirx.PrimFunc:
    x = tvm.te.placeholder((rows, columns), "float32", name="x")
    return tvm.te.create_prim_func([x, tvm.topi.nn.relu(x)])


def doubled(rows: int, columns: int, kernel: str) -> tvm.tirx.PrimFunc:
    x = tvm.te.placeholder((rows, columns), "float32", name="x")
    y = tvm.te.compute(x.shape, lambda i, j: x[i, j] + x[i, j], attrs={KERNEL: kernel})
    return tvm.te.create_prim_func([x, y])


@pytest.mark.parametrize(
    ("rows", "threads"), [(8, False), (4096, True), (None, True)], ids=["tiny", "large", "unknown"]
)
def test_a_function_uses_threads_unless_one_core_is_done_before_they_start(
    target: Target, rows: int | None, threads: bool
) -> None:
    func = relu(tvm.te.var("n", "int64") if rows is None else rows, 256)
    scheduled, rule = schedule(func, machine(target))
    assert rule == "fallback"
    assert ("T.parallel" in scheduled.script()) == threads
    assert "T.vectorized" in scheduled.script()


@pytest.mark.parametrize(("columns", "vectors"), [(500, {16, 4}), (29, {16, 8, 4}), (72, {16, 8}), (64, {16})])
@pytest.mark.parametrize("rows", [512, None])
def test_a_row_that_fills_no_whole_vectors_takes_narrower_ones_for_its_end_alone(
    rows: int | None, columns: int, vectors: set[int]
) -> None:
    func = relu(tvm.te.var("n", "int64") if rows is None else rows, columns)
    code = schedule(func, AVX512)[0].script()
    spans = (re.findall(r"\d+", re.sub(r"int64", "", span)) for span in re.findall(r"T\.vectorized\((.*)\)", code))
    assert {int(span[-1]) - (int(span[0]) if len(span) > 1 else 0) for span in spans} == vectors


def test_rows_that_fill_no_whole_vectors_equal_onnx_runtime(make_model: Any, assert_same_as_onnxruntime: Any) -> None:
    nodes = [
        helper.make_node("Tanh", ["x"], ["tanh"]),
        helper.make_node("Softmax", ["x"], ["softmax"]),
        helper.make_node("LogSoftmax", ["x"], ["across"], axis=1),
    ]
    for columns in (20, 31, 77, 500):
        for rows in (3, "n"):
            path = make_model(nodes, [("x", [rows, 5, columns])], [node.output[0] for node in nodes])
            assert_same_as_onnxruntime(path, {"x": normal(3, 5, columns)})


@pytest.mark.parametrize("columns", [64, "m"])
def test_choices_between_numbers_are_made_in_vectors(
    columns: int | str, make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    nodes = [
        helper.make_node("ThresholdedRelu", ["x"], ["relu"], alpha=0.5),
        helper.make_node("Max", ["x", "z"], ["most"]),
        helper.make_node("IsInf", ["x"], ["infinite"]),
        helper.make_node("Sign", ["x"], ["sign"]),
        helper.make_node("Cast", ["x"], ["byte"], to=TensorProto.UINT8),
    ]
    outputs = ["relu", "most", ("infinite", None, TensorProto.BOOL), "sign", ("byte", None, TensorProto.UINT8)]
    path = make_model(nodes, [("x", ["n", columns]), ("z", ["n", columns])], outputs)
    x, z = np.abs(normal(3, 64)), normal(3, 64, seed=1)
    z[1, :2] = np.nan, -np.inf
    feeds = [{"x": x, "z": z}, *([{"x": x[:, :13].copy(), "z": z[:, :13].copy()}] if columns == "m" else [])]
    inspect = Inspection(after=("tirx.UnrollLoop",))
    model = assert_same_as_onnxruntime(path, *feeds, inspect=inspect)
    # Each function reads its numbers as vectors.
    functions = dict(model.schedules).keys()
    assert len(functions) >= len(nodes)
    for name in functions:
        (code,) = re.findall(rf"def {name}\(.*?(?=@T\.prim_func|\Z)", model.inspected.passes[-1].text, re.DOTALL)
        assert "T.Ramp" in code, name


def test_a_chain_of_tiny_layers_computes_the_same(make_model: Any, assert_same_as_onnxruntime: Any) -> None:
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MaxPool", ["b"], ["c"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["c", "v"], ["d"], pads=[1, 1, 1, 1], group=8),
        helper.make_node("GlobalAveragePool", ["d"], ["e"]),
        helper.make_node("Flatten", ["e"], ["f"]),
        helper.make_node("MatMul", ["f", "dense"], ["g"]),
        helper.make_node("Softmax", ["g"], ["y"]),
    ]
    weights = {
        "w": rng.standard_normal((8, 1, 3, 3), "float32"),
        "v": rng.standard_normal((8, 1, 3, 3), "float32"),
        "dense": rng.standard_normal((8, 5), "float32"),
    }
    path: Path = make_model(nodes, [("x", [1, 1, 8, 8])], ["y"], weights)
    model = assert_same_as_onnxruntime(path, {"x": rng.standard_normal((1, 1, 8, 8), "float32")})
    assert {rule for _, rule in model.schedules} >= {"conv2d", "depthwise", "rows", "rowwise"}


def _broken(_sch: Any, _machine: Any, _choices: Any) -> bool:
    raise ValueError("no such loop")


def test_a_rule_that_fails_is_named_and_another_one_takes_the_function() -> None:
    with pytest.warns(ScheduleWarning, match=r"'broken' .*8x256.*no such loop"):
        scheduled, rule = schedule(doubled(8, 256, "broken.first"), AVX512, {"broken": _broken})
    assert rule == "fallback"
    assert "T.vectorized" in scheduled.script()


@pytest.mark.parametrize("kernel", ["broke", "other.broken"])
def test_a_rule_is_tried_on_kernels_of_its_own_name_alone(kernel: str) -> None:
    assert schedule(doubled(8, 256, kernel), AVX512, {"broken": _broken})[1] == "fallback"


def _largest_result_of_a_kernel(path: Path, target: Target) -> int:
    """The elements of the largest result of a function that has a kernel."""
    functions = [item.func for item in workloads(lower(import_onnx(path), target)) if kernels_of(item.func)]
    return max(math.prod(int(size) for size in function.params[-1].shape) for function in functions)


@pytest.mark.few(1)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_convolution_of_means_is_not_computed_again_for_each_pixel_that_it_scales(
    batch: int, make_model: Any, assert_same_as_onnxruntime: Any, target: Target
) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["image"]),
        helper.make_node("GlobalAveragePool", ["image"], ["mean"]),
        helper.make_node("Conv", ["mean", "w", "b"], ["gate"]),
        helper.make_node("Sigmoid", ["gate"], ["scale"]),
        helper.make_node("Mul", ["image", "scale"], ["y"]),
    ]
    path: Path = make_model(nodes, [("x", [batch, 40, 9, 11])], ["y"], {"w": normal(40, 40, 1, 1), "b": normal(40)})
    assert _largest_result_of_a_kernel(path, target) == batch * 40
    assert_same_as_onnxruntime(path, {"x": normal(batch, 40, 9, 11)})


def test_a_convolution_that_is_scaled_by_channel_stays_one_function(make_model: Any, target: Target) -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["image"]), helper.make_node("Mul", ["image", "scale"], ["y"])]
    inputs = [("x", [1, 16, 9, 11]), ("scale", [1, 40, 1, 1])]
    path: Path = make_model(nodes, inputs, ["y"], {"w": normal(40, 16, 1, 1)})
    lowered = lower(import_onnx(path), target)
    names = [item.name for item in workloads(lowered) if kernels_of(item.func)]
    assert [("multiply" in name) for name in names] == [True], names


@pytest.mark.parametrize("rows", [197, 53, "rows"])
def test_rows_that_no_tile_divides_are_read_in_place(
    rows: int | str, make_model: Any, assert_same_as_onnxruntime: Any, target: Target
) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    path: Path = make_model(nodes, [("x", [rows, 40])], ["y"], {"w": normal(40, 203)})
    (dense,) = (item.func for item in workloads(lower(import_onnx(path), target)) if kernels_of(item.func))
    sch, *_ = variants(dense, machine(target), most=1)
    assert {sch.get(block).name_hint for block in sch.get_child_blocks(sch.get_sblock("root"))} == {
        *("product_init", "product_update", "unpack"),
    }
    assert_same_as_onnxruntime(path, {"x": normal(53 if isinstance(rows, str) else rows, 40)})


@pytest.mark.parametrize(("depth", "is_matrix"), [(16, True), (512, False)])
def test_a_matrix_of_a_batch_of_free_sizes_is_one_task_where_its_tiles_are_short(
    depth: int, is_matrix: bool, make_model: Any, assert_same_as_onnxruntime: Any, target: Target
) -> None:
    inputs = [("x", [1, "batch", "rows", depth]), ("w", [1, "batch", depth, 96])]
    path: Path = make_model([helper.make_node("MatMul", ["x", "w"], ["y"])], inputs, ["y"], {})
    functions = [item.func for item in workloads(lower(import_onnx(path), target))]
    (func,) = (func for func in functions if kernels_of(func) == ["rows"])
    sch, *_ = variants(func, machine(target), most=1)
    task, *_ = (sch.get(loop) for loop in sch.get_loops(sch.get_sblock("product_update")))
    sizes = {variable.name for variable in tvm.tirx.analysis.undefined_vars(task.extent)}
    assert sizes == ({"batch"} if is_matrix else {"batch", "rows"})
    feeds = [
        {"x": normal(1, batch, rows, depth), "w": normal(1, batch, depth, 96)} for batch, rows in ((5, 21), (1, 3))
    ]
    assert_same_as_onnxruntime(path, *feeds)


@pytest.mark.parametrize(
    ("channels", "out", "groups", "kernel", "size", "is_apart"),
    [
        (64, 64, 64, 3, 28, False),  # a depthwise convolution whose strips share few lines
        (64, 64, 64, 15, 13, True),  # one whose strips read the same lines again and again
        (16, 32, 1, 3, 28, False),  # a convolution whose weights stay in the cache
        (512, 512, 1, 3, 5, True),  # one of which each core reads a part of the weights
    ],
)
def test_an_image_is_padded_once_where_tasks_would_pad_it_again(
    channels: int, out: int, groups: int, kernel: int, size: int, is_apart: bool, make_model: Any, target: Target
) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], group=groups, pads=[kernel // 2] * 4)
    weight = normal(out, channels // groups, kernel, kernel)
    path: Path = make_model([node], [("x", [1, channels, size, size])], ["y"], {"w": weight})
    lowered = lower(import_onnx(path), target, BuildOptions(fast_algorithms=False))
    functions = [item.func for item in workloads(lowered)]
    (func,) = (func for func in functions if set(kernels_of(func)) & {"conv2d", "depthwise"})
    sch, *_ = variants(func, machine(target), most=1)
    product, pad = (
        [sch.get(loop) for loop in sch.get_loops(block)]
        for block in sch.get_child_blocks(sch.get_sblock("root"))
        if sch.get(block).name_hint == "pad" or sch.get(block).name_hint.endswith("_update")
    )
    assert (not product[0].same_as(pad[0])) is is_apart


@pytest.mark.parametrize("name", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_a_strip_of_a_depthwise_convolution_keeps_a_core_busy(name: str) -> None:
    processor = machine(resolve(name))
    busy = cost.in_flight(processor)
    for width in range(1, 200):
        strip = depthwise._depthwise_tile(width, processor)
        strips = -(-width // strip)
        assert min(width, busy) / 2 <= strip <= width
        # The pixels beyond the line are fewer than those of a strip.
        assert strips * strip - width < strip <= tiles.most_pixels(processor)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kernel", "function", "is_stored"), [(5, "Sigmoid", True), (5, "Relu", False), (3, "Sigmoid", False)]
)
@pytest.mark.parametrize("width", [14, "width"])
def test_sums_that_llvm_would_move_into_an_exponential_are_stored_first(
    width: int | str,
    kernel: int,
    function: str,
    is_stored: bool,
    make_model: Any,
    assert_same_as_onnxruntime: Any,
    target: Target,
) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], group=40, pads=[kernel // 2] * 4),
        helper.make_node(function, ["a"], ["y"]),
    ]
    path: Path = make_model(nodes, [("x", [1, 40, 9, width])], ["y"], {"w": normal(40, 1, kernel, kernel)})
    functions = [item.func for item in workloads(lower(import_onnx(path), target))]
    (func,) = (func for func in functions if kernels_of(func) == ["depthwise"])
    sch, *_ = variants(func, machine(target), most=1)
    (out,) = (block for block in sch.get_child_blocks(sch.get_sblock("root")) if not sch.get_consumers(block))
    product, result = (
        [sch.get(loop) for loop in sch.get_loops(block)] for block in (sch.get_sblock("depthwise_conv2d_update"), out)
    )
    shared = [loop for loop in product if any(loop.same_as(other) for other in result)]
    # The loops of both over a strip of pixels stand in one over channels, or each in its own.
    around = len(result) - len(shared)
    assert around == (4 if is_stored else 3)
    sizes = [width] if isinstance(width, int) else [3, 14, 17]
    assert_same_as_onnxruntime(path, *({"x": normal(1, 40, 9, size)} for size in sizes))


@pytest.mark.few(2)
@pytest.mark.parametrize("columns", [5, 21, 77, 197])
def test_columns_that_no_vector_divides_are_copied_once_for_all_rows(
    columns: int, make_model: Any, assert_same_as_onnxruntime: Any, target: Target
) -> None:
    nodes = [helper.make_node("MatMul", ["x", "z"], ["y"])]
    path: Path = make_model(nodes, [("x", [3, 53, 20]), ("z", [3, 20, columns])], ["y"])
    (product,) = (item.func for item in workloads(lower(import_onnx(path), target)) if kernels_of(item.func))
    sch, *_ = variants(product, machine(target), most=1)
    product_loops = [sch.get(loop) for loop in sch.get_loops(sch.get_sblock("product_update"))]
    copies = [
        block for block in sch.get_child_blocks(sch.get_sblock("root")) if sch.get(block).name_hint.startswith("pack")
    ]
    assert copies
    for copy in copies:
        outermost, *_ = sch.get_loops(copy)
        assert not any(loop.same_as(sch.get(outermost)) for loop in product_loops)
    assert_same_as_onnxruntime(path, {"x": normal(3, 53, 20), "z": normal(3, 20, columns)})


@pytest.mark.parametrize("name", ["x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64-cortex-a72"])
@pytest.mark.parametrize("rows", [16, 50, 77, 128, 197, 211])
def test_weights_from_the_second_level_cache_keep_pace_with_a_tile(rows: int, name: str) -> None:
    cpu = machine(resolve(name))
    for vectors in (12, 48, 192):
        tile = tiles.choose(rows, vectors, cpu)
        weights = tile.vectors * cpu.vectors.bits / 8 / cpu.second.read
        assert weights <= max(tile.rows * tile.vectors / cpu.vectors.multiply_adds, 4), tile


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", [4, "rows"])
def test_a_chain_that_reads_each_value_several_times_does_not_grow_with_every_step(
    rows: int | str, make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    nodes, value = [], "x"
    for step in range(14):
        names = [f"{name}{step}" for name in ("positive", "half", "shifted", "next")]
        nodes += [
            helper.make_node("Greater", [value, "zero"], [names[0]]),
            helper.make_node("Mul", [value, "scale"], [names[1]]),
            helper.make_node("Add", [value, "one"], [names[2]]),
            helper.make_node("Where", [names[0], names[1], names[2]], [names[3]]),
        ]
        value = names[3]
    weights = {name: np.array(number, "float32") for name, number in (("zero", 0), ("scale", -0.5), ("one", 1))}
    path: Path = make_model(nodes, [("x", [rows, 40])], [value], weights)
    x = np.random.default_rng(0).standard_normal((4, 40), "float32")
    # Each step reads its value three times: written out, the last would have three to the power of 14 terms.
    assert_same_as_onnxruntime(path, {"x": x})


@pytest.mark.parametrize(("operator", "is_unrolled"), [("Relu", True), ("Tanh", False)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_function_of_many_steps_is_computed_row_by_row_after_a_product(
    operator: str, is_unrolled: bool, precision: Any, make_model: Any, target: Target
) -> None:
    target = resolve("x86-64-v4-bf16") if precision == "bf16" else target
    weights = {"w": normal(64, 64)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node(operator, ["z"], ["y"])]
    path: Path = make_model(nodes, [("x", [48, 64])], ["y"], weights)
    lowered = lower(import_onnx(path), target, BuildOptions(precision=precision))
    (product,) = (item.func for item in workloads(lowered) if kernels_of(item.func))
    sch, *_ = variants(product, machine(target), most=1)
    *_, rows, _, _ = (sch.get(loop) for loop in sch.get_loops(sch.get_sblock(operator.lower())))
    assert (rows.kind == tvm.tirx.ForKind.UNROLLED) == is_unrolled


_CHANNELS = [-1.0, 0.5, 2.0]
_LINES = {
    "Relu": ([("Relu", ["x"], ["y"])], True),
    "a number for each channel": ([("Add", ["x", "channels"], ["a"]), ("Sigmoid", ["a"], ["y"])], True),
    "a concatenation of channels": ([("Concat", ["x", "z"], ["y"], {"axis": 1})], True),
    "a concatenation of lines": ([("Concat", ["x", "z"], ["y"], {"axis": 2})], True),
    "a concatenation of batches": ([("Concat", ["x", "z", "x"], ["y"], {"axis": 0})], True),
    "more lines around": ([("Pad", ["x", "widths"], ["y"])], True),
    "all lines but one": ([("Slice", ["x", "one", "large", "two"], ["y"])], True),
    "reversed channels": ([("Slice", ["x", "last", "first", "one", "last"], ["y"])], True),
    "a choice": ([("Less", ["x", "z"], ["c"]), ("Where", ["c", "x", "channels"], ["y"])], True),
    "a number for each column": ([("ReduceMax", ["z"], ["m"], {"axes": [2]}), ("Sub", ["x", "m"], ["y"])], False),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("case", _LINES)
def test_last_dimensions_of_free_sizes_that_lie_in_order_are_one_line(
    case: str, make_model: Any, assert_same_as_onnxruntime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop over the last dimension alone, which may be short, would have no vectors."""
    ranks = []

    def join(sch: Schedule, machine: Machine) -> Schedule:
        joined = join_lines(sch, machine)
        ranks.append(len(joined.mod["main"].params[-1].shape) if joined is not sch else 0)
        return joined

    join_lines = lines.join
    monkeypatch.setattr(lines, "join", join)
    nodes, is_joined = _LINES[case]
    shape = ["batch", 3, "high", "wide"]
    weights = {
        "channels": np.array(_CHANNELS, "float32").reshape(3, 1, 1),
        **{name: np.array([number]) for name, number in (("last", -1), ("first", -9), ("one", 1), ("two", 2))},
        "large": np.array([1 << 40]),
        "widths": np.array([0, 0, 1, 0, 1, 0, 2, 0]),
    }
    made = [helper.make_node(name, inputs, outputs, **dict(*more)) for name, inputs, outputs, *more in nodes]
    inputs = [(name, shape) for name in "xz" if any(name in node.input for node in made)]
    kept = {name: value for name, value in weights.items() if any(name in node.input for node in made)}
    path = make_model(made, inputs, ["y"], kept, opset=17)
    sizes = [(2, 3, 7, 3), (1, 3, 5, 37), (3, 3, 1, 1)]
    feeds = [{name: normal(*size, seed=seed) for seed, (name, _) in enumerate(inputs)} for size in sizes]
    assert_same_as_onnxruntime(path, *feeds)
    assert any(0 < rank < 4 for rank in ranks) == is_joined


_SHORT_ROWS = {
    "Relu": ([("Relu", ["x"], ["y"])], "float32"),
    "a choice": ([("Less", ["x", "z"], ["c"]), ("Where", ["c", "x", "z"], ["y"])], "float32"),
    "a negation": ([("Not", ["x"], ["b"]), ("Cast", ["b"], ["y"], {"to": TensorProto.FLOAT})], "bool"),
    "a quotient": ([("Div", ["x", "z"], ["q"]), ("Cast", ["q"], ["y"], {"to": TensorProto.FLOAT})], "int32"),
    "a maximum": ([("Max", ["x", "z"], ["y"])], "float32"),
    "an activation that occurs twice": ([("Softplus", ["x"], ["s"]), ("Mul", ["s", "s"], ["y"])], "float32"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", _SHORT_ROWS)
@pytest.mark.parametrize("shape", [("rows", "few"), (700, 3)], ids=["free", "fixed"])
def test_short_rows_are_one_line(
    shape: tuple[Any, Any], case: str, make_model: Any, assert_same_as_onnxruntime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of three numbers took ten times as long as one line of all of them."""
    ranks = []

    def join(sch: Schedule, machine: Machine) -> Schedule:
        joined = join_lines(sch, machine)
        ranks.append(len(joined.mod["main"].params[-1].shape))
        return joined

    join_lines = lines.join
    monkeypatch.setattr(lines, "join", join)
    nodes, dtype = _SHORT_ROWS[case]
    made = [helper.make_node(name, inputs, outputs, **dict(*more)) for name, inputs, outputs, *more in nodes]
    names = [name for name in "xz" if any(name in node.input for node in made)]
    element_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inputs = [(name, list(shape), element_type) for name in names]
    path = make_model(made, inputs, ["y"])
    sizes = [(700, 3), *([] if shape == (700, 3) else [(5, 1), (2, 41)])]
    feeds = [{name: _numbers(size, dtype, seed) for seed, name in enumerate(names)} for size in sizes]
    assert_same_as_onnxruntime(path, *feeds)
    assert ranks
    assert set(ranks) == {1}


def _numbers(size: tuple[int, ...], dtype: str, seed: int) -> Array:
    values = 50 * normal(*size, seed=seed)
    # No divisor is zero.
    return (values > 0) if dtype == "bool" else np.where(abs(values) < 1, 1, values).astype(dtype)
