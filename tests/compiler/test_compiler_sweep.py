"""Random attributes, shapes and operands of single operators, beside ONNX Runtime.

A failure names its operator and seed, and the command that draws the case again:
`PYTHONPATH=tests python tests/compiler/test_compiler_sweep.py OPERATOR SEED`. `... SECONDS` looks for new failures for
so long, in a worker process: a case that ends the process is a failure too.
"""

# ruff: noqa: T201

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TVM_NUM_THREADS", "1")

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from support import scale
from support.arrays import Refused, onnxruntime_results
from support.machines import best_target
from tvmflow.arrays import Array
from tvmflow.compiler import build, import_onnx
from tvmflow.errors import UnsupportedOperatorError

_TIMEOUT = 120.0


@dataclass
class Case:
    """A node under construction: its operands in order, with their values, and its attributes.

    An operand of `steering` says shapes, axes and the like, and is a weight, or sometimes computed; others are inputs.
    """

    rng: np.random.Generator
    operator: str
    opset: int = 18
    operands: list[Array | None] = field(default_factory=list)
    steering: set[int] = field(default_factory=set)
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1

    def integer(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def choice(self, *options: Any) -> Any:
        return options[self.integer(0, len(options) - 1)]

    def flag(self) -> bool:
        return bool(self.integer(0, 1))

    def shape(self, low: int = 1, high: int = 4, most: int = 7) -> tuple[int, ...]:
        return tuple(self.integer(1, most) for _ in range(self.integer(low, high)))

    def values(self, *shape: int, dtype: str = "float32", positive: bool = False) -> Array:
        if dtype == "bool":
            return self.rng.random(shape) < 0.5
        if dtype.startswith(("int", "uint")):
            return self.rng.integers(0 if positive or dtype[0] == "u" else -9, 10, shape).astype(dtype)
        numbers = self.rng.standard_normal(shape)
        return np.asarray(np.abs(numbers) + 0.5 if positive else numbers).astype(dtype)

    def give(self, *values: Array | None) -> None:
        self.operands += values

    def steer(self, *values: Any, dtype: str = "int64") -> None:
        for value in values:
            if value is not None:
                self.steering.add(len(self.operands))
            self.operands.append(None if value is None else np.asarray(value, dtype))

    def set(self, **attributes: Any) -> None:
        self.attributes.update({name: value for name, value in attributes.items() if value is not None})

    def axis(self, rank: int) -> int:
        return self.integer(-rank, rank - 1)


Draw = Callable[[Case], None]
NUMBERS = ("float32", "float32", "float32", "int32", "int64")


def _unary(case: Case, dtypes: tuple[str, ...] = ("float32",), **ranges: tuple[float, ...]) -> None:
    case.give(case.values(*case.shape(0), dtype=case.choice(*dtypes)))
    for name, options in ranges.items():
        if case.flag():
            case.set(**{name: case.choice(*options)})


def _binary(case: Case, dtypes: tuple[str, ...] = NUMBERS, positive: bool = False, count: int = 2) -> None:
    shape, dtype = case.shape(0), case.choice(*dtypes)
    for _ in range(count):
        start = case.integer(0, len(shape))
        own = [1 if case.integer(0, 3) == 0 else size for size in shape[start:]]
        case.give(case.values(*own, dtype=dtype, positive=positive))


def _prelu(case: Case) -> None:
    shape = case.shape(0)
    start = case.integer(0, len(shape))
    slope = [1 if case.integer(0, 3) == 0 else size for size in shape[start:]]
    case.give(case.values(*shape), case.values(*slope))


def _mod(case: Case) -> None:
    _binary(case, ("int32", "int64", "float32", "uint8"), positive=case.flag())
    value = case.operands[1]
    assert value is not None
    case.operands[1] = np.where(value == 0, np.asarray(3, value.dtype), value)
    case.set(fmod=int(value.dtype.kind == "f" or case.flag()))


def _where(case: Case) -> None:
    _binary(case, count=3)
    value = case.operands[0]
    assert value is not None
    case.operands[0] = value > 0


def _cast(case: Case) -> None:
    types = ("float32", "float64", "float16", "int8", "uint8", "int32", "int64", "bool")
    case.give(case.values(*case.shape(0), dtype=case.choice(*types), positive=True))
    case.set(to=helper.np_dtype_to_tensor_dtype(np.dtype(case.choice(*types))))


def _clip(case: Case) -> None:
    dtype = case.choice("float32", "int32", "int64", "uint8")
    case.give(case.values(*case.shape(0), dtype=dtype))
    case.steer(*(case.choice(None, bound) for bound in (1, 3)), dtype=dtype)


def _reduce(case: Case) -> None:
    case.opset = case.choice(13, 18, 20)
    shape = case.shape()
    # Of whole numbers ONNX Runtime rounds a logarithm of powers to either side.
    dtypes = ("float32",) if case.operator == "ReduceLogSumExp" else NUMBERS
    case.give(case.values(*shape, dtype=case.choice(*dtypes)))
    rank = len(shape)
    axes = [int(axis) - (rank if case.flag() else 0) for axis in case.rng.permutation(rank)[: case.integer(0, rank)]]
    if case.opset >= 18 or case.operator == "ReduceSum":
        case.steer(case.choice(None, axes) if axes else None)
        case.set(noop_with_empty_axes=case.choice(None, 0, 1))
    elif axes:
        case.set(axes=axes)
    case.set(keepdims=case.choice(None, 0, 1))


def _arg(case: Case) -> None:
    shape = case.shape()
    case.give(case.values(*shape, dtype=case.choice("float32", "int32")))
    case.set(axis=case.axis(len(shape)), keepdims=case.choice(0, 1), select_last_index=case.choice(None, 0, 1))


def _along(case: Case, opsets: tuple[int, ...] = (11, 13, 18), **more: tuple[Any, ...]) -> None:
    case.opset = case.choice(*opsets)
    shape = case.shape()
    case.give(case.values(*shape))
    case.set(axis=case.choice(None, case.axis(len(shape))))
    case.set(**{name: case.choice(None, *options) for name, options in more.items()})


def _cumulate(case: Case) -> None:
    shape = case.shape()
    case.give(case.values(*shape, dtype=case.choice("float32", "int32", "int64")))
    case.steer(case.axis(len(shape)))
    case.set(exclusive=case.choice(None, 0, 1), reverse=case.choice(None, 0, 1))


def _top_k(case: Case) -> None:
    shape = case.shape()
    axis = case.axis(len(shape))
    case.give(case.rng.permutation(int(np.prod(shape))).reshape(shape).astype(case.choice("float32", "int64")))
    case.steer([case.integer(0, shape[axis])])
    case.set(axis=axis, largest=case.choice(None, 0, 1))
    case.outputs = 2


def _concat(case: Case) -> None:
    shape = list(case.shape())
    axis = case.axis(len(shape))
    dtype = case.choice(*NUMBERS)
    for _ in range(case.integer(1, 3)):
        shape[axis] = case.integer(1, 5)
        case.give(case.values(*shape, dtype=dtype))
    case.set(axis=axis)


def _split(case: Case) -> None:
    shape = case.shape(most=9)
    axis = case.axis(len(shape))
    case.give(case.values(*shape, dtype=case.choice(*NUMBERS)))
    case.set(axis=axis)
    size = shape[axis]
    case.outputs = case.integer(1, min(3, size))
    if case.flag():
        cuts = sorted(case.integer(0, size) for _ in range(case.outputs - 1))
        case.steer(np.diff([0, *cuts, size]))
    else:
        case.set(num_outputs=case.outputs)


def _slice(case: Case) -> None:
    shape = case.shape()
    case.give(case.values(*shape, dtype=case.choice("float32", "int64", "bool")))
    axes = [int(axis) for axis in case.rng.permutation(len(shape))[: case.integer(1, len(shape))]]
    steps = [case.choice(1, 1, 2, 3, -1, -2) for _ in axes] if case.flag() else None
    # ONNX Runtime takes the largest end of a negative step for the other end.
    far = -(2**31) if steps and min(steps) < 0 else 2**31 - 1
    bounds = [[case.choice(case.integer(-9, 9), 0, far) for _ in axes] for _ in range(2)]
    case.steer(*bounds, [axis - (len(shape) if case.flag() else 0) for axis in axes], steps)


def _pad(case: Case) -> None:
    case.opset = case.choice(13, 18, 19)
    shape = case.shape()
    mode = case.choice("constant", "reflect", "edge", *(["wrap"] if case.opset >= 19 else []))
    dtype = case.choice("float32", "float32", "int64", "uint8")
    case.give(case.values(*shape, dtype=dtype))
    axes = [int(axis) for axis in case.rng.permutation(len(shape))[: case.integer(1, len(shape))]]
    if case.opset < 18 or case.flag():
        axes = list(range(len(shape)))
    least = case.choice(0, -1)
    widths = [case.integer(least, shape[axis] - 1 if mode in ("reflect", "wrap") else 3) for axis in axes * 2]
    case.steer(
        [max(width, -1) if shape[axis] > 2 else max(width, 0) for axis, width in zip(axes * 2, widths, strict=True)]
    )
    case.steer(case.choice(None, 3) if mode == "constant" else None, dtype=dtype)
    if case.opset >= 18 and axes != list(range(len(shape))):
        case.steer(axes)
    case.set(mode=mode)


def _indices(case: Case, size: int, *shape: int) -> Array:
    return case.rng.integers(-size, size, shape).astype(case.choice("int32", "int64"))


def _gather(case: Case) -> None:
    shape = case.shape()
    axis = case.axis(len(shape))
    case.give(case.values(*shape, dtype=case.choice(*NUMBERS)), _indices(case, shape[axis], *case.shape(0, 2, 3)))
    case.set(axis=axis)


def _gather_elements(case: Case) -> None:
    shape = case.shape()
    axis = case.axis(len(shape))
    reach = [case.integer(1, size) for size in shape]
    case.give(case.values(*shape), _indices(case, shape[axis], *reach))
    case.set(axis=axis)


def _positions(case: Case, shape: tuple[int, ...], count: int, *lead: int) -> Array:
    return np.stack([case.rng.integers(-size, size, lead) for size in shape[:count]], axis=-1).astype("int64")


def _gather_nd(case: Case) -> None:
    shape = case.shape(2)
    first = case.integer(0, len(shape) - 1) if case.flag() else 0
    count = case.integer(1, len(shape) - first)
    case.give(case.values(*shape))
    case.give(_positions(case, shape[first:], count, *shape[:first], *case.shape(0, 2, 3)))
    case.set(batch_dims=first)


def _scatter_elements(case: Case) -> None:
    shape = case.shape()
    axis = case.axis(len(shape))
    reduction = case.choice(None, "add", "mul", "max", "min")
    reach = [case.integer(1, size) for size in shape]
    indices = _indices(case, shape[axis], *reach)
    if reduction is None:
        # Of two writes to one place it is not said which one is last.
        order = np.argsort(case.rng.random(shape), axis=axis)
        indices = order[tuple(slice(0, size) for size in reach)].astype("int64")
    case.give(case.values(*shape), indices, case.values(*reach))
    case.set(axis=axis, reduction=reduction)


def _scatter_nd(case: Case) -> None:
    shape = case.shape()
    count, lead = case.integer(1, len(shape)), case.shape(1, 2, 2)
    case.give(case.values(*shape), _positions(case, shape, count, *lead), case.values(*lead, *shape[count:]))
    case.set(reduction=case.choice("add", "mul", "max", "min"))


def _reshape(case: Case) -> None:
    shape = case.shape()
    case.give(case.values(*shape, dtype=case.choice(*NUMBERS)))
    order = [int(np.prod(shape[: case.integer(0, len(shape))], initial=1)), -1]
    case.steer(case.choice([-1], order, [0, -1], [1, -1, 1], [*shape, 1]))


def _expand(case: Case) -> None:
    shape = case.shape()
    case.give(case.values(*(1 if case.flag() else size for size in shape)))
    own = case.operands[0].shape  # type: ignore[union-attr]
    target = [size if one == 1 else case.choice(1, one) for one, size in zip(own, shape, strict=True)]
    case.steer(
        [*([case.integer(1, 3)] if case.flag() else []), *target][(1 if len(target) > 1 and case.flag() else 0) :]
    )


def _tile(case: Case) -> None:
    shape = case.shape(high=3)
    case.give(case.values(*shape, dtype=case.choice(*NUMBERS)))
    case.steer([case.integer(1, 3) for _ in shape])


def _transpose(case: Case) -> None:
    shape = case.shape()
    case.give(case.values(*shape, dtype=case.choice(*NUMBERS)))
    case.set(perm=case.choice(None, [int(axis) for axis in case.rng.permutation(len(shape))]))


def _squeeze(case: Case) -> None:
    shape = [1 if case.flag() else size for size in case.shape()]
    case.give(case.values(*shape))
    ones = [axis - (len(shape) if case.flag() else 0) for axis, size in enumerate(shape) if size == 1]
    if ones:
        case.steer(ones[: case.integer(1, len(ones))])


def _unsqueeze(case: Case) -> None:
    shape = case.shape(0, 3)
    case.give(case.values(*shape))
    case.steer([int(axis) for axis in case.rng.permutation(len(shape) + 2)[:2]])


def _flatten(case: Case) -> None:
    shape = case.shape()
    case.give(case.values(*shape))
    case.set(axis=case.integer(-len(shape), len(shape)))


def _depth(case: Case) -> None:
    block = case.integer(1, 3)
    batch, channels, height, width = (case.integer(1, 3) for _ in range(4))
    if case.operator == "DepthToSpace":
        case.give(case.values(batch, channels * block * block, height, width))
        case.set(mode=case.choice(None, "DCR", "CRD"))
    else:
        case.give(case.values(batch, channels, height * block, width * block))
    case.set(blocksize=block)


def _window(case: Case, rank: int, has_dilations: bool = True, is_pool: bool = False) -> list[int]:
    """Set the attributes of a window of `rank` dimensions; return sizes of data that are as large, at least."""
    kernel = [case.integer(1, 3) for _ in range(rank)]
    dilations = [case.choice(1, 1, 2) for _ in range(rank)] if has_dilations else [1] * rank
    if case.flag():
        case.set(strides=[case.integer(1, 3) for _ in range(rank)])
    if has_dilations and max(dilations) > 1:
        case.set(dilations=dilations)
    extents = [(taps - 1) * dilation + 1 for taps, dilation in zip(kernel, dilations, strict=True)]
    kind = case.integer(0, 2)
    if kind == 0:
        case.set(pads=[case.integer(0, (taps - 1)) for taps in kernel * 2])
    elif kind == 1:
        # ONNX Runtime computes such a padding of poolings without the dilations, and for LpPool a negative one where a
        # stride is longer than the window.
        strides = case.attributes.get("strides", [1] * rank)
        is_beyond = any(stride > taps for stride, taps in zip(strides, kernel, strict=True))
        is_apart = is_pool and (max(dilations) > 1 or is_beyond)
        case.set(auto_pad="VALID" if is_apart else case.choice("SAME_UPPER", "SAME_LOWER", "VALID"))
    case.set(kernel_shape=kernel)
    return [extent + case.integer(0, 6) for extent in extents]


def _conv(case: Case) -> None:
    rank = case.choice(1, 2, 2, 3)
    sizes, groups = _window(case, rank), case.choice(1, 1, 2, 3)
    channels, outputs = groups * case.integer(1, 4), groups * case.integer(1, 4)
    case.give(case.values(case.integer(1, 3), channels, *sizes))
    case.give(case.values(outputs, channels // groups, *case.attributes["kernel_shape"]))
    if case.flag():
        case.give(case.values(outputs))
    case.set(group=groups)


def _conv_transpose(case: Case) -> None:
    rank = case.choice(1, 2, 2)
    sizes, groups = _window(case, rank), case.choice(1, 1, 2, 3)
    strides = case.attributes.get("strides", [1] * rank)
    if case.flag():
        case.set(output_padding=[case.integer(0, stride - 1) for stride in strides])
    channels, outputs = groups * case.integer(1, 3), case.integer(1, 4)
    case.give(case.values(case.integer(1, 3), channels, *sizes))
    case.give(case.values(channels, outputs, *case.attributes["kernel_shape"]))
    if case.flag():
        case.give(case.values(outputs * groups))
    case.set(group=groups)


def _pool(case: Case) -> None:
    rank = case.choice(1, 2, 2, 3)
    case.opset = case.choice(11, 19, 22)
    has_dilations = case.operator == "MaxPool" or case.opset >= 19
    sizes = _window(case, rank, has_dilations, is_pool=True)
    case.give(case.values(case.integer(1, 3), case.integer(1, 4), *sizes))
    if case.operator != "LpPool" or case.opset >= 18:
        case.set(ceil_mode=case.choice(None, 0, 1))
    if case.operator == "AveragePool":
        case.set(count_include_pad=case.choice(None, 0, 1))
    if case.operator == "LpPool":
        case.set(p=case.choice(None, 1, 2, 3))
    if case.operator == "MaxPool" and case.flag():
        case.outputs = 2


def _image(case: Case, **more: tuple[Any, ...]) -> None:
    case.give(case.values(*case.shape(3, 4)))
    case.set(**{name: case.choice(None, *options) for name, options in more.items()})


def _channels(case: Case) -> None:
    shape = case.shape(2 if case.operator == "BatchNormalization" else 3)
    case.give(case.values(*shape), case.values(shape[1]), case.values(shape[1]))
    if case.operator == "BatchNormalization":
        case.give(case.values(shape[1]), case.values(shape[1], positive=True))
    case.set(epsilon=case.choice(None, 1e-3))


def _layer_norm(case: Case) -> None:
    shape = case.shape()
    axis = case.axis(len(shape))
    own = shape[axis % len(shape) :]
    case.give(case.values(*shape), case.values(*own), *([case.values(*own)] if case.flag() else []))
    case.set(axis=axis, epsilon=case.choice(None, 1e-3))


def _resize(case: Case) -> None:
    shape = case.shape(3, 4)
    mode = case.choice("nearest", "linear", "cubic") if len(shape) == 4 else case.choice("nearest", "linear")
    coordinates = case.choice("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
    case.set(mode=mode, coordinate_transformation_mode=coordinates)
    if mode == "nearest":
        case.set(nearest_mode=case.choice("floor", "round_prefer_floor", "ceil", "round_prefer_ceil"))
    case.give(case.values(*shape), None)
    if case.flag():
        case.steer(None, [*shape[:2], *(case.integer(1, 2 * size) for size in shape[2:])])
    else:
        case.steer([1.0, 1.0, *(case.choice(1.0, 2.0, 3.0) for _ in shape[2:])], dtype="float32")


def _grid_sample(case: Case) -> None:
    case.opset = 20
    batch, height, width = (case.integer(1, 4) for _ in range(3))
    case.give(case.values(batch, case.integer(1, 3), case.integer(2, 6), case.integer(2, 6)))
    case.give(case.values(batch, height, width, 2))
    case.set(mode=case.choice("linear", "nearest", "cubic"), align_corners=case.choice(0, 1))
    case.set(padding_mode=case.choice("zeros", "border", "reflection"))


def _roi_align(case: Case) -> None:
    batch, count = case.integer(1, 3), case.integer(1, 4)
    case.give(case.values(batch, case.integer(1, 3), case.integer(2, 8), case.integer(2, 8)))
    case.give(np.sort(case.rng.random((count, 2, 2)) * 8, axis=1).reshape(count, 4).astype("float32"))
    case.give(case.rng.integers(0, batch, count))
    case.set(mode=case.choice(None, "avg", "max"), sampling_ratio=case.choice(None, 0, 1, 2))
    case.set(output_height=case.integer(1, 3), output_width=case.integer(1, 3), spatial_scale=case.choice(None, 0.5))
    case.set(coordinate_transformation_mode=case.choice(None, "half_pixel", "output_half_pixel"))


def _one_hot(case: Case) -> None:
    shape = case.shape(0, 3)
    case.give(case.rng.integers(-4, 5, shape).astype(case.choice("int64", "int32")))
    case.steer(case.choice(4, [4]))
    case.give(case.values(2))
    case.set(axis=case.choice(None, case.axis(len(shape) + 1)))


def _eye(case: Case) -> None:
    case.give(case.values(*case.shape(2, 2)))
    case.set(k=case.choice(None, case.integer(-3, 3)), dtype=case.choice(None, onnx.TensorProto.INT64))


def _range(case: Case) -> None:
    start, step = case.integer(-5, 5), case.choice(-2, -1, 1, 2, 3)
    case.steer(start, start + step * case.integer(0, 5), step, dtype=case.choice("int64", "int32", "float32"))


def _trilu(case: Case) -> None:
    case.give(case.values(*case.shape(2), dtype=case.choice(*NUMBERS)))
    if case.flag():
        case.steer(case.integer(-3, 3))
    case.set(upper=case.choice(None, 0, 1))


def _unique(case: Case) -> None:
    shape = case.shape(1, 2)
    case.give(case.values(*shape, dtype=case.choice("int64", "float32")))
    case.set(axis=case.choice(None, case.axis(len(shape))), sorted=case.choice(0, 1))
    case.outputs = case.choice(1, 4)


def _compress(case: Case) -> None:
    shape = case.shape()
    axis = case.choice(None, case.axis(len(shape)))
    size = int(np.prod(shape)) if axis is None else shape[axis]
    case.give(case.values(*shape), case.values(case.integer(1, size + 2), dtype="bool"))
    case.set(axis=axis)


def _reverse_sequence(case: Case) -> None:
    shape = case.shape(2)
    batch = case.choice(0, 1)
    case.give(case.values(*shape), case.rng.integers(1, shape[1 - batch] + 1, shape[batch]))
    case.set(batch_axis=batch, time_axis=1 - batch)


def _gemm(case: Case) -> None:
    rows, depth, columns = (case.integer(1, 6) for _ in range(3))
    first, second = case.flag(), case.flag()
    case.give(case.values(*((depth, rows) if first else (rows, depth))))
    case.give(case.values(*((columns, depth) if second else (depth, columns))))
    if case.flag():
        case.give(case.values(*case.choice((), (columns,), (1, columns), (rows, 1), (rows, columns))))
    case.set(transA=int(first), transB=int(second), alpha=case.choice(None, 0.5), beta=case.choice(None, 2.0))


def _matmul(case: Case) -> None:
    rows, depth, columns = (case.integer(1, 6) for _ in range(3))
    lead = case.shape(0, 2, 3)
    left = [*[1 if case.integer(0, 3) == 0 else size for size in lead], rows, depth]
    right = [*[1 if case.integer(0, 3) == 0 else size for size in lead], depth, columns]
    kinds = ("uint8", "int8") if case.operator == "MatMulInteger" else ("float32",)
    left = left[-1:] if case.integer(0, 4) == 0 and case.operator == "MatMul" else left
    right = right[-2:] if case.flag() else right
    case.give(case.values(*left, dtype=case.choice(*kinds)), case.values(*right, dtype=case.choice(*kinds)))


def _quantize(case: Case) -> None:
    shape = case.shape()
    axis = case.axis(len(shape))
    count = shape[axis]
    dtype = case.choice("uint8", "int8")
    size = () if case.flag() else (count,)
    is_forward = case.operator == "QuantizeLinear"
    case.give(case.values(*shape) if is_forward else case.values(*shape, dtype=dtype))
    case.give(case.values(*size, positive=True), case.values(*size, dtype=dtype))
    case.set(axis=axis)


def _recurrent(case: Case) -> None:
    steps, batch, inputs, hidden = (case.integer(1, 4) for _ in range(4))
    direction = case.choice("forward", "reverse", "bidirectional")
    count, gates = 1 + (direction == "bidirectional"), {"LSTM": 4, "GRU": 3, "RNN": 1}[case.operator]
    case.give(case.values(steps, batch, inputs), case.values(count, gates * hidden, inputs))
    case.give(case.values(count, gates * hidden, hidden), case.choice(None, case.values(count, 2 * gates * hidden)))
    case.give(case.choice(None, case.rng.integers(1, steps + 1, batch).astype("int32")))
    case.give(case.choice(None, case.values(count, batch, hidden)))
    case.set(direction=direction, hidden_size=hidden, clip=case.choice(None, 0.7))
    if case.operator == "GRU":
        case.set(linear_before_reset=case.choice(None, 0, 1))
    case.outputs = 2


def _shift(case: Case) -> None:
    _binary(case, ("uint8", "uint32", "uint64"), positive=True)
    case.set(direction=case.choice("LEFT", "RIGHT"))


def _col_to_image(case: Case) -> None:
    sizes, block = [case.integer(3, 7) for _ in range(2)], [case.integer(1, 3) for _ in range(2)]
    strides, pads = [case.integer(1, 2) for _ in range(2)], [case.integer(0, 1) for _ in range(4)]
    counts = [(sizes[i] + pads[i] + pads[2 + i] - block[i]) // strides[i] + 1 for i in range(2)]
    case.give(case.values(case.integer(1, 2), case.integer(1, 3) * int(np.prod(block)), int(np.prod(counts))))
    case.steer(sizes, block)
    case.set(strides=strides, pads=pads)


def _group_norm(case: Case) -> None:
    case.opset, groups = 21, case.integer(1, 3)
    shape = list(case.shape(3))
    shape[1] = groups * case.integer(1, 3)
    case.give(case.values(*shape), case.values(shape[1]), case.values(shape[1]))
    case.set(num_groups=groups)


def _max_roi_pool(case: Case) -> None:
    batch, count = case.integer(1, 3), case.integer(1, 4)
    case.give(case.values(batch, case.integer(1, 3), case.integer(2, 8), case.integer(2, 8)))
    corners = np.sort(case.rng.integers(0, 8, (count, 2, 2)), axis=1).reshape(count, 4)
    case.give(np.concatenate([case.rng.integers(0, batch, (count, 1)), corners], axis=1).astype("float32"))
    case.set(pooled_shape=[case.integer(1, 3), case.integer(1, 3)])


def _suppress(case: Case) -> None:
    batch, count, classes = case.integer(1, 2), case.integer(1, 7), case.integer(1, 3)
    case.give(np.sort(case.rng.random((batch, count, 2, 2)), axis=2).reshape(batch, count, 4).astype("float32"))
    case.give(case.rng.permutation(batch * classes * count).reshape(batch, classes, count).astype("float32") / 50)
    case.steer([case.integer(1, 4)])
    case.steer([case.choice(0.1, 0.5)], [case.choice(0.0, 0.3)], dtype="float32")


def _crop_or_pad(case: Case) -> None:
    shape = case.shape()
    case.give(case.values(*shape))
    axes = [int(axis) for axis in case.rng.permutation(len(shape))[: case.integer(1, len(shape))]]
    case.steer([case.integer(1, 8) for _ in axes])
    case.set(axes=axes)


def _einsum(case: Case) -> None:
    equation = case.choice("bij,bjk->bik", "ij,jk", "i,i->", "bij->bji", "bhij,bhkj->bhik", "ij->j", "ij,ij->i")
    sizes = {letter: case.integer(1, 5) for letter in "bhijk"}
    for term in equation.partition("->")[0].split(","):
        case.give(case.values(*(sizes[letter] for letter in term)))
    case.set(equation=equation)


def _fill(case: Case) -> None:
    case.steer(case.shape(1, 3))
    value = case.choice(None, np.array([3], "int64"), np.array([0.5], "float32"))
    case.set(value=None if value is None else numpy_helper.from_array(value))


def _det(case: Case) -> None:
    size = case.integer(1, 5)
    case.give(case.values(*case.shape(0, 2, 3), size, size))


_ACTIVATIONS: dict[str, dict[str, tuple[float, ...]]] = {
    **{name: {} for name in ("Abs", "Ceil", "Cos", "Erf", "Exp", "Floor", "HardSwish", "IsNaN", "Mish", "Neg", "Relu")},
    **{name: {} for name in ("Round", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Tanh", "Atan", "Sinh")},
    "Celu": {"alpha": (0.5, 2.0)},
    "Elu": {"alpha": (0.5, 2.0)},
    "HardSigmoid": {"alpha": (0.3,), "beta": (0.1,)},
    "IsInf": {"detect_negative": (0, 1), "detect_positive": (0, 1)},
    "LeakyRelu": {"alpha": (0.3,)},
    "Selu": {"alpha": (0.5,), "gamma": (2.0,)},
    "Shrink": {"lambd": (0.3,), "bias": (0.1,)},
    "ThresholdedRelu": {"alpha": (0.3,)},
}
_REDUCTIONS = ("L1", "L2", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
DRAWS: dict[str, Draw] = {
    **{name: partial(_unary, **ranges) for name, ranges in _ACTIVATIONS.items()},
    **dict.fromkeys(("Add", "Mul", "Sub", "Equal", "Greater", "LessOrEqual"), _binary),
    **{name: partial(_binary, count=3) for name in ("Max", "Min")},
    **{name: partial(_binary, dtypes=("float32",), count=3) for name in ("Mean", "Sum")},
    **{name: partial(_binary, dtypes=("bool",)) for name in ("And", "Or", "Xor")},
    **{f"Reduce{name}": _reduce for name in _REDUCTIONS},
    **dict.fromkeys(("ArgMax", "ArgMin"), _arg),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _along),
    **dict.fromkeys(("AveragePool", "MaxPool", "LpPool"), _pool),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"), _image),
    **dict.fromkeys(("BatchNormalization", "InstanceNormalization"), _channels),
    **dict.fromkeys(("MatMul", "MatMulInteger"), _matmul),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _quantize),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _depth),
    **{name: partial(_binary, dtypes=("int32", "uint8")) for name in ("BitwiseAnd", "BitwiseXor")},
    "BitShift": _shift,
    "Cast": _cast,
    "CenterCropPad": _crop_or_pad,
    "Clip": _clip,
    "Col2Im": _col_to_image,
    "Compress": _compress,
    "Concat": _concat,
    "ConstantOfShape": _fill,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "CumSum": _cumulate,
    "Det": _det,
    "Div": partial(_binary, positive=True),
    "Einsum": _einsum,
    "Expand": _expand,
    "EyeLike": _eye,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "GridSample": _grid_sample,
    "GroupNormalization": _group_norm,
    "LayerNormalization": _layer_norm,
    "LpNormalization": partial(_along, opsets=(18,), p=(1, 2)),
    "LRN": partial(_image, size=(1, 3, 5), alpha=(0.1,), bias=(2.0,)),
    "MaxRoiPool": _max_roi_pool,
    "MeanVarianceNormalization": lambda case: case.give(case.values(*case.shape(4, 4))),
    "Mod": _mod,
    "NonMaxSuppression": _suppress,
    "NonZero": partial(_unary, dtypes=("float32", "int64", "bool")),
    "OneHot": _one_hot,
    "Pad": _pad,
    "Pow": partial(_binary, dtypes=("float32",), positive=True),
    "PRelu": _prelu,
    "Range": _range,
    "Reshape": _reshape,
    "Resize": _resize,
    "ReverseSequence": _reverse_sequence,
    "RoiAlign": _roi_align,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "TopK": _top_k,
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Unique": _unique,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}


def draw(operator: str, seed: int) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Draw a model of one node, and the values of its inputs; some of their sizes are free."""
    case = Case(np.random.default_rng([seed, *operator.encode()]), operator)
    DRAWS[operator](case)
    is_free, are_computed = case.integer(0, 2) == 0, case.integer(0, 3) == 0
    inputs, weights, names = {}, [], []
    for place, value in enumerate(case.operands):
        name = "" if value is None else f"x{place}"
        names.append(name)
        if value is None:
            continue
        if place in case.steering and not (are_computed and (place or len(case.operands) > 1)):
            weights.append(numpy_helper.from_array(np.asarray(value), name))
        else:
            inputs[name] = np.asarray(value)
    described = [
        helper.make_tensor_value_info(
            name,
            helper.np_dtype_to_tensor_dtype(value.dtype),
            [
                # A free number of axes would leave the number of the result's dimensions open.
                f"d{size}" if is_free and size > 1 and int(name[1:]) not in case.steering and case.flag() else size
                for size in value.shape
            ],
        )
        for name, value in inputs.items()
    ]
    outputs = [f"y{place}" for place in range(case.outputs)]
    while names and not names[-1]:
        names.pop()
    node = helper.make_node(operator, names, outputs, name="node", **case.attributes)
    graph = helper.make_graph(
        [node], operator, described, [helper.make_empty_tensor_value_info(n) for n in outputs], weights
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", case.opset)], ir_version=9)
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    return inferred, inputs


def difference(operator: str, seed: int, path: Path) -> str:
    """Say where the built model differs from ONNX Runtime, with its seed.

    The text is empty where it does not differ, and where it is refused in words.
    Raises Refused where ONNX Runtime does not run the model.
    """
    model, feed = draw(operator, seed)
    onnx.save(model, path)
    expected = onnxruntime_results(path, feed)
    for output, value in zip(model.graph.output, expected, strict=True):
        # ONNX infers no types of functions.
        output.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(value.dtype)
    onnx.save(model, path)
    try:
        imported = import_onnx(path)
        actual = build(imported, best_target()).load().run(*(feed[spec.name] for spec in imported.inputs))
        message = next(filter(None, map(_first_difference, actual, expected)), "")
    except UnsupportedOperatorError as error:
        message = str(error) if "TVM" in str(error) else ""
    except Exception as error:
        message = f"{type(error).__name__}: {error}"[:500]
    if not message:
        return ""
    text = onnx.printer.to_text(model.graph)
    return f"{operator} {seed}: {message}\n{text}"


def _first_difference(actual: Array, expected: Array) -> str:
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return f"{actual.dtype}{list(actual.shape)}, expected {expected.dtype}{list(expected.shape)}"
    if actual.dtype.kind in "biu":
        bad = actual != expected
    else:
        largest = float(np.abs(expected[np.isfinite(expected)]).max(initial=0.0)) or 1.0
        tolerance = 1e-3 if actual.dtype == np.float16 else 1e-4
        bad = ~np.isclose(actual, expected, rtol=tolerance, atol=tolerance / 10 * largest, equal_nan=True)
    if not bad.any():
        return ""
    at = np.unravel_index(int(np.argmax(bad)), bad.shape)
    return f"{int(bad.sum())} of {bad.size} differ, at {at}: {actual[at]}, expected {expected[at]}"


def _work(operator: str, seed: int) -> str | None:
    """The difference of a case in a worker process; None where ONNX Runtime refuses it."""
    with tempfile.TemporaryDirectory(prefix="tvmflow-sweep-") as folder:
        try:
            return difference(operator, seed, Path(folder) / "model.onnx")
        except Refused:
            return None


def _silence() -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)


def failures(cases: Iterator[tuple[str, int]]) -> Iterator[str]:
    """Yield the failures of cases that run in a worker process, which is started anew where one ends it."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, context, initializer=_silence)
    try:
        for operator, seed in cases:
            try:
                message = pool.submit(_work, operator, seed).result(_TIMEOUT)
            except (BrokenProcessPool, TimeoutError) as error:
                message = f"{operator} {seed}: the process ends or hangs: {type(error).__name__}"
                for process in pool._processes.values():
                    process.kill()
                pool.shutdown()
                pool = ProcessPoolExecutor(1, context, initializer=_silence)
            if message:
                yield message
    finally:
        pool.shutdown(cancel_futures=True)


def test_drawn_nodes_equal_onnx_runtime(tmp_path: Path) -> None:
    names = list(DRAWS)
    for seed in range(4):
        operator = names[seed * 29 % len(names)]
        assert difference(operator, seed, tmp_path / "model.onnx") == ""


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_drawn_nodes_equal_onnx_runtime() -> None:
    cases = ((operator, seed) for seed in range(scale.count(normal=1, long=20)) for operator in DRAWS)
    messages = list(failures(cases))
    assert not messages, "\n".join(messages)


def main() -> int:
    """Draw one case again, or look for failures for the given seconds, of the operators that are named after them."""
    if sys.argv[1] in DRAWS:
        message = _work(sys.argv[1], int(sys.argv[2]))
        print("ONNX Runtime refuses it" if message is None else message or "equal")
        return int(bool(message))
    end, first = time.monotonic() + float(sys.argv[1]), int(time.time())
    count = 0

    def cases() -> Iterator[tuple[str, int]]:
        seed = first
        while True:
            for operator in sys.argv[2:] or DRAWS:
                if time.monotonic() > end:
                    return
                yield operator, seed
            seed += 1

    for message in failures(cases()):
        count += 1
        print(f"--- {message}", flush=True)
    print(f"{count} failed")
    return int(bool(count))


if __name__ == "__main__":
    sys.exit(main())
