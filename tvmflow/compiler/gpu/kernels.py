"""Makes GPU kernels of the functions that multiply matrices: a call of `product.cuh`, and the operators after it."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.tirx import For, ForKind, PrimFunc

from tvmflow.compiler.gpu.definitions import PRODUCT, Product
from tvmflow.compiler.operators.common import static
from tvmflow.compiler.statements import replace_variables

_SOURCE = Path(__file__).with_name("product.cuh")
# Neighbours that a thread computes and stores at once. TVM generates wrong code for constants in vectors of 8 floats.
_VECTOR = 4
# The bytes that a thread copies at once, and the types of numbers in CUDA's words.
_CHUNK = 16
_TYPES = {"float16": "half", "float32": "float"}


def product_kernel(function: PrimFunc) -> PrimFunc | None:
    """Return the kernel for a function with a block that multiplies matrices (`definitions.Product`).

    Returns None for other functions, and where the operators after the product are not element-wise ones on its result.
    """
    plan = _Plan.of(function)
    return None if plan is None else plan.kernel()


class _Plan:
    """A function of a product and of element-wise operators after it, which are one block.

    `product` is the block that multiplies, and `store` writes the result; None if the product's own is the result.
    """

    def __init__(self, function: PrimFunc, product: Any, store: Any | None) -> None:
        self.function = function
        self.details = Product.read(str(product.annotations[PRODUCT]))
        loads = _loads(product.body)
        self.sums = product.writes[0].source
        self.left, self.right = [load.source for load in loads if not load.source.same_as(self.sums)][:2]
        self.store = store
        self.output = store.writes[0].source if store is not None else self.sums

    @classmethod
    def of(cls, function: PrimFunc) -> "_Plan | None":
        schedule = s_tir.Schedule(function)
        blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
        products = [block for block in blocks if PRODUCT in schedule.get(block).annotations]
        if len(products) != 1:
            return None
        (product,) = products
        others = [block for block in blocks if block is not product]
        parameters = list(function.params)
        stores = [block for block in others if _is_one_of(schedule.get(block).writes[0].source, parameters)]
        for block in others:
            if block not in stores:
                try:
                    schedule.compute_inline(block)
                except tvm.s_tir.ScheduleError:
                    return None
        if len(stores) > 1 or (not stores and others):
            return None
        store = schedule.get(stores[0]) if stores else None
        plan = cls(schedule.mod["main"], schedule.get(product), store)
        return plan if plan.is_elementwise() else None

    def is_elementwise(self) -> bool:
        """Whether each element of the result needs the product's element at the same place alone."""
        if not _is_one_of(self.left, self.function.params) or not _is_one_of(self.right, self.function.params):
            return False
        if self.store is None:
            return True
        variables = [item.var for item in self.store.iter_vars]
        body = self.store.body
        if not isinstance(body, tirx.BufferStore) or self.store.init is not None:
            return False
        places = [list(body.indices), *(list(load.indices) for load in _loads(body) if load.source.same_as(self.sums))]
        return all(
            len(place) == len(variables)
            and all(
                one.same_as(other) or (static(extent) == 1 and static(one) == 0)
                for one, other, extent in zip(place, variables, self.sums.shape, strict=True)
            )
            for place in places
        )

    def kernel(self) -> PrimFunc:
        details, tile = self.details, self.details.tile
        shape = list(self.sums.shape)
        first = len(shape) - 2 if details.batched else 0
        leading, inner = shape[:first], shape[first:-1]
        batch, rows = _product(leading) * details.groups, _product(inner)
        columns = details.columns if details.columns is not None else _int32(shape[-1])
        depth = details.depth if details.depth is not None else _int32(self.left.shape[-1])

        row_block, column_block, layer, thread, item = (
            tirx.Var(name, "int32") for name in ("row_block", "column_block", "layer", "thread", "item")
        )
        group = layer // tile.cluster if tile.cluster > 1 else layer
        rank: Any = layer % tile.cluster if tile.cluster > 1 else 0
        itemsize = tvm.DataType(str(self.left.dtype)).bits // 8
        shared = tirx.decl_buffer((tile.shared_bytes(itemsize) // 4,), "float32", "shared", scope="shared.dyn")
        first_row, first_column = row_block * tile.rows, column_block * tile.columns
        call = self._call(shared, group, first_row, first_column, rank, _int32(rows), _int32(columns), _int32(depth))

        vector = math.gcd(_VECTOR, static(columns) or 1)
        part = tile.rows // tile.cluster
        per_row = tile.columns // vector
        total = part * per_row
        place = item * tile.threads + thread
        local_row, local_column = rank * part + place // per_row, place % per_row * vector
        row, column = first_row + local_row, first_column + local_column
        lane = tirx.Var("lane", "int32")
        value = self._store(
            shared, local_row * (tile.columns + 8) + local_column + lane, leading, inner, group, row, column + lane
        )
        if vector > 1:
            value = For(lane, tirx.const(0, "int32"), tirx.const(vector, "int32"), ForKind.VECTORIZED, value)
        else:
            value = replace_variables(value, {lane: tirx.const(0, "int32")})
        conditions = [row < _int32(rows), column < _int32(columns)]
        if total % tile.threads:
            conditions.append(place < total)
        store = For(
            item,
            tirx.const(0, "int32"),
            tirx.const(-(-total // tile.threads), "int32"),
            ForKind.SERIAL,
            tirx.IfThenElse(tirx.all(*conditions), value, None),
        )
        body: Any = tirx.SeqStmt([tirx.AllocBuffer(shared), call, store])
        if tile.cluster > 1:
            body = _bind(tirx.Var("cluster", "int32"), "clusterCtaIdx.z", tile.cluster, body)
        for variable, tag, extent in (
            (thread, "threadIdx.x", tile.threads),
            (layer, "blockIdx.z", _int32(batch) * tile.cluster),
            (column_block, "blockIdx.y", _blocks(columns, tile.columns)),
            (row_block, "blockIdx.x", _blocks(rows, tile.rows)),
        ):
            body = _bind(variable, tag, extent, body)
        attributes = {key: value for key, value in (self.function.attrs or {}).items() if key != "s_tir"}
        return PrimFunc(self.function.params, body, self.function.ret_type).with_attr(
            {**attributes, "tirx.is_scheduled": True}
        )

    def _call(
        self, shared: Any, group: Any, first_row: Any, first_column: Any, rank: Any, rows: Any, columns: Any, depth: Any
    ) -> Any:
        details, tile = self.details, self.details.tile
        left, right = self.left, self.right
        channels_of_tap = left.shape[-1] if details.groups == 1 else left.shape[-1] // details.groups
        numbers = _CHUNK // (tvm.DataType(str(left.dtype)).bits // 8)
        is_wide_left = _is_multiple(left.shape[-1], numbers) and _is_multiple(channels_of_tap, numbers)
        if details.kernel is None:
            window = [1, 1, depth, _int32(left.shape[-1]), 1, 1, 1, 1, 1, 1, 1, 0, 0]
            left_offset = group * rows * depth if details.batched else 0
        else:
            _, height, width, channels = map(_int32, left.shape)
            _, lines, pixels, _ = map(_int32, self.sums.shape)
            per_group = channels // details.groups if details.groups > 1 else channels
            across = details.kernel[1]
            window = [height, width, per_group, channels, lines, pixels, across]
            window += [*details.strides, *details.dilation, *details.padding]
            left_offset = group * per_group if details.groups > 1 else 0
        if details.right == "PACKED":
            stride = _int32(right.shape[-1])
            right_offset = group * _int32(right.shape[-2]) * stride if details.groups > 1 else 0
            is_wide_right = True
        else:
            stride = _int32(right.shape[-1])
            right_offset = group * _int32(right.shape[-2]) * stride
            is_wide_right = _is_multiple(right.shape[-1], numbers)
        parameters = [tile.rows, tile.columns, tile.depth, tile.warp_rows, tile.warp_columns, tile.warp_depths]
        parameters += [tile.stages, tile.cluster]
        words = [
            _TYPES[str(left.dtype)],
            *map(str, parameters),
            _word(is_wide_left),
            f"tvmflow::{details.right}",
            _word(is_wide_right),
        ]
        name = f"tvmflow::product<{', '.join(words)}>"
        return tirx.Evaluate(
            cuda_func_call(
                name,
                left.access_ptr("r", offset=left_offset),
                right.access_ptr("r", offset=right_offset),
                shared.access_ptr("rw"),
                first_row,
                first_column,
                rank,
                rows,
                columns,
                depth,
                stride,
                *window,
                source_code=_SOURCE.read_text(),
            )
        )

    def _store(
        self, shared: Any, place: Any, leading: Sequence[Any], inner: Sequence[Any], group: Any, row: Any, column: Any
    ) -> Any:
        """The statement that computes and stores the element of the result in one row and column."""
        details = self.details
        unit = group * details.columns + column if details.groups > 1 else column
        indices = [*(_split(group, leading) if details.batched else []), *_split(row, inner), unit]
        sums = tirx.BufferLoad(shared, [place])
        if self.store is None:
            return tirx.BufferStore(self.output, sums, indices)
        values = {item.var: index for item, index in zip(self.store.iter_vars, indices, strict=True)}

        def load(node: tvm.ir.TensorLoad) -> Any:
            return sums if node.source.same_as(self.sums) else node

        body = tvm_ffi.structural_map(self.store.body, (tvm.ir.TensorLoad, load))
        return _with_indices(body, values)


def _with_indices(body: Any, values: Any) -> Any:
    typed = {
        variable: value if str(variable.ty) == str(value.ty) else value.astype(str(variable.ty))
        for variable, value in values.items()
    }
    return replace_variables(body, typed)


def _split(flat: Any, shape: Sequence[Any]) -> list[Any]:
    """The index of each dimension of an element whose place in a tensor of this shape is `flat`."""
    indices: list[Any] = []
    for size in reversed(list(shape)[1:]):
        indices.append(flat % _int32(size))
        flat = flat // _int32(size)
    return [flat, *reversed(indices)] if shape else []


def _bind(variable: Any, tag: str, extent: Any, body: Any) -> Any:
    axis = tirx.IterVar(None, tirx.Var("", "int32"), tirx.IterVar.ThreadIndex, tag)
    return For(variable, tirx.const(0, "int32"), _int32(extent), ForKind.THREAD_BINDING, body, thread_binding=axis)


def _blocks(extent: Any, size: int) -> Any:
    return (_int32(extent) + size - 1) // size


def _product(sizes: Sequence[Any]) -> Any:
    total: Any = tirx.const(1, "int32")
    for size in sizes:
        total = total * _int32(size)
    return total


def _int32(size: Any) -> Any:
    number = static(size)
    return size.astype("int32") if number is None else tirx.const(number, "int32")


def _word(value: bool) -> str:
    return "true" if value else "false"


def _is_multiple(size: Any, factor: int) -> bool:
    number = static(size)
    return number is not None and number % factor == 0


def _is_one_of(buffer: Any, buffers: Sequence[Any]) -> bool:
    return any(buffer.same_as(item) for item in buffers)


def _loads(node: Any) -> list[Any]:
    loads: list[Any] = []

    def visit(load: tvm.ir.TensorLoad) -> None:
        loads.append(load)

    tvm_ffi.structural_walk(node, (tvm.ir.TensorLoad, visit))
    return loads
