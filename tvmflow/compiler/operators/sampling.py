"""Samples of an image at points of a grid: ONNX's GridSample.

TVM computes the place of a point again for each channel. Here the places and weights of a block of points are computed
once, in vectors, before the channels are read.
"""

from collections.abc import Sequence
from typing import Any

from tvm import relax, tirx, topi
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler import extensions
from tvmflow.compiler.annotations import KERNEL
from tvmflow.compiler.interpolation import cubic_weights
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import buffer, is_float32, registers, size_parameter, static
from tvmflow.compiler.vectormath import let

# The pixels along an axis that a sample consists of, counted from the one before its point.
_TAPS = {"nearest": (0,), "bilinear": (0, 1), "bicubic": (-1, 0, 1, 2)}
# The coefficient of the cubic filter, as in ONNX Runtime and PyTorch.
_ALPHA = -0.75
# Places of samples of reflected pixels end here: float32 holds halves up to it.
_FARTHEST = 2.0**22
# The vectors of points of a block: so few that their places and weights stay in the first-level cache.
_VECTORS = 4


def legalize(builder: relax.BlockBuilder, call: relax.Call, machine: Machine) -> relax.Expr | None:
    """Define samples of float32 images [N, C, H, W] at a grid [N, 2, OH, OW] of places x and y between -1 and 1.

    Returns None for volumes and other types.
    """
    data, grid = call.args
    attrs = call.attrs
    if not is_float32(data, grid) or data.ty.ndim != 4 or str(attrs.method) not in _TAPS:
        return None
    batch, channels, height, width = data.ty.shape.values
    kernel = _Kernel(
        [batch, channels, height, width],
        list(grid.ty.shape.values[2:]),
        _TAPS[str(attrs.method)],
        str(attrs.padding_mode),
        aligns=bool(attrs.align_corners),
        machine=machine,
    )
    function = extensions.emit_function(builder, kernel.function(), "grid_sample")
    return relax.call_tir(function, [data, grid], call.ty)


class _Kernel:
    """Builds the TIR function of samples of images of `shape`; `taps` are the pixels along an axis that make one up."""

    def __init__(
        self,
        shape: list[Any],
        points: list[Any],
        taps: tuple[int, ...],
        padding: str,
        *,
        aligns: bool,
        machine: Machine,
    ) -> None:
        self._taps, self._padding, self._aligns, self._machine = taps, padding, aligns, machine
        self._is_cubic = len(taps) > 2
        self._batch, self._channels, *self._sizes = (
            size_parameter(size, name) for size, name in zip(shape, ("n", "c", "h", "w"), strict=True)
        )
        rows, columns = (size_parameter(size, name) for size, name in zip(points, ("oh", "ow"), strict=True))
        self._points = topi.utils.simplify(rows * columns)
        self._x = buffer("x", [self._batch, self._channels, *self._sizes])
        self._grid = buffer("grid", [self._batch, tirx.IntImm("int64", 2), rows, columns])
        self._y = buffer("y", [self._batch, self._channels, rows, columns])

    def function(self) -> tirx.PrimFunc:
        """Return the function, whose attribute `KERNEL` tells the schedules to leave it unchanged."""
        lanes, points = self._machine.lanes, self._points
        block = _VECTORS * lanes
        blocks = tirx.floordiv(points + (block - 1), block)
        pixels = self._sizes[0] * self._sizes[1]
        planes = self._batch * self._channels
        is_alone = self._machine.cores == 1 or static(topi.utils.simplify(self._batch * blocks)) == 1
        with IRBuilder() as builder, T.seq_scope():
            self._data, grid, result = (
                T.decl_buffer((size,), "float32", data=item.data, layout=None)
                for item, size in zip(
                    (self._x, self._grid, self._y),
                    (planes * pixels, self._batch * 2 * points, planes * points),
                    strict=True,
                )
            )
            with (T.serial if is_alone else T.parallel)(0, self._batch * blocks) as task:
                image, first = tirx.floordiv(task, blocks), tirx.floormod(task, blocks) * block
                # Of each pixel of a sample its place, its weight, and -1 where it is in the image, else 0: along each
                # axis, then in the image.
                lines, tables = (
                    [registers((count * block,), dtype) for dtype in ("int32", "float32", "int32")]
                    for count in (2 * len(self._taps), len(self._taps) ** 2)
                )
                # Of each axis the pixel before a point, and the distance from it.
                numbers, distances = (registers((2 * block,), dtype) for dtype in ("int32", "float32"))
                with T.serial(0, _VECTORS) as vector, T.vectorized(0, lanes) as lane:
                    # Points after the last one are the last one.
                    point = tirx.min(first + vector * lanes + lane, points - 1)
                    for axis, size in enumerate(reversed(self._sizes)):
                        at = axis * block + vector * lanes + lane
                        T.buffer_store(distances, self._place(grid[(image * 2 + axis) * points + point], size), [at])
                        self._divide(numbers, distances, at)
                with T.serial(0, _VECTORS) as vector, T.vectorized(0, lanes) as lane:
                    self._locate(numbers, distances, lines, vector * lanes + lane)
                with T.serial(0, _VECTORS) as vector, T.vectorized(0, lanes) as lane:
                    self._combine(lines, tables, vector * lanes + lane)
                places, weights, masks = tables

                def sample(channel: Any, point: Any) -> None:
                    plane = image * self._channels + channel
                    parts = [
                        self._pixel(plane * pixels + places[at], masks[at]) * weights[at]
                        for at in (place * block + point for place in range(len(self._taps) ** 2))
                    ]
                    T.buffer_store(result, sum(parts[1:], parts[0]), [plane * points + first + point])

                with T.If(first + block <= points):
                    with (
                        T.Then(),
                        T.serial(0, self._channels) as channel,
                        T.serial(0, _VECTORS) as vector,
                        T.vectorized(0, lanes) as lane,
                    ):
                        sample(channel, vector * lanes + lane)
                    with T.Else(), T.serial(0, self._channels) as channel, T.serial(0, points - first) as point:
                        sample(channel, point)
        return tirx.PrimFunc([self._x, self._grid, self._y], builder.get().body).with_attr(KERNEL, "sampling")

    def _place(self, value: Any, size: Any) -> Any:
        """The place along an axis of `size` pixels that a coordinate between -1 and 1 is."""
        extent = size.astype("float32")
        # Only sums follow the product, so that a fused multiply-add rounds as ONNX Runtime does.
        place = (value + 1.0) * ((extent - 1.0) * 0.5) if self._aligns else (value + 1.0) * extent * 0.5 - 0.5
        if self._padding == "reflection" and not self._is_cubic:
            place = self._reflect(place, extent)
        # Farther outside of the image, all pixels of a sample are zeros or those of the border. NaN is no place at all.
        if self._is_cubic:
            beyond = _FARTHEST if self._padding == "reflection" else 3.0
        else:
            beyond = 2.0 if self._padding == "zeros" else 0.0
        lowest, highest = tirx.const(-beyond, "float32"), extent - 1.0 + beyond
        place = let(place, lambda place: tirx.Select(place > lowest, place, lowest))
        return let(place, lambda place: tirx.Select(place < highest, place, highest))

    def _divide(self, numbers: Any, distances: Any, at: Any) -> None:
        """Store the pixel before a place, which `distances` holds, and the distance between them.

        A sample of the nearest pixel is that pixel itself, at no distance.
        """
        is_nearest = len(self._taps) == 1
        round_ = tirx.nearbyint if is_nearest else tirx.floor
        T.buffer_store(numbers, round_(distances[at]).astype("int32"), [at])
        rest = tirx.const(0.0, "float32") if is_nearest else distances[at] - numbers[at].astype("float32")
        T.buffer_store(distances, rest, [at])

    def _locate(self, numbers: Any, distances: Any, lines: Sequence[Any], point: Any) -> None:
        """Store the places, weights and masks of the pixels of a point's sample along each axis."""
        block, zero = _VECTORS * self._machine.lanes, tirx.const(0, "int32")
        for axis, size in enumerate(reversed(self._sizes)):
            extent = size.astype("int32")
            for place, tap in enumerate(self._taps):
                number = numbers[axis * block + point] + tap
                inside = tirx.Select(tirx.all(number >= 0, number < extent), tirx.const(-1, "int32"), zero)
                if self._is_cubic and self._padding == "reflection":
                    number = self._reflect(number.astype("float32"), size.astype("float32")).astype("int32")
                values = (
                    tirx.max(tirx.min(number, extent - 1), zero),
                    self._weight(tap, distances[axis * block + point]),
                    inside,
                )
                for line, value in zip(lines, values, strict=True):
                    T.buffer_store(line, value, [(axis * len(self._taps) + place) * block + point])

    def _weight(self, tap: int, distance: Any) -> Any:
        """The weight of a pixel along an axis, where `distance` is that from the pixel before the point."""
        if not self._is_cubic:
            return distance if tap else 1.0 - distance
        near, far = cubic_weights(tap - distance if tap > 0 else distance - tap, _ALPHA)
        return near if tap in (0, 1) else far

    def _combine(self, lines: Sequence[Any], tables: Sequence[Any], point: Any) -> None:
        """Store the places in the image, the weights and the masks of the pixels of a point's sample."""
        block, taps = _VECTORS * self._machine.lanes, len(self._taps)
        width = self._sizes[1].astype("int32")
        for down in range(taps):
            for across in range(taps):
                (row, column), (above, beside), (high, wide) = (
                    (line[(taps + down) * block + point], line[across * block + point]) for line in lines
                )
                values = (row * width + column, above * beside, tirx.bitwise_and(high, wide))
                for table, value in zip(tables, values, strict=True):
                    T.buffer_store(table, value, [(down * taps + across) * block + point])

    def _reflect(self, place: Any, extent: Any) -> Any:
        """A coordinate reflected into the image at its borders, as often as it is beyond them."""
        low = tirx.const(0.0 if self._aligns else -0.5, "float32")
        span = extent - 1.0 if self._aligns else extent
        distance = T.bind(tirx.abs(place - low))
        times = T.bind(tirx.floor(distance / span))
        rest, parity = distance - times * span, times - 2.0 * tirx.floor(times * 0.5)
        return T.bind(tirx.Select(parity > 0.5, span - rest, rest) + low)

    def _pixel(self, place: Any, mask: Any) -> Any:
        value = self._data[place]
        if self._padding != "zeros":
            return value
        return tirx.reinterpret("float32", tirx.bitwise_and(tirx.reinterpret("int32", value), mask))
