"""Measures the machine's peaks: multiply-adds in registers, and the bandwidth of each level of the memory."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from runners import Turn, Turns

from tvmflow.hardware.target import Target
from tvmflow.processes.children import Emit
from tvmflow.workspace import Record

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Enough chains of multiply-adds to hide their latency, few enough for the registers of every target.
_ACCUMULATORS = 12
_STEPS = 1 << 15
_REPEATS = 40
# Runs go on for so long at least: a process may start with both of its threads on one core.
_SECONDS = 0.5


class PeakJob(Record):
    """The job to measure the machine with the threads of `target`."""

    target: Target


class Peaks(Turn):
    """The best figures of many short runs on all threads together.

    `gflops` is fp32 arithmetic in GFLOP/s, a multiply-add counting as two. `bandwidth` is GB/s, of reads and writes
    together, by the level that holds the data: `L2`, `L3` or `memory`. `capacity` is the number of bytes that a cache
    level holds for all threads; it has no entry for memory.
    """

    gflops: float
    bandwidth: dict[str, float]
    capacity: dict[str, int]

    def level(self, bytes_moved: int) -> str:
        """Return the name of the first level that holds this many bytes."""
        return next((name for name, size in self.capacity.items() if bytes_moved <= size), "memory")


def measure(target: Target, state: Path) -> Peaks:
    """Measure and return the peaks with the threads of a target; the log is in `state`."""
    with Turns("peaks:work", state / "peaks.log") as process:
        return process.call(PeakJob(target=target), Peaks)


def work(job: PeakJob, emit: Emit) -> Peaks:
    """Measure the peaks in a child process."""
    threads = job.target.threads
    os.environ["TVM_NUM_THREADS"] = str(threads)
    caches = _caches()
    capacity = {"L2": caches[2] * threads, "L3": caches[3]}
    # Half a cache holds the data with certainty; memory is measured with far more than the last cache holds.
    sizes = {"L2": capacity["L2"] // 2, "L3": capacity["L3"] // 2, "memory": max(8 * caches[3], 1 << 27)}
    return Peaks(
        process=os.getpid(),
        gflops=_gflops(job.target),
        bandwidth={level: _bandwidth(job.target, size) for level, size in sizes.items()},
        capacity=capacity,
    )


def _caches() -> dict[int, int]:
    """The bytes of the second and third cache level, by the kernel; usual sizes where it does not know them."""
    sizes = {2: 1 << 20, 3: 1 << 25}
    for folder in _CACHES.glob("index*"):
        size = re.fullmatch(r"(\d+)([KMG])", (folder / "size").read_text().strip())
        level = int((folder / "level").read_text())
        if size and level in sizes:
            sizes[level] = int(size[1]) * _UNITS[size[2]]
    return sizes


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
    """A function that runs `func`, of two equal buffers, many times and returns the smallest time in seconds."""
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
