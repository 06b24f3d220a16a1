"""ONNX models, written in one call."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tvmflow.arrays import Array

# (name, shape) or (name, shape, element type); a shape of None is unknown.
Value = tuple[Any, ...]


def value_info(value: str | Value) -> onnx.ValueInfoProto:
    """Describe an input or output: a name, (name, shape) of float32, or (name, shape, element type)."""
    name, shape, element, *_ = (*((value,) if isinstance(value, str) else value), None, None)
    return helper.make_tensor_value_info(name, TensorProto.FLOAT if element is None else element, shape)


def make_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Value],
    outputs: Sequence[str | Value],
    weights: Mapping[str, Array] | None = None,
    *,
    opset: int = 18,
    domains: Mapping[str, int] | None = None,
    name: str = "model",
) -> onnx.ModelProto:
    """Make an ONNX model with its shapes inferred.

    Inputs are (name, shape) or (name, shape, element type); outputs are names, or such tuples. `domains` are the opsets
    of other domains than the standard one, 1 for those it leaves out.
    """
    graph = helper.make_graph(
        list(nodes),
        name,
        [value_info(value) for value in inputs],
        [value_info(value) for value in outputs],
        [numpy_helper.from_array(value, key) for key, value in (weights or {}).items()],
    )
    versions = {node.domain: 1 for node in nodes if node.domain} | dict(domains or {})
    opsets = [helper.make_opsetid(*item) for item in sorted({"": opset, **versions}.items())]
    model = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets, ir_version=9))
    for output in model.graph.output:
        output.type.tensor_type.shape.SetInParent()  # the checker wants a shape, also where none can be inferred
    return model


def save_model(path: Path, *arguments: Any, **options: Any) -> Path:
    """Write the model that `make_model` makes of these arguments, and return the path."""
    onnx.save(make_model(*arguments, **options), path)
    return path


def save_text(path: Path, text: str) -> Path:
    """Write the model that ONNX's textual syntax describes, and return the path."""
    onnx.save(onnx.parser.parse_model(text), path)
    return path


def save_dense(path: Path, *, seed: int = 0, batch: int | str = "batch") -> Path:
    """Write y[batch, 3] = softmax(x[batch, 4] @ w), the smallest model that a release can have.

    A `batch` of -1 is a free dimension without a name.
    """
    weights = {"w": np.random.default_rng(seed).normal(size=(4, 3)).astype(np.float32)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Softmax", ["z"], ["y"])]
    return save_model(path, nodes, [("x", [batch, 4])], ["y"], weights)


def save_amplifier(path: Path, factor: float) -> Path:
    """Write a model y = sin(factor * batch norm(convolution(x))), which amplifies rounding errors by `factor`.

    ONNX Runtime's optimizations fold the normalisation into the convolution, which rounds elsewhere.
    """
    generator = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["h"]),
        helper.make_node("BatchNormalization", ["h", "scale", "bias", "mean", "variance"], ["n"]),
        helper.make_node("Mul", ["n", "factor"], ["m"]),
        helper.make_node("Sin", ["m"], ["y"]),
    ]
    shapes = {"w": (8, 8, 3, 3), "scale": (8,), "bias": (8,), "mean": (8,)}
    weights = {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    weights |= {"factor": np.array(factor, np.float32), "variance": np.full(8, 0.3, np.float32)}
    return save_model(path, nodes, [("x", [1, 8, 9, 9])], ["y"], weights)


def join_models(models: Sequence[onnx.ModelProto]) -> onnx.ModelProto:
    """Make one model of several of the same opsets, which compiles in less time than they do one by one.

    The values, nodes and symbolic dimensions of the model at place `i` get the prefix that `joined_name` gives them.
    """
    joined = onnx.ModelProto()
    joined.CopyFrom(models[0])
    joined.graph.Clear()
    joined.graph.name = "joined"
    opsets = {item.domain: item.version for model in models for item in model.opset_import}
    del joined.opset_import[:]
    joined.opset_import.extend(helper.make_opsetid(*item) for item in opsets.items())
    for place, model in enumerate(models):
        graph = onnx.compose.add_prefix(model, joined_name(place, "")).graph
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_param = joined_name(place, dim.dim_param)
        joined.graph.node.extend(graph.node)
        joined.graph.initializer.extend(graph.initializer)
        joined.graph.input.extend(graph.input)
        joined.graph.output.extend(graph.output)
    return joined


def joined_name(place: int, name: str) -> str:
    """The name that `join_models` gives a value of the model at `place`."""
    return f"m{place}_{name}"


def save_convolution(path: Path) -> Path:
    """Write a convolution whose weights are so large that a library packs them when it is loaded: image -> y."""
    weights = {"w": np.random.default_rng(0).normal(size=(48, 32, 3, 3)).astype(np.float32) / 20}
    nodes = [helper.make_node("Conv", ["image", "w"], ["y"], pads=[1, 1, 1, 1])]
    return save_model(path, nodes, [("image", ["batch", 32, 12, 12])], ["y"], weights)


def save_lookup(path: Path, dtype: str = "int64") -> Path:
    """Save a model that looks up integers `ids` of `[batch, length]` in a table of 5 rows."""
    table = np.random.default_rng(0).random((5, 3), "float32")
    nodes = [helper.make_node("Gather", ["table", "ids"], ["rows"]), helper.make_node("Sigmoid", ["rows"], ["y"])]
    ids = ("ids", ["batch", "length"], helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
    return save_model(path, nodes, [ids], ["y"], {"table": table})


def save_counter(path: Path) -> Path:
    """Save a model that looks up, for numbers `x` of `[batch, length]`, how many up to each are large: 4 at most."""
    nodes = [
        helper.make_node("Greater", ["x", "ten"], ["is_large"]),
        helper.make_node("Cast", ["is_large"], ["one"], to=TensorProto.INT64),
        helper.make_node("CumSum", ["one", "axis"], ["count"]),
        helper.make_node("Gather", ["table", "count"], ["y"]),
    ]
    weights = {"ten": np.float32(10), "axis": np.array(1), "table": np.arange(5, dtype=np.float32)}
    return save_model(path, nodes, [("x", ["batch", "length"])], ["y"], weights)
