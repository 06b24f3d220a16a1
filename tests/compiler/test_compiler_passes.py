"""Every canonicalisation pass: what it rewrites, and that results stay those of ONNX Runtime."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
import tvm_ffi
from onnx import helper
from tvm import relax, tirx

from support import scale
from support.arrays import normal
from support.builds import canonical_form, rule_counts
from tvmflow.arrays import Array
from tvmflow.compiler import BuildOptions, Choices, CompiledModel, build, import_onnx, list_passes
from tvmflow.compiler.operators.common import constant
from tvmflow.compiler.passes import lower_passes, pass_names
from tvmflow.compiler.passes.constants import FoldConstantCalls, ShareResults
from tvmflow.compiler.passes.order import BindSizesFirst
from tvmflow.compiler.passes.simplify import remove_identities
from tvmflow.hardware.target import resolve

Check = Callable[..., CompiledModel]


def _number(value: float) -> Array:
    return np.array(value, "float32")


@dataclass(frozen=True)
class Case:
    """A model of one input `x` and one output `y`, the pass that is to rewrite it, and the operators before and after.

    `nodes` are lines of `output = Operator(input, ...; attribute=value)`.
    """

    name: str
    rewriter: str
    nodes: str
    shape: tuple[Any, ...]
    present: Sequence[str] = ()
    absent: Sequence[str] = ()
    weights: dict[str, Array] = field(default_factory=dict)
    shapes: Sequence[tuple[int, ...]] = ()
    rtol: float = 1e-4


def _nodes(text: str) -> list[onnx.NodeProto]:
    nodes = []
    for line in filter(None, map(str.strip, text.split("\n"))):
        outputs, call = line.split(" = ")
        operator, operands = call.rstrip(")").split("(")
        inputs, _, attributes = operands.partition(";")
        values = eval(f"dict({attributes})")  # noqa: S307  # written in this file
        nodes.append(
            helper.make_node(
                operator, [item.strip() for item in inputs.split(",")], [item.strip() for item in outputs.split(",")],
                **values,
            )
        )  # fmt: skip
    return nodes


def _operators(mod: tvm.IRModule) -> set[str]:
    """The names of the operators that a module calls, as `nn.gelu`."""
    names: set[str] = set()

    def add(expr: Any) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op):
            names.add(expr.op.name.removeprefix("relax."))

    relax.analysis.post_order_visit(mod["main"], add)
    return names


_ROOT, _HALF, _ONE = {"root": _number(2**0.5)}, {"half": _number(0.5)}, {"one": _number(1)}
_TANH = {"k": _number((2 / np.pi) ** 0.5), "c": _number(0.044715), **_HALF, **_ONE}
_EPS = {"eps": _number(1e-5)}
_BATCH_NORM = {"s": normal(6), "b": normal(6, seed=1), "m": normal(6, seed=2), "v": normal(6, seed=3) ** 2 + 0.1}
_LAYER_NORM = """
    m = ReduceMean(x, axes)
    d = Sub(x, m)
    q = Pow(d, two)
    v = ReduceMean(q, axes)
    e = Add(v, eps)
    r = Sqrt(e)
    n = Div(d, r)
"""
_LAST = {"axes": np.array([-1]), "two": _number(2), **_EPS}

CASES = [
    Case(
        "gelu of x / sqrt(2), the half last",
        "ComposeGelu",
        "a = Div(x, root)\n b = Erf(a)\n c = Add(b, one)\n d = Mul(x, c)\n y = Mul(d, half)",
        (5, 37),
        ["nn.gelu"],
        ["erf"],
        {**_ROOT, **_HALF, **_ONE},
    ),
    Case(
        "gelu of x times a constant, the half first",
        "ComposeGelu",
        "a = Mul(recip, x)\n b = Erf(a)\n c = Add(one, b)\n d = Mul(half, x)\n y = Mul(d, c)",
        ("n", 19),
        ["nn.gelu"],
        ["erf"],
        {"recip": _number(0.5**0.5), **_HALF, **_ONE},
        [(3, 19), (1, 19)],
    ),
    Case(
        "gelu with the half inside",
        "ComposeGelu",
        "a = Div(x, root)\n b = Erf(a)\n c = Add(b, one)\n d = Mul(half, c)\n y = Mul(x, d)",
        (2, 3, 50),
        ["nn.gelu"],
        ["erf"],
        {**_ROOT, **_HALF, **_ONE},
    ),
    Case(
        "gelu that gates",
        "ComposeGelu",
        "s = Sin(x)\n a = Div(x, root)\n b = Erf(a)\n c = Add(b, one)\n"
        "d = Mul(s, c)\n e = Mul(x, d)\n y = Mul(e, half)",
        (4, 33),
        ["nn.gelu"],
        ["erf"],
        {**_ROOT, **_HALF, **_ONE},
    ),
    Case(
        "gelu by tanh",
        "ComposeGelu",
        """
        p = Pow(x, three)
        q = Mul(p, c)
        r = Add(x, q)
        s = Mul(r, k)
        t = Tanh(s)
        u = Add(t, one)
        v = Mul(x, half)
        y = Mul(v, u)
        """,
        (5, 41),
        ["nn.gelu_tanh"],
        ["tanh", "power"],
        {"three": _number(3), **_TANH},
    ),
    Case(
        "gelu by tanh with the cube factored",
        "ComposeGelu",
        """
        p = Mul(x, x)
        q = Mul(c, p)
        r = Add(one, q)
        s = Mul(x, k)
        t = Mul(s, r)
        u = Tanh(t)
        v = Add(one, u)
        w = Mul(x, v)
        y = Mul(half, w)
        """,
        (3, 17),
        ["nn.gelu_tanh"],
        ["tanh"],
        _TANH,
    ),
    Case("silu", "ComposeSilu", "a = Sigmoid(x)\n y = Mul(a, x)", (7, 21), ["nn.silu"], ["sigmoid"]),
    Case(
        "a logistic function in primitives",
        "ComposeSilu",
        "a = Neg(x)\n b = Exp(a)\n c = Add(b, one)\n y = Div(one, c)",
        (3, 35),
        ["sigmoid"],
        ["exp"],
        _ONE,
    ),
    Case(
        "silu in primitives",
        "ComposeSilu",
        "a = Neg(x)\n b = Exp(a)\n c = Add(one, b)\n y = Div(x, c)",
        (3, 35),
        ["nn.silu"],
        ["exp"],
        _ONE,
    ),
    Case("mish", "SimplifyMish", "y = Mish(x)", (9, 33), ["exp", "divide"], ["tanh", "log"]),
    Case(
        "mish by softplus",
        "SimplifyMish",
        "a = Softplus(x)\n b = Tanh(a)\n y = Mul(x, b)",
        (9, 33),
        ["exp"],
        ["tanh", "log"],
    ),
    Case(
        "hard-swish",
        "SplitClip",
        "y = HardSwish(x)",
        (1, 3, 5, 7),
        ["nn.relu", "minimum"],
        ["clip"],
    ),
    Case("hard-sigmoid", "SplitClip", "y = HardSigmoid(x; alpha=0.3)", (5, 9), ["nn.relu", "minimum"], ["clip"]),
    Case(
        "layer norm",
        "ComposeNorms",
        f"{_LAYER_NORM} y = Identity(n)",
        (2, 5, 37),
        ["nn.layer_norm"],
        ["mean", "sqrt"],
        _LAST,
    ),
    Case(
        "layer norm with scale and bias",
        "ComposeNorms",
        f"{_LAYER_NORM} g = Mul(n, gamma)\n y = Add(g, beta)",
        ("n", 5, 20),
        ["nn.layer_norm"],
        ["mean", "multiply", "add"],
        {**_LAST, "gamma": normal(20), "beta": normal(20, seed=1)},
        [(1, 5, 20), (3, 5, 20)],
    ),
    Case(
        "layer norm over two dimensions",
        "ComposeNorms",
        f"{_LAYER_NORM} y = Identity(n)",
        (3, 4, 9),
        ["nn.layer_norm"],
        ["mean"],
        {"axes": np.array([-2, -1]), "two": _number(2), **_EPS},
    ),
    Case(
        "layer norm over channels",
        "ComposeNorms",
        f"{_LAYER_NORM} g = Mul(n, gamma)\n y = Add(g, gamma)",
        (2, 6, 5, 7),
        ["nn.layer_norm", "permute_dims"],
        ["mean"],
        {"axes": np.array([1]), "two": _number(2), "gamma": normal(6, 1, 1), **_EPS},
    ),
    Case(
        "layer norm as a product with one over the root",
        "ComposeNorms",
        """
        m = ReduceMean(x, axes)
        d = Sub(x, m)
        q = Mul(d, d)
        v = ReduceMean(q, axes)
        e = Add(eps, v)
        r = Sqrt(e)
        i = Reciprocal(r)
        g = Mul(i, gamma)
        y = Mul(d, g)
        """,
        (4, 23),
        ["nn.layer_norm"],
        ["mean"],
        {**_LAST, "gamma": normal(23)},
    ),
    Case(
        "root-mean-square norm",
        "ComposeNorms",
        """
        q = Pow(x, two)
        v = ReduceMean(q, axes)
        e = Add(v, eps)
        r = Sqrt(e)
        i = Reciprocal(r)
        n = Mul(x, i)
        y = Mul(gamma, n)
        """,
        (2, 5, 33),
        ["nn.rms_norm"],
        ["mean", "multiply"],
        {**_LAST, "gamma": normal(33)},
    ),
    Case(
        "instance norm",
        "ComposeNorms",
        "y = InstanceNormalization(x, s, b)",
        (2, 6, 5, 7),
        ["nn.instance_norm"],
        ["mean", "variance"],
        {"s": normal(6), "b": normal(6, seed=1)},
    ),
    Case(
        "instance norm of free lines",
        "ComposeNorms",
        "y = InstanceNormalization(x, s, b)",
        ("n", 6, "w"),
        ["nn.instance_norm"],
        ["mean", "variance"],
        {"s": normal(6), "b": normal(6, seed=1)},
        [(1, 6, 35), (2, 6, 1)],
    ),
    Case(
        "group norm by reshapes",
        "ComposeNorms",
        """
        r = Reshape(x, groups)
        n = InstanceNormalization(r, ones, zeros)
        u = Reshape(n, whole)
        g = Mul(u, gamma)
        y = Add(g, beta)
        """,
        (2, 6, 5, 7),
        ["nn.group_norm"],
        ["mean", "variance", "reshape", "multiply"],
        {
            "groups": np.array([0, 3, -1]),
            "whole": np.array([2, 6, 5, 7]),
            "ones": np.ones(3, "float32"),
            "zeros": np.zeros(3, "float32"),
            "gamma": normal(6, 1, 1),
            "beta": normal(6, 1, 1, seed=1),
        },
    ),
    *(
        Case(
            f"norm of {groups} groups of a free image by reshapes",
            "ComposeNorms",
            """
            z = Shape(x)
            r = Reshape(x, groups)
            n = InstanceNormalization(r, ones, zeros)
            u = Reshape(n, z)
            g = Mul(u, gamma)
            y = Add(g, beta)
            """,
            ("n", 6, "h", "w"),
            ["nn.group_norm"],
            ["mean", "variance", "reshape", "multiply", "nn.instance_norm"],
            {
                "groups": np.array([0, groups, -1]),
                "ones": np.ones(groups, "float32"),
                "zeros": np.zeros(groups, "float32"),
                "gamma": normal(6, 1, 1),
                "beta": normal(6, 1, 1, seed=1),
            },
            [(1, 6, 5, 7), (2, 6, 1, 3)],
        )
        for groups in (1, 3)
    ),
    Case(
        "softmax less the largest",
        "ComposeSoftmax",
        "a = ReduceMax(x, axes)\n b = Sub(x, a)\n c = Exp(b)\n d = ReduceSum(c, axes)\n y = Div(c, d)",
        (4, 5, 21),
        ["nn.softmax"],
        ["exp", "max", "sum"],
        {"axes": np.array([-1])},
    ),
    Case(
        "softmax as it is, along the first dimension",
        "ComposeSoftmax",
        "c = Exp(x)\n d = ReduceSum(c, axes)\n y = Div(c, d)",
        (9, 5),
        ["nn.softmax"],
        ["exp", "sum"],
        {"axes": np.array([0])},
    ),
    Case(
        "small powers",
        "MultiplyInstead",
        "a = Pow(x, four)\n y = Div(a, three)",
        (3, 11),
        ["multiply"],
        ["power", "divide"],
        {"four": _number(4), "three": _number(3)},
    ),
    Case(
        "batch norm by itself",
        "FoldBatchNorm",
        "y = BatchNormalization(x, s, b, m, v)",
        ("n", 6, 5, 3),
        ["multiply", "add"],
        ["nn.batch_norm"],
        _BATCH_NORM,
        [(1, 6, 5, 3), (2, 6, 5, 3)],
    ),
    Case(
        "batch norm of vectors",
        "FoldBatchNorm",
        "y = BatchNormalization(x, s, b, m, v)",
        (7, 6),
        ["multiply", "add"],
        ["nn.batch_norm"],
        _BATCH_NORM,
    ),
    *(
        Case(
            f"batch norm after a convolution, {kind}",
            "FoldScales",
            f"a = {operator}(x, w{', bias' if bias else ''}; {attributes})\n y = BatchNormalization(a, s, b, m, v)",
            shape,
            [relaxed, "add"],
            ["multiply"],
            {"w": weight, "bias": normal(6, seed=7), **_BATCH_NORM},
        )
        for kind, operator, relaxed, attributes, bias, shape, weight in (
            ("plain", "Conv", "nn.conv2d", "pads=[1,1,1,1]", False, (2, 5, 7, 8), normal(6, 5, 3, 3)),
            ("with a bias", "Conv", "nn.conv2d", "strides=[2,2]", True, (1, 5, 7, 8), normal(6, 5, 3, 3)),
            ("grouped", "Conv", "nn.conv2d", "group=3", True, (1, 9, 7, 8), normal(6, 3, 3, 3)),
            ("depthwise", "Conv", "nn.conv2d", "group=6", False, (1, 6, 7, 8), normal(6, 1, 3, 3)),
            ("of one dimension", "Conv", "nn.conv2d", "pads=[1,1]", True, (1, 4, 9), normal(6, 4, 3)),
            ("of three dimensions", "Conv", "nn.conv3d", "group=1", True, (1, 4, 3, 5, 4), normal(6, 4, 2, 3, 2)),
            (
                "transposed",
                "ConvTranspose",
                "nn.conv2d_transpose",
                "strides=[2,2]",
                True,
                (1, 4, 5, 6),
                normal(4, 6, 3, 3),
            ),
            (
                "transposed in groups",
                "ConvTranspose",
                "nn.conv2d_transpose",
                "group=2",
                True,
                (1, 4, 5, 6),
                normal(4, 3, 3, 3),
            ),
        )
    ),
    Case(
        "a scale before a padded convolution",
        "FoldScales",
        "a = Mul(x, f)\n y = Conv(a, w; pads=[1,1,1,1], group=2)",
        (1, 4, 6, 5),
        ["nn.conv2d"],
        ["multiply"],
        {"f": normal(4, 1, 1), "w": normal(6, 2, 3, 3)},
    ),
    Case(
        "batch norm before a pointwise convolution",
        "FoldScales",
        "a = BatchNormalization(x, s, b, m, v)\n y = Conv(a, w)",
        (2, 6, 4, 5),
        ["nn.conv2d", "add"],
        ["multiply"],
        {"w": normal(9, 6, 1, 1), **_BATCH_NORM},
    ),
    Case(
        "a scale before a transposed convolution in groups",
        "FoldScales",
        "a = Mul(x, f)\n y = ConvTranspose(a, w; group=2)",
        (1, 4, 6, 5),
        ["nn.conv2d_transpose"],
        ["multiply"],
        {"f": normal(4, 1, 1), "w": normal(4, 3, 3, 3)},
    ),
    Case(
        "scales and shifts around a dense layer",
        "FoldScales",
        "a = Mul(x, f)\n b = Add(a, f)\n c = MatMul(b, w)\n d = Add(c, g)\n e = Sub(d, g)\n y = Mul(e, g)",
        ("n", 3, 7),
        ["matmul", "add"],
        ["multiply", "subtract"],
        {"f": normal(7), "g": normal(9), "w": normal(7, 9)},
        [(1, 3, 7), (4, 3, 7)],
    ),
    *(
        Case(
            f"several channels of one before a {kind}",
            "FoldScales",
            f"a = Mul(x, f)\n b = Add(a, f)\n y = {operator}(b, w)",
            shape,
            ["multiply", relaxed, "add"],
            [],
            {"f": factor, "w": weight},
        )
        for kind, operator, relaxed, shape, factor, weight in (
            ("convolution", "Conv", "nn.conv2d", (2, 1, 6, 5), normal(3, 1, 1), normal(4, 3, 3, 3)),
            ("product", "MatMul", "matmul", (4, 1), normal(1, 7), normal(7, 9)),
        )
    ),
    Case(
        "padding before a convolution",
        "FoldPadding",
        "a = Pad(x, p)\n y = Conv(a, w; pads=[0,1,0,1])",
        (1, 3, 7, 6),
        ["nn.conv2d"],
        ["nn.pad"],
        {"p": np.array([0, 0, 1, 2, 0, 0, 3, 0]), "w": normal(5, 3, 3, 3)},
    ),
    Case(
        "padding before an average",
        "FoldPadding",
        "a = Pad(x, p)\ny = AveragePool(a; kernel_shape=[3,3], strides=[2,2])",
        (1, 3, 7, 7),
        ["nn.avg_pool2d"],
        ["nn.pad"],
        {"p": np.array([0, 0, 1, 1, 0, 0, 1, 1])},
    ),
    Case("a matrix by a vector", "MatricesOfVectors", "y = MatMul(x, w)", (4, 5, 7), ["reshape"], [], {"w": normal(7)}),
    Case(
        "weights on the left",
        "MatricesOfVectors",
        "y = MatMul(w, x)",
        (3, 7, 1),
        ["matmul", "reshape"],
        [],
        {"w": normal(19, 7)},
    ),
    Case(
        "what returns its input",
        "RemoveIdentities",
        """
        a = Add(x, zero)
        b = Mul(ones, a)
        c = Cast(b; to=1)
        d = Identity(c)
        e = Dropout(d)
        f = Concat(e; axis=1)
        g = Slice(f, zeros, ends, first)
        h = Reshape(g, same)
        i = Expand(h, three)
        j = Transpose(i; perm=[0, 1])
        y = Relu(j)
        """,
        (3, 5),
        ["nn.relu"],
        ["add", "multiply", "astype", "concat", "strided_slice", "reshape", "permute_dims", "broadcast_to"],
        {
            "zero": _number(0),
            "ones": np.ones((3, 5), "float32"),
            "zeros": np.array([0, 0]),
            "ends": np.array([3, 5]),
            "first": np.array([0, 1]),
            "same": np.array([3, 5]),
            "three": np.array([3, 1]),
        },
    ),
    Case(
        "reshapes in a row",
        "MergeReshapes",
        "a = Reshape(x, flat)\n b = Unsqueeze(a, first)\n c = Reshape(b, other)\n d = Squeeze(c, first)\n y = Relu(d)",
        (3, 4, 5),
        ["nn.relu"],
        ["squeeze", "expand_dims"],
        {"flat": np.array([12, 5]), "first": np.array([0]), "other": np.array([1, 6, 10])},
    ),
    Case(
        "arithmetic of constants",
        "EvaluateConstants",
        # The import itself computes what is small, and weights of float32 weights.
        "a = Cast(w; to=1)\n b = Sqrt(a)\n c = Transpose(b)\n d = Mul(c, v)\n y = MatMul(x, d)",
        (3, 70),
        ["matmul"],
        ["astype", "sqrt", "permute_dims", "multiply"],
        {"w": np.arange(4900, dtype="int32").reshape(70, 70), "v": normal(70, 1) ** 2 + 1},
    ),
    Case(
        "a reshape to a shape that is computed",
        "EvaluateConstants",
        """
        s = Shape(x)
        n = Gather(s, zero)
        u = Unsqueeze(n, first)
        t = Concat(u, rest; axis=0)
        r = Reshape(x, t)
        y = Relu(r)
        """,
        ("n", 4, 5),
        ["nn.relu"],
        ["concat", "shape_of", "shape_to_tensor", "take"],
        {"zero": np.array(0), "first": np.array([0]), "rest": np.array([-1])},
        [(2, 4, 5), (1, 4, 5)],
    ),
    Case(
        "squeeze from the back",
        "CountAxesFromTheFront",
        "a = Squeeze(x, last)\n y = Relu(a)",
        (3, 1, 5),
        ["squeeze"],
        [],
        {"last": np.array([-2])},
    ),
    Case(
        "one-dimensional convolutions",
        "ConvolveInTwoDimensions",
        "y = Conv(x, w; pads=[1,2])",
        (2, 4, 9),
        ["nn.conv2d"],
        ["nn.conv1d"],
        {"w": normal(6, 4, 3)},
    ),
]


def _model(cases: Sequence[Case], make_model: Any) -> Path:
    """One model of these cases beside each other; the input and the output of the first are `x0` and `y0`."""
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, Array] = {}
    for number, case in enumerate(cases):
        for node in _nodes(case.nodes):
            weights |= {f"{name}{number}": case.weights[name] for name in node.input if name in case.weights}
            node.input[:] = [f"{name}{number}" if name else "" for name in node.input]
            node.output[:] = [f"{name}{number}" for name in node.output]
            nodes.append(node)
    shapes = [[f"{dim}{n}" if isinstance(dim, str) else dim for dim in case.shape] for n, case in enumerate(cases)]
    inputs = [(f"x{number}", shape) for number, shape in enumerate(shapes)]
    path: Path = make_model(nodes, inputs, [f"y{number}" for number in range(len(cases))], weights)
    return path


@pytest.mark.parametrize(
    ("dilation", "pads", "stride", "kernel", "padding"),
    [
        (12, [12] * 4, 1, [3, 3], [12] * 4),
        (16, [16] * 4, 1, [1, 1], [0] * 4),
        (8, [8, 8, 16, 0], 2, [3, 2], [8, 0, 16, 0]),
        (20, [20, 20, 20, 19], 1, [1, 2], [0, 0, 0, 19]),
    ],
)
def test_taps_that_meet_nothing_but_padding_are_removed(
    dilation: int, pads: list[int], stride: int, kernel: list[int], padding: list[int], make_model: Any
) -> None:
    attributes = f"pads={pads}, dilations=[{dilation}, {dilation}], strides=[{stride}, {stride}]"
    case = Case("dilated", "", f"y = Conv(x, w; {attributes})", (1, 4, 16, 16), weights={"w": normal(5, 4, 3, 3)})
    calls: list[relax.Call] = []
    relax.analysis.post_order_visit(
        canonical_form(_model([case], make_model))["main"],
        lambda expr: calls.append(expr) if isinstance(expr, relax.Call) else None,
    )
    (call,) = (call for call in calls if getattr(call.op, "name", "") == "relax.nn.conv2d")
    assert [int(size) for size in call.args[1].ty.shape.values[2:]] == kernel
    assert [int(size) for size in call.attrs.padding] == padding


# The importer evaluates the shapes of this case, so that no pass has to.
_FOLDED_AT_IMPORT = {"a reshape to a shape that is computed"}


@pytest.fixture(scope="module")
def rewritten() -> dict[str, tvm.IRModule]:
    """Models after all passes, by their cases' names."""
    return {}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_pass_rewrites_its_operators(case: Case, make_model: Any, rewritten: dict[str, tvm.IRModule]) -> None:
    rewritten[case.name] = canonical_form(_model([case], make_model))
    operators = _operators(rewritten[case.name])
    assert operators >= set(case.present)
    assert operators.isdisjoint(case.absent)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name not in _FOLDED_AT_IMPORT], ids=lambda case: case.name
)
def test_without_the_pass_the_model_stays_as_it_was(
    case: Case, make_model: Any, rewritten: dict[str, tvm.IRModule]
) -> None:
    path = _model([case], make_model)
    usual = rewritten[case.name] if case.name in rewritten else canonical_form(path)
    assert not tvm_ffi.structural_equal(canonical_form(path, [case.rewriter]), usual)


@pytest.mark.few(8)
@pytest.mark.parametrize("rewriter", sorted({case.rewriter for case in CASES}))
def test_the_results_of_what_a_pass_rewrites_are_those_of_onnx_runtime(
    rewriter: str, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    cases = [case for case in CASES if case.rewriter == rewriter]
    # A normal run takes every second one of many.
    cases = cases[:: scale.choose(normal=2 if len(cases) > 4 else 1, long=1)]
    shapes = [case.shapes or [case.shape] for case in cases]
    feeds = [
        {f"x{number}": normal(*sizes[min(turn, len(sizes) - 1)], seed=turn) for number, sizes in enumerate(shapes)}
        for turn in range(max(map(len, shapes)))
    ]
    assert_same_as_onnxruntime(_model(cases, make_model), *feeds, rtol=max(case.rtol for case in cases))


def test_constants_of_one_element_keep_their_dimensions(assert_all_same: Check) -> None:
    cases = [
        ("a = Mul(x, scale)\n s = Sigmoid(x)\n y = Mul(a, s)", (7,), {"scale": np.full((1, 1), 3, "float32")}),
        (
            "d = Div(x, root)\n e = Erf(d)\n p = Add(e, one)\n m = Mul(x, half)\n y = Mul(m, p)",
            (2, 7),
            {"root": _number(2**0.5), "one": _number(1), "half": np.full((1, 1, 1), 0.5, "float32")},
        ),
        (
            "n = Neg(x)\n e = Exp(n)\n p = Add(e, one)\n y = Div(x, p)",
            (7,),
            {"one": np.ones((1, 1), "float32")},
        ),
        ("e = Exp(x)\n p = Add(e, one)\n l = Log(p)\n y = Tanh(l)", (7,), {"one": np.ones((1, 1), "float32")}),
        (
            """m = ReduceMean(x, last)
            d = Sub(x, m)
            q = Mul(d, d)
            v = ReduceMean(q, last)
            a = Add(v, epsilon)
            s = Sqrt(a)
            y = Div(d, s)""",
            (3, 7),
            {"last": np.array([-1]), "epsilon": np.full((1, 1, 1), 1e-5, "float32")},
        ),
    ]
    assert_all_same(
        ((_nodes(nodes), [("x", shape)], ["y"], weights), {"x": normal(*shape)}) for nodes, shape, weights in cases
    )


def test_numbers_that_round_or_overflow_are_not_merged(assert_all_same: Check) -> None:
    x, weight = normal(4, 7), normal(7, 3)
    numbers = {"k": _number(3 * 2.0**22), "l": _number(-3 * 2.0**22), "s": _number(8)}
    rounding = "a = Add({}, k)\n {} = Add(a, l)\n"
    norm = "n = LayerNormalization(x, one, zero)\n"
    cases: list[tuple[str, dict[str, Array], Array]] = [
        ("b = Mul(x, s)\n" + rounding.format("b", "d") + "y = Div(d, s)", numbers, x),
        (rounding.format("x", "r") + "y = MatMul(r, w)", {**numbers, "w": weight}, x),
        (
            norm + rounding.format("n", "y"),
            {**numbers, "one": np.ones(7, "float32"), "zero": np.zeros(7, "float32")},
            x,
        ),
        ("m = MatMul(x, w)\n c = Add(m, b)\n" + rounding.format("c", "y"), {**numbers, "w": weight, "b": normal(3)}, x),
        # The quotients lie between two whole numbers.
        (
            "b = Div(x, tenth)\n" + rounding.format("b", "y"),
            {**numbers, "tenth": _number(0.1)},
            ((np.arange(28, dtype="float32") + np.float32(0.5)) * np.float32(0.1)).reshape(4, 7),
        ),
        ("a = Mul(x, k)\n y = Mul(a, k)", {"k": _number(1e30)}, x * np.float32(1e-30)),
        ("m = MatMul(x, w)\n y = Mul(m, k)", {"k": _number(3e38), "w": weight}, x * np.float32(1e-30)),
        ("d = Sub(x, mean)\n y = MatMul(d, w)", {"mean": _number(1e6), "w": weight}, (x + 1e6).astype("float32")),
    ]
    assert_all_same(
        ((_nodes(nodes), [("x", data.shape)], ["y"], weights), {"x": data}) for nodes, weights, data in cases
    )


_HEADS = """
    {0}1 = MatMul(x, w{0})
    {0}2 = Reshape({0}1, split)
"""


def _attention(mask: bool) -> str:
    """Attention as exporters write it, of `x` to itself, the scale on both operands and a mask computed from `x`."""
    nodes = (
        "".join(_HEADS.format(part) for part in "qkv")
        + """
        q3 = Transpose(q2; perm=[0,2,1,3])
        k3 = Transpose(k2; perm=[0,2,3,1])
        v3 = Transpose(v2; perm=[0,2,1,3])
        q4 = Mul(q3, scale)
        k4 = Mul(k3, scale)
        s1 = MatMul(q4, k4)
        p1 = Softmax({}; axis=-1)
        o1 = MatMul(p1, v3)
        o2 = Transpose(o1; perm=[0,2,1,3])
        y = Reshape(o2, join)
    """.format("s2" if mask else "s1")
    )
    if mask:
        nodes = "m0 = ReduceMean(x, last; keepdims=0)\n m1 = Unsqueeze(m0, middle)\n" + nodes.replace(
            "p1 =", "s2 = Add(s1, m1)\n p1 ="
        )
    return nodes


_ATTENTIONS: list[tuple[tuple[Any, ...], int, list[tuple[int, int]]]] = [
    ((2, 13, 60), 3, [(2, 13)]),
    (("n", "time", 48), 2, [(1, 7), (3, 33), (2, 64)]),
]
_MORE_ATTENTIONS: list[tuple[tuple[Any, ...], int, list[tuple[int, int]]]] = [
    ((1, 32, 32), 2, [(1, 32)]),
    ((1, 197, 64), 1, [(1, 197)]),
    ((1, 1, 36), 2, [(1, 1)]),
    ((3, 5, 14), 2, [(3, 5)]),
    (("n", 9, 48), 3, [(2, 9), (1, 9)]),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("mask", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize(
    ("shape", "heads", "sizes"),
    scale.choose(normal=_ATTENTIONS, long=_ATTENTIONS + _MORE_ATTENTIONS),
    ids=str,
)
def test_attention_becomes_one_function(
    shape: tuple[Any, ...], heads: int, sizes: Any, mask: bool, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    width = shape[-1]
    weights = {
        **{f"w{part}": normal(width, width, seed=seed) / 4 for seed, part in enumerate("qkv")},
        "split": np.array([0, 0, heads, width // heads]), "join": np.array([0, 0, width]),
        "scale": _number((width // heads) ** -0.25),
    }  # fmt: skip
    if mask:
        weights |= {"last": np.array([-1]), "middle": np.array([1, 2])}
    path = make_model(_nodes(_attention(mask)), [("x", shape)], ["y"], weights)
    model = assert_same_as_onnxruntime(path, *({"x": normal(*size, width)} for size in sizes))
    assert rule_counts(model)["attention"] == 1
    assert not [name for name, _ in model.schedules if "softmax" in name or "transpose" in name]


def test_attention_over_slices_of_one_product_copies_nothing(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = """
        a = MatMul(x, w)
        b = Reshape(a, split)
        c = Transpose(b; perm=[2,0,3,1,4])
        d, e, f = Split(c; axis=0, num_outputs=3)
        q = Squeeze(d, first)
        k = Squeeze(e, first)
        v = Squeeze(f, first)
        g = Transpose(k; perm=[0,1,3,2])
        h = MatMul(q, g)
        i = Mul(h, scale)
        j = Softmax(i; axis=3)
        l = MatMul(j, v)
        m = Transpose(l; perm=[0,2,1,3])
        y = Reshape(m, join)
    """
    weights = {
        "w": normal(24, 72) / 4, "split": np.array([2, 11, 3, 2, 12]), "first": np.array([0]),
        "join": np.array([2, 11, 24]), "scale": _number(0.3),
    }  # fmt: skip
    path = make_model(_nodes(nodes), [("x", [2, 11, 24])], ["y"], weights)
    model = assert_same_as_onnxruntime(path, {"x": normal(2, 11, 24)})
    assert rule_counts(model)["attention"] == 1
    assert not [name for name, _ in model.schedules if "slice" in name or "split" in name or "transpose" in name]


def test_attention_without_heads_and_with_other_keys(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes = """
        a = Transpose(k; perm=[0,2,1])
        b = MatMul(q, a)
        c = Add(b, m)
        d = Softmax(c; axis=-1)
        y = MatMul(d, v)
    """
    inputs = {"q": (4, 6, 10), "k": (4, 37, 10), "v": (4, 37, 10), "m": (6, 37)}
    path = make_model(_nodes(nodes), list(inputs.items()), ["y"])
    feed = {name: normal(*shape, seed=seed) for seed, (name, shape) in enumerate(inputs.items())}
    model = assert_same_as_onnxruntime(path, feed)
    assert rule_counts(model)["attention"] == 1


def test_attention_over_keys_whose_number_is_free(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes = "a = Transpose(k; perm=[0,1,3,2])\n b = MatMul(q, a)\n c = Add(b, m)\n d = Softmax(c)\n y = MatMul(d, v)"
    inputs = {"q": ("n", 2, "s", 16), "k": ("n", 2, "t", 16), "v": ("n", 2, "t", 16), "m": ("n", 1, "s", "t")}
    path = make_model(_nodes(nodes), list(inputs.items()), ["y"])
    feeds = [
        {
            name: normal(*(sizes[dim] if isinstance(dim, str) else dim for dim in dims), seed=seed)
            for seed, (name, dims) in enumerate(inputs.items())
        }
        for sizes in ({"n": 1, "s": 3, "t": 37}, {"n": 2, "s": 9, "t": 5}, {"n": 2, "s": 3, "t": 0})
    ]
    model = assert_same_as_onnxruntime(path, *feeds)
    assert rule_counts(model)["attention"] == 1


@pytest.mark.parametrize("places", [37, "n"], ids=["fixed", "free"])
def test_attention_whose_channels_come_before_its_positions(
    places: int | str, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = """
        a = Transpose(q; perm=[0,1,3,2])
        b = MatMul(a, k)
        c = Mul(b, scale)
        s = Add(c, m)
        d = Softmax(s; axis=-1)
        t = Transpose(d; perm=[0,1,3,2])
        y = MatMul(v, t)
    """
    inputs = {**dict.fromkeys("qkv", (2, 3, 16, places)), "m": (3, places, places)}
    path = make_model(_nodes(nodes), list(inputs.items()), ["y"], {"scale": _number(0.25)})
    feeds = [
        {
            name: normal(*(length if dim == places else dim for dim in dims), seed=seed)
            for seed, (name, dims) in enumerate(inputs.items())
        }
        for length in ((37,) if places == 37 else (5, 40))
    ]
    model = assert_same_as_onnxruntime(path, *feeds)
    assert rule_counts(model)["attention"] == 1


def test_attention_over_free_tokens_beside_fixed_ones(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes = """
        z = Concat(x, i; axis=1)
        h = Reshape(z, heads)
        q = Transpose(h; perm=[0,2,1,3])
        k = Transpose(h; perm=[0,2,3,1])
        b = MatMul(q, k)
        d = Softmax(b; axis=-1)
        c = MatMul(d, q)
        t = Transpose(c; perm=[0,2,1,3])
        y = Reshape(t, joined)
    """
    weights = {"heads": np.array([0, 0, 2, 16]), "joined": np.array([0, 0, 32])}
    path = make_model(_nodes(nodes), [("x", ["n", "length", 32]), ("i", ["n", 21, 32])], ["y"], weights)
    feeds = [{"x": normal(n, length, 32), "i": normal(n, 21, 32, seed=1)} for n, length in ((1, 3), (2, 16))]
    model = assert_same_as_onnxruntime(path, *feeds)
    assert rule_counts(model)["attention"] == 1


def test_scores_over_tokens_beside_those_of_a_cache_have_one_size(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = "z = Concat(past, k; axis=3)\n b = MatMul(q, z)\n t = Tanh(b)\n y = Add(t, m)"
    inputs = [
        ("past", ["n", 2, 16, "before"]),
        ("k", ["n", 2, 16, "length"]),
        ("q", ["n", 2, "length", 16]),
        ("m", ["n", 1, "length", "before + length"]),
    ]
    path = make_model(_nodes(nodes), inputs, ["y"], {})
    feeds = [
        {
            "past": normal(2, 2, 16, before),
            "k": normal(2, 2, 16, length),
            "q": normal(2, 2, length, 16),
            "m": normal(2, 1, length, before + length),
        }
        for before, length in ((5, 1), (3, 19))
    ]
    model = assert_same_as_onnxruntime(path, *feeds)
    functions = tvm.ir.load_json(model.ir_json).functions_items()
    product = next(function for variable, function in functions if "matmul" in str(variable.name_hint))
    sizes = [size for param in product.params if tirx.is_buffer_var(param) for size in param.ty.shape]
    assert not [size for size in sizes if not isinstance(size, tirx.Var | tirx.IntImm)]


def test_pixels_of_several_images_of_free_size_have_one_size(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = """
        p = MaxPool(x; kernel_shape=[1,1], strides=[2,2])
        q = MaxPool(p; kernel_shape=[1,1], strides=[2,2])
        a = Reshape(p, flat)
        b = Reshape(q, flat)
        c = Concat(a, b; axis=2)
        t = Transpose(c; perm=[0,2,1])
        f = MatMul(t, u)
        g = Reshape(f, heads)
        d = Softmax(g; axis=-1)
        v = Cos(d)
        e = Mul(d, v)
        y = ReduceSum(e, last; keepdims=0)
    """
    weights = {"flat": np.array([0, 0, -1]), "last": np.array([-1])}
    weights |= {"heads": np.array([0, 0, 4, 16]), "u": normal(64, 64)}
    inputs = [("x", ["n", 64, "h", "w"])]
    path = make_model(_nodes(nodes), inputs, ["y"], weights)
    feeds = [{"x": normal(n, 64, 5, columns)} for n, columns in ((1, 4), (2, 7))]
    model = assert_same_as_onnxruntime(path, *feeds)
    rules = {name: rule for name, rule in model.schedules if "softmax" in name or "sum" in name}
    assert rules
    assert "fallback" not in rules.values(), rules


def test_tokens_masked_with_minus_infinity_have_no_weight(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes = "a = Transpose(k; perm=[0,1,3,2])\n b = MatMul(q, a)\n c = Add(m, b)\n d = Softmax(c)\n y = MatMul(d, v)"
    inputs = {"q": (1, 2, 9, 16), "k": (1, 2, 9, 16), "v": (1, 2, 9, 16), "m": (9, 9)}
    path = make_model(_nodes(nodes), list(inputs.items()), ["y"])
    feed = {name: normal(*shape, seed=seed) for seed, (name, shape) in enumerate(inputs.items())}
    feed["m"] = np.triu(np.full((9, 9), -np.inf, "float32"), 1)
    model = assert_same_as_onnxruntime(path, feed)
    assert rule_counts(model)["attention"] == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("shapes", [((1, 2, 9, 16), (9, 9)), (("n", 2, "s", 16), ("s", "s"))], ids=["fixed", "free"])
def test_a_query_whose_keys_are_all_masked_has_zeros_where_the_model_says_so(
    shapes: Any, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = (
        "a = Transpose(k; perm=[0,1,3,2])\n b = MatMul(q, a)\n c = Add(b, m)\n d = Softmax(c)\n"
        "e = IsNaN(d)\n f = Where(e, zero, d)\n y = MatMul(f, v)"
    )
    operand, mask = shapes
    inputs = [("q", operand), ("k", operand), ("v", operand), ("m", mask)]
    path = make_model(_nodes(nodes), inputs, ["y"], {"zero": _number(0.0)})
    feed = {name: normal(1, 2, 9, 16, seed=seed) for seed, name in enumerate("qkv")}
    feed["m"] = np.triu(np.full((9, 9), -np.inf, "float32"), 1)
    feed["m"][[0, 4]] = -np.inf
    feed["q"][0, 1, 7, 3] = np.nan
    model = assert_same_as_onnxruntime(path, feed)
    assert rule_counts(model)["attention"] == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["x86-64-v2", "x86-64-v3", "aarch64-cortex-a72"])
def test_other_processors_get_attention(name: str, make_model: Any) -> None:
    nodes = "a = Transpose(k; perm=[0,1,3,2])\n b = MatMul(q, a)\n d = Softmax(b)\n y = MatMul(d, v)"
    path = make_model(_nodes(nodes), [(item, (1, 2, "n", 20)) for item in "qkv"], ["y"])
    model = build(import_onnx(path), resolve(name))
    assert rule_counts(model)["attention"] == 1


def test_the_attention_operator_of_onnx_is_found(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes = [helper.make_node("Attention", ["q", "k", "v"], ["y"], scale=0.25)]
    inputs = {"q": (2, 3, 7, 16), "k": (2, 3, 7, 16), "v": (2, 3, 7, 16)}
    path = make_model(nodes, list(inputs.items()), ["y"], opset=23)
    feed = {name: normal(*shape, seed=seed) for seed, (name, shape) in enumerate(inputs.items())}
    model = assert_same_as_onnxruntime(path, feed)
    assert rule_counts(model)["attention"] == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "int8"])
def test_every_pass_of_ours_has_a_name_by_which_it_can_be_disabled(precision: Any) -> None:
    passes = lower_passes(resolve("x86-64-v4-amx"), Choices(), precision)
    names = {str(item.info.name) for item in passes if type(item).__module__.startswith("tvmflow.")}
    rewriters = {case.rewriter for case in CASES}
    assert names
    assert names | rewriters <= set(pass_names()) <= set(list_passes())


# What TVM calls passes that are parts of others, and those whose constructors have other names.
_PASSES_OF_TVM = {
    "CanonicalizeRelaxBindings",
    "CanonicalizeTIRVariables",
    "DecomposeOps",
    "DispatchSampling",
    "DispatchSortScan",
    "ExpandTupleArgumentsInner",
    "FuseTIRInner",
    "finalize",
    "lower",
    "s_tir.InsertHoistIfThenElse",
    "sequential",
}


def test_every_pass_of_a_build_can_be_disabled_by_its_name(make_model: Any, target: Any) -> None:
    nodes, weights = _layers()
    model = build(import_onnx(make_model(_nodes(nodes), [("x", [2, 8, 6, 7])], ["y"], weights)), target)
    assert {name for name, _ in model.pass_timings} - _PASSES_OF_TVM <= set(list_passes())


def _in_order(places: Sequence[int]) -> list[str]:
    """The variables of a function in the order of their bindings, which was `places`, after the pass BindSizesFirst."""
    n, size = tvm.tirx.Var("n", "int64"), tvm.tirx.Var("size", "int64")
    x = relax.Var("x", relax.TensorType([n, 4], "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            twice = builder.emit(relax.op.add(x, x), "twice")
            plain = builder.match_cast(twice, relax.TensorType(ndim=2, dtype="float32"), "plain")
            part = builder.match_cast(plain, relax.TensorType([size, 4], "float32"), "part")
            zeros = builder.emit(relax.op.zeros(relax.ShapeExpr([size, 4]), "float32"), "zeros")
            kernel = tvm.te.compute((size, 4), lambda row, column: row + column, name="kernel")
            function = builder.add_func(tvm.te.create_prim_func([kernel]), "kernel")
            numbers = builder.emit(relax.call_tir(function, [], relax.TensorType([size, 4], "int64")), "numbers")
            output = builder.emit_output([zeros, part, numbers])
        builder.emit_func_output(output)
    mod = builder.get()
    bindings = mod["main"].body.blocks[0].bindings
    blocks = [relax.DataflowBlock([bindings[place] for place in places] + list(bindings[len(places) :]))]
    body = relax.SeqExpr(blocks, mod["main"].body.body)
    mod.update_func(mod.get_global_var("main"), relax.Function([x], body, mod["main"].ret_ty))
    ordered = BindSizesFirst()(mod)["main"].body.blocks[0].bindings
    return [binding.var.name for binding in ordered[: len(places)]]


def test_a_size_has_its_value_before_anything_reads_it() -> None:
    names = ["twice", "plain", "part", "zeros", "numbers"]
    assert _in_order([0, 1, 2, 3, 4]) == names
    # As FuseOps leaves them: what reads nothing but sizes comes first.
    assert _in_order([3, 4, 0, 1, 2]) == names
    assert _in_order([4, 0, 3, 1, 2]) == ["twice", "plain", "part", "numbers", "zeros"]


def _layers() -> tuple[str, dict[str, Array]]:
    """A chain of layers over `[2, 8, 6, 7]`, spelled out in small operators: every pass has something to rewrite."""
    layers = (
        "{y} = Conv({x}, w; pads=[1,1,1,1])",
        "{y}p = Pad({x}, p)\n {y} = Conv({y}p, w)",
        "{y} = Conv({x}, d; pads=[1,1,1,1], group=8)",
        "{y} = BatchNormalization({x}, s, b, b, v)",
        "{y}a = Mul({x}, c)\n {y} = Add({y}a, c)",
        "{y}a = Sigmoid({x})\n {y} = Mul({x}, {y}a)",
        "{y}a = Div({x}, root)\n {y}b = Erf({y}a)\n {y}c = Add({y}b, one)\n"
        "{y}d = Mul({y}c, half)\n {y} = Mul({x}, {y}d)",
        "{y}a = Transpose({x}; perm=[0,2,3,1])\n {y}b = MatMul({y}a, m)\n {y} = Transpose({y}b; perm=[0,3,1,2])",
        "{y}a = ReduceMean({x}, ax)\n {y}b = Sub({x}, {y}a)\n {y}c = Pow({y}b, two)\n {y}d = ReduceMean({y}c, ax)\n"
        "{y}e = Add({y}d, one)\n {y}f = Sqrt({y}e)\n {y} = Div({y}b, {y}f)",
        "{y} = InstanceNormalization({x}, s, b)",
        "{y}a = Exp({x})\n {y}b = ReduceSum({y}a, ax)\n {y} = Div({y}a, {y}b)",
        "{y}a = Clip({x}, zero, two)\n {y} = Add({x}, {y}a)",
        "{y}a = Reshape({x}, flat)\n {y} = Reshape({y}a, whole)",
        "{y}a = MatMul({x}, k)\n {y}b = Softmax({y}a)\n {y} = MatMul({y}b, {x})",
    )
    lines, x = [], "x"
    for step, layer in enumerate(layers):
        lines.append(layer.format(x=x, y=f"t{step}"))
        x = f"t{step}"
    nodes = "\n".join(lines).replace(f"{x} =", "y =")
    weights = {
        "w": normal(8, 8, 3, 3) / 8, "d": normal(8, 1, 3, 3) / 3, "m": normal(8, 8) / 3, "k": normal(7, 6) / 3,
        "s": normal(8) + 2, "b": normal(8, seed=1), "v": normal(8, seed=2) ** 2 + 0.5, "c": normal(8, 1, 1),
        "p": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "ax": np.array([1]), "zero": _number(0), "one": _number(1),
        "two": _number(2), "half": _number(0.5), "root": _number(2**0.5), "flat": np.array([2, 8, 42]),
        "whole": np.array([2, 8, 6, 7]),
    }  # fmt: skip
    return nodes, weights


# All of our passes that a model in float32 needs not.
_REWRITERS = sorted({case.rewriter for case in CASES} | {"ComposeAttention", "ChannelsLast", "FuseBlocks"})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "disabled",
    [(), tuple(_REWRITERS), *scale.choose(normal=[], long=[(name,) for name in pass_names()])],
    ids=lambda disabled: disabled[0] if len(disabled) == 1 else "all" if disabled else "none",
)
def test_models_stay_what_they_are_without_passes(
    disabled: tuple[str, ...], make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes, weights = _layers()
    path = make_model(_nodes(nodes), [("x", [2, 8, 6, 7])], ["y"], weights)
    options = BuildOptions(disabled_passes=disabled)
    model = assert_same_as_onnxruntime(path, {"x": normal(2, 8, 6, 7)}, options=options, rtol=1e-3)
    assert not {name for name, _ in model.pass_timings} & set(disabled)


def test_a_long_chain_of_activations_is_several_functions(
    make_model: Any, assert_same_as_onnxruntime: Callable[..., CompiledModel]
) -> None:
    # The code of one function of six took a second, that of one of eight minutes.
    operators = ["Relu", "Sigmoid", "Neg", "Tanh"] * 3
    nodes = [helper.make_node(operator, [f"t{place}"], [f"t{place + 1}"]) for place, operator in enumerate(operators)]
    path = make_model(nodes, [("t0", ["n", 7])], [f"t{len(nodes)}"])
    model = assert_same_as_onnxruntime(path, {"t0": normal(3, 7)})
    assert all(name.count("sigmoid") + name.count("tanh") <= 2 for name, _ in model.schedules)


def test_an_activation_of_one_number_may_be_in_the_argument_of_another(
    make_model: Any, assert_same_as_onnxruntime: Callable[..., CompiledModel]
) -> None:
    # The second sigmoid is a copy of the first one, and no loop of either is vectorised.
    operators = ["Sigmoid", "Exp", "Sigmoid"]
    nodes = [helper.make_node(operator, [f"t{place}"], [f"t{place + 1}"]) for place, operator in enumerate(operators)]
    assert_same_as_onnxruntime(make_model(nodes, [("t0", [1])], ["t3", "t1"]), {"t0": normal(1)})


@pytest.mark.parametrize(
    ("shape", "is_apart"),
    [(["n", 8, "h", "w"], True), ([2, 8, "h", 5], True), ([2, 8, 5, 5], False), (["n", 8, "t"], False)],
    ids=str,
)
def test_a_sine_of_products_by_channel_of_free_images_is_a_function_of_its_own(
    shape: list[Any], is_apart: bool, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    """The code of one function took half a minute: TVM substitutes the long indices of the factors many times."""
    nodes = [helper.make_node("Mul", ["x", "scale"], ["a"]), helper.make_node("Sin", ["a"], ["y"])]
    weights = {"scale": normal(8, *[1] * (len(shape) - 2))}
    path = make_model(nodes, [("x", shape)], ["y"], weights)
    feed = {"x": normal(*({"n": 2, "h": 7, "w": 5, "t": 6}.get(size, size) for size in shape))}
    model = assert_same_as_onnxruntime(path, feed)
    assert len(model.schedules) == (2 if is_apart else 1)


@pytest.mark.parametrize(("shape", "is_stored"), [([40, 50, 64], True), (["n", 50, 64], True), ([2, 2, 64], False)])
def test_what_other_functions_read_again_and_again_is_computed_once(
    shape: list[Any], is_stored: bool, make_model: Any, assert_same_as_onnxruntime: Callable[..., CompiledModel]
) -> None:
    """A row computed from an input is added to many rows, unless these are so few that a function costs more."""
    nodes = [helper.make_node(operator, [f"v{place}"], [f"v{place + 1}"]) for place, operator in enumerate(_OF_ROW)]
    nodes.append(helper.make_node("Add", ["x", f"v{len(nodes)}"], ["sum"]))
    nodes.append(helper.make_node("Relu", ["sum"], ["y"]))
    path = make_model(nodes, [("x", shape), ("v0", [64])], ["y"])
    feeds = {"x": normal(*(40 if size == "n" else size for size in shape)), "v0": normal(64)}
    model = assert_same_as_onnxruntime(path, feeds)
    names = [name for name, _ in model.schedules]
    assert len(names) == (2 if is_stored else 1)
    assert any("add" in name and "relu" in name for name in names)


def test_a_number_that_all_elements_read_stays_in_their_function(make_model: Any) -> None:
    nodes = [helper.make_node(operator, [f"v{place}"], [f"v{place + 1}"]) for place, operator in enumerate(_OF_ROW)]
    nodes.append(helper.make_node("Add", ["x", f"v{len(nodes)}"], ["y"]))
    path = make_model(nodes, [("x", [40, 50, 64]), ("v0", [1])], ["y"])
    assert len(build(import_onnx(path), resolve("native")).schedules) == 1


# Operators of one operand each.
_OF_ROW = ("Cos", "Floor", "Abs", "Neg", "Ceil")


@pytest.mark.parametrize(("used", "products"), [([0, 2, 3, 4], 1), ([0, 3], 2)], ids=["most slices", "few slices"])
def test_products_of_most_slices_of_a_tensor_with_the_same_weights_are_one(
    used: list[int], products: int, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [helper.make_node("Transpose", ["w"], ["wt"])]
    for index in used:
        nodes += [
            helper.make_node("Gather", ["x", f"i{index}"], [f"s{index}"], axis=0),
            helper.make_node("MatMul", [f"s{index}", "wt"], [f"y{index}"]),
        ]
    weights = {"w": normal(24, 40), **{f"i{index}": np.array(index, "int64") for index in used}}
    path = make_model(nodes, [("x", [5, "batch", 40])], [f"y{index}" for index in used], weights)
    model = assert_same_as_onnxruntime(path, {"x": normal(5, 3, 40, seed=1)})
    main = model.ir_text[model.ir_text.index("def main") :]
    assert sum("R.call_tir" in line and "dense" in line for line in main.splitlines()) == products


def test_operators_on_constants_are_evaluated_and_no_others_are_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([4], "float32"))
    c = relax.const(np.arange(4, dtype="float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            double = builder.emit(relax.op.add(c, c))
            zeros = builder.emit(relax.op.zeros([4], "float32"))
            product = builder.emit(relax.op.multiply(x, double))
            joined = builder.emit(relax.op.concat([double, zeros], 0))
            outputs = [builder.emit_output(item) for item in (relax.op.add(product, zeros), double, joined)]
        builder.emit_func_output(relax.Tuple(outputs))
    mod = builder.get()
    expected = relax.transform.FoldConstant()(mod)
    defined = []
    call_te = relax.BlockBuilder.call_te

    def count(self: relax.BlockBuilder, function: Any, *args: Any, **options: Any) -> Any:
        defined.append(args)
        return call_te(self, function, *args, **options)

    monkeypatch.setattr(relax.BlockBuilder, "call_te", count)
    folded = relax.transform.Normalize()(FoldConstantCalls()(mod))
    tvm.ir.assert_structural_equal(folded, expected)
    assert len(defined) == 3  # The sum, the zeros and the joined tensor.


def test_functions_without_constants_stay() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([tvm.tirx.Var("n", "int64")], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.add(x, relax.op.zeros(x.ty.shape, "float32")))
        builder.emit_func_output(result)
    mod = builder.get()
    assert FoldConstantCalls()(mod)["main"].same_as(mod["main"])


def test_a_part_without_elements_is_not_joined() -> None:
    """TVM cannot load an empty constant, which padding is where the sizes of a variant need none."""
    x = relax.Var("x", relax.TensorType([1, 8], "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            joined = builder.emit(relax.op.concat([x, constant(np.zeros((1, 0), np.float32))], 1))
            y = builder.emit_output(relax.op.nn.relu(joined))
        builder.emit_func_output(y)
    mod = tvm.transform.Sequential([remove_identities(), remove_identities()])(builder.get())
    assert "concat" not in mod["main"].script()


@pytest.mark.parametrize(
    ("narrow", "wide", "goes"),
    [
        ("float16", "float32", True),
        ("uint8", "float32", True),
        ("float32", "float16", False),
        ("int32", "uint8", False),
    ],
)
def test_a_cast_to_a_wider_type_and_back_is_removed(narrow: str, wide: str, goes: bool) -> None:
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((4, 8), narrow))
    with builder.function("main", [x]):
        with builder.dataflow():
            back = relax.op.astype(builder.emit(relax.op.astype(x, wide)), narrow)
            y = builder.emit_output(relax.op.permute_dims(builder.emit(back)))
        builder.emit_func_output(y)
    assert ("astype" not in remove_identities()(builder.get())["main"].script()) == goes


def test_repetitions_are_removed_without_a_look_at_large_constants() -> None:
    """TVM hashes every number of a constant that it sees: seconds for a GB."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((4, 64), "float32"))
    weights = [constant(normal(64, 64)) for _ in range(2)]
    others = [constant(normal(64, 64, seed=1))]
    with builder.function("main", [x]):
        with builder.dataflow():
            products = [builder.emit(relax.op.matmul(x, weight)) for weight in (*weights, *others)]
            output = builder.emit_output(relax.Tuple(products))
        builder.emit_func_output(output)
    sizes: list[int] = []

    @tvm.ir.instrument.pass_instrument
    class Record:
        def run_before_pass(self, mod: tvm.IRModule, info: tvm.transform.PassInfo) -> None:
            if info.name == "EliminateCommonSubexpr":
                for function in mod.functions.values():
                    relax.analysis.post_order_visit(function, self.visit)

        def visit(self, node: Any) -> None:
            if isinstance(node, tvm.ir.GenericConst):
                sizes.append(node.value.numpy().size)

    with tvm.transform.PassContext(opt_level=3, instruments=[Record()]):
        mod = ShareResults()(builder.get())
    bindings = mod["main"].body.blocks[0].bindings
    assert [isinstance(binding.value, relax.Call) for binding in bindings] == [True, False, True, False]
    assert [str(param.name) for param in mod["main"].params] == ["x"]
    assert not sizes
