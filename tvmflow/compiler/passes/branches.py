"""Adds the kernels of parallel convolutions whose results are added: the sum of the branches is one convolution.

Networks such as RepVGG (Ding et al., "RepVGG: Making VGG-style ConvNets Great Again", 2021) and MobileOne are trained
with several branches, which compute convolutions of the same image with kernels of different sizes and a scale of each
channel. All are linear, so one kernel has their sum. Many files have the branches as they were trained.
"""

from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax

from tvmflow.arrays import Array
from tvmflow.compiler.operators.common import constant, same_shape, static
from tvmflow.compiler.passes.rewrite import Rewriter, by_channel, dtype, rewriting, sizes


@dataclass(frozen=True)
class _Branch:
    """A convolution of `data`, or a scale of its channels, and a number that is added to each channel of the result.

    `kernel` is `[CO][CI/groups][KH][KW]` of the convolution `call`. Without a convolution (`call` is None) it is the
    scale of each channel. `shift` is the number for each channel, None where nothing is added.
    """

    data: relax.Expr
    kernel: Array
    shift: Array | None
    call: relax.Call | None = None


def add_branches() -> tvm.transform.Pass:
    """Return the pass that adds float32 convolutions of the same NCHW image with constant weights as one."""
    return rewriting("AddBranches", {"add": (_add,)})


def _add(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Write a sum of two branches as one convolution and one shift of each channel."""
    channels = _channels(call)
    if channels is None or not all(same_shape(sizes(operand), sizes(call)) for operand in call.args):
        return None
    branches = [_branch(rewriter, operand, channels) for operand in call.args]
    pair = [branch for branch in branches if branch is not None]
    if len(pair) != 2 or not rewriter.same(pair[0].data, pair[1].data):
        return None
    # The kernel of the larger one has room for the other one's.
    pair.sort(key=lambda branch: 0 if branch.call is None else branch.kernel[0, 0].size, reverse=True)
    base, other = pair
    kernel = None if base.call is None else _sum(base, base.call, other)
    if kernel is None or base.call is None:
        return None
    result = relax.Call(base.call.op, [base.data, constant(kernel.astype("float32"))], base.call.attrs)
    shifts = [branch.shift for branch in pair if branch.shift is not None]
    if not shifts:
        return result
    shift = np.sum([values.astype("float64") for values in shifts], axis=0).astype("float32")
    return relax.op.add(rewriter.emit(result), constant(shift.reshape(1, -1, 1, 1)))


def _channels(call: relax.Call) -> int | None:
    """The channels of a float32 image in NCHW; None for another tensor."""
    dims = sizes(call)
    return static(dims[1]) if dims is not None and len(dims) == 4 and dtype(call) == "float32" else None


def _branch(rewriter: Rewriter, operand: relax.Expr, channels: int) -> _Branch | None:
    """The branch that computes an operand which nothing else reads; None where it is something else."""
    if not rewriter.used_once(operand):
        return None
    shift = None
    added = rewriter.call(operand, "add")
    if added is not None:
        values = _by_channel(rewriter, added, channels)
        if values is None or not rewriter.used_once(values[0]):
            return None
        operand, shift = values
    convolution = rewriter.call(operand, "nn.conv2d")
    if convolution is not None:
        data, weight = convolution.args
        kernel, attrs = rewriter.constant(weight), convolution.attrs
        layouts = (attrs.data_layout, attrs.out_layout, attrs.kernel_layout)
        if kernel is None or kernel.dtype != np.float32 or layouts != ("NCHW", "NCHW", "OIHW"):
            return None
        return _Branch(data, kernel, shift, convolution)
    scaled = rewriter.call(operand, "multiply")
    values = None if scaled is None else _by_channel(rewriter, scaled, channels)
    return None if values is None else _Branch(*values, shift)


def _by_channel(rewriter: Rewriter, call: relax.Call, channels: int) -> tuple[relax.Expr, Array] | None:
    """The image among the operands of a call, and the constant with a number for each of its channels."""
    for image, other in (call.args, reversed(call.args)):
        value = rewriter.constant(other)
        values = None if value is None else by_channel(value, 4, 1, channels)
        if values is not None:
            return image, values
    return None


def _sum(base: _Branch, call: relax.Call, other: _Branch) -> Array | None:
    """The kernel of a convolution and that of another branch, added tap by tap; None where the taps do not meet."""
    attrs, kernel = call.attrs, base.kernel.astype("float64")
    if other.call is None:
        if any(int(stride) != 1 for stride in attrs.strides) or len(other.kernel) != kernel.shape[1] * int(
            attrs.groups
        ):
            return None
        added, before, dilation = _diagonal(other.kernel, kernel.shape[1]), [0, 0], [1, 1]
    else:
        same = other.call.attrs
        if list(attrs.strides) != list(same.strides) or int(attrs.groups) != int(same.groups):
            return None
        added, before, dilation = other.kernel, [int(size) for size in same.padding[:2]], list(map(int, same.dilation))
    if added.shape[:2] != kernel.shape[:2]:
        return None
    places = []
    for axis in (0, 1):
        step, count = int(attrs.dilation[axis]), added.shape[2 + axis]
        place, rest = divmod(int(attrs.padding[axis]) - before[axis], step)
        if rest or place < 0 or place + count > kernel.shape[2 + axis] or (count > 1 and dilation[axis] != step):
            return None
        places.append(slice(place, place + count))
    kernel[:, :, places[0], places[1]] += added
    return kernel


def _diagonal(scale: Array, depth: int) -> Array:
    """The 1x1 kernel of a convolution in groups of `depth` channels that multiplies each channel by its scale."""
    kernel = np.zeros((len(scale), depth, 1, 1))
    channels = np.arange(len(scale))
    kernel[channels, channels % depth, 0, 0] = scale
    return kernel
