"""Makes the results of functions that only reshape views of their tensors."""

import math
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.s_tir import SBlockRealize
from tvm.tirx import PrimFunc

from tvmflow.compiler.annotations import RESHAPE
from tvmflow.compiler.operators.common import are_equal
from tvmflow.compiler.passes.functions import rewrite_functions
from tvmflow.compiler.passes.rewrite import count_uses, sizes

CALL_TIR = tvm.ir.Op.get("relax.call_tir")


@tvm.transform.module_pass(opt_level=0, name="ViewReshapes")
class ViewReshapes:
    """Replaces calls of functions that copy a tensor in its order by reshapes, which copy nothing.

    TVM's `RewriteDataflowReshape` fails where TVM cannot analyse a function. Besides, it replaces no call whose result
    leaves its dataflow block, as it would share its memory with other tensors. Here such a result is a view of what a
    function has written and nothing else reads.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with these calls replaced."""
        return rewrite_functions(_Reshapes(mod), mod)


@mutator
class _Reshapes(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._read_once: set[relax.Var] = set()

    def visit_function_(self, op: relax.Function) -> relax.Function:
        """Replace the calls of a function."""
        self._read_once = results_read_once(self.builder_.get(), op)
        return super().visit_function_(op)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        source = self._copied(binding.value)
        if source is not None and (isinstance(binding.var, relax.DataflowVar) or source in self._read_once):
            reshape = relax.op.reshape(self.visit_expr(source), binding.value.ty.shape)
            binding = relax.VarBinding(binding.var, reshape)
        super().visit_var_binding_(binding)

    def _copied(self, value: Any) -> relax.Expr | None:
        """The tensor that a call copies in its order to another shape; None for other expressions."""
        if not isinstance(value, relax.Call) or value.op != CALL_TIR:
            return None
        callee, operands, *_ = value.args
        function = self.builder_.get()[callee]
        # Sizes that the types of tensors do not give may follow the tensor.
        items = operands.fields if isinstance(operands, relax.Tuple) else [operands]
        tensors = [item for item in items if isinstance(item.ty, relax.TensorType)]
        if len(tensors) != 1:
            return None
        if RESHAPE in (function.attrs or {}):
            return tensors[0]
        # The beginning of a tensor is in its order, too.
        before, after = sizes(tensors[0]), sizes(value)
        is_whole = before is not None and after is not None and are_equal(math.prod(before), math.prod(after))
        return tensors[0] if is_whole and is_reshape(function, unknown=False) else None


def results_read_once(mod: tvm.IRModule, function: relax.Function) -> set[relax.Var]:
    """Return the tensors within dataflow blocks that a TIR function writes and that one expression alone reads.

    The result of a function that may only reshape does not count: it may be a view.
    """
    uses = count_uses(function)
    bindings = [binding for block in getattr(function.body, "blocks", ()) for binding in block.bindings]
    return {
        binding.var
        for binding in bindings
        if isinstance(binding.var, relax.DataflowVar)
        and isinstance(binding.value, relax.Call)
        and binding.value.op == CALL_TIR
        and isinstance(binding.var.ty, relax.TensorType)
        and uses[binding.var] == 1
        and not is_reshape(mod[binding.value.args[0]], unknown=True)
    }


def is_reshape(function: Any, *, unknown: bool) -> bool:
    """Return whether a function copies a tensor in its order, as to another shape; `unknown` where TVM cannot tell."""
    if not isinstance(function, PrimFunc) or not isinstance(function.body, SBlockRealize):
        return False
    if RESHAPE in (function.attrs or {}):
        return True
    try:
        return bool(relax.analysis.has_reshape_pattern(function))
    except tvm.error.InternalError:
        # TVM's analysis fails on the loops of some functions, such as a convolution of free sizes.
        return unknown
