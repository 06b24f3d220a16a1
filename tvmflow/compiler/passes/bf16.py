"""Computes products in bfloat16, for releases with that precision."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import tvm
from tvm import relax, te

from tvmflow.compiler import winograd
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.dotproduct import BF16, Widened, round_bf16
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import convolution, depthwise, dot
from tvmflow.compiler.operators.common import (
    call_kernel,
    called_operator,
    is_float32,
    same_shape,
    static,
    vector,
)
from tvmflow.compiler.operators.geometry import Geometry, is_depthwise
from tvmflow.compiler.operators.packing import (
    ConvolutionPacking,
    DepthwisePacking,
    GroupsPacking,
    MatrixPacking,
    NarrowWinogradPacking,
    WinogradPacking,
    pack_weights,
)
from tvmflow.compiler.operators.products import row_dimensions
from tvmflow.compiler.passes.narrow import ROUNDING, is_weighted, narrow_products

# Dot products of so few numbers save no time, and their operands, often coordinates whose sines follow, would lose
# small differences.
_SHALLOW = 4


@tvm.transform.module_pass(opt_level=0, name="RoundProducts")
class RoundProducts:
    """Rounds the operands of convolutions and matrix products to bfloat16, and computes these by dot products.

    Every reader of a rounded operand reads the bfloat16 value from memory. Depthwise convolutions round their input
    too, but compute in float32. A convolution by Winograd's algorithm, which `winograd` allows, computes in float32
    where rounding its transformed input would lose too much precision. Convolutions whose groups have an odd number of
    channels, or fill neither vectors nor an even part of one, layers whose results are sums of a few products, and all
    other operators, stay in float32. Blocks (`FuseBlocks`) and attention (`lower_attention`) have rounded their
    operands before this pass.
    """

    def __init__(self, machine: Machine, choices: Choices, winograd: bool) -> None:
        self._numbers = _BFloat16(machine, choices, winograd)

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with every Relax function rewritten."""
        return narrow_products(mod, self._numbers)


def round_operand(builder: relax.BlockBuilder, value: relax.Expr) -> relax.Expr:
    """Return an expression for a float32 tensor rounded to bfloat16, stored as uint16."""

    def compute(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *index: round_bf16(x[index]), name="round")

    return builder.call_te(compute, value, primfunc_name_hint="round", primfunc_attrs={ROUNDING: 1})


class _BFloat16:
    def __init__(self, machine: Machine, choices: Choices, winograd: bool) -> None:
        self._machine, self._choices, self._winograd = machine, choices, winograd

    def operands(self, call: relax.Call) -> list[relax.Expr]:
        if is_weighted(call):
            left, right = call.args
            if _is_shallow(call):
                return []
            if call.op.name == "relax.matmul" or is_depthwise(call):
                return [left]
            groups, (out_channels, depth) = int(call.attrs.groups), (int(dim) for dim in right.ty.shape.values[:2])
            if groups > 1 and depth % BF16.group:
                return []
            narrow = depthwise.is_narrow(out_channels, depth, groups, self._machine)
            return [left] if narrow or dot.lanes_of(out_channels, groups, self._machine) else []
        if called_operator(call) != "relax.matmul" or not is_float32(*call.args, call):
            return []
        left, right = call.args
        left_shape, right_shape = list(left.ty.shape.values), list(right.ty.shape.values)
        if len(left_shape) < 3 or len(left_shape) != len(right_shape) or not static(left_shape[-1]):
            return []
        return [left, right] if same_shape(left_shape[:-2], right_shape[:-2]) else []

    def conv2d(self, builder: relax.BlockBuilder, call: relax.Call, data: relax.Expr) -> relax.Expr:
        weight, machine, geometry = call.args[1], self._machine, Geometry.of(call)
        size_of_weight = [int(dim) for dim in weight.ty.shape.values]
        groups, channels, depth = int(call.attrs.groups), *size_of_weight[:2]
        if is_depthwise(call):
            packed_weight = pack_weights(builder, weight, DepthwisePacking(vector(groups, machine)))
            compute = _reading_bf16(depthwise.depthwise, geometry=geometry, machine=machine)
            return call_kernel(builder, compute, data, packed_weight, name="depthwise_conv2d")
        if depthwise.is_narrow(channels, depth, groups, machine):
            packed_weight = pack_weights(builder, weight, GroupsPacking(machine.lanes, pairs=True))
            compute = partial(depthwise.depthwise, geometry=geometry, machine=machine)
            return call_kernel(builder, compute, data, packed_weight, name="grouped_conv2d_bf16")
        size = None
        if self._winograd and BF16.name not in machine.amx:
            size = convolution.winograd_size(call.args[0], weight, groups, geometry, machine, dot=BF16)
        if size is not None:
            stride, lanes = geometry.strides[0], winograd.lanes_of(channels, groups, machine)
            narrow = winograd.takes_narrow(BF16, size, stride, depth)
            kind = NarrowWinogradPacking if narrow else WinogradPacking
            packed_weight = pack_weights(builder, weight, kind(size, lanes, stride, groups))
            compute = _reading_bf16(
                convolution.winograd_conv2d,
                dot=BF16 if narrow else None,
                channels=channels,
                geometry=geometry,
                machine=machine,
            )
            name = "winograd_conv2d_bf16" if narrow else "winograd_conv2d"
            return call_kernel(builder, compute, data, packed_weight, name=name)
        lanes, shape = dot.lanes_of(channels, groups, machine), call.args[0].ty.shape.values
        steps = dot.steps_of_conv2d(shape, size_of_weight, groups, geometry, lanes, BF16, machine)
        packed_weight = pack_weights(builder, weight, ConvolutionPacking.of_dot(channels, lanes, BF16, steps))
        compute = partial(
            dot.conv2d,
            dot=BF16,
            channels=channels,
            groups=groups,
            geometry=geometry,
            machine=machine,
            decisions=convolution.decisions_of_tiles(call, self._choices),
        )
        return call_kernel(builder, compute, data, packed_weight, name="conv2d_bf16")

    def matmul(self, builder: relax.BlockBuilder, call: relax.Call, operands: list[relax.Expr]) -> relax.Expr:
        if len(operands) == 2:
            left, right = operands
            compute = partial(dot.batch_matmul, batch=list(left.ty.shape.values)[:-2], machine=self._machine)
            return call_kernel(builder, compute, left, right, name="batch_matmul_bf16")
        (data,), weight = operands, call.args[1]
        units = int(weight.ty.shape.values[1])
        rows = row_dimensions(data.ty.shape.values[:-1])
        steps = dot.steps_of_dense(
            data.ty.shape.values, list(map(int, weight.ty.shape.values)), rows, BF16, self._machine
        )
        packing = MatrixPacking.of_dot(units, vector(units, self._machine), BF16, steps)
        packed_weight = pack_weights(builder, weight, packing)
        compute = partial(dot.dense, dot=BF16, units=units, rows=rows, machine=self._machine)
        return call_kernel(builder, compute, data, packed_weight, name="dense_bf16")

    def round(self, builder: relax.BlockBuilder, value: relax.Expr) -> relax.Expr:
        return round_operand(builder, value)

    def widen(self, builder: relax.BlockBuilder, value: relax.Expr) -> relax.Expr:
        def compute(x: te.Tensor) -> te.Tensor:
            return te.compute(x.shape, lambda *index: BF16.widen(x[index]), name="widen")

        return builder.call_te(compute, value, primfunc_name_hint="widen")


def _is_shallow(call: relax.Call) -> bool:
    """Whether each result of a dense layer, or of a convolution that is not depthwise, is the sum of a few products."""
    sizes = [int(dim) for dim in call.args[1].ty.shape.values]
    if call.op.name == "relax.matmul":
        return sizes[-2] <= _SHALLOW
    return not is_depthwise(call) and math.prod(sizes[1:]) <= _SHALLOW


def _reading_bf16(operator: Callable[..., te.Tensor], **arguments: Any) -> Callable[..., te.Tensor]:
    """Turn an operator on float32 into one on bfloat16."""

    def compute(data: te.Tensor, weight: te.Tensor) -> te.Tensor:
        return operator(Widened(data), weight, **arguments)

    return compute
