"""The passes that rewrite products of a model for a GPU."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvmflow.arrays import Array
from tvmflow.compiler.gpu import definitions
from tvmflow.compiler.gpu.tiling import Gpu
from tvmflow.compiler.operators.attention import ZERO_FOR_NAN, ZERO_WITHOUT_KEYS
from tvmflow.compiler.operators.common import (
    Legalization,
    called_operator,
    default,
    is_float32,
    numbers_of,
    or_default,
    reduced_axes,
    same_shape,
    static,
)
from tvmflow.compiler.operators.elementwise import LOGICAL, legalize_logical
from tvmflow.compiler.operators.geometry import has_constant_weights, is_depthwise
from tvmflow.compiler.operators.indices import legalize_clamped
from tvmflow.compiler.passes import attention
from tvmflow.compiler.passes.attention import View, bases_of, view_of
from tvmflow.compiler.passes.fp16 import Float16, cast
from tvmflow.compiler.passes.narrow import ROUNDING, is_weighted, narrow_products
from tvmflow.compiler.passes.rewrite import Rewriter, rewriting

# The fewest output channels of a group for which tensor cores are worth while: their tiles have at least 16.
_FEWEST_UNITS = 8
# The most channels of a head of attention whose sums fit the registers.
_MOST_CHANNELS = 128


@tvm.transform.module_pass(opt_level=0, name="UseTensorCores")
class UseTensorCores:
    """Rounds the operands of convolutions and matrix products to float16, and multiplies them on tensor cores.

    Products are added up in float32. Every reader of a rounded operand reads the float16 value from memory. Depthwise
    convolutions, convolutions with few channels in a group, products of a vector, and products whose leading
    dimensions differ stay in float32.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._numbers = _Float16(gpu)

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with every Relax function rewritten."""
        return narrow_products(mod, self._numbers)


def lower_attention(gpu: Gpu) -> tvm.transform.Pass:
    """Return the pass that lowers float32 attention to kernels that round its operands to float16.

    Other attention is written as products, a mask and a softmax. The pass runs before `UseTensorCores`, which lets all
    readers of an operand share its rounding.
    """

    def lower(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
        if not attention.is_plain(call):
            return None
        builder, masks, attrs = rewriter.builder_, list(call.args[3:]), call.attrs
        zero_for_nan, zero_without_keys = (attrs.causal_mask == item for item in (ZERO_FOR_NAN, ZERO_WITHOUT_KEYS))
        if _is_kernel(call) and not zero_without_keys:
            views = _views(rewriter, call.args[:3])
            bases, numbers = bases_of(rewriter, views)
            rounded = [rewriter.emit(_round(builder, base)) for base in bases]
            shape, keys, mask = call.ty.shape.values, call.args[1].ty.shape.values[1], masks[0] if masks else None
            return definitions.attend(
                builder, rounded, numbers, views, shape, keys, mask, float(attrs.scale), zero_for_nan, gpu
            )
        query, key, value = (
            rewriter.emit(relax.op.permute_dims(operand, axes))
            for operand, axes in zip(call.args[:3], ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True)
        )
        scaled = rewriter.emit(relax.op.multiply(query, relax.const(float(attrs.scale), "float32")))
        scores = rewriter.emit(relax.op.matmul(scaled, key))
        for mask in masks:
            scores = rewriter.emit(relax.op.add(scores, mask))
        weights = rewriter.emit(relax.op.nn.softmax(scores, axis=-1))
        if zero_for_nan:
            zeros = relax.const(0.0, "float32")
            weights = rewriter.emit(relax.op.where(rewriter.emit(relax.op.isnan(weights)), zeros, weights))
        if zero_without_keys:
            largest = rewriter.emit(relax.op.max(scores, [-1], keepdims=True))
            is_empty = rewriter.emit(relax.op.equal(largest, relax.const(-math.inf, "float32")))
            weights = rewriter.emit(relax.op.where(is_empty, relax.const(0.0, "float32"), weights))
        return relax.op.permute_dims(rewriter.emit(relax.op.matmul(weights, value)), [0, 2, 1, 3])

    return rewriting("LowerAttentionForGpu", dict.fromkeys(("nn.attention", "nn.attention_bias"), (lower,)))


def _views(rewriter: Rewriter, operands: Sequence[relax.Expr]) -> list[View]:
    """The tensors behind transposes, slices and reshapes that the kernel can read instead of the operands.

    Dense layers of one tensor become one, of which each operand is a slice.
    """
    layers = [_layer(rewriter, operand) for operand in operands]
    # Of three operands, two or three can be of one tensor.
    groups = [
        [item for item in layers if item is not None and layer.joins(rewriter, item)] for layer in layers if layer
    ]
    together = max(groups, key=len, default=[])
    joint = _join(rewriter, together) if len(together) > 1 else None
    views: list[View] = []
    for operand, layer in zip(operands, layers, strict=True):
        place = next((i for i, item in enumerate(together) if item is layer), None)
        if joint is not None and place is not None:
            views.append(View(joint, ((0, 1, 0), (1, 1, 0), (None, 1, place), (2, 1, 0), (3, 1, 0))))
            continue
        view = view_of(rewriter, operand)
        views.append(view if _has_whole_chunks(view) else View(operand, tuple((dim, 1, 0) for dim in range(4))))
    return views


def _join(rewriter: Rewriter, layers: "Sequence[_Layer]") -> relax.Expr:
    """The results of dense layers of one tensor as one: `[batch, positions, layer, heads, channels]`."""
    first = layers[0]
    value = rewriter.emit(relax.op.matmul(first.data, relax.const(np.concatenate([item.weight for item in layers], 1))))
    biases = [item.bias for item in layers if item.bias is not None]
    if biases:
        value = rewriter.emit(relax.op.add(value, relax.const(np.concatenate(biases))))
    return rewriter.emit(relax.op.reshape(value, [*first.shape[:2], len(layers), *first.shape[2:]]))


def _has_whole_chunks(view: View) -> bool:
    """Whether the channels of a head lie together, at places that are multiples of 8 numbers."""
    *others, (dim, step, start) = view.places
    shape = view.base.ty.shape.values
    return (
        (dim, step) == (3, 1)
        and start % 8 == 0
        and (static(shape[-1]) or 1) % 8 == 0
        and {0, 1, 2} >= {dim for dim, _, _ in others if dim is not None}
        and 1 in {dim for dim, _, _ in others}
    )


@dataclass(frozen=True)
class _Layer:
    """A dense layer whose result is reshaped to heads: `data` by `weight`, and `bias` if there is one."""

    data: relax.Expr
    weight: Array
    bias: Array | None
    shape: tuple[Any, ...]

    def joins(self, rewriter: Rewriter, other: "_Layer") -> bool:
        """Whether two layers can be one."""
        return (
            rewriter.same(self.data, other.data)
            and self.weight.shape == other.weight.shape
            and (self.bias is None) == (other.bias is None)
            and same_shape(self.shape, other.shape)
        )


def _layer(rewriter: Rewriter, operand: relax.Expr) -> _Layer | None:
    """The dense layer that computes an operand of attention and nothing else; None for other operands."""
    heads = rewriter.call(operand, "reshape")
    value, bias = None if heads is None else heads.args[0], None
    added = None if value is None else rewriter.call(value, "add")
    if added is not None:
        bias = next((item for item in map(rewriter.constant, added.args) if item is not None), None)
        value = next((item for item in added.args if rewriter.constant(item) is None), None)
    product = None if value is None else rewriter.call(value, "matmul")
    if heads is None or product is None or not is_weighted(product) or (added is not None and bias is None):
        return None
    weight = numbers_of(product.args[1])
    if bias is not None and (bias.size != weight.shape[1] or bias.shape[-1] != bias.size):
        return None
    shape = tuple(heads.ty.shape.values)
    return _Layer(product.args[0], weight, None if bias is None else bias.reshape(-1), shape)


def _is_kernel(call: relax.Call) -> bool:
    """Whether the kernel can compute the attention of a call: heads of few channels, whole chunks of them."""
    channels = {static(operand.ty.shape.values[-1]) or 0 for operand in call.args[:3]}
    return (
        is_float32(*call.args)
        and len(channels) == 1
        and all(item % 8 == 0 and 0 < item <= _MOST_CHANNELS for item in channels)
    )


def _round(builder: relax.BlockBuilder, value: relax.Expr) -> relax.Expr:
    """Return an expression for a float32 tensor rounded to float16."""
    attributes = {ROUNDING: 1}
    return builder.call_te(partial(cast, dtype="float16"), value, primfunc_name_hint="round", primfunc_attrs=attributes)


class _Float16(Float16):
    """Numbers of 16 bits on tensor cores (`passes.narrow.Numbers`)."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def operands(self, call: relax.Call) -> list[relax.Expr]:
        if called_operator(call) == "relax.nn.conv2d":
            return [call.args[0]] if _is_wide_convolution(call) else []
        if is_weighted(call):
            return [call.args[0]]
        return list(call.args) if _is_batch_of_products(call) else []

    def conv2d(self, builder: relax.BlockBuilder, call: relax.Call, data: relax.Expr) -> relax.Expr:
        return definitions.convolve(builder, call, data, self._gpu, "float16", "conv2d_fp16")

    def matmul(self, builder: relax.BlockBuilder, call: relax.Call, operands: list[relax.Expr]) -> relax.Expr:
        if len(operands) == 1:
            weight = numbers_of(call.args[1])
            return definitions.multiply_weights(builder, operands[0], weight, self._gpu, "float16", "dense_fp16")
        left, right = operands
        return definitions.multiply(builder, left, right, self._gpu, "float16", "matmul_fp16")


def legalizations(gpu: Gpu) -> dict[str, Legalization]:
    """Return the definitions of float32 products and of indices, by the operator's name, for `LegalizeOps`."""

    def conv2d(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if not has_constant_weights(call) or not is_float32(call):
            return default(builder, call)
        if not _is_wide_convolution(call):
            return definitions.slide(builder, call, "conv2d")
        return definitions.convolve(builder, call, call.args[0], gpu, "float32", "conv2d")

    def extreme(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        is_known = isinstance(call.args[0].ty.shape, relax.ShapeExpr) and call.args[0].ty.ndim > 0
        if not is_known or str(call.ty.dtype) not in ("float32", "float16") or not reduced_axes(call):
            return default(builder, call)
        return definitions.extreme(builder, call, is_maximum=called_operator(call) == "relax.max")

    def matmul(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        left, right = call.args
        if is_weighted(call):
            return definitions.multiply_weights(builder, left, numbers_of(right), gpu, "float32", "dense")
        if _is_batch_of_products(call):
            return definitions.multiply(builder, left, right, gpu, "float32", "matmul")
        return default(builder, call)

    return {
        "relax.nn.conv2d": conv2d,
        "relax.matmul": matmul,
        **{f"relax.{name}": or_default(partial(legalize_logical, name=name)) for name in LOGICAL},
        "relax.max": extreme,
        "relax.min": extreme,
        "tvmflow.indices": legalize_clamped,
    }


def _is_wide_convolution(call: relax.Call) -> bool:
    if not has_constant_weights(call) or is_depthwise(call):
        return False
    units = int(call.args[1].ty.shape.values[0]) // int(call.attrs.groups)
    return int(call.attrs.groups) == 1 or units >= _FEWEST_UNITS


def _is_batch_of_products(call: relax.Call) -> bool:
    """Whether a call multiplies two batches of float32 matrices, with equal leading dimensions."""
    if called_operator(call) != "relax.matmul" or not is_float32(*call.args):
        return False
    left, right = (list(argument.ty.shape.values) for argument in call.args)
    return len(left) == len(right) >= 2 and same_shape(left[:-2], right[:-2]) and str(call.ty.dtype) == "float32"
