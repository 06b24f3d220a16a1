"""What a Relax function does that only calls TIR functions: its calls in order, with their memory.

The direct forms of `main` (`direct`) and of loops (`passes.loops`) are made of this.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.s_tir import SBlock, SBlockRealize
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.annotations import DIRECT
from tvmflow.compiler.operators.common import buffer, static
from tvmflow.compiler.passes.constant_keys import ConstantKeys
from tvmflow.compiler.passes.functions import variables_of_outputs
from tvmflow.compiler.passes.storage import Life, bytes_of_type, largest, share
from tvmflow.compiler.passes.views import CALL_TIR, is_reshape, results_read_once
from tvmflow.compiler.statements import replace_variables

# Bytes; TVM puts less on the stack, which is not aligned for its vectors.
_LEAST_MEMORY = 1024


class NoDirectFormError(Exception):
    """A function holds something that the virtual machine alone can run."""


@dataclass(eq=False)
class Tensor:
    """A tensor of the function. A view has the memory of another tensor, its `source`."""

    name: str
    type: relax.TensorType
    source: "Tensor | None" = None

    @property
    def root(self) -> "Tensor":
        """The tensor whose memory this one has."""
        return self if self.source is None else self.source.root


@dataclass(frozen=True)
class Step:
    """A call of the TIR function `symbol`, whose arguments are tensors and numbers; `sizes` follow its results."""

    symbol: str
    arguments: Sequence["Tensor | tirx.Expr"]
    results: Sequence[Tensor]
    sizes: Sequence[tirx.Expr]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, and the results."""
        return [item for item in (*self.arguments, *self.results) if isinstance(item, Tensor)]


class Plan:
    """What a function of a module does: its `parameters`, its `constants`, its `steps` in order, and `outputs`.

    `sizes` are the symbolic sizes that its parameters define. `equal_sizes` are pairs of sizes that the function takes
    for equal, and that may differ for wrong inputs. The result of a reshape is a view of its argument. Where
    `writes_outputs`, an output is one only of a tensor that nothing else reads. Raises NoDirectFormError for a function
    that does more than to call TIR functions and to return tensors, and where the size of a result follows from more
    than the sizes of the parameters.
    """

    def __init__(self, mod: tvm.IRModule, function: relax.Function, *, writes_outputs: bool) -> None:
        self._mod, self._outputs = mod, variables_of_outputs(function) if writes_outputs else set()
        self._read_once = results_read_once(mod, function) if writes_outputs else set()
        self.steps: list[Step] = []
        self.equal_sizes: list[tuple[tirx.Expr, tirx.Expr]] = []
        # The sizes that casts name, in terms of those of the inputs.
        self._named_sizes: dict[tirx.Var, tirx.Expr] = {}
        self._keys = ConstantKeys()
        self.constants: dict[int, tuple[relax.Expr, Tensor]] = {}
        params = function.params
        sizes = [size for param in params for size in relax.analysis.definable_tir_vars_in_type(param.ty)]
        self.sizes = list(dict.fromkeys(sizes))
        # The sizes that a variable of a shape stands for.
        self._shapes: dict[relax.Var, Sequence[tirx.Expr]] = {
            param: param.ty.values for param in params if isinstance(param.ty, relax.ShapeType)
        }
        self.parameters = {
            param: self._tensor(str(param.name), param.ty) for param in params if param not in self._shapes
        }
        # The tensors that a variable stands for: one, or those of a tuple.
        self._values = {param: [tensor] for param, tensor in self.parameters.items()}
        for block in function.body.blocks:
            for binding in block.bindings:
                if isinstance(binding.var.ty, relax.ShapeType):
                    self._bind_shape(binding)
                else:
                    self._bind(binding)
        self.outputs = self._evaluate("output", function.body.body)

    def _bind(self, binding: relax.Binding) -> None:
        """Take the tensors that a variable stands for from its binding."""
        values = self._view(binding) or self._evaluate(str(binding.var.name), binding.value)
        if isinstance(binding, relax.MatchCast):
            if len(values) != 1 or not isinstance(binding.ty, relax.TensorType):
                raise NoDirectFormError
            sizes = binding.ty.shape.values if isinstance(binding.ty.shape, relax.ShapeExpr) else ()
            self._match(values[0].type.shape.values, sizes)
        self._values[binding.var] = values

    def _bind_shape(self, binding: relax.Binding) -> None:
        """Take the sizes that a variable stands for from its binding, and what a cast of them checks."""
        value = binding.value
        shape = value.values if isinstance(value, relax.ShapeExpr) else self._shapes.get(value)
        if shape is None:
            raise NoDirectFormError
        self._shapes[binding.var] = [self._number(size) for size in shape]
        if isinstance(binding, relax.MatchCast):
            self._match(self._shapes[binding.var], binding.ty.values or ())

    def _view(self, binding: relax.Binding) -> list[Tensor]:
        """The tensor that a reshape makes a view of another; empty for other expressions."""
        value = binding.value
        if not isinstance(value, relax.Call) or value.op != CALL_TIR:
            return []
        callee, operands, *_ = value.args
        tensors = [item for item in _items(operands) if not isinstance(item.ty, tvm.ir.PrimType)]
        if binding.var in self._outputs and not self._read_once.issuperset(tensors):
            return []
        if len(tensors) != 1 or not is_reshape(self._mod[callee], unknown=False):
            return []
        view, (source,) = self._tensor(str(binding.var.name), value.ty), self._argument("", tensors[0])
        if not isinstance(source, Tensor):
            return []
        # The beginning of a tensor is in its order, too, but the caller's memory for an output holds no more than that.
        if binding.var in self._outputs and not _have_equal_sizes(view, source.root):
            return []
        view.source = source
        return [view]

    def _evaluate(self, name: str, value: relax.Expr) -> list[Tensor]:
        """The tensors that an expression stands for; a call becomes a step."""
        if isinstance(value, relax.Var):
            if value not in self._values:
                raise NoDirectFormError
            return self._values[value]
        if isinstance(value, tvm.ir.GenericConst):
            tensor = self._tensor(f"constant_{len(self.constants)}", value.ty)
            return [self.constants.setdefault(self._keys(value), (value, tensor))[1]]
        if isinstance(value, relax.Tuple):
            return [tensor for item in value.fields for tensor in self._evaluate(name, item)]
        if isinstance(value, relax.TupleGetItem):
            return [self._evaluate(name, value.tuple_value)[value.index]]
        if not isinstance(value, relax.Call) or value.op != CALL_TIR:
            raise NoDirectFormError
        types = value.ty.fields if isinstance(value.ty, relax.TupleType) else [value.ty]
        callee, operands, *sizes = value.args
        arguments = [argument for item in _items(operands) for argument in self._argument(name, item)]
        results = [self._tensor(name, item) for item in types]
        numbers = [self._number(size) for item in sizes for size in item.values]
        self.steps.append(Step(callee.name_hint, arguments, results, numbers))
        return results

    def _match(self, own_sizes: Sequence[tirx.Expr], sizes: Sequence[tirx.Expr]) -> None:
        """Name sizes as a cast to `sizes` does, or take them for equal to those that have the names already."""
        for own, size in zip(own_sizes, sizes, strict=False):
            if isinstance(size, tirx.Var) and size not in self.sizes and size not in self._named_sizes:
                self._named_sizes[size] = own
                continue
            expected = self._number(size)
            if not tvm.sym.Analyzer().can_prove_equal(own, expected):
                self.equal_sizes.append((own, expected))

    def _argument(self, name: str, value: relax.Expr) -> "Sequence[Tensor | tirx.Expr]":
        """The arguments that an operand of a call stands for: tensors, or a number."""
        return [self._number(value)] if isinstance(value.ty, tvm.ir.PrimType) else self._evaluate(name, value)

    def _number(self, value: tirx.Expr) -> tirx.Expr:
        """Return a number in terms of the sizes of the inputs."""
        value = replace_variables(value, self._named_sizes)
        if not set(self.sizes).issuperset(tirx.analysis.undefined_vars(value)):
            raise NoDirectFormError
        return value

    def _tensor(self, name: str, type_of: relax.Type) -> Tensor:
        if not isinstance(type_of, relax.TensorType) or not isinstance(type_of.shape, relax.ShapeExpr):
            raise NoDirectFormError
        return Tensor(name, relax.TensorType([*map(self._number, type_of.shape.values)], type_of.dtype))


def _have_equal_sizes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors provably have equally many elements of one type."""
    sizes = (math.prod(item.type.shape.values) for item in (one, other))
    is_same_type = one.type.dtype == other.type.dtype
    return is_same_type and bool(tvm.sym.Analyzer().can_prove_equal(*map(tirx.convert, sizes)))


def _items(operands: relax.Expr) -> Sequence[relax.Expr]:
    return list(operands.fields) if isinstance(operands, relax.Tuple) else [operands]


# -- TIR, in the builder of this thread --------------------------------------------------------------------------------


def bytes_of(tensor: Tensor) -> Any:
    """Return the bytes of a tensor, an integer or a symbolic size."""
    return bytes_of_type(tensor.type)


def buffer_of(tensor: Tensor) -> Any:
    """Return a buffer for a tensor, to be a parameter of a function."""
    return buffer(tensor.name, tensor.type.shape.values, str(tensor.type.dtype))


def allocate(size: Any) -> Any:
    """Allocate memory of `size` bytes, an integer or a symbolic size."""
    number = static(size)
    shape = (size if number is None else max(number, _LEAST_MEMORY),)
    return T.alloc_buffer(shape, "uint8", scope="global", layout=None).data


def allocate_results(steps: Sequence[Step], memory: dict[Tensor, Any], kept: Iterable[Tensor] = ()) -> None:
    """Allocate the results of steps that have no memory yet, and add them to `memory`.

    Results share memory, except with tensors that a step between their own and the last one that reads them needs, and
    with those of `kept`, which all later steps need.
    """
    last = {tensor.root: place for place, step in enumerate(steps) for tensor in step.tensors}
    last |= {tensor.root: len(steps) for tensor in kept}
    results = [(place, item) for place, step in enumerate(steps) for item in step.results if item not in memory]
    lives = [Life(bytes_of(tensor), place, last[tensor]) for place, tensor in results]
    for block in share(lives):
        pointer = allocate(largest([lives[place].size for place in block.members]))
        memory |= {results[place][1]: pointer for place in block.members}


def check_sizes(plan: Plan) -> None:
    """Check that the sizes of a plan that must be equal are."""
    for one, other in plan.equal_sizes:
        # It begins as the virtual machine's own error, by which the runtime knows it.
        with T.Assert(one == other, f"match_cast error: {_demand(one, other)}"):
            T.evaluate(0)


def call_functions(steps: Sequence[Step], memory: Mapping[Tensor, Any]) -> None:
    """Call the functions of steps, in order; `memory` is that of their tensors."""
    for step in steps:
        operands = [
            _array(memory[item.root], item) if isinstance(item, Tensor) else item
            for item in (*step.arguments, *step.results, *step.sizes)
        ]
        T.evaluate(T.call_cpacked(step.symbol, *operands))


def _demand(size: tirx.Expr, expected: tirx.Expr) -> str:
    """What a check asks of a size, in words. A size that is compared with the limit itself may be beyond it."""
    limits = {tirx.Max: "at most ", tirx.Min: "at least "}
    words = limits.get(type(size), "")
    if words and tvm_ffi.structural_equal(size.b, expected):
        return f"{_text(size.a)} must be {words}{_text(expected)}"
    return f"{_text(size)} must be {_text(expected)}"


def _text(size: tirx.Expr) -> str:
    """A size as its user writes it: without TVM's type of numbers."""
    return re.sub(r"T\.int64\((-?\d+)\)", r"\1", str(size))


def _array(memory: Any, tensor: Tensor) -> Any:
    """The tensor as an argument of a TIR function."""
    shape, zero = tensor.type.shape.values, tirx.const(0, str(tensor.type.dtype))
    return T.tvm_stack_make_array(memory, T.tvm_stack_make_shape(*shape), 0, len(shape), zero, tirx.const(0, "int64"))


def direct_form(parameters: Sequence[Any], body: Any, name: str) -> tirx.PrimFunc:
    """Return a TIR function that calls functions of the library."""
    # TVM looks for reshapes in the functions of a model, which begin with a block.
    block = SBlockRealize([], True, SBlock([], [], [], "root", body))
    function = tirx.PrimFunc(parameters, block)
    return function.with_attr({"global_symbol": name, "tirx.noalias": True, "tirx.is_scheduled": True, DIRECT: True})
