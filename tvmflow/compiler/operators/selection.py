"""The first of the sorted elements along a dimension: ONNX's TopK.

TVM sorts all elements. Here one pass over the elements inserts each into the first ones so far, if these are few.
Otherwise it collects the elements that may be among the first ones. When about twice as many are collected as are asked
for, the first ones of these remain, and what comes after all of them is not collected any more. So the time for an
element does not depend on how many are asked for, whatever their order; only the first ones are sorted.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from tvm import relax, tirx, topi
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler import extensions
from tvmflow.compiler.annotations import KERNEL
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import buffer, folded, registers, round_up, size_parameter, static
from tvmflow.compiler.vectormath import is_nan, let

_INT32 = tirx.max_value("int32").value
# The type of the keys of elements, by theirs.
_KEYS = {"float32": "int32", "int32": "int32", "float64": "int64", "int64": "int64"}
# Vectors of elements that are collected beyond those asked for before the first ones are chosen, at least.
_SPARE = 8
# Vectors of a block whose elements are sorted by counting.
_BLOCK = 8


def lower(builder: relax.BlockBuilder, call: relax.Call, machine: Machine) -> relax.Expr | None:
    """Define the values and places of the `k` largest or smallest numbers of 32 or 64 bits along an axis.

    Equal numbers keep their order, and NaN counts as the largest number. Returns None for other types and for unknown
    shapes. TVM dispatches sorts before it legalises, so this is no definition for `LegalizeOps`.
    """
    (data,), attrs = call.args, call.attrs
    dtype = str(data.ty.dtype)
    if dtype not in _KEYS or not isinstance(data.ty.shape, relax.ShapeExpr) or not data.ty.ndim:
        return None
    shape, axis, count = list(data.ty.shape.values), int(attrs.axis) % data.ty.ndim, int(attrs.k)
    if str(attrs.ret_type) != "both" or str(attrs.dtype) != "int64" or not 0 < count <= _size(shape[axis]):
        return None
    kernel = _Kernel(shape, axis, count, dtype, largest=bool(attrs.largest), machine=machine)
    function = extensions.emit_function(builder, kernel.function(), "top_k")
    # TVM fails on a function that reads one operand and has no blocks: it looks for reshapes among these.
    return relax.call_tir(function, [data, relax.const(0, dtype)], list(call.ty.fields))


def lower_place(builder: relax.BlockBuilder, call: relax.Call, machine: Machine, *, largest: bool) -> relax.Expr | None:
    """Define ArgMax (`largest`) or ArgMin: the place of a number of 32 or 64 bits in each line along an axis.

    Of equal numbers the first one counts, and NaN as the largest number. Returns None for other types, for a place
    among all numbers of a tensor, and for unknown shapes.
    """
    (data,), axis = call.args, call.attrs.axis
    dtype = str(data.ty.dtype)
    if dtype not in _KEYS or axis is None:
        return None
    if not isinstance(data.ty.shape, relax.ShapeExpr) or not isinstance(call.ty.shape, relax.ShapeExpr):
        return None
    shape = list(data.ty.shape.values)
    if not shape or str(call.ty.dtype) != "int64":
        return None
    kernel = _Kernel(shape, int(axis) % len(shape), 1, dtype, largest=largest, machine=machine)
    function = kernel.place_function(keepdims=bool(call.attrs.keepdims))
    variable = extensions.emit_function(builder, function, call.op.name.rpartition(".")[2])
    return relax.call_tir(variable, [data, relax.const(0, dtype)], call.ty)


class _Collection(NamedTuple):
    """Buffers of the keys and places of the elements of a line that may be among the first ones, in their order.

    `number` has their number, and `least` a key: elements that follow are collected if their keys are above it.
    """

    keys: Any
    order: Any
    number: Any
    least: Any


class _Kernel:
    """Builds the TIR function that selects `count` elements of each line of a tensor of `dtype` along an axis."""

    def __init__(self, shape: list[Any], axis: int, count: int, dtype: str, *, largest: bool, machine: Machine) -> None:
        self._count, self._dtype, self._largest, self._machine = count, dtype, largest, machine
        self._key_type = _KEYS[dtype]
        self._bits = 8 * np.dtype(self._key_type).itemsize
        self._greatest = tirx.max_value(self._key_type).value
        # No key of a float is as small. That of an integer may be, and is found where no other elements are left.
        self._least = -self._greatest - 1
        own = [size_parameter(size, f"n{place}") for place, size in enumerate(shape)]
        one = tirx.IntImm("int64", 1)
        self._size, self._inner = own[axis], math.prod(own[axis + 1 :], start=one)
        self._lines = topi.utils.simplify(math.prod(own[:axis], start=one) * self._inner)
        self._others = [own[:axis], own[axis + 1 :]]
        self._data, self._zero = buffer("data", own, dtype), buffer("zero", (), dtype)

    def function(self) -> tirx.PrimFunc:
        """Return the function of the values and the places of the chosen elements.

        Its attribute `KERNEL` tells the schedules to leave it unchanged.
        """
        before, after = self._others
        shape = [*before, tirx.IntImm("int64", self._count), *after]
        return self._function(buffer("values", shape, self._dtype), buffer("places", shape, "int64"))

    def place_function(self, *, keepdims: bool) -> tirx.PrimFunc:
        """Return the function of the places of the first elements, in all lines; the line itself is a dimension of 1.

        Without `keepdims` the result has no such dimension.
        """
        before, after = self._others
        return self._function(buffer("places", [*before, *[tirx.IntImm("int64", 1)] * keepdims, *after], "int64"))

    def _function(self, *results: Any) -> tirx.PrimFunc:
        """The function of these results: the places come last, and may follow the values."""
        with IRBuilder() as builder, T.seq_scope():
            total = self._lines * self._count
            sizes = [self._lines * self._size, *[total] * len(results)]
            self._x, *values, places = (
                T.decl_buffer((size,), item.dtype, data=item.data, layout=None)
                for item, size in zip((self._data, *results), sizes, strict=True)
            )
            is_alone = self._machine.cores == 1 or static(self._lines) == 1
            loop = T.serial if is_alone else T.parallel
            if values or not self._fills_vectors_with_lines():
                self._write_lines(values, places, loop)
            else:
                self._write_places(places, loop)
        return tirx.PrimFunc([self._data, self._zero, *results], builder.get().body).with_attr(KERNEL, "selection")

    def _write_lines(self, values: Sequence[Any], places: Any, loop: Any) -> None:
        """Write the chosen elements of each line."""
        with loop(0, self._lines) as line:
            outer, inner = tirx.floordiv(line, self._inner), tirx.floormod(line, self._inner)
            self._begin = outer * self._size * self._inner + inner
            order = self._inserted() if self._count <= self._machine.lanes else self._collected()
            first = outer * self._count * self._inner + inner
            with T.serial(0, self._count) as place:
                own = _long(order[place])
                for result in values:
                    T.buffer_store(result, self._element(own), [first + place * self._inner])
                T.buffer_store(places, own, [first + place * self._inner])

    def _fills_vectors_with_lines(self) -> bool:
        """Whether a vector for each of a line's elements takes fewer steps than to look for one within the line."""
        size, lanes = static(self._size), self._machine.lanes
        return static(self._inner) != 1 or (size is not None and size < lanes * lanes)

    def _write_places(self, places: Any, loop: Any) -> None:
        """Write the place of the first element of each line; a vector has an element of each of several lines.

        No step depends on the numbers: in lines of random order, a branch for each element is often predicted wrongly.
        """
        lanes = self._machine.lanes
        is_dense = static(self._inner) == 1
        # Lines whose elements are one behind the other, or those of a block whose elements are side by side.
        number = self._lines if is_dense else self._inner
        blocks = topi.utils.simplify(tirx.floordiv(self._lines, number))
        vectors = topi.utils.simplify(tirx.floordiv(number, lanes))
        if static(vectors) != 0:
            with loop(0, blocks * vectors) as task:
                first = tirx.floormod(task, vectors) * lanes
                self._write_places_of(places, tirx.floordiv(task, vectors), number, first, lanes)
        with T.serial(0, blocks) as block, T.serial(vectors * lanes, number) as line:
            self._write_places_of(places, block, number, line, 1)

    def _write_places_of(self, places: Any, block: Any, number: Any, first: Any, lanes: int) -> None:
        """Write the places of `lanes` lines, from the `first` of the `number` of a block on."""
        keys, candidates, order = self._keys(lanes), self._keys(lanes), _integers(lanes)
        is_dense = static(self._inner) == 1

        def store(target: Any, value: Callable[[Any], Any]) -> None:
            with T.vectorized(0, lanes) as lane:
                T.buffer_store(target, value(lane), [lane])

        store(keys, lambda _: self._to_key(self._least))
        store(order, lambda _: _int(0))
        with T.serial(0, self._size) as place:
            row, start = (place, first * self._size) if is_dense else (place * number, first)
            begin, step = block * self._size * number + start + row, self._size if is_dense else 1
            store(candidates, lambda lane: self._key(self._x[begin + lane * step]))
            own = place.astype("int32")
            store(order, lambda lane: tirx.Select(candidates[lane] > keys[lane], own, order[lane]))
            store(keys, lambda lane: tirx.max(candidates[lane], keys[lane]))
        with T.vectorized(0, lanes) as lane:
            T.buffer_store(places, _long(order[lane]), [block * number + first + lane])

    def _inserted(self) -> Any:
        """Insert the elements of a line into the first ones; return the places of these in order, in a buffer."""
        count = self._count
        # The keys of the first elements, after one that none exceeds, and their places.
        keys, order, rank = self._keys(count + 1), _integers(count), _integers(1)
        T.buffer_store(keys, self._to_key(self._greatest), [0])
        with T.serial(0, count) as place:
            T.buffer_store(keys, self._to_key(self._least), [place + 1])
            T.buffer_store(order, _int(0), [place])
        with (
            self._vectors() as (start, following),
            self._if_one_is_above(following, keys[count]),
            T.serial(0, self._machine.lanes) as lane,
            T.If(following[lane] > keys[count]),
            T.Then(),
        ):
            T.buffer_store(rank, _int(count - 1), [0])
            if count > 1:
                with T.While(keys[rank[0]] < following[lane]):
                    T.buffer_store(keys, keys[rank[0]], [rank[0] + 1])
                    T.buffer_store(order, order[rank[0] - 1], [rank[0]])
                    T.buffer_store(rank, rank[0] - 1, [0])
            T.buffer_store(keys, following[lane], [rank[0] + 1])
            T.buffer_store(order, tirx.Cast("int32", start + lane), [rank[0]])
        if self._has_least():
            with T.If(self._is_least(keys[count])), T.Then():
                T.buffer_store(rank, _int(0), [0])
                with T.serial(0, count) as place:
                    is_chosen = keys[place + 1] > self._to_key(self._least)
                    T.buffer_store(rank, rank[0] + tirx.Cast("int32", is_chosen), [0])
                self._fill_with_least(order, rank)
        return order

    def _collected(self) -> Any:
        """Collect the first elements of a line and sort them; return their places in order, in a buffer."""
        lanes, count = self._machine.lanes, self._count
        room = round_up(count + max(count, _SPARE * lanes), lanes)
        collection = _Collection(self._keys(room), _integers(room), _integers(1), self._keys(1))
        keys, order, number, least = collection
        T.buffer_store(number, _int(0), [0])
        T.buffer_store(least, self._to_key(self._least), [0])
        with self._vectors() as (start, following):
            with self._if_one_is_above(following, least[0]), T.serial(0, lanes) as lane:
                T.buffer_store(keys, following[lane], [number[0]])
                T.buffer_store(order, tirx.Cast("int32", start + lane), [number[0]])
                T.buffer_store(number, number[0] + tirx.Cast("int32", following[lane] > least[0]), [0])
            # There is room for all of the next vector. At the end, the first elements remain.
            most = tirx.Select(start + lanes < self._size, _int(room - 2 * lanes), _int(count))
            with T.If(number[0] > most), T.Then():
                self._keep(collection)
        # Of fewer elements than are asked for, which a size known at run can have, the first one fills the rest.
        with T.serial(0, tirx.max(_int(round_up(count, lanes)) - number[0], 0)) as place:
            T.buffer_store(keys, self._to_key(self._least), [number[0] + place])
            T.buffer_store(order, _int(0), [number[0] + place])
        chosen = self._sorted(keys, order, count)
        if self._has_least():
            with T.If(number[0] < count), T.Then():
                self._fill_with_least(chosen, number)
        return chosen

    def _has_least(self) -> bool:
        """Whether an element that is not the first one may have the smallest key, which no element is compared with."""
        return self._dtype == self._key_type and self._count > 1

    def _is_least(self, key: Any) -> Any:
        # TVM takes no number for the smallest integer of 32 bits.
        return tirx.bitwise_not(key) == self._to_key(self._greatest)

    def _fill_with_least(self, order: Any, number: Any) -> None:
        """Put the places of the elements with the smallest key after the `number` of those chosen in `order`."""
        with T.serial(0, self._size) as place:
            is_next = self._is_least(self._key(self._element(place))) & (number[0] < self._count)
            with T.If(is_next), T.Then():
                T.buffer_store(order, tirx.Cast("int32", place), [number[0]])
                T.buffer_store(number, number[0] + 1, [0])

    @contextmanager
    def _vectors(self) -> Iterator[tuple[Any, Any]]:
        """Loop over the vectors of a line: the place of the first element, and a buffer of keys.

        Behind the end of the line are the smallest keys.
        """
        lanes = self._machine.lanes
        keys = self._keys(lanes)
        with T.serial(0, tirx.floordiv(self._size + (lanes - 1), lanes)) as vector:
            start = vector * lanes
            # The elements of a line may be apart.
            with T.If(start + lanes <= self._size if static(self._inner) == 1 else tirx.const(False, "bool")):
                with T.Then(), T.vectorized(0, lanes) as lane:
                    T.buffer_store(keys, self._key(self._element(start + lane)), [lane])
                with T.Else():
                    with T.vectorized(0, lanes) as lane:
                        T.buffer_store(keys, self._to_key(self._least), [lane])
                    with T.serial(0, tirx.min(self._size - start, lanes)) as lane:
                        T.buffer_store(keys, self._key(self._element(start + lane)), [lane])
            yield start, keys

    def _keep(self, collection: _Collection) -> None:
        """Keep the first elements of a collection, in the order of their places.

        The key of the last of them is found by halving the range of keys.
        """
        keys, order, number, least = collection
        low, high, middle = (self._keys(1) for _ in range(3))
        above, ties, kept = (_integers(1) for _ in range(3))
        count, lanes = self._count, self._machine.lanes
        sums, vectors = _integers(lanes), tirx.floordiv(number[0] + (lanes - 1), _int(lanes))
        with T.vectorized(0, lanes) as lane:
            T.buffer_store(keys, self._to_key(self._least), [number[0] + tirx.Cast("int32", lane)])

        def add(is_counted: Callable[[Any], Any]) -> None:
            with T.vectorized(0, lanes) as lane:
                T.buffer_store(sums, _int(0), [lane])
            with T.serial(0, vectors) as vector, T.vectorized(0, lanes) as lane:
                key = keys[vector * lanes + tirx.Cast("int32", lane)]
                T.buffer_store(sums, sums[lane] + tirx.Cast("int32", is_counted(key)), [lane])
            T.buffer_store(above, folded(operator.add, sums, lanes), [0])

        T.buffer_store(low, least[0], [0])
        T.buffer_store(high, self._to_key(self._greatest), [0])
        with T.While(low[0] < high[0]):
            # Half of the sum, rounded up, without the sum itself.
            T.buffer_store(middle, (low[0] | high[0]) - ((low[0] ^ high[0]) >> 1), [0])
            add(lambda key: key >= middle[0])
            with T.If(above[0] >= _int(count)):
                with T.Then():
                    T.buffer_store(low, middle[0], [0])
                    with T.If(above[0] == _int(count)), T.Then():
                        T.buffer_store(high, middle[0], [0])
                with T.Else():
                    T.buffer_store(high, middle[0] - 1, [0])
        add(lambda key: key > low[0])
        # Of the elements whose key is the last one, so many are among the first.
        T.buffer_store(ties, _int(count) - above[0], [0])
        T.buffer_store(kept, _int(0), [0])
        with T.serial(0, number[0]) as place:
            T.buffer_store(high, keys[place], [0])
            T.buffer_store(keys, high[0], [kept[0]])
            T.buffer_store(order, order[place], [kept[0]])
            is_tie = tirx.Cast("int32", high[0] == low[0]) & tirx.Cast("int32", ties[0] > 0)
            T.buffer_store(above, is_tie, [0])
            T.buffer_store(ties, ties[0] - above[0], [0])
            T.buffer_store(kept, kept[0] + (tirx.Cast("int32", high[0] > low[0]) | above[0]), [0])
        T.buffer_store(number, _int(count), [0])
        T.buffer_store(least, low[0], [0])

    @contextmanager
    def _if_one_is_above(self, keys: Any, least: Any) -> Iterator[None]:
        """Where one of a vector of keys is above `least`."""
        with T.If(folded(tirx.max, keys, self._machine.lanes) > least), T.Then():
            yield

    def _sorted(self, keys: Any, order: Any, count: int) -> Any:
        """Sort `count` elements, of which equal ones are in the order of their places; return the buffer of places.

        The place of an element in a block is the number of elements of the block before it. Sorted blocks are merged.
        Up to a whole vector, the smallest keys follow.
        """
        lanes = self._machine.lanes
        width = _BLOCK * lanes
        # A merge reads one element behind each of its two runs.
        room = round_up(count, lanes) + lanes
        source, target = (self._keys(room), _integers(room)), (keys, order)
        ranks = _integers(lanes)

        def is_before(one: Any, other: Any) -> Any:
            return (keys[one] > keys[other]) | ((keys[one] == keys[other]) & (one < other))

        for start in range(0, count, width):
            end = min(start + width, count)
            with T.serial(0, -(-(end - start) // lanes)) as vector:
                first = start + vector * lanes
                with T.vectorized(0, lanes) as lane:
                    T.buffer_store(ranks, _int(start), [lane])
                # Of equal elements, those of the vectors before come first, and those of the vectors behind last.
                for begin, number, precedes in (
                    (start, first - start, lambda other, place: keys[other] >= keys[place]),
                    (first, lanes, is_before),
                    (first + lanes, end - first - lanes, lambda other, place: keys[other] > keys[place]),
                ):
                    with T.serial(0, number) as other, T.vectorized(0, lanes) as lane:
                        counted = tirx.Cast("int32", precedes(begin + other, first + lane))
                        T.buffer_store(ranks, ranks[lane] + counted, [lane])
                # After the last merge, nothing reads the keys: TVM fails on a buffer without a reader.
                for to, item in list(zip(source, target, strict=True))[width >= count :]:
                    with T.serial(0, lanes) as lane:
                        T.buffer_store(to, item[first + lane], [ranks[lane]])
        while width < count:
            for start in range(0, count, 2 * width):
                self._merge(source, target, start, min(start + width, count), min(start + 2 * width, count))
            source, target, width = target, source, 2 * width
        return source[1]

    def _merge(self, source: Any, target: Any, start: int, middle: int, end: int) -> None:
        """Merge the sorted elements from `start` to `middle` with those from there to `end`, which are not more.

        The first half comes from the beginnings of both, and at the same time the other half from their ends: neither
        half needs more than the elements up to `middle`.
        """
        keys = source[0]
        low = [_integers(1) for _ in range(3)]
        high = [_integers(1) for _ in range(3)]
        for variable, value in zip((*low[:2], *high[:2]), (start, middle, middle - 1, end - 1), strict=True):
            T.buffer_store(variable, _int(value), [0])
        half = (end - start) // 2
        with T.serial(0, end - start - half) as step:
            for (one, other, is_one), is_end, place in ((low, False, start + step), (high, True, end - 1 - step)):
                if is_end:
                    is_first = (other[0] < middle) | (keys[one[0]] < keys[other[0]])
                else:
                    is_first = (other[0] >= end) | (keys[one[0]] >= keys[other[0]])
                T.buffer_store(is_one, tirx.Cast("int32", is_first), [0])
                chosen = tirx.Select(is_one[0] != 0, one[0], other[0])
                for to, item in zip(target, source, strict=True):
                    T.buffer_store(to, item[chosen], [place])
                move = -1 if is_end else 1
                T.buffer_store(one, one[0] + move * is_one[0], [0])
                T.buffer_store(other, other[0] + move * (1 - is_one[0]), [0])

    def _element(self, place: Any) -> Any:
        return self._x[self._begin + place * self._inner]

    def _key(self, value: Any) -> Any:
        """An integer in the order of the element `value`: larger for what comes first.

        That of a float is never the smallest integer.
        """
        greatest = self._to_key(self._greatest)

        def evaluate(x: Any) -> Any:
            # The sum makes a negative zero equal to zero.
            bits = tirx.reinterpret(self._key_type, x + self._zero[()])
            is_float = self._dtype != self._key_type
            key = bits ^ ((bits >> (self._bits - 1)) & greatest) if is_float else bits
            key = key if self._largest else -1 - key
            return (
                tirx.Select(is_nan(x, self._dtype), greatest if self._largest else -greatest, key) if is_float else key
            )

        # A variable, because a choice between values that read memory would be a branch.
        return let(value, evaluate, self._dtype)

    def _keys(self, size: int) -> Any:
        return registers((size,), self._key_type)

    def _to_key(self, value: int) -> Any:
        return tirx.const(value, self._key_type)


def _size(size: Any) -> int:
    """The size of a dimension, the largest one if it is free."""
    number = static(size)
    return _INT32 if number is None else number


def _integers(size: int) -> Any:
    return registers((size,), "int32")


def _int(value: int) -> Any:
    return tirx.const(value, "int32")


def _long(value: Any) -> Any:
    return tirx.Cast("int64", value)
