"""Computes of a tensor only the part that is read, where each row is computed alone.

A classifier reads the first place of a transformer's last block, and a decoder the last one. Layers, norms and
element-wise operators before it need not compute the other places.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.compiler.operators.common import called_operator, numbers_of, static
from tvmflow.compiler.passes.functions import relax_functions
from tvmflow.compiler.passes.layout import ELEMENTWISE
from tvmflow.compiler.passes.rewrite import VIEWS, sizes

# The dimensions of the weights of a dense layer.
_MATRIX = 2
# A part is read first where it is at most this share of its tensor. To read a part is a copy, which a layer that
# computes nearly all of its rows does not save.
_LARGEST_SHARE = 0.5
_NORMS = ("relax.nn.layer_norm", "relax.nn.rms_norm")
# Of these the channels, or the elements that belong together, lie along the attribute `axis`.
_ALONG = (
    *("relax.nn.softmax", "relax.nn.log_softmax", "relax.nn.prelu"),
    *("relax.quantize", "relax.dequantize"),
)
# The operators that are worth computing for fewer rows. The others belong to a kernel before or after them.
_WORTH_IT = ("relax.matmul", *_NORMS, "relax.nn.softmax", "relax.nn.log_softmax")


@dataclass(frozen=True)
class _Part:
    """The elements of a tensor whose places along dimension `axis` are `first` and the next, `count` in all."""

    axis: int
    first: int
    count: int

    def of(self, tensor: relax.Expr) -> relax.Call:
        """The slice of a tensor. Where a size is free, the model checks elsewhere that it holds the part."""
        end = self.first + self.count
        return relax.op.strided_slice(tensor, [self.axis], [self.first], [end], assume_inbound=True)


# What the operators that read a tensor need of it: a part, or None for all of it.
_Need = _Part | None
# Returns what an operator needs of each operand for a part of its result; None where it needs each of them whole.
_Rule = Callable[[relax.Call, _Part], "list[_Need] | None"]


@tvm.transform.module_pass(opt_level=0, name="ComputeParts")
class ComputeParts:
    """Moves a slice of a tensor, or one place of it, before the layers and norms that compute the tensor row by row.

    A tensor of which several operators read the same part, and nothing reads the rest, is computed in that part.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with such slices moved."""
        rewriter = _Rewriter(mod)
        for variable, function in relax_functions(mod).items():
            parts = _parts_of(function)
            if parts:
                rewriter.parts = parts
                changed = relax.analysis.remove_all_unused(rewriter.visit_expr(function))
                rewriter.builder_.update_func(variable, changed)
        return rewriter.builder_.get()


def _parts_of(function: relax.Function) -> dict[relax.Var, _Part]:
    """The part of each tensor of a function to compute, where that is less than all of it and worth it."""
    parts: dict[relax.Var, _Part] = {}
    for block in function.body.blocks:
        if not isinstance(block, relax.DataflowBlock):
            continue
        needs = _needs(block)
        gains: set[relax.Var] = set()
        for binding in block.bindings:
            part, call = needs.get(binding.var), binding.value
            operands = None if part is None else _operands(call, part)
            if part is None or operands is None:
                continue
            before = (item for item, need in zip(call.args, operands, strict=True) if need is not None)
            if called_operator(call) in _WORTH_IT or any(item in gains for item in before):
                gains.add(binding.var)
                parts[binding.var] = part
    return parts


def _needs(block: relax.DataflowBlock) -> dict[relax.Var, _Need]:
    """What the operators of a block need of each variable."""
    needs: dict[relax.Var, _Need] = {}

    def add(variable: relax.Var, need: _Need) -> None:
        needs[variable] = need if needs.get(variable, need) == need else None

    for binding in reversed(block.bindings):
        value = binding.value
        part = needs.get(binding.var) if isinstance(binding.var, relax.DataflowVar) else None
        operands = None if part is None else _operands(value, part)
        selection = _selection(value)
        if selection is not None and isinstance(value.args[0], relax.Var):
            add(value.args[0], selection)
        elif operands is not None:
            for item, need in zip(value.args, operands, strict=True):
                if isinstance(item, relax.Var):
                    add(item, need)
        else:
            for variable in relax.analysis.all_vars(value):
                add(variable, None)
    return needs


def _selection(value: Any) -> _Need:
    """The part of its operand that a slice, or the choice of one place, reads; None for other expressions.

    A slice along several dimensions, or with steps, and a large part are none.
    """
    name = called_operator(value)
    part = _slice_part(value) if name == "relax.strided_slice" else _take_part(value) if name == "relax.take" else None
    if part is None:
        return None
    size = static((sizes(value.args[0]) or [])[part.axis])
    return part if size is None or part.count <= _LARGEST_SHARE * size else None


def _slice_part(call: relax.Call) -> _Need:
    dims, result = sizes(call.args[0]), sizes(call)
    if dims is None or result is None or not all(isinstance(item, relax.Tuple) for item in call.args[1:]):
        return None
    axes, begins, _, *steps = ([static(number) for number in item] for item in call.args[1:])
    if any(step != 1 for step in (steps[0] if steps else ())):
        return None
    cut = [
        (axis % len(dims), begin)
        for axis, begin in zip(axes, begins, strict=True)
        if axis is not None and not tvm_ffi.structural_equal(dims[axis % len(dims)], result[axis % len(dims)])
    ]
    if len(cut) != 1:
        return None
    ((axis, first),) = cut
    size, count = static(dims[axis]), static(result[axis])
    if first is None or not count or (first < 0 and size is None):
        return None
    return _Part(axis, max(first + (size or 0), 0) if first < 0 else first, count)


def _take_part(call: relax.Call) -> _Need:
    data, index = call.args
    dims = sizes(data)
    if dims is None or call.attrs.axis is None or not isinstance(index, tvm.ir.GenericConst) or index.ty.ndim > 1:
        return None
    places = numbers_of(index)
    if places.size != 1 or int(places.reshape(-1)[0]) < 0:
        return None
    return _Part(int(call.attrs.axis) % len(dims), int(places.reshape(-1)[0]), 1)


def _operands(call: Any, part: _Part) -> list[_Need] | None:
    """What an operator needs of each operand for a part of its result; None where it needs each of them whole."""
    rule = _RULES.get(called_operator(call))
    if rule is None or sizes(call) is None:
        return None
    return rule(call, part)


def _elementwise(call: relax.Call, part: _Part) -> list[_Need] | None:
    result = sizes(call) or []
    needs: list[_Need] = []
    for item in call.args:
        dims = sizes(item)
        if dims is None:
            if isinstance(item.ty, relax.TensorType):
                return None
            needs.append(None)
            continue
        axis = part.axis - (len(result) - len(dims))
        repeats = axis < 0 or (static(dims[axis]) == 1 and static(result[part.axis]) != 1)
        needs.append(None if repeats else _Part(axis, part.first, part.count))
    return needs


def _matmul(call: relax.Call, part: _Part) -> list[_Need] | None:
    """A product with one matrix computes each row alone."""
    ranks = [len(sizes(item) or ()) for item in call.args]
    is_by_rows = ranks[1] == _MATRIX and ranks[0] == len(sizes(call) or ()) and part.axis < ranks[0] - 1
    return [part, None] if is_by_rows else None


def _norm(call: relax.Call, part: _Part) -> list[_Need] | None:
    dims = len(sizes(call) or ())
    if part.axis in (int(axis) % dims for axis in call.attrs.axes):
        return None
    return [part, *[None] * (len(call.args) - 1)]


def _along(call: relax.Call, part: _Part) -> list[_Need] | None:
    if int(call.attrs.axis) % len(sizes(call) or ()) == part.axis:
        return None
    return [part, *[None] * (len(call.args) - 1)]


def _permute(call: relax.Call, part: _Part) -> list[_Need] | None:
    axes = call.attrs.axes
    axis = len(sizes(call) or ()) - 1 - part.axis if axes is None else int(axes[part.axis])
    return [_Part(axis, part.first, part.count)]


def _reshape(call: relax.Call, part: _Part) -> list[_Need] | None:
    """A reshape keeps a dimension if as many elements lie behind it before and after."""
    before, after = sizes(call.args[0]) or [], sizes(call) or []
    behind = _elements(after[part.axis + 1 :])
    for axis, size in enumerate(before):
        is_same = behind is not None and _elements(before[axis + 1 :]) == behind
        if is_same and tvm_ffi.structural_equal(size, after[part.axis]):
            return [_Part(axis, part.first, part.count), *[None] * (len(call.args) - 1)]
    return None


def _elements(dims: Sequence[Any]) -> int | None:
    """The number of elements of a tensor of these sizes; None where one is symbolic."""
    numbers = [static(size) for size in dims]
    return None if None in numbers else math.prod(number or 0 for number in numbers)


_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(_NORMS, _norm),
    **dict.fromkeys(_ALONG, _along),
    **dict.fromkeys(VIEWS, _reshape),
    "relax.matmul": _matmul,
    "relax.permute_dims": _permute,
}


@mutator
class _Rewriter(PyExprMutator):  # type: ignore[misc]
    """Computes the `parts` of tensors in the place of the tensors, and reads them where they were sliced."""

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self.parts: Mapping[relax.Var, _Part] = {}
        self._slices: dict[tuple[relax.Var, _Part], relax.Expr] = {}

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        """Rewrite a block, outside of which its slices are not known."""
        self._slices = {}
        return super().visit_dataflow_block_(block)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Bind a variable to its part if it has one, or to what was sliced."""
        part, call = self.parts.get(binding.var), binding.value
        selection = _selection(call)
        if part is not None:
            value = self._in_part(call, part)
        elif selection is not None and call.args[0] in self.parts:
            value = self.visit_expr(call.args[0])
            if len(sizes(call) or ()) < len(sizes(value) or ()):
                value = relax.op.squeeze(value, [selection.axis])
        else:
            super().visit_var_binding_(binding)
            return
        emit = self.builder_.emit if isinstance(binding.var, relax.DataflowVar) else self.builder_.emit_output
        self.set_var_remap(binding.var, emit(value))

    def _in_part(self, call: relax.Call, part: _Part) -> relax.Expr:
        """A call that computes a part of its result."""
        arguments = [
            self.visit_expr(item) if need is None else self._part_of(item, need)
            for item, need in zip(call.args, _operands(call, part) or (), strict=True)
        ]
        if called_operator(call) not in VIEWS:
            return relax.Call(call.op, arguments, call.attrs, call.ty_args)
        result = list(sizes(call) or ())
        result[part.axis] = tvm.tirx.IntImm("int64", part.count)
        return relax.op.reshape(arguments[0], result)

    def _part_of(self, tensor: relax.Expr, part: _Part) -> relax.Expr:
        """The variable of a part of a tensor; the part is sliced where all of the tensor is computed."""
        if not isinstance(tensor, relax.Var):
            return self.builder_.emit(part.of(self.visit_expr(tensor)))
        if tensor in self.parts:
            return self.visit_expr(tensor)
        key = (tensor, part)
        if key not in self._slices:
            self._slices[key] = self.builder_.emit(part.of(self.visit_expr(tensor)))
        return self._slices[key]
