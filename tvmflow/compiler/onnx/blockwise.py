"""com.microsoft's operators on weights of a few bits, of which each block of numbers has a scale of its own.

So are the weights of language models stored that need little memory.
"""

from typing import Any

import numpy as np
from tvm import relax, te, tirx

from tvmflow.arrays import Array
from tvmflow.compiler.onnx.node import Node, UnsupportedFormError
from tvmflow.compiler.onnx.values import const, dtype_of
from tvmflow.compiler.operators.block_products import block_product
from tvmflow.compiler.operators.widening import BlockWeight

# The numbers of MatMulBnb4's two types of four bits, by their bits: the levels of QLoRA's "4-bit NormalFloat" (Dettmers
# et al., 2023), and floats of one bit of sign, two of exponent and one of mantissa, divided by the largest.
_NORMAL_FLOAT = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FLOAT = (0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
_LEVELS = (np.array([*_FLOAT, *(-level for level in _FLOAT)], "float32"), np.array(_NORMAL_FLOAT, "float32"))
# The `accuracy_level` of MatMulNBits that lets a program round what it multiplies to 8 bits, and the bits of weights
# for which that is done.
_ROUNDED, _FEW = 4, 4


def convert_matmul_nbits(node: Node) -> relax.Expr:
    """Return the Relax expression of MatMulNBits: a product with weights of 2, 4 or 8 bits.

    Those of 4 and 8 bits in whole blocks with integers as zero points stay as they are. Others are made floats.

    Raises UnsupportedFormError for weights, scales, zero points or group indices that are not constant, and for another
    number of bits.
    """
    count, depth, block = (int(node.attrs[name]) for name in ("N", "K", "block_size"))
    bits, level = int(node.attrs.get("bits", 4)), int(node.attrs.get("accuracy_level", 0))
    if not _are_constant(node, 1, 2, 3, 4):
        raise UnsupportedFormError("weights that are computed")
    packed, scales, points, groups = _constants(node, 1, 2, 3, 4)
    if bits not in (2, 4, 8):
        raise UnsupportedFormError(f"weights of {bits} bits")
    blocks = -(-depth // block)
    scales = scales.reshape(count, blocks).astype("float32")
    x = node.inputs[0]
    if points is None:
        points = np.full((1, 1), 1 << (bits - 1), "uint8")
    elif points.dtype == np.uint8:
        points = _unpack(points.reshape(count, -1), bits)[:, :blocks]
    else:
        points = points.reshape(count, blocks)
    is_whole = depth % block == 0 and groups is None and points.dtype == np.uint8
    if bits > 2 and is_whole and dtype_of(x) == "float32":
        weight = BlockWeight(packed.reshape(count, -1).T, -points.astype("int16").T, scales.T, 0, bits)
        rounds = level == _ROUNDED and bits == _FEW
        return _add_bias(node, node.emit(block_product(x, weight, rounds=rounds)))
    # The transposed weights, [K, N], from bytes that are transposed: these move less than floats.
    levels = np.ascontiguousarray(_unpack(packed.reshape(count, -1), bits)[:, :depth].T).astype("float32")
    for change, of_blocks in ((np.subtract, np.broadcast_to(points, scales.shape)), (np.multiply, scales)):
        lines = of_blocks.T.astype("float32")
        change(levels, np.repeat(lines, block, axis=0)[:depth] if groups is None else lines[groups], out=levels)
    return _add_bias(node, _multiply(node, levels))


def _add_bias(node: Node, product: relax.Expr) -> relax.Expr:
    """MatMulNBits' product plus its bias, if it has one."""
    return product if node.input(5) is None else relax.op.add(product, node.inputs[5])


def convert_matmul_bnb4(node: Node) -> relax.Expr:
    """Return the Relax expression of MatMulBnb4: a product with weights of 4 bits, made floats at import.

    Raises UnsupportedFormError for weights or scales that are not constant, and for another type of weights than the
    two of bitsandbytes.
    """
    count, depth, block = (int(node.attrs[name]) for name in ("N", "K", "block_size"))
    kind = int(node.attrs["quant_type"])
    if not _are_constant(node, 1, 2):
        raise UnsupportedFormError("weights that are computed")
    packed, scales = _constants(node, 1, 2)
    if kind not in range(len(_LEVELS)):
        raise UnsupportedFormError(f"weights of quant_type {kind}")
    # The higher bits of a byte are the first number.
    numbers = np.stack([packed.reshape(-1) >> 4, packed.reshape(-1) & 15], axis=1).reshape(-1)[: count * depth]
    weights = _LEVELS[kind][numbers] * np.repeat(scales.reshape(-1), block)[: count * depth].astype("float32")
    return _multiply(node, np.ascontiguousarray(weights.reshape(count, depth).T))


def _are_constant(node: Node, *places: int) -> bool:
    """Whether all operands at these places that the node has are constant."""
    return all(node.constant(place) is not None or node.input(place) is None for place in places)


def _constants(node: Node, *places: int) -> list[Any]:
    """The values of constant operands; None for those that the node does not have."""
    return [node.constant(place) for place in places]


def _multiply(node: Node, weights: Array) -> relax.Expr:
    """The product of the first operand and weights [K, N]."""
    x = node.inputs[0]
    return node.emit(relax.op.matmul(x, const(weights, dtype_of(x))))


def convert_gather_block_quantized(node: Node) -> relax.Expr:
    """Return the Relax expression of GatherBlockQuantized: rows of a table of integers, times the scales of blocks.

    The table stays as it is; what is gathered is made floats. Raises UnsupportedFormError for a table, scales or zero
    points that are not constant.
    """
    if not _are_constant(node, 0, 2, 3):
        raise UnsupportedFormError("weights that are computed")
    data, scales, points = _constants(node, 0, 2, 3)
    bits, block = int(node.attrs.get("bits", 4)), int(node.attrs.get("block_size", 128))
    gather = int(node.attrs.get("gather_axis", 0)) % data.ndim
    axis = int(node.attrs.get("quantize_axis", 1)) % data.ndim
    # A byte of uint8 holds several numbers; the file's numbers of four bits have become int8.
    is_packed = data.dtype == np.uint8
    parts = 8 // bits if is_packed else 1
    if points is None:
        points = np.full(scales.shape, 1 << (bits - 1) if is_packed else 0, data.dtype)
    elif parts > 1:
        points = _unpack(points.reshape(-1, points.shape[-1]), bits)[:, : scales.shape[-1]].reshape(scales.shape)
    indices, dtype = node.inputs[1], str(scales.dtype)
    rank = indices.ty.ndim
    place = axis if axis < gather else axis + rank - 1
    operands = [node.apply("Gather", const(array), indices, axis=gather) for array in (data, scales, points)]

    def dequantize(rows: te.Tensor, scale: te.Tensor, zero: te.Tensor) -> te.Tensor:
        shape = [size * parts if at == place else size for at, size in enumerate(rows.shape)]

        def element(*index: Any) -> Any:
            along = index[place]
            number = rows[(*index[:place], along // parts, *index[place + 1 :])]
            if parts > 1:
                shift = (along % parts * bits).astype("uint8")
                number = (number >> shift) & tirx.const((1 << bits) - 1, "uint8")
            of_block = (*index[:place], along // block, *index[place + 1 :])
            return (number.astype(dtype) - zero[of_block].astype(dtype)) * scale[of_block]

        return te.compute(shape, element, name="dequantized")

    return node.builder.call_te(dequantize, *operands, primfunc_name_hint="dequantize")


def _unpack(packed: Array, bits: int) -> Array:
    """The numbers of `bits` bits in the bytes [rows, bytes], the lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype="uint8")
    return ((packed[:, :, None] >> shifts) & ((1 << bits) - 1)).reshape(len(packed), -1)
