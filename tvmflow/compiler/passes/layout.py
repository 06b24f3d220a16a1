"""Computes on tensors with the channels last: transposes move down the graph until they cancel."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.compiler.machine import NARROWEST
from tvmflow.compiler.operators.common import are_equal, same_shape, typical
from tvmflow.compiler.passes.functions import relax_functions, rewrite_functions, variables_of_outputs
from tvmflow.compiler.passes.rewrite import sizes


@dataclass(frozen=True)
class _Permuted:
    """The value `permute_dims(base, axes)`, whose transpose is not computed."""

    base: relax.Expr
    axes: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """Whether the dimensions are in their own order."""
        return self.axes == tuple(range(len(self.axes)))

    @property
    def sizes(self) -> list[Any]:
        """Return the sizes of the value's dimensions."""
        return [self.base.ty.shape.values[axis] for axis in self.axes]


@tvm.transform.module_pass(opt_level=0, name="ChannelsLast")
class ChannelsLast:
    """Computes convolutions, and the operators between them, on tensors whose channels are the last dimension.

    A convolution reads and writes tensors with the channels last. The transposes around it, and those of the model, are
    not computed where they are: every operator that can work on another order of dimensions does so. A transpose moves
    down until it cancels with another, or until an operator or an output needs the model's own order. An output that
    joins tensors of both orders, such as a decoder's cache and the keys of its next token, is computed in the model's
    own order. `lanes` is the number of channels in a vector register.
    """

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with every Relax function rewritten."""
        return rewrite_functions(_Layout(mod, self._lanes), mod)


@mutator
class _Layout(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule, lanes: int) -> None:
        super().__init__(mod)
        self.lanes = lanes
        # The fewest neighbours in memory that are worth keeping together.
        self.run = max(lanes // 2, NARROWEST)
        self._values: dict[relax.Var, _Permuted] = {}
        self._tuples: dict[relax.Var, _Permuted] = {}
        self._computed: dict[relax.Var, relax.Expr] = {}
        self._outputs = set().union(*map(variables_of_outputs, relax_functions(mod).values()))
        # Whether the value that is rewritten is an output of its function.
        self.is_output = False

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        variable, value = binding.var, binding.value
        result: _Permuted | None = None
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in self._tuples:
            whole = self._tuples[value.tuple_value]
            result = _Permuted(self.emit(relax.TupleGetItem(whole.base, value.index)), whole.axes)
        elif isinstance(value, relax.Var):
            result = self._values.get(value) or self._tuples.get(value)
        elif isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op):
            rule = _RULES.get(value.op.name)
            self.is_output = variable in self._outputs
            result = None if rule is None else rule(self, value)
        if result is None:
            super().visit_var_binding_(binding)
        elif not isinstance(variable, relax.DataflowVar):
            # A value that leaves the block has the model's own order.
            self._leave(variable, result)
        elif isinstance(result.base.ty, relax.TupleType):
            self._tuples[variable] = result
        elif result.is_plain:
            self.set_var_remap(variable, result.base)
        else:
            self._values[variable] = result

    def visit_match_cast_(self, binding: relax.MatchCast) -> None:
        """Check the sizes of a tensor in the order in which it is stored."""
        value = self._values.get(binding.value)
        if value is None:
            super().visit_match_cast_(binding)
            return
        sizes, places = binding.ty.shape, _inverse(value.axes)
        shape = [sizes.values[place] for place in places] if isinstance(sizes, relax.ShapeExpr) else None
        ty = relax.TensorType(shape, binding.ty.dtype, ndim=len(places) if shape is None else -1)
        result = _Permuted(self.builder_.match_cast(value.base, ty), value.axes)
        if isinstance(binding.var, relax.DataflowVar):
            self._values[binding.var] = result
        else:
            self._leave(binding.var, result)

    def _leave(self, variable: relax.Var, result: _Permuted) -> None:
        value = self._plain(result)
        inside = self.builder_.current_block_is_dataflow()
        self.set_var_remap(variable, self.builder_.emit_output(value) if inside else self.emit(value))

    def _plain(self, value: _Permuted) -> relax.Expr:
        if not isinstance(value.base.ty, relax.TupleType):
            return self.ordered(value, range(len(value.axes)))
        places = range(len(value.base.ty.fields))
        fields = [_Permuted(self.emit(relax.TupleGetItem(value.base, place)), value.axes) for place in places]
        return relax.Tuple([self._plain(field) for field in fields])

    def visit_dataflow_var_(self, op: relax.DataflowVar) -> relax.Expr:
        """Return the value of a variable with its axes in the model's own order."""
        value = self._tuples.get(op) or self._values.get(op)
        if value is None:
            return super().visit_dataflow_var_(op)
        if op not in self._computed:
            self._computed[op] = self._plain(value)
        return self._computed[op]

    def emit(self, expr: relax.Expr) -> relax.Var:
        return self.builder_.emit(expr)

    def value(self, expr: relax.Expr) -> _Permuted | None:
        """Return an operand with its pending transpose; None where its rank is unknown."""
        if expr in self._values:
            return self._values[expr]
        ty = expr.ty
        if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
            return None
        return _Permuted(self.visit_expr(expr), tuple(range(len(ty.shape.values))))

    def ordered(self, value: _Permuted, axes: Sequence[int]) -> relax.Expr:
        """Return the expression that, transposed by `axes`, is the value."""
        moves = _inverse(axes)
        order = [value.axes[place] for place in moves]
        if order == sorted(order):
            return value.base
        sizes = value.base.ty.shape.values
        long_axes = [axis for axis in order if not _is_one(sizes[axis])]
        if long_axes == sorted(long_axes):
            return self.emit(relax.op.reshape(value.base, [sizes[axis] for axis in order]))
        return self.emit(relax.op.permute_dims(value.base, order))

    def aligned(self, value: _Permuted, axes: Sequence[int]) -> relax.Expr:
        """Return what `ordered` returns, for an operand of an element-wise operator, which may have a smaller rank."""
        missing = len(axes) - len(value.axes)
        if not value.axes or missing == 0:
            return self.ordered(value, axes) if value.axes else value.base
        places = (*range(missing), *(axis + missing for axis in value.axes))
        return self.ordered(_Permuted(self.emit(relax.op.expand_dims(value.base, list(range(missing)))), places), axes)


def _inverse(axes: Sequence[int]) -> list[int]:
    return [list(axes).index(place) for place in range(len(axes))]


def _is_one(size: Any) -> bool:
    return isinstance(size, tvm.tirx.IntImm) and int(size) == 1


def _with_changes(attrs: Any, changes: Mapping[str, Any]) -> Any:
    """A copy of an operator's attributes with some changed."""
    info = type(attrs).__tvm_ffi_type_info__
    fields = {field.name: getattr(attrs, field.name) for field in info.fields}
    return tvm.ir.make_node(info.type_key, **{**fields, **changes})


def _call(
    layout: _Layout, call: relax.Call, args: Sequence[relax.Expr], changes: Mapping[str, Any] | None = None
) -> relax.Var:
    """The same operator on other operands, with some attributes changed."""
    attrs = _with_changes(call.attrs, changes) if changes else call.attrs
    return layout.emit(relax.Call(call.op, list(args), attrs))


def _operands(layout: _Layout, exprs: Sequence[relax.Expr]) -> list[_Permuted] | None:
    values = [layout.value(expr) for expr in exprs]
    return None if any(value is None for value in values) else [value for value in values if value is not None]


def _order(values: Sequence[_Permuted], prefers_plain: bool = False) -> tuple[int, ...] | None:
    """Return the order of the largest operand; None if it is plain.

    Among equal ones it is the order of one that is not plain, unless `prefers_plain`.
    """
    rank = max(len(value.axes) for value in values)
    full = [value for value in values if len(value.axes) == rank and not isinstance(value.base, tvm.ir.GenericConst)]
    best = max(full, key=lambda value: (_elements(value.sizes), value.is_plain == prefers_plain), default=None)
    return None if best is None or best.is_plain else best.axes


def _elements(sizes: Sequence[Any]) -> int:
    return math.prod(map(typical, sizes))


_Rule = Callable[[_Layout, relax.Call], _Permuted | None]


def _on_transposed(rule: Callable[[_Layout, relax.Call, _Permuted], _Permuted | None]) -> _Rule:
    """Make a rule for calls of which the first operand has a pending transpose; `rule` gets this operand as well."""

    def apply(layout: _Layout, call: relax.Call) -> _Permuted | None:
        value = layout.value(call.args[0])
        return None if value is None or value.is_plain else rule(layout, call, value)

    return apply


def _elementwise(layout: _Layout, call: relax.Call) -> _Permuted | None:
    tensors = [arg for arg in call.args if isinstance(arg.ty, relax.TensorType)]
    values = _operands(layout, tensors)
    axes = _order(values) if values else None
    if values is None or axes is None or _repeats_all(call, values):
        return None
    operands = iter([layout.aligned(value, axes) for value in values])
    args = [next(operands) if isinstance(arg.ty, relax.TensorType) else layout.visit_expr(arg) for arg in call.args]
    return _Permuted(_call(layout, call, args), axes)


def _repeats_all(call: relax.Call, values: Sequence[_Permuted]) -> bool:
    """Whether the result is larger than each operand, as sums of all pairs are: it is dearer to transpose than they."""
    shape = call.ty.shape if isinstance(call.ty, relax.TensorType) else None
    largest = max(_elements(value.sizes) for value in values)
    return isinstance(shape, relax.ShapeExpr) and _elements(shape.values) > largest


def _permute_dims(layout: _Layout, call: relax.Call) -> _Permuted | None:
    value = layout.value(call.args[0])
    if value is None or isinstance(value.base, tvm.ir.GenericConst):
        return None
    axes = call.attrs.axes
    places = reversed(range(len(value.axes))) if axes is None else [int(axis) % len(value.axes) for axis in axes]
    return _Permuted(value.base, tuple(value.axes[place] for place in places))


def _spatial(layouts: str, kernel: str | None, *, always: bool) -> _Rule:
    """A rule for operators with a layout: convolutions always get channels last, others where the operand has them."""
    attribute = "layout" if kernel is None else "data_layout"

    def rule(layout: _Layout, call: relax.Call) -> _Permuted | None:
        attrs = call.attrs
        out_layout = getattr(attrs, "out_layout", layouts)
        value = layout.value(call.args[0])
        if value is None or getattr(attrs, attribute) != layouts or out_layout not in ("", layouts):
            return None
        if kernel is not None and attrs.kernel_layout != kernel:
            return None
        axes = (0, len(layouts) - 1, *range(1, len(layouts) - 1))
        if not always and value.axes != axes:
            return None
        last = layouts[0] + layouts[2:] + layouts[1]
        changes = {attribute: last, **({"out_layout": last} if hasattr(attrs, "out_layout") else {})}
        args = [layout.ordered(value, axes), *(layout.visit_expr(arg) for arg in call.args[1:])]
        return _Permuted(_call(layout, call, args, changes), axes)

    return rule


def _pool2d(layout: _Layout, call: relax.Call) -> _Permuted | None:
    """Pool with the channels last; where windows overlap, this is worth two transposes."""
    return _spatial("NCHW", None, always=_is_worth_transposes(layout, call))(layout, call)


def _is_worth_transposes(layout: _Layout, call: relax.Call) -> bool:
    """Whether the channels of a pooling fill a vector, and its windows overlap, or lie in padding of free sizes."""
    shape = call.args[0].ty.shape.values if isinstance(call.args[0].ty.shape, relax.ShapeExpr) else []
    is_wide = len(shape) > 2 and isinstance(shape[1], tvm.tirx.IntImm) and int(shape[1]) >= layout.lanes
    # Each element of a window would be compared with ends of the data that only a run knows.
    is_free = any(map(int, call.attrs.padding)) and not all(isinstance(size, tvm.tirx.IntImm) for size in shape[2:])
    overlap = any(
        int(size) > int(stride) for size, stride in zip(call.attrs.pool_size, call.attrs.strides, strict=True)
    )
    return is_wide and (is_free or overlap)


@_on_transposed
def _pool1d(layout: _Layout, call: relax.Call, value: _Permuted) -> _Permuted | None:
    """Write one-dimensional pooling as pooling of images one line high."""
    if value.axes != (0, 2, 1) or (call.attrs.layout, call.attrs.out_layout) != ("NCW", "NCW"):
        return None
    size, stride, dilation = (int(item[0]) for item in (call.attrs.pool_size, call.attrs.strides, call.attrs.dilation))
    before, after = (int(item) for item in call.attrs.padding)
    image = layout.emit(relax.op.expand_dims(value.base, 1))
    pooled = _pool_images(layout, call, image, [1, size], [1, stride], [1, dilation], [0, before, 0, after])
    return _Permuted(layout.emit(relax.op.squeeze(pooled, [1])), value.axes)


def _pool3d(layout: _Layout, call: relax.Call) -> _Permuted | None:
    """Pool within every slice, then across slices: a window's maximum or mean is that of its slices' results.

    Where windows overlap, channels that come last are worth two transposes, but for windows of one slice of known size
    with a stride along the width: there the windows of a line fill vectors, and transposes of large data take as long.
    """
    value, out, attrs, axes = layout.value(call.args[0]), sizes(call), call.attrs, (0, 4, 1, 2, 3)
    if value is None or out is None or (attrs.layout, attrs.out_layout) != ("NCDHW", "NCDHW"):
        return None
    is_known = all(isinstance(size, tvm.tirx.IntImm) for size in out)
    is_flat = is_known and int(attrs.pool_size[0]) == 1 and int(attrs.strides[2]) > 1
    if value.axes != axes and (is_flat or not _is_worth_transposes(layout, call)):
        return None
    data = layout.ordered(value, axes)
    batch, depth, *image = data.ty.shape.values
    size, strides, dilation, pads = (
        [int(item) for item in values] for values in (attrs.pool_size, attrs.strides, attrs.dilation, attrs.padding)
    )
    images = layout.emit(relax.op.reshape(data, [batch * depth, *image]))
    flat = _pool_images(layout, call, images, size[1:], strides[1:], dilation[1:], [*pads[1:3], *pads[4:]])
    lines = layout.emit(relax.op.reshape(flat, [batch, depth, out[3] * out[4], out[1]]))
    front, back = pads[0], pads[3]
    deep = _pool_images(layout, call, lines, [size[0], 1], [strides[0], 1], [dilation[0], 1], [front, 0, back, 0])
    return _Permuted(layout.emit(relax.op.reshape(deep, [batch, *out[2:], out[1]])), axes)


def _pool_images(
    layout: _Layout,
    call: relax.Call,
    images: relax.Expr,
    size: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
) -> relax.Expr:
    """Pooling of `[N, H, W, C]` in the mode of one of other dimensions; the images if windows have a single pixel."""
    if {*size, *strides} == {1} and not any(padding):
        return images
    pool = relax.op.nn.max_pool2d if "max" in call.op.name else relax.op.nn.avg_pool2d
    modes = (call.attrs.ceil_mode, call.attrs.count_include_pad)
    return layout.emit(pool(images, size, strides, padding, dilation, *modes, layout="NHWC", out_layout="NHWC"))


@_on_transposed
def _reduction(layout: _Layout, call: relax.Call, value: _Permuted) -> _Permuted | None:
    rank, axis = len(value.axes), call.attrs.axis
    single = isinstance(axis, int | tvm.tirx.IntImm)
    places = range(rank) if axis is None else [int(item) % rank for item in ([axis] if single else axis)]
    base_axes = sorted(value.axes[place] for place in places)
    changes = {} if axis is None else {"axis": base_axes[0] if single else base_axes}
    result = _call(layout, call, [value.base], changes)
    if call.attrs.keepdims:
        return _Permuted(result, value.axes)
    return _Permuted(result, _without(value.axes, base_axes))


def _without(axes: Sequence[int], base_axes: Sequence[int]) -> tuple[int, ...]:
    """The order of the dimensions that remain when `base_axes` are removed from the base."""
    rest = [axis for axis in axes if axis not in base_axes]
    return tuple(sorted(rest).index(axis) for axis in rest)


@_on_transposed
def _along(layout: _Layout, call: relax.Call, value: _Permuted) -> _Permuted | None:
    """Operators along one dimension that keep the shape. Operands after the first are numbers or are along it, too."""
    if call.attrs.axis is None:
        return None
    axis = value.axes[int(call.attrs.axis) % len(value.axes)]
    return _Permuted(
        _call(layout, call, [value.base, *map(layout.visit_expr, call.args[1:])], {"axis": axis}), value.axes
    )


@_on_transposed
def _norm(layout: _Layout, call: relax.Call, value: _Permuted) -> _Permuted | None:
    """Norms over the last dimensions, which stay there."""
    rank = len(value.axes)
    axes = [int(axis) % rank for axis in call.attrs.axes]
    if axes != list(range(rank - len(axes), rank)) or [value.axes[axis] for axis in axes] != axes:
        return None
    return _Permuted(_call(layout, call, [value.base, *map(layout.visit_expr, call.args[1:])]), value.axes)


@_on_transposed
def _channel_norm(layout: _Layout, call: relax.Call, value: _Permuted) -> _Permuted | None:
    """Norms over the dimensions of each group of channels."""
    rank = len(value.axes)
    channel = value.axes[int(call.attrs.channel_axis) % rank]
    axes = sorted(value.axes[int(axis) % rank] for axis in call.attrs.axes)
    args = [value.base, *map(layout.visit_expr, call.args[1:])]
    return _Permuted(_call(layout, call, args, {"channel_axis": channel, "axes": axes}), value.axes)


def _concat(layout: _Layout, call: relax.Call) -> _Permuted | None:
    if not isinstance(call.args[0], relax.Tuple) or call.attrs.axis is None:
        return None
    values = _operands(layout, list(call.args[0].fields))
    # An output needs the plain order. Other operators may be computed with the kernel whose result they read.
    axes = _order(values, prefers_plain=layout.is_output) if values else None
    if values is None or axes is None:
        return None
    fields = relax.Tuple([layout.ordered(value, axes) for value in values])
    return _Permuted(_call(layout, call, [fields], {"axis": axes[int(call.attrs.axis) % len(axes)]}), axes)


@_on_transposed
def _split(layout: _Layout, call: relax.Call, value: _Permuted) -> _Permuted | None:
    axis = value.axes[int(call.attrs.axis) % len(value.axes)]
    return _Permuted(_call(layout, call, [value.base], {"axis": axis}), value.axes)


@_on_transposed
def _strided_slice(layout: _Layout, call: relax.Call, value: _Permuted) -> _Permuted | None:
    if not isinstance(call.args[1], relax.Tuple):
        return None
    axes = relax.Tuple([tvm.tirx.IntImm("int64", value.axes[int(axis) % len(value.axes)]) for axis in call.args[1]])
    args = [value.base, axes, *map(layout.visit_expr, call.args[2:])]
    return _Permuted(_call(layout, call, args), value.axes)


@_on_transposed
def _pad(layout: _Layout, call: relax.Call, value: _Permuted) -> _Permuted | None:
    widths = [int(width) for width in call.attrs.pad_width]
    base_widths = [width for place in _inverse(value.axes) for width in widths[2 * place : 2 * place + 2]]
    return _Permuted(_call(layout, call, [value.base], {"pad_width": base_widths}), value.axes)


@_on_transposed
def _tile(layout: _Layout, call: relax.Call, value: _Permuted) -> _Permuted | None:
    if len(call.attrs.repeats) != len(value.axes):
        return None
    repeats = [int(call.attrs.repeats[place]) for place in _inverse(value.axes)]
    return _Permuted(_call(layout, call, [value.base], {"repeats": repeats}), value.axes)


@_on_transposed
def _broadcast_to(layout: _Layout, call: relax.Call, value: _Permuted) -> _Permuted | None:
    target = sizes(call)
    if target is None or len(target) != len(value.axes):
        return None
    return _Permuted(
        layout.emit(relax.op.broadcast_to(value.base, [target[i] for i in _inverse(value.axes)])), value.axes
    )


@_on_transposed
def _reshape(layout: _Layout, call: relax.Call, value: _Permuted) -> _Permuted | None:
    """Reshape, or add or remove dimensions of size one.

    Dimensions that merge must be neighbours in memory; where they are not, a transpose brings them together first.
    """
    target = sizes(call)
    groups = None if target is None else _groups(value.sizes, target)
    if target is None or groups is None:
        return None
    ones = [place for place, size in enumerate(value.sizes) if _is_one(size)]
    stored_axes = [place for place in _inverse(value.axes) if place not in ones]
    memory = stored_axes
    for before, _ in groups:
        memory = _together(memory, before, value.sizes, layout.run)
    base = value.base
    if memory != stored_axes:
        base = layout.emit(relax.op.permute_dims(base, [value.axes[place] for place in (*ones, *memory)]))
    becomes = {before[0]: after for before, after in groups}
    order = [place for first in memory for place in becomes.get(first, [])]
    for place in (place for place, size in enumerate(target) if _is_one(size)):
        # A leading dimension stays first in memory; another goes before the dimension that follows it, or at the end.
        following = next((other for other in range(place + 1, len(target)) if other in order), None)
        leading = all(_is_one(size) for size in target[:place])
        order.insert(place if leading else len(order) if following is None else order.index(following), place)
    shape = [target[place] for place in order]
    if not same_shape(base.ty.shape.values, shape):
        base = layout.emit(relax.op.reshape(base, shape))
    return _Permuted(base, tuple(_inverse(order)))


def _groups(sizes: Sequence[Any], target: Sequence[Any]) -> list[tuple[list[int], list[int]]] | None:
    """Group the dimensions that a reshape merges or splits, as (before, after), without those of size one.

    None where symbols leave the groups unknown.
    """
    rest = [place for place, size in enumerate(sizes) if not _is_one(size)]
    right = [place for place, size in enumerate(target) if not _is_one(size)]
    groups = []
    while rest and right:
        before, after = [rest.pop(0)], [right.pop(0)]
        while not are_equal(_product(sizes, before), _product(target, after)):
            wide = _elements([sizes[place] for place in before]), _elements([target[place] for place in after])
            group, source = (before, rest) if wide[0] < wide[1] else (after, right)
            if not source:
                return None
            group.append(source.pop(0))
        groups.append((before, after))
    return None if rest or right else groups


def _product(sizes: Sequence[Any], places: Sequence[int]) -> Any:
    total = sizes[places[0]]
    for place in places[1:]:
        total = total * sizes[place]
    return total


def _together(memory: list[int], places: list[int], sizes: Sequence[Any], run: int) -> list[int]:
    """The order in memory with the dimensions `places` next to each other, in that order.

    They meet where the innermost of them is, if it ends a run of at least `run` numbers, else where the largest is.
    """
    first = memory.index(places[0])
    if memory[first : first + len(places)] == places:
        return memory
    last = places[-1]
    anchor = max(places, key=lambda place: _elements([sizes[place]]))
    if memory[-1] == last and _elements([sizes[last]]) >= run:
        anchor = last
    rest = [place for place in memory if place not in places or place == anchor]
    where = rest.index(anchor)
    return [*rest[:where], *places, *rest[where + 1 :]]


_UNARY = (
    "abs acos acosh asin asinh atan atanh bitwise_not ceil clip cos cosh erf exp floor isfinite isinf isnan log "
    "logical_not negative round rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc astype nn.relu nn.relu6 nn.silu "
    "nn.gelu nn.gelu_tanh nn.leakyrelu nn.selu nn.softplus"
)
_BINARY = (
    "add subtract multiply divide floor_divide power maximum minimum mod floor_mod log_add_exp atan2 equal not_equal "
    "greater greater_equal less less_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor "
    "left_shift right_shift where"
)
# The operators that compute an element of their result from the operands' elements at the same place.
ELEMENTWISE = frozenset(f"relax.{name}" for name in (*_UNARY.split(), *_BINARY.split()))
_RULES: dict[str, _Rule] = {
    "relax.nn.conv1d": _spatial("NCW", "OIW", always=True),
    "relax.nn.conv2d": _spatial("NCHW", "OIHW", always=True),
    **{f"relax.nn.{kind}_pool1d": _pool1d for kind in ("max", "avg")},
    **{f"relax.nn.{kind}_pool2d": _pool2d for kind in ("max", "avg")},
    **{f"relax.nn.{kind}_pool3d": _pool3d for kind in ("max", "avg")},
    "relax.nn.adaptive_avg_pool2d": _spatial("NCHW", None, always=False),
    "relax.image.resize2d": _spatial("NCHW", None, always=False),
    "relax.permute_dims": _permute_dims,
    "relax.concat": _concat,
    "relax.split": _split,
    "relax.strided_slice": _strided_slice,
    "relax.nn.pad": _pad,
    "relax.tile": _tile,
    "relax.broadcast_to": _broadcast_to,
    "relax.nn.layer_norm": _norm,
    "relax.nn.rms_norm": _norm,
    "relax.nn.group_norm": _channel_norm,
    "relax.nn.instance_norm": _channel_norm,
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **{f"relax.{name}": _reshape for name in ("reshape", "expand_dims", "squeeze", "flatten", "nn.batch_flatten")},
    **{
        f"relax.{name}": _reduction
        for name in ("sum", "mean", "max", "min", "prod", "variance", "std", "argmax", "argmin")
    },
    **{
        f"relax.{name}": _along
        for name in (
            *("nn.softmax", "nn.log_softmax", "nn.prelu", "cumsum", "cumprod", "repeat", "flip"),
            *("quantize", "dequantize"),
        )
    },
}
