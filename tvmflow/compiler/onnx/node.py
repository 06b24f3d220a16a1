"""`Node`, the form in which a converter gets a node of an ONNX graph, and the errors that converters raise."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from tvmflow.arrays import Array
from tvmflow.compiler.onnx.broadcasting import agree, agree_but_for, agree_in_product, with_sizes
from tvmflow.compiler.onnx.sizes import SizeEvaluator, bind_sizes, materialise
from tvmflow.compiler.onnx.values import dims_of, dtype_of
from tvmflow.compiler.size_checks import check_sizes
from tvmflow.onnx_model.size_limits import BROADCASTING

# The opset of the operators that converters are composed of.
_OPSET = 20
# What to do about a node that does something else in training.
IN_EVALUATION = "export the model in evaluation mode"


class UnsupportedFormError(Exception):
    """A node has a form that would be imported wrongly or not at all; the message names the form.

    `advice` is a clause, without a full stop, that tells the user what to do. Where it is empty, the importer adds its
    default advice.
    """

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.advice = advice


class FreeSizeError(UnsupportedFormError):
    """A node has a form that can be imported only where the sizes of its operands are fixed."""


@dataclass(frozen=True)
class Node:
    """A node to convert.

    `inputs` are its operands, None where an optional one is absent; `outputs` is the number of its results;
    `constants` returns the value of an expression that is known at build time, None for others; `evaluator` reasons
    about symbolic sizes; `convert` converts an operator of the standard, from its name, operands, attributes and opset.
    """

    builder: relax.BlockBuilder
    inputs: list[Any]
    attrs: dict[str, Any]
    opset: int
    outputs: int
    constants: Callable[[relax.Expr], Array | None]
    evaluator: SizeEvaluator
    convert: Callable[[str, list[Any], dict[str, Any], int], relax.Expr]

    def input(self, position: int) -> relax.Expr | None:
        """Return the operand at `position`; None where it is absent."""
        return self.inputs[position] if position < len(self.inputs) else None

    def constant(self, position: int) -> Array | None:
        """Return the value of an operand that is known at build time; None for others and where it is absent."""
        expr = self.input(position)
        return None if expr is None else self.constants(expr)

    def sizes(self, position: int) -> list[Any] | None:
        """Return the elements of an integer operand, each an int or a symbolic size; None if only a run knows them."""
        expr = self.input(position)
        if isinstance(expr, relax.ShapeExpr):
            return [self.evaluator.simplify(size) for size in expr.values]
        if tvm.ir.is_prim_expr(expr):
            return [self.evaluator.simplify(expr)]
        value = self.constant(position)
        return None if value is None else [int(size) for size in value.reshape(-1)]

    def integers(self, position: int) -> relax.Expr:
        """Return an operand as a vector of int64. Raises FreeSizeError where the number of its elements is unknown."""
        sizes, value = self.sizes(position), self.inputs[position]
        if sizes is not None:
            return materialise(self.builder, self.evaluator.shape(sizes))
        dims = dims_of(value)
        if dims is None or not all(isinstance(size, int) for size in dims):
            raise FreeSizeError("an unknown number of sizes that are computed from data")
        value = value if dtype_of(value) == "int64" else self.emit(relax.op.astype(value, "int64"))
        return value if len(dims) == 1 else self.emit(relax.op.reshape(value, [math.prod(dims)]))

    def vector(self, sizes: Sequence[Any]) -> relax.Expr:
        """Return an int64 vector whose elements are `sizes`, ints or symbolic sizes."""
        return materialise(self.builder, self.evaluator.shape(sizes))

    def with_sizes(self, operand: relax.Expr, shape: Sequence[Any]) -> relax.Expr:
        """Return an operand with the dimensions `shape`; sizes that may differ are checked at run time."""
        return with_sizes(self.builder, operand, shape, self.evaluator)

    def check_size(self, size: Any, expected: Any) -> None:
        """Let the model check, when it runs, that a size is the expected one, unless that can be proved."""
        if not self.evaluator.are_equal(size, expected):
            check_sizes(self.builder, [size], [expected])

    def bind(self, sizes: relax.Expr, known: Sequence[Any] | None = None) -> list[Any]:
        """Return a new symbol for each element of an int64 vector that the model computes when it runs.

        The elements must not be negative. `known` has the sizes that elements must be equal to, which the model checks
        when it runs, and None for the others.
        """
        (count,) = dims_of(sizes)  # type: ignore[misc]
        return bind_sizes(self.builder, self.evaluator, sizes, known or [None] * count)

    def text(self, name: str, default: str) -> str:
        """Return the string attribute `name`, or `default` if the node has none."""
        value = self.attrs.get(name, default)
        return value.decode() if isinstance(value, bytes) else str(value)

    def apply(self, operator: str, *operands: Any, opset: int = _OPSET, **attributes: Any) -> relax.Expr:
        """Emit an operator of ONNX's standard with these operands, None for absent ones; return its first result.

        `opset` is the version of the operator, and `attributes` are its attributes by name. Sizes of operands that must
        be equal may have several expressions; the model checks them when it runs.
        """
        if operator in BROADCASTING:
            operands = tuple(agree(self.builder, operands, self.evaluator))
        elif operator == "Concat":
            operands = tuple(agree_but_for(self.builder, operands, attributes["axis"], self.evaluator))
        elif operator == "MatMul":
            operands = tuple(agree_in_product(self.builder, operands, self.evaluator))
        attributes = {name: value.encode() if isinstance(value, str) else value for name, value in attributes.items()}
        result = self.convert(operator, onnx_frontend.onnx_input(operands), attributes, opset)
        result = result[0] if isinstance(result, relax.Tuple) else result
        return self.emit(result) if isinstance(result, relax.Call) else result

    def emit(self, expr: relax.Expr) -> relax.Expr:
        """Bind an expression to a variable and return the variable."""
        return self.builder.emit(expr)


# Returns the Relax expression of a node, or None where TVM's own converter is right for the node's form.
Converter = Callable[[Node], relax.Expr | None]
