"""Control flow: If, Loop and Scan, and the sequences that a Loop gathers.

The branch of a condition that is known at import, and a loop of few iterations, are imported in place of their node.
What is decided when the model runs becomes functions of the module, which the virtual machine calls: one for each
branch, one for an iteration. A loop calls itself for one half of its iterations, then for the other: a loop of a
million iterations is twenty calls deep, and no call holds more than one set of the values that the loop carries.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import onnx
import tvm
from tvm import relax, tirx

from tvmflow.compiler.onnx.broadcasting import cast_to
from tvmflow.compiler.onnx.node import FreeSizeError, UnsupportedFormError
from tvmflow.compiler.onnx.sizes import LARGEST_SIZE, SizeEvaluator, Sizes, materialise
from tvmflow.compiler.onnx.values import Array, const, dims_of, dtype_of, is_static
from tvmflow.onnx_graph import nodes_of

# A loop is imported in place if all of its iterations together have no more nodes, as many as a large network has.
# They take a few seconds to build, and a fraction of the time of a loop, which the virtual machine runs.
_MOST_NODES = 1024
# Loops have no more iterations than two to this power.
_LEVELS = 40


@dataclass(frozen=True)
class Value:
    """A value of the graph: a tensor, a shape or a tuple of tensors.

    `sizes` are its elements, some perhaps symbolic, where they are known at import; else None.
    """

    expr: relax.Expr
    sizes: Sizes | None = None


class Importer(Protocol):
    """The part of the importer that control flow uses. Names are those of the graph's values."""

    bb: relax.BlockBuilder
    evaluator: SizeEvaluator
    graph: onnx.GraphProto

    def value(self, name: str) -> Value:
        """Return the value of this name."""

    def has_value(self, name: str) -> bool:
        """Return whether a value has this name."""

    def set_value(self, name: str, value: Value) -> None:
        """Make `value` the value of this name."""

    def set_concatenated(self, name: str, value: Value) -> None:
        """Give the name of a sequence to the tensor that its concatenation will be."""

    def tensor(self, value: Value) -> relax.Expr:
        """Return a value as a tensor."""

    def elements(self, value: Value) -> Array | None:
        """Return the elements of a value that are known at import; None for others."""

    def equal_sizes(self, name: str) -> tuple[Any, Any] | None:
        """Return the two sizes that the boolean value `name` compares for equality; None for other values."""

    def scope(self) -> AbstractContextManager[None]:
        """Return a context manager at whose end the importer forgets all names that were set within it."""

    def import_graph(self, graph: onnx.GraphProto, inputs: Sequence[Value]) -> list[Value]:
        """Import the nodes of an inner graph, whose inputs get the values `inputs`; return its outputs."""

    def checkpoint(self) -> Callable[[], None]:
        """Return a function that makes the importer undo all nodes and functions added after this call."""

    def add_function(self, variable: tvm.ir.GlobalVar, function: relax.Function) -> None:
        """Add a function to the module under this variable."""

    def unique_name(self, name: str) -> str:
        """Return `name` with a suffix, so that no function of the module has it."""


# -- If ----------------------------------------------------------------------------------------------------------------


def convert_if(importer: Importer, node: onnx.NodeProto) -> bool:
    """Import If; return whether the nodes of one branch took its place.

    They do for a condition that is known at import. They also do if the results of the branches have different ranks
    and the condition compares two sizes: the `then` branch is imported, and the model checks when it runs that the
    sizes are equal. Otherwise each branch becomes a function, and the model calls one of them. Raises FreeSizeError for
    other branches whose results have different ranks, and UnsupportedFormError for results of different types.
    """
    then_graph, else_graph = (_graph(node, name) for name in ("then_branch", "else_branch"))
    condition = importer.value(node.input[0])
    elements = importer.elements(condition)
    if elements is not None:
        with importer.scope():
            values = importer.import_graph(then_graph if elements.reshape(-1)[0] else else_graph, [])
        _set_results(importer, node, values)
        return True
    undo, scope, name = importer.checkpoint(), importer.evaluator.symbols(), importer.unique_name("if")
    equality = importer.equal_sizes(node.input[0])

    def import_then() -> list[Value]:
        with importer.scope():
            _make_equal(importer, then_graph, equality)
            return importer.import_graph(then_graph, [])

    def import_else() -> list[Value]:
        with importer.scope():
            return importer.import_graph(else_graph, [])

    with importer.evaluator.one_of_two() as end_half:
        branches = [_outline(importer, f"{name}_then", [], scope, lambda: _tensors(importer, import_then()))]
        end_half()
        branches.append(_outline(importer, f"{name}_else", [], scope, lambda: _tensors(importer, import_else())))
    pairs = list(zip(branches[0].results, branches[1].results, strict=True))
    if any(len(one.dims) != len(other.dims) for one, other in pairs):
        undo()
        with importer.scope():
            # Exporters remove a dimension that may be one; the rest of a model takes one number of dimensions only.
            if not _make_equal(importer, then_graph, equality):
                raise FreeSizeError("branches whose results have different numbers of dimensions")
            values = importer.import_graph(then_graph, [])
        _set_results(importer, node, values)
        return True
    if any(one.dtype != other.dtype for one, other in pairs):
        raise UnsupportedFormError("branches whose results have different types")
    results = [_either(importer, *pair) for pair in pairs]
    calls = [branch.call([]) for branch in branches]
    choice = _outline_choice(importer, name, scope, _scalar(importer, condition), calls, results)
    _set_results(importer, node, map(Value, _call(importer, choice, [])))
    return False


def _set_results(importer: Importer, node: onnx.NodeProto, values: Iterable[Value]) -> None:
    for name, value in zip(node.output, values, strict=False):
        importer.set_value(name, value)


def _outline_choice(
    importer: Importer,
    name: str,
    scope: Sequence[tirx.Var],
    condition: relax.Expr,
    calls: Sequence[relax.Call],
    results: Sequence["_Type"],
) -> "_Function":
    """Make the function that does one of two calls."""
    return _outline(importer, name, [], scope, lambda: _decide(importer, condition, *calls), results)


def _decide(importer: Importer, condition: relax.Expr, one: relax.Expr, other: relax.Expr) -> relax.Expr:
    return importer.bb.emit(relax.If(condition, relax.SeqExpr([], one), relax.SeqExpr([], other)))


def _make_equal(importer: Importer, graph: onnx.GraphProto, equality: tuple[Any, Any] | None) -> bool:
    """Give tensors that a graph reads one of two equal sizes for the other; return whether one has that dimension.

    That the sizes are equal is checked when the model runs.
    """
    size, target = equality or (None, None)
    if is_static(size):
        size, target = target, size
    has_any = False
    for name in sorted({name for node in nodes_of(graph) for name in node.input if importer.has_value(name)}):
        expr = importer.value(name).expr
        dims = dims_of(expr) or []
        equal = [size is not None and importer.evaluator.are_equal(dim, size) for dim in dims]
        if any(equal):
            dims = [target if is_equal else dim for dim, is_equal in zip(dims, equal, strict=True)]
            importer.set_value(name, Value(cast_to(importer.bb, expr, dims)))
            has_any = True
    return has_any


# -- Loop and Scan -----------------------------------------------------------------------------------------------------

# Takes the number of an iteration and the carried values; returns whether there is another iteration, None where that
# is certain, the carried values, and those to stack.
_Iterate = Callable[[relax.Expr, Sequence[Value]], tuple[Value | None, list[Value], list[Value]]]


@dataclass(frozen=True)
class _Loop:
    """A Loop or a Scan.

    `limit` is the most iterations, a size or a tensor; None without a limit. `condition` says whether there is a first
    iteration, None where that is certain. `initial` are the values to carry. `nodes` counts those of an iteration,
    which `iterate` imports. Values of all iterations are stacked along `axes`, the last first where `is_reversed`, or
    concatenated along these axes where `is_joined`.
    """

    limit: Any
    condition: Value | None
    initial: Sequence[Value]
    nodes: int
    iterate: _Iterate
    axes: Sequence[int]
    is_reversed: Sequence[bool]
    is_joined: Sequence[bool]


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

    They do where the number of iterations is known at import and all together have at most 256 nodes. Otherwise the
    body becomes functions that the model calls, and a sequence that the iterations fill and the model concatenates
    becomes a stack. Raises UnsupportedFormError for other sequences, and for a carried value whose type or rank
    changes.
    """
    graph = _graph(node, "body")
    count, condition, *initial = (importer.value(name) if name else None for name in node.input)
    carried = [value for value in initial if value is not None]
    limit = None if count is None else _limit(importer, count)
    elements = None if condition is None else importer.elements(condition)
    if elements is not None:
        condition = None
        limit = limit if elements.reshape(-1)[0] else 0

    stacks = len(graph.output) - 1 - len(carried)
    loop = _Loop(
        limit, condition, carried, len(list(nodes_of(graph))), _iterating(importer, graph, carried, [], set()),
        [0] * stacks, [False] * stacks, [False] * stacks,
    )  # fmt: skip
    values = _unroll(importer, loop)
    if values is not None:
        _set_results(importer, node, values)
        return True
    gathered = _gathered(importer, node, graph, carried)
    constant = _constant(graph, len(carried))
    places = {item.place for item in gathered} | constant
    loop = replace(
        loop,
        initial=[value for place, value in enumerate(carried) if place not in places],
        iterate=_iterating(importer, graph, carried, gathered, constant),
        axes=[*loop.axes, *(item.axis for item in gathered)],
        is_reversed=[*loop.is_reversed, *(False for _ in gathered)],
        is_joined=[*loop.is_joined, *(not item.is_new for item in gathered)],
    )
    results = list(map(Value, _run(importer, loop)))
    own, sequences = results[: len(results) - len(gathered)], results[len(results) - len(gathered) :]
    names = [name for place, name in enumerate(node.output) if place not in places]
    for name, value in zip(names, own, strict=False):
        importer.set_value(name, value)
    for item, value in zip(gathered, sequences, strict=True):
        importer.set_concatenated(node.output[item.place], value)
    for place in constant & set(range(len(node.output))):
        importer.set_value(node.output[place], carried[place])
    return False


def _constant(graph: onnx.GraphProto, count: int) -> set[int]:
    """The places of those of `count` carried values that every iteration of a Loop passes on as they are.

    tf2onnx carries the weights of a recurrent layer in this way.
    """
    sources = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Identity"}
    places = set()
    for place in range(count):
        name = graph.output[1 + place].name
        while name in sources:
            name = sources[name]
        if name == graph.input[2 + place].name:
            places.add(place)
    return places


def _iterating(
    importer: Importer,
    graph: onnx.GraphProto,
    initial: Sequence[Value],
    gathered: Sequence[_Gathered],
    constant: set[int],
) -> _Iterate:
    """What imports an iteration of a Loop, whose stacks end with the tensors that it adds to sequences.

    `constant` are the places of the `initial` values that stay as they are.
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
        is_certain = holds is not None and bool(holds.reshape(-1)[0])
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

    They do where the number of iterations is known at import and all together have at most 256 nodes. Otherwise the
    body becomes functions that the model calls. Raises UnsupportedFormError for the form of opset 8, which has a batch
    dimension, and for a carried value whose type or rank changes. Raises FreeSizeError for scanned inputs of unknown
    shape.
    """
    graph = _graph(node, "body")
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

    def iterate(index: relax.Expr, values: Sequence[Value]) -> tuple[Value | None, list[Value], list[Value]]:
        slices = []
        for tensor, axis, is_reversed in zip(tensors, axes, backwards, strict=True):
            place = index
            if is_reversed:
                last = _size_tensor(importer, importer.evaluator.add(length, -1))
                place = importer.bb.emit(relax.op.subtract(last, index))
            slices.append(Value(importer.bb.emit(relax.op.take(tensor, place, axis))))
        with importer.scope():
            results = importer.import_graph(graph, [*values, *slices])
        return None, results[:carried], results[carried:]

    loop = _Loop(
        length, None, operands[:carried], len(list(nodes_of(graph))), iterate,
        attributes.get("scan_output_axes", [0] * stacks),
        [bool(item) for item in attributes.get("scan_output_directions", [0] * stacks)],
        [False] * stacks,
    )  # fmt: skip
    values = _unroll(importer, loop)
    _set_results(importer, node, map(Value, _run(importer, loop)) if values is None else values)
    return values is not None


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
    step, carried, is_counted = _outline_step(importer, loop, f"{name}_step", scope, initial)
    count = _FIRST + len(carried)
    whole = _outline_repetition(importer, name, scope, step, carried, loop.is_reversed)
    zero = const(np.array(0, "int64"))
    limit = None if loop.limit is None else _size_tensor(importer, loop.limit)
    first = [_level(importer, limit), zero, *initial]
    if loop.condition is None and (loop.limit is None or (isinstance(loop.limit, int) and loop.limit)):
        results = _call(importer, whole, first)
    else:
        starts = const(np.array(True)) if limit is None else importer.bb.emit(relax.op.less(zero, limit))
        if loop.condition is not None:
            starts = importer.bb.emit(relax.op.logical_and(starts, _scalar(importer, loop.condition)))

        def none() -> relax.Expr:
            shapes = [[0, *(0 if dim is None else dim for dim in item.dims[1:])] for item in whole.results[count:]]
            kinds = [item.dtype for item in whole.results[count:]]
            stacks = [
                importer.bb.emit(relax.op.zeros(relax.ShapeExpr(shape), dtype))
                for shape, dtype in zip(shapes, kinds, strict=True)
            ]
            return relax.Tuple([zero, const(np.array(False)), *initial, *stacks])

        calls = [whole.call(first), _outline(importer, f"{name}_none", [], scope, none).call([])]
        results = _call(importer, _outline_choice(importer, f"{name}_if", scope, starts, calls, whole.results), [])
    stacks = []
    for value, axis, is_joined, item in zip(
        results[count:], loop.axes, loop.is_joined, whole.results[count:], strict=True
    ):
        if is_counted and not is_joined and not isinstance(loop.limit, relax.Var):
            value = _shaped(importer, value, [loop.limit, *item.dims[1:]])
        order = list(range(1, len(item.dims)))
        order.insert(axis % len(item.dims), 0)
        stacks.append(value if axis == 0 else importer.bb.emit(relax.op.permute_dims(value, order)))
    return [*results[_FIRST:count], *stacks]


def _axis_first(importer: Importer, value: relax.Expr, axis: int) -> relax.Expr:
    """A tensor with one of its axes, or the last but some, before the others."""
    order = list(range(int(value.ty.ndim)))
    order.insert(0, order.pop(axis))
    return value if order[0] == 0 else importer.bb.emit(relax.op.permute_dims(value, order))


# The results of the functions of a loop are the next iteration's number, whether there is one, and others from here on.
_FIRST = 2


def _outline_step(
    importer: Importer, loop: _Loop, name: str, scope: Sequence[tirx.Var], initial: Sequence[relax.Expr]
) -> tuple["_Function", list[relax.Var], bool]:
    """Make the function of an iteration; return it, its parameters for carried values, and whether all are certain.

    Dimensions that an iteration changes become symbols: the body is imported again until no other one changes.
    """
    types = [_type_of(importer, value, scope) for value in initial]
    index = relax.Var("index", relax.TensorType([], "int64"))
    while True:
        undo = importer.checkpoint()
        carried = [relax.Var(f"carried_{place}", item.with_symbols(importer)) for place, item in enumerate(types)]
        is_counted = True

        def build(carried: Sequence[relax.Var] = carried) -> relax.Expr:
            nonlocal is_counted
            again, values, rows = loop.iterate(index, [Value(variable) for variable in carried])
            following = importer.bb.emit(relax.op.add(index, const(np.array(1, "int64"))))
            conditions = []
            if loop.limit is not None:
                conditions.append(importer.bb.emit(relax.op.less(following, _size_tensor(importer, loop.limit))))
            if again is not None:
                is_counted = False
                conditions.append(_scalar(importer, again))
            condition = const(np.array(True))
            if conditions:
                condition = conditions[0]
            if len(conditions) > 1:
                condition = importer.bb.emit(relax.op.logical_and(*conditions))
            stacks = [
                _axis_first(importer, importer.tensor(row), axis) if is_joined
                else importer.bb.emit(relax.op.expand_dims(importer.tensor(row), 0))
                for row, axis, is_joined in zip(rows, loop.axes, loop.is_joined, strict=True)
            ]  # fmt: skip
            return relax.Tuple([following, condition, *map(importer.tensor, values), *stacks])

        step = _outline(importer, name, [index, *carried], scope, build)
        after = step.results[_FIRST : _FIRST + len(types)]
        if any(a.dtype != b.dtype or len(a.dims) != len(b.dims) for a, b in zip(types, after, strict=True)):
            raise UnsupportedFormError("a carried value whose type or number of dimensions changes")
        wider = [_either(importer, *pair) for pair in zip(types, after, strict=True)]
        if wider == types:
            return step, carried, is_counted
        types = wider
        undo()


def _outline_repetition(
    importer: Importer,
    name: str,
    scope: Sequence[tirx.Var],
    step: "_Function",
    carried: Sequence[relax.Var],
    is_reversed: Sequence[bool],
) -> "_Function":
    """Make the function that runs up to two to the power of its first parameter iterations, at least one."""
    count = _FIRST + len(carried)
    level, index = (relax.Var(label, relax.TensorType([], "int64")) for label in ("level", "index"))
    results = (*step.results[:count], *(_Type((None, *item.dims[1:]), item.dtype) for item in step.results[count:]))
    whole = replace(step, variable=tvm.ir.GlobalVar(name), results=results)
    whole.declare([level, index, *carried])
    firsts = [relax.Var(f"stack_{place}", item.with_symbols(importer)) for place, item in enumerate(results[count:])]

    def both() -> relax.Expr:
        second = _call(importer, whole, [level, index, *carried])
        stacks = []
        for one, other, backwards in zip(firsts, second[count:], is_reversed, strict=True):
            like_first = _shaped(importer, other, [None, *(dims_of(one) or ())[1:]])
            pair = [like_first, one] if backwards else [one, like_first]
            stacks.append(importer.bb.emit(relax.op.concat(pair, 0)))
        return relax.Tuple([*second[:count], *stacks])

    def halves() -> relax.Expr:
        lower = importer.bb.emit(relax.op.subtract(level, const(np.array(1, "int64"))))
        first = importer.bb.emit(whole.call([lower, index, *carried]))
        fields = [importer.bb.emit(relax.TupleGetItem(first, place)) for place in range(len(results))]
        return _decide(importer, fields[1], rest.call([lower, fields[0], *fields[_FIRST:]]), first)

    def repeat() -> relax.Expr:
        is_last = importer.bb.emit(relax.op.equal(level, const(np.array(0, "int64"))))
        return _decide(importer, is_last, step.call([index, *carried]), more.call([level, index, *carried]))

    rest = _outline(importer, f"{name}_rest", [level, index, *carried, *firsts], scope, both)
    more = _outline(importer, f"{name}_halves", [level, index, *carried], scope, halves, results)
    return _outline(importer, name, [level, index, *carried], scope, repeat, results, whole)


def _level(importer: Importer, limit: relax.Expr | None) -> relax.Expr:
    """The least power of two that is no smaller than a number of iterations, as its exponent."""
    if limit is None:
        return const(np.array(_LEVELS, "int64"))
    smaller = importer.bb.emit(relax.op.less(const(2 ** np.arange(_LEVELS, dtype="int64")), limit))
    return importer.bb.emit(relax.op.sum(importer.bb.emit(relax.op.astype(smaller, "int64"))))


def _size_tensor(importer: Importer, size: Any) -> relax.Expr:
    """A size, or a tensor that holds one, as a tensor without dimensions."""
    if is_static(size):
        return const(np.array(int(size), "int64"))
    return materialise(importer.bb, importer.evaluator.shape([size]), ()) if tvm.ir.is_prim_expr(size) else size


def _tensors(importer: Importer, values: Iterable[Value]) -> relax.Tuple:
    return relax.Tuple([importer.tensor(value) for value in values])


def _scalar(importer: Importer, value: Value) -> relax.Expr:
    """A tensor of one element without its dimensions."""
    tensor = importer.tensor(value)
    return tensor if dims_of(tensor) == [] else importer.bb.emit(relax.op.reshape(tensor, ()))


# -- Functions of the module -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Type:
    """A tensor's type; a dimension is None where only a run knows it."""

    dims: tuple[Any, ...]
    dtype: str

    @property
    def relax_type(self) -> relax.TensorType:
        if any(dim is None for dim in self.dims):
            return relax.TensorType(ndim=len(self.dims), dtype=self.dtype)
        return relax.TensorType(list(self.dims), self.dtype)

    def with_symbols(self, importer: Importer) -> relax.TensorType:
        """Return the type with a new symbol for each dimension that is known only when the model runs."""
        return relax.TensorType(_with_symbols(importer, self.dims), self.dtype)


@dataclass(frozen=True)
class _Function:
    """A function of the module, which returns a tuple of tensors.

    It takes the sizes `symbols`, where there are any, its own parameters, and the values `captured` of the graphs
    around it.
    """

    variable: tvm.ir.GlobalVar
    symbols: tuple[tirx.Var, ...]
    captured: tuple[relax.Var, ...]
    results: tuple[_Type, ...]

    def call(self, arguments: Sequence[relax.Expr]) -> relax.Call:
        """Return a call of the function with these arguments for its own parameters."""
        sizes = [relax.ShapeExpr(self.symbols)] if self.symbols else []
        return relax.Call(self.variable, [*sizes, *arguments, *self.captured])

    def declare(self, parameters: Sequence[relax.Var]) -> None:
        """Give the function's variable its type, so that the function may call itself."""
        sizes = [relax.ShapeType(self.symbols)] if self.symbols else []
        types = [*sizes, *(parameter.ty for parameter in (*parameters, *self.captured))]
        relax.expr._update_type(self.variable, relax.FuncType(types, _tuple_type(self.results), True))


def _tuple_type(results: Sequence[_Type]) -> relax.TupleType:
    return relax.TupleType([item.relax_type for item in results])


def _outline(
    importer: Importer,
    name: str,
    parameters: Sequence[relax.Var],
    scope: Sequence[tirx.Var],
    build: Callable[[], relax.Expr],
    results: Sequence[_Type] | None = None,
    signature: _Function | None = None,
) -> _Function:
    """Add a function to the module, whose body `build` emits; the values of other graphs in it become parameters.

    `build` returns a tuple of tensors, or, where `results` says their types, any expression of such a type: the body
    may decide between calls. `scope` are the symbols that the callers have. `signature` is that of a function which
    calls itself.
    """
    builder, label = importer.bb, importer.unique_name("draft")
    try:
        # The builder takes functions for equal that differ in the symbols of their parameters alone.
        with builder.function(label, list(parameters), {"label": label}):
            if results is None:
                with builder.dataflow():
                    body = build()
                    results = [_type_of(importer, value, scope) for value in body.fields]
                    body = builder.emit_output(body)
            else:
                body = build()
            draft = builder.emit_func_output(body)
    except Exception:
        # The builder goes on with the function around this one.
        builder._end_block()
        builder.end_scope()
        raise
    bare = builder.get()[draft]
    if signature is None:
        captured = [variable for variable in relax.analysis.free_vars(bare) if not tvm.ir.is_prim_expr(variable)]
        whole = relax.Function([*parameters, *captured], bare.body, relax.ObjectType())
        variables = [*relax.analysis.free_symbolic_vars(whole), *relax.analysis.defined_symbolic_vars(whole)]
        symbols = [symbol for symbol in scope if any(symbol.same_as(item) for item in variables)]
        signature = _Function(tvm.ir.GlobalVar(name), tuple(symbols), tuple(captured), tuple(results))
        signature.declare(parameters)
    own = {variable: relax.Var(variable.name, variable.ty) for variable in signature.captured}
    whole = relax.Function([*parameters, *own], bare.body, relax.ObjectType()).bind_params(own)
    sizes = [relax.Var("sizes", relax.ShapeType(list(signature.symbols)))] if signature.symbols else []
    function = relax.Function([*sizes, *parameters, *own.values()], whole.body, _tuple_type(signature.results))
    importer.add_function(signature.variable, relax.utils.copy_with_new_vars(function))
    return signature


def _call(importer: Importer, function: _Function, arguments: Sequence[relax.Expr]) -> list[relax.Expr]:
    """Call a function; return its results, with symbols for the dimensions that only a run knows."""
    results = importer.bb.emit(function.call(arguments))
    fields = [importer.bb.emit(relax.TupleGetItem(results, place)) for place in range(len(function.results))]
    return [_shaped(importer, field, item.dims) for field, item in zip(fields, function.results, strict=True)]


def _shaped(importer: Importer, value: relax.Expr, dims: Sequence[Any]) -> relax.Expr:
    """A tensor with these dimensions, and a symbol for each None."""
    own = dims_of(value)
    if own is not None and all(
        dim is not None and importer.evaluator.are_equal(*pair) for dim, *pair in zip(dims, dims, own, strict=True)
    ):
        return value
    return cast_to(importer.bb, value, _with_symbols(importer, dims))


def _with_symbols(importer: Importer, dims: Sequence[Any]) -> list[Any]:
    return [importer.evaluator.unknown_size() if dim is None else dim for dim in dims]


def _type_of(importer: Importer, value: relax.Expr, scope: Sequence[tirx.Var]) -> _Type:
    """The type of a tensor for those who have these symbols."""
    if not isinstance(value.ty, relax.TensorType):
        raise UnsupportedFormError("a sequence or an optional value that is decided when the model runs")
    if value.ty.ndim < 0:
        raise FreeSizeError("a value whose number of dimensions is unknown")
    dims = dims_of(value) or [None] * int(value.ty.ndim)
    dims = [None if dim is None else importer.evaluator.expression(dim) for dim in dims]
    return _Type(tuple(dim if _is_within(dim, scope) else None for dim in dims), dtype_of(value))


def _is_within(dim: Any, scope: Sequence[tirx.Var]) -> bool:
    """Whether a dimension is an expression of these symbols."""
    if dim is None or is_static(dim):
        return dim is not None
    symbols = tirx.analysis.undefined_vars(dim, [])
    return all(any(symbol.same_as(item) for item in scope) for symbol in symbols)


def _either(importer: Importer, one: _Type, other: _Type) -> _Type:
    """The type of a tensor that has one of two types of equally many dimensions."""
    pairs = zip(one.dims, other.dims, strict=True)
    is_same = [a is not None and b is not None and importer.evaluator.are_equal(a, b) for a, b in pairs]
    return _Type(tuple(dim if same else None for dim, same in zip(one.dims, is_same, strict=True)), one.dtype)


def _graph(node: onnx.NodeProto, name: str) -> onnx.GraphProto:
    graph: onnx.GraphProto = next(attribute.g for attribute in node.attribute if attribute.name == name)
    return graph
