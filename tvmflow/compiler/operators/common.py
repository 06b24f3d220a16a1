"""Helpers that the operators share: sizes, constants and the rows of a matrix product."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx, topi
from tvm.script.ir_builder import tirx as T

from tvmflow.arrays import Array, in_order
from tvmflow.compiler import winograd
from tvmflow.compiler.annotations import LANES, LEAD, ROWS, SHARED
from tvmflow.compiler.machine import NARROWEST, Machine

Legalization = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]

# What a free size counts as where sizes are compared.
_FREE_SIZE = 64
# TVM's fusion kind of operators that take element-wise operators after them. TVM cannot derive it from our stages.
FUSABLE = {"op_pattern": 4}
# TVM's fusion kind of operators that it fuses with none.
OPAQUE = {"op_pattern": 8}
# The arguments of LLVM's prefetch for a line that is read soon: for reading, into the first-level cache, data.
TO_READ = (0, 3, 1)
# Marks operators that TVM shall fuse as element-wise ones. Their fusion kind is 0, and TVM would overwrite a 0.
FOLLOWS = {"tvmflow.follows": 1}


def prefetch(tensor: tirx.Buffer, index: Sequence[Any], how: tuple[int, int, int]) -> Any:
    """Return a call that fetches the line of `tensor` at an index; `how` are the arguments of LLVM's intrinsic."""
    return tirx.call_intrin("void", "tirx.prefetch", tirx.address_of(tirx.BufferLoad(tensor, index)), *how)


def default(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Return TVM's own definition of a call."""
    return call.op.get_attr("FLegalize")(builder, call)


def or_default(definition: Callable[[relax.BlockBuilder, relax.Call], relax.Expr | None]) -> Legalization:
    """Return a definition that is TVM's own for the calls that `definition` gives None for."""

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        result = definition(builder, call)
        return default(builder, call) if result is None else result

    return legalize


def call_kernel(
    builder: relax.BlockBuilder,
    compute: Callable[..., te.Tensor],
    *operands: relax.Expr,
    name: str,
    attrs: Mapping[str, Any] = MappingProxyType({}),
) -> relax.Expr:
    """Return a call of a function `name`, which `compute` defines and TVM fuses with element-wise operators after it.

    `attrs` are further attributes of the function.
    """
    return builder.call_te(compute, *operands, primfunc_name_hint=name, primfunc_attrs={**FUSABLE, **attrs})


def static(dim: Any) -> int | None:
    """Return a size as an integer; None where it is symbolic."""
    return int(dim) if isinstance(dim, int | tirx.IntImm) else None


def reduced_axes(call: relax.Call) -> list[int]:
    """Return the axes that a call of a reduction such as `relax.sum` reduces, from 0 on and in order."""
    rank = call.args[0].ty.ndim
    return sorted(range(rank) if call.attrs.axis is None else {int(axis) % rank for axis in call.attrs.axis})


def typical(size: Any) -> int:
    """Return a size as a number to compare with others: what it is where each free size is `_FREE_SIZE`, 1 at least."""
    return max(1, _for_free_size(size, _FREE_SIZE) or 0)


def typical_pixels(size: Any) -> int:
    """Return the number of pixels that a height or width counts as where the cost model decides.

    Free sizes in it count as `winograd.INPUT_PIXELS`, as if they were those of the model's input.
    """
    number = _for_free_size(size, winograd.INPUT_PIXELS)
    return winograd.UNKNOWN_PIXELS if number is None else max(number, 1)


def _for_free_size(size: Any, value: int) -> int | None:
    """What a size is where each free size in it has this value; None where it is no number then."""
    analyzer = tvm.sym.Analyzer()
    for free in () if static(size) is not None else tirx.analysis.undefined_vars(size, []):
        analyzer.bind(free, tirx.IntImm(str(free.ty), value))
    return static(size) or static(analyzer.simplify(size))


def size_parameter(size: Any, name: str) -> Any:
    """Return `size` for the shapes of a TIR function's buffers: a constant, or a new variable `name` if symbolic."""
    number = static(size)
    return tirx.Var(name, "int64") if number is None else tirx.IntImm("int64", number)


def buffer(name: str, shape: Sequence[Any], dtype: str = "float32") -> Any:
    """Create a TIR buffer, without a layout, to be a parameter of a function; the caller adds it to the function."""
    return tirx.decl_buffer(shape, dtype, name, layout=None)


def registers(shape: Sequence[int], dtype: str = "float32") -> Any:
    """Allocate a few numbers or vectors, float32 by default, that LLVM keeps in registers or on the stack."""
    return T.alloc_buffer(shape, dtype, scope="local", layout=None)


def folded(combine: Callable[[Any, Any], Any], vector: Any, lanes: int) -> Any:
    """Return one number of all lanes of a vector."""
    return reduce(combine, (vector[lane] for lane in range(lanes)))


def run(count: int) -> Any:
    """Return the index of the first `count` elements of a TIR buffer's dimension, as one vector."""
    return tirx.Ramp(tirx.const(0, "int64"), tirx.const(1, "int64"), count)


def is_float32(*tensors: relax.Expr) -> bool:
    """Whether all tensors are float32 and of known rank."""
    return all(isinstance(tensor.ty.shape, relax.ShapeExpr) and str(tensor.ty.dtype) == "float32" for tensor in tensors)


def vector(channels: int, machine: Machine) -> int:
    """Return the number of lanes of the vectors for a tensor of `channels` channels.

    It is the machine's, or the smallest power of two from 4 on that holds all channels, if that is less.
    """
    return min(machine.lanes, max(NARROWEST, 1 << (channels - 1).bit_length()))


def constant(value: Array) -> relax.Expr:
    """Return an array as a constant of the program."""
    return relax.const(tvm.runtime.tensor(np.asarray(value, order="C")))


def tensor_of(value: Array) -> tvm.runtime.Tensor:
    """Return an array, which nobody may change, as a tensor on the CPU.

    It is no copy where the array begins at a vector and NumPy lets its memory be shared.
    """
    try:
        return tvm.runtime.from_dlpack(value)
    except (BufferError, RuntimeError):
        return tvm.runtime.tensor(in_order(value))


def align(value: Array) -> Array:
    """Return an array as `tensor_of` takes it without a copy; itself, where NumPy shares no memory of its type."""
    try:
        return np.from_dlpack(tensor_of(value))
    except (BufferError, RuntimeError):
        return value


def numbers_of(value: tvm.ir.GenericConst | tvm.runtime.Tensor) -> Array:
    """Return the numbers of a constant, or of a tensor on the CPU, which nobody may change.

    They are no copy where NumPy has their type.
    """
    tensor = value.value if isinstance(value, tvm.ir.GenericConst) else value
    try:
        numbers: Array = np.from_dlpack(tensor)
    except (BufferError, RuntimeError):
        return np.asarray(tensor.numpy())
    numbers.flags.writeable = False
    return numbers


def called_operator(expr: Any) -> str:
    """Return the name of the operator that an expression calls, such as `relax.matmul`; empty for other expressions."""
    return getattr(expr.op, "name", "") if isinstance(expr, relax.Call) else ""


def round_up(size: Any, multiple: int) -> Any:
    """Round `size`, an integer or a symbolic size, up to a multiple of `multiple`."""
    return topi.utils.simplify((size + multiple - 1) // multiple * multiple)


def parts(extent: Any, size: int) -> Any:
    """Return the number of parts of `size` elements that cover `extent`, an integer or a symbolic size.

    It has the form from which TVM can prove that they do.
    """
    return topi.utils.simplify((extent - 1) // size + 1)


def are_equal(one: Any, other: Any) -> bool:
    """Whether two sizes are provably equal."""
    return bool(tvm.sym.Analyzer().can_prove_equal(one, other))


def same_shape(one: Sequence[Any] | None, other: Sequence[Any] | None) -> bool:
    """Whether two shapes are provably equal; false where `one` or `other` is None (unknown)."""
    if one is None or other is None or len(one) != len(other):
        return False
    analyzer = tvm.sym.Analyzer()
    return all(bool(analyzer.can_prove_equal(a, b)) for a, b in zip(one, other, strict=True))


def divides(tile: int, size: Any) -> bool:
    """Whether `size` is known and a multiple of `tile`."""
    number = static(size)
    return number is not None and number % tile == 0


@dataclass(frozen=True)
class JoinedRows:
    """Maps the leading dimensions of a dense layer's input to the batch and the rows of a matrix product.

    `outer` are the sizes of the leading dimensions. Those at the positions `joined` in `outer` are flattened into one
    dimension of rows. The others stay as dimensions of the batch.
    """

    outer: Sequence[Any]
    joined: Sequence[int]

    @property
    def lead(self) -> list[int]:
        """The positions in `outer` of the batch dimensions."""
        return [place for place in range(len(self.outer)) if place not in self.joined]

    @property
    def batch(self) -> list[Any]:
        """The sizes of the batch dimensions."""
        return [self.outer[place] for place in self.lead]

    @property
    def rows(self) -> Any:
        """The number of rows, an integer or a symbolic size."""
        first, *others = (self.outer[place] for place in self.joined)
        return topi.utils.simplify(math.prod(others, start=first))

    def position(self, *index: Any) -> tuple[Any, ...]:
        """Convert the index `[*batch, row, k]` of the product's left operand to the input's index of that element."""
        *batch, row, k = index
        position: list[Any] = [None] * len(self.outer)
        for place, value in zip(self.lead, batch, strict=True):
            position[place] = value
        several = [place for place in self.joined if static(self.outer[place]) != 1] or [self.joined[0]]
        for place in self.joined:
            position[place] = 0
        for place in reversed(several[1:]):
            position[place] = row % self.outer[place]
            row = row // self.outer[place]
        position[several[0]] = row
        return (*position, k)

    def row(self, *index: Any) -> tuple[Any, ...]:
        """Convert the result's index `[*outer, unit]` to the product's index `[*batch, row, unit]` of that element."""
        row = index[self.joined[0]]
        for place in self.joined[1:]:
            row = row * self.outer[place] + index[place]
        return (*(index[place] for place in self.lead), row, index[-1])

    def product(
        self, data: te.Tensor, right: Callable[..., Any], channels: int, lanes: int, joined: Sequence[int] | None = None
    ) -> "Product":
        """Describe the product of the rows of `data`, of shape `[*outer, K]`, and of weights that all rows share.

        `right(*batch_index, k, channel)` returns an element of the weights. `channels` is a multiple of `lanes`, the
        lanes of a vector. `joined` annotates the result with the dimensions that the rows stand for; None annotates
        nothing, because they are all between batch and channels.
        """
        return Product(
            batch=self.batch,
            rows=self.rows,
            depth=data.shape[-1],
            channels=channels,
            lanes=lanes,
            left=lambda *index: data[self.position(*index)],
            right=right,
            shared=True,
            joined=joined,
        )

    def unpack(self, result: te.Tensor, units: int) -> te.Tensor:
        """Define the first `units` channels of a product's result in the shape `[*outer, units]`."""
        return te.compute((*self.outer, units), lambda *index: result[self.row(*index)], name="unpack")


@dataclass(frozen=True)
class Product:
    """A matrix product over a batch, of operands in any layout; the result is `[*batch, rows, channels]`.

    `left(*batch_index, row, k)` returns an element of the left operand, whose k runs over `depth` values, and `right`
    one of the right operand. `batch` are the sizes of the batch dimensions. `channels` is a multiple of `lanes`, the
    lanes of a vector. `shared` is true where the right operand ignores the batch index. `joined` are the dimensions
    that the rows stand for, as positions in the tensor into which the caller unpacks the result; None means all between
    batch and channels.
    """

    batch: Sequence[Any]
    rows: Any
    depth: Any
    channels: Any
    lanes: int
    left: Callable[..., Any]
    right: Callable[..., Any]
    shared: bool
    joined: Sequence[int] | None = None

    @property
    def vectors(self) -> int | None:
        """The number of vectors of channels; None where it is symbolic."""
        channels = static(self.channels)
        return None if channels is None else channels // self.lanes

    @property
    def annotations(self) -> dict[str, Any]:
        """The annotations by which the schedules know the product's dimensions."""
        rows = {} if self.joined is None else {ROWS: list(self.joined)}
        return {LANES: self.lanes, LEAD: len(self.batch), SHARED: int(self.shared), **rows}

    def last_row_repeated(self, *index: Any) -> Any:
        """Return an element of the left operand by its index, in whose place a row beyond the last has the last one."""
        *batch, row, k = index
        return self.left(*batch, tirx.min(row, self.rows - 1), k)
