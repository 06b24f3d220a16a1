"""Lowers an imported model to fused, unscheduled functions, and lists them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.tirx import PrimFunc

from tvmflow.compiler.choices import Choices
from tvmflow.compiler.importer import Imported
from tvmflow.compiler.operators.common import tensor_of
from tvmflow.compiler.operators.packing import runs_at_load
from tvmflow.compiler.passes import lower_passes
from tvmflow.compiler.passes.calls import bind_constant_arguments
from tvmflow.compiler.passes.functions import relax_functions
from tvmflow.compiler.passes.packing import AtLoad
from tvmflow.compiler.passes.sizes import bind_constant_sizes
from tvmflow.compiler.size_checks import contradicts, known_sizes
from tvmflow.errors import BuildError
from tvmflow.hardware.target import Precision, Target
from tvmflow.runtime.profile import estimate_operations


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
    packed_at_load: AtLoad,
) -> tvm.IRModule:
    """Lower an imported model by `lower_passes` in the current pass context, and return the module.

    `choices` decides where the compiler has several options, and collects these decisions. Each of `variants` maps
    names of symbolic dimensions to sizes, and adds a function with these sizes beside `main`. `fast` allows algorithms
    of fewer multiplications. `packed_at_load` says which weights the module's function `pack_weights` packs when the
    library is loaded (`passes.packing.PackAtLoad`); there is no such function where it packs none.
    """
    values = {variable: tensor_of(value) for variable, value in imported.weights().items()}
    mod = bind_constant_arguments(relax.transform.BindParams("main", values)(imported.mod))
    for sizes in variants:
        name = variant_name(sizes)
        variant = relax.utils.copy_with_new_vars(_with_sizes(mod["main"], sizes)).with_attr("global_symbol", name)
        mod = tvm.IRModule({**dict(mod.functions_items()), tvm.ir.GlobalVar(name): variant}, attrs=mod.attrs)
    mod = bind_constant_sizes(mod)
    size = sum(value.nbytes for value in imported.params.values())
    passes = lower_passes(target, choices, precision, fast, size, packed_at_load)
    with tvm.target.Target(target.tvm):
        return tvm.transform.Sequential(passes, name="lower")(mod)


def _with_sizes(function: relax.Function, sizes: Mapping[str, int]) -> relax.Function:
    """The function with numbers for these symbolic dimensions, and for all symbols whose values are then known.

    Raises BuildError for sizes with which every call fails.
    """
    function = function.bind_symbolic_vars(dict(sizes))
    while values := known_sizes(function):
        function = function.bind_symbolic_vars(values)
    if contradicts(function):
        listed = ", ".join(f"{name}={size}" for name, size in sorted(sizes.items()))
        raise BuildError(f"the model does not take the sizes {listed}; tune for sizes that it takes")
    return function


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
