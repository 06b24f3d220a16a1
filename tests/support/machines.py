"""Machines to compile for that are not this one, so that a test means the same on every host."""

from tvmflow.compiler.machine import Machine

AVX512 = Machine(lanes=16, registers=32, cores=2)
AVX2 = Machine(lanes=8, registers=16, cores=2, cache=1 << 18)
