"""What a model does between two calls of one of its functions, so that a candidate meets the caches that it will meet.

Called again and again, a function finds its weights in the cache; within a model it does only where those of all its
functions fit. So a function of a model's own size is run before each sample: it reads as many bytes, on all cores.
"""

from collections.abc import Sequence

import numpy as np

from tvmflow.tuning.candidates import Argument, Candidate

# A vector of the widest registers, and the bytes of it; the most to read: no cache is larger.
_LANES = 16
_BYTES = 4 * _LANES
_MOST = 96 << 20
_MOST_MOVED = 32 << 20


def weight_bytes(calls: Sequence[tuple[Sequence[Argument], int]]) -> int:
    """The bytes of a model's weights, by the arguments of its functions and their numbers of calls.

    All but the `warm_arguments` are taken for weights.
    """
    total = 0
    for arguments, count in calls:
        others = set(range(len(arguments))) - set(warm_arguments([(item.shape, item.dtype) for item in arguments]))
        sizes = (int(np.prod(arguments[at].shape)) * np.dtype(arguments[at].dtype).itemsize for at in others)
        total += count * sum(sizes)
    return total


def warm_arguments(arguments: Sequence[tuple[Sequence[int], str]]) -> list[int]:
    """The places of those arguments, by shape and dtype, that other functions of a model have just used.

    That is the first, which a function reads, the last, which it writes, and what is like the last, as a residual.
    """
    last = [(tuple(shape), dtype) for shape, dtype in arguments[-1:]]
    return [at for at, (shape, dtype) in enumerate(arguments) if at == 0 or (tuple(shape), dtype) in last]


def bytes_to_move(size: int) -> int:
    """As many bytes of `size` as a device has memory for, twice, whose caches are small."""
    return min(size, _MOST_MOVED)


def make_reader(size: int, threads: int) -> Candidate:
    """What reads `size` bytes with all `threads`: `[threads, n, 16]` to `[threads, 16]`, summed; it takes any n."""
    from tvm import IRModule, ir, te, tirx
    from tvm.s_tir import Schedule

    data = te.placeholder((threads, tirx.Var("n", "int64"), _LANES), "float32", name="data")
    step = te.reduce_axis((0, data.shape[1]), "step")
    total = te.compute((threads, _LANES), lambda core, lane: te.sum(data[core, step, lane], axis=step), name="total")
    schedule = Schedule(IRModule({"main": te.create_prim_func([data, total])}))
    block = schedule.get_sblock("total")
    core, lane, step = schedule.get_loops(block)
    schedule.reorder(core, step, lane)
    schedule.vectorize(lane)
    if threads > 1:
        schedule.parallel(core)
    schedule.decompose_reduction(block, step)
    steps = max(1, min(size, _MOST) // (_BYTES * threads))
    arguments = (Argument((threads, steps, _LANES), "float32"), Argument((threads, _LANES), "float32"))
    return Candidate(ir.save_json(schedule.mod["main"]), arguments)
