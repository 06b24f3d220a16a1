"""Ensembles of decision trees: one function over all rows and trees.

Every node is a test `x[feature] <= threshold` with its two children side by side, so that a step is a sum rather than a
branch: the left child's place, plus one where the test holds. A leaf is its own left child, and its threshold is NaN,
for which no test holds; so a path stays at its leaf while longer paths go on. Several paths are followed at a time,
because each step waits for memory: the paths of several rows through one tree, or those of one row through several
trees. The trees are sorted by their depths, so that those that are followed together end together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler import cost, extensions, vectormath
from tvmflow.compiler.annotations import KERNEL, OPERATIONS
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import buffer, registers, size_parameter, static

# The paths that are followed at a time: their places take half of the 16 general-purpose registers of x86-64.
_PATHS = 8
# The steps between two checks whether all paths have ended. An ensemble of at most twice as many levels needs no check.
_STEPS = 4
# The most rows that go through a tree before the next tree: so many that reading the tree costs each of them little.
_MOST_ROWS = 128

_START = {"SUM": 0.0, "AVERAGE": 0.0, "MIN": float("inf"), "MAX": float("-inf")}


@dataclass(frozen=True)
class Forest:
    """The form of an ensemble of `trees` trees with `nodes` nodes; the longest path has `depth` steps.

    `dtype` is the type of rows and thresholds, `score` the type of results. Each node has a link, an int32. Its lowest
    bits, `feature_bits` of them, hold the index of the feature that the node tests. If `has_missing`, the next bit says
    whether NaN passes the test. The index of the left child begins at bit `shift`; where `shift` is 0, it is in a
    second link. `layout` says what the leaves hold: `single`, one number for the target of their tree; `dense`, a
    number for every target; `sparse`, numbers for some targets, in all `entries` numbers of `leaves` leaves.
    `aggregate` is ONNX's: SUM, AVERAGE, MIN or MAX.
    """

    trees: int
    nodes: int
    depth: int
    features: int
    targets: int
    dtype: str
    score: str
    shift: int
    has_missing: bool
    layout: str
    leaves: int
    entries: int
    aggregate: str

    @property
    def feature_bits(self) -> int:
        """The number of bits of a link that hold the feature."""
        return 30 if self.shift == 0 else self.shift - self.has_missing

    @property
    def has_rows_twice(self) -> bool:
        """Whether each row is written twice before it goes through the trees, if the trees take longer than that.

        In the second copy NaN is minus infinity, which passes every test. The bit of a link that says whether NaN
        passes is then a part of the place of the number that the node tests.
        """
        return self.has_missing and self.shift > 0 and self.features <= self.trees * self.depth

    @property
    def is_joint(self) -> bool:
        """Whether one table has the threshold of each node, as the bits of an int32, beside its link."""
        return self.shift > 0 and self.dtype == "float32"


def trees(x: relax.Expr, tables: Sequence[relax.Expr], forest: Forest) -> relax.Call:
    """Return a Relax call that stands for an ensemble on rows [rows, features]; its result is [rows, targets].

    `tables` are thresholds with links [nodes, 2] where they are joint, else thresholds [nodes] and links [nodes, 1 or
    2]; then roots [trees], depths [trees] in rising order, the leaves' tables, and base values [targets]. The leaves'
    tables are numbers [nodes] and the targets of trees [trees] (single); numbers [leaves, targets] and the leaf of each
    node (dense); or numbers and targets [entries], the first entry of each leaf [leaves + 1], and the leaf of each node
    (sparse).
    """
    return extensions.call("trees", [x, *tables], **vars(forest))


def forest_of(attrs: Any) -> Forest:
    """Return the forest that the attributes of a call of `trees` describe."""
    kinds = {"int": int, "str": str, "bool": bool}
    fields = Forest.__dataclass_fields__.items()
    return Forest(**{name: kinds[getattr(item.type, "__name__", str(item.type))](attrs[name]) for name, item in fields})


def _infer(call: relax.Call) -> relax.TensorType:
    return relax.TensorType([call.args[0].ty.shape.values[0], int(call.attrs["targets"])], str(call.attrs["score"]))


extensions.register("trees", _infer)


class Trees:
    """Builds the TIR function of an ensemble; the function's parameters are the operands of `trees`, then the result.

    `rows` is the number of rows, an integer or a symbolic size.
    """

    def __init__(self, forest: Forest, rows: Any, machine: Machine) -> None:
        self.forest = forest
        self._machine = machine
        self._rows = size_parameter(rows, "rows")
        nodes, score = forest.nodes, forest.score
        self._x = buffer("x", (self._rows, forest.features), forest.dtype)
        self._nodes = (
            [buffer("nodes", (nodes, 2), "int32")]
            if forest.is_joint
            else [
                buffer("thresholds", (nodes,), forest.dtype),
                buffer("links", (nodes, 1 if forest.shift else 2), "int32"),
            ]
        )
        self._roots = buffer("roots", (forest.trees,), "int32")
        self._depths = buffer("depths", (forest.trees,), "int32")
        leaf = buffer("leaf", (nodes,), "int32")
        self._leaves = {
            "single": [buffer("scores", (nodes,), score), buffer("targets", (forest.trees,), "int32")],
            "dense": [buffer("scores", (forest.leaves, forest.targets), score), leaf],
            "sparse": [
                buffer("scores", (forest.entries,), score),
                buffer("targets", (forest.entries,), "int32"),
                buffer("first", (forest.leaves + 1,), "int32"),
                leaf,
            ],
        }[forest.layout]
        self._base = buffer("base", (forest.targets,), score)
        self._y = buffer("y", (self._rows, forest.targets), score)
        # For few rows the cores share the trees, in whole groups. Their sums are added in order.
        self._parts, self._share = self._split()
        # The rows that the paths read: those of `x`, or the ones that are written twice.
        self._values = self._x

    def function(self) -> tirx.PrimFunc:
        """Return the function, whose attribute `KERNEL` tells the schedules to leave it unchanged."""
        rows = static(self._rows)
        with IRBuilder() as builder, T.seq_scope():
            if rows is None:
                with T.If(self._rows >= _PATHS):
                    with T.Then():
                        self._by_rows()
                    with T.Else():
                        self._by_trees()
            elif rows >= _PATHS:
                self._by_rows()
            else:
                self._by_trees()
        tables = [*self._nodes, self._roots, self._depths, *self._leaves, self._base]
        # A step of a path compares, and reads a threshold, a link and a number of the row; no vector computes several.
        steps = 4 * self._machine.lanes * self.forest.trees * self.forest.depth
        # The builder marks the sequence of statements by an attribute.
        function = tirx.PrimFunc([self._x, *tables, self._y], builder.get().body)
        return function.with_attr({KERNEL: "trees", OPERATIONS: steps})

    def _split(self) -> tuple[int, int]:
        """The parts into which the trees of a row are split, and the trees of each part but the last."""
        forest, machine = self.forest, self._machine
        # A step reads a line of the row, and one of each table with the threshold and the link.
        lines = 1 + len(self._nodes)
        read = forest.trees * min(forest.depth, 2 * _PATHS) * lines * machine.first.line
        cycles = cost.move_cycles(0, read, 8 * forest.nodes, machine)
        groups = max(1, forest.trees // _PATHS)
        share = -(-groups // min(machine.cores, groups)) if cycles >= machine.parallel_cycles else groups
        return -(-groups // share), share * _PATHS

    # -- Which paths are followed together -----------------------------------------------------------------------------

    def _by_rows(self) -> None:
        """Follow several rows through one tree at a time, chunk of rows by chunk of rows."""
        copies = (2 << self.forest.feature_bits) if self.forest.has_rows_twice else 0
        cores, bytes_of_row = self._machine.cores, 8 * max(self.forest.features, copies)
        size = max(1, min(_MOST_ROWS, self._machine.own_cache // 2 // bytes_of_row) // _PATHS) * _PATHS
        rows = static(self._rows)
        if rows is not None:
            size = min(size, -(-rows // cores // _PATHS) * _PATHS)
        chunks = tirx.floordiv(self._rows + (size - 1), size)
        loop = T.parallel if cores > 1 else T.serial
        with loop(0, chunks) as chunk:
            begin = chunk * size
            end = tirx.min(begin + size, self._rows)
            offset = self._write_twice(begin, end - begin, size)
            with T.serial(0, end - begin) as row:
                self._start(self._y, [begin + row])
            groups = tirx.floordiv(end - begin + (_PATHS - 1), _PATHS)

            def follow(first_tree: Any, trees: Any, scores: Any, first_row: Any) -> None:
                with T.serial(0, trees) as place_of_tree, T.serial(0, groups) as group:
                    tree, first = first_tree + place_of_tree, begin + group * _PATHS
                    places = [tirx.min(first + path, end - 1) - offset for path in range(_PATHS)]
                    ends = self._follow([(place, self._roots[tree]) for place in places], self._depths[tree])
                    for path in range(_PATHS):
                        with T.If(first + path < end), T.Then():
                            self._add(scores, [first + path - first_row], ends[path], tree)

            if self._parts == 1:
                follow(0, self.forest.trees, self._y, 0)
            else:
                # As for few rows: equal rows have equal scores to the last bit.
                sums = T.alloc_buffer((size, self.forest.targets), self.forest.score, scope="global", layout=None)
                with T.serial(0, self._parts) as part:
                    with T.serial(0, end - begin) as row:
                        self._start(sums, [row])
                    first = part * self._share
                    count = tirx.Select(part == self._parts - 1, self.forest.trees - first, self._share)
                    follow(first, count, sums, begin)
                    with T.serial(0, end - begin) as row:
                        self._include(begin + row, sums, row)
            with T.serial(0, end - begin) as row:
                self._finish(begin + row)

    def _by_trees(self) -> None:
        """Follow one row through several trees at a time; the cores share the trees."""
        forest, parts = self.forest, self._parts
        groups, rest = divmod(forest.trees, _PATHS)
        sums = T.alloc_buffer((parts, forest.targets), forest.score, scope="global", layout=None)
        with T.serial(0, self._rows) as row:
            offset = self._write_twice(row, 1, 1)
            with (T.parallel if parts > 1 else T.serial)(0, parts) as part:
                self._start(sums, [part])
                groups_of_part = self._share // _PATHS
                with T.serial(0, tirx.max(0, tirx.min(groups_of_part, groups - part * groups_of_part))) as group:
                    first = (part * groups_of_part + group) * _PATHS
                    self._follow_trees(row - offset, [first + path for path in range(_PATHS)], sums, [part])
            if rest:
                last = [groups * _PATHS + path for path in range(rest)]
                self._follow_trees(row - offset, last, sums, [parts - 1])
            self._start(self._y, [row])
            with T.serial(0, parts) as part:
                self._include(row, sums, part)
            self._finish(row)

    def _write_twice(self, begin: Any, count: Any, most: int) -> Any:
        """Write `count` rows from `begin` on, at most `most`, as `Forest.has_rows_twice` says; return their offset.

        The row that is the first in memory is row number `offset` of the input.
        """
        forest = self.forest
        if not forest.has_rows_twice:
            return 0
        half = 1 << forest.feature_bits
        self._values = T.alloc_buffer((most, 2 * half), forest.dtype, scope="global", layout=None)
        with T.serial(0, count) as row, T.serial(0, forest.features) as feature:
            value = self._x[begin + row, feature]
            passing = tirx.Select(vectormath.is_nan(value, forest.dtype), tirx.const(-math.inf, forest.dtype), value)
            T.buffer_store(self._values, value, [row, feature])
            T.buffer_store(self._values, passing, [row, half + feature])
        return begin

    # -- The paths -----------------------------------------------------------------------------------------------------

    def _follow_trees(self, row: Any, trees: Sequence[Any], scores: Any, index: Sequence[Any]) -> None:
        """Follow one row through trees, and add the numbers of the leaves to `scores` at `index`."""
        ends = self._follow([(row, self._roots[tree]) for tree in trees], self._depths[trees[-1]])
        for tree, end in zip(trees, ends, strict=True):
            self._add(scores, index, end, tree)

    def _follow(self, starts: Sequence[tuple[Any, Any]], depth: Any) -> list[Any]:
        """Follow the paths of (row, root), of at most `depth` steps, to their leaves; return the places of these."""
        count = len(starts)
        places = registers((count,), "int32")
        for path, (_, root) in enumerate(starts):
            T.buffer_store(places, root, [path])

        def step() -> None:
            for path, (row, _) in enumerate(starts):
                T.buffer_store(places, self._next(row, places[path]), [path])

        if self.forest.depth <= 2 * _STEPS:
            with T.serial(0, depth):
                step()
            return [places[path] for path in range(count)]
        before = registers((count,), "int32")
        steps = registers((1,), "int32")
        T.buffer_store(steps, 0, [0])
        with T.While(steps[0] < depth):
            for _ in range(_STEPS - 1):
                step()
            for path in range(count):
                T.buffer_store(before, places[path], [path])
            step()
            difference = tirx.const(0, "int32")
            for path in range(count):
                difference = difference | (before[path] ^ places[path])
            T.buffer_store(steps, tirx.Select(difference == 0, depth, steps[0] + _STEPS), [0])
        return [places[path] for path in range(count)]

    def _next(self, row: Any, place: Any) -> Any:
        """The place of the child that a row goes on to."""
        forest = self.forest
        if forest.is_joint:
            nodes = self._nodes[0]
            threshold, link = tirx.reinterpret("float32", nodes[place, 0]), nodes[place, 1]
        else:
            threshold, link = self._nodes[0][place], self._nodes[1][place, 0]
        if forest.has_rows_twice:
            value = self._values[row, link & ((1 << forest.shift) - 1)]
        else:
            value = self._values[row, link & ((1 << forest.feature_bits) - 1)]
        passes = tirx.Cast("int32", value <= threshold)
        if forest.has_missing and not forest.has_rows_twice:
            is_missing = tirx.Cast("int32", vectormath.is_nan(value, forest.dtype))
            passes = passes | (is_missing & ((link >> forest.feature_bits) & 1))
        if forest.shift == 0:
            return self._nodes[1][place, 1] + passes
        left = tirx.reinterpret("int32", tirx.reinterpret("uint32", link) >> tirx.const(forest.shift, "uint32"))
        return left + passes

    # -- The scores ----------------------------------------------------------------------------------------------------

    def _combine(self, one: Any, other: Any) -> Any:
        return {"MIN": tirx.min, "MAX": tirx.max}.get(self.forest.aggregate, lambda a, b: a + b)(one, other)

    def _include(self, row: Any, sums: Any, place: Any) -> None:
        """Add the sums at a place to the scores of a row."""
        with T.serial(0, self.forest.targets) as target:
            total = self._combine(self._y[row, target], sums[place, target])
            T.buffer_store(self._y, total, [row, target])

    def _start(self, scores: Any, index: Sequence[Any]) -> None:
        with T.serial(0, self.forest.targets) as target:
            start = tirx.const(_START[self.forest.aggregate], self.forest.score)
            T.buffer_store(scores, start, [*index, target])

    def _add(self, scores: Any, index: Sequence[Any], place: Any, tree: Any) -> None:
        """Add the numbers of a leaf of a tree to the scores of a row."""

        def add(target: Any, value: Any) -> None:
            T.buffer_store(scores, self._combine(scores[(*index, target)], value), [*index, target])

        values, *tables = self._leaves
        if self.forest.layout == "single":
            add(tables[0][tree] if self.forest.targets > 1 else 0, values[place])
        elif self.forest.layout == "dense":
            with T.serial(0, self.forest.targets) as target:
                add(target, values[tables[0][place], target])
        else:
            targets, first, leaf = tables
            begin = first[leaf[place]]
            with T.serial(0, first[leaf[place] + 1] - begin) as entry:
                add(targets[begin + entry], values[begin + entry])

    def _finish(self, row: Any) -> None:
        """Turn a row's aggregated scores into its results."""
        forest = self.forest
        with T.serial(0, forest.targets) as target:
            value = self._y[row, target]
            if forest.aggregate == "AVERAGE":
                value = value / tirx.const(forest.trees, forest.score)
            elif forest.aggregate != "SUM":
                # No leaf has a number for the target.
                start, zero = (tirx.const(number, forest.score) for number in (_START[forest.aggregate], 0.0))
                value = tirx.Select(value == start, zero, value)
            T.buffer_store(self._y, value + self._base[target], [row, target])


def lower(builder: relax.BlockBuilder, call: relax.Call, machine: Machine) -> relax.Expr:
    """Lower a call of `trees` to a call of its function for `machine`, and return the new call."""
    kernel = Trees(forest_of(call.attrs), call.args[0].ty.shape.values[0], machine)
    function = extensions.emit_function(builder, kernel.function(), "trees")
    return relax.call_tir(function, list(call.args), call.ty)
