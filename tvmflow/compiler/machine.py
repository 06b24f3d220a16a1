"""What the schedules need to know of the machine a target names: vectors, registers, caches, cores."""

from dataclasses import dataclass

from tvmflow.target import Target


@dataclass(frozen=True)
class Machine:
    """A CPU core as the schedules see it.

    `lanes` are 32-bit numbers per vector, `registers` the vector registers; `cache` is the part of a core's own
    second-level cache, in bytes, that weights may fill.
    """

    lanes: int
    registers: int
    cores: int
    cache: int = 1 << 20


def machine(target: Target) -> Machine:
    """Describe the cores of a CPU target."""
    if target.arch == "aarch64":
        return Machine(lanes=4, registers=32, cores=target.threads, cache=1 << 19)
    if "avx512f" in target.features:
        return Machine(lanes=16, registers=32, cores=target.threads)
    if "avx2" in target.features or "avx" in target.features:
        return Machine(lanes=8, registers=16, cores=target.threads, cache=1 << 18)
    return Machine(lanes=4, registers=16, cores=target.threads, cache=1 << 18)
