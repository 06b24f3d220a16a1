"""Random models, built for this machine and compared with ONNX Runtime.

The default run is the same every time that the same test files are collected: constants of all that is loaded are among
what is drawn. `python tests/compiler/test_compiler_random.py SECONDS [SEED]` looks for new
failures for so long, and prints each with what reproduces it.
"""

# ruff: noqa: T201

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("TVM_NUM_THREADS", "1")

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]
Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass
class Model:
    """A model as it is drawn: values have known shapes, so that the next node can be fitted to them."""

    draw: Draw
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, Array] = field(default_factory=dict)
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    depth: int = 1
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def integer(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def choice(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def flag(self) -> bool:
        return bool(self.draw(st.booleans()))

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
    lengths = [scale * size for scale, size in zip(scales, shape, strict=True)]
    # Of a length that is not whole, ONNX Runtime takes the rounded one and the standard the product itself.
    if min(lengths) < 1 or (coordinates == "align_corners" and any(length % 1 for length in lengths)):
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
        rest = shape[axis % len(shape) :]
        more = [model.weight(*rest)] if model.flag() else []
        return model.node("LayerNormalization", x, model.weight(*rest), *more, axis=axis, epsilon=1e-3)
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
    axes = sorted(model.draw(st.sets(st.integers(0, rank - 1), min_size=1, max_size=rank)))
    axes = [axis - rank if model.flag() else axis for axis in axes]
    kind = model.choice("Mean", "Sum", "Max", "Min", "L2", "L1", "SumSquare", "LogSumExp")
    model.depth = max(model.depth, int(np.prod([model.shapes[x][axis] for axis in axes])))
    return model.node(f"Reduce{kind}", x, model.array(np.array(axes, "int64")), keepdims=int(model.flag()))


_MOVES = ("Transpose", "Reshape", "Concat", "Split", "Slice", "Gather", "Pad", "Flatten", "Tile", "Expand")


def _move(model: Model, x: str) -> str:
    """Operators that only move elements."""
    shape = model.shapes[x]
    rank = len(shape)
    axis = model.integer(0, rank - 1)
    kind = model.choice(
        "Transpose", "Reshape", "Concat", "Split", "Slice", "Gather", "Pad", "Flatten", "Tile", "Expand"
    )
    if kind == "Transpose":
        return model.node("Transpose", x, perm=model.draw(st.permutations(range(rank))))
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
        indices = model.draw(st.lists(st.integers(-size, size - 1), min_size=1, max_size=6))
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


@st.composite
def _images(draw: Draw, steps: tuple[Step, ...] = _SPATIAL, most: int = 2) -> tuple[Model, list[str]]:
    model = Model(draw)
    rank = model.choice(2, 2, 2, 2, 2, 2, 1, 3)
    size = {1: 40, 2: 23, 3: 9}[rank]
    x = model.input(model.integer(1, 5), model.integer(1, 70), *(model.integer(1, size) for _ in range(rank)))
    return model, _grow(model, x, steps, 1, most)


@st.composite
def _tensors(draw: Draw, steps: tuple[Step, ...], most: int = 3, least_rank: int = 1) -> tuple[Model, list[str]]:
    model = Model(draw)
    rank = model.integer(least_rank, 4)
    size = (300, 80, 40, 24)[rank - 1]
    x = model.input(*(model.integer(1, size) for _ in range(rank)))
    return model, _grow(model, x, steps, 1, most)


@st.composite
def _graphs(draw: Draw) -> tuple[Model, list[str]]:
    model = Model(draw)
    x = model.input(model.integer(1, 3), model.integer(1, 40), model.integer(1, 16), model.integer(1, 16))
    return model, _grow(model, x, (*_SPATIAL, *_ANY, _matmul), 2, 6)


KINDS: dict[str, st.SearchStrategy[tuple[Model, list[str]]]] = {
    "convolutions": _images((_conv,), 2),
    "spatial": _images(),
    "products": _tensors((_matmul, _matmul, _activation, _binary), 2, 2),
    "attention": _tensors((_attention,), 1, 2),
    "norms": _tensors((_normalise, _reduce)),
    "elements": _tensors((_activation, _binary, _move), 5),
    "graphs": _graphs(),
}


# Of a model whose first dimension is a symbol, so many more than were drawn are run as well.
_MORE = 2
SYMBOLIC: dict[str, st.SearchStrategy[tuple[Model, list[str]]]] = {
    "convolutions of any batch": _images((_conv,), 2),
    "products of any rows": _tensors((_dense, _activation), 3, 2),
}


def differences(model: Model, outputs: list[str], folder: Any, symbolic: bool = False) -> str:
    """How the built model differs from ONNX Runtime; empty where it does not, or where ONNX Runtime refuses."""
    import onnxruntime
    import tvm
    from tvm import relax

    from tvmflow.compiler import build, import_onnx
    from tvmflow.target import resolve

    path = folder / "random.onnx"
    onnx.save(model.proto(outputs, symbolic), path)
    rng = np.random.default_rng(1)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        wanted = []
        for more in (0, _MORE) if symbolic else (0,):
            shapes = {name: (shape[0] + more, *shape[1:]) if more else shape for name, shape in model.inputs.items()}
            feeds = {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
            wanted.append((feeds, session.run(None, feeds)))
    except Exception:  # some forms that the standard has are not in ONNX Runtime
        return ""
    imported = import_onnx(path)
    # The executable runs from memory: linking would take longer than all the rest.
    machine = relax.VirtualMachine(build(imported, resolve("native")).executable, tvm.cpu())
    for feeds, expected in wanted:
        result = machine["main"](*(tvm.runtime.tensor(feeds[spec.name]) for spec in imported.inputs))
        actual = [item.numpy() for item in ([result] if hasattr(result, "numpy") else result)]
        if found := _first_difference(model, actual, expected):
            return found
    return ""


def _first_difference(model: Model, actual: list[Array], expected: list[Array]) -> str:
    for ours, theirs in zip(actual, expected, strict=True):
        if ours.shape != theirs.shape:
            return f"shape {ours.shape}, expected {theirs.shape}"
        finite = np.isfinite(theirs)
        scale = float(np.abs(theirs[finite]).max(initial=0.0)) or 1.0
        # Rounding grows with the square root of what is summed up, a nonlinearity or two magnify it.
        tolerance = 2e-5 * max(1.0, model.depth**0.5 / 8)
        bad = ~np.isclose(ours, theirs, rtol=tolerance * 10, atol=tolerance * scale, equal_nan=True)
        if bad.any():
            at = tuple(int(index[0]) for index in np.nonzero(bad))
            return f"{int(bad.sum())} of {bad.size} differ, at {at}: {ours[at]}, expected {theirs[at]}"
    return ""


def _describe(model: Model) -> str:
    """The nodes with the shapes of what they take, and the weights that are short."""
    lines = [f"{name} = {value.tolist()}" for name, value in model.weights.items() if value.size < 9]
    for node in model.nodes:
        shapes = [model.shapes.get(name) or (model.weights[name].shape if name else None) for name in node.input]
        lines.append(f"{onnx.printer.to_text(node).strip()}  # {shapes} -> {model.shapes[node.output[0]]}")
    return "\n".join(lines)


_LIMITS = settings(
    derandomize=True, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


def _check(drawn: st.SearchStrategy[tuple[Model, list[str]]], count: int, folder: Any, symbolic: bool = False) -> None:
    @settings(_LIMITS, max_examples=count)
    @given(drawn)
    def check(drawn: tuple[Model, list[str]]) -> None:
        message = differences(*drawn, folder, symbolic)
        assert not message, f"{message}\n{_describe(drawn[0])}"

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_random_models_equal_onnx_runtime(kind: str, tmp_path: Any) -> None:
    _check(KINDS[kind], {"convolutions": 40, "graphs": 40}.get(kind, 25), tmp_path)


@pytest.mark.parametrize("kind", SYMBOLIC)
def test_random_models_of_any_batch_equal_onnx_runtime(kind: str, tmp_path: Any) -> None:
    _check(SYMBOLIC[kind], 15, tmp_path, symbolic=True)


def main() -> int:
    """Look for failures for the given seconds."""
    import shutil
    import tempfile
    from pathlib import Path

    from hypothesis import seed

    seconds, number = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else int(time.time())
    end = time.monotonic() + seconds
    kinds = KINDS | SYMBOLIC
    results: list[bool] = []

    def check(drawn: tuple[Model, list[str]]) -> None:
        if time.monotonic() > end:
            return
        try:
            message = differences(*drawn, folder, kind in SYMBOLIC)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"[:400]
        results.append(bool(message))
        if message:
            shutil.copy(folder / "random.onnx", folder / f"failed-{sum(results)}.onnx")
            print(f"--- {sum(results)}: {message}\n{_describe(drawn[0])}", flush=True)

    folder = Path(tempfile.mkdtemp(prefix="tvmflow-random-"))
    print(f"seed {number}; models that fail, and the last, random.onnx, are in {folder}")
    while time.monotonic() < end:
        for kind in sys.argv[3:] or kinds:
            number += 1
            limits = settings(_LIMITS, max_examples=20, derandomize=False)
            seed(number)(limits(given(kinds[kind])(check)))()
    print(f"{len(results)} models, {sum(results)} failed")
    return int(any(results))


if __name__ == "__main__":
    sys.exit(main())
