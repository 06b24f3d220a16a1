"""Rewrites an imported model into the fused, unscheduled functions that a target wants."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.tirx import PrimFunc

from tvmflow.compiler.importer import Imported
from tvmflow.compiler.machine import machine
from tvmflow.compiler.operators import legalizations
from tvmflow.target import Target

# Constants of fewer elements stay in the program when weights are kept apart.
SMALLEST_WEIGHT = 17


@dataclass(frozen=True)
class Workload:
    """A fused function of a lowered model: equal functions appear once, `calls` counts their call sites.

    `flops` estimates one call's floating-point operations; symbolic dimensions count as one.
    """

    name: str
    func: PrimFunc
    calls: int
    flops: float


def lower_passes(target: Target) -> list[tvm.transform.Pass]:
    """The passes from a Relax module whose weights are constants to `main` with calls of fused functions."""
    if target.arch == "cuda":
        layout: list[tvm.transform.Pass] = []
        legalize = relax.transform.LegalizeOps()
    else:
        layout = [ChannelsLast()]
        legalize = relax.transform.LegalizeOps(legalizations(machine(target)))
    return [
        Simplify(),
        relax.transform.FoldBatchnormToConv2D(),
        relax.transform.DecomposeOpsForInference(),
        relax.transform.CanonicalizeBindings(),
        relax.transform.FoldConstant(),
        *layout,
        Simplify(),
        relax.transform.CanonicalizeBindings(),
        relax.transform.EliminateCommonSubexpr(),
        relax.backend.DispatchSampling(),
        relax.backend.DispatchSortScan(),
        legalize,
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.DeadCodeElimination(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.DeadCodeElimination(),
    ]


def lower_module(imported: Imported, target: Target, variants: Sequence[Mapping[str, int]] = ()) -> tvm.IRModule:
    """Run `lower_passes` on the imported model in the current pass context.

    Each of `variants`, sizes of symbolic dimensions, becomes a function of its own beside `main`.
    """
    params = {name: tvm.runtime.tensor(value) for name, value in imported.params.items()}
    variables = imported.mod["main"].params[len(imported.inputs) :]
    bound = {variable: params[name] for variable, name in zip(variables, imported.params, strict=True)}
    mod = relax.transform.BindParams("main", bound)(imported.mod)
    for sizes in variants:
        fixed = relax.transform.BindSymbolicVars(dict(sizes), "main")(mod)["main"]
        name = variant_name(sizes)
        fixed = relax.utils.copy_with_new_vars(fixed).with_attr("global_symbol", name)
        mod = tvm.IRModule({**dict(mod.functions_items()), tvm.ir.GlobalVar(name): fixed}, attrs=mod.attrs)
    with tvm.target.Target(target.tvm):
        return tvm.transform.Sequential(lower_passes(target), name="lower")(mod)


def variant_name(sizes: Mapping[str, int]) -> str:
    """The function for sizes of symbolic dimensions, as `main_batch1`."""
    return "_".join(["main", *(f"{name}{size}" for name, size in sorted(sizes.items()))])


def workloads(lowered: tvm.IRModule) -> list[Workload]:
    """The distinct fused functions of a lowered module, in the order of their first call."""
    found: dict[int, list[tuple[str, PrimFunc]]] = {}
    counts: dict[str, int] = {}

    def count(node: Any) -> None:
        if not isinstance(node, relax.Call):
            return
        for callee in (node.op, *node.args[:1]):
            if not isinstance(callee, tvm.ir.GlobalVar) or not isinstance(lowered[callee], PrimFunc):
                continue
            func = lowered[callee].without_attr("global_symbol")
            same = found.setdefault(tvm_ffi.structural_hash(func), [])
            for name, other in same:
                if tvm_ffi.structural_equal(func, other):
                    counts[name] += 1
                    return
            same.append((callee.name_hint, func))
            counts[callee.name_hint] = 1

    for _, function in sorted(lowered.functions_items(), key=lambda item: str(item[0].name_hint)):
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, count)
    return [Workload(name, lowered[name], calls, _flops(lowered[name])) for name, calls in counts.items()]


def _flops(func: PrimFunc) -> float:
    try:
        return float(tvm.s_tir.analysis.estimate_tir_flops(tvm.IRModule({"main": func})))
    except (tvm.error.TVMError, ValueError, TypeError):
        return 0.0  # Symbolic shapes have no count.


def hoist_weights(lowered: tvm.IRModule) -> tuple[tvm.IRModule, dict[str, np.ndarray[Any, Any]]]:
    """Make the constants of `main` and its variants into parameters that follow the inputs.

    Returns the module and the constants by parameter name; every function takes all of them, in that order. Equal
    constants are one.
    """
    hoister = _HoistWeights(lowered)
    functions = {
        variable: hoister.visit_expr(function)
        for variable, function in sorted(lowered.functions_items(), key=lambda item: str(item[0].name_hint))
        if isinstance(function, relax.Function)
    }
    for variable, function in functions.items():
        weights = list(hoister.variables)
        taking = relax.Function(
            [*function.params, *weights], function.body, function.ret_ty, function.is_pure, function.attrs
        )
        # The hoister uses one variable for a weight everywhere; a variable belongs to one function.
        hoister.builder_.update_func(variable, relax.utils.copy_with_new_vars(taking))
    values = [constant.value.numpy() for constant in hoister.constants]
    names = [variable.name for variable in hoister.variables]
    return hoister.builder_.get(), dict(zip(names, values, strict=True))


@mutator
class _HoistWeights(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self.variables: list[relax.Var] = []
        self.constants: list[tvm.ir.GenericConst] = []
        self._known: dict[tuple[str, tuple[int, ...], bytes], relax.Var] = {}

    def visit_generic_const_(self, op: tvm.ir.GenericConst) -> relax.Expr:
        if not isinstance(op.ty, relax.TensorType) or int(np.prod(op.value.shape)) < SMALLEST_WEIGHT:
            return op
        value = op.value.numpy()
        key = (value.dtype.name, value.shape, hashlib.blake2b(value.data).digest())
        if key not in self._known:
            self._known[key] = relax.Var(f"weight_{len(self.variables)}", op.ty)
            self.variables.append(self._known[key])
            self.constants.append(op)
        return self._known[key]


@mutator
class _Simplify(PyExprMutator):  # type: ignore[misc]
    """Does here what TVM would compile to evaluate, and rewrites what stands in the way of its own passes."""

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        call = super().visit_call_(op)
        rewrite = _REWRITES.get(getattr(call.op, "name", ""))
        simpler = rewrite(self, call) if rewrite else None
        return call if simpler is None else simpler

    def constant(self, expr: relax.Expr) -> np.ndarray[Any, Any] | None:
        """The value of a constant or of a variable bound to one."""
        if isinstance(expr, relax.Var):
            expr = self.lookup_binding(expr)
        return expr.value.numpy() if isinstance(expr, tvm.ir.GenericConst) else None

    def shape(self, expr: relax.Expr) -> list[int] | None:
        """The sizes of a shape expression without symbols."""
        if isinstance(expr, relax.Var):
            expr = self.lookup_binding(expr)
        if not isinstance(expr, relax.ShapeExpr) or not all(isinstance(dim, tvm.tirx.IntImm) for dim in expr.values):
            return None
        return [int(dim) for dim in expr.values]


def _constant(value: np.ndarray[Any, Any]) -> relax.Expr:
    return relax.const(tvm.runtime.tensor(np.asarray(value, order="C")))


def _fold_permute(simplify: _Simplify, call: relax.Call) -> relax.Expr | None:
    value = simplify.constant(call.args[0])
    axes = call.attrs.axes
    if value is None:
        return None
    return _constant(np.transpose(value, None if axes is None else [int(axis) for axis in axes]))


def _fold_reshape(simplify: _Simplify, call: relax.Call) -> relax.Expr | None:
    value, shape = simplify.constant(call.args[0]), simplify.shape(call.args[1])
    return None if value is None or shape is None else _constant(value.reshape(shape))


def _fold_expand_dims(simplify: _Simplify, call: relax.Call) -> relax.Expr | None:
    value = simplify.constant(call.args[0])
    return None if value is None else _constant(np.expand_dims(value, tuple(int(axis) for axis in call.attrs.axis)))


def _fold_shape_of(simplify: _Simplify, call: relax.Call) -> relax.Expr | None:
    ty = call.args[0].ty
    return ty.shape if isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr) else None


def _fold_shape_to_tensor(simplify: _Simplify, call: relax.Call) -> relax.Expr | None:
    shape = simplify.shape(call.args[0])
    return None if shape is None else _constant(np.array(shape, "int64"))


def _split_clip(simplify: _Simplify, call: relax.Call) -> relax.Expr | None:
    """Clip as relu or maximum, then minimum: TVM cannot change the layout of a clip."""
    x, low, high = call.args
    bounds = [low, high]
    if not all(isinstance(bound, tvm.tirx.IntImm | tvm.tirx.FloatImm) for bound in bounds):
        return None
    least, most = (float(bound.value) for bound in bounds)
    dtype = x.ty.dtype.dtype
    if str(dtype) != "float32":
        return None
    above = relax.op.nn.relu(x) if least == 0 else relax.op.maximum(x, relax.const(least, dtype))
    return relax.op.minimum(simplify.builder_.emit(above), relax.const(most, dtype))


def _count_axes_from_the_front(simplify: _Simplify, call: relax.Call) -> relax.Expr | None:
    """Squeeze with axes from the front: TVM's layout conversion reads out of bounds for those from the back."""
    axes = call.attrs.axis
    if axes is None or all(int(axis) >= 0 for axis in axes):
        return None
    rank = call.args[0].ty.ndim
    return relax.op.squeeze(call.args[0], [int(axis) % rank for axis in axes])


def _one_dimension_as_two(simplify: _Simplify, call: relax.Call) -> relax.Expr | None:
    """A one-dimensional convolution as one over images of height one, which has a schedule."""
    attrs = call.attrs
    if (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) != ("NCW", "OIW", "NCW"):
        return None
    before, after = (int(size) for size in attrs.padding)
    image = relax.op.nn.conv2d(
        simplify.builder_.emit(relax.op.expand_dims(call.args[0], 2)),
        simplify.builder_.emit(relax.op.expand_dims(call.args[1], 2)),
        strides=[1, int(attrs.strides[0])],
        padding=[0, before, 0, after],
        dilation=[1, int(attrs.dilation[0])],
        groups=int(attrs.groups),
    )
    return relax.op.squeeze(simplify.builder_.emit(image), [2])


_REWRITES: dict[str, Callable[[_Simplify, relax.Call], relax.Expr | None]] = {
    "relax.clip": _split_clip,
    "relax.nn.conv1d": _one_dimension_as_two,
    "relax.squeeze": _count_axes_from_the_front,
    "relax.expand_dims": _fold_expand_dims,
    "relax.permute_dims": _fold_permute,
    "relax.reshape": _fold_reshape,
    "relax.shape_of": _fold_shape_of,
    "relax.shape_to_tensor": _fold_shape_to_tensor,
}


@tvm.transform.module_pass(opt_level=0, name="Simplify")
class Simplify:
    """Evaluates moved constants and shapes, and rewrites operators that stand in the way of TVM's passes."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Rewrite every Relax function of the module."""
        simplify = _Simplify(mod)
        for variable, function in mod.functions_items():
            if isinstance(function, relax.Function):
                simplify.builder_.update_func(variable, simplify.visit_expr(function))
        return simplify.builder_.get()


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
