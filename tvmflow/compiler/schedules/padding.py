"""Leaves out the parts of convolutions that read padding alone: their products are zero.

A convolution has its padding as an annotation of the block that accumulates. `skip` puts conditions around the loops
over the kernel's taps. They ask for each tile of the result whether any of its pixels reads the image at that tap.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlockRealize
from tvm.tirx import For, ForKind, PrimFunc

from tvmflow.compiler.annotations import PADDING
from tvmflow.compiler.schedules.common import substitute
from tvmflow.compiler.statements import with_loop_body


@dataclass(frozen=True)
class _Axis:
    """One dimension of a convolution's image, in the loops of its schedule.

    `place` is the pixel of the result and `tap` the loop variable of the kernel's tap. The result has `size` pixels and
    the kernel `taps`. The image has `before` pixels of padding at its start and `after` at its end.
    """

    place: Any
    tap: tirx.Var
    size: Any
    taps: int
    before: int
    after: int
    stride: int
    dilation: int

    def condition(self, loop: For) -> Any | None:
        """Whether a pixel of the result, of those inside `loop` over the taps, reads the image at the loop's tap.

        Returns None where too few of them read padding alone.
        """
        inside: list[For] = []
        tvm_ffi.structural_walk(loop.body, (For, inside.append))
        first = substitute(self.place, {item.loop_var: tirx.const(0, "int64") for item in inside})
        last = substitute(self.place, {item.loop_var: item.extent - 1 for item in inside})
        distance = substitute(last - first, {})
        extents = [item.extent for item in inside if item.kind != ForKind.VECTORIZED]
        if not all(isinstance(item, tirx.IntImm) for item in (distance, *extents)):
            return None
        # A branch may move each sum of the tile to another register and back.
        moves = 2 * math.prod(int(item.extent) for item in inside if item.kind == ForKind.UNROLLED)
        if self._share(int(distance) + 1) * math.prod(map(int, extents)) <= moves:
            return None
        return tirx.all(*self._reads(first, last, self.tap))

    def _reads(self, first: Any, last: Any, tap: Any) -> tuple[Any, Any]:
        """Whether the pixels from `first` to `last` reach the image's start, and whether they begin before its end."""
        # The last pixels of an image may be too few for another step.
        image = self.size * self.stride + (self.taps - 1) * self.dilation - self.before - self.after
        start, end = (pixel * self.stride + tap * self.dilation - self.before for pixel in (first, last))
        return end >= 0, start < image

    def _share(self, pixels: int) -> float:
        """The share of padding in what tiles of so many pixels read, if only tiles of padding alone count.

        In an image of unknown size it is that of an image as large as the kernel, 0 for kernels that are not dilated.
        """
        unknown = (self.taps - 1) * self.dilation + 1 if self.dilation > 1 else 0
        axis = replace(self, size=int(self.size) if isinstance(self.size, tirx.IntImm) else unknown)
        tiles = ((place, place + pixels - 1) for place in range(0, axis.size, pixels))
        reads = [all(axis._reads(*tile, tap)) for tile in tiles for tap in range(self.taps)]
        return 1 - sum(reads) / len(reads) if reads else 0.0


def skip(func: PrimFunc) -> PrimFunc:
    """Put conditions around the loops over taps in a scheduled function; one without padding is returned unchanged."""
    axes: dict[Any, _Axis] = {}

    def visit(realize: SBlockRealize) -> None:
        block = realize.block
        if PADDING in block.annotations and any(item.iter_type == tirx.IterVar.CommReduce for item in block.iter_vars):
            for axis in _axes(realize, [int(item) for item in block.annotations[PADDING]]):
                axes[axis.tap] = axis

    tvm_ffi.structural_walk(func.body, (SBlockRealize, visit))
    if not axes:
        return func

    def guard(loop: For) -> Any:
        axis = axes.get(loop.loop_var)
        condition = None if axis is None else axis.condition(loop)
        if condition is None:
            return loop
        return with_loop_body(loop, tirx.IfThenElse(condition, loop.body, None))

    return func.with_body(tvm_ffi.structural_map(func.body, (For, guard)))


def _axes(realize: SBlockRealize, numbers: Sequence[int]) -> list[_Axis]:
    """The height and the width of a convolution of NHWC data; an axis is left out where its taps have no loop."""
    top, left, bottom, right, *strides_and_dilations = numbers
    places, taps = realize.iter_values[1:3], realize.iter_values[4:6]
    kernel = [item.dom.extent for item in realize.block.iter_vars[4:6]]
    sizes = realize.block.writes[0].source.shape[1:3]
    stride, dilation = strides_and_dilations[:2], strides_and_dilations[2:]
    return [
        _Axis(places[axis], taps[axis], sizes[axis], int(kernel[axis]), before, after, stride[axis], dilation[axis])
        for axis, (before, after) in enumerate(((top, bottom), (left, right)))
        if isinstance(taps[axis], tirx.Var)
    ]
