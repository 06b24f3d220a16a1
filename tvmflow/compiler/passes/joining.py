"""Joins matrix products of the slices of a tensor with the same weights, as unrolled recurrent networks have them.

A product of one slice reads all weights for a few rows. One product of the whole tensor reads them once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.compiler.operators.common import called_operator, numbers_of, static
from tvmflow.compiler.passes.functions import relax_functions


@dataclass(frozen=True)
class _Slice:
    """The slice of `data` at the `place` of the dimension `axis`; `index` is the place as an expression."""

    data: relax.Var
    axis: int
    place: int
    index: relax.Expr


@dataclass
class _Group:
    """The products of slices of `data` along `axis` with the matrix `weight`."""

    data: relax.Var
    axis: int
    weight: relax.Expr
    members: list[tuple[relax.Call, _Slice]] = field(default_factory=list)

    def takes(self, piece: _Slice, weight: relax.Expr) -> bool:
        """Whether the product of a slice with a weight belongs to the group."""
        return self.axis == piece.axis and self.data.same_as(piece.data) and self.weight.same_as(weight)

    def is_worth_it(self) -> bool:
        """Whether most of the slices of the tensor are multiplied, so that little of the whole product is unused."""
        count = len({piece.place for _, piece in self.members})
        size = static(self.data.ty.shape.values[self.axis])
        return size is not None and count > 1 and 2 * count > size


@tvm.transform.module_pass(opt_level=0, name="JoinProducts")
class JoinProducts:
    """Replaces products of a tensor's slices with the same weights by slices of one product of the whole tensor."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with such products joined, where they multiply more than half of a tensor's slices."""
        joining = _Joining(mod)
        for variable, function in relax_functions(mod).items():
            joining.groups = [group for group in _find_groups(function) if group.is_worth_it()]
            if joining.groups:
                joined = relax.analysis.remove_all_unused(joining.visit_expr(function))
                joining.builder_.update_func(variable, joined)
        return joining.builder_.get()


def _find_groups(function: relax.Function) -> Iterator[_Group]:
    """Yield the groups of products of slices within each block of a function."""
    for block in function.body.blocks:
        values = {binding.var: binding.value for binding in block.bindings if isinstance(binding, relax.VarBinding)}
        groups: list[_Group] = []
        for call in values.values():
            piece = _slice_of(values.get(call.args[0])) if called_operator(call) == "relax.matmul" else None
            if piece is None or call.args[1].ty.ndim != 2:
                continue
            group = next((group for group in groups if group.takes(piece, call.args[1])), None)
            if group is None:
                group = _Group(piece.data, piece.axis, call.args[1])
                groups.append(group)
            group.members.append((call, piece))
        yield from groups


def _slice_of(expr: relax.Expr | None) -> _Slice | None:
    """The slice of a tensor, before its last dimension, that an expression takes by a constant index; else None."""
    if expr is None or called_operator(expr) != "relax.take" or expr.attrs.axis is None:
        return None
    data, index = expr.args
    if not isinstance(data, relax.Var) or not isinstance(data.ty.shape, relax.ShapeExpr):
        return None
    if not isinstance(index, tvm.ir.GenericConst) or index.ty.ndim != 0:
        return None
    axis, place = int(expr.attrs.axis) % data.ty.ndim, int(numbers_of(index).item())
    size = static(data.ty.shape.values[axis])
    is_inside = axis < data.ty.ndim - 1 and size is not None and 0 <= place < size
    return _Slice(data, axis, place, index) if is_inside else None


@mutator
class _Joining(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self.groups: list[_Group] = []
        self._products: list[tuple[_Group, relax.Var]] = []

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Replace a product of a group by a slice of the group's product."""
        for group in self.groups if called_operator(op) == "relax.matmul" else ():
            piece = next((piece for call, piece in group.members if call.same_as(op)), None)
            if piece is not None:
                return relax.op.take(self._product(group, op), piece.index, axis=group.axis)
        return super().visit_call_(op)

    def _product(self, group: _Group, call: relax.Call) -> relax.Var:
        """The variable of the product of the group's whole tensor, which the first member emits."""
        for other, product in self._products:
            if other is group:
                return product
        whole = relax.op.matmul(*map(self.visit_expr, (group.data, group.weight)), out_dtype=call.attrs.out_dtype)
        product = self.builder_.emit(whole)
        self._products.append((group, product))
        return product
