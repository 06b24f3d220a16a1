"""Lowers scheduled functions for a CPU: TVM's passes from a schedule to what LLVM gets, and passes of this project.

The passes of TVM are those of its own pipeline, without those for GPUs.
"""

from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.tirx import PrimFunc

from tvmflow.compiler.argument_checks import DropChecks, take_unaligned
from tvmflow.compiler.borders import split_lines
from tvmflow.compiler.divisions import lower_divisions
from tvmflow.compiler.quotients import unify_quotients
from tvmflow.compiler.short_loops import run_short_loops_alone
from tvmflow.compiler.statements import is_choice, map_functions, replace_variables


def lower_functions(functions: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Return scheduled functions as TVM generates code of them, by the passes of this thread's pass context."""
    lowered = _pipeline()(tirx.transform.BindTarget(target.with_host(target))(unify_quotients(functions)))
    builtins = tvm.transform.Sequential([tirx.transform.LowerTVMBuiltin(), tirx.transform.LowerIntrin()])
    lowered = map_functions(lowered, take_unaligned)
    return split_lines(run_short_loops_alone(builtins(lower_divisions(lowered))))


def _pipeline() -> tvm.transform.Pass:
    """The passes from scheduled functions to functions that a library can hold."""
    config = tvm.transform.PassContext.current().config
    passes = [
        s_tir.transform.CanonicalizeLoop(),
        s_tir.transform.LowerInitBlock(),
        s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.CompactBufferAllocation(),
        FixBufferSizes(),
        s_tir.transform.LowerMatchBuffer(),
        s_tir.transform.StmtSimplify(),
        s_tir.transform.AnnotateIrregularLoop(),
        s_tir.transform.InjectSoftwarePipeline(),
        s_tir.transform.LowerOpaqueBlock(),
        tirx.transform.FlattenBuffer(),
        tirx.transform.BF16ComputeLegalize(),
        tirx.transform.NarrowDataType(32),
        s_tir.transform.LoopPartition(),
        tirx.transform.VectorizeLoop(not config.get("tirx.disable_vectorize", False)),
        s_tir.transform.InjectVirtualThread(),
        s_tir.transform.InjectDoubleBuffer(),
        *([] if config.get("tirx.disable_storage_rewrite", False) else [tirx.transform.StorageRewrite()]),
        s_tir.transform.HoistIfThenElse(),
        tirx.transform.UnrollLoop(),
        TakeKnownBranches(),
        s_tir.transform.RenormalizeSplitPattern(),
        # TVM removes statements without effect here; LLVM does so too, and faster.
        tirx.transform.StmtSimplify(),
        s_tir.transform.RewriteUnsafeSelect(),
        *([s_tir.transform.InstrumentBoundCheckers()] if config.get("tirx.instrument_bound_checkers", False) else []),
        *([] if config.get("tirx.disable_cse_tir", False) else [tirx.transform.CommonSubexprElim()]),
        *([s_tir.transform.InstrumentProfileIntrinsics()] if config.get("tirx.instrument_lwp", False) else []),
        tirx.transform.FP8ComputeLegalize(),
        tirx.transform.VerifyMemory(),
        tirx.transform.AnnotateEntryFunc(),
        tirx.transform.MakePackedAPI(),
        DropChecks(),
        tirx.transform.FP8StorageLegalize(),
        tirx.transform.BF16StorageLegalize(),
    ]
    return tvm.transform.Sequential(passes)


@tvm.transform.module_pass(opt_level=0, name="FixBufferSizes")
class FixBufferSizes:
    """Gives dimensions of buffers between stages a fixed size where they are known to need no more.

    TVM gives them the smaller one of that size and the size of the whole tensor, and repeats that in each index.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with the buffers of fixed sizes."""
        return map_functions(mod, _with_fixed_sizes)


def _with_fixed_sizes(function: PrimFunc) -> PrimFunc:
    buffers: dict[tirx.Var, tirx.Var] = {}

    def visit(block: s_tir.SBlock) -> tvm_ffi.WalkResult:
        for item in block.alloc_buffers:
            shape = [_largest(size) for size in item.shape]
            # Strides are as the shape was.
            if not item.strides and not all(map(tvm_ffi.Object.same_as, shape, item.shape)):
                buffers[item] = tirx.decl_buffer(
                    shape, item.dtype, item.name, scope=item.scope(), data_alignment=item.data_alignment
                )
        return tvm_ffi.WalkResult.ADVANCE

    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, visit))
    if not buffers:
        return function
    return function.with_body(replace_variables(function.body, buffers))


def _largest(size: Any) -> Any:
    """The largest value that a size can have, where it is the smaller one of a number and something else."""
    return size.b if isinstance(size, tirx.Min) and isinstance(size.b, tirx.IntImm) else size


@tvm.transform.module_pass(opt_level=0, name="TakeKnownBranches")
class TakeKnownBranches:
    """Replaces choices between two values by the value that is taken, where the condition compares two numbers.

    An unrolled loop has such a choice in each of its copies. TVM's simplifier decides them too, but first simplifies
    both values.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with the values that are taken."""
        kinds = [(tirx.Select, _select), (tvm.ir.Call, _if_then_else)]
        return map_functions(mod, lambda func: func.with_body(tvm_ffi.structural_map(func.body, kinds)))


def _select(select: tirx.Select) -> Any:
    is_true = _decide(select.condition)
    return select if is_true is None else select.true_value if is_true else select.false_value


def _if_then_else(call: tvm.ir.Call) -> Any:
    is_true = _decide(call.args[0]) if is_choice(call) else None
    return call if is_true is None else call.args[1] if is_true else call.args[2]


def _decide(condition: Any) -> bool | None:
    """Whether a condition says that two numbers are equal that are; None for other conditions."""
    if isinstance(condition, tirx.Broadcast):
        condition = condition.value
    if not isinstance(condition, tirx.EQ):
        return None
    numbers = [_number(condition.a), _number(condition.b)]
    return None if None in numbers else numbers[0] == numbers[1]


def _number(expr: Any) -> int | None:
    while isinstance(expr, tirx.Cast):
        expr = expr.value
    return int(expr) if isinstance(expr, tirx.IntImm) else None
