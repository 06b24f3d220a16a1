"""Grouped convolutions whose groups are narrower than a vector: one vector of output channels spans several groups.

Those groups have as many input channels as output channels, so one vector holds their inputs. One shuffle of it brings
the first input channel of its group to every lane, the next shuffle the second channel, and so on. In bfloat16 a
shuffle brings two channels to a lane, whose products one instruction adds. The steps through a group's channels are the
outermost, so that a shuffle stays in a register for the few neighbouring pixels that read it.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from tvmflow.compiler import dotproduct, intrinsics
from tvmflow.compiler.dotproduct import BF16, WIDE

_NAMES = "tvmflow.groups."
_HEAD = """\
@T.prim_func(s_tir=True)
def main(a: T.handle, b: T.handle, c: T.handle) -> None:
    pixel, tap, step, result = T.int64(), T.int64(), T.int64(), T.int64()
    A = T.match_buffer(a, ({inputs}, {lanes}), "{data}", offset_factor=1, strides=[pixel, 1])
    B = T.match_buffer(b, ({weights}), "{data}", offset_factor=1, strides=[tap, step, {strides}])
    C = T.match_buffer(c, ({pixels}, {lanes}), "float32", offset_factor=1, strides=[result, 1])
    with T.sblock("root"):
        T.reads(C[0:{pixels}, 0:{lanes}], A[0:{inputs}, 0:{lanes}], B[{whole}])
        T.writes(C[0:{pixels}, 0:{lanes}])
"""
_MEANING = """\
        for {loops} in T.grid({extents}):
            with T.sblock("update"):
                {variables} = T.axis.remap("{kinds}", [{order}])
                C[{p}, vl] = C[{p}, vl] + {left} * {right}
"""
_LEFT = "A[{p} * {stride} + {x} * {dilation}, vl // {size} * {size} + {k}]"
_RIGHT = "B[{x}, {k}, vl]"
_LEFT_BF16 = "A[{p} * {stride} + {x} * {dilation}, vl // {size} * {size} + ({k} * 2 + vi)]"
_RIGHT_BF16 = "B[{x}, {k}, vl, vi]"
_SUM = 'C.vload([p, 0], "float32x{lanes}")'
_PIXEL = "p * {stride} + x * {dilation}"
_STEP = """\
        for p in T.unroll({pixels}):
            for x in T.unroll({taps}):
                C[p, T.ramp(0, 1, {lanes})] = {product}
"""
_PRODUCT = (
    '{sum} + T.Shuffle([A.vload([{pixel}, 0], "float32x{lanes}")], {places}) * B.vload([x, {k}, 0], "float32x{lanes}")'
)
# TVM's shuffle has no more lanes than its operands.
_PAIRS = 'T.reinterpret(A.vload([{pixel}, 0], "uint16x{lanes}"), dtype="int32x{half}")'
_PRODUCT_BF16 = (
    'T.call_pure_extern("float32x{lanes}", "dot_bf16_{bits}", {sum}, T.Shuffle([{pairs}, {pairs}], {places}), '
    'T.reinterpret(B.vload([x, {k}, 0, 0], "uint16x{total}"), dtype="int32x{lanes}"))'
)


@dataclass(frozen=True)
class Strip:
    """The products of one line of a kernel's taps, for a strip of `pixels` of the result.

    A group has `size` channels, a vector `lanes`. The line has `taps`, `dilation` pixels apart, and neighbouring pixels
    of the result begin `stride` pixels of the input apart. `is_bf16` tells bfloat16 numbers from float32 ones.
    """

    is_bf16: bool
    size: int
    lanes: int
    pixels: int
    taps: int
    stride: int
    dilation: int

    @property
    def inputs(self) -> int:
        """The number of pixels of the input from the first to the last one that the strip reads."""
        return (self.pixels - 1) * self.stride + (self.taps - 1) * self.dilation + 1

    @property
    def steps(self) -> int:
        """The number of shuffles of a vector: one for each channel of a group, in bfloat16 for each pair."""
        return self.size // 2 if self.is_bf16 else self.size

    @property
    def weights(self) -> list[int]:
        """The shape of the weights of a line of taps, for one vector of channels."""
        return [self.taps, self.steps, self.lanes, *([2] if self.is_bf16 else [])]


def tensorize(sch: Schedule, arch: str, strip: Strip, task: LoopRV, loop: LoopRV) -> None:
    """Replace `loop` and the loops inside it by shuffles and products.

    They run over the taps of the line, the strip's pixels, a group's input channels (in bfloat16 pairs of them), lanes
    and, in bfloat16, over a pair; those of one iteration are not among them. `task` is a loop around them all, to which
    the LLVM IR is attached that bfloat16 needs on the architecture `arch`. Raises TVM's ScheduleError if the loops do
    not compute such a convolution.
    """
    name = _NAMES + ".".join(str(int(item)) for item in astuple(strip))
    register(name)
    if strip.is_bf16:
        dotproduct.attach_bf16(sch, arch, task)
    sch.tensorize(loop, name)


@cache
def register(name: str) -> None:
    """Register the tensor intrinsic `name`, which writes such shuffles; TVM needs it to replay a schedule's trace.

    Ignores a name that is not one of this module's.
    """
    fields = name.removeprefix(_NAMES).split(".")
    if not name.startswith(_NAMES) or len(fields) != len(dataclasses.fields(Strip)):
        return
    is_bf16, *numbers = map(int, fields)
    strip = Strip(bool(is_bf16), *numbers)
    words = {
        **vars(strip),
        "inputs": strip.inputs,
        "data": BF16.data if is_bf16 else "float32",
        "bits": 32 * strip.lanes,
        "half": strip.lanes // 2,
        "total": 2 * strip.lanes,
        "strides": "2, 1" if is_bf16 else "1",
        "weights": ", ".join(map(str, strip.weights)),
        "whole": ", ".join(f"0:{extent}" for extent in strip.weights),
    }
    intrinsics.define(name, _HEAD.format(**words), _meaning(strip, words), _instructions(strip, words))


def _meaning(strip: Strip, words: Mapping[str, Any]) -> str:
    """The loops that the instructions replace, with `words` in the place of the names in their text."""
    extents = {"x": strip.taps, "p": strip.pixels, "k": strip.steps, "l": strip.lanes, "i": 2 if strip.is_bf16 else 1}
    # TVM names the loops over the result first.
    loops = [name for name, extent in extents.items() if extent > 1]
    order = [name for name in ("p", "l", "x", "k", "i") if name in loops]
    places = {name: f"v{name}" if name in loops else "0" for name in extents}
    left, right = (_LEFT_BF16, _RIGHT_BF16) if strip.is_bf16 else (_LEFT, _RIGHT)
    sides = [side.format(**words, **places) for side in (left, right)]
    if strip.is_bf16:
        sides = [WIDE[BF16.name].format(value=side) for side in sides]
    return _MEANING.format(
        loops=", ".join(loops),
        extents=", ".join(str(extents[name]) for name in loops),
        variables=", ".join(places[name] for name in order),
        kinds="".join("S" if name in "pl" else "R" for name in order),
        order=", ".join(order),
        p=places["p"],
        left=sides[0],
        right=sides[1],
    )


def _instructions(strip: Strip, words: Mapping[str, Any]) -> str:
    """The shuffles and the products that read them, with `words` in the place of the names in their text."""
    parts = {name: text.format(**words) for name, text in (("sum", _SUM), ("pixel", _PIXEL))}
    parts["pairs"] = _PAIRS.format(**words, **parts)
    product = _PRODUCT_BF16 if strip.is_bf16 else _PRODUCT
    places = ([lane // strip.size * strip.steps + k for lane in range(strip.lanes)] for k in range(strip.steps))
    products = (product.format(k=k, places=item, **words, **parts) for k, item in enumerate(places))
    return "".join(_STEP.format(product=item, **words) for item in products)
