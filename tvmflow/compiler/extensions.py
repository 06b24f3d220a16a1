"""Relax operators of this project: the importer writes them, and passes that know the machine lower them.

Each is registered with a function that infers the type of its result, so that TVM's passes handle it as their own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relax

from tvmflow.compiler.operators.common import OPAQUE


def register(name: str, infer: Callable[[relax.Call], Any]) -> None:
    """Register the operator `tvmflow.NAME`, which has no side effects; `infer` returns the type of a call's result."""

    def infer_type(call: relax.Call, _builder: relax.BlockBuilder) -> Any:
        return infer(call)

    tvm.ir.register_op_attr(f"tvmflow.{name}", "FInferType", infer_type)
    tvm.ir.register_op_attr(f"tvmflow.{name}", "FPurity", True)


def call(name: str, arguments: Sequence[relax.Expr], **attrs: Any) -> relax.Call:
    """Return a call of the operator `tvmflow.NAME`; `attrs` are numbers, strings and lists of them."""
    return relax.Call(tvm.ir.Op.get(f"tvmflow.{name}"), list(arguments), tvm.ir.make_node("ir.DictAttrs", **attrs))


def emit_function(builder: relax.BlockBuilder, function: Any, name: str) -> tvm.ir.GlobalVar:
    """Add a TensorIR function to the builder's module under a name like `name`, and return its global variable.

    Equal functions are added once. No pass fuses the function with others.
    """
    return builder.add_func(function.with_attr({"tirx.noalias": True, **OPAQUE}), name)
