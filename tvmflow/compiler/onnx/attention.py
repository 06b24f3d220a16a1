"""The standard's operator Attention, composed of products, masks and a softmax, and the parts that others share."""

import math
from typing import Any

import numpy as np
from tvm import relax, te, tirx

from tvmflow.compiler.onnx.node import FreeSizeError, Node
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of
from tvmflow.compiler.size_checks import cast_to

# The results: the output, the keys, the values and the products of queries and keys, these in one of four states.
_SCALED, _CAPPED, _MASKED, _WEIGHTS = range(4)
_PRODUCTS = 3


def convert_attention(node: Node) -> relax.Expr:
    """Return the Relax expression of Attention.

    A query without a key that it may attend to has zeros as its result. The softmax is computed in float32 at least.
    Raises FreeSizeError for operands of unknown shape.
    """
    emit = node.emit
    query, key, value = (_four_dimensions(node, place) for place in range(3))
    key, value = (
        item if node.input(place) is None else emit(relax.op.concat([node.inputs[place], item], axis=2))
        for place, item in ((4, key), (5, value))
    )
    dtype = dtype_of(query)
    heads, shared = dims_of(query)[1], dims_of(key)[1]  # type: ignore[index]
    keys, values = (repeat_heads(node, item, heads // shared) for item in (key, value))
    states = {_SCALED: scaled_scores(node, query, keys)}
    states[_CAPPED] = scores = cap_scores(node, states[_SCALED])
    biases = _biases(node, query, key)
    for bias in biases:
        scores = node.apply("Add", scores, bias)
    states[_MASKED] = scores
    is_float_mask = node.input(3) is not None and dtype_of(node.inputs[3]) != "bool"
    if node.outputs > _PRODUCTS and len(biases) > is_float_mask:
        # ONNX Runtime adds the lowest number where the standard adds an infinity.
        states[_MASKED] = emit(relax.op.maximum(scores, const(np.finfo(dtype).min, dtype)))
    exact = scores if dtype in ("float32", "float64") else emit(relax.op.astype(scores, "float32"))
    weights = emit(relax.op.nn.softmax(exact, axis=-1))
    if biases:
        largest = emit(relax.op.max(exact, [-1], keepdims=True))
        is_empty = emit(relax.op.equal(largest, const(-math.inf, dtype_of(exact))))
        weights = emit(relax.op.where(is_empty, const(0.0, dtype_of(exact)), weights))
    weights = weights if exact is scores else emit(relax.op.astype(weights, dtype))
    states[_WEIGHTS] = weights
    output = node.apply("MatMul", weights, values)
    if node.inputs[0].ty.ndim == 3:
        output = join_heads(node, output)
    results = [output, key, value]
    if node.outputs > _PRODUCTS:
        results.append(states[int(node.attrs.get("qk_matmul_output_mode", 0))])
    return output if node.outputs == 1 else relax.Tuple(results[: node.outputs])


def split_heads(node: Node, value: relax.Expr, heads: int) -> relax.Expr:
    """Return `[batch, positions, channels]` as `[batch, heads, positions, channels of a head]`.

    Raises FreeSizeError for a value of unknown shape.
    """
    dims = dims_of(value)
    if dims is None or not isinstance(dims[2], int):
        raise FreeSizeError("an input of unknown shape")
    split = node.emit(relax.op.reshape(value, [dims[0], dims[1], heads, dims[2] // heads]))
    return node.emit(relax.op.permute_dims(split, [0, 2, 1, 3]))


def join_heads(node: Node, value: relax.Expr) -> relax.Expr:
    """Return `[batch, heads, positions, channels of a head]` as `[batch, positions, channels]`."""
    batch, heads, positions, width = dims_of(value)  # type: ignore[misc]
    return node.emit(
        relax.op.reshape(node.emit(relax.op.permute_dims(value, [0, 2, 1, 3])), [batch, positions, heads * width])
    )


def repeat_heads(node: Node, value: relax.Expr, group: int) -> relax.Expr:
    """Return keys or values `[batch, heads, positions, channels]` with each head `group` times."""
    return value if group == 1 else node.emit(relax.op.repeat(value, group, 1))


def scaled_scores(node: Node, query: relax.Expr, key: relax.Expr) -> relax.Expr:
    """Return the products of queries and keys, times the attribute `scale`, by default that of the channels."""
    scale = float(node.attrs.get("scale", 0.0)) or 1 / math.sqrt(dims_of(query)[-1])  # type: ignore[index]
    scores = node.apply("MatMul", query, node.emit(relax.op.permute_dims(key, [0, 1, 3, 2])))
    return node.emit(relax.op.multiply(scores, const(scale, dtype_of(scores))))


def cap_scores(node: Node, scores: relax.Expr) -> relax.Expr:
    """Return the scores within the bounds that the attribute `softcap` sets, by default without bounds."""
    cap = float(node.attrs.get("softcap", 0.0))
    if not cap:
        return scores
    bounded = node.emit(relax.op.tanh(node.emit(relax.op.divide(scores, const(cap, dtype_of(scores))))))
    return node.emit(relax.op.multiply(bounded, const(cap, dtype_of(scores))))


def _four_dimensions(node: Node, place: int) -> relax.Expr:
    """Queries, keys or values as `[batch, heads, positions, channels]`."""
    value = node.inputs[place]
    dims = dims_of(value)
    if dims is None or not isinstance(dims[-1], int):
        raise FreeSizeError("an input of unknown shape")
    heads = "q_num_heads" if place == 0 else "kv_num_heads"
    return value if len(dims) == 4 else split_heads(node, value, int(node.attrs[heads]))


def _biases(node: Node, query: relax.Expr, key: relax.Expr) -> list[relax.Expr]:
    """What is added to the scores `[batch, heads, queries, keys]`: the mask, and what hides keys by their places."""
    keys, dtype = dims_of(key)[2], dtype_of(query)  # type: ignore[index]
    biases = []
    mask = node.input(3)
    if mask is not None:
        if dtype_of(mask) == "bool":
            lowest = (const(0.0, dtype), const(-math.inf, dtype))
            mask = node.emit(relax.op.where(mask, *lowest))
        elif dtype_of(mask) != dtype:
            mask = node.emit(relax.op.astype(mask, dtype))
        biases.append(_with_all_keys(node, mask, keys))
    hidden = _hidden(node, query, key)
    return biases if hidden is None else [*biases, hidden]


def _with_all_keys(node: Node, mask: relax.Expr, keys: Any) -> relax.Expr:
    """A mask whose last dimension is that of the keys: a shorter one hides those after its end."""
    dims = dims_of(mask)
    if not dims or node.evaluator.are_equal(dims[-1], keys):
        return mask
    if isinstance(dims[-1], int) and isinstance(keys, int):
        widths = [0] * (2 * len(dims) - 1) + [keys - dims[-1]]
        return node.emit(relax.op.nn.pad(mask, widths, pad_value=-math.inf))
    if node.input(6) is None:
        return cast_to(node.builder, mask, [*dims[:-1], keys])
    return with_length(node, mask, keys, -math.inf)


def with_length(node: Node, value: relax.Expr, length: Any, fill: float) -> relax.Expr:
    """Return a tensor whose last dimension is `length`: cut off, or with elements `fill` after its end."""

    def extend(value: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            *lead, place = index
            inside = value[(*lead, te.min(place, value.shape[-1] - 1))]
            return te.if_then_else(place < value.shape[-1], inside, tirx.const(fill, value.dtype))

        return te.compute((*value.shape[:-1], length), element, name="extend")

    return node.emit(node.builder.call_te(extend, value, primfunc_name_hint="extend"))


def _hidden(node: Node, query: relax.Expr, key: relax.Expr) -> relax.Expr | None:
    """Minus infinity for the keys that causality, a window or the end of a row hides; None where nothing hides any.

    A query sees the keys within the window around its own place. Places begin after the former keys, or where a row has
    as many queries as its number of keys says.
    """
    queries, keys, dtype = dims_of(query)[2], dims_of(key)[2], dtype_of(query)  # type: ignore[index]
    before, after = (int(node.attrs.get(f"{side}_window_size", -1)) for side in ("left", "right"))
    after = 0 if node.attrs.get("is_causal", 0) else after
    past, counts = node.input(4), node.input(6)
    if max(before, after) < 0 and counts is None:
        return None
    former = 0 if past is None else dims_of(past)[2]  # type: ignore[index]
    if counts is None and all(isinstance(size, int) for size in (queries, keys, former)):
        # The distance of each key from the place of each query.
        distances = np.arange(keys) - np.arange(former, former + queries)[:, None]
        is_hidden = ((before >= 0) & (distances < -before)) | ((after >= 0) & (distances > after))
        return const(np.where(is_hidden, -math.inf, 0).astype(dtype))
    lowest = tirx.const(-math.inf, dtype)

    def hide(query: te.Tensor, key: te.Tensor, other: te.Tensor) -> te.Tensor:
        """`other` is the number of keys of each row, else the former keys, else any tensor."""

        def element(b: Any, _: Any, row: Any, place: Any) -> Any:
            count = None if counts is None else other[b].astype("int64")
            own = row + (count - query.shape[2] if count is not None else 0 if past is None else other.shape[2])
            conditions = [] if count is None else [place < count]
            conditions += [place >= own - before] if before >= 0 else []
            conditions += [place <= own + after] if after >= 0 else []
            return te.if_then_else(te.all(*conditions), tirx.const(0, dtype), lowest)

        rows = 1 if counts is None else query.shape[0]
        return te.compute((rows, 1, query.shape[2], key.shape[2]), element, name="hide")

    other = next((item for item in (counts, past) if item is not None), query)
    return node.emit(node.builder.call_te(hide, query, key, other, primfunc_name_hint="hide"))
