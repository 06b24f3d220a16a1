"""Attention by strips of queries: the scores of a strip, their softmax and the sum of values stay in the cache."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx, topi

from tvmflow.compiler import cost, tiles, vectormath
from tvmflow.compiler.annotations import KERNEL, LANES, TILE, VECTORS
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import divides, round_up, static, vector

# The element of a tensor by batch, position, head and channel.
Element = Callable[[Any, Any, Any, Any], Any]


def choose(queries: int | None, keys: int | None, channels: int, machine: Machine) -> tuple[int, int, int]:
    """Choose the register tiles of attention's two products; return (rows, vectors of keys, vectors of channels).

    Both tiles have `rows` rows, one for each query of a strip. The tile of scores has vectors of keys, the tile of the
    weighted sum of values has vectors of channels. `queries` and `keys` are None where they are symbolic; `channels` is
    the size of a head. The choice minimises the estimated cycles of both products. They include the work on padding:
    rows, keys and channels that fill up the last tile.
    """

    # The vectors of keys and values come from the second-level cache.
    loading = 4 * machine.lanes / machine.second.read

    def cycles_of(rows: int, vectors: int, size: int) -> float:
        cycles = max(cost.step(rows, vectors, machine), vectors * loading)
        return -(-(queries or rows) // rows) * -(-size // (vectors * machine.lanes)) * cycles

    wide = -(-channels // machine.lanes)
    best = None
    for rows in (
        range(1, machine.registers - 2) if queries is not None else (min(tiles.UNKNOWN_ROWS, machine.registers // 3),)
    ):
        most = (machine.registers - 1) // (rows + 1)
        for vectors in range(1, min(most, 4) + 1):
            for values in range(1, min(most, 4) + 1):
                if wide % values or (keys is None and vectors > 2):
                    continue
                depth = keys or 8 * machine.lanes
                total = channels * cycles_of(rows, vectors, depth) + depth * cycles_of(rows, values, channels)
                key = (round(total), -rows, vectors + values)
                if best is None or key < best[0]:
                    best = (key, (rows, vectors, values))
    return (1, 1, 1) if best is None else best[1]


def attention(
    shape: Sequence[Any],
    keys: Any,
    query: Element,
    key: Element,
    value: Element,
    mask: te.Tensor | None,
    scale: float,
    machine: Machine,
) -> te.Tensor:
    """Define scaled dot-product attention (Vaswani et al., 2017) in float32.

    The result has the `shape` `[batch, queries, heads, channels]`. `query`, `key` and `value` return the element of an
    operand at a batch, position, head and channel. `keys` is the number of keys and of values; each query and key has
    as many channels as the result. The scores are multiplied by `scale`. The `mask`, unless it is None, is added to the
    scaled scores and has the shape `[batch or 1, heads or 1, queries or 1, keys]`. The schedule takes a strip of a few
    queries at a time through all stages, as in "FlashAttention" (Dao et al., 2022), but with whole rows of scores,
    which fit the cache.
    """
    batch, queries, heads, channels = shape
    depth = int(channels)
    rows, key_vectors, value_vectors = choose(static(queries), static(keys), depth, machine)
    lanes, value_lanes = machine.lanes, vector(depth, machine)
    if value_lanes < machine.lanes:
        value_vectors = 1
    tiled_rows, wide = round_up(queries, rows), round_up(keys, key_vectors * lanes)
    key_panel = te.compute(
        (batch, heads, depth, wide),
        lambda b, h, d, t: (
            key(b, t, h, d) * scale
            if divides(key_vectors * lanes, keys)
            else tirx.if_then_else(t < keys, key(b, t, h, d) * scale, tirx.const(0, "float32"))
        ),
        name="keys",
    )

    def source(b: Any, h: Any, s: Any, d: Any) -> Any:
        return query(b, s, h, d)

    if not divides(rows, queries):
        panel = te.compute(
            (batch, heads, tiled_rows, depth), lambda b, h, s, d: query(b, tirx.min(s, queries - 1), h, d), name="panel"
        )

        def source(b: Any, h: Any, s: Any, d: Any) -> Any:
            return panel[b, h, s, d]

    d = te.reduce_axis((0, depth), "d")
    scores = te.compute(
        (batch, heads, tiled_rows, wide),
        lambda b, h, s, t: te.sum(source(b, h, s, d) * key_panel[b, h, d, t], axis=d),
        name="scores",
        attrs={KERNEL: "attention", TILE: rows, LANES: lanes, VECTORS: [key_vectors, value_vectors]},
    )
    masked = _masked(scores, mask, None if divides(rows, queries) else queries, keys, key_vectors * lanes)
    logits = te.compute((batch, heads, tiled_rows, wide), lambda *index: masked(index), name="logits")
    row_sizes = [batch, heads, tiled_rows]
    largest = _reduced(lambda index: logits[tuple(index)], row_sizes, wide, te.max, "max", lanes)
    exponential = te.compute(
        (batch, heads, tiled_rows, wide),
        lambda *index: vectormath.exp_of_negative(logits[index] - largest[index[:-1]]),
        name="exponential",
    )
    total = _reduced(lambda index: exponential[tuple(index)], row_sizes, wide, te.sum, "sum", lanes)
    inverse = te.compute(row_sizes, lambda *row: 1.0 / total[row], name="inverse")
    whole = round_up(depth, value_lanes * value_vectors)

    def values(b: Any, t: Any, h: Any, c: Any) -> Any:
        return value(b, t, h, c)

    if int(whole) != depth:
        value_panel = te.compute(
            (batch, heads, keys, whole),
            lambda b, h, t, c: tirx.if_then_else(c < depth, value(b, t, h, c), tirx.const(0, "float32")),
            name="values",
        )

        def values(b: Any, t: Any, h: Any, c: Any) -> Any:
            return value_panel[b, h, t, c]

    t = te.reduce_axis((0, keys), "t")
    mixed = te.compute(
        (batch, heads, tiled_rows, whole),
        lambda b, h, s, c: te.sum(exponential[b, h, s, t] * values(b, t, h, c), axis=t),
        name="mixed",
    )
    return te.compute(tuple(shape), lambda b, s, h, c: mixed[b, h, s, c] * inverse[b, h, s], name="attention")


def _masked(
    scores: te.Tensor, mask: te.Tensor | None, queries: Any | None, keys: Any, multiple: int
) -> Callable[[Sequence[Any]], Any]:
    """Add the mask to the scores, and put minus infinity beyond the last key; return the element at an index.

    `queries` is the number of queries where the scores have more rows, else None.
    """
    lowest = tirx.const(-math.inf, "float32")
    whole = divides(multiple, keys)
    if mask is None:
        return lambda index: (
            scores[tuple(index)] if whole else tirx.Select(index[-1] < keys, scores[tuple(index)], lowest)
        )
    sum_with_mask = mask
    if not whole:
        sum_with_mask = te.compute(
            (*mask.shape[:-1], scores.shape[-1]),
            lambda *index: tirx.if_then_else(index[-1] < keys, mask[index], lowest),
            name="mask",
        )
    single = [static(size) == 1 for size in mask.shape]

    def element(index: Sequence[Any]) -> Any:
        b, h, s, t = index
        place = [b, h, s if queries is None else tirx.min(s, queries - 1)]
        return (
            scores[b, h, s, t] + sum_with_mask[(*(0 if one else at for one, at in zip(single, place, strict=False)), t)]
        )

    return element


def _reduced(
    element: Callable[[Sequence[Any]], Any],
    rows: Sequence[Any],
    size: Any,
    reduce: Callable[..., Any],
    name: str,
    lanes: int,
) -> te.Tensor:
    """Reduce each row, a number of whole vectors: first its vectors to one, then the lanes of that vector."""
    o = te.reduce_axis((0, topi.utils.simplify(size // lanes)), "o")
    partial_results = te.compute(
        (*rows, lanes),
        lambda *index: reduce(element((*index[:-1], o * lanes + index[-1])), axis=o),
        name=f"{name}_lanes",
    )
    v = te.reduce_axis((0, lanes), "v")
    return te.compute(rows, lambda *row: reduce(partial_results[(*row, v)], axis=v), name=f"{name}_row")
