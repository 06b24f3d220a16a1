"""Candidates: functions that are built and measured, and the tensors that they are called with."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc


@dataclass(frozen=True)
class Argument:
    """Shape and dtype of one tensor that a function takes."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Library:
    """A function built into a shared library, and what to call it with."""

    path: Path
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Candidate:
    """A function (`tvm.ir.save_json`) and the trace that schedules it, None where it is scheduled or needs not be."""

    func: str
    arguments: tuple[Argument, ...]
    trace: str | None = None


def arguments_of(func: "PrimFunc") -> tuple[Argument, ...] | None:
    """The tensors `func` takes, or None if it takes anything else or a dimension is symbolic."""
    from tvm.tirx import IntImm

    arguments = []
    for parameter in func.params:
        shape = getattr(parameter, "shape", None)
        if shape is None or not all(isinstance(extent, IntImm) for extent in shape):
            return None
        arguments.append(Argument(tuple(int(extent) for extent in shape), str(parameter.dtype)))
    return tuple(arguments)
