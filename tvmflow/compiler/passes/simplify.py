"""Evaluates constants, removes operators without effect, and rewrites forms that TVM's own passes cannot handle."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvmflow.arrays import Array
from tvmflow.compiler.operators.common import called_operator, constant, same_shape, static, typical_pixels
from tvmflow.compiler.passes.rewrite import ELEMENT, Rewriter, dtype, rank, rewriting, sizes, static_sizes

# The largest exponent of a power that is written as a product.
_MOST_FACTORS = 4
# Operators that make no negative numbers of others, or of others and a constant.
_OF_POSITIVE = ("add", "divide", "max", "mean", "min", "permute_dims", "reshape", "sqrt", "sum")


def _shape(rewriter: Rewriter, expr: relax.Expr) -> list[int] | None:
    """The sizes of a shape expression without symbols."""
    expr = rewriter.behind(expr)
    if not isinstance(expr, relax.ShapeExpr) or not all(isinstance(dim, tvm.tirx.IntImm) for dim in expr.values):
        return None
    return [int(dim) for dim in expr.values]


def _fold_permute(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    value, axes = rewriter.constant(call.args[0]), call.attrs.axes
    return None if value is None else constant(np.transpose(value, axes and [int(axis) for axis in axes]))


def _fold_reshape(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    value, shape = rewriter.constant(call.args[0]), _shape(rewriter, call.args[1])
    return None if value is None or shape is None else constant(value.reshape(shape))


def _fold_expand_dims(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    value = rewriter.constant(call.args[0])
    return None if value is None else constant(np.expand_dims(value, tuple(int(axis) for axis in call.attrs.axis)))


def _fold_squeeze(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    value, axes = rewriter.constant(call.args[0]), call.attrs.axis
    return None if value is None else constant(np.squeeze(value, axes and tuple(int(axis) for axis in axes)))


def _fold_cast(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    value = rewriter.constant(call.args[0])
    if value is None or value.dtype.name not in _NUMBERS or dtype(call) not in _NUMBERS:
        return None
    return constant(value.astype(dtype(call)))


def _fold_function(function: Callable[..., Any]) -> Callable[[Rewriter, relax.Call], relax.Expr | None]:
    """A rule that evaluates `function` of float32 constants."""

    def fold(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
        values: list[Array] = []
        for argument in call.args:
            value = rewriter.constant(argument)
            if value is None or value.dtype != np.float32:
                return None
            values.append(value)
        with np.errstate(all="ignore"):
            return constant(np.asarray(function(*values), "float32"))

    return fold


def _fold_shape_of(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    dims = sizes(call.args[0])
    return None if dims is None else relax.ShapeExpr(dims)


def _fold_shape_to_tensor(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    shape = _shape(rewriter, call.args[0])
    return None if shape is None else constant(np.array(shape, "int64"))


_NUMBERS = ("float32", "float64", "int32", "int64", "bool")
# NumPy's functions for operators, by their names without `relax.`.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "power": np.power,
    "negative": np.negative,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "exp": np.exp,
    "abs": np.abs,
}


def evaluate_constants() -> tvm.transform.Pass:
    """Return the pass that evaluates operators on constants and known shapes; TVM would compile a function for each."""
    return rewriting(
        "EvaluateConstants",
        {
            **{name: (_fold_function(function),) for name, function in FUNCTIONS.items()},
            "astype": (_fold_cast,),
            "expand_dims": (_fold_expand_dims,),
            "permute_dims": (_fold_permute,),
            "reshape": (_fold_reshape,),
            "shape_of": (_fold_shape_of,),
            "shape_to_tensor": (_fold_shape_to_tensor,),
            "squeeze": (_fold_squeeze,),
        },
    )


def _drop_operand(neutral: float, both: bool) -> Callable[[Rewriter, relax.Call], relax.Expr | None]:
    """Return a rule that removes an operand full of `neutral`: the second one, or either one if `both`."""

    def rule(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
        for place, other in ((0, 1), (1, 0)) if both else ((0, 1),):
            value = rewriter.constant(call.args[other])
            # Compare one element first: comparing all elements of a large constant takes long.
            if value is None or value.size == 0 or value.reshape(-1)[0] != neutral:
                continue
            if _is_like(call, call.args[place]) and bool((value == neutral).all()):
                return call.args[place]
        return None

    return rule


def _is_like(a: relax.Expr, b: relax.Expr) -> bool:
    return dtype(a) == dtype(b) and same_shape(sizes(a), sizes(b))


def _keeps_everything(_rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Remove an operator whose result has the type and shape of its operand, as a reshape to the same shape."""
    return call.args[0] if _is_like(call, call.args[0]) else None


def _casts_back(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """What a cast returns to its own type, after another cast to a type that holds all of its values."""
    wide = rewriter.call(call.args[0], "astype")
    if wide is None or wide.args[0].ty.dtype != call.ty.dtype:
        return None
    return wide.args[0] if (str(call.ty.dtype), str(wide.ty.dtype)) in _EXACT_CASTS else None


def _moves_narrow(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Move numbers in the type to which a cast returns them, where they only move in a type that holds all of it."""
    source = rewriter.call(call.args[0], *_MOVING)
    if source is None or (dtype(call), dtype(source)) not in _EXACT_CASTS:
        return None
    return _moved_as(rewriter, call.args[0], dtype(call))


def _moved_as(rewriter: Rewriter, expr: relax.Expr, narrow: str) -> relax.Expr | None:
    """The numbers of an expression in a narrower type, without a cast; None where others are computed from them."""
    value, call = rewriter.constant(expr), rewriter.call(expr, "astype", *_MOVING)
    if value is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            short = value.astype(narrow)
        return constant(short) if np.array_equal(short.astype(value.dtype), value) else None
    if call is None or (narrow, dtype(call)) not in _EXACT_CASTS:
        return None
    if called_operator(call) == "relax.astype":
        return call.args[0] if dtype(call.args[0]) == narrow else None
    if not rewriter.used_once(expr):
        return None
    places = _MOVING[called_operator(call).removeprefix("relax.")]
    operands = [rewriter.behind(call.args[place]) for place in places]
    is_tuple = isinstance(operands[0], relax.Tuple)
    parts = list(operands[0].fields) if is_tuple else [call.args[place] for place in places]
    moved = [_moved_as(rewriter, part, narrow) for part in parts]
    if any(part is None for part in moved):
        return None
    args = list(call.args)
    for place, part in zip(places, [relax.Tuple(moved)] if is_tuple else moved, strict=True):
        args[place] = part
    return rewriter.emit(relax.Call(call.op, args, call.attrs))


# The operators that only move numbers, and the places of the operands that have these.
_MOVING = {
    **dict.fromkeys(("broadcast_to", "concat", "expand_dims", "flip", "permute_dims", "reshape", "squeeze"), (0,)),
    **dict.fromkeys(("gather_elements", "gather_nd", "repeat", "strided_slice", "take", "tile"), (0,)),
    "where": (1, 2),
}
# The casts of floats, and of integers to floats, that change no value.
_EXACT_CASTS = {
    *(("float16", wide) for wide in ("float32", "float64")),
    ("float32", "float64"),
    *((narrow, wide) for narrow in ("int8", "uint8", "int16", "uint16") for wide in ("float32", "float64")),
    *((narrow, "float64") for narrow in ("int32", "uint32")),
}


def _slices_everything(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    steps = list(call.args[4]) if len(call.args) > 4 else []
    if not all(isinstance(step, tvm.tirx.IntImm) and int(step) == 1 for step in steps):
        return None
    return _keeps_everything(rewriter, call)


def _keeps_order(_rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    axes = call.attrs.axes
    is_in_order = axes is not None and [int(axis) for axis in axes] == list(range(len(axes)))
    return call.args[0] if is_in_order else None


def _joins_one(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    parts = rewriter.behind(call.args[0])
    return parts.fields[0] if isinstance(parts, relax.Tuple) and len(parts.fields) == 1 else None


def _joins_nothing(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Leave out the parts without elements, such as padding of no lines: TVM cannot load an empty constant."""
    parts = rewriter.behind(call.args[0])
    if not isinstance(parts, relax.Tuple):
        return None
    filled = [part for part in parts.fields if 0 not in map(static, sizes(part) or ())]
    return relax.op.concat(filled, call.attrs.axis) if 0 < len(filled) < len(parts.fields) else None


def _drops_nothing(rewriter: Rewriter, element: relax.TupleGetItem) -> relax.Expr | None:
    dropout = rewriter.call(element.tuple_value, "nn.dropout")
    return dropout.args[0] if dropout is not None and element.index == 0 else None


def _chooses_one(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    condition = rewriter.constant(call.args[0])
    if condition is None or condition.size == 0 or not bool((condition == condition.reshape(-1)[0]).all()):
        return None
    branch = call.args[1] if bool(condition.reshape(-1)[0]) else call.args[2]
    return branch if _is_like(call, branch) else None


def _is_positive_already(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    return call.args[0] if rewriter.call(call.args[0], "nn.relu") is not None else None


def remove_identities() -> tvm.transform.Pass:
    """Return the pass that removes operators that return their input unchanged."""
    return rewriting(
        "RemoveIdentities",
        {
            ELEMENT: (_drops_nothing,),
            "add": (_drop_operand(0, both=True),),
            "subtract": (_drop_operand(0, both=False),),
            "multiply": (_drop_operand(1, both=True),),
            "divide": (_drop_operand(1, both=False),),
            "astype": (_keeps_everything, _casts_back, _moves_narrow),
            "broadcast_to": (_keeps_everything,),
            "reshape": (_keeps_everything,),
            "nn.pad": (_keeps_everything,),
            "nn.relu": (_is_positive_already,),
            "strided_slice": (_slices_everything,),
            "permute_dims": (_keeps_order,),
            "concat": (_joins_one, _joins_nothing),
            "where": (_chooses_one,),
        },
    )


def _split_clip(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    x, low, high = call.args
    bounds = [low, high]
    if not all(isinstance(bound, tvm.tirx.IntImm | tvm.tirx.FloatImm) for bound in bounds):
        return None
    least, most = (float(bound.value) for bound in bounds)
    if dtype(x) != "float32":
        return None
    above = relax.op.nn.relu(x) if least == 0 else relax.op.maximum(x, relax.const(least, "float32"))
    return relax.op.minimum(rewriter.emit(above), relax.const(most, "float32"))


def split_clip() -> tvm.transform.Pass:
    """Return the pass that writes clip as relu or maximum, then minimum: TVM cannot change the layout of a clip."""
    return rewriting("SplitClip", {"clip": (_split_clip,)})


def _count_from_the_front(_rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    axes = call.attrs.axis
    dims = rank(call.args[0])
    if axes is None or dims is None or all(int(axis) >= 0 for axis in axes):
        return None
    return relax.op.squeeze(call.args[0], [int(axis) % dims for axis in axes])


def count_axes_from_the_front() -> tvm.transform.Pass:
    """Return the pass that makes negative axes of squeeze positive: TVM's layout pass would read out of bounds."""
    return rewriting("CountAxesFromTheFront", {"squeeze": (_count_from_the_front,)})


def _one_dimension_as_two(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    attrs = call.attrs
    if (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) != ("NCW", "OIW", "NCW"):
        return None
    before, after = (int(size) for size in attrs.padding)
    image = relax.op.nn.conv2d(
        rewriter.emit(relax.op.expand_dims(call.args[0], 2)),
        rewriter.emit(relax.op.expand_dims(call.args[1], 2)),
        strides=[1, int(attrs.strides[0])],
        padding=[0, before, 0, after],
        dilation=[1, int(attrs.dilation[0])],
        groups=int(attrs.groups),
    )
    return relax.op.squeeze(rewriter.emit(image), [2])


def convolve_in_two_dimensions() -> tvm.transform.Pass:
    """Return the pass that writes a one-dimensional convolution as one over images of height one."""
    return rewriting("ConvolveInTwoDimensions", {"nn.conv1d": (_one_dimension_as_two,)})


def _product(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Write a power with exponent 1 to 4, -1, 0.5 or -0.5 as products and roots."""
    x, exponent = call.args[0], rewriter.scalar(call.args[1])
    if exponent is None or dtype(x) not in ("float32", "float64") or not _is_like(call, x):
        return None
    if abs(exponent) == 0.5:
        base = x if _is_never_negative(rewriter, x) else _base_of_root(rewriter, x)
        return relax.op.sqrt(base) if exponent > 0 else relax.op.rsqrt(base)
    if exponent == -1:
        return relax.op.divide(relax.const(1.0, dtype(x)), x)
    if exponent not in range(1, _MOST_FACTORS + 1):
        return None
    if exponent == 1:
        return x
    square = relax.op.multiply(x, x)
    if exponent == 2:
        return square
    square = rewriter.emit(square)
    return relax.op.multiply(square, x if exponent == 3 else square)


def _base_of_root(rewriter: Rewriter, x: relax.Expr) -> relax.Expr:
    """The number whose root is the power of `x`: the powers of -0 and of minus infinity are those of 0 and infinity."""
    edges = (rewriter.emit(relax.op.equal(x, relax.const(number, dtype(x)))) for number in (0.0, -math.inf))
    return rewriter.emit(relax.op.where(rewriter.emit(relax.op.logical_or(*edges)), relax.op.abs(x), x))


def _is_never_negative(rewriter: Rewriter, x: relax.Expr) -> bool:
    """Whether no number of a tensor is negative or -0, as of sums of squares."""
    call = rewriter.call(x, *_OF_POSITIVE, "abs", "exp", "multiply", "power", "sigmoid", "square", "variance")
    if call is None:
        return False
    first, *others = call.args
    name = call.op.name.removeprefix("relax.")
    if name in ("abs", "exp", "sigmoid", "square", "variance"):
        return True
    if name == "multiply" and rewriter.same(first, others[0]):
        return True
    if name == "power":
        return rewriter.scalar(others[0]) == 2
    numbers = [rewriter.constant(other) for other in others if name in ("add", "multiply", "divide")]
    is_positive = all(number is not None and not np.signbit(number).any() for number in numbers)
    return is_positive and _is_never_negative(rewriter, first)


def _reciprocal(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    # A single number is divided exactly, which costs nothing: it may be a scale, and numbers between two of its
    # multiples must be rounded as ONNX Runtime rounds them.
    dims = static_sizes(call)
    if dims is not None and math.prod(dims) == 1:
        return None
    divisor = rewriter.constant(call.args[1])
    if divisor is None or divisor.dtype != np.float32 or not bool(np.isfinite(divisor).all() and divisor.all()):
        return None
    with np.errstate(over="ignore"):
        reciprocal = np.asarray(1 / divisor.astype("float64"), "float32")
    is_exact = bool((np.frexp(divisor)[0] == np.copysign(0.5, divisor)).all())
    if not is_exact and rewriter.is_rounded():
        return None
    # A subnormal reciprocal has lost digits.
    if not bool((np.isfinite(reciprocal) & (np.abs(reciprocal) >= np.finfo("float32").tiny)).all()):
        return None
    return relax.op.multiply(call.args[0], constant(reciprocal))


def _infinity(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Write the quotient by one zero as a product, which is the same number, because TVM refuses the quotient."""
    divisor = rewriter.constant(call.args[1])
    if divisor is None or divisor.dtype.kind != "f" or divisor.size != 1 or divisor.any():
        return None
    return relax.op.multiply(call.args[0], constant(np.copysign(np.inf, divisor).astype(divisor.dtype)))


def multiply_instead() -> tvm.transform.Pass:
    """Return the pass that writes small powers as products or roots, and divisions by constants as products."""
    return rewriting("MultiplyInstead", {"power": (_product,), "divide": (_infinity, _reciprocal)})


def _merge_reshapes(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    inner = rewriter.call(call.args[0], "reshape", "expand_dims", "squeeze", "flatten")
    dims = sizes(call)
    return None if inner is None or dims is None else relax.op.reshape(inner.args[0], relax.ShapeExpr(dims))


def _merge_into_reshape(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Merge a squeeze or expand_dims into the reshape before it, or cancel it with its opposite."""
    inner = rewriter.call(call.args[0], "reshape")
    dims = sizes(call)
    if inner is not None and dims is not None:
        return relax.op.reshape(inner.args[0], relax.ShapeExpr(dims))
    opposite = "squeeze" if call.op.name == "relax.expand_dims" else "expand_dims"
    inner = rewriter.call(call.args[0], opposite)
    return inner.args[0] if inner is not None and _is_like(call, inner.args[0]) else None


def merge_reshapes() -> tvm.transform.Pass:
    """Return the pass that merges several reshapes in a row into one."""
    return rewriting(
        "MergeReshapes",
        {
            "reshape": (_merge_reshapes,),
            "squeeze": (_merge_into_reshape,),
            "expand_dims": (_merge_into_reshape,),
        },
    )


def _columns(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Write a product with a vector as one with a matrix of one row or column."""
    left, right = call.args
    left_rank, right_rank = rank(left), rank(right)
    if 1 not in (left_rank, right_rank) or sizes(left) is None or sizes(right) is None or sizes(call) is None:
        return None
    if left_rank == 1:
        left = rewriter.emit(relax.op.expand_dims(left, [0]))
    if right_rank == 1:
        right = rewriter.emit(relax.op.expand_dims(right, [1]))
    product = rewriter.emit(relax.op.matmul(left, right, call.attrs.out_dtype))
    return relax.op.reshape(product, relax.ShapeExpr(sizes(call)))


def _weights_on_the_right(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Write constant weights times a column as a row times the transposed weights, whose outputs fill vectors."""
    left, right = call.args
    weight, dims = rewriter.constant(left), sizes(right)
    if weight is None or weight.ndim != 2 or dims is None or len(dims) < 2 or sizes(call) is None:
        return None
    if not same_shape([dims[-1]], [tvm.tirx.IntImm("int64", 1)]):
        return None
    row = rewriter.emit(relax.op.reshape(right, relax.ShapeExpr([*dims[:-2], dims[-1], dims[-2]])))
    product = rewriter.emit(relax.op.matmul(row, constant(weight.T), call.attrs.out_dtype))
    return relax.op.reshape(product, relax.ShapeExpr(sizes(call)))


def _one_batch_dimension(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Write a constant right operand with batch dimensions of one as a matrix."""
    weight, dims = rewriter.constant(call.args[1]), static_sizes(call.args[1])
    if weight is None or dims is None or len(dims) < 3 or any(dim != 1 for dim in dims[:-2]):
        return None
    if (rank(call.args[0]) or 0) < len(dims):
        return None
    return relax.op.matmul(call.args[0], constant(weight.reshape(dims[-2:])), call.attrs.out_dtype)


def matrices_of_vectors() -> tvm.transform.Pass:
    """Return the pass that rewrites products of a matrix and a vector as products of two matrices.

    Constant weights that multiply a column become the right operand, transposed; constant right operands lose batch
    dimensions of 1.
    """
    return rewriting("MatricesOfVectors", {"matmul": (_columns, _weights_on_the_right, _one_batch_dimension)})


def _transpose_smaller(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Transpose an image before it is enlarged, not after."""
    resize = rewriter.call(call.args[0], "image.resize2d")
    if resize is None or not rewriter.used_once(call.args[0]) or call.attrs.axes is None:
        return None
    before, after = (_pixels(item, resize.attrs.layout) for item in (resize.args[0], resize))
    axes, attrs = [int(axis) for axis in call.attrs.axes], resize.attrs
    layout = "".join(attrs.layout[axis] for axis in axes)
    if attrs.coordinate_transformation_mode == "tf_crop_and_resize":
        return None
    if before >= after or layout not in ("NCHW", "NHWC"):
        return None
    options = ("method", "coordinate_transformation_mode", "rounding_method", "cubic_alpha", "cubic_exclude")
    return relax.op.image.resize2d(
        rewriter.emit(relax.op.permute_dims(resize.args[0], axes)),
        resize.args[1],
        layout=layout,
        extrapolation_value=attrs.extrapolation_value,
        out_dtype=attrs.out_dtype,
        **{name: getattr(attrs, name) for name in options},
    )


def _pixels(image: relax.Expr, layout: str) -> int:
    """The pixels of an image, with a typical number where its height or width is free; 0 for images of unknown rank."""
    dims = sizes(image)
    if dims is None:
        return 0
    return math.prod(typical_pixels(dim) for axis, dim in zip(layout, dims, strict=True) if axis in "HW")


def transpose_before_resizing() -> tvm.transform.Pass:
    """Return the pass that transposes an image before it is enlarged rather than after, where there is less to move."""
    return rewriting("TransposeBeforeResizing", {"permute_dims": (_transpose_smaller,)})
