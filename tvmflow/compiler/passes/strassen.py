"""The pass that computes products by Strassen's algorithm where that is faster, in functions that take one item."""

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.compiler.choices import Choices
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import convolution, products
from tvmflow.compiler.operators.common import called_operator, static
from tvmflow.compiler.passes.functions import relax_functions


@tvm.transform.module_pass(opt_level=2, name="StrassenProducts")
class StrassenProducts:
    """Replaces dense layers and 1x1 convolutions by Strassen's algorithm where the cost model says that it is faster.

    Where the choices of tuning name one of the two ways for a product, that one is taken.

    The algorithm adds pairs of rows of its left operand. A NaN in one row therefore makes the other row NaN. Where one
    row has large numbers, the result of the other row has only few correct digits. The rows of one product may belong
    to several items of a batch, which a server joins from several clients, and one client's input must not change
    another's answer. After reshapes and transposes the compiler cannot tell which row belongs to which item. So the
    pass changes only functions that take a single item: all parameters are tensors with a known first dimension of 1,
    or scalars. A weight that is a parameter counts as well, so weights must be constants.
    """

    def __init__(self, machine: Machine, choices: Choices) -> None:
        self._machine = machine
        self._choices = choices

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Rewrite the Relax functions whose inputs all have 1 as their first dimension; return the module."""
        rewriter = _Rewriter(mod, self._machine, self._choices)
        for variable, function in relax_functions(mod).items():
            if takes_one_item(function):
                rewriter.builder_.update_func(variable, rewriter.visit_expr(function))
        return rewriter.builder_.get()


def takes_one_item(function: relax.Function) -> bool:
    """Whether a function takes a single item: the first dimension of each of its inputs is known to be one.

    The function's weights must be constants, so that its parameters are its inputs.
    """
    return all(
        isinstance(parameter.ty, relax.TensorType)
        and isinstance(parameter.ty.shape, relax.ShapeExpr)
        and all(static(size) == 1 for size in parameter.ty.shape.values[:1])
        for parameter in function.params
    )


@mutator
class _Rewriter(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule, machine: Machine, choices: Choices) -> None:
        super().__init__(mod)
        self._machine = machine
        self._choices = choices

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        call = super().visit_call_(op)
        multiply = {
            "relax.matmul": products.multiply_fast,
            "relax.nn.conv2d": convolution.multiply_fast,
        }.get(called_operator(op))
        product = None if multiply is None else multiply(self.builder_, call, self._machine, self._choices)
        return call if product is None else product
