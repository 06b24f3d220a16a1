"""Candidates: functions that are built and measured, and the tensors that they are called with."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc


@dataclass(frozen=True)
class Argument:
    """The shape and dtype of one tensor that a function takes."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Library:
    """A built candidate: the shared library at `path`, whose function is `main`, and the tensors that it takes."""

    path: Path
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Candidate:
    """A function to build, with the tensors that it takes.

    `func` is the function as `tvm.ir.save_json` writes it. `trace` is the trace (JSON) that schedules it; with None it
    is built unchanged.
    """

    func: str
    arguments: tuple[Argument, ...]
    trace: str | None = None


def arguments_of(func: "PrimFunc") -> tuple[Argument, ...] | None:
    """Return the tensors that `func` takes, None if it takes anything else or one has a symbolic dimension."""
    from tvm.tirx import IntImm

    arguments = []
    for parameter in func.params:
        shape = getattr(parameter, "shape", None)
        if shape is None or not all(isinstance(extent, IntImm) for extent in shape):
            return None
        arguments.append(Argument(tuple(int(extent) for extent in shape), str(parameter.dtype)))
    return tuple(arguments)
