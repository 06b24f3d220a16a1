"""Computes a convolution and its neighbours as one function, patch by patch of the image that fits a core's cache."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.arrays import Array
from tvmflow.compiler import winograd
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.dotproduct import BF16
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import block_plans, blocks, convolution, elementwise
from tvmflow.compiler.operators.common import (
    call_kernel,
    called_operator,
    constant,
    numbers_of,
    static,
    typical_pixels,
    vector,
)
from tvmflow.compiler.operators.geometry import Geometry, has_constant_weights, is_depthwise
from tvmflow.compiler.operators.packing import ConvolutionPacking, DepthwisePacking, WinogradPacking, pack_weights
from tvmflow.compiler.passes.bf16 import round_operand
from tvmflow.compiler.passes.functions import relax_functions

_UNARY: dict[str, Callable[[Any], Any]] = {
    **elementwise.FUNCTIONS,
    "relax.nn.relu": elementwise.relu,
}
# They return their second operand where one of the two is NaN: the constant, which is not NaN, becomes the first.
_EXTREMES = {"relax.maximum": tirx.max, "relax.minimum": tirx.min}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "relax.add": lambda a, b: a + b,
    "relax.subtract": lambda a, b: a - b,
    "relax.multiply": lambda a, b: a * b,
    "relax.divide": lambda a, b: a / b,
    **_EXTREMES,
}


# The cycles of a bottleneck as one function over those of its convolutions one by one, with the fastest algorithms:
# below the first number it becomes one function, up to the second a tuner measures both ways. Their distances from one
# are errors of the model, which `benchmarks/blocks.py` prints.
_SURE, CLOSE = 0.8, 1.1


@dataclass(frozen=True)
class _Step:
    """A convolution, the element-wise calls after it, and the variable of the convolution's own result."""

    call: relax.Call
    after: tuple[relax.Call, ...]
    result: relax.Var


@dataclass(frozen=True)
class _Unpacked:
    """Constant weights that a block reads in another form."""

    weight: tvm.ir.GenericConst
    packing: ConvolutionPacking | DepthwisePacking | WinogradPacking


@dataclass(frozen=True)
class _FusedBlock:
    """A block to build: what it reads, its shape and plan, its weights, and its name for decisions."""

    data: relax.Expr
    block: blocks.Block
    plan: blocks.Plan
    tensors: tuple[relax.Expr | _Unpacked, ...]
    subject: str


@dataclass(frozen=True)
class _Options:
    """The options of `FuseBlocks`."""

    machine: Machine
    choices: Choices
    fast: bool
    bf16: bool


@tvm.transform.module_pass(opt_level=2, name="FuseBlocks")
class FuseBlocks:
    """Replaces several convolutions by one function, a block, where the cost model says that it is faster.

    A block is a depthwise convolution with its pointwise neighbours, as in inverted residuals, or another convolution
    between pointwise ones, as in bottlenecks. `fast` allows Winograd's algorithm. With `bf16` a block multiplies
    bfloat16 numbers, as `RoundProducts` does in the convolutions that stay apart, which runs after this pass. There are
    no such blocks where AMX computes the products.
    """

    def __init__(self, machine: Machine, choices: Choices, fast: bool, bf16: bool = False) -> None:
        self._options = _Options(machine, choices, fast, bf16)

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with every Relax function rewritten."""
        if self._options.bf16 and BF16.name in self._options.machine.amx:
            return mod
        rewriter = _Rewriter(mod, self._options)
        for variable, function in relax_functions(mod).items():
            rewriter.find_blocks(function)
            rewriter.builder_.update_func(variable, rewriter.visit_expr(function))
        return rewriter.builder_.get()


@mutator
class _Rewriter(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule, options: _Options) -> None:
        super().__init__(mod)
        self._options = options
        self._blocks: dict[relax.Var, _FusedBlock] = {}

    def find_blocks(self, function: relax.Function) -> None:
        self._blocks = _find_blocks(function, self._options)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        fused = self._blocks.get(binding.var)
        if fused is None:
            super().visit_var_binding_(binding)
            return
        compute = partial(
            blocks.block, block=fused.block, plan=fused.plan, machine=self._options.machine, subject=fused.subject
        )
        data = self.visit_expr(fused.data)
        call = call_kernel(
            self.builder_,
            compute,
            self.builder_.emit(round_operand(self.builder_, data)) if fused.block.bf16 else data,
            *(self._pack(tensor) if isinstance(tensor, _Unpacked) else tensor for tensor in fused.tensors),
            name="conv2d_block",
        )
        self.set_var_remap(binding.var, self.builder_.emit(call))

    def _pack(self, tensor: _Unpacked) -> relax.Expr:
        return pack_weights(self.builder_, tensor.weight, tensor.packing)


def _find_blocks(function: relax.Function, options: _Options) -> dict[relax.Var, _FusedBlock]:
    """The blocks of a function, by the variable of their last convolution; none shares a convolution with another."""
    result: dict[relax.Var, _FusedBlock] = {}
    shapes = [getattr(parameter.ty, "shape", None) for parameter in function.params]
    sizes = [size for shape in shapes if isinstance(shape, relax.ShapeExpr) for size in shape.values]
    inputs = {variable for size in sizes for variable in tirx.analysis.undefined_vars(size)}
    for bindings in function.body.blocks if isinstance(function.body, relax.SeqExpr) else ():
        if not isinstance(bindings, relax.DataflowBlock):
            continue
        values = {binding.var: binding.value for binding in bindings.bindings if isinstance(binding, relax.VarBinding)}
        neighbours = _Neighbours(values, relax.analysis.udchain(bindings))
        members: set[relax.Var] = set()
        calls = [(variable, call) for variable, call in values.items() if _is_convolution(call)]
        middles = [(variable, call) for variable, call in calls if is_depthwise(call)]
        middles += [(variable, call) for variable, call in calls if _is_spatial(call)]
        for variable, call in middles:
            first, (after, last) = neighbours.before(call), neighbours.after(variable)
            with_last, alone = _Step(call, after, variable), _Step(call, (), variable)
            candidates = []
            for steps in ((first, with_last, last), (first, alone, None), (None, with_last, last)):
                results = {step.result for step in steps if step}
                if (steps[1] is with_last and last is None) or len(results) < 2 or results & members:
                    continue
                candidate = _describe(steps, options, inputs)
                if candidate is not None:
                    candidates.append((candidate, steps, results))
            for candidate, steps, results in sorted(candidates, key=lambda item: item[0].gain, reverse=True):
                block = _choose(candidate, steps, options)
                if block is not None:
                    result[(steps[2] or steps[1]).result] = block
                    members |= results
                    break
    return result


class _Neighbours:
    """The convolutions before and after another, where only element-wise operations of one user lie between."""

    def __init__(self, values: Mapping[relax.Var, relax.Expr], users: Mapping[relax.Var, Sequence[relax.Var]]) -> None:
        self._values = values
        self._users = users

    def before(self, call: relax.Call) -> _Step | None:
        after: list[relax.Call] = []
        variable = call.args[0]
        while self._only_user(variable) is not None:
            value: Any = self._values.get(variable)
            if _is_convolution(value):
                # Before a dense convolution only a pointwise one counts: Winograd is faster for larger kernels.
                fits = _groups(value) == 1 and (is_depthwise(call) or Geometry.of(value).kernel == (1, 1))
                return _Step(value, tuple(after), variable) if fits and not is_depthwise(value) else None
            place = _operand(value)
            if place is None:
                return None
            after.insert(0, value)
            variable = value.args[place]
        return None

    def after(self, variable: relax.Var) -> tuple[tuple[relax.Call, ...], _Step | None]:
        after: list[relax.Call] = []
        user = self._only_user(variable)
        while user is not None:
            value = self._values[user]
            if _is_convolution(value):
                return tuple(after), _Step(value, (), user) if _is_pointwise(value, variable) else None
            place = _operand(value)
            if place is None or not value.args[place].same_as(variable):
                break
            after.append(value)
            variable, user = user, self._only_user(user)
        return tuple(after), None

    def _only_user(self, variable: relax.Expr) -> relax.Var | None:
        if not isinstance(variable, relax.DataflowVar):
            return None
        users = self._users.get(variable, ())
        return users[0] if len(users) == 1 and users[0] in self._values else None


def _is_convolution(value: Any) -> bool:
    return called_operator(value) == "relax.nn.conv2d" and has_constant_weights(value)


def _groups(call: relax.Call) -> int:
    return int(call.attrs.groups)


def _is_spatial(call: relax.Call) -> bool:
    """Whether a convolution is dense and reads more than one pixel for each pixel of its result."""
    return _groups(call) == 1 and Geometry.of(call).kernel != (1, 1)


def _is_pointwise(call: relax.Call, data: relax.Var) -> bool:
    return call.args[0].same_as(data) and _groups(call) == 1 and Geometry.of(call).is_pointwise


def _operand(value: Any) -> int | None:
    """The position of the one tensor that an element-wise call reads; None for other calls."""
    name = called_operator(value)
    if name in _UNARY:
        return 0
    if name not in _BINARY:
        return None
    size = value.ty.shape.values[-1] if isinstance(value.ty.shape, relax.ShapeExpr) else None
    for place in (0, 1):
        other = value.args[1 - place]
        if isinstance(other, tvm.ir.GenericConst) and not isinstance(value.args[place], tvm.ir.GenericConst):
            shape = [int(dim) for dim in other.value.shape]
            if name in _EXTREMES and np.isnan(numbers_of(other)).any():
                return None
            if math.prod(shape) == 1 or (math.prod(shape) == static(size) and shape[-1] == static(size)):
                return place
    return None


_Steps = tuple[_Step | None, _Step, _Step | None]


@dataclass(frozen=True)
class _Candidate:
    """A possible block, its plans with the fastest first, and the cycles of its convolutions one by one."""

    block: blocks.Block
    plans: Sequence[blocks.Plan]
    apart: float

    @property
    def gain(self) -> float:
        """Return the cycles that the block saves."""
        return self.apart - self.plans[0].cycles


def _describe(steps: _Steps, options: _Options, inputs: set[tirx.Var]) -> _Candidate | None:
    """Return the candidate block of these convolutions; None where they make no block, or one far slower than they are.

    The comparison is with the convolutions one by one. `inputs` are the free sizes of the model's inputs.
    """
    first, last = (None if step is None else _convolution(step, None) for step in (steps[0], steps[2]))
    size = _winograd_size(steps[1].call, options) if options.fast else None
    if size is not None and options.bf16:
        return None
    middle = _convolution(steps[1], size)
    batch, height, width, depth = _data(steps).ty.shape.values
    free = (static(height) is None, static(width) is None)
    image = (_assumed(height, inputs), _assumed(width, inputs), int(depth))
    block = blocks.Block(*image, first, middle, last, free, options.bf16)
    ranked, apart = block_plans.plans(block, static(batch) or 1, options.machine)
    if not ranked or (not middle.depthwise and ranked[0].cycles > CLOSE * apart):
        return None
    return _Candidate(block, ranked, apart)


def _assumed(size: Any, inputs: set[tirx.Var]) -> int:
    """Return the number that the cost model takes a height or width for.

    That is `typical_pixels` where it is computed from the sizes of the model's inputs alone.
    """
    is_known = static(size) is not None or inputs.issuperset(tirx.analysis.undefined_vars(size))
    return typical_pixels(size) if is_known else winograd.UNKNOWN_PIXELS


def _choose(candidate: _Candidate, steps: _Steps, options: _Options) -> _FusedBlock | None:
    """Return the block, if the decision about it is to fuse; else None."""
    block, ranked = candidate.block, candidate.plans
    parts = tuple(convolution.subject_of(step.call) for step in steps if step)
    decisions = options.choices.about(f"block {' and '.join(parts)}")
    forms = {"whole": True, "apart": False}
    if ranked[0].cycles >= (1.0 if block.middle.depthwise else _SURE) * candidate.apart:
        forms = dict(reversed(forms.items()))
    cycles = {"whole": ranked[0].cycles, "apart": candidate.apart}
    if not decisions.choose("block", forms, parts, cycles):
        return None
    tensors: list[relax.Expr | _Unpacked] = []
    for step, plan_of_step in zip(steps, (block.first, block.middle, block.last), strict=True):
        if step is not None and plan_of_step is not None:
            tensors += [_pack(step.call, plan_of_step, options), *map(constant, _epilogue(step.after)[1])]
    plan = block_plans.decide(block, ranked, options.machine, decisions)
    return _FusedBlock(_data(steps), block, plan, tuple(tensors), decisions.subject)


def _data(steps: _Steps) -> relax.Expr:
    """The tensor that a block's first convolution reads."""
    return (steps[0] or steps[1]).call.args[0]


def _winograd_size(call: relax.Call, options: _Options) -> int | None:
    """Return the size of Winograd's output tiles for a convolution; None for a direct convolution."""
    if is_depthwise(call):
        return None
    data, weight = call.args
    decisions = None if options.bf16 else options.choices.about(convolution.subject_of(call))
    dot = BF16 if options.bf16 else None
    return convolution.winograd_size(data, weight, _groups(call), Geometry.of(call), options.machine, decisions, dot)


def _convolution(step: _Step, winograd_size: int | None) -> blocks.Convolution:
    call, (epilogue, arrays) = step.call, _epilogue(step.after)
    return blocks.Convolution(
        int(call.args[1].ty.shape.values[0]),
        Geometry.of(call),
        depthwise=is_depthwise(call),
        winograd=winograd_size,
        epilogue=epilogue,
        reads=len(arrays),
    )


def _pack(call: relax.Call, step: blocks.Convolution, options: _Options) -> relax.Expr | _Unpacked:
    weight, machine = call.args[1], options.machine
    if step.winograd is not None:
        return _Unpacked(weight, WinogradPacking(step.winograd, machine.lanes, step.geometry.strides[0]))
    channels = int(weight.ty.shape.values[0])
    if step.depthwise:
        return _Unpacked(weight, DepthwisePacking(machine.lanes))
    lanes = vector(channels, machine)
    if options.bf16:
        return _Unpacked(weight, ConvolutionPacking.of_dot(channels, lanes, BF16))
    return _Unpacked(weight, ConvolutionPacking(lanes, -(-channels // lanes)))


@dataclass(frozen=True)
class _Operation:
    """An element-wise operation, and its other operand: a number, or the index of an array with a value by channel."""

    function: Callable[..., Any]
    place: int = 0
    number: float | None = None
    index: int | None = None

    def __call__(self, value: Any, channel: Any, arrays: Sequence[te.Tensor]) -> Any:
        if self.index is not None:
            other = arrays[self.index][channel]
        elif self.number is not None:
            other = tirx.const(self.number, "float32")
        else:
            return self.function(value)
        return self.function(value, other) if self.place == 0 else self.function(other, value)


def _epilogue(calls: Sequence[relax.Call]) -> tuple[blocks.Epilogue | None, list[Array]]:
    """The operations as one function of a value and its channel, and the arrays by channel that it reads."""
    arrays: list[Array] = []
    operations: list[_Operation] = []
    for call in calls:
        name, place = call.op.name, _operand(call) or 0
        if name in _UNARY:
            operations.append(_Operation(_UNARY[name]))
            continue
        other = numbers_of(call.args[1 - place]).reshape(-1)
        place = 1 if name in _EXTREMES else place
        if other.size == 1:
            operations.append(_Operation(_BINARY[name], place, number=float(other[0])))
        else:
            operations.append(_Operation(_BINARY[name], place, index=len(arrays)))
            arrays.append(other)

    def epilogue(value: Any, channel: Any, tensors: Sequence[te.Tensor]) -> Any:
        for operation in operations:
            value = operation(value, channel, tensors)
        return value

    return epilogue if operations else None, arrays
