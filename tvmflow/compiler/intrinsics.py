"""Tensor intrinsics: the loops that an instruction may replace, and the instruction, both in TVM's script.

For instructions that TVM's script cannot write, a function gets LLVM IR attached.
"""

from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import StringImm
from tvm.s_tir import SBlock, TensorIntrin
from tvm.script import from_source
from tvm.script import tirx as script

from tvmflow.compiler.statements import with_body


def define(name: str, head: str, loops: str, instruction: str) -> None:
    """Register a tensor intrinsic with TVM; it replaces one with the same name.

    `head` is a function's head in TVM's script, `loops` the body that the intrinsic replaces, and `instruction` the
    body that replaces it.
    """
    description, implementation = (from_source(head + body, extra_vars={"T": script}) for body in (loops, instruction))
    TensorIntrin.register(name, description, implementation, override=True)


def attach(body: Any, code: str) -> Any:
    """Return a scheduled function's body with LLVM IR attached; `code` defines functions that the body calls."""

    def add(block: SBlock) -> SBlock:
        if block.name_hint != "root":
            return block
        inner = tirx.AttrStmt(tirx.IntImm("int32", 0), "pragma_import_llvm", StringImm(code), block.body)
        return with_body(block, inner)

    return tvm_ffi.structural_map(body, (SBlock, add))
