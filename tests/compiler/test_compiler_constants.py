"""No constant of a machine stands outside the profiles: this list has the reason of every number that a rule names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import tvmflow.compiler

_ROOT = Path(tvmflow.compiler.__file__).parent

# By module and name: why a number is the same for every processor.
_REASONS = {
    "amx.ROWS": "instruction set: AMX's tiles",
    "amx.FEWEST_ROWS": "instruction set: AMX's tiles",
    "amx._RESULTS": "instruction set: AMX's registers",
    "amx._LINE": "instruction set: bytes of a cache line of x86-64",
    "build._LEAST_CAPABILITY": "instruction set: copies to shared memory in the background",
    "build._MOST_WEIGHTS_INSIDE": "reach of the code: 2 GiB",
    "cost.EVEN": "share of the time that cores wait",
    "cost._FILL": "the model's assumption for every cache",
    "diagnosis._IMAGE": "rank of an image",
    "gpu.code._TIMEOUT": "patience: seconds for nvcc",
    "gpu.definitions._NUMBER_BITS": "format of numbers",
    "gpu.definitions._UNKNOWN_ROWS": "shape: rows of a model whose sizes are free",
    "gpu.kernels._CHUNK": "instruction set: the copy of 16 bytes",
    "gpu.kernels._MOST_ELEMENTS": "indices of 32 bits",
    "gpu.kernels._PADDING": "layout of the sums in product.cuh",
    "gpu.kernels._VECTOR": "what TVM generates right code for",
    "gpu.passes._FEWEST_UNITS": "instruction set: the tile of mma",
    "gpu.passes._MOST_CHANNELS": "instruction set: registers of a thread",
    "gpu.schedules._BLOCK_THREADS": "scope of the rule: threads of a block",
    "gpu.schedules._LONGEST_UNROLLED": "size of the code",
    "gpu.schedules._NEIGHBOURS": "scope of the rule, and balance: threads that hide the latency of each other",
    "gpu.schedules._WINDOW_DIMENSIONS": "rank of a window",
    "gpu.schedules._LONGEST_REDUCTION": "shape: reductions that one thread does",
    "gpu.schedules._MANY_RESULTS": "shape: results that need no further threads",
    "gpu.schedules._THREADS": "scope of the rule: threads of a block",
    "gpu.tiling._REGISTERS": "registers that the kernel's code takes, and the instruction set's most",
    "gpu.tiling._SHALLOW": "layout of tiles: bytes of a row",
    "gpu.tiling._TILES": "scope of the choice",
    "machine.NARROWEST": "instruction set: 128 bits",
    "operators.bags._TYPICAL_ROWS": "a size that nobody knows: rows of a bag",
    "operators.block_plans._CHOICES": "scope of tuning",
    "operators.block_plans._WIDTHS": "share of wasted work, pixels computed twice",
    "operators.block_plans._EPILOGUE": "operations of an epilogue",
    "operators.common.TO_READ": "arguments of LLVM's intrinsic",
    "operators.common._FREE_SIZE": "shape: a free size that is compared with known ones",
    "operators.convolution._MOST_STEPS": "shape of the graph",
    "operators.depthwise.MOST_LINES": "share of wasted work: lines of padded input that strips share",
    "operators.free_reductions._PARTS": "balance: parts of a core that other programs delay",
    "operators.planes._LONGEST": "size of the code",
    "operators.planes._PARTS": "balance: parts of a core that other programs delay",
    "operators.pooling._LONGEST": "size of the code",
    "operators.resize._MOST_REPEATS": "time of the build: factors that are tried",
    "passes.fusion._FEW_BYTES": "shape: tensors too small for a function of their own",
    "schedules.depthwise._UNKNOWN_LINES": "share of wasted work: lines of padded input that strips share",
    "operators.pooling._MOST_TAPS": "operations: columns first saves them from here on",
    "operators.products.FEWEST_ROWS": "shape: known beside symbolic sizes",
    "operators.cell_tiles._MOST_PADDING": "share of wasted work",
    "operators.attention._MANY_STRIPS": "amortisation: strips of queries that share a copy of the values",
    "passes.bf16._SHALLOW": "precision: too few products for dot products to save time",
    "operators.attention._MORE_KEYS": "shape: keys up to the next number that whole tiles divide",
    "operators.attention._PARTIAL": "code: conditions of the last strip, and a copy of the queries",
    "operators.resize._MOST_TAPS": "size of the code",
    "operators.resize._MOST_TERMS": "size of the code",
    "operators.sampling._ALPHA": "definition of ONNX",
    "operators.sampling._FARTHEST": "format of numbers: halves in float32",
    "operators.narrow_products._WORD": "type: the bits of a word, and the numbers of it that are summed apart",
    "operators.narrow_products.PANEL": "amortisation: rows that share a widened weight",
    "operators.narrow_products.WIDENING": "operations: widening beside multiply-adds",
    "operators.products._CONVERTING": "operations: conversions beside multiply-adds",
    "operators.rounded_products._FEW": "instruction set: vectors that share the registers with those of the weight",
    "operators.rounded_products._IN_16_BITS": "range of the numbers",
    "operators.rounded_products._LARGEST": "range of the numbers",
    "operators.rounded_products._BYTES": "type: the numbers of a lane that an instruction multiplies",
    "operators.sampling._VECTORS": "amortisation: points whose places are computed before their channels are read",
    "operators.scans._VECTORS": "amortisation: neighbouring numbers of a slice that one core adds",
    "operators.scatter._PARTS": "balance: pieces of a core that other programs delay",
    "operators.selection._BLOCK": "operations: comparisons beside steps of a merge",
    "operators.selection._SPARE": "amortisation: elements that share the choice of the first ones",
    "operators.trees._MOST_ROWS": "amortisation: rows that share the reading of a tree",
    "operators.trees._PATHS": "instruction set: general-purpose registers",
    "operators.reductions._LONGEST": "exactness of sums",
    "operators.trees._STEPS": "operations: checks beside steps",
    "operators.block_plans._FILLED": "share of wasted work",
    "winograd.INPUT_PIXELS": "shape: images that networks take",
    "passes.blocks._SURE": "error of the estimates, scope of tuning",
    "passes.fusion._ELEMENT_WISE": "TVM's kinds of functions",
    "passes.fusion._MOST_BINDINGS": "size of the code",
    "passes.fusion._MOST_NESTED": "size of the code",
    "passes.int8._LARGEST": "range of the numbers",
    "passes.int8._SHIFT": "range of the numbers",
    "schedules._CLOSE": "scope of tuning",
    "schedules.blocks._TAP_LOOPS": "dimensions of a stage",
    "schedules.blocks._TAPS_UNROLLED": "size of the code",
    "schedules.products._FEWEST_READERS": "logic: one reader has no other to fetch for",
    "schedules.products._SHORT_TILE": "operations: divisions beside multiply-adds",
    "schedules.common._IMAGE": "rank of a batch of images",
    "schedules.common._LARGEST_COPIES": "size of the code",
    "schedules.common._VECTORS": "amortisation: vectors of a line that one task of a core computes",
    "schedules.depthwise._TAPS_UNROLLED": "size of the code",
    "schedules.fallback._MOST_PIECES": "size of the code",
    "schedules.fallback._MOST_TURNS": "size of the code",
    "schedules.prefetch._AT_A_TIME": "a scope: 8 and 32 were as fast where it was measured",
    "schedules.prefetch._CHUNKS": "scope of tuning",
    "schedules.prefetch._DISTANCE": "pages, at whose ends processors stop to fetch ahead by themselves",
    "schedules.prefetch._HOW": "arguments of LLVM's intrinsic",
    "schedules.prefetch._TO_WRITE": "arguments of LLVM's intrinsic",
    "schedules.registers._SHORT": "scope of tuning",
    "schedules.registers._UNROLLED": "scope of tuning",
    "tiles.UNKNOWN_ROWS": "share of wasted work where rows are few",
    "tiles._READ_SHARE": "the model's assumption for every cache",
    "tiles._CHOICES": "scope of tuning",
    "winograd._CAUTION": "rounding error",
    "winograd.UNKNOWN_PIXELS": "shape: a multiple of the sides of all tiles",
    "winograd.UNKNOWN_ROWS": "share of wasted work where rows are few",
    "winograd._LONG_LINE": "shape: lines of networks",
}


def _modules() -> Iterator[tuple[str, ast.Module]]:
    """The modules that read the machine, and all schedules, by name without the package."""
    for path in sorted(_ROOT.rglob("*.py")):
        text, parts = path.read_text(), path.relative_to(_ROOT).with_suffix("").parts
        if parts[0] in ("gpu", "machine", "schedules") or "tvmflow.compiler.machine import" in text:
            yield ".".join(part for part in parts if part != "__init__"), ast.parse(text)


def _is_number(node: ast.AST) -> bool:
    """Whether an expression of a module holds numbers alone."""
    plain = (
        ast.Constant | ast.Tuple | ast.UnaryOp | ast.BinOp | ast.operator | ast.unaryop | ast.Name | ast.expr_context
    )
    constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return (
        bool(constants)
        and all(isinstance(part, plain) for part in ast.walk(node))
        and all(isinstance(value, int | float) and not isinstance(value, bool) for value in constants)
    )


def test_every_number_that_a_rule_names_has_a_reason_that_is_no_machine() -> None:
    named = set()
    for module, tree in _modules():
        for node in tree.body:
            if isinstance(node, ast.Assign) and _is_number(node.value):
                first = next(part.id for part in ast.walk(node.targets[0]) if isinstance(part, ast.Name))
                named.add(f"{module}.{first}")
    assert named == set(_REASONS)


def test_no_rule_compares_a_number_of_the_machine_with_one_of_its_own() -> None:
    places = []
    for module, tree in _modules():
        for node in ast.walk(tree):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            of_machine = any(isinstance(side, ast.Attribute) and "machine" in ast.unparse(side) for side in sides)
            if of_machine and any(isinstance(side, ast.Constant) and side.value not in (None, 0, 1) for side in sides):
                places.append(f"{module}:{ast.unparse(node)}")
    assert places == []
