"""Matrix products with weights of 4 bits in blocks, of rows that are rounded to 8 bits.

A file allows that, as `accuracy_level` 4 of ONNX Runtime's MatMulNBits. The numbers that a block of weights multiplies
are rounded as ONNX Runtime rounds them: to integers from -127 to 127, of which the largest stands for the largest
magnitude. Instructions then multiply four pairs of integers in each lane of a vector at once.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.dotproduct import PAIRS, Dot, add_bytes, add_pairs_of_bytes, sum_of_pairs
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import folded, registers, run, static, typical
from tvmflow.compiler.operators.narrow_products import StoredProduct, zeros
from tvmflow.compiler.operators.widening import BlockWeight

# The largest integer to which a number is rounded.
_LARGEST = 127
# So many numbers of 4 bits, times integers of 8, are surely summed in 16 bits: two products in each of the lanes for
# four numbers, of 15 times 127 each.
_IN_16_BITS = 32
# The numbers of 8 bits that an instruction multiplies in each lane: the bytes of a word.
_BYTES = 4
# The vectors of sums of each of several rows.
_FEW = 2

_ZERO = tirx.const(0.0, "float32")


class RoundedProduct(StoredProduct):
    """Builds the TIR function of a product of rounded rows by a weight of 4 bits; see `StoredProduct`."""

    name = "rounded_product"
    _at_once = _BYTES

    def __init__(self, weight: BlockWeight, rows: Any, machine: Machine, unit: Dot) -> None:
        super().__init__(weight, rows, machine)
        self._unit = unit
        self._words_of_block = self._block // self._of_word

    @property
    def _few(self) -> int:
        """The vectors of sums of each of several rows, beside which registers hold the numbers that the rows share."""
        return min(_FEW, int(self._vectors))

    def _most_rows(self) -> int:
        return (self._machine.registers - 4 * self._few) // self._few

    def _one_row(self) -> None:
        self._round_rows(T.serial)
        self._multiply_groups(1)

    def _many_rows(self) -> None:
        is_worth = typical(self._rows) * self._depth >= self._machine.parallel_cycles
        self._round_rows(T.parallel if is_worth and self._machine.cores > 1 else T.serial)
        self._multiply_groups(self._height)

    # -- The rows ------------------------------------------------------------------------------------------------------

    def _round_rows(self, loop: Callable[..., Any]) -> None:
        """Round all rows: integers in the order of the weights' bits, and the distance and the sum of each block.

        `loop` is the kind of the loop over rows.
        """
        of_words = (self._rows, self._depth // self._of_word, 2, _BYTES)
        self._integers = T.alloc_buffer(of_words, "int8", scope="global", layout=None)
        self._distances, self._sums = (
            T.alloc_buffer((self._rows, self._blocks), "float32", scope="global", layout=None) for _ in range(2)
        )
        lanes = math.gcd(self._machine.lanes, self._block)
        with loop(0, self._rows) as row, T.serial(0, self._blocks) as block:
            # Zeros become NaN where a number is not finite, and so does all that a block with it adds to.
            largest, nothing = zeros((lanes,)), zeros((lanes,))
            with T.serial(0, self._block // lanes) as step, T.vectorized(0, lanes) as lane:
                value = self._x[row, block * self._block + step * lanes + lane]
                T.buffer_store(largest, tirx.max(largest[lane], tirx.abs(value)), [lane])
                T.buffer_store(nothing, nothing[lane] + value * _ZERO, [lane])
            magnitude = registers((1,))
            T.buffer_store(magnitude, folded(tirx.max, largest, lanes), [0])
            distance = magnitude[0] / tirx.const(_LARGEST, "float32") + folded(operator.add, nothing, lanes)
            T.buffer_store(self._distances, distance, [row, block])
            inverse = registers((1,))
            is_zero = magnitude[0] == _ZERO
            T.buffer_store(inverse, tirx.Select(is_zero, _ZERO, 1.0 / self._distances[row, block]), [0])
            sum_of_block = zeros((1,), "int32")
            with T.serial(0, self._words_of_block) as place:
                word = block * self._words_of_block + place
                for number in range(self._of_word):
                    value = tirx.nearbyint(self._x[row, word * self._of_word + number] * inverse[0])
                    # A comparison with a number that is none is false.
                    most, least = (tirx.const(sign * _LARGEST, "float32") for sign in (1, -1))
                    value = tirx.Select(value > least, tirx.Select(value < most, value, most), least)
                    integer = value.astype("int32")
                    T.buffer_store(sum_of_block, sum_of_block[0] + integer, [0])
                    T.buffer_store(self._integers, integer.astype("int8"), [row, word, number % 2, number // 2])
            T.buffer_store(self._sums, sum_of_block[0].astype("float32"), [row, block])

    # -- The products --------------------------------------------------------------------------------------------------

    def _multiply_groups(self, height: int) -> None:
        """Multiply groups of `height` rows by each tile of the weight, and the rest one by one."""
        rows, known = self._rows, static(self._rows)
        with self._parallel(known or 1)(0, self._tiles) as tile:
            results = T.alloc_buffer((height, self._columns), "float32", scope="global", layout=None)
            groups = tirx.floordiv(rows, height)
            with T.serial(0, groups) as group:
                self._multiply(results, tile, group * height, height)
            if known is None or known % height:
                with T.serial(0, rows - groups * height) as row:
                    self._multiply(results, tile, groups * height + row, 1)

    def _multiply(self, results: Any, tile: Any, first: Any, height: int) -> None:
        """Multiply `height` rows from `first` on by a tile of the weight; `results` is room for the results."""
        width = self._vectors if height == 1 else self._few
        for start in range(0, self._vectors, width):
            vectors = range(start, min(start + width, self._vectors))
            self._multiply_vectors(results, tile, first, [(row, place) for row in range(height) for place in vectors])
        self._store(results, tile, first, height)

    def _multiply_vectors(self, results: Any, tile: Any, first: Any, places: Sequence[tuple[int, int]]) -> None:
        """Compute the results at `places`, pairs of a row behind `first` and a vector of a tile of the weight."""
        lanes = self._lanes
        totals = zeros((len(places), lanes))
        with T.serial(0, self._blocks) as block:
            sums = zeros((len(places), lanes), "int32")
            begin = block * self._words_of_block
            if self._unit is PAIRS:
                size = math.gcd(self._block, _IN_16_BITS) // self._of_word
                with T.serial(0, self._words_of_block // size) as part:
                    self._add_in_16_bits(sums, tile, first, (begin + part * size, size), places)
            else:
                with T.serial(0, self._words_of_block) as word:
                    self._add_word(sums, tile, first, begin + word, places)
            for number, (row, place) in enumerate(places):
                with T.vectorized(0, lanes) as lane:
                    column = place * lanes + lane
                    offset = self._offset(tile, block, column).astype("float32") * self._sums[first + row, block]
                    scale = self._distances[first + row, block] * self._scales[tile, block, column]
                    total = (sums[number, lane].astype("float32") + offset) * scale
                    T.buffer_store(totals, totals[number, lane] + total, [number, lane])
        for number, (row, place) in enumerate(places):
            with T.vectorized(0, lanes) as lane:
                T.buffer_store(results, totals[number, lane], [row, place * lanes + lane])

    def _add_word(self, sums: Any, tile: Any, first: Any, word: Any, places: Sequence[tuple[int, int]]) -> None:
        """Add the products of a word's eight numbers to the sums at `places`, four at a time."""
        lanes = self._lanes
        for parity in range(2):
            for number, (row, place) in enumerate(places):
                bits = self._words[tile, place, word, run(lanes)]
                shifted = bits >> tirx.Broadcast(tirx.const(4, "int32"), lanes) if parity else bits
                levels = shifted & tirx.Broadcast(tirx.const(0x0F0F0F0F, "int32"), lanes)
                group = tirx.reinterpret("int32", self._integers[first + row, word, parity, run(_BYTES)])
                index = [number, run(int(sums.shape[-1]))]
                total, integers = sums[tuple(index)], tirx.Broadcast(group, lanes)
                if self._unit is PAIRS:
                    total = add_pairs_of_bytes(total, levels, integers, lanes)
                else:
                    total = add_bytes(self._unit, total, levels, integers, lanes)
                T.buffer_store(sums, total, index)

    def _add_in_16_bits(
        self, sums: Any, tile: Any, first: Any, words: tuple[Any, int], places: Sequence[tuple[int, int]]
    ) -> None:
        """Add the products of some words, the first one and their number, to sums of 16 bits before those of 32."""
        lanes, (begin, size) = self._lanes, words
        pairs = zeros((len(places), 2 * lanes), "int16")
        for word in range(size):
            self._add_word(pairs, tile, first, begin + word, places)
        for number in range(len(places)):
            index = [number, run(lanes)]
            total = sums[tuple(index)] + sum_of_pairs(pairs[number, run(2 * lanes)], lanes)
            T.buffer_store(sums, total, index)
