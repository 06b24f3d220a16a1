"""Takes weights out of a module: its large constants become parameters."""

import hashlib
import math
from collections.abc import Container
from itertools import count
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from tvmflow.arrays import Array
from tvmflow.bundle import PACK_WEIGHTS
from tvmflow.compiler.operators.common import numbers_of
from tvmflow.compiler.passes.calls import calls_of, change_calls
from tvmflow.compiler.passes.constant_keys import ConstantKeys
from tvmflow.compiler.passes.functions import relax_functions

# Constants with fewer elements stay in the program when weights are kept apart, and the import reads the values of such
# small ones: scalars, shapes and axes steer it.
SMALLEST_WEIGHT = 17


def hoist_weights(mod: tvm.IRModule) -> tuple[tvm.IRModule, dict[str, Array]]:
    """Turn the large constants of `main`, its variants and what they call into parameters that follow the others.

    Returns the module, and the constants by parameter name in the order of the parameters. Equal constants become one
    parameter. `main` and its variants take all of these parameters; a function that they call takes those that it
    needs. Constants of fewer than `SMALLEST_WEIGHT` elements stay in the functions.
    """
    functions = relax_functions(mod)
    hoister = _Hoister({param.name for function in functions.values() for param in function.params})
    without, needs = {}, {}
    for variable, function in sorted(functions.items(), key=lambda item: str(item[0].name_hint)):
        hoister.needs = set()
        without[variable] = tvm_ffi.structural_map(function, (tvm.ir.GenericConst, hoister.replace))
        needs[variable] = hoister.needs
    values = {variable.name: numbers_of(constant) for variable, constant in hoister.constants.items()}
    if not values:
        return mod, values
    callees = {variable: {call.op for call in calls_of(function, without)} for variable, function in without.items()}
    while any(needs[variable] < needs[variable] | needs[callee] for variable in needs for callee in callees[variable]):
        for variable in needs:
            needs[variable] = needs[variable].union(*(needs[callee] for callee in callees[variable]))
    callees_of_all = set().union(*callees.values())
    weights = {
        variable: [
            weight for weight in hoister.constants if variable not in callees_of_all or weight in needs[variable]
        ]
        for variable in without
    }
    with_weights = {
        variable: relax.Function(
            [*function.params, *weights[variable]], function.body, function.ret_ty, function.is_pure, function.attrs
        )
        for variable, function in without.items()
    }
    if len(functions) > 1:
        with_weights = change_calls(with_weights, lambda call: [*call.args, *weights[call.op]])
        # The hoister uses one variable for a weight everywhere; a variable belongs to one function.
        with_weights = {key: relax.utils.copy_with_new_vars(function) for key, function in with_weights.items()}
    others = {variable: func for variable, func in mod.functions_items() if variable not in functions}
    return tvm.IRModule({**others, **with_weights}, attrs=mod.attrs), values


def share_weights(mod: tvm.IRModule) -> tuple[tvm.IRModule, dict[str, Array]]:
    """Turn the large constants of `pack_weights` into its parameters, and leave the other functions as they are.

    Returns the module, and the constants by parameter name in the order of the parameters. The order follows from
    their content: modules for different targets that pack the same weights have the same parameters. Raises ValueError
    if the module has no such function.
    """
    variable = mod.get_global_var(PACK_WEIGHTS)
    alone, values = hoist_weights(tvm.IRModule({variable: mod[variable]}))
    function = alone[variable]
    params = dict(zip(values, function.params, strict=True))
    order = sorted(values, key=lambda name: _digest(values[name]))
    with_params = relax.Function(
        [params[name] for name in order], function.body, function.ret_ty, function.is_pure, function.attrs
    )
    others = {key: func for key, func in mod.functions_items() if key != variable}
    weights = {f"weight_{place}": values[name] for place, name in enumerate(order)}
    return tvm.IRModule({**others, variable: with_params}, attrs=mod.attrs), weights


def _digest(array: Array) -> str:
    """A digest of an array's type, shape and numbers."""
    digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


def size_of_constants(mod: tvm.IRModule) -> int:
    """Return the bytes of all constants of a module's functions but those of `pack_weights`; equal ones count once."""
    keys, sizes = ConstantKeys(), dict[int, int]()

    def visit(node: Any) -> None:
        if isinstance(node, tvm.ir.GenericConst) and isinstance(node.ty, relax.TensorType):
            sizes[keys(node)] = numbers_of(node).nbytes

    for variable, function in relax_functions(mod).items():
        if variable.name_hint != PACK_WEIGHTS:
            relax.analysis.post_order_visit(function, visit)
    return sum(sizes.values())


class _Hoister:
    """Replaces constants by variables with names that are not in `taken`: one variable for equal constants.

    `constants` are the replaced constants by variable, and `needs` the variables that were put in their place since it
    was emptied.
    """

    def __init__(self, taken: Container[str]) -> None:
        self.constants: dict[relax.Var, tvm.ir.GenericConst] = {}
        self.needs: set[relax.Var] = set()
        self._keys = ConstantKeys()
        self._variables: dict[int, relax.Var] = {}
        self._names = (name for name in map("weight_{}".format, count()) if name not in taken)

    def replace(self, constant: tvm.ir.GenericConst) -> relax.Expr:
        if not isinstance(constant.ty, relax.TensorType) or math.prod(constant.value.shape) < SMALLEST_WEIGHT:
            return constant
        key = self._keys(constant)
        if key not in self._variables:
            self._variables[key] = relax.Var(next(self._names), constant.ty)
            self.constants[self._variables[key]] = constant
        self.needs.add(self._variables[key])
        return self._variables[key]
