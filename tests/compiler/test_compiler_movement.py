import itertools
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from onnx import NodeProto, TensorProto, helper

from support.arrays import normal
from support.builds import rule_counts, run_in_memory
from support.scale import choose, is_long
from tvmflow.compiler import CompiledModel, build, import_onnx, lower, workloads
from tvmflow.compiler.lowering import lower_functions
from tvmflow.compiler.machine import machine
from tvmflow.compiler.schedules import schedule
from tvmflow.errors import UnsupportedOperatorError
from tvmflow.hardware.target import Target
from tvmflow.onnx_model.session import open_session

Check = Callable[..., CompiledModel]


def _transposes(model: CompiledModel) -> int:
    """The functions that do nothing but change the order of dimensions."""
    return sum(name.rstrip("0123456789") == "transpose" for name, _ in model.schedules)


def _between(nodes: list[NodeProto], channels: int) -> tuple[list[NodeProto], dict[str, np.ndarray[Any, Any]]]:
    """Nodes from `a` to `b` between two convolutions, from `x` with three channels to `y`."""
    first = helper.make_node("Conv", ["x", "w"], ["a"])
    return [first, *nodes, helper.make_node("Relu", ["b"], ["y"])], {"w": normal(channels, 3, 1, 1)}


_ORDERS = [(0, 2, 3, 1), (0, 3, 1, 2), (3, 2, 1, 0), (0, 2, 1, 3), (1, 0, 3, 2)]


def test_transposes_equal_onnx_runtime(assert_all_same: Check) -> None:
    cases = []
    for shape in choose(normal=((2, 24, 7, 19),), long=((1, 64, 28, 28), (2, 24, 7, 19), (1, 70, 5, 16))):
        outputs = [f"y{place}" for place in range(len(_ORDERS))]
        nodes = [
            helper.make_node("Transpose", ["x"], [output], perm=order)
            for order, output in zip(_ORDERS, outputs, strict=True)
        ]
        cases.append(((nodes, [("x", shape)], outputs), {"x": normal(*shape)}))
    assert_all_same(cases)


def test_tiles_of_numbers_are_transposed_by_shuffles(make_model: Any, native: Target) -> None:
    orders = [(0, 2, 3, 1), (0, 3, 1, 2), (0, 3, 2, 1)]
    types = (TensorProto.FLOAT, TensorProto.INT64, TensorProto.UINT8, TensorProto.BOOL)
    nodes: list[NodeProto] = []
    inputs: list[tuple[str, list[str | int], int]] = []
    outputs: list[str] = []
    for kind in types:
        inputs.append((f"x{kind}", ["batch", 22, 14, 16], kind))
        for order in orders:
            outputs.append(f"y{len(outputs)}")
            nodes.append(helper.make_node("Transpose", [f"x{kind}"], [outputs[-1]], perm=order))
    imported, cpu = import_onnx(make_model(nodes, inputs, outputs)), machine(native)
    scheduled = [schedule(item.func, cpu)[0].script() for item in workloads(lower(imported, native))]
    # Where a vector has less than four numbers of 64 bits, these are moved one by one.
    count = len(types) if cpu.lanes >= 8 else len(types) - 1
    assert sum("tvmflow_transpose_" in text for text in scheduled) == len(orders) * count
    model = build(imported, native)
    x = np.arange(2 * 22 * 14 * 16).reshape(2, 22, 14, 16)
    feed = [x.astype("float32"), x, x.astype("uint8"), x % 3 == 0]
    (results,) = run_in_memory(model, [feed])
    for place, result in enumerate(results):
        np.testing.assert_array_equal(result, feed[place // len(orders)].transpose(orders[place % len(orders)]))


def test_the_lines_of_a_convolution_of_one_dimension_are_transposed_by_shuffles(
    make_model: Any, assert_same_as_onnxruntime: Check, native: Target
) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1])
    path = make_model([node], [("x", [1, 16, 48])], ["y"], {"w": normal(32, 16, 3)})
    assert_same_as_onnxruntime(path, {"x": normal(1, 16, 48)})
    # The convolution has a line of pixels as an image, of a height of one.
    names = [
        item.name
        for item in workloads(lower(import_onnx(path), native))
        if "tvmflow_transpose_" in schedule(item.func, machine(native))[0].script()
    ]
    assert len(names) == 2, names


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("free", "order"),
    [
        (["n", 24, "h", "w"], (0, 2, 3, 1)),
        (["n", "h", "w", 24], (0, 3, 1, 2)),
        (["n", "h", "w", 5], (0, 3, 2, 1)),
        (["n", "h", "w"], (0, 2, 1)),
    ],
)
def test_transposes_of_free_sizes_shuffle_whole_tiles_or_small_ones(
    free: list[str | int], order: tuple[int, ...], make_model: Any, native: Target
) -> None:
    path = make_model([helper.make_node("Transpose", ["x"], ["y"], perm=order)], [("x", free)], ["y"])
    (item,) = workloads(lower(import_onnx(path), native))
    assert "tvmflow_transpose_" in schedule(item.func, machine(native))[0].script()
    sizes = [(1, 1, 1), (2, 3, 2), (1, 4, 4), (2, 5, 7), (1, 16, 16), (2, 17, 35)]
    by_name = [dict(zip("nhw", item, strict=True)) for item in sizes]
    feeds = [[normal(*(dim if isinstance(dim, int) else names[dim] for dim in free))] for names in by_name]
    for (x,), (result,) in zip(feeds, run_in_memory(build(import_onnx(path), native), feeds), strict=True):
        np.testing.assert_array_equal(result, x.transpose(order))


@pytest.mark.parametrize(("size", "is_alone"), [(40, True), ("t", True), (2, False)])
def test_a_transpose_of_vectors_is_a_function_of_its_own(
    size: Any, is_alone: bool, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("Sigmoid", ["x"], ["a"]),
        helper.make_node("Transpose", ["a"], ["b"], perm=[0, 2, 1]),
        helper.make_node("Neg", ["b"], ["y"]),
    ]
    path = make_model(nodes, [("x", [1, size, 48])], ["y"], {})
    model = assert_same_as_onnxruntime(path, {"x": normal(1, size if isinstance(size, int) else 37, 48)})
    functions = [name for name, _ in model.schedules]
    assert any("transpose" in name and "sigmoid" not in name for name in functions) == is_alone
    assert len(functions) == (2 if is_alone else 1)


def test_a_free_line_of_few_channels_is_no_part_of_the_parallel_loop(make_model: Any, native: Target) -> None:
    node = helper.make_node("Transpose", ["x"], ["y"], perm=[0, 2, 3, 1])
    (workload,) = workloads(lower(import_onnx(make_model([node], [("x", ["n", 3, "h", "w"])], ["y"])), native))
    text = schedule(workload.func, replace(machine(native), cores=2))[0].script()
    (parallel,) = re.findall(r"T.parallel\((.*)\):", text)
    assert "h" in parallel
    assert "w" not in parallel


@pytest.mark.parametrize("coordinates", ["half_pixel", "asymmetric", "align_corners"])
def test_images_with_the_channels_last_are_resized_by_neighbours(coordinates: str, assert_all_same: Check) -> None:
    form = {"mode": "linear", "coordinate_transformation_mode": coordinates}
    node = helper.make_node("Resize", ["x", "", "", "s"], ["y"], **form)
    cases = [
        (([node], [("x", ["n", 6, 9, channels])], ["y"], {"s": np.array(sizes)}), {"x": normal(2, 6, 9, channels)})
        for channels, sizes in ((8, [2, 12, 5, 8]), (3, [2, 6, 20, 3]))
    ]
    # An axis of the first image, then the other one, and one of the second.
    assert rule_counts(assert_all_same(cases))["resize"] == 3


def test_images_of_free_size_take_the_nearest_pixels_for_a_known_size(assert_all_same: Check) -> None:
    form = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    node = helper.make_node("Resize", ["x", "", "", "s"], ["y"], mode="nearest", **form)
    feeds = [{"x": normal(1, 3, *size)} for size in ((12, 9), (31, 40))]
    assert_all_same([(([node], [("x", [1, 3, "h", "w"])], ["y"], {"s": np.array([1, 3, 24, 20])}), *feeds)])


@pytest.mark.few(2)
@pytest.mark.parametrize("sides", [("h", "w"), (5, 7)], ids=["free", "fixed"])
@pytest.mark.parametrize("factor", [2, 9, 16])
def test_nearest_pixels_of_images_many_times_as_large_are_repeated(
    factor: int, sides: tuple[Any, Any], make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    node = helper.make_node("Resize", ["x", "", "s"], ["y"], mode="nearest")
    weights = {"s": np.array([1, 1, factor, factor], "float32")}
    path = make_model([node], [("x", [1, 3, *sides])], ["y"], weights)
    sizes = [(5, 7), *([(1, 20)] if sides == ("h", "w") else [])]
    model = assert_same_as_onnxruntime(path, *({"x": normal(1, 3, *size)} for size in sizes))
    assert any("repeat" in name for name, _ in model.schedules)


def test_computed_sizes_that_are_never_short_are_transposed(assert_all_same: Check) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], strides=[4, 4]),
        helper.make_node("Resize", ["a", "", "s"], ["y"], mode="nearest"),
    ]
    weights = {"w": normal(24, 3, 1, 1), "s": np.array([1, 1, 4, 4], "float32")}
    feeds = [{"x": normal(1, 3, *size)} for size in ((1, 2), (7, 30))]
    model = assert_all_same([((nodes, [("x", ["n", 3, "h", "w"])], ["y"], weights), *feeds)])
    # Height and width of the result are multiples of four, at least four. A schedule that does not compile is replaced.
    assert "none" not in rule_counts(model)


def test_padding_before_an_activation_equals_onnx_runtime(assert_all_same: Check) -> None:
    cases = []
    for operator in ("Sigmoid", "Tanh", "Elu"):
        nodes = [
            helper.make_node("Pad", ["x", "widths"], ["padded"]),
            helper.make_node(operator, ["padded"], ["y"]),
        ]
        for widths in choose(normal=((0, 1, 2, 3),), long=((3, 2, 0, 0), (0, 1, 2, 3))):
            cases.append(((nodes, [("x", [13, 78])], ["y"], {"widths": np.array(widths)}), {"x": normal(13, 78)}))
    assert_all_same(cases)


def test_transposes_of_a_part_equal_onnx_runtime(assert_all_same: Check) -> None:
    cases = []
    parts = [((20, 20), 18, (1, 0)), ((37, 2, 40), 35, (2, 1, 0)), ((1, 16, 20, 20), 19, (0, 2, 3, 1))]
    for shape, part, order in parts:
        axes = [len(shape) - 1] if len(shape) < 4 else [2, 3]
        nodes = [
            helper.make_node("Slice", ["x", "start", "end", "axes"], ["part"]),
            helper.make_node("Transpose", ["part"], ["y"], perm=order),
        ]
        weights = {name: np.array([value] * len(axes)) for name, value in (("start", 0), ("end", part))}
        cases.append(((nodes, [("x", list(shape))], ["y"], {**weights, "axes": np.array(axes)}), {"x": normal(*shape)}))
    assert_all_same(cases)


@pytest.mark.few(1)
@pytest.mark.parametrize("axis", [1, 3])
def test_concatenation_and_what_follows_equal_onnx_runtime(axis: int, assert_all_same: Check) -> None:
    cases = []
    for channels in choose(normal=((58, 58), (3, 24, 1, 19)), long=((64, 32), (58, 58), (3, 24, 1, 19), (1, 1))):
        names = [f"x{place}" for place in range(len(channels))]
        shapes = [[2, *([size, 6, 5] if axis == 1 else [5, 6, size])] for size in channels]
        nodes = [
            helper.make_node("Concat", names, ["c"], axis=axis),
            helper.make_node("Mul", ["c", "s"], ["m"]),
            helper.make_node("Relu", ["m"], ["y"]),
        ]
        total = sum(channels)
        scale = normal(1, total, 1, 1) if axis == 1 else normal(total)
        inputs = list(zip(names, shapes, strict=True))
        cases.append(((nodes, inputs, ["y"], {"s": scale}), {name: normal(*shape) for name, shape in inputs}))
    assert_all_same(cases)


def test_a_free_last_dimension_is_repeated_without_a_division_for_each_element(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [helper.make_node("Tile", ["x", "twice"], ["y"])]
    path = make_model(nodes, [("x", ["n", "width"])], ["y"], {"twice": np.array([2, 3])})
    model = assert_same_as_onnxruntime(path, *({"x": normal(*shape)} for shape in ((1, 1), (2, 7), (3, 20))))
    # TVM's own function divides by the width.
    assert not [name for name, _ in model.schedules if "tile" in name]


@pytest.mark.few(2)
@pytest.mark.parametrize(("pieces", "rows"), [(3, "n"), (20, 6), (20, "n")])
def test_what_is_joined_is_copied_piece_by_piece(
    pieces: int, rows: int | str, make_model: Any, target: Target, assert_same_as_onnxruntime: Check
) -> None:
    names = [f"x{place}" for place in range(pieces)]
    sizes = [(32, 24, 5)[place % 3] for place in range(pieces)]
    nodes = [helper.make_node("Concat", names, ["c"], axis=2), helper.make_node("Relu", ["c"], ["y"])]
    inputs = [(name, [rows, 3, size]) for name, size in zip(names, sizes, strict=True)]
    path = make_model(nodes, inputs, ["y"])
    feeds = [
        {name: normal(count, 3, size) for name, size in zip(names, sizes, strict=True)}
        for count in ([rows] if isinstance(rows, int) else [1, 6])
    ]
    assert_same_as_onnxruntime(path, *feeds)
    (workload,) = workloads(lower(import_onnx(path), target))
    scheduled, _ = schedule(workload.func, machine(target))
    function = scheduled.with_attr("global_symbol", "joined")
    lowered = lower_functions(tvm.IRModule({"joined": function}), tvm.target.Target(target.tvm))
    # No element asks which piece it is in; the function asks what its arguments are.
    choices = [line for line in lowered.script().splitlines() if "if_then_else" in line or "Select" in line]
    assert [line for line in choices if "type_index" not in line] == []


@pytest.mark.parametrize("batch", [2, "batch"])
def test_one_place_of_a_dimension_is_read_where_it_is_needed(
    batch: int | str, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    # Queries, keys and values of one product: no function copies all three, nor one of them.
    nodes = [
        helper.make_node("Reshape", ["x", "apart"], ["a"]),
        helper.make_node("Transpose", ["a"], ["b"], perm=[2, 0, 3, 1, 4]),
    ]
    places = {"first": np.array(0), "second": np.array([1]), "third": np.array(-1)}
    for name, operator in zip(places, ("Relu", "Neg", "Tanh"), strict=True):
        nodes += [helper.make_node("Gather", ["b", name], [f"{name}_part"])]
        nodes += [helper.make_node(operator, [f"{name}_part"], [f"{name}_y"])]
    weights = {**places, "apart": np.array([0, 9, 3, 4, 16])}
    path = make_model(nodes, [("x", [batch, 9, 192])], [f"{name}_y" for name in places], weights)
    model = assert_same_as_onnxruntime(path, {"x": normal(2, 9, 192)})
    assert not [name for name, _ in model.schedules if "take" in name]
    assert len([name for name, _ in model.schedules if "transpose" in name]) == len(places)


@pytest.mark.few(1)
@pytest.mark.parametrize("channels", [20, 116])
def test_shuffled_channels_stay_last(channels: int, make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes, weights = _between(
        [
            helper.make_node("Reshape", ["a", "apart"], ["c"]),
            helper.make_node("Transpose", ["c"], ["d"], perm=[0, 2, 1, 3, 4]),
            helper.make_node("Reshape", ["d", "together"], ["e"]),
            helper.make_node("Split", ["e"], ["f", "g"], axis=1, num_outputs=2),
            helper.make_node("Concat", ["g", "f"], ["b"], axis=1),
        ],
        channels,
    )
    shapes = {"apart": np.array([2, 2, channels // 2, 6, 7]), "together": np.array([2, channels, 6, 7])}
    path = make_model(nodes, [("x", [2, 3, 6, 7])], ["y"], {**weights, **shapes})
    model = assert_same_as_onnxruntime(path, {"x": normal(2, 3, 6, 7)})
    assert _transposes(model) <= 2  # at both ends


@pytest.mark.parametrize("mode", ["CRD", "DCR"])
def test_depth_to_space_and_back_equal_onnx_runtime(
    mode: str, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes, weights = _between(
        [
            helper.make_node("DepthToSpace", ["a"], ["c"], blocksize=2, mode=mode),
            helper.make_node("Sigmoid", ["c"], ["d"]),
            helper.make_node("SpaceToDepth", ["d"], ["b"], blocksize=2),
        ],
        24,
    )
    path = make_model(nodes, [("x", [2, 3, 6, 7])], ["y"], weights)
    assert_same_as_onnxruntime(path, {"x": normal(2, 3, 6, 7)})


_RESIZES = [
    ("nearest", "asymmetric"),
    ("linear", "half_pixel"),
    ("linear", "align_corners"),
    ("linear", "asymmetric"),
    ("cubic", "pytorch_half_pixel"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("is_channels_last", [True, False], ids=["channels last", "channels first"])
def test_resizing_equals_onnx_runtime(is_channels_last: bool, assert_all_same: Check) -> None:
    cases = []
    # A normal run halves sizes in one order of dimensions and takes a factor that is no whole number in the other.
    more = [(0.5, 0.5)] if is_channels_last else [(3.0, 1.5)]
    scales = [(2.0, 2.0), *choose(normal=more, long=[(3.0, 1.5), (0.5, 0.5)])]
    for scale in scales:
        for mode, transformation in _RESIZES:
            resize = helper.make_node(
                "Resize",
                ["a" if is_channels_last else "x", "", "scale"],
                ["b" if is_channels_last else "y"],
                mode=mode,
                coordinate_transformation_mode=transformation,
                **({"nearest_mode": "floor"} if mode == "nearest" else {}),
            )
            nodes, weights = _between([resize], 20) if is_channels_last else ([resize], {})
            weights = {**weights, "scale": np.array([1, 1, *scale], "float32")}
            cases.append(((nodes, [("x", [2, 3, 8, 6])], ["y"], weights), {"x": normal(2, 3, 8, 6)}))
    # Resizes of the same sizes share a function: their coordinates are data.
    assert rule_counts(assert_all_same(cases))["resize"] >= len(scales)


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", [[2, 3, 8, 6], ["n", 3, 8, 6], ["n", 3, "h", "w"]], ids=str)
def test_an_image_is_transposed_before_it_is_enlarged(
    shape: list[Any], make_model: Any, assert_same_as_onnxruntime: Check, target: Target
) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("Resize", ["a", "", "scale"], ["y"], mode="linear"),
    ]
    weights = {"w": normal(21, 3, 1, 1), "scale": np.array([1, 1, 4, 4], "float32")}
    path = make_model(nodes, [("x", shape)], ["y"], weights)
    model = assert_same_as_onnxruntime(path, {"x": normal(2, 3, 8, 6)})
    resizes = [item.func for item in workloads(lower(import_onnx(path), target)) if "resize" in item.name]
    assert [int(func.params[-1].shape[1]) for func in resizes] == [21]
    assert rule_counts(model)["resize"] == 1


@pytest.mark.few(2)
@pytest.mark.parametrize("width", ["w", 7], ids=["free width", "known width"])
@pytest.mark.parametrize("is_channels_last", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        *({"mode": "linear", "coordinate_transformation_mode": name} for name in ("half_pixel", "asymmetric")),
        {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"},
        {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1},
        {"mode": "cubic", "coordinate_transformation_mode": "align_corners"},
    ],
    ids=str,
)
def test_images_of_free_size_are_interpolated_by_tables_that_the_function_computes(
    options: dict[str, Any], is_channels_last: bool, width: Any, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        *([helper.make_node("Conv", ["x", "v"], ["c"], pads=[1] * 4)] if is_channels_last else []),
        helper.make_node("Shape", ["z"], ["sizes_4"]),
        helper.make_node("Slice", ["sizes_4", "two", "four"], ["image"]),
        # The sizes are two at least: between the corners of a thinner result, another rule computes.
        helper.make_node("Max", ["image", "two"], ["thick"]),
        helper.make_node("Concat", ["start", "thick"], ["sizes"], axis=0),
        helper.make_node("Resize", ["c" if is_channels_last else "x", "", "", "sizes"], ["r"], **options),
        helper.make_node("Relu", ["r"], ["y"]),
    ]
    weights = {"two": np.array([2]), "four": np.array([4]), "start": np.array([2, 3]), "v": normal(3, 3, 3, 3)}
    path = make_model(nodes, [("x", [2, 3, "h", width]), ("z", [1, 1, "h2", "w2"])], ["y"], weights)
    feeds = [
        {"x": normal(2, 3, high, 7 if width == 7 else 5), "z": normal(1, 1, *size)}
        for high, size in ((9, (4, 33)), (1, (12, 2)), (6, (6, 19)))
    ]
    model = assert_same_as_onnxruntime(path, *feeds)
    assert rule_counts(model)["resize"] == 1


@pytest.mark.few(2)
@pytest.mark.parametrize("are_sizes_free", [False, True])
@pytest.mark.parametrize("sizes", [(9,), (4, 3, 5)], ids=["one dimension", "three dimensions"])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_data_of_one_or_three_dimensions_is_resized_as_images(
    mode: str, sizes: tuple[int, ...], are_sizes_free: bool, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    # The second of three dimensions stays.
    scales = np.array([1, 1, 2, *((1, 3) if len(sizes) > 1 else ())], "float32")
    options = {"nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"} if mode == "nearest" else {}
    resize = helper.make_node("Resize", ["x", "", "s"], ["r"], mode=mode, **options)
    dims: list[Any] = ["n", 3, *("dhw"[: len(sizes)] if are_sizes_free else sizes)]
    path = make_model([resize, helper.make_node("Relu", ["r"], ["y"])], [("x", dims)], ["y"], {"s": scales})
    others = [tuple(size + 2 for size in sizes), (1,) * len(sizes)] if are_sizes_free else []
    model = assert_same_as_onnxruntime(path, *({"x": normal(2, 3, *item)} for item in (sizes, *others)))
    axes = 1 if len(sizes) == 1 else 2
    assert rule_counts(model)["resize"] == (0 if mode == "nearest" else axes)
    if mode == "nearest" and are_sizes_free:
        assert sum("repeat" in name for name, _ in model.schedules) == axes


@pytest.mark.few(5)
@pytest.mark.parametrize("is_channels_last", [False, True])
@pytest.mark.parametrize(
    ("factors", "mode", "rounding", "is_repeated"),
    [
        ((2, 2), "asymmetric", "floor", True),
        ((3, 1), "half_pixel", "round_prefer_floor", True),
        ((2, 4), "pytorch_half_pixel", "round_prefer_ceil", True),
        ((2, 2), "asymmetric", "round_prefer_floor", False),
        ((2, 1.5), "asymmetric", "floor", False),
    ],
)
def test_images_of_free_size_that_become_several_times_as_large_repeat_their_pixels(
    factors: tuple[float, float],
    mode: str,
    rounding: str,
    is_repeated: bool,
    is_channels_last: bool,
    make_model: Any,
    assert_same_as_onnxruntime: Check,
) -> None:
    options = {"mode": "nearest", "coordinate_transformation_mode": mode, "nearest_mode": rounding}
    nodes = [
        *([helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4)] if is_channels_last else []),
        helper.make_node("Resize", ["c" if is_channels_last else "x", "", "s"], ["r"], **options),
        helper.make_node("Relu", ["r"], ["y"]),
    ]
    weights = {"s": np.array([1, 1, *factors], "float32"), **({"w": normal(6, 6, 3, 3)} if is_channels_last else {})}
    path = make_model(nodes, [("x", ["n", 6, "h", "width"])], ["y"], weights)
    model = assert_same_as_onnxruntime(path, *({"x": normal(2, 6, high, 9)} for high in (1, 8)))
    assert any("repeat" in name for name, _ in model.schedules) == is_repeated


@pytest.mark.parametrize("rounding", ["round_prefer_floor", "round_prefer_ceil"])
def test_what_lies_between_two_neighbours_is_resized_as_onnx_runtime_does(
    rounding: str, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    attributes = {"coordinate_transformation_mode": "align_corners", "mode": "nearest", "nearest_mode": rounding}
    # 27 * 29 / 54 is 14.5; 27 * (29 / 54) is not.
    resize = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], **attributes)
    path = make_model([resize], [("x", [1, 1, 30, 23])], ["y"], {"sizes": np.array([1, 1, 55, 22])})
    assert_same_as_onnxruntime(path, {"x": normal(1, 1, 30, 23)})


@pytest.mark.parametrize(
    ("coordinates", "rounding", "size", "scale"),
    [("asymmetric", "floor", 30, 1.7), ("asymmetric", "ceil", 13, 3.1), ("half_pixel", "floor", 4, 0.6)],
)
def test_positions_of_nearest_neighbours_are_rounded_as_onnx_runtime_does(
    coordinates: str, rounding: str, size: int, scale: float, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    attributes = {"coordinate_transformation_mode": coordinates, "mode": "nearest", "nearest_mode": rounding}
    resize = helper.make_node("Resize", ["x", "", "scales"], ["y"], **attributes)
    path = make_model([resize], [("x", [1, 1, 2, size])], ["y"], {"scales": np.array([1, 1, 1, scale], "float32")})
    assert_same_as_onnxruntime(path, {"x": normal(1, 1, 2, size)})


@pytest.mark.parametrize(("dtype", "high", "width"), [("uint8", 29, 31), ("uint8", "h", "w"), ("int32", 29, "w")])
def test_integers_are_interpolated_by_the_sums_of_onnx_runtime(
    dtype: str, high: Any, width: Any, make_model: Any, native: Target, run_built: Any
) -> None:
    # A sum that is a whole number is not to be rounded to one just below it.
    number = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    resize = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], mode="linear")
    sizes = {"sizes": np.array([1, 3, 50, 43])}
    path = make_model([resize], [("x", [1, 3, high, width], number)], [("y", None, number)], sizes)
    x = np.random.default_rng(2).integers(0, 256, (1, 3, 29, 31)).astype(dtype)
    (expected,) = open_session(path).run(None, {"x": x})
    assert np.array_equal(run_built(build(import_onnx(path), native), x)[0], expected)


def test_antialiased_images_are_sums_of_the_elements_that_have_weight(assert_all_same: Check) -> None:
    cases = []
    # Of 230 elements for two results, too many have weight: a product takes all of them.
    for mode, size, result in (
        ("linear", (40, 30), (11, 17)),
        ("cubic", (30, 23), (16, 40)),
        ("cubic", (9, 230), (5, 2)),
    ):
        resize = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], mode=mode, antialias=1)
        image = (1, 3, *size)
        cases.append((([resize], [("x", image)], ["y"], {"sizes": np.array([1, 3, *result])}), {"x": normal(*image)}))
    region = {"roi": np.array([0, 0, 0.1, 0.2, 1, 1, 0.9, 0.7], "float32"), "sizes": np.array([1, 3, 7, 9])}
    form = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"}
    cut = helper.make_node("Resize", ["x", "roi", "", "sizes"], ["y"], **form)
    cases.append((([cut], [("x", (1, 3, 12, 10))], ["y"], region), {"x": normal(1, 3, 12, 10)}))
    assert rule_counts(assert_all_same(cases))["resize"] == 2 * len(cases) - 1


@pytest.mark.parametrize("width", [5, "w"])
def test_an_axis_whose_size_stays_is_not_antialiased(
    width: Any, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    resize = helper.make_node("Resize", ["x", "", "s"], ["y"], mode="cubic", antialias=1, exclude_outside=1)
    weights = {"s": np.array([1, 1, 0.6, 1.1], "float32")}
    path = make_model([resize], [("x", [1, 2, 7, width])], ["y"], weights)
    assert_same_as_onnxruntime(path, *({"x": normal(1, 2, 7, size)} for size in ([5] if width == 5 else [5, 14])))


@pytest.mark.parametrize("opset", [18, 19])
def test_padding_by_the_other_end_is_taken_in_the_opset_that_torch_writes_it_in(
    opset: int, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    pad = helper.make_node("Pad", ["x", "widths"], ["y"], mode="wrap")
    widths = {"widths": np.array([0, 0, 1, 2, 0, 0, 2, 1])}
    path = make_model([pad], [("x", ["n", 2, "h", 5])], ["y"], widths, opset=opset)
    assert_same_as_onnxruntime(path, {"x": normal(1, 2, 4, 5)}, {"x": normal(2, 2, 6, 5)})


# Attributes of a Resize, its constant scales, else the name of the input that has scales or sizes, and its rank.
_FREE_RESIZES: list[tuple[dict[str, Any], list[float] | str, int]] = [
    ({"mode": "linear"}, [1, 1, 1.5, 0.75], 4),
    ({"mode": "linear", "coordinate_transformation_mode": "asymmetric"}, [1, 1, 1.7, 2.3], 4),
    ({"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}, [1, 1, 0.3, 1], 4),
    ({"mode": "linear", "coordinate_transformation_mode": "align_corners"}, [1, 1, 1.25], 3),
    ({"mode": "linear"}, [1, 1, 2.0], 3),
    ({"mode": "linear"}, [1, 1, 1, 2.0, 2.0], 5),
    ({"mode": "nearest", "coordinate_transformation_mode": "align_corners"}, [1, 1, 2, 2], 4),
    ({"mode": "nearest", "nearest_mode": "ceil"}, [1, 1, 1.3, 0.6], 4),
    ({"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}, [1, 1, 1.5], 3),
    ({"mode": "nearest", "coordinate_transformation_mode": "tf_half_pixel_for_nn"}, [1, 1, 1.5, 1.5], 4),
    ({"mode": "nearest", "nearest_mode": "round_prefer_ceil"}, [2, 1, 3.5, 1], 4),
    ({"mode": "cubic"}, [1, 1, 1.5, 0.75], 4),
    ({"mode": "cubic", "exclude_outside": 1, "cubic_coeff_a": -0.5}, [1, 1, 1.3, 1.7], 4),
    ({"mode": "linear"}, "sizes", 4),
    ({"mode": "nearest", "nearest_mode": "floor"}, "sizes", 4),
    ({"mode": "cubic", "coordinate_transformation_mode": "align_corners"}, "sizes", 4),
    ({"mode": "linear"}, "scales", 4),
    ({"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}, "scales", 4),
    ({"mode": "linear", "antialias": 1, "exclude_outside": 1}, "sizes", 4),
    ({"mode": "cubic", "antialias": 1, "exclude_outside": 1}, "sizes", 4),
    ({"mode": "cubic", "antialias": 1, "exclude_outside": 1}, [1, 1, 0.4, 0.75], 4),
    ({"mode": "linear", "antialias": 1, "exclude_outside": 1}, "scales", 4),
]


def test_resizes_of_free_and_computed_sizes_equal_onnx_runtime(assert_all_same: Check) -> None:
    cases = []
    # In a normal run each mode, rank and way to give the size once.
    some = [_FREE_RESIZES[place] for place in (1, 5, 6, 12, 14, 16, 19)]
    for attributes, scales, rank in choose(normal=some, long=_FREE_RESIZES):
        free = ["n", 2, "h", "w", "d"][:rank]
        inputs: list[tuple[Any, ...]] = [("x", free)]
        given, weights = ["x", "", "s"], {}
        images = [normal(*shape[:rank]) for shape in ((1, 2, 4, 7, 3), (2, 2, 9, 5, 4))]
        feeds = [{"x": image} for image in images]
        if scales == "sizes":
            inputs, given = [*inputs, ("s", [4], TensorProto.INT64)], ["x", "", "", "s"]
            for feed, size in zip(feeds, ((3, 8), (1, 5)), strict=True):
                feed["s"] = np.array([*feed["x"].shape[:2], *size])
        elif scales == "scales":
            inputs = [*inputs, ("s", [4])]
            for feed, factors in zip(feeds, ((1.7, 0.6), (2.0, 1.1)), strict=True):
                feed["s"] = np.array([1, 1, *factors], "float32")
        else:
            weights = {"s": np.array(scales, "float32")}
        cases.append((([helper.make_node("Resize", given, ["y"], **attributes)], inputs, ["y"], weights), *feeds))
    assert_all_same(cases)


def test_slices_padding_tiles_and_reductions_follow_the_channels(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes, weights = _between(
        [
            helper.make_node("Slice", ["a", "begin", "end", "axes"], ["c"]),
            helper.make_node("Pad", ["c", "pads"], ["d"]),
            helper.make_node("Tile", ["d", "times"], ["e"]),
            helper.make_node("ReduceMean", ["e", "image"], ["f"]),
            helper.make_node("Mul", ["e", "f"], ["g"]),
            helper.make_node("Softmax", ["g"], ["h"], axis=1),
            helper.make_node("ReduceMax", ["h", "high"], ["i"], keepdims=0),
            helper.make_node("Transpose", ["i"], ["j"], perm=[2, 0, 1]),
            helper.make_node("Unsqueeze", ["j", "high"], ["b"]),
        ],
        20,
    )
    values = {
        "begin": np.array([1, 3]),
        "end": np.array([7, 17]),
        "axes": np.array([3, 1]),
        "pads": np.array([0, 1, 0, 2, 0, 1, 1, 0]),
        "times": np.array([1, 2, 1, 2]),
        "image": np.array([2, 3]),
        "high": np.array([2]),
    }
    path = make_model(nodes, [("x", [2, 3, 6, 9])], ["y"], {**weights, **values})
    assert_same_as_onnxruntime(path, {"x": normal(2, 3, 6, 9)})


def test_a_part_of_a_transposed_free_line_is_the_only_output(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("Transpose", ["x"], ["a"], perm=[0, 2, 1]),
        helper.make_node("Slice", ["a", "begin", "end", "axes"], ["y"]),
    ]
    bounds = {"begin": np.array([1]), "end": np.array([-1]), "axes": np.array([1])}
    path = make_model(nodes, [("x", [3, 4, "c"])], ["y"], bounds)
    assert_same_as_onnxruntime(path, {"x": normal(3, 4, 1)}, {"x": normal(3, 4, 6)})


def test_a_block_of_norm_and_dense_layers_needs_no_transposes(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes, weights = _between(
        [
            helper.make_node("Conv", ["a", "v"], ["c"], pads=[3] * 4, group=24),
            helper.make_node("Transpose", ["c"], ["d"], perm=[0, 2, 3, 1]),
            helper.make_node("LayerNormalization", ["d", "s", "t"], ["e"], axis=-1),
            helper.make_node("MatMul", ["e", "m"], ["f"]),
            helper.make_node("Transpose", ["f"], ["g"], perm=[0, 3, 1, 2]),
            helper.make_node("Add", ["g", "a"], ["b"]),
        ],
        24,
    )
    values = {"v": normal(24, 1, 7, 7), "s": normal(24), "t": normal(24), "m": normal(24, 24)}
    path = make_model(nodes, [("x", ["batch", 3, 9, 8])], ["y"], {**weights, **values})
    model = assert_same_as_onnxruntime(path, {"x": normal(1, 3, 9, 8)}, {"x": normal(3, 3, 9, 8)})
    assert _transposes(model) <= 2  # at both ends


def test_sums_of_all_pairs_are_not_transposed_in_the_place_of_a_vector(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("Transpose", ["b"], ["row"], perm=[0, 2, 1]),
        helper.make_node("Add", ["a", "row"], ["pairs"]),
        helper.make_node("Softmax", ["pairs"], ["y"], axis=-1),
    ]
    path = make_model(nodes, [("a", ["batch", "n", 1]), ("b", ["batch", "n", 1])], ["y"])
    feeds = [{"a": normal(*shape), "b": normal(*shape, seed=1)} for shape in ((1, 9, 1), (2, 40, 1))]
    # A softmax over the columns of the pairs would be computed element by element.
    assert rule_counts(assert_same_as_onnxruntime(path, *feeds)) == {"fallback": 1, "free_softmax": 1}


def test_a_flattened_image_has_the_order_of_the_model(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("Flatten", ["a"], ["f"]),
        helper.make_node("MatMul", ["f", "m"], ["y"]),
    ]
    path = make_model(nodes, [("x", ["batch", 3, 4, 5])], ["y"], {"w": normal(7, 3, 1, 1), "m": normal(140, 6)})
    assert_same_as_onnxruntime(path, {"x": normal(1, 3, 4, 5)}, {"x": normal(2, 3, 4, 5)})


@pytest.mark.few(2)
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_slices_written_to_computed_places_equal_onnx_runtime(reduction: str, assert_all_same: Check) -> None:
    cases = []
    # Long rows, short ones, and single elements at places of one number and of three.
    forms: list[tuple[int, tuple[int, ...]]] = [(1, (9, 70)), (2, (4, 5, 3)), (1, (40,)), (3, (2, 3, 4))]
    is_every_form = is_long() or reduction in ("none", "add")
    for depth, shape in forms if is_every_form else forms[::3]:
        node = helper.make_node("ScatterND", ["x", "i", "u"], ["y"], reduction=reduction)
        free = [f"n{place}" for place in range(len(shape))]
        inputs = [("x", free), ("i", ["count", depth], TensorProto.INT64), ("u", ["count", *free[depth:]])]
        places = np.array(list(np.ndindex(*shape[:depth])))
        # Of two writes to one place it is not said which one is last; a sum has the order of the indices in both.
        places = places[::2] if reduction == "none" else places[[0, 1, 0, 1, 1]]
        feed = {"x": normal(*shape), "i": places, "u": normal(len(places), *shape[depth:], seed=1)}
        cases.append((([node], inputs, ["y"], {}), feed))
    model = assert_all_same(cases)
    assert rule_counts(model)["scatter"] == len(cases)


@pytest.mark.few(2)
@pytest.mark.parametrize("width", [9, 12, 17, 64, 1290])
def test_repeated_rows_are_copied_run_by_run(
    width: int, make_model: Any, assert_same_as_onnxruntime: Check, target: Target
) -> None:
    node = helper.make_node("Tile", ["x", "repeats"], ["y"])
    path = make_model([node], [("x", ["n", width])], ["y"], {"repeats": np.array([1, 5])})
    assert_same_as_onnxruntime(path, {"x": normal(3, width)})
    (workload,) = workloads(lower(import_onnx(path), target))
    # A loop over the runs of a row: no element asks where in its run it is.
    assert "T.int64(5)" in schedule(workload.func, machine(target))[0].script()


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "float64", "uint16"])
def test_elements_written_to_computed_places_equal_onnx_runtime(dtype: str, assert_all_same: Check) -> None:
    cases = []
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    reductions = ("none",) if dtype == "bool" else ("none", "add", "mul", "max", "min")
    for place, (axis, shape) in enumerate(((1, (9, 7)), (0, (5, 3)), (1, (2, 4, 5)), (0, (40,)), (2, (3, 2, 6)))):
        reduction = reductions[place % len(reductions)]
        node = helper.make_node("ScatterElements", ["x", "i", "u"], ["y"], axis=axis, reduction=reduction)
        sizes = [*shape[:axis], shape[axis] - 1, *shape[axis + 1 :]]
        order = np.argsort(normal(*shape), axis=axis).take(range(shape[axis] - 1), axis)
        feed = {"x": normal(*shape), "u": normal(*sizes, seed=1)}
        feed = {**{name: (9 * values).astype(dtype) for name, values in feed.items()}, "i": order - shape[axis]}
        free = [f"n{place}" for place in range(len(shape))]
        own = [*free[:axis], "count", *free[axis + 1 :]]
        for data, few in ((shape, sizes), (free, own)):
            inputs = [("x", data, element), ("i", few, TensorProto.INT64), ("u", few, element)]
            cases.append((([node], inputs, [("y", None, element)], {}), feed))
    model = assert_all_same(cases)
    assert rule_counts(model)["scatter"] == len(cases)


@pytest.mark.few(2)
@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
def test_running_sums_of_slices_equal_onnx_runtime(exclusive: int, reverse: int, assert_all_same: Check) -> None:
    cases = []
    for axis, shape in ((1, (2, 9, 70)), (0, (5, 3)), (-2, (2, 3, 4, 16)), (0, (40, 2, 16))):
        node = helper.make_node("CumSum", ["x", "axis"], ["y"], exclusive=exclusive, reverse=reverse)
        free = [f"n{place}" for place in range(len(shape))]
        # A normal run has free sizes for two of the four pairs, and known ones for the others.
        for own in choose(normal=[free if reverse == exclusive else shape], long=[free, shape]):
            cases.append((([node], [("x", own)], ["y"], {"axis": np.array(axis)}), {"x": normal(*shape)}))
    model = assert_all_same(cases)
    assert rule_counts(model)["scan"] == len(cases)


@pytest.mark.parametrize("dtype", ["int64", "int32", "float64"])
def test_running_sums_of_other_numbers_and_of_lines_are_kernels(dtype: str, assert_all_same: Check) -> None:
    cases = []
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    for place, (axis, shape) in enumerate(((-1, (3, 50)), (0, (7, 1100)), (1, (2, 9, 5)), (0, (33,)))):
        node = helper.make_node("CumSum", ["x", "axis"], ["y"], exclusive=place % 2)
        free = [f"n{place}" for place in range(len(shape))]
        feed = {"x": (normal(*shape) * 9).astype(dtype)}
        cases += [
            (([node], [("x", own, element)], [("y", None, element)], {"axis": np.array(axis)}), feed)
            for own in (shape, free)
        ]
    model = assert_all_same(cases)
    assert rule_counts(model)["scan"] == len(cases)


@pytest.mark.parametrize("opset", [11, 18])
def test_hardmax_of_free_dimensions_is_that_of_onnx_runtime(
    opset: int, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("Hardmax", ["x"], [f"y{axis}"], axis=axis)
        for axis in choose(normal=(-1, 1), long=(-1, 0, 1, 2))
    ]
    outputs = [(node.output[0], None) for node in nodes]
    path = make_model(nodes, [("x", ["n", "m", 4])], [name for name, _ in outputs], opset=opset)
    assert_same_as_onnxruntime(path, {"x": normal(2, 3, 4)}, {"x": np.ones((3, 2, 4), "float32")})


def test_updates_of_fixed_size_are_scattered_into_free_dimensions(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    node = helper.make_node("ScatterND", ["x", "places", "updates"], ["y"])
    weights = {"places": np.array([[0], [-1]]), "updates": normal(2, 3)}
    path = make_model([node], [("x", ["n", "m"])], ["y"], weights)
    model = assert_same_as_onnxruntime(path, {"x": normal(4, 3)})
    with pytest.raises(Exception, match="shape"):
        run_in_memory(model, [[normal(4, 2)]])


def test_sums_and_products_along_an_axis_that_is_an_input(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes = [
        helper.make_node("CumSum", ["x", "axis"], ["a"]),
        helper.make_node("CumSum", ["x", "axis"], ["b"], reverse=1, exclusive=1),
    ]
    path = make_model(nodes, [("x", [2, "n", 4]), ("axis", [], TensorProto.INT32)], ["a", "b"])
    x = normal(2, 3, 4)
    assert_same_as_onnxruntime(path, *({"x": x, "axis": np.array(axis, "int32")} for axis in (0, 1, 2, -1, -3)))


def test_a_concatenation_along_a_free_last_dimension_reads_each_part(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("Concat", ["x", "part"], ["a"], axis=1),
        helper.make_node("Concat", ["part", "x"], ["b"], axis=1),
    ]
    path = make_model(nodes, [("x", [3, "m"])], ["a", "b"], {"part": normal(3, 2)})
    assert_same_as_onnxruntime(path, *({"x": normal(3, size)} for size in (1, 3, 9, 20)))


# Operators that look up indices, with their other operands.
_LOOKUPS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "Gather": (["x", "i"], {}),
    "GatherElements": (["x", "i"], {}),
    "GatherND": (["x", "i"], {}),
    "ScatterElements": (["x", "i", "few"], {}),
    "ScatterND": (["x", "i", "some"], {}),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", [(4, 3), ("n", 3)], ids=str)
def test_an_index_outside_of_the_data_ends_the_run(
    shape: tuple[Any, ...], make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    """As in ONNX Runtime: the least and the largest index run, and one that is beyond them is an error."""
    for operator, (operands, attributes) in _LOOKUPS.items():
        path = make_model(
            [helper.make_node(operator, operands, ["y"], **attributes)],
            [("x", shape), ("i", [2, 2], TensorProto.INT64)],
            ["y"],
            {"few": normal(2, 2), "some": normal(2)},
        )
        # The indices of pairs are of rows and columns.
        low, high = ([-4, -3], [3, 2]) if operator.endswith("ND") else ([-4, -4], [3, 3])
        low, high = np.array(low), np.array(high)
        x, within = normal(4, 3), np.array([low, high])
        model = assert_same_as_onnxruntime(path, {"x": x, "i": within})
        session = open_session(path)
        for place in np.ndindex(2, 2):
            outside = within.copy()
            outside[place] += -1 if place[0] == 0 else 1
            with pytest.raises(Exception, match="ONNXRuntimeError"):
                session.run(None, {"x": x, "i": outside})
            with pytest.raises(RuntimeError, match="index error: an index is "):
                run_in_memory(model, [[x, outside]])


@pytest.mark.parametrize(
    ("nodes", "is_checked"),
    [
        ([("ArgMax", ["t"], {"axis": 1, "keepdims": 0})], False),
        ([("Clip", ["i", "zero", "three"], {})], False),
        ([("Clip", ["i", "zero", "four"], {})], True),
        ([("Max", ["i", "zero"], {}), ("Min", ["_0", "three"], {})], False),
        ([("Less", ["i", "zero"], {}), ("Where", ["_0", "zero", "three"], {})], False),
        ([("Cast", ["b"], {"to": TensorProto.INT64}), ("Add", ["_0", "two"], {})], False),
        ([("Cast", ["b"], {"to": TensorProto.INT64}), ("Add", ["_0", "three"], {})], True),
        ([("Abs", ["i"], {})], True),
    ],
    ids=str,
)
def test_indices_that_are_surely_within_the_data_are_not_checked(
    nodes: list[tuple[str, list[str], dict[str, Any]]],
    is_checked: bool,
    make_model: Any,
    assert_same_as_onnxruntime: Check,
) -> None:
    chain = [
        helper.make_node(operator, operands, [f"_{place}"], **attributes)
        for place, (operator, operands, attributes) in enumerate(nodes)
    ]
    chain.append(helper.make_node("Gather", ["x", chain[-1].output[0]], ["y"]))
    inputs = [("x", [4, 3]), ("i", ["n"], TensorProto.INT64), ("b", ["n"], TensorProto.BOOL), ("t", ["n", 4])]
    read = {name for node in chain for name in node.input}
    weights = {name: np.array(value) for name, value in {"zero": 0, "two": 2, "three": 3, "four": 4}.items()}
    path = make_model(chain, [item for item in inputs if item[0] in read], ["y"], weights)
    feeds = {"x": normal(4, 3), "i": np.array([0, 2, 3]), "b": np.array([True, False, False]), "t": normal(3, 4)}
    # Three and one are four, which the data lacks.
    feeds["b"] &= nodes[-1][1][-1] == "two"
    model = assert_same_as_onnxruntime(path, {name: feeds[name] for name in feeds if name in read})
    assert ("indices" in rule_counts(model)) == is_checked


def _chain(make_model: Any, steps: int) -> Path:
    """A Gather whose indices are the last of a chain of additions, with minima between that keep these apart."""
    nodes = [
        helper.make_node("Min" if step % 2 else "Add", [f"i{step}", "most" if step % 2 else "one"], [f"i{step + 1}"])
        for step in range(steps)
    ]
    nodes.append(helper.make_node("Gather", ["x", f"i{steps}"], ["y"]))
    inputs = [("x", [steps, 3]), ("i0", ["n"], TensorProto.INT64)]
    return Path(make_model(nodes, inputs, ["y"], {"one": np.array(1), "most": np.array(steps)}))


def test_a_chain_of_indices_may_be_longer_than_pythons_stack(make_model: Any) -> None:
    assert import_onnx(_chain(make_model, sys.getrecursionlimit() // 2)).outputs


def test_indices_of_a_long_chain_are_checked(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    """Bounds of indices are sought for 64 tensors."""
    feed = {"x": normal(70, 3), "i0": np.array([0, 7, 30])}
    model = assert_same_as_onnxruntime(_chain(make_model, 70), feed)
    assert rule_counts(model)["indices"] == 1


def test_a_constant_index_along_a_free_dimension_is_checked(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes = [
        helper.make_node("Gather", ["x", "last"], ["a"]),
        helper.make_node("Gather", ["x", "some"], ["b"]),
        helper.make_node("GatherElements", ["x", "some"], ["c"]),
    ]
    weights = {"last": np.array(-1), "some": np.array([[2, 0], [-1, -3]])}
    path = make_model(nodes, [("x", ["n", 2])], ["a", "b", "c"], weights)
    model = assert_same_as_onnxruntime(path, {"x": normal(3, 2)}, {"x": normal(5, 2)})
    with pytest.raises(Exception, match="ONNXRuntimeError"):
        open_session(path).run(None, {"x": normal(2, 2)})
    with pytest.raises(RuntimeError, match="match_cast"):
        run_in_memory(model, [[normal(2, 2)]])


def test_constant_indices_of_known_data_keep_their_rank(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    weights = {"scalar": np.array(-1), "one": np.array([-1]), "rows": np.array([[-1, 0], [1, -3]])}
    nodes = [
        helper.make_node("Gather", ["x", name], [f"{name}_{axis}"], axis=axis) for name in weights for axis in (0, 1)
    ]
    path = make_model(nodes, [("x", [3, 4, 2])], [node.output[0] for node in nodes], weights)
    assert_same_as_onnxruntime(path, {"x": normal(3, 4, 2)})


def test_a_sequence_length_beyond_the_data_is_that_of_the_data(
    make_model: Any, assert_same_as_onnxruntime: Check, run_built: Any
) -> None:
    node = helper.make_node("ReverseSequence", ["x", "lengths"], ["y"])
    path = make_model([node], [("x", [4, 3]), ("lengths", [3], TensorProto.INT64)], ["y"])
    x = normal(4, 3)
    model = assert_same_as_onnxruntime(path, {"x": x, "lengths": np.array([1, 4, 2])})
    (result,) = run_built(model, x, np.array([1, 10**7, 2]))
    np.testing.assert_array_equal(result[:, 1], x[::-1, 1])


@pytest.mark.parametrize("operator", ["Gather", "GatherElements"])
@pytest.mark.parametrize("index", [4, -5])
def test_a_constant_index_outside_of_the_data_is_refused(make_model: Any, operator: str, index: int) -> None:
    node = helper.make_node(operator, ["x", "rows"], ["y"], "pick")
    path = make_model([node], [("x", [4, 3])], ["y"], {"rows": np.array([[0, index, 1]])})
    with pytest.raises(UnsupportedOperatorError, match=rf"{operator}, node 'pick'.*an index outside of the data"):
        import_onnx(path)


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("shape", [(4, 5, 3), ("batch", "high", 3)])
def test_places_of_elements_are_found_without_functions_of_python(
    shape: tuple[int | str, ...], make_model: Any, assert_same_as_onnxruntime: Check, target: Target
) -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["places"]),
        helper.make_node("Cast", ["places"], ["found"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["places"], ["rows"]),
        helper.make_node("GatherND", ["x", "rows"], ["values"]),
        helper.make_node("Compress", ["x", "kept"], ["part"], axis=0),
        helper.make_node("Compress", ["x", "kept"], ["few"]),
        helper.make_node("Unique", ["x"], ["distinct"], sorted=0),
    ]
    inputs = [("x", shape), ("kept", ["kept"], TensorProto.BOOL)]
    path = make_model(nodes, inputs, ["found", "values", "part", "few", "distinct"])
    x, kept = normal(4, 5, 3), np.array([False, True, False, True])
    assert_same_as_onnxruntime(path, {"x": np.where(x > 0, x, 0), "kept": kept}, {"x": 0 * x, "kept": kept[:1]})
    assert "relax.run." not in lower(import_onnx(path), target).script()


def test_places_of_elements_are_found_in_one_pass(assert_all_same: Check) -> None:
    cases = []
    for dtype in ("float32", "int64", "uint8", "bool"):
        element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        for size in (70, 0):
            x = (np.arange(size * 3).reshape(size, 3) % 7 == 2).astype(dtype)
            node = helper.make_node("NonZero", ["x"], ["y"])
            cases.append((([node], [("x", ["n", 3], element)], [("y", [2, None], TensorProto.INT64)]), {"x": x}))
    # The places in the flat data, and their two coordinates.
    assert set(rule_counts(assert_all_same(cases))) == {"none", "fallback"}


@pytest.mark.parametrize("shape", [(8000, 3), ("rows", "columns")], ids=["known", "free"])
def test_distinct_rows_take_no_comparison_of_all_pairs(
    shape: tuple[int | str, ...], make_model: Any, assert_same_as_onnxruntime: Check, native: Target
) -> None:
    numbers = ["first", "places", "counts"]
    node = helper.make_node("Unique", ["x"], ["distinct", *numbers], axis=0)
    outputs = [("distinct", [None, None]), *((name, [None], TensorProto.INT64) for name in numbers)]
    path = make_model([node], [("x", shape)], outputs)
    x = np.round(normal(8000, 3))
    assert_same_as_onnxruntime(path, {"x": x})
    loaded = build(import_onnx(path), native).load()
    seconds = []
    for run in (lambda: loaded.run(x), lambda: np.unique(x, axis=0, return_inverse=True)):
        started = time.process_time()
        run()
        seconds.append(time.process_time() - started)
    assert seconds[0] < 4 * seconds[1]


def test_repeated_elements_are_read_backwards_and_from_any_place(assert_all_same: Check) -> None:
    def repeat(count: int, is_tiled: bool) -> tuple[list[Any], dict[str, Any]]:
        if is_tiled:
            return [helper.make_node("Tile", ["x", "times"], ["all"])], {"times": np.array([1, count])}
        nodes = [
            helper.make_node("Unsqueeze", ["x", "last"], ["columns"]),
            helper.make_node("Expand", ["columns", "times"], ["copies"]),
            helper.make_node("Reshape", ["copies", "rows"], ["all"]),
        ]
        return nodes, {"last": np.array([2]), "times": np.array([1, 1, count]), "rows": np.array([0, -1])}

    cases = []
    for (batch, count), is_tiled in itertools.product([(4, 3), ("batch", 2)], (False, True)):
        nodes, weights = repeat(count, is_tiled)
        for start, end, step in ((-1, -99, -1), (-1, 0, -1), (-2, -99, -3), (1, 99, 1), (5, 99, 2)):
            bounds = {name: np.array([value]) for name, value in zip("seap", (start, end, 1, step), strict=True)}
            part = helper.make_node("Slice", ["all", *bounds], ["part"])
            again = helper.make_node("Tile", ["part", "twice"], ["y"])
            weights |= bounds | {"twice": np.array([1, 2])}
            model = [[*nodes, part, again], [("x", [batch, 4])], ["part", "y"], dict(weights)]
            cases.append((model, {"x": normal(4, 4)}))
    assert_all_same(cases)


@pytest.mark.parametrize(
    ("coordinates", "rounding", "sizes"),
    [("half_pixel", "round_prefer_floor", (16, 28)), ("asymmetric", "floor", (20, 12))],
)
def test_nearest_neighbours_at_ties_are_those_of_onnx_runtime_in_every_function(
    coordinates: str, rounding: str, sizes: tuple[int, int], make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    """A place between two neighbours took the other one where the resize was part of a larger function."""
    resize = {"mode": "nearest", "coordinate_transformation_mode": coordinates, "nearest_mode": rounding}
    nodes = [
        helper.make_node("Resize", ["x", "", "", "sizes"], ["r"], **resize),
        helper.make_node("Conv", ["r", "w"], ["y"]),
    ]
    before, after = sizes
    weights = {"sizes": np.array([1, 8, 3, after]), "w": normal(16, 8, 1, 1)}
    path = make_model(nodes, [("x", [1, 8, 3, before])], ["y"], weights)
    assert_same_as_onnxruntime(path, {"x": normal(1, 8, 3, before)})
