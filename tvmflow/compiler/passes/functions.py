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
