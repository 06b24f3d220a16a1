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

from tvmflow.compiler.gpu.definitions import ATTENTION, PART, PRODUCT, Attention, Product
from tvmflow.compiler.operators.attention import Places
from tvmflow.compiler.operators.common import static
from tvmflow.compiler.statements import is_one_of, replace_variables

_FOLDER = Path(__file__).parent
# Neighbours that a thread computes and stores at once. TVM generates wrong code for constants in vectors of 8 floats.
_VECTOR = 4
# The bytes that a thread copies at once, and the types of numbers in CUDA's words.
_CHUNK = 16
# Sums between the rows of a tile in shared memory, which belong to no tile (`product.cuh`).
_PADDING = 8
# Indices are integers of 32 bits.
_MOST_ELEMENTS = (1 << 31) - 1
_ONE = tirx.const(1, "int32")
_TYPES = {"float16": "half", "float32": "float"}


def product_kernel(function: PrimFunc) -> PrimFunc | None:
    """Return the kernel for a function that multiplies matrices or computes attention (`definitions`).

    Returns None for other functions, and where the operators after the product are not element-wise ones on its result.
    """
    schedule = s_tir.Schedule(function)
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    for annotation, kind in ((PRODUCT, _ProductKernel), (ATTENTION, _AttentionKernel)):
        found = [block for block in blocks if annotation in schedule.get(block).annotations]
        if len(found) == 1:
            store = _inline_after(schedule, blocks, found[0])
            if store is None:
                return None
            plan: _Kernel = kind(schedule, found[0], store)
            return plan.build() if plan.is_elementwise() else None
    return None


def _inline_after(schedule: s_tir.Schedule, blocks: list[Any], product: Any) -> Any | None:
    """Inline the blocks that do not lead to `product`, and return the one that writes the result.

    It is `product` itself if no block follows. Returns None where a block cannot be inlined, or several write results.
    """
    before = _producers(schedule, product)
    after = [block for block in blocks if not any(schedule.get(block).same_as(other) for other in before)]
    parameters = schedule.mod["main"].params
    stores = [block for block in after if is_one_of(schedule.get(block).writes[0].source, parameters)]
    inlined = [block for block in after if block not in stores and block is not product]
    try:
        for block in inlined:
            schedule.compute_inline(block)
    except s_tir.ScheduleError:
        return None
    return stores[0] if len(stores) == 1 else None


def _producers(schedule: s_tir.Schedule, block: Any) -> list[Any]:
    """The blocks whose results lead to a block."""
    found: list[Any] = []
    for producer in schedule.get_producers(block):
        found += [schedule.get(producer), *_producers(schedule, producer)]
    return found


class _Kernel:
    """The kernel of a function whose first part computes tiles of sums, by CUDA code of this project.

    `sums` is the buffer of the whole result of that part, and `store` the block that applies the operators after it;
    None if there are none. The subclasses say how the sums are divided into tiles.
    """

    # Of each tile: rows, columns and threads. `cluster` thread blocks compute one together.
    tile_rows: int
    tile_columns: int
    threads: int
    cluster = 1

    def __init__(self, schedule: s_tir.Schedule, product: Any, store: Any) -> None:
        block = schedule.get(product)
        self.function = schedule.mod["main"]
        self.block, self.sums = block, block.writes[0].source
        self.store = None if store is product else schedule.get(store)
        self.output = self.sums if self.store is None else self.store.writes[0].source

    def is_elementwise(self) -> bool:
        """Whether the kernel reads parameters alone, and each result needs the sum at the same place alone."""
        if not all(is_one_of(operand, self.function.params) for operand in self.operands()):
            return False
        # A parameter without a buffer is a size.
        buffers = [item for item in self.function.params if tirx.is_buffer_var(item)]
        if any(math.prod(static(size) or 1 for size in item.shape) > _MOST_ELEMENTS for item in buffers):
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

    def operands(self) -> list[Any]:
        """Return the buffers that the CUDA code reads."""
        raise NotImplementedError

    def extents(self) -> tuple[Any, Any, Any]:
        """Return the numbers of rows and of columns of all sums, and of layers of such."""
        raise NotImplementedError

    def shared_bytes(self) -> int:
        """Return the shared memory of a thread block."""
        raise NotImplementedError

    def call(self, shared: Any, layer: Any, first_row: Any, first_column: Any, rank: Any) -> Any:
        """Return the call of the CUDA code that computes a tile of sums in shared memory."""
        raise NotImplementedError

    def place(self, layer: Any, row: Any, column: Any) -> list[Any]:
        """Return the index of a sum."""
        raise NotImplementedError

    def build(self) -> PrimFunc:
        """Return the function as a kernel."""
        rows, columns, layers = self.extents()
        block, column_block, rank, thread, item = (
            tirx.Var(name, "int32") for name in ("block", "column_block", "rank", "thread", "item")
        )
        # A grid can have any number of blocks along x alone.
        row_blocks = _blocks(rows, self.tile_rows)
        layer, row_block = block // row_blocks, block % row_blocks
        shared = tirx.decl_buffer((self.shared_bytes() // 4,), "float32", "shared", scope="shared.dyn")
        first_row, first_column = row_block * self.tile_rows, column_block * self.tile_columns
        call = self.call(shared, layer, first_row, first_column, rank)

        vector = math.gcd(_VECTOR, static(columns) or 1)
        part = self.tile_rows // self.cluster
        per_row = self.tile_columns // vector
        total = part * per_row
        place = item * self.threads + thread
        local_row, local_column = rank * part + place // per_row, place % per_row * vector
        row, column = first_row + local_row, first_column + local_column
        lane = tirx.Var("lane", "int32")
        value = self._store(
            shared, local_row * (self.tile_columns + _PADDING) + local_column + lane, layer, row, column + lane
        )
        if vector > 1:
            value = _for_lanes(lane, vector, value)
        else:
            value = replace_variables(value, {lane: tirx.const(0, "int32")})
        conditions = [row < rows, column < columns]
        if total % self.threads:
            conditions.append(place < total)
        store = For(
            item,
            tirx.const(0, "int32"),
            tirx.const(-(-total // self.threads), "int32"),
            ForKind.SERIAL,
            tirx.IfThenElse(tirx.all(*conditions), value, None),
        )
        body: Any = tirx.SeqStmt([tirx.AllocBuffer(shared), tirx.Evaluate(call), store])
        if self.cluster > 1:
            body = _bind(tirx.Var("cluster", "int32"), "clusterCtaIdx.z", self.cluster, body)
        for variable, tag, extent in (
            (thread, "threadIdx.x", self.threads),
            (rank, "blockIdx.z", self.cluster),
            (column_block, "blockIdx.y", _blocks(columns, self.tile_columns)),
            (block, "blockIdx.x", row_blocks * layers),
        ):
            body = _bind(variable, tag, extent, body)
        attributes = {key: value for key, value in (self.function.attrs or {}).items() if key != "s_tir"}
        return PrimFunc(self.function.params, body, self.function.ret_type).with_attr(
            {**attributes, "tirx.is_scheduled": True}
        )

    def _store(self, shared: Any, place: Any, layer: Any, row: Any, column: Any) -> Any:
        """The statement that computes and stores the element of the result in one row and column."""
        indices = self.place(layer, row, column)
        sums = tirx.BufferLoad(shared, [place])
        if self.store is None:
            return tirx.BufferStore(self.output, sums, indices)
        values = {item.var: index for item, index in zip(self.store.iter_vars, indices, strict=True)}

        def load(node: tvm.ir.TensorLoad) -> Any:
            return sums if node.source.same_as(self.sums) else node

        return _with_indices(tvm_ffi.structural_map(self.store.body, (tvm.ir.TensorLoad, load)), values)


def _for_lanes(lane: tirx.Var, lanes: int, store: tirx.BufferStore) -> Any:
    """The statement that stores `lanes` neighbours at once, from the one that stores the `lane`-th of them."""
    start, end = tirx.const(0, "int32"), tirx.const(lanes, "int32")
    if not _has_condition(store.value):
        return For(lane, start, end, ForKind.VECTORIZED, store)
    # TVM generates wrong code for conditions in vectors: they are computed one by one.
    values = tirx.decl_buffer((lanes,), str(store.value.ty.dtype), "values", scope="local")
    compute = For(lane, start, end, ForKind.UNROLLED, tirx.BufferStore(values, store.value, [lane]))
    own = tirx.Var("lane", "int32")
    copy = replace_variables(
        tirx.BufferStore(store.buffer, tirx.BufferLoad(values, [lane]), list(store.indices)), {lane: own}
    )
    return tirx.SeqStmt([tirx.AllocBuffer(values), compute, For(own, start, end, ForKind.VECTORIZED, copy)])


def _has_condition(value: Any) -> bool:
    """Whether a part of an expression is true or false."""
    types: list[str] = []
    tvm_ffi.structural_walk(value, (tvm.ir.Expr, lambda item: types.append(str(item.ty))))
    return any(item.startswith("bool") for item in types)


class _ProductKernel(_Kernel):
    """A convolution or a product of matrices, by `product.cuh`."""

    def __init__(self, schedule: s_tir.Schedule, product: Any, store: Any) -> None:
        super().__init__(schedule, product, store)
        self.details = Product.read(str(self.block.annotations[PRODUCT]))
        tile = self.details.tile
        self.tile_rows, self.tile_columns, self.threads = tile.rows, tile.columns, tile.threads
        self.cluster = tile.cluster
        loads = _loads(self.block.body)
        self.left, self.right = [load.source for load in loads if not load.source.same_as(self.sums)][:2]
        self.depth = self.details.depth if self.details.depth is not None else _int32(self.left.shape[-1])
        shape = list(self.sums.shape)
        count = len(shape) - 2 if self.details.batched else 0
        self.leading, self.inner = shape[:count], shape[count:-1]

    def operands(self) -> list[Any]:
        return [self.left, self.right]

    def extents(self) -> tuple[Any, Any, Any]:
        columns = self.details.columns if self.details.columns is not None else self.sums.shape[-1]
        rows, layers = (math.prod(map(_int32, sizes), start=_ONE) for sizes in (self.inner, self.leading))
        return rows, _int32(columns), layers * self.details.groups

    def shared_bytes(self) -> int:
        return self.details.tile.shared_bytes(_bytes(self.left))

    def place(self, layer: Any, row: Any, column: Any) -> list[Any]:
        unit = layer * self.details.columns + column if self.details.groups > 1 else column
        return [*_split(layer, self.leading), *_split(row, self.inner), unit]

    def call(self, shared: Any, layer: Any, first_row: Any, first_column: Any, rank: Any) -> Any:
        details, tile, left, right = self.details, self.details.tile, self.left, self.right
        rows, columns, _ = self.extents()
        depth = _int32(self.depth)
        channels = left.shape[-1] if details.groups == 1 else left.shape[-1] // details.groups
        numbers = _CHUNK // _bytes(left)
        is_wide_left = _is_multiple(left.shape[-1], numbers) and _is_multiple(channels, numbers)
        if details.kernel is None:
            window = [1, 1, depth, _int32(left.shape[-1]), 1, 1, 1, 1, 1, 1, 1, 0, 0]
            left_offset = layer * rows * depth if details.batched else 0
        else:
            _, height, width, pitch = map(_int32, left.shape)
            _, lines, pixels, _ = map(_int32, self.sums.shape)
            window = [height, width, _int32(channels), pitch, lines, pixels, details.kernel[1]]
            window += [*details.strides, *details.dilation, *details.padding]
            left_offset = layer * _int32(channels) if details.groups > 1 else 0
        stride = _int32(right.shape[-1])
        is_apart = details.groups > 1 or details.right != "PACKED"
        right_offset = layer * _int32(right.shape[-2]) * stride if is_apart else 0
        is_wide_right = details.right == "PACKED" or _is_multiple(right.shape[-1], numbers)
        sizes = [tile.rows, tile.columns, tile.depth, tile.warp_rows, tile.warp_columns, tile.warp_depths]
        parameters = [_TYPES[str(left.dtype)], *map(str, [*sizes, tile.stages, tile.cluster]), _word(is_wide_left)]
        return cuda_func_call(
            f"tvmflow::product<{', '.join([*parameters, f'tvmflow::{details.right}', _word(is_wide_right)])}>",
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
            source_code=_source("product.cuh"),
        )


class _AttentionKernel(_Kernel):
    """Attention over queries, keys and values in `[batch, positions, heads, channels]`, by `attention.cuh`."""

    def __init__(self, schedule: s_tir.Schedule, product: Any, store: Any) -> None:
        super().__init__(schedule, product, store)
        self.details = Attention.read(str(self.block.annotations[ATTENTION]))
        parts = {
            str(block.annotations[PART]): block for block in _producers(schedule, product) if PART in block.annotations
        }
        # A block lists a tensor once for each place where it reads it; queries, keys and values may be of one tensor.
        self.query, self.key = _others(parts["scores"])[:2]
        self.value = next(load for load in _others(self.block) if is_one_of(load, self.function.params))
        self.mask = None
        if "mask" in parts:
            self.mask = next(load for load in _others(parts["mask"]) if is_one_of(load, self.function.params))
        self.tile_rows, self.threads = 16 * self.details.row_warps, self.details.threads
        self.channels = int(self.sums.shape[-1])
        self.tile_columns = -(-self.channels // 16) * 16

    def operands(self) -> list[Any]:
        return [self.query, self.key, self.value, *([] if self.mask is None else [self.mask])]

    def extents(self) -> tuple[Any, Any, Any]:
        batch, queries, heads, channels = map(_int32, self.sums.shape)
        return queries, channels, batch * heads

    def shared_bytes(self) -> int:
        return self.details.shared_bytes(self.channels)

    def place(self, layer: Any, row: Any, column: Any) -> list[Any]:
        heads = _int32(self.sums.shape[2])
        return [layer // heads, row, layer % heads, column]

    def call(self, shared: Any, layer: Any, first_row: Any, first_column: Any, rank: Any) -> Any:
        details, heads = self.details, _int32(self.sums.shape[2])
        image, head = layer // heads, layer % heads
        operands, pitches, counts = [], [], []
        for item, places in zip((self.query, self.key, self.value), details.places, strict=True):
            offset, strides = _strides(item, places)
            operands.append(item.access_ptr("r", offset=offset + image * strides[0] + head * strides[2]))
            pitches.append(strides[1])
            counts.append(next(size for size, (dim, _, _) in zip(item.shape, places, strict=True) if dim == 1))
        steps = [tirx.const(0, "int32")] * 4
        mask = shared.access_ptr("r")
        if self.mask is not None:
            step: Any = tirx.const(1, "int32")
            for axis in (3, 2, 1, 0):
                size = self.mask.shape[axis]
                steps[axis] = tirx.const(0, "int32") if static(size) == 1 else step
                step = step * _int32(size)
            mask = self.mask.access_ptr("r", offset=image * steps[0] + head * steps[1])
        parameters = [details.row_warps, details.key_warps, self.tile_columns, details.keys]
        words = [*map(str, parameters), _word(self.mask is not None), _word(details.zero_for_nan)]
        return cuda_func_call(
            f"tvmflow::attention<{', '.join(words)}>",
            *operands,
            mask,
            shared.access_ptr("rw"),
            first_row,
            _int32(self.sums.shape[1]),
            _int32(counts[1]),
            tirx.const(self.channels, "int32"),
            *pitches,
            steps[2],
            steps[3],
            tirx.const(details.scale, "float32"),
            source_code=_source("product.cuh") + _source("attention.cuh"),
        )


def _strides(buffer: Any, places: Places) -> tuple[Any, list[Any]]:
    """Where the view of a buffer begins, and how far its neighbours along each of its four dimensions are apart."""
    offset: Any = tirx.const(0, "int32")
    strides: list[Any] = [tirx.const(0, "int32")] * 4
    stride: Any = tirx.const(1, "int32")
    for size, (dim, step, start) in zip(reversed(buffer.shape), reversed(places), strict=True):
        offset = offset + stride * start
        if dim is not None:
            strides[dim] = stride * step
        stride = stride * _int32(size)
    return offset, strides


def _others(block: Any) -> list[Any]:
    """The buffers that a block reads, in order, without the one that it writes."""
    written = block.writes[0].source
    return [load.source for load in _loads(block.body) if not load.source.same_as(written)]


def _source(name: str) -> str:
    return (_FOLDER / name).read_text()


def _bytes(buffer: Any) -> int:
    return int(tvm.DataType(str(buffer.dtype)).bits) // 8


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


def _int32(size: Any) -> Any:
    number = static(size)
    return size.astype("int32") if number is None else tirx.const(number, "int32")


def _word(value: bool) -> str:
    return "true" if value else "false"


def _is_multiple(size: Any, factor: int) -> bool:
    number = static(size)
    return number is not None and number % factor == 0


def _loads(node: Any) -> list[Any]:
    loads: list[Any] = []

    def visit(load: tvm.ir.TensorLoad) -> None:
        loads.append(load)

    tvm_ffi.structural_walk(node, (tvm.ir.TensorLoad, visit))
    return loads
