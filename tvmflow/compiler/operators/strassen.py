"""Strassen's matrix product: seven products of half the size instead of eight. Its definition and its cost.

Source: Strassen, "Gaussian elimination is not optimal" (1969). One level of the algorithm is applied: both operands are
cut into quarters, and sums of quarters are multiplied. The sums of the weights' quarters are computed at build time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import te

from tvmflow.arrays import Array
from tvmflow.compiler import cost, tiles
from tvmflow.compiler.annotations import CHUNK, KERNEL, LANES, SUBJECT, TILE
from tvmflow.compiler.choices import Decisions
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.winograd import combine

# `_LEFT` and `RIGHT` have one row per product: the weights of the quarters 11, 12, 21, 22 of that operand. `_RESULT`
# has one row per quarter of the result: the weights of the seven products.
_LEFT = [
    [1, 0, 0, 1],
    [0, 0, 1, 1],
    [1, 0, 0, 0],
    [0, 0, 0, 1],
    [1, 1, 0, 0],
    [-1, 0, 1, 0],
    [0, 1, 0, -1],
]
RIGHT = [
    [1, 0, 0, 1],
    [1, 0, 0, 0],
    [0, 1, 0, -1],
    [-1, 0, 1, 0],
    [0, 0, 0, 1],
    [1, 1, 0, 0],
    [0, 0, 1, 1],
]
_RESULT = [
    [1, 0, 0, 1, -1, 0, 1],
    [0, 0, 1, 0, 1, 0, 0],
    [0, 1, 0, 1, 0, 0, 0],
    [1, -1, 1, 0, 0, 1, 0],
]

# The algorithm is chosen below this share of the usual time. It saves an eighth at most, which must pay for its larger
# rounding error and for the error of the estimates.
_GAIN = 0.92


@dataclass(frozen=True)
class Estimate:
    """Strassen's algorithm for a product: its register tile, its cycles, and those of the direct product."""

    tile: tiles.Tile
    cycles: float
    direct: float

    @property
    def share(self) -> float:
        """The time of Strassen's algorithm as a share of the direct product's."""
        return self.cycles / self.direct


def choose(outer: Sequence[int], depth: int, units: int, machine: Machine, decisions: Decisions) -> tiles.Tile | None:
    """Choose between Strassen's algorithm and the direct product of `[*outer, depth]` and `[depth, units]`.

    Returns the register tile for Strassen's algorithm; None for the direct product. The `decisions` about the product
    choose between them; the default is the faster one.
    """
    estimated = estimate(outer, depth, units, machine)
    if estimated is None:
        return None
    options: dict[str, tiles.Tile | None] = {"strassen": estimated.tile, "direct": None}
    if estimated.share >= _GAIN:
        options = dict(reversed(options.items()))
    cycles = {"strassen": estimated.cycles, "direct": estimated.direct}
    return decisions.choose("algorithm", options, cycles=cycles)


def estimate(outer: Sequence[int], depth: int, units: int, machine: Machine) -> Estimate | None:
    """Estimate Strassen's algorithm for the product of `[*outer, depth]` and `[depth, units]`.

    Returns None where the operands cannot be cut into quarters, and where every register tile would wait for loads or
    for results.
    """
    half_rows, odd = divmod(math.prod(outer), 2)
    if odd or depth % 2 or units % (2 * machine.lanes):
        return None
    # TVM must be able to prove which half an element belongs to, so no line of the result may span both halves.
    lines = [math.prod(outer[place:]) for place in range(len(outer))]
    if any(half_rows % line and line % half_rows for line in lines):
        return None
    vectors, numbers = units // 2 // machine.lanes, machine.vectors
    ranked = tiles.rank(half_rows, vectors, machine, 2 * depth, exact=True)
    # Only multiply-adds bound the algorithm's time: a tile that waits for loads or for results gains nothing.
    busy = [tile for tile in ranked if tiles.step(tile, machine) * numbers.multiply_adds <= tile.rows * tile.vectors]
    if not busy:
        return None

    def uneven(tile: tiles.Tile) -> float:
        """The time of the busiest core relative to equal shares for all cores."""
        together = goes_together(half_rows, tile.rows, depth // 2, units // 2, machine)
        tasks = half_rows // tile.rows if together else vectors // tile.vectors
        return 1 / cost.evenness(tasks, machine)

    # `min` takes the first of equal tiles.
    tile = min(busy, key=uneven)
    accumulators, rows = tile.rows * tile.vectors, 2 * half_rows / machine.cores
    weights = 4 * depth * units
    direct = cost.results(rows * 2 * vectors, depth, accumulators, machine)
    direct += cost.weight_read_cycles(weights, machine) / machine.cores
    images = cost.result_and_input_cycles(4 * rows * units, 4 * rows * depth, machine)
    # Five of the seven sums of the left operand add two quarters, and eight additions combine the seven products.
    panels = 7 * rows / 2 * depth / 2
    summing = panels / machine.lanes * max(12 / 7 / numbers.loads, 1 / numbers.stores)
    combining = rows / 2 * vectors * max(7 / numbers.loads, 8 / numbers.multiply_adds)
    fast = cost.results(7 * rows / 2 * vectors, depth / 2, accumulators, machine) + summing + combining
    fast += cost.weight_read_cycles(weights * 7 / 4, machine) / machine.cores
    if goes_together(half_rows, tile.rows, depth // 2, units // 2, machine):
        fast = cost.compute_and_move_cycles(fast, 4 * panels, 4 * panels, 4 * 7 * tile.rows * depth / 2, machine)
    else:
        fast += cost.exchange_cycles(4 * panels, machine) + machine.region
    return Estimate(tile, uneven(tile) * fast + images, direct + images)


def goes_together(half_rows: int, rows: int, half_depth: int, half_units: int, machine: Machine) -> bool:
    """Whether each core sums the quarters of its own rows just before it multiplies them.

    That needs packed weights that fit its cache, and at least two tiles of `rows` rows for each core. Otherwise all
    quarters are summed before the first product. The other sizes are half of the product's.
    """
    return cost.fits(4 * 7 * half_depth * half_units, machine) and half_rows // rows >= 2 * machine.cores


def error_bound(depth: int) -> float:
    """Return a bound on the rounding error of a float32 product of this depth by Strassen's algorithm.

    It is relative to `depth` times the largest magnitude in the left operand times the largest in the right operand,
    which bounds every result. The longest sum has four products. The operands of each are sums of at most two quarters,
    and each product rounds once per term (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, chapter 23).
    """
    return 6 * (depth / 2 + 5) * float(np.finfo("float32").eps) / 2


def pack(weight: Array, lanes: int) -> Array:
    """Sum the quarters of weights `[K][N]`; pack the seven sums into float32 `[7][N/2/v][K/2][v]`, v = `lanes`."""
    depth, units = (size // 2 for size in weight.shape)
    quarters = weight.astype("float64").reshape(2, depth, 2, units).transpose(0, 2, 1, 3).reshape(4, depth, units)
    sums = np.einsum("iq,qkn->ikn", np.array(RIGHT, "float64"), quarters).astype("float32")
    panels: Array = sums.reshape(7, depth, units // lanes, lanes).transpose(0, 2, 1, 3)
    return panels


def multiply(
    data: te.Tensor, weight: te.Tensor, *, outer: Sequence[int], steps: Sequence[int], tile: tiles.Tile, subject: str
) -> te.Tensor:
    """Multiply `data` of shape `[..., K]` by weights from `pack`; the result is `[*outer, N]`.

    `steps` and `outer` have one number for each leading dimension. With a step of s, every s-th position is a row of
    the product; `outer` counts these positions. `tile` is the register tile. `subject` names the product in the
    compiler's decisions (`compiler.choices`).
    """
    _, vectors, half_depth, lanes = (int(size) for size in weight.shape)
    half_rows, half_units = math.prod(outer) // 2, vectors * lanes

    def position(row: Any) -> list[Any]:
        place: list[Any] = []
        for size in reversed(outer[1:]):
            place.insert(0, row % size)
            row = row // size
        return [index * step for index, step in zip([row, *place], steps, strict=True)]

    panels = te.compute(
        (7, half_rows, half_depth),
        lambda i, p, k: combine(_LEFT, i, lambda q: data[(*position(p + q // 2 * half_rows), k + q % 2 * half_depth)]),
        name="panels",
    )
    k = te.reduce_axis((0, half_depth), "k")
    product = te.compute(
        (7, half_rows, half_units),
        lambda i, p, c: te.sum(panels[i, p, k] * weight[i, c // lanes, k, c % lanes], axis=k),
        name="product",
        attrs={KERNEL: "strassen", TILE: tile.rows, CHUNK: tile.vectors, LANES: lanes, SUBJECT: subject},
    )

    quarters = te.compute(
        (2, half_rows, 2, half_units),
        lambda upper, p, left, c: combine(_RESULT, upper * 2 + left, lambda i: product[i, p, c]),
        name="quarters",
    )

    def element(*index: Any) -> Any:
        *place, c = index
        row = place[0]
        for size, offset in zip(outer[1:], place[1:], strict=True):
            row = row * size + offset
        return quarters[row // half_rows, row % half_rows, c // half_units, c % half_units]

    return te.compute((*outer, 2 * half_units), element, name="unpack")
