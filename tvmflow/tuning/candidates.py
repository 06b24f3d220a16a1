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
    """A candidate that was built: its shared library, whose function is `main`, and the tensors that it takes."""

    path: Path
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Candidate:
    """A function to build: as `tvm.ir.save_json` writes it, with a trace (JSON) that schedules it or None for none."""

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
