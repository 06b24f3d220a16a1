"""Computes products in bfloat16 where a release asks for it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import tvm
from tvm import relax, te
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.compiler import winograd
from tvmflow.compiler.dotproduct import BF16, Widened, round_bf16
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import convolution, depthwise, dot
from tvmflow.compiler.operators.common import FUSABLE, constant, is_float32, static, vector
from tvmflow.compiler.operators.products import row_dimensions


@tvm.transform.module_pass(opt_level=0, name="RoundProducts")
class RoundProducts:
    """Rounds the operands of convolutions and matrix products to bfloat16, and computes these by dot products.

    What a product reads is kept in memory as bfloat16, for all its readers; depthwise convolutions read it so too, but
    compute in float32, as everything else. So do convolutions by Winograd's algorithm, where it is faster all the same
    and rounding its transformed numbers would cost too much, and those whose groups are narrower than a vector.
    """

    def __init__(self, machine: Machine, winograd: bool) -> None:
        self._machine, self._winograd = machine, winograd

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Rewrite every Relax function of the module."""
        rounding = _Round(mod, self._machine, self._winograd)
        for variable, function in mod.functions_items():
            if isinstance(function, relax.Function):
                rounding.find(function)
                rounding.builder_.update_func(variable, rounding.visit_expr(function))
        return rounding.builder_.get()


@mutator
class _Round(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule, machine: Machine, winograd: bool) -> None:
        super().__init__(mod)
        self._machine, self._winograd = machine, winograd
        self._wanted: set[relax.Var] = set()
        self._rounded: dict[relax.Var, relax.Var] = {}

    def find(self, function: relax.Function) -> None:
        """Find the values that products read."""

        def visit(node: Any) -> None:
            if isinstance(node, relax.Call):
                self._wanted.update(arg for arg in _operands(node, self._machine) if isinstance(arg, relax.Var))

        relax.analysis.post_order_visit(function, visit)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        super().visit_var_binding_(binding)
        if binding.var in self._wanted:
            value = self.visit_expr(binding.var)
            # What is read outside its dataflow block is so rounded, too.
            emit = self.builder_.emit if isinstance(binding.var, relax.DataflowVar) else self._emit_output
            self._rounded[binding.var] = emit(_round(self.builder_, value))

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        operands = _operands(op, self._machine)
        low = [self._low(operand) for operand in operands]
        if operands:
            lower = self._conv2d if op.op.name == "relax.nn.conv2d" else self._matmul
            return lower(op, low)
        return relax.Call(op.op, [self._read(arg) for arg in op.args], op.attrs, op.ty_args, op.span)

    def _read(self, arg: relax.Expr) -> relax.Expr:
        """What is no product reads the rounded value too: it is in memory once."""
        if isinstance(arg, relax.Tuple):
            return relax.Tuple([self._read(field) for field in arg.fields])
        if isinstance(arg, relax.Var) and arg in self._rounded:
            return self.builder_.emit(_widen(self.builder_, self._rounded[arg]))
        return self.visit_expr(arg)

    def _low(self, operand: relax.Expr) -> relax.Expr:
        if isinstance(operand, relax.Var) and operand in self._rounded:
            return self._rounded[operand]
        return self.builder_.emit(_round(self.builder_, self.visit_expr(operand)))

    def _emit_output(self, expr: relax.Expr) -> relax.Var:
        in_dataflow = self.builder_.current_block_is_dataflow()
        return self.builder_.emit_output(expr) if in_dataflow else self.builder_.emit(expr)

    def _conv2d(self, call: relax.Call, operands: list[relax.Expr]) -> relax.Expr:
        (data,), weight, attrs, machine = operands, call.args[1], call.attrs, self._machine
        geometry: dict[str, Any] = {
            "strides": [int(item) for item in attrs.strides],
            "padding": [int(item) for item in attrs.padding],
            "dilation": [int(item) for item in attrs.dilation],
        }
        groups, channels = int(attrs.groups), int(weight.ty.shape.values[0])
        value = weight.value.numpy()
        if _is_depthwise(call):
            packed = constant(depthwise.pack_array(value, vector(groups, machine)))
            compute = _reading_bf16(depthwise.depthwise, machine=machine, **geometry)
            return self._call(compute, data, packed, "depthwise_conv2d")
        size = None
        if self._winograd:
            size = convolution.winograd_size(call.args[0], weight, groups, geometry, machine, group=BF16.group)
        if size is not None:
            stride, padding = geometry["strides"][0], geometry["padding"]
            narrow = winograd.takes_narrow(size, stride, int(weight.ty.shape.values[1]))
            packed = (
                winograd.narrow_kernel(value, size, machine.lanes)
                if narrow
                else winograd.transform_kernel(value, size, machine.lanes, stride)
            )
            compute = _reading_bf16(
                convolution.winograd_conv2d,
                kind="dot_winograd" if narrow else "winograd",
                channels=channels,
                padding=padding,
                stride=stride,
                machine=machine,
            )
            return self._call(compute, data, constant(packed), "winograd_conv2d" + ("_bf16" if narrow else ""))
        packed = constant(dot.pack_conv2d(value, dot.lanes_of(channels, groups, machine), BF16))
        compute = partial(dot.conv2d, dot=BF16, channels=channels, groups=groups, machine=machine, **geometry)
        return self._call(compute, data, packed, "conv2d_bf16")

    def _matmul(self, call: relax.Call, operands: list[relax.Expr]) -> relax.Expr:
        if len(operands) == 2:
            left, right = operands
            return self._call(partial(dot.batch_matmul, machine=self._machine), left, right, "batch_matmul_bf16")
        (data,), weight = operands, call.args[1]
        units = int(weight.ty.shape.values[1])
        packed = constant(dot.pack_dense(weight.value.numpy(), vector(units, self._machine), BF16))
        rows = row_dimensions(data.ty.shape.values[:-1])
        compute = partial(dot.dense, dot=BF16, units=units, rows=rows, machine=self._machine)
        return self._call(compute, data, packed, "dense_bf16")

    def _call(self, compute: Callable[..., te.Tensor], data: relax.Expr, weight: relax.Expr, name: str) -> relax.Expr:
        return self.builder_.call_te(compute, data, weight, primfunc_name_hint=name, primfunc_attrs=FUSABLE)


def _reading_bf16(operator: Callable[..., te.Tensor], **arguments: Any) -> Callable[..., te.Tensor]:
    """An operator on float32 as one on bfloat16."""

    def compute(data: te.Tensor, weight: te.Tensor) -> te.Tensor:
        return operator(Widened(data), weight, **arguments)

    return compute


def _round(builder: relax.BlockBuilder, value: relax.Expr) -> relax.Expr:
    def compute(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *index: round_bf16(x[index]), name="round")

    return builder.call_te(compute, value, primfunc_name_hint="round")


def _widen(builder: relax.BlockBuilder, value: relax.Expr) -> relax.Expr:
    def compute(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *index: BF16.widen(x[index]), name="widen")

    return builder.call_te(compute, value, primfunc_name_hint="widen")


def _operands(call: relax.Call, machine: Machine) -> list[relax.Expr]:
    """The operands that are rounded, apart from packed weights; none for what is no product of ours."""
    name = getattr(call.op, "name", "")
    if name not in ("relax.nn.conv2d", "relax.matmul") or not is_float32(*call.args):
        return []
    left, right = call.args
    if name == "relax.nn.conv2d":
        layouts = (call.attrs.data_layout, call.attrs.out_layout, call.attrs.kernel_layout)
        if layouts != ("NHWC", "NHWC", "OIHW") or not isinstance(right, tvm.ir.GenericConst):
            return []
        channels, groups = static(left.ty.shape.values[3]), int(call.attrs.groups)
        if channels is None:
            return []
        out_channels, depth = (int(dim) for dim in right.ty.shape.values[:2])
        if _is_depthwise(call):
            return [left]
        fits = groups == 1 or depth % BF16.group == 0
        return [left] if fits and dot.lanes_of(out_channels, groups, machine) else []
    if str(call.ty.dtype) != "float32":
        return []
    left_shape, right_shape = list(left.ty.shape.values), list(right.ty.shape.values)
    if len(left_shape) < 2 or not static(left_shape[-1]):
        return []
    if len(right_shape) == 2:
        return [left] if isinstance(right, tvm.ir.GenericConst) else []
    equal = tvm.sym.Analyzer().can_prove_equal
    same = len(left_shape) == len(right_shape) and all(
        equal(a, b) for a, b in zip(left_shape[:-2], right_shape[:-2], strict=True)
    )
    return [left, right] if same else []


def _is_depthwise(call: relax.Call) -> bool:
    out_channels, depth = (int(dim) for dim in call.args[1].ty.shape.values[:2])
    return depth == 1 and int(call.attrs.groups) == out_channels > 1
