"""Folds constants that scale or shift channels, and padding, into the convolution or matrix product beside them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvmflow.arrays import Array
from tvmflow.compiler.operators.common import constant, same_shape
from tvmflow.compiler.passes.rewrite import (
    ELEMENT,
    LARGEST_SHIFT,
    Rewriter,
    by_channel,
    dtype,
    merge_constants,
    rank,
    rewriting,
    rounds,
    sizes,
    static_sizes,
)

_CONVOLUTIONS = {
    "nn.conv1d": "Conv1DAttrs",
    "nn.conv2d": "Conv2DAttrs",
    "nn.conv3d": "Conv3DAttrs",
    "nn.conv1d_transpose": "Conv1DTransposeAttrs",
    "nn.conv2d_transpose": "Conv2DTransposeAttrs",
    "nn.conv3d_transpose": "Conv3DTransposeAttrs",
}
_LINEAR = (*_CONVOLUTIONS, "matmul")


def _batch_norm(rewriter: Rewriter, element: relax.TupleGetItem) -> relax.Expr | None:
    """Write a batch norm with constant statistics as a scale and a shift of each channel."""
    norm = rewriter.call(element.tuple_value, "nn.batch_norm")
    if norm is None or element.index != 0:
        return None
    data, *parameters = norm.args
    values = [rewriter.constant(parameter) for parameter in parameters]
    dims = rank(data)
    if any(value is None for value in values) or dims is None or dtype(data) != "float32":
        return None
    scale, shift, mean, variance = (value.astype("float64") for value in values if value is not None)
    attrs = norm.attrs
    factor = 1 / np.sqrt(variance + float(attrs.epsilon))
    if attrs.scale:
        factor = factor * scale
    offset = -mean * factor + (shift if attrs.center else 0)
    channel_last = (-1,) + (1,) * (dims - 1 - int(attrs.axis) % dims)
    product = relax.op.multiply(data, constant(factor.reshape(channel_last).astype("float32")))
    return relax.op.add(rewriter.emit(product), constant(offset.reshape(channel_last).astype("float32")))


def fold_batch_norm() -> tvm.transform.Pass:
    """Return the pass that writes batch norm with constant statistics as one multiplication and one addition."""
    return rewriting("FoldBatchNorm", {ELEMENT: (_batch_norm,)})


class _Linear:
    """A convolution or a product with constant weights on the right, and the positions of its channels."""

    def __init__(self, call: relax.Call, weight: Array) -> None:
        self.call, self.weight = call, weight
        self.data = call.args[0]
        self.name = call.op.name.removeprefix("relax.")
        self.rank: int = rank(call)  # type: ignore[assignment]
        if self.name == "matmul":
            self.channel, self.data_channel = self.rank - 1, self.rank - 1
            return
        attrs = call.attrs
        self.channel, self.data_channel = attrs.out_layout.index("C"), attrs.data_layout.index("C")
        self.output, self.input = attrs.kernel_layout.index("O"), attrs.kernel_layout.index("I")
        self.groups = int(attrs.groups)
        self.transposed = self.name.endswith("transpose")

    @property
    def outputs(self) -> int:
        """The number of output channels."""
        if self.name == "matmul":
            return int(self.weight.shape[-1])
        return int(self.weight.shape[self.output]) * (self.groups if self.transposed else 1)

    @property
    def inputs(self) -> int:
        """The number of input channels."""
        if self.name == "matmul":
            return int(self.weight.shape[0])
        return int(self.weight.shape[self.input]) * (1 if self.transposed else self.groups)

    def _factors(self, values: Array, of_outputs: bool) -> Array:
        """Values by channel, repeated in the shape of the weights: each weight faces the value of its channel."""
        if self.name == "matmul":
            return values if of_outputs else values[:, None]
        axis, other = (self.output, self.input) if of_outputs else (self.input, self.output)
        shape = [1] * self.weight.ndim
        if of_outputs != self.transposed:
            shape[axis] = -1
            return values.reshape(shape)
        # This axis counts the channels within a group, the other axis goes through the groups.
        values_by_group = values.reshape(self.groups, -1)
        group_values = np.repeat(values_by_group, self.weight.shape[other] // self.groups, axis=0)
        shape[axis], shape[other] = group_values.shape[1], group_values.shape[0]
        return (group_values.T if axis < other else group_values).reshape(shape)

    def scale(self, values: Array, of_outputs: bool) -> relax.Call | None:
        """Return the operator with the weights of each output or input channel multiplied by a value.

        Returns None where a weight would not be finite.
        """
        weight = self.weight.astype("float64") * self._factors(values.astype("float64"), of_outputs)
        if not (np.abs(weight) <= np.finfo("float32").max).all():
            return None
        return relax.Call(self.call.op, [self.data, constant(weight.astype("float32"))], self.call.attrs)

    def propagate_shift(self, values: Array) -> Array:
        """Return what a value added to each input channel adds to each output channel, away from any padding."""
        if self.name == "matmul":
            return np.asarray(values.astype("float64") @ self.weight.astype("float64"))
        products = self.weight.astype("float64") * self._factors(values.astype("float64"), of_outputs=False)
        return np.asarray(products.sum(axis=tuple(axis for axis in range(products.ndim) if axis != self.output)))

    def is_padded(self) -> bool:
        """Whether some results read padding."""
        return self.name != "matmul" and (self.transposed or any(int(size) for size in self.call.attrs.padding))


def _linear(rewriter: Rewriter, expr: relax.Expr) -> _Linear | None:
    call = rewriter.call(expr, *_LINEAR)
    weight = None if call is None else rewriter.constant(call.args[1])
    if call is None or weight is None or dtype(call) != "float32" or rank(call) is None or weight.dtype != np.float32:
        return None
    if call.op.name == "relax.matmul" and (weight.ndim != 2 or rank(call.args[0]) != rank(call)):
        return None
    return _Linear(call, weight)


def _operands(rewriter: Rewriter, call: relax.Call) -> tuple[relax.Expr, Array] | None:
    """The computed and the constant operand of a commutative call."""
    for a, b in ((0, 1), (1, 0)):
        value = rewriter.constant(call.args[b])
        if value is not None and value.dtype == np.float32:
            return call.args[a], value
    return None


def _scale_after(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Fold a scale into the weights of the linear operator before it, and into a constant added between the two."""
    operands = _operands(rewriter, call)
    if operands is None or not rewriter.used_once(operands[0]):
        return None
    data, factor = operands
    linear = _linear(rewriter, data)
    if linear is not None:
        values = by_channel(factor, linear.rank, linear.channel, linear.outputs)
        return None if values is None else linear.scale(values, of_outputs=True)
    total = rewriter.call(data, "add")
    addends = None if total is None else _operands(rewriter, total)
    if addends is None or not rewriter.used_once(addends[0]):
        return None
    linear = _linear(rewriter, addends[0])
    values = None if linear is None else by_channel(factor, linear.rank, linear.channel, linear.outputs)
    if linear is None or values is None or rank(call) != linear.rank or addends[1].ndim > linear.rank:
        return None
    product = linear.scale(values, of_outputs=True)
    if product is None or rounds(addends[1]):
        return None
    shape = (-1,) + (1,) * (linear.rank - 1 - linear.channel)
    return relax.op.add(rewriter.emit(product), constant(np.asarray(addends[1] * values.reshape(shape), "float32")))


def _scale_twice(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Merge two constants that are added, or multiplied with, one after the other."""
    outer = _operands(rewriter, call)
    inner = None if outer is None else rewriter.call(outer[0], call.op.name.removeprefix("relax."))
    first = None if inner is None else _operands(rewriter, inner)
    if outer is None or first is None or not rewriter.used_once(outer[0]):
        return None
    combination = merge_constants(call.op.name.removeprefix("relax."), first[1], outer[1])
    # A row and a column would become a whole matrix.
    if combination is None or combination.size > max(first[1].size, outer[1].size):
        return None
    return relax.Call(call.op, [first[0], constant(combination)])


def _subtract(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    value = rewriter.constant(call.args[1])
    return None if value is None or value.dtype != np.float32 else relax.op.add(call.args[0], constant(-value))


def _before(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Fold a scale of the input channels into the weights, and a shift of them into a bias after the operator."""
    linear = _linear(rewriter, call)
    change = None if linear is None else rewriter.call(linear.data, "multiply", "add")
    operands = None if change is None else _operands(rewriter, change)
    if linear is None or change is None or operands is None or not rewriter.used_once(linear.data):
        return None
    data, value = operands
    # A scale for each channel may also make several channels of one.
    if not same_shape(sizes(data), sizes(change)):
        return None
    values = by_channel(value, linear.rank, linear.data_channel, linear.inputs)
    if values is None:
        return None
    if change.op.name == "relax.multiply":
        product = linear.scale(values, of_outputs=False)
        return None if product is None else relax.Call(product.op, [data, product.args[1]], product.attrs)
    if linear.is_padded() or (linear.name != "matmul" and linear.groups != 1 and linear.transposed):
        return None
    # The digits of the result would be lost in large shifts, which nearly cancel where the data are far from zero.
    sums = _Linear(linear.call, np.abs(linear.weight)).propagate_shift(np.abs(values))
    if not (sums <= LARGEST_SHIFT).all():
        return None
    shape = (-1,) + (1,) * (linear.rank - 1 - linear.channel)
    shift = linear.propagate_shift(values).astype("float32").reshape(shape)
    result = rewriter.emit(relax.Call(linear.call.op, [data, linear.call.args[1]], linear.call.attrs))
    return relax.op.add(result, constant(shift))


def fold_scales() -> tvm.transform.Pass:
    """Return the pass that folds constant scales and shifts of channels into weights and biases."""
    return rewriting(
        "FoldScales",
        {
            "subtract": (_subtract,),
            "multiply": (_scale_twice, _scale_after),
            "add": (_scale_twice,),
            **dict.fromkeys(_LINEAR, (_before,)),
        },
    )


_POOLS = {"nn.avg_pool1d": "Pool1DAttrs", "nn.avg_pool2d": "Pool2DAttrs", "nn.avg_pool3d": "Pool3DAttrs"}
_FIELDS = {
    "Conv": ("strides", "padding", "dilation", "groups", "data_layout", "kernel_layout", "out_layout", "out_dtype"),
    "Pool": ("pool_size", "strides", "padding", "dilation", "ceil_mode", "count_include_pad", "layout", "out_layout"),
}


def _with_changes(attrs: Any, kind: str, changes: Mapping[str, Any]) -> Any:
    fields = {name: getattr(attrs, name) for name in _FIELDS[kind[:4]]}
    return tvm.ir.make_node(f"relax.attrs.{kind}", **{**fields, **changes})


def _padding(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Write zeros around the input as the padding of a convolution or of an average pooling that counts them."""
    pad = rewriter.call(call.args[0], "nn.pad")
    if pad is None or pad.attrs.pad_mode != "constant" or float(pad.attrs.pad_value) != 0 or len(pad.args) != 1:
        return None
    name, attrs = call.op.name.removeprefix("relax."), call.attrs
    pools = name in _POOLS
    layout: str = attrs.layout if pools else attrs.data_layout
    widths = [int(width) for width in pad.attrs.pad_width]
    around = {place: (widths[2 * place], widths[2 * place + 1]) for place in range(len(layout))}
    old = [int(size) for size in attrs.padding]
    if any(width < 0 for width in widths) or any(any(around[layout.index(letter)]) for letter in "NC"):
        return None
    spatial = [place for place, letter in enumerate(layout) if letter not in "NC"]
    if len(old) != 2 * len(spatial) or (pools and (attrs.ceil_mode or (any(old) and not attrs.count_include_pad))):
        return None
    new = [around[place][side] for side in (0, 1) for place in spatial]
    if pools and any(width >= int(size) for width, size in zip(new, [*attrs.pool_size] * 2, strict=True)):
        return None
    changes: dict[str, Any] = {"padding": _sum(old, new), **({"count_include_pad": True} if pools else {})}
    kind = _POOLS[name] if pools else _CONVOLUTIONS[name]
    return relax.Call(call.op, [pad.args[0], *call.args[1:]], _with_changes(attrs, kind, changes))


def _sum(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _padded_taps(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Remove the outer taps of a kernel that meet nothing but padding, whatever the output's place."""
    weight, dims, outputs = rewriter.constant(call.args[1]), static_sizes(call.args[0]), static_sizes(call)
    if weight is None or dims is None or outputs is None or not np.isfinite(weight).all():
        return None
    attrs = call.attrs
    spatial = [place for place, letter in enumerate(attrs.data_layout) if letter not in "NC"]
    kernel = [place for place, letter in enumerate(attrs.kernel_layout) if letter not in "OI"]
    padding = [int(size) for size in attrs.padding]
    slices = [slice(None)] * weight.ndim
    for axis, (place, tap) in enumerate(zip(spatial, kernel, strict=True)):
        stride, dilation, taps = int(attrs.strides[axis]), int(attrs.dilation[axis]), weight.shape[tap]
        before, after = padding[axis], padding[axis + len(spatial)]
        last_place = (outputs[attrs.out_layout.index(attrs.data_layout[place])] - 1) * stride - before
        first, last = 0, taps - 1
        while first < last and last_place + first * dilation < 0 and before >= (first + 1) * dilation:
            first += 1
        while first < last and last * dilation - before >= dims[place] and after >= (taps - last) * dilation:
            last -= 1
        slices[tap] = slice(first, last + 1)
        padding[axis] -= first * dilation
        padding[axis + len(spatial)] -= (taps - 1 - last) * dilation
    rest = weight[tuple(slices)]
    if rest.shape == weight.shape:
        return None
    name = call.op.name.removeprefix("relax.")
    return relax.Call(
        call.op, [call.args[0], constant(rest)], _with_changes(attrs, _CONVOLUTIONS[name], {"padding": padding})
    )


def drop_padded_taps() -> tvm.transform.Pass:
    """Return the pass that removes the taps of convolutions that read only padding, as a wide dilation leaves them."""
    names = [name for name in _CONVOLUTIONS if not name.endswith("transpose")]
    return rewriting("DropPaddedTaps", dict.fromkeys(names, (_padded_taps,)))


def fold_padding() -> tvm.transform.Pass:
    """Return the pass that folds zeros around the input of a convolution or average pooling into its padding."""
    names = [name for name in _CONVOLUTIONS if not name.endswith("transpose")]
    return rewriting("FoldPadding", dict.fromkeys((*names, *_POOLS), (_padding,)))
