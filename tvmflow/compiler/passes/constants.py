"""Evaluates the operators whose operands are constants, and compares large constants in little time."""

import math
from collections.abc import Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from tvmflow.compiler.operators.common import static
from tvmflow.compiler.passes.constant_keys import ConstantKeys
from tvmflow.compiler.statements import replace_variables

# Constants of so many elements are compared by a sample first.
_SMALLEST_HIDDEN = 1024


@relax.transform.function_pass(opt_level=0, name="FoldConstantCalls")
class FoldConstantCalls:
    """Gives TVM's `FoldConstant` the calls of a function that it can evaluate, and no others.

    `FoldConstant` defines every operator of a function as loops, by TVM's own rules, before it looks whether the
    operands are constants: that takes as long as to lower a model.
    """

    def transform_function(
        self, function: relax.Function, _mod: tvm.IRModule, _context: tvm.transform.PassContext
    ) -> relax.Function:
        """Return the function with the results of these calls as constants."""
        calls: dict[relax.Var, relax.Expr] = {}
        if isinstance(function.body, relax.SeqExpr):
            for block in function.body.blocks:
                for binding in block.bindings if isinstance(block, relax.DataflowBlock) else ():
                    if isinstance(binding, relax.VarBinding) and _is_constant_call(binding.value, calls):
                        calls[binding.var] = binding.value
        constants = _evaluated(calls) if calls else {}
        return _with_constants(function, constants) if constants else function


@relax.transform.function_pass(opt_level=0, name="ShareResults")
class ShareResults:
    """Lets TVM's `EliminateCommonSubexpr` compute once what a function computes twice.

    TVM hashes every number of each constant that an operator reads, which takes seconds for a GB. So it gets a
    parameter in the place of each large one.
    """

    def transform_function(
        self, function: relax.Function, mod: tvm.IRModule, _context: tvm.transform.PassContext
    ) -> relax.Function:
        """Return the function without these repetitions."""
        key = ConstantKeys()
        variables: dict[int, relax.Var] = {}
        constants: dict[relax.Var, tvm.ir.GenericConst] = {}

        def replace(constant: tvm.ir.GenericConst) -> relax.Expr:
            if not isinstance(constant.ty, relax.TensorType) or math.prod(constant.value.shape) < _SMALLEST_HIDDEN:
                return constant
            variable = variables.setdefault(key(constant), relax.Var(f"constant_{len(variables)}", constant.ty))
            constants.setdefault(variable, constant)
            return variable

        body = tvm_ffi.structural_map(function.body, (tvm.ir.GenericConst, replace))
        params = [*function.params, *constants]
        changed = relax.Function(params, body, function.ret_ty, function.is_pure, function.attrs)
        variable = tvm.ir.GlobalVar("function")
        others = {other: func for other, func in mod.functions_items() if isinstance(func, tvm.tirx.PrimFunc)}
        passes = tvm.transform.Sequential([relax.transform.EliminateCommonSubexpr()])
        changed = passes(tvm.IRModule({**others, variable: changed}))[variable]
        return changed.bind_params(constants) if constants else changed


def _is_constant_call(value: relax.Expr, known: Mapping[relax.Var, Any]) -> bool:
    """Whether an expression calls an operator on constants and on variables of `known`, or is such a variable."""
    return value in known or (
        isinstance(value, relax.Call)
        and isinstance(value.op, tvm.ir.Op)
        and isinstance(value.ty, relax.TensorType)
        and isinstance(value.ty.shape, relax.ShapeExpr)
        and _is_known(value.ty.shape, known)
        and all(_is_known(item, known) for item in value.args)
    )


def _is_known(value: Any, known: Mapping[relax.Var, Any]) -> bool:
    if isinstance(value, relax.Tuple):
        return all(_is_known(item, known) for item in value.fields)
    if isinstance(value, relax.ShapeExpr):
        return all(static(size) is not None for size in value.values)
    return isinstance(value, tvm.ir.GenericConst) or static(value) is not None or value in known


def _evaluated(calls: Mapping[relax.Var, relax.Expr]) -> dict[relax.Var, tvm.ir.GenericConst]:
    """The constants that TVM makes of calls, each of which may read those before it."""
    builder = relax.BlockBuilder()
    results: dict[relax.Var, relax.Expr] = {}
    with builder.function("main", []):
        with builder.dataflow():
            for variable, value in calls.items():
                changed = replace_variables(value, results)
                results[variable] = changed if value in results else builder.emit_output(changed)
        builder.emit_func_output(relax.Tuple(list(results.values())))
    body = relax.transform.FoldConstant()(builder.get())["main"].body.body
    return {
        variable: value
        for variable, value in zip(calls, body.fields, strict=True)
        if isinstance(value, tvm.ir.GenericConst)
    }


def _with_constants(function: relax.Function, constants: Mapping[relax.Var, tvm.ir.GenericConst]) -> relax.Function:
    """Return the function with `constants` in the place of their variables."""
    blocks = [
        type(block)([binding for binding in block.bindings if binding.var not in constants])
        for block in function.body.blocks
    ]
    body = replace_variables(relax.SeqExpr(blocks, function.body.body), constants)
    return relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)
