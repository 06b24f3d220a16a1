import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import helper
from tvm.tirx import IntImm, Var

from support import scale
from support.arrays import normal, onnxruntime_outputs
from support.builds import rule_counts
from tvmflow.compiler import BuildOptions, CompiledModel, build, import_onnx, lower, workloads
from tvmflow.hardware.target import Target, explain_missing_unit

Check = Callable[..., CompiledModel]


# channels in and out, groups, kernel, stride, padding, output padding, dilation
_TRANSPOSED = [
    (24, 19, 1, (2, 2), (2, 2), (0, 0, 0, 0), (0, 0), (1, 1)),
    (3, 24, 1, (4, 4), (2, 2), (1, 1, 1, 1), (0, 0), (1, 1)),
    (20, 70, 1, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), (1, 1)),
    (6, 9, 3, (3, 2), (2, 3), (0, 1, 1, 0), (0, 2), (1, 1)),
    (8, 8, 8, (4, 4), (2, 2), (1, 1, 1, 1), (0, 0), (1, 1)),
    (5, 7, 1, (3, 3), (1, 1), (1, 1, 1, 1), (0, 0), (1, 1)),
    (4, 6, 1, (3, 3), (2, 2), (1, 2, 0, 1), (0, 1), (2, 3)),
    (4, 6, 1, (1, 2), (3, 3), (0, 0, 0, 0), (1, 0), (1, 1)),
    (4, 6, 1, (5, 5), (2, 2), (4, 4, 4, 4), (1, 1), (1, 1)),
]


def test_transposed_convolutions_equal_onnx_runtime(assert_all_same: Check) -> None:
    cases = []
    for channels, out, groups, kernel, strides, pads, more, dilations in _TRANSPOSED[:: scale.count(normal=3, long=1)]:
        geometry = {"strides": strides, "pads": pads, "output_padding": more, "dilations": dilations}
        nodes = [
            helper.make_node("ConvTranspose", ["x", "w", "b"], ["c"], group=groups, **geometry),
            helper.make_node("Relu", ["c"], ["y"]),
        ]
        weights = {"w": normal(channels, out // groups, *kernel), "b": normal(out)}
        cases.append(((nodes, [("x", [2, channels, 9, 7])], ["y"], weights), {"x": normal(2, channels, 9, 7)}))
    model = assert_all_same(cases)
    assert not [name for name, rule in model.schedules if "conv2d" in name and rule == "fallback"]


def test_a_transposed_convolution_of_symbolic_batch_and_size_equals_onnx_runtime(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["a"]),
        helper.make_node("ConvTranspose", ["a", "w"], ["y"], strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 0]),
    ]
    path = make_model(
        nodes, [("x", ["batch", 3, "high", "wide"])], ["y"], {"v": normal(20, 3, 1, 1), "w": normal(20, 9, 3, 3)}
    )
    assert_same_as_onnxruntime(path, {"x": normal(1, 3, 5, 8)}, {"x": normal(3, 3, 6, 4)})


# kernel, stride, padding, output padding
_CUT = [(3, 2, 1, 0), (4, 3, 1, 0), (3, 2, 0, 0), (7, 4, 3, 1), (5, 3, 1, 1), (2, 2, 1, 0)]


def test_a_transposed_convolution_of_free_size_whose_result_is_no_multiple_of_it_is_split(
    assert_all_same: Check,
) -> None:
    cases = []
    for kernel, stride, pad, more in _CUT[:: scale.count(normal=3, long=1)]:
        geometry = {"strides": [stride] * 2, "pads": [pad] * 4, "output_padding": [more] * 2}
        nodes = [
            helper.make_node("ConvTranspose", ["x", "w", "b"], ["a"], **geometry),
            helper.make_node("Relu", ["a"], ["c"]),
            helper.make_node("Conv", ["c", "v"], ["y"], pads=[1] * 4),
        ]
        weights = {"w": normal(20, 19, kernel, kernel), "b": normal(19), "v": normal(5, 19, 3, 3)}
        feeds = [{"x": normal(*size)} for size in ((1, 20, 9, 7), (3, 20, 2, 5))]
        cases.append(((nodes, [("x", ["n", 20, "h", "w"])], ["y"], weights), *feeds))
    model = assert_all_same(cases)
    assert not [name for name, rule in model.schedules if "conv2d" in name and rule == "fallback"]


def test_many_phases_that_read_the_same_inputs_are_one_convolution(assert_all_same: Check) -> None:
    cases = []
    # channels, groups, kernel, stride, padding, output padding
    forms = [(16, 16, (8, 8), (4, 4), (2, 2, 2, 2), (1, 0)), (6, 1, (6, 3), (3, 3), (1, 0, 2, 1), (2, 0))]
    for channels, groups, kernel, strides, pads, more in forms:
        geometry = {"strides": strides, "pads": pads, "output_padding": more}
        nodes = [
            helper.make_node("ConvTranspose", ["x", "w", "b"], ["c"], group=groups, **geometry),
            helper.make_node("Sigmoid", ["c"], ["y"]),
        ]
        weights = {"w": normal(channels, 32 // groups, *kernel), "b": normal(32)}
        for sizes in ((2, 5, 4), ("n", "high", "wide")):
            shape = [sizes[0], channels, *sizes[1:]]
            cases.append(((nodes, [("x", shape)], ["y"], weights), {"x": normal(2, channels, 5, 4)}))
    rules = rule_counts(assert_all_same(cases))
    assert rules["conv2d"] == len(cases)
    assert not rules["depthwise"]


def test_an_activation_of_joined_images_that_are_cut_is_a_function_of_its_own(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    """The code of one function took minutes: TVM substitutes the long indices of all parts many times."""
    nodes = [
        helper.make_node("ConvTranspose", ["x", "w"], ["a"], strides=[2, 2], pads=[1] * 4),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("Sigmoid", ["c"], ["y"]),
    ]
    path = make_model(nodes, [("x", ["n", 8, "h", "w"])], ["y"], {"w": normal(8, 8, 3, 3), "b": normal(1, 8, 1, 1)})
    model = assert_same_as_onnxruntime(path, {"x": normal(1, 8, 5, 6)}, {"x": normal(2, 8, 1, 3)})
    assert [name for name, _ in model.schedules if name.startswith("sigmoid")]


def test_a_transposed_convolution_of_one_dimension_equals_onnx_runtime(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    node = helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], strides=[3], pads=[2, 1], output_padding=[1])
    weights = {"w": normal(20, 19, 5), "b": normal(19)}
    path = make_model([node], [("x", ["batch", 20, 33])], ["y"], weights)
    model = assert_same_as_onnxruntime(path, {"x": normal(1, 20, 33)}, {"x": normal(4, 20, 33)})
    assert rule_counts(model)["conv2d"] + rule_counts(model)["rows"] >= 1


def test_a_transposed_convolution_of_a_free_line_whose_border_is_cut_off_equals_onnx_runtime(
    assert_all_same: Check,
) -> None:
    cases = []
    # Of the last, no input reaches the second phase where the line has two elements.
    for kernel, stride, pads, dilation in ((1, 1, [0, 1], 1), (2, 2, [0, 6], 5)):
        nodes = [
            helper.make_node("ConvTranspose", ["x", "w"], ["a"], strides=[stride], pads=pads, dilations=[dilation]),
            helper.make_node("Transpose", ["a"], ["b"], perm=[0, 2, 1]),
            helper.make_node("Mul", ["b", "b"], ["y"]),
        ]
        feeds = [{"x": normal(3, 2, size)} for size in (2, 6)]
        cases.append(((nodes, [("x", [3, 2, "long"])], ["y"], {"w": normal(2, 4, kernel)}), *feeds))
    assert_all_same(cases)


# kernel, stride, padding, output padding, dilation
_GROWN_VOLUMES = [
    ((2, 2, 2), (2, 2, 2), (0, 0, 0, 0, 0, 0), (0, 0, 0), (1, 1, 1)),
    ((4, 4, 4), (2, 2, 2), (1, 1, 1, 1, 1, 1), (0, 0, 0), (1, 1, 1)),
    ((3, 3, 3), (2, 2, 2), (1, 1, 1, 1, 1, 1), (1, 1, 1), (1, 1, 1)),
    ((1, 2, 3), (3, 1, 2), (0, 1, 0, 0, 0, 1), (2, 0, 1), (1, 1, 1)),
    ((3, 1, 1), (1, 1, 1), (0, 0, 0, 2, 0, 0), (0, 0, 0), (2, 1, 1)),
    ((5, 2, 2), (2, 2, 2), (4, 0, 0, 3, 0, 0), (0, 0, 0), (1, 1, 1)),
]


def test_transposed_convolutions_of_volumes_equal_onnx_runtime(assert_all_same: Check) -> None:
    cases = []
    # The cases of eight phases are those of a long run.
    volumes = scale.choose(normal=_GROWN_VOLUMES[3:5], long=_GROWN_VOLUMES)
    for kernel, strides, pads, more, dilations in volumes:
        geometry = {"strides": strides, "pads": pads, "output_padding": more, "dilations": dilations}
        nodes = [helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], **geometry)]
        weights = {"w": normal(6, 9, *kernel), "b": normal(9)}
        cases.append(((nodes, [("x", [2, 6, 5, 4, 7])], ["y"], weights), {"x": normal(2, 6, 5, 4, 7)}))
    model = assert_all_same(cases)
    assert not [name for name, _ in model.schedules if "conv3d" in name]


def test_a_transposed_convolution_of_a_volume_of_free_sizes_is_a_product(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2, 2])
    path = make_model([node], [("x", ["batch", 16, "deep", "high", "wide"])], ["y"], {"w": normal(16, 8, 2, 2, 2)})
    model = assert_same_as_onnxruntime(path, {"x": normal(1, 16, 3, 5, 4)}, {"x": normal(2, 16, 1, 2, 7)})
    assert rule_counts(model)["rows"] == 1


@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("shape", [("batch", 20, "long"), ("batch", 20, "high", "wide")])
def test_transposed_convolutions_of_free_sizes_follow_each_other(
    shape: tuple[int | str, ...], pad: int, make_model: Any, target: Target
) -> None:
    axes = len(shape) - 2
    geometry = {"strides": [2] * axes, "pads": [pad] * 2 * axes}
    nodes = [
        helper.make_node("ConvTranspose", ["x", "v"], ["a"], **geometry),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("ConvTranspose", ["b", "w"], ["y"], **geometry),
    ]
    weights = {"v": normal(20, 18, *[4] * axes), "w": normal(18, 9, *[4] * axes)}
    lowered = lower(import_onnx(make_model(nodes, [("x", shape)], ["y"], weights)), target)
    # One for each phase, or one for all phases, which read the same inputs without padding.
    assert len([load for load in workloads(lowered) if "conv2d" in load.name]) == (2 * 2**axes if pad else 2)


_UPSAMPLING = {
    "transposed": ("ConvTranspose", ["x", "v"], {"strides": [2, 2]}),
    "nearest": ("Resize", ["x", "", "scales"], {"mode": "nearest"}),
    "shuffled": ("DepthToSpace", ["x"], {"blocksize": 2}),
}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("upsampling", "kernel"),
    scale.choose(
        normal=[("transposed", (24, 1)), ("transposed", (5, 3)), ("nearest", (5, 3)), ("shuffled", (24, 1))],
        long=[(upsampling, kernel) for upsampling in _UPSAMPLING for kernel in ((24, 1), (5, 3))],
    ),
    ids=str,
)
def test_a_convolution_of_an_image_that_was_enlarged_from_a_free_size_is_tiled(
    upsampling: str, kernel: tuple[int, int], make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    operator, inputs, attributes = _UPSAMPLING[upsampling]
    channels, (outputs, size) = 4 if operator == "DepthToSpace" else 16, kernel
    nodes = [
        helper.make_node(operator, inputs, ["a"], **attributes),
        helper.make_node("Conv", ["a", "w", "b"], ["c"], pads=[size // 2] * 4),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    weights = {"w": normal(outputs, channels, size, size), "b": normal(outputs)}
    weights["scales" if operator == "Resize" else "v"] = {
        "ConvTranspose": normal(16, 16, 2, 2), "Resize": np.array([1, 1, 2, 2], "float32")
    }.get(operator, normal(1))  # fmt: skip
    path = make_model(nodes, [("x", ["n", 16, "h", "w"])], ["y"], weights)
    model = assert_same_as_onnxruntime(path, {"x": normal(2, 16, 9, 13)}, {"x": normal(1, 16, 16, 8)})
    (rule,) = (rule for name, rule in model.schedules if name.startswith("fused") and "conv2d" in name)
    # With the narrowest vectors, Winograd's algorithm is faster.
    assert rule in (["rows"] if size == 1 else ["conv2d", "winograd"])


def test_a_signal_of_one_less_than_twice_its_free_length_is_joined_by_the_general_schedule(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    """TVM generates no code for a parallel loop over `n * (length * 2 - 1)` rows."""
    nodes = [
        helper.make_node("ConvTranspose", ["x", "w"], ["a"], strides=[2], pads=[1, 1]),
        helper.make_node("Tanh", ["a"], ["y"]),
    ]
    path = make_model(nodes, [("x", ["n", 12, "length"])], ["y"], {"w": normal(12, 16, 3)})
    model = assert_same_as_onnxruntime(path, {"x": normal(2, 12, 7)}, {"x": normal(1, 12, 40)})
    assert "none" not in {rule for _, rule in model.schedules}


def test_layers_behind_such_an_image_have_sizes_of_their_own(make_model: Any, native: Target) -> None:
    """Their numbers of tiles, such as `(w - 1) // 8 + 1` for `w * 2 - 1` columns, are those of a whole size."""
    nodes = [
        helper.make_node("ConvTranspose", ["x", "t"], ["a"], strides=[2, 2], pads=[1] * 4),
        helper.make_node("Conv", ["a", "v"], ["b"], pads=[1] * 4, group=16),
        helper.make_node("Conv", ["b", "w"], ["c"]),
        helper.make_node("Conv", ["c", "u"], ["d"], pads=[1] * 4),
        helper.make_node("Sigmoid", ["d"], ["y"]),
    ]
    weights = {name: normal(16, 16, size, size) / 16 for name, size in (("t", 3), ("w", 1), ("u", 3))}
    path = make_model(nodes, [("x", ["n", 16, "h", "w"])], ["y"], weights | {"v": normal(16, 1, 3, 3)})
    imported = import_onnx(path)
    lowered = lower(imported, native).functions_items()
    layers = [func for variable, func in lowered if re.search("block|conv2d_.*sigmoid", variable.name_hint)]
    assert len(layers) == 2
    for function in layers:
        assert all(isinstance(dim, IntImm | Var) for param in function.params for dim in param.ty.shape)
    feeds = {"x": normal(2, 16, 9, 13)}, {"x": normal(1, 16, 1, 8)}
    for precision, error in {"fp32": 1e-5, "bf16": 0.05}.items():
        if explain_missing_unit(native, precision) is None:
            model = build(imported, native, BuildOptions(precision=precision))
            assert not {"fallback", "none"} & {rule for name, rule in model.schedules if "block" in name}
            for feed in feeds:
                (expected,) = onnxruntime_outputs(path, feed).values()
                np.testing.assert_allclose(model.load().run(feed["x"])[0], expected, atol=error * expected.max())


# channels in and out, kernel, strides, padding, dilation
_VOLUMES = [
    (3, 24, (3, 3, 3), (1, 1, 1), (1, 1, 1, 1, 1, 1), (1, 1, 1)),
    (16, 19, (3, 5, 5), (2, 2, 1), (1, 2, 2, 0, 1, 2), (1, 1, 1)),
    (20, 70, (1, 1, 1), (1, 2, 2), (0,) * 6, (1, 1, 1)),
    (5, 7, (2, 3, 1), (1, 1, 1), (1, 0, 0, 2, 0, 0), (2, 1, 1)),
]


def test_convolutions_of_three_dimensions_equal_onnx_runtime(assert_all_same: Check) -> None:
    cases = []
    for channels, out, kernel, strides, pads, dilations in scale.choose(normal=_VOLUMES[1:2], long=_VOLUMES):
        nodes = [
            helper.make_node("Conv", ["x", "w", "b"], ["c"], strides=strides, pads=pads, dilations=dilations),
            helper.make_node("Relu", ["c"], ["d"]),
            helper.make_node("Conv", ["d", "v"], ["y"]),
        ]
        weights = {"w": normal(out, channels, *kernel), "b": normal(out), "v": normal(6, out, 1, 1, 1)}
        feeds = [{"x": normal(batch, channels, 6, 9, 8)} for batch in (1, 2)]
        cases.append(((nodes, [("x", ["batch", channels, 6, 9, 8])], ["y"], weights), *feeds))
    model = assert_all_same(cases)
    assert not [name for name, rule in model.schedules if "conv" in name and rule == "fallback"]


def test_grouped_convolutions_of_three_dimensions_equal_onnx_runtime(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], group=2, pads=[1] * 6)
    path = make_model([node], [("x", [1, 4, 5, 6, 7])], ["y"], {"w": normal(6, 2, 3, 3, 3)})
    assert_same_as_onnxruntime(path, {"x": normal(1, 4, 5, 6, 7)})


def test_convolutions_of_three_free_dimensions_equal_onnx_runtime(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], strides=[2, 1, 2], pads=[1] * 6)
    path = make_model([node], [("x", ["n", 3, "d", "h", "w"])], ["y"], {"w": normal(8, 3, 3, 3, 3)})
    assert_same_as_onnxruntime(path, {"x": normal(1, 3, 5, 6, 7)}, {"x": normal(2, 3, 4, 9, 8)})


@pytest.mark.few(1)
@pytest.mark.parametrize("high", [61, "high"])
def test_convolutions_of_images_of_one_column_run_along_a_line(
    high: Any, make_model: Any, assert_same_as_onnxruntime: Check, native: Target
) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[2, 0, 1, 0], strides=[2, 1], dilations=[2, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Conv", ["r", "v"], ["y"], group=24),
    ]
    weights = {"w": normal(24, 16, 5, 1), "b": normal(24), "v": normal(24, 1, 3, 1)}
    path = make_model(nodes, [("x", [2, 16, high, 1])], ["y"], weights)
    assert_same_as_onnxruntime(path, {"x": normal(2, 16, 61, 1)})
    # The dimensions of a convolution's data are the batch, the height, the width and the channels.
    heights = [
        int(item.func.params[0].shape[1])
        for item in workloads(lower(import_onnx(path), native))
        if "conv2d" in item.name
    ]
    assert set(heights) == {1}


@pytest.mark.parametrize("size", [32, "n"], ids=["fixed", "free"])
@pytest.mark.parametrize("is_wide", [False, True], ids=["high", "wide"])
def test_windows_over_whole_lines_of_one_channel_have_the_numbers_as_channels(
    is_wide: bool, size: Any, make_model: Any, assert_same_as_onnxruntime: Check, native: Target
) -> None:
    # A network for texts: the words are lines, and a window is as wide as a word's vector.
    def turned(pair: Any) -> list[Any]:
        return list(pair) if is_wide else list(reversed(pair))

    nodes = [
        helper.make_node(
            "Conv", ["x", "w", "b"], ["c"], pads=[*turned((2, 0)), *turned((1, 0))], strides=turned((2, 1))
        ),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    weights = {"w": normal(20, 1, *turned((3, 24))), "b": normal(20)}
    path = make_model(nodes, [("x", [2, 1, *turned((size, 24))])], ["y"], weights)
    assert_same_as_onnxruntime(
        path, *({"x": normal(2, 1, *turned((some, 24)))} for some in ((32, 5)[: 1 + (size == "n")]))
    )
    shapes = [
        item.func.params[0].shape for item in workloads(lower(import_onnx(path), native)) if "conv2d" in item.name
    ]
    assert [(int(shape[1]), int(shape[3])) for shape in shapes] == [(1, 24)]
