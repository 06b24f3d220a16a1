"""Looks up the results of element-wise operators on 8-bit integers in tables.

Between two layers of a quantised model stand operators that dequantise integers, compute an activation in float32,
often in several steps, and quantise its results. Of 256 integers there are 256 results.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import relax, te

from tvmflow.arrays import Array
from tvmflow.compiler.operators.common import called_operator, numbers_of, same_shape
from tvmflow.compiler.passes import simplify
from tvmflow.compiler.passes.rewrite import Rewriter, rewriting

# TVM's fusion kind of element-wise operators: TVM fuses them with the kernel before.
_ELEMENT_WISE = {"op_pattern": 0}
_INTEGERS = {"uint8": np.arange(256, dtype="uint8"), "int8": np.arange(-128, 128, dtype="int8")}


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **simplify.FUNCTIONS,
    "log": np.log,
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "erf": np.vectorize(math.erf, otypes=["float32"]),
    "nn.relu": lambda x: np.maximum(x, x.dtype.type(0)),
    "nn.silu": lambda x: x * _sigmoid(x),
}
# Of these, one and the last quantisation take longer than a look-up. A quantisation divides.
_SLOW = frozenset(("divide", "sqrt", "exp", "log", "tanh", "sigmoid", "erf", "nn.silu", "quantize"))
_FEWEST_SLOW = 2


def tabulate_integers() -> tvm.transform.Pass:
    """Return the pass that replaces slow functions of one 8-bit integer, whose result is such an integer, by tables."""
    return rewriting("TabulateIntegers", {"quantize": (_Tables().rule,)})


class _Tables:
    def __init__(self) -> None:
        # The functions that look a result up, by name.
        self._lookups: set[str] = set()

    def rule(self, rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
        """Return the look-up that replaces a quantisation of a slow function of one 8-bit integer; None for others."""
        chain = _Chain(rewriter, self._lookups)
        source = chain.source_of_quantised(call)
        if source is None or not same_shape(source.ty.shape.values, call.ty.shape.values):
            return None
        integers = _INTEGERS[str(source.ty.dtype)]
        with np.errstate(all="ignore"):
            table = chain.evaluate(call, source, integers)
        if chain.slow < _FEWEST_SLOW:
            return None
        first = int(integers[0])

        def look_up(x: te.Tensor, results: te.Tensor) -> te.Tensor:
            return te.compute(x.shape, lambda *index: results[x[index].astype("int32") - first], name="lookup")

        result = rewriter.builder_.call_te(
            look_up, source, relax.const(table), primfunc_name_hint="lookup", primfunc_attrs=_ELEMENT_WISE
        )
        self._lookups.add(str(result.args[0].name_hint))
        return result


class _Chain:
    """The operators between an 8-bit integer and a quantisation: what they depend on, and their results."""

    def __init__(self, rewriter: Rewriter, lookups: set[str]) -> None:
        self._rewriter = rewriter
        self._lookups = lookups
        self._sources: dict[Any, relax.Expr | None] = {}
        self._results: dict[Any, Array] = {}
        # How many slow operators, and look-ups, were evaluated.
        self.slow = 0

    def source_of_quantised(self, call: relax.Call) -> relax.Expr | None:
        """Return the 8-bit integer that alone decides on the result of a quantisation; None where there is none."""
        if str(call.ty.dtype) not in _INTEGERS or not isinstance(call.ty.shape, relax.ShapeExpr):
            return None
        if any(self._rewriter.scalar(parameter) is None for parameter in call.args[1:]):
            return None
        return self._source(call.args[0])

    def _source(self, expr: relax.Expr) -> relax.Expr | None:
        """The 8-bit integer on which an expression depends, directly or through others; None for several, or others."""
        if expr not in self._sources:
            self._sources[expr] = self._find_source(expr)
        return self._sources[expr]

    def _find_source(self, expr: relax.Expr) -> relax.Expr | None:
        value = self._rewriter.behind(expr)
        if str(getattr(expr.ty, "dtype", "")) in _INTEGERS:
            earlier = None
            if called_operator(value) == "relax.quantize":
                earlier = self.source_of_quantised(value)
            elif (lookup := self._lookup(value)) is not None:
                earlier = lookup[0]
            return earlier if earlier is not None else expr
        name = called_operator(value).removeprefix("relax.")
        if name not in _FUNCTIONS and name not in ("astype", "clip", "dequantize"):
            return None
        sources = [self._source(arg) for arg in self._operands(value)]
        if not sources or sources[0] is None:
            return None
        return sources[0] if all(source is not None and source.same_as(sources[0]) for source in sources) else None

    def _operands(self, call: relax.Call) -> list[relax.Expr]:
        """The operands of a call that are no single numbers."""
        tensors = [arg for arg in call.args if isinstance(arg.ty, relax.TensorType)]
        return [arg for arg in tensors if self._rewriter.scalar(arg) is None]

    def _lookup(self, value: relax.Expr) -> tuple[relax.Expr, Array] | None:
        """The integer and the table of a look-up; None for other expressions."""
        if called_operator(value) != "relax.call_tir" or str(value.args[0].name_hint) not in self._lookups:
            return None
        # Sizes that are no dimensions of these two follow.
        source, table = value.args[1].fields[:2]
        return source, numbers_of(table)

    def evaluate(self, expr: relax.Expr, source: relax.Expr, integers: Array) -> Array:
        """Return the results of an expression for all `integers` in the place of the source."""
        if expr.same_as(source):
            return integers
        if expr not in self._results:
            self._results[expr] = self._compute(expr, source, integers)
        return self._results[expr]

    def _compute(self, expr: relax.Expr, source: relax.Expr, integers: Array) -> Array:
        constant = self._rewriter.constant(expr)
        if constant is not None:
            return np.asarray(constant).reshape(())
        call = self._rewriter.behind(expr)
        lookup = self._lookup(call)
        if lookup is not None:
            self.slow += 1
            return lookup[1]
        name = called_operator(call).removeprefix("relax.")
        self.slow += name in _SLOW
        operands: list[Any] = [
            self.evaluate(arg, source, integers) if isinstance(arg.ty, relax.TensorType) else arg for arg in call.args
        ]
        if name == "astype":
            return np.asarray(operands[0].astype(str(call.ty.dtype)))
        if name == "clip":
            low, high = (operands[0].dtype.type(float(bound.value)) for bound in operands[1:])
            return np.asarray(np.minimum(np.maximum(operands[0], low), high))
        if name == "dequantize":
            return np.asarray((operands[0].astype("float32") - operands[2].astype("float32")) * operands[1])
        if name == "quantize":
            limits = np.iinfo(str(call.ty.dtype))
            levels = np.rint(operands[0] / operands[1]) + operands[2].astype("float32")
            # As in `legalize_quantize`, what is no number becomes the smallest integer.
            levels = np.where(np.isnan(levels), limits.min, levels)
            return np.asarray(np.clip(levels, limits.min, limits.max).astype(limits.dtype))
        return np.asarray(_FUNCTIONS[name](*operands)).astype(str(call.ty.dtype))
