"""Operands that a model computes where most have constants, and free sizes beside fixed ones."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from support import scale
from support.arrays import normal
from support.builds import rule_counts
from tvmflow.arrays import Array
from tvmflow.compiler import CompiledModel, build, import_onnx
from tvmflow.errors import ModelImportError, UnsupportedOperatorError
from tvmflow.hardware.target import Target
from tvmflow.onnx_model.session import open_session

Check = Callable[..., CompiledModel]
INTEGER = TensorProto.INT64


def _places(*values: int) -> Array:
    return np.array(values, "int64")


def test_a_place_outside_of_the_unpooled_images_ends_the_run(
    make_model: Any, assert_same_as_onnxruntime: Check, run_built: Any
) -> None:
    node = helper.make_node("MaxUnpool", ["x", "places"], ["y"], kernel_shape=[2, 2], strides=[2, 2], pads=[1, 0, 0, 1])
    path = make_model([node], [("x", ["n", 1, "h", 3]), ("places", ["n", 1, "h", 3], INTEGER)], ["y"])
    x, places = normal(2, 1, 2, 3), np.array([0, 2, 4, 6, 8, 10, 11, 13, 15, 20, 25, 29])
    model = assert_same_as_onnxruntime(path, {"x": x, "places": places.reshape(x.shape)})
    for wrong in (-1, 30):
        outside = np.append(places[:-1], wrong).reshape(x.shape)
        with pytest.raises(Exception, match="Index value out of bounds"):
            open_session(path).run(None, {"x": x, "places": outside})
        with pytest.raises(RuntimeError, match="index error: an index is outside of its data"):
            run_built(model, x, outside)


def test_images_outside_of_the_data_are_the_nearest_within(
    make_model: Any, assert_same_as_onnxruntime: Check, run_built: Any
) -> None:
    nodes = [
        helper.make_node("RoiAlign", ["x", "rois", "images"], ["a"], output_height=2, output_width=2),
        helper.make_node("MaxRoiPool", ["x", "regions"], ["b"], pooled_shape=[2, 2]),
    ]
    inputs = [("x", ["n", 1, "h", 3]), ("rois", [2, 4]), ("images", [2], INTEGER), ("regions", [2, 5])]
    path = make_model(nodes, inputs, list("ab"))
    x, corners = normal(2, 1, 2, 3), np.array([[0, 0, 2, 1], [1, 0, 2, 2]], "float32")

    def feed(first: int, last: int) -> dict[str, Array]:
        images = np.array([[first], [last]], "float32")
        regions = np.concatenate([images, corners], axis=1)
        return {"x": x, "rois": corners, "images": _places(first, last), "regions": regions}

    model = assert_same_as_onnxruntime(path, feed(0, 1))
    far = 10**7
    outside, within = (run_built(model, *feed(*those).values()) for those in ((-far, far), (0, 1)))
    for ours, expected in zip(outside, within, strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_an_element_that_is_no_number_is_unpooled_into_its_own_image(
    make_model: Any, target: Target, run_built: Any
) -> None:
    nodes = [
        helper.make_node("MaxPool", ["x"], ["largest", "places"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("MaxUnpool", ["largest", "places"], ["y"], kernel_shape=[2, 2], strides=[2, 2]),
    ]
    x = normal(2, 1, 4, 4)
    model = build(import_onnx(make_model(nodes, [("x", x.shape)], ["y"])), target)
    (expected,) = run_built(model, x)
    x[0, 0, :2, :2] = np.nan
    (actual,) = run_built(model, x)
    np.testing.assert_array_equal(actual[1], expected[1])


def test_operands_of_free_sizes_that_must_agree_are_checked(make_model: Any, target: Target, run_built: Any) -> None:
    for node, inputs in (
        (
            helper.make_node("TensorScatter", ["x", "u", "i"], ["y"]),
            [("x", ["n", 2, "h", 3]), ("u", ["m", 2, 1, 3]), ("i", ["k"], INTEGER)],
        ),
        (
            helper.make_node("RoiAlign", ["x", "u", "i"], ["y"]),
            [("x", ["n", 2, "h", 3]), ("u", ["m", 4]), ("i", ["k"], INTEGER)],
        ),
        (
            helper.make_node("MaxUnpool", ["u", "i"], ["y"], kernel_shape=[1, 1]),
            [("u", ["m", 2, 1, 3]), ("i", ["k", 2, 1, 3], INTEGER)],
        ),
    ):
        opset = 24 if node.op_type == "TensorScatter" else 18
        model = build(import_onnx(make_model([node], inputs, ["y"], opset=opset)), target)
        sizes = {"n": 3, "m": 3, "k": 3, "h": 4}
        for changed in ({}, {"k": 2}):
            shapes = [[(sizes | changed).get(size, size) for size in item[1]] for item in inputs]
            feed = [
                normal(*shape) if len(item) == 2 else np.zeros(shape, "int64")
                for shape, item in zip(shapes, inputs, strict=True)
            ]
            if changed:
                with pytest.raises(Exception, match=r"(?i)match"):
                    run_built(model, *feed)
            else:
                run_built(model, *feed)


def test_a_scale_of_one_element_is_that_of_all_data(assert_all_same: Check) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    weights = {"scale": np.array([0.1], "float32"), "zero": np.array([3], "int8")}
    assert_all_same([((nodes, [("x", [2, 3])], ["y"], weights), {"x": normal(2, 3)})])


def test_products_of_integers_take_free_sizes_beside_fixed_ones(assert_all_same: Check) -> None:
    node = helper.make_node("MatMulInteger", ["a", "b"], ["y"])
    inputs = [("a", [1, "p", 4, "k"], TensorProto.INT8), ("b", ["n", 2, "m", 3], TensorProto.UINT8)]
    feed = {"a": np.arange(40, dtype="int8").reshape(1, 2, 4, 5), "b": np.arange(90, dtype="uint8").reshape(3, 2, 5, 3)}
    assert_all_same([(([node], inputs, [("y", None, TensorProto.INT32)]), feed)])


def test_a_matrix_of_free_size_has_as_many_columns_as_zero_points(assert_all_same: Check) -> None:
    node = helper.make_node("MatMulInteger", ["a", "b", "zero", "columns"], ["y"])
    inputs = [("a", ["m", 5], TensorProto.UINT8), ("b", ["k", "n"], TensorProto.INT8)]
    weights = {"zero": np.array(3, "uint8"), "columns": np.array([1, -2, 7], "int8")}
    feed = {"a": np.arange(10, dtype="uint8").reshape(2, 5), "b": np.arange(15, dtype="int8").reshape(5, 3)}
    assert_all_same([(([node], inputs, [("y", None, TensorProto.INT32)], weights), feed)])


@pytest.mark.parametrize("element", [TensorProto.FLOAT, TensorProto.DOUBLE])
def test_products_of_two_matrices_of_free_sizes_have_tiles(
    element: int, make_model: Any, assert_same_as_onnxruntime: Callable[..., CompiledModel]
) -> None:
    node, dtype = helper.make_node("MatMul", ["a", "b"], ["y"]), helper.tensor_dtype_to_np_dtype(element)
    path = make_model([node], [("a", ["m", "k"], element), ("b", ["k", "n"], element)], [("y", None, element)])
    sizes = ((1, 1, 1), (5, 3, 40), (37, 50, 19), (70, 7, 1))
    feeds = [{"a": normal(m, k).astype(dtype), "b": normal(k, n).astype(dtype)} for m, k, n in sizes]
    assert rule_counts(assert_same_as_onnxruntime(path, *feeds))["rows"] == 1
    # A single row reads a large matrix as it lies.
    path = make_model([node], [("a", [1, "k"], element), ("b", ["k", "n"], element)], [("y", None, element)])
    counts = rule_counts(assert_same_as_onnxruntime(path, feeds[0], {**feeds[2], "a": feeds[2]["a"][:1]}))
    assert (counts["rows"], counts["reduction"]) == (0, int(element == TensorProto.FLOAT))


def test_products_of_float64_have_tiles(assert_all_same: Check) -> None:
    """Of known sizes that are no multiples of vectors, over a batch, and with a constant."""
    double = TensorProto.DOUBLE
    node, weight = helper.make_node("MatMul", ["a", "b"], ["y"]), {"b": normal(35, 19).astype("float64")}
    shapes = [((37, 35), (35, 19)), ((2, 3, 9, 35), (3, 35, 40)), ((9, 35), (4, 35, 3)), ((2, 1, 35), None)]
    cases = []
    for left, right in shapes:
        inputs = [(name, shape, double) for name, shape in zip("ab", (left, right), strict=True) if shape]
        feed = {name: normal(*shape).astype("float64") for name, shape, _ in inputs}
        cases.append((([node], inputs, [("y", None, double)], {} if right else weight), feed))
    assert rule_counts(assert_all_same(cases))["rows"] == len(cases)


def test_a_pooling_that_includes_its_padding_has_the_windows_of_its_formula(assert_all_same: Check) -> None:
    form = {"kernel_shape": [1, 6], "strides": [1, 3], "pads": [0, 1, 0, 2], "ceil_mode": 1, "count_include_pad": 1}
    node = helper.make_node("AveragePool", ["x"], ["y"], **form)
    assert_all_same([(([node], [("x", [1, 2, "n", 3])], ["y"]), {"x": normal(1, 2, 4, 3)})])


def test_regions_are_aligned_by_means_and_largest_samples(assert_all_same: Check) -> None:
    rois = np.array([[0, 0, 3, 3], [1, 2, 8.5, 6], [-3, -2, 2, 2], [4, 4, 4, 4], [5, 5, 3, 3]], "float32")
    feed = {"x": normal(2, 2, 8, 9), "rois": rois, "images": _places(0, 1, 0, 1, 0)}
    inputs = [("x", [2, 2, 8, 9]), ("rois", [5, 4]), ("images", [5], INTEGER)]
    cases = []
    for form in (
        {"mode": "max", "sampling_ratio": 2},
        {"mode": "max", "coordinate_transformation_mode": "output_half_pixel", "spatial_scale": 0.7},
        {"mode": "avg"},
        {"mode": "avg", "coordinate_transformation_mode": "output_half_pixel", "spatial_scale": 0.7},
    ):
        node = helper.make_node("RoiAlign", list(feed), ["y"], output_height=3, output_width=2, **form)
        cases.append((([node], inputs, ["y"]), feed))
    assert_all_same(cases)


def test_an_output_shape_of_max_unpool_that_is_not_its_windows_is_refused(make_model: Any) -> None:
    node = helper.make_node("MaxUnpool", ["x", "i", "s"], ["y"], "unpool", kernel_shape=[2, 2], strides=[2, 2])
    path = make_model([node], [("x", [1, 1, 2, 2]), ("i", [1, 1, 2, 2], INTEGER)], ["y"], {"s": _places(1, 1, 5, 5)})
    with pytest.raises(UnsupportedOperatorError, match=r"MaxUnpool, node 'unpool'.*an output_shape other than that"):
        import_onnx(path)


def test_a_condition_longer_than_the_data_chooses_within_it(assert_all_same: Check) -> None:
    node, conditions = helper.make_node("Compress", ["x", "c"], ["y"], axis=0), np.array([1, 0, 1, 1, 1], bool)
    fixed = (([node], [("x", [3, 2]), ("c", [5], TensorProto.BOOL)], ["y"]), {"x": normal(3, 2), "c": conditions})
    free = ([node], [("x", ["n", 2]), ("c", ["k"], TensorProto.BOOL)], ["y"])
    assert_all_same([fixed, (free, *({"x": normal(size, 2), "c": conditions} for size in (3, 7)))])


def test_padding_by_computed_operands_equals_onnx_runtime(assert_all_same: Check) -> None:
    cases = []
    for mode in ("constant", "edge", "reflect"):
        node = helper.make_node("Pad", ["x", "p"], ["y"], mode=mode)
        widths = [_places(1, 2, 0, 1), _places(0, -1, 1, 3), _places(0, -1, 0, -2)]
        cases.append((([node], [("x", [3, "m"]), ("p", [4], INTEGER)], ["y"]),
                      *({"x": normal(3, 5), "p": item} for item in widths)))  # fmt: skip
    node = helper.make_node("Pad", ["x", "p"], ["y"], mode="edge")
    cases.append((([node], [("x", [3, 5])], ["y"], {"p": _places(1, -1, 0, -2)}), {"x": normal(3, 5)}))
    node = helper.make_node("Pad", ["x", "p", "v", "axes"], ["y"])
    inputs = [("x", [3, 5]), ("p", [2], INTEGER), ("v", []), ("axes", [1], INTEGER)]
    values = [normal(3, 5), _places(1, 2), np.array(3, "float32"), _places(-1)]
    cases.append((([node], inputs, ["y"]), dict(zip(node.input, values, strict=True))))
    assert_all_same(cases)


def test_reductions_along_computed_axes_equal_onnx_runtime(assert_all_same: Check) -> None:
    cases = []
    inputs = [("x", ["n", 4, 3]), ("axes", [2], INTEGER)]
    feeds = [{"x": normal(5, 4, 3), "axes": _places(*axes)} for axes in ((0, -1), (2, 1))]
    operators = ["ReduceMean", "ReduceLogSumExp", *scale.choose(normal=[], long=["ReduceSum", "ReduceL2"])]
    for place, operator in enumerate(operators):
        node = helper.make_node(operator, ["x", "axes"], ["y"], keepdims=place % 2)
        cases.append((([node], inputs, ["y"]), *feeds))
    node = helper.make_node("ReduceMax", ["x", "axes"], ["y"], keepdims=0)
    whole = {"x": normal(5, 4, 3), "axes": _places(1, 0, 2)}
    cases.append((([node], [("x", ["n", 4, 3]), ("axes", [3], INTEGER)], ["y"]), whole))
    assert_all_same(cases)


def test_free_sizes_beside_fixed_ones_are_taken_for_them(assert_all_same: Check) -> None:
    def multiply(**more: Any) -> Any:
        return helper.make_node("Gemm", ["a", "b", "c"], ["y"], **more)

    weights = {"w": normal(4, 3, 3, 3), "c": normal(6)}
    transposed = helper.make_node("ConvTranspose", ["x", "w", "c"], ["y"], group=2, strides=[2, 2])
    pool = helper.make_node("LpPool", ["x"], ["y"], kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)
    images = [{"x": normal(2, 4, *size)} for size in ((5, 6), (6, 7))]
    eye = helper.make_node("EyeLike", ["x"], ["y"], k=1, dtype=INTEGER)
    assert_all_same(
        [
            (
                ([multiply(transB=1, alpha=0.5, beta=2.0)], [("a", ["n", "k"]), ("b", [5, 4]), ("c", ["m"])], ["y"]),
                {"a": normal(3, 4), "b": normal(5, 4), "c": normal(5)},
            ),
            (
                ([multiply(transA=1)], [("a", ["k", "n"]), ("b", ["l", "m"]), ("c", ["q", "p"])], ["y"]),
                {"a": normal(4, 3), "b": normal(4, 5), "c": normal(3, 5)},
            ),
            (([transposed], [("x", ["n", "c", "h", "v"])], ["y"], weights), *images),
            (([pool], [("x", ["n", 4, "h", "v"])], ["y"]), *images),
            (([eye], [("x", ["n", "m"])], [("y", ["n", "m"], INTEGER)]), {"x": normal(3, 5)}),
        ]
    )


def test_the_axis_of_an_unsqueeze_may_have_no_dimension(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    node = helper.make_node("Unsqueeze", ["x", "axis"], ["y"])
    path = make_model([node], [("x", ["n", 3])], ["y"], {"axis": np.array(-1)})
    assert_same_as_onnxruntime(path, {"x": normal(2, 3)})


def test_a_slice_that_starts_beyond_the_end_is_nothing(assert_all_same: Check) -> None:
    node = helper.make_node("Slice", ["x", "s", "e"], ["y"])
    bounds = [(7, 9), (2, 1)]
    assert_all_same(
        (([node], [("x", [3, 5])], ["y"], {"s": _places(start), "e": _places(end)}), {"x": normal(3, 5)})
        for start, end in bounds
    )


@pytest.mark.parametrize(
    ("operator", "types", "attributes"),
    [
        ("Add", ("float32", "float64"), {}),
        ("Concat", ("float16", "float32"), {"axis": 1}),
        ("Less", ("int32", "int64"), {}),
        ("MatMul", ("float64", "float32"), {}),
    ],
)
def test_operands_of_two_types_are_refused_by_name(
    operator: str, types: tuple[str, str], attributes: dict[str, int], make_model: Any
) -> None:
    node = helper.make_node(operator, ["x", "w"], ["y"], "mixed", **attributes)
    first, second = types
    inputs = [("x", [3, 3], helper.np_dtype_to_tensor_dtype(np.dtype(first)))]
    path = make_model([node], inputs, ["y"], {"w": np.ones((3, 3), second)})
    reason = f"operator {operator}, node 'mixed': its operands must have one type, and 'x' is {first}, 'w' {second}"
    with pytest.raises(ModelImportError, match=re.escape(reason)):
        import_onnx(path)


@pytest.mark.long
def test_powers_of_whole_numbers_equal_onnx_runtime(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes = [
        helper.make_node("Pow", ["x", "k"], ["powers"]),
        helper.make_node("Pow", ["two", "k"], ["bits"]),
        helper.make_node("Pow", ["x", "five"], ["fifths"]),
        helper.make_node("Pow", ["small", "k"], ["short"]),
        helper.make_node("Pow", ["bits", "half"], ["roots"]),
    ]
    inputs = [("x", ["n", 1], TensorProto.INT64), ("k", [6], TensorProto.INT64), ("small", ["n", 1], TensorProto.INT32)]
    outputs = [(name, None, TensorProto.INT64) for name in ("powers", "bits", "fifths", "roots")]
    weights = {"two": np.array(2), "five": np.array(5), "half": np.array(0.5, "float32")}
    path = make_model(nodes, inputs, [*outputs, ("short", None, TensorProto.INT32)], weights)
    k = np.array([0, 1, 2, 5, 9, 4])
    feed = {"x": np.array([[-3], [-1], [0], [1], [7]]), "k": k, "small": np.array([[-2], [1], [3], [0], [9]], "int32")}
    assert_same_as_onnxruntime(path, feed)


def test_powers_of_whole_numbers_are_exact(make_model: Any, target: Target, run_built: Any) -> None:
    node = helper.make_node("Pow", ["x", "k"], ["y"])
    inputs = [(name, ["n"], TensorProto.INT64) for name in "xk"]
    path = make_model([node], inputs, [("y", ["n"], TensorProto.INT64)])
    x = np.array([3, -3, 2, -1, -1, 1, 0, 1, -1, -1, 5, 3037000499])
    k = np.array([39, 39, 62, 100, 101, 2**40, 64, -2, -3, -4, -1, 2])
    expected = [3**39, -(3**39), 2**62, 1, -1, 1, 0, 1, -1, 1, 0, 3037000499**2]
    assert run_built(build(import_onnx(path), target), x, k)[0].tolist() == expected


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_signs_and_shrunk_numbers_of_integers_equal_onnx_runtime(
    dtype: str, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [
        helper.make_node("Sign", ["x"], ["signs"]),
        helper.make_node("Shrink", ["x"], ["shrunk"], lambd=2.0, bias=1.5),
    ]
    path = make_model(nodes, [("x", ["n"], kind)], [(name, None, kind) for name in ("signs", "shrunk")])
    assert_same_as_onnxruntime(path, {"x": np.arange(-5 if np.dtype(dtype).kind == "i" else 0, 9).astype(dtype)})


@pytest.mark.parametrize("dtype", ["int16", "uint16", "uint32"])
def test_integers_that_tvm_does_not_sort_are_sorted_in_wider_ones(
    dtype: str, make_model: Any, target: Target, run_built: Any
) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    node = helper.make_node("TopK", ["x", "k"], ["values", "places"], axis=1)
    outputs = [("values", None, kind), ("places", None, TensorProto.INT64)]
    path = make_model([node], [("x", [2, 9], kind)], outputs, {"k": _places(4)}, opset=24)
    bounds = np.iinfo(dtype)
    x = np.linspace(bounds.min, bounds.max, 18).astype(dtype)[np.random.default_rng(0).permutation(18)].reshape(2, 9)
    values, places = run_built(build(import_onnx(path), target), x)
    assert values.dtype == x.dtype
    np.testing.assert_array_equal(values, np.sort(x, axis=1)[:, :-5:-1])
    np.testing.assert_array_equal(np.take_along_axis(x, places, axis=1), values)


def test_a_layer_norm_of_float64_has_statistics_of_its_stash_type(make_model: Any, target: Target) -> None:
    node = helper.make_node("LayerNormalization", ["x", "s"], ["y", "mean", "deviation"])
    outputs = [("y", None, TensorProto.DOUBLE), ("mean", None, 1), ("deviation", None, 1)]
    path = make_model([node], [("x", [3, 8], TensorProto.DOUBLE)], outputs, {"s": np.ones(8)})
    x = normal(3, 8).astype("float64")
    actual = build(import_onnx(path), target).load().run(x)
    for output, expected in zip(actual, open_session(path).run(None, {"x": x}), strict=True):
        assert output.dtype == expected.dtype
        np.testing.assert_allclose(output, expected, rtol=1e-6)


@pytest.mark.few(8)
@pytest.mark.parametrize("dtype", ["float64", "int32", "int64"])
@pytest.mark.parametrize(
    ("left", "right"),
    [((12, 40), (40, 64)), ((1, 33), (33, 128)), ((6, 5), (5, 24)), ((3, 7, 9), (3, 9, 16)), (("n", 20), (20, 32))],
    ids=str,
)
def test_products_of_other_numbers_equal_numpy(
    dtype: str, left: tuple[Any, ...], right: tuple[int, ...], make_model: Any, target: Target
) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    path = make_model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [("x", list(left), kind), ("w", right, kind)],
        [("y", None, kind)],
    )
    random = np.random.default_rng(0)
    x, w = (
        random.integers(-99, 99, [5 if size == "n" else size for size in shape]).astype(dtype)
        for shape in (left, right)
    )
    (result,) = build(import_onnx(path), target).load().run(x, w)
    np.testing.assert_array_equal(result, x @ w)


def test_operands_of_operators_that_take_several_types_may_differ(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("Pow", ["x", "k"], ["powers"]),
        helper.make_node("Where", ["mask", "powers", "x"], ["chosen"]),
        helper.make_node("Gather", ["chosen", "k"], ["y"], axis=1),
    ]
    path = make_model(nodes, [("x", [2, 3]), ("mask", [2, 3], TensorProto.BOOL)], ["y"], {"k": _places(2, 1, 2)})
    assert_same_as_onnxruntime(path, {"x": normal(2, 3), "mask": normal(2, 3) > 0})
