"""Pooling of images and volumes whose channels do not come last: lines of the image are combined side by side.

The lines under a window are combined in one line of memory, with room for the padding, and then its elements under the
window. Both loops run along the width, without conditions for the padding, whatever sizes are free.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from tvm import relax, tirx, topi
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler import extensions
from tvmflow.compiler.annotations import KERNEL
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import buffer, constant, parts, size_parameter, static

_LAYOUTS = ("NCHW", "NCDHW")
_FLOATS = ("float32", "float64")
# The most parts of an image for each core: with more than one, a core that other programs delay does fewer of them.
_PARTS = 2
# Longer windows are not unrolled.
_LONGEST = 32


class _Axis(NamedTuple):
    """A dimension of an image and of its windows: sizes of the data and of the result, and the form of a window."""

    size: Any
    out: Any
    taps: int
    stride: int
    dilation: int
    before: int
    after: int

    def first(self, at: Any) -> Any:
        """The place of the first tap of a window, which may lie in the padding."""
        return at * self.stride - self.before

    def inside(self, at: Any) -> tuple[Any, Any]:
        """The number of the first tap within the data, and of the first one behind it."""
        start = self.first(at)
        begin = tirx.max(tirx.floordiv(-start + self.dilation - 1, self.dilation), 0)
        return begin, tirx.min(tirx.floordiv(self.size - start + self.dilation - 1, self.dilation), self.taps)

    def number(self, at: Any, counts_padding: bool) -> Any:
        """The number of elements that an average divides by, of windows without gaps."""
        start = self.first(at)
        if counts_padding:
            return tirx.min(start + self.taps, self.size + self.after) - start
        return tirx.min(start + self.taps, self.size) - tirx.max(start, 0)


def legalize(builder: relax.BlockBuilder, call: relax.Call, machine: Machine, largest: bool) -> relax.Expr | None:
    """Define pooling with the channels first: max pooling if `largest`, else average pooling.

    Returns None for other layouts and types, for windows of known sizes that do not overlap, for averages with gaps,
    and for long windows.
    """
    data, attrs, dtype = call.args[0], call.attrs, str(call.ty.dtype)
    if attrs.layout not in _LAYOUTS or attrs.out_layout != attrs.layout:
        return None
    if not all(isinstance(tensor.ty.shape, relax.ShapeExpr) for tensor in (data, call)):
        return None
    kernel, strides, dilation, padding = (
        [int(item) for item in values] for values in (attrs.pool_size, attrs.strides, attrs.dilation, attrs.padding)
    )
    if dtype not in (*_FLOATS, *(("int8", "uint8") if largest else ())) or max(kernel) > _LONGEST:
        return None
    shape, result = list(data.ty.shape.values), list(call.ty.shape.values)
    is_known = all(static(size) is not None for size in (*shape[2:], *result[2:]))
    overlap = any(size > stride for size, stride in zip(kernel, strides, strict=True))
    if (is_known and not overlap) or (not largest and set(dilation) != {1}):
        return None
    rank = len(kernel)
    lead = [size_parameter(size, f"n{place}") for place, size in enumerate(shape[:2])]
    axes = [
        _Axis(size_parameter(size, f"in{place}"), size_parameter(out, f"out{place}"), *form)
        for place, (size, out, *form) in enumerate(
            zip(shape[2:], result[2:], kernel, strides, dilation, padding[:rank], padding[rank:], strict=True)
        )
    ]
    function = _function(lead, axes, dtype, machine, None if largest else bool(attrs.count_include_pad))
    global_var = extensions.emit_function(builder, function, call.op.name.rpartition(".")[2])
    # An operand, because TVM fails on a function of one operand that has no blocks: it looks for reshapes among these.
    least = -np.inf if dtype in _FLOATS else tirx.min_value(dtype).value
    identity = constant(np.array(least if largest else 0, dtype))
    return relax.call_tir(global_var, [data, identity], call.ty)


def _function(
    lead: Sequence[Any], axes: Sequence[_Axis], dtype: str, machine: Machine, counts_padding: bool | None
) -> tirx.PrimFunc:
    """Build the TIR function of a pooling: of maxima where `counts_padding` is None, else of averages."""
    one, largest = tirx.IntImm("int64", 1), counts_padding is None
    *others, across = axes
    x = buffer("x", [*lead, *(axis.size for axis in axes)], dtype)
    identity = buffer("identity", (), dtype)
    y = buffer("y", [*lead, *(axis.out for axis in axes)], dtype)
    sizes, outs = ([*part] for part in zip(*((axis.size, axis.out) for axis in axes), strict=True))
    images, pixels, results = (topi.utils.simplify(math.prod(part, start=one)) for part in (lead, sizes, outs))
    length = topi.utils.simplify((across.out - 1) * across.stride + (across.taps - 1) * across.dilation + 1)
    work = static(topi.utils.simplify(images * results * math.prod(axis.taps for axis in axes)))
    is_alone = machine.cores == 1 or (work is not None and work < machine.parallel_cycles)
    # Few images are cut into strips of lines.
    rows, strips = others[0].out, one
    if not is_alone:
        most = tirx.floordiv(tirx.IntImm("int64", _PARTS * machine.cores), tirx.max(images, 1))
        strips = topi.utils.simplify(tirx.max(tirx.min(rows, most), 1))
    height = topi.utils.simplify(parts(rows, 1) if static(strips) == 1 else tirx.floordiv(rows + strips - 1, strips))

    def combine(new: Any, old: Any) -> Any:
        return tirx.max(new, old) if largest else old + new

    def along(loops: Sequence[tuple[Any, Any]], body: Callable[[list[Any]], None], at: Sequence[Any] = ()) -> None:
        if len(at) == len(loops):
            body(list(at))
            return
        begin, end = loops[len(at)]
        with T.serial(0, end - begin) as index:
            along(loops, body, [*at, begin + index])

    with IRBuilder() as builder, T.seq_scope():
        source = T.decl_buffer((images * pixels,), dtype, data=x.data, layout=None)
        target = T.decl_buffer((images * results,), dtype, data=y.data, layout=None)
        with (T.serial if is_alone else T.parallel)(0, images * strips) as task:
            image, first_row = tirx.floordiv(task, strips), tirx.floormod(task, strips) * height
            line = T.alloc_buffer((length,), dtype, scope="global", layout=None)
            width = tirx.max(tirx.min(across.size, length - across.before), 0)
            with T.serial(0, length) as place:
                T.buffer_store(line, identity[()], [place])

            def write(at: list[Any]) -> None:
                with T.serial(0, width) as place:
                    T.buffer_store(line, identity[()], [across.before + place])

                def add(taps: list[Any]) -> None:
                    row = image
                    for axis, index, tap in zip(others, at, taps, strict=True):
                        row = row * axis.size + axis.first(index) + tap * axis.dilation
                    with T.serial(0, width) as place:
                        here = across.before + place
                        T.buffer_store(line, combine(source[row * across.size + place], line[here]), [here])

                along([axis.inside(index) for axis, index in zip(others, at, strict=True)], add)
                out = image
                for axis, index in zip(others, at, strict=True):
                    out = out * axis.out + index
                with T.serial(0, across.out) as column:
                    value = line[column * across.stride]
                    for tap in range(1, across.taps):
                        value = combine(line[column * across.stride + tap * across.dilation], value)
                    if counts_padding is not None:
                        count = across.number(column, counts_padding)
                        for axis, index in zip(others, at, strict=True):
                            count = count * axis.number(index, counts_padding)
                        value = value / tirx.Cast(dtype, count)
                    T.buffer_store(target, value, [out * across.out + column])

            last_row = tirx.min(first_row + height, rows)
            along([(first_row, last_row), *((0, axis.out) for axis in others[1:])], write)
    return tirx.PrimFunc([x, identity, y], builder.get().body).with_attr(KERNEL, "pooling_planes")
