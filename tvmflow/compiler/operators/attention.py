"""Attention by strips of queries: the scores of a strip, their softmax and the sum of values stay in the cache."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx, topi

from tvmflow.compiler import cost, tiles, vectormath
from tvmflow.compiler.annotations import DOT, KERNEL, LANES, TILE, VECTORS
from tvmflow.compiler.dotproduct import BF16
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import dot
from tvmflow.compiler.operators.common import divides, parts, round_up, static, vector

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
    bf16: bool,
    zero_for_nan: bool,
) -> te.Tensor:
    """Define scaled dot-product attention (Vaswani et al., 2017) in float32.

    With `bf16` the operands are bfloat16, stored as uint16, and so are the exponentials that weigh the values; both
    products are dot products of pairs, whose sums are float32. The number of channels of a head must be even then.

    The result has the `shape` `[batch, queries, heads, channels]`. `query`, `key` and `value` return the element of an
    operand at a batch, position, head and channel. `keys` is the number of keys and of values; each query and key has
    as many channels as the result. The scores are multiplied by `scale`. The `mask`, unless it is None, is added to the
    scaled scores and has the shape `[batch or 1, heads or 1, queries or 1, keys]`. With `zero_for_nan`, a query whose
    weights are NaN has zeros as its result, such as one for which the mask excludes every key. The schedule takes a
    strip of a few queries at a time through all stages, as in "FlashAttention" (Dao et al., 2022), but with whole rows
    of scores, which fit the cache.
    """
    stages = _Stages(shape, keys, machine, bf16)
    scores = stages.scores(query, key, scale)
    exponential, total = stages.softmax(scores, mask, scale)
    inverse = te.compute(total.shape, lambda *row: 1.0 / total[row], name="inverse")
    mixed = stages.mixed(exponential, value)

    def result(b: Any, s: Any, h: Any, c: Any) -> Any:
        element = mixed[b, h, s, c] * inverse[b, h, s]
        if not zero_for_nan:
            return element
        # The sum is at least one, unless it is NaN or all scores are minus infinity.
        return tirx.Select(total[b, h, s] > 0.0, element, tirx.const(0.0, "float32"))

    return te.compute(tuple(shape), result, name="attention")


class _Stages:
    """The stages of attention, whose parameters `attention` describes: their sizes, and the tiles of both products.

    The queries are filled up to whole strips, the keys of the scores to whole tiles. In bfloat16 the innermost
    dimension of an operand's panel is the pair of numbers that a lane multiplies at a time.
    """

    def __init__(self, shape: Sequence[Any], keys: Any, machine: Machine, bf16: bool) -> None:
        self._batch, self._queries, self._heads, channels = shape
        self._keys, self._depth, self._bf16 = keys, int(channels), bf16
        self._lanes, self._value_lanes = machine.lanes, vector(self._depth, machine)
        self._rows, self._key_vectors, value_vectors = choose(static(self._queries), static(keys), self._depth, machine)
        self._value_vectors = value_vectors if self._value_lanes == machine.lanes else 1
        self._key_tile = self._key_vectors * self._lanes
        self._row_sizes = [self._batch, self._heads, round_up(self._queries, self._rows)]
        self._score_sizes = (*self._row_sizes, round_up(keys, self._key_tile))
        self._pair = (BF16.group,) if bf16 else ()
        self._group = math.prod(self._pair)
        self._zero = tirx.const(0, BF16.data if bf16 else "float32")
        self._multiply = BF16.product if bf16 else operator.mul
        self._dot: dict[str, Any] = {DOT: BF16.name} if bf16 else {}

    def scores(self, query: Element, key: Element, scale: float) -> te.Tensor:
        """The products of queries and keys, scaled unless they are of bfloat16: `[batch, heads, query, key]`."""
        batch, heads, rows, wide = self._score_sizes

        def packed_key(b: Any, h: Any, d: Any, t: Any, *within: Any) -> Any:
            element = key(b, t, h, self._place(d, within))
            element = element if self._bf16 else element * scale
            if divides(self._key_tile, self._keys):
                return element
            return tirx.if_then_else(t < self._keys, element, self._zero)

        key_panel = te.compute((batch, heads, self._depth // self._group, wide, *self._pair), packed_key, name="keys")

        def source(b: Any, h: Any, s: Any, d: Any) -> Any:
            return query(b, s, h, d)

        if not divides(self._rows, self._queries):
            panel = te.compute(
                (batch, heads, rows, self._depth),
                lambda b, h, s, d: query(b, tirx.min(s, self._queries - 1), h, d),
                name="panel",
            )

            def source(b: Any, h: Any, s: Any, d: Any) -> Any:
                return panel[b, h, s, d]

        d, within = self._axes(self._depth // self._group, "d")
        return te.compute(
            self._score_sizes,
            lambda b, h, s, t: te.sum(
                self._multiply(source(b, h, s, self._place(d, within)), key_panel[(b, h, d, t, *within)]),
                axis=[d, *within],
            ),
            name="scores",
            attrs={
                KERNEL: "attention",
                TILE: self._rows,
                LANES: self._lanes,
                VECTORS: [self._key_vectors, self._value_vectors],
                **self._dot,
            },
        )

    def softmax(self, scores: te.Tensor, mask: te.Tensor | None, scale: float) -> tuple[te.Tensor, te.Tensor]:
        """The exponentials of the scores, less the largest of their row, and the sum of each row.

        `mask` is added to the scores; None adds nothing.
        """
        queries = None if divides(self._rows, self._queries) else self._queries
        masked = _masked(scores, scale if self._bf16 else 1.0, mask, queries, self._keys, self._key_tile)
        logits = te.compute(self._score_sizes, lambda *index: masked(index), name="logits")
        wide = self._score_sizes[-1]
        largest = _reduced(lambda index: logits[tuple(index)], self._row_sizes, wide, te.max, "max", self._lanes)
        exponential = dot.stage(
            self._score_sizes,
            lambda *index: vectormath.exp_of_negative(logits[index] - largest[index[:-1]]),
            "exponential",
            self._bf16,
        )

        def weight(index: Sequence[Any]) -> Any:
            return BF16.widen(exponential[tuple(index)]) if self._bf16 else exponential[tuple(index)]

        return exponential, _reduced(weight, self._row_sizes, wide, te.sum, "sum", self._lanes)

    def mixed(self, exponential: te.Tensor, value: Element) -> te.Tensor:
        """The sums of the values, each times the exponential of its score: `[batch, heads, query, channel]`."""
        depth = round_up(self._depth, self._value_lanes * self._value_vectors)
        values = self._values(value, depth)
        t, within = self._axes(parts(self._keys, self._group) if self._bf16 else self._keys, "t")
        return te.compute(
            (*self._row_sizes, depth),
            lambda b, h, s, c: te.sum(
                self._multiply(exponential[b, h, s, self._place(t, within)], values(b, t, h, c, *within)),
                axis=[t, *within],
            ),
            name="mixed",
            attrs={LANES: self._value_lanes, **self._dot},
        )

    def _values(self, value: Element, depth: Any) -> Callable[..., Any]:
        """The element of the values at a batch, step of the sum, head and channel, of which there are `depth`."""
        batch, heads, keys = self._batch, self._heads, self._keys
        if self._bf16:

            def packed_value(b: Any, h: Any, t: Any, c: Any, g: Any) -> Any:
                # Clamp the index: vector code reads first and selects afterwards, so every read must be in bounds.
                place = self._place(t, [g])
                element = value(b, tirx.min(place, keys - 1), h, tirx.min(c, self._depth - 1))
                return tirx.if_then_else(tirx.all(place < keys, c < self._depth), element, self._zero)

            sizes = (batch, heads, parts(keys, self._group), depth, self._group)
            value_pairs = te.compute(sizes, packed_value, name="values")
            return lambda b, t, h, c, g: value_pairs[b, h, t, c, g]
        if int(depth) == self._depth:
            return value
        value_panel = te.compute(
            (batch, heads, keys, depth),
            lambda b, h, t, c: tirx.if_then_else(c < self._depth, value(b, t, h, c), self._zero),
            name="values",
        )
        return lambda b, t, h, c: value_panel[b, h, t, c]

    def _axes(self, steps: Any, name: str) -> tuple[Any, list[Any]]:
        """The axes of a sum of `steps` steps: over the steps, and in bfloat16 over the pair of each step."""
        return te.reduce_axis((0, steps), name), [te.reduce_axis((0, size), "g") for size in self._pair]

    def _place(self, step: Any, within: Sequence[Any]) -> Any:
        """The channel, key or value of a step of a sum: each step has a pair of them, or one."""
        return step * self._group + within[0] if within else step


def _masked(
    scores: te.Tensor, scale: float, mask: te.Tensor | None, queries: Any | None, keys: Any, multiple: int
) -> Callable[[Sequence[Any]], Any]:
    """Scale the scores, add the mask, and put minus infinity beyond the last key; return the element at an index.

    `queries` is the number of queries where the scores have more rows, else None.
    """
    lowest = tirx.const(-math.inf, "float32")
    whole = divides(multiple, keys)

    def scaled(*index: Any) -> Any:
        return scores[index] if scale == 1.0 else scores[index] * tirx.const(scale, "float32")

    if mask is None:
        return lambda index: scaled(*index) if whole else tirx.Select(index[-1] < keys, scaled(*index), lowest)
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
            scaled(b, h, s, t) + sum_with_mask[(*(0 if one else at for one, at in zip(single, place, strict=False)), t)]
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
