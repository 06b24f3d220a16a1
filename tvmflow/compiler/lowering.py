"""Lowers scheduled functions for a CPU: TVM's passes from a schedule to what LLVM gets, and passes of this project.

The passes of TVM are those of its own pipeline, without those for GPUs.
"""

from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.tirx import PrimFunc

from tvmflow.compiler.argument_checks import DropChecks, take_unaligned
from tvmflow.compiler.borders import split_lines
from tvmflow.compiler.divisions import lower_divisions
from tvmflow.compiler.flattening import FlattenBuffers
from tvmflow.compiler.quotients import unify_quotients
from tvmflow.compiler.schedules.common import bytes_of
from tvmflow.compiler.short_loops import run_short_loops_alone
from tvmflow.compiler.statements import is_choice, map_functions, replace_variables, summands
from tvmflow.compiler.tile_configuration import configure_tiles

# The bytes of a buffer that is surely small beside the stack of a thread.
_STACK_BYTES = 4096


def lower_functions(functions: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Return scheduled functions as TVM generates code of them, by the passes of this thread's pass context."""
    functions = map_functions(unify_quotients(functions), _with_factored_sizes)
    lowered = _pipeline()(tirx.transform.BindTarget(target.with_host(target))(functions))
    builtins = tvm.transform.Sequential([tirx.transform.LowerTVMBuiltin(), tirx.transform.LowerIntrin()])
    lowered = map_functions(map_functions(lowered, take_unaligned), _with_small_buffers_on_stack)
    shared = split_lines(builtins(lower_divisions(lowered)), tirx.ForKind.PARALLEL)
    return configure_tiles(split_lines(run_short_loops_alone(shared)))


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
        FlattenBuffers(),
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


def _with_factored_sizes(function: PrimFunc) -> PrimFunc:
    """Return the function with `(size - 2) * 2` in the place of dimensions such as `size * 2 - 4` of its parameters.

    TVM takes dimensions for positive, and of `size * 2 - 4` it infers that `size` is 4 or more, where 2 is right: it
    leaves out what a smaller size needs.
    """
    buffers = {}
    for param in function.params:
        dims = list(getattr(param, "shape", ()))
        factored = [_factored(dim) for dim in dims]
        if any(one is not other for one, other in zip(dims, factored, strict=True)):
            buffers[param] = tirx.decl_buffer(
                factored, param.dtype, param.name, data_alignment=param.data_alignment, scope=param.scope()
            )
    if not buffers:
        return function
    params = [buffers.get(param, param) for param in function.params]
    body = replace_variables(function.body, buffers)
    return PrimFunc(params, body, function.ret_type, function.attrs)


def _with_small_buffers_on_stack(function: PrimFunc) -> PrimFunc:
    """Return the function with buffers of up to `_STACK_BYTES` on the stack, where LLVM can keep them in registers.

    TVM does so below 1 KiB, which the results of a tile exceed, and for the scope `global` alone. Memory for any other
    buffer comes from the runtime and goes back to it, each time that the code comes by.
    """

    def keep(statement: tirx.AllocBuffer) -> tirx.AllocBuffer:
        if bytes_of(statement.buffer) > _STACK_BYTES:
            return statement
        annotations = {**statement.annotations, "disable_lower_builtin": tirx.const(True, "bool")}
        return tirx.AllocBuffer(statement.buffer, annotations)

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.AllocBuffer, keep)))


def _factored(dim: Any) -> Any:
    """The dimension `size * factor - number` as `(size - start) * factor + rest`; any other as it is."""
    match list(summands(dim)):
        case [(tirx.Var() as size, factor), (None, number)] if factor > 1 and number < 0:
            start = -(number // factor)
            return (size - start) * factor + (start * factor + number)
    return dim


@tvm.transform.module_pass(opt_level=0, name="FixBufferSizes")
class FixBufferSizes:
    """Gives dimensions of buffers between stages a plain size.

    TVM gives them the smaller one of the size of the whole tensor and of what it can prove to be enough, and repeats
    that in each index. The plain size is what is enough where that is a number, and the size of the whole tensor for a
    buffer that all loops share, of which TVM proves little: its proof is an expression of hundreds of terms.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with the buffers of plain sizes."""
        return map_functions(mod, _with_plain_sizes)


def _with_plain_sizes(function: PrimFunc) -> PrimFunc:
    buffers: dict[tirx.Var, tirx.Var] = {}
    shared = set(_allocated(function.body, [(tirx.For, lambda _loop: tvm_ffi.WalkResult.SKIP)]))
    for item in _allocated(function.body):
        sizes = [(size, _plain(size, item in shared)) for size in item.shape if isinstance(size, tirx.Min)]
        changed = [(size, plain) for size, plain in sizes if not size.same_as(plain)]
        if changed:
            buffers[item] = tirx.decl_buffer(
                [_with_sizes(size, changed) for size in item.shape],
                item.dtype,
                item.name,
                strides=[_with_sizes(stride, changed) for stride in item.strides] or None,
                scope=item.scope(),
                data_alignment=item.data_alignment,
            )
    if not buffers:
        return function
    return function.with_body(replace_variables(function.body, buffers))


def _allocated(body: Any, others: Sequence[Any] = ()) -> list[tirx.Var]:
    """The buffers between stages; `others` are handlers of further kinds of statements, which may leave them out."""
    items: list[tirx.Var] = []
    handlers = [(s_tir.SBlock, lambda block: items.extend(block.alloc_buffers)), *others]
    tvm_ffi.structural_walk(body, handlers, order="pre")
    return items


def _plain(size: Any, is_shared: bool) -> Any:
    """The plain size for the smaller one of the size of a whole tensor and of what is enough."""
    return size.b if isinstance(size.b, tirx.IntImm) else size.a if is_shared else size


def _with_sizes(expression: Any, sizes: Sequence[tuple[Any, Any]]) -> Any:
    """The expression of sizes and strides with other sizes, each the smaller one of two, by pairs of old and new."""

    def replace(smaller: tirx.Min) -> Any:
        equal = (new for old, new in sizes if tvm_ffi.structural_equal(old, smaller))
        return next(equal, smaller)

    return tvm_ffi.structural_map(expression, (tirx.Min, replace), order="pre")


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
    """The truth of a condition that compares two known numbers for equality; None for other conditions."""
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
