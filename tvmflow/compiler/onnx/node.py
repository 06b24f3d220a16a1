"""A node of an ONNX graph as a converter takes it, and what converters of all families use."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

Array = np.ndarray[Any, Any]


class UnsupportedFormError(Exception):
    """A node has a form that would be imported wrongly or not at all; the message names the form."""


@dataclass(frozen=True)
class Node:
    """A node to convert.

    `inputs` are its operands, None where an optional one is absent; `outputs` is the number of its results;
    `constants` returns the value of an expression that is known at build time, None for others.
    """

    builder: relax.BlockBuilder
    inputs: list[Any]
    attrs: dict[str, Any]
    opset: int
    outputs: int
    constants: Callable[[relax.Expr], Array | None]

    def input(self, position: int) -> relax.Expr | None:
        """Return an operand; None where it is absent."""
        return self.inputs[position] if position < len(self.inputs) else None

    def constant(self, position: int) -> Array | None:
        """Return the value of an operand that is known at build time; None for others and where it is absent."""
        expr = self.input(position)
        return None if expr is None else self.constants(expr)

    def text(self, name: str, default: str) -> str:
        """Return a string attribute."""
        value = self.attrs.get(name, default)
        return value.decode() if isinstance(value, bytes) else str(value)

    def emit(self, expr: relax.Expr) -> relax.Expr:
        """Bind an expression to a variable and return the variable."""
        return self.builder.emit(expr)


def const(value: Any, dtype: str | None = None) -> relax.Expr:
    """Return a Relax constant of an array or a number."""
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
    """Return the name of a tensor's element type, as `float32`."""
    return str(expr.ty.dtype)


# Returns the Relax expression of a node, or None where TVM's own converter is right for the node's form.
Converter = Callable[[Node], relax.Expr | None]
