"""How the hidden units of a recurrent cell are divided into register tiles, and the weights that the tiles read."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm import relax

from tvmflow.arrays import Array
from tvmflow.compiler import cost
from tvmflow.compiler.dotproduct import INT8
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.cells import Cell
from tvmflow.compiler.operators.common import vector

# The most units that padding may add to a tile of several vectors, as a fraction of all: that much work is wasted.
_MOST_PADDING = 1 / 8


@dataclass(frozen=True)
class Tiles:
    """The division of hidden units into `count` tiles of `blocks` vectors of `lanes` units each.

    A tile is computed for `rows` sequences at a time.
    """

    lanes: int
    blocks: int
    count: int
    rows: int

    @property
    def units(self) -> int:
        """The number of units, padding included."""
        return self.count * self.blocks * self.lanes


def tiles(cell: Cell, units: int, batch: int | None, machine: Machine) -> Tiles:
    """Choose tiles whose sums fit into the registers and keep the multiply-add units busy.

    `batch` is None where it is symbolic.
    """
    lanes = vector(units, machine)
    gates = max(map(len, cell.phases))
    rows = max(1, (machine.registers - 1) // (gates + 1))
    if batch is not None:
        batch = -(-batch // parts_of_batch(cell, machine))
        rows = min(range(1, min(rows, batch) + 1), key=lambda count: (_cycles(count, batch, gates, machine), -count))
    vectors = -(-units // lanes)
    busy = -(-cost.in_flight(machine) // (gates * rows))
    most = min((machine.registers - 1 - rows) // (gates * rows), busy, vectors)
    for blocks in range(max(1, most), 0, -1):
        count = -(-vectors // blocks)
        if blocks == 1 or count * blocks <= vectors * (1 + _MOST_PADDING):
            return Tiles(lanes, blocks, count, rows)
    raise AssertionError("one vector always fits")


def _cycles(rows: int, batch: int, gates: int, machine: Machine) -> float:
    """Return the cycles of a batch's products with the weights of one vector of units, for groups of `rows` sequences.

    The last group is computed whole, too: 16 sequences in groups of 3 are computed as 18. A group of few sequences
    loads more numbers for each product.
    """
    vectors = machine.vectors
    return -(-batch // rows) * max(rows * gates / vectors.multiply_adds, (rows + gates) / vectors.loads)


def parts_of_batch(cell: Cell, machine: Machine) -> int:
    """Return the number of parts of a batch, so that there is a task for each core."""
    return -(-machine.cores // cell.directions)


def pack_integers(weights: Array, scales: Array, gates: int, tile: Tiles) -> tuple[Array, Array, Array]:
    """Return integers [directions, gates * units, units] as `Recurrence` reads them, the packed scales, and the sums.

    The first has the shape [directions, tiles, groups of inputs, blocks, gates, lanes * numbers of a group], the others
    [directions, tiles, blocks, gates, lanes]. `scales` are [directions, gates * units].
    """
    directions, _, units = weights.shape
    groups = -(-units // INT8.group)

    def pack(rows: Array) -> Array:
        rows = rows.reshape(directions, gates, units, *rows.shape[2:])
        rows = np.pad(rows, [(0, 0), (0, 0), (0, tile.units - units), *[(0, 0)] * (rows.ndim - 3)])
        return rows.reshape(directions, gates, tile.count, tile.blocks, tile.lanes, *rows.shape[3:])

    deep = np.pad(weights, [(0, 0), (0, 0), (0, groups * INT8.group - units)])
    packed = pack(deep).reshape(directions, gates, tile.count, tile.blocks, tile.lanes, groups, INT8.group)
    packed = packed.transpose(0, 2, 5, 3, 1, 4, 6).reshape(directions, tile.count, groups, tile.blocks, gates, -1)
    by_scale, by_sum = (pack(values).transpose(0, 2, 3, 1, 4) for values in (scales, weights.sum(-1, dtype="int32")))
    return packed, by_scale, by_sum


def pack_units(value: relax.Expr, gates: int, tile: Tiles, emit: Callable[[relax.Expr], relax.Expr]) -> relax.Expr:
    """Pack rows [directions, gates * units, n] into tiles [directions, tiles, blocks, gates, lanes, n].

    `emit` adds an expression to the program and returns its variable. Units that padding adds are zero.
    """
    directions, rows, columns = (int(size) for size in value.ty.shape.values)
    units = rows // gates
    result = emit(relax.op.reshape(value, [directions, gates, units, columns]))
    if units != tile.units:
        result = emit(relax.op.nn.pad(result, [0, 0, 0, 0, 0, tile.units - units, 0, 0]))
    result = emit(relax.op.reshape(result, [directions, gates, tile.count, tile.blocks, tile.lanes, columns]))
    return emit(relax.op.permute_dims(result, [0, 2, 3, 1, 4, 5]))
