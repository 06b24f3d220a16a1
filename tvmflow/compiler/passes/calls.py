"""Calls between the Relax functions of a module, as control flow makes them, and their constant arguments."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.compiler.passes.functions import relax_functions

# What a parameter is in all calls: a constant, or None where it differs. One that is not in the table was never passed.
_Values = dict[relax.Var, "tvm.ir.GenericConst | None"]


def bind_constant_arguments(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with each parameter that is the same constant in all calls replaced by that constant.

    Branches and loops are functions that get their weights as arguments. The compiler packs only constant weights.
    """
    functions = relax_functions(mod)
    values = _constant_parameters(functions)
    places = {
        variable: [place for place, param in enumerate(function.params) if values.get(param) is None]
        for variable, function in functions.items()
    }
    if all(len(places[variable]) == len(function.params) for variable, function in functions.items()):
        return mod
    with_constants = {}
    for variable, function in functions.items():
        constants = {param: values[param] for param in function.params if values.get(param) is not None}
        with_constants[variable] = function.bind_params(constants) if constants else function
    rewritten = change_calls(with_constants, lambda call: [call.args[place] for place in places[call.op]])
    others = {var: func for var, func in mod.functions_items() if var not in functions}
    return tvm.IRModule({**others, **rewritten}, attrs=mod.attrs)


def _constant_parameters(functions: Mapping[tvm.ir.GlobalVar, relax.Function]) -> _Values:
    """The constant value of each parameter of the called functions; None for a parameter that has none."""
    calls = [call for function in functions.values() for call in calls_of(function, functions)]
    callees = {call.op for call in calls}
    values: _Values = {param: None for var, func in functions.items() if var not in callees for param in func.params}
    params = {param for function in functions.values() for param in function.params}
    has_changed = True
    while has_changed:
        has_changed = False
        for call in calls:
            for param, argument in zip(functions[call.op].params, call.args, strict=True):
                if argument in params and argument not in values:
                    continue  # It is what its own function is called with, which is not known yet.
                value = argument if isinstance(argument, tvm.ir.GenericConst) else values.get(argument)
                if param not in values:
                    values[param], has_changed = value, True
                elif values[param] is not None and not (value is not None and value.same_as(values[param])):
                    values[param], has_changed = None, True
    return values


def calls_of(function: relax.Function, functions: Mapping[tvm.ir.GlobalVar, Any]) -> Iterator[relax.Call]:
    """Yield the calls that `function` makes of any of `functions`."""
    calls: list[relax.Call] = []

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.GlobalVar) and expr.op in functions:
            calls.append(expr)

    relax.analysis.post_order_visit(function, visit)
    yield from calls


def called_functions(functions: Mapping[tvm.ir.GlobalVar, relax.Function]) -> set[tvm.ir.GlobalVar]:
    """Return those of a module's functions that others of them call: branches of conditions and bodies of loops."""
    return {call.op for function in functions.values() for call in calls_of(function, functions)}


def change_calls(
    functions: Mapping[tvm.ir.GlobalVar, relax.Function], arguments: Callable[[relax.Call], list[relax.Expr]]
) -> dict[tvm.ir.GlobalVar, relax.Function]:
    """Return functions whose parameters were changed, under new global variables, with the calls of them adapted.

    Each new variable has the type of its changed function. `arguments` returns the new arguments of a call.
    """
    variables = {}
    for variable, function in functions.items():
        variables[variable] = tvm.ir.GlobalVar(variable.name_hint)
        types = [param.ty for param in function.params]
        relax.expr._update_type(variables[variable], relax.FuncType(types, function.ret_ty, bool(function.is_pure)))
    change = _ChangeCalls(variables, arguments)
    return {variables[variable]: change.visit_expr(function) for variable, function in functions.items()}


@mutator
class _ChangeCalls(PyExprMutator):  # type: ignore[misc]
    def __init__(
        self,
        variables: Mapping[tvm.ir.GlobalVar, tvm.ir.GlobalVar],
        arguments: Callable[[relax.Call], list[relax.Expr]],
    ) -> None:
        super().__init__(None)
        self._variables, self._arguments = variables, arguments

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Change a call of one of the functions."""
        if not isinstance(op.op, tvm.ir.GlobalVar) or op.op not in self._variables:
            return super().visit_call_(op)
        arguments = [self.visit_expr(argument) for argument in self._arguments(op)]
        return relax.Call(self._variables[op.op], arguments, op.attrs, op.ty_args)
