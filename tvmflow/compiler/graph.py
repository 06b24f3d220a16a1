"""Lowers an imported model to fused, unscheduled functions, lists them, and takes weights out of a module."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.tirx import PrimFunc

from tvmflow.compiler.choices import Choices
from tvmflow.compiler.importer import Imported
from tvmflow.compiler.operators.packing import runs_at_load
from tvmflow.compiler.passes import lower_passes
from tvmflow.compiler.passes.calls import ConstantKey, bind_constant_arguments, calls_of, change_calls, key_of_constant
from tvmflow.compiler.passes.functions import relax_functions
from tvmflow.runtime.profile import estimate_operations
from tvmflow.target import Precision, Target

# Constants with fewer elements stay in the program when weights are kept apart.
SMALLEST_WEIGHT = 17


@dataclass(frozen=True)
class Workload:
    """A fused function of a lowered model; equal functions are one workload, and `calls` counts their call sites.

    `flops` estimates the floating-point operations of one call; it is 0 where shapes are symbolic.
    """

    name: str
    func: PrimFunc
    calls: int
    flops: float


def lower_module(
    imported: Imported,
    target: Target,
    choices: Choices,
    *,
    variants: Sequence[Mapping[str, int]],
    precision: Precision,
    fast: bool,
    packs_at_load: bool,
) -> tvm.IRModule:
    """Lower an imported model by `lower_passes` in the current pass context, and return the module.

    `choices` decides where the compiler has several options, and collects these decisions. Each of `variants` maps
    names of symbolic dimensions to sizes, and adds a function with these sizes beside `main`. `fast` allows algorithms
    of fewer multiplications. `packs_at_load` lets the module have a function `pack_weights`, which packs weights when
    the library is loaded (`passes.packing.PackAtLoad`).
    """
    params = {name: tvm.runtime.tensor(value) for name, value in imported.params.items()}
    variables = imported.mod["main"].params[len(imported.inputs) :]
    values = {variable: params[name] for variable, name in zip(variables, imported.params, strict=True)}
    mod = bind_constant_arguments(relax.transform.BindParams("main", values)(imported.mod))
    for sizes in variants:
        variant = relax.transform.BindSymbolicVars(dict(sizes), "main")(mod)["main"]
        name = variant_name(sizes)
        variant = relax.utils.copy_with_new_vars(variant).with_attr("global_symbol", name)
        mod = tvm.IRModule({**dict(mod.functions_items()), tvm.ir.GlobalVar(name): variant}, attrs=mod.attrs)
    size = sum(value.nbytes for value in imported.params.values())
    passes = lower_passes(target, choices, precision, fast, size, packs_at_load)
    with tvm.target.Target(target.tvm):
        return tvm.transform.Sequential(passes, name="lower")(mod)


def variant_name(sizes: Mapping[str, int]) -> str:
    """Return the name of the function for these sizes of symbolic dimensions, such as `main_batch1`."""
    return "_".join(["main", *(f"{name}{size}" for name, size in sorted(sizes.items()))])


def workloads(lowered: tvm.IRModule) -> list[Workload]:
    """Return the distinct fused functions of a lowered module, in the order of their first calls.

    A function that packs weights when the library is loaded is left out.
    """
    by_hash: dict[int, list[tuple[str, PrimFunc]]] = {}
    counts: dict[str, int] = {}

    def count(node: Any) -> None:
        if not isinstance(node, relax.Call):
            return
        for callee in (node.op, *node.args[:1]):
            if not isinstance(callee, tvm.ir.GlobalVar) or not isinstance(lowered[callee], PrimFunc):
                continue
            if runs_at_load(lowered[callee]):
                continue  # It runs once, when the library is loaded.
            func = lowered[callee].without_attr("global_symbol")
            candidates = by_hash.setdefault(tvm_ffi.structural_hash(func), [])
            for name, other in candidates:
                if tvm_ffi.structural_equal(func, other):
                    counts[name] += 1
                    return
            candidates.append((callee.name_hint, func))
            counts[callee.name_hint] = 1

    for _, function in sorted(relax_functions(lowered).items(), key=lambda item: str(item[0].name_hint)):
        relax.analysis.post_order_visit(function, count)
    return [Workload(name, lowered[name], calls, estimate_operations(lowered[name])) for name, calls in counts.items()]


def hoist_weights(lowered: tvm.IRModule) -> tuple[tvm.IRModule, dict[str, np.ndarray[Any, Any]]]:
    """Turn the large constants of `main` and its variants into parameters that follow the inputs.

    Returns the module, and the constants by parameter name in the order of the parameters. Equal constants become one
    parameter. `main` and its variants take all of these parameters; a function that they call takes those that it
    needs. Constants of fewer than `SMALLEST_WEIGHT` elements stay in the functions.
    """
    hoister = _HoistWeights(lowered)
    functions, needs = {}, {}
    for variable, function in sorted(relax_functions(lowered).items(), key=lambda item: str(item[0].name_hint)):
        hoister.weights = set()
        functions[variable], needs[variable] = hoister.visit_expr(function), hoister.weights
    callees = {
        variable: {call.op for call in calls_of(function, functions)} for variable, function in functions.items()
    }
    while any(needs[variable] < needs[variable] | needs[callee] for variable in needs for callee in callees[variable]):
        for variable in needs:
            needs[variable] = needs[variable].union(*(needs[callee] for callee in callees[variable]))
    callees_of_all = set().union(*callees.values())
    weights = {
        variable: [
            weight for weight in hoister.variables if variable not in callees_of_all or weight in needs[variable]
        ]
        for variable in functions
    }
    with_weights = {
        variable: relax.Function(
            [*function.params, *weights[variable]], function.body, function.ret_ty, function.is_pure, function.attrs
        )
        for variable, function in functions.items()
    }
    with_weights = change_calls(with_weights, lambda call: [*call.args, *weights[call.op]])
    # The hoister uses one variable for a weight everywhere; a variable belongs to one function.
    apart = {variable: relax.utils.copy_with_new_vars(function) for variable, function in with_weights.items()}
    others = {variable: func for variable, func in lowered.functions_items() if variable not in functions}
    values = [constant.value.numpy() for constant in hoister.constants]
    names = [variable.name for variable in hoister.variables]
    mod = tvm.IRModule({**others, **apart}, attrs=lowered.attrs)
    return mod, dict(zip(names, values, strict=True))


@mutator
class _HoistWeights(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self.variables: list[relax.Var] = []
        self.constants: list[tvm.ir.GenericConst] = []
        self.weights: set[relax.Var] = set()
        self._variable_of: dict[ConstantKey, relax.Var] = {}

    def visit_generic_const_(self, op: tvm.ir.GenericConst) -> relax.Expr:
        if not isinstance(op.ty, relax.TensorType) or int(np.prod(op.value.shape)) < SMALLEST_WEIGHT:
            return op
        key = key_of_constant(op)
        if key not in self._variable_of:
            self._variable_of[key] = relax.Var(f"weight_{len(self.variables)}", op.ty)
            self.variables.append(self._variable_of[key])
            self.constants.append(op)
        self.weights.add(self._variable_of[key])
        return self._variable_of[key]
