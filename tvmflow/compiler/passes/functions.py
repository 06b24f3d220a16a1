"""The Relax functions of a module: each of them, and the module with all of them rewritten."""

from typing import Any

import tvm
from tvm import relax


def relax_functions(mod: tvm.IRModule) -> dict[tvm.ir.GlobalVar, relax.Function]:
    """Return the Relax functions of a module by their variables, in the module's order."""
    return {variable: function for variable, function in mod.functions_items() if isinstance(function, relax.Function)}


def rewrite_functions(mutator: Any, mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module with what `mutator`, which was made for the module, returns for each Relax function."""
    for variable, function in relax_functions(mod).items():
        mutator.builder_.update_func(variable, mutator.visit_expr(function))
    return mutator.builder_.get()


def variables_of_outputs(function: relax.Function) -> set[relax.Var]:
    """Return the variables whose values a function returns."""
    values = {binding.var: binding.value for block in function.body.blocks for binding in block.bindings}
    pending, outputs = [function.body.body], set()
    while pending:
        value = pending.pop()
        if isinstance(value, relax.Var):
            outputs.add(value)
            pending.append(values.get(value))
        elif isinstance(value, relax.Tuple):
            pending.extend(value.fields)
        elif isinstance(value, relax.TupleGetItem):
            pending.append(value.tuple_value)
    return outputs
