"""Pooling of NHWC activations: taps in registers, without a padded copy of the image.

At the border a maximum reads the nearest element of the image again, and an average branches around the padding. (A
`tirx.Select` would read outside the image: see `tvmflow.compiler.schedules.guards`.)
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

from tvm import relax, te, tirx

from tvmflow.compiler.annotations import KERNEL
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import planes
from tvmflow.compiler.operators.common import call_kernel, is_float32, static

# Windows with more taps are pooled along columns first, then along rows.
_MOST_TAPS = 9
# Longer windows are not unrolled.
_LONGEST = 32


def legalize(builder: relax.BlockBuilder, call: relax.Call, machine: Machine, largest: bool) -> relax.Expr | None:
    """Define the loops of pooling in NHWC and float32: max pooling if `largest`, else average pooling.

    With the channels first, it is one of `planes`. Returns None, which leaves the call to TVM, for other layouts and
    dtypes, and for windows that are dilated, longer than `_LONGEST` or may read padding alone.
    """
    data, attrs = call.args[0], call.attrs
    if (attrs.layout, attrs.out_layout) != ("NHWC", "NHWC") or not is_float32(data):
        return planes.legalize(builder, call, machine, largest)
    height, width = call.ty.shape.values[1:3]
    kernel, strides, dilation, padding = (
        [int(item) for item in values] for values in (attrs.pool_size, attrs.strides, attrs.dilation, attrs.padding)
    )
    for axis, size in enumerate((height, width)):
        inside = _windows_inside(data.ty.shape.values[1 + axis], size, kernel[axis], strides[axis], padding[axis::2])
        if dilation[axis] != 1 or kernel[axis] > _LONGEST or not (inside or (not attrs.ceil_mode and inside is None)):
            return None
    windows = [_Window(*window) for window in zip(kernel, strides, padding[:2], padding[2:], strict=True)]
    count_padding = bool(attrs.count_include_pad)
    compute = partial(pool, size=(height, width), windows=windows, largest=largest, count_padding=count_padding)
    hint = "max_pool2d" if largest else "avg_pool2d"
    return call_kernel(builder, compute, data, name=hint)


def _windows_inside(size: Any, out: Any, kernel: int, stride: int, padding: Sequence[int]) -> bool | None:
    """Whether every window reads an element of the image; None where that depends on unknown sizes."""
    before, after = padding
    if before >= kernel or after >= kernel:
        return False
    length, windows = static(size), static(out)
    if length is None or windows is None:
        return None
    return (windows - 1) * stride - before < length


class _Tap(NamedTuple):
    """One tap of a window: its place, the nearest place in the image, and the condition that the two are equal.

    `is_inside` is None for a tap that always lies in the image.
    """

    place: Any
    nearest: Any
    is_inside: Any


class _Window:
    """A window along one dimension: its taps, the stride to the next window, the padding before and after the image."""

    def __init__(self, taps: int, stride: int, before: int, after: int) -> None:
        self.taps, self.stride, self.before, self.after = taps, stride, before, after

    def taps_of(self, index: Any, size: Any) -> list[_Tap]:
        """Return the taps of the window at `index` of an image of `size` elements."""
        taps = []
        for tap in range(self.taps):
            place = index * self.stride + (tap - self.before)
            low = None if tap >= self.before else place >= 0
            high = None if tap == 0 and not self.before else place < size
            nearest = place if low is None else tirx.max(place, 0)
            nearest = nearest if high is None else tirx.min(nearest, size - 1)
            conditions = [condition for condition in (low, high) if condition is not None]
            taps.append(_Tap(place, nearest, tirx.all(*conditions) if conditions else None))
        return taps

    def count(self, index: Any, size: Any, count_padding: bool) -> Any:
        """Return the number of taps that an average of the window at `index` divides by."""
        start = index * self.stride - self.before
        if count_padding:
            return tirx.min(start + self.taps, size + self.after) - start
        return tirx.min(start + self.taps, size) - tirx.max(start, 0)


def pool(
    data: te.Tensor, *, size: Sequence[Any], windows: Sequence[_Window], largest: bool, count_padding: bool
) -> te.Tensor:
    """Define the pooling of float32 `[N, H, W, C]` to the height and width `size`.

    `windows` are the windows along the height and the width. Takes maxima if `largest`, else averages, which count the
    padding if `count_padding`.
    """
    batch, in_h, in_w, channels = data.shape
    down, across = windows

    def combine(a: Any, b: Any) -> Any:
        return tirx.max(a, b) if largest else a + b

    def read_inside(condition: Any, value: Any) -> Any:
        return value if condition is None else tirx.if_then_else(condition, value, tirx.const(0, "float32"))

    def window(element: Callable[[Any], Any], along: _Window, index: Any, length: Any) -> Any:
        # Repeating an element leaves a maximum as it is, but not a sum.
        if largest:
            return reduce(combine, [element(tap.nearest) for tap in along.taps_of(index, length)])
        return reduce(combine, [read_inside(tap.is_inside, element(tap.place)) for tap in along.taps_of(index, length)])

    def divide(value: Any, h: Any, w: Any) -> Any:
        if largest:
            return value
        count = down.count(h, in_h, count_padding) * across.count(w, in_w, count_padding)
        return value * (tirx.const(1, "float32") / tirx.Cast("float32", count))

    if down.taps * across.taps <= _MOST_TAPS:
        return te.compute(
            (batch, *size, channels),
            lambda n, h, w, c: divide(
                window(lambda y: window(lambda x: data[n, y, x, c], across, w, in_w), down, h, in_h), h, w
            ),
            name="pool",
            attrs={KERNEL: "pooling"},
        )
    # Pool columns first, with the padding of each line, so that the windows of a line need no condition.
    width = (size[1] - 1) * across.stride + across.taps

    def column(n: Any, h: Any, x: Any, c: Any) -> Any:
        place = x - across.before
        if largest:
            nearest = tirx.min(tirx.max(place, 0), in_w - 1)
            return window(lambda y: data[n, y, nearest, c], down, h, in_h)
        value = window(lambda y: data[n, y, place, c], down, h, in_h)
        return read_inside(tirx.all(place >= 0, place < in_w), value)

    columns = te.compute((batch, size[0], width, channels), column, name="columns")
    return te.compute(
        (batch, *size, channels),
        lambda n, h, w, c: divide(
            reduce(combine, [columns[n, h, w * across.stride + tap, c] for tap in range(across.taps)]), h, w
        ),
        name="pool",
        attrs={KERNEL: "pooling"},
    )
