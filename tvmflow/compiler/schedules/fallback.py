"""The schedule for any function: inlines the blocks that TVM allows, parallelises and vectorises the others."""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmflow.compiler.choices import Choices
from tvmflow.compiler.machine import NARROWEST, Machine
from tvmflow.compiler.schedules import common, registers, transposes

# The most pieces that a dimension is cut into, and the most places that its elements come from in turn: each piece is
# a loop of its own in the code, and each place a copy of the statement.
_MOST_PIECES = 64
_MOST_TURNS = 8
# The numbers of vectors that a register tile of a product may have in a row, by its number of rows: eight sums hide the
# latency of an addition, and leave registers for operands on every machine.
_VECTORS = {1: (1, 2, 4, 8), 2: (1, 2, 4), 4: (1, 2)}


def apply(sch: Schedule, machine: Machine, _choices: Choices) -> bool:
    """Schedule every block by itself; takes every function and returns True."""
    common.inline_elementwise(sch)
    for block in common.blocks(sch):
        # A block that TVM refuses to schedule further stays correct, but slower.
        with suppress(Exception):
            if not any(rule(sch, block, machine) for rule in _RULES):
                common.parallel_vectorized(sch, block, machine)
    return True


def _spread(sch: Schedule, loops: Sequence[LoopRV], work: int, machine: Machine) -> None:
    """Spread loops over the cores where their iterations, times `work` in each, are worth a parallel region."""
    if loops and work * common.iterations(sch, loops, machine) >= machine.parallel_iterations:
        common.parallel(sch, common.fuse(sch, loops), machine)


def _schedule_transpose(sch: Schedule, block: SBlockRV, machine: Machine) -> bool:
    """Schedule a block that reads along one dimension and writes along another: square tiles that stay in the cache.

    Returns False for other blocks.
    """
    variables = list(sch.get(block).iter_vars)
    if common.is_reduction(sch, block) or len(variables) < 2:
        return False
    *others, last = variables
    innermost_indices = [
        index
        for region in sch.get(block).reads
        if region.region and isinstance(index := region.region[-1].min, tirx.Var)
    ]
    across = [
        place
        for place, variable in enumerate(others)
        if any(variable.var.same_as(index) for index in innermost_indices)
    ]
    if not across or any(last.var.same_as(index) for index in innermost_indices):
        return False
    loops = list(sch.get_loops(block))
    extents = [common.extent(sch, loops[place]) for place in (across[0], -1)]
    places = (across[0], len(others))
    # A vector of the larger numbers, and not more vectors than there are registers for the smaller ones.
    lanes = min(machine.lanes, machine.lanes * machine.number // common.item_bytes(sch.get(block).writes[0].source))
    by_shuffles = lanes >= NARROWEST and transposes.fits(sch, block, places)
    edges = [
        min(lanes, lanes if extent is None else 1 << (extent.bit_length() - 1))
        if by_shuffles
        else math.gcd(extent or 1, machine.lanes)
        for extent in extents
    ]
    if min(edges) < NARROWEST:
        return False
    (far, near), (outer, lane) = (
        sch.split(loops[place], [None, edge]) for place, edge in zip((across[0], -1), edges, strict=True)
    )
    tasks = [loop for place, loop in enumerate(loops[:-1]) if place != across[0]]
    # A line of the cache is read to its end before the next one.
    line = math.gcd(extents[0] or edges[0], machine.first.line // machine.number)
    far, within = sch.split(far, [None, max(1, line // edges[0])])
    sch.reorder(*tasks, far, outer, within, near, lane)
    if by_shuffles:
        transposes.mark(sch, places, near)
    else:
        registers.keep_in_registers(sch, [near, lane])
    _spread(sch, [*tasks, far, outer], math.prod(edges), machine)
    return True


def _steps_of_last(sch: Schedule, block: SBlockRV) -> list[int]:
    """The divisors, greater than one, by which a block divides its last index, and which divide the extent of its loop.

    The list is empty for reductions, and for blocks with other loops than one for each dimension.
    """
    loops = list(sch.get_loops(block))
    if common.is_reduction(sch, block) or not loops or len(loops) != len(sch.get(block).iter_vars):
        return []
    steps = [
        int(node.b)
        for node in _list_uses_of_last(sch, block, tirx.FloorMod, tirx.FloorDiv, tirx.Div)
        if isinstance(node.b, tirx.IntImm) and _changes(node.a, sch.get(block).iter_vars[-1].var)
    ]
    return [step for step in steps if step > 1 and _divides(step, sch.get(loops[-1]).extent)]


def _schedule_interleaving(sch: Schedule, block: SBlockRV, machine: Machine) -> bool:
    """Schedule a block whose neighbouring elements come from a few places in turn: one place at a time; else False."""
    size, steps = _extent_of_last(sch, block), [step for step in _steps_of_last(sch, block) if step <= _MOST_TURNS]
    if not steps:
        return False
    *outer, last = sch.get_loops(block)
    _, turn = sch.split(last, [None, max(steps)])
    sch.unroll(turn)
    _spread(sch, outer, size or 1, machine)
    return True


def _schedule_repeats(sch: Schedule, block: SBlockRV, machine: Machine) -> bool:
    """Schedule a block whose rows are repeated runs of elements, or of one element each: run by run; else False."""
    size, steps = _extent_of_last(sch, block), [step for step in _steps_of_last(sch, block) if step > _MOST_TURNS]
    if not steps:
        return False
    *outer, last = sch.get_loops(block)
    run, _ = sch.split(last, [None, min(steps)])
    # A run shorter than a vector has narrower ones.
    lanes = min(machine.lanes, 1 << (min(steps).bit_length() - 1))
    common.vectorize_last(sch, block, machine, lanes)
    tasks = math.prod(common.extent(sch, loop) or machine.cores for loop in outer)
    # As part of the fused loop, the one over runs would be a division for each of them.
    _spread(sch, outer if tasks >= machine.cores else [*outer, run], size or 1, machine)
    return True


def _schedule_pieces(sch: Schedule, block: SBlockRV, machine: Machine) -> bool:
    """Schedule a block whose source depends on the last dimension (concatenation): a loop per source; else False."""
    size = _extent_of_last(sch, block)
    if size is None:
        return False
    comparisons = _list_uses_of_last(sch, block, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
    variable = sch.get(block).iter_vars[-1].var
    cuts, period = _find_cuts(comparisons, variable, size), size
    if not cuts:
        # A reshape may have joined the dimension with others: each of these parts has the sources of the first one.
        rests = [node for compared in comparisons for node in common.walk(compared) if _is_rest(node, variable)]
        periods = {int(rest.b) for rest in rests}
        if len(periods) == 1 and size % min(periods) == 0:
            period = min(periods)
            cuts = _find_cuts(comparisons, rests[0], period)
    sizes = [after - before for before, after in zip([0, *cuts], [*cuts, period], strict=True)]
    if not cuts or len(sizes) > _MOST_PIECES or max(sizes) < NARROWEST:
        return False
    *outer, last = sch.get_loops(block)
    if period < size:
        part, last = sch.split(last, [None, period])
        outer.append(part)
    edge = math.gcd(machine.lanes, *sizes)
    if edge >= NARROWEST:
        last, lane = sch.split(last, [None, edge])
        sch.vectorize(lane)
        sizes = [length // edge for length in sizes]
    # Pieces without a common vector width stay plain loops, which LLVM vectorises.
    sch.loop_partition(last, sizes[:-1])
    _spread(sch, outer, period, machine)
    return True


def _schedule_ragged(sch: Schedule, block: SBlockRV, machine: Machine) -> bool:
    """Schedule a block whose last dimension is no multiple of a vector, with rows enough for the cores; else False."""
    size = _extent_of_last(sch, block)
    if size is None or size <= machine.lanes or size % machine.lanes == 0:
        return False
    outer = list(sch.get_loops(block))[:-1]
    if math.prod(common.extent(sch, loop) or machine.cores for loop in outer) < machine.cores:
        return False
    common.vectorize_last(sch, block, machine)
    _spread(sch, outer, size, machine)
    return True


def _schedule_product(sch: Schedule, block: SBlockRV, machine: Machine) -> bool:
    """Schedule a matrix product, as of float64 or of integers: a tile of rows by vectors in registers; else False."""
    variables, loops = list(sch.get(block).iter_vars), list(sch.get_loops(block))
    if len(loops) != len(variables) or not _adds_products(sch.get(block).body):
        return False
    *spatial, _reduced = variables
    kinds = [*[tirx.IterVar.DataPar] * len(spatial), tirx.IterVar.CommReduce]
    if not spatial[1:] or [variable.iter_type for variable in variables] != kinds:
        return False
    column = spatial[-1].var
    innermost = [region.region[-1].min for region in sch.get(block).reads]
    if not any(isinstance(index, tirx.Var) and index.same_as(column) for index in innermost):
        return False
    height, width, _ = (common.extent(sch, loop) for loop in loops[-3:])
    lanes = machine.lanes * machine.number // common.item_bytes(sch.get(block).writes[0].source)
    if width is None or width % lanes:
        return False
    rows = max(count for count in _VECTORS if (height or 1) % count == 0)
    vectors = max(count for count in _VECTORS[rows] if width % (count * lanes) == 0)
    tile = sch.cache_write(block, 0, "local")
    *lead, far, outer = list(sch.get_loops(tile))
    far, near = sch.split(far, [None, rows])
    outer, vector, lane = sch.split(outer, [None, vectors, lanes])
    sch.reorder(*lead, outer, far, near, vector, lane)
    registers.keep_in_registers(sch, [near, vector, lane])
    sch.compute_at(block, far, preserve_unit_loops=True)
    inner = list(sch.get_loops(block))
    row_loop, column_loop, step = inner[-3:]
    vector, lane = sch.split(column_loop, [vectors, lanes])
    registers.accumulate(sch, block, [row_loop, vector, lane], [step])
    _spread(sch, [*lead, outer, far], rows * vectors * lanes * (common.extent(sch, step) or 1), machine)
    return True


def _adds_products(body: Any) -> bool:
    """Whether a block adds products of two numbers, each of which may be converted first."""
    value = body.value if isinstance(body, tirx.BufferStore) else None
    return isinstance(value, tirx.Add) and isinstance(value.b, tirx.Mul)


def _divides(step: int, extent: Any) -> bool:
    return bool(tvm.sym.Analyzer().can_prove_equal(tirx.floormod(extent, step), 0))


def _changes(index: Any, variable: tirx.Var) -> bool:
    """Whether an index changes with each step of a variable, always by as much."""
    step = common.substitute(index, {variable: variable + 1}) - index
    difference = tvm.sym.Analyzer().simplify(step)
    return isinstance(difference, tirx.IntImm) and int(difference) != 0


def _find_cuts(comparisons: Sequence[Any], place: Any, size: int) -> list[int]:
    """The numbers below `size` at which comparisons with `place` change their values, sorted."""
    return sorted({cut for node in comparisons if (cut := _find_cut(node, place)) is not None and 0 < cut < size})


def _is_rest(node: Any, variable: tirx.Var) -> bool:
    """Whether a node is the rest of a variable's division by a number."""
    return isinstance(node, tirx.FloorMod) and node.a.same_as(variable) and isinstance(node.b, tirx.IntImm)


def _find_cut(node: Any, place: Any) -> int | None:
    """Find the number at which a comparison with `place` changes its value; None where it is unknown."""
    analyzer = tvm.sym.Analyzer()
    difference = analyzer.simplify(node.a - node.b - place)
    sign = 1
    if not isinstance(difference, tirx.IntImm):
        difference, sign = analyzer.simplify(node.a - node.b + place), -1
    if not isinstance(difference, tirx.IntImm):
        return None
    # The comparison is of `place + d` or `d - place` with zero.
    cut = -int(difference) * sign
    strict = isinstance(node, tirx.LT | tirx.GE)
    return cut if strict == (sign > 0) else cut + 1


def _extent_of_last(sch: Schedule, block: SBlockRV) -> int | None:
    loops = list(sch.get_loops(block))
    if common.is_reduction(sch, block) or not loops or len(loops) != len(sch.get(block).iter_vars):
        return None
    return common.extent(sch, loops[-1])


def _list_uses_of_last(sch: Schedule, block: SBlockRV, *kinds: type) -> list[Any]:
    """The expressions of these kinds in which the innermost dimension occurs."""
    variables, body = list(sch.get(block).iter_vars), sch.get(block).body
    if not variables or not isinstance(body, tirx.BufferStore):
        return []
    analyzer = tvm.sym.Analyzer()
    for variable in variables:
        analyzer.bind(variable.var, variable.dom)
    # Reshapes leave quotients that are always zero.
    return [
        node
        for node in common.walk(analyzer.simplify(body.value))
        if isinstance(node, kinds) and any(part.same_as(variables[-1].var) for part in common.walk(node))
    ]


_RULES = (
    _schedule_transpose,
    _schedule_interleaving,
    _schedule_pieces,
    _schedule_repeats,
    _schedule_ragged,
    _schedule_product,
)
