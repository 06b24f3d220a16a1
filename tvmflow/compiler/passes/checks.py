"""Keeps checks of sizes without the tensors that are computed for them alone."""

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.compiler.passes.functions import relax_functions, rewrite_functions
from tvmflow.compiler.passes.rewrite import count_uses, sizes
from tvmflow.compiler.size_checks import check_sizes


@tvm.transform.module_pass(opt_level=0, name="CheckSizesAlone")
class CheckSizesAlone:
    """Checks the sizes of a tensor that nothing reads without the tensor, so that it need not be computed.

    The importer writes such a check where two expressions of a size must be equal. The tensor has no reader where a
    pass computes what follows it in another way, as attention does without its scores.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with such checks of shapes in the place of tensors."""
        unread = {variable for function in relax_functions(mod).values() for variable in _list_unread(function)}
        return rewrite_functions(_Checks(mod, unread), mod) if unread else mod


def _list_unread(function: relax.Function) -> list[relax.Var]:
    """List the variables of checked tensors that nothing but such a check reads."""
    uses = count_uses(function)
    unread: list[relax.Var] = []
    for block in reversed(function.body.blocks):
        for binding in reversed(block.bindings):
            is_check = isinstance(binding, relax.MatchCast) and isinstance(binding.ty, relax.TensorType)
            if is_check and isinstance(binding.var, relax.DataflowVar) and not uses[binding.var]:
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
        """Check a shape instead of a tensor that nothing reads."""
        if binding.var not in self._unread:
            super().visit_match_cast_(binding)
            return
        source = self._sources.get(binding.value, binding.value)
        self._sources[binding.var] = source
        shape, expected = sizes(source), binding.ty.shape
        if shape is not None and isinstance(expected, relax.ShapeExpr):
            check_sizes(self.builder_, shape, expected.values)
