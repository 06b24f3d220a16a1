"""MaxPool with the indices of the largest elements, and MaxUnpool, which puts elements back at their indices."""

from functools import partial, reduce
from operator import mul
from typing import Any

from tvm import relax, te, tirx

from tvmflow.compiler.onnx.indexing import checked_indices
from tvmflow.compiler.onnx.node import FreeSizeError, Node, UnsupportedFormError
from tvmflow.compiler.onnx.values import dims_of, dtype_of


def convert_max_pool_with_places(node: Node) -> relax.Expr:
    """Return the Relax expression of a MaxPool with two results: the largest elements and their indices.

    An index counts the elements of the whole data tensor; of equal elements it is that of the first. Raises
    FreeSizeError for data of unknown shape.
    """
    data, dims = node.inputs[0], dims_of(node.inputs[0])
    if dims is None:
        raise FreeSizeError("places of the largest elements of data of unknown shape")
    attributes = {name: value for name, value in node.attrs.items() if name not in ("tvm_custom", "storage_order")}
    largest = node.apply("MaxPool", data, **attributes)
    places = node.builder.call_te(partial(_places, node=node), data, largest, primfunc_name_hint="places")
    return relax.Tuple([largest, node.emit(places)])


def _places(data: te.Tensor, largest: te.Tensor, *, node: Node) -> te.Tensor:
    sizes, kernel = list(data.shape[2:]), node.attrs["kernel_shape"]
    rank = len(kernel)
    strides, dilations = (node.attrs.get(name, [1] * rank) for name in ("strides", "dilations"))
    auto_pad = node.text("auto_pad", "NOTSET")
    before: list[Any] = list(node.attrs.get("pads", [0] * 2 * rank))[:rank]
    if auto_pad.startswith("SAME"):
        for i in range(rank):
            missing = (largest.shape[2 + i] - 1) * strides[i] + (kernel[i] - 1) * dilations[i] + 1 - sizes[i]
            before[i] = te.indexdiv(te.max(missing, 0) + int(auto_pad == "SAME_LOWER"), 2)
    elif auto_pad == "VALID":
        before = [0] * rank
    taps = [te.reduce_axis((0, count), f"k{place}") for place, count in enumerate(kernel)]

    def element(n: Any, c: Any, *pixel: Any) -> Any:
        at = [pixel[i] * strides[i] - before[i] + taps[i] * dilations[i] for i in range(rank)]
        inside = [condition for i in range(rank) for condition in (at[i] >= 0, at[i] < sizes[i])]
        near = [te.max(te.min(at[i], sizes[i] - 1), 0) for i in range(rank)]
        place = n * data.shape[1] + c
        for size, index in zip(sizes, near, strict=True):
            place = place * size + index
        is_it = te.all(*inside, data[(n, c, *near)] == largest[(n, c, *pixel)])
        # Where no element is the largest one, as of NaN, the place is the last one of the same channel.
        last = (n * data.shape[1] + c + 1) * reduce(mul, sizes) - 1
        place, last = (tirx.Cast("int64", item) for item in (place, last))
        return te.min(te.if_then_else(is_it, place, last), axis=taps)

    places = te.compute(largest.shape, element, name="places")
    if not node.attrs.get("storage_order", 0):
        return places

    def by_columns(*index: Any) -> Any:
        place, at = places[index], []
        for size in reversed(sizes):
            at.append(te.indexmod(place, size))
            place = te.indexdiv(place, size)
        for size, position in zip(reversed(sizes), at, strict=True):
            place = place * size + position
        return place

    return te.compute(largest.shape, by_columns, name="by_columns")


def convert_max_unpool(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's MaxUnpool: a scatter into zeros that drops elements with indices beyond it.

    Raises FreeSizeError for data of unknown shape. Raises UnsupportedFormError for an `output_shape` that only a run
    knows or that differs from the shape that follows from the window: ONNX takes indices as those of the window's
    shape, but ONNX Runtime as those of `output_shape`.
    """
    (data, places), dims, evaluator = node.inputs[:2], dims_of(node.inputs[0]), node.evaluator
    if dims is None:
        raise FreeSizeError("data of unknown shape")
    kernel = node.attrs["kernel_shape"]
    rank = len(kernel)
    strides, pads = (
        node.attrs.get(name, default) for name, default in (("strides", [1] * rank), ("pads", [0] * 2 * rank))
    )
    shape = dims[:2]
    for axis, size in enumerate(dims[2:]):
        extent = kernel[axis] - pads[axis] - pads[rank + axis] - strides[axis]
        shape.append(evaluator.add(evaluator.multiply(size, strides[axis]), extent))
    own = node.sizes(2)
    if node.input(2) is not None and (own is None or not all(map(evaluator.are_equal, own, shape))):
        raise UnsupportedFormError(
            "an output_shape other than that of its window", "export the model without output_shape"
        )
    total = reduce(evaluator.multiply, shape, 1)
    places = node.emit(relax.op.reshape(node.with_sizes(places, dims), [-1]))
    places = checked_indices(node, places, [total], is_signed=False)
    zeros = node.emit(relax.op.zeros(relax.ShapeExpr([total]), dtype_of(data)))
    flat = node.emit(relax.op.scatter_elements(zeros, places, node.emit(relax.op.reshape(data, [-1])), 0))
    return relax.op.reshape(flat, relax.ShapeExpr(shape))
