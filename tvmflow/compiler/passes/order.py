"""Puts the bindings that give sizes their values before those that read these sizes."""

from collections.abc import Iterator, Sequence
from typing import Any

import tvm
from tvm import relax

from tvmflow.compiler.size_checks import parameter_symbols


@relax.transform.function_pass(opt_level=0, name="BindSizesFirst")
class BindSizesFirst:
    """Orders the bindings of each dataflow block so that a size has its value before anything reads it.

    A match_cast gives a size that only a run knows its value. TVM's `FuseOps` orders bindings by the tensors that they
    read, and may put one that reads nothing but sizes before the match_cast.
    """

    def transform_function(
        self, function: relax.Function, _mod: tvm.IRModule, _context: tvm.transform.PassContext
    ) -> relax.Function:
        """Return the function with its bindings in that order; those that need not move stay in theirs."""
        if not isinstance(function.body, relax.SeqExpr):
            return function
        available = {*function.params, *parameter_symbols(function)}
        blocks = []
        for block in function.body.blocks:
            bindings = _ordered(block.bindings, available) if isinstance(block, relax.DataflowBlock) else block.bindings
            blocks.append(relax.DataflowBlock(bindings) if isinstance(block, relax.DataflowBlock) else block)
            for binding in bindings:
                available.update(_defined(binding))
        if all(old.same_as(new) for old, new in zip(function.body.blocks, blocks, strict=True)):
            return function
        body = relax.SeqExpr(blocks, function.body.body)
        return relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)


def _ordered(bindings: Sequence[Any], available: set[Any]) -> list[Any]:
    """The bindings, each after those that it reads; as they are where there is no such order."""
    available = set(available)
    waiting: list[tuple[Any, set[Any]]] = []
    ordered: list[Any] = []

    def place(binding: Any) -> None:
        ordered.append(binding)
        available.update(_defined(binding))

    for binding in bindings:
        waiting.append((binding, set(_read(binding))))
        while (ready := next((item for item in waiting if item[1] <= available), None)) is not None:
            waiting.remove(ready)
            place(ready[0])
    return ordered if not waiting else list(bindings)


def _defined(binding: Any) -> Iterator[Any]:
    """The variable of a binding, and the sizes that it gives their values."""
    yield binding.var
    if isinstance(binding, relax.MatchCast):
        yield from (size for size in _sizes(binding.ty) if isinstance(size, tvm.ir.Var))


def _read(binding: Any) -> Iterator[Any]:
    """The variables and sizes that a binding reads."""
    value = binding.value
    yield from relax.analysis.free_vars(value)
    types = [binding.ty] if isinstance(binding, relax.MatchCast) else getattr(value, "ty_args", ())
    own = set(_defined(binding))
    for size in (size for ty in types for size in _sizes(ty)):
        if size not in own:
            yield from tvm.tirx.analysis.undefined_vars(size, [])


def _sizes(ty: Any) -> Iterator[Any]:
    """The sizes in the type of a tensor, a shape or a tuple of such."""
    if isinstance(ty, relax.TupleType):
        for field in ty.fields:
            yield from _sizes(field)
    elif isinstance(ty, relax.ShapeType):
        yield from ty.values or ()
    elif isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr):
        yield from ty.shape.values
