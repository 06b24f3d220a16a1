"""Matrix products: dense layers with packed weights, and products over a batch."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx

from tvmflow.compiler import cost, tiles
from tvmflow.compiler.annotations import KERNEL, SUBJECT, TILE
from tvmflow.compiler.choices import Choices, Decisions, shape_text
from tvmflow.compiler.machine import NARROWEST, Machine
from tvmflow.compiler.operators.common import (
    JoinedRows,
    Product,
    are_equal,
    call_kernel,
    divides,
    is_float32,
    numbers_of,
    round_up,
    same_shape,
    static,
    vector,
)
from tvmflow.compiler.operators.packing import MatrixPacking, Number, pack_weights
from tvmflow.compiler.operators.widening import float_of_half, halves_of

# The fewest rows that fill a tile of their own.
FEWEST_ROWS = 4
# How many multiply-adds take as long as to convert a vector of float16 or bfloat16 numbers.
_CONVERTING = 1


def legalize(builder: relax.BlockBuilder, call: relax.Call, machine: Machine, choices: Choices) -> relax.Expr | None:
    """Define a product of float32 or float64 matrices by register tiles.

    Returns None for other types, for vectors, for a depth of 0, for a single row by a matrix of free size, for a result
    of unknown shape, and where the leading dimensions do not provably broadcast.
    """
    if not _is_product(call):
        return None
    left, right = call.args
    left_shape, right_shape = list(left.ty.shape.values), list(right.ty.shape.values)
    decisions = choices.about(subject_of(call))
    if str(call.ty.dtype) == "float64":
        machine = replace(machine, number=8)
    elif _is_dense(right) and not _is_read_in_place(left, right, machine):
        lanes = vector(int(right_shape[1]), machine)
        rows = static(math.prod(left_shape[:-1]))
        vectors = filled_vectors(int(right_shape[1]), lanes, rows, machine)
        number: Number = _halves_of(right, rows, vectors, machine) or "float32"
        packed_weight = pack_weights(builder, right, MatrixPacking(lanes, vectors, number=number))
        compute = partial(dense, units=int(right_shape[1]), machine=machine, decisions=decisions)
        return call_kernel(builder, compute, left, packed_weight, name="dense")
    if not isinstance(call.ty.shape, relax.ShapeExpr):
        return None
    batch = list(call.ty.shape.values)[:-2]
    if not batch and static(left_shape[-2]) == 1 and not _is_dense(right):
        # Tiles of columns would read a large matrix in pieces far apart; a row of results reads it as it lies.
        return None
    if not all(broadcasts(shape[:-2], batch) for shape in (left_shape, right_shape)):
        return None
    compute = partial(batch_matmul, batch=batch, machine=machine, decisions=decisions)
    if isinstance(right, tvm.ir.GenericConst) and is_float32(right):
        units = int(right_shape[-1])
        lanes = vector(units, machine)
        vectors = filled_vectors(units, lanes, static(left_shape[-2]), machine)
        compute = partial(compute, packed_units=units)
        right = pack_weights(builder, right, MatrixPacking(lanes, vectors))
    return call_kernel(builder, compute, left, right, name="batch_matmul")


def _is_product(call: relax.Call) -> bool:
    """Whether a call multiplies matrices of float32 or of float64, neither of which is empty or of one dimension."""
    dtypes = {str(tensor.ty.dtype) for tensor in (*call.args, call)}
    if dtypes not in ({"float32"}, {"float64"}) or not all(
        isinstance(tensor.ty.shape, relax.ShapeExpr) for tensor in call.args
    ):
        return False
    left, right = (argument.ty.shape.values for argument in call.args)
    return len(left) >= 2 and len(right) >= 2 and static(right[-2]) != 0


def _is_dense(right: relax.Expr) -> bool:
    """Whether the right operand of a product is a matrix of known size."""
    shape = right.ty.shape.values
    return len(shape) == 2 and bool(static(shape[0]) and static(shape[1]))


def _is_read_in_place(left: relax.Expr, right: relax.Expr, machine: Machine) -> bool:
    """Whether a computed matrix of known size takes longer to pack than to read where it lies.

    One tile of rows reads it once, and a free number of rows may be one. Several tiles read the columns of a tile
    again, and these must not evict each other from the second-level cache. Rows of several items are packed.
    """
    *lead, rows, _ = map(static, left.ty.shape.values)
    depth, units = (int(size) for size in right.ty.shape.values)
    lanes = vector(units, machine)
    vectors = filled_vectors(units, lanes, rows, machine, is_packed=False)
    if isinstance(right, tvm.ir.GenericConst) or vectors * lanes != units or any(size != 1 for size in lead):
        return False
    if rows is not None:
        return rows <= tiles.choose(rows, vectors, machine).rows
    return cost.lines_in_set(depth, machine.number * units, machine.second) <= machine.second.ways


def subject_of(call: relax.Call) -> str:
    """Return the subject of the decisions about a matrix product: the shapes of its operands as text."""
    left, right = (shape_text(argument.ty.shape.values) for argument in call.args)
    return f"matmul {left} by {right}"


def filled_vectors(
    channels: int, lanes: int, rows: int | None, machine: Machine, uses: int = 1, *, is_packed: bool = True
) -> int:
    """Return the number of vectors of `lanes` lanes to which the right operand's `channels` columns are packed.

    There may be one more than the columns need, so that better register tiles divide them (`tiles.filled`, which says
    what `rows`, `uses` and `is_packed` are).
    """
    vectors = -(-channels // lanes)
    return tiles.filled(rows, vectors, machine, uses, is_packed=is_packed) if lanes == machine.lanes else vectors


def _halves_of(weight: relax.Expr, rows: int | None, vectors: int, machine: Machine) -> Number | None:
    """The type of 16 bits that has the numbers of constant weights.

    None for other weights, and where those in float32 are faster. A symbolic number of rows counts as few.
    """
    if not isinstance(weight, tvm.ir.GenericConst):
        return None
    count = math.prod(int(size) for size in weight.ty.shape.values)
    passes = 1 if rows is None else -(-rows // tiles.choose(rows, vectors, machine).rows)
    if not cost.widening_pays(count, 2 * count, passes * _CONVERTING, machine):
        return None
    stored = halves_of(numbers_of(weight), machine.converts_halves)
    if stored is None:
        return None
    return "float16" if stored.dtype == np.float16 else "bfloat16"


def dense(data: te.Tensor, weight: te.Tensor, *, units: int, machine: Machine, decisions: Decisions) -> te.Tensor:
    """Multiply `data` of shape `[..., K]` by packed weights `[N/v][K][v]`; the result is `[..., units]`.

    The weights are float32, float16, or the bits of bfloat16 as uint16.
    The leading dimensions that `row_dimensions` chooses are flattened into one dimension of rows. The others stay
    dimensions of a batch, because TVM cannot simplify divisions by symbolic sizes. `units` is N.
    """
    *outer, _ = data.shape
    vectors, _, lanes = (int(dim) for dim in weight.shape)
    joined = JoinedRows(outer, row_dimensions(outer))

    def right(*index: Any) -> Any:
        return float_of_half(weight[index[-1] // lanes, index[-2], index[-1] % lanes])

    product = joined.product(data, right, vectors * lanes, lanes, joined.joined)
    return joined.unpack(rows_product(product, machine, decisions), units)


def row_dimensions(sizes: Sequence[Any]) -> list[int]:
    """Choose which leading dimensions of a dense layer's input become rows; return their places in `sizes`.

    If all sizes are known, all dimensions become rows. Otherwise those of `known_rows` do, or the last dimension whose
    size is not one. (`passes.rows` makes one dimension of several beforehand.)
    """
    numbers = [static(size) for size in sizes]
    if None not in numbers:
        return list(range(len(sizes)))
    return known_rows(sizes) or [max(place for place, size in enumerate(numbers) if size != 1)]


def rows_of_pixels(outer: Sequence[Any]) -> JoinedRows:
    """Choose which pixels of NHWC images, of which `outer` are the leading sizes, are the rows of a matrix product.

    All pixels of an image are where their number is known. Otherwise those of a line are, unless the line has too few:
    TVM cannot simplify divisions by symbolic sizes.
    """
    _, height, width = outer
    is_by_line = static(height * width) is None and (static(width) is None or int(width) >= FEWEST_ROWS)
    return JoinedRows(outer, [2] if is_by_line else [1, 2])


def known_rows(sizes: Sequence[Any]) -> list[int]:
    """Return the places of the leading dimensions after the last symbolic one if they have a tile's rows, else none."""
    numbers = [static(size) for size in sizes]
    first = max((place + 1 for place, size in enumerate(numbers) if size is None), default=0)
    return list(range(first, len(sizes))) if math.prod(sizes[first:]) >= FEWEST_ROWS else []


def broadcasts(sizes: Sequence[Any], batch: Sequence[Any]) -> bool:
    """Return whether leading dimensions broadcast to the batch: each, from the last on, is one or the batch's."""
    last = batch[len(batch) - len(sizes) :]
    return all(static(size) == 1 or are_equal(size, whole) for size, whole in zip(sizes, last, strict=True))


def multiply_transposed(
    builder: relax.BlockBuilder,
    call: relax.Call,
    source: relax.Expr,
    axes: Sequence[int],
    machine: Machine,
    choices: Choices,
) -> relax.Expr | None:
    """Define a float32 product by a transpose of `source`, which the product packs as it goes.

    In the transpose the dimensions of `source` stand in the order `axes`. Each task packs the columns that it
    multiplies, by shuffles, and multiplies all rows by them. Returns None where the product needs the columns of a task
    again in others, where numbers of a column do not lie side by side, and where the tasks are too few for the cores.
    """
    left, right = call.args
    if not _is_product(call) or not is_float32(left, right) or not isinstance(call.ty.shape, relax.ShapeExpr):
        return None
    *batch, _, units = call.ty.shape.values
    if axes[-2] != len(axes) - 1 or not same_shape(right.ty.shape.values[:-2], batch):
        return None
    if not broadcasts(left.ty.shape.values[:-2], batch):
        return None
    tasks = static(math.prod([*batch, -(-units // machine.lanes)], start=tirx.IntImm("int64", 1)))
    if tasks is not None and cost.evenness(tasks, machine) < cost.EVEN:
        return None
    compute = partial(
        batch_matmul, batch=batch, machine=machine, decisions=choices.about(subject_of(call)), axes=tuple(axes)
    )
    return call_kernel(builder, compute, left, source, name="batch_matmul")


def place_of_operand(index: Sequence[Any], lead: Sequence[Any]) -> tuple[Any, ...]:
    """Return an index of the whole product as one into the leading dimensions `lead` of an operand.

    Operands that have one element along a dimension, or lack it, are broadcast.
    """
    own = index[len(index) - 2 - len(lead) : len(index) - 2]
    return tuple(0 if static(size) == 1 else at for size, at in zip(lead, own, strict=True))


def batch_matmul(
    left: te.Tensor,
    right: te.Tensor,
    *,
    batch: Sequence[Any],
    machine: Machine,
    decisions: Decisions,
    packed_units: int | None = None,
    axes: Sequence[int] | None = None,
) -> te.Tensor:
    """Multiply `left` `[..., rows, K]` by `right` `[..., K, N]` over the leading dimensions `batch`.

    With `packed_units`, which is N, `right` is packed as `[..., N/v, K, v]`. With `axes`, which end with K, then N, the
    product's operand is the transpose of `right` in which these dimensions of it stand in this order, and K is the last
    dimension of `right`. Operands that lack some of the leading dimensions are broadcast. The result is
    `[*batch, rows, N]`.
    """
    rows, depth = left.shape[-2:]
    if packed_units is not None:
        units: Any = packed_units
        vectors, _, lanes = (int(size) for size in right.shape[-3:])
        room: Any = vectors * lanes

        def weight(*index: Any) -> Any:
            *_, k, c = index
            return right[(*place_of_operand(index, right.shape[:-3]), c // lanes, k, c % lanes)]
    elif axes is not None:
        *lead, _, units = (right.shape[axis] for axis in axes)
        lanes = machine.lanes
        columns, width = static(units), math.gcd(static(depth) or 0, lanes)
        room = round_up(units, lanes)
        if columns:
            room = lanes * filled_vectors(columns, lanes, static(rows), machine)
        if width < NARROWEST:
            # Shuffles copy tiles that are full, with zeros where the depth ends.
            width = lanes

        def packed(*index: Any) -> Any:
            *place, outer, k, lane = index
            source = dict(zip(axes, [*place, k, outer * lanes + lane], strict=True))
            element = right[tuple(source[axis] for axis in range(len(axes)))]
            conditions = [] if divides(width, depth) else [k < depth]
            conditions += [] if columns == room else [outer * lanes + lane < units]
            return (
                tirx.if_then_else(tirx.all(*conditions), element, tirx.const(0, "float32")) if conditions else element
            )

        panel = te.compute((*lead, room // lanes, round_up(depth, width), lanes), packed, name="pack_transposed")

        def weight(*index: Any) -> Any:
            *_, k, c = index
            return panel[(*place_of_operand(index, lead), c // lanes, k, c % lanes)]
    else:
        units = right.shape[-1]
        columns = static(units)
        lanes = machine.lanes if columns is None else vector(columns, machine)
        whole, room = right, round_up(units, lanes)
        if columns:
            room = lanes * filled_vectors(columns, lanes, static(rows), machine, is_packed=columns % lanes != 0)
        if columns is None or room != columns:
            # Copy the columns to whole vectors, whose number good register tiles divide.
            whole = te.compute(
                (*right.shape[:-1], room),
                lambda *index: tirx.if_then_else(index[-1] < units, right[index], tirx.const(0, right.dtype)),
                name="pack",
            )

        def weight(*index: Any) -> Any:
            return whole[(*place_of_operand(index, whole.shape[:-2]), *index[-2:])]

    product = Product(
        batch=batch,
        rows=rows,
        depth=depth,
        channels=room,
        lanes=lanes,
        left=lambda *index: left[(*place_of_operand(index, left.shape[:-2]), *index[-2:])],
        right=weight,
        shared=False,
    )
    result = rows_product(product, machine, decisions)
    return te.compute((*batch, rows, units), lambda *index: result[index], name="unpack")


def rows_product(product: Product, machine: Machine, decisions: Decisions) -> te.Tensor:
    """Define a matrix product of floats, computed in whole register tiles.

    The element of the right operand is `right(*batch_index, k, channel)`. Where the rows of a tile do not divide those
    of the product, the result has more rows, which repeat the last row of the left operand. The `decisions` choose the
    rows of a tile. Where rows of the left operand evict each other from the first-level cache, they also choose whether
    the rows of each tile are first copied side by side.
    """
    batch, rows, depth = product.batch, product.rows, product.depth
    row_bytes = machine.number * int(depth) if static(depth) else None
    ranked = tiles.rank(static(rows), product.vectors or 2, machine, row_bytes)
    tile = tiles.choose_rows(ranked, decisions)
    source = product.left
    tiled_rows = rows
    if not divides(tile, rows):
        source, tiled_rows = product.last_row_repeated, round_up(rows, tile)
    elif (
        product.shared
        and tiles.conflicts(row_bytes, machine)
        and decisions.choose("panel", {"in place": False, "packed": True})
    ):
        packed_rows = te.compute(
            (*batch, rows // tile, depth, tile),
            lambda *index: product.left(*index[:-3], index[-3] * tile + index[-1], index[-2]),
            name="packed_rows",
        )

        def source(*index: Any) -> Any:
            *place, row, k = index
            return packed_rows[(*place, row // tile, k, row % tile)]

    k = te.reduce_axis((0, depth), "k")
    return te.compute(
        (*batch, tiled_rows, product.channels),
        lambda *index: te.sum(source(*index[:-1], k) * product.right(*index[:-2], k, index[-1]), axis=k),
        name="product",
        attrs={KERNEL: "rows", SUBJECT: decisions.subject, TILE: tile, **product.annotations},
    )
