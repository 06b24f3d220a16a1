"""The edges of operators: numbers that are not finite, tensors without elements, and forms that few files have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from support.arrays import normal
from support.builds import run_in_memory
from support.forests import DOMAIN
from support.models import save_text
from support.torchlib import share_table
from tvmflow.compiler import CompiledModel, build, import_onnx
from tvmflow.hardware.target import resolve

Check = Callable[..., CompiledModel]

_NAN, _INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("divisor", [41, 47, 6])
def test_quotients_that_become_whole_numbers_are_exact(
    divisor: int, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    """41 times the reciprocal of 41 is less than one in float32; exporters find a row of a picture so."""
    nodes = [
        helper.make_node("Div", ["x", "c"], ["quotient"]),
        helper.make_node("Add", ["quotient", "one"], ["next"]),
        helper.make_node("Floor", ["next"], ["row"]),
        helper.make_node("Cast", ["quotient"], ["whole"], to=TensorProto.INT64),
        helper.make_node("Less", ["quotient", "one"], ["is_first"]),
    ]
    weights = {"c": np.float32(divisor), "one": np.float32(1)}
    results = [("row", [2000]), ("whole", [2000], TensorProto.INT64), ("is_first", [2000], TensorProto.BOOL)]
    path = make_model(nodes, [("x", [2000])], results, weights)
    assert_same_as_onnxruntime(path, {"x": np.arange(2000, dtype="float32")})


def test_roots_written_as_powers_are_those_of_onnx_runtime(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes = [helper.make_node("Pow", ["x", name], [f"y_{name}"]) for name in ("half", "less")]
    nodes += [helper.make_node("Mul", ["x", "x"], ["s"]), helper.make_node("Pow", ["s", "half"], ["size"])]
    numbers = {"half": np.float32(0.5), "less": np.float32(-0.5)}
    path = make_model(nodes, [("x", [8])], ["y_half", "y_less", "size"], numbers)
    x = np.array([-_INFINITY, _INFINITY, -0.0, 0.0, 4, -4, _NAN, 1e-40], "float32")
    assert_same_as_onnxruntime(path, {"x": x})


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_remainders_are_exact(dtype: str, make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    node = helper.make_node("Mod", ["x", "y"], ["z"], fmod=1)
    path = make_model([node], [(name, ["n"], element) for name in "xy"], [("z", ["n"], element)])
    edges = [0.0, -0.0, 1, -1, _INFINITY, -_INFINITY, _NAN, 1e-40, -1e-42, 1e38, 5.3, 3, 2**24 - 1, 2**53 - 1]
    numbers = np.array([*edges, *normal(16)], dtype)
    x, y = (numbers[place].reshape(-1) for place in np.indices((len(numbers),) * 2))
    model = assert_same_as_onnxruntime(path, {"x": x, "y": y})
    # Of the quotients below, many are nearly whole numbers.
    whole = np.arange(1, 2001, dtype=dtype)
    divisors = np.resize(np.array([0.1, 1 / 3, 0.7, 1.1, 3e-5], dtype), whole.shape)
    feed = {"x": np.nextafter(whole * divisors, whole * 0).astype(dtype), "y": divisors}
    ((result,),) = run_in_memory(model, [list(feed.values())])
    np.testing.assert_array_equal(result, np.fmod(feed["x"], feed["y"]))
    assert [name for name, _ in model.schedules] == ["remainder"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_comparisons_and_their_opposites_of_nan_equal_onnx_runtime(
    dtype: str, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [
        helper.make_node("Equal", ["x", "x"], ["is_number"]),
        helper.make_node("Not", ["is_number"], ["is_nan"]),
        helper.make_node("Where", ["is_nan", "zero", "x"], ["clean"]),
        helper.make_node("Greater", ["x", "z"], ["is_greater"]),
        helper.make_node("Not", ["is_greater"], ["is_not_greater"]),
        helper.make_node("Xor", ["is_number", "yes"], ["is_other"]),
        helper.make_node("GreaterOrEqual", ["x", "x"], ["is_like_itself"]),
        helper.make_node("Relu", ["x"], ["positive"]),
        helper.make_node("Clip", ["x", "low", "high"], ["inside"]),
        helper.make_node("Sign", ["x"], ["sign"]),
    ]
    inputs = [(name, shape, element) for name, shape in (("x", [4]), ("z", [4]), ("low", []), ("high", []))]
    results = [(name, [4], TensorProto.BOOL) for name in ("is_nan", "is_not_greater", "is_other", "is_like_itself")]
    results += [(name, [4], element) for name in ("clean", "positive", "inside", "sign")]
    path = make_model(nodes, inputs, results, {"zero": np.zeros((), dtype), "yes": np.array(True)})
    bounds = {"low": np.array(-1, dtype), "high": np.array(3, dtype)}
    feed = {"x": np.array([_NAN, 1, -_INFINITY, 2], dtype), "z": np.array([0, _NAN, 1, 1], dtype), **bounds}
    assert_same_as_onnxruntime(path, feed)


def test_places_of_nan_are_not_zero(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    path = make_model([helper.make_node("NonZero", ["x"], ["y"])], [("x", [5])], [("y", [1, None], TensorProto.INT64)])
    assert_same_as_onnxruntime(path, {"x": np.array([_NAN, 0, -_INFINITY, 2, 0], "float32")})


def test_an_extreme_loses_no_number_to_nan(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes = [helper.make_node(name, ["x", "last"], [name], keepdims=0) for name in ("ReduceMax", "ReduceMin")]
    path = make_model(nodes, [("x", [2, 4])], ["ReduceMax", "ReduceMin"], {"last": np.array([1])})
    assert_same_as_onnxruntime(path, {"x": np.array([[3, -1, _NAN, 2], [1, _NAN, 3, 0]], "float32")})


@pytest.mark.few(2)
@pytest.mark.parametrize("sizes", [[1, 1, 6, 8], [1, 1, "height", "width"]], ids=["fixed", "free"])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_opset_10_resizes_from_the_corner_of_the_first_pixel(
    mode: str, sizes: list[Any], make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    scales = {"bigger": [1, 1, 1.7, 2], "smaller": [1, 1, 0.4, 0.4], "both": [1, 1, 1.7, 0.6]}
    nodes = [helper.make_node("Resize", ["x", name], [f"{name}_y"], mode=mode) for name in scales]
    weights = {name: np.array(numbers, "float32") for name, numbers in scales.items()}
    path = make_model(nodes, [("x", sizes)], [f"{name}_y" for name in scales], weights, opset=10)
    assert_same_as_onnxruntime(path, {"x": normal(1, 1, 6, 8)})


@pytest.mark.parametrize("coordinates", ["align_corners", "pytorch_half_pixel"])
def test_lengths_that_are_not_whole_are_those_of_the_result(
    coordinates: str, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    scales = {"longer": 1.5, "shorter": 0.4, "single": 0.3}
    nodes = [
        helper.make_node(
            "Resize", ["x", "", name], [f"{name}_{mode}"], mode=mode, coordinate_transformation_mode=coordinates
        )
        for name in scales
        for mode in ("nearest", "linear", "cubic")
    ]
    weights = {name: np.array([1, 1, 1, scale], "float32") for name, scale in scales.items()}
    path = make_model(nodes, [("x", [1, 1, 1, 5])], [node.output[0] for node in nodes], weights)
    assert_same_as_onnxruntime(path, {"x": normal(1, 1, 1, 5)})


def test_the_columns_of_a_free_matrix_are_resized(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    """They are no channels, which a resize of an image leaves alone."""
    node = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], mode="linear", axes=[1])
    path = make_model([node], [("x", ["n", "m"])], [("y", ["n", 3])], {"sizes": np.array([3])})
    assert_same_as_onnxruntime(path, {"x": normal(2, 7)}, {"x": normal(1, 2)})


def test_tensors_without_elements_keep_their_shapes(assert_all_same: Check) -> None:
    reshape = helper.make_node("Reshape", ["x", "sizes"], ["y"], allowzero=1)
    tile = helper.make_node("Tile", ["x", "sizes"], ["y"])
    expand = helper.make_node("Expand", ["x", "sizes"], ["y"])
    nothing, full = np.zeros((0, 3, 4), "float32"), normal(2, 3, 4)

    def case(node: onnx.NodeProto, shape: list[Any], sizes: list[int], data: Any) -> Any:
        return ([node], [("x", shape)], [("y", [None] * len(sizes))], {"sizes": np.array(sizes)}), {"x": data}

    assert_all_same(
        [
            case(reshape, ["a", "b", "c"], [3, 0], nothing),
            case(reshape, [0, 3, 4], [3, 0], nothing),
            case(tile, ["a", "b", "c"], [1, 0, 2], full),
            case(tile, [2, 3, 4], [1, 0, 2], full),
            case(expand, [1, 4], [0, 4], normal(1, 4)),
        ]
    )


def test_forms_that_few_files_have_equal_onnx_runtime(assert_all_same: Check) -> None:
    squeeze = helper.make_node("Squeeze", ["x", "axes"], ["y"])
    unique = helper.make_node("Unique", ["x"], ["y"])
    largest = [
        helper.make_node("TopK", ["x", "k"], ["values", "places"], sorted=0),
        # Any order is allowed.
        helper.make_node("ReduceSum", ["values"], ["y"]),
    ]
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(np.array([2, 3], "float32"), "v"), numpy_helper.from_array(np.array([1, 3]), "i"), [4]
    )
    add = [helper.make_node("Constant", [], ["s"], sparse_value=sparse), helper.make_node("Add", ["x", "s"], ["y"])]
    text = [helper.make_node("Constant", [], ["s"], value_string="unread"), helper.make_node("Relu", ["x"], ["y"])]
    norm = helper.make_node("BatchNormalization", ["x", "a", "b", "m", "v"], ["y"])
    statistics = {name: np.abs(normal(1)) + 0.5 for name in "abmv"}
    power, quotient = (helper.make_node(operator, ["x", "p"], ["y"]) for operator in ("Pow", "Div"))
    integers = np.array([3, -1, 3, 2], "int8")
    assert_all_same(
        [
            (([squeeze], [("x", [1, 3, 1])], ["y"], {"axes": np.zeros(0, "int64")}), {"x": normal(1, 3, 1)}),
            (([unique], [("x", [4], TensorProto.INT8)], [("y", [None], TensorProto.INT8)]), {"x": integers}),
            ((largest, [("x", [9])], ["y"], {"k": np.array([3])}), {"x": normal(9)}),
            ((add, [("x", [2, 4])], ["y"]), {"x": normal(2, 4)}),
            ((text, [("x", [2, 4])], ["y"]), {"x": normal(2, 4)}),
            (([norm], [("x", [3])], ["y"], statistics), {"x": normal(3)}),
            (([power], [("x", [9])], ["y"], {"p": np.array(_INFINITY, "float32")}), {"x": normal(9)}),
            (([quotient], [("x", [3])], ["y"], {"p": np.array(-0.0, "float32")}), {"x": np.float32([0, 1, -2])}),
        ]
    )


def test_statistics_of_each_place_are_those_of_opset_8(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    norm = helper.make_node("BatchNormalization", ["x", "a", "b", "m", "v"], ["y"], spatial=0)
    statistics = {name: np.abs(normal(3, 4)) + 0.5 for name in "abmv"}
    path = make_model([norm], [("x", [2, 3, 4])], ["y"], statistics, opset=8)
    assert_same_as_onnxruntime(path, {"x": normal(2, 3, 4)})


@pytest.mark.parametrize("post", ["LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"])
def test_the_score_of_a_single_target_stays_as_it_is(
    post: str, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    form = {"coefficients": [0.5, 0.25, -1.0], "intercepts": [0.125], "targets": 1, "post_transform": post}
    node = helper.make_node("LinearRegressor", ["x"], ["y"], domain=DOMAIN, **form)
    assert_same_as_onnxruntime(make_model([node], [("x", ["n", 3])], [("y", ["n", 1])]), {"x": normal(4, 3)})


def test_a_classifier_takes_a_vector_as_one_row(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    form = {"coefficients": [1.0, 2.0, 3.0, -1.0, -2.0, 0.5], "intercepts": [0.0, 1.0], "classlabels_ints": [3, 7]}
    node = helper.make_node("LinearClassifier", ["x"], ["label", "scores"], domain=DOMAIN, **form)
    results = [("label", [1], TensorProto.INT64), ("scores", [1, 2])]
    assert_same_as_onnxruntime(make_model([node], [("x", [3])], results), {"x": normal(3)})


@pytest.mark.parametrize("processor", ["k8", "knl"])
def test_processors_without_products_of_bytes_get_code_without_them(processor: str, tmp_path: Path) -> None:
    """LLVM ends the process at an instruction that the target lacks: k8 has no SSSE3, knl no AVX512BW."""
    text = """<ir_version: 9, opset_import: ["": 18, "com.microsoft": 1]> g (float[n, 64] x) => (float[n, 32] y)
    <uint8[32, 2, 16] w, float[64] s> {
      y = com.microsoft.MatMulNBits <K = 64, N = 32, bits = 4, block_size = 32, accuracy_level = 4> (x, w, s)
    }"""
    path = save_text(tmp_path / "model.onnx", text)
    model = onnx.load(path)
    generator = np.random.default_rng(0)
    weight = generator.integers(0, 256, (32, 2, 16)).astype("uint8")
    for name, value in (("w", weight), ("s", np.full(64, 0.01, "float32"))):
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    onnx.save(model, path)
    library = tmp_path / "mod.so"
    build(import_onnx(path), resolve(f"llvm -mcpu={processor}")).export(library)
    assert library.stat().st_size


def test_masks_of_onnx_runtimes_attention_keep_what_is_above_zero(assert_all_same: Check) -> None:
    x, key = normal(1, 3, 8), normal(1, 5, 8, seed=1)
    cell = {"num_heads": 2}
    masked = helper.make_node("MultiHeadAttention", ["x", "x", "x", "", "m"], ["y"], domain="com.microsoft", **cell)
    order = helper.make_node(
        "MultiHeadAttention", ["x", "k", "k"], ["y"], domain="com.microsoft", unidirectional=1, **cell
    )
    words = [
        helper.make_node(
            "EmbedLayerNormalization",
            ["ids", "", "table", "places", "", "gamma", "beta", "mask"],
            ["norm", "count"],
            domain="com.microsoft",
            mask_index_type=kind,
        )
        for kind in (0, 1)
    ]
    names = ("table", "places", "gamma", "beta")
    weights = dict(zip(names, (normal(7, 8), normal(4, 8), normal(8), normal(8)), strict=True))
    rows = [(name, [2, 3], TensorProto.INT32) for name in ("ids", "mask")]
    results = [("norm", [2, 3, 8]), ("count", [2], TensorProto.INT32)]
    feed = {"ids": np.array([[1, 2, 3], [4, 5, 6]], "int32"), "mask": np.array([[0, 1, 2], [1, 0, 1]], "int32")}
    mask = [("x", [1, 3, 8]), ("m", [1, 3], TensorProto.INT32)]
    assert_all_same(
        [
            (([masked], mask, ["y"]), {"x": x, "m": np.array([[1, 2, 0]], "int32")}),
            (([order], [("x", [1, 3, 8]), ("k", [1, 5, 8])], ["y"]), {"x": x, "k": key}),
            *((([word], rows, results, weights), feed) for word in words),
        ]
    )


def test_a_bias_of_grouped_attention_may_be_shorter_than_the_kept_keys(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    node = helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", "pk", "pv", "last", "total", "", "", "", "bias"],
        ["y", "keys", "values"],
        domain="com.microsoft",
        num_heads=2,
        kv_num_heads=1,
    )
    inputs = [("q", [1, 1, 16]), ("k", [1, 1, 8]), ("v", [1, 1, 8]), ("pk", [1, 1, 8, 8]), ("pv", [1, 1, 8, 8])]
    inputs = [*inputs, ("bias", [1, 1, 1, 4])]
    weights = {"last": np.array([3], "int32"), "total": np.array([4], "int32")}
    results = [("y", [1, 1, 16]), ("keys", [1, 1, 8, 8]), ("values", [1, 1, 8, 8])]
    path = make_model([node], inputs, results, weights)
    assert_same_as_onnxruntime(path, {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(inputs)})


def test_a_cell_beyond_the_clip_of_an_lstm_is_not_clipped(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    node = helper.make_node("LSTM", ["x", "w", "r", "", "", "", "c"], ["y"], hidden_size=3, clip=0.5)
    weights = {"w": normal(1, 12, 2), "r": normal(1, 12, 3), "c": np.full((1, 1, 3), 4, "float32")}
    path = make_model([node], [("x", [4, 1, 2])], ["y"], weights)
    assert_same_as_onnxruntime(path, {"x": normal(4, 1, 2)})


def test_scores_that_causality_hides_are_finite(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    node = helper.make_node("Attention", ["q", "k", "k"], ["y", "", "", "s"], is_causal=1, qk_matmul_output_mode=2)
    path = make_model([node], [("q", [1, 1, 3, 4]), ("k", [1, 1, 3, 4])], ["y", "s"], opset=23)
    assert_same_as_onnxruntime(path, {"q": normal(1, 1, 3, 4), "k": normal(1, 1, 3, 4, seed=1)})


def test_a_range_may_have_steps_of_a_free_size(tmp_path: Path, assert_same_as_onnxruntime: Check) -> None:
    """torch.nn.EmbeddingBag counts the beginnings of its bags so."""
    text = """<ir_version: 9, opset_import: ["": 18]>
    g (float[2, n] x) => (int64[m] y) <int64 zero = {0}, int64 end = {10}> {
      step = Shape <start = 1> (x)
      one = Squeeze (step)
      y = Range (zero, end, one)
    }"""
    assert_same_as_onnxruntime(save_text(tmp_path / "model.onnx", text), {"x": normal(2, 3)}, {"x": normal(2, 10)})


@pytest.mark.long
def test_the_bags_of_an_embedding_with_padding_are_compiled(tmp_path: Path, assert_same_as_onnxruntime: Check) -> None:
    """A loop over the bags has a loop over the words of each in it, some of which a branch leaves out."""
    torch = pytest.importorskip("torch")
    share_table()
    bag = torch.nn.EmbeddingBag(20, 6, mode="max", padding_idx=1).eval()
    path = tmp_path / "bag.onnx"
    batch = ({0: torch.export.Dim("batch", min=1, max=64)},)
    words = torch.randint(0, 20, (3, 5))
    torch.onnx.export(bag, (words,), path, input_names=["x"], dynamo=True, dynamic_shapes=batch, verbose=False)
    feeds = [{"x": np.random.default_rng(size).integers(0, 20, (size, 5))} for size in (1, 4)]
    assert_same_as_onnxruntime(path, *feeds)
