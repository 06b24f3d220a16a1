"""What this machine can do at best, measured: multiply-adds in registers, and moving data at each cache level."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from runners import Turn, Turns

from tvmflow.process import Emit
from tvmflow.target import Target
from tvmflow.workspace import Record

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Enough chains of multiply-adds to hide their latency, few enough for the registers of every target.
_ACCUMULATORS = 12
_STEPS = 1 << 15
_REPEATS = 40
# For so long at least: at its start a process may have both of its threads on one core.
_SECONDS = 0.5


class PeakJob(Record):
    """Measure the machine with the threads of `target`."""

    target: Target


class Peaks(Turn):
    """The best of many short runs on all threads together.

    `gflops` are fp32, a multiply-add counting as two; `bandwidth` is GB/s, what is read plus what is written, by the
    level that holds it; `capacity` are the bytes that each level holds for all threads, memory having no bound.
    """

    gflops: float
    bandwidth: dict[str, float]
    capacity: dict[str, int]

    def level(self, moved: int) -> str:
        """The first level that holds this many bytes."""
        return next((name for name, size in self.capacity.items() if moved <= size), "memory")


def measure(target: Target, state: Path) -> Peaks:
    """The peaks with the threads of a target; the log is in `state`."""
    with Turns("peaks:work", state / "peaks.log") as process:
        return process.call(PeakJob(target=target), Peaks)


def work(job: PeakJob, emit: Emit) -> Peaks:
    """Measure, in a process of its own."""
    threads = job.target.threads
    os.environ["TVM_NUM_THREADS"] = str(threads)
    caches = _caches()
    capacity = {"L2": caches[2] * threads, "L3": caches[3]}
    # Half of a cache, so that it holds the data with certainty; and far more than the last one.
    sizes = {"L2": capacity["L2"] // 2, "L3": capacity["L3"] // 2, "memory": max(8 * caches[3], 1 << 27)}
    return Peaks(
        process=os.getpid(),
        gflops=_gflops(job.target),
        bandwidth={level: _bandwidth(job.target, size) for level, size in sizes.items()},
        capacity=capacity,
    )


def _caches() -> dict[int, int]:
    """The bytes of the second and third cache level, as the kernel tells them."""
    found = {2: 1 << 20, 3: 1 << 25}
    for folder in _CACHES.glob("index*"):
        size = re.fullmatch(r"(\d+)([KMG])", (folder / "size").read_text().strip())
        level = int((folder / "level").read_text())
        if size and level in found:
            found[level] = int(size[1]) * _UNITS[size[2]]
    return found


def _gflops(target: Target) -> float:
    from tvm.script import tirx as T

    from tvmflow.compiler.machine import machine

    threads, lanes = target.threads, machine(target).lanes
    shape = (threads, _ACCUMULATORS, lanes)

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def main(x: T.Buffer(shape, "float32"), y: T.Buffer(shape, "float32")) -> None:  # type: ignore[valid-type]
        for t in T.parallel(threads):
            accumulators = T.alloc_buffer((_ACCUMULATORS, lanes), "float32", scope="local")
            for i in T.unroll(_ACCUMULATORS):
                for v in T.vectorized(lanes):
                    accumulators[i, v] = x[t, i, v]
            for _ in range(_STEPS):
                for i in T.unroll(_ACCUMULATORS):
                    for v in T.vectorized(lanes):
                        accumulators[i, v] = accumulators[i, v] * x[t, 0, v] + x[t, 1, v]
            for i in T.unroll(_ACCUMULATORS):
                for v in T.vectorized(lanes):
                    y[t, i, v] = accumulators[i, v]

    run = _compiled(main, target, shape)
    return 2 * threads * _ACCUMULATORS * lanes * _STEPS / run() * 1e-9


def _bandwidth(target: Target, size: int) -> float:
    """GB/s of an element-wise pass over `size` bytes, half of them read and half written, each thread its part."""
    from tvm.script import tirx as T

    from tvmflow.compiler.machine import machine

    threads, lanes = target.threads, machine(target).lanes
    vectors = size // (8 * threads * lanes)
    shape = (threads, vectors, lanes)
    passes = max(1, (1 << 25) // size)

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def main(x: T.Buffer(shape, "float32"), y: T.Buffer(shape, "float32")) -> None:  # type: ignore[valid-type]
        for t in T.parallel(threads):
            for r in range(passes):
                for i in range(vectors):
                    for v in T.vectorized(lanes):
                        # The pass is part of the value: no compiler may leave one out.
                        y[t, i, v] = x[t, i, v] + T.Cast("float32", r)

    run = _compiled(main, target, shape)
    return 8 * threads * vectors * lanes * passes / run() * 1e-9


def _compiled(func: Any, target: Target, shape: tuple[int, ...]) -> Callable[[], float]:
    """What runs a function of two equal buffers many times and returns the smallest time in seconds."""
    import tvm

    func = func.with_attr({"tirx.noalias": True, "tirx.is_scheduled": True, "global_symbol": "main"})
    main = tvm.compile(tvm.IRModule({"main": func}), tvm.target.Target(target.tvm))["main"]
    x, y = (tvm.runtime.tensor(np.full(shape, 0.5, "float32")) for _ in range(2))

    def run() -> float:
        times = []
        while len(times) < _REPEATS or sum(times) < _SECONDS:
            start = time.perf_counter()
            main(x, y)
            times.append(time.perf_counter() - start)
        return min(times)

    return run
