"""The first few of the sorted elements along a dimension: ONNX's TopK.

TVM sorts all elements. Here a pass over the elements keeps the first ones in order; most elements are only compared
with the last of these.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from tvm import relax, tirx, topi
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler import extensions
from tvmflow.compiler.annotations import KERNEL
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import buffer, size_parameter, static
from tvmflow.compiler.vectormath import is_nan, let

_INT32 = tirx.max_value("int32").value


def lower(builder: relax.BlockBuilder, call: relax.Call, machine: Machine) -> relax.Expr | None:
    """Define the values and places of the `k` largest or smallest float32 numbers along an axis.

    Equal numbers keep their order, and NaN counts as the largest number. Returns None for other types, for unknown
    shapes, and where sorting all numbers takes fewer steps. TVM dispatches sorts before it legalises, so this is no
    definition for `LegalizeOps`.
    """
    (data,), attrs = call.args, call.attrs
    if str(data.ty.dtype) != "float32" or not isinstance(data.ty.shape, relax.ShapeExpr) or not data.ty.ndim:
        return None
    shape, axis, count = list(data.ty.shape.values), int(attrs.axis) % data.ty.ndim, int(attrs.k)
    if str(attrs.ret_type) != "both" or str(attrs.dtype) != "int64" or not _is_short(count, static(shape[axis])):
        return None
    kernel = _Kernel(shape, axis, count, largest=bool(attrs.largest), machine=machine)
    function = extensions.emit_function(builder, kernel.function(), "top_k")
    # TVM fails on a function that reads one operand and has no blocks: it looks for reshapes among these.
    return relax.call_tir(function, [data, relax.const(np.float32(0.0))], list(call.ty.fields))


def lower_place(builder: relax.BlockBuilder, call: relax.Call, machine: Machine, *, largest: bool) -> relax.Expr | None:
    """Define ArgMax (`largest`) or ArgMin: the place of a float32 number in each line along the last dimension.

    Of equal numbers the first one counts, and NaN as the largest number. Returns None for other types and dimensions,
    and for unknown shapes.
    """
    (data,), axis = call.args, call.attrs.axis
    if str(data.ty.dtype) != "float32" or axis is None:
        return None
    if not isinstance(data.ty.shape, relax.ShapeExpr) or not isinstance(call.ty.shape, relax.ShapeExpr):
        return None
    shape = list(data.ty.shape.values)
    if int(axis) % len(shape) != len(shape) - 1 or str(call.ty.dtype) != "int64":
        return None
    kernel = _Kernel(shape, len(shape) - 1, 1, largest=largest, machine=machine)
    function = kernel.place_function(keepdims=bool(call.attrs.keepdims))
    variable = extensions.emit_function(builder, function, call.op.name.rpartition(".")[2])
    return relax.call_tir(variable, [data, relax.const(np.float32(0.0))], call.ty)


def _is_short(count: int, size: int | None) -> bool:
    """Whether `count` of `size` elements in random order are selected in fewer steps than all are sorted.

    The element at place i is one of the first ones with a probability of count / i, and then passes half of them. Of an
    unknown number of elements, twice as many as are selected are assumed.
    """
    size = 2 * count if size is None else size
    if not 0 < count <= size:
        return False
    moves = count * count / 2 * (1 + math.log(size / count))
    return size + moves <= size * math.log2(max(size, 2))


class _Kernel:
    """Builds the TIR function that selects `count` elements of each line of a tensor along an axis."""

    def __init__(self, shape: list[Any], axis: int, count: int, *, largest: bool, machine: Machine) -> None:
        self._count, self._largest, self._machine = count, largest, machine
        own = [size_parameter(size, f"n{place}") for place, size in enumerate(shape)]
        one = tirx.IntImm("int64", 1)
        self._size, self._inner = own[axis], math.prod(own[axis + 1 :], start=one)
        self._lines = topi.utils.simplify(math.prod(own[:axis], start=one) * self._inner)
        self._others = [own[:axis], own[axis + 1 :]]
        self._data, self._zero = buffer("data", own), buffer("zero", ())

    def function(self) -> tirx.PrimFunc:
        """Return the function of the values and the places of the chosen elements.

        Its attribute `KERNEL` tells the schedules to leave it unchanged.
        """
        before, after = self._others
        shape = [*before, tirx.IntImm("int64", self._count), *after]
        return self._function(buffer("values", shape), buffer("places", shape, "int64"))

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
            if values or not self._are_short_lines():
                self._write_lines(values, places, loop)
            else:
                self._write_places(places, loop)
        return tirx.PrimFunc([self._data, self._zero, *results], builder.get().body).with_attr(KERNEL, "selection")

    def _write_lines(self, values: Sequence[Any], places: Any, loop: Any) -> None:
        """Write the chosen elements of each line."""
        with loop(0, self._lines) as line:
            outer, inner = tirx.floordiv(line, self._inner), tirx.floormod(line, self._inner)
            self._begin = outer * self._size * self._inner + inner
            # The keys of the first elements and their places, in order, after a key that none exceeds.
            self._keys = T.alloc_buffer((self._count + 1,), "int32", scope="local", layout=None)
            self._order = T.alloc_buffer((self._count + 1,), "int64", scope="local", layout=None)
            self._gap, self._candidate = (T.alloc_buffer((1,), "int32", scope="local", layout=None) for _ in range(2))
            with T.serial(0, self._count + 1) as place:
                T.buffer_store(self._keys, tirx.Select(place == 0, _int(_INT32), _int(-_INT32 - 1)), [place])
                T.buffer_store(self._order, tirx.const(0, "int64"), [place])
            self._select()
            first = outer * self._count * self._inner + inner
            with T.serial(0, self._count) as place:
                own = self._order[place + 1]
                for result in values:
                    T.buffer_store(result, self._element(own), [first + place * self._inner])
                T.buffer_store(places, own, [first + place * self._inner])

    def _are_short_lines(self) -> bool:
        """Whether a vector for each of the line's elements takes fewer steps than to look for one within the line."""
        size, lanes = static(self._size), self._machine.lanes
        return static(self._inner) == 1 and size is not None and size < lanes * lanes

    def _write_places(self, places: Any, loop: Any) -> None:
        """Write the place of the first element of each line; a vector has an element of each of several lines.

        No step depends on the numbers: in lines of random order, a branch for each element is often predicted wrongly.
        """
        lanes = self._machine.lanes
        vectors = tirx.floordiv(self._lines, lanes)
        with loop(0, vectors) as vector:
            self._write_place_of_lines(places, vector * lanes, lanes)
        with T.serial(vectors * lanes, self._lines) as line:
            self._write_place_of_lines(places, line, 1)

    def _write_place_of_lines(self, places: Any, first: Any, lanes: int) -> None:
        """Write the places of as many lines, of which one is the `first`."""
        keys, candidates, order = (T.alloc_buffer((lanes,), "int32", scope="local", layout=None) for _ in range(3))

        def store(target: Any, value: Callable[[Any], Any]) -> None:
            with T.vectorized(0, lanes) as lane:
                T.buffer_store(target, value(lane), [lane])

        store(keys, lambda _: _int(-_INT32 - 1))
        store(order, lambda _: _int(0))
        with T.serial(0, self._size) as place:
            store(candidates, lambda lane: self._key(self._x[(first + lane) * self._size + place]))
            number = place.astype("int32")
            store(order, lambda lane: tirx.Select(candidates[lane] > keys[lane], number, order[lane]))
            store(keys, lambda lane: tirx.max(candidates[lane], keys[lane]))
        with T.vectorized(0, lanes) as lane:
            T.buffer_store(places, order[lane].astype("int64"), [first + lane])

    def _select(self) -> None:
        """Insert all elements of a line; of vectors whose elements all come after the chosen ones, none."""
        lanes = self._machine.lanes
        vectors = tirx.floordiv(self._size, lanes) if static(self._inner) == 1 else tirx.const(0, "int64")
        largest = T.alloc_buffer((lanes,), "int32", scope="local", layout=None)
        with T.serial(0, vectors) as vector:
            with T.vectorized(0, lanes) as lane:
                T.buffer_store(largest, self._key(self._element(vector * lanes + lane)), [lane])
            highest = reduce(tirx.max, (largest[lane] for lane in range(lanes)))
            with T.If(highest > self._keys[self._count]), T.Then(), T.serial(0, lanes) as lane:
                self._insert(vector * lanes + lane)
        with T.serial(vectors * lanes, self._size) as place:
            self._insert(place)

    def _insert(self, place: Any) -> None:
        """Insert the element at a place of the line into the chosen ones, unless it comes after all of them."""
        keys, order, gap = self._keys, self._order, self._gap
        T.buffer_store(self._candidate, self._key(self._element(place)), [0])
        key = self._candidate[0]
        with T.If(key > keys[self._count]), T.Then():
            T.buffer_store(gap, _int(self._count), [0])
            with T.While(keys[gap[0] - 1] < key):
                T.buffer_store(keys, keys[gap[0] - 1], [gap[0]])
                T.buffer_store(order, order[gap[0] - 1], [gap[0]])
                T.buffer_store(gap, gap[0] - 1, [0])
            T.buffer_store(keys, key, [gap[0]])
            T.buffer_store(order, place, [gap[0]])

    def _element(self, place: Any) -> Any:
        return self._x[self._begin + place * self._inner]

    def _key(self, value: Any) -> Any:
        """An integer in the order of the float `value`: larger for what comes first, and never the smallest integer."""

        def evaluate(x: Any) -> Any:
            # The sum makes a negative zero equal to zero.
            bits = tirx.reinterpret("int32", x + self._zero[()])
            key = bits ^ ((bits >> 31) & _int(_INT32))
            key = key if self._largest else -1 - key
            return tirx.Select(is_nan(x, "float32"), _int(_INT32 if self._largest else -_INT32), key)

        # A variable, because a choice between values that read memory would be a branch.
        return let(value, evaluate)


def _int(value: int) -> Any:
    return tirx.const(value, "int32")
