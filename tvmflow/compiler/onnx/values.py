"""Values of a graph in Relax: constants, shapes and types of elements."""

from typing import Any

import numpy as np
import tvm
from tvm import relax


def const(value: Any, dtype: str | None = None) -> relax.Expr:
    """Return a Relax constant of an array or a number; where `dtype` is None, NumPy infers the element type."""
    return relax.const(tvm.runtime.tensor(np.asarray(value, dtype=dtype, order="C")))


def is_static(dim: Any) -> bool:
    """Return whether a dimension is a number rather than a symbol."""
    return isinstance(dim, int | tvm.tirx.IntImm)


def dims_of(expr: relax.Expr) -> list[Any] | None:
    """Return a tensor's dimensions, numbers as int; None where its shape is unknown."""
    shape = getattr(expr.ty, "shape", None)
    if not isinstance(shape, relax.ShapeExpr):
        return None
    return [int(dim) if is_static(dim) else dim for dim in shape.values]


def dtype_of(expr: relax.Expr) -> str:
    """Return the name of a tensor's element type, such as `float32`."""
    return str(expr.ty.dtype)
