"""Helpers that the schedule rules share: to find blocks and loops, to inline, to vectorise."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmflow.compiler import cost
from tvmflow.compiler.annotations import KERNEL, SUBJECT
from tvmflow.compiler.machine import NARROWEST, Machine
from tvmflow.compiler.operators.common import static

# The number of dimensions of a batch of images.
_IMAGE = 4
# The most nodes that all copies of an inlined expression may have together: TVM takes minutes for longer ones.
_LARGEST_COPIES = 200
# So many vectors of a single line of free length are a task for one core.
_VECTORS = 64
# The functions that the C library computes one element at a time.
_SLOW = frozenset(
    f"tirx.{name}" for name in ("exp", "log", "log2", "log10", "log1p", "pow", "tanh", "sin", "cos", "erf")
)
# Makes TVM split a loop in two parts: the iterations without bounds checks, which vectorise, and the rest.
PARTITION = "pragma_loop_partition_hint"


def blocks(sch: Schedule) -> list[SBlockRV]:
    """List all blocks below the root, in the order in which they run."""
    return list(sch.get_child_blocks(sch.get_sblock("root")))


def extent(sch: Schedule, loop: LoopRV) -> int | None:
    """Return a loop's extent; None where it is symbolic."""
    value = sch.get(loop).extent
    return int(value) if isinstance(value, tirx.IntImm) else None


def iterations(sch: Schedule, loops: Iterable[LoopRV], machine: Machine) -> int:
    """Return the number of iterations of a loop nest.

    A symbolic extent counts as `machine.parallel_iterations`, as many as are worth a parallel region.
    """
    return math.prod(extent(sch, loop) or machine.parallel_iterations for loop in loops)


def is_reduction(sch: Schedule, block: SBlockRV) -> bool:
    """Whether the block is a reduction."""
    return any(variable.iter_type == tirx.IterVar.CommReduce for variable in sch.get(block).iter_vars)


def is_elementwise(sch: Schedule, block: SBlockRV) -> bool:
    """Whether a block reads, for each element that it writes, only elements at the same index.

    An operand with fewer dimensions, or with one element along a dimension, may be broadcast.
    """
    if is_reduction(sch, block):
        return False
    order = [variable.var for variable in sch.get(block).iter_vars]
    for region in sch.get(block).reads:
        places = []
        for span in region.region:
            if not isinstance(span.extent, tirx.IntImm) or int(span.extent) != 1:
                return False
            if isinstance(span.min, tirx.IntImm):
                continue
            place = next((place for place, variable in enumerate(order) if variable.same_as(span.min)), None)
            if place is None:
                return False
            places.append(place)
        if places != sorted(places):
            return False
    return True


def inline_elementwise(sch: Schedule) -> None:
    """Inline every block that is no reduction into the blocks that read it, or into the block that it reads.

    Blocks that TVM refuses to inline stay. So do blocks whose copies would make a very large expression (`multiplies`),
    and blocks of slow functions that would be computed more often (`repeats`).
    """
    for block in blocks(sch):
        if is_reduction(sch, block) or not sch.get_consumers(block) or multiplies(sch, block) or repeats(sch, block):
            continue
        with suppress(Exception):
            sch.compute_inline(block)
    for block in reversed(blocks(sch)):
        writers = sch.get_producers(block)
        if not is_reduction(sch, block) and writers and not any(multiplies(sch, writer) for writer in writers):
            with suppress(Exception):
                sch.reverse_compute_inline(block)


def multiplies(sch: Schedule, block: SBlockRV) -> bool:
    """Whether inlining a block into all of the several places that read it would make a very large expression.

    Such an expression computes the same thing again and again, and TVM's simplifier takes minutes for it.
    """
    body = sch.get(block).body
    readers = [sch.get(reader).body for reader in sch.get_consumers(block)]
    if not isinstance(body, tirx.BufferStore):
        return False
    places = sum(
        bool(isinstance(node, tvm.ir.TensorLoad) and node.source.same_as(body.buffer))
        for reader in readers
        if isinstance(reader, tirx.BufferStore)
        for node in walk(reader.value)
    )
    return places > 1 and places * sum(1 for _ in walk(body.value)) > _LARGEST_COPIES


def walk(expr: Any, *, indices: bool = True) -> Iterator[Any]:
    """Yield an expression and all of its subexpressions; without `indices`, none of those in indices."""
    yield expr
    fields = [getattr(expr, name, None) for name in ("a", "b", "condition", "true_value", "false_value", "value")]
    places = getattr(expr, "indices", ()) if indices else ()
    for part in (*fields, *getattr(expr, "args", ()), *places):
        if isinstance(part, tvm.ir.Expr):
            yield from walk(part, indices=indices)


def has_function(sch: Schedule, block: SBlockRV) -> bool:
    """Whether a block computes a function of many steps, such as an exponential."""
    return any(isinstance(node, tirx.Let) for node in walk(sch.get(block).body))


def substitute(expr: Any, values: Mapping[Any, Any]) -> Any:
    """Return an expression, simplified, with `values` in the place of the variables that are its keys."""
    analyzer = tvm.sym.Analyzer()
    for variable, value in values.items():
        analyzer.bind(variable, value)
    return analyzer.simplify(expr)


def chooses_along_last(sch: Schedule, block: SBlockRV) -> bool:
    """Whether a comparison in a block, as in a concatenation, depends on the index along the block's last dimension.

    TVM partitions a loop of symbolic extent by such a condition too, and then forgets the loop's own end. It does not
    by a comparison of numbers that are read at the index, as in an activation with a threshold. Also true for a block
    that has no such dimension or does more than store an element.
    """
    body = sch.get(block).body
    places = [item.var for item in sch.get(block).iter_vars if item.iter_type == tirx.IterVar.DataPar]
    if not isinstance(body, tirx.BufferStore) or not places:
        return True
    comparisons = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)
    return any(
        isinstance(node, comparisons) and any(part.same_as(places[-1]) for part in walk(node, indices=False))
        for node in walk(body.value)
    )


def repeats(sch: Schedule, block: SBlockRV) -> bool:
    """Whether inlining a block would compute a slow function of a reduction's result again for each of its readers.

    Such is the logarithm of a sum, which every element of a row reads.
    """
    if not any(is_reduction(sch, producer) for producer in sch.get_producers(block)):
        return False
    if not any(isinstance(node, tirx.Let) or _is_slow(node) for node in walk(sch.get(block).body)):
        return False
    return not all(_same_size(sch, block, reader) for reader in sch.get_consumers(block))


def _is_slow(node: Any) -> bool:
    """Whether an expression is a call of a function that the processor has no instruction for, such as a logarithm."""
    return isinstance(node, tvm.ir.Call) and getattr(node.op, "name", "") in _SLOW


def reads_along_last(sch: Schedule, block: SBlockRV) -> bool:
    """Whether a block reads elements side by side in memory where its last independent index changes."""
    places = [item.var for item in sch.get(block).iter_vars if item.iter_type == tirx.IterVar.DataPar]
    innermost = [region.region[-1].min for region in sch.get(block).reads if region.region]
    return bool(places) and any(isinstance(index, tirx.Var) and index.same_as(places[-1]) for index in innermost)


def parallel_vectorized(sch: Schedule, block: SBlockRV, machine: Machine) -> None:
    """Spread a block's independent loops over the cores, and vectorise the innermost one of them.

    The loops of a reduction run between the two. A block too small for a parallel region runs on one core. The
    innermost loop stays scalar where its extent is symbolic or fills no whole vectors, unless TVM can partition it.
    """
    loops = list(sch.get_loops(block))
    kinds = [variable.iter_type for variable in sch.get(block).iter_vars]
    if not loops or len(loops) != len(kinds):
        return
    spatial = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == tirx.IterVar.DataPar]
    reduced = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == tirx.IterVar.CommReduce]
    if len(spatial) + len(reduced) != len(loops):
        return
    if not spatial:
        # Of no elements, the loops would not write the result at all.
        sch.decompose_reduction(block, reduced[0])
        return
    tasks = 1
    for loop in spatial[:-1]:
        tasks *= extent(sch, loop) or machine.cores
    is_worth_threads = iterations(sch, loops, machine) >= machine.parallel_iterations
    inner = spatial.pop()
    size = extent(sch, inner)
    serial: list[LoopRV] = []
    vector = None
    if size is not None and size in (2, 4, 8, 16) and size <= machine.lanes:
        vector = inner
    elif size is not None and size <= machine.lanes:
        serial = [inner]
        if len(spatial) > 1 and extent(sch, spatial[-1]) is None:
            # LLVM vectorises this loop; as part of the fused loop it would divide by its length for each iteration.
            serial.insert(0, spatial.pop())
    else:
        lanes = machine.lanes if size is None else math.gcd(size, machine.lanes)
        whole = size is not None and lanes >= NARROWEST
        can_partition = is_static(sch) if size is not None else not chooses_along_last(sch, block)
        # Without vectors, a reduction over rows would read each column by itself.
        along_rows = bool(reduced) and reads_along_last(sch, block)
        if size is None and can_partition and not spatial and not reduced:
            # A loop that cores share has no vectors of its own where the value is a choice.
            task, inner = sch.split(inner, [None, _VECTORS * machine.lanes])
            spatial.append(task)
            tasks = machine.cores
        partitioned = not whole and (tasks >= machine.cores or along_rows) and can_partition
        if whole or partitioned:
            rest, vector = sch.split(inner, [None, lanes if whole else machine.lanes])
            # Inside the reduction, this loop would compute its addresses again for each vector.
            (spatial if tasks < machine.cores else serial).append(rest)
            if partitioned:
                sch.annotate(rest, PARTITION, 1)
        else:
            (spatial if tasks < machine.cores else serial).append(inner)
    sch.reorder(*spatial, *serial, *reduced, *([] if vector is None else [vector]))
    if vector is not None:
        sch.vectorize(vector)
    if spatial and is_worth_threads:
        parallel(sch, fuse(sch, spatial), machine)
    if reduced:
        sch.decompose_reduction(block, reduced[0])


def item_bytes(buffer: Any) -> int:
    """Return the bytes of one number of a buffer."""
    return int(tvm_ffi.dtype(str(buffer.dtype)).itemsize)


def bytes_of(buffer: Any) -> float:
    """Return the bytes of a buffer, infinity where a size is unknown."""
    sizes = [static(size) for size in buffer.shape]
    return math.prod(math.inf if size is None else size for size in sizes) * item_bytes(buffer)


def find_kernel(sch: Schedule, kind: str) -> SBlockRV | None:
    """Return the block that is annotated as a kernel of this kind; None unless there is exactly one."""
    kernels = [block for block in blocks(sch) if sch.get(block).annotations.get(KERNEL) == kind]
    return kernels[0] if len(kernels) == 1 else None


def find_blocks(sch: Schedule, name: str) -> list[SBlockRV]:
    """List the blocks called `name`, regardless of the number that fusion appends to a name."""
    return [block for block in blocks(sch) if sch.get(block).name_hint.rstrip("0123456789_") == name]


def inline_epilogue(sch: Schedule, block: SBlockRV) -> SBlockRV:
    """Inline the blocks that read `block`, directly or through others, into the last of them, and return it.

    The last one also computes its other operands, where these are element-wise functions of parameters and as large as
    its result: a residual, for example, that is stored in bfloat16. `block` must have readers that end in a single
    block. Raises ValueError if they do not, and TVM's ScheduleError for a reader that cannot be inlined.
    """
    while True:
        readers = list(sch.get_consumers(block))
        between = [reader for reader in readers if sch.get_consumers(reader)]
        if not between:
            (last,) = readers
            _inline_operands(sch, last)
            return last
        sch.compute_inline(between[0])


def _inline_operands(sch: Schedule, last: SBlockRV) -> None:
    """Inline into a block its element-wise operands that no other block reads and that read only parameters."""
    for operand in sch.get_producers(last):
        if not is_elementwise(sch, operand) or len(sch.get_consumers(operand)) > 1:
            continue
        _inline_operands(sch, operand)
        if not sch.get_producers(operand) and _same_size(sch, operand, last):
            sch.compute_inline(operand)


def _same_size(sch: Schedule, *blocks_of: SBlockRV) -> bool:
    """Whether two blocks have the same number of iterations."""
    one, other = (
        math.prod((variable.dom.extent for variable in sch.get(block).iter_vars), start=tirx.IntImm("int64", 1))
        for block in blocks_of
    )
    return bool(tvm.sym.Analyzer().can_prove_equal(one, other))


def put_channels_last(sch: Schedule, out: SBlockRV, product: SBlockRV) -> None:
    """Reorder the loops of `out` from NCHW to NHWC, where `out` transposes the result of a convolution to NCHW.

    `product` is the block that computes the convolution, with the channels last; `out` reads its result. An `out` with
    another order of dimensions is left unchanged.
    """
    block, result = sch.get(out), sch.get(product).writes[0].source
    variables = [variable.var for variable in block.iter_vars]
    channel = next(region.region[-1].min for region in block.reads if region.source.same_as(result))
    if len(variables) == _IMAGE and variables[1].same_as(channel):
        sch.transform_block_layout(out, lambda n, c, h, w: [n, h, w, c])


def parallel(sch: Schedule, loop: LoopRV, machine: Machine) -> None:
    """Spread a loop over the cores; does nothing where the machine has one core."""
    if machine.cores > 1:
        sch.parallel(loop)


def split_for_cores(sch: Schedule, tasks: Sequence[LoopRV], loop: LoopRV, machine: Machine) -> tuple[LoopRV, LoopRV]:
    """Split `loop` into parts where the loops `tasks` have too few iterations to share them evenly among the cores.

    Returns the outer loop over the parts and the inner loop over the iterations of a part. The number of parts divides
    the extent of `loop`. It is the smallest number that gives the cores even shares, else the one with the most even
    shares. Where a loop has a symbolic extent, there is one part.
    """
    count, size = math.prod(extent(sch, item) or 0 for item in tasks), extent(sch, loop) or 1
    parts = [number for number in range(1, size + 1 if count else 2) if size % number == 0]
    # `max` takes the first of equally even numbers.
    number = max(parts, key=lambda number: min(cost.EVEN, cost.evenness(count * number, machine)) if count else 0.0)
    part, rest = sch.split(loop, [number, None])
    return part, rest


def fuse(sch: Schedule, loops: Sequence[LoopRV]) -> LoopRV:
    """Fuse loops into one and return it; a single loop is returned unchanged."""
    return sch.fuse(*loops) if len(loops) > 1 else loops[0]


def join_dimensions(sch: Schedule, block: SBlockRV, places: Sequence[int]) -> None:
    """Join the dimensions of a block at the positions `places` into one, and put it directly before the last dimension.

    The block gets one loop for them. Its loops alone are not fused, because TVM would then see a quotient and a
    remainder instead of one index.
    """
    sizes = [variable.dom.extent for variable in sch.get(block).iter_vars]
    others = [place for place in range(len(sizes) - 1) if place not in places]
    if len(places) < 2:
        loops = sch.get_loops(block)
        sch.reorder(*(loops[place] for place in (*others, *places, -1)))
        return

    def joined(*index: tirx.Var) -> list[tirx.Expr]:
        row = index[places[0]]
        for place in places[1:]:
            row = row * sizes[place] + index[place]
        return [*(index[place] for place in others), row, index[-1]]

    sch.transform_block_layout(block, tirx.IndexMap.from_func(joined, len(sizes)))


def is_static(sch: Schedule) -> bool:
    """Whether the function has no symbolic shape."""
    return has_fixed_sizes(sch.mod["main"])


def has_fixed_sizes(func: tirx.PrimFunc) -> bool:
    """Whether no parameter of the function has a symbolic size."""
    return all(isinstance(size, tirx.IntImm) for parameter in func.params for size in getattr(parameter, "shape", ()))


def cycles(func: tirx.PrimFunc, machine: Machine) -> float:
    """Estimate the cycles of an unscheduled function on one core; infinite where shapes are symbolic.

    Counts one cycle for each operation on a vector, and one for each number in the arguments. Also infinite where TVM
    cannot count the operations.
    """
    try:
        operations = float(tvm.s_tir.analysis.estimate_tir_flops(tvm.IRModule({"main": func})))
        numbers = sum(math.prod(int(size) for size in parameter.shape) for parameter in func.params)
    except Exception:  # TVM raises many types for operations that it cannot count.
        return math.inf
    return operations / machine.lanes + numbers


def vectorize_inner(sch: Schedule, block: SBlockRV, machine: Machine) -> None:
    """Vectorise a block's innermost loop by `machine.lanes` elements; the rest runs one by one.

    A shorter loop becomes one vector if its extent is a power of two, else it stays as it is. So does a loop that TVM
    would partition wrongly. The loop must run over elements that lie side by side in memory.
    """
    inner = sch.get_loops(block)[-1]
    size = extent(sch, inner)
    if size is not None and size <= machine.lanes:
        if size & (size - 1) == 0 and size > 1:
            sch.vectorize(inner)
        return
    if size is not None and size % machine.lanes and not is_static(sch):
        # TVM mixes integer widths when it partitions a loop of known extent between symbolic ones.
        return
    if size is None and chooses_along_last(sch, block):
        return
    outer, lane = sch.split(inner, [None, machine.lanes])
    sch.vectorize(lane)
    if size is None or size % machine.lanes:
        sch.annotate(outer, PARTITION, 1)


def vectorize_last(sch: Schedule, block: SBlockRV, machine: Machine, most: int | None = None) -> None:
    """Vectorise a block's innermost loop, with a separate loop for the remainder, in narrower vectors where they fit.

    In a function with symbolic shapes, `vectorize_inner` does the work instead, and leaves a loop that TVM would
    partition wrongly. So it does with a loop shorter than a vector: that becomes one vector if its extent is a power of
    two, else it stays as it is. The loop must run over elements that lie side by side in memory. If another block is to
    be computed at the block's loops, do that before: afterwards it is not possible. Vectors have at most `most`
    elements, a power of two; None stands for `machine.lanes`.
    """
    inner = sch.get_loops(block)[-1]
    size, lanes = extent(sch, inner), machine.lanes if most is None else most
    if size is None or size <= lanes or size % lanes == 0:
        vectorize_inner(sch, block, machine)
        return
    # The rest is a vector for each of its powers of two, and the elements that fill none.
    rest, pieces = size % lanes, [size - size % lanes]
    for width in (1 << bit for bit in reversed(range(lanes.bit_length()))):
        if NARROWEST <= width <= rest:
            pieces.append(width)
            rest -= width
    whole, *vectors = sch.loop_partition(inner, pieces if rest else pieces[:-1])
    _, lane = sch.split(whole, [None, lanes])
    for loop in (lane, *vectors[: len(pieces) - 1]):
        sch.vectorize(loop)


def vectorize_padded(sch: Schedule, block: SBlockRV, machine: Machine) -> None:
    """Vectorise the innermost loop of a block that copies data and may pad the last dimension, but no other one.

    The vectors without padding have a loop of their own, without conditions.
    """
    inner = sch.get_loops(block)[-1]
    size = extent(sch, inner)
    if size is None or size % machine.lanes or not is_static(sch):
        vectorize_inner(sch, block, machine)
        return
    data = max((int(region.source.shape[-1]) for region in sch.get(block).reads), default=0)
    whole = data // machine.lanes
    if not 0 < whole < size // machine.lanes:
        vectorize_inner(sch, block, machine)
        return
    vectors, lane = sch.split(inner, [None, machine.lanes])
    sch.vectorize(lane)
    sch.loop_partition(vectors, [whole])


def subject_of(sch: Schedule, block: SBlockRV) -> str:
    """Return the subject of the decisions about a block; empty where there are none."""
    return str(sch.get(block).annotations.get(SUBJECT, ""))
