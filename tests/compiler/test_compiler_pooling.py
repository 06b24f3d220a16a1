from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from support import scale
from support.arrays import normal
from support.builds import rule_counts
from tvmflow.compiler import CompiledModel, import_onnx
from tvmflow.errors import UnsupportedOperatorError

Check = Callable[..., CompiledModel]


# channels, kernel, stride, padding, ceil, height, width
_WINDOWS = [
    (24, (3, 3), (2, 2), (1, 1, 1, 1), 0, 17, 15),
    (19, (2, 2), (2, 2), (0, 0, 0, 0), 1, 13, 10),
    (70, (3, 2), (1, 2), (0, 1, 2, 0), 0, 9, 8),
    (16, (5, 5), (1, 1), (2, 2, 2, 2), 0, 11, 7),
    (32, (3, 3), (2, 2), (0, 0, 0, 0), 1, 16, 16),
    (48, (13, 13), (1, 1), (6, 6, 6, 6), 0, 10, 12),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool", "AveragePool with padding"])
def test_pooling_between_convolutions_equals_onnx_runtime(kind: str, assert_all_same: Check) -> None:
    attributes = {"count_include_pad": 1} if "with" in kind else {}
    cases = []
    windows = scale.choose(normal=[_WINDOWS[1], _WINDOWS[2], _WINDOWS[5]], long=_WINDOWS)
    for channels, kernel, strides, pads, ceil, height, width in windows:
        window = {"kernel_shape": kernel, "strides": strides, "pads": pads, "ceil_mode": ceil, **attributes}
        nodes = [
            helper.make_node("Conv", ["x", "w"], ["a"]),
            helper.make_node(kind.split()[0], ["a"], ["b"], **window),
            helper.make_node("Relu", ["b"], ["y"]),
        ]
        shape = [2, 3, height, width]
        cases.append(((nodes, [("x", shape)], ["y"], {"w": normal(channels, 3, 1, 1)}), {"x": normal(*shape)}))
    assert rule_counts(assert_all_same(cases))["pooling"] == len(windows)


def test_pooling_of_a_symbolic_image_and_batch_equals_onnx_runtime(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("MaxPool", ["a"], ["b"], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4),
        helper.make_node("AveragePool", ["b"], ["y"], kernel_shape=[2, 2], pads=[1, 1, 0, 0]),
    ]
    path = make_model(nodes, [("x", ["batch", 3, "high", "wide"])], ["y"], {"w": normal(20, 3, 1, 1)})
    feeds = [{"x": normal(*shape)} for shape in ((1, 3, 8, 9), (3, 3, 15, 6))]
    assert rule_counts(assert_same_as_onnxruntime(path, *feeds))["pooling"] == 2


def test_pooling_with_gaps_between_its_taps_equals_onnx_runtime(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    attributes = {"kernel_shape": [3, 3], "dilations": [2, 2], "pads": [1] * 4}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("MaxPool", ["a"], ["y"], **attributes),
    ]
    path = make_model(nodes, [("x", [1, 3, 9, 9])], ["y"], {"w": normal(20, 3, 1, 1)})
    model = assert_same_as_onnxruntime(path, {"x": normal(1, 3, 9, 9) - 10})
    assert rule_counts(model)["pooling"] == 0


@pytest.mark.parametrize("kind", scale.choose(normal=["AveragePool"], long=["MaxPool", "AveragePool"]))
def test_pooling_of_one_and_three_dimensions_between_convolutions_equals_onnx_runtime(
    kind: str, assert_all_same: Check
) -> None:
    cases = []
    for image in ([9], [9, 10, 7]):
        rank, one = len(image), [1] * len(image)
        nodes = [
            helper.make_node("Conv", ["x", "w"], ["a"]),
            helper.make_node(kind, ["a"], ["b"], kernel_shape=[3] * rank, strides=[2] * rank, pads=[1] * 2 * rank),
            helper.make_node("Conv", ["b", "v"], ["y"]),
        ]
        weights = {"w": normal(20, 3, *one), "v": normal(5, 20, *one)}
        cases.append(((nodes, [("x", [2, 3, *image])], ["y"], weights), {"x": normal(2, 3, *image)}))
    assert rule_counts(assert_all_same(cases))["pooling"] == 3


def test_a_window_larger_than_its_data_is_pooled_as_onnx_runtime_does(assert_all_same: Check) -> None:
    # Kernel, stride, dilation, padding before and after, and the sizes of the data.
    windows = [
        (2, 2, 1, (0, 0), (1,)),
        (4, 3, 1, (0, 0), (2, 3)),
        (5, 4, 1, (1, 0), (1, 2, 3)),
        (3, 4, 2, (0, 1), (3,)),
    ]
    kinds = [("MaxPool", {}), ("AveragePool", {}), ("AveragePool", {"count_include_pad": 1}), ("LpPool", {"p": 2})]
    cases = []
    for kernel, stride, dilation, pads, sizes in windows:
        for size in sizes:
            for operator, attributes in kinds:
                if dilation > 1 and operator != "MaxPool":
                    continue
                window = {
                    "kernel_shape": [kernel, 1],
                    "strides": [stride, 1],
                    "pads": [pads[0], 0, pads[1], 0],
                    **({"dilations": [dilation, 1]} if dilation > 1 else {}),
                }
                node = helper.make_node(operator, ["x"], ["y"], **window, **attributes)
                shape = [2, 3, size, 4]
                cases.append((([node], [("x", shape)], [("y", [2, 3, 1, 4])]), {"x": normal(*shape)}))
    assert_all_same(scale.choose(normal=cases[::3], long=cases))


def test_windows_of_one_slice_of_known_size_have_their_channels_last(assert_all_same: Check) -> None:
    window = {"kernel_shape": [1, 3, 3], "pads": [0, 1, 1] * 2}
    cases = []
    for operator, strides in (("MaxPool", [1, 1, 1]), ("AveragePool", [1, 2, 1]), ("MaxPool", [1, 1, 2])):
        nodes = [helper.make_node(operator, ["x"], ["y"], strides=strides, **window)]
        cases.append(((nodes, [("x", [1, 16, 2, 7, 9])], ["y"]), {"x": normal(1, 16, 2, 7, 9)}))
    # With a stride along the width, the windows of a line fill vectors.
    assert rule_counts(assert_all_same(cases))["pooling"] == 2


def test_same_padding_that_begins_alike_for_all_sizes_is_part_of_the_pooling(assert_all_same: Check) -> None:
    cases = []
    for operator in ("MaxPool", "AveragePool"):
        for side, kernel, strides in (("UPPER", [2, 4], [2, 2]), ("LOWER", [3, 3], [2, 1]), ("UPPER", [5, 2], [1, 2])):
            window: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "auto_pad": f"SAME_{side}"}
            nodes = [helper.make_node(operator, ["x"], ["y"], **window)]
            feeds = [{"x": normal(1, 16, *size)} for size in ((8, 9), (7, 10), (1, 1))]
            cases.append(((nodes, [("x", ["n", 16, "h", "w"])], ["y"]), *feeds))
    model = assert_all_same(cases)
    names = [name for name, _ in model.schedules]
    assert rule_counts(model)["pooling"] >= 1
    assert not [name for name in names if "pad" in name or "slice" in name], names


def test_averages_with_same_padding_of_free_sizes_divide_by_what_is_within_the_data(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes, outputs = [], ["y0", "y1"]
    for output, side, strides in zip(outputs, ("UPPER", "LOWER"), ([2, 2], [2, 3]), strict=True):
        window = {"kernel_shape": [3, 4], "strides": strides}
        nodes.append(helper.make_node("AveragePool", ["x"], [output], auto_pad=f"SAME_{side}", **window))
    path = make_model(nodes, [("x", ["n", 3, "h", "w"])], outputs)
    feeds = [{"x": normal(2, 3, *size)} for size in ((8, 9), (7, 10), (11, 12))]
    model = assert_same_as_onnxruntime(path, *feeds)
    # No pooling of ones counts the elements.
    assert any("shares" in name for name, _ in model.schedules)


@pytest.mark.parametrize("opset", [18, 19])
def test_an_average_counts_its_padding_and_nothing_beyond_it(
    opset: int, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    window = {"kernel_shape": [3, 3], "strides": [2, 2], "count_include_pad": 1}
    nodes = [
        helper.make_node("AveragePool", ["a"], ["floor"], **window),
        helper.make_node("AveragePool", ["a"], ["ceil"], ceil_mode=1, **window),
        helper.make_node("AveragePool", ["b"], ["padded"], ceil_mode=1, pads=[1, 0, 1, 0], **window),
    ]
    feed = {"a": normal(1, 3, 8, 2), "b": normal(1, 3, 6, 2)}
    inputs = [(name, value.shape) for name, value in feed.items()]
    assert_same_as_onnxruntime(make_model(nodes, inputs, ["floor", "ceil", "padded"], opset=opset), feed)


@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool"])
def test_windows_of_few_channels_are_pooled_line_by_line(operator: str, assert_all_same: Check) -> None:
    cases = []
    forms: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        ((2, 3, 9, 21), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ((1, 1, 20, 17), {"kernel_shape": [3, 2], "pads": [1, 1, 1, 0]}),
        ((1, 2, 7, 8, 19), {"kernel_shape": [1, 3, 4], "strides": [1, 2, 1], "pads": [0, 1, 2, 0, 1, 3]}),
    ]
    if operator == "MaxPool":
        dilated = {"kernel_shape": [2, 3], "strides": [3, 1], "dilations": [2, 2], "pads": [1, 0, 1, 0]}
        forms += [((1, 2, 12, 40), {**dilated, "ceil_mode": 1})]
    for place, (shape, form) in enumerate(forms):
        own = {**form, "count_include_pad": place % 2} if operator == "AveragePool" else form
        node = helper.make_node(operator, ["x"], ["y"], **own)
        free = ["n", "c", *(f"size{axis}" for axis in range(len(shape) - 2))]
        cases += [(([node], [("x", sizes)], ["y"], {}), {"x": normal(*shape)}) for sizes in (shape, free)]
    assert rule_counts(assert_all_same(cases))["pooling_planes"] == len(cases)


def test_the_largest_numbers_of_windows_are_those_of_onnx_runtime(assert_all_same: Check) -> None:
    cases = []
    for dtype in ("int8", "uint8", "float64"):
        element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        node = helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[3, 3], pads=[1, 1, 1, 1])
        model = ([node], [("x", ["n", "c", "h", "w"], element)], [("y", None, element)], {})
        x = (40 * normal(2, 3, 9, 21)).astype("int8").astype(dtype)
        if dtype == "float64":
            x[0, 1] = -np.inf
        cases.append((model, {"x": x}))
    assert rule_counts(assert_all_same(cases))["pooling_planes"] == len(cases)


@pytest.mark.parametrize("operator", ["MaxPool", "Conv"])
def test_a_window_without_data_is_refused(make_model: Any, operator: str) -> None:
    node = helper.make_node(operator, ["x", "w"][: 1 + (operator == "Conv")], ["y"], "large", kernel_shape=[5, 1])
    path = make_model([node], [("x", [1, 3, 2, 4])], [("y", None)], {"w": normal(2, 3, 5, 1)})
    with pytest.raises(UnsupportedOperatorError, match=rf"operator {operator}, node 'large': .*larger than its data"):
        import_onnx(path)


def test_a_pooling_says_from_which_size_of_a_free_dimension_it_has_data(make_model: Any) -> None:
    nodes = [
        helper.make_node("MaxPool", ["x"], ["a"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("AveragePool", ["a"], ["y"], kernel_shape=[3, 2], strides=[2, 2], pads=[0, 1, 0, 1]),
    ]
    path = make_model(nodes, [("x", ["batch", 3, "high", "wide"])], ["y"])
    assert import_onnx(path).smallest == {"high": 6, "wide": 2}


@pytest.mark.parametrize(
    "shape",
    scale.choose(normal=[("n", 3, "high", "wide")], long=[(2, 3, 7, 6), ("n", 3, "high", "wide")]),
    ids=str,
)
def test_the_places_of_the_largest_elements_are_those_of_onnx_runtime(
    shape: tuple[Any, ...], make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    forms: list[dict[str, Any]] = [
        {"strides": [2, 2]},
        {"pads": [1, 0, 1, 1], "dilations": [2, 1], "storage_order": 1},
        {"strides": [2, 3], "auto_pad": "SAME_LOWER"},
        {"strides": [2, 2], "ceil_mode": 1},
    ]
    nodes = [
        helper.make_node("MaxPool", ["x"], [f"y{place}", f"at{place}"], kernel_shape=[3, 2], **form)
        for place, form in enumerate(forms)
        if scale.is_long() or place in (1, 2)
    ]
    outputs = [value for node in nodes for value in ((node.output[0], None), (node.output[1], None, TensorProto.INT64))]
    # Of equal elements the first one counts.
    x = np.round(normal(2, 3, 7, 6))
    assert_same_as_onnxruntime(make_model(nodes, [("x", shape)], outputs), {"x": x})
