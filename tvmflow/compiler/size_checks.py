"""Checks of sizes that a model makes when it runs, where two expressions of a size must be equal."""

from collections.abc import Iterator, Sequence
from typing import Any

from tvm import relax, tirx

from tvmflow.compiler.operators.common import static

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


def parameter_symbols(function: relax.Function) -> Sequence[tirx.Var]:
    """Return the symbols that get their values from the parameters of a function."""
    signature = relax.Function(function.params, relax.Tuple([]), relax.TupleType([]))
    return list(relax.analysis.defined_symbolic_vars(signature))


def known_sizes(function: relax.Function) -> dict[tirx.Var, int]:
    """Return the symbols that get their values from such checks, but whose values are known, with these.

    The importer makes a symbol of a size that is an expression. It is a number where those of the inputs are.
    """
    symbols = set(parameter_symbols(function))
    values: dict[tirx.Var, int] = {}
    for size, symbol in _checked_sizes(function):
        if isinstance(symbol, tirx.Var) and symbol not in symbols:
            symbols.add(symbol)
            number = static(size)
            if number is not None:
                values[symbol] = number
    return values


def contradicts(function: relax.Function) -> bool:
    """Whether a check of a function, outside branches, compares two different numbers, so that every call fails."""
    return any(
        None not in (numbers := {static(size), static(expected)}) and len(numbers) == 2
        for size, expected in _checked_sizes(function)
    )


def _checked_sizes(function: relax.Function) -> Iterator[tuple[Any, Any]]:
    """The sizes that the checks of a function compare, each with the expected one."""
    sources: dict[relax.Var, relax.Expr] = {}
    for binding in (binding for block in function.body.blocks for binding in block.bindings):
        if isinstance(binding, relax.MatchCast):
            source = sources[binding.var] = sources.get(binding.value, binding.value)
            yield from zip(_sizes(source.ty), _sizes(binding.ty), strict=False)


def _sizes(ty: relax.Type) -> Sequence[Any]:
    """The sizes in the type of a tensor or of a shape, none where it has none."""
    if isinstance(ty, relax.TensorType):
        return ty.shape.values if isinstance(ty.shape, relax.ShapeExpr) else ()
    return (ty.values or ()) if isinstance(ty, relax.ShapeType) else ()
