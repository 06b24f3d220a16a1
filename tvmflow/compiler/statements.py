"""Helpers for passes over TIR: functions of a module, terms of a condition, variables, and statements that may run."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock
from tvm.tirx import For, ForKind, PrimFunc, SeqStmt

_renew = tvm_ffi.get_global_func("s_tir.RenewDefs")
_IF_THEN_ELSE = tvm.ir.Op.get("prim.if_then_else")


def map_functions(mod: tvm.IRModule, change: Callable[[PrimFunc], PrimFunc]) -> tvm.IRModule:
    """Return a module with `change` applied to each TIR function; others stay."""
    functions = {
        variable: change(function) if isinstance(function, PrimFunc) else function
        for variable, function in mod.functions_items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs)


def with_body(block: SBlock, body: Any, buffers: Sequence[Any] = ()) -> SBlock:
    """Return a block with another body, which allocates `buffers` as well."""
    fields = (block.iter_vars, block.reads, block.writes, block.name_hint, body, block.init)
    return SBlock(*fields, [*block.alloc_buffers, *buffers], block.match_buffers, block.annotations)


def with_loop_body(loop: For, body: Any) -> For:
    """Return a loop with another body."""
    return For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations)


def without_annotation(loop: For, name: str) -> For:
    """Return a loop without the annotation `name`."""
    annotations = {key: value for key, value in loop.annotations.items() if key != name}
    return For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, loop.thread_binding, annotations)


def is_choice(expr: Any) -> bool:
    """Whether an expression computes one of two values, by a condition (`if_then_else`)."""
    return isinstance(expr, tvm.ir.Call) and bool(expr.op.same_as(_IF_THEN_ELSE))


def terms(condition: Any) -> list[Any]:
    """Return the terms of a conjunction."""
    if isinstance(condition, tirx.And):
        return [*terms(condition.a), *terms(condition.b)]
    return [condition]


def is_one_of(node: Any, nodes: Iterable[Any]) -> bool:
    """Whether a node, such as a buffer, is one of `nodes` itself: an equal one is another."""
    return any(node.same_as(item) for item in nodes)


def uses(expr: Any, *variables: tirx.Var) -> bool:
    """Whether any of the variables occurs in an expression."""
    return any(item.same_as(variable) for item in tirx.analysis.undefined_vars(expr) for variable in variables)


def loop_variables(statement: Any) -> list[tirx.Var]:
    """Return the variables of all loops in a statement."""
    variables: list[tirx.Var] = []
    tvm_ffi.structural_walk(statement, (For, lambda loop: variables.append(loop.loop_var)))
    return variables


def replace_variables(node: Any, values: Mapping[Any, Any]) -> Any:
    """Return an expression or a statement with `values` in the place of the variables that are its keys."""
    return tvm_ffi.structural_map(node, (tirx.Var, lambda name: values.get(name, name)))


def summands(expr: Any, factor: int = 1) -> Iterator[tuple[Any, int]]:
    """Yield the terms of a sum of integers, and the constant factor of each; the term of a number is None.

    `factor` multiplies all of them.
    """
    if isinstance(expr, tirx.IntImm):
        yield None, factor * int(expr)
    elif isinstance(expr, tirx.Add | tirx.Sub):
        yield from summands(expr.a, factor)
        yield from summands(expr.b, -factor if isinstance(expr, tirx.Sub) else factor)
    elif isinstance(expr, tirx.Mul) and isinstance(expr.b, tirx.IntImm):
        yield from summands(expr.a, factor * int(expr.b))
    else:
        yield expr, factor


def reads_memory(expr: Any) -> bool:
    """Whether an expression reads an element of a tensor."""
    return tvm_ffi.structural_walk(expr, (tvm.ir.TensorLoad, tvm_ffi.VisitInterrupt)) is not None


def with_own_variables(statement: Any) -> Any:
    """Return a copy of a lowered statement with new variables for those that it defines.

    A variable may have only one definition in a function, so a statement that occurs twice needs such a copy.
    """
    return _renew(PrimFunc([], statement)).body


def run_if(condition: Any, statement: Any) -> For:
    """Run a statement under a condition, by a loop of at most one iteration.

    Of an `if`, TVM's simplifier would take the condition for true in its branch. Where that contradicts what it knows
    of sizes, as in a branch that never runs, it finds divisions by zero; and with conditions on several free sizes it
    takes minutes.
    """
    return For(tirx.Var("once", "int64"), tirx.const(0, "int64"), condition.astype("int64"), ForKind.SERIAL, statement)


def run_either(condition: Any, statement: Any, other: Any) -> SeqStmt:
    """Run a statement where a condition holds, and another one where it does not."""
    return SeqStmt([run_if(condition, statement), run_if(tirx.Not(condition), other)])
