"""Recognises activations, norms and softmax that a model composes of smaller operators."""

import math
from collections.abc import Sequence

import numpy as np
import tvm
from tvm import relax, tirx

from tvmflow.compiler.operators.common import constant, same_shape
from tvmflow.compiler.passes.rewrite import Rewriter, by_channel, dtype, merge_constants, rank, rewriting, sizes

# The relative tolerance for the constants of a formula: exporters write them with few digits.
_TOLERANCE = 1e-4
# The most factors of any formula.
_MOST_FACTORS = 8
# From this x on tanh(softplus(x)) is one in float32; exp(2 x) is still finite there.
_MISH_IS_LINEAR = 20.0


def _is_close(value: float | None, expected: float) -> bool:
    return value is not None and math.isclose(value, expected, rel_tol=_TOLERANCE)


def factors(rewriter: Rewriter, expr: relax.Expr) -> tuple[float, list[relax.Expr]]:
    """Return the product of all constant numbers in a product, in any association, and a list of its other factors.

    An expression that is not a product is its own only factor, with the number 1.
    """
    scale, queue = 1.0, [expr]
    parts: list[relax.Expr] = []
    while queue:
        item = queue.pop()
        number = rewriter.scalar(item)
        if number is not None:
            scale *= number
            continue
        call = rewriter.call(item, "multiply", "divide", "negative")
        if call is None or len(parts) + len(queue) >= _MOST_FACTORS:
            parts.append(item)
        elif call.op.name == "relax.negative":
            scale = -scale
            queue.append(call.args[0])
        elif call.op.name == "relax.multiply":
            queue.extend((call.args[1], call.args[0]))
        else:
            divisor = rewriter.scalar(call.args[1])
            if divisor:
                scale /= divisor
                queue.append(call.args[0])
            else:
                parts.append(item)
    return scale, parts


def _multiplied(rewriter: Rewriter, scale: float, parts: Sequence[relax.Expr]) -> relax.Expr:
    result = parts[0]
    for part in parts[1:]:
        result = relax.op.multiply(rewriter.emit(result), part)
    if abs(scale - 1) < 1e-6:
        return result
    return relax.op.multiply(rewriter.emit(result), relax.const(scale, "float32"))


def _without(
    rewriter: Rewriter, parts: Sequence[relax.Expr], factors_to_drop: Sequence[relax.Expr]
) -> list[relax.Expr] | None:
    """The factors without `factors_to_drop`, each removed once; None if one is absent."""
    rest = list(parts)
    for item in factors_to_drop:
        place = next((index for index, part in enumerate(rest) if rewriter.same(part, item)), None)
        if place is None:
            return None
        del rest[place]
    return rest


def _plus_one(rewriter: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """Return x if an expression is `x + 1`, else None."""
    call = rewriter.call(expr, "add")
    if call is None:
        return None
    for a, b in ((0, 1), (1, 0)):
        if _is_close(rewriter.scalar(call.args[a]), 1.0):
            return call.args[b]
    return None


def _is_float(expr: relax.Expr) -> bool:
    return dtype(expr) == "float32"


def _of(rewriter: Rewriter, expr: relax.Expr, function: str, scale: float) -> relax.Expr | None:
    """Return x if an expression is `function(scale * x)`, else None."""
    call = rewriter.call(expr, function)
    if call is None:
        return None
    factor, parts = factors(rewriter, call.args[0])
    return parts[0] if len(parts) == 1 and _is_close(factor, scale) else None


def _gelu(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Write 0.5 x (1 + erf(x / sqrt(2))), or with tanh(sqrt(2 / pi) (x + 0.044715 x^3)) for erf, as one operator."""
    if not _is_float(call):
        return None
    scale, parts = factors(rewriter, call)
    for part in parts:
        inner = _plus_one(rewriter, part)
        if inner is None:
            continue
        x = _of(rewriter, inner, "erf", math.sqrt(0.5))
        operator = relax.op.nn.gelu
        if x is None:
            x, operator = _cubic_tanh(rewriter, inner), relax.op.nn.gelu_tanh
        rest = None if x is None else _without(rewriter, parts, [part, x])
        if rest is not None:
            return _multiplied(rewriter, 2 * scale, [operator(x), *rest])
    return None


def _cubic_tanh(rewriter: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """Return x if an expression is tanh(sqrt(2 / pi) (x + 0.044715 x^3)) or has x (1 + 0.044715 x^2); else None."""
    tanh = rewriter.call(expr, "tanh")
    if tanh is None:
        return None
    scale, parts = factors(rewriter, tanh.args[0])
    if not _is_close(scale, math.sqrt(2 / math.pi)):
        return None
    for part in parts:
        total = rewriter.call(part, "add")
        if total is None:
            continue
        for a, b in ((0, 1), (1, 0)):
            x, number = total.args[a], rewriter.scalar(total.args[a])
            cubic, powers = factors(rewriter, total.args[b])
            if not _is_close(cubic, 0.044715):
                continue
            if number is None and len(parts) == 1 and _without(rewriter, powers, [x, x, x]) == []:
                return x
            if _is_close(number, 1.0) and len(parts) == 2 and len(powers) == 2:
                x = parts[0] if part is parts[1] else parts[1]
                if _without(rewriter, powers, [x, x]) == []:
                    return x
    return None


def compose_gelu() -> tvm.transform.Pass:
    """Return the pass that writes a composed Gaussian error linear unit, with erf or with tanh, as one operator."""
    return rewriting("ComposeGelu", {"multiply": (_gelu,)})


def _logistic(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Write 1 / (1 + e^-x) as sigmoid, x / (1 + e^-x) as SiLU."""
    above, below = call.args
    exponential = _plus_one(rewriter, below) if _is_float(call) else None
    x = None if exponential is None else _of(rewriter, exponential, "exp", -1.0)
    if x is None:
        return None
    if rewriter.same(above, x):
        return relax.op.nn.silu(x)
    return relax.op.sigmoid(x) if _is_close(rewriter.scalar(above), 1.0) else None


def _silu(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    if not _is_float(call):
        return None
    scale, parts = factors(rewriter, call)
    for part in parts:
        sigmoid = rewriter.call(part, "sigmoid")
        rest = None if sigmoid is None else _without(rewriter, parts, [part, sigmoid.args[0]])
        if sigmoid is not None and rest is not None:
            return _multiplied(rewriter, scale, [relax.op.nn.silu(sigmoid.args[0]), *rest])
    return None


def compose_silu() -> tvm.transform.Pass:
    """Return the pass that writes a composed logistic function as sigmoid, and x times sigmoid(x) as SiLU."""
    return rewriting("ComposeSilu", {"divide": (_logistic,), "multiply": (_silu,)})


def _softplus(rewriter: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """Return x if an expression is ln(1 + e^x), plainly or as max(x, 0) + ln(1 + e^-|x|); else None."""
    log = rewriter.call(expr, "log")
    if log is not None:
        exponential = _plus_one(rewriter, log.args[0])
        call = None if exponential is None else rewriter.call(exponential, "exp")
        return None if call is None else call.args[0]
    total = rewriter.call(expr, "add")
    if total is None:
        return None
    for a, b in ((0, 1), (1, 0)):
        positive = rewriter.call(total.args[a], "nn.relu", "maximum")
        log = rewriter.call(total.args[b], "log")
        exponential = None if log is None else _plus_one(rewriter, log.args[0])
        distance = None if exponential is None else _of(rewriter, exponential, "exp", -1.0)
        call = None if distance is None else rewriter.call(distance, "abs")
        if positive is None or call is None or not rewriter.same(positive.args[0], call.args[0]):
            continue
        if positive.op.name == "relax.nn.relu" or rewriter.scalar(positive.args[1]) == 0:
            return call.args[0]
    return None


def _mish(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Replace tanh(softplus(x)) by n / (n + 2) with n = e^x (e^x + 2): one exponential instead of three functions."""
    x = _softplus(rewriter, call.args[0]) if _is_float(call) else None
    if x is None:
        return None
    two = relax.const(2.0, "float32")
    argument = rewriter.emit(relax.op.minimum(x, relax.const(_MISH_IS_LINEAR, "float32")))
    exponential = rewriter.emit(relax.op.exp(argument))
    n = rewriter.emit(relax.op.multiply(exponential, rewriter.emit(relax.op.add(exponential, two))))
    return relax.op.divide(n, rewriter.emit(relax.op.add(n, two)))


def simplify_mish() -> tvm.transform.Pass:
    """Return the pass that writes tanh(softplus(x)), the gate of Mish, with one exponential."""
    return rewriting("SimplifyMish", {"tanh": (_mish,)})


def _reduction_axes(call: relax.Call) -> list[int] | None:
    """The axes, from the front, of a reduction that keeps its dimensions."""
    dims = rank(call.args[0])
    if dims is None or not call.attrs.keepdims:
        return None
    return sorted(range(dims) if call.attrs.axis is None else {int(axis) % dims for axis in call.attrs.axis})


def _mean_of_squares(rewriter: Rewriter, expr: relax.Expr) -> tuple[relax.Expr, list[int]] | None:
    """Match the mean of x squared; return x and the axes, None for another expression."""
    mean = rewriter.call(expr, "mean")
    square = None if mean is None else rewriter.call(mean.args[0], "multiply")
    axes = None if mean is None else _reduction_axes(mean)
    if square is None or axes is None or not rewriter.same(*square.args):
        return None
    return square.args[0], axes


def _centred(rewriter: Rewriter, expr: relax.Expr) -> tuple[relax.Expr, list[int]] | None:
    """Match x minus its mean; return x and the axes, None for another expression."""
    difference = rewriter.call(expr, "subtract")
    mean = None if difference is None else rewriter.call(difference.args[1], "mean")
    axes = None if mean is None else _reduction_axes(mean)
    if difference is None or mean is None or axes is None or not rewriter.same(difference.args[0], mean.args[0]):
        return None
    return difference.args[0], axes


def _root_of(rewriter: Rewriter, expr: relax.Expr, *names: str) -> tuple[relax.Expr, float] | None:
    """Match the root of y + epsilon by an operator of `names`; return y and epsilon, None for another expression."""
    root = rewriter.call(expr, *names)
    total = None if root is None else rewriter.call(root.args[0], "add")
    if root is None or total is None:
        return None
    for a, b in ((0, 1), (1, 0)):
        epsilon = rewriter.scalar(total.args[a])
        if epsilon is not None and epsilon >= 0:
            return total.args[b], epsilon
    return None


def _one_over_root(rewriter: Rewriter, expr: relax.Expr) -> tuple[relax.Expr, float] | None:
    quotient = rewriter.call(expr, "divide")
    if quotient is not None and _is_close(rewriter.scalar(quotient.args[0]), 1.0):
        return _root_of(rewriter, quotient.args[1], "sqrt")
    return _root_of(rewriter, expr, "rsqrt")


def _compose_norm(rewriter: Rewriter, data: relax.Expr, spread: relax.Expr, epsilon: float) -> relax.Expr | None:
    """Compose the norm that divides `data` by the root of `spread` + epsilon; None where these make no norm."""
    variance = rewriter.call(spread, "variance")
    centred = _centred(rewriter, data)
    squares = _mean_of_squares(rewriter, spread)
    if variance is not None and centred is not None:
        equal = rewriter.same(variance.args[0], centred[0]) and _reduction_axes(variance) == centred[1]
        return _layer_norm(rewriter, *centred, epsilon) if equal else None
    if squares is None:
        return None
    if centred is not None and squares[1] == centred[1]:
        again = _centred(rewriter, squares[0])
        equal = again is not None and rewriter.same(again[0], centred[0]) and again[1] == centred[1]
        if equal or rewriter.same(squares[0], data):
            return _layer_norm(rewriter, *centred, epsilon)
    if rewriter.same(squares[0], data):
        return _rms_norm(data, squares[1], epsilon)
    return None


def _layer_norm(rewriter: Rewriter, x: relax.Expr, axes: list[int], epsilon: float) -> relax.Expr | None:
    """Normalise over the last dimensions, an image's channels, or all pixels of a channel; None for other axes."""
    dims = sizes(x)
    if dims is None or not _is_float(x):
        return None
    extents = [int(dims[axis]) if isinstance(dims[axis], tirx.IntImm) else None for axis in axes]
    count = len(dims)
    # A norm over a single dimension of known size is one of rows.
    if axes == list(range(2, count)) and isinstance(dims[1], tirx.IntImm) and (count > 3 or extents == [None]):
        one, zero = _neutral(int(dims[1]))
        return relax.op.nn.instance_norm(x, one, zero, channel_axis=1, axes=axes, epsilon=epsilon)
    if any(extent is None for extent in extents):
        return None
    size = math.prod(extent for extent in extents if extent is not None)
    one, zero = _neutral(size)
    if axes == [count - 1]:
        return relax.op.nn.layer_norm(x, one, zero, [-1], epsilon)
    if axes and axes == list(range(count - len(axes), count)):
        flat = rewriter.emit(relax.op.reshape(x, relax.ShapeExpr([*dims[: axes[0]], size])))
        norm = rewriter.emit(relax.op.nn.layer_norm(flat, one, zero, [-1], epsilon))
        return relax.op.reshape(norm, relax.ShapeExpr(dims))
    if axes == [1] and count >= 3:
        last = rewriter.emit(relax.op.permute_dims(x, [0, *range(2, count), 1]))
        norm = rewriter.emit(relax.op.nn.layer_norm(last, one, zero, [-1], epsilon))
        return relax.op.permute_dims(norm, [0, count - 1, *range(1, count - 1)])
    return None


def _rms_norm(x: relax.Expr, axes: list[int], epsilon: float) -> relax.Expr | None:
    dims = sizes(x)
    if dims is None or not _is_float(x) or axes != [len(dims) - 1] or not isinstance(dims[-1], tirx.IntImm):
        return None
    return relax.op.nn.rms_norm(x, _neutral(int(dims[-1]))[0], [-1], epsilon)


def _neutral(size: int) -> tuple[relax.Expr, relax.Expr]:
    """Return a scale and a bias that change nothing."""
    return constant(np.ones(size, "float32")), constant(np.zeros(size, "float32"))


def _norm_by_division(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    root = _root_of(rewriter, call.args[1], "sqrt")
    return None if root is None else _compose_norm(rewriter, call.args[0], *root)


def _norm_by_product(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Compose a norm from a product with one over the root; a scale may be one of the factors."""
    if not _is_float(call):
        return None
    scale, parts = factors(rewriter, call)
    for part in parts:
        root = _one_over_root(rewriter, part)
        if root is None:
            continue
        for data in parts:
            norm = None if data is part else _compose_norm(rewriter, data, *root)
            if norm is not None and same_shape(sizes(data), sizes(call)):
                rest = [other for other in parts if other is not part and other is not data]
                return _multiplied(rewriter, scale, [norm, *rest])
    return None


_AFFINE_NORMS = ("nn.layer_norm", "nn.rms_norm", "nn.instance_norm", "nn.group_norm")


def _affine(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Move a scale or a bias that follows a norm into the norm's own scale and bias."""
    for a, b in ((0, 1), (1, 0)):
        norm, value = rewriter.call(call.args[a], *_AFFINE_NORMS), rewriter.constant(call.args[b])
        if norm is None or value is None or not rewriter.used_once(call.args[a]):
            continue
        name = norm.op.name.removeprefix("relax.nn.")
        data, *parameters = norm.args
        old = [item for item in map(rewriter.constant, parameters) if item is not None and item.ndim == 1]
        dims = rank(data)
        if len(old) != len(parameters) or dims is None:
            continue
        axis = dims - 1 if name in ("layer_norm", "rms_norm") else 1
        new = by_channel(value, dims, axis, old[0].size)
        operator = call.op.name.removeprefix("relax.")
        # A product changes the scale and the bias, a sum the bias, which an RMS norm has not.
        kept = old[:1] if operator == "add" else []
        changed = old[len(kept) :]
        merged = [] if new is None else [merge_constants(operator, item, new) for item in changed]
        values = [constant(item) for item in [*kept, *merged] if item is not None]
        if merged and len(values) == len(old):
            return relax.Call(norm.op, [data, *values], norm.attrs)
    return None


def _group_norm(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Compose group norm from a norm over a group's channels and pixels, reshaped to one dimension and back.

    Where that dimension is of a free size, the norm is an instance norm, else a layer norm.
    """
    norm = rewriter.call(call.args[0], "nn.layer_norm", "nn.instance_norm")
    flat = None if norm is None else rewriter.call(norm.args[0], "reshape")
    if norm is None or flat is None:
        return None
    dims, split = sizes(flat.args[0]), sizes(norm)
    scale, bias = rewriter.constant(norm.args[1]), rewriter.constant(norm.args[2])
    if dims is None or split is None or len(dims) < 3 or len(split) != 3 or not same_shape(dims, sizes(call)):
        return None
    if not same_shape(dims[:1], split[:1]) or not isinstance(split[1], tirx.IntImm):
        return None
    if int(split[1]) == 1 and isinstance(split[2], tirx.IntImm):
        return None
    if not isinstance(dims[1], tirx.IntImm) or int(dims[1]) % int(split[1]):
        return None
    if scale is None or bias is None or not (scale == 1).all() or not (bias == 0).all():
        return None
    one, zero = _neutral(int(dims[1]))
    return relax.op.nn.group_norm(
        flat.args[0],
        one,
        zero,
        num_groups=int(split[1]),
        channel_axis=1,
        axes=list(range(2, len(dims))),
        epsilon=norm.attrs.epsilon,
    )


def compose_norms() -> tvm.transform.Pass:
    """Return the pass that writes composed layer, instance, group and RMS norms as one operator with scale and bias."""
    return rewriting(
        "ComposeNorms",
        {
            "divide": (_norm_by_division,),
            "multiply": (_norm_by_product, _affine),
            "add": (_affine,),
            "reshape": (_group_norm,),
        },
    )


def _softmax(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Replace e^x over its sum by softmax. The largest element may have been subtracted from x first."""
    exponential, total = rewriter.call(call.args[0], "exp"), rewriter.call(call.args[1], "sum")
    if exponential is None or total is None or not rewriter.same(call.args[0], total.args[0]) or not _is_float(call):
        return None
    axes = _reduction_axes(total)
    if axes is None or len(axes) != 1:
        return None
    x = exponential.args[0]
    difference = rewriter.call(x, "subtract")
    largest = None if difference is None else rewriter.call(difference.args[1], "max")
    if difference is not None and largest is not None and rewriter.same(difference.args[0], largest.args[0]):
        # Softmax does not change when one value is subtracted from all elements along the axis.
        x = difference.args[0] if _reduction_axes(largest) == axes else x
    return relax.op.nn.softmax(x, axes[0])


def compose_softmax() -> tvm.transform.Pass:
    """Return the pass that writes exponentials divided by their sum as softmax."""
    return rewriting("ComposeSoftmax", {"divide": (_softmax,)})
