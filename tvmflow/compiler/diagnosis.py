"""Says of every operator of an ONNX model, before any build, which schedule rule takes it or why it is refused."""

import hashlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.s_tir import SBlock
from tvm.tirx import PrimFunc

from tvmflow.arrays import Array
from tvmflow.bundle import TensorSpec
from tvmflow.compiler.annotations import DOT, OPERATIONS
from tvmflow.compiler.build import BuildOptions, lower, rules_of
from tvmflow.compiler.graph import workloads
from tvmflow.compiler.graph_importer import NodeRecord
from tvmflow.compiler.importer import Imported, Survey, survey_onnx
from tvmflow.compiler.machine import machine
from tvmflow.compiler.messages import shorten
from tvmflow.compiler.onnx import Converter
from tvmflow.compiler.operators.common import align
from tvmflow.compiler.operators.indices import RULE as CHECK_OF_INDICES
from tvmflow.compiler.refusals import Refusal
from tvmflow.compiler.schedules import is_elementwise, iterations_of
from tvmflow.errors import BuildError
from tvmflow.hardware.target import Precision, Target, explain_missing_unit
from tvmflow.onnx_model.graph import has_graphs, node_name, operator_name

Verdict = Literal["fast", "fallback", "folded", "refused", "unexamined"]
# The fewest dimensions of what a convolution writes: items, channels and positions.
_IMAGE = 3
# The verdicts, the worst first.
VERDICTS: tuple[Verdict, ...] = ("refused", "unexamined", "fallback", "fast", "folded")

# The schedules for functions that no rule takes.
_GENERAL = ("fallback", "none", "dlight", "serial")
# In place of a rule: the operator's function comes with a schedule of its own.
_OWN = "own kernel"
_NO_RULE = "no schedule rule is for its loops: they are only vectorised and spread over the cores"
_NO_BLOCKS = "TVM computes it in one serial loop nest that no rule can schedule"
_FUSED = "element-wise: it is computed together with the operator before or after it"
_NO_SHAPE = "the shapes of its operands are not known at import"
_NOT_ALONE = "it cannot be compiled by itself"
_MOVES = "it moves data: its loops are vectorised and spread over the cores, without a rule of their own"
_FOLDED = "known at import, or the nodes of its graphs stand in its place: nothing is computed"
_CONTROL = (
    "its graphs become functions, which the library or the virtual machine calls; a loop over bags of rows, as "
    "EmbeddingBag is exported, becomes a kernel"
)


@dataclass(frozen=True)
class OperatorDiagnosis:
    """The treatment of those nodes of one operator that are treated alike.

    `verdict` is `fast` where a schedule rule or a kernel of its own computes it, `fallback` where only a general
    schedule, control flow or a function of TVM's runtime does, and `folded` where nothing is left to compute. `rule` is
    the schedule rule that takes the operator when it stands alone; fusion may put it into another function. `share` is
    the part of the expected time of all nodes that could be lowered, by their operations and the numbers that they
    move; None for nodes that were not lowered, and where that time is 0. `nodes` counts the nodes, `node` names the
    first.
    """

    operator: str
    verdict: Verdict
    rule: str
    nodes: int
    node: str
    share: float | None
    reason: str
    advice: str


@dataclass(frozen=True)
class Coverage:
    """The part of the model's expected time that a precision would compute by dot-product instructions.

    `share` is None where it is unknown or the target has no such instructions. `reason` says why it is None, or 0 for a
    model that is not quantised; else it is empty.
    """

    precision: Precision
    share: float | None
    reason: str


@dataclass(frozen=True)
class Diagnosis:
    """The forecast of what compiling a model does.

    `refusals` are all reasons for which the model cannot be compiled. `free` are the free dimensions, each with the
    inputs and axes that have it, and `sizes` the sizes for which times were estimated.
    """

    model: str
    target: str
    precision: Precision
    operators: tuple[OperatorDiagnosis, ...]
    refusals: tuple[Refusal, ...]
    free: Mapping[str, tuple[tuple[str, int], ...]]
    sizes: Mapping[str, int]
    coverage: tuple[Coverage, ...]


def diagnose(
    path: Path,
    target: Target,
    precision: Precision = "fp32",
    shapes: Mapping[str, Sequence[int | str]] | None = None,
    sizes: Mapping[str, int] | None = None,
    operators: Mapping[str, Converter] | None = None,
) -> Diagnosis:
    """Import an ONNX file, lower each kind of node by itself, and report the schedule rule that each gets.

    Nodes with the same operator, attributes and operand shapes are of one kind. A node that cannot be compiled raises
    nothing: it is in the report. `shapes` fixes or renames symbolic dimensions of inputs by name:
    `{"x": (1, 3, 224, 224)}`, `{"x": ("batch", 10)}`.
    `sizes` are sizes of free dimensions to estimate times with, by default 1. `operators` are converters of the
    caller's own, by domain and operator as in `org.example.Twice`.
    Raises ModelImportError for a file that is missing or damaged and for shapes that contradict the model, TargetError
    for a precision that the target's processor has no instructions for.
    """
    survey = survey_onnx(path, shapes, operators=operators)
    sizes = {name: (sizes or {}).get(name, 1) for name in survey.free}
    kinds = _kinds(survey)
    survey = replace(survey, params=_shared_weights(survey, kinds))
    options = _options(precision)
    costs = _costs_of_all(survey, kinds, target, options, sizes)
    total = sum(cost.cycles * len(kind.records) for kind, cost in zip(kinds, costs, strict=True))
    rows = [
        _Row(
            operator_name(kind.node), cost.verdict, cost.rule, cost.reason, cost.advice, len(kind.records),
            node_name(kind.node), cost.cycles * len(kind.records) / total if total else None,
        )
        for kind, cost in zip(kinds, costs, strict=True)
    ]  # fmt: skip
    rows += _rows_without_code(survey)
    return Diagnosis(
        model=survey.label,
        target=target.name,
        precision=precision,
        operators=tuple(_merge(rows)),
        refusals=survey.refusals,
        free=survey.free,
        sizes=sizes,
        coverage=tuple(_coverage(survey, kinds, costs, target, total, precision, sizes)),
    )


# -- Kinds of nodes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """Nodes of one operator with equal attributes and operands of equal types, which compile to equal functions.

    Kinds of the same `form` differ in the sizes of their operands alone. `images` are the operands of the first node
    that follow a convolution.
    """

    form: tuple[Any, ...]
    images: frozenset[str]
    records: list[NodeRecord]

    @property
    def node(self) -> onnx.NodeProto:
        return self.records[0].node


def _options(precision: Precision) -> BuildOptions:
    """Options with which no weight is packed to find the rules: the library would do that."""
    return BuildOptions(precision=precision, weights="apart")


def _shared_weights(survey: Survey, kinds: Sequence[_Kind]) -> dict[str, tuple[relax.Var, Array]]:
    """The survey's weights, with those that kinds read in a form that each lowering reads without a copy."""
    read = {expr.name for kind in kinds for expr in kind.records[0].inputs.values() if isinstance(expr, relax.Var)}
    return {
        name: (variable, align(value) if name in read else value) for name, (variable, value) in survey.params.items()
    }


def _kinds(survey: Survey) -> list[_Kind]:
    kinds: dict[tuple[Any, ...], _Kind] = {}
    # The ranks of values that follow a convolution, which the compiler holds with the channels last.
    ranks: dict[str, int] = {}
    for record in survey.nodes:
        ndims = {name: int(getattr(expr.ty, "ndim", -1)) for name, expr in record.inputs.items()}
        images = frozenset(name for name, ndim in ndims.items() if ndim >= _IMAGE and ranks.get(name) == ndim)
        if "Conv" in record.node.op_type and record.node.input:
            ranks.update(dict.fromkeys(record.node.output, ndims.get(record.node.input[0], -1)))
        elif images and record.node.op_type != "Transpose":
            ranks.update(dict.fromkeys(record.node.output, max(ndims[name] for name in images)))
        if _is_judged_alone(record):
            node = _without_names(record.node)
            names = [name for name in record.node.input if name in record.inputs]
            form = (node, *((_operand_form(survey, record.inputs[name]), name in images) for name in names))
            key = (form, *(_operand_text(survey, record.inputs[name]) for name in names))
            kinds.setdefault(key, _Kind(form, images, [])).records.append(record)
    return list(kinds.values())


def _is_judged_alone(record: NodeRecord) -> bool:
    """Whether a node can be compiled by itself: it has no graphs, and the shapes of its operands are known."""
    types = [expr.ty for expr in record.inputs.values() if isinstance(getattr(expr, "ty", None), relax.TensorType)]
    has_shapes = all(isinstance(ty.shape, relax.ShapeExpr) for ty in types)
    return record.status == "converted" and has_shapes and not has_graphs(record.node)


def _without_names(original: onnx.NodeProto) -> bytes:
    """What a node computes: without its name, those of its operands and results, and what exporters note about it."""
    node = onnx.NodeProto(
        op_type=original.op_type,
        domain=original.domain,
        overload=original.overload,
        attribute=original.attribute,
        input=["x" if name else "" for name in original.input],
        output=["x" if name else "" for name in original.output],
    )
    return bytes(node.SerializeToString(deterministic=True))


def _operand_form(survey: Survey, expr: relax.Expr) -> tuple[Any, ...]:
    is_constant = isinstance(expr, tvm.ir.GenericConst) or (isinstance(expr, relax.Var) and expr.name in survey.params)
    if not isinstance(expr.ty, relax.TensorType):
        return (is_constant, str(expr.ty))
    return is_constant, str(expr.ty.dtype), int(expr.ty.ndim)


def _operand_text(survey: Survey, expr: relax.Expr) -> str:
    if isinstance(expr, tvm.ir.GenericConst):
        value = np.ascontiguousarray(expr.value.numpy())
        return f"constant {value.dtype} {value.shape} {hashlib.blake2b(value.tobytes()).hexdigest()}"
    if isinstance(expr, relax.Var) and expr.name in survey.params:
        return f"weight {expr.ty}"
    return str(expr.ty) if isinstance(expr.ty, relax.TensorType) else str(expr)


def _rows_without_code(survey: Survey) -> "Iterator[_Row]":
    """Rows for nodes that compile to nothing, to control flow, or not at all."""
    for record in survey.nodes:
        node, name = record.node, node_name(record.node)
        if record.status == "folded":
            yield _Row(operator_name(node), "folded", "", _FOLDED, "", 1, name, None)
        elif record.status == "unexamined":
            reason = "it reads what a refused node would compute, or has such a node within"
            yield _Row(operator_name(node), "unexamined", "", reason, "", 1, name, None)
        elif record.status == "converted" and has_graphs(node):
            yield _Row(operator_name(node), "fallback", "control flow", _CONTROL, "", 1, name, None)
        elif record.status == "converted" and not _is_judged_alone(record):
            yield _Row(operator_name(node), "unexamined", "", _NO_SHAPE, "", 1, name, None)
    for refusal in survey.refusals:
        if refusal.operator:
            yield _Row(refusal.operator, "refused", "", refusal.reason, refusal.advice, 1, refusal.node, None)


# -- Lowering one node of each kind ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cost:
    """The rule of the costliest function of a kind of nodes, and the cycles of all of its functions on one core."""

    verdict: Verdict
    rule: str
    reason: str
    advice: str
    cycles: float
    functions: tuple[PrimFunc, ...]


def _costs_of_all(
    survey: Survey, kinds: Sequence[_Kind], target: Target, options: BuildOptions, sizes: Mapping[str, int]
) -> list[_Cost]:
    """The cost of each kind, in two lowerings.

    The first has one kind of each operator, attributes and ranks. Others that differ from an element-wise one in their
    sizes alone cost as much for each element; the rest are in the second.
    """
    first: dict[tuple[Any, ...], int] = {}
    for place, kind in enumerate(kinds):
        first.setdefault(kind.form, place)
    places = list(first.values())
    costs = dict(zip(places, _costs(survey, [kinds[place] for place in places], target, options, sizes), strict=True))
    rest = []
    for place, kind in enumerate(kinds):
        like = first[kind.form]
        if place in costs:
            continue
        if costs[like].rule == "fused":
            elements, other = _elements(kind, sizes), _elements(kinds[like], sizes)
            costs[place] = replace(costs[like], cycles=costs[like].cycles * elements / max(other, 1))
        else:
            rest.append(place)
    if rest:
        others = _costs(survey, [kinds[place] for place in rest], target, options, sizes)
        costs.update(zip(rest, others, strict=True))
    return [costs[place] for place in range(len(kinds))]


def _elements(kind: _Kind, sizes: Mapping[str, int]) -> int:
    """The elements of the largest operand of a kind."""
    shapes = [expr.ty.shape.values for expr in kind.records[0].inputs.values() if isinstance(expr.ty, relax.TensorType)]
    counts = [
        math.prod(int(dim) if isinstance(dim, tirx.IntImm) else sizes.get(str(dim), 1) for dim in shape)
        for shape in shapes
    ]
    return max(counts, default=1)


def _costs(
    survey: Survey, kinds: Sequence[_Kind], target: Target, options: BuildOptions, sizes: Mapping[str, int]
) -> list[_Cost]:
    """The cost of each kind. One module holds a node of each; where it cannot be lowered, each has its own."""
    try:
        return _costs_together(survey, kinds, target, options, sizes)
    except BuildError as error:
        if len(kinds) == 1:
            return [_Cost("unexamined", "", f"{_NOT_ALONE}: {shorten(error)}", "", 0.0, ())]
    middle = len(kinds) // 2
    return [cost for part in (kinds[:middle], kinds[middle:]) for cost in _costs(survey, part, target, options, sizes)]


def _costs_together(
    survey: Survey, kinds: Sequence[_Kind], target: Target, options: BuildOptions, sizes: Mapping[str, int]
) -> list[_Cost]:
    lowered, places = _lower_apart(survey, kinds, target, options)
    functions = {variable.name_hint: func for variable, func in lowered.functions_items() if isinstance(func, PrimFunc)}
    elementwise = {name for name, func in functions.items() if is_elementwise(func)}
    # The general schedule is all that an element-wise function needs, and it is fused to another one in a whole model.
    others = tvm.IRModule({var: func for var, func in lowered.functions_items() if var.name_hint not in elementwise})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Functions that come with their schedule have no rule.
        rules = dict.fromkeys(functions, _OWN) | rules_of(others, target) | dict.fromkeys(elementwise, "fused")
    costs = []
    for callees in _callees(lowered, places):
        if callees is None:
            costs.append(_Cost("unexamined", "", _NOT_ALONE, "", 0.0, ()))
            continue
        names = [callee.name_hint for callee in callees if getattr(callee, "name_hint", None) in functions]
        cycles = {name: _cycles(functions[name], target, sizes) for name in names}
        if not names:
            calls_library = any(isinstance(callee, relax.ExternFunc) for callee in callees)
            costs.append(_LIBRARY_COST if calls_library else _NO_COST)
            continue
        # Of an operator that looks up indices, their check is not the work.
        candidates = [name for name in names if rules[name] != CHECK_OF_INDICES] or names
        rule = rules[
            max(
                candidates,
                key=lambda name: (rules[name] not in (*_GENERAL, "fused"), rules[name] != "fused", cycles[name]),
            )
        ]
        costs.append(_cost(rule, tuple(functions[name] for name in names), sum(cycles.values())))
    return costs


_NO_COST = _Cost("folded", "", "it moves nothing: nothing is computed", "", 0.0, ())
_LIBRARY_COST = _Cost("fallback", "library", "a function of TVM's runtime computes it", "", 0.0, ())


def _cost(rule: str, functions: tuple[PrimFunc, ...], cycles: float) -> _Cost:
    if rule == "fused":
        return _Cost("fast", "fused", _FUSED, "", cycles, functions)
    if rule not in _GENERAL:
        return _Cost("fast", rule, "", "", cycles, functions)
    if rule == "dlight":
        return _Cost("fallback", rule, "TVM's default schedules for GPUs take it", "", cycles, functions)
    if rule == "serial":
        return _Cost(
            "fallback", rule, "TVM's schedules for GPUs fail on it: one thread takes it", "", cycles, functions
        )
    is_arithmetic = any(_operations(value) for func in functions for _, value in iterations_of(func))
    reason = _NO_BLOCKS if rule == "none" else _NO_RULE if is_arithmetic else _MOVES
    advice = "where its share is large, tune it: `tvmflow compile --trials 200`" if is_arithmetic else ""
    return _Cost("fallback", rule, reason, advice, cycles, functions)


def _lower_apart(
    survey: Survey, kinds: Sequence[_Kind], target: Target, options: BuildOptions
) -> tuple[tvm.IRModule, list[list[int] | None]]:
    """Lower a module with one node of each kind, none of which reads another's result.

    Returns the module, and the places of each kind's results among its outputs, None for a kind that cannot be
    converted by itself. Raises BuildError.
    """
    builder = relax.BlockBuilder()
    fresh: list[relax.Var] = []
    operands: list[dict[str, relax.Expr]] = []
    weights: dict[str, relax.Var] = {}
    defined = {symbol for variable in survey.inputs for symbol in _symbols_of(variable)}
    for kind in kinds:
        record, own = kind.records[0], {}
        for name, expr in record.inputs.items():
            if isinstance(expr, relax.Var) and expr.name in survey.params:
                own[name] = weights[expr.name] = expr
                continue
            if isinstance(expr, tvm.ir.GenericConst) or not isinstance(expr.ty, relax.TensorType):
                own[name] = expr
                continue
            ty = _with_defined_symbols(expr.ty, defined)
            if name in kind.images:
                # The compiler moves this transpose into the operator.
                ty = relax.TensorType([ty.shape.values[axis] for axis in _channels_last(ty.ndim)], ty.dtype)
            own[name] = relax.Var(f"operand_{len(fresh)}", ty)
            fresh.append(own[name])
        operands.append(own)
    places: list[list[int] | None] = []
    outputs: list[relax.Expr] = []
    parameters = [*survey.inputs, *fresh, *weights.values()]
    try:
        with builder.function("main", params=parameters):
            with builder.dataflow():
                for kind, own in zip(kinds, operands, strict=True):
                    try:
                        tensors = _convert_alone(survey, builder, kind, own)
                    except Exception:  # A converter may want more of its operands than their types.
                        places.append(None)
                        continue
                    places.append(list(range(len(outputs), len(outputs) + len(tensors))))
                    outputs += tensors
                output = builder.emit_output(relax.Tuple(outputs))
            builder.emit_func_output(output)
        mod = builder.get()
    except Exception as error:
        raise BuildError(f"a module of single nodes cannot be made: {shorten(error)}") from error
    specs = tuple(TensorSpec(variable.name, (), str(variable.ty.dtype)) for variable in (*survey.inputs, *fresh))
    params = {name: survey.params[name][1] for name in weights}
    return lower(Imported(mod, params, specs, ()), target, options), places


def _convert_alone(
    survey: Survey, builder: relax.BlockBuilder, kind: _Kind, operands: Mapping[str, relax.Expr]
) -> list[relax.Expr]:
    """Convert a node of a kind; its images, and results of their rank, are in memory with the channels last."""
    ranks = {int(operands[name].ty.ndim) for name in kind.images if isinstance(operands[name], relax.Var)}
    own = {
        name: builder.emit(relax.op.permute_dims(expr, _channels_first(int(expr.ty.ndim))))
        if name in kind.images
        else expr
        for name, expr in operands.items()
    }
    results = survey.convert(builder, kind.node, own).values()
    tensors = [builder.emit(item) for item in results if isinstance(getattr(item, "ty", None), relax.TensorType)]
    return [
        builder.emit(relax.op.permute_dims(item, _channels_last(int(item.ty.ndim)))) if item.ty.ndim in ranks else item
        for item in tensors
    ]


def _channels_last(rank: int) -> list[int]:
    return [0, *range(2, rank), 1]


def _channels_first(rank: int) -> list[int]:
    return [0, rank - 1, *range(1, rank - 1)]


def _symbols_of(variable: relax.Var) -> list[tirx.Var]:
    shape = getattr(variable.ty, "shape", None)
    return [dim for dim in shape.values if isinstance(dim, tirx.Var)] if isinstance(shape, relax.ShapeExpr) else []


def _with_defined_symbols(ty: relax.TensorType, defined: set[tirx.Var]) -> relax.TensorType:
    """The type, with a symbol of its own for each expression of symbols that no input of the model has."""
    if not isinstance(ty.shape, relax.ShapeExpr):
        return ty
    dims = []
    for place, dim in enumerate(ty.shape.values):
        symbols = tvm.tirx.analysis.undefined_vars(dim, []) if isinstance(dim, tvm.ir.Expr) else []
        is_defined = isinstance(dim, tirx.Var) or all(any(item.same_as(own) for own in defined) for item in symbols)
        dims.append(dim if is_defined else tirx.Var(f"size_{place}", "int64"))
    return relax.TensorType(dims, ty.dtype)


def _callees(
    lowered: tvm.IRModule, places: Iterable[Sequence[int] | None]
) -> Iterator[list[tvm.ir.GlobalVar | relax.ExternFunc] | None]:
    """The functions that are called for the outputs of `main` at each of these places; None for None."""
    body = lowered["main"].body
    values = {binding.var: binding.value for block in body.blocks for binding in block.bindings}
    results: relax.Expr = body.body
    while results in values:
        results = values[results]
    fields = list(results.fields) if isinstance(results, relax.Tuple) else [results]
    for outputs in places:
        yield None if outputs is None else list(_callees_of([fields[place] for place in outputs], values))


def _callees_of(
    outputs: Sequence[relax.Expr], values: Mapping[relax.Var, relax.Expr]
) -> Iterator[tvm.ir.GlobalVar | relax.ExternFunc]:
    """The functions that are called for these outputs of a function whose variables have these values."""
    waiting = list(outputs)
    visited: set[relax.Var] = set()
    while waiting:
        expr = waiting.pop()
        if isinstance(expr, relax.Var):
            if expr in visited or expr not in values:
                continue
            visited.add(expr)
            expr = values[expr]
        callees: list[tvm.ir.GlobalVar | relax.ExternFunc] = []

        def visit(node: Any, callees: list[tvm.ir.GlobalVar | relax.ExternFunc] = callees) -> None:
            if isinstance(node, tvm.ir.GlobalVar | relax.ExternFunc):
                callees.append(node)
            elif isinstance(node, relax.Var):
                waiting.append(node)

        relax.analysis.post_order_visit(expr, visit)
        yield from callees


def _cycles(func: PrimFunc, target: Target, sizes: Mapping[str, int]) -> float:
    """The expected cycles of a function on one core, at these sizes of its symbolic dimensions.

    A vector of results is one cycle for each operation, a number of the arguments one cycle. The arguments of
    element-wise functions are not counted, because these are fused to others. An unknown size counts as one.
    """
    lanes = machine(target).lanes if target.arch != "cuda" else 1
    symbols = {dim for parameter in func.params for dim in getattr(parameter, "shape", ()) if isinstance(dim, tirx.Var)}
    analyzer = tvm.sym.Analyzer()
    for symbol in symbols:
        analyzer.bind(symbol, tirx.IntImm(str(symbol.ty), sizes.get(symbol.name, 1)))

    def count(dims: Iterable[Any]) -> int:
        sizes_of_dims = [analyzer.simplify(dim) for dim in dims]
        return math.prod(int(dim) if isinstance(dim, int | tirx.IntImm) else 1 for dim in sizes_of_dims)

    operations = sum(count(extents) * _operations(value) for extents, value in iterations_of(func))
    if OPERATIONS in (func.attrs or {}):
        operations += int(func.attrs[OPERATIONS]) * count(func.params[0].shape[:-1])
    numbers = 0 if is_elementwise(func) else sum(count(getattr(item, "shape", ())) for item in func.params)
    return operations / lanes + numbers


def _operations(expr: Any) -> int:
    """The arithmetic operations of an expression, without those that compute indices or choose an operand."""
    if hasattr(expr, "indices") or not isinstance(expr, tvm.ir.Expr):
        return 0
    arguments = list(getattr(expr, "args", ()))
    is_choice = str(getattr(getattr(expr, "op", None), "name", "")).endswith("if_then_else")
    fields = [getattr(expr, name, None) for name in ("a", "b", "true_value", "false_value", "value")]
    below = sum(map(_operations, [*fields, *(arguments[1:] if is_choice else arguments)]))
    is_counted = (hasattr(expr, "a") or arguments) and not is_choice
    return below + (1 if is_counted else 0)


# -- Rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    operator: str
    verdict: Verdict
    rule: str
    reason: str
    advice: str
    nodes: int
    node: str
    share: float | None


def _merge(rows: Iterable[_Row]) -> Iterator[OperatorDiagnosis]:
    """Join rows that differ in their nodes alone; the worst verdict first, then the largest share."""
    groups: dict[tuple[Any, ...], list[_Row]] = {}
    for row in rows:
        groups.setdefault((row.operator, row.verdict, row.rule, row.reason, row.advice), []).append(row)
    merged = []
    for (operator, verdict, rule, reason, advice), group in groups.items():
        shares = [row.share for row in group if row.share is not None]
        nodes = sum(row.nodes for row in group)
        share = sum(shares) if shares else None
        merged.append(OperatorDiagnosis(operator, verdict, rule, nodes, group[0].node, share, reason, advice))
    yield from sorted(merged, key=lambda item: (VERDICTS.index(item.verdict), -(item.share or 0.0), item.operator))


# -- Narrow precisions -------------------------------------------------------------------------------------------------


def _coverage(
    survey: Survey,
    kinds: Sequence[_Kind],
    costs: Sequence[_Cost],
    target: Target,
    total: float,
    precision: Precision,
    sizes: Mapping[str, int],
) -> Iterator[Coverage]:
    for narrow in ("bf16", "int8"):
        missing = explain_missing_unit(target, narrow)
        if missing is not None:
            yield Coverage(narrow, None, missing)
        elif narrow == "int8" and not _is_quantised(survey):
            yield Coverage(narrow, 0.0, "the model holds no 8-bit integers; quantise it first")
        elif survey.refusals:
            yield Coverage(narrow, None, "nothing can be said while nodes are refused")
        elif narrow == "int8":
            yield _coverage_of_whole(survey.finish(), target, narrow, sizes)
        else:
            narrowed = costs if precision == narrow else _costs_of_all(survey, kinds, target, _options(narrow), {})
            covered = sum(
                cost.cycles * len(kind.records)
                for kind, cost, other in zip(kinds, costs, narrowed, strict=True)
                if any(map(_is_dot, other.functions))
            )
            yield _coverage_of(narrow, covered, total)


def _coverage_of(precision: Precision, covered: float, total: float) -> Coverage:
    return Coverage(precision, covered / total, "") if total else Coverage(precision, None, "no operator takes time")


def _is_quantised(survey: Survey) -> bool:
    operands = [expr for record in survey.nodes for expr in record.inputs.values()]
    return any(isinstance(expr.ty, relax.TensorType) and str(expr.ty.dtype) in ("int8", "uint8") for expr in operands)


def _is_dot(func: PrimFunc) -> bool:
    """Whether a function's kernel computes by the dot products of a narrow precision."""
    blocks: list[SBlock] = []
    tvm_ffi.structural_walk(func.body, (SBlock, blocks.append))
    return any(DOT in block.annotations for block in blocks)


def _coverage_of_whole(imported: Imported, target: Target, precision: Precision, sizes: Mapping[str, int]) -> Coverage:
    """The part of a whole model's expected time within functions of dot products, at sizes of free dimensions."""
    try:
        lowered = lower(imported, target, BuildOptions(precision=precision))
    except BuildError as error:
        return Coverage(precision, None, str(error))
    cycles = [(item, _cycles(item.func, target, sizes) * item.calls) for item in workloads(lowered)]
    covered = sum(cost for item, cost in cycles if _is_dot(item.func))
    return _coverage_of(precision, covered, sum(cost for _, cost in cycles))
