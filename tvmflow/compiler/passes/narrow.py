"""Rewrites convolutions and products to compute in 16-bit floats; each operand is rounded once for all its readers."""

from typing import Any, Protocol

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.compiler.operators.common import called_operator, is_float32, static
from tvmflow.compiler.operators.geometry import has_constant_weights
from tvmflow.compiler.passes.functions import relax_functions

# The attribute of functions that round a tensor to the type. A pass before this one may have emitted calls of them.
ROUNDING = "tvmflow.rounding"


class Numbers(Protocol):
    """A 16-bit float type, bfloat16 or float16, and how convolutions and matrix products compute in it."""

    def operands(self, call: relax.Call) -> list[relax.Expr]:
        """Return the operands of a call that are to be rounded; constant weights are not among them.

        The list is empty if the call stays in float32.
        """

    def conv2d(self, builder: relax.BlockBuilder, call: relax.Call, data: relax.Expr) -> relax.Expr:
        """Return a float32 expression for the convolution `call` on rounded `data`."""

    def matmul(self, builder: relax.BlockBuilder, call: relax.Call, operands: list[relax.Expr]) -> relax.Expr:
        """Return a float32 expression for the matrix product `call` on rounded `operands`."""

    def round(self, builder: relax.BlockBuilder, value: relax.Expr) -> relax.Expr:
        """Return an expression for a float32 tensor rounded to this type."""

    def widen(self, builder: relax.BlockBuilder, value: relax.Expr) -> relax.Expr:
        """Return a float32 expression for a tensor of this type."""


def narrow_products(mod: tvm.IRModule, numbers: Numbers) -> tvm.IRModule:
    """Return the module with convolutions and matrix products computed in the type `numbers`.

    These are the calls for which `numbers.operands` is not empty. An operand that is already rounded for another reader
    is rounded once for all of them.
    """
    rounding = _Round(mod, numbers)
    for variable, function in relax_functions(mod).items():
        rounding.collect_operands(function)
        rounding.builder_.update_func(variable, rounding.visit_expr(function))
    return rounding.builder_.get()


def is_weighted(call: relax.Call) -> bool:
    """Whether a call is a convolution of NHWC data or a matrix product, in float32 and with constant weights."""
    name = called_operator(call)
    if name not in ("relax.nn.conv2d", "relax.matmul") or not is_float32(*call.args):
        return False
    if name == "relax.nn.conv2d":
        return has_constant_weights(call)
    left, right = call.args
    sizes = left.ty.shape.values
    return (
        isinstance(right, tvm.ir.GenericConst)
        and str(call.ty.dtype) == "float32"
        and len(right.ty.shape.values) == 2
        and len(sizes) >= 2
        and bool(static(sizes[-1]))
    )


@mutator
class _Round(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule, numbers: Numbers) -> None:
        super().__init__(mod)
        self._numbers = numbers
        self._roundings = {variable for variable, func in mod.functions_items() if ROUNDING in (func.attrs or {})}
        self._operands: set[relax.Var] = set()
        self._rounded: dict[relax.Var, relax.Var] = {}

    def collect_operands(self, function: relax.Function) -> None:
        """Collect the variables that products read."""

        def visit(node: Any) -> None:
            if isinstance(node, relax.Call):
                operand = self._already_rounded(node)
                operands = self._numbers.operands(node) if operand is None else [operand]
                self._operands.update(arg for arg in operands if isinstance(arg, relax.Var))

        relax.analysis.post_order_visit(function, visit)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        operand = self._already_rounded(binding.value)
        if operand is not None:
            self.set_var_remap(binding.var, self._low(operand))
            return
        super().visit_var_binding_(binding)
        if binding.var in self._operands:
            # A tensor is rounded before it is reshaped, so that the function that computes it can round its result.
            reshape = binding.value if called_operator(binding.value) == "relax.reshape" else None
            value = self.visit_expr(binding.var if reshape is None else reshape.args[0])
            # A value that is read outside of its dataflow block is rounded for its readers there, too.
            emit = self.builder_.emit if isinstance(binding.var, relax.DataflowVar) else self._emit_output
            rounded = self._numbers.round(self.builder_, value)
            if reshape is not None:
                rounded = relax.op.reshape(self.builder_.emit(rounded), self.visit_expr(reshape.args[1]))
            self._rounded[binding.var] = emit(rounded)

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        operands = self._numbers.operands(op)
        low = [self._low(operand) for operand in operands]
        if not operands:
            return relax.Call(op.op, [self._read(arg) for arg in op.args], op.attrs, op.ty_args, op.span)
        if op.op.name == "relax.nn.conv2d":
            return self._numbers.conv2d(self.builder_, op, *low)
        return self._numbers.matmul(self.builder_, op, low)

    def _already_rounded(self, value: relax.Expr) -> relax.Expr | None:
        """The tensor that a call emitted by another pass rounds; None for other expressions."""
        if not isinstance(value, relax.Call) or not value.args or value.args[0] not in self._roundings:
            return None
        return value.args[1][0]

    def _read(self, arg: relax.Expr) -> relax.Expr:
        """Return an operand of another operator, widened from the rounded value if there is one."""
        if isinstance(arg, relax.Tuple):
            return relax.Tuple([self._read(field) for field in arg.fields])
        if isinstance(arg, relax.Var) and arg in self._rounded:
            return self.builder_.emit(self._numbers.widen(self.builder_, self._rounded[arg]))
        return self.visit_expr(arg)

    def _low(self, operand: relax.Expr) -> relax.Expr:
        if isinstance(operand, relax.Var) and operand in self._rounded:
            return self._rounded[operand]
        return self.builder_.emit(self._numbers.round(self.builder_, self.visit_expr(operand)))

    def _emit_output(self, expr: relax.Expr) -> relax.Var:
        in_dataflow = self.builder_.current_block_is_dataflow()
        return self.builder_.emit_output(expr) if in_dataflow else self.builder_.emit(expr)
