"""Random models, built for this machine and compared with ONNX Runtime.

Each kind of model draws from seeds in turn; a failure names its seed and the command that draws the model again:
`PYTHONPATH=tests python tests/compiler/test_compiler_random.py KIND SEED`. `make test-long` tries many more seeds.
`... SECONDS` looks for new failures for so long.
"""

# ruff: noqa: T201

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("TVM_NUM_THREADS", "1")

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from support import scale
from support.arrays import Refused, onnxruntime_results
from support.cpp import build_aarch64_runner
from support.machines import best_target
from support.models import join_models, joined_name
from support.steps import compile_by_steps
from tvmflow.arrays import Array
from tvmflow.compiler import build, import_onnx
from tvmflow.hardware.target import host


@dataclass
class Model:
    """A model under construction: the shapes of its values are known, so that the next node can be fitted to them."""

    rng: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, Array] = field(default_factory=dict)
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    depth: int = 1

    def integer(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def choice(self, *options: Any) -> Any:
        return options[self.integer(0, len(options) - 1)]

    def flag(self) -> bool:
        return bool(self.integer(0, 1))

    def input(self, *shape: int) -> str:
        name = f"x{len(self.inputs)}"
        self.inputs[name] = self.shapes[name] = shape
        return name

    def weight(self, *shape: int, scale: float = 1.0, positive: bool = False) -> str:
        value = self.rng.standard_normal(shape) * scale
        return self.array((np.abs(value) + 0.5 if positive else value).astype("float32"))

    def array(self, value: Array) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = value
        return name

    def node(self, operator: str, *operands: str, outputs: int = 1, **attributes: Any) -> str:
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(operator, list(operands), names, name=f"n{len(self.nodes)}", **attributes))
        self._infer()
        return names[0]

    def _infer(self) -> None:
        """Shapes of the last node's results."""
        node = self.nodes[-1]
        values = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, self.shapes[name])
            for name in dict.fromkeys(node.input)
            if name in self.shapes
        ]
        constants = [
            numpy_helper.from_array(self.weights[name], name)
            for name in dict.fromkeys(node.input)
            if name in self.weights
        ]
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output]
        graph = helper.make_graph([node], "one", values, outputs, constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
        for output in inferred.graph.output:
            self.shapes[output.name] = tuple(dim.dim_value for dim in output.type.tensor_type.shape.dim)

    def proto(self, outputs: list[str], symbolic: bool = False) -> onnx.ModelProto:
        """The model; `symbolic` makes the first dimension of all that goes in and comes out a symbol."""

        def described(name: str) -> onnx.ValueInfoProto:
            shape = ("batch", *self.shapes[name][1:]) if symbolic else self.shapes[name]
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

        graph = helper.make_graph(
            self.nodes,
            "random",
            [described(name) for name in self.inputs],
            [described(name) for name in outputs],
            [numpy_helper.from_array(value, name) for name, value in self.weights.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


# What may follow a value: each takes a model and a value and returns the new value.


def _conv(model: Model, x: str) -> str:
    _, channels, *sizes = model.shapes[x]
    groups = model.choice(*[g for g in (1, 1, 1, 2, 3, 4, channels) if channels % g == 0])
    out = (
        model.integer(1, 70 // groups) * groups if groups < channels or groups == 1 else channels * model.integer(1, 2)
    )
    kernel, strides, dilations, pads = [], [], [], []
    for size in sizes:
        k, d = model.integer(1, 5), model.choice(1, 1, 1, 2)
        before, after = model.integer(0, 3), model.integer(0, 3)
        while d * (k - 1) + 1 > size + before + after:
            k, d = k - 1, 1
        kernel.append(k)
        dilations.append(d)
        strides.append(model.choice(1, 1, 1, 2, 3))
        pads.append((before, after))
    depth = channels // groups * int(np.prod(kernel))
    model.depth = max(model.depth, depth)
    operands = [x, model.weight(out, channels // groups, *kernel, scale=depth**-0.5)]
    if model.flag():
        operands.append(model.weight(out))
    y = model.node(
        "Conv",
        *operands,
        group=groups,
        kernel_shape=kernel,
        strides=strides,
        dilations=dilations,
        pads=[pad[0] for pad in pads] + [pad[1] for pad in pads],
    )
    return _epilogue(model, y)


def _epilogue(model: Model, y: str) -> str:
    """Batch norm, an activation, a residual."""
    channels = model.shapes[y][1]
    if model.flag():
        parameters = [model.weight(channels) for _ in range(3)] + [model.weight(channels, positive=True)]
        y = model.node("BatchNormalization", y, *parameters)
    if model.flag():
        y = _activation(model, y)
    if model.flag():
        y = model.node("Add", y, model.input(*model.shapes[y]))
        if model.flag():
            y = model.node("Relu", y)
    return y


def _conv_transpose(model: Model, x: str) -> str:
    _, channels, *sizes = model.shapes[x]
    groups = model.choice(*[g for g in (1, 1, 2, channels) if channels % g == 0])
    out = model.integer(1, 20)
    kernel = [model.integer(1, 4) for _ in sizes]
    strides = [model.integer(1, 3) for _ in sizes]
    extra = [model.integer(0, stride - 1) for stride in strides]
    pads = [model.integer(0, (k - 1) // 2) for k in kernel]
    depth = channels // groups * int(np.prod(kernel))
    model.depth = max(model.depth, depth)
    y = model.node(
        "ConvTranspose",
        x,
        model.weight(channels, out, *kernel, scale=depth**-0.5),
        *([model.weight(out * groups)] if model.flag() else []),
        group=groups,
        kernel_shape=kernel,
        strides=strides,
        pads=pads * 2,
        output_padding=extra,
    )
    return _epilogue(model, y)


def _pool(model: Model, x: str) -> str:
    sizes = model.shapes[x][2:]
    if model.flag():
        return model.node(model.choice("GlobalAveragePool", "GlobalMaxPool"), x)
    kernel = [model.integer(1, min(5, size)) for size in sizes]
    pads = [model.integer(0, (k - 1) // 2) for k in kernel] + [model.integer(0, (k - 1) // 2) for k in kernel]
    more = {} if model.flag() else {"ceil_mode": 1}
    operator = model.choice("MaxPool", "AveragePool")
    if operator == "AveragePool" and model.flag():
        more["count_include_pad"] = 1
    strides = [model.integer(1, 3) for _ in sizes]
    if model.flag():
        more["dilations"] = [
            model.integer(1, 2) if 2 * (k - 1) < size else 1 for k, size in zip(kernel, sizes, strict=True)
        ]
    return model.node(operator, x, kernel_shape=kernel, strides=strides, pads=pads, **more)


def _resize(model: Model, x: str) -> str:
    shape = model.shapes[x]
    mode = model.choice("nearest", "linear", "cubic") if len(shape) == 4 else model.choice("nearest", "linear")
    coordinates = model.choice("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
    more = {"mode": mode, "coordinate_transformation_mode": coordinates}
    if mode == "nearest":
        more["nearest_mode"] = model.choice("floor", "round_prefer_floor", "ceil", "round_prefer_ceil")
    if model.flag():
        sizes = [*shape[:2], *(model.integer(1, 2 * size) for size in shape[2:])]
        return model.node("Resize", x, "", "", model.array(np.array(sizes, "int64")), **more)
    scales = [1.0, 1.0, *(model.choice(0.5, 1.0, 1.5, 2.0, 3.0) for _ in shape[2:])]
    if min(scale * size for scale, size in zip(scales, shape, strict=True)) < 1:
        return x
    return model.node("Resize", x, "", model.array(np.array(scales, "float32")), **more)


_ACTIVATIONS = (
    ("Relu", {}),
    ("Sigmoid", {}),
    ("Tanh", {}),
    ("HardSwish", {}),
    ("HardSigmoid", {"alpha": 0.3, "beta": 0.4}),
    ("LeakyRelu", {"alpha": 0.2}),
    ("Elu", {"alpha": 0.7}),
    ("Selu", {}),
    ("Softplus", {}),
    ("Softsign", {}),
    ("Mish", {}),
    ("Gelu", {}),
    ("Gelu", {"approximate": "tanh"}),
    ("Erf", {}),
    ("Abs", {}),
    ("Neg", {}),
    ("Exp", {}),
    ("Celu", {"alpha": 1.5}),
    ("ThresholdedRelu", {"alpha": 0.3}),
    ("Floor", {}),
    ("Sin", {}),
)


def _activation(model: Model, x: str) -> str:
    kind = model.integer(0, len(_ACTIVATIONS) + 2)
    if kind < len(_ACTIVATIONS):
        operator, attributes = _ACTIVATIONS[kind]
        if operator == "Floor":  # steps make the smallest difference large
            operator = "Relu"
        if operator == "Exp":
            x = model.node("Tanh", x)
        return model.node(operator, x, **attributes)
    if kind == len(_ACTIVATIONS):
        bounds = [model.array(np.array(bound, "float32")) for bound in model.choice((0.0, 6.0), (-1.0, 0.5))]
        return model.node("Clip", x, *bounds)
    if kind == len(_ACTIVATIONS) + 1:
        return model.node("Mul", x, model.node("Sigmoid", x))
    slope = [1] * len(model.shapes[x])
    if len(slope) > 1:
        slope[1] = model.shapes[x][1]
    return model.node("PRelu", x, model.weight(*slope))


def _binary(model: Model, x: str) -> str:
    """With a tensor that is broadcast, or broadcasts."""
    shape = model.shapes[x]
    other = [size if model.flag() else 1 for size in shape]
    start = model.integer(0, len(other))
    operator = model.choice("Add", "Sub", "Mul", "Div", "Max", "Min")
    name = model.weight(*other[start:], positive=operator == "Div")
    if model.flag() and operator != "Div":
        name = model.input(*other[start:])
    operands = [x, name] if model.flag() or operator == "Div" else [name, x]
    return model.node(operator, *operands)


def _matmul(model: Model, x: str) -> str:
    shape = model.shapes[x]
    kind = model.choice("right", "left", "both", "gemm")
    out = model.integer(1, 70)
    if kind == "gemm" and len(shape) == 2:
        rows, depth = (shape[1], shape[0]) if (first := model.flag()) else shape
        second = model.flag()
        other = model.weight(*((out, depth) if second else (depth, out)), scale=depth**-0.5)
        more = [model.weight(*model.choice((out,), (1, out), (rows, 1), (rows, out)))] if model.flag() else []
        model.depth = max(model.depth, depth)
        factors = {"alpha": 0.5, "beta": 2.0} if model.flag() else {}
        return model.node("Gemm", x, other, *more, transA=int(first), transB=int(second), **factors)
    if kind == "left":
        depth = shape[-2]
        y = model.node("MatMul", model.weight(out, depth, scale=depth**-0.5), x)
    elif kind == "both":
        depth = shape[-1]
        lead = shape[:-2] if model.flag() else ()
        y = model.node("MatMul", x, model.input(*lead, depth, out))
        y = model.node("Mul", y, model.array(np.array(depth**-0.5, "float32")))
    else:
        depth = shape[-1]
        y = model.node("MatMul", x, model.weight(depth, out, scale=depth**-0.5))
        if model.flag():
            y = model.node("Add", y, model.weight(out))
    model.depth = max(model.depth, depth)
    return y


def _dense(model: Model, x: str) -> str:
    """A dense layer of the last dimension, which leaves the others as they are."""
    depth, out = model.shapes[x][-1], model.integer(1, 70)
    model.depth = max(model.depth, depth)
    y = model.node("MatMul", x, model.weight(depth, out, scale=depth**-0.5))
    return model.node("Add", y, model.weight(out)) if model.flag() else y


def _normalise(model: Model, x: str) -> str:
    shape = model.shapes[x]
    axis = model.integer(-len(shape), len(shape) - 1)
    kind = model.choice("Softmax", "LogSoftmax", "LayerNormalization", "InstanceNormalization", "GroupNorm", "LRN")
    if kind in ("Softmax", "LogSoftmax"):
        return model.node(kind, x, axis=axis)
    if kind == "LayerNormalization" or len(shape) < 3:
        trailing_shape = shape[axis % len(shape) :]
        more = [model.weight(*trailing_shape)] if model.flag() else []
        return model.node("LayerNormalization", x, model.weight(*trailing_shape), *more, axis=axis, epsilon=1e-3)
    channels = shape[1]
    if kind == "InstanceNormalization":
        return model.node(kind, x, model.weight(channels), model.weight(channels), epsilon=1e-3)
    if kind == "GroupNorm":
        groups = model.choice(*[g for g in (1, 2, 3, channels) if channels % g == 0])
        flat = model.node("Reshape", x, model.array(np.array([shape[0], groups, -1], "int64")))
        flat = model.node("InstanceNormalization", flat, model.weight(groups), model.weight(groups), epsilon=1e-3)
        return model.node("Reshape", flat, model.array(np.array(shape, "int64")))
    return model.node("LRN", x, size=model.choice(1, 3, 5))


def _reduce(model: Model, x: str) -> str:
    rank = len(model.shapes[x])
    axes = sorted(int(axis) for axis in model.rng.permutation(rank)[: model.integer(1, rank)])
    axes = [axis - rank if model.flag() else axis for axis in axes]
    kind = model.choice("Mean", "Sum", "Max", "Min", "L2", "L1", "SumSquare", "LogSumExp")
    model.depth = max(model.depth, int(np.prod([model.shapes[x][axis] for axis in axes])))
    return model.node(f"Reduce{kind}", x, model.array(np.array(axes, "int64")), keepdims=int(model.flag()))


def _move(model: Model, x: str) -> str:
    """Operators that only move elements."""
    shape = model.shapes[x]
    rank = len(shape)
    axis = model.integer(0, rank - 1)
    kind = model.choice(
        "Transpose", "Reshape", "Concat", "Split", "Slice", "Gather", "Pad", "Flatten", "Tile", "Expand"
    )
    if kind == "Transpose":
        return model.node("Transpose", x, perm=[int(place) for place in model.rng.permutation(rank)])
    if kind == "Reshape":
        order = [int(np.prod(shape[:axis], initial=1)), -1]
        return model.node("Reshape", x, model.array(np.array(model.choice([-1], order, [0, -1]), "int64")))
    if kind == "Concat":
        other = list(shape)
        other[axis] = model.integer(1, 20)
        first = model.input(*other)
        return model.node("Concat", *([x, first] if model.flag() else [first, x, x]), axis=axis - rank)
    if kind == "Split" and shape[axis] > 1:
        at = model.integer(1, shape[axis] - 1)
        name = model.node("Split", x, model.array(np.array([at, shape[axis] - at], "int64")), outputs=2, axis=axis)
        return name if model.flag() else model.nodes[-1].output[1]
    if kind == "Slice":
        start, stop = sorted((model.integer(0, shape[axis] - 1), model.integer(1, shape[axis])))
        stop = max(stop, start + 1)
        step = model.integer(1, 3)
        if model.flag():
            start, stop, step = stop - 1, start - 1 - shape[axis] if start == 0 else start - 1, -step
        bounds = [model.array(np.array([value], "int64")) for value in (start, stop, axis, step)]
        return model.node("Slice", x, *bounds)
    if kind == "Gather":
        size = shape[axis]
        indices = [model.integer(-size, size - 1) for _ in range(model.integer(1, 6))]
        return model.node("Gather", x, model.array(np.array(indices, "int64")), axis=axis)
    if kind == "Pad":
        mode = model.choice("constant", "reflect", "edge", "wrap")
        most = [min(2, size - 1) if mode in ("reflect", "wrap") else 3 for size in shape]
        pads = [model.integer(0, limit) for limit in most * 2]
        return model.node("Pad", x, model.array(np.array(pads, "int64")), mode=mode)
    if kind == "Flatten":
        return model.node("Flatten", x, axis=axis)
    if kind == "Tile":
        return model.node("Tile", x, model.array(np.array([model.integer(1, 2) for _ in shape], "int64")))
    if kind == "Expand":
        return model.node("Expand", x, model.array(np.array([2, *([1] * rank)], "int64")))
    return model.node("Identity", x)


def _attention(model: Model, x: str) -> str:
    """Attention spelled out, over the last two dimensions of a value."""
    *lead, rows, depth = model.shapes[x]
    keys = model.integer(1, 40)
    perm = [*range(len(lead)), len(lead) + 1, len(lead)]
    k = model.node("Transpose", model.input(*lead, keys, depth), perm=perm)
    scores = model.node("Mul", model.node("MatMul", x, k), model.array(np.array(depth**-0.5, "float32")))
    if model.flag():
        scores = model.node("Add", scores, model.input(*model.choice((rows, keys), (1, keys))))
    return model.node("MatMul", model.node("Softmax", scores, axis=-1), model.input(*lead, keys, model.integer(1, 40)))


Step = Callable[[Model, str], str]
_SPATIAL: tuple[Step, ...] = (_conv, _conv, _conv, _pool, _resize, _conv_transpose, _epilogue)
_ANY: tuple[Step, ...] = (_activation, _binary, _reduce, _move, _normalise)
_LARGEST = 60_000


def _extend(model: Model, x: str, step: Step) -> str:
    """Apply a step, unless the value does not suit it or would grow too large."""
    rank = len(model.shapes[x])
    if (step in _SPATIAL and rank not in (3, 4, 5)) or (step in (_matmul, _attention) and rank < 2):
        step = _activation
    if rank == 0:
        return x
    return step(model, x)


def _grow(model: Model, x: str, steps: tuple[Step, ...], least: int, most: int) -> list[str]:
    """Nodes after `x`; sometimes an earlier value is used again, as an output or a residual."""
    values = [x]
    for _ in range(model.integer(least, most)):
        y = _extend(model, values[-1], model.choice(*steps))
        if np.prod(model.shapes[y], initial=1) > _LARGEST:
            break
        values.append(y)
    result = values[-1]
    same = [name for name in values[:-1] if model.shapes[name] == model.shapes[result]]
    if same and model.flag():
        result = model.node("Add", result, model.choice(*same))
    if not model.nodes:
        result = model.node("Relu", result)
    early = [name for name in values[1:-1] if name != result]
    return [result, *([model.choice(*early)] if early and model.flag() else [])]


Drawn = tuple[Model, list[str]]


def _image(rng: np.random.Generator, steps: tuple[Step, ...] = _SPATIAL, most: int = 2) -> Drawn:
    model = Model(rng)
    rank = model.choice(2, 2, 2, 2, 2, 2, 1, 3)
    size = {1: 40, 2: 23, 3: 9}[rank]
    x = model.input(model.integer(1, 5), model.integer(1, 70), *(model.integer(1, size) for _ in range(rank)))
    return model, _grow(model, x, steps, 1, most)


def _tensor(rng: np.random.Generator, steps: tuple[Step, ...], most: int = 3, least_rank: int = 1) -> Drawn:
    model = Model(rng)
    rank = model.integer(least_rank, 4)
    size = (300, 80, 40, 24)[rank - 1]
    x = model.input(*(model.integer(1, size) for _ in range(rank)))
    return model, _grow(model, x, steps, 1, most)


def _graph(rng: np.random.Generator) -> Drawn:
    model = Model(rng)
    x = model.input(model.integer(1, 3), model.integer(1, 40), model.integer(1, 16), model.integer(1, 16))
    return model, _grow(model, x, (*_SPATIAL, *_ANY, _matmul), 2, 6)


@dataclass(frozen=True)
class Kind:
    """How models of a kind are drawn, and how many of them in a normal run.

    The first dimension of a `symbolic` one is a symbol; it is run for `_MORE` than were drawn as well.
    """

    draw: Callable[[np.random.Generator], Drawn]
    count: int = 1
    symbolic: bool = False


_MORE = 2
KINDS = {
    "convolutions": Kind(partial(_image, steps=(_conv,)), 2),
    "spatial": Kind(_image),
    "products": Kind(partial(_tensor, steps=(_matmul, _matmul, _activation, _binary), most=2, least_rank=2)),
    "attention": Kind(partial(_tensor, steps=(_attention,), most=1, least_rank=2)),
    "norms": Kind(partial(_tensor, steps=(_normalise, _reduce))),
    "elements": Kind(partial(_tensor, steps=(_activation, _binary, _move), most=5)),
    "graphs": Kind(_graph),
    "convolutions of any batch": Kind(partial(_image, steps=(_conv,)), symbolic=True),
    "products of any rows": Kind(partial(_tensor, steps=(_dense, _activation), least_rank=2), symbolic=True),
}
# Of so many models ONNX Runtime may refuse one: some forms that the standard has are not in it.
_MOST_REFUSED = 4


def difference(kind: str, seed: int, folder: Path) -> str:
    """How a built model differs from ONNX Runtime, with the model and its seed; empty where it does not.

    Raises Refused where ONNX Runtime does not run the model.
    """
    model, outputs = KINDS[kind].draw(np.random.default_rng([seed, *kind.encode()]))
    try:
        message = _difference(model, outputs, folder / "random.onnx", KINDS[kind].symbolic)
    except Refused:
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {error}"[:400]
    return f"{kind!r}, seed {seed}: {message}\n{_describe(model)}" if message else ""


def _difference(model: Model, outputs: list[str], path: Path, symbolic: bool) -> str:
    onnx.save(model.proto(outputs, symbolic), path)
    rng = np.random.default_rng(1)
    expected = []
    for more in (0, _MORE) if symbolic else (0,):
        shapes = {name: (shape[0] + more, *shape[1:]) if more else shape for name, shape in model.inputs.items()}
        feed = {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
        expected.append((feed, onnxruntime_results(path, feed)))
    imported = import_onnx(path)
    # The executable runs from memory: linking would take longer than all the rest.
    loaded = build(imported, best_target()).load()
    for feed, values in expected:
        actual = loaded.run(*(feed[spec.name] for spec in imported.inputs))
        if message := _first_difference(model, actual, values):
            return message
    return ""


def _first_difference(model: Model, actual: list[Array], expected: list[Array]) -> str:
    for output, reference in zip(actual, expected, strict=True):
        if output.shape != reference.shape:
            return f"shape {output.shape}, expected {reference.shape}"
        finite = np.isfinite(reference)
        scale = float(np.abs(reference[finite]).max(initial=0.0)) or 1.0
        # Rounding grows with the square root of what is summed up, a nonlinearity or two magnify it.
        tolerance = 2e-5 * max(1.0, model.depth**0.5 / 8)
        bad = ~np.isclose(output, reference, rtol=tolerance * 10, atol=tolerance * scale, equal_nan=True)
        if bad.any():
            at = tuple(int(index[0]) for index in np.nonzero(bad))
            return f"{int(bad.sum())} of {bad.size} differ, at {at}: {output[at]}, expected {reference[at]}"
    return ""


def _describe(model: Model) -> str:
    """The nodes with the shapes of what they take, and the weights that are short."""
    lines = [f"{name} = {value.tolist()}" for name, value in model.weights.items() if value.size < 9]
    for node in model.nodes:
        shapes = [model.shapes.get(name) or (model.weights[name].shape if name else None) for name in node.input]
        lines.append(f"{onnx.printer.to_text(node).strip()}  # {shapes} -> {model.shapes[node.output[0]]}")
    return "\n".join(lines)


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", KINDS)
def test_random_models_equal_onnx_runtime(kind: str, tmp_path: Path) -> None:
    count = scale.count(normal=KINDS[kind].count, long=120, quick=2)
    refusal = 0
    for seed in range(count):
        try:
            message = difference(kind, seed, tmp_path)
        except Refused:
            refusal += 1
            continue
        assert not message, message
    assert refusal * _MOST_REFUSED <= count, f"ONNX Runtime refuses {refusal} of {count} models"


@pytest.mark.long
@pytest.mark.skipif(host().arch == "aarch64", reason="a target that this machine cannot run is meant")
@pytest.mark.parametrize("cpu", ["generic", "neoverse-n1", "neoverse-v1"])
def test_random_models_for_arm_equal_onnx_runtime(cpu: str, tmp_path: Path) -> None:
    """All of them are one bundle, which the emulated runner runs once."""
    runner = build_aarch64_runner()
    drawn, protos, feeds = [], [], {}
    for kind, (seed, more) in product(KINDS, enumerate((0, _MORE, 0))):
        model, outputs = KINDS[kind].draw(np.random.default_rng([seed, *kind.encode()]))
        path = tmp_path / f"{len(protos)}.onnx"
        protos.append(model.proto(outputs, KINDS[kind].symbolic))
        onnx.save(protos[-1], path)
        rows = more if KINDS[kind].symbolic else 0
        shapes = {name: (shape[0] + rows, *shape[1:]) if rows else shape for name, shape in model.inputs.items()}
        feed = {
            name: np.random.default_rng(1).standard_normal(shape).astype("float32") for name, shape in shapes.items()
        }
        try:
            drawn.append((model, outputs, onnxruntime_results(path, feed)))
        except Refused:
            protos.pop()
            continue
        feeds |= {joined_name(len(protos) - 1, name): value for name, value in feed.items()}
    onnx.save(join_models(protos), tmp_path / "joined.onnx")
    target = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": cpu, "num-cores": 2}
    document = {"name": "random", "model": {"onnx": str(tmp_path / "joined.onnx")}, "targets": [target]}
    actual = runner.outputs(compile_by_steps(document, tmp_path, tmp_path / "state"), feeds, tmp_path)
    for place, (model, outputs, expected) in enumerate(drawn):
        results = [actual[joined_name(place, name)] for name in outputs]
        assert not (message := _first_difference(model, results, expected)), f"{message}\n{_describe(model)}"


def main() -> int:
    """Draw one model again, or look for failures for the given seconds."""
    folder = Path(tempfile.mkdtemp(prefix="tvmflow-random-"))
    print(f"the model that was drawn last is {folder / 'random.onnx'}")
    if sys.argv[1] in KINDS:
        message = difference(sys.argv[1], int(sys.argv[2]), folder)
        print(message or "equal")
        return int(bool(message))
    end, seed, failures = time.monotonic() + float(sys.argv[1]), int(time.time()), 0
    while time.monotonic() < end:
        for kind in KINDS:
            seed += 1
            with contextlib.suppress(Refused):
                if message := difference(kind, seed, folder):
                    failures += 1
                    shutil.copy(folder / "random.onnx", folder / f"failed-{failures}.onnx")
                    print(f"--- {message}", flush=True)
    print(f"{failures} failed")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
