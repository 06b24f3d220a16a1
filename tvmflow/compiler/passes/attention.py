"""Recognises attention that a model composes of products, a mask and softmax, and computes it in one function."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import relax, te, tirx

from tvmflow.compiler.annotations import SINGLE_QUERY
from tvmflow.compiler.dotproduct import BF16
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import attention
from tvmflow.compiler.operators.attention import ZERO_FOR_NAN, ZERO_WITHOUT_KEYS, Places
from tvmflow.compiler.operators.common import FUSABLE, OPAQUE, same_shape, static
from tvmflow.compiler.passes.bf16 import round_operand
from tvmflow.compiler.passes.patterns import factors
from tvmflow.compiler.passes.rewrite import Rewriter, dtype, rank, rewriting, sizes
from tvmflow.compiler.size_checks import cast_to

_ATTENTION = ("nn.attention", "nn.attention_bias")
# The operators that only move elements, through which an operand is read.
_MOVEMENTS = ("permute_dims", "strided_slice", "squeeze", "expand_dims", "reshape", "repeat", "broadcast_to")


def _merge(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Merge two transposes in a row into one."""
    inner = rewriter.call(call.args[0], "permute_dims")
    dims = rank(call)
    if inner is None or dims is None:
        return None
    outer_axes, inner_axes = (_axes(item, dims) for item in (call, inner))
    return relax.op.permute_dims(inner.args[0], [inner_axes[axis] for axis in outer_axes])


def _axes(call: relax.Call, dims: int) -> list[int]:
    return list(reversed(range(dims))) if call.attrs.axes is None else [int(axis) % dims for axis in call.attrs.axes]


def _of_matrices(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Write a transpose of matrices between two reshapes, which flatten and restore their batch, as one transpose."""
    permute = rewriter.call(call.args[0], "permute_dims")
    flat = None if permute is None else rewriter.call(permute.args[0], "reshape")
    if permute is None or flat is None or rank(permute) != 3 or _axes(permute, 3) != [0, 2, 1]:
        return None
    before, after = sizes(flat.args[0]), sizes(call)
    if before is None or after is None or len(before) < 3:
        return None
    if not same_shape(after, [*before[:-2], before[-1], before[-2]]) or not same_shape(before[-2:], sizes(flat)[1:]):  # type: ignore[index]
        return None
    count = len(before)
    return relax.op.permute_dims(flat.args[0], [*range(count - 2), count - 1, count - 2])


def merge_transposes() -> tvm.transform.Pass:
    """Return the pass that merges consecutive transposes, and one between reshapes that flatten and restore a batch."""
    return rewriting("MergeTransposes", {"permute_dims": (_merge,), "reshape": (_of_matrices,)})


def _attention(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Write softmax(scale q k^T + mask) v over `[batch, heads, positions, channels]` as one operator.

    The dimension of heads may be absent.
    """
    softmax, zeros = _softmax(rewriter, call.args[0])
    count = rank(call)
    if softmax is None or count not in (3, 4) or dtype(call) != "float32" or not rewriter.used_once(call.args[0]):
        return None
    if int(softmax.attrs.axis) not in (-1, count - 1):
        return None
    # The scores are also read to see whether all of them are minus infinity.
    scores = _scores(rewriter, softmax.args[0], readers=2 if zeros == ZERO_WITHOUT_KEYS else 1)
    if scores is None:
        return None
    product, scale, masks = scores
    scale, (query,) = _scaled(rewriter, product.args[0], scale)
    scale, (key,) = _scaled(rewriter, product.args[1], scale)
    value = rewriter.before_casts(call.args[1])
    if not all(rank(item) == count and dtype(item) == "float32" for item in (query, key, value)):
        return None
    key, value = (_of_all_heads(rewriter, item, query) for item in (key, value))
    batches = [sizes(item)[:-2] for item in (query, key, value)]  # type: ignore[index]
    if not same_shape(batches[0], batches[1]) or not same_shape(batches[0], batches[2]):
        return None
    channels = [sizes(query)[-1], sizes(value)[-1]]  # type: ignore[index]
    if not same_shape(*[[item] for item in channels]) or not isinstance(channels[0], tirx.IntImm):
        return None
    if zeros is not None and count == 4 and not isinstance(batches[0][1], tirx.IntImm):
        return None
    mask = None
    for item in masks:
        mask = item if mask is None else rewriter.emit(relax.op.add(mask, item))
    if mask is not None:
        mask = _four_dimensions(rewriter, mask, count, sizes(call.args[0]))  # type: ignore[arg-type]
        if mask is None:
            return None
        shape = [*sizes(mask)[:-1], sizes(product)[-1]]  # type: ignore[index]
        mask = mask if same_shape(sizes(mask), shape) else cast_to(rewriter.builder_, mask, shape)
    operands = [_positions_first(rewriter, item, transposed) for item, transposed in _sides(query, key, value)]
    result = rewriter.emit(relax.op.nn.attention(*operands, mask, tirx.FloatImm("float32", scale), zeros))
    if count == 3:
        return relax.op.squeeze(result, [2])
    return relax.op.permute_dims(result, [0, 2, 1, 3])


def _weights_first(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Write v^T p^T, which a model computes whose channels come before its positions, as the transpose of p v.

    The weights p of the values v are the result of a softmax.
    """
    transpose, count = rewriter.call(call.args[1], "permute_dims"), rank(call) or 0
    axes = [*range(count - 2), count - 1, count - 2]
    if transpose is None or count not in (3, 4) or rank(call.args[0]) != count or _axes(transpose, count) != axes:
        return None
    is_read_once = rewriter.used_once(call.args[1]) and rewriter.used_once(transpose.args[0])
    if not is_read_once or _softmax(rewriter, transpose.args[0])[0] is None:
        return None
    values = rewriter.emit(relax.op.permute_dims(call.args[0], axes))
    product = rewriter.emit(relax.op.matmul(transpose.args[0], values, out_dtype=call.attrs.out_dtype))
    return relax.op.permute_dims(product, axes)


def _of_all_heads(rewriter: Rewriter, operand: relax.Expr, query: relax.Expr) -> relax.Expr:
    """Keys or values with the heads of the queries: one head that the products share is repeated by a broadcast."""
    own, whole = sizes(operand) or [], sizes(query) or []
    if len(own) != 4 or not _is_one(own[1]) or _is_one(whole[1]) or not same_shape(own[:1], whole[:1]):
        return operand
    return rewriter.emit(relax.op.broadcast_to(operand, relax.ShapeExpr([*whole[:2], *own[2:]])))


def _softmax(rewriter: Rewriter, expr: relax.Expr) -> tuple[relax.Call | None, str | None]:
    """Find the softmax in the weights of attention; return it, and what has zeros in the place of NaN.

    PyTorch writes zeros where a mask excludes all keys of a query, and so does ONNX's Attention.
    """
    where = rewriter.call(expr, "where")
    if where is None:
        return rewriter.call(expr, "nn.softmax"), None
    condition, softmax = rewriter.call(where.args[0], "isnan", "equal"), rewriter.call(where.args[2], "nn.softmax")
    if condition is None or softmax is None or rewriter.scalar(where.args[1]) != 0.0:
        return None, None
    if not rewriter.used_once(where.args[0]):
        return None, None
    if condition.op.name == "relax.isnan":
        is_same = rewriter.same(condition.args[0], where.args[2])
        return (softmax, ZERO_FOR_NAN) if is_same else (None, None)
    largest = rewriter.call(condition.args[0], "max")
    if largest is None or rewriter.scalar(condition.args[1]) != -math.inf or largest.attrs.axis is None:
        return None, None
    is_last = [int(axis) for axis in largest.attrs.axis] in ([-1], [len(sizes(softmax) or ()) - 1])
    if not is_last or not largest.attrs.keepdims or not rewriter.same(largest.args[0], softmax.args[0]):
        return None, None
    return softmax, ZERO_WITHOUT_KEYS


def _sides(query: relax.Expr, key: relax.Expr, value: relax.Expr) -> list[tuple[relax.Expr, bool]]:
    return [(query, False), (key, True), (value, False)]


def _scores(rewriter: Rewriter, expr: relax.Expr, readers: int) -> tuple[relax.Call, float, list[relax.Expr]] | None:
    """Find the product of queries and keys in an expression, its scale, and the masks added to it; None without one.

    At most `readers` expressions read the sum.
    """
    masks: list[relax.Expr] = []
    shape = sizes(expr)
    while True:
        is_single, readers = rewriter.used_once(expr, readers), 1
        source = rewriter.before_casts(expr)
        if not expr.same_as(source):
            if not same_shape(sizes(expr), shape):
                return None
            expr, shape = source, sizes(source)
        scale, parts = factors(rewriter, expr)
        product = rewriter.call(parts[0], "matmul") if len(parts) == 1 else None
        if product is not None and is_single and same_shape(sizes(product), shape):
            return product, scale, masks
        total = rewriter.call(expr, "add")
        if total is None or not is_single:
            return None
        product_first = _holds_product(rewriter, total.args[0])
        if not product_first and not _holds_product(rewriter, total.args[1]):
            return None
        expr, mask = total.args if product_first else reversed(total.args)
        masks.append(mask)


def _holds_product(rewriter: Rewriter, expr: relax.Expr) -> bool:
    for _ in range(4):
        expr = rewriter.before_casts(expr)
        _, parts = factors(rewriter, expr)
        if len(parts) != 1:
            return False
        if rewriter.call(parts[0], "matmul") is not None:
            return True
        total = rewriter.call(expr, "add")
        if total is None:
            return False
        expr = total.args[0]
    return False


def _scaled(rewriter: Rewriter, expr: relax.Expr, scale: float) -> tuple[float, list[relax.Expr]]:
    """Split the number off an operand that is multiplied with it; return the new scale and the operand alone."""
    own, parts = factors(rewriter, expr)
    return (scale * own, parts) if len(parts) == 1 and same_shape(sizes(parts[0]), sizes(expr)) else (scale, [expr])


def _four_dimensions(rewriter: Rewriter, mask: relax.Expr, count: int, scores: list[Any]) -> relax.Expr | None:
    """Reshape the mask to `[batch, heads, queries, keys]`, each of its own size or one; None if that fails."""
    dims = sizes(mask)
    if (
        dims is None
        or not 1 <= len(dims) <= count
        or dtype(mask) != "float32"
        or not same_shape(dims[-1:], scores[-1:])
    ):
        return None
    one = tirx.IntImm("int64", 1)
    dims = [one] * (count - len(dims)) + dims
    for size, whole in zip(dims[:-1], scores[:-1], strict=True):
        if not same_shape([size], [one]) and not same_shape([size], [whole]):
            return None
    if count == 3:
        dims = [dims[0], one, *dims[1:]]
    return rewriter.emit(relax.op.reshape(mask, relax.ShapeExpr(dims))) if rank(mask) != 4 else mask


def _positions_first(rewriter: Rewriter, operand: relax.Expr, transposed: bool) -> relax.Expr:
    """An operand of a product over heads as `[batch, positions, heads, channels]`."""
    if rank(operand) == 4:
        return rewriter.emit(relax.op.permute_dims(operand, [0, 3, 1, 2] if transposed else [0, 2, 1, 3]))
    if transposed:
        operand = rewriter.emit(relax.op.permute_dims(operand, [0, 2, 1]))
    return rewriter.emit(relax.op.expand_dims(operand, 2))


def compose_attention() -> tvm.transform.Pass:
    """Return the pass that recognises scaled dot-product attention and writes it as `nn.attention`."""
    return rewriting("ComposeAttention", {"matmul": (_attention, _weights_first), "permute_dims": (_merge,)})


@dataclass(frozen=True)
class View:
    """The places in `base` of the elements of a tensor by batch, position, head and channel.

    For each dimension of the base: the dimension of the tensor that runs along it, None for none, the step and the
    start. `group` neighbouring heads of the tensor are one head of the base, by which the places are.
    """

    base: relax.Expr
    places: Places
    group: int = 1


def view_of(rewriter: Rewriter, expr: relax.Expr, groups: bool = False) -> View:
    """The tensor behind transposes and slices, which then need no copy.

    With `groups` it may be a tensor of fewer heads, each of which is repeated for several neighbouring heads.
    """
    best = view = View(expr, tuple((dim, 1, 0) for dim in range(4)))
    while True:
        deeper = _through(rewriter, view)
        if deeper is None or (deeper.group > 1 and not groups):
            return best
        view = deeper
        # The channels, which vectors are loaded from, must be contiguous.
        if view.places[-1][:2] == (3, 1):
            best = view


def bases_of(rewriter: Rewriter, views: Sequence[View]) -> tuple[list[relax.Expr], list[int]]:
    """Return the different tensors behind views, and for each view the place of its own among them."""
    bases: list[relax.Expr] = []
    for view in views:
        if not any(rewriter.same(view.base, base) for base in bases):
            bases.append(view.base)
    return bases, [next(i for i, base in enumerate(bases) if rewriter.same(base, view.base)) for view in views]


def is_plain(call: relax.Call) -> bool:
    """Whether a call computes float32 attention of a known scale without a window and a causal mask."""
    attrs = call.attrs
    return (
        attrs.causal_mask in (None, ZERO_FOR_NAN, ZERO_WITHOUT_KEYS)
        and attrs.window_size is None
        and attrs.scale is not None
        and all(dtype(item) == "float32" for item in call.args)
    )


def _through(rewriter: Rewriter, view: View) -> View | None:
    base = rewriter.behind(view.base)
    if isinstance(base, relax.TupleGetItem):
        return _part(rewriter, base, view)
    call = rewriter.call(base, *_MOVEMENTS)
    data = None if call is None else call.args[0]
    before = None if data is None else sizes(data)
    if call is None or before is None:
        return None
    places = list(view.places)
    if call.op.name == "relax.permute_dims":
        base_places: list[Any] = [None] * len(places)
        for place, axis in zip(places, _axes(call, len(places)), strict=True):
            base_places[axis] = place
        return replace(view, base=data, places=tuple(base_places))
    if call.op.name == "relax.repeat":
        is_of_heads = (
            call.attrs.axis is not None and places[int(call.attrs.axis) % len(places)] == (2, 1, 0) and view.group == 1
        )
        return View(data, view.places, int(call.attrs.repeats)) if is_of_heads else None
    if call.op.name == "relax.broadcast_to":
        return _of_one_head(call, before, view)
    if call.op.name == "relax.strided_slice":
        steps = list(call.args[4]) if len(call.args) > 4 else [1] * len(call.args[1])
        for axis, start, step in zip(call.args[1], call.args[2], steps, strict=True):
            extent = before[int(axis)]
            if not all(isinstance(item, int | tirx.IntImm) for item in (start, step, extent)) or int(step) < 1:
                return None
            begin = int(start) + (int(extent) if int(start) < 0 else 0)
            if not 0 <= begin < int(extent):
                return None
            dim, own, offset = places[int(axis)]
            places[int(axis)] = (dim, own * int(step), offset * int(step) + begin)
        return replace(view, base=data, places=tuple(places))
    unsqueezed = _unsqueezed(before, sizes(call), places)
    if unsqueezed is not None:
        return replace(view, base=data, places=unsqueezed)
    return _repeated(rewriter, call, view)


def _of_one_head(broadcast: relax.Call, before: list[Any], view: View) -> View | None:
    """The view of the tensor of one head that all heads share."""
    after = sizes(broadcast)
    if after is None or len(before) != len(after) or view.group > 1 or (2, 1, 0) not in view.places:
        return None
    axis = view.places.index((2, 1, 0))
    group, one = static(after[axis]), static(before[axis])
    rest = [place for place in range(len(after)) if place != axis]
    is_same = same_shape([before[place] for place in rest], [after[place] for place in rest])
    return View(broadcast.args[0], view.places, group) if group and one == 1 and is_same else None


def _repeated(rewriter: Rewriter, reshape: relax.Call, view: View) -> View | None:
    """The view of the tensor of which each head is repeated before a reshape that numbers the repeated heads."""
    broadcast, after = rewriter.call(reshape.args[0], "broadcast_to"), sizes(reshape)
    source = None if broadcast is None else sizes(broadcast.args[0])
    if broadcast is None or source is None or after is None or view.group > 1 or (2, 1, 0) not in view.places:
        return None
    axis = view.places.index((2, 1, 0))
    heads, *repeated = source[axis : axis + 2]
    if len(source) != len(after) + 1 or not all(_is_one(size) for size in repeated):
        return None
    # The heads that follow the first one along the dimension are those of its group.
    group = static(sizes(broadcast)[axis + 1])  # type: ignore[index]
    whole = [*source[: axis + 1], group, *source[axis + 2 :]]
    merged = [*after[:axis], heads, group, *after[axis + 1 :]]
    if group is None or not same_shape(sizes(broadcast), whole) or not same_shape(whole, merged):
        return None
    if not same_shape([after[axis]], [heads * group]):
        return None
    return View(broadcast.args[0], (*view.places[: axis + 1], (None, 1, 0), *view.places[axis + 1 :]), group)


def _part(rewriter: Rewriter, element: relax.TupleGetItem, view: View) -> View | None:
    """The view of the tensor before a split into equal or known parts."""
    split = rewriter.call(element.tuple_value, "split")
    dims = None if split is None else sizes(split.args[0])
    if split is None or dims is None:
        return None
    axis, parts = int(split.attrs.axis) % len(dims), split.attrs.indices_or_sections
    if not isinstance(dims[axis], tirx.IntImm):
        return None
    if isinstance(parts, int | tirx.IntImm):
        begin = -(-int(dims[axis]) // int(parts)) * element.index
    else:
        begin = [0, *(int(place) for place in parts)][element.index]
    places = list(view.places)
    dim, step, offset = places[axis]
    places[axis] = (dim, step, offset + begin)
    return replace(view, base=split.args[0], places=tuple(places))


def _unsqueezed(before: list[Any], after: list[Any] | None, places: list[tuple[int | None, int, int]]) -> Places | None:
    """The places in the tensor before an operator that only adds or removes dimensions of one; None for others."""
    if after is None:
        return None
    rest = [place for place, size in zip(places, after, strict=True) if not _is_one(size)]
    real = [size for size in after if not _is_one(size)]
    if not same_shape([size for size in before if not _is_one(size)], real):
        return None
    remaining = iter(rest)
    return tuple((None, 1, 0) if _is_one(size) else next(remaining) for size in before)


def _is_one(size: Any) -> bool:
    return isinstance(size, tirx.IntImm) and int(size) == 1


def _lowered(rewriter: Rewriter, call: relax.Call, machine: Machine, bf16: bool) -> relax.Expr | None:
    """The call of one function that reads queries, keys and values in place."""
    attrs = call.attrs
    shape, keys = sizes(call.args[0]), sizes(call.args[1])
    if shape is None or keys is None or not is_plain(call) or not same_shape(shape, sizes(call)):
        return None
    if not all(isinstance(size, tirx.IntImm) for size in shape[2:]):
        return None
    views = [view_of(rewriter, item, groups=place > 0) for place, item in enumerate(call.args[:3])]
    if views[1].group != views[2].group:
        views = [view_of(rewriter, item) for item in call.args[:3]]
    bases, numbers = bases_of(rewriter, views)
    # A lane of a dot product multiplies two channels.
    bf16 = bf16 and int(shape[3]) % BF16.group == 0
    # Where there are as many queries as keys, a single query has a single key: a form for that would serve nobody.
    may_be_single = attention.takes_single_queries(int(shape[3]), machine) and not same_shape([shape[1]], [keys[1]])
    has_two_forms = may_be_single and static(shape[1]) is None
    is_single = may_be_single and static(shape[1]) == 1
    bf16 = bf16 and not is_single
    if bf16 and not has_two_forms:
        bases = [rewriter.emit(round_operand(rewriter.builder_, base)) for base in bases]
    query, key, value = (view.places for view in views)
    group = views[1].group
    plan = attention.Plan(
        (query, key, value), tuple(numbers), int(shape[2]), int(shape[3]), group, float(attrs.scale), attrs.causal_mask
    )

    def compute(*tensors: te.Tensor) -> te.Tensor:
        return plan.define(tensors, machine, shape, keys[1], bf16=bf16, is_single=is_single)

    kind: dict[str, Any] = OPAQUE if has_two_forms or group > 1 else FUSABLE if bf16 else {}
    if has_two_forms:
        kind = {**kind, SINGLE_QUERY: plan.text}
    result = rewriter.builder_.call_te(
        compute, *bases, *call.args[3:], primfunc_name_hint="attention", primfunc_attrs=kind
    )
    return relax.op.reshape(rewriter.emit(result), relax.ShapeExpr(shape)) if group > 1 else result


def lower_attention(machine: Machine, bf16: bool) -> tvm.transform.Pass:
    """Return the pass that lowers float32 attention to one function, for this machine.

    The function reads queries, keys and values in place, through the transposes and slices before them. With `bf16`
    they are rounded to bfloat16, and so are the operands of both products; `RoundProducts`, which runs after this pass,
    lets all readers share a rounding. Attention of other types, with a causal mask or with a window is not changed.
    """

    def lower(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
        return _lowered(rewriter, call, machine, bf16)

    return rewriting("LowerAttention", dict.fromkeys(_ATTENTION, (lower,)))
