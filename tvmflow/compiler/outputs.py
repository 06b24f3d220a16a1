"""Tells whether each call of a lowered model returns its outputs in memory that nothing else uses."""

from typing import TypeGuard

import tvm
from tvm import relax

from tvmflow.compiler.passes.views import CALL_TIR, is_reshape


def are_fresh(lowered: tvm.IRModule) -> bool:
    """Return whether every output of `main` and of the variants is written anew by each call.

    An output that is an input, a constant, a view of either, or the same tensor as another output is not fresh; neither
    is one that control flow returns, as it may be any of these.
    """
    return all(
        _returns_fresh(function, lowered)
        for _, function in lowered.functions_items()
        if isinstance(function, relax.Function) and "global_symbol" in (function.attrs or {})
    )


def _returns_fresh(function: relax.Function, module: tvm.IRModule) -> bool:
    values = {binding.var: binding.value for block in function.body.blocks for binding in block.bindings}

    def source(expression: relax.Expr) -> relax.Expr:
        """The expression whose memory this one is."""
        while True:
            value = values.get(expression)
            if isinstance(value, relax.Var):
                expression = value
            elif _is_call(value) and is_reshape(module[value.args[0]], unknown=True):
                # TVM replaces a function that only reshapes by a view.
                expression = value.args[1][0]
            else:
                return expression

    def is_written(expression: relax.Expr) -> bool:
        """Whether it is the result, or one of the results, of a function that writes to memory of its own."""
        value = values.get(expression)
        return _is_call(values.get(value.tuple_value) if isinstance(value, relax.TupleGetItem) else value)

    result = source(function.body.body)
    value = values.get(result, result)
    outputs = [source(item) for item in value.fields] if isinstance(value, relax.Tuple) else [result]
    return len(set(outputs)) == len(outputs) and all(map(is_written, outputs))


def _is_call(value: relax.Expr | None) -> TypeGuard[relax.Call]:
    return isinstance(value, relax.Call) and value.op == CALL_TIR
