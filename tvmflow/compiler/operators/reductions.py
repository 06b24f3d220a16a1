"""Sums, means, extremes and variances over neighbouring dimensions, and the norms made of them.

A tensor is viewed as `[..., reduced, inner]`. Vectors run along `inner`, the dimensions after the reduced ones; where
there are none, vectors run along the reduced ones. A long reduction with few results is split into parts, so that every
core has work.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

from tvm import relax, te, tirx

from tvmflow.compiler import cost
from tvmflow.compiler.annotations import KERNEL
from tvmflow.compiler.machine import NARROWEST, Machine
from tvmflow.compiler.operators import extremes, free_reductions
from tvmflow.compiler.operators.common import is_float32, or_default, reduced_axes, static

# TVM's fusion kind of reductions: TVM fuses the element-wise operators before them.
REDUCTION = {"op_pattern": 3}


@dataclass(frozen=True)
class Kind:
    """A kind of reduction: TVM's reducer, the function that combines two partial results, and the result of none."""

    reducer: Callable[..., Any]
    combine: Callable[[Any, Any], Any]
    identity: float


# Of NaN and a number, an extreme is its second operand: with the result so far there, NaN loses none of the numbers.
def _largest(a: Any, b: Any) -> Any:
    return tirx.max(b, a)


def _smallest(a: Any, b: Any) -> Any:
    return tirx.min(b, a)


def _product(a: Any, b: Any) -> Any:
    return a * b


def _total(a: Any, b: Any) -> Any:
    return a + b


def _reducer(combine: Callable[[Any, Any], Any], identity: float, name: str) -> Kind:
    return Kind(te.comm_reducer(combine, lambda dtype: tirx.const(identity, dtype), name=name), combine, identity)


SUM = _reducer(_total, 0.0, "sum")
MAX = _reducer(_largest, -math.inf, "max")
MIN = _reducer(_smallest, math.inf, "min")
PRODUCT = _reducer(_product, 1.0, "prod")

KINDS = {"relax.sum": SUM, "relax.mean": SUM, "relax.max": MAX, "relax.min": MIN, "relax.prod": PRODUCT}
# The most numbers that are added one after the other. Each addition rounds, and where many numbers are alike, all of
# them round in one direction: sums of such parts are as exact as those of ONNX Runtime.
_LONGEST = 128
# The sign that `extremes` takes for a reduction.
_SIGNS = {"max": 1, "min": -1}


@dataclass(frozen=True)
class View:
    """A tensor as `[*outer, depth, inner]`: `depth` elements to reduce, `inner` results side by side in memory.

    The dimensions of `shape` from index `first` to index `last`, both included, are the reduced ones.
    """

    shape: Sequence[Any]
    first: int
    last: int

    @property
    def outer(self) -> list[Any]:
        """The dimensions before the reduced ones."""
        return list(self.shape[: self.first])

    @property
    def depth(self) -> int:
        """The number of elements that are reduced to one result."""
        return math.prod(int(size) for size in self.shape[self.first : self.last + 1])

    @property
    def is_flat(self) -> bool:
        """Whether the elements that are reduced to one result are side by side in memory, in several dimensions."""
        return self.inner == 1 and sum(int(size) > 1 for size in self.shape[self.first : self.last + 1]) > 1

    @property
    def inner(self) -> int:
        """The number of results that are side by side in memory."""
        return math.prod(int(size) for size in self.shape[self.last + 1 :])

    def position(self, outer: Sequence[Any], r: Any, c: Any) -> list[Any]:
        """Convert the index `[*outer, r, c]` of an element of the view to the tensor's index of that element."""
        return [*outer, *unravel(r, self.shape[self.first : self.last + 1]), *unravel(c, self.shape[self.last + 1 :])]


def unravel(index: Any, sizes: Sequence[Any]) -> list[Any]:
    """Convert a flat, row-major index to the index along each of the dimensions of these `sizes`."""
    places: list[Any] = []
    for size in reversed(sizes[1:]):
        places.insert(0, index % int(size))
        index = index // int(size)
    return [index, *places] if sizes else []


def _ravel(index: Sequence[Any], sizes: Sequence[Any]) -> Any:
    # The first size counts no place.
    place: Any = index[0] if index else 0
    for value, size in zip(index[1:], sizes[1:], strict=True):
        place = place * int(size) + value
    return place


def _view(call: relax.Call) -> View | None:
    """View a reduction's operand; None where the reduced dimensions are not neighbours or are symbolic."""
    shape = list(call.args[0].ty.shape.values)
    axes = reduced_axes(call)
    if not axes:
        return None
    first, last = axes[0], axes[-1]
    if any(static(shape[place]) != 1 for place in range(first, last + 1) if place not in axes):
        return None
    view = View(shape, first, last)
    if any(not static(size) for size in shape[first:]):
        return None
    return view if view.inner == 1 or view.inner >= NARROWEST else None


def legalize(builder: relax.BlockBuilder, call: relax.Call, machine: Machine) -> relax.Expr | None:
    """Define a reduction of float32 over neighbouring dimensions of known sizes, or over the last ones of any size.

    Numbers of other types that have 32 or 64 bits are reduced over the last dimensions of any size too. Where the
    reduced dimensions are no neighbours, the last neighbours of them are reduced first. Other maxima and minima are
    left to `extremes`. Returns None for the other reductions.
    """
    name = call.op.name.rpartition(".")[2]
    has_shapes = all(isinstance(tensor.ty.shape, relax.ShapeExpr) for tensor in (call.args[0], call))
    has_sizes = has_shapes and is_float32(call.args[0])
    view = _view(call) if has_sizes else None
    kind = KINDS.get(call.op.name)
    if (
        view is None
        and has_shapes
        and kind is not None
        and any(static(s) is None for s in call.args[0].ty.shape.values)
    ):
        free = _free_columns(builder, call, name) if kind is SUM and has_sizes else None
        if free is None:
            free = free_reductions.legalize(builder, call, machine, kind.combine, kind.identity, name == "mean")
        if free is None:
            free = _by_neighbours(builder, call, machine)
        if free is not None:
            return free
    elif view is None and kind is not None and has_sizes:
        parts = _by_neighbours(builder, call, machine)
        if parts is not None:
            return parts
    if view is None:
        return extremes.legalize(builder, call, machine, _SIGNS[name]) if name in _SIGNS else None
    if kind is not None and view.is_flat:
        # TVM would divide the place of each element by the sizes of the dimensions.
        whole = free_reductions.legalize(builder, call, machine, kind.combine, kind.identity, name == "mean")
        if whole is not None:
            return whole
    compute = partial(_statistic, view=view, shape=list(call.ty.shape.values), name=name, machine=machine)
    return builder.call_te(compute, call.args[0], primfunc_name_hint=name, primfunc_attrs=REDUCTION)


def _by_neighbours(builder: relax.BlockBuilder, call: relax.Call, machine: Machine) -> relax.Expr | None:
    """Reduce the last of the reduced dimensions that are neighbours, then the others; None where all are neighbours."""
    axes = reduced_axes(call)
    shape = call.args[0].ty.shape.values
    first = next((place for place in reversed(axes) if place - 1 not in axes), 0)
    others = [place for place in axes if place < first]
    if not others or all(static(shape[place]) == 1 for place in range(others[-1] + 1, first)):
        return None
    reduce_axes = getattr(relax.op, call.op.name.removeprefix("relax."))
    define = or_default(lambda builder, call: legalize(builder, call, machine))
    last = [place for place in axes if place >= first]
    part = builder.emit(define(builder, builder.normalize(reduce_axes(call.args[0], last, keepdims=True))))
    whole = builder.emit(define(builder, builder.normalize(reduce_axes(part, others, keepdims=True))))
    return whole if call.attrs.keepdims else relax.op.reshape(whole, call.ty.shape)


def _statistic(data: te.Tensor, *, view: View, shape: Sequence[Any], name: str, machine: Machine) -> te.Tensor:
    kind = KINDS.get(f"relax.{name}", SUM)
    result = reduction(lambda outer, r, c: data[tuple(view.position(outer, r, c))], view, kind, name, machine)
    scale = tirx.const(1.0 / view.depth, "float32")
    if name in ("variance", "std"):
        mean = te.compute((*view.outer, view.inner), lambda *at: result(at[:-1], at[-1]) * scale, name="average")

        def square(outer: Sequence[Any], r: Any, c: Any) -> Any:
            centred = data[tuple(view.position(outer, r, c))] - mean[(*outer, c)]
            return centred * centred

        result = reduction(square, view, SUM, "squares", machine)
    outer_rank = len(view.outer)
    after = view.shape[view.last + 1 :]

    def value(*index: Any) -> Any:
        # The result may keep the reduced dimensions, with size one, between these two.
        total = result(index[:outer_rank], _ravel(index[len(index) - len(after) :], after))
        if name in ("mean", "variance", "std"):
            total = total * scale
        return tirx.sqrt(total) if name == "std" else total

    return te.compute(tuple(shape), value, name=name, attrs={KERNEL: "reduction"})


def reduction(
    element: Callable[[Sequence[Any], Any, Any], Any], view: View, kind: Kind, name: str, machine: Machine
) -> Callable[[Sequence[Any], Any], Any]:
    """Reduce `element(outer, r, c)` over r, and return the result as a function of outer and c.

    `outer`, r and c are the index of an element of the `view`. Where there is more than one c, vectors run along c, and
    stages with the annotation `reduction_inner` accumulate. Otherwise two stages do: `reduction_lanes` and
    `reduction_fold`. The names of all stages begin with `name`.
    """
    outer, depth, inner = view.outer, view.depth, view.inner
    if inner > 1 and kind is SUM and depth > _LONGEST:
        return _sum_of_parts(element, outer, depth, inner, name)
    parts = _parts(outer, depth, inner, machine)
    length = depth // parts
    if inner > 1:
        results = _columns(element, outer, parts, length, inner, kind, name)
        return lambda at, c: tree(kind, [results[(*at, part, c)] for part in range(parts)])
    row = rows(lambda at, k: element(at[:-1], at[-1] * length + k, 0), (*outer, parts), length, kind, name, machine)
    if parts == 1:
        return lambda at, _c: row((*at, 0))
    sums = te.compute((*outer, parts), lambda *at: row(at), name=f"{name}_part")
    return lambda at, _c: tree(kind, [sums[(*at, part)] for part in range(parts)])


def _free_columns(builder: relax.BlockBuilder, call: relax.Call, name: str) -> relax.Expr | None:
    """Define a sum or mean over neighbouring dimensions of free sizes; None for other reductions.

    Others follow, whose sizes are known, or one of free size. The dimensions are summed one after the other, the last
    one first: the lines of an image, then their sums.
    """
    shape = list(call.args[0].ty.shape.values)
    axes = reduced_axes(call)
    if not axes or axes != list(range(axes[0], axes[-1] + 1)):
        return None
    after = shape[axes[-1] + 1 :]
    known = [size for size in after if static(size)]
    is_free_line = len(after) == 1 and not known
    if not is_free_line and (len(known) < len(after) or math.prod(map(int, known)) < NARROWEST):
        return None
    compute = partial(_sum_of_lines, first=axes[0], last=axes[-1], shape=list(call.ty.shape.values), name=name)
    return builder.call_te(compute, call.args[0], primfunc_name_hint=name, primfunc_attrs=REDUCTION)


def _sum_of_lines(data: te.Tensor, *, first: int, last: int, shape: Sequence[Any], name: str) -> te.Tensor:
    """Define the sum or mean over the dimensions from index `first` to `last`; the result has this `shape`."""
    after = data.shape[last + 1 :]
    inner = math.prod(size if static(size) is None else int(size) for size in after)

    def element(at: Sequence[Any], c: Any) -> Any:
        return data[(*at, *unravel(c, after))]

    total = sum_of_image(element, data.shape[:first], data.shape[first : last + 1], inner, name)
    scale = math.prod(data.shape[first : last + 1], start=tirx.IntImm("int64", 1)).astype("float32")

    def value(*index: Any) -> Any:
        result = total(index[:first], _ravel(index[len(index) - len(after) :], after))
        return result / scale if name == "mean" else result

    return te.compute(tuple(shape), value, name=name, attrs={KERNEL: "reduction"})


def sum_of_image(
    element: Callable[[Sequence[Any], Any], Any], outer: Sequence[Any], image: Sequence[Any], inner: Any, name: str
) -> Callable[[Sequence[Any], Any], Any]:
    """Add `element((*outer, *pixel), c)` over the pixels of an image, and return the sum as a function of outer and c.

    `image` are its sizes, of any rank, known or free, and c is below `inner`. The last dimension is summed first: each
    line, then the sums of the lines. The names of all stages begin with `name`.
    """
    total = element
    # Lines of an image are parts themselves.
    add = _sum_of_parts if len(image) == 1 else _sum
    for axis in reversed(range(len(image))):
        before = [*outer, *image[:axis]]
        total = add(partial(_element_of_line, total), before, image[axis], inner, f"{name}{len(outer) + axis}")
    return total


def _element_of_line(element: Callable[[Sequence[Any], Any], Any], outer: Sequence[Any], r: Any, c: Any) -> Any:
    """The element r of a line, whose index is `outer`; `element` takes both as one index."""
    return element((*outer, r), c)


def _columns(
    element: Callable[[Sequence[Any], Any, Any], Any],
    outer: Sequence[Any],
    parts: Any,
    length: Any,
    inner: Any,
    kind: Kind,
    name: str,
) -> te.Tensor:
    """Define the tensor `[*outer, parts, inner]` of the results of `parts` parts of `length` elements each."""
    r = te.reduce_axis((0, length), "r")
    return te.compute(
        (*outer, parts, inner),
        lambda *at: kind.reducer(element(at[:-2], at[-2] * length + r, at[-1]), axis=r),
        name=f"{name}_inner",
        attrs={KERNEL: "reduction_inner"},
    )


def _sum(
    element: Callable[[Sequence[Any], Any, Any], Any], outer: Sequence[Any], depth: Any, inner: Any, name: str
) -> Callable[[Sequence[Any], Any], Any]:
    """Add `element(outer, r, c)` over r below `depth` one by one, and return the sum as a function of outer and c."""
    sums = _columns(element, list(outer), 1, depth, inner, SUM, name)
    return lambda at, c: sums[(*at, 0, c)]


def _sum_of_parts(
    element: Callable[[Sequence[Any], Any, Any], Any], outer: Sequence[Any], depth: Any, inner: Any, name: str
) -> Callable[[Sequence[Any], Any], Any]:
    """Add as `_sum` does, but parts of at most `_LONGEST` elements first, and then their sums.

    Where the depth is known, the sums are added in the same way.
    """
    number = static(depth)
    if number is None:
        size, length, add = depth, _LONGEST, _sum
    elif number <= _LONGEST:
        return _sum(element, outer, depth, inner, name)
    else:
        # Equal parts, or the fewest elements behind them.
        length = min(range(_LONGEST, _LONGEST // 2, -1), key=lambda length: number % length)
        size, add = number, _sum_of_parts
    parts, rest = size // length, size % length
    sums = _columns(element, list(outer), parts, length, inner, SUM, f"{name}_parts")
    total = add(lambda at, r, c: sums[(*at, r, c)], outer, parts, inner, f"{name}_total")
    if number is not None and not rest:
        return total
    others = _sum(lambda at, r, c: element(at, parts * length + r, c), outer, rest, inner, f"{name}_rest")
    return lambda at, c: total(at, c) + others(at, c)


def rows(
    element: Callable[[Sequence[Any], Any], Any],
    outer: Sequence[Any],
    size: int,
    kind: Kind,
    name: str,
    machine: Machine,
) -> Callable[[Sequence[Any]], Any]:
    """Define the reduction of `element(row, k)` over k below `size`, and return its result as a function of the row.

    A row is an index into dimensions of the sizes `outer`. Several vectors of the machine's width accumulate elements
    side by side. They are reduced to one vector, and its lanes to one number together with the elements that fill no
    vector. `kind` is the reduction, such as a sum. The names of its stages begin with `name`.
    """
    lanes = machine.lanes
    whole = size // lanes
    fold: te.Tensor | None = None
    if whole:
        side = cost.side_by_side(whole, machine)
        o = te.reduce_axis((0, whole // side), "o")
        accumulators = te.compute(
            (*outer, side, lanes),
            lambda *at: kind.reducer(element(at[:-2], (o * side + at[-2]) * lanes + at[-1]), axis=o),
            name=f"{name}_lanes",
            attrs={KERNEL: "reduction_lanes"},
        )
        u = te.reduce_axis((0, side), "u")
        fold = te.compute(
            (*outer, lanes),
            lambda *at: kind.reducer(accumulators[(*at[:-1], u, at[-1])], axis=u),
            name=f"{name}_fold",
            attrs={KERNEL: "reduction_fold"},
        )

    remainder = size % lanes
    rest = te.compute((*outer, remainder), lambda *at: element(at[:-1], whole * lanes + at[-1]), name=f"{name}_rest")

    def result(row: Sequence[Any]) -> Any:
        row = tuple(row)
        vector = [] if fold is None else [fold[(*row, lane)] for lane in range(lanes)]
        return tree(kind, [*vector, *(rest[(*row, k)] for k in range(remainder))])

    return result


def tree(kind: Kind, values: Sequence[Any]) -> Any:
    """Combine numbers in pairs, so that few operations wait for each other."""
    values = list(values)
    while len(values) > 1:
        half = len(values) // 2
        rest = values[2 * half :]
        values = [kind.combine(a, b) for a, b in zip(values[:half], values[half : 2 * half], strict=True)] + rest
    return values[0]


def _parts(outer: Sequence[Any], depth: int, inner: int, machine: Machine) -> int:
    """The number of parts to split a reduction into so that every core has work."""
    results = reduce(lambda total, size: total * (static(size) or 1), outer, 1)
    vectors = -(-inner // machine.lanes) if inner > 1 else 1
    tasks = results * vectors // cost.side_by_side(vectors, machine)
    # Each of two cores must have enough elements for a parallel region.
    if machine.cores == 1 or tasks >= machine.cores or results * depth * inner < 2 * machine.parallel_cycles:
        return 1
    fewest = -(-machine.cores // tasks)
    fits = [count for count in range(fewest, 4 * fewest + 1) if depth % count == 0]
    fits.sort(key=lambda count: (depth // count % machine.lanes != 0 if inner == 1 else False, count))
    return fits[0] if fits else 1
