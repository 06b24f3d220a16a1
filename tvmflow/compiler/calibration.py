"""Measures this machine's processor: multiply-adds, loads and stores per cycle, bytes per cycle of each level, regions.

All figures are per cycle of the core's clock, which a chain of dependent additions of integers measures. The best of
many short runs counts, because other work on the machine only makes a run slower.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
from tvm.script import tirx as T

from tvmflow.hardware.profiles import Cache, Memory, Profile, Vectors
from tvmflow.hardware.target import Target, host, missing_features, resolve

# The target of the code that is measured, by the bits of its vectors.
_LEVELS = {128: "x86-64-v2", 256: "x86-64-v3", 512: "x86-64-v4"}
# The steps of a chain of dependent operations, and the multiply-adds side by side that no latency holds back.
_STEPS, _CHAINS = 1 << 15, 12
# The vectors that a step of a pass over memory reads or writes.
_WIDTH = 8
# The parallel loops in a row whose time is that of a region.
_REGIONS = 200
_BYTES_PER_RUN = 1 << 26
_SECONDS = 0.15
_FEWEST_RUNS = 5
# A level is measured with half of its bytes, the memory with four times the last cache, at most this many.
_MOST_BYTES = 1 << 28

Report = Callable[[int, int, str], None]
"""Receives the measurements done, those in all, and what is measured next."""


@dataclass(frozen=True)
class Calibration:
    """A measured profile, and the cycles per second of a core."""

    profile: Profile
    clock: float


def measure_clock(target: Target) -> float:
    """Return the cycles per second of a core of this machine while it works."""

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def main(x: T.Buffer((4,), "int64")) -> None:  # type: ignore[valid-type]
        value = T.alloc_buffer((1,), "int64", scope="local")
        value[0] = x[0]
        for _ in range(_STEPS * 16):
            value[0] = T.bitwise_xor(value[0], x[1]) + x[2]
        x[3] = value[0]

    run = _compiled(main, target)
    data = tvm.runtime.tensor(np.array([1, 0x5555, 77, 0], "int64"))
    # Each step is two dependent operations of one cycle.
    return 2 * 16 * _STEPS / _best(lambda: run(data))


def calibrate(base: Profile, threads: int, report: Report) -> Calibration:
    """Measure this machine on one and on `threads` cores, and return its profile and its clock.

    The fields that are not measured come from `base`: names, the registers, the caches' geometry and AMX's costs. Only
    the vector widths of `base` that this machine runs are measured. `report` is called before each measurement with the
    number of measurements done, the number of all, and the next one in words. The environment must let TVM use
    `threads` workers (`TVM_NUM_THREADS`).
    """
    native = resolve("native")
    widths = [item.bits for item in base.vectors if _runs(item.bits)]
    levels = ["first", "second", *(["third"] if base.third else []), "memory"]
    total, done = 2 + len(widths) + len(levels), 0

    def next_one(message: str) -> None:
        nonlocal done
        report(done, total, message)
        done += 1

    next_one("the clock")
    clock = measure_clock(native)
    vectors = []
    for bits in widths:
        next_one(f"vectors of {bits} bits")
        registers = next(item.registers for item in base.vectors if item.bits == bits)
        vectors.append(_vectors(bits, registers, clock))
    changes: dict[str, Any] = {"vectors": tuple(vectors)}
    passes = _Passes(native, vectors[-1].bits // 32, clock)
    for name in levels:
        next_one(f"the {name} cache" if name != "memory" else "the memory")
        changes[name] = _level(getattr(base, name), base, passes, threads)
    next_one("a parallel region")
    region = max(1, round(_region(native, threads) * clock))
    cores = replace(base.cores, count=threads, region=region)
    return Calibration(replace(base, **changes, cores=cores), clock)


def _runs(bits: int) -> bool:
    """Whether this machine runs the code of a width."""
    return host().arch == "aarch64" or not missing_features(resolve(_LEVELS[bits]).features)


def _vectors(bits: int, registers: int, clock: float) -> Vectors:
    """Measure the arithmetic, loads and stores of one width."""
    target = resolve("native" if host().arch == "aarch64" else _LEVELS[bits])
    lanes = bits // 32
    several, single = (_multiply_adds(target, lanes, chains) * clock / _STEPS for chains in (_CHAINS, 1))
    passes = _Passes(target, lanes, clock)
    size = _WIDTH * 4 * lanes * 16
    return Vectors(
        bits=bits,
        registers=registers,
        multiply_adds=_rounded(_CHAINS / several),
        latency=max(1, round(single)),
        loads=_rounded(passes.read(size, 1) / (4 * lanes)),
        stores=_rounded(passes.write(size, 1) / (4 * lanes)),
    )


def _rounded(rate: float) -> float:
    """The next multiple of a half: units are whole, those of half width work every other cycle, and runs lose a bit."""
    return max(0.5, math.ceil(2 * rate - 0.2) / 2)


def _multiply_adds(target: Target, lanes: int, chains: int) -> float:
    """The seconds of `_STEPS` multiply-adds in each of several chains."""
    shape = (max(2, chains), lanes)

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def main(x: T.Buffer(shape, "float32"), y: T.Buffer(shape, "float32")) -> None:  # type: ignore[valid-type]
        sums = T.alloc_buffer((chains, lanes), "float32", scope="local")
        for i in T.unroll(chains):
            for v in T.vectorized(lanes):
                sums[i, v] = x[i, v]
        for _ in range(_STEPS):
            for i in T.unroll(chains):
                for v in T.vectorized(lanes):
                    sums[i, v] = sums[i, v] * x[0, v] + x[1, v]
        for i in T.unroll(chains):
            for v in T.vectorized(lanes):
                y[i, v] = sums[i, v]

    run = _compiled(main, target)
    x, y = (tvm.runtime.tensor(np.full(shape, 0.5, "float32")) for _ in range(2))
    return _best(lambda: run(x, y))


class _Passes:
    """Passes over memory: bytes per cycle that each core reads, or writes, with code of `lanes` lanes."""

    def __init__(self, target: Target, lanes: int, clock: float) -> None:
        self._lanes = lanes
        self._clock = clock

        @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
        def read(data: T.handle, y: T.handle, repeats: T.int64) -> None:
            tasks, steps = T.int64(), T.int64()
            x = T.match_buffer(data, (tasks, steps, _WIDTH, lanes), "float32")
            total = T.match_buffer(y, (tasks, lanes), "float32")
            for task in T.parallel(tasks):
                sums = T.alloc_buffer((_WIDTH, lanes), "float32", scope="local")
                for i in T.unroll(_WIDTH):
                    for v in T.vectorized(lanes):
                        sums[i, v] = T.float32(0)
                for _ in range(repeats):
                    for step in range(steps):
                        for i in T.unroll(_WIDTH):
                            for v in T.vectorized(lanes):
                                sums[i, v] = sums[i, v] + x[task, step, i, v]
                for i in T.unroll(_WIDTH):
                    for v in T.vectorized(lanes):
                        total[task, v] = total[task, v] + sums[i, v]

        @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
        def write(data: T.handle, y: T.handle, repeats: T.int64) -> None:
            tasks, steps = T.int64(), T.int64()
            x = T.match_buffer(data, (tasks, steps, _WIDTH, lanes), "float32")
            value = T.match_buffer(y, (tasks, lanes), "float32")
            for task in T.parallel(tasks):
                for repeat in range(repeats):
                    for step in range(steps):
                        for i in T.unroll(_WIDTH):
                            for v in T.vectorized(lanes):
                                # The pass is part of the value: no compiler may leave one out.
                                x[task, step, i, v] = value[task, v] + T.Cast("float32", repeat)

        self._read, self._write = _compiled(read, target), _compiled(write, target)

    def read(self, size: int, threads: int) -> float:
        """Return the bytes per cycle that each of `threads` cores reads of its own `size` bytes."""
        return self._rate(self._read, size, threads)

    def write(self, size: int, threads: int) -> float:
        """Return the bytes per cycle that each of `threads` cores writes of its own `size` bytes."""
        return self._rate(self._write, size, threads)

    def _rate(self, run: Callable[..., Any], size: int, threads: int) -> float:
        steps = max(1, size // (_WIDTH * 4 * self._lanes))
        repeats = max(1, _BYTES_PER_RUN // size)
        data = tvm.runtime.tensor(np.ones((threads, steps, _WIDTH, self._lanes), "float32"))
        other = tvm.runtime.tensor(np.zeros((threads, self._lanes), "float32"))
        seconds = _best(lambda: run(data, other, repeats))
        return _WIDTH * 4 * self._lanes * steps * repeats / (seconds * self._clock)


def _level(level: Memory, base: Profile, passes: _Passes, threads: int) -> Memory:
    """Measure the rates of a cache or of the memory, with one core and with all."""
    if isinstance(level, Cache):
        inner = max((item.size for item in (base.first, base.second) if item.size < level.size), default=0)
        one, each = (max(inner * 3 // 2, level.share(count) // 2) for count in (1, threads))
    else:
        one, each = (min(_MOST_BYTES, 4 * base.last.size) // count for count in (1, threads))
    alone = _figures(passes.read(one, 1)), _figures(passes.write(one, 1))
    shared = threads * max(passes.read(each, threads), passes.write(each, threads))
    # A cache of one core has its own rate; what several share gives them at least what it gives one.
    if isinstance(level, Cache) and level.cores == 1:
        shared = alone[0]
    return replace(level, read=alone[0], write=alone[1], shared=max(_figures(shared), *alone))


def _figures(rate: float) -> float:
    """A rate to three significant figures."""
    return round(rate, 2 - math.floor(math.log10(rate)))


def _region(target: Target, threads: int) -> float:
    """The seconds to start and to end a parallel region."""
    shape = (threads, 64)

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def main(x: T.Buffer(shape, "float32")) -> None:  # type: ignore[valid-type]
        for _ in range(_REGIONS):
            for task in T.parallel(threads):
                x[task, 0] = x[task, 0] + T.float32(1)

    run = _compiled(main, target)
    data = tvm.runtime.tensor(np.zeros(shape, "float32"))
    return _best(lambda: run(data)) / _REGIONS


def _compiled(func: Any, target: Target) -> Callable[..., Any]:
    """The compiled function."""
    func = func.with_attr({"tirx.noalias": True, "tirx.is_scheduled": True, "global_symbol": "main"})
    library = tvm.compile(tvm.IRModule({"main": func}), tvm.target.Target(target.tvm))
    main: Callable[..., Any] = library["main"]
    return main


def _best(run: Callable[[], object]) -> float:
    """The smallest seconds of many calls."""
    run()
    times: list[float] = []
    while len(times) < _FEWEST_RUNS or sum(times) < _SECONDS:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
