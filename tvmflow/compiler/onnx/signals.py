"""The discrete Fourier transform of whole signals (DFT) and of frames (STFT), as products with matrices.

A transform of a length that has factors is one over each of two factors, with rotations between them, as Cooley and
Tukey have it: their matrices are small, and there is less to multiply.
"""

import math
from typing import Any

import numpy as np
from tvm import relax, te, tirx

from tvmflow.arrays import Array
from tvmflow.compiler.onnx.node import FreeSizeError, Node, UnsupportedFormError
from tvmflow.compiler.onnx.sizes import Sizes, materialise
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of

# The opset in which DFT got its axis as an operand.
_AXIS_OPERAND = 20
# The most numbers of a matrix. Those of real and of imaginary parts are in memory, and constant ones in the bundle.
_LARGEST_MATRIX = 1 << 26
# The multiplications for each number that cost as much as the passes over memory between the two factors of a length.
_PASSES = 128


def convert_dft(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's DFT: products with the matrices of the transform.

    They are constant, but for a symbolic length the model computes its matrix when it runs, and checks that the length
    is not too large for that. Raises UnsupportedFormError for an axis that is not constant, for a length that is
    computed from data, and for one whose factors are too large. Raises FreeSizeError for data of unknown shape.
    """
    x, has_operand = node.inputs[0], node.opset >= _AXIS_OPERAND
    axis = _number(node, 2, -2) if has_operand else int(node.attrs.get("axis", 1))
    axis %= x.ty.ndim
    is_inverse, is_half = bool(node.attrs.get("inverse", 0)), bool(node.attrs.get("onesided", 0))
    from_half, evaluator = is_inverse and is_half, node.evaluator
    size = (dims_of(x) or [None] * x.ty.ndim)[axis]
    if size is None:
        raise FreeSizeError("a transform along a dimension of unknown size")
    if node.input(1) is None:
        length = evaluator.simplify(2 * (size - 1)) if from_half else size
    else:
        lengths = node.sizes(1)
        if lengths is None:
            raise UnsupportedFormError("a length that is computed from data")
        (length,) = lengths
    if not isinstance(length, int):
        node.check_size(evaluator.least(length, math.isqrt(_LARGEST_MATRIX)), length)
    x = _resize(node, x, axis, evaluator.simplify(length // 2 + 1) if from_half else length)
    # The transformed dimension is the last one, but for the real and imaginary parts.
    rank = x.ty.ndim
    order = [place for place in range(rank - 1) if place != axis] + [axis, rank - 1]
    parts = _parts(node, node.emit(relax.op.permute_dims(x, order)))
    if from_half:
        result = node.emit(relax.op.expand_dims(_from_half(node, parts, length), -1))
    else:
        bins = node.evaluator.simplify(length // 2 + 1) if is_half else length
        result = _transform(node, parts, length, bins, is_inverse)
    return relax.op.permute_dims(result, [order.index(place) for place in range(rank)])


def convert_stft(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's STFT: frames of the signal times a window and the transform's matrix.

    Raises UnsupportedFormError for a step or a length of frames that is not constant, and for a signal of unknown
    shape.
    """
    signal, window = node.inputs[0], node.input(2)
    dims = dims_of(signal)
    step = _number(node, 1, 0)
    length = dims_of(window)[0] if window is not None else _number(node, 3, 0)  # type: ignore[index]
    if dims is None or not isinstance(length, int) or not step or not length:
        raise UnsupportedFormError("frames of unknown size")
    count = (dims[1] - length) // step + 1

    def cut(signal: te.Tensor) -> te.Tensor:
        shape = (signal.shape[0], count, length)
        return te.compute(shape, lambda b, frame, i: signal[b, frame * step + i], name="frames")

    parts = []
    for part in _parts(node, signal):
        frames = node.emit(node.builder.call_te(cut, part, primfunc_name_hint="frames"))
        parts.append(frames if window is None else node.emit(relax.op.multiply(frames, window)))
    bins = length // 2 + 1 if node.attrs.get("onesided", 1) else length
    return _transform(node, parts, length, bins, is_inverse=False)


def convert_mel_weight_matrix(node: Node) -> relax.Expr:
    """Raise UnsupportedFormError.

    A MelWeightMatrix of constant operands and at most 4096 elements never gets here: the importer evaluates it.
    """
    raise UnsupportedFormError("a number of bands, a length or a frequency that is computed")


def _number(node: Node, position: int, default: int) -> int:
    """An operand of one whole number; refuse one that is computed."""
    value = node.constant(position)
    if value is None and node.input(position) is not None:
        raise UnsupportedFormError("an axis, a length or a step that is computed")
    return default if value is None else int(value.reshape(-1)[0])


def _resize(node: Node, x: relax.Expr, axis: int, size: Any) -> relax.Expr:
    """Cut a dimension to a size, or fill it up with zeros."""
    if node.evaluator.are_equal(dims_of(x)[axis], size):  # type: ignore[index]
        return x

    def resize(data: te.Tensor) -> te.Tensor:
        shape = [size if place == axis else dim for place, dim in enumerate(data.shape)]
        length, zero = data.shape[axis], tirx.const(0, data.dtype)
        return te.compute(shape, lambda *at: tirx.if_then_else(at[axis] < length, data[at], zero), name="resize")

    return node.emit(node.builder.call_te(resize, x, primfunc_name_hint="resize"))


def _parts(node: Node, x: relax.Expr) -> list[relax.Expr]:
    """The real part of numbers, and their imaginary part where they have one; they are the last dimension."""
    count = dims_of(x)[-1] if x.ty.ndim > 2 else 1  # type: ignore[index]
    if x.ty.ndim == 2:
        return [x]
    return [node.emit(relax.op.take(x, const(place, "int64"), axis=-1)) for place in range(count)]


def _transform(node: Node, parts: list[relax.Expr], length: Any, bins: Any, is_inverse: bool) -> relax.Expr:
    """The transform along the last dimension, with real and imaginary parts as a new last one."""
    dtype = dtype_of(parts[0])
    if isinstance(length, int) and _factors(length):
        parts = _frequencies(node, parts, length, is_inverse)
        if bins < length:
            axis = parts[0].ty.ndim - 1
            parts = [node.emit(relax.op.strided_slice(part, [axis], [0], [bins])) for part in parts]
    else:
        parts = _direct(node, parts, length, bins, is_inverse)
    result = node.emit(relax.op.stack(parts, axis=-1))
    return node.emit(relax.op.divide(result, _whole(node, length, dtype))) if is_inverse else result


def _frequencies(node: Node, parts: list[relax.Expr], length: int, is_inverse: bool) -> list[relax.Expr]:
    """The real and the imaginary parts of all frequencies, along the last dimension."""
    factors = _factors(length)
    if factors is None:
        return _direct(node, parts, length, length, is_inverse)
    first, second = factors
    rank, dtype, outer = parts[0].ty.ndim, dtype_of(parts[0]), (dims_of(parts[0]) or [])[:-1]
    turned = [*range(rank - 1), rank, rank - 1]

    def turn(part: relax.Expr) -> relax.Expr:
        return node.emit(relax.op.permute_dims(part, turned))

    # The signal's place is second * i + j, with i below `first` and j below `second`.
    grids = [turn(node.emit(relax.op.reshape(part, [*outer, first, second]))) for part in parts]
    real, imaginary = _frequencies(node, grids, first, is_inverse)
    angles = 2 * np.pi * np.outer(np.arange(second), np.arange(first)) / length
    cosine, sine = const(np.cos(angles), dtype), const(np.sin(angles) * (1 if is_inverse else -1), dtype)

    def product(part: relax.Expr, wave: relax.Expr) -> relax.Expr:
        return node.emit(relax.op.multiply(part, wave))

    rotated = [
        node.emit(relax.op.subtract(product(real, cosine), product(imaginary, sine))),
        node.emit(relax.op.add(product(real, sine), product(imaginary, cosine))),
    ]
    # The frequency is first * k + i.
    grids = _frequencies(node, [turn(part) for part in rotated], second, is_inverse)
    return [node.emit(relax.op.reshape(turn(part), [*outer, length])) for part in grids]


def _factors(length: int) -> tuple[int, int] | None:
    """The two factors of a length that are nearest to each other; None where one product is as good."""
    first = max(factor for factor in range(1, math.isqrt(length) + 1) if length % factor == 0)
    second = length // first
    return (first, second) if first > 1 and first + second + _PASSES < length else None


def _direct(node: Node, parts: list[relax.Expr], length: Any, bins: Any, is_inverse: bool) -> list[relax.Expr]:
    """The real and the imaginary parts of the first `bins` frequencies, by one matrix."""
    dtype = dtype_of(parts[0])
    if isinstance(length, int):
        cosine, sine = (const(wave, dtype) for wave in _waves(length, bins))
    else:
        cosine, sine = _symbolic_waves(node, length, length, bins, dtype)
    opposite = node.emit(relax.op.negative(sine))
    sine, opposite = (opposite, sine) if is_inverse else (sine, opposite)
    real, imaginary = _product(node, parts[0], cosine), _product(node, parts[0], opposite)
    if len(parts) > 1:
        real = node.emit(relax.op.add(real, _product(node, parts[1], sine)))
        imaginary = node.emit(relax.op.add(imaginary, _product(node, parts[1], cosine)))
    return [real, imaginary]


def _from_half(node: Node, parts: list[relax.Expr], length: Any) -> relax.Expr:
    """The real signal of a spectrum whose negative frequencies are left out."""
    dtype = dtype_of(parts[0])
    if not isinstance(length, int):
        return _from_symbolic_half(node, parts, length)
    if _factors(length):
        places = np.arange(length)
        is_left_out = places > length // 2
        mirrored = const(np.where(is_left_out, length - places, places), "int64")
        whole = [node.emit(relax.op.take(part, mirrored, parts[0].ty.ndim - 1, mode="clip")) for part in parts]
        # What is left out is the conjugate of what is not.
        whole[1:] = [node.emit(relax.op.multiply(part, const(1 - 2.0 * is_left_out, dtype))) for part in whole[1:]]
        real, _ = _frequencies(node, whole, length, is_inverse=True)
        return node.emit(relax.op.divide(real, _whole(node, length, dtype)))
    cosine, sine = (wave.T for wave in _waves(length, length // 2 + 1))
    frequencies = np.arange(len(cosine))[:, None]
    # All frequencies but zero and the highest of an even number stand for two.
    share = np.where((frequencies == 0) | (2 * frequencies == length), 1.0, 2.0) / length
    real = _product(node, parts[0], const(np.ascontiguousarray(share * cosine), dtype))
    if len(parts) == 1:
        return real
    imaginary = _product(node, parts[1], const(np.ascontiguousarray(share * sine), dtype))
    return node.emit(relax.op.subtract(real, imaginary))


def _from_symbolic_half(node: Node, parts: list[relax.Expr], length: Any) -> relax.Expr:
    """What `_from_half` returns for a symbolic length."""
    dtype, bins = dtype_of(parts[0]), node.evaluator.simplify(length // 2 + 1)
    places = node.emit(relax.op.arange(0, bins, 1, "int64"))
    is_first = node.emit(relax.op.equal(places, const(0, "int64")))
    twice = node.emit(relax.op.multiply(places, const(2, "int64")))
    is_last = node.emit(relax.op.equal(twice, _whole(node, length, "int64")))
    is_single = node.emit(relax.op.logical_or(is_first, is_last))
    share = node.emit(relax.op.where(is_single, const(1.0, dtype), const(2.0, dtype)))
    share = node.emit(relax.op.divide(share, _whole(node, length, dtype)))
    parts = [node.emit(relax.op.multiply(part, share)) for part in parts]
    # The angles stay the same where positions and frequencies change places.
    waves = _symbolic_waves(node, length, bins, length, dtype)
    real, *rest = (_product(node, part, wave) for part, wave in zip(parts, waves, strict=False))
    return node.emit(relax.op.subtract(real, rest[0])) if rest else real


def _waves(length: int, bins: int) -> tuple[Array, Array]:
    """Cosine and sine of the angles `[positions, frequencies]`. Raises UnsupportedFormError for too many of them."""
    if length * bins > _LARGEST_MATRIX:
        raise UnsupportedFormError(f"a transform of {length} numbers, which has a factor that is too large")
    turns = np.outer(np.arange(length), np.arange(bins)) % length
    angles = 2 * np.pi * turns / length
    return np.cos(angles), np.sin(angles)


def _symbolic_waves(node: Node, length: Any, rows: Any, columns: Any, dtype: str) -> tuple[relax.Expr, relax.Expr]:
    """Cosine and sine as `_waves` returns them, of a matrix `[rows, columns]`, computed when the model runs."""
    positions, frequencies = (
        node.emit(relax.op.expand_dims(node.emit(relax.op.arange(0, size, 1, "int64")), axis))
        for axis, size in ((1, rows), (0, columns))
    )
    turns = node.emit(relax.op.multiply(positions, frequencies))
    turns = node.emit(relax.op.astype(node.emit(relax.op.mod(turns, _whole(node, length, "int64"))), dtype))
    angles = node.emit(relax.op.multiply(turns, const(2 * np.pi, dtype)))
    angles = node.emit(relax.op.divide(angles, _whole(node, length, dtype)))
    return node.emit(relax.op.cos(angles)), node.emit(relax.op.sin(angles))


def _whole(node: Node, size: Any, dtype: str) -> relax.Expr:
    """A size as a number."""
    return (
        const(size, dtype)
        if isinstance(size, int)
        else materialise(node.builder, Sizes(np.array([size], object), dtype), ())
    )


def _product(node: Node, x: relax.Expr, matrix: relax.Expr) -> relax.Expr:
    return node.emit(relax.op.matmul(x, matrix))
