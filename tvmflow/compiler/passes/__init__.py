"""The passes that lower an imported model to fused, unscheduled functions, in their order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import tvm
from tvm import relax

from tvmflow.compiler.choices import Choices
from tvmflow.compiler.dotproduct import PAIRS, integer_dot
from tvmflow.compiler.gpu.passes import UseTensorCores, lower_attention
from tvmflow.compiler.gpu.passes import legalizations as gpu_legalizations
from tvmflow.compiler.gpu.tiling import gpu_of
from tvmflow.compiler.machine import NARROWEST, machine
from tvmflow.compiler.operators import legalizations
from tvmflow.compiler.passes import attention, branches, dimensions, folding, patterns, simplify
from tvmflow.compiler.passes.bags import lower_bags
from tvmflow.compiler.passes.bf16 import RoundProducts
from tvmflow.compiler.passes.block_products import lower_block_products
from tvmflow.compiler.passes.blocks import FuseBlocks
from tvmflow.compiler.passes.checks import BindChecked, CheckSizesAlone
from tvmflow.compiler.passes.constants import FoldConstantCalls, ShareResults
from tvmflow.compiler.passes.fp16 import HalveProducts
from tvmflow.compiler.passes.fusion import (
    FuseRoundings,
    MarkFollowers,
    SeparateActivations,
    SeparateRepeats,
    SeparateSizes,
    SeparateTransposes,
    StoreRepeats,
)
from tvmflow.compiler.passes.int8 import IntegerArithmetic, IntegerProducts
from tvmflow.compiler.passes.joining import JoinProducts
from tvmflow.compiler.passes.kernels import refuse_kernels
from tvmflow.compiler.passes.layout import ChannelsLast
from tvmflow.compiler.passes.loops import RunLoopsDirectly
from tvmflow.compiler.passes.order import BindSizesFirst
from tvmflow.compiler.passes.packing import AtLoad, BindWeights, PackAtLoad
from tvmflow.compiler.passes.padding import pad_in_one_function
from tvmflow.compiler.passes.parts import ComputeParts
from tvmflow.compiler.passes.recurrence import lower_recurrence
from tvmflow.compiler.passes.repeats import multiply_by_one_copy
from tvmflow.compiler.passes.requantising import concatenate_integers
from tvmflow.compiler.passes.rows import JoinRows
from tvmflow.compiler.passes.scans import lower_scans
from tvmflow.compiler.passes.selections import lower_selections
from tvmflow.compiler.passes.single_rows import multiply_single_rows
from tvmflow.compiler.passes.sizes import NameSizes
from tvmflow.compiler.passes.stored_weights import read_stored_weights
from tvmflow.compiler.passes.tables import tabulate_integers
from tvmflow.compiler.passes.transposed_products import multiply_transposes
from tvmflow.compiler.passes.trees import lower_trees
from tvmflow.hardware.target import Precision, Target


def canonicalize() -> list[tvm.transform.Pass]:
    """Return the passes that rewrite the many forms in which exporters write an operator to one form."""
    return [
        *_bind(),
        simplify.evaluate_constants(),
        simplify.remove_identities(),
        ShareResults(),
        simplify.multiply_instead(),
        patterns.compose_gelu(),
        patterns.compose_silu(),
        patterns.simplify_mish(),
        patterns.compose_norms(),
        patterns.compose_softmax(),
        folding.fold_batch_norm(),
        folding.fold_padding(),
        folding.drop_padded_taps(),
        simplify.matrices_of_vectors(),
        *tidy(),
        attention.merge_transposes(),
        folding.fold_scales(),
        simplify.split_clip(),
        simplify.convolve_in_two_dimensions(),
        branches.add_branches(),
        *tidy(),
        ComputeParts(),
        JoinProducts(),
    ]


def _bind() -> list[tvm.transform.Pass]:
    """The passes that remove variables for the same value, but keep one for each call."""
    return [relax.transform.CanonicalizeBindings(), BindChecked()]


def tidy() -> list[tvm.transform.Pass]:
    """Return the passes that evaluate constants, merge reshapes and remove operators without effect."""
    return [
        simplify.count_axes_from_the_front(),
        simplify.evaluate_constants(),
        simplify.merge_reshapes(),
        simplify.remove_identities(),
    ]


def layout(lanes: int) -> list[tvm.transform.Pass]:
    """Return the passes that rewrite convolutions and pooling to two dimensions with the channels last.

    `lanes` is the number of float32 channels in a vector register.
    """
    return [
        dimensions.in_two_dimensions(),
        dimensions.split_transposed(lanes),
        dimensions.split_groups(lanes),
        ChannelsLast(lanes),
        simplify.transpose_before_resizing(),
    ]


def pass_names() -> list[str]:
    """Return the names of this project's passes, sorted, in the form that TVM's pass context takes."""
    ours = [*canonicalize(), *layout(NARROWEST)]
    others = {
        "BindChecked",
        "BindSizesFirst",
        "CheckSizesAlone",
        "ComposeAttention",
        "ConcatenateIntegers",
        "DropChecks",
        "FixBufferSizes",
        "FlattenBuffers",
        "FoldConstantCalls",
        "FuseBlocks",
        "JoinRows",
        "MarkFollowers",
        "FuseRoundings",
        "SeparateActivations",
        "SeparateRepeats",
        "SeparateSizes",
        "SeparateTransposes",
        "ShareResults",
        "StoreRepeats",
        "LowerAttention",
        "LowerRecurrence",
        "LowerBags",
        "LowerBlockProducts",
        "LowerScans",
        "LowerSelections",
        "LowerTrees",
        "MultiplyByOneCopy",
        "MultiplySingleRows",
        "MultiplyTransposes",
        "ReadStoredWeights",
        "RefuseKernels",
        "RunLoopsDirectly",
        "ShareMemory",
        "NameSizes",
        "PadInOneFunction",
        "PackAtLoad",
        "RoundProducts",
        "TabulateIntegers",
        "TakeKnownBranches",
        "ViewReshapes",
        "HalveProducts",
        "UseTensorCores",
        "LowerAttentionForGpu",
        "IntegerArithmetic",
        "IntegerProducts",
    }
    return sorted({*others, *(str(item.info.name) for item in ours)})


@dataclass(frozen=True)
class _TargetPasses:
    """The passes that depend on the target, by where they run.

    `kernels` and `integers` come first, and `layout` after the canonical form. Then `products` and `legalize` define
    the operators as loops. `storing` decides, before functions are fused, which results are stored.
    """

    legalize: tvm.transform.Pass
    kernels: Sequence[tvm.transform.Pass] = ()
    integers: Sequence[tvm.transform.Pass] = ()
    layout: Sequence[tvm.transform.Pass] = ()
    products: Sequence[tvm.transform.Pass] = ()
    storing: Sequence[tvm.transform.Pass] = ()


def _cpu_passes(target: Target, choices: Choices, precision: Precision, fast: bool, weights: int) -> _TargetPasses:
    cpu = machine(target).for_weights(weights)
    # Integer operators such as ConvInteger compute in integers in every precision; AMX serves `precision` only.
    unit = integer_dot(target)
    # The products of pairs of bytes are of SSSE3.
    byte_unit = unit if unit is not PAIRS or "ssse3" in target.features else None
    packs_columns = precision in ("fp32", "int8")
    narrow: dict[Precision, list[tvm.transform.Pass]] = {
        "fp32": [FuseBlocks(cpu, choices, fast), read_stored_weights(cpu), JoinRows()],
        "bf16": [FuseBlocks(cpu, choices, fast, bf16=True), JoinRows(), RoundProducts(cpu, choices, fast)],
        "fp16": [HalveProducts(cpu, choices)],
        "int8": [JoinRows()],
    }
    return _TargetPasses(
        kernels=[
            lower_recurrence(cpu, unit),
            lower_trees(cpu),
            lower_bags(cpu),
            lower_block_products(cpu, byte_unit, widens=precision == "fp32"),
        ],
        integers=[IntegerArithmetic(cpu, unit, is_required=precision == "int8")] if unit else [],
        layout=[attention.compose_attention(), CheckSizesAlone(), *layout(cpu.lanes)],
        products=[
            attention.lower_attention(cpu, precision == "bf16"),
            # Where products pack the columns of transposes, more rows than two are worth it.
            multiply_single_rows(cpu, 2) if packs_columns else multiply_single_rows(cpu),
            # In bfloat16 and float16, both operands of a product over a batch must have all of the batch.
            *([multiply_by_one_copy()] if precision in ("fp32", "int8") else []),
            lower_scans(cpu),
            lower_selections(cpu),
            *narrow[precision],
            tabulate_integers(),
            IntegerProducts(replace(cpu, amx=cpu.amx & {precision}), choices, unit, fast),
            *([multiply_transposes(cpu, choices)] if packs_columns else []),
        ],
        storing=[StoreRepeats(cpu)],
        legalize=relax.transform.LegalizeOps(legalizations(cpu, choices, fast)),
    )


def _gpu_passes(target: Target, precision: Precision) -> _TargetPasses:
    gpu = gpu_of(target)
    return _TargetPasses(
        kernels=[refuse_kernels(target.name), lower_block_products(None, None)],
        layout=[
            *([attention.compose_attention(), CheckSizesAlone()] if precision == "fp16" else []),
            dimensions.in_two_dimensions(),
            dimensions.split_transposed(NARROWEST),
            ChannelsLast(NARROWEST),
            simplify.transpose_before_resizing(),
        ],
        products=[lower_attention(gpu), UseTensorCores(gpu)] if precision == "fp16" else [],
        legalize=relax.transform.LegalizeOps(gpu_legalizations(gpu)),
    )


def lower_passes(
    target: Target,
    choices: Choices,
    precision: Precision = "fp32",
    fast: bool = True,
    weights: int = 0,
    packed_at_load: AtLoad = "none",
) -> list[tvm.transform.Pass]:
    """Return the passes that lower a Relax module with constant weights to calls of fused functions.

    `choices` decides between several ways to compute an operator. `fast` allows Winograd's algorithm.
    `weights` is the size of the module's weights in bytes. `packed_at_load` says which of them the library packs when
    it is loaded; on a GPU none.
    """
    if target.arch == "cuda":
        own = _gpu_passes(target, precision)
        packed_at_load = "none"
    else:
        own = _cpu_passes(target, choices, precision, fast, weights)
    return [
        *own.kernels,
        concatenate_integers(),
        *own.integers,
        *canonicalize(),
        relax.transform.DecomposeOpsForInference(),
        *_bind(),
        FoldConstantCalls(),
        *own.layout,
        *tidy(),
        *_bind(),
        ShareResults(),
        pad_in_one_function(),
        *own.products,
        relax.backend.DispatchSampling(),
        relax.backend.DispatchSortScan(),
        own.legalize,
        PackAtLoad(packed_at_load),
        NameSizes(),
        relax.transform.AnnotateTIROpPattern(),
        MarkFollowers(),
        FuseRoundings(),
        SeparateSizes(),
        *([] if target.arch == "cuda" else [SeparateTransposes()]),
        SeparateRepeats(),
        *own.storing,
        SeparateActivations(),
        relax.transform.FoldConstant(),
        CheckSizesAlone(),
        relax.transform.DeadCodeElimination(),
        relax.transform.FuseOps(),
        BindSizesFirst(),
        relax.transform.FuseTIR(),
        relax.transform.DeadCodeElimination(),
        NameSizes(products=True),
        BindWeights(),
        *([] if target.arch == "cuda" else [RunLoopsDirectly()]),
    ]
