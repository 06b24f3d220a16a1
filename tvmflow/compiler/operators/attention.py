"""Attention by strips of queries: the scores of a strip, their softmax and the sum of values stay in the cache."""

import json
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from tvm import te, tirx, topi

from tvmflow.compiler import amx, cost, tiles, vectormath
from tvmflow.compiler.annotations import AMX, DOT, KERNEL, LANES, TILE, VECTORS
from tvmflow.compiler.dotproduct import BF16, round_bf16
from tvmflow.compiler.machine import NARROWEST, Machine
from tvmflow.compiler.operators import dot
from tvmflow.compiler.operators.common import divides, parts, round_up, static, vector

# The queries that have zeros in the place of NaN: those whose weights are NaN, or whose scores are all minus infinity.
ZERO_FOR_NAN, ZERO_WITHOUT_KEYS = "zero for NaN", "zero without keys"
# How much longer all strips take where the last one is not full.
_PARTIAL = 1.05
# The strips of queries from which on values are copied: the copy takes half as long as a strip.
_MANY_STRIPS = 8
# The keys whose products AMX computes in one call where their number is unknown: a tile of a second product has half of
# them in pairs, and two tiles share a call.
_KEYS_OF_CALL = 4 * amx.LANES
# How many tiles' worth of keys may be added to these where their number is known, so that tiles divide them well.
_MORE_KEYS = 4
# For each dimension of a tensor: the dimension of an operand that runs along it, or None, the step and the start.
Places = tuple[tuple[int | None, int, int], ...]
# The element of a tensor by batch, position, head and channel.
Element = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True)
class Strip:
    """The queries that attention computes at a time, and the tiles of its two products.

    A strip has the queries of `positions` neighbouring positions and of `heads` of the heads that share keys. The tile
    of the scores has `keys` vectors of keys, that of the weighted sum of values has `values` vectors of channels.
    """

    positions: int
    heads: int
    keys: int
    values: int


def choose(positions: int | None, group: int, keys: int | None, channels: int, machine: Machine) -> Strip:
    """Choose the strips in which attention is computed, each of whole groups or of a part of one.

    `positions` and `keys` are None where they are symbolic; `group` is the number of heads that share keys, `channels`
    the size of a head. The choice minimises the estimated cycles of both products. They include the work on padding:
    rows, keys and channels that fill up the last tile.
    """
    # The vectors of keys and values come from the second-level cache, and no multiply-adds hide that.
    loading = 4 * machine.lanes / machine.second.read

    def cycles_of(rows: int, vectors: int, size: int) -> float:
        cycles = cost.step(rows, vectors, machine) + vectors * loading
        near = max(rows // group, 1)
        strips = -(-(positions or near) // near) * -(-group // rows)
        # A last strip that is not full takes a copy of the queries, and conditions where its result is written.
        partial = _PARTIAL if (positions or near) % near else 1.0
        return partial * strips * -(-size // (vectors * machine.lanes)) * cycles

    wide = -(-channels // machine.lanes)
    best = None
    unknown = min(tiles.UNKNOWN_ROWS, machine.registers // 3)
    # A third of the registers is for operands, and a single vector is little work for a tile.
    sums = machine.registers - machine.registers // 3
    every = range(1, (unknown if positions is None else sums // 2) + 1)
    numbers = [rows for rows in every if rows % group == 0 or group % rows == 0]
    for rows in numbers if positions is not None else numbers[-1:]:
        most = sums // rows
        depth = keys or 8 * machine.lanes
        for vectors in range(min(2, most, -(-depth // machine.lanes)), min(most, 4) + 1):
            for values in range(1, min(most, 4) + 1):
                if wide % values or (keys is None and vectors > 2):
                    continue
                total = channels * cycles_of(rows, vectors, depth) + depth * cycles_of(rows, values, channels)
                key = (round(total), -rows, vectors + values)
                if best is None or key < best[0]:
                    best = (key, (rows, vectors, values))
    rows, vectors, values = (1, 1, 1) if best is None else best[1]
    return Strip(max(rows // group, 1), min(rows, group), vectors, values)


@dataclass(frozen=True)
class TiledStrip:
    """The queries that attention computes at a time by AMX, those of neighbouring `positions` of one head.

    A call of a kernel multiplies the queries by `keys` keys, filled up by keys whose scores do not count, and sums so
    many values. A query has `groups` pairs of channels, filled up with zeros.
    """

    positions: int
    keys: int
    groups: int


def choose_tiled(positions: int | None, keys: int | None, channels: int, machine: Machine) -> TiledStrip | None:
    """Choose the strips in which AMX computes attention in bfloat16; None where dot products are faster or do it alone.

    `positions` and `keys` are None where they are symbolic; `channels` is the size of a head.
    """
    if BF16.name not in machine.amx or machine.lanes != amx.LANES:
        return None
    if positions is not None and positions < amx.FEWEST_ROWS:
        return None
    values, depth = -(-channels // amx.LANES), -(-channels // BF16.group)
    fewest = int(round_up(keys or _KEYS_OF_CALL, amx.LANES))

    def estimate(strip: TiledStrip) -> float:
        rows, vectors = strip.positions, strip.keys // amx.LANES
        scores = amx.cycles_of_call(rows, strip.groups, vectors, machine)
        sums = amx.cycles_of_call(rows, strip.keys // BF16.group, values, machine)
        size = 4 * rows * strip.groups
        moving = cost.move_cycles(size, size, size, machine)
        configuring = amx.cycles_between(strip.groups, strip.keys // BF16.group, machine)
        return -(-(positions or rows) // rows) * (scores + sums + moving + configuring)

    heights = [amx.ROWS] if positions is None else range(amx.FEWEST_ROWS, min(positions, 2 * amx.ROWS) + 1)
    sizes = [fewest + more * amx.LANES for more in range(_MORE_KEYS if keys else 1)]
    strips = [
        TiledStrip(height, size, amx.fill(depth))
        for size in sizes
        for height in heights
        if amx.fill(size // BF16.group) == size // BF16.group
    ]
    best = min(strips, key=lambda strip: (round(estimate(strip)), strip.positions, strip.keys))
    vectors = -(-(keys or _KEYS_OF_CALL) // machine.lanes)
    by_dots = sum(
        wide * tiles.cycles(positions or best.positions, size, wide, machine)
        for size, wide in ((depth, vectors), (vectors * machine.lanes // BF16.group, values))
    )
    return best if estimate(best) <= by_dots else None


@dataclass(frozen=True)
class Plan:
    """Scaled dot-product attention (Vaswani et al., 2017) in a function, and where its operands lie.

    Queries, keys and values have the dimensions `[batch, position, head, channel]`. `places` are those of their
    elements in the function's tensors with the `numbers`; a mask is the tensor after these. There are `heads` heads of
    queries, of `channels` channels; `group` neighbouring ones share a head of keys and values (Ainslie et al., "GQA",
    2023). The scores are multiplied by `scale`. A mask that excludes every key makes the result of a query NaN. `zeros`
    says which queries have zeros instead: none (None), those whose weights are NaN (`ZERO_FOR_NAN`), or those whose
    scores are all minus infinity (`ZERO_WITHOUT_KEYS`).
    """

    places: tuple[Places, Places, Places]
    numbers: tuple[int, ...]
    heads: int
    channels: int
    group: int
    scale: float
    zeros: str | None

    @property
    def text(self) -> str:
        """Return the plan as text, for `read`."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def read(cls, text: str) -> "Plan":
        """Return the plan that a text holds."""
        values = json.loads(text)
        values["places"] = tuple(tuple(map(tuple, places)) for places in values["places"])
        return cls(**{**values, "numbers": tuple(values["numbers"])})

    def count_queries(self, tensors: Sequence[Any]) -> Any:
        """Return the number of queries of a head, by the function's tensors."""
        return size_of(tensors[self.numbers[0]], self.places[0], 1)

    def define(
        self,
        tensors: Sequence[te.Tensor],
        machine: Machine,
        shape: Sequence[Any] | None = None,
        keys: Any | None = None,
        *,
        bf16: bool = False,
        is_single: bool = False,
    ) -> te.Tensor:
        """Define the attention over the function's tensors; return `[batch, position, head, channel]` in float32.

        Where heads share keys, the dimension of the heads is two: those of the keys, and the heads of each. The
        tensors are float32. With `bf16` they are that or bfloat16, stored as uint16: tensors of float32 are rounded
        first, and the exponentials that weigh the values are rounded, too; both products are dot products of pairs,
        whose sums are float32, or AMX's. The number of channels must be even then. The mask is added to the
        scaled scores and has the shape `[batch or 1, heads or 1, queries or 1, keys]`. `shape` is that of the queries
        and `keys` the number of keys, by default as the tensors have them.

        The schedule takes a strip of a few queries at a time through all stages, as in "FlashAttention" (Dao et al.,
        2022), but with whole rows of scores, which fit the cache. The keys are packed for it first. With `is_single`
        they are read in place, for one query of each head at a time, in float32 alone (`takes_single_queries` says for
        which sizes).
        """
        if shape is None:
            last = (tirx.IntImm("int64", size) for size in (self.heads, self.channels))
            batch = size_of(tensors[self.numbers[0]], self.places[0], 0)
            shape = (batch, self.count_queries(tensors), *last)
        keys = size_of(tensors[self.numbers[1]], self.places[1], 1, keys)
        operands, (*mask,) = tensors[: max(self.numbers) + 1], tensors[max(self.numbers) + 1 :]
        if bf16:
            operands = [_rounded(operand) for operand in operands]
        query, key, value = (
            partial(element_of, operands[number], places)
            for number, places in zip(self.numbers, self.places, strict=True)
        )
        tiled = choose_tiled(static(shape[1]), static(keys), self.channels, machine) if bf16 else None
        if is_single:
            stages: _Stages = _SingleQueries(shape, keys, self.group, machine)
        elif tiled is not None:
            stages = _TiledStages(shape, keys, self.group, machine, tiled)
        else:
            stages = _Stages(shape, keys, self.group, machine, bf16, are_apart=self.places[2][-2][0] != 1)
        exponential, total = stages.softmax(stages.scores(query, key), mask[0] if mask else None, self.scale)
        # Without keys the sum is zero, and so is the result; one of scores that are minus infinity is NaN.
        has_keys = tirx.const(True, "bool") if static(keys) is not None else keys > 0
        inverse = te.compute(total.shape, lambda *row: tirx.Select(has_keys, 1.0 / total[row], 0.0), name="inverse")
        mixed = stages.mixed(exponential, value)

        def result(b: Any, s: Any, h: Any, g: Any, c: Any) -> Any:
            row = (b, h, g, s)
            element = mixed[(*row, c)] * inverse[row]
            if self.zeros is None:
                return element
            # The sum is at least one, unless it is NaN or all scores are minus infinity: then it is zero.
            zero = tirx.const(0.0, "float32")
            if self.zeros == ZERO_FOR_NAN:
                return tirx.Select(total[row] > 0.0, element, zero)
            return tirx.Select(total[row] == 0.0, zero, element)

        if self.group == 1:
            return te.compute(tuple(shape), lambda b, s, h, c: result(b, s, h, 0, c), name="attention")
        batch, queries, heads, channels = shape
        sizes = (batch, queries, heads // self.group, tirx.IntImm("int64", self.group), channels)
        return te.compute(sizes, result, name="attention")


def element_of(tensor: te.Tensor, places: Places, *index: Any) -> Any:
    """Return the element of an operand at an index, read from the tensor where it has these places."""
    return tensor[tuple(start if dim is None else index[dim] * step + start for dim, step, start in places)]


def size_of(tensor: Any, places: Places, dim: int, size: Any | None = None) -> Any:
    """Return the size of an operand along a dimension, by the variables of the function that reads it as `tensor`.

    `size` is what the caller knows of it: a number is the size. Along a dimension that is none of the tensor's, it is
    `size`, or one.
    """
    if static(size) is not None:
        return size
    own = next((own for own, (at, _, _) in zip(tensor.shape, places, strict=True) if at == dim), size)
    return tirx.const(1, "int64") if own is None else own


def _rounded(tensor: te.Tensor) -> te.Tensor:
    """A tensor in bfloat16, stored as uint16, which it may be already."""
    if tensor.dtype != "float32":
        return tensor
    return te.compute(tensor.shape, lambda *index: round_bf16(tensor[index]), name="rounded")


class _Stages:
    """The stages of attention, as `Plan` describes it: their sizes, and the tiles of both products.

    A row of the products is a query, by batch, head of keys, head among those that share keys, and position. The
    positions are filled up to whole strips, the keys of the scores to whole tiles. In bfloat16 the innermost dimension
    of an operand's panel is the pair of numbers that a lane multiplies at a time. Values that `are_apart`, because
    those of other heads lie between them, are copied side by side where many strips read them.
    """

    def __init__(
        self,
        shape: Sequence[Any],
        keys: Any,
        group: int,
        machine: Machine,
        bf16: bool = False,
        are_apart: bool = False,
    ) -> None:
        batch, self._positions, heads, channels = shape
        self._keys, self._group, self._depth, self._bf16 = keys, group, int(channels), bf16
        self._lanes, self._value_lanes = machine.lanes, vector(self._depth, machine)
        self._strip = self._choose_strip(machine)
        # The scores have a number of keys that this one divides.
        self._key_tile = self._strip.keys * self._lanes
        self._row_sizes = [batch, heads // group, tirx.IntImm("int64", group)]
        self._row_sizes.append(round_up(self._positions, self._strip.positions))
        self._score_sizes = (*self._row_sizes, round_up(keys, self._key_tile))
        self._is_whole = divides(self._strip.positions, self._positions)
        queries = static(self._positions)
        has_many_strips = queries is None or queries >= _MANY_STRIPS * self._strip.positions
        self._copies_values = are_apart and has_many_strips
        self._pair = (BF16.group,) if bf16 else ()
        self._numbers = math.prod(self._pair)
        self._zero = tirx.const(0, BF16.data if bf16 else "float32")
        self._multiply = BF16.product if bf16 else operator.mul
        self._dot: dict[str, Any] = {DOT: BF16.name} if bf16 else {}

    def _choose_strip(self, machine: Machine) -> Strip:
        strip = choose(static(self._positions), self._group, static(self._keys), self._depth, machine)
        return strip if self._value_lanes == machine.lanes else replace(strip, values=1)

    def scores(self, query: Element, key: Element) -> te.Tensor:
        """The products of queries and keys, by row and key; `softmax` scales them."""
        tile = self._key_tile
        key_panel = self._key_panel(key, tile, self._depth // self._numbers)

        def source(b: Any, h: Any, g: Any, s: Any, d: Any) -> Any:
            return query(b, self._inside(s), h * self._group + g, d)

        if not self._is_whole:
            panel = te.compute((*self._row_sizes, self._depth), source, name="panel")

            def source(b: Any, h: Any, g: Any, s: Any, d: Any) -> Any:
                return panel[b, h, g, s, d]

        d, within = self._axes(self._depth // self._numbers, "d")
        return te.compute(
            self._score_sizes,
            lambda b, h, g, s, t: te.sum(
                self._multiply(
                    source(b, h, g, s, self._place(d, within)), key_panel[(b, h, t // tile, d, t % tile, *within)]
                ),
                axis=[d, *within],
            ),
            name="scores",
            attrs={**self._annotations("attention"), **self._dot},
        )

    def _key_panel(self, key: Element, tile: int, steps: int) -> te.Tensor:
        """The keys `tile` by `tile`, those of a tile together: `[batch, head, tile, step, key, pair]`.

        A key has `steps` steps of a sum. Beyond the last key and its last channel there are zeros.
        """
        has_more = not divides(self._key_tile, self._keys)

        def packed_key(b: Any, h: Any, far: Any, d: Any, near: Any, *within: Any) -> Any:
            t = far * tile + near
            channel = self._place(d, within)
            return self._filled(key, b, t, h, channel, steps, t < self._keys if has_more else None)

        batch, heads = self._row_sizes[:2]
        sizes = (batch, heads, topi.utils.simplify(self._score_sizes[-1] // tile), steps, tile, *self._pair)
        return te.compute(sizes, packed_key, name="keys")

    def _filled(self, of: Element, b: Any, at: Any, h: Any, d: Any, steps: int, exists: Any = None) -> Any:
        """An element of queries or keys that have so many steps of a sum, zero beyond their last channel.

        It is zero where it does not exist, too; None for `exists` means that it does.
        """
        is_filled = steps * self._numbers != self._depth
        conditions = [item for item in (exists, d < self._depth if is_filled else None) if item is not None]
        value = of(b, at, h, tirx.min(d, self._depth - 1) if is_filled else d)
        return tirx.if_then_else(tirx.all(*conditions), value, self._zero) if conditions else value

    def _annotations(self, kernel: str) -> dict[str, Any]:
        return {
            KERNEL: kernel,
            TILE: [self._strip.positions, self._strip.heads],
            LANES: self._lanes,
            VECTORS: [self._strip.keys, self._strip.values],
        }

    def softmax(self, scores: te.Tensor, mask: te.Tensor | None, scale: float) -> tuple[te.Tensor, te.Tensor]:
        """The exponentials of the scores, less the largest of their row, and the sum of each row.

        `mask` is added to the scores; None adds nothing.
        """
        masked = self._masked(scores, scale, mask)
        logits = te.compute(self._score_sizes, masked, name="logits")
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
        """The sums of the values, each times the exponential of its score, by row and channel."""
        depth = round_up(self._depth, self._value_lanes * self._strip.values)
        values = self._values(value, depth)
        t, within = self._axes(parts(self._keys, self._numbers) if self._bf16 else self._keys, "t")
        return te.compute(
            (*self._row_sizes, depth),
            lambda b, h, g, s, c: te.sum(
                self._multiply(exponential[b, h, g, s, self._place(t, within)], values(b, t, h, c, *within)),
                axis=[t, *within],
            ),
            name="mixed",
            attrs={LANES: self._value_lanes, **self._dot},
        )

    def _values(self, value: Element, depth: Any) -> Callable[..., Any]:
        """The element of the values at a batch, step of the sum, head and channel, of which there are `depth`."""
        (batch, heads), keys = self._row_sizes[:2], self._keys
        if self._bf16:

            def packed_value(b: Any, h: Any, t: Any, c: Any, g: Any) -> Any:
                # Clamp the index: vector code reads first and selects afterwards, so every read must be in bounds.
                place = self._place(t, [g])
                element = value(b, tirx.min(place, keys - 1), h, tirx.min(c, self._depth - 1))
                return tirx.if_then_else(tirx.all(place < keys, c < self._depth), element, self._zero)

            sizes = (batch, heads, parts(keys, self._numbers), depth, self._numbers)
            value_pairs = te.compute(sizes, packed_value, name="values")
            return lambda b, t, h, c, g: value_pairs[b, h, t, c, g]
        if int(depth) == self._depth and not self._copies_values:
            return value
        value_panel = te.compute(
            (batch, heads, keys, depth),
            lambda b, h, t, c: tirx.if_then_else(c < self._depth, value(b, t, h, c), self._zero),
            name="values",
        )
        return lambda b, t, h, c: value_panel[b, h, t, c]

    def _inside(self, position: Any) -> Any:
        """The position of a row, the last one for rows that fill up the last strip."""
        return position if self._is_whole else tirx.min(position, self._positions - 1)

    def _axes(self, steps: Any, name: str) -> tuple[Any, list[Any]]:
        """The axes of a sum of `steps` steps: over the steps, and in bfloat16 over the pair of each step."""
        return te.reduce_axis((0, steps), name), [te.reduce_axis((0, size), "g") for size in self._pair]

    def _place(self, step: Any, within: Sequence[Any]) -> Any:
        """The channel, key or value of a step of a sum: each step has a pair of them, or one."""
        return step * self._numbers + within[0] if within else step

    def _masked(self, scores: te.Tensor, scale: float, mask: te.Tensor | None) -> Callable[..., Any]:
        """Scale the scores, add the mask, put minus infinity beyond the last key; return the element at an index."""
        lowest = tirx.const(-math.inf, "float32")
        keys, is_whole = self._keys, divides(self._key_tile, self._keys)

        def scaled(*index: Any) -> Any:
            return scores[index] if scale == 1.0 else scores[index] * tirx.const(scale, "float32")

        if mask is None:
            return scaled if is_whole else lambda *index: tirx.Select(index[-1] < keys, scaled(*index), lowest)
        sum_with_mask = mask
        if not is_whole:
            sum_with_mask = te.compute(
                (*mask.shape[:-1], scores.shape[-1]),
                lambda *index: tirx.if_then_else(index[-1] < keys, mask[index], lowest),
                name="mask",
            )
        single = [static(size) == 1 for size in mask.shape]

        def element(b: Any, h: Any, g: Any, s: Any, t: Any) -> Any:
            places = (b, h * self._group + g, self._inside(s))
            place = [0 if one else at for one, at in zip(single, places, strict=False)]
            return scaled(b, h, g, s, t) + sum_with_mask[(*place, t)]

        return element


class _TiledStages(_Stages):
    """The stages of attention whose products AMX computes, in bfloat16: each call of a kernel for a strip of queries.

    The queries of a strip are copied side by side.
    """

    def __init__(self, shape: Sequence[Any], keys: Any, group: int, machine: Machine, strip: TiledStrip) -> None:
        self._tiled = strip
        super().__init__(shape, keys, group, machine, bf16=True)
        self._value_lanes = amx.LANES

    def _choose_strip(self, machine: Machine) -> Strip:
        values = -(-self._depth // amx.LANES)
        return Strip(self._tiled.positions, 1, self._tiled.keys // amx.LANES, values)

    def scores(self, query: Element, key: Element) -> te.Tensor:
        """The products of queries and keys, by row and key; `softmax` scales them."""
        lanes, groups = amx.LANES, self._tiled.groups
        key_panel = self._key_panel(key, lanes, groups)

        def copied(b: Any, h: Any, g: Any, s: Any, d: Any) -> Any:
            return self._filled(query, b, self._inside(s), h * self._group + g, d, groups)

        panel = te.compute((*self._row_sizes, groups * self._numbers), copied, name="panel")
        d, (within,) = self._axes(groups, "d")
        return te.compute(
            self._score_sizes,
            lambda b, h, g, s, t: te.sum(
                BF16.product(
                    panel[b, h, g, s, self._place(d, [within])], key_panel[b, h, t // lanes, d, t % lanes, within]
                ),
                axis=[d, within],
            ),
            name="scores",
            attrs={**self._annotations("attention"), DOT: BF16.name, AMX: [groups]},
        )

    def mixed(self, exponential: te.Tensor, value: Element) -> te.Tensor:
        """The sums of the values, each times the exponential of its score, by row and channel."""
        batch, heads = self._row_sizes[:2]
        lanes, steps, vectors = amx.LANES, self._tiled.keys // self._numbers, self._strip.values
        calls = topi.utils.simplify(self._score_sizes[-1] // self._tiled.keys)

        has_more, is_filled = not divides(self._key_tile, self._keys), self._depth % lanes > 0

        def packed_value(b: Any, h: Any, call: Any, far: Any, step: Any, near: Any, g: Any) -> Any:
            place, c = self._place(call * steps + step, [g]), far * lanes + near
            ends = [*([place < self._keys] if has_more else []), *([c < self._depth] if is_filled else [])]
            element = value(b, place, h, c)
            return tirx.if_then_else(tirx.all(*ends), element, self._zero) if ends else element

        sizes = (batch, heads, calls, vectors, steps, lanes, self._numbers)
        panel = te.compute(sizes, packed_value, name="values")
        is_single = static(calls) == 1
        call = 0 if is_single else te.reduce_axis((0, calls), "call")
        t, (within,) = self._axes(steps, "t")
        return te.compute(
            (*self._row_sizes, vectors * lanes),
            lambda b, h, g, s, c: te.sum(
                BF16.product(
                    exponential[b, h, g, s, self._place(call * steps + t, [within])],
                    panel[b, h, call, c // lanes, t, c % lanes, within],
                ),
                axis=[t, within] if is_single else [call, t, within],
            ),
            name="mixed",
            attrs={LANES: lanes, DOT: BF16.name, AMX: [steps]},
        )


def takes_single_queries(channels: int, machine: Machine) -> bool:
    """Whether `Plan.define` takes single queries with heads of so many channels: they fill whole vectors."""
    return math.gcd(channels, machine.lanes) >= NARROWEST


class _SingleQueries(_Stages):
    """The stages of attention for a single query of each head, such as that of the next token of a text.

    Keys and values are read once and in place: to pack the keys would take longer than the products. The products of a
    query and a key are summed lane by lane, and then the lanes.
    """

    def _choose_strip(self, machine: Machine) -> Strip:
        """Half of the registers hold the sums of a tile: at most a quarter of these the queries, then their values."""
        self._value_lanes = math.gcd(self._depth, self._lanes)
        sums, wide = machine.registers // 2, self._depth // self._value_lanes
        heads = max(count for count in range(1, sums // 4 + 1) if self._group % count == 0)
        values = max(count for count in range(1, wide + 1) if wide % count == 0 and count * heads <= sums)
        return Strip(1, heads, 1, values)

    def scores(self, query: Element, key: Element) -> te.Tensor:
        """The products of queries and keys, by row and key."""
        lanes = math.gcd(self._depth, self._lanes)
        d = te.reduce_axis((0, self._depth // lanes), "d")

        def product(b: Any, h: Any, g: Any, s: Any, t: Any, lane: Any) -> Any:
            channel = d * lanes + lane
            place = t if divides(self._key_tile, self._keys) else tirx.min(t, self._keys - 1)
            return te.sum(query(b, s, h * self._group + g, channel) * key(b, place, h, channel), axis=d)

        attrs = self._annotations("attention.single")
        sums = te.compute((*self._score_sizes, lanes), product, name="products", attrs=attrs)
        while lanes > 1:
            lanes //= 2
            sums = _add_halves(sums, lanes)
        return te.compute(self._score_sizes, lambda *index: sums[(*index, 0)], name="scores")


def _add_halves(sums: te.Tensor, lanes: int) -> te.Tensor:
    """Add to each of the first `lanes` lanes of vectors, which have twice as many, the lane of the second half."""

    def element(*index: Any) -> Any:
        return sums[index] + sums[(*index[:-1], index[-1] + lanes)]

    return te.compute((*sums.shape[:-1], lanes), element, name=f"lanes_{lanes}")


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
