"""Models whose first dimension is the batch: every way in which the compiler makes one item of it beside another."""

import numpy as np
from onnx import NodeProto, helper

from support.arrays import normal
from tvmflow.arrays import Array

# What one item may hold that must not reach another.
POISON = (np.nan, np.inf, -np.inf, 1e30)
# A model's nodes, the shape of an item, its weights.
Parts = tuple[list[NodeProto], tuple[int, ...], dict[str, Array]]


def images() -> Parts:
    """Convolutions in every way that the compiler knows, pooling, norms, a resize and a classifier."""
    nodes = [
        helper.make_node("Conv", ["x", "winograd"], ["a"], pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "pointwise"], ["c"]),
        helper.make_node("AveragePool", ["c"], ["d"], kernel_shape=[3, 3], pads=[1] * 4),
        helper.make_node("Conv", ["d", "expand"], ["e"]),
        helper.make_node("Conv", ["e", "depthwise"], ["f"], pads=[1] * 4, group=96),
        helper.make_node("Conv", ["f", "project"], ["g"]),
        helper.make_node("Add", ["g", "d"], ["h"]),
        helper.make_node("InstanceNormalization", ["h", "ones", "ones"], ["i"]),
        helper.make_node("Conv", ["i", "strided"], ["j"], strides=[3, 3]),
        helper.make_node("Resize", ["j", "", "scales"], ["k"], mode="linear"),
        helper.make_node("MaxPool", ["k"], ["l"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Concat", ["j", "l"], ["m"], axis=1),
        helper.make_node("GlobalAveragePool", ["m"], ["n"]),
        helper.make_node("Flatten", ["n"], ["o"]),
        helper.make_node("Gemm", ["o", "dense"], ["p"]),
        helper.make_node("Softmax", ["p"], ["y"]),
    ]
    weights = {
        "winograd": normal(32, 16, 3, 3) / 12,
        "pointwise": normal(64, 32, 1, 1) / 6,
        "expand": normal(96, 64, 1, 1) / 8,
        "depthwise": normal(96, 1, 3, 3) / 3,
        "project": normal(64, 96, 1, 1) / 10,
        "ones": np.ones(64, "float32"),
        "strided": normal(40, 64, 5, 5) / 40,
        "scales": np.array([1, 1, 2, 2], "float32"),
        "dense": normal(80, 10) / 9,
    }
    return nodes, (16, 28, 28), weights


def tokens() -> Parts:
    """A layer of an encoder."""
    heads = np.array([0, 14, 4, 64])
    nodes = [
        helper.make_node("LayerNormalization", ["x", "scale", "scale"], ["n"]),
        *(helper.make_node("MatMul", ["n", f"w{part}"], [f"{part}0"]) for part in "qkv"),
        *(helper.make_node("Reshape", [f"{part}0", "heads"], [f"{part}1"]) for part in "qkv"),
        helper.make_node("Transpose", ["q1"], ["q"], perm=[0, 2, 1, 3]),
        helper.make_node("Transpose", ["k1"], ["k"], perm=[0, 2, 3, 1]),
        helper.make_node("Transpose", ["v1"], ["v"], perm=[0, 2, 1, 3]),
        helper.make_node("MatMul", ["q", "k"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["o0"]),
        helper.make_node("Transpose", ["o0"], ["o1"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["o1", "flat"], ["o2"]),
        helper.make_node("Add", ["o2", "x"], ["o3"]),
        helper.make_node("MatMul", ["o3", "up"], ["u"]),
        helper.make_node("Gelu", ["u"], ["g"]),
        helper.make_node("Transpose", ["g"], ["t"], perm=[1, 0, 2]),
        helper.make_node("MatMul", ["t", "down"], ["d"]),
        helper.make_node("Transpose", ["d"], ["y"], perm=[1, 0, 2]),
    ]
    weights = {
        "scale": normal(256),
        "heads": heads,
        "flat": np.array([0, 14, 256]),
        **{f"w{part}": normal(256, 256, seed=ord(part)) / 16 for part in "qkv"},
        "up": normal(256, 512) / 16,
        "down": normal(512, 256) / 23,
    }
    return nodes, (14, 256), weights
