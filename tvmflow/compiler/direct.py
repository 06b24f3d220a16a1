"""The direct form of `main`: one function of the library that calls the functions of `main` in order.

TVM's virtual machine allocates each result of a call and interprets bytecode, which takes longer than the arithmetic of
a small model. The direct form writes the outputs to memory of its caller, and has its own for the results in between.
Its parameters are the inputs, the packed weights, the constants of `main` and the outputs. The function
`main_constants` of the virtual machine returns the constants as a tuple.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx, topi
from tvm.s_tir import SBlockRealize
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.bundle import DIRECT_MAIN, LARGEST_DIRECT_OUTPUT, MAIN_CONSTANTS
from tvmflow.compiler.annotations import RESHAPE
from tvmflow.compiler.operators.common import buffer, static
from tvmflow.compiler.passes.calls import ConstantKey, key_of_constant
from tvmflow.compiler.statements import replace_variables

# Bytes; TVM puts less on the stack, which is not aligned for its vectors.
_LEAST_MEMORY = 1024
# The most dimensions of all tensors of all calls together. The time of LLVM grows with their square: it is a second or
# two for these, and nine for the 3800 of a RegNet, which takes milliseconds to run and gains nothing.
_MOST_SIZES = 1200
_CALL_TIR = tvm.ir.Op.get("relax.call_tir")


class _NoDirectFormError(Exception):
    """`main` holds something that the virtual machine alone can run."""


def add_direct_main(scheduled: tvm.IRModule) -> tvm.IRModule:
    """Return the module with the direct form of its `main` and with `main_constants`, or as it is where there is none.

    There is none for a `main` that does more than to call TIR functions and to return results of theirs, as control
    flow does, and none where the size of a result follows from more than the sizes of the inputs. A `main` with an
    output that is always too large for the direct form gets none either, nor does one of very many calls.
    """
    try:
        plan = _Plan(scheduled)
    except _NoDirectFormError:
        return scheduled
    if any((static(_size(tensor)) or 0) > LARGEST_DIRECT_OUTPUT for tensor in plan.outputs):
        return scheduled
    if sum(len(tensor.type.shape.values) for step in plan.steps for tensor in step.tensors) > _MOST_SIZES:
        return scheduled
    mod = tvm.IRModule(dict(scheduled.functions_items()), attrs=scheduled.attrs)
    mod[DIRECT_MAIN] = _function_of(plan)
    mod[MAIN_CONSTANTS] = _constants_function([constant for constant, _ in plan.constants.values()])
    return mod


def _is_reshape(function: Any) -> bool:
    """Whether a function copies a tensor in its order, as to another shape."""
    if not isinstance(function, tirx.PrimFunc) or not isinstance(function.body, SBlockRealize):
        return False
    if RESHAPE in (function.attrs or {}):
        return True
    try:
        return bool(relax.analysis.has_reshape_pattern(function))
    except tvm.error.InternalError:
        # TVM's analysis fails on the loops of other functions, such as a convolution of free sizes.
        return False


@dataclass(eq=False)
class _Tensor:
    """A tensor of `main`, and the place of the last step that reads or writes its memory.

    A view has the memory of another tensor, its `source`.
    """

    name: str
    type: relax.TensorType
    last: int = -1
    source: "_Tensor | None" = None

    @property
    def root(self) -> "_Tensor":
        """The tensor whose memory this one has."""
        return self if self.source is None else self.source.root


@dataclass(frozen=True)
class _Step:
    """A call of the TIR function `symbol`, whose arguments are tensors and numbers; `sizes` follow its results."""

    symbol: str
    arguments: Sequence["_Tensor | tirx.Expr"]
    results: Sequence[_Tensor]
    sizes: Sequence[tirx.Expr]

    @property
    def tensors(self) -> list[_Tensor]:
        """The tensors among the arguments, and the results."""
        return [item for item in (*self.arguments, *self.results) if isinstance(item, _Tensor)]


class _Plan:
    """What the `main` of a module does: its `parameters`, `constants` by their values, `steps` in order, and `outputs`.

    `equal_sizes` are pairs of sizes that the function takes for equal, and that may differ for wrong inputs. The result
    of a reshape is a view of its argument, unless it is an output. Raises _NoDirectFormError for a function that has no
    direct form.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        main = mod["main"]
        self._mod, self._outputs = mod, _variables_of_outputs(main)
        self.steps: list[_Step] = []
        self.equal_sizes: list[tuple[tirx.Expr, tirx.Expr]] = []
        # The sizes that casts name, in terms of those of the inputs.
        self._named_sizes: dict[tirx.Var, tirx.Expr] = {}
        self.constants: dict[ConstantKey, tuple[relax.Expr, _Tensor]] = {}
        self._sizes = {size for param in main.params for size in relax.analysis.definable_tir_vars_in_type(param.ty)}
        self.parameters = [self._tensor(str(param.name), param.ty) for param in main.params]
        # The tensors that a variable stands for: one, or those of a tuple.
        self._values = {param: [tensor] for param, tensor in zip(main.params, self.parameters, strict=True)}
        # The sizes that a variable of a shape stands for.
        self._shapes: dict[relax.Var, Sequence[tirx.Expr]] = {}
        for block in main.body.blocks:
            for binding in block.bindings:
                if isinstance(binding.var.ty, relax.ShapeType):
                    self._bind_shape(binding)
                else:
                    self._bind(binding)
        self.outputs = self._evaluate("output", main.body.body)
        written = [result for step in self.steps for result in step.results]
        if len(set(self.outputs)) < len(self.outputs) or not set(self.outputs) <= set(written):
            raise _NoDirectFormError

    def _bind(self, binding: relax.Binding) -> None:
        """Take the tensors that a variable stands for from its binding."""
        values = self._view(binding) or self._evaluate(str(binding.var.name), binding.value)
        if isinstance(binding, relax.MatchCast):
            if len(values) != 1 or not isinstance(binding.ty, relax.TensorType):
                raise _NoDirectFormError
            sizes = binding.ty.shape.values if isinstance(binding.ty.shape, relax.ShapeExpr) else ()
            self._match(values[0].type.shape.values, sizes)
        self._values[binding.var] = values

    def _bind_shape(self, binding: relax.Binding) -> None:
        """Take the sizes that a variable stands for from its binding, and what a cast of them checks."""
        value = binding.value
        shape = value.values if isinstance(value, relax.ShapeExpr) else self._shapes.get(value)
        if shape is None:
            raise _NoDirectFormError
        self._shapes[binding.var] = [self._number(size) for size in shape]
        if isinstance(binding, relax.MatchCast):
            self._match(self._shapes[binding.var], binding.ty.values or ())

    def _view(self, binding: relax.Binding) -> list[_Tensor]:
        """The tensor that a reshape makes a view of another; empty for other expressions."""
        value = binding.value
        if not isinstance(value, relax.Call) or value.op != _CALL_TIR or binding.var in self._outputs:
            return []
        callee, operands, *_ = value.args
        tensors = [item for item in _items(operands) if not isinstance(item.ty, tvm.ir.PrimType)]
        if len(tensors) != 1 or not _is_reshape(self._mod[callee]):
            return []
        view, (source,) = self._tensor(str(binding.var.name), value.ty), self._argument("", tensors[0])
        view.source = source if isinstance(source, _Tensor) else None
        return [] if view.source is None else [view]

    def _evaluate(self, name: str, value: relax.Expr) -> list[_Tensor]:
        """The tensors that an expression stands for; a call becomes a step."""
        if isinstance(value, relax.Var):
            if value not in self._values:
                raise _NoDirectFormError
            return self._values[value]
        if isinstance(value, tvm.ir.GenericConst):
            tensor = self._tensor(f"constant_{len(self.constants)}", value.ty)
            return [self.constants.setdefault(key_of_constant(value), (value, tensor))[1]]
        if isinstance(value, relax.Tuple):
            return [tensor for item in value.fields for tensor in self._evaluate(name, item)]
        if isinstance(value, relax.TupleGetItem):
            return [self._evaluate(name, value.tuple_value)[value.index]]
        if not isinstance(value, relax.Call) or value.op != _CALL_TIR:
            raise _NoDirectFormError
        types = value.ty.fields if isinstance(value.ty, relax.TupleType) else [value.ty]
        callee, operands, *sizes = value.args
        arguments = [argument for item in _items(operands) for argument in self._argument(name, item)]
        results = [self._tensor(name, item) for item in types]
        numbers = [self._number(size) for item in sizes for size in item.values]
        step = _Step(callee.name_hint, arguments, results, numbers)
        for tensor in step.tensors:
            tensor.root.last = len(self.steps)
        self.steps.append(step)
        return results

    def _match(self, own_sizes: Sequence[tirx.Expr], sizes: Sequence[tirx.Expr]) -> None:
        """Name sizes as a cast to `sizes` does, or take them for equal to those that have the names already."""
        for own, size in zip(own_sizes, sizes, strict=False):
            if isinstance(size, tirx.Var) and size not in self._sizes and size not in self._named_sizes:
                self._named_sizes[size] = own
                continue
            expected = self._number(size)
            if not tvm.sym.Analyzer().can_prove_equal(own, expected):
                self.equal_sizes.append((own, expected))

    def _argument(self, name: str, value: relax.Expr) -> "Sequence[_Tensor | tirx.Expr]":
        """The arguments that an operand of a call stands for: tensors, or a number."""
        return [self._number(value)] if isinstance(value.ty, tvm.ir.PrimType) else self._evaluate(name, value)

    def _number(self, value: tirx.Expr) -> tirx.Expr:
        """Return a number in terms of the sizes of the inputs."""
        value = replace_variables(value, self._named_sizes)
        if not self._sizes.issuperset(tirx.analysis.undefined_vars(value)):
            raise _NoDirectFormError
        return value

    def _tensor(self, name: str, type_of: relax.Type) -> _Tensor:
        if not isinstance(type_of, relax.TensorType) or not isinstance(type_of.shape, relax.ShapeExpr):
            raise _NoDirectFormError
        return _Tensor(name, relax.TensorType([*map(self._number, type_of.shape.values)], type_of.dtype))


def _variables_of_outputs(main: relax.Function) -> set[relax.Var]:
    """The variables whose values a function returns."""
    values = {binding.var: binding.value for block in main.body.blocks for binding in block.bindings}
    pending, outputs = [main.body.body], set()
    while pending:
        value = pending.pop()
        if isinstance(value, relax.Var):
            outputs.add(value)
            pending.append(values.get(value))
        elif isinstance(value, relax.Tuple):
            pending.extend(value.fields)
        elif isinstance(value, relax.TupleGetItem):
            pending.append(value.tuple_value)
    return outputs


def _items(operands: relax.Expr) -> Sequence[relax.Expr]:
    return list(operands.fields) if isinstance(operands, relax.Tuple) else [operands]


def _function_of(plan: _Plan) -> tirx.PrimFunc:
    """The TIR function that runs the steps of a plan."""
    tensors = [*plan.parameters, *(tensor for _, tensor in plan.constants.values()), *plan.outputs]
    parameters = [buffer(tensor.name, tensor.type.shape.values, str(tensor.type.dtype)) for tensor in tensors]
    memory = {tensor: item.data for tensor, item in zip(tensors, parameters, strict=True)}
    arguments = set(tensors)
    # Memory that no later step reads, with its size in bytes.
    free: list[tuple[Any, Any]] = []
    with IRBuilder() as builder, T.seq_scope():
        for one, other in plan.equal_sizes:
            # It begins as the virtual machine's own error, by which the runtime knows it.
            with T.Assert(one == other, f"match_cast error: {_text(one)} must be {_text(other)}"):
                T.evaluate(0)
        for place, step in enumerate(plan.steps):
            for tensor in step.results:
                if tensor not in memory:
                    memory[tensor] = _allocate(_size(tensor), free)
            operands = [
                _array(memory[item.root], item) if isinstance(item, _Tensor) else item
                for item in (*step.arguments, *step.results, *step.sizes)
            ]
            T.evaluate(T.call_cpacked(step.symbol, *operands))
            roots = dict.fromkeys(item.root for item in step.tensors)
            ended = [item for item in roots if item.last == place and item not in arguments]
            free += [(_size(item), memory[item]) for item in ended]
    function = tirx.PrimFunc(parameters, builder.get().body)
    return function.with_attr({"global_symbol": DIRECT_MAIN, "tirx.noalias": True, "tirx.is_scheduled": True})


def _text(size: tirx.Expr) -> str:
    """A size as its user writes it: without TVM's type of numbers."""
    return re.sub(r"T\.int64\((-?\d+)\)", r"\1", str(size))


def _size(tensor: _Tensor) -> Any:
    """The bytes of a tensor, an integer or a symbolic size."""
    bytes_of_element = -(-tvm.DataType(str(tensor.type.dtype)).bits // 8)
    return topi.utils.simplify(math.prod(tensor.type.shape.values, start=bytes_of_element))


def _allocate(size: Any, free: list[tuple[Any, Any]]) -> Any:
    """Memory of `size` bytes: the smallest of the list `free` that is large enough, else new memory."""
    number = static(size)
    numbers = [static(bytes_of_item) for bytes_of_item, _ in free]
    fitting = [
        (numbers[place] or 0, place)
        for place, (bytes_of_item, _) in enumerate(free)
        if (number is not None and (numbers[place] or 0) >= number) or tvm_ffi.structural_equal(bytes_of_item, size)
    ]
    if fitting:
        return free.pop(min(fitting)[1])[1]
    shape = (size if number is None else max(number, _LEAST_MEMORY),)
    return T.alloc_buffer(shape, "uint8", scope="global", layout=None).data


def _array(memory: Any, tensor: _Tensor) -> Any:
    """The tensor as an argument of a TIR function."""
    shape, zero = tensor.type.shape.values, tirx.const(0, str(tensor.type.dtype))
    return T.tvm_stack_make_array(memory, T.tvm_stack_make_shape(*shape), 0, len(shape), zero, tirx.const(0, "int64"))


def _constants_function(constants: Sequence[relax.Expr]) -> relax.Function:
    """The Relax function that returns the constants as a tuple."""
    builder = relax.BlockBuilder()
    with builder.function(MAIN_CONSTANTS, []):
        builder.emit_func_output(builder.normalize(relax.Tuple(constants)))
    return builder.get()[MAIN_CONSTANTS]
