"""Computes products in float16, twice as many numbers in a vector, for releases with that precision."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import tvm
from tvm import relax, te

from tvmflow.compiler.choices import Choices, shape_text
from tvmflow.compiler.dotproduct import Widened
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import convolution, depthwise, dot, products
from tvmflow.compiler.operators.common import call_kernel, vector
from tvmflow.compiler.operators.geometry import Geometry, is_depthwise
from tvmflow.compiler.operators.packing import ConvolutionPacking, DepthwisePacking, MatrixPacking, pack_weights
from tvmflow.compiler.passes.narrow import is_weighted, narrow_products


@tvm.transform.module_pass(opt_level=0, name="HalveProducts")
class HalveProducts:
    """Rounds the operands of convolutions and dense layers to float16, and multiplies and adds up in float16.

    Every reader of a rounded operand reads the float16 value from memory. Depthwise convolutions round their input too,
    but compute in float32. Products of two activations, sums, norms, and convolutions whose groups fill no vector
    (`dot.lanes_of`) stay in float32.
    """

    def __init__(self, machine: Machine, choices: Choices) -> None:
        self._numbers = _Float16(machine, choices)

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with every Relax function rewritten."""
        return narrow_products(mod, self._numbers)


class Float16:
    """How float32 tensors become float16 ones and back, for classes of `passes.narrow.Numbers`."""

    def round(self, builder: relax.BlockBuilder, value: relax.Expr) -> relax.Expr:
        """Return an expression for a float32 tensor rounded to float16."""
        return builder.call_te(partial(cast, dtype="float16"), value, primfunc_name_hint="round")

    def widen(self, builder: relax.BlockBuilder, value: relax.Expr) -> relax.Expr:
        """Return a float32 expression for a float16 tensor."""
        return builder.call_te(partial(cast, dtype="float32"), value, primfunc_name_hint="widen")


class _Float16(Float16):
    def __init__(self, machine: Machine, choices: Choices) -> None:
        self._machine = machine
        self._choices = choices
        self._half = replace(machine, number=2)

    def operands(self, call: relax.Call) -> list[relax.Expr]:
        if not is_weighted(call):
            return []
        left, right = call.args
        if call.op.name == "relax.matmul" or is_depthwise(call):
            return [left]
        return [left] if dot.lanes_of(int(right.ty.shape.values[0]), int(call.attrs.groups), self._half) else []

    def conv2d(self, builder: relax.BlockBuilder, call: relax.Call, data: relax.Expr) -> relax.Expr:
        weight, groups, geometry = call.args[1], int(call.attrs.groups), Geometry.of(call)
        channels = int(weight.ty.shape.values[0])
        if is_depthwise(call):
            packed_weight = pack_weights(builder, weight, DepthwisePacking(vector(groups, self._machine)))
            filtered = partial(depthwise.depthwise, geometry=geometry, machine=self._machine)
            return call_kernel(builder, _reading(filtered), data, packed_weight, name="depthwise_conv2d")
        lanes = dot.lanes_of(channels, groups, self._half)
        packing = ConvolutionPacking(lanes, -(-channels // lanes), number="float16")
        decisions = self._choices.about(f"fp16 {convolution.subject_of(call)}")
        common: dict[str, Any] = {"channels": channels, "machine": self._half, "decisions": decisions}
        compute: Callable[..., te.Tensor]
        if groups == 1 and geometry.is_pointwise:
            compute = partial(convolution.pointwise_conv2d, **common)
        else:
            compute = partial(convolution.conv2d, groups=groups, geometry=geometry, **common)
        return self._call(builder, compute, data, pack_weights(builder, weight, packing), "conv2d_fp16")

    def matmul(self, builder: relax.BlockBuilder, call: relax.Call, operands: list[relax.Expr]) -> relax.Expr:
        (data,), weight = operands, call.args[1]
        units = int(weight.ty.shape.values[1])
        lanes = vector(units, self._half)
        packing = MatrixPacking(lanes, -(-units // lanes), number="float16")
        subject = f"fp16 matmul {shape_text(data.ty.shape.values)} by {shape_text(weight.ty.shape.values)}"
        decisions = self._choices.about(subject)
        compute = partial(products.dense, units=units, machine=self._half, decisions=decisions)
        return self._call(builder, compute, data, pack_weights(builder, weight, packing), "dense_fp16")

    def _call(
        self,
        builder: relax.BlockBuilder,
        operator: Callable[..., te.Tensor],
        data: relax.Expr,
        packed_weight: relax.Expr,
        name: str,
    ) -> relax.Expr:
        """Emit an operator on float16 whose result is float32."""

        def compute(data: te.Tensor, weight: te.Tensor) -> te.Tensor:
            return cast(operator(data, weight), "float32")

        return call_kernel(builder, compute, data, packed_weight, name=name)


def cast(x: te.Tensor, dtype: str) -> te.Tensor:
    """Convert the elements of a tensor to another type."""
    return te.compute(x.shape, lambda *index: x[index].astype(dtype), name="cast")


def _reading(operator: Callable[..., te.Tensor]) -> Callable[..., te.Tensor]:
    """Turn an operator on float32 into one on float16."""
    return lambda data, weight: operator(Widened(data, lambda value: value.astype("float32")), weight)
