"""The engine of the canonicalisation passes: it applies rules, each of which replaces a call, until none applies."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.arrays import Array
from tvmflow.compiler.operators.common import called_operator, numbers_of
from tvmflow.compiler.passes.functions import relax_functions

# Replaces a call, or an element of the tuple that a call returned; None where the rule does not apply.
Rule = Callable[["Rewriter", Any], relax.Expr | None]

# The key of the rules for elements of tuples.
ELEMENT = "element"
# The operators that make whole numbers or truth values of numbers, which may change all at once.
_ROUNDING = {
    *("ceil", "equal", "floor", "floor_divide", "floor_mod", "greater", "greater_equal", "less", "less_equal", "mod"),
    *("not_equal", "quantize", "round", "sign", "trunc"),
}
# The operators whose results are near to each other where their operands are.
_STEADY = {
    *("abs", "add", "astype", "broadcast_to", "clip", "concat", "divide", "expand_dims", "flip", "maximum", "minimum"),
    *("multiply", "negative", "permute_dims", "reshape", "squeeze", "strided_slice", "subtract", "take", "where"),
}
# The operators that only give a tensor another shape.
VIEWS = ("relax.reshape", "relax.squeeze", "relax.expand_dims")
# The most times that rules apply to one expression, and that a pass goes through a module.
_MOST = 20
# Numbers near one lose no digit that matters when a number up to this is added to them and subtracted again.
LARGEST_SHIFT = 256.0
# Products of numbers up to this do not overflow in float32.
_LARGEST_FACTOR = 2.0**60


@mutator
class Rewriter(PyExprMutator):  # type: ignore[misc]
    """Visits a function in the order of its bindings and applies the rules for each call's operator.

    The keys of `rules` are operators' names without `relax.`, or `ELEMENT` for elements of tuples. A rule gets this
    rewriter and an expression whose operands are already rewritten. It inspects and emits expressions by the methods
    below, and returns the replacement, or None where it does not apply. A replacement of another rank is not taken.
    """

    def __init__(self, mod: tvm.IRModule, rules: Mapping[str, Sequence[Rule]]) -> None:
        super().__init__(mod)
        self.has_changed = False
        self._rules = rules
        self._function: relax.Function | None = None
        self._uses: Counter[relax.Var] | None = None
        self._bound: relax.Var | None = None
        self._rounded: set[relax.Var] | None = None
        self._casts: dict[relax.Var, relax.Expr] = {}

    def visit_match_cast_(self, binding: relax.MatchCast) -> None:
        """Remember the tensor whose sizes a binding checks and names."""
        if not isinstance(binding.var, relax.DataflowVar) or not isinstance(binding.ty, relax.TensorType):
            super().visit_match_cast_(binding)
            return
        value = self.visit_expr(binding.value)
        variable = self.builder_.match_cast(value, binding.ty)
        self._casts[variable] = value
        self.set_var_remap(binding.var, variable)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Remember the variable whose value is visited."""
        self._bound = binding.var
        super().visit_var_binding_(binding)

    def rewrite(self, function: relax.Function) -> relax.Function:
        """Return the function after one traversal, without bindings that nothing reads.

        The rules apply to each expression until none does, at most 20 times. `has_changed` says whether any did.
        """
        self.has_changed = False
        self._function, self._uses, self._rounded = function, None, None
        result = self.visit_expr(function)
        return relax.analysis.remove_all_unused(result) if self.has_changed else function

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Return a call with the rules applied: each time the first that applies, until none does."""
        return self._apply(super().visit_call_(op))

    def visit_tuple_getitem_(self, op: relax.TupleGetItem) -> relax.Expr:
        """Return an element of a tuple with the rules applied: each time the first that applies, until none does."""
        return self._apply(super().visit_tuple_getitem_(op))

    def _apply(self, expr: relax.Expr) -> relax.Expr:
        for _ in range(_MOST):
            replacement = self._apply_once(expr)
            if replacement is None:
                return expr
            self.has_changed = True
            expr = replacement
        return expr

    def _apply_once(self, expr: relax.Expr) -> relax.Expr | None:
        is_element = isinstance(expr, relax.TupleGetItem)
        name = ELEMENT if is_element else called_operator(expr).removeprefix("relax.")
        for rule in self._rules.get(name, ()):
            replacement = rule(self, expr)
            if replacement is None:
                continue
            replacement = self.builder_.normalize(replacement)
            # A constant of one element may have more dimensions than the tensor that a rule returns without it.
            if rank(expr) in (None, rank(replacement)):
                return replacement
        return None

    def emit(self, expr: relax.Expr) -> relax.Expr:
        """Apply the rules to a new expression and return a variable bound to the result.

        A result that is no call and no element of a tuple, such as a constant, is returned itself.
        """
        expr = self._apply(self.builder_.normalize(expr))
        return self.builder_.emit(expr) if isinstance(expr, relax.Call | relax.TupleGetItem) else expr

    def behind(self, expr: relax.Expr) -> relax.Expr:
        """Return the expression that a variable is bound to; other expressions and parameters stay as they are."""
        while isinstance(expr, relax.Var):
            value = self.lookup_binding(expr)
            if value is None:
                return expr
            expr = value
        return expr

    def call(self, expr: relax.Expr, *names: str) -> relax.Call | None:
        """Return the call that an expression is, or is bound to, if its operator is one of `names`; else None.

        The names are without `relax.`.
        """
        expr = self.behind(expr)
        return expr if called_operator(expr).removeprefix("relax.") in names else None

    def constant(self, expr: relax.Expr) -> Array | None:
        """Return the value of a constant, or of a variable bound to one; None for other expressions."""
        expr = self.behind(expr)
        return numbers_of(expr) if isinstance(expr, tvm.ir.GenericConst) else None

    def scalar(self, expr: relax.Expr) -> float | None:
        """Return the number that a constant of one element holds, whatever its rank; None for other expressions."""
        value = self.constant(expr)
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None

    def same(self, a: relax.Expr, b: relax.Expr) -> bool:
        """Whether two expressions are the same variable or constant, after aliases of variables are resolved."""
        a, b = self._root(a), self._root(b)
        return bool(a.same_as(b))

    def _root(self, expr: relax.Expr) -> relax.Expr:
        while isinstance(expr, relax.Var):
            value = self.lookup_binding(expr)
            if not isinstance(value, relax.Var | tvm.ir.GenericConst):
                return expr
            expr = value
        return expr

    def used_once(self, expr: relax.Expr, times: int = 1) -> bool:
        """Whether at most one expression reads this one, or `times` of them, so that they may be merged."""
        if not isinstance(expr, relax.Var):
            return True
        if self._uses is None:
            self._uses = count_uses(self._function)
        return self._uses[expr] <= times

    def is_rounded(self) -> bool:
        """Whether the value that is visited becomes whole numbers or truth values, maybe after steady operators.

        A difference in its last digit may then make a difference of one.
        """
        if self._rounded is None:
            self._rounded = _rounded_values(self._function)
        return self._bound in self._rounded

    def before_casts(self, expr: relax.Expr) -> relax.Expr:
        """Return the expression that a variable is an alias of, or the same tensor before its sizes got other names."""
        expr = self._root(expr)
        while expr in self._casts:
            expr = self._root(self._casts[expr])
        return expr


def count_uses(function: relax.Function | None) -> Counter[relax.Var]:
    """Count, for each variable, the expressions of a function that read it."""
    uses: Counter[relax.Var] = Counter()
    pending = [] if function is None else [function.body]
    while pending:
        for child in _children(pending.pop()):
            if isinstance(child, relax.Var):
                uses[child] += 1
            else:
                pending.append(child)
    return uses


def _rounded_values(function: relax.Function | None) -> set[relax.Var]:
    """The variables of a function of which an operator makes whole numbers or truth values, maybe after others."""
    rounded: set[relax.Var] = set()
    bindings = [binding for block in function.body.blocks for binding in block.bindings] if function is not None else []
    for binding in reversed(bindings):
        name = called_operator(binding.value).removeprefix("relax.")
        becomes_whole = name == "astype" and not dtype(binding.value).startswith(("float", "bfloat"))
        if name in ("add", "subtract"):
            constants = [item for item in binding.value.args if isinstance(item, tvm.ir.GenericConst)]
            becomes_whole = any(rounds(numbers_of(item)) for item in constants)
        if name in _ROUNDING or becomes_whole or (binding.var in rounded and name in _STEADY):
            parts = [
                part
                for item in binding.value.args
                for part in (item.fields if isinstance(item, relax.Tuple) else [item])
            ]
            rounded.update(part for part in parts if isinstance(part, relax.Var))
        elif binding.var in rounded and isinstance(binding.value, relax.Var):
            rounded.add(binding.value)
    return rounded


def _children(expr: Any) -> list[Any]:
    if isinstance(expr, relax.Call):
        return list(expr.args)
    if isinstance(expr, relax.Tuple):
        return list(expr.fields)
    if isinstance(expr, relax.TupleGetItem):
        return [expr.tuple_value]
    if isinstance(expr, relax.SeqExpr):
        return [expr.body, *(binding.value for block in expr.blocks for binding in block.bindings)]
    if isinstance(expr, relax.If):
        return [expr.cond, expr.true_branch, expr.false_branch]
    return [expr.body] if isinstance(expr, relax.Function) else []


def rewriting(name: str, rules: Mapping[str, Sequence[Rule]]) -> tvm.transform.Pass:
    """Return the pass `name`, which applies rules to every Relax function of a module.

    It goes through the module until nothing changes, at most 20 times.
    """

    def transform(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        for _ in range(_MOST):
            rewriter = Rewriter(mod, rules)
            has_changed = False
            for variable, function in relax_functions(mod).items():
                rewriter.builder_.update_func(variable, rewriter.rewrite(function))
                has_changed = has_changed or rewriter.has_changed
            if not has_changed:
                return mod
            mod = rewriter.builder_.get()
        return mod

    return tvm.transform.module_pass(transform, opt_level=0, name=name)


def sizes(expr: relax.Expr) -> list[Any] | None:
    """Return the dimensions of a tensor, numbers or symbols; None where its shape is unknown."""
    ty = expr.ty
    return list(ty.shape.values) if isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr) else None


def static_sizes(expr: relax.Expr) -> list[int] | None:
    """Return the dimensions of a tensor if all are constant; else None."""
    dims = sizes(expr)
    if dims is None or not all(isinstance(dim, tvm.tirx.IntImm) for dim in dims):
        return None
    return [int(dim) for dim in dims]


def rank(expr: relax.Expr) -> int | None:
    """Return the number of dimensions of a tensor; None where it is unknown."""
    return int(expr.ty.ndim) if isinstance(expr.ty, relax.TensorType) and expr.ty.ndim >= 0 else None


def dtype(expr: relax.Expr) -> str:
    """Return the name of a tensor's element type, such as `float32`; empty where it is unknown."""
    return str(expr.ty.dtype) if isinstance(expr.ty, relax.TensorType) and expr.ty.dtype is not None else ""


def by_channel(value: Array, dims: int, channel: int, extent: int) -> Array | None:
    """Return a constant that broadcasts against a tensor as float32 values, one for each of the tensor's channels.

    The tensor has `dims` dimensions, and `extent` channels along dimension `channel`. Returns None where the constant
    varies along another dimension, has another number of channels, or is not float32.
    """
    if value.ndim > dims or value.dtype != np.float32:
        return None
    shape = (1,) * (dims - value.ndim) + value.shape
    if any(size != 1 for place, size in enumerate(shape) if place != channel) or shape[channel] not in (1, extent):
        return None
    return np.broadcast_to(value.reshape(-1), (extent,)).astype("float32")


def rounds(value: Array) -> bool:
    """Whether a constant is one large number: what it is added to is rounded, which models do on purpose."""
    return value.size > 0 and abs(float(value.flat[0])) > LARGEST_SHIFT and bool((value == value.flat[0]).all())


def merge_constants(operator: str, one: Array, other: Array) -> Array | None:
    """Return the sum (`add`) or the product (`multiply`) of two float32 constants that a tensor meets in turn.

    Returns None where the tensor may change otherwise in two steps: a large summand rounds it, and a large factor may
    take it beyond the numbers of float32.
    """
    if operator == "add":
        return None if rounds(one) or rounds(other) else one + other
    are_moderate = all((np.abs(value) <= _LARGEST_FACTOR).all() for value in (one, other))
    return one * other if are_moderate else None
