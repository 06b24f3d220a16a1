"""Fits the patches of a block of convolutions to images of free sizes.

A schedule takes the lines and columns of a patch for constants, and where an image has a free size, its last patches
lie beyond it in part. The schedule marks the loop over patches and the loops over the lines and columns of each stage
by annotations. `expand` gives all patches about the same height, at most that of the schedule, and puts a condition
into each of the marked loops: an iteration runs where a pixel of the result needs it.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize, Schedule
from tvm.s_tir.schedule import LoopRV
from tvm.tirx import For, PrimFunc

from tvmflow.compiler.schedules import common
from tvmflow.compiler.statements import loop_variables, run_if, terms, with_loop_body, without_annotation

# The annotations of the loop over patches, and of a loop over lines or columns of a stage.
_PATCHES = "tvmflow.patches"
_PART = "tvmflow.patches.part"
# The blocks that compute places in the image, multiples of the strip's number.
_READERS = ("source", "expanded")


@dataclass(frozen=True)
class Reach:
    """The pixels of a stage, along one dimension, that the result of a patch needs.

    They are `first` for one pixel of the result, and `stride` more for each other pixel.
    """

    stride: int = 1
    first: int = 1

    def before(self, tile: int, stride: int = 1, window: int = 1) -> "Reach":
        """Return the reach in the input of a stage that has this reach.

        The stage computes its pixels by tiles of `tile` pixels, of which the last may reach further than the result
        needs. A pixel reads `window` pixels of the input, and the next one begins `stride` pixels further.
        """
        return Reach(self.stride * stride, (self.first + tile - 2) * stride + window)


def mark_patches(sch: Schedule, patches: LoopRV, lines: int, step: int) -> None:
    """Mark the loop over the patches of a batch of images, of `lines` lines each, which are computed `step` at a time.

    Does nothing where all sizes are known.
    """
    if not common.is_static(sch):
        sch.annotate(patches, _PATCHES, [lines, step])


def mark_part(sch: Schedule, loop: LoopRV, dimension: int, reach: Reach, tile: int = 1) -> None:
    """Mark a loop over the tiles of a stage, each of `tile` pixels along a `dimension` of the image.

    `reach` is that of the stage along the dimension. Does nothing where all sizes are known, or for a loop of one
    iteration.
    """
    if not common.is_static(sch) and (common.extent(sch, loop) or 1) > 1:
        sch.annotate(loop, _PART, [dimension, tile, reach.stride, reach.first])


def expand(func: PrimFunc) -> PrimFunc:
    """Return a scheduled function with the code that its annotations ask for, or unchanged without any."""

    if common.has_fixed_sizes(func):
        return func

    def expand_loop(loop: For) -> Any:
        if _PATCHES not in loop.annotations:
            return loop
        lines, step = (int(number) for number in loop.annotations[_PATCHES])
        return _fit(without_annotation(loop, _PATCHES), set(func.params), lines, step)

    return func.with_body(tvm_ffi.structural_map(func.body, (For, expand_loop)))


@dataclass(frozen=True)
class _Strips:
    """The strips of patches in an image of free height: `count` strips, each of `height` lines, the last of fewer.

    A schedule has taken all of them for strips of `lines` lines, of which `height` is not more. `number` is that of the
    strip in which a patch lies, and `line` that of a line within the patch, both by the variables of loops.
    """

    count: Any
    height: Any
    lines: int
    number: Any
    line: Any

    @staticmethod
    def of(place: Any, first: Any, size: Any, lines: int, step: int) -> "_Strips":
        """Divide `size` lines evenly into strips whose height is a multiple of `step`.

        `place` is the line of the image that a loop writes, `first` the first one of the patch, in strips of `lines`.
        """
        count = (size + lines - 1) // lines
        height = ((size + count - 1) // count + step - 1) // step * step
        return _Strips(
            count, height, lines, common.substitute(first // lines, {}), common.substitute(place - first, {})
        )

    def move(self, block: SBlock) -> SBlock:
        """Return a block that reads the image, with the strips at multiples of their height."""
        strip = block.iter_vars[1].var

        def scale(product: tirx.Mul) -> Any:
            factor = int(product.b) if isinstance(product.b, tirx.IntImm) else 0
            if not product.a.same_as(strip) or factor % self.lines:
                return product
            return strip * (self.height * (factor // self.lines))

        return tvm_ffi.structural_map(block, (tirx.Mul, scale))

    def move_result(self, realize: SBlockRealize, limit: Any, step: int) -> SBlockRealize:
        """Return the block that writes the result, with the strips at multiples of their height.

        It gets the strip and the line within it as variables: a schedule computes both from the line of the image.
        `limit` is the part of its condition that a line of the image must meet. The lines of a patch are computed
        `step` at a time, so that the result does not need it where that is one.
        """
        block, lines = realize.block, tirx.const(self.lines, "int64")
        n, _, *values = realize.iter_values
        image_line = block.iter_vars[1]
        strip, line = (
            tirx.IterVar((0, size), tirx.Var(name, "int64"), tirx.IterVar.DataPar)
            for name, size in (("strip", self.count), ("line", lines))
        )

        def replace(divided: Any) -> Any:
            if not divided.a.same_as(image_line.var) or not tvm_ffi.structural_equal(divided.b, lines):
                return divided
            return strip.var if isinstance(divided, tirx.FloorDiv) else line.var

        block = tvm_ffi.structural_map(block, [(tirx.FloorDiv, replace), (tirx.FloorMod, replace)])
        moved = self.number * self.height + self.line
        conditions = [term for term in terms(realize.predicate) if not term.same_as(limit)]
        if step > 1:
            conditions.append(moved < image_line.dom.extent)
        variables = [*block.iter_vars, strip, line]
        fields = (block.reads, block.writes, block.name_hint, block.body, block.init)
        block = SBlock(variables, *fields, block.alloc_buffers, block.match_buffers, block.annotations)
        condition = tirx.all(*conditions, tirx.const(True, "bool"))
        return SBlockRealize([n, moved, *values, self.number, self.line], condition, block)


def _height_condition(writer: SBlockRealize, loop: For) -> Any | None:
    """The term of a block's condition that compares the line of the image with the height; None without such a term.

    TVM does not write the line in both places alike, so that they are compared in the first patch.
    """
    for term in terms(writer.predicate):
        if isinstance(term, tirx.LT):
            difference = common.substitute(term.a - writer.iter_values[1], {loop.loop_var: tirx.const(0, "int64")})
            if isinstance(difference, tirx.IntImm) and int(difference) == 0:
                return term
    return None


def _fit(loop: For, parameters: Set[Any], lines: int, step: int) -> For:
    """Return a loop over patches, which computes no pixels beyond the image."""
    writers: list[SBlockRealize] = []

    def visit(realize: SBlockRealize) -> None:
        if any(region.source in parameters for region in realize.block.writes):
            writers.append(realize)

    tvm_ffi.structural_walk(loop.body, (SBlockRealize, visit))
    (writer,) = writers
    first_of_patch = dict.fromkeys(loop_variables(loop.body), tirx.const(0, "int64"))
    line, column = (common.substitute(place, first_of_patch) for place in writer.iter_values[1:3])
    height, width = (item.dom.extent for item in writer.block.iter_vars[1:3])
    # The pixels of a patch, or fewer at the end of the image, for each dimension of a free size.
    pixels = {} if isinstance(width, tirx.IntImm) else {1: width - column}
    height_condition = _height_condition(writer, loop)
    if height_condition is None:
        pixels |= {} if isinstance(height, tirx.IntImm) else {0: height - line}
    else:
        strips = _Strips.of(writer.iter_values[1], line, height, lines, step)
        pixels[0] = tirx.min(strips.height, height - strips.number * strips.height)

        def move(realize: SBlockRealize) -> SBlockRealize:
            if realize.same_as(writer):
                return strips.move_result(realize, height_condition, step)
            if realize.block.name_hint.rstrip("0123456789_") not in _READERS:
                return realize
            return SBlockRealize(realize.iter_values, realize.predicate, strips.move(realize.block))

        loop = tvm_ffi.structural_map(loop, (SBlockRealize, move))

    def limit(part: For) -> For:
        if _PART not in part.annotations:
            return part
        dimension, tile, stride, first = (int(number) for number in part.annotations[_PART])
        part = without_annotation(part, _PART)
        if dimension not in pixels:
            return part
        is_needed = part.loop_var * tile < (pixels[dimension] - 1) * stride + first
        return with_loop_body(part, run_if(is_needed, part.body))

    return tvm_ffi.structural_map(loop, (For, limit))
