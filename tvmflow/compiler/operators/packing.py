"""Packs constant weights into forms that are larger than the weights: those of Winograd's and Strassen's algorithms.

A library need not hold such a form. It holds the weights themselves, and packs them once when it is loaded
(`compiler.passes.packing`). Each packing is therefore defined twice: for arrays, and as a tensor expression, of which
the library gets a function.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import tvm
from tvm import relax, te, tirx

from tvmflow.arrays import Array
from tvmflow.compiler import winograd
from tvmflow.compiler.annotations import GROUPS, KERNEL, PACKING
from tvmflow.compiler.dotproduct import PAIRS
from tvmflow.compiler.operators import strassen
from tvmflow.compiler.operators.winograd import combine


class Packing(Protocol):
    """A way to pack weights, called `name`. Its dataclass fields are integers, which a function's attribute stores."""

    name: ClassVar[str]

    def pack(self, weight: Array) -> Array:
        """Return the packed weights."""

    def define(self, weight: te.Tensor) -> te.Tensor:
        """Define the packed weights as a tensor expression.

        Floating-point numbers may differ from those of `pack` by rounding, because the additions in float64 have
        another order.
        """


@dataclass(frozen=True)
class WinogradPacking:
    """Transforms weights for Winograd's algorithm into float32, as `winograd.transform_kernel` does.

    `size` is the side of the output tiles in pixels; `stride` and `groups` are the convolution's.
    """

    name: ClassVar[str] = "winograd"

    size: int
    lanes: int
    stride: int
    groups: int = 1

    def pack(self, weight: Array) -> Array:
        """Return the transformed weights."""
        return winograd.transform_kernel(weight, self.size, self.lanes, self.stride, self.groups)

    def define(self, weight: te.Tensor) -> te.Tensor:
        """Define the weights in Winograd's form, computed in float64: the columns of a kernel first, then its rows."""
        matrix = winograd.transforms(self.size, self.stride)[1].tolist()
        side, columns = len(matrix), _transformed_columns(weight, matrix, self.lanes, "float64")
        vectors, depth, *_ = columns.shape
        per_group, taps = int(vectors) // self.groups, side**2

        def element(t: Any, j: Any, k: Any, v: Any) -> Any:
            vector, line = t // taps * per_group + j, t % taps // side
            return combine(matrix, t % side, lambda x: columns[vector, k, line, x, v]).astype("float32")

        shape = (self.groups * taps, per_group, depth, self.lanes)
        return te.compute(shape, element, name="packed", attrs={KERNEL: "packing", GROUPS: self.groups})


@dataclass(frozen=True)
class IntegerWinogradPacking(WinogradPacking):
    """Transforms integer weights for Winograd's algorithm into int16, as `winograd.integer_kernel` does."""

    name: ClassVar[str] = "integer_winograd"

    def pack(self, weight: Array) -> Array:
        """Return the transformed weights."""
        return winograd.integer_kernel(weight, self.size, self.lanes, self.stride)

    def define(self, weight: te.Tensor) -> te.Tensor:
        """Define the weights in Winograd's form: the columns of a kernel first, then its rows."""
        factor = winograd.whole_factor(self.size, self.stride) or 1
        matrix = (factor * winograd.transforms(self.size, self.stride)[1]).astype(int).tolist()
        side, columns = len(matrix), _transformed_columns(weight, matrix, self.lanes, "int32")
        (vectors, depth, *_), group = columns.shape, PAIRS.group

        def element(t: Any, j: Any, k: Any, v: Any, g: Any) -> Any:
            value = combine(matrix, t % side, lambda x: columns[j, k * group + g, t // side, x, v])
            return value.astype(PAIRS.weight)

        shape = (side**2, vectors, depth // group, self.lanes, group)
        return te.compute(shape, element, name="packed", attrs={KERNEL: "packing"})


def _transformed_columns(weight: te.Tensor, matrix: Sequence[Sequence[float]], lanes: int, dtype: str) -> te.Tensor:
    """Define the kernels `[CO][CI][3][3]` with their columns multiplied by a matrix, in numbers of type `dtype`.

    The result is `[CO/v][CI][n][3][v]` for v = `lanes` and a matrix of n rows, with zeros after the last channel.
    """
    channels, depth, taps, _ = (int(size) for size in weight.shape)
    vectors = math.ceil(channels / lanes)

    def tap(j: Any, k: Any, v: Any, y: Any, x: Any) -> Any:
        channel = j * lanes + v
        value = weight[channel, k, y, x].astype(dtype)
        return value if channels % lanes == 0 else tirx.if_then_else(channel < channels, value, tirx.const(0, dtype))

    kernels = te.compute((vectors, depth, lanes, taps, taps), tap, name="kernels")
    return te.compute(
        (vectors, depth, len(matrix), taps, lanes),
        lambda j, k, a, x, v: combine(matrix, a, lambda y: kernels[j, k, v, y, x]),
        name="columns",
    )


@dataclass(frozen=True)
class StrassenPacking:
    """Sums the quarters of weights for Strassen's algorithm into float32 `[7][N/2/v][K/2][v]`, v = `lanes`.

    The weights are a matrix `[K][N]`, or `[N][K][1][1]`, those of a convolution of one tap.
    """

    name: ClassVar[str] = "strassen"

    lanes: int

    def pack(self, weight: Array) -> Array:
        """Return the sums."""
        return strassen.pack(weight if weight.ndim == 2 else weight[:, :, 0, 0].T, self.lanes)

    def define(self, weight: te.Tensor) -> te.Tensor:
        """Define the sums, computed in float64."""
        is_matrix = len(weight.shape) == 2
        depth, units = (int(size) for size in (weight.shape if is_matrix else reversed(weight.shape[:2])))

        def element(i: Any, j: Any, k: Any, v: Any) -> Any:
            def quarter(q: int) -> Any:
                line, unit = q // 2 * (depth // 2) + k, q % 2 * (units // 2) + j * self.lanes + v
                return (weight[line, unit] if is_matrix else weight[unit, line, 0, 0]).astype("float64")

            return combine(strassen.RIGHT, i, quarter).astype("float32")

        shape = (len(strassen.RIGHT), units // 2 // self.lanes, depth // 2, self.lanes)
        return te.compute(shape, element, name="packed", attrs={KERNEL: "packing"})


@dataclass(frozen=True)
class WideningPacking:
    """Converts packed weights of 8 bits to the 16 bits of which `dotproduct.PAIRS` multiplies pairs."""

    name: ClassVar[str] = "widening_integers"

    def pack(self, weight: Array) -> Array:
        """Return the weights as int16."""
        return weight.astype(PAIRS.weight)

    def define(self, weight: te.Tensor) -> te.Tensor:
        """Define the weights as int16."""
        return te.compute(weight.shape, lambda *index: weight[index].astype(PAIRS.weight), name="packed")


_WeightPacking = WinogradPacking | StrassenPacking | WideningPacking
_PACKINGS: dict[str, type[_WeightPacking]] = {
    packing.name: packing for packing in (WinogradPacking, IntegerWinogradPacking, StrassenPacking, WideningPacking)
}


def pack_weights(builder: relax.BlockBuilder, weight: tvm.ir.GenericConst, packing: _WeightPacking) -> relax.Var:
    """Emit the call that packs constant weights, and return the variable of its result."""
    call = builder.call_te(
        packing.define,
        weight,
        primfunc_name_hint=f"pack_{packing.name}",
        primfunc_attrs={PACKING: json.dumps([packing.name, asdict(packing)])},
    )
    return builder.emit(call)


def runs_at_load(func: Any) -> bool:
    """Return whether a function packs or widens weights, which a library does once, when it is loaded."""
    return isinstance(func, tirx.PrimFunc) and PACKING in (func.attrs or {})


def packing_of(func: Any) -> Packing | None:
    """Return the packing that a function computes; None for any other function."""
    text = (func.attrs or {}).get(PACKING) if isinstance(func, tirx.PrimFunc) else None
    if text is None:
        return None
    name, fields = json.loads(str(text))
    return _PACKINGS[name](**fields)
