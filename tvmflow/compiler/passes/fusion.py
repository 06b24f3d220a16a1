"""Corrects the kinds of functions by which TVM's `FuseOps` decides what it fuses."""

from typing import Any

import tvm
from tvm import relax, tirx
from tvm.tirx import PrimFunc

from tvmflow.compiler.operators.common import FOLLOWS, static

# TVM's kinds of functions, values of the attribute `op_pattern`.
_ELEMENT_WISE, _BROADCAST, _INJECTIVE, _KERNEL, _OPAQUE = 0, 1, 2, 4, 8


@tvm.transform.module_pass(opt_level=0, name="MarkFollowers")
class MarkFollowers:
    """Declares operators with an attribute of `FOLLOWS` as element-wise, so that they are fused to the one before."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with the attribute `op_pattern` of these functions set to 0."""
        for variable, function in mod.functions_items():
            if FOLLOWS.keys() & dict(function.attrs or {}).keys():
                mod.update_func(variable, function.with_attr("op_pattern", _ELEMENT_WISE))
        return mod


@tvm.transform.module_pass(opt_level=0, name="SeparateSizes")
class SeparateSizes:
    """Keeps a function that makes a tensor of nothing but sizes apart: TVM cannot fuse it with one of other sizes."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with the attribute `op_pattern` of these functions set to that of an opaque function."""
        for variable, function in mod.functions_items():
            operands = function.params[:-1] if isinstance(function, PrimFunc) else ()
            if operands and not any(tirx.is_buffer_var(param) for param in operands):
                mod.update_func(variable, function.with_attr("op_pattern", _OPAQUE))
        return mod


@tvm.transform.module_pass(opt_level=0, name="SeparateRepeats")
class SeparateRepeats:
    """Keeps an operator that repeats a kernel's result along a dimension out of the kernel's function.

    A kernel is computed where its result is read. In squeeze-and-excitation a 1x1 convolution of one pixel scales a
    whole image: fused with the product, the convolution would be computed again for each pixel.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with the attribute `op_pattern` of these operators set to that of an injective function."""
        for _, function in mod.functions_items():
            if not isinstance(function, relax.Function):
                continue
            results: set[relax.Var] = set()
            for binding in (binding for block in function.body.blocks for binding in block.bindings):
                kind = _kind(mod, binding.value)
                arguments = [] if kind is None else [item for item in binding.value.args[1] if item in results]
                if kind in (_ELEMENT_WISE, _BROADCAST) and any(_repeats(item, binding.value) for item in arguments):
                    variable = binding.value.args[0]
                    mod.update_func(variable, mod[variable].with_attr("op_pattern", _INJECTIVE))
                elif kind == _KERNEL or (kind in (_ELEMENT_WISE, _BROADCAST) and arguments):
                    # Operators after a kernel are fused with it, so their results are its results.
                    results.add(binding.var)
        return mod


def _kind(mod: tvm.IRModule, call: Any) -> int | None:
    """The kind of the function that a call runs; None for other expressions and for functions without a kind."""
    if not isinstance(call, relax.Call) or getattr(call.op, "name", "") != "relax.call_tir":
        return None
    function = mod[call.args[0]]
    kind = (function.attrs or {}).get("op_pattern") if isinstance(function, PrimFunc) else None
    return None if kind is None else int(kind)


def _repeats(argument: relax.Expr, call: relax.Call) -> bool:
    """Whether an element-wise call reads elements of an argument again along a dimension of its result."""
    sizes, result = argument.ty.shape, call.ty.shape
    if not isinstance(sizes, relax.ShapeExpr) or not isinstance(result, relax.ShapeExpr):
        return False
    missing = len(result.values) - len(sizes.values)
    if missing < 0:
        return False  # Squeeze is element-wise too.
    own = [1] * missing + [static(size) for size in sizes.values]
    return any(size == 1 != static(whole) for size, whole in zip(own, result.values, strict=True))
