"""Compares each operator with this machine's peak: `python benchmarks/operators.py [CLASS ...]`.

Every operator is a model of one node, built by the whole pipeline. The peaks are measured first: fp32 multiply-adds in
registers, and the bandwidth of each level of the memory. An operator takes at least the time of its multiply-adds at
the first peak, and at least that of its bytes, each read or written once, at the bandwidth of the level that holds
them. The fraction of the peak is the larger of these two times over the time of the operator's functions. Operations
are those of the textbook's algorithm, so Winograd may exceed one. The whole time includes changes of layout; it is
compared with ONNX Runtime's time for the same model, and the two take turns.
"""

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import peaks
import prepare
import runners
from commandline import new_parser, run_main, state_folder
from functions import time_functions
from onnx import TensorProto, helper, numpy_helper
from peaks import Peaks
from rich import box
from rich.console import Console
from rich.table import Table
from runners import RunnerJob, Turn, Turns

from tvmflow.errors import InputError, TvmflowError
from tvmflow.processes.children import Emit
from tvmflow.workspace import Record

Shape = tuple[int, ...]

_CLASSICAL, _CONTRIBUTED = "ai.onnx.ml", "com.microsoft"


@dataclass(frozen=True)
class Case:
    """A model of one operator (a few nodes where a framework has one) from the inputs to `y`.

    `inputs` and `weights` are the shapes of arrays by name, filled with standard normal numbers; weights are scaled
    down. `tables` are other constant inputs, such as indices and axes, or functions that draw them. `flops` are the
    operations by definition, 0 where only bytes count. `bytes_moved` are the bytes of an operator that reads only a
    part of its inputs, or numbers of another size; 0 means all inputs, weights and outputs. `forest` has the number and
    the levels of decision trees on `x`, in place of `nodes`. `output` is the shape of `y`, None where ONNX infers it.
    """

    kind: str
    label: str
    nodes: tuple[onnx.NodeProto, ...]
    inputs: Mapping[str, Shape]
    weights: Mapping[str, Shape] = field(default_factory=dict)
    tables: Mapping[str, Any] = field(default_factory=dict)
    flops: float = 0.0
    bytes_moved: int = 0
    forest: tuple[int, int] | None = None
    output: Shape | None = None

    def model(self) -> onnx.ModelProto:
        """Return the ONNX model with its weights."""
        generator = np.random.default_rng(0)
        values = {
            name: (generator.standard_normal(shape) / math.sqrt(max(1, math.prod(shape[1:])))).astype("float32")
            for name, shape in self.weights.items()
        }
        values.update(
            {name: np.asarray(table(generator) if callable(table) else table) for name, table in self.tables.items()}
        )
        graph = helper.make_graph(
            [_forest(*self.forest, self.inputs["x"][1])] if self.forest else list(self.nodes),
            "operator",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in self.inputs.items()],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, self.output)],
            [numpy_helper.from_array(value, name) for name, value in values.items()],
        )
        opset = [
            helper.make_opsetid("", prepare.OPSET),
            *[helper.make_opsetid(_CLASSICAL, 3)] * (self.forest is not None),
            *[helper.make_opsetid(_CONTRIBUTED, 1)] * any(node.domain == _CONTRIBUTED for node in self.nodes),
        ]
        model = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opset, ir_version=9))
        onnx.checker.check_model(model)
        return model

    def bytes(self, model: onnx.ModelProto) -> int:
        """Return the bytes that the operator reads and writes, each number once; `model` is what `model` returns."""
        if self.bytes_moved:
            return self.bytes_moved
        output = [dim.dim_value for dim in model.graph.output[0].type.tensor_type.shape.dim]
        return 4 * sum(int(math.prod(shape)) for shape in (*self.inputs.values(), *self.weights.values(), output))


def _node(operator: str, inputs: str = "x", output: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs.split(), [output], **attributes)


def _convolution(
    kind: str,
    channels: tuple[int, int],
    size: Shape,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    dilation: int = 1,
) -> Case:
    """A convolution with a bias, padded to keep the size of its input, which is `size`."""
    inputs, outputs = channels
    pad = dilation * (kernel - 1) // 2
    rank = len(size)
    node = _node(
        "Conv",
        "x w b",
        kernel_shape=[kernel] * rank,
        pads=[pad] * 2 * rank,
        strides=[stride] * rank,
        group=groups,
        dilations=[dilation] * rank,
    )
    result = [(side + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1 for side in size]
    details = [f"/{stride}"] * (stride > 1) + [f"groups {groups}"] * (1 < groups < inputs)
    details += [f"dilation {dilation}"] * (dilation > 1)
    label = f"{inputs} to {outputs} at {'x'.join(map(str, size))}, {'x'.join([str(kernel)] * rank)}"
    return Case(
        kind,
        " ".join([label, *details]),
        (node,),
        {"x": (1, inputs, *size)},
        {"w": (outputs, inputs // groups, *[kernel] * rank), "b": (outputs,)},
        flops=2.0 * outputs * math.prod(result) * inputs // groups * kernel**rank,
    )


def _transposed(channels: tuple[int, int], size: int, kernel: int, stride: int, pad: int) -> Case:
    inputs, outputs = channels
    node = _node("ConvTranspose", "x w", kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4)
    label = f"{inputs} to {outputs} at {size}x{size}, {kernel}x{kernel} /{stride}"
    flops = 2.0 * inputs * outputs * size * size * kernel * kernel
    return Case(
        "transposed conv",
        label,
        (node,),
        {"x": (1, inputs, size, size)},
        {"w": (inputs, outputs, kernel, kernel)},
        flops=flops,
    )


def _dense(rows: int, inputs: int, outputs: int) -> Case:
    nodes = (_node("MatMul", "x w", "p"), _node("Add", "p b"))
    weights = {"w": (inputs, outputs), "b": (outputs,)}
    label = f"{rows}x{inputs} by {inputs}x{outputs}"
    return Case("dense", label, nodes, {"x": (rows, inputs)}, weights, flops=2.0 * rows * inputs * outputs)


def _few_bits(rows: int, inputs: int, outputs: int, bits: int, level: int) -> Case:
    """A product with weights of a few bits in blocks of 32, which ONNX Runtime computes with an `accuracy_level`."""
    block, node = 32, partial(_node, domain=_CONTRIBUTED, K=inputs, N=outputs)
    blocks = (outputs, inputs // block)
    tables = {
        "w": lambda generator: generator.integers(0, 256, (*blocks, block * bits // 8)).astype("uint8"),
        "s": lambda generator: generator.uniform(0.0001, 0.001, blocks).astype("float32"),
    }
    label = f"{rows}x{inputs} by {inputs}x{outputs}, {bits} bits" + (f", level {level}" if level else "")
    return Case(
        "few bits",
        label,
        (node("MatMulNBits", "x w s", bits=bits, block_size=block, accuracy_level=level),),
        {"x": (rows, inputs)},
        tables=tables,
        flops=2.0 * rows * inputs * outputs,
        bytes_moved=inputs * outputs * bits // 8 + 4 * math.prod(blocks) + 4 * rows * (inputs + outputs),
        output=(rows, outputs),
    )


def _halves(rows: int, inputs: int, outputs: int) -> Case:
    """A dense layer with weights of float16, as a file in float16 has them."""
    return Case(
        "few bits",
        f"{rows}x{inputs} by {inputs}x{outputs}, float16",
        (_node("Cast", "h", "w", to=TensorProto.FLOAT), _node("MatMul", "x w")),
        {"x": (rows, inputs)},
        tables={"h": lambda generator: (generator.standard_normal((inputs, outputs)) / 64).astype("float16")},
        flops=2.0 * rows * inputs * outputs,
        bytes_moved=2 * inputs * outputs + 4 * rows * (inputs + outputs),
    )


def _matmul(batch: int, rows: int, inner: int, columns: int) -> Case:
    label = f"{batch} of {rows}x{inner} by {inner}x{columns}"
    shapes = {"x": (1, batch, rows, inner), "z": (1, batch, inner, columns)}
    return Case("batched matmul", label, (_node("MatMul", "x z"),), shapes, flops=2.0 * batch * rows * inner * columns)


def _einsum(equation: str, shapes: Sequence[Shape], flops: float, *, has_weight: bool = False) -> Case:
    """A product of two tensors, of which the second one may be a weight."""
    names = dict(zip("xw", shapes, strict=True))
    weights = {"w": names.pop("w")} if has_weight else {}
    label = f"{equation} of {' by '.join('x'.join(map(str, shape)) for shape in shapes)}"
    return Case("einsum", label, (_node("Einsum", "x w", equation=equation),), names, weights, flops=flops)


def _attention(batch: int, heads: int, shared: int, queries: int, keys: int, channels: int) -> Case:
    """Attention of `heads` heads, of which several share each of the `shared` heads of keys and values.

    With fewer queries than keys it is a step of a decoder: a cache holds the other keys and values.
    """
    past, group = keys - queries, heads // shared
    inputs = {"q": (batch, heads, queries, channels)}
    nodes = []
    for name in "kv":
        inputs |= {name: (batch, shared, queries, channels), f"past_{name}": (batch, shared, past, channels)}
        nodes += [_node("Concat", f"past_{name} {name}", f"all_{name}", axis=2)] if past else []
        source = f"all_{name}" if past else name
        nodes += [
            _node("Unsqueeze", f"{source} two", f"{name}_apart"),
            _node("Expand", f"{name}_apart repeated", f"{name}_repeated"),
            _node("Reshape", f"{name}_repeated whole", f"{name}_whole"),
        ]
    nodes += [
        _node("Transpose", "k_whole", "k_across", perm=[0, 1, 3, 2]),
        _node("MatMul", "q k_across", "scores"),
        _node("Mul", "scores scale", "scaled"),
        _node("Softmax", "scaled", "weights", axis=-1),
        _node("MatMul", "weights v_whole"),
    ]
    tables = {
        "two": np.array([2], "int64"),
        "repeated": np.array([batch, shared, group, keys, channels], "int64"),
        "whole": np.array([batch, heads, keys, channels], "int64"),
        "scale": np.float32(channels**-0.5),
    }
    label = f"{batch}x{heads} of {queries} by {keys}, {channels} channels" + (f", {shared} of keys" * (group > 1))
    used = {name: shape for name, shape in inputs.items() if math.prod(shape)}
    return Case(
        "attention", label, tuple(nodes), used, tables=tables, flops=4.0 * batch * heads * queries * keys * channels
    )


def _unary(kind: str, label: str, shape: Shape, *nodes: onnx.NodeProto, **tables: Any) -> Case:
    return Case(kind, f"{label} {'x'.join(map(str, shape))}".strip(), nodes, {"x": shape}, tables=tables)


def _recurrent(operator: str, steps: int, batch: int, inputs: int, units: int, direction: str = "forward") -> Case:
    """A recurrent network over `steps` steps of `batch` sequences."""
    gates, directions = {"LSTM": 4, "GRU": 3, "RNN": 1}[operator], 1 + (direction == "bidirectional")
    more = {"linear_before_reset": 1} if operator == "GRU" else {}
    node = _node(operator, "x w r b", hidden_size=units, direction=direction, **more)
    rows = directions, gates * units
    return Case(
        "recurrent",
        f"{operator} {steps} steps of {batch}x{inputs} to {units}{', both ways' * (directions - 1)}",
        (node,),
        {"x": (steps, batch, inputs)},
        {"w": (*rows, inputs), "r": (*rows, units), "b": (directions, 2 * gates * units)},
        flops=2.0 * steps * batch * directions * gates * units * (inputs + units),
    )


def _loop(steps: int, batch: int, inputs: int, units: int) -> Case:
    """The LSTM of `_recurrent` as a Loop, as TensorFlow's are exported."""
    body = helper.make_graph(
        [
            _node("Identity", "goes_on", "again"),
            _node("Gather", "x step", "row"),
            _node("MatMul", "row w", "of_row"),
            _node("MatMul", "h r", "of_state"),
            _node("Add", "of_row of_state", "sum"),
            _node("Add", "sum b", "gates"),
            helper.make_node("Split", ["gates"], ["i", "f", "g", "o"], axis=1, num_outputs=4),
            *(_node("Sigmoid", name, f"{name}_gate") for name in "ifo"),
            _node("Tanh", "g", "g_gate"),
            _node("Mul", "f_gate c", "kept"),
            _node("Mul", "i_gate g_gate", "new"),
            _node("Add", "kept new", "next_c"),
            _node("Tanh", "next_c", "squashed"),
            _node("Mul", "o_gate squashed", "next_h"),
            _node("Identity", "next_h", "output"),
        ],
        "step",
        [
            helper.make_tensor_value_info("step", TensorProto.INT64, []),
            helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []),
            *(helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, units]) for name in "hc"),
        ],
        [
            helper.make_tensor_value_info("again", TensorProto.BOOL, []),
            *(helper.make_tensor_value_info(f"next_{name}", TensorProto.FLOAT, [batch, units]) for name in "hc"),
            helper.make_tensor_value_info("output", TensorProto.FLOAT, [batch, units]),
        ],
    )
    loop = helper.make_node("Loop", ["steps", "true", "zeros", "zeros"], ["last_h", "last_c", "y"], body=body)
    return Case(
        "loop",
        f"LSTM {steps} steps of {batch}x{inputs} to {units}",
        (loop,),
        {"x": (steps, batch, inputs)},
        {"w": (inputs, 4 * units), "r": (units, 4 * units), "b": (4 * units,)},
        {"steps": np.array(steps, "int64"), "true": np.array(True), "zeros": np.zeros((batch, units), "float32")},
        flops=2.0 * steps * batch * 4 * units * (inputs + units),
    )


def _forest(trees: int, levels: int, features: int) -> onnx.NodeProto:
    """Return whole trees with `levels` tests on every path, on features and thresholds drawn at random."""
    generator = np.random.default_rng(0)
    tests, nodes = 2**levels - 1, 2 ** (levels + 1) - 1
    number = np.arange(nodes)
    is_leaf = np.tile(number >= tests, trees)
    tree, number = np.repeat(np.arange(trees), nodes), np.tile(number, trees)
    leaves = {"treeids": tree[is_leaf], "nodeids": number[is_leaf], "ids": np.zeros(is_leaf.sum(), "int64")}
    return helper.make_node(
        "TreeEnsembleRegressor",
        ["x"],
        ["y"],
        domain=_CLASSICAL,
        n_targets=1,
        nodes_treeids=tree,
        nodes_nodeids=number,
        nodes_modes=np.where(is_leaf, "LEAF", "BRANCH_LEQ").tolist(),
        nodes_featureids=np.where(is_leaf, 0, generator.integers(0, features, len(tree))),
        nodes_values=np.where(is_leaf, 0.0, generator.standard_normal(len(tree))).tolist(),
        nodes_truenodeids=np.where(is_leaf, 0, 2 * number + 1),
        nodes_falsenodeids=np.where(is_leaf, 0, 2 * number + 2),
        target_weights=generator.standard_normal(is_leaf.sum()).tolist(),
        **{f"target_{name}": values for name, values in leaves.items()},
    )


def _trees(rows: int, trees: int, levels: int, features: int) -> Case:
    label = f"{trees} of {levels} levels, {rows}x{features}"
    # A step reads a test of eight bytes.
    bytes_moved = 4 * rows * features + 8 * rows * trees * levels
    return Case(
        "trees", label, (), {"x": (rows, features)}, bytes_moved=bytes_moved, forest=(trees, levels), output=(rows, 1)
    )


def _layer_norm(shape: Shape) -> Case:
    label, width = "x".join(map(str, shape)), (shape[-1],)
    node = _node("LayerNormalization", "x s b", axis=-1)
    return Case("layer norm", label, (node,), {"x": shape}, {"s": width, "b": width})


def _sampling(mode: str, image: tuple[int, ...], points: tuple[int, int]) -> Case:
    """Samples of an image, as of deformable attention, at random points within it."""
    name = f"{mode} {'x'.join(map(str, image))} at {'x'.join(map(str, points))}"
    rng = np.random.default_rng(0)
    grid = rng.uniform(-1, 1, (image[0], *points, 2)).astype("float32")
    return _unary("sampling", name, image, _node("GridSample", "x grid", mode=mode), grid=grid)


def _resize(mode: str) -> Case:
    node = _node("Resize", "x roi scales", mode=mode, coordinate_transformation_mode="half_pixel")
    if mode == "nearest":
        node = _node(
            "Resize", "x roi scales", mode=mode, coordinate_transformation_mode="asymmetric", nearest_mode="floor"
        )
    tables = {"roi": np.zeros(0, "float32"), "scales": np.array([1, 1, 2, 2], "float32")}
    return _unary("resize", f"{mode} x2", (1, 64, 32, 32), node, **tables)


_IMAGE = (1, 64, 112, 112)

CASES: tuple[Case, ...] = (
    _convolution("conv 3x3", (64, 64), (56, 56), 3),
    _convolution("conv 3x3", (128, 128), (28, 28), 3),
    _convolution("conv 3x3", (256, 256), (14, 14), 3),
    _convolution("conv 3x3", (512, 512), (7, 7), 3),
    _convolution("conv 3x3", (32, 32), (128, 128), 3),
    _convolution("conv 3x3", (48, 40), (35, 35), 3),
    _convolution("conv 3x3 strided", (64, 128), (56, 56), 3, 2),
    _convolution("conv 3x3 strided", (256, 512), (14, 14), 3, 2),
    _convolution("conv 3x3 dilated", (64, 64), (28, 28), 3, dilation=2),
    _convolution("conv stem", (3, 64), (224, 224), 7, 2),
    _convolution("conv stem", (3, 32), (224, 224), 3, 2),
    _convolution("conv stem", (3, 96), (224, 224), 4, 4),
    _convolution("conv 1x1", (16, 96), (112, 112), 1),
    _convolution("conv 1x1", (64, 256), (56, 56), 1),
    _convolution("conv 1x1", (256, 64), (56, 56), 1),
    _convolution("conv 1x1", (512, 128), (28, 28), 1),
    _convolution("conv 1x1", (58, 58), (28, 28), 1),
    _convolution("conv 1x1", (1024, 256), (14, 14), 1),
    _convolution("conv 1x1", (2048, 512), (7, 7), 1),
    _convolution("depthwise", (96, 96), (112, 112), 3, 2, groups=96),
    _convolution("depthwise", (144, 144), (56, 56), 3, groups=144),
    _convolution("depthwise", (384, 384), (14, 14), 3, groups=384),
    _convolution("depthwise", (240, 240), (28, 28), 5, groups=240),
    _convolution("depthwise", (96, 96), (56, 56), 7, groups=96),
    _convolution("grouped conv", (128, 128), (56, 56), 3, groups=32),
    _convolution("grouped conv", (116, 116), (28, 28), 1, groups=2),
    _transposed((256, 128), 32, 2, 2, 0),
    _transposed((64, 32), 64, 4, 2, 1),
    _convolution("conv 1d", (64, 128), (512,), 3),
    _convolution("conv 3d", (16, 32), (16, 16, 16), 3),
    _dense(1, 1280, 1000),
    _dense(1, 4096, 1024),
    _dense(128, 384, 1536),
    _dense(128, 1536, 384),
    _dense(197, 192, 576),
    _dense(3136, 96, 384),
    _few_bits(1, 4096, 11008, 4, 0),
    _few_bits(1, 4096, 11008, 4, 4),
    _few_bits(1, 4096, 11008, 8, 4),
    _few_bits(16, 4096, 11008, 4, 0),
    _few_bits(16, 4096, 11008, 4, 4),
    _few_bits(128, 4096, 11008, 4, 4),
    _halves(1, 4096, 11008),
    _halves(16, 4096, 11008),
    _matmul(6, 128, 64, 128),
    _matmul(6, 128, 128, 64),
    _matmul(3, 197, 64, 197),
    _matmul(12, 512, 64, 512),
    _attention(1, 12, 12, 128, 128, 64),
    _attention(1, 12, 12, 512, 512, 64),
    _attention(1, 16, 4, 128, 128, 64),
    _attention(1, 12, 12, 1, 128, 64),
    _attention(4, 12, 12, 1, 512, 64),
    _attention(1, 32, 8, 1, 1024, 128),
    _attention(8, 16, 2, 1, 256, 64),
    _einsum("bhid,bhjd->bhij", [(1, 12, 128, 64), (1, 12, 128, 64)], flops=2.0 * 12 * 128 * 128 * 64),
    _einsum("bld,dhe->bhle", [(1, 128, 768), (768, 12, 64)], flops=2.0 * 128 * 768 * 768, has_weight=True),
    _einsum("nkctv,kvw->nctw", [(1, 3, 64, 75, 25), (3, 25, 25)], flops=2.0 * 64 * 75 * 75 * 25, has_weight=True),
    _unary("pooling", "max 3x3 /2", _IMAGE, _node("MaxPool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])),
    _unary("pooling", "mean 2x2 /2", (1, 128, 56, 56), _node("AveragePool", kernel_shape=[2, 2], strides=[2, 2])),
    _unary("pooling", "global mean", (1, 2048, 7, 7), _node("GlobalAveragePool")),
    _unary("pooling", "global mean", (1, 96, 112, 112), _node("GlobalAveragePool")),
    _unary("softmax", "", (1, 6, 128, 128), _node("Softmax", axis=-1)),
    _unary("softmax", "", (1, 12, 512, 512), _node("Softmax", axis=-1)),
    _unary("softmax", "", (1, 1000), _node("Softmax", axis=-1)),
    _unary("softmax", "over channels", (1, 256, 400), _node("Softmax", axis=1)),
    _layer_norm((1, 128, 384)),
    _layer_norm((1, 56, 56, 96)),
    Case(
        "instance norm",
        "1x32x64x64",
        (_node("InstanceNormalization", "x s b"),),
        {"x": (1, 32, 64, 64)},
        {"s": (32,), "b": (32,)},
    ),
    _unary("reduction", "mean of rows", (128, 768), _node("ReduceMean", "x axes"), axes=np.array([1], "int64")),
    _unary("reduction", "max of all", (1, 128, 3072), _node("ReduceMax")),
    _unary("reduction", "max of columns", (1024, 768), _node("ReduceMax", "x axes"), axes=np.array([0], "int64")),
    Case("elementwise", "add 1x64x112x112", (_node("Add", "x z"),), {"x": _IMAGE, "z": _IMAGE}),
    Case("elementwise", "scale channels 1x64x112x112", (_node("Mul", "x z"),), {"x": _IMAGE, "z": (1, 64, 1, 1)}),
    _unary("elementwise", "relu", _IMAGE, _node("Relu")),
    _unary("elementwise", "sine", _IMAGE, _node("Sin")),
    _unary("elementwise", "arctangent", _IMAGE, _node("Atan")),
    _unary(
        "selection",
        "5 of rows",
        (64, 1000),
        helper.make_node("TopK", ["x", "k"], ["y", "places"]),
        k=np.array([5], "int64"),
    ),
    _unary(
        "selection",
        "300 of a row",
        (1, 8400),
        helper.make_node("TopK", ["x", "k"], ["y", "places"]),
        k=np.array([300], "int64"),
    ),
    _unary(
        "selection",
        "20 of rows",
        (1024, 1024),
        helper.make_node("TopK", ["x", "k"], ["y", "places"]),
        k=np.array([20], "int64"),
    ),
    _unary("elementwise", "silu", _IMAGE, _node("Sigmoid", "x", "s"), _node("Mul", "x s")),
    _unary("elementwise", "hard-swish", _IMAGE, _node("HardSwish")),
    _unary(
        "elementwise",
        "gelu",
        (1, 197, 768),
        _node("Div", "x root", "d"),
        _node("Erf", "d", "e"),
        _node("Add", "e one", "f"),
        _node("Mul", "x f", "g"),
        _node("Mul", "g half"),
        root=np.float32(math.sqrt(2)),
        one=np.float32(1),
        half=np.float32(0.5),
    ),
    _recurrent("LSTM", 1, 1, 128, 128),
    _recurrent("LSTM", 100, 1, 128, 128),
    _recurrent("LSTM", 100, 1, 256, 512),
    _recurrent("LSTM", 50, 16, 256, 256),
    _recurrent("GRU", 50, 16, 256, 256),
    _recurrent("RNN", 50, 16, 256, 256),
    _recurrent("LSTM", 80, 1, 96, 48, "bidirectional"),
    _recurrent("GRU", 100, 1, 256, 256, "bidirectional"),
    _loop(100, 1, 128, 128),
    _loop(100, 1, 256, 512),
    _loop(100, 16, 256, 256),
    _trees(1, 500, 6, 30),
    _trees(1000, 500, 6, 30),
    _trees(1, 500, 10, 30),
    _trees(1000, 500, 10, 30),
    _sampling("bilinear", (1, 64, 56, 56), (56, 56)),
    _sampling("bilinear", (8, 32, 40, 40), (300, 4)),
    _sampling("nearest", (8, 32, 40, 40), (300, 4)),
    _resize("nearest"),
    _resize("linear"),
    Case(
        "concatenation",
        "two of 1x64x56x56",
        (_node("Concat", "x z", axis=1),),
        {"x": (1, 64, 56, 56), "z": (1, 64, 56, 56)},
    ),
    Case(
        "concatenation",
        "fifty of 128x32",
        (_node("Concat", " ".join(f"x{place}" for place in range(50)), axis=1),),
        {f"x{place}": (128, 32) for place in range(50)},
    ),
    _unary("transpose", "to channels last", (1, 64, 56, 56), _node("Transpose", perm=[0, 2, 3, 1])),
    _unary("transpose", "heads", (1, 128, 6, 64), _node("Transpose", perm=[0, 2, 1, 3])),
    _unary(
        "transpose",
        "shuffle channels",
        (1, 116, 28, 28),
        _node("Reshape", "x apart", "a"),
        _node("Transpose", "a", "t", perm=[0, 2, 1, 3, 4]),
        _node("Reshape", "t joined"),
        apart=np.array([1, 2, 58, 28, 28], "int64"),
        joined=np.array([1, 116, 28, 28], "int64"),
    ),
    Case(
        "gather",
        "128 rows of 8000x384",
        (_node("Gather", "x ids"),),
        {"x": (8000, 384)},
        tables={"ids": np.random.default_rng(0).integers(0, 8000, 128)},
        bytes_moved=2 * 4 * 128 * 384,
    ),
)
KINDS = tuple(dict.fromkeys(case.kind for case in CASES))


class OperatorJob(Record):
    """The job to build the model of one operator into `build.output` and to time its functions."""

    build: prepare.BuildJob
    repeats: int


class OperatorTime(Turn):
    """The least time of all functions that do more than change the layout, and the rules that scheduled them."""

    microseconds: float
    rules: tuple[str, ...]


class Result(Record):
    """One operator.

    `microseconds` is the time of its own functions, `whole` that of the model with its changes of layout; `flops` and
    `bytes` are its operations and bytes by definition. `bound` is the peak that limits it, `fraction` its share of that
    peak. `ratio` is the latency over ONNX Runtime's, of the medians and of the minima.
    """

    kind: str
    label: str
    rules: tuple[str, ...] = ()
    microseconds: float | None = None
    whole: float | None = None
    flops: float = 0.0
    bytes: int = 0
    bound: str = ""
    fraction: float | None = None
    ratio: tuple[float, float] | None = None
    error: float | None = None
    failure: str | None = None


class Document(Record):
    """The document that `--json` writes."""

    threads: int
    peaks: Peaks
    operators: tuple[Result, ...]


def work(job: OperatorJob, emit: Emit) -> OperatorTime:
    """Build one operator and time it in a child process."""
    os.environ["TVM_NUM_THREADS"] = str(job.build.target.threads)
    bundle = prepare.build_bundle(job.build)
    functions = time_functions(bundle, job.build.sample, job.repeats).functions
    kernels = [function for function in functions if function.rule]
    # An operator without other functions is a transpose itself.
    kernels = [function for function in kernels if not function.name.startswith("transpose")] or kernels
    return OperatorTime(
        process=os.getpid(),
        microseconds=sum(function.microseconds for function in kernels),
        rules=tuple(dict.fromkeys(function.rule for function in kernels)),
    )


def measure(
    case: Case, machine: Peaks, builder: Turns, contest: runners.Contest, arguments: argparse.Namespace, state: Path
) -> Result:
    """Build one operator, time its functions, and compare the whole model with ONNX Runtime."""
    name = "operator-" + "".join(letter if letter.isalnum() else "-" for letter in f"{case.kind}-{case.label}")
    onnx_file, sample, bundle = (state / f"{name}{suffix}" for suffix in (".onnx", ".npz", ".tar.gz"))
    model = case.model()
    onnx_file.write_bytes(model.SerializeToString(deterministic=True))
    generator = np.random.default_rng(0)
    arrays = {key: generator.standard_normal(shape).astype("float32") for key, shape in case.inputs.items()}
    prepare.save(sample, arrays)
    build = prepare.BuildJob(
        name=name[:60],
        onnx=onnx_file,
        sample=sample,
        target=prepare.native(arguments.threads),
        trials=0,
        state=state,
        output=bundle,
    )
    job = RunnerJob(
        runner="tvmflow",
        onnx=onnx_file,
        sample=sample,
        expected=state / "operator-expected.npz",
        bundle=bundle,
        source=None,
        threads=arguments.threads,
        seconds=arguments.seconds,
        clock=runners.clock(arguments.cpu_time, arguments.threads),
    )
    bytes_moved = case.bytes(model)
    try:
        time = builder.call(OperatorJob(build=build, repeats=arguments.repeats), OperatorTime)
        figures = contest.measure(job, ("onnxruntime", "tvmflow"), arguments.rounds, lambda step: None)
    except TvmflowError as error:
        return Result(kind=case.kind, label=case.label, flops=case.flops, bytes=bytes_moved, failure=str(error))
    finally:
        for path in (onnx_file, sample, bundle):
            path.unlink(missing_ok=True)
    ours, peer = figures["tvmflow"], figures["onnxruntime"]
    level = machine.level(bytes_moved)
    compute, memory = case.flops / machine.gflops * 1e-3, bytes_moved / machine.bandwidth[level] * 1e-3
    has_figures = ours.p50 and ours.min and peer.p50 and peer.min
    return Result(
        kind=case.kind,
        label=case.label,
        rules=time.rules,
        microseconds=time.microseconds,
        whole=None if ours.min is None else ours.min * 1e3,
        flops=case.flops,
        bytes=bytes_moved,
        bound="compute" if compute > memory else level,
        fraction=max(compute, memory) / time.microseconds,
        ratio=(ours.p50 / peer.p50, ours.min / peer.min) if has_figures else None,  # type: ignore[operator]
        error=ours.error,
        failure=ours.failure or peer.failure,
    )


def show(results: Sequence[Result]) -> Table:
    """Return the table of operators."""
    table = Table(box=box.SIMPLE_HEAD)
    left = ("class", "operator", "rule", "bound")
    headings = ("class", "operator", "rule", "us", "GFLOP/s", "GB/s", "bound", "of peak")
    for heading in (*headings, "whole us", "/ ONNX Runtime\np50   min", "error"):
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    for result in results:
        if result.microseconds is None or result.fraction is None:
            table.add_row(result.kind, result.label, "failed")
            continue
        ratio = "-" if result.ratio is None else f"{result.ratio[0]:5.2f} {result.ratio[1]:5.2f}"
        table.add_row(
            result.kind,
            result.label,
            ", ".join(result.rules),
            f"{result.microseconds:.1f}",
            f"{result.flops / result.microseconds * 1e-3:.1f}" if result.flops else "",
            f"{result.bytes / result.microseconds * 1e-3:.1f}",
            result.bound,
            f"{result.fraction:.0%}",
            "-" if result.whole is None else f"{result.whole:.1f}",
            f"[red]{ratio}[/red]" if result.ratio is not None and min(result.ratio) > 1 else ratio,
            "-" if result.error is None else f"{result.error:.0e}",
        )
    return table


def summary(results: Sequence[Result]) -> Table:
    """Return the table of classes, with geometric means."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("class", "operators", "of peak", "worst", "/ ONNX Runtime, min"):
        table.add_column(heading, justify="left" if heading == "class" else "right")
    for kind in dict.fromkeys(result.kind for result in results):
        own = [result for result in results if result.kind == kind]
        fractions = [result.fraction for result in own if result.fraction]
        ratios = [result.ratio[1] for result in own if result.ratio]
        table.add_row(
            kind,
            str(len(own)),
            f"{_mean(fractions):.0%}" if fractions else "-",
            f"{min(fractions):.0%}" if fractions else "-",
            f"{_mean(ratios):.2f}" if ratios else "-",
        )
    return table


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _select_cases(kinds: Sequence[str]) -> list[Case]:
    for kind in kinds:
        if not any(name.startswith(kind) for name in KINDS):
            close = get_close_matches(kind, KINDS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the classes are {', '.join(KINDS)}"
            raise InputError(f"there is no operator class {kind!r}; {hint}")
    return [case for case in CASES if not kinds or any(case.kind.startswith(kind) for kind in kinds)]


def main() -> int:
    """Measure the operators and print two tables; return 1 when one failed."""
    parser = new_parser(__doc__)
    parser.add_argument("classes", nargs="*", metavar="CLASS", help=f"or its beginning, of {', '.join(KINDS)}")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time, not wall time; with --threads 1")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each runner (5)")
    parser.add_argument("--seconds", type=float, default=0.1, help="of timed runs in a turn (0.1)")
    parser.add_argument("--repeats", type=int, default=50, help="timed runs of an operator's functions (50)")
    arguments = parser.parse_args()
    cases = _select_cases(arguments.classes)
    runners.clock(arguments.cpu_time, arguments.threads)
    state = state_folder(arguments)
    results: list[Result] = []
    with Console(stderr=True).status("measuring the peaks") as status:
        machine = peaks.measure(prepare.native(arguments.threads), state)
        with Turns("operators:work", state / "operators.log") as builder, runners.Contest(state) as contest:
            for case in cases:
                status.update(f"{case.kind}: {case.label}")
                results.append(measure(case, machine, builder, contest, arguments, state))
    console = Console(width=max(160, Console().width))
    console.print(show(results), highlight=False)
    console.print(summary(results), highlight=False)
    bandwidth = ", ".join(f"{level} {value:.0f}" for level, value in machine.bandwidth.items())
    print(f"peak, threads {arguments.threads}: {machine.gflops:.0f} GFLOP/s; GB/s: {bandwidth}")
    for result in results:
        if result.failure is not None:
            print(f"{result.kind}, {result.label}: {result.failure}")
    if arguments.json is not None:
        document = Document(threads=arguments.threads, peaks=machine, operators=tuple(results))
        arguments.json.write_text(document.model_dump_json(indent=1))
    return int(any(result.failure is not None for result in results))


if __name__ == "__main__":
    run_main(main)
