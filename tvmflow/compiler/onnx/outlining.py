"""Functions of the module for graphs that a model runs as it decides: branches, and the iterations of loops.

Such a function takes the values of the graphs around it as parameters, and returns a tuple of tensors.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import onnx
import tvm
from tvm import relax, tirx

from tvmflow.arrays import Array
from tvmflow.compiler.onnx.node import FreeSizeError, UnsupportedFormError
from tvmflow.compiler.onnx.sizes import SizeEvaluator, Sizes
from tvmflow.compiler.onnx.values import dims_of, dtype_of, is_static
from tvmflow.compiler.size_checks import cast_to


@dataclass(frozen=True)
class Value:
    """A value of the graph: a tensor, a shape or a tuple of tensors.

    `sizes` are its elements, some perhaps symbolic, where they are known at import; else None.
    """

    expr: relax.Expr
    sizes: Sizes | None = None


class Importer(Protocol):
    """The part of the importer that control flow uses. Names are those of the graph's values."""

    bb: relax.BlockBuilder
    evaluator: SizeEvaluator
    graph: onnx.GraphProto

    def value(self, name: str) -> Value:
        """Return the value of this name."""

    def has_value(self, name: str) -> bool:
        """Return whether a value has this name."""

    def set_value(self, name: str, value: Value) -> None:
        """Make `value` the value of this name."""

    def bind(self, names: Iterable[str]) -> None:
        """Compute those of the named values that are expressions, so that no branch or iteration computes them."""

    def set_concatenated(self, name: str, value: Value) -> None:
        """Give the name of a sequence to the tensor that its concatenation will be."""

    def tensor(self, value: Value) -> relax.Expr:
        """Return a value as a tensor."""

    def elements(self, value: Value) -> Array | None:
        """Return the elements of a value that are known at import; None for others."""

    def equal_sizes(self, name: str) -> tuple[Any, Any] | None:
        """Return the two sizes that the boolean value `name` compares for equality; None for other values."""

    def scope(self) -> AbstractContextManager[None]:
        """Return a context manager at whose end the importer forgets all names that were set within it."""

    def import_graph(self, graph: onnx.GraphProto, inputs: Sequence[Value]) -> list[Value]:
        """Import the nodes of an inner graph, whose inputs get the values `inputs`; return its outputs."""

    def checkpoint(self) -> Callable[[], None]:
        """Return a function that makes the importer undo all nodes and functions added after this call."""

    def add_function(self, variable: tvm.ir.GlobalVar, function: relax.Function) -> None:
        """Add a function to the module under this variable."""

    def unique_name(self, name: str) -> str:
        """Return `name` with a suffix, so that no function of the module has it."""


@dataclass(frozen=True)
class Type:
    """A tensor's type; a dimension is None where only a run knows it."""

    dims: tuple[Any, ...]
    dtype: str

    @property
    def relax_type(self) -> relax.TensorType:
        """The type in Relax."""
        if any(dim is None for dim in self.dims):
            return relax.TensorType(ndim=len(self.dims), dtype=self.dtype)
        return relax.TensorType(list(self.dims), self.dtype)

    def with_symbols(self, importer: Importer) -> relax.TensorType:
        """Return the type with a new symbol for each dimension that is known only when the model runs."""
        return relax.TensorType(with_symbols(importer, self.dims), self.dtype)


@dataclass(frozen=True)
class Function:
    """A function of the module, which returns a tuple of tensors.

    It takes the sizes `symbols`, where there are any, its own parameters, and the values `captured` of the graphs
    around it.
    """

    variable: tvm.ir.GlobalVar
    symbols: tuple[tirx.Var, ...]
    captured: tuple[relax.Var, ...]
    results: tuple[Type, ...]

    def call(self, arguments: Sequence[relax.Expr]) -> relax.Call:
        """Return a call of the function with these arguments for its own parameters."""
        sizes = [relax.ShapeExpr(self.symbols)] if self.symbols else []
        return relax.Call(self.variable, [*sizes, *arguments, *self.captured])

    def declare(self, parameters: Sequence[relax.Var]) -> None:
        """Give the function's variable its type, so that the function may call itself."""
        sizes = [relax.ShapeType(self.symbols)] if self.symbols else []
        types = [*sizes, *(parameter.ty for parameter in (*parameters, *self.captured))]
        relax.expr._update_type(self.variable, relax.FuncType(types, tuple_type(self.results), True))


def tuple_type(results: Sequence[Type]) -> relax.TupleType:
    """Return the type of a tuple of tensors of these types."""
    return relax.TupleType([item.relax_type for item in results])


def outline(
    importer: Importer,
    name: str,
    parameters: Sequence[relax.Var],
    scope: Sequence[tirx.Var],
    build: Callable[[], relax.Expr],
    results: Sequence[Type] | None = None,
    signature: Function | None = None,
    attributes: Mapping[str, str] | None = None,
) -> Function:
    """Add a function to the module, whose body `build` emits; the values of other graphs in it become parameters.

    `build` returns a tuple of tensors, or, where `results` says their types, any expression of such a type: the body
    may decide between calls. `scope` are the symbols that the callers have. `signature` is that of a function which
    calls itself. `attributes` are those of the function.
    """
    builder, label = importer.bb, importer.unique_name("draft")
    try:
        # The builder takes functions for equal that differ in the symbols of their parameters alone.
        with builder.function(label, list(parameters), {"label": label}):
            if results is None:
                with builder.dataflow():
                    body = build()
                    results = [type_of(importer, value, scope) for value in body.fields]
                    body = builder.emit_output(body)
            else:
                body = build()
            draft = builder.emit_func_output(body)
    except Exception:
        # The builder goes on with the function around this one.
        builder._end_block()
        builder.end_scope()
        raise
    bare = builder.get()[draft]
    if signature is None:
        captured = [variable for variable in relax.analysis.free_vars(bare) if not tvm.ir.is_prim_expr(variable)]
        whole = relax.Function([*parameters, *captured], bare.body, relax.ObjectType())
        variables = [*relax.analysis.free_symbolic_vars(whole), *relax.analysis.defined_symbolic_vars(whole)]
        symbols = [symbol for symbol in scope if any(symbol.same_as(item) for item in variables)]
        signature = Function(tvm.ir.GlobalVar(name), tuple(symbols), tuple(captured), tuple(results))
        signature.declare(parameters)
    own = {variable: relax.Var(variable.name, variable.ty) for variable in signature.captured}
    whole = relax.Function([*parameters, *own], bare.body, relax.ObjectType()).bind_params(own)
    sizes = [relax.Var("sizes", relax.ShapeType(list(signature.symbols)))] if signature.symbols else []
    function = relax.Function([*sizes, *parameters, *own.values()], whole.body, tuple_type(signature.results))
    for key, value in (attributes or {}).items():
        function = function.with_attr(key, value)
    importer.add_function(signature.variable, relax.utils.copy_with_new_vars(function))
    return signature


def call(importer: Importer, function: Function, arguments: Sequence[relax.Expr]) -> list[relax.Expr]:
    """Call a function; return its results, with symbols for the dimensions that only a run knows."""
    results = importer.bb.emit(function.call(arguments))
    fields = [importer.bb.emit(relax.TupleGetItem(results, place)) for place in range(len(function.results))]
    return [shaped(importer, field, item.dims) for field, item in zip(fields, function.results, strict=True)]


def shaped(importer: Importer, value: relax.Expr, dims: Sequence[Any]) -> relax.Expr:
    """Return a tensor with these dimensions, and a new symbol for each None."""
    own = dims_of(value)
    if own is not None and all(
        dim is not None and importer.evaluator.are_equal(*pair) for dim, *pair in zip(dims, dims, own, strict=True)
    ):
        return value
    return cast_to(importer.bb, value, with_symbols(importer, dims))


def with_symbols(importer: Importer, dims: Sequence[Any]) -> list[Any]:
    """Return dimensions with a new symbol for each None."""
    return [importer.evaluator.unknown_size() if dim is None else dim for dim in dims]


def type_of(importer: Importer, value: relax.Expr, scope: Sequence[tirx.Var]) -> Type:
    """Return the type of a tensor for those who have these symbols."""
    if not isinstance(value.ty, relax.TensorType):
        raise UnsupportedFormError("a sequence or an optional value that is decided when the model runs")
    if value.ty.ndim < 0:
        raise FreeSizeError("a value whose number of dimensions is unknown")
    dims = dims_of(value) or [None] * int(value.ty.ndim)
    dims = [None if dim is None else importer.evaluator.expression(dim) for dim in dims]
    return Type(tuple(dim if _is_within(dim, scope) else None for dim in dims), dtype_of(value))


def _is_within(dim: Any, scope: Sequence[tirx.Var]) -> bool:
    """Whether a dimension is an expression of these symbols."""
    if dim is None or is_static(dim):
        return dim is not None
    symbols = tirx.analysis.undefined_vars(dim, [])
    return all(any(symbol.same_as(item) for item in scope) for symbol in symbols)


def either(importer: Importer, one: Type, other: Type) -> Type:
    """Return the type of a tensor that has one of two types of equally many dimensions."""
    pairs = zip(one.dims, other.dims, strict=True)
    is_same = [a is not None and b is not None and importer.evaluator.are_equal(a, b) for a, b in pairs]
    return Type(tuple(dim if same else None for dim, same in zip(one.dims, is_same, strict=True)), one.dtype)


def decide(importer: Importer, condition: relax.Expr, one: relax.Expr, other: relax.Expr) -> relax.Expr:
    """Evaluate one expression where the condition is true, else the other; return the value."""
    return importer.bb.emit(relax.If(condition, relax.SeqExpr([], one), relax.SeqExpr([], other)))


def set_results(importer: Importer, node: onnx.NodeProto, values: Iterable[Value]) -> None:
    """Make these values the outputs of a node, in order."""
    for name, value in zip(node.output, values, strict=False):
        importer.set_value(name, value)


def tensors(importer: Importer, values: Iterable[Value]) -> relax.Tuple:
    """Return a tuple of values as tensors."""
    return relax.Tuple([importer.tensor(value) for value in values])


def scalar(importer: Importer, value: Value) -> relax.Expr:
    """Return a tensor of one element without its dimensions."""
    tensor = importer.tensor(value)
    return tensor if dims_of(tensor) == [] else importer.bb.emit(relax.op.reshape(tensor, ()))


def graph_of(node: onnx.NodeProto, name: str) -> onnx.GraphProto:
    """Return the graph that is the attribute `name` of a node."""
    graph: onnx.GraphProto = next(attribute.g for attribute in node.attribute if attribute.name == name)
    return graph
