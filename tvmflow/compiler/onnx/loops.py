"""The operators Loop and Scan, and the sequences that a Loop gathers.

A loop of few iterations is imported in place of its node. Another one becomes functions of the module: the function
of the loop, and that of an iteration. On a CPU, `passes.loops` replaces the body of the former by one function of the
library that counts the iterations, where it can. Where it cannot, the iterations are imported in place of the node, if
their number is known and they are not too many; else the virtual machine runs the loop. The loop's function then calls
itself for one half of the iterations, and for the other: a loop of a million iterations is twenty calls deep, and no
call holds more than one set of the values that the loop carries.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import tvm
from tvm import relax, tirx

from tvmflow.compiler.loop import LOOP, LoopDescription
from tvmflow.compiler.onnx.bags import BagLoop
from tvmflow.compiler.onnx.counters import as_tensor, count_iterations, greatest, is_size
from tvmflow.compiler.onnx.hoisting import gathered_rows, hoist_products, with_gathered_rows, with_rows_as_inputs
from tvmflow.compiler.onnx.node import FreeSizeError, UnsupportedFormError
from tvmflow.compiler.onnx.outlining import (
    Function,
    Importer,
    Type,
    Value,
    call,
    decide,
    either,
    graph_of,
    outline,
    scalar,
    set_results,
    shaped,
    type_of,
)
from tvmflow.compiler.onnx.sizes import LARGEST_SIZE, bind_sizes
from tvmflow.compiler.onnx.values import const, dims_of, is_static
from tvmflow.onnx_model.graph import has_graphs, names_read, nodes_of, source_of, writers_of

# A loop is imported in place of its node if all of its iterations together have no more nodes: to call functions for
# each iteration would take more time than it saves in the build.
_FEW_NODES = 64
# The same for a loop that the virtual machine would have to run: as many nodes as a large network has, which take a few
# seconds to build.
_MOST_NODES = 1024
# Loops have no more iterations than two to this power.
_LEVELS = 40

# Takes the number of an iteration and the carried values; returns whether there is another iteration, None where that
# is certain, the carried values, and those to stack.
_Iterate = Callable[[relax.Expr, Sequence[Value]], tuple[Value | None, list[Value], list[Value]]]


class _SizeChangesError(Exception):
    """A carried value of a loop that `keeps_sizes` changes its size."""


@dataclass(frozen=True)
class _Loop:
    """A Loop or a Scan.

    `limit` is the most iterations, a size or a tensor; None without a limit. `condition` says whether there is a first
    iteration, None where that is certain. `initial` are the values to carry. `nodes` counts those of an iteration,
    which `iterate` imports, and `has_graphs` where one of these has graphs of its own. Values of all iterations are
    stacked along `axes`, the last first where `is_reversed`, or concatenated along these axes where `is_joined`. A
    carried value that changes its size is an error where the loop `keeps_sizes`.
    """

    limit: Any
    condition: Value | None
    initial: Sequence[Value]
    nodes: int
    has_graphs: bool
    iterate: _Iterate
    axes: Sequence[int]
    is_reversed: Sequence[bool]
    is_joined: Sequence[bool]
    keeps_sizes: bool = False

    def has_at_most(self, nodes: int) -> bool:
        """Return whether the number of iterations is known, and all of them together have at most `nodes` nodes."""
        return self.condition is None and isinstance(self.limit, int) and self.limit * self.nodes <= nodes


@dataclass(frozen=True)
class _Gathered:
    """A sequence, empty at first, to whose end each iteration of a loop adds a tensor, and which is then concatenated.

    `place` is its place among the carried values, `row` the name of the tensor. The tensors are concatenated along
    `axis`, which is a new axis where `is_new`.
    """

    place: int
    row: str
    axis: int
    is_new: bool


def convert_loop(importer: Importer, node: onnx.NodeProto) -> bool:
    """Import Loop; return whether the nodes of its iterations took its place.

    They do where the number of iterations is known at import and all together have few nodes. Otherwise the body
    becomes functions that the model calls, and a sequence that the iterations fill and the model concatenates becomes a
    stack. Raises UnsupportedFormError for other sequences, and for a carried value whose type or rank changes.
    """
    graph = graph_of(node, "body")
    count, condition, *initial = (importer.value(name) if name else None for name in node.input)
    carried = [value for value in initial if value is not None]
    limit = None if count is None else _limit(importer, count)
    elements = None if condition is None else importer.elements(condition)
    if elements is not None:
        condition = None
        limit = limit if elements.reshape(-1)[0] else 0

    stacks, constant = len(graph.output) - 1 - len(carried), _constant(graph, len(carried))
    counted = count_iterations(importer, graph, carried, constant, limit)
    if is_size(counted) and _import_bags(importer, node, graph, carried, counted, condition is None):
        return False
    if counted is not None and condition is None:
        taken = _rows_of_length(importer, gathered_rows(importer, graph), counted)
        same = {graph.input[2 + place].name: node.input[2 + place] for place in constant}
        graph = with_gathered_rows(graph, hoist_products(importer, graph, taken, same))
    loop = _Loop(
        limit if counted is None else counted, condition, carried,
        len(list(nodes_of(graph))), any(map(has_graphs, graph.node)),
        _iterating(importer, graph, carried, [], set(), is_counted=counted is not None),
        [0] * stacks, [False] * stacks, [False] * stacks,
    )  # fmt: skip
    gathered = _gathered(importer, node, graph, carried)
    places = {item.place for item in gathered} | constant
    function = replace(
        loop,
        initial=[value for place, value in enumerate(carried) if place not in places],
        iterate=_iterating(importer, graph, carried, gathered, constant, is_counted=counted is not None),
        axes=[*loop.axes, *(item.axis for item in gathered)],
        is_reversed=[*loop.is_reversed, *(False for _ in gathered)],
        is_joined=[*loop.is_joined, *(not item.is_new for item in gathered)],
    )
    results, is_in_place = _import(importer, loop, function)
    if is_in_place:
        set_results(importer, node, results)
        return True
    own, sequences = results[: len(results) - len(gathered)], results[len(results) - len(gathered) :]
    names = [name for place, name in enumerate(node.output) if place not in places]
    for name, value in zip(names, own, strict=False):
        importer.set_value(name, value)
    for item, value in zip(gathered, sequences, strict=True):
        importer.set_concatenated(node.output[item.place], value)
    for place in constant & set(range(len(node.output))):
        importer.set_value(node.output[place], carried[place])
    return False


def _import_bags(
    importer: Importer,
    node: onnx.NodeProto,
    graph: onnx.GraphProto,
    carried: Sequence[Value],
    counted: Any,
    starts: bool,
) -> bool:
    """Import a Loop whose iterations each reduce a bag of rows as one operator; return whether it is such a loop.

    Its only result is a stack of rows, or a sequence of them that is concatenated. It has `counted` iterations where it
    has a first one, which is certain where it `starts`.
    """
    gathered = _gathered(importer, node, graph, carried)
    names = [*(item.name for item in graph.output[1 + len(carried) :]), *(item.row for item in gathered)]
    if len(names) != 1 or any(item.axis != 0 for item in gathered):
        return False
    others = set(node.output[: len(carried)]) - {node.output[item.place] for item in gathered}
    if others & {item.name for item in importer.graph.output}.union(*map(names_read, importer.graph.node)):
        return False
    loop = BagLoop(importer, graph, carried, counted, "" if starts else node.input[1])
    value = loop.read(names[0], keeps=any(not item.is_new for item in gathered))
    if value is None:
        return False
    for item in gathered:
        importer.set_concatenated(node.output[item.place], Value(value))
    if not gathered:
        importer.set_value(node.output[len(carried)], Value(value))
    return True


def _rows_of_length(importer: Importer, rows: Mapping[str, str], length: Any) -> dict[str, str]:
    """Those of `rows`, pairs of a row and its tensor, whose tensor has as many rows as a loop has iterations.

    The elements of a vector are no rows.
    """
    shapes = {row: dims_of(importer.tensor(importer.value(tensor))) or [] for row, tensor in rows.items()}
    evaluator = importer.evaluator
    return {
        row: rows[row]
        for row, dims in shapes.items()
        if len(dims) > 1
        and is_size(length)
        and evaluator.are_equal(evaluator.expression(dims[0]), evaluator.expression(length))
    }


def _constant(graph: onnx.GraphProto, count: int) -> set[int]:
    """The places of those of `count` carried values that every iteration of a Loop passes on as they are.

    tf2onnx carries the weights of a recurrent layer in this way.
    """
    writers = writers_of(graph)
    sources = [source_of(writers, item.name) for item in graph.output[1 : 1 + count]]
    return {place for place, name in enumerate(sources) if name == graph.input[2 + place].name}


def _iterating(
    importer: Importer,
    graph: onnx.GraphProto,
    initial: Sequence[Value],
    gathered: Sequence[_Gathered],
    constant: set[int],
    is_counted: bool,
) -> _Iterate:
    """What imports an iteration of a Loop, whose stacks end with the tensors that it adds to sequences.

    `constant` are the places of the `initial` values that stay as they are. Where `is_counted`, the number of
    iterations is known before the first one, and its condition does not matter.
    """
    places = {item.place for item in gathered} | constant

    def iterate(index: relax.Expr, values: Sequence[Value]) -> tuple[Value | None, list[Value], list[Value]]:
        inputs = list(values)
        for place in sorted(places):
            inputs.insert(place, initial[place])
        with importer.scope():
            again, *results = importer.import_graph(graph, [Value(index), Value(const(np.array(True))), *inputs])
            rows = [importer.value(item.row) for item in gathered]
        holds = importer.elements(again)
        is_certain = is_counted or (holds is not None and bool(holds.reshape(-1)[0]))
        carried = [value for place, value in enumerate(results[: len(initial)]) if place not in places]
        return None if is_certain else again, carried, [*results[len(initial) :], *rows]

    return iterate


def _gathered(
    importer: Importer, node: onnx.NodeProto, graph: onnx.GraphProto, carried: Sequence[Value]
) -> list[_Gathered]:
    """The sequences that a Loop gathers, in the order of the carried values."""
    gathered = []
    for place, value in enumerate(carried):
        before, after = graph.input[2 + place].name, graph.output[1 + place].name
        readers = [inner for inner in nodes_of(graph) if before in inner.input]
        uses = [inner for inner in nodes_of(importer.graph) if node.output[place] in inner.input]
        if not isinstance(value.expr, relax.Tuple) or len(value.expr.fields) or len(readers) != 1:
            continue
        if readers[0].op_type != "SequenceInsert" or len(readers[0].input) != 2 or readers[0].output[0] != after:
            continue
        forms = {_concatenation(use) for use in uses}
        form = forms.pop() if len(forms) == 1 else None
        if form is not None:
            gathered.append(_Gathered(place, readers[0].input[1], *form))
    return gathered


def _concatenation(node: onnx.NodeProto) -> tuple[int, bool] | None:
    """The axis of a ConcatFromSequence, and whether it is a new one; None for other operators."""
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    is_new = bool(attributes.get("new_axis", 0))
    return (attributes.get("axis", 0), is_new) if node.op_type == "ConcatFromSequence" else None


def _limit(importer: Importer, count: Value) -> Any:
    """The most iterations: a size where it is known at import, else a tensor; None where there is no limit."""
    elements = importer.elements(count)
    if elements is not None:
        limit = int(elements.reshape(-1)[0])
        return None if limit > LARGEST_SIZE else max(limit, 0)
    if count.sizes is not None and tvm.ir.is_prim_expr(size := count.sizes.elements.reshape(-1)[0]):
        return size
    return importer.bb.emit(relax.op.reshape(importer.tensor(count), ()))


def convert_scan(importer: Importer, node: onnx.NodeProto) -> bool:
    """Import Scan; return whether the nodes of its iterations took its place.

    They do where the number of iterations is known at import and all together have few nodes. Otherwise the body
    becomes functions that the model calls. Raises UnsupportedFormError for the form of opset 8, which has a batch
    dimension, and for a carried value whose type or rank changes. Raises FreeSizeError for scanned inputs of unknown
    shape.
    """
    graph = graph_of(node, "body")
    if len(graph.input) != len(node.input):
        raise UnsupportedFormError("the form of opset 8, with a batch dimension")
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    scanned = int(attributes["num_scan_inputs"])
    carried, stacks = len(node.input) - scanned, len(graph.output) - len(node.input) + scanned
    operands = [importer.value(name) for name in node.input]
    tensors = [importer.tensor(value) for value in operands[carried:]]
    backwards = attributes.get("scan_input_directions", [0] * scanned)
    shapes = [dims_of(tensor) for tensor in tensors]
    if any(shape is None for shape in shapes):
        raise FreeSizeError("inputs of unknown shape")
    axes = [
        axis % len(shape or ())
        for axis, shape in zip(attributes.get("scan_input_axes", [0] * scanned), shapes, strict=True)
    ]
    length = (shapes[0] or [])[axes[0]]
    scans = {name.name: place for place, name in enumerate(graph.input[carried:])}
    rows = {name: node.input[carried + place] for name, place in scans.items() if axes[place] == 0}
    products = hoist_products(importer, graph, rows, {})
    graph = with_rows_as_inputs(graph, products)
    places = [*range(scanned), *(scans[item.row] for item in products)]
    tensors += [importer.tensor(importer.value(item.rows)) for item in products]
    axes, backwards = [axes[place] for place in places], [backwards[place] for place in places]

    def iterate(index: relax.Expr, values: Sequence[Value]) -> tuple[Value | None, list[Value], list[Value]]:
        slices = []
        for tensor, axis, is_reversed in zip(tensors, axes, backwards, strict=True):
            place = index
            if is_reversed:
                last = as_tensor(importer, importer.evaluator.add(length, -1))
                place = importer.bb.emit(relax.op.subtract(last, index))
            slices.append(Value(importer.bb.emit(relax.op.take(tensor, place, axis))))
        with importer.scope():
            results = importer.import_graph(graph, [*values, *slices])
        return None, results[:carried], results[carried:]

    loop = _Loop(
        length, None, operands[:carried], len(list(nodes_of(graph))), any(map(has_graphs, graph.node)), iterate,
        attributes.get("scan_output_axes", [0] * stacks),
        [bool(item) for item in attributes.get("scan_output_directions", [0] * stacks)],
        [False] * stacks,
    )  # fmt: skip
    values, is_in_place = _import(importer, loop, loop)
    set_results(importer, node, values)
    return is_in_place


def _import(importer: Importer, loop: _Loop, function: _Loop) -> tuple[list[Value], bool]:
    """Import `loop` in place of its node, or `function`, another form of it, as functions.

    Returns the results, and whether they are those of `loop`. Raises what the import of the functions raises.
    """
    is_run_directly = not function.has_graphs and not any(function.is_joined)
    if is_run_directly and loop.has_at_most(_MOST_NODES) and not loop.has_at_most(_FEW_NODES):
        undo = importer.checkpoint()
        try:
            return list(map(Value, _run(importer, replace(function, keeps_sizes=True)))), False
        except (_SizeChangesError, FreeSizeError, UnsupportedFormError):
            undo()
    values = _unroll(importer, loop)
    if values is not None:
        return values, True
    return list(map(Value, _run(importer, function))), False


def _unroll(importer: Importer, loop: _Loop) -> list[Value] | None:
    """Import the iterations one after the other; None where they are many, or their number is not known at import."""
    most = _MOST_NODES // max(loop.nodes, 1)
    is_limited = isinstance(loop.limit, int)
    if loop.condition is not None or (loop.limit > most if is_limited else loop.limit is not None):
        return None
    undo = importer.checkpoint()
    carried, rows = list(loop.initial), []
    for trip in range(loop.limit if is_limited else most):
        again, carried, row = loop.iterate(const(np.array(trip, "int64")), carried)
        rows.append([importer.tensor(value) for value in row])
        if again is not None and importer.elements(again) is not None:
            break
        if again is not None:
            undo()
            return None
    else:
        if not is_limited:
            undo()
            return None
    if loop.axes and not rows:
        return None
    stacks = []
    for place, (axis, is_reversed) in enumerate(zip(loop.axes, loop.is_reversed, strict=True)):
        column = [importer.bb.emit(relax.op.expand_dims(row[place], axis)) for row in rows]
        stacks.append(Value(importer.bb.emit(relax.op.concat(column[::-1] if is_reversed else column, axis))))
    return [*carried, *stacks]


def _run(importer: Importer, loop: _Loop) -> list[relax.Expr]:
    """Import a loop as functions; return the carried values after the last iteration, and the stacked values."""
    name, scope = importer.unique_name("loop"), importer.evaluator.symbols()
    initial = [importer.tensor(value) for value in loop.initial]
    step, carried, is_counted = _outline_step(importer, loop, name, scope, initial)
    trips = _trips(importer, loop) if is_counted else None
    starts = _starts(importer, loop, trips)
    if isinstance(trips, tirx.Var) and not any(trips.same_as(symbol) for symbol in scope):
        scope = [*scope, trips]
    part = _outline_part(importer, f"{name}_part", scope, step, carried, loop.is_reversed)
    whole = _outline_whole(importer, name, scope, part, _Trips(trips, starts), carried, loop)
    results = call(importer, whole, initial)
    stacks = []
    for value, axis in zip(results[len(carried) :], loop.axes, strict=True):
        order = list(range(1, int(value.ty.ndim)))
        order.insert(axis % int(value.ty.ndim), 0)
        stacks.append(value if axis == 0 else importer.bb.emit(relax.op.permute_dims(value, order)))
    return [*results[: len(carried)], *stacks]


@dataclass(frozen=True)
class _Trips:
    """The number of iterations of a loop: `count` is that number, a size, or None where a condition ends the loop.

    `starts` says whether there is a first iteration; None where that is certain.
    """

    count: Any
    starts: relax.Expr | None


def _trips(importer: Importer, loop: _Loop) -> Any:
    """The number of iterations of a loop that no condition ends, as a size.

    It is None where nothing ends the loop, and where only a run knows the number, which nothing but stacks needs.
    """
    if loop.limit is None:
        return None
    if loop.condition is None and is_size(loop.limit):
        return loop.limit
    if all(loop.is_joined):
        return None
    count = greatest(importer, loop.limit, 0)
    if loop.condition is not None:
        count = importer.bb.emit(
            relax.op.where(scalar(importer, loop.condition), as_tensor(importer, count), const(np.array(0, "int64")))
        )
    if is_size(count):
        return count
    vector = importer.bb.emit(relax.op.reshape(count, (1,)))
    return bind_sizes(importer.bb, importer.evaluator, vector, [None])[0]


def _starts(importer: Importer, loop: _Loop, trips: Any) -> relax.Expr | None:
    """Whether a loop of `trips` iterations has a first one; None where that is certain."""
    zero = const(np.array(0, "int64"))
    if trips is not None:
        is_certain = importer.evaluator.holds(trips >= 1)
        return None if is_certain else importer.bb.emit(relax.op.less(zero, as_tensor(importer, trips)))
    conditions = []
    if loop.limit is not None and not (is_static(loop.limit) and int(loop.limit) > 0):
        conditions.append(importer.bb.emit(relax.op.less(zero, as_tensor(importer, loop.limit))))
    if loop.condition is not None:
        conditions.append(scalar(importer, loop.condition))
    return _all(importer, conditions)


def _all(importer: Importer, conditions: Sequence[relax.Expr]) -> relax.Expr | None:
    """Whether all of at most two conditions hold; None without any."""
    if len(conditions) > 1:
        return importer.bb.emit(relax.op.logical_and(*conditions))
    return conditions[0] if conditions else None


def _outline_whole(
    importer: Importer,
    name: str,
    scope: Sequence[tirx.Var],
    part: Function,
    trips: _Trips,
    carried: Sequence[relax.Var],
    loop: _Loop,
) -> Function:
    """Make the function of a loop, which takes the initial values, and returns the carried values and the stacks.

    Its attribute `LOOP` says what `passes.loops` needs to know.
    """
    count = _FIRST + len(carried)
    initial = [relax.Var(str(item.name), item.ty) for item in carried]
    # The stacks' lengths are known to a loop that is counted, unless an iteration adds any number of rows.
    stacks = [
        replace(item, dims=(None if is_joined else trips.count, *item.dims[1:]))
        for item, is_joined in zip(part.results[count:], loop.is_joined, strict=True)
    ]
    results = [*part.results[_FIRST:count], *stacks]

    def body() -> relax.Expr:
        zero = const(np.array(0, "int64"))
        # Of a size, TVM keeps the parameter by which the function knows it.
        limit = loop.limit if trips.count is None else trips.count
        limit = None if limit is None else as_tensor(importer, limit)
        first = [_level(importer, limit), zero, *initial]
        values = (
            importer.bb.emit(part.call(first))
            if trips.starts is None
            else decide(importer, trips.starts, part.call(first), none.call(initial))
        )
        fields = [importer.bb.emit(relax.TupleGetItem(values, place)) for place in range(len(part.results))]
        return relax.Tuple(
            [shaped(importer, field, item.dims) for field, item in zip(fields[_FIRST:], results, strict=True)]
        )

    def no_iteration() -> relax.Expr:
        shapes = [[0, *(0 if dim is None else dim for dim in item.dims[1:])] for item in stacks]
        zeros = [
            importer.bb.emit(relax.op.zeros(relax.ShapeExpr(shape), item.dtype))
            for shape, item in zip(shapes, stacks, strict=True)
        ]
        return relax.Tuple([const(np.array(0, "int64")), const(np.array(False)), *initial, *zeros])

    if trips.starts is not None:
        none = outline(importer, f"{name}_none", initial, scope, no_iteration)
    description = LoopDescription(
        step=f"{name}_step",
        part=str(part.variable.name_hint),
        index=f"{name}_index",
        carried=tuple(str(item.name) for item in carried),
        is_counted=trips.count is not None,
        is_reversed=tuple(loop.is_reversed),
        is_joined=tuple(loop.is_joined),
    )
    return outline(importer, name, initial, scope, body, results, attributes={LOOP: description.text()})


def _axis_first(importer: Importer, value: relax.Expr, axis: int) -> relax.Expr:
    """A tensor with one of its axes, or the last but some, before the others."""
    order = list(range(int(value.ty.ndim)))
    order.insert(0, order.pop(axis))
    return value if order[0] == 0 else importer.bb.emit(relax.op.permute_dims(value, order))


# The results of the functions of a loop are the next iteration's number, whether there is one, and others from here on.
_FIRST = 2


def _outline_step(
    importer: Importer, loop: _Loop, name: str, scope: Sequence[tirx.Var], initial: Sequence[relax.Expr]
) -> tuple[Function, list[relax.Var], bool]:
    """Make the function of an iteration; return it, its parameters for carried values, and whether all are certain.

    Dimensions that an iteration changes become symbols: the body is imported again until no other one changes.
    """
    types = [type_of(importer, value, scope) for value in initial]
    index = relax.Var(f"{name}_index", relax.TensorType([], "int64"))
    while True:
        undo = importer.checkpoint()
        carried = [
            relax.Var(f"{name}_carried_{place}", item.with_symbols(importer)) for place, item in enumerate(types)
        ]
        is_counted = True

        def build(carried: Sequence[relax.Var] = carried) -> relax.Expr:
            nonlocal is_counted
            again, values, rows = loop.iterate(index, [Value(variable) for variable in carried])
            following = importer.bb.emit(relax.op.add(index, const(np.array(1, "int64"))))
            conditions = []
            if loop.limit is not None:
                conditions.append(importer.bb.emit(relax.op.less(following, as_tensor(importer, loop.limit))))
            if again is not None:
                is_counted = False
                conditions.append(scalar(importer, again))
            condition = _all(importer, conditions)
            stacks = [
                _axis_first(importer, importer.tensor(row), axis) if is_joined
                else importer.bb.emit(relax.op.expand_dims(importer.tensor(row), 0))
                for row, axis, is_joined in zip(rows, loop.axes, loop.is_joined, strict=True)
            ]  # fmt: skip
            again = const(np.array(True)) if condition is None else condition
            return relax.Tuple([following, again, *map(importer.tensor, values), *stacks])

        step = outline(importer, f"{name}_step", [index, *carried], scope, build)
        after = step.results[_FIRST : _FIRST + len(types)]
        if any(a.dtype != b.dtype or len(a.dims) != len(b.dims) for a, b in zip(types, after, strict=True)):
            raise UnsupportedFormError("a carried value whose type or number of dimensions changes")
        wider = [either(importer, *pair) for pair in zip(types, after, strict=True)]
        if wider == types:
            return step, carried, is_counted
        if loop.keeps_sizes:
            raise _SizeChangesError
        types = wider
        undo()


def _outline_part(
    importer: Importer,
    name: str,
    scope: Sequence[tirx.Var],
    step: Function,
    carried: Sequence[relax.Var],
    is_reversed: Sequence[bool],
) -> Function:
    """Make the function that runs up to two to the power of its first parameter iterations, at least one."""
    count = _FIRST + len(carried)
    level, index = (relax.Var(label, relax.TensorType([], "int64")) for label in ("level", "index"))
    results = (*step.results[:count], *(Type((None, *item.dims[1:]), item.dtype) for item in step.results[count:]))
    whole = replace(step, variable=tvm.ir.GlobalVar(name), results=results)
    whole.declare([level, index, *carried])
    firsts = [relax.Var(f"stack_{place}", item.with_symbols(importer)) for place, item in enumerate(results[count:])]

    def both() -> relax.Expr:
        second = call(importer, whole, [level, index, *carried])
        stacks = []
        for one, other, backwards in zip(firsts, second[count:], is_reversed, strict=True):
            like_first = shaped(importer, other, [None, *(dims_of(one) or ())[1:]])
            pair = [like_first, one] if backwards else [one, like_first]
            stacks.append(importer.bb.emit(relax.op.concat(pair, 0)))
        return relax.Tuple([*second[:count], *stacks])

    def halves() -> relax.Expr:
        lower = importer.bb.emit(relax.op.subtract(level, const(np.array(1, "int64"))))
        first = importer.bb.emit(whole.call([lower, index, *carried]))
        fields = [importer.bb.emit(relax.TupleGetItem(first, place)) for place in range(len(results))]
        return decide(importer, fields[1], rest.call([lower, fields[0], *fields[_FIRST:]]), first)

    def repeat() -> relax.Expr:
        is_last = importer.bb.emit(relax.op.equal(level, const(np.array(0, "int64"))))
        return decide(importer, is_last, step.call([index, *carried]), more.call([level, index, *carried]))

    rest = outline(importer, f"{name}_rest", [level, index, *carried, *firsts], scope, both)
    more = outline(importer, f"{name}_halves", [level, index, *carried], scope, halves, results)
    return outline(importer, name, [level, index, *carried], scope, repeat, results, whole)


def _level(importer: Importer, limit: relax.Expr | None) -> relax.Expr:
    """The least power of two that is no smaller than a number of iterations, as its exponent."""
    if limit is None:
        return const(np.array(_LEVELS, "int64"))
    smaller = importer.bb.emit(relax.op.less(const(2 ** np.arange(_LEVELS, dtype="int64")), limit))
    return importer.bb.emit(relax.op.sum(importer.bb.emit(relax.op.astype(smaller, "int64"))))
