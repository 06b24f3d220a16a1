"""Makes reshapes views of their tensors, where TVM cannot prove that a function is one."""

from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.s_tir import SBlockRealize
from tvm.tirx import PrimFunc

from tvmflow.compiler.annotations import RESHAPE
from tvmflow.compiler.passes.functions import rewrite_functions
from tvmflow.compiler.passes.rewrite import count_uses

CALL_TIR = tvm.ir.Op.get("relax.call_tir")


@tvm.transform.module_pass(opt_level=0, name="ViewReshapes")
class ViewReshapes:
    """Replaces calls of functions with the attribute `RESHAPE` by reshapes, which copy nothing.

    TVM's `RewriteDataflowReshape` does that where it proves that a function copies a tensor in its order, which it
    seldom does for free sizes, and for no result of a dataflow block, which would share its memory with other tensors.
    Here such a result is a view of what a function has written and nothing else reads.
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
        value: Any = binding.value
        is_call = isinstance(value, relax.Call) and value.op == CALL_TIR
        if is_call and RESHAPE in (self.builder_.get()[value.args[0]].attrs or {}):
            # Sizes that the types of tensors do not give may follow the tensor.
            source, *_ = value.args[1].fields if isinstance(value.args[1], relax.Tuple) else [value.args[1]]
            if isinstance(binding.var, relax.DataflowVar) or source in self._read_once:
                reshape = relax.op.reshape(self.visit_expr(source), value.ty.shape)
                binding = relax.VarBinding(binding.var, reshape)
        super().visit_var_binding_(binding)


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
