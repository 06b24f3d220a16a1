"""The properties of a target's CPU that schedules depend on: vectors, registers, caches, cores."""

from dataclasses import dataclass, replace

from tvmflow.target import Target


@dataclass(frozen=True)
class Machine:
    """A CPU core as the schedules see it.

    `lanes` are 32-bit numbers per vector, `registers` the number of vector registers. `second_cache` is a core's share
    of the second-level cache in bytes. Weights of up to `cache` bytes stay in a core's cache; larger ones are read once
    per call. All cores share the `third_cache`, in bytes. `cold` is true where a model's weights come from memory in
    every run. `amx` names the dot products (`tvmflow.compiler.dotproduct`) that AMX computes.

    A parallel region takes two to four thousand cycles to start and to end. It costs more than it gains in a loop nest
    of fewer than `parallel_iterations`, and in a function of fewer than `parallel_cycles`.
    """

    lanes: int
    registers: int
    cores: int
    cache: int = 1 << 20
    second_cache: int = 1 << 20
    third_cache: int = 1 << 25
    cold: bool = False
    amx: frozenset[str] = frozenset()
    parallel_iterations: int = 4096
    parallel_cycles: int = 8192

    def for_weights(self, size: int) -> "Machine":
        """Return this machine for `size` bytes of weights: `cold` where they exceed half of `third_cache`."""
        return replace(self, cold=2 * size > self.third_cache)


def machine(target: Target) -> Machine:
    """Return the properties of a CPU target's cores."""
    if target.arch == "aarch64":
        return Machine(lanes=4, registers=32, cores=target.threads, cache=1 << 19, second_cache=1 << 18)
    if "avx512f" in target.features:
        tiles = {name for name in ("bf16", "int8") if {"amx_tile", f"amx_{name}"} <= set(target.features)}
        return Machine(lanes=16, registers=32, cores=target.threads, amx=frozenset(tiles))
    if "avx2" in target.features or "avx" in target.features:
        return Machine(lanes=8, registers=16, cores=target.threads, cache=1 << 18, second_cache=1 << 18)
    return Machine(lanes=4, registers=16, cores=target.threads, cache=1 << 18, second_cache=1 << 18)
