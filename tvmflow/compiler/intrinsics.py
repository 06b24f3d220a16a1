"""Tensor intrinsics: the loops that an instruction may replace, and the instruction, both in TVM's script."""

from tvm.s_tir import TensorIntrin
from tvm.script import from_source
from tvm.script import tirx as script


def define(name: str, head: str, loops: str, instruction: str) -> None:
    """Register an intrinsic with TVM.

    `head` is a function's head in TVM's script, `loops` the body that the intrinsic replaces, and `instruction` the
    body that replaces it.
    """
    description, implementation = (from_source(head + body, extra_vars={"T": script}) for body in (loops, instruction))
    TensorIntrin.register(name, description, implementation, override=True)
