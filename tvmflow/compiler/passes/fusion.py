"""Corrects functions' attribute `op_pattern`, by which TVM's `FuseOps` decides which functions it fuses."""

import math
from collections.abc import Iterable
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.s_tir import renew_defs
from tvm.tirx import Let, PrimFunc

from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import FOLLOWS, are_equal, called_operator, static
from tvmflow.compiler.passes.functions import relax_functions, rewrite_functions
from tvmflow.compiler.passes.narrow import ROUNDING
from tvmflow.compiler.passes.rewrite import sizes
from tvmflow.compiler.schedules import kernels_of
from tvmflow.compiler.schedules.common import bytes_of, walk
from tvmflow.compiler.schedules.transposes import is_transpose

# TVM's kinds of functions, values of the attribute `op_pattern`.
_ELEMENT_WISE, _BROADCAST, _INJECTIVE, _REDUCTION, _KERNEL, _OPAQUE = 0, 1, 2, 3, 4, 8

# A function of its own takes longer than to load so many bytes one number after the other.
_FEW_BYTES = 4096

# The kernels that compute each element of their result by itself.
_OF_PARTS = {"depthwise", "pooling"}

# The most activations, one in the argument of the next, that one function computes.
_MOST_NESTED = 2
# The most variables of an activation whose argument may have long indices.
_MOST_BINDINGS = 4


@tvm.transform.module_pass(opt_level=0, name="MarkFollowers")
class MarkFollowers:
    """Marks functions with the attribute `tvmflow.follows` as element-wise: TVM then fuses each with the one before."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with `op_pattern` element-wise for each function with the attribute `tvmflow.follows`."""
        for variable, function in mod.functions_items():
            if FOLLOWS.keys() & dict(function.attrs or {}).keys():
                mod.update_func(variable, function.with_attr("op_pattern", _ELEMENT_WISE))
        return mod


@tvm.transform.module_pass(opt_level=0, name="FuseRoundings")
class FuseRoundings:
    """Lets TVM fuse a softmax or a norm with the rounding of its result to 16 bits, where nothing else reads it.

    The rule for rows computes the rounding as well. With other functions they are not fused, for each of these belongs
    to the kernel whose result it reads.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module in which such a call runs a copy of its function with the `op_pattern` of a kernel."""
        calls: list[relax.Call] = []
        of_rows: dict[tvm.ir.GlobalVar, bool] = {}
        for function in relax_functions(mod).values():
            for block in function.body.blocks:
                users = relax.analysis.udchain(block) if isinstance(block, relax.DataflowBlock) else {}
                values = {binding.var: binding.value for binding in block.bindings}
                for variable, value in values.items():
                    readers = [values.get(reader) for reader in users.get(variable, ())]
                    if _kind(mod, value) is None or not readers or not all(_rounds(mod, item) for item in readers):
                        continue
                    callee = value.args[0]
                    if callee not in of_rows:
                        of_rows[callee] = "rowwise" in kernels_of(mod[callee])
                    calls += [value] if of_rows[callee] else []
        return _Separation(mod, calls, _KERNEL).run() if calls else mod


def _rounds(mod: tvm.IRModule, call: Any) -> bool:
    """Whether a call runs a function that rounds a tensor to 16 bits."""
    return _kind(mod, call) is not None and ROUNDING in mod[call.args[0]].attrs


@tvm.transform.module_pass(opt_level=0, name="SeparateSizes")
class SeparateSizes:
    """Keeps TVM from fusing a function whose operands are sizes alone, without tensors.

    TVM cannot fuse such a function with one that takes other sizes.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with `op_pattern` set to opaque for functions without tensor operands."""
        for variable, function in mod.functions_items():
            operands = function.params[:-1] if isinstance(function, PrimFunc) else ()
            if operands and not any(tirx.is_buffer_var(param) for param in operands):
                mod.update_func(variable, function.with_attr("op_pattern", _OPAQUE))
        return mod


@tvm.transform.module_pass(opt_level=0, name="SeparateTransposes")
class SeparateTransposes:
    """Keeps TVM from fusing a transpose with the element-wise functions before and after it.

    Alone it moves tiles by shuffles of vectors; with arithmetic it would load or store the numbers one by one.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with `op_pattern` set to opaque for transposes of more than a few numbers.

        A transpose with the attribute `tvmflow.follows` belongs to the kernel before it.
        """
        for variable, function in mod.functions_items():
            if not isinstance(function, PrimFunc) or FOLLOWS.keys() & dict(function.attrs or {}).keys():
                continue
            if is_transpose(function) and bytes_of(function.params[-1]) > _FEW_BYTES:
                mod.update_func(variable, function.with_attr("op_pattern", _OPAQUE))
        return mod


@tvm.transform.module_pass(opt_level=0, name="SeparateRepeats")
class SeparateRepeats:
    """Keeps an operator that repeats a kernel's result along a dimension, or cuts it, out of the kernel's function.

    A kernel is computed where its result is read. In squeeze-and-excitation a 1x1 convolution of one pixel scales a
    whole image: fused with the product, the convolution would be computed again for each pixel. TVM takes a slice from
    the first element on for element-wise, but most rules of kernels do not know a result of other sizes.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with `op_pattern` set to injective for functions that repeat or cut a kernel's result."""
        for function in relax_functions(mod).values():
            # The results of kernels, and the functions of these.
            kernels: dict[relax.Var, tvm.ir.GlobalVar] = {}
            for binding in (binding for block in function.body.blocks for binding in block.bindings):
                call, kind = binding.value, _kind(mod, binding.value)
                arguments = [] if kind is None else [item for item in call.args[1] if item in kernels]
                follows = kind in (_ELEMENT_WISE, _BROADCAST) and bool(arguments)
                if follows and any(
                    _repeats(item, call) or (_is_cut(mod, item, call) and not _computes_parts(mod[kernels[item]]))
                    for item in arguments
                ):
                    variable = call.args[0]
                    mod.update_func(variable, mod[variable].with_attr("op_pattern", _INJECTIVE))
                elif kind == _KERNEL:
                    kernels[binding.var] = call.args[0]
                elif follows:
                    # Operators after a kernel are fused with it, so their results are its results.
                    kernels[binding.var] = kernels[arguments[0]]
        return mod


@tvm.transform.module_pass(opt_level=0, name="StoreRepeats")
class StoreRepeats:
    """Lets element-wise functions store a tensor that another function reads again along a dimension.

    Fused with its reader, the tensor would be computed again for each repetition: the bias of each channel, quantised
    by a scale that the model computes, for each pixel, or the cosines of each place, for each head of attention.
    Tensors of one element stay fused, because they are computed before the loops of their readers.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module in which the calls that compute such tensors run copies that end a fused function.

        Tensors stay fused where computing them again takes less time than a function of their own.
        """
        stored: list[relax.Call] = []
        for function in relax_functions(mod).values():
            stored += self._list_repeated(mod, function)
        return _Separation(mod, stored, _REDUCTION).run() if stored else mod

    def _list_repeated(self, mod: tvm.IRModule, function: relax.Function) -> list[relax.Call]:
        """List the calls of a function whose results are stored."""
        stored: list[relax.Call] = []
        # The operations for an element of each tensor that its readers would compute.
        operations: dict[relax.Var, int] = {}
        calls: dict[relax.Var, relax.Call] = {}
        kernels: set[relax.Var] = set()
        for binding in (binding for block in function.body.blocks for binding in block.bindings):
            call = binding.value
            kind = _kind(mod, call)
            if kind is None or not isinstance(call.ty, relax.TensorType):
                continue
            if kind == _KERNEL or (kind <= _BROADCAST and any(item in kernels for item in call.args[1])):
                # Operators after a kernel are fused with it.
                kernels.add(binding.var)
            if kind > _INJECTIVE:
                continue
            for item in call.args[1]:
                if item not in kernels and operations.get(item) and kind <= _BROADCAST and _repeats(item, call):
                    cycles = operations[item] * _count_elements(call) / self._machine.lanes
                    if cycles > self._machine.parallel_cycles:
                        operations[item] = 0
                        stored.append(calls[item])
            if binding.var not in kernels and _count_elements(call) > 1:
                own = _count_operations(mod[call.args[0]])
                operations[binding.var] = own + sum(operations.get(item, 0) for item in call.args[1])
                calls[binding.var] = call
        return stored


def _count_elements(call: relax.Call) -> float:
    """The number of elements of a call's result; infinite where a size is symbolic."""
    dims = sizes(call)
    return math.inf if dims is None else _count(dims)


def _count(dims: Iterable[Any]) -> float:
    """The number of elements of a tensor of these sizes; infinite where one is symbolic."""
    numbers = map(static, dims)
    return math.prod(math.inf if size is None else size for size in numbers)


def _count_operations(function: PrimFunc) -> int:
    """The number of operations for an element of an element-wise function's result, without those of indices."""
    values: list[Any] = []
    tvm_ffi.structural_walk(function.body, (tirx.BufferStore, lambda store: values.append(store.value)))
    return sum(
        not isinstance(node, tvm.ir.TensorLoad | tirx.IntImm | tirx.FloatImm | tirx.Var)
        for value in values
        for node in walk(value, indices=False)
    )


@tvm.transform.module_pass(opt_level=0, name="SeparateActivations")
class SeparateActivations:
    """Lets a fused function compute at most two nested activations, one in the argument of the other.

    An activation such as `vectormath.tanh` binds its argument to a variable. TVM's code generator substitutes the
    argument for the variable wherever it simplifies, so the build time multiplies with each activation: it is a tenth
    of a second for two and minutes for four. It is half a minute for one sine, which binds many variables, of an
    argument with long indices, as those of a factor for each channel of an image of free height and width. It is
    minutes for one activation of joined tensors that are cut to another free size, as a transposed convolution ends.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module in which a call of such an activation runs a copy of its function.

        The copy has the `op_pattern` of a kernel, so TVM does not fuse it with the functions before it.
        """
        bindings_of: dict[tvm.ir.GlobalVar, int] = {}
        separate: list[relax.Call] = []
        for function in relax_functions(mod).values():
            nested: dict[relax.Var, int] = {}
            with_long_indices: set[relax.Var] = set()
            joins: set[relax.Var] = set()
            cuts: set[relax.Var] = set()
            for binding in (binding for block in function.body.blocks for binding in block.bindings):
                call, kind = binding.value, _kind(mod, binding.value)
                if kind is None or kind > _KERNEL:
                    continue
                callee = call.args[0]
                if callee not in bindings_of:
                    bindings_of[callee] = _count_bindings(mod[callee])
                fused = call.args[1] if kind != _KERNEL else ()
                is_long = any(item in with_long_indices or _has_long_index(item, call) for item in fused)
                is_joined = (kind == _INJECTIVE and len(fused) > 1) or any(item in joins for item in fused)
                is_cut = any(item in cuts for item in fused) or (is_joined and _is_cut_to_free_size(call, kind))
                own = min(bindings_of[callee], 1)
                nested[binding.var] = max((nested.get(item, 0) for item in fused), default=0) + own
                is_slow = (is_long and bindings_of[callee] > _MOST_BINDINGS) or (is_cut and bindings_of[callee])
                if nested[binding.var] > _MOST_NESTED or is_slow:
                    nested[binding.var] = own
                    separate.append(call)
                    continue
                for holds, variables in ((is_long, with_long_indices), (is_joined, joins), (is_cut, cuts)):
                    if holds:
                        variables.add(binding.var)
        return _Separation(mod, separate, _KERNEL).run() if separate else mod


def _is_cut_to_free_size(call: relax.Call, kind: int) -> bool:
    """Whether a call takes a part of its operand whose size along some axis is free, and another one than before."""
    operands = call.args[1].fields
    before, after = sizes(operands[0]) if kind == _INJECTIVE and operands else None, sizes(call)
    if before is None or after is None or len(before) != len(after):
        return False
    return any(static(size) is None and not are_equal(size, other) for size, other in zip(after, before, strict=True))


def _count_bindings(function: PrimFunc) -> int:
    """The number of variables that the expressions of a function bind."""
    variables: list[Any] = []
    tvm_ffi.structural_walk(function.body, (Let, lambda binding: variables.append(binding.var)))
    return len(variables)


def _has_long_index(argument: relax.Expr, call: relax.Call) -> bool:
    """Whether a call reads an argument again along several of its last dimensions, of which one is free.

    Its index is then a quotient by a product of sizes.
    """
    dims, result = sizes(argument), sizes(call)
    if dims is None or result is None:
        return False
    own = [static(size) for size in dims]
    behind = len(own) - max((place + 1 for place, size in enumerate(own) if size != 1), default=len(own))
    last = [static(size) for size in result[len(result) - behind :] if static(size) != 1]
    return len(last) > 1 and None in last


@mutator
class _Separation(PyExprMutator):  # type: ignore[misc]
    """Lets calls run copies of their functions of another kind.

    A kernel begins a fused function, and a reduction ends one.
    """

    def __init__(self, mod: tvm.IRModule, calls: list[relax.Call], kind: int) -> None:
        super().__init__(mod)
        self._calls = calls
        self._kind = kind
        self._copies: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar] = {}

    def run(self) -> tvm.IRModule:
        """Return the module with the calls changed."""
        return rewrite_functions(self, self.builder_.get())

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Change one of the calls."""
        if not any(op.same_as(call) for call in self._calls):
            return super().visit_call_(op)
        callee, *arguments = op.args
        if callee not in self._copies:
            # TVM's code generator takes a variable that two functions bind for one variable, so the copy has its own.
            function = renew_defs(self.builder_.get()[callee]).with_attr("op_pattern", self._kind)
            self._copies[callee] = self.builder_.add_func(function, callee.name_hint)
        return relax.Call(op.op, [self._copies[callee], *map(self.visit_expr, arguments)], op.attrs, op.ty_args)


def _kind(mod: tvm.IRModule, call: Any) -> int | None:
    """The kind of the function that a call runs; None for other expressions and for functions without a kind."""
    if called_operator(call) != "relax.call_tir":
        return None
    function = mod[call.args[0]]
    kind = (function.attrs or {}).get("op_pattern") if isinstance(function, PrimFunc) else None
    return None if kind is None else int(kind)


def _computes_parts(function: PrimFunc) -> bool:
    """Whether the rules of a function's kernels compute only that part of the result that the function returns."""
    return set(kernels_of(function)) <= _OF_PARTS


def _is_cut(mod: tvm.IRModule, argument: relax.Expr, call: relax.Call) -> bool:
    """Whether an element-wise call reads only a part of an argument, and is no transpose that belongs to a kernel."""
    dims, result = sizes(argument), sizes(call)
    if dims is None or result is None or len(dims) != len(result) or FOLLOWS.keys() & dict(mod[call.args[0]].attrs):
        return False
    return any(
        static(size) != 1 and not tvm_ffi.structural_equal(size, kept) for size, kept in zip(dims, result, strict=True)
    )


def _repeats(argument: relax.Expr, call: relax.Call) -> bool:
    """Whether an element-wise call reads elements of an argument again along a dimension of its result."""
    dims, result = sizes(argument), sizes(call)
    if dims is None or result is None or len(dims) > len(result):
        return False  # Squeeze is element-wise too.
    own = [1] * (len(result) - len(dims)) + [static(size) for size in dims]
    return any(size == 1 != static(whole) for size, whole in zip(own, result, strict=True))
