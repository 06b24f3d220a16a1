"""Models with free dimensions: computed shapes are evaluated at import, with symbols for the free sizes."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from support import scale
from support.arrays import normal
from support.builds import rule_counts
from tvmflow.arrays import Array
from tvmflow.compiler import BuildOptions, import_onnx
from tvmflow.compiler.onnx.sizes import NotEvaluatedError, SizeEvaluator, Sizes
from tvmflow.errors import UnsupportedOperatorError


def _node(operator: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs, outputs, **attributes)


def _ints(*values: int) -> Array:
    return np.array(values, "int64")


def _feeds(*shapes: tuple[int, ...]) -> list[dict[str, Array]]:
    return [{"x": np.random.default_rng(sum(shape)).standard_normal(shape).astype("float32")} for shape in shapes]


_WEIGHTS = {
    "zero": _ints(0),
    "one": _ints(1),
    "two": _ints(2),
    "three": _ints(3),
    "minus": _ints(-1),
    "minus_two": _ints(-2),
    "minus_four": _ints(-4),
    "four": _ints(4),
    "beyond": _ints(10**9),
    "end": _ints(2**63 - 1),
    "far_back": _ints(-(2**63)),
    "half": np.array([0.5], "float32"),
    "first": np.array(0, "int64"),
    "scalar": np.array(1, "int64"),
    "scales": np.array([1, 1, 2, 2], "float32"),
    "none": np.array([], "float32"),
    "column": np.random.default_rng(1).standard_normal((4, 1)).astype("float32"),
    "pair": np.array([1.5, -0.5], "float32"),
    "even": np.random.default_rng(2).standard_normal((4, 4, 4)).astype("float32"),
    "kernel": np.random.default_rng(0).standard_normal((8, 3, 3, 3)).astype("float32"),
    "double": np.random.default_rng(3).standard_normal((8, 4, 2, 2)).astype("float32"),
    "double_less_one": np.random.default_rng(4).standard_normal((8, 4, 3, 3)).astype("float32"),
    "four_biases": np.random.default_rng(5).standard_normal((4, 1, 1)).astype("float32"),
}
_BATCH_AS_INT32 = [
    _node("Shape", ["x"], ["shape"]),
    _node("Cast", ["shape"], ["short"], to=TensorProto.INT32),
    _node("Slice", ["short", "zero", "one", "zero"], ["batch32"]),
    _node("Cast", ["batch32"], ["batch"], to=TensorProto.INT64),
]
# Name, nodes from `x` to `y`, the input's dimensions, and two inputs' shapes.
_CASES: list[tuple[str, list[onnx.NodeProto], list[Any], list[tuple[int, ...]]]] = [
    (
        "split a free dimension into a part and the rest",
        [
            _node("Shape", ["x"], ["shape"]),
            _node("Slice", ["shape", "one", "two", "zero"], ["t"]),
            _node("Div", ["t", "three"], ["third"]),
            _node("Sub", ["t", "third"], ["others"]),
            _node("Concat", ["third", "others"], ["lengths"], axis=0),
            _node("Split", ["x", "lengths"], ["a", "b"], axis=1),
            _node("Concat", ["b", "a"], ["y"], axis=1),
        ],
        ["n", "t", 4],
        [(2, 6, 4), (3, 7, 4)],
    ),
    (
        "split a free dimension into equal parts",
        [_node("Split", ["x"], ["a", "b"], axis=1, num_outputs=2), _node("Concat", ["b", "a"], ["y"], axis=1)],
        ["n", "t", 4],
        [(2, 6, 4), (3, 8, 4)],
    ),
    (
        "pad to a multiple of four",
        [
            _node("Shape", ["x"], ["shape"]),
            _node("Slice", ["shape", "one", "two", "zero"], ["t"]),
            _node("Neg", ["t"], ["negative"]),
            _node("Mod", ["negative", "four"], ["missing"]),
            _node("Concat", ["zero", "zero", "zero", "zero", "missing", "zero"], ["widths"], axis=0),
            _node("Pad", ["x", "widths"], ["z"]),
            _node("Relu", ["z"], ["y"]),
        ],
        ["n", "t", 4],
        [(2, 5, 4), (3, 8, 4)],
    ),
    (
        "pad what was halved and doubled to the original's size",
        [
            _node("MaxPool", ["x"], ["small"], kernel_shape=[2], strides=[2]),
            _node("Concat", ["small", "small"], ["large"], axis=2),
            _node("Shape", ["x"], ["shape"], start=2, end=3),
            _node("Shape", ["large"], ["own"], start=2, end=3),
            _node("Sub", ["shape", "own"], ["missing"]),
            _node("Concat", ["zero", "zero", "zero", "zero", "zero", "missing"], ["widths"], axis=0),
            _node("Pad", ["large", "widths"], ["z"]),
            _node("Add", ["x", "z"], ["y"]),
        ],
        ["n", 4, "t"],
        [(2, 4, 5), (3, 4, 8)],
    ),
    (
        "remove a dimension that is one when the model runs",
        [_node("Squeeze", ["x", "one"], ["z"]), _node("Relu", ["z"], ["y"])],
        ["n", "t", 4],
        [(2, 1, 4), (3, 1, 4)],
    ),
    (
        "reshape to a list with the batch",
        [
            *_BATCH_AS_INT32,
            _node("Concat", ["batch", "two", "minus"], ["target"], axis=0),
            _node("Reshape", ["x", "target"], ["y"]),
        ],
        ["n", 4, "t"],
        [(2, 4, 3), (5, 4, 6)],
    ),
    (
        "flatten two free dimensions and restore them",
        [
            _node("Shape", ["x"], ["shape"]),
            _node("Gather", ["shape", "first"], ["n"]),
            _node("Gather", ["shape", "scalar"], ["t"]),
            _node("Mul", ["n", "t"], ["rows"]),
            _node("Unsqueeze", ["rows", "zero"], ["rows1"]),
            _node("Concat", ["rows1", "four"], ["flat"], axis=0),
            _node("Reshape", ["x", "flat"], ["table"]),
            _node("Softmax", ["table"], ["soft"]),
            _node("Reshape", ["soft", "shape"], ["y"]),
        ],
        ["n", "t", 4],
        [(2, 3, 4), (3, 7, 4)],
    ),
    (
        "expand by the batch",
        [
            *_BATCH_AS_INT32,
            _node("Concat", ["batch", "three", "four"], ["target"], axis=0),
            _node("ReduceMean", ["x", "one"], ["mean"], keepdims=1),
            _node("Expand", ["mean", "target"], ["y"]),
        ],
        ["n", 3, 4],
        [(1, 3, 4), (6, 3, 4)],
    ),
    (
        "tile by a size",
        [
            *_BATCH_AS_INT32,
            _node("Concat", ["one", "batch"], ["repeats"], axis=0),
            _node("Tile", ["x", "repeats"], ["y"]),
        ],
        ["n", 3],
        [(2, 3), (4, 3)],
    ),
    (
        "half of a dimension",
        [
            _node("Shape", ["x"], ["shape"], start=1, end=2),
            _node("Cast", ["shape"], ["length"], to=TensorProto.FLOAT),
            _node("Mul", ["length", "half"], ["halved"]),
            _node("Ceil", ["halved"], ["whole"]),
            _node("Cast", ["whole"], ["end_of_half"], to=TensorProto.INT64),
            _node("Slice", ["x", "zero", "end_of_half", "one"], ["y"]),
        ],
        [2, "t"],
        [(2, 5), (2, 8)],
    ),
    (
        "the last elements, of which there may be fewer",
        [_node("Slice", ["x", "minus_two", "end", "one"], ["y"])],
        [3, "t"],
        [(3, 1), (3, 7)],
    ),
    (
        "up to a number that stands for the end",
        [_node("Slice", ["x", "zero", "beyond", "zero"], ["same"]), _node("Add", ["x", "same"], ["y"])],
        ["n", 3],
        [(2, 3), (5, 3)],
    ),
    (
        "the first elements, of which there may be fewer",
        [
            _node("Slice", ["x", "zero", "three", "zero"], ["some"]),
            _node("Transpose", ["some"], ["turned"], perm=[0, 2, 1]),
            _node("MatMul", ["turned", "some"], ["y"]),
        ],
        ["n", 4, 2],
        [(2, 4, 2), (5, 4, 2)],
    ),
    (
        "elements backwards",
        [
            _node("Slice", ["x", "minus_two", "zero", "one", "minus"], ["most"]),
            _node("Slice", ["x", "three", "far_back", "one", "minus_two"], ["some"]),
            _node("Slice", ["x", "end", "far_back", "one", "minus"], ["all"]),
            _node("Slice", ["x", "minus_four", "far_back", "one", "minus"], ["foremost"]),
            _node("Concat", ["most", "some", "all", "foremost"], ["y"], axis=1),
        ],
        [3, "t"],
        [(3, 2), (3, 4), (3, 7)],
    ),
    (
        "all but the first elements",
        [_node("Slice", ["x", "one", "end", "one"], ["y"])],
        [3, "t"],
        [(3, 2), (3, 7)],
    ),
    (
        "positions from a range",
        [
            _node("Shape", ["x"], ["shape"]),
            _node("Gather", ["shape", "scalar"], ["t"]),
            _node("Range", ["first", "t", "scalar"], ["positions"]),
            _node("Cast", ["positions"], ["places"], to=TensorProto.FLOAT),
            _node("Add", ["x", "places"], ["y"]),
        ],
        [2, "t"],
        [(2, 3), (2, 6)],
    ),
    (
        "positions after as many as another dimension",
        [
            _node("Shape", ["x"], ["shape"]),
            _node("Gather", ["shape", "first"], ["past"]),
            _node("Gather", ["shape", "scalar"], ["t"]),
            _node("Range", ["first", "t", "scalar"], ["positions"]),
            _node("Add", ["positions", "past"], ["later"]),
            _node("Unsqueeze", ["later", "zero"], ["row"]),
            _node("Cast", ["row"], ["y"], to=TensorProto.FLOAT),
        ],
        ["n", "t"],
        [(2, 3), (4, 6)],
    ),
    (
        "a shape computed by a quotient that is negative for images smaller than the window",
        [
            _node("Shape", ["x"], ["shape"]),
            _node("Slice", ["shape", "three", "four", "zero"], ["t"]),
            _node("Add", ["t", "minus_two"], ["less"]),
            _node("Add", ["less", "minus"], ["from_zero"]),
            _node("Div", ["from_zero", "two"], ["steps"]),
            _node("Add", ["steps", "one"], ["places"]),
            _node("Concat", ["four", "two", "places"], ["target"], axis=0),
            _node("Conv", ["x", "kernel"], ["small"], strides=[1, 2]),
            _node("Reshape", ["small", "target"], ["moved"]),
            _node("Transpose", ["moved"], ["turned"], perm=[0, 2, 1]),
            _node("LayerNormalization", ["turned", "pair"], ["y"]),
        ],
        [1, 3, 3, "t"],
        [(1, 3, 3, 3), (1, 3, 3, 8)],
    ),
    (
        "one more column of a convolution than of its input",
        [
            _node("MaxPool", ["x"], ["small"], kernel_shape=[3], strides=[2]),
            _node("Conv", ["small", "even"], ["more"], pads=[2, 2]),
            _node("Slice", ["more", "zero", "minus", "two"], ["same"]),
            _node("Sigmoid", ["same"], ["gate"]),
            _node("Mul", ["gate", "small"], ["y"]),
        ],
        [2, 4, "t"],
        [(2, 4, 5), (2, 4, 12)],
    ),
    (
        "a constant of the input's shape",
        [
            _node("Shape", ["x"], ["shape"]),
            _node("ConstantOfShape", ["shape"], ["ones"], value=helper.make_tensor("v", TensorProto.FLOAT, [1], [1.0])),
            _node("Add", ["x", "ones"], ["y"]),
        ],
        ["n", "t"],
        [(2, 3), (4, 6)],
    ),
    (
        "a choice by a dimension that cannot be one",
        [
            _node("Shape", ["x"], ["shape"]),
            _node("Equal", ["shape", "minus"], ["is_free"]),
            _node("Where", ["is_free", "one", "shape"], ["target"]),
            _node("Expand", ["x", "target"], ["wide"]),
            _node("Neg", ["wide"], ["y"]),
        ],
        ["n", "t"],
        [(2, 3), (4, 6)],
    ),
    (
        "sizes as the input of a product",
        [
            _node("Shape", ["x"], ["shape"]),
            _node("Cast", ["shape"], ["sizes"], to=TensorProto.FLOAT),
            _node("Mul", ["sizes", "half"], ["halves"]),
            _node("ReduceProd", ["halves"], ["area"], keepdims=0),
            _node("Div", ["x", "area"], ["y"]),
        ],
        ["n", "t"],
        [(2, 3), (4, 6)],
    ),
    (
        "halved and doubled beside the original",
        [
            _node("MaxPool", ["x"], ["small"], kernel_shape=[2, 2], strides=[2, 2]),
            _node("Resize", ["small", "none", "scales"], ["large"], mode="nearest", nearest_mode="floor",
                  coordinate_transformation_mode="asymmetric"),
            _node("Add", ["x", "large"], ["sum"]),
            _node("Concat", ["sum", "large"], ["y"], axis=1),
        ],
        ["n", 2, "h", "w"],
        [(1, 2, 4, 6), (2, 2, 8, 2)],
    ),
    (
        "resized with a free batch among the sizes",
        [
            _node("Shape", ["x"], ["shape"]),
            _node("Slice", ["shape", "zero", "two", "zero"], ["front"]),
            _node("Concat", ["front", "four", "four"], ["sizes"], axis=0),
            _node("Resize", ["x", "none", "none", "sizes"], ["y"], mode="nearest", nearest_mode="floor",
                  coordinate_transformation_mode="asymmetric"),
        ],
        ["n", 2, 2, 2],
        [(1, 2, 2, 2), (3, 2, 2, 2)],
    ),
    (
        "a line resized with a free batch among the sizes",
        [
            _node("Shape", ["x"], ["shape"]),
            _node("Slice", ["shape", "zero", "two", "zero"], ["front"]),
            _node("Concat", ["front", "four"], ["sizes"], axis=0),
            _node("Resize", ["x", "none", "none", "sizes"], ["y"], mode="linear"),
        ],
        ["n", 2, 3],
        [(1, 2, 3), (3, 2, 3)],
    ),
    (
        "pixels of channels moved into a picture of any size",
        [
            _node("Conv", ["x", "kernel"], ["small"], strides=[2, 2], pads=[1, 1, 1, 1]),
            _node("DepthToSpace", ["small"], ["large"], blocksize=2),
            _node("Shape", ["large"], ["shape"]),
            _node("Slice", ["shape", "zero", "one", "zero"], ["batch"]),
            _node("Concat", ["batch", "one", "two", "minus"], ["target"], axis=0),
            _node("Reshape", ["large", "target"], ["y"]),
        ],
        ["n", 3, "h", "w"],
        [(1, 3, 5, 8), (2, 3, 9, 3)],
    ),
    (
        "a product of one column without this dimension",
        [_node("MatMul", ["x", "column"], ["product"]), _node("Squeeze", ["product", "two"], ["line"]),
         _node("Relu", ["line"], ["y"])],
        ["n", "t", 4],
        [(1, 3, 4), (3, 2, 4)],
    ),
    (
        "resized to another's size",
        [
            _node("MaxPool", ["x"], ["small"], kernel_shape=[3, 3], strides=[2, 2]),
            _node("Shape", ["x"], ["shape"]),
            _node("Resize", ["small", "", "", "shape"], ["large"], mode="linear"),
            _node("Add", ["x", "large"], ["y"]),
        ],
        ["n", 2, "h", "w"],
        [(1, 2, 5, 7), (2, 2, 8, 9)],
    ),
    (
        "the square of a size",
        [
            _node("Shape", ["x"], ["batch"], end=1),
            _node("Shape", ["x"], ["side"], start=3),
            _node("Pow", ["side", "two"], ["places"]),
            _node("Concat", ["batch", "minus", "places"], ["shape"], axis=0),
            _node("Reshape", ["x", "shape"], ["y"]),
        ],
        ["n", 2, "s", "s"],
        [(1, 2, 5, 5), (2, 2, 3, 3)],
    ),
    (
        "an image that a stride rounds up and a transposed convolution doubles",
        [
            _node("Conv", ["x", "kernel"], ["small"], strides=[2, 2], pads=[1, 1, 1, 1]),
            _node("ConvTranspose", ["small", "double"], ["large"], strides=[2, 2]),
            _node("Add", ["large", "four_biases"], ["above"]),
            _node("Relu", ["above"], ["y"]),
        ],
        ["n", 3, "h", "w"],
        [(1, 3, 5, 8), (2, 3, 6, 7)],
    ),
    (
        "an image that a stride rounds up and a transposed convolution brings to an odd size",
        [
            _node("Conv", ["x", "kernel"], ["small"], strides=[2, 2], pads=[1, 1, 1, 1]),
            _node("ConvTranspose", ["small", "double_less_one"], ["large"], strides=[2, 2], pads=[1, 1, 1, 1]),
            _node("Add", ["large", "four_biases"], ["above"]),
            _node("Relu", ["above"], ["y"]),
        ],
        ["n", 3, "h", "w"],
        [(1, 3, 5, 8), (2, 3, 6, 7)],
    ),
]  # fmt: skip


# Each is written into the arguments of `save_model` that follow the path.
_MODELS = {
    name: (nodes, [("x", dims)], ["y"], {key: _WEIGHTS[key] for node in nodes for key in node.input if key in _WEIGHTS})
    for name, nodes, dims, _ in _CASES
}


@pytest.mark.parametrize("model", _MODELS.values(), ids=_MODELS)
def test_a_computed_shape_is_known_by_its_free_sizes(make_model: Any, model: tuple[Any, ...]) -> None:
    (result,) = import_onnx(make_model(*model)).outputs
    assert "?" not in result.shape


# Several at once compile in less time; a failure names the output: `m3_y` is that of the fourth.
@pytest.mark.few(1)
@pytest.mark.parametrize("start", range(scale.count(normal=2, long=4)))
def test_a_computed_shape_is_that_of_every_size(assert_all_same: Any, start: int) -> None:
    assert_all_same([(_MODELS[name], *_feeds(*shapes)) for name, _, _, shapes in _CASES[start::4]])


def test_functions_have_names_of_their_own_for_sizes(make_model: Any, target: Any) -> None:
    from tvm import tirx

    from tvmflow.compiler import ir_text, lower

    nodes = [
        _node("Conv", ["x", "first_kernel"], ["a"], strides=[2, 2], pads=[1, 1, 1, 1]),
        _node("Conv", ["a", "kernel"], ["b"], strides=[2, 2], pads=[1, 1, 1, 1]),
        _node("Sigmoid", ["b"], ["c"]),
        _node("MaxPool", ["c"], ["d"], kernel_shape=[3, 3], strides=[2, 2]),
        _node("Conv", ["d", "kernel"], ["y"], pads=[1, 1, 1, 1]),
    ]
    rng = np.random.default_rng(0)
    weights = {
        "first_kernel": rng.standard_normal((8, 3, 3, 3)).astype("float32"),
        "kernel": rng.standard_normal((8, 8, 3, 3)).astype("float32"),
    }
    path = make_model(nodes, [("x", ["n", 3, "h", "w"])], ["y"], weights)
    texts = set()
    for _ in range(4):
        lowered = lower(import_onnx(path), target)
        functions = [function for function in lowered.functions.values() if isinstance(function, tirx.PrimFunc)]
        assert functions
        for function in functions:
            assert all(tirx.is_buffer_var(param) for param in function.params)
            dims = [dim for param in function.params for dim in param.ty.shape]
            assert all(isinstance(dim, tirx.IntImm | tirx.Var) for dim in dims)
        texts.add(ir_text(lowered))
    # TVM orders the sizes of a function by addresses in memory.
    assert len(texts) == 1


def test_sizes_that_a_model_needs_equal_are_checked_at_run_time(make_model: Any, target: Any) -> None:
    from support import builds
    from tvmflow.compiler import build

    nodes = next(case[1] for case in _CASES if case[0] == "halved and doubled beside the original")
    weights = {name: _WEIGHTS[name] for name in ("none", "scales")}
    model = build(import_onnx(make_model(nodes, [("x", ["n", 2, "h", "w"])], ["y"], weights)), target)
    # Half of five, doubled, is four.
    with pytest.raises(Exception, match=r"(?i)match|shape|assert"):
        builds.run_in_memory(model, [[_feeds((1, 2, 5, 4))[0]["x"]]])


def _evaluate(operator: str, *operands: Sizes, **attributes: Any) -> Sizes:
    names = [f"x{place}" for place in range(len(operands))]
    node = helper.make_node(operator, names, ["y"], **attributes)
    (result,) = SizeEvaluator().evaluate(node, operands, 18)
    return result


def test_a_size_times_a_factor_that_float32_rounds_is_not_evaluated() -> None:
    from tvm import tirx

    sizes = SizeEvaluator().shape([tirx.Var("n", "int64")])
    floats = _evaluate("Cast", sizes, to=TensorProto.FLOAT)
    assert not _evaluate("Mul", floats, Sizes.of(np.array([0.25], "float32"))).is_constant
    with pytest.raises(NotEvaluatedError):
        _evaluate("Mul", floats, Sizes.of(np.array([0.1], "float32")))


def test_the_least_size_that_suffices_may_be_the_largest_that_is_tried() -> None:
    from tvm import tirx

    largest, evaluator = 1 << 20, SizeEvaluator()
    n = tirx.Var("n", "int64")
    evaluator.declare([n])
    evaluator.require(n - (largest - 1))
    assert evaluator.smallest["n"] == largest


def test_a_lower_bound_that_was_set_is_never_reduced() -> None:
    from tvm import tirx

    evaluator = SizeEvaluator({"n": 12})
    n = tirx.Var("n", "int64")
    evaluator.declare([n])
    # At least one from n = 4 on, which the analyzer cannot prove.
    evaluator.require(n - tirx.floordiv(n, 3) * 2 - 1)
    assert evaluator.smallest["n"] == 12


def test_a_ratio_of_sizes_is_a_number_where_it_is_one() -> None:
    from tvm import tirx

    evaluator = SizeEvaluator()
    n = tirx.Var("n", "int64")
    evaluator.declare([n])
    assert evaluator.quotient([n, 6, n + 1], [n + 1, 3]) is not None
    assert evaluator.are_equal(evaluator.quotient([n, 6, n + 1], [n + 1, 3]), n * 2)
    assert evaluator.divide(evaluator.multiply(n, 4.0), evaluator.multiply(n, 1.0)) == 4.0


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (_node("Squeeze", ["x"], ["y"]), "symbolic"),
        (_node("Slice", ["x", "k", "end", "axis", "k"], ["y"]), "computed"),
    ],
)
def test_a_form_that_needs_fixed_sizes_is_refused_with_this_advice(make_model: Any, node: Any, reason: str) -> None:
    weights = {"axis": _WEIGHTS["one"], "end": _WEIGHTS["end"]}
    inputs = [("x", ["n", 2, "t"]), ("k", [1], TensorProto.INT64)]
    path = make_model([node], inputs, ["y"], {name: weights[name] for name in weights if name in node.input})
    with pytest.raises(UnsupportedOperatorError, match=rf"{node.op_type}.*{reason}.*fixed sizes.*n, t"):
        import_onnx(path)


@pytest.mark.parametrize("free", [[6, 4], ["n", 4]])
def test_a_form_that_needs_sizes_which_the_model_computes_is_refused_with_that_advice(
    make_model: Any, free: list[Any]
) -> None:
    # Fixing the input's sizes would not help: how many places there are depends on the numbers.
    nodes = [_node("NonZero", ["x"], ["places"]), _node("Squeeze", ["places"], ["y"])]
    path = make_model(nodes, [("x", free)], ["y"])
    with pytest.raises(UnsupportedOperatorError, match=r"Squeeze.*computes sizes from its data.*a fixed number"):
        import_onnx(path)


def test_a_shape_is_computed_by_the_operators_of_the_models_opset(make_model: Any) -> None:
    nodes = [
        _node("Shape", ["x"], ["shape"]),
        _node("Gather", ["shape", "first"], ["n"]),
        _node("Unsqueeze", ["n"], ["n1"], axes=[0]),
        _node("Concat", ["n1", "minus"], ["target"], axis=0),
        _node("Reshape", ["x", "target"], ["y"]),
    ]
    weights = {name: _WEIGHTS[name] for name in ("first", "minus")}
    path = make_model(nodes, [("x", ["n", 4, 2])], ["y"], weights, opset=11)
    assert import_onnx(path).outputs[0].shape == ("n", 8)


@pytest.mark.parametrize("after", [[], [_node("Mul", ["number", "number"], ["y"])]], ids=["output", "operand"])
def test_a_squeeze_without_axes_removes_free_dimensions_where_the_file_records_a_scalar(
    after: list[Any], make_model: Any, assert_same_as_onnxruntime: Any, tmp_path: Any
) -> None:
    squeezed = "number" if after else "y"
    nodes = [_node("MatMul", ["x", "column"], ["product"]), _node("Squeeze", ["product"], [squeezed]), *after]
    path = make_model(nodes, [("x", ["n", 4])], ["y"], {"column": _WEIGHTS["column"]})
    model = onnx.load(path)
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, []))
    onnx.save(model, path)
    assert_same_as_onnxruntime(path, *_feeds((1, 4)))


@pytest.mark.parametrize("shape", [("n", 3, 1, 1), ("n", "k")], ids=str)
def test_a_squeeze_without_axes_keeps_free_dimensions_where_the_file_does(
    shape: tuple[Any, ...], make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    nodes = [_node("Relu", ["x"], ["a"]), _node("Squeeze", ["a"], ["b"]), _node("Relu", ["b"], ["y"])]
    path = make_model(nodes, [("x", shape)], [("y", [None, None])])
    model = assert_same_as_onnxruntime(path, *_feeds((2, 3, *shape[2:]), (5, 3, *shape[2:])))
    assert import_onnx(path).outputs[0].shape == shape[:2]
    with pytest.raises(RuntimeError, match="match_cast error"):
        model.load().run(*_feeds((1, 3, *shape[2:]))[0].values())


# An operator that reads `x` and then `k`, values for `k`, and further operands and attributes.
_BY_DATA: list[tuple[str, list[str], list[list[int]], dict[str, Any]]] = [
    ("TopK", [], [[3], [1], [5]], {}),
    ("TopK", [], [[2], [0]], {"axis": 0, "largest": 0}),
    ("Reshape", [], [[15, -1], [5, 6]], {}),
    ("Reshape", [], [[0, -1, 1], [1, 0, 6]], {}),
    ("Expand", [], [[2, 1, 1], [1, 6, 5]], {}),
    ("Tile", [], [[2, 1], [1, 3]], {}),
    ("Split", [], [[1, 4], [3, 2]], {"axis": 1}),
    ("Slice", ["end", "one"], [[2], [-2], [9], [-9]], {}),
    ("Slice", ["four", "one"], [[1], [-3], [4], [9]], {}),
    ("Slice", ["far_back", "one", "minus_two"], [[2], [-2], [9], [-1], [-9]], {}),
    ("Slice", ["two", "one", "minus"], [[4], [-2], [1]], {}),
]


@pytest.mark.long
def test_a_parameter_that_is_computed_from_data_is_taken(assert_all_same: Any) -> None:
    cases = []
    for operator, rest, values, attributes in _BY_DATA:
        outputs: list[Any] = {"TopK": ["y", ("z", None, TensorProto.INT64)], "Split": ["y", "z"]}.get(operator, ["y"])
        names = ["y", "z"][: len(outputs)]
        nodes = [_node("Abs", ["x"], ["a"]), _node(operator, ["a", "k", *rest], names, **attributes)]
        inputs = [("x", [6, "t"]), ("k", [len(values[0])], TensorProto.INT64)]
        feeds = [{**_feeds((6, 5))[0], "k": _ints(*value)} for value in values]
        cases.append(((nodes, inputs, outputs, {name: _WEIGHTS[name] for name in rest}), *feeds))
    assert_all_same(cases)


def test_bounds_of_unknown_number_are_one_for_each_axis_that_is_given(
    make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    # As torch exports EmbeddingBag: the bounds of a bag are slices of the offsets; only a run knows their length.
    nodes = [
        _node("Add", ["k", "one"], ["next"]),
        _node("Add", ["next", "one"], ["after"]),
        _node("Slice", ["offsets", "k", "next"], ["start"]),
        _node("Slice", ["offsets", "next", "after"], ["end"]),
        _node("Slice", ["x", "start", "end"], ["rows"]),
        _node("Slice", ["x", "start", "end", "one"], ["columns"]),
    ]
    inputs = [("x", [6, "t"]), ("k", [1], TensorProto.INT64), ("offsets", ["o"], TensorProto.INT64)]
    path = make_model(nodes, inputs, ["rows", "columns"], {"one": _ints(1)})
    feeds = [{**_feeds((6, 5))[0], "k": _ints(k), "offsets": _ints(0, 3, 4, 5)} for k in (0, 2)]
    assert_same_as_onnxruntime(path, *feeds)


def test_the_one_row_between_a_place_and_the_next_is_broadcast(
    make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    nodes = [
        _node("Add", ["k", "one"], ["next"]),
        _node("Slice", ["counts", "k", "next"], ["count"]),
        _node("Div", ["x", "count"], ["y"]),
    ]
    inputs = [("x", [6, 5]), ("k", [1], TensorProto.INT64), ("counts", ["c"])]
    path = make_model(nodes, inputs, ["y"], {"one": _ints(1)})
    counts = np.array([1.5, 3.0, 5.0], "float32")
    assert_same_as_onnxruntime(path, *({"x": normal(6, 5), "k": _ints(k), "counts": counts} for k in (0, 2)))


def test_nothing_is_left_of_data_with_free_dimensions(make_model: Any, assert_same_as_onnxruntime: Any) -> None:
    slicing = _node("Slice", ["x", "two", "minus_two", "zero"], ["y"])
    weights = {name: _WEIGHTS[name] for name in ("two", "minus_two", "zero")}
    path = make_model([slicing], [("x", [3, "t"])], ["y"], weights)
    assert_same_as_onnxruntime(path, *_feeds((3, 2), (3, 5)))


def test_a_bound_of_either_sign_by_the_size_is_taken(make_model: Any, assert_same_as_onnxruntime: Any) -> None:
    nodes = [
        _node("Shape", ["x"], ["length"], start=1, end=2),
        _node("Sub", ["length", "four"], ["start"]),
        _node("Slice", ["x", "start", "end", "one"], ["last"]),
        _node("Slice", ["x", "start", "far_back", "one", "minus"], ["backwards"]),
        _node("Concat", ["last", "backwards"], ["y"], axis=1),
    ]
    weights = {name: _WEIGHTS[name] for name in ("four", "end", "one", "far_back", "minus")}
    path = make_model(nodes, [("x", [3, "t"])], ["y"], weights)
    assert_same_as_onnxruntime(path, *_feeds((3, 3), (3, 4), (3, 9)))


def test_a_one_within_a_shape_that_is_computed_from_data_is_broadcast(
    make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    # A mask for all heads, of as many positions as the input `k` says.
    nodes = [
        _node("Abs", ["k"], ["places"]),
        _node("Shape", ["x"], ["batch"], end=1),
        _node("Concat", ["batch", "one", "places", "places"], ["square"], axis=0),
        _node("Concat", ["batch", "one", "places", "one"], ["column"], axis=0),
        _node("Expand", ["pair", "square"], ["mask"]),
        _node("Add", ["x", "mask"], ["masked"]),
        _node("Gather", ["masked", "zero"], ["last"], axis=3),
        _node("Reshape", ["last", "line"], ["flat"]),
        _node("Gather", ["flat", "zero"], ["head"], axis=1),
        _node("Reshape", ["head", "column"], ["again"]),
        _node("Add", ["masked", "again"], ["y"]),
    ]
    weights = {name: _WEIGHTS[name] for name in ("zero", "one")} | {
        "pair": np.array([[1.5], [-0.5]], "float32"),
        "line": _ints(0, 3, -1),
    }
    path = make_model(nodes, [("x", ["n", 3, "s", "s"]), ("k", [1], TensorProto.INT64)], ["y"], weights)
    assert_same_as_onnxruntime(path, *({**_feeds((n, 3, 2, 2))[0], "k": _ints(2)} for n in (1, 4)))


def test_a_product_over_patches_of_a_free_image_is_tiled(make_model: Any, assert_same_as_onnxruntime: Any) -> None:
    # A vision transformer: as many rows as the image has patches, and one more.
    weights = {
        "kernel": _WEIGHTS["kernel"],
        "zero": _ints(0),
        "flat": _ints(0, 8, -1),
        "class": np.ones((1, 1, 8), "float32"),
        "weight": np.random.default_rng(3).standard_normal((8, 64)).astype("float32"),
    }
    nodes = [
        _node("Conv", ["x", "kernel"], ["patches"], strides=[3, 3]),
        _node("Reshape", ["patches", "flat"], ["columns"]),
        _node("Transpose", ["columns"], ["rows"], perm=[0, 2, 1]),
        _node("Shape", ["x"], ["batch"], end=1),
        _node("Concat", ["batch", "ones"], ["classes"], axis=0),
        _node("Expand", ["class", "classes"], ["first"]),
        _node("Concat", ["first", "rows"], ["tokens"], axis=1),
        _node("MatMul", ["tokens", "weight"], ["y"]),
    ]
    path = make_model(nodes, [("x", ["n", 3, "h", "w"])], ["y"], weights | {"ones": _ints(1, 8)})
    model = assert_same_as_onnxruntime(path, *_feeds((2, 3, 9, 12), (1, 3, 7, 6)))
    assert "rows" in {rule for _, rule in model.schedules}


def test_products_of_quotients_of_one_size_are_variables(make_model: Any, target: Any) -> None:
    # Attention with fewer keys than queries: both are as many as the image has patches of some size.
    from tvm import tirx

    from tvmflow.compiler import lower

    nodes = [
        _node("Conv", ["x", "query_kernel"], ["query_image"], strides=[2, 2]),
        _node("Reshape", ["query_image", "flat"], ["queries"]),
        _node("Conv", ["x", "key_kernel"], ["key_image"], strides=[3, 3]),
        _node("Reshape", ["key_image", "flat"], ["keys"]),
        _node("Transpose", ["queries"], ["rows"], perm=[0, 2, 1]),
        _node("MatMul", ["rows", "keys"], ["scores"]),
        _node("Sigmoid", ["scores"], ["y"]),
    ]
    rng = np.random.default_rng(0)
    weights = {
        "query_kernel": rng.standard_normal((8, 3, 2, 2)).astype("float32"),
        "key_kernel": rng.standard_normal((8, 3, 3, 3)).astype("float32"),
        "flat": _ints(0, 8, -1),
    }
    lowered = lower(import_onnx(make_model(nodes, [("x", ["n", 3, "h", "w"])], ["y"], weights)), target)
    products = [item for name, item in lowered.functions_items() if "matmul" in str(name.name_hint)]
    assert products
    for function in products:
        assert all(tirx.is_buffer_var(param) for param in function.params)
        dims = [dim for param in function.params for dim in param.ty.shape]
        assert all(isinstance(dim, tirx.IntImm | tirx.Var) for dim in dims)


def test_padded_data_of_free_size_is_repeated(make_model: Any, assert_same_as_onnxruntime: Any) -> None:
    # TVM fails where it tells whether the scheduled repeat only reshapes.
    nodes = [
        _node("Pad", ["x", "widths"], ["padded"]),
        _node("Tile", ["padded", "times"], ["repeated"]),
        _node("Transpose", ["repeated"], ["y"], perm=[0, 1, 3, 2]),
    ]
    weights = {"widths": _ints(0, 0, 1, 0, 0, 0, 1, 0), "times": _ints(1, 1, 2, 1)}
    path = make_model(nodes, [("x", [6, 4, "t", 6])], ["y"], weights)
    assert_same_as_onnxruntime(path, *_feeds((6, 4, 1, 6), (6, 4, 5, 6)))


def test_a_shape_computed_from_data_must_have_the_elements_of_the_data(make_model: Any, target: Any) -> None:
    from support import builds
    from tvmflow.compiler import build

    inputs = [("x", [6, "t"]), ("k", [2], TensorProto.INT64)]
    model = build(import_onnx(make_model([_node("Reshape", ["x", "k"], ["y"])], inputs, ["y"])), target)
    with pytest.raises(Exception, match=r"(?i)match|shape|assert"):
        builds.run_in_memory(model, [[_feeds((6, 5))[0]["x"], _ints(7, 6)]])


def test_sizes_that_must_be_equal_are_checked_without_a_transpose(
    make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    nodes = [
        _node("Conv", ["x", "w"], ["small"], strides=[2, 2], pads=[1, 1, 1, 1]),
        _node("Resize", ["small", "", "scale"], ["large"]),
        _node("Conv", ["x", "w"], ["same"], pads=[1, 1, 1, 1]),
        _node("Concat", ["large", "same"], ["both"], axis=1),
        _node("Conv", ["both", "v"], ["y"], pads=[1, 1, 1, 1]),
    ]
    weights = {"w": normal(16, 3, 3, 3), "v": normal(16, 32, 3, 3), "scale": np.array([1, 1, 2, 2], "float32")}
    path = make_model(nodes, [("x", ["n", 3, "h", "w"])], ["y"], weights)
    options = BuildOptions(fast_algorithms=False)
    model = assert_same_as_onnxruntime(path, *_feeds((2, 3, 8, 6), (1, 3, 4, 10)), options=options)
    names = [name for name, _ in model.schedules]
    assert len([name for name in names if "transpose" in name]) == 2


def test_the_free_size_that_follows_from_a_constant_shape_is_that_number(
    make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    from support import builds

    weights = {"shape": _ints(1, 4, 6)}
    nodes = [_node("Reshape", ["x", "shape"], ["r"]), _node("Relu", ["r"], ["y"]), _node("Abs", ["x"], ["z"])]
    path = make_model(nodes, [("x", ["n", 4, 2, 3])], ["y", "z"], weights)
    model = assert_same_as_onnxruntime(path, *_feeds((1, 4, 2, 3)))
    (call,) = (
        binding.value
        for block in import_onnx(path).mod["main"].body.blocks
        for binding in block.bindings
        if getattr(getattr(binding.value, "op", None), "name", "") == "relax.reshape"
    )
    assert [int(size) for size in call.args[0].ty.shape.values] == [1, 4, 2, 3]
    with pytest.raises(Exception, match=r"(?i)match"):
        builds.run_in_memory(model, [[normal(2, 4, 2, 3)]])


def test_same_padding_of_free_sizes_equals_onnx_runtime(make_model: Any, assert_same_as_onnxruntime: Any) -> None:
    window: dict[str, Any] = {"kernel_shape": [3], "auto_pad": "SAME_UPPER"}
    nodes = [
        _node("Conv", ["x", "w"], ["a"], strides=[2], **window),
        _node("Conv", ["x", "w"], ["b"], strides=[2], **{**window, "auto_pad": "SAME_LOWER"}),
        _node("MaxPool", ["x"], ["c"], strides=[2], **window),
        _node("AveragePool", ["x"], ["d"], strides=[2], **window),
        _node("AveragePool", ["x"], ["e"], strides=[1], count_include_pad=1, **window),
    ]
    weights = {"w": np.random.default_rng(0).standard_normal((5, 3, 3)).astype("float32")}
    path = make_model(nodes, [("x", [2, 3, "t"])], ["a", "b", "c", "d", "e"], weights)
    assert_same_as_onnxruntime(path, *_feeds((2, 3, 8), (2, 3, 9), (2, 3, 11), (2, 3, 2)))


def test_same_padding_with_strides_of_free_images_copies_them_once(
    make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    # Such layers, with the channels last, are those of TensorFlow's exporters.
    forms: list[tuple[str, dict[str, Any]]] = [
        ("Conv", {"strides": [2, 2], "auto_pad": "SAME_UPPER", "group": 8}),
        ("MaxPool", {"strides": [2, 3], "auto_pad": "SAME_UPPER", "kernel_shape": [4, 3]}),
        ("Conv", {"strides": [3, 2], "auto_pad": "SAME_LOWER"}),
    ]
    nodes = [_node("Transpose", ["x"], ["x0"], perm=[0, 3, 1, 2]), _node("Conv", ["x0", "w"], ["w0"])]
    nodes.append(_node("Relu", ["w0"], ["a"]))
    for place, (operator, form) in enumerate(forms):
        operands = [f"k{place}"] if operator == "Conv" else []
        nodes.append(_node(operator, ["a", *operands], [f"b{place}"], **form))
        nodes.append(_node("Transpose", [f"b{place}"], [f"y{place}"], perm=[0, 2, 3, 1]))
    weights = {"w": normal(8, 3, 1, 1), "k0": normal(8, 1, 3, 3, seed=1), "k2": normal(4, 8, 3, 5, seed=2)}
    path = make_model(nodes, [("x", ["n", "high", "wide", 3])], ["y0", "y1", "y2"], weights)
    feeds = [{"x": normal(*shape, 3)} for shape in ((1, 8, 9), (2, 11, 10), (1, 3, 2))]
    model = assert_same_as_onnxruntime(path, *feeds)
    names = [name for name, _ in model.schedules]
    assert not [name for name in names if "concat" in name or "slice" in name], names
    assert len([name for name in names if name.startswith("pad")]) == len(forms)


@pytest.mark.parametrize("size", [11, "n"], ids=["fixed", "free"])
def test_same_padding_without_strides_is_part_of_the_convolution(
    size: int | str, make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    nodes = [
        _node("Conv", ["x", "w"], ["a"], auto_pad="SAME_UPPER"),
        _node("Relu", ["a"], ["b"]),
        _node("Conv", ["b", "d"], ["c"], auto_pad="SAME_LOWER", group=16),
        _node("Relu", ["c"], ["e"]),
        _node("Conv", ["e", "v"], ["y"], auto_pad="SAME_UPPER"),
    ]
    weights = {"w": normal(16, 5, 4, 3), "d": normal(16, 1, 4, 4, seed=1), "v": normal(8, 16, 3, 2, seed=2)}
    path = make_model(nodes, [("x", [2, 5, size, size])], ["y"], weights)
    sizes = (11,) if size == 11 else (5, 12)
    model = assert_same_as_onnxruntime(path, *({"x": normal(2, 5, number, number)} for number in sizes))
    assert not [name for name, _ in model.schedules if name.startswith("pad")]


@pytest.mark.few(1)
@pytest.mark.parametrize("kernel", [(64, 16, 5), (32, 1, 3), (64, 4, 3)], ids=str)
def test_convolutions_of_free_images_without_padding_are_tiled(
    kernel: tuple[int, int, int], make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    outputs, inputs, size = kernel
    nodes = [_node("Conv", ["x", "w", "b"], ["c"], group=16 // inputs), _node("Relu", ["c"], ["y"])]
    weights = {"w": normal(outputs, inputs, size, size), "b": normal(outputs)}
    path = make_model(nodes, [("x", ["n", 16, "h", "w"])], ["y"], weights)
    model = assert_same_as_onnxruntime(path, {"x": normal(2, 16, 9, 13)}, {"x": normal(1, 16, 16, 5)})
    assert [rule for name, rule in model.schedules if "conv2d" in name] == ["conv2d"]


def test_a_tensor_is_joined_with_constants_of_sizes_that_are_computed_from_data(
    make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    # As Mask R-CNN puts the mask of a box into an image.
    nodes = [
        _node("Relu", ["x"], ["part"]),
        _node("Shape", ["part"], ["shape"]),
        _node("Slice", ["shape", "one", "two", "zero"], ["width"]),
        _node("Concat", ["above", "width"], ["whole"], axis=0),
        _node("ConstantOfShape", ["whole"], ["zeros"]),
        _node("Concat", ["zeros", "part"], ["y"], axis=0),
    ]
    inputs = [("x", ["n", "w"]), ("above", [1], TensorProto.INT64)]
    path = make_model(nodes, inputs, ["y"], {name: _WEIGHTS[name] for name in ("zero", "one", "two")})
    feeds = [{**feed, "above": _ints(rows)} for rows, feed in zip((3, 0), _feeds((2, 5), (4, 7)), strict=True)]
    assert_same_as_onnxruntime(path, *feeds)


# One tile of channels, and several.
@pytest.mark.few(1)
@pytest.mark.parametrize("channels", [16, 70])
def test_a_convolution_of_a_padded_tensor_of_computed_sizes_is_fused_with_its_epilogue(
    channels: int, make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    nodes = [
        _node("Slice", ["x", "start", "end", "axes", "steps"], ["halved"]),
        _node("Pad", ["halved", "pads"], ["padded"], mode="reflect"),
        _node("Conv", ["padded", "filter"], ["filtered"]),
        _node("Add", ["filtered", "biases"], ["sum"]),
        _node("Relu", ["sum"], ["y"]),
    ]
    weights = {
        "start": _ints(0, 0),
        "end": _ints(10**9, 10**9),
        "axes": _ints(2, 3),
        "steps": _ints(2, 2),
        "pads": _ints(0, 0, 1, 1, 0, 0, 1, 1),
        "filter": normal(channels, 3, 3, 3),
        "biases": normal(1, channels, 1, 1),
    }
    path = make_model(nodes, [("x", ["n", 3, "h", "w"])], ["y"], weights)
    model = assert_same_as_onnxruntime(path, *_feeds((1, 3, 17, 20), (2, 3, 8, 9)))
    assert [rule for name, rule in model.schedules if "conv2d" in name] == ["conv2d"]


@pytest.mark.few(2)
@pytest.mark.parametrize("image", [[12, "w"], ["h", 7], [3, "w"], ["h", "w"]], ids=str)
def test_pointwise_convolutions_of_free_images_are_tiled_with_their_epilogue(
    image: list[Any], make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    shape = ["n", 24, *image]
    nodes = [
        _node("Conv", ["x", "kernel", "bias"], ["c"]),
        _node("Add", ["c", "shift"], ["a"]),
        _node("HardSwish", ["a"], ["s"]),
        _node("Mul", ["s", "scale"], ["m"]),
        _node("Add", ["m", "c"], ["y"]),
    ]
    weights = {"kernel": normal(40, 24, 1, 1), "bias": normal(40), "shift": normal(1), "scale": normal(1, 1, 1, seed=1)}
    path = make_model(nodes, [("x", shape)], ["y"], weights)
    sizes = {"n": 2, "h": 5, "w": 13}
    model = assert_same_as_onnxruntime(path, {"x": normal(*(sizes.get(size, size) for size in shape))})
    assert [rule for name, rule in model.schedules if "conv2d" in name] == ["rows"]


def test_a_range_of_floats_to_a_size_has_the_length_of_the_size(
    make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    nodes = [
        _node("Shape", ["x"], ["shape"]),
        _node("Gather", ["shape", "place"], ["size"], axis=0),
        _node("Cast", ["size"], ["wide"], to=TensorProto.FLOAT),
        _node("Range", ["half", "wide", "one"], ["centres"]),
        _node("Add", ["x", "centres"], ["y"]),
        _node("Range", ["half", "wide", "two"], ["odd"]),
        _node("Range", ["wide", "far", "one"], ["rest"]),
    ]
    numbers = {"half": 0.5, "one": 1, "two": 2, "far": 30}
    weights = {"place": np.array(1), **{name: np.array(value, "float32") for name, value in numbers.items()}}
    path = make_model(nodes, [("x", ["high", "wide"])], ["y", "odd", "rest"], weights)
    imported = import_onnx(path)
    # The model computes the lengths of the two other ranges alone.
    assert imported.mod.script().count("tensor_to_shape") == 2
    assert_same_as_onnxruntime(path, *_feeds((3, 5), (2, 1), (4, 12)))


def test_a_range_that_descends_has_the_length_of_its_sizes(make_model: Any, assert_same_as_onnxruntime: Any) -> None:
    # As the distances of tokens in XLNet.
    nodes = [
        _node("Shape", ["x"], ["shape"]),
        _node("Gather", ["shape", "place"], ["size"], axis=0),
        _node("Neg", ["size"], ["end"]),
        _node("Range", ["size", "end", "down"], ["distances"]),
        _node("Range", ["size", "end", "thrice"], ["few"]),
        _node("Range", ["size", "place", "down"], ["rest"]),
        *(_node("Cast", [name], [f"{name}_y"], to=TensorProto.FLOAT) for name in ("distances", "few", "rest")),
    ]
    weights = {"place": np.array(1), "down": np.array(-1), "thrice": np.array(-3)}
    path = make_model(nodes, [("x", ["high", "wide"])], ["distances_y", "few_y", "rest_y"], weights)
    assert "tensor_to_shape" not in import_onnx(path).mod.script()
    assert_same_as_onnxruntime(path, *_feeds((3, 5), (2, 1), (4, 12)))


def test_a_range_whose_stop_is_behind_its_start_is_empty(make_model: Any, assert_same_as_onnxruntime: Any) -> None:
    # As the starts of windows that torch.unfold moves over a signal.
    nodes = [
        _node("Shape", ["x"], ["shape"]),
        _node("Gather", ["shape", "place"], ["size"], axis=0),
        _node("Sub", ["size", "seven"], ["end"]),
        _node("Range", ["zero", "end", "four"], ["starts"]),
        _node("Gather", ["x", "starts"], ["y"], axis=1),
    ]
    weights = {name: np.array(number) for name, number in (("place", 1), ("seven", 7), ("zero", 0), ("four", 4))}
    path = make_model(nodes, [("x", ["high", "wide"])], ["y"], weights)
    assert "tensor_to_shape" not in import_onnx(path).mod.script()
    # ONNX Runtime's optimizer takes a stop below zero for one that counts from the end, here for 4 to 6 samples.
    assert_same_as_onnxruntime(path, *_feeds((3, 3), (2, 1), (2, 7), (2, 8), (4, 21)))


@pytest.mark.long
def test_convolutions_of_free_volumes_are_not_transposed_between_each_other(
    make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    nodes = [
        _node("Conv", ["x", "w"], ["a"], pads=[1] * 6),
        _node("Softmax", ["a"], ["b"], axis=1),
        _node("Conv", ["b", "v"], ["c"], pads=[1] * 6, strides=[2, 2, 2]),
        _node("Softmax", ["c"], ["d"], axis=1),
        _node("Conv", ["d", "u"], ["y"], pads=[1] * 6),
    ]
    weights = {"w": normal(16, 8, 3, 3, 3), "v": normal(16, 16, 3, 3, 3), "u": normal(8, 16, 3, 3, 3)}
    path = make_model(nodes, [("x", ["batch", 8, "deep", "high", "wide"])], ["y"], weights)
    feeds = [{"x": normal(*shape)} for shape in ((1, 8, 4, 6, 5), (3, 8, 5, 4, 9))]
    model = assert_same_as_onnxruntime(path, *feeds)
    # Those of the input and of the output.
    assert sum("transpose" in name for name, _ in model.schedules) <= 3


# kernel, padding, strides, dilations, groups
_GROUPED_VOLUMES = [
    ((3, 3, 3), (1, 1, 1, 1, 1, 1), (1, 1, 1), (1, 1, 1), 16),
    ((3, 1, 1), (1, 0, 0, 2, 0, 0), (2, 1, 1), (2, 1, 1), 16),
    ((2, 3, 1), (0, 1, 0, 1, 1, 0), (1, 2, 1), (1, 1, 1), 2),
]


def test_convolutions_of_volumes_in_groups_are_those_of_images(assert_all_same: Any) -> None:
    cases = []
    for kernel, pads, strides, dilations, groups in _GROUPED_VOLUMES[:: scale.count(normal=2, long=1)]:
        geometry = {"pads": pads, "strides": strides, "dilations": dilations, "group": groups}
        weights = {"w": normal(16, 16 // groups, *kernel), "b": normal(16)}
        for shape in ([2, 16, 5, 6, 7], ["n", 16, "deep", "high", "wide"]):
            case = ([_node("Conv", ["x", "w", "b"], ["y"], **geometry)], [("x", shape)], ["y"], weights)
            cases.append((case, {"x": normal(2, 16, 5, 6, 7)}))
    model = assert_all_same(cases)
    assert not [name for name, _ in model.schedules if "conv3d" in name]


def test_poolings_of_volumes_alone_have_their_channels_last(assert_all_same: Any) -> None:
    cases = []
    for operator, kernel in (("MaxPool", [3, 3, 3]), ("AveragePool", [3, 2, 2]), ("MaxPool", [1, 3, 2])):
        pool = _node(
            operator, ["x"], ["y"], kernel_shape=kernel, strides=[1, 2, 2], pads=[size // 3 for size in kernel] * 2
        )
        for shape in ([2, 16, 5, 6, 7], ["n", 16, "deep", "high", "wide"]):
            cases.append((([pool], [("x", shape)], ["y"]), {"x": normal(2, 16, 5, 6, 7)}))
    rules = rule_counts(assert_all_same(cases))
    # Windows of one slice are pooled once, and of known sizes as they lie.
    assert rules["pooling"] == 2 * 2 + 2 * 2 + 1


@pytest.mark.parametrize("end", [-1, 1000])
def test_a_layer_of_a_crop_of_free_size_that_ends_the_model_keeps_its_rule(
    end: int, make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    """The output's size is checked, and TVM puts the call into the check: passes did not see the convolution."""
    nodes = [_node("Slice", ["x", "one", "end", "two"], ["a"]), _node("Conv", ["a", "w"], ["y"], pads=[1] * 4)]
    weights = {"one": np.array([1]), "end": np.array([end]), "two": np.array([2])}
    weights["w"] = np.random.default_rng(0).standard_normal((16, 16, 3, 3)).astype("float32")
    path = make_model(nodes, [("x", ["n", 16, "h", 20])], ["y"], weights)
    feeds = [{"x": np.random.default_rng(size).random((2, 16, size, 20), "float32")} for size in (3, 9, 20)]
    model = assert_same_as_onnxruntime(path, *feeds)
    assert {rule for name, rule in model.schedules if "conv2d" in name} <= {"conv2d", "winograd"}


def test_a_softmax_behind_a_slice_of_free_length_goes_row_by_row(
    make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    """Its rows are `length - 1`, of a length that is no dimension of the function."""
    nodes = [_node("Slice", ["x", "one", "end", "two"], ["a"]), _node("Softmax", ["a"], ["y"], axis=-1)]
    weights = {"one": np.array([1]), "end": np.array([2**62]), "two": np.array([2])}
    path = make_model(nodes, [("x", ["n", 2, "length", 16])], ["y"], weights)
    feeds = [{"x": np.random.default_rng(size).random((2, 2, size, 16), "float32")} for size in (2, 9, 40)]
    model = assert_same_as_onnxruntime(path, *feeds)
    assert [rule for name, rule in model.schedules if "softmax" in name] == ["rowwise"]
