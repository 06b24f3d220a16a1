"""Brings activations to NHWC."""

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator


@tvm.transform.module_pass(opt_level=0, name="ChannelsLast")
class ChannelsLast:
    """Brings two-dimensional convolutions, and what is between them, to NHWC."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Convert the whole module, or each convolution by itself where TVM's conversion fails."""
        # Transposed convolutions take nothing else than NCHW later on.
        wanted = {"relax.nn.conv2d": ["NHWC", "OIHW"], "relax.nn.conv2d_transpose": ["NCHW", "IOHW"]}
        try:
            return relax.transform.ConvertLayout(wanted)(mod)
        except Exception:  # It is unsound for some graphs, of which no list is known.
            wrapper = _WrapConvolutions(mod)
            for variable, function in mod.functions_items():
                if isinstance(function, relax.Function):
                    wrapper.builder_.update_func(variable, wrapper.visit_expr(function))
            return wrapper.builder_.get()


@mutator
class _WrapConvolutions(PyExprMutator):  # type: ignore[misc]
    """Transposes before and after each convolution."""

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        call = super().visit_call_(op)
        if getattr(call.op, "name", "") != "relax.nn.conv2d":
            return call
        attrs = call.attrs
        if (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) != ("NCHW", "OIHW", "NCHW"):
            return call
        data = self.builder_.emit(relax.op.permute_dims(call.args[0], [0, 2, 3, 1]))
        result = relax.op.nn.conv2d(
            data,
            call.args[1],
            strides=list(attrs.strides),
            padding=list(attrs.padding),
            dilation=list(attrs.dilation),
            groups=attrs.groups,
            data_layout="NHWC",
            kernel_layout="OIHW",
            out_layout="NHWC",
        )
        return relax.op.permute_dims(self.builder_.emit(result), [0, 3, 1, 2])
