"""Keeps checks of sizes apart from calls, and without tensors that are computed for them alone or are constants."""

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.compiler.passes.functions import relax_functions, rewrite_functions
from tvmflow.compiler.passes.rewrite import count_uses, sizes
from tvmflow.compiler.size_checks import check_sizes


@tvm.transform.module_pass(opt_level=0, name="CheckSizesAlone")
class CheckSizesAlone:
    """Checks the sizes of a tensor without the tensor, where nothing reads it or where it is a constant.

    The importer writes such a check where two expressions of a size must be equal. The tensor has no reader where a
    pass computes what follows it in another way, as attention does without its scores, and need not be computed then.
    It is a constant where sizes that are known make it one; TVM's virtual machine takes no check of a constant.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with such checks of shapes in the place of tensors."""
        functions = relax_functions(mod).values()
        unread = {variable for function in functions for variable in _list_unread(function)}
        if unread or any(_checks_constants(function) for function in functions):
            return rewrite_functions(_Checks(mod, unread), mod)
        return mod


@relax.transform.function_pass(opt_level=0, name="BindChecked")
class BindChecked:
    """Binds each call whose result is checked to a variable, which the check reads.

    TVM's `CanonicalizeBindings` puts the call into the check, where passes that rewrite bound calls do not see it.
    """

    def transform_function(
        self, function: relax.Function, _mod: tvm.IRModule, _context: tvm.transform.PassContext
    ) -> relax.Function:
        """Return the function with such variables."""
        blocks = function.body.blocks if isinstance(function.body, relax.SeqExpr) else []
        if not any(map(_checks_call, [binding for block in blocks for binding in block.bindings])):
            return function
        blocks = [type(block)(_with_bound_calls(block)) for block in blocks]
        body = relax.SeqExpr(blocks, function.body.body)
        return relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)


def _checks_call(binding: relax.Binding) -> bool:
    return isinstance(binding, relax.MatchCast) and isinstance(binding.value, relax.Call)


def _with_bound_calls(block: relax.BindingBlock) -> list[relax.Binding]:
    """The bindings of a block, with a binding for each call in a check."""
    bindings: list[relax.Binding] = []
    for binding in block.bindings:
        if _checks_call(binding):
            kind = relax.DataflowVar if isinstance(block, relax.DataflowBlock) else relax.Var
            bindings.append(relax.VarBinding(kind("checked", binding.value.ty), binding.value))
            binding = relax.MatchCast(binding.var, bindings[-1].var, binding.ty)
        bindings.append(binding)
    return bindings


def _checks_constants(function: relax.Function) -> bool:
    bindings = (binding for block in function.body.blocks for binding in block.bindings)
    return any(_is_check(binding) and isinstance(binding.value, tvm.ir.GenericConst) for binding in bindings)


def _is_check(binding: relax.Binding) -> bool:
    """Whether a binding checks the sizes of a tensor of its block."""
    return (
        isinstance(binding, relax.MatchCast)
        and isinstance(binding.ty, relax.TensorType)
        and isinstance(binding.var, relax.DataflowVar)
    )


def _list_unread(function: relax.Function) -> list[relax.Var]:
    """List the variables of checked tensors that nothing but such a check reads."""
    uses = count_uses(function)
    unread: list[relax.Var] = []
    for block in reversed(function.body.blocks):
        for binding in reversed(block.bindings):
            if _is_check(binding) and not uses[binding.var]:
                unread.append(binding.var)
                if isinstance(binding.value, relax.Var):
                    uses[binding.value] -= 1
    return unread


@mutator
class _Checks(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule, unread: set[relax.Var]) -> None:
        super().__init__(mod)
        self._unread = unread
        # The tensors behind checks that are left out.
        self._sources: dict[relax.Var, relax.Expr] = {}

    def visit_match_cast_(self, binding: relax.MatchCast) -> None:
        """Check a shape instead of a tensor that nothing reads or that is a constant."""
        source = self._sources.get(binding.value, binding.value)
        is_constant = _is_check(binding) and isinstance(source, tvm.ir.GenericConst)
        if not is_constant and binding.var not in self._unread:
            super().visit_match_cast_(binding)
            return
        self._sources[binding.var] = source
        shape, expected = sizes(source), binding.ty.shape
        if shape is not None and isinstance(expected, relax.ShapeExpr):
            check_sizes(self.builder_, shape, expected.values)

    def visit_dataflow_var_(self, op: relax.DataflowVar) -> relax.Expr:
        """Return the constant whose sizes the variable checks, or else the variable."""
        source = self._sources.get(op)
        return source if isinstance(source, tvm.ir.GenericConst) else super().visit_dataflow_var_(op)
