"""Norms: over a batch, over a layer, and of vectors."""

import onnx
from tvm import relax

from tvmflow.compiler.onnx.broadcasting import agree
from tvmflow.compiler.onnx.node import IN_EVALUATION, Node, UnsupportedFormError
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of


def convert_batch_norm(node: Node) -> relax.Expr | None:
    """Return the Relax expression of a BatchNormalization of vectors, or with statistics of each place (`spatial` = 0).

    Returns None for others, which leaves the node to TVM's converter. Raises UnsupportedFormError for training mode,
    which computes statistics of the batch.
    """
    if node.attrs.get("training_mode", 0) or node.outputs > 1:
        raise UnsupportedFormError("training_mode computes statistics of the batch", IN_EVALUATION)
    data, *others = node.inputs
    if data.ty.ndim > 1 and node.attrs.get("spatial", 1):
        return None
    scale, bias, mean, variance = others
    shifted = node.apply("Add", variance, const(node.attrs.get("epsilon", 1e-5), dtype_of(variance)))
    centred = node.apply("Div", node.apply("Sub", data, mean), node.apply("Sqrt", shifted))
    return node.apply("Add", node.apply("Mul", centred, scale), bias)


def convert_group_norm(node: Node) -> relax.Expr | None:
    """Return the Relax expression of ONNX's GroupNormalization for a symbolic number of channels.

    It computes the mean and the variance of each group with `relax.op.mean`: the build of TVM's group norm never ends
    for such channels. Returns None, which leaves the node to TVM's converter, for a fixed number of channels and for
    data of unknown shape.
    """
    data, dims = node.inputs[0], dims_of(node.inputs[0])
    if dims is None or isinstance(dims[1], int):
        return None
    groups, dtype = int(node.attrs["num_groups"]), dtype_of(data)
    wide = data if dtype == "float64" else node.emit(relax.op.astype(data, "float32"))
    size = node.evaluator.quotient(dims, [dims[0], groups])
    # The groups are equal parts of the channels.
    node.check_size(node.evaluator.quotient(dims, []), node.evaluator.quotient([dims[0], groups, size], []))
    wide = node.emit(relax.op.reshape(wide, relax.ShapeExpr([dims[0], groups, size])))
    centred = node.emit(relax.op.subtract(wide, node.emit(relax.op.mean(wide, 2, keepdims=True))))
    variance = node.emit(relax.op.mean(node.emit(relax.op.multiply(centred, centred)), 2, keepdims=True))
    shifted = node.emit(relax.op.add(variance, relax.const(node.attrs.get("epsilon", 1e-5), dtype_of(wide))))
    result = node.emit(relax.op.divide(centred, node.emit(relax.op.sqrt(shifted))))
    result = node.emit(relax.op.astype(node.emit(relax.op.reshape(result, relax.ShapeExpr(dims))), dtype))
    shape = relax.ShapeExpr([dims[1], *[1] * (len(dims) - 2)])
    scale, bias = (node.emit(relax.op.reshape(operand, shape)) for operand in node.inputs[1:3])
    return relax.op.add(node.emit(relax.op.multiply(result, scale)), bias)


def convert_layer_norm(node: Node) -> relax.Expr | None:
    """Return the Relax expression of a LayerNormalization that TVM's converter refuses or whose build would fail.

    These are nodes with more than one result, of float64, of free sizes among the dimensions that are normalised, or
    with a scale or bias of another shape than these dimensions; an unknown shape counts as the same. The expression
    computes the mean and the variance with `relax.op.mean`. The second and the third result, the mean and the inverse
    deviation, have the type of `stash_type`.
    Returns None, which leaves the node to TVM's converter, for other nodes.
    """
    data, scale, bias = node.inputs[0], node.inputs[1], node.input(2)
    rank = data.ty.ndim
    axes = list(range(node.attrs.get("axis", -1) % rank, rank))
    sizes = dims_of(data)
    is_free = sizes is not None and any(not isinstance(size, int) for size in sizes[axes[0] :])
    if node.outputs == 1 and dtype_of(data) != "float64" and not is_free and _have_shape_of_last(node, len(axes)):
        return None
    mean = node.emit(relax.op.mean(data, axes, keepdims=True))
    centred = node.emit(relax.op.subtract(data, mean))
    variance = node.emit(relax.op.mean(node.emit(relax.op.multiply(centred, centred)), axes, keepdims=True))
    shifted = node.emit(relax.op.add(variance, relax.const(node.attrs.get("epsilon", 1e-5), dtype_of(data))))
    scaling = node.emit(relax.op.divide(relax.const(1.0, dtype_of(data)), node.emit(relax.op.sqrt(shifted))))
    result = node.emit(relax.op.multiply(centred, scaling))
    result = node.emit(relax.op.multiply(*agree(node.builder, [result, scale], node.evaluator)))
    if bias is not None:
        result = node.emit(relax.op.add(*agree(node.builder, [result, bias], node.evaluator)))
    if node.outputs == 1:
        return result
    stashed = str(onnx.helper.tensor_dtype_to_np_dtype(node.attrs.get("stash_type", onnx.TensorProto.FLOAT)))
    others = [node.emit(relax.op.astype(value, stashed)) for value in (mean, scaling)]
    return relax.Tuple([result, *others][: node.outputs])


def _have_shape_of_last(node: Node, count: int) -> bool:
    """Whether scale and bias have the shape of the data's last `count` dimensions, as far as shapes are known."""
    shapes = [dims_of(operand) for operand in node.inputs if operand is not None]
    if any(shape is None for shape in shapes):
        return True
    normalised, *others = ((shape or [])[-count:] for shape in shapes)
    return all(
        len(shape or []) == count and all(map(node.evaluator.are_equal, normalised, last))
        for shape, last in zip(shapes[1:], others, strict=True)
    )


def convert_rms_norm(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's RMSNormalization: x * scale / sqrt(mean(x * x) + epsilon)."""
    data, scale = node.inputs[:2]
    rank = data.ty.ndim
    axes = list(range(node.attrs.get("axis", -1) % rank, rank))
    square = node.emit(relax.op.mean(node.emit(relax.op.multiply(data, data)), axes, keepdims=True))
    shifted = node.emit(relax.op.add(square, relax.const(node.attrs.get("epsilon", 1e-5), dtype_of(data))))
    scaling = node.emit(relax.op.divide(relax.const(1.0, dtype_of(data)), node.emit(relax.op.sqrt(shifted))))
    result = node.emit(relax.op.multiply(data, scaling))
    return relax.op.multiply(*agree(node.builder, [result, scale], node.evaluator))


def convert_lp_normalization(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's LpNormalization: vectors divided by their norm, zero vectors unchanged."""
    data, axis = node.inputs[0], int(node.attrs.get("axis", -1))
    if int(node.attrs.get("p", 2)) == 1:
        norm = node.emit(relax.op.sum(node.emit(relax.op.abs(data)), axis, keepdims=True))
    else:
        norm = relax.op.sum(node.emit(relax.op.multiply(data, data)), axis, keepdims=True)
        norm = node.emit(relax.op.sqrt(node.emit(norm)))
    none = node.emit(relax.op.equal(norm, relax.const(0, dtype_of(data))))
    divisor = node.emit(relax.op.where(none, relax.const(1, dtype_of(data)), norm))
    return relax.op.divide(data, divisor)
