"""Makes reshapes views of their tensors, where TVM cannot prove that a function is one."""

from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.compiler.annotations import RESHAPE
from tvmflow.compiler.passes.functions import rewrite_functions

_CALL_TIR = tvm.ir.Op.get("relax.call_tir")


@tvm.transform.module_pass(opt_level=0, name="ViewReshapes")
class ViewReshapes:
    """Replaces calls of functions with the attribute `RESHAPE` by reshapes, which copy nothing.

    TVM's `RewriteDataflowReshape` does that where it proves that a function copies a tensor in its order, which it
    seldom does for free sizes. As there, results of a dataflow block keep memory of their own.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with these calls replaced."""
        return rewrite_functions(_Reshapes(mod), mod)


@mutator
class _Reshapes(PyExprMutator):  # type: ignore[misc]
    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        value: Any = binding.value
        is_call = isinstance(value, relax.Call) and value.op == _CALL_TIR and isinstance(binding.var, relax.DataflowVar)
        if is_call and RESHAPE in (self.builder_.get()[value.args[0]].attrs or {}):
            # Sizes that the types of tensors do not give may follow the tensor.
            source, *_ = value.args[1].fields if isinstance(value.args[1], relax.Tuple) else [value.args[1]]
            value = relax.op.reshape(self.visit_expr(source), value.ty.shape)
            binding = relax.VarBinding(binding.var, value)
        super().visit_var_binding_(binding)
