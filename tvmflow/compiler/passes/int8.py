"""Computes the convolutions and dense layers of quantised models in integers.

A model is quantised in one of two forms: layers between pairs of operators (QDQ), DequantizeLinear before a layer and
QuantizeLinear after it, or operators with integer operands, such as ConvInteger. Sums of integers are exact, so both
compute in integers in every precision where the target has dot products for them (`dotproduct.integer_dot`). Without
these, layers between pairs of operators compute in float32.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import relax, te
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.arrays import Array
from tvmflow.compiler import winograd
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.dotproduct import INT8, PAIRS, Dot
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import convolution, depthwise, dot, free_reductions, products, reductions
from tvmflow.compiler.operators.common import call_kernel, called_operator, constant, numbers_of, static, vector
from tvmflow.compiler.operators.geometry import Geometry, is_channels_last, is_depthwise
from tvmflow.compiler.operators.packing import (
    ConvolutionPacking,
    DepthwisePacking,
    IntegerWinogradPacking,
    MatrixPacking,
    WideningPacking,
    pack_weights,
)
from tvmflow.compiler.operators.products import row_dimensions
from tvmflow.compiler.passes.dimensions import ordinary_kernel
from tvmflow.compiler.passes.functions import relax_functions, rewrite_functions
from tvmflow.errors import BuildError

# The difference between unsigned 8-bit integers and the signed ones that they replace.
_SHIFT = 128
# The largest difference between an 8-bit integer and its zero point.
_LARGEST = 255
# Operators that move or select numbers: integers give the same result as the numbers that they represent.
_RESHAPING = ("relax.reshape", "relax.permute_dims", "relax.squeeze", "relax.expand_dims")
_MOVING = ("relax.nn.max_pool2d", *_RESHAPING)
# The layers that integers could compute in some form, by the names that ONNX gives them.
_LAYERS = {
    **{f"relax.nn.conv{count}d": "Conv" for count in (1, 2, 3)},
    **{f"relax.nn.conv{count}d_transpose": "ConvTranspose" for count in (1, 2, 3)},
    "relax.matmul": "MatMul or Gemm",
}


@tvm.transform.module_pass(opt_level=0, name="IntegerArithmetic")
class IntegerArithmetic:
    """Turns convolutions and dense layers of dequantised operands into int32 layers, whose results are scaled.

    The integer operands are centred (their zero point is subtracted), so that padding is zero. They are made from
    unsigned 8-bit integers; signed ones are shifted by 128 first. Quantisation itself becomes element-wise operators.
    A model without such a layer raises BuildError where one `is_required`, and is left unchanged elsewhere.
    """

    def __init__(self, machine: Machine, dot: Dot, is_required: bool) -> None:
        self._machine = machine
        self._dot = dot
        self._is_required = is_required

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with every Relax function rewritten.

        A module without such layers raises BuildError where they are required, and else is returned unchanged.
        """
        layers = 0
        rewriter = _ToIntegers(mod, self._machine, self._dot)
        for variable, function in relax_functions(mod).items():
            rewriter.values = relax.analysis.get_var2val(function)
            rewriter.builder_.update_func(variable, rewriter.visit_expr(function))
            layers += rewriter.layers
        if not layers and not self._is_required:
            return mod
        if not layers:
            raise BuildError(_explain_no_layers(mod))
        return rewriter.builder_.get()


def _explain_no_layers(mod: tvm.IRModule) -> str:
    """Return why integers compute no layer of a module, and what to do."""
    calls: list[relax.Call] = []
    for function in relax_functions(mod).values():
        calls += [value for value in relax.analysis.get_var2val(function).values() if called_operator(value)]
    layers = sorted({_LAYERS[name] for name in map(called_operator, calls) if name in _LAYERS})
    if not layers or not any(call.op.name == "relax.dequantize" and _is_narrow(call.args[0]) for call in calls):
        return (
            "precision int8 needs a quantised model, with 8-bit weights in convolutions or dense layers; make one "
            "with onnxruntime.quantization.quantize_static or quantize_dynamic"
        )
    return (
        f"precision int8 computes no {' or '.join(layers)} of this quantised model in integers: build it with "
        "precision fp32, or quantise these layers with one scale for the input, constant 8-bit weights with at most "
        "one scale for each output channel, and groups of a multiple of 4 channels"
    )


@mutator
class _ToIntegers(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule, machine: Machine, dot: Dot) -> None:
        super().__init__(mod)
        self.values: Mapping[relax.Var, relax.Expr] = {}
        self.layers = 0
        self.machine = machine
        self.dot = dot
        # The unsigned integers that replace signed ones, by the variable of the signed ones.
        self._unsigned: dict[relax.Var, relax.Var] = {}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        super().visit_var_binding_(binding)
        if str(getattr(binding.var.ty, "dtype", "")) != "int8":
            return
        unsigned = self._quantize_unsigned(binding.value)
        if unsigned is None:
            unsigned = self._concatenate_unsigned(binding.value)
        if unsigned is not None:
            self._unsigned[binding.var] = unsigned

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        rewrite = _REWRITES.get(called_operator(op))
        replacement = rewrite(self, op) if rewrite else None
        return super().visit_call_(op) if replacement is None else replacement

    def emit(self, expr: relax.Expr) -> relax.Var:
        return self.builder_.emit(expr)

    def call(self, expr: relax.Expr, *names: str) -> relax.Call | None:
        """Return the call that `expr` is, or is bound to, if its operator has one of these names; None for others."""
        value = self.values.get(expr, expr) if isinstance(expr, relax.Var) else expr
        return value if called_operator(value) in names else None

    def value(self, expr: relax.Expr) -> Array | None:
        """Return the value of a constant, or of a variable bound to one; None for other expressions."""
        value = self.values.get(expr, expr) if isinstance(expr, relax.Var) else expr
        return np.asarray(numbers_of(value)) if isinstance(value, tvm.ir.GenericConst) else None

    def scalars(self, call: relax.Call) -> tuple[float, int] | None:
        """Return the scale and the zero point of an operator that quantises or dequantises all numbers alike.

        None where they are not constant, where there are several, or where the scale is not float32.
        """
        scale, zero = self.value(call.args[1]), self.value(call.args[2])
        if scale is None or zero is None or scale.size != 1 or zero.size != 1 or scale.dtype != np.float32:
            return None
        return float(scale.reshape(-1)[0]), int(zero.reshape(-1)[0])

    def integers(self, expr: relax.Expr) -> tuple[relax.Var, float, int] | None:
        """Return the unsigned integers that `expr` dequantises, with their scale and zero point.

        Signed integers are shifted first. Between the two may be operators that order the numbers anew, and products
        with one constant, as of Gemm's alpha. None where `expr` dequantises no variable of 8-bit integers by one
        constant scale and zero point.
        """
        step = self.call(expr, *_RESHAPING, "relax.multiply")
        if step is not None:
            return self._changed(step)
        call = self.call(expr, "relax.dequantize")
        scalars = self.scalars(call) if call is not None else None
        if call is None or scalars is None or not isinstance(call.args[0], relax.Var):
            return None
        source, (scale, zero) = call.args[0], scalars
        dtype = str(source.ty.dtype)
        if dtype == "uint8":
            return self.visit_expr(source), scale, zero
        if dtype != "int8":
            return None
        if source in self._unsigned:
            return self._unsigned[source], scale, zero + _SHIFT
        wide = self.emit(relax.op.astype(self.visit_expr(source), "int32"))
        wide = self.emit(relax.op.add(wide, relax.const(_SHIFT, "int32")))
        return self.emit(relax.op.astype(wide, "uint8")), scale, zero + _SHIFT

    def _changed(self, step: relax.Call) -> tuple[relax.Var, float, int] | None:
        """Return the `integers` of a call that orders numbers anew or multiplies them by a constant."""
        source = self.integers(step.args[0])
        if source is None:
            return None
        integers, scale, zero = source
        if step.op.name != "relax.multiply":
            return self.moved(step, integers), scale, zero
        factor = self.value(step.args[1])
        if factor is None or factor.size != 1 or factor.ndim > step.args[0].ty.ndim:
            return None
        product = float(np.float32(scale) * np.float32(factor.reshape(())))
        return (integers, product, zero) if np.isfinite(product) else None

    def moved(self, call: relax.Call, integers: relax.Var) -> relax.Var:
        """Emit an operator of `_MOVING` on the integers instead of the numbers that they represent."""
        rest = [self.visit_expr(arg) for arg in call.args[1:]]
        return self.emit(relax.Call(call.op, [integers, *rest], call.attrs, call.ty_args))

    def weights(self, expr: relax.Expr) -> tuple[Array, Array] | None:
        """Return the centred integers of a dequantised constant, perhaps transposed, and their scales.

        The scales have a shape that broadcasts against the integers. None for other expressions.
        """
        call = self.call(expr, "relax.dequantize", "relax.permute_dims")
        if call is None:
            return None
        if call.op.name == "relax.permute_dims":
            weights = self.weights(call.args[0])
            axes = None if call.attrs.axes is None else [int(axis) for axis in call.attrs.axes]
            return None if weights is None else (np.transpose(weights[0], axes), np.transpose(weights[1], axes))
        value, scale, zero = (self.value(arg) for arg in call.args)
        if value is None or scale is None or zero is None or scale.dtype != np.float32:
            return None
        shape = [1] * value.ndim
        if max(scale.size, zero.size) > 1:
            shape[int(call.attrs.axis) % value.ndim] = -1
        return value.astype("int64") - zero.reshape(shape), scale.reshape(shape)

    def _quantize_unsigned(self, expr: relax.Expr) -> relax.Var | None:
        """Emit the unsigned integers that replace the signed ones of a quantisation; None for other expressions."""
        call = self.call(expr, "relax.quantize")
        scalars = self.scalars(call) if call is not None else None
        if call is None or scalars is None or not _is_float32(call.args[0]):
            return None
        integers = _move_integers(self, call)
        if integers is not None:
            return integers
        return quantise(self, call.args[0], scalars[0], scalars[1] + _SHIFT)

    def _concatenate_unsigned(self, expr: relax.Expr) -> relax.Var | None:
        """Emit the concatenation of the unsigned integers that replace its parts; None for other expressions."""
        call = self.call(expr, "relax.concat")
        parts = None if call is None else self.values.get(call.args[0], call.args[0])
        if (
            call is None
            or not isinstance(parts, relax.Tuple)
            or not all(part in self._unsigned for part in parts.fields)
        ):
            return None
        return self.emit(relax.op.concat([self._unsigned[part] for part in parts.fields], call.attrs.axis))


def quantise(rewriter: _ToIntegers, expr: relax.Expr, scale: float, zero: int) -> relax.Var:
    """Emit the quantisation of a float32 expression to uint8, and return the variable.

    An element x becomes round(x / scale) + zero, clamped to 0 to 255; ties are rounded to even.
    """
    parameters = [relax.const(np.float32(scale)), relax.const(np.uint8(zero))]
    return rewriter.emit(relax.op.quantize(rewriter.visit_expr(expr), *parameters, axis=0, out_dtype="uint8"))


def _quantize(rewriter: _ToIntegers, call: relax.Call) -> relax.Expr | None:
    scalars, dtype = rewriter.scalars(call), str(call.ty.dtype)
    if scalars is None or not _is_float32(call.args[0]) or dtype not in ("uint8", "int8"):
        return None
    if dtype == "uint8":
        integers = _move_integers(rewriter, call)
        return quantise(rewriter, call.args[0], *scalars) if integers is None else integers
    return None


def _move_integers(rewriter: _ToIntegers, call: relax.Call) -> relax.Var | None:
    """Move the integers themselves where numbers are dequantised, moved and quantised again with the same scale."""
    moving = rewriter.call(call.args[0], *_MOVING)
    source = rewriter.integers(moving.args[0]) if moving is not None else None
    scalars = rewriter.scalars(call)
    if moving is None or source is None or scalars is None:
        return None
    integers, scale, zero = source
    shift = _SHIFT if str(call.ty.dtype) == "int8" else 0
    if (scale, zero) != (scalars[0], scalars[1] + shift):
        return None
    return rewriter.moved(moving, integers)


def _dequantize(rewriter: _ToIntegers, call: relax.Call) -> relax.Expr | None:
    if str(call.ty.dtype) != "float32":
        return None
    weights = rewriter.weights(call)
    if weights is not None:
        return constant((weights[0] * weights[1].astype("float64")).astype("float32"))
    data = rewriter.integers(call)
    if data is None:
        return None
    integers, scale, zero = data
    wide = rewriter.emit(relax.op.astype(integers, "float32"))
    difference = rewriter.emit(relax.op.subtract(wide, relax.const(np.float32(zero))))
    return relax.op.multiply(difference, relax.const(np.float32(scale)))


def _convolution(rewriter: _ToIntegers, call: relax.Call, channel: int) -> relax.Expr | None:
    """Compute a convolution in integers; output channels are dimension `channel` of its weights.

    One of one dimension becomes one over images of height one.
    """
    if str(call.ty.dtype) == "int32":
        rewriter.layers += 1
        return None
    attrs, weights = call.attrs, rewriter.weights(call.args[1])
    if attrs.data_layout not in ("NCHW", "NCW") or weights is None:
        return None
    weight, scales = weights
    groups, is_line = int(attrs.groups), weight.ndim == 3
    if scales.size not in (1, scales.shape[channel]):
        return None
    if is_line:
        weight = weight[:, :, None]
    kernel = ordinary_kernel(weight, groups) if channel else weight
    is_depthwise = kernel.shape[1] == 1 and groups == len(kernel) > 1
    if not is_depthwise and not _is_dot(kernel, groups, rewriter.machine, rewriter.dot):
        return None
    data = rewriter.integers(call.args[0])
    if data is None or static(data[0].ty.shape.values[1]) is None:
        return None
    rewriter.layers += 1
    integers, scale, zero = data
    lists = (attrs.strides, attrs.padding, attrs.dilation)
    strides, padding, dilation = ([int(size) for size in item] for item in lists)
    if is_line:
        integers = rewriter.emit(relax.op.expand_dims(integers, 2))
        strides, padding, dilation = [1, *strides], [0, padding[0], 0, padding[1]], [1, *dilation]
    operands = _centred(rewriter, integers, zero), constant(weight.astype("int32"))
    shared = {"groups": groups, "out_dtype": "int32"}
    if channel:
        more = [int(size) for size in attrs.output_padding]
        product = relax.op.nn.conv2d_transpose(
            *operands, strides, padding, [0, *more] if is_line else more, dilation, **shared
        )
        # The groups share the scales of their channels.
        scales = np.tile(scales.reshape(-1), groups) if scales.size > 1 else scales
    else:
        product = relax.op.nn.conv2d(*operands, strides, padding, dilation, **shared)
    wide = rewriter.emit(relax.op.astype(rewriter.emit(product), "float32"))
    factors = (scales * np.float32(scale)).astype("float32").reshape(1, -1, 1, 1)
    result = relax.op.multiply(wide, constant(factors))
    return relax.op.squeeze(rewriter.emit(result), [2]) if is_line else result


def _matmul(rewriter: _ToIntegers, call: relax.Call) -> relax.Expr | None:
    if str(call.ty.dtype) == "int32":
        rewriter.layers += 1
        return None
    weights = rewriter.weights(call.args[1])
    if weights is None or weights[0].ndim != 2 or weights[1].size not in (1, weights[1].shape[1]):
        return None
    weight, scales = weights
    data = rewriter.integers(call.args[0]) if _offsets(weight.T, rewriter.dot) is not None else None
    if data is None or data[0].ty.ndim < 2:
        return None
    rewriter.layers += 1
    centred = _centred(rewriter, data[0], data[2])
    product = rewriter.emit(relax.op.matmul(centred, constant(weight.astype("int32")), out_dtype="int32"))
    wide = rewriter.emit(relax.op.astype(product, "float32"))
    return relax.op.multiply(wide, constant((scales * np.float32(data[1])).astype("float32").reshape(-1)))


def _centred(rewriter: _ToIntegers, integers: relax.Var, zero: int) -> relax.Var:
    wide = rewriter.emit(relax.op.astype(integers, "int32"))
    return rewriter.emit(relax.op.subtract(wide, relax.const(zero, "int32")))


def _is_dot(weight: Array, groups: int, machine: Machine, unit: Dot) -> bool:
    """Whether a convolution's weights, OIHW, are computed by dot products."""
    offsets = _offsets(weight, unit)
    if groups == 1 or offsets is None:
        return offsets is not None
    if weight.shape[1] % unit.group or not dot.lanes_of(weight.shape[0], groups, machine):
        return False
    return not bool(offsets.any())


def _offsets(weight: Array, unit: Dot) -> Array | None:
    """Return what each output channel's weights must be reduced by to fit `unit.weight`, zero if they fit.

    Weights of uint8 less their zero point may not fit 8 bits. None where a channel spans more bits, or its products
    could overflow an accumulator. Output channels come first.
    """
    rows = weight.reshape(len(weight), -1)
    if not rows.size or rows.shape[1] * _LARGEST * int(np.abs(rows).max()) >= 2**31:
        return None
    limits = np.iinfo(unit.weight)
    least, greatest = rows.min(axis=1), rows.max(axis=1)
    offsets = np.maximum(greatest - limits.max, 0) + np.minimum(least - limits.min, 0)
    return offsets if bool((greatest - least <= limits.max - limits.min).all()) else None


def _is_float32(expr: relax.Expr) -> bool:
    return str(expr.ty.dtype) == "float32"


def _is_narrow(expr: relax.Expr) -> bool:
    return str(expr.ty.dtype) in ("uint8", "int8")


_REWRITES: dict[str, Callable[[_ToIntegers, relax.Call], relax.Expr | None]] = {
    "relax.quantize": _quantize,
    "relax.dequantize": _dequantize,
    "relax.nn.conv1d": partial(_convolution, channel=0),
    "relax.nn.conv2d": partial(_convolution, channel=0),
    "relax.nn.conv1d_transpose": partial(_convolution, channel=1),
    "relax.nn.conv2d_transpose": partial(_convolution, channel=1),
    "relax.matmul": _matmul,
}


@tvm.transform.module_pass(opt_level=0, name="IntegerProducts")
class IntegerProducts:
    """Lowers int32 layers of centred integers to the dot products `unit`, once the layout is known.

    Dot products of 8 bits read integers that are not centred; the part of the sum that is due to the zero point is
    subtracted afterwards. Those of 16 bits read the centred ones. They compute by Winograd's algorithm where `fast`
    allows it and the cost model prefers it: its sums are exact too. Depthwise convolutions compute the same integers in
    float32, which holds them exactly. Other layers without dot products also compute in float32, by exact algorithms,
    if it holds their sums exactly. `unit` is None for a target without dot products. Sums of 8-bit integers over the
    last dimensions widen these on the way.
    """

    def __init__(self, machine: Machine, choices: Choices, unit: Dot | None, fast: bool) -> None:
        self._machine = machine
        self._choices = choices
        self._unit = unit
        self._fast = fast

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with every Relax function rewritten."""
        return rewrite_functions(_LowerIntegers(mod, self._machine, self._choices, self._unit, self._fast), mod)


@mutator
class _LowerIntegers(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule, machine: Machine, choices: Choices, unit: Dot | None, fast: bool) -> None:
        super().__init__(mod)
        self._machine = machine
        self._choices = choices
        self._unit = unit
        self._fast = fast
        # The operands of dot products and their zero points, by the 8-bit integers that they were made of, and theirs.
        self._operands: dict[tuple[relax.Var, int | relax.Expr], tuple[relax.Expr, relax.Expr]] = {}

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        call = super().visit_call_(op)
        if called_operator(call) == "relax.sum":
            return self._sum_of_bytes(call)
        lower = {"relax.nn.conv2d": self._conv2d, "relax.matmul": self._matmul}.get(called_operator(call))
        if lower is None or str(call.args[1].ty.dtype) != "int32":
            return call
        if not isinstance(call.args[1], tvm.ir.GenericConst):
            return self._product_of_computed(call)
        source = self._source(call.args[0])
        if source is None:
            return call
        result = None if self._unit is None else lower(call, *source, self._unit)
        return self._in_float32(call) if result is None else result

    def _sum_of_bytes(self, call: relax.Call) -> relax.Expr:
        """Return a sum over the last dimensions that widens 8-bit integers on the way, or the unchanged call."""
        wide = self._bound_call(call.args[0], "relax.astype")
        if wide is None or str(wide.ty.dtype) != "int32" or str(wide.args[0].ty.dtype) not in ("uint8", "int8"):
            return call
        if not all(isinstance(tensor.ty.shape, relax.ShapeExpr) for tensor in (wide, call)):
            return call
        total = reductions.SUM
        result = free_reductions.legalize(
            self.builder_, call, self._machine, total.combine, total.identity, narrow=wide.args[0]
        )
        return call if result is None else result

    def _product_of_computed(self, call: relax.Call) -> relax.Expr:
        """Return a matrix product of two computed operands by dot products, or the unchanged call.

        Both are centred integers, which have 16 bits at most: pairs of them are multiplied where no instruction
        multiplies 8-bit integers.
        """
        shapes = [operand.ty.shape for operand in (*call.args, call)]
        if call.op.name != "relax.matmul" or self._unit not in (INT8, PAIRS):
            return call
        if not all(isinstance(shape, relax.ShapeExpr) and len(shape.values) > 1 for shape in shapes):
            return call
        left, right, result = (list(shape.values) for shape in shapes)
        batch, depth = result[:-2], static(left[-1])
        if depth == 0 or not all(products.broadcasts(shape[:-2], batch) for shape in (left, right)):
            return call
        by_bytes = self._product_of_bytes(call, batch) if self._unit is INT8 else None
        if by_bytes is not None:
            return by_bytes
        narrow = [self._centred_pairs(operand) for operand in call.args]
        if None in narrow:
            return call
        compute = partial(dot.batch_matmul, batch=batch, machine=self._machine, dot=PAIRS)
        return call_kernel(self.builder_, compute, *narrow, name="batch_matmul_int8")

    def _product_of_bytes(self, call: relax.Call, batch: Sequence[Any]) -> relax.Expr | None:
        """Return a product of two computed operands from that of their 8-bit integers; None for others.

        Each has one zero point: with a and b for them, the sum of (x - a)(y - b) over k is that of xy, less a times the
        sum of y, less b times the sum of x - a. AMX's kernels know their depth.
        """
        depth = static(call.args[0].ty.shape.values[-1])
        if depth is None and INT8.name in self._machine.amx:
            return None
        sources = [self._source(operand) for operand in call.args]
        if None in sources:
            return None
        left, right = (
            self._shifted(*source, dtype)
            for source, dtype in zip(sources, (INT8.data, INT8.weight), strict=True)
            if source is not None
        )
        compute = partial(dot.batch_matmul, batch=batch, machine=self._machine, dot=INT8)
        result = call_kernel(self.builder_, compute, left[0], right[0], name="batch_matmul_int8")
        numbers = [_number(zero) for _, zero in (left, right)]
        emit = self.builder_.emit

        def total(integers: relax.Expr, axis: int) -> relax.Expr:
            return emit(relax.op.sum(emit(relax.op.astype(integers, "int32")), axis=axis, keepdims=True))

        if numbers[0] != 0:
            columns = emit(relax.op.multiply(left[1], total(right[0], -2)))
            result = relax.op.subtract(emit(result), columns)
        if numbers[1] != 0:
            centred = emit(relax.op.subtract(emit(relax.op.astype(left[0], "int32")), left[1]))
            rows = emit(relax.op.sum(centred, axis=-1, keepdims=True))
            result = relax.op.subtract(emit(result), emit(relax.op.multiply(right[1], rows)))
        return result

    def _shifted(self, data: relax.Expr, zero: relax.Expr, dtype: str) -> tuple[relax.Expr, relax.Expr]:
        """Return 8-bit integers, signed or not, and their zero point as integers of the type `dtype` and theirs."""
        if str(data.ty.dtype) == dtype:
            return data, zero
        shift = relax.const(_SHIFT if dtype == "int8" else -_SHIFT, "int32")
        wide = self._difference(self.builder_.emit(relax.op.astype(data, "int32")), shift)
        return self.builder_.emit(relax.op.astype(wide, dtype)), self._difference(zero, shift)

    def _centred_pairs(self, expr: relax.Expr) -> relax.Expr | None:
        """Return int32 numbers that are 8-bit integers, less their zero points or not, as int16; None for others."""
        if isinstance(expr, tvm.ir.GenericConst):
            value = numbers_of(expr)
            return constant(value.astype(PAIRS.data)) if np.abs(value).max(initial=0) <= _LARGEST else None
        move = self._bound_call(expr, *_RESHAPING)
        if move is not None:
            source = self._centred_pairs(move.args[0])
            args = [source, *move.args[1:]]
            return None if source is None else self.builder_.emit(relax.Call(move.op, args, move.attrs, move.ty_args))
        difference = self._bound_call(expr, "relax.subtract")
        if difference is not None:
            # Numbers of 8 bits, of which no difference has more than 16.
            parts = [self._widened_pairs(operand) for operand in difference.args]
            return None if None in parts else self.builder_.emit(relax.op.subtract(*parts))
        return self._widened_pairs(expr)

    def _widened_pairs(self, expr: relax.Expr) -> relax.Expr | None:
        """Return int32 numbers that are 8-bit integers as int16; None for others."""
        if isinstance(expr, tvm.ir.GenericConst):
            return self._centred_pairs(expr)
        wide = self._bound_call(expr, "relax.astype")
        if wide is None or not _is_narrow(wide.args[0]):
            return None
        return self.builder_.emit(relax.op.astype(wide.args[0], PAIRS.data))

    def _in_float32(self, call: relax.Call) -> relax.Expr:
        """Return the product in float32 if that holds every sum exactly, else the unchanged product."""
        weight = numbers_of(call.args[1])
        sums = np.abs(weight).sum(axis=0 if call.op.name == "relax.matmul" else (1, 2, 3))
        if not sums.size or _LARGEST * int(sums.max()) >= 2**24:
            return call
        builder = self.builder_
        operands = [builder.emit(relax.op.astype(call.args[0], "float32")), constant(weight.astype("float32"))]
        if call.op.name == "relax.matmul":
            product = builder.normalize(relax.op.matmul(*operands))
            exact = products.legalize(builder, product, self._machine, self._choices)
        else:
            names = ("strides", "padding", "dilation", "groups", "data_layout", "kernel_layout", "out_layout")
            attributes = {name: getattr(call.attrs, name) for name in names}
            product = builder.normalize(relax.op.nn.conv2d(*operands, **attributes))
            exact = convolution.legalize(builder, product, self._machine, self._choices, fast=False)
        return call if exact is None else relax.op.astype(builder.emit(exact), "int32")

    def _source(self, expr: relax.Expr) -> tuple[relax.Var, relax.Expr] | None:
        """Find the 8-bit integers of which an expression is the centred form, and their zero point (int32)."""
        move = self._bound_call(expr, *_RESHAPING)
        if move is not None:
            source = self._source(move.args[0])
            if source is None:
                return None
            args = [source[0], *move.args[1:]]
            return self.builder_.emit(relax.Call(move.op, args, move.attrs, move.ty_args)), source[1]
        # A zero point of zero is not subtracted.
        difference = self._bound_call(expr, "relax.subtract")
        wide = self._bound_call(expr if difference is None else difference.args[0], "relax.astype")
        zero = relax.const(0, "int32") if difference is None else difference.args[1]
        if wide is None or str(wide.args[0].ty.dtype) not in ("uint8", "int8") or zero.ty.ndim:
            return None
        return wide.args[0], zero

    def _bound_call(self, expr: relax.Expr, *names: str) -> relax.Call | None:
        value = self.lookup_binding(expr) if isinstance(expr, relax.Var) else None
        return value if called_operator(value) in names else None

    def _operand(self, data: relax.Var, zero: relax.Expr, unit: Dot) -> tuple[relax.Expr, relax.Expr]:
        """Return the operand of type `unit.data` for 8-bit integers, and its zero point."""
        if str(data.ty.dtype) == unit.data:
            return data, zero
        number = _number(zero)
        place = data, zero if number is None else number
        if place not in self._operands:
            shift = (
                zero if unit is PAIRS else relax.const(_SHIFT if str(data.ty.dtype) == "uint8" else -_SHIFT, "int32")
            )
            wide = self.builder_.emit(relax.op.astype(data, "int32"))
            operand = self.builder_.emit(relax.op.astype(self._difference(wide, shift), unit.data))
            self._operands[place] = operand, self._difference(zero, shift)
        return self._operands[place]

    def _difference(self, left: relax.Expr, right: relax.Expr) -> relax.Expr:
        if left.same_as(right):
            return relax.const(0, "int32")
        amounts = _number(left), _number(right)
        if amounts[0] is not None and amounts[1] is not None:
            return relax.const(amounts[0] - amounts[1], "int32")
        return left if amounts[1] == 0 else self.builder_.emit(relax.op.subtract(left, right))

    def _conv2d(self, call: relax.Call, data: relax.Var, zero: relax.Expr, unit: Dot) -> relax.Expr | None:
        if not is_channels_last(call) or static(data.ty.shape.values[3]) is None:
            return None
        weight, groups, geometry = numbers_of(call.args[1]), int(call.attrs.groups), Geometry.of(call)
        number = _number(zero)
        # A computed zero point is an operand of the function, because the padding has its value.
        zeros = [zero] if number is None else []
        if is_depthwise(call):
            wide = self.builder_.normalize(constant(weight.astype("float32")))
            packed_weight = pack_weights(self.builder_, wide, DepthwisePacking(vector(groups, self._machine)))

            def compute(data: te.Tensor, weight: te.Tensor, *zeros: te.Tensor) -> te.Tensor:
                centred = _Centred(data, zeros[0]() if zeros else number)
                exact = depthwise.depthwise(centred, weight, geometry=geometry, machine=self._machine)
                return te.compute(exact.shape, lambda *index: exact[index].astype("int32"), name="whole")

            return call_kernel(self.builder_, compute, data, packed_weight, *zeros, name="depthwise_conv2d")
        offsets = _offsets(weight, unit)
        if offsets is None or not _is_dot(weight, groups, self._machine, unit):
            return None
        operand, zero = self._operand(data, zero, unit)
        sums = self._winograd(call, operand) if self._fast and unit is PAIRS else None
        if sums is not None:
            return sums
        number = _number(zero)
        weight = _with_ones(weight - offsets.reshape(-1, 1, 1, 1), offsets)
        lanes = dot.lanes_of(len(weight), groups, self._machine)

        def compute_dot(data: te.Tensor, packed: te.Tensor, *zeros: te.Tensor) -> te.Tensor:
            return dot.conv2d(
                data,
                packed,
                dot=unit,
                channels=len(weight),
                groups=groups,
                geometry=geometry,
                machine=self._machine,
                decisions=convolution.decisions_of_tiles(call, self._choices),
                zero=zeros[0]() if zeros else number or 0,
            )

        shape = data.ty.shape.values
        steps = dot.steps_of_conv2d(shape, weight.shape, groups, geometry, lanes, unit, self._machine)
        packed_weight = self._packed(ConvolutionPacking.of_dot(len(weight), lanes, unit, steps).pack(weight))
        # Without padding, no result depends on what fills the last tile of a line.
        zeros = [zero] if number is None and any(geometry.padding) else []
        product = call_kernel(self.builder_, compute_dot, operand, packed_weight, *zeros, name="conv2d_int8")
        return self._correct(product, zero, weight.sum(axis=(1, 2, 3)), offsets)

    def _winograd(self, call: relax.Call, operand: relax.Expr) -> relax.Expr | None:
        """Return a convolution of centred 16-bit integers by Winograd's algorithm; None where the direct one is faster.

        None too where its sums could overflow.
        """
        weight, geometry, machine = call.args[1], Geometry.of(call), self._machine
        stride, value = geometry.strides[0], numbers_of(weight)
        if geometry.kernel != (3, 3):
            return None
        exact = [size for size in winograd.whole_sizes(stride) if winograd.is_exact(value, size, stride, _LARGEST)]
        if not exact:
            return None
        decisions = self._choices.about(convolution.subject_of(call))
        size = convolution.winograd_size(
            operand, weight, int(call.attrs.groups), geometry, machine, decisions, PAIRS, exact
        )
        if size is None:
            return None
        narrow = self.builder_.normalize(constant(value.astype("int8" if _fits_int8(value) else PAIRS.weight)))
        packed_weight = pack_weights(self.builder_, narrow, IntegerWinogradPacking(size, machine.lanes, stride))

        def compute(data: te.Tensor, packed: te.Tensor) -> te.Tensor:
            sums = convolution.winograd_conv2d(
                data,
                packed,
                channels=len(value),
                geometry=geometry,
                machine=machine,
                decisions=decisions,
                dot=PAIRS,
            )
            # The factor is a power of two, and divides every sum.
            shift = ((winograd.whole_factor(size, stride) or 1) ** 2).bit_length() - 1
            return te.compute(sums.shape, lambda *index: sums[index] >> shift, name="whole") if shift else sums

        return call_kernel(self.builder_, compute, operand, packed_weight, name="winograd_conv2d_int8")

    def _matmul(self, call: relax.Call, data: relax.Var, zero: relax.Expr, unit: Dot) -> relax.Expr | None:
        weight = numbers_of(call.args[1])
        offsets = _offsets(weight.T, unit) if weight.ndim == 2 and data.ty.ndim > 1 else None
        if offsets is None or not static(data.ty.shape.values[-1]):
            return None
        operand, zero = self._operand(data, zero, unit)
        weight = _with_ones((weight - offsets).T, offsets).T
        units = weight.shape[1]
        rows = row_dimensions(data.ty.shape.values[:-1])
        steps = dot.steps_of_dense(data.ty.shape.values, weight.shape, rows, unit, self._machine)
        packing = MatrixPacking.of_dot(units, vector(units, self._machine), unit, steps)
        packed_weight = self._packed(packing.pack(weight))
        compute = partial(dot.dense, dot=unit, units=units, rows=rows, machine=self._machine)
        product = call_kernel(self.builder_, compute, operand, packed_weight, name="dense_int8")
        return self._correct(product, zero, weight.sum(axis=0), offsets)

    def _packed(self, weight: Array) -> relax.Expr:
        """Return packed weights as an expression; those of 16 bits that need 8 are widened by it."""
        if weight.dtype == np.int8 or not _fits_int8(weight):
            return constant(weight)
        return pack_weights(self.builder_, self.builder_.normalize(constant(weight.astype("int8"))), WideningPacking())

    def _correct(self, product: relax.Expr, zero: relax.Expr, sums: Array, offsets: Array) -> relax.Expr:
        """The product of centred integers with the weights, from that of unsigned ones with `_with_ones(weights)`."""
        number, emit = _number(zero), self.builder_.emit
        if number is None:
            part = emit(relax.op.multiply(zero, constant(sums.astype("int32"))))
            product = relax.op.subtract(emit(product), part)
        elif number:
            product = relax.op.subtract(emit(product), constant((number * sums).astype("int32")))
        if not offsets.any():
            return product
        count, whole = len(offsets), emit(product)
        axis = whole.ty.ndim - 1
        channels = emit(relax.op.strided_slice(whole, [axis], [0], [count]))
        total = emit(relax.op.strided_slice(whole, [axis], [count], [count + 1]))
        return relax.op.add(channels, emit(relax.op.multiply(total, constant(offsets.astype("int32")))))


def _with_ones(weight: Array, offsets: Array) -> Array:
    """Return the weights, output channels first; with offsets, a channel of ones follows, which sums the data."""
    return np.concatenate([weight, np.ones_like(weight[:1])]) if offsets.any() else weight


def _fits_int8(weight: Array) -> bool:
    limits = np.iinfo("int8")
    return bool(limits.min <= weight.min() and weight.max() <= limits.max)


def _number(zero: relax.Expr) -> int | None:
    """Return a constant zero point as a number; None for one that the model computes."""
    return int(numbers_of(zero)) if isinstance(zero, tvm.ir.GenericConst) else None


class _Centred:
    """A tensor of unsigned integers whose elements are read as float32, less their zero point."""

    dtype = "float32"

    def __init__(self, integers: te.Tensor, zero: Any) -> None:
        self._integers, self._zero = integers, zero
        self.shape = integers.shape

    def __getitem__(self, index: Any) -> Any:
        zero = np.float32(self._zero) if isinstance(self._zero, int) else self._zero.astype("float32")
        return self._integers[index].astype("float32") - zero
