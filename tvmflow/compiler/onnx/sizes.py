"""Evaluates at import what a graph computes from the sizes of tensors, where some sizes are symbols.

Exporters write a reshape or an expansion as a chain of operators on the shape of a tensor: Shape, Gather, Mul, Concat.
With symbols for the free sizes such a chain is a list of expressions, and nothing of it is computed at run time.
"""

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
import onnx
import tvm
from onnx.reference import ReferenceEvaluator
from tvm import relax, sym, tirx

from tvmflow.arrays import Array
from tvmflow.compiler.onnx.values import const, dims_of, is_static

# Beyond it a value is data rather than sizes.
_LARGEST = 1024
# The largest denominator of a factor by which float32 multiplies sizes exactly: 0.5 is such a factor, 0.1 is not.
_LARGEST_DENOMINATOR = 1 << 12
# No axis is longer; exporters write numbers from here on for its end.
LARGEST_SIZE = 10**9
# The largest power of a size that is evaluated.
_LARGEST_POWER = 8
# No model is known to need a larger size at least.
_LARGEST_LEAST = 1 << 20
# The function of the virtual machine that makes a shape of a vector of sizes.
READ_SHAPE = "vm.builtin.tensor_to_shape"


class NotEvaluatedError(Exception):
    """The results of an operator are not known at import; the model computes them when it runs."""


@dataclass(frozen=True)
class Quotient:
    """The floating-point number `size * factor`, where `size` is a symbolic integer."""

    size: Any
    factor: Fraction


@dataclass(frozen=True)
class Sizes:
    """A value that is known at import: an array whose elements are numbers, symbolic integers (TIR) or `Quotient`.

    `dtype` is its element type in the model, such as `int64`.
    """

    elements: Array
    dtype: str

    @classmethod
    def of(cls, array: Array) -> "Sizes":
        """Return the value whose elements are those of a constant array."""
        return cls(_objects(array.reshape(-1).tolist(), array.shape), str(array.dtype))

    @property
    def is_constant(self) -> bool:
        """Whether all elements are numbers."""
        return not any(_is_symbolic(item) for item in self.elements.reshape(-1))

    def constant(self) -> Array:
        """Return the elements as numbers. Raises NotEvaluatedError where one is symbolic."""
        if not self.is_constant:
            raise NotEvaluatedError
        return np.array(self.elements.tolist(), self.dtype).reshape(self.elements.shape)


def materialise(builder: relax.BlockBuilder, sizes: Sizes, shape: tuple[int, ...] | None = None) -> relax.Expr:
    """Return a tensor with the elements of `sizes`, computed at run time; its element type is `sizes.dtype`.

    Its shape is `shape` or, if that is None, that of `sizes.elements`.
    """
    items = [item if isinstance(item, Quotient) else _as_quotient(item) for item in sizes.elements.reshape(-1)]
    value = builder.emit(relax.op.shape_to_tensor(relax.ShapeExpr([_size(item.size) for item in items])))
    if sizes.dtype != "int64":
        value = builder.emit(relax.op.astype(value, sizes.dtype))
    if any(item.factor != 1 for item in items):
        factors = np.array([float(item.factor) for item in items], sizes.dtype)
        value = builder.emit(relax.op.multiply(value, const(factors)))
    shape = sizes.elements.shape if shape is None else shape
    return value if shape == (len(items),) else builder.emit(relax.op.reshape(value, shape))


def bind_sizes(
    builder: relax.BlockBuilder, evaluator: "SizeEvaluator", value: relax.Expr, known: Sequence[Any]
) -> list[Any]:
    """Return the elements of an int64 vector that the model computes when it runs: those of `known`.

    In place of None, `known` gets a new symbol. The model checks the other elements. No element may be negative.
    """
    sizes = [evaluator.unknown_size() if size is None else size for size in known]
    # TVM's operator for this would give each size a second symbol, and replace the first one not everywhere.
    shape = relax.op.call_pure_packed(READ_SHAPE, value, ty_args=relax.ShapeType(ndim=len(sizes)))
    builder.match_cast(builder.emit(shape), relax.ShapeType(sizes))
    return sizes


def elements_at_import(builder: relax.BlockBuilder, value: relax.Expr) -> list[Any]:
    """Return the elements of an int64 vector of known length: ints, symbolic sizes, and None where one is unknown."""
    (length,) = dims_of(value)  # type: ignore[misc]
    if isinstance(value, tvm.ir.GenericConst):
        return [int(item) for item in value.value.numpy()]
    source = builder.lookup_binding(value) if isinstance(value, relax.Var) else value
    if isinstance(source, relax.Call) and source.op.name == "relax.shape_to_tensor":
        shape = source.args[0]
        if isinstance(shape, relax.ShapeExpr):
            return [int(size) if is_static(size) else size for size in shape.values]
    if isinstance(source, relax.Call) and source.op.name == "relax.concat" and isinstance(source.args[0], relax.Tuple):
        return [item for part in source.args[0] for item in elements_at_import(builder, part)]
    return [None] * length


def run_reference(node: onnx.NodeProto, feeds: Mapping[str, Array], opset: int) -> dict[str, Array]:
    """Run a node by ONNX's reference implementation of an opset; return its results by name.

    Raises any kind of exception: the implementation has gaps.
    """
    # Of a node alone it would take the newest form of the operator.
    names = [name for name in node.output if name]
    inputs, outputs = ([onnx.helper.make_empty_tensor_value_info(name) for name in those] for those in (feeds, names))
    graph = onnx.helper.make_graph([node], node.op_type, inputs, outputs)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    results = ReferenceEvaluator(model).run(None, dict(feeds))
    return {name: np.asarray(result) for name, result in zip(names, results, strict=True)}


def _is_symbolic(item: Any) -> bool:
    return isinstance(item, Quotient) or tvm.ir.is_prim_expr(item)


def _objects(items: Iterable[Any], shape: Sequence[int]) -> Array:
    array = np.empty(tuple(shape), object)
    flat = list(items)
    array.reshape(-1)[:] = flat if flat else []
    return array


class SizeEvaluator:
    """Evaluates operators on sizes; every free dimension of the model's inputs has from one to 10^9 elements.

    `smallest` holds lower bounds that the model needs, by the name of a free dimension; the bound of others is one.
    `require` adds to it. `lacks_bounds` says whether a division was not evaluated because a size may be negative, or a
    divisor zero.
    """

    def __init__(self, smallest: Mapping[str, int] | None = None) -> None:
        self.smallest = dict(smallest or {})
        self.lacks_bounds = False
        self._analyzer = sym.Analyzer()
        self._expressions = sym.Analyzer()
        self._new_symbols = 0
        self._symbols: list[tirx.Var] = []

    def symbols(self) -> list[tirx.Var]:
        """Return all symbols declared or created so far."""
        return list(self._symbols)

    def declare(self, symbols: Iterable[tirx.Var]) -> None:
        """Declare each of these variables as a size, with the lower bound in `self.smallest`, or 1 without one."""
        for symbol in symbols:
            self._declare(symbol, self.smallest.get(symbol.name, 1))

    def require(self, size: Any) -> None:
        """Increase the lower bound of the only symbol in `size` until `size` is at least one.

        `size` must not fall when the symbol grows. Nothing changes if `size` has no symbol or several, or if no value
        of the symbol up to 2^20 suffices.
        """
        symbols = [] if is_static(size) else list(tirx.analysis.undefined_vars(size))
        if len(symbols) != 1 or self.holds(size >= 1) or not _value(size, symbols[0], _LARGEST_LEAST) >= 1:
            return
        (symbol,) = symbols
        # From the bound that is set: it may suffice where this cannot be proved.
        values = range(self.smallest.get(symbol.name, 1), _LARGEST_LEAST + 1)
        self.smallest[symbol.name] = values[bisect_left(values, 1, key=lambda value: _value(size, symbol, value))]
        self._bound(symbol, self.smallest[symbol.name])

    @contextlib.contextmanager
    def one_of_two(self) -> Iterator[Callable[[], None]]:
        """Return a context manager for importing the two branches of a condition, of which a run executes only one.

        Within the block, import the first branch, call the function that `with` yields, and import the second branch.
        Each branch starts with the lower bounds from before the block. After the block, a symbol's bound is the smaller
        of the two that the branches require.
        """
        before = dict(self.smallest)
        halves: list[dict[str, int]] = []

        def end_half() -> None:
            halves.append(self.smallest)
            self.smallest = dict(before)
            for symbol in self._symbols:
                if halves[-1].get(symbol.name) != before.get(symbol.name):
                    self._bound(symbol, before.get(symbol.name, 1))

        yield end_half
        end_half()
        for symbol in self._symbols:
            least = min(half.get(symbol.name, 1) for half in halves)
            if least > self.smallest.get(symbol.name, 1):
                self.smallest[symbol.name] = least
                self._bound(symbol, least)

    def _bound(self, symbol: tirx.Var, least: int) -> None:
        self._analyzer.update(symbol, sym.ConstIntBound(least, LARGEST_SIZE), True)

    def _declare(self, symbol: tirx.Var, least: int) -> None:
        self._symbols.append(symbol)
        self._analyzer.update(symbol, sym.ConstIntBound(least, LARGEST_SIZE))

    def new_symbol(self, size: Any) -> tirx.Var:
        """Return a new symbol that stands for the expression `size`, which must not be negative."""
        symbol = self.unknown_size()
        self._expressions.bind(symbol, self.expression(size))
        return symbol

    def unknown_size(self) -> tirx.Var:
        """Return a new symbol for a size, zero or more, that only a run knows."""
        self._new_symbols += 1
        symbol = tirx.Var(f"size_{self._new_symbols}", "int64")
        self._declare(symbol, 0)
        return symbol

    def limit(self, symbol: tirx.Var, most: int) -> None:
        """Declare that a symbol that `unknown_size` returned is at most `most`."""
        self._analyzer.update(symbol, sym.ConstIntBound(0, most), True)

    def expression(self, size: Any) -> Any:
        """Return a size with each symbol that `new_symbol` returned replaced by its expression."""
        return self._expressions.simplify(size) if self._new_symbols and not is_static(size) else size

    def shape(self, dims: Sequence[Any]) -> Sizes:
        """Return an int64 vector, known at import, whose elements are the simplified `dims`."""
        return Sizes(_objects((self._simple(dim) for dim in dims), (len(dims),)), "int64")

    def are_equal(self, a: Any, b: Any) -> bool:
        """Whether two sizes are provably equal."""
        if is_static(a) and is_static(b):
            return int(a) == int(b)
        return bool(self._analyzer.can_prove_equal(_size(a), _size(b)))

    def holds(self, condition: Any) -> bool:
        """Whether a condition on sizes is provable."""
        return condition if isinstance(condition, bool) else bool(self._analyzer.can_prove(condition))

    def simplify(self, size: Any) -> Any:
        """Return a size in its simplest form; an int if that is a number."""
        return self._simple(size)

    def quotient(self, dims: Sequence[Any], parts: Sequence[Any]) -> Any:
        """Return the product of `dims` divided by the product of `parts`; factors that both have cancel out.

        The division must leave no remainder.
        """
        numerator, denominator = list(dims), []
        for part in parts:
            same = next((index for index, dim in enumerate(numerator) if self.are_equal(dim, part)), None)
            if same is None:
                denominator.append(part)
            else:
                del numerator[same]
        above = self._product(numerator)
        below = self._product(denominator)
        if isinstance(above, int) and isinstance(below, int):
            return above // below
        return self._simple(tirx.floordiv(_size(above), _size(below)))

    def evaluate(self, node: onnx.NodeProto, operands: Sequence[Sizes | None], opset: int) -> list[Sizes]:
        """Return the results of a node whose operands are `operands`, None where one is absent.

        Raises NotEvaluatedError for an operator that cannot be evaluated on these operands.
        """
        present = [item for item in operands if item is not None]
        if sum(item.elements.size for item in present) > _LARGEST:
            raise NotEvaluatedError
        if node.op_type in _MOVING:
            return self._move(node, operands, opset)
        if node.op_type == "Cast":
            to = next(attribute.i for attribute in node.attribute if attribute.name == "to")
            return [self._cast(present[0], str(onnx.helper.tensor_dtype_to_np_dtype(to)))]
        if node.op_type == "Where":
            return [self._where(*present)]
        if node.op_type in _REDUCING:
            return [self._reduce(node, operands)]
        if node.op_type in _ELEMENTWISE:
            combine, is_condition = _ELEMENTWISE[node.op_type]
            dtype = "bool" if is_condition else present[0].dtype
            arrays = np.broadcast_arrays(*(item.elements for item in present))
            elements = [
                reduce(lambda a, b: combine(self, a, b), column) if len(column) > 1 else combine(self, column[0], None)
                for column in zip(*(array.reshape(-1).tolist() for array in arrays), strict=True)
            ]
            return [Sizes(_objects(elements, arrays[0].shape), dtype)]
        raise NotEvaluatedError

    def _simple(self, size: Any) -> Any:
        if is_static(size):
            return int(size)
        size = self._analyzer.simplify(_size(size))
        return int(size) if is_static(size) else size

    def _product(self, factors: Sequence[Any]) -> Any:
        return reduce(lambda a, b: self._simple(a * b), factors, 1)

    def _move(self, node: onnx.NodeProto, operands: Sequence[Sizes | None], opset: int) -> list[Sizes]:
        """Run an operator that only moves elements on their positions, and put the elements in their places."""
        places_of_data = _MOVING[node.op_type] or range(len(operands))
        table: list[Any] = [0]
        feeds: dict[str, Array] = {}
        dtype = "int64"
        for place, (name, operand) in enumerate(zip(node.input, operands, strict=True)):
            if operand is None:
                continue
            if place in places_of_data:
                dtype = operand.dtype if place == min(places_of_data) else dtype
                positions = np.arange(operand.elements.size) + len(table)
                table.extend(operand.elements.reshape(-1).tolist())
                # One value may be several operands.
                feeds[name] = positions.reshape(operand.elements.shape)
            else:
                feeds[name] = operand.constant()
        try:
            results = run_reference(node, feeds, opset)
        except Exception as error:  # The reference implementation has gaps.
            raise NotEvaluatedError from error
        arrays = list(results.values())
        if any(array.size > _LARGEST for array in arrays):
            raise NotEvaluatedError
        return [
            Sizes(_objects((table[int(index)] for index in array.reshape(-1)), array.shape), dtype) for array in arrays
        ]

    def _cast(self, value: Sizes, dtype: str) -> Sizes:
        kind = np.dtype(dtype).kind
        if kind not in "iuf":
            raise NotEvaluatedError

        def cast(item: Any) -> Any:
            if not _is_symbolic(item):
                return np.asarray(item).astype(dtype).item()
            if kind == "f":
                return item if isinstance(item, Quotient) else Quotient(item, Fraction(1))
            return self._whole(item, _floor) if isinstance(item, Quotient) else item

        return Sizes(_objects(map(cast, value.elements.reshape(-1)), value.elements.shape), dtype)

    def _whole(self, item: Quotient, rounding: Callable[[Any, int], Any]) -> Any:
        """A quotient of no less than zero, rounded."""
        if not self.holds(item.size >= 0) or item.factor < 0:
            raise NotEvaluatedError
        return self._simple(rounding(item.size * item.factor.numerator, item.factor.denominator))

    def _where(self, condition: Sizes, x: Sizes, y: Sizes) -> Sizes:
        choices, *values = np.broadcast_arrays(condition.constant(), x.elements, y.elements)
        flat = zip(choices.reshape(-1), *(value.reshape(-1) for value in values), strict=True)
        return Sizes(_objects((a if choice else b for choice, a, b in flat), choices.shape), x.dtype)

    def _reduce(self, node: onnx.NodeProto, operands: Sequence[Sizes | None]) -> Sizes:
        attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        data, axes = operands[0], operands[1] if len(operands) > 1 else None
        if data is None or data.elements.ndim != 1 or attributes.get("noop_with_empty_axes"):
            raise NotEvaluatedError
        places = axes.constant().reshape(-1).tolist() if axes is not None else attributes.get("axes", [0])
        if list(places) not in ([0], [-1]) or not data.elements.size:
            raise NotEvaluatedError
        combine = _REDUCING[node.op_type]
        result = reduce(lambda a, b: combine(self, a, b), data.elements.tolist())
        return Sizes(_objects([result], (1,) if attributes.get("keepdims", 1) else ()), data.dtype)

    def add(self, a: Any, b: Any) -> Any:
        """Return the sum of two elements, each a number, a symbolic size or a quotient."""
        if isinstance(a, float) and isinstance(b, float):
            return a + b
        if isinstance(a, Quotient | float) or isinstance(b, Quotient | float):
            a, b = _as_quotient(a), _as_quotient(b)
            scale = a.factor.denominator * b.factor.denominator
            return Quotient(
                self._simple(_size(a.size) * int(a.factor * scale) + _size(b.size) * int(b.factor * scale)),
                Fraction(1, scale),
            )
        return self._simple(a + b) if _is_symbolic(a) or _is_symbolic(b) else a + b

    def negate(self, a: Any) -> Any:
        """Return the negative of an element: a number, a symbolic size or a quotient."""
        return self.multiply(a, -1.0 if isinstance(a, Quotient | float) else -1)

    def multiply(self, a: Any, b: Any) -> Any:
        """Return the product of two elements, each a number, a symbolic size or a quotient.

        Raises NotEvaluatedError where float32 would round the product of a symbolic size.
        """
        if not isinstance(a, Quotient | float) and not isinstance(b, Quotient | float):
            return self._simple(a * b) if _is_symbolic(a) or _is_symbolic(b) else a * b
        if isinstance(a, float) and isinstance(b, float):
            return a * b
        a, b = _as_quotient(a), _as_quotient(b)
        return Quotient(self._simple(_size(a.size) * b.size), _exact(a.factor * b.factor))

    def divide(self, a: Any, b: Any) -> Any:
        """Return the quotient of two elements; that of two integers is rounded towards zero.

        Raises NotEvaluatedError for a divisor of zero, for a floating-point quotient that is not exact, and for
        symbolic integers unless the dividend is provably not negative and the divisor provably positive.
        """
        if isinstance(b, int | float) and b == 0:
            raise NotEvaluatedError
        if isinstance(a, float) and isinstance(b, float):
            return float(np.float32(a) / np.float32(b))
        if isinstance(a, Quotient | float) or isinstance(b, Quotient | float):
            a, b = _as_quotient(a), _as_quotient(b)
            if isinstance(b.size, int) and b.size == 1:
                # float32 rounds a quotient to the same side of a whole number, unless it is a factor once more.
                factor = a.factor / b.factor
                if a.factor.denominator != 1 and factor.denominator & (factor.denominator - 1):
                    raise NotEvaluatedError
                return Quotient(a.size, factor)
            ratio = self._ratio(a.size, b.size)
            return float(_exact(ratio * a.factor / b.factor))
        if not _is_symbolic(a) and not _is_symbolic(b):
            return int(a / b) if abs(a) < 1 << 52 else self._refuse()
        if not self.holds(_size(a) >= 0) or not self.holds(_size(b) > 0):
            self.lacks_bounds = True
            raise NotEvaluatedError
        return self._simple(tirx.floordiv(_size(a), _size(b)))

    def _refuse(self) -> Any:
        raise NotEvaluatedError

    def _ratio(self, a: Any, b: Any) -> Fraction:
        """The ratio of two symbolic sizes where it is a number."""
        for above, below, invert in ((a, b, False), (b, a, True)):
            times = self._simple(tirx.floordiv(_size(above), _size(below)))
            if isinstance(times, int) and times > 0 and self.are_equal(above, self._simple(_size(below) * times)):
                return Fraction(1, times) if invert else Fraction(times)
        raise NotEvaluatedError

    def power(self, a: Any, b: Any) -> Any:
        """Return element `a` to the power of `b`, an integer from 0 to 8. Raises NotEvaluatedError for other `b`."""
        if not isinstance(b, int | float) or not 0 <= b <= _LARGEST_POWER or b % 1:
            raise NotEvaluatedError
        return reduce(self.multiply, [a] * int(b), 1.0 if isinstance(a, Quotient | float) else 1)

    def remainder(self, a: Any, b: Any) -> Any:
        """Return the remainder of two whole numbers or symbolic sizes, zero or more.

        Raises NotEvaluatedError for floating-point elements, and for a divisor that may be zero or less.
        """
        if isinstance(a, Quotient | float) or isinstance(b, Quotient | float) or not self.holds(_size(b) > 0):
            raise NotEvaluatedError
        return self._simple(tirx.floormod(_size(a), _size(b)))

    def least(self, a: Any, b: Any) -> Any:
        """Return the smaller of two whole numbers or symbolic sizes. Raises NotEvaluatedError for other elements."""
        return self._either(a, b, tirx.min)

    def greatest(self, a: Any, b: Any) -> Any:
        """Return the larger of two whole numbers or symbolic sizes. Raises NotEvaluatedError for other elements."""
        return self._either(a, b, tirx.max)

    def _either(self, a: Any, b: Any, choose: Callable[[Any, Any], Any]) -> Any:
        if isinstance(a, Quotient | float) or isinstance(b, Quotient | float):
            raise NotEvaluatedError
        for one, other in ((a, b), (b, a)):
            if self.holds(_size(one) <= _size(other)):
                return one if choose is tirx.min else other
        return self._simple(choose(_size(a), _size(b)))

    def round(self, a: Any, rounding: Callable[[Any, int], Any]) -> Any:
        """Return an element rounded to a whole number, of the same type.

        `rounding(numerator, denominator)` returns their quotient as a whole number, rounded up or down. Raises
        NotEvaluatedError for a quotient that may be negative.
        """
        if isinstance(a, Quotient):
            return Quotient(self._whole(a, rounding), Fraction(1))
        return a if isinstance(a, int) else float(rounding(*Fraction(a).as_integer_ratio()))

    def compare(self, a: Any, b: Any, relation: str) -> bool:
        """Whether `a` and `b` are in the relation `==`, `<` or `<=`.

        Raises NotEvaluatedError for a number that is no exact factor of float32, and where the relation can be neither
        proven nor refuted.
        """
        if not _is_symbolic(a) and not _is_symbolic(b):
            return bool({"==": a == b, "<": a < b, "<=": a <= b}[relation])
        if isinstance(a, Quotient | float) or isinstance(b, Quotient | float):
            a, b = _as_quotient(a), _as_quotient(b)
            scale = a.factor.denominator * b.factor.denominator
            a, b = (_size(item.size) * int(item.factor * scale) for item in (a, b))
        a, b = _size(a), _size(b)
        conditions = {
            "==": (tirx.EQ(a, b), tirx.NE(a, b)),
            "<": (a < b, a >= b),
            "<=": (a <= b, a > b),
        }
        for condition, answer in zip(conditions[relation], (True, False), strict=True):
            if self.holds(condition):
                return answer
        raise NotEvaluatedError


def _value(size: Any, symbol: tirx.Var, value: int) -> int:
    """A size where its only symbol has a value."""
    analyzer = sym.Analyzer()
    analyzer.bind(symbol, tirx.IntImm("int64", value))
    return int(analyzer.simplify(size))


def _size(item: Any) -> Any:
    return tirx.IntImm("int64", int(item)) if isinstance(item, bool | int | np.integer) else item


def _as_quotient(item: Any) -> Quotient:
    if isinstance(item, Quotient):
        return item
    if isinstance(item, float):
        return Quotient(1, _exact(Fraction(item)))
    return Quotient(item, Fraction(1))


def _exact(factor: Fraction) -> Fraction:
    """A factor that float32 multiplies sizes by exactly. Raises NotEvaluatedError for others."""
    denominator = factor.denominator
    if denominator > _LARGEST_DENOMINATOR or denominator & (denominator - 1):
        raise NotEvaluatedError
    return factor


def _floor(value: Any, divisor: int) -> Any:
    return value // divisor if isinstance(value, int) else tirx.floordiv(value, _size(divisor))


def _ceil(value: Any, divisor: int) -> Any:
    return _floor(value + (divisor - 1), divisor)


# Operators that move elements, with the operands that hold them; empty where all do.
_MOVING: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Identity", "Gather", "Slice", "Squeeze", "Unsqueeze", "Reshape", "Flatten"), (0,)),
    **dict.fromkeys(("Transpose", "Split", "Expand", "Tile", "GatherElements", "GatherND"), (0,)),
    **dict.fromkeys(("ScatterElements", "ScatterND"), (0, 2)),
    "Concat": (),
}
_REDUCING: dict[str, Callable[[SizeEvaluator, Any, Any], Any]] = {
    "ReduceMax": SizeEvaluator.greatest,
    "ReduceMin": SizeEvaluator.least,
    "ReduceProd": SizeEvaluator.multiply,
    "ReduceSum": SizeEvaluator.add,
}
# Element-wise operators, and whether their results are conditions.
_ELEMENTWISE: dict[str, tuple[Callable[[SizeEvaluator, Any, Any], Any], bool]] = {
    "Add": (SizeEvaluator.add, False),
    "Ceil": (lambda self, a, _: self.round(a, _ceil), False),
    "Div": (SizeEvaluator.divide, False),
    "Equal": (lambda self, a, b: self.compare(a, b, "=="), True),
    "Floor": (lambda self, a, _: self.round(a, _floor), False),
    "Greater": (lambda self, a, b: self.compare(b, a, "<"), True),
    "GreaterOrEqual": (lambda self, a, b: self.compare(b, a, "<="), True),
    "Less": (lambda self, a, b: self.compare(a, b, "<"), True),
    "LessOrEqual": (lambda self, a, b: self.compare(a, b, "<="), True),
    "Max": (SizeEvaluator.greatest, False),
    "Min": (SizeEvaluator.least, False),
    "Mod": (SizeEvaluator.remainder, False),
    "Mul": (SizeEvaluator.multiply, False),
    "Neg": (lambda self, a, _: self.negate(a), False),
    "Pow": (SizeEvaluator.power, False),
    "Sub": (lambda self, a, b: self.add(a, self.negate(b)), False),
    "Sum": (SizeEvaluator.add, False),
}
