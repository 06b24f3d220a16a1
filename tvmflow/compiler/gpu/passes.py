"""The passes that rewrite products of a model for a GPU."""

from functools import partial

import tvm
from tvm import relax, te

from tvmflow.compiler.gpu import definitions
from tvmflow.compiler.gpu.tiling import Gpu
from tvmflow.compiler.operators.common import Legalization, called_operator, default, is_float32, same_shape
from tvmflow.compiler.operators.geometry import has_constant_weights, is_depthwise
from tvmflow.compiler.passes.narrow import is_weighted, narrow_products

# The fewest output channels of a group for which tensor cores are worth while: their tiles have at least 16.
_FEWEST_UNITS = 8


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


class _Float16:
    """Numbers of 16 bits on tensor cores (`passes.narrow.Numbers`)."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def operands(self, call: relax.Call) -> list[relax.Expr]:
        if called_operator(call) == "relax.nn.conv2d":
            return [call.args[0]] if _is_wide_convolution(call) else []
        if is_weighted(call):
            return [call.args[0]]
        return list(call.args) if is_batch_of_products(call) else []

    def conv2d(self, builder: relax.BlockBuilder, call: relax.Call, data: relax.Expr) -> relax.Expr:
        return definitions.convolve(builder, call, data, self._gpu, "float16", "conv2d_fp16")

    def matmul(self, builder: relax.BlockBuilder, call: relax.Call, operands: list[relax.Expr]) -> relax.Expr:
        if len(operands) == 1:
            weight = call.args[1].value.numpy()
            return definitions.multiply_weights(builder, operands[0], weight, self._gpu, "float16", "dense_fp16")
        left, right = operands
        return definitions.multiply(builder, left, right, self._gpu, "float16", "matmul_fp16")

    def round(self, builder: relax.BlockBuilder, value: relax.Expr) -> relax.Expr:
        return builder.call_te(partial(_cast, dtype="float16"), value, primfunc_name_hint="round")

    def widen(self, builder: relax.BlockBuilder, value: relax.Expr) -> relax.Expr:
        return builder.call_te(partial(_cast, dtype="float32"), value, primfunc_name_hint="widen")


def legalizations(gpu: Gpu) -> dict[str, Legalization]:
    """Return the definitions of the float32 products of a model, by the operator's name, for `LegalizeOps`."""

    def conv2d(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if not _is_wide_convolution(call):
            return default(builder, call)
        return definitions.convolve(builder, call, call.args[0], gpu, "float32", "conv2d")

    def matmul(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        left, right = call.args
        if is_weighted(call):
            return definitions.multiply_weights(builder, left, right.value.numpy(), gpu, "float32", "dense")
        if is_batch_of_products(call):
            return definitions.multiply(builder, left, right, gpu, "float32", "matmul")
        return default(builder, call)

    return {"relax.nn.conv2d": conv2d, "relax.matmul": matmul}


def _is_wide_convolution(call: relax.Call) -> bool:
    if not has_constant_weights(call) or is_depthwise(call):
        return False
    units = int(call.args[1].ty.shape.values[0]) // int(call.attrs.groups)
    return int(call.attrs.groups) == 1 or units >= _FEWEST_UNITS


def is_batch_of_products(call: relax.Call) -> bool:
    """Whether a call multiplies two batches of float32 matrices, with equal leading dimensions."""
    if called_operator(call) != "relax.matmul" or not is_float32(*call.args):
        return False
    left, right = (list(argument.ty.shape.values) for argument in call.args)
    return len(left) == len(right) >= 2 and same_shape(left[:-2], right[:-2]) and str(call.ty.dtype) == "float32"


def _cast(x: te.Tensor, dtype: str) -> te.Tensor:
    return te.compute(x.shape, lambda *index: x[index].astype(dtype), name="cast")
