"""Machines to compile for that are not this one, so that a test means the same on every host."""

import os

import pytest

from tvmflow.compiler.machine import machine
from tvmflow.hardware.target import Target, host, missing_features, resolve

AVX512 = machine(resolve("llvm -mcpu=x86-64-v4 -num-cores=2"))
AVX2 = machine(resolve("llvm -mcpu=x86-64-v3 -num-cores=2"))

_LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")


def runnable_levels() -> list[str]:
    """The levels of x86-64 whose code this machine runs, the lowest first; none on another architecture.

    The variable TVMFLOW_TEST_LEVEL, e.g. x86-64-v3, leaves out those above: so a test is tried as on a lesser machine.
    """
    if host().arch != "x86_64":
        return []
    highest = os.environ.get("TVMFLOW_TEST_LEVEL", _LEVELS[-1])
    levels = _LEVELS[: _LEVELS.index(highest) + 1]
    return [level for level in levels if not missing_features(resolve(level).features)]


def require_level(name: str) -> None:
    """Skip the test that runs unless this machine has the instructions of a target, by the target's name."""
    if missing_features(resolve(name).features):
        pytest.skip(f"this CPU cannot run {name}")


def on_two_cores(name: str) -> Target:
    """A target by its name as on a machine of two cores: what is decided depends on their number."""
    return resolve({**resolve(name).tvm, "num-cores": 2})


def simple_target() -> Target:
    """The best target without instructions for narrow numbers that this machine runs, up to AVX2 where it is x86-64."""
    return resolve("".join(runnable_levels()[:2][-1:]) or "native")


def other_preset() -> str:
    """A preset besides `native` whose code this machine runs."""
    return "aarch64-generic" if host().arch == "aarch64" else "x86-64-v2"


def best_target() -> Target:
    """The best level of x86-64 that this machine runs, on two cores; this machine where it is no x86-64."""
    level = runnable_levels()[-1:]
    return on_two_cores(*level) if level else resolve("native")
