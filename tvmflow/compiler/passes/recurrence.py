"""Lowers recurrent networks: a dense layer for the inputs of all steps, and one function for the recurrence."""

from collections.abc import Callable

import tvm
from tvm import relax, tirx

from tvmflow.arrays import Array
from tvmflow.compiler import extensions
from tvmflow.compiler.dotproduct import INT8, Dot, has_dot
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.cell_tiles import Tiles, pack_integers, pack_units
from tvmflow.compiler.operators.cells import Cell
from tvmflow.compiler.operators.common import constant, vector
from tvmflow.compiler.operators.recurrence import Recurrence
from tvmflow.compiler.passes.rewrite import Rewriter, rewriting


def lower_recurrence(machine: Machine, unit: Dot | None) -> tvm.transform.Pass:
    """Return the pass that lowers recurrent networks to a dense layer and one function for `machine`.

    `unit` is its dot product of integers, None without one.
    """

    def lower(rewriter: Rewriter, call: relax.Call) -> relax.Expr:
        return _lowered(rewriter, call, machine, unit)

    return rewriting("LowerRecurrence", {"tvmflow.recurrence": (lower,)})


def _lowered(rewriter: Rewriter, call: relax.Call, machine: Machine, unit: Dot | None) -> relax.Expr:
    operands = dict(zip((str(name) for name in call.attrs["operands"]), call.args, strict=True))
    cell = Cell.of(call.attrs)
    x, bias = operands["x"], operands.get("bias")
    steps, batch, _ = x.ty.shape.values
    units = int(operands["r"].ty.shape.values[-1])
    emit = rewriter.emit
    split_bias = cell.splits_bias and bias is not None
    names = ["split_bias"] if split_bias else []
    names += [name for name in ("lengths", "initial_h", "initial_c", "peepholes") if name in operands]
    integers = "r_scale" in operands and unit is INT8 and has_dot(vector(units, machine))
    if integers:
        names += ["r_scale", "r_sum"]
    kernel = Recurrence(cell, steps, batch, units, names, machine, integers=integers)
    tile, gates = kernel.tiles, cell.gates

    columns = cell.directions * gates * tile.units
    # Of two symbolic dimensions only one would become rows of the product, and the batch is often one sequence.
    is_free = not isinstance(steps, tirx.IntImm) and not isinstance(batch, tirx.IntImm)
    if is_free:
        x = emit(relax.op.reshape(x, relax.ShapeExpr([steps * batch, x.ty.shape.values[-1]])))
    products = _products(rewriter, operands | {"x": x}, gates, tile, has_dots=unit is not None)
    extra = {name: operands[name] for name in names if name in operands}
    if bias is not None:
        of_inputs, of_states = _halves(emit, bias, gates * units)
        if split_bias:
            most = emit(relax.op.strided_slice(of_states, [1], [0], [2 * units]))
            last = emit(relax.op.strided_slice(of_states, [1], [2 * units], [3 * units]))
            of_states = emit(relax.op.nn.pad(most, [0, 0, 0, units]))
            last = pack_units(emit(relax.op.expand_dims(last, 2)), 1, tile, emit)
            extra["split_bias"] = emit(relax.op.reshape(last, [cell.directions, tile.count, tile.blocks, tile.lanes]))
        total = emit(relax.op.expand_dims(emit(relax.op.add(of_inputs, of_states)), 2))
        total = emit(relax.op.reshape(pack_units(total, gates, tile, emit), [columns]))
        products = emit(relax.op.add(products, total))
    if is_free:
        products = emit(relax.op.reshape(products, relax.ShapeExpr([steps, batch, columns])))
    if "peepholes" in extra:
        peepholes = pack_units(emit(relax.op.expand_dims(extra["peepholes"], 2)), 3, tile, emit)
        shape = [cell.directions, tile.count, tile.blocks, 3, tile.lanes]
        extra["peepholes"] = emit(relax.op.reshape(peepholes, shape))
    if integers:
        integer_rows, scales = (_constant(rewriter, operands[name]) for name in ("r", "r_scale"))
        packed, by_scale, by_sum = map(constant, pack_integers(integer_rows, scales, gates, tile))
        packed_weights, extra = [packed], extra | {"r_scale": by_scale, "r_sum": by_sum}
    else:
        packed_weights = _packed_rows(rewriter, operands, cell, units, tile)
    function = extensions.emit_function(rewriter.builder_, kernel.function(), cell.kind)
    arguments = [products, *packed_weights, *(extra[name] for name in names)]
    return relax.call_tir(function, arguments, list(call.ty.fields))


def _products(
    rewriter: Rewriter, operands: dict[str, relax.Expr], gates: int, tile: Tiles, has_dots: bool
) -> relax.Expr:
    """The products of the inputs of all steps; where these are integers, in integers if there are dot products."""
    emit, x, weights = rewriter.emit, operands["x"], operands["w"]

    def pack(rows: relax.Expr) -> relax.Expr:
        packed = emit(relax.op.permute_dims(pack_units(rows, gates, tile, emit), [5, 0, 1, 2, 3, 4]))
        return emit(relax.op.reshape(packed, [rows.ty.shape.values[-1], -1]))

    if "w_scale" not in operands:
        return emit(relax.op.matmul(x, pack(weights)))
    integer_rows, scales = (_constant(rewriter, operands[name]) for name in ("w", "w_scale"))
    dtype = "int32" if has_dots else "float32"
    x, zero = (emit(relax.op.astype(operand, dtype)) for operand in (x, operands["x_zero"]))
    centred = emit(relax.op.subtract(x, zero))
    if not has_dots:
        rows = constant(integer_rows.astype("float32") * scales[..., None])
        return emit(relax.op.matmul(emit(relax.op.multiply(centred, operands["x_scale"])), pack(rows)))
    product = emit(relax.op.matmul(centred, pack(weights), out_dtype="int32"))
    scale = emit(relax.op.multiply(operands["x_scale"], pack(constant(scales[..., None]))))
    return emit(relax.op.multiply(emit(relax.op.astype(product, "float32")), scale))


def _packed_rows(
    rewriter: Rewriter, operands: dict[str, relax.Expr], cell: Cell, units: int, tile: Tiles
) -> list[relax.Expr]:
    """The recurrent weights of each phase in float32, in the form that `Recurrence` reads."""
    emit, weights = rewriter.emit, operands["r"]
    if "r_scale" in operands:
        integer_rows, scales = (_constant(rewriter, operands[name]) for name in ("r", "r_scale"))
        weights = constant(integer_rows.astype("float32") * scales[..., None])
    packed = []
    for phase in cell.phases:
        rows = weights
        if len(cell.phases) > 1:
            rows = emit(relax.op.strided_slice(rows, [1], [phase[0] * units], [(phase[-1] + 1) * units]))
        rows = pack_units(rows, len(phase), tile, emit)
        packed.append(emit(relax.op.permute_dims(rows, [0, 1, 5, 2, 3, 4])))
    return packed


def _constant(rewriter: Rewriter, expr: relax.Expr) -> Array:
    value = rewriter.constant(expr)
    if value is None:
        raise AssertionError("the importer makes a constant of it")
    return value


def _halves(emit: Callable[[relax.Expr], relax.Expr], value: relax.Expr, size: int) -> list[relax.Expr]:
    return [emit(relax.op.strided_slice(value, [1], [place * size], [(place + 1) * size])) for place in range(2)]
