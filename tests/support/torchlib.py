"""Torch's table of ONNX operators, made once for all exports of a process.

Torch makes it anew for each export, from the sources of five hundred functions, which is half of what the export of a
small module takes. No export changes it.
"""

from functools import cache
from importlib import import_module
from typing import Any


@cache
def share_table() -> Any:
    """Have the exports of this process share a table for each opset; return the function that gives it."""
    registry: Any = import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
    # Torch calls the function of the class by an instance.
    table = cache(registry.from_torchlib)
    registry.from_torchlib = staticmethod(table)
    return table
