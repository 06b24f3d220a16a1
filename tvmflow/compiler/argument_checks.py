"""Leaves out the checks of arguments that only the library itself passes.

TVM begins each function with checks of every argument: its type, its shape, its strides and more, and writes a message
for each of them. That is most of the code of a small function. Most arguments are results of other functions of the
library, or its weights, and have the types that the compiler gave them. A model's inputs come from outside, and so does
the memory of its outputs: the checks of these stay.
"""

from collections import defaultdict
from collections.abc import Collection
from itertools import pairwise

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.tirx import PrimFunc

from tvmflow.compiler.annotations import CHECKED
from tvmflow.compiler.operators.common import called_operator
from tvmflow.compiler.passes.calls import called_functions
from tvmflow.compiler.passes.functions import relax_functions
from tvmflow.compiler.statements import map_functions

# TVM's mark of what a function computes, after the checks of its arguments.
_COMPUTE_SCOPE = "compute_scope"
# TVM's mark of an argument's memory: the bytes of which its address is a multiple.
_ALIGNMENT = "storage_alignment"
# The end of the part of a check's message that precedes the argument's place.
_ARGUMENT = "argument #"


def keep_checks_of_inputs(mod: tvm.IRModule, inputs: int) -> tvm.IRModule:
    """Return the module with a mark on each function that reads inputs of the model, so that the checks of them stay.

    The first `inputs` parameters of the model's functions are its inputs, and the others weights. All parameters of
    functions that other functions call, such as the branches of a condition, count as inputs.
    """
    functions = relax_functions(mod)
    called = called_functions(functions)
    places: dict[tvm.ir.GlobalVar, set[int]] = defaultdict(set)
    for variable, function in functions.items():
        outside = set(function.params if variable in called else function.params[:inputs])

        def visit(expr: relax.Expr, outside: set[relax.Var] = outside) -> None:
            if called_operator(expr) == "relax.call_tir":
                places[expr.args[0]] |= {place for place, item in enumerate(expr.args[1].fields) if item in outside}

        relax.analysis.post_order_visit(function, visit)
    marked = {variable: mod[variable].with_attr(CHECKED, sorted(items)) for variable, items in places.items() if items}
    return tvm.IRModule({**dict(mod.functions_items()), **marked}, attrs=mod.attrs)


@tvm.transform.module_pass(opt_level=0, name="DropChecks")
class DropChecks:
    """Removes the checks of all arguments but those that the attribute `CHECKED` of a function names.

    The functions are as TVM's pass MakePackedAPI leaves them.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with the functions changed."""
        return map_functions(mod, _without_checks)


def _without_checks(function: PrimFunc) -> PrimFunc:
    scopes: list[tirx.AttrStmt] = []

    def visit(statement: tirx.AttrStmt) -> tvm_ffi.WalkResult:
        if statement.attr_key == _COMPUTE_SCOPE:
            scopes.append(statement)
        return tvm_ffi.WalkResult.SKIP if scopes else tvm_ffi.WalkResult.ADVANCE

    tvm_ffi.structural_walk(function.body, (tirx.AttrStmt, visit))
    if not scopes:
        # It has no checks of arguments; its assertions are its own.
        return function
    return function.with_body(_strip(function.body, {int(place) for place in (function.attrs or {}).get(CHECKED, ())}))


def _strip(body: tirx.Stmt, places: Collection[int]) -> tirx.Stmt:
    """Return the body of a function without checks of arguments at other places than these.

    Each argument's checks are within the scope of the one before it. Such scopes can be more than Python's stack holds
    calls.
    """
    scopes: list[tuple[list[tirx.Stmt], tirx.AttrStmt]] = []
    while True:
        *statements, last = _statements(body)
        kept = [statement for statement in statements if _stays(statement, places)]
        if not isinstance(last, tirx.AttrStmt) or last.attr_key == _COMPUTE_SCOPE:
            break
        scopes.append((kept, last))
        body = last.body
    result = _joined([*kept, last])
    for before, scope in reversed(scopes):
        result = _joined([*before, tirx.AttrStmt(scope.node, scope.attr_key, scope.value, result)])
    return result


def _statements(body: tirx.Stmt) -> list[tirx.Stmt]:
    """The statements of a sequence, in which sequences may be nested."""
    return [item for part in body.seq for item in _statements(part)] if isinstance(body, tirx.SeqStmt) else [body]


def _joined(statements: list[tirx.Stmt]) -> tirx.Stmt:
    return tirx.SeqStmt(statements) if len(statements) > 1 else statements[0]


def _stays(statement: tirx.Stmt, places: Collection[int]) -> bool:
    """Whether a statement is kept: it is not a check, or it is a check of an argument at one of these places.

    A check may be under a condition.
    """
    check = statement.then_case if isinstance(statement, tirx.IfThenElse) else statement
    return not isinstance(check, tirx.AssertStmt) or _is_of_any(check, places)


def _is_of_any(check: tirx.AssertStmt, places: Collection[int]) -> bool:
    """Whether a check is of an argument at one of these places; or of the number of arguments, if places are given."""
    parts = [str(part.value) for part in check.message_parts]
    place = next((int(item) for text, item in pairwise(parts) if text.endswith(_ARGUMENT)), None)
    return place in places if place is not None else bool(places)


def take_unaligned(function: PrimFunc) -> PrimFunc:
    """Return a function, after TVM's pass MakePackedAPI, whose arguments may begin at any address.

    TVM takes the memory of each argument to be aligned to 64 bytes. Arrays of NumPy and of other libraries are not, and
    processors load vectors from other addresses as fast, unless they lie across two lines of the cache.
    """

    def unaligned(statement: tirx.AttrStmt) -> tirx.AttrStmt:
        if statement.attr_key != _ALIGNMENT:
            return statement
        return tirx.AttrStmt(statement.node, _ALIGNMENT, tirx.const(1, "int32"), statement.body)

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.AttrStmt, unaligned)))
