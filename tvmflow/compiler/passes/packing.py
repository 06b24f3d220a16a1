"""The passes that let a library pack weights when it is loaded, so that a bundle need not hold the packed ones.

The library also widens those of 8 or 16 bits that the model computes with in float32.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.arrays import Array
from tvmflow.bundle import PACK_WEIGHTS
from tvmflow.compiler.annotations import PACKING
from tvmflow.compiler.operators.common import constant, numbers_of
from tvmflow.compiler.operators.packing import Packing, packing_of, runs_at_load
from tvmflow.compiler.operators.widening import NarrowWeight, narrow, tie
from tvmflow.compiler.passes.calls import called_functions
from tvmflow.compiler.passes.constant_keys import ConstantKeys
from tvmflow.compiler.passes.functions import relax_functions

# The fewest bytes by which packed weights must exceed the weights, and the fewest of weights outside the library. Each
# call of the model passes packed weights as an argument, which costs more than a few pages of memory are worth.
_SMALLEST_GAIN = 1 << 14
# Which weights a library packs when it is loaded: none, those that are larger when they are packed, or all.
AtLoad = Literal["none", "larger", "all"]
# The attribute of `pack_weights` that holds its arguments between the two passes.
_ARGUMENTS = "tvmflow.arguments"
_CALL_TIR = tvm.ir.Op.get("relax.call_tir")


@tvm.transform.module_pass(opt_level=0, name="PackAtLoad")
class PackAtLoad:
    """Moves the packing of constant weights from `main` and its variants to a new function `pack_weights`.

    `pack_weights` takes the weights and returns a tuple of all packed weights, and of those that it widens. `main` and
    each variant get all of these as additional parameters, after their own. Some packings are not moved but evaluated,
    so the packed weights become constants: those in functions that other functions call, those that save less than
    16 KiB where `at_load` is "larger", those of less than 16 KiB where it is "all", and every one where it is "none".
    With "all", `pack_weights` also returns the other constants of 16 KiB or more, as they are, so that its arguments
    are all large weights. The weights stay parameters of `pack_weights` until `BindWeights` makes them constants,
    because `FoldConstant`, which runs between the two passes, would evaluate the function.
    """

    def __init__(self, at_load: AtLoad) -> None:
        self._at_load: AtLoad = at_load

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module in which no Relax function but `pack_weights` packs weights.

        That function is added to the module if any packing is moved to it.
        """
        functions = relax_functions(mod)
        called = called_functions(functions)
        packings = _Packings(mod)
        if self._at_load != "none":
            functions_at_load = [function for variable, function in functions.items() if variable not in called]
            packings.tables = _tables(mod, functions_at_load, packings.key)
        for variable, function in functions.items():
            packings.at_load = "none" if variable in called else self._at_load
            packings.builder_.update_func(variable, packings.visit_expr(function))
        mod = packings.builder_.get()
        if not packings.calls:
            return mod
        packed = list(packings.calls)
        for variable, function in mod.functions_items():
            if variable in functions and variable not in called:
                extended = relax.Function(
                    [*function.params, *packed], function.body, function.ret_ty, function.is_pure, function.attrs
                )
                # A variable belongs to one function.
                mod.update_func(variable, relax.utils.copy_with_new_vars(extended))
        for variable, function in _pack_functions(packings).functions_items():
            mod[variable] = function
        return mod


@tvm.transform.module_pass(opt_level=0, name="PackAtLoad")
class BindWeights:
    """Replaces the parameters of `pack_weights` by constants: the weights that `PackAtLoad` took out of the model.

    Both passes have the name `PackAtLoad` for TVM, because neither can be disabled without the other.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with `pack_weights` changed, or unchanged if it has no such function."""
        for variable, function in mod.functions_items():
            if variable.name_hint == PACK_WEIGHTS and _ARGUMENTS in (function.attrs or {}):
                constants = {
                    param: relax.const(value)
                    for param, value in zip(function.params, function.attrs[_ARGUMENTS], strict=True)
                }
                mod[variable] = function.bind_params(constants).without_attr(_ARGUMENTS)
        return mod


@mutator
class _Packings(PyExprMutator):  # type: ignore[misc]
    """Replaces packings by variables, or by constants where `at_load` is "none".

    `calls` has the packing's function, None for weights that are not packed, and the weights for each variable. Equal
    packings of equal weights are one variable, also in several functions. `tables` are constants of two dimensions that
    the library holds: weights that are the transpose of one are made of it, and `tables_of` has the keys of both.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self.at_load: AtLoad = "none"
        self.tables: list[tvm.ir.GenericConst] = []
        self.calls: dict[relax.Var, tuple[tvm.ir.GlobalVar | None, tvm.ir.GenericConst]] = {}
        self.key = ConstantKeys()
        self.tables_of: dict[int, int] = {}
        self._variables: dict[tuple[tvm.ir.GlobalVar | None, int], relax.Var] = {}
        self._forms: dict[int, NarrowWeight | None] = {}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Replace the variable of a packing."""
        call = binding.value
        packing = None
        if isinstance(call, relax.Call) and call.op == _CALL_TIR:
            packing = packing_of(self.builder_.get()[call.args[0]])
        if packing is None:
            super().visit_var_binding_(binding)
            return
        weight = call.args[1][0]
        value = numbers_of(weight)
        if self._packs_at_load(packing, weight, call.ty):
            self.set_var_remap(binding.var, self._variable(call.args[0], weight, call.ty))
        else:
            packed = self.builder_.normalize(constant(packing.pack(value)))
            self.set_var_remap(binding.var, self.builder_.emit(packed))

    def _packs_at_load(self, packing: Packing, weight: tvm.ir.GenericConst, ty: relax.TensorType) -> bool:
        """Whether the library packs a weight, to a tensor of type `ty`, when it is loaded."""
        if self.at_load == "larger":
            form = self.form(weight)
            stored = _bytes(weight.ty) if form is None else self._stored(weight, form)
            return (packing.expands or form is not None) and _bytes(ty) - stored >= _SMALLEST_GAIN
        return self.at_load == "all" and _bytes(weight.ty) >= _SMALLEST_GAIN

    def _stored(self, weight: tvm.ir.GenericConst, form: NarrowWeight) -> int:
        """The bytes that the library holds for weights alone: none for those of a table."""
        return 0 if self.key(weight) in self.tables_of else sum(part.nbytes for part in form.parts)

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Replace the constants of a call that can be widened when the library is loaded, or all large ones."""
        call = super().visit_call_(op)
        # Of constants alone, the result becomes a constant.
        if self.at_load == "none" or call.op != _CALL_TIR or all(map(_is_constant, call.args[1].fields)):
            return call
        fields = [self._move(field) if _is_constant(field) else field for field in call.args[1].fields]
        if all(one.same_as(other) for one, other in zip(fields, call.args[1].fields, strict=True)):
            return call
        return relax.Call(call.op, [call.args[0], relax.Tuple(fields), *call.args[2:]], call.attrs, call.ty_args)

    def _move(self, weight: tvm.ir.GenericConst) -> relax.Expr:
        """Widen a constant when the library is loaded, and return its variable; return other constants themselves.

        With "all", a large constant that is not widened has a variable, too.
        """
        form = _narrow(weight)
        if form is None and (self.at_load == "larger" or _bytes(weight.ty) < _SMALLEST_GAIN):
            return weight
        self._forms[self.key(weight)] = form
        return self._variable(None, weight, weight.ty)

    def _tie(self, weight: tvm.ir.GenericConst) -> NarrowWeight | None:
        """Weights as a form of a table that stays as it is; None for others."""
        value = _array(weight)
        if value is None:
            return None
        for table in self.tables:
            # A table in fewer bytes is whole in `pack_weights` alone.
            form = tie(value, numbers_of(table)) if self.at_load == "all" or _narrow(table) is None else None
            if form is not None:
                self.tables_of[self.key(weight)] = self.key(table)
                return form
        return None

    def form(self, weight: tvm.ir.GenericConst) -> NarrowWeight | None:
        """Return weights of `calls` in fewer bytes, or as a form of a table; None for those that stay as they are."""
        key = self.key(weight)
        if key not in self._forms:
            self._forms[key] = self._tie(weight) or _narrow(weight)
        return self._forms[key]

    def _variable(self, packing: tvm.ir.GlobalVar | None, weight: tvm.ir.GenericConst, ty: Any) -> relax.Var:
        """The variable of packed, or only widened, weights."""
        key = packing, self.key(weight)
        if key not in self._variables:
            self._variables[key] = relax.Var(f"packed_weight_{len(self.calls)}", ty)
            self.calls[self._variables[key]] = packing, weight
        return self._variables[key]


def _tables(mod: tvm.IRModule, functions: Sequence[relax.Function], key: ConstantKeys) -> list[tvm.ir.GenericConst]:
    """The large constants of two dimensions that functions use, other than to pack them.

    Each could be what other weights are made of when the library is loaded.
    """
    tables: dict[int, tvm.ir.GenericConst] = {}

    def visit(call: Any) -> None:
        if isinstance(call, relax.Call) and call.op == _CALL_TIR and not runs_at_load(mod[call.args[0]]):
            for field in call.args[1].fields:
                if _is_constant(field) and field.ty.ndim == 2 and _array(field) is not None:
                    tables.setdefault(key(field), field)

    for function in functions:
        relax.analysis.post_order_visit(function, visit)
    return list(tables.values())


def _array(weight: tvm.ir.GenericConst) -> Array | None:
    """A constant as an array; None for a small one."""
    return numbers_of(weight) if _bytes(weight.ty) >= _SMALLEST_GAIN else None


def _narrow(weight: tvm.ir.GenericConst) -> NarrowWeight | None:
    """A constant in fewer bytes; None where that is not possible, or saves too little."""
    value = _array(weight)
    form = narrow(value) if value is not None else None
    if form is None or value is None or value.nbytes - sum(part.nbytes for part in form.parts) < _SMALLEST_GAIN:
        return None
    return form


def _is_constant(value: Any) -> bool:
    return isinstance(value, tvm.ir.GenericConst)


def _bytes(ty: relax.TensorType) -> int:
    """The size of a tensor of known shape."""
    return math.prod(int(size) for size in ty.shape.values) * np.dtype(str(ty.dtype)).itemsize


def _widen(builder: relax.BlockBuilder, form: NarrowWeight, parts: list[relax.Var]) -> relax.Var:
    attributes = {PACKING: json.dumps(["widening", {}])}
    call = builder.call_te(form.widen, *parts, primfunc_name_hint="widen_weight", primfunc_attrs=attributes)
    return builder.emit(call)


def _pack_functions(packings: _Packings) -> tvm.IRModule:
    """The function that returns all weights of `calls`, packed or not.

    Its parameters are the weights in the form in which they are stored, and its attribute their values.
    """
    params: list[relax.Var] = []
    values: list[Any] = []

    def add(value: Any) -> relax.Var:
        params.append(relax.Var(f"weight_{len(params)}", relax.TensorType(value.shape, str(value.dtype))))
        values.append(value)
        return params[-1]

    weights = {packings.key(weight): weight for _, weight in packings.calls.values()}
    forms = {key: packings.form(weight) for key, weight in weights.items()}
    parts: dict[int, list[relax.Var]] = {}
    for key, weight in weights.items():
        form = forms[key]
        if packings.tables_of.get(key) not in weights:
            arrays = [weight.value] if form is None else [tvm.runtime.tensor(part) for part in form.parts]
            parts[key] = [add(array) for array in arrays]
    whole: dict[int, relax.Var] = {}
    builder = relax.BlockBuilder()
    with builder.function(PACK_WEIGHTS, params, attrs={_ARGUMENTS: values}):
        with builder.dataflow():
            # Tables come first.
            for key in sorted(weights, key=lambda key: key not in parts):
                form, operands = forms[key], parts.get(key) or [whole[packings.tables_of[key]]]
                whole[key] = operands[0] if form is None else _widen(builder, form, operands)
            packed = [
                whole[packings.key(weight)]
                if variable is None
                else builder.emit(relax.call_tir(variable, [whole[packings.key(weight)]], result.ty))
                for result, (variable, weight) in packings.calls.items()
            ]
            results = builder.emit_output(relax.Tuple(packed))
        builder.emit_func_output(results)
    return builder.get()
