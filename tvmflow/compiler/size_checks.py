"""Checks of sizes that a model makes when it runs, where two expressions of a size must be equal."""

from collections.abc import Sequence
from typing import Any

from tvm import relax

# Each check goes through a type without sizes: of two shapes TVM would infer that a symbol is an expression of itself,
# and replace it endlessly.


def cast_to(builder: relax.BlockBuilder, operand: relax.Expr, shape: Sequence[Any]) -> relax.Expr:
    """Return a tensor whose dimensions have the expressions `shape`; the model checks the sizes when it runs."""
    value = operand if isinstance(operand, relax.Var) else builder.emit(operand)
    value = builder.match_cast(value, relax.TensorType(ndim=operand.ty.ndim, dtype=operand.ty.dtype))
    return builder.match_cast(value, relax.TensorType(list(shape), operand.ty.dtype))


def check_sizes(builder: relax.BlockBuilder, sizes: Sequence[Any], expected: Sequence[Any]) -> None:
    """Let the model check, when it runs, that sizes are the expected ones."""
    shape = builder.match_cast(builder.emit(relax.ShapeExpr(list(sizes))), relax.ShapeType(ndim=len(sizes)))
    builder.match_cast(shape, relax.ShapeType(list(expected)))
