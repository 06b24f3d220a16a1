"""Machines to compile for that are not this one, so that a test means the same on every host."""

from tvmflow.compiler.machine import Machine
from tvmflow.target import host, missing_features, resolve

AVX512 = Machine(lanes=16, registers=32, cores=2)
AVX2 = Machine(lanes=8, registers=16, cores=2, cache=1 << 18)

_LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")


def runnable_levels() -> list[str]:
    """The levels of x86-64 whose code this machine runs, the lowest first; none on another architecture."""
    if host().arch != "x86_64":
        return []
    return [level for level in _LEVELS if not missing_features(resolve(level).features)]
