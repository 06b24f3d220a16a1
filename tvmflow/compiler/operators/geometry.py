"""Two-dimensional convolutions of Relax: the kind of a call, and the part of the image that its result reads."""

from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, topi

from tvmflow.compiler.operators.common import is_float32, static


@dataclass(frozen=True)
class Geometry:
    """The pixels of an image that each pixel of a convolution's result reads.

    `kernel`, `strides` and `dilation` are along the height and the width, in pixels. `padding` is top, left, bottom,
    right.
    """

    kernel: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int] = (1, 1)

    @classmethod
    def of(cls, call: relax.Call) -> "Geometry":
        """Return the geometry of a call whose kernel, in OIHW, has a known size."""
        kernel, attrs = call.args[1].ty.shape.values[2:], call.attrs
        down, across = (int(size) for size in kernel)
        top, left, bottom, right = (int(size) for size in attrs.padding)
        strides, dilation = ((int(first), int(second)) for first, second in (attrs.strides, attrs.dilation))
        return cls((down, across), strides, (top, left, bottom, right), dilation)

    @property
    def is_pointwise(self) -> bool:
        """Whether each pixel of the result reads the pixel at its own place and no other."""
        return self.kernel == self.strides == (1, 1) and not any(self.padding)

    def result_size(self, height: Any, width: Any) -> tuple[Any, Any]:
        """Return the height and width of the result for an image of `height` by `width` pixels, which may be free."""
        top, left, bottom, right = self.padding
        down, across = (
            topi.utils.simplify((size + before + after - dilation * (kernel - 1) - 1) // stride + 1)
            for size, before, after, kernel, stride, dilation in zip(
                (height, width), (top, left), (bottom, right), self.kernel, self.strides, self.dilation, strict=True
            )
        )
        return down, across

    def window(self, lines: Any, columns: Any) -> tuple[Any, Any]:
        """Return the lines and columns of the padded image that `lines` by `columns` pixels of the result read."""
        down, across = (
            (count - 1) * stride + dilation * (kernel - 1) + 1
            for count, stride, dilation, kernel in zip(
                (lines, columns), self.strides, self.dilation, self.kernel, strict=True
            )
        )
        return down, across


def is_channels_last(call: relax.Call) -> bool:
    """Whether a convolution reads and writes NHWC, with a kernel in OIHW."""
    attrs = call.attrs
    return (attrs.data_layout, attrs.out_layout, attrs.kernel_layout) == ("NHWC", "NHWC", "OIHW")


def has_constant_weights(call: relax.Call) -> bool:
    """Whether a convolution of NHWC data is float32 and has constant weights and a known number of channels."""
    data, weight = call.args
    return (
        is_channels_last(call)
        and is_float32(data, weight)
        and isinstance(weight, tvm.ir.GenericConst)
        and static(data.ty.shape.values[3]) is not None
    )


def is_depthwise(call: relax.Call) -> bool:
    """Whether a convolution, whose kernel is in OIHW and of known size, filters each channel by itself."""
    out_channels, depth = (int(dim) for dim in call.args[1].ty.shape.values[:2])
    return depth == 1 and int(call.attrs.groups) == out_channels > 1
