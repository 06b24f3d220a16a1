"""The state of the caches before a measurement, which must be the state that a function finds within the model.

A function that is called repeatedly finds its weights in the cache. Within a model it does so only where the weights of
all functions fit there. So before each sample a reader function reads, on all cores, as many bytes as the model has
weights.
"""

from collections.abc import Sequence

import numpy as np

from tvmflow.hardware.target import Target
from tvmflow.tuning.candidates import Argument, Candidate

# The elements and bytes of a step of the reader, a multiple of every vector.
_LANES = 16
_VECTOR_BYTES = 4 * _LANES
# A device's caches are small, and its memory must hold the bytes twice.
_MOST_MOVED_BYTES = 32 << 20


def weight_bytes(calls: Sequence[tuple[Sequence[Argument], int]]) -> int:
    """Return the bytes of a model's weights.

    `calls` has, for each function of the model, its arguments and the number of times that a run calls it. An argument
    counts as a weight, once for each call, unless it is the first one, the last one, or has the shape and type of the
    last one (see `warm_arguments`).
    """
    total = 0
    for arguments, count in calls:
        weights = set(range(len(arguments))) - set(warm_arguments([(item.shape, item.dtype) for item in arguments]))
        sizes = (int(np.prod(arguments[index].shape)) * np.dtype(arguments[index].dtype).itemsize for index in weights)
        total += count * sum(sizes)
    return total


def warm_arguments(arguments: Sequence[tuple[Sequence[int], str]]) -> list[int]:
    """Return the indices of a function's arguments, given as (shape, dtype), that are in the cache when it is called.

    These are its first argument, which another function has just written, its last argument, which is its result, and
    all others with the shape and dtype of the last one, such as a residual.
    """
    last = [(tuple(shape), dtype) for shape, dtype in arguments[-1:]]
    return [index for index, (shape, dtype) in enumerate(arguments) if index == 0 or (tuple(shape), dtype) in last]


def bytes_to_read(weights: int, target: Target) -> int:
    """Return how many bytes to read before a sample: `weights`, but at most the size of the target's last-level cache.

    `weights` is the number of bytes of a model's weights. Reading as many bytes as the cache has evicts all that it
    held. A target without a processor profile has no limit.
    """
    profile = target.profile
    return weights if profile is None else min(weights, (profile.third or profile.second).size)


def bytes_to_move(weights: int) -> int:
    """Return how many bytes to move through a device's caches before a sample: `weights`, but at most 32 MiB.

    `weights` is the number of bytes of a model's weights.
    """
    return min(weights, _MOST_MOVED_BYTES)


def make_reader(weights: int, threads: int) -> Candidate:
    """Return a scheduled function that reads `weights` bytes, a part in each of `threads` threads.

    It sums `data` [threads, n, 16] over n to `total` [threads, 16], both float32. The candidate's arguments have the n
    that gives `data` this size; the function takes any n.
    """
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
    steps = max(1, weights // (_VECTOR_BYTES * threads))
    arguments = (Argument((threads, steps, _LANES), "float32"), Argument((threads, _LANES), "float32"))
    return Candidate(ir.save_json(schedule.mod["main"]), arguments)
