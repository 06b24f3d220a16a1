"""Operators of com.microsoft that ONNX Runtime's optimizer writes, composed of the operators that it fused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from tvm import relax, te, tirx

from tvmflow.compiler.onnx.attention import (
    cap_scores,
    join_heads,
    repeat_heads,
    scaled_scores,
    split_heads,
    with_length,
)
from tvmflow.compiler.onnx.indexing import checked_indices
from tvmflow.compiler.onnx.node import Converter, FreeSizeError, Node, UnsupportedFormError
from tvmflow.compiler.onnx.quantised import channels_first, channels_last, dequantize
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of

# What a masked score gets less, unless the node says otherwise.
_FILTER = -10000.0
# The number of dimensions of queries, keys and values in one operand.
_PACKED = 5
# The output, the keys and the values of GroupQueryAttention.
_GROUP_QUERY_RESULTS = 3
# The activations that a convolution or product may have, with the names of their parameters.
_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "Clip": ("min", "max"),
    "HardSigmoid": ("alpha", "beta"),
    "LeakyRelu": ("alpha",),
    "Relu": (),
    "Sigmoid": (),
    "Tanh": (),
}


def convert_as(operator: str, **attributes: Any) -> Converter:
    """Return a converter that imports a node as the standard's `operator`, with `attributes` besides the node's own."""

    def convert(node: Node) -> relax.Expr:
        own = {name: value for name, value in node.attrs.items() if name != "tvm_custom"}
        return node.apply(operator, *node.inputs, **own, **attributes)

    return convert


def convert_fused_conv(node: Node) -> relax.Expr:
    """Return the Relax expression of com.microsoft's FusedConv: a convolution, a sum and an activation.

    The sum, with the fourth operand, and the activation may be absent. Raises UnsupportedFormError for an unknown
    activation.
    """
    fused = ("tvm_custom", "activation", "activation_params")
    attributes = {name: value for name, value in node.attrs.items() if name not in fused}
    value = node.apply("Conv", *(node.input(place) for place in range(3)), **attributes)
    if node.input(3) is not None:
        value = node.apply("Add", value, node.inputs[3])
    return _activate(node, value, list(node.attrs.get("activation_params", ())))


def convert_fused_gemm(node: Node) -> relax.Expr:
    """Return the Relax expression of com.microsoft's FusedGemm: Gemm, then an activation, which may be absent.

    Raises UnsupportedFormError for an unknown activation.
    """
    attributes = {name: node.attrs[name] for name in ("alpha", "beta", "transA", "transB") if name in node.attrs}
    names = ("activation_alpha", "activation_beta", "activation_gamma")
    parameters = [node.attrs[name] for name in names if name in node.attrs]
    return _activate(node, node.apply("Gemm", *node.inputs, **attributes), parameters)


def _activate(node: Node, value: relax.Expr, parameters: list[float]) -> relax.Expr:
    name = node.text("activation", "")
    if not name:
        return value
    if name not in _ACTIVATIONS:
        raise UnsupportedFormError(f"activation {name!r}")
    if name == "Clip":
        return node.apply(name, value, *(const(bound, "float32") for bound in parameters))
    attributes: dict[str, Any] = dict(zip(_ACTIVATIONS[name], parameters, strict=False))
    return node.apply(name, value, **attributes)


def convert_fused_matmul(node: Node) -> relax.Expr:
    """Return the Relax expression of com.microsoft's FusedMatMul: transposes, a matrix product, a factor `alpha`."""
    operands = []
    for operand, side in zip(node.inputs[:2], "AB", strict=True):
        axes = list(range(operand.ty.ndim))
        if node.attrs.get(f"transBatch{side}", 0):
            # The first dimension is behind the batch's others.
            axes = [*axes[1:-1], 0, axes[-1]]
        if node.attrs.get(f"trans{side}", 0) and len(axes) > 1:
            axes[-2:] = [axes[-1], axes[-2]]
        operands.append(operand if axes == sorted(axes) else node.emit(relax.op.permute_dims(operand, axes)))
    product, alpha = node.apply("MatMul", *operands), float(node.attrs.get("alpha", 1.0))
    return product if alpha == 1.0 else relax.op.multiply(product, const(alpha, dtype_of(operands[0])))


def convert_cdist(node: Node) -> relax.Expr:
    """Return the Relax expression of com.microsoft's CDist: distances between all rows of [M, K] and of [N, K].

    Raises UnsupportedFormError for another metric than `euclidean` and `sqeuclidean`.
    """
    metric = node.text("metric", "sqeuclidean")
    if metric not in ("euclidean", "sqeuclidean"):
        raise UnsupportedFormError(f"metric {metric!r}")

    def compute(left: te.Tensor, right: te.Tensor) -> te.Tensor:
        depth = te.reduce_axis((0, left.shape[1]), name="k")

        def element(i: Any, j: Any) -> Any:
            difference = left[i, depth] - right[j, depth]
            return te.sum(difference * difference, axis=depth)

        return te.compute((left.shape[0], right.shape[0]), element, name="distances")

    squares = node.emit(node.builder.call_te(compute, *node.inputs, primfunc_name_hint="cdist"))
    return squares if metric == "sqeuclidean" else relax.op.sqrt(squares)


def convert_expand_dims(node: Node) -> relax.Expr:
    """Return the Relax expression of com.microsoft's ExpandDims: Unsqueeze along one axis, which must be constant."""
    axis = node.constant(1)
    if axis is None:
        raise UnsupportedFormError("an axis that is computed")
    return relax.op.expand_dims(node.inputs[0], int(axis.reshape(-1)[0]))


def convert_gather_nd(node: Node) -> relax.Expr:
    """Return the Relax expression of com.microsoft's GatherND: the standard's, with indices of int32 or int64."""
    indices = node.apply("Cast", node.inputs[1], to=onnx.TensorProto.INT64)
    return node.apply("GatherND", node.inputs[0], indices)


def convert_bias_gelu(approximate: str) -> Converter:
    """Return a converter of Gelu(x + bias), where the bias may be absent.

    `approximate` is the attribute of ONNX's Gelu: `none` or `tanh`.
    """

    def convert(node: Node) -> relax.Expr:
        bias = node.input(1)
        value = node.inputs[0] if bias is None else node.apply("Add", node.inputs[0], bias)
        return node.apply("Gelu", value, approximate=approximate)

    return convert


def convert_quick_gelu(node: Node) -> relax.Expr:
    """Return the Relax expression of com.microsoft's QuickGelu: x times the sigmoid of `alpha` times x."""
    x, alpha = node.inputs[0], float(node.attrs.get("alpha", 1.702))
    scaled = x if alpha == 1.0 else node.emit(relax.op.multiply(x, const(alpha, dtype_of(x))))
    return relax.op.multiply(x, node.emit(relax.op.sigmoid(scaled)))


def convert_bias_softmax(node: Node) -> relax.Expr:
    """Return the Relax expression of com.microsoft's BiasSoftmax: a sum, then a softmax over the last dimension.

    Raises UnsupportedFormError for a softmax over several dimensions, and for a bias that is repeated along an outer
    dimension.
    """
    data, bias = node.inputs
    rank, axis = data.ty.ndim, int(node.attrs.get("axis", 1)) % data.ty.ndim
    if not node.attrs.get("is_inner_broadcast", 1):
        raise UnsupportedFormError("a bias that is repeated along an outer dimension")
    value = node.apply("Add", data, bias)
    if axis != rank - 1:
        raise UnsupportedFormError("a softmax over several dimensions")
    return relax.op.nn.softmax(value, axis=axis)


def convert_skip_norm(operator: str) -> Converter:
    """Return a converter of a norm of the sum of an input, a skip connection and an optional bias.

    `operator` is LayerNormalization or RMSNormalization; it normalises over the last dimension. The sum is the node's
    fourth result. The second and third are statistics for training; the converter returns zeros for them.
    """

    def convert(node: Node) -> relax.Expr:
        is_simple = operator == "RMSNormalization"
        beta, bias = (None, node.input(3)) if is_simple else (node.input(3), node.input(4))
        total = node.apply("Add", node.inputs[0], node.inputs[1])
        total = total if bias is None else node.apply("Add", total, bias)
        return _with_statistics(node, _normalize(node, operator, total, node.inputs[2], beta), total)

    return convert


def _normalize(node: Node, operator: str, value: relax.Expr, gamma: relax.Expr, beta: relax.Expr | None) -> relax.Expr:
    operands = [value, gamma] if operator == "RMSNormalization" else [value, gamma, beta]
    opset = {"opset": 23} if operator == "RMSNormalization" else {}
    return node.apply(operator, *operands, axis=-1, epsilon=float(node.attrs.get("epsilon", 1e-12)), **opset)


def _with_statistics(node: Node, value: relax.Expr, total: relax.Expr) -> relax.Expr:
    """The results of a norm after a sum: between the norm and the sum are statistics, which inference does not have."""
    absent = const(0.0, "float32")
    return value if node.outputs == 1 else relax.Tuple([value, absent, absent, total][: node.outputs])


def convert_embed_layer_norm(node: Node) -> relax.Expr:
    """Return the Relax expression of EmbedLayerNormalization: a sum of embeddings, then a layer norm over it.

    Its results are the norm, the number of words of each row, and the sum. The numbers are those of ones in the rows of
    the mask, zero without a mask. Raises FreeSizeError for ids of unknown shape.
    """
    return _embed(node, node.input(8), lambda value, _place: value)


def convert_qembed_layer_norm(node: Node) -> relax.Expr:
    """Return the Relax expression of QEmbedLayerNormalization: EmbedLayerNormalization of tables of 8 bits.

    The scales of the tables, of gamma and of beta follow the mask, and then their zero points. The rows that are looked
    up are dequantised. Raises FreeSizeError for ids of unknown shape.
    """

    def decode(value: relax.Expr, place: int) -> relax.Expr:
        return dequantize(replace(node, inputs=[value, *(node.input(place + more) for more in (6, 11))]), 0)

    return _embed(node, None, decode)


def _embed(node: Node, places: relax.Expr | None, decode: Callable[[relax.Expr, int], relax.Expr]) -> relax.Expr:
    """The results of EmbedLayerNormalization, whose positions are `places`, or count from zero.

    `decode` returns the floats of a part of the operand at a position.
    """
    ids, segments, mask = (node.input(place) for place in (0, 1, 7))
    dims = dims_of(ids) if ids is not None else None
    if dims is None:
        raise FreeSizeError("an input of unknown shape")
    if places is None:
        places = node.emit(relax.op.arange(0, dims[1], 1, "int32"))
    total = decode(_look_up(node, node.inputs[2], ids), 2)
    total = node.emit(relax.op.add(total, decode(_look_up(node, node.inputs[3], places), 3)))
    if segments is not None:
        total = node.emit(relax.op.add(total, decode(_look_up(node, node.inputs[4], segments), 4)))
    norm = _normalize(node, "LayerNormalization", total, *(decode(node.inputs[place], place) for place in (5, 6)))
    if mask is not None:
        is_word = node.emit(relax.op.equal(mask, const(1, dtype_of(mask))))
        counts = node.emit(relax.op.sum(node.emit(relax.op.astype(is_word, "int32")), axis=1))
    else:
        counts = node.emit(relax.op.zeros([dims[0]], "int32"))
    return relax.Tuple([norm, counts, total])


def _look_up(node: Node, table: relax.Expr, places: relax.Expr) -> relax.Expr:
    """The rows of a table at these places; the model checks, when it runs, that the table has them."""
    places = checked_indices(node, places, dims_of(table)[:1], is_signed=False)  # type: ignore[index]
    return node.emit(relax.op.take(table, places, axis=0, mode="clip"))


def convert_attention(node: Node) -> relax.Expr:
    """Return the Relax expression of com.microsoft's Attention: a product for queries, keys and values, then attention.

    Raises UnsupportedFormError for rotary positions, for a shared buffer of past keys and values, and for a mask that
    has neither one, two or three numbers for each row nor two or three dimensions. Raises FreeSizeError for operands of
    unknown shape.
    """
    if node.attrs.get("do_rotary", 0) or node.attrs.get("past_present_share_buffer", 0):
        raise UnsupportedFormError("rotary positions or a shared buffer within Attention")
    projection = node.apply("MatMul", node.inputs[0], node.inputs[1])
    return _project_and_attend(node, projection, node.input(2), node.input(3), node.input(4), node.input(5))


def convert_qattention(node: Node) -> relax.Expr:
    """Return the Relax expression of com.microsoft's QAttention: Attention of dequantised operands.

    Raises UnsupportedFormError as for Attention. Raises FreeSizeError for operands of unknown shape.
    """
    if node.attrs.get("do_rotary", 0) or node.attrs.get("past_present_share_buffer", 0):
        raise UnsupportedFormError("rotary positions or a shared buffer within QAttention")
    # Scale and zero point are apart from their operand.
    data, weight, bias, data_scale, weight_scale, mask, data_zero, weight_zero = (node.input(i) for i in range(8))
    operands = [data, data_scale, data_zero, weight, weight_scale, weight_zero]
    inner = replace(node, inputs=operands)
    projection = node.apply("MatMul", dequantize(inner, 0), dequantize(inner, 3, -1))
    return _project_and_attend(node, projection, bias, mask, node.input(8), None)


def _project_and_attend(
    node: Node,
    projection: relax.Expr,
    bias: relax.Expr | None,
    mask: relax.Expr | None,
    past: relax.Expr | None,
    score_bias: relax.Expr | None,
) -> relax.Expr:
    if bias is not None:
        projection = node.apply("Add", projection, bias)
    width = dims_of(projection)[-1]  # type: ignore[index]
    sizes = list(node.attrs.get("qkv_hidden_sizes", ())) or [width // 3] * 3
    parts = relax.op.split(projection, [sizes[0], sizes[0] + sizes[1]], axis=2)
    heads = int(node.attrs["num_heads"])
    query, key, value = (split_heads(node, node.emit(parts[place]), heads) for place in range(3))
    if past is not None:
        key, value = (
            node.emit(relax.op.concat([node.emit(relax.op.take(past, const(place, "int64"), axis=0)), item], axis=2))
            for place, item in enumerate((key, value))
        )
    output = _attend(node, query, key, value, [_mask(node, mask, query, key), score_bias])
    if node.outputs == 1:
        return output
    states = [node.emit(relax.op.expand_dims(item, 0)) for item in (key, value)]
    return relax.Tuple([output, node.emit(relax.op.concat(states, axis=0))])


def convert_multi_head_attention(node: Node) -> relax.Expr:
    """Return the Relax expression of com.microsoft's MultiHeadAttention.

    Keys and values may be packed in one operand, also together with the queries. Raises UnsupportedFormError for keys
    without values, for scores as a result, and for a mask that has neither one number for each row nor two or three
    dimensions. Raises FreeSizeError for operands of unknown shape, and for unidirectional attention over a symbolic
    number of positions.
    """
    if node.outputs > _GROUP_QUERY_RESULTS:
        raise UnsupportedFormError("scores as a result")
    query, key, value, bias = (node.input(place) for place in range(4))
    heads = int(node.attrs["num_heads"])
    if query is not None and query.ty.ndim == _PACKED:
        query, key, value = (_unpack(node, query, place) for place in range(3))
    elif key is not None and key.ty.ndim == _PACKED:
        key, value = (_unpack(node, key, place) for place in range(2))
    if query is None or key is None or value is None:
        raise UnsupportedFormError("keys without values")
    operands = [query, key, value]
    if bias is not None:
        widths = [dims_of(item)[-1] for item in operands if item.ty.ndim == 3]  # type: ignore[index]
        begins = [0, widths[0], 2 * widths[0]]
        biases = [
            node.emit(relax.op.strided_slice(bias, [0], [begins[i]], [begins[i] + w])) for i, w in enumerate(widths)
        ]
        added = [node.apply("Add", item, own) for item, own in zip(operands, biases, strict=False)]
        operands = [*added, *operands[len(added) :]]
    query, key, value = (item if item.ty.ndim == 4 else split_heads(node, item, heads) for item in operands)
    former = 0
    if node.input(6) is not None:
        former = dims_of(node.inputs[6])[2]  # type: ignore[index]
        key, value = (
            node.emit(relax.op.concat([node.inputs[6 + place], item], axis=2))
            for place, item in enumerate((key, value))
        )
    output = _attend(node, query, key, value, [_mask(node, node.input(4), query, key, former), node.input(5)])
    return output if node.outputs == 1 else relax.Tuple([output, key, value][: node.outputs])


def _unpack(node: Node, packed: relax.Expr, place: int) -> relax.Expr:
    """One of the parts of `[batch, positions, heads, parts, channels]`, with its heads joined."""
    dims = dims_of(packed)
    if dims is None:
        raise FreeSizeError("an input of unknown shape")
    part = node.emit(relax.op.take(packed, const(place, "int64"), axis=3))
    return node.emit(relax.op.reshape(part, [*dims[:2], dims[2] * dims[4]]))


def _attend(
    node: Node, query: relax.Expr, key: relax.Expr, value: relax.Expr, biases: list[relax.Expr | None]
) -> relax.Expr:
    """Attention over `[batch, heads, positions, channels]`, with the heads of its result joined."""
    scores = scaled_scores(node, query, key)
    for bias in biases:
        scores = scores if bias is None else node.apply("Add", scores, bias)
    weights = node.emit(relax.op.nn.softmax(scores, axis=-1))
    return join_heads(node, node.apply("MatMul", weights, value))


def _mask(
    node: Node, mask: relax.Expr | None, query: relax.Expr, key: relax.Expr, former: Any = None
) -> relax.Expr | None:
    """The sum of mask and order of positions, to add to scores `[batch, heads, queries, keys]`; None if neither.

    `former` is the number of keys before the first query, by default those by which there are more keys than queries.
    """
    emit, dtype = node.emit, dtype_of(query)
    batch = dims_of(query)[0]  # type: ignore[index]
    keys = dims_of(key)[2]  # type: ignore[index]
    result = None
    if mask is not None:
        dims = dims_of(mask) or []
        sizes = {1: batch, 2: 2 * batch, 3: 3 * batch + 2}
        counts = [count for count, size in sizes.items() if len(dims) == 1 and node.evaluator.are_equal(dims[0], size)]
        if counts:
            # The position after the last word of each row, then perhaps that of its first word. Of three numbers for
            # each row, ONNX Runtime reads the first alone.
            bounds = emit(relax.op.astype(mask, "int32"))
            if counts[0] > 2:
                bounds, counts = emit(relax.op.strided_slice(bounds, [0], [0], [batch])), [1]
            bounds = emit(relax.op.reshape(bounds, [counts[0], batch, 1]))
            places = emit(relax.op.arange(0, keys, 1, "int32"))
            mask = emit(relax.op.less(places, emit(relax.op.take(bounds, const(0), axis=0))))
            if counts[0] > 1:
                begins = emit(relax.op.take(bounds, const(1), axis=0))
                mask = emit(relax.op.logical_and(mask, emit(relax.op.greater_equal(places, begins))))
        elif len(dims) == 1:
            raise UnsupportedFormError("a mask of one dimension that is not known to be of the batch's rows")
        elif len(dims) not in (2, 3):
            raise UnsupportedFormError(f"a mask of {len(dims)} dimensions")
        elif dims[-1] != 1 and not node.evaluator.are_equal(dims[-1], keys):
            mask = node.with_sizes(mask, [*dims[:-1], keys])
        if dtype_of(mask) != "bool":
            mask = emit(relax.op.greater(mask, const(0, dtype_of(mask))))
        is_kept = emit(relax.op.astype(mask, dtype))
        amount = const(-float(node.attrs.get("mask_filter_value", _FILTER)), dtype)
        lowered = emit(relax.op.multiply(emit(relax.op.subtract(is_kept, const(1, dtype))), amount))
        result = emit(relax.op.expand_dims(lowered, [1] if mask.ty.ndim == 3 else [1, 2]))
    if node.attrs.get("unidirectional", 0):
        order = _order(node, query, key, former)
        result = order if result is None else emit(relax.op.add(result, order))
    return result


def _order(node: Node, query: relax.Expr, key: relax.Expr, former: Any) -> relax.Expr:
    """What unidirectional attention adds to scores `[batch, heads, queries, keys]`: it hides the keys after a query.

    `former` is that of `_mask`. ONNX Runtime hides nothing from the last query.
    """
    dtype, queries, keys = dtype_of(query), dims_of(query)[2], dims_of(key)[2]  # type: ignore[index]
    if all(isinstance(size, int) for size in (keys, queries, 0 if former is None else former)):
        first = keys - queries if former is None else former
        hidden = np.triu(np.full((queries, keys), np.finfo("float32").min, "float32"), 1 + first)
        hidden[-1] = 0
        return const(hidden[None, None].astype(dtype))

    def hide(query: te.Tensor, key: te.Tensor) -> te.Tensor:
        queries, keys = query.shape[2], key.shape[2]
        # All keys are the former ones and those of the queries, unless there are none before.
        first = former if isinstance(former, int) else keys - queries

        def element(_: Any, __: Any, row: Any, place: Any) -> Any:
            is_hidden = te.all(place > row + first, row < queries - 1)
            return te.if_then_else(is_hidden, te.min_value(dtype), tirx.const(0, dtype))

        return te.compute((1, 1, queries, keys), element, name="hide")

    return node.emit(node.builder.call_te(hide, query, key, primfunc_name_hint="hide"))


def convert_group_query_attention(node: Node) -> relax.Expr:
    """Return the Relax expression of GroupQueryAttention: causal attention whose heads share keys and values by groups.

    The new keys and values follow those of past positions. The operand `seqlens_k` holds the index of the last position
    of each row of the batch. The results are the output, and all keys and values `[batch, heads, positions, channels]`,
    with zeros after a row's last position. Raises UnsupportedFormError for scores as a result, and for quantised keys
    and values. Raises FreeSizeError for operands of unknown shape, and for a total number of positions that is computed
    from data.
    """
    emit = node.emit
    names = ("qk_output", "kv_cache_bit_width")
    if any(int(node.attrs.get(name, 0)) > 0 for name in names) or node.outputs > _GROUP_QUERY_RESULTS:
        raise UnsupportedFormError("scores as a result or a quantised state")
    if any(node.input(place) is not None for place in range(12, len(node.inputs))):
        raise UnsupportedFormError("a quantised state")
    heads, groups = int(node.attrs["num_heads"]), int(node.attrs["kv_num_heads"])
    query, key, value = _separate_heads(node, heads, groups)
    batch, _, positions, _ = dims_of(query)  # type: ignore[misc]
    count = node.vector([positions])
    total_size = node.sizes(6)
    if total_size is None:
        raise FreeSizeError("a number of positions that is computed from data")
    total = node.vector(total_size)
    last = emit(relax.op.reshape(emit(relax.op.astype(node.inputs[5], "int64")), [batch, 1]))
    # A first call has no former positions: shorter rows of its batch are padded at their end.
    former = emit(relax.op.subtract(emit(relax.op.add(last, const(1, "int64"))), count))
    is_first = emit(relax.op.equal(total, count))
    former = emit(relax.op.where(is_first, const(0, "int64"), former))
    steps = emit(relax.op.arange(0, positions, 1, "int64"))
    places = emit(relax.op.add(former, steps))
    if node.attrs.get("do_rotary", 0):
        angles = places
        if node.input(9) is not None:
            # In a first call ONNX Runtime reads the first of all angles only, and counts on from it in every row.
            begin = emit(relax.op.take(emit(relax.op.reshape(node.inputs[9], [-1])), const([0]), axis=0))
            angles = emit(relax.op.where(is_first, emit(relax.op.add(begin, steps)), node.inputs[9]))
        interleaved = bool(node.attrs.get("rotary_interleaved", 0))
        cosine, sine = node.inputs[7:9]
        query, key = (_rotate(node, item, angles, cosine, sine, interleaved) for item in (query, key))
    past = [item for item in (node.input(3), node.input(4)) if item is not None and dims_of(item)[2] != 0]  # type: ignore[index]
    before = dims_of(past[0])[2] if past else 0  # type: ignore[index]
    length = node.evaluator.greatest(before, total_size[0])
    key, value = (
        _append(node, item, former, length, past[place : place + 1]) for place, item in enumerate((key, value))
    )
    keys, values = (repeat_heads(node, item, heads // groups) for item in (key, value))
    scores = cap_scores(node, scaled_scores(node, query, keys))
    bias = node.input(10)
    if bias is not None:
        dims = dims_of(bias)
        if dims is not None and not node.evaluator.are_equal(dims[-1], length):
            # Keys after the bias's end are hidden in any case.
            bias = with_length(node, bias, length, 0)
        scores = node.apply("Add", scores, bias)
    scores = emit(relax.op.add(scores, _hidden(node, places, key)))
    output = join_heads(node, node.apply("MatMul", _weights(node, scores), values))
    return output if node.outputs == 1 else relax.Tuple([output, key, value][: node.outputs])


def _weights(node: Node, scores: relax.Expr) -> relax.Expr:
    """GroupQueryAttention's weights of scores `[batch, heads, queries, keys]`: a softmax, in which a sink may share.

    The sink is one more score, which has no value: a number for each head, or zero in a smooth softmax.
    """
    emit, sink = node.emit, node.input(11)
    if sink is None and int(node.attrs.get("smooth_softmax", 0)) <= 0:
        return emit(relax.op.nn.softmax(scores, axis=-1))
    batch, heads, queries, keys = dims_of(scores)  # type: ignore[misc]
    column = const(0, dtype_of(scores)) if sink is None else emit(relax.op.reshape(sink, [1, heads, 1, 1]))
    column = emit(relax.op.broadcast_to(column, [batch, heads, queries, 1]))
    weights = emit(relax.op.nn.softmax(emit(relax.op.concat([scores, column], axis=3)), axis=-1))
    return emit(relax.op.strided_slice(weights, [3], [0], [keys]))


def _separate_heads(node: Node, heads: int, groups: int) -> list[relax.Expr]:
    """Queries, keys and values `[batch, heads, positions, channels]` of three operands, or of one that has all."""
    query, key, value = (node.input(place) for place in range(3))
    if key is None:
        width = (dims_of(query) or [0])[-1] // (heads + 2 * groups)
        ends = [heads * width, (heads + groups) * width]
        parts = [node.emit(relax.op.split(query, ends, axis=2)[place]) for place in range(3)]
    else:
        parts = [query, key, value]
    return [split_heads(node, part, own) for part, own in zip(parts, (heads, groups, groups), strict=True)]


def _append(node: Node, new: relax.Expr, former: relax.Expr, length: Any, past: list[relax.Expr]) -> relax.Expr:
    """`[batch, heads, length, channels]`: of a row, `former` positions of `past`, the new ones, and zeros."""

    def append(new: te.Tensor, former: te.Tensor, *past: te.Tensor) -> te.Tensor:
        batch, heads, count, width = new.shape

        def element(b: Any, h: Any, place: Any, c: Any) -> Any:
            own = place - former[b, 0]
            value = te.if_then_else(
                te.all(own >= 0, own < count), new[b, h, te.max(te.min(own, count - 1), 0), c], tirx.const(0, new.dtype)
            )
            if not past:
                return value
            return te.if_then_else(own < 0, past[0][b, h, te.min(place, past[0].shape[2] - 1), c], value)

        return te.compute((batch, heads, length, width), element, name="append")

    return node.emit(node.builder.call_te(append, new, former, *past, primfunc_name_hint="append"))


def _hidden(node: Node, places: relax.Expr, key: relax.Expr) -> relax.Expr:
    """What causal attention adds to scores `[batch, heads, positions, keys]`, for queries at `places`.

    A query sees the key at its own place and those before it, within the window.
    """
    window = int(node.attrs.get("local_window_size", -1))

    def hide(places: te.Tensor, key: te.Tensor) -> te.Tensor:
        def element(b: Any, _: Any, query: Any, place: Any) -> Any:
            distance = places[b, query] - place
            is_visible = distance >= 0 if window <= 0 else te.all(distance >= 0, distance < window)
            return te.if_then_else(is_visible, tirx.const(0, key.dtype), te.min_value(key.dtype))

        return te.compute((places.shape[0], 1, places.shape[1], key.shape[2]), element, name="hide")

    return node.emit(node.builder.call_te(hide, places, key, primfunc_name_hint="hide"))


def convert_rotary_embedding(node: Node) -> relax.Expr:
    """Return the Relax expression of com.microsoft's RotaryEmbedding: rotate pairs of channels by a position's angles.

    Two operands are tables of the cosines and the sines, with a row for each position. Raises UnsupportedFormError for
    `is_packed_batching`, and FreeSizeError for an input of unknown shape.
    """
    emit, (x, places, cosine, sine) = node.emit, node.inputs[:4]
    if node.attrs.get("is_packed_batching", 0):
        raise UnsupportedFormError("rows of several lengths in one")
    is_flat = x.ty.ndim == 3
    dims = dims_of(x)
    if dims is None:
        raise FreeSizeError("an input of unknown shape")
    if is_flat:
        half = dims_of(cosine)[1]  # type: ignore[index]
        heads = int(node.attrs.get("num_heads", 0)) or dims[2] // (2 * half)
        x = split_heads(node, x, heads)
    if dims_of(places) == [1]:
        positions = dims_of(x)[2]  # type: ignore[index]
        places = emit(relax.op.add(emit(relax.op.arange(0, positions, 1, "int64")), places))
        places = emit(relax.op.expand_dims(places, 0))
    places = checked_indices(node, places, dims_of(cosine)[:1], is_signed=False)  # type: ignore[index]
    result = _rotate(node, x, places, cosine, sine, bool(node.attrs.get("interleaved", 0)))
    return join_heads(node, result) if is_flat else result


def _rotate(
    node: Node, x: relax.Expr, places: relax.Expr, cosine: relax.Expr, sine: relax.Expr, interleaved: bool
) -> relax.Expr:
    """Rotate pairs of channels of `[batch, heads, positions, channels]` by the angles of `places` `[batch, positions]`.

    Row p of the tables `cosine` and `sine` is of position p. A pair is two neighbours if `interleaved`, else its second
    channel is in the second half. Channels beyond twice the width of the tables stay as they are.
    """
    emit, half = node.emit, dims_of(cosine)[1]  # type: ignore[index]
    width = dims_of(x)[3]  # type: ignore[index]
    cosine, sine = (
        emit(relax.op.expand_dims(emit(relax.op.take(t, places, axis=0, mode="clip")), 1)) for t in (cosine, sine)
    )
    rotated, rest = x, None
    if width != 2 * half:
        rotated = emit(relax.op.strided_slice(x, [3], [0], [2 * half]))
        rest = emit(relax.op.strided_slice(x, [3], [2 * half], [width]))
    if interleaved:
        result = emit(node.builder.call_te(_rotate_neighbours, rotated, cosine, sine, primfunc_name_hint="rotate"))
    else:
        first = emit(relax.op.strided_slice(rotated, [3], [0], [half]))
        second = emit(relax.op.strided_slice(rotated, [3], [half], [2 * half]))
        times = relax.op.multiply
        real = emit(relax.op.subtract(emit(times(first, cosine)), emit(times(second, sine))))
        imaginary = emit(relax.op.add(emit(times(first, sine)), emit(times(second, cosine))))
        result = emit(relax.op.concat([real, imaginary], axis=3))
    if rest is not None:
        result = emit(relax.op.concat([result, rest], axis=3))
    return result


def _rotate_neighbours(x: te.Tensor, cosine: te.Tensor, sine: te.Tensor) -> te.Tensor:
    """Rotate pairs of neighbours of `[batch, heads, positions, channels]`, with a cosine and a sine for each pair."""

    def element(b: Any, head: Any, place: Any, c: Any) -> Any:
        shared = [isinstance(size, tirx.IntImm) and int(size) == 1 for size in cosine.shape[:3]]
        angle = tuple(0 if is_one else at for at, is_one in zip((b, head, place), shared, strict=True))
        pair = c // 2
        turn = cosine[(*angle, pair)], sine[(*angle, pair)]
        first, second = x[b, head, place, 2 * pair], x[b, head, place, 2 * pair + 1]
        real, imaginary = first * turn[0] - second * turn[1], first * turn[1] + second * turn[0]
        return te.if_then_else(c % 2 == 0, real, imaginary)

    return te.compute(x.shape, element, name="rotate")


def convert_nhwc_max_pool(node: Node) -> relax.Expr:
    """Return the Relax expression of com.microsoft's NhwcMaxPool: MaxPool between two transposes."""
    attributes = {name: value for name, value in node.attrs.items() if name != "tvm_custom"}
    return channels_last(node.apply("MaxPool", node.emit(channels_first(node.inputs[0])), **attributes))
