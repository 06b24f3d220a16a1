"""Computes dense layers and pointwise convolutions of free sizes on all their rows as one line.

A register tile holds neighbouring rows: tokens of a sequence, or pixels of a line. The last tile of a line of unknown
length may be mostly empty, and so each line wastes a part of its time; where the batch comes last and is one, each line
is a single row. Such a layer reads each row alone: all rows are one long line for it, with one last tile.

TVM fuses element-wise operators with the layer before them, but not beyond a reshape between the two. One that leaves
the channels last, as after a convolution of one dimension, is moved behind these operators.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.compiler.operators.common import called_operator, static
from tvmflow.compiler.operators.products import known_rows
from tvmflow.compiler.passes.functions import rewrite_functions
from tvmflow.compiler.passes.layout import ELEMENTWISE
from tvmflow.compiler.passes.rewrite import VIEWS, count_uses

# The dimensions of the weights of a dense layer.
_MATRIX = 2
# Of these the axis of the channels is an attribute.
_QUANTISATIONS = {"relax.quantize": relax.op.quantize, "relax.dequantize": relax.op.dequantize}


@tvm.transform.module_pass(opt_level=0, name="JoinRows")
class JoinRows:
    """Makes one line of all rows for dense layers of free sizes, and for pointwise convolutions of such NHWC images.

    Element-wise operators that TVM fuses with a layer compute on the same line, or, behind a reshape of its result, in
    the shape of that. Reshapes to this shape and back, which copy nothing, stand around them.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with these layers changed."""
        return rewrite_functions(_Joining(mod), mod)


@mutator
class _Joining(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._uses: Counter[relax.Var] = Counter()
        # The places of the bindings in a function, and the results of layers and of operators that follow one.
        self._places: dict[relax.Var, int] = {}
        self._results: set[relax.Var] = set()

    def visit_function_(self, op: relax.Function) -> relax.Function:
        """Return a function with its layers changed, or the function itself without any."""
        bindings = [binding for block in getattr(op.body, "blocks", ()) for binding in block.bindings]
        if not any(isinstance(item, relax.VarBinding) and _is_layer(item.value) for item in bindings):
            return op
        self._places = {binding.var: place for place, binding in enumerate(bindings)}
        self._uses = count_uses(op)
        return relax.analysis.remove_all_unused(super().visit_function_(op))

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Compute a layer on one line of rows, or an element-wise operator after a layer in the shape of its result."""
        call = super().visit_call_(op)
        if _reads_rows(op):
            data, weight = call.args
            *rows, channels = data.ty.shape.values
            line = [*[1] * (len(rows) - 1), _product(rows), channels]
            return self._as_before(relax.Call(op.op, [self._in_shape(data, line), weight], op.attrs), op)
        result = self._first_result(op, call.args) if _is_elementwise(op) else None
        if result is None:
            return call
        shape = result.ty.shape.values
        operands = [
            self._in_shape(item, shape) if _same_shape(item, op) else self._by_channel(item, len(shape))
            for item in call.args
        ]
        if called_operator(op) in _QUANTISATIONS:
            changed = _QUANTISATIONS[called_operator(op)](*operands, axis=len(shape) - 1, out_dtype=op.attrs.out_dtype)
        else:
            changed = relax.Call(op.op, operands, op.attrs)
        return self._as_before(changed, op)

    def _first_result(self, call: relax.Call, operands: Sequence[relax.Expr]) -> relax.Var | None:
        """The result of a layer, seen through a reshape, with which TVM would fuse an element-wise operator.

        TVM fuses it with the first of several kernels whose results nothing else reads.
        """
        whole = [(old, new) for old, new in zip(call.args, operands, strict=True) if _same_shape(new, call)]
        kernels = [
            (self._places[old], self._result_behind(new))
            for old, new in whole
            if old in self._places and self._uses[old] == 1
        ]
        others = [item for item in call.args if isinstance(item.ty, relax.TensorType) and not _same_shape(item, call)]
        return min(kernels, key=lambda item: item[0])[1] if kernels and all(map(_is_by_channel, others)) else None

    def _result_behind(self, tensor: relax.Expr) -> relax.Var | None:
        """The result of which a tensor is a view with the same channels; None for another tensor."""
        source, value = tensor, self._value_of(tensor)
        while called_operator(value) in VIEWS:
            source = value.args[0]
            value = self._value_of(source)
        is_result = source in self._results or _is_layer(value)
        return source if source is not tensor and is_result and _same_channels(source, tensor) else None

    def _value_of(self, tensor: relax.Expr) -> Any:
        return self.builder_.lookup_binding(tensor) if isinstance(tensor, relax.Var) else None

    def _in_shape(self, tensor: relax.Expr, shape: Sequence[Any]) -> relax.Expr:
        """The view of a tensor in another shape, or the result of which it is a view, if that has the shape."""
        result = self._result_behind(tensor)
        if result is not None and tvm_ffi.structural_equal(list(result.ty.shape.values), list(shape)):
            return result
        return self.builder_.emit(relax.op.reshape(tensor, list(shape)))

    def _by_channel(self, operand: relax.Expr, rank: int) -> relax.Expr:
        """An operand that has one number for each channel, in no more dimensions than `rank`."""
        if not isinstance(operand.ty, relax.TensorType) or operand.ty.ndim <= rank:
            return operand
        return self.builder_.emit(relax.op.reshape(operand, [operand.ty.shape.values[-1]]))

    def _as_before(self, result: relax.Call, call: relax.Call) -> relax.Call:
        """The view of a result in the shape of the call that it replaces."""
        variable = self.builder_.emit(result)
        self._results.add(variable)
        return relax.op.reshape(variable, call.ty.shape)


def _product(sizes: Sequence[Any]) -> Any:
    return tvm.sym.Analyzer().simplify(math.prod(sizes))


def _is_layer(call: Any) -> bool:
    """Whether a call is a convolution of NHWC images or a dense layer."""
    if called_operator(call) == "relax.matmul":
        return len(getattr(call.args[1].ty.shape, "values", ())) == _MATRIX
    return called_operator(call) == "relax.nn.conv2d" and call.attrs.out_layout == "NHWC"


def _reads_rows(call: Any) -> bool:
    """Whether a call is a layer that reads rows, which are in several dimensions and of no known number."""
    if not _is_layer(call):
        return False
    data, weight = call.args
    shape, kernel = data.ty.shape, weight.ty.shape
    if not isinstance(shape, relax.ShapeExpr) or not isinstance(kernel, relax.ShapeExpr):
        return False
    rows = [static(size) for size in shape.values[:-1]]
    if None not in rows or sum(size != 1 for size in rows) < 2:
        return False
    if called_operator(call) == "relax.nn.conv2d":
        return None in rows[1:] and _is_pointwise(call)
    return None not in map(static, kernel.values) and not known_rows(shape.values[:-1])


def _is_pointwise(call: relax.Call) -> bool:
    """Whether a convolution reads single pixels of an NHWC image."""
    attrs, kernel = call.attrs, call.args[1].ty.shape.values
    return (
        (attrs.data_layout, attrs.out_layout, attrs.kernel_layout) == ("NHWC", "NHWC", "OIHW")
        and [static(size) for size in kernel[2:]] == [1, 1]
        and int(attrs.groups) == 1
        and all(int(item) == 1 for item in attrs.strides)
        and not any(int(item) for item in attrs.padding)
    )


def _is_elementwise(call: relax.Call) -> bool:
    if not isinstance(getattr(call.ty, "shape", None), relax.ShapeExpr):
        return False
    if called_operator(call) in _QUANTISATIONS:
        # A scale for each channel is along the last dimension of a line, too.
        of_channels = int(call.attrs.axis) % max(call.ty.ndim, 1) == call.ty.ndim - 1
        return of_channels or all(static(size) == 1 for item in call.args[1:] for size in item.ty.shape.values)
    return called_operator(call) in ELEMENTWISE


def _same_shape(tensor: relax.Expr, other: relax.Expr) -> bool:
    return isinstance(tensor.ty, relax.TensorType) and tvm_ffi.structural_equal(tensor.ty.shape, other.ty.shape)


def _same_channels(tensor: relax.Expr, other: relax.Expr) -> bool:
    shape, others = tensor.ty.shape.values, other.ty.shape.values
    return bool(len(shape) and len(others)) and bool(tvm_ffi.structural_equal(shape[-1], others[-1]))


def _is_by_channel(tensor: relax.Expr) -> bool:
    """Whether a tensor has one number for each channel of all rows, or one number."""
    shape = tensor.ty.shape
    return isinstance(shape, relax.ShapeExpr) and all(static(size) == 1 for size in shape.values[:-1])
