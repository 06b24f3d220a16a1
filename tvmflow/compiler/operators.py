"""How the tensor operators that matter are computed: with packed weights, in loops that the schedules know.

Activations are NHWC. Weights are packed into `[CO/v][KH][KW][CI][v]` for vectors of v lanes, padded with zeros to whole
vectors; a dense layer is the 1x1 case, `[N/v][K][v]`. Every product is computed into a buffer of whole tiles, so the
inner loops have constant extents whatever the shape, and a last stage takes what is wanted of it. The stages carry
annotations by which the schedule rules know them.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx, topi

from tvmflow.compiler import tiles, vectormath, winograd
from tvmflow.compiler.machine import Machine

Legalization = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]

# Annotations of the accumulating block: the kind of kernel, the rows of its tile, the lanes of its vectors, the number
# of its leading batch dimensions, whether these share the weights, and the size of Winograd's output tiles.
KERNEL = "tvmflow.kernel"
TILE = "tvmflow.tile"
LANES = "tvmflow.lanes"
LEAD = "tvmflow.lead"
SHARED = "tvmflow.shared"
WINOGRAD = "tvmflow.winograd"
# The dimensions of a product's result that are its rows, where they are not all that follow the batch.
ROWS = "tvmflow.rows"

# Fewer rows than these are no tile of their own.
_FEWEST_ROWS = 4

# TVM's fusion kind for operators that take element-wise ones after them; it cannot see that in our stages itself.
_FUSABLE = {"op_pattern": 4}


def legalizations(machine: Machine) -> dict[str, Legalization]:
    """The operators that are not left to TVM's own definitions, for one machine."""

    def conv2d(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        own = _conv2d(builder, call, machine)
        return _default(builder, call) if own is None else own

    def matmul(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        own = _matmul(builder, call, machine)
        return _default(builder, call) if own is None else own

    def softmax(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        return _softmax(builder, call, machine)

    def layer_norm(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        return _layer_norm(builder, call, machine)

    return {
        "relax.nn.conv2d": conv2d,
        "relax.matmul": matmul,
        "relax.nn.softmax": softmax,
        "relax.nn.layer_norm": layer_norm,
        **{name: partial(_elementwise, function=function) for name, function in _FUNCTIONS.items()},
    }


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "relax.exp": vectormath.exp,
    "relax.erf": vectormath.erf,
    "relax.tanh": vectormath.tanh,
    "relax.sigmoid": vectormath.sigmoid,
    "relax.nn.silu": vectormath.silu,
    "relax.nn.gelu": vectormath.gelu,
    "relax.nn.gelu_tanh": vectormath.gelu_tanh,
}


def _elementwise(builder: relax.BlockBuilder, call: relax.Call, function: Callable[[Any], Any]) -> relax.Expr:
    if not _is_float32(call.args[0]):
        return _default(builder, call)
    name = call.op.name.rpartition(".")[2]

    def compute(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *index: function(x[index]), name=name)

    return builder.call_te(compute, call.args[0], primfunc_name_hint=name)


def _default(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return call.op.get_attr("FLegalize")(builder, call)


def _static(dim: Any) -> int | None:
    return int(dim) if isinstance(dim, int | tirx.IntImm) else None


def _is_float32(*tensors: relax.Expr) -> bool:
    return all(isinstance(tensor.ty.shape, relax.ShapeExpr) and str(tensor.ty.dtype) == "float32" for tensor in tensors)


def _vector(channels: int, machine: Machine) -> int:
    """Lanes per vector: the machine's, or fewer where the channels would not fill one."""
    return min(machine.lanes, max(4, 1 << (channels - 1).bit_length()))


def _constant(value: np.ndarray[Any, Any]) -> relax.Expr:
    return relax.const(tvm.runtime.tensor(np.asarray(value, order="C")))


# Convolution.


def _conv2d(builder: relax.BlockBuilder, call: relax.Call, machine: Machine) -> relax.Expr | None:
    data, weight = call.args
    attrs = call.attrs
    if (attrs.data_layout, attrs.out_layout, attrs.kernel_layout) != ("NHWC", "NHWC", "OIHW"):
        return None
    if not _is_float32(data, weight) or any(_static(dim) is None for dim in weight.ty.shape.values):
        return None
    groups, channels = int(attrs.groups), _static(data.ty.shape.values[3])
    out_channels, _, kernel_h, kernel_w = (int(dim) for dim in weight.ty.shape.values)
    geometry: dict[str, Any] = {
        "strides": [int(item) for item in attrs.strides],
        "padding": [int(item) for item in attrs.padding],
        "dilation": [int(item) for item in attrs.dilation],
    }
    if channels is not None and groups == channels == out_channels and groups > 1:
        lanes = _vector(channels, machine)
        packed = _pack_depthwise(builder, weight, lanes)
        compute = partial(depthwise, machine=machine, **geometry)
        return builder.call_te(compute, data, packed, primfunc_name_hint="depthwise_conv2d", primfunc_attrs=_FUSABLE)
    size = _winograd_size(data, weight, groups, geometry, machine)
    if size is not None:
        packed = _constant(winograd.transform_kernel(weight.value.numpy(), size, machine.lanes))
        compute = partial(
            winograd.conv2d,
            channels=out_channels,
            padding=geometry["padding"],
            annotations=lambda rows, lanes, size: {KERNEL: "winograd", TILE: rows, LANES: lanes, WINOGRAD: size},
            machine=machine,
        )
        return builder.call_te(compute, data, packed, primfunc_name_hint="winograd_conv2d", primfunc_attrs=_FUSABLE)
    per_group = out_channels // groups
    lanes = _vector(per_group, machine)
    if groups > 1:
        # A vector of output channels must read one group's input channels only.
        lanes = math.gcd(per_group, machine.lanes)
    packed = _pack_conv(builder, weight, lanes)
    pointwise = (kernel_h, kernel_w) == (1, 1) and groups == 1
    if pointwise and geometry["strides"] == [1, 1] and not any(geometry["padding"]):
        compute = partial(pointwise_conv2d, channels=out_channels, machine=machine)
    else:
        compute = partial(conv2d, channels=out_channels, groups=groups, machine=machine, **geometry)
    return builder.call_te(compute, data, packed, primfunc_name_hint="conv2d", primfunc_attrs=_FUSABLE)


def _winograd_size(
    data: relax.Expr, weight: relax.Expr, groups: int, geometry: dict[str, Any], machine: Machine
) -> int | None:
    """The size of Winograd's output tiles where that algorithm applies and pays."""
    out_channels, channels, *kernel = (int(dim) for dim in weight.ty.shape.values)
    height, width = (_static(dim) for dim in data.ty.shape.values[1:3])
    if (kernel, geometry["strides"], geometry["dilation"], groups) != ([3, 3], [1, 1], [1, 1], 1):
        return None
    if height is None or width is None or not isinstance(weight, tvm.ir.GenericConst):
        return None
    top, left, bottom, right = geometry["padding"]
    return winograd.choose(height + top + bottom - 2, width + left + right - 2, channels, out_channels, machine)


def _pack_conv(builder: relax.BlockBuilder, weight: relax.Expr, lanes: int) -> relax.Expr:
    channels, per_group, kernel_h, kernel_w = (int(dim) for dim in weight.ty.shape.values)
    vectors = -(-channels // lanes)
    if isinstance(weight, tvm.ir.GenericConst):
        value = np.zeros((vectors * lanes, per_group, kernel_h, kernel_w), "float32")
        value[:channels] = weight.value.numpy()
        return _constant(value.reshape(vectors, lanes, per_group, kernel_h, kernel_w).transpose(0, 3, 4, 2, 1))

    def pack(w: te.Tensor) -> te.Tensor:
        return te.compute(
            (vectors, kernel_h, kernel_w, per_group, lanes),
            lambda j, y, x, k, v: tirx.if_then_else(j * lanes + v < channels, w[j * lanes + v, k, y, x], 0.0),
            name="pack_weight",
        )

    return builder.emit_te(pack, weight)


def _pack_depthwise(builder: relax.BlockBuilder, weight: relax.Expr, lanes: int) -> relax.Expr:
    channels, _, kernel_h, kernel_w = (int(dim) for dim in weight.ty.shape.values)
    padded = _padded_channels(channels, lanes)
    if isinstance(weight, tvm.ir.GenericConst):
        value = np.zeros((kernel_h, kernel_w, padded), "float32")
        value[:, :, :channels] = weight.value.numpy()[:, 0].transpose(1, 2, 0)
        return _constant(value)

    def pack(w: te.Tensor) -> te.Tensor:
        return te.compute(
            (kernel_h, kernel_w, padded),
            lambda y, x, c: tirx.if_then_else(c < channels, w[c, 0, y, x], 0.0),
            name="pack_weight",
        )

    return builder.emit_te(pack, weight)


def _padded_channels(channels: int, lanes: int) -> int:
    # Half a vector at the end is as good as a whole one; less is not.
    return channels if channels % max(lanes // 2, 4) == 0 else -(-channels // lanes) * lanes


def _output_size(size: Any, kernel: int, stride: int, before: int, after: int, dilation: int) -> Any:
    return topi.utils.simplify((size + before + after - dilation * (kernel - 1) - 1) // stride + 1)


def _round_up(size: Any, multiple: int) -> Any:
    return topi.utils.simplify((size + multiple - 1) // multiple * multiple)


def _divides(tile: int, size: Any) -> bool:
    known = _static(size)
    return known is not None and known % tile == 0


def _padded_input(
    data: te.Tensor, padding: Sequence[int], height: Any, width: Any, channels: int | None = None
) -> te.Tensor:
    """The input with zeros around it, `height` by `width`; the input itself where that is the same."""
    batch, in_h, in_w, in_c = data.shape
    top, left = padding[0], padding[1]
    wide = channels is not None and channels != int(in_c)
    if not any(padding) and not wide and _static(in_w) is not None and _static(width) == _static(in_w):
        return data

    def value(n: Any, y: Any, x: Any, c: Any) -> Any:
        inside = [tirx.all(y >= top, y < in_h + top, x >= left, x < in_w + left)]
        if wide:
            inside.append(c < in_c)
        return tirx.if_then_else(tirx.all(*inside), data[n, y - top, x - left, c], tirx.const(0, data.dtype))

    return te.compute((batch, height, width, channels or in_c), value, name="pad")


def conv2d(
    data: te.Tensor,
    weight: te.Tensor,
    *,
    channels: int,
    groups: int,
    machine: Machine,
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> te.Tensor:
    """Convolution of NHWC data with packed weights; groups must be whole vectors of output channels."""
    batch, in_h, in_w, _ = data.shape
    vectors, kernel_h, kernel_w, depth, lanes = (int(dim) for dim in weight.shape)
    out_h = _output_size(in_h, kernel_h, strides[0], padding[0], padding[2], dilation[0])
    out_w = _output_size(in_w, kernel_w, strides[1], padding[1], padding[3], dilation[1])
    row_bytes = 4 * strides[1] * (_static(data.shape[3]) or 1)
    tile = tiles.choose(_static(out_w), vectors // groups, machine, row_bytes).rows
    tiled_w = _round_up(out_w, tile)
    height = in_h + padding[0] + padding[2]
    needed = (tiled_w - 1) * strides[1] + dilation[1] * (kernel_w - 1) + 1
    whole = _divides(tile, out_w)
    width = in_w + padding[1] + padding[3] if whole else topi.utils.simplify(needed)
    source = _padded_input(data, padding, height, width)
    y = te.reduce_axis((0, kernel_h), "y")
    x = te.reduce_axis((0, kernel_w), "x")
    k = te.reduce_axis((0, depth), "k")
    per_group = vectors // groups
    product = te.compute(
        (batch, out_h, tiled_w, vectors * lanes),
        lambda n, h, w, c: te.sum(
            source[
                n,
                h * strides[0] + y * dilation[0],
                w * strides[1] + x * dilation[1],
                k if groups == 1 else c // (per_group * lanes) * depth + k,
            ]
            * weight[c // lanes, y, x, k, c % lanes],
            axis=[y, x, k],
        ),
        name="conv2d",
        attrs={KERNEL: "conv2d", TILE: tile, LANES: lanes, LEAD: 1, SHARED: 1},
    )
    return te.compute((batch, out_h, out_w, channels), lambda n, h, w, c: product[n, h, w, c], name="unpack")


def pointwise_conv2d(data: te.Tensor, weight: te.Tensor, *, channels: int, machine: Machine) -> te.Tensor:
    """1x1 convolution of NHWC data: the pixels of an image are the rows of a matrix product."""
    batch, height, width, depth = data.shape
    vectors, _, _, _, lanes = (int(dim) for dim in weight.shape)
    product = _rows_product(
        [batch],
        topi.utils.simplify(height * width),
        depth,
        lambda n, m, k: data[n, m // width, m % width, k],
        lambda n, k, c: weight[c // lanes, 0, 0, k, c % lanes],
        vectors * lanes,
        lanes,
        machine,
        shared=True,
    )
    return te.compute(
        (batch, height, width, channels),
        lambda n, h, w, c: product[n, h * width + w, c],
        name="unpack",
    )


def depthwise(
    data: te.Tensor,
    weight: te.Tensor,
    *,
    machine: Machine,
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> te.Tensor:
    """Depthwise convolution of NHWC data, channel by channel with weights `[KH][KW][C]`."""
    batch, in_h, in_w, channels = data.shape
    kernel_h, kernel_w, padded = (int(dim) for dim in weight.shape)
    out_h = _output_size(in_h, kernel_h, strides[0], padding[0], padding[2], dilation[0])
    out_w = _output_size(in_w, kernel_w, strides[1], padding[1], padding[3], dilation[1])
    tile = _depthwise_tile(_static(out_w), machine)
    lanes = math.gcd(padded, machine.lanes)
    tiled_w = _round_up(out_w, tile)
    height = in_h + padding[0] + padding[2]
    whole = _divides(tile, out_w)
    needed = (tiled_w - 1) * strides[1] + dilation[1] * (kernel_w - 1) + 1
    width = in_w + padding[1] + padding[3] if whole else topi.utils.simplify(needed)
    source = _padded_input(data, padding, height, width, padded)
    y = te.reduce_axis((0, kernel_h), "y")
    x = te.reduce_axis((0, kernel_w), "x")
    product = te.compute(
        (batch, out_h, tiled_w, padded),
        lambda n, h, w, c: te.sum(
            source[n, h * strides[0] + y * dilation[0], w * strides[1] + x * dilation[1], c] * weight[y, x, c],
            axis=[y, x],
        ),
        name="depthwise_conv2d",
        attrs={KERNEL: "depthwise", TILE: tile, LANES: lanes},
    )
    return te.compute((batch, out_h, out_w, channels), lambda n, h, w, c: product[n, h, w, c], name="unpack")


def _depthwise_tile(width: int | None, machine: Machine) -> int:
    most = 14 if machine.registers >= 32 else 8
    if width is None:
        return most // 2
    return min(range(1, most + 1), key=lambda tile: (-(-width // tile) * tile - width, -tile)) if width > 0 else 1


# Matrix products.


def _matmul(builder: relax.BlockBuilder, call: relax.Call, machine: Machine) -> relax.Expr | None:
    left, right = call.args
    if not _is_float32(left, right) or str(call.ty.dtype) != "float32":
        return None
    left_shape, right_shape = list(left.ty.shape.values), list(right.ty.shape.values)
    if len(left_shape) < 2 or len(right_shape) < 2 or _static(right_shape[-2]) == 0:
        return None
    if len(right_shape) == 2 and _static(right_shape[0]) and _static(right_shape[1]):
        lanes = _vector(int(right_shape[1]), machine)
        packed = _pack_dense(builder, right, lanes)
        compute = partial(dense, units=int(right_shape[1]), machine=machine)
        return builder.call_te(compute, left, packed, primfunc_name_hint="dense", primfunc_attrs=_FUSABLE)
    same = len(left_shape) == len(right_shape) and all(
        _equal(a, b) for a, b in zip(left_shape[:-2], right_shape[:-2], strict=True)
    )
    if not same or len(left_shape) < 3:
        return None
    compute = partial(batch_matmul, machine=machine)
    return builder.call_te(compute, left, right, primfunc_name_hint="batch_matmul", primfunc_attrs=_FUSABLE)


def _equal(a: Any, b: Any) -> bool:
    return bool(tvm.sym.Analyzer().can_prove_equal(a, b))


def _pack_dense(builder: relax.BlockBuilder, weight: relax.Expr, lanes: int) -> relax.Expr:
    depth, units = (int(dim) for dim in weight.ty.shape.values)
    vectors = -(-units // lanes)
    if isinstance(weight, tvm.ir.GenericConst):
        value = np.zeros((depth, vectors * lanes), "float32")
        value[:, :units] = weight.value.numpy()
        return _constant(value.reshape(depth, vectors, lanes).transpose(1, 0, 2))

    def pack(w: te.Tensor) -> te.Tensor:
        return te.compute(
            (vectors, depth, lanes),
            lambda j, k, v: tirx.if_then_else(j * lanes + v < units, w[k, j * lanes + v], 0.0),
            name="pack_weight",
        )

    return builder.emit_te(pack, weight)


def dense(data: te.Tensor, weight: te.Tensor, *, units: int, machine: Machine) -> te.Tensor:
    """`data` of shape `[..., K]` times packed weights `[N/v][K][v]`; the leading dimensions are rows.

    All that are known become one dimension of rows. TVM cannot see through divisions by symbols: the others stay
    dimensions of a batch.
    """
    *outer, depth = data.shape
    vectors, _, lanes = (int(dim) for dim in weight.shape)
    joined = _row_dimensions(outer)
    lead = [position for position in range(len(outer)) if position not in joined]

    def element(*index: Any) -> Any:
        *batch, m, k = index
        position: list[Any] = [None] * len(outer)
        for place, value in zip(lead, batch, strict=True):
            position[place] = value
        for place in reversed(joined[1:]):
            position[place] = m % outer[place]
            m = m // outer[place]
        position[joined[0]] = m
        return data[(*position, k)]

    def packed(*index: Any) -> Any:
        k, c = index[-2:]
        return weight[c // lanes, k, c % lanes]

    sizes = [outer[place] for place in joined]
    product = _rows_product(
        [outer[place] for place in lead],
        topi.utils.simplify(math.prod(sizes[1:], start=sizes[0])),
        depth,
        element,
        packed,
        vectors * lanes,
        lanes,
        machine,
        shared=True,
        joined=joined,
    )

    def result(*index: Any) -> Any:
        row = index[joined[0]]
        for place in joined[1:]:
            row = row * outer[place] + index[place]
        return product[(*(index[place] for place in lead), row, index[-1])]

    return te.compute((*outer, units), result, name="unpack")


def _row_dimensions(sizes: Sequence[Any]) -> list[int]:
    """Which dimensions become rows: all if all are known, else the known ones that fill a tile, else the last."""
    known = [_static(size) for size in sizes]
    if None not in known:
        return list(range(len(sizes)))
    return [place for place, size in enumerate(known) if (size or 0) >= _FEWEST_ROWS] or [len(sizes) - 1]


def batch_matmul(left: te.Tensor, right: te.Tensor, *, machine: Machine) -> te.Tensor:
    """Matrix products over equal leading dimensions."""
    *batch, rows, depth = left.shape
    units = right.shape[-1]
    known = _static(units)
    lanes = machine.lanes if known is None else _vector(known, machine)
    whole = right
    if known is None or known % lanes:
        # Whole vectors at the end need room.
        whole = te.compute(
            (*batch, depth, _round_up(units, lanes)),
            lambda *index: tirx.if_then_else(index[-1] < units, right[index], tirx.const(0, right.dtype)),
            name="pack",
        )
    product = _rows_product(
        batch,
        rows,
        depth,
        lambda *index: left[index],
        lambda *index: whole[index],
        whole.shape[-1],
        lanes,
        machine,
        shared=False,
    )
    return te.compute((*batch, rows, units), lambda *index: product[index], name="unpack")


def _rows_product(
    batch: Sequence[Any],
    rows: Any,
    depth: Any,
    left: Callable[..., Any],
    right: Callable[..., Any],
    channels: Any,
    lanes: int,
    machine: Machine,
    *,
    shared: bool,
    joined: Sequence[int] | None = None,
) -> te.Tensor:
    """`[*batch, rows, channels]` of left `[*batch, row, k]` times right `[*batch, k, channel]`, in whole vectors.

    `shared` says that the right operand is the same for the whole batch; `joined` which dimensions of the result are
    its rows, if not all that follow the batch. Rows come in whole tiles; where they do not
    divide, the left operand is copied with its last row repeated.
    """
    known = _static(channels)
    row_bytes = 4 * int(depth) if _static(depth) else None
    tile = tiles.choose(_static(rows), known // lanes if known else 2, machine, row_bytes).rows
    source = left
    tiled = rows
    if not _divides(tile, rows):
        tiled = _round_up(rows, tile)
        panel = te.compute(
            (*batch, tiled, depth),
            lambda *index: left(*index[:-2], tirx.min(index[-2], rows - 1), index[-1]),
            name="panel",
        )

        def source(*index: Any) -> Any:
            return panel[index]

    k = te.reduce_axis((0, depth), "k")
    return te.compute(
        (*batch, tiled, channels),
        lambda *index: te.sum(source(*index[:-1], k) * right(*index[:-2], k, index[-1]), axis=k),
        name="product",
        attrs={
            KERNEL: "rows",
            TILE: tile,
            LANES: lanes,
            LEAD: len(batch),
            SHARED: int(shared),
            **({} if joined is None else {ROWS: list(joined)}),
        },
    )


# Softmax and norms.


def _softmax(builder: relax.BlockBuilder, call: relax.Call, machine: Machine) -> relax.Expr:
    data = call.args[0]
    if not _is_float32(data) or int(call.attrs.axis) not in (-1, len(data.ty.shape.values) - 1):
        return _default(builder, call)
    return builder.call_te(partial(softmax, machine=machine), data, primfunc_name_hint="softmax")


def softmax(data: te.Tensor, *, machine: Machine) -> te.Tensor:
    """Softmax over the last dimension."""
    rows, size = list(data.shape[:-1]), data.shape[-1]
    largest = _row_reduction(lambda row, k: data[(*row, k)], rows, size, te.max, tirx.max, "max", machine)
    exponential = te.compute(
        data.shape, lambda *index: vectormath.exp(data[index] - largest(index[:-1])), name="exponential"
    )
    total = _row_reduction(
        lambda row, k: exponential[(*row, k)], rows, size, te.sum, lambda a, b: a + b, "sum", machine
    )
    return te.compute(
        data.shape,
        lambda *index: exponential[index] / total(index[:-1]),
        name="softmax",
        attrs={KERNEL: "rowwise"},
    )


def _layer_norm(builder: relax.BlockBuilder, call: relax.Call, machine: Machine) -> relax.Expr:
    data, scale, bias = call.args
    rank = len(data.ty.shape.values) if _is_float32(data, scale, bias) else 0
    if rank < 2 or [int(axis) % rank for axis in call.attrs.axes] != [rank - 1]:
        return _default(builder, call)
    compute = partial(layer_norm, epsilon=float(call.attrs.epsilon), machine=machine)
    return builder.call_te(compute, data, scale, bias, primfunc_name_hint="layer_norm")


def layer_norm(data: te.Tensor, scale: te.Tensor, bias: te.Tensor, *, epsilon: float, machine: Machine) -> te.Tensor:
    """Normalisation over the last dimension; the variance is that of the centred values."""
    rows, size = list(data.shape[:-1]), data.shape[-1]
    count = tirx.Cast("float32", size)
    total = _row_reduction(lambda row, k: data[(*row, k)], rows, size, te.sum, lambda a, b: a + b, "mean", machine)
    mean = te.compute(rows, lambda *row: total(row) / count, name="mean")
    squares = _row_reduction(
        lambda row, k: (data[(*row, k)] - mean[row]) * (data[(*row, k)] - mean[row]),
        rows,
        size,
        te.sum,
        lambda a, b: a + b,
        "variance",
        machine,
    )
    scaling = te.compute(rows, lambda *row: 1.0 / tirx.sqrt(squares(row) / count + epsilon), name="scaling")
    return te.compute(
        data.shape,
        lambda *index: (data[index] - mean[index[:-1]]) * scaling[index[:-1]] * scale[index[-1]] + bias[index[-1]],
        name="layer_norm",
        attrs={KERNEL: "rowwise"},
    )


def _row_reduction(
    element: Callable[[Sequence[Any], Any], Any],
    rows: Sequence[Any],
    size: Any,
    reduce: Callable[..., Any],
    combine: Callable[[Any, Any], Any],
    name: str,
    machine: Machine,
) -> Callable[[Sequence[Any]], Any]:
    """Reduce the last dimension in whole vectors, their lanes, and what is left over.

    Returns the result as a function of the row. The stages are named `name` with `_lanes`, `_vector` and `_rest`.
    """
    lanes, known = machine.lanes, _static(size)
    parts = []
    if known is None or known >= lanes:
        o = te.reduce_axis((0, topi.utils.simplify(size // lanes)), "o")
        partial_results = te.compute(
            (*rows, lanes),
            lambda *index: reduce(element(index[:-1], o * lanes + index[-1]), axis=o),
            name=f"{name}_lanes",
        )
        v = te.reduce_axis((0, lanes), "v")
        parts.append(te.compute(rows, lambda *row: reduce(partial_results[(*row, v)], axis=v), name=f"{name}_vector"))
    if known is None or known % lanes:
        r = te.reduce_axis((0, topi.utils.simplify(size % lanes)), "r")
        parts.append(
            te.compute(rows, lambda *row: reduce(element(row, size // lanes * lanes + r), axis=r), name=f"{name}_rest")
        )

    def result(row: Sequence[Any]) -> Any:
        return combine(parts[0][tuple(row)], parts[1][tuple(row)]) if len(parts) == 2 else parts[0][tuple(row)]

    return result
