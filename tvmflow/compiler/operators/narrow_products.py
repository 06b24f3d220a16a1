"""Matrix products with weights of 4 or 8 bits in blocks, which are read as they are stored and widened on the way.

A product of one row, as a language model's next token, takes as long as its weights take to arrive, and those of 4 bits
arrive in an eighth of the time of float32. For several rows, a part of the weights is widened into the first-level
cache, and all rows are multiplied by it before the next part.
"""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from tvm import relax, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.arrays import Array
from tvmflow.compiler import cost, extensions
from tvmflow.compiler.annotations import KERNEL, OPERATIONS
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import buffer, constant, folded, registers, size_parameter, static, vector
from tvmflow.compiler.operators.widening import BlockWeight

# The bits of a word, which holds several numbers of a column, and how many of them are summed apart: every second one.
_WORD, _PARITIES = 32, 2
# So many rows, at most, are multiplied by a part of the weights before the next part is widened. A widened number is
# used often enough then that its cost does not count, and the sums fit the second-level cache.
PANEL = 256
# How many multiply-adds take as long as to widen a vector of numbers: to mask and to convert it, now and then to shift.
WIDENING = 2

_ZERO = tirx.const(0.0, "float32")


def pays(numbers: int, rows: Any, machine: Machine) -> bool:
    """Whether a product is faster with a weight of `numbers` numbers that are widened on the way than in float32.

    A symbolic number of rows counts as few rows.
    """
    panels = -(-(static(rows) or 1) // PANEL)
    return cost.widening_pays(numbers, numbers, panels * WIDENING, machine)


# The functions of kernels by what they depend on.
Functions = dict[tuple[Any, ...], tirx.PrimFunc]


def multiply(
    builder: relax.BlockBuilder, data: relax.Expr, kernel: "StoredProduct", functions: Functions
) -> relax.Expr:
    """Return the product `[..., N]` of `data` of shape `[..., K]` by the weight of `kernel`.

    The leading dimensions of `data`, multiplied, are the rows of the kernel. `functions` has those of earlier kernels
    for the same machine, and gets that of this one: the layers of a model have few different ones.
    """
    *outer, depth = data.ty.shape.values
    if kernel.form not in functions:
        functions[kernel.form] = kernel.function()
    function = extensions.emit_function(builder, functions[kernel.form], kernel.name)
    rows = math.prod(outer)
    flat = builder.emit(relax.op.reshape(data, relax.ShapeExpr([rows, depth])))
    result = relax.TensorType([rows, kernel.units], "float32")
    product = builder.emit(relax.call_tir(function, [flat, *map(constant, kernel.packed())], result))
    return relax.op.reshape(product, relax.ShapeExpr([*outer, kernel.units]))


@dataclass(frozen=True)
class _Place:
    """Where a number stands: the tile, the vector in it, the line of words, the lane, and the place in the word."""

    tile: Any
    vector: int
    line: Any
    lane: Any
    number: int


class StoredProduct(ABC):
    """Builds the TIR function of a product of rows `[rows, K]` by a weight `[K, N]` in blocks along K.

    The function's parameters are the rows, the arrays that `packed` returns, and the result `[rows, N]`. `rows` is an
    integer or a symbolic size. `name` is the name of the kind of kernel.
    """

    name: ClassVar[str]
    # How many multiply-adds each lane of a vector does at once.
    _at_once: ClassVar[int] = 1

    def __init__(self, weight: BlockWeight, rows: Any, machine: Machine) -> None:
        lines, self.units = weight.numbers.shape
        self._stored, self._machine, self._bits = weight, machine, weight.bits
        self._depth, self._blocks, self._of_word = lines * 8 // weight.bits, len(weight.scales), _WORD // weight.bits
        self._block = self._depth // self._blocks
        self._lanes = vector(self.units, machine)
        # The sums of one row hide the latency of a multiply-add.
        self._vectors = min(-(-self.units // self._lanes), -(-cost.in_flight(machine) // _PARITIES))
        self._columns = self._vectors * self._lanes
        self._tiles = -(-self.units // self._columns)
        known = static(rows)
        self._rows = size_parameter(rows, "rows")
        self._height = max(1, self._most_rows() if known is None else min(self._most_rows(), known))
        of_blocks = (self._tiles, self._blocks, self._columns)
        self._x = buffer("x", (self._rows, self._depth))
        self._words = buffer("words", (self._tiles, self._vectors, self._depth // self._of_word, self._lanes), "int32")
        self._scales = buffer("scales", of_blocks)
        # Where there is one offset, it stands in the code.
        self._offsets = None if weight.offsets.size == 1 else buffer("offsets", of_blocks, str(weight.offsets.dtype))
        self._y = buffer("y", (self._rows, self.units))

    @property
    def form(self) -> tuple[Any, ...]:
        """All that the function depends on, besides the machine."""
        offset = str(self._offsets.dtype) if self._offsets is not None else int(self._stored.offsets.item())
        return self.name, self._bits, self._depth, self._blocks, self.units, offset, static(self._rows)

    def packed(self) -> list[Array]:
        """Return the arrays that hold the weight: words, scales and, where these differ, offsets.

        The first number of a column stands in the lowest bits of its word. Words have the shape [tiles, vectors,
        lines, lanes], so that the vectors of a tile are read side by side from several places in memory: a processor
        fetches ahead at each of them.
        """
        of_words = self._stored.numbers.reshape(-1, _WORD // 8, self.units)
        words = self._in_tiles(np.ascontiguousarray(np.moveaxis(of_words, 1, -1)).view("<i4")[..., 0])
        words = np.moveaxis(words.reshape(*words.shape[:2], self._vectors, self._lanes), 2, 1)
        offsets = [] if self._offsets is None else [self._stored.offsets]
        return [words, *map(self._in_tiles, (self._stored.scales, *offsets))]

    def function(self) -> tirx.PrimFunc:
        """Return the function, whose attribute `KERNEL` tells the schedules to leave it unchanged."""
        rows = static(self._rows)
        with IRBuilder() as builder, T.seq_scope():
            if rows is None:
                with T.If(self._rows == 1):
                    with T.Then():
                        self._one_row()
                    with T.Else():
                        self._many_rows()
            elif rows == 1:
                self._one_row()
            else:
                self._many_rows()
        offsets = [] if self._offsets is None else [self._offsets]
        # The builder marks the sequence of statements by an attribute.
        function = tirx.PrimFunc([self._x, self._words, self._scales, *offsets, self._y], builder.get().body)
        return function.with_attr({KERNEL: self.name, OPERATIONS: 2 * self._depth * self.units // self._at_once})

    @abstractmethod
    def _most_rows(self) -> int:
        """How many rows are multiplied together: as many as have their sums in registers."""

    @abstractmethod
    def _one_row(self) -> None:
        """Write the product of one row."""

    @abstractmethod
    def _many_rows(self) -> None:
        """Write the product of several rows."""

    def _in_tiles(self, array: Array) -> Array:
        """Lines `[lines, N]` as `[tiles, lines, columns of a tile]`, with zeros after the last column."""
        whole = np.zeros((len(array), self._tiles * self._columns), array.dtype)
        whole[:, : self.units] = array
        return np.moveaxis(whole.reshape(len(array), self._tiles, self._columns), 1, 0)

    def _parallel(self, rows: int) -> Any:
        """The kind of loop over tiles: parallel where the product of so many rows is worth it."""
        cycles = rows * self._depth * self.units // self._lanes
        return T.parallel if self._machine.cores > 1 and cycles >= self._machine.parallel_cycles else T.serial

    def _store(self, totals: Any, tile: Any, first: Any, count: Any) -> None:
        """Copy the totals of `count` rows to the result, without the columns that fill the last tile."""
        begin = tile * self._columns
        columns = self._columns if self.units % self._columns == 0 else tirx.min(self._columns, self.units - begin)
        with T.serial(0, count) as row, T.serial(0, columns) as column:
            T.buffer_store(self._y, totals[row, column], [first + row, begin + column])

    def _offset(self, tile: Any, block: Any, column: Any) -> Any:
        """The offset of a block as int32."""
        if self._offsets is None:
            return tirx.const(int(self._stored.offsets.item()), "int32")
        return self._offsets[tile, block, column].astype("int32")


class NarrowProduct(StoredProduct):
    """Builds the TIR function of a product whose weights become floats on the way; see `StoredProduct`."""

    name = "narrow_product"

    def _most_rows(self) -> int:
        return int((self._machine.registers - self._vectors - 1) // self._vectors)

    # -- One row -------------------------------------------------------------------------------------------------------

    def _one_row(self) -> None:
        """Multiply one row by numbers that are made floats in registers, and sum those of a block without its scale.

        Odd numbers of a word stay where their bits are, and have sums of their own: that saves shifts.
        """
        lanes = self._lanes
        parts = self._sum_parts()
        places = [(number, place) for number in range(self._of_word) for place in range(self._vectors)]
        with self._parallel(1)(0, self._tiles) as tile:
            totals = zeros((self._vectors, lanes))
            with T.serial(0, self._blocks) as block:
                sums = zeros((_PARITIES, self._vectors, lanes))
                with T.serial(0, self._block // self._of_word) as word:
                    line = block * (self._block // self._of_word) + word
                    for number, place in places:
                        with T.vectorized(0, lanes) as lane:
                            value = self._number(_Place(tile, place, line, lane, number))
                            index = [number % _PARITIES, place, lane]
                            product = self._x[0, line * self._of_word + number] * value
                            T.buffer_store(sums, sums[tuple(index)] + product, index)
                for place in range(self._vectors):
                    with T.vectorized(0, lanes) as lane:
                        of_block = [sums[parity, place, lane] for parity in range(_PARITIES)]
                        total = self._of_sums(of_block, parts[block], tile, block, place * lanes + lane)
                        T.buffer_store(totals, totals[place, lane] + total, [place, lane])
            results = T.alloc_buffer((1, self._columns), "float32", scope="global", layout=None)
            for place in range(self._vectors):
                with T.vectorized(0, lanes) as lane:
                    T.buffer_store(results, totals[place, lane], [0, place * lanes + lane])
            self._store(results, tile, 0, 1)

    def _sum_parts(self) -> Any:
        """Sum the numbers of the row that each block multiplies."""
        parts = T.alloc_buffer((self._blocks,), "float32", scope="global", layout=None)
        lanes = math.gcd(self._machine.lanes, self._block)
        with T.serial(0, self._blocks) as block:
            sums = zeros((lanes,))
            with T.serial(0, self._block // lanes) as step, T.vectorized(0, lanes) as lane:
                value = self._x[0, block * self._block + step * lanes + lane]
                T.buffer_store(sums, sums[lane] + value, [lane])
            T.buffer_store(parts, folded(operator.add, sums, lanes), [block])
        return parts

    # -- Several rows --------------------------------------------------------------------------------------------------

    def _many_rows(self) -> None:
        """Multiply panels of rows by one part of a tile after the other; a part fills half of the first-level cache."""
        rows, known, height = self._rows, static(self._rows), self._height
        panel = PANEL if known is None else min(PANEL, known)
        panels = tirx.floordiv(rows + (panel - 1), panel)
        line = self._columns * self._machine.number
        most = max(1, self._machine.first.size // 2 // (self._block * line))
        parts = -(-self._blocks // most)
        most = -(-self._blocks // parts)
        with self._parallel(known or 2)(0, panels * self._tiles) as task:
            first, tile = task // self._tiles * panel, task % self._tiles
            count = panel if known is not None and known % panel == 0 else tirx.min(panel, rows - first)
            totals = T.alloc_buffer((panel, self._columns), "float32", scope="global", layout=None)
            widened = T.alloc_buffer((most * self._block, self._columns), "float32", scope="global", layout=None)
            with T.serial(0, count) as row, T.serial(0, self._columns) as column:
                T.buffer_store(totals, _ZERO, [row, column])
            with T.serial(0, parts) as part:
                begin = part * most
                blocks = tirx.min(most, self._blocks - begin) if self._blocks % most else most
                self._widen(widened, tile, begin, blocks)
                lines = (begin * self._block, blocks * self._block)
                groups = tirx.floordiv(count, height)
                with T.serial(0, groups) as group:
                    self._add_products(totals, widened, first, group * height, height, lines)
                if not isinstance(count, int) or count % height:
                    with T.serial(0, count - groups * height) as row:
                        self._add_products(totals, widened, first, groups * height + row, 1, lines)
            self._store(totals, tile, first, count)

    def _widen(self, widened: Any, tile: Any, begin: Any, blocks: Any) -> None:
        """Write the float32 weights of `blocks` blocks of a tile from `begin` on."""
        words = self._block // self._of_word
        with T.serial(0, blocks) as place_of_block, T.serial(0, words) as word:
            block = begin + place_of_block
            for place in range(self._vectors):
                for number in range(self._of_word):
                    with T.vectorized(0, self._lanes) as lane:
                        weight = self._weight(_Place(tile, place, block * words + word, lane, number), block)
                        line = place_of_block * self._block + word * self._of_word + number
                        T.buffer_store(widened, weight, [line, place * self._lanes + lane])

    def _add_products(
        self, totals: Any, widened: Any, first: Any, row: Any, height: int, lines: tuple[Any, Any]
    ) -> None:
        """Add the products of rows of a panel with widened weights to the totals.

        The panel begins at row `first`, and the `height` rows at its row `row`. `lines` are the first line of the
        weights and their number.
        """
        lanes, (start, depth) = self._lanes, lines
        sums = registers((height, self._vectors, lanes))
        places = [(line, place) for line in range(height) for place in range(self._vectors)]
        for line, place in places:
            with T.vectorized(0, lanes) as lane:
                T.buffer_store(sums, totals[row + line, place * lanes + lane], [line, place, lane])
        with T.serial(0, depth) as k:
            for line, place in places:
                with T.vectorized(0, lanes) as lane:
                    product = self._x[first + row + line, start + k] * widened[k, place * lanes + lane]
                    T.buffer_store(sums, sums[line, place, lane] + product, [line, place, lane])
        for line, place in places:
            with T.vectorized(0, lanes) as lane:
                T.buffer_store(totals, sums[line, place, lane], [row + line, place * lanes + lane])

    # -- The numbers ---------------------------------------------------------------------------------------------------

    def _number(self, at: _Place) -> Any:
        """A number as a float32, which is summed over a block; an odd one is larger, as its bits lie higher."""
        return self._level(at).astype("float32")

    def _of_sums(self, sums: Sequence[Any], part: Any, tile: Any, block: Any, column: Any) -> Any:
        """What a block adds to the result of one row.

        The `sums` over it are those of the even numbers and of the odd ones, and `part` is the sum of the row's.
        """
        even, odd = sums
        total = even + odd * (1 / (1 << self._bits)) + self._offset(tile, block, column).astype("float32") * part
        return total * self._scales[tile, block, column]

    def _weight(self, at: _Place, block: Any) -> Any:
        """A number as the float32 weight; `block` is the block in which it stands."""
        level, column = self._level(at), at.vector * self._lanes + at.lane
        if at.number % _PARITIES:
            level = level >> self._bits
        return (level + self._offset(at.tile, block, column)).astype("float32") * self._scales[at.tile, block, column]

    def _level(self, at: _Place) -> Any:
        """The bits of a number; those of an odd one stay where they are, behind those of an even one."""
        word, pair, parity = self._words[at.tile, at.vector, at.line, at.lane], *divmod(at.number, _PARITIES)
        shifted = word >> (_PARITIES * self._bits * pair) if pair else word
        return shifted & ((1 << self._bits) - 1 << self._bits * parity)


def zeros(shape: Sequence[int], dtype: str = "float32") -> Any:
    """Allocate zeros, float32 by default, that LLVM keeps in registers; the last dimension is a vector."""
    numbers = registers(shape, dtype)
    for place in np.ndindex(*shape[:-1]):
        with T.vectorized(0, shape[-1]) as lane:
            T.buffer_store(numbers, tirx.const(0, dtype), [*place, lane])
    return numbers
