"""Configures AMX's tile registers around the loops that call its kernels: once for each share of a parallel loop."""

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.tirx import Evaluate, For, ForKind

from tvmflow.compiler.amx import RELEASE, Configuration, kernels_in
from tvmflow.compiler.statements import map_functions


def configure_tiles(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a lowered module in which the tile registers are configured before kernels of AMX and released after them.

    That encloses an outermost loop whose kernels all need one configuration, and in a parallel loop the share of each
    thread. It encloses each call where a loop's kernels need different ones.
    """
    return map_functions(mod, lambda func: func.with_body(_with_configurations(func.body)))


def _with_configurations(body: Any) -> Any:
    places: list[tuple[Any, Configuration]] = []

    def visit(statement: Any) -> Any:
        needs = _configurations(statement)
        if len(needs) > 1 or (needs and not _is_serial_within(statement)):
            return None
        places.extend((statement, configuration) for configuration in needs)
        return tvm_ffi.WalkResult.SKIP

    tvm_ffi.structural_walk(body, [(For, visit), (Evaluate, visit)], order="pre")
    if not places:
        return body

    def enclose(statement: Any) -> Any:
        for place, configuration in places:
            if statement.same_as(place):
                return _enclosed(statement, configuration)
        return statement

    return tvm_ffi.structural_map(body, [(For, enclose), (Evaluate, enclose)])


def _configurations(statement: Any) -> set[Configuration]:
    """The configurations that the kernels called in a statement need."""
    return {kernel.configuration for kernel in kernels_in(statement)}


def _is_serial_within(statement: Any) -> bool:
    """Whether a statement has no parallel loop within it; it may be one itself."""
    loops: list[For] = []
    tvm_ffi.structural_walk(statement, (For, loops.append))
    return not any(loop.kind == ForKind.PARALLEL and not loop.same_as(statement) for loop in loops)


def _enclosed(statement: Any, configuration: Configuration) -> Any:
    """The statement between the calls that configure and release the registers."""
    before, after = (Evaluate(tirx.call_extern("void", name)) for name in (configuration.symbol, RELEASE))
    whole = tirx.SeqStmt([before, statement, after])
    if not isinstance(statement, For) or statement.kind != ForKind.PARALLEL:
        return whole
    # What stands beside the loop in this region runs on each thread that takes a share of it.
    return tirx.AttrStmt(tirx.const(0, "int32"), "pragma_parallel_launch_point", tirx.const(1, "int32"), whole)
