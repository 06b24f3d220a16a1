"""Evaluates what is constant and rewrites what stands in the way of TVM's own passes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator


@mutator
class _Simplify(PyExprMutator):  # type: ignore[misc]
    """Does here what TVM would compile to evaluate, and rewrites what stands in the way of its own passes."""

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        call = super().visit_call_(op)
        rewrite = _REWRITES.get(getattr(call.op, "name", ""))
        simpler = rewrite(self, call) if rewrite else None
        return call if simpler is None else simpler

    def constant(self, expr: relax.Expr) -> np.ndarray[Any, Any] | None:
        """The value of a constant or of a variable bound to one."""
        if isinstance(expr, relax.Var):
            expr = self.lookup_binding(expr)
        return expr.value.numpy() if isinstance(expr, tvm.ir.GenericConst) else None

    def shape(self, expr: relax.Expr) -> list[int] | None:
        """The sizes of a shape expression without symbols."""
        if isinstance(expr, relax.Var):
            expr = self.lookup_binding(expr)
        if not isinstance(expr, relax.ShapeExpr) or not all(isinstance(dim, tvm.tirx.IntImm) for dim in expr.values):
            return None
        return [int(dim) for dim in expr.values]


def _constant(value: np.ndarray[Any, Any]) -> relax.Expr:
    return relax.const(tvm.runtime.tensor(np.asarray(value, order="C")))


def _fold_permute(simplify: _Simplify, call: relax.Call) -> relax.Expr | None:
    value = simplify.constant(call.args[0])
    axes = call.attrs.axes
    if value is None:
        return None
    return _constant(np.transpose(value, None if axes is None else [int(axis) for axis in axes]))


def _fold_reshape(simplify: _Simplify, call: relax.Call) -> relax.Expr | None:
    value, shape = simplify.constant(call.args[0]), simplify.shape(call.args[1])
    return None if value is None or shape is None else _constant(value.reshape(shape))


def _fold_expand_dims(simplify: _Simplify, call: relax.Call) -> relax.Expr | None:
    value = simplify.constant(call.args[0])
    return None if value is None else _constant(np.expand_dims(value, tuple(int(axis) for axis in call.attrs.axis)))


def _fold_shape_of(simplify: _Simplify, call: relax.Call) -> relax.Expr | None:
    ty = call.args[0].ty
    return ty.shape if isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr) else None


def _fold_shape_to_tensor(simplify: _Simplify, call: relax.Call) -> relax.Expr | None:
    shape = simplify.shape(call.args[0])
    return None if shape is None else _constant(np.array(shape, "int64"))


def _split_clip(simplify: _Simplify, call: relax.Call) -> relax.Expr | None:
    """Clip as relu or maximum, then minimum: TVM cannot change the layout of a clip."""
    x, low, high = call.args
    bounds = [low, high]
    if not all(isinstance(bound, tvm.tirx.IntImm | tvm.tirx.FloatImm) for bound in bounds):
        return None
    least, most = (float(bound.value) for bound in bounds)
    dtype = x.ty.dtype.dtype
    if str(dtype) != "float32":
        return None
    above = relax.op.nn.relu(x) if least == 0 else relax.op.maximum(x, relax.const(least, dtype))
    return relax.op.minimum(simplify.builder_.emit(above), relax.const(most, dtype))


def _count_axes_from_the_front(simplify: _Simplify, call: relax.Call) -> relax.Expr | None:
    """Squeeze with axes from the front: TVM's layout conversion reads out of bounds for those from the back."""
    axes = call.attrs.axis
    if axes is None or all(int(axis) >= 0 for axis in axes):
        return None
    rank = call.args[0].ty.ndim
    return relax.op.squeeze(call.args[0], [int(axis) % rank for axis in axes])


def _one_dimension_as_two(simplify: _Simplify, call: relax.Call) -> relax.Expr | None:
    """A one-dimensional convolution as one over images of height one, which has a schedule."""
    attrs = call.attrs
    if (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) != ("NCW", "OIW", "NCW"):
        return None
    before, after = (int(size) for size in attrs.padding)
    image = relax.op.nn.conv2d(
        simplify.builder_.emit(relax.op.expand_dims(call.args[0], 2)),
        simplify.builder_.emit(relax.op.expand_dims(call.args[1], 2)),
        strides=[1, int(attrs.strides[0])],
        padding=[0, before, 0, after],
        dilation=[1, int(attrs.dilation[0])],
        groups=int(attrs.groups),
    )
    return relax.op.squeeze(simplify.builder_.emit(image), [2])


_REWRITES: dict[str, Callable[[_Simplify, relax.Call], relax.Expr | None]] = {
    "relax.clip": _split_clip,
    "relax.nn.conv1d": _one_dimension_as_two,
    "relax.squeeze": _count_axes_from_the_front,
    "relax.expand_dims": _fold_expand_dims,
    "relax.permute_dims": _fold_permute,
    "relax.reshape": _fold_reshape,
    "relax.shape_of": _fold_shape_of,
    "relax.shape_to_tensor": _fold_shape_to_tensor,
}


@tvm.transform.module_pass(opt_level=0, name="Simplify")
class Simplify:
    """Evaluates moved constants and shapes, and rewrites operators that stand in the way of TVM's passes."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Rewrite every Relax function of the module."""
        simplify = _Simplify(mod)
        for variable, function in mod.functions_items():
            if isinstance(function, relax.Function):
                simplify.builder_.update_func(variable, simplify.visit_expr(function))
        return simplify.builder_.get()
